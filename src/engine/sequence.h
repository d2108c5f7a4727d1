/* engine/sequence.h - one sequence: a choice of a prompt, from submit to its last event.
 *
 * States:
 *
 *     WAITING --admit--> PREFILL --last chunk--> DECODE --finish or cancel--> ENDING --> done
 *        ^                                          |                (nothing in flight)
 *        +------- preempt, restart of the ranks ----+
 *
 * Numbers of a seated sequence, with len = n_tokens + n_pending:
 *
 *     n_computed <= len     positions whose K and V were asked for in a step already sent
 *     n_tokens              tokens that the coordinator knows
 *     n_pending             tokens of steps in flight: the ranks have them, the coordinator not yet
 *
 * A decode step computes position len - 1 and yields token number len. Threads: the engine's own,
 * except for the fields marked `lock`. */
#ifndef BG_ENGINE_SEQUENCE_H
#define BG_ENGINE_SEQUENCE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "engine/engine.h"

typedef enum bg_seq_state {
    BG_SEQ_WAITING,
    BG_SEQ_PREFILL,
    BG_SEQ_DECODE,
    BG_SEQ_ENDING, /* over, but a step in flight still writes to its blocks */
} bg_seq_state;

typedef struct bg_seq_group bg_seq_group; /* waiting sequences with a common prefix; scheduler.c */

typedef struct bg_seq {
    uint64_t id;
    void *user;
    int64_t order;
    bg_sampling sampling; /* its arrays are the sequence's */
    bool ignore_eos;

    int32_t *tokens; /* prompt, then output */
    int32_t n_tokens, n_prompt;
    int32_t max_total; /* length at which it ends with BG_FINISH_LENGTH */
    int32_t cap_tokens;

    bg_seq_state state;
    int32_t slot; /* -1: not seated */
    int32_t n_computed, n_pending;
    int32_t n_in_flight; /* steps sent and not yet answered that it takes part in */

    int32_t *blocks; /* room for max_total */
    int32_t n_blocks;
    int32_t n_sent_blocks; /* of these the ranks know */
    int32_t n_shared;      /* leading blocks found in the prefix cache */
    uint64_t chain;        /* prefix cache: serial after n_chained blocks */
    int32_t n_chained;

    bool started;         /* was admitted before */
    uint64_t seniority;   /* number of its first admission: the lower, the later preempted */
    int32_t max_computed; /* largest n_computed so far: below it, prefill is a repetition */
    int32_t n_cached;     /* prompt tokens found in the cache at its first admission */

    /* while waiting for the first time */
    int32_t cost_class;
    bg_seq_group *group, *family;
    uint64_t arrival; /* admissions before it came */
    struct bg_seq *older, *newer;

    /* engine.c */
    struct bg_seq *next;        /* inbox, or the list of those done */
    struct bg_seq *id_next;     /* lock: bucket of the id table */
    struct bg_seq *cancel_next; /* lock */
    bool cancelled;             /* lock: is in the list of cancels */
} bg_seq;

/* Copies spec. BG_ARG names what is impossible; BG_NOMEM. */
bg_status bg_seq_new(bg_seq **seq, const bg_seq_spec *spec, int max_model_len, bg_error *err);
void bg_seq_free(bg_seq *seq); /* NULL is allowed */
/* Makes room for max_total tokens and their blocks, once, before the first step. BG_NOMEM. */
bg_status bg_seq_reserve(bg_seq *seq, int block_tokens, bg_error *err);

static inline int32_t bg_seq_len(const bg_seq *s)
{
    return s->n_tokens + s->n_pending;
}

static inline int32_t bg_seq_n_output(const bg_seq *s)
{
    return s->n_tokens - s->n_prompt;
}

/* Whether the sequence is over after its last known token. An end-of-generation id does not end a
 * sequence with ignore_eos, even if the caller listed it in stop_ids. */
bg_finish bg_seq_finish(const bg_seq *s, const int32_t *eog, size_t n_eog);

#endif
