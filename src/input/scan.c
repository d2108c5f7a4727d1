#include "input/scan.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

enum { MAX_DEPTH = 32 };

typedef struct level {
    bool object, have_key, have_value;
    size_t key_at, key_n; /* without its quotes, as written */
    long index;
} level;

typedef struct found {
    int count;
    size_t at, n;
} found;

/* The end of the string that starts at s[i] (a quote): past its closing quote; 0: it has none. */
static size_t string_end(const char *s, size_t i, size_t end)
{
    for (i++; i < end; i++) {
        if (s[i] == '\\')
            i++;
        else if (s[i] == '"')
            return i + 1;
    }
    return 0;
}

static size_t word_end(const char *s, size_t i, size_t end)
{
    while (i < end && (!s[i] || !strchr(",:{}[]\" \t\r\n", s[i])))
        i++;
    return i;
}

static bool key_is(const char *s, const level *l, const char *name)
{
    return l->have_key && l->key_n == strlen(name) && memcmp(s + l->key_at, name, l->key_n) == 0;
}

static void print_path(const char *s, const level *stack, int depth, char *out, size_t size)
{
    size_t n = 0;
    out[0] = 0;
    for (int i = 0; i < depth && n < size; i++) {
        const level *l = &stack[i];
        int w = 0;
        if (!l->object)
            w = snprintf(out + n, size - n, "[%ld]", l->index);
        else if (l->have_key)
            w = snprintf(out + n, size - n, "%s%.*s", n ? "." : "",
                         (int)(l->key_n < 64 ? l->key_n : 64), s + l->key_at);
        if (w > 0) n += (size_t)w;
    }
}

void bg_scan_line(const char *s, size_t n, size_t end, bg_scan *out)
{
    level stack[MAX_DEPTH] = {{0}};
    int depth = 0; /* levels open; those past MAX_DEPTH are counted, not kept */
    found custom = {0}, plain = {0};
    *out = (bg_scan){0};
    if (end > n) end = n;
    for (size_t i = 0; i < end;) {
        level *top = depth > 0 && depth <= MAX_DEPTH ? &stack[depth - 1] : NULL;
        char c = s[i];
        if (c == '{' || c == '[') {
            if (depth < MAX_DEPTH) stack[depth] = (level){.object = c == '{'};
            depth++;
            i++;
        } else if (c == '}' || c == ']') {
            if (depth) depth--;
            i++;
        } else if (c == ',') {
            if (top) {
                top->have_key = top->have_value = false;
                top->index++;
            }
            i++;
        } else if (c == ':' || c == ' ' || c == '\t' || c == '\r') {
            i++;
        } else {
            size_t stop = c == '"' ? string_end(s, i, end) : word_end(s, i, end);
            if (c == '"' && !stop) break;
            if (stop == i) stop++;
            if (top && top->object && !top->have_key && c == '"') {
                top->have_key = true;
                top->key_at = i + 1;
                top->key_n = stop - i - 2;
                if (depth == 1 && key_is(s, top, "custom_id")) custom.count++;
                if (depth == 1 && key_is(s, top, "id")) plain.count++;
                if (depth == 1 && (key_is(s, top, "custom_id") || key_is(s, top, "method") ||
                                   key_is(s, top, "url") || key_is(s, top, "body")))
                    out->batch = true;
            } else if (depth == 1 && top->object && !top->have_value && (c == '"' || stop < end)) {
                /* (a word that touches the end may go on behind it; a second word in one place
                   is not the value of that key) */
                found *f = key_is(s, top, "custom_id") ? &custom
                           : key_is(s, top, "id")      ? &plain
                                                       : NULL;
                if (f) {
                    f->at = i;
                    f->n = stop - i;
                }
                top->have_value = true;
            }
            i = stop;
        }
    }
    const found *f = custom.count ? &custom : &plain;
    if (f->count == 1) {
        out->id_at = f->at;
        out->id_n = f->n;
    }
    print_path(s, stack, depth < MAX_DEPTH ? depth : MAX_DEPTH, out->path, sizeof out->path);
}

/* Whether at least `more` bytes of s[0..n) are brackets that open something, in strings or not. */
static bool may_nest(const char *s, size_t n, int more)
{
    for (int k = 0; k < 2; k++) {
        const char *end = s + n, *at = s;
        while (more > 0 && (at = memchr(at, k ? '[' : '{', (size_t)(end - at)))) {
            more--;
            at++;
        }
    }
    return more <= 0;
}

/* As string_end(), but fast for long strings; n: it has no end. */
static size_t skip_string(const char *s, size_t i, size_t n)
{
    size_t start = i + 1;
    for (size_t from = start;;) {
        const char *quote = memchr(s + from, '"', n - from);
        if (!quote) return n;
        size_t at = (size_t)(quote - s), b = at;
        while (b > start && s[b - 1] == '\\')
            b--;
        if ((at - b) % 2 == 0) return at + 1;
        from = at + 1;
    }
}

size_t bg_scan_too_deep(const char *s, size_t n, int max)
{
    if (!may_nest(s, n, max + 1)) return 0; /* nearly every line: no more is looked at */
    int depth = 0;
    for (size_t i = 0; i < n;) {
        char c = s[i];
        if (c == '"') {
            i = skip_string(s, i, n);
            continue;
        }
        if ((c == '{' || c == '[') && ++depth > max) return i + 1;
        if ((c == '}' || c == ']') && depth) depth--;
        i++;
    }
    return 0;
}
