/* tests/gpu/test_fast.c - --fast-math: the kernels around the library's products against what bgk.h
 * says, linears through the backend with it and without, a step's worth of them captured. */
#include "gpu.h"

#include "backend/cuda/cuda.h"
#include "gguf/gguf.h"

/* ---- kernels --------------------------------------------------------------------------------- */

static void check_rows(size_t rows, size_t cols, size_t pad)
{
    const size_t stride = (rows + 255) / 256 * 256, ld = cols + pad;
    float *x = random_f32(rows * cols, 7, 3);
    uint16_t *tiles = to_tiles(x, rows, cols, stride);
    void *dx = to_device(tiles, cols * stride * 2);
    uint16_t *out = poisoned((rows * ld + GUARD) * 2);
    const bgk_out in = {dx, BGK_TILES, (int64_t)stride};
    CU(bgk_tiles_to_rows(out, (int64_t)ld, &in, (int)rows, (int)cols, 0));
    uint16_t *got = from_device(out, (rows * ld + GUARD) * 2);
    for (size_t r = 0; r < rows; r++) {
        for (size_t c = 0; c < cols; c++)
            cr_assert_eq(got[r * ld + c], bg_f32_to_f16(x[r * cols + c]), "row %zu column %zu", r,
                         c);
        cr_assert(all_poison(got + r * ld + cols, pad * 2), "behind row %zu", r);
    }
    cr_assert(all_poison(got + rows * ld, GUARD * 2));
    CU(cudaFree(dx));
    CU(cudaFree(out));
    free(x);
    free(tiles);
    free(got);
}

Test(fast, tiles_to_rows)
{
    NEEDS_GPU();
    check_rows(1, 64, 0);
    check_rows(63, 128, 8);
    check_rows(257, 192, 64);
    check_rows(300, 4096, 0);
    const bgk_out in = {NULL, BGK_TILES, 256};
    cr_assert_eq(bgk_tiles_to_rows(NULL, 64, &in, 0, 64, 0), cudaSuccess);
    cr_assert_eq(bgk_tiles_to_rows(NULL, 65, &in, 1, 64, 0), cudaErrorInvalidValue);
    cr_assert_eq(bgk_tiles_to_rows(NULL, 64, &in, 1, 63, 0), cudaErrorInvalidValue);
    cr_assert_eq(bgk_tiles_to_rows(NULL, 64, &in, 257, 64, 0), cudaErrorInvalidValue);
}

static double act(bgk_act fn, double v)
{
    if (fn == BGK_SILU) return v / (1 + exp(-v));
    if (fn == BGK_GELU_ERF) return 0.5 * v * (1 + erf(v * M_SQRT1_2));
    return 0.5 * v * (1 + tanh(sqrt(2 / M_PI) * (v + 0.044715 * v * v * v)));
}

static void check_glu(bgk_act fn, size_t rows, size_t cols, size_t pad, bool with_bias)
{
    const size_t stride = (rows + 255) / 256 * 256, groups = (cols + 63) / 64, ld = 2 * cols + pad;
    const size_t halves = groups * stride * 64;
    float *x = random_f32(rows * ld, 8, 6), *bias = random_f32(2 * cols, 9, 1);
    uint16_t *h = malloc((rows * ld + 1) * sizeof *h);
    for (size_t i = 0; i < rows * ld; i++)
        h[i] = bg_f32_to_f16(x[i]);
    h[0] = 0x7c00; /* what overflowed: as 65504 */
    h[cols] = 0x3c00;
    void *dx = to_device(h, rows * ld * 2), *db = to_device(bias, 2 * cols * sizeof *bias);
    char *memory = poisoned(halves * 2 + 1024 + GUARD);
    char *at = memory + -(uintptr_t)memory % 1024;
    const bgk_out out = {at, BGK_TILES, (int64_t)stride};
    CU(bgk_glu_halves(&out, dx, (int64_t)ld, with_bias ? db : NULL, fn, (int)rows, (int)cols, 0));
    uint16_t *got = from_device(at, halves * 2 + GUARD);
    cr_assert(all_poison((char *)got + halves * 2, GUARD));
    for (size_t r = 0; r < stride; r++)
        for (size_t c = 0; c < groups * 64; c++) {
            const uint16_t v = got[tile_index(stride, r, c)];
            if (r >= rows || c >= cols) {
                cr_assert_eq(v, r >= rows ? 0xffff : 0, "filling, row %zu column %zu", r, c);
                continue;
            }
            const double b0 = with_bias ? (double)bias[c] : 0;
            const double b1 = with_bias ? (double)bias[cols + c] : 0;
            const double g = fmin((double)bg_f16_to_f32(h[r * ld + c]), 65504) + b0;
            const double u = (double)bg_f16_to_f32(h[r * ld + cols + c]) + b1;
            const double want = fmin(act(fn, g) * u, 65504);
            cr_assert(fabs((double)bg_f16_to_f32(v) - want) <= 0x1p-10 * fabs(want) + 2e-6,
                      "row %zu column %zu: %g, want %g", r, c, (double)bg_f16_to_f32(v), want);
        }
    /* A row by itself has the same bits. */
    CU(bgk_glu_halves(&out, (uint16_t *)dx + (rows - 1) * ld, (int64_t)ld, with_bias ? db : NULL,
                      fn, 1, (int)cols, 0));
    uint16_t *alone = from_device(at, halves * 2);
    for (size_t c = 0; c < groups * 64; c++)
        cr_assert_eq(alone[tile_index(stride, 0, c)], got[tile_index(stride, rows - 1, c)]);
    CU(cudaFree(dx));
    CU(cudaFree(db));
    CU(cudaFree(memory));
    free(x);
    free(bias);
    free(h);
    free(got);
    free(alone);
}

Test(fast, glu_halves)
{
    NEEDS_GPU();
    check_glu(BGK_SILU, 1, 64, 0, false);
    check_glu(BGK_SILU, 300, 512, 8, true);
    check_glu(BGK_GELU_TANH, 65, 72, 0, false);
    check_glu(BGK_GELU_TANH, 66, 37, 2, true);
    check_glu(BGK_GELU_ERF, 257, 130, 4, false);
}

/* ---- linears through the backend ------------------------------------------------------------- */

enum { MOST = 700 };

static bg_cuda *backend(bool fast)
{
    const bg_backend_config config = {.compute = BG_COMPUTE_NATIVE,
                                      .n_threads = 1,
                                      .first_cpu = -1,
                                      .fast_math = fast,
                                      .max_tokens = MOST,
                                      .max_seqs = 4,
                                      .max_out = 4,
                                      .max_ctx = 64,
                                      .vocab_size = 16};
    bg_error err = {0};
    bg_backend *b = NULL;
    const bg_status st = bg_cuda_backend_new(&b, &config, 0, &err);
    if (fast && st && (strstr(err.text, "libcublasLt") || strstr(err.text, "cublasLt.h")))
        cr_skip_test("%s", err.text);
    cr_assert_eq(st, BG_OK, "%s", err.text);
    return (bg_cuda *)b;
}

static bool has_tiles(void)
{
    int major = 0;
    CU(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
    return major == 9;
}

static uint8_t *matrix(uint32_t type, int64_t rows, int64_t k, uint64_t seed)
{
    const size_t row = bg_qtype_row_bytes(type, k);
    uint8_t *p = malloc((size_t)rows * row);
    float *v = malloc((size_t)k * sizeof *v);
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t j = 0; j < k; j++)
            v[j] = 0.05f * gpu_random(seed, (uint64_t)(r * k + j));
        cr_assert(bg_quant_row(type, v, p + (size_t)r * row, k));
    }
    free(v);
    return p;
}

typedef struct run { /* a linear, and what it reads and writes, on one backend */
    bg_cuda *c;
    bg_linear *l;
    bg_act x, out;
} run;

/* out: float32 rows, or with glu tiles. */
static run run_new(bool fast, const bg_linear_spec *s, const float *x, int64_t k, int64_t cols)
{
    run r = {.c = backend(fast)};
    bg_error err = {0};
    bg_load_times t;
    bg_backend *b = &r.c->base;
    cr_assert_eq(bg_cuda_linear_new(b, &r.l, s, &err), BG_OK, "%s", err.text);
    cr_assert_eq(bg_cuda_load_end(b, &t, &err), BG_OK, "%s", err.text);
    cr_assert_eq(bg_cuda_act_input_new(b, &r.x, "x", MOST, k, &err), BG_OK, "%s", err.text);
    cr_assert_eq(
        (s->glu ? bg_cuda_act_input_new : bg_cuda_act_new)(b, &r.out, "out", MOST + 1, cols, &err),
        BG_OK, "%s", err.text);
    const size_t stride = (MOST + 255) / 256 * 256;
    uint16_t *tiles = to_tiles(x, MOST, (size_t)k, stride);
    CU(cudaMemcpy(r.x.data, tiles, ((size_t)k + 63) / 64 * stride * 128, cudaMemcpyHostToDevice));
    CU(cudaDeviceSynchronize());
    free(tiles);
    cr_assert_eq(r.l->half != NULL, fast);
    return r;
}

static size_t out_bytes(const run *r)
{
    const bgk_out o = bg_cuda_out(&r->out);
    return o.layout == BGK_TILES ? (size_t)((r->out.cols + 63) / 64 * o.stride) * 128
                                 : (size_t)(r->out.max_rows * r->out.cols) * 4;
}

/* The first n rows, as float32 [n, cols]; the caller's. */
static float *run_rows(const run *r, int n, bool captured)
{
    bg_cuda *c = r->c;
    const bgk_out o = bg_cuda_out(&r->out);
    const bool glu = o.layout == BGK_TILES;
    const size_t cols = (size_t)r->out.cols;
    bg_error err = {0};
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    for (int turn = 0; turn <= captured; turn++) {
        CU(cudaMemset(r->out.data, 0xff, out_bytes(r)));
        CU(cudaDeviceSynchronize());
        if (turn) CU(cudaStreamBeginCapture(c->stream, cudaStreamCaptureModeThreadLocal));
        c->capturing = turn;
        c->s.n_rows = n;
        const bg_status st =
            glu ? bg_cuda_linear_glu(&c->base, (bg_act *)&r->out, r->l, &r->x, BG_SILU, &err)
                : bg_cuda_linear(&c->base, (bg_act *)&r->out, r->l, &r->x, n, &err);
        c->s.n_rows = 0;
        c->capturing = false;
        cr_assert_eq(st, BG_OK, "%s", err.text);
        if (!turn) continue;
        CU(cudaStreamEndCapture(c->stream, &graph));
        CU(cudaGraphInstantiate(&exec, graph, 0));
        CU(cudaGraphLaunch(exec, c->stream));
        CU(cudaStreamSynchronize(c->stream));
        CU(cudaGraphExecDestroy(exec));
        CU(cudaGraphDestroy(graph));
    }
    char *raw = from_device(r->out.data, out_bytes(r));
    float *got = malloc((size_t)n * cols * sizeof *got);
    if (glu) {
        for (size_t t = 0; t < (size_t)n; t++)
            for (size_t j = 0; j < cols; j++)
                got[t * cols + j] =
                    bg_f16_to_f32(((uint16_t *)raw)[tile_index((size_t)o.stride, t, j)]);
        for (size_t j = 0; j < cols; j++)
            cr_assert_eq(((uint16_t *)raw)[tile_index((size_t)o.stride, (size_t)n, j)], 0xffff);
    } else {
        memcpy(got, raw, (size_t)n * cols * sizeof *got);
        cr_assert(all_poison(raw + (size_t)n * cols * 4, ((size_t)r->out.max_rows - n) * cols * 4));
    }
    free(raw);
    return got;
}

static void check_linear(uint32_t type, int64_t rows, int64_t k, bool glu, bool with_bias)
{
    static const int sizes[] = {255, 256, 300, MOST};
    uint8_t *a = matrix(type, rows, k, 21), *b = matrix(type, rows, k, 22);
    float *bias = random_f32((size_t)rows, 23, 1), *x = random_f32(MOST * (size_t)k, 24, 2);
    for (size_t i = 0; i < MOST * (size_t)k; i++)
        x[i] = bg_f16_to_f32(bg_f32_to_f16(x[i]));
    const bg_linear_part one = {"a", type, a, k, rows, 0, rows, 0, k, with_bias ? bias : NULL};
    const bg_linear_part two = {"b", type, b, k, rows, 0, rows, 0, k, NULL};
    const bg_linear_spec s = {
        .name = glu ? "glu" : "linear", .n_parts = 2, .parts = {one, two}, .glu = glu};
    const int64_t cols = glu ? rows : 2 * rows;
    run fast = run_new(true, &s, x, k, cols), own = run_new(false, &s, x, k, cols);
    float *w = malloc((size_t)(2 * rows * k) * sizeof *w);
    for (int64_t r = 0; r < 2 * rows; r++)
        bg_dequant_row(type, (r < rows ? a : b) + (size_t)(r % rows) * bg_qtype_row_bytes(type, k),
                       w + r * k, k);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        const int n = sizes[i];
        float *f = run_rows(&fast, n, false), *g = run_rows(&own, n, false);
        float *again = run_rows(&fast, n, true);
        const size_t all = (size_t)n * (size_t)cols;
        cr_assert_eq(memcmp(f, again, all * sizeof *f), 0, "%d rows: captured, other bits", n);
        /* Below the least number of rows it is the same kernel. */
        if (n < BG_CUDA_FAST_ROWS) cr_assert_eq(memcmp(f, g, all * sizeof *f), 0);
        for (size_t t = 0; t < (size_t)n; t += t < 8 || t + 9 > (size_t)n ? 1 : 29)
            for (size_t j = 0; j < (size_t)cols; j++) {
                double sum[2] = {0, 0}, size[2] = {1e-3, 1e-3};
                for (int part = 0; part <= glu; part++) {
                    const float *row = w + ((size_t)part * (size_t)rows + j) * (size_t)k;
                    for (size_t c = 0; c < (size_t)k; c++) {
                        const double v = (double)row[c] * (double)x[t * (size_t)k + c];
                        sum[part] += v;
                        size[part] += fabs(v);
                    }
                }
                if (with_bias && j < (size_t)rows) sum[0] += (double)bias[j];
                const double want = glu ? act(BGK_SILU, sum[0]) * sum[1] : sum[0];
                const double scale =
                    glu ? size[0] * (fabs(sum[1]) + 0.1) + size[1] * (fabs(sum[0]) + 0.1) : size[0];
                const size_t at = t * (size_t)cols + j;
                cr_assert(fabs((double)f[at] - want) <= 2e-3 * scale,
                          "%s type %u, %d rows: row %zu column %zu: %g, want %g", s.name,
                          (unsigned)type, n, t, j, (double)f[at], want);
                cr_assert(fabs((double)f[at] - (double)g[at]) <= 1e-2 * scale);
            }
        free(f);
        free(g);
        free(again);
    }
    cr_assert_not_null(fast.c->fast);
    bg_backend_free(&fast.c->base);
    bg_backend_free(&own.c->base);
    free(a);
    free(b);
    free(bias);
    free(x);
    free(w);
}

Test(fast, linears)
{
    NEEDS_GPU();
    if (!has_tiles()) cr_skip_test("not a GPU of compute capability 9.x");
    check_linear(BG_Q4_K, 130, 512, false, false);
    check_linear(BG_Q8_0, 65, 96, false, true);
    check_linear(BG_F16, 40, 40, false, false);
    check_linear(BG_Q6_K, 100, 256, true, false);
    check_linear(BG_Q8_0, 37, 96, true, true);
}

Test(fast, is_refused_without_tiles)
{
    NEEDS_GPU();
    const bg_backend_config config = {.compute = BG_COMPUTE_F32,
                                      .n_threads = 1,
                                      .first_cpu = -1,
                                      .fast_math = true,
                                      .max_tokens = 8,
                                      .max_seqs = 4,
                                      .max_out = 4,
                                      .max_ctx = 64,
                                      .vocab_size = 16};
    bg_error err = {0};
    bg_backend *b = NULL;
    cr_assert_neq(bg_cuda_backend_new(&b, &config, 0, &err), BG_OK);
    cr_assert_not_null(strstr(err.text, "--fast-math"), "%s", err.text);
}

/* ---- times ----------------------------------------------------------------------------------- */

typedef struct timed {
    run r;
    int n;
} timed;

static void call_timed(void *ctx, cudaStream_t stream)
{
    timed *t = ctx;
    bg_error err = {0};
    bg_cuda *c = t->r.c;
    cudaStream_t own = c->stream;
    c->stream = stream;
    c->s.n_rows = t->n;
    const bg_status st =
        t->r.l->tiles.n_ff ? bg_cuda_linear_glu(&c->base, &t->r.out, t->r.l, &t->r.x, BG_SILU, &err)
                           : bg_cuda_linear(&c->base, &t->r.out, t->r.l, &t->r.x, t->n, &err);
    cr_assert_eq(st, BG_OK, "%s", err.text);
    c->stream = own;
    c->s.n_rows = 0;
}

/* Llama-3.1-8B's, 256 to 8192 rows: microseconds and TFLOP/s, the library's beside ours. */
Test(fast, bench_linears)
{
    NEEDS_GPU();
    if (gpu_small() || !has_tiles()) cr_skip_test("not here");
    static const struct {
        const char *name;
        int64_t rows, k;
        bool glu;
    } list[] = {{"qkv", 6144, 4096, false},
                {"o", 4096, 4096, false},
                {"gate_up", 14336, 4096, true},
                {"down", 4096, 14336, false}};
    static const int sizes[] = {256, 512, 1024, 2048, 8192};
    for (size_t i = 0; i < sizeof list / sizeof *list; i++)
        for (int fast = 0; fast < 2; fast++) {
            const int64_t n = list[i].rows, k = list[i].k;
            const bg_linear_part p = {"w", BG_Q4_K, NULL, k, n, 0, n, 0, k, NULL};
            const bg_linear_spec s = {.name = list[i].name,
                                      .n_parts = list[i].glu ? 2 : 1,
                                      .parts = {p, p},
                                      .glu = list[i].glu};
            bg_backend_config config = {.compute = BG_COMPUTE_NATIVE,
                                        .n_threads = 1,
                                        .first_cpu = -1,
                                        .dummy = true,
                                        .fast_math = fast,
                                        .max_tokens = 8192,
                                        .max_seqs = 4,
                                        .max_out = 4,
                                        .max_ctx = 64,
                                        .vocab_size = 16};
            bg_error err = {0};
            bg_backend *b = NULL;
            if (bg_cuda_backend_new(&b, &config, 0, &err)) cr_skip_test("%s", err.text);
            timed t = {.r.c = (bg_cuda *)b};
            cr_assert_eq(bg_cuda_linear_new(b, &t.r.l, &s, &err), BG_OK, "%s", err.text);
            cr_assert_eq(bg_cuda_act_input_new(b, &t.r.x, "x", 8192, k, &err), BG_OK);
            cr_assert_eq((list[i].glu ? bg_cuda_act_input_new : bg_cuda_act_new)(b, &t.r.out, "out",
                                                                                 8192, n, &err),
                         BG_OK);
            float *x = random_f32((size_t)k * 8192, 5, 1);
            uint16_t *tiles = to_tiles(x, 8192, (size_t)k, 8192);
            CU(cudaMemcpy(t.r.x.data, tiles, (size_t)k * 8192 * 2, cudaMemcpyHostToDevice));
            free(x);
            free(tiles);
            for (size_t j = 0; j < sizeof sizes / sizeof *sizes; j++) {
                t.n = sizes[j];
                call_timed(&t, t.r.c->stream);
                CU(cudaDeviceSynchronize());
                const double us = gpu_time_us(call_timed, &t, 4);
                printf("%-8s %5d rows %-9s %9.1f us %6.0f T\n", list[i].name, t.n,
                       fast ? "fast-math" : "own", us,
                       2.0 * (double)t.n * (double)(list[i].glu ? 2 * n : n) * (double)k / us *
                           1e-6);
            }
            bg_backend_free(b);
        }
}
