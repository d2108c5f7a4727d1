/* Recursive descent over the grammar of Jinja2 3.1; each function names the rule it reads. Chains
 * of one precedence level become one flat node, so that only real nesting nests. */
#include "text/jinja_ast.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/utf8.h"
#include "text/jinja_lex.h"

typedef struct macro_use { /* which special names the macro being parsed mentions */
    bool varargs, kwargs, caller;
} macro_use;

typedef struct parser {
    jn_state *r;
    jn_program *prog;
    const char *src;
    jn_lexer lx;
    jn_token cur, look;
    bool has_look;
    int nest;
    int loops;      /* loops we are in, within this macro */
    macro_use *use; /* NULL: not in a macro */
} parser;

/* ---- errors, tokens
 * ------------------------------------------------------------------------------ */

static void position(const parser *p, const char *at, int *line, int *column)
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

static bool bad_at(parser *p, const char *at, const char *what)
{
    int line, column;
    position(p, at, &line, &column);
    bg_fail(p->r->err, BG_FORMAT, "%s: line %d, column %d: %s", p->r->name, line, column, what);
    return false;
}

static bool __attribute__((format(printf, 2, 3))) bad(parser *p, const char *fmt, ...)
{
    char text[200];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    return bad_at(p, p->cur.p, text);
}

/* "expected X, got Y" for the current token */
static bool expected(parser *p, const char *what)
{
    const jn_token *t = &p->cur;
    switch (t->kind) {
    case JN_T_EOF:
        return bad(p, "expected %s, got the end of the template", what);
    case JN_T_DATA:
        return bad(p, "expected %s, got text", what);
    default:
        return bad(p, "expected %s, got '%.*s'", what, (int)(t->n < 40 ? t->n : 40), t->p);
    }
}

static bool lex(parser *p, jn_token *t)
{
    *t = jn_lex_next(&p->lx);
    return t->kind != JN_T_ERROR || bad_at(p, p->lx.at, t->p);
}

static bool advance(parser *p)
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
static bool peek(parser *p, jn_token *t)
{
    if (!p->has_look && !lex(p, &p->look)) return false;
    p->has_look = true;
    *t = p->look;
    return true;
}

static bool token_is_name(const jn_token *t, const char *name)
{
    size_t n = strlen(name);
    return t->kind == JN_T_NAME && t->n == n && memcmp(t->p, name, n) == 0;
}

static bool at_name(const parser *p, const char *name)
{
    return token_is_name(&p->cur, name);
}

static bool at_op(const parser *p, int op)
{
    return p->cur.kind == JN_T_OP && p->cur.op == op;
}

static bool expect_op(parser *p, int op)
{
    char text[4] = {'\'', (char)op, '\'', 0};
    return at_op(p, op) ? advance(p) : expected(p, text);
}

static bool expect_name(parser *p, const char *name)
{
    char text[32];
    snprintf(text, sizeof text, "'%s'", name);
    return at_name(p, name) ? advance(p) : expected(p, text);
}

/* ---- nodes
 * ------------------------------------------------------------------------------------------ */

static jn_node *node(parser *p, jn_node_kind kind)
{
    jn_node *e = jn_new(p->r, sizeof *e);
    if (!e) return NULL;
    *e = (jn_node){.kind = kind, .line = p->r->line, .height = 1, .sym = -1};
    return e;
}

static bool over(parser *p, jn_node *e, const jn_node *kid)
{
    if (kid && kid->height >= e->height) e->height = kid->height + 1;
    return e->height <= JN_MAX_HEIGHT || bad(p, "nested more than %d levels deep", JN_MAX_HEIGHT);
}

static bool add(parser *p, jn_node *e, jn_node *kid)
{
    if ((e->n & (e->n - 1)) == 0) { /* grows at 0, 1, 2, 4, 8, ... */
        jn_node **list = jn_arena_grow(p->r->arena, e->list, e->n * sizeof *list,
                                       (e->n ? e->n * 2 : 1) * sizeof *list);
        if (!list) return jn_no_memory(p->r);
        e->list = list;
    }
    e->list[e->n++] = kid;
    return over(p, e, kid);
}

/* Adds an operand and the operator in front of it. */
static bool add_op(parser *p, jn_node *e, char op, jn_node *kid)
{
    size_t i = e->n - 1;
    if ((i & (i - 1)) == 0) {
        char *ops = jn_arena_grow(p->r->arena, e->ops, i, i ? i * 2 : 1);
        if (!ops) return jn_no_memory(p->r);
        e->ops = ops;
    }
    e->ops[i] = op;
    return add(p, e, kid);
}

static bool token_str(parser *p, const jn_token *t, const jn_str **s)
{
    jn_val v;
    if (!jn_str_wrap(p->r, t->p, t->n, true, &v)) return false;
    *s = v.s;
    return true;
}

static bool symbol(parser *p, const jn_str *name, int *sym)
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
static bool take_name(parser *p, const jn_str **name)
{
    if (p->cur.kind != JN_T_NAME) return expected(p, "a name");
    return token_str(p, &p->cur, name) && advance(p);
}

static bool deeper(parser *p)
{
    if (p->nest >= JN_MAX_SYNTAX_NEST)
        return bad(p, "nested more than %d levels deep", JN_MAX_SYNTAX_NEST);
    p->nest++;
    return true;
}

/* ---- literals
 * ------------------------------------------------------------------------------------- */

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

static bool string_part(parser *p, jn_buf *b)
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
        if (!unescape(&q, end, out, &n)) return bad_at(p, esc, "malformed escape in a string");
        if (!jn_put(p->r, b, out, n, true)) return false;
    }
    return true;
}

/* Adjacent literals join. */
static bool string_literal(parser *p, jn_node *e)
{
    jn_buf *b = jn_buf_new(p->r);
    if (!b) return false;
    while (p->cur.kind == JN_T_STRING)
        if (!string_part(p, b) || !advance(p)) return false;
    return jn_finish(p->r, b, &e->value);
}

static bool number_literal(parser *p, jn_node *e)
{
    char text[400];
    size_t n = 0;
    for (size_t i = 0; i < p->cur.n; i++) {
        if (p->cur.p[i] == '_') continue;
        if (n + 1 == sizeof text) return bad(p, "the number is too long");
        text[n++] = p->cur.p[i];
    }
    text[n] = 0;
    if (p->cur.kind == JN_T_FLOAT) {
        e->value = jn_float(strtod(text, NULL));
        return advance(p);
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
            return bad(p, "the number is too large");
        v = v * (uint64_t)base + (uint64_t)d;
    }
    e->value = jn_int((int64_t)v);
    return advance(p);
}

/* ---- expressions
 * ------------------------------------------------------------------------------------ */

static bool expression(parser *p, jn_node **e); /* condexpr */
static bool or_expr(parser *p, jn_node **e);
static bool unary(parser *p, bool with_filter, jn_node **e);

typedef bool item_rule(parser *p, jn_node **e);

/* tuple: items with commas between; a single one without a comma is itself. */
typedef struct tuple_rule {
    item_rule *item;
    const char *end_name; /* a name that ends the tuple, or NULL */
    bool parens;          /* inside parentheses: may be empty */
} tuple_rule;

static bool at_tuple_end(const parser *p, const tuple_rule *t)
{
    return p->cur.kind == JN_T_VAR_END || p->cur.kind == JN_T_BLOCK_END || at_op(p, ')') ||
           (t->end_name && at_name(p, t->end_name));
}

static bool tuple(parser *p, const tuple_rule *rule, jn_node **e)
{
    jn_node *t = node(p, JN_E_TUPLE);
    bool is_tuple = false;
    if (!t) return false;
    for (;;) {
        if (t->n && !expect_op(p, ',')) return false;
        if (at_tuple_end(p, rule)) break;
        jn_node *item;
        if (!rule->item(p, &item) || !add(p, t, item)) return false;
        if (!at_op(p, ',')) break;
        is_tuple = true;
    }
    if (!is_tuple && t->n == 0 && !rule->parens) return expected(p, "an expression");
    *e = is_tuple || t->n == 0 ? t : t->list[0];
    return true;
}

static bool list_literal(parser *p, jn_node *e)
{
    if (!expect_op(p, '[')) return false;
    while (!at_op(p, ']')) {
        jn_node *item;
        if (e->n && !expect_op(p, ',')) return false;
        if (at_op(p, ']')) break;
        if (!expression(p, &item) || !add(p, e, item)) return false;
    }
    return advance(p);
}

static bool dict_literal(parser *p, jn_node *e)
{
    if (!expect_op(p, '{')) return false;
    while (!at_op(p, '}')) {
        jn_node *k, *v;
        if (e->n && !expect_op(p, ',')) return false;
        if (at_op(p, '}')) break;
        if (!expression(p, &k) || !add(p, e, k) || !expect_op(p, ':')) return false;
        if (!expression(p, &v) || !add(p, e, v)) return false;
    }
    return advance(p);
}

static void note_special(parser *p, const jn_str *name)
{
    if (!p->use) return;
    if (jn_str_is(name, "varargs")) p->use->varargs = true;
    if (jn_str_is(name, "kwargs")) p->use->kwargs = true;
    if (jn_str_is(name, "caller")) p->use->caller = true;
}

static bool name_or_constant(parser *p, jn_node *e)
{
    if (at_name(p, "true") || at_name(p, "True") || at_name(p, "false") || at_name(p, "False")) {
        e->value = jn_bool((p->cur.p[0] | 32) == 't');
        return advance(p);
    }
    if (at_name(p, "none") || at_name(p, "None")) {
        e->value = jn_none();
        return advance(p);
    }
    e->kind = JN_E_NAME;
    if (!take_name(p, &e->str)) return false;
    note_special(p, e->str);
    return symbol(p, e->str, &e->sym);
}

static bool primary(parser *p, jn_node **out)
{
    static const tuple_rule in_parens = {.item = expression, .parens = true};
    jn_node *e = *out = node(p, JN_E_CONST);
    if (!e) return false;
    switch (p->cur.kind) {
    case JN_T_NAME:
        return name_or_constant(p, e);
    case JN_T_STRING:
        return string_literal(p, e);
    case JN_T_INT:
    case JN_T_FLOAT:
        return number_literal(p, e);
    case JN_T_OP:
        if (p->cur.op == '(') return advance(p) && tuple(p, &in_parens, out) && expect_op(p, ')');
        if (p->cur.op == '[') {
            e->kind = JN_E_LIST;
            return list_literal(p, e);
        }
        if (p->cur.op == '{') {
            e->kind = JN_E_DICT;
            return dict_literal(p, e);
        }
        return expected(p, "an expression");
    default:
        return expected(p, "an expression");
    }
}

static bool add_arg(parser *p, jn_node *e, jn_arg arg)
{
    if ((e->n_args & (e->n_args - 1)) == 0) {
        size_t cap = e->n_args ? e->n_args * 2 : 1;
        jn_arg *args =
            jn_arena_grow(p->r->arena, e->args, e->n_args * sizeof *args, cap * sizeof *args);
        if (!args) return jn_no_memory(p->r);
        e->args = args;
    }
    e->args[e->n_args++] = arg;
    return over(p, e, arg.value);
}

/* Arguments in parentheses, into e->args. */
static bool call_args(parser *p, jn_node *e)
{
    bool keywords = false, first = true;
    if (!expect_op(p, '(')) return false;
    while (!at_op(p, ')')) {
        jn_arg arg = {0};
        jn_token next;
        if (!first && !expect_op(p, ',')) return false;
        first = false;
        if (at_op(p, ')')) break;
        if (at_op(p, '*') || at_op(p, JN_OP_POW)) {
            arg.stars = at_op(p, '*') ? 1 : 2;
            if (!advance(p)) return false;
        } else if (p->cur.kind == JN_T_NAME) {
            if (!peek(p, &next)) return false;
            if (next.kind == JN_T_OP && next.op == '=' && (!take_name(p, &arg.name) || !advance(p)))
                return false;
        }
        if (!arg.name && !arg.stars && keywords)
            return bad(p, "a positional argument follows a keyword argument");
        keywords |= arg.name || arg.stars == 2;
        if (!expression(p, &arg.value) || !add_arg(p, e, arg)) return false;
    }
    return advance(p);
}

/* What is inside brackets: an index, or a slice whose parts go to *slice. */
static bool subscript_part(parser *p, jn_node **index)
{
    jn_node *s = NULL, *part = NULL;
    if (!at_op(p, ':')) {
        if (!expression(p, index)) return false;
        if (!at_op(p, ':')) return true;
        part = *index;
    }
    if (!(s = node(p, JN_E_SLICE)) || !add(p, s, part)) return false;
    while (s->n < 3) {
        part = NULL;
        if (at_op(p, ':')) {
            if (!advance(p)) return false;
            bool none = at_op(p, ':') || at_op(p, ']') || at_op(p, ',');
            if (!none && !expression(p, &part)) return false;
        }
        if (!add(p, s, part)) return false;
    }
    *index = s;
    return true;
}

static bool subscript(parser *p, jn_node **e)
{
    jn_node *s = node(p, JN_E_ITEM), *index;
    if (!s || !advance(p) || !subscript_part(p, &index)) return false;
    if (at_op(p, ',')) { /* a[1, 2]: the key is a tuple */
        jn_node *t = node(p, JN_E_TUPLE);
        if (!t || !add(p, t, index)) return false;
        while (at_op(p, ',')) {
            if (!advance(p)) return false;
            if (at_op(p, ']')) break;
            if (!subscript_part(p, &index) || !add(p, t, index)) return false;
        }
        for (size_t i = 0; i < t->n; i++)
            if (t->list[i]->kind == JN_E_SLICE && !t->list[i]->a)
                return bad(p, "a slice inside a tuple is not supported");
        index = t;
    }
    if (!expect_op(p, ']')) return false;
    if (index->kind == JN_E_SLICE && !index->a) { /* still without an object: ours */
        index->a = *e;
        *e = index;
        return over(p, index, index->a);
    }
    s->a = *e;
    s->b = index;
    *e = s;
    return over(p, s, s->a) && over(p, s, s->b);
}

static bool attribute(parser *p, jn_node **e)
{
    jn_node *attr = node(p, JN_E_ATTR);
    if (!attr || !advance(p)) return false;
    attr->a = *e;
    *e = attr;
    if (p->cur.kind == JN_T_INT) { /* a.0 is a[0] */
        attr->kind = JN_E_ITEM;
        attr->b = node(p, JN_E_CONST);
        return attr->b && number_literal(p, attr->b) && over(p, attr, attr->a);
    }
    return take_name(p, &attr->str) && over(p, attr, attr->a);
}

static bool call(parser *p, jn_node **e)
{
    jn_node *c = node(p, JN_E_CALL);
    if (!c) return false;
    c->a = *e;
    *e = c;
    return call_args(p, c) && over(p, c, c->a);
}

static bool postfix(parser *p, jn_node **e)
{
    bool ok = true;
    while (ok) {
        if (at_op(p, '.'))
            ok = attribute(p, e);
        else if (at_op(p, '['))
            ok = subscript(p, e);
        else if (at_op(p, '('))
            ok = call(p, e);
        else
            return true;
    }
    return false;
}

/* The name of a filter or test, dots included. */
static bool dotted_name(parser *p, const jn_str **name)
{
    jn_token first = p->cur, last = p->cur;
    if (p->cur.kind != JN_T_NAME) return expected(p, "a name");
    if (!advance(p)) return false;
    while (at_op(p, '.')) {
        if (!advance(p)) return false;
        if (p->cur.kind != JN_T_NAME) return expected(p, "a name");
        last = p->cur;
        if (!advance(p)) return false;
    }
    first.n = (size_t)(last.p + last.n - first.p);
    return token_str(p, &first, name);
}

/* NAME or NAME(args), applied to *e. */
static bool filter(parser *p, jn_node **e)
{
    jn_node *f = node(p, JN_E_FILTER);
    if (!f || !dotted_name(p, &f->str)) return false;
    f->a = *e;
    *e = f;
    f->func = jn_find_filter(jn_bytes(f->str), f->str->n);
    if (at_op(p, '(') && !call_args(p, f)) return false;
    return over(p, f, f->a);
}

static bool names_content(const jn_node *e)
{
    const jn_str *s = e->kind == JN_E_NAME || e->kind == JN_E_ATTR ? e->str : NULL;
    if (e->kind == JN_E_ITEM && e->b->kind == JN_E_CONST && e->b->value.kind == JN_STR)
        s = e->b->value.s;
    return s && jn_str_is(s, "content");
}

static bool test(parser *p, jn_node **e)
{
    jn_node *t = node(p, JN_E_TEST), *not_node = NULL;
    if (!t || !advance(p)) return false;
    if (at_name(p, "not")) {
        if (!(not_node = node(p, JN_E_NOT)) || !advance(p)) return false;
    }
    if (!dotted_name(p, &t->str)) return false;
    t->func = jn_find_test(jn_bytes(t->str), t->str->n);
    t->a = *e;
    jn_token_kind k = p->cur.kind;
    bool operand = k == JN_T_NAME || k == JN_T_STRING || k == JN_T_INT || k == JN_T_FLOAT ||
                   at_op(p, '[') || at_op(p, '{');
    if (at_name(p, "else") || at_name(p, "or") || at_name(p, "and")) operand = false;
    if (at_op(p, '(')) {
        if (!call_args(p, t)) return false;
    } else if (operand) {
        if (at_name(p, "is")) return bad(p, "tests cannot be chained with 'is'");
        jn_arg arg = {0};
        if (!primary(p, &arg.value) || !postfix(p, &arg.value) || !add_arg(p, t, arg)) return false;
    }
    if (jn_str_is(t->str, "none") && names_content(t->a)) p->prog->tests_null_content = true;
    *e = t;
    if (not_node) {
        not_node->a = t;
        *e = not_node;
    }
    return over(p, t, t->a) && (!not_node || over(p, not_node, t));
}

static bool filters_and_tests(parser *p, jn_node **e)
{
    bool ok = true;
    while (ok) {
        if (at_op(p, '|'))
            ok = advance(p) && filter(p, e);
        else if (at_name(p, "is"))
            ok = test(p, e);
        else if (at_op(p, '('))
            ok = call(p, e);
        else
            return true;
    }
    return false;
}

static bool unary(parser *p, bool with_filter, jn_node **e)
{
    bool ok;
    if (at_op(p, '-') || at_op(p, '+')) {
        jn_node *n = node(p, at_op(p, '-') ? JN_E_NEG : JN_E_POS);
        if (!n || !deeper(p)) return false;
        ok = advance(p) && unary(p, false, &n->a) && over(p, n, n->a);
        p->nest--;
        *e = n;
    } else {
        ok = primary(p, e);
    }
    return ok && postfix(p, e) && (!with_filter || filters_and_tests(p, e));
}

/* Precedence levels of binary operators, tightest last; each is a flat chain of the next. */
enum { L_MATH1, L_CONCAT, L_MATH2, L_POW, L_UNARY };

static char chain_op(const parser *p, int level)
{
    if (p->cur.kind != JN_T_OP) return 0;
    int op = p->cur.op;
    switch (level) {
    case L_MATH1:
        return op == '+' || op == '-' ? (char)op : 0;
    case L_CONCAT:
        return op == '~' ? '~' : 0;
    case L_MATH2:
        return op == '*' || op == '/' || op == '%' ? (char)op
               : op == JN_OP_FLOORDIV              ? JN_FLOORDIV
                                                   : 0;
    default:
        return op == JN_OP_POW ? JN_POW : 0;
    }
}

/* Reads the operators of `level` that follow *e, which was read at the level above. */
static bool chain(parser *p, int level, jn_node **e)
{
    jn_node *c = NULL;
    for (char op; (op = chain_op(p, level));) {
        jn_node *right;
        if (!c) {
            c = node(p, op == '~' ? JN_E_CONCAT : JN_E_CHAIN);
            if (!c || !add(p, c, *e)) return false;
            *e = c;
        }
        if (!advance(p) || !unary(p, true, &right)) return false;
        for (int l = L_POW; l > level; l--)
            if (!chain(p, l, &right)) return false;
        if (!add_op(p, c, op, right)) return false;
    }
    return true;
}

static bool arithmetic(parser *p, jn_node **e)
{
    if (!unary(p, true, e)) return false;
    for (int l = L_POW; l >= L_MATH1; l--)
        if (!chain(p, l, e)) return false;
    return true;
}

static bool compare_op(parser *p, char *op)
{
    static const struct {
        int token;
        char op;
    } ops[] = {{JN_OP_EQ, JN_EQ}, {JN_OP_NE, JN_NE}, {'<', JN_LT},
               {'>', JN_GT},      {JN_OP_LE, JN_LE}, {JN_OP_GE, JN_GE}};
    *op = 0;
    if (at_name(p, "in")) {
        *op = JN_IN;
    } else if (at_name(p, "not")) {
        jn_token next;
        if (!peek(p, &next)) return false;
        if (!token_is_name(&next, "in")) return true;
        *op = JN_NOT_IN;
        if (!advance(p)) return false;
    } else {
        for (size_t i = 0; i < sizeof ops / sizeof *ops; i++)
            if (at_op(p, ops[i].token)) *op = ops[i].op;
        if (!*op) return true;
    }
    return advance(p);
}

static bool comparison(parser *p, jn_node **e)
{
    jn_node *c = NULL;
    if (!arithmetic(p, e)) return false;
    for (;;) {
        char op;
        jn_node *right;
        if (!compare_op(p, &op)) return false;
        if (!op) return true;
        if (!c) {
            c = node(p, JN_E_COMPARE);
            if (!c || !add(p, c, *e)) return false;
        }
        if (!arithmetic(p, &right) || !add_op(p, c, op, right)) return false;
        bool none = right->kind == JN_E_CONST && right->value.kind == JN_NONE;
        if (none && names_content(c->list[c->n - 2])) p->prog->tests_null_content = true;
        *e = c;
    }
}

static bool not_expr(parser *p, jn_node **e)
{
    if (!at_name(p, "not")) return comparison(p, e);
    jn_node *n = node(p, JN_E_NOT);
    if (!n || !deeper(p)) return false;
    bool ok = advance(p) && not_expr(p, &n->a) && over(p, n, n->a);
    p->nest--;
    *e = n;
    return ok;
}

static bool and_expr(parser *p, jn_node **e)
{
    jn_node *c = NULL, *right;
    if (!not_expr(p, e)) return false;
    while (at_name(p, "and")) {
        if (!c && (!(c = node(p, JN_E_AND)) || !add(p, c, *e))) return false;
        if (!advance(p) || !not_expr(p, &right) || !add(p, c, right)) return false;
        *e = c;
    }
    return true;
}

static bool or_expr(parser *p, jn_node **e)
{
    jn_node *c = NULL, *right;
    if (!and_expr(p, e)) return false;
    while (at_name(p, "or")) {
        if (!c && (!(c = node(p, JN_E_OR)) || !add(p, c, *e))) return false;
        if (!advance(p) || !and_expr(p, &right) || !add(p, c, right)) return false;
        *e = c;
    }
    return true;
}

static bool inline_if(parser *p, jn_node **e)
{
    if (!or_expr(p, e)) return false;
    while (at_name(p, "if")) {
        jn_node *c = node(p, JN_E_IF);
        if (!c || !advance(p)) return false;
        c->b = *e;
        if (!or_expr(p, &c->a)) return false;
        if (at_name(p, "else") && (!advance(p) || !expression(p, &c->c))) return false;
        if (!over(p, c, c->a) || !over(p, c, c->b) || !over(p, c, c->c)) return false;
        *e = c;
    }
    return true;
}

static bool expression(parser *p, jn_node **e)
{
    if (!deeper(p)) return false;
    bool ok = inline_if(p, e);
    p->nest--;
    return ok;
}

/* An expression list as {% if %} takes it: a tuple without inline if. */
static bool condition(parser *p, jn_node **e)
{
    static const tuple_rule rule = {.item = or_expr};
    return tuple(p, &rule, e);
}

static bool expression_list(parser *p, jn_node **e)
{
    static const tuple_rule rule = {.item = expression};
    return tuple(p, &rule, e);
}

/* ---- statements
 * ---------------------------------------------------------------------------------------- */

static bool block_until(parser *p, const char *const *ends, size_t n_ends, jn_node **body);

/* `%}`, statements up to {% END, and END itself. */
static bool block(parser *p, const char *end, jn_node **body)
{
    return block_until(p, &end, 1, body) && advance(p);
}

static bool can_assign(const jn_node *e)
{
    if (e->kind == JN_E_NAME) return true;
    if (e->kind != JN_E_TUPLE) return false;
    for (size_t i = 0; i < e->n; i++)
        if (!can_assign(e->list[i])) return false;
    return true;
}

/* What a loop or set assigns to. primary() does not count its parentheses, so they are counted. */
static bool target(parser *p, const char *end_name, jn_node **e)
{
    const tuple_rule rule = {.item = primary, .end_name = end_name};
    if (!tuple(p, &rule, e)) return false;
    return can_assign(*e) || bad(p, "this cannot be assigned to");
}

static bool for_loop(parser *p, jn_node *s)
{
    static const char *const ends[] = {"endfor", "else"};
    static const tuple_rule iterable = {.item = or_expr, .end_name = "recursive"};
    if (!target(p, "in", &s->a) || !expect_name(p, "in") || !tuple(p, &iterable, &s->b))
        return false;
    if (at_name(p, "if") && (!advance(p) || !expression(p, &s->c))) return false;
    if (at_name(p, "recursive")) {
        s->recursive = true;
        if (!advance(p)) return false;
    }
    jn_node *body, *otherwise = NULL;
    p->loops++;
    bool ok = block_until(p, ends, 2, &body);
    p->loops--;
    if (!ok || !add(p, s, body)) return false;
    bool has_else = at_name(p, "else");
    if (!advance(p) || (has_else && !block(p, "endfor", &otherwise))) return false;
    return add(p, s, otherwise) && over(p, s, s->b) && over(p, s, s->c);
}

static bool if_block(parser *p, jn_node *s)
{
    static const char *const ends[] = {"elif", "else", "endif"};
    for (;;) {
        jn_node *cond, *body;
        if (!condition(p, &cond) || !add(p, s, cond)) return false;
        if (!block_until(p, ends, 3, &body) || !add(p, s, body)) return false;
        bool more = at_name(p, "elif"), otherwise = at_name(p, "else");
        if (!advance(p)) return false;
        if (otherwise) return block(p, "endif", &body) && add(p, s, body);
        if (!more) return true;
    }
}

static bool set_target(parser *p, jn_node *s)
{
    jn_token next;
    if (!peek(p, &next)) return false;
    s->ns_target = p->cur.kind == JN_T_NAME && next.kind == JN_T_OP && next.op == '.';
    if (!s->ns_target) return target(p, NULL, &s->a);
    jn_node *ns = node(p, JN_E_CONST);
    if (!ns || !name_or_constant(p, ns)) return false;
    if (ns->kind != JN_E_NAME) return bad(p, "this cannot be assigned to");
    s->a = ns;
    return attribute(p, &s->a) && (s->a->kind == JN_E_ATTR || bad(p, "this cannot be assigned to"));
}

static bool filter_chain(parser *p, jn_node **e)
{
    while (at_op(p, '|'))
        if (!advance(p) || !filter(p, e)) return false;
    return true;
}

static bool set(parser *p, jn_node *s)
{
    if (!set_target(p, s)) return false;
    if (at_op(p, '=')) return advance(p) && expression_list(p, &s->b) && over(p, s, s->b);
    s->kind = JN_S_SET_BLOCK;
    if (at_op(p, '|')) {
        if (!(s->b = node(p, JN_E_HOLE)) || !filter_chain(p, &s->b)) return false;
    }
    jn_node *body;
    int loops = p->loops;
    p->loops = 0;
    bool ok = block(p, "endset", &body) && add(p, s, body) && over(p, s, s->b);
    p->loops = loops;
    return ok;
}

static bool add_param(parser *p, jn_params *m, const jn_str *name, jn_node *def)
{
    size_t n = m->n;
    if ((n & (n - 1)) == 0) {
        size_t cap = n ? n * 2 : 1;
        jn_arena *a = p->r->arena;
        m->syms = jn_arena_grow(a, m->syms, n * sizeof *m->syms, cap * sizeof *m->syms);
        m->names = m->syms
                       ? jn_arena_grow(a, m->names, n * sizeof *m->names, cap * sizeof *m->names)
                       : NULL;
        m->defaults = m->names ? jn_arena_grow(a, m->defaults, n * sizeof *m->defaults,
                                               cap * sizeof *m->defaults)
                               : NULL;
        if (!m->defaults) return jn_no_memory(p->r);
    }
    m->names[n] = name;
    m->defaults[n] = def;
    m->n++;
    return symbol(p, name, &m->syms[n]);
}

static bool signature(parser *p, jn_params *m)
{
    bool defaults = false;
    if (!expect_op(p, '(')) return false;
    while (!at_op(p, ')')) {
        const jn_str *name;
        jn_node *def = NULL;
        if (m->n && !expect_op(p, ',')) return false;
        if (!take_name(p, &name)) return false;
        if (at_op(p, '=')) {
            if (!advance(p) || !expression(p, &def)) return false;
            defaults = true;
        } else if (defaults) {
            return bad(p, "a parameter without default follows one with a default");
        }
        if (!add_param(p, m, name, def)) return false;
    }
    return advance(p);
}

/* Body of a macro or call block: the names it uses decide what it can be called with. */
static bool macro_body(parser *p, jn_node *s, const char *end)
{
    macro_use use = {0}, *outer = p->use;
    int loops = p->loops;
    p->use = &use;
    p->loops = 0;
    bool ok = block(p, end, &s->params->body);
    p->use = outer;
    p->loops = loops;
    s->params->varargs = use.varargs;
    s->params->kwargs = use.kwargs;
    s->params->caller = use.caller;
    if (outer) { /* a name used in an inner macro counts for the outer one too */
        outer->varargs |= use.varargs;
        outer->kwargs |= use.kwargs;
        outer->caller |= use.caller;
    }
    return ok && over(p, s, s->params->body);
}

static bool macro(parser *p, jn_node *s)
{
    s->params = jn_new(p->r, sizeof *s->params);
    if (!s->params || !take_name(p, &s->str) || !symbol(p, s->str, &s->sym)) return false;
    s->params->name = s->str;
    return signature(p, s->params) && macro_body(p, s, "endmacro");
}

static bool call_block(parser *p, jn_node *s)
{
    jn_val name;
    s->params = jn_new(p->r, sizeof *s->params);
    if (!s->params || !jn_str_text(p->r, "caller", &name)) return false;
    s->params->name = name.s;
    if (at_op(p, '(') && !signature(p, s->params)) return false;
    if (!expression(p, &s->a)) return false;
    if (s->a->kind != JN_E_CALL) return expected(p, "a call");
    return macro_body(p, s, "endcall") && over(p, s, s->a);
}

static bool filter_block(parser *p, jn_node *s)
{
    jn_node *body;
    if (!(s->a = node(p, JN_E_HOLE)) || !filter(p, &s->a) || !filter_chain(p, &s->a)) return false;
    int loops = p->loops;
    p->loops = 0;
    bool ok = block(p, "endfilter", &body) && add(p, s, body) && over(p, s, s->a);
    p->loops = loops;
    return ok;
}

static bool with_block(parser *p, jn_node *s)
{
    jn_node *to, *v, *body;
    while (p->cur.kind != JN_T_BLOCK_END) {
        if (s->n && !expect_op(p, ',')) return false;
        if (!primary(p, &to)) return false;
        if (!can_assign(to)) return bad(p, "this cannot be assigned to");
        if (!add(p, s, to) || !expect_op(p, '=') || !expression(p, &v) || !add(p, s, v))
            return false;
    }
    return block(p, "endwith", &body) && add(p, s, body);
}

static bool loop_control(parser *p, jn_node *s)
{
    if (p->loops == 0)
        return bad(p, "'%s' outside a loop", s->kind == JN_S_BREAK ? "break" : "continue");
    return true;
}

static bool generation(parser *p, jn_node *s)
{
    jn_node *body;
    return block(p, "endgeneration", &body) && add(p, s, body);
}

/* {% print a, b %} prints both, where {{ a, b }} prints a tuple. */
static bool print(parser *p, jn_node *s)
{
    do {
        jn_node *one = node(p, JN_S_PRINT);
        if (s->n && !advance(p)) return false;
        if (!one || !expression(p, &one->a) || !over(p, one, one->a) || !add(p, s, one))
            return false;
    } while (at_op(p, ','));
    return true;
}

typedef struct statement_rule {
    const char *name;
    jn_node_kind kind;
    bool (*parse)(parser *p, jn_node *s); /* the current token is the one after the name */
} statement_rule;

static bool statement(parser *p, jn_node **out)
{
    static const statement_rule rules[] = {
        {"for", JN_S_FOR, for_loop},
        {"if", JN_S_IF, if_block},
        {"set", JN_S_SET, set},
        {"macro", JN_S_MACRO, macro},
        {"call", JN_S_CALL, call_block},
        {"filter", JN_S_FILTER, filter_block},
        {"with", JN_S_WITH, with_block},
        {"print", JN_S_BODY, print},
        {"break", JN_S_BREAK, loop_control},
        {"continue", JN_S_CONTINUE, loop_control},
        {"generation", JN_S_SCOPE, generation},
    };
    if (p->cur.kind != JN_T_NAME) return expected(p, "the name of a tag");
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++) {
        if (!at_name(p, rules[i].name)) continue;
        jn_node *s = *out = node(p, rules[i].kind);
        if (!s || !deeper(p)) return false;
        bool ok = advance(p) && rules[i].parse(p, s);
        p->nest--;
        return ok;
    }
    return bad(p, "unknown tag '%.*s'", (int)(p->cur.n < 40 ? p->cur.n : 40), p->cur.p);
}

static bool text(parser *p, jn_node *body)
{
    jn_node *s = node(p, JN_S_TEXT);
    if (!s || !jn_str_wrap(p->r, p->cur.p, p->cur.n, true, &s->value)) return false;
    return add(p, body, s) && advance(p);
}

static bool printed(parser *p, jn_node *body)
{
    jn_node *s = node(p, JN_S_PRINT);
    if (!s || !advance(p) || !expression_list(p, &s->a) || !over(p, s, s->a)) return false;
    if (p->cur.kind != JN_T_VAR_END) return expected(p, "the end of the print statement");
    return add(p, body, s) && advance(p);
}

static bool at_end(const parser *p, const char *const *ends, size_t n_ends)
{
    for (size_t i = 0; i < n_ends; i++)
        if (at_name(p, ends[i])) return true;
    return false;
}

/* Statements up to a tag of one of these names, whose name is then the current token. Without ends:
 * up to the end of the template. */
static bool statements(parser *p, const char *const *ends, size_t n_ends, jn_node *body)
{
    for (;;) {
        jn_node *s = NULL;
        switch (p->cur.kind) {
        case JN_T_DATA:
            if (!text(p, body)) return false;
            break;
        case JN_T_VAR_BEGIN:
            if (!printed(p, body)) return false;
            break;
        case JN_T_BLOCK_BEGIN:
            if (!advance(p)) return false;
            if (at_end(p, ends, n_ends)) return true;
            if (!statement(p, &s) || !add(p, body, s)) return false;
            if (p->cur.kind != JN_T_BLOCK_END) return expected(p, "the end of the tag");
            if (!advance(p)) return false;
            break;
        default:
            return n_ends == 0 ||
                   bad(p, "the template ends where '%s' is missing", ends[n_ends - 1]);
        }
    }
}

static bool block_until(parser *p, const char *const *ends, size_t n_ends, jn_node **body)
{
    *body = node(p, JN_S_BODY);
    if (!*body) return false;
    if (at_op(p, ':') && !advance(p)) return false;
    if (p->cur.kind != JN_T_BLOCK_END) return expected(p, "the end of the tag");
    return advance(p) && statements(p, ends, n_ends, *body);
}

/* ---- the whole
 * ------------------------------------------------------------------------------------------ */

/* A copy with newlines as \n and without the last one. */
static char *normalise(jn_state *r, const char *src, size_t *n)
{
    char *to = jn_new(r, *n + 1);
    if (!to) return NULL;
    size_t k = 0;
    for (size_t i = 0; i < *n; i++) {
        to[k] = src[i];
        if (src[i] == '\r') {
            to[k] = '\n';
            if (i + 1 < *n && src[i + 1] == '\n') i++;
        }
        k++;
    }
    if (k && to[k - 1] == '\n') k--;
    *n = k;
    return to;
}

static bool parse(parser *p, const char *source, size_t n)
{
    jn_state *r = p->r;
    jn_val syms;
    char *src = normalise(r, source, &n);
    if (!src || !jn_dict_new(r, JN_DICT, &syms)) return false;
    p->src = p->cur.p = src;
    p->prog->syms = syms.dict;
    jn_lex_init(&p->lx, src, n);
    p->prog->body = node(p, JN_S_BODY);
    return p->prog->body && advance(p) && statements(p, NULL, 0, p->prog->body);
}

bg_status jn_parse(jn_program **out, const char *source, size_t n, const char *name,
                   int64_t fail_alloc, bg_error *err)
{
    *out = NULL;
    if (n > JN_MAX_SOURCE)
        return bg_fail(err, BG_FORMAT, "%s: %zu bytes long, at most %d are allowed", name, n,
                       JN_MAX_SOURCE);
    jn_program *prog = calloc(1, sizeof *prog);
    if (!prog) return bg_fail(err, BG_NOMEM, "%s: out of memory", name);
    prog->arena = (jn_arena){.limit = (size_t)JN_MAX_SOURCE * 512, .fail_at = fail_alloc};
    jn_state r = {
        .arena = &prog->arena, .err = err, .name = name, .line = 1, .fail_status = BG_FORMAT};
    r.lim = (jn_limits){.output_bytes = SIZE_MAX / 4, .steps = INT64_MAX};
    parser p = {.r = &r, .prog = prog};
    size_t n_name = strlen(name) + 1;
    char *own = jn_new(&r, n_name);
    if (own) {
        prog->name = memcpy(own, name, n_name);
        if (parse(&p, source, n)) {
            prog->arena.fail_at = 0;
            *out = prog;
            return BG_OK;
        }
    }
    jn_program_free(prog);
    return err->status;
}

void jn_program_free(jn_program *p)
{
    if (!p) return;
    jn_arena_release(&p->arena);
    free(p);
}

int jn_symbol(const jn_program *p, const char *name, size_t n)
{
    for (size_t i = 0; i < p->syms->n; i++) {
        const jn_str *s = p->syms->e[i].k.s;
        if (s->n == n && memcmp(jn_bytes(s), name, n) == 0) return (int)i;
    }
    return -1;
}
