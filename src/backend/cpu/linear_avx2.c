/* backend/cpu/linear_avx2.c - the kernels for AVX2 and FMA. */
#if defined(__AVX2__)
#include <immintrin.h>

#include "backend/cpu/linear_tiles.h"

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

static void unpack(float (*panel)[LIN_ROWS], lin_format format, const uint8_t *quants,
                   const uint8_t *scales, int n)
{
    lin_unpack_any(panel, format, quants, scales, n);
}

static int32_t fold(__m256i v, bool max)
{
    __m128i a = _mm256_castsi256_si128(v), b = _mm256_extracti128_si256(v, 1);
    a = max ? _mm_max_epi32(a, b) : _mm_add_epi32(a, b);
    b = _mm_shuffle_epi32(a, 0x4e);
    a = max ? _mm_max_epi32(a, b) : _mm_add_epi32(a, b);
    b = _mm_shuffle_epi32(a, 0xb1);
    return _mm_cvtsi128_si32(max ? _mm_max_epi32(a, b) : _mm_add_epi32(a, b));
}

/* lin_quantize_any() with a token's 32 values in four registers. */
static void quantize(const lin_acts *a, const float *x, int64_t x_stride, int w, int64_t b0,
                     int64_t b1)
{
    const __m256i positive = _mm256_set1_epi32(0x7fffffff);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7); /* undoes the packs' lanes */
    for (int64_t b = b0; b < b1; b++, x += LIN_BLOCK) {
        for (int t = 0; t < w; t++) {
            const int64_t at = b * w + t;
            __m256 v[4];
            __m256i q[4], big = _mm256_setzero_si256();
            for (int i = 0; i < 4; i++) {
                v[i] = _mm256_loadu_ps(x + t * x_stride + 8 * i);
                big = _mm256_max_epi32(big, _mm256_and_si256(_mm256_castps_si256(v[i]), positive));
            }
            float d, id;
            const __m256i finite = _mm256_set1_epi32(lin_scale(&d, &id, fold(big, true)) ? -1 : 0);
            for (int i = 0; i < 4; i++)
                q[i] = _mm256_and_si256(
                    finite, _mm256_cvtps_epi32(_mm256_mul_ps(v[i], _mm256_set1_ps(id))));
            const __m256i packed =
                _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
            _mm256_storeu_si256((__m256i *)(a->q + at * LIN_BLOCK),
                                _mm256_permutevar8x32_epi32(packed, order));
            lin_put_scales(a, b, w, t, d, fold(_mm256_add_epi32(q[0], q[1]), false),
                           fold(_mm256_add_epi32(q[2], q[3]), false));
        }
    }
}

/* ---- integer kernels
 * -----------------------------------------------------------------------------
 *
 * vpmaddubsw adds pairs of u8 x s8 products into s16 with saturation. Unsigned quants up to 15, 31
 * and 63 times |q| <= 127 leave room for 8, 4 and 2 such pairs in s16 before they must be widened.
 * Quants of a full byte would saturate, so byte and table formats multiply |w| by q with the sign
 * of w: 2 * 128 * 127 < 2^15. Those need no start value, as their weights are signed already. */

LIN_INLINE bool is_signed(lin_format format)
{
    return format == LIN_Q8_0 || format == LIN_IQ4_NL || format == LIN_IQ4_XS ||
           format == LIN_MXFP4;
}

LIN_INLINE __m256i load(const uint8_t *p)
{
    return _mm256_load_si256((const __m256i *)p);
}

LIN_INLINE __m256i dword(const int8_t *q)
{
    int32_t v;
    memcpy(&v, q, 4);
    return _mm256_set1_epi32(v);
}

/* The quants of step s for 8 rows; w points at their 32 bytes of the block's first step. */
LIN_INLINE __m256i step_quants(lin_format format, const uint8_t *w, int s)
{
    const __m256i low = _mm256_set1_epi8(15);
    if (format == LIN_Q8_0) return _mm256_xor_si256(load(w + 64 * s), _mm256_set1_epi8(-128));
    if (format == LIN_Q2_K)
        return _mm256_and_si256(_mm256_srli_epi32(load(w + 64 * (s >> 2)), 2 * (s & 3)),
                                _mm256_set1_epi8(3));
    __m256i v = load(w + 64 * (s & 3));
    if (s & 4) v = _mm256_srli_epi32(v, 4);
    v = _mm256_and_si256(v, low);
    if (format == LIN_Q5_0 || format == LIN_Q5_1 || format == LIN_Q5_K) {
        __m256i p = load(w + 256);
        p = s < 4 ? _mm256_slli_epi32(p, 4 - s) : _mm256_srli_epi32(p, s - 4);
        v = _mm256_or_si256(v, _mm256_and_si256(p, _mm256_set1_epi8(0x10)));
    } else if (format == LIN_Q6_K) {
        const int at = 2 * (s & 3);
        __m256i p = load(w + 256 + 64 * (s >> 2));
        p = at < 4 ? _mm256_slli_epi32(p, 4 - at) : _mm256_srli_epi32(p, at - 4);
        v = _mm256_or_si256(v, _mm256_and_si256(p, _mm256_set1_epi8(0x30)));
    } else if (is_signed(format)) {
        const int8_t *t = format == LIN_MXFP4 ? lin_fp4 : lin_nl;
        v = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)t)),
                                v);
    }
    return v;
}

/* i[t] += w . q over steps [s0, s1) for W tokens at q, q + 32, ... */
LIN_INLINE void dot_steps(lin_format format, __m256i *i, const uint8_t *w, const int8_t *q, int s0,
                          int s1, int W)
{
    const __m256i ones = _mm256_set1_epi16(1);
    const int room = is_signed(format)                                                ? 1
                     : format == LIN_Q6_K                                             ? 2
                     : format == LIN_Q5_0 || format == LIN_Q5_1 || format == LIN_Q5_K ? 4
                                                                                      : 8;
    __m256i pairs[4];
#pragma GCC unroll 8
    for (int s = s0; s < s1; s++) {
        const __m256i v = step_quants(format, w, s);
        const __m256i size = is_signed(format) ? _mm256_abs_epi8(v) : v;
        const bool first = (s - s0) % room == 0, last = (s - s0) % room == room - 1 || s == s1 - 1;
#pragma GCC unroll 4
        for (int t = 0; t < W; t++) {
            __m256i x = dword(q + t * LIN_BLOCK + 4 * s);
            if (is_signed(format)) x = _mm256_sign_epi8(x, v);
            const __m256i p = _mm256_maddubs_epi16(size, x);
            pairs[t] = first ? p : _mm256_add_epi16(pairs[t], p);
            if (last) i[t] = _mm256_add_epi32(i[t], _mm256_madd_epi16(pairs[t], ones));
        }
    }
}

LIN_INLINE __m256 halves(const uint8_t *s)
{
    return _mm256_cvtph_ps(_mm_load_si128((const __m128i *)s));
}

LIN_INLINE __m256 block_scale(lin_format format, const uint8_t *s, int half)
{
    if (format != LIN_MXFP4) return halves(s + 16 * half);
    float d[8];
    for (int r = 0; r < 8; r++)
        d[r] = lin_e8m0(s[8 * half + r]);
    return _mm256_loadu_ps(d);
}

LIN_INLINE void put(const lin_tile *a, const __m256 *acc, int half, int t0, int W)
{
    const __m256 bias = _mm256_load_ps(a->bias + 8 * half);
    const __m256i row = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(a->n_rows - 8 * half), row);
    for (int t = 0; t < W; t++)
        _mm256_maskstore_ps(a->out + (t0 + t) * a->out_stride + 8 * half, mask,
                            _mm256_add_ps(acc[t], bias));
}

/* Rows [8 half, 8 half + 8) times tokens [t0, t0 + W) of the tile's w. */
LIN_INLINE void part_blocks(lin_format format, const lin_tile *a, int w, int half, int t0, int W)
{
    const lin_format_info *f = &lin_formats[format];
    const bool minima = format == LIN_Q4_1 || format == LIN_Q5_1;
    __m256 acc[4];
    for (int t = 0; t < W; t++)
        acc[t] = _mm256_setzero_ps();
    for (int64_t b = 0; b < a->n_blocks; b++) {
        const uint8_t *s = a->scales + b * f->scale_bytes;
        const int64_t at = b * w + t0;
        __m256i i[4];
        for (int t = 0; t < W; t++)
            i[t] = minima || is_signed(format) ? _mm256_setzero_si256()
                                               : _mm256_set1_epi32(a->start[at + t]);
        dot_steps(format, i, a->quants + b * f->quant_bytes + 32 * half, a->q + at * LIN_BLOCK, 0,
                  8, W);
        const __m256 scale = block_scale(format, s, half);
#pragma GCC unroll 4
        for (int t = 0; t < W; t++) {
            const __m256 m = _mm256_mul_ps(scale, _mm256_broadcast_ss(a->d + at + t));
            acc[t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(i[t]), m, acc[t]);
            if (minima)
                acc[t] = _mm256_fmadd_ps(halves(s + 32 + 16 * half),
                                         _mm256_broadcast_ss(a->ds + at + t), acc[t]);
        }
    }
    put(a, acc, half, t0, W);
}

LIN_INLINE __m256i rows_i8(const int8_t *s)
{
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)s));
}

LIN_INLINE void part_super(lin_format format, const lin_tile *a, int w, int half, int t0, int W)
{
    const lin_format_info *f = &lin_formats[format];
    const bool minima = format == LIN_Q4_K || format == LIN_Q5_K || format == LIN_Q2_K;
    const int n_minima = format == LIN_Q2_K ? 16 : 8;
    const float *ds = (format == LIN_Q2_K ? a->ds_halves : a->ds) + t0;
    __m256 acc[4];
    for (int t = 0; t < W; t++)
        acc[t] = _mm256_setzero_ps();
    for (int64_t b0 = 0; b0 < a->n_blocks; b0 += 8) {
        lin_super s;
        lin_super_scales(&s, format, a->scales + b0 / 8 * f->scale_bytes);
        if (minima) {
            __m256 n[4];
            for (int t = 0; t < W; t++)
                n[t] = _mm256_setzero_ps();
            for (int b = 0; b < n_minima; b++) {
                const __m256 m = _mm256_cvtepi32_ps(rows_i8(s.mn[b] + 8 * half));
#pragma GCC unroll 4
                for (int t = 0; t < W; t++)
                    n[t] = _mm256_fmadd_ps(
                        m, _mm256_broadcast_ss(ds + (b0 / 8 * n_minima + b) * w + t), n[t]);
            }
            for (int t = 0; t < W; t++)
                acc[t] = _mm256_fnmadd_ps(n[t], _mm256_loadu_ps(s.dmin + 8 * half), acc[t]);
        }
        __m256 e[4];
        for (int t = 0; t < W; t++)
            e[t] = _mm256_setzero_ps();
        for (int b = 0; b < 8; b++) {
            const int64_t at = (b0 + b) * w + t0;
            const uint8_t *wq = a->quants + (b0 + b) * f->quant_bytes + 32 * half;
            const int8_t *q = a->q + at * LIN_BLOCK;
            __m256i i[4], v[4];
            if (lin_halved(format)) {
                const int32_t *start = minima ? NULL : a->start + (b0 + b) * 2 * w + t0;
                for (int t = 0; t < W; t++)
                    i[t] = minima ? _mm256_setzero_si256() : _mm256_set1_epi32(start[t]);
                dot_steps(format, i, wq, q, 0, 4, W);
                const __m256i sc0 = rows_i8(s.sc[2 * b] + 8 * half);
                const __m256i sc1 = rows_i8(s.sc[2 * b + 1] + 8 * half);
                for (int t = 0; t < W; t++) {
                    v[t] = _mm256_mullo_epi32(i[t], sc0);
                    i[t] = minima ? _mm256_setzero_si256() : _mm256_set1_epi32(start[w + t]);
                }
                dot_steps(format, i, wq, q, 4, 8, W);
                for (int t = 0; t < W; t++)
                    i[t] = _mm256_add_epi32(v[t], _mm256_mullo_epi32(i[t], sc1));
            } else {
                for (int t = 0; t < W; t++)
                    i[t] = _mm256_setzero_si256();
                dot_steps(format, i, wq, q, 0, 8, W);
                const __m256i sc0 = rows_i8(s.sc[b] + 8 * half);
                for (int t = 0; t < W; t++)
                    i[t] = _mm256_mullo_epi32(i[t], sc0);
            }
#pragma GCC unroll 4
            for (int t = 0; t < W; t++)
                e[t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(i[t]), _mm256_broadcast_ss(a->d + at + t),
                                       e[t]);
        }
        for (int t = 0; t < W; t++)
            acc[t] = _mm256_fmadd_ps(e[t], _mm256_loadu_ps(s.d + 8 * half), acc[t]);
    }
    put(a, acc, half, t0, W);
}

/* The largest W that 16 registers hold is 4. */
#define TILE(NAME, PART, FORMAT)                       \
    static void NAME(const lin_tile *a, int w)         \
    {                                                  \
        for (int half = 0; half < 2; half++) {         \
            int t = 0;                                 \
            for (; t + 4 <= w; t += 4)                 \
                PART(FORMAT, a, w, half, t, 4);        \
            if (t + 2 <= w) {                          \
                PART(FORMAT, a, w, half, t, 2);        \
                t += 2;                                \
            }                                          \
            if (t < w) PART(FORMAT, a, w, half, t, 1); \
        }                                              \
    }
TILE(tile_q4_0, part_blocks, LIN_Q4_0)
TILE(tile_q4_1, part_blocks, LIN_Q4_1)
TILE(tile_q5_0, part_blocks, LIN_Q5_0)
TILE(tile_q5_1, part_blocks, LIN_Q5_1)
TILE(tile_q8_0, part_blocks, LIN_Q8_0)
TILE(tile_iq4_nl, part_blocks, LIN_IQ4_NL)
TILE(tile_mxfp4, part_blocks, LIN_MXFP4)
TILE(tile_q4_k, part_super, LIN_Q4_K)
TILE(tile_q5_k, part_super, LIN_Q5_K)
TILE(tile_q6_k, part_super, LIN_Q6_K)
TILE(tile_iq4_xs, part_super, LIN_IQ4_XS)
TILE(tile_q3_k, part_super, LIN_Q3_K)
TILE(tile_q2_k, part_super, LIN_Q2_K)

#define INTEGER_TILES                                                               \
    {                                                                               \
        [LIN_Q4_0] = tile_q4_0, [LIN_Q4_1] = tile_q4_1, [LIN_Q5_0] = tile_q5_0,     \
        [LIN_Q5_1] = tile_q5_1, [LIN_Q8_0] = tile_q8_0, [LIN_IQ4_NL] = tile_iq4_nl, \
        [LIN_MXFP4] = tile_mxfp4, [LIN_Q4_K] = tile_q4_k, [LIN_Q5_K] = tile_q5_k,   \
        [LIN_Q6_K] = tile_q6_k, [LIN_IQ4_XS] = tile_iq4_xs, [LIN_Q3_K] = tile_q3_k, \
        [LIN_Q2_K] = tile_q2_k                                                      \
    }

const lin_isa *lin_isa_avx2(void)
{
    static const lin_isa isa = {
        .fma = fma_panel, .unpack = unpack, .quantize = quantize, .tile = INTEGER_TILES};
    return &isa;
}

/* Without VNNI, 512-bit integer kernels gain nothing over these. */
const lin_isa *lin_isa_avx512(void)
{
    static const lin_isa isa = {.fma = lin_fma_avx512,
                                .unpack = lin_unpack_avx512,
                                .quantize = lin_quantize_avx512,
                                .tile = INTEGER_TILES};
    return &isa;
}
#endif
