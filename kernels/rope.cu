/* kernels/rope.cu - queries, keys and values of a step: norms and rotation, K and V into the cache.
 *
 * Requires: k_dim and v_dim multiples of 4, at most 512.
 *
 * Launch: a block of eight warps a row and eight heads, a warp a head; the block works the row's
 * angles out once. Graph-capturable, may start early.
 *
 * Order: a head's sum of squares by lanes, then across them: set by k_dim alone.
 *
 * Proof: tests/gpu/test_attention.c. */
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "bgk.h"
#include "launch.cuh"
#include "tiles.cuh"

namespace
{

constexpr int WARPS = 8, BLOCK = 32 * WARPS, MAX_DIM = 512;

struct rope_args {
    void *q_out;
    bool q_half;
    int64_t q_cols;
    const float *qkv;
    int64_t qkv_cols;
    bgk_cache cache;
    bgk_rows rows;
    int layer, n_heads;
    const float *q_norm, *k_norm;
    float eps;
    const float *freq;
    int n_rot;
    bool neox;
    float mscale;
};

__device__ __half2 halves(float a, float b)
{
    return __halves2half2(tile_half(a), tile_half(b));
}

__device__ __nv_bfloat16 bf16(float v)
{
    return __float2bfloat16_rn(v);
}

template <typename T> __device__ void store4(T *to, float4 v);

template <> __device__ void store4<float>(float *to, float4 v)
{
    *(float4 *)to = v;
}

template <> __device__ void store4<__half>(__half *to, float4 v)
{
    const __half2 two[2] = {halves(v.x, v.y), halves(v.z, v.w)};
    *(uint2 *)to = *(const uint2 *)two;
}

template <> __device__ void store4<__nv_bfloat16>(__nv_bfloat16 *to, float4 v)
{
    const __nv_bfloat162 two[2] = {__halves2bfloat162(bf16(v.x), bf16(v.y)),
                                   __halves2bfloat162(bf16(v.z), bf16(v.w))};
    *(uint2 *)to = *(const uint2 *)two;
}

template <typename T> __device__ void store_head(T *to, float *, const float *v, int dim, int lane)
{
    for (int i = 4 * lane; i < dim; i += 128)
        store4(to + i, *(const float4 *)(v + i));
}

__device__ int quant(float v, float by)
{
    return min(127, max(-127, __float2int_rn(v * by)));
}

/* The largest magnitude becomes 127; beyond 32000 values saturate, as attention wants scales. */
__device__ void store_head(int8_t *to, float *scale, const float *v, int dim, int lane)
{
    float most = 0;
    for (int i = 4 * lane; i < dim; i += 128) {
        const float4 x = *(const float4 *)(v + i);
        most = fmaxf(fmaxf(most, fmaxf(fabsf(x.x), fabsf(x.y))), fmaxf(fabsf(x.z), fabsf(x.w)));
    }
    for (int d = 16; d > 0; d /= 2)
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, d));
    most = fminf(most, 32000.0f);
    const float by = most > 1e-30f ? 127.0f / most : 0.0f;
    if (lane == 0) *scale = by > 0 ? most / 127.0f : 0.0f;
    for (int i = 4 * lane; i < dim; i += 128) {
        const float4 x = *(const float4 *)(v + i);
        *(char4 *)(to + i) = make_char4((signed char)quant(x.x, by), (signed char)quant(x.y, by),
                                        (signed char)quant(x.z, by), (signed char)quant(x.w, by));
    }
}

/* v: dim values of a head; they are normed and rotated where they lie. */
__device__ void turn(const rope_args &a, float *v, const float2 *angles, const float *norm, int dim,
                     int lane)
{
    if (norm) {
        float sum = 0;
        for (int i = 4 * lane; i < dim; i += 128) {
            const float4 x = *(const float4 *)(v + i);
            sum = fmaf(x.x, x.x, fmaf(x.y, x.y, fmaf(x.z, x.z, fmaf(x.w, x.w, sum))));
        }
        for (int d = 16; d > 0; d /= 2)
            sum += __shfl_xor_sync(0xffffffffu, sum, d);
        const float f = 1.0f / sqrtf(sum / (float)dim + a.eps);
        for (int i = lane; i < dim; i += 32)
            v[i] = v[i] * f * norm[i];
        __syncwarp();
    }
    for (int i = lane; a.freq && i < a.n_rot / 2; i += 32) {
        const int lo = a.neox ? i : 2 * i, hi = a.neox ? i + a.n_rot / 2 : 2 * i + 1;
        const float p = v[lo], q = v[hi];
        v[lo] = p * angles[i].x - q * angles[i].y;
        v[hi] = p * angles[i].y + q * angles[i].x;
    }
    __syncwarp();
}

template <typename T> __global__ void __launch_bounds__(BLOCK) rope_store_heads(rope_args a)
{
    __shared__ __align__(16) float values[WARPS][MAX_DIM];
    __shared__ float2 angles[MAX_DIM / 2];
    ptx_wait_prior();
    ptx_let_next_start();
    const bgk_cache &c = a.cache;
    const int row = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int head = blockIdx.y * WARPS + warp, pos = a.rows.pos[row], dim = c.k_dim;
    if (pos < 0) return;
    const bool is_v = head >= a.n_heads + c.n_kv_heads;
    const int n = is_v ? c.v_dim : dim;
    float *v = values[warp];
    if (head < a.n_heads + 2 * c.n_kv_heads) {
        const int before =
            is_v ? (a.n_heads + c.n_kv_heads) * dim + (head - a.n_heads - c.n_kv_heads) * c.v_dim
                 : head * dim;
        const float *x = a.qkv + row * a.qkv_cols + before;
        for (int i = 4 * lane; i < n; i += 128)
            *(float4 *)(v + i) = *(const float4 *)(x + i);
    }
    for (int i = threadIdx.x; a.freq && i < a.n_rot / 2; i += BLOCK) {
        const float angle = (float)pos * a.freq[i];
        angles[i] = make_float2(cosf(angle) * a.mscale, sinf(angle) * a.mscale);
    }
    __syncthreads();
    if (head >= a.n_heads + 2 * c.n_kv_heads) return;
    if (!is_v) turn(a, v, angles, head < a.n_heads ? a.q_norm : a.k_norm, dim, lane);
    if (head < a.n_heads) {
        const int64_t at = row * a.q_cols + head * dim;
        if (!a.q_half)
            store_head((float *)a.q_out + at, nullptr, v, dim, lane);
        else if (c.type == BGK_BF16)
            store_head((__nv_bfloat16 *)a.q_out + at, nullptr, v, dim, lane);
        else
            store_head((__half *)a.q_out + at, nullptr, v, dim, lane);
        return;
    }
    const int kv = head - a.n_heads - (is_v ? c.n_kv_heads : 0);
    const int block = a.rows.blocks[a.rows.block0[a.rows.seq[row]] + pos / c.block_tokens];
    const int64_t slot =
        (((int64_t)a.layer * c.n_blocks + block) * c.n_kv_heads + kv) * c.block_tokens +
        pos % c.block_tokens;
    store_head((T *)(is_v ? c.v : c.k) + slot * n, (is_v ? c.v_scale : c.k_scale) + slot, v, n,
               lane);
}

bool bad_dim(int dim)
{
    return dim < 4 || dim > MAX_DIM || dim % 4;
}

} // namespace

cudaError_t bgk_rope_store(void *q_out, bool q_half, int64_t q_cols, const float *qkv,
                           int64_t qkv_cols, const bgk_cache *cache, const bgk_rows *r, int layer,
                           int n_heads, const float *q_norm, const float *k_norm, float eps,
                           const float *freq, int n_rot, bool neox, float mscale,
                           cudaStream_t stream)
{
    if (bad_dim(cache->k_dim) || bad_dim(cache->v_dim) || cache->n_kv_heads < 0 ||
        cache->block_tokens < 1 || n_heads < 0 || n_rot % 2 || n_rot > cache->k_dim ||
        qkv_cols % 4 || q_cols % 4 || (uintptr_t)qkv % 16 || (uintptr_t)q_out % 16)
        return cudaErrorInvalidValue;
    const int heads = n_heads + 2 * cache->n_kv_heads;
    if (!r->rows || !heads) return cudaSuccess;
    const rope_args a = {q_out,   q_half, q_cols, qkv, qkv_cols, *cache, *r,   layer,
                         n_heads, q_norm, k_norm, eps, freq,     n_rot,  neox, mscale};
    const dim3 grid(r->rows, (heads + WARPS - 1) / WARPS);
    switch (cache->type) {
    case BGK_F32:
        return launch_after(rope_store_heads<float>, grid, BLOCK, 0, stream, a);
    case BGK_F16:
        return launch_after(rope_store_heads<__half>, grid, BLOCK, 0, stream, a);
    case BGK_BF16:
        return launch_after(rope_store_heads<__nv_bfloat16>, grid, BLOCK, 0, stream, a);
    default:
        return launch_after(rope_store_heads<int8_t>, grid, BLOCK, 0, stream, a);
    }
}
