/* kernels/attention.cu - the paged KV cache: rope_store writes it, attention reads it.
 *
 *   requires  k_dim and v_dim multiples of 4, at most 512
 *   launch    rope_store: a block of 128 a row and head; attention: a block of 128 (four warps) a
 * row and query head; graph-capturable order     keys by 32 from position 0 on; chunk c is warp c %
 * 4's; the four partial softmaxes are merged in the order of the warps: set by the row's position
 * and window alone proof     tests/unit/model/test_golden on a GPU: whole models, not yet each
 * kernel by itself */
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "bgk.h"

namespace
{

constexpr int BLOCK = 128, WARPS = BLOCK / 32, MAX_DIM = 512;

__device__ void store(float *p, float v)
{
    *p = v;
}

__device__ void store(__half *p, float v)
{
    *p = __float2half_rn(v);
}

__device__ void store(__nv_bfloat16 *p, float v)
{
    *p = __float2bfloat16_rn(v);
}

__device__ float4 four(const float *p)
{
    return *(const float4 *)p;
}

__device__ float4 four(const __half *p)
{
    const uint2 raw = *(const uint2 *)p;
    const float2 a = __half22float2(*(const __half2 *)&raw.x),
                 b = __half22float2(*(const __half2 *)&raw.y);
    return make_float4(a.x, a.y, b.x, b.y);
}

__device__ float4 four(const __nv_bfloat16 *p)
{
    const uint2 raw = *(const uint2 *)p;
    const float2 a = __bfloat1622float2(*(const __nv_bfloat162 *)&raw.x);
    const float2 b = __bfloat1622float2(*(const __nv_bfloat162 *)&raw.y);
    return make_float4(a.x, a.y, b.x, b.y);
}

/* q . k over dim values, in their order; dim is a multiple of 4 and both are aligned to four
 * values. */
template <typename T> __device__ float dot(const float *q, const T *k, int dim)
{
    float s = 0;
    for (int i = 0; i < dim; i += 4) {
        const float4 v = four(k + i), u = *(const float4 *)(q + i);
        s = fmaf(u.x, v.x, s);
        s = fmaf(u.y, v.y, s);
        s = fmaf(u.z, v.z, s);
        s = fmaf(u.w, v.w, s);
    }
    return s;
}

/* First value of (block, head, token 0) of a layer. */
__device__ int64_t place(const bgk_cache &c, int layer, int block, int head, int dim)
{
    return (((int64_t)layer * c.n_blocks + block) * c.n_kv_heads + head) * c.block_tokens * dim;
}

struct rope_args {
    float *q_out;
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

template <typename T> __global__ void rope_store_heads(rope_args a)
{
    __shared__ float v[MAX_DIM];
    __shared__ float part[WARPS];
    const bgk_cache &c = a.cache;
    const int row = blockIdx.x, head = blockIdx.y, dim = c.k_dim;
    const int pos = a.rows.pos[row], block_tokens = c.block_tokens;
    const int block = a.rows.blocks[a.rows.block0[a.rows.seq[row]] + pos / block_tokens];
    const int at = pos % block_tokens;
    const float *x = a.qkv + row * a.qkv_cols;
    if (head >= a.n_heads + c.n_kv_heads) { /* a value: stored as it is */
        const int kv = head - a.n_heads - c.n_kv_heads;
        T *to = (T *)c.v + place(c, a.layer, block, kv, c.v_dim) + at * c.v_dim;
        const float *from = x + (a.n_heads + c.n_kv_heads) * dim + kv * c.v_dim;
        for (int i = threadIdx.x; i < c.v_dim; i += BLOCK)
            store(to + i, from[i]);
        return;
    }
    const bool is_q = head < a.n_heads;
    const float *norm = is_q ? a.q_norm : a.k_norm;
    float sum = 0;
    for (int i = threadIdx.x; i < dim; i += BLOCK) {
        v[i] = x[head * dim + i];
        sum = fmaf(v[i], v[i], sum);
    }
    if (norm) {
        for (int d = 16; d > 0; d /= 2)
            sum += __shfl_xor_sync(0xffffffffu, sum, d);
        if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = sum;
        __syncthreads();
        float total = 0;
        for (int i = 0; i < WARPS; i++)
            total += part[i];
        const float f = 1.0f / sqrtf(total / (float)dim + a.eps);
        for (int i = threadIdx.x; i < dim; i += BLOCK)
            v[i] = v[i] * f * norm[i];
    }
    __syncthreads();
    for (int i = threadIdx.x; a.freq && i < a.n_rot / 2; i += BLOCK) {
        const int lo = a.neox ? i : 2 * i, hi = a.neox ? i + a.n_rot / 2 : 2 * i + 1;
        const float angle = (float)pos * a.freq[i];
        const float cosine = cosf(angle) * a.mscale, sine = sinf(angle) * a.mscale;
        const float p = v[lo], q = v[hi];
        v[lo] = p * cosine - q * sine;
        v[hi] = p * sine + q * cosine;
    }
    __syncthreads();
    if (is_q) {
        for (int i = threadIdx.x; i < dim; i += BLOCK)
            a.q_out[row * a.q_cols + head * dim + i] = v[i];
    } else {
        T *to = (T *)c.k + place(c, a.layer, block, head - a.n_heads, dim) + at * dim;
        for (int i = threadIdx.x; i < dim; i += BLOCK)
            store(to + i, v[i]);
    }
}

struct attention_args {
    float *out;
    int64_t out_cols;
    const float *q;
    int64_t q_cols;
    bgk_cache cache;
    bgk_rows rows;
    int layer, head0, kv_head0, group;
    float scale, softcap;
    int window;
    const float *sinks;
};

template <typename T> __global__ void __launch_bounds__(BLOCK) attend(attention_args a)
{
    __shared__ __align__(16) float q[MAX_DIM];
    __shared__ float acc_of[WARPS][MAX_DIM];
    __shared__ float max_of[WARPS], sum_of[WARPS];
    const bgk_cache &c = a.cache;
    const int row = blockIdx.x, head = blockIdx.y, dim = c.k_dim, v_dim = c.v_dim;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int kv = (a.head0 + head) / a.group - a.kv_head0;
    const int pos = a.rows.pos[row], first = a.window && pos >= a.window ? pos - a.window + 1 : 0;
    const int32_t *table = a.rows.blocks + a.rows.block0[a.rows.seq[row]];
    for (int i = threadIdx.x; i < dim; i += BLOCK)
        q[i] = a.q[row * a.q_cols + head * dim + i];
    __syncthreads();
    float acc[MAX_DIM / 32];
    float most = -INFINITY, sum = 0;
#pragma unroll
    for (int i = 0; i < MAX_DIM / 32; i++)
        acc[i] = 0;
    for (int chunk = first / 32; chunk * 32 <= pos; chunk++) {
        if (chunk % WARPS != warp) continue;
        const int key = chunk * 32 + lane;
        float score = -INFINITY;
        if (key >= first && key <= pos) {
            const int block = table[key / c.block_tokens];
            const T *k = (const T *)c.k + place(c, a.layer, block, kv, dim) +
                         (int64_t)(key % c.block_tokens) * dim;
            score = dot(q, k, dim) * a.scale;
            if (a.softcap > 0) score = a.softcap * tanhf(score / a.softcap);
        }
        float top = score;
        for (int d = 16; d > 0; d /= 2)
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, d));
        const float now = fmaxf(most, top), shrink = expf(most - now);
        const float p = score == -INFINITY ? 0.0f : expf(score - now);
        float psum = p;
        for (int d = 16; d > 0; d /= 2)
            psum += __shfl_xor_sync(0xffffffffu, psum, d);
        sum = sum * shrink + psum;
        most = now;
#pragma unroll
        for (int i = 0; i < MAX_DIM / 32; i++)
            acc[i] *= shrink;
        const int last = min(31, pos - chunk * 32);
        for (int j = max(0, first - chunk * 32); j <= last; j++) {
            const int kj = chunk * 32 + j, block = table[kj / c.block_tokens];
            const float pj = __shfl_sync(0xffffffffu, p, j);
            const T *v = (const T *)c.v + place(c, a.layer, block, kv, v_dim) +
                         (int64_t)(kj % c.block_tokens) * v_dim;
#pragma unroll
            for (int i = 0; i < MAX_DIM / 128; i++) {
                if (i * 128 + lane * 4 >= v_dim) continue;
                const float4 x = four(v + i * 128 + lane * 4);
                acc[4 * i] = fmaf(pj, x.x, acc[4 * i]);
                acc[4 * i + 1] = fmaf(pj, x.y, acc[4 * i + 1]);
                acc[4 * i + 2] = fmaf(pj, x.z, acc[4 * i + 2]);
                acc[4 * i + 3] = fmaf(pj, x.w, acc[4 * i + 3]);
            }
        }
    }
    if (lane == 0) {
        max_of[warp] = most;
        sum_of[warp] = sum;
    }
#pragma unroll
    for (int i = 0; i < MAX_DIM / 32; i++) {
        const int at = i / 4 * 128 + lane * 4 + i % 4;
        if (at < v_dim) acc_of[warp][at] = acc[i];
    }
    __syncthreads();
    float all = a.sinks ? a.sinks[head] : -INFINITY;
    for (int w = 0; w < WARPS; w++)
        all = fmaxf(all, max_of[w]);
    float total = a.sinks ? expf(a.sinks[head] - all) : 0.0f;
    float weight[WARPS];
    for (int w = 0; w < WARPS; w++) {
        weight[w] = max_of[w] == -INFINITY ? 0.0f : expf(max_of[w] - all);
        total = fmaf(weight[w], sum_of[w], total);
    }
    for (int i = threadIdx.x; i < v_dim; i += BLOCK) {
        float v = 0;
        for (int w = 0; w < WARPS; w++)
            v = fmaf(weight[w], acc_of[w][i], v);
        a.out[row * a.out_cols + head * v_dim + i] = v / total;
    }
}

bool bad_cache(const bgk_cache *c)
{
    return c->k_dim < 4 || c->k_dim > MAX_DIM || c->k_dim % 4 || c->v_dim < 4 ||
           c->v_dim > MAX_DIM || c->v_dim % 4 || c->n_kv_heads < 1 || c->block_tokens < 1;
}

} // namespace

cudaError_t bgk_rope_store(float *q_out, int64_t q_cols, const float *qkv, int64_t qkv_cols,
                           const bgk_cache *cache, const bgk_rows *r, int layer, int n_heads,
                           const float *q_norm, const float *k_norm, float eps, const float *freq,
                           int n_rot, bool neox, float mscale, cudaStream_t stream)
{
    if (bad_cache(cache) || n_heads < 0 || n_rot % 2 || n_rot > cache->k_dim)
        return cudaErrorInvalidValue;
    if (!r->rows) return cudaSuccess;
    const rope_args a = {q_out,  q_cols, qkv, qkv_cols, *cache, *r,   layer, n_heads,
                         q_norm, k_norm, eps, freq,     n_rot,  neox, mscale};
    const dim3 grid(r->rows, n_heads + 2 * cache->n_kv_heads);
    if (cache->type == BGK_F32)
        rope_store_heads<float><<<grid, BLOCK, 0, stream>>>(a);
    else if (cache->type == BGK_F16)
        rope_store_heads<__half><<<grid, BLOCK, 0, stream>>>(a);
    else
        rope_store_heads<__nv_bfloat16><<<grid, BLOCK, 0, stream>>>(a);
    return cudaGetLastError();
}

cudaError_t bgk_attention(float *out, int64_t out_cols, const float *q, int64_t q_cols,
                          const bgk_cache *cache, const bgk_rows *r, int layer, int n_heads,
                          int head0, int kv_head0, int group, float scale, float softcap,
                          int window, const float *sinks, cudaStream_t stream)
{
    if (bad_cache(cache) || n_heads < 0 || group < 1 || window < 0) return cudaErrorInvalidValue;
    if (!r->rows || !n_heads) return cudaSuccess;
    const attention_args a = {out,   out_cols, q,     q_cols, *cache,  *r,     layer,
                              head0, kv_head0, group, scale,  softcap, window, sinks};
    const dim3 grid(r->rows, n_heads);
    if (cache->type == BGK_F32)
        attend<float><<<grid, BLOCK, 0, stream>>>(a);
    else if (cache->type == BGK_F16)
        attend<__half><<<grid, BLOCK, 0, stream>>>(a);
    else
        attend<__nv_bfloat16><<<grid, BLOCK, 0, stream>>>(a);
    return cudaGetLastError();
}
