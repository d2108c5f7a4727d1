/* kernels/index.cu - the lightning indexer of DeepSeek Sparse Attention (DeepSeek-V3.2-Exp): which
 * keys a token attends to.
 *
 * Requires: dim even, at most 128.
 *
 * Launch: store: a block a row. scores: rows in y, blocks in x that take 256 keys (32 a warp) by
 * turns; the rest leaves at once. select: a block a row. rows, all three in one: a cluster a row,
 * whose blocks take 32 keys a warp by turns and give scores to the first one, which selects.
 * Graph-capturable, may start early.
 *
 * Order: a score is, for each lane's heads in order, a chain of weight * relu(q . k), then lanes';
 * q . k on tensor cores in steps of 16 of a fixed order of the dims. Set by n_heads and dim alone.
 *
 * Selection: keys are told apart by (score, lower position), so the top_k-th is one key, and those
 * chosen are the ones that are not below it. It is found among the keys of one of 2048 bins, equal
 * parts of what scores range over; where that bin has too many (scores that are alike, outliers,
 * infinities) by the digits of score and position.
 *
 * Proof: tests/gpu/test_mla.c, tests/gpu/test_index.c. */
#include <cooperative_groups.h>

#include "cluster.cuh"
#include "mla.cuh"

namespace
{

constexpr int MOST = 128;

__device__ float wide(float v)
{
    return v;
}

__device__ float wide(__half v)
{
    return __half2float(v);
}

__device__ float wide(__nv_bfloat16 v)
{
    return __bfloat162float(v);
}

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

/* ---- keys and queries --------------------------------------------------------------------------
 */

constexpr int STORE = 256;

struct store_args {
    bgk_index x;
    void *q;
    float *w;
    bgk_out iq;
    const float *ik;
    int64_t ik_cols;
    bgk_rows rows;
};

template <typename T> __device__ T *key_of(const bgk_index &x, const int32_t *table, int pos)
{
    const int64_t block = (int64_t)x.layer * x.n_blocks + table[pos / x.block_tokens];
    return (T *)x.keys + (block * x.block_tokens + pos % x.block_tokens) * x.dim;
}

/* Value i of a head whose values f(j) gives, rotated; angle(p) is pair p's. */
template <typename F, typename A>
__device__ float turned(const bgk_rotation &r, int i, F f, A angle)
{
    if (i >= r.n_rot) return f(i);
    const int half = r.n_rot / 2, pair = r.neox ? i % half : i / 2;
    const bool hi = r.neox ? i >= half : i % 2;
    const float2 v = mla_turned(f(r.neox ? pair : 2 * pair), f(r.neox ? pair + half : 2 * pair + 1),
                                angle(pair));
    return hi ? v.y : v.x;
}

/* key[dim], shared, by a warp: LayerNorm with weights w and b (or NULL). */
__device__ void norm_key(float *key, const bgk_index &x, const float *w, const float *b,
                         const float *ik, int lane)
{
    float v[MOST / 32], sum = 0, square = 0;
#pragma unroll
    for (int k = 0; k < MOST / 32; k++)
        v[k] = lane + 32 * k < x.dim ? ik[lane + 32 * k] : 0.0f;
#pragma unroll
    for (int k = 0; k < MOST / 32; k++)
        if (lane + 32 * k < x.dim) sum = __fadd_rn(sum, v[k]);
    for (int d = 16; d > 0; d /= 2)
        sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, d));
    const float mean = __fdiv_rn(sum, (float)x.dim);
#pragma unroll
    for (int k = 0; k < MOST / 32; k++) {
        v[k] = __fsub_rn(v[k], mean);
        if (lane + 32 * k < x.dim) square = __fmaf_rn(v[k], v[k], square);
    }
    for (int d = 16; d > 0; d /= 2)
        square = __fadd_rn(square, __shfl_xor_sync(0xffffffffu, square, d));
    const float f = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(square, (float)x.dim), x.eps)));
#pragma unroll
    for (int k = 0; k < MOST / 32; k++)
        if (lane + 32 * k < x.dim)
            key[lane + 32 * k] =
                __fmaf_rn(__fmul_rn(v[k], f), w[lane + 32 * k], b ? b[lane + 32 * k] : 0.0f);
    __syncwarp();
}

template <typename T> __global__ void __launch_bounds__(STORE) index_store(store_args a)
{
    __shared__ float key[MOST];
    const bgk_index &x = a.x;
    const int row = blockIdx.x, pos = a.rows.pos[row], thread = threadIdx.x;
    const int32_t *table = a.rows.blocks + a.rows.block0[a.rows.seq[row]];
    const auto angle = [&](int p) { return mla_angle(pos, x.rope.freq[p], x.rope.mscale); };
    ptx_wait_prior();
    ptx_let_next_start();
    if (pos < 0) return;
    const float *ik = a.ik + row * a.ik_cols;
    if (thread < 32) {
        norm_key(key, x, x.k_norm, x.k_norm_b, ik, thread);
        T *to = key_of<T>(x, table, pos);
        for (int i = thread; i < x.dim; i += 32)
            narrow(to + i, turned(
                               x.rope, i, [&](int j) { return key[j]; }, angle));
    }
    for (int i = thread; i < x.n_heads * x.dim; i += STORE) {
        const int col = i / x.dim * x.dim;
        narrow((T *)a.q + (int64_t)row * x.n_heads * x.dim + i,
               turned(
                   x.rope, i - col, [&](int j) { return mla_value(a.iq, row, col + j); }, angle));
    }
    for (int i = thread; i < x.n_heads; i += STORE)
        a.w[(int64_t)row * x.n_heads + i] = __fmul_rn(ik[x.dim + i], x.scale);
}

/* ---- scores ------------------------------------------------------------------------------------
 * Dims of an mma: a thread's 16 bytes at 64 s + 16 t are its k 2t, 2t + 1 and 2t + 8, 2t + 9 of
 * steps 2 s and 2 s + 1, of queries and keys alike. */

constexpr int WARPS = 8, BLOCK = 32 * WARPS, CHUNK = 32; /* keys of a warp at a time */
constexpr int MOST_HEADS = 128;

/* Bytes of a head's queries in shared memory: heads' pieces in different banks. */
template <int DIM> constexpr int PITCH = DIM * 2 + 16;

struct score_args {
    float *scores;
    int64_t stride;
    bgk_index x;
    const void *q;
    const float *w;
    bgk_rows rows;
    int row0, top_k;
};

/* Where key `key` lies, in tokens of the layer. */
__device__ int slot_of(const bgk_index &x, const int32_t *table, int key)
{
    return table[key / x.block_tokens] * x.block_tokens + key % x.block_tokens;
}

template <typename T> __device__ const T *layer_keys(const bgk_index &x)
{
    return (const T *)x.keys + (int64_t)x.layer * x.n_blocks * x.block_tokens * x.dim;
}

/* A chunk's keys: k[j] is part t of key 8 j + g. left: how many there are, others are 0; slot: of
 * key `lane`. All lanes. */
template <typename T, int DIM>
__device__ void load_keys(uint4 (&k)[4][DIM / 32], const T *keys, int slot, int left, int lane)
{
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const int key = 8 * j + lane / 4, at = __shfl_sync(0xffffffffu, slot, key);
        const uint4 *from = (const uint4 *)(keys + (int64_t)at * DIM) + lane % 4;
#pragma unroll
        for (int s = 0; s < DIM / 32; s++)
            k[j][s] = key < left ? from[4 * s] : uint4{};
    }
}

/* Of its chunk, the key whose score chunk_score() gives to a lane. */
__device__ int chunk_key(int lane)
{
    const int g = lane / 4;
    return 16 * (g & 1) + 8 * (g >> 1 & 1) + 2 * (lane % 4) + (g >> 2);
}

/* The score of a lane's key. All lanes. */
template <typename T, int DIM>
__device__ float chunk_score(const uint4 (&k)[4][DIM / 32], const unsigned char *queries,
                             const float *weights, int n_heads, int lane)
{
    const int g = lane / 4, t = lane % 4;
    float score[4][2] = {};
    for (int head = 0; head < n_heads; head += 16) {
        float d[4][4] = {};
#pragma unroll
        for (int s = 0; s < DIM / 32; s++) {
            const unsigned char *at = queries + (head + g) * PITCH<DIM> + s * 64 + t * 16;
            const uint4 lo = *(const uint4 *)at, hi = *(const uint4 *)(at + 8 * PITCH<DIM>);
            const uint32_t first[4] = {lo.x, hi.x, lo.y, hi.y};
            const uint32_t second[4] = {lo.z, hi.z, lo.w, hi.w};
#pragma unroll
            for (int j = 0; j < 4; j++)
                att_mma<T>(d[j], first, k[j][s].x, k[j][s].y);
#pragma unroll
            for (int j = 0; j < 4; j++)
                att_mma<T>(d[j], second, k[j][s].z, k[j][s].w);
        }
        const float w0 = weights[head + g], w1 = weights[head + g + 8];
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                score[j][e] = __fmaf_rn(w0, fmaxf(d[j][e], 0.0f), score[j][e]);
                score[j][e] = __fmaf_rn(w1, fmaxf(d[j][2 + e], 0.0f), score[j][e]);
            }
    }
    /* A lane keeps half of the keys at each of three additions of lanes. */
    float four[2][2], two[2];
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const float give = g & 1 ? score[j][e] : score[2 + j][e];
            four[j][e] = __fadd_rn(g & 1 ? score[2 + j][e] : score[j][e],
                                   __shfl_xor_sync(0xffffffffu, give, 4));
        }
#pragma unroll
    for (int e = 0; e < 2; e++)
        two[e] = __fadd_rn(g & 2 ? four[1][e] : four[0][e],
                           __shfl_xor_sync(0xffffffffu, g & 2 ? four[0][e] : four[1][e], 8));
    const float one = __fadd_rn(g & 4 ? two[1] : two[0],
                                __shfl_xor_sync(0xffffffffu, g & 4 ? two[0] : two[1], 16));
    return __fadd_rn(one, 0.0f); /* no -0 */
}

template <typename T, int DIM> __global__ void __launch_bounds__(BLOCK) index_scores(score_args a)
{
    __shared__ __align__(16) unsigned char queries[MOST_HEADS * PITCH<DIM>];
    __shared__ float weights[MOST_HEADS];
    const bgk_index &x = a.x;
    const int row = a.row0 + blockIdx.y, pos = a.rows.pos[row], n_keys = pos + 1;
    ptx_wait_prior();
    ptx_let_next_start();
    if (n_keys <= a.top_k || (int)blockIdx.x * BLOCK >= n_keys) return;
    const int32_t *table = a.rows.blocks + a.rows.block0[a.rows.seq[row]];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint4 *q = (const uint4 *)((const T *)a.q + (int64_t)row * x.n_heads * DIM);
    for (int i = threadIdx.x; i < x.n_heads * (DIM / 8); i += BLOCK)
        *(uint4 *)(queries + i / (DIM / 8) * PITCH<DIM> + i % (DIM / 8) * 16) = q[i];
    for (int i = threadIdx.x; i < x.n_heads; i += BLOCK)
        weights[i] = a.w[(int64_t)row * x.n_heads + i];
    __syncthreads();
    for (int key0 = (blockIdx.x * WARPS + warp) * CHUNK; key0 < n_keys;
         key0 += gridDim.x * WARPS * CHUNK) {
        uint4 k[4][DIM / 32];
        const int slot = slot_of(x, table, min(key0 + lane, pos)), key = key0 + chunk_key(lane);
        load_keys<T, DIM>(k, layer_keys<T>(x), slot, n_keys - key0, lane);
        const float score = chunk_score<T, DIM>(k, queries, weights, x.n_heads, lane);
        if (key < n_keys) a.scores[blockIdx.y * a.stride + key] = score;
    }
}

/* A thread a key, any dim. */
template <typename T> __global__ void __launch_bounds__(BLOCK) index_scores_plain(score_args a)
{
    const bgk_index &x = a.x;
    const int row = a.row0 + blockIdx.y, pos = a.rows.pos[row], n_keys = pos + 1;
    ptx_wait_prior();
    ptx_let_next_start();
    if (n_keys <= a.top_k) return;
    const int32_t *table = a.rows.blocks + a.rows.block0[a.rows.seq[row]];
    const T *q = (const T *)a.q + (int64_t)row * x.n_heads * x.dim;
    for (int key = blockIdx.x * BLOCK + threadIdx.x; key < n_keys; key += gridDim.x * BLOCK) {
        const T *k = key_of<T>(x, table, key);
        float score = 0;
        for (int head = 0; head < x.n_heads; head++) {
            float d = 0;
            for (int i = 0; i < x.dim; i++)
                d = __fmaf_rn(wide(q[head * x.dim + i]), wide(k[i]), d);
            score = __fmaf_rn(a.w[(int64_t)row * x.n_heads + head], fmaxf(d, 0.0f), score);
        }
        a.scores[blockIdx.y * a.stride + key] = __fadd_rn(score, 0.0f); /* no -0 */
    }
}

/* ---- selection ---------------------------------------------------------------------------------
 */

constexpr int SELECT_WARPS = 16, BINS = 2048, FEW = 512;

struct select_args {
    int32_t *list, *count;
    const float *scores;
    int64_t stride;
    bgk_rows rows;
    int row0, top_k;
};

struct select_room { /* shared */
    int bins[BINS];
    unsigned long long few[FEW], least;
    int sums[SELECT_WARPS], found[3], n_few;
};

/* Larger for larger floats. */
__device__ uint32_t rank_of(float v)
{
    const uint32_t b = __float_as_uint(v);
    return b ^ (b >> 31 ? 0xffffffffu : 0x80000000u);
}

__device__ float of_rank(uint32_t r)
{
    return __uint_as_float(r ^ (r >> 31 ? 0x80000000u : 0xffffffffu));
}

/* Of two keys, the one to choose has the larger one; no two have the same. */
__device__ unsigned long long worth(float score, int pos)
{
    return (unsigned long long)rank_of(score) << 32 | ~(uint32_t)pos;
}

__device__ uint32_t warp_least(uint32_t v)
{
    return __reduce_min_sync(0xffffffffu, v);
}

__device__ uint32_t warp_most(uint32_t v)
{
    return __reduce_max_sync(0xffffffffu, v);
}

/* Which part of [lo, hi] a score is in: never less for a larger one. */
__device__ int bin_of(float score, float lo, float by)
{
    const float in_low_bits = __fmaf_rn(__fsub_rn(score, lo), by, 8388608.0f);
    return min((int)(__float_as_uint(in_low_bits) & 0x7fffff), BINS - 1);
}

/* Before this thread of its warp, and with it. */
__device__ int sum_up_to(int v, int lane)
{
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, v, d);
        if (lane >= d) v += other;
    }
    return v;
}

/* Of warps before this one. */
template <int N_WARPS> __device__ int sum_before(const int *sums, int warp, int lane)
{
    return __reduce_add_sync(0xffffffffu, lane < warp && lane < N_WARPS ? sums[lane] : 0);
}

/* use(score, key) by the threads of a block, a few loads at a time. */
template <int N_WARPS, typename F, typename U> __device__ void for_scores(F score, int n, U use)
{
    constexpr int THREADS = 32 * N_WARPS, AHEAD = 8;
#pragma unroll 1
    for (int first = threadIdx.x; first < n; first += AHEAD * THREADS) {
        float v[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; k++)
            v[k] = score(min(first + k * THREADS, n - 1));
#pragma unroll
        for (int k = 0; k < AHEAD; k++)
            if (first + k * THREADS < n) use(v[k], first + k * THREADS);
    }
}

/* room.least: the top_k-th, by bins, which are zero; all threads. False: not so, for scores that
 * are not finite (low and high are the ranks of the extremes), or too many of one bin. */
template <int N_WARPS, typename F>
__device__ bool least_by_bins(select_room &room, F score, int n, int top_k, uint32_t low,
                              uint32_t high)
{
    constexpr int THREADS = 32 * N_WARPS, EACH = BINS / THREADS;
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const float lo = of_rank(low), hi = of_rank(high);
    const float by = __fdiv_rn((float)(BINS - 1), __fsub_rn(hi, lo));
    if (!isfinite(lo) || !isfinite(hi) || !isfinite(by)) return false;
    if (thread == 0) room.n_few = 0;
    for_scores<N_WARPS>(score, n,
                        [&](float v, int) { atomicAdd(&room.bins[bin_of(v, lo, by)], 1); });
    __syncthreads();
    const int *mine = room.bins + BINS - EACH * (thread + 1); /* from the largest down */
    int sum = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++)
        sum += mine[i];
    int up_to = sum_up_to(sum, lane);
    if (lane == 31) room.sums[warp] = up_to;
    __syncthreads();
    up_to += sum_before<N_WARPS>(room.sums, warp, lane);
    if (up_to >= top_k && up_to - sum < top_k) {
        int before = up_to - sum, i = EACH - 1;
#pragma unroll 1
        for (; before + mine[i] < top_k; i--)
            before += mine[i];
        room.found[0] = BINS - EACH * (thread + 1) + i;
        room.found[1] = top_k - before;
        room.found[2] = mine[i];
    }
    __syncthreads();
    const int bin = room.found[0], need = room.found[1], n_few = room.found[2];
    if (n_few > FEW) return false;
    for_scores<N_WARPS>(score, n, [&](float v, int i) {
        if (bin_of(v, lo, by) == bin) room.few[atomicAdd(&room.n_few, 1)] = worth(v, i);
    });
    __syncthreads();
    for (int i = thread; i < n_few; i += THREADS) {
        const unsigned long long v = room.few[i];
        int better = 0;
#pragma unroll 4
        for (int k = 0; k < n_few; k++)
            better += room.few[k] > v;
        if (better == need - 1) room.least = v;
    }
    __syncthreads();
    return true;
}

/* The same eight bits at a time; any scores. */
template <int N_WARPS, typename F>
__device__ unsigned long long least_by_digits(select_room &room, F score, int n, int top_k)
{
    constexpr int THREADS = 32 * N_WARPS;
    const int thread = threadIdx.x, lane = thread % 32;
    unsigned long long prefix = 0, known = 0; /* its upper bits, and which they are */
    int need = top_k;
#pragma unroll 1
    for (int shift = 56; shift >= 0; shift -= 8) {
        for (int i = thread; i < 256; i += THREADS)
            room.bins[i] = 0;
        __syncthreads();
#pragma unroll 1
        for (int at = 0; at < n; at += THREADS) {
            const int i = at + thread;
            const unsigned long long v = i < n ? worth(score(i), i) : 0;
            const bool counts = i < n && (v & known) == prefix;
            const int digit = counts ? (int)(v >> shift & 255) : -1;
            const int first = __shfl_sync(0xffffffffu, digit, 0); /* many are alike */
            const unsigned alike = __ballot_sync(0xffffffffu, digit == first);
            if (lane == 0 && counts) atomicAdd(&room.bins[digit], __popc(alike));
            if (counts && digit != first) atomicAdd(&room.bins[digit], 1);
        }
        __syncthreads();
        if (thread < 32) { /* a lane eight digits, from the largest down */
            int mine = 0;
            for (int i = 0; i < 8; i++)
                mine += room.bins[255 - (8 * lane + i)];
            int before = sum_up_to(mine, lane) - mine;
            if (before < need && before + mine >= need) {
                int digit = 255 - 8 * lane;
#pragma unroll 1
                for (; before + room.bins[digit] < need; digit--)
                    before += room.bins[digit];
                room.found[0] = digit;
                room.found[1] = need - before;
                room.found[2] = room.bins[digit];
            }
        }
        __syncthreads();
        prefix |= (unsigned long long)room.found[0] << shift;
        known |= 255ull << shift;
        need = room.found[1];
        const bool all = room.found[2] == need; /* that begin so */
        __syncthreads();
        if (all) break;
    }
    return prefix;
}

/* A row's list, by all threads of the block. score(i), i < n, top_k < n; room.bins is zero. */
template <int N_WARPS, typename F>
__device__ void select_keys(int32_t *list, select_room &room, F score, int n, int top_k,
                            uint32_t low, uint32_t high)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const unsigned long long least = least_by_bins<N_WARPS>(room, score, n, top_k, low, high)
                                         ? room.least
                                         : least_by_digits<N_WARPS>(room, score, n, top_k);
    const int each = (n + 32 * N_WARPS - 1) / (32 * N_WARPS) * 32;
    const int begin = warp * each, end = min(begin + each, n);
    const auto choose =
        [&](auto use) { /* a bit a lane: of 32 keys from `at` on */
                        constexpr int AHEAD = 4;
#pragma unroll 1
                        for (int at = begin; at < end; at += 32 * AHEAD) {
                            float v[AHEAD];
#pragma unroll
                            for (int k = 0; k < AHEAD; k++)
                                v[k] = score(min(at + 32 * k + lane, n - 1));
#pragma unroll
                            for (int k = 0; k < AHEAD; k++) {
                                const int i = at + 32 * k + lane;
                                use(i,
                                    __ballot_sync(0xffffffffu, i < end && worth(v[k], i) >= least));
                            }
                        }
        };
    int before = 0;
    choose([&](int, unsigned all) { before += __popc(all); });
    if (lane == 0) room.sums[warp] = before;
    __syncthreads();
    before = sum_before<N_WARPS>(room.sums, warp, lane);
    choose([&](int i, unsigned all) {
        if (all >> lane & 1) list[before + __popc(all & ((1u << lane) - 1))] = i;
        before += __popc(all);
    });
}

__global__ void __launch_bounds__(32 * SELECT_WARPS) index_select(select_args a)
{
    constexpr int THREADS = 32 * SELECT_WARPS;
    __shared__ select_room room;
    __shared__ uint2 ends[SELECT_WARPS];
    const int row = a.row0 + blockIdx.x, n = a.rows.pos[row] + 1, thread = threadIdx.x;
    const int lane = thread % 32;
    for (int i = thread; i < BINS; i += THREADS)
        room.bins[i] = 0;
    ptx_wait_prior();
    ptx_let_next_start();
    if (n <= a.top_k) {
        if (thread == 0) a.count[row] = -1;
        return;
    }
    const float *scores = a.scores + blockIdx.x * a.stride;
    uint32_t low = 0xffffffffu, high = 0;
#pragma unroll 4
    for (int i = thread; i < n; i += THREADS) {
        const uint32_t r = rank_of(scores[i]);
        low = min(low, r);
        high = max(high, r);
    }
    low = warp_least(low);
    high = warp_most(high);
    if (lane == 0) ends[thread / 32] = make_uint2(low, high);
    __syncthreads();
    const uint2 e = ends[lane % SELECT_WARPS];
    select_keys<SELECT_WARPS>(
        a.list + (int64_t)row * a.top_k, room, [&](int i) { return scores[i]; }, n, a.top_k,
        warp_least(e.x), warp_most(e.y));
    if (thread == 0) a.count[row] = a.top_k;
}

/* ---- all in one --------------------------------------------------------------------------------
 * For rows whose keys but their own are of earlier steps: those of a warp's first chunk are loaded
 * while the kernel before ends. Chunk c is warp c / n_blocks's of block c % n_blocks. */

constexpr int MOST_CLUSTER = 16, ROOM = 32768; /* scores in shared memory, at most */

struct rows_args {
    int32_t *list, *count;
    float *scores; /* of rows that have no room */
    int64_t stride;
    bgk_index x;
    bgk_out iq;
    const float *ik;
    int64_t ik_cols;
    bgk_rows rows;
    int row0, top_k, room;
};

/* How a lane turns a head's queries: pairs lane, lane + 32, ... of the head. */
template <int DIM> struct lane_turn {
    int col[DIM / 64][2];
    float2 angle[DIM / 64];
    bool turns[DIM / 64];
};

template <int DIM>
__device__ lane_turn<DIM> turn_of(const bgk_rotation &r, const float2 *angles, int lane)
{
    lane_turn<DIM> t;
#pragma unroll
    for (int i = 0; i < DIM / 64; i++) {
        const int p = lane + 32 * i, half = r.n_rot / 2;
        t.turns[i] = p < half;
        t.col[i][0] = r.neox && p < half ? p : 2 * p;
        t.col[i][1] = r.neox && p < half ? p + half : 2 * p + 1;
        t.angle[i] = p < half ? angles[p] : float2{};
    }
    return t;
}

/* A row's queries to shared memory, by N warps: a head a warp, as many at once as there are of 32.
 */
template <typename T, int DIM, int N>
__device__ void put_queries(unsigned char *queries, const lane_turn<DIM> &turn, const float *iq,
                            int n_heads, int warp)
{
    constexpr int AHEAD = (32 + N - 1) / N;
#pragma unroll 1
    for (int head0 = warp; head0 < n_heads; head0 += N * AHEAD) {
        float2 v[AHEAD][DIM / 64];
#pragma unroll
        for (int k = 0; k < AHEAD; k++)
#pragma unroll
            for (int i = 0; i < DIM / 64; i++) {
                const float *head = iq + min(head0 + k * N, n_heads - 1) * DIM;
                v[k][i] = make_float2(head[turn.col[i][0]], head[turn.col[i][1]]);
            }
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            T *head = (T *)(queries + (head0 + k * N) * PITCH<DIM>);
#pragma unroll
            for (int i = 0; i < DIM / 64; i++) {
                const float2 t = mla_turned(v[k][i].x, v[k][i].y, turn.angle[i]);
                if (head0 + k * N >= n_heads) continue;
                narrow(head + turn.col[i][0], turn.turns[i] ? t.x : v[k][i].x);
                narrow(head + turn.col[i][1], turn.turns[i] ? t.y : v[k][i].y);
            }
        }
    }
}

template <typename T, int DIM, int N_WARPS>
__global__ void __launch_bounds__(32 * N_WARPS, 16 / N_WARPS) index_rows(rows_args a)
{
#if __CUDA_ARCH__ >= 900
    namespace cg = cooperative_groups;
    constexpr int THREADS = 32 * N_WARPS;
    extern __shared__ __align__(16) unsigned char queries[]; /* and scores behind */
    __shared__ select_room room;
    __shared__ __align__(16) unsigned char own[DIM * sizeof(T)]; /* the row's key, as stored */
    __shared__ float key[DIM], norm[2 * DIM], weights[MOST_HEADS];
    __shared__ float2 angles[MOST / 2];
    __shared__ uint2 ends[MOST_CLUSTER * N_WARPS];
    const cg::cluster_group cluster = cg::this_cluster();
    const bgk_index &x = a.x;
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int n_blocks = gridDim.x, block = blockIdx.x, row = a.row0 + blockIdx.y;
    const int pos = a.rows.pos[row], n = pos + 1, step = n_blocks * N_WARPS;
    const int chunks = (n + CHUNK - 1) / CHUNK, last = pos < 0 ? 0 : pos / CHUNK;
    const bool all = n <= a.top_k, owner = block == last % n_blocks; /* of the row's own key */
    ptx_let_next_start();
    if (all && !owner) return;
    float *scores = (float *)(queries + x.n_heads * PITCH<DIM>);
    const int32_t *table = a.rows.blocks + a.rows.block0[a.rows.seq[row]];
    const T *keys = layer_keys<T>(x);
    const auto slot_at = [&](int chunk) {
        const int i = chunk * CHUNK + lane;
        return i < pos ? slot_of(x, table, i) : 0;
    };
    int chunk = block + n_blocks * warp, slot = 0;
    uint4 k[4][DIM / 32];
    if (!all) {
        cluster_arrive();
        load_keys<T, DIM>(k, keys, slot_at(chunk), pos - chunk * CHUNK, lane);
        slot = slot_at(chunk + step);
        for (int i = thread; i < BINS && block == 0; i += THREADS)
            room.bins[i] = 0;
    }
    if (owner)
        for (int i = thread; i < DIM; i += THREADS) {
            norm[i] = x.k_norm[i];
            norm[DIM + i] = x.k_norm_b ? x.k_norm_b[i] : 0.0f;
        }
    for (int i = thread; i < x.rope.n_rot / 2; i += THREADS)
        angles[i] = mla_angle(pos, x.rope.freq[i], x.rope.mscale);
    __syncthreads();
    const lane_turn<DIM> turn = turn_of<DIM>(x.rope, angles, lane);
    ptx_wait_prior();
    if (warp == N_WARPS - 1) {
        const float *ik = a.ik + row * a.ik_cols;
        float w[MOST_HEADS / 32];
#pragma unroll
        for (int i = 0; i < MOST_HEADS / 32; i++)
            w[i] = lane + 32 * i < x.n_heads ? ik[DIM + lane + 32 * i] : 0.0f;
        if (owner && pos >= 0) {
            norm_key(key, x, norm, norm + DIM, ik, lane);
            T *to = key_of<T>(x, table, pos);
#pragma unroll
            for (int i = lane; i < DIM; i += 32) {
                T *mine = (T *)own + i;
                narrow(mine, turned(
                                 x.rope, i, [&](int j) { return key[j]; },
                                 [&](int p) { return angles[p]; }));
                to[i] = *mine;
            }
        }
#pragma unroll
        for (int i = 0; i < MOST_HEADS / 32; i++)
            weights[lane + 32 * i] = __fmul_rn(w[i], x.scale);
    } else if (!all) {
        put_queries<T, DIM, N_WARPS - 1>(
            queries, turn, (const float *)a.iq.data + row * a.iq.stride, x.n_heads, warp);
    }
    if (all) {
        if (thread == 0) a.count[row] = -1;
        return;
    }
    __syncthreads();
    cluster_wait(); /* all blocks are there: the first one's memory may be written */
    const bool fits = n <= a.room;
    float *far = a.scores + blockIdx.y * a.stride;
    float *to = fits ? cluster.map_shared_rank(scores, 0) : far;
    uint32_t low = 0xffffffffu, high = 0;
    for (; chunk < chunks; chunk += step) {
        if (chunk == last) {
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (8 * j + lane / 4 == pos % CHUNK)
#pragma unroll
                    for (int s = 0; s < DIM / 32; s++)
                        k[j][s] = *(const uint4 *)(own + s * 64 + lane % 4 * 16);
        }
        const float score = chunk_score<T, DIM>(k, queries, weights, x.n_heads, lane);
        const int at = chunk * CHUNK + chunk_key(lane);
        if (chunk + step < chunks) {
            load_keys<T, DIM>(k, keys, slot, pos - (chunk + step) * CHUNK, lane);
            slot = slot_at(chunk + 2 * step);
        }
        if (at < n) {
            to[at] = score;
            low = min(low, rank_of(score));
            high = max(high, rank_of(score));
        }
    }
    low = warp_least(low);
    high = warp_most(high);
    if (lane == 0) cluster.map_shared_rank(ends, 0)[block * N_WARPS + warp] = make_uint2(low, high);
    __syncwarp();
    cluster.sync();
    if (block > 0) return;
    for (int i = lane; i < n_blocks * N_WARPS; i += 32) {
        low = min(low, ends[i].x);
        high = max(high, ends[i].y);
    }
    low = warp_least(low);
    high = warp_most(high);
    int32_t *list = a.list + (int64_t)row * a.top_k;
    const float *from = fits ? scores : far;
    select_keys<N_WARPS>(
        list, room, [&](int i) { return from[i]; }, n, a.top_k, low, high);
    if (thread == 0) a.count[row] = a.top_k;
#endif
}

/* What a kernel may be launched with, asked once. */
struct rows_limits {
    cudaError_t ready;
    int most_of_16; /* clusters of so many blocks that run at the same time */
};

template <typename T, int DIM, int N_WARPS>
cudaError_t launch_rows(rows_args a, int n, int max_ctx, int n_sms, cudaStream_t stream)
{
    constexpr int MOST_BYTES = MOST_HEADS * PITCH<DIM> + ROOM * (int)sizeof(float);
    const auto kernel = index_rows<T, DIM, N_WARPS>;
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = MOST_CLUSTER;
    attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    config.attrs = attributes;
    config.numAttrs = 1;
    config.gridDim = dim3(MOST_CLUSTER);
    config.blockDim = dim3(32 * N_WARPS);
    config.dynamicSmemBytes = MOST_BYTES;
    static const rows_limits limits = [&] {
        rows_limits l = {att_shared_memory(kernel, MOST_BYTES), 0};
        if (l.ready != cudaSuccess ||
            cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) !=
                cudaSuccess ||
            cudaOccupancyMaxActiveClusters(&l.most_of_16, kernel, &config) != cudaSuccess)
            l.most_of_16 = 0;
        cudaGetLastError(); /* a no is none of the next launch's */
        return l;
    }();
    if (limits.ready != cudaSuccess) return cudaErrorNotSupported;
    int blocks = 1;
    while (2 * blocks * n <= n_sms && (blocks < 8 || (blocks < 16 && n <= limits.most_of_16)))
        blocks *= 2;
    a.room = max_ctx < ROOM ? max_ctx : ROOM;
    attributes[0].val.clusterDim.x = (unsigned)blocks;
    config.numAttrs = 2;
    config.gridDim = dim3((unsigned)blocks, (unsigned)n);
    config.dynamicSmemBytes = (size_t)a.x.n_heads * PITCH<DIM> + (size_t)a.room * sizeof(float);
    config.stream = stream;
    return cudaLaunchKernelEx(&config, kernel, a);
}

/* Few rows of few keys leave each warp a chunk: half of the warps do, and start while another
 * kernel still has the rest of the registers. */
template <typename T, int DIM>
cudaError_t rows_of(const rows_args &a, int n, int max_ctx, int n_sms, cudaStream_t stream)
{
    constexpr int FEW_KEYS = 2 * MOST_CLUSTER * 8 * CHUNK;
    return MOST_CLUSTER * n <= n_sms && max_ctx <= FEW_KEYS
               ? launch_rows<T, DIM, 8>(a, n, max_ctx, n_sms, stream)
               : launch_rows<T, DIM, 16>(a, n, max_ctx, n_sms, stream);
}

bool bad_index(const bgk_index *a)
{
    return a->dim < 2 || a->dim > MOST || a->dim % 2 || a->n_heads < 1 || a->block_tokens < 1 ||
           a->layer < 0 || a->rope.n_rot < 0 || a->rope.n_rot % 2 || a->rope.n_rot > a->dim ||
           (uintptr_t)a->keys % 16 || a->type == BGK_Q8 || a->n_blocks < 1 ||
           (int64_t)a->n_blocks * a->block_tokens > INT32_MAX;
}

template <typename T> cudaError_t scores_of(const score_args &a, dim3 grid, cudaStream_t stream)
{
    if constexpr (sizeof(T) == 2)
        if (a.x.n_heads % 16 == 0 && a.x.n_heads <= MOST_HEADS) {
            if (a.x.dim == 128)
                return launch_after(index_scores<T, 128>, grid, BLOCK, 0, stream, a);
            if (a.x.dim == 64) return launch_after(index_scores<T, 64>, grid, BLOCK, 0, stream, a);
        }
    return launch_after(index_scores_plain<T>, grid, BLOCK, 0, stream, a);
}

} // namespace

cudaError_t bgk_index_store(const bgk_index *x, void *q, float *w, const bgk_out *iq,
                            const float *ik, int64_t ik_cols, const bgk_rows *r,
                            cudaStream_t stream)
{
    if (bad_index(x) || !x->k_norm || (uintptr_t)q % 16) return cudaErrorInvalidValue;
    if (!r->rows) return cudaSuccess;
    const store_args a = {*x, q, w, *iq, ik, ik_cols, *r};
    const dim3 grid((unsigned)r->rows);
    if (x->type == BGK_F32) return launch_after(index_store<float>, grid, STORE, 0, stream, a);
    if (x->type == BGK_F16) return launch_after(index_store<__half>, grid, STORE, 0, stream, a);
    return launch_after(index_store<__nv_bfloat16>, grid, STORE, 0, stream, a);
}

cudaError_t bgk_index_scores(float *scores, int64_t stride, const bgk_index *x, const void *q,
                             const float *w, const bgk_rows *r, int row0, int n, int top_k,
                             int max_ctx, int n_sms, cudaStream_t stream)
{
    if (bad_index(x) || (uintptr_t)q % 16 || row0 < 0 || n < 0 || n > 65535 || stride < max_ctx ||
        n_sms < 1)
        return cudaErrorInvalidValue;
    if (!n) return cudaSuccess;
    const score_args a = {scores, stride, *x, q, w, *r, row0, top_k};
    const int most = (max_ctx + BLOCK - 1) / BLOCK, wanted = 8 * n_sms / n;
    const dim3 grid((unsigned)(wanted < 1 ? 1 : wanted < most ? wanted : most), (unsigned)n);
    if (x->type == BGK_F32) return scores_of<float>(a, grid, stream);
    if (x->type == BGK_F16) return scores_of<__half>(a, grid, stream);
    return scores_of<__nv_bfloat16>(a, grid, stream);
}

cudaError_t bgk_index_select(int32_t *list, int32_t *count, const float *scores, int64_t stride,
                             const bgk_rows *r, int row0, int n, int top_k, cudaStream_t stream)
{
    if (row0 < 0 || n < 0 || top_k < 1) return cudaErrorInvalidValue;
    if (!n) return cudaSuccess;
    const select_args a = {list, count, scores, stride, *r, row0, top_k};
    return launch_after(index_select, dim3((unsigned)n), 32 * SELECT_WARPS, 0, stream, a);
}

cudaError_t bgk_index_rows(int32_t *list, int32_t *count, float *scores, int64_t stride,
                           const bgk_index *x, const bgk_out *iq, const float *ik, int64_t ik_cols,
                           const bgk_rows *r, int row0, int n, int top_k, int max_ctx, int n_sms,
                           cudaStream_t stream)
{
    if (bad_index(x) || !x->k_norm || row0 < 0 || n < 0 || n > 65535 || stride < max_ctx ||
        n_sms < 1 || top_k < 1)
        return cudaErrorInvalidValue;
    if (!launch_programmatic() || x->type == BGK_F32 || iq->layout != BGK_ROWS ||
        (x->dim != 128 && x->dim != 64) || x->n_heads % 16 || x->n_heads > MOST_HEADS)
        return cudaErrorNotSupported;
    if (!n) return cudaSuccess;
    const rows_args a = {list, count, scores, stride, *x, *iq, ik, ik_cols, *r, row0, top_k, 0};
    if (x->type == BGK_F16)
        return x->dim == 128 ? rows_of<__half, 128>(a, n, max_ctx, n_sms, stream)
                             : rows_of<__half, 64>(a, n, max_ctx, n_sms, stream);
    return x->dim == 128 ? rows_of<__nv_bfloat16, 128>(a, n, max_ctx, n_sms, stream)
                         : rows_of<__nv_bfloat16, 64>(a, n, max_ctx, n_sms, stream);
}
