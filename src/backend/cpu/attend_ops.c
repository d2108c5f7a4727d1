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

/* This step's table for a rotation, made at its first use. */
static const bg_rope_table *rope_table(bg_cpu *c, const bg_rope *rope)
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

static void store_rows(void *ctx, int thread, int n_threads)
{
    const store_job *job = ctx;
    bg_cpu *c = job->c;
    const bg_attn_in *p = job->p;
    const bg_cache *cache = &c->cache;
    const bg_cache_type type = cache->spec.type;
    const size_t elem = type == BG_CACHE_F32 ? 4 : 2;
    const int bt = cache->spec.block_tokens, n_kv = p->n_kv_heads;
    float *key = c->head_scratch + (size_t)thread * c->head_floats;
    const int from = (int)((int64_t)c->s.n_rows * thread / n_threads);
    const int to = (int)((int64_t)c->s.n_rows * (thread + 1) / n_threads);
    for (int r = from; r < to; r++) {
        const float *q = job->qkv + r * job->qkv_cols;
        const float *k = q + (int64_t)p->n_heads * p->head_dim;
        const float *v = k + (int64_t)n_kv * p->head_dim;
        const int pos = c->s.row_pos[r];
        const size_t block = (size_t)c->s.seqs[c->s.row_seq[r]].blocks[pos / bt];
        const size_t column = (size_t)(pos % bt);
        const size_t head0 =
            ((size_t)p->layer * (size_t)cache->spec.n_blocks + block) * (size_t)n_kv;
        char *keys = cache->k + head0 * cache->k_head_bytes + column * elem;
        char *values =
            cache->v + head0 * cache->v_head_bytes + column * (size_t)cache->v_stride * elem;
        /* A key is a column: one line of memory a dimension. They come while q is worked on. */
        for (int d = 0; d < n_kv * p->head_dim; d++)
            __builtin_prefetch(keys + (size_t)d * (size_t)cache->lanes * elem, 1);
        for (int h = 0; h < p->n_heads; h++)
            norm_and_rotate(job, r, job->q_out + r * job->q_cols + (int64_t)h * p->head_dim,
                            q + (int64_t)h * p->head_dim, p->q_norm);
        for (int h = 0; h < n_kv; h++) {
            norm_and_rotate(job, r, key, k + (int64_t)h * p->head_dim, p->k_norm);
            c->kernels->store_column(type, keys + (size_t)h * cache->k_head_bytes, cache->lanes,
                                     key, p->head_dim);
            c->kernels->store(type, values + (size_t)h * cache->v_head_bytes,
                              v + (int64_t)h * p->v_dim, p->v_dim);
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
    store_job job = {c,          p,           p->rope ? rope_table(c, p->rope) : NULL,
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
} attend_job;

static int ceil_div(int a, int b)
{
    return (a + b - 1) / b;
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
        n += ceil_div(c->s.seqs[s].n_tokens, job->tile_rows) * job->p->n_kv_heads * job->n_chunks;
    }
    c->work0[c->s.n_seqs] = n;
    return job->n_items = n;
}

static void attend_item(const attend_job *job, int item, float *scratch)
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
    const int n_tiles = ceil_div(seq->n_tokens, job->tile_rows);
    const int row = (n_tiles - 1 - i / p->n_kv_heads) * job->tile_rows; /* the longest first */

    /* Local heads that read this KV head; with uneven shares the first and last may have few. */
    const int first = (p->kv_head0 + kv) * p->group - p->head0, end = first + p->group;
    const int h_end = end < p->n_heads ? end : p->n_heads;
    const int h0 = (first > 0 ? first : 0) + chunk * job->head_chunk;
    const int n_heads = h_end - h0 < job->head_chunk ? h_end - h0 : job->head_chunk;
    if (n_heads <= 0) return;

    const int left = seq->n_tokens - row;
    const size_t head_in_layer =
        (size_t)p->layer * (size_t)cache->spec.n_blocks * (size_t)p->n_kv_heads + (size_t)kv;
    const bg_attend a = {
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
        .scratch = scratch,
    };
    c->kernels->attend(&a);
}

static void attend_items(void *ctx, int thread, int n_threads)
{
    const attend_job *job = ctx;
    (void)n_threads;
    float *scratch = job->c->attend_scratch + (size_t)thread * job->c->attend_floats;
    for (int i; (i = bg_pool_next(job->c->pool)) < job->n_items;)
        attend_item(job, i, scratch);
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

    attend_job job = {c, p, q->data, out->data, q->cols, out->cols, 0, 0, 0, 0};
    job.head_chunk = p->group < BG_ATTEND_ROWS ? p->group : BG_ATTEND_ROWS;
    if (job.head_chunk > p->n_heads) job.head_chunk = p->n_heads;
    job.tile_rows = BG_ATTEND_ROWS / job.head_chunk;
    const int n_threads = bg_pool_threads(c->pool);
    while (count_items(&job) < 4 * n_threads && n_threads > 1 && job.tile_rows > 8)
        job.tile_rows = ceil_div(job.tile_rows, 2);
    while (job.n_items < 3 * n_threads && n_threads > 1 && job.head_chunk > 1) {
        job.head_chunk = ceil_div(job.head_chunk, 2);
        count_items(&job);
    }
    if (job.n_items > 0) bg_pool_run(c->pool, attend_items, &job);
    return BG_OK;
}
