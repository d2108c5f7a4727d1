/* What the two halves of the parser share: tokens, errors, nodes, literals. */
#include "text/jinja_parser.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/utf8.h"

/* ---- errors, tokens ---- */

static void position(const jn_parser *p, const char *at, int *line, int *column)
{
    *line = 1;
    const char *start = p->src;
    for (const char *q = p->src; q < at; q++) {
        if (*q != '\n') continue;
        ++*line;
        start = q + 1;
    }
    *column = (int)jn_cp_count(start, (size_t)(at - start)) + 1;
}

bool jn_bad_at(jn_parser *p, const char *at, const char *what)
{
    int line, column;
    position(p, at, &line, &column);
    bg_fail(p->r->err, BG_FORMAT, "%s: line %d, column %d: %s", p->r->name, line, column, what);
    return false;
}

bool jn_bad(jn_parser *p, const char *fmt, ...)
{
    char text[200];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    return jn_bad_at(p, p->cur.p, text);
}

/* "expected X, got Y" for the current token */
bool jn_expected(jn_parser *p, const char *what)
{
    const jn_token *t = &p->cur;
    switch (t->kind) {
    case JN_T_EOF:
        return jn_bad(p, "expected %s, got the end of the template", what);
    case JN_T_DATA:
        return jn_bad(p, "expected %s, got text", what);
    default:
        return jn_bad(p, "expected %s, got '%.*s'", what, (int)(t->n < 40 ? t->n : 40), t->p);
    }
}

static bool lex(jn_parser *p, jn_token *t)
{
    *t = jn_lex_next(&p->lx);
    return t->kind != JN_T_ERROR || jn_bad_at(p, p->lx.at, t->p);
}

bool jn_advance(jn_parser *p)
{
    const char *from = p->cur.p;
    if (p->has_look)
        p->cur = p->look;
    else if (!lex(p, &p->cur))
        return false;
    p->has_look = false;
    while ((from = memchr(from, '\n', (size_t)(p->cur.p - from)))) {
        from++;
        p->r->line++;
    }
    return true;
}

/* The token after the current one. */
bool jn_peek(jn_parser *p, jn_token *t)
{
    if (!p->has_look && !lex(p, &p->look)) return false;
    p->has_look = true;
    *t = p->look;
    return true;
}

bool jn_token_is(const jn_token *t, const char *name)
{
    size_t n = strlen(name);
    return t->kind == JN_T_NAME && t->n == n && memcmp(t->p, name, n) == 0;
}

bool jn_at_name(const jn_parser *p, const char *name)
{
    return jn_token_is(&p->cur, name);
}

bool jn_at_op(const jn_parser *p, int op)
{
    return p->cur.kind == JN_T_OP && p->cur.op == op;
}

bool jn_expect_op(jn_parser *p, int op)
{
    char text[4] = {'\'', (char)op, '\'', 0};
    return jn_at_op(p, op) ? jn_advance(p) : jn_expected(p, text);
}

bool jn_expect_name(jn_parser *p, const char *name)
{
    char text[32];
    snprintf(text, sizeof text, "'%s'", name);
    return jn_at_name(p, name) ? jn_advance(p) : jn_expected(p, text);
}

/* ---- nodes ---- */

jn_node *jn_node_new(jn_parser *p, jn_node_kind kind)
{
    jn_node *e = jn_new(p->r, sizeof *e);
    if (!e) return NULL;
    *e = (jn_node){.kind = kind, .line = p->r->line, .height = 1, .sym = -1};
    return e;
}

bool jn_over_kid(jn_parser *p, jn_node *e, const jn_node *kid)
{
    if (kid && kid->height >= e->height) e->height = kid->height + 1;
    return e->height <= JN_MAX_HEIGHT ||
           jn_bad(p, "nested more than %d levels deep", JN_MAX_HEIGHT);
}

bool jn_add_kid(jn_parser *p, jn_node *e, jn_node *kid)
{
    if ((e->n & (e->n - 1)) == 0) { /* grows at 0, 1, 2, 4, 8, ... */
        jn_node **list = jn_arena_grow(p->r->arena, e->list, e->n * sizeof(void *),
                                       (e->n ? e->n * 2 : 1) * sizeof(void *));
        if (!list) return jn_no_memory(p->r);
        e->list = list;
    }
    e->list[e->n++] = kid;
    return jn_over_kid(p, e, kid);
}

/* Adds an operand and the operator in front of it. */
bool jn_add_op(jn_parser *p, jn_node *e, char op, jn_node *kid)
{
    size_t i = e->n - 1;
    if ((i & (i - 1)) == 0) {
        char *ops = jn_arena_grow(p->r->arena, e->ops, i, i ? i * 2 : 1);
        if (!ops) return jn_no_memory(p->r);
        e->ops = ops;
    }
    e->ops[i] = op;
    return jn_add_kid(p, e, kid);
}

bool jn_token_str(jn_parser *p, const jn_token *t, const jn_str **s)
{
    jn_val v;
    if (!jn_str_wrap(p->r, t->p, t->n, true, &v)) return false;
    *s = v.s;
    return true;
}

bool jn_intern(jn_parser *p, const jn_str *name, int *sym)
{
    jn_val k = {.kind = JN_STR, .s = name}, v;
    if (!jn_dict_get(p->r, p->prog->syms, k, &v)) return false;
    if (v.kind == JN_MISSING) {
        v = jn_int((int64_t)p->prog->syms->n);
        if (!jn_dict_set(p->r, p->prog->syms, k, v)) return false;
    }
    *sym = (int)v.i;
    return true;
}

/* Takes the current token, which must be a name. */
bool jn_take_name(jn_parser *p, const jn_str **name)
{
    if (p->cur.kind != JN_T_NAME) return jn_expected(p, "a name");
    return jn_token_str(p, &p->cur, name) && jn_advance(p);
}

bool jn_deeper(jn_parser *p)
{
    if (p->nest >= JN_MAX_SYNTAX_NEST)
        return jn_bad(p, "nested more than %d levels deep", JN_MAX_SYNTAX_NEST);
    p->nest++;
    return true;
}

/* ---- literals ---- */

static bool hex(const char *p, const char *end, int n, uint32_t *v)
{
    *v = 0;
    for (int i = 0; i < n; i++, p++) {
        if (p >= end) return false;
        int c = *p | 32;
        int d = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
        if (d < 0 || (*p & 0x40) != (d > 9 ? 0x40 : 0)) return false;
        *v = *v << 4 | (uint32_t)d;
    }
    return true;
}

static size_t put_scalar(char *out, uint32_t cp)
{
    return bg_utf8_put(out, cp > 0x10ffff || (cp >= 0xd800 && cp < 0xe000) ? 0xfffd : cp);
}

/* The escape behind a backslash at *q; false: it is malformed. */
static bool unescape(const char **q, const char *end, char *out, size_t *n)
{
    static const char from[] = "\\'\"abfnrtv", to[] = "\\'\"\a\b\f\n\r\t\v";
    const char *p = *q;
    char c = *p++;
    uint32_t cp = 0, low;
    const char *simple = c ? strchr(from, c) : NULL;
    *n = 0;
    if (simple) {
        out[(*n)++] = to[simple - from];
    } else if (c >= '0' && c <= '7') {
        cp = (uint32_t)c - '0';
        for (int i = 0; i < 2 && p < end && *p >= '0' && *p <= '7'; i++)
            cp = cp * 8 + (uint32_t)(*p++ - '0');
        *n = bg_utf8_put(out, cp);
    } else if (c == 'x' || c == 'u' || c == 'U') {
        int len = c == 'x' ? 2 : c == 'u' ? 4 : 8;
        if (!hex(p, end, len, &cp)) return false;
        p += len;
        bool pair = cp >= 0xd800 && cp < 0xdc00 && end - p >= 6 && p[0] == '\\' && p[1] == 'u' &&
                    hex(p + 2, end, 4, &low) && low >= 0xdc00 && low < 0xe000;
        if (pair) {
            cp = 0x10000 + ((cp - 0xd800) << 10) + (low - 0xdc00);
            p += 6;
        }
        if (c == 'U' && cp > 0x10ffff) return false;
        *n = put_scalar(out, cp);
    } else if (c == 'N') {
        return false;
    } else if (c != '\n') { /* an unknown escape keeps its backslash; an escaped newline vanishes */
        out[(*n)++] = '\\';
        out[(*n)++] = c;
    }
    *q = p;
    return true;
}

static bool string_part(jn_parser *p, jn_buf *b)
{
    const char *q = p->cur.p + 1, *end = p->cur.p + p->cur.n - 1;
    while (q < end) {
        const char *esc = memchr(q, '\\', (size_t)(end - q));
        if (!esc) esc = end;
        if (!jn_put(p->r, b, q, (size_t)(esc - q), true)) return false;
        q = esc;
        if (q == end) break;
        char out[8];
        size_t n;
        q++;
        if (!unescape(&q, end, out, &n)) return jn_bad_at(p, esc, "malformed escape in a string");
        if (!jn_put(p->r, b, out, n, true)) return false;
    }
    return true;
}

/* Adjacent literals join. */
bool jn_string_literal(jn_parser *p, jn_node *e)
{
    jn_buf *b = jn_buf_new(p->r);
    if (!b) return false;
    while (p->cur.kind == JN_T_STRING)
        if (!string_part(p, b) || !jn_advance(p)) return false;
    return jn_finish(p->r, b, &e->value);
}

bool jn_number_literal(jn_parser *p, jn_node *e)
{
    char text[400];
    size_t n = 0;
    for (size_t i = 0; i < p->cur.n; i++) {
        if (p->cur.p[i] == '_') continue;
        if (n + 1 == sizeof text) return jn_bad(p, "the number is too long");
        text[n++] = p->cur.p[i];
    }
    text[n] = 0;
    if (p->cur.kind == JN_T_FLOAT) {
        e->value = jn_float(strtod(text, NULL));
        return jn_advance(p);
    }
    int base = 10, skip = 0;
    if (n > 2 && text[0] == '0' && text[1] > '9') {
        base = (text[1] | 32) == 'x' ? 16 : (text[1] | 32) == 'o' ? 8 : 2;
        skip = 2;
    }
    uint64_t v = 0;
    for (size_t i = (size_t)skip; i < n; i++) {
        int d = text[i] <= '9' ? text[i] - '0' : (text[i] | 32) - 'a' + 10;
        if (v > ((uint64_t)INT64_MAX - (uint64_t)d) / (uint64_t)base)
            return jn_bad(p, "the number is too large");
        v = v * (uint64_t)base + (uint64_t)d;
    }
    e->value = jn_int((int64_t)v);
    return jn_advance(p);
}
