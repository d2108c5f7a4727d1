#include "output/renumber.h"

#include <string.h>

typedef struct cursor {
    const char *p, *end;
} cursor;

static bool text(cursor *c, const char *want)
{
    size_t n = strlen(want);
    if ((size_t)(c->end - c->p) < n || memcmp(c->p, want, n) != 0) return false;
    c->p += n;
    return true;
}

static bool number(cursor *c, bg_slice *out)
{
    const char *start = c->p;
    while (c->p < c->end && *c->p >= '0' && *c->p <= '9')
        c->p++;
    *out = (bg_slice){start, (size_t)(c->p - start)};
    return c->p > start;
}

static bool skip_number(cursor *c)
{
    bg_slice ignored;
    return number(c, &ignored);
}

static bool value(cursor *c, bg_slice *out)
{
    const char *p = bg_lens_skip(c->p, c->end, out);
    if (!p || out->p != c->p) return false;
    c->p = p;
    return true;
}

static bool body(cursor *c, bg_result_parts *p)
{
    bg_slice all;
    cursor in = *c;
    if (!value(c, &all)) return false;
    if (text(&in, "{\"id\":\"chatcmpl-") || text(&in, "{\"id\":\"cmpl-")) {
        p->body_id = (bg_slice){all.p, (size_t)(in.p - all.p)};
        if (!skip_number(&in)) return false;
    }
    p->body = (bg_slice){in.p, (size_t)(c->p - in.p)};
    return true;
}

static bool error(cursor *c, bg_result_parts *p)
{
    bg_slice ignored;
    const char *start = c->p;
    if (text(c, "null")) return true;
    if (!text(c, "{\"code\":") || !value(c, &ignored) || !text(c, ",\"message\":") ||
        !value(c, &ignored) || !text(c, ",\"line\":"))
        return false;
    p->error = (bg_slice){start, (size_t)(c->p - start)};
    return skip_number(c) && text(c, "}");
}

static bool openai(cursor *c, bg_result_parts *p)
{
    bg_slice line;
    p->openai = true;
    if (!skip_number(c) || !text(c, "\",\"custom_id\":") || !value(c, &p->id) ||
        !text(c, ",\"response\":{\"status_code\":") || !number(c, &p->status) ||
        !text(c, ",\"request_id\":\"req_") || !skip_number(c) || !text(c, "\",\"body\":") ||
        !body(c, p) || !text(c, "},\"error\":") || !error(c, p) || !text(c, ",\"line\":") ||
        !number(c, &line))
        return false;
    p->line = bg_lens_int(line, -1);
    if (text(c, ",\"file\":") && !value(c, &p->file)) return false;
    return text(c, "}\n");
}

static bool plain(cursor *c, bg_result_parts *p)
{
    bg_slice line;
    if (!number(c, &line)) return false;
    p->line = bg_lens_int(line, -1);
    if (text(c, ",\"file\":") && !value(c, &p->file)) return false;
    if (p->file.p && text(c, ",\"record\":") && !skip_number(c)) return false;
    p->rest = (bg_slice){c->p, (size_t)(c->end - c->p)};
    if (!text(c, ",\"id\":")) return false;
    c->p = c->end;
    return p->rest.n > 1 && c->end[-1] == '\n';
}

bool bg_result_take_apart(const char *line, size_t n, bg_result_parts *p)
{
    cursor c = {line, line + n};
    *p = (bg_result_parts){0};
    bool ok =
        text(&c, "{\"id\":\"batch_req_") ? openai(&c, p) : text(&c, "{\"line\":") && plain(&c, p);
    return ok && c.p == c.end && p->line >= 0;
}

static void put(bg_buf *b, bg_slice s)
{
    if (s.n) bg_buf_add(b, s.p, s.n);
}

static void put_file(bg_buf *b, const char *file_name)
{
    if (!file_name) return;
    bg_buf_str(b, ",\"file\":");
    bg_buf_json(b, file_name, strlen(file_name));
}

void bg_result_renumber(const bg_result_parts *p, int64_t record, int64_t line,
                        const char *file_name, bg_buf *b)
{
    long long r = record, l = line;
    if (!p->openai) {
        bg_buf_printf(b, "{\"line\":%lld", l);
        put_file(b, file_name);
        if (file_name) bg_buf_printf(b, ",\"record\":%lld", r);
        put(b, p->rest);
        return;
    }
    bg_buf_printf(b, "{\"id\":\"batch_req_%lld\",\"custom_id\":", r);
    put(b, p->id);
    bg_buf_str(b, ",\"response\":{\"status_code\":");
    put(b, p->status);
    bg_buf_printf(b, ",\"request_id\":\"req_%lld\",\"body\":", r);
    put(b, p->body_id);
    if (p->body_id.p) bg_buf_printf(b, "%lld", r);
    put(b, p->body);
    bg_buf_str(b, "},\"error\":");
    put(b, p->error);
    if (p->error.p)
        bg_buf_printf(b, "%lld}", l);
    else
        bg_buf_str(b, "null");
    bg_buf_printf(b, ",\"line\":%lld", l);
    put_file(b, file_name);
    bg_buf_str(b, "}\n");
}
