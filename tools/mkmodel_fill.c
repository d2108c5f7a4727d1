/* Random blocks of every quant type.
 *
 * A block is filled with random bits, its inner scales are raised to the upper half of their range,
 * and its scale d is set last. How large the weights of a type are under d = 1 is measured on a few
 * blocks with the decoder itself, so a new type needs only the place of its d. */
#include "mkmodel.h"

#include <math.h>
#include <string.h>

#include "base/f16.h"
#include "base/rng.h"

#define GOLDEN UINT64_C(0x9E3779B97F4A7C15)

static uint64_t word(uint64_t seed, uint64_t i)
{
    return bg_mix64(seed + i * GOLDEN);
}

/* ---- inner scales ---------------------------------------------------------------------------- */

static void or_bytes(uint8_t *b, int from, int n, int bits)
{
    for (int i = from; i < from + n; i++)
        b[i] = (uint8_t)(b[i] | bits);
}

/* 12 bytes of scales and minima: the top bit of each of the 16 numbers of 6 bits. */
static void raise_k(uint8_t *b)
{
    or_bytes(b, 4, 8, 0xA0);
}

static void raise_q2k(uint8_t *b)
{
    or_bytes(b, 0, 16, 0x88);
}

static void raise_q6k(uint8_t *b)
{
    for (int i = 192; i < 208; i++) {
        int sc = 32 + (b[i] & 31);
        b[i] = (uint8_t)(b[i] & 0x80 ? -sc : sc);
    }
}

static void no_minus_128(uint8_t *b)
{
    for (int i = 2; i < 34; i++)
        if (b[i] == 0x80) b[i] = 0;
}

/* Ternary: of the values 0..3, 3 does not occur. */
static void ternary(uint8_t *b)
{
    for (int i = 0; i < 64; i++)
        b[i] = (uint8_t)(b[i] & ~(b[i] & b[i] >> 1 & 0x55));
}

/* ---- types ----------------------------------------------------------------------------------- */

enum { NONE = -1, HIDDEN = -2, EXPONENT = -3 };

typedef struct maker {
    uint32_t type;
    int d_at;      /* of the half d; HIDDEN: IQ1_M's nibbles; EXPONENT: MXFP4's byte 0 */
    int m_at;      /* of a second half m = d * m_ratio, or NONE */
    float m_ratio; /* centres the values */
    bool signs;    /* d has a random sign, because the values are not centred */
    void (*raise)(uint8_t *b);
} maker;

static const maker makers[] = {
    {BG_Q4_0, 0, NONE, 0, true, NULL},          {BG_Q4_1, 0, 2, -7.5f, false, NULL},
    {BG_Q5_0, 0, NONE, 0, true, NULL},          {BG_Q5_1, 0, 2, -15.5f, false, NULL},
    {BG_Q8_0, 0, NONE, 0, false, no_minus_128}, {BG_Q2_K, 80, 82, 1.5f, false, raise_q2k},
    {BG_Q3_K, 108, NONE, 0, true, NULL},        {BG_Q4_K, 0, 2, 7.5f, false, raise_k},
    {BG_Q5_K, 0, 2, 15.5f, false, raise_k},     {BG_Q6_K, 208, NONE, 0, false, raise_q6k},
    {BG_IQ2_XXS, 0, NONE, 0, false, NULL},      {BG_IQ2_XS, 0, NONE, 0, false, NULL},
    {BG_IQ2_S, 0, NONE, 0, false, NULL},        {BG_IQ3_XXS, 0, NONE, 0, false, NULL},
    {BG_IQ3_S, 0, NONE, 0, false, NULL},        {BG_IQ1_S, 0, NONE, 0, true, NULL},
    {BG_IQ1_M, HIDDEN, NONE, 0, true, NULL},    {BG_IQ4_NL, 0, NONE, 0, true, NULL},
    {BG_IQ4_XS, 0, NONE, 0, true, NULL},        {BG_TQ1_0, 52, NONE, 0, true, NULL},
    {BG_TQ2_0, 64, NONE, 0, true, ternary},     {BG_Q1_0, 0, NONE, 0, true, NULL},
    {BG_Q2_0, 0, NONE, 0, true, NULL},          {BG_MXFP4, EXPONENT, NONE, 0, false, NULL},
};

static const maker *find_maker(uint32_t type)
{
    for (size_t i = 0; i < sizeof makers / sizeof *makers; i++)
        if (makers[i].type == type) return &makers[i];
    return NULL;
}

static bool is_float(uint32_t type)
{
    return type == BG_F32 || type == BG_F16 || type == BG_BF16;
}

bool can_fill(uint32_t type)
{
    return is_float(type) || find_maker(type);
}

static void put_half(uint8_t *b, float v)
{
    uint16_t h = bg_f32_to_f16(v);
    memcpy(b, &h, 2);
}

static void put_scale(const maker *m, uint8_t *b, float d, uint64_t r)
{
    if (m->d_at == EXPONENT) { /* 2^(e-127), and one up or down */
        int e = 127 + (int)lroundf(log2f(d)) + (int)(r % 3) - 1;
        b[0] = (uint8_t)(e < 0 ? 0 : e > 250 ? 250 : e);
        return;
    }
    d *= 0.7f + 0.6f * (float)(r >> 40) * 0x1p-24f; /* blocks differ */
    if (m->signs && (r & 1)) d = -d;
    if (m->d_at == HIDDEN) { /* a nibble on top of each of four numbers */
        uint16_t h = bg_f32_to_f16(d);
        for (int i = 0; i < 4; i++)
            b[49 + 2 * i] = (uint8_t)((b[49 + 2 * i] & 15) | (h >> 4 * i & 15) << 4);
        return;
    }
    put_half(b + m->d_at, d);
    if (m->m_at >= 0) put_half(b + m->m_at, d * m->m_ratio);
}

/* n blocks with scale d, without regard to what size that makes them. */
static void raw_blocks(const maker *m, float d, uint64_t seed, int64_t first, int64_t n,
                       uint8_t *out)
{
    const size_t block = (size_t)bg_qtype_get(m->type)->block_bytes, total = block * (size_t)n;
    const uint64_t at = (uint64_t)first * block / 8; /* whole, since first is a multiple of 8 */
    for (size_t i = 0; i < total; i += 8) {
        uint64_t w = word(seed, at + i / 8);
        memcpy(out + i, &w, total - i < 8 ? total - i : 8);
    }
    for (int64_t i = 0; i < n; i++, out += block) {
        if (m->raise) m->raise(out);
        put_scale(m, out, d, word(~seed, (uint64_t)(first + i)));
    }
}

/* Root mean square of the values under d = 1. */
static float unit_size(const maker *m)
{
    enum { BLOCKS = 64 };
    static const uint64_t seed = 12345;
    const bg_qtype_info *q = bg_qtype_get(m->type);
    uint8_t b[BLOCKS * 210];
    float y[256];
    double sum = 0;
    raw_blocks(m, 1, seed, 0, BLOCKS, b);
    for (int i = 0; i < BLOCKS; i++) {
        bg_dequant_row(m->type, b + i * q->block_bytes, y, q->block_values);
        for (int k = 0; k < q->block_values; k++)
            sum += (double)y[k] * (double)y[k];
    }
    return (float)sqrt(sum / (BLOCKS * q->block_values));
}

/* Nearly normal, variance 1: the sum of four uniform numbers of 16 bits. */
static float normal(uint64_t r)
{
    int32_t sum = (int32_t)(r & 0xffff) + (int32_t)(r >> 16 & 0xffff) +
                  (int32_t)(r >> 32 & 0xffff) + (int32_t)(r >> 48);
    return (float)(sum - 131070) * (1 / 37837.23f);
}

static void fill_floats(uint32_t type, float size, uint64_t seed, int64_t first, int64_t n,
                        uint8_t *out)
{
    for (int64_t i = 0; i < n; i++) {
        float v = size * normal(word(seed, (uint64_t)(first + i)));
        if (type == BG_F32) {
            memcpy(out + 4 * i, &v, 4);
        } else {
            uint16_t h = type == BG_F16 ? bg_f32_to_f16(v) : bg_f32_to_bf16(v);
            memcpy(out + 2 * i, &h, 2);
        }
    }
}

void fill_blocks(uint32_t type, float size, uint64_t seed, int64_t first, int64_t n, uint8_t *out)
{
    if (is_float(type)) {
        fill_floats(type, size, seed, first, n, out);
        return;
    }
    const maker *m = find_maker(type);
    raw_blocks(m, size / unit_size(m), seed, first, n, out);
}
