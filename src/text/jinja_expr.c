/* Recursive descent over the expression grammar of Jinja2 3.1. Chains of one precedence level
 * become one flat node, so that only real nesting nests. */
#include <string.h>

#include "text/jinja_parser.h"

/* ---- expressions ---- */

static bool unary(jn_parser *p, bool with_filter, jn_node **e);

static bool at_tuple_end(const jn_parser *p, const jn_tuple_rule *t)
{
    return p->cur.kind == JN_T_VAR_END || p->cur.kind == JN_T_BLOCK_END || jn_at_op(p, ')') ||
           (t->end_name && jn_at_name(p, t->end_name));
}

bool jn_tuple(jn_parser *p, const jn_tuple_rule *rule, jn_node **e)
{
    jn_node *t = jn_node_new(p, JN_E_TUPLE);
    bool is_tuple = false;
    if (!t) return false;
    for (;;) {
        if (t->n && !jn_expect_op(p, ',')) return false;
        if (at_tuple_end(p, rule)) break;
        jn_node *item;
        if (!rule->item(p, &item) || !jn_add_kid(p, t, item)) return false;
        if (!jn_at_op(p, ',')) break;
        is_tuple = true;
    }
    if (!is_tuple && t->n == 0 && !rule->parens) return jn_expected(p, "an expression");
    *e = is_tuple || t->n == 0 ? t : t->list[0];
    return true;
}

static bool list_literal(jn_parser *p, jn_node *e)
{
    if (!jn_expect_op(p, '[')) return false;
    while (!jn_at_op(p, ']')) {
        jn_node *item;
        if (e->n && !jn_expect_op(p, ',')) return false;
        if (jn_at_op(p, ']')) break;
        if (!jn_expression(p, &item) || !jn_add_kid(p, e, item)) return false;
    }
    return jn_advance(p);
}

static bool dict_literal(jn_parser *p, jn_node *e)
{
    if (!jn_expect_op(p, '{')) return false;
    while (!jn_at_op(p, '}')) {
        jn_node *k, *v;
        if (e->n && !jn_expect_op(p, ',')) return false;
        if (jn_at_op(p, '}')) break;
        if (!jn_expression(p, &k) || !jn_add_kid(p, e, k) || !jn_expect_op(p, ':')) return false;
        if (!jn_expression(p, &v) || !jn_add_kid(p, e, v)) return false;
    }
    return jn_advance(p);
}

static void note_special(jn_parser *p, const jn_str *name)
{
    if (!p->use) return;
    if (jn_str_is(name, "varargs")) p->use->varargs = true;
    if (jn_str_is(name, "kwargs")) p->use->kwargs = true;
    if (jn_str_is(name, "caller")) p->use->caller = true;
}

bool jn_name(jn_parser *p, jn_node *e)
{
    if (jn_at_name(p, "true") || jn_at_name(p, "True") || jn_at_name(p, "false") ||
        jn_at_name(p, "False")) {
        e->value = jn_bool((p->cur.p[0] | 32) == 't');
        return jn_advance(p);
    }
    if (jn_at_name(p, "none") || jn_at_name(p, "None")) {
        e->value = jn_none();
        return jn_advance(p);
    }
    e->kind = JN_E_NAME;
    if (!jn_take_name(p, &e->str)) return false;
    note_special(p, e->str);
    return jn_intern(p, e->str, &e->sym);
}

bool jn_primary(jn_parser *p, jn_node **out)
{
    static const jn_tuple_rule in_parens = {.item = jn_expression, .parens = true};
    jn_node *e = *out = jn_node_new(p, JN_E_CONST);
    if (!e) return false;
    switch (p->cur.kind) {
    case JN_T_NAME:
        return jn_name(p, e);
    case JN_T_STRING:
        return jn_string_literal(p, e);
    case JN_T_INT:
    case JN_T_FLOAT:
        return jn_number_literal(p, e);
    case JN_T_OP:
        if (p->cur.op == '(')
            return jn_advance(p) && jn_tuple(p, &in_parens, out) && jn_expect_op(p, ')');
        if (p->cur.op == '[') {
            e->kind = JN_E_LIST;
            return list_literal(p, e);
        }
        if (p->cur.op == '{') {
            e->kind = JN_E_DICT;
            return dict_literal(p, e);
        }
        return jn_expected(p, "an expression");
    default:
        return jn_expected(p, "an expression");
    }
}

static bool add_arg(jn_parser *p, jn_node *e, jn_arg arg)
{
    if ((e->n_args & (e->n_args - 1)) == 0) {
        size_t cap = e->n_args ? e->n_args * 2 : 1;
        jn_arg *args =
            jn_arena_grow(p->r->arena, e->args, e->n_args * sizeof *args, cap * sizeof *args);
        if (!args) return jn_no_memory(p->r);
        e->args = args;
    }
    e->args[e->n_args++] = arg;
    return jn_over_kid(p, e, arg.value);
}

/* Arguments in parentheses, into e->args. */
static bool call_args(jn_parser *p, jn_node *e)
{
    bool keywords = false, first = true;
    if (!jn_expect_op(p, '(')) return false;
    while (!jn_at_op(p, ')')) {
        jn_arg arg = {0};
        jn_token next;
        if (!first && !jn_expect_op(p, ',')) return false;
        first = false;
        if (jn_at_op(p, ')')) break;
        if (jn_at_op(p, '*') || jn_at_op(p, JN_OP_POW)) {
            arg.stars = jn_at_op(p, '*') ? 1 : 2;
            if (!jn_advance(p)) return false;
        } else if (p->cur.kind == JN_T_NAME) {
            if (!jn_peek(p, &next)) return false;
            if (next.kind == JN_T_OP && next.op == '=' &&
                (!jn_take_name(p, &arg.name) || !jn_advance(p)))
                return false;
        }
        if (!arg.name && !arg.stars && keywords)
            return jn_bad(p, "a positional argument follows a keyword argument");
        keywords |= arg.name || arg.stars == 2;
        if (!jn_expression(p, &arg.value) || !add_arg(p, e, arg)) return false;
    }
    return jn_advance(p);
}

/* What is inside brackets: an index, or a slice whose parts go to *slice. */
static bool subscript_part(jn_parser *p, jn_node **index)
{
    jn_node *s = NULL, *part = NULL;
    if (!jn_at_op(p, ':')) {
        if (!jn_expression(p, index)) return false;
        if (!jn_at_op(p, ':')) return true;
        part = *index;
    }
    if (!(s = jn_node_new(p, JN_E_SLICE)) || !jn_add_kid(p, s, part)) return false;
    while (s->n < 3) {
        part = NULL;
        if (jn_at_op(p, ':')) {
            if (!jn_advance(p)) return false;
            bool none = jn_at_op(p, ':') || jn_at_op(p, ']') || jn_at_op(p, ',');
            if (!none && !jn_expression(p, &part)) return false;
        }
        if (!jn_add_kid(p, s, part)) return false;
    }
    *index = s;
    return true;
}

static bool subscript(jn_parser *p, jn_node **e)
{
    jn_node *s = jn_node_new(p, JN_E_ITEM), *index;
    if (!s || !jn_advance(p) || !subscript_part(p, &index)) return false;
    if (jn_at_op(p, ',')) { /* a[1, 2]: the key is a tuple */
        jn_node *t = jn_node_new(p, JN_E_TUPLE);
        if (!t || !jn_add_kid(p, t, index)) return false;
        while (jn_at_op(p, ',')) {
            if (!jn_advance(p)) return false;
            if (jn_at_op(p, ']')) break;
            if (!subscript_part(p, &index) || !jn_add_kid(p, t, index)) return false;
        }
        for (size_t i = 0; i < t->n; i++)
            if (t->list[i]->kind == JN_E_SLICE && !t->list[i]->a)
                return jn_bad(p, "a slice inside a tuple is not supported");
        index = t;
    }
    if (!jn_expect_op(p, ']')) return false;
    if (index->kind == JN_E_SLICE && !index->a) { /* still without an object: ours */
        index->a = *e;
        *e = index;
        return jn_over_kid(p, index, index->a);
    }
    s->a = *e;
    s->b = index;
    *e = s;
    return jn_over_kid(p, s, s->a) && jn_over_kid(p, s, s->b);
}

bool jn_attribute(jn_parser *p, jn_node **e)
{
    jn_node *attr = jn_node_new(p, JN_E_ATTR);
    if (!attr || !jn_advance(p)) return false;
    attr->a = *e;
    *e = attr;
    if (p->cur.kind == JN_T_INT) { /* a.0 is a[0] */
        attr->kind = JN_E_ITEM;
        attr->b = jn_node_new(p, JN_E_CONST);
        return attr->b && jn_number_literal(p, attr->b) && jn_over_kid(p, attr, attr->a);
    }
    return jn_take_name(p, &attr->str) && jn_over_kid(p, attr, attr->a);
}

static bool call(jn_parser *p, jn_node **e)
{
    jn_node *c = jn_node_new(p, JN_E_CALL);
    if (!c) return false;
    c->a = *e;
    *e = c;
    return call_args(p, c) && jn_over_kid(p, c, c->a);
}

static bool postfix(jn_parser *p, jn_node **e)
{
    bool ok = true;
    while (ok) {
        if (jn_at_op(p, '.'))
            ok = jn_attribute(p, e);
        else if (jn_at_op(p, '['))
            ok = subscript(p, e);
        else if (jn_at_op(p, '('))
            ok = call(p, e);
        else
            return true;
    }
    return false;
}

/* The name of a filter or test, dots included. */
static bool dotted_name(jn_parser *p, const jn_str **name)
{
    jn_token first = p->cur, last = p->cur;
    if (p->cur.kind != JN_T_NAME) return jn_expected(p, "a name");
    if (!jn_advance(p)) return false;
    while (jn_at_op(p, '.')) {
        if (!jn_advance(p)) return false;
        if (p->cur.kind != JN_T_NAME) return jn_expected(p, "a name");
        last = p->cur;
        if (!jn_advance(p)) return false;
    }
    first.n = (size_t)(last.p + last.n - first.p);
    return jn_token_str(p, &first, name);
}

/* NAME or NAME(args), applied to *e. */
bool jn_filter(jn_parser *p, jn_node **e)
{
    jn_node *f = jn_node_new(p, JN_E_FILTER);
    if (!f || !dotted_name(p, &f->str)) return false;
    f->a = *e;
    *e = f;
    f->func = jn_find_filter(jn_bytes(f->str), f->str->n);
    if (jn_at_op(p, '(') && !call_args(p, f)) return false;
    return jn_over_kid(p, f, f->a);
}

static bool names_content(const jn_node *e)
{
    const jn_str *s = e->kind == JN_E_NAME || e->kind == JN_E_ATTR ? e->str : NULL;
    if (e->kind == JN_E_ITEM && e->b->kind == JN_E_CONST && e->b->value.kind == JN_STR)
        s = e->b->value.s;
    return s && jn_str_is(s, "content");
}

static bool test(jn_parser *p, jn_node **e)
{
    jn_node *t = jn_node_new(p, JN_E_TEST), *not_node = NULL;
    if (!t || !jn_advance(p)) return false;
    if (jn_at_name(p, "not")) {
        if (!(not_node = jn_node_new(p, JN_E_NOT)) || !jn_advance(p)) return false;
    }
    if (!dotted_name(p, &t->str)) return false;
    t->func = jn_find_test(jn_bytes(t->str), t->str->n);
    t->a = *e;
    jn_token_kind k = p->cur.kind;
    bool operand = k == JN_T_NAME || k == JN_T_STRING || k == JN_T_INT || k == JN_T_FLOAT ||
                   jn_at_op(p, '[') || jn_at_op(p, '{');
    if (jn_at_name(p, "else") || jn_at_name(p, "or") || jn_at_name(p, "and")) operand = false;
    if (jn_at_op(p, '(')) {
        if (!call_args(p, t)) return false;
    } else if (operand) {
        if (jn_at_name(p, "is")) return jn_bad(p, "tests cannot be chained with 'is'");
        jn_arg arg = {0};
        if (!jn_primary(p, &arg.value) || !postfix(p, &arg.value) || !add_arg(p, t, arg))
            return false;
    }
    if (jn_str_is(t->str, "none") && names_content(t->a)) p->prog->tests_null_content = true;
    *e = t;
    if (not_node) {
        not_node->a = t;
        *e = not_node;
    }
    return jn_over_kid(p, t, t->a) && (!not_node || jn_over_kid(p, not_node, t));
}

static bool filters_and_tests(jn_parser *p, jn_node **e)
{
    bool ok = true;
    while (ok) {
        if (jn_at_op(p, '|'))
            ok = jn_advance(p) && jn_filter(p, e);
        else if (jn_at_name(p, "is"))
            ok = test(p, e);
        else if (jn_at_op(p, '('))
            ok = call(p, e);
        else
            return true;
    }
    return false;
}

static bool unary(jn_parser *p, bool with_filter, jn_node **e)
{
    bool ok;
    if (jn_at_op(p, '-') || jn_at_op(p, '+')) {
        jn_node *n = jn_node_new(p, jn_at_op(p, '-') ? JN_E_NEG : JN_E_POS);
        if (!n || !jn_deeper(p)) return false;
        ok = jn_advance(p) && unary(p, false, &n->a) && jn_over_kid(p, n, n->a);
        p->nest--;
        *e = n;
    } else {
        ok = jn_primary(p, e);
    }
    return ok && postfix(p, e) && (!with_filter || filters_and_tests(p, e));
}

/* Precedence levels of binary operators, tightest last; each is a flat chain of the next. */
enum { L_MATH1, L_CONCAT, L_MATH2, L_POW, L_UNARY };

static char chain_op(const jn_parser *p, int level)
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
static bool chain(jn_parser *p, int level, jn_node **e)
{
    jn_node *c = NULL;
    for (char op; (op = chain_op(p, level));) {
        jn_node *right;
        if (!c) {
            c = jn_node_new(p, op == '~' ? JN_E_CONCAT : JN_E_CHAIN);
            if (!c || !jn_add_kid(p, c, *e)) return false;
            *e = c;
        }
        if (!jn_advance(p) || !unary(p, true, &right)) return false;
        for (int l = L_POW; l > level; l--)
            if (!chain(p, l, &right)) return false;
        if (!jn_add_op(p, c, op, right)) return false;
    }
    return true;
}

static bool arithmetic(jn_parser *p, jn_node **e)
{
    if (!unary(p, true, e)) return false;
    for (int l = L_POW; l >= L_MATH1; l--)
        if (!chain(p, l, e)) return false;
    return true;
}

static bool compare_op(jn_parser *p, char *op)
{
    static const struct {
        int token;
        char op;
    } ops[] = {{JN_OP_EQ, JN_EQ}, {JN_OP_NE, JN_NE}, {'<', JN_LT},
               {'>', JN_GT},      {JN_OP_LE, JN_LE}, {JN_OP_GE, JN_GE}};
    *op = 0;
    if (jn_at_name(p, "in")) {
        *op = JN_IN;
    } else if (jn_at_name(p, "not")) {
        jn_token next;
        if (!jn_peek(p, &next)) return false;
        if (!jn_token_is(&next, "in")) return true;
        *op = JN_NOT_IN;
        if (!jn_advance(p)) return false;
    } else {
        for (size_t i = 0; i < sizeof ops / sizeof *ops; i++)
            if (jn_at_op(p, ops[i].token)) *op = ops[i].op;
        if (!*op) return true;
    }
    return jn_advance(p);
}

static bool comparison(jn_parser *p, jn_node **e)
{
    jn_node *c = NULL;
    if (!arithmetic(p, e)) return false;
    for (;;) {
        char op;
        jn_node *right;
        if (!compare_op(p, &op)) return false;
        if (!op) return true;
        if (!c) {
            c = jn_node_new(p, JN_E_COMPARE);
            if (!c || !jn_add_kid(p, c, *e)) return false;
        }
        if (!arithmetic(p, &right) || !jn_add_op(p, c, op, right)) return false;
        bool none = right->kind == JN_E_CONST && right->value.kind == JN_NONE;
        if (none && names_content(c->list[c->n - 2])) p->prog->tests_null_content = true;
        *e = c;
    }
}

static bool not_expr(jn_parser *p, jn_node **e)
{
    if (!jn_at_name(p, "not")) return comparison(p, e);
    jn_node *n = jn_node_new(p, JN_E_NOT);
    if (!n || !jn_deeper(p)) return false;
    bool ok = jn_advance(p) && not_expr(p, &n->a) && jn_over_kid(p, n, n->a);
    p->nest--;
    *e = n;
    return ok;
}

static bool and_expr(jn_parser *p, jn_node **e)
{
    jn_node *c = NULL, *right;
    if (!not_expr(p, e)) return false;
    while (jn_at_name(p, "and")) {
        if (!c && (!(c = jn_node_new(p, JN_E_AND)) || !jn_add_kid(p, c, *e))) return false;
        if (!jn_advance(p) || !not_expr(p, &right) || !jn_add_kid(p, c, right)) return false;
        *e = c;
    }
    return true;
}

bool jn_or_expr(jn_parser *p, jn_node **e)
{
    jn_node *c = NULL, *right;
    if (!and_expr(p, e)) return false;
    while (jn_at_name(p, "or")) {
        if (!c && (!(c = jn_node_new(p, JN_E_OR)) || !jn_add_kid(p, c, *e))) return false;
        if (!jn_advance(p) || !and_expr(p, &right) || !jn_add_kid(p, c, right)) return false;
        *e = c;
    }
    return true;
}

static bool inline_if(jn_parser *p, jn_node **e)
{
    if (!jn_or_expr(p, e)) return false;
    while (jn_at_name(p, "if")) {
        jn_node *c = jn_node_new(p, JN_E_IF);
        if (!c || !jn_advance(p)) return false;
        c->b = *e;
        if (!jn_or_expr(p, &c->a)) return false;
        if (jn_at_name(p, "else") && (!jn_advance(p) || !jn_expression(p, &c->c))) return false;
        if (!jn_over_kid(p, c, c->a) || !jn_over_kid(p, c, c->b) || !jn_over_kid(p, c, c->c))
            return false;
        *e = c;
    }
    return true;
}

bool jn_expression(jn_parser *p, jn_node **e)
{
    if (!jn_deeper(p)) return false;
    bool ok = inline_if(p, e);
    p->nest--;
    return ok;
}

/* An expression list as {% if %} takes it: a tuple without inline if. */
bool jn_condition(jn_parser *p, jn_node **e)
{
    static const jn_tuple_rule rule = {.item = jn_or_expr};
    return jn_tuple(p, &rule, e);
}

bool jn_expression_list(jn_parser *p, jn_node **e)
{
    static const jn_tuple_rule rule = {.item = jn_expression};
    return jn_tuple(p, &rule, e);
}
