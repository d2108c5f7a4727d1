/* Tests: what may follow `is`. */
#include <string.h>

#include "text/jinja_ast.h"
#include "text/jinja_builtin.h"

/* Many tests are a question about the kind alone. */
#define KIND_TEST(name, condition)                                         \
    static bool name(jn_state *r, jn_val v, const jn_args *a, jn_val *out) \
    {                                                                      \
        *out = jn_bool(condition);                                         \
        return jn_bind(r, #name, a, "", 0, NULL);                          \
    }

KIND_TEST(is_defined, v.kind != JN_UNDEF)
KIND_TEST(is_undefined, v.kind == JN_UNDEF)
KIND_TEST(is_none, v.kind == JN_NONE)
KIND_TEST(is_boolean, v.kind == JN_BOOL)
KIND_TEST(is_true, v.kind == JN_BOOL && v.b)
KIND_TEST(is_false, v.kind == JN_BOOL && !v.b)
KIND_TEST(is_integer, v.kind == JN_INT)
KIND_TEST(is_float, v.kind == JN_FLOAT)
KIND_TEST(is_number, jn_is_number(v))
KIND_TEST(is_string, v.kind == JN_STR)
KIND_TEST(is_mapping, v.kind == JN_DICT)
KIND_TEST(is_escaped, v.kind == JN_STR && v.s->safe)
KIND_TEST(is_callable, v.kind == JN_FUNC || v.kind == JN_METHOD || v.kind == JN_MACRO ||
                           v.kind == JN_LOOP || v.kind == JN_JOINER || v.kind == JN_UNDEF)
KIND_TEST(is_sequence, v.kind == JN_STR || v.kind == JN_LIST || v.kind == JN_TUPLE ||
                           v.kind == JN_DICT || v.kind == JN_RANGE || v.kind == JN_UNDEF)
KIND_TEST(is_iterable, v.kind == JN_STR || v.kind == JN_LIST || v.kind == JN_TUPLE ||
                           v.kind == JN_DICT || v.kind == JN_RANGE || v.kind == JN_UNDEF ||
                           v.kind == JN_VIEW || v.kind == JN_ITER || v.kind == JN_LOOP)

/* str(value).isupper() and islower() */
static bool cased(jn_state *r, jn_val v, const jn_args *a, const char *method, jn_val *out)
{
    const jn_str *s;
    if (!jn_str_of(r, v, &s)) return false;
    const jn_func *f = jn_find_str_method(method, strlen(method));
    return f->fn(r, (jn_val){.kind = JN_STR, .s = s}, a, out);
}

static bool is_upper(jn_state *r, jn_val v, const jn_args *a, jn_val *out)
{
    return cased(r, v, a, "isupper", out);
}

static bool is_lower(jn_state *r, jn_val v, const jn_args *a, jn_val *out)
{
    return cased(r, v, a, "islower", out);
}

static bool remainder_is(jn_state *r, jn_val v, jn_val by, int64_t want, jn_val *out)
{
    jn_val rem;
    if (!jn_binary(r, '%', v, by, &rem)) return false;
    return jn_equal(r, rem, jn_int(want), &out->b);
}

static bool is_odd(jn_state *r, jn_val v, const jn_args *a, jn_val *out)
{
    *out = jn_bool(false);
    return jn_bind(r, "odd", a, "", 0, NULL) && remainder_is(r, v, jn_int(2), 1, out);
}

static bool is_even(jn_state *r, jn_val v, const jn_args *a, jn_val *out)
{
    *out = jn_bool(false);
    return jn_bind(r, "even", a, "", 0, NULL) && remainder_is(r, v, jn_int(2), 0, out);
}

static bool is_divisibleby(jn_state *r, jn_val v, const jn_args *a, jn_val *out)
{
    jn_val by;
    *out = jn_bool(false);
    return jn_bind(r, "divisibleby", a, "num", 1, &by) && remainder_is(r, v, by, 0, out);
}

static bool is_eq(jn_state *r, jn_val v, const jn_args *a, jn_val *out)
{
    jn_val other;
    *out = jn_bool(false);
    return jn_bind(r, "eq", a, "other", 1, &other) && jn_equal(r, v, other, &out->b);
}

static bool is_ne(jn_state *r, jn_val v, const jn_args *a, jn_val *out)
{
    if (!is_eq(r, v, a, out)) return false;
    out->b = !out->b;
    return true;
}

static bool is_in(jn_state *r, jn_val v, const jn_args *a, jn_val *out)
{
    jn_val box;
    *out = jn_bool(false);
    return jn_bind(r, "in", a, "seq", 1, &box) && jn_contains(r, box, v, &out->b);
}

static bool is_sameas(jn_state *r, jn_val v, const jn_args *a, jn_val *out)
{
    jn_val other;
    if (!jn_bind(r, "sameas", a, "other", 1, &other)) return false;
    bool same = v.kind == other.kind;
    if (same && v.kind == JN_BOOL) same = v.b == other.b;
    if (same && v.kind == JN_STR) same = jn_str_eq(v.s, other.s);
    if (same && v.kind == JN_FLOAT) same = v.f == other.f;
    if (same && v.kind > JN_BOOL && v.kind != JN_STR && v.kind != JN_FLOAT) same = v.i == other.i;
    *out = jn_bool(same);
    return true;
}

static bool ordered(jn_state *r, jn_val v, const jn_args *a, int *cmp)
{
    jn_val other;
    return jn_bind(r, "comparison", a, "other", 1, &other) && jn_compare(r, v, other, cmp);
}

static bool is_lt(jn_state *r, jn_val v, const jn_args *a, jn_val *out)
{
    int c = 0;
    if (!ordered(r, v, a, &c)) return false;
    *out = jn_bool(c < 0);
    return true;
}

static bool is_le(jn_state *r, jn_val v, const jn_args *a, jn_val *out)
{
    int c = 0;
    if (!ordered(r, v, a, &c)) return false;
    *out = jn_bool(c <= 0);
    return true;
}

static bool is_gt(jn_state *r, jn_val v, const jn_args *a, jn_val *out)
{
    int c = 0;
    if (!ordered(r, v, a, &c)) return false;
    *out = jn_bool(c == 1);
    return true;
}

static bool is_ge(jn_state *r, jn_val v, const jn_args *a, jn_val *out)
{
    int c = 0;
    if (!ordered(r, v, a, &c)) return false;
    *out = jn_bool(c == 0 || c == 1);
    return true;
}

static bool exists(jn_state *r, jn_val v, const jn_args *a, bool filter, jn_val *out)
{
    const jn_str *s;
    if (!jn_bind(r, "filter", a, "", 0, NULL) || !jn_want_str(r, v, &s)) return false;
    *out = jn_bool((filter ? jn_find_filter(jn_bytes(s), s->n) : jn_find_test(jn_bytes(s), s->n)) !=
                   NULL);
    return true;
}

static bool is_filter(jn_state *r, jn_val v, const jn_args *a, jn_val *out)
{
    return exists(r, v, a, true, out);
}

static bool is_test(jn_state *r, jn_val v, const jn_args *a, jn_val *out)
{
    return exists(r, v, a, false, out);
}

const jn_func *jn_find_test(const char *name, size_t n)
{
    static const jn_func table[] = {
        {"defined", is_defined},
        {"undefined", is_undefined},
        {"none", is_none},
        {"boolean", is_boolean},
        {"true", is_true},
        {"false", is_false},
        {"integer", is_integer},
        {"float", is_float},
        {"number", is_number},
        {"string", is_string},
        {"mapping", is_mapping},
        {"sequence", is_sequence},
        {"iterable", is_iterable},
        {"callable", is_callable},
        {"escaped", is_escaped},
        {"upper", is_upper},
        {"lower", is_lower},
        {"odd", is_odd},
        {"even", is_even},
        {"divisibleby", is_divisibleby},
        {"sameas", is_sameas},
        {"in", is_in},
        {"filter", is_filter},
        {"test", is_test},
        {"eq", is_eq},
        {"equalto", is_eq},
        {"==", is_eq},
        {"ne", is_ne},
        {"!=", is_ne},
        {"lt", is_lt},
        {"lessthan", is_lt},
        {"<", is_lt},
        {"le", is_le},
        {"<=", is_le},
        {"gt", is_gt},
        {"greaterthan", is_gt},
        {">", is_gt},
        {"ge", is_ge},
        {">=", is_ge},
    };
    return jn_find_in(table, sizeof table / sizeof *table, name, n);
}
