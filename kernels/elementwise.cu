/* kernels/elementwise.cu - what is memory traffic and little else: embedding rows, norms,
 * additions, gated activations, row gathers; poison and its search.
 *
 *   requires  what bgk.h says; rows <= 2^31 - 1
 *   launch    one block a row, 256 threads; graph-capturable
 *   order     a norm's squares are summed in f32, thread i taking columns i, i + 256, ...; then a
 * tree over threads: set by the number of columns alone proof     tests/unit/model/test_golden on a
 * GPU: whole models, not yet each kernel by itself */
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "bgk.h"

namespace
{

constexpr int BLOCK = 256;

__device__ float load(const float *p)
{
    return *p;
}

__device__ float load(const __half *p)
{
    return __half2float(*p);
}

/* Sum over the block; every thread gets it. All threads of the block call it. */
__device__ float block_sum(float v)
{
    __shared__ float part[BLOCK / 32];
    __shared__ float total;
    for (int d = 16; d > 0; d /= 2)
        v += __shfl_xor_sync(0xffffffffu, v, d);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
    __syncthreads();
    if (threadIdx.x == 0) {
        float s = 0;
        for (int i = 0; i < BLOCK / 32; i++)
            s += part[i];
        total = s;
    }
    __syncthreads();
    return total;
}

template <typename T>
__global__ void embed_rows(float *out, int64_t out_cols, const T *table, const int32_t *ids,
                           float scale, int cols)
{
    const T *row = table + (int64_t)ids[blockIdx.x] * cols;
    for (int i = threadIdx.x; i < cols; i += BLOCK)
        out[blockIdx.x * out_cols + i] = scale * load(row + i);
}

__global__ void norm_rows(float *out, int64_t out_cols, float *x, int64_t x_cols, const float *y,
                          int64_t y_cols, const float *w, float eps, int cols)
{
    float *row = x + blockIdx.x * x_cols, sum = 0;
    for (int i = threadIdx.x; i < cols; i += BLOCK) {
        float v = row[i];
        if (y) {
            v += y[blockIdx.x * y_cols + i];
            row[i] = v;
        }
        sum = fmaf(v, v, sum);
    }
    const float f = 1.0f / sqrtf(block_sum(sum) / (float)cols + eps);
    for (int i = threadIdx.x; i < cols; i += BLOCK)
        out[blockIdx.x * out_cols + i] = row[i] * f * w[i];
}

__global__ void add_rows(float *x, int64_t x_cols, const float *y, int64_t y_cols, int cols)
{
    for (int i = threadIdx.x; i < cols; i += BLOCK)
        x[blockIdx.x * x_cols + i] += y[blockIdx.x * y_cols + i];
}

__device__ float activate(float v, bgk_act fn)
{
    if (fn == BGK_SILU) return v / (1.0f + expf(-v));
    if (fn == BGK_GELU_ERF) return 0.5f * v * (1.0f + erff(v * 0.70710678f));
    return 0.5f * v * (1.0f + tanhf(0.79788456f * v * (1.0f + 0.044715f * v * v)));
}

__global__ void glu_rows(float *out, int64_t out_cols, const float *x, int64_t x_cols, bgk_act fn,
                         int cols)
{
    const float *row = x + blockIdx.x * x_cols;
    for (int i = threadIdx.x; i < cols; i += BLOCK)
        out[blockIdx.x * out_cols + i] = activate(row[i], fn) * row[cols + i];
}

__global__ void gather_rows(float *out, int64_t out_cols, const float *x, int64_t x_cols,
                            const int32_t *index, int cols)
{
    const float *row = x + index[blockIdx.x] * x_cols;
    for (int i = threadIdx.x; i < cols; i += BLOCK)
        out[blockIdx.x * out_cols + i] = row[i];
}

__global__ void softcap_all(float *x, int64_t n, float cap)
{
    const int64_t i = (int64_t)blockIdx.x * BLOCK + threadIdx.x;
    if (i < n) x[i] = cap * tanhf(x[i] / cap);
}

__global__ void poison_all(float *x, int64_t n)
{
    const int64_t i = (int64_t)blockIdx.x * BLOCK + threadIdx.x;
    if (i < n) x[i] = __int_as_float(0x7fffffff);
}

__global__ void find_bad_all(unsigned long long *bad, const float *x, int64_t x_cols, int64_t rows,
                             int64_t cols)
{
    const int64_t i = (int64_t)blockIdx.x * BLOCK + threadIdx.x;
    if (i < rows * cols && !isfinite(x[i / cols * x_cols + i % cols]))
        atomicMin(bad, (unsigned long long)i);
}

bool bad_shape(int rows, int cols)
{
    return rows < 0 || cols < 1;
}

unsigned blocks_for(int64_t n)
{
    return (unsigned)((n + BLOCK - 1) / BLOCK);
}

} // namespace

cudaError_t bgk_embed(float *out, int64_t out_cols, const void *table, bgk_type type,
                      const int32_t *ids, float scale, int rows, int cols, cudaStream_t stream)
{
    if (bad_shape(rows, cols) || type == BGK_BF16) return cudaErrorInvalidValue;
    if (!rows) return cudaSuccess;
    if (type == BGK_F32)
        embed_rows<<<rows, BLOCK, 0, stream>>>(out, out_cols, (const float *)table, ids, scale,
                                               cols);
    else
        embed_rows<<<rows, BLOCK, 0, stream>>>(out, out_cols, (const __half *)table, ids, scale,
                                               cols);
    return cudaGetLastError();
}

cudaError_t bgk_rms_norm(float *out, int64_t out_cols, float *x, int64_t x_cols, const float *y,
                         int64_t y_cols, const float *w, float eps, int rows, int cols,
                         cudaStream_t stream)
{
    if (bad_shape(rows, cols) || (y && out == x)) return cudaErrorInvalidValue;
    if (!rows) return cudaSuccess;
    norm_rows<<<rows, BLOCK, 0, stream>>>(out, out_cols, x, x_cols, y, y_cols, w, eps, cols);
    return cudaGetLastError();
}

cudaError_t bgk_add(float *x, int64_t x_cols, const float *y, int64_t y_cols, int rows, int cols,
                    cudaStream_t stream)
{
    if (bad_shape(rows, cols)) return cudaErrorInvalidValue;
    if (!rows) return cudaSuccess;
    add_rows<<<rows, BLOCK, 0, stream>>>(x, x_cols, y, y_cols, cols);
    return cudaGetLastError();
}

cudaError_t bgk_glu(float *out, int64_t out_cols, const float *x, int64_t x_cols, bgk_act fn,
                    int rows, int cols, cudaStream_t stream)
{
    if (bad_shape(rows, cols)) return cudaErrorInvalidValue;
    if (!rows) return cudaSuccess;
    glu_rows<<<rows, BLOCK, 0, stream>>>(out, out_cols, x, x_cols, fn, cols);
    return cudaGetLastError();
}

cudaError_t bgk_gather(float *out, int64_t out_cols, const float *x, int64_t x_cols,
                       const int32_t *index, int rows, int cols, cudaStream_t stream)
{
    if (bad_shape(rows, cols)) return cudaErrorInvalidValue;
    if (!rows) return cudaSuccess;
    gather_rows<<<rows, BLOCK, 0, stream>>>(out, out_cols, x, x_cols, index, cols);
    return cudaGetLastError();
}

cudaError_t bgk_softcap(float *x, int64_t n, float cap, cudaStream_t stream)
{
    if (n < 0 || !(cap > 0)) return cudaErrorInvalidValue;
    if (!n) return cudaSuccess;
    softcap_all<<<blocks_for(n), BLOCK, 0, stream>>>(x, n, cap);
    return cudaGetLastError();
}

cudaError_t bgk_poison(float *x, int64_t n, cudaStream_t stream)
{
    if (n < 0) return cudaErrorInvalidValue;
    if (!n) return cudaSuccess;
    poison_all<<<blocks_for(n), BLOCK, 0, stream>>>(x, n);
    return cudaGetLastError();
}

cudaError_t bgk_find_bad(unsigned long long *bad, const float *x, int64_t x_cols, int64_t rows,
                         int64_t cols, cudaStream_t stream)
{
    if (rows < 0 || cols < 1) return cudaErrorInvalidValue;
    if (!rows) return cudaSuccess;
    find_bad_all<<<blocks_for(rows * cols), BLOCK, 0, stream>>>(bad, x, x_cols, rows, cols);
    return cudaGetLastError();
}
