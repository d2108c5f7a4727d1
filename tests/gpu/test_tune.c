/* tests/gpu/test_tune.c - picked shapes: used, never seen in a result, and what tuning reports. */
#include "gpu.h"

#include <unistd.h>

#include "backend/cuda/cuda.h"
#include "backend/cuda/tune_table.h"

enum { VOCAB = 384, TOKENS = 260, OUT = 40 };

static bg_cuda *backend(bg_compute compute)
{
    const bg_backend_config config = {.compute = compute,
                                      .n_threads = 1,
                                      .first_cpu = -1,
                                      .dummy = true,
                                      .max_tokens = TOKENS,
                                      .max_seqs = OUT,
                                      .max_out = OUT,
                                      .max_ctx = 512,
                                      .vocab_size = VOCAB};
    bg_error err = {0};
    bg_backend *b;
    cr_assert_eq(bg_cuda_backend_new(&b, &config, 0, &err), BG_OK, "%s", err.text);
    return (bg_cuda *)b;
}

static bg_linear *linear(bg_cuda *c, const char *name, uint32_t type, int64_t rows, int64_t k,
                         bool glu)
{
    bg_error err = {0};
    bg_linear *l;
    const bg_linear_part p = {name, type, NULL, k, rows, 0, rows, 0, k, NULL};
    const bg_linear_spec s = {.name = name, .n_parts = glu ? 2 : 1, .parts = {p, p}, .glu = glu};
    cr_assert_eq(bg_cuda_linear_new(&c->base, &l, &s, &err), BG_OK, "%s", err.text);
    return l;
}

static void loaded(bg_cuda *c)
{
    bg_error err = {0};
    bg_load_times t;
    cr_assert_eq(bg_cuda_load_end(&c->base, &t, &err), BG_OK, "%s", err.text);
}

/* The bits that l gives for x, float32 or half. */
static unsigned char *result(bg_cuda *c, const bg_linear *l, bg_act *x, bg_act *rows, bg_act *tiles,
                             int n, size_t *bytes)
{
    bg_error err = {0};
    bg_act *to = l->tiles.n_ff ? tiles : rows;
    const size_t all = l->tiles.n_ff ? (size_t)((to->cols + 63) / 64 * 64 * 512) * 2
                                     : (size_t)(to->max_rows * to->cols) * 4;
    *bytes = all;
    CU(cudaMemsetAsync(to->data, 0xff, all, c->stream));
    c->s.n_rows = n;
    const bg_status st = l->tiles.n_ff ? bg_cuda_linear_glu(&c->base, to, l, x, BG_SILU, &err)
                                       : bg_cuda_linear(&c->base, to, l, x, n, &err);
    cr_assert_eq(st, BG_OK, "%s", err.text);
    return from_device(to->data, all);
}

/* A small model's linears: two of a size, of several formats, gate and up, a head. */
typedef struct fixture {
    bg_cuda *c;
    bg_linear *l[5];
    bg_act x, rows, tiles;
} fixture;

static fixture make(void)
{
    fixture f = {.c = backend(BG_COMPUTE_NATIVE)};
    bg_error err = {0};
    f.l[0] = linear(f.c, "a", BGK_Q4_K, 200, 1024, false);
    f.l[1] = linear(f.c, "b", BGK_Q4_K, 200, 1024, false);
    f.l[2] = linear(f.c, "c", BGK_Q6_K, 200, 1024, false);
    f.l[3] = linear(f.c, "gate_up", BGK_Q4_K, 448, 768, true);
    f.l[4] = linear(f.c, "head", BGK_Q8_0, VOCAB, 512, false);
    loaded(f.c);
    bg_backend *b = &f.c->base;
    cr_assert_eq(bg_cuda_act_input_new(b, &f.x, "x", TOKENS, 1024, &err), BG_OK);
    cr_assert_eq(bg_cuda_act_new(b, &f.rows, "rows", TOKENS, VOCAB, &err), BG_OK);
    cr_assert_eq(bg_cuda_act_input_new(b, &f.tiles, "tiles", TOKENS, 448, &err), BG_OK);
    CU(cudaDeviceSynchronize());
    CU(bgk_random_blocks(f.x.data, BGK_GGUF_F16, (int64_t)1024 * 512, 9, 0, 1, f.c->stream));
    return f;
}

/* Every class of tokens, every pick. */
Test(tune, picks_are_not_seen, .timeout = 60)
{
    NEEDS_GPU();
    fixture f = make();
    if (!f.c->tiled) cr_skip_test("not this GPU");
    for (int i = 0; i < 5; i++) {
        bg_linear *l = f.l[i];
        for (int k = 0; k < 9; k += gpu_small() ? 5 : 1) {
            const int n = bgk_class_most(k) < TOKENS ? bgk_class_most(k) : TOKENS;
            size_t bytes;
            memset(l->tiles.shape, 0, sizeof l->tiles.shape);
            unsigned char *want = result(f.c, l, &f.x, &f.rows, &f.tiles, n, &bytes);
            for (int s = 0; s < BGK_SHAPES; s++) {
                l->tiles.shape[k] = (uint8_t)(1 + s);
                cr_assert_eq((int)bgk_matmul_shape(&l->tiles, n), s);
                unsigned char *got = result(f.c, l, &f.x, &f.rows, &f.tiles, n, &bytes);
                cr_expect_arr_eq(got, want, bytes, "%s, %d tokens, %s", l->name, n,
                                 bg_cuda_shape_name((bgk_shape)s));
                free(got);
            }
            /* A pick is used: there is no such shape. */
            bg_error err = {0};
            l->tiles.shape[k] = 1 + BGK_SHAPES;
            f.c->s.n_rows = n;
            cr_expect_neq(l->tiles.n_ff
                              ? bg_cuda_linear_glu(&f.c->base, &f.tiles, l, &f.x, BG_SILU, &err)
                              : bg_cuda_linear(&f.c->base, &f.rows, l, &f.x, n, &err),
                          BG_OK);
            free(want);
        }
    }
    bg_backend_free(&f.c->base);
}

Test(tune, reports_and_picks, .timeout = 60)
{
    NEEDS_GPU();
    if (gpu_small()) cr_skip_test("many launches");
    fixture f = make();
    if (!f.c->tiled) cr_skip_test("not this GPU");
    unsigned char *before[5];
    size_t bytes[5];
    for (int i = 0; i < 5; i++)
        before[i] = result(f.c, f.l[i], &f.x, &f.rows, &f.tiles, OUT, &bytes[i]);
    bg_error err = {0};
    bg_tune t;
    cr_assert_eq(bg_cuda_tune(&f.c->base, &t, &err), BG_OK, "%s", err.text);
    /* Four sizes; 260 tokens are in the ninth class, a head's 40 in the fourth. */
    cr_assert_eq(t.n, 3 * 9 + 4);
    int at = 0;
    for (int i = 0; i < 5; i++) {
        if (i == 1) continue; /* the first one's size */
        const int classes = i == 4 ? 4 : 9;
        for (int k = 0; k < classes; k++) {
            const bg_tune_row *r = &t.rows[at++];
            const int most = i == 4 ? OUT : TOKENS;
            cr_expect_eq(strcmp(r->name, f.l[i]->name), 0);
            cr_expect_eq(r->n_linears, i == 0 ? 2 : 1);
            cr_expect_eq(r->from, k ? bgk_class_most(k - 1) + 1 : 1);
            cr_expect_eq(r->to, bgk_class_most(k) < most ? bgk_class_most(k) : most);
            cr_expect(r->us > 0 && r->us <= r->before_us, "%g, %g", r->us, r->before_us);
            cr_expect_eq(r->parts, f.l[i]->tiles.splits);
            for (int p = 0; p < BG_TUNE_PARTS; p++)
                cr_expect(r->part_us[p] > 0 && r->part_us[p] < 1e6);
            const int pick = f.l[i]->tiles.shape[k];
            cr_assert(pick >= 1 && pick <= BGK_SHAPES);
            cr_expect_eq(strcmp(bg_cuda_shape_name((bgk_shape)(pick - 1)), r->best), 0);
        }
        for (int k = classes; k < BGK_TOKEN_CLASSES; k++)
            cr_expect_eq(f.l[i]->tiles.shape[k], 0);
    }
    cr_expect_arr_eq(f.l[0]->tiles.shape, f.l[1]->tiles.shape, BGK_TOKEN_CLASSES);
    for (int i = 0; i < 5; i++) {
        unsigned char *got = result(f.c, f.l[i], &f.x, &f.rows, &f.tiles, OUT, &bytes[i]);
        cr_expect_arr_eq(got, before[i], bytes[i], "%s", f.l[i]->name);
        free(got);
        free(before[i]);
    }
    free(t.rows);
    bg_backend_free(&f.c->base);
}

/* A table from a file comes first, for linears loaded after it; wrong ones say where. */
Test(tune, table_from_a_file)
{
    NEEDS_GPU();
    static const struct {
        const char *text, *wrong;
    } list[] = {
        {"{\"rows\": []}", NULL},
        {"{\"rows\": [{\"tiles\": 4, \"chunks\": 16, \"parts\": 2, \"formats\": 1, \"from\": 33, "
         "\"shape\": \"64x4\", \"us\": 1.5}]}",
         NULL},
        {"{\"rows\": 3}", "rows"},
        {"[", "expected"},
        {"{\"rows\": [{\"tiles\": 4}]}", "rows[0]"},
        {"{\"rows\": [{\"tiles\": 4, \"chunks\": 16, \"parts\": 2, \"formats\": 1, \"from\": 34, "
         "\"shape\": \"64x4\"}]}",
         "from"},
        {"{\"rows\": [{\"tiles\": 4, \"chunks\": 16, \"parts\": 2, \"formats\": 1, \"from\": 33, "
         "\"shape\": \"64x9\"}]}",
         "shape"},
    };
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        char path[] = "/tmp/batchgen_tune_XXXXXX";
        const int fd = mkstemp(path);
        cr_assert(fd >= 0 && write(fd, list[i].text, strlen(list[i].text)) > 0);
        close(fd);
        bg_cuda *c = backend(BG_COMPUTE_NATIVE);
        bg_error err = {0};
        const bg_status st = bg_cuda_picks_read(c, path, &err);
        unlink(path);
        cr_expect_eq(st, list[i].wrong ? BG_ARG : BG_OK, "%zu: %s", i, err.text);
        if (list[i].wrong) cr_expect(strstr(err.text, list[i].wrong), "%s", err.text);
        if (i == 1 && c->tiled) {
            const bg_linear *l = linear(c, "a", BGK_Q4_K, 200, 1024, false);
            for (int k = 0; k < BGK_TOKEN_CLASSES; k++)
                cr_expect_eq(l->tiles.shape[k], k == 3 ? 1 + BGK_64X4 : 0);
            loaded(c);
        }
        bg_backend_free(&c->base);
    }
}

Test(tune, nothing_to_choose)
{
    NEEDS_GPU();
    bg_cuda *c = backend(BG_COMPUTE_F32);
    bg_error err = {0};
    bg_tune t;
    cr_expect_eq(bg_cuda_tune(&c->base, &t, &err), BG_ARG);
    cr_expect_eq(t.n, 0);
    bg_backend_free(&c->base);
}
