/* text/jinja_env.h - variables of a render: scopes inside scopes, the context around them. */
#ifndef BG_TEXT_JINJA_ENV_H
#define BG_TEXT_JINJA_ENV_H

#include "text/jinja_value.h"

typedef struct jn_var {
    int sym;
    jn_val v;
} jn_var;

struct jn_env {
    jn_env *outer;
    jn_var *vars;
    size_t n, cap;
};

jn_val jn_lookup(const jn_state *r, int sym); /* MISSING: no such variable */

#endif
