/* kernels/few_moe.cu - the experts of a layer for a few tokens, where latency counts: the choice of
 * experts, gate and up in one kernel; down and the sum over a token's experts in another.
 *
 * What: every block chooses by itself, from the router's products, or reads the route where that is
 * made already; in the first kernel a warp has 16 rows of one expert's tile and one token
 * (few.cuh), in the second 32. Nothing is planned or gathered: an expert that two tokens chose is
 * read twice, the second time from L2.
 *
 * Requires: bgk_moe_few_fits(); sm_90a.
 *
 * Launch: programmatic. Before it waits for the kernel before, the first has the weights of shared
 * experts on their way. It lets the second start once the route is there: so the second fetches its
 * weights while the first is at work. Graph-capturable.
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
    int n_used, n_shared, tokens;
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

/* What the router makes of its products, of up to 32 EACH experts: for each its place in the order
 * and its weight. */
template <int EACH> struct scores {
    uint32_t order[32 * EACH];
    float weight[32 * EACH], part[2][EACH], extra;
    uint2 among[32 * EACH]; /* order and number of those that may be chosen */
    int chosen[BGK_MAX_USED];
    float own[BGK_MAX_USED]; /* weights of those */
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
template <int EACH>
__device__ void score(scores<EACH> &s, const bgk_moe_choice &c, const biases &first, int token)
{
    constexpr int AT_ONCE = 16; /* parts; nobody waits for one before all are asked for */
    const bgk_router &r = c.r;
    const int n = r.n_experts + r.shared_gate, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
    for (int i0 = threadIdx.x; i0 < n; i0 += 2 * blockDim.x) {
        const float *at = c.parts + token * c.parts_cols + i0;
        const int second = min((int)blockDim.x, n - 1 - i0); /* or once more one that is there */
        float v[2] = {};
#pragma unroll 1
        for (int left = c.n_parts; left > 0; left -= AT_ONCE) {
            float part[AT_ONCE][2];
#pragma unroll
            for (int p = 0; p < AT_ONCE; p++) {
                part[p][0] = p < left ? __ldcg(at) : 0.0f;
                part[p][1] = p < left ? __ldcg(at + second) : 0.0f;
                at += n;
            }
#pragma unroll
            for (int p = 0; p < AT_ONCE; p++)
#pragma unroll
                for (int k = 0; k < 2; k++)
                    v[k] += part[p][k];
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
template <int EACH> __device__ void pick_of(scores<EACH> &s, const bgk_router &r)
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
        if (before < k) {
            s.chosen[before] = own.y;
            s.own[before] = s.weight[own.y];
        }
    }
    __syncwarp();
}

/* The choice with its weights, by the warp that made it. */
template <int EACH> __device__ pick weigh(const scores<EACH> &s, const bgk_router &r)
{
    const int lane = threadIdx.x % 32, k = r.n_used;
    if (lane >= k) return {};
    float w = s.own[lane], sum = 0;
    if (r.gating == BGK_GATE_CHOSEN) {
        float most = s.own[0];
        for (int j = 1; j < k; j++)
            most = fmaxf(most, s.own[j]);
#pragma unroll 1
        for (int j = 0; j < k; j++)
            sum += expf(s.own[j] - most);
        w = expf(w - most) / sum;
    } else if (r.renormalise) {
#pragma unroll 4
        for (int j = 0; j < k; j++)
            sum += s.own[j];
        w /= sum < 6.103515625e-5f ? 6.103515625e-5f : sum;
    }
    return {s.chosen[lane], w * r.scale};
}

/* All threads of the block, after the kernel with the products, or of the route: the expert of a
 * slot. */
template <int EACH>
__device__ int choose(scores<EACH> &s, const bgk_moe_choice &c, const biases &first, int slot,
                      int token)
{
    if (!c.parts) return expert_in(__ldcg(c.route + token * c.route_cols + slot), c.r.n_experts);
    score(s, c, first, token);
    if (threadIdx.x < 32) pick_of(s, c.r);
    __syncthreads();
    return s.chosen[slot];
}

/* What choose() chose, to memory, by its first warp, and then the next kernel may start. */
template <int EACH>
__device__ void write_route(const scores<EACH> &s, const bgk_moe_choice &c, int token)
{
    const int lane = threadIdx.x % 32, k = c.r.n_used;
    const pick p = weigh(s, c.r);
    float *route = c.route + token * c.route_cols;
    if (lane < k) {
        route[lane] = (float)p.id;
        route[k + lane] = p.weight;
    }
    if (lane == 0) route[2 * k] = c.r.shared_gate ? s.extra : 1.0f;
    __threadfence();
    __syncwarp();
    ptx_let_next_start();
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
    constexpr int AT_ONCE = 4;
    const uint32_t step = 32 * (int)stride; /* pieces in four groups */
    uint32_t at = (group0 + lane / 8) * (step / 4) + row * 8 + lane % 8;
    to += 16 * (lane ^ (row & 7));
#pragma unroll 1
    for (int left = 8 * n - lane; left > 0; left -= 32 * AT_ONCE) {
        uint4 v[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++, at += step)
            if (left > 32 * k) v[k] = __ldcg((const uint4 *)x + at);
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++, to += 512)
            if (left > 32 * k) *(uint4 *)to = v[k];
    }
    __syncwarp();
}

__device__ void start_token(unsigned char *to, const __half *x, int64_t stride, int row, int group0,
                            int n, int lane)
{
    const uint32_t step = 32 * (int)stride;
    uint32_t at = (group0 + lane / 8) * (step / 4) + row * 8 + lane % 8;
    to += 16 * (lane ^ (row & 7));
#pragma unroll 1
    for (int left = 8 * n - lane; left > 0; left -= 32, at += step, to += 512)
        ptx_copy16(to, (const uint4 *)x + at);
    ptx_copy_commit();
}

constexpr int WARPS = 4;

/* act row 8 slot + token = fn(gate) up of the token's expert `slot`. First in the grid are blocks
 * that only choose, and write the route: a token's each, where there are products; then those of
 * shared experts, who know their weights before the choice is there. */
template <unsigned FORMATS, int PARTS, int EACH>
__global__ void __launch_bounds__(WARPS * 32, FORMATS == ALL || EACH > 8 ? 4 : 5)
    few_gate_up(const __grid_constant__ few_args f, int weight_bytes)
{
#if __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(128) unsigned char dynamic[];
    __shared__ scores<EACH> s;
    __shared__ float sums[PARTS > 1 ? PARTS - 1 : 1][WARPS / PARTS][4][32];
    constexpr int SLICES = WARPS / PARTS; /* a block */
    const args &a = f.a;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, slots = f.n_used + f.n_shared;
    const int part = warp % PARTS, in = warp / PARTS, blocks = a.n_tiles * 4 / SLICES;
    const int block = (int)blockIdx.x - (f.c.parts ? f.tokens : 0);
    const bool writes = block < 0;
    const int place = writes ? 0 : block / blocks, at = writes ? 0 : block % blocks * SLICES + in;
    const int token = writes ? blockIdx.x : place / slots, turn = place % slots;
    const int slot = writes ? 0 : turn < f.n_shared ? f.n_used + turn : turn - f.n_shared;
    const bool chooses = slot < f.n_used;
    if (f.c.parts && !writes) ptx_let_next_start(); /* the route's block is who says when */
    const int tile = at / 4, slice = at % 4, t = slice * 32 + lane;
    const int begin = part_begin(a, part), n = part_begin(a, part + 1) - begin;
    const int token_bytes = few_part_chunks(a.n_chunks, PARTS) * 128;
    unsigned char *tokens = dynamic + warp * (token_bytes + weight_bytes),
                  *weights = tokens + token_bytes;
    int e = f.c.r.n_experts + slot - f.n_used;
    if (chooses) {
        const biases first(f.c.r);
        ptx_wait_prior();
        if (!f.c.parts) ptx_let_next_start();
        if (!writes) start_token(tokens, a.x, a.x_stride, token, begin, n, lane);
        e = choose(s, f.c, first, slot, token);
        if (writes) {
            if (warp == 0) write_route(s, f.c, token);
            return;
        }
    }
    const int format = a.stack_format[e >= a.n_first];
    const rows to = rows_of(a, e, tile, t);
    const char *w = tile_of(a, e, tile, format) + (int64_t)begin * chunk_bytes(format);
    few_fill<FORMATS, FEW_FLOW>(format, w, n, weights, weight_bytes, slice, lane);
    if (!chooses) {
        ptx_wait_prior();
        if (!f.c.parts) ptx_let_next_start();
        bring_token(tokens, a.x, a.x_stride, token, begin, n, lane);
    }
    float acc[4] = {};
    few_product<FORMATS, FEW_FLOW>(format, acc, w, n, true, weights, weight_bytes, tokens, 0, slice,
                                   lane);
    if (!few_gather<PARTS, SLICES>(acc, sums, part, in, lane)) return;
    const int row = 8 * slot + token;
    write<8>(acc, a, to, tile, row, row + 1, t);
#endif
}

/* A warp's two neighbouring slices of a tile; K is that of few experts' activations, so that mostly
 * all chunks are there at once, a chunk's slices one after the other. */
template <bgk_format F> struct pair_of_slices {
    static constexpr int SLICE = chunk_bytes(F) / 4;

    static __device__ void fill(const char *w, int n, unsigned char *weights, int slice, int lane)
    {
        bringer<F> first(w, slice, lane), second(w, slice + 1, lane);
#pragma unroll 1
        for (int i = 0; i < n; i++) {
            first.bring(weights, lane);
            second.bring(weights + SLICE, lane);
            weights += 2 * SLICE;
        }
        ptx_copy_commit();
    }

    /* Chains of products side by side. at: few_piece() of the first chunk's group. */
    static __device__ __forceinline__ void sum(float (&acc)[2][4], int n,
                                               const unsigned char *weights, uint32_t at, int lane)
    {
        uint32_t x = ptx_shared(weights);
#pragma unroll 1
        for (int i = 0; i < n; i++) {
            staged<F> w[2];
            uint32_t b[8];
            w[0].load(x, lane);
            w[1].load(x + SLICE, lane);
            few_load(b, at);
#pragma unroll
            for (int s = 0; s < 4; s++) {
                const uint32_t two[2] = {b[2 * s], b[2 * s + 1]};
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    uint32_t operand[4];
                    w[k].template step<true>(operand, s);
                    ptx_mma16816(acc[k], operand, two);
                }
            }
            x += 2 * SLICE;
            at += 128;
        }
    }
};

/* v, as a number that the compiler thinks is another: what is made of it takes registers where it
 * is used, and not before. For the second kernel's later weights: their addresses, made beside
 * those of the first, would live through the products, and it would spill. */
__device__ __forceinline__ int anew(int v)
{
    asm volatile("" : "+r"(v));
    return v;
}

/* How the second kernel uses its shared memory: a warp has its token's chunks, and so many of the
 * weights' at a time. */
struct second_room {
    int chunks;   /* 0: there is no room */
    int bytes[2]; /* of a warp: with an expert that was chosen, with a shared one */
};

/* A block has 32 columns of a token's result, a warp the part of one expert in them. It starts when
 * the route is there, and has its weights when the activations come. Its registers are few, so that
 * all blocks find room beside those of the first kernel. */
template <unsigned FORMATS>
__global__ void __launch_bounds__(FORMATS == ALL ? MOST_SLOTS * 32 : 576, 2) /* 576: 56 registers */
    few_down(const __grid_constant__ few_args f, const second_room room, float *out,
             int64_t out_cols, const float *add, int64_t add_cols)
{
#if __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(128) unsigned char dynamic[];
    /* Behind the slots': what is added, and its weight. */
    __shared__ float parts[MOST_SLOTS + 1][32], shares[MOST_SLOTS + 1];
    const args &a = f.a;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, slots = f.n_used + f.n_shared;
    const int token = blockIdx.y, tile = blockIdx.x / 2, slice = blockIdx.x % 2 * 2;
    const int shared = max(0, warp - f.n_used), n = a.n_chunks;
    ptx_let_next_start();
    const float *route = f.c.route + token * f.c.route_cols;
    const int e = warp < f.n_used ? expert_in(__ldcg(route + warp), f.c.r.n_experts)
                                  : f.c.r.n_experts + warp - f.n_used;
    const int format = a.stack_format[e >= a.n_first];
    unsigned char *x = dynamic + (warp - shared) * room.bytes[0] + shared * room.bytes[1],
                  *weights = x + n * 128;
    auto fill = [&](int e, int slice, int lane, int done) {
        const char *w = tile_of(a, e, tile, format) + (int64_t)done * chunk_bytes(format);
        few_as<FORMATS>(format, [&](auto f) {
            pair_of_slices<decltype(f)::value>::fill(w, min(room.chunks, n - done), weights, slice,
                                                     lane);
        });
    };
    fill(e, slice, lane, 0);
    if (warp == 0 && lane <= MOST_SLOTS)
        shares[lane] = lane < f.n_used      ? __ldcg(route + f.n_used + lane)
                       : lane == MOST_SLOTS ? __ldcg(route + 2 * f.n_used)
                                            : 1.0f;
    /* A lane finishes column 8 (lane % 4) + lane / 4 of the block's. */
    const int quarter = lane % 4, col = 8 * quarter + lane / 4;
    const int64_t at = ((int64_t)e * a.n_tiles + tile) * 64 + slice * 16 + col;
    const float scale = a.row_scale[at], bias = a.bias ? a.bias[at] : 0.0f;
    const int col0 = tile * 64 + slice * 16;
    float acc[2][4] = {};
    ptx_copy_wait<0>();
    ptx_wait_prior();
    start_token(x, a.x, a.x_stride, 8 * warp + token, 0, n, lane);
    if (add && warp == 0 && col0 + lane < a.n_out)
        parts[MOST_SLOTS][lane] = __ldcg(add + token * add_cols + col0 + lane);
#pragma unroll 1
    for (int done = 0; done < n;) {
        const int some = min(room.chunks, n - done);
        ptx_copy_wait<0>();
        __syncwarp();
        few_as<FORMATS>(format, [&](auto f) {
            pair_of_slices<decltype(f)::value>::sum(acc, some, weights,
                                                    few_piece(x + done * 128, 0, lane), lane);
        });
        done += some;
        if (done >= n) break;
        __syncwarp();
        fill(anew(e), anew(slice), anew(lane), done);
    }
    /* The product's first column is the token's: the first lane of four has it. */
    float own = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float v = __shfl_sync(~0u, acc[i / 2][i % 2 * 2], lane & ~3);
        if (quarter == i) own = v;
    }
    parts[warp][col] = __half2float(__float2half_rn(limit(fmaf(own, scale, bias))));
    __syncthreads();
    if (warp) return;
    float sum = 0;
#pragma unroll
    for (int j = 0; j < MOST_SLOTS; j++) {
        const float part = parts[j][lane];
        if (j < slots) sum = fmaf(shares[j], part, sum);
    }
    if (add) sum = fmaf(shares[MOST_SLOTS], parts[MOST_SLOTS][lane], sum);
    if (col0 + lane < a.n_out) out[token * out_cols + col0 + lane] = sum;
#endif
}

struct few_call {
    few_args gate_up, down;
    second_room room;
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
              writers = c.gate_up.c.parts ? c.tokens : 0,
              chunks = few_part_chunks(a.n_chunks, PARTS);
    /* A ring of a few chunks: the first are worked on while the others come. */
    const int beside = min(4, 1 + (blocks + sm_count() - 1) / sm_count());
    const int weight_bytes =
        few_ring(FORMATS, min(chunks, 2 * QUARTERS), WARPS, chunks * 128, beside);
    static const cudaError_t ready = cudaFuncSetAttribute(
        few_gate_up<FORMATS, PARTS, EACH>, cudaFuncAttributeMaxDynamicSharedMemorySize, FEW_SHARED);
    if (ready != cudaSuccess) return ready;
    return launch_after(few_gate_up<FORMATS, PARTS, EACH>, dim3(writers + blocks), dim3(WARPS * 32),
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

/* Two blocks of the second kernel beside each other, or else one. */
second_room second_room_of(const bgk_weights *w, const bgk_moe *m)
{
    const bool known = w->n_first == m->n_experts;
    const bgk_format any = few_widest(w->formats);
    const bgk_format format[2] = {known ? w->stack_format[0] : any,
                                  known ? w->stack_format[1] : any};
    second_room room = {};
    for (int beside = 2; beside > 0 && !room.chunks; beside--) {
        const int64_t block = beside > 1 ? (FEW_SHARED + 8192) / beside : FEW_SHARED;
        int64_t token = (int64_t)w->n_chunks * 128, chunk = 0;
        for (int i = 0; i < 2; i++)
            chunk += (int64_t)(i ? m->n_shared : m->n_used) * chunk_bytes(format[i]) / 2;
        const int64_t left = block - token * (m->n_used + m->n_shared);
        const int64_t chunks = left > 0 && chunk > 0 ? left / chunk : 0;
        room.chunks = (int)(chunks < w->n_chunks ? chunks : w->n_chunks);
        for (int i = 0; i < 2; i++)
            room.bytes[i] = (int)token + room.chunks * (chunk_bytes(format[i]) / 2);
    }
    return room;
}

template <unsigned FORMATS> cudaError_t launch_second(const few_call &c)
{
    static const cudaError_t ready = cudaFuncSetAttribute(
        few_down<FORMATS>, cudaFuncAttributeMaxDynamicSharedMemorySize, FEW_SHARED);
    if (ready != cudaSuccess) return ready;
    const few_args &f = c.down;
    const size_t bytes = (size_t)f.n_used * c.room.bytes[0] + (size_t)f.n_shared * c.room.bytes[1];
    return launch_after(few_down<FORMATS>, dim3(f.a.n_tiles * 2, c.tokens), dim3(c.slots * 32),
                        bytes, c.stream, f, c.room, c.out, c.out_cols, c.add, c.add_cols);
}

} // namespace

bool bgk_moe_few_fits(const bgk_weights *gate_up, const bgk_weights *down, const bgk_moe *m)
{
    const int chunks = few_part_chunks(gate_up->n_chunks, gate_up->splits);
    return m->tokens <= BGK_MOE_FEW && m->n_used + m->n_shared <= MOST_SLOTS && gate_up->n_ff > 0 &&
           !gate_up->block_tiles && !down->block_tiles &&
           few_ring(gate_up->formats, chunks, WARPS, chunks * 128, 1) && down->splits == 1 &&
           second_room_of(down, m).chunks;
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
    c.gate_up = {stack_args(act, gate_up, h, fn), *choice, m->n_used, m->n_shared, m->tokens};
    c.down = {stack_args(&to, down, act, fn), *choice, m->n_used, m->n_shared, m->tokens};
    c.room = second_room_of(down, m);
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
        down->formats, [&](auto f) { return launch_second<decltype(f)::value>(c); });
}
