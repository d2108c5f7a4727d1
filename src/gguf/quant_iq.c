/* Decoding of the IQ types: 8 groups of 32 elements a block, and in a group 4 sub-groups of 8,
 * each one entry of a trained grid (IQ3: two entries of 4) with signs. Layouts as in quant.c. */
#include "gguf/quant.h"

#include "gguf/iq_tables.h"

static const int8_t iq1_level[4] = BG_IQ1_LEVELS;
static const int8_t iq2_level[4] = BG_IQ2_LEVELS;
static const int8_t iq3_xxs_level[8] = BG_IQ3XXS_LEVELS;
static const int8_t iq3_s_level[8] = BG_IQ3S_LEVELS;
static const int8_t iq4_nl_value[16] = BG_IQ4NL_VALUES;

/* Seven stored signs and an eighth that makes the number of minus signs even. */
static uint32_t eight_signs(uint32_t k)
{
    k &= 127;
    return k | ((uint32_t)__builtin_parity(k) << 7);
}

static float with_sign(float v, uint32_t signs, int j)
{
    return signs >> j & 1 ? -v : v;
}

static void put_iq2(float *y, float db, uint16_t code, uint32_t signs)
{
    for (int j = 0; j < 8; j++)
        y[j] = with_sign(db * (float)iq2_level[code >> 2 * j & 3], signs, j);
}

static void put_iq3(float *y, float db, const int8_t *level, uint16_t lo, uint16_t hi,
                    uint32_t signs)
{
    for (int j = 0; j < 8; j++) {
        uint16_t code = j < 4 ? lo : hi;
        y[j] = with_sign(db * (float)level[code >> 3 * (j % 4) & 7], signs, j);
    }
}

static void put_iq1(float *y, float dl, uint16_t code, float delta)
{
    for (int j = 0; j < 8; j++)
        y[j] = dl * ((float)iq1_level[code >> 2 * j & 3] + delta);
}

/* half d @0, groups[8] @2 of: grid indices u8[4], u32 (4 x 7 bits signs, 4 bits scale) */
void dequant_iq2_xxs(const uint8_t *b, float *y)
{
    const float d = load_half(b);
    for (int k = 0; k < 8; k++) {
        const uint8_t *g = b + 2 + 8 * k;
        uint32_t a = load32(g + 4);
        float db = d * (0.5f + (float)(a >> 28)) * 0.25f;
        for (int l = 0; l < 4; l++)
            put_iq2(y + 32 * k + 8 * l, db, bg_iq2xxs_grid[g[l]], eight_signs(a >> 7 * l));
    }
}

/* The scale of sub-group l: two nibbles a group. */
static float nibble_scale(float d, uint8_t scales, int l)
{
    return d * (0.5f + (float)(scales >> 4 * (l / 2) & 15)) * 0.25f;
}

/* half d @0, u16[32] (9 bits index, 7 bits signs) @2, scale nibbles[8] @66 */
void dequant_iq2_xs(const uint8_t *b, float *y)
{
    const float d = load_half(b);
    for (int k = 0; k < 8; k++) {
        for (int l = 0; l < 4; l++) {
            uint32_t w = load16(b + 2 + 2 * (4 * k + l));
            put_iq2(y + 32 * k + 8 * l, nibble_scale(d, b[66 + k], l), bg_iq2xs_grid[w & 511],
                    eight_signs(w >> 9));
        }
    }
}

/* half d @0, low index bits[32] @2, signs[32] @34, high index bits[8] @66, scale nibbles[8] @74 */
void dequant_iq2_s(const uint8_t *b, float *y)
{
    const float d = load_half(b);
    for (int k = 0; k < 8; k++) {
        for (int l = 0; l < 4; l++) {
            int at = b[2 + 4 * k + l] | (b[66 + k] >> 2 * l & 3) << 8;
            put_iq2(y + 32 * k + 8 * l, nibble_scale(d, b[74 + k], l), bg_iq2s_grid[at],
                    b[34 + 4 * k + l]);
        }
    }
}

/* half d @0, grid indices[64] @2, u32[8] (4 x 7 bits signs, 4 bits scale) @66 */
void dequant_iq3_xxs(const uint8_t *b, float *y)
{
    const float d = load_half(b);
    for (int k = 0; k < 8; k++) {
        uint32_t a = load32(b + 66 + 4 * k);
        float db = d * (0.5f + (float)(a >> 28)) * 0.5f;
        for (int l = 0; l < 4; l++) {
            const uint8_t *g = b + 2 + 8 * k + 2 * l;
            put_iq3(y + 32 * k + 8 * l, db, iq3_xxs_level, bg_iq3xxs_grid[g[0]],
                    bg_iq3xxs_grid[g[1]], eight_signs(a >> 7 * l));
        }
    }
}

/* half d @0, low index bits[64] @2, ninth index bits[8] @66, signs[32] @74, scale nibbles[4] @106
 */
void dequant_iq3_s(const uint8_t *b, float *y)
{
    const float d = load_half(b);
    for (int k = 0; k < 8; k++) {
        float db = d * (float)(1 + 2 * (b[106 + k / 2] >> 4 * (k & 1) & 15));
        for (int l = 0; l < 4; l++) {
            const uint8_t *g = b + 2 + 8 * k + 2 * l;
            int at0 = g[0] | (b[66 + k] >> 2 * l & 1) << 8;
            int at1 = g[1] | (b[66 + k] >> (2 * l + 1) & 1) << 8;
            put_iq3(y + 32 * k + 8 * l, db, iq3_s_level, bg_iq3s_grid[at0], bg_iq3s_grid[at1],
                    b[74 + 4 * k + l]);
        }
    }
}

/* half d @0, low index bits[32] @2, u16[8] (4 x 3 bits index, 3 bits scale, sign of delta) @34 */
void dequant_iq1_s(const uint8_t *b, float *y)
{
    const float d = load_half(b);
    for (int k = 0; k < 8; k++) {
        uint32_t w = load16(b + 34 + 2 * k);
        float dl = d * (float)(2 * (w >> 12 & 7) + 1), delta = w >> 15 ? -0.125f : 0.125f;
        for (int l = 0; l < 4; l++)
            put_iq1(y + 32 * k + 8 * l, dl, bg_iq1s_grid[b[2 + 4 * k + l] | (w >> 3 * l & 7) << 8],
                    delta);
    }
}

/* low index bits[32] @0, nibbles (3 bits index, sign of delta)[16] @32, u16[4] @48: 4 x 3 bits
 * scale, and above them the nibbles of the half d, lowest first */
void dequant_iq1_m(const uint8_t *b, float *y)
{
    uint32_t half = 0;
    for (int i = 0; i < 4; i++)
        half |= (uint32_t)(load16(b + 48 + 2 * i) >> 12) << 4 * i;
    const float d = bg_f16_to_f32((uint16_t)half);
    for (int k = 0; k < 8; k++) {
        int u = load16(b + 48 + 2 * (k / 2));
        for (int l = 0; l < 4; l++) {
            float dl = d * (float)(2 * (u >> (6 * (k % 2) + 3 * (l / 2)) & 7) + 1);
            int nib = b[32 + 2 * k + l / 2] >> 4 * (l % 2) & 15;
            put_iq1(y + 32 * k + 8 * l, dl, bg_iq1s_grid[b[4 * k + l] | (nib & 7) << 8],
                    nib & 8 ? -0.125f : 0.125f);
        }
    }
}

/* half d @0, nibbles[16] @2 */
void dequant_iq4_nl(const uint8_t *b, float *y)
{
    const float d = load_half(b);
    for (int i = 0; i < 32; i++)
        y[i] = d * (float)iq4_nl_value[nibble(b + 2, i)];
}

/* half d @0, upper 2 scale bits u16 @2, scale nibbles[4] @4, nibbles[8][16] @8 */
void dequant_iq4_xs(const uint8_t *b, float *y)
{
    const float d = load_half(b);
    const int high = load16(b + 2);
    for (int k = 0; k < 8; k++) {
        int ls = (b[4 + k / 2] >> 4 * (k & 1) & 15) | (high >> 2 * k & 3) << 4;
        float scale = d * (float)(ls - 32);
        for (int i = 0; i < 32; i++)
            y[32 * k + i] = scale * (float)iq4_nl_value[nibble(b + 8 + 16 * k, i)];
    }
}
