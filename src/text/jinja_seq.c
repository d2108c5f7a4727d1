/* Filters on sequences. What is a generator in Jinja is one here (JN_ITER), but its items are
 * computed at once. */
#include <string.h>

#include "text/jinja_builtin.h"

static bool no_args(jn_state *r, const char *what, const jn_args *a)
{
    return jn_bind(r, what, a, "", 0, NULL);
}

/* The key that an attribute path leads to: a.b.0 */
bool jn_attr_path(jn_state *r, jn_val v, jn_val path, jn_val def, jn_val *out)
{
    if (path.kind == JN_MISSING || path.kind == JN_NONE) {
        *out = v;
        return true;
    }
    if (path.kind != JN_STR) {
        if (!jn_is_int(path)) return jn_fail(r, "an attribute must be a str or an int");
        if (!jn_getitem(r, v, path, &v)) return false;
    }
    for (size_t at = 0; path.kind == JN_STR && at <= path.s->n;) {
        const char *p = jn_bytes(path.s) + at;
        const char *dot = memchr(p, '.', path.s->n - at);
        size_t n = dot ? (size_t)(dot - p) : path.s->n - at;
        jn_val part;
        bool digits = n > 0 && n < 10;
        int64_t index = 0;
        for (size_t i = 0; digits && i < n; i++) {
            digits = p[i] >= '0' && p[i] <= '9';
            index = index * 10 + (p[i] - '0');
        }
        if (!jn_str_sub(r, path.s, at, n, &part)) return false;
        if (!jn_getitem(r, v, digits ? jn_int(index) : part, &v)) return false;
        if (v.kind == JN_UNDEF && def.kind != JN_MISSING && def.kind != JN_NONE) v = def;
        at += n + 1;
    }
    *out = v;
    return true;
}

/* A new list of all items; for filters that make one. */
static bool list_of(jn_state *r, jn_val v, jn_kind kind, jn_val *out)
{
    jn_val *items;
    size_t n;
    if (!jn_items(r, v, &items, &n) || !jn_list_new(r, kind, n, out)) return false;
    if (n) memcpy(out->list->v, items, n * sizeof *items);
    out->list->n = n;
    return true;
}

static bool list(jn_state *r, jn_val v, const jn_args *a, jn_val *out)
{
    return no_args(r, "list", a) && list_of(r, v, JN_LIST, out);
}

static bool length(jn_state *r, jn_val v, const jn_args *a, jn_val *out)
{
    *out = jn_int(0);
    return no_args(r, "length", a) && jn_length(r, v, &out->i);
}

static bool end_item(jn_state *r, jn_val v, bool last, jn_val *out)
{
    jn_val *items, text;
    size_t n;
    if (last && v.kind == JN_ITER) return jn_fail(r, "'generator' object is not reversible");
    if (!jn_items(r, v, &items, &n)) return false;
    if (n) {
        *out = items[last ? n - 1 : 0];
        if (v.kind == JN_ITER) v.iter->at = v.iter->n - n + 1; /* only one was taken */
        return true;
    }
    return jn_str_text(r, "item of an empty sequence", &text) &&
           jn_undef_attr(r, (jn_val){.kind = JN_MISSING}, text.s, out);
}

static bool first(jn_state *r, jn_val v, const jn_args *a, jn_val *out)
{
    return no_args(r, "first", a) && end_item(r, v, false, out);
}

static bool last(jn_state *r, jn_val v, const jn_args *a, jn_val *out)
{
    return no_args(r, "last", a) && end_item(r, v, true, out);
}

static bool join(jn_state *r, jn_val v, const jn_args *a, jn_val *out)
{
    jn_val arg[2], *items;
    size_t n;
    const jn_str *sep;
    if (!jn_bind(r, "join", a, "d attribute", 0, arg)) return false;
    if (arg[0].kind == JN_MISSING && !jn_str_text(r, "", &arg[0])) return false;
    if (!jn_str_of(r, arg[0], &sep) || !jn_items(r, v, &items, &n)) return false;
    if (arg[1].kind != JN_MISSING && arg[1].kind != JN_NONE) {
        jn_val *picked = jn_new_array(r, n, sizeof *picked);
        if (!picked) return false;
        for (size_t i = 0; i < n; i++)
            if (!jn_attr_path(r, items[i], arg[1], (jn_val){0}, &picked[i])) return false;
        items = picked;
    }
    return jn_str_join(r, sep, items, n, out);
}

static bool items_filter(jn_state *r, jn_val v, const jn_args *a, jn_val *out)
{
    jn_val l, pair;
    if (!no_args(r, "items", a)) return false;
    if (v.kind != JN_DICT && v.kind != JN_UNDEF)
        return jn_fail(r, "items: the value is no mapping");
    if (!jn_list_new(r, JN_LIST, 0, &l)) return false;
    for (size_t i = 0; v.kind == JN_DICT && i < v.dict->n; i++)
        if (!jn_pair(r, v.dict->e[i].k, v.dict->e[i].v, &pair) || !jn_list_add(r, l.list, pair))
            return false;
    return jn_iter_of(r, l, out);
}

static bool reverse(jn_state *r, jn_val v, const jn_args *a, jn_val *out)
{
    jn_val l;
    if (!no_args(r, "reverse", a)) return false;
    if (!list_of(r, v, JN_LIST, &l)) return false;
    for (size_t i = 0, k = l.list->n; i + 1 < k; i++) {
        jn_val t = l.list->v[i];
        l.list->v[i] = l.list->v[--k];
        l.list->v[k] = t;
    }
    if (v.kind != JN_STR) return jn_iter_of(r, l, out);
    jn_val none;
    return jn_str_text(r, "", &none) && jn_str_join(r, none.s, l.list->v, l.list->n, out);
}

/* ---- order ---- */

/* What sort, unique, min and max compare: the attribute, in lower case unless case counts. */
static bool sort_key(jn_state *r, jn_val v, jn_val path, bool fold, jn_val *key)
{
    const jn_args none = {0};
    if (!jn_attr_path(r, v, path, (jn_val){0}, key)) return false;
    return !fold || key->kind != JN_STR || jn_str_lower(r, *key, &none, key);
}

/* The key of sort: a list with the value of each attribute of "a,b". */
static bool sort_keys(jn_state *r, jn_val v, jn_val path, bool fold, jn_val *key)
{
    jn_val part = path, k;
    if (!jn_list_new(r, JN_LIST, 1, key)) return false;
    size_t n_path = path.kind == JN_STR ? path.s->n : 0;
    for (size_t at = 0; at <= n_path;) {
        size_t n = n_path - at;
        if (path.kind == JN_STR) {
            const char *p = jn_bytes(path.s) + at, *comma = memchr(p, ',', n);
            if (comma) n = (size_t)(comma - p);
            if (!jn_str_sub(r, path.s, at, n, &part)) return false;
        }
        if (!sort_key(r, v, part, fold, &k) || !jn_list_add(r, key->list, k)) return false;
        at += n + 1;
    }
    return true;
}

typedef struct keyed {
    jn_val key, v;
} keyed;

/* Stable merge sort, bottom up. */
static bool merge_sort(jn_state *r, keyed *v, size_t n, bool down)
{
    keyed *from = v, *to = jn_new_array(r, n, sizeof *to);
    if (!to) return false;
    for (size_t width = 1; width < n; width *= 2) {
        for (size_t lo = 0; lo < n; lo += 2 * width) {
            size_t mid = lo + width < n ? lo + width : n, hi = mid + width < n ? mid + width : n;
            size_t i = lo, k = mid;
            for (size_t at = lo; at < hi; at++) {
                int cmp = 0;
                if (i < mid && k < hi && !jn_compare(r, from[i].key, from[k].key, &cmp))
                    return false;
                if (cmp == 2) cmp = 0;
                bool left = i < mid && (k == hi || (down ? cmp >= 0 : cmp <= 0));
                to[at] = left ? from[i++] : from[k++];
            }
        }
        keyed *t = from;
        from = to;
        to = t;
    }
    if (from != v && n) memcpy(v, from, n * sizeof *v);
    return true;
}

typedef bool key_fn(jn_state *r, jn_val v, jn_val path, bool fold, jn_val *key);

typedef struct order {
    key_fn *key;
    jn_val path;
    bool fold, down;
} order;

static bool sorted(jn_state *r, jn_val *items, size_t n, const order *o)
{
    keyed *k = jn_new_array(r, n, sizeof *k);
    if (!k) return false;
    for (size_t i = 0; i < n; i++) {
        k[i].v = items[i];
        if (!o->key(r, items[i], o->path, o->fold, &k[i].key)) return false;
    }
    if (!merge_sort(r, k, n, o->down)) return false;
    for (size_t i = 0; i < n; i++)
        items[i] = k[i].v;
    return true;
}

static bool sort(jn_state *r, jn_val v, const jn_args *a, jn_val *out)
{
    jn_val arg[3];
    if (!jn_bind(r, "sort", a, "reverse case_sensitive attribute", 0, arg)) return false;
    const order o = {sort_keys, arg[2], !jn_truth(arg[1]), jn_truth(arg[0])};
    return list_of(r, v, JN_LIST, out) && sorted(r, out->list->v, out->list->n, &o);
}

static bool dictsort(jn_state *r, jn_val v, const jn_args *a, jn_val *out)
{
    jn_val arg[3], pair;
    if (!jn_bind(r, "dictsort", a, "case_sensitive by reverse", 0, arg)) return false;
    if (v.kind == JN_UNDEF) return jn_undef_fail(r, v.undef);
    if (v.kind != JN_DICT) return jn_fail(r, "dictsort: the value is no mapping");
    bool by_value = arg[1].kind == JN_STR && jn_str_is(arg[1].s, "value");
    if (arg[1].kind != JN_MISSING && !by_value &&
        !(arg[1].kind == JN_STR && jn_str_is(arg[1].s, "key")))
        return jn_fail(r, "dictsort: 'by' must be 'key' or 'value'");
    if (!jn_list_new(r, JN_LIST, 0, out)) return false;
    for (size_t i = 0; i < v.dict->n; i++)
        if (!jn_pair(r, v.dict->e[i].k, v.dict->e[i].v, &pair) || !jn_list_add(r, out->list, pair))
            return false;
    const order o = {sort_key, jn_int(by_value), !jn_truth(arg[0]), jn_truth(arg[2])};
    return sorted(r, out->list->v, out->list->n, &o);
}

static bool unique(jn_state *r, jn_val v, const jn_args *a, jn_val *out)
{
    jn_val arg[2], *items, seen, l, key, was;
    size_t n;
    if (!jn_bind(r, "unique", a, "case_sensitive attribute", 0, arg) ||
        !jn_items(r, v, &items, &n) || !jn_dict_new(r, JN_DICT, &seen) ||
        !jn_list_new(r, JN_LIST, 0, &l))
        return false;
    for (size_t i = 0; i < n; i++) {
        if (!sort_key(r, items[i], arg[1], !jn_truth(arg[0]), &key) ||
            !jn_dict_get(r, seen.dict, key, &was))
            return false;
        if (was.kind != JN_MISSING) continue;
        if (!jn_dict_set(r, seen.dict, key, jn_none()) || !jn_list_add(r, l.list, items[i]))
            return false;
    }
    return jn_iter_of(r, l, out);
}

static bool extreme(jn_state *r, jn_val v, const jn_args *a, bool max, jn_val *out)
{
    jn_val arg[2], *items, best, key, text;
    size_t n;
    int cmp;
    if (!jn_bind(r, max ? "max" : "min", a, "case_sensitive attribute", 0, arg) ||
        !jn_items(r, v, &items, &n))
        return false;
    if (n == 0)
        return jn_str_text(r, "item of an empty sequence", &text) &&
               jn_undef_attr(r, (jn_val){.kind = JN_MISSING}, text.s, out);
    *out = items[0];
    bool fold = !jn_truth(arg[0]);
    if (!sort_key(r, items[0], arg[1], fold, &best)) return false;
    for (size_t i = 1; i < n; i++) {
        if (!sort_key(r, items[i], arg[1], fold, &key)) return false;
        if (!jn_compare(r, key, best, &cmp)) return false;
        if (cmp != (max ? 1 : -1)) continue;
        best = key;
        *out = items[i];
    }
    return true;
}

static bool min(jn_state *r, jn_val v, const jn_args *a, jn_val *out)
{
    return extreme(r, v, a, false, out);
}

static bool max(jn_state *r, jn_val v, const jn_args *a, jn_val *out)
{
    return extreme(r, v, a, true, out);
}

static bool sum(jn_state *r, jn_val v, const jn_args *a, jn_val *out)
{
    jn_val arg[2], *items, x, total;
    size_t n;
    if (!jn_bind(r, "sum", a, "attribute start", 0, arg) || !jn_items(r, v, &items, &n))
        return false;
    total = arg[1].kind == JN_MISSING ? jn_int(0) : arg[1];
    for (size_t i = 0; i < n; i++) {
        if (!jn_attr_path(r, items[i], arg[0], (jn_val){0}, &x)) return false;
        if (total.kind == JN_STR) return jn_fail(r, "sum() cannot add up strings");
        if (!jn_binary(r, '+', total, x, &total)) return false;
    }
    *out = total;
    return true;
}

/* ---- map, select, reject ---- */

/* The arguments behind the first `skip` positional ones. */
static jn_args rest_of(const jn_args *a, size_t skip)
{
    jn_args rest = *a;
    rest.v = a->n > skip ? a->v + skip : NULL;
    rest.n = a->n > skip ? a->n - skip : 0;
    return rest;
}

static bool map_attribute(jn_state *r, const jn_args *a, const jn_val *items, size_t n, jn_list *l)
{
    jn_val arg[2], x;
    if (!jn_bind(r, "map", a, "attribute default", 1, arg)) return false;
    for (size_t i = 0; i < n; i++) {
        if (!jn_work(r, 0) || !jn_attr_path(r, items[i], arg[0], arg[1], &x) ||
            !jn_list_add(r, l, x))
            return false;
    }
    return true;
}

static bool map(jn_state *r, jn_val v, const jn_args *a, jn_val *out)
{
    jn_val *items, l, x;
    size_t n = 0;
    if (!jn_truth(v))
        v = (jn_val){.kind = JN_UNDEF}; /* nothing to walk, and arguments are not read */
    if (!jn_items(r, v, &items, &n) || !jn_list_new(r, JN_LIST, n, &l)) return false;
    if (n == 0) return jn_iter_of(r, l, out);
    if (a->n == 0) {
        if (a->n_kw == 0) return jn_fail(r, "map requires a filter argument");
        return map_attribute(r, a, items, n, l.list) && jn_iter_of(r, l, out);
    }
    const jn_str *name;
    if (!jn_want_str(r, a->v[0], &name)) return false;
    const jn_func *f = jn_find_filter(jn_bytes(name), name->n);
    if (!f) return jn_fail(r, "no filter named '%.*s'", (int)name->n, jn_bytes(name));
    jn_args rest = rest_of(a, 1);
    if (!jn_enter(r)) return false; /* map(map, ...) */
    for (size_t i = 0; i < n; i++)
        if (!jn_work(r, 0) || !f->fn(r, items[i], &rest, &x) || !jn_list_add(r, l.list, x))
            return false;
    jn_leave(r);
    return jn_iter_of(r, l, out);
}

typedef struct selection {
    bool by_attr; /* the first argument names an attribute */
    bool want;    /* keep what passes, or what fails */
} selection;

static bool choose(jn_state *r, jn_val v, const jn_args *a, selection how, jn_val *out)
{
    jn_val *items, l, x, yes;
    size_t n, skip = how.by_attr;
    const jn_str *name;
    const jn_func *test = NULL;
    if (!jn_truth(v)) return jn_list_new(r, JN_LIST, 0, &l) && jn_iter_of(r, l, out);
    if (how.by_attr && a->n == 0) return jn_fail(r, "the name of an attribute is missing");
    if (a->n > skip) {
        if (!jn_want_str(r, a->v[skip], &name)) return false;
        test = jn_find_test(jn_bytes(name), name->n);
        if (!test) return jn_fail(r, "no test named '%.*s'", (int)name->n, jn_bytes(name));
    }
    jn_args rest = rest_of(a, skip + 1);
    if (!jn_items(r, v, &items, &n) || !jn_list_new(r, JN_LIST, 0, &l)) return false;
    for (size_t i = 0; i < n; i++) {
        x = items[i];
        if (!jn_work(r, 0)) return false;
        if (how.by_attr && !jn_attr_path(r, x, a->v[0], (jn_val){0}, &x)) return false;
        yes = jn_bool(jn_truth(x));
        if (test && !test->fn(r, x, &rest, &yes)) return false;
        if (yes.b == how.want && !jn_list_add(r, l.list, items[i])) return false;
    }
    return jn_iter_of(r, l, out);
}

static bool select_(jn_state *r, jn_val v, const jn_args *a, jn_val *out)
{
    return choose(r, v, a, (selection){.want = true}, out);
}

static bool reject(jn_state *r, jn_val v, const jn_args *a, jn_val *out)
{
    return choose(r, v, a, (selection){.want = false}, out);
}

static bool selectattr(jn_state *r, jn_val v, const jn_args *a, jn_val *out)
{
    return choose(r, v, a, (selection){.by_attr = true, .want = true}, out);
}

static bool rejectattr(jn_state *r, jn_val v, const jn_args *a, jn_val *out)
{
    return choose(r, v, a, (selection){.by_attr = true, .want = false}, out);
}

/* ---- grouping ---- */

/* Lists of `size` items; the last is filled up if there is something to fill it with. */
static bool batch(jn_state *r, jn_val v, const jn_args *a, jn_val *out)
{
    jn_val arg[2], *items, all, part;
    size_t n;
    int64_t size;
    if (!jn_bind(r, "batch", a, "linecount fill_with", 1, arg) || !jn_want_int(r, arg[0], &size) ||
        !jn_items(r, v, &items, &n) || !jn_list_new(r, JN_LIST, 0, &all))
        return false;
    if (size < 1) return jn_fail(r, "batch: the size must be positive");
    for (size_t i = 0; i < n;) {
        if (!jn_list_new(r, JN_LIST, 0, &part) || !jn_list_add(r, all.list, part)) return false;
        for (int64_t k = 0; k < size && i < n; k++)
            if (!jn_list_add(r, part.list, items[i++])) return false;
        bool fill = arg[1].kind != JN_MISSING && arg[1].kind != JN_NONE;
        while (fill && (int64_t)part.list->n < size)
            if (!jn_work(r, 0) || !jn_list_add(r, part.list, arg[1])) return false;
    }
    return jn_iter_of(r, all, out);
}

/* `slices` lists of nearly equal length. */
static bool slice(jn_state *r, jn_val v, const jn_args *a, jn_val *out)
{
    jn_val arg[2], *items, all, part;
    size_t n, at = 0;
    int64_t slices;
    if (!jn_bind(r, "slice", a, "slices fill_with", 1, arg) || !jn_want_int(r, arg[0], &slices) ||
        !jn_items(r, v, &items, &n) || !jn_list_new(r, JN_LIST, 0, &all))
        return false;
    if (slices < 1) return jn_fail(r, "slice: the number of slices must be positive");
    size_t per = n / (size_t)slices, extra = n % (size_t)slices;
    for (size_t s = 0; s < (size_t)slices; s++) {
        if (!jn_work(r, 0) || !jn_list_new(r, JN_LIST, 0, &part) || !jn_list_add(r, all.list, part))
            return false;
        for (size_t k = per + (s < extra); k > 0; k--)
            if (!jn_list_add(r, part.list, items[at++])) return false;
        bool fill = arg[1].kind != JN_MISSING && arg[1].kind != JN_NONE;
        if (fill && s >= extra && !jn_list_add(r, part.list, arg[1])) return false;
    }
    return jn_iter_of(r, all, out);
}

/* Pairs of key and list, in the order of the keys. */
static bool groupby(jn_state *r, jn_val v, const jn_args *a, jn_val *out)
{
    jn_val arg[3], all, key = {0}, last_key = {0}, group = {0}, pair, shown = {0};
    bool eq = false;
    if (!jn_bind(r, "groupby", a, "attribute default case_sensitive", 1, arg)) return false;
    bool fold = !jn_truth(arg[2]);
    const order o = {sort_key, arg[0], fold, false};
    if (!list_of(r, v, JN_LIST, &all) || !sorted(r, all.list->v, all.list->n, &o) ||
        !jn_list_new(r, JN_LIST, 0, out))
        return false;
    for (size_t i = 0; i < all.list->n; i++) {
        jn_val item = all.list->v[i];
        if (!sort_key(r, item, arg[0], fold, &key)) return false;
        if (i && !jn_equal(r, key, last_key, &eq)) return false;
        if (!eq) {
            if (!jn_list_new(r, JN_LIST, 0, &group) ||
                !jn_attr_path(r, item, arg[0], arg[1], &shown) ||
                !jn_pair(r, shown, group, &pair) || !jn_list_add(r, out->list, pair))
                return false;
            last_key = key;
        }
        if (!jn_list_add(r, group.list, item)) return false;
    }
    return true;
}

const jn_func *jn_find_seq_filter(const char *name, size_t n)
{
    static const jn_func table[] = {
        {"batch", batch},     {"count", length},    {"dictsort", dictsort},
        {"first", first},     {"groupby", groupby}, {"items", items_filter},
        {"join", join},       {"last", last},       {"length", length},
        {"list", list},       {"map", map},         {"max", max},
        {"min", min},         {"reject", reject},   {"rejectattr", rejectattr},
        {"reverse", reverse}, {"select", select_},  {"selectattr", selectattr},
        {"slice", slice},     {"sort", sort},       {"sum", sum},
        {"unique", unique},
    };
    return jn_find_in(table, sizeof table / sizeof *table, name, n);
}
