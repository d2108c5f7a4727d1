/* backend/cpu/pool.h - the compute threads of one CPU rank.
 *
 * The caller is thread 0. Between two runs close together the others spin (a run starts in well
 * under a microsecond); after a short while without work they sleep on a futex. */
#ifndef BG_BACKEND_CPU_POOL_H
#define BG_BACKEND_CPU_POOL_H

#include "base/error.h"

typedef struct bg_pool bg_pool;

/* n_threads >= 1, the caller's included; first_cpu >= 0 pins thread i to processor first_cpu + i
 * (ignored where that processor is not allowed). BG_NOMEM, BG_IO. */
bg_status bg_pool_new(bg_pool **pool, int n_threads, int first_cpu, bg_error *err);
void bg_pool_free(bg_pool *pool); /* NULL is allowed */
int bg_pool_threads(const bg_pool *pool);

/* fn(ctx, i, n) on every thread i of n; returns when all have. Not reentrant. */
void bg_pool_run(bg_pool *pool, void (*fn)(void *ctx, int thread, int n_threads), void *ctx);
/* All threads meet; callable only inside fn, by all of them. */
void bg_pool_barrier(bg_pool *pool);
/* Dynamic work inside fn: the next index of [0, n) not yet given out in this run, or n or more when
 * none is left; a counter of this run, reset by bg_pool_run() and bg_pool_barrier_reset(). */
int bg_pool_next(bg_pool *pool);
void bg_pool_barrier_reset(bg_pool *pool); /* a barrier that also sets the counter back to 0 */

#endif
