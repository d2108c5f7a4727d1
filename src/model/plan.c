/* model/plan.c - which part of each tensor a rank of a replica holds.
 *
 * Query heads, FFN columns and vocabulary rows are dealt out in contiguous ranges. attn_output and
 * ffn_down are cut along K, where their quant blocks lie, so heads and columns come in units of
 * whole blocks; what does not divide makes shares uneven, and a rank may get none. Where shares
 * are uneven the first ranks get more heads and the last ones more columns. A KV head is held by
 * every rank that has a query head reading it. Experts are
 * cut as an FFN is, each of them, so that all ranks have the same work whatever is chosen. */
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
    case DIM_FFE:
        return (bg_range){s->ffe0, s->n_ffe};
    case DIM_FFS:
        return (bg_range){s->ffs0, s->n_ffs};
    case DIM_HEADS:
        return (bg_range){s->head0, s->n_heads};
    case DIM_KV_B:
        return (bg_range){s->head0 * (d->nope + dv), s->n_heads * (d->nope + dv)};
    case DIM_VOCAB:
        return (bg_range){s->vocab0, s->n_vocab};
    default:
        return (bg_range){0, bg_dim_size(d, dim)};
    }
}

/* How much of a dimension a rank has, in whatever pieces. */
static int64_t share_of(const bg_shard *s, const bg_desc *d, bg_dim dim)
{
    switch (dim) {
    case DIM_QKV:
        return bg_shard_range(s, d, DIM_Q).n + bg_shard_range(s, d, DIM_K).n +
               bg_shard_range(s, d, DIM_V).n;
    case DIM_FF2:
        return 2 * (int64_t)s->n_ff;
    case DIM_FFE2:
        return 2 * (int64_t)s->n_ffe;
    case DIM_FFS:
        return s->merged ? d->n_shared * (int64_t)s->n_ffe : s->n_ffs;
    default:
        return bg_shard_range(s, d, dim).n;
    }
}

static bg_part part_of(const bg_shard *s, const bg_desc *d, bg_role r)
{
    const bg_role_info *info = bg_role_get(r);
    return (bg_part){share_of(s, d, info->out), share_of(s, d, info->in),
                     share_of(s, d, info->depth)};
}

bool bg_shard_part(const bg_shard *s, const bg_desc *d, const bg_gguf *g, const bg_tensor *t,
                   bg_part *part)
{
    bool known;
    const bg_role r = bg_tensor_role(d, g, t, &known);
    if (r == N_ROLES) return false;
    *part = part_of(s, d, r);
    return true;
}

static uint64_t share_bytes(const bg_shard *s, const bg_desc *d, const bg_tensor *t, bg_role r)
{
    const bg_part p = part_of(s, d, r);
    return (uint64_t)p.rows * (uint64_t)p.n * bg_qtype_row_bytes(t->type, p.cols);
}

/* The rank's columns of n that are cut in units of `unit`. */
static bg_range cut(int64_t n, int64_t unit, int rank, int tp)
{
    // NOLINTNEXTLINE(clang-analyzer-core.DivideZero): units are positive
    const int64_t units = n / unit, from = units * rank / tp * unit;
    return (bg_range){from, units * (rank + 1) / tp * unit - from};
}

/* Columns between which a width n may be cut: whole blocks of r's tensors; units of at least 32
 * columns where they fit keep rows aligned for the kernels. */
static int64_t width_unit(const bg_desc *d, const bg_gguf *g, bg_role r, int64_t n)
{
    const int64_t block = k_block(d, g, r), wide = lcm(block, 32);
    return n % wide == 0 ? wide : block;
}

/* Shared experts of the width of the others are cut with them, if their blocks allow it and the
 * shares of the others do not get worse. */
static void plan_experts(bg_shard *s, const bg_desc *d, const bg_gguf *g)
{
    int64_t unit = width_unit(d, g, ROLE_DOWN_EXPS, d->d_ff_expert);
    if (d->n_shared && d->d_ff_shared == (int64_t)d->n_shared * d->d_ff_expert &&
        !bg_role_tensor(g, ROLE_ROUTER_SHEXP, d->n_dense)) {
        const int64_t both = lcm(unit, k_block(d, g, ROLE_DOWN_SHEXP));
        s->merged =
            d->d_ff_expert % both == 0 && (both == unit || d->d_ff_expert / both % s->tp == 0);
        if (s->merged) unit = both;
    }
    const bg_range e = cut(d->d_ff_expert, unit, s->rank, s->tp);
    s->ffe0 = (int)e.at;
    s->n_ffe = (int)e.n;
    if (!d->n_shared || s->merged) return;
    const int64_t shared = width_unit(d, g, ROLE_DOWN_SHEXP, d->d_ff_shared);
    const bg_range f = cut(d->d_ff_shared, shared, s->rank, s->tp);
    s->ffs0 = (int)f.at;
    s->n_ffs = (int)f.n;
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

    if (d->kv_rank) s->kv_head0 = 0, s->n_kv_heads = 1; /* the latent row, which all heads read */

    const bg_range ff = cut(d->d_ff, width_unit(d, g, ROLE_DOWN, d->d_ff), rank, tp);
    s->ff0 = (int)ff.at;
    s->n_ff = (int)ff.n;
    if (d->n_experts) plan_experts(s, d, g);

    const bg_range vocab = bg_vocab_range(d, rank, tp);
    s->vocab0 = vocab.at;
    s->n_vocab = vocab.n;

    for (int l = 0; l < d->n_layers; l++) {
        const uint64_t roles = bg_roles_of(d, g, l).may;
        for (int r = l ? ROLE_ATTN_NORM : 0; r < N_ROLES; r++) {
            const bg_tensor *t = roles & ROLE(r) ? bg_role_tensor(g, (bg_role)r, l) : NULL;
            if (t) s->weight_bytes += share_bytes(s, d, t, (bg_role)r);
        }
    }
    if (d->tied) /* the table is looked up by id, the head is a matrix of its own */
        s->weight_bytes += share_bytes(s, d, bg_role_tensor(g, ROLE_TOKEN_EMBD, 0), ROLE_OUTPUT);
    return BG_OK;
}

uint64_t bg_kv_bytes_per_token(const bg_desc *d, const bg_shard *s, bg_cache_type type)
{
    const uint64_t size = type == BG_CACHE_F32 ? 4 : type == BG_CACHE_Q8 ? 1 : 2;
    uint64_t index = 0;
    if (!d->kv_rank) {
        const uint64_t values = (uint64_t)d->head_dim + (uint64_t)d->v_dim;
        const uint64_t scales = type == BG_CACHE_Q8 ? 2 * sizeof(float) : 0;
        return (uint64_t)d->n_layers * (uint64_t)s->n_kv_heads * (values * size + scales);
    }
    for (int l = 0; l < d->n_layers && d->index_heads; l++)
        if (bg_layer_indexed(d, l)) index += (uint64_t)d->index_dim * (size == 4 ? 4 : 2);
    /* In 8 bits: the latent with a scale, and the rope key in 16. */
    const uint64_t latent = (uint64_t)d->kv_rank, rope = (uint64_t)d->n_rot;
    const uint64_t row = size == 1 ? latent + 2 * rope + sizeof(float) : (latent + rope) * size;
    return (uint64_t)d->n_layers * row + index;
}

uint64_t bg_macs_per_token(const bg_desc *d)
{
    const int64_t model = d->d_model, heads = d->n_heads;
    const int64_t q = (d->q_rank ? d->q_rank : model) * bg_dim_size(d, DIM_Q);
    const int64_t mla = model * (d->q_rank + d->kv_rank + d->n_rot) + q +
                        heads * d->kv_rank * (d->nope + d->v_dim) + heads * d->v_dim * model;
    const int64_t index =
        d->q_rank * bg_dim_size(d, DIM_INDEX_Q) + model * ((int64_t)d->index_dim + d->index_heads);
    const int64_t plain = model * (bg_dim_size(d, DIM_QKV) + bg_dim_size(d, DIM_ATT));
    const int64_t dense = 3 * model * d->d_ff;
    const int64_t experts =
        model * (d->n_experts + 3 * ((int64_t)d->n_used * d->d_ff_expert + d->d_ff_shared));
    int64_t sum = model * d->vocab_size;
    for (int l = 0; l < d->n_layers; l++) {
        sum += d->kv_rank ? mla : plain;
        sum += bg_layer_moe(d, l) ? experts : dense;
        if (d->index_heads && bg_layer_indexed(d, l)) sum += index;
    }
    return (uint64_t)sum;
}
