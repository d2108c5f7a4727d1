/* backend/cpu/linear_avx2.c - the kernels for AVX2 and FMA. */
#if defined(__AVX2__)
#include <immintrin.h>

#include "backend/cpu/linear_kernels.h"

/* Four tokens: 8 accumulators of 8 rows, two panel registers. W is a constant in every call. */
static inline __attribute__((always_inline)) void fma_tile(float (*sum)[LIN_ROWS],
                                                           const float (*panel)[LIN_ROWS],
                                                           const float *x, int64_t x_stride, int W,
                                                           int n)
{
    __m256 a[4][2];
    for (int t = 0; t < W; t++)
        a[t][0] = a[t][1] = _mm256_setzero_ps();
    for (int k = 0; k < n; k++) {
        const __m256 p0 = _mm256_load_ps(panel[k]), p1 = _mm256_load_ps(panel[k] + 8);
#pragma GCC unroll 4
        for (int t = 0; t < W; t++) {
            const __m256 v = _mm256_broadcast_ss(x + t * x_stride + k);
            a[t][0] = _mm256_fmadd_ps(p0, v, a[t][0]);
            a[t][1] = _mm256_fmadd_ps(p1, v, a[t][1]);
        }
    }
    for (int t = 0; t < W; t++) {
        _mm256_store_ps(sum[t], a[t][0]);
        _mm256_store_ps(sum[t] + 8, a[t][1]);
    }
}

static void fma_panel(float (*sum)[LIN_ROWS], const float (*panel)[LIN_ROWS], const float *x,
                      int64_t x_stride, int w, int n)
{
    for (; w >= 4; w -= 4, sum += 4, x += 4 * x_stride)
        fma_tile(sum, panel, x, x_stride, 4, n);
    switch (w) {
    case 3:
        fma_tile(sum, panel, x, x_stride, 3, n);
        break;
    case 2:
        fma_tile(sum, panel, x, x_stride, 2, n);
        break;
    case 1:
        fma_tile(sum, panel, x, x_stride, 1, n);
        break;
    default:
        break;
    }
}

const lin_isa *lin_isa_avx2(void)
{
    static const lin_isa isa = {.fma = fma_panel};
    return &isa;
}
#endif
