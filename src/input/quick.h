/* input/quick.h - the JSON of good lines, fast.
 *
 * jansson looks at each byte through several calls; a job's lines are long strings that need little
 * more than a look for their end. This reads most lines several times as fast, into the same
 * values. What is not clearly right it leaves to jansson, which also knows the error. */
#ifndef BG_INPUT_QUICK_H
#define BG_INPUT_QUICK_H

#include <stdbool.h>
#include <stddef.h>

#include <jansson.h>

/* s[0..n) as json_loadb() with JSON_REJECT_DUPLICATES, JSON_DECODE_ANY and JSON_ALLOW_NUL reads it.
 * NULL: ask jansson (bad, unusual, or *nomem). Recursion: as deep as s nests, which the caller has
 * limited. */
json_t *bg_quick_load(const char *s, size_t n, bool *nomem);

#endif
