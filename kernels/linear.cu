/* kernels/linear.cu - out = x W^T + bias for weights in half or float32: the generic path, which every
 * GGUF type can take once it is dequantised.
 *
 *   requires  k_padded % 64 == 0, k <= k_padded, w 16-byte aligned and zero beyond k
 *   launch    half: block 128, a tile of 64 rows and 8, 32 or 64 tokens; float32: block 256, 32 rows
 *             and 8 tokens; graph-capturable
 *   order     one chain over k for each output, in steps of 16 (half: the tensor core's own order in a
 *             step) or 1: neither the number of tokens nor the tile changes a bit
 *   traffic   the weights once per token tile; x once per row tile, from L2
 *   proof     tests/gpu/test_kernels.c: float64, against 2^-10 (half) of sum |x||w| */
#include <cuda_fp16.h>

#include "bgk.h"
#include "ptx.cuh"

namespace {

constexpr int ROWS = 64, K_STEP = 64, STRIDE = K_STEP + 8; /* halves; 8 more against bank conflicts */
constexpr int BLOCK = 128;

struct args {
    float *out;
    int64_t out_cols;
    const __half *w;
    const float *bias, *x;
    int64_t x_cols;
    int tokens, n_rows, k, k_padded;
};

/* The tile of W for one step, by asynchronous copies; rows past the end repeat the last. */
__device__ void copy_weights(__half *tile, const args &a, int row0, int k0)
{
    for (int i = threadIdx.x; i < ROWS * K_STEP / 8; i += BLOCK) {
        const int r = i / (K_STEP / 8), c = i % (K_STEP / 8) * 8;
        const int row = min(row0 + r, a.n_rows - 1);
        ptx_copy16(tile + r * STRIDE + c, a.w + (int64_t)row * a.k_padded + k0 + c);
    }
    ptx_copy_commit();
}

template <int TOKENS> __device__ void load_x(float (&v)[TOKENS * K_STEP / BLOCK], const args &a, int t0, int k0)
{
    for (int i = 0; i < TOKENS * K_STEP / BLOCK; i++) {
        const int at = i * BLOCK + threadIdx.x, t = t0 + at / K_STEP, k = k0 + at % K_STEP;
        v[i] = t < a.tokens && k < a.k ? a.x[t * a.x_cols + k] : 0.0f;
    }
}

template <int TOKENS> __device__ void store_x(__half *tile, const float (&v)[TOKENS * K_STEP / BLOCK])
{
    for (int i = 0; i < TOKENS * K_STEP / BLOCK; i++) {
        const int at = i * BLOCK + threadIdx.x;
        /* A value beyond the half range would become infinite, and then NaN in a sum. */
        const float c = fminf(fmaxf(v[i], -65504.0f), 65504.0f);
        tile[at / K_STEP * STRIDE + at % K_STEP] = __float2half_rn(isnan(v[i]) ? v[i] : c);
    }
}

template <int TOKENS> __global__ void __launch_bounds__(BLOCK) half_linear(args a)
{
    __shared__ __align__(16) __half ws[2][ROWS * STRIDE];
    __shared__ __align__(16) __half xs[2][TOKENS * STRIDE];
    const int row0 = blockIdx.x * ROWS, t0 = blockIdx.y * TOKENS;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float sum[TOKENS / 8][4] = {};
    float v[TOKENS * K_STEP / BLOCK];
    const int steps = a.k_padded / K_STEP;
    copy_weights(ws[0], a, row0, 0);
    load_x<TOKENS>(v, a, t0, 0);
    for (int s = 0; s < steps; s++) {
        store_x<TOKENS>(xs[s % 2], v);
        if (s + 1 < steps) {
            copy_weights(ws[(s + 1) % 2], a, row0, (s + 1) * K_STEP);
            load_x<TOKENS>(v, a, t0, (s + 1) * K_STEP);
            ptx_copy_wait<1>();
        } else {
            ptx_copy_wait<0>();
        }
        __syncthreads();
        const __half *w = ws[s % 2] + (warp * 16 + lane % 16) * STRIDE + lane / 16 * 8;
        const __half *x = xs[s % 2] + lane % 8 * STRIDE + lane / 8 % 2 * 8;
        for (int k = 0; k < K_STEP; k += 16) {
            uint32_t wf[4], xf[2];
            ptx_ldmatrix4(wf, w + k);
            for (int j = 0; j < TOKENS / 8; j++) {
                ptx_ldmatrix2(xf, x + j * 8 * STRIDE + k);
                ptx_mma16816(sum[j], wf, xf);
            }
        }
        __syncthreads(); /* the next turn writes what this one read */
    }
    for (int j = 0; j < TOKENS / 8; j++)
        for (int i = 0; i < 4; i++) {
            const int row = row0 + warp * 16 + lane / 4 + i / 2 * 8;
            const int t = t0 + j * 8 + lane % 4 * 2 + i % 2;
            if (row < a.n_rows && t < a.tokens)
                a.out[t * a.out_cols + row] = sum[j][i] + (a.bias ? a.bias[row] : 0.0f);
        }
}

constexpr int F_ROWS = 32, F_TOKENS = 8, F_BLOCK = 256, F_STEP = 64;

__global__ void __launch_bounds__(F_BLOCK) float_linear(float *out, int64_t out_cols, const float *w,
                                                        const float *bias, const float *x, int64_t x_cols,
                                                        int tokens, int n_rows, int k, int k_padded)
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

} // namespace

cudaError_t bgk_linear(float *out, int64_t out_cols, const void *w, bgk_type type, const float *bias,
                       const float *x, int64_t x_cols, int tokens, int n_rows, int k, int k_padded,
                       cudaStream_t stream)
{
    if (tokens < 0 || n_rows < 1 || k < 1 || k > k_padded || k_padded % BGK_K_PAD || (uintptr_t)w % 16 ||
        type == BGK_BF16)
        return cudaErrorInvalidValue;
    if (!tokens) return cudaSuccess;
    if (type == BGK_F32) {
        const dim3 grid(tiles(n_rows, F_ROWS), tiles(tokens, F_TOKENS));
        float_linear<<<grid, F_BLOCK, 0, stream>>>(out, out_cols, (const float *)w, bias, x, x_cols, tokens,
                                                   n_rows, k, k_padded);
        return cudaGetLastError();
    }
    const args a = {out, out_cols, (const __half *)w, bias, x, x_cols, tokens, n_rows, k, k_padded};
    if (tokens <= 8)
        half_linear<8><<<dim3(tiles(n_rows, ROWS), tiles(tokens, 8)), BLOCK, 0, stream>>>(a);
    else if (tokens <= 32)
        half_linear<32><<<dim3(tiles(n_rows, ROWS), tiles(tokens, 32)), BLOCK, 0, stream>>>(a);
    else
        half_linear<64><<<dim3(tiles(n_rows, ROWS), tiles(tokens, 64)), BLOCK, 0, stream>>>(a);
    return cudaGetLastError();
}
