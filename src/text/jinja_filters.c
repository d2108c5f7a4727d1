/* Filters on single values: strings, numbers, JSON. Those on sequences are in jinja_seq.c. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "text/jinja_builtin.h"
#include "text/jinja_unicode.h"

/* ---- strings ---- */

/* A method of str applied to str(value). */
static bool through(jn_state *r, jn_val v, const jn_args *a, jn_fn *method, jn_val *out)
{
    const jn_str *s;
    return jn_str_of(r, v, &s) && method(r, (jn_val){.kind = JN_STR, .s = s}, a, out);
}

static bool upper(jn_state *r, jn_val v, const jn_args *a, jn_val *out)
{
    return through(r, v, a, jn_str_upper, out);
}

static bool lower(jn_state *r, jn_val v, const jn_args *a, jn_val *out)
{
    return through(r, v, a, jn_str_lower, out);
}

static bool capitalize(jn_state *r, jn_val v, const jn_args *a, jn_val *out)
{
    return through(r, v, a, jn_str_capitalize, out);
}

static bool trim(jn_state *r, jn_val v, const jn_args *a, jn_val *out)
{
    jn_val arg;
    const jn_str *s, *chars = NULL;
    size_t off, n;
    if (!jn_bind(r, "trim", a, "chars", 0, &arg) || !jn_str_of(r, v, &s)) return false;
    if (arg.kind != JN_MISSING && arg.kind != JN_NONE && !jn_want_str(r, arg, &chars)) return false;
    jn_strip(s, chars, true, true, &off, &n);
    return jn_work(r, s->n) && jn_str_sub(r, s, off, n, out);
}

static bool string(jn_state *r, jn_val v, const jn_args *a, jn_val *out)
{
    const jn_str *s;
    if (!jn_bind(r, "string", a, "", 0, NULL) || !jn_str_of(r, v, &s)) return false;
    *out = (jn_val){.kind = JN_STR, .s = s};
    return true;
}

static bool mark_safe(jn_state *r, jn_val v, const jn_args *a, jn_val *out)
{
    const jn_str *s;
    if (!jn_bind(r, "safe", a, "", 0, NULL) || !jn_str_of(r, v, &s)) return false;
    jn_str *marked = jn_new(r, sizeof *marked);
    if (!marked) return false;
    *marked = *s;
    marked->safe = true;
    *out = (jn_val){.kind = JN_STR, .s = marked};
    return true;
}

static bool escape(jn_state *r, jn_val v, const jn_args *a, jn_val *out)
{
    const jn_str *s;
    if (!jn_bind(r, "escape", a, "", 0, NULL) || !jn_str_of(r, v, &s)) return false;
    *out = v;
    return (v.kind == JN_STR && v.s->safe) || jn_str_escape(r, s, out);
}

static bool forceescape(jn_state *r, jn_val v, const jn_args *a, jn_val *out)
{
    const jn_str *s;
    return jn_bind(r, "forceescape", a, "", 0, NULL) && jn_str_of(r, v, &s) &&
           jn_str_escape(r, s, out);
}

static bool replace(jn_state *r, jn_val v, const jn_args *a, jn_val *out)
{
    jn_val arg[3];
    const jn_str *s, *from, *to;
    int64_t times = -1;
    if (!jn_bind(r, "replace", a, "old new count", 2, arg) || !jn_str_of(r, v, &s)) return false;
    if (arg[2].kind != JN_MISSING && arg[2].kind != JN_NONE && !jn_want_int(r, arg[2], &times))
        return false;
    return jn_str_of(r, arg[0], &from) && jn_str_of(r, arg[1], &to) &&
           jn_str_replace(r, s, from, to, times, out);
}

static bool starts_word(uint32_t c)
{
    return c == '-' || c == '(' || c == '{' || c == '[' || c == '<' || jn_is_space(c);
}

/* Each word's first character large, the others small; words start after spaces and brackets. */
static bool title(jn_state *r, jn_val v, const jn_args *a, jn_val *out)
{
    const jn_args none = {0};
    const jn_str *s;
    jn_buf *b = jn_buf_new(r);
    if (!jn_bind(r, "title", a, "", 0, NULL) || !jn_str_of(r, v, &s) || !b) return false;
    for (size_t at = 0; at < s->n;) {
        size_t end = at, k = 0;
        bool sep = false;
        while (end < s->n) { /* a stretch of separators, or of others */
            uint32_t c;
            k = bg_utf8_next(jn_bytes(s) + end, s->n - end, &c);
            if (end == at)
                sep = starts_word(c);
            else if (sep != starts_word(c))
                break;
            end += k;
        }
        size_t first = jn_cp_len(jn_bytes(s) + at, end - at);
        jn_val head, tail;
        if (!jn_str_sub(r, s, at, first, &head) || !jn_str_upper(r, head, &none, &head) ||
            !jn_str_sub(r, s, at + first, end - at - first, &tail) ||
            !jn_str_lower(r, tail, &none, &tail) || !jn_put_str(r, b, head.s) ||
            !jn_put_str(r, b, tail.s))
            return false;
        at = end;
    }
    return jn_finish(r, b, out);
}

static bool center(jn_state *r, jn_val v, const jn_args *a, jn_val *out)
{
    jn_val w;
    const jn_str *s;
    int64_t width = 80;
    if (!jn_bind(r, "center", a, "width", 0, &w) || !jn_str_of(r, v, &s)) return false;
    if (w.kind != JN_MISSING && !jn_want_int(r, w, &width)) return false;
    return jn_center(r, s, width, out);
}

static bool put_spaces(jn_state *r, jn_buf *b, int64_t n)
{
    for (; n > 0; n--)
        if (!jn_put(r, b, " ", 1, true)) return false;
    return true;
}

/* indent(width=4, first=False, blank=False); width may be the text itself */
static bool indent(jn_state *r, jn_val v, const jn_args *a, jn_val *out)
{
    jn_val arg[3], lines, pad;
    const jn_str *s;
    int64_t width = 4;
    jn_buf *b = jn_buf_new(r), *p = jn_buf_new(r);
    if (!b || !p || !jn_bind(r, "indent", a, "width first blank", 0, arg)) return false;
    if (!jn_want_str(r, v, &s)) return false;
    if (arg[0].kind == JN_STR) {
        pad = arg[0];
    } else {
        if (arg[0].kind != JN_MISSING && !jn_want_int(r, arg[0], &width)) return false;
        if (!put_spaces(r, p, width) || !jn_finish(r, p, &pad)) return false;
    }
    bool first = jn_truth(arg[1]), blank = jn_truth(arg[2]);
    if (!jn_splitlines(r, s, false, &lines)) return false;
    jn_list *l = lines.list;
    /* A newline is added to the text before it is split, so an end of line makes one more line. */
    bool ends = s->n == 0 || jn_bytes(s)[s->n - 1] == '\n' || jn_bytes(s)[s->n - 1] == '\r';
    if (s->n && ends && !jn_str_sub(r, s, s->n, 0, &lines)) return false;
    for (size_t i = 0; i < l->n; i++) {
        const jn_str *line = l->v[i].s;
        if (i && !jn_put_text(r, b, "\n")) return false;
        bool in = i ? blank || line->n : first;
        if ((in && !jn_put_str(r, b, pad.s)) || !jn_put_str(r, b, line)) return false;
    }
    if (s->n && ends && !jn_put_text(r, b, "\n")) return false;
    if (s->n && ends && blank && !jn_put_str(r, b, pad.s)) return false;
    if (s->n == 0 && first && !jn_put_str(r, b, pad.s)) return false;
    return jn_finish(r, b, out);
}

/* truncate(length=255, killwords=False, end='...', leeway=5) */
static bool truncate_(jn_state *r, jn_val v, const jn_args *a, jn_val *out)
{
    jn_val arg[4];
    const jn_str *s, *end;
    int64_t length = 255, leeway = 5, n;
    if (!jn_bind(r, "truncate", a, "length killwords end leeway", 0, arg)) return false;
    if (arg[2].kind == JN_MISSING && !jn_str_text(r, "...", &arg[2])) return false;
    if (!jn_str_of(r, arg[2], &end) || !jn_length(r, v, &n)) return false;
    if (arg[0].kind != JN_MISSING && !jn_want_int(r, arg[0], &length)) return false;
    if (arg[3].kind != JN_MISSING && arg[3].kind != JN_NONE && !jn_want_int(r, arg[3], &leeway))
        return false;
    int64_t n_end = (int64_t)jn_cp_count(jn_bytes(end), end->n);
    if (length < n_end) return jn_fail(r, "truncate: the length is shorter than the end text");
    if (leeway < 0) return jn_fail(r, "truncate: leeway must not be negative");
    if (n - length <= leeway) {
        *out = v;
        return true;
    }
    if (!jn_want_str(r, v, &s)) return false;
    size_t keep = jn_cp_offset(jn_bytes(s), s->n, (size_t)(length - n_end));
    if (!jn_truth(arg[1])) {
        size_t space = jn_rfind(jn_bytes(s), keep, " ", 1);
        if (space != SIZE_MAX) keep = space;
    }
    jn_buf *b = jn_buf_new(r);
    return b && jn_put_part(r, b, s, 0, keep) && jn_put_str(r, b, end) && jn_finish(r, b, out);
}

static bool wordcount(jn_state *r, jn_val v, const jn_args *a, jn_val *out)
{
    const jn_str *s;
    int64_t n = 0;
    bool in = false;
    if (!jn_bind(r, "wordcount", a, "", 0, NULL) || !jn_str_of(r, v, &s)) return false;
    for (size_t i = 0; i < s->n;) {
        uint32_t c;
        i += bg_utf8_next(jn_bytes(s) + i, s->n - i, &c);
        bool word = c != BG_UTF8_BAD && (c == '_' || jn_is_letter(c) || jn_digit(c) >= 0);
        n += word && !in;
        in = word;
    }
    *out = jn_int(n);
    return jn_work(r, s->n);
}

static bool format(jn_state *r, jn_val v, const jn_args *a, jn_val *out)
{
    const jn_str *s;
    jn_val args;
    if (a->n && a->n_kw) return jn_fail(r, "format: positional and keyword arguments do not mix");
    if (!jn_str_of(r, v, &s)) return false;
    if (a->n_kw) {
        if (!jn_dict_new(r, JN_DICT, &args)) return false;
        for (size_t i = 0; i < a->n_kw; i++)
            if (!jn_dict_set(r, args.dict, (jn_val){.kind = JN_STR, .s = a->kw[i].name},
                             a->kw[i].v))
                return false;
    } else {
        if (!jn_list_new(r, JN_TUPLE, a->n, &args)) return false;
        for (size_t i = 0; i < a->n; i++)
            if (!jn_list_add(r, args.list, a->v[i])) return false;
    }
    return jn_printf(r, s, args, out);
}

/* ---- numbers ---- */

/* Text without white space around it and without underscores between digits, in t. */
static bool plain_number(const jn_str *s, char *t, size_t size)
{
    size_t off, n, k = 0;
    jn_strip(s, NULL, true, true, &off, &n);
    const char *p = jn_bytes(s) + off;
    for (size_t i = 0; i < n; i++) {
        if (p[i] == '_') {
            if (i == 0 || i + 1 == n || p[i - 1] == '_' || p[i + 1] == '_') return false;
            continue;
        }
        if (k + 1 == size || !p[i]) return false;
        t[k++] = p[i];
    }
    t[k] = 0;
    return k > 0;
}

bool jn_parse_int(jn_state *r, const jn_str *s, int base, bool *ok, int64_t *i)
{
    char t[80], *end;
    *ok = false;
    if (!plain_number(s, t, sizeof t)) return true;
    const char *p = t + (*t == '-' || *t == '+');
    char prefix = p[0] == '0' ? (char)(p[1] | 32) : 0;
    int marked = prefix == 'x' ? 16 : prefix == 'o' ? 8 : prefix == 'b' ? 2 : 0;
    if (marked && (base == marked || base == 0)) {
        base = marked;
        p += 2;
    }
    if (base == 0) base = 10;
    if (!*p || strchr("+- \t\n\v\f\r", *p)) return true;
    if (base == 16 && p[0] == '0' && (p[1] | 32) == 'x') return true; /* strtoull would take it */
    errno = 0;
    unsigned long long v = strtoull(p, &end, base);
    if (*end || end == p) return true;
    if (errno || v > INT64_MAX) return jn_fail(r, "an integer grows over 64 bits");
    *ok = true;
    *i = *t == '-' ? -(int64_t)v : (int64_t)v;
    return true;
}

bool jn_parse_float(const jn_str *s, double *f)
{
    char t[400], *end;
    if (!plain_number(s, t, sizeof t)) return false;
    const char *p = t + (*t == '-' || *t == '+');
    if (strchr("+- \t\n\v\f\r", *p)) return false;
    if ((p[0] == '0' && (p[1] | 32) == 'x') || strchr(p, '(')) return false;
    *f = strtod(t, &end);
    return end != t && !*end;
}

static bool int_filter(jn_state *r, jn_val v, const jn_args *a, jn_val *out)
{
    jn_val arg[2];
    int64_t base = 10, i = 0;
    double f = NAN;
    bool ok = false;
    if (!jn_bind(r, "int", a, "default base", 0, arg)) return false;
    if (arg[1].kind != JN_MISSING && !jn_want_int(r, arg[1], &base)) return false;
    if (base < 0 || base == 1 || base > 36) return jn_fail(r, "int: base must be 0 or 2 to 36");
    *out = arg[0].kind == JN_MISSING ? jn_int(0) : arg[0];
    if (v.kind == JN_UNDEF) return jn_undef_fail(r, v.undef);
    if (v.kind == JN_STR) {
        if (!jn_parse_int(r, v.s, (int)base, &ok, &i)) return false;
        if (!ok && !jn_parse_float(v.s, &f)) return true;
    } else if (jn_is_int(v)) {
        ok = true;
        i = jn_as_int(v);
    } else if (v.kind == JN_FLOAT) {
        f = v.f;
    }
    if (!ok && !isfinite(f)) return true;
    if (!ok && !(fabs(f) < 0x1p63)) return jn_fail(r, "an integer grows over 64 bits");
    *out = jn_int(ok ? i : (int64_t)f);
    return true;
}

static bool float_filter(jn_state *r, jn_val v, const jn_args *a, jn_val *out)
{
    jn_val def;
    double f;
    if (!jn_bind(r, "float", a, "default", 0, &def)) return false;
    if (v.kind == JN_UNDEF) return jn_undef_fail(r, v.undef);
    *out = def.kind == JN_MISSING ? jn_float(0) : def;
    if (v.kind == JN_STR && jn_parse_float(v.s, &f)) *out = jn_float(f);
    if (jn_is_number(v)) *out = jn_float(jn_as_float(v));
    return true;
}

static bool abs_filter(jn_state *r, jn_val v, const jn_args *a, jn_val *out)
{
    if (!jn_bind(r, "abs", a, "", 0, NULL)) return false;
    if (v.kind == JN_UNDEF) return jn_undef_fail(r, v.undef);
    if (!jn_is_number(v)) return jn_fail(r, "abs: a number is required, not %s", jn_type_name(v));
    if (v.kind == JN_FLOAT) {
        *out = jn_float(fabs(v.f));
        return true;
    }
    int64_t i = jn_as_int(v);
    if (i == INT64_MIN) return jn_fail(r, "an integer grows over 64 bits");
    *out = jn_int(i < 0 ? -i : i);
    return true;
}

/* As Python's round(): the decimal nearest to the exact value, ties to even. */
static double round_at(double f, int64_t digits)
{
    char text[400];
    if (!isfinite(f) || digits > 320) return f;
    if (digits >= 0) {
        snprintf(text, sizeof text, "%.*f", (int)digits, f);
        return strtod(text, NULL);
    }
    if (digits < -308) return copysign(0, f);
    double p = pow(10, (double)-digits);
    return rint(f / p) * p;
}

static bool round_filter(jn_state *r, jn_val v, const jn_args *a, jn_val *out)
{
    jn_val arg[2];
    int64_t digits = 0;
    if (!jn_bind(r, "round", a, "precision method", 0, arg)) return false;
    if (arg[0].kind != JN_MISSING && !jn_want_int(r, arg[0], &digits)) return false;
    if (v.kind == JN_UNDEF) return jn_undef_fail(r, v.undef);
    if (!jn_is_number(v)) return jn_fail(r, "round: a number is required, not %s", jn_type_name(v));
    bool common =
        arg[1].kind == JN_MISSING || (arg[1].kind == JN_STR && jn_str_is(arg[1].s, "common"));
    bool up = arg[1].kind == JN_STR && jn_str_is(arg[1].s, "ceil");
    if (!common && !up && !(arg[1].kind == JN_STR && jn_str_is(arg[1].s, "floor")))
        return jn_fail(r, "round: method must be common, ceil or floor");
    double f = jn_as_float(v);
    if (!common) {
        double p = pow(10, (double)digits), x = up ? ceil(f * p) : floor(f * p);
        *out = jn_float(x / p);
    } else if (v.kind == JN_FLOAT) {
        *out = jn_float(round_at(f, digits));
    } else if (digits >= 0) {
        *out = jn_int(jn_as_int(v));
    } else {
        double x = round_at(f, digits);
        if (!(fabs(x) < 0x1p63)) return jn_fail(r, "an integer grows over 64 bits");
        *out = jn_int((int64_t)x);
    }
    return true;
}

/* ---- others ---- */

static bool default_filter(jn_state *r, jn_val v, const jn_args *a, jn_val *out)
{
    jn_val arg[2];
    if (!jn_bind(r, "default", a, "default_value boolean", 0, arg)) return false;
    *out = v;
    bool replaced = v.kind == JN_UNDEF || (jn_truth(arg[1]) && !jn_truth(v));
    if (!replaced) return true;
    *out = arg[0];
    return arg[0].kind != JN_MISSING || jn_str_text(r, "", out);
}

static bool attr(jn_state *r, jn_val v, const jn_args *a, jn_val *out)
{
    jn_val name;
    const jn_str *s;
    return jn_bind(r, "attr", a, "name", 1, &name) && jn_want_str(r, name, &s) &&
           jn_getattr(r, v, s, out);
}

static bool json_style(jn_state *r, const jn_val *arg, jn_json_style *style)
{
    jn_val text;
    int64_t width = 0;
    *style = (jn_json_style){.ascii = jn_truth(arg[0]), .sort = jn_truth(arg[3])};
    if (arg[1].kind == JN_STR) {
        style->indent = arg[1].s;
    } else if (arg[1].kind != JN_MISSING && arg[1].kind != JN_NONE) {
        jn_buf *b = jn_buf_new(r);
        if (!b || !jn_want_int(r, arg[1], &width)) return false;
        if (width > 1000) return jn_fail(r, "tojson: an indent of more than 1000 is not allowed");
        if (!put_spaces(r, b, width) || !jn_finish(r, b, &text)) return false;
        style->indent = text.s;
    }
    if (arg[2].kind != JN_MISSING && arg[2].kind != JN_NONE) {
        jn_val *sep;
        size_t n;
        if (!jn_items(r, arg[2], &sep, &n)) return false;
        if (n != 2) return jn_fail(r, "tojson: separators must be a pair");
        return jn_want_str(r, sep[0], &style->item_sep) && jn_want_str(r, sep[1], &style->key_sep);
    }
    if (!jn_str_text(r, style->indent ? "," : ", ", &text)) return false;
    style->item_sep = text.s;
    if (!jn_str_text(r, ": ", &text)) return false;
    style->key_sep = text.s;
    return true;
}

static bool tojson(jn_state *r, jn_val v, const jn_args *a, jn_val *out)
{
    jn_val arg[4];
    jn_json_style style;
    return jn_bind(r, "tojson", a, "ensure_ascii indent separators sort_keys", 0, arg) &&
           json_style(r, arg, &style) && jn_to_json(r, v, &style, out);
}

static bool from_json(jn_state *r, jn_val v, const jn_args *a, jn_val *out)
{
    const jn_str *s;
    json_error_t why;
    if (!jn_bind(r, "from_json", a, "", 0, NULL) || !jn_want_str(r, v, &s)) return false;
    if (!jn_work(r, s->n)) return false;
    bool nomem;
    json_t *j = jn_json_load(jn_bytes(s), s->n, &why, &nomem);
    if (nomem) return jn_no_memory(r);
    if (!j) return jn_fail(r, "from_json: %s", why.text);
    bool ok = jn_from_json(r, j, true, jn_str_trusted(s), out);
    json_decref(j);
    return ok;
}

const jn_func *jn_find_filter(const char *name, size_t n)
{
    static const jn_func table[] = {
        {"abs", abs_filter},
        {"attr", attr},
        {"capitalize", capitalize},
        {"center", center},
        {"d", default_filter},
        {"default", default_filter},
        {"e", escape},
        {"escape", escape},
        {"float", float_filter},
        {"forceescape", forceescape},
        {"format", format},
        {"from_json", from_json},
        {"indent", indent},
        {"int", int_filter},
        {"lower", lower},
        {"replace", replace},
        {"round", round_filter},
        {"safe", mark_safe},
        {"string", string},
        {"title", title},
        {"tojson", tojson},
        {"trim", trim},
        {"truncate", truncate_},
        {"upper", upper},
        {"wordcount", wordcount},
    };
    const jn_func *f = jn_find_in(table, sizeof table / sizeof *table, name, n);
    return f ? f : jn_find_seq_filter(name, n);
}
