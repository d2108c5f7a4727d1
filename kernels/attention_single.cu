/* kernels/attention_single.cu - attention of single tokens: decode.
 *
 *   requires  a cache that bgk_attention_fits(); scale > 0
 *   launch    a block of four warps an item, one KV head or several beside each other, 16 query
 *             heads of each, and split; may start early
 *   layout    K and V are mma's A, 16 keys (16 dims) tall, query heads its 8 columns: S and O are
 *             transposed, and eight heads cost one mma
 *   memory    where there is enough to do, a block takes the same units of H = 2 or 4 KV heads,
 *             which lie beside each other in the cache: long runs, few pages at a time. Warp w
 *             has KV head w % H, and every (4 / H)-th unit from w / H on: they come in steps of
 *             16 keys, K's four and then V's, through its own ring of STAGES, taken by twos
 *   order     attention.cuh. The item's running (m, l, O) lies in shared memory and takes the
 *             warps' units in by turns. Splits: units' own go to `parts`, and the block that is
 *             done last merges them; so splits change no bit
 *   spread    where items and heads are fewer than the GPU takes, long items are split
 *   proof     tests/gpu/test_attention.c */
#include "attention.cuh"

namespace
{

constexpr int WARPS = 4, BLOCK = 32 * WARPS;
constexpr int MIN_UNITS = 4;    /* of a split */
constexpr int COUNTERS = 16384; /* at the beginning of parts: splits of a tile that are done */

struct single_args {
    bgk_out out;
    bgk_att a;
    const bgk_item *items;
    unsigned *done;                /* [item, tile], zero before and after */
    float *parts;                  /* O: [part, head, D]; then (m, l): [part, head] */
    int parts_cap;                 /* parts there is room for */
    int splits, q_tiles, kv_heads; /* KV heads of a block: 1, 2 or 4 */
    int columns;                   /* of the running state: pairs of query heads of a KV head */
};

template <typename T, int D, int N> struct single_shape {
    using S = att_shape<T, D>;
    static constexpr int STAGES = S::STEP < 3000 ? 8 : 4; /* divides the 8 steps of a unit */
    static constexpr int RING = STAGES * S::STEP;
    static constexpr int FIT = D > 128 ? 1 : N == 1 ? 3 : 2; /* blocks on a processor */
};

/* An item's units, and over how many blocks they are spread. */
struct unit_range {
    int begin, end, each, splits;
};

__device__ unit_range units_of(const single_args &a, const bgk_item &item)
{
    const int pos = item.pos0, window = a.a.heads.window;
    unit_range u;
    u.begin = window && pos >= window ? (pos - window + 1) / BGK_UNIT : 0;
    u.end = pos / BGK_UNIT + 1;
    const int n = u.end - u.begin;
    int splits = min(a.splits, n / MIN_UNITS);
    if (splits > 1 && item.n > a.parts_cap - u.end) splits = 1;
    u.each = splits > 1 ? (n + splits - 1) / splits : n;
    u.splits = (n + u.each - 1) / u.each;
    return u;
}

/* B operand of q for all steps of 16 dims; heads from n on are 0. */
template <typename T, int D, int N>
__device__ void load_q(uint32_t (&q)[D / 16][N][2], const bgk_att &a, int row, int head, int n,
                       int lane)
{
    constexpr bool Q8 = sizeof(T) == 1;
    const int g = lane / 4, t = lane % 4;
    const uint16_t *at = (const uint16_t *)a.q + row * a.q_cols + (int64_t)head * D;
#pragma unroll
    for (int s = 0; s < D / 16; s++)
#pragma unroll
        for (int j = 0; j < N; j++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int dim = 16 * s + (Q8 ? 4 * t + 2 * i : 2 * t + 8 * i);
                q[s][j][i] = 8 * j + g < n ? *(const uint32_t *)(at + (8 * j + g) * D + dim) : 0;
            }
}

/* A operand of 16 keys and dims 16 ks and on. */
template <typename T, int D>
__device__ inline void keys_operand(uint32_t (&a)[4], uint32_t step, int ks, int lane)
{
    constexpr int PIECES = att_shape<T, D>::PIECES;
    if constexpr (sizeof(T) == 1) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t four = att_word(step + att_place<PIECES>(lane / 4 + 8 * i, ks) +
                                           (uint32_t)(4 * (lane % 4))) ^
                                  0x80808080u;
            a[i] = att_halves<0x4140>(four);
            a[2 + i] = att_halves<0x4342>(four);
        }
    } else {
        att_matrix4(a, step + att_place<PIECES>(lane % 16, 2 * ks + lane / 16));
    }
}

/* Q8: the scale of the step's key lane / 4 + 8 e. */
template <typename T, int D> __device__ inline float scale_of(uint32_t step, int e, int lane)
{
    return __uint_as_float(
        att_word(step + (uint32_t)(att_shape<T, D>::SCALES + 4 * (lane / 4 + 8 * e))));
}

/* O^T += V^T P^T over 16 keys. A tile of O's rows g and g + 8 are dims 16 m + g and 16 m + g + 8;
 * Q8: 16 m + 2 g and 16 m + 2 g + 1. */
template <typename T, int D, int N>
__device__ inline void add_values(float (&o)[D / 16][N][4], const uint32_t (&p)[N][2],
                                  uint32_t step, int lane)
{
    constexpr int PIECES = att_shape<T, D>::PIECES;
    if constexpr (sizeof(T) == 1) {
#pragma unroll
        for (int two = 0; two < D / 32; two++) {
            uint32_t b[4];
            att_matrix4_trans(b, step + att_place<PIECES>(lane % 16, 2 * two + lane / 16));
#pragma unroll
            for (int i = 0; i < 4; i++)
                b[i] ^= 0x80808080u;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const uint32_t a[4] = {att_halves<0x4240>(b[2 * i]), att_halves<0x4341>(b[2 * i]),
                                       att_halves<0x4240>(b[2 * i + 1]),
                                       att_halves<0x4341>(b[2 * i + 1])};
#pragma unroll
                for (int j = 0; j < N; j++)
                    att_mma<T>(o[2 * two + i][j], a, p[j][0], p[j][1]);
            }
        }
    } else {
#pragma unroll
        for (int m = 0; m < D / 16; m++) {
            uint32_t a[4];
            att_matrix4_trans(
                a, step + att_place<PIECES>(lane / 16 * 8 + lane % 8, 2 * m + lane / 8 % 2));
#pragma unroll
            for (int j = 0; j < N; j++)
                att_mma<T>(o[m][j], a, p[j][0], p[j][1]);
        }
    }
}

/* S to exponents' values, and the unit's m and l, of heads 2t, 2t + 1 (and 8 j more); keys lo .. hi
 * (of the unit) are seen, all if !mask. */
template <int N>
__device__ inline void softmax(float (&s)[4][N][4], float (&m)[N][2], float (&l)[N][2],
                               const att_scaling &x, bool mask, int lo, int hi, int lane)
{
    const int g = lane / 4;
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int key = 16 * i + g + e / 2 * 8;
                if (x.cap) s[i][j][e] = att_tanh(__fmul_rn(s[i][j][e], x.pre));
                if (mask && (key < lo || key > hi)) s[i][j][e] = -INFINITY;
            }
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
            float most = -INFINITY, sum = 0;
#pragma unroll
            for (int i = 0; i < 4; i++)
                most = fmaxf(most, fmaxf(s[i][j][c], s[i][j][c + 2]));
#pragma unroll
            for (int d = 4; d < 32; d *= 2)
                most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, d));
            m[j][c] = __fmul_rn(most, x.by);
            const float base = most == -INFINITY ? 0.0f : -m[j][c];
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int e = c; e < 4; e += 2) {
                    s[i][j][e] = att_exp2(__fmaf_rn(s[i][j][e], x.by, base));
                    sum = __fadd_rn(sum, s[i][j][e]);
                }
#pragma unroll
            for (int d = 4; d < 32; d *= 2)
                sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, d));
            l[j][c] = sum;
        }
}

/* The running state of a KV head: float4 [D / 16][columns][8], as mma's sums lie; then, for each
 * query head, (m, l). */
template <int D> __host__ __device__ inline int state_bytes(int columns)
{
    return columns * (D / 16 * 8 * 16 + 2 * 8);
}

/* It takes a unit in. first: there is none yet. */
template <int D, int N>
__device__ inline void merge(float4 *state, int columns, bool first, const float (&o)[D / 16][N][4],
                             const float (&m)[N][2], const float (&l)[N][2], int lane)
{
    float2 *ml = (float2 *)(state + D / 16 * columns * 8);
    float2 old[N][2];
    att_weights w[N][2];
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const int column = min(4 * j + lane % 4, columns - 1);
            old[j][c] = first ? make_float2(-INFINITY, 0.0f) : ml[2 * column + c];
            w[j][c] = att_merge(old[j][c].x, m[j][c]);
            old[j][c].y = att_merged(old[j][c].y, l[j][c], w[j][c]);
        }
    __syncwarp();
#pragma unroll
    for (int j = 0; j < N; j++) {
        const int column = 4 * j + lane % 4;
        if (column >= columns) continue;
        if (lane < 4) {
            ml[2 * column] = old[j][0];
            ml[2 * column + 1] = old[j][1];
        }
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            float4 *at = state + (i * columns + column) * 8 + lane / 4;
            float4 v = first ? make_float4(0, 0, 0, 0) : *at;
            v.x = att_merged(v.x, o[i][j][0], w[j][0]);
            v.y = att_merged(v.y, o[i][j][1], w[j][1]);
            v.z = att_merged(v.z, o[i][j][2], w[j][0]);
            v.w = att_merged(v.w, o[i][j][3], w[j][1]);
            *at = v;
        }
    }
}

/* A unit's own m, l and O to memory. */
template <bool Q8, int D, int N>
__device__ inline void put_part(const single_args &a, int64_t part, int rows,
                                const float (&o)[D / 16][N][4], const float (&m)[N][2],
                                const float (&l)[N][2], int lane)
{
    float2 *ml = (float2 *)(a.parts + (int64_t)a.parts_cap * a.a.heads.n_heads * D);
    const int g = lane / 4;
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const int head = 8 * j + lane % 4 * 2 + c;
            if (head >= rows) continue;
            float *to = a.parts + (part + head) * D;
            if (g == 0) ml[part + head] = make_float2(m[j][c], l[j][c]);
#pragma unroll
            for (int i = 0; i < D / 16; i++) {
                to[16 * i + (Q8 ? 2 * g : g)] = o[i][j][c];
                to[16 * i + (Q8 ? 2 * g + 1 : g + 8)] = o[i][j][c + 2];
            }
        }
}

/* Units' parts to the result; a thread four columns of a head. */
template <int D>
__device__ void combine(const single_args &a, const bgk_item &item, const unit_range &u, int head0,
                        int rows)
{
    constexpr int AHEAD = 8;
    const bgk_heads &h = a.a.heads;
    const float2 *ml_of = (const float2 *)(a.parts + (int64_t)a.parts_cap * h.n_heads * D);
    for (int quad = threadIdx.x; quad < rows * (D / 4); quad += BLOCK) {
        const int head = head0 + quad / (D / 4), col = quad % (D / 4) * 4;
        float m = -INFINITY, l = 0;
        float4 o = {};
        for (int unit = u.begin; unit < u.end; unit += AHEAD) {
            float2 ml[AHEAD];
            float4 v[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                if (unit + i >= u.end) continue;
                const int64_t part = (int64_t)(item.n + unit + i) * h.n_heads + head;
                ml[i] = __ldcg(ml_of + part);
                v[i] = __ldcg((const float4 *)(a.parts + part * D + col));
            }
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                if (unit + i >= u.end) continue;
                const att_weights w = att_merge(m, ml[i].x);
                l = att_merged(l, ml[i].y, w);
                o.x = att_merged(o.x, v[i].x, w);
                o.y = att_merged(o.y, v[i].y, w);
                o.z = att_merged(o.z, v[i].z, w);
                o.w = att_merged(o.w, v[i].w, w);
            }
        }
        const float f = att_factor(m, l, h.sinks, head);
        put(a.out, item.row0, head * D + col, __fmul_rn(o.x, f));
        put(a.out, item.row0, head * D + col + 1, __fmul_rn(o.y, f));
        put(a.out, item.row0, head * D + col + 2, __fmul_rn(o.z, f));
        put(a.out, item.row0, head * D + col + 3, __fmul_rn(o.w, f));
    }
}

/* Value `dim` of a row of the running state. */
template <bool Q8>
__device__ inline float state_at(const float *state, int columns, int row, int dim)
{
    const int in = dim % 16, g = Q8 ? in / 2 : in % 8, high = Q8 ? in % 2 : in / 8;
    return state[((dim / 16 * columns + row / 2) * 8 + g) * 4 + 2 * high + row % 2];
}

template <typename T, int D, int N>
__global__ void __launch_bounds__(BLOCK, single_shape<T, D, N>::FIT) attend_single(single_args a)
{
    using S = att_shape<T, D>;
    using L = single_shape<T, D, N>;
    constexpr int STAGES = L::STAGES;
    extern __shared__ __align__(128) unsigned char shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t ring = att_shared(shared + warp * L::RING);
    unsigned char *states = shared + WARPS * L::RING;

    const bgk_heads &h = a.a.heads;
    const int split = blockIdx.x % a.splits, tile = blockIdx.x / a.splits;
    const int kv0 = tile / a.q_tiles * a.kv_heads, kv = kv0 + warp % a.kv_heads;
    const int phase = warp / a.kv_heads, phases = WARPS / a.kv_heads; /* every phases-th unit */
    const att_group group = att_group_of(h, kv);
    const int head0 = group.first + tile % a.q_tiles * 16;
    const int rows = min(16, group.first + group.n - head0);
    float4 *state = (float4 *)(states + warp % a.kv_heads * state_bytes<D>(a.columns));
    const int4 raw = *(const int4 *)(a.items + blockIdx.y);
    const bgk_item item = {raw.x, raw.y, raw.z, raw.w};
    const unit_range u = units_of(a, item);
    if (split >= u.splits) return;
    const int begin = u.begin + split * u.each;
    const int end = min(u.end, begin + u.each);

    const int pos = item.pos0, keys_end = pos + 1;
    const int seen = h.window && pos >= h.window ? pos - h.window + 1 : 0;
    const att_keys keys = att_keys_of<T>(a.a, item.block0, kv);
    const att_scaling scaling = att_scaling_of(h);

    att_rows<BGK_UNIT> at;
    int coming = begin + phase - phases;
    at.look_up(keys, (coming + phases) * BGK_UNIT, keys_end, lane);
    auto issue = [&](int step) { /* 0..3: K's, 4..7: V's, to stage step % STAGES */
                                 if (step == 0) {
                                     coming += phases;
                                     at.take(keys, coming * BGK_UNIT, lane);
                                     at.look_up(keys, (coming + phases) * BGK_UNIT, keys_end, lane);
                                 }
                                 if (coming < end && rows > 0)
                                     att_load<T, D, S::KEYS>(
                                         ring + step % STAGES * S::STEP, keys, step >= 4,
                                         at.row[step % 4 / 2], step % 2 * 16, 0,
                                         keys_end - coming * BGK_UNIT - step % 4 * 16, lane);
                                 ptx_copy_commit();
    };
    /* Items and tables came with the step's copy, and keys of units before the token's own are from
     * earlier steps: nothing that the kernel before writes. */
    if (begin + phase >= pos / BGK_UNIT) ptx_wait_prior();
#pragma unroll
    for (int i = 0; i < STAGES; i++)
        issue(i);
    ptx_wait_prior();
    ptx_let_next_start();
    uint32_t q[D / 16][N][2];
    load_q<T, D, N>(q, a.a, item.row0, head0, rows, lane);

    for (int round = begin; round < end; round += phases) {
        const int unit = round + phase;
        const bool works = unit < end && rows > 0;
        float m[N][2], l[N][2], o[D / 16][N][4] = {};
        if (works) {
            float s[4][N][4] = {};
#pragma unroll
            for (int two = 0; two < 4; two += 2) {
                ptx_copy_wait<STAGES - 2>();
                __syncwarp();
                const uint32_t steps = ring + two % STAGES * S::STEP;
#pragma unroll
                for (int ks = 0; ks < D / 16; ks++)
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        uint32_t k[4];
                        keys_operand<T, D>(k, steps + i * S::STEP, ks, lane);
#pragma unroll
                        for (int j = 0; j < N; j++)
                            att_mma<T>(s[two + i][j], k, q[ks][j][0], q[ks][j][1]);
                    }
                if constexpr (S::Q8)
#pragma unroll
                    for (int i = 0; i < 2; i++)
#pragma unroll
                        for (int e = 0; e < 4; e++) {
                            const float by = scale_of<T, D>(steps + i * S::STEP, e / 2, lane);
#pragma unroll
                            for (int j = 0; j < N; j++)
                                s[two + i][j][e] = __fmul_rn(s[two + i][j][e], by);
                        }
                __syncwarp();
                issue((two + STAGES) % 8);
                issue((two + 1 + STAGES) % 8);
            }
            const int lo = seen - unit * BGK_UNIT, hi = pos - unit * BGK_UNIT;
            softmax<N>(s, m, l, scaling, lo > 0 || hi < BGK_UNIT - 1, lo, hi, lane);
#pragma unroll
            for (int two = 0; two < 4; two += 2) {
                ptx_copy_wait<STAGES - 2>();
                __syncwarp();
                const uint32_t steps = ring + (two + 4) % STAGES * S::STEP;
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    uint32_t p[N][2];
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        float by = 1;
                        if constexpr (S::Q8)
                            by = __fmul_rn(scale_of<T, D>(steps + i * S::STEP, e, lane), ATT_RAISE);
#pragma unroll
                        for (int j = 0; j < N; j++) {
                            float x = s[two + i][j][2 * e], y = s[two + i][j][2 * e + 1];
                            if constexpr (S::Q8) {
                                x = __fmul_rn(x, by);
                                y = __fmul_rn(y, by);
                            }
                            p[j][e] = att_transposed(att_pack<T>(x, y));
                        }
                    }
                    add_values<T, D, N>(o, p, steps + i * S::STEP, lane);
                }
                __syncwarp();
                issue((two + 4 + STAGES) % 8);
                issue((two + 5 + STAGES) % 8);
            }
            if constexpr (S::Q8)
#pragma unroll
                for (int i = 0; i < D / 16; i++)
#pragma unroll
                    for (int j = 0; j < N; j++)
#pragma unroll
                        for (int e = 0; e < 4; e++)
                            o[i][j][e] = __fmul_rn(o[i][j][e], 1.0f / ATT_RAISE);
        }
        if (u.splits > 1) {
            if (works)
                put_part<S::Q8, D, N>(a, (int64_t)(item.n + unit) * h.n_heads + head0, rows, o, m,
                                      l, lane);
            continue;
        }
        for (int turn = 0; turn < phases; turn++) {
            if (turn == phase && works) merge<D, N>(state, a.columns, unit == begin, o, m, l, lane);
            if (phases > 1)
                __syncthreads();
            else
                __syncwarp();
        }
    }
    const att_group group0 = att_group_of(h, kv0), group1 = att_group_of(h, kv0 + a.kv_heads - 1);
    const int first = group0.first + tile % a.q_tiles * 16; /* query heads of the block */
    const int end_head = a.kv_heads > 1 ? group1.first + group1.n : head0 + max(rows, 0);
    if (u.splits > 1) {
        int *last = (int *)shared;
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) {
            unsigned *done = a.done + blockIdx.y * (gridDim.x / (unsigned)a.splits) + tile;
            *last = atomicAdd(done, 1u) == (unsigned)u.splits - 1;
            if (*last) *done = 0;
            __threadfence();
        }
        __syncthreads();
        if (!*last) return;
        combine<D>(a, item, u, first, end_head - first);
    } else {
        __syncthreads();
        const float2 *ml_of = (const float2 *)(state + D / 16 * a.columns * 8);
        for (int i = phase * 32 + lane; i < rows * (D / 2); i += phases * 32) {
            const int row = i / (D / 2), at2 = i % (D / 2), head = head0 + row;
            const float2 ml = ml_of[row];
            const float f = att_factor(ml.x, ml.y, h.sinks, head);
            const int c0 = D % 64 ? 2 * at2 : at2 / 32 * 64 + at2 % 32;
            const int c1 = D % 64 ? c0 + 1 : c0 + 32;
            const float x = __fmul_rn(state_at<S::Q8>((const float *)state, a.columns, row, c0), f);
            const float y = __fmul_rn(state_at<S::Q8>((const float *)state, a.columns, row, c1), f);
            if (D % 64 == 0 && a.out.layout == BGK_TILES) {
                *(__half2 *)((__half *)a.out.data +
                             tile_at(a.out.stride, item.row0, head * D + c0)) =
                    __halves2half2(tile_half(x), tile_half(y));
            } else {
                put(a.out, item.row0, head * D + c0, x);
                put(a.out, item.row0, head * D + c1, y);
            }
        }
    }
    fill_last_group(a.out, item.row0, end_head - 1, h.n_heads, D, threadIdx.x, BLOCK);
}

/* Shared memory of a block, so much that no processor takes more than `each` of few blocks, while
 * others idle: started early, they go where the kernel before leaves room. */
int spread_evenly(int bytes, int each)
{
    int device = 0, room = 0, most = 0;
    if (each > 2 || cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&room, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device) !=
            cudaSuccess ||
        cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) !=
            cudaSuccess)
        return bytes;
    const int enough = room / (each + 1); /* with what the system takes of each, it is too much */
    return enough > bytes && enough <= most ? enough : bytes;
}

template <typename T, int D, int N>
cudaError_t launch_rows(single_args a, int n, int n_sms, cudaStream_t stream)
{
    using L = single_shape<T, D, N>;
    const int kv = a.a.cache.n_kv_heads, enough = n_sms + n_sms / 2;
    a.kv_heads = 1;
    for (int more = 4; more > 1 && a.q_tiles == 1 && a.kv_heads == 1; more /= 2)
        if (kv % more == 0 && n * kv / more >= enough) a.kv_heads = more;
    const int tiles = kv / a.kv_heads * a.q_tiles, blocks = n * tiles;
    const int splits = a.parts_cap && blocks <= COUNTERS ? L::FIT * n_sms / blocks : 1;
    a.splits = splits < 1 ? 1 : splits > 64 ? 64 : splits;
    const int bytes = spread_evenly(WARPS * L::RING + a.kv_heads * state_bytes<D>(a.columns),
                                    (blocks * a.splits + n_sms - 1) / n_sms);
    const cudaError_t e = att_shared_memory(attend_single<T, D, N>, bytes);
    if (e != cudaSuccess) return e;
    return launch_after(attend_single<T, D, N>, dim3((unsigned)(tiles * a.splits), (unsigned)n),
                        BLOCK, (size_t)bytes, stream, a);
}

template <typename T, int D>
cudaError_t launch(const single_args &a, int n, int n_sms, cudaStream_t stream)
{
    return a.a.heads.group <= 8 ? launch_rows<T, D, 1>(a, n, n_sms, stream)
                                : launch_rows<T, D, 2>(a, n, n_sms, stream);
}

template <typename T>
cudaError_t launch_type(const single_args &a, int n, int n_sms, cudaStream_t stream)
{
    switch (a.a.cache.k_dim) {
    case 64:
        return launch<T, 64>(a, n, n_sms, stream);
    case 96:
        return launch<T, 96>(a, n, n_sms, stream);
    case 128:
        return launch<T, 128>(a, n, n_sms, stream);
    default:
        return launch<T, 256>(a, n, n_sms, stream);
    }
}

} // namespace

cudaError_t bgk_attention_single(const bgk_out *out, const bgk_att *a, const bgk_item *items, int n,
                                 void *parts, size_t parts_bytes, int n_sms, cudaStream_t stream)
{
    const bgk_heads *h = &a->heads;
    if (!bgk_attention_fits(&a->cache) || bad_heads(h, &a->cache) || bad_attention_out(out) ||
        !(h->scale > 0) || n < 0 || n > 65535 || n_sms < 1 || (uintptr_t)items % 16 ||
        (uintptr_t)a->q % 16 || a->q_cols % 8 || (uintptr_t)parts % 16)
        return cudaErrorInvalidValue;
    if (!n || !h->n_heads) return cudaSuccess;
    const size_t part = (size_t)h->n_heads * (size_t)(a->cache.v_dim + 2) * sizeof(float);
    const size_t counters = COUNTERS * sizeof(unsigned);
    const size_t cap = parts && parts_bytes > counters ? (parts_bytes - counters) / part : 0;
    const single_args args = {.out = *out,
                              .a = *a,
                              .items = items,
                              .done = (unsigned *)parts,
                              .parts = (float *)((char *)parts + counters),
                              .parts_cap = (int)(cap < 1u << 30 ? cap : 1u << 30),
                              .splits = 1,
                              .q_tiles = (h->group + 15) / 16,
                              .kv_heads = 1,
                              .columns = ((h->group < 16 ? h->group : 16) + 1) / 2};
    switch (a->cache.type) {
    case BGK_F16:
        return launch_type<__half>(args, n, n_sms, stream);
    case BGK_BF16:
        return launch_type<__nv_bfloat16>(args, n, n_sms, stream);
    default:
        return launch_type<int8_t>(args, n, n_sms, stream);
    }
}
