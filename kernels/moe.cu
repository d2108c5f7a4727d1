/* kernels/moe.cu - mixture of experts, around the grouped products of experts.cu: which experts a
 * token has, who works on what, rows to their experts and back; and the plain form of all of it.
 *
 * Requires: what bgk.h says.
 *
 * Launch: route: a block a token, a thread an expert. plan: a block of 1024 threads for 1024
 * tokens; with more tokens once to count, once to place. gather, combine: blocks of 256 threads, a
 * token each. All programmatic: the list of items is complete when gather, or the first product,
 * lets the next kernel start. Graph-capturable.
 *
 * Order: sums of softmaxes by the number of experts alone; a token's place among its expert's by
 * number; combine adds in the order of choice.
 *
 * Traffic: gather reads a row once and writes it n_used times; combine reads as many.
 *
 * Proof: tests/gpu/test_moe.c. */
#include <cuda_fp16.h>

#include "bgk.h"
#include "launch.cuh"
#include "tiles.cuh"

namespace
{

/* ---- route --------------------------------------------------------------------------------------
 */

constexpr int MAX_PRODUCTS = BGK_MAX_EXPERTS + 1, MAX_WARPS = (MAX_PRODUCTS + 31) / 32;

__device__ float block_max(float v, float *part)
{
    for (int d = 16; d > 0; d /= 2)
        v = fmaxf(v, __shfl_xor_sync(~0u, v, d));
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
    __syncthreads();
    v = part[0];
    for (int i = 1; i < (int)blockDim.x / 32; i++)
        v = fmaxf(v, part[i]);
    return v;
}

__device__ float block_sum(float v, float *part)
{
    for (int d = 16; d > 0; d /= 2)
        v += __shfl_xor_sync(~0u, v, d);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
    __syncthreads();
    v = part[0];
    for (int i = 1; i < (int)blockDim.x / 32; i++)
        v += part[i];
    return v;
}

__device__ float sigmoid(float v)
{
    return 1.0f / (1.0f + expf(-v));
}

/* How many of values[0, n) come before the one of number i: larger ones, and equal ones of lower
 * number. Those that fill up the last four are -inf. */
__device__ int rank_of(const float *values, int n, int i)
{
    const float mine = values[i];
    int before = 0;
    for (int j = 0; j < n; j += 4) {
        const float4 v = *(const float4 *)(values + j);
        before += v.x > mine || (v.x == mine && j < i);
        before += v.y > mine || (v.y == mine && j + 1 < i);
        before += v.z > mine || (v.z == mine && j + 2 < i);
        before += v.w > mine || (v.w == mine && j + 3 < i);
    }
    return before;
}

/* The same for each thread's own value in [0, n), where fewer than k come before it; where not,
 * some number from k on. All threads; a barrier on the way. Of each warp only the first few count,
 * k of them or up to 3 more: best[], in their order. The warps before the last are full, so that
 * what fills up the last one's is the only filling. */
__device__ int rank_of_own(const float *values, float *best, int n, int k)
{
    const int i = threadIdx.x, warp = i / 32, each = min(32, (k + 3) / 4 * 4);
    const float mine = i < n ? values[i] : -INFINITY;
    const int own = warp * 32,
              in = i < n ? rank_of(values + own, min(32, n - own), i - own) : i - own;
    if (in < each) best[warp * each + in] = mine;
    __syncthreads();
    if (in >= k) return k;
    int before = in;
    for (int w = 0; w < (n + 31) / 32; w++) {
        if (w == warp) continue;
        for (int j = 0; j < each; j += 4) {
            const float4 v = *(const float4 *)(best + w * each + j);
            if (w < warp)
                before += (v.x >= mine) + (v.y >= mine) + (v.z >= mine) + (v.w >= mine);
            else
                before += (v.x > mine) + (v.y > mine) + (v.z > mine) + (v.w > mine);
        }
    }
    return before;
}

/* choice becomes -inf for experts that are not in one of the best groups. */
__device__ void drop_groups(float *choice, float *scores, const bgk_router &r)
{
    const int each = r.n_experts / r.n_groups, i = threadIdx.x;
    if (i < 4) scores[r.n_groups + i] = -INFINITY;
    __syncthreads();
    if (i < r.n_groups) {
        float first = -INFINITY, second = -INFINITY;
        for (int j = i * each; j < (i + 1) * each; j++) {
            const float v = choice[j];
            second = fmaxf(second, fminf(first, v));
            first = fmaxf(first, v);
        }
        const float sum = each > 1 ? first + second : first;
        scores[i] = isnan(sum) ? -INFINITY : sum;
    }
    __syncthreads();
    if (i < r.n_experts && rank_of(scores, r.n_groups, i / each) >= r.n_groups_used)
        choice[i] = -INFINITY;
}

__global__ void __launch_bounds__(MAX_WARPS * 32)
    route_tokens(float *route, int64_t route_cols, const float *parts, int64_t parts_cols,
                 int n_parts, bgk_router r)
{
    __shared__ __align__(16) float choice[BGK_MAX_EXPERTS + 4], scores[BGK_MAX_EXPERTS + 4];
    __shared__ __align__(16) float best[MAX_WARPS * 32];
    __shared__ float part[2][MAX_WARPS];
    __shared__ float weight[BGK_MAX_USED], extra;
    __shared__ int id[BGK_MAX_USED];
    const int i = threadIdx.x, n = r.n_experts + r.shared_gate, k = r.n_used;
    const bool expert = i < r.n_experts;
    float bias = 0, choice_bias = 0, v = 0;
    if (expert && r.bias) bias = r.bias[i];
    if (expert && r.choice_bias) choice_bias = r.choice_bias[i];
    ptx_let_next_start();
    ptx_wait_prior();
    const float *from = parts + blockIdx.x * parts_cols + i;
    if (i < n) {
#pragma unroll 16
        for (int p = 0; p < n_parts; p++)
            v += from[(int64_t)p * n];
    }
    if (i == r.n_experts && r.shared_gate) extra = sigmoid(v);
    v += bias;
    float prob = v;
    if (r.gating == BGK_GATE_SIGMOID) prob = sigmoid(v);
    if (r.gating == BGK_GATE_SOFTMAX) {
        const float most = block_max(expert ? v : -INFINITY, part[0]);
        const float e = expert ? expf(v - most) : 0.0f;
        prob = e / block_sum(e, part[1]);
    }
    const float value = prob + choice_bias;
    if (expert) choice[i] = isnan(value) ? -INFINITY : value;
    if (i < 4) choice[r.n_experts + i] = -INFINITY;
    if (r.n_groups > 1) drop_groups(choice, scores, r);
    __syncthreads();
    const int rank = rank_of_own(choice, best, r.n_experts, k);
    if (expert && rank < k) {
        id[rank] = i;
        weight[rank] = prob;
    }
    __syncthreads();
    float *out = route + blockIdx.x * route_cols;
    if (i < k) {
        float w = weight[i];
        if (r.gating == BGK_GATE_CHOSEN) {
            float most = weight[0], sum = 0;
            for (int j = 1; j < k; j++)
                most = fmaxf(most, weight[j]);
            for (int j = 0; j < k; j++)
                sum += expf(weight[j] - most);
            w = expf(w - most) / sum;
        }
        if (r.renormalise && r.gating != BGK_GATE_CHOSEN) { /* those have a sum of 1 */
            float sum = 0;
            for (int j = 0; j < k; j++)
                sum += weight[j];
            w /= sum < 6.103515625e-5f ? 6.103515625e-5f : sum;
        }
        out[i] = (float)id[i];
        out[k + i] = w * r.scale;
    }
    if (i == 0) out[2 * k] = r.shared_gate ? extra : 1.0f;
}

/* ---- plan ---------------------------------------------------------------------------------------
 * A bit for each expert and token of the block's 1024: counting bits gives a token's place. */

constexpr int CHUNK = 1024, PLAN_BLOCK = 1024;
constexpr int FEW_WORDS = 8; /* so many of an expert's are counted by one thread */

struct counts_of { /* of an expert */
    int rows, items;
};

/* Exclusive sums over the block's threads, and the whole. part: 33 places. */
__device__ counts_of block_scan(counts_of v, counts_of *part, counts_of *all)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    counts_of sum = v;
    for (int d = 1; d < 32; d *= 2) {
        const int rows = __shfl_up_sync(~0u, sum.rows, d),
                  items = __shfl_up_sync(~0u, sum.items, d);
        if (lane >= d) {
            sum.rows += rows;
            sum.items += items;
        }
    }
    if (lane == 31) part[warp] = sum;
    __syncthreads();
    if (warp == 0) {
        counts_of own = part[lane], s = own;
        for (int d = 1; d < 32; d *= 2) {
            const int rows = __shfl_up_sync(~0u, s.rows, d),
                      items = __shfl_up_sync(~0u, s.items, d);
            if (lane >= d) {
                s.rows += rows;
                s.items += items;
            }
        }
        part[lane] = {s.rows - own.rows, s.items - own.items};
        if (lane == 31) part[32] = s;
    }
    __syncthreads();
    *all = part[32];
    return {part[warp].rows + sum.rows - v.rows, part[warp].items + sum.items - v.items};
}

__device__ int chosen(const bgk_moe &m, int token, int j)
{
    const int e = (int)m.route[token * m.route_cols + j];
    return max(0, min(e, m.n_experts - 1));
}

__device__ void put_items(const bgk_moe &m, int at, int expert, bool direct, int x_row, int out_row,
                          int rows)
{
    for (int i = 0; i < rows; i += m.n)
        ((int4 *)m.items)[at++] =
            make_int4(expert | (direct ? 1 << 16 : 0), x_row + i, out_row + i, min(m.n, rows - i));
}

template <bool COUNT> __global__ void __launch_bounds__(PLAN_BLOCK) plan(bgk_moe m)
{
    extern __shared__ uint32_t shared[];
    __shared__ int first[BGK_MAX_EXPERTS], count[BGK_MAX_EXPERTS];
    __shared__ counts_of part[33];
    const int token0 = blockIdx.x * CHUNK, n = min(CHUNK, m.tokens - token0), words = (n + 31) / 32;
    const int thread = threadIdx.x, lane = thread % 32;
    uint32_t *bits = shared;                                     /* [n_experts, words] */
    uint16_t *before = (uint16_t *)(bits + m.n_experts * words); /* bits in the words before */
    for (int i = thread; i < m.n_experts * words; i += PLAN_BLOCK)
        bits[i] = 0;
    __syncthreads();
    ptx_wait_prior();
    ptx_let_next_start();
    const int pairs = n * m.n_used;
    int first_chosen = 0; /* of the thread's first token and choice */
    for (int i = thread; i < pairs; i += PLAN_BLOCK) {
        const int t = i / m.n_used, e = chosen(m, token0 + t, i % m.n_used);
        if (i == thread) first_chosen = e;
        atomicOr(&bits[e * words + t / 32], 1u << t % 32);
    }
    __syncthreads();
    int here = 0; /* rows of expert number `thread` in this block */
    if (words <= FEW_WORDS) {
        for (int i = thread * words; thread < m.n_experts && i < (thread + 1) * words; i++) {
            before[i] = (uint16_t)here;
            here += __popc(bits[i]);
        }
    } else {
        for (int e = thread / 32; e < m.n_experts; e += PLAN_BLOCK / 32) {
            const int own = lane < words ? __popc(bits[e * words + lane]) : 0;
            int sum = own;
            for (int d = 1; d < 32; d *= 2) {
                const int other = __shfl_up_sync(~0u, sum, d);
                if (lane >= d) sum += other;
            }
            if (lane < words) before[e * words + lane] = (uint16_t)(sum - own);
            if (lane == 31) count[e] = sum;
        }
        __syncthreads();
        if (thread < m.n_experts) here = count[thread];
    }
    if (COUNT) {
        if (thread < m.n_experts) m.counts[blockIdx.x * m.n_experts + thread] = here;
        return;
    }
    const bool direct = m.tokens <= BGK_DIRECT;
    int total = 0, earlier = 0;
    if (thread < m.n_experts) {
        total = here;
        if (gridDim.x > 1) {
            total = 0;
            for (int c = 0; c < (int)gridDim.x; c++) {
                const int there = m.counts[c * m.n_experts + thread];
                if (c < (int)blockIdx.x) earlier += there;
                total += there;
            }
        }
        if (direct && total) total = m.tokens;
    }
    const int padded = (m.tokens + 7) / 8 * 8, shared_rows = m.n_shared * padded;
    const int shared_items = m.n_shared * ((m.tokens + m.n - 1) / m.n);
    counts_of all;
    const counts_of mine = block_scan({(total + 7) / 8 * 8, (total + m.n - 1) / m.n}, part, &all);
    if (thread < m.n_experts) first[thread] = shared_rows + mine.rows + earlier;
    if (blockIdx.x == 0) {
        if (thread < m.n_experts)
            put_items(m, shared_items + mine.items, thread, direct, direct ? 0 : mine.rows,
                      shared_rows + mine.rows, total);
        else if (thread - m.n_experts < m.n_shared) {
            const int s = thread - m.n_experts;
            put_items(m, s * (shared_items / m.n_shared), thread, true, 0, s * padded, m.tokens);
        }
        if (thread == 0) *m.n_items = shared_items + all.items;
    }
    __syncthreads();
    for (int i = thread; i < pairs; i += PLAN_BLOCK) {
        const int t = i / m.n_used,
                  e = i == thread ? first_chosen : chosen(m, token0 + t, i % m.n_used),
                  at = e * words + t / 32;
        m.pos[(int64_t)token0 * m.n_used + i] =
            first[e] + (direct ? t : before[at] + __popc(bits[at] & ((1u << t % 32) - 1)));
    }
}

/* ---- gather, combine ----------------------------------------------------------------------------
 */

constexpr int BLOCK = 256;

__global__ void __launch_bounds__(BLOCK) gather_rows(bgk_out x, bgk_out h, bgk_moe m, int groups)
{
    const int t = blockIdx.x, g = blockIdx.y * (BLOCK / 8) + threadIdx.x / 8,
              piece = threadIdx.x % 8;
    const int shared_rows = m.n_shared * ((m.tokens + 7) / 8 * 8);
    uint4 v = {};
    if (g < groups) /* new to L1, perhaps */
        v = __ldcg((const uint4 *)((const __half *)h.data + tile_piece(h.stride, t, g, piece)));
    ptx_wait_prior();
    ptx_let_next_start(); /* whoever starts now finds the list complete */
    if (g >= groups) return;
#pragma unroll 8
    for (int j = 0; j < m.n_used; j++) {
        const int row = m.pos[(int64_t)t * m.n_used + j] - shared_rows;
        *(uint4 *)((__half *)x.data + tile_piece(x.stride, row, g, piece)) = v;
    }
}

struct combined {
    float *out;
    const __half *rows;
    const float *add;
    int64_t out_cols, rows_cols, add_cols;
    int cols;
};

/* EACH columns a thread: 8 as vectors, or 1. */
template <int EACH> __device__ void add_row(float (&sum)[EACH], float w, const __half *row)
{
    if constexpr (EACH == 8) {
        const uint4 v = *(const uint4 *)row;
        const uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 f = __half22float2(*(const __half2 *)&pairs[i]);
            sum[2 * i] = fmaf(w, f.x, sum[2 * i]);
            sum[2 * i + 1] = fmaf(w, f.y, sum[2 * i + 1]);
        }
    } else {
        sum[0] = fmaf(w, __half2float(*row), sum[0]);
    }
}

template <int EACH> __global__ void __launch_bounds__(BLOCK) combine_rows(combined c, bgk_moe m)
{
    static_assert(BGK_MAX_USED <= 32, "a lane has a choice");
    const int t = blockIdx.x, col = (blockIdx.y * BLOCK + threadIdx.x) * EACH;
    const int padded = (m.tokens + 7) / 8 * 8, k = m.n_used, lane = threadIdx.x % 32;
    const float *route = m.route + t * m.route_cols;
    ptx_let_next_start();
    int own_pos = 0; /* choice number `lane`; both there before the kernel before; new to L1 */
    float own_weight = 0;
    if (lane < k) {
        own_pos = __ldcg(m.pos + (int64_t)t * k + lane);
        own_weight = __ldcg(route + k + lane);
    }
    const float last = __ldcg(route + 2 * k);
    ptx_wait_prior();
    if (__all_sync(~0u, col >= c.cols)) return;
    const __half *from = c.rows + min(col, c.cols - EACH); /* all lanes take part in shuffles */
    float sum[EACH] = {};
#pragma unroll 8
    for (int j = 0; j < k; j++) {
        const int64_t row = __shfl_sync(~0u, own_pos, j);
        add_row<EACH>(sum, __shfl_sync(~0u, own_weight, j), from + row * c.rows_cols);
    }
    for (int s = 0; s < m.n_shared; s++)
        add_row<EACH>(sum, 1.0f, from + (int64_t)(s * padded + t) * c.rows_cols);
    if (col >= c.cols) return;
    const float *add = c.add ? c.add + t * c.add_cols + col : nullptr;
    float *out = c.out + t * c.out_cols + col;
#pragma unroll
    for (int i = 0; i < EACH; i += 4) {
        if constexpr (EACH == 8) {
            float4 v = make_float4(sum[i], sum[i + 1], sum[i + 2], sum[i + 3]);
            if (add) {
                const float4 a = *(const float4 *)(add + i);
                v = make_float4(fmaf(last, a.x, v.x), fmaf(last, a.y, v.y), fmaf(last, a.z, v.z),
                                fmaf(last, a.w, v.w));
            }
            *(float4 *)(out + i) = v;
        } else {
            *out = add ? fmaf(last, *add, sum[0]) : sum[0];
        }
    }
}

/* ---- plain --------------------------------------------------------------------------------------
 * A warp a result. */

constexpr int WARPS = BLOCK / 32;

__device__ float value(const void *w, bgk_type type, int64_t at)
{
    return type == BGK_F32 ? ((const float *)w)[at] : __half2float(((const __half *)w)[at]);
}

__device__ float dot(const void *w, bgk_type type, int64_t at, const float *x, int n)
{
    const int lane = threadIdx.x % 32;
    float sum = 0;
    for (int i = lane; i < n; i += 32)
        sum = fmaf(value(w, type, at + i), x[i], sum);
    for (int d = 16; d > 0; d /= 2)
        sum += __shfl_xor_sync(~0u, sum, d);
    return sum;
}

__device__ float gated(float g, float u, bgk_act fn)
{
    switch (fn) {
    case BGK_SILU:
        return g / (1.0f + expf(-g)) * u;
    case BGK_GELU_ERF:
        return 0.5f * g * (1.0f + erff(g * 0.70710678f)) * u;
    case BGK_GELU_TANH:
        return 0.5f * g * (1.0f + tanhf(0.79788456f * g * (1.0f + 0.044715f * g * g))) * u;
    default:
        g = g > 7.0f ? 7.0f : g;
        u = u > 7.0f ? 7.0f : u < -7.0f ? -7.0f : u;
        return g / (1.0f + expf(-1.702f * g)) * (u + 1.0f);
    }
}

/* Slot s of a token: its choice number s, then the shared experts. */
__device__ int expert_of(const bgk_moe &m, int token, int s)
{
    return s < m.n_used ? chosen(m, token, s) : m.n_experts + s - m.n_used;
}

__global__ void __launch_bounds__(BLOCK)
    plain_gate_up(float *act, bgk_plain_experts e, const float *x, int64_t x_cols, bgk_moe m)
{
    const int slots = m.n_used + m.n_shared, t = blockIdx.x / slots;
    const int f = blockIdx.y * WARPS + threadIdx.x / 32;
    ptx_let_next_start();
    ptx_wait_prior();
    if (f >= e.n_ff) return;
    const int64_t row = (int64_t)expert_of(m, t, blockIdx.x % slots) * 2 * e.n_ff + f;
    float g = dot(e.gate_up, e.type, row * e.k_padded, x + t * x_cols, e.k);
    float u = dot(e.gate_up, e.type, (row + e.n_ff) * e.k_padded, x + t * x_cols, e.k);
    if (e.bias) {
        g += e.bias[row];
        u += e.bias[row + e.n_ff];
    }
    if (threadIdx.x % 32 == 0) act[(int64_t)blockIdx.x * e.n_ff + f] = gated(g, u, e.fn);
}

__global__ void __launch_bounds__(BLOCK)
    plain_down(combined c, bgk_plain_experts e, const float *act, bgk_moe m)
{
    const int slots = m.n_used + m.n_shared, t = blockIdx.x;
    const int col = blockIdx.y * WARPS + threadIdx.x / 32;
    ptx_let_next_start();
    ptx_wait_prior();
    if (col >= c.cols) return;
    const float *route = m.route + t * m.route_cols;
    float sum = 0;
    for (int s = 0; s < slots; s++) {
        const int64_t row = (int64_t)expert_of(m, t, s) * e.cols + col;
        float v =
            dot(e.down, e.type, row * e.ff_padded, act + ((int64_t)t * slots + s) * e.n_ff, e.n_ff);
        if (e.down_bias) v += e.down_bias[row];
        sum = fmaf(s < m.n_used ? route[m.n_used + s] : 1.0f, v, sum);
    }
    if (c.add) sum = fmaf(route[2 * m.n_used], c.add[t * c.add_cols + col], sum);
    if (threadIdx.x % 32 == 0) c.out[t * c.out_cols + col] = sum;
}

/* ---- what a launch takes ------------------------------------------------------------------------
 */

bool valid(const bgk_moe *m)
{
    return m->n_experts >= 0 && m->n_experts <= BGK_MAX_EXPERTS && m->n_used >= 0 &&
           m->n_used <= BGK_MAX_USED && m->n_used <= m->n_experts && m->n_shared >= 0 &&
           m->n_experts + m->n_shared <= PLAN_BLOCK && m->tokens >= 0 && m->tokens <= 1 << 20 &&
           m->route_cols >= 2 * m->n_used + 1;
}

bool tiles(const bgk_out *o)
{
    return o->layout == BGK_TILES && o->stride % BGK_TILE_ROWS == 0 &&
           (uintptr_t)o->data % 128 == 0;
}

unsigned over(int64_t n, int each)
{
    return (unsigned)((n + each - 1) / each);
}

} // namespace

cudaError_t bgk_route(float *route, int64_t route_cols, const float *parts, int64_t parts_cols,
                      int n_parts, const bgk_router *r, int tokens, cudaStream_t stream)
{
    const int n = r->n_experts + r->shared_gate;
    if (r->n_experts < 1 || r->n_experts > BGK_MAX_EXPERTS || r->n_used < 1 ||
        r->n_used > r->n_experts || r->n_used > BGK_MAX_USED || n_parts < 1 || tokens < 0 ||
        route_cols < 2 * r->n_used + 1 || parts_cols < (int64_t)n_parts * n ||
        (r->n_groups > 1 && (r->n_experts % r->n_groups || r->n_groups_used < 1 ||
                             r->n_groups_used * (r->n_experts / r->n_groups) < r->n_used)))
        return cudaErrorInvalidValue;
    if (!tokens) return cudaSuccess;
    const int threads = (max(n, r->n_used) + 31) / 32 * 32;
    return launch_after(route_tokens, dim3(tokens), dim3(threads), 0, stream, route, route_cols,
                        parts, parts_cols, n_parts, *r);
}

cudaError_t bgk_moe_plan(const bgk_moe *m, cudaStream_t stream)
{
    if (!valid(m) || (m->n != 8 && m->n != 16 && m->n != 32 && m->n != 64 && m->n != 128) ||
        (m->tokens <= BGK_DIRECT && m->n != 8) || (uintptr_t)m->items % 16)
        return cudaErrorInvalidValue;
    if (!m->tokens) return cudaSuccess;
    const int blocks = (m->tokens + CHUNK - 1) / CHUNK,
              words = m->tokens < CHUNK ? (m->tokens + 31) / 32 : CHUNK / 32;
    const size_t shared = (size_t)m->n_experts * words * 6;
    static const cudaError_t ready = [] {
        constexpr int most = BGK_MAX_EXPERTS * CHUNK / 32 * 6;
        const cudaError_t e =
            cudaFuncSetAttribute(plan<true>, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
        return e != cudaSuccess
                   ? e
                   : cudaFuncSetAttribute(plan<false>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          most);
    }();
    if (ready != cudaSuccess) return ready;
    if (blocks > 1) {
        const cudaError_t e =
            launch_after(plan<true>, dim3(blocks), dim3(PLAN_BLOCK), shared, stream, *m);
        if (e != cudaSuccess) return e;
    }
    return launch_after(plan<false>, dim3(blocks), dim3(PLAN_BLOCK), shared, stream, *m);
}

cudaError_t bgk_moe_gather(const bgk_out *x, const bgk_out *h, const bgk_moe *m, int groups,
                           cudaStream_t stream)
{
    if (!valid(m) || groups < 0 || !tiles(x) || !tiles(h) || h->stride < m->tokens ||
        x->stride < bgk_moe_gathered(m))
        return cudaErrorInvalidValue;
    if (m->tokens <= BGK_DIRECT || !m->n_used || !groups) return cudaSuccess;
    return launch_after(gather_rows, dim3(m->tokens, over(groups, BLOCK / 8)), dim3(BLOCK), 0,
                        stream, *x, *h, *m, groups);
}

cudaError_t bgk_moe_combine(float *out, int64_t out_cols, const void *rows, int64_t rows_cols,
                            const float *add, int64_t add_cols, const bgk_moe *m, int cols,
                            cudaStream_t stream)
{
    if (!valid(m) || cols < 0 || out_cols < cols || (add && add_cols < cols) || rows_cols < cols)
        return cudaErrorInvalidValue;
    if (!m->tokens || !cols) return cudaSuccess;
    const combined c = {out, (const __half *)rows, add, out_cols, rows_cols, add_cols, cols};
    const bool vec = ((uintptr_t)out | (uintptr_t)rows | (uintptr_t)add) % 16 == 0 &&
                     (rows_cols | cols) % 8 == 0 && (out_cols | (add ? add_cols : 0)) % 4 == 0;
    return launch_after(vec ? combine_rows<8> : combine_rows<1>,
                        dim3(m->tokens, over(cols, BLOCK * (vec ? 8 : 1))), dim3(BLOCK), 0, stream,
                        c, *m);
}

cudaError_t bgk_moe_plain(float *out, int64_t out_cols, const bgk_plain_experts *e, const float *x,
                          int64_t x_cols, const float *add, int64_t add_cols, const bgk_moe *m,
                          float *act, cudaStream_t stream)
{
    if (!valid(m) || e->k < 1 || e->n_ff < 0 || e->cols < 0 || e->k_padded < e->k ||
        e->ff_padded < e->n_ff || (e->type != BGK_F32 && e->type != BGK_F16) ||
        out_cols < e->cols || x_cols < e->k || (add && add_cols < e->cols))
        return cudaErrorInvalidValue;
    if (!m->tokens || !e->cols) return cudaSuccess;
    const int slots = m->n_used + m->n_shared;
    if (e->n_ff && slots) {
        const cudaError_t st =
            launch_after(plain_gate_up, dim3(m->tokens * slots, over(e->n_ff, WARPS)), dim3(BLOCK),
                         0, stream, act, *e, x, x_cols, *m);
        if (st != cudaSuccess) return st;
    }
    const combined c = {out, nullptr, add, out_cols, 0, add_cols, e->cols};
    return launch_after(plain_down, dim3(m->tokens, over(e->cols, WARPS)), dim3(BLOCK), 0, stream,
                        c, *e, (const float *)act, *m);
}
