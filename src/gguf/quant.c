/* Decoding of the block types, except the IQ ones.
 *
 * Each function has its block's layout: name, size and byte offset of every field; little-endian;
 * "half" is IEEE binary16. Products of scales are formed first and are exact, so that at most one
 * rounding (of the last sum) happens and every implementation gets the same bits. */
#include "gguf/quant.h"

#include "gguf/gguf.h"
#include "gguf/iq_tables.h"

static const int8_t fp4[16] = BG_FP4_VALUES; /* twice the values of E2M1 */

/* half d @0, nibbles[16] @2 */
static void q4_0(const uint8_t *b, float *y)
{
    const float d = load_half(b);
    for (int i = 0; i < 32; i++)
        y[i] = (float)(nibble(b + 2, i) - 8) * d;
}

/* half d @0, half m @2, nibbles[16] @4 */
static void q4_1(const uint8_t *b, float *y)
{
    const float d = load_half(b), m = load_half(b + 2);
    for (int i = 0; i < 32; i++)
        y[i] = (float)nibble(b + 4, i) * d + m;
}

/* half d @0, fifth bits u32 @2, nibbles[16] @6 */
static void q5_0(const uint8_t *b, float *y)
{
    const float d = load_half(b);
    const uint32_t high = load32(b + 2);
    for (int i = 0; i < 32; i++) {
        int q = nibble(b + 6, i) | (int)(high >> i & 1) << 4;
        y[i] = (float)(q - 16) * d;
    }
}

/* half d @0, half m @2, fifth bits u32 @4, nibbles[16] @8 */
static void q5_1(const uint8_t *b, float *y)
{
    const float d = load_half(b), m = load_half(b + 2);
    const uint32_t high = load32(b + 4);
    for (int i = 0; i < 32; i++) {
        int q = nibble(b + 8, i) | (int)(high >> i & 1) << 4;
        y[i] = (float)q * d + m;
    }
}

/* half d @0, int8[32] @2 */
static void q8_0(const uint8_t *b, float *y)
{
    const float d = load_half(b);
    for (int i = 0; i < 32; i++)
        y[i] = (float)(int8_t)b[2 + i] * d;
}

/* float d @0, int8[256] @4, sums of 16 int16[16] @260 */
static void q8_k(const uint8_t *b, float *y)
{
    const float d = bg_f32_from_bits(load32(b));
    for (int i = 0; i < 256; i++)
        y[i] = d * (float)(int8_t)b[4 + i];
}

/* scale and minimum nibbles[16] @0, 2-bit quants[64] @16, half d @80, half dmin @82.
 * 32 bytes of quants hold 128 elements, 32 in each pair of bits. */
static void q2_k(const uint8_t *b, float *y)
{
    const float d = load_half(b + 80), dmin = load_half(b + 82);
    for (int i = 0; i < 256; i++) {
        int n = i / 128, j = i % 128 / 32, l = i % 32;
        int q = b[16 + 32 * n + l] >> 2 * j & 3, s = b[i / 16];
        float scale = d * (float)(s & 15), min = dmin * (float)(s >> 4);
        y[i] = scale * (float)q - min;
    }
}

/* inverted third bits[32] @0, 2-bit quants[64] @32, 6-bit scales[12] @96, half d @108 */
static void q3_k(const uint8_t *b, float *y)
{
    const uint8_t *s = b + 96;
    const float d = load_half(b + 108);
    for (int i = 0; i < 256; i++) {
        int n = i / 128, j = i % 128 / 32, l = i % 32, k = i / 16;
        int q = (b[32 + 32 * n + l] >> 2 * j & 3) - (b[l] >> (4 * n + j) & 1 ? 0 : 4);
        int low = k < 8 ? s[k] & 15 : s[k - 8] >> 4;
        int high = s[8 + k % 4] >> 2 * (k / 4) & 3;
        float scale = d * (float)((low | high << 4) - 32);
        y[i] = scale * (float)q;
    }
}

/* Scale and minimum j of the 8 pairs of 6 bits in s[12]: the first four lie in the low 6 bits of
 * s[0..3] and s[4..7]; the others have their low nibbles in s[8..11] and their top bits above the
 * first four. */
static void scale_min(const uint8_t *s, int j, float *scale, float *min)
{
    int sc, mn;
    if (j < 4) {
        sc = s[j] & 63;
        mn = s[j + 4] & 63;
    } else {
        sc = (s[j + 4] & 15) | s[j - 4] >> 6 << 4;
        mn = s[j + 4] >> 4 | s[j] >> 6 << 4;
    }
    *scale = (float)sc;
    *min = (float)mn;
}

/* half d @0, half dmin @2, scales and minima[12] @4, nibbles[128] @16 */
static void q4_k(const uint8_t *b, float *y)
{
    const float d = load_half(b), dmin = load_half(b + 2);
    for (int j = 0; j < 8; j++) {
        float sc, mn;
        scale_min(b + 4, j, &sc, &mn);
        sc *= d;
        mn *= dmin;
        for (int l = 0; l < 32; l++) {
            int q = b[16 + 32 * (j / 2) + l] >> 4 * (j & 1) & 15;
            y[32 * j + l] = sc * (float)q - mn;
        }
    }
}

/* half d @0, half dmin @2, scales and minima[12] @4, fifth bits[32] @16, nibbles[128] @48 */
static void q5_k(const uint8_t *b, float *y)
{
    const float d = load_half(b), dmin = load_half(b + 2);
    for (int j = 0; j < 8; j++) {
        float sc, mn;
        scale_min(b + 4, j, &sc, &mn);
        sc *= d;
        mn *= dmin;
        for (int l = 0; l < 32; l++) {
            int q = b[48 + 32 * (j / 2) + l] >> 4 * (j & 1) & 15;
            q |= (b[16 + l] >> j & 1) << 4;
            y[32 * j + l] = sc * (float)q - mn;
        }
    }
}

/* nibbles[128] @0, upper 2 bits[64] @128, scales int8[16] @192, half d @208 */
static void q6_k(const uint8_t *b, float *y)
{
    const float d = load_half(b + 208);
    for (int i = 0; i < 256; i++) {
        int n = i / 128, j = i % 128 / 32, l = i % 32;
        int q = b[64 * n + 32 * (j & 1) + l] >> 4 * (j >> 1) & 15;
        q |= (b[128 + 32 * n + l] >> 2 * j & 3) << 4;
        float scale = d * (float)(int8_t)b[192 + i / 16];
        y[i] = scale * (float)(q - 32);
    }
}

/* Digit n of five base-3 digits in a byte, from -1: the byte is a fraction of 3^5/256. */
static float trit(uint8_t byte, int n)
{
    static const uint8_t pow3[5] = {1, 3, 9, 27, 81};
    uint8_t q = (uint8_t)(byte * pow3[n]);
    return (float)((q * 3 >> 8) - 1);
}

/* five trits a byte[48] @0, four a byte[4] @48, half d @52 */
static void tq1_0(const uint8_t *b, float *y)
{
    const float d = load_half(b + 52);
    for (int i = 0; i < 160; i++)
        y[i] = trit(b[i % 32], i / 32) * d;
    for (int r = 0; r < 80; r++)
        y[160 + r] = trit(b[32 + r % 16], r / 16) * d;
    for (int r = 0; r < 16; r++)
        y[240 + r] = trit(b[48 + r % 4], r / 4) * d;
}

/* 2-bit quants[64] @0, half d @64 */
static void tq2_0(const uint8_t *b, float *y)
{
    const float d = load_half(b + 64);
    for (int i = 0; i < 256; i++)
        y[i] = (float)((b[32 * (i / 128) + i % 32] >> 2 * (i % 128 / 32) & 3) - 1) * d;
}

/* exponent E8M0 @0, FP4 nibbles[16] @1 */
static void mxfp4(const uint8_t *b, float *y)
{
    /* 2^(e-128), half of the exponent's value since the table is doubled; e < 2 is subnormal. */
    const uint32_t e = b[0];
    const float d = bg_f32_from_bits(e < 2 ? UINT32_C(0x200000) << e : (e - 1) << 23);
    for (int i = 0; i < 32; i++)
        y[i] = (float)fp4[nibble(b + 1, i)] * d;
}

/* An unsigned float of 4 exponent and 3 mantissa bits. */
static float ue4m3(uint8_t x)
{
    if (x == 0 || x == 0x7F) return 0;
    int e = x >> 3 & 15;
    float m = (float)(x & 7);
    if (e == 0) return m * 0x1p-9f;
    return (1 + m / 8) * bg_f32_from_bits((uint32_t)(e - 7 + 127) << 23);
}

/* scales UE4M3[4] @0, FP4 nibbles[4][8] @4: four groups of 16 */
static void nvfp4(const uint8_t *b, float *y)
{
    for (int i = 0; i < 64; i++) {
        int s = i / 16, r = i % 16;
        float d = ue4m3(b[s]) / 2;
        y[i] = (float)fp4[b[4 + 8 * s + r % 8] >> 4 * (r / 8) & 15] * d;
    }
}

/* half d @0, bits[16] @2: set is d, clear is -d */
static void q1_0(const uint8_t *b, float *y)
{
    const float d = load_half(b);
    for (int i = 0; i < 128; i++)
        y[i] = b[2 + i / 8] >> i % 8 & 1 ? d : -d;
}

/* half d @0, 2-bit quants[16] @2 */
static void q2_0(const uint8_t *b, float *y)
{
    const float d = load_half(b);
    for (int i = 0; i < 64; i++)
        y[i] = (float)((b[2 + i / 4] >> 2 * (i % 4) & 3) - 1) * d;
}

/* ---- types without blocks ------------------------------------------------------------------- */

static void f32(const uint8_t *b, float *y)
{
    memcpy(y, b, 4);
}

static void f16(const uint8_t *b, float *y)
{
    *y = load_half(b);
}

static void bf16(const uint8_t *b, float *y)
{
    *y = bg_bf16_to_f32(load16(b));
}

static void f64(const uint8_t *b, float *y)
{
    double v;
    memcpy(&v, b, 8);
    *y = (float)v;
}

static void i8(const uint8_t *b, float *y)
{
    *y = (float)(int8_t)*b;
}

static void i16(const uint8_t *b, float *y)
{
    *y = (float)(int16_t)load16(b);
}

static void i32(const uint8_t *b, float *y)
{
    *y = (float)(int32_t)load32(b);
}

static void i64(const uint8_t *b, float *y)
{
    int64_t v;
    memcpy(&v, b, 8);
    *y = (float)v;
}

/* Q8_1 exists only in memory, for activations; no file has it. */
static dequant_block *const decoders[BG_QTYPE_COUNT] = {
    [BG_F32] = f32,
    [BG_F16] = f16,
    [BG_Q4_0] = q4_0,
    [BG_Q4_1] = q4_1,
    [BG_Q5_0] = q5_0,
    [BG_Q5_1] = q5_1,
    [BG_Q8_0] = q8_0,
    [BG_Q2_K] = q2_k,
    [BG_Q3_K] = q3_k,
    [BG_Q4_K] = q4_k,
    [BG_Q5_K] = q5_k,
    [BG_Q6_K] = q6_k,
    [BG_Q8_K] = q8_k,
    [BG_IQ2_XXS] = dequant_iq2_xxs,
    [BG_IQ2_XS] = dequant_iq2_xs,
    [BG_IQ3_XXS] = dequant_iq3_xxs,
    [BG_IQ1_S] = dequant_iq1_s,
    [BG_IQ4_NL] = dequant_iq4_nl,
    [BG_IQ3_S] = dequant_iq3_s,
    [BG_IQ2_S] = dequant_iq2_s,
    [BG_IQ4_XS] = dequant_iq4_xs,
    [BG_I8] = i8,
    [BG_I16] = i16,
    [BG_I32] = i32,
    [BG_I64] = i64,
    [BG_F64] = f64,
    [BG_IQ1_M] = dequant_iq1_m,
    [BG_BF16] = bf16,
    [BG_TQ1_0] = tq1_0,
    [BG_TQ2_0] = tq2_0,
    [BG_MXFP4] = mxfp4,
    [BG_NVFP4] = nvfp4,
    [BG_Q1_0] = q1_0,
    [BG_Q2_0] = q2_0,
};

void bg_dequant_row(uint32_t id, const void *src, float *dst, int64_t n)
{
    const bg_qtype_info *q = bg_qtype_get(id);
    if (!q->dequant) return;
    const uint8_t *b = src;
    for (int64_t i = 0; i + q->block_values <= n; i += q->block_values, b += q->block_bytes)
        decoders[id](b, dst + i);
}
