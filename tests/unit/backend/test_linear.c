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

/* Where a block's 16-bit float scales are. */
struct scales {
    uint32_t type;
    int n, at[2];
};
static const struct scales half_scales[] = {
    {BG_Q4_0, 1, {0}},      {BG_Q4_1, 2, {0, 2}}, {BG_Q5_0, 1, {0}},    {BG_Q5_1, 2, {0, 2}},
    {BG_Q8_0, 1, {0}},      {BG_Q4_K, 2, {0, 2}}, {BG_Q5_K, 2, {0, 2}}, {BG_Q6_K, 1, {208}},
    {BG_Q2_K, 2, {80, 82}}, {BG_Q3_K, 1, {108}},  {BG_IQ2_XXS, 1, {0}}, {BG_IQ2_XS, 1, {0}},
    {BG_IQ3_XXS, 1, {0}},   {BG_IQ1_S, 1, {0}},   {BG_IQ4_NL, 1, {0}},  {BG_IQ3_S, 1, {0}},
    {BG_IQ2_S, 1, {0}},     {BG_IQ4_XS, 1, {0}},  {BG_TQ1_0, 1, {52}},  {BG_TQ2_0, 1, {64}},
};

/* Gives a block of any other bits scales of a sane size. */
static void tame_scales(uint32_t type, uint8_t *block, uint64_t *seed)
{
    if (type == BG_MXFP4) block[0] = (uint8_t)(120 + next_random(seed) % 8);
    if (type == BG_NVFP4)
        for (int i = 0; i < 4; i++)
            block[i] &= 0x3f;
    if (type == BG_IQ1_M) block[55] = (uint8_t)((block[55] & 0x0f) | 0x20);
    for (size_t i = 0; i < sizeof half_scales / sizeof *half_scales; i++) {
        for (int j = 0; half_scales[i].type == type && j < half_scales[i].n; j++) {
            const uint16_t h = bg_f32_to_f16(0.02f * uniform(seed));
            memcpy(block + half_scales[i].at[j], &h, 2);
        }
    }
}

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
        tame_scales(type, dst, seed);
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
            const bg_linear_spec spec = {.name = "f32", .n_parts = 1, .parts = {whole(&w)}};
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

/* ---- native mode --------------------------------------------------------------------------------
 */

static const uint32_t integer_types[] = {
    BG_Q4_0, BG_Q4_1, BG_Q5_0, BG_Q5_1,   BG_Q8_0, BG_IQ4_NL, BG_MXFP4,
    BG_Q4_K, BG_Q5_K, BG_Q6_K, BG_IQ4_XS, BG_Q2_K, BG_Q3_K,
};
enum { N_INTEGER = sizeof integer_types / sizeof *integer_types };

static bool is_integer(uint32_t type)
{
    for (int i = 0; i < N_INTEGER; i++)
        if (integer_types[i] == type) return true;
    return false;
}

/* The 8-bit activations of linear_kernels.h, back as float64. */
static void quantised_x(double *y, const float *x, int64_t stride, int m, int64_t k)
{
    for (int t = 0; t < m; t++) {
        for (int64_t b = 0; b < k; b += 32) {
            const float *v = x + t * stride + b;
            float max = 0;
            for (int i = 0; i < 32; i++)
                max = fabsf(v[i]) > max ? fabsf(v[i]) : max;
            const float d = max / 127.0f, id = max > 0 ? 127.0f / max : 0;
            for (int i = 0; i < 32; i++)
                y[t * k + b + i] = (double)rintf(v[i] * id) * (double)d;
        }
    }
}

/* y W^T in double. A weight with a minimum is a difference of two larger numbers, each rounded on
 * its own, so scale takes twice the largest weight of the 32 for each of them. */
static void native_reference(double *ref, double *scale, const weights *w, const double *y, int m)
{
    for (int t = 0; t < m; t++) {
        for (int64_t r = 0; r < w->n; r++) {
            double s = 0, a = 0;
            for (int64_t b = 0; b < w->k; b += 32) {
                const float *wv = w->value + r * w->k + b;
                const double *yv = y + t * w->k + b;
                double max = 0, sum = 0;
                for (int i = 0; i < 32; i++) {
                    s += wv[i] * yv[i];
                    max = fabs(wv[i]) > max ? fabs(wv[i]) : max;
                    sum += fabs(yv[i]);
                }
                a += 2 * max * sum;
            }
            ref[t * w->n + r] = s;
            scale[t * w->n + r] = a + 1e-30;
        }
    }
}

Test(linear, native_mode_matches_float64_on_the_quantised_activations)
{
    bg_pool *pool = new_pool(2);
    for (int ty = 0; ty < N_INTEGER; ty++) {
        for (int ki = 0; ki < N_KS; ki++) {
            const int64_t k = ks[ki];
            if (k % bg_qtype_get(integer_types[ty])->block_values) continue;
            for (int mi = 0; mi < N_MS; mi++) {
                const int64_t n = ns[(ty + ki + mi) % N_NS];
                const int m = ms[mi];
                weights w = random_weights(integer_types[ty], n, k, (uint64_t)(ty * 100 + ki));
                int64_t stride;
                float *x = random_x(m, k, &stride, (uint64_t)mi);
                double *y = malloc((size_t)(m * k) * sizeof *y);
                double *ref = malloc((size_t)(m * n) * sizeof *ref);
                double *scale = malloc((size_t)(m * n) * sizeof *scale);
                quantised_x(y, x, stride, m, k);
                native_reference(ref, scale, &w, y, m);
                const bg_linear_spec spec = {.name = "native", .n_parts = 1, .parts = {whole(&w)}};
                for (bg_isa isa = BG_ISA_PLAIN; isa <= bg_isa_best(); isa++) {
                    bg_linear *l = new_linear(&spec, BG_COMPUTE_NATIVE, isa, pool);
                    float *out = run(l, x, stride, m, pool);
                    /* Up to three roundings a block, and two a 256-column block. */
                    const double bound = 0x1p-24 * 1.01 * (double)(3 * k / 32 + 2 * k / 256 + 2);
                    const double e = worst(out, ref, scale, m * n);
                    cr_expect(e <= bound, "%s %s [%d, %d, %d]: error %.3g", bg_isa_name(isa),
                              bg_qtype_get(w.type)->name, m, (int)n, (int)k, e);
                    free(out);
                    bg_cpu_linear_free(l);
                }
                free(y);
                free(ref);
                free(scale);
                free(x);
                free_weights(&w);
            }
        }
    }
    bg_pool_free(pool);
}

/* The largest sums that the types can make: a kernel that adds up in 16 bits must not saturate. */
Test(linear, extreme_quants_do_not_saturate)
{
    enum { M = 5, N = 16, K = 512 };
    bg_pool *pool = new_pool(1);
    static const uint8_t fills[] = {0x00, 0x7f, 0x80, 0xff, 0xf0, 0x0f, 0x3f};
    float x[M * K];
    double y[M * K], ref[M * N], scale[M * N];
    for (int i = 0; i < K; i++) {
        x[i] = 1;
        x[K + i] = -1;
        x[2 * K + i] = i % 2 ? 1.0f : -1.0f;
        x[3 * K + i] = i % 4 < 2 ? 1.0f : -1.0f;
        x[4 * K + i] = i % 32 < 16 ? 1.0f : -1.0f;
    }
    quantised_x(y, x, K, M, K);
    for (int ty = 0; ty < N_INTEGER; ty++) {
        const bg_qtype_info *q = bg_qtype_get(integer_types[ty]);
        for (size_t f = 0; f < sizeof fills; f++) {
            uint64_t seed = f;
            weights w = random_weights(integer_types[ty], N, K, 1);
            memset(w.data, fills[f], N * w.row_bytes);
            for (size_t b = 0; b < N * w.row_bytes; b += (size_t)q->block_bytes)
                tame_scales(w.type, w.data + b, &seed);
            for (int r = 0; r < N; r++)
                bg_dequant_row(w.type, w.data + (size_t)r * w.row_bytes, w.value + r * K, K);
            native_reference(ref, scale, &w, y, M);
            const bg_linear_spec spec = {.name = "extreme", .n_parts = 1, .parts = {whole(&w)}};
            for (bg_isa isa = BG_ISA_PLAIN; isa <= bg_isa_best(); isa++) {
                bg_linear *l = new_linear(&spec, BG_COMPUTE_NATIVE, isa, pool);
                float *out = run(l, x, K, M, pool);
                const double e = worst(out, ref, scale, M * N);
                cr_expect(e <= 0x1p-24 * 40, "%s %s of bytes %02x: error %.3g", bg_isa_name(isa),
                          q->name, fills[f], e);
                free(out);
                bg_cpu_linear_free(l);
            }
            free_weights(&w);
        }
    }
    bg_pool_free(pool);
}

/* Types without an integer kernel multiply unquantised activations, as in float32 mode. */
Test(linear, native_mode_of_other_types_is_float32_mode)
{
    bg_pool *pool = new_pool(2);
    for (int ty = 0; ty < N_TYPES; ty++) {
        if (is_integer(all_types[ty])) continue;
        weights w = random_weights(all_types[ty], 33, 512, 5);
        int64_t stride;
        float *x = random_x(9, 512, &stride, 6);
        const bg_linear_spec spec = {.name = "other", .n_parts = 1, .parts = {whole(&w)}};
        bg_linear *a = new_linear(&spec, BG_COMPUTE_F32, bg_isa_best(), pool);
        bg_linear *b = new_linear(&spec, BG_COMPUTE_NATIVE, bg_isa_best(), pool);
        float *want = run(a, x, stride, 9, pool), *got = run(b, x, stride, 9, pool);
        cr_expect_eq(memcmp(want, got, 9 * 33 * sizeof *got), 0, "%s", bg_qtype_get(w.type)->name);
        free(want);
        free(got);
        bg_cpu_linear_free(a);
        bg_cpu_linear_free(b);
        free(x);
        free_weights(&w);
    }
    bg_pool_free(pool);
}

/* ---- the same bits everywhere -------------------------------------------------------------------
 */

/* Every row alone, on one thread, in plain C, is the yardstick of each instruction set, thread
 * count and number of rows. */
Test(linear, a_row_has_the_same_bits_in_every_batch)
{
    enum { MAX_M = 33 };
    bg_pool *pools[3];
    for (int i = 0; i < 3; i++)
        pools[i] = new_pool(i + 1);
    for (int ty = 0; ty < N_TYPES; ty++) {
        for (int mode = BG_COMPUTE_NATIVE; mode <= BG_COMPUTE_F32; mode++) {
            const bool small = bg_qtype_get(all_types[ty])->block_values < 64;
            const int64_t k = small ? 288 : 512;
            const int64_t n = 100;
            weights w = random_weights(all_types[ty], n, k, (uint64_t)ty);
            int64_t stride;
            float *x = random_x(MAX_M, k, &stride, 11);
            const bg_linear_spec spec = {.name = "same", .n_parts = 1, .parts = {whole(&w)}};
            bg_linear *l = new_linear(&spec, (bg_compute)mode, BG_ISA_PLAIN, pools[0]);
            float *want = malloc((size_t)(MAX_M * n) * sizeof *want);
            for (int t = 0; t < MAX_M; t++) {
                float *row = run(l, x + t * stride, stride, 1, pools[0]);
                memcpy(want + t * n, row, (size_t)n * sizeof *row);
                free(row);
            }
            bg_cpu_linear_free(l);
            for (bg_isa isa = BG_ISA_PLAIN; isa <= bg_isa_best(); isa++) {
                for (int i = 0; i < N_MS; i++) {
                    bg_pool *pool = pools[i % 3];
                    l = new_linear(&spec, (bg_compute)mode, isa, pool);
                    const int m = ms[i], t0 = MAX_M - m; /* every row in several places */
                    float *got = run(l, x + t0 * stride, stride, m, pool);
                    cr_expect_eq(memcmp(want + t0 * n, got, (size_t)(m * n) * sizeof *got), 0,
                                 "%s %s mode %d, %d rows", bg_isa_name(isa),
                                 bg_qtype_get(w.type)->name, mode, m);
                    free(got);
                    bg_cpu_linear_free(l);
                }
            }
            free(want);
            free(x);
            free_weights(&w);
        }
    }
    for (int i = 0; i < 3; i++)
        bg_pool_free(pools[i]);
}

/* ---- parts, slices, bias ------------------------------------------------------------------------
 */

Test(linear, parts_slices_and_bias_equal_the_single_parts)
{
    bg_pool *pool = new_pool(2);
    const int64_t k_total = 768, col0 = 256, k = 512;
    const int m = 9;
    weights w[4] = {random_weights(BG_Q4_K, 50, k_total, 1),
                    random_weights(BG_Q6_K, 40, k_total, 2), random_weights(BG_F16, 16, k_total, 3),
                    random_weights(BG_Q5_0, 33, k_total, 4)};
    const int64_t row0[4] = {3, 40, 0, 16}, n_rows[4] = {31, 0, 16, 17};
    float bias[31];
    for (int i = 0; i < 31; i++)
        bias[i] = 100.0f + (float)i;
    int64_t stride;
    float *x = random_x(m, k, &stride, 5);
    for (int mode = BG_COMPUTE_NATIVE; mode <= BG_COMPUTE_F32; mode++) {
        bg_linear_spec spec = {.name = "fused", .n_parts = 4};
        for (int i = 0; i < 4; i++) {
            spec.parts[i] = whole(&w[i]);
            spec.parts[i].row0 = row0[i];
            spec.parts[i].n_rows = n_rows[i];
            spec.parts[i].col0 = col0;
            spec.parts[i].n_cols = k;
        }
        spec.parts[0].bias = bias;
        bg_linear *l = new_linear(&spec, (bg_compute)mode, bg_isa_best(), pool);
        const int64_t n = bg_cpu_linear_rows(l);
        cr_assert_eq(n, 31 + 0 + 16 + 17);
        cr_assert_eq(bg_cpu_linear_cols(l), k);
        float *got = run(l, x, stride, m, pool);
        int64_t at = 0;
        for (int i = 0; i < 4; i++) {
            /* The same columns and rows as a matrix of its own, without a slice or a bias. */
            if (!n_rows[i]) continue;
            weights c = {w[i].type, n_rows[i], k, bg_qtype_row_bytes(w[i].type, k), NULL, NULL};
            c.data = malloc((size_t)c.n * c.row_bytes);
            for (int64_t r = 0; r < c.n; r++)
                memcpy(c.data + (size_t)r * c.row_bytes,
                       w[i].data + (size_t)(row0[i] + r) * w[i].row_bytes +
                           bg_qtype_row_bytes(c.type, col0),
                       c.row_bytes);
            const bg_linear_spec one = {.name = "one", .n_parts = 1, .parts = {whole(&c)}};
            bg_linear *lo = new_linear(&one, (bg_compute)mode, bg_isa_best(), pool);
            float *want = run(lo, x, stride, m, pool);
            for (int t = 0; t < m; t++) {
                for (int64_t r = 0; r < c.n; r++) {
                    const float v = want[t * c.n + r], g = got[t * n + at + r];
                    if (i == 0)
                        cr_expect(fabsf(g - (v + bias[r])) <= 1e-4f, "bias of row %d", (int)r);
                    else
                        cr_expect_eq(g, v, "part %d row %d: %g, not %g", i, (int)r, g, v);
                }
            }
            at += c.n;
            free(want);
            bg_cpu_linear_free(lo);
            free_weights(&c);
        }
        free(got);
        bg_cpu_linear_free(l);
    }
    for (int i = 0; i < 4; i++)
        free_weights(&w[i]);
    free(x);
    bg_pool_free(pool);
}

Test(linear, no_columns_give_the_bias_and_no_rows_nothing)
{
    bg_pool *pool = new_pool(2);
    weights w = random_weights(BG_Q4_0, 20, 64, 1);
    float bias[20];
    for (int i = 0; i < 20; i++)
        bias[i] = (float)i + 0.5f;
    float x[2 * 64] = {0};
    for (int mode = BG_COMPUTE_NATIVE; mode <= BG_COMPUTE_F32; mode++) {
        bg_linear_spec spec = {.name = "none", .n_parts = 2, .parts = {whole(&w), whole(&w)}};
        spec.parts[0].n_cols = spec.parts[1].n_cols = 0;
        spec.parts[1].bias = bias;
        bg_linear *l = new_linear(&spec, (bg_compute)mode, bg_isa_best(), pool);
        float *out = run(l, x, 64, 2, pool);
        for (int t = 0; t < 2; t++)
            for (int i = 0; i < 40; i++)
                cr_expect_eq(out[t * 40 + i], i < 20 ? 0 : bias[i - 20]);
        free(out);
        bg_cpu_linear_free(l);

        spec = (bg_linear_spec){.name = "empty", .n_parts = 1, .parts = {whole(&w)}};
        spec.parts[0].n_rows = 0;
        l = new_linear(&spec, (bg_compute)mode, bg_isa_best(), pool);
        cr_expect_eq(bg_cpu_linear_rows(l), 0);
        free(run(l, x, 64, 2, pool));
        bg_cpu_linear_free(l);

        spec = (bg_linear_spec){.name = "whole", .n_parts = 1, .parts = {whole(&w)}};
        l = new_linear(&spec, (bg_compute)mode, bg_isa_best(), pool);
        free(run(l, x, 64, 0, pool));
        bg_cpu_linear_free(l);
    }
    free_weights(&w);
    bg_pool_free(pool);
}

/* A NaN or an infinity must not turn into plausible numbers. */
Test(linear, nan_and_infinity_reach_the_result_of_their_row_only)
{
    bg_pool *pool = new_pool(2);
    for (int ty = 0; ty < N_TYPES; ty++) {
        weights w = random_weights(all_types[ty], 5, 256, 9);
        for (bg_isa isa = BG_ISA_PLAIN; isa <= bg_isa_best(); isa++) {
            const bg_linear_spec spec = {.name = "nan", .n_parts = 1, .parts = {whole(&w)}};
            bg_linear *l = new_linear(&spec, BG_COMPUTE_NATIVE, isa, pool);
            int64_t stride;
            float *x = random_x(3, 256, &stride, 1);
            x[0 * stride + 77] = NAN;
            x[2 * stride + 200] = INFINITY;
            float *out = run(l, x, stride, 3, pool);
            for (int r = 0; r < 5; r++) {
                cr_expect(!isfinite(out[r]), "%s %s", bg_isa_name(isa), bg_qtype_get(w.type)->name);
                cr_expect(isfinite(out[5 + r]));
                /* 0 * infinity is NaN, so even a weight of 0 shows it */
                cr_expect(!isfinite(out[10 + r]));
            }
            free(out);
            free(x);
            bg_cpu_linear_free(l);
        }
        free_weights(&w);
    }
    bg_pool_free(pool);
}

Test(linear, impossible_specs_are_refused)
{
    bg_pool *pool = new_pool(1);
    weights w = random_weights(BG_Q4_K, 20, 768, 1), narrow = random_weights(BG_Q4_0, 20, 512, 1);
    const bg_linear_part ok = whole(&w);
    bg_linear_spec specs[12];
    int n = 0;
#define BAD(...)                                                         \
    do {                                                                 \
        bg_linear_spec s = {.name = "bad", .n_parts = 1, .parts = {ok}}; \
        __VA_ARGS__;                                                     \
        specs[n++] = s;                                                  \
    } while (0)
    BAD(s.parts[0].type = 4); /* a removed type */
    BAD(s.parts[0].type = 63);
    BAD(s.parts[0].type = 1u << 31);
    BAD(s.parts[0].col0 = 32, s.parts[0].n_cols = 256);
    BAD(s.parts[0].n_cols = 128);
    BAD(s.parts[0].col0 = 512, s.parts[0].n_cols = 512);
    BAD(s.parts[0].row0 = 1);
    BAD(s.parts[0].row0 = -1, s.parts[0].n_rows = 1);
    BAD(s.parts[0].n_rows = INT64_MAX, s.parts[0].row0 = 5);
    BAD(s.parts[0].data = NULL);
    BAD(s.n_parts = 0);
    BAD(s.n_parts = 2, s.parts[1] = whole(&narrow));
    for (int i = 0; i < n; i++) {
        bg_error err = {0};
        bg_linear *l = (bg_linear *)&err;
        cr_expect_eq(bg_cpu_linear_new(&l, &specs[i], BG_COMPUTE_NATIVE, bg_isa_best(), pool, &err),
                     BG_ARG, "spec %d", i);
        cr_expect_null(l);
        cr_expect(err.text[0] != 0);
    }
    bg_cpu_linear_free(NULL);
    free_weights(&w);
    free_weights(&narrow);
    bg_pool_free(pool);
}
