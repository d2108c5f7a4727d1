/* backend/cpu/linear_plain.c - the kernels in portable C: the reference of the others. */
#include <math.h>

#include "backend/cpu/linear_tiles.h"

static void fma_panel(float (*sum)[LIN_ROWS], const float (*panel)[LIN_ROWS], const float *x,
                      int64_t x_stride, int w, int n)
{
    for (int t = 0; t < w; t++) {
        float acc[LIN_ROWS] = {0};
        for (int k = 0; k < n; k++) {
            const float v = x[t * x_stride + k];
            for (int r = 0; r < LIN_ROWS; r++)
                acc[r] = fmaf(panel[k][r], v, acc[r]);
        }
        memcpy(sum[t], acc, sizeof acc);
    }
}

static void unpack(float (*panel)[LIN_ROWS], lin_format format, const uint8_t *quants,
                   const uint8_t *scales, int n)
{
    lin_unpack_any(panel, format, quants, scales, n);
}

static void quantize(const lin_acts *a, const float *x, int64_t x_stride, int w, int64_t b0,
                     int64_t b1)
{
    lin_quantize_any(a, x, x_stride, w, b0, b1);
}

/* isum[r] over n columns of a block. */
static void dot(int32_t *isum, int16_t (*w)[LIN_ROWS], const int8_t *q, int n)
{
    int32_t s[LIN_ROWS] = {0};
    for (int k = 0; k < n; k++)
        for (int r = 0; r < LIN_ROWS; r++)
            s[r] += w[k][r] * q[k];
    memcpy(isum, s, sizeof s);
}

static void put(const lin_tile *a, float (*acc)[LIN_ROWS], int w)
{
    for (int t = 0; t < w; t++)
        for (int r = 0; r < a->n_rows; r++)
            a->out[t * a->out_stride + r] = acc[t][r] + a->bias[r];
}

LIN_INLINE void tile_blocks(lin_format format, const lin_tile *a, int w)
{
    const lin_format_info *f = &lin_formats[format];
    float acc[LIN_MAX_TILE][LIN_ROWS] = {0};
    for (int64_t b = 0; b < a->n_blocks; b++) {
        int16_t v[LIN_BLOCK][LIN_ROWS];
        float d[LIN_ROWS], m[LIN_ROWS];
        lin_decode(v, format, a->quants + b * f->quant_bytes);
        lin_block_scales(d, m, format, a->scales + b * f->scale_bytes);
        for (int t = 0; t < w; t++) {
            const int64_t at = b * w + t;
            int32_t isum[LIN_ROWS];
            dot(isum, v, a->q + at * LIN_BLOCK, LIN_BLOCK);
            for (int r = 0; r < LIN_ROWS; r++) {
                float *o = &acc[t][r];
                *o = fmaf((float)isum[r], d[r] * a->d[at], *o);
                if (format == LIN_Q4_1 || format == LIN_Q5_1) *o = fmaf(m[r], a->ds[at], *o);
            }
        }
    }
    put(a, acc, w);
}

LIN_INLINE void tile_super(lin_format format, const lin_tile *a, int w)
{
    const lin_format_info *f = &lin_formats[format];
    const bool minima = format == LIN_Q4_K || format == LIN_Q5_K || format == LIN_Q2_K;
    float acc[LIN_MAX_TILE][LIN_ROWS] = {0};
    for (int64_t b0 = 0; b0 < a->n_blocks; b0 += 8) {
        lin_super s;
        float e[LIN_MAX_TILE][LIN_ROWS] = {0}, n[LIN_MAX_TILE][LIN_ROWS] = {0};
        lin_super_scales(&s, format, a->scales + b0 / 8 * f->scale_bytes);
        for (int b = 0; b < 8; b++) {
            int16_t v[LIN_BLOCK][LIN_ROWS];
            lin_decode(v, format, a->quants + (b0 + b) * f->quant_bytes);
            for (int t = 0; t < w; t++) {
                const int64_t at = (b0 + b) * w + t;
                const int8_t *q = a->q + at * LIN_BLOCK;
                int32_t isum[LIN_ROWS], upper[LIN_ROWS];
                if (lin_halved(format)) {
                    dot(isum, v, q, 16);
                    dot(upper, v + 16, q + 16, 16);
                    for (int r = 0; r < LIN_ROWS; r++)
                        isum[r] = isum[r] * s.sc[2 * b][r] + upper[r] * s.sc[2 * b + 1][r];
                } else {
                    dot(isum, v, q, LIN_BLOCK);
                    for (int r = 0; r < LIN_ROWS; r++)
                        isum[r] *= s.sc[b][r];
                }
                for (int r = 0; r < LIN_ROWS; r++) {
                    e[t][r] = fmaf((float)isum[r], a->d[at], e[t][r]);
                    if (format == LIN_Q2_K) {
                        const float *h = a->ds_halves + (b0 + b) * 2 * w + t;
                        n[t][r] = fmaf((float)s.mn[2 * b][r], h[0], n[t][r]);
                        n[t][r] = fmaf((float)s.mn[2 * b + 1][r], h[w], n[t][r]);
                    } else if (minima) {
                        n[t][r] = fmaf((float)s.mn[b][r], a->ds[at], n[t][r]);
                    }
                }
            }
        }
        for (int t = 0; t < w; t++) {
            for (int r = 0; r < LIN_ROWS; r++) {
                float *o = &acc[t][r];
                if (minima) *o = fmaf(n[t][r], -s.dmin[r], *o);
                *o = fmaf(e[t][r], s.d[r], *o);
            }
        }
    }
    put(a, acc, w);
}

#define TILE(NAME, KIND, FORMAT)               \
    static void NAME(const lin_tile *a, int w) \
    {                                          \
        KIND(FORMAT, a, w);                    \
    }
TILE(tile_q4_0, tile_blocks, LIN_Q4_0)
TILE(tile_q4_1, tile_blocks, LIN_Q4_1)
TILE(tile_q5_0, tile_blocks, LIN_Q5_0)
TILE(tile_q5_1, tile_blocks, LIN_Q5_1)
TILE(tile_q8_0, tile_blocks, LIN_Q8_0)
TILE(tile_iq4_nl, tile_blocks, LIN_IQ4_NL)
TILE(tile_mxfp4, tile_blocks, LIN_MXFP4)
TILE(tile_q4_k, tile_super, LIN_Q4_K)
TILE(tile_q5_k, tile_super, LIN_Q5_K)
TILE(tile_q6_k, tile_super, LIN_Q6_K)
TILE(tile_iq4_xs, tile_super, LIN_IQ4_XS)
TILE(tile_q3_k, tile_super, LIN_Q3_K)
TILE(tile_q2_k, tile_super, LIN_Q2_K)

const lin_isa *lin_isa_plain(void)
{
    static const lin_isa isa = {
        .fma = fma_panel,
        .unpack = unpack,
        .quantize = quantize,
        .tile = {[LIN_Q4_0] = tile_q4_0,
                 [LIN_Q4_1] = tile_q4_1,
                 [LIN_Q5_0] = tile_q5_0,
                 [LIN_Q5_1] = tile_q5_1,
                 [LIN_Q8_0] = tile_q8_0,
                 [LIN_IQ4_NL] = tile_iq4_nl,
                 [LIN_MXFP4] = tile_mxfp4,
                 [LIN_Q4_K] = tile_q4_k,
                 [LIN_Q5_K] = tile_q5_k,
                 [LIN_Q6_K] = tile_q6_k,
                 [LIN_IQ4_XS] = tile_iq4_xs,
                 [LIN_Q3_K] = tile_q3_k,
                 [LIN_Q2_K] = tile_q2_k},
    };
    return &isa;
}
