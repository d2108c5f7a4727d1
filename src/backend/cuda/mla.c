/* backend/cuda/mla.c - multi-head latent attention: the latent cache, the indexer's keys, and ops
 * on them.
 *
 * Latents of 512 + 64 values in 16 bits are read on tensor cores; others by plain kernels. With an
 * indexer, rows are attended to one by one as soon as one of the step may see fewer keys than there
 * are; in graphs, which know no positions, always. Either way a row's bits are the same. */
#include "backend/cuda/cuda.h"

#include "backend/cost.h"

/* For parts of softmaxes: one sequence of 300k tokens and 32 heads fits. */
enum { PARTS_BYTES = 80 << 20 };
/* For scores of the indexer, a slice of the step's rows at a time. */
enum { SCORES_BYTES = 64 << 20 };

/* ---- the cache ------------------------------------------------------------------------------- */

/* Room for the scores of so many rows. */
static int slice_rows(const bg_cuda *c)
{
    const int64_t rows = SCORES_BYTES / ((int64_t)sizeof(float) * c->config.max_ctx);
    return rows < 1 ? 1 : rows < c->config.max_tokens ? (int)rows : c->config.max_tokens;
}

static bg_status index_new(bg_cuda *c, const bg_cache_spec *spec, bg_error *err)
{
    struct bg_cuda_index *x = &c->index;
    const size_t elem = c->cache.type == BGK_F32 ? 4 : 2, rows = (size_t)c->config.max_tokens;
    const size_t keys = (size_t)spec->n_index * (size_t)spec->n_blocks *
                        (size_t)spec->block_tokens * (size_t)spec->index_dim;
    x->n_layers = spec->n_index;
    x->dim = spec->index_dim;
    x->top_k = spec->index_top_k;
    if (x->top_k < 1 || x->dim < 2) return bg_fail(err, BG_INTERNAL, "an indexer of nothing");
    bg_status st = bg_cuda_take(c, &x->keys, keys * elem, "indexer's keys", err);
    if (!st)
        st = bg_cuda_take(c, &x->list, rows * (size_t)x->top_k * sizeof *x->list, "selected keys",
                          err);
    if (!st) st = bg_cuda_take(c, &x->count, rows * sizeof *x->count, "selected keys", err);
    if (!st && c->config.max_ctx > x->top_k)
        st = bg_cuda_take(c, &x->scores,
                          (size_t)slice_rows(c) * (size_t)c->config.max_ctx * sizeof *x->scores,
                          "indexer", err);
    const size_t words = (size_t)BGK_INDEX_FEW * BGK_INDEX_FEW_KEYS * sizeof *x->words;
    if (st || !bgk_index_few_fits(1, c->config.max_ctx, c->att.n_sms)) return st;
    st = bg_cuda_take(c, &x->words, words, "indexer", err);
    if (!st) st = bg_cuda_done(err, cudaMemsetAsync(x->words, 0, words, c->stream), "indexer");
    return st;
}

bg_status bg_cuda_latent_new(bg_cuda *c, const bg_cache_spec *spec, bg_error *err)
{
    bgk_cache *cache = &c->cache;
    if (spec->n_kv_heads != 1 || spec->v_dim != spec->latent)
        return bg_fail(err, BG_INTERNAL, "a latent cache of %d heads of %d and %d values",
                       spec->n_kv_heads, spec->k_dim, spec->v_dim);
    c->mla.latent = true;
    c->mla.fast = bgk_mla_fits(cache);
    if (cache->type == BGK_Q8 && !c->mla.fast)
        return bg_fail(err, BG_ARG,
                       "KV cache: q8 is not there for these latents, of %d and %d "
                       "values: use f16",
                       spec->v_dim, spec->k_dim - spec->v_dim);
    const size_t bytes =
        (size_t)spec->n_layers * (size_t)spec->n_blocks * bgk_mla_block_bytes(cache);
    bg_status st = bg_cuda_take(c, &cache->k, bytes, "KV cache", err);
    if (!st)
        st = bg_cuda_done(
            err, cudaDeviceGetAttribute(&c->att.n_sms, cudaDevAttrMultiProcessorCount, c->device),
            "processors of the GPU");
    if (!st && c->mla.fast) {
        c->att.parts_bytes = PARTS_BYTES;
        st = bg_cuda_take(c, &c->att.parts, PARTS_BYTES, "attention", err);
        if (!st)
            st = bg_cuda_done(err, cudaMemsetAsync(c->att.parts, 0, PARTS_BYTES, c->stream),
                              "attention");
    }
    if (!st && spec->n_index) st = index_new(c, spec, err);
    return st;
}

static bg_status check_layer(const bg_cuda *c, int layer, int rank, int n_rot, const char *op,
                             bg_error *err)
{
    if (c->mla.latent && layer >= 0 && layer < c->n_layers && rank == c->cache.v_dim &&
        rank + n_rot == c->cache.k_dim)
        return BG_OK;
    return bg_fail(err, BG_INTERNAL,
                   "op %s: layer %d with latents of %d and %d does not fit the cache: %d layers of "
                   "%d and %d",
                   op, layer, rank, n_rot, c->n_layers, c->cache.v_dim,
                   c->cache.k_dim - c->cache.v_dim);
}

static bg_status rotation_of(bg_cuda *c, const bg_rope *rope, bgk_rotation *out, bg_error *err)
{
    *out = (bgk_rotation){.n_rot = rope->n_rot, .neox = rope->neox, .mscale = rope->mscale};
    return bg_cuda_freq(c, rope, &out->freq, err);
}

/* ---- ops ------------------------------------------------------------------------------------- */

/* With n products of qa. */
static bg_status store(bg_cuda *c, bg_act *qa, const bg_act *in, const bg_mla_in *p,
                       const bgk_product *products, int n, bg_error *err)
{
    bgk_rotation rope;
    bg_status st = rotation_of(c, p->rope, &rope, err);
    if (st) return st;
    const bgk_out out = p->q_rank ? bg_cuda_out(qa) : (bgk_out){0};
    const float *q_norm = p->q_rank ? p->q_norm->data : NULL;
    cudaError_t e;
    if (n)
        e = bgk_mla_store_linear(products, n, &out, in->data, in->cols, &c->cache, &c->rows,
                                 p->layer, p->q_rank, q_norm, p->kv_norm->data, p->norm_eps, &rope,
                                 c->stream);
    else
        e = bgk_mla_store(&out, in->data, in->cols, &c->cache, &c->rows, p->layer, p->q_rank,
                          q_norm, p->kv_norm->data, p->norm_eps, &rope, c->stream);
    return bg_cuda_done(err, e, "op mla_store");
}

bg_status bg_cuda_mla_store(bg_backend *b, bg_act *qa, const bg_act *in, const bg_mla_in *p,
                            bg_error *err)
{
    bg_cuda *c = (bg_cuda *)b;
    const int64_t cols = (int64_t)p->q_rank + p->kv_rank + p->rope->n_rot;
    bg_status st = check_layer(c, p->layer, p->kv_rank, p->rope->n_rot, "mla_store", err);
    if (!st && p->q_rank) st = bg_cuda_fits(qa, c->s.n_rows, p->q_rank, "mla_store", err);
    if (!st) st = bg_cuda_fits(in, c->s.n_rows, cols, "mla_store", err);
    if (!st) st = bg_cuda_flush(c, err);
    if (st) return st;
    const bool norms = p->q_rank && c->tiled && !b->check && c->s.n_rows;
    c->mla.qa = qa;
    if (!norms || c->s.n_rows > BGK_STORE_LINEAR) {
        if (norms && c->index.n_layers) c->mla.start = BGK_HOLDS;
        return store(c, qa, in, p, NULL, 0, err);
    }
    c->mla.store_waits = true;
    c->mla.in = in;
    c->mla.store = *p;
    return BG_OK;
}

bg_status bg_cuda_flush(bg_cuda *c, bg_error *err)
{
    const int n = c->mla.n_products;
    const bool waits = c->mla.store_waits;
    bg_cuda_forget(c);
    return waits ? store(c, c->mla.qa, c->mla.in, &c->mla.store, c->mla.products, n, err) : BG_OK;
}

void bg_cuda_forget(bg_cuda *c)
{
    c->mla.store_waits = c->mla.chooses = c->mla.early = false;
    c->mla.start = BGK_WAITS;
    c->mla.n_products = 0;
}

/* A product of what mla_store normed, so that another may be beside it, or is. Not *done: it is no
 * such product, or not to be had. */
static bg_status beside(bg_cuda *c, const bgk_out *out, const bg_linear *l, const bg_act *x,
                        bgk_start start, bool *done, bg_error *err)
{
    const int n = c->s.n_rows;
    if (start == BGK_WAITS || !l->n_rows || !l->k ||
        (out->layout == BGK_ROWS && bg_cuda_fast_serves(l, out->data, n)))
        return BG_OK;
    const bgk_out in = bg_cuda_out(x);
    const cudaError_t e =
        bgk_matmul_start(out, &l->tiles, in.data, in.stride, n, BGK_SILU, start, c->stream);
    if (e == cudaErrorNotSupported) return BG_OK;
    *done = true;
    if (start == BGK_HOLDS) c->mla.start = BGK_BESIDE;
    return bg_cuda_done(err, e, l->name);
}

bg_status bg_cuda_mla_stored(bg_cuda *c, const bgk_out *out, const bg_linear *l, const bg_act *x,
                             int n_rows, bool *done, bg_error *err)
{
    const bool normed = x == c->mla.qa && n_rows == c->s.n_rows;
    *done = c->mla.store_waits && normed && l->n_rows && l->k &&
            c->mla.n_products < BGK_STORE_PRODUCTS &&
            bgk_mla_store_linear_fits(&l->tiles, &c->cache, c->mla.store.q_rank, n_rows);
    if (*done) {
        c->mla.products[c->mla.n_products++] = (bgk_product){*out, &l->tiles};
        return BG_OK;
    }
    const bgk_start start = normed ? c->mla.start : BGK_WAITS;
    const bg_status st = bg_cuda_flush(c, err);
    return st ? st : beside(c, out, l, x, start, done, err);
}

bg_status bg_cuda_mla_query(bg_backend *b, bg_act *q_lat, const bg_linear *k_b, const bg_act *q,
                            bg_error *err)
{
    bg_cuda *c = (bg_cuda *)b;
    const int n = c->s.n_rows;
    q_lat->layout = c->tiled ? BGK_HALF_ROWS : BGK_ROWS;
    const bgk_out out = bg_cuda_out(q_lat), in = bg_cuda_out(q);
    if (!c->mla.chooses || !k_b->n_rows || !k_b->k || in.layout != BGK_TILES)
        return bg_cuda_linear(b, q_lat, k_b, q, n, err);
    bg_status st = bg_cuda_fits(q_lat, n, k_b->n_rows, "mla_query", err);
    if (!st) st = bg_cuda_fits(q, n, k_b->n_in, "mla_query", err);
    if (st) return st;
    cudaError_t e = bgk_matmul_early(&out, &k_b->tiles, in.data, in.stride, n, BGK_SILU, c->stream);
    const bool early = e == cudaSuccess;
    if (e == cudaErrorNotSupported)
        e = bgk_matmul_start(&out, &k_b->tiles, in.data, in.stride, n, BGK_SILU, BGK_BESIDE,
                             c->stream);
    if (e == cudaErrorNotSupported) return bg_cuda_linear(b, q_lat, k_b, q, n, err);
    bg_cuda_forget(c);
    c->mla.early = early;
    return bg_cuda_done(err, e, k_b->name);
}

/* Whether some row of the step may see fewer keys than there are. */
static bool selects(const bg_cuda *c)
{
    const int top_k = c->index.top_k;
    if (c->config.max_ctx <= top_k) return false;
    if (c->capturing || !c->s.n_block_ids) return true; /* or the step before a capture */
    for (int i = 0; i < c->s.n_seqs; i++)
        if (c->s.seqs[i].pos0 + c->s.seqs[i].n_tokens > top_k) return true;
    return false;
}

static cudaError_t attend(const bg_cuda *c, const bgk_out *out, const bgk_mla *a, bool selected)
{
    const bgk_selected none = {0}, some = {c->index.list, c->index.count, c->index.top_k};
    if (!c->mla.fast) return bgk_mla_plain(out, a, &c->rows, selected ? &some : &none, c->stream);
    if (selected)
        return bgk_mla_selected(out, a, &c->rows, &some, c->att.parts, c->att.parts_bytes,
                                c->att.n_sms, c->stream);
    /* A graph is of rows that are their sequences' only ones. */
    const int n_single = c->capturing ? c->s.n_rows : c->att.n_single;
    const int n_tiles = c->capturing ? 0 : c->att.n_tiles;
    const bgk_item *items = (const bgk_item *)c->att_plan;
    cudaError_t e = bgk_mla_single(out, a, c->rows.blocks, items, n_single, c->att.parts,
                                   c->att.parts_bytes, c->att.n_sms, c->stream);
    if (e == cudaSuccess)
        e = bgk_mla_tiles(out, a, c->rows.blocks, items + n_single, n_tiles, c->stream);
    return e;
}

bg_status bg_cuda_mla_attention(bg_backend *b, bg_act *out, const bg_act *q_lat, const bg_act *q,
                                const bg_mla *p, bg_error *err)
{
    bg_cuda *c = (bg_cuda *)b;
    if (!p->n_heads) return BG_OK;
    const int64_t rows = c->s.n_rows, cols = (int64_t)p->n_heads * p->kv_rank;
    bgk_mla a = {.q_lat = bg_cuda_out(q_lat),
                 .q = bg_cuda_out(q),
                 .layer = p->layer,
                 .n_heads = p->n_heads,
                 .nope = p->nope,
                 .scale = p->scale,
                 .cache = c->cache,
                 .max_keys = c->config.max_ctx,
                 .early = c->mla.early};
    bg_status st = check_layer(c, p->layer, p->kv_rank, p->n_rot, "mla_attention", err);
    if (!st) st = bg_cuda_fits(out, rows, cols, "mla_attention", err);
    if (!st) st = bg_cuda_fits(q_lat, rows, cols, "mla_attention", err);
    if (!st)
        st =
            bg_cuda_fits(q, rows, (int64_t)p->n_heads * (p->nope + p->n_rot), "mla_attention", err);
    if (!st && p->selected && !c->index.n_layers)
        st = bg_fail(err, BG_INTERNAL, "op mla_attention: selected keys without an indexer");
    if (!st) st = bg_cuda_flush(c, err);
    if (!st) st = rotation_of(c, p->rope, &a.rope, err);
    if (st) return st;
    const bgk_out to = bg_cuda_out(out);
    return bg_cuda_done(err, attend(c, &to, &a, p->selected && selects(c)), "op mla_attention");
}

/* Queries and weights of the indexer on their way to scores: made at the first step, which is none
 * that is captured. */
static bg_status index_scratch(bg_cuda *c, int n_heads, bg_error *err)
{
    struct bg_cuda_index *x = &c->index;
    if (x->n_heads == n_heads) return BG_OK;
    if (x->n_heads)
        return bg_fail(err, BG_INTERNAL, "indexers of %d and %d heads", x->n_heads, n_heads);
    const size_t elem = c->cache.type == BGK_F32 ? 4 : 2;
    const size_t heads = (size_t)c->config.max_tokens * (size_t)n_heads;
    bg_status st = bg_cuda_take(c, &x->q, heads * (size_t)x->dim * elem, "indexer", err);
    if (!st) st = bg_cuda_take(c, &x->w, heads * sizeof *x->w, "indexer", err);
    if (!st) x->n_heads = n_heads;
    return st;
}

static cudaError_t choose(const bg_cuda *c, const bgk_index *a)
{
    const struct bg_cuda_index *x = &c->index;
    const int rows = c->rows.rows, slice = slice_rows(c);
    cudaError_t e = cudaSuccess;
    for (int at = 0; at < rows && e == cudaSuccess; at += slice) {
        const int n = rows - at < slice ? rows - at : slice;
        e = bgk_index_scores(x->scores, c->config.max_ctx, a, x->q, x->w, &c->rows, at, n, x->top_k,
                             c->config.max_ctx, c->att.n_sms, c->stream);
        if (e == cudaSuccess)
            e = bgk_index_select(x->list, x->count, x->scores, c->config.max_ctx, &c->rows, at, n,
                                 x->top_k, c->stream);
    }
    return e;
}

/* In one launch, where it is there and something is to be chosen: a row each of all sequences. */
static cudaError_t choose_at_once(const bg_cuda *c, const bgk_index *a, const bgk_out *iq,
                                  const float *ik, int64_t ik_cols)
{
    const struct bg_cuda_index *x = &c->index;
    const int rows = c->rows.rows, slice = slice_rows(c);
    if (c->s.n_seqs != c->s.n_rows || !selects(c)) return cudaErrorNotSupported;
    cudaError_t e = cudaSuccess;
    for (int at = 0; at < rows && e == cudaSuccess; at += slice)
        e = bgk_index_rows(x->list, x->count, x->scores, c->config.max_ctx, x->words, a, iq, ik,
                           ik_cols, &c->rows, at, rows - at < slice ? rows - at : slice, x->top_k,
                           c->config.max_ctx, c->att.n_sms, c->stream);
    return e;
}

bg_status bg_cuda_index(bg_backend *b, const bg_act *iq, const bg_act *ik, const bg_index *p,
                        bg_error *err)
{
    bg_cuda *c = (bg_cuda *)b;
    const struct bg_cuda_index *x = &c->index;
    if (p->index_layer < 0 || p->index_layer >= x->n_layers || p->dim != x->dim ||
        p->top_k != x->top_k)
        return bg_fail(err, BG_INTERNAL,
                       "op index: layer %d, %d values, top %d do not fit the cache: %d layers, %d "
                       "values, top %d",
                       p->index_layer, p->dim, p->top_k, x->n_layers, x->dim, x->top_k);
    bgk_index a = {.keys = x->keys,
                   .type = c->cache.type == BGK_Q8 ? BGK_F16 : c->cache.type,
                   .n_blocks = c->cache.n_blocks,
                   .block_tokens = c->cache.block_tokens,
                   .layer = p->index_layer,
                   .n_heads = p->n_heads,
                   .dim = p->dim,
                   .k_norm = p->k_norm->data,
                   .k_norm_b = p->k_norm_b ? p->k_norm_b->data : NULL,
                   .eps = p->norm_eps,
                   .scale = p->scale};
    const float *key = (const float *)ik->data + p->ik_col0;
    bg_status st = bg_cuda_fits(iq, c->s.n_rows, (int64_t)p->n_heads * p->dim, "index", err);
    if (!st) st = bg_cuda_fits(ik, c->s.n_rows, p->ik_col0 + p->dim + p->n_heads, "index", err);
    if (!st) st = rotation_of(c, p->rope, &a.rope, err);
    if (!st) st = index_scratch(c, p->n_heads, err);
    if (!st) st = bg_cuda_flush(c, err);
    if (st) return st;
    const bgk_out q = bg_cuda_out(iq);
    cudaError_t e = choose_at_once(c, &a, &q, key, ik->cols);
    if (e == cudaErrorNotSupported) {
        e = bgk_index_store(&a, x->q, x->w, &q, key, ik->cols, &c->rows, c->stream);
        if (e == cudaSuccess && selects(c)) e = choose(c, &a);
    } else {
        c->mla.chooses = !b->check && c->s.n_rows > 0;
    }
    return bg_cuda_done(err, e, "op index");
}

void bg_cuda_mla_cost(const bg_backend *b, const bg_mla *p, bg_cost *cost)
{
    const bg_cuda *c = (const bg_cuda *)b;
    const double row = c->cache.type == BGK_F32
                           ? 4.0 * c->cache.k_dim
                           : (double)bgk_mla_block_bytes(&c->cache) / c->cache.block_tokens;
    bg_mla_cost(&c->s, p, c->index.top_k, row / c->cache.k_dim, cost);
}
