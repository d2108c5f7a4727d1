/* Plain quantisation: nearest values under scales taken from the extremes of each group. No
 * importance weights and no search: for tests and synthetic models, not for publishing. */
#include "gguf/gguf.h"

#include <math.h>
#include <string.h>

#include "gguf/iq_tables.h"
#include "gguf/quant.h"

typedef void quant_block(const float *x, uint8_t *b);

static const int8_t nl[16] = BG_IQ4NL_VALUES;
static const int8_t fp4[16] = BG_FP4_VALUES;

/* Stores v as a half at b and returns what was stored: quants must fit the scale a reader sees. */
static float put_half(uint8_t *b, float v)
{
    uint16_t h = bg_f32_to_f16(v);
    b[0] = (uint8_t)h;
    b[1] = (uint8_t)(h >> 8);
    return bg_f16_to_f32(h);
}

/* x rounded to the nearest integer in lo..hi; NaN is lo. */
static int nearest(float x, int lo, int hi)
{
    if (!(x > (float)lo)) return lo;
    if (x >= (float)hi) return hi;
    return (int)lroundf(x);
}

static float inverse(float d)
{
    return d != 0 ? 1 / d : 0;
}

/* The value of largest magnitude, with its sign. */
static float extreme(const float *x, int n)
{
    float m = 0;
    for (int i = 0; i < n; i++)
        if (fabsf(x[i]) > fabsf(m)) m = x[i];
    return m;
}

static void range(const float *x, int n, float *lo, float *hi)
{
    *lo = *hi = x[0];
    for (int i = 1; i < n; i++) {
        *lo = fminf(*lo, x[i]);
        *hi = fmaxf(*hi, x[i]);
    }
}

static void put_nibble(uint8_t *q, int i, int v)
{
    q[i % 16] = (uint8_t)(q[i % 16] | v << 4 * (i / 16));
}

static void q4_0(const float *x, uint8_t *b)
{
    /* The extreme becomes -8, the end of the range that has one more step. */
    const float id = inverse(put_half(b, extreme(x, 32) / -8));
    for (int i = 0; i < 32; i++)
        put_nibble(b + 2, i, nearest(x[i] * id, -8, 7) + 8);
}

static void q4_1(const float *x, uint8_t *b)
{
    float lo, hi;
    range(x, 32, &lo, &hi);
    const float id = inverse(put_half(b, (hi - lo) / 15)), m = put_half(b + 2, lo);
    for (int i = 0; i < 32; i++)
        put_nibble(b + 4, i, nearest((x[i] - m) * id, 0, 15));
}

/* The quants of 5 bits: nibbles at low, the fifth bits at high. */
static void put_five(uint8_t *high, uint8_t *low, int i, int q)
{
    put_nibble(low, i, q & 15);
    high[i / 8] = (uint8_t)(high[i / 8] | (q >> 4) << i % 8);
}

static void q5_0(const float *x, uint8_t *b)
{
    const float id = inverse(put_half(b, extreme(x, 32) / -16));
    for (int i = 0; i < 32; i++)
        put_five(b + 2, b + 6, i, nearest(x[i] * id, -16, 15) + 16);
}

static void q5_1(const float *x, uint8_t *b)
{
    float lo, hi;
    range(x, 32, &lo, &hi);
    const float id = inverse(put_half(b, (hi - lo) / 31)), m = put_half(b + 2, lo);
    for (int i = 0; i < 32; i++)
        put_five(b + 4, b + 8, i, nearest((x[i] - m) * id, 0, 31));
}

/* As the format defines it: quants from the scale before it is rounded to half. */
static void q8_0(const float *x, uint8_t *b)
{
    const float d = fabsf(extreme(x, 32)) / 127, id = inverse(d);
    put_half(b, d);
    for (int i = 0; i < 32; i++)
        b[2 + i] = (uint8_t)nearest(x[i] * id, -127, 127);
}

/* Scale and minimum (what is subtracted, never below 0) for each of the groups of a block, as
 * integers under one d and one dmin that put_half() stored. */
typedef struct grouping {
    float d, dmin;
    int sc[16], mn[16];
} grouping;

static grouping group(const float *x, int size, int qmax, int smax, uint8_t *d, uint8_t *dmin)
{
    grouping g = {0};
    float scale[16], min[16], top_scale = 0, top_min = 0;
    const int n = 256 / size;
    for (int j = 0; j < n; j++) {
        float lo, hi;
        range(x + j * size, size, &lo, &hi);
        min[j] = fmaxf(-lo, 0);
        scale[j] = (fmaxf(hi, 0) + min[j]) / (float)qmax;
        top_scale = fmaxf(top_scale, scale[j]);
        top_min = fmaxf(top_min, min[j]);
    }
    g.d = put_half(d, top_scale / (float)smax);
    g.dmin = put_half(dmin, top_min / (float)smax);
    for (int j = 0; j < n; j++) {
        g.sc[j] = nearest(scale[j] * inverse(g.d), 0, smax);
        g.mn[j] = nearest(min[j] * inverse(g.dmin), 0, smax);
    }
    return g;
}

static int grouped(const grouping *g, int j, float x, int qmax)
{
    return nearest((x + g->dmin * (float)g->mn[j]) * inverse(g->d * (float)g->sc[j]), 0, qmax);
}

static void q2_k(const float *x, uint8_t *b)
{
    grouping g = group(x, 16, 3, 15, b + 80, b + 82);
    for (int j = 0; j < 16; j++)
        b[j] = (uint8_t)(g.sc[j] | g.mn[j] << 4);
    for (int i = 0; i < 256; i++) {
        uint8_t *q = &b[16 + 32 * (i / 128) + i % 32];
        *q = (uint8_t)(*q | grouped(&g, i / 16, x[i], 3) << 2 * (i % 128 / 32));
    }
}

static void put_scale_min(const grouping *g, uint8_t *s)
{
    for (int j = 0; j < 4; j++) {
        s[j] = (uint8_t)(g->sc[j] | g->sc[j + 4] >> 4 << 6);
        s[j + 4] = (uint8_t)(g->mn[j] | g->mn[j + 4] >> 4 << 6);
        s[j + 8] = (uint8_t)((g->sc[j + 4] & 15) | (g->mn[j + 4] & 15) << 4);
    }
}

static void q4_k(const float *x, uint8_t *b)
{
    grouping g = group(x, 32, 15, 63, b, b + 2);
    put_scale_min(&g, b + 4);
    for (int i = 0; i < 256; i++) {
        uint8_t *q = &b[16 + 32 * (i / 64) + i % 32];
        *q = (uint8_t)(*q | grouped(&g, i / 32, x[i], 15) << 4 * (i / 32 & 1));
    }
}

static void q5_k(const float *x, uint8_t *b)
{
    grouping g = group(x, 32, 31, 63, b, b + 2);
    put_scale_min(&g, b + 4);
    for (int i = 0; i < 256; i++) {
        int v = grouped(&g, i / 32, x[i], 31);
        uint8_t *q = &b[48 + 32 * (i / 64) + i % 32], *high = &b[16 + i % 32];
        *q = (uint8_t)(*q | (v & 15) << 4 * (i / 32 & 1));
        *high = (uint8_t)(*high | (v >> 4) << i / 32);
    }
}

/* Signed scales for groups of a block: the group's extreme becomes -qmin, and the block's largest
 * scale becomes -smin of the d stored at b. */
static float signed_scales(const float *x, int size, float qmin, int smin, uint8_t *b, int *sc)
{
    float scale[16], top = 0;
    const int n = 256 / size;
    for (int j = 0; j < n; j++) {
        scale[j] = extreme(x + j * size, size) / qmin;
        if (fabsf(scale[j]) > fabsf(top)) top = scale[j];
    }
    const float d = put_half(b, top / (float)smin);
    for (int j = 0; j < n; j++)
        sc[j] = nearest(scale[j] * inverse(d), smin, -smin - 1);
    return d;
}

static void q3_k(const float *x, uint8_t *b)
{
    int sc[16];
    const float d = signed_scales(x, 16, -4, -32, b + 108, sc);
    for (int k = 0; k < 16; k++) {
        int v = sc[k] + 32;
        uint8_t *low = &b[96 + k % 8], *high = &b[104 + k % 4];
        *low = (uint8_t)(*low | (v & 15) << 4 * (k / 8));
        *high = (uint8_t)(*high | (v >> 4) << 2 * (k / 4));
    }
    for (int i = 0; i < 256; i++) {
        const int scale = sc[i / 16];
        int v = nearest(x[i] * inverse(d * (float)scale), -4, 3) + 4;
        uint8_t *q = &b[32 + 32 * (i / 128) + i % 32], *high = &b[i % 32];
        *q = (uint8_t)(*q | (v & 3) << 2 * (i % 128 / 32));
        *high = (uint8_t)(*high | (v >> 2) << i / 32);
    }
}

static void q6_k(const float *x, uint8_t *b)
{
    int sc[16];
    const float d = signed_scales(x, 16, -32, -128, b + 208, sc);
    for (int k = 0; k < 16; k++)
        b[192 + k] = (uint8_t)sc[k];
    for (int i = 0; i < 256; i++) {
        const int scale = sc[i / 16];
        int v = nearest(x[i] * inverse(d * (float)scale), -32, 31) + 32;
        int n = i / 128, j = i % 128 / 32, l = i % 32;
        uint8_t *low = &b[64 * n + 32 * (j & 1) + l], *high = &b[128 + 32 * n + l];
        *low = (uint8_t)(*low | (v & 15) << 4 * (j >> 1));
        *high = (uint8_t)(*high | (v >> 4) << 2 * j);
    }
}

/* The position of the value nearest to x in a table of 16. */
static int nearest_of(const int8_t *table, float x)
{
    int best = 0;
    for (int i = 1; i < 16; i++)
        if (fabsf(x - (float)table[i]) < fabsf(x - (float)table[best])) best = i;
    return best;
}

static void iq4_nl(const float *x, uint8_t *b)
{
    const float id = inverse(put_half(b, extreme(x, 32) / -127));
    for (int i = 0; i < 32; i++)
        put_nibble(b + 2, i, nearest_of(nl, x[i] * id));
}

static void iq4_xs(const float *x, uint8_t *b)
{
    int sc[8], high = 0;
    const float d = signed_scales(x, 32, -127, -32, b, sc);
    for (int k = 0; k < 8; k++) {
        int v = sc[k] + 32;
        uint8_t *low = &b[4 + k / 2];
        *low = (uint8_t)(*low | (v & 15) << 4 * (k & 1));
        high |= (v >> 4) << 2 * k;
    }
    b[2] = (uint8_t)high;
    b[3] = (uint8_t)(high >> 8);
    for (int i = 0; i < 256; i++) {
        const int scale = sc[i / 32];
        put_nibble(b + 8 + 16 * (i / 32), i % 32, nearest_of(nl, x[i] * inverse(d * (float)scale)));
    }
}

static void mxfp4(const float *x, uint8_t *b)
{
    const float m = fabsf(extreme(x, 32));
    if (m == 0) return;
    int e;
    frexpf(m, &e); /* m is in [2^(e-1), 2^e); the largest value of E2M1 is 6 = 1.5 * 2^2 */
    e = nearest((float)(e - 3 + 127), 0, 254);
    b[0] = (uint8_t)e;
    for (int i = 0; i < 32; i++)
        put_nibble(b + 1, i, nearest_of(fp4, ldexpf(x[i], 128 - e)));
}

static void f32(const float *x, uint8_t *b)
{
    memcpy(b, x, 4);
}

static void f16(const float *x, uint8_t *b)
{
    put_half(b, *x);
}

static void bf16(const float *x, uint8_t *b)
{
    uint16_t h = bg_f32_to_bf16(*x);
    b[0] = (uint8_t)h;
    b[1] = (uint8_t)(h >> 8);
}

static quant_block *const encoders[BG_QTYPE_COUNT] = {
    [BG_F32] = f32,   [BG_F16] = f16,       [BG_BF16] = bf16,     [BG_Q4_0] = q4_0,
    [BG_Q4_1] = q4_1, [BG_Q5_0] = q5_0,     [BG_Q5_1] = q5_1,     [BG_Q8_0] = q8_0,
    [BG_Q2_K] = q2_k, [BG_Q3_K] = q3_k,     [BG_Q4_K] = q4_k,     [BG_Q5_K] = q5_k,
    [BG_Q6_K] = q6_k, [BG_IQ4_NL] = iq4_nl, [BG_IQ4_XS] = iq4_xs, [BG_MXFP4] = mxfp4,
};

bool bg_quant_row(uint32_t id, const float *src, void *dst, int64_t n)
{
    if (id >= BG_QTYPE_COUNT || !encoders[id]) return false;
    const bg_qtype_info *q = bg_qtype_get(id);
    uint8_t *b = dst;
    for (int64_t i = 0; i + q->block_values <= n; i += q->block_values, b += q->block_bytes) {
        memset(b, 0, (size_t)q->block_bytes); /* quants are or-ed in */
        encoders[id](src + i, b);
    }
    return true;
}
