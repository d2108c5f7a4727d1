/* engine/scheduler.h - which sequences run in the next step: admission, order, chunks, preemption.
 *
 * Policy only: numbers in, numbers out. It knows no ring, no process, no thread and no device
 * memory; a test can play the ranks. A step is planned, sent by the caller, and applied when its
 * answer is here; several may be in flight, answered in the order they were planned, and a rank
 * works them off in that order. Hence
 *  - a block's content counts as computed as soon as the step that computes it is planned;
 *  - a step may be planned while the tokens it starts from are still unknown (bg_seq.n_pending);
 *  - slots and blocks of a sequence that ended are held until no step in flight names them.
 *
 * Order of admission:
 *  1. sequences that were preempted or lost their ranks, oldest admission first;
 *  2. sequences that were overtaken by more than twice the window (so nothing starves);
 *  3. by expected cost, in classes half a power of two wide, dear ones first; within a class
 * prompts that begin alike together, within these equal prompts together, then by record.
 *
 * Phases: prefill steps of up to max_batched_tokens tokens while prompts are unfinished; a new
 * prefill phase begins when nothing decodes, or what can be admitted now is all that waits, or is
 * 1/16 of the batch, or fills a step. Otherwise all sequences decode, in one step.
 *
 * Admission asks whether the blocks last: it follows the running sequences to their expected ends
 * (sorted by what remains, the sum of what the k longest hold when the k-th ends; the idea is that
 * of "Past-Future Scheduler for LLM Serving under SLA Guarantees", ASPLOS 2025) and admits while
 * the peak fits. Expected ends are a learned share of max_tokens; when that was too hopeful, the
 * youngest is preempted: its blocks are freed and it is prefilled again later. */
#ifndef BG_ENGINE_SCHEDULER_H
#define BG_ENGINE_SCHEDULER_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "engine/engine.h"
#include "engine/sequence.h"

typedef struct bg_sched_config {
    int n_blocks, block_tokens;
    int max_num_seqs;
    int max_batched_tokens;
    int max_model_len;
    int window; /* for the rule of overtaking */
    bool prefix_cache;
    bool greedy;        /* admit what fits now, whatever it grows to: tests of preemption */
    const int32_t *eog; /* not copied */
    size_t n_eog;
} bg_sched_config;

typedef struct bg_plan_item {
    bg_seq *seq;
    int32_t pos0, n_tokens;
    int32_t block0, n_blocks; /* seq->blocks[block0 ..] are news to the ranks; not with seat */
    bool seat; /* send its seat (history, n_tokens known, all blocks) before the step */
    bool sample;
} bg_plan_item;

typedef struct bg_plan { /* items: room for max_num_seqs */
    bool prefill;
    int32_t n_items, n_rows;
    bg_plan_item *items;
} bg_plan;

typedef enum bg_plan_kind {
    BG_PLAN_NONE, /* nothing to send until an answer or a new sequence comes */
    BG_PLAN_STEP, /* send *plan */
} bg_plan_kind;

typedef struct bg_sched bg_sched;

/* *s is the caller's; NULL on failure. BG_ARG, BG_NOMEM. */
bg_status bg_sched_new(bg_sched **s, const bg_sched_config *c, bg_error *err);
void bg_sched_free(bg_sched *s); /* and all sequences in it; NULL is allowed */

/* BG_ARG: the sequence needs more blocks than there are, even alone. Reads only what never changes:
 * any thread. */
bg_status bg_sched_check(const bg_sched *s, const bg_seq *seq, bg_error *err);
/* Takes the sequence over, unless it fails: BG_NOMEM. */
bg_status bg_sched_add(bg_sched *s, bg_seq *seq, bg_error *err);
/* Ends a sequence. False: it had ended already. */
bool bg_sched_cancel(bg_sched *s, bg_seq *seq);

/* Plans a step. BG_NOMEM; BG_INTERNAL: sequences wait but nothing can run. */
bg_status bg_sched_plan(bg_sched *s, bg_plan *plan, bg_plan_kind *kind, bg_error *err);
/* Takes the answer to the oldest planned step: n sampled tokens in the order of its items. Writes
 * at most one event a sequence. BG_INTERNAL: the answer does not match the plan. */
bg_status bg_sched_apply(bg_sched *s, const bg_plan *plan, const bg_sampled *sampled, int n,
                         bg_token_event *events, int *n_events, bg_error *err);
/* The ranks are new: nothing is in flight, KV and prefix cache are empty, and every sequence that
 * ran waits in front. */
void bg_sched_restart(bg_sched *s);

/* Takes out a sequence that is over and that no step in flight names; NULL: none. The caller's. */
bg_seq *bg_sched_take_done(bg_sched *s);

int bg_sched_n_new(const bg_sched *s);     /* waiting for their first admission */
int bg_sched_n_waiting(const bg_sched *s); /* these and those that wait again */
int bg_sched_n_running(const bg_sched *s); /* seated */
int bg_sched_in_flight(const bg_sched *s); /* steps */
void bg_sched_add_stats(const bg_sched *s, bg_engine_stats *stats); /* fills what it counts */

/* Checks every invariant: blocks, slots, lists. BG_INTERNAL. For tests. */
bg_status bg_sched_verify(const bg_sched *s, bg_error *err);

/* What one sequence holds (blocks of its own, in tokens) and how many tokens it will still get. */
typedef struct bg_load {
    int32_t held, remaining;
} bg_load;
/* The most blocks that n sequences will hold at one time. Sorts loads. */
int64_t bg_sched_peak_blocks(bg_load *loads, int n, int block_tokens);

#endif
