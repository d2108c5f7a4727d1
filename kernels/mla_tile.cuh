/* kernels/mla_tile.cuh - what mla.cu is made of: works, keys to shared memory, queries, softmax,
 * results. Order and layout: mla.cu. */
#ifndef BGK_MLA_TILE_CUH
#define BGK_MLA_TILE_CUH

#include "mla.cuh"
#include "wgmma.cuh"

namespace
{

constexpr int KEYS = 64, PANEL = KEYS * 128, STAGES = 2;
constexpr int UNIT_TILES = BGK_MLA_UNIT / KEYS;
constexpr int WORKERS = 256, BRINGERS = 128, BLOCK = WORKERS + BRINGERS;
constexpr int PITCH = KEYS + 4;                /* floats between rows of S: no bank conflicts */
constexpr int OUT_PITCH = MLA_LATENT * 2 + 16; /* bytes between rows of the result */
constexpr int MEETINGS = 1024;
constexpr float LOG2E = 1.4426950408889634f;

struct mla_args {
    bgk_out out;
    bgk_mla a;
    bgk_rows rows;         /* blocks; of selected rows also pos, seq, block0 */
    const bgk_item *items; /* NULL: all rows, by themselves */
    bgk_selected s;
    unsigned *arrived; /* [2, MEETINGS]: splits of a row tile that are there; that went on */
    float *parts;      /* O: [part, head, 512]; then (m, l): [part, head] */
    int parts_cap, splits, row_tiles, works; /* works: items times row tiles times splits */
    bool many;                               /* items of many tokens */
    int64_t block_bytes;
    uint32_t by_heads; /* heads_divided() */
};

/* Shared memory. A stage of 16-bit values is nine panels [64 keys][64]. Q8: [64 keys][512] int8,
 * the ninth panel and 64 scales; the eight panels of halves are made of it. */
template <typename T, int N> struct mla_shape {
    static constexpr bool Q8 = sizeof(T) == 1;
    using V = std::conditional_t<Q8, __half, T>;  /* what wgmma takes */
    static constexpr int RAW = KEYS * MLA_LATENT; /* Q8: bytes before the ninth panel */
    static constexpr int LAST = Q8 ? RAW : 8 * PANEL, SCALES = LAST + PANEL;
    static constexpr int STAGE = Q8 ? SCALES + 1024 : MLA_PANELS * PANEL;
    static constexpr int MADE = STAGES * STAGE, Q = MADE + (Q8 ? 8 * PANEL : 0);
    static constexpr int P = Q + MLA_PANELS * N * 128, S = P + N * 128;
    static constexpr int FACTORS =
        S + 2 * N * PITCH * 4; /* alpha, old, add, end: [N] floats each */
    static constexpr int BARS = FACTORS + 4 * N * 4, BYTES = BARS + 2 * STAGES * 8 + 1024;
    /* Threads of a row of S, and the keys of each; some have no row. */
    static constexpr int THREADS = N > 16 ? 8 : N > 8 ? 16 : 32;
    static constexpr int MINE = KEYS / THREADS;
};

/* ---- an item ----------------------------------------------------------------------------------
 */

__device__ bgk_item item_of(const mla_args &a, int i)
{
    if (a.items) {
        const int4 raw = *(const int4 *)(a.items + i);
        return {raw.x, raw.y, raw.z, raw.w};
    }
    const int units = (a.s.top_k + BGK_MLA_UNIT - 1) / BGK_MLA_UNIT;
    return {i, a.rows.pos[i], a.rows.block0[a.rows.seq[i]], i * units};
}

/* The keys of a row's list; 0: it sees all up to its position. */
__device__ int listed_of(const mla_args &a, const bgk_item &item)
{
    return a.s.list && item.pos0 >= 0 ? max(a.s.count[item.row0], 0) : 0;
}

/* Over how many blocks an item's units are spread, and how many each has. */
struct spreading {
    int splits, each;
};

__device__ spreading spread_of(const mla_args &a, const bgk_item &item, int units)
{
    int splits = a.many ? 1 : min(a.splits, units);
    if (splits > 1 && item.n > a.parts_cap - units) splits = 1;
    const int each = (units + splits - 1) / splits;
    return {(units + each - 1) / each, each};
}

/* pair / n_heads, for pair < 2^16. */
__device__ inline int heads_divided(const mla_args &a, int pair)
{
    return a.a.n_heads == 1 ? pair : (int)__umulhi((uint32_t)pair, a.by_heads);
}

/* One row tile of an item, and one split of its units. */
struct mla_work {
    bgk_item item;
    int listed, n_keys; /* listed 0: its keys are those up to its last position */
    int pair0, n_pairs; /* of the row tile; of the item */
    int begin, end;     /* tiles of keys; none: there is nothing to do */
    int units, each;    /* of the item; of a split */
    int split, splits;  /* splits 1: not spread */
};

__device__ inline int item_number(const mla_args &a, int w)
{
    return w / (a.row_tiles * a.splits);
}

__device__ inline mla_work work_of(const mla_args &a, int w, const bgk_item &item, int listed,
                                   int n)
{
    mla_work x = {item, listed};
    const int rest = w % (a.row_tiles * a.splits), split = rest % a.splits, tile = rest / a.splits;
    x.n_pairs = (a.many ? item.n : 1) * a.a.n_heads;
    x.pair0 = (a.many ? a.row_tiles - 1 - tile : tile) * n;
    if (x.pair0 >= x.n_pairs || item.pos0 < 0) return x;
    x.n_keys = listed ? listed : item.pos0 + heads_divided(a, min(x.pair0 + n, x.n_pairs) - 1) + 1;
    const int tiles = (x.n_keys + KEYS - 1) / KEYS;
    x.units = (tiles + UNIT_TILES - 1) / UNIT_TILES;
    const spreading spread = spread_of(a, item, x.units);
    if (split >= spread.splits) return x;
    x.begin = split * spread.each * UNIT_TILES;
    x.end = min(tiles, x.begin + spread.each * UNIT_TILES);
    x.each = spread.each;
    x.split = split;
    x.splits = spread.splits;
    return x;
}

__device__ float2 *part_ml(const mla_args &a)
{
    return (float2 *)(a.parts + (int64_t)a.parts_cap * a.a.n_heads * MLA_LATENT);
}

#if __CUDA_ARCH_FEAT_SM90_ALL

/* ---- wgmma, both operands in shared memory -----------------------------------------------------
 */

/* d (m64 nN) = a b, or += where more. TA: A lies with M contiguous. */
template <typename T, int N, int TA>
__device__ inline void multiply(float (&d)[N / 2], uint64_t a, uint64_t b, int more);

#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define R8    "%0, %1, %2, %3"
#define R16   R8 ", %4, %5, %6, %7"
#define R24   R16 ", %8, %9, %10, %11"
#define R32   R24 ", %12, %13, %14, %15"
#define MULTIPLY(T, TYPE, N, TA, REGS, A, B, MORE, ...)                                           \
    template <>                                                                                   \
    __device__ inline void multiply<T, N, TA>(float(&d)[N / 2], uint64_t a, uint64_t b, int more) \
    {                                                                                             \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " MORE ", 0;\n"                            \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" REGS    \
                     "}, " A ", " B ", p, 1, 1, " #TA ", 0;\n}\n"                                 \
                     : __VA_ARGS__                                                                \
                     : "l"(a), "l"(b), "r"(more));                                                \
    }
#define MULTIPLY_ALL(T, TYPE, TA)                                            \
    MULTIPLY(T, TYPE, 8, TA, R8, "%4", "%5", "%6", D4(0))                    \
    MULTIPLY(T, TYPE, 16, TA, R16, "%8", "%9", "%10", D4(0), D4(4))          \
    MULTIPLY(T, TYPE, 24, TA, R24, "%12", "%13", "%14", D4(0), D4(4), D4(8)) \
    MULTIPLY(T, TYPE, 32, TA, R32, "%16", "%17", "%18", D4(0), D4(4), D4(8), D4(12))
MULTIPLY_ALL(__half, "f16", 0)
MULTIPLY_ALL(__half, "f16", 1)
MULTIPLY_ALL(__nv_bfloat16, "bf16", 0)
MULTIPLY_ALL(__nv_bfloat16, "bf16", 1)

/* 64 values of M contiguous in a row of 128 bytes, rows along K, swizzled, 8 rows = 1024 bytes. */
__device__ inline uint64_t transposed_desc(uint32_t shared)
{
    return (uint64_t)((shared & 0x3ffff) >> 4) | (uint64_t)(1024 >> 4) << 16 |
           (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}

/* What ordinary stores wrote is seen by wgmma and bulk copies that come after. */
__device__ inline void fence_async()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ inline void warpgroup_meets(int wg)
{
    asm volatile("bar.sync %0, 128;" ::"r"(2 + wg) : "memory");
}

__device__ inline void workers_meet()
{
    asm volatile("bar.sync 1, 256;" ::: "memory");
}

/* Arrives once the thread's copies so far have come. */
__device__ inline void arrive_with_copies(uint32_t bar)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}

__device__ inline void put16(uint32_t at, uint4 v)
{
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z),
                 "r"(v.w)
                 : "memory");
}

__device__ inline void put_float(uint32_t at, float v)
{
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(v) : "memory");
}

__device__ inline float2 get_float2(uint32_t at)
{
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(at) : "memory");
    return v;
}

template <typename T> __device__ inline void put_value(uint32_t at, float v)
{
    uint16_t bits;
    if constexpr (std::is_same<T, __half>::value) {
        const __half h = tile_half(v);
        bits = *(const uint16_t *)&h;
    } else {
        const __nv_bfloat16 h = __float2bfloat16_rn(v);
        bits = *(const uint16_t *)&h;
    }
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(at), "h"(bits) : "memory");
}

/* ---- keys to a stage ---------------------------------------------------------------------------
 */

struct key_source {
    const char *layer; /* its first block */
    const int32_t *table;
    int64_t block_bytes;
    int block_tokens;
};

/* `left` (1..64) keys from key0 on, by the lanes of a warp. */
__device__ inline void bring(uint32_t stage, uint32_t bar, const key_source &k, int key0, int left,
                             int lane)
{
    const int each = min(k.block_tokens, KEYS), n = (left + each - 1) / each * MLA_PANELS;
    if (lane == 0) mbar_expect(bar, (uint32_t)(left * MLA_PANELS * 128));
    __syncwarp();
    for (int i = lane; i < n; i += 32) {
        const int b = i / MLA_PANELS, panel = i % MLA_PANELS, key = key0 + b * each;
        const char *from = k.layer + k.table[key / k.block_tokens] * k.block_bytes +
                           ((int64_t)panel * k.block_tokens + key % k.block_tokens) * 128;
        ptx_bulk_copy(stage + panel * PANEL + b * each * 128, from,
                      (uint32_t)(min(each, left - b * each) * 128), bar);
    }
}

/* The same of Q8: values, the ninth panel, scales (by fours: a block's are whole). */
template <typename L>
__device__ inline void bring_q8(uint32_t stage, uint32_t bar, const key_source &k, int key0,
                                int left, int lane)
{
    const int each = min(k.block_tokens, KEYS), n = (left + each - 1) / each * 3;
    if (lane == 0) mbar_expect(bar, (uint32_t)(left * (MLA_LATENT + 128) + (left + 3) / 4 * 16));
    __syncwarp();
    if (lane >= n) return;
    const int b = lane / 3, what = lane % 3, key = key0 + b * each, at = key % k.block_tokens;
    const int m = min(each, left - b * each), first = b * each;
    const char *from = k.layer + k.table[key / k.block_tokens] * k.block_bytes;
    if (what == 0)
        ptx_bulk_copy(stage + first * MLA_LATENT, from + at * MLA_LATENT,
                      (uint32_t)(m * MLA_LATENT), bar);
    else if (what == 1)
        ptx_bulk_copy(stage + L::LAST + first * 128,
                      from + (k.block_tokens * MLA_LATENT + at * 128), (uint32_t)(m * 128), bar);
    else
        ptx_bulk_copy(stage + L::SCALES + first * 4,
                      from + (k.block_tokens * (MLA_LATENT + 128) + at * 4),
                      (uint32_t)((m + 3) / 4 * 16), bar);
}

/* `left` keys by their positions, the rest becomes zeros: 16 of the 64 for each of four warps. */
template <typename L>
__device__ inline void bring_listed(uint32_t stage, uint32_t bar, const key_source &k,
                                    const int32_t *list, int left, int warp, int lane)
{
    const int mine = warp * 16 + lane % 16, pos = mine < left ? list[mine] : 0;
    const char *own = k.layer + (mine < left ? k.table[pos / k.block_tokens] * k.block_bytes : 0);
    const int token = pos % k.block_tokens, p = lane % 8;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int from_lane = 4 * i + lane / 8, key = warp * 16 + from_lane;
        const int t = __shfl_sync(0xffffffffu, token, from_lane);
        const char *block = (const char *)__shfl_sync(0xffffffffu, (long long)own, from_lane);
        const char *from = block + t * 128 + ((p ^ (t & 7)) << 4);
        const uint32_t to = stage + (uint32_t)(key * 128 + ((p ^ (key & 7)) << 4));
        if constexpr (L::Q8) {
#pragma unroll
            for (int j = 0; j < 4; j++)
                att_copy16(stage + key * MLA_LATENT + j * 128 + p * 16,
                           block + t * MLA_LATENT + j * 128 + p * 16, key < left);
            att_copy16(to + L::LAST, from + k.block_tokens * MLA_LATENT, key < left);
        } else {
#pragma unroll
            for (int panel = 0; panel < MLA_PANELS; panel++)
                att_copy16(to + panel * PANEL, from + (int64_t)panel * k.block_tokens * 128,
                           key < left);
        }
    }
    if (L::Q8 && lane < 16)
        att_copy4(stage + L::SCALES + 4 * mine,
                  own + k.block_tokens * (MLA_LATENT + 128) + token * 4, mine < left);
    arrive_with_copies(bar);
}

/* Q8: a warpgroup makes its four panels of halves of a stage's int8 values. Eight lanes read 128
 * bytes of a key and write eight pieces that lie in different banks: the halves of odd panels go
 * the other way round. */
__device__ inline void unpack(uint32_t panels, uint32_t stage, int thread)
{
    const int lane = thread % 32, wg = thread / 128;
    const int odd = lane / 4 % 2, panel = wg * 4 + lane / 8 % 2 * 2 + odd, piece = lane % 4;
    const int key0 = thread / 32 % 4 * 2 + lane / 16;
    uint32_t x[8][4];
#pragma unroll
    for (int i = 0; i < 8; i++)
        asm volatile(
            "ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
            : "=r"(x[i][0]), "=r"(x[i][1]), "=r"(x[i][2]), "=r"(x[i][3])
            : "r"(stage + (uint32_t)((8 * i + key0) * MLA_LATENT + panel * 64 + piece * 16))
            : "memory");
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const uint32_t to = panels + (uint32_t)(panel * PANEL + (8 * i + key0) * 128);
#pragma unroll
        for (int j = 0; j < 4; j++)
            x[i][j] ^= 0x80808080u;
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const uint32_t low = j ^ odd ? x[i][2] : x[i][0], high = j ^ odd ? x[i][3] : x[i][1];
            put16(to + (uint32_t)(((2 * piece + (j ^ odd)) ^ (key0 & 7)) << 4),
                  make_uint4(att_halves<0x4140>(low), att_halves<0x4342>(low),
                             att_halves<0x4140>(high), att_halves<0x4342>(high)));
        }
    }
}

/* ---- queries -----------------------------------------------------------------------------------
 */

/* A work's rows of Q to panels [N][64], 0 where there is none. All that is read is asked for before
 * anything is waited for. */
template <typename T, int N>
__device__ inline void load_q(uint32_t to, const mla_args &args, const mla_work &x, int thread)
{
    constexpr bool HALF = std::is_same<T, __half>::value;
    const bgk_mla &a = args.a;
    const int piece = thread % 64;
    uint4 v[HALF ? 1 : N / 4];
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
        const int r = thread / 64 + 4 * i, pair = x.pair0 + r;
        const bool any = pair < x.n_pairs;
        const int token = heads_divided(args, pair), head = pair - token * a.n_heads;
        const __half *from =
            (const __half *)a.q_lat.data +
            (any ? (x.item.row0 + token) * a.q_lat.stride + head * MLA_LATENT : 0) + piece * 8;
        if constexpr (HALF)
            att_copy16(
                to + (uint32_t)(piece / 8 * N * 128 + r * 128 + (((piece % 8) ^ (r & 7)) << 4)),
                from, any);
        else
            v[i] = any ? *(const uint4 *)from : uint4{};
    }
    if constexpr (HALF) ptx_copy_commit();
    /* A warp has the rope part of rows warp, warp + 8, ..: a lane two values. */
    constexpr int EACH = N / 8;
    const int i = thread % 32, lo = a.rope.neox ? i : 2 * i, hi = a.rope.neox ? i + 32 : 2 * i + 1;
    const float freq = a.rope.freq[i];
    __half u[EACH][2];
    int token[EACH];
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        const int pair = x.pair0 + thread / 32 + 8 * j;
        token[j] = heads_divided(args, pair);
        const int col = (pair - token[j] * a.n_heads) * (a.nope + MLA_ROPE) + a.nope;
        const __half *q = (const __half *)a.q.data;
        u[j][0] = u[j][1] = __half(0.0f);
        if (pair >= x.n_pairs) continue;
        u[j][0] = q[tile_at(a.q.stride, x.item.row0 + token[j], col + lo)];
        u[j][1] = q[tile_at(a.q.stride, x.item.row0 + token[j], col + hi)];
    }
    if constexpr (!HALF) {
#pragma unroll
        for (int j = 0; j < N / 4; j++) {
            const int r = thread / 64 + 4 * j;
            uint32_t *w = (uint32_t *)&v[j];
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float2 f = __half22float2(*(const __half2 *)&w[e]);
                w[e] = att_pack<T>(f.x, f.y);
            }
            put16(to + (uint32_t)(piece / 8 * N * 128 + r * 128 + (((piece % 8) ^ (r & 7)) << 4)),
                  v[j]);
        }
    }
    const uint32_t last = to + (MLA_PANELS - 1) * N * 128;
    float2 angle = {};
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        const int r = thread / 32 + 8 * j;
        if (j == 0 || token[j] != token[j - (j > 0)])
            angle = mla_angle(x.item.pos0 + token[j], freq, a.rope.mscale);
        const float2 t = mla_turned(__half2float(u[j][0]), __half2float(u[j][1]), angle);
        put_value<T>(last + (uint32_t)(r * 128 + (((lo / 8) ^ (r & 7)) << 4) + lo % 8 * 2), t.x);
        put_value<T>(last + (uint32_t)(r * 128 + (((hi / 8) ^ (r & 7)) << 4) + hi % 8 * 2), t.y);
    }
    if constexpr (HALF) ptx_copy_wait<0>();
}

/* ---- softmax -----------------------------------------------------------------------------------
 */

/* A row's running state, as each of its threads has it. */
struct row_state {
    float m, l, all_m, all_l; /* of the unit; of the units before */
};

/* The thread's MINE keys of row `row`, from key k0 of the tile on, of which the first `seen` are
 * seen: P to `p`, the row's factors to `factors`. Q8: P times the keys' scales and ATT_RAISE. */
template <typename T, int N>
__device__ inline void softmax(row_state &x, uint32_t s, uint32_t p, uint32_t factors,
                               uint32_t scales, int row, int k0, int seen, float by,
                               bool unit_begins, bool unit_ends)
{
    using L = mla_shape<T, N>;
    float v[L::MINE];
#pragma unroll
    for (int i = 0; i < L::MINE; i += 2) {
        const float2 a = get_float2(s + (uint32_t)((row * PITCH + k0 + i) * 4));
        const float2 b = get_float2(s + (uint32_t)(((N + row) * PITCH + k0 + i) * 4));
        v[i] = __fadd_rn(a.x, b.x);
        v[i + 1] = __fadd_rn(a.y, b.y);
    }
    float most = -INFINITY;
#pragma unroll
    for (int i = 0; i < L::MINE; i++) {
        if (k0 + i >= seen) v[i] = -INFINITY;
        most = fmaxf(most, v[i]);
    }
#pragma unroll
    for (int d = 1; d < L::THREADS; d *= 2)
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, d));
    if (unit_begins) {
        x.m = -INFINITY;
        x.l = 0;
    }
    const float m = fmaxf(x.m, __fmul_rn(most, by)), base = m == -INFINITY ? 0.0f : -m;
    const float alpha = att_exp2(__fadd_rn(x.m, base));
    float sum[L::MINE];
#pragma unroll
    for (int i = 0; i < L::MINE; i++)
        sum[i] = v[i] = att_exp2(__fmaf_rn(v[i], by, base));
#pragma unroll
    for (int d = 1; d < L::MINE; d *= 2)
#pragma unroll
        for (int i = 0; i < L::MINE; i += 2 * d)
            sum[i] = __fadd_rn(sum[i], sum[i + d]);
#pragma unroll
    for (int d = 1; d < L::THREADS; d *= 2)
        sum[0] = __fadd_rn(sum[0], __shfl_xor_sync(0xffffffffu, sum[0], d));
    x.m = m;
    x.l = __fmaf_rn(x.l, alpha, sum[0]);
    if constexpr (L::Q8) { /* braces: nvcc 13.0 drops what follows a pragma in a discarded branch */
#pragma unroll
        for (int i = 0; i < L::MINE; i += 2) {
            const float2 f = get_float2(scales + (uint32_t)((k0 + i) * 4));
            v[i] = k0 + i < seen ? __fmul_rn(v[i], __fmul_rn(f.x, ATT_RAISE)) : 0.0f;
            v[i + 1] = k0 + i + 1 < seen ? __fmul_rn(v[i + 1], __fmul_rn(f.y, ATT_RAISE)) : 0.0f;
        }
    }
#pragma unroll
    for (int i = 0; i < L::MINE; i += 2)
        asm volatile(
            "st.shared.b32 [%0], %1;" ::"r"(
                p + (uint32_t)(row * 128 + ((((k0 + i) / 8) ^ (row & 7)) << 4) + (k0 + i) % 8 * 2)),
            "r"(att_pack<T>(v[i], v[i + 1]))
            : "memory");
    att_weights w = {};
    if (unit_ends) {
        w = att_merge(x.all_m, x.m);
        x.all_l = att_merged(x.all_l, x.l, w);
    }
    if (k0) return;
    put_float(factors + row * 4, alpha);
    if (!unit_ends) return;
    put_float(factors + (N + row) * 4, w.old);
    put_float(factors + (2 * N + row) * 4, w.add);
    const float end = __fdiv_rn(1.0f, x.all_l);
    put_float(factors + (3 * N + row) * 4, L::Q8 ? __fmul_rn(end, 1.0f / ATT_RAISE) : end);
}

/* d *= the rows' factors. */
template <int N> __device__ inline void scale_rows(float (&d)[4][N / 2], uint32_t factors, int lane)
{
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
        const float2 f = get_float2(factors + (uint32_t)((8 * j + lane % 4 * 2) * 4));
#pragma unroll
        for (int m = 0; m < 4; m++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                d[m][4 * j + e] = __fmul_rn(d[m][4 * j + e], e % 2 ? f.y : f.x);
    }
}

/* d *= the rows' last factors; -0, which unseen keys may have made 0, becomes 0. */
template <int N> __device__ inline void end_rows(float (&d)[4][N / 2], uint32_t factors, int lane)
{
    scale_rows<N>(d, factors, lane);
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
        for (int i = 0; i < N / 2; i++)
            d[m][i] = __fadd_rn(d[m][i], 0.0f);
}

/* all = all * old + d * add */
template <int N>
__device__ inline void merge_rows(float (&all)[4][N / 2], const float (&d)[4][N / 2], uint32_t old,
                                  uint32_t add, int lane)
{
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
        const float2 o = get_float2(old + (uint32_t)((8 * j + lane % 4 * 2) * 4));
        const float2 a = get_float2(add + (uint32_t)((8 * j + lane % 4 * 2) * 4));
#pragma unroll
        for (int m = 0; m < 4; m++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                all[m][4 * j + e] =
                    att_merged(all[m][4 * j + e], d[m][4 * j + e],
                               e % 2 ? att_weights{o.y, a.y} : att_weights{o.x, a.x});
    }
}

/* ---- results -----------------------------------------------------------------------------------
 */

/* f(row) for the rows of O that the thread has, and what that gives (dim, value) for its values. */
template <int N, typename F>
__device__ inline void each_value(const float (&o)[4][N / 2], int thread, F f)
{
    const int lane = thread % 32, dim0 = thread / 128 * 256 + thread / 32 % 4 * 16 + lane / 4;
#pragma unroll
    for (int j = 0; j < N / 8; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const auto put_one = f(8 * j + lane % 4 * 2 + e);
#pragma unroll
            for (int m = 0; m < 4; m++)
#pragma unroll
                for (int i = 0; i < 2; i++)
                    put_one(dim0 + 64 * m + i * 8, o[m][4 * j + 2 * i + e]);
        }
}

/* O, m and l of a unit (or of the first ones together) to its part. */
template <typename T, int N>
__device__ inline void store_part(const mla_args &a, const mla_work &x, int unit,
                                  const float (&o)[4][N / 2], float m, float l, int row, int k0,
                                  int thread)
{
    const int64_t part = (int64_t)(x.item.n + unit) * a.a.n_heads + x.pair0;
    each_value<N>(o, thread, [&](int r) {
        float *to = a.parts + (part + r) * MLA_LATENT;
        const bool any = x.pair0 + r < x.n_pairs;
        return [=](int dim, float v) {
            if (any) to[dim] = sizeof(T) == 1 ? __fmul_rn(v, 1.0f / ATT_RAISE) : v;
        };
    });
    if (k0 == 0 && row < N && x.pair0 + row < x.n_pairs) part_ml(a)[part + row] = make_float2(m, l);
}

/* room: N * OUT_PITCH bytes that nobody reads any more. */
template <int N>
__device__ inline void store_result(const mla_args &a, const float (&o)[4][N / 2],
                                    const mla_work &x, uint32_t room, int thread)
{
    const int heads = a.a.n_heads;
    if (a.out.layout != BGK_TILES) {
        each_value<N>(o, thread, [&](int r) {
            const int pair = x.pair0 + r, token = heads_divided(a, pair);
            float *to = (float *)a.out.data + (x.item.row0 + token) * a.out.stride +
                        (pair - token * heads) * MLA_LATENT;
            const bool any = pair < x.n_pairs;
            return [=](int dim, float v) {
                if (any) to[dim] = v;
            };
        });
        return;
    }
    each_value<N>(o, thread, [&](int r) {
        const int row = x.item.row0 + heads_divided(a, x.pair0 + r);
        const uint32_t to = room + (uint32_t)(r * OUT_PITCH);
        return [=](int dim, float v) {
            const int i = dim % 32;
            put_value<__half>(to + (uint32_t)(dim / 64 * 128 + ((i / 4) ^ (row & 7)) * 16 +
                                              (i % 4 * 2 + dim % 64 / 32) * 2),
                              v);
        };
    });
    workers_meet();
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
        const int piece = thread % 64, r = thread / 64 + 4 * i, pair = x.pair0 + r;
        const int token = heads_divided(a, pair), head = pair - token * heads;
        uint4 v;
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "r"(room + (uint32_t)(r * OUT_PITCH + piece * 16))
                     : "memory");
        if (pair < x.n_pairs)
            *(uint4 *)((__half *)a.out.data +
                       ((int64_t)(head * 8 + piece / 8) * a.out.stride + x.item.row0 + token) * 64 +
                       piece % 8 * 8) = v;
    }
}

#endif

} // namespace

#endif
