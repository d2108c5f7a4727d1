/* kernels/linear.cu - out = x W^T + bias for weights in half or float32: the generic path, which
 * every GGUF type can take once it is dequantised.
 *
 * Requires: k_padded % 64 == 0, k <= k_padded, w 16-byte aligned and zero beyond k; half: scratch
 * for tokens * k_padded halves, 16-byte aligned.
 *
 * Launch: half: x is rounded into scratch first; then block 128 or 256, a tile of 64 or 128 rows
 * and 8 to 128 tokens, a ring of four steps of 64 columns in up to 147 KB of dynamic shared memory;
 * float32: block 256, 32 rows and 8 tokens. Graph-capturable.
 *
 * Order: one chain over k for each output, in steps of 16 (half: the tensor core's own order in a
 * step) or 1: neither the number of tokens nor the tile changes a bit.
 *
 * Traffic: the weights once per token tile; x once per row tile, from L2.
 *
 * Proof: tests/unit/model/test_golden on a GPU; batches against single sequences, byte for byte. */
#include <cuda_fp16.h>

#include "bgk.h"
#include "ptx.cuh"

namespace
{

constexpr int K_STEP = 64, STRIDE = K_STEP + 8; /* halves; 8 more against bank conflicts */
constexpr int STAGES = 4;

struct args {
    float *out;
    int64_t out_cols;
    const __half *w, *x;
    const float *bias;
    int tokens, n_rows, k_padded;
};

/* out[t, 0..k_padded) = half(x[t, 0..k)), then zeros. */
__global__ void __launch_bounds__(256)
    to_half(__half *out, const float *x, int64_t x_cols, int k, int k_padded)
{
    const float *row = x + blockIdx.x * x_cols;
    __half *to = out + (int64_t)blockIdx.x * k_padded;
    for (int i = threadIdx.x; i < k_padded; i += 256) {
        const float v = i < k ? row[i] : 0.0f;
        /* A value beyond the half range would become infinite, and then NaN in a sum. */
        to[i] = __float2half_rn(isnan(v) ? v : fminf(fmaxf(v, -65504.0f), 65504.0f));
    }
}

/* ROWS rows from row0 on of a matrix with n rows, of each the columns k0 to k0 + K_STEP, by
 * asynchronous copies; rows past the end repeat the last. */
template <int ROWS, int BLOCK>
__device__ void copy_tile(__half *tile, const __half *from, int row0, int n, int k_padded, int k0)
{
    constexpr int PIECES = K_STEP / 8;
#pragma unroll
    for (int i = threadIdx.x; i < ROWS * PIECES; i += BLOCK) {
        const int row = min(row0 + i / PIECES, n - 1);
        ptx_copy16(tile + i / PIECES * STRIDE + i % PIECES * 8,
                   from + (int64_t)row * k_padded + k0 + i % PIECES * 8);
    }
}

template <int ROWS, int TOKENS> constexpr int shared_bytes()
{
    return STAGES * (ROWS + TOKENS) * STRIDE * (int)sizeof(__half);
}

template <int ROWS, int TOKENS> __global__ void __launch_bounds__(ROWS * 2) half_linear(args a)
{
    constexpr int BLOCK = ROWS * 2; /* a warp for each 16 rows */
    extern __shared__ __align__(16) __half shared[];
    __half *ws = shared, *xs = shared + STAGES * ROWS * STRIDE;
    const int row0 = blockIdx.x * ROWS, t0 = blockIdx.y * TOKENS;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float sum[TOKENS / 8][4] = {};
    const int steps = a.k_padded / K_STEP;
    for (int s = 0; s < STAGES - 1; s++) {
        if (s < steps) {
            copy_tile<ROWS, BLOCK>(ws + s * ROWS * STRIDE, a.w, row0, a.n_rows, a.k_padded,
                                   s * K_STEP);
            copy_tile<TOKENS, BLOCK>(xs + s * TOKENS * STRIDE, a.x, t0, a.tokens, a.k_padded,
                                     s * K_STEP);
        }
        ptx_copy_commit();
    }
    for (int s = 0; s < steps; s++) {
        ptx_copy_wait<STAGES - 2>();
        __syncthreads(); /* step s is here, and everyone is done with the one whose place is taken
                            next */
        const int next = s + STAGES - 1, to = next % STAGES;
        if (next < steps) {
            copy_tile<ROWS, BLOCK>(ws + to * ROWS * STRIDE, a.w, row0, a.n_rows, a.k_padded,
                                   next * K_STEP);
            copy_tile<TOKENS, BLOCK>(xs + to * TOKENS * STRIDE, a.x, t0, a.tokens, a.k_padded,
                                     next * K_STEP);
        }
        ptx_copy_commit();
        const __half *w =
            ws + s % STAGES * ROWS * STRIDE + (warp * 16 + lane % 16) * STRIDE + lane / 16 * 8;
        const __half *x = xs + s % STAGES * TOKENS * STRIDE + lane % 8 * STRIDE + lane / 8 % 2 * 8;
#pragma unroll
        for (int k = 0; k < K_STEP; k += 16) {
            uint32_t wf[4], xf[2];
            ptx_ldmatrix4(wf, w + k);
#pragma unroll
            for (int j = 0; j < TOKENS / 8; j++) {
                ptx_ldmatrix2(xf, x + j * 8 * STRIDE + k);
                ptx_mma16816(sum[j], wf, xf);
            }
        }
    }
#pragma unroll
    for (int j = 0; j < TOKENS / 8; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = row0 + warp * 16 + lane / 4 + i / 2 * 8;
            const int t = t0 + j * 8 + lane % 4 * 2 + i % 2;
            if (row < a.n_rows && t < a.tokens)
                a.out[t * a.out_cols + row] = sum[j][i] + (a.bias ? a.bias[row] : 0.0f);
        }
}

constexpr int F_ROWS = 32, F_TOKENS = 8, F_BLOCK = 256, F_STEP = 64;

__global__ void __launch_bounds__(F_BLOCK)
    float_linear(float *out, int64_t out_cols, const float *w, const float *bias, const float *x,
                 int64_t x_cols, int tokens, int n_rows, int k, int k_padded)
{
    __shared__ float ws[F_ROWS][F_STEP + 1], xs[F_TOKENS][F_STEP + 1];
    const int row0 = blockIdx.x * F_ROWS, t0 = blockIdx.y * F_TOKENS;
    const int r = threadIdx.x / F_TOKENS, t = threadIdx.x % F_TOKENS;
    float sum = 0;
    for (int k0 = 0; k0 < k_padded; k0 += F_STEP) {
        for (int i = threadIdx.x; i < F_ROWS * F_STEP; i += F_BLOCK)
            ws[i / F_STEP][i % F_STEP] =
                w[(int64_t)min(row0 + i / F_STEP, n_rows - 1) * k_padded + k0 + i % F_STEP];
        for (int i = threadIdx.x; i < F_TOKENS * F_STEP; i += F_BLOCK) {
            const int token = t0 + i / F_STEP, kk = k0 + i % F_STEP;
            xs[i / F_STEP][i % F_STEP] = token < tokens && kk < k ? x[token * x_cols + kk] : 0.0f;
        }
        __syncthreads();
        for (int i = 0; i < F_STEP; i++)
            sum = fmaf(xs[t][i], ws[r][i], sum);
        __syncthreads();
    }
    if (row0 + r < n_rows && t0 + t < tokens)
        out[(t0 + t) * out_cols + row0 + r] = sum + (bias ? bias[row0 + r] : 0.0f);
}

int tiles(int n, int tile)
{
    return (n + tile - 1) / tile;
}

template <int ROWS, int TOKENS> cudaError_t launch(const args &a, cudaStream_t stream)
{
    constexpr int bytes = shared_bytes<ROWS, TOKENS>();
    cudaError_t e = cudaFuncSetAttribute(half_linear<ROWS, TOKENS>,
                                         cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (e != cudaSuccess) return e;
    half_linear<ROWS, TOKENS>
        <<<dim3(tiles(a.n_rows, ROWS), tiles(a.tokens, TOKENS)), ROWS * 2, bytes, stream>>>(a);
    return cudaGetLastError();
}

} // namespace

cudaError_t bgk_linear(float *out, int64_t out_cols, const void *w, bgk_type type,
                       const float *bias, const float *x, int64_t x_cols, int tokens, int n_rows,
                       int k, int k_padded, void *scratch, cudaStream_t stream)
{
    if (tokens < 0 || n_rows < 1 || k < 1 || k > k_padded || k_padded % BGK_K_PAD ||
        (uintptr_t)w % 16 || type == BGK_BF16 ||
        (type == BGK_F16 && (!scratch || (uintptr_t)scratch % 16)))
        return cudaErrorInvalidValue;
    if (!tokens) return cudaSuccess;
    if (type == BGK_F32) {
        const dim3 grid(tiles(n_rows, F_ROWS), tiles(tokens, F_TOKENS));
        float_linear<<<grid, F_BLOCK, 0, stream>>>(out, out_cols, (const float *)w, bias, x, x_cols,
                                                   tokens, n_rows, k, k_padded);
        return cudaGetLastError();
    }
    to_half<<<tokens, 256, 0, stream>>>((__half *)scratch, x, x_cols, k, k_padded);
    const args a = {out,    out_cols, (const __half *)w, (const __half *)scratch, bias,
                    tokens, n_rows,   k_padded};
    if (tokens <= 8) return launch<64, 8>(a, stream);
    if (tokens <= 16) return launch<64, 16>(a, stream);
    if (tokens <= 32) return launch<64, 32>(a, stream);
    if (tokens <= 64) return launch<64, 64>(a, stream);
    return launch<128, 128>(a, stream);
}
