/* output/ranges.h - what this folder needs of record sets beyond output.h. */
#ifndef BG_OUTPUT_RANGES_H
#define BG_OUTPUT_RANGES_H

#include "output/output.h"

void bg_ranges_clear(bg_ranges *s); /* empty, memory kept */
/* bg_ranges_parse() that tells missing memory from malformed text. */
bool bg_ranges_read(bg_ranges *s, const char *text, size_t n, bool *nomem);
/* The i-th range, ascending; false: there are not so many. */
bool bg_ranges_at(const bg_ranges *s, size_t i, int64_t *first, int64_t *last);

#endif
