#include "job/gpu_sizes.h"

#include <stdio.h>
#include <string.h>

#include "job/floors.h"

/* Kernels' code and printf buffers, parts of softmaxes, small vectors, what allocations are rounded
 * up by. */
static const uint64_t WORKSPACE = UINT64_C(384) << 20;
/* What the driver may still take, when all that is free may be used. */
static const uint64_t LEFT_FREE = UINT64_C(256) << 20;
static const uint64_t NCCL_RESERVE = UINT64_C(1) << 30;
enum {
    GRAPHS = 16,        /* decode steps of so many sizes */
    ROUTED_ROWS = 1024, /* at a time, their router's products in so many parts: */
    ROUTER_PARTS = 32,
    FILL_ROWS = 1024,          /* up to whole tiles */
    SCORES_BYTES = 64 << 20,   /* of an indexer, at a time */
    TILE_BYTES = 64 * 4 + 24,  /* of a tile beside its weights: its rows' scales, its place */
    FAST_FIXED = 160 << 20,    /* a library's workspace and kernels */
    LAUNCHES = 12,             /* of a layer */
    LAUNCH_BYTES = 2048,       /* of one in a graph, on the device */
    SAMPLED_BYTES = 1200 + 72, /* of a row: results, settings */
};

/* Bytes of a chunk of 64 rows and 64 columns in the backend's tiles (kernels/bgk.h). */
static uint64_t chunk_bytes(uint32_t type)
{
    switch (type) {
    case BG_Q4_0:
    case BG_Q4_1:
    case BG_Q4_K:
        return 2560;
    case BG_Q5_0:
    case BG_Q5_1:
    case BG_Q5_K:
        return 3072;
    case BG_Q3_K:
    case BG_Q6_K:
        return 3584;
    case BG_Q8_0:
    case BG_IQ4_NL:
    case BG_IQ4_XS:
    case BG_MXFP4:
        return 4352;
    default:
        return 8192;
    }
}

static bool is_bias(const bg_tensor *t)
{
    const size_t n = strlen(t->cname);
    return n > 5 && strcmp(t->cname + n - 5, ".bias") == 0;
}

static uint64_t padded(uint64_t n, uint64_t to)
{
    return (n + to - 1) / to * to;
}

/* gate and up are stored row by row beside each other, in one format. */
static uint64_t common_chunk_bytes(const bg_gguf *g, const bg_tensor *t)
{
    static const char *const kinds[] = {"", "_exps", "_shexp"};
    const uint64_t own = chunk_bytes(t->type);
    for (int i = 0; i < 6; i++) {
        char name[128], mine[32], others[32];
        snprintf(mine, sizeof mine, ".ffn_%s%s.weight", i % 2 ? "up" : "gate", kinds[i / 2]);
        snprintf(others, sizeof others, ".ffn_%s%s.weight", i % 2 ? "gate" : "up", kinds[i / 2]);
        const char *at = strstr(t->cname, mine);
        if (!at) continue;
        snprintf(name, sizeof name, "%.*s%s", (int)(at - t->cname), t->cname, others);
        const bg_tensor *other = bg_gguf_find_tensor(g, name);
        const uint64_t its = other ? chunk_bytes(other->type) : own;
        if (its == own) continue;
        return own <= 3072 && its <= 3072 ? 3072 : 8192;
    }
    return own;
}

/* Each matrix of a stack (experts, heads) has tiles of its own. */
static uint64_t matrix_bytes(const bg_part *part, uint64_t chunk, bg_compute compute, bool tiled)
{
    const uint64_t n = (uint64_t)part->n, rows = (uint64_t)part->rows;
    const uint64_t k = padded((uint64_t)part->cols, 64), tiles = padded(rows, 64) / 64;
    if (!rows || !k) return 0;
    if (tiled) return n * tiles * (k / 64 * chunk + TILE_BYTES);
    return n * rows * k * (compute == BG_COMPUTE_F32 ? 4 : 2);
}

/* Shared experts that are kept as experts are: the rows or columns of each by themselves. */
static uint64_t merged_bytes(const bg_desc *d, const bg_shard *s, const bg_part *part,
                             uint64_t chunk, bg_compute compute, bool tiled)
{
    bg_part one = *part;
    *(part->cols == d->d_model ? &one.rows : &one.cols) = s->n_ffe;
    one.n = d->n_shared;
    return matrix_bytes(&one, chunk, compute, tiled);
}

/* attn_kv_b becomes what other files have: for each head, k_b, whose transpose it was and which is
 * kept as halves therefore, and v_b. */
static uint64_t kv_b_bytes(const bg_desc *d, const bg_shard *s, uint64_t chunk, bg_compute compute,
                           bool tiled)
{
    const bg_part k_b = {d->kv_rank, d->nope, s->n_heads}, v_b = {d->v_dim, d->kv_rank, s->n_heads};
    return matrix_bytes(&k_b, chunk_bytes(BG_F32), compute, tiled) +
           matrix_bytes(&v_b, chunk, compute, tiled);
}

/* What a rank holds, the whole table of embeddings among it. */
static uint64_t held_bytes(const bg_text_model *m, const bg_shard *s, bg_compute compute,
                           bool tiled)
{
    uint64_t sum = 0;
    for (int64_t i = 0; i < bg_gguf_n_tensors(m->gguf); i++) {
        const bg_tensor *t = bg_gguf_tensor(m->gguf, i);
        bg_part part;
        if (!bg_shard_part(s, &m->desc, m->gguf, t, &part)) continue;
        const bg_kind kind = bg_tensor_kind(t);
        const uint64_t chunk = common_chunk_bytes(m->gguf, t);
        const uint64_t values = (uint64_t)(part.rows * part.cols * part.n);
        if (kind == BG_KIND_EMBEDDING) {
            sum += values * (compute == BG_COMPUTE_F32 ? 4 : 2);
            part.rows = s->n_vocab;
            if (m->desc.tied) sum += matrix_bytes(&part, chunk, compute, tiled);
        } else if (kind == BG_KIND_SHARED && s->merged) {
            sum += merged_bytes(&m->desc, s, &part, chunk, compute, tiled);
        } else if (strstr(t->cname, ".attn_kv_b.")) {
            sum += kv_b_bytes(&m->desc, s, chunk, compute, tiled);
        } else if (kind == BG_KIND_ROUTER && t->n_dims > 1 && tiled) { /* as two halves each */
            sum += 2 * matrix_bytes(&part, chunk_bytes(BG_F16), compute, tiled);
        } else if (kind == BG_KIND_ROUTER || t->n_dims < 2 || is_bias(t)) {
            sum += values * 4;
        } else {
            sum += matrix_bytes(&part, chunk, compute, tiled);
        }
    }
    return sum;
}

/* What experts and an indexer take while they work. */
static uint64_t family_buffers(const bg_desc *d, const bg_shard *s, const bg_memory_plan *p)
{
    const uint64_t rows = (uint64_t)p->max_step_tokens, ctx = (uint64_t)p->max_model_len;
    uint64_t bytes = 0;
    if (d->n_experts) { /* a router's sums by parts, lists, and what fills up experts' rows */
        const uint64_t experts = (uint64_t)d->n_experts, used = (uint64_t)d->n_used;
        const uint64_t wide = 6 * (uint64_t)d->d_model + 2 * padded((uint64_t)s->n_ffe, 64);
        bytes += (rows < ROUTED_ROWS ? rows : ROUTED_ROWS) * ROUTER_PARTS * (experts + 1) * 4;
        bytes += rows * used * 6 + (rows / 1024 + 17) * experts * 4;
        bytes += (7 * experts + FILL_ROWS) * wide;
    }
    if (d->index_heads) { /* queries, the keys that were chosen, scores of some rows */
        const uint64_t heads = (uint64_t)d->index_heads;
        const uint64_t most = SCORES_BYTES / (4 * ctx), scored = most < 1 ? 1 : most;
        bytes += rows * heads * (4 * (uint64_t)d->index_dim + 4);
        bytes += rows * ((uint64_t)d->index_top_k + 1) * 4;
        bytes += (scored < rows ? scored : rows) * ctx * 4;
    }
    return bytes;
}

bg_gpu_bytes bg_gpu_sizes(const bg_text_model *m, const bg_memory_plan *p, const bg_shard *s,
                          bg_compute compute, bool tiled)
{
    const bg_backend_config bc = {.max_tokens = p->max_step_tokens,
                                  .max_seqs = p->max_num_seqs,
                                  .max_out = p->max_num_seqs,
                                  .max_ctx = p->max_model_len,
                                  .vocab_size = m->desc.vocab_size};
    const uint64_t rows = (uint64_t)p->max_step_tokens, seqs = (uint64_t)p->max_num_seqs;
    const uint64_t ctx = (uint64_t)p->max_model_len, vocab = (uint64_t)m->desc.vocab_size;
    const uint64_t tables = seqs * (ctx / (uint64_t)p->block_tokens + 1);
    bg_gpu_bytes b = {.weights = held_bytes(m, s, compute, tiled)};
    b.buffers = bg_gpu_act_bytes(&m->desc, s, &bc, tiled);
    b.buffers += family_buffers(&m->desc, s, p);
    b.buffers += seqs * (ctx + 1) * 4;                /* histories */
    b.buffers += (3 * rows + 16 * seqs + tables) * 4; /* the step */
    b.buffers += seqs * (vocab / 64 + SAMPLED_BYTES);
    b.buffers += (uint64_t)GRAPHS * LAUNCHES * LAUNCH_BYTES * (uint64_t)m->desc.n_layers;
    b.buffers += WORKSPACE;
    return b;
}

bg_gpu_bytes bg_gpu_fast_sizes(const bg_text_model *m, const bg_memory_plan *p, const bg_shard *s)
{
    const uint64_t seqs = (uint64_t)p->max_num_seqs, step = (uint64_t)p->max_step_tokens;
    uint64_t copy = 0, widest = 0;
    for (int64_t i = 0; i < bg_gguf_n_tensors(m->gguf); i++) {
        const bg_tensor *t = bg_gguf_tensor(m->gguf, i);
        const bg_kind kind = bg_tensor_kind(t);
        bg_part part;
        if (t->n_dims != 2 || !bg_shard_part(s, &m->desc, m->gguf, t, &part)) continue;
        if (kind == BG_KIND_ROUTER || is_bias(t)) continue;
        if (kind == BG_KIND_EMBEDDING && !m->desc.tied) continue;
        if (kind == BG_KIND_EMBEDDING) part.rows = s->n_vocab;
        const uint64_t k = padded((uint64_t)part.cols, 64);
        copy += (uint64_t)part.rows * k * 2;
        if (k > widest) widest = k;
    }
    bg_gpu_bytes b = {.weights = copy};
    b.buffers = (step > seqs ? step : seqs) * widest * 2; /* input rows */
    b.buffers += step * padded(2 * (uint64_t)s->n_ff, 8) * 2;
    b.buffers += FAST_FIXED;
    return b;
}

bg_gpu_bytes bg_gpu_needs(const bg_text_model *m, const bg_memory_plan *p, const bg_job *job,
                          const bg_shard *s, bool tiled)
{
    bg_gpu_bytes b = bg_gpu_sizes(m, p, s, (bg_compute)job->compute, tiled);
    if (job->fast_math) {
        const bg_gpu_bytes more = bg_gpu_fast_sizes(m, p, s);
        b.weights += more.weights;
        b.buffers += more.buffers;
    }
    if (p->tp > 1) b.buffers += NCCL_RESERVE;
    return b;
}

bool bg_gpu_tiled(const bg_gpu *g, bg_compute compute)
{
    return compute == BG_COMPUTE_NATIVE && g->capability / 10 == 9;
}

uint64_t bg_gpu_budget(const bg_gpu *g, double utilization)
{
    const uint64_t share = (uint64_t)((double)g->total_bytes * utilization);
    const uint64_t left = g->free_bytes > LEFT_FREE ? g->free_bytes - LEFT_FREE : 0;
    return share < left ? share : left;
}
