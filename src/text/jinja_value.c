#include "text/jinja_value.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/hash.h"
#include "base/json.h"

/* ---- failing, memory, limits ---- */

bool jn_fail(jn_state *r, const char *fmt, ...)
{
    char text[BG_ERROR_TEXT];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    for (char *p = text; *p; p++)
        if ((unsigned char)*p < 0x20) *p = ' ';
    bg_fail(r->err, r->fail_status, "%s: line %d: %s", r->name, r->line, text);
    return false;
}

bool jn_no_memory(jn_state *r)
{
    if (r->arena->over)
        return jn_fail(r, "the template needs more than the limit of %zu bytes of memory",
                       r->arena->limit);
    bg_fail(r->err, BG_NOMEM, "%s: out of memory", r->name);
    return false;
}

void *jn_new(jn_state *r, size_t n)
{
    void *p = jn_arena_alloc(r->arena, n);
    if (!p) jn_no_memory(r);
    return p;
}

void *jn_new_array(jn_state *r, size_t n, size_t size)
{
    if (n > SIZE_MAX / 2 / size) n = SIZE_MAX / 2 / size; /* refused by the arena's limit */
    return jn_new(r, n * size);
}

bool jn_work(jn_state *r, size_t n)
{
    enum { PER_STEP = 64 };
    r->steps += 1 + (int64_t)(n / PER_STEP);
    if (r->steps <= r->lim.steps) return true;
    return jn_fail(r, "the template runs longer than the limit of %lld steps",
                   (long long)r->lim.steps);
}

bool jn_enter(jn_state *r)
{
    if (r->nest >= JN_MAX_NEST) return jn_fail(r, "nested more than %d levels deep", JN_MAX_NEST);
    r->nest++;
    return true;
}

void jn_leave(jn_state *r)
{
    r->nest--;
}

/* ---- kinds ---- */

const char *jn_type_name(jn_val v)
{
    switch (v.kind) {
    case JN_MISSING:
    case JN_UNDEF:
        return "Undefined";
    case JN_NONE:
        return "NoneType";
    case JN_BOOL:
        return "bool";
    case JN_INT:
        return "int";
    case JN_FLOAT:
        return "float";
    case JN_STR:
        return v.s->safe ? "Markup" : "str";
    case JN_LIST:
        return "list";
    case JN_TUPLE:
        return "tuple";
    case JN_DICT:
        return "dict";
    case JN_RANGE:
        return "range";
    case JN_VIEW:
        return v.list->view;
    case JN_ITER:
        return "generator";
    case JN_NAMESPACE:
        return "Namespace";
    case JN_LOOP:
        return "LoopContext";
    case JN_MACRO:
        return "Macro";
    case JN_FUNC:
        return "function";
    case JN_METHOD:
        return "builtin_function_or_method";
    case JN_CYCLER:
        return "Cycler";
    case JN_JOINER:
        return "Joiner";
    }
    return "object";
}

enum { SHOWN = 100 }; /* bytes of a name in a message */

bool jn_undef_fail(jn_state *r, const jn_undef *u)
{
    int n = (int)(u->name->n < SHOWN ? u->name->n : SHOWN);
    const char *name = jn_bytes(u->name);
    if (!u->owner) return jn_fail(r, "'%.*s' is undefined", n, name);
    if (u->element) return jn_fail(r, "%s object has no element %.*s", u->owner, n, name);
    return jn_fail(r, "'%s object' has no attribute '%.*s'", u->owner, n, name);
}

static bool undef(jn_state *r, const char *owner, const jn_str *name, bool element, jn_val *out)
{
    jn_undef *u = jn_new(r, sizeof *u);
    if (!u) return false;
    *u = (jn_undef){.name = name, .owner = owner, .element = element};
    *out = (jn_val){.kind = JN_UNDEF, .undef = u};
    return true;
}

bool jn_undef_attr(jn_state *r, jn_val owner, const jn_str *name, jn_val *out)
{
    return undef(r, owner.kind == JN_MISSING ? NULL : jn_type_name(owner), name, false, out);
}

bool jn_undef_item(jn_state *r, jn_val owner, jn_val key, jn_val *out)
{
    if (key.kind == JN_STR) return jn_undef_attr(r, owner, key.s, out);
    jn_val text;
    if (key.kind == JN_INT) { /* the usual case; other keys are only named by their type */
        char number[24];
        int n = snprintf(number, sizeof number, "%lld", (long long)key.i);
        if (!jn_str_copy(r, number, (size_t)n, true, &text)) return false;
    } else if (!jn_str_text(r, jn_type_name(key), &text)) {
        return false;
    }
    return undef(r, jn_type_name(owner), text.s, true, out);
}

bool jn_truth(jn_val v)
{
    switch (v.kind) {
    case JN_MISSING:
    case JN_UNDEF:
    case JN_NONE:
        return false;
    case JN_BOOL:
        return v.b;
    case JN_INT:
        return v.i != 0;
    case JN_FLOAT:
        return v.f != 0;
    case JN_STR:
        return v.s->n != 0;
    case JN_LIST:
    case JN_TUPLE:
    case JN_VIEW:
        return v.list->n != 0;
    case JN_DICT:
        return v.dict->n != 0;
    case JN_RANGE:
        return v.range->n != 0;
    default:
        return true;
    }
}

/* ---- equality, order, membership ---- */

static bool seq_equal(jn_state *r, const jn_list *a, const jn_list *b, bool *eq)
{
    *eq = a->n == b->n;
    for (size_t i = 0; *eq && i < a->n && i < b->n; i++)
        if (!jn_equal(r, a->v[i], b->v[i], eq)) return false;
    return true;
}

static bool dict_equal(jn_state *r, const jn_dict *a, const jn_dict *b, bool *eq)
{
    *eq = a->n == b->n;
    for (size_t i = 0; *eq && i < a->n; i++) {
        jn_val v;
        if (!jn_dict_get(r, b, a->e[i].k, &v)) return false;
        *eq = v.kind != JN_MISSING;
        if (*eq && !jn_equal(r, a->e[i].v, v, eq)) return false;
    }
    return true;
}

static bool deep_equal(jn_state *r, jn_val a, jn_val b, bool *eq)
{
    switch (a.kind) {
    case JN_LIST:
    case JN_TUPLE:
    case JN_VIEW:
        return seq_equal(r, a.list, b.list, eq);
    case JN_DICT:
        return dict_equal(r, a.dict, b.dict, eq);
    case JN_RANGE:
        *eq = a.range->n == b.range->n &&
              (a.range->n == 0 || (a.range->start == b.range->start &&
                                   (a.range->n == 1 || a.range->step == b.range->step)));
        return true;
    default:
        *eq = a.undef == b.undef;
        return true; /* the same object */
    }
}

bool jn_equal(jn_state *r, jn_val a, jn_val b, bool *eq)
{
    if (!jn_work(r, 0)) return false;
    if (jn_is_number(a) && jn_is_number(b)) {
        *eq = jn_is_int(a) && jn_is_int(b) ? jn_as_int(a) == jn_as_int(b)
                                           : jn_as_float(a) == jn_as_float(b);
        return true;
    }
    if (a.kind != b.kind) {
        *eq = false;
        return true;
    }
    if (a.kind == JN_STR) {
        *eq = jn_str_eq(a.s, b.s);
        return jn_work(r, a.s->n);
    }
    if (a.kind <= JN_NONE) {
        *eq = true;
        return true;
    }
    if (!jn_enter(r)) return false;
    bool ok = deep_equal(r, a, b, eq);
    jn_leave(r);
    return ok;
}

static bool seq_compare(jn_state *r, const jn_list *a, const jn_list *b, int *cmp)
{
    for (size_t i = 0; i < a->n && i < b->n; i++) {
        bool eq;
        if (!jn_equal(r, a->v[i], b->v[i], &eq)) return false;
        if (!eq) return jn_compare(r, a->v[i], b->v[i], cmp);
    }
    *cmp = (a->n > b->n) - (a->n < b->n);
    return true;
}

bool jn_compare(jn_state *r, jn_val a, jn_val b, int *cmp)
{
    if (!jn_work(r, 0)) return false;
    if (jn_is_int(a) && jn_is_int(b)) {
        *cmp = (jn_as_int(a) > jn_as_int(b)) - (jn_as_int(a) < jn_as_int(b));
        return true;
    }
    if (jn_is_number(a) && jn_is_number(b)) {
        double x = jn_as_float(a), y = jn_as_float(b);
        *cmp = isnan(x) || isnan(y) ? 2 : (x > y) - (x < y);
        return true;
    }
    if (a.kind == JN_STR && b.kind == JN_STR) {
        size_t n = a.s->n < b.s->n ? a.s->n : b.s->n;
        *cmp = memcmp(jn_bytes(a.s), jn_bytes(b.s), n);
        if (*cmp == 0) *cmp = (a.s->n > b.s->n) - (a.s->n < b.s->n);
        *cmp = (*cmp > 0) - (*cmp < 0);
        return jn_work(r, n);
    }
    if ((a.kind == JN_LIST || a.kind == JN_TUPLE) && a.kind == b.kind) {
        if (!jn_enter(r)) return false;
        bool ok = seq_compare(r, a.list, b.list, cmp);
        jn_leave(r);
        return ok;
    }
    if (a.kind == JN_UNDEF) return jn_undef_fail(r, a.undef);
    if (b.kind == JN_UNDEF) return jn_undef_fail(r, b.undef);
    return jn_fail(r, "'<' and '>' are not supported between instances of '%s' and '%s'",
                   jn_type_name(a), jn_type_name(b));
}

bool jn_contains(jn_state *r, jn_val box, jn_val item, bool *in)
{
    *in = false;
    if (box.kind == JN_STR) {
        if (item.kind == JN_UNDEF) return jn_undef_fail(r, item.undef);
        if (item.kind != JN_STR)
            return jn_fail(r, "'in <string>' requires a string as left operand, not %s",
                           jn_type_name(item));
        *in = jn_find(jn_bytes(box.s), box.s->n, jn_bytes(item.s), item.s->n, 0) != SIZE_MAX;
        return jn_work(r, box.s->n);
    }
    if (box.kind == JN_DICT) {
        jn_val v;
        if (!jn_dict_get(r, box.dict, item, &v)) return false;
        *in = v.kind != JN_MISSING;
        return true;
    }
    jn_val *v;
    size_t n;
    if (!jn_items(r, box, &v, &n)) return false;
    for (size_t i = 0; !*in && i < n; i++)
        if (!jn_equal(r, v[i], item, in)) return false;
    return true;
}

/* ---- containers ---- */

bool jn_length(jn_state *r, jn_val v, int64_t *n)
{
    switch (v.kind) {
    case JN_UNDEF:
        *n = 0;
        return true;
    case JN_STR:
        *n = (int64_t)jn_cp_count(jn_bytes(v.s), v.s->n);
        return jn_work(r, v.s->n);
    case JN_LIST:
    case JN_TUPLE:
    case JN_VIEW:
        *n = (int64_t)v.list->n;
        return true;
    case JN_DICT:
        *n = (int64_t)v.dict->n;
        return true;
    case JN_RANGE:
        *n = v.range->n;
        return true;
    default:
        return jn_fail(r, "object of type '%s' has no len()", jn_type_name(v));
    }
}

jn_val jn_range_at(const jn_range *g, int64_t i)
{
    return jn_int(g->start + i * g->step);
}

static bool str_items(jn_state *r, const jn_str *s, jn_val *items, size_t n)
{
    jn_str *chars = jn_new_array(r, n, sizeof *chars);
    if (!chars) return false;
    for (size_t i = 0, at = 0; i < n; i++) {
        size_t k = jn_cp_len(jn_bytes(s) + at, s->n - at);
        chars[i] = (jn_str){.buf = s->buf, .off = s->off + at, .n = k};
        items[i] = (jn_val){.kind = JN_STR, .s = &chars[i]};
        at += k;
    }
    return true;
}

bool jn_items(jn_state *r, jn_val v, jn_val **items, size_t *n)
{
    *items = NULL;
    *n = 0;
    switch (v.kind) {
    case JN_UNDEF:
        return true;
    case JN_LIST:
    case JN_TUPLE:
    case JN_VIEW:
        *items = v.list->v;
        *n = v.list->n;
        return jn_work(r, *n);
    case JN_ITER:
        *n = v.iter->n - v.iter->at;
        if (*n) *items = v.iter->v + v.iter->at;
        v.iter->at = v.iter->n;
        return jn_work(r, *n);
    case JN_STR:
        *n = jn_cp_count(jn_bytes(v.s), v.s->n);
        break;
    case JN_DICT:
        *n = v.dict->n;
        break;
    case JN_RANGE:
        *n = (size_t)v.range->n;
        break;
    default:
        return jn_fail(r, "'%s' object is not iterable", jn_type_name(v));
    }
    if (!jn_work(r, *n * 16)) return false;
    jn_val *made = jn_new_array(r, *n, sizeof *made);
    if (!made) return false;
    *items = made;
    if (v.kind == JN_STR) return str_items(r, v.s, made, *n);
    for (size_t i = 0; i < *n; i++)
        made[i] = v.kind == JN_DICT ? v.dict->e[i].k : jn_range_at(v.range, (int64_t)i);
    return true;
}

bool jn_list_new(jn_state *r, jn_kind kind, size_t cap, jn_val *out)
{
    jn_list *l = jn_new(r, sizeof *l);
    if (!l) return false;
    if (cap && !(l->v = jn_new_array(r, cap, sizeof *l->v))) return false;
    l->cap = cap;
    *out = (jn_val){.kind = kind, .list = l};
    return true;
}

bool jn_list_add(jn_state *r, jn_list *l, jn_val v)
{
    if (l->n == l->cap) {
        size_t cap = l->cap ? l->cap * 2 : 4;
        jn_val *p = jn_arena_grow(r->arena, l->v, l->n * sizeof *p, cap * sizeof *p);
        if (!p) return jn_no_memory(r);
        l->v = p;
        l->cap = cap;
    }
    l->v[l->n++] = v;
    return true;
}

bool jn_iter_of(jn_state *r, jn_val list, jn_val *out)
{
    jn_iter *it = jn_new(r, sizeof *it);
    if (!it) return false;
    *it = (jn_iter){.v = list.list->v, .n = list.list->n};
    *out = (jn_val){.kind = JN_ITER, .iter = it};
    return true;
}

bool jn_pair(jn_state *r, jn_val a, jn_val b, jn_val *out)
{
    if (!jn_list_new(r, JN_TUPLE, 2, out)) return false;
    out->list->v[0] = a;
    out->list->v[1] = b;
    out->list->n = 2;
    return true;
}

/* Equal values hash alike: 1, 1.0 and True. */
static bool hash_of(jn_state *r, jn_val v, uint64_t *h)
{
    int64_t i = 0;
    switch (v.kind) {
    case JN_NONE:
        *h = 1;
        return true;
    case JN_STR:
        *h = bg_hash64(jn_bytes(v.s), v.s->n, 0);
        return jn_work(r, v.s->n);
    case JN_BOOL:
    case JN_INT:
        i = jn_as_int(v);
        break;
    case JN_FLOAT:
        if (fabs(v.f) <= 0x1p62 && v.f == floor(v.f)) {
            i = (int64_t)v.f;
            break;
        }
        *h = bg_hash64(&v.f, sizeof v.f, 2);
        return true;
    case JN_TUPLE:
        if (!jn_work(r, 0) || !jn_enter(r)) return false;
        *h = 3;
        for (size_t k = 0; k < v.list->n; k++) {
            uint64_t part;
            if (!hash_of(r, v.list->v[k], &part)) return false;
            *h = bg_hash64(&part, sizeof part, *h);
        }
        jn_leave(r);
        return true;
    case JN_LIST:
    case JN_DICT:
    case JN_VIEW:
        return jn_fail(r, "unhashable type: '%s'", jn_type_name(v));
    case JN_UNDEF:
        *h = 4;
        return true;
    default:
        i = (int64_t)(intptr_t)v.undef; /* the object itself */
        *h = bg_hash64(&i, sizeof i, 5);
        return true;
    }
    *h = bg_hash64(&i, sizeof i, 6);
    return true;
}

bool jn_dict_new(jn_state *r, jn_kind kind, jn_val *out)
{
    jn_dict *d = jn_new(r, sizeof *d);
    *out = (jn_val){.kind = kind, .dict = d};
    return d != NULL;
}

/* The entry with this key, or NULL. Sets *hash. */
static bool find(jn_state *r, const jn_dict *d, jn_val k, uint64_t *hash, jn_entry **e)
{
    *e = NULL;
    *hash = 0;
    if (!hash_of(r, k, hash)) return false;
    size_t i = d->n_slots ? *hash & (d->n_slots - 1) : 0;
    for (;;) {
        jn_entry *at;
        if (d->n_slots) {
            if (d->slots[i] == 0) return true;
            at = &d->e[d->slots[i] - 1];
            i = (i + 1) & (d->n_slots - 1);
        } else {
            if (i == d->n) return true;
            at = &d->e[i++];
        }
        bool eq = false;
        if (at->hash == *hash && !jn_equal(r, at->k, k, &eq)) return false;
        if (eq) {
            *e = at;
            return true;
        }
    }
}

static bool rehash(jn_state *r, jn_dict *d, size_t n_slots)
{
    uint32_t *slots = jn_new_array(r, n_slots, sizeof *slots);
    if (!slots) return false;
    for (size_t k = 0; k < d->n; k++) {
        size_t i = d->e[k].hash & (n_slots - 1);
        while (slots[i])
            i = (i + 1) & (n_slots - 1);
        slots[i] = (uint32_t)k + 1;
    }
    d->slots = slots;
    d->n_slots = n_slots;
    return true;
}

bool jn_dict_set(jn_state *r, jn_dict *d, jn_val k, jn_val v)
{
    enum { SMALL = 8 };
    uint64_t hash;
    jn_entry *e;
    if (!find(r, d, k, &hash, &e)) return false;
    if (e) {
        e->v = v;
        return true;
    }
    if (d->n == d->cap) {
        size_t cap = d->cap ? d->cap * 2 : 4;
        if (cap > UINT32_MAX / 4) return jn_fail(r, "a dictionary grows too large");
        e = jn_arena_grow(r->arena, d->e, d->n * sizeof *e, cap * sizeof *e);
        if (!e) return jn_no_memory(r);
        d->e = e;
        d->cap = cap;
    }
    if (d->n >= SMALL && d->n * 2 >= d->n_slots && !rehash(r, d, d->cap * 4)) return false;
    d->e[d->n++] = (jn_entry){.k = k, .v = v, .hash = hash};
    if (d->n_slots) {
        size_t i = hash & (d->n_slots - 1);
        while (d->slots[i])
            i = (i + 1) & (d->n_slots - 1);
        d->slots[i] = (uint32_t)d->n;
    }
    return true;
}

bool jn_dict_get(jn_state *r, const jn_dict *d, jn_val k, jn_val *v)
{
    uint64_t hash;
    jn_entry *e;
    if (!find(r, d, k, &hash, &e)) return false;
    *v = e ? e->v : (jn_val){.kind = JN_MISSING};
    return true;
}

bool jn_dict_get_text(jn_state *r, const jn_dict *d, const char *key, jn_val *v)
{
    jn_val k;
    return jn_str_text(r, key, &k) && jn_dict_get(r, d, k, v);
}

bool jn_dict_set_text(jn_state *r, jn_dict *d, const char *key, jn_val v)
{
    jn_val k;
    return jn_str_text(r, key, &k) && jn_dict_set(r, d, k, v);
}

/* ---- from JSON ---- */

static bool json_str(jn_state *r, const char *p, size_t n, bool copy, bool trusted, jn_val *out)
{
    return copy ? jn_str_copy(r, p, n, trusted, out) : jn_str_wrap(r, p, n, trusted, out);
}

static bool from_object(jn_state *r, const json_t *j, bool copy, bool trusted, jn_val *out)
{
    if (!jn_dict_new(r, JN_DICT, out)) return false;
    /* The iterator functions of jansson want a pointer that is not const; nothing is changed. */
    json_t *o = (json_t *)(uintptr_t)j;
    for (void *it = json_object_iter(o); it; it = json_object_iter_next(o, it)) {
        jn_val k, v;
        if (!json_str(r, json_object_iter_key(it), json_object_iter_key_len(it), copy, trusted,
                      &k) ||
            !jn_from_json(r, json_object_iter_value(it), copy, trusted, &v) ||
            !jn_dict_set(r, out->dict, k, v))
            return false;
    }
    return true;
}

static bool from_array(jn_state *r, const json_t *j, bool copy, bool trusted, jn_val *out)
{
    size_t n = json_array_size(j);
    if (!jn_list_new(r, JN_LIST, n, out)) return false;
    out->list->frozen = true;
    for (size_t i = 0; i < n; i++) {
        if (!jn_from_json(r, json_array_get(j, i), copy, trusted, &out->list->v[i])) return false;
        out->list->n = i + 1;
    }
    return true;
}

bool jn_from_json(jn_state *r, const json_t *j, bool copy, bool trusted, jn_val *out)
{
    bool ok = true;
    switch (json_typeof(j)) {
    case JSON_NULL:
        *out = jn_none();
        return true;
    case JSON_TRUE:
    case JSON_FALSE:
        *out = jn_bool(json_is_true(j));
        return true;
    case JSON_INTEGER:
        *out = jn_int(json_integer_value(j));
        return true;
    case JSON_REAL:
        *out = jn_float(json_real_value(j));
        return true;
    case JSON_STRING:
        return json_str(r, json_string_value(j), json_string_length(j), copy, trusted, out);
    case JSON_OBJECT:
    case JSON_ARRAY:
        if (r->nest >= JN_MAX_DATA_NEST)
            return jn_fail(r, "the data is nested more than %d levels deep", JN_MAX_DATA_NEST);
        r->nest++;
        ok = json_is_object(j) ? from_object(r, j, copy, trusted, out)
                               : from_array(r, j, copy, trusted, out);
        r->nest--;
        return ok;
    }
    return false;
}

/* How deep the brackets outside strings go. */
static size_t json_depth(const char *p, size_t n)
{
    size_t depth = 0, most = 0;
    bool in_string = false;
    for (size_t i = 0; i < n; i++) {
        if (in_string && p[i] == '\\') {
            i++; /* whatever is escaped ends no string */
            continue;
        }
        if (in_string) {
            in_string = p[i] != '"';
            continue;
        }
        in_string = p[i] == '"';
        if (p[i] == '[' || p[i] == '{') depth++;
        if ((p[i] == ']' || p[i] == '}') && depth) depth--;
        if (depth > most) most = depth;
    }
    return most;
}

json_t *jn_json_load(const char *p, size_t n, json_error_t *why, bool *nomem)
{
    *nomem = false;
    enum { MAX_JSON = 4 << 20 }; /* the parser's memory, up to 30 times as much, counts nowhere */
    if (n > MAX_JSON) {
        snprintf(why->text, sizeof why->text, "longer than %d bytes", MAX_JSON);
        return NULL;
    }
    if (json_depth(p, n) > JN_MAX_DATA_NEST) {
        snprintf(why->text, sizeof why->text, "nested more than %d levels deep", JN_MAX_DATA_NEST);
        return NULL;
    }
    return bg_json_load(p, n, JSON_DECODE_ANY | JSON_ALLOW_NUL, why, nomem);
}
