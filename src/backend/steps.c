#include "backend/steps.h"

#include <stdlib.h>
#include <string.h>

bg_status bg_steps_init(bg_steps *s, const bg_backend_config *c, bool has_tokens, bg_error *err)
{
    const size_t max_seqs = (size_t)c->max_seqs, max_tokens = (size_t)c->max_tokens;
    const size_t max_out = (size_t)c->max_out, history = (size_t)c->max_ctx + 1;
    *s = (bg_steps){.max_tokens = c->max_tokens,
                    .max_seqs = c->max_seqs,
                    .max_out = c->max_out,
                    .max_ctx = c->max_ctx,
                    .vocab_size = c->vocab_size,
                    .has_tokens = has_tokens};
    s->slots = calloc(max_seqs, sizeof *s->slots);
    s->histories = calloc(has_tokens ? max_seqs * history : 1, sizeof *s->histories);
    s->seqs = calloc(max_seqs, sizeof *s->seqs);
    s->row_seq = calloc(max_tokens, sizeof *s->row_seq);
    s->row_pos = calloc(max_tokens, sizeof *s->row_pos);
    s->out_row = calloc(max_out, sizeof *s->out_row);
    s->out_seq = calloc(max_out, sizeof *s->out_seq);
    if (!s->slots || !s->histories || !s->seqs || !s->row_seq || !s->row_pos || !s->out_row ||
        !s->out_seq)
        return bg_fail(err, BG_NOMEM, "out of memory for %d sequences of %d positions", c->max_seqs,
                       c->max_ctx);
    for (size_t i = 0; has_tokens && i < max_seqs; i++)
        s->slots[i].tokens = s->histories + i * history;
    return BG_OK;
}

void bg_steps_release(bg_steps *s)
{
    for (int i = 0; s->slots && i < s->max_seqs; i++) {
        free(s->slots[i].bias);
        free(s->slots[i].stop_ids);
    }
    free(s->slots);
    free(s->histories);
    free(s->seqs);
    free(s->blocks);
    free(s->row_seq);
    free(s->row_pos);
    free(s->out_row);
    free(s->out_seq);
    *s = (bg_steps){0};
}

bg_status bg_steps_cache(bg_steps *s, const bg_cache_spec *spec, bg_error *err)
{
    const size_t per_seq =
        ((size_t)s->max_ctx + (size_t)spec->block_tokens - 1) / (size_t)spec->block_tokens;
    s->blocks_cap = (size_t)s->max_seqs * per_seq;
    s->blocks = calloc(s->blocks_cap ? s->blocks_cap : 1, sizeof *s->blocks);
    if (!s->blocks) return bg_fail(err, BG_NOMEM, "block tables: out of memory");
    s->block_tokens = spec->block_tokens;
    s->n_blocks = spec->n_blocks;
    return BG_OK;
}

void bg_steps_reserve(bg_steps *s)
{
    for (int i = 0; i < s->n_out; i++) {
        bg_slot *to = &s->slots[s->seqs[s->out_seq[i]].slot];
        to->n_tokens++;
        to->n_generated++;
    }
}

void bg_steps_fill(bg_steps *s, int slot, int32_t token)
{
    bg_slot *to = &s->slots[slot];
    to->tokens[to->n_tokens - 1] = token;
}

/* ---- slots ----------------------------------------------------------------------------------- */

bg_status bg_steps_seat(bg_steps *s, int slot, const bg_sampling *sampling, const int32_t *tokens,
                        int n_tokens, int n_generated, bg_error *err)
{
    const int vocab = s->vocab_size;
    if (slot < 0 || slot >= s->max_seqs)
        return bg_fail(err, BG_INTERNAL, "slot %d of %d", slot, s->max_seqs);
    if (n_tokens < 1 || n_tokens > s->max_ctx + 1 || n_generated < 0 || n_generated > n_tokens)
        return bg_fail(err, BG_INTERNAL, "slot %d: %d tokens, %d of them generated, %d positions",
                       slot, n_tokens, n_generated, s->max_ctx);
    for (int i = 0; i < n_tokens; i++)
        if (tokens[i] < 0 || tokens[i] >= vocab)
            return bg_fail(err, BG_INTERNAL, "slot %d: token %d at %d, the vocabulary has %d", slot,
                           tokens[i], i, vocab);
    for (int i = 0; i < sampling->n_bias; i++)
        if (sampling->bias[i].token < 0 || sampling->bias[i].token >= vocab)
            return bg_fail(err, BG_INTERNAL, "slot %d: bias for token %d, the vocabulary has %d",
                           slot, sampling->bias[i].token, vocab);
    for (int i = 0; i < sampling->n_stop_ids; i++)
        if (sampling->stop_ids[i] < 0 || sampling->stop_ids[i] >= vocab)
            return bg_fail(err, BG_INTERNAL, "slot %d: stop token %d, the vocabulary has %d", slot,
                           sampling->stop_ids[i], vocab);
    if (!(sampling->temperature >= 0) || !(sampling->repetition_penalty > 0) ||
        !(sampling->top_p >= 0) || sampling->n_logprobs > BG_MAX_TOP_LOGPROBS)
        return bg_fail(err, BG_INTERNAL,
                       "slot %d: temperature %g, repetition penalty %g, top_p %g, %d logprobs",
                       slot, (double)sampling->temperature, (double)sampling->repetition_penalty,
                       (double)sampling->top_p, sampling->n_logprobs);

    bg_slot *to = &s->slots[slot];
    const size_t n_bias = sampling->n_bias > 0 ? (size_t)sampling->n_bias : 0;
    const size_t n_stop = sampling->n_stop_ids > 0 ? (size_t)sampling->n_stop_ids : 0;
    bg_logit_bias *bias = n_bias ? malloc(n_bias * sizeof *bias) : NULL;
    int32_t *stop_ids = n_stop ? malloc(n_stop * sizeof *stop_ids) : NULL;
    if ((n_bias && !bias) || (n_stop && !stop_ids)) {
        free(bias);
        free(stop_ids);
        return bg_fail(err, BG_NOMEM, "slot %d: out of memory for %zu biases", slot, n_bias);
    }
    if (n_bias) memcpy(bias, sampling->bias, n_bias * sizeof *bias);
    if (n_stop) memcpy(stop_ids, sampling->stop_ids, n_stop * sizeof *stop_ids);
    free(to->bias);
    free(to->stop_ids);
    to->bias = bias;
    to->stop_ids = stop_ids;
    to->sampling = *sampling;
    to->sampling.bias = bias;
    to->sampling.stop_ids = stop_ids;
    if (s->has_tokens) memcpy(to->tokens, tokens, (size_t)n_tokens * sizeof *tokens);
    to->n_tokens = n_tokens;
    to->n_generated = n_generated;
    to->seated = true;
    return BG_OK;
}

/* ---- the step -------------------------------------------------------------------------------- */

static bg_status check_seq(const bg_steps *s, const bg_seq_step *q, bool all_logits, bg_error *err)
{
    if (q->slot < 0 || q->slot >= s->max_seqs || !s->slots[q->slot].seated)
        return bg_fail(err, BG_INTERNAL, "step: slot %d is none of the %d seats, or empty", q->slot,
                       s->max_seqs);
    const bg_slot *slot = &s->slots[q->slot];
    if (slot->step == s->step) return bg_fail(err, BG_INTERNAL, "step: slot %d twice", q->slot);
    if (q->pos0 < 0 || q->n_tokens < 1 || q->pos0 > s->max_ctx - q->n_tokens)
        return bg_fail(err, BG_INTERNAL, "step: slot %d: %d positions from %d, the limit is %d",
                       q->slot, q->n_tokens, q->pos0, s->max_ctx);
    const int end = q->pos0 + q->n_tokens;
    if (end > slot->n_tokens)
        return bg_fail(err, BG_INTERNAL, "step: slot %d: positions %d..%d, the history has %d",
                       q->slot, q->pos0, end - 1, slot->n_tokens);
    if (q->sample && !all_logits && end != slot->n_tokens)
        return bg_fail(err, BG_INTERNAL,
                       "step: slot %d samples after position %d, its history has %d tokens",
                       q->slot, end - 1, slot->n_tokens);
    if (!s->block_tokens) return BG_OK;
    const int bt = s->block_tokens, needed = (end + bt - 1) / bt;
    if (q->n_blocks < needed)
        return bg_fail(err, BG_INTERNAL, "step: slot %d: %d blocks of %d for %d positions", q->slot,
                       q->n_blocks, bt, end);
    for (int i = 0; i < needed; i++)
        if (q->blocks[i] < 0 || q->blocks[i] >= s->n_blocks)
            return bg_fail(err, BG_INTERNAL, "step: slot %d: block %d of %d", q->slot, q->blocks[i],
                           s->n_blocks);
    return BG_OK;
}

bg_status bg_steps_begin(bg_steps *s, const bg_batch *batch, bg_error *err)
{
    s->n_seqs = s->n_rows = s->n_out = 0;
    s->all_logits = batch->all_logits;
    s->step++;
    if (batch->n_seqs < 0 || batch->n_seqs > s->max_seqs)
        return bg_fail(err, BG_INTERNAL, "step: %d sequences, at most %d", batch->n_seqs,
                       s->max_seqs);
    int n_rows = 0, n_out = 0;
    size_t n_blocks = 0;
    for (int i_seq = 0; i_seq < batch->n_seqs; i_seq++) {
        const bg_seq_step *q = &batch->seqs[i_seq];
        bg_status st = check_seq(s, q, batch->all_logits, err);
        if (st) return st;
        s->slots[q->slot].step = s->step;
        const int first_out = batch->all_logits ? 0 : q->n_tokens - (q->sample ? 1 : 0);
        if (q->n_tokens > s->max_tokens - n_rows)
            return bg_fail(err, BG_INTERNAL, "step: more than %d tokens", s->max_tokens);
        if (q->n_tokens - first_out > s->max_out - n_out)
            return bg_fail(err, BG_INTERNAL, "step: more than %d rows of logits", s->max_out);
        bg_step_seq *seq = &s->seqs[i_seq];
        *seq = (bg_step_seq){q->slot, q->pos0, q->n_tokens, n_rows, NULL, q->sample};
        if (s->block_tokens) {
            const int bt = s->block_tokens;
            const size_t n = (size_t)((q->pos0 + q->n_tokens + bt - 1) / bt);
            memcpy(s->blocks + n_blocks, q->blocks, n * sizeof *s->blocks);
            seq->blocks = s->blocks + n_blocks;
            n_blocks += n;
        }
        for (int i = 0; i < q->n_tokens; i++, n_rows++) {
            s->row_seq[n_rows] = i_seq;
            s->row_pos[n_rows] = q->pos0 + i;
            if (i < first_out) continue;
            s->out_row[n_out] = n_rows;
            s->out_seq[n_out++] = i_seq;
        }
    }
    s->n_block_ids = n_blocks;
    s->n_seqs = batch->n_seqs;
    s->n_rows = n_rows;
    s->n_out = n_out;
    return BG_OK;
}
