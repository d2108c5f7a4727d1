/* kernels/pack.h - weights of GGUF blocks, one by one, and one thread's share of a weight tile.
 *
 * C and CUDA at once: repack.cu runs it on the GPU, its test runs the very same on the host.
 * A weight is value = s (q - zero) + m with the integer q of its format (bgk.h): 0-15, 0-31, 0-63,
 * 0-255; s and m are exact in float32, and so is everything up to the last sum. Rows need no
 * alignment. Columns count from the start of a row, which is the start of a block. */
#ifndef BGK_PACK_H
#define BGK_PACK_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "bgk.h"

#ifdef __CUDACC__
#include <cuda_fp16.h>
#define PACK_FN static __host__ __device__ inline
PACK_FN float pack_half(uint16_t h)
{
    return __half2float(__ushort_as_half(h));
}
PACK_FN uint16_t pack_to_half(float v)
{
    return __half_as_ushort(__float2half_rn(v));
}
#else
#include "base/f16.h"
#define PACK_FN static inline __attribute__((unused))
PACK_FN float pack_half(uint16_t h)
{
    return bg_f16_to_f32(h);
}
PACK_FN uint16_t pack_to_half(float v)
{
    return bg_f32_to_f16(v);
}
#endif

PACK_FN uint32_t pack_load16(const uint8_t *b)
{
    return b[0] | (uint32_t)b[1] << 8;
}

PACK_FN float pack_load_half(const uint8_t *b)
{
    return pack_half((uint16_t)pack_load16(b));
}

PACK_FN float pack_float(uint32_t bits)
{
    float v;
    memcpy(&v, &bits, 4);
    return v;
}

PACK_FN uint32_t pack_bits(float v)
{
    uint32_t bits;
    memcpy(&bits, &v, 4);
    return bits;
}

/* ---- blocks ------------------------------------------------------------------------------------
 */

/* Start of column c's block, for types of blocks. */
PACK_FN const uint8_t *pack_block(int type, const uint8_t *row, int c)
{
    switch (type) {
    case BGK_Q4_0:
    case BGK_IQ4_NL:
        return row + (int64_t)(c / 32) * 18;
    case BGK_Q4_1:
        return row + (int64_t)(c / 32) * 20;
    case BGK_Q5_0:
        return row + (int64_t)(c / 32) * 22;
    case BGK_Q5_1:
        return row + (int64_t)(c / 32) * 24;
    case BGK_Q8_0:
        return row + (int64_t)(c / 32) * 34;
    case BGK_MXFP4:
        return row + (int64_t)(c / 32) * 17;
    case BGK_Q3_K:
        return row + (int64_t)(c / 256) * 110;
    case BGK_Q4_K:
        return row + (int64_t)(c / 256) * 144;
    case BGK_Q5_K:
        return row + (int64_t)(c / 256) * 176;
    case BGK_Q6_K:
        return row + (int64_t)(c / 256) * 210;
    case BGK_IQ4_XS:
        return row + (int64_t)(c / 256) * 136;
    default:
        return row;
    }
}

/* Element i of 32 nibbles in 16 bytes: low nibbles hold 0..15, high ones 16..31. */
PACK_FN int pack_nibble(const uint8_t *q, int i)
{
    return q[i % 16] >> 4 * (i / 16) & 15;
}

/* Byte n of the 16 in the two words: the tables of the four-bit types, plus 128. */
PACK_FN int pack_lookup(uint64_t low, uint64_t high, int n)
{
    return (int)((n < 8 ? low : high) >> 8 * (n % 8) & 255);
}

PACK_FN int pack_iq4(int n) /* -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113 */
{
    return pack_lookup(0x766A5D4F3F2D1801ull, 0xF1D9C5B5A6998D81ull, n);
}

PACK_FN int pack_fp4(int n) /* twice E2M1: 0 1 2 3 4 6 8 12 and their negatives */
{
    return pack_lookup(0x8C88868483828180ull, 0x74787A7C7D7E7F80ull, n);
}

/* The integer of column c. */
PACK_FN int pack_quant(int type, const uint8_t *row, int c)
{
    const uint8_t *b = pack_block(type, row, c);
    const int i = c % 32, j = c % 256 / 32, n = j / 4, l = 32 * n + i;
    switch (type) {
    case BGK_Q4_0:
        return pack_nibble(b + 2, i);
    case BGK_Q4_1:
        return pack_nibble(b + 4, i);
    case BGK_Q5_0:
        return pack_nibble(b + 6, i) | (b[2 + i / 8] >> i % 8 & 1) << 4;
    case BGK_Q5_1:
        return pack_nibble(b + 8, i) | (b[4 + i / 8] >> i % 8 & 1) << 4;
    case BGK_Q8_0:
        return (int8_t)b[2 + i] + 128;
    case BGK_IQ4_NL:
        return pack_iq4(pack_nibble(b + 2, i));
    case BGK_MXFP4:
        return pack_fp4(pack_nibble(b + 1, i));
    case BGK_Q3_K:
        return (b[32 + l] >> 2 * (j % 4) & 3) + 28 + (b[i] >> j & 1) * 4;
    case BGK_Q4_K:
        return b[16 + 32 * (j / 2) + i] >> 4 * (j & 1) & 15;
    case BGK_Q5_K:
        return (b[48 + 32 * (j / 2) + i] >> 4 * (j & 1) & 15) | (b[16 + i] >> j & 1) << 4;
    case BGK_Q6_K:
        return (b[64 * n + 32 * (j & 1) + i] >> 4 * (j % 4 / 2) & 15) |
               (b[128 + l] >> 2 * (j % 4) & 3) << 4;
    case BGK_IQ4_XS:
        return pack_iq4(pack_nibble(b + 8 + 16 * j, i));
    default:
        return 0;
    }
}

/* Scale or minimum j of the 8 pairs of 6 bits in s[12] of Q4_K and Q5_K. */
PACK_FN int pack_scale6(const uint8_t *s, int j)
{
    return j < 4 ? s[j] & 63 : (s[j + 4] & 15) | s[j - 4] >> 6 << 4;
}

PACK_FN int pack_min6(const uint8_t *s, int j)
{
    return j < 4 ? s[j + 4] & 63 : s[j + 4] >> 4 | s[j] >> 6 << 4;
}

/* The scale of column c: one for 32 columns, Q3_K and Q6_K for 16. */
PACK_FN float pack_scale(int type, const uint8_t *row, int c)
{
    const uint8_t *b = pack_block(type, row, c);
    const int j = c % 256 / 32, g = c % 256 / 16;
    switch (type) {
    case BGK_Q4_0:
    case BGK_Q4_1:
    case BGK_Q5_0:
    case BGK_Q5_1:
    case BGK_Q8_0:
    case BGK_IQ4_NL:
        return pack_load_half(b);
    case BGK_MXFP4: /* 2^(e-128), as the table is doubled; e < 2 is subnormal */
        return pack_float(b[0] < 2 ? 0x200000u << b[0] : (b[0] - 1u) << 23);
    case BGK_Q3_K: {
        const uint8_t *s = b + 96;
        const int low = g < 8 ? s[g] & 15 : s[g - 8] >> 4, high = s[8 + g % 4] >> 2 * (g / 4) & 3;
        return pack_load_half(b + 108) * (float)((low | high << 4) - 32);
    }
    case BGK_Q4_K:
    case BGK_Q5_K:
        return pack_load_half(b) * (float)pack_scale6(b + 4, j);
    case BGK_Q6_K:
        return pack_load_half(b + 208) * (float)(int8_t)b[192 + g];
    case BGK_IQ4_XS: {
        const int low = b[4 + j / 2] >> 4 * (j & 1) & 15;
        const int high = (int)(pack_load16(b + 2) >> 2 * j) & 3;
        return pack_load_half(b) * (float)((low | high << 4) - 32);
    }
    default:
        return 0;
    }
}

/* What is added in the 32 columns around c; 0 for types of W6 and W8. */
PACK_FN float pack_min(int type, const uint8_t *row, int c)
{
    const uint8_t *b = pack_block(type, row, c);
    switch (type) {
    case BGK_Q4_0:
        return -8 * pack_load_half(b);
    case BGK_Q5_0:
        return -16 * pack_load_half(b);
    case BGK_Q4_1:
    case BGK_Q5_1:
        return pack_load_half(b + 2);
    case BGK_Q4_K:
    case BGK_Q5_K:
        return -pack_load_half(b + 2) * (float)pack_min6(b + 4, c % 256 / 32);
    default:
        return 0;
    }
}

/* The weight itself, rounded once. */
PACK_FN float pack_value(int type, const uint8_t *row, int c)
{
    const int format = bgk_format_of(type);
    switch (type) {
    case BGK_GGUF_F32: {
        const uint8_t *b = row + (int64_t)c * 4;
        return pack_float(pack_load16(b) | pack_load16(b + 2) << 16);
    }
    case BGK_GGUF_F16:
        return pack_load_half(row + (int64_t)c * 2);
    case BGK_GGUF_BF16:
        return pack_float(pack_load16(row + (int64_t)c * 2) << 16);
    default:
        break;
    }
    const int q = pack_quant(type, row, c) - (format == BGK_W6 ? 32 : format == BGK_W8 ? 128 : 0);
    return pack_scale(type, row, c) * (float)q + pack_min(type, row, c);
}

/* ---- rows of a tile ----------------------------------------------------------------------------
 */

/* Which row of which source (0, or 1: up) a tile's row is. */
PACK_FN int pack_row_of(bool glu, int tile, int row, int *source)
{
    if (!glu) {
        *source = 0;
        return tile * 64 + row;
    }
    const int q = row % 8;
    *source = row % 16 / 8;
    return 64 * (tile / 2) + 4 * (4 * (tile % 2) + row / 16) + (q < 4 ? q : 28 + q);
}

/* |v|, but 0 where it is not finite: such a scale is stored as it is, and its sums show it. */
PACK_FN float pack_size(float v)
{
    v = fabsf(v);
    return v <= 3.402823466e38f ? v : 0;
}

/* The smallest e with v 2^(shift - e) <= most, where 2^(bits - 1) < most <= 2^bits; v > 0. */
PACK_FN int pack_fit(float v, int shift, int bits, float most)
{
    int x;
    const float f = frexpf(v, &x); /* [0.5, 1) */
    return x + shift - bits + (ldexpf(f, bits) > most);
}

/* e of a row whose largest |s| (W16: |value|) and |m| these are. */
PACK_FN int pack_exponent(int format, float s, float m)
{
    int e = -126; /* 2^e stays a normal number */
    if (s == 0 && m == 0) return 0;
    if (format == BGK_W16) {
        const int x = pack_fit(s, 0, 8, 256);
        e = x > e ? x : e;
    } else {
        const int x = s > 0 ? pack_fit(s, 24, 16, 60000) : e,
                  y = m > 0 ? pack_fit(m, 0, 16, 60000) : e;
        e = x > e ? x : e;
        e = y > e ? y : e;
    }
    return e < 127 ? e : 127;
}

typedef struct pack_row { /* of one source; p NULL: beyond its rows, all zero */
    const uint8_t *p;
    int type, e;
} pack_row;

PACK_FN uint32_t pack_q(pack_row r, int c, int k)
{
    return r.p && c < k ? (uint32_t)pack_quant(r.type, r.p, c) : 0;
}

PACK_FN uint32_t pack_s(pack_row r, int c, int k, int shift)
{
    return r.p && c < k ? pack_to_half(ldexpf(pack_scale(r.type, r.p, c), shift - r.e)) : 0;
}

PACK_FN uint32_t pack_m(pack_row r, int c, int k)
{
    return r.p && c < k ? pack_to_half(ldexpf(pack_min(r.type, r.p, c), -r.e)) : 0;
}

PACK_FN uint32_t pack_v(pack_row r, int c, int k)
{
    return r.p && c < k ? pack_to_half(ldexpf(pack_value(r.type, r.p, c), -r.e)) : 0;
}

PACK_FN void pack_store4(uint8_t *to, const uint32_t v[4])
{
#ifdef __CUDA_ARCH__
    *(uint4 *)to = make_uint4(v[0], v[1], v[2], v[3]);
#else
    memcpy(to, v, 16);
#endif
}

PACK_FN void pack_store(uint8_t *to, uint32_t v)
{
    memcpy(to, &v, 4);
}

/* ---- a thread's share of a chunk ---------------------------------------------------------------
 */

PACK_FN void pack_16(uint8_t *chunk, int thread, pack_row r0, pack_row r1, int c0, int k)
{
    for (int s = 0; s < 4; s++) {
        const int c = c0 + 8 * s + thread % 4;
        const uint32_t v[4] = {
            pack_v(r0, c, k) | pack_v(r0, c + 32, k) << 16,
            pack_v(r1, c, k) | pack_v(r1, c + 32, k) << 16,
            pack_v(r0, c + 4, k) | pack_v(r0, c + 36, k) << 16,
            pack_v(r1, c + 4, k) | pack_v(r1, c + 36, k) << 16,
        };
        pack_store4(chunk + 2048 * s + 16 * thread, v);
    }
}

PACK_FN void pack_8(uint8_t *chunk, int thread, pack_row r0, pack_row r1, int c0, int k)
{
    for (int half = 0; half < 2; half++) {
        uint32_t v[4];
        for (int i = 0; i < 4; i++) { /* step 2 half + i / 2, column i or i + 4 */
            const int c = c0 + 8 * (2 * half + i / 2) + 4 * (i % 2) + thread % 4;
            v[i] = pack_q(r0, c, k) | pack_q(r1, c, k) << 8 | pack_q(r0, c + 32, k) << 16 |
                   pack_q(r1, c + 32, k) << 24;
        }
        pack_store4(chunk + 2048 * half + 16 * thread, v);
    }
    const int pair = thread / 4, j = thread % 4;
    const pack_row r = j ? r1 : r0;
    if (j < 2)
        pack_store(chunk + 4096 + 8 * pair + 4 * j, pack_s(r, c0, k, 24) | pack_s(r, c0 + 32, k, 24)
                                                                               << 16);
}

PACK_FN void pack_456(int format, uint8_t *chunk, int thread, pack_row r0, pack_row r1, int c0,
                      int k)
{
    const int pair = thread / 4, j = thread % 4;
    uint32_t low[4], up[2] = {0, 0}; /* W5 uses up[0] alone */
    for (int s = 0; s < 4; s++) {
        low[s] = 0;
        for (int h = 0; h < 2; h++) {
            const int c = c0 + 32 * h + 8 * s + j;
            const uint32_t a = pack_q(r0, c, k), b = pack_q(r1, c, k), a4 = pack_q(r0, c + 4, k),
                           b4 = pack_q(r1, c + 4, k);
            low[s] |= ((a & 15) | (b & 15) << 4 | (a4 & 15) << 8 | (b4 & 15) << 12) << 16 * h;
            const uint32_t high = a4 >> 4 | a >> 4 << 4 | b >> 4 << 8 | b4 >> 4 << 12;
            if (format == BGK_W6)
                up[s / 2] |= high << (2 * (s % 2) + 16 * h);
            else
                up[0] |= high << (s + 16 * h);
        }
    }
    pack_store4(chunk + 16 * thread, low);
    if (format == BGK_W5) pack_store(chunk + 2560 + 4 * thread, up[0]);
    if (format == BGK_W6) {
        pack_store(chunk + 2560 + 8 * thread, up[0]);
        pack_store(chunk + 2560 + 8 * thread + 4, up[1]);
    }
    /* The four threads of a row pair write one of its four half2 each. */
    const pack_row r = j / 2 ? r1 : r0;
    const int shift = j / 2 ? 20 : 24, c = c0 + (format == BGK_W6 ? 16 * (j % 2) : 0);
    pack_store(chunk + 2048 + 16 * pair + 4 * j,
               format != BGK_W6 && j % 2
                   ? pack_m(r, c, k) | pack_m(r, c + 32, k) << 16
                   : pack_s(r, c, k, shift) | pack_s(r, c + 32, k, shift) << 16);
}

/* Thread 0..127 of the chunk whose first column is c0; r0, r1: rows 16 w + lane / 4 and 8 more. */
PACK_FN void pack_thread(int format, uint8_t *chunk, int thread, pack_row r0, pack_row r1, int c0,
                         int k)
{
    if (format == BGK_W16)
        pack_16(chunk, thread, r0, r1, c0, k);
    else if (format == BGK_W8)
        pack_8(chunk, thread, r0, r1, c0, k);
    else
        pack_456(format, chunk, thread, r0, r1, c0, k);
}

/* ---- random blocks -----------------------------------------------------------------------------
 */

PACK_FN uint64_t pack_mix(uint64_t x) /* splitmix64's finisher */
{
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

/* At an even address. In one piece: ptxas 13 makes a numeric conversion (F2I.U8.F16) of the low
 * byte of a half that was just rounded. */
PACK_FN void pack_put16(uint8_t *b, uint32_t v)
{
#ifdef __CUDA_ARCH__
    *(uint16_t *)b = (uint16_t)v;
#else
    b[0] = (uint8_t)v;
    b[1] = (uint8_t)(v >> 8);
#endif
}

/* Fills block n with what decodes to random values of mean about 0 and a deviation of about std. */
PACK_FN void pack_random_block(int type, uint8_t *b, int bytes, uint64_t seed, uint64_t n,
                               float std)
{
    const uint64_t base = pack_mix(seed + 1) + n * 64;
    for (int i = 0; i < bytes; i++)
        b[i] =
            (uint8_t)(pack_mix((base + (uint64_t)(i / 8)) * 0x9e3779b97f4a7c15ull) >> 8 * (i % 8));
    const float u = (float)(pack_mix(base * 0x9e3779b97f4a7c15ull + 5) >> 40) * 0x1p-23f - 1;
    switch (type) {
    case BGK_GGUF_F32: { /* uniform in +-sqrt(3) std */
        const uint32_t v = pack_bits(1.732f * std * u);
        pack_put16(b, v);
        pack_put16(b + 2, v >> 16);
        break;
    }
    case BGK_GGUF_F16:
        pack_put16(b, pack_to_half(1.732f * std * u));
        break;
    case BGK_GGUF_BF16:
        pack_put16(b, pack_bits(1.732f * std * u) >> 16);
        break;
    case BGK_Q4_0:
        pack_put16(b, pack_to_half(std / 4.6f));
        break;
    case BGK_Q4_1:
        pack_put16(b, pack_to_half(std / 4.6f));
        pack_put16(b + 2, pack_to_half(-7.5f * std / 4.6f));
        break;
    case BGK_Q5_0:
        pack_put16(b, pack_to_half(std / 9.2f));
        break;
    case BGK_Q5_1:
        pack_put16(b, pack_to_half(std / 9.2f));
        pack_put16(b + 2, pack_to_half(-15.5f * std / 9.2f));
        break;
    case BGK_Q8_0:
        pack_put16(b, pack_to_half(std / 74));
        break;
    case BGK_IQ4_NL:
        pack_put16(b, pack_to_half(std / 70));
        break;
    case BGK_MXFP4: {
        int e;
        frexpf(std / 5.5f, &e); /* 2^(b - 128) is the power of two below */
        b[0] = (uint8_t)(e + 127 > 0 ? e + 127 : 0);
        break;
    }
    /* Scales of six bits: their root mean square is 37 (0 to 63), 18.5 (-32 to 31); 74 of eight. */
    case BGK_Q4_K:
    case BGK_Q5_K: { /* equal scale and minimum in each pair: mins at 7.5 or 15.5 scales */
        const bool five = type == BGK_Q5_K;
        const float d = std / 37 / (five ? 9.2f : 4.6f);
        pack_put16(b, pack_to_half(d));
        pack_put16(b + 2, pack_to_half(d * (five ? 15.5f : 7.5f)));
        for (int i = 0; i < 4; i++) {
            b[8 + i] = b[4 + i];
            b[12 + i] = (uint8_t)((b[12 + i] & 15) | (b[12 + i] & 15) << 4);
        }
        break;
    }
    case BGK_Q3_K:
        pack_put16(b + 108, pack_to_half(std / 18.5f / 2.35f));
        break;
    case BGK_Q6_K:
        pack_put16(b + 208, pack_to_half(std / 74 / 18.5f));
        break;
    case BGK_IQ4_XS:
        pack_put16(b, pack_to_half(std / 18.5f / 70));
        break;
    default:
        break;
    }
}

#endif
