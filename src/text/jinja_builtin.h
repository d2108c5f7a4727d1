/* text/jinja_builtin.h - between the files that hold filters, tests, methods and globals. */
#ifndef BG_TEXT_JINJA_BUILTIN_H
#define BG_TEXT_JINJA_BUILTIN_H

#include "base/utf8.h"
#include "text/jinja_value.h"

/* The entry of that name in a table of n, or NULL. */
const jn_func *jn_find_in(const jn_func *table, size_t n_table, const char *name, size_t n);

/* str methods that filters share */
jn_fn jn_str_upper, jn_str_lower, jn_str_capitalize, jn_str_format;
/* Python's str.replace; count < 0: all */
bool jn_str_replace(jn_state *r, const jn_str *s, const jn_str *from, const jn_str *to,
                    int64_t count, jn_val *out);
/* Joins what items print as. */
bool jn_str_join(jn_state *r, const jn_str *sep, const jn_val *items, size_t n, jn_val *out);
bool jn_splitlines(jn_state *r, const jn_str *s, bool keep_ends, jn_val *out);
bool jn_center(jn_state *r, const jn_str *s, int64_t width, jn_val *out);
bool jn_strftime(jn_state *r, const jn_str *fmt, jn_val *out);

/* int(text, base) and float(text); *ok false: not a number. */
bool jn_parse_int(jn_state *r, const jn_str *s, int base, bool *ok, int64_t *i);
bool jn_parse_float(const jn_str *s, double *f);

/* Attribute path as of map(attribute="a.b.0"): each part an attribute or an index. */
bool jn_attr_path(jn_state *r, jn_val v, jn_val path, jn_val def, jn_val *out);

#endif
