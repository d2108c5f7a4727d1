/* backend/cpu/linear_avx512.c - float kernels for AVX-512. */
#if defined(__AVX512F__)
#include <immintrin.h>

#include "backend/cpu/linear_tiles.h"

/* One zmm of 16 rows for each token. W is a constant in every call. */
static inline __attribute__((always_inline)) void fma_tile(float (*sum)[LIN_ROWS],
                                                           const float (*panel)[LIN_ROWS],
                                                           const float *x, int64_t x_stride, int W,
                                                           int n)
{
    __m512 a[8];
    const float *row[8];
    for (int t = 0; t < W; t++) {
        a[t] = _mm512_setzero_ps();
        row[t] = x + t * x_stride;
    }
    for (int k = 0; k < n; k++) {
        const __m512 p = _mm512_load_ps(panel[k]);
#pragma GCC unroll 8
        for (int t = 0; t < W; t++)
            a[t] = _mm512_fmadd_ps(p, _mm512_set1_ps(row[t][k]), a[t]);
    }
    for (int t = 0; t < W; t++)
        _mm512_store_ps(sum[t], a[t]);
}

void lin_fma_avx512(float (*sum)[LIN_ROWS], const float (*panel)[LIN_ROWS], const float *x,
                    int64_t x_stride, int w, int n)
{
    switch (w) {
    case 8:
        fma_tile(sum, panel, x, x_stride, 8, n);
        break;
    case 7:
        fma_tile(sum, panel, x, x_stride, 7, n);
        break;
    case 6:
        fma_tile(sum, panel, x, x_stride, 6, n);
        break;
    case 5:
        fma_tile(sum, panel, x, x_stride, 5, n);
        break;
    case 4:
        fma_tile(sum, panel, x, x_stride, 4, n);
        break;
    case 3:
        fma_tile(sum, panel, x, x_stride, 3, n);
        break;
    case 2:
        fma_tile(sum, panel, x, x_stride, 2, n);
        break;
    default:
        fma_tile(sum, panel, x, x_stride, 1, n);
        break;
    }
}

void lin_unpack_avx512(float (*panel)[LIN_ROWS], lin_format format, const uint8_t *quants,
                       const uint8_t *scales, int n)
{
    lin_unpack_any(panel, format, quants, scales, n);
}

/* lin_quantize_any() with a token's 32 values in two registers. */
void lin_quantize_avx512(const lin_acts *a, const float *x, int64_t x_stride, int w, int64_t b0,
                         int64_t b1)
{
    const __m512i positive = _mm512_set1_epi32(0x7fffffff);
    for (int64_t b = b0; b < b1; b++, x += LIN_BLOCK) {
        for (int t = 0; t < w; t++) {
            const int64_t at = b * w + t;
            const __m512 lo = _mm512_loadu_ps(x + t * x_stride);
            const __m512 hi = _mm512_loadu_ps(x + t * x_stride + 16);
            const __m512i big =
                _mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(lo), positive),
                                 _mm512_and_si512(_mm512_castps_si512(hi), positive));
            float d, id;
            const __mmask16 finite = lin_scale(&d, &id, _mm512_reduce_max_epi32(big)) ? 0xffff : 0;
            const __m512 m = _mm512_set1_ps(id);
            const __m512i ql = _mm512_maskz_cvtps_epi32(finite, _mm512_mul_ps(lo, m));
            const __m512i qh = _mm512_maskz_cvtps_epi32(finite, _mm512_mul_ps(hi, m));
            int8_t *q = a->q + at * LIN_BLOCK;
            _mm_storeu_si128((__m128i *)q, _mm512_cvtepi32_epi8(ql));
            _mm_storeu_si128((__m128i *)(q + 16), _mm512_cvtepi32_epi8(qh));
            lin_put_scales(a, b, w, t, d, _mm512_reduce_add_epi32(ql), _mm512_reduce_add_epi32(qh));
        }
    }
}
#endif
