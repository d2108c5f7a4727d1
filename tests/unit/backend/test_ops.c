/* The ops that are loops over rows, and their kernels: against float64 on fresh numbers, in
 * poisoned outputs with guard words behind; a row has the same bits alone and among others. */
#include "unit/backend/cpu_fixture.h"

#include "base/f16.h"
#include "gguf/gguf.h"

static const int64_t widths[] = {1, 3, 15, 16, 17, 31, 64, 100, 576, 1536, 2047};
enum { N_WIDTHS = sizeof widths / sizeof *widths, GUARD = 8 };

/* Worst |got - want| / size; NaN counts as infinite. */
static double worst_of(const float *got, const double *want, const double *size, int64_t n)
{
    double worst = 0;
    for (int64_t i = 0; i < n; i++) {
        const double e = fabs((double)got[i] - want[i]) / size[i];
        if (!(e <= worst)) worst = isnan(e) ? INFINITY : e;
    }
    return worst;
}

/* An activation with a guard row behind it, all NaN. */
static bg_act poisoned(bg_backend *b, const char *name, int64_t rows, int64_t cols)
{
    bg_act a;
    OK(b->ops->act_new(b, &a, name, rows + GUARD, cols, err));
    b->ops->poison(b, &a, rows + GUARD);
    a.max_rows = rows;
    return a;
}

static void expect_guard(const bg_act *a, const char *what)
{
    const float *x = (const float *)a->data + a->max_rows * a->cols;
    for (int64_t i = 0; i < GUARD * a->cols; i++)
        cr_assert(isnan(x[i]), "%s: wrote past the end", what);
}

static bg_act random_act(bg_backend *b, const char *name, int64_t rows, int64_t cols, uint64_t seed)
{
    bg_act a = poisoned(b, name, rows, cols);
    fill_normal(a.data, rows * cols, seed);
    return a;
}

Test(ops, rms_norm_and_add_match_float64)
{
    for (const char *const *isa = isas(); *isa; isa++)
        for (int k = 0; k < N_WIDTHS; k++) {
            enum { ROWS = 21 };
            const int64_t d = widths[k], n = ROWS * d;
            const bg_backend_config config = config_of(*isa, 3);
            bg_backend *b = backend_of(&config);
            bg_act x = random_act(b, "x", ROWS, d, 1), y = random_act(b, "y", ROWS, d, 2);
            bg_act out = poisoned(b, "out", ROWS, d), sum = poisoned(b, "sum", ROWS, d);
            float *host = malloc((size_t)d * sizeof *host);
            fill_normal(host, d, 3);
            bg_vec w;
            OK(b->ops->vec_new(b, &w, "w", host, d, err));
            double *want = malloc((size_t)n * sizeof *want),
                   *size = malloc((size_t)n * sizeof *size);

            step_of(b, ROWS);
            OK(bg_op_rms_norm(b, &out, &x, &w, 1e-5f, ROWS, err));
            for (int r = 0; r < ROWS; r++) {
                const float *row = (float *)x.data + r * d;
                double ss = 0;
                for (int64_t i = 0; i < d; i++)
                    ss += (double)row[i] * (double)row[i];
                for (int64_t i = 0; i < d; i++) {
                    want[r * d + i] =
                        (double)row[i] / sqrt(ss / (double)d + (double)1e-5f) * (double)host[i];
                    size[r * d + i] = fabs(want[r * d + i]) + 1e-30;
                }
            }
            /* two products, a root, a division and a sum in 32 lanes */
            cr_expect(worst_of(out.data, want, size, n) < 6e-7, "%s, rms_norm of %lld: %.3g", *isa,
                      (long long)d, worst_of(out.data, want, size, n));
            expect_guard(&out, "rms_norm");

            /* one row alone has the same bits as in the batch of 21, also in place */
            bg_act alone = poisoned(b, "alone", 1, d);
            memcpy(alone.data, (float *)x.data + 13 * d, (size_t)d * sizeof(float));
            OK(bg_op_rms_norm(b, &alone, &alone, &w, 1e-5f, 1, err));
            cr_expect(same_bits(alone.data, (float *)out.data + 13 * d, d));

            /* add, then norm: the same as the two in one */
            memcpy(sum.data, x.data, (size_t)n * sizeof(float));
            OK(bg_op_add(b, &sum, &y, err));
            for (int64_t i = 0; i < n; i++)
                cr_assert_eq(((float *)sum.data)[i], ((float *)x.data)[i] + ((float *)y.data)[i]);
            bg_act fused = poisoned(b, "fused", ROWS, d);
            OK(bg_op_rms_norm(b, &out, &sum, &w, 1e-5f, ROWS, err));
            OK(bg_op_add_rms_norm(b, &fused, &x, &y, &w, 1e-5f, err));
            cr_expect(same_bits(fused.data, out.data, n));
            cr_expect(same_bits(x.data, sum.data, n));
            expect_guard(&fused, "add_rms_norm");
            expect_guard(&x, "add_rms_norm");
            free(host);
            free(want);
            free(size);
            bg_backend_free(b);
        }
}

/* fn(x) in float64, without cancellation. */
static double act_ref(bg_act_fn fn, double x)
{
    if (fn == BG_SILU) return x / (1 + exp(-x));
    if (fn == BG_GELU_ERF) return 0.5 * x * erfc(-x / sqrt(2));
    const double u = 0.79788456080286536 * (x + 0.044715 * x * x * x);
    return x / (1 + exp(-2 * u));
}

Test(ops, glu_matches_float64)
{
    for (const char *const *isa = isas(); *isa; isa++)
        for (int k = 0; k < N_WIDTHS; k++)
            for (int fn = BG_SILU; fn <= BG_GELU_ERF; fn++) {
                enum { ROWS = 9 };
                const int64_t f = widths[k], n = ROWS * f;
                const bg_backend_config config = config_of(*isa, 2);
                bg_backend *b = backend_of(&config);
                bg_act x = random_act(b, "gate_up", ROWS, 2 * f + 3, 1);
                bg_act out = poisoned(b, "out", ROWS, f);
                double *want = malloc((size_t)n * sizeof *want);
                double *size = malloc((size_t)n * sizeof *size);
                step_of(b, ROWS);
                for (int64_t r = 0; r < ROWS; r++)
                    for (int64_t i = 0; i < f; i++) {
                        float *row = (float *)x.data + r * x.cols;
                        row[i] *= i % 5 == 0 ? 20.0f : 3.0f; /* both tails */
                        if (i == 7) row[i] = r == 0 ? -0.0f : r == 1 ? 1e-30f : row[i];
                        const double g = (double)row[i], u = (double)row[f + i];
                        want[r * f + i] = act_ref((bg_act_fn)fn, g) * u;
                        /* deep in the left tail e^-t multiplies the error of t; values there vanish
                         */
                        size[r * f + i] =
                            fabs(want[r * f + i]) * (1 + (g < 0 ? g * g : 0)) + 1e-7 * fabs(u);
                    }
                OK(bg_op_glu(b, &out, &x, (bg_act_fn)fn, err));
                const double e = worst_of(out.data, want, size, n);
                cr_expect(e < 6e-7, "%s, fn %d of %lld: %.3g", *isa, fn, (long long)f, e);
                expect_guard(&out, "glu");

                bg_act one = random_act(b, "one", 1, 2 * f, 9), alone = poisoned(b, "alone", 1, f);
                memcpy(one.data, (float *)x.data + 5 * x.cols, (size_t)(2 * f) * sizeof(float));
                step_of(b, 1);
                OK(bg_op_glu(b, &alone, &one, (bg_act_fn)fn, err));
                cr_expect(same_bits(alone.data, (float *)out.data + 5 * f, f));
                free(want);
                free(size);
                bg_backend_free(b);
            }
}

/* exp and tanh of simd.h through the kernels that use them, over their whole range. */
Test(ops, softcap_and_exp_sum_match_float64)
{
    enum { N = 20011 };
    float *x = malloc((N + GUARD) * sizeof *x), *y = malloc((N + GUARD) * sizeof *y);
    for (const char *const *isa = isas(); *isa; isa++) {
        const bg_backend_config config = config_of(*isa, 1);
        bg_backend *b = backend_of(&config);
        const bg_kernels *k = ((bg_cpu *)b)->kernels;
        for (int i = 0; i < N + GUARD; i++)
            x[i] = y[i] = (float)((i % 2 ? 1 : -1) * 30 * pow(10, uniform(4, (uint64_t)i) * 8 - 6));
        k->softcap(y, N, 30);
        double worst = 0;
        for (int i = 0; i < N; i++) {
            const double want = 30 * tanh((double)x[i] / 30);
            const double e = fabs((double)y[i] - want) / fabs(want);
            if (!(e <= worst)) worst = e;
        }
        cr_expect(worst < 5e-7, "%s: tanh %.3g", *isa, worst);
        cr_expect(same_bits(x + N, y + N, GUARD));
        for (int64_t n = 1; n < N; n = n * 3 + 1) {
            double want = 0, got;
            for (int64_t i = 0; i < n; i++) {
                x[i] = normal(11, (uint64_t)i) * 8 - 20;
                if (i % 97 == 50) x[i] = -INFINITY;
                if (i % 13 == 5) x[i] = -25; /* the least that counts */
                if (x[i] >= -25) want += exp(((double)x[i] - 3) * 0.7);
            }
            got = k->exp_sum(x, n, -25, 3, 0.7f);
            cr_expect(fabs(got - want) < 1e-6 * want, "%s: sum of %lld: %.9g, want %.9g", *isa,
                      (long long)n, got, want);
        }
        bg_backend_free(b);
    }
    free(x);
    free(y);
}

Test(ops, cache_conversions_are_exact_or_nearest)
{
    enum { N = 1003 };
    for (const char *const *isa = isas(); *isa; isa++) {
        const bg_backend_config config = config_of(*isa, 1);
        bg_backend *b = backend_of(&config);
        const bg_kernels *k = ((bg_cpu *)b)->kernels;
        float x[N];
        uint16_t row[N + 1], column[N * 2];
        for (int i = 0; i < N; i++) /* normals, subnormals of half, and beyond its range */
            x[i] = normal(3, (uint64_t)i) * (i % 3 == 0 ? 1e-6f : i % 3 == 1 ? 1.0f : 50000.0f);
        for (bg_cache_type t = BG_CACHE_F16; t <= BG_CACHE_BF16; t++) {
            row[N] = 0x1234;
            memset(column, 0x55, sizeof column);
            k->store(t, row, x, N);
            k->store_column(t, column, 2, x, N);
            for (int i = 0; i < N; i++) {
                const uint16_t want =
                    t == BG_CACHE_F16 ? bg_f32_to_f16(x[i]) : bg_f32_to_bf16(x[i]);
                cr_assert_eq(row[i], want, "%s: %g", *isa, (double)x[i]);
                cr_assert_eq(column[2 * i], want);
                cr_assert_eq(column[2 * i + 1], 0x5555);
            }
            cr_assert_eq(row[N], 0x1234);
        }
        bg_backend_free(b);
    }
}

Test(ops, sums_of_squares_agree_in_all_instruction_sets)
{
    float x[777], first = 0;
    fill_normal(x, 777, 8);
    for (const char *const *isa = isas(); *isa; isa++)
        for (int64_t n = 1; n < 777; n += 31) {
            const bg_backend_config config = config_of(*isa, 1);
            bg_backend *b = backend_of(&config), *plain;
            const bg_backend_config base = config_of("plain", 1);
            plain = backend_of(&base);
            first = ((bg_cpu *)plain)->kernels->sum_squares(x, n);
            const float got = ((bg_cpu *)b)->kernels->sum_squares(x, n);
            cr_expect(same_bits(&first, &got, 1), "%s: %lld", *isa, (long long)n);
            bg_backend_free(b);
            bg_backend_free(plain);
        }
}

Test(ops, embed_and_gather_out_pick_rows)
{
    enum { VOCAB = 100, D = 96, LEN = 70 };
    bg_backend_config config = config_of(NULL, 2);
    config.check = true;
    bg_backend *b = backend_of(&config);
    float *table = malloc(VOCAB * D * sizeof *table);
    fill_normal(table, VOCAB * D, 1);
    const size_t row_bytes = bg_qtype_row_bytes(BG_Q8_0, D);
    char *quantised = malloc(VOCAB * row_bytes), name[] = "token_embd.weight";
    for (int i = 0; i < VOCAB; i++)
        cr_assert(bg_quant_row(BG_Q8_0, table + i * D, quantised + (size_t)i * row_bytes, D));
    const bg_tensor t = {.cname = name,
                         .type = BG_Q8_0,
                         .n_dims = 2,
                         .ne = {D, VOCAB, 1, 1},
                         .data = quantised,
                         .bytes = VOCAB * row_bytes};
    bg_embedding *e;
    OK(b->ops->embedding_new(b, &e, &t, err));
    bg_act out = poisoned(b, "x", LEN + 2, D), some = poisoned(b, "some", 3, D);

    int32_t tokens[LEN];
    for (int i = 0; i < LEN; i++)
        tokens[i] = (i * 37 + 5) % VOCAB;
    OK(b->ops->slot_seat(b, 1, &greedy, tokens, LEN, 0, err));
    OK(b->ops->slot_seat(b, 0, &greedy, tokens, 3, 0, err));
    const bg_seq_step steps[] = {{.slot = 1, .pos0 = 1, .n_tokens = LEN - 1, .sample = true},
                                 {.slot = 0, .pos0 = 2, .n_tokens = 1, .sample = true}};
    const bg_batch batch = {2, steps, false};
    OK(b->ops->begin_step(b, &batch, err));
    cr_assert_eq(b->ops->n_rows(b), LEN);
    cr_assert_eq(b->ops->n_out(b), 2);
    OK(bg_op_embed(b, &out, e, 2.5f, err));
    OK(bg_op_gather_out(b, &some, &out, err));
    for (int r = 0; r < LEN; r++) {
        float want[D];
        const int token = r < LEN - 1 ? tokens[r + 1] : tokens[2];
        bg_dequant_row(BG_Q8_0, quantised + (size_t)token * row_bytes, want, D);
        for (int i = 0; i < D; i++)
            cr_assert_eq(((float *)out.data)[r * D + i], want[i] * 2.5f);
    }
    cr_expect(same_bits(some.data, (float *)out.data + (LEN - 2) * D, D));
    cr_expect(same_bits((float *)some.data + D, (float *)out.data + (LEN - 1) * D, D));
    cr_expect(isnan(((float *)some.data)[2 * D]), "a row that nobody asked for");
    expect_guard(&out, "embed");
    bg_backend_free(b);
    free(table);
    free(quantised);
}

Test(ops, shapes_that_do_not_fit_are_refused)
{
    const bg_backend_config config = config_of(NULL, 1);
    bg_backend *b = backend_of(&config);
    bg_act a = poisoned(b, "a", 4, 32), narrow = poisoned(b, "narrow", 4, 31);
    bg_act low = poisoned(b, "low", 3, 32);
    const float ones[32] = {0};
    bg_vec w, short_w;
    OK(b->ops->vec_new(b, &w, "w", ones, 32, err));
    OK(b->ops->vec_new(b, &short_w, "short", ones, 31, err));
    step_of(b, 4);
    FAILS(BG_INTERNAL, "narrow", bg_op_add(b, &a, &narrow, err));
    FAILS(BG_INTERNAL, "low", bg_op_add(b, &a, &low, err));
    FAILS(BG_INTERNAL, "short", bg_op_rms_norm(b, &a, &a, &short_w, 0, 4, err));
    FAILS(BG_INTERNAL, "low", bg_op_rms_norm(b, &low, &a, &w, 0, 4, err));
    FAILS(BG_INTERNAL, "narrow", bg_op_glu(b, &a, &narrow, BG_SILU, err));
    FAILS(BG_INTERNAL, "low", bg_op_glu(b, &low, &a, BG_SILU, err));
    bg_backend_free(b);
}

/* ---- bg_op_*: --check and --profile ---------------------------------------------------------- */

/* An op that forgets one row, in a vtable that is the CPU's otherwise. */
static bg_status forgetful_glu(bg_backend *b, bg_act *out, const bg_act *gate_up, bg_act_fn fn,
                               bg_error *err)
{
    bg_act less = *out;
    (void)err;
    (void)gate_up;
    (void)fn;
    const int n = b->ops->n_rows(b) - 1;
    memset(less.data, 0, (size_t)(n * less.cols) * sizeof(float));
    return BG_OK;
}

Test(ops, check_finds_a_row_left_unwritten)
{
    bg_backend_config config = config_of(NULL, 1);
    config.check = config.profile = true;
    bg_backend *b = backend_of(&config);
    bg_act out = poisoned(b, "ffn_act", 8, 32), x = random_act(b, "gate_up", 8, 64, 1);
    memset(out.data, 0, 8 * 32 * sizeof(float)); /* the last step's values would hide it */
    step_of(b, 5);
    OK(bg_op_glu(b, &out, &x, BG_SILU, err));
    for (int i = 5 * 32; i < 8 * 32; i++)
        cr_assert(isnan(((float *)out.data)[i]), "rows beyond the step are poisoned too");
    bg_ops fake = *b->ops;
    const bg_ops *real = b->ops;
    fake.glu = forgetful_glu;
    b->ops = &fake;
    FAILS(BG_INTERNAL, "op glu: ffn_act[4, 0] is not finite", bg_op_glu(b, &out, &x, BG_SILU, err));
    b->check = false;
    OK(bg_op_glu(b, &out, &x, BG_SILU, err));
    b->ops = real;

    int glu = -1, kinds = 0;
    for (; bg_op_kind_name(kinds); kinds++)
        if (strcmp(bg_op_kind_name(kinds), "glu") == 0) glu = kinds;
    cr_assert(glu >= 0 && kinds <= BG_OP_KINDS);
    bg_profile took, again;
    bg_profile_take(b, &took);
    bg_profile_take(b, &again);
    cr_expect_eq(took.calls[glu], 3);
    cr_expect(took.ns[glu] > 0);
    cr_expect_eq(took.cost[glu].bytes, 3.0 * 5 * (64 + 32) * sizeof(float));
    cr_expect(again.calls[glu] == 0 && again.ns[glu] == 0 && again.cost[glu].bytes == 0);
    bg_backend_free(b);
}
