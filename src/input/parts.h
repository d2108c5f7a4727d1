/* input/parts.h - the pieces of bg_request_parse() and what they share.
 *
 * Each piece returns true to go on. False: the request was rejected, or c->nomem is set. A field
 * that is null counts as not given. */
#ifndef BG_INPUT_PARTS_H
#define BG_INPUT_PARTS_H

#include "input/input.h"

typedef struct bg_parse {
    bg_request *r;
    json_t *body;       /* borrowed from r->root: where the fields are */
    const char *prefix; /* of field names: "body." or "" */
    bg_request_limits limits;
    bool nomem;
} bg_parse;

bool bg_parse_settings(
    bg_parse *c); /* settings.c: gen, stops, bias; refuses what cannot be honoured */
bool bg_parse_messages(bg_parse *c);          /* prompt.c: messages, tools, template settings */
bool bg_parse_prompts(bg_parse *c);           /* prompt.c: prompt */
uint64_t bg_parse_content(const bg_parse *c); /* content.c: the request's content_hash */

/* The field, or NULL when it is not there or null. */
json_t *bg_parse_field(const bg_parse *c, const char *name);
/* Rejects; `name` is put behind the prefix. Returns false. */
bool bg_parse_bad(bg_parse *c, const char *code, const char *name, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));
/* Rejects a value of the wrong type or size: "temperature: "0.5", must be ...". Returns false. */
bool bg_parse_bad_value(bg_parse *c, const char *name, const json_t *value, const char *must);
bool bg_parse_nomem(bg_parse *c); /* sets nomem and returns false */

/* Whether v is exactly this text; a NUL and more behind it make it another one. */
bool bg_json_is(const json_t *v, const char *text);
/* A whole number, exact: integers, and reals that are whole and below 2^53. Not booleans. */
bool bg_json_whole(const json_t *v, int64_t *out);

#endif
