/* Every quant type against vectors of the reference implementation, and the way there and back. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <criterion/criterion.h>

#include "base/f16.h"
#include "base/rng.h"
#include "gguf/gguf.h"

/* Three lines a type: "id name values bytes", the block in hex, the floats' bits in hex. */
Test(quant, vectors_decode_bit_for_bit)
{
    FILE *f = fopen("tests/golden/quant_vectors.txt", "r");
    cr_assert(f);
    unsigned id;
    char name[32];
    int n, n_bytes, n_types = 0;
    while (fscanf(f, "%u %31s %d %d", &id, name, &n, &n_bytes) == 4) {
        /* Behind and before the block: what must not be read or written. */
        uint8_t block[300];
        float got[258];
        const bg_qtype_info *q = bg_qtype_get(id);
        cr_assert(q->name, "type %u", id);
        cr_expect_eq(bg_qtype_by_name(name), id, "%s", name);
        cr_assert_eq(q->block_values, n, "%s", name);
        cr_assert_eq(q->block_bytes, n_bytes, "%s", name);
        cr_assert(q->dequant, "%s", name);
        for (int i = 0; i < n_bytes; i++) {
            unsigned v;
            cr_assert_eq(fscanf(f, "%2x", &v), 1);
            block[i + 1] = (uint8_t)v; /* at an odd address */
        }
        for (int i = 0; i < 258; i++)
            got[i] = NAN;
        bg_dequant_row(id, block + 1, got + 1, n);
        for (int i = 0; i < n; i++) {
            uint32_t want;
            cr_assert_eq(fscanf(f, "%x", &want), 1);
            cr_expect_eq(bg_f32_bits(got[i + 1]), want, "%s[%d]: got %.9g, want %.9g", name, i,
                         got[i + 1], bg_f32_from_bits(want));
        }
        cr_expect(isnan(got[0]) && isnan(got[n + 1]), "%s: wrote outside", name);
        n_types++;
    }
    fclose(f);
    cr_expect_eq(n_types, 26);
}

Test(quant, plain_numbers)
{
    float y[2];
    bg_dequant_row(BG_F32, (const float[]){1.5f, -2}, y, 2);
    cr_expect(y[0] == 1.5f && y[1] == -2);
    bg_dequant_row(BG_F16, (const uint16_t[]){0x3c00, 0xc000}, y, 2);
    cr_expect(y[0] == 1 && y[1] == -2);
    bg_dequant_row(BG_BF16, (const uint16_t[]){0x3f80, 0xc000}, y, 2);
    cr_expect(y[0] == 1 && y[1] == -2);
    bg_dequant_row(BG_F64, (const double[]){0.25, -3}, y, 2);
    cr_expect(y[0] == 0.25f && y[1] == -3);
    bg_dequant_row(BG_I8, (const int8_t[]){-128, 127}, y, 2);
    cr_expect(y[0] == -128 && y[1] == 127);
    bg_dequant_row(BG_I16, (const int16_t[]){-300, 300}, y, 2);
    cr_expect(y[0] == -300 && y[1] == 300);
    bg_dequant_row(BG_I32, (const int32_t[]){-70000, 70000}, y, 2);
    cr_expect(y[0] == -70000 && y[1] == 70000);
    bg_dequant_row(BG_I64, (const int64_t[]){-(INT64_C(1) << 40), 7}, y, 2);
    cr_expect(y[0] == -0x1p40f && y[1] == 7);
}

Test(quant, type_table)
{
    int n = 0;
    for (uint32_t i = 0; i < 1000; i++) {
        const bg_qtype_info *q = bg_qtype_get(i);
        if (!q->name) continue;
        n++;
        cr_expect_eq(bg_qtype_by_name(q->name), i);
        cr_expect_eq(bg_qtype_row_bytes(i, 3 * q->block_values), (size_t)(3 * q->block_bytes));
    }
    cr_expect_eq(n, 35); /* 43 ids without the 8 that were removed */
    cr_expect_eq(bg_qtype_by_name("q4_k"), BG_Q4_K);
    cr_expect_eq(bg_qtype_by_name("Q4_K_M"), BG_QTYPE_COUNT);
    cr_expect_null(bg_qtype_get(4)->name);
    cr_expect_null(bg_qtype_get(36)->name);
    cr_expect_null(bg_qtype_get(UINT32_MAX)->name);
}

/* Rows of random weights: uniform, all of one sign, zero, one outlier. */
static void make_row(float *x, int n, int kind)
{
    for (int i = 0; i < n; i++) {
        float u = (float)(bg_uniform((uint32_t)(bg_mix64((uint64_t)(i + 1000 * kind)) >> 32)));
        x[i] = kind == 0 ? 2 * u - 1 : kind == 1 ? u + 1 : kind == 2 ? -u - 1 : 0;
        if (kind == 4 && i == 17) x[i] = -3;
    }
}

Test(quant, back_and_forth_within_half_a_step)
{
    enum { N = 512 };
    /* The largest error, in parts of a block's largest magnitude (a range for types that have a
     * minimum is up to twice that): half a step, or a whole one at the short end of a signed range,
     * and what rounding the groups' scales to their few bits adds. */
    static const struct {
        uint32_t id;
        double bound;
    } cases[] = {
        {BG_F32, 0},
        {BG_F16, 0x1p-11},
        {BG_BF16, 0x1p-8},
        {BG_Q4_0, 1.01 / 8},
        {BG_Q4_1, 1.05 / 15},
        {BG_Q5_0, 1.01 / 16},
        {BG_Q5_1, 1.05 / 31},
        {BG_Q8_0, 0.5 / 127 + 0x1p-11},
        {BG_Q2_K, 1.5 / 3},
        {BG_Q3_K, 1.2 / 4},
        {BG_Q4_K, 1.4 / 15},
        {BG_Q5_K, 1.8 / 31},
        {BG_Q6_K, 1.2 / 32},
        {BG_IQ4_NL, 14.5 / 113},
        {BG_IQ4_XS, 17. / 113},
        {BG_MXFP4, 0.26},
    };
    static float x[N], y[N];
    static uint8_t b[N * 4 + 1];
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        const char *name = bg_qtype_get(cases[c].id)->name;
        for (int kind = 0; kind < 5; kind++) {
            make_row(x, N, kind);
            memset(b, 0xAA, sizeof b);
            const size_t n_bytes = bg_qtype_row_bytes(cases[c].id, N);
            cr_assert(bg_quant_row(cases[c].id, x, b, N), "%s", name);
            cr_expect_eq(b[n_bytes], 0xAA, "%s wrote past the end", name);
            bg_dequant_row(cases[c].id, b, y, N);
            double top = 0, worst = 0;
            for (int i = 0; i < N; i++) {
                top = fmax(top, fabs((double)x[i]));
                worst = fmax(worst, fabs((double)x[i] - (double)y[i]));
                cr_assert(isfinite(y[i]), "%s", name);
            }
            cr_expect(worst <= cases[c].bound * top, "%s, row %d: error %.4f of %.4f", name, kind,
                      worst, cases[c].bound * top);
        }
    }
    cr_expect_not(bg_quant_row(BG_IQ1_S, x, b, N));
    cr_expect_not(bg_quant_row(77, x, b, N));
}

Test(quant, numbers_out_of_bounds_stay_numbers_of_the_format)
{
    static float x[256];
    static uint8_t b[1024];
    for (int i = 0; i < 256; i++)
        x[i] = i % 3 == 0 ? NAN : i % 3 == 1 ? INFINITY : -1e38f;
    for (uint32_t id = 0; id < BG_QTYPE_COUNT; id++)
        bg_quant_row(id, x, b, 256); /* no crash, no undefined conversion */
}
