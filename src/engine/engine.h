/* engine/engine.h - requests in flight: from token ids in to token ids out, on a set of ranks.
 *
 * The coordinator makes the ranks first (bg_ranks_start: one worker process a rank, forked through
 * a small single-threaded nursery process before any thread exists), then an engine over them. The
 * engine's own thread schedules: it fills seats from a look-ahead window, prefills in chunks,
 * decodes, preempts by recomputing when KV blocks run out, starts dead ranks again, and reports
 * tokens to a sink.
 *
 * Continuous batching: a step is prefill or decode; see architecture.md "A step". Results depend on
 * each request alone: not on what shared its batch, on preemption, or on a rank that died.
 *
 *     coordinator --(seat, step)--> ring down to each rank --> forward + sample
 *                 <--(sampled)----- ring up from rank 0
 */
#ifndef BG_ENGINE_ENGINE_H
#define BG_ENGINE_ENGINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "backend/ops.h"
#include "base/error.h"
#include "base/log.h"
#include "model/model.h"

/* ---- ranks: worker processes --------------------------------------------------------------------
 */

enum { BG_MAX_RANKS = 64 };

typedef struct bg_rank_config { /* plain data and strings that outlive the ranks */
    const char *model_path;
    int tp;
    int gpus[BG_MAX_RANKS]; /* of each rank; 0: the CPU; else 1 + the GPU's number */
    int first_rank;         /* where the ranks of this replica begin among all of the job */
    bg_compute compute;
    bg_cache_type cache_type;
    int threads_per_rank;
    bool pin_threads, check, eager, dummy, fast_math;
    const char *isa;
    int n_blocks, block_tokens; /* KV, scratch included */
    int max_num_seqs;           /* slots, and the largest decode batch */
    int max_step_tokens;        /* rows of the largest step */
    int max_model_len;
    const char *tune_table; /* GPU: shapes of linears; NULL: none */
    size_t max_message;     /* bytes of the largest message in a ring; 0: computed */
} bg_rank_config;

/* What a rank process runs. The real one is bg_rank_ops_model; tests put a fake in its place. All
 * are called in the rank's process, by one thread. */
typedef struct bg_rank_ops {
    bg_status (*start)(void **state, const bg_rank_config *c, int rank, void *comm_memory,
                       void (*progress)(void *ctx, uint64_t done, uint64_t total),
                       void *progress_ctx, bg_error *err);
    bg_status (*seat)(void *state, int slot, const bg_sampling *s, const int32_t *tokens,
                      int n_tokens, int n_generated, bg_error *err);
    /* Starts one step; BG_STEPS_AHEAD may be under way. The batch may change when it returns. */
    bg_status (*launch)(void *state, const bg_batch *batch, bg_error *err);
    bool (*ready)(void *state); /* fetch would not wait */
    /* Ends the oldest step; out (room for max_num_seqs) gets what was sampled, *n of them. */
    bg_status (*fetch)(void *state, bg_sampled *out, int *n, bg_error *err);
    void (*stop)(void *state);
    uint64_t (*memory)(void *state);                 /* bytes on the device; may be NULL */
    const bg_load_times *(*load_times)(void *state); /* may be NULL */
    void (*device_times)(void *state, int64_t *work_ns, int64_t *idle_ns); /* may be NULL */
} bg_rank_ops;

extern const bg_rank_ops bg_rank_ops_model;

typedef struct bg_ranks bg_ranks;

/* Makes the shared map, forks the nursery and through it the ranks. Call before any thread exists.
 * Returns at once: ranks load the model while the caller does other things. *r is the caller's. */
bg_status bg_ranks_start(bg_ranks **r, const bg_rank_config *c, const bg_rank_ops *ops, bg_log *log,
                         bg_error *err);
/* Waits until every rank is ready; progress (may be NULL) is called now and then with the bytes
 * loaded. BG_DEVICE or the rank's own status with its text (e.g. BG_FORMAT: the model is damaged).
 * stop (may be NULL) is polled: true gives BG_BUSY. */
bg_status bg_ranks_wait_ready(bg_ranks *r, void (*progress)(void *, uint64_t done, uint64_t total),
                              void *ctx, bool (*stop)(void *), bg_error *err);
/* Asks every rank to end, waits shortly, kills the rest, reaps. NULL is allowed. */
void bg_ranks_stop(bg_ranks *r);
pid_t bg_ranks_pid(const bg_ranks *r, int rank); /* for tests and status; 0: not running */
uint64_t bg_ranks_memory(const bg_ranks *r);     /* bytes on the devices, all ranks */
/* See bg_engine_stats; since the ranks were last started. */
void bg_ranks_device_times(const bg_ranks *r, int64_t *work_ns, int64_t *idle_ns);
/* Of a rank that is ready: how long its weights took, and all before it was ready. */
void bg_ranks_load_times(const bg_ranks *r, int rank, bg_load_times *times, int64_t *start_ns);

/* ---- requests -------------------------------------------------------------------------------- */

typedef enum bg_finish {
    BG_FINISH_NONE = 0,
    BG_FINISH_STOP,   /* an end-of-generation id, or one of the request's stop ids */
    BG_FINISH_LENGTH, /* max_tokens or the context is full */
    BG_FINISH_CANCEL, /* bg_engine_cancel(): the caller had enough (a stop string) */
} bg_finish;

/* One sequence: one choice of one prompt. */
typedef struct bg_seq_spec {
    void *user;            /* comes back with each event */
    int64_t order;         /* record number: the engine's tie-break, lower first */
    const int32_t *prompt; /* copied; n_prompt >= 1 */
    int n_prompt;
    const int32_t
        *regained; /* output tokens of an earlier run to continue from; may be NULL; copied */
    int n_regained;
    int max_tokens;       /* >= 1, regained ones included */
    bool ignore_eos;      /* end-of-generation ids do not end it, even if stop_ids lists them */
    bg_sampling sampling; /* copied with its arrays */
} bg_seq_spec;

typedef struct bg_token_event {
    void *user;
    uint64_t seq;       /* the engine's number of the sequence */
    bool has_token;     /* false: only `finish` is news */
    bg_sampled sampled; /* token, logprob, top */
    bg_finish finish;   /* not NONE: the sequence's last event. A stop id's token is reported too */
    int n_cached;       /* prompt tokens taken from the prefix cache at its first prefill */
} bg_token_event;

typedef struct bg_engine_stats {
    uint64_t steps, prefill_steps, decode_steps;
    uint64_t prompt_tokens; /* computed in prefill, without cached ones */
    uint64_t cached_tokens; /* prompt tokens that the prefix cache saved */
    uint64_t output_tokens;
    uint64_t recomputed_tokens; /* prefilled again after preemption or a restart */
    uint64_t preemptions, restarts;
    int n_running, n_waiting;
    int blocks_free, blocks_total;
    int64_t busy_ns; /* time in which a step was under way */
    /* Where the backend knows: the device of rank 0 at work, and idle between steps. */
    int64_t device_work_ns, device_idle_ns;
} bg_engine_stats;

typedef struct bg_engine bg_engine;

typedef struct bg_engine_config {
    bool prefix_cache;
    int window;             /* sequences waiting at most; submit blocks beyond it */
    int max_batched_tokens; /* prefill tokens of a step; <= max_step_tokens of the ranks */
    int max_restarts;       /* this many deaths in a row (no token in between) end the engine: 3 */
    int64_t hang_ns;        /* ranks that do not get on for so long are killed; 0: ten minutes */
    uint64_t id_first, id_step; /* sequences' numbers; 0: 1, 2, 3, ... */
    const int32_t *eog;         /* end-of-generation ids, ascending; copied */
    size_t n_eog;
    /* The sink: n events in the order of their tokens, on the engine's thread. Must not block for
     * long. */
    void (*on_events)(void *ctx, const bg_token_event *events, int n);
    void *ctx;
    /* On the engine's thread as its last act, if the ranks failed too often; may be NULL. */
    void (*on_failed)(void *ctx, bg_engine *e);
    void *failed_ctx;
    bg_log *log;
} bg_engine_config;

/* Starts the engine's thread; ranks must be ready, and outlive it. */
bg_status bg_engine_new(bg_engine **e, bg_ranks *r, const bg_engine_config *c, bg_error *err);
/* Adds a sequence; *seq gets its number. Waits while the window is full. BG_ARG: it can never run
 * (prompt + 1 token over max_model_len, or more blocks than there are). BG_DEVICE: the engine has
 * failed. BG_BUSY: the engine is stopping. Any thread. */
bg_status bg_engine_submit(bg_engine *e, const bg_seq_spec *spec, uint64_t *seq, bg_error *err);
/* Ends a sequence early; its last event (BG_FINISH_CANCEL, no token) still comes, unless it ended
 * by itself before. Any thread; also from the sink. */
void bg_engine_cancel(bg_engine *e, uint64_t seq);
/* Takes no more: submit says BG_BUSY from now on, sequences that never started end with
 * BG_FINISH_CANCEL, running ones go on to their end. Any thread. */
void bg_engine_wind_down(bg_engine *e);
/* Waits until nothing is waiting or running, or the engine failed (its error). */
bg_status bg_engine_drain(bg_engine *e, bg_error *err);
/* Stops admitting and cancels: after it returns no event comes any more. Sequences still in flight
 * just vanish (their tokens so far were reported). Wakes blocked submitters with BG_BUSY. */
void bg_engine_stop(bg_engine *e);
void bg_engine_free(bg_engine *e);                          /* stops first */
void bg_engine_get_stats(bg_engine *e, bg_engine_stats *s); /* any thread */
/* BG_OK, or the failure that ended the engine. Any thread. */
bg_status bg_engine_error(bg_engine *e, bg_error *err);

/* ---- replicas: several engines on one queue ----------------------------------------------------
 * Each has ranks and an engine of its own; a sequence goes to the one with the least to do. What
 * they report is as from one engine. An engine whose ranks fail too often hands its sequences, with
 * the tokens they have, to the others; with none left the whole has failed. */

typedef struct bg_replicas bg_replicas;

/* As bg_ranks_start(), for n configurations. */
bg_status bg_replicas_start(bg_replicas **r, const bg_rank_config *c, int n, const bg_rank_ops *ops,
                            bg_log *log, bg_error *err);
/* As bg_ranks_wait_ready(). Replicas load side by side; progress tells of the one waited for. */
bg_status bg_replicas_wait_ready(bg_replicas *r,
                                 void (*progress)(void *, uint64_t done, uint64_t total), void *ctx,
                                 bool (*stop)(void *), bg_error *err);
/* Starts the engines; c's ids and on_failed are set here, its sink must take calls of several
 * threads at once. */
bg_status bg_replicas_open(bg_replicas *r, const bg_engine_config *c, bg_error *err);
/* These are bg_engine_*() of the whole. */
bg_status bg_replicas_submit(bg_replicas *r, const bg_seq_spec *spec, uint64_t *seq, bg_error *err);
void bg_replicas_cancel(bg_replicas *r, uint64_t seq);
void bg_replicas_wind_down(bg_replicas *r);
bg_status bg_replicas_drain(bg_replicas *r, bg_error *err);
void bg_replicas_stop(bg_replicas *r);
void bg_replicas_get_stats(bg_replicas *r, bg_engine_stats *s); /* sums; busy_ns: the longest */
uint64_t bg_replicas_memory(const bg_replicas *r);
/* Ends the ranks, not the engines: for a process that is about to end. */
void bg_replicas_kill(bg_replicas *r);
void bg_replicas_free(bg_replicas *r); /* NULL is allowed */

#endif
