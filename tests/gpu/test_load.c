/* tests/gpu/test_load.c - linears and embeddings as the backend loads them: pieces, shares, types
 * that the host dequantises, gate and up, biases, random weights; against bg_dequant_row. */
#include "gpu.h"
#include "tiles_host.h"

#include "backend/cuda/cuda.h"
#include "gguf/gguf.h"

static bg_cuda *backend(bg_compute compute, bool dummy, int vocab)
{
    const bg_backend_config config = {.compute = compute,
                                      .n_threads = 1,
                                      .first_cpu = -1,
                                      .dummy = dummy,
                                      .max_tokens = 8,
                                      .max_seqs = 4,
                                      .max_out = 4,
                                      .max_ctx = 64,
                                      .vocab_size = vocab};
    bg_error err = {0};
    bg_backend *b;
    cr_assert_eq(bg_cuda_backend_new(&b, &config, 0, &err), BG_OK, "%s", err.text);
    return (bg_cuda *)b;
}

/* Rows that bg_quant_row() or chance makes; all finite. */
static uint8_t *matrix(uint32_t type, int64_t rows, int64_t k)
{
    const size_t row = bg_qtype_row_bytes(type, k);
    uint8_t *p = malloc((size_t)rows * row);
    float *v = malloc((size_t)k * sizeof *v);
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t c = 0; c < k; c++)
            v[c] = 0.02f * gpu_random(type + 100, (uint64_t)(r % 61 * k + c));
        if (bg_quant_row(type, v, p + (size_t)r * row, k)) continue;
        for (size_t i = 0; i < row; i++) /* Q2_K */
            p[(size_t)r * row + i] = (uint8_t)bg_mix64((uint64_t)r * row + i);
        for (size_t b = 0; b < row / 84; b++) {
            const uint16_t d = 0x2000 + (uint16_t)b, m = 0x1c00;
            memcpy(p + (size_t)r * row + b * 84 + 80, &d, 2);
            memcpy(p + (size_t)r * row + b * 84 + 82, &m, 2);
        }
    }
    free(v);
    return p;
}

typedef struct loaded { /* what is on the device, here */
    const bg_linear *l;
    uint8_t *w;
    bgk_wtile *tiles;
    float *row_scale, *bias;
} loaded;

static loaded fetch(const bg_linear *l, bool tiled)
{
    loaded f = {.l = l, .w = from_device(l->w, l->w_bytes)};
    const size_t n = (size_t)l->tiles.n_tiles;
    const float *bias = tiled ? l->tiles.bias : l->bias;
    if (tiled) f.tiles = from_device(l->tiles.tiles, n * sizeof *f.tiles);
    if (tiled) f.row_scale = from_device(l->tiles.row_scale, n * 64 * sizeof(float));
    if (bias) f.bias = from_device(bias, (tiled ? n * 64 : (size_t)l->n_rows) * sizeof(float));
    return f;
}

static void fetched_free(loaded *f)
{
    free(f->w);
    free(f->tiles);
    free(f->row_scale);
    free(f->bias);
}

static double value(const bg_cuda *c, const loaded *f, int64_t out, int tile, int row, int64_t col)
{
    const size_t at = (size_t)(out * f->l->k_padded + col);
    if (!c->tiled)
        return c->weights == BGK_F32 ? (double)((float *)f->w)[at]
                                     : (double)bg_f16_to_f32(((uint16_t *)f->w)[at]);
    const bgk_wtile *t = &f->tiles[tile];
    const uint8_t *chunk = f->w + ((const uint8_t *)t->w - (const uint8_t *)f->l->w) +
                           col / 64 * bgk_chunk_bytes((bgk_format)t->format);
    return tile_value((bgk_format)t->format, chunk, row, (int)(col % 64)) *
           (double)f->row_scale[tile * 64 + row];
}

/* Some rows of each part, and all of their columns. */
static void check(const bg_cuda *c, const bg_linear *l, const bg_linear_spec *s)
{
    loaded f = fetch(l, c->tiled);
    int64_t out0 = 0;
    int tile0 = 0;
    for (int i = 0; i < s->n_parts; i++) {
        const bg_linear_part *p = &s->parts[i];
        float *w = malloc((size_t)p->k_total * sizeof *w);
        for (int64_t r = 0; r<p->n_rows; r += r> 200 && r < p->n_rows - 200 ? 37 : 1) {
            int tile, row;
            double most = 0;
            tile_of_row(s->glu, i == 1, (int)r, &tile, &row);
            tile += tile0;
            bg_dequant_row(p->type,
                           (const uint8_t *)p->data +
                               (size_t)(p->row0 + r) * bg_qtype_row_bytes(p->type, p->k_total),
                           w, p->k_total);
            for (int64_t j = 0; j < p->n_cols; j++)
                most = fmax(most, fabs((double)w[p->col0 + j]));
            const double bound = c->weights == BGK_F32 ? 0 : 0x1p-9 * most;
            for (int64_t j = 0; j < l->k_padded; j++) {
                const double want = j < p->n_cols ? (double)w[p->col0 + j] : 0;
                const double got = value(c, &f, out0 + r, tile, row, j);
                cr_assert(fabs(got - want) <= bound, "%s part %d row %lld column %lld: %g, want %g",
                          s->name, i, (long long)r, (long long)j, got, want);
            }
            const float b = !f.bias ? 0 : c->tiled ? f.bias[tile * 64 + row] : f.bias[out0 + r];
            cr_assert_eq(b, p->bias ? p->bias[r] : 0);
            if (c->tiled && !s->glu) {
                cr_assert_eq(f.tiles[tile].out0, out0 + r / 64 * 64);
                cr_assert(row < f.tiles[tile].n_rows);
            }
        }
        free(w);
        out0 += p->n_rows;
        if (!s->glu) tile0 += (int)((p->n_rows + 63) / 64);
    }
    fetched_free(&f);
}

static void end(bg_cuda *c)
{
    bg_error err = {0};
    bg_load_times t;
    cr_assert_eq(bg_cuda_load_end(&c->base, &t, &err), BG_OK, "%s", err.text);
    cr_assert_null(c->loader);
    bg_backend_free(&c->base);
}

static void all_linears(bg_compute compute)
{
    static const struct {
        uint32_t type;
        int64_t rows, k;
    } list[] = {{BG_Q4_K, 700, 512},  {BG_Q6_K, 130, 768},   {BG_Q8_0, 65, 96},
                {BG_Q5_0, 64, 64},    {BG_Q2_K, 200, 512},   {BG_F16, 100, 40},
                {BG_F32, 1300, 8192}, {BG_Q4_0, 9000, 4096}, {BG_Q2_K, 1100, 4096}};
    bg_error err = {0};
    bg_cuda *c = backend(compute, false, 16);
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        const uint32_t type = list[i].type;
        const int64_t n = list[i].rows, k = list[i].k;
        if (gpu_small() && n > 1000) continue;
        const int64_t block = bg_qtype_get(type)->block_values, col0 = k / block / 2 * block;
        uint8_t *data = matrix(type, n, k);
        float *bias = random_f32((size_t)n, 3, 1);
        const bg_linear_part all = {"all", type, data, k, n, 0, n, 0, k, bias};
        bg_linear_part a = all, b = all;
        a.n_rows = b.n_rows = b.row0 = n / 2;
        a.bias = NULL;
        const bg_linear_spec specs[] = {
            {.name = "whole", .n_parts = 1, .parts = {all}},
            {.name = "glu", .n_parts = 2, .parts = {a, b}, .glu = true},
            {.name = "shares",
             .n_parts = 3,
             .parts = {{"a", type, data, k, n, 3, n - 7, col0, k - col0, NULL},
                       {"none", type, data, k, n, 0, 0, col0, k - col0, NULL},
                       {"c", type, data, k, n, 1, 5, col0, k - col0, bias}}},
        };
        for (size_t s = 0; s < sizeof specs / sizeof *specs; s++) {
            bg_linear *l;
            cr_assert_eq(bg_cuda_linear_new(&c->base, &l, &specs[s], &err), BG_OK, "%s", err.text);
            check(c, l, &specs[s]);
        }
        free(data);
        free(bias);
    }
    end(c);
}

Test(load, native)
{
    NEEDS_GPU();
    all_linears(BG_COMPUTE_NATIVE);
}

Test(load, f32)
{
    NEEDS_GPU();
    all_linears(BG_COMPUTE_F32);
}

/* gate and up of different types share a format. */
Test(load, mixed_glu)
{
    NEEDS_GPU();
    static const uint32_t pairs[][2] = {
        {BG_Q4_K, BG_Q5_K}, {BG_Q6_K, BG_Q4_K}, {BG_Q2_K, BG_Q8_0}, {BG_Q8_0, BG_F16}};
    bg_error err = {0};
    bg_cuda *c = backend(BG_COMPUTE_NATIVE, false, 16);
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        uint8_t *gate = matrix(pairs[i][0], 150, 512), *up = matrix(pairs[i][1], 150, 512);
        const bg_linear_spec s = {
            .name = "mixed",
            .n_parts = 2,
            .parts = {{"gate", pairs[i][0], gate, 512, 150, 0, 150, 0, 512, NULL},
                      {"up", pairs[i][1], up, 512, 150, 0, 150, 0, 512, NULL}},
            .glu = true};
        bg_linear *l;
        cr_assert_eq(bg_cuda_linear_new(&c->base, &l, &s, &err), BG_OK, "%s", err.text);
        check(c, l, &s);
        free(gate);
        free(up);
    }
    end(c);
}

Test(load, embeddings)
{
    NEEDS_GPU();
    static const uint32_t types[] = {BG_Q6_K, BG_Q2_K, BG_F32};
    for (int f32 = 0; f32 < 2; f32++) {
        enum { ROWS = 5000, COLS = 768 };
        bg_error err = {0};
        bg_cuda *c = backend(f32 ? BG_COMPUTE_F32 : BG_COMPUTE_NATIVE, false, ROWS);
        float w[COLS];
        for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
            uint8_t *data = matrix(types[i], ROWS, COLS);
            char name[] = "table";
            const bg_tensor t = {
                .cname = name, .type = types[i], .ne = {COLS, ROWS, 1, 1}, .data = data};
            bg_embedding *e;
            cr_assert_eq(bg_cuda_embedding_new(&c->base, &e, &t, &err), BG_OK, "%s", err.text);
            uint8_t *got = from_device(e->data, (size_t)ROWS * COLS * (f32 ? 4 : 2));
            for (size_t r = 0; r < ROWS; r += 7) {
                bg_dequant_row(types[i], data + r * bg_qtype_row_bytes(types[i], COLS), w, COLS);
                for (size_t j = 0; j < COLS; j++) {
                    const float v = f32 ? ((float *)got)[r * COLS + j]
                                        : bg_f16_to_f32(((uint16_t *)got)[r * COLS + j]);
                    cr_assert_eq(v, f32 ? w[j] : bg_f16_to_f32(bg_f32_to_f16(w[j])), "row %zu", r);
                }
            }
            free(got);
            free(data);
        }
        end(c);
    }
}

/* Without any data: values of about the right size, the same each time. */
Test(load, dummy)
{
    NEEDS_GPU();
    double sums[2] = {0, 0};
    for (int turn = 0; turn < 2; turn++) {
        bg_error err = {0};
        bg_cuda *c = backend(BG_COMPUTE_NATIVE, true, 16);
        const bg_linear_spec s = {
            .name = "dummy",
            .n_parts = 1,
            .parts = {{"w", BG_Q4_K, NULL, 1024, 300, 0, 300, 0, 1024, NULL}}};
        bg_linear *l;
        cr_assert_eq(bg_cuda_linear_new(&c->base, &l, &s, &err), BG_OK, "%s", err.text);
        loaded f = fetch(l, c->tiled);
        double squares = 0;
        for (int r = 0; r < 300; r++)
            for (int j = 0; j < 1024; j++) {
                const double v = value(c, &f, r, r / 64, r % 64, j);
                squares += v * v;
                sums[turn] += v;
            }
        cr_assert(squares > 0.5 * 300 && squares < 2 * 300, "%g", squares);
        fetched_free(&f);
        end(c);
    }
    cr_assert_eq(sums[0], sums[1]);
}
