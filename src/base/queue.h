/* base/queue.h - a bounded, closable queue of pointers between threads. */
#ifndef BG_BASE_QUEUE_H
#define BG_BASE_QUEUE_H

#include <stdbool.h>
#include <stddef.h>

typedef struct bg_queue bg_queue;

bg_queue *bg_queue_new(size_t capacity); /* NULL: out of memory */
void bg_queue_free(bg_queue *q);         /* the items left inside are not freed */
/* Waits for room. False: the queue is closed, and item stays the caller's. */
bool bg_queue_push(bg_queue *q, void *item);
/* Waits for an item. NULL: closed and empty. */
void *bg_queue_pop(bg_queue *q);
/* An item, or NULL at once, or after timeout_ns, when there is none. */
void *bg_queue_try_pop(bg_queue *q);
void *bg_queue_pop_within(bg_queue *q, long long timeout_ns);
/* No more pushes; what is inside can still be popped. Wakes every waiter. May be called again. */
void bg_queue_close(bg_queue *q);
bool bg_queue_closed(bg_queue *q); /* closed and empty */
size_t bg_queue_len(bg_queue *q);

#endif
