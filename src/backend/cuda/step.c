/* The KV cache, the seats and the present step on the device.
 *
 * Nothing here waits for the device: what goes there is put into pinned memory first, in rings that
 * are longer than what is under way.
 *
 * A decode step that a graph runs is padded to the graph's size: rows at position 0 of sequences in
 * slot -1, whose table is the scratch block. */
#include "backend/cuda/cuda.h"

#include <stdlib.h>
#include <string.h>

enum { STAGE_BYTES = 512 << 10 }; /* of one part of the staging ring */

/* ---- uploads ---------------------------------------------------------------------------------
 */

static bg_status make_stage(bg_cuda *c, bg_error *err)
{
    cudaError_t e = cudaMallocHost((void **)&c->stage, (size_t)BG_CUDA_STAGES * STAGE_BYTES);
    for (int i = 0; i < BG_CUDA_STAGES && e == cudaSuccess; i++)
        e = cudaEventCreateWithFlags(&c->stage_free[i], cudaEventDisableTiming);
    return bg_cuda_done(err, e, "staging memory");
}

/* The next part of the ring, once the copies out of it have run. */
static cudaError_t next_part(bg_cuda *c)
{
    cudaError_t e = cudaEventRecord(c->stage_free[c->stage_at], c->stream);
    c->stage_used[c->stage_at] = true;
    c->stage_at = (c->stage_at + 1) % BG_CUDA_STAGES;
    c->stage_fill = 0;
    if (e == cudaSuccess && c->stage_used[c->stage_at])
        e = cudaEventSynchronize(c->stage_free[c->stage_at]);
    return e;
}

bg_status bg_cuda_upload(bg_cuda *c, void *to, const void *from, size_t bytes, bg_error *err)
{
    cudaError_t e = cudaSuccess;
    for (size_t at = 0; at < bytes && e == cudaSuccess;) {
        if (c->stage_fill == STAGE_BYTES) e = next_part(c);
        if (e != cudaSuccess) break;
        const size_t room = STAGE_BYTES - c->stage_fill, n = bytes - at < room ? bytes - at : room;
        char *part = c->stage + (size_t)c->stage_at * STAGE_BYTES + c->stage_fill;
        memcpy(part, (const char *)from + at, n);
        e = cudaMemcpyAsync((char *)to + at, part, n, cudaMemcpyHostToDevice, c->stream);
        at += n;
        c->stage_fill += n < room ? (n + 15) & ~(size_t)15 : n;
        if (c->stage_fill > STAGE_BYTES) c->stage_fill = STAGE_BYTES;
    }
    return bg_cuda_done(err, e, "copying to the GPU");
}

/* ---- the step's buffer ------------------------------------------------------------------------
 */

static int32_t *array(int32_t **at, int n)
{
    int32_t *begin = *at;
    *at += ((size_t)n + 3) & ~(size_t)3; /* 16 bytes */
    return begin;
}

/* Sets the pointers for a step of so many; returns the ints before the block tables. */
static size_t lay_out(bg_cuda *c, int rows, int seqs, int outs)
{
    int32_t *at = c->step;
    c->pos = array(&at, rows);
    c->seq = array(&at, rows);
    c->slot_of_seq = array(&at, seqs);
    c->block0 = array(&at, seqs);
    c->out_row = array(&at, outs);
    c->out_slot = array(&at, outs);
    c->out_len = array(&at, outs);
    c->out_gen = array(&at, outs);
    c->att_plan = array(&at, (int)bg_cuda_attention_ints(c, rows, seqs));
    c->blocks = at;
    c->rows = (bgk_rows){
        .pos = c->pos, .seq = c->seq, .blocks = c->blocks, .block0 = c->block0, .rows = rows};
    return (size_t)(at - c->step);
}

bg_status bg_cuda_step_new(bg_cuda *c, bg_error *err)
{
    const size_t rows = (size_t)c->config.max_tokens, seqs = (size_t)c->config.max_seqs;
    c->step = NULL;
    /* As lay_out() has it; each array may be filled up by 3. */
    c->step_ints = 2 * rows + 2 * seqs + 4 * (size_t)c->config.max_out + 9 * 3 +
                   bg_cuda_attention_ints(c, (int)rows, (int)seqs) + 1 + c->s.blocks_cap;
    c->history_stride = (int64_t)c->config.max_ctx + 1;
    const size_t bytes = c->step_ints * sizeof *c->step;
    const size_t history = seqs * (size_t)c->history_stride * sizeof *c->history;
    bg_status st = bg_cuda_take(c, &c->step, bytes, "step", err);
    if (!st) st = bg_cuda_take(c, &c->ids, rows * sizeof *c->ids, "token ids", err);
    if (!st) st = bg_cuda_take(c, &c->history, history, "histories", err);
    for (int i = 0; !st && i < BG_CUDA_STEPS; i++) {
        cudaError_t e = cudaMallocHost((void **)&c->host_steps[i], bytes);
        if (e == cudaSuccess)
            e = cudaEventCreateWithFlags(&c->step_copied[i], cudaEventDisableTiming);
        st = bg_cuda_done(err, e, "step");
    }
    if (!st) st = make_stage(c, err);
    return st;
}

void bg_cuda_step_free(bg_cuda *c)
{
    for (int i = 0; i < BG_CUDA_STEPS; i++) {
        if (c->host_steps[i]) cudaFreeHost(c->host_steps[i]);
        if (c->step_copied[i]) cudaEventDestroy(c->step_copied[i]);
    }
    if (c->stage) cudaFreeHost(c->stage);
    for (int i = 0; i < BG_CUDA_STAGES; i++)
        if (c->stage_free[i]) cudaEventDestroy(c->stage_free[i]);
}

static void fill_seqs(const bg_cuda *c, int32_t *host, int seqs)
{
    const bg_steps *s = &c->s;
    int32_t *slot = host + (c->slot_of_seq - c->step), *block0 = host + (c->block0 - c->step);
    int32_t at = 1; /* behind the scratch block */
    for (int i = 0; i < s->n_seqs; i++) {
        const bg_step_seq *q = &s->seqs[i];
        slot[i] = q->slot;
        block0[i] = at;
        if (s->block_tokens) at += (q->pos0 + q->n_tokens + s->block_tokens - 1) / s->block_tokens;
    }
    for (int i = s->n_seqs; i < seqs; i++) {
        slot[i] = -1;
        block0[i] = 0;
    }
}

static void fill_rows(const bg_cuda *c, int32_t *host, int rows)
{
    const bg_steps *s = &c->s;
    int32_t *pos = host + (c->pos - c->step), *seq = host + (c->seq - c->step);
    memcpy(pos, s->row_pos, (size_t)s->n_rows * sizeof *pos);
    memcpy(seq, s->row_seq, (size_t)s->n_rows * sizeof *seq);
    for (int i = s->n_rows; i < rows; i++) { /* a sequence for each */
        pos[i] = 0;
        seq[i] = s->n_seqs + i - s->n_rows;
    }
}

static void fill_outs(const bg_cuda *c, int32_t *host, int outs)
{
    const bg_steps *s = &c->s;
    int32_t *row = host + (c->out_row - c->step), *slot = host + (c->out_slot - c->step);
    int32_t *len = host + (c->out_len - c->step), *gen = host + (c->out_gen - c->step);
    for (int i = 0; i < s->n_out; i++) {
        const int at = s->seqs[s->out_seq[i]].slot;
        row[i] = s->out_row[i];
        slot[i] = at;
        len[i] = s->slots[at].n_tokens;
        gen[i] = s->slots[at].n_generated;
    }
    for (int i = s->n_out; i < outs; i++) {
        row[i] = s->n_rows + i - s->n_out;
        slot[i] = -1;
        len[i] = gen[i] = 0;
    }
}

bg_status bg_cuda_send_step(bg_cuda *c, int rows, int seqs, int outs, bg_error *err)
{
    const bg_steps *s = &c->s;
    const size_t head = lay_out(c, rows, seqs, outs), ints = head + 1 + s->n_block_ids;
    if (ints > c->step_ints)
        return bg_fail(err, BG_INTERNAL, "step: %zu numbers, there is room for %zu", ints,
                       c->step_ints);
    const int i = (int)(c->n_steps % BG_CUDA_STEPS);
    int32_t *host = c->host_steps[i];
    cudaError_t e =
        c->n_steps < BG_CUDA_STEPS ? cudaSuccess : cudaEventSynchronize(c->step_copied[i]);
    if (e != cudaSuccess) return bg_cuda_fail(err, e, "step");
    fill_rows(c, host, rows);
    fill_seqs(c, host, seqs);
    fill_outs(c, host, outs);
    bg_cuda_attention_plan(c, host + (c->att_plan - c->step), rows, seqs);
    host[head] = 0;
    memcpy(host + head + 1, s->blocks, s->n_block_ids * sizeof *host);
    e = cudaMemcpyAsync(c->step, host, ints * sizeof *host, cudaMemcpyHostToDevice, c->stream);
    if (e == cudaSuccess) e = cudaEventRecord(c->step_copied[i], c->stream);
    c->n_steps++;
    return bg_cuda_done(err, e, "step");
}

bg_status bg_cuda_gather_ids(bg_cuda *c, bg_error *err)
{
    bg_cuda_forget(c);
    return bg_cuda_done(err,
                        bgk_gather_ids(c->ids, c->history, c->history_stride, c->slot_of_seq,
                                       c->seq, c->pos, c->rows.rows, c->stream),
                        "token ids");
}

/* ---- the vtable's -----------------------------------------------------------------------------
 */

bg_status bg_cuda_slot_seat(bg_backend *b, int slot, const bg_sampling *s, const int32_t *tokens,
                            int n_tokens, int n_generated, bg_error *err)
{
    bg_cuda *c = (bg_cuda *)b;
    if (!c->has_cache) return bg_fail(err, BG_INTERNAL, "a seat before the KV cache");
    bg_status st = bg_steps_seat(&c->s, slot, s, tokens, n_tokens, n_generated, err);
    if (!st)
        st = bg_cuda_upload(c, c->history + slot * c->history_stride, tokens,
                            (size_t)n_tokens * sizeof *tokens, err);
    if (!st) st = bg_cuda_sample_seat(c, slot, err);
    return st;
}

bg_status bg_cuda_begin_step(bg_backend *b, const bg_batch *batch, bg_error *err)
{
    bg_cuda *c = (bg_cuda *)b;
    c->sampled = c->has_logits = c->ended = false;
    if (!c->has_cache) return bg_fail(err, BG_INTERNAL, "step: before the KV cache");
    bg_status st = bg_cuda_fault_step(c, err);
    if (!st) st = bg_steps_begin(&c->s, batch, err);
    if (!st) st = bg_cuda_send_step(c, c->s.n_rows, c->s.n_seqs, c->s.n_out, err);
    if (!st) st = bg_cuda_gather_ids(c, err);
    return st;
}

int bg_cuda_n_rows(const bg_backend *b)
{
    return ((const bg_cuda *)b)->s.n_rows;
}

int bg_cuda_n_out(const bg_backend *b)
{
    return ((const bg_cuda *)b)->s.n_out;
}
