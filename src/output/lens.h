/* output/lens.h - values inside a line of JSON, found without building a tree.
 *
 * For our own result lines: no memory is taken, and a value comes back as the very bytes that the
 * line has. */
#ifndef BG_OUTPUT_LENS_H
#define BG_OUTPUT_LENS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct bg_slice {
    const char *p; /* NULL: there is no such value */
    size_t n;
} bg_slice;

/* The value that starts at or after p (white space is skipped) and ends before `end`; its end.
 * NULL: no valid JSON, or nested deeper than 4,096 levels. */
const char *bg_lens_skip(const char *p, const char *end, bg_slice *value);

/* Walks the members of an object, or the elements of an array: *at starts as the value's slice and
 * is moved behind each. name is the member's key without quotes and with its escapes as they are,
 * {NULL, 0} in an array. False: no more, or malformed. */
bool bg_lens_next(bg_slice *at, bg_slice *name, bg_slice *value);

/* The member of an object. {NULL, 0}: none. */
bg_slice bg_lens_member(bg_slice object, const char *name, size_t n_name);

/* The value at a dotted path, "response.body.choices.0.text": names of members, and indices of
 * array elements. */
bg_slice bg_lens_path(bg_slice value, const char *path);

/* A whole number >= 0, or the fallback. */
int64_t bg_lens_int(bg_slice value, int64_t fallback);
bool bg_lens_is(bg_slice value, const char *text); /* the very text: null, true */

#endif
