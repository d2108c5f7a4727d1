/* tests/gpu/gpu.h - what tests of CUDA kernels share: random inputs, poisoned outputs, the worst
 * element. Each test program is linked with the kernels and the CUDA backend; without a GPU its
 * tests are skipped. */
#ifndef TESTS_GPU_H
#define TESTS_GPU_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <criterion/criterion.h>
#include <cuda_runtime_api.h>

#include "base/f16.h"
#include "base/rng.h"
#include "bgk.h"

#define GPU_UNUSED __attribute__((unused))
#define CU(call)                                                                \
    do {                                                                        \
        cudaError_t e_ = (call);                                                \
        cr_assert_eq(e_, cudaSuccess, "%s: %s", #call, cudaGetErrorString(e_)); \
    } while (0)
/* First line of every test: nothing to do where there is no GPU. */
#define NEEDS_GPU()                                                                   \
    do {                                                                              \
        int n_ = 0;                                                                   \
        if (cudaGetDeviceCount(&n_) != cudaSuccess || n_ < 1) cr_skip_test("no GPU"); \
    } while (0)

enum { GUARD = 256 }; /* poisoned values behind every output */

/* Small shapes are asked for: under tools that make everything a hundred times slower. */
static GPU_UNUSED bool gpu_small(void)
{
    const char *v = getenv("GPU_TEST_SMALL");
    return v && *v && strcmp(v, "0") != 0;
}

/* Uniform in (-1, 1), a function of seed and i alone. */
static inline float gpu_random(uint64_t seed, uint64_t i)
{
    return (float)((double)bg_mix64(seed * 0x9e3779b97f4a7c15ull + i) * 0x1p-63 - 1.0);
}

static GPU_UNUSED float *random_f32(size_t n, uint64_t seed, float scale)
{
    float *p = malloc((n + 1) * sizeof *p);
    for (size_t i = 0; i < n; i++)
        p[i] = scale * gpu_random(seed, i);
    return p;
}

/* The caller's, ends with cudaFree(). */
static GPU_UNUSED void *to_device(const void *host, size_t bytes)
{
    void *p = NULL;
    CU(cudaMalloc(&p, bytes + 16));
    CU(cudaMemcpy(p, host, bytes, cudaMemcpyHostToDevice));
    return p;
}

/* All bytes 0xff: NaN as float, half and bf16, -1 as an integer. */
static GPU_UNUSED void *poisoned(size_t bytes)
{
    void *p = NULL;
    CU(cudaMalloc(&p, bytes + 16));
    CU(cudaMemset(p, 0xff, bytes + 16));
    CU(cudaDeviceSynchronize()); /* a stream that does not block may write there next */
    return p;
}

/* Waits for everything; the caller's, ends with free(). */
static GPU_UNUSED void *from_device(const void *device, size_t bytes)
{
    void *p = malloc(bytes + 1);
    CU(cudaDeviceSynchronize());
    CU(cudaMemcpy(p, device, bytes, cudaMemcpyDeviceToHost));
    return p;
}

static GPU_UNUSED bool all_poison(const void *p, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        if (((const unsigned char *)p)[i] != 0xff) return false;
    return true;
}

/* Index of the half for (row, col) in BGK_TILES, as bgk.h says it; for tests, by itself. */
static GPU_UNUSED size_t tile_index(size_t stride, size_t row, size_t col)
{
    const size_t place = 2 * (col % 32) + col % 64 / 32;
    return (col / 64 * stride + row) * 64 + ((place / 8) ^ (row % 8)) * 8 + place % 8;
}

/* [rows, cols] floats to BGK_TILES halves on the host: [groups * stride * 64], zero beyond cols,
 * poison (NaN) in rows from `rows` on. */
static GPU_UNUSED uint16_t *to_tiles(const float *x, size_t rows, size_t cols, size_t stride)
{
    const size_t groups = (cols + 63) / 64;
    uint16_t *t = malloc(groups * stride * 64 * sizeof *t);
    memset(t, 0xff, groups * stride * 64 * sizeof *t);
    for (size_t r = 0; r < rows; r++)
        for (size_t c = 0; c < groups * 64; c++)
            t[tile_index(stride, r, c)] = c < cols ? bg_f32_to_f16(x[r * cols + c]) : 0;
    return t;
}

/* Microseconds that one call takes, of `n` in a CUDA graph, as decode steps run: the best of five.
 */
static GPU_UNUSED double gpu_time_us(void (*call)(void *ctx, cudaStream_t stream), void *ctx, int n)
{
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaEvent_t e[2];
    float best = INFINITY, ms;
    CU(cudaStreamCreate(&stream));
    CU(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < n; i++)
        call(ctx, stream);
    CU(cudaStreamEndCapture(stream, &graph));
    CU(cudaGraphInstantiate(&exec, graph, 0));
    for (int i = 0; i < 2; i++)
        CU(cudaEventCreate(&e[i]));
    for (int run = 0; run < 6; run++) { /* the first brings the graph there */
        CU(cudaEventRecord(e[0], stream));
        CU(cudaGraphLaunch(exec, stream));
        CU(cudaEventRecord(e[1], stream));
        CU(cudaStreamSynchronize(stream));
        CU(cudaEventElapsedTime(&ms, e[0], e[1]));
        if (run && ms < best) best = ms;
    }
    for (int i = 0; i < 2; i++)
        CU(cudaEventDestroy(e[i]));
    CU(cudaGraphExecDestroy(exec));
    CU(cudaGraphDestroy(graph));
    CU(cudaStreamDestroy(stream));
    return best * 1e3 / n;
}

typedef struct worst {
    double err; /* the largest of |got - want| / scale; NaN counts as infinite */
    size_t at;
} worst;

/* scale NULL: |want| + floor; else scale[i] + floor. */
static GPU_UNUSED worst worst_of(const float *got, const double *want, const double *scale,
                                 double floor, size_t n)
{
    worst w = {0, 0};
    for (size_t i = 0; i < n; i++) {
        double e = fabs((double)got[i] - want[i]) / ((scale ? scale[i] : fabs(want[i])) + floor);
        if (!(e <= INFINITY)) e = INFINITY;
        if (e > w.err) w = (worst){e, i};
    }
    return w;
}

#endif
