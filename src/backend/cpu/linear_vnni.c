/* backend/cpu/linear_vnni.c - integer kernels for AVX-512 VNNI.
 *
 * vpdpbusd multiplies 16 rows x 4 columns of unsigned weight quants by the same 4 columns of one
 * token, broadcast from memory. A tile keeps one register of int32 sums and one of float sums for
 * each token; W, the number of tokens, is a constant in every instance, as arrays that are indexed
 * by a variable would live in memory. */
#if defined(__AVX512VNNI__)
#include <immintrin.h>

#include "backend/cpu/linear_tiles.h"

#ifndef AHEAD
enum { AHEAD = 4096 };
#endif

#define EACH_TOKEN(t) _Pragma("GCC unroll 8") for (int t = 0; t < W; t++)

LIN_INLINE __m512i load(const uint8_t *p)
{
    return _mm512_load_si512(p);
}

LIN_INLINE __m512i dword(const int8_t *q)
{
    int32_t v;
    memcpy(&v, q, 4);
    return _mm512_set1_epi32(v);
}

/* The code book of a table format, moved up by 128. */
LIN_INLINE __m512i table(lin_format format)
{
    const int8_t *t = format == LIN_MXFP4 ? lin_fp4 : lin_nl;
    const __m128i v = _mm_xor_si128(_mm_loadu_si128((const __m128i *)t), _mm_set1_epi8(-128));
    return _mm512_broadcast_i32x4(v);
}

/* Bits [4, 4 + n) of each byte from the bit plane: bit s of 8 (fifth bits) or 2i of 8 (upper
 * pairs). */
LIN_INLINE __m512i upper_bits(__m512i plane, int at, __m512i nibble, int n)
{
    const __m512i moved = at < 4   ? _mm512_slli_epi32(plane, (unsigned)(4 - at))
                          : at > 4 ? _mm512_srli_epi32(plane, (unsigned)(at - 4))
                                   : plane;
    const __m512i mask = _mm512_set1_epi8(n == 1 ? 0x10 : 0x30);
    return _mm512_ternarylogic_epi32(nibble, moved, mask, 0xf8); /* nibble | (moved & mask) */
}

/* i[t] += 4-column dot products of step s. */
#define DOT(s, w)                                                                                  \
    do {                                                                                           \
        EACH_TOKEN(t_) i[t_] = _mm512_dpbusd_epi32(i[t_], w, dword(q + t_ * LIN_BLOCK + 4 * (s))); \
    } while (0)

/* i[t] += w . q[t] over a block. */
LIN_INLINE void dot_block(lin_format format, __m512i *i, const uint8_t *w, const int8_t *q, int W)
{
    if (format == LIN_Q8_0) {
#pragma GCC unroll 8
        for (int s = 0; s < 8; s++) {
            const __m512i v = load(w + 64 * s);
            DOT(s, v);
        }
        return;
    }
    const __m512i low = _mm512_set1_epi8(15);
    const bool five = format == LIN_Q5_0 || format == LIN_Q5_1 || format == LIN_Q5_K;
    const bool book = format == LIN_IQ4_NL || format == LIN_MXFP4 || format == LIN_IQ4_XS;
    const __m512i plane = five ? load(w + 256) : low;
#pragma GCC unroll 4
    for (int s = 0; s < 4; s++) {
        const __m512i pair = load(w + 64 * s);
        __m512i a = _mm512_and_si512(pair, low);
        __m512i b = _mm512_and_si512(_mm512_srli_epi32(pair, 4), low);
        if (five) {
            a = upper_bits(plane, s, a, 1);
            b = upper_bits(plane, s + 4, b, 1);
        }
        if (book) {
            a = _mm512_shuffle_epi8(table(format), a);
            b = _mm512_shuffle_epi8(table(format), b);
        }
        DOT(s, a);
        DOT(s + 4, b);
    }
}

/* i[t] += w . q[t] over the columns [16 half, 16 half + 16) of a block of a halved format. */
LIN_INLINE void dot_half(lin_format format, __m512i *i, const uint8_t *w, const int8_t *q, int half,
                         int W)
{
    const __m512i low = _mm512_set1_epi8(format == LIN_Q2_K ? 3 : 15);
    const __m512i plane = format == LIN_Q3_K   ? low
                          : format == LIN_Q2_K ? load(w + 64 * half)
                                               : load(w + 256 + 64 * half);
#pragma GCC unroll 4
    for (int s = 0; s < 4; s++) {
        __m512i a =
            format == LIN_Q2_K ? _mm512_srli_epi32(plane, (unsigned)(2 * s)) : load(w + 64 * s);
        if (half && format != LIN_Q2_K) a = _mm512_srli_epi32(a, 4);
        a = _mm512_and_si512(a, low);
        if (format == LIN_Q6_K) a = upper_bits(plane, 2 * s, a, 2);
        DOT(s + 4 * half, a);
    }
}

LIN_INLINE __m512 halves(const uint8_t *s)
{
    return _mm512_cvtph_ps(_mm256_load_si256((const __m256i *)s));
}

LIN_INLINE __m512 block_scale(lin_format format, const uint8_t *s)
{
    if (format != LIN_MXFP4) return halves(s);
    const __m512i e = _mm512_cvtepu8_epi32(_mm_load_si128((const __m128i *)s));
    const __m512i tiny = _mm512_sllv_epi32(_mm512_set1_epi32(0x00200000), e);
    const __m512i bits = _mm512_slli_epi32(_mm512_sub_epi32(e, _mm512_set1_epi32(1)), 23);
    const __mmask16 is_tiny = _mm512_cmplt_epi32_mask(e, _mm512_set1_epi32(2));
    return _mm512_castsi512_ps(_mm512_mask_blend_epi32(is_tiny, bits, tiny));
}

/* Asks for [p + AHEAD, p + AHEAD + n). Quants and scales of a group are neighbours and the groups
 * follow each other, so the same distance for both covers every byte once, also across groups. */
LIN_INLINE void prefetch(const uint8_t *p, int n)
{
#pragma GCC unroll 8
    for (int i = 0; i < n; i += 64)
        _mm_prefetch((const char *)p + AHEAD + i, _MM_HINT_T0);
}

LIN_INLINE void put(const lin_tile *a, const __m512 *acc, int W)
{
    const __m512 bias = _mm512_load_ps(a->bias);
    const __mmask16 rows = (__mmask16)(0xffffu >> (LIN_ROWS - a->n_rows));
    float *out = a->out;
    EACH_TOKEN(t)
    {
        _mm512_mask_storeu_ps(out, rows, _mm512_add_ps(acc[t], bias));
        out += a->out_stride;
    }
}

LIN_INLINE void tile_blocks(lin_format format, const lin_tile *a, int W)
{
    const lin_format_info *f = &lin_formats[format];
    const int quant_bytes = format == LIN_Q8_0                         ? 512
                            : format == LIN_Q5_0 || format == LIN_Q5_1 ? 320
                                                                       : 256;
    const int scale_bytes = f->scale_bytes;
    const bool minima = format == LIN_Q4_1 || format == LIN_Q5_1;
    const uint8_t *w = a->quants, *s = a->scales;
    const int8_t *q = a->q;
    const float *d = a->d, *ds = a->ds;
    const int32_t *start = a->start;
    __m512 acc[8];
    EACH_TOKEN(t) acc[t] = _mm512_setzero_ps();
    for (int64_t b = a->n_blocks; b > 0; b--) {
        __m512i i[8];
        EACH_TOKEN(t) i[t] = minima ? _mm512_setzero_si512() : _mm512_set1_epi32(start[t]);
        prefetch(w, quant_bytes);
        prefetch(s, scale_bytes);
        dot_block(format, i, w, q, W);
        const __m512 scale = block_scale(format, s);
        EACH_TOKEN(t)
        {
            const __m512 m = _mm512_mul_ps(scale, _mm512_set1_ps(d[t]));
            acc[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(i[t]), m, acc[t]);
        }
        if (minima) {
            const __m512 min = halves(s + 32);
            EACH_TOKEN(t) acc[t] = _mm512_fmadd_ps(min, _mm512_set1_ps(ds[t]), acc[t]);
        }
        w += quant_bytes;
        s += scale_bytes;
        q += W * LIN_BLOCK;
        d += W;
        ds += W;
        if (!minima) start += W;
    }
    put(a, acc, W);
}

/* Scales and minima of Q4_K and Q5_K, 6 bits each, to bytes: [8][16] each. */
LIN_INLINE void unpack_six(uint8_t *sc, uint8_t *mn, const uint8_t *s)
{
    const __m512i x = load(s), y = load(s + 64), z = load(s + 128);
    const __m512i low6 = _mm512_set1_epi8(63), low4 = _mm512_set1_epi8(15);
    const __m512i up = _mm512_set1_epi8(0x30);
    _mm512_store_si512(sc, _mm512_and_si512(x, low6));
    _mm512_store_si512(mn, _mm512_and_si512(y, low6));
    _mm512_store_si512(sc + 64, _mm512_ternarylogic_epi32(_mm512_and_si512(z, low4),
                                                          _mm512_srli_epi32(x, 2), up, 0xf8));
    _mm512_store_si512(mn + 64,
                       _mm512_ternarylogic_epi32(_mm512_and_si512(_mm512_srli_epi32(z, 4), low4),
                                                 _mm512_srli_epi32(y, 2), up, 0xf8));
}

/* The same of Q2_K, 4 bits each: [16][16]. */
LIN_INLINE void unpack_nibbles(uint8_t *sc, uint8_t *mn, const uint8_t *s)
{
    const __m512i low4 = _mm512_set1_epi8(15);
    for (int i = 0; i < 256; i += 64) {
        _mm512_store_si512(sc + i, _mm512_and_si512(load(s + i), low4));
        _mm512_store_si512(mn + i, _mm512_and_si512(_mm512_srli_epi32(load(s + i), 4), low4));
    }
}

LIN_INLINE __m512i rows_i8(const uint8_t *s)
{
    return _mm512_cvtepi8_epi32(_mm_load_si128((const __m128i *)s));
}

LIN_INLINE void tile_super(lin_format format, const lin_tile *a, int W)
{
    const int quant_bytes = format == LIN_Q6_K   ? 384
                            : format == LIN_Q5_K ? 320
                            : format == LIN_Q2_K ? 128
                                                 : 256;
    const int scale_bytes = format == LIN_Q6_K || format == LIN_Q3_K ? 288
                            : format == LIN_Q2_K                     ? 320
                            : format == LIN_IQ4_XS                   ? 160
                                                                     : 256;
    const int d_at = lin_halved(format) ? 256 : format == LIN_IQ4_XS ? 128 : 192;
    const bool minima = format == LIN_Q4_K || format == LIN_Q5_K || format == LIN_Q2_K;
    const int n_minima = format == LIN_Q2_K ? 16 : 8;
    _Alignas(64) uint8_t sc_bytes[256], mn[256];
    _Alignas(64) float sum[8][LIN_ROWS]; /* 8 more registers would not fit into the inner loops */
    const uint8_t *w = a->quants, *s = a->scales;
    const int8_t *q = a->q;
    const float *d = a->d, *ds = format == LIN_Q2_K ? a->ds_halves : a->ds;
    const int32_t *start = a->start;
    EACH_TOKEN(t) _mm512_store_ps(sum[t], _mm512_setzero_ps());
    for (int64_t b = a->n_blocks; b > 0; b -= 8) {
        const uint8_t *sc = s;
        if (minima) {
            if (format == LIN_Q2_K)
                unpack_nibbles(sc_bytes, mn, s);
            else
                unpack_six(sc_bytes, mn, s);
            sc = sc_bytes;
            __m512 n[8];
            EACH_TOKEN(t) n[t] = _mm512_setzero_ps();
            for (int j = 0; j < n_minima; j++, ds += W) {
                const __m512 m = _mm512_cvtepi32_ps(rows_i8(mn + 16 * j));
                EACH_TOKEN(t) n[t] = _mm512_fmadd_ps(m, _mm512_set1_ps(ds[t]), n[t]);
            }
            const __m512 dmin = halves(s + d_at + 32);
            EACH_TOKEN(t)
            _mm512_store_ps(sum[t], _mm512_fnmadd_ps(n[t], dmin, _mm512_load_ps(sum[t])));
        }
        __m512 e[8];
        EACH_TOKEN(t) e[t] = _mm512_setzero_ps();
        prefetch(s, scale_bytes);
        for (int j = 0; j < 8; j++) {
            __m512i i[8], v[8];
            prefetch(w, quant_bytes);
            if (lin_halved(format)) {
                EACH_TOKEN(t) i[t] = minima ? _mm512_setzero_si512() : _mm512_set1_epi32(start[t]);
                dot_half(format, i, w, q, 0, W);
                const __m512i sc0 = rows_i8(sc), sc1 = rows_i8(sc + 16);
                EACH_TOKEN(t) v[t] = _mm512_mullo_epi32(i[t], sc0);
                EACH_TOKEN(t)
                i[t] = minima ? _mm512_setzero_si512() : _mm512_set1_epi32(start[W + t]);
                dot_half(format, i, w, q, 1, W);
                EACH_TOKEN(t) i[t] = _mm512_add_epi32(v[t], _mm512_mullo_epi32(i[t], sc1));
                if (!minima) start += 2 * W;
                sc += 32;
            } else {
                EACH_TOKEN(t) i[t] = minima ? _mm512_setzero_si512() : _mm512_set1_epi32(start[t]);
                dot_block(format, i, w, q, W);
                const __m512i sc0 = rows_i8(sc);
                EACH_TOKEN(t) i[t] = _mm512_mullo_epi32(i[t], sc0);
                if (!minima) start += W;
                sc += 16;
            }
            EACH_TOKEN(t)
            e[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(i[t]), _mm512_set1_ps(d[t]), e[t]);
            w += quant_bytes;
            q += W * LIN_BLOCK;
            d += W;
        }
        const __m512 scale = halves(s + d_at);
        EACH_TOKEN(t)
        _mm512_store_ps(sum[t], _mm512_fmadd_ps(e[t], scale, _mm512_load_ps(sum[t])));
        s += scale_bytes;
    }
    __m512 acc[8];
    EACH_TOKEN(t) acc[t] = _mm512_load_ps(sum[t]);
    put(a, acc, W);
}

#define TILE(NAME, KIND, FORMAT)               \
    static void NAME(const lin_tile *a, int w) \
    {                                          \
        switch (w) {                           \
        case 1:                                \
            KIND(FORMAT, a, 1);                \
            break;                             \
        case 2:                                \
            KIND(FORMAT, a, 2);                \
            break;                             \
        case 3:                                \
            KIND(FORMAT, a, 3);                \
            break;                             \
        case 4:                                \
            KIND(FORMAT, a, 4);                \
            break;                             \
        case 5:                                \
            KIND(FORMAT, a, 5);                \
            break;                             \
        case 6:                                \
            KIND(FORMAT, a, 6);                \
            break;                             \
        case 7:                                \
            KIND(FORMAT, a, 7);                \
            break;                             \
        default:                               \
            KIND(FORMAT, a, 8);                \
            break;                             \
        }                                      \
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

const lin_isa *lin_isa_vnni(void)
{
    static const lin_isa isa = {
        .fma = lin_fma_avx512,
        .unpack = lin_unpack_avx512,
        .quantize = lin_quantize_avx512,
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
#endif
