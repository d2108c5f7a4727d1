/* backend/cpu/linear_tiles.h - reading tiles and quantising activations in portable C.
 *
 * Included by the kernels of each instruction set, so that each compiles these loops for its own
 * registers. Loops over LIN_ROWS are meant to become vector code. */
#ifndef BG_BACKEND_CPU_LINEAR_TILES_H
#define BG_BACKEND_CPU_LINEAR_TILES_H

#include <string.h>

#include "backend/cpu/linear_kernels.h"
#include "base/f16.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

#define LIN_INLINE static inline __attribute__((always_inline))

/* The code books of IQ4_NL / IQ4_XS and MXFP4 (twice the E2M1 values). */
static const int8_t lin_nl[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                  1,    13,   25,  38,  53,  69,  89,  113};
static const int8_t lin_fp4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

LIN_INLINE void lin_halves(float *f, const uint8_t *src) /* 16 of them */
{
#if defined(__F16C__)
    for (int i = 0; i < LIN_ROWS; i += 8)
        _mm256_storeu_ps(f + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(src + 2 * i))));
#else
    for (int i = 0; i < LIN_ROWS; i++) {
        uint16_t h;
        memcpy(&h, src + 2 * i, 2);
        f[i] = bg_f16_to_f32(h);
    }
#endif
}

/* 2^(e - 128); e of 0 and 1 are subnormal. */
LIN_INLINE float lin_e8m0(uint8_t e)
{
    return bg_f32_from_bits(e < 2 ? 0x00200000u << e : (uint32_t)(e - 1) << 23);
}

/* Scale and minimum of a block with scales of its own. */
LIN_INLINE void lin_block_scales(float *d, float *m, lin_format format, const uint8_t *s)
{
    if (format == LIN_MXFP4) {
        for (int r = 0; r < LIN_ROWS; r++)
            d[r] = lin_e8m0(s[r]);
    } else {
        lin_halves(d, s);
    }
    if (format == LIN_Q4_1 || format == LIN_Q5_1) lin_halves(m, s + 32);
}

/* Whether the format has scales of 16 columns. */
LIN_INLINE bool lin_halved(lin_format format)
{
    return format == LIN_Q6_K || format == LIN_Q3_K || format == LIN_Q2_K;
}

/* Scales of 256 columns: d, dmin, and for each 16 or 32 columns sc and mn. */
typedef struct lin_super {
    float d[LIN_ROWS], dmin[LIN_ROWS];
    int8_t sc[16][LIN_ROWS], mn[16][LIN_ROWS];
} lin_super;

LIN_INLINE void lin_super_scales(lin_super *o, lin_format format, const uint8_t *s)
{
    if (format == LIN_Q2_K) {
        for (int i = 0; i < 16; i++) {
            for (int r = 0; r < LIN_ROWS; r++) {
                o->sc[i][r] = (int8_t)(s[16 * i + r] & 15);
                o->mn[i][r] = (int8_t)(s[16 * i + r] >> 4);
            }
        }
        lin_halves(o->d, s + 256);
        lin_halves(o->dmin, s + 288);
        return;
    }
    if (lin_halved(format) || format == LIN_IQ4_XS) {
        const int n = lin_halved(format) ? 16 : 8;
        memcpy(o->sc, s, (size_t)n * LIN_ROWS);
        lin_halves(o->d, s + n * LIN_ROWS);
        return;
    }
    for (int i = 0; i < 4; i++, s += LIN_ROWS) {
        for (int r = 0; r < LIN_ROWS; r++) {
            const uint8_t x = s[r], y = s[64 + r], z = s[128 + r];
            o->sc[i][r] = (int8_t)(x & 63);
            o->mn[i][r] = (int8_t)(y & 63);
            o->sc[4 + i][r] = (int8_t)((z & 15) | (x >> 6) << 4);
            o->mn[4 + i][r] = (int8_t)(z >> 4 | (y >> 6) << 4);
        }
    }
    lin_halves(o->d, s + 128);
    lin_halves(o->dmin, s + 160);
}

/* The signed quants of a block: w[k][r]. */
LIN_INLINE void lin_decode(int16_t (*w)[LIN_ROWS], lin_format format, const uint8_t *q)
{
    for (int s = 0; s < 8; s++) {
        for (int c = 0; c < 4; c++) {
            int16_t *o = w[4 * s + c];
            if (format == LIN_Q8_0) {
                for (int r = 0; r < LIN_ROWS; r++)
                    o[r] = (int16_t)(q[64 * s + 4 * r + c] - 128);
                continue;
            }
            if (format == LIN_Q2_K) {
                for (int r = 0; r < LIN_ROWS; r++)
                    o[r] = q[64 * (s >> 2) + 4 * r + c] >> 2 * (s & 3) & 3;
                continue;
            }
            const uint8_t *nib = q + 64 * (s & 3) + c, *up = q + 256 + c;
            for (int r = 0; r < LIN_ROWS; r++) {
                const int v = nib[4 * r] >> (s & 4) & 15;
                int y;
                switch (format) {
                case LIN_Q4_0:
                    y = v - 8;
                    break;
                case LIN_IQ4_NL:
                case LIN_IQ4_XS:
                    y = lin_nl[v];
                    break;
                case LIN_MXFP4:
                    y = lin_fp4[v];
                    break;
                case LIN_Q3_K:
                    y = v - 4;
                    break;
                case LIN_Q5_0:
                    y = (v | (up[4 * r] >> s & 1) << 4) - 16;
                    break;
                case LIN_Q5_1:
                case LIN_Q5_K:
                    y = v | (up[4 * r] >> s & 1) << 4;
                    break;
                case LIN_Q6_K:
                    y = (v | (up[64 * (s >> 2) + 4 * r] >> 2 * (s & 3) & 3) << 4) - 32;
                    break;
                default: /* Q4_1, Q4_K */
                    y = v;
                    break;
                }
                o[r] = (int16_t)y;
            }
        }
    }
}

LIN_INLINE void lin_unpack_block(float (*panel)[LIN_ROWS], int16_t (*w)[LIN_ROWS], const float *d,
                                 const float *m, int n)
{
    for (int k = 0; k < n; k++)
        for (int r = 0; r < LIN_ROWS; r++)
            panel[k][r] = (float)w[k][r] * d[r] + m[r];
}

LIN_INLINE void lin_unpack_format(float (*panel)[LIN_ROWS], lin_format format,
                                  const uint8_t *quants, const uint8_t *scales, int n)
{
    const lin_format_info *f = &lin_formats[format];
    int16_t w[LIN_BLOCK][LIN_ROWS];
    float d[LIN_ROWS], m[LIN_ROWS] = {0};
    lin_super s = {0};
    if (f->scale_cols == LIN_SUPER) lin_super_scales(&s, format, scales);
    for (int b = 0; b < n / LIN_BLOCK; b++, quants += f->quant_bytes, panel += LIN_BLOCK) {
        lin_decode(w, format, quants);
        if (lin_halved(format)) {
            for (int h = 0; h < 2; h++) {
                for (int r = 0; r < LIN_ROWS; r++) {
                    d[r] = s.d[r] * (float)s.sc[2 * b + h][r];
                    if (format == LIN_Q2_K) m[r] = -(s.dmin[r] * (float)s.mn[2 * b + h][r]);
                }
                lin_unpack_block(panel + 16 * h, w + 16 * h, d, m, 16);
            }
            continue;
        }
        if (f->scale_cols == LIN_SUPER) {
            for (int r = 0; r < LIN_ROWS; r++) {
                d[r] = s.d[r] * (float)s.sc[b][r];
                if (format != LIN_IQ4_XS) m[r] = -(s.dmin[r] * (float)s.mn[b][r]);
            }
        } else {
            lin_block_scales(d, m, format, scales + b * f->scale_bytes);
        }
        lin_unpack_block(panel, w, d, m, LIN_BLOCK);
    }
}

LIN_INLINE void lin_unpack_float(float (*panel)[LIN_ROWS], lin_format format, const uint8_t *values,
                                 int n)
{
    switch (format) {
    case LIN_F32:
        memcpy(panel, values, (size_t)n * sizeof *panel);
        break;
    case LIN_F16:
        for (int k = 0; k < n; k++)
            lin_halves(panel[k], values + 32 * k);
        break;
    default: /* LIN_BF16 */
        for (int k = 0; k < n; k++) {
            uint16_t h[LIN_ROWS];
            memcpy(h, values + 32 * k, sizeof h);
            for (int r = 0; r < LIN_ROWS; r++)
                panel[k][r] = bg_bf16_to_f32(h[r]);
        }
        break;
    }
}

LIN_INLINE void lin_unpack_any(float (*panel)[LIN_ROWS], lin_format format, const uint8_t *quants,
                               const uint8_t *scales, int n)
{
    switch (format) {
#define CASE(F)                                         \
    case F:                                             \
        lin_unpack_format(panel, F, quants, scales, n); \
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

/* The scale of a block whose largest |x| has these bits, and what to multiply x by for q. A NaN or
 * an infinity in x must reach the result: the maximum is taken over the bits, where NaN is the
 * largest; then d is not finite and q, by the false returned, all 0. Blocks of next to nothing
 * count as 0, as 127 / max might overflow. */
LIN_INLINE bool lin_scale(float *d, float *id, int32_t max_bits)
{
    const float max = bg_f32_from_bits((uint32_t)max_bits);
    const bool tiny = max < 0x1p-100f;
    *d = tiny ? 0.0f : max / 127.0f;
    *id = tiny ? 0.0f : 127.0f / max;
    return max_bits < 0x7f800000;
}

/* What a block leaves besides q: s0 and s1 are the sums of q over its halves. */
LIN_INLINE void lin_put_scales(const lin_acts *a, int64_t b, int w, int t, float d, int32_t s0,
                               int32_t s1)
{
    const int64_t at = b * w + t;
    a->d[at] = d;
    a->ds[at] = d * (float)(s0 + s1);
    if (a->start[LIN_START_8]) a->start[LIN_START_8][at] = -8 * (s0 + s1);
    if (a->start[LIN_START_16]) a->start[LIN_START_16][at] = -16 * (s0 + s1);
    if (a->start[LIN_START_128]) a->start[LIN_START_128][at] = -128 * (s0 + s1);
    if (a->ds_halves) {
        a->ds_halves[b * 2 * w + t] = d * (float)s0;
        a->ds_halves[(b * 2 + 1) * w + t] = d * (float)s1;
    }
    if (a->start[LIN_START_4_HALVES]) {
        a->start[LIN_START_4_HALVES][b * 2 * w + t] = -4 * s0;
        a->start[LIN_START_4_HALVES][(b * 2 + 1) * w + t] = -4 * s1;
    }
    if (a->start[LIN_START_32_HALVES]) {
        a->start[LIN_START_32_HALVES][b * 2 * w + t] = -32 * s0;
        a->start[LIN_START_32_HALVES][(b * 2 + 1) * w + t] = -32 * s1;
    }
}

LIN_INLINE void lin_quantize_any(const lin_acts *a, const float *x, int64_t x_stride, int w,
                                 int64_t b0, int64_t b1)
{
    const float magic = 0x1.8p23f; /* adding it rounds to an integer, to nearest even */
    for (int64_t b = b0; b < b1; b++, x += LIN_BLOCK) {
        for (int t = 0; t < w; t++) {
            const float *v = x + t * x_stride;
            int8_t *q = a->q + (b * w + t) * LIN_BLOCK;
            uint32_t bits[LIN_BLOCK];
            int32_t big = 0, sum[2] = {0, 0};
            float d, id;
            memcpy(bits, v, sizeof bits);
            for (int i = 0; i < LIN_BLOCK; i++) {
                const int32_t m = (int32_t)(bits[i] & 0x7fffffffu);
                big = m > big ? m : big;
            }
            const bool finite = lin_scale(&d, &id, big);
            for (int i = 0; i < LIN_BLOCK; i++) {
                const uint32_t n = bg_f32_bits(v[i] * id + magic) - bg_f32_bits(magic);
                q[i] = finite ? (int8_t)n : 0;
                sum[i / 16] += q[i];
            }
            lin_put_scales(a, b, w, t, d, sum[0], sum[1]);
        }
    }
}

#endif
