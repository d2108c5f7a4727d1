/* Values to text: str(), repr() and json.dumps() of Python.
 *
 * Provenance: numbers and constants count as trusted, as they cannot spell a control token by
 * themselves and templates build such tokens around them (<|image_1|>). A container becomes one
 * stretch: trusted only if every string inside is. Finer cuts would only split the JSON of a
 * request into more pieces for the tokenizer. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/utf8.h"
#include "text/jinja_unicode.h"
#include "text/jinja_value.h"

size_t jn_float_text(double f, char out[JN_FLOAT_TEXT])
{
    char e[JN_FLOAT_TEXT], digits[20];
    if (isnan(f) || isinf(f))
        return (size_t)snprintf(out, JN_FLOAT_TEXT, isnan(f) ? "nan" : f < 0 ? "-inf" : "inf");
    for (int p = 0; p < 17; p++) { /* the fewest digits that read back as f */
        snprintf(e, sizeof e, "%.*e", p, f);
        if (strtod(e, NULL) == f) break;
    }
    int n = 0, exp = atoi(strchr(e, 'e') + 1);
    for (const char *q = e; *q != 'e'; q++)
        if (*q >= '0' && *q <= '9') digits[n++] = *q;
    digits[n] = 0;
    const char *sign = signbit(f) ? "-" : "";
    int k;
    if (exp < -4 || exp >= 16)
        k = snprintf(out, JN_FLOAT_TEXT, "%s%c%s%se%c%02d", sign, digits[0], n > 1 ? "." : "",
                     digits + 1, exp < 0 ? '-' : '+', abs(exp));
    else if (exp < 0)
        k = snprintf(out, JN_FLOAT_TEXT, "%s0.%.*s%s", sign, -exp - 1, "0000", digits);
    else if (n <= exp + 1)
        k = snprintf(out, JN_FLOAT_TEXT, "%s%s%.*s.0", sign, digits, exp + 1 - n,
                     "0000000000000000");
    else
        k = snprintf(out, JN_FLOAT_TEXT, "%s%.*s.%s", sign, exp + 1, digits, digits + exp + 1);
    return (size_t)k;
}

/* Whether every string inside is trusted. */
static bool all_trusted(jn_state *r, jn_val v, bool *yes)
{
    if (v.kind == JN_STR) *yes = *yes && jn_str_trusted(v.s);
    bool list = v.kind == JN_LIST || v.kind == JN_TUPLE || v.kind == JN_VIEW;
    bool dict = v.kind == JN_DICT || v.kind == JN_NAMESPACE;
    if (!*yes || (!list && !dict)) return true;
    if (!jn_work(r, 0) || !jn_enter(r)) return false;
    bool ok = true;
    for (size_t i = 0; ok && list && i < v.list->n; i++)
        ok = all_trusted(r, v.list->v[i], yes);
    for (size_t i = 0; ok && dict && i < v.dict->n; i++)
        ok = all_trusted(r, v.dict->e[i].k, yes) && all_trusted(r, v.dict->e[i].v, yes);
    jn_leave(r);
    return ok;
}

/* ---- repr ---- */

typedef struct writer { /* where a container goes, and the one trust it has */
    jn_buf *b;
    bool trusted;
    const jn_json_style *json;
} writer;

static bool put(jn_state *r, const writer *w, const char *p, size_t n)
{
    return jn_put(r, w->b, p, n, w->trusted);
}

static bool put_text(jn_state *r, const writer *w, const char *text)
{
    return put(r, w, text, strlen(text));
}

/* How repr() writes c, in out[16]; 0: as it is. */
static int repr_escape(uint32_t c, char quote, char *out)
{
    if (c == (uint32_t)quote || c == '\\') return sprintf(out, "\\%c", (char)c);
    if (c == '\n' || c == '\r' || c == '\t')
        return sprintf(out, "\\%c", c == '\n' ? 'n' : c == '\r' ? 'r' : 't');
    if (jn_is_printable(c)) return 0;
    return sprintf(out, c < 0x100 ? "\\x%02x" : c < 0x10000 ? "\\u%04x" : "\\U%08x", c);
}

static bool repr_quoted(jn_state *r, const writer *w, const jn_str *s)
{
    const char *p = jn_bytes(s);
    char quote = memchr(p, '\'', s->n) && !memchr(p, '"', s->n) ? '"' : '\'';
    size_t start = 0;
    if (!put(r, w, &quote, 1)) return false;
    for (size_t i = 0, k; i < s->n; i += k) {
        uint32_t c = (unsigned char)p[i];
        char esc[16];
        k = c < 0x80 ? 1 : bg_utf8_next(p + i, s->n - i, &c);
        int n = c == BG_UTF8_BAD ? 0 : repr_escape(c, quote, esc);
        if (n == 0) continue;
        if (!put(r, w, p + start, i - start) || !put(r, w, esc, (size_t)n)) return false;
        start = i + k;
    }
    return put(r, w, p + start, s->n - start) && put(r, w, &quote, 1);
}

static bool repr_str(jn_state *r, const writer *w, const jn_str *s)
{
    if (!s->safe) return repr_quoted(r, w, s);
    return put_text(r, w, "Markup(") && repr_quoted(r, w, s) && put_text(r, w, ")");
}

static bool repr(jn_state *r, const writer *w, jn_val v);

static bool repr_items(jn_state *r, const writer *w, const jn_list *l, const char *open,
                       const char *close)
{
    if (!put_text(r, w, open)) return false;
    for (size_t i = 0; i < l->n; i++) {
        if (i && !put_text(r, w, ", ")) return false;
        if (!repr(r, w, l->v[i])) return false;
    }
    return put_text(r, w, close);
}

static bool repr_dict(jn_state *r, const writer *w, const jn_dict *d)
{
    if (!put_text(r, w, "{")) return false;
    for (size_t i = 0; i < d->n; i++) {
        if (i && !put_text(r, w, ", ")) return false;
        if (!repr(r, w, d->e[i].k) || !put_text(r, w, ": ") || !repr(r, w, d->e[i].v)) return false;
    }
    return put_text(r, w, "}");
}

static bool repr_container(jn_state *r, const writer *w, jn_val v)
{
    switch (v.kind) {
    case JN_LIST:
        return repr_items(r, w, v.list, "[", "]");
    case JN_TUPLE:
        return repr_items(r, w, v.list, "(", v.list->n == 1 ? ",)" : ")");
    case JN_VIEW:
        return put_text(r, w, v.list->view) && repr_items(r, w, v.list, "([", "])");
    case JN_DICT:
        return repr_dict(r, w, v.dict);
    default:
        return put_text(r, w, "<Namespace ") && repr_dict(r, w, v.dict) && put_text(r, w, ">");
    }
}

/* What has no text of its own worth keeping. */
static int object_text(jn_val v, char *out, size_t size)
{
    if (v.kind == JN_LOOP) return (int)jn_loop_text(v.loop, out, size);
    if (v.kind == JN_FUNC) return snprintf(out, size, "<function %s>", v.func->name);
    if (v.kind == JN_METHOD)
        return snprintf(out, size, "<built-in method %s>", v.method->func->name);
    if (v.kind == JN_MACRO) {
        const jn_str *name = jn_macro_name(v.macro);
        return snprintf(out, size, "<Macro '%.*s'>", (int)(name->n < 80 ? name->n : 80),
                        jn_bytes(name));
    }
    return snprintf(out, size, "<%s object>", jn_type_name(v));
}

/* Text of what is neither string nor container. */
static size_t scalar_text(jn_val v, char *out, size_t size)
{
    int n;
    switch (v.kind) {
    case JN_NONE:
        n = snprintf(out, size, "None");
        break;
    case JN_BOOL:
        n = snprintf(out, size, v.b ? "True" : "False");
        break;
    case JN_INT:
        n = snprintf(out, size, "%lld", (long long)v.i);
        break;
    case JN_FLOAT:
        return jn_float_text(v.f, out);
    case JN_RANGE: {
        const jn_range *g = v.range;
        n = snprintf(out, size, g->step == 1 ? "range(%lld, %lld)" : "range(%lld, %lld, %lld)",
                     (long long)g->start, (long long)g->stop, (long long)g->step);
        break;
    }
    default:
        n = object_text(v, out, size);
        break;
    }
    return n < 0 ? 0 : (size_t)n < size ? (size_t)n : size - 1;
}

static bool repr(jn_state *r, const writer *w, jn_val v)
{
    char text[128];
    switch (v.kind) {
    case JN_MISSING:
    case JN_UNDEF:
        return put_text(r, w, "Undefined");
    case JN_STR:
        return repr_str(r, w, v.s);
    case JN_LIST:
    case JN_TUPLE:
    case JN_VIEW:
    case JN_DICT:
    case JN_NAMESPACE:
        break;
    default:
        return put(r, w, text, scalar_text(v, text, sizeof text));
    }
    if (!jn_enter(r)) return false;
    bool ok = repr_container(r, w, v);
    jn_leave(r);
    return ok;
}

static bool put_repr(jn_state *r, jn_buf *b, jn_val v)
{
    writer w = {.b = b, .trusted = true};
    return all_trusted(r, v, &w.trusted) && repr(r, &w, v);
}

bool jn_print(jn_state *r, jn_buf *b, jn_val v)
{
    char text[128];
    switch (v.kind) {
    case JN_MISSING:
    case JN_UNDEF:
        return true;
    case JN_STR:
        return jn_put_str(r, b, v.s);
    case JN_LIST:
    case JN_TUPLE:
    case JN_VIEW:
    case JN_DICT:
    case JN_NAMESPACE:
        return put_repr(r, b, v);
    default:
        return jn_put(r, b, text, scalar_text(v, text, sizeof text), true);
    }
}

bool jn_str_of(jn_state *r, jn_val v, const jn_str **s)
{
    if (v.kind != JN_STR) {
        jn_buf *b = jn_buf_new(r);
        if (!b || !jn_print(r, b, v) || !jn_finish(r, b, &v)) return false;
    }
    *s = v.s;
    return true;
}

bool jn_repr(jn_state *r, jn_val v, jn_val *out)
{
    jn_buf *b = jn_buf_new(r);
    return b && put_repr(r, b, v) && jn_finish(r, b, out);
}

/* ---- JSON ---- */

static int json_escape(uint32_t c, bool ascii, char *out)
{
    static const char from[] = "\"\\\b\f\n\r\t", to[] = "\"\\bfnrt";
    const char *simple = c && c < 0x80 ? strchr(from, (int)c) : NULL;
    if (simple) return sprintf(out, "\\%c", to[simple - from]);
    if (c >= 0x20 && (!ascii || c < 0x7f)) return 0;
    if (c < 0x10000) return sprintf(out, "\\u%04x", c);
    c -= 0x10000;
    return sprintf(out, "\\u%04x\\u%04x", 0xd800 + (c >> 10), 0xdc00 + (c & 0x3ff));
}

static bool json_str(jn_state *r, const writer *w, const jn_str *s)
{
    const char *p = jn_bytes(s);
    size_t start = 0;
    if (!put_text(r, w, "\"")) return false;
    for (size_t i = 0, k; i < s->n; i += k) {
        uint32_t c = (unsigned char)p[i];
        char esc[16];
        k = c < 0x80 ? 1 : bg_utf8_next(p + i, s->n - i, &c);
        if (c == BG_UTF8_BAD) c = 0xfffd; /* escaped in ASCII, else left alone */
        int n = json_escape(c, w->json->ascii, esc);
        if (n == 0) continue;
        if (!put(r, w, p + start, i - start) || !put(r, w, esc, (size_t)n)) return false;
        start = i + k;
    }
    return put(r, w, p + start, s->n - start) && put_text(r, w, "\"");
}

static bool json_float(jn_state *r, const writer *w, double f)
{
    char text[JN_FLOAT_TEXT];
    if (isnan(f)) return put_text(r, w, "NaN");
    if (isinf(f)) return put_text(r, w, f < 0 ? "-Infinity" : "Infinity");
    return put(r, w, text, jn_float_text(f, text));
}

static bool new_line(jn_state *r, const writer *w, int level)
{
    if (!w->json->indent) return true;
    if (!put_text(r, w, "\n")) return false;
    for (int i = 0; i < level; i++)
        if (!put(r, w, jn_bytes(w->json->indent), w->json->indent->n)) return false;
    return true;
}

static bool json(jn_state *r, const writer *w, int level, jn_val v);

static bool json_list(jn_state *r, const writer *w, int level, const jn_list *l)
{
    if (l->n == 0) return put_text(r, w, "[]");
    if (!put_text(r, w, "[")) return false;
    for (size_t i = 0; i < l->n; i++) {
        const jn_str *sep = w->json->item_sep;
        if (i && !put(r, w, jn_bytes(sep), sep->n)) return false;
        if (!new_line(r, w, level + 1) || !json(r, w, level + 1, l->v[i])) return false;
    }
    return new_line(r, w, level) && put_text(r, w, "]");
}

static bool json_key(jn_state *r, const writer *w, int level, jn_val k)
{
    if (k.kind == JN_STR) return json_str(r, w, k.s);
    if (k.kind != JN_NONE && !jn_is_number(k))
        return jn_fail(r, "keys of JSON objects must be str, int, float, bool or None, not %s",
                       jn_type_name(k));
    return put_text(r, w, "\"") && json(r, w, level, k) && put_text(r, w, "\"");
}

/* The entries in the order of their keys. */
static bool sorted_entries(jn_state *r, const jn_dict *d, const jn_entry **out)
{
    jn_entry *e = jn_new_array(r, d->n, sizeof *e);
    if (!e) return false;
    for (size_t i = 0; i < d->n; i++) { /* by insertion: objects are small, work is counted */
        size_t at = i;
        for (; at > 0; at--) {
            int cmp;
            if (!jn_compare(r, e[at - 1].k, d->e[i].k, &cmp)) return false;
            if (cmp <= 0) break;
            e[at] = e[at - 1];
        }
        e[at] = d->e[i];
    }
    *out = e;
    return true;
}

static bool json_dict(jn_state *r, const writer *w, int level, const jn_dict *d)
{
    const jn_entry *e = d->e;
    if (d->n == 0) return put_text(r, w, "{}");
    if (w->json->sort && !sorted_entries(r, d, &e)) return false;
    if (!put_text(r, w, "{")) return false;
    for (size_t i = 0; i < d->n; i++) {
        const jn_str *item = w->json->item_sep, *key = w->json->key_sep;
        if (i && !put(r, w, jn_bytes(item), item->n)) return false;
        if (!new_line(r, w, level + 1) || !json_key(r, w, level + 1, e[i].k)) return false;
        if (!put(r, w, jn_bytes(key), key->n) || !json(r, w, level + 1, e[i].v)) return false;
    }
    return new_line(r, w, level) && put_text(r, w, "}");
}

static bool json(jn_state *r, const writer *w, int level, jn_val v)
{
    char text[32];
    switch (v.kind) {
    case JN_NONE:
        return put_text(r, w, "null");
    case JN_BOOL:
        return put_text(r, w, v.b ? "true" : "false");
    case JN_INT:
        return put(r, w, text, (size_t)sprintf(text, "%lld", (long long)v.i));
    case JN_FLOAT:
        return json_float(r, w, v.f);
    case JN_STR:
        return json_str(r, w, v.s);
    case JN_LIST:
    case JN_TUPLE:
    case JN_DICT:
        break;
    default:
        return jn_fail(r, "Object of type %s is not JSON serializable", jn_type_name(v));
    }
    if (!jn_work(r, 0) || !jn_enter(r)) return false;
    bool ok = v.kind == JN_DICT ? json_dict(r, w, level, v.dict) : json_list(r, w, level, v.list);
    jn_leave(r);
    return ok;
}

bool jn_to_json(jn_state *r, jn_val v, const jn_json_style *style, jn_val *out)
{
    writer w = {.b = jn_buf_new(r), .trusted = true, .json = style};
    return w.b && all_trusted(r, v, &w.trusted) && json(r, &w, 0, v) && jn_finish(r, w.b, out);
}
