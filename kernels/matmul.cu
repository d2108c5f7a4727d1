/* kernels/matmul.cu - out = x W^T for quantised weights on Hopper's tensor cores: one kernel for
 * every number of tokens, from one to a whole prefill step.
 *
 * What: weights are the A operand of wgmma, made in registers from their quants (bgk.h says how a
 * tile lies in memory): mask, and one half2 FMA with scale and min; tokens are N, from shared
 * memory. A warpgroup owns 64 rows (or twice that) and N tokens; WGS of them share the tokens of a
 * block. One more brings both operands by bulk copies through a ring of stages.
 *
 * Requires: bgk.h; sm_90a (elsewhere the launcher says cudaErrorNotSupported).
 *
 * Launch: a block is a warpgroup that brings and one to four that multiply; it goes over its tiles
 * by itself; up to 227 KB of dynamic shared memory; programmatic: weights are on their way before
 * the kernel before has ended. Graph-capturable.
 *
 * Order: K in `splits` parts, each one chain in steps of 16, then the parts in order: warpgroups of
 * a block take a part each, or (many tokens) one takes them in turn. The number of tokens, N and
 * WGS change no bit.
 *
 * Traffic: weights once per token tile, tokens once per row tile.
 *
 * Proof: tests/gpu/test_matmul.c. */
#include <cuda_fp16.h>

#include "bgk.h"
#include "launch.cuh"
#include "tiles.cuh"
#include "wgmma.cuh"

#pragma nv_diag_suppress 177 /* for other architectures the kernel is empty */

namespace
{

constexpr int MAX_STAGES = 8, GROUP = 8;
constexpr int MOST_SHARED = 226 * 1024; /* dynamic; barriers need some more */

struct args {
    const bgk_wtile *tiles;
    const float *row_scale, *bias;
    const __half *x;
    int64_t x_stride;
    void *out;
    int64_t out_stride;
    int n_tiles, n_chunks, splits, tokens;
    int n_ff; /* 0: rows of floats */
    bgk_act fn;
    int stages, stage_bytes, w_stride; /* w_stride: of one warpgroup's weights in a stage */
    int row_blocks, token_blocks;
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
    int row, token;
};

__device__ place place_of(const args &a, int i)
{
    const int per = GROUP * a.row_blocks, group = i / per, at = i % per;
    const int width = min(GROUP, a.token_blocks - group * GROUP);
    return {at / width, group * GROUP + at % width};
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

/* What a thread reads of a chunk of 64 columns of 64 rows, and the A operands it makes of it. at:
 * the chunk in shared memory, t: the thread's number in its warpgroup. */
template <bgk_format F> struct raw;

template <> struct raw<BGK_W4> {
    uint4 q, sm;
    __device__ void load(uint32_t at, int t)
    {
        q = shared16(at + 16 * t);
        sm = shared16(at + 2048 + 16 * (t / 32 * 8 + t % 32 / 4));
    }
    __device__ void dequantise(uint32_t (&a)[4][4]) const
    {
        const uint32_t word[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
        for (int s = 0; s < 4; s++) {
            a[s][0] = hfma2(word[s] & 0x000f000f, sm.x, sm.y);
            a[s][1] = hfma2(word[s] & 0x00f000f0, sm.z, sm.w);
            a[s][2] = hfma2(word[s] >> 8 & 0x000f000f, sm.x, sm.y);
            a[s][3] = hfma2(word[s] >> 8 & 0x00f000f0, sm.z, sm.w);
        }
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
    __device__ void dequantise(uint32_t (&a)[4][4]) const
    {
        const uint32_t word[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
        for (int s = 0; s < 4; s++) {
            const uint32_t w = word[s], up = word[s] >> 8;
            a[s][0] = hfma2((w & 0x000f000f) | (fifth >> s & 0x00100010), sm.x, sm.y);
            a[s][1] = hfma2((w & 0x00f000f0) | (fifth >> s & 0x01000100), sm.z, sm.w);
            a[s][2] = hfma2((up & 0x000f000f) | (fifth << (4 - s) & 0x00100010), sm.x, sm.y);
            a[s][3] = hfma2((up & 0x00f000f0) | (fifth >> (4 + s) & 0x01000100), sm.z, sm.w);
        }
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
    __device__ void dequantise(uint32_t (&a)[4][4]) const
    {
        const uint32_t word[4] = {q.x, q.y, q.z, q.w};
        /* -32 as a half subnormal: r0's quants count 2^-24, r1's 2^-20 */
        const uint32_t low = 0x80208020, high = 0x82008200;
        const uint32_t s0[2] = {sc.x, sc.y}, s1[2] = {sc.z, sc.w};
        const uint32_t m0[2] = {hmul2(sc.x, low), hmul2(sc.y, low)};
        const uint32_t m1[2] = {hmul2(sc.z, high), hmul2(sc.w, high)};
#pragma unroll
        for (int s = 0; s < 4; s++) {
            const uint32_t u = s < 2 ? upper.x : upper.y, w = word[s], up = word[s] >> 8;
            const int e = s % 2 * 2, j = s / 2;
            a[s][0] = hfma2((w & 0x000f000f) | (u >> e & 0x00300030), s0[j], m0[j]);
            a[s][1] = hfma2((w & 0x00f000f0) | (u >> e & 0x03000300), s1[j], m1[j]);
            a[s][2] = hfma2((up & 0x000f000f) | (u << (4 - e) & 0x00300030), s0[j], m0[j]);
            a[s][3] = hfma2((up & 0x00f000f0) | (u >> (4 + e) & 0x03000300), s1[j], m1[j]);
        }
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
    __device__ void dequantise(uint32_t (&a)[4][4]) const
    {
        const uint32_t word[8] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};
        const uint32_t offset = 0x80808080; /* -128 x 2^-24 twice */
        const uint32_t m0 = hmul2(sc.x, offset), m1 = hmul2(sc.y, offset);
#pragma unroll
        for (int s = 0; s < 4; s++) {
            a[s][0] = hfma2(word[2 * s] & 0x00ff00ff, sc.x, m0);
            a[s][1] = hfma2(word[2 * s] >> 8 & 0x00ff00ff, sc.y, m1);
            a[s][2] = hfma2(word[2 * s + 1] & 0x00ff00ff, sc.x, m0);
            a[s][3] = hfma2(word[2 * s + 1] >> 8 & 0x00ff00ff, sc.y, m1);
        }
    }
};

template <> struct raw<BGK_W16> {
    uint32_t at, thread; /* nothing to make: read where it is used */
    __device__ void load(uint32_t from, int t)
    {
        at = from;
        thread = t;
    }
    __device__ void dequantise(uint32_t (&a)[4][4]) const
    {
#pragma unroll
        for (int s = 0; s < 4; s++) {
            const uint4 v = shared16(at + 2048 * s + 16 * thread);
            a[s][0] = v.x;
            a[s][1] = v.y;
            a[s][2] = v.z;
            a[s][3] = v.w;
        }
    }
};

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
            next.dequantise(w[i % 2]);
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
            next.dequantise(w[0]);
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

__device__ rows rows_of(const args &a, int tile, int t)
{
    const int r0 = t / 32 * 16 + t % 32 / 4, r1 = r0 + 8;
    const float *scale = a.row_scale + tile * 64, *bias = a.bias ? a.bias + tile * 64 : nullptr;
    return {scale[r0],          scale[r1],           bias ? bias[r0] : 0.0f, bias ? bias[r1] : 0.0f,
            a.tiles[tile].out0, a.tiles[tile].n_rows};
}

/* acc[4 j ..] is the sums of rows r0, r0, r1, r1 for tokens t0 + 8 j + 2 (lane % 4) + 0, 1, 0, 1.
 */
template <int N>
__device__ __forceinline__ void write(const float (&acc)[N / 2], const args &a, const rows &r,
                                      int tile, int t0, int t)
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
            float v0 = activate(fmaf(d[0], r.s0, r.b0), a.fn) * fmaf(d[2], r.s1, r.b1);
            float v1 = activate(fmaf(d[1], r.s0, r.b0), a.fn) * fmaf(d[3], r.s1, r.b1);
            if (filling) v0 = v1 = 0.0f;
            const float got = __shfl_xor_sync(0xffffffffu, q < 4 ? v1 : v0, 16);
            const float lo = q < 4 ? v0 : got, hi = q < 4 ? got : v1;
            if (first + 8 * j < a.tokens) out[j * 8 * 32] = __floats2half2_rn(limit(lo), limit(hi));
        }
        return;
    }
    const int r0 = 16 * w + q, first = t0 + 2 * (lane % 4);
    float *out = (float *)a.out + r.out0 + r0 + first * a.out_stride;
    const bool in0 = r0 < r.n_rows, in1 = r0 + 8 < r.n_rows;
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float *row = out + i * a.out_stride;
            const bool there = first + 8 * j + i < a.tokens;
            if (there && in0) row[0] = fmaf(acc[4 * j + i], r.s0, r.b0);
            if (there && in1) row[8] = fmaf(acc[4 * j + 2 + i], r.s1, r.b1);
        }
        out += 8 * a.out_stride;
    }
}

/* Where a lane of the bringing warp reads: a tile of weights, or a chunk of tokens. */
struct source {
    int place, chunk; /* chunk: of the block's share, the first of the stage */
    const char *from; /* of chunk 0 */
    size_t step;      /* from one chunk to the next */
    uint32_t bytes;   /* of a chunk of weights; summed over all tiles: sum */
    uint32_t sum;
};

template <int N, int TILES>
__device__ void find_source(source &s, const args &a, int first_chunk, int lane)
{
    const place p = place_of(a, s.place);
    if (lane < TILES) {
        const bgk_wtile tile = a.tiles[min(p.row * TILES + lane, a.n_tiles - 1)];
        s.bytes = chunk_bytes(tile.format);
        s.step = s.bytes;
        s.from = (const char *)tile.w + (size_t)first_chunk * s.bytes;
    } else {
        s.bytes = 0;
        s.step = (size_t)a.x_stride * 128;
        s.from = (const char *)a.x + (size_t)(first_chunk + lane - TILES) * s.step +
                 (size_t)p.token * N * 128;
    }
    s.sum = __reduce_add_sync(0xffffffffu, s.bytes);
}

/* The warp that brings everything, lane by lane: TILES tiles of weights and SC chunks of tokens a
 * stage. The first stages' weights go out before the kernel before this one is waited for. */
template <int N, int TILES, int SC>
__device__ void bring(const args &a, ring r, int first_chunk, int n, int i0, int step, int n_places,
                      int lane)
{
    const int total = (n_places - i0 + step - 1) / step * ((n + SC - 1) / SC);
    source s = {i0, 0, nullptr, 0, 0, 0};
    auto weights = [&](uint32_t bar, uint32_t to) {
        const int count = min(SC, n - s.chunk);
        if (lane == 0) mbar_expect(bar, count * (s.sum + N * 128));
        __syncwarp();
        if (lane < TILES)
            ptx_bulk_copy(to + SC * N * 128 + lane * a.w_stride, s.from + s.chunk * s.step,
                          count * s.bytes, bar);
    };
    auto tokens = [&](uint32_t bar, uint32_t to) {
        const int c = lane - TILES;
        if (c >= 0 && c < min(SC, n - s.chunk))
            ptx_bulk_copy(to + c * N * 128, s.from + s.chunk * s.step, N * 128, bar);
    };
    auto advance = [&]() {
        s.chunk += SC;
        if (s.chunk < n) return;
        s.chunk = 0;
        s.place += step;
        if (s.place < n_places) find_source<N, TILES>(s, a, first_chunk, lane);
    };
    const int ahead = min(a.stages, total);
    if (total) find_source<N, TILES>(s, a, first_chunk, lane);
    const source begin = s;
    for (int at = 0; at < ahead; at++, advance())
        weights(r.full + 8 * at, r.data + at * a.stage_bytes);
    ptx_wait_prior();
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
}

/* A warpgroup brings and n of them multiply; it gives them the registers it does not need. */
constexpr int FEW = 32;
/* At the start each thread has what `blocks` blocks leave; warps go to four register files by
 * turns. */
__host__ __device__ constexpr int registers(int n, int blocks)
{
    const int most = 16384 / 32 / ((n + 1) * blocks) / 8 * 8;
    return most < 248 ? most : 248;
}

__host__ __device__ constexpr int many(int n, int blocks)
{
    const int most = (registers(n, blocks) * (n + 1) - FEW) / n / 8 * 8;
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
                                            int group, int t, int tile)
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
        const int format = a.tiles[min(tile, a.n_tiles - 1)].format;
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

/* PARTS: parts of K at a time, by WGS warpgroups each. IN_TURN: one warpgroup takes all parts. */
template <unsigned F, int N, int WGS, int RB, int SC, int BLOCKS, int PARTS, bool IN_TURN>
__global__ void __launch_bounds__(WGS *PARTS * 128 + 128, BLOCKS)
    matmul(const __grid_constant__ args a)
{
#if __CUDA_ARCH_FEAT_SM90_ALL
    constexpr int TILES = WGS * RB, GROUPS = WGS * PARTS;
    extern __shared__ uint8_t dynamic[];
    __shared__ uint64_t barriers[PARTS][2][MAX_STAGES];
    const uint32_t data = (ptx_shared(dynamic) + 1023) & ~1023u;
    const int t = threadIdx.x % 128, g = threadIdx.x / 128;
    const int part = g < GROUPS ? g / WGS : min(t / 32, PARTS - 1), group = g % WGS;
    ring r = {ptx_shared(barriers[part][0]), ptx_shared(barriers[part][1]),
              data + part * a.stages * a.stage_bytes, 0, 0};
    const int n_places = a.row_blocks * a.token_blocks;
    const int begin = PARTS > 1 ? part_begin(a, part) : 0;
    const int n = (PARTS > 1 ? part_begin(a, part + 1) : a.n_chunks) - begin;
    if (threadIdx.x == 0) {
        for (int i = 0; i < PARTS * MAX_STAGES; i++) {
            mbar_init(ptx_shared(&barriers[i / MAX_STAGES][0][i % MAX_STAGES]), 1);
            mbar_init(ptx_shared(&barriers[i / MAX_STAGES][1][i % MAX_STAGES]), 4 * WGS * ARRIVALS);
        }
        mbar_init_fence();
    }
    __syncthreads();
    ptx_let_next_start();
    if (g == GROUPS) {
        ptx_fewer_registers<FEW>();
        if (t / 32 < PARTS)
            bring<N, TILES, SC>(a, r, begin, n, blockIdx.x, gridDim.x, n_places, t % 32);
        return;
    }
    ptx_more_registers<many(GROUPS, BLOCKS)>();
    /* Sums of parts 1.. on their way to the first, behind the rings. */
    const uint32_t sums = data + PARTS * a.stages * a.stage_bytes + 4 * (group * 128 + t);
    float acc[RB][N / 2];
    for (int i = blockIdx.x; i < n_places; i += gridDim.x) {
        const place p = place_of(a, i);
        const int tile = p.row * TILES + group * RB;
        rows to;
        if (RB == 1) to = rows_of(a, min(tile, a.n_tiles - 1), t); /* early: it takes its time */
#pragma unroll
        for (int k = 0; k < RB * N / 2; k++)
            acc[k / (N / 2)][k % (N / 2)] = 0.0f;
        if constexpr (IN_TURN) {
            float sum[RB][N / 2];
#pragma unroll
            for (int k = 0; k < RB * N / 2; k++)
                sum[k / (N / 2)][k % (N / 2)] = 0.0f;
#pragma unroll 1
            for (int turn = 0; turn < a.splits; turn++) {
                multiply_as<F, N, RB, SC>(acc, a, r, part_begin(a, turn + 1) - part_begin(a, turn),
                                          group, t, tile);
#pragma unroll
                for (int k = 0; k < RB * N / 2; k++) {
                    sum[k / (N / 2)][k % (N / 2)] += acc[k / (N / 2)][k % (N / 2)];
                    acc[k / (N / 2)][k % (N / 2)] = 0.0f;
                }
            }
#pragma unroll
            for (int k = 0; k < RB * N / 2; k++)
                acc[k / (N / 2)][k % (N / 2)] = sum[k / (N / 2)][k % (N / 2)];
        } else {
            multiply_as<F, N, RB, SC>(acc, a, r, n, group, t, tile);
        }
        if constexpr (PARTS > 1) {
            static_assert(PARTS == 1 || RB == 1, "one tile a warpgroup");
            asm volatile("bar.sync 1, %0;" ::"n"(GROUPS * 128) : "memory"); /* read until here */
            if (part > 0)
#pragma unroll
                for (int k = 0; k < N / 2; k++)
                    asm volatile("st.shared.f32 [%0], %1;" ::"r"(sums + ((part - 1) * (N / 2) + k) *
                                                                            WGS * 512),
                                 "f"(acc[0][k])
                                 : "memory");
            asm volatile("bar.sync 1, %0;" ::"n"(GROUPS * 128) : "memory");
            if (part > 0) continue;
#pragma unroll 1
            for (int other = 0; other < PARTS - 1; other++)
#pragma unroll
                for (int k = 0; k < N / 2; k++) {
                    float v;
                    asm volatile("ld.shared.f32 %0, [%1];"
                                 : "=f"(v)
                                 : "r"(sums + (other * (N / 2) + k) * WGS * 512)
                                 : "memory");
                    acc[0][k] += v;
                }
        }
#pragma unroll
        for (int b = 0; b < RB; b++) {
            if (tile + b >= a.n_tiles) break; /* those were read a second time, for nobody */
            if (RB > 1) to = rows_of(a, tile + b, t);
            write<N>(acc[b], a, to, tile + b, p.token * N, t);
        }
    }
#endif
}

bool on_hopper()
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

int sm_count()
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

template <unsigned F, int N, int WGS, int RB, int SC, int BLOCKS, int PARTS, bool IN_TURN>
cudaError_t launch(args a, int w_bytes, cudaStream_t stream)
{
    constexpr int TILES = WGS * RB, SUMS = (PARTS - 1) * WGS * N * 256;
    auto kernel = matmul<F, N, WGS, RB, SC, BLOCKS, PARTS, IN_TURN>;
    static const cudaError_t ready =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, MOST_SHARED);
    if (ready != cudaSuccess) return ready;
    a.w_stride = SC * w_bytes;
    a.stage_bytes = (SC * N * 128 + TILES * a.w_stride + 1023) / 1024 * 1024;
    a.stages = min(MAX_STAGES, (MOST_SHARED / BLOCKS - 2048 - SUMS) / (PARTS * a.stage_bytes));
    if (a.stages < 2)
        a.stages = min(MAX_STAGES, (MOST_SHARED - 2048 - SUMS) / (PARTS * a.stage_bytes));
    if (a.stages < 2) return cudaErrorInvalidConfiguration; /* one is read while one is brought */
    a.row_blocks = (a.n_tiles + TILES - 1) / TILES;
    a.token_blocks = (a.tokens + N - 1) / N;
    return launch_after(kernel, dim3(min(a.row_blocks * a.token_blocks, sm_count() * BLOCKS)),
                        dim3(WGS * PARTS * 128 + 128),
                        (size_t)PARTS * a.stages * a.stage_bytes + SUMS + 1024, stream, a);
}

/* One tile of rows a block, parts of K side by side. Every format in one kernel (MIXED), and
 * halves, need more registers or memory: smaller stages, fewer blocks. */
template <unsigned F, int N, int BLOCKS>
cudaError_t launch_parts(const args &a, int w_bytes, cudaStream_t stream)
{
    constexpr bool MIXED = !single(F);
    constexpr int SC = N > 16 || (F & 1u << BGK_W16) != 0 ? 2 : 4, ALONE_SC = N > 32 ? 2 : 4;
    constexpr int TWO_SC = N == 32 && F < 1u << BGK_W8 ? 4 : SC;
    constexpr int ALONE_BLOCKS = MIXED ? 2 : BLOCKS, TURN_BLOCKS = MIXED ? 1 : BLOCKS;
    switch (a.splits) {
    case 1:
        return launch<F, N, 1, 1, ALONE_SC, ALONE_BLOCKS, 1, false>(a, w_bytes, stream);
    case 2:
        return launch<F, N, 1, 1, TWO_SC, 1, 2, false>(a, w_bytes, stream);
    default:
        if constexpr (N > 32 || F == ALL) /* too few registers for four warpgroups */
            return launch<F, N, 1, 1, SC, TURN_BLOCKS, 1, true>(a, w_bytes, stream);
        else
            return launch<F, N, 1, 1, SC, 1, 4, false>(a, w_bytes, stream);
    }
}

/* Parts of K in turn: as good as one part, where tokens keep the tensor cores busy. */
template <unsigned F, int N, int WGS, int BLOCKS>
cudaError_t launch_in_turn(const args &a, int w_bytes, cudaStream_t stream)
{
    if (a.splits > 1) return launch<F, N, WGS, 1, 2, BLOCKS, 1, true>(a, w_bytes, stream);
    return launch<F, N, WGS, 1, 2, BLOCKS, 1, false>(a, w_bytes, stream);
}

template <unsigned F>
cudaError_t launch_shape(const args &a, int w_bytes, bgk_shape shape, cudaStream_t stream)
{
    constexpr bool MIXED = !single(F);
    constexpr int TWO = MIXED ? 1 : 2, B2 = MIXED ? 1 : 2;
    switch (shape) {
    case BGK_8X2:
        if (a.splits == 1) return launch<F, 8, 2, 1, 4, B2, 1, false>(a, w_bytes, stream);
        return launch_parts<F, 8, 3>(a, w_bytes, stream);
    case BGK_8X1:
        return launch_parts<F, 8, 3>(a, w_bytes, stream);
    case BGK_16X2:
        if (a.splits == 1) return launch<F, 16, 2, 1, 4, B2, 1, false>(a, w_bytes, stream);
        return launch_parts<F, 16, 3>(a, w_bytes, stream);
    case BGK_16X1:
        return launch_parts<F, 16, 3>(a, w_bytes, stream);
    case BGK_32X2:
        if (a.splits == 1) return launch<F, 32, 2, 1, 2, B2, 1, false>(a, w_bytes, stream);
        return launch_parts<F, 32, 2>(a, w_bytes, stream);
    case BGK_32X1:
        return launch_parts<F, 32, 2>(a, w_bytes, stream);
    case BGK_64X1:
        return launch_parts<F, 64, 2>(a, w_bytes, stream);
    case BGK_64X2:
        if (a.splits == 1)
            return launch < F, 64, 2, 1, 2, F == 1u << BGK_W16 ? 1 : B2, 1,
                   false > (a, w_bytes, stream);
        return launch_in_turn < F, 64, 1, MIXED ? 1 : 2 > (a, w_bytes, stream);
    case BGK_64X4:
        if (a.splits == 1) return launch<F, 64, 2, TWO, 2, 1, 1, false>(a, w_bytes, stream);
        return launch_in_turn<F, 64, 2, 1>(a, w_bytes, stream);
    case BGK_128X4:
        if (a.splits == 1) return launch<F, 128, 2, TWO, 2, 1, 1, false>(a, w_bytes, stream);
        return launch_in_turn<F, 128, 2, 1>(a, w_bytes, stream);
    case BGK_128X2:
        return launch_in_turn<F, 128, 2, 1>(a, w_bytes, stream);
    default:
        return cudaErrorInvalidValue;
    }
}

} // namespace

cudaError_t bgk_matmul_as(const bgk_out *out, const bgk_weights *w, const void *x, int64_t x_stride,
                          int tokens, bgk_act fn, bgk_shape shape, cudaStream_t stream)
{
    if (tokens < 0 || w->n_tiles < 1 || w->n_chunks < 1 || !w->row_scale || !w->tiles ||
        (w->splits != 1 && w->splits != 2 && w->splits != 4) || x_stride % BGK_TILE_ROWS ||
        tokens > x_stride || (uintptr_t)x % 128 || !w->formats || w->formats >> BGK_FORMATS ||
        out->layout != (w->n_ff ? BGK_TILES : BGK_ROWS) ||
        (w->n_ff && (w->n_tiles % 2 || w->n_ff > w->n_tiles * 32)))
        return cudaErrorInvalidValue;
    if (!on_hopper()) return cudaErrorNotSupported;
    if (!tokens) return cudaSuccess;
    int w_bytes = 0;
    for (int f = 0; f < BGK_FORMATS; f++)
        if (w->formats >> f & 1 && chunk_bytes(f) > w_bytes) w_bytes = chunk_bytes(f);
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
    switch (w->formats) {
    case 1u << BGK_W4:
        return launch_shape<1u << BGK_W4>(a, w_bytes, shape, stream);
    case 1u << BGK_W5:
        return launch_shape<1u << BGK_W5>(a, w_bytes, shape, stream);
    case 1u << BGK_W6:
        return launch_shape<1u << BGK_W6>(a, w_bytes, shape, stream);
    case 1u << BGK_W8:
        return launch_shape<1u << BGK_W8>(a, w_bytes, shape, stream);
    case 1u << BGK_W16:
        return launch_shape<1u << BGK_W16>(a, w_bytes, shape, stream);
    case 1u << BGK_W4 | 1u << BGK_W6: /* Q4_K with Q6_K */
        return launch_shape<1u << BGK_W4 | 1u << BGK_W6>(a, w_bytes, shape, stream);
    default:
        return launch_shape<ALL>(a, w_bytes, shape, stream);
    }
}

static int rounds(int blocks, int at_a_time)
{
    return (blocks + at_a_time - 1) / at_a_time;
}

/* The fewest tokens that hold all; beyond 64 what takes less: blocks of 64 tokens and rows, two a
 * multiprocessor, or of 128 and 128, which take about 1.4 times as long (measured: README.md). */
static bgk_shape choose(const bgk_weights *w, int tokens)
{
    const bool few = w->n_tiles < 2 * sm_count();
    const int blocks = w->n_tiles * ((tokens + 63) / 64);
    if (tokens <= 8) return few ? BGK_8X1 : BGK_8X2;
    if (tokens <= 16) return few ? BGK_16X1 : BGK_16X2;
    if (tokens <= 32) return few ? BGK_32X1 : BGK_32X2;
    if (w->splits == 2 && blocks <= sm_count()) return BGK_64X1; /* its parts side by side */
    if (tokens <= 64) return !few ? BGK_64X2 : w->splits == 4 ? BGK_32X1 : BGK_64X1;
    const int small = rounds(blocks, 2 * sm_count());
    const int large = rounds((w->n_tiles + 1) / 2 * ((tokens + 127) / 128), sm_count());
    if (14 * large <= 10 * small) return BGK_128X2;
    return w->splits > 1 ? BGK_64X2 : BGK_64X1;
}

bgk_shape bgk_matmul_shape(const bgk_weights *w, int tokens)
{
    const int picked = w->shape[bgk_token_class(tokens)];
    return picked ? (bgk_shape)(picked - 1) : choose(w, tokens);
}

cudaError_t bgk_matmul(const bgk_out *out, const bgk_weights *w, const void *x, int64_t x_stride,
                       int tokens, bgk_act fn, cudaStream_t stream)
{
    return bgk_matmul_as(out, w, x, x_stride, tokens, fn, bgk_matmul_shape(w, tokens), stream);
}
