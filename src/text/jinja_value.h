/* text/jinja_value.h - values of the template language and the state of a render.
 *
 * Values follow Python. They live in the arena of their render (constants: of their program) and
 * are never freed one by one. A function that returns bool returns false after recording why in
 * r->err; its out-parameters are then not set.
 *
 * Provenance: a string knows for each byte whether it was written by the template's author
 * (trusted) or came with the request. A jn_buf holds bytes and runs of equal trust; a jn_str is a
 * window on a jn_buf. Cutting makes a new window; joining copies runs, or appends in place when the
 * left side ends where its buffer ends, so that building a text piece by piece costs no more than
 * its length. */
#ifndef BG_TEXT_JINJA_VALUE_H
#define BG_TEXT_JINJA_VALUE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <jansson.h>

#include "base/error.h"
#include "text/jinja_mem.h"

typedef struct jn_state jn_state;
typedef struct jn_node jn_node;
typedef struct jn_program jn_program;

/* ---- values ---- */

typedef enum jn_kind {
    JN_MISSING, /* an argument that was not given; never seen by templates */
    JN_UNDEF,
    JN_NONE,
    JN_BOOL,
    JN_INT,
    JN_FLOAT,
    JN_STR,
    JN_LIST,
    JN_TUPLE,
    JN_DICT,
    JN_RANGE,
    JN_VIEW, /* dict.keys(), .values(), .items() */
    JN_ITER, /* a generator: can be walked once, has no length */
    JN_NAMESPACE,
    JN_LOOP,
    JN_MACRO,
    JN_FUNC,
    JN_METHOD,
    JN_CYCLER,
    JN_JOINER,
} jn_kind;

typedef struct jn_run {
    size_t end; /* in the buffer */
    bool trusted;
} jn_run;

typedef struct jn_buf {
    char *p;
    size_t len, cap; /* cap == len: frozen, may be shared between threads */
    jn_run *runs;    /* they cover 0..len, in order, none empty */
    size_t n_runs, cap_runs;
} jn_buf;

typedef struct jn_str {
    const jn_buf *buf;
    size_t off, n;
    bool safe; /* marked by |safe: `+` escapes what is added to it */
} jn_str;

typedef struct jn_list jn_list;
typedef struct jn_dict jn_dict;
typedef struct jn_range jn_range;
typedef struct jn_iter jn_iter;
typedef struct jn_loop jn_loop;
typedef struct jn_macro jn_macro;
typedef struct jn_func jn_func;
typedef struct jn_method jn_method;
typedef struct jn_cycler jn_cycler;
typedef struct jn_joiner jn_joiner;

typedef struct jn_undef { /* for the message of an error: what was not there */
    const jn_str *name;
    const char *owner; /* type of the object that lacks it; NULL: a variable */
    bool element;      /* was looked up by a key that is no string; name is its repr */
} jn_undef;

typedef struct jn_val {
    jn_kind kind;
    union {
        bool b;
        int64_t i;
        double f;
        const jn_undef *undef;
        const jn_str *s;
        jn_list *list; /* also tuple and view */
        jn_dict *dict; /* also namespace */
        const jn_range *range;
        jn_iter *iter;
        jn_loop *loop;
        const jn_macro *macro;
        const jn_func *func;
        const jn_method *method;
        jn_cycler *cycler;
        jn_joiner *joiner;
    };
} jn_val;

struct jn_list {
    jn_val *v;
    size_t n, cap;
    bool frozen;      /* came with the request: append() and the like are refused */
    const char *view; /* JN_VIEW: its Python type name */
};

typedef struct jn_entry {
    jn_val k, v;
    uint64_t hash;
} jn_entry;

struct jn_dict { /* keeps the order of insertion; entries are never removed */
    jn_entry *e;
    size_t n, cap;
    uint32_t *slots; /* hash table of entry numbers + 1; none while small */
    size_t n_slots;
};

struct jn_range {
    int64_t start, stop, step, n;
};

struct jn_iter {
    jn_val *v;
    size_t at, n;
};

struct jn_cycler {
    jn_list *items;
    size_t at;
};

struct jn_joiner {
    jn_val sep;
    bool used;
};

typedef struct jn_kwarg {
    const jn_str *name;
    jn_val v;
} jn_kwarg;

typedef struct jn_args {
    jn_val *v;
    size_t n;
    jn_kwarg *kw;
    size_t n_kw;
} jn_args;

/* What templates can call: self is the filtered or tested value, or the object of a method. */
typedef bool jn_fn(jn_state *r, jn_val self, const jn_args *a, jn_val *out);

struct jn_func {
    const char *name;
    jn_fn *fn;
};

struct jn_method {
    jn_val self;
    const jn_func *func;
};

/* ---- the state of a render ---- */

typedef struct jn_limits { /* 0: the default in parentheses */
    size_t output_bytes;   /* 64 MiB; also for every string on the way */
    size_t memory_bytes;   /* 4 * output_bytes + 64 MiB */
    int64_t steps;         /* 10,000,000 evaluations; work on long strings counts too */
    int depth;             /* 200 calls and loops inside each other */
    int64_t fail_alloc;    /* for tests: the allocation from which on all fail */
} jn_limits;

typedef struct jn_env jn_env;

struct jn_state {
    jn_arena *arena; /* a render: &own */
    jn_arena own;
    bg_error *err;
    const jn_program *prog;
    const char *name;      /* of the template, for messages */
    int line;              /* where evaluation is */
    bg_status fail_status; /* of failures that are the template's or the input's fault */
    jn_limits lim;
    int64_t steps;
    int depth, nest;
    int64_t wall_s;
    jn_val *context; /* by symbol; MISSING: no such variable */
    jn_env *env;
    jn_buf *out;
    jn_val hole; /* what a filter block filters */
};

/* Nested evaluations, containers and syntax: bounds the C stack. */
enum { JN_MAX_NEST = 600, JN_MAX_DATA_NEST = 200 };

bool jn_fail(jn_state *r, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
bool jn_no_memory(jn_state *r); /* records why the arena said no */
void *jn_new(jn_state *r, size_t n);
void *jn_new_array(jn_state *r, size_t n, size_t size);
bool jn_work(jn_state *r,
             size_t n);     /* counts n bytes or items of work; false: over the step limit */
bool jn_enter(jn_state *r); /* one level deeper; undone by jn_leave() only after true */
void jn_leave(jn_state *r);

/* ---- strings (jinja_str.c) ---- */

/* A view of bytes that outlive the render; not copied. */
bool jn_str_wrap(jn_state *r, const char *p, size_t n, bool trusted, jn_val *out);
bool jn_str_copy(jn_state *r, const char *p, size_t n, bool trusted, jn_val *out);
bool jn_str_text(jn_state *r, const char *text,
                 jn_val *out); /* a literal of this program: trusted */
bool jn_str_sub(jn_state *r, const jn_str *s, size_t off, size_t n, jn_val *out);
bool jn_str_concat(jn_state *r, const jn_str *a, const jn_str *b, jn_val *out);
/* Characters special in HTML as entities; the result is safe. */
bool jn_str_escape(jn_state *r, const jn_str *s, jn_val *out);

const char *jn_bytes(const jn_str *s);
bool jn_str_is(const jn_str *s, const char *text);
bool jn_str_eq(const jn_str *a, const jn_str *b);
bool jn_str_trusted(const jn_str *s); /* every byte of it */
/* Length of the stretch from byte `at` (< s->n) on that has one trust. */
size_t jn_str_run(const jn_str *s, size_t at, bool *trusted);

/* Building: a new buffer, appends, then one string of it. */
jn_buf *jn_buf_new(jn_state *r);
bool jn_put(jn_state *r, jn_buf *b, const char *p, size_t n, bool trusted);
bool jn_put_text(jn_state *r, jn_buf *b, const char *text); /* trusted */
bool jn_put_cp(jn_state *r, jn_buf *b, uint32_t cp, bool trusted);
bool jn_put_part(jn_state *r, jn_buf *b, const jn_str *s, size_t off, size_t n);
bool jn_put_str(jn_state *r, jn_buf *b, const jn_str *s);
bool jn_finish(jn_state *r, jn_buf *b, jn_val *out); /* freezes b */

/* Code points. Each ill-formed part counts as one. */
size_t jn_cp_len(const char *p, size_t n); /* bytes of the first one, n >= 1 */
size_t jn_cp_count(const char *p, size_t n);
size_t jn_cp_offset(const char *p, size_t n, size_t index); /* of the index-th, at most n */
/* Byte offset of the first (last) occurrence at or after from; SIZE_MAX: none. */
size_t jn_find(const char *p, size_t n, const char *sub, size_t n_sub, size_t from);
size_t jn_rfind(const char *p, size_t n, const char *sub, size_t n_sub);
/* Cuts the characters of chars (NULL: white space) off the ends. */
void jn_strip(const jn_str *s, const jn_str *chars, bool left, bool right, size_t *off, size_t *n);

/* ---- values (jinja_value.c) ---- */

static inline jn_val jn_none(void)
{
    return (jn_val){.kind = JN_NONE};
}

static inline jn_val jn_bool(bool b)
{
    return (jn_val){.kind = JN_BOOL, .b = b};
}

static inline jn_val jn_int(int64_t i)
{
    return (jn_val){.kind = JN_INT, .i = i};
}

static inline jn_val jn_float(double f)
{
    return (jn_val){.kind = JN_FLOAT, .f = f};
}

static inline bool jn_is_int(jn_val v) /* as Python sees it: True is 1 */
{
    return v.kind == JN_INT || v.kind == JN_BOOL;
}

static inline int64_t jn_as_int(jn_val v)
{
    return v.kind == JN_BOOL ? v.b : v.i;
}

static inline bool jn_is_number(jn_val v)
{
    return jn_is_int(v) || v.kind == JN_FLOAT;
}

static inline double jn_as_float(jn_val v)
{
    return v.kind == JN_FLOAT ? v.f : (double)jn_as_int(v);
}

const char *jn_type_name(jn_val v); /* Python's */
bool jn_undef_fail(jn_state *r, const jn_undef *u);
bool jn_undef_attr(jn_state *r, jn_val owner, const jn_str *name, jn_val *out);
bool jn_undef_item(jn_state *r, jn_val owner, jn_val key, jn_val *out);

bool jn_truth(jn_val v);
bool jn_equal(jn_state *r, jn_val a, jn_val b, bool *eq);
/* <0, 0, >0; fails for what has no order. */
bool jn_compare(jn_state *r, jn_val a, jn_val b, int *cmp);
bool jn_contains(jn_state *r, jn_val box, jn_val item, bool *in);
bool jn_length(jn_state *r, jn_val v, int64_t *n);
/* Everything that iterating over v gives. The array must not be written to. */
bool jn_items(jn_state *r, jn_val v, jn_val **items, size_t *n);

bool jn_list_new(jn_state *r, jn_kind kind, size_t cap, jn_val *out);
bool jn_list_add(jn_state *r, jn_list *l, jn_val v);
bool jn_iter_of(jn_state *r, jn_val list, jn_val *out); /* a generator over the items of a list */
bool jn_pair(jn_state *r, jn_val a, jn_val b, jn_val *out);
bool jn_dict_new(jn_state *r, jn_kind kind, jn_val *out);
bool jn_dict_set(jn_state *r, jn_dict *d, jn_val k, jn_val v);
/* *v is MISSING when the key is not there. Fails for a key that cannot be hashed. */
bool jn_dict_get(jn_state *r, const jn_dict *d, jn_val k, jn_val *v);
bool jn_dict_get_text(jn_state *r, const jn_dict *d, const char *key, jn_val *v);
bool jn_dict_set_text(jn_state *r, jn_dict *d, const char *key, jn_val v);
jn_val jn_range_at(const jn_range *g, int64_t i);

/* Strings are not copied (the document outlives the render) and untrusted; copy says otherwise. */
bool jn_from_json(jn_state *r, const json_t *j, bool copy, bool trusted, jn_val *out);

/* Parses n bytes of JSON, also a value that is no container. NULL: *why says what is wrong, or it
 * is nested too deeply for the stack of a thread; or *nomem. */
json_t *jn_json_load(const char *p, size_t n, json_error_t *why, bool *nomem);

/* ---- printing (jinja_print.c) ---- */

enum { JN_FLOAT_TEXT = 40 };
size_t jn_float_text(double f, char out[JN_FLOAT_TEXT]); /* as repr() */
bool jn_str_of(jn_state *r, jn_val v, const jn_str **s); /* as str() */
bool jn_print(jn_state *r, jn_buf *b, jn_val v);
bool jn_repr(jn_state *r, jn_val v, jn_val *out);

typedef struct jn_json_style {
    const jn_str *indent; /* NULL: one line */
    const jn_str *item_sep, *key_sep;
    bool ascii, sort;
} jn_json_style;

bool jn_to_json(jn_state *r, jn_val v, const jn_json_style *style, jn_val *out);
/* fmt % args, as Python's printf formatting of str. */
bool jn_printf(jn_state *r, const jn_str *fmt, jn_val args, jn_val *out);

/* ---- what templates can use ---- */

/* NULL: there is none of that name. */
const jn_func *jn_find_filter(const char *name, size_t n);
const jn_func *jn_find_test(const char *name, size_t n);
const jn_func *jn_find_seq_filter(const char *name, size_t n); /* the part in jinja_seq.c */
const jn_func *jn_find_str_method(const char *name, size_t n);
const jn_func *jn_find_method(jn_val self, const char *name, size_t n);
bool jn_globals(jn_state *r); /* puts range, namespace, ... into the context */

/* Distributes positional and keyword arguments over names ("sep maxsplit"), of which the first
 * n_required must be given; v[i].kind is JN_MISSING where nothing was given. Without names, v may
 * be NULL. */
bool jn_bind(jn_state *r, const char *what, const jn_args *a, const char *names, size_t n_required,
             jn_val *v);
bool jn_want_int(jn_state *r, jn_val v, int64_t *i);
bool jn_want_str(jn_state *r, jn_val v, const jn_str **s); /* only a str will do */
bool jn_slice_bounds(jn_state *r, jn_val start, jn_val stop, jn_val step, int64_t n, int64_t *first,
                     int64_t *last, int64_t *by);

/* ---- evaluation (jinja_eval.c, jinja_exec.c) ---- */

bool jn_eval(jn_state *r, const jn_node *e, jn_val *out);
bool jn_getattr(jn_state *r, jn_val v, const jn_str *name, jn_val *out);
bool jn_getitem(jn_state *r, jn_val v, jn_val key, jn_val *out);
bool jn_binary(jn_state *r, char op, jn_val a, jn_val b, jn_val *out);
bool jn_call(jn_state *r, jn_val f, const jn_args *a, jn_val *out);
bool jn_call_macro(jn_state *r, const jn_macro *m, const jn_args *a, jn_val *out);
bool jn_call_loop(jn_state *r, jn_loop *loop, const jn_args *a, jn_val *out);
bool jn_loop_attr(jn_state *r, jn_loop *loop, const jn_str *name,
                  jn_val *out); /* MISSING: no such */
size_t jn_loop_text(const jn_loop *loop, char *out, size_t size);
const jn_str *jn_macro_name(const jn_macro *m);

#endif
