/* Expressions. Each operator has its own function so that jn_eval() keeps a small stack frame. */
#include <math.h>
#include <string.h>

#include "text/jinja_ast.h"
#include "text/jinja_env.h"

#define OUT_OF_LINE static bool __attribute__((noinline))

/* ---- operators ---- */

static bool no_operator(jn_state *r, char op, jn_val a, jn_val b)
{
    static const char *const names[] = {"//", "**"};
    char one[2] = {op, 0};
    const char *name = op == JN_FLOORDIV ? names[0] : op == JN_POW ? names[1] : one;
    if (a.kind == JN_UNDEF) return jn_undef_fail(r, a.undef);
    if (b.kind == JN_UNDEF) return jn_undef_fail(r, b.undef);
    if (op == '+' && a.kind == JN_STR)
        return jn_fail(r, "can only concatenate str (not \"%s\") to str", jn_type_name(b));
    return jn_fail(r, "unsupported operand types for %s: '%s' and '%s'", name, jn_type_name(a),
                   jn_type_name(b));
}

static bool too_large(jn_state *r)
{
    return jn_fail(r, "an integer grows over 64 bits");
}

static int64_t floor_div(int64_t a, int64_t b)
{
    int64_t q = a / b;
    return a % b && (a < 0) != (b < 0) ? q - 1 : q;
}

static bool int_pow(jn_state *r, int64_t a, int64_t b, jn_val *out)
{
    int64_t v = 1;
    if (b < 0) {
        if (a == 0) return jn_fail(r, "0 cannot be raised to a negative power");
        *out = jn_float(pow((double)a, (double)b));
        return true;
    }
    while (b) {
        if (b & 1 && __builtin_mul_overflow(v, a, &v)) return too_large(r);
        b >>= 1;
        if (b && __builtin_mul_overflow(a, a, &a)) return too_large(r);
    }
    *out = jn_int(v);
    return true;
}

static bool int_binary(jn_state *r, char op, int64_t a, int64_t b, jn_val *out)
{
    int64_t v = 0;
    bool over = false;
    if ((op == '/' || op == '%' || op == JN_FLOORDIV) && b == 0)
        return jn_fail(r, "division by zero");
    switch (op) {
    case '+':
        over = __builtin_add_overflow(a, b, &v);
        break;
    case '-':
        over = __builtin_sub_overflow(a, b, &v);
        break;
    case '*':
        over = __builtin_mul_overflow(a, b, &v);
        break;
    case '/':
        *out = jn_float((double)a / (double)b);
        return true;
    case JN_POW:
        return int_pow(r, a, b, out);
    case '%': /* takes the sign of the divisor; INT64_MIN % -1 would trap */
        v = b == -1 ? 0 : a % b;
        if (v && (v < 0) != (b < 0)) v += b;
        break;
    case JN_FLOORDIV:
        over = a == INT64_MIN && b == -1;
        v = over ? 0 : floor_div(a, b);
        break;
    default:
        return false;
    }
    *out = jn_int(v);
    return !over || too_large(r);
}

static bool float_binary(jn_state *r, char op, double a, double b, jn_val *out)
{
    if ((op == '/' || op == '%' || op == JN_FLOORDIV) && b == 0)
        return jn_fail(r, "division by zero");
    double v = 0, mod = 0;
    if (op == '%' || op == JN_FLOORDIV) {
        mod = fmod(a, b);
        if (mod != 0 && (mod < 0) != (b < 0)) mod += b;
        if (mod == 0) mod = copysign(0, b);
    }
    switch (op) {
    case '+':
        v = a + b;
        break;
    case '-':
        v = a - b;
        break;
    case '*':
        v = a * b;
        break;
    case '/':
        v = a / b;
        break;
    case '%':
        v = mod;
        break;
    case JN_FLOORDIV: {
        double q = (a - fmod(a, b)) / b;
        if (fmod(a, b) != 0 && (fmod(a, b) < 0) != (b < 0)) q -= 1;
        v = q == 0 ? copysign(0, a / b) : floor(q) + (q - floor(q) > 0.5);
        break;
    }
    case JN_POW:
        if (a == 0 && b < 0) return jn_fail(r, "0.0 cannot be raised to a negative power");
        v = pow(a, b);
        if (isnan(v) && !isnan(a) && !isnan(b))
            return jn_fail(r, "complex numbers are not supported");
        if (isinf(v) && !isinf(a) && !isinf(b)) return jn_fail(r, "numerical result out of range");
        break;
    default:
        return false;
    }
    *out = jn_float(v);
    return true;
}

static bool repeat_str(jn_state *r, const jn_str *s, int64_t times, jn_val *out)
{
    jn_buf *b = jn_buf_new(r);
    if (!b) return false;
    for (; times > 0 && s->n; times--)
        if (!jn_put_str(r, b, s)) return false;
    return jn_finish(r, b, out);
}

static bool repeat_list(jn_state *r, jn_val list, int64_t times, jn_val *out)
{
    if (!jn_list_new(r, list.kind, 0, out)) return false;
    for (; times > 0 && list.list->n; times--) {
        if (!jn_work(r, 64 * list.list->n)) return false;
        for (size_t i = 0, n = list.list->n; i < n; i++)
            if (!jn_list_add(r, out->list, list.list->v[i])) return false;
    }
    return true;
}

static bool join_lists(jn_state *r, jn_val a, jn_val b, jn_val *out)
{
    size_t n = a.list->n + b.list->n;
    if (!jn_work(r, n) || !jn_list_new(r, a.kind, n, out)) return false;
    if (a.list->n) memcpy(out->list->v, a.list->v, a.list->n * sizeof *a.list->v);
    if (b.list->n) memcpy(out->list->v + a.list->n, b.list->v, b.list->n * sizeof *b.list->v);
    out->list->n = n;
    return true;
}

static bool is_seq(jn_val v)
{
    return v.kind == JN_LIST || v.kind == JN_TUPLE;
}

bool jn_binary(jn_state *r, char op, jn_val a, jn_val b, jn_val *out)
{
    if (jn_is_int(a) && jn_is_int(b)) return int_binary(r, op, jn_as_int(a), jn_as_int(b), out);
    if (jn_is_number(a) && jn_is_number(b))
        return float_binary(r, op, jn_as_float(a), jn_as_float(b), out);
    if (op == '+' && a.kind == JN_STR && b.kind == JN_STR) return jn_str_concat(r, a.s, b.s, out);
    if (op == '+' && is_seq(a) && a.kind == b.kind) return join_lists(r, a, b, out);
    if (op == '%' && a.kind == JN_STR) return jn_printf(r, a.s, b, out);
    if (op == '*' && jn_is_int(a) && (b.kind == JN_STR || is_seq(b))) {
        jn_val t = a;
        a = b;
        b = t;
    }
    if (op == '*' && jn_is_int(b) && a.kind == JN_STR) return repeat_str(r, a.s, jn_as_int(b), out);
    if (op == '*' && jn_is_int(b) && is_seq(a)) return repeat_list(r, a, jn_as_int(b), out);
    return no_operator(r, op, a, b);
}

OUT_OF_LINE chain(jn_state *r, const jn_node *e, jn_val *out)
{
    jn_val left, right;
    if (!jn_eval(r, e->list[0], &left)) return false;
    for (size_t i = 1; i < e->n; i++) {
        if (!jn_eval(r, e->list[i], &right)) return false;
        if (!jn_binary(r, e->ops[i - 1], left, right, &left)) return false;
    }
    *out = left;
    return true;
}

OUT_OF_LINE concat(jn_state *r, const jn_node *e, jn_val *out)
{
    jn_buf *b = jn_buf_new(r);
    if (!b) return false;
    for (size_t i = 0; i < e->n; i++) {
        jn_val v;
        if (!jn_eval(r, e->list[i], &v) || !jn_print(r, b, v)) return false;
    }
    return jn_finish(r, b, out);
}

static bool compare_one(jn_state *r, char op, jn_val a, jn_val b, bool *yes)
{
    int cmp;
    if (op == JN_EQ || op == JN_NE) {
        if (!jn_equal(r, a, b, yes)) return false;
        *yes ^= op == JN_NE;
        return true;
    }
    if (op == JN_IN || op == JN_NOT_IN) {
        if (!jn_contains(r, b, a, yes)) return false;
        *yes ^= op == JN_NOT_IN;
        return true;
    }
    if (!jn_compare(r, a, b, &cmp)) return false;
    *yes = cmp == 2      ? false /* NaN */
           : op == JN_LT ? cmp < 0
           : op == JN_GT ? cmp > 0
           : op == JN_LE ? cmp <= 0
                         : cmp >= 0;
    return true;
}

OUT_OF_LINE compare(jn_state *r, const jn_node *e, jn_val *out)
{
    jn_val left, right;
    bool yes = true;
    if (!jn_eval(r, e->list[0], &left)) return false;
    for (size_t i = 1; yes && i < e->n; i++) {
        if (!jn_eval(r, e->list[i], &right)) return false;
        if (!compare_one(r, e->ops[i - 1], left, right, &yes)) return false;
        left = right;
    }
    *out = jn_bool(yes);
    return true;
}

OUT_OF_LINE and_or(jn_state *r, const jn_node *e, jn_val *out)
{
    for (size_t i = 0; i < e->n; i++) {
        if (!jn_eval(r, e->list[i], out)) return false;
        if (jn_truth(*out) == (e->kind == JN_E_OR)) break;
    }
    return true;
}

OUT_OF_LINE inline_if(jn_state *r, const jn_node *e, jn_val *out)
{
    static const jn_buf no_buf = {0};
    static const jn_str nothing = {.buf = &no_buf};
    static const jn_undef no_else = {.name = &nothing};
    jn_val cond;
    if (!jn_eval(r, e->a, &cond)) return false;
    if (jn_truth(cond)) return jn_eval(r, e->b, out);
    if (e->c) return jn_eval(r, e->c, out);
    *out = (jn_val){.kind = JN_UNDEF, .undef = &no_else};
    return true;
}

OUT_OF_LINE sign(jn_state *r, const jn_node *e, jn_val *out)
{
    jn_val v;
    if (!jn_eval(r, e->a, &v)) return false;
    if (!jn_is_number(v)) return no_operator(r, e->kind == JN_E_NEG ? '-' : '+', v, v);
    if (v.kind == JN_FLOAT)
        *out = jn_float(e->kind == JN_E_NEG ? -v.f : v.f);
    else if (e->kind == JN_E_NEG)
        return int_binary(r, '-', 0, jn_as_int(v), out);
    else
        *out = jn_int(jn_as_int(v));
    return true;
}

OUT_OF_LINE negation(jn_state *r, const jn_node *e, jn_val *out)
{
    jn_val v;
    if (!jn_eval(r, e->a, &v)) return false;
    *out = jn_bool(!jn_truth(v));
    return true;
}

/* ---- literals ---- */

OUT_OF_LINE sequence(jn_state *r, const jn_node *e, jn_val *out)
{
    jn_val list, v;
    if (!jn_list_new(r, e->kind == JN_E_LIST ? JN_LIST : JN_TUPLE, e->n, &list)) return false;
    for (size_t i = 0; i < e->n; i++)
        if (!jn_eval(r, e->list[i], &v) || !jn_list_add(r, list.list, v)) return false;
    *out = list;
    return true;
}

OUT_OF_LINE dict(jn_state *r, const jn_node *e, jn_val *out)
{
    jn_val d, k, v;
    if (!jn_dict_new(r, JN_DICT, &d)) return false;
    for (size_t i = 0; i < e->n; i += 2) {
        if (!jn_eval(r, e->list[i], &k) || !jn_eval(r, e->list[i + 1], &v)) return false;
        if (!jn_dict_set(r, d.dict, k, v)) return false;
    }
    *out = d;
    return true;
}

/* ---- attributes, items, slices ---- */

/* Attributes and methods, without looking at keys. out->kind is MISSING if there is none. */
static bool own_attr(jn_state *r, jn_val v, const jn_str *name, jn_val *out)
{
    *out = (jn_val){.kind = JN_MISSING};
    if (v.kind == JN_NAMESPACE)
        return jn_dict_get(r, v.dict, (jn_val){.kind = JN_STR, .s = name}, out);
    if (v.kind == JN_LOOP && !jn_loop_attr(r, v.loop, name, out)) return false;
    if (v.kind == JN_MACRO && jn_str_is(name, "name")) {
        *out = (jn_val){.kind = JN_STR, .s = jn_macro_name(v.macro)};
        return true;
    }
    if (v.kind == JN_CYCLER && jn_str_is(name, "current")) {
        *out = v.cycler->items->v[v.cycler->at];
        return true;
    }
    const jn_func *f = out->kind == JN_MISSING ? jn_find_method(v, jn_bytes(name), name->n) : NULL;
    if (!f) return true;
    jn_method *m = jn_new(r, sizeof *m);
    if (!m) return false;
    *m = (jn_method){.self = v, .func = f};
    *out = (jn_val){.kind = JN_METHOD, .method = m};
    return true;
}

static bool hashable(jn_val v)
{
    if (v.kind == JN_TUPLE) {
        for (size_t i = 0; i < v.list->n; i++) {
            jn_val k = v.list->v[i];
            if (k.kind == JN_LIST || k.kind == JN_DICT || k.kind == JN_TUPLE) return false;
        }
    }
    return v.kind != JN_LIST && v.kind != JN_DICT && v.kind != JN_VIEW;
}

/* v[key] as Python has it; out->kind is MISSING if that would raise. */
static bool own_item(jn_state *r, jn_val v, jn_val key, jn_val *out)
{
    *out = (jn_val){.kind = JN_MISSING};
    if (v.kind == JN_DICT) return !hashable(key) || jn_dict_get(r, v.dict, key, out);
    if (!jn_is_int(key)) return true;
    int64_t i = jn_as_int(key), n;
    if (v.kind == JN_STR) {
        size_t off = 0, len = v.s->n;
        if (!jn_work(r, len)) return false;
        if (i < 0) i += (int64_t)jn_cp_count(jn_bytes(v.s), len);
        if (i < 0 || (uint64_t)i >= len) return true;
        off = jn_cp_offset(jn_bytes(v.s), len, (size_t)i);
        return off == len ||
               jn_str_sub(r, v.s, off, jn_cp_len(jn_bytes(v.s) + off, len - off), out);
    }
    if (v.kind != JN_RANGE && !is_seq(v)) return true;
    n = is_seq(v) ? (int64_t)v.list->n : v.range->n;
    if (i < 0) i += n;
    if (i < 0 || i >= n) return true;
    *out = is_seq(v) ? v.list->v[i] : jn_range_at(v.range, i);
    return true;
}

bool jn_getattr(jn_state *r, jn_val v, const jn_str *name, jn_val *out)
{
    if (v.kind == JN_UNDEF) return jn_undef_fail(r, v.undef);
    if (!own_attr(r, v, name, out)) return false;
    if (out->kind != JN_MISSING) return true;
    if (!own_item(r, v, (jn_val){.kind = JN_STR, .s = name}, out)) return false;
    return out->kind != JN_MISSING || jn_undef_attr(r, v, name, out);
}

bool jn_getitem(jn_state *r, jn_val v, jn_val key, jn_val *out)
{
    if (v.kind == JN_UNDEF) return jn_undef_fail(r, v.undef);
    if (!own_item(r, v, key, out)) return false;
    if (out->kind == JN_MISSING && key.kind == JN_STR && !own_attr(r, v, key.s, out)) return false;
    return out->kind != JN_MISSING || jn_undef_item(r, v, key, out);
}

OUT_OF_LINE attr(jn_state *r, const jn_node *e, jn_val *out)
{
    jn_val v;
    return jn_eval(r, e->a, &v) && jn_getattr(r, v, e->str, out);
}

OUT_OF_LINE item(jn_state *r, const jn_node *e, jn_val *out)
{
    jn_val v, key;
    return jn_eval(r, e->a, &v) && jn_eval(r, e->b, &key) && jn_getitem(r, v, key, out);
}

static bool bound(jn_state *r, jn_val v, int64_t def, int64_t n, int64_t lowest, int64_t highest,
                  int64_t *i)
{
    *i = def;
    if (v.kind == JN_NONE) return true;
    if (!jn_is_int(v)) return jn_fail(r, "slice indices must be integers or None");
    *i = jn_as_int(v);
    if (*i < 0) *i += n;
    if (*i < lowest) *i = lowest;
    if (*i > highest) *i = highest;
    return true;
}

bool jn_slice_bounds(jn_state *r, jn_val start, jn_val stop, jn_val step, int64_t n, int64_t *first,
                     int64_t *last, int64_t *by)
{
    *by = 1;
    if (step.kind != JN_NONE && !jn_is_int(step))
        return jn_fail(r, "slice indices must be integers or None");
    if (step.kind != JN_NONE) *by = jn_as_int(step);
    if (*by == 0) return jn_fail(r, "slice step cannot be zero");
    if (*by < -INT32_MAX) *by = -INT32_MAX; /* as far as any list or string reaches */
    if (*by > INT32_MAX) *by = INT32_MAX;
    int64_t low = *by < 0 ? -1 : 0, high = *by < 0 ? n - 1 : n;
    return bound(r, start, *by < 0 ? high : low, n, low, high, first) &&
           bound(r, stop, *by < 0 ? low : high, n, low, high, last);
}

static bool slice_str(jn_state *r, const jn_str *s, int64_t first, int64_t last, int64_t by,
                      jn_val *out)
{
    const char *p = jn_bytes(s);
    if (by == 1) {
        size_t from = jn_cp_offset(p, s->n, (size_t)first);
        size_t n = last > first ? jn_cp_offset(p + from, s->n - from, (size_t)(last - first)) : 0;
        return jn_str_sub(r, s, from, n, out);
    }
    jn_val *chars;
    size_t n;
    jn_buf *b = jn_buf_new(r);
    if (!b || !jn_items(r, (jn_val){.kind = JN_STR, .s = s}, &chars, &n)) return false;
    for (int64_t i = first; by > 0 ? i < last : i > last; i += by)
        if (!jn_put_str(r, b, chars[i].s)) return false;
    return jn_finish(r, b, out);
}

static bool slice_list(jn_state *r, jn_val v, int64_t first, int64_t last, int64_t by, jn_val *out)
{
    jn_val part;
    if (!jn_list_new(r, v.kind, 0, &part)) return false;
    for (int64_t i = first; by > 0 ? i < last : i > last; i += by)
        if (!jn_list_add(r, part.list, v.list->v[i])) return false;
    *out = part;
    return jn_work(r, part.list->n);
}

static bool slice_range(jn_state *r, const jn_range *g, int64_t first, int64_t last, int64_t by,
                        jn_val *out)
{
    jn_range *part = jn_new(r, sizeof *part);
    if (!part) return false;
    int64_t span = by > 0 ? last - first : first - last, size = by > 0 ? by : -by;
    *part = (jn_range){.start = g->start + first * g->step, .stop = g->start + last * g->step};
    if (__builtin_mul_overflow(g->step, by, &part->step))
        part->step = by > 0 ? INT64_MAX : INT64_MIN; /* then there is one number at most */
    part->n = span > 0 ? (span - 1) / size + 1 : 0;
    *out = (jn_val){.kind = JN_RANGE, .range = part};
    return true;
}

OUT_OF_LINE slice(jn_state *r, const jn_node *e, jn_val *out)
{
    jn_val v, part[3] = {{.kind = JN_NONE}, {.kind = JN_NONE}, {.kind = JN_NONE}};
    int64_t n, first = 0, last = 0, by = 1;
    if (!jn_eval(r, e->a, &v)) return false;
    for (int i = 0; i < 3; i++)
        if (e->list[i] && !jn_eval(r, e->list[i], &part[i])) return false;
    if (v.kind == JN_UNDEF) return jn_undef_fail(r, v.undef);
    if (v.kind != JN_STR && !is_seq(v) && v.kind != JN_RANGE)
        return jn_fail(r, "'%s' object cannot be sliced", jn_type_name(v));
    if (!jn_length(r, v, &n) ||
        !jn_slice_bounds(r, part[0], part[1], part[2], n, &first, &last, &by))
        return false;
    if (v.kind == JN_STR) return slice_str(r, v.s, first, last, by, out);
    if (v.kind == JN_RANGE) return slice_range(r, v.range, first, last, by, out);
    return slice_list(r, v, first, last, by, out);
}

/* ---- calls, filters, tests ---- */

static bool add_keyword(jn_state *r, jn_args *a, const jn_str *name, jn_val v)
{
    for (size_t i = 0; i < a->n_kw; i++)
        if (jn_str_eq(a->kw[i].name, name))
            return jn_fail(r, "keyword argument '%.*s' is given twice", (int)name->n,
                           jn_bytes(name));
    a->kw[a->n_kw++] = (jn_kwarg){.name = name, .v = v};
    return true;
}

/* Room for n more positional and k more keyword arguments. */
static bool arg_room(jn_state *r, jn_args *a, size_t n, size_t k)
{
    if (n) {
        a->v = jn_arena_grow(r->arena, a->v, a->n * sizeof *a->v, (a->n + n) * sizeof *a->v);
        if (!a->v) return jn_no_memory(r);
    }
    if (k) {
        a->kw =
            jn_arena_grow(r->arena, a->kw, a->n_kw * sizeof *a->kw, (a->n_kw + k) * sizeof *a->kw);
        if (!a->kw) return jn_no_memory(r);
    }
    return true;
}

static bool spread(jn_state *r, const jn_arg *arg, jn_val v, jn_args *a)
{
    if (arg->stars == 1) {
        jn_val *items;
        size_t n;
        if (!jn_items(r, v, &items, &n) || !arg_room(r, a, n, 0)) return false;
        if (n) memcpy(a->v + a->n, items, n * sizeof *items);
        a->n += n;
        return true;
    }
    if (v.kind != JN_DICT) return jn_fail(r, "the argument after ** must be a mapping");
    if (!jn_work(r, v.dict->n) || !arg_room(r, a, 0, v.dict->n)) return false;
    for (size_t i = 0; i < v.dict->n; i++) {
        if (v.dict->e[i].k.kind != JN_STR) return jn_fail(r, "keywords must be strings");
        if (!add_keyword(r, a, v.dict->e[i].k.s, v.dict->e[i].v)) return false;
    }
    return true;
}

static bool args_of(jn_state *r, const jn_node *e, jn_args *a)
{
    *a = (jn_args){0};
    for (size_t i = 0; i < e->n_args; i++) {
        const jn_arg *arg = &e->args[i];
        jn_val v;
        if (!jn_eval(r, arg->value, &v)) return false;
        if (arg->stars) {
            if (!spread(r, arg, v, a)) return false;
        } else if (arg->name) {
            if (!arg_room(r, a, 0, 1) || !add_keyword(r, a, arg->name, v)) return false;
        } else {
            if (!arg_room(r, a, 1, 0)) return false;
            a->v[a->n++] = v;
        }
    }
    return true;
}

bool jn_call(jn_state *r, jn_val f, const jn_args *a, jn_val *out)
{
    switch (f.kind) {
    case JN_FUNC:
        return f.func->fn(r, f, a, out);
    case JN_METHOD:
        return f.method->func->fn(r, f.method->self, a, out);
    case JN_MACRO:
        return jn_call_macro(r, f.macro, a, out);
    case JN_LOOP:
        return jn_call_loop(r, f.loop, a, out);
    case JN_JOINER:
        if (f.joiner->used) {
            *out = f.joiner->sep;
            return true;
        }
        f.joiner->used = true;
        return jn_str_text(r, "", out);
    case JN_UNDEF:
        return jn_undef_fail(r, f.undef);
    default:
        return jn_fail(r, "'%s' object is not callable", jn_type_name(f));
    }
}

OUT_OF_LINE call(jn_state *r, const jn_node *e, jn_val *out)
{
    jn_val f;
    jn_args a;
    if (!jn_eval(r, e->a, &f) || !args_of(r, e, &a)) return false;
    r->line = e->line;
    return jn_call(r, f, &a, out);
}

OUT_OF_LINE apply(jn_state *r, const jn_node *e, jn_val *out)
{
    jn_val v;
    jn_args a;
    if (!jn_eval(r, e->a, &v) || !args_of(r, e, &a)) return false;
    r->line = e->line;
    if (!e->func)
        return jn_fail(r, "no %s named '%.*s'", e->kind == JN_E_FILTER ? "filter" : "test",
                       (int)e->str->n, jn_bytes(e->str));
    return e->func->fn(r, v, &a, out);
}

OUT_OF_LINE variable(jn_state *r, const jn_node *e, jn_val *out)
{
    *out = jn_lookup(r, e->sym);
    return out->kind != JN_MISSING || jn_undef_attr(r, (jn_val){.kind = JN_MISSING}, e->str, out);
}

static bool eval(jn_state *r, const jn_node *e, jn_val *out)
{
    switch (e->kind) {
    case JN_E_CONST:
        *out = e->value;
        return true;
    case JN_E_NAME:
        return variable(r, e, out);
    case JN_E_LIST:
    case JN_E_TUPLE:
        return sequence(r, e, out);
    case JN_E_DICT:
        return dict(r, e, out);
    case JN_E_ATTR:
        return attr(r, e, out);
    case JN_E_ITEM:
        return item(r, e, out);
    case JN_E_SLICE:
        return slice(r, e, out);
    case JN_E_CALL:
        return call(r, e, out);
    case JN_E_FILTER:
    case JN_E_TEST:
        return apply(r, e, out);
    case JN_E_NOT:
        return negation(r, e, out);
    case JN_E_NEG:
    case JN_E_POS:
        return sign(r, e, out);
    case JN_E_CHAIN:
        return chain(r, e, out);
    case JN_E_CONCAT:
        return concat(r, e, out);
    case JN_E_COMPARE:
        return compare(r, e, out);
    case JN_E_AND:
    case JN_E_OR:
        return and_or(r, e, out);
    case JN_E_IF:
        return inline_if(r, e, out);
    case JN_E_HOLE:
        *out = r->hole;
        return true;
    default:
        bg_fail(r->err, BG_INTERNAL, "%s: a statement where an expression belongs", r->name);
        return false;
    }
}

bool jn_eval(jn_state *r, const jn_node *e, jn_val *out)
{
    if (!jn_work(r, 0) || !jn_enter(r)) return false;
    bool ok = eval(r, e, out);
    jn_leave(r);
    return ok;
}
