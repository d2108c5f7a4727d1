/* output/keys.h - the key of each record that has a result.
 *
 * About 10 bytes a record where records are dense, some 30 where they are far apart. */
#ifndef BG_OUTPUT_KEYS_H
#define BG_OUTPUT_KEYS_H

#include "output/output.h"

typedef struct bg_keys bg_keys;

bg_keys *bg_keys_new(void);
void bg_keys_free(bg_keys *k);
bool bg_keys_set(bg_keys *k, int64_t record, uint64_t key); /* false: no memory */
uint64_t bg_keys_get(const bg_keys *k, int64_t record);     /* 0: not known */

/* The keys of `records` in ascending order, 16 hex digits each. Nothing is appended, and it is
 * false, when none of them is known. */
bool bg_keys_print(const bg_keys *k, const bg_ranges *records, bg_buf *out);
/* Reads that back. False: not as many as there are records, no hex, or no memory. */
bool bg_keys_read(bg_keys *k, const bg_ranges *records, const char *text, size_t n, bool *nomem);

#endif
