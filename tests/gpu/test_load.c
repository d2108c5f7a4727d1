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

/* ---- caches of random weights ------------------------------------------------------------------
 */

/* What floats there are; sum is added to. */
static void check_floats(bgk_type type, const void *p, int64_t n, double *sum)
{
    double squares = 0;
    for (int64_t i = 0; i < n; i++) {
        const double v = type == BGK_F32   ? (double)((const float *)p)[i]
                         : type == BGK_F16 ? (double)bg_f16_to_f32(((const uint16_t *)p)[i])
                                           : (double)bg_bf16_to_f32(((const uint16_t *)p)[i]);
        cr_assert(fabs(v) < 1.75, "value %lld is %g", (long long)i, v);
        squares += v * v;
        *sum += (double)(i % 101) * v;
    }
    cr_assert(fabs(squares / (double)n - 1) < 0.15, "mean square %g", squares / (double)n);
}

/* int8 values [n, cols] with a scale each. */
static void check_q8(const int8_t *p, const float *scale, int64_t n, int64_t cols, double *sum)
{
    double squares = 0;
    for (int64_t i = 0; i < n; i++) {
        cr_assert(scale[i] > 0 && scale[i] < 1, "scale %lld is %g", (long long)i, (double)scale[i]);
        for (int64_t j = 0; j < cols; j++) {
            const double v = p[i * cols + j] * (double)scale[i];
            squares += v * v;
            *sum += (double)((i + j) % 101) * v;
        }
    }
    cr_assert(fabs(squares / (double)(n * cols) - 1) < 0.1, "mean square %g",
              squares / (double)(n * cols));
}

/* What nothing computed: all of it random numbers, as its kernels read them, the same each time. */
Test(load, dummy_cache)
{
    NEEDS_GPU();
    enum { LAYERS = 3, BLOCKS = 7, TOKENS = 16, INDEX = 2, INDEX_DIM = 128 };
    static const bg_cache_spec specs[] = {
        {.type = BG_CACHE_F16, .n_kv_heads = 2, .k_dim = 64, .v_dim = 64},
        {.type = BG_CACHE_BF16, .n_kv_heads = 1, .k_dim = 192, .v_dim = 128},
        {.type = BG_CACHE_Q8, .n_kv_heads = 2, .k_dim = 128, .v_dim = 128},
        {.type = BG_CACHE_F32, .n_kv_heads = 0, .k_dim = 64, .v_dim = 64},
        {.type = BG_CACHE_F16, .n_kv_heads = 1, .k_dim = 576, .v_dim = 512, .latent = 512},
        {.type = BG_CACHE_F32, .n_kv_heads = 1, .k_dim = 40, .v_dim = 32, .latent = 32},
        {.type = BG_CACHE_Q8, .n_kv_heads = 1, .k_dim = 576, .v_dim = 512, .latent = 512}};
    double sums[2][7] = {{0}};
    for (int i = 0; i < 2 * 7; i++) {
        bg_cache_spec spec = specs[i / 2];
        bg_error err = {0};
        bg_cuda *c =
            backend(spec.type == BG_CACHE_F32 ? BG_COMPUTE_F32 : BG_COMPUTE_NATIVE, true, 16);
        double *sum = &sums[i % 2][i / 2];
        spec.n_layers = LAYERS;
        spec.n_blocks = BLOCKS;
        spec.block_tokens = TOKENS;
        if (spec.latent) {
            spec.n_index = INDEX;
            spec.index_dim = INDEX_DIM;
            spec.index_top_k = 32;
        }
        const bg_status st = bg_cuda_cache_new(&c->base, &spec, &err);
        if (st == BG_ARG && spec.latent && spec.type == BG_CACHE_Q8) { /* no Hopper */
            end(c);
            continue;
        }
        cr_assert_eq(st, BG_OK, "%s", err.text);
        CU(cudaStreamSynchronize(c->stream));
        const bgk_cache *m = &c->cache;
        const int64_t slots = (int64_t)LAYERS * BLOCKS * TOKENS * spec.n_kv_heads;
        const size_t value = m->type == BGK_F32 ? 4 : m->type == BGK_Q8 ? 1 : 2;
        if (spec.latent && m->type == BGK_Q8) {
            const size_t each = bgk_mla_block_bytes(m);
            char *p = from_device(m->k, each * LAYERS * BLOCKS);
            for (int b = 0; b < LAYERS * BLOCKS; b++) {
                const char *at = p + (size_t)b * each;
                check_q8((const int8_t *)at, (const float *)(at + TOKENS * (512 + 128)), TOKENS,
                         512, sum);
                check_floats(BGK_F16, at + TOKENS * 512, TOKENS * 64, sum);
            }
            free(p);
        }
        for (int v = 0; v < (spec.latent ? 1 : 2) && slots; v++) {
            const int64_t cols = v ? spec.v_dim : spec.k_dim;
            if (spec.latent && m->type == BGK_Q8) break;
            void *p = from_device(v ? m->v : m->k, (size_t)(slots * cols) * value);
            float *scale = m->type == BGK_Q8 ? from_device(v ? m->v_scale : m->k_scale,
                                                           (size_t)slots * sizeof *scale)
                                             : NULL;
            if (scale)
                check_q8(p, scale, slots, cols, sum);
            else
                check_floats(m->type, p, slots * cols, sum);
            free(scale);
            free(p);
        }
        if (spec.latent) {
            const bgk_type type = m->type == BGK_Q8 ? BGK_F16 : m->type;
            const int64_t n = (int64_t)INDEX * BLOCKS * TOKENS * INDEX_DIM;
            void *p = from_device(c->index.keys, (size_t)n * (type == BGK_F32 ? 4 : 2));
            check_floats(type, p, n, sum);
            free(p);
        }
        end(c);
    }
    for (int i = 0; i < 7; i++)
        cr_assert_eq(sums[0][i], sums[1][i], "cache %d", i);
}

/* ---- block-diagonal ----------------------------------------------------------------------------
 */

typedef struct blocks {
    uint32_t type;
    int n_blocks, rows, k, x_stride; /* of a block */
    int row0, more;                  /* rows before and after those of a block in the file */
    bool input;                      /* the result is an input buffer */
} blocks;

static void check_blocks(bg_compute compute, const blocks *p)
{
    enum { T = 5 };
    bg_error err = {0};
    bg_cuda *c = backend(compute, false, 16);
    const int64_t file_rows = p->row0 + (int64_t)p->n_blocks * (p->rows + p->more),
                  cols = (int64_t)p->n_blocks * p->rows,
                  x_cols = (int64_t)p->n_blocks * p->x_stride;
    const size_t row = bg_qtype_row_bytes(p->type, p->k);
    uint8_t *data = matrix(p->type, file_rows, p->k);
    const bg_linear_spec spec = {.name = "blocks",
                                 .n_parts = 1,
                                 .parts = {{.name = "blocks",
                                            .type = p->type,
                                            .data = data,
                                            .k_total = p->k,
                                            .n_total = file_rows,
                                            .row0 = p->row0,
                                            .n_rows = p->rows,
                                            .n_cols = p->k}},
                                 .n_blocks = p->n_blocks,
                                 .block_bytes = (int64_t)row * (p->rows + p->more),
                                 .x_stride = p->x_stride};
    bg_linear *l;
    bg_act x, out;
    cr_assert_eq(bg_cuda_linear_new(&c->base, &l, &spec, &err), BG_OK, "%s", err.text);
    cr_assert_eq(bg_cuda_act_input_new(&c->base, &x, "x", 8, x_cols, &err), BG_OK, "%s", err.text);
    cr_assert_eq(
        (p->input ? bg_cuda_act_input_new : bg_cuda_act_new)(&c->base, &out, "out", 8, cols, &err),
        BG_OK, "%s", err.text);
    cr_assert_eq(bg_cuda_linear_rows(l), cols);
    free(data); /* nothing of it is needed any more */
    data = matrix(p->type, file_rows, p->k);
    float *v = random_f32((size_t)(T * x_cols), 8, 1), *w = malloc((size_t)p->k * sizeof *w);
    for (int64_t i = 0; i < T * x_cols; i++)
        v[i] = bg_f16_to_f32(bg_f32_to_f16(v[i]));
    const bgk_out in = bg_cuda_out(&x), o = bg_cuda_out(&out);
    if (in.layout == BGK_TILES) {
        uint16_t *tiles = to_tiles(v, T, (size_t)x_cols, (size_t)in.stride);
        CU(cudaMemcpy(in.data, tiles, (size_t)((x_cols + 63) / 64 * in.stride) * 128,
                      cudaMemcpyHostToDevice));
        free(tiles);
    } else {
        CU(cudaMemcpy(in.data, v, (size_t)(T * x_cols) * 4, cudaMemcpyHostToDevice));
    }
    CU(cudaDeviceSynchronize());
    bg_cuda_poison(&c->base, &out, 8);
    cr_assert_eq(bg_cuda_linear(&c->base, &out, l, &x, T, &err), BG_OK, "%s", err.text);
    const size_t values =
        o.layout == BGK_TILES ? (size_t)((cols + 63) / 64 * 64 * o.stride) : (size_t)(8 * o.stride);
    uint8_t *got = from_device(o.data, values * (o.layout == BGK_TILES ? 2 : 4));
    double worst_err = 0;
    for (int64_t n = 0; n < cols; n++) {
        const int64_t b = n / p->rows;
        bg_dequant_row(p->type,
                       data + (size_t)(p->row0 + b * (p->rows + p->more) + n % p->rows) * row, w,
                       p->k);
        for (int64_t t = 0; t < T; t++) {
            double sum = 0, size = 1e-6;
            for (int64_t i = 0; i < p->k; i++) {
                const double d = (double)w[i] * (double)v[t * x_cols + b * p->x_stride + i];
                sum += d;
                size += fabs(d);
            }
            float value;
            if (o.layout == BGK_TILES) {
                uint16_t h;
                memcpy(&h, got + 2 * tile_index((size_t)o.stride, (size_t)t, (size_t)n), 2);
                value = bg_f16_to_f32(h);
            } else {
                memcpy(&value, got + 4 * (t * o.stride + n), 4);
            }
            const double e = fabs((double)value - sum) / size;
            worst_err = e <= worst_err ? worst_err : e;
        }
    }
    cr_expect(worst_err < (compute == BG_COMPUTE_F32 ? 1e-5 : 1.5e-3),
              "type %u, %d blocks [%d, %d] every %d columns: error %.3g", p->type, p->n_blocks,
              p->rows, p->k, p->x_stride, worst_err);
    for (int64_t t = 0; o.layout == BGK_TILES && t < T; t++)
        for (int64_t n = cols; n < (cols + 63) / 64 * 64; n++) {
            uint16_t h;
            memcpy(&h, got + 2 * tile_index((size_t)o.stride, (size_t)t, (size_t)n), 2);
            cr_expect_eq(h, 0, "a filling column");
        }
    free(got);
    free(data);
    free(v);
    free(w);
    bg_backend_free(&c->base);
}

static const blocks diagonals[] = {
    {BG_Q8_0, 3, 64, 128, 192, 0, 0, true},  {BG_Q8_0, 4, 128, 192, 256, 256, 64, true},
    {BG_F32, 3, 24, 16, 24, 0, 0, true},     {BG_Q8_0, 5, 40, 96, 96, 40, 8, false},
    {BG_F32, 2, 32, 32, 48, 3, 5, true},     {BG_Q4_K, 2, 192, 512, 512, 0, 0, true},
    {BG_BF16, 4, 20, 100, 100, 0, 0, false}, {BG_F16, 1, 70, 100, 128, 0, 0, true},
};

Test(load, block_diagonal)
{
    NEEDS_GPU();
    for (size_t i = 0; i < sizeof diagonals / sizeof *diagonals; i++) {
        check_blocks(BG_COMPUTE_NATIVE, &diagonals[i]);
        check_blocks(BG_COMPUTE_F32, &diagonals[i]);
    }
}
