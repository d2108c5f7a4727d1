/* backend/cuda/attention.c - the KV cache, what goes into it and what attends to it.
 *
 * A cache of 8 or 16 bits with a usual head size is read on tensor cores, in every step the same
 * way: rows that are a sequence's only one in the step one by one, others in tiles. Other caches
 * (float32, for proofs; odd sizes) have kernels that take all rows one by one, in float32. */
#include "backend/cuda/cuda.h"

#include <stdlib.h>
#include <string.h>

/* For parts of softmaxes: one sequence of 128k tokens and 64 heads of 128 values fits. */
enum { PARTS_BYTES = 80 << 20 };

/* ---- the cache ------------------------------------------------------------------------------- */

/* Random values have a deviation of 1, as what norms leave: uniform in +- sqrt(3), or int8 in
 * +- 127, times a scale. */
static const float SPREAD = 1.7320508f, Q8_SCALE = 1.7320508f / 127;
enum { SEED_K, SEED_V, SEED_ROPE, SEED_INDEX };

static cudaError_t random_run(const bg_cuda *c, void *to, bgk_type type, int64_t n, uint64_t seed)
{
    return bgk_random_values(to, type, 1, n, 0, 0, type == BGK_Q8 ? 127 : SPREAD, seed, c->stream);
}

/* A block's int8 latents, its rope keys in halves, its scales: mla.cuh. */
static cudaError_t random_q8_latents(const bg_cuda *c, int64_t n_blocks)
{
    const bgk_cache *m = &c->cache;
    const int64_t bytes = (int64_t)bgk_mla_block_bytes(m), latent = m->block_tokens * m->v_dim,
                  rope = m->block_tokens * (m->k_dim - m->v_dim);
    char *at = m->k;
    cudaError_t e =
        bgk_random_values(at, BGK_Q8, n_blocks, latent, bytes, 0, 127, SEED_K, c->stream);
    at += latent;
    if (e == cudaSuccess)
        e = bgk_random_values(at, BGK_F16, n_blocks, rope, bytes, 0, SPREAD, SEED_ROPE, c->stream);
    at += 2 * rope;
    if (e == cudaSuccess)
        e = bgk_random_values(at, BGK_F32, n_blocks, m->block_tokens, bytes, Q8_SCALE, 0, 0,
                              c->stream);
    return e;
}

/* With random weights a context may be taken as it lies: as different as keys and values of real
 * ones, since equal scores are an indexer's worst case, and the same each time. */
static bg_status random_context(bg_cuda *c, bg_error *err)
{
    const bgk_cache *m = &c->cache;
    const int64_t n_blocks = (int64_t)c->n_layers * m->n_blocks,
                  slots = n_blocks * m->n_kv_heads * m->block_tokens,
                  index_slots = (int64_t)c->index.n_layers * m->n_blocks * m->block_tokens;
    float *const scales[] = {m->k_scale, m->v_scale}; /* NULL but for q8 */
    if (!c->config.dummy) return BG_OK;
    cudaError_t e = c->mla.latent && m->type == BGK_Q8
                        ? random_q8_latents(c, n_blocks)
                        : random_run(c, m->k, m->type, slots * m->k_dim, SEED_K);
    if (e == cudaSuccess && m->v) e = random_run(c, m->v, m->type, slots * m->v_dim, SEED_V);
    for (int i = 0; i < 2 && e == cudaSuccess; i++)
        if (scales[i])
            e = bgk_random_values(scales[i], BGK_F32, 1, slots, 0, Q8_SCALE, 0, 0, c->stream);
    if (e == cudaSuccess && index_slots)
        e = random_run(c, c->index.keys, m->type == BGK_Q8 ? BGK_F16 : m->type,
                       index_slots * c->index.dim, SEED_INDEX);
    return bg_cuda_done(err, e, "random keys and values");
}

bg_status bg_cuda_cache_new(bg_backend *b, const bg_cache_spec *spec, bg_error *err)
{
    static const bgk_type types[] = {[BG_CACHE_F16] = BGK_F16,
                                     [BG_CACHE_BF16] = BGK_BF16,
                                     [BG_CACHE_F32] = BGK_F32,
                                     [BG_CACHE_Q8] = BGK_Q8};
    static const size_t sizes[] = {
        [BG_CACHE_F16] = 2, [BG_CACHE_BF16] = 2, [BG_CACHE_F32] = 4, [BG_CACHE_Q8] = 1};
    bg_cuda *c = (bg_cuda *)b;
    if (c->has_cache) return bg_fail(err, BG_INTERNAL, "a backend has one KV cache");
    const size_t elem = sizes[spec->type];
    const size_t slots = (size_t)spec->n_layers * (size_t)spec->n_blocks *
                         (size_t)spec->n_kv_heads * (size_t)spec->block_tokens;
    bgk_cache *cache = &c->cache;
    *cache = (bgk_cache){.type = types[spec->type],
                         .n_blocks = spec->n_blocks,
                         .n_kv_heads = spec->n_kv_heads,
                         .block_tokens = spec->block_tokens,
                         .k_dim = spec->k_dim,
                         .v_dim = spec->v_dim};
    c->n_layers = spec->n_layers;
    if (spec->latent) {
        bg_status st = bg_cuda_latent_new(c, spec, err);
        if (!st) st = bg_steps_cache(&c->s, spec, err);
        if (!st) st = bg_cuda_step_new(c, err);
        if (!st) st = random_context(c, err);
        c->has_cache = !st;
        return st;
    }
    c->att.fast = bgk_attention_fits(cache);
    if (spec->type == BG_CACHE_Q8 && !c->att.fast)
        return bg_fail(err, BG_ARG,
                       "KV cache: q8 is for heads of 64, 96, 128 or 256 values, K as V; these have "
                       "%d and %d: use f16",
                       spec->k_dim, spec->v_dim);
    bg_status st = bg_cuda_take(c, &cache->k, slots * (size_t)spec->k_dim * elem, "KV cache", err);
    if (!st) st = bg_cuda_take(c, &cache->v, slots * (size_t)spec->v_dim * elem, "KV cache", err);
    if (!st && spec->type == BG_CACHE_Q8) {
        st = bg_cuda_take(c, &cache->k_scale, slots * sizeof(float), "KV cache", err);
        if (!st) st = bg_cuda_take(c, &cache->v_scale, slots * sizeof(float), "KV cache", err);
    }
    if (!st && c->att.fast) {
        c->att.parts_bytes = PARTS_BYTES;
        st = bg_cuda_done(
            err, cudaDeviceGetAttribute(&c->att.n_sms, cudaDevAttrMultiProcessorCount, c->device),
            "processors of the GPU");
        if (!st) st = bg_cuda_take(c, &c->att.parts, PARTS_BYTES, "attention", err);
        if (!st)
            st = bg_cuda_done(err, cudaMemsetAsync(c->att.parts, 0, PARTS_BYTES, c->stream),
                              "attention");
    }
    if (!st) st = bg_steps_cache(&c->s, spec, err);
    if (!st) st = bg_cuda_step_new(c, err);
    if (!st) st = random_context(c, err);
    c->has_cache = !st;
    return st;
}

/* ---- the step's plan ------------------------------------------------------------------------- */

size_t bg_cuda_attention_ints(const bg_cuda *c, int rows, int seqs)
{
    (void)c;
    (void)seqs;
    return (size_t)rows * sizeof(bgk_item) / sizeof(int32_t); /* an item has at least one row */
}

void bg_cuda_attention_plan(bg_cuda *c, int32_t *host, int rows, int seqs)
{
    const bg_steps *s = &c->s;
    const int32_t *block0 = host - (c->att_plan - c->block0);
    bgk_item *item = (bgk_item *)host;
    int n = 0, parts = 0;
    for (int i = 0; i < s->n_seqs; i++) {
        const bg_step_seq *q = &s->seqs[i];
        if (q->n_tokens != 1) continue;
        item[n++] = (bgk_item){q->row0, q->pos0, block0[i], parts};
        parts += q->pos0 / BGK_UNIT + 1; /* latent attention counts its own */
    }
    for (int i = s->n_rows; i < rows; i++) { /* padding: position 0, a sequence for each */
        const int seq = s->n_seqs + i - s->n_rows;
        item[n++] = (bgk_item){i, 0, seq < seqs ? block0[seq] : 0, parts++};
    }
    c->att.n_single = n;
    for (int i = 0; i < s->n_seqs; i++) { /* a sequence's last tile has most to do: it goes first */
        const bg_step_seq *q = &s->seqs[i];
        if (q->n_tokens == 1) continue;
        for (int t = (q->n_tokens - 1) / BGK_TILE_TOKENS * BGK_TILE_TOKENS; t >= 0;
             t -= BGK_TILE_TOKENS) {
            const int left = q->n_tokens - t;
            item[n++] = (bgk_item){q->row0 + t, q->pos0 + t, block0[i],
                                   left < BGK_TILE_TOKENS ? left : BGK_TILE_TOKENS};
        }
    }
    c->att.n_tiles = n - c->att.n_single;
}

_Static_assert((int)BGK_MLA_TOKENS == BGK_TILE_TOKENS, "tiles of one plan");

/* ---- ops ------------------------------------------------------------------------------------- */

bg_status bg_cuda_freq(bg_cuda *c, const bg_rope *rope, const float **out, bg_error *err)
{
    const int n = rope->n_rot / 2;
    for (int i = 0; i < c->n_freqs; i++)
        if (c->freqs[i].host == rope->freq && c->freqs[i].n == n) {
            *out = c->freqs[i].device;
            return BG_OK;
        }
    if (c->n_freqs == (int)(sizeof c->freqs / sizeof *c->freqs))
        return bg_fail(err, BG_INTERNAL, "more rotations than any model has");
    float *device = NULL;
    bg_status st = bg_cuda_take(c, &device, (size_t)n * sizeof *device, "rope", err);
    if (!st) st = bg_cuda_put(device, rope->freq, (size_t)n * sizeof *device, "rope", err);
    if (st) return st;
    c->freqs[c->n_freqs].host = rope->freq;
    c->freqs[c->n_freqs].device = device;
    c->freqs[c->n_freqs++].n = n;
    *out = device;
    return BG_OK;
}

static bg_status check_layer(const bg_cuda *c, int layer, int n_kv, int k_dim, int v_dim,
                             const char *op, bg_error *err)
{
    if (layer >= 0 && layer < c->n_layers && n_kv == c->cache.n_kv_heads &&
        k_dim == c->cache.k_dim && v_dim == c->cache.v_dim)
        return BG_OK;
    return bg_fail(
        err, BG_INTERNAL,
        "op %s: layer %d with %d KV heads of %d and %d does not fit the cache: %d layers, %d "
        "heads of %d and %d",
        op, layer, n_kv, k_dim, v_dim, c->n_layers, c->cache.n_kv_heads, c->cache.k_dim,
        c->cache.v_dim);
}

bg_status bg_cuda_rope_store(bg_backend *b, bg_act *q_out, const bg_act *qkv, const bg_attn_in *p,
                             bg_error *err)
{
    bg_cuda *c = (bg_cuda *)b;
    const int64_t q_cols = (int64_t)p->n_heads * p->head_dim;
    const int64_t cols = q_cols + (int64_t)p->n_kv_heads * (p->head_dim + p->v_dim);
    const float *freq = NULL;
    bg_status st =
        check_layer(c, p->layer, p->n_kv_heads, p->head_dim, p->v_dim, "rope_store", err);
    if (!st) st = bg_cuda_fits(q_out, c->s.n_rows, q_cols, "rope_store", err);
    if (!st) st = bg_cuda_fits(qkv, c->s.n_rows, cols, "rope_store", err);
    if (!st && p->rope) st = bg_cuda_freq(c, p->rope, &freq, err);
    if (st) return st;
    q_out->layout = c->att.fast ? BGK_HALF_ROWS : BGK_ROWS;
    return bg_cuda_done(err,
                        bgk_rope_store(q_out->data, c->att.fast, q_out->cols, qkv->data, qkv->cols,
                                       &c->cache, &c->rows, p->layer, p->n_heads,
                                       p->q_norm ? p->q_norm->data : NULL,
                                       p->k_norm ? p->k_norm->data : NULL, p->norm_eps, freq,
                                       p->rope ? p->rope->n_rot : 0, p->rope && p->rope->neox,
                                       p->rope ? p->rope->mscale : 1.0f, c->stream),
                        "op rope_store");
}

static cudaError_t attend(const bg_cuda *c, const bgk_out *out, const bg_act *q,
                          const bgk_heads *heads)
{
    if (!c->att.fast)
        return bgk_attention(out, q->data, q->cols, &c->cache, &c->rows, heads, c->stream);
    const bgk_att a = {.q = q->data,
                       .q_cols = q->cols,
                       .cache = c->cache,
                       .blocks = c->rows.blocks,
                       .heads = *heads};
    /* A graph is of rows that are their sequences' only ones. */
    const int n_single = c->capturing ? c->s.n_rows : c->att.n_single;
    const int n_tiles = c->capturing ? 0 : c->att.n_tiles;
    const bgk_item *items = (const bgk_item *)c->att_plan;
    cudaError_t e = bgk_attention_single(out, &a, items, n_single, c->att.parts, c->att.parts_bytes,
                                         c->att.n_sms, c->stream);
    if (e == cudaSuccess) e = bgk_attention_tiles(out, &a, items + n_single, n_tiles, c->stream);
    return e;
}

bg_status bg_cuda_attention(bg_backend *b, bg_act *out, const bg_act *q, const bg_attn *p,
                            bg_error *err)
{
    bg_cuda *c = (bg_cuda *)b;
    if (!p->n_heads) return BG_OK;
    bg_status st = check_layer(c, p->layer, p->n_kv_heads, p->head_dim, p->v_dim, "attention", err);
    if (!st) st = bg_cuda_fits(out, c->s.n_rows, (int64_t)p->n_heads * p->v_dim, "attention", err);
    if (!st) st = bg_cuda_fits(q, c->s.n_rows, (int64_t)p->n_heads * p->head_dim, "attention", err);
    if (st) return st;
    const bgk_out to = bg_cuda_out(out);
    const bgk_heads heads = {.layer = p->layer,
                             .n_heads = p->n_heads,
                             .head0 = p->head0,
                             .kv_head0 = p->kv_head0,
                             .group = p->group,
                             .scale = p->scale,
                             .softcap = p->softcap,
                             .window = p->window,
                             .sinks = p->sinks ? p->sinks->data : NULL};
    return bg_cuda_done(err, attend(c, &to, q, &heads), "op attention");
}
