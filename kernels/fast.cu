/* kernels/fast.cu - around library products of halves (--fast-math): activations from tiles to
 * rows, gated activations from rows of halves to tiles.
 *
 *   requires  what bgk.h says
 *   launch    a thread 16 columns of a row's group of 64: 8 of each half of it; blocks of 64 rows.
 *             Graph-capturable; they may start before the kernel before them has ended
 *   order     every value by itself
 *   traffic   tiles_to_rows: 2 B read and 2 B written a value; glu_halves: 4 B read, 2 B written
 *   proof     tests/gpu/test_fast.c */
#include "bgk.h"
#include "launch.cuh"
#include "tiles.cuh"

namespace
{

constexpr int ROWS = 64, BLOCK = 4 * ROWS;

/* Two words of a tile's piece pair are (c0, c32), (c1, c33): low halves are one 8 columns' part,
 * high halves the other's. */
__device__ uint32_t low_halves(uint32_t a, uint32_t b)
{
    return __byte_perm(a, b, 0x5410);
}

__device__ uint32_t high_halves(uint32_t a, uint32_t b)
{
    return __byte_perm(a, b, 0x7632);
}

__global__ void __launch_bounds__(BLOCK)
    tiles_to_rows(__half *out, int64_t stride, const __half *x, int64_t x_stride, int rows)
{
    ptx_let_next_start();
    ptx_wait_prior();
    const int g = blockIdx.x, row = blockIdx.y * ROWS + threadIdx.x / 4, q = threadIdx.x % 4;
    if (row >= rows) return;
    const uint4 a = *(const uint4 *)(x + tile_piece(x_stride, row, g, 2 * q));
    const uint4 b = *(const uint4 *)(x + tile_piece(x_stride, row, g, 2 * q + 1));
    uint4 *to = (uint4 *)(out + row * stride + 64 * g + 8 * q);
    to[0] = make_uint4(low_halves(a.x, a.y), low_halves(a.z, a.w), low_halves(b.x, b.y),
                       low_halves(b.z, b.w));
    to[4] = make_uint4(high_halves(a.x, a.y), high_halves(a.z, a.w), high_halves(b.x, b.y),
                       high_halves(b.z, b.w));
}

template <int FN> __device__ float activation(float g)
{
    if (FN == BGK_SILU) return g / (1.0f + expf(-g));
    if (FN == BGK_GELU_TANH) {
        const float u = 0.7978845608028654f * (g + 0.044715f * g * g * g);
        return 0.5f * g * (1.0f + tanhf(u));
    }
    return 0.5f * g * (1.0f + erff(g * 0.7071067811865475f));
}

/* A product that overflowed a half is the largest one, as in tiles. */
__device__ float finite(__half v)
{
    const float f = __half2float(v);
    return isnan(f) ? f : fminf(fmaxf(f, -65504.0f), 65504.0f);
}

/* Columns [col, col + 8) of a row, those below cols. VEC: all or none, and 16-byte aligned. */
template <bool VEC> __device__ void load8(__half (&v)[8], const __half *p, int col, int cols)
{
    if constexpr (VEC) {
        uint4 w = make_uint4(0, 0, 0, 0);
        if (col < cols) w = *(const uint4 *)(p + col);
        const __half2 *h = (const __half2 *)&w;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            v[2 * i] = __low2half(h[i]);
            v[2 * i + 1] = __high2half(h[i]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++)
            v[i] = col + i < cols ? p[col + i] : __half(0);
    }
}

template <int FN, bool VEC>
__global__ void __launch_bounds__(BLOCK)
    glu_halves(__half *out, int64_t out_stride, const __half *x, int64_t x_stride,
               const float *bias, int rows, int cols)
{
    ptx_let_next_start();
    ptx_wait_prior();
    const int g = blockIdx.x, row = blockIdx.y * ROWS + threadIdx.x / 4, q = threadIdx.x % 4;
    if (row >= rows) return;
    const __half *gate = x + row * x_stride, *up = gate + cols;
    __half r[2][8];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int col = 64 * g + 32 * half + 8 * q;
        __half a[8], b[8];
        load8<VEC>(a, gate, col, cols);
        load8<VEC>(b, up, col, cols);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const bool in = col + i < cols;
            float u = finite(a[i]), v = finite(b[i]);
            if (bias && in) {
                u += bias[col + i];
                v += bias[cols + col + i];
            }
            r[half][i] = in ? tile_half(activation<FN>(u) * v) : __half(0);
        }
    }
#pragma unroll
    for (int p = 0; p < 2; p++) {
        uint4 w;
        __half2 *h = (__half2 *)&w;
#pragma unroll
        for (int i = 0; i < 4; i++)
            h[i] = __halves2half2(r[0][4 * p + i], r[1][4 * p + i]);
        *(uint4 *)(out + tile_piece(out_stride, row, g, 2 * q + p)) = w;
    }
}

dim3 grid_of(int rows, int groups)
{
    return dim3((unsigned)groups, (unsigned)((rows + ROWS - 1) / ROWS));
}

bool tiles_fit(const bgk_out *t, int rows)
{
    return t->layout == BGK_TILES && t->stride >= rows && t->stride % BGK_TILE_ROWS == 0 &&
           (uintptr_t)t->data % 1024 == 0;
}

template <int FN>
cudaError_t glu(const bgk_out *out, const __half *x, int64_t x_stride, const float *bias, int rows,
                int cols, cudaStream_t stream)
{
    const bool vec = cols % 8 == 0 && x_stride % 8 == 0 && (uintptr_t)x % 16 == 0;
    return launch_after(vec ? glu_halves<FN, true> : glu_halves<FN, false>,
                        grid_of(rows, (cols + 63) / 64), dim3(BLOCK), 0, stream,
                        (__half *)out->data, out->stride, x, x_stride, bias, rows, cols);
}

} // namespace

cudaError_t bgk_tiles_to_rows(void *out, int64_t stride, const bgk_out *x, int rows, int cols,
                              cudaStream_t stream)
{
    if (rows < 0 || rows > 65535 * ROWS || cols < 0 || cols % 64 || stride < cols || stride % 8 ||
        (uintptr_t)out % 16 || !tiles_fit(x, rows))
        return cudaErrorInvalidValue;
    if (!rows || !cols) return cudaSuccess;
    return launch_after(tiles_to_rows, grid_of(rows, cols / 64), dim3(BLOCK), 0, stream,
                        (__half *)out, stride, (const __half *)x->data, x->stride, rows);
}

cudaError_t bgk_glu_halves(const bgk_out *out, const void *x, int64_t x_stride, const float *bias,
                           bgk_act fn, int rows, int cols, cudaStream_t stream)
{
    if (rows < 0 || rows > 65535 * ROWS || cols < 0 || cols > INT32_MAX / 2 - 64 ||
        x_stride < 2 * (int64_t)cols || !tiles_fit(out, rows))
        return cudaErrorInvalidValue;
    if (!rows || !cols) return cudaSuccess;
    const __half *h = (const __half *)x;
    switch (fn) {
    case BGK_SILU:
        return glu<BGK_SILU>(out, h, x_stride, bias, rows, cols, stream);
    case BGK_GELU_TANH:
        return glu<BGK_GELU_TANH>(out, h, x_stride, bias, rows, cols, stream);
    case BGK_GELU_ERF:
        return glu<BGK_GELU_ERF>(out, h, x_stride, bias, rows, cols, stream);
    }
    return cudaErrorInvalidValue;
}
