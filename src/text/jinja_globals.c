/* The functions that every template finds: range, dict, namespace, cycler, joiner, raise_exception,
 * strftime_now. */
#include <string.h>

#include "text/jinja_ast.h"
#include "text/jinja_builtin.h"

enum { MAX_RANGE = 100000 };

static bool range(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    int64_t v[3] = {0, 0, 1};
    (void)self;
    if (a->n_kw || a->n < 1 || a->n > 3) return jn_fail(r, "range() takes 1 to 3 numbers");
    for (size_t i = 0; i < a->n; i++)
        if (!jn_want_int(r, a->v[i], &v[i])) return false;
    if (a->n == 1) {
        v[1] = v[0];
        v[0] = 0;
    }
    if (v[2] == 0) return jn_fail(r, "range() arg 3 must not be zero");
    uint64_t span = v[2] > 0 ? (uint64_t)v[1] - (uint64_t)v[0] : (uint64_t)v[0] - (uint64_t)v[1];
    bool empty = v[2] > 0 ? v[1] <= v[0] : v[1] >= v[0];
    uint64_t step = v[2] > 0 ? (uint64_t)v[2] : 0 - (uint64_t)v[2];
    uint64_t n = empty ? 0 : (span - 1) / step + 1;
    if (n > MAX_RANGE)
        return jn_fail(r, "range() of more than %d numbers is not allowed", MAX_RANGE);
    jn_range *g = jn_new(r, sizeof *g);
    if (!g) return false;
    *g = (jn_range){.start = v[0], .stop = v[1], .step = v[2], .n = (int64_t)n};
    *out = (jn_val){.kind = JN_RANGE, .range = g};
    return true;
}

/* Fills d from a mapping or pairs, and from the keyword arguments. */
static bool fill(jn_state *r, const char *what, const jn_args *a, jn_dict *d)
{
    if (a->n > 1) return jn_fail(r, "%s() takes at most one positional argument", what);
    if (a->n == 1 && (a->v[0].kind == JN_DICT || a->v[0].kind == JN_NAMESPACE)) {
        const jn_dict *from = a->v[0].dict;
        for (size_t i = 0; i < from->n; i++)
            if (!jn_dict_set(r, d, from->e[i].k, from->e[i].v)) return false;
    } else if (a->n == 1) {
        jn_val *items, *pair;
        size_t n, n_pair;
        if (!jn_items(r, a->v[0], &items, &n)) return false;
        for (size_t i = 0; i < n; i++) {
            if (!jn_items(r, items[i], &pair, &n_pair)) return false;
            if (n_pair != 2) return jn_fail(r, "%s() needs pairs of key and value", what);
            if (!jn_dict_set(r, d, pair[0], pair[1])) return false;
        }
    }
    for (size_t i = 0; i < a->n_kw; i++)
        if (!jn_dict_set(r, d, (jn_val){.kind = JN_STR, .s = a->kw[i].name}, a->kw[i].v))
            return false;
    return true;
}

static bool dict(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    (void)self;
    return jn_dict_new(r, JN_DICT, out) && fill(r, "dict", a, out->dict);
}

static bool namespace(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    (void)self;
    return jn_dict_new(r, JN_NAMESPACE, out) && fill(r, "namespace", a, out->dict);
}

static bool cycler(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    jn_val items;
    (void)self;
    if (a->n == 0 || a->n_kw) return jn_fail(r, "cycler() needs at least one item");
    jn_cycler *c = jn_new(r, sizeof *c);
    if (!c || !jn_list_new(r, JN_LIST, a->n, &items)) return false;
    for (size_t i = 0; i < a->n; i++)
        if (!jn_list_add(r, items.list, a->v[i])) return false;
    c->items = items.list;
    *out = (jn_val){.kind = JN_CYCLER, .cycler = c};
    return true;
}

static bool joiner(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    jn_val sep;
    (void)self;
    if (!jn_bind(r, "joiner", a, "sep", 0, &sep)) return false;
    if (sep.kind == JN_MISSING && !jn_str_text(r, ", ", &sep)) return false;
    jn_joiner *j = jn_new(r, sizeof *j);
    if (!j) return false;
    j->sep = sep;
    *out = (jn_val){.kind = JN_JOINER, .joiner = j};
    return true;
}

static bool raise_exception(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    jn_val v;
    const jn_str *s;
    (void)self;
    (void)out;
    if (!jn_bind(r, "raise_exception", a, "message", 1, &v) || !jn_str_of(r, v, &s)) return false;
    char text[BG_ERROR_TEXT];
    size_t n = s->n < sizeof text - 1 ? s->n : sizeof text - 1;
    memcpy(text, jn_bytes(s), n);
    text[n] = 0;
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)text[i] < 0x20) text[i] = ' ';
    bg_fail(r->err, r->fail_status, "%s", text); /* the template's own words, nothing else */
    return false;
}

static bool strftime_now(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    jn_val v;
    const jn_str *f;
    (void)self;
    return jn_bind(r, "strftime_now", a, "format", 1, &v) && jn_want_str(r, v, &f) &&
           jn_strftime(r, f, out);
}

bool jn_globals(jn_state *r)
{
    static const jn_func table[] = {
        {"range", range},
        {"dict", dict},
        {"namespace", namespace},
        {"cycler", cycler},
        {"joiner", joiner},
        {"raise_exception", raise_exception},
        {"strftime_now", strftime_now},
    };
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        jn_set_var(r, table[i].name, strlen(table[i].name),
                   (jn_val){.kind = JN_FUNC, .func = &table[i]});
    return true;
}
