/* The CPU backend's latent attention: mla_store writes [latent | rope key] of a position into the
 * cache, as a key of one KV head and its first part once more as that head's value, so that the
 * attention of attend_ops.c reads it; the query of a head is [q_lat | rope part of q]. */
#include <string.h>

#include "backend/cost.h"
#include "backend/cpu/cpu.h"

/* ---- mla_store ------------------------------------------------------------------------------- */

typedef struct store_job {
    bg_cpu *c;
    const bg_mla_in *p;
    const bg_rope_table *table;
    const float *in;
    float *qa;
    int64_t in_cols, qa_cols;
} store_job;

static void store_rows(void *ctx, int thread, int n_threads)
{
    const store_job *job = ctx;
    bg_cpu *c = job->c;
    const bg_mla_in *p = job->p;
    const bg_kernels *k = c->kernels;
    const int n_rot = p->rope->n_rot, half = n_rot / 2;
    float *key = c->head_scratch + (size_t)thread * c->head_floats;
    const int from = (int)((int64_t)c->s.n_rows * thread / n_threads);
    const int to = (int)((int64_t)c->s.n_rows * (thread + 1) / n_threads);
    for (int r = from; r < to; r++) {
        const float *q = job->in + r * job->in_cols, *kv = q + p->q_rank;
        if (p->q_rank)
            k->scale_mul(job->qa + r * job->qa_cols, q, p->q_norm->data,
                         bg_cpu_norm_factor(c, q, p->q_rank, p->norm_eps), p->q_rank);
        k->scale_mul(key, kv, p->kv_norm->data, bg_cpu_norm_factor(c, kv, p->kv_rank, p->norm_eps),
                     p->kv_rank);
        memcpy(key + p->kv_rank, kv + p->kv_rank, (size_t)n_rot * sizeof *key);
        k->rotate(key + p->kv_rank, job->table->cosine + (size_t)r * (size_t)half,
                  job->table->sine + (size_t)r * (size_t)half, n_rot, p->rope->neox);
        bg_cpu_store_kv(c, p->layer, r, 0, key, key);
    }
}

bg_status bg_cpu_mla_store(bg_backend *b, bg_act *qa, const bg_act *in, const bg_mla_in *p,
                           bg_error *err)
{
    bg_cpu *c = (bg_cpu *)b;
    const bg_cache_spec *spec = &c->cache.spec;
    const int n_rot = p->rope ? p->rope->n_rot : -1;
    if (!c->has_cache || !spec->latent || p->layer < 0 || p->layer >= spec->n_layers ||
        p->kv_rank != spec->latent || p->kv_rank + n_rot != spec->k_dim || n_rot % 2)
        return bg_fail(err, BG_INTERNAL,
                       "op mla_store: layer %d, %d latent and %d rotated values do not fit the "
                       "cache: %d layers, %d values of %d",
                       p->layer, p->kv_rank, n_rot, spec->n_layers, spec->latent, spec->k_dim);
    const int64_t cols = (int64_t)p->q_rank + spec->k_dim;
    if (c->s.n_rows > in->max_rows || in->cols < cols ||
        (p->q_rank && (!qa || c->s.n_rows > qa->max_rows || qa->cols < p->q_rank)))
        return bg_fail(err, BG_INTERNAL,
                       "op mla_store: %d rows of %lld columns; %s is [%lld, %lld], %s has %lld "
                       "columns",
                       c->s.n_rows, (long long)cols, in->name, (long long)in->max_rows,
                       (long long)in->cols, qa ? qa->name : "nothing",
                       qa ? (long long)qa->cols : 0);
    if (!p->kv_norm || p->kv_norm->n != p->kv_rank ||
        (p->q_rank && (!p->q_norm || p->q_norm->n != p->q_rank)))
        return bg_fail(err, BG_INTERNAL, "op mla_store: norms have not %d and %d values", p->q_rank,
                       p->kv_rank);
    store_job job = {c,
                     p,
                     bg_cpu_rope_table(c, p->rope),
                     in->data,
                     qa ? qa->data : NULL,
                     in->cols,
                     qa ? qa->cols : 0};
    if (c->s.n_rows >= 4)
        bg_pool_run(c->pool, store_rows, &job);
    else
        store_rows(&job, 0, 1);
    return BG_OK;
}

/* ---- mla_query ------------------------------------------------------------------------------- */

bg_status bg_cpu_mla_query(bg_backend *b, bg_act *q_lat, const bg_linear *k_b, const bg_act *q,
                           bg_error *err)
{
    return b->ops->linear(b, q_lat, k_b, q, ((bg_cpu *)b)->s.n_rows, err);
}

/* ---- mla_attention --------------------------------------------------------------------------- */

bg_status bg_cpu_mla_attention(bg_backend *b, bg_act *out, const bg_act *q_lat, const bg_act *q,
                               const bg_mla *p, bg_error *err)
{
    bg_cpu *c = (bg_cpu *)b;
    const bg_cache_spec *spec = &c->cache.spec;
    const int n_rows = c->s.n_rows;
    if (p->n_heads == 0) return BG_OK;
    if (!c->has_cache || !spec->latent || p->layer < 0 || p->layer >= spec->n_layers ||
        p->kv_rank != spec->latent || p->kv_rank + p->n_rot != spec->k_dim || !p->rope ||
        p->rope->n_rot != p->n_rot || p->n_rot % 2)
        return bg_fail(err, BG_INTERNAL,
                       "op mla_attention: layer %d, %d latent and %d rotated values do not fit the "
                       "cache: %d layers, %d values of %d",
                       p->layer, p->kv_rank, p->n_rot, spec->n_layers, spec->latent, spec->k_dim);
    const int64_t head_cols = p->nope + p->n_rot, lat_cols = (int64_t)p->n_heads * p->kv_rank;
    if (n_rows > q->max_rows || n_rows > q_lat->max_rows || n_rows > out->max_rows ||
        q->cols < p->n_heads * head_cols || q_lat->cols < lat_cols || out->cols < lat_cols)
        return bg_fail(err, BG_INTERNAL,
                       "op mla_attention: %d rows of %d heads; %s is [%lld, %lld], %s [%lld, "
                       "%lld], %s [%lld, %lld]",
                       n_rows, p->n_heads, q->name, (long long)q->max_rows, (long long)q->cols,
                       q_lat->name, (long long)q_lat->max_rows, (long long)q_lat->cols, out->name,
                       (long long)out->max_rows, (long long)out->cols);
    if (p->selected && !c->has_selection)
        return bg_fail(err, BG_INTERNAL, "op mla_attention: no index chose keys in this step");
    bg_cpu_attend_latent(c, out, q_lat, q, p, bg_cpu_rope_table(c, p->rope));
    return BG_OK;
}

void bg_cpu_mla_cost(const bg_backend *b, const bg_mla *p, bg_cost *cost)
{
    const bg_cpu *c = (const bg_cpu *)b;
    bg_mla_cost(&c->s, p, c->cache.spec.index_top_k, c->cache.spec.type == BG_CACHE_F32 ? 4 : 2,
                cost);
}
