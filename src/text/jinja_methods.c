/* Methods of everything but str, and how arguments reach their parameters. */
#include <math.h>
#include <string.h>

#include "text/jinja_builtin.h"

/* ---- arguments ---- */

/* The next word of a parameter list; NULL: no more. */
static const char *next_word(const char *p, size_t *n)
{
    p += strspn(p, " ");
    *n = strcspn(p, " ");
    return *n ? p : NULL;
}

bool jn_bind(jn_state *r, const char *what, const jn_args *a, const char *names, size_t n_required,
             jn_val *v)
{
    size_t n_names = 0, n = 0, used = 0;
    for (const char *p = names; v && (p = next_word(p, &n)); p += n, n_names++) {
        jn_val *slot = &v[n_names];
        *slot = (jn_val){.kind = JN_MISSING};
        if (n_names < a->n) *slot = a->v[n_names];
        for (size_t i = 0; i < a->n_kw; i++) {
            const jn_str *name = a->kw[i].name;
            if (name->n != n || memcmp(jn_bytes(name), p, n) != 0) continue;
            if (slot->kind != JN_MISSING)
                return jn_fail(r, "%s() got argument '%.*s' twice", what, (int)n, p);
            *slot = a->kw[i].v;
            used++;
        }
        if (slot->kind == JN_MISSING && n_names < n_required)
            return jn_fail(r, "%s() is missing argument '%.*s'", what, (int)n, p);
    }
    if (a->n > n_names)
        return jn_fail(r, "%s() takes at most %zu arguments, %zu are given", what, n_names, a->n);
    return used == a->n_kw || jn_fail(r, "%s() got an unknown keyword argument", what);
}

bool jn_want_int(jn_state *r, jn_val v, int64_t *i)
{
    if (v.kind == JN_UNDEF) return jn_undef_fail(r, v.undef);
    if (!jn_is_int(v))
        return jn_fail(r, "'%s' object cannot be interpreted as an integer", jn_type_name(v));
    *i = jn_as_int(v);
    return true;
}

bool jn_want_str(jn_state *r, jn_val v, const jn_str **s)
{
    if (v.kind == JN_UNDEF) return jn_undef_fail(r, v.undef);
    if (v.kind != JN_STR) return jn_fail(r, "a str is required, not %s", jn_type_name(v));
    *s = v.s;
    return true;
}

const jn_func *jn_find_in(const jn_func *table, size_t n_table, const char *name, size_t n)
{
    for (size_t i = 0; i < n_table; i++)
        if (strlen(table[i].name) == n && memcmp(table[i].name, name, n) == 0) return &table[i];
    return NULL;
}

/* ---- dict ---- */

static bool view(jn_state *r, const jn_dict *d, const char *type, jn_val *out)
{
    jn_val l, pair;
    if (!jn_work(r, d->n) || !jn_list_new(r, JN_VIEW, d->n, &l)) return false;
    l.list->view = type;
    for (size_t i = 0; i < d->n; i++) {
        bool ok = type[5] == 'k' ? jn_list_add(r, l.list, d->e[i].k)
                  : type[5] == 'v'
                      ? jn_list_add(r, l.list, d->e[i].v)
                      : jn_pair(r, d->e[i].k, d->e[i].v, &pair) && jn_list_add(r, l.list, pair);
        if (!ok) return false;
    }
    *out = l;
    return true;
}

static bool dict_items(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    return jn_bind(r, "items", a, "", 0, NULL) && view(r, self.dict, "dict_items", out);
}

static bool dict_keys(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    return jn_bind(r, "keys", a, "", 0, NULL) && view(r, self.dict, "dict_keys", out);
}

static bool dict_values(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    return jn_bind(r, "values", a, "", 0, NULL) && view(r, self.dict, "dict_values", out);
}

static bool dict_get(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    jn_val v[2];
    if (!jn_bind(r, "get", a, "key default", 1, v)) return false;
    if (!jn_dict_get(r, self.dict, v[0], out)) return false;
    if (out->kind == JN_MISSING) *out = v[1].kind == JN_MISSING ? jn_none() : v[1];
    return true;
}

static bool dict_copy(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    if (!jn_bind(r, "copy", a, "", 0, NULL) || !jn_dict_new(r, JN_DICT, out)) return false;
    for (size_t i = 0; i < self.dict->n; i++)
        if (!jn_dict_set(r, out->dict, self.dict->e[i].k, self.dict->e[i].v)) return false;
    return true;
}

/* ---- list and tuple ---- */

/* Jinja's sandbox refuses to change any list; here those made by the template may change. */
static bool may_change(jn_state *r, jn_val self, const char *what)
{
    if (self.list->frozen)
        return jn_fail(r, "'%s' of a list that came with the request is not allowed", what);
    return true;
}

static bool list_append(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    jn_val v;
    *out = jn_none();
    return may_change(r, self, "append") && jn_bind(r, "append", a, "object", 1, &v) &&
           jn_list_add(r, self.list, v);
}

static bool list_extend(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    jn_val v, *items;
    size_t n;
    *out = jn_none();
    if (!may_change(r, self, "extend") || !jn_bind(r, "extend", a, "iterable", 1, &v) ||
        !jn_items(r, v, &items, &n))
        return false;
    for (size_t i = 0; i < n; i++)
        if (!jn_list_add(r, self.list, items[i])) return false;
    return true;
}

static bool list_insert(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    jn_val v[2];
    int64_t i = 0, n = (int64_t)self.list->n;
    *out = jn_none();
    if (!may_change(r, self, "insert") || !jn_bind(r, "insert", a, "index object", 2, v) ||
        !jn_want_int(r, v[0], &i) || !jn_work(r, (size_t)n) || !jn_list_add(r, self.list, v[1]))
        return false;
    if (i < 0) i = i < -n ? 0 : i + n;
    if (i > n) i = n;
    memmove(self.list->v + i + 1, self.list->v + i, (size_t)(n - i) * sizeof *self.list->v);
    self.list->v[i] = v[1];
    return true;
}

static bool list_pop(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    jn_val v;
    int64_t i = -1, n = (int64_t)self.list->n;
    if (!may_change(r, self, "pop") || !jn_bind(r, "pop", a, "index", 0, &v)) return false;
    if (v.kind != JN_MISSING && !jn_want_int(r, v, &i)) return false;
    if (i < 0) i += n;
    if (i < 0 || i >= n) return jn_fail(r, n ? "pop index out of range" : "pop from empty list");
    *out = self.list->v[i];
    memmove(self.list->v + i, self.list->v + i + 1, (size_t)(n - i - 1) * sizeof *self.list->v);
    self.list->n--;
    return jn_work(r, (size_t)n);
}

static bool list_copy(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    if (!jn_bind(r, "copy", a, "", 0, NULL) || !jn_list_new(r, JN_LIST, self.list->n, out))
        return false;
    for (size_t i = 0; i < self.list->n; i++)
        if (!jn_list_add(r, out->list, self.list->v[i])) return false;
    return jn_work(r, self.list->n);
}

static bool list_index(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    jn_val v = {0}, *items;
    size_t n;
    bool eq;
    if (!jn_bind(r, "index", a, "value", 1, &v) || !jn_items(r, self, &items, &n)) return false;
    for (size_t i = 0; i < n; i++) {
        if (!jn_equal(r, items[i], v, &eq)) return false;
        if (!eq) continue;
        *out = jn_int((int64_t)i);
        return true;
    }
    return jn_fail(r, "the value is not in the list");
}

static bool list_count(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    jn_val v = {0}, *items;
    size_t n;
    bool eq;
    int64_t found = 0;
    if (!jn_bind(r, "count", a, "value", 1, &v) || !jn_items(r, self, &items, &n)) return false;
    for (size_t i = 0; i < n; i++) {
        if (!jn_equal(r, items[i], v, &eq)) return false;
        found += eq;
    }
    *out = jn_int(found);
    return true;
}

/* What would change a value that templates may not change. */
static bool refused(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    (void)a;
    (void)out;
    return jn_fail(r, "methods that change a '%s' in place are not allowed", jn_type_name(self));
}

/* ---- others ---- */

static bool cycler_next(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    jn_cycler *c = self.cycler;
    if (!jn_bind(r, "next", a, "", 0, NULL)) return false;
    *out = c->items->v[c->at];
    c->at = (c->at + 1) % c->items->n;
    return true;
}

static bool cycler_reset(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    self.cycler->at = 0;
    *out = jn_none();
    return jn_bind(r, "reset", a, "", 0, NULL);
}

static bool is_integer(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    *out = jn_bool(isfinite(self.f) && self.f == floor(self.f));
    return jn_bind(r, "is_integer", a, "", 0, NULL);
}

const jn_func *jn_find_method(jn_val self, const char *name, size_t n)
{
    static const jn_func dict[] = {
        {"items", dict_items},   {"keys", dict_keys}, {"values", dict_values}, {"get", dict_get},
        {"copy", dict_copy},     {"update", refused}, {"pop", refused},        {"popitem", refused},
        {"setdefault", refused}, {"clear", refused}};
    static const jn_func list[] = {
        {"append", list_append}, {"extend", list_extend}, {"insert", list_insert},
        {"pop", list_pop},       {"copy", list_copy},     {"index", list_index},
        {"count", list_count},   {"remove", refused},     {"reverse", refused},
        {"sort", refused},       {"clear", refused}};
    static const jn_func tuple[] = {{"index", list_index}, {"count", list_count}};
    static const jn_func cycler[] = {{"next", cycler_next}, {"reset", cycler_reset}};
    static const jn_func number[] = {{"is_integer", is_integer}};
    switch (self.kind) {
    case JN_STR:
        return jn_find_str_method(name, n);
    case JN_DICT:
        return jn_find_in(dict, sizeof dict / sizeof *dict, name, n);
    case JN_LIST:
        return jn_find_in(list, sizeof list / sizeof *list, name, n);
    case JN_TUPLE:
    case JN_RANGE:
        return jn_find_in(tuple, sizeof tuple / sizeof *tuple, name, n);
    case JN_CYCLER:
        return jn_find_in(cycler, sizeof cycler / sizeof *cycler, name, n);
    case JN_FLOAT:
        return jn_find_in(number, 1, name, n);
    default:
        return NULL;
    }
}
