/* kernels/mla_tile.cuh - what mla.cu is made of: works, keys to shared memory, queries, softmax,
 * results. Order and layout: mla.cu. */
#ifndef BGK_MLA_TILE_CUH
#define BGK_MLA_TILE_CUH

#include "cluster.cuh"
#include "mla.cuh"
#include "wgmma.cuh"

namespace
{

constexpr int KEYS = 64, PANEL = KEYS * 128, STAGES = 2;
constexpr int CHUNK = 16;         /* units */
constexpr int MOST_PARTS = 64;    /* that are merged at a time */
constexpr int MERGE_QUADS = 4096; /* of four values, of all parts, at a time */
static_assert(BGK_MLA_UNIT == KEYS && MOST_PARTS >= CHUNK, "a unit is what a stage holds");
constexpr int WORKERS = 256;
constexpr int CLUSTER_BLOCKS = 16, CLUSTER_UNITS = 2 * CLUSTER_BLOCKS; /* units: at most */
constexpr int PIECE = WORKERS * 4;             /* bytes of a unit's O for a block of the cluster */
constexpr int PITCH = KEYS + 4;                /* floats between rows of S: no bank conflicts */
constexpr int OUT_PITCH = MLA_LATENT * 2 + 16; /* bytes between rows of the result */
constexpr int QUADS = MLA_LATENT / 4;
constexpr float LOG2E = 1.4426950408889634f;

struct mla_args {
    bgk_out out;
    bgk_mla a;
    bgk_rows rows;         /* blocks; of selected rows also pos, seq, block0 */
    const bgk_item *items; /* NULL: all rows, by themselves */
    bgk_selected s;
    uint32_t *parts;              /* words: O: [part, head, 512]; fewer than 2^32 */
    uint32_t *parts_ml;           /* behind them, (m, l): [part, head, split] */
    int parts_cap, room;          /* parts in all; of an item */
    int splits, row_tiles, works; /* works: items times row tiles times splits */
    bool many;                    /* items of many tokens */
    bool prefetches;              /* all keys of a row, before it is known which are listed */
    uint32_t block_bytes;
    uint32_t by_heads; /* heads_divided() */
};

/* Threads that bring keys: to listed ones many copies lead, and with many rows in a tile workers
 * take registers from a whole warpgroup. */
template <int N, bool LISTS> constexpr int BRINGERS = LISTS || N > 16 ? 128 : 32;

/* Parts that are merged at a time, those of a chunk beside each other. */
struct parts_table {
    int n_chunks;
    int slot[MOST_PARTS]; /* of parts */
    int begin[33];        /* of a chunk's parts; of what follows the last */
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
        S + 2 * N * PITCH * 4; /* a unit's old, add; a chunk's; end: [N] floats each */
    static constexpr int BARS = FACTORS + 5 * N * 4, TABLE = BARS + 2 * STAGES * 8;
    static constexpr int BYTES = TABLE + (int)sizeof(parts_table) + 1024;
    /* Where stages were: parts of O, their weights, chunks' (m, l). */
    static constexpr int WEIGHTS = MERGE_QUADS * 16, CHUNKS = WEIGHTS + MOST_PARTS * N * 16;
    static_assert(CHUNKS + 32 * N * 8 <= Q, "room to merge");
    /* A cluster's block has, instead of the table: of each unit a piece of O, and (m, l) of its
     * row. */
    static constexpr int PIECES = TABLE, PIECES_ML = PIECES + CLUSTER_UNITS * PIECE;
    static constexpr int SENT = PIECES_ML + CLUSTER_UNITS * 8; /* their barrier */
    static constexpr int CLUSTER_BYTES = SENT + 8 + 1024;
    static_assert(PIECES % 16 == 0, "sent by 16 bytes");
    /* Threads of a row of S, and the keys of each; some have no row. */
    static constexpr int THREADS = N > 16 ? 8 : N > 8 ? 16 : 32;
    static constexpr int MINE = KEYS / THREADS;
};

/* ---- an item ----------------------------------------------------------------------------------
 */

/* The same in all lanes, known to the compiler, which then has plain branches. */
__device__ inline int uniform(int x)
{
    return __shfl_sync(0xffffffffu, x, 0);
}

/* Number i; uniform() once it is there. */
template <bool LISTS> __device__ inline bgk_item item_of(const mla_args &a, int i)
{
    if (LISTS) return {i, a.rows.pos[i], a.rows.block0[a.rows.seq[i]], 1};
    const int4 raw = *(const int4 *)(a.items + i);
    return {raw.x, raw.y, raw.z, raw.w};
}

__device__ inline bgk_item uniform(const bgk_item &x)
{
    return {uniform(x.row0), uniform(x.pos0), uniform(x.block0), uniform(x.n)};
}

/* x / y. One copy of it: code that runs once a kernel costs what it takes to fetch it. */
__device__ __noinline__ uint32_t divide(uint32_t x, uint32_t y)
{
    return x / y;
}

__device__ inline int divided(int x, int y)
{
    return uniform((int)divide((uint32_t)x, (uint32_t)y));
}

__device__ inline int divided_up(int x, int y)
{
    return divided(x + y - 1, y);
}

__device__ inline int chunks_of(int units)
{
    return (int)((uint32_t)(units + CHUNK - 1) / CHUNK);
}

/* The keys of a row's list; 0: it sees all up to its position. */
__device__ int listed_of(const mla_args &a, const bgk_item &item)
{
    return item.pos0 >= 0 ? max(a.s.count[item.row0], 0) : 0;
}

/* Over how many blocks an item's units are spread, how many each has, and the most parts of one. */
struct spreading {
    int splits, each, per;
};

__device__ inline spreading spread_of(const mla_args &a, int units)
{
    const int splits = min(a.splits, units);
    if (splits <= 1) return {1, units, 0};
    int each = divided_up(units, splits);
#pragma unroll 1
    for (int i = 0; i < 2; i++) {
        const int chunks = chunks_of(each);
        const int per = each % CHUNK ? min(each, CHUNK - 1 + chunks) : chunks;
        const int n = divided_up(units, each);
        if (n * per <= a.room) return {n, each, per};
        each = chunks * CHUNK; /* whole chunks are few parts */
    }
    return {1, units, 0};
}

/* pair / n_heads, for pair < 2^16. */
__device__ inline int heads_divided(const mla_args &a, int pair)
{
    return (int)((uint64_t)(uint32_t)pair * a.by_heads >> 31);
}

/* One row tile of an item, and one split of its units. */
struct mla_work {
    bgk_item item;
    int pair0, n_pairs; /* of the row tile; of the item */
    int listed, n_keys; /* listed 0: its keys are those up to its last position */
    int begin, end;     /* units; none: there is nothing to do */
    int units, split;   /* units: of the item */
    spreading spread;   /* splits 1: not spread */
    int slot0;          /* the item's first part */
    int share;          /* of the row tile's QUADS of columns that a split merges */
};

__device__ inline int item_number(const mla_args &a, int w)
{
    return divided(w, a.row_tiles * a.splits);
}

/* The rows of work w. */
template <bool SPREAD>
__device__ inline mla_work work_of(const mla_args &a, int w, int number, const bgk_item &item,
                                   int n)
{
    mla_work x = {item};
    const int rest = w - number * a.row_tiles * a.splits;
    const int tile = SPREAD ? divided(rest, a.splits) : rest;
    x.split = SPREAD ? rest - tile * a.splits : 0;
    x.slot0 = number * a.room;
    x.n_pairs = (a.many ? item.n : 1) * a.a.n_heads;
    x.pair0 = (a.many ? a.row_tiles - 1 - tile : tile) * n;
    return x;
}

/* Its keys, where its item has so many listed. */
template <bool SPREAD>
__device__ inline void add_keys(mla_work &x, const mla_args &a, int listed, int n)
{
    x.begin = x.end = 0;
    x.listed = listed;
    if (x.pair0 >= x.n_pairs || x.item.pos0 < 0) return;
    x.n_keys =
        listed ? listed : x.item.pos0 + heads_divided(a, min(x.pair0 + n, x.n_pairs) - 1) + 1;
    x.units = (int)((uint32_t)(x.n_keys + KEYS - 1) / KEYS);
    x.spread = {1, x.units, 0};
    x.share = 0;
    if constexpr (SPREAD) {
        const int rows = min(n, x.n_pairs - x.pair0);
        const spreading s = spread_of(a, x.units);
        x.spread = {uniform(s.splits), uniform(s.each), uniform(s.per)};
        if (x.spread.splits > 1) x.share = divided_up(rows * QUADS, x.spread.splits);
    }
    if (x.split >= x.spread.splits) return;
    x.begin = x.split * x.spread.each;
    x.end = min(x.units, x.begin + x.spread.each);
}

/* What block `split` of a cluster has of an item of one token and up to eight heads: some units, of
 * up to CLUSTER_UNITS (keys behind them are left out). pos0 < 0: nothing. */
__device__ inline mla_work work_in_cluster(const mla_args &a, const bgk_item &item, int split)
{
    mla_work x = {item};
    x.n_pairs = a.a.n_heads;
    x.n_keys = min(max(item.pos0 + 1, 0), CLUSTER_UNITS * KEYS);
    x.units = (int)((uint32_t)(x.n_keys + KEYS - 1) / KEYS);
    x.split = split;
    x.begin = (int)((uint32_t)(split * x.units) / CLUSTER_BLOCKS);
    x.end = (int)((uint32_t)((split + 1) * x.units) / CLUSTER_BLOCKS);
    return x;
}

/* Where units end that a split, whose first one is `begin`, stores by themselves: those of a chunk
 * that began in a split before. */
__device__ inline int lead_end(const mla_work &x, int begin)
{
    return min(min(x.units, begin + x.spread.each), chunks_of(begin) * CHUNK);
}

/* The part of a unit that is stored by itself, or of the chunk that begins with it. */
__device__ inline int slot_of(const mla_work &x, int unit, int split)
{
    const int begin = split * x.spread.each, lead = lead_end(x, begin);
    const int i =
        unit < lead ? unit - begin : lead - begin + (int)((uint32_t)(unit - lead) / CHUNK);
    return x.slot0 + split * x.spread.per + i;
}

/* Part words: bits inverted, so that 0, which memory holds between kernels, is a NaN that is never
 * written: a word that is not 0 is there. */
__device__ inline uint32_t part_word(float v)
{
    return max(~__float_as_uint(v), 1u);
}

__device__ inline float part_value(uint32_t word)
{
    return __uint_as_float(~word);
}

/* (m, l) of a part's head for the block of a split, each of which takes its own. */
__device__ inline uint32_t *part_ml(const mla_args &a, int slot, int head, int split)
{
    const uint32_t row = (uint32_t)(slot * a.a.n_heads + head);
    return a.parts_ml + (row * (uint32_t)a.splits + (uint32_t)split) * 2;
}

/* tile_at(). */
__device__ inline uint64_t tile_index(const bgk_out &x, uint32_t row, uint32_t col)
{
    return ((uint64_t)(col / 64) * (uint32_t)x.stride + row) * 64 +
           (((col % 32 / 4) ^ (row & 7)) * 8 + col % 4 * 2 + col / 32 % 2);
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

__device__ inline float get_float(uint32_t at)
{
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(at) : "memory");
    return v;
}

__device__ inline float4 get_float4(uint32_t at)
{
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(at)
                 : "memory");
    return v;
}

__device__ inline void put_int(uint32_t at, int v)
{
    asm volatile("st.shared.s32 [%0], %1;" ::"r"(at), "r"(v) : "memory");
}

__device__ inline int get_int(uint32_t at)
{
    int v;
    asm volatile("ld.shared.s32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
    return v;
}

/* tile_half(). */
__device__ inline uint16_t half_bits(float v)
{
    uint16_t bits;
    asm("{\n.reg .f32 t;\nmax.NaN.f32 t, %1, 0fC77FE000;\nmin.NaN.f32 t, t, 0f477FE000;\n"
        "cvt.rn.f16.f32 %0, t;\n}"
        : "=h"(bits)
        : "f"(v));
    return bits;
}

template <typename T> __device__ inline void put_value(uint32_t at, float v)
{
    uint16_t bits;
    if constexpr (std::is_same<T, __half>::value) {
        bits = half_bits(v);
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
    uint32_t block_bytes;
    int block_tokens;
};

__device__ inline const char *block_at(const key_source &k, int i)
{
    return k.layer + (uint64_t)(uint32_t)k.table[i] * k.block_bytes;
}

/* Keys [first, end) of the 64 from token `token` of table entry `block` on, by the lanes of a warp;
 * their bytes are announced. fresh: keys that the kernels before write. */
__device__ inline void bring(uint32_t stage, uint32_t bar, const key_source &k, int block,
                             int token, int first, int end, bool fresh, uint32_t lane)
{
    const int each = min(k.block_tokens, KEYS), shift = __ffs(each) - 1, begin = first >> shift;
    const int n = (((end + each - 1) >> shift) - begin) * MLA_PANELS;
#pragma unroll 1
    for (int i = (int)lane; i < n; i += 32) {
        const int b = begin + (int)((uint32_t)i / MLA_PANELS),
                  panel = (int)((uint32_t)i % MLA_PANELS);
        const int at = max(first, b << shift);
        const char *from = block_at(k, block + b) +
                           (uint32_t)(panel * k.block_tokens + token + (at & (each - 1))) * 128;
        if (fresh) ptx_wait_prior(); /* once the table was read, which is older */
        ptx_bulk_copy(stage + panel * PANEL + at * 128, from,
                      (uint32_t)((min(end, (b + 1) << shift) - at) * 128), bar);
    }
}

/* `left` (1..64) keys of Q8 from there on: values, the ninth panel, scales (by fours: a block's are
 * whole). */
template <typename L>
__device__ inline void bring_q8(uint32_t stage, uint32_t bar, const key_source &k, int block,
                                int token, int left, uint32_t lane)
{
    const int each = min(k.block_tokens, KEYS), shift = __ffs(each) - 1;
    if (lane == 0) mbar_expect(bar, (uint32_t)(left * (MLA_LATENT + 128) + (left + 3) / 4 * 16));
    __syncwarp();
    const int b = (int)(lane / 3), what = (int)(lane % 3), first = b << shift;
    const int m = min(each, left - first);
    if (m <= 0) return;
    const uint32_t value = what == 0 ? MLA_LATENT : what == 1 ? 128 : 4;
    const uint32_t before = what == 0 ? 0 : what == 1 ? MLA_LATENT : MLA_LATENT + 128;
    const uint32_t to = what == 0 ? 0 : what == 1 ? L::LAST : L::SCALES;
    ptx_bulk_copy(stage + to + first * value,
                  block_at(k, block + b) + (k.block_tokens * before + token * value),
                  (m * value + 15) & ~15u, bar);
}

/* `left` keys, the rest becomes zeros: some of the 64 for each of WARPS warps, of which a lane has
 * the position of one. */
template <typename L, int WARPS>
__device__ inline void bring_listed(uint32_t stage, uint32_t bar, const key_source &k, int pos,
                                    int left, uint32_t warp, uint32_t lane)
{
    constexpr int EACH = KEYS / WARPS;
    const int mine = (int)(warp * EACH + lane % EACH);
    const int block = (int)divide((uint32_t)pos, (uint32_t)k.block_tokens);
    const int token = pos - block * k.block_tokens;
    const uint32_t p = lane % 8;
    const char *own = mine < left ? block_at(k, block) : k.layer;
#pragma unroll 1
    for (int i = 0; i < EACH / 4; i++) {
        const int from_lane = 4 * i + (int)(lane / 8), key = (int)warp * EACH + from_lane;
        const uint32_t t = (uint32_t)__shfl_sync(0xffffffffu, token, from_lane);
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
                att_copy16(to + panel * PANEL, from + (uint32_t)(panel * k.block_tokens) * 128,
                           key < left);
        }
    }
    if (L::Q8 && lane < EACH)
        att_copy4(stage + L::SCALES + 4 * mine,
                  own + k.block_tokens * (MLA_LATENT + 128) + token * 4, mine < left);
    arrive_with_copies(bar);
}

/* Q8: a warpgroup makes its four panels of halves of a stage's int8 values. Eight lanes read 128
 * bytes of a key and write eight pieces that lie in different banks: the halves of odd panels go
 * the other way round. */
__device__ inline void unpack(uint32_t panels, uint32_t stage, uint32_t thread)
{
    const uint32_t lane = thread % 32, wg = thread / 128;
    const uint32_t odd = lane / 4 % 2, panel = wg * 4 + lane / 8 % 2 * 2 + odd, piece = lane % 4;
    const uint32_t key0 = thread / 32 % 4 * 2 + lane / 16;
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

/* What a thread reads of a work's rows of Q, and by what it turns pairs. Of the latents piece
 * thread % 64 of rows thread / 64, + 4, ..; of the rope part a pair of rows thread / 32, + 8, .. */
template <int N> struct q_source {
    const __half *lat[N / 4], *lo[N / 8], *hi[N / 8]; /* NULL: there is none */
    float2 angle[N / 8];
};

/* The pair's columns in its 64. */
__device__ inline uint2 pair_of(const mla_args &a, uint32_t thread)
{
    const uint32_t i = thread % 32;
    return a.a.rope.neox ? make_uint2(i, i + 32) : make_uint2(2 * i, 2 * i + 1);
}

__device__ __noinline__ float2 angle_of(int pos, float freq, float mscale)
{
    return mla_angle(pos, freq, mscale);
}

/* Before anything is waited for. */
template <int N>
__device__ inline void find_q(q_source<N> &q, const mla_args &args, const mla_work &x,
                              uint32_t thread)
{
    const bgk_mla &a = args.a;
    const uint2 cols = pair_of(args, thread);
    const float freq = a.rope.freq[thread % 32];
    const __half *rope = (const __half *)a.q.data;
    int before = 0;
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
        const int pair = x.pair0 + (int)(thread / 64) + 4 * i, token = heads_divided(args, pair);
        const uint32_t head = (uint32_t)(pair - token * a.n_heads);
        q.lat[i] = (const __half *)a.q_lat.data +
                   ((uint64_t)(uint32_t)(x.item.row0 + token) * (uint32_t)a.q_lat.stride +
                    (head * MLA_LATENT + thread % 64 * 8));
        if (pair >= x.n_pairs) q.lat[i] = nullptr;
    }
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
        const int pair = x.pair0 + (int)(thread / 32) + 8 * j, token = heads_divided(args, pair);
        const uint32_t row = (uint32_t)(x.item.row0 + token);
        const uint32_t col = (uint32_t)((pair - token * a.n_heads) * (a.nope + MLA_ROPE) + a.nope);
        q.lo[j] = rope + tile_index(a.q, row, col + cols.x);
        q.hi[j] = rope + tile_index(a.q, row, col + cols.y);
        if (pair >= x.n_pairs) q.lo[j] = nullptr;
        if (j == 0 || token != before)
            q.angle[j] = angle_of(x.item.pos0 + token, freq, a.rope.mscale);
        else
            q.angle[j] = q.angle[j - (j > 0)];
        before = token;
    }
    if constexpr (N <= 16) { /* now, not where they are used; else that takes registers */
#pragma unroll
        for (int i = 0; i < N / 4; i++)
            asm volatile("" : "+l"(q.lat[i]));
#pragma unroll
        for (int j = 0; j < N / 8; j++)
            asm volatile("" : "+l"(q.lo[j]), "+l"(q.hi[j]), "+f"(q.angle[j].x), "+f"(q.angle[j].y));
    }
}

/* A work's rows of Q to panels [N][64], 0 where there is none. All that is read is asked for before
 * anything is waited for. */
template <typename T, int N>
__device__ inline void load_q(uint32_t to, const mla_args &args, const q_source<N> &q,
                              uint32_t thread)
{
    constexpr bool HALF = std::is_same<T, __half>::value;
    constexpr int EACH = N / 8;
    const uint32_t piece = thread % 64;
    const uint2 cols = pair_of(args, thread);
    uint4 v[HALF ? 1 : N / 4];
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
        const uint32_t r = thread / 64 + 4 * i;
        if constexpr (HALF)
            att_copy16(to + piece / 8 * N * 128 + r * 128 + (((piece % 8) ^ (r & 7)) << 4),
                       q.lat[i] ? q.lat[i] : (const __half *)args.a.q_lat.data, q.lat[i]);
        else
            v[i] = q.lat[i] ? __ldcg((const uint4 *)q.lat[i]) : uint4{};
    }
    if constexpr (HALF) ptx_copy_commit();
    __syncwarp(); /* ptxas leaves the copies before what follows, and much follows */
    __half u[EACH][2];
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        u[j][0] = u[j][1] = __half(0.0f);
        if (!q.lo[j]) continue;
        u[j][0] = __ldcg(q.lo[j]);
        u[j][1] = __ldcg(q.hi[j]);
    }
    if constexpr (!HALF) {
#pragma unroll
        for (int j = 0; j < N / 4; j++) {
            const uint32_t r = thread / 64 + 4 * j;
            uint32_t *w = (uint32_t *)&v[j];
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float2 f = __half22float2(*(const __half2 *)&w[e]);
                w[e] = att_pack<T>(f.x, f.y);
            }
            put16(to + piece / 8 * N * 128 + r * 128 + (((piece % 8) ^ (r & 7)) << 4), v[j]);
        }
    }
    const uint32_t last = to + (MLA_PANELS - 1) * N * 128;
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        const uint32_t r = thread / 32 + 8 * j;
        const float2 t = mla_turned(__half2float(u[j][0]), __half2float(u[j][1]), q.angle[j]);
        put_value<T>(last + r * 128 + (((cols.x / 8) ^ (r & 7)) << 4) + cols.x % 8 * 2, t.x);
        put_value<T>(last + r * 128 + (((cols.y / 8) ^ (r & 7)) << 4) + cols.y % 8 * 2, t.y);
    }
    if constexpr (HALF) ptx_copy_wait<0>();
}

/* ---- softmax -----------------------------------------------------------------------------------
 */

/* __fdiv_rn(1, l) without its branch to what takes care of tiny and huge l: a row's is near 1 or
 * more (or NaN). */
__device__ inline float inverse(float l)
{
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(l));
    r = __fmaf_rn(r, __fmaf_rn(-l, r, 1.0f), r);
    return __fmaf_rn(r, __fmaf_rn(-l, r, 1.0f), r);
}

/* A row's running state, as each of its threads has it. */
struct row_state {
    float m, l, all_m, all_l; /* of the chunk; of the chunks before */
};

/* The thread's MINE keys of row `row`, from key k0 of the tile on, of which the first `seen` are
 * seen: P to `p`, the row's factors to `factors`, the chunk's where it ends and `all` takes it. Q8:
 * P times the keys' scales and ATT_RAISE. */
template <typename T, int N>
__device__ inline void softmax(row_state &x, uint32_t s, uint32_t p, uint32_t factors,
                               uint32_t scales, uint32_t row, uint32_t k0, int seen, float by,
                               bool chunk_begins, bool chunk_ends)
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
        if ((int)k0 + i >= seen) v[i] = -INFINITY;
        most = fmaxf(most, v[i]);
    }
#pragma unroll
    for (int d = 1; d < L::THREADS; d *= 2)
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, d));
    const float m = __fmul_rn(most, by), base = m == -INFINITY ? 0.0f : -m;
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
    if (chunk_begins) {
        x.m = -INFINITY;
        x.l = 0;
    }
    const att_weights unit = att_merge(x.m, m);
    x.l = att_merged(x.l, sum[0], unit);
    if constexpr (L::Q8) { /* braces: nvcc 13.0 drops what follows a pragma in a discarded branch */
#pragma unroll
        for (int i = 0; i < L::MINE; i += 2) {
            const float2 f = get_float2(scales + (uint32_t)((k0 + i) * 4));
            v[i] = (int)k0 + i < seen ? __fmul_rn(v[i], __fmul_rn(f.x, ATT_RAISE)) : 0.0f;
            v[i + 1] =
                (int)k0 + i + 1 < seen ? __fmul_rn(v[i + 1], __fmul_rn(f.y, ATT_RAISE)) : 0.0f;
        }
    }
#pragma unroll
    for (int i = 0; i < L::MINE; i += 2)
        asm volatile(
            "st.shared.b32 [%0], %1;" ::"r"(
                p + (uint32_t)(row * 128 + ((((k0 + i) / 8) ^ (row & 7)) << 4) + (k0 + i) % 8 * 2)),
            "r"(att_pack<T>(v[i], v[i + 1]))
            : "memory");
    att_weights chunk = {};
    if (chunk_ends) {
        chunk = att_merge(x.all_m, x.m);
        x.all_l = att_merged(x.all_l, x.l, chunk);
    }
    if (k0) return;
    put_float(factors + row * 4, unit.old);
    put_float(factors + (N + row) * 4, unit.add);
    if (!chunk_ends) return;
    put_float(factors + (2 * N + row) * 4, chunk.old);
    put_float(factors + (3 * N + row) * 4, chunk.add);
    const float end = inverse(x.all_l);
    put_float(factors + (4 * N + row) * 4, L::Q8 ? __fmul_rn(end, 1.0f / ATT_RAISE) : end);
}

/* d *= the rows' last factors; -0, which unseen keys may have made 0, becomes 0. */
template <int N> __device__ inline void end_rows(float (&d)[4][N / 2], uint32_t factors, int lane)
{
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
        const float2 f = get_float2(factors + (uint32_t)((8 * j + lane % 4 * 2) * 4));
#pragma unroll
        for (int m = 0; m < 4; m++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                d[m][4 * j + e] = __fadd_rn(__fmul_rn(d[m][4 * j + e], e % 2 ? f.y : f.x), 0.0f);
    }
}

/* all = all * old + d * add, of 64 dims each. */
template <int N, int M>
__device__ inline void merge_rows(float (&all)[M][N / 2], const float (&d)[M][N / 2], uint32_t old,
                                  uint32_t add, int lane)
{
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
        const float2 o = get_float2(old + (uint32_t)((8 * j + lane % 4 * 2) * 4));
        const float2 a = get_float2(add + (uint32_t)((8 * j + lane % 4 * 2) * 4));
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                all[m][4 * j + e] =
                    att_merged(all[m][4 * j + e], d[m][4 * j + e],
                               e % 2 ? att_weights{o.y, a.y} : att_weights{o.x, a.x});
    }
}

/* ---- results -----------------------------------------------------------------------------------
 */

/* The first of the thread's dims of O. Its values [m][4 j + 2 i + e] are of dim + 64 m + 8 i of row
 * 8 j + lane % 4 * 2 + e. */
__device__ inline uint32_t first_dim(uint32_t thread)
{
    return thread / 128 * 256 + thread / 32 % 4 * 16 + thread % 32 / 4;
}

/* O, m and l to a part; (m, l) of a row once for each block that merges some of it. */
template <typename T, int N>
__device__ inline void store_part(const mla_args &a, const mla_work &x, int slot,
                                  const float (&o)[4][N / 2], float m, float l, uint32_t row,
                                  uint32_t k0, uint32_t thread)
{
    using L = mla_shape<T, N>;
    const uint32_t pair = (uint32_t)x.pair0, n_pairs = (uint32_t)x.n_pairs;
    const uint32_t own = thread % 4 * 2, heads = (uint32_t)(slot * a.a.n_heads);
    uint32_t *to = a.parts + ((heads + pair + own) * MLA_LATENT + first_dim(thread));
#pragma unroll
    for (int j = 0; j < N / 8; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            if (pair + own + 8 * j + e >= n_pairs) continue;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const float v = o[i / 2][4 * j + i % 2 * 2 + e];
                asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(
                                 to + (8 * j + e) * MLA_LATENT + 64 * (i / 2) + 8 * (i % 2)),
                             "r"(part_word(L::Q8 ? __fmul_rn(v, 1.0f / ATT_RAISE) : v))
                             : "memory");
            }
        }
    const bool any = (N * L::THREADS == WORKERS || row < N) && pair + row < n_pairs;
    uint32_t *ml = part_ml(a, slot, (int)(pair + row), (int)(k0 / L::MINE));
    int mine = (int)(k0 / L::MINE) * x.share; /* a split's first column */
#pragma unroll 1
    for (int i = 0; i < x.spread.splits; i += L::THREADS, ml += L::THREADS * 2) {
        const int first = mine + i * x.share;
        if (any && i + (int)(k0 / L::MINE) < x.spread.splits && first < (int)(row + 1) * QUADS &&
            first + x.share > (int)row * QUADS)
            asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};" ::"l"(ml),
                         "r"(part_word(m)), "r"(part_word(l))
                         : "memory");
    }
}

/* O, m and l of a unit to the blocks of the cluster that merge some of them: block 2 r + h has half
 * h of the dims of row r, as PIECE bytes: [a thread's first, last four values][thread of 32]. Rows
 * from `rows` on are not sent. */
template <typename T>
__device__ inline void send_unit(uint32_t base, int unit, const float (&o)[4][4], float m, float l,
                                 int rows, uint32_t thread)
{
    using L = mla_shape<T, 8>;
    const uint32_t half = thread / 128, lane = thread % 32, own = lane % 4 * 2;
    const uint32_t at =
        base + (uint32_t)(L::PIECES + unit * PIECE) + (thread / 32 % 4 * 8 + lane / 4) * 16;
    const auto value = [](float v) { return L::Q8 ? __fmul_rn(v, 1.0f / ATT_RAISE) : v; };
#pragma unroll
    for (int e = 0; e < 2; e++) {
        if ((int)own + e >= rows) continue;
        const uint32_t block = 2 * (own + e) + half, to = cluster_map(at, block);
        const uint32_t bar = cluster_map(base + L::SENT, block);
#pragma unroll
        for (int k = 0; k < 2; k++)
            cluster_send(to + k * (PIECE / 2),
                         make_float4(value(o[2 * k][e]), value(o[2 * k][2 + e]),
                                     value(o[2 * k + 1][e]), value(o[2 * k + 1][2 + e])),
                         bar);
    }
    const uint32_t row = thread / 32, block = 2 * row + lane;
    if (lane < 2 && (int)row < rows)
        cluster_send(cluster_map(base + (uint32_t)(L::PIECES_ML + unit * 8), block),
                     make_float2(m, l), cluster_map(base + L::SENT, block));
}

/* Where value `thread` of a piece of half `half` is in its row. */
__device__ inline uint32_t dim_in_piece(uint32_t half, uint32_t thread)
{
    const uint32_t k = thread / 128 * 4 + thread % 4, of = thread % 128 / 4;
    return half * 256 + of / 8 * 16 + of % 8 + k / 2 * 64 + k % 2 * 8;
}

/* A value of a row of one token, to column `col`. */
__device__ inline void store_value(const mla_args &a, uint32_t row, uint32_t col, float v)
{
    if (a.out.layout == BGK_TILES)
        ((uint16_t *)a.out.data)[tile_index(a.out, row, col)] = half_bits(v);
    else
        ((float *)a.out.data)[(uint64_t)row * (uint32_t)a.out.stride + col] = v;
}

/* The workers: all units' pieces to half a row of the result. */
template <typename T>
__device__ inline void merge_units(const mla_args &a, const mla_work &x, uint32_t base,
                                   uint32_t thread)
{
    using L = mla_shape<T, 8>;
    constexpr int TOGETHER = 4;
    static_assert(CHUNK % TOGETHER == 0 && CLUSTER_UNITS % TOGETHER == 0, "whole ones");
    const int units = x.units;
    uint32_t from = base + L::PIECES + thread * 4, by = base + L::PIECES_ML;
    float m = -INFINITY, l = 0, o = 0, all_m = -INFINITY, all_l = 0, all_o = 0;
#pragma unroll 1
    for (int i = 0; i < units; i += TOGETHER, from += TOGETHER * PIECE, by += TOGETHER * 8) {
        float2 ml[TOGETHER];
        float v[TOGETHER];
#pragma unroll
        for (int k = 0; k < TOGETHER; k++) {
            ml[k] = get_float2(by + k * 8);
            v[k] = get_float(from + k * PIECE);
        }
#pragma unroll
        for (int k = 0; k < TOGETHER; k++)
            if (i + k < units) {
                const att_weights w = att_merge(m, ml[k].x);
                l = att_merged(l, ml[k].y, w);
                o = att_merged(o, v[k], w);
            }
        if ((i + TOGETHER) % CHUNK && i + TOGETHER < units) continue;
        const att_weights w = att_merge(all_m, m);
        all_l = att_merged(all_l, l, w);
        all_o = att_merged(all_o, o, w);
        m = -INFINITY;
        l = o = 0;
    }
    const uint32_t head = (uint32_t)x.split / 2;
    if ((int)head < x.n_pairs)
        store_value(a, (uint32_t)x.item.row0,
                    head * MLA_LATENT + dim_in_piece((uint32_t)x.split % 2, thread),
                    __fadd_rn(__fmul_rn(all_o, inverse(all_l)), 0.0f));
}

/* room: N * OUT_PITCH bytes that nobody reads any more. */
template <int N>
__device__ inline void store_result(const mla_args &a, const float (&o)[4][N / 2],
                                    const mla_work &x, uint32_t room, uint32_t thread)
{
    const uint32_t dim0 = first_dim(thread), own = thread % 4 * 2;
    const int heads = a.a.n_heads;
#pragma unroll
    for (int j = 0; j < N / 8; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const uint32_t r = own + 8 * j + e;
            const int pair = x.pair0 + (int)r, token = heads_divided(a, pair);
            const uint32_t row = (uint32_t)(x.item.row0 + token);
            if (a.out.layout != BGK_TILES) {
                float *to = (float *)a.out.data + (uint64_t)row * (uint32_t)a.out.stride +
                            ((uint32_t)(pair - token * heads) * MLA_LATENT + dim0);
                if (pair >= x.n_pairs) continue;
#pragma unroll
                for (int i = 0; i < 8; i++)
                    to[64 * (i / 2) + 8 * (i % 2)] = o[i / 2][4 * j + i % 2 * 2 + e];
                continue;
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const uint32_t dim = dim0 + 8 * i;
                const uint32_t to = room + r * OUT_PITCH + dim / 64 * 128 +
                                    ((dim % 32 / 4) ^ (row & 7)) * 16 +
                                    (dim % 4 * 2 + dim / 32 % 2) * 2;
#pragma unroll
                for (int m = 0; m < 4; m++)
                    put_value<__half>(to + 128 * m, o[m][4 * j + 2 * i + e]);
            }
        }
    if (a.out.layout != BGK_TILES) return;
    workers_meet();
    const uint32_t piece = thread % 64;
    uint32_t r = thread / 64;
#pragma unroll 1
    for (int pair = x.pair0 + (int)r; r < N && pair < x.n_pairs; r += 4, pair += 4) {
        const int token = heads_divided(a, pair);
        const uint32_t head = (uint32_t)(pair - token * heads);
        uint4 v;
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "r"(room + r * OUT_PITCH + piece * 16)
                     : "memory");
        *(uint4 *)((__half *)a.out.data +
                   ((uint64_t)(head * 8 + piece / 8) * (uint32_t)a.out.stride +
                    (uint32_t)(x.item.row0 + token)) *
                       64 +
                   piece % 8 * 8) = v;
    }
}

#endif

} // namespace

#endif
