/* backend/steps.h - the seats of a rank's sequences, and the rows of its present step, on the host.
 *
 * The same for every backend: what a seat holds, what a step may ask for, which row belongs to
 * which sequence and position, and which rows yield logits. One thread. */
#ifndef BG_BACKEND_STEPS_H
#define BG_BACKEND_STEPS_H

#include "backend/ops.h"

/* A seat of a sequence: n_tokens tokens, the last n_generated of them sampled. tokens has them,
 * unless the device keeps them (bg_steps.has_tokens). */
typedef struct bg_slot {
    bool seated;
    int32_t *tokens; /* max_ctx + 1 places: the last position may still sample */
    int n_tokens, n_generated;
    uint64_t step;        /* the last step it took part in */
    bg_sampling sampling; /* its bias and stop_ids are the copies below */
    bg_logit_bias *bias;
    int32_t *stop_ids;
} bg_slot;

typedef struct bg_step_seq {
    int slot, pos0, n_tokens;
    int row0; /* its first row in the step */
    const int32_t *blocks;
    bool sample;
} bg_step_seq;

typedef struct bg_steps { /* starts as {0}; ends with bg_steps_release() */
    int max_tokens, max_seqs, max_out, max_ctx, vocab_size;
    bool has_tokens;            /* histories are here; false: the backend keeps them elsewhere */
    int block_tokens, n_blocks; /* of the cache; block_tokens 0: there is none */
    bg_slot *slots;             /* [max_seqs] */
    int32_t *histories;
    uint64_t step; /* number of bg_steps_begin() calls */
    bool all_logits;
    int n_seqs, n_rows, n_out;
    bg_step_seq *seqs; /* [max_seqs] */
    int32_t *blocks;   /* their block tables, one after another */
    size_t blocks_cap, n_block_ids;
    int32_t *row_seq; /* [max_tokens] index in seqs */
    int32_t *row_pos; /* [max_tokens] */
    int32_t *out_row; /* [max_out] */
    int32_t *out_seq; /* [max_out] */
} bg_steps;

bg_status bg_steps_init(bg_steps *s, const bg_backend_config *c, bool has_tokens, bg_error *err);
void bg_steps_release(bg_steps *s);
/* Once the cache is known. BG_NOMEM. */
bg_status bg_steps_cache(bg_steps *s, const bg_cache_spec *spec, bg_error *err);
/* As slot_seat and begin_step in bg_ops. BG_INTERNAL: what is asked for contradicts itself. */
bg_status bg_steps_seat(bg_steps *s, int slot, const bg_sampling *sampling, const int32_t *tokens,
                        int n_tokens, int n_generated, bg_error *err);
bg_status bg_steps_begin(bg_steps *s, const bg_batch *batch, bg_error *err);
/* The present step's outputs each have one more token in their slots' histories, a sampled one: its
 * place is taken (the next step may be begun), its value known or not. */
void bg_steps_reserve(bg_steps *s);
/* As the one that was reserved last in its slot; only with has_tokens. */
void bg_steps_fill(bg_steps *s, int slot, int32_t token);

#endif
