#include "text/jinja_value.h"

#include <string.h>

#include "base/utf8.h"
#include "text/jinja_unicode.h"

/* A string over bytes that already exist, with its buffer and its one run in the same block. */
typedef struct whole_str {
    jn_str s;
    jn_buf buf;
    jn_run run;
} whole_str;

bool jn_str_wrap(jn_state *r, const char *p, size_t n, bool trusted, jn_val *out)
{
    whole_str *w = jn_new(r, sizeof *w);
    if (!w) return false;
    w->run = (jn_run){.end = n, .trusted = trusted};
    /* Never written through: cap == len. */
    w->buf = (jn_buf){.p = (char *)(uintptr_t)p, .len = n, .cap = n, .runs = &w->run};
    w->buf.n_runs = w->buf.cap_runs = n > 0;
    w->s = (jn_str){.buf = &w->buf, .n = n};
    *out = (jn_val){.kind = JN_STR, .s = &w->s};
    return true;
}

bool jn_str_copy(jn_state *r, const char *p, size_t n, bool trusted, jn_val *out)
{
    char *q = jn_new(r, n);
    if (!q) return false;
    if (n) memcpy(q, p, n);
    return jn_str_wrap(r, q, n, trusted, out);
}

bool jn_str_text(jn_state *r, const char *text, jn_val *out)
{
    return jn_str_wrap(r, text, strlen(text), true, out);
}

bool jn_str_sub(jn_state *r, const jn_str *s, size_t off, size_t n, jn_val *out)
{
    if (off == 0 && n == s->n) {
        *out = (jn_val){.kind = JN_STR, .s = s};
        return true;
    }
    jn_str *sub = jn_new(r, sizeof *sub);
    if (!sub) return false;
    *sub = (jn_str){.buf = s->buf, .off = s->off + off, .n = n, .safe = s->safe};
    *out = (jn_val){.kind = JN_STR, .s = sub};
    return true;
}

const char *jn_bytes(const jn_str *s)
{
    return s->n ? s->buf->p + s->off : "";
}

bool jn_str_is(const jn_str *s, const char *text)
{
    size_t n = strlen(text);
    return s->n == n && memcmp(jn_bytes(s), text, n) == 0;
}

bool jn_str_eq(const jn_str *a, const jn_str *b)
{
    return a->n == b->n && memcmp(jn_bytes(a), jn_bytes(b), a->n) == 0;
}

/* The run that holds byte `at` of the buffer. */
static const jn_run *run_at(const jn_buf *b, size_t at)
{
    size_t lo = 0, hi = b->n_runs;
    while (lo < hi) {
        size_t mid = (lo + hi) / 2;
        if (b->runs[mid].end <= at)
            lo = mid + 1;
        else
            hi = mid;
    }
    return &b->runs[lo];
}

size_t jn_str_run(const jn_str *s, size_t at, bool *trusted)
{
    const jn_run *run = run_at(s->buf, s->off + at);
    size_t n = run->end - (s->off + at);
    *trusted = run->trusted;
    return n < s->n - at ? n : s->n - at;
}

bool jn_str_trusted(const jn_str *s)
{
    bool trusted = true;
    for (size_t at = 0; trusted && at < s->n;)
        at += jn_str_run(s, at, &trusted);
    return trusted;
}

/* ---- building ---- */

jn_buf *jn_buf_new(jn_state *r)
{
    return jn_new(r, sizeof(jn_buf));
}

static bool reserve(jn_state *r, jn_buf *b, size_t n)
{
    if (n > r->lim.output_bytes || b->len > r->lim.output_bytes - n)
        return jn_fail(r, "the text grows over the limit of %zu bytes", r->lim.output_bytes);
    size_t need = b->len + n;
    if (need <= b->cap) return true;
    size_t cap = need < 32 ? 64 : need * 2;
    char *p = jn_arena_grow(r->arena, b->p, b->len, cap);
    if (!p) return jn_no_memory(r);
    b->p = p;
    b->cap = cap;
    return true;
}

static bool extend_runs(jn_state *r, jn_buf *b, size_t n, bool trusted)
{
    if (b->n_runs && b->runs[b->n_runs - 1].trusted == trusted) {
        b->runs[b->n_runs - 1].end += n;
        return true;
    }
    if (b->n_runs == b->cap_runs) {
        size_t cap = b->cap_runs ? b->cap_runs * 2 : 2;
        jn_run *runs =
            jn_arena_grow(r->arena, b->runs, b->n_runs * sizeof *runs, cap * sizeof *runs);
        if (!runs) return jn_no_memory(r);
        b->runs = runs;
        b->cap_runs = cap;
    }
    b->runs[b->n_runs++] = (jn_run){.end = b->len + n, .trusted = trusted};
    return true;
}

bool jn_put(jn_state *r, jn_buf *b, const char *p, size_t n, bool trusted)
{
    if (n == 0) return true;
    if (!jn_work(r, n) || !reserve(r, b, n) || !extend_runs(r, b, n, trusted)) return false;
    memcpy(b->p + b->len, p, n);
    b->len += n;
    return true;
}

bool jn_put_text(jn_state *r, jn_buf *b, const char *text)
{
    return jn_put(r, b, text, strlen(text), true);
}

bool jn_put_cp(jn_state *r, jn_buf *b, uint32_t cp, bool trusted)
{
    char c[4];
    return jn_put(r, b, c, bg_utf8_put(c, cp), trusted);
}

bool jn_put_part(jn_state *r, jn_buf *b, const jn_str *s, size_t off, size_t n)
{
    for (size_t end = off + n; off < end;) {
        bool trusted;
        size_t k = jn_str_run(s, off, &trusted);
        if (k > end - off) k = end - off;
        if (!jn_put(r, b, jn_bytes(s) + off, k, trusted)) return false;
        off += k;
    }
    return true;
}

bool jn_put_str(jn_state *r, jn_buf *b, const jn_str *s)
{
    return jn_put_part(r, b, s, 0, s->n);
}

static bool whole(jn_state *r, const jn_buf *b, bool safe, jn_val *out)
{
    jn_str *s = jn_new(r, sizeof *s);
    if (!s) return false;
    *s = (jn_str){.buf = b, .n = b->len, .safe = safe};
    *out = (jn_val){.kind = JN_STR, .s = s};
    return true;
}

bool jn_finish(jn_state *r, jn_buf *b, jn_val *out)
{
    b->cap = b->len;
    return whole(r, b, false, out);
}

static bool put_escaped(jn_state *r, jn_buf *b, const jn_str *s)
{
    static const char *const names[] = {"&amp;", "&lt;", "&gt;", "&#39;", "&#34;"};
    static const char chars[] = "&<>'\"";
    size_t start = 0;
    for (size_t i = 0; i < s->n; i++) {
        const char *c = strchr(chars, jn_bytes(s)[i]);
        if (!c || !*c) continue;
        bool trusted;
        jn_str_run(s, i, &trusted);
        const char *name = names[c - chars];
        if (!jn_put_part(r, b, s, start, i - start) || !jn_put(r, b, name, strlen(name), trusted))
            return false;
        start = i + 1;
    }
    return jn_put_part(r, b, s, start, s->n - start);
}

bool jn_str_escape(jn_state *r, const jn_str *s, jn_val *out)
{
    jn_buf *b = jn_buf_new(r);
    if (!b || !put_escaped(r, b, s)) return false;
    b->cap = b->len;
    return whole(r, b, true, out);
}

bool jn_str_concat(jn_state *r, const jn_str *a, const jn_str *b, jn_val *out)
{
    if (a->safe != b->safe) {
        jn_val escaped;
        if (!jn_str_escape(r, a->safe ? b : a, &escaped)) return false;
        if (a->safe)
            b = escaped.s;
        else
            a = escaped.s;
    }
    if (a->n == 0 || b->n == 0) {
        *out = (jn_val){.kind = JN_STR, .s = a->n ? a : b};
        return true;
    }
    /* Only buffers made below have room behind their end; they belong to this render. */
    jn_buf *grown = (jn_buf *)(uintptr_t)a->buf;
    if (a->off + a->n != grown->len || grown->cap - grown->len < b->n) {
        grown = jn_buf_new(r);
        if (!grown || !reserve(r, grown, a->n + b->n) || !jn_put_str(r, grown, a)) return false;
        if (!jn_put_str(r, grown, b)) return false;
        return whole(r, grown, a->safe, out);
    }
    jn_str *s = jn_new(r, sizeof *s);
    if (!s) return false;
    *s = (jn_str){.buf = grown, .off = a->off, .n = a->n + b->n, .safe = a->safe};
    if (!jn_put_str(r, grown, b)) return false;
    *out = (jn_val){.kind = JN_STR, .s = s};
    return true;
}

/* ---- code points ---- */

size_t jn_cp_len(const char *p, size_t n)
{
    uint32_t cp;
    return (unsigned char)*p < 0x80 ? 1 : bg_utf8_next(p, n, &cp);
}

size_t jn_cp_count(const char *p, size_t n)
{
    size_t count = 0;
    for (size_t i = 0; i < n; count++)
        i += jn_cp_len(p + i, n - i);
    return count;
}

size_t jn_cp_offset(const char *p, size_t n, size_t index)
{
    size_t i = 0;
    for (; index && i < n; index--)
        i += jn_cp_len(p + i, n - i);
    return i;
}

size_t jn_find(const char *p, size_t n, const char *sub, size_t n_sub, size_t from)
{
    if (from > n || n_sub > n - from) return SIZE_MAX;
    if (n_sub == 0) return from;
    const char *q = memmem(p + from, n - from, sub, n_sub);
    return q ? (size_t)(q - p) : SIZE_MAX;
}

size_t jn_rfind(const char *p, size_t n, const char *sub, size_t n_sub)
{
    if (n_sub > n) return SIZE_MAX;
    for (size_t i = n - n_sub + 1; i-- > 0;)
        if (n_sub == 0 || (p[i] == sub[0] && memcmp(p + i, sub, n_sub) == 0)) return i;
    return SIZE_MAX;
}

static bool strips(const char *p, size_t n, const jn_str *chars)
{
    if (!chars) {
        uint32_t cp = (unsigned char)*p;
        if (cp >= 0x80) bg_utf8_next(p, n, &cp);
        return jn_is_space(cp);
    }
    for (size_t i = 0, k; i < chars->n; i += k) {
        k = jn_cp_len(jn_bytes(chars) + i, chars->n - i);
        if (k == n && memcmp(jn_bytes(chars) + i, p, n) == 0) return true;
    }
    return false;
}

/* Length of the last character of p[0..n). */
static size_t last_len(const char *p, size_t n)
{
    for (size_t k = n < 4 ? n : 4; k > 1; k--)
        if ((unsigned char)p[n - k] >= 0xc0 && jn_cp_len(p + n - k, k) == k) return k;
    return 1;
}

void jn_strip(const jn_str *s, const jn_str *chars, bool left, bool right, size_t *off, size_t *n)
{
    const char *p = jn_bytes(s);
    size_t from = 0, to = s->n;
    for (size_t k; left && from < to; from += k) {
        k = jn_cp_len(p + from, to - from);
        if (!strips(p + from, k, chars)) break;
    }
    for (size_t k; right && to > from; to -= k) {
        k = last_len(p + from, to - from);
        if (!strips(p + to - k, k, chars)) break;
    }
    *off = from;
    *n = to - from;
}
