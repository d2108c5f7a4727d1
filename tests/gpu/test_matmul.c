/* tests/gpu/test_matmul.c - quantised weights times activations on the tensor cores, against
 * float64 sums of the stored weights (rounded to half as the kernel's one FMA does). */
#include "gpu.h"
#include "tiles_host.h"

typedef struct problem {
    bgk_format format;
    int rows, k, tokens, splits;
    bool glu, bias;
} problem;

typedef struct device_weights {
    bgk_weights w;
    bgk_wtile *tiles;
    void *data;
    float *row_scale, *bias;
} device_weights;

static device_weights put_weights(const host_tiles *t, int rows, int splits, bool glu,
                                  const float *bias)
{
    device_weights d = {0};
    bgk_wtile *tiles = calloc((size_t)t->n_tiles, sizeof *tiles);
    d.data = to_device(t->data, t->bytes);
    for (int i = 0; i < t->n_tiles; i++)
        tiles[i] = (bgk_wtile){.w = (char *)d.data + (size_t)i * (size_t)t->n_chunks *
                                                         (size_t)bgk_chunk_bytes(t->format),
                               .format = t->format,
                               .out0 = 64 * i,
                               .n_rows = rows - 64 * i < 64 ? rows - 64 * i : 64};
    d.tiles = to_device(tiles, (size_t)t->n_tiles * sizeof *tiles);
    d.row_scale = to_device(t->row_scale, (size_t)t->n_tiles * 64 * sizeof(float));
    if (bias) d.bias = to_device(bias, (size_t)t->n_tiles * 64 * sizeof(float));
    d.w = (bgk_weights){.tiles = d.tiles,
                        .row_scale = d.row_scale,
                        .bias = d.bias,
                        .n_tiles = t->n_tiles,
                        .n_chunks = t->n_chunks,
                        .splits = splits,
                        .formats = 1u << t->format,
                        .n_ff = glu ? rows : 0};
    free(tiles);
    return d;
}

static void free_weights(device_weights *d)
{
    cudaFree(d->tiles);
    cudaFree(d->data);
    cudaFree(d->row_scale);
    cudaFree(d->bias);
}

/* The weight as the kernel's half FMA gives it. */
static double weight(const host_tiles *t, int tile, int row, int c)
{
    const uint8_t *chunk = t->data + ((size_t)tile * (size_t)t->n_chunks + (size_t)(c / 64)) *
                                         (size_t)bgk_chunk_bytes(t->format);
    const float v = (float)tile_value(t->format, chunk, row, c % 64);
    return (double)bg_f16_to_f32(bg_f32_to_f16(v)) * (double)t->row_scale[tile * 64 + row];
}

static double silu(double v)
{
    return v / (1 + exp(-v));
}

/* BGK_8W once more, the product that is early, and two beside each other. */
enum { REHEARSED = BGK_SHAPES, EARLY, PAIR, WAYS };

static cudaError_t multiply(int way, const bgk_out *out, bgk_weights *w, const void *x,
                            int64_t x_stride, int tokens)
{
    w->idle = way == REHEARSED;
    if (way == EARLY) {
        const cudaError_t e = bgk_matmul_early(out, w, x, x_stride, tokens, BGK_SILU, 0);
        if (e != cudaErrorNotSupported) return e;
    }
    if (way == PAIR) {
        cudaError_t e = bgk_matmul_start(out, w, x, x_stride, tokens, BGK_SILU, BGK_HOLDS, 0);
        if (e == cudaSuccess) /* over what it writes, the same */
            e = bgk_matmul_start(out, w, x, x_stride, tokens, BGK_SILU, BGK_BESIDE, 0);
        if (e != cudaErrorNotSupported) return e;
    }
    return bgk_matmul_as(out, w, x, x_stride, tokens, BGK_SILU,
                         way < BGK_SHAPES ? (bgk_shape)way : BGK_8W, 0);
}

/* Runs p with each shape; all must agree bit for bit, and with float64. */
static void check(const problem *p)
{
    const size_t rows = (size_t)p->rows, k = (size_t)p->k, n = (size_t)p->tokens;
    const size_t stride = (n + 255) / 256 * 256,
                 out_cols = p->glu ? (rows + 63) / 64 * 64 : rows + 3;
    tile_matrix a = tile_matrix_random(p->format, p->rows, p->k, 11, 0.05f);
    tile_matrix up = tile_matrix_random(p->format, p->rows, p->k, 12, 0.05f);
    host_tiles t = pack_tiles_host(&a, p->glu ? &up : NULL);
    float *bias = p->bias ? random_f32((size_t)t.n_tiles * 64, 5, 0.5f) : NULL;
    float *x = random_f32(n * k, 3, 2);
    for (size_t i = 0; i < n * k; i++)
        x[i] = bg_f16_to_f32(bg_f32_to_f16(x[i]));
    uint16_t *tiles = to_tiles(x, n, k, stride);
    void *dx = to_device(tiles, (k + 63) / 64 * stride * 128);
    device_weights d = put_weights(&t, p->rows, p->splits, p->glu, bias);
    const size_t out_bytes = p->glu ? out_cols * stride * 2 : n * out_cols * 4;

    double *want = malloc(n * rows * sizeof *want), *scale = malloc(n * rows * sizeof *scale);
    double *w = malloc(k * sizeof *w), *wu = malloc(k * sizeof *wu);
    for (size_t r = 0; r < rows; r++) {
        int tile, row, tile_u, row_u;
        tile_of_row(p->glu, false, (int)r, &tile, &row);
        tile_of_row(p->glu, true, (int)r, &tile_u, &row_u);
        for (size_t c = 0; c < k; c++) {
            w[c] = weight(&t, tile, row, (int)c);
            if (p->glu) wu[c] = weight(&t, tile_u, row_u, (int)c);
        }
        for (size_t j = 0; j < n; j++) {
            double s = 0, m = 0, u = 0, mu = 0;
            for (size_t c = 0; c < k; c++) {
                const double v = (double)x[j * k + c];
                s += w[c] * v;
                m += fabs(w[c] * v);
                if (!p->glu) continue;
                u += wu[c] * v;
                mu += fabs(wu[c] * v);
            }
            if (bias) s += (double)bias[tile * 64 + row];
            if (bias && p->glu) u += (double)bias[tile_u * 64 + row_u];
            want[j * rows + r] = p->glu ? silu(s) * u : s;
            scale[j * rows + r] = p->glu ? (m + 0.1) * (fabs(u) + 0.1) + mu * (fabs(s) + 0.1) : m;
        }
    }
    void *first = NULL;
    for (int shape = 0; shape < WAYS; shape++) {
        void *out = poisoned(out_bytes + GUARD);
        const bgk_out o = {out, p->glu ? BGK_TILES : BGK_ROWS,
                           (int64_t)(p->glu ? stride : out_cols)};
        CU(multiply(shape, &o, &d.w, dx, (int64_t)stride, p->tokens));
        unsigned char *got = from_device(out, out_bytes + GUARD);
        cudaFree(out);
        cr_expect(all_poison(got + out_bytes, GUARD), "wrote past the end");
        float *val = malloc(n * rows * sizeof *val);
        size_t stray = 0;
        for (size_t j = 0; j < stride; j++)
            for (size_t r = 0; r < out_cols; r++) {
                if (!p->glu && j >= n) continue;
                float v;
                uint16_t h = 0;
                if (p->glu) {
                    memcpy(&h, got + 2 * tile_index(stride, j, r), 2);
                    v = bg_f16_to_f32(h);
                } else {
                    memcpy(&v, got + 4 * (j * out_cols + r), 4);
                }
                if (j < n && r < rows)
                    val[j * rows + r] = v;
                else if (p->glu && j < n ? h != 0 : !isnan(v))
                    stray++;
            }
        cr_expect_eq(stray, 0,
                     "%zu values outside were written (or columns that fill up are not 0)", stray);
        worst e = worst_of(val, want, scale, 1e-6, n * rows);
        cr_expect(
            e.err < (p->glu ? 1.5e-3 : 1e-4),
            "format %d [%zu, %zu] x %zu, splits %d, glu %d, shape %d: error %.3g at token %zu row "
            "%zu: got %.8g want %.8g",
            p->format, rows, k, n, p->splits, p->glu, shape, e.err, e.at / rows, e.at % rows,
            (double)val[e.at], want[e.at]);
        free(val);
        if (!first) {
            first = got;
            continue;
        }
        cr_expect_arr_eq(got, first, out_bytes, "shape %d gives other bits", shape);
        free(got);
    }
    /* One token alone has the bits it has in the batch. */
    if (n > 1 && !p->glu) {
        const size_t at = n - 1;
        uint16_t *alone = to_tiles(x + at * k, 1, k, 256);
        void *da = to_device(alone, (k + 63) / 64 * 256 * 128), *out = poisoned(out_cols * 4);
        const bgk_out o = {out, BGK_ROWS, (int64_t)out_cols};
        CU(bgk_matmul(&o, &d.w, da, 256, 1, BGK_SILU, 0));
        float *got = from_device(out, out_cols * 4);
        size_t other = 0, where = 0;
        for (size_t r = rows; r-- > 0;)
            if (memcmp(got + r, (char *)first + (at * out_cols + r) * 4, 4)) other++, where = r;
        cr_expect_eq(
            other, 0,
            "format %d [%zu, %zu], splits %d: alone, token %zu has other bits in %zu rows, "
            "the first is %zu: %.9g",
            p->format, rows, k, p->splits, at, other, where, (double)got[where]);
        cudaFree(out);
        cudaFree(da);
        free(alone);
        free(got);
    }
    free(first);
    free(want);
    free(scale);
    free(w);
    free(wu);
    free(x);
    free(bias);
    free(tiles);
    cudaFree(dx);
    free_weights(&d);
    host_tiles_free(&t);
    tile_matrix_free(&a);
    tile_matrix_free(&up);
}

Test(matmul, every_format, .timeout = 60)
{
    NEEDS_GPU();
    for (int f = 0; f < BGK_FORMATS; f++) {
        const problem list[] = {
            {f, 64, 64, 1, 1, false, false},      {f, 64, 256, 8, 1, false, false},
            {f, 130, 320, 9, 1, false, true},     {f, 65, 96, 17, 1, false, false},
            {f, 200, 576, 33, 1, false, false},   {f, 192, 1024, 65, 2, false, true},
            {f, 320, 1088, 130, 2, false, false}, {f, 256, 2048, 3, 4, false, false},
            {f, 130, 1088, 20, 4, false, true},   {f, 64, 192, 2, 4, false, false},
            {f, 200, 1088, 150, 4, false, true},  {f, 64, 256, 5, 1, true, false},
            {f, 160, 384, 70, 1, true, true},     {f, 96, 832, 129, 2, true, false},
        };
        for (size_t i = 0; i < (gpu_small() ? 4 : sizeof list / sizeof *list); i++)
            check(&list[i]);
    }
}

Test(matmul, many_places)
{
    NEEDS_GPU();
    if (gpu_small()) cr_skip_test("large");
    check(&(problem){BGK_W4, 1024, 512, 300, 1, false, false});
    check(&(problem){BGK_W6, 2048, 256, 600, 1, false, false});
    check(&(problem){BGK_W4, 512, 1024, 700, 1, true, false});
    /* Too many tiles for a cluster with a block for each part: two blocks, or none. */
    check(&(problem){BGK_W8, 3000, 1024, 30, 4, false, false});
    check(&(problem){BGK_W4, 5800, 512, 30, 4, false, false});
    check(&(problem){BGK_W4, 5800, 512, 30, 2, false, false});
}

/* Parts of several formats in one linear. */
Test(matmul, mixed_formats)
{
    NEEDS_GPU();
    const int rows[] = {128, 64, 64, 40, 64}, k = 640, n = 37;
    float *x = random_f32((size_t)n * k, 3, 1);
    for (int i = 0; i < n * k; i++)
        x[i] = bg_f16_to_f32(bg_f32_to_f16(x[i]));
    uint16_t *tiles = to_tiles(x, n, k, 256);
    void *dx = to_device(tiles, (size_t)k / 64 * 256 * 128);
    bgk_wtile list[8];
    float scales[8 * 64];
    host_tiles t[BGK_FORMATS];
    int n_tiles = 0, out0 = 0;
    for (int f = 0; f < BGK_FORMATS; f++) {
        tile_matrix a = tile_matrix_random(f, rows[f], k, 40 + (uint64_t)f, 0.05f);
        t[f] = pack_tiles_host(&a, NULL);
        tile_matrix_free(&a);
        char *data = to_device(t[f].data, t[f].bytes);
        for (int i = 0; i < t[f].n_tiles; i++) {
            memcpy(scales + n_tiles * 64, t[f].row_scale + i * 64, 64 * sizeof *scales);
            list[n_tiles++] =
                (bgk_wtile){data + (size_t)i * (size_t)t[f].n_chunks * (size_t)bgk_chunk_bytes(f),
                            f, out0 + 64 * i, rows[f] - 64 * i < 64 ? rows[f] - 64 * i : 64, 0};
        }
        out0 += rows[f];
    }
    bgk_weights w = {.tiles = to_device(list, sizeof *list * (size_t)n_tiles),
                     .row_scale = to_device(scales, sizeof *scales * 64 * (size_t)n_tiles),
                     .n_tiles = n_tiles,
                     .n_chunks = k / 64,
                     .splits = 1,
                     .formats = (1u << BGK_FORMATS) - 1};
    for (int splits = 1; splits <= 2; splits++)
        for (int shape = 0; shape < WAYS; shape++) {
            w.splits = splits;
            const bgk_out o = {poisoned((size_t)n * (size_t)out0 * 4), BGK_ROWS, out0};
            CU(multiply(shape, &o, &w, dx, 256, n));
            float *got = from_device(o.data, (size_t)n * (size_t)out0 * 4);
            double worst_err = 0;
            for (int f = 0, base = 0; f < BGK_FORMATS; base += rows[f++])
                for (int r = 0; r < rows[f]; r++)
                    for (int j = 0; j < n; j += 3) {
                        double s = 0, m = 1e-6;
                        for (int c = 0; c < k; c++) {
                            const double v =
                                weight(&t[f], r / 64, r % 64, c) * (double)x[j * k + c];
                            s += v;
                            m += fabs(v);
                        }
                        const double e = fabs((double)got[j * out0 + base + r] - s) / m;
                        worst_err = e <= worst_err ? worst_err : e;
                    }
            cr_expect(worst_err < 1e-4, "shape %d, splits %d: error %g", shape, splits, worst_err);
            cudaFree(o.data);
            free(got);
        }
}

/* ---- layouts of the result, block-diagonal weights ---------------------------------------------
 */

typedef struct blocks {
    bgk_format format;
    int n_blocks, rows, k; /* of one block */
    int x_groups;          /* from one block's columns to the next one's */
    int tokens, splits;
    bgk_layout layout;
} blocks;

static size_t place_in(const blocks *b, size_t stride, size_t row, size_t col)
{
    return b->layout == BGK_TILES ? tile_index(stride, row, col) : row * stride + col;
}

static void check_blocks(const blocks *b)
{
    const size_t n_blocks = (size_t)b->n_blocks, rows = (size_t)b->rows, k = (size_t)b->k,
                 n = (size_t)b->tokens, cols = n_blocks * rows,
                 x_cols = ((n_blocks - 1) * (size_t)b->x_groups + (k + 63) / 64) * 64,
                 x_stride = (n + 255) / 256 * 256;
    const size_t all = (cols + 63) / 64 * 64;
    const size_t stride = b->layout == BGK_TILES ? x_stride : cols + 5;
    const size_t values = b->layout == BGK_TILES ? all * stride : n * stride,
                 each = b->layout == BGK_ROWS ? 4 : 2;
    float *x = random_f32(n * x_cols, 3, 2);
    for (size_t i = 0; i < n * x_cols; i++)
        x[i] = bg_f16_to_f32(bg_f32_to_f16(x[i]));
    uint16_t *xt = to_tiles(x, n, x_cols, x_stride);
    void *dx = to_device(xt, x_cols / 64 * x_stride * 128);
    host_tiles *t = calloc(n_blocks, sizeof *t);
    void **data = calloc(n_blocks, sizeof *data);
    const int tiles = (b->rows + 63) / 64, n_tiles = tiles * b->n_blocks;
    bgk_wtile *list = calloc((size_t)n_tiles, sizeof *list);
    float *scales = malloc((size_t)n_tiles * 64 * sizeof *scales);
    for (int i = 0; i < b->n_blocks; i++) {
        tile_matrix a = tile_matrix_random(b->format, b->rows, b->k, 60 + (uint64_t)i, 0.05f);
        t[i] = pack_tiles_host(&a, NULL);
        tile_matrix_free(&a);
        data[i] = to_device(t[i].data, t[i].bytes);
        memcpy(scales + i * tiles * 64, t[i].row_scale, (size_t)tiles * 64 * sizeof *scales);
        for (int j = 0; j < tiles; j++)
            list[i * tiles + j] =
                (bgk_wtile){.w = (char *)data[i] + (size_t)j * (size_t)t[i].n_chunks *
                                                       (size_t)bgk_chunk_bytes(b->format),
                            .format = b->format,
                            .out0 = i * b->rows + 64 * j,
                            .n_rows = b->rows - 64 * j < 64 ? b->rows - 64 * j : 64,
                            .x_chunk0 = i * b->x_groups};
    }
    void *d_list = to_device(list, (size_t)n_tiles * sizeof *list),
         *d_scales = to_device(scales, (size_t)n_tiles * 64 * sizeof *scales);
    bgk_weights w = {.tiles = d_list,
                     .row_scale = d_scales,
                     .n_tiles = n_tiles,
                     .n_chunks = (b->k + 63) / 64,
                     .splits = b->splits,
                     .formats = 1u << b->format,
                     .n_out = (int)cols,
                     .block_tiles = tiles};
    double *want = malloc(n * cols * sizeof *want), *scale = malloc(n * cols * sizeof *scale);
    for (size_t c = 0; c < cols; c++)
        for (size_t j = 0; j < n; j++) {
            const size_t block = c / rows, r = c % rows;
            double s = 0, m = 0;
            for (size_t i = 0; i < k; i++) {
                const double v = weight(&t[block], (int)(r / 64), (int)(r % 64), (int)i) *
                                 (double)x[j * x_cols + block * (size_t)b->x_groups * 64 + i];
                s += v;
                m += fabs(v);
            }
            want[j * cols + c] = s;
            scale[j * cols + c] = m;
        }
    unsigned char *first = NULL;
    for (int shape = 0; shape < WAYS; shape++) {
        void *out = poisoned(values * each + GUARD);
        const bgk_out o = {out, b->layout, (int64_t)stride};
        CU(multiply(shape, &o, &w, dx, (int64_t)x_stride, b->tokens));
        unsigned char *got = from_device(out, values * each + GUARD);
        cudaFree(out);
        cr_expect(all_poison(got + values * each, GUARD), "wrote past the end");
        float *val = malloc(n * cols * sizeof *val);
        size_t stray = 0;
        for (size_t j = 0; j < (b->layout == BGK_TILES ? stride : n); j++)
            for (size_t c = 0; c < (b->layout == BGK_TILES ? all : stride); c++) {
                float v;
                uint16_t h = 0;
                const size_t at = place_in(b, stride, j, c);
                if (each == 4) {
                    memcpy(&v, got + 4 * at, 4);
                } else {
                    memcpy(&h, got + 2 * at, 2);
                    v = bg_f16_to_f32(h);
                }
                if (j < n && c < cols)
                    val[j * cols + c] = v;
                else if (j < n && b->layout == BGK_TILES ? h != 0 : !isnan(v))
                    stray++;
            }
        cr_expect_eq(stray, 0, "%zu values outside were written (or are not 0)", stray);
        const worst e = worst_of(val, want, scale, 1e-6, n * cols);
        cr_expect(e.err < (each == 4 ? 1e-4 : 1e-3),
                  "format %d, %zu blocks [%zu, %zu], every %d groups, x %zu, splits %d, layout %d, "
                  "shape %d: error %.3g at token %zu column %zu: got %.8g want %.8g",
                  b->format, n_blocks, rows, k, b->x_groups, n, b->splits, b->layout, shape, e.err,
                  e.at / cols, e.at % cols, (double)val[e.at], want[e.at]);
        free(val);
        if (first) {
            cr_expect_arr_eq(got, first, values * each, "shape %d gives other bits", shape);
            free(got);
        } else {
            first = got;
        }
    }
    free(first);
    free(want);
    free(scale);
    free(x);
    free(xt);
    free(list);
    free(scales);
    cudaFree(dx);
    cudaFree(d_list);
    cudaFree(d_scales);
    for (size_t i = 0; i < n_blocks; i++) {
        cudaFree(data[i]);
        host_tiles_free(&t[i]);
    }
    free(t);
    free(data);
}

Test(matmul, layouts)
{
    NEEDS_GPU();
    static const blocks list[] = {
        {BGK_W4, 1, 64, 64, 0, 1, 1, BGK_TILES},
        {BGK_W4, 1, 130, 320, 0, 9, 1, BGK_TILES},
        {BGK_W6, 1, 200, 1024, 0, 70, 2, BGK_TILES},
        {BGK_W16, 1, 1, 128, 0, 3, 1, BGK_TILES},
        {BGK_W4, 1, 576, 512, 0, 130, 4, BGK_TILES},
        {BGK_W4, 1, 130, 320, 0, 9, 1, BGK_HALF_ROWS},
        {BGK_W8, 1, 256, 640, 0, 300, 2, BGK_HALF_ROWS},
    };
    for (size_t i = 0; i < (gpu_small() ? 2 : sizeof list / sizeof *list); i++)
        check_blocks(&list[i]);
}

Test(matmul, block_diagonal)
{
    NEEDS_GPU();
    static const blocks list[] = {
        {BGK_W4, 3, 64, 128, 2, 5, 1, BGK_ROWS},     {BGK_W4, 4, 512, 192, 4, 33, 1, BGK_TILES},
        {BGK_W8, 3, 192, 192, 4, 130, 1, BGK_TILES}, {BGK_W16, 5, 24, 96, 3, 40, 1, BGK_TILES},
        {BGK_W16, 3, 100, 64, 1, 7, 1, BGK_TILES},   {BGK_W6, 2, 128, 1088, 20, 70, 2, BGK_TILES},
        {BGK_W5, 2, 256, 512, 8, 300, 1, BGK_ROWS},
    };
    for (size_t i = 0; i < (gpu_small() ? 3 : sizeof list / sizeof *list); i++)
        check_blocks(&list[i]);
}

Test(matmul, refuses)
{
    NEEDS_GPU();
    bgk_wtile tile = {0};
    bgk_weights w = {.tiles = &tile,
                     .row_scale = (float *)&tile,
                     .n_tiles = 1,
                     .n_chunks = 1,
                     .splits = 1,
                     .formats = 1};
    bgk_out o = {&tile, BGK_ROWS, 64};
    void *x = (void *)4096;
    CU(bgk_matmul(&o, &w, x, 256, 0, BGK_SILU, 0));
    cr_expect_eq(bgk_matmul(&o, &w, x, 200, 1, BGK_SILU, 0), cudaErrorInvalidValue);
    cr_expect_eq(bgk_matmul(&o, &w, (char *)x + 64, 256, 1, BGK_SILU, 0), cudaErrorInvalidValue);
    cr_expect_eq(bgk_matmul(&o, &w, x, 256, 257, BGK_SILU, 0), cudaErrorInvalidValue);
    w.splits = 3;
    cr_expect_eq(bgk_matmul(&o, &w, x, 256, 1, BGK_SILU, 0), cudaErrorInvalidValue);
    w.splits = 1;
    o.layout = BGK_TILES;
    cr_expect_eq(bgk_matmul(&o, &w, x, 256, 1, BGK_SILU, 0), cudaErrorInvalidValue);
}

/* ---- times ------------------------------------------------------------------------------------
 */

typedef struct timed {
    bgk_out out;
    device_weights *d;
    int n_copies, next, tokens;
    bgk_shape shape;
    const void *x;
    int64_t stride;
} timed;

static void run_timed(void *ctx, cudaStream_t stream)
{
    timed *b = ctx;
    b->next = (b->next + 1) % b->n_copies;
    CU(bgk_matmul_as(&b->out, &b->d[b->next].w, b->x, b->stride, b->tokens, BGK_SILU, b->shape,
                     stream));
}

/* BENCH_MATMUL=1: the matrices of Llama 3.1 8B, weights rotated through more than the cache. */
Test(matmul, bench_llama_8b, .timeout = 600)
{
    NEEDS_GPU();
    if (!getenv("BENCH_MATMUL")) cr_skip_test("BENCH_MATMUL is not set");
    static const struct {
        const char *name;
        bgk_format f;
        int rows, k, splits;
        bool glu;
    } shapes[] = {
        {"qkv_a/2", BGK_W8, 2624, 6144, 2, false},  {"qkv_a/4", BGK_W8, 2624, 6144, 4, false},
        {"qkv", BGK_W4, 6144, 4096, 1, false},      {"qkv/2", BGK_W4, 6144, 4096, 2, false},
        {"qkv/4", BGK_W4, 6144, 4096, 4, false},    {"o/2", BGK_W4, 4096, 4096, 2, false},
        {"o/4", BGK_W4, 4096, 4096, 4, false},      {"gate_up", BGK_W4, 14336, 4096, 1, true},
        {"gateup/2", BGK_W4, 14336, 4096, 2, true}, {"down/2", BGK_W4, 4096, 14336, 2, false},
        {"down/4", BGK_W4, 4096, 14336, 4, false},  {"down6/4", BGK_W6, 4096, 14336, 4, false},
        {"head", BGK_W6, 128256, 4096, 1, false},
    };
    static const char *const names[BGK_SHAPES] = {"8x1",   "8x2",   "16x1",   "16x2", "32x1",
                                                  "32x2",  "64x1",  "64x2",   "64x4", "128x2",
                                                  "128x4", "64x2c", "128x2c", "8w"};
    static const int counts[] = {1, 8, 16, 32, 64, 128, 256, 512, 4096};
    enum { MOST = 4096, WIDEST = 28672 };
    float *x = random_f32(64 * 256, 7, 1);
    uint16_t *tiles = to_tiles(x, 256, 64, 256);
    char *dx = NULL;
    CU(cudaMalloc((void **)&dx, (size_t)14336 * MOST * 2));
    for (size_t at = 0; at < (size_t)14336 * MOST * 2; at += 256 * 128)
        CU(cudaMemcpy(dx + at, tiles, 256 * 128, cudaMemcpyHostToDevice));
    void *out = poisoned((size_t)512 * 128256 * 4);
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        const int rows = shapes[i].rows, k = shapes[i].k;
        tile_matrix a = tile_matrix_random(shapes[i].f, 64, k, 1, 0.02f);
        host_tiles one = pack_tiles_host(&a, NULL), t = one;
        const size_t tile_bytes = (size_t)one.n_chunks * (size_t)bgk_chunk_bytes(one.format);
        t.n_tiles = rows / 64 * (shapes[i].glu ? 2 : 1);
        t.bytes = tile_bytes * (size_t)t.n_tiles;
        t.data = malloc(t.bytes);
        t.row_scale = malloc((size_t)t.n_tiles * 64 * sizeof(float));
        for (int j = 0; j < t.n_tiles; j++) {
            memcpy(t.data + (size_t)j * tile_bytes, one.data, tile_bytes);
            memcpy(t.row_scale + j * 64, one.row_scale, 64 * sizeof(float));
        }
        const int n_copies = (int)(200000000 / t.bytes) + 2;
        device_weights *d = malloc((size_t)n_copies * sizeof *d);
        for (int c = 0; c < n_copies; c++)
            d[c] = put_weights(&t, rows, shapes[i].splits, shapes[i].glu, NULL);
        for (size_t m = 0; m < sizeof counts / sizeof *counts; m++) {
            if (rows > WIDEST && counts[m] > 512) continue;
            double best = 1e30;
            printf("%-8s %5d:", shapes[i].name, counts[m]);
            for (int s = 0; s < BGK_SHAPES; s++) {
                const int width = bgk_shape_tokens((bgk_shape)s);
                if (width < 64 && width < counts[m]) continue;
                if (width > 2 * counts[m] && width > 8) continue;
                timed b = {
                    .out = {out, shapes[i].glu ? BGK_TILES : BGK_ROWS, shapes[i].glu ? MOST : rows},
                    .d = d,
                    .n_copies = n_copies,
                    .tokens = counts[m],
                    .shape = (bgk_shape)s,
                    .x = dx,
                    .stride = MOST};
                const double us = gpu_time_us(run_timed, &b, counts[m] > 512 ? 8 : 2 * n_copies);
                printf(" %s %.1f", names[s], us);
                if (us < best) best = us;
            }
            printf("  best %.1f us %.2f TB/s %.0f T\n", best, (double)t.bytes / best * 1e-6,
                   2.0 * counts[m] * t.n_tiles * 64 * k / best * 1e-6);
            fflush(stdout);
        }
        for (int c = 0; c < n_copies; c++)
            free_weights(&d[c]);
        free(d);
        free(t.data);
        free(t.row_scale);
        host_tiles_free(&one);
        tile_matrix_free(&a);
    }
}
