/* base/ordered.h - a parallel map that keeps its order: items go in, worker threads transform them
 * at the same time, and they come out in the order they went in. At most `window` items are inside.
 * One producer, one consumer. */
#ifndef BG_BASE_ORDERED_H
#define BG_BASE_ORDERED_H

#include <stdbool.h>
#include <stddef.h>

#include "base/error.h"

typedef struct bg_ordered bg_ordered;

/* work(ctx, item) runs on one of n_threads threads and changes the item in place. */
bg_status bg_ordered_new(bg_ordered **o, int n_threads, size_t window,
                         void (*work)(void *ctx, void *item), void *ctx, bg_error *err);
/* Waits for room. False: stopped, and item stays the caller's. */
bool bg_ordered_push(bg_ordered *o, void *item);
void bg_ordered_end(bg_ordered *o); /* the producer has no more */
/* The next item, worked on. NULL: ended and empty, or stopped. */
void *bg_ordered_pop(bg_ordered *o);
/* Wakes both ends: pushes and pops fail from now on. */
void bg_ordered_stop(bg_ordered *o);
/* Stops, joins the threads; drop (may be NULL) gets each item still inside. */
void bg_ordered_free(bg_ordered *o, void (*drop)(void *item));

#endif
