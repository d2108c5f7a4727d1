/* kernels/few_moe.cu - the experts of a layer for a few tokens, where latency counts: the choice of
 * experts, gate and up in one kernel; down and the sum over a token's experts in another.
 *
 * What: every block chooses by itself, from the router's products; a warp has 16 rows of one
 * expert's tile and one token (few.cuh). Nothing is planned or gathered: an expert that two tokens
 * chose is read twice, the second time from L2.
 *
 * Requires: bgk_moe_few_fits(); sm_90a.
 *
 * Launch: programmatic. The first kernel lets the second start once the route is there: so the
 * second fetches its weights while the first is at work. Graph-capturable.
 *
 * Order: that of bgk_route(), bgk_moe_matmul() and bgk_moe_combine(), bit for bit.
 *
 * Proof: tests/gpu/test_moe.c. */
#include "few.cuh"

namespace
{

constexpr int MOST_SLOTS = 16; /* experts of a token, shared ones too: warps of the second kernel */

struct few_args {
    args a;
    bgk_moe_choice c;
    int n_used, n_shared;
};

/* ---- the choice: bgk_route()'s for one token, by every block ---- */

struct pick { /* lane j: choice j */
    int id;
    float weight;
};

__device__ int expert_in(float route, int n_experts)
{
    return max(0, min((int)route, n_experts - 1));
}

__device__ float few_sigmoid(float v)
{
    return 1.0f / (1.0f + expf(-v));
}

/* As floats are ordered; NaN is -infinity. 0 is less than all. */
__device__ uint32_t order_of(float v)
{
    const uint32_t bits = __float_as_uint((isnan(v) ? -INFINITY : v) + 0.0f); /* -0 becomes 0 */
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

/* What the router makes of its products: for each expert its place in the order and its weight. */
struct scores {
    uint32_t order[BGK_MAX_EXPERTS];
    float weight[BGK_MAX_EXPERTS], part[2][(BGK_MAX_EXPERTS + 31) / 32], extra;
    uint2 among[BGK_MAX_EXPERTS]; /* order and number of those that may be chosen */
    int chosen[BGK_MAX_USED];
};

/* Of a thread's experts threadIdx.x + i blockDim.x, i < 2; of those beyond, of some other. */
struct biases {
    float logit[2], choice[2];
    __device__ biases(const bgk_router &r)
    {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int at = min((int)(threadIdx.x + i * blockDim.x), r.n_experts - 1);
            logit[i] = r.bias ? r.bias[at] : 0.0f;
            choice[i] = r.choice_bias ? r.choice_bias[at] : 0.0f;
        }
    }
};

/* All threads; ends with a barrier. */
__device__ void score(scores &s, const bgk_moe_choice &c, const biases &first, int token)
{
    const bgk_router &r = c.r;
    const int n = r.n_experts + r.shared_gate, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
    for (int i0 = threadIdx.x; i0 < n; i0 += 2 * blockDim.x) {
        const float *at = c.parts + token * c.parts_cols + i0;
        const int second = min((int)blockDim.x, n - 1 - i0); /* or once more one that is there */
        float v[2] = {};
#pragma unroll 16
        for (int p = 0; p < c.n_parts; p++) {
            v[0] += __ldcg(at);
            v[1] += __ldcg(at + second);
            at += n;
        }
#pragma unroll 1
        for (int k = 0; k < 2; k++) {
            const int i = i0 + k * blockDim.x;
            float value = k ? v[1] : v[0], logit = k ? first.logit[1] : first.logit[0],
                  choice = k ? first.choice[1] : first.choice[0];
            if (i >= n) break;
            if (i == r.n_experts) {
                s.extra = few_sigmoid(value);
                break;
            }
            if (i0 != (int)threadIdx.x) {
                logit = r.bias ? r.bias[i] : 0.0f;
                choice = r.choice_bias ? r.choice_bias[i] : 0.0f;
            }
            value += logit;
            if (r.gating == BGK_GATE_SIGMOID) value = few_sigmoid(value);
            s.weight[i] = value;
            if (r.gating != BGK_GATE_SOFTMAX) s.order[i] = order_of(value + choice);
        }
    }
    __syncthreads();
    if (r.gating != BGK_GATE_SOFTMAX) return;
    const int warps = (r.n_experts + 31) / 32; /* of a block with a thread for each expert */
    for (int w = warp; w < warps; w += blockDim.x / 32) {
        const int i = 32 * w + lane;
        float v = i < r.n_experts ? s.weight[i] : -INFINITY;
        for (int d = 16; d > 0; d /= 2)
            v = fmaxf(v, __shfl_xor_sync(~0u, v, d));
        if (lane == 0) s.part[0][w] = v;
    }
    __syncthreads();
    float most = s.part[0][0];
    for (int w = 1; w < warps; w++)
        most = fmaxf(most, s.part[0][w]);
    for (int w = warp; w < warps; w += blockDim.x / 32) {
        const int i = 32 * w + lane;
        const float e = i < r.n_experts ? expf(s.weight[i] - most) : 0.0f;
        float v = e;
        for (int d = 16; d > 0; d /= 2)
            v += __shfl_xor_sync(~0u, v, d);
        if (lane == 0) s.part[1][w] = v;
        if (i < r.n_experts) s.weight[i] = e;
    }
    __syncthreads();
    float sum = s.part[1][0];
    for (int w = 1; w < warps; w++)
        sum += s.part[1][w];
    for (int i = threadIdx.x; i < r.n_experts; i += blockDim.x) {
        const float v = s.weight[i] / sum;
        s.weight[i] = v;
        s.order[i] = order_of(v + (r.choice_bias ? r.choice_bias[i] : 0.0f));
    }
    __syncthreads();
}

/* The n_used first in order, of equals the one of lower number; by one warp. EACH: experts a lane.
 *
 * Lanes are as many groups as there are choices, or more: each group's largest is at least the
 * least of these, so few others are; they are counted out against each other. */
template <int EACH> __device__ pick pick_of(scores &s, const bgk_router &r)
{
    const int lane = threadIdx.x % 32, k = r.n_used;
    uint32_t mine[EACH], most = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        mine[i] = lane + 32 * i < r.n_experts ? s.order[lane + 32 * i] : 0;
        most = max(most, mine[i]);
    }
    const int apart = r.n_experts < 32 ? 0 : k > 16 ? 0 : k > 8 ? 1 : k > 4 ? 2 : k > 2 ? 4 : 8;
#pragma unroll 1
    for (int d = apart; d > 0; d /= 2)
        most = max(most, __shfl_xor_sync(~0u, most, d));
    const uint32_t least = __reduce_min_sync(~0u, r.n_experts < 32 ? 1u : most);
    int n = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const bool in = mine[i] >= least;
        const uint32_t all = __ballot_sync(~0u, in);
        if (in) s.among[n + __popc(all & ((1u << lane) - 1))] = make_uint2(mine[i], lane + 32 * i);
        n += __popc(all);
    }
    __syncwarp();
#pragma unroll 1
    for (int i = lane; i < n; i += 32) {
        const uint2 own = s.among[i];
        int before = 0;
#pragma unroll 4
        for (int j = 0; j < n; j++) {
            const uint2 other = s.among[j];
            before += other.x > own.x || (other.x == own.x && other.y < own.y);
        }
        if (before < k) s.chosen[before] = own.y;
    }
    __syncwarp();
    const int id = lane < k ? s.chosen[lane] : 0;
    const float own = lane < k ? s.weight[id] : 0.0f;
    float w = own;
    if (r.gating == BGK_GATE_CHOSEN) {
        float most = __shfl_sync(~0u, own, 0), sum = 0;
        for (int j = 1; j < k; j++)
            most = fmaxf(most, __shfl_sync(~0u, own, j));
        const float e = expf(own - most);
        for (int j = 0; j < k; j++)
            sum += __shfl_sync(~0u, e, j);
        w = e / sum;
    } else if (r.renormalise) {
        float sum = 0;
#pragma unroll 4
        for (int j = 0; j < k; j++)
            sum += __shfl_sync(~0u, own, j);
        w = own / (sum < 6.103515625e-5f ? 6.103515625e-5f : sum);
    }
    return {id, w * r.scale};
}

/* All threads of the block, after the kernel with the products, or of the route: the expert of a
 * slot. p: in the first warp, all of the choice. */
template <int EACH>
__device__ int choose(pick &p, scores &s, const bgk_moe_choice &c, const biases &first, int slot,
                      int token)
{
    const float *route = c.route + token * c.route_cols;
    if (!c.parts) return expert_in(__ldcg(route + slot), c.r.n_experts);
    score(s, c, first, token);
    if (threadIdx.x < 32) p = pick_of<EACH>(s, c.r);
    __syncthreads();
    return s.chosen[slot];
}

/* ---- products ---- */

/* Where expert e's tile lies; e >= n_first: a shared one. */
__device__ const char *tile_of(const args &a, int e, int tile, int format)
{
    const bool other = e >= a.n_first;
    const int64_t at = (int64_t)(e - (other ? a.n_first : 0)) * a.n_tiles + tile;
    return a.stack[other] + at * a.n_chunks * chunk_bytes(format);
}

/* As bgk_moe_matmul()'s rows: those of a tile of expert e. */
__device__ rows rows_of(const args &a, int e, int tile, int t)
{
    const int r0 = t / 32 * 16 + t % 32 / 4;
    const int64_t at = ((int64_t)e * a.n_tiles + tile) * 64 + r0;
    return {a.row_scale[at],
            a.row_scale[at + 8],
            a.bias ? a.bias[at] : 0.0f,
            a.bias ? a.bias[at + 8] : 0.0f,
            tile * 64,
            min(64, a.n_out - tile * 64)};
}

/* One token's n groups from group0 on, as row 0 of a tile; by a warp: at once, or as one group of
 * copies. */
__device__ void bring_token(unsigned char *to, const __half *x, int64_t stride, int row, int group0,
                            int n, int lane)
{
#pragma unroll 4
    for (int i = lane; i < 8 * n; i += 32)
        *(uint4 *)(to + 16 * (i ^ (row & 7))) = __ldcg((
            const uint4 *)((const char *)x + ((group0 + i / 8) * stride + row) * 128 + i % 8 * 16));
    __syncwarp();
}

__device__ void start_token(unsigned char *to, const __half *x, int64_t stride, int row, int group0,
                            int n, int lane)
{
#pragma unroll 1
    for (int i = lane; i < 8 * n; i += 32)
        ptx_copy16(to + 16 * (i ^ (row & 7)),
                   (const char *)x + ((group0 + i / 8) * stride + row) * 128 + i % 8 * 16);
    ptx_copy_commit();
}

constexpr int WARPS = 4;

/* act row 8 slot + token = fn(gate) up of the token's expert `slot`; shared experts come first in
 * the grid: they know their weights before the choice is there. */
template <unsigned FORMATS, int PARTS, int EACH>
__global__ void __launch_bounds__(WARPS * 32, 3)
    few_gate_up(const __grid_constant__ few_args f, int weight_bytes)
{
#if __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(128) unsigned char dynamic[];
    __shared__ scores s;
    __shared__ float sums[PARTS > 1 ? PARTS - 1 : 1][WARPS / PARTS][4][32];
    constexpr int SLICES = WARPS / PARTS; /* a block */
    const args &a = f.a;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, slots = f.n_used + f.n_shared;
    const int part = warp % PARTS, in = warp / PARTS, blocks = a.n_tiles * 4 / SLICES;
    const int place = blockIdx.x / blocks, at = blockIdx.x % blocks * SLICES + in;
    const int token = place / slots, turn = place % slots, tile = at / 4, t = at % 4 * 32 + lane;
    const int slot = turn < f.n_shared ? f.n_used + turn : turn - f.n_shared;
    const int begin = part_begin(a, part), n = part_begin(a, part + 1) - begin;
    const int token_bytes = few_part_chunks(a.n_chunks, PARTS) * 128, slice = at % 4;
    unsigned char *tokens = dynamic + warp * (token_bytes + weight_bytes),
                  *weights = tokens + token_bytes;
    float acc[4] = {};
    int e = f.c.r.n_experts + slot - f.n_used;
    const bool writes = f.c.parts && slot == 0 && blockIdx.x % blocks == 0;
    if (slot < f.n_used) {
        const biases first(f.c.r);
        ptx_wait_prior();
        if (!writes) ptx_let_next_start();
        start_token(tokens, a.x, a.x_stride, token, begin, n, lane);
        pick p;
        e = choose<EACH>(p, s, f.c, first, slot, token);
        if (writes) { /* whoever starts then finds it */
            if (warp == 0) {
                float *route = f.c.route + token * f.c.route_cols;
                if (lane < f.n_used) {
                    route[lane] = (float)p.id;
                    route[f.n_used + lane] = p.weight;
                }
                if (lane == 0) route[2 * f.n_used] = f.c.r.shared_gate ? s.extra : 1.0f;
                __threadfence();
            }
            __syncthreads();
            ptx_let_next_start();
        }
    }
    const int format = a.stack_format[e >= a.n_first];
    const rows to = rows_of(a, e, tile, t);
    few_chain<FORMATS, FEW_FLOW>(format, acc,
                                 tile_of(a, e, tile, format) + (int64_t)begin * chunk_bytes(format),
                                 n, weights, weight_bytes, tokens, 0, slice, lane, [&] {
                                     if (slot < f.n_used) return; /* its copies are the oldest */
                                     ptx_wait_prior();
                                     ptx_let_next_start();
                                     bring_token(tokens, a.x, a.x_stride, token, begin, n, lane);
                                 });
    if (!few_gather<PARTS, SLICES>(acc, sums, part, in, lane)) return;
    const int row = 8 * slot + token;
    write<8>(acc, a, to, tile, row, row + 1, t);
#endif
}

/* A block has 16 columns of a token's result, a warp the part of one expert in them. It starts when
 * the route is there, and has its weights when the activations come. */
template <unsigned FORMATS>
__global__ void __launch_bounds__(MOST_SLOTS * 32, 2)
    few_down(const __grid_constant__ few_args f, int weight_bytes, float *out, int64_t out_cols,
             const float *add, int64_t add_cols)
{
#if __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(128) unsigned char dynamic[];
    __shared__ float parts[MOST_SLOTS][16];
    const args &a = f.a;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, slots = f.n_used + f.n_shared;
    const int token = blockIdx.y, tile = blockIdx.x / 4, slice = blockIdx.x % 4;
    ptx_let_next_start();
    const float *route = f.c.route + token * f.c.route_cols;
    const int e = warp < f.n_used ? expert_in(__ldcg(route + warp), f.c.r.n_experts)
                                  : f.c.r.n_experts + warp - f.n_used;
    const float by = lane < f.n_used ? __ldcg(route + f.n_used + lane) : 1.0f;
    const int format = a.stack_format[e >= a.n_first];
    const rows to = rows_of(a, e, tile, 32 * slice + lane);
    const char *w = tile_of(a, e, tile, format);
    unsigned char *weights = dynamic + warp * (weight_bytes + a.n_chunks * 128),
                  *x = weights + weight_bytes;
    float acc[4] = {};
    few_chain<FORMATS, FEW_WHOLE>(
        format, acc, w, a.n_chunks, weights, weight_bytes, x, 0, slice, lane, [&] {
            ptx_wait_prior();
            bring_token(x, a.x, a.x_stride, 8 * warp + token, 0, a.n_chunks, lane);
        });
    if (lane % 4 == 0) { /* the first column of the product is the token's */
        parts[warp][lane / 4] = __half2float(__float2half_rn(limit(fmaf(acc[0], to.s0, to.b0))));
        parts[warp][lane / 4 + 8] =
            __half2float(__float2half_rn(limit(fmaf(acc[2], to.s1, to.b1))));
    }
    __syncthreads();
    if (warp) return;
    const int col = tile * 64 + slice * 16 + lane % 16;
    float sum = 0;
#pragma unroll 1
    for (int j = 0; j < slots; j++)
        sum = fmaf(__shfl_sync(~0u, by, j), parts[j][lane % 16], sum);
    if (lane >= 16 || col >= a.n_out) return;
    if (add) sum = fmaf(__ldcg(route + 2 * f.n_used), add[token * add_cols + col], sum);
    out[token * out_cols + col] = sum;
#endif
}

struct few_call {
    few_args gate_up, down;
    float *out;
    int64_t out_cols;
    const float *add;
    int64_t add_cols;
    int tokens, slots;
    cudaStream_t stream;
};

template <unsigned FORMATS, int PARTS, int EACH> cudaError_t launch_first(const few_call &c)
{
    const args &a = c.gate_up.a;
    const int blocks = c.tokens * c.slots * a.n_tiles * PARTS,
              chunks = few_part_chunks(a.n_chunks, PARTS);
    /* A ring of a few chunks: the first are worked on while the others come. */
    const int beside = min(4, 1 + (blocks + sm_count() - 1) / sm_count());
    const int weight_bytes = few_ring(FORMATS, few_widest(FORMATS), min(chunks, 2 * QUARTERS),
                                      WARPS, chunks * 128, beside);
    static const cudaError_t ready = cudaFuncSetAttribute(
        few_gate_up<FORMATS, PARTS, EACH>, cudaFuncAttributeMaxDynamicSharedMemorySize, FEW_SHARED);
    if (ready != cudaSuccess) return ready;
    return launch_after(few_gate_up<FORMATS, PARTS, EACH>, dim3(blocks), dim3(WARPS * 32),
                        (size_t)WARPS * (chunks * 128 + weight_bytes), c.stream, c.gate_up,
                        weight_bytes);
}

template <unsigned FORMATS, int PARTS> cudaError_t launch_first(const few_call &c)
{
    return c.gate_up.c.r.n_experts <= 256 ? launch_first<FORMATS, PARTS, 8>(c)
                                          : launch_first<FORMATS, PARTS, 16>(c);
}

template <unsigned FORMATS> cudaError_t launch_first(const few_call &c)
{
    switch (c.gate_up.a.splits) {
    case 1:
        return launch_first<FORMATS, 1>(c);
    case 2:
        return launch_first<FORMATS, 2>(c);
    default:
        return launch_first<FORMATS, 4>(c);
    }
}

/* A warp of the second kernel has its token's chunks and a ring of weights. 0: no room. */
size_t second_bytes(const bgk_weights *w, int slots, int *ring)
{
    const size_t token = (size_t)w->n_chunks * 128;
    *ring = few_ring(w->formats, w->stack_format[0], few_part_chunks(w->n_chunks, w->splits), slots,
                     token, 2, 1);
    return *ring ? (size_t)slots * (*ring + token) : 0;
}

template <unsigned FORMATS> cudaError_t launch_second(const few_call &c, const bgk_weights *w)
{
    static const cudaError_t ready = cudaFuncSetAttribute(
        few_down<FORMATS>, cudaFuncAttributeMaxDynamicSharedMemorySize, FEW_SHARED);
    if (ready != cudaSuccess) return ready;
    int ring;
    const size_t bytes = second_bytes(w, c.slots, &ring);
    return launch_after(few_down<FORMATS>, dim3(c.down.a.n_tiles * 4, c.tokens), dim3(c.slots * 32),
                        bytes, c.stream, c.down, ring, c.out, c.out_cols, c.add, c.add_cols);
}

} // namespace

bool bgk_moe_few_fits(const bgk_weights *gate_up, const bgk_weights *down, const bgk_moe *m)
{
    const int chunks = few_part_chunks(gate_up->n_chunks, gate_up->splits);
    int ring;
    return m->tokens <= BGK_MOE_FEW && m->n_used + m->n_shared <= MOST_SLOTS && gate_up->n_ff > 0 &&
           !gate_up->block_tiles && !down->block_tiles &&
           few_ring(gate_up->formats, few_widest(gate_up->formats), chunks, WARPS, chunks * 128,
                    1) &&
           down->splits == 1 && second_bytes(down, m->n_used + m->n_shared, &ring);
}

cudaError_t bgk_moe_few(float *out, int64_t out_cols, const bgk_weights *gate_up,
                        const bgk_weights *down, const bgk_out *act, const bgk_out *h,
                        const bgk_moe_choice *choice, const float *add, int64_t add_cols,
                        const bgk_moe *m, bgk_act fn, cudaStream_t stream)
{
    const bgk_router &r = choice->r;
    auto tiles = [](const bgk_out *o) {
        return o->layout == BGK_TILES && o->stride % BGK_TILE_ROWS == 0 &&
               (uintptr_t)o->data % 128 == 0;
    };
    const int slots = m->n_used + m->n_shared;
    if (!bgk_moe_few_fits(gate_up, down, m) || !tiles(act) || !tiles(h) || h->stride < m->tokens ||
        act->stride < 8 * slots || m->n_used < 1 || m->n_used > BGK_MAX_USED ||
        r.n_experts < m->n_used || r.n_experts > BGK_MAX_EXPERTS || r.n_experts != m->n_experts ||
        !choice->route || choice->route_cols < 2 * m->n_used + 1 ||
        (choice->parts && (r.n_used != m->n_used || r.n_groups > 1 || choice->n_parts < 1)) ||
        out_cols < down->n_out || (add && add_cols < down->n_out))
        return cudaErrorInvalidValue;
    if (!on_hopper()) return cudaErrorNotSupported;
    if (!m->tokens) return cudaSuccess;
    few_call c = {};
    const bgk_out to = {out, BGK_ROWS, out_cols};
    c.gate_up = {stack_args(act, gate_up, h, fn), *choice, m->n_used, m->n_shared};
    c.down = {stack_args(&to, down, act, fn), *choice, m->n_used, m->n_shared};
    c.out = out;
    c.out_cols = out_cols;
    c.add = add;
    c.add_cols = add_cols;
    c.tokens = m->tokens;
    c.slots = slots;
    c.stream = stream;
    const cudaError_t e = by_formats<W4, W6, W8, W4 | W8, W6 | W8>(
        gate_up->formats, [&](auto f) { return launch_first<decltype(f)::value>(c); });
    if (e != cudaSuccess) return e;
    return by_formats<W4, W6, W8, W4 | W8, W6 | W8>(
        down->formats, [&](auto f) { return launch_second<decltype(f)::value>(c, down); });
}
