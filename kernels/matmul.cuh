/* kernels/matmul.cuh - what matmul.cu and experts.cu share: quantised weights times activations on
 * Hopper's tensor cores. See matmul.cu; each of the two instantiates what it launches. */
#ifndef BGK_MATMUL_CUH
#define BGK_MATMUL_CUH

#include <type_traits>

#include <cuda_fp16.h>

#include "bgk.h"
#include "cluster.cuh"
#include "launch.cuh"
#include "tiles.cuh"
#include "wgmma.cuh"

#pragma nv_diag_suppress 177 /* for other architectures the kernel is empty */

namespace
{

constexpr int MAX_STAGES = 8, GROUP = 8;
/* Grouped: scales of rows come with the first stage of a place. While a stage is refilled, the
 * places of all the stages before it may still want theirs. */
constexpr int SCALE_SLOTS = MAX_STAGES + 1;
constexpr int MOST_SHARED = 226 * 1024; /* dynamic; barriers need some more */

struct args {
    const bgk_wtile *tiles;
    const float *row_scale, *bias;
    const __half *x;
    int64_t x_stride;
    void *out;
    int64_t out_stride;
    int n_tiles, n_chunks, splits, tokens;
    int n_ff; /* 0: no glu */
    bgk_act fn;
    bgk_layout layout;                 /* of out; with n_ff BGK_TILES */
    int n_out;                         /* columns of out, BGK_TILES without glu */
    int cluster;                       /* blocks of a cluster that share a place out */
    int stages, stage_bytes, w_stride; /* w_stride: of one warpgroup's weights in a stage */
    int row_blocks, token_blocks;
    /* Grouped (experts.cu): n_tiles are one expert's, and `tiles` is not used; places come from a
     * list on the device. */
    const bgk_moe_item *items;
    const int *n_items;
    const __half *h; /* what direct items read instead of x */
    int64_t h_stride;
    const char *stack[2]; /* tiles of experts [0, n_first), and of the others */
    int stack_format[2], n_first;
    bgk_start start;
    bool idle;      /* few.cu: there is time for a rehearsal */
    bool second;    /* x is what the first product wrote: its rows are the items' out rows */
    bool list_done; /* by the kernel before the one before: the list may be read at once */
    bool staged;    /* halves go out through shared memory, in whole lines */
};

__host__ __device__ constexpr int chunk_bytes(int format)
{
    return format == BGK_W4   ? 2560
           : format == BGK_W5 ? 3072
           : format == BGK_W6 ? 3584
           : format == BGK_W8 ? 4352
                              : 8192;
}

/* First chunk of a part of K; stages of 2 or 4 chunks never lie across. */
__device__ int part_begin(const args &a, int part)
{
    return part < a.splits ? a.n_chunks / 4 * part / a.splits * 4 : a.n_chunks;
}

/* Which tile a block works on: token tiles in groups of GROUP, so that blocks at work at the same
 * time share weights and tokens in L2. */
struct place {
    int first;       /* number of the first tile that counts with it: its expert's, or 0 */
    int tile;        /* the block's first, from there on */
    int out, end;    /* rows [out, end) of out, at most N of them are written */
    const __half *x; /* the first of N rows */
    int64_t x_stride;
    int other; /* grouped: its tiles are in the second stack */
};

/* Grouped: place number i as i / row_blocks and i % row_blocks, and steps of it. */
struct cursor {
    int item, row;
};

__device__ cursor cursor_of(const args &a, int i)
{
    return {i / a.row_blocks, i % a.row_blocks};
}

__device__ void move(cursor &c, const cursor &step, int row_blocks)
{
    c.item += step.item;
    c.row += step.row;
    if (c.row >= row_blocks) {
        c.row -= row_blocks;
        c.item++;
    }
}

/* Item number i, if there may be one; it may be new to L1. */
template <bool GROUPED> __device__ int4 item_of(const args &a, int i)
{
    if constexpr (GROUPED)
        if (i < a.token_blocks) return __ldcg((const int4 *)(a.items + i));
    return {};
}

template <int N, int TILES, bool GROUPED>
__device__ place place_of(const args &a, int i, const cursor &at, const int4 &v)
{
    if constexpr (GROUPED) {
        const int expert = v.x & 0xffff;
        const bool direct = !a.second && v.x >> 16;
        const int64_t stride = direct ? a.h_stride : a.x_stride;
        const __half *x = (direct ? a.h : a.x) + (int64_t)(a.second ? v.z : v.y) * 64;
        return {expert * a.n_tiles, at.row * TILES, v.z, v.z + v.w, x, stride, expert >= a.n_first};
    } else {
        const int per = GROUP * a.row_blocks, group = i / per, in = i % per;
        const int width = min(GROUP, a.token_blocks - group * GROUP);
        const int token = (group * GROUP + in % width) * N;
        return {0, in / width * TILES, token, a.tokens, a.x + (int64_t)token * 64, a.x_stride, 0};
    }
}

/* Of the block's tile number i, the place in a.tiles; those past the end are the last once more. */
__device__ int tile_of(const args &a, const place &p, int i)
{
    return p.first + min(p.tile + i, a.n_tiles - 1);
}

__device__ uint32_t hfma2(uint32_t q, uint32_t s, uint32_t m)
{
    const __half2 v = __hfma2(*(const __half2 *)&q, *(const __half2 *)&s, *(const __half2 *)&m);
    return *(const uint32_t *)&v;
}

__device__ uint32_t hmul2(uint32_t a, uint32_t b)
{
    const __half2 v = __hmul2(*(const __half2 *)&a, *(const __half2 *)&b);
    return *(const uint32_t *)&v;
}

__device__ uint4 shared16(uint32_t at)
{
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(at));
    return v;
}

__device__ uint2 shared8(uint32_t at)
{
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at));
    return v;
}

__device__ uint32_t shared4(uint32_t at)
{
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at));
    return v;
}

/* ORDERED: stays where it is among other instructions that may not move, such as mma. */
template <bool ORDERED> __device__ uint32_t half_fma(uint32_t q, uint32_t s, uint32_t m)
{
    if (!ORDERED) return hfma2(q, s, m);
    uint32_t v;
    asm volatile("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(v) : "r"(q), "r"(s), "r"(m));
    return v;
}

/* What a thread reads of a chunk of 64 columns of 64 rows, and the A operands it makes of it, for
 * one step of 16 columns or for all. at: the chunk in shared memory, t: the thread's number in its
 * warpgroup. */
template <bgk_format F> struct raw;

template <> struct raw<BGK_W4> {
    uint4 q, sm;
    __device__ void load(uint32_t at, int t)
    {
        q = shared16(at + 16 * t);
        sm = shared16(at + 2048 + 16 * (t / 32 * 8 + t % 32 / 4));
    }
    template <bool ORDERED> __device__ void step(uint32_t (&a)[4], int s) const
    {
        const uint32_t word[4] = {q.x, q.y, q.z, q.w}, up = word[s] >> 8;
        a[0] = half_fma<ORDERED>(word[s] & 0x000f000f, sm.x, sm.y);
        a[1] = half_fma<ORDERED>(word[s] & 0x00f000f0, sm.z, sm.w);
        a[2] = half_fma<ORDERED>(up & 0x000f000f, sm.x, sm.y);
        a[3] = half_fma<ORDERED>(up & 0x00f000f0, sm.z, sm.w);
    }
};

template <> struct raw<BGK_W5> {
    uint4 q, sm;
    uint32_t fifth;
    __device__ void load(uint32_t at, int t)
    {
        q = shared16(at + 16 * t);
        sm = shared16(at + 2048 + 16 * (t / 32 * 8 + t % 32 / 4));
        fifth = shared4(at + 2560 + 4 * t);
    }
    template <bool ORDERED> __device__ void step(uint32_t (&a)[4], int s) const
    {
        const uint32_t word[4] = {q.x, q.y, q.z, q.w}, w = word[s], up = word[s] >> 8;
        const uint32_t bits[4] = {(w & 0x000f000f) | (fifth >> s & 0x00100010),
                                  (w & 0x00f000f0) | (fifth >> s & 0x01000100),
                                  (up & 0x000f000f) | (fifth << (4 - s) & 0x00100010),
                                  (up & 0x00f000f0) | (fifth >> (4 + s) & 0x01000100)};
        a[0] = half_fma<ORDERED>(bits[0], sm.x, sm.y);
        a[1] = half_fma<ORDERED>(bits[1], sm.z, sm.w);
        a[2] = half_fma<ORDERED>(bits[2], sm.x, sm.y);
        a[3] = half_fma<ORDERED>(bits[3], sm.z, sm.w);
    }
};

template <> struct raw<BGK_W6> {
    uint4 q, sc;
    uint2 upper;
    __device__ void load(uint32_t at, int t)
    {
        q = shared16(at + 16 * t);
        sc = shared16(at + 2048 + 16 * (t / 32 * 8 + t % 32 / 4));
        upper = shared8(at + 2560 + 8 * t);
    }
    template <bool ORDERED> __device__ void step(uint32_t (&a)[4], int s) const
    {
        /* -32 as a half subnormal: r0's quants count 2^-24, r1's 2^-20 */
        const uint32_t low = 0x80208020, high = 0x82008200;
        const uint32_t s0 = s < 2 ? sc.x : sc.y, s1 = s < 2 ? sc.z : sc.w;
        const uint32_t m0 = hmul2(s0, low), m1 = hmul2(s1, high);
        const uint32_t word[4] = {q.x, q.y, q.z, q.w}, w = word[s], up = word[s] >> 8;
        const uint32_t u = s < 2 ? upper.x : upper.y;
        const int e = s % 2 * 2;
        const uint32_t bits[4] = {(w & 0x000f000f) | (u >> e & 0x00300030),
                                  (w & 0x00f000f0) | (u >> e & 0x03000300),
                                  (up & 0x000f000f) | (u << (4 - e) & 0x00300030),
                                  (up & 0x00f000f0) | (u >> (4 + e) & 0x03000300)};
        a[0] = half_fma<ORDERED>(bits[0], s0, m0);
        a[1] = half_fma<ORDERED>(bits[1], s1, m1);
        a[2] = half_fma<ORDERED>(bits[2], s0, m0);
        a[3] = half_fma<ORDERED>(bits[3], s1, m1);
    }
};

template <> struct raw<BGK_W8> {
    uint4 lo, hi;
    uint2 sc;
    __device__ void load(uint32_t at, int t)
    {
        lo = shared16(at + 16 * t);
        hi = shared16(at + 2048 + 16 * t);
        sc = shared8(at + 4096 + 8 * (t / 32 * 8 + t % 32 / 4));
    }
    template <bool ORDERED> __device__ void step(uint32_t (&a)[4], int s) const
    {
        const uint32_t word[8] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};
        const uint32_t offset = 0x80808080; /* -128 x 2^-24 twice */
        const uint32_t m0 = hmul2(sc.x, offset), m1 = hmul2(sc.y, offset);
        const uint32_t w = word[2 * s], v = word[2 * s + 1];
        a[0] = half_fma<ORDERED>(w & 0x00ff00ff, sc.x, m0);
        a[1] = half_fma<ORDERED>(__byte_perm(w, 0, 0x4341), sc.y, m1);
        a[2] = half_fma<ORDERED>(v & 0x00ff00ff, sc.x, m0);
        a[3] = half_fma<ORDERED>(__byte_perm(v, 0, 0x4341), sc.y, m1);
    }
};

template <> struct raw<BGK_W16> {
    uint32_t at, thread; /* nothing to make: read where it is used */
    __device__ void load(uint32_t from, int t)
    {
        at = from;
        thread = t;
    }
    template <bool ORDERED> __device__ void step(uint32_t (&a)[4], int s) const
    {
        const uint4 v = shared16(at + 2048 * s + 16 * thread);
        a[0] = v.x;
        a[1] = v.y;
        a[2] = v.z;
        a[3] = v.w;
    }
};

template <typename W> __device__ void dequantise(uint32_t (&a)[4][4], const W &weights)
{
#pragma unroll
    for (int s = 0; s < 4; s++)
        weights.template step<false>(a[s], s);
}

/* The ring as one side sees it. */
struct ring {
    uint32_t full, empty, data; /* shared addresses */
    int stage, phase;
    __device__ void next(int stages)
    {
        if (++stage == stages) {
            stage = 0;
            phase ^= 1;
        }
    }
};

/* The whole warp is done with a stage: what its lanes read comes before the copy that is next.
 * EVERY_LANE is for compute-sanitizer, whose racecheck does not see that __syncwarp() puts the
 * other lanes' reads before the one arrival. */
#ifdef EVERY_LANE
constexpr int ARRIVALS = 32;
__device__ void give_back(uint32_t empty, int)
{
    mbar_arrive(empty);
}
#else
constexpr int ARRIVALS = 1;
__device__ void give_back(uint32_t empty, int t)
{
    __syncwarp();
    if (t % 32 == 0) mbar_arrive(empty);
}
#endif

/* acc += the warpgroup's RB tiles of 64 rows by N tokens, over chunks [0, n) of the ring. */
template <bgk_format F, int N, int RB, int SC>
__device__ __forceinline__ void multiply(float (&acc)[RB][N / 2], const args &a, ring &r, int n,
                                         int group, int t)
{
    static_assert(SC * RB % 2 == 0, "operands alternate between two sets of registers");
    constexpr int BYTES = chunk_bytes(F);
    uint32_t w[2][4][4];
    raw<F> next;
    uint32_t last = 0; /* the stage before this one, still to be given back */
    int c0 = 0;
    if (!n) return;
    mbar_wait(r.full + 8 * r.stage, r.phase);
    next.load(r.data + r.stage * a.stage_bytes + SC * N * 128 + group * RB * a.w_stride, t);
    for (; c0 + SC <= n; c0 += SC) {
        const uint32_t x = r.data + r.stage * a.stage_bytes;
        const uint32_t q = x + SC * N * 128 + group * RB * a.w_stride;
        const uint64_t tokens = wgmma_desc(__shfl_sync(0xffffffffu, x, 0));
        const uint32_t mine = r.empty + 8 * r.stage;
        r.next(a.stages);
#pragma unroll
        for (int i = 0; i < SC * RB; i++) {
            const int c = i / RB, b = i % RB;
            dequantise(w[i % 2], next);
            wgmma_fence();
#pragma unroll
            for (int s = 0; s < 4; s++)
                wgmma_half<N>(acc[b], w[i % 2][s], tokens + (c * N * 128 + s * 32) / 16);
            wgmma_commit();
            if (i + 1 < SC * RB) {
                next.load(q + (i + 1) % RB * a.w_stride + (i + 1) / RB * BYTES, t);
            } else if (c0 + SC < n) {
                mbar_wait(r.full + 8 * r.stage, r.phase);
                next.load(r.data + r.stage * a.stage_bytes + SC * N * 128 + group * RB * a.w_stride,
                          t);
            }
            wgmma_wait<1>(); /* what went before is done: its registers and its stage are free */
            if (i == 0 && last) give_back(last, t);
        }
        last = mine;
    }
    wgmma_wait<0>();
    if (last) give_back(last, t);
    if (c0 == n) return;
    /* The rest, less than a stage, one chunk after another. */
    const uint32_t x = r.data + r.stage * a.stage_bytes;
    const uint32_t q = x + SC * N * 128 + group * RB * a.w_stride;
#pragma unroll 1
    for (int c = 0; c0 + c < n; c++)
#pragma unroll
        for (int b = 0; b < RB; b++) {
            next.load(q + b * a.w_stride + c * BYTES, t);
            dequantise(w[0], next);
            wgmma_fence();
#pragma unroll
            for (int s = 0; s < 4; s++)
                wgmma_half<N>(acc[b], w[0][s], wgmma_desc(x + c * N * 128 + s * 32));
            wgmma_commit();
            wgmma_wait<0>();
        }
    give_back(r.empty + 8 * r.stage, t);
    r.next(a.stages);
}

/* To about two units in the last place: what comes of it is rounded to half. */
__device__ float activate(float v, bgk_act fn)
{
    if (fn == BGK_SILU) return __fdividef(v, 1.0f + __expf(-v));
    if (fn == BGK_GELU_ERF) return 0.5f * v * (1.0f + erff(v * 0.70710678f));
    return 0.5f * v * (1.0f + tanhf(0.79788456f * v * (1.0f + 0.044715f * v * v)));
}

__device__ float gated(float g, float u, bgk_act fn)
{
    if (fn == BGK_SWIGLU_CLAMP) { /* comparisons that keep NaN */
        g = g > 7.0f ? 7.0f : g;
        u = u > 7.0f ? 7.0f : u < -7.0f ? -7.0f : u;
        return __fdividef(g, 1.0f + __expf(-1.702f * g)) * (u + 1.0f);
    }
    return activate(g, fn) * u;
}

/* To the range of half; NaN stays. */
__device__ float limit(float v)
{
    float r;
    asm("{\n.reg .f32 x;\nmax.NaN.f32 x, %1, 0fC77FE000;\nmin.NaN.f32 %0, x, 0f477FE000;\n}"
        : "=f"(r)
        : "f"(v));
    return r;
}

/* What a thread needs to write its two rows r0, r1 of a tile. */
struct rows {
    float s0, s1, b0, b1;
    int out0, n_rows;
};

/* tile: its number in tables; at: among those of its expert. Grouped: `scale` is where the tile's
 * 64 lie in shared memory. */
template <bool GROUPED>
__device__ rows rows_of(const args &a, int tile, int at, uint32_t scale, int t)
{
    const int r0 = t / 32 * 16 + t % 32 / 4, r1 = r0 + 8;
    const float *bias = a.bias ? a.bias + (int64_t)tile * 64 : nullptr;
    rows r = {0, 0, bias ? bias[r0] : 0.0f, bias ? bias[r1] : 0.0f, at * 64, 64};
    if constexpr (GROUPED) {
        r.s0 = __uint_as_float(shared4(scale + 4 * r0));
        r.s1 = __uint_as_float(shared4(scale + 4 * r1));
        r.n_rows = min(64, a.n_out - r.out0);
    } else {
        r.s0 = a.row_scale[(int64_t)tile * 64 + r0];
        r.s1 = a.row_scale[(int64_t)tile * 64 + r1];
        r.out0 = a.tiles[tile].out0;
        r.n_rows = a.tiles[tile].n_rows;
    }
    return r;
}

/* The same for BGK_HALF_ROWS that begin evenly: of rows r0 and r0 ^ 1, whose lanes are neighbours,
 * one lane takes the first token and one the second. */
template <int N>
__device__ __forceinline__ void write_pairs(const float (&acc)[N / 2], const args &a, const rows &r,
                                            int r0, int first, int end)
{
    const bool odd = r0 % 2;
    const int row = r0 & ~1, token = first + odd;
    __half *out = (__half *)a.out + token * a.out_stride + r.out0 + row;
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float s = i ? r.s1 : r.s0, b = i ? r.b1 : r.b0;
            const float v0 = limit(fmaf(acc[4 * j + 2 * i], s, b));
            const float v1 = limit(fmaf(acc[4 * j + 2 * i + 1], s, b));
            const float got = __shfl_xor_sync(0xffffffffu, odd ? v0 : v1, 4);
            const __half2 pair = odd ? __floats2half2_rn(got, v1) : __floats2half2_rn(v0, got);
            if (token + 8 * j >= end) continue;
            if (row + 8 * i + 1 < r.n_rows)
                *(__half2 *)(out + 8 * i) = pair;
            else if (row + 8 * i < r.n_rows)
                out[8 * i] = __low2half(pair);
        }
        out += 8 * a.out_stride;
    }
}

/* Rows r0 and r0 + 8 of the tile for tokens first, first + 1, and every eighth after these, as
 * halves. */
template <int N>
__device__ __forceinline__ void write_halves(const float (&acc)[N / 2], const args &a,
                                             const rows &r, int r0, int first, int end)
{
    const bool tiles = a.layout == BGK_TILES;
    if (!tiles && (r.out0 | (int)a.out_stride) % 2 == 0) {
        write_pairs<N>(acc, a, r, r0, first, end);
        return;
    }
    /* From eight tokens to the next, in halves. */
    const int64_t step = tiles ? 8 * 64 : 8 * a.out_stride;
    /* The last tile fills up its group of columns, which may end behind its 64 rows. */
    const int fill = tiles && r.out0 + r.n_rows == a.n_out ? (a.n_out + 63) / 64 * 64 : 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int row = r0 + i / 2 * 8, col = r.out0 + row, token = first + i % 2;
        const bool in = row < r.n_rows;
        const float s = i < 2 ? r.s0 : r.s1, b = i < 2 ? r.b0 : r.b1;
        __half *out = (__half *)a.out +
                      (tiles ? tile_at(a.out_stride, token, col) : token * a.out_stride + col);
#pragma unroll
        for (int j = 0; j < N / 8; j++) {
            if (token + 8 * j < end && (in || col < fill))
                out[j * step] = __float2half_rn(in ? limit(fmaf(acc[4 * j + i], s, b)) : 0.0f);
            if (token + 8 * j < end && col + 64 < fill)
                out[j * step + a.out_stride * 64] = __float2half_rn(0.0f);
        }
    }
}

/* acc[4 j ..] is the sums of rows r0, r0, r1, r1 for tokens t0 + 8 j + 2 (lane % 4) + 0, 1, 0, 1.
 */
template <int N>
__device__ __forceinline__ void write(const float (&acc)[N / 2], const args &a, const rows &r,
                                      int tile, int t0, int end, int t)
{
    const int w = t / 32, lane = t % 32, q = lane / 4;
    if (a.n_ff) {
        const int group = tile / 2, piece = 4 * (tile % 2) + w;
        const bool filling = 64 * group + 4 * piece + (q < 4 ? q : 28 + q) >= a.n_ff;
        /* Columns i and 32 + i are neighbours: one thread takes both for the first token, another
         * for the second. From one j to the next the place moves by 8 rows. */
        const int first = t0 + 2 * (lane % 4) + (q < 4 ? 0 : 1);
        __half2 *out = (__half2 *)((__half *)a.out + tile_piece(a.out_stride, first, group, piece) +
                                   2 * (q & 3));
#pragma unroll
        for (int j = 0; j < N / 8; j++) {
            const float *d = acc + 4 * j;
            float v0 = gated(fmaf(d[0], r.s0, r.b0), fmaf(d[2], r.s1, r.b1), a.fn);
            float v1 = gated(fmaf(d[1], r.s0, r.b0), fmaf(d[3], r.s1, r.b1), a.fn);
            if (filling) v0 = v1 = 0.0f;
            const float got = __shfl_xor_sync(0xffffffffu, q < 4 ? v1 : v0, 16);
            const float lo = q < 4 ? v0 : got, hi = q < 4 ? got : v1;
            if (first + 8 * j < end) out[j * 8 * 32] = __floats2half2_rn(limit(lo), limit(hi));
        }
        return;
    }
    const int r0 = 16 * w + q, first = t0 + 2 * (lane % 4);
    if (a.layout != BGK_ROWS) {
        write_halves<N>(acc, a, r, r0, first, end);
        return;
    }
    float *out = (float *)a.out + r.out0 + r0 + first * a.out_stride;
    const bool in0 = r0 < r.n_rows, in1 = r0 + 8 < r.n_rows;
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float *row = out + i * a.out_stride;
            const bool there = first + 8 * j + i < end;
            if (there && in0) row[0] = fmaf(acc[4 * j + i], r.s0, r.b0);
            if (there && in1) row[8] = fmaf(acc[4 * j + 2 + i], r.s1, r.b1);
        }
        out += 8 * a.out_stride;
    }
}

/* stmatrix, transposed: four 8 x 8 matrices of halves; lane l gives the address of column l % 8 of
 * matrix l / 8. */
__device__ inline void store_matrices(uint32_t at, const uint32_t (&v)[4])
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at),
                 "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
                 : "memory");
}

/* The same bits as of limit(a) and limit(b), in half as many instructions. */
__device__ uint32_t limited_pair(float a, float b)
{
    const __half2 most = __float2half2_rn(65504.0f), v = __floats2half2_rn(a, b);
    const __half2 r = __hmin2_nan(__hmax2_nan(v, __hneg2(most)), most);
    return *(const uint32_t *)&r;
}

/* Of a row of `stage` the piece `piece` of BGK_TILES: columns 4 piece + {0..3} and those behind 32,
 * by turns. row: its address, token: its number. */
__device__ inline uint4 tile_piece_of(uint32_t row, int token, int piece)
{
    auto four = [&](int col) {
        return shared8(row + ((col / 8 ^ (token & 7)) << 4) + col % 8 * 2);
    };
    const uint2 lo = four(4 * piece), hi = four(32 + 4 * piece);
    return uint4{__byte_perm(lo.x, hi.x, 0x5410), __byte_perm(lo.x, hi.x, 0x7632),
                 __byte_perm(lo.y, hi.y, 0x5410), __byte_perm(lo.y, hi.y, 0x7632)};
}

/* A whole tile to BGK_HALF_ROWS, or as a whole group of BGK_TILES, by way of `stage`, N rows of 128
 * bytes, whose pieces of 16 lie as those of BGK_TILES: so that a token's 64 values are written as
 * one line. barrier: the warpgroup's. */
template <int N>
__device__ __forceinline__ void write_lines(const float (&acc)[N / 2], const args &a, const rows &r,
                                            uint32_t stage, int barrier, int t0, int end, int t)
{
    const int w = t / 32, lane = t % 32;
#pragma unroll
    for (int j = 0; j < N / 8; j += 2) {
        uint32_t v[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float *d = acc + 4 * (j + i / 2) + 2 * (i % 2);
            const float s = i % 2 ? r.s1 : r.s0, b = i % 2 ? r.b1 : r.b0;
            v[i] = limited_pair(fmaf(d[0], s, b), fmaf(d[1], s, b));
        }
        const int token = 8 * (j + lane / 16) + lane % 8, piece = 2 * w + lane / 8 % 2;
        store_matrices(stage + token * 128 + ((piece ^ (token & 7)) << 4), v);
    }
    asm volatile("bar.sync %0, 128;" ::"r"(barrier) : "memory");
    const int piece = t % 8;
    __half *out = (__half *)a.out;
    if (a.layout == BGK_TILES) {
        out += tile_piece(a.out_stride, t0 + t / 8, r.out0 / 64, piece);
#pragma unroll
        for (int i = 0; i < N / 16; i++) {
            const int token = t / 8 + 16 * i;
            if (t0 + token < end)
                *(uint4 *)(out + 16 * 64 * i) = tile_piece_of(stage + token * 128, token, piece);
        }
    } else {
        out += r.out0 + 8 * piece;
#pragma unroll
        for (int i = 0; i < N / 16; i++) {
            const int token = t / 8 + 16 * i;
            if (t0 + token < end)
                *(uint4 *)(out + (t0 + token) * a.out_stride) =
                    shared16(stage + token * 128 + ((piece ^ (token & 7)) << 4));
        }
    }
    asm volatile("bar.sync %0, 128;" ::"r"(barrier) : "memory"); /* before it is written again */
}

/* Where a lane of the bringing warp reads: a tile of weights, or a chunk of tokens. */
struct source {
    int place, chunk; /* chunk: of the block's share, the first of the stage */
    const char *from; /* of chunk 0 */
    size_t step;      /* from one chunk to the next */
    uint32_t bytes;   /* of a chunk of weights; summed over all tiles: sum */
    uint32_t sum;
    uint32_t x_bytes; /* of a chunk of tokens: of an item without those that are not there */
    cursor at;        /* grouped: the place to be found next, and its item */
    int4 item;
    const float *scale; /* grouped: the tile's */
    int slot;
};

template <int N, int TILES, bool GROUPED>
__device__ void find_source(source &s, const args &a, int first_chunk, const cursor &leap, int lane)
{
    const place p = place_of<N, TILES, GROUPED>(a, s.place, s.at, s.item);
    const int at = tile_of(a, p, lane < TILES ? lane : 0);
    bgk_wtile tile = {};
    if constexpr (GROUPED) {
        const int other = p.other;
        tile.format = a.stack_format[other];
        tile.w = a.stack[other] + (int64_t)(at - other * a.n_first * a.n_tiles) * a.n_chunks *
                                      chunk_bytes(tile.format);
    } else {
        tile = a.tiles[at];
    }
    if (lane < TILES) {
        s.bytes = chunk_bytes(tile.format);
        s.step = s.bytes;
        s.from = (const char *)tile.w + (size_t)first_chunk * s.bytes;
    } else {
        s.bytes = 0;
        s.step = (size_t)p.x_stride * 128;
        s.from = (const char *)p.x + (size_t)(tile.x_chunk0 + first_chunk + lane - TILES) * s.step;
    }
    s.sum = __reduce_add_sync(0xffffffffu, s.bytes);
    s.x_bytes = GROUPED ? (p.end - p.out + 7) / 8 * 1024 : N * 128;
    if constexpr (GROUPED) {
        s.scale = a.row_scale + (int64_t)at * 64;
        move(s.at, leap, a.row_blocks);
        s.item = item_of<GROUPED>(a, s.at.item); /* takes its time: one place ahead */
    }
}

/* The warp that brings everything, lane by lane: TILES tiles of weights and SC chunks of tokens a
 * stage. The first stages' weights go out before the kernel before this one is waited for. */
template <int N, int TILES, int SC, bool GROUPED>
__device__ void bring(const args &a, ring r, int first_chunk, int n, int i0, int step, int n_places,
                      const cursor &at, const cursor &leap, const int4 &item, uint32_t scales,
                      int lane)
{
    const int total = (n_places - i0 + step - 1) / step * ((n + SC - 1) / SC);
    source s = {};
    s.place = i0;
    s.at = at;
    s.item = item;
    auto weights = [&](uint32_t bar, uint32_t to) {
        const int count = min(SC, n - s.chunk);
        const bool scaled = GROUPED && scales && !s.chunk; /* a place's first stage */
        if (lane == 0) mbar_expect(bar, count * (s.sum + s.x_bytes) + (scaled ? TILES * 256 : 0));
        __syncwarp();
        if (scaled && lane < TILES)
            ptx_bulk_copy(scales + (s.slot * TILES + lane) * 256, s.scale, 256, bar);
        if (lane < TILES)
            ptx_bulk_copy(to + SC * N * 128 + lane * a.w_stride, s.from + s.chunk * s.step,
                          count * s.bytes, bar);
    };
    auto tokens = [&](uint32_t bar, uint32_t to) {
        const int c = lane - TILES;
        if (c >= 0 && c < min(SC, n - s.chunk))
            ptx_bulk_copy(to + c * N * 128, s.from + s.chunk * s.step, s.x_bytes, bar);
    };
    auto advance = [&]() {
        s.chunk += SC;
        if (s.chunk < n) return;
        s.chunk = 0;
        s.place += step;
        if (GROUPED) s.slot = s.slot == SCALE_SLOTS - 1 ? 0 : s.slot + 1;
        if (s.place < n_places) find_source<N, TILES, GROUPED>(s, a, first_chunk, leap, lane);
    };
    const int ahead = min(a.stages, total);
    if (total) find_source<N, TILES, GROUPED>(s, a, first_chunk, leap, lane);
    const source begin = s;
    for (int at = 0; at < ahead; at++, advance())
        weights(r.full + 8 * at, r.data + at * a.stage_bytes);
    if (a.start != BGK_BESIDE) ptx_wait_prior();
    if (a.start == BGK_HOLDS) ptx_let_next_start();
    s = begin;
    for (int at = 0; at < ahead; at++, advance())
        tokens(r.full + 8 * at, r.data + at * a.stage_bytes);
    /* The first round of the empty barriers needed no waiting. */
    for (int at = ahead; at < total; at++, advance()) {
        mbar_wait(r.empty + 8 * r.stage, r.phase);
        weights(r.full + 8 * r.stage, r.data + r.stage * a.stage_bytes);
        tokens(r.full + 8 * r.stage, r.data + r.stage * a.stage_bytes);
        r.next(a.stages);
    }
    if (a.start == BGK_BESIDE && !blockIdx.x) ptx_wait_prior(); /* the end is that of all before */
}

/* A warpgroup brings and n of them multiply; it gives them the registers it does not need. */
/* At the start each thread has what `blocks` blocks leave; warps go to four register files by
 * turns. */
__host__ __device__ constexpr int registers(int n, int blocks)
{
    const int most = 16384 / 32 / ((n + 1) * blocks) / 8 * 8;
    return most < 248 ? most : 248;
}

__host__ __device__ constexpr int few(int n, int blocks, bool grouped)
{
    return blocks == 1 ? (grouped ? 56 : 40) : grouped && n == 1 ? 40 : 32;
}

__host__ __device__ constexpr int many(int n, int blocks, bool grouped)
{
    const int most = (registers(n, blocks) * (n + 1) - few(n, blocks, grouped)) / n / 8 * 8;
    return most < 240 ? most : 240;
}

constexpr unsigned ALL = (1u << BGK_FORMATS) - 1;

__host__ __device__ constexpr bool single(unsigned formats)
{
    return (formats & (formats - 1)) == 0;
}

/* acc += what the ring brings of chunks [0, n); the tiles' formats are among `formats`. */
template <unsigned FORMATS, int N, int RB, int SC>
__device__ __forceinline__ void multiply_as(float (&acc)[RB][N / 2], const args &a, ring &r, int n,
                                            int group, int t, const int *format_at)
{
    static_assert(RB == 1 || single(FORMATS), "a warpgroup takes one format at a time");
    if constexpr (FORMATS == 1u << BGK_W4) {
        multiply<BGK_W4, N, RB, SC>(acc, a, r, n, group, t);
    } else if constexpr (FORMATS == 1u << BGK_W5) {
        multiply<BGK_W5, N, RB, SC>(acc, a, r, n, group, t);
    } else if constexpr (FORMATS == 1u << BGK_W6) {
        multiply<BGK_W6, N, RB, SC>(acc, a, r, n, group, t);
    } else if constexpr (FORMATS == 1u << BGK_W8) {
        multiply<BGK_W8, N, RB, SC>(acc, a, r, n, group, t);
    } else if constexpr (FORMATS == 1u << BGK_W16) {
        multiply<BGK_W16, N, RB, SC>(acc, a, r, n, group, t);
    } else {
        const int format = *format_at;
        if (FORMATS & 1u << BGK_W4 && format == BGK_W4)
            multiply<BGK_W4, N, RB, SC>(acc, a, r, n, group, t);
        else if (FORMATS & 1u << BGK_W6 && format == BGK_W6)
            multiply<BGK_W6, N, RB, SC>(acc, a, r, n, group, t);
        else if (FORMATS & 1u << BGK_W5 && format == BGK_W5)
            multiply<BGK_W5, N, RB, SC>(acc, a, r, n, group, t);
        else if (FORMATS & 1u << BGK_W8 && format == BGK_W8)
            multiply<BGK_W8, N, RB, SC>(acc, a, r, n, group, t);
        else if (FORMATS & 1u << BGK_W16 && format == BGK_W16)
            multiply<BGK_W16, N, RB, SC>(acc, a, r, n, group, t);
    }
}

__device__ inline void put_shared_float(uint32_t at, float v)
{
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(v) : "memory");
}

__device__ inline float shared_float(uint32_t at)
{
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(at) : "memory");
    return v;
}

/* Each of a cluster's C blocks has one part of K for N tokens, and gets all parts, summed in their
 * order, of the N / C tokens that are its share: sum. All rings have come to their end: room, the
 * same in all blocks, is where shares are sent. thread: among WGS warpgroups, which all call. */
template <int N, int WGS, int C>
__device__ __forceinline__ void exchange_parts(float (&sum)[N / 2 / C], const float (&acc)[N / 2],
                                               uint32_t room, int part, int thread)
{
    constexpr int OWN = N / 2 / C, QUADS = OWN / 4, STEP = WGS * 128 * 16;
    float own[OWN];
    cluster_arrive(); /* nobody reads stages any more */
    cluster_wait();
#pragma unroll
    for (int to = 0; to < C; to++) {
        if (to == part) {
#pragma unroll
            for (int k = 0; k < OWN; k++)
                own[k] = acc[to * OWN + k];
            continue;
        }
        const uint32_t there = cluster_map(
            room + 16 * thread + (part - (part > to ? 1 : 0)) * QUADS * STEP, (uint32_t)to);
#pragma unroll
        for (int k = 0; k < QUADS; k++)
            cluster_put(there + k * STEP,
                        make_float4(acc[to * OWN + 4 * k], acc[to * OWN + 4 * k + 1],
                                    acc[to * OWN + 4 * k + 2], acc[to * OWN + 4 * k + 3]));
    }
    cluster_arrive_release();
    cluster_wait();
#pragma unroll
    for (int k = 0; k < OWN; k++)
        sum[k] = 0.0f;
#pragma unroll
    for (int from = 0; from < C; from++) {
        const bool mine = from == part;
        const uint32_t at = room + 16 * thread + (from - (from > part ? 1 : 0)) * QUADS * STEP;
#pragma unroll
        for (int k = 0; k < QUADS; k++) {
            const uint4 v = mine ? uint4{} : shared16(at + k * STEP);
            sum[4 * k] += mine ? own[4 * k] : __uint_as_float(v.x);
            sum[4 * k + 1] += mine ? own[4 * k + 1] : __uint_as_float(v.y);
            sum[4 * k + 2] += mine ? own[4 * k + 2] : __uint_as_float(v.z);
            sum[4 * k + 3] += mine ? own[4 * k + 3] : __uint_as_float(v.w);
        }
    }
}

/* PARTS: sides of a block, of WGS warpgroups each, which share the parts of K out among them;
 * SPREAD: a cluster has one place, and each block is a side; 1: the first sums up, as many as
 * a.cluster says; 2, 4: so many blocks, each a part, each sums up a share of the tokens
 * (exchange_parts()). IN_TURN (and SPREAD 1): a side takes several parts, one after another; else
 * it has one. */
template <unsigned F, int N, int WGS, int RB, int SC, int BLOCKS, int PARTS, bool IN_TURN,
          bool GROUPED = false, int SPREAD = 0>
__global__ void __launch_bounds__(WGS *PARTS * 128 + 128, BLOCKS)
    matmul(const __grid_constant__ args a)
{
#if __CUDA_ARCH_FEAT_SM90_ALL
    constexpr int TILES = WGS * RB, GROUPS = WGS * PARTS;
    extern __shared__ uint8_t dynamic[];
    __shared__ uint64_t barriers[PARTS][2][MAX_STAGES];
    const uint32_t data = (ptx_shared(dynamic) + 1023) & ~1023u;
    const int t = threadIdx.x % 128, g = threadIdx.x / 128;
    const int side = g < GROUPS ? g / WGS : min(t / 32, PARTS - 1), group = g % WGS;
    ring r = {ptx_shared(barriers[side][0]), ptx_shared(barriers[side][1]),
              data + side * a.stages * a.stage_bytes, 0, 0};
    const int turns = IN_TURN || SPREAD ? a.splits / (SPREAD ? a.cluster : PARTS) : 1;
    const int part = (SPREAD ? (int)cluster_rank() : side) * turns; /* the first */
    const int begin = part_begin(a, part), n = part_begin(a, part + turns) - begin;
    if (threadIdx.x == 0) {
        for (int i = 0; i < PARTS * MAX_STAGES; i++) {
            mbar_init(ptx_shared(&barriers[i / MAX_STAGES][0][i % MAX_STAGES]), 1);
            mbar_init(ptx_shared(&barriers[i / MAX_STAGES][1][i % MAX_STAGES]), 4 * WGS * ARRIVALS);
        }
        mbar_init_fence();
    }
    __syncthreads();
    if (SPREAD == 1) cluster_arrive(); /* sums may be written once all blocks are there */
    /* Whoever starts after this kernel may count on what the kernel before it has done. */
    if (GROUPED && !a.list_done) ptx_wait_prior();
    if (a.start != BGK_HOLDS) ptx_let_next_start();
    cursor at = {}, leap = {};
    if constexpr (GROUPED) {
        at = cursor_of(a, blockIdx.x);
        leap = cursor_of(a, gridDim.x);
    }
    int4 item = item_of<GROUPED>(a, at.item); /* the first; of all in time for its place */
    const int n_places = a.row_blocks * (GROUPED ? __ldcg(a.n_items) : a.token_blocks);
    const int i0 = SPREAD ? blockIdx.x / a.cluster : blockIdx.x;
    const int step = SPREAD ? n_places : gridDim.x;
    /* Behind the rings: sums of others' parts on their way to the first side, then scales. */
    constexpr int PART = WGS * N * 256; /* bytes */
    const uint32_t behind = data + PARTS * a.stages * a.stage_bytes;
    const uint32_t scales = behind + (PARTS - 1) * turns * PART;
    if (g == GROUPS) {
        ptx_fewer_registers<few(GROUPS, BLOCKS, GROUPED)>();
        if (t / 32 < PARTS)
            bring<N, TILES, SC, GROUPED>(a, r, begin, n, i0, step, n_places, at, leap, item,
                                         part ? 0 : scales, t % 32);
        return;
    }
    ptx_more_registers<many(GROUPS, BLOCKS, GROUPED)>();
    const uint32_t sums = behind + 4 * (group * 128 + t);
    float acc[RB][N / 2];
    int slot = 0;
    for (int i = i0; i < n_places; i += step) {
        const place p = place_of<N, TILES, GROUPED>(a, i, at, item);
        if constexpr (GROUPED) {
            move(at, leap, a.row_blocks);
            item = item_of<GROUPED>(a, at.item);
        }
        const int tile = tile_of(a, p, group * RB);
        const int *format = GROUPED ? &a.stack_format[p.other] : &a.tiles[tile].format;
        rows to;
        if (RB == 1 && !GROUPED)
            to = rows_of<GROUPED>(a, tile, tile - p.first, 0, t); /* early: it takes its time */
        const uint32_t scale = scales + (slot * TILES + group * RB) * 256;
        if (GROUPED) slot = slot == SCALE_SLOTS - 1 ? 0 : slot + 1;
#pragma unroll
        for (int k = 0; k < RB * N / 2; k++)
            acc[k / (N / 2)][k % (N / 2)] = 0.0f;
        if constexpr (SPREAD > 1) {
            static_assert(PARTS == 1 && RB == 1 && !GROUPED, "a tile a warpgroup");
            float sum[N / 2 / SPREAD];
            multiply_as<F, N, RB, SC>(acc, a, r, n, group, t, format);
            exchange_parts<N, WGS, SPREAD>(sum, acc[0], data, part, group * 128 + t);
            if (p.tile + group < a.n_tiles)
                write<N / SPREAD>(sum, a, to, p.tile + group, p.out + part * (N / SPREAD), p.end,
                                  t);
        } else if constexpr (IN_TURN || SPREAD || PARTS > 1) {
            static_assert((PARTS == 1 && !SPREAD) || RB == 1, "one tile a warpgroup");
            static_assert(!SPREAD || (PARTS == 1 && WGS == 1), "a warpgroup a block");
            float sum[RB][N / 2];
#pragma unroll
            for (int k = 0; k < RB * N / 2; k++)
                sum[k / (N / 2)][k % (N / 2)] = 0.0f;
            const uint32_t to_first = sums + (part - turns) * PART; /* where others' first is put */
            const uint32_t there = SPREAD ? cluster_map(to_first, 0) : to_first;
#pragma unroll 1
            for (int turn = 0; turn < turns; turn++) {
                const int chunks = part_begin(a, part + turn + 1) - part_begin(a, part + turn);
                multiply_as<F, N, RB, SC>(acc, a, r, chunks, group, t, format);
                if (turn == 0) { /* the place before is read, or all blocks are there */
                    if constexpr (SPREAD) cluster_wait();
                    if constexpr (PARTS > 1)
                        asm volatile("bar.sync 1, %0;" ::"n"(GROUPS * 128) : "memory");
                }
                if ((SPREAD || PARTS > 1) && part > 0) {
#pragma unroll
                    for (int k = 0; k < N / 2; k++)
                        if constexpr (SPREAD)
                            cluster_put(there + turn * PART + k * WGS * 512, acc[0][k]);
                        else
                            put_shared_float(there + turn * PART + k * WGS * 512, acc[0][k]);
                }
#pragma unroll
                for (int k = 0; k < RB * N / 2; k++) {
                    sum[k / (N / 2)][k % (N / 2)] += acc[k / (N / 2)][k % (N / 2)];
                    acc[k / (N / 2)][k % (N / 2)] = 0.0f;
                }
            }
            if constexpr (SPREAD) {
                cluster_arrive_release();
                if (part > 0) return;
                cluster_wait();
            }
            if constexpr (PARTS > 1) {
                asm volatile("bar.sync 1, %0;" ::"n"(GROUPS * 128) : "memory");
                if (part > 0) continue;
            }
#pragma unroll
            for (int k = 0; k < RB * N / 2; k++)
                acc[k / (N / 2)][k % (N / 2)] = sum[k / (N / 2)][k % (N / 2)];
            if constexpr (SPREAD || PARTS > 1) {
#pragma unroll 1
                for (int other = 0; other < a.splits - turns; other++)
#pragma unroll
                    for (int k = 0; k < N / 2; k++)
                        acc[0][k] += shared_float(sums + other * PART + k * WGS * 512);
            }
        } else {
            multiply_as<F, N, RB, SC>(acc, a, r, n, group, t, format);
        }
#pragma unroll
        for (int b = 0; b < (SPREAD > 1 ? 0 : RB); b++) { /* else it is written */
            const int mine = p.tile + group * RB + b;
            if (mine >= a.n_tiles) break; /* those were read a second time, for nobody */
            if (RB > 1 || GROUPED)
                to = rows_of<GROUPED>(a, p.first + mine, mine, scale + b * 256, t);
            if constexpr (N >= 64 && PARTS == 1) {
                if (a.staged && to.n_rows == 64 &&
                    (GROUPED || to.out0 % (a.layout == BGK_TILES ? 64 : 8) == 0)) {
                    write_lines<N>(acc[b], a, to,
                                   scales + (GROUPED ? SCALE_SLOTS * TILES * 256 : 0) +
                                       group * N * 128,
                                   2 + group, p.out, p.end, t);
                    continue;
                }
            }
            write<N>(acc[b], a, to, mine, p.out, p.end, t);
        }
    }
#endif
}

inline args args_of(const bgk_out *out, const bgk_weights *w, const void *x, int64_t x_stride,
                    int tokens, bgk_act fn)
{
    args a = {};
    a.tiles = w->tiles;
    a.row_scale = w->row_scale;
    a.bias = w->bias;
    a.x = (const __half *)x;
    a.x_stride = x_stride;
    a.out = out->data;
    a.out_stride = out->stride;
    a.n_tiles = w->n_tiles;
    a.n_chunks = w->n_chunks;
    a.splits = w->splits;
    a.tokens = tokens;
    a.n_ff = w->n_ff;
    a.fn = fn;
    a.layout = out->layout;
    a.n_out = w->n_out;
    a.idle = w->idle;
    return a;
}

/* Of stacked experts (bgk_moe_matmul()), without what says which of them. */
inline args stack_args(const bgk_out *out, const bgk_weights *w, const bgk_out *x, bgk_act fn)
{
    args a = args_of(out, w, x->data, x->stride, 0, fn);
    a.tiles = nullptr;
    for (int i = 0; i < 2; i++) {
        a.stack[i] = (const char *)w->stack[i];
        a.stack_format[i] = w->stack_format[i];
    }
    a.n_first = w->n_first;
    return a;
}

inline bool on_hopper()
{
    static const bool yes = [] {
        int device = 0, major = 0;
        return cudaGetDevice(&device) == cudaSuccess &&
               cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) ==
                   cudaSuccess &&
               major == 9;
    }();
    return yes;
}

inline int sm_count()
{
    static const int n = [] {
        int device = 0, count = 0;
        if (cudaGetDevice(&device) != cudaSuccess ||
            cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess)
            return 1;
        return count;
    }();
    return n;
}

template <unsigned F, int N, int WGS, int RB, int SC, int BLOCKS, int PARTS, bool IN_TURN,
          bool GROUPED = false, int SPREAD = 0>
cudaError_t launch(args a, int w_bytes, cudaStream_t stream)
{
    constexpr int TILES = WGS * RB;
    if (SPREAD > 1) a.cluster = SPREAD;
    const int sides = SPREAD ? a.cluster : PARTS;
    /* SPREAD > 1: where stages were */
    const int sums = SPREAD > 1 ? 0 : (a.splits - a.splits / sides) * WGS * N * 256;
    const int least = sums + (GROUPED ? SCALE_SLOTS * TILES * 256 : 0);
    auto kernel = matmul<F, N, WGS, RB, SC, BLOCKS, PARTS, IN_TURN, GROUPED, SPREAD>;
    static const cudaError_t ready =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, MOST_SHARED);
    if (ready != cudaSuccess) return ready;
    a.w_stride = SC * w_bytes;
    a.stage_bytes = (SC * N * 128 + TILES * a.w_stride + 1023) / 1024 * 1024;
    int rest = least;
    auto stages = [&](int shared) {
        return min(MAX_STAGES, (shared - 2048 - rest) / (PARTS * a.stage_bytes));
    };
    a.staged = N >= 64 && PARTS == 1 && !SPREAD && !a.n_ff && (uintptr_t)a.out % 16 == 0 &&
               (a.layout == BGK_TILES || (a.layout == BGK_HALF_ROWS && a.out_stride % 8 == 0));
    if (a.staged) {
        rest += WGS * N * 128;
        a.staged = stages(MOST_SHARED / BLOCKS) >= 2;
    }
    if (!a.staged) rest = least;
    a.stages = stages(MOST_SHARED / BLOCKS);
    if (a.stages < 2) a.stages = stages(MOST_SHARED);
    if (a.stages < 2) return cudaErrorInvalidConfiguration; /* one is read while one is brought */
    a.row_blocks = (a.n_tiles + TILES - 1) / TILES;
    if (!GROUPED) a.token_blocks = (a.tokens + N - 1) / N;
    const int places = a.row_blocks * a.token_blocks, cluster = SPREAD ? a.cluster : 1;
    return launch_clusters_after(kernel, cluster,
                                 dim3(SPREAD ? places * cluster : min(places, sm_count() * BLOCKS)),
                                 dim3(WGS * PARTS * 128 + 128),
                                 (size_t)PARTS * a.stages * a.stage_bytes + rest + 1024, stream, a);
}

/* Blocks of a cluster that have one tile's parts of K between them; 1: of no cluster, since then
 * there would be more blocks than there is room for beside the kernel before. `blocks` fit beside
 * each other. With up to 16 tokens (blocks 3) two do not pay: decode steps of 8 sequences of
 * Llama-3.1-8B 2.50 ms, 2.36 without. [4096, 4096] Q4_K of 32 tokens: 11.2 us with 256 blocks for
 * 264 places, 7.4 with 128; GLM-5's [2624, 6144] Q8_0 9.2 with 164, 13.2 in 41. */
inline int cluster_of(const args &a, int places, int blocks)
{
    const int room = (blocks - 1) * sm_count() * 5 / 4, least = blocks > 2 ? 4 : 2;
    for (int c = a.splits; c >= least; c /= 2)
        if (places * c <= room) return c;
    return 1;
}

/* One tile of rows a block, parts of K side by side, in the block or in a cluster. Every format in
 * one kernel (MIXED), and halves, need more registers or memory: smaller stages, fewer blocks. */
template <unsigned F, int N, int BLOCKS, bool GROUPED = false>
cudaError_t launch_parts(args a, int w_bytes, cudaStream_t stream)
{
    constexpr bool MIXED = !single(F);
    constexpr bool SMALL = GROUPED && MIXED; /* a stage has room for the widest format */
    constexpr int SC = N > 16 || SMALL || (F & 1u << BGK_W16) != 0 ? 2 : 4;
    constexpr int ALONE_SC = N > 32 || SMALL ? 2 : 4;
    constexpr int TWO_SC = N == 32 && F < 1u << BGK_W8 ? 4 : SC;
    constexpr int ALONE_BLOCKS = MIXED ? 2 : BLOCKS, TURN_BLOCKS = MIXED ? 1 : BLOCKS;
    const int places = a.n_tiles * ((a.tokens + N - 1) / N);
    if constexpr (!GROUPED) {
        a.cluster = cluster_of(a, places, ALONE_BLOCKS);
        if (a.cluster > 1)
            return launch<F, N, 1, 1, ALONE_SC, ALONE_BLOCKS, 1, false, false, 1>(a, w_bytes,
                                                                                  stream);
    }
    switch (a.splits) {
    case 1:
        return launch<F, N, 1, 1, ALONE_SC, ALONE_BLOCKS, 1, false, GROUPED>(a, w_bytes, stream);
    case 2:
        return launch<F, N, 1, 1, TWO_SC, 1, 2, false, GROUPED>(a, w_bytes, stream);
    default: /* too few registers for four warpgroups with many tokens, or all formats */
        if constexpr (N <= 32 && F != ALL)
            return launch<F, N, 1, 1, SC, 1, 4, false, GROUPED>(a, w_bytes, stream);
        if constexpr (!GROUPED && F != ALL)
            if (places <= sm_count())
                return launch<F, N, 1, 1, TWO_SC, 1, 2, true, GROUPED>(a, w_bytes, stream);
        return launch<F, N, 1, 1, SC, TURN_BLOCKS, 1, true, GROUPED>(a, w_bytes, stream);
    }
}

/* Parts of K in turn: as good as one part, where tokens keep the tensor cores busy. */
template <unsigned F, int N, int WGS, int BLOCKS, bool GROUPED = false>
cudaError_t launch_in_turn(const args &a, int w_bytes, cudaStream_t stream)
{
    if (a.splits > 1) return launch<F, N, WGS, 1, 2, BLOCKS, 1, true, GROUPED>(a, w_bytes, stream);
    return launch<F, N, WGS, 1, 2, BLOCKS, 1, false, GROUPED>(a, w_bytes, stream);
}

constexpr unsigned W4 = 1u << BGK_W4, W5 = 1u << BGK_W5, W6 = 1u << BGK_W6, W8 = 1u << BGK_W8,
                   W16 = 1u << BGK_W16;

/* A cluster for two tiles of rows, a block for each part of K. */
template <unsigned F, int N>
cudaError_t launch_exchange(const args &a, int w_bytes, cudaStream_t stream)
{
    if (a.splits == 4) return launch<F, N, 2, 1, 2, 1, 1, false, false, 4>(a, w_bytes, stream);
    if (a.splits == 2) return launch<F, N, 2, 1, 2, 1, 1, false, false, 2>(a, w_bytes, stream);
    return launch_in_turn<F, N, 2, 1>(a, w_bytes, stream);
}

/* f(integral_constant) of that of SETS which `formats` is, or of ALL. */
template <unsigned... SETS, typename F> cudaError_t by_formats(unsigned formats, F f)
{
    cudaError_t e = cudaSuccess;
    const bool found =
        ((formats == SETS && (e = f(std::integral_constant<unsigned, SETS>()), true)) || ...);
    return found ? e : f(std::integral_constant<unsigned, ALL>());
}

inline int largest_chunk(unsigned formats)
{
    int bytes = 0;
    for (int f = 0; f < BGK_FORMATS; f++)
        if (formats >> f & 1 && chunk_bytes(f) > bytes) bytes = chunk_bytes(f);
    return bytes;
}

} // namespace

#endif
