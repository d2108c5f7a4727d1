/* kernels/index.cuh - what the kernels of the lightning indexer share (index.cu, index_few.cu):
 * keys, scores of a chunk, the choice of a row. */
#ifndef BGK_INDEX_CUH
#define BGK_INDEX_CUH

#include <type_traits>

#include "mla.cuh"
#include "ptx.cuh"

namespace
{

constexpr int MOST = 128;

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

/* ---- scores ------------------------------------------------------------------------------------
 * Dims of an mma: a thread's 16 bytes at 64 s + 16 t are its k 2t, 2t + 1 and 2t + 8, 2t + 9 of
 * steps 2 s and 2 s + 1, of queries and keys alike. */

constexpr int MOST_HEADS = 128;

/* Where value `col` of key `row` lies in shared memory: pieces of two keys that are read at the
 * same time are in different banks. */
template <int DIM> __device__ int place_of(int row, int col)
{
    return row * DIM + (col ^ (row & 1) << 5);
}

/* Queries lie in shared memory as a lane's registers of an mma have them: 16 bytes each of 16 heads
 * and 32 dims, of its first step and then of its second. Value `col` of head `head` is at the sum
 * of both. */
template <int DIM> __device__ int query_head(int head)
{
    return head / 16 * 16 * DIM + head % 8 * 32 + head % 16 / 8 * 2;
}

__device__ int query_col(int col)
{
    return col / 32 * 512 + col % 8 / 4 * 256 + col % 32 / 8 * 8 + col % 4 / 2 * 4 + col % 2;
}

/* Where key `key` lies, in tokens of the layer. */
__device__ int slot_of(const bgk_index &x, const int32_t *table, int key)
{
    return table[key / x.block_tokens] * x.block_tokens + key % x.block_tokens;
}

template <typename T> __device__ const T *layer_keys(const bgk_index &x)
{
    return (const T *)x.keys + (int64_t)x.layer * x.n_blocks * x.block_tokens * x.dim;
}

/* N keys start on their way to shared memory, the warp's only copies; slot: of key `lane`, of which
 * `left` are there; others become 0. All lanes. */
template <typename T, int DIM, int N>
__device__ void start_keys(T *to, const T *keys, int slot, int left, int lane)
{
    constexpr int PIECES = DIM / 8, EACH = 32 / PIECES; /* keys at a time */
#pragma unroll 4
    for (int i = 0; i < N / EACH; i++) {
        const int key = i * EACH + lane / PIECES, col = lane % PIECES * 8;
        const int at = __shfl_sync(0xffffffffu, slot, key);
        ptx_copy16_if(to + place_of<DIM>(key, col), keys + (int64_t)at * DIM + col, key < left);
    }
    ptx_copy_commit();
}

/* Of 8 J keys, the one whose score chunk_score() gives to a lane; of 16 each to two lanes. */
template <int J> __device__ int chunk_key(int lane)
{
    const int g = lane / 4, t = lane % 4;
    if constexpr (J == 2) return 8 * (g & 1) + 2 * t + (g >> 1 & 1);
    return 16 * (g & 1) + 8 * (g >> 1 & 1) + 2 * t + (g >> 2);
}

/* The score of a lane's key, of 8 J; key(j, s): piece 4 s + t of key 8 j + g. All lanes. */
template <typename T, int DIM, int J, typename K>
__device__ float chunk_score(K key, const T *queries, const float *weights, int n_heads, int lane)
{
    static_assert(J == 2 || J == 4, "");
    const int g = lane / 4;
    float score[J][2] = {};
#pragma unroll 1
    for (int head = 0; head < n_heads; head += 16) {
        float d[J][4] = {};
#pragma unroll
        for (int s = 0; s < DIM / 32; s++) {
            const uint4 *at = (const uint4 *)(queries + head * DIM) + s * 64 + lane;
            const uint4 a = at[0], b = at[32];
            const uint32_t first[4] = {a.x, a.y, a.z, a.w}, second[4] = {b.x, b.y, b.z, b.w};
            uint4 k[J];
#pragma unroll
            for (int j = 0; j < J; j++)
                k[j] = key(j, s);
#pragma unroll
            for (int j = 0; j < J; j++)
                att_mma<T>(d[j], first, k[j].x, k[j].y);
#pragma unroll
            for (int j = 0; j < J; j++)
                att_mma<T>(d[j], second, k[j].z, k[j].w);
        }
        const float w0 = weights[head + g], w1 = weights[head + g + 8];
#pragma unroll
        for (int j = 0; j < J; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                score[j][e] = __fmaf_rn(w0, fmaxf(d[j][e], 0.0f), score[j][e]);
                score[j][e] = __fmaf_rn(w1, fmaxf(d[j][2 + e], 0.0f), score[j][e]);
            }
    }
    /* Lanes 4, 8 and 16 apart are added; a lane keeps half of the keys, while it has two. */
    float half[J / 2][2], one;
#pragma unroll
    for (int j = 0; j < J / 2; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const float give = g & 1 ? score[j][e] : score[J / 2 + j][e];
            half[j][e] = __fadd_rn(g & 1 ? score[J / 2 + j][e] : score[j][e],
                                   __shfl_xor_sync(0xffffffffu, give, 4));
        }
    if constexpr (J == 4) {
        float two[2];
#pragma unroll
        for (int e = 0; e < 2; e++)
            two[e] = __fadd_rn(g & 2 ? half[1][e] : half[0][e],
                               __shfl_xor_sync(0xffffffffu, g & 2 ? half[0][e] : half[1][e], 8));
        one = __fadd_rn(g & 4 ? two[1] : two[0],
                        __shfl_xor_sync(0xffffffffu, g & 4 ? two[0] : two[1], 16));
    } else {
        const float last =
            __fadd_rn(g & 2 ? half[0][1] : half[0][0],
                      __shfl_xor_sync(0xffffffffu, g & 2 ? half[0][0] : half[0][1], 8));
        one = __fadd_rn(last, __shfl_xor_sync(0xffffffffu, last, 16));
    }
    return __fadd_rn(one, 0.0f); /* no -0 */
}

/* ---- selection ---------------------------------------------------------------------------------
 */

constexpr int BINS = 2048, FEW = 512;

struct select_room { /* shared */
    alignas(16) int bins[BINS];
    unsigned long long few[FEW], least;
    int sums[32], found[3], n_few;
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
    constexpr int THREADS = 32 * N_WARPS, AHEAD = 5;
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
    static_assert(EACH % 4 == 0, "read in fours");
    const int *mine = room.bins + BINS - EACH * (thread + 1); /* from the largest down */
    int sum = 0;
#pragma unroll
    for (int i = 0; i < EACH; i += 4) {
        const int4 four = *(const int4 *)(mine + i);
        sum += four.x + four.y + (four.z + four.w);
    }
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

/* A row's list, by all threads of the block. score(i), i < n, top_k < n; room.bins is zero. kept:
 * shared memory for n words, which may be where the scores are, or a null pointer. */
template <int N_WARPS, typename F, typename K>
__device__ void select_keys(int32_t *list, select_room &room, F score, int n, int top_k,
                            uint32_t low, uint32_t high, K kept)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const unsigned long long least = least_by_bins<N_WARPS>(room, score, n, top_k, low, high)
                                         ? room.least
                                         : least_by_digits<N_WARPS>(room, score, n, top_k);
    const int each = (n + 32 * N_WARPS - 1) / (32 * N_WARPS) * 32;
    const int begin = warp * each, end = min(begin + each, n);
    const auto choose =
        [&](auto use) { /* a bit a lane: of 32 keys from `at` on */
                        constexpr int AHEAD = 5;
#pragma unroll 1
                        for (int at = begin; at < end; at += 32 * AHEAD) {
                            float v[AHEAD];
#pragma unroll
                            for (int k = 0; k < AHEAD; k++)
                                v[k] = score(min(at + 32 * k + lane, end - 1));
#pragma unroll
                            for (int k = 0; k < AHEAD; k++) {
                                const int i = at + 32 * k + lane;
                                use(i,
                                    __ballot_sync(0xffffffffu, i < end && worth(v[k], i) >= least));
                            }
                        }
        };
    const uint32_t before_me = (1u << lane) - 1;
    int before = 0, mine = 0;
    if constexpr (std::is_pointer<K>::value) { /* a warp's keys from `begin` on, then to the list */
        choose([&](int i, unsigned all) {
            __syncwarp(); /* all have read what is written over */
            if (all >> lane & 1) kept[begin + mine + __popc(all & before_me)] = i;
            mine += __popc(all);
        });
    } else {
        choose([&](int, unsigned all) { mine += __popc(all); });
    }
    if (lane == 0) room.sums[warp] = mine;
    __syncthreads();
    before = sum_before<N_WARPS>(room.sums, warp, lane);
    if constexpr (std::is_pointer<K>::value) {
#pragma unroll 4
        for (int i = lane; i < mine; i += 32)
            list[before + i] = kept[begin + i];
    } else {
        choose([&](int i, unsigned all) {
            if (all >> lane & 1) list[before + __popc(all & before_me)] = i;
            before += __popc(all);
        });
    }
}

/* ---- queries -----------------------------------------------------------------------------------
 */

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
__device__ void put_queries(T *queries, const lane_turn<DIM> &turn, const float *iq, int n_heads,
                            int warp)
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
            const int head = head0 + k * N;
#pragma unroll
            for (int i = 0; i < DIM / 64; i++) {
                const float2 t = mla_turned(v[k][i].x, v[k][i].y, turn.angle[i]);
                if (head >= n_heads) continue;
                T *to = queries + query_head<DIM>(head);
                narrow(to + query_col(turn.col[i][0]), turn.turns[i] ? t.x : v[k][i].x);
                narrow(to + query_col(turn.col[i][1]), turn.turns[i] ? t.y : v[k][i].y);
            }
        }
    }
}

/* ---- a row, and its own key ---------------------------------------------------------------------
 */

template <typename T, int DIM> struct row_room { /* shared */
    alignas(16) T own[DIM];                      /* the row's key, as stored */
    float key[DIM], norm[2 * DIM], weights[MOST_HEADS];
    float2 angles[MOST / 2];
};

/* What a thread brings of a row before all else: its own frequency, and of the norm, if the block
 * is the owner of the row's key. */
struct row_constants {
    float freq, w, b;
};

template <int DIM> __device__ row_constants constants_of(const bgk_index &x, bool owner)
{
    const int thread = threadIdx.x;
    row_constants c = {};
    if (thread < x.rope.n_rot / 2) c.freq = x.rope.freq[thread];
    if (owner && thread < DIM) {
        c.w = x.k_norm[thread];
        if (x.k_norm_b) c.b = x.k_norm_b[thread];
    }
    return c;
}

template <typename T, int DIM>
__device__ void put_constants(row_room<T, DIM> &r, const bgk_index &x, const row_constants &c,
                              int pos, bool owner)
{
    const int thread = threadIdx.x;
    if (owner && thread < DIM) {
        r.norm[thread] = c.w;
        r.norm[DIM + thread] = c.b;
    }
    if (thread < x.rope.n_rot / 2) r.angles[thread] = mla_angle(pos, c.freq, x.rope.mscale);
}

/* By a warp: the weights of the row's heads, and by its owner its key, also into the cache. ik: the
 * row's key, then weights. */
template <typename T, int DIM>
__device__ __forceinline__ void take_key(row_room<T, DIM> &r, const bgk_index &x, const float *ik,
                                         const int32_t *table, int pos, bool owner, int lane)
{
    float w[MOST_HEADS / 32];
#pragma unroll
    for (int i = 0; i < MOST_HEADS / 32; i++)
        w[i] = lane + 32 * i < x.n_heads ? ik[DIM + lane + 32 * i] : 0.0f;
    if (owner && pos >= 0) {
        norm_key(r.key, x, r.norm, r.norm + DIM, ik, lane);
        T *to = key_of<T>(x, table, pos);
#pragma unroll
        for (int i = lane; i < DIM; i += 32) {
            narrow(r.own + i, turned(
                                  x.rope, i, [&](int j) { return r.key[j]; },
                                  [&](int p) { return r.angles[p]; }));
            to[i] = r.own[i];
        }
    }
#pragma unroll
    for (int i = 0; i < MOST_HEADS / 32; i++)
        r.weights[lane + 32 * i] = __fmul_rn(w[i], x.scale);
}

bool bad_index(const bgk_index *a)
{
    return a->dim < 2 || a->dim > MOST || a->dim % 2 || a->n_heads < 1 || a->block_tokens < 1 ||
           a->layer < 0 || a->rope.n_rot < 0 || a->rope.n_rot % 2 || a->rope.n_rot > a->dim ||
           (uintptr_t)a->keys % 16 || a->type == BGK_Q8 || a->n_blocks < 1 ||
           (int64_t)a->n_blocks * a->block_tokens > INT32_MAX;
}

} // namespace

#endif
