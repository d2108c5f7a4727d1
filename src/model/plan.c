/* model/plan.c - which part of each tensor a rank of a replica holds.
 *
 * Query heads, FFN columns and vocabulary rows are dealt out in contiguous ranges. attn_output and
 * ffn_down are cut along K, where their quant blocks lie, so heads and columns come in units of
 * whole blocks; what does not divide makes shares uneven, and a rank may get none. Where shares
 * are uneven the first ranks get more heads and the last ones more columns. A KV head is held by
 * every rank that has a query head reading it. */
#include "model/arch.h"

static int64_t gcd(int64_t a, int64_t b)
{
    while (b) {
        const int64_t t = a % b;
        a = b;
        b = t;
    }
    return a;
}

static int64_t lcm(int64_t a, int64_t b)
{
    return a / gcd(a, b) * b; // NOLINT(clang-analyzer-core.DivideZero): a and b are positive
}

/* Values along K between which the tensors of a role may be cut, in every layer. */
static int64_t k_block(const bg_desc *d, const bg_gguf *g, bg_role r)
{
    int64_t block = 1;
    for (int l = 0; l < d->n_layers; l++) {
        const bg_tensor *t = bg_role_tensor(g, r, l);
        if (t) block = lcm(block, bg_qtype_get(t->type)->block_values);
    }
    return block;
}

bg_range bg_vocab_range(const bg_desc *d, int rank, int tp)
{
    const int64_t from = (int64_t)d->vocab_size * rank / tp;
    return (bg_range){from, (int64_t)d->vocab_size * (rank + 1) / tp - from};
}

bg_range bg_shard_range(const bg_shard *s, const bg_desc *d, bg_dim dim)
{
    const int64_t dk = d->head_dim, dv = d->v_dim;
    switch (dim) {
    case DIM_Q:
        return (bg_range){s->head0 * dk, s->n_heads * dk};
    case DIM_ATT:
        return (bg_range){s->head0 * dv, s->n_heads * dv};
    case DIM_K:
        return (bg_range){s->kv_head0 * dk, s->n_kv_heads * dk};
    case DIM_V:
        return (bg_range){s->kv_head0 * dv, s->n_kv_heads * dv};
    case DIM_FF:
        return (bg_range){s->ff0, s->n_ff};
    case DIM_VOCAB:
        return (bg_range){s->vocab0, s->n_vocab};
    default:
        return (bg_range){0, bg_dim_size(d, dim)};
    }
}

static uint64_t share_bytes(const bg_shard *s, const bg_desc *d, const bg_tensor *t, bg_role r)
{
    const bg_role_info *info = bg_role_get(r);
    const int64_t cols = bg_shard_range(s, d, info->in).n;
    int64_t rows = bg_shard_range(s, d, info->out).n;
    if (info->out == DIM_QKV) /* its three ranges */
        rows = bg_shard_range(s, d, DIM_Q).n + bg_shard_range(s, d, DIM_K).n +
               bg_shard_range(s, d, DIM_V).n;
    return (uint64_t)rows * bg_qtype_row_bytes(t->type, cols);
}

bg_status bg_shard_plan(bg_shard *s, const bg_desc *d, const bg_gguf *g, int rank, int tp,
                        bg_error *err)
{
    *s = (bg_shard){.rank = rank, .tp = tp};
    if (tp < 1 || tp > 1024 || rank < 0 || rank >= tp)
        return bg_fail(err, BG_ARG, "rank %d of %d: tensor parallelism goes from 1 to 1024", rank,
                       tp);
    const int64_t o_block = k_block(d, g, ROLE_O), heads = lcm(o_block, d->v_dim) / d->v_dim;
    // NOLINTNEXTLINE(clang-analyzer-core.DivideZero): blocks and dimensions are positive
    const int64_t head_units = d->n_heads / heads;
    s->head0 = (int)((head_units * rank + tp - 1) / tp * heads);
    s->n_heads = (int)((head_units * (rank + 1) + tp - 1) / tp * heads) - s->head0;
    if (s->n_heads) {
        const int group = d->n_heads / d->n_kv_heads;
        s->kv_head0 = s->head0 / group;
        s->n_kv_heads = (s->head0 + s->n_heads - 1) / group - s->kv_head0 + 1;
    }

    /* Units of at least 32 columns where they fit keep rows aligned for the kernels. */
    int64_t ff = k_block(d, g, ROLE_DOWN);
    if (d->d_ff % lcm(ff, 32) == 0) ff = lcm(ff, 32);
    const int64_t ff_units = d->d_ff / ff;
    s->ff0 = (int)(ff_units * rank / tp * ff);
    s->n_ff = (int)(ff_units * (rank + 1) / tp * ff) - s->ff0;

    const bg_range vocab = bg_vocab_range(d, rank, tp);
    s->vocab0 = vocab.at;
    s->n_vocab = vocab.n;

    const uint64_t roles = d->arch->need | d->arch->may;
    for (int r = 0; r < N_ROLES; r++)
        for (int l = 0; roles & ROLE(r) && l < (r < ROLE_ATTN_NORM ? 1 : d->n_layers); l++) {
            const bg_tensor *t = bg_role_tensor(g, (bg_role)r, l);
            if (t) s->weight_bytes += share_bytes(s, d, t, (bg_role)r);
        }
    if (d->tied) /* the table is looked up by id, the head is a matrix of its own */
        s->weight_bytes += share_bytes(s, d, bg_role_tensor(g, ROLE_TOKEN_EMBD, 0), ROLE_OUTPUT);
    return BG_OK;
}

uint64_t bg_kv_bytes_per_token(const bg_desc *d, const bg_shard *s, bg_cache_type type)
{
    const uint64_t values = (uint64_t)d->head_dim + (uint64_t)d->v_dim;
    const uint64_t head = type == BG_CACHE_Q8    ? values + 2 * sizeof(float)
                          : type == BG_CACHE_F32 ? values * 4
                                                 : values * 2;
    return (uint64_t)d->n_layers * (uint64_t)s->n_kv_heads * head;
}

uint64_t bg_macs_per_token(const bg_desc *d)
{
    const int64_t model = d->d_model;
    const int64_t layer = model * (bg_dim_size(d, DIM_QKV) + bg_dim_size(d, DIM_ATT) + 3 * d->d_ff);
    return (uint64_t)(layer * d->n_layers + model * d->vocab_size);
}
