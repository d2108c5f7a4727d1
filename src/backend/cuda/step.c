/* The KV cache, the seats and the present step on the device. */
#include "backend/cuda/cuda.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/f16.h"
#include "gguf/gguf.h"

/* Offsets of the step's arrays in one buffer, so that one copy brings them all. */
static bg_status make_step(bg_cuda *c, bg_error *err)
{
    const size_t t = (size_t)c->config.max_tokens, q = (size_t)c->config.max_seqs;
    const size_t o = (size_t)c->config.max_out;
    c->step_ints = 3 * t + q + o + c->s.blocks_cap;
    bg_status st = bg_cuda_take(c, &c->step, c->step_ints * sizeof *c->step, "step", err);
    if (!st)
        st = bg_cuda_done(
            err, cudaMallocHost((void **)&c->host_step, c->step_ints * sizeof *c->step), "step");
    if (st) return st;
    c->ids = c->step;
    c->pos = c->ids + t;
    c->seq = c->pos + t;
    c->block0 = c->seq + t;
    c->out_row = c->block0 + q;
    c->blocks = c->out_row + o;
    return BG_OK;
}

bg_status bg_cuda_cache_new(bg_backend *b, const bg_cache_spec *spec, bg_error *err)
{
    static const bgk_type types[] = {
        [BG_CACHE_F16] = BGK_F16, [BG_CACHE_BF16] = BGK_BF16, [BG_CACHE_F32] = BGK_F32};
    bg_cuda *c = (bg_cuda *)b;
    if (c->has_cache) return bg_fail(err, BG_INTERNAL, "a backend has one KV cache");
    const size_t elem = spec->type == BG_CACHE_F32 ? 4 : 2;
    const size_t slots = (size_t)spec->n_layers * (size_t)spec->n_blocks *
                         (size_t)spec->n_kv_heads * (size_t)spec->block_tokens;
    c->cache = (bgk_cache){.type = types[spec->type],
                           .n_blocks = spec->n_blocks,
                           .n_kv_heads = spec->n_kv_heads,
                           .block_tokens = spec->block_tokens,
                           .k_dim = spec->k_dim,
                           .v_dim = spec->v_dim};
    c->n_layers = spec->n_layers;
    bg_status st =
        bg_cuda_take(c, &c->cache.k, slots * (size_t)spec->k_dim * elem, "KV cache", err);
    if (!st) st = bg_cuda_take(c, &c->cache.v, slots * (size_t)spec->v_dim * elem, "KV cache", err);
    if (!st) st = bg_steps_cache(&c->s, spec, err);
    if (!st) st = make_step(c, err);
    c->has_cache = !st;
    return st;
}

bg_status bg_cuda_slot_seat(bg_backend *b, int slot, const bg_sampling *s, const int32_t *tokens,
                            int n_tokens, int n_generated, bg_error *err)
{
    bg_cuda *c = (bg_cuda *)b;
    return bg_steps_seat(&c->s, slot, s, tokens, n_tokens, n_generated, err);
}

bg_status bg_cuda_begin_step(bg_backend *b, const bg_batch *batch, bg_error *err)
{
    bg_cuda *c = (bg_cuda *)b;
    c->sampled = c->has_logits = false;
    if (!c->has_cache) return bg_fail(err, BG_INTERNAL, "step: before the KV cache");
    bg_status st = bg_steps_begin(&c->s, batch, err);
    if (st) return st;
    /* The copy before this one has been read: fetch waited for its step. Without a fetch (pieces of
     * prompts) nothing has, so wait here. */
    st = bg_cuda_done(err, cudaStreamSynchronize(c->stream), "step");
    if (st) return st;
    const bg_steps *s = &c->s;
    int32_t *host = c->host_step;
    const ptrdiff_t pos = c->pos - c->step, seq = c->seq - c->step, block0 = c->block0 - c->step;
    const ptrdiff_t out = c->out_row - c->step, blocks = c->blocks - c->step;
    int32_t at = 0;
    for (int i = 0; i < s->n_seqs; i++) {
        const bg_step_seq *q = &s->seqs[i];
        host[block0 + i] = at;
        if (s->block_tokens) at += (q->pos0 + q->n_tokens + s->block_tokens - 1) / s->block_tokens;
    }
    for (int i = 0; i < s->n_rows; i++) {
        const bg_step_seq *q = &s->seqs[s->row_seq[i]];
        host[i] = s->slots[q->slot].tokens[s->row_pos[i]];
        host[pos + i] = s->row_pos[i];
        host[seq + i] = s->row_seq[i];
    }
    memcpy(host + out, s->out_row, (size_t)s->n_out * sizeof *host);
    memcpy(host + blocks, s->blocks, s->n_block_ids * sizeof *host);
    c->rows = (bgk_rows){c->pos, c->seq, c->blocks, c->block0, s->n_rows};
    return bg_cuda_done(err,
                        cudaMemcpyAsync(c->step, host,
                                        ((size_t)blocks + s->n_block_ids) * sizeof *host,
                                        cudaMemcpyHostToDevice, c->stream),
                        "step");
}

int bg_cuda_n_rows(const bg_backend *b)
{
    return ((const bg_cuda *)b)->s.n_rows;
}

int bg_cuda_n_out(const bg_backend *b)
{
    return ((const bg_cuda *)b)->s.n_out;
}
