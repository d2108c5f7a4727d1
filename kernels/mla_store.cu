/* kernels/mla_store.cu - latents of a step: norms, the rope key's rotation, rows into the cache.
 *
 * Requires: in_cols, q_rank and the cache's dims multiples of 4; q_rank + k_dim <= 12000.
 *
 * Launch: a block of eight warps a token; graph-capturable, may start early.
 *
 * Order: a sum of squares is threads' chains (four values of every 1024), then lanes, then warps:
 * set by its length alone.
 *
 * Proof: tests/gpu/test_mla.c. */
#include "mla.cuh"

namespace
{

constexpr int BLOCK = 256, WARPS = BLOCK / 32, MOST = 12000;

struct store_args {
    bgk_out qa;
    const float *in;
    int64_t in_cols;
    bgk_cache cache;
    bgk_rows rows;
    int layer, q_rank;
    const float *q_norm, *kv_norm;
    float eps;
    bgk_rotation rope;
    bool panels;
    int64_t block_bytes;
};

__device__ void narrow(float *to, float v)
{
    *to = v;
}

__device__ void narrow(__half *to, float v)
{
    *to = tile_half(v);
}

__device__ void narrow(__nv_bfloat16 *to, float v)
{
    *to = __float2bfloat16_rn(v);
}

/* x[0..n) *= 1 / its root mean square, times w. All threads; sums: [WARPS]. */
__device__ void norm(float *x, const float *w, float sum, float *sums, int n, float eps)
{
    for (int d = 16; d > 0; d /= 2)
        sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, d));
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0;
    for (int i = 0; i < WARPS; i++)
        sum = __fadd_rn(sum, sums[i]);
    const float f = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(sum, (float)n), eps)));
    for (int i = threadIdx.x; i < n; i += BLOCK)
        x[i] = __fmul_rn(__fmul_rn(x[i], f), w[i]);
}

__device__ float squares(float sum, float4 v)
{
    return __fmaf_rn(v.x, v.x, __fmaf_rn(v.y, v.y, __fmaf_rn(v.z, v.z, __fmaf_rn(v.w, v.w, sum))));
}

/* Q8 (mla.cuh): the largest magnitude becomes 127; beyond 32000 values saturate, as attention wants
 * scales. All threads; most_of: [WARPS]. */
__device__ void store_q8(char *block, int block_tokens, int token, const float *latent,
                         float *most_of)
{
    float most = 0;
    for (int i = threadIdx.x; i < MLA_LATENT; i += BLOCK)
        most = fmaxf(most, fabsf(latent[i]));
    for (int d = 16; d > 0; d /= 2)
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, d));
    if (threadIdx.x % 32 == 0) most_of[threadIdx.x / 32] = most;
    __syncthreads();
    for (int i = 0; i < WARPS; i++)
        most = fmaxf(most, most_of[i]);
    most = fminf(most, 32000.0f);
    const float by = most > 1e-30f ? __fdiv_rn(127.0f, most) : 0.0f;
    for (int i = threadIdx.x; i < MLA_LATENT / 4; i += BLOCK) {
        signed char v[4];
        for (int e = 0; e < 4; e++)
            v[e] =
                (signed char)min(127, max(-127, __float2int_rn(__fmul_rn(latent[4 * i + e], by))));
        *(char4 *)(block + token * MLA_LATENT + 4 * i) = make_char4(v[0], v[1], v[2], v[3]);
    }
    char *rope = block + block_tokens * MLA_LATENT + token * 128;
    for (int i = threadIdx.x; i < MLA_ROPE; i += BLOCK)
        *(__half *)(rope + (((i / 8) ^ (token & 7)) << 4) + i % 8 * 2) =
            tile_half(latent[MLA_LATENT + i]);
    if (threadIdx.x == 0)
        *(float *)(block + block_tokens * (MLA_LATENT + 128) + token * 4) =
            by > 0 ? __fdiv_rn(most, 127.0f) : 0.0f;
}

template <typename T> __global__ void __launch_bounds__(BLOCK) store_latents(store_args a)
{
    extern __shared__ __align__(16) float x[]; /* q_rank, then k_dim values */
    __shared__ float sums[3][WARPS];
    const bgk_cache &c = a.cache;
    const int row = blockIdx.x, thread = threadIdx.x, rank = c.v_dim, n_rot = c.k_dim - rank;
    const int pos = a.rows.pos[row]; /* came with the step's copy, as the tables */
    const int block =
        pos < 0 ? 0 : a.rows.blocks[a.rows.block0[a.rows.seq[row]] + pos / c.block_tokens];
    ptx_wait_prior();
    ptx_let_next_start();
    if (pos < 0) return;
    const float *in = a.in + row * a.in_cols;
    float *latent = x + a.q_rank;
    float q_sum = 0, kv_sum = 0;
    for (int i = 4 * thread; i < a.q_rank + c.k_dim; i += 4 * BLOCK) {
        const float4 v = *(const float4 *)(in + i);
        *(float4 *)(x + i) = v;
        if (i < a.q_rank) q_sum = squares(q_sum, v);
    }
    for (int i = 4 * thread; i < rank; i += 4 * BLOCK) /* by its own places, whatever q_rank is */
        kv_sum = squares(kv_sum, *(const float4 *)(in + a.q_rank + i));
    __syncthreads();
    norm(latent, a.kv_norm, kv_sum, sums[0], rank, a.eps);
    if (a.q_rank) norm(x, a.q_norm, q_sum, sums[1], a.q_rank, a.eps);
    for (int i = thread; i < n_rot / 2; i += BLOCK) {
        float *lo = latent + rank + (a.rope.neox ? i : 2 * i);
        float *hi = latent + rank + (a.rope.neox ? i + n_rot / 2 : 2 * i + 1);
        const float2 v = mla_turn(*lo, *hi, pos, a.rope.freq[i], a.rope.mscale);
        *lo = v.x;
        *hi = v.y;
    }
    __syncthreads();

    char *to = mla_block(c, a.layer, block, a.block_bytes);
    const int token = pos % c.block_tokens;
    if constexpr (sizeof(T) == 1) {
        store_q8(to, c.block_tokens, token, latent, sums[2]);
    } else {
        for (int i = thread; i < c.k_dim / 4; i += BLOCK) {
            T v[4];
            for (int e = 0; e < 4; e++)
                narrow(&v[e], latent[4 * i + e]);
            if (sizeof(T) == 2 && a.panels)
                *(uint2 *)(to + mla_piece(c.block_tokens, token, i / 2) + i % 2 * 8) =
                    *(const uint2 *)v;
            else
                for (int e = 0; e < 4; e++)
                    ((T *)to)[(int64_t)token * c.k_dim + 4 * i + e] = v[e];
        }
    }
    if (a.qa.layout != BGK_TILES) {
        for (int i = thread; i < a.q_rank; i += BLOCK)
            ((float *)a.qa.data)[row * a.qa.stride + i] = x[i];
        return;
    }
    for (int i = thread; i < (a.q_rank + 63) / 64 * 8; i += BLOCK) {
        __half v[8];
        for (int e = 0; e < 8; e++) {
            const int col = i / 8 * 64 + i % 8 * 4 + e / 2 + e % 2 * 32;
            v[e] = col < a.q_rank ? tile_half(x[col]) : __half(0.0f);
        }
        *(uint4 *)((__half *)a.qa.data + tile_piece(a.qa.stride, row, i / 8, i % 8)) =
            *(const uint4 *)v;
    }
}

template <typename T> cudaError_t launch(const store_args &a, size_t bytes, cudaStream_t stream)
{
    return launch_after(store_latents<T>, dim3((unsigned)a.rows.rows), BLOCK, bytes, stream, a);
}

} // namespace

cudaError_t bgk_mla_store(const bgk_out *qa, const float *in, int64_t in_cols,
                          const bgk_cache *cache, const bgk_rows *r, int layer, int q_rank,
                          const float *q_norm, const float *kv_norm, float eps,
                          const bgk_rotation *rope, cudaStream_t stream)
{
    if (cache->k_dim % 4 || cache->v_dim % 4 || cache->v_dim < 4 || cache->k_dim < cache->v_dim ||
        cache->n_kv_heads != 1 || cache->block_tokens < 1 || q_rank < 0 || q_rank % 4 ||
        q_rank + cache->k_dim > MOST || in_cols % 4 || (uintptr_t)in % 16 ||
        rope->n_rot != cache->k_dim - cache->v_dim || rope->n_rot % 2 || layer < 0 || !kv_norm ||
        (q_rank && (!qa || !q_norm || bad_attention_out(qa))))
        return cudaErrorInvalidValue;
    if (!r->rows) return cudaSuccess;
    const store_args a = {.qa = q_rank ? *qa : bgk_out{},
                          .in = in,
                          .in_cols = in_cols,
                          .cache = *cache,
                          .rows = *r,
                          .layer = layer,
                          .q_rank = q_rank,
                          .q_norm = q_norm,
                          .kv_norm = kv_norm,
                          .eps = eps,
                          .rope = *rope,
                          .panels = bgk_mla_fits(cache),
                          .block_bytes = (int64_t)bgk_mla_block_bytes(cache)};
    const size_t bytes = (size_t)(q_rank + cache->k_dim) * sizeof(float);
    switch (cache->type) {
    case BGK_F32:
        return launch<float>(a, bytes, stream);
    case BGK_F16:
        return launch<__half>(a, bytes, stream);
    case BGK_BF16:
        return launch<__nv_bfloat16>(a, bytes, stream);
    default:
        return a.panels ? launch<int8_t>(a, bytes, stream) : cudaErrorInvalidValue;
    }
}
