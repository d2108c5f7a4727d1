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

/* The quants of step s of a block as stored, one byte each. */
LIN_INLINE __m512i step_quants(lin_format format, const uint8_t *q, int s)
{
    if (format == LIN_Q8_0) return _mm512_load_si512(q + 64 * s);
    if (format == LIN_Q2_K)
        return _mm512_and_si512(
            _mm512_srli_epi32(_mm512_load_si512(q + 64 * (s >> 2)), (unsigned)(2 * (s & 3))),
            _mm512_set1_epi8(3));
    __m512i v = _mm512_load_si512(q + 64 * (s & 3));
    if (s & 4) v = _mm512_srli_epi32(v, 4);
    v = _mm512_and_si512(v, _mm512_set1_epi8(15));
    if (format == LIN_Q5_0 || format == LIN_Q5_1 || format == LIN_Q5_K) {
        __m512i p = _mm512_load_si512(q + 256);
        p = s < 4 ? _mm512_slli_epi32(p, (unsigned)(4 - s))
                  : _mm512_srli_epi32(p, (unsigned)(s - 4));
        v = _mm512_or_si512(v, _mm512_and_si512(p, _mm512_set1_epi8(0x10)));
    } else if (format == LIN_Q6_K) {
        const int at = 2 * (s & 3);
        __m512i p = _mm512_load_si512(q + 256 + 64 * (s >> 2));
        p = at < 4 ? _mm512_slli_epi32(p, (unsigned)(4 - at))
                   : _mm512_srli_epi32(p, (unsigned)(at - 4));
        v = _mm512_or_si512(v, _mm512_and_si512(p, _mm512_set1_epi8(0x30)));
    } else if (format == LIN_IQ4_NL || format == LIN_IQ4_XS || format == LIN_MXFP4) {
        const int8_t *t = format == LIN_MXFP4 ? lin_fp4 : lin_nl;
        const __m128i book =
            _mm_xor_si128(_mm_loadu_si128((const __m128i *)t), _mm_set1_epi8(-128));
        v = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(book), v);
    }
    return v;
}

/* panel[4s + c] of a block = (quant - offset) * d + m */
LIN_INLINE void unpack_steps(float (*panel)[LIN_ROWS], lin_format format, const uint8_t *q, int s0,
                             int s1, __m512 d, __m512 m)
{
    static const int offsets[LIN_STARTS] = {[LIN_START_8] = 8,
                                            [LIN_START_16] = 16,
                                            [LIN_START_128] = 128,
                                            [LIN_START_32_HALVES] = 32,
                                            [LIN_START_4_HALVES] = 4};
    const bool minima = format == LIN_Q4_1 || format == LIN_Q5_1 || format == LIN_Q4_K ||
                        format == LIN_Q5_K || format == LIN_Q2_K;
    const lin_start start = minima               ? LIN_START_NONE
                            : format == LIN_Q4_0 ? LIN_START_8
                            : format == LIN_Q5_0 ? LIN_START_16
                            : format == LIN_Q6_K ? LIN_START_32_HALVES
                            : format == LIN_Q3_K ? LIN_START_4_HALVES
                                                 : LIN_START_128;
    const __m512i offset = _mm512_set1_epi32(offsets[start]);
#pragma GCC unroll 8
    for (int s = s0; s < s1; s++) {
        const __m512i v = step_quants(format, q, s);
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) {
            __m512i x = c ? _mm512_srli_epi32(v, (unsigned)(8 * c)) : v;
            if (c < 3) x = _mm512_and_si512(x, _mm512_set1_epi32(255));
            const __m512 f = _mm512_cvtepi32_ps(_mm512_sub_epi32(x, offset));
            const __m512 y = _mm512_mul_ps(f, d);
            _mm512_store_ps(panel[4 * s + c], minima ? _mm512_add_ps(y, m) : y);
        }
    }
}

LIN_INLINE __m512 rows_i8(const int8_t *s)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)s)));
}

LIN_INLINE void unpack_blocks(float (*panel)[LIN_ROWS], lin_format format, const uint8_t *quants,
                              const uint8_t *scales, int n)
{
    const lin_format_info *f = &lin_formats[format];
    lin_super s;
    if (f->scale_cols == LIN_SUPER) lin_super_scales(&s, format, scales);
    for (int b = 0; b < n / LIN_BLOCK; b++, quants += f->quant_bytes, panel += LIN_BLOCK) {
        __m512 d, m = _mm512_setzero_ps();
        if (lin_halved(format)) {
            for (int h = 0; h < 2; h++) {
                d = _mm512_mul_ps(_mm512_loadu_ps(s.d), rows_i8(s.sc[2 * b + h]));
                if (format == LIN_Q2_K)
                    m = _mm512_sub_ps(_mm512_setzero_ps(), _mm512_mul_ps(_mm512_loadu_ps(s.dmin),
                                                                         rows_i8(s.mn[2 * b + h])));
                unpack_steps(panel, format, quants, 4 * h, 4 * h + 4, d, m);
            }
            continue;
        }
        if (f->scale_cols == LIN_SUPER) {
            d = _mm512_mul_ps(_mm512_loadu_ps(s.d), rows_i8(s.sc[b]));
            if (format != LIN_IQ4_XS)
                m = _mm512_sub_ps(m, _mm512_mul_ps(_mm512_loadu_ps(s.dmin), rows_i8(s.mn[b])));
        } else {
            float df[LIN_ROWS], mf[LIN_ROWS] = {0};
            lin_block_scales(df, mf, format, scales + b * f->scale_bytes);
            d = _mm512_loadu_ps(df);
            m = _mm512_loadu_ps(mf);
        }
        unpack_steps(panel, format, quants, 0, 8, d, m);
    }
}

void lin_unpack_avx512(float (*panel)[LIN_ROWS], lin_format format, const uint8_t *quants,
                       const uint8_t *scales, int n)
{
    switch (format) {
#define CASE(F)                                     \
    case F:                                         \
        unpack_blocks(panel, F, quants, scales, n); \
        break
        CASE(LIN_Q4_0);
        CASE(LIN_Q4_1);
        CASE(LIN_Q5_0);
        CASE(LIN_Q5_1);
        CASE(LIN_Q8_0);
        CASE(LIN_IQ4_NL);
        CASE(LIN_MXFP4);
        CASE(LIN_Q4_K);
        CASE(LIN_Q5_K);
        CASE(LIN_Q6_K);
        CASE(LIN_IQ4_XS);
        CASE(LIN_Q3_K);
        CASE(LIN_Q2_K);
#undef CASE
    default:
        lin_unpack_float(panel, format, quants, n);
        break;
    }
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
