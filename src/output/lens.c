#include "output/lens.h"

#include <string.h>

enum { MAX_DEPTH = 4096 };

static const char *space(const char *p, const char *end)
{
    while (p < end && (*p == ' ' || *p == '\t' || *p == '\n' || *p == '\r'))
        p++;
    return p;
}

static bool hex4(const char *p, const char *end)
{
    if (end - p < 4) return false;
    for (int i = 0; i < 4; i++)
        if (!((p[i] >= '0' && p[i] <= '9') || (p[i] >= 'a' && p[i] <= 'f') ||
              (p[i] >= 'A' && p[i] <= 'F')))
            return false;
    return true;
}

/* p is at the opening quote; behind the closing one. NULL: no string. */
static const char *string(const char *p, const char *end)
{
    for (p++; p < end; p++) {
        unsigned char c = (unsigned char)*p;
        if (c == '"') return p + 1;
        if (c < 0x20) return NULL;
        if (c != '\\') continue;
        if (++p == end) return NULL;
        if (*p == 'u') {
            if (!hex4(p + 1, end)) return NULL;
            p += 4;
        } else if (!strchr("\"\\/bfnrt", *p) || !*p) {
            return NULL;
        }
    }
    return NULL;
}

static const char *digits(const char *p, const char *end)
{
    const char *start = p;
    while (p < end && *p >= '0' && *p <= '9')
        p++;
    return p > start ? p : NULL;
}

static const char *number(const char *p, const char *end)
{
    if (p < end && *p == '-') p++;
    if (p < end && *p == '0')
        p++;
    else if (!(p = digits(p, end)))
        return NULL;
    if (p < end && *p == '.' && !(p = digits(p + 1, end))) return NULL;
    if (p < end && (*p == 'e' || *p == 'E')) {
        p++;
        if (p < end && (*p == '+' || *p == '-')) p++;
        p = digits(p, end);
    }
    return p;
}

static const char *word(const char *p, const char *end, const char *text)
{
    size_t n = strlen(text);
    return (size_t)(end - p) >= n && memcmp(p, text, n) == 0 ? p + n : NULL;
}

/* A value that holds no others. */
static const char *scalar(const char *p, const char *end)
{
    switch (*p) {
    case '"':
        return string(p, end);
    case 't':
        return word(p, end, "true");
    case 'f':
        return word(p, end, "false");
    case 'n':
        return word(p, end, "null");
    default:
        return number(p, end);
    }
}

/* A member's key and colon; at the value. NULL: none. */
static const char *key(const char *p, const char *end)
{
    p = space(p, end);
    if (p == end || *p != '"' || !(p = string(p, end))) return NULL;
    p = space(p, end);
    return p < end && *p == ':' ? p + 1 : NULL;
}

const char *bg_lens_skip(const char *p, const char *end, bg_slice *value)
{
    *value = (bg_slice){0};
    p = space(p, end);
    const char *start = p;
    if (p < end && *p != '{' && *p != '[') {
        p = scalar(p, end);
        if (p) *value = (bg_slice){start, (size_t)(p - start)};
        return p;
    }
    unsigned char objects[MAX_DEPTH / 8] = {0}; /* bit: this level is an object */
    int depth = 0;
    for (;;) { /* at the start of a value */
        p = space(p, end);
        if (p == end) return NULL;
        if (*p == '{' || *p == '[') {
            bool object = *p == '{';
            const char *next = space(p + 1, end);
            if (next == end) return NULL;
            if (*next == (object ? '}' : ']')) {
                p = next + 1;
            } else {
                if (depth == MAX_DEPTH) return NULL;
                unsigned char bit = (unsigned char)(1u << (depth & 7));
                if (object)
                    objects[depth >> 3] |= bit;
                else
                    objects[depth >> 3] &= (unsigned char)~bit;
                depth++;
                p = object ? key(next, end) : next;
                if (!p) return NULL;
                continue;
            }
        } else if (!(p = scalar(p, end))) {
            return NULL;
        }
        while (depth) { /* behind a value */
            bool object = objects[(depth - 1) >> 3] & 1u << ((depth - 1) & 7);
            p = space(p, end);
            if (p == end) return NULL;
            if (*p == ',') {
                p = object ? key(p + 1, end) : p + 1;
                if (!p) return NULL;
                break;
            }
            if (*p != (object ? '}' : ']')) return NULL;
            p++;
            depth--;
        }
        if (!depth) break;
    }
    *value = (bg_slice){start, (size_t)(p - start)};
    return p;
}

bool bg_lens_next(bg_slice *at, bg_slice *name, bg_slice *value)
{
    *name = *value = (bg_slice){0};
    if (!at->p || at->n < 2) return false;
    /* the last byte closes what the first opens; once moved on, the first is the comma before it */
    const char *p = space(at->p, at->p + at->n), *end = at->p + at->n - 1;
    if (p >= end || (*p != '{' && *p != '[' && *p != ',')) return false;
    bool object = *end == '}';
    if (!object && *end != ']') return false;
    p = space(p + 1, end);
    if (p == end) return false;
    if (object) {
        const char *quote = p, *colon = key(p, end);
        if (!colon) return false;
        const char *behind = string(quote, end);
        *name = (bg_slice){quote + 1, (size_t)(behind - quote) - 2};
        p = colon;
    }
    p = bg_lens_skip(p, end, value);
    if (!p) return false;
    p = space(p, end);
    *at = (bg_slice){p, (size_t)(end + 1 - p)};
    return true;
}

bg_slice bg_lens_member(bg_slice object, const char *name, size_t n_name)
{
    bg_slice at = object, key_name, value;
    if (!object.p || !object.n || *object.p != '{') return (bg_slice){0};
    while (bg_lens_next(&at, &key_name, &value))
        if (key_name.n == n_name && memcmp(key_name.p, name, n_name) == 0) return value;
    return (bg_slice){0};
}

static bg_slice element(bg_slice array, const char *index, size_t n)
{
    bg_slice at = array, none, value;
    uint64_t i = 0;
    if (n == 0 || n > 18) return (bg_slice){0};
    for (size_t k = 0; k < n; k++) {
        if (index[k] < '0' || index[k] > '9') return (bg_slice){0};
        i = i * 10 + (uint64_t)(index[k] - '0');
    }
    while (bg_lens_next(&at, &none, &value))
        if (i-- == 0) return value;
    return (bg_slice){0};
}

bg_slice bg_lens_path(bg_slice value, const char *path)
{
    while (value.p && *path) {
        size_t n = strcspn(path, ".");
        if (*value.p == '[')
            value = element(value, path, n);
        else
            value = bg_lens_member(value, path, n);
        path += n + (path[n] == '.');
    }
    return value;
}

int64_t bg_lens_int(bg_slice value, int64_t fallback)
{
    int64_t v = 0;
    if (!value.p || value.n == 0 || value.n > 18) return fallback;
    for (size_t i = 0; i < value.n; i++) {
        if (value.p[i] < '0' || value.p[i] > '9') return fallback;
        v = v * 10 + (value.p[i] - '0');
    }
    return v;
}

bool bg_lens_is(bg_slice value, const char *text)
{
    return value.p && value.n == strlen(text) && memcmp(value.p, text, value.n) == 0;
}
