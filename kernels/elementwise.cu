/* kernels/elementwise.cu - what is memory traffic and little else: embedding rows, norms,
 * additions, gated activations, row gathers; poison and its search.
 *
 * Requires: what bgk.h says; rows <= 2^31 - 1. 16-byte loads and stores where pointers, strides and
 * columns allow them, single values where not: the same results.
 *
 * Launch: norm_rows: one block a row, of up to 512 threads, which keep the row in registers up to
 * 16384 columns (beyond that it is read twice); others: blocks of 1024 columns of a row.
 * Graph-capturable; they may start before the kernel before them has ended.
 *
 * Order: a norm's squares are summed in f32, each thread its pieces of 8 columns one after another,
 * then a tree over lanes and warps: set by the number of columns alone.
 *
 * Traffic: norm_rows: 4 B read (with y 8 B read, 4 B written) and 4 or 2 B written a value.
 *
 * Proof: tests/gpu/test_elementwise.c. */
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "bgk.h"
#include "launch.cuh"
#include "norm.cuh"
#include "tiles.cuh"

namespace
{

constexpr int BLOCK = 256;

/* ---- norms ------------------------------------------------------------------------------------
 */

/* Sum over the block; every thread gets it, and all threads call it. part is shared, for this call
 * alone. */
__device__ float block_sum(float v, float *part)
{
    v = warp_sum(v);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
    __syncthreads();
    return sum_of_warps(part, blockDim.x / 32);
}

/* x's piece u of the row, with y's added and stored again if there is y. */
template <bool VEC>
__device__ void take_piece(float *x, const float *y, int u, int cols, float4 *a, float4 *b)
{
    const int col = piece_col(u);
    *a = load4<VEC>(x, col, cols);
    *b = load4<VEC>(x, col + 32, cols);
    if (!y) return;
    *a = *a + load4<VEC>(y, col, cols);
    *b = *b + load4<VEC>(y, col + 32, cols);
    store4<VEC>(x, col, cols, *a);
    store4<VEC>(x, col + 32, cols, *b);
}

/* EACH: pieces of a thread, kept in registers; 0: any number, read again for the second pass. */
template <int EACH, bool TILES, bool VEC>
__global__ void __launch_bounds__(NORM_BLOCK)
    norm_rows(bgk_out out, float *x, int64_t x_cols, const float *y, int64_t y_cols, const float *w,
              float eps, int cols, int pieces)
{
    constexpr bool W_EARLY = EACH == 1 || EACH == 2; /* weights while the kernel before ends */
    constexpr int KEPT = EACH ? EACH : 1;
    const int row = blockIdx.x, step = blockDim.x;
    float4 a[KEPT], b[KEPT], ya[KEPT], yb[KEPT], wa[KEPT], wb[KEPT];
    float *xr = x + row * x_cols;
    const float *yr = y ? y + row * y_cols : nullptr;
    float sum = 0;
    __shared__ float part[NORM_BLOCK / 32];
    ptx_let_next_start();
#pragma unroll
    for (int i = 0; W_EARLY && i < EACH; i++) {
        const int col = piece_col(threadIdx.x + i * step);
        wa[i] = load4<VEC>(w, col, cols);
        wb[i] = load4<VEC>(w, col + 32, cols);
    }
    ptx_wait_prior();
#pragma unroll
    for (int i = 0; i < EACH; i++) { /* all loads before the first store, which could change them */
        const int col = piece_col(threadIdx.x + i * step);
        a[i] = load4<VEC>(xr, col, cols);
        b[i] = load4<VEC>(xr, col + 32, cols);
        if (yr) {
            ya[i] = load4<VEC>(yr, col, cols);
            yb[i] = load4<VEC>(yr, col + 32, cols);
        }
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int col = piece_col(threadIdx.x + i * step);
        if (yr) {
            a[i] = a[i] + ya[i];
            b[i] = b[i] + yb[i];
            store4<VEC>(xr, col, cols, a[i]);
            store4<VEC>(xr, col + 32, cols, b[i]);
        }
        sum = add_squares(add_squares(sum, a[i]), b[i]);
    }
    for (int u = threadIdx.x; EACH == 0 && u < pieces; u += step) {
        take_piece<VEC>(xr, yr, u, cols, &a[0], &b[0]);
        sum = add_squares(add_squares(sum, a[0]), b[0]);
    }
    const float f = 1.0f / sqrtf(block_sum(sum, part) / (float)cols + eps);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int u = threadIdx.x + i * step, col = piece_col(u);
        if (!W_EARLY) {
            wa[i] = load4<VEC>(w, col, cols);
            wb[i] = load4<VEC>(w, col + 32, cols);
        }
        if (u < pieces)
            put_piece<TILES, VEC>(out, row, u, cols, scaled(a[i], f, wa[i], col, cols),
                                  scaled(b[i], f, wb[i], col + 32, cols));
    }
    for (int u = threadIdx.x; EACH == 0 && u < pieces; u += step) {
        const int col = piece_col(u);
        a[0] = scaled(load4<VEC>(xr, col, cols), f, load4<VEC>(w, col, cols), col, cols);
        b[0] = scaled(load4<VEC>(xr, col + 32, cols), f, load4<VEC>(w, col + 32, cols), col + 32,
                      cols);
        put_piece<TILES, VEC>(out, row, u, cols, a[0], b[0]);
    }
}

/* v * f * w, each product rounded by itself: what norm_rows would have stored. */
__device__ float4 stored(float4 v, float f, float4 w)
{
    return make_float4(__fmul_rn(__fmul_rn(v.x, f), w.x), __fmul_rn(__fmul_rn(v.y, f), w.y),
                       __fmul_rn(__fmul_rn(v.z, f), w.z), __fmul_rn(__fmul_rn(v.w, f), w.w));
}

/* x += rms_norm(y) * post; out = rms_norm(x) * w. */
template <int EACH, bool TILES, bool VEC>
__global__ void __launch_bounds__(NORM_BLOCK)
    norm_add_norm_rows(bgk_out out, float *x, int64_t x_cols, const float *y, int64_t y_cols,
                       const float *post, const float *w, float eps, int cols, int pieces)
{
    const int row = blockIdx.x, step = blockDim.x;
    float4 a[EACH], b[EACH], wa[EACH], wb[EACH];
    float *xr = x + row * x_cols;
    const float *yr = y + row * y_cols;
    float sum = 0;
    __shared__ float part[2][NORM_BLOCK / 32];
    ptx_let_next_start();
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int col = piece_col(threadIdx.x + i * step);
        wa[i] = load4<VEC>(post, col, cols);
        wb[i] = load4<VEC>(post, col + 32, cols);
    }
    ptx_wait_prior();
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int col = piece_col(threadIdx.x + i * step);
        a[i] = load4<VEC>(yr, col, cols);
        b[i] = load4<VEC>(yr, col + 32, cols);
        sum = add_squares(add_squares(sum, a[i]), b[i]);
    }
    const float fy = 1.0f / sqrtf(block_sum(sum, part[0]) / (float)cols + eps);
    sum = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int col = piece_col(threadIdx.x + i * step);
        a[i] = load4<VEC>(xr, col, cols) + stored(a[i], fy, wa[i]);
        b[i] = load4<VEC>(xr, col + 32, cols) + stored(b[i], fy, wb[i]);
        store4<VEC>(xr, col, cols, a[i]);
        store4<VEC>(xr, col + 32, cols, b[i]);
        sum = add_squares(add_squares(sum, a[i]), b[i]);
    }
    const float fx = 1.0f / sqrtf(block_sum(sum, part[1]) / (float)cols + eps);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int u = threadIdx.x + i * step, col = piece_col(u);
        if (u < pieces)
            put_piece<TILES, VEC>(out, row, u, cols,
                                  scaled(a[i], fx, load4<VEC>(w, col, cols), col, cols),
                                  scaled(b[i], fx, load4<VEC>(w, col + 32, cols), col + 32, cols));
    }
}

/* ---- rows, 1024 columns a block: thread i has the four from 1024 blockIdx.y + 4 i on
 * ------------- */

__device__ int my_col()
{
    return (int)(blockIdx.y * (4 * BLOCK) + 4 * threadIdx.x);
}

template <bool VEC> __device__ float4 load4(const __half *p, int col, int cols)
{
    float4 v = make_float4(0, 0, 0, 0);
    if (VEC) {
        if (col >= cols) return v;
        const uint2 bits = *(const uint2 *)(p + col);
        const float2 lo = __half22float2(*(const __half2 *)&bits.x);
        const float2 hi = __half22float2(*(const __half2 *)&bits.y);
        return make_float4(lo.x, lo.y, hi.x, hi.y);
    }
    if (col < cols) v.x = __half2float(p[col]);
    if (col + 1 < cols) v.y = __half2float(p[col + 1]);
    if (col + 2 < cols) v.z = __half2float(p[col + 2]);
    if (col + 3 < cols) v.w = __half2float(p[col + 3]);
    return v;
}

template <typename T, bool VEC>
__global__ void embed_rows(float *out, int64_t out_cols, const T *table, const int32_t *ids,
                           float scale, int cols)
{
    const int col = my_col();
    ptx_let_next_start();
    ptx_wait_prior();
    float4 v = load4<VEC>(table + (int64_t)ids[blockIdx.x] * cols, col, cols);
    v.x *= scale;
    v.y *= scale;
    v.z *= scale;
    v.w *= scale;
    store4<VEC>(out + blockIdx.x * out_cols, col, cols, v);
}

template <bool VEC>
__global__ void add_rows(float *x, int64_t x_cols, const float *y, int64_t y_cols, int cols)
{
    const int col = my_col();
    float *row = x + blockIdx.x * x_cols;
    ptx_let_next_start();
    ptx_wait_prior();
    store4<VEC>(row, col, cols,
                load4<VEC>(row, col, cols) + load4<VEC>(y + blockIdx.x * y_cols, col, cols));
}

__device__ float activate(float v, bgk_act fn)
{
    if (fn == BGK_SILU) return v / (1.0f + expf(-v));
    if (fn == BGK_GELU_ERF) return 0.5f * v * (1.0f + erff(v * 0.70710678f));
    return 0.5f * v * (1.0f + tanhf(0.79788456f * v * (1.0f + 0.044715f * v * v)));
}

template <bool VEC>
__global__ void glu_rows(float *out, int64_t out_cols, const float *x, int64_t x_cols, bgk_act fn,
                         int cols)
{
    const int col = my_col();
    const float *row = x + blockIdx.x * x_cols;
    ptx_let_next_start();
    ptx_wait_prior();
    const float4 g = load4<VEC>(row, col, cols), u = load4<VEC>(row + cols, col, cols);
    store4<VEC>(out + blockIdx.x * out_cols, col, cols,
                make_float4(activate(g.x, fn) * u.x, activate(g.y, fn) * u.y,
                            activate(g.z, fn) * u.z, activate(g.w, fn) * u.w));
}

template <bool VEC>
__global__ void gather_rows(float *out, int64_t out_cols, const float *x, int64_t x_cols,
                            const int32_t *index, int cols)
{
    const int col = my_col();
    ptx_let_next_start();
    ptx_wait_prior();
    store4<VEC>(out + blockIdx.x * out_cols, col, cols,
                load4<VEC>(x + index[blockIdx.x] * x_cols, col, cols));
}

__global__ void softcap_all(float *x, int64_t n, float cap)
{
    const int64_t i = (int64_t)blockIdx.x * BLOCK + threadIdx.x;
    ptx_let_next_start();
    ptx_wait_prior();
    if (i < n) x[i] = cap * tanhf(x[i] / cap);
}

/* ---- poison and its search: not for speed -------------------------------------------------------
 */

__device__ int64_t place(const bgk_out &x, int64_t row, int64_t col)
{
    return x.layout == BGK_TILES ? tile_at(x.stride, (int)row, (int)col) : row * x.stride + col;
}

__global__ void poison_all(bgk_out x, int64_t n, int64_t cols)
{
    const int64_t i = (int64_t)blockIdx.x * BLOCK + threadIdx.x;
    if (i >= n) return;
    const int64_t at = place(x, i / cols, i % cols);
    if (x.layout == BGK_ROWS)
        ((float *)x.data)[at] = __int_as_float(0x7fffffff);
    else
        ((__half *)x.data)[at] = __ushort_as_half(0x7fff);
}

__global__ void find_bad_all(unsigned long long *bad, bgk_out x, int64_t n, int64_t cols)
{
    const int64_t i = (int64_t)blockIdx.x * BLOCK + threadIdx.x;
    if (i >= n) return;
    const int64_t at = place(x, i / cols, i % cols);
    const float v = x.layout == BGK_ROWS ? ((const float *)x.data)[at]
                                         : __half2float(((const __half *)x.data)[at]);
    if (!isfinite(v)) atomicMin(bad, (unsigned long long)i);
}

__global__ void pause_for(int64_t ns)
{
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while ((int64_t)(now - start) < ns);
}

/* ---- what a launch takes ------------------------------------------------------------------------
 */

bool bad_shape(int rows, int cols)
{
    return rows < 0 || cols < 1;
}

unsigned blocks_for(int64_t n)
{
    return (unsigned)((n + BLOCK - 1) / BLOCK);
}

bool fits16(const void *p, int64_t stride)
{
    return (uintptr_t)p % 16 == 0 && stride % 4 == 0;
}

dim3 row_grid(int rows, int cols)
{
    return dim3((unsigned)rows, (unsigned)((cols + 4 * BLOCK - 1) / (4 * BLOCK)));
}

bool bad_out(const bgk_out *o)
{
    if (o->layout != BGK_TILES) return false;
    return o->stride % BGK_TILE_ROWS || (uintptr_t)o->data % 1024;
}

/* Columns with those that fill up the last group. */
int64_t all_cols(const bgk_out *o, int64_t cols)
{
    return o->layout == BGK_TILES ? (cols + BGK_TILE_COLS - 1) / BGK_TILE_COLS * BGK_TILE_COLS
                                  : cols;
}

using norm_kernel = void (*)(bgk_out, float *, int64_t, const float *, int64_t, const float *,
                             float, int, int);

using norm_add_norm_kernel = void (*)(bgk_out, float *, int64_t, const float *, int64_t,
                                      const float *, const float *, float, int, int);

template <int EACH> norm_add_norm_kernel norm_add_norm_for(bool tiles, bool vec)
{
    if (tiles)
        return vec ? norm_add_norm_rows<EACH, true, true> : norm_add_norm_rows<EACH, true, false>;
    return vec ? norm_add_norm_rows<EACH, false, true> : norm_add_norm_rows<EACH, false, false>;
}

template <int EACH> norm_kernel norm_for(bool tiles, bool vec)
{
    if (tiles) return vec ? norm_rows<EACH, true, true> : norm_rows<EACH, true, false>;
    return vec ? norm_rows<EACH, false, true> : norm_rows<EACH, false, false>;
}

} // namespace

cudaError_t bgk_embed(float *out, int64_t out_cols, const void *table, bgk_type type,
                      const int32_t *ids, float scale, int rows, int cols, cudaStream_t stream)
{
    if (bad_shape(rows, cols) || type == BGK_BF16) return cudaErrorInvalidValue;
    if (!rows) return cudaSuccess;
    const bool vec = fits16(out, out_cols) && fits16(table, cols);
    if (type == BGK_F32)
        return launch_after(vec ? embed_rows<float, true> : embed_rows<float, false>,
                            row_grid(rows, cols), BLOCK, 0, stream, out, out_cols,
                            (const float *)table, ids, scale, cols);
    return launch_after(vec ? embed_rows<__half, true> : embed_rows<__half, false>,
                        row_grid(rows, cols), BLOCK, 0, stream, out, out_cols,
                        (const __half *)table, ids, scale, cols);
}

cudaError_t bgk_rms_norm(const bgk_out *out, float *x, int64_t x_cols, const float *y,
                         int64_t y_cols, const float *w, float eps, int rows, int cols,
                         cudaStream_t stream)
{
    if (bad_shape(rows, cols) || bad_out(out) || out->layout == BGK_HALF_ROWS ||
        (out->data == x && (y || out->layout != BGK_ROWS || out->stride != x_cols)))
        return cudaErrorInvalidValue;
    if (!rows) return cudaSuccess;
    const bool tiles = out->layout == BGK_TILES;
    const bool vec = cols % 4 == 0 && fits16(x, x_cols) && fits16(w, 0) &&
                     (!y || fits16(y, y_cols)) && (tiles || fits16(out->data, out->stride));
    int each;
    const int pieces = pieces_of(cols, &each);
    const norm_kernel kernel = each == 1   ? norm_for<1>(tiles, vec)
                               : each == 2 ? norm_for<2>(tiles, vec)
                               : each == 4 ? norm_for<4>(tiles, vec)
                                           : norm_for<0>(tiles, vec);
    return launch_after(kernel, (unsigned)rows, norm_threads(pieces, each), 0, stream, *out, x,
                        x_cols, y, y_cols, w, eps, cols, pieces);
}

cudaError_t bgk_norm_add_norm(const bgk_out *out, float *x, int64_t x_cols, float *y,
                              int64_t y_cols, const float *post, const float *w, float eps,
                              int rows, int cols, cudaStream_t stream)
{
    if (bad_shape(rows, cols) || bad_out(out) || out->layout == BGK_HALF_ROWS || out->data == x ||
        out->data == y)
        return cudaErrorInvalidValue;
    if (!rows) return cudaSuccess;
    int each;
    const int pieces = pieces_of(cols, &each);
    if (!each) { /* too wide to be kept */
        const bgk_out in_place = {y, BGK_ROWS, y_cols};
        const cudaError_t e =
            bgk_rms_norm(&in_place, y, y_cols, nullptr, 0, post, eps, rows, cols, stream);
        return e != cudaSuccess
                   ? e
                   : bgk_rms_norm(out, x, x_cols, y, y_cols, w, eps, rows, cols, stream);
    }
    const bool tiles = out->layout == BGK_TILES;
    const bool vec = cols % 4 == 0 && fits16(x, x_cols) && fits16(y, y_cols) && fits16(w, 0) &&
                     fits16(post, 0) && (tiles || fits16(out->data, out->stride));
    const norm_add_norm_kernel kernel = each == 1   ? norm_add_norm_for<1>(tiles, vec)
                                        : each == 2 ? norm_add_norm_for<2>(tiles, vec)
                                                    : norm_add_norm_for<4>(tiles, vec);
    return launch_after(kernel, (unsigned)rows, norm_threads(pieces, each), 0, stream, *out, x,
                        x_cols, y, y_cols, post, w, eps, cols, pieces);
}

cudaError_t bgk_add(float *x, int64_t x_cols, const float *y, int64_t y_cols, int rows, int cols,
                    cudaStream_t stream)
{
    if (bad_shape(rows, cols)) return cudaErrorInvalidValue;
    if (!rows) return cudaSuccess;
    const bool vec = cols % 4 == 0 && fits16(x, x_cols) && fits16(y, y_cols);
    return launch_after(vec ? add_rows<true> : add_rows<false>, row_grid(rows, cols), BLOCK, 0,
                        stream, x, x_cols, y, y_cols, cols);
}

cudaError_t bgk_glu(float *out, int64_t out_cols, const float *x, int64_t x_cols, bgk_act fn,
                    int rows, int cols, cudaStream_t stream)
{
    if (bad_shape(rows, cols)) return cudaErrorInvalidValue;
    if (!rows) return cudaSuccess;
    const bool vec = cols % 4 == 0 && fits16(x, x_cols) && fits16(out, out_cols);
    return launch_after(vec ? glu_rows<true> : glu_rows<false>, row_grid(rows, cols), BLOCK, 0,
                        stream, out, out_cols, x, x_cols, fn, cols);
}

cudaError_t bgk_gather(float *out, int64_t out_cols, const float *x, int64_t x_cols,
                       const int32_t *index, int rows, int cols, cudaStream_t stream)
{
    if (bad_shape(rows, cols)) return cudaErrorInvalidValue;
    if (!rows) return cudaSuccess;
    const bool vec = cols % 4 == 0 && fits16(x, x_cols) && fits16(out, out_cols);
    return launch_after(vec ? gather_rows<true> : gather_rows<false>, row_grid(rows, cols), BLOCK,
                        0, stream, out, out_cols, x, x_cols, index, cols);
}

cudaError_t bgk_softcap(float *x, int64_t n, float cap, cudaStream_t stream)
{
    if (n < 0 || !(cap > 0)) return cudaErrorInvalidValue;
    if (!n) return cudaSuccess;
    return launch_after(softcap_all, blocks_for(n), BLOCK, 0, stream, x, n, cap);
}

cudaError_t bgk_poison(const bgk_out *x, int64_t rows, int64_t cols, cudaStream_t stream)
{
    if (rows < 0 || cols < 0 || bad_out(x)) return cudaErrorInvalidValue;
    const int64_t all = all_cols(x, cols), n = rows * all;
    if (!n) return cudaSuccess;
    poison_all<<<blocks_for(n), BLOCK, 0, stream>>>(*x, n, all);
    return cudaGetLastError();
}

cudaError_t bgk_find_bad(unsigned long long *bad, const bgk_out *x, int64_t rows, int64_t cols,
                         cudaStream_t stream)
{
    if (rows < 0 || cols < 1 || bad_out(x)) return cudaErrorInvalidValue;
    if (!rows) return cudaSuccess;
    const int64_t all = all_cols(x, cols), n = rows * all;
    find_bad_all<<<blocks_for(n), BLOCK, 0, stream>>>(bad, *x, n, all);
    return cudaGetLastError();
}

cudaError_t bgk_pause(int64_t ns, cudaStream_t stream)
{
    if (ns < 0) return cudaErrorInvalidValue;
    pause_for<<<1, 1, 0, stream>>>(ns);
    return cudaGetLastError();
}
