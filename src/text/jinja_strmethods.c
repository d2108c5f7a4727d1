/* Methods of str. They keep the provenance of every byte that they keep. */
#include <string.h>

#include "text/jinja_builtin.h"
#include "text/jinja_unicode.h"

/* A str argument, or NULL when it was left out or is None. */
static bool opt_str(jn_state *r, jn_val v, const jn_str **s)
{
    *s = NULL;
    return v.kind == JN_MISSING || v.kind == JN_NONE || jn_want_str(r, v, s);
}

static bool opt_int(jn_state *r, jn_val v, int64_t def, int64_t *i)
{
    *i = def;
    return v.kind == JN_MISSING || jn_want_int(r, v, i);
}

static bool no_args(jn_state *r, const char *what, const jn_args *a)
{
    return jn_bind(r, what, a, "", 0, NULL);
}

/* ---- case ---- */

typedef enum case_rule { UPPER, LOWER, CAPITALIZE, TITLE, SWAP } case_rule;

static size_t map_char(case_rule rule, bool first, bool after_cased, uint32_t c, uint32_t to[3])
{
    bool up = rule == UPPER || (rule == CAPITALIZE && first) || (rule == TITLE && !after_cased) ||
              (rule == SWAP && jn_is_lower(c));
    if (!up) return jn_lower(c, to);
    size_t n = jn_upper(c, to);
    if (rule == CAPITALIZE || rule == TITLE) /* title case: only the first of "SS" is large */
        for (size_t i = 1; i < n; i++) {
            uint32_t low[2];
            jn_lower(to[i], low);
            to[i] = low[0];
        }
    return n;
}

static bool change_case(jn_state *r, const jn_str *s, case_rule rule, jn_val *out)
{
    jn_buf *b = jn_buf_new(r);
    bool first = true, cased = false;
    if (!b) return false;
    for (size_t at = 0; at < s->n;) {
        bool trusted;
        size_t end = at + jn_str_run(s, at, &trusted);
        while (at < end) {
            char text[64];
            size_t n = 0;
            while (at < end && n + 16 < sizeof text) {
                const char *p = jn_bytes(s) + at;
                uint32_t c, to[3];
                size_t k = bg_utf8_next(p, end - at, &c);
                if (c == BG_UTF8_BAD) {
                    memcpy(text + n, p, k);
                    n += k;
                } else {
                    size_t m = map_char(rule, first, cased, c, to);
                    for (size_t i = 0; i < m; i++)
                        n += bg_utf8_put(text + n, to[i]);
                    cased = jn_is_upper(c) || jn_is_lower(c);
                }
                first = false;
                at += k;
            }
            if (!jn_put(r, b, text, n, trusted)) return false;
        }
    }
    if (!jn_finish(r, b, out)) return false;
    if (s->safe) ((jn_str *)(uintptr_t)out->s)->safe = true;
    return true;
}

bool jn_str_upper(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    return no_args(r, "upper", a) && change_case(r, self.s, UPPER, out);
}

bool jn_str_lower(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    return no_args(r, "lower", a) && change_case(r, self.s, LOWER, out);
}

bool jn_str_capitalize(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    return no_args(r, "capitalize", a) && change_case(r, self.s, CAPITALIZE, out);
}

/* By way of upper case, where sharp s and ligatures come apart. */
static bool casefold(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    return no_args(r, "casefold", a) && change_case(r, self.s, UPPER, &self) &&
           change_case(r, self.s, LOWER, out);
}

static bool title(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    return no_args(r, "title", a) && change_case(r, self.s, TITLE, out);
}

static bool swapcase(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    return no_args(r, "swapcase", a) && change_case(r, self.s, SWAP, out);
}

/* ---- ends ---- */

static bool strip_ends(jn_state *r, jn_val self, const jn_args *a, bool left, bool right,
                       jn_val *out)
{
    jn_val v;
    const jn_str *chars;
    size_t off, n;
    if (!jn_bind(r, "strip", a, "chars", 0, &v) || !opt_str(r, v, &chars)) return false;
    if (!jn_work(r, self.s->n)) return false;
    jn_strip(self.s, chars, left, right, &off, &n);
    return jn_str_sub(r, self.s, off, n, out);
}

static bool strip(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    return strip_ends(r, self, a, true, true, out);
}

static bool lstrip(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    return strip_ends(r, self, a, true, false, out);
}

static bool rstrip(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    return strip_ends(r, self, a, false, true, out);
}

static bool has_end(const jn_str *s, const jn_str *end, bool front)
{
    return end->n <= s->n &&
           memcmp(jn_bytes(s) + (front ? 0 : s->n - end->n), jn_bytes(end), end->n) == 0;
}

/* The window that optional start and end arguments (in characters) cut out; *valid as Python: false
 * when start lies behind the end. */
static bool window(jn_state *r, const jn_str *s, jn_val start, jn_val end, jn_str *w, bool *valid)
{
    int64_t n, first, last, by;
    jn_val none = jn_none();
    *w = *s;
    *valid = true;
    if (start.kind == JN_MISSING) start = none;
    if (end.kind == JN_MISSING) end = none;
    if (start.kind == JN_NONE && end.kind == JN_NONE) return true;
    if (!jn_length(r, (jn_val){.kind = JN_STR, .s = s}, &n) ||
        !jn_slice_bounds(r, start, end, none, n, &first, &last, &by))
        return false;
    *valid = first <= last && (start.kind == JN_NONE || jn_as_int(start) <= n);
    size_t from = jn_cp_offset(jn_bytes(s), s->n, (size_t)first);
    size_t to = jn_cp_offset(jn_bytes(s), s->n, (size_t)last);
    w->off += from;
    w->n = to > from ? to - from : 0;
    return true;
}

static bool test_end(jn_state *r, jn_val self, const jn_args *a, bool front, jn_val *out)
{
    jn_val v[3];
    jn_str w;
    bool valid, yes = false;
    if (!jn_bind(r, front ? "startswith" : "endswith", a, "prefix start end", 1, v)) return false;
    if (!window(r, self.s, v[1], v[2], &w, &valid)) return false;
    const jn_val *ends = v[0].kind == JN_TUPLE ? v[0].list->v : &v[0];
    size_t n = v[0].kind == JN_TUPLE ? v[0].list->n : 1;
    for (size_t i = 0; i < n; i++) {
        const jn_str *end;
        if (!jn_want_str(r, ends[i], &end)) return false;
        yes |= valid && has_end(&w, end, front);
    }
    *out = jn_bool(yes);
    return jn_work(r, n);
}

static bool startswith(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    return test_end(r, self, a, true, out);
}

static bool endswith(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    return test_end(r, self, a, false, out);
}

static bool remove_end(jn_state *r, jn_val self, const jn_args *a, bool front, jn_val *out)
{
    jn_val v;
    const jn_str *end;
    if (!jn_bind(r, "removeprefix", a, "prefix", 1, &v) || !jn_want_str(r, v, &end)) return false;
    size_t cut = has_end(self.s, end, front) ? end->n : 0;
    return jn_str_sub(r, self.s, front ? cut : 0, self.s->n - cut, out);
}

static bool removeprefix(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    return remove_end(r, self, a, true, out);
}

static bool removesuffix(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    return remove_end(r, self, a, false, out);
}

/* ---- cutting ---- */

static bool add_part(jn_state *r, jn_list *l, const jn_str *s, size_t off, size_t n)
{
    jn_val part;
    return jn_work(r, 0) && jn_str_sub(r, s, off, n, &part) && jn_list_add(r, l, part);
}

static size_t space_len(const jn_str *s, size_t at)
{
    uint32_t c;
    size_t k = bg_utf8_next(jn_bytes(s) + at, s->n - at, &c);
    return c != BG_UTF8_BAD && jn_is_space(c) ? k : 0;
}

/* split() at white space: runs of it separate, and it is cut off the ends. */
static bool split_space(jn_state *r, const jn_str *s, int64_t max, jn_list *l)
{
    size_t at = 0, k;
    for (;;) {
        while (at < s->n && (k = space_len(s, at)))
            at += k;
        if (at == s->n) return true;
        size_t from = at;
        if (max >= 0 && (int64_t)l->n == max) return add_part(r, l, s, from, s->n - from);
        while (at < s->n && !space_len(s, at))
            at += jn_cp_len(jn_bytes(s) + at, s->n - at);
        if (!add_part(r, l, s, from, at - from)) return false;
    }
}

static bool split_at(jn_state *r, const jn_str *s, const jn_str *sep, int64_t max, jn_list *l)
{
    size_t at = 0;
    while (max < 0 || (int64_t)l->n < max) {
        size_t found = jn_find(jn_bytes(s), s->n, jn_bytes(sep), sep->n, at);
        if (found == SIZE_MAX) break;
        if (!add_part(r, l, s, at, found - at)) return false;
        at = found + sep->n;
    }
    return add_part(r, l, s, at, s->n - at);
}

static void reverse(jn_list *l)
{
    for (size_t i = 0, k = l->n; i + 1 < k; i++) {
        jn_val t = l->v[i];
        l->v[i] = l->v[--k];
        l->v[k] = t;
    }
}

/* rsplit: parts are found from the end, then turned round. */
static bool rsplit_at(jn_state *r, const jn_str *s, const jn_str *sep, int64_t max, jn_list *l)
{
    size_t end = s->n;
    while (max < 0 || (int64_t)l->n < max) {
        size_t found = jn_rfind(jn_bytes(s), end, jn_bytes(sep), sep->n);
        if (found == SIZE_MAX) break;
        if (!add_part(r, l, s, found + sep->n, end - found - sep->n)) return false;
        end = found;
    }
    if (!add_part(r, l, s, 0, end)) return false;
    reverse(l);
    return true;
}

static bool rsplit_space(jn_state *r, const jn_str *s, int64_t max, jn_list *l)
{
    jn_val all;
    if (!jn_list_new(r, JN_LIST, 0, &all) || !split_space(r, s, -1, all.list)) return false;
    size_t n = all.list->n, keep = max < 0 || (size_t)max >= n ? n : (size_t)max;
    if (keep < n) { /* the head stays one piece, up to the end of its last word */
        const jn_str *last = all.list->v[n - keep - 1].s;
        if (!add_part(r, l, s, 0, last->off + last->n - s->off)) return false;
    }
    for (size_t i = n - keep; i < n; i++)
        if (!jn_list_add(r, l, all.list->v[i])) return false;
    return true;
}

static bool split_any(jn_state *r, jn_val self, const jn_args *a, bool from_end, jn_val *out)
{
    jn_val v[2];
    const jn_str *sep;
    int64_t max;
    if (!jn_bind(r, "split", a, "sep maxsplit", 0, v) || !opt_str(r, v[0], &sep)) return false;
    if (!opt_int(r, v[1], -1, &max) || !jn_list_new(r, JN_LIST, 0, out)) return false;
    if (sep && sep->n == 0) return jn_fail(r, "empty separator");
    if (!jn_work(r, self.s->n)) return false;
    jn_list *l = out->list;
    if (!sep) return from_end ? rsplit_space(r, self.s, max, l) : split_space(r, self.s, max, l);
    return from_end ? rsplit_at(r, self.s, sep, max, l) : split_at(r, self.s, sep, max, l);
}

static bool split(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    return split_any(r, self, a, false, out);
}

static bool rsplit(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    return split_any(r, self, a, true, out);
}

static bool is_line_end(uint32_t c)
{
    return (c >= 10 && c <= 13) || (c >= 0x1c && c <= 0x1e) || c == 0x85 || c == 0x2028 ||
           c == 0x2029;
}

bool jn_splitlines(jn_state *r, const jn_str *s, bool keep_ends, jn_val *out)
{
    const char *p = jn_bytes(s);
    size_t from = 0;
    if (!jn_list_new(r, JN_LIST, 0, out) || !jn_work(r, s->n)) return false;
    for (size_t i = 0, k; i < s->n; i += k) {
        uint32_t c;
        k = bg_utf8_next(p + i, s->n - i, &c);
        if (!is_line_end(c)) continue;
        if (c == '\r' && i + 1 < s->n && p[i + 1] == '\n') k = 2;
        if (!add_part(r, out->list, s, from, i - from + (keep_ends ? k : 0))) return false;
        from = i + k;
    }
    return from == s->n || add_part(r, out->list, s, from, s->n - from);
}

static bool splitlines(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    jn_val v;
    return jn_bind(r, "splitlines", a, "keepends", 0, &v) &&
           jn_splitlines(r, self.s, jn_truth(v), out);
}

static bool partition_at(jn_state *r, jn_val self, const jn_args *a, bool last, jn_val *out)
{
    jn_val v, part[3];
    const jn_str *sep, *s = self.s;
    if (!jn_bind(r, "partition", a, "sep", 1, &v) || !jn_want_str(r, v, &sep)) return false;
    if (sep->n == 0) return jn_fail(r, "empty separator");
    size_t at = last ? jn_rfind(jn_bytes(s), s->n, jn_bytes(sep), sep->n)
                     : jn_find(jn_bytes(s), s->n, jn_bytes(sep), sep->n, 0);
    size_t head = at != SIZE_MAX ? at : last ? 0 : s->n;
    size_t n_sep = at != SIZE_MAX ? sep->n : 0;
    if (!jn_list_new(r, JN_TUPLE, 3, out) || !jn_work(r, s->n)) return false;
    if (!jn_str_sub(r, s, 0, head, &part[0]) || !jn_str_sub(r, s, head, n_sep, &part[1]) ||
        !jn_str_sub(r, s, head + n_sep, s->n - head - n_sep, &part[2]))
        return false;
    for (int i = 0; i < 3; i++)
        if (!jn_list_add(r, out->list, part[i])) return false;
    return true;
}

static bool partition(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    return partition_at(r, self, a, false, out);
}

static bool rpartition(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    return partition_at(r, self, a, true, out);
}

/* ---- searching ---- */

/* Index in characters of the argument, or -1. */
static bool search(jn_state *r, jn_val self, const jn_args *a, bool last, int64_t *index)
{
    jn_val v[3];
    const jn_str *sub;
    jn_str w;
    bool valid;
    *index = -1;
    if (!jn_bind(r, "find", a, "sub start end", 1, v) || !jn_want_str(r, v[0], &sub)) return false;
    if (!window(r, self.s, v[1], v[2], &w, &valid) || !jn_work(r, self.s->n)) return false;
    if (!valid) return true;
    size_t at = last ? jn_rfind(jn_bytes(&w), w.n, jn_bytes(sub), sub->n)
                     : jn_find(jn_bytes(&w), w.n, jn_bytes(sub), sub->n, 0);
    if (at != SIZE_MAX) *index = (int64_t)jn_cp_count(jn_bytes(self.s), w.off - self.s->off + at);
    return true;
}

static bool find_any(jn_state *r, jn_val self, const jn_args *a, bool last, bool must, jn_val *out)
{
    int64_t i;
    if (!search(r, self, a, last, &i)) return false;
    if (i < 0 && must) return jn_fail(r, "substring not found");
    *out = jn_int(i);
    return true;
}

static bool find(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    return find_any(r, self, a, false, false, out);
}

static bool rfind(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    return find_any(r, self, a, true, false, out);
}

static bool index_of(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    return find_any(r, self, a, false, true, out);
}

static bool rindex_of(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    return find_any(r, self, a, true, true, out);
}

static bool count(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    jn_val v[3];
    const jn_str *sub;
    jn_str w;
    bool valid;
    int64_t n = 0;
    if (!jn_bind(r, "count", a, "sub start end", 1, v) || !jn_want_str(r, v[0], &sub)) return false;
    if (!window(r, self.s, v[1], v[2], &w, &valid) || !jn_work(r, w.n)) return false;
    if (valid && sub->n == 0) n = (int64_t)jn_cp_count(jn_bytes(&w), w.n) + 1;
    for (size_t at = 0; valid && sub->n;) {
        at = jn_find(jn_bytes(&w), w.n, jn_bytes(sub), sub->n, at);
        if (at == SIZE_MAX) break;
        at += sub->n;
        n++;
    }
    *out = jn_int(n);
    return true;
}

/* ---- building ---- */

bool jn_str_replace(jn_state *r, const jn_str *s, const jn_str *from, const jn_str *to,
                    int64_t times, jn_val *out)
{
    jn_buf *b = jn_buf_new(r);
    size_t at = 0;
    if (!b || !jn_work(r, s->n)) return false;
    for (; times != 0; times -= times > 0) {
        size_t found = jn_find(jn_bytes(s), s->n, jn_bytes(from), from->n, at);
        if (found == SIZE_MAX) break;
        if (!jn_put_part(r, b, s, at, found - at) || !jn_put_str(r, b, to)) return false;
        at = found + from->n;
        if (from->n) continue;
        if (at == s->n) break; /* an empty pattern matches before every character and at the end */
        size_t k = jn_cp_len(jn_bytes(s) + at, s->n - at);
        if (!jn_put_part(r, b, s, at, k)) return false;
        at += k;
    }
    return jn_put_part(r, b, s, at, s->n - at) && jn_finish(r, b, out);
}

static bool replace(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    jn_val v[3];
    const jn_str *from, *to;
    int64_t times;
    return jn_bind(r, "replace", a, "old new count", 2, v) && jn_want_str(r, v[0], &from) &&
           jn_want_str(r, v[1], &to) && opt_int(r, v[2], -1, &times) &&
           jn_str_replace(r, self.s, from, to, times, out);
}

bool jn_str_join(jn_state *r, const jn_str *sep, const jn_val *items, size_t n, jn_val *out)
{
    jn_buf *b = jn_buf_new(r);
    if (!b) return false;
    for (size_t i = 0; i < n; i++) {
        if (i && !jn_put_str(r, b, sep)) return false;
        if (!jn_print(r, b, items[i])) return false;
    }
    return jn_finish(r, b, out);
}

static bool join(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    jn_val v, *items;
    size_t n;
    if (!jn_bind(r, "join", a, "iterable", 1, &v) || !jn_items(r, v, &items, &n)) return false;
    for (size_t i = 0; i < n; i++)
        if (items[i].kind != JN_STR)
            return jn_fail(r, "sequence item %zu: expected str instance, %s found", i,
                           jn_type_name(items[i]));
    return jn_str_join(r, self.s, items, n, out);
}

static bool fill(jn_state *r, jn_buf *b, const jn_str *with, int64_t n)
{
    for (; n > 0; n--)
        if (!jn_put_str(r, b, with)) return false;
    return true;
}

/* s between left and right of the fill character. */
static bool padded(jn_state *r, const jn_str *s, int64_t left, int64_t right, jn_val with,
                   jn_val *out)
{
    const jn_str *c;
    jn_buf *b = jn_buf_new(r);
    if (with.kind == JN_MISSING && !jn_str_text(r, " ", &with)) return false;
    if (!b || !jn_want_str(r, with, &c)) return false;
    if (jn_cp_count(jn_bytes(c), c->n) != 1)
        return jn_fail(r, "the fill character must be exactly one character long");
    return fill(r, b, c, left) && jn_put_str(r, b, s) && fill(r, b, c, right) &&
           jn_finish(r, b, out);
}

static bool padding(jn_state *r, jn_val self, const jn_args *a, jn_val v[2], int64_t *missing)
{
    int64_t width;
    if (!jn_bind(r, "center", a, "width fillchar", 1, v) || !jn_want_int(r, v[0], &width))
        return false;
    if (width < 0) width = 0;
    *missing = width - (int64_t)jn_cp_count(jn_bytes(self.s), self.s->n);
    if (*missing < 0) *missing = 0;
    return true;
}

bool jn_center(jn_state *r, const jn_str *s, int64_t width, jn_val *out)
{
    int64_t n = (width < 0 ? 0 : width) - (int64_t)jn_cp_count(jn_bytes(s), s->n);
    if (n < 0) n = 0;
    int64_t left = n / 2 + (n & width & 1); /* as CPython decides who gets the odd one */
    return padded(r, s, left, n - left, (jn_val){.kind = JN_MISSING}, out);
}

static bool center(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    jn_val v[2];
    int64_t n, width;
    if (!padding(r, self, a, v, &n) || !jn_want_int(r, v[0], &width)) return false;
    int64_t left = n / 2 + (n & width & 1);
    return padded(r, self.s, left, n - left, v[1], out);
}

static bool ljust(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    jn_val v[2];
    int64_t n;
    return padding(r, self, a, v, &n) && padded(r, self.s, 0, n, v[1], out);
}

static bool rjust(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    jn_val v[2];
    int64_t n;
    return padding(r, self, a, v, &n) && padded(r, self.s, n, 0, v[1], out);
}

static bool zfill(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    jn_val v[2], zero;
    int64_t n;
    if (!padding(r, self, a, v, &n) || !jn_str_text(r, "0", &zero)) return false;
    const char *p = jn_bytes(self.s);
    size_t sign = self.s->n && (*p == '-' || *p == '+');
    jn_buf *b = jn_buf_new(r);
    return b && jn_put_part(r, b, self.s, 0, sign) && fill(r, b, zero.s, n) &&
           jn_put_part(r, b, self.s, sign, self.s->n - sign) && jn_finish(r, b, out);
}

/* ---- questions about all characters ---- */

typedef bool char_test(uint32_t c);

static bool all_chars(jn_state *r, jn_val self, const jn_args *a, char_test *test, jn_val *out)
{
    bool yes = self.s->n > 0;
    if (!no_args(r, "isalpha", a) || !jn_work(r, self.s->n)) return false;
    for (size_t i = 0; yes && i < self.s->n;) {
        uint32_t c;
        i += bg_utf8_next(jn_bytes(self.s) + i, self.s->n - i, &c);
        yes = c != BG_UTF8_BAD && test(c);
    }
    *out = jn_bool(yes);
    return true;
}

static bool digit_char(uint32_t c)
{
    return jn_digit(c) >= 0;
}

static bool alnum_char(uint32_t c)
{
    return jn_is_letter(c) || jn_digit(c) >= 0;
}

static bool isdigit_(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    return all_chars(r, self, a, digit_char, out);
}

static bool isalpha_(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    return all_chars(r, self, a, jn_is_letter, out);
}

static bool isalnum_(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    return all_chars(r, self, a, alnum_char, out);
}

static bool isspace_(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    return all_chars(r, self, a, jn_is_space, out);
}

static bool isascii_(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    bool yes = true;
    for (size_t i = 0; i < self.s->n; i++)
        yes &= (unsigned char)jn_bytes(self.s)[i] < 0x80;
    *out = jn_bool(yes);
    return no_args(r, "isascii", a) && jn_work(r, self.s->n);
}

/* Some character has the case asked for, and none has the other. */
static bool one_case(jn_state *r, jn_val self, const jn_args *a, bool upper, jn_val *out)
{
    bool some = false, other = false;
    if (!no_args(r, "isupper", a) || !jn_work(r, self.s->n)) return false;
    for (size_t i = 0; i < self.s->n;) {
        uint32_t c;
        i += bg_utf8_next(jn_bytes(self.s) + i, self.s->n - i, &c);
        if (c == BG_UTF8_BAD) continue;
        some |= upper ? jn_is_upper(c) : jn_is_lower(c);
        other |= upper ? jn_is_lower(c) : jn_is_upper(c);
    }
    *out = jn_bool(some && !other);
    return true;
}

static bool isupper_(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    return one_case(r, self, a, true, out);
}

static bool islower_(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    return one_case(r, self, a, false, out);
}

const jn_func *jn_find_str_method(const char *name, size_t n)
{
    static const jn_func table[] = {
        {"capitalize", jn_str_capitalize},
        {"casefold", casefold},
        {"center", center},
        {"count", count},
        {"endswith", endswith},
        {"find", find},
        {"format", jn_str_format},
        {"index", index_of},
        {"isalnum", isalnum_},
        {"isalpha", isalpha_},
        {"isascii", isascii_},
        {"isdecimal", isdigit_},
        {"isdigit", isdigit_},
        {"islower", islower_},
        {"isnumeric", isdigit_},
        {"isspace", isspace_},
        {"isupper", isupper_},
        {"join", join},
        {"ljust", ljust},
        {"lower", jn_str_lower},
        {"lstrip", lstrip},
        {"partition", partition},
        {"removeprefix", removeprefix},
        {"removesuffix", removesuffix},
        {"replace", replace},
        {"rfind", rfind},
        {"rindex", rindex_of},
        {"rjust", rjust},
        {"rpartition", rpartition},
        {"rsplit", rsplit},
        {"rstrip", rstrip},
        {"split", split},
        {"splitlines", splitlines},
        {"startswith", startswith},
        {"strip", strip},
        {"swapcase", swapcase},
        {"title", title},
        {"upper", jn_str_upper},
        {"zfill", zfill},
    };
    return jn_find_in(table, sizeof table / sizeof *table, name, n);
}
