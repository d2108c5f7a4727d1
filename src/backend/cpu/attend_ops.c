/* The CPU backend's ops on the KV cache: rope_store writes it, attention reads it. */
#include <math.h>
#include <string.h>

#include "backend/cpu/cpu.h"

/* ---- rotation -------------------------------------------------------------------------------- */

typedef struct table_job {
    const bg_cpu *c;
    const bg_rope_table *t;
} table_job;

static void fill_table(void *ctx, int thread, int n_threads)
{
    const table_job *job = ctx;
    const bg_rope_table *t = job->t;
    const int n_rows = job->c->s.n_rows, half = t->n_rot / 2;
    for (int r = n_rows * thread / n_threads; r < n_rows * (thread + 1) / n_threads; r++) {
        const float pos = (float)job->c->s.row_pos[r];
        float *cosine = t->cosine + (size_t)r * (size_t)half;
        float *sine = t->sine + (size_t)r * (size_t)half;
        for (int i = 0; i < half; i++) {
            const float angle = pos * t->freq[i];
            cosine[i] = cosf(angle) * t->mscale;
            sine[i] = sinf(angle) * t->mscale;
        }
    }
}

const bg_rope_table *bg_cpu_rope_table(bg_cpu *c, const bg_rope *rope)
{
    int i = 0;
    for (; i < c->n_rope; i++) {
        const bg_rope_table *t = &c->rope[i];
        if (t->freq == rope->freq && t->n_rot == rope->n_rot && t->mscale == rope->mscale) return t;
    }
    if (i == BG_ROPE_TABLES)
        i--; /* more rotations than any model has: made anew each time */
    else
        c->n_rope++;
    bg_rope_table *t = &c->rope[i];
    t->freq = rope->freq;
    t->n_rot = rope->n_rot;
    t->mscale = rope->mscale;
    table_job job = {c, t};
    if (c->s.n_rows >= 32)
        bg_pool_run(c->pool, fill_table, &job);
    else
        fill_table(&job, 0, 1);
    return t;
}

/* ---- rope_store ------------------------------------------------------------------------------ */

typedef struct store_job {
    bg_cpu *c;
    const bg_attn_in *p;
    const bg_rope_table *table; /* NULL: no rotation */
    const float *qkv;
    float *q_out;
    int64_t qkv_cols, q_cols;
} store_job;

static void norm_and_rotate(const store_job *job, int row, float *out, const float *x,
                            const bg_vec *norm)
{
    const bg_attn_in *p = job->p;
    const bg_kernels *k = job->c->kernels;
    if (norm)
        k->scale_mul(out, x, norm->data, bg_cpu_norm_factor(job->c, x, p->head_dim, p->norm_eps),
                     p->head_dim);
    else
        memcpy(out, x, (size_t)p->head_dim * sizeof *out);
    if (job->table) {
        const size_t at = (size_t)row * (size_t)(job->table->n_rot / 2);
        k->rotate(out, job->table->cosine + at, job->table->sine + at, job->table->n_rot,
                  p->rope->neox);
    }
}

/* Where a row's key and value of the first KV head go. */
static void kv_places(const bg_cpu *c, int layer, int row, char **keys, char **values)
{
    const bg_cache *cache = &c->cache;
    const size_t elem = cache->spec.type == BG_CACHE_F32 ? 4 : 2;
    const int bt = cache->spec.block_tokens, pos = c->s.row_pos[row];
    const size_t block = (size_t)c->s.seqs[c->s.row_seq[row]].blocks[pos / bt];
    const size_t column = (size_t)(pos % bt);
    const size_t head0 =
        ((size_t)layer * (size_t)cache->spec.n_blocks + block) * (size_t)cache->spec.n_kv_heads;
    *keys = cache->k + head0 * cache->k_head_bytes + column * elem;
    *values = cache->v + head0 * cache->v_head_bytes + column * (size_t)cache->v_stride * elem;
}

void bg_cpu_store_kv(const bg_cpu *c, int layer, int row, int head, const float *key,
                     const float *value)
{
    const bg_cache *cache = &c->cache;
    char *keys, *values;
    kv_places(c, layer, row, &keys, &values);
    c->kernels->store_column(cache->spec.type, keys + (size_t)head * cache->k_head_bytes,
                             cache->lanes, key, cache->spec.k_dim);
    c->kernels->store(cache->spec.type, values + (size_t)head * cache->v_head_bytes, value,
                      cache->spec.v_dim);
}

static void store_rows(void *ctx, int thread, int n_threads)
{
    const store_job *job = ctx;
    bg_cpu *c = job->c;
    const bg_attn_in *p = job->p;
    const size_t elem = c->cache.spec.type == BG_CACHE_F32 ? 4 : 2;
    const int n_kv = p->n_kv_heads;
    float *key = c->head_scratch + (size_t)thread * c->head_floats;
    const int from = (int)((int64_t)c->s.n_rows * thread / n_threads);
    const int to = (int)((int64_t)c->s.n_rows * (thread + 1) / n_threads);
    for (int r = from; r < to; r++) {
        const float *q = job->qkv + r * job->qkv_cols;
        const float *k = q + (int64_t)p->n_heads * p->head_dim;
        const float *v = k + (int64_t)n_kv * p->head_dim;
        char *keys, *values;
        kv_places(c, p->layer, r, &keys, &values);
        /* A key is a column: one line of memory a dimension. They come while q is worked on. */
        for (int d = 0; d < n_kv * p->head_dim; d++)
            __builtin_prefetch(keys + (size_t)d * (size_t)c->cache.lanes * elem, 1);
        for (int h = 0; h < p->n_heads; h++)
            norm_and_rotate(job, r, job->q_out + r * job->q_cols + (int64_t)h * p->head_dim,
                            q + (int64_t)h * p->head_dim, p->q_norm);
        for (int h = 0; h < n_kv; h++) {
            norm_and_rotate(job, r, key, k + (int64_t)h * p->head_dim, p->k_norm);
            bg_cpu_store_kv(c, p->layer, r, h, key, v + (int64_t)h * p->v_dim);
        }
    }
}

bg_status bg_cpu_rope_store(bg_backend *b, bg_act *q_out, const bg_act *qkv, const bg_attn_in *p,
                            bg_error *err)
{
    bg_cpu *c = (bg_cpu *)b;
    const bg_cache_spec *spec = &c->cache.spec;
    const int64_t q_cols = (int64_t)p->n_heads * p->head_dim;
    const int64_t cols = q_cols + (int64_t)p->n_kv_heads * (p->head_dim + p->v_dim);
    if (!c->has_cache || p->layer < 0 || p->layer >= spec->n_layers ||
        p->n_kv_heads != spec->n_kv_heads ||
        (p->n_kv_heads > 0 && (p->head_dim != spec->k_dim || p->v_dim != spec->v_dim)))
        return bg_fail(
            err, BG_INTERNAL,
            "op rope_store: layer %d with %d KV heads of %d and %d does not fit the cache: "
            "%d layers, %d heads of %d and %d",
            p->layer, p->n_kv_heads, p->head_dim, p->v_dim, spec->n_layers, spec->n_kv_heads,
            spec->k_dim, spec->v_dim);
    if (c->s.n_rows > q_out->max_rows || c->s.n_rows > qkv->max_rows || q_out->cols < q_cols ||
        qkv->cols < cols)
        return bg_fail(
            err, BG_INTERNAL,
            "op rope_store: %d rows; %s is [%lld, %lld] of %lld, %s [%lld, %lld] of %lld",
            c->s.n_rows, q_out->name, (long long)q_out->max_rows, (long long)q_out->cols,
            (long long)q_cols, qkv->name, (long long)qkv->max_rows, (long long)qkv->cols,
            (long long)cols);
    if (p->rope && (p->rope->n_rot > p->head_dim || p->rope->n_rot % 2 || p->rope->n_rot < 0 ||
                    (size_t)p->head_dim > c->head_floats))
        return bg_fail(err, BG_INTERNAL, "op rope_store: %d of %d values of a head rotate",
                       p->rope->n_rot, p->head_dim);
    if ((p->q_norm && p->q_norm->n != p->head_dim) || (p->k_norm && p->k_norm->n != p->head_dim))
        return bg_fail(err, BG_INTERNAL, "op rope_store: head norms have not %d values",
                       p->head_dim);
    store_job job = {c,          p,           p->rope ? bg_cpu_rope_table(c, p->rope) : NULL,
                     qkv->data,  q_out->data, qkv->cols,
                     q_out->cols};
    if (c->s.n_rows >= 4)
        bg_pool_run(c->pool, store_rows, &job);
    else
        store_rows(&job, 0, 1);
    return BG_OK;
}

/* ---- attention ------------------------------------------------------------------------------- */

/* A work item is (sequence, KV head, some of its query heads, some rows); items are shared out as
 * threads become free. How the work is cut changes nobody's bits (attention_body.h). */
typedef struct attend_job {
    bg_cpu *c;
    const bg_attn *p;
    const float *q;
    float *out;
    int64_t q_cols, out_cols;
    int tile_rows, head_chunk, n_chunks, n_items;
    /* Latent attention: the last values of a query come from here, not rotated yet. */
    const bg_mla *mla; /* NULL: not latent */
    const bg_rope_table *table;
    const float *q_rope; /* row r, head h at q_rope + r * rope_cols + h * (nope + n_rot) + nope */
    int64_t rope_cols;
} attend_job;

static int ceil_div(int a, int b)
{
    return (a + b - 1) / b;
}

/* Rows of a sequence that see all keys before them; the others, which come after these, see the
 * ones that the indexer chose, and are tiles of their own. */
static int dense_rows(const attend_job *job, const bg_step_seq *seq)
{
    if (!job->mla || !job->mla->selected) return seq->n_tokens;
    const int n = job->c->selection_top_k - seq->pos0;
    return n < 0 ? 0 : n < seq->n_tokens ? n : seq->n_tokens;
}

static int count_tiles(const attend_job *job, const bg_step_seq *seq)
{
    const int n = dense_rows(job, seq);
    return ceil_div(n, job->tile_rows) + seq->n_tokens - n;
}

/* Fills work0 for the job's tile sizes; returns the number of items. */
static int count_items(attend_job *job)
{
    bg_cpu *c = job->c;
    const int heads = job->p->group < job->p->n_heads ? job->p->group : job->p->n_heads;
    job->n_chunks = ceil_div(heads, job->head_chunk);
    int n = 0;
    for (int s = 0; s < c->s.n_seqs; s++) {
        c->work0[s] = n;
        n += count_tiles(job, &c->s.seqs[s]) * job->p->n_kv_heads * job->n_chunks;
    }
    c->work0[c->s.n_seqs] = n;
    return job->n_items = n;
}

/* Puts the query vectors of an item together: [q_lat | rope part], one after another. */
static void latent_queries(const attend_job *job, int row, int n_rows, int h0, int n_heads,
                           float *to)
{
    const bg_mla *p = job->mla;
    const size_t half = (size_t)(p->n_rot / 2);
    for (int r = row; r < row + n_rows; r++)
        for (int h = h0; h < h0 + n_heads; h++, to += job->p->head_dim) {
            memcpy(to, job->q + r * job->q_cols + (int64_t)h * p->kv_rank,
                   (size_t)p->kv_rank * sizeof *to);
            memcpy(to + p->kv_rank,
                   job->q_rope + r * job->rope_cols + (int64_t)h * (p->nope + p->n_rot) + p->nope,
                   (size_t)p->n_rot * sizeof *to);
            job->c->kernels->rotate(to + p->kv_rank, job->table->cosine + (size_t)r * half,
                                    job->table->sine + (size_t)r * half, p->n_rot, p->rope->neox);
        }
}

/* Columns of n_dims values, elem bytes each and lines apart, next to each other at dst. */
static void gather_columns(char *dst, const char *const src[BG_LANES], int n, int n_dims,
                           size_t line, size_t elem)
{
    for (int d = 0; d < n_dims; d++, dst += line)
        for (int i = 0; i < n; i++)
            if (elem == 2)
                memcpy(dst + 2 * i, src[i] + (size_t)d * line, 2);
            else
                memcpy(dst + 4 * i, src[i] + (size_t)d * line, 4);
}

/* The chosen keys of a row as a cache of their own: blocks 0, 1, ... of the thread's memory. */
static void gather_selected(const attend_job *job, const bg_step_seq *seq, int row,
                            const bg_attend *a, int thread)
{
    bg_cpu *c = job->c;
    const bg_cache *cache = &c->cache;
    const int n = c->selection_top_k, bt = cache->spec.block_tokens;
    const int32_t *pos = c->selection + (size_t)row * (size_t)n;
    const size_t elem = cache->spec.type == BG_CACHE_F32 ? 4 : 2;
    const size_t k_line = (size_t)cache->lanes * elem, v_line = (size_t)cache->v_stride * elem;
    char *k = c->chosen_k + (size_t)thread * c->chosen_k_bytes;
    char *v = c->chosen_v + (size_t)thread * c->chosen_v_bytes;
    for (int i = 0, m; i < n; i += m) {
        const char *keys[BG_LANES];
        const size_t block = (size_t)(i / bt), at = (size_t)(i % bt);
        for (m = 0; m < BG_LANES && i + m < n && (size_t)m + at < (size_t)bt; m++) {
            const size_t from_block = (size_t)seq->blocks[pos[i + m] / bt];
            const size_t from = (size_t)(pos[i + m] % bt);
            keys[m] = a->k + from_block * a->k_block_bytes + from * elem;
            memcpy(v + block * cache->v_head_bytes + (at + (size_t)m) * v_line,
                   a->v + from_block * a->v_block_bytes + from * v_line, v_line);
        }
        gather_columns(k + block * cache->k_head_bytes + at * elem, keys, m, cache->spec.k_dim,
                       k_line, elem);
    }
}

static void use_selected(const bg_cpu *c, bg_attend *a, int thread)
{
    const bg_cache *cache = &c->cache;
    a->k = c->chosen_k + (size_t)thread * c->chosen_k_bytes;
    a->v = c->chosen_v + (size_t)thread * c->chosen_v_bytes;
    a->k_block_bytes = cache->k_head_bytes;
    a->v_block_bytes = cache->v_head_bytes;
    a->blocks = c->chosen_blocks;
    a->pos0 = c->selection_top_k - 1;
}

/* gathered: the row whose chosen keys are in the thread's memory, for other heads' items. */
static void attend_item(const attend_job *job, int item, int thread, int *gathered)
{
    bg_cpu *c = job->c;
    const bg_attn *p = job->p;
    const bg_cache *cache = &c->cache;
    int s = 0; /* the sequence: work0[s] <= item < work0[s + 1] */
    for (int hi = c->s.n_seqs; hi - s > 1;) {
        const int mid = s + (hi - s) / 2;
        if (c->work0[mid] <= item)
            s = mid;
        else
            hi = mid;
    }
    const bg_step_seq *seq = &c->s.seqs[s];
    int i = item - c->work0[s];
    const int chunk = i % job->n_chunks;
    i /= job->n_chunks;
    const int kv = i % p->n_kv_heads;
    const int n_dense = dense_rows(job, seq), dense_tiles = ceil_div(n_dense, job->tile_rows);
    const int tile = count_tiles(job, seq) - 1 - i / p->n_kv_heads; /* the longest first */
    const bool chosen = tile >= dense_tiles;
    const int row = chosen ? n_dense + tile - dense_tiles : tile * job->tile_rows;
    const int left = chosen ? 1 : n_dense - row;

    /* Local heads that read this KV head; with uneven shares the first and last may have few. */
    const int first = (p->kv_head0 + kv) * p->group - p->head0, end = first + p->group;
    const int h_end = end < p->n_heads ? end : p->n_heads;
    const int h0 = (first > 0 ? first : 0) + chunk * job->head_chunk;
    const int n_heads = h_end - h0 < job->head_chunk ? h_end - h0 : job->head_chunk;
    if (n_heads <= 0) return;

    const size_t head_in_layer =
        (size_t)p->layer * (size_t)cache->spec.n_blocks * (size_t)p->n_kv_heads + (size_t)kv;
    bg_attend a = {
        .q = job->q + (seq->row0 + row) * job->q_cols + (int64_t)h0 * p->head_dim,
        .out = job->out + (seq->row0 + row) * job->out_cols + (int64_t)h0 * p->v_dim,
        .q_stride = job->q_cols,
        .out_stride = job->out_cols,
        .n_rows = left < job->tile_rows ? left : job->tile_rows,
        .n_heads = n_heads,
        .pos0 = seq->pos0 + row,
        .k = cache->k + head_in_layer * cache->k_head_bytes,
        .v = cache->v + head_in_layer * cache->v_head_bytes,
        .k_block_bytes = (size_t)p->n_kv_heads * cache->k_head_bytes,
        .v_block_bytes = (size_t)p->n_kv_heads * cache->v_head_bytes,
        .blocks = seq->blocks,
        .block_tokens = cache->spec.block_tokens,
        .block_lanes = cache->lanes,
        .head_dim = p->head_dim,
        .v_dim = p->v_dim,
        .v_stride = cache->v_stride,
        .type = cache->spec.type,
        .scale = p->scale,
        .softcap = p->softcap,
        .window = p->window,
        .sinks = p->sinks ? p->sinks->data + h0 : NULL,
        .scratch = c->attend_scratch + (size_t)thread * c->attend_floats,
    };
    if (job->mla) {
        float *q = c->query_scratch + (size_t)thread * c->query_floats;
        latent_queries(job, seq->row0 + row, a.n_rows, h0, n_heads, q);
        a.q = q;
        a.q_stride = (int64_t)n_heads * p->head_dim;
        if (chosen && *gathered != seq->row0 + row)
            gather_selected(job, seq, *gathered = seq->row0 + row, &a, thread);
        if (chosen) use_selected(c, &a, thread);
    }
    c->kernels->attend(&a);
}

static void attend_items(void *ctx, int thread, int n_threads)
{
    const attend_job *job = ctx;
    (void)n_threads;
    int gathered = -1;
    for (int i; (i = bg_pool_next(job->c->pool)) < job->n_items;)
        attend_item(job, i, thread, &gathered);
}

/* Cuts the work into items, so that all threads have some, and does it. */
static void attend(attend_job *job)
{
    const bg_attn *p = job->p;
    job->head_chunk = p->group < BG_ATTEND_ROWS ? p->group : BG_ATTEND_ROWS;
    if (job->head_chunk > p->n_heads) job->head_chunk = p->n_heads;
    job->tile_rows = BG_ATTEND_ROWS / job->head_chunk;
    const int n_threads = bg_pool_threads(job->c->pool);
    while (count_items(job) < 4 * n_threads && n_threads > 1 && job->tile_rows > 8)
        job->tile_rows = ceil_div(job->tile_rows, 2);
    while (job->n_items < 3 * n_threads && n_threads > 1 && job->head_chunk > 1) {
        job->head_chunk = ceil_div(job->head_chunk, 2);
        count_items(job);
    }
    if (job->n_items > 0) bg_pool_run(job->c->pool, attend_items, job);
}

bg_status bg_cpu_attention(bg_backend *b, bg_act *out, const bg_act *q, const bg_attn *p,
                           bg_error *err)
{
    bg_cpu *c = (bg_cpu *)b;
    const bg_cache_spec *spec = &c->cache.spec;
    if (p->n_heads == 0) return BG_OK;
    if (!c->has_cache || p->layer < 0 || p->layer >= spec->n_layers ||
        p->n_kv_heads != spec->n_kv_heads || p->head_dim != spec->k_dim || p->v_dim != spec->v_dim)
        return bg_fail(
            err, BG_INTERNAL,
            "op attention: layer %d with %d KV heads of %d and %d does not fit the cache: "
            "%d layers, %d heads of %d and %d",
            p->layer, p->n_kv_heads, p->head_dim, p->v_dim, spec->n_layers, spec->n_kv_heads,
            spec->k_dim, spec->v_dim);
    if (p->group < 1 || p->head0 / p->group < p->kv_head0 ||
        (p->head0 + p->n_heads - 1) / p->group >= p->kv_head0 + p->n_kv_heads)
        return bg_fail(err, BG_INTERNAL,
                       "op attention: heads %d..%d in groups of %d read KV heads beyond %d..%d",
                       p->head0, p->head0 + p->n_heads - 1, p->group, p->kv_head0,
                       p->kv_head0 + p->n_kv_heads - 1);
    if (c->s.n_rows > q->max_rows || c->s.n_rows > out->max_rows ||
        q->cols < (int64_t)p->n_heads * p->head_dim || out->cols < (int64_t)p->n_heads * p->v_dim)
        return bg_fail(
            err, BG_INTERNAL,
            "op attention: %d rows of %d heads of %d and %d; %s is [%lld, %lld], %s [%lld, "
            "%lld]",
            c->s.n_rows, p->n_heads, p->head_dim, p->v_dim, q->name, (long long)q->max_rows,
            (long long)q->cols, out->name, (long long)out->max_rows, (long long)out->cols);
    if (p->sinks && p->sinks->n < p->n_heads)
        return bg_fail(err, BG_INTERNAL, "op attention: %lld sinks for %d heads",
                       (long long)p->sinks->n, p->n_heads);

    attend_job job = {
        .c = c, .p = p, .q = q->data, .out = out->data, .q_cols = q->cols, .out_cols = out->cols};
    attend(&job);
    return BG_OK;
}

void bg_cpu_attend_latent(bg_cpu *c, bg_act *out, const bg_act *q_lat, const bg_act *q,
                          const bg_mla *p, const bg_rope_table *table)
{
    const bg_attn as_heads = {.layer = p->layer,
                              .n_heads = p->n_heads,
                              .n_kv_heads = 1,
                              .group = p->n_heads,
                              .head_dim = c->cache.spec.k_dim,
                              .v_dim = p->kv_rank,
                              .scale = p->scale};
    attend_job job = {.c = c,
                      .p = &as_heads,
                      .q = q_lat->data,
                      .out = out->data,
                      .q_cols = q_lat->cols,
                      .out_cols = out->cols,
                      .mla = p,
                      .table = table,
                      .q_rope = q->data,
                      .rope_cols = q->cols};
    attend(&job);
}
