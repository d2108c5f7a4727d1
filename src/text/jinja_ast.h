/* text/jinja_ast.h - a parsed template. Built once, then read-only. */
#ifndef BG_TEXT_JINJA_AST_H
#define BG_TEXT_JINJA_AST_H

#include "text/jinja_value.h"

typedef enum jn_node_kind {
    /* expressions */
    JN_E_CONST,   /* value */
    JN_E_NAME,    /* sym, str */
    JN_E_LIST,    /* list */
    JN_E_TUPLE,   /* list */
    JN_E_DICT,    /* list: key, value, key, value, ... */
    JN_E_ATTR,    /* a.str */
    JN_E_ITEM,    /* a[b] */
    JN_E_SLICE,   /* a[list[0]:list[1]:list[2]]; NULL for what is left out */
    JN_E_CALL,    /* a(args) */
    JN_E_FILTER,  /* a | func(args); func NULL: unknown name str */
    JN_E_TEST,    /* a is func(args) */
    JN_E_NOT,     /* not a */
    JN_E_NEG,     /* -a */
    JN_E_POS,     /* +a */
    JN_E_CHAIN,   /* list[0] ops[0] list[1] ops[1] ..., left to right */
    JN_E_CONCAT,  /* list joined by ~ */
    JN_E_COMPARE, /* list[0] ops[0] list[1] ops[1] ... */
    JN_E_AND,     /* list */
    JN_E_OR,      /* list */
    JN_E_IF,      /* b if a else c; c may be NULL */
    JN_E_HOLE,    /* what a filter block filters */
    /* statements */
    JN_S_BODY,      /* list */
    JN_S_TEXT,      /* value */
    JN_S_PRINT,     /* a */
    JN_S_IF,        /* list: condition, body, condition, body, ..., perhaps a last body */
    JN_S_FOR,       /* for a in b if c: list[0], else list[1] (NULL: none) */
    JN_S_SET,       /* a = b */
    JN_S_SET_BLOCK, /* a = list[0], through filter b (NULL: none) */
    JN_S_MACRO,     /* sym, str; macro */
    JN_S_CALL,      /* call a with caller = macro */
    JN_S_FILTER,    /* filter a over list[0] */
    JN_S_WITH,      /* list: target, value, ..., body */
    JN_S_SCOPE,     /* list[0], whose variables stay inside */
    JN_S_BREAK,
    JN_S_CONTINUE,
} jn_node_kind;

/* Operators of JN_E_CHAIN and JN_E_COMPARE */
enum {
    JN_FLOORDIV = '\\',
    JN_POW = '^',
    JN_EQ = '=',
    JN_NE = '!',
    JN_LT = '<',
    JN_GT = '>',
    JN_LE = 'l',
    JN_GE = 'g',
    JN_IN = 'i',
    JN_NOT_IN = 'n'
};

typedef struct jn_arg {
    jn_node *value;
    const jn_str *name; /* keyword argument */
    int stars;          /* *value, **value */
} jn_arg;

typedef struct jn_params { /* of a macro or call block */
    const jn_str *name;
    int *syms;
    const jn_str **names;
    jn_node **defaults; /* NULL: none */
    size_t n;
    jn_node *body;
    bool varargs, kwargs, caller; /* the body uses these names */
} jn_params;

struct jn_node {
    jn_node_kind kind;
    int line;
    int height; /* of the tree below: bounds the evaluator's stack */
    int sym;
    const jn_str *str;
    jn_val value;
    jn_node *a, *b, *c;
    jn_node **list;
    size_t n;
    char *ops;
    jn_arg *args;
    size_t n_args;
    const jn_func *func;
    jn_params *params;
    bool ns_target; /* JN_S_SET, JN_S_SET_BLOCK: a is name.attr of a namespace */
    bool recursive; /* JN_S_FOR */
};

struct jn_program {
    jn_arena arena;
    const char *name;
    jn_node *body;
    jn_dict *syms;           /* name -> int */
    bool tests_null_content; /* somewhere asks whether a `content` is none */
};

/* Symbol of a name, or -1 when the template never mentions it. */
int jn_symbol(const jn_program *p, const char *name, size_t n);

enum { JN_MAX_SOURCE = 1 << 20, JN_MAX_SYNTAX_NEST = 100, JN_MAX_HEIGHT = 150 };

/* Parses n bytes. BG_FORMAT: a syntax error or a limit; BG_NOMEM. fail_alloc as in jn_limits. */
bg_status jn_parse(jn_program **p, const char *source, size_t n, const char *name,
                   int64_t fail_alloc, bg_error *err);
void jn_program_free(jn_program *p);

/* Readies r for a render of p: limits, an empty context with the globals. Ends with
 * jn_render_end(), also after a failure. r->err is err. */
bg_status jn_render_begin(jn_state *r, const jn_program *p, const jn_limits *limits, int64_t wall_s,
                          bg_error *err);
bool jn_set_var(jn_state *r, const char *name, size_t n, jn_val v); /* unused names are dropped */
/* Runs the template; r->out has the text. */
bg_status jn_render_run(jn_state *r);
void jn_render_end(jn_state *r);

#endif
