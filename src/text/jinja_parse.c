/* Statements, and a whole template. */
#include <stdlib.h>
#include <string.h>

#include "text/jinja_parser.h"

/* ---- statements ---- */

static bool block_until(jn_parser *p, const char *const *ends, size_t n_ends, jn_node **body);

/* `%}`, statements up to {% END, and END itself. */
static bool block(jn_parser *p, const char *end, jn_node **body)
{
    return block_until(p, &end, 1, body) && jn_advance(p);
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
static bool target(jn_parser *p, const char *end_name, jn_node **e)
{
    const jn_tuple_rule rule = {.item = jn_primary, .end_name = end_name};
    if (!jn_tuple(p, &rule, e)) return false;
    return can_assign(*e) || jn_bad(p, "this cannot be assigned to");
}

static bool for_loop(jn_parser *p, jn_node *s)
{
    static const char *const ends[] = {"endfor", "else"};
    static const jn_tuple_rule iterable = {.item = jn_or_expr, .end_name = "recursive"};
    if (!target(p, "in", &s->a) || !jn_expect_name(p, "in") || !jn_tuple(p, &iterable, &s->b))
        return false;
    if (jn_at_name(p, "if") && (!jn_advance(p) || !jn_expression(p, &s->c))) return false;
    if (jn_at_name(p, "recursive")) {
        s->recursive = true;
        if (!jn_advance(p)) return false;
    }
    jn_node *body, *otherwise = NULL;
    p->loops++;
    bool ok = block_until(p, ends, 2, &body);
    p->loops--;
    if (!ok || !jn_add_kid(p, s, body)) return false;
    bool has_else = jn_at_name(p, "else");
    if (!jn_advance(p) || (has_else && !block(p, "endfor", &otherwise))) return false;
    return jn_add_kid(p, s, otherwise) && jn_over_kid(p, s, s->b) && jn_over_kid(p, s, s->c);
}

static bool if_block(jn_parser *p, jn_node *s)
{
    static const char *const ends[] = {"elif", "else", "endif"};
    for (;;) {
        jn_node *cond, *body;
        if (!jn_condition(p, &cond) || !jn_add_kid(p, s, cond)) return false;
        if (!block_until(p, ends, 3, &body) || !jn_add_kid(p, s, body)) return false;
        bool more = jn_at_name(p, "elif"), otherwise = jn_at_name(p, "else");
        if (!jn_advance(p)) return false;
        if (otherwise) return block(p, "endif", &body) && jn_add_kid(p, s, body);
        if (!more) return true;
    }
}

static bool set_target(jn_parser *p, jn_node *s)
{
    jn_token next;
    if (!jn_peek(p, &next)) return false;
    s->ns_target = p->cur.kind == JN_T_NAME && next.kind == JN_T_OP && next.op == '.';
    if (!s->ns_target) return target(p, NULL, &s->a);
    jn_node *ns = jn_node_new(p, JN_E_CONST);
    if (!ns || !jn_name(p, ns)) return false;
    if (ns->kind != JN_E_NAME) return jn_bad(p, "this cannot be assigned to");
    s->a = ns;
    return jn_attribute(p, &s->a) &&
           (s->a->kind == JN_E_ATTR || jn_bad(p, "this cannot be assigned to"));
}

static bool filter_chain(jn_parser *p, jn_node **e)
{
    while (jn_at_op(p, '|'))
        if (!jn_advance(p) || !jn_filter(p, e)) return false;
    return true;
}

static bool set(jn_parser *p, jn_node *s)
{
    if (!set_target(p, s)) return false;
    if (jn_at_op(p, '='))
        return jn_advance(p) && jn_expression_list(p, &s->b) && jn_over_kid(p, s, s->b);
    s->kind = JN_S_SET_BLOCK;
    if (jn_at_op(p, '|')) {
        if (!(s->b = jn_node_new(p, JN_E_HOLE)) || !filter_chain(p, &s->b)) return false;
    }
    jn_node *body;
    int loops = p->loops;
    p->loops = 0;
    bool ok = block(p, "endset", &body) && jn_add_kid(p, s, body) && jn_over_kid(p, s, s->b);
    p->loops = loops;
    return ok;
}

static bool add_param(jn_parser *p, jn_params *m, const jn_str *name, jn_node *def)
{
    size_t n = m->n;
    if ((n & (n - 1)) == 0) {
        size_t cap = n ? n * 2 : 1;
        jn_arena *a = p->r->arena;
        const size_t old = n * sizeof(void *), size = cap * sizeof(void *);
        m->syms = jn_arena_grow(a, m->syms, n * sizeof *m->syms, cap * sizeof *m->syms);
        m->names = m->syms ? jn_arena_grow(a, m->names, old, size) : NULL;
        m->defaults = m->names ? jn_arena_grow(a, m->defaults, old, size) : NULL;
        if (!m->defaults) return jn_no_memory(p->r);
    }
    m->names[n] = name;
    m->defaults[n] = def;
    m->n++;
    return jn_intern(p, name, &m->syms[n]);
}

static bool signature(jn_parser *p, jn_params *m)
{
    bool defaults = false;
    if (!jn_expect_op(p, '(')) return false;
    while (!jn_at_op(p, ')')) {
        const jn_str *name;
        jn_node *def = NULL;
        if (m->n && !jn_expect_op(p, ',')) return false;
        if (!jn_take_name(p, &name)) return false;
        if (jn_at_op(p, '=')) {
            if (!jn_advance(p) || !jn_expression(p, &def)) return false;
            defaults = true;
        } else if (defaults) {
            return jn_bad(p, "a parameter without default follows one with a default");
        }
        if (!add_param(p, m, name, def)) return false;
    }
    return jn_advance(p);
}

/* Body of a macro or call block: the names it uses decide what it can be called with. */
static bool macro_body(jn_parser *p, jn_node *s, const char *end)
{
    jn_macro_use use = {0}, *outer = p->use;
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
    return ok && jn_over_kid(p, s, s->params->body);
}

static bool macro(jn_parser *p, jn_node *s)
{
    s->params = jn_new(p->r, sizeof *s->params);
    if (!s->params || !jn_take_name(p, &s->str) || !jn_intern(p, s->str, &s->sym)) return false;
    s->params->name = s->str;
    return signature(p, s->params) && macro_body(p, s, "endmacro");
}

static bool call_block(jn_parser *p, jn_node *s)
{
    jn_val name;
    s->params = jn_new(p->r, sizeof *s->params);
    if (!s->params || !jn_str_text(p->r, "caller", &name)) return false;
    s->params->name = name.s;
    if (jn_at_op(p, '(') && !signature(p, s->params)) return false;
    if (!jn_expression(p, &s->a)) return false;
    if (s->a->kind != JN_E_CALL) return jn_expected(p, "a call");
    return macro_body(p, s, "endcall") && jn_over_kid(p, s, s->a);
}

static bool filter_block(jn_parser *p, jn_node *s)
{
    jn_node *body;
    if (!(s->a = jn_node_new(p, JN_E_HOLE)) || !jn_filter(p, &s->a) || !filter_chain(p, &s->a))
        return false;
    int loops = p->loops;
    p->loops = 0;
    bool ok = block(p, "endfilter", &body) && jn_add_kid(p, s, body) && jn_over_kid(p, s, s->a);
    p->loops = loops;
    return ok;
}

static bool with_block(jn_parser *p, jn_node *s)
{
    jn_node *to, *v, *body;
    while (p->cur.kind != JN_T_BLOCK_END) {
        if (s->n && !jn_expect_op(p, ',')) return false;
        if (!jn_primary(p, &to)) return false;
        if (!can_assign(to)) return jn_bad(p, "this cannot be assigned to");
        if (!jn_add_kid(p, s, to) || !jn_expect_op(p, '=') || !jn_expression(p, &v) ||
            !jn_add_kid(p, s, v))
            return false;
    }
    return block(p, "endwith", &body) && jn_add_kid(p, s, body);
}

static bool loop_control(jn_parser *p, jn_node *s)
{
    if (p->loops == 0)
        return jn_bad(p, "'%s' outside a loop", s->kind == JN_S_BREAK ? "break" : "continue");
    return true;
}

static bool generation(jn_parser *p, jn_node *s)
{
    jn_node *body;
    return block(p, "endgeneration", &body) && jn_add_kid(p, s, body);
}

/* {% print a, b %} prints both, where {{ a, b }} prints a tuple. */
static bool print(jn_parser *p, jn_node *s)
{
    do {
        jn_node *one = jn_node_new(p, JN_S_PRINT);
        if (s->n && !jn_advance(p)) return false;
        if (!one || !jn_expression(p, &one->a) || !jn_over_kid(p, one, one->a) ||
            !jn_add_kid(p, s, one))
            return false;
    } while (jn_at_op(p, ','));
    return true;
}

typedef struct statement_rule {
    const char *name;
    jn_node_kind kind;
    bool (*parse)(jn_parser *p, jn_node *s); /* the current token is the one after the name */
} statement_rule;

static bool statement(jn_parser *p, jn_node **out)
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
    if (p->cur.kind != JN_T_NAME) return jn_expected(p, "the name of a tag");
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++) {
        if (!jn_at_name(p, rules[i].name)) continue;
        jn_node *s = *out = jn_node_new(p, rules[i].kind);
        if (!s || !jn_deeper(p)) return false;
        bool ok = jn_advance(p) && rules[i].parse(p, s);
        p->nest--;
        return ok;
    }
    return jn_bad(p, "unknown tag '%.*s'", (int)(p->cur.n < 40 ? p->cur.n : 40), p->cur.p);
}

static bool text(jn_parser *p, jn_node *body)
{
    jn_node *s = jn_node_new(p, JN_S_TEXT);
    if (!s || !jn_str_wrap(p->r, p->cur.p, p->cur.n, true, &s->value)) return false;
    return jn_add_kid(p, body, s) && jn_advance(p);
}

static bool printed(jn_parser *p, jn_node *body)
{
    jn_node *s = jn_node_new(p, JN_S_PRINT);
    if (!s || !jn_advance(p) || !jn_expression_list(p, &s->a) || !jn_over_kid(p, s, s->a))
        return false;
    if (p->cur.kind != JN_T_VAR_END) return jn_expected(p, "the end of the print statement");
    return jn_add_kid(p, body, s) && jn_advance(p);
}

static bool at_end(const jn_parser *p, const char *const *ends, size_t n_ends)
{
    for (size_t i = 0; i < n_ends; i++)
        if (jn_at_name(p, ends[i])) return true;
    return false;
}

/* Statements up to a tag of one of these names, whose name is then the current token. Without ends:
 * up to the end of the template. */
static bool statements(jn_parser *p, const char *const *ends, size_t n_ends, jn_node *body)
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
            if (!jn_advance(p)) return false;
            if (at_end(p, ends, n_ends)) return true;
            if (!statement(p, &s) || !jn_add_kid(p, body, s)) return false;
            if (p->cur.kind != JN_T_BLOCK_END) return jn_expected(p, "the end of the tag");
            if (!jn_advance(p)) return false;
            break;
        default:
            return n_ends == 0 ||
                   jn_bad(p, "the template ends where '%s' is missing", ends[n_ends - 1]);
        }
    }
}

static bool block_until(jn_parser *p, const char *const *ends, size_t n_ends, jn_node **body)
{
    *body = jn_node_new(p, JN_S_BODY);
    if (!*body) return false;
    if (jn_at_op(p, ':') && !jn_advance(p)) return false;
    if (p->cur.kind != JN_T_BLOCK_END) return jn_expected(p, "the end of the tag");
    return jn_advance(p) && statements(p, ends, n_ends, *body);
}

/* ---- the whole ---- */

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

static bool parse(jn_parser *p, const char *source, size_t n)
{
    jn_state *r = p->r;
    jn_val syms;
    char *src = normalise(r, source, &n);
    if (!src || !jn_dict_new(r, JN_DICT, &syms)) return false;
    p->src = p->cur.p = src;
    p->prog->syms = syms.dict;
    jn_lex_init(&p->lx, src, n);
    p->prog->body = jn_node_new(p, JN_S_BODY);
    return p->prog->body && jn_advance(p) && statements(p, NULL, 0, p->prog->body);
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
    jn_parser p = {.r = &r, .prog = prog};
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
