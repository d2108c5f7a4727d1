/* kernels/mla_plain.cu - attention over latents in float32, for what mla.cu does not take: float32
 * caches (proofs), other sizes, GPUs other than Hopper.
 *
 * Requires: k_dim and v_dim multiples of 4, k_dim <= 1024, v_dim <= 512; not Q8.
 *
 * Launch: a block of 128 (four warps) a row and head; graph-capturable, may start early.
 *
 * Order: keys (those of the list) by 32 from the first on; chunk c is warp c % 4's; the four
 * partial softmaxes are merged in the order of the warps.
 *
 * Proof: tests/gpu/test_mla.c; tests/unit/model/test_golden on a GPU (whole models). */
#include "mla.cuh"

namespace
{

constexpr int BLOCK = 128, WARPS = BLOCK / 32, MOST_K = 1024, MOST_V = 512;

struct plain_args {
    bgk_out out;
    bgk_mla a;
    bgk_rows rows;
    bgk_selected s;
    bool panels;
    int64_t block_bytes;
};

/* A key's row; value i of it. */
template <typename T> struct latent_row {
    const T *block;
    int token;

    __device__ float at(const plain_args &a, int i) const
    {
        const bgk_cache &c = a.a.cache;
        if (sizeof(T) == 2 && a.panels)
            return wide(*(const T *)((const char *)block + mla_piece(c.block_tokens, token, i / 8) +
                                     i % 8 * 2));
        return wide(block[(int64_t)token * c.k_dim + i]);
    }
};

template <typename T>
__device__ latent_row<T> row_at(const plain_args &a, const int32_t *table, int pos)
{
    const bgk_cache &c = a.a.cache;
    return {(const T *)mla_block(c, a.a.layer, table[pos / c.block_tokens], a.block_bytes),
            pos % c.block_tokens};
}

template <typename T> __global__ void __launch_bounds__(BLOCK) attend_plain(plain_args a)
{
    __shared__ float q[MOST_K], acc_of[WARPS][MOST_V], max_of[WARPS], sum_of[WARPS];
    const bgk_mla &x = a.a;
    const int row = blockIdx.x, head = blockIdx.y, dim = x.cache.k_dim, rank = x.cache.v_dim;
    const int n_rot = dim - rank, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int pos = a.rows.pos[row];
    ptx_wait_prior();
    ptx_let_next_start();
    if (pos < 0) return;
    const int32_t *table = a.rows.blocks + a.rows.block0[a.rows.seq[row]];
    const int count = a.s.list ? a.s.count[row] : -1, n_keys = count < 0 ? pos + 1 : count;
    const int32_t *list = count < 0 ? nullptr : a.s.list + (int64_t)row * a.s.top_k;
    for (int i = threadIdx.x; i < rank; i += BLOCK)
        q[i] = mla_value(x.q_lat, row, head * rank + i);
    for (int i = threadIdx.x; i < n_rot / 2; i += BLOCK) {
        const int lo = x.rope.neox ? i : 2 * i, hi = x.rope.neox ? i + n_rot / 2 : 2 * i + 1;
        const int col = head * (x.nope + n_rot) + x.nope;
        const float2 v = mla_turn(mla_value(x.q, row, col + lo), mla_value(x.q, row, col + hi), pos,
                                  x.rope.freq[i], x.rope.mscale);
        q[rank + lo] = v.x;
        q[rank + hi] = v.y;
    }
    __syncthreads();
    float acc[MOST_V / 32];
    float most = -INFINITY, sum = 0;
#pragma unroll
    for (int i = 0; i < MOST_V / 32; i++)
        acc[i] = 0;
    for (int chunk = warp; chunk * 32 < n_keys; chunk += WARPS) {
        const int key = chunk * 32 + lane;
        float score = -INFINITY;
        if (key < n_keys) {
            const latent_row<T> k = row_at<T>(a, table, list ? list[key] : key);
            score = 0;
            for (int i = 0; i < dim; i++)
                score = __fmaf_rn(q[i], k.at(a, i), score);
            score = __fmul_rn(score, x.scale);
        }
        float top = score;
        for (int d = 16; d > 0; d /= 2)
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, d));
        const float now = fmaxf(most, top), shrink = expf(most - now);
        const float p = score == -INFINITY ? 0.0f : expf(score - now);
        float psum = p;
        for (int d = 16; d > 0; d /= 2)
            psum += __shfl_xor_sync(0xffffffffu, psum, d);
        sum = __fmaf_rn(sum, shrink, psum);
        most = now;
#pragma unroll
        for (int i = 0; i < MOST_V / 32; i++)
            acc[i] *= shrink;
        for (int j = 0; j < min(32, n_keys - chunk * 32); j++) {
            const float pj = __shfl_sync(0xffffffffu, p, j);
            const latent_row<T> k =
                row_at<T>(a, table, list ? list[chunk * 32 + j] : chunk * 32 + j);
#pragma unroll
            for (int i = 0; i < MOST_V / 32; i++)
                if (32 * i + lane < rank) acc[i] = __fmaf_rn(pj, k.at(a, 32 * i + lane), acc[i]);
        }
    }
    if (lane == 0) {
        max_of[warp] = most;
        sum_of[warp] = sum;
    }
#pragma unroll
    for (int i = 0; i < MOST_V / 32; i++)
        if (32 * i + lane < rank) acc_of[warp][32 * i + lane] = acc[i];
    __syncthreads();
    float all = -INFINITY, total = 0, weight[WARPS];
    for (int w = 0; w < WARPS; w++)
        all = fmaxf(all, max_of[w]);
    for (int w = 0; w < WARPS; w++) {
        weight[w] = max_of[w] == -INFINITY ? 0.0f : expf(max_of[w] - all);
        total = __fmaf_rn(weight[w], sum_of[w], total);
    }
    for (int i = threadIdx.x; i < rank; i += BLOCK) {
        float v = 0;
        for (int w = 0; w < WARPS; w++)
            v = __fmaf_rn(weight[w], acc_of[w][i], v);
        put(a.out, row, head * rank + i, __fdiv_rn(v, total));
    }
    fill_last_group(a.out, row, head, x.n_heads, rank, threadIdx.x, BLOCK);
}

template <typename T> cudaError_t launch(const plain_args &a, cudaStream_t stream)
{
    return launch_after(attend_plain<T>, dim3((unsigned)a.rows.rows, (unsigned)a.a.n_heads), BLOCK,
                        0, stream, a);
}

} // namespace

cudaError_t bgk_mla_plain(const bgk_out *out, const bgk_mla *a, const bgk_rows *r,
                          const bgk_selected *s, cudaStream_t stream)
{
    const bgk_cache *c = &a->cache;
    if (c->k_dim > MOST_K || c->v_dim > MOST_V || c->v_dim < 1 || c->k_dim < c->v_dim ||
        a->rope.n_rot != c->k_dim - c->v_dim || a->rope.n_rot % 2 || c->block_tokens < 1 ||
        a->layer < 0 || a->n_heads < 0 || bad_attention_out(out))
        return cudaErrorInvalidValue;
    if (!r->rows || !a->n_heads) return cudaSuccess;
    const plain_args args = {.out = *out,
                             .a = *a,
                             .rows = *r,
                             .s = *s,
                             .panels = bgk_mla_fits(c),
                             .block_bytes = (int64_t)bgk_mla_block_bytes(c)};
    switch (c->type) {
    case BGK_F32:
        return launch<float>(args, stream);
    case BGK_F16:
        return launch<__half>(args, stream);
    case BGK_BF16:
        return launch<__nv_bfloat16>(args, stream);
    default:
        return cudaErrorInvalidValue;
    }
}
