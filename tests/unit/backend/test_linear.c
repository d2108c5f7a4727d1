#include <criterion/criterion.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cpu/linear.h"
#include "base/f16.h"

/* ---- making weights and activations
 * -------------------------------------------------------------- */

static uint64_t next_random(uint64_t *s)
{
    uint64_t z = (*s += 0x9e3779b97f4a7c15u);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static float uniform(uint64_t *s) /* (-1, 1) */
{
    return (float)(int32_t)(next_random(s) >> 32) * 0x1p-31f;
}

/* Where a block's 16-bit float scales are, for types that bg_quant_row() does not write. */
struct scales {
    uint32_t type;
    int n, at[2];
};
static const struct scales half_scales[] = {
    {BG_Q2_K, 2, {80, 82}}, {BG_Q3_K, 1, {108}}, {BG_IQ2_XXS, 1, {0}}, {BG_IQ2_XS, 1, {0}},
    {BG_IQ3_XXS, 1, {0}},   {BG_IQ1_S, 1, {0}},  {BG_IQ4_NL, 1, {0}},  {BG_IQ3_S, 1, {0}},
    {BG_IQ2_S, 1, {0}},     {BG_IQ4_XS, 1, {0}}, {BG_TQ1_0, 1, {52}},  {BG_TQ2_0, 1, {64}},
};

/* One row of weights in blocks of the type: quantised noise, or else random bits with sane scales.
 */
static void random_row(uint32_t type, uint8_t *dst, int64_t n, uint64_t *seed)
{
    const bg_qtype_info *q = bg_qtype_get(type);
    const int64_t n_blocks = n / q->block_values;
    float *v = malloc((size_t)n * sizeof *v);
    for (int64_t i = 0; i < n; i++)
        v[i] = uniform(seed) * uniform(seed) + 0.05f;
    const bool quantised = bg_quant_row(type, v, dst, n);
    free(v);
    if (quantised) return;
    for (int64_t b = 0; b < n_blocks; b++, dst += q->block_bytes) {
        for (int i = 0; i < q->block_bytes; i++)
            dst[i] = (uint8_t)next_random(seed);
        if (type == BG_MXFP4) dst[0] = (uint8_t)(120 + next_random(seed) % 8);
        if (type == BG_NVFP4)
            for (int i = 0; i < 4; i++)
                dst[i] &= 0x3f;
        if (type == BG_IQ1_M) dst[55] = (uint8_t)((dst[55] & 0x0f) | 0x20);
        for (size_t i = 0; i < sizeof half_scales / sizeof *half_scales; i++) {
            for (int j = 0; half_scales[i].type == type && j < half_scales[i].n; j++) {
                const uint16_t h = bg_f32_to_f16(0.02f * uniform(seed));
                memcpy(dst + half_scales[i].at[j], &h, 2);
            }
        }
    }
}

typedef struct weights {
    uint32_t type;
    int64_t n, k; /* rows, columns */
    size_t row_bytes;
    uint8_t *data;
    float *value; /* [n, k] dequantised */
} weights;

static weights random_weights(uint32_t type, int64_t n, int64_t k, uint64_t seed)
{
    weights w = {type, n, k, bg_qtype_row_bytes(type, k), NULL, NULL};
    w.data = malloc((size_t)n * w.row_bytes + 1);
    w.value = malloc((size_t)(n * k + 1) * sizeof *w.value);
    for (int64_t r = 0; r < n; r++) {
        random_row(type, w.data + (size_t)r * w.row_bytes, k, &seed);
        bg_dequant_row(type, w.data + (size_t)r * w.row_bytes, w.value + r * k, k);
    }
    return w;
}

static void free_weights(weights *w)
{
    free(w->data);
    free(w->value);
}

static bg_linear_part whole(const weights *w)
{
    return (bg_linear_part){.name = "w",
                            .type = w->type,
                            .data = w->data,
                            .k_total = w->k,
                            .n_total = w->n,
                            .n_rows = w->n,
                            .n_cols = w->k};
}

static bg_pool *new_pool(int n)
{
    bg_error err = {0};
    bg_pool *p;
    cr_assert_eq(bg_pool_new(&p, n, -1, &err), BG_OK, "%s", err.text);
    return p;
}

static bg_linear *new_linear(const bg_linear_spec *spec, bg_compute compute, bg_isa isa,
                             bg_pool *pool)
{
    bg_error err = {0};
    bg_linear *l;
    cr_assert_eq(bg_cpu_linear_new(&l, spec, compute, isa, pool, &err), BG_OK, "%s", err.text);
    return l;
}

/* ---- running with guards
 * -------------------------------------------------------------------------- */

enum { GUARD = 16, POISON = 0x7fc0beef };

/* out[m][n] of m rows of x, in a buffer that is all poison before; checks that the columns past n
 * and the rows past m still are. x has stride x_stride. */
static float *run(const bg_linear *l, const float *x, int64_t x_stride, int m, bg_pool *pool)
{
    const int64_t n = bg_cpu_linear_rows(l), stride = n + GUARD;
    const size_t len = (size_t)((m + 1) * stride);
    uint32_t *buf = malloc(len * 4);
    for (size_t i = 0; i < len; i++)
        buf[i] = POISON;
    const size_t scratch_bytes = bg_cpu_linear_scratch(l, m);
    uint8_t *scratch = aligned_alloc(64, (scratch_bytes + 64 + 63) / 64 * 64);
    memset(scratch, 0xff, scratch_bytes + 64);
    bg_cpu_linear_run(l, (float *)buf, stride, x, x_stride, m, scratch, pool);
    for (int i = 0; i < 64; i++)
        cr_assert_eq(scratch[scratch_bytes + (size_t)i], 0xff, "wrote past the scratch");
    free(scratch);
    float *out = malloc((size_t)(m * n + 1) * sizeof *out);
    for (int64_t t = 0; t <= m; t++) {
        for (int64_t i = 0; i < stride; i++) {
            const uint32_t v = buf[t * stride + i];
            if (t < m && i < n) {
                cr_assert_neq(v, POISON, "row %d column %d was not written", (int)t, (int)i);
                memcpy(&out[t * n + i], &v, 4);
            } else {
                cr_assert_eq(v, POISON, "wrote outside, row %d column %d", (int)t, (int)i);
            }
        }
    }
    free(buf);
    return out;
}

/* x with a stride of its own; the values between rows are NaN. Rows differ in size; some blocks are
 * 0. */
static float *random_x(int m, int64_t k, int64_t *stride, uint64_t seed)
{
    *stride = k + 3;
    float *x = malloc((size_t)(m * *stride + 1) * sizeof *x);
    for (int t = 0; t < m; t++) {
        for (int64_t i = 0; i < *stride; i++)
            x[t * *stride + i] = i >= k ? NAN : uniform(&seed) * (float)(1 + t % 3);
        if (t % 5 == 4)
            for (int64_t i = 0; i < k && i < 32; i++)
                x[t * *stride + i] = 0;
    }
    return x;
}

static const uint32_t all_types[] = {
    BG_F32,   BG_F16,   BG_BF16,   BG_Q4_0,  BG_Q4_1,    BG_Q5_0,   BG_Q5_1,    BG_Q8_0,  BG_Q2_K,
    BG_Q3_K,  BG_Q4_K,  BG_Q5_K,   BG_Q6_K,  BG_IQ2_XXS, BG_IQ2_XS, BG_IQ3_XXS, BG_IQ1_S, BG_IQ4_NL,
    BG_IQ3_S, BG_IQ2_S, BG_IQ4_XS, BG_IQ1_M, BG_TQ1_0,   BG_TQ2_0,  BG_MXFP4,   BG_NVFP4,
};
enum { N_TYPES = sizeof all_types / sizeof *all_types };

static const int64_t ks[] = {32, 96, 160, 256, 288, 576, 768, 1536};
static const int64_t ns[] = {1, 15, 16, 17, 48, 100};
static const int ms[] = {1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33};
enum {
    N_KS = sizeof ks / sizeof *ks,
    N_NS = sizeof ns / sizeof *ns,
    N_MS = sizeof ms / sizeof *ms
};

/* The worst |got - ref| / scale; NaN counts as infinite. */
static double worst(const float *got, const double *ref, const double *scale, int64_t n)
{
    double w = 0;
    for (int64_t i = 0; i < n; i++) {
        const double e = fabs(got[i] - ref[i]) / scale[i];
        if (!(e <= w)) w = isnan(e) ? INFINITY : e;
    }
    return w;
}

/* ref = x W^T in double; scale = sum |x||w|. */
static void reference(double *ref, double *scale, const weights *w, const float *x, int64_t stride,
                      int m)
{
    for (int t = 0; t < m; t++) {
        for (int64_t r = 0; r < w->n; r++) {
            double s = 0, a = 0;
            for (int64_t k = 0; k < w->k; k++) {
                const double p = (double)x[t * stride + k] * w->value[r * w->k + k];
                s += p;
                a += fabs(p);
            }
            ref[t * w->n + r] = s;
            scale[t * w->n + r] = a + 1e-30;
        }
    }
}

Test(linear, f32_mode_matches_float64)
{
    bg_pool *pool = new_pool(2);
    for (int ty = 0; ty < N_TYPES; ty++) {
        for (int ki = 0; ki < N_KS; ki++) {
            const int64_t k = ks[ki], n = ns[(ty + ki) % N_NS];
            const int m = ms[(3 * ty + ki) % N_MS];
            if (k % bg_qtype_get(all_types[ty])->block_values) continue;
            weights w = random_weights(all_types[ty], n, k, (uint64_t)(ty * 100 + ki));
            int64_t stride;
            float *x = random_x(m, k, &stride, 7);
            double *ref = malloc((size_t)(m * n) * sizeof *ref);
            double *scale = malloc((size_t)(m * n) * sizeof *scale);
            reference(ref, scale, &w, x, stride, m);
            const bg_linear_spec spec = {"f32", 1, {whole(&w)}};
            for (bg_isa isa = BG_ISA_PLAIN; isa <= bg_isa_best(); isa++) {
                bg_linear *l = new_linear(&spec, BG_COMPUTE_F32, isa, pool);
                float *out = run(l, x, stride, m, pool);
                double err = 0, power = 0;
                for (int64_t i = 0; i < m * n; i++) {
                    err += (out[i] - ref[i]) * (out[i] - ref[i]);
                    power += ref[i] * ref[i];
                }
                /* A chain of at most 256 roundings to nearest, then one addition a chunk. */
                const double bound = 0x1p-24 * 1.01 * (double)((k < 256 ? k : 256) + k / 256);
                const double e = worst(out, ref, scale, m * n);
                cr_expect(e <= bound, "%s %s [%d, %d, %d]: error %.3g", bg_isa_name(isa),
                          bg_qtype_get(w.type)->name, m, (int)n, (int)k, e);
                cr_expect(err <= 1e-11 * power, "%s %s: NMSE %.3g", bg_isa_name(isa),
                          bg_qtype_get(w.type)->name, err / power);
                free(out);
                bg_cpu_linear_free(l);
            }
            free(ref);
            free(scale);
            free(x);
            free_weights(&w);
        }
    }
    bg_pool_free(pool);
}
