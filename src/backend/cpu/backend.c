/* The CPU backend: objects, slots, the step, and the ops that are one call each. */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "backend/cost.h"
#include "backend/cpu/cpu.h"
#include "comm/comm.h"
#include "gguf/gguf.h"

/* ---- memory ---------------------------------------------------------------------------------- */

/* Zeroed memory that costs nothing until it is touched, 64-byte aligned (a page, in fact). */
static bg_status map(bg_cpu *c, void **p, size_t bytes, const char *what, bg_error *err)
{
    *p = NULL;
    if (bytes == 0) bytes = 1;
    if (c->n_maps == c->maps_cap) {
        const size_t cap = c->maps_cap ? 2 * c->maps_cap : 64;
        bg_map *maps = realloc(c->maps, cap * sizeof *maps);
        if (!maps) return bg_fail(err, BG_NOMEM, "%s: out of memory", what);
        c->maps = maps;
        c->maps_cap = cap;
    }
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED)
        return bg_fail(err, BG_NOMEM, "%s: cannot reserve %zu bytes: %s", what, bytes,
                       strerror(errno));
    c->maps[c->n_maps++] = (bg_map){at, bytes};
    *p = at;
    return BG_OK;
}

static bg_status map_array(bg_cpu *c, void *p, size_t n, size_t size, const char *what,
                           bg_error *err)
{
    void *at;
    if (n > SIZE_MAX / 2 / size)
        return bg_fail(err, BG_NOMEM, "%s: %zu values are too many", what, n);
    bg_status st = map(c, &at, n * size, what, err);
    if (!st) memcpy(p, &at, sizeof at); /* into a pointer of any type */
    return st;
}

static void unmap_last(bg_cpu *c)
{
    const bg_map *m = &c->maps[--c->n_maps];
    munmap(m->at, m->bytes);
}

static void cpu_free(bg_backend *b)
{
    bg_cpu *c = (bg_cpu *)b;
    for (size_t i = 0; i < c->n_linears; i++)
        bg_cpu_linear_free(c->linears[i]);
    free(c->linears);
    for (size_t i = 0; i < c->n_embeddings; i++)
        free(c->embeddings[i]);
    free(c->embeddings);
    for (size_t i = 0; i < c->n_routers; i++)
        free(c->routers[i]);
    free(c->routers);
    for (size_t i = 0; i < c->n_experts; i++)
        bg_cpu_experts_free(c->experts[i]);
    free(c->experts);
    free(c->linear_scratch);
    bg_steps_release(&c->s);
    while (c->n_maps > 0)
        unmap_last(c);
    free(c->maps);
    bg_pool_free(c->pool);
    free(c);
}

static uint64_t cpu_memory(const bg_backend *b)
{
    return ((const bg_cpu *)b)->bytes;
}

/* ---- objects --------------------------------------------------------------------------------- */

static bg_status cpu_act_new(bg_backend *b, bg_act *a, const char *name, int64_t max_rows,
                             int64_t cols, bg_error *err)
{
    bg_cpu *c = (bg_cpu *)b;
    *a = (bg_act){0};
    if (max_rows < 0 || cols < 0 || (cols > 0 && max_rows > INT64_MAX / 16 / cols))
        return bg_fail(err, BG_INTERNAL, "%s: [%lld, %lld] is no shape", name, (long long)max_rows,
                       (long long)cols);
    void *data = NULL;
    bg_status st = map_array(c, &data, (size_t)(max_rows * cols), sizeof(float), name, err);
    if (st) return st;
    c->bytes += (uint64_t)(max_rows * cols) * sizeof(float);
    *a = (bg_act){.data = data, .max_rows = max_rows, .cols = cols, .name = name};
    return BG_OK;
}

static bg_status cpu_vec_new(bg_backend *b, bg_vec *v, const char *name, const float *host,
                             int64_t n, bg_error *err)
{
    bg_cpu *c = (bg_cpu *)b;
    *v = (bg_vec){0};
    if (n < 0) return bg_fail(err, BG_INTERNAL, "%s: %lld values", name, (long long)n);
    float *data = NULL;
    bg_status st = map_array(c, &data, (size_t)n, sizeof *data, name, err);
    if (st) return st;
    if (data && n > 0) memcpy(data, host, (size_t)n * sizeof *data);
    c->bytes += (uint64_t)n * sizeof *data;
    *v = (bg_vec){data, n, name};
    return BG_OK;
}

/* Room for one more pointer in the array that *list points to. */
static bg_status grow(void *list, size_t n, size_t *cap, bg_error *err)
{
    void ***array = list; /* pointers to all objects look alike here */
    if (n < *cap) return BG_OK;
    const size_t more = *cap ? 2 * *cap : 64;
    void **p = realloc(*array, more * sizeof *p);
    if (!p) return bg_fail(err, BG_NOMEM, "out of memory for %zu weights", more);
    *array = p;
    *cap = more;
    return BG_OK;
}

static bg_status cpu_linear_new(bg_backend *b, bg_linear **l, const bg_linear_spec *spec,
                                bg_error *err)
{
    bg_cpu *c = (bg_cpu *)b;
    *l = NULL;
    bg_status st = grow(&c->linears, c->n_linears, &c->linears_cap, err);
    bg_linear *made = NULL;
    if (!st) st = bg_cpu_linear_new(&made, spec, c->config.compute, c->isa, c->pool, err);
    if (st) return st;
    c->linears[c->n_linears++] = made; /* freed with the backend from here on */
    const int max_rows =
        c->config.max_tokens > c->config.max_out ? c->config.max_tokens : c->config.max_out;
    const size_t scratch = bg_cpu_linear_scratch(made, max_rows);
    if (scratch > c->linear_scratch_bytes) {
        const size_t bytes = (scratch + 63) / 64 * 64;
        void *p = aligned_alloc(64, bytes);
        if (!p)
            return bg_fail(err, BG_NOMEM, "%s: out of memory for %zu bytes of scratch", spec->name,
                           bytes);
        free(c->linear_scratch);
        c->linear_scratch = p;
        c->bytes += bytes - c->linear_scratch_bytes;
        c->linear_scratch_bytes = bytes;
    }
    c->bytes += bg_cpu_linear_bytes(made);
    *l = made;
    return BG_OK;
}

static bg_status cpu_embedding_new(bg_backend *b, bg_embedding **e, const bg_tensor *t,
                                   bg_error *err)
{
    bg_cpu *c = (bg_cpu *)b;
    *e = NULL;
    const bg_qtype_info *info = bg_qtype_get(t->type);
    if (!info->dequant || t->ne[0] % info->block_values != 0)
        return bg_fail(err, BG_ARG, "%s: type %s with rows of %lld values cannot be looked up",
                       t->cname, info->name ? info->name : "unknown", (long long)t->ne[0]);
    if (t->ne[1] < c->config.vocab_size)
        return bg_fail(err, BG_ARG, "%s: %lld rows for a vocabulary of %d", t->cname,
                       (long long)t->ne[1], c->config.vocab_size);
    bg_status st = grow(&c->embeddings, c->n_embeddings, &c->embeddings_cap, err);
    if (st) return st;
    bg_embedding *made = malloc(sizeof *made);
    if (!made) return bg_fail(err, BG_NOMEM, "%s: out of memory", t->cname);
    *made =
        (bg_embedding){t->data, t->type, t->ne[1], t->ne[0], bg_qtype_row_bytes(t->type, t->ne[0])};
    c->embeddings[c->n_embeddings++] = made;
    *e = made;
    return BG_OK;
}

/* Room for op route with routers of n experts. */
static bg_status grow_route(bg_cpu *c, int n, bg_error *err)
{
    const size_t experts = (size_t)n, n_threads = (size_t)c->config.n_threads;
    if (n <= c->most_experts) return BG_OK;
    bg_status st = map_array(c, &c->route_logits, (size_t)c->config.max_tokens * experts,
                             sizeof(float), "router", err);
    if (!st)
        st = map_array(c, &c->route_scratch, n_threads, sizeof *c->route_scratch, "router", err);
    for (size_t i = 0; !st && i < n_threads; i++) {
        bg_route_scratch *r = &c->route_scratch[i];
        st = map_array(c, &r->choice, experts, sizeof *r->choice, "router", err);
        if (!st) st = map_array(c, &r->group, experts, sizeof *r->group, "router", err);
        if (!st) st = map_array(c, &r->taken, experts, sizeof *r->taken, "router", err);
        if (!st) st = map_array(c, &r->group_used, experts, sizeof *r->group_used, "router", err);
    }
    if (!st) c->most_experts = n;
    return st;
}

static bg_status cpu_router_new(bg_backend *b, bg_router **r, const bg_router_spec *spec,
                                bg_error *err)
{
    bg_cpu *c = (bg_cpu *)b;
    bg_router *made = NULL;
    size_t bytes = 0;
    *r = NULL;
    bg_status st = grow(&c->routers, c->n_routers, &c->routers_cap, err);
    if (!st) st = bg_cpu_router_new(&made, spec, &bytes, err);
    if (st) return st;
    c->routers[c->n_routers++] = made;
    st = grow_route(c, spec->n_experts, err);
    if (st) return st;
    c->bytes += bytes;
    *r = made;
    return BG_OK;
}

static bg_status cpu_experts_new(bg_backend *b, bg_experts **e, const bg_experts_spec *spec,
                                 bg_error *err)
{
    bg_cpu *c = (bg_cpu *)b;
    bg_experts *made = NULL;
    *e = NULL;
    bg_status st = grow(&c->experts, c->n_experts, &c->experts_cap, err);
    if (!st) st = bg_cpu_experts_new(&made, spec, c->config.compute, c->isa, c->pool, err);
    if (st) return st;
    c->experts[c->n_experts++] = made;
    const size_t scratch = bg_cpu_experts_scratch(made, c->config.max_tokens, c->config.n_threads);
    if (scratch > c->moe_scratch_bytes) { /* layers are alike, so this happens once or twice */
        st = map(c, &c->moe_scratch, scratch, spec->name, err);
        if (st) return st;
        c->bytes += scratch - c->moe_scratch_bytes;
        c->moe_scratch_bytes = scratch;
    }
    c->bytes += bg_cpu_experts_bytes(made);
    *e = made;
    return BG_OK;
}

static int round_up(int n)
{
    return (n + BG_LANES - 1) / BG_LANES * BG_LANES;
}

/* The cache of the indexers' keys, and room for what they choose. */
static bg_status make_index(bg_cpu *c, bg_error *err)
{
    bg_cache *cache = &c->cache;
    const bg_cache_spec *spec = &cache->spec;
    const size_t elem = spec->type == BG_CACHE_F32 ? 4 : 2, n_threads = (size_t)c->config.n_threads;
    const size_t top_k = (size_t)spec->index_top_k, max_tokens = (size_t)c->config.max_tokens;
    const size_t blocks = (top_k + (size_t)spec->block_tokens - 1) / (size_t)spec->block_tokens;
    const size_t n = (size_t)spec->n_index * (size_t)spec->n_blocks;
    cache->index_block_bytes = (size_t)spec->index_dim * (size_t)cache->lanes * elem;
    c->chosen_k_bytes = blocks * cache->k_head_bytes;
    c->chosen_v_bytes = blocks * cache->v_head_bytes;
    bg_status st = map_array(c, &cache->index, n, cache->index_block_bytes, "index cache", err);
    if (!st) st = map_array(c, &c->selection, max_tokens * top_k, sizeof(int32_t), "index", err);
    if (!st) st = map_array(c, &c->chosen_k, n_threads, c->chosen_k_bytes, "index", err);
    if (!st) st = map_array(c, &c->chosen_v, n_threads, c->chosen_v_bytes, "index", err);
    if (!st) st = map_array(c, &c->chosen_blocks, blocks, sizeof(int32_t), "index", err);
    const size_t bt = (size_t)spec->block_tokens, lanes = (size_t)cache->lanes;
    c->index_score_floats = ((size_t)c->config.max_ctx + bt - 1) / bt * lanes;
    c->index_head_floats = (bg_cpu_index_head_floats(cache) + 1023) & ~(size_t)1023;
    if (!st)
        st = map_array(c, &c->index_scores, n_threads * c->index_score_floats, sizeof(float),
                       "index", err);
    if (!st)
        st = map_array(c, &c->index_heads, n_threads * c->index_head_floats, sizeof(float), "index",
                       err);
    if (!st) st = map_array(c, &c->index_rows, max_tokens, sizeof(int32_t), "index", err);
    for (size_t i = 0; !st && i < blocks; i++)
        c->chosen_blocks[i] = (int32_t)i;
    c->bytes += n * cache->index_block_bytes + n_threads * (c->chosen_k_bytes + c->chosen_v_bytes) +
                max_tokens * top_k * sizeof(int32_t);
    return st;
}

static bg_status cpu_cache_new(bg_backend *b, const bg_cache_spec *spec, bg_error *err)
{
    bg_cpu *c = (bg_cpu *)b;
    if (c->has_cache) return bg_fail(err, BG_INTERNAL, "a backend has one KV cache");
    if (spec->type == BG_CACHE_Q8)
        return bg_fail(err, BG_ARG, "KV cache: q8 needs a GPU; on the CPU: f16, bf16 or f32");
    if (spec->n_layers < 0 || spec->n_blocks < 1 || spec->block_tokens < 1 ||
        spec->n_kv_heads < 0 || spec->k_dim < 1 || spec->v_dim < 1 || spec->type > BG_CACHE_F32)
        return bg_fail(err, BG_INTERNAL,
                       "KV cache: %d layers, %d blocks of %d, %d heads of %d and %d",
                       spec->n_layers, spec->n_blocks, spec->block_tokens, spec->n_kv_heads,
                       spec->k_dim, spec->v_dim);
    if (spec->latent
            ? spec->n_kv_heads != 1 || spec->v_dim != spec->latent || spec->k_dim < spec->latent
            : spec->n_index != 0)
        return bg_fail(err, BG_INTERNAL,
                       "KV cache: %d latent values of %d and %d, %d heads, %d index layers",
                       spec->latent, spec->k_dim, spec->v_dim, spec->n_kv_heads, spec->n_index);
    if (spec->n_index < 0 || (spec->n_index && (spec->index_dim < 1 || spec->index_top_k < 1)))
        return bg_fail(err, BG_INTERNAL, "KV cache: %d index layers of %d values, %d chosen",
                       spec->n_index, spec->index_dim, spec->index_top_k);
    bg_cache *cache = &c->cache;
    const size_t elem = spec->type == BG_CACHE_F32 ? 4 : 2;
    const size_t n_threads = (size_t)c->config.n_threads;
    cache->spec = *spec;
    cache->lanes = round_up(spec->block_tokens);
    cache->v_stride = round_up(spec->v_dim);
    cache->k_head_bytes = (size_t)spec->k_dim * (size_t)cache->lanes * elem;
    cache->v_head_bytes = (size_t)spec->block_tokens * (size_t)cache->v_stride * elem;
    const size_t heads = (size_t)spec->n_layers * (size_t)spec->n_blocks * (size_t)spec->n_kv_heads;
    c->attend_floats = (bg_attend_scratch(spec->block_tokens, spec->k_dim, spec->v_dim) + 1023) &
                       ~(size_t)1023; /* threads' parts begin on pages of their own */
    c->head_floats = ((size_t)spec->k_dim + 1023) & ~(size_t)1023;

    bg_status st = map_array(c, &cache->k, heads, cache->k_head_bytes, "KV cache", err);
    if (!st) st = map_array(c, &cache->v, heads, cache->v_head_bytes, "KV cache", err);
    if (!st) st = bg_steps_cache(&c->s, spec, err);
    if (!st)
        st = map_array(c, &c->attend_scratch, n_threads * c->attend_floats, sizeof(float),
                       "attention scratch", err);
    if (!st)
        st = map_array(c, &c->head_scratch, n_threads * c->head_floats, sizeof(float),
                       "attention scratch", err);
    c->query_floats =
        spec->latent ? ((size_t)spec->k_dim * BG_ATTEND_ROWS + 1023) & ~(size_t)1023 : 0;
    if (!st)
        st = map_array(c, &c->query_scratch, n_threads * c->query_floats, sizeof(float),
                       "attention scratch", err);
    if (!st && spec->n_index) st = make_index(c, err);
    const int rope_dim = spec->k_dim > spec->index_dim ? spec->k_dim : spec->index_dim;
    const size_t table = (size_t)c->config.max_tokens * (size_t)(rope_dim / 2 + 1);
    for (int i = 0; !st && i < BG_ROPE_TABLES; i++) {
        st = map_array(c, &c->rope[i].cosine, table, sizeof(float), "rope table", err);
        if (!st) st = map_array(c, &c->rope[i].sine, table, sizeof(float), "rope table", err);
    }
    if (st) return st;
    c->bytes += heads * (cache->k_head_bytes + cache->v_head_bytes) +
                n_threads * (c->attend_floats + c->head_floats) * sizeof(float);
    c->has_cache = true;
    return BG_OK;
}

/* ---- slots and the step ---------------------------------------------------------------------- */

static bg_status cpu_slot_seat(bg_backend *b, int slot, const bg_sampling *s, const int32_t *tokens,
                               int n_tokens, int n_generated, bg_error *err)
{
    bg_cpu *c = (bg_cpu *)b;
    return bg_steps_seat(&c->s, slot, s, tokens, n_tokens, n_generated, err);
}

static bg_status cpu_begin_step(bg_backend *b, const bg_batch *batch, bg_error *err)
{
    bg_cpu *c = (bg_cpu *)b;
    c->n_rope = 0;
    c->sampled = c->has_logits = c->has_selection = false;
    return bg_steps_begin(&c->s, batch, err);
}

static int cpu_n_rows(const bg_backend *b)
{
    return ((const bg_cpu *)b)->s.n_rows;
}

static int cpu_n_out(const bg_backend *b)
{
    return ((const bg_cpu *)b)->s.n_out;
}

/* ---- ops ------------------------------------------------------------------------------------- */

static int64_t cpu_linear_rows(const bg_linear *l)
{
    return bg_cpu_linear_rows(l);
}

static void cpu_linear_cost(const bg_backend *b, const bg_linear *l, int64_t n_rows, bg_cost *cost)
{
    (void)b;
    cost->bytes = (double)bg_cpu_linear_bytes(l);
    cost->flops =
        2.0 * (double)n_rows * (double)bg_cpu_linear_rows(l) * (double)bg_cpu_linear_cols(l);
}

static void cpu_attention_cost(const bg_backend *b, const bg_attn *p, bg_cost *cost)
{
    const bg_cpu *c = (const bg_cpu *)b;
    bg_attention_cost(&c->s, p, c->cache.spec.type == BG_CACHE_F32 ? 4 : 2, cost);
}

static bg_status cpu_linear(bg_backend *b, bg_act *out, const bg_linear *l, const bg_act *x,
                            int n_rows, bg_error *err)
{
    bg_cpu *c = (bg_cpu *)b;
    const int64_t rows = bg_cpu_linear_rows(l), cols = bg_cpu_linear_reach(l);
    const int most =
        c->config.max_tokens > c->config.max_out ? c->config.max_tokens : c->config.max_out;
    if (n_rows < 0 || n_rows > most || n_rows > out->max_rows || n_rows > x->max_rows ||
        out->cols < rows || x->cols < cols)
        return bg_fail(err, BG_INTERNAL,
                       "op linear: [%lld, %lld] on %d rows; %s is [%lld, %lld], %s [%lld, %lld]",
                       (long long)rows, (long long)cols, n_rows, out->name,
                       (long long)out->max_rows, (long long)out->cols, x->name,
                       (long long)x->max_rows, (long long)x->cols);
    if (n_rows > 0 && rows > 0)
        bg_cpu_linear_run(l, out->data, out->cols, x->data, x->cols, n_rows, c->linear_scratch,
                          c->pool);
    return BG_OK;
}

static bg_status cpu_moe(bg_backend *b, bg_act *out, const bg_experts *e, const bg_act *route,
                         const bg_act *h, const bg_act *add, bg_error *err)
{
    bg_cpu *c = (bg_cpu *)b;
    const int n_rows = c->s.n_rows, n_used = bg_cpu_experts_used(e);
    const int64_t cols = bg_cpu_experts_cols(e);
    const bg_act *const all[] = {out, h, add ? add : out};
    for (int i = 0; i < 3; i++)
        if (n_rows > all[i]->max_rows || all[i]->cols < cols)
            return bg_fail(err, BG_INTERNAL, "op moe: %s is [%lld, %lld], [%d, %lld] are needed",
                           all[i]->name, (long long)all[i]->max_rows, (long long)all[i]->cols,
                           n_rows, (long long)cols);
    if (n_rows > route->max_rows || route->cols < 2 * n_used + 1)
        return bg_fail(err, BG_INTERNAL, "op moe: %s is [%lld, %lld], [%d, %d] are needed",
                       route->name, (long long)route->max_rows, (long long)route->cols, n_rows,
                       2 * n_used + 1);
    const bg_moe_run run = {.e = e,
                            .out = out->data,
                            .route = route->data,
                            .h = h->data,
                            .add = add ? add->data : NULL,
                            .out_stride = out->cols,
                            .route_stride = route->cols,
                            .h_stride = h->cols,
                            .add_stride = add ? add->cols : 0,
                            .n_rows = n_rows,
                            .scratch = c->moe_scratch,
                            .kernels = c->kernels,
                            .pool = c->pool};
    int row = 0;
    if (bg_cpu_experts_run(&run, &row)) return BG_OK;
    return bg_fail(err, BG_INTERNAL, "op moe: row %d of %s names experts that do not exist", row,
                   route->name);
}

static void cpu_moe_cost(const bg_backend *b, const bg_experts *e, int64_t n_rows, bg_cost *cost)
{
    (void)b;
    bg_cpu_experts_cost(e, n_rows, cost);
}

static bg_status cpu_all_reduce(bg_backend *b, bg_act *x, bg_error *err)
{
    bg_cpu *c = (bg_cpu *)b;
    if (!c->config.comm || bg_comm_size(c->config.comm) == 1) return BG_OK;
    if (c->s.n_rows > x->max_rows)
        return bg_fail(err, BG_INTERNAL, "op all_reduce: %s has %lld rows, the step %d", x->name,
                       (long long)x->max_rows, c->s.n_rows);
    return bg_comm_all_reduce(c->config.comm, x->data, (size_t)c->s.n_rows * (size_t)x->cols, err);
}

/* Every rank has written its rows of the vocabulary in place; fetches those of the others. */
static bg_status gather_logits(bg_cpu *c, const int64_t *rank_rows, bg_error *err)
{
    const int n_ranks = bg_comm_size(c->config.comm), rank = bg_comm_rank(c->config.comm);
    const int64_t vocab = c->config.vocab_size;
    int64_t pad = 0, own0 = 0;
    for (int r = 0; r < n_ranks; r++) {
        pad = rank_rows[r] > pad ? rank_rows[r] : pad;
        own0 += r < rank ? rank_rows[r] : 0;
    }
    for (int from = 0; from < c->s.n_out; from += BG_GATHER_ROWS) {
        const int n = c->s.n_out - from < BG_GATHER_ROWS ? c->s.n_out - from : BG_GATHER_ROWS;
        for (int i = 0; i < n; i++)
            memcpy(c->pack + i * pad, c->logits + (from + i) * vocab + own0,
                   (size_t)rank_rows[rank] * sizeof(float));
        bg_status st =
            bg_comm_all_gather(c->config.comm, c->pack, (size_t)(n * pad), c->gathered, err);
        if (st) return st;
        int64_t at = 0;
        for (int r = 0; r < n_ranks; at += rank_rows[r++])
            for (int i = 0; r != rank && i < n; i++)
                memcpy(c->logits + (from + i) * vocab + at, c->gathered + (r * n + i) * pad,
                       (size_t)rank_rows[r] * sizeof(float));
    }
    return BG_OK;
}

typedef struct softcap_job {
    bg_cpu *c;
    float cap;
} softcap_job;

static void softcap_rows(void *ctx, int thread, int n_threads)
{
    const softcap_job *job = ctx;
    const int64_t vocab = job->c->config.vocab_size, pieces = (vocab + 4095) / 4096;
    const int64_t n = job->c->s.n_out * pieces;
    for (int64_t i = n * thread / n_threads; i < n * (thread + 1) / n_threads; i++) {
        const int64_t row = i / pieces, col = i % pieces * 4096;
        job->c->kernels->softcap(job->c->logits + row * vocab + col,
                                 vocab - col < 4096 ? vocab - col : 4096, job->cap);
    }
}

static bg_status cpu_logits(bg_backend *b, const bg_linear *head, const bg_act *x,
                            const int64_t *rank_rows, float softcap, bg_error *err)
{
    bg_cpu *c = (bg_cpu *)b;
    const int64_t vocab = c->config.vocab_size, rows = bg_cpu_linear_rows(head);
    const int n_ranks = c->config.comm ? bg_comm_size(c->config.comm) : 1;
    const int rank = c->config.comm ? bg_comm_rank(c->config.comm) : 0;
    int64_t first = 0, total = 0;
    for (int r = 0; rank_rows && r < n_ranks; r++) {
        first += r < rank ? rank_rows[r] : 0;
        total += rank_rows[r];
    }
    if (rank_rows ? rows != rank_rows[rank] || total != vocab : rows != vocab)
        return bg_fail(err, BG_INTERNAL,
                       "op logits: rank %d of %d has %lld rows of %lld in all, the "
                       "vocabulary is %lld",
                       rank, n_ranks, (long long)rows, (long long)(rank_rows ? total : rows),
                       (long long)vocab);
    if (c->s.n_out > x->max_rows || x->cols < bg_cpu_linear_cols(head))
        return bg_fail(err, BG_INTERNAL, "op logits: %s is [%lld, %lld], [%d, %lld] are needed",
                       x->name, (long long)x->max_rows, (long long)x->cols, c->s.n_out,
                       (long long)bg_cpu_linear_cols(head));
    c->has_logits = true;
    if (c->s.n_out == 0) return BG_OK;
    bg_act all = {.data = c->logits, .max_rows = c->s.n_out, .cols = vocab, .name = "logits"};
    if (b->check) b->ops->poison(b, &all, c->s.n_out);
    if (rows > 0)
        bg_cpu_linear_run(head, c->logits + first, vocab, x->data, x->cols, c->s.n_out,
                          c->linear_scratch, c->pool);
    bg_status st = rank_rows && n_ranks > 1 ? gather_logits(c, rank_rows, err) : BG_OK;
    if (st) return st;
    if (softcap > 0) {
        softcap_job job = {c, softcap};
        bg_pool_run(c->pool, softcap_rows, &job);
    }
    int64_t row = 0, col = 0;
    if (b->check && !b->ops->all_finite(b, &all, c->s.n_out, vocab, &row, &col))
        return bg_fail(err, BG_INTERNAL, "op logits: logits[%lld, %lld] is not finite after it",
                       (long long)row, (long long)col);
    return BG_OK;
}

static void sample_rows(void *ctx, int thread, int n_threads)
{
    bg_cpu *c = ctx;
    (void)n_threads;
    const int vocab = c->config.vocab_size;
    for (int i; (i = bg_pool_next(c->pool)) < c->s.n_out;) {
        const int slot = c->s.seqs[c->s.out_seq[i]].slot;
        c->results[i].slot = slot;
        bg_sample_row(&c->samplers[thread], c->kernels, c->logits + (size_t)i * (size_t)vocab,
                      vocab, &c->s.slots[slot], &c->results[i]);
    }
}

static bg_status cpu_sample(bg_backend *b, bg_error *err)
{
    bg_cpu *c = (bg_cpu *)b;
    if (!c->has_logits || c->s.all_logits || c->sampled)
        return bg_fail(err, BG_INTERNAL, "op sample: %s",
                       c->sampled        ? "twice in a step"
                       : c->s.all_logits ? "all rows yield logits in this step"
                                         : "before the step's logits");
    if (c->s.n_out > 0) bg_pool_run(c->pool, sample_rows, c);
    bg_steps_reserve(&c->s);
    for (int i = 0; i < c->s.n_out; i++)
        bg_steps_fill(&c->s, c->results[i].slot, c->results[i].token);
    c->sampled = true;
    return BG_OK;
}

static bg_status cpu_fetch(bg_backend *b, bg_sampled *out, int *n, bg_error *err)
{
    bg_cpu *c = (bg_cpu *)b;
    *n = 0;
    if (!c->sampled && c->s.n_out > 0)
        return bg_fail(err, BG_INTERNAL, "fetch: nothing was sampled in this step");
    if (c->sampled && c->s.n_out > 0) memcpy(out, c->results, (size_t)c->s.n_out * sizeof *out);
    *n = c->s.n_out;
    return BG_OK;
}

static bg_status cpu_fetch_logits(bg_backend *b, float *out, bg_error *err)
{
    bg_cpu *c = (bg_cpu *)b;
    if (!c->has_logits) return bg_fail(err, BG_INTERNAL, "fetch_logits: before the step's logits");
    memcpy(out, c->logits, (size_t)c->s.n_out * (size_t)c->config.vocab_size * sizeof *out);
    return BG_OK;
}

static void cpu_poison(bg_backend *b, bg_act *a, int64_t rows)
{
    (void)b;
    float *x = a->data;
    for (int64_t i = 0; i < rows * a->cols; i++)
        x[i] = NAN;
}

static bool cpu_all_finite(bg_backend *b, const bg_act *a, int64_t rows, int64_t cols, int64_t *row,
                           int64_t *col)
{
    (void)b;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < cols; i++)
            if (!isfinite(((const float *)a->data)[r * a->cols + i])) {
                *row = r;
                *col = i;
                return false;
            }
    return true;
}

static void cpu_sync(bg_backend *b)
{
    (void)b; /* every op has ended when it returns */
}

static const bg_ops cpu_ops = {
    .name = "cpu",
    .free = cpu_free,
    .act_new = cpu_act_new,
    .vec_new = cpu_vec_new,
    .linear_new = cpu_linear_new,
    .embedding_new = cpu_embedding_new,
    .router_new = cpu_router_new,
    .experts_new = cpu_experts_new,
    .cache_new = cpu_cache_new,
    .slot_seat = cpu_slot_seat,
    .begin_step = cpu_begin_step,
    .n_rows = cpu_n_rows,
    .n_out = cpu_n_out,
    .embed = bg_cpu_embed,
    .rms_norm = bg_cpu_rms_norm,
    .add = bg_cpu_add,
    .add_rms_norm = bg_cpu_add_rms_norm,
    .linear = cpu_linear,
    .rope_store = bg_cpu_rope_store,
    .attention = bg_cpu_attention,
    .route = bg_cpu_route,
    .moe = cpu_moe,
    .mla_store = bg_cpu_mla_store,
    .mla_query = bg_cpu_mla_query,
    .mla_attention = bg_cpu_mla_attention,
    .index = bg_cpu_index,
    .glu = bg_cpu_glu,
    .all_reduce = cpu_all_reduce,
    .gather_out = bg_cpu_gather_out,
    .logits = cpu_logits,
    .sample = cpu_sample,
    .fetch = cpu_fetch,
    .fetch_logits = cpu_fetch_logits,
    .poison = cpu_poison,
    .all_finite = cpu_all_finite,
    .sync = cpu_sync,
    .linear_rows = cpu_linear_rows,
    .memory = cpu_memory,
    .linear_cost = cpu_linear_cost,
    .attention_cost = cpu_attention_cost,
    .moe_cost = cpu_moe_cost,
    .mla_cost = bg_cpu_mla_cost,
};

/* ---- making one ------------------------------------------------------------------------------ */

static bg_status make_step_arrays(bg_cpu *c, bg_error *err)
{
    const bg_backend_config *f = &c->config;
    const size_t max_seqs = (size_t)f->max_seqs, max_out = (size_t)f->max_out;
    const size_t vocab = (size_t)f->vocab_size, history = (size_t)f->max_ctx + 1;
    bg_status st = bg_steps_init(&c->s, f, true, err);
    if (!st) st = map_array(c, &c->work0, max_seqs + 1, sizeof *c->work0, "step", err);
    if (!st) st = map_array(c, &c->results, max_out, sizeof *c->results, "step", err);
    if (!st) st = map_array(c, &c->logits, max_out * vocab, sizeof(float), "logits", err);
    if (!st && f->comm && bg_comm_size(f->comm) > 1) {
        const size_t pack = BG_GATHER_ROWS * vocab;
        st = map_array(c, &c->pack, pack, sizeof(float), "logits", err);
        if (!st)
            st = map_array(c, &c->gathered, pack * (size_t)bg_comm_size(f->comm), sizeof(float),
                           "logits", err);
    }
    if (!st)
        st = map_array(c, &c->samplers, (size_t)f->n_threads, sizeof *c->samplers, "sampler", err);
    for (int i = 0; !st && i < f->n_threads; i++) {
        bg_sampler *s = &c->samplers[i];
        st = map_array(c, &s->logits, vocab, sizeof *s->logits, "sampler", err);
        if (!st) st = map_array(c, &s->keys, vocab, sizeof *s->keys, "sampler", err);
        if (!st) st = map_array(c, &s->count, vocab, sizeof *s->count, "sampler", err);
        if (!st)
            st = map_array(c, &s->chunk_max, vocab / BG_CHUNK_TOKENS + 1, sizeof *s->chunk_max,
                           "sampler", err);
    }
    if (st) return st;
    c->bytes += max_out * vocab * sizeof(float) + max_seqs * history * sizeof(int32_t);
    return BG_OK;
}

bg_status bg_cpu_backend_new(bg_backend **b, const bg_backend_config *config, bg_error *err)
{
    *b = NULL;
    bg_isa isa = bg_isa_best();
    if (config->isa) {
        if (!bg_isa_by_name(config->isa, &isa))
            return bg_fail(err, BG_ARG, "instruction set '%s': plain, avx2, avx512 or avx512vnni",
                           config->isa);
        if (isa > bg_isa_best())
            return bg_fail(err, BG_ARG, "instruction set %s: this processor has %s at most",
                           config->isa, bg_isa_name(bg_isa_best()));
    }
    if (config->n_threads < 1 || config->max_tokens < 1 || config->max_seqs < 1 ||
        config->max_out < 1 || config->max_ctx < 1 || config->vocab_size < 1)
        return bg_fail(
            err, BG_ARG,
            "backend: %d threads, %d tokens, %d sequences, %d rows of logits, %d positions, "
            "a vocabulary of %d: all must be positive",
            config->n_threads, config->max_tokens, config->max_seqs, config->max_out,
            config->max_ctx, config->vocab_size);
    bg_cpu *c = calloc(1, sizeof *c);
    if (!c) return bg_fail(err, BG_NOMEM, "backend: out of memory");
    c->base.ops = &cpu_ops;
    c->base.check = config->check;
    c->base.profile = config->profile;
    c->config = *config;
    c->isa = isa;
    c->kernels = isa >= BG_ISA_AVX512 ? &bg_kernels_avx512
                 : isa == BG_ISA_AVX2 ? &bg_kernels_avx2
                                      : &bg_kernels_plain;
    bg_status st = bg_pool_new(&c->pool, config->n_threads, config->first_cpu, err);
    if (!st) st = make_step_arrays(c, err);
    if (st) {
        cpu_free(&c->base);
        return st;
    }
    *b = &c->base;
    return BG_OK;
}
