/* kernels/attention.cu - attention in float32 over the paged cache, for what attention_single.cu
 * and attention_tiles.cu do not take: float32 caches (proofs) and unusual head sizes.
 *
 * Requires: k_dim and v_dim multiples of 4, at most 512; not Q8.
 *
 * Launch: a block of 128 (four warps) a row and query head; graph-capturable.
 *
 * Order: keys by 32 from position 0 on; chunk c is warp c % 4's; the four partial softmaxes are
 * merged in the order of the warps: set by the row's position and window alone.
 *
 * Proof: tests/unit/model/test_golden on a GPU (whole models); tests/gpu/test_attention.c. */
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "attention.cuh"

namespace
{

constexpr int BLOCK = 128, WARPS = BLOCK / 32, MAX_DIM = 512;

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

struct attention_args {
    bgk_out out;
    const float *q;
    int64_t q_cols;
    bgk_cache cache;
    bgk_rows rows;
    bgk_heads h;
};

template <typename T> __global__ void __launch_bounds__(BLOCK) attend(attention_args a)
{
    __shared__ __align__(16) float q[MAX_DIM];
    __shared__ float acc_of[WARPS][MAX_DIM];
    __shared__ float max_of[WARPS], sum_of[WARPS];
    const bgk_cache &c = a.cache;
    const bgk_heads &h = a.h;
    const int row = blockIdx.x, head = blockIdx.y, dim = c.k_dim, v_dim = c.v_dim;
    ptx_wait_prior();
    ptx_let_next_start();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int kv = (h.head0 + head) / h.group - h.kv_head0;
    const int pos = a.rows.pos[row], first = h.window && pos >= h.window ? pos - h.window + 1 : 0;
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
            const T *k = (const T *)c.k + place(c, h.layer, block, kv, dim) +
                         (int64_t)(key % c.block_tokens) * dim;
            score = dot(q, k, dim) * h.scale;
            if (h.softcap > 0) score = h.softcap * tanhf(score / h.softcap);
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
            const T *v = (const T *)c.v + place(c, h.layer, block, kv, v_dim) +
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
    float all = h.sinks ? h.sinks[head] : -INFINITY;
    for (int w = 0; w < WARPS; w++)
        all = fmaxf(all, max_of[w]);
    float total = h.sinks ? expf(h.sinks[head] - all) : 0.0f;
    float weight[WARPS];
    for (int w = 0; w < WARPS; w++) {
        weight[w] = max_of[w] == -INFINITY ? 0.0f : expf(max_of[w] - all);
        total = fmaf(weight[w], sum_of[w], total);
    }
    for (int i = threadIdx.x; i < v_dim; i += BLOCK) {
        float v = 0;
        for (int w = 0; w < WARPS; w++)
            v = fmaf(weight[w], acc_of[w][i], v);
        put(a.out, row, head * v_dim + i, v / total);
    }
    fill_last_group(a.out, row, head, h.n_heads, v_dim, threadIdx.x, BLOCK);
}

bool bad_cache(const bgk_cache *c)
{
    return c->k_dim < 4 || c->k_dim > MAX_DIM || c->k_dim % 4 || c->v_dim < 4 ||
           c->v_dim > MAX_DIM || c->v_dim % 4 || c->n_kv_heads < 1 || c->block_tokens < 1;
}

} // namespace

cudaError_t bgk_attention(const bgk_out *out, const float *q, int64_t q_cols,
                          const bgk_cache *cache, const bgk_rows *r, const bgk_heads *heads,
                          cudaStream_t stream)
{
    if (bad_cache(cache) || bad_heads(heads, cache) || bad_attention_out(out) ||
        cache->type == BGK_Q8)
        return cudaErrorInvalidValue;
    if (!r->rows || !heads->n_heads) return cudaSuccess;
    const attention_args a = {*out, q, q_cols, *cache, *r, *heads};
    const dim3 grid(r->rows, heads->n_heads);
    if (cache->type == BGK_F32) return launch_after(attend<float>, grid, BLOCK, 0, stream, a);
    if (cache->type == BGK_F16) return launch_after(attend<__half>, grid, BLOCK, 0, stream, a);
    return launch_after(attend<__nv_bfloat16>, grid, BLOCK, 0, stream, a);
}
