/* text/jinja_parser.h - inside the parser: jinja_parse.c reads statements, jinja_expr.c
 * expressions.
 *
 * A rule is a function that reads from the current token on and leaves the first token behind what
 * it read current; false: it failed, and the error is recorded. */
#ifndef BG_TEXT_JINJA_PARSER_H
#define BG_TEXT_JINJA_PARSER_H

#include "text/jinja_ast.h"
#include "text/jinja_lex.h"

typedef struct jn_macro_use { /* which special names the macro being parsed mentions */
    bool varargs, kwargs, caller;
} jn_macro_use;

typedef struct jn_parser {
    jn_state *r; /* its arena is the program's; r->line follows the current token */
    jn_program *prog;
    const char *src;
    jn_lexer lx;
    jn_token cur, look;
    bool has_look;
    int nest;
    int loops;         /* loops we are in, within this macro */
    jn_macro_use *use; /* NULL: not in a macro */
} jn_parser;

/* ---- errors and tokens (jinja_parser.c) ---- */

bool jn_bad_at(jn_parser *p, const char *at, const char *what);
bool jn_bad(jn_parser *p, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
bool jn_expected(jn_parser *p, const char *what); /* "expected X, got Y" for the current token */
bool jn_advance(jn_parser *p);
bool jn_peek(jn_parser *p, jn_token *t); /* the token after the current one */
bool jn_token_is(const jn_token *t, const char *name);
bool jn_at_name(const jn_parser *p, const char *name);
bool jn_at_op(const jn_parser *p, int op);
bool jn_expect_op(jn_parser *p, int op);
bool jn_expect_name(jn_parser *p, const char *name);
bool jn_take_name(jn_parser *p, const jn_str **name); /* the current token, which must be a name */
bool jn_token_str(jn_parser *p, const jn_token *t, const jn_str **s);
bool jn_intern(jn_parser *p, const jn_str *name, int *sym);
bool jn_deeper(jn_parser *p); /* one level of nesting more; after true, undone with p->nest-- */

/* ---- nodes ---- */

jn_node *jn_node_new(jn_parser *p, jn_node_kind kind);
bool jn_over_kid(jn_parser *p, jn_node *e, const jn_node *kid); /* e is higher than kid (or NULL) */
bool jn_add_kid(jn_parser *p, jn_node *e, jn_node *kid);
bool jn_add_op(jn_parser *p, jn_node *e, char op, jn_node *kid); /* an operand and its operator */

/* ---- rules ---- */

bool jn_string_literal(jn_parser *p, jn_node *e); /* adjacent ones join */
bool jn_number_literal(jn_parser *p, jn_node *e);
bool jn_name(jn_parser *p, jn_node *e); /* a variable, or true, none, ... */

typedef bool jn_item_rule(jn_parser *p, jn_node **e);

/* tuple: items with commas between; a single one without a comma is itself. */
typedef struct jn_tuple_rule {
    jn_item_rule *item;
    const char *end_name; /* a name that ends the tuple, or NULL */
    bool parens;          /* inside parentheses: may be empty */
} jn_tuple_rule;

bool jn_tuple(jn_parser *p, const jn_tuple_rule *rule, jn_node **e);
bool jn_primary(jn_parser *p, jn_node **e);
bool jn_attribute(jn_parser *p, jn_node **e); /* .name behind *e, which it replaces */
bool jn_filter(jn_parser *p, jn_node **e);    /* NAME or NAME(args), applied to *e */
bool jn_or_expr(jn_parser *p, jn_node **e);   /* an expression without inline if */
bool jn_expression(jn_parser *p, jn_node **e);
bool jn_condition(jn_parser *p, jn_node **e); /* what follows `if`: tuple of jn_or_expr */
bool jn_expression_list(jn_parser *p, jn_node **e);

#endif
