/* comm/comm.h - collectives between the ranks of one replica.
 *
 * Every rank calls the same operations in the same order with the same sizes. Sums are taken in
 * rank order 0..n-1 in float32 on every rank, so the result has the same bits everywhere.
 * This header is the shared-memory communicator of CPU ranks; NCCL gets its own file beside it. */
#ifndef BG_COMM_COMM_H
#define BG_COMM_COMM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

typedef struct bg_comm bg_comm;

/* Bytes of zeroed shared memory a communicator of n_ranks needs when no operation moves more than
 * max_floats floats per rank (longer ones are cut into pieces). */
size_t bg_comm_shm_bytes(int n_ranks, size_t max_floats);
/* Joins as rank. memory is 64-byte aligned, shared by all ranks, and zeroed before the first
 * joins; it outlives the comm. No waiting happens here. *c is the caller's. BG_NOMEM, BG_ARG. */
bg_status bg_comm_shm_join(bg_comm **c, void *memory, int rank, int n_ranks, size_t max_floats,
                           bg_error *err);
/* A rank of n_ranks that is alone, to measure what one rank does: sums leave their values as they
 * are and take all_reduce_ns, a gather has this rank's values for everyone's, nothing waits for
 * others. BG_NOMEM, BG_ARG. */
bg_status bg_comm_standin_new(bg_comm **c, int rank, int n_ranks, int64_t all_reduce_ns,
                              bg_error *err);
int64_t bg_comm_standin_ns(const bg_comm *c); /* -1: it is a real one */
void bg_comm_free(bg_comm *c);

int bg_comm_rank(const bg_comm *c);
int bg_comm_size(const bg_comm *c);

/* All three wait for every rank. BG_DEVICE: bg_comm_abort() was called while waiting.
 * Waiting spins for a short time, then sleeps (futex). */
bg_status bg_comm_all_reduce(bg_comm *c, float *x, size_t n, bg_error *err); /* in place, sum */
/* out[r*n .. (r+1)*n) = rank r's x[0..n). out != x. */
bg_status bg_comm_all_gather(bg_comm *c, const float *x, size_t n, float *out, bg_error *err);
bg_status bg_comm_barrier(bg_comm *c, bg_error *err);

/* From any process: makes every waiting and every later operation fail. memory as given to join. */
void bg_comm_shm_abort(void *memory);

#endif
