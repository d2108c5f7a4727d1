/* kernels/few.cuh - a warp with 16 rows of a weight tile and up to 8 tokens: its weights are on
 * their way to shared memory, or there, long before the kernel before has ended; for few.cu,
 * few_moe.cu and mla_store.cu.
 *
 * mma.sync's sums are bit for bit those of wgmma (matmul.cuh) in the same order of K: tests compare
 * the two. A warp's 16 rows are `slice` 0..3 of a tile: what thread 32 slice + lane of matmul.cuh's
 * warpgroup would have. */
#ifndef BGK_FEW_CUH
#define BGK_FEW_CUH

#include <type_traits>

#include "matmul.cuh"
#include "ptx.cuh"

namespace
{

constexpr int FEW_SHARED = 208 * 1024; /* dynamic; what kernels have besides is less than 16 KB */

/* ---- weights ---- */

/* A slice's part of a chunk in shared memory: chunk_bytes / 4, in the order of the chunk. */
template <bgk_format F> struct staged;

template <> struct staged<BGK_W4> : raw<BGK_W4> {
    __device__ void load(uint32_t at, int lane)
    {
        q = shared16(at + 16 * lane);
        sm = shared16(at + 512 + 16 * (lane / 4));
    }
};

template <> struct staged<BGK_W5> : raw<BGK_W5> {
    __device__ void load(uint32_t at, int lane)
    {
        q = shared16(at + 16 * lane);
        sm = shared16(at + 512 + 16 * (lane / 4));
        fifth = shared4(at + 640 + 4 * lane);
    }
};

template <> struct staged<BGK_W6> : raw<BGK_W6> {
    __device__ void load(uint32_t at, int lane)
    {
        q = shared16(at + 16 * lane);
        sc = shared16(at + 512 + 16 * (lane / 4));
        upper = shared8(at + 640 + 8 * lane);
    }
};

template <> struct staged<BGK_W8> : raw<BGK_W8> {
    __device__ void load(uint32_t at, int lane)
    {
        lo = shared16(at + 16 * lane);
        hi = shared16(at + 512 + 16 * lane);
        sc = shared8(at + 1024 + 8 * (lane / 4));
    }
};

template <> struct staged<BGK_W16> {
    uint4 v[4];
    __device__ void load(uint32_t at, int lane)
    {
#pragma unroll
        for (int s = 0; s < 4; s++)
            v[s] = shared16(at + 512 * s + 16 * lane);
    }
    template <bool ORDERED> __device__ void step(uint32_t (&a)[4], int s) const
    {
        a[0] = v[s].x;
        a[1] = v[s].y;
        a[2] = v[s].z;
        a[3] = v[s].w;
    }
};

/* Where a lane copies from and to, so that a warp brings its slice's part of a chunk. */
template <bgk_format F> struct bringer {
    const char *wide, *rest; /* of the next chunk: 16 bytes of each lane's; of some lanes' */
    bool has_rest;
    int slice;
    __device__ bringer(const char *w, int slice, int lane) : slice(slice)
    {
        constexpr int REST = F == BGK_W8 ? 64 : F == BGK_W16 ? 512 : 128;
        wide = w + 512 * slice + 16 * lane;
        rest = w + (F == BGK_W8 ? 4096 : 2048) + REST * slice + 16 * lane;
        has_rest = 16 * lane < REST;
    }
    __device__ void bring(unsigned char *weights, int lane)
    {
        const uint32_t to =
            (ptx_shared(weights) + 16 * lane) * blockDim.y; /* y: ptx_copy16_once() */
        ptx_copy16_once(to, wide);
        if (F == BGK_W8) ptx_copy16_once(to + 512, wide + 2048);
        if (has_rest) ptx_copy16_once(to + (F == BGK_W8 ? 1024 : 512), rest);
        /* The bits above four: 128 and 256 bytes of a slice, behind all scales. */
        if (F == BGK_W5 && has_rest) ptx_copy16_once(to + 640, rest + 512);
        if (F == BGK_W6 && lane < 16) ptx_copy16_once(to + 640, wide + 2560 - 256 * slice);
        if (F == BGK_W16) {
            ptx_copy16_once(to + 1024, wide + 4096);
            ptx_copy16_once(to + 1536, wide + 6144);
        }
        wide += chunk_bytes(F);
        rest += chunk_bytes(F);
    }
};

/* The most that a part has (part_begin()). */
__host__ __device__ constexpr int few_part_chunks(int n_chunks, int parts)
{
    return (n_chunks / 4 + parts - 1) / parts * 4 + n_chunks % 4;
}

/* ---- tokens ----
 * 2^shift rows of a group of 64 columns are 2^shift x 128 bytes, in the order of BGK_TILES. Rows
 * that are no tokens may be anything: a column of the result depends on its own token alone. */

/* Copies n groups from group0 on to shared memory, by a warp; x_stride: rows of a group. */
__device__ inline void few_tokens(unsigned char *to, const __half *x, int64_t x_stride, int group0,
                                  int n, int shift, int lane)
{
    constexpr int AT_ONCE = 8;
    const int pieces = n << (3 + shift), mask = (8 << shift) - 1;
#pragma unroll 1
    for (int i0 = lane; i0 < pieces; i0 += 32 * AT_ONCE) {
        uint4 v[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const int i = min(i0 + 32 * k, pieces - 1);
            v[k] = __ldcg((const uint4 *)((const char *)x +
                                          (int64_t)(group0 + (i >> (3 + shift))) * x_stride * 128 +
                                          (i & mask) * 16));
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
            if (i0 + 32 * k < pieces) *(uint4 *)(to + 16 * (i0 + 32 * k)) = v[k];
    }
    __syncwarp();
}

/* The address that this lane gives to ldmatrix for pieces 0 to 3 of group 0; 4 to 7: ^ 64, for
 * `tokens` is 128-byte aligned. */
__device__ inline uint32_t few_piece(const unsigned char *tokens, int shift, int lane)
{
    const int row = lane % 8 & ((1 << shift) - 1);
    return ptx_shared(tokens) + row * 128 + ((lane / 8 ^ row) << 4);
}

__device__ inline void few_load(uint32_t (&b)[8], uint32_t at)
{
#pragma unroll
    for (int i = 0; i < 2; i++)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(b[4 * i]), "=r"(b[4 * i + 1]), "=r"(b[4 * i + 2]), "=r"(b[4 * i + 3])
                     : "r"(i ? at ^ 64 : at));
}

/* acc += a chunk's 16 rows times the tokens of its group. An operand is made while the product
 * before it is under way. */
template <typename W> __device__ void few_sum(float (&acc)[4], const W &w, const uint32_t (&b)[8])
{
#pragma unroll
    for (int s = 0; s < 4; s++) {
        uint32_t a[4];
        const uint32_t two[2] = {b[2 * s], b[2 * s + 1]};
        w.template step<true>(a, s);
        ptx_mma16816(acc, a, two);
    }
}

/* ---- a warp's part of a product ----
 * Its ring of chunks is brought and used up by quarters; where it has room for all of them, as a
 * whole, but not FEW_FLOW, where they are still on their way. */
enum few_way { FEW_RING, FEW_FLOW };
constexpr int QUARTERS = 4;

template <bgk_format F, few_way WAY> struct few_stream {
    static constexpr int SLICE = chunk_bytes(F) / 4;

    /* Bytes brought at a time, for n chunks. */
    static __device__ int share_of(int n, int weight_bytes)
    {
        return SLICE *
               (WAY != FEW_FLOW && n * SLICE <= weight_bytes
                    ? max(n, 1)
                    : min((n + QUARTERS - 1) / QUARTERS, weight_bytes / (QUARTERS * SLICE)));
    }

    /* As many of n chunks at w as there is room for. */
    static __device__ void fill(const char *w, int n, unsigned char *weights, int weight_bytes,
                                int slice, int lane)
    {
        const int end = n * SLICE, share = share_of(n, weight_bytes);
        bringer<F> from(w, slice, lane);
        int at = 0;
#pragma unroll 1
        for (int i = 0, stop = 0; i < QUARTERS; i++) {
            stop = min(stop + share, end);
#pragma unroll 2
            for (; at < stop; at += SLICE)
                from.bring(weights + at, lane);
            ptx_copy_commit();
        }
    }

    /* acc += all n chunks times the groups at `tokens`; !real: a rehearsal, acc becomes 0. */
    static __device__ __forceinline__ void sum(float (&acc)[4], const char *w, int n, bool real,
                                               unsigned char *weights, int weight_bytes,
                                               const unsigned char *tokens, int shift, int slice,
                                               int lane)
    {
        const int share = share_of(n, weight_bytes), end = real ? n * SLICE : 3 * SLICE;
        const int step = real ? SLICE : 0, group = real ? 128 << shift : 0;
        const uint32_t base = ptx_shared(weights);
        int brought = min(QUARTERS * share, n * SLICE), ring = 0;
        bringer<F> from(w + 4 * brought, slice, lane);
        uint32_t at = few_piece(tokens, shift, lane);
#pragma unroll 1
        for (int done = 0; done < end;) {
            if (real) ptx_copy_wait<QUARTERS - 1>();
            __syncwarp();
            uint32_t x = base + ring;
            int left = real ? min(share, end - done) / SLICE : 3;
            staged<F> even, odd;
            uint32_t even_b[8], odd_b[8];
            auto load = [&](staged<F> &mine, uint32_t(&b)[8]) {
                mine.load(x, lane);
                few_load(b, at);
                x += step;
                at += group;
            };
            load(even, even_b);
#pragma unroll 1
            for (; left > 1; left -= 2) {
                load(odd, odd_b);
                few_sum(acc, even, even_b);
                if (left > 2) load(even, even_b);
                few_sum(acc, odd, odd_b);
            }
            if (left) few_sum(acc, even, even_b);
            if (!real) break;
            __syncwarp();
            unsigned char *to = weights + ring;
#pragma unroll 2
            for (int stop = min(brought + share, end); brought < stop; brought += SLICE) {
                from.bring(to, lane);
                to += SLICE;
            }
            ptx_copy_commit();
            done += share;
            ring = ring + share == QUARTERS * share ? 0 : ring + share;
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
            acc[i] = real ? acc[i] : 0.0f;
    }
};

/* call(integral_constant) of a tile's format, one of FORMATS. */
template <unsigned FORMATS, typename C> __device__ __forceinline__ void few_as(int format, C call)
{
    auto as = [&](auto f) {
        constexpr bgk_format F = decltype(f)::value;
        if constexpr ((FORMATS >> F & 1) != 0)
            if (single(FORMATS) || format == F) call(f);
    };
    as(std::integral_constant<bgk_format, BGK_W4>());
    as(std::integral_constant<bgk_format, BGK_W6>());
    as(std::integral_constant<bgk_format, BGK_W5>());
    as(std::integral_constant<bgk_format, BGK_W8>());
    as(std::integral_constant<bgk_format, BGK_W16>());
}

/* The first of n chunks at w, as many as the ring has room for, start on their way. */
template <unsigned FORMATS, few_way WAY>
__device__ __forceinline__ void few_fill(int format, const char *w, int n, unsigned char *weights,
                                         int weight_bytes, int slice, int lane)
{
    few_as<FORMATS>(format, [&](auto f) {
        few_stream<decltype(f)::value, WAY>::fill(w, n, weights, weight_bytes, slice, lane);
    });
}

/* acc += n chunks at w of a slice, of which few_fill() brought the first, times the groups at
 * `tokens`. !real: a rehearsal. */
template <unsigned FORMATS, few_way WAY>
__device__ __forceinline__ void
few_product(int format, float (&acc)[4], const char *w, int n, bool real, unsigned char *weights,
            int weight_bytes, const unsigned char *tokens, int shift, int slice, int lane)
{
    few_as<FORMATS>(format, [&](auto f) {
        few_stream<decltype(f)::value, WAY>::sum(acc, w, n, real, weights, weight_bytes, tokens,
                                                 shift, slice, lane);
    });
}

inline bgk_format few_widest(unsigned formats)
{
    int f = 0;
    for (int i = 0; i < BGK_FORMATS; i++)
        if (formats >> i & 1) f = i;
    return (bgk_format)f;
}

/* Bytes for a warp's ring: for n chunks of the widest format, and at least one a quarter, where
 * blocks of `warps` warps, each with tokens of `token_bytes`, then fit `beside` each other, or else
 * fewer of them; 0: there is no room at all. */
inline int few_ring(unsigned formats, int n, int warps, size_t token_bytes, int beside)
{
    const int least = largest_chunk(formats) / 4 * QUARTERS;
    const int quarter = n > QUARTERS ? (n + QUARTERS - 1) / QUARTERS : 1;
    const int wanted = (quarter * least + 127) / 128 * 128;
    for (; beside > 0; beside--) {
        const int64_t block = beside > 1 ? (FEW_SHARED + 8192) / beside : FEW_SHARED;
        const int64_t room = (block / warps - (int64_t)token_bytes) / 128 * 128;
        if (room >= least) return wanted < room ? wanted : (int)room;
    }
    return 0;
}

/* Sums of parts p > 0 to who has part 0, lane by lane; all threads of a block. group: which of the
 * block's slices; true for who has the whole. */
template <int PARTS, int GROUPS>
__device__ __forceinline__ bool few_gather(float (&acc)[4],
                                           float (&sums)[PARTS > 1 ? PARTS - 1 : 1][GROUPS][4][32],
                                           int part, int group, int lane)
{
    if constexpr (PARTS > 1) {
        if (part > 0)
#pragma unroll
            for (int i = 0; i < 4; i++)
                sums[part - 1][group][i][lane] = acc[i];
        __syncthreads();
        if (part > 0) return false;
#pragma unroll
        for (int p = 0; p < PARTS - 1; p++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                acc[i] += sums[p][group][i][lane];
    }
    return true;
}

} // namespace

#endif
