/* text/merge.h - the merge loop that SPM and BPE share.
 *
 * A word is a row of symbols. While some two neighbours merge, the pair with the lowest priority
 * number does (ties: the leftmost). Short words scan an array; long ones keep a heap, so the steps
 * grow as n log n however the word looks. */
#ifndef BG_TEXT_MERGE_H
#define BG_TEXT_MERGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct bg_symbol {
    uint32_t at, n; /* bytes of the word */
    int32_t id;     /* -1: no token */
} bg_symbol;

#define BG_MERGE_NEVER UINT32_MAX /* a priority that no pair has */

/* The priority at which left and right merge, with the resulting token in *id; or BG_MERGE_NEVER.
 */
typedef uint32_t bg_merge_pair(const void *ctx, const bg_symbol *left, const bg_symbol *right,
                               int32_t *id);

typedef struct bg_merger { /* scratch of one thread; starts as {0} */
    bg_symbol *sym;        /* the word; the caller fills it and sets n */
    uint32_t n, cap;
    int32_t *prev, *next; /* of long words: the neighbours, -1 at the ends */
    uint32_t link_cap;
    struct bg_merge_job *heap;
    uint32_t heap_n, heap_cap;
    uint64_t steps; /* pairs looked up and heap entries moved, over all words; for tests */
} bg_merger;

void bg_merger_release(bg_merger *m);
/* Room for n symbols, whose old contents are lost. False: no memory, or over INT32_MAX. */
bool bg_merger_reserve(bg_merger *m, size_t n);
bool bg_merger_grow(bg_merger *m); /* room for one more symbol behind the n that are there */
/* Merges sym[0..n) and leaves the result there, in order. False: no memory. */
bool bg_merger_run(bg_merger *m, bg_merge_pair *pair, const void *ctx);

#endif
