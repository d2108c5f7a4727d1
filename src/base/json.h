/* base/json.h - jansson, where memory may run out.
 *
 * jansson goes on without the bytes when a text buffer of its cannot grow: a string that was read,
 * or text that was made, is shorter then, and nothing says so. These say it. */
#ifndef BG_BASE_JSON_H
#define BG_BASE_JSON_H

#include <stdbool.h>
#include <stddef.h>

#include <jansson.h>

/* json_loadb(). NULL: bad JSON (*why), or no memory (*nomem). why may be NULL. */
json_t *bg_json_load(const char *s, size_t n, size_t flags, json_error_t *why, bool *nomem);
/* A name that need not be UTF-8, a path: bad bytes become question marks. NULL: no memory. */
json_t *bg_json_name(const char *s);
/* json_dumps(): the caller's to free. NULL: no memory. */
char *bg_json_text(const json_t *v, size_t flags);

#endif
