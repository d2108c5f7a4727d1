/* kernels/norm.cuh - how the rows of norms are cut among threads (elementwise.cu, comm.cu): the
 * order of their sums, so the same wherever a row is normed.
 *
 * A row is pieces of 8 columns, as BGK_TILES has them: piece u is columns a = 64 (u / 8) + 4 (u %
 * 8) to a + 3 and a + 32 to a + 35. Of norm_threads() threads, number i has pieces i, i + threads,
 * ..., and adds their squares one after another; then a tree over lanes, and one over warps. */
#ifndef BGK_NORM_CUH
#define BGK_NORM_CUH

#include <cuda_fp16.h>

#include "bgk.h"
#include "tiles.cuh"

namespace
{

/* Columns [col, col + 4) of a row; 0 from `cols` on. VEC: cols is a multiple of 4, and p + col
 * 16-byte aligned. */
template <bool VEC> __device__ float4 load4(const float *p, int col, int cols)
{
    if (VEC) return col < cols ? *(const float4 *)(p + col) : make_float4(0, 0, 0, 0);
    float4 v;
    v.x = col < cols ? p[col] : 0;
    v.y = col + 1 < cols ? p[col + 1] : 0;
    v.z = col + 2 < cols ? p[col + 2] : 0;
    v.w = col + 3 < cols ? p[col + 3] : 0;
    return v;
}

template <bool VEC> __device__ void store4(float *p, int col, int cols, float4 v)
{
    if (VEC) {
        if (col < cols) *(float4 *)(p + col) = v;
        return;
    }
    if (col < cols) p[col] = v.x;
    if (col + 1 < cols) p[col + 1] = v.y;
    if (col + 2 < cols) p[col + 2] = v.z;
    if (col + 3 < cols) p[col + 3] = v.w;
}

__device__ float4 operator+(float4 a, float4 b)
{
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

__device__ float add_squares(float sum, float4 v)
{
    return fmaf(v.w, v.w, fmaf(v.z, v.z, fmaf(v.y, v.y, fmaf(v.x, v.x, sum))));
}

/* v * f * w; 0 from `cols` on, whatever f is. */
__device__ float4 scaled(float4 v, float f, float4 w, int col, int cols)
{
    float4 o;
    o.x = col < cols ? v.x * f * w.x : 0;
    o.y = col + 1 < cols ? v.y * f * w.y : 0;
    o.z = col + 2 < cols ? v.z * f * w.z : 0;
    o.w = col + 3 < cols ? v.w * f * w.w : 0;
    return o;
}

__device__ unsigned tile_pair(float low, float high)
{
    const __half2 h = __halves2half2(tile_half(low), tile_half(high));
    return *(const unsigned *)&h;
}

constexpr int NORM_BLOCK = 512; /* threads at most */
constexpr int NORM_WARPS = NORM_BLOCK / 32;

__device__ int piece_col(int u)
{
    return u / 8 * 64 + u % 8 * 4;
}

__device__ float warp_sum(float v)
{
    for (int d = 16; d > 0; d /= 2)
        v += __shfl_xor_sync(0xffffffffu, v, d);
    return v;
}

/* Of the sums of so many warps, in every lane; both halves of a warp sum them all. */
__device__ float sum_of_warps(const float *part, int warps)
{
    const int warp = threadIdx.x % 32 % NORM_WARPS;
    float v = warp < warps ? part[warp] : 0;
    for (int d = NORM_WARPS / 2; d > 0; d /= 2)
        v += __shfl_xor_sync(0xffffffffu, v, d);
    return v;
}

template <bool TILES, bool VEC>
__device__ void put_piece(const bgk_out &out, int row, int u, int cols, float4 a, float4 b)
{
    const int col = piece_col(u);
    if (TILES) {
        uint4 p;
        p.x = tile_pair(a.x, b.x);
        p.y = tile_pair(a.y, b.y);
        p.z = tile_pair(a.z, b.z);
        p.w = tile_pair(a.w, b.w);
        *(uint4 *)((__half *)out.data + tile_piece(out.stride, row, u / 8, u % 8)) = p;
    } else {
        float *o = (float *)out.data + row * out.stride;
        store4<VEC>(o, col, cols, a);
        store4<VEC>(o, col + 32, cols, b);
    }
}

/* Pieces of a row, and how many of them a thread has: 0 if not in registers. */
inline int pieces_of(int cols, int *each)
{
    const int pieces = (int)(((int64_t)cols + 63) / 64) * 8;
    *each = pieces <= NORM_BLOCK       ? 1
            : pieces <= 2 * NORM_BLOCK ? 2
            : pieces <= 4 * NORM_BLOCK ? 4
                                       : 0;
    return pieces;
}

inline unsigned norm_threads(int pieces, int each)
{
    return each ? (unsigned)((pieces + each - 1) / each + 31) / 32 * 32 : NORM_BLOCK;
}

} // namespace

#endif
