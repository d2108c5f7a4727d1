/* kernels/tiles.cuh - places in BGK_TILES activations (bgk.h). */
#ifndef BGK_TILES_CUH
#define BGK_TILES_CUH

#include <stdint.h>

#include <cuda_fp16.h>

/* Index of the half for (row, col). */
__device__ inline int64_t tile_at(int64_t stride, int row, int col)
{
    const int h = col % 64 / 32, i = col % 32;
    return ((int64_t)(col / 64) * stride + row) * 64 + ((i / 4) ^ (row & 7)) * 8 + i % 4 * 2 + h;
}

/* The 16-byte piece (index in halves, a multiple of 8) that holds columns 64 g + 4 p + {0..3} and
 * 64 g
 * + 32 + 4 p + {0..3} of a row, as c0, c32, c1, c33, c2, c34, c3, c35; p in 0..7. */
__device__ inline int64_t tile_piece(int64_t stride, int row, int g, int p)
{
    return ((int64_t)g * stride + row) * 64 + (p ^ (row & 7)) * 8;
}

/* Rounded to half, saturated, NaN kept. */
__device__ inline __half tile_half(float v)
{
    return __float2half_rn(isnan(v) ? v : fminf(fmaxf(v, -65504.0f), 65504.0f));
}

#endif
