/* tests/gpu/test_elementwise.c - embedding rows, norms, gated activations, gathers, against
 * float64; what only copies or rounds once, against the very bits. */
#include "gpu.h"

static const int all_rows[] = {1, 3, 257};
static const int all_cols[] = {1, 5, 63, 64, 65, 576, 640, 4096, 5376, 16384, 16448};
enum { N_ROWS = 3, N_COLS = sizeof all_cols / sizeof *all_cols };
static const double EPS = 0x1p-24; /* half an ulp of float, relative */

/* Shapes for a test: true while there is another; c counts from 0. */
static bool shape(int c, int *rows, int *cols)
{
    if (c >= N_ROWS * N_COLS) return false;
    *rows = all_rows[c % N_ROWS];
    *cols = all_cols[c / N_ROWS];
    if (gpu_small() && *rows > 3) *rows = 9;
    return true;
}

/* Device memory for an output of floats [rows, stride], poisoned, with a guard. */
static float *out_rows(int rows, int stride)
{
    return poisoned(((size_t)rows * (size_t)stride + GUARD) * sizeof(float));
}

/* What lies beyond cols in every row, and behind the last, is as it was. */
static void check_untouched(const float *got, int rows, int cols, int stride, const char *what)
{
    for (int r = 0; r < rows; r++)
        cr_assert(all_poison(got + (size_t)r * stride + cols, (size_t)(stride - cols) * 4),
                  "%s [%d, %d]: written beyond row %d", what, rows, cols, r);
    cr_assert(all_poison(got + (size_t)rows * stride, GUARD * 4), "%s [%d, %d]: written behind",
              what, rows, cols);
}

/* ---- norms -------------------------------------------------------------------------------------
 */

typedef struct norm {
    int rows, cols, stride; /* stride of x, y and out in rows */
    bool tiles, add;
    float *x, *y, *w;    /* host */
    float *out, *summed; /* host, contiguous: out's values, x after it */
} norm;

static const float NORM_EPS = 1e-6f;

static size_t tile_stride(int rows)
{
    return ((size_t)rows + BGK_TILE_ROWS - 1) / BGK_TILE_ROWS * BGK_TILE_ROWS;
}

/* Rows [row0, row0 + rows) of n by one launch, into to[rows, cols]; sums into summed. */
static void run_norm(const norm *n, int row0, int rows, float *to, float *summed)
{
    const size_t stride = (size_t)n->stride, cols = (size_t)n->cols, ts = tile_stride(rows);
    const size_t padded = (cols + 63) / 64 * 64, bytes = (size_t)rows * stride * 4;
    float *padded_x = malloc(bytes), *padded_y = malloc(bytes);
    memset(padded_x, 0xff, bytes);
    memset(padded_y, 0xff, bytes);
    for (size_t r = 0; r < (size_t)rows; r++) {
        memcpy(padded_x + r * stride, n->x + ((size_t)row0 + r) * cols, cols * 4);
        memcpy(padded_y + r * stride, n->y + ((size_t)row0 + r) * cols, cols * 4);
    }
    float *x = to_device(padded_x, bytes), *y = to_device(padded_y, bytes);
    float *w = to_device(n->w, cols * 4);
    const size_t out_bytes = n->tiles ? padded * ts * 2 : bytes;
    char *base = poisoned(out_bytes + GUARD * 4 + 1024);
    char *at = base + (-(uintptr_t)base) % 1024;
    const bgk_out out = {at, n->tiles ? BGK_TILES : BGK_ROWS, (int64_t)(n->tiles ? ts : stride)};
    CU(bgk_rms_norm(&out, x, n->stride, n->add ? y : NULL, n->stride, w, NORM_EPS, rows, n->cols,
                    0));
    char *got = from_device(at, out_bytes + GUARD * 4);
    float *x_after = from_device(x, bytes);
    cr_assert(all_poison(got + out_bytes, GUARD * 4), "norm [%d, %d]: written behind", rows,
              n->cols);
    if (!n->tiles) check_untouched((float *)got, rows, n->cols, n->stride, "norm");
    for (size_t r = 0; r < (size_t)rows; r++) {
        memcpy(summed + r * cols, x_after + r * stride, cols * 4);
        cr_assert(all_poison(x_after + r * stride + cols, (stride - cols) * 4));
        for (size_t c = 0; n->tiles && c < padded; c++) {
            const uint16_t h = ((uint16_t *)got)[tile_index(ts, r, c)];
            if (c < cols)
                to[r * cols + c] = bg_f16_to_f32(h);
            else
                cr_assert_eq(h, 0, "norm [%d, %d]: filling column %zu", rows, n->cols, c);
        }
        if (!n->tiles) memcpy(to + r * cols, (float *)got + r * stride, cols * 4);
    }
    for (size_t g = 0; n->tiles && g < padded / 64; g++)
        cr_assert(
            all_poison((uint16_t *)got + (g * ts + (size_t)rows) * 64, (ts - (size_t)rows) * 128),
            "norm [%d, %d]: a row beyond the last is written", rows, n->cols);
    CU(cudaFree(x));
    CU(cudaFree(y));
    CU(cudaFree(w));
    CU(cudaFree(base));
    free(padded_x);
    free(padded_y);
    free(got);
    free(x_after);
}

static void check_norm(const norm *n)
{
    /* Additions that a square passes through, halved by the root; root, quotient and products. */
    const int depth = 8 * (n->cols / 4096 + 2) + 10;
    for (int r = 0; r < n->rows; r++) {
        const size_t at = (size_t)r * (size_t)n->cols;
        double sum = 0;
        for (int c = 0; c < n->cols; c++) {
            const float v = n->add ? n->x[at + c] + n->y[at + c] : n->x[at + c];
            cr_assert_eq(n->summed[at + c], v, "[%d, %d] add %d: x[%d, %d]", n->rows, n->cols,
                         n->add, r, c);
            sum += (double)v * v;
        }
        const double f = 1 / sqrt(sum / n->cols + NORM_EPS);
        for (int c = 0; c < n->cols; c++) {
            const double want = n->summed[at + c] * f * n->w[c];
            const double most = fabs(want) * ((depth / 2.0 + 8) * EPS + (n->tiles ? 0x1p-11 : 0)) +
                                (n->tiles ? 0x1p-25 : 0);
            cr_assert(fabs(n->out[at + c] - want) <= most,
                      "[%d, %d] add %d tiles %d: out[%d, %d] = %.9g, want %.9g", n->rows, n->cols,
                      n->add, n->tiles, r, c, (double)n->out[at + c], want);
        }
    }
}

static void norm_case(int rows, int cols, int stride, bool tiles, bool add)
{
    const size_t n = (size_t)rows * (size_t)cols;
    norm m = {.rows = rows, .cols = cols, .stride = stride, .tiles = tiles, .add = add};
    m.x = random_f32(n, 1 + (uint64_t)cols, 3);
    m.y = random_f32(n, 2 + (uint64_t)cols, 3);
    m.w = random_f32((size_t)cols, 3, 2);
    m.out = malloc(n * 4);
    m.summed = malloc(n * 4);
    run_norm(&m, 0, rows, m.out, m.summed);
    check_norm(&m);
    float *one = malloc((size_t)cols * 4), *sum = malloc((size_t)cols * 4);
    const int some[] = {0, rows / 3, rows - 1};
    for (int i = 0; i < 3; i++) {
        run_norm(&m, some[i], 1, one, sum);
        cr_assert_arr_eq(one, m.out + (size_t)some[i] * (size_t)cols, (size_t)cols * 4,
                         "[%d, %d]: row %d alone has other bits", rows, cols, some[i]);
    }
    if (stride % 4 == 0 && cols % 4 == 0) { /* single values in place of 16 bytes: the same */
        m.stride++;
        run_norm(&m, rows - 1, 1, one, sum);
        cr_assert_arr_eq(one, m.out + (size_t)(rows - 1) * (size_t)cols, (size_t)cols * 4,
                         "[%d, %d]: other bits by single values", rows, cols);
    }
    free(one);
    free(sum);
    free(m.x);
    free(m.y);
    free(m.w);
    free(m.out);
    free(m.summed);
}

Test(elementwise, norm)
{
    NEEDS_GPU();
    for (int c = 0, rows, cols; shape(c, &rows, &cols); c++)
        for (int kind = 0; kind < 4; kind++)
            norm_case(rows, cols, cols + (c % 2 ? 4 : 0), kind & 1, kind & 2);
}

Test(elementwise, norm_in_place)
{
    NEEDS_GPU();
    for (int c = 0, rows, cols; shape(c, &rows, &cols); c++) {
        const size_t n = (size_t)rows * (size_t)cols;
        float *x = random_f32(n, 7, 1), *w = random_f32((size_t)cols, 8, 1);
        float *dx = to_device(x, n * 4), *dy = to_device(x, n * 4),
              *dw = to_device(w, (size_t)cols * 4);
        float *apart = out_rows(rows, cols);
        const bgk_out in_place = {dx, BGK_ROWS, cols}, out = {apart, BGK_ROWS, cols};
        CU(bgk_rms_norm(&out, dy, cols, NULL, 0, dw, NORM_EPS, rows, cols, 0));
        CU(bgk_rms_norm(&in_place, dx, cols, NULL, 0, dw, NORM_EPS, rows, cols, 0));
        float *a = from_device(apart, n * 4), *b = from_device(dx, n * 4);
        cr_assert_arr_eq(a, b, n * 4, "[%d, %d]", rows, cols);
        CU(cudaFree(dx));
        CU(cudaFree(dy));
        CU(cudaFree(dw));
        CU(cudaFree(apart));
        free(x);
        free(w);
        free(a);
        free(b);
    }
}

/* One kernel has the bits of the three launches that it stands for. */
static void norm_add_norm_case(int rows, int cols, bool tiles)
{
    const size_t n = (size_t)rows * (size_t)cols, ts = tile_stride(rows);
    const size_t out_bytes = tiles ? ((size_t)cols + 63) / 64 * 64 * ts * 2 : n * 4;
    float *x = random_f32(n, 1, 2), *y = random_f32(n, 2, 20);
    float *post = random_f32((size_t)cols, 3, 2), *w = random_f32((size_t)cols, 4, 2);
    float *dx[2], *dy[2], *dw = to_device(w, (size_t)cols * 4);
    float *dpost = to_device(post, (size_t)cols * 4);
    char *base[2], *out[2], *x_after[2];
    for (int i = 0; i < 2; i++) {
        dx[i] = to_device(x, n * 4);
        dy[i] = to_device(y, n * 4);
        base[i] = poisoned(out_bytes + GUARD * 4 + 1024);
        char *at = base[i] + (-(uintptr_t)base[i]) % 1024;
        const bgk_out o = {at, tiles ? BGK_TILES : BGK_ROWS, tiles ? (int64_t)ts : cols};
        const bgk_out in_place = {dy[i], BGK_ROWS, cols};
        if (i) {
            CU(bgk_norm_add_norm(&o, dx[i], cols, dy[i], cols, dpost, dw, NORM_EPS, rows, cols, 0));
        } else {
            CU(bgk_rms_norm(&in_place, dy[i], cols, NULL, 0, dpost, NORM_EPS, rows, cols, 0));
            CU(bgk_rms_norm(&o, dx[i], cols, dy[i], cols, dw, NORM_EPS, rows, cols, 0));
        }
        out[i] = from_device(at, out_bytes + GUARD * 4);
        x_after[i] = from_device(dx[i], n * 4);
    }
    cr_assert_arr_eq(out[0], out[1], out_bytes + GUARD * 4, "[%d, %d] tiles %d", rows, cols, tiles);
    cr_assert_arr_eq(x_after[0], x_after[1], n * 4, "[%d, %d] tiles %d: x", rows, cols, tiles);
    cr_assert(all_poison(out[1] + out_bytes, GUARD * 4));
    for (int i = 0; i < 2; i++) {
        CU(cudaFree(dx[i]));
        CU(cudaFree(dy[i]));
        CU(cudaFree(base[i]));
        free(out[i]);
        free(x_after[i]);
    }
    CU(cudaFree(dw));
    CU(cudaFree(dpost));
    free(x);
    free(y);
    free(post);
    free(w);
}

Test(elementwise, norm_add_norm)
{
    NEEDS_GPU();
    for (int c = 0, rows, cols; shape(c, &rows, &cols); c++)
        for (int tiles = 0; tiles < 2; tiles++)
            norm_add_norm_case(rows, cols, tiles);
}

/* Too large for a half: saturated; NaN stays NaN, and filling columns stay 0. */
Test(elementwise, norm_saturates)
{
    NEEDS_GPU();
    enum { COLS = 70, ROWS = 2 };
    float x[ROWS * COLS], w[COLS];
    for (int i = 0; i < ROWS * COLS; i++)
        x[i] = i % 2 ? 1 : -1;
    x[COLS + 3] = NAN;
    for (int i = 0; i < COLS; i++)
        w[i] = 1e6f;
    float *dx = to_device(x, sizeof x), *dw = to_device(w, sizeof w);
    const size_t bytes = 2 * 256 * 64 * 2;
    char *base = poisoned(bytes + 1024), *at = base + (-(uintptr_t)base) % 1024;
    const bgk_out out = {at, BGK_TILES, 256};
    CU(bgk_rms_norm(&out, dx, COLS, NULL, 0, dw, NORM_EPS, ROWS, COLS, 0));
    uint16_t *got = from_device(at, bytes);
    for (int c = 0; c < 128; c++) {
        const float a = bg_f16_to_f32(got[tile_index(256, 0, (size_t)c)]);
        const float b = bg_f16_to_f32(got[tile_index(256, 1, (size_t)c)]);
        if (c < COLS) {
            cr_assert_eq(a, c % 2 ? 65504 : -65504, "column %d: %g", c, (double)a);
            cr_assert(isnan(b), "column %d: %g", c, (double)b);
        } else {
            cr_assert(a == 0 && b == 0, "filling column %d: %g, %g", c, (double)a, (double)b);
        }
    }
    CU(cudaFree(dx));
    CU(cudaFree(dw));
    CU(cudaFree(base));
    free(got);
}

/* ---- rows
 * ---------------------------------------------------------------------------------------- */

Test(elementwise, add)
{
    NEEDS_GPU();
    for (int c = 0, rows, cols; shape(c, &rows, &cols); c++) {
        const int xs = cols + c % 2 * 4, ys = cols + c % 3;
        float *x = random_f32((size_t)rows * xs + GUARD, 1, 1);
        float *y = random_f32((size_t)rows * ys, 2, 1);
        memset(x + (size_t)rows * xs, 0xff, GUARD * 4);
        for (int r = 0; r < rows; r++)
            memset(x + (size_t)r * xs + cols, 0xff, (size_t)(xs - cols) * 4);
        float *dx = to_device(x, ((size_t)rows * xs + GUARD) * 4);
        float *dy = to_device(y, (size_t)rows * ys * 4);
        CU(bgk_add(dx, xs, dy, ys, rows, cols, 0));
        float *got = from_device(dx, ((size_t)rows * xs + GUARD) * 4);
        check_untouched(got, rows, cols, xs, "add");
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < cols; i++)
                cr_assert_eq(got[(size_t)r * xs + i], x[(size_t)r * xs + i] + y[(size_t)r * ys + i],
                             "[%d, %d]: %d, %d", rows, cols, r, i);
        CU(cudaFree(dx));
        CU(cudaFree(dy));
        free(x);
        free(y);
        free(got);
    }
}

static void embed_case(int rows, int cols, int stride, bgk_type type)
{
    enum { VOCAB = 37 };
    const size_t n = (size_t)VOCAB * (size_t)cols, out_n = (size_t)rows * (size_t)stride;
    const float scale = 25.3f;
    float *table = random_f32(n, 5, 2);
    uint16_t *half = malloc(n * 2);
    for (size_t i = 0; i < n; i++)
        half[i] = bg_f32_to_f16(table[i]);
    int32_t *ids = malloc((size_t)rows * 4);
    for (int r = 0; r < rows; r++)
        ids[r] = (int32_t)(bg_mix64((uint64_t)r + 3) % VOCAB);
    void *d = type == BGK_F32 ? to_device(table, n * 4) : to_device(half, n * 2);
    int32_t *di = to_device(ids, (size_t)rows * 4);
    float *out = out_rows(rows, stride);
    CU(bgk_embed(out, stride, d, type, di, scale, rows, cols, 0));
    float *got = from_device(out, (out_n + GUARD) * 4);
    check_untouched(got, rows, cols, stride, "embed");
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < cols; i++) {
            const size_t at = (size_t)ids[r] * (size_t)cols + (size_t)i;
            const float v = type == BGK_F32 ? table[at] : bg_f16_to_f32(half[at]);
            cr_assert_eq(got[(size_t)r * stride + i], scale * v, "[%d, %d]: %d, %d", rows, cols, r,
                         i);
        }
    CU(cudaFree(d));
    CU(cudaFree(di));
    CU(cudaFree(out));
    free(table);
    free(half);
    free(ids);
    free(got);
}

Test(elementwise, embed)
{
    NEEDS_GPU();
    for (int c = 0, rows, cols; shape(c, &rows, &cols); c++)
        for (int t = 0; t < 2; t++)
            embed_case(rows, cols, cols + c % 3 * 2, t ? BGK_F16 : BGK_F32);
}

static double glu_want(double v, bgk_act fn)
{
    if (fn == BGK_SILU) return v / (1 + exp(-v));
    if (fn == BGK_GELU_ERF) return 0.5 * v * (1 + erf(v / sqrt(2)));
    return 0.5 * v * (1 + tanh(sqrt(2 / M_PI) * (v + 0.044715 * v * v * v)));
}

Test(elementwise, glu)
{
    NEEDS_GPU();
    for (int c = 0, rows, cols; shape(c, &rows, &cols); c++) {
        const bgk_act fn = (bgk_act)(c % 3);
        const int xs = 2 * cols + c % 2 * 4, os = cols + c % 2;
        float *x = random_f32((size_t)rows * xs, 1 + (uint64_t)c, 9);
        float *dx = to_device(x, (size_t)rows * xs * 4), *out = out_rows(rows, os);
        CU(bgk_glu(out, os, dx, xs, fn, rows, cols, 0));
        float *got = from_device(out, ((size_t)rows * os + GUARD) * 4);
        check_untouched(got, rows, cols, os, "glu");
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < cols; i++) {
                const double g = x[(size_t)r * xs + i], u = x[(size_t)r * xs + cols + i];
                const double want = glu_want(g, fn) * u, v = got[(size_t)r * os + i];
                cr_assert(fabs(v - want) <= 16 * EPS * fabs(g * u) + 0x1p-126,
                          "[%d, %d] %d: %d, %d: %.9g, want %.9g", rows, cols, (int)fn, r, i, v,
                          want);
            }
        CU(cudaFree(dx));
        CU(cudaFree(out));
        free(x);
        free(got);
    }
}

Test(elementwise, gather)
{
    NEEDS_GPU();
    enum { FROM = 41 };
    for (int c = 0, rows, cols; shape(c, &rows, &cols); c++) {
        const int xs = cols + c % 2 * 4, os = cols + c % 3 * 2;
        float *x = random_f32((size_t)FROM * xs, 1, 1);
        int32_t *index = malloc((size_t)rows * 4);
        for (int r = 0; r < rows; r++)
            index[r] = (int32_t)(bg_mix64((uint64_t)r + 9) % FROM);
        float *dx = to_device(x, (size_t)FROM * xs * 4), *out = out_rows(rows, os);
        int32_t *di = to_device(index, (size_t)rows * 4);
        CU(bgk_gather(out, os, dx, xs, di, rows, cols, 0));
        float *got = from_device(out, ((size_t)rows * os + GUARD) * 4);
        check_untouched(got, rows, cols, os, "gather");
        for (int r = 0; r < rows; r++)
            cr_assert_arr_eq(got + (size_t)r * os, x + (size_t)index[r] * xs, (size_t)cols * 4,
                             "[%d, %d]: row %d", rows, cols, r);
        CU(cudaFree(dx));
        CU(cudaFree(di));
        CU(cudaFree(out));
        free(x);
        free(index);
        free(got);
    }
}

Test(elementwise, softcap)
{
    NEEDS_GPU();
    enum { N = 100003 };
    float *x = random_f32(N, 4, 200);
    float *d = poisoned((N + GUARD) * 4);
    CU(cudaMemcpy(d, x, N * 4, cudaMemcpyHostToDevice));
    CU(bgk_softcap(d, N, 30, 0));
    float *got = from_device(d, (N + GUARD) * 4);
    for (int i = 0; i < N; i++) {
        const double want = 30 * tanh(x[i] / 30.0);
        cr_assert(fabs(got[i] - want) <= 8 * EPS * fabs(want), "%g: %.9g, want %.9g", (double)x[i],
                  (double)got[i], want);
    }
    cr_assert(all_poison(got + N, GUARD * 4));
    CU(cudaFree(d));
    free(x);
    free(got);
}

/* ---- poison and its search
 * ------------------------------------------------------------------------ */

static unsigned long long search(unsigned long long *bad, const bgk_out *o, int rows, int cols)
{
    CU(cudaMemset(bad, 0xff, sizeof *bad));
    CU(bgk_find_bad(bad, o, rows, cols, 0));
    unsigned long long v;
    CU(cudaMemcpy(&v, bad, sizeof v, cudaMemcpyDeviceToHost));
    return v;
}

Test(elementwise, find_bad)
{
    NEEDS_GPU();
    enum { ROWS = 9, COLS = 70, PADDED = 128, STRIDE = 256 };
    static const bgk_layout layouts[] = {BGK_ROWS, BGK_TILES, BGK_HALF_ROWS};
    static const uint32_t f32_inf = 0x7f800000u;
    static const uint16_t f16_nan = 0x7e00u;
    unsigned long long *bad = poisoned(sizeof *bad);
    for (int l = 0; l < 3; l++) {
        const bool tiles = layouts[l] == BGK_TILES;
        const size_t size = layouts[l] == BGK_ROWS ? 4 : 2;
        const size_t bytes = (tiles ? PADDED * STRIDE : ROWS * COLS) * size;
        const int cols = tiles ? PADDED : COLS;
        char *base = poisoned(bytes + 1024), *at = base + (-(uintptr_t)base) % 1024;
        const bgk_out o = {at, layouts[l], tiles ? STRIDE : COLS};
        CU(cudaMemset(at, 0, bytes));
        cr_assert_eq(search(bad, &o, ROWS, COLS), ~0ull);
        for (int i = 0; i < ROWS * cols; i += 13) {
            char *where =
                at + size * (tiles ? tile_index(STRIDE, (size_t)(i / cols), (size_t)(i % cols))
                                   : (size_t)i);
            CU(cudaMemcpy(where, size == 4 ? (const void *)&f32_inf : &f16_nan, size,
                          cudaMemcpyHostToDevice));
            cr_assert_eq(search(bad, &o, ROWS, COLS), (unsigned long long)i, "layout %d", l);
            cr_assert_eq(search(bad, &o, i / cols, COLS), ~0ull, "layout %d: a row too far", l);
            CU(cudaMemset(where, 0, size));
        }
        CU(bgk_poison(&o, 5, COLS, 0));
        char *got = from_device(at, bytes);
        for (int r = 0; r < ROWS; r++)
            for (int c = 0; c < cols; c++) {
                const size_t i =
                    tiles ? tile_index(STRIDE, (size_t)r, (size_t)c) : (size_t)(r * COLS + c);
                const float v = size == 4 ? ((float *)got)[i] : bg_f16_to_f32(((uint16_t *)got)[i]);
                cr_assert_eq(!!isnan(v), r < 5, "layout %d: %d, %d", l, r, c);
            }
        free(got);
        CU(cudaFree(base));
    }
    CU(cudaFree(bad));
}

Test(elementwise, refused)
{
    NEEDS_GPU();
    char *base = poisoned(1 << 16), *at = base + (-(uintptr_t)base) % 1024;
    float *x = (float *)at, *y = x + 4096;
    int32_t *ids = (int32_t *)(y + 4096);
    const bgk_out rows = {y, BGK_ROWS, 64}, same = {x, BGK_ROWS, 64}, other = {x, BGK_ROWS, 68};
    const bgk_out stride = {at, BGK_TILES, 64}, place = {at + 128, BGK_TILES, 256};
    const bgk_out half = {x, BGK_HALF_ROWS, 64};
#define REFUSED(call) cr_assert_eq(call, cudaErrorInvalidValue, "%s", #call)
    REFUSED(bgk_rms_norm(&rows, x, 64, NULL, 0, x, 0, -1, 64, 0));
    REFUSED(bgk_rms_norm(&rows, x, 64, NULL, 0, x, 0, 1, 0, 0));
    REFUSED(bgk_rms_norm(&same, x, 64, y, 64, y, 0, 1, 64, 0));
    REFUSED(bgk_rms_norm(&other, x, 64, NULL, 0, y, 0, 1, 64, 0));
    REFUSED(bgk_rms_norm(&stride, y, 64, NULL, 0, y, 0, 1, 64, 0));
    REFUSED(bgk_rms_norm(&place, y, 64, NULL, 0, y, 0, 1, 64, 0));
    REFUSED(bgk_rms_norm(&half, y, 64, NULL, 0, y, 0, 1, 64, 0));
    REFUSED(bgk_norm_add_norm(&same, x, 64, y, 64, y, y, 0, 1, 64, 0));
    REFUSED(bgk_norm_add_norm(&rows, x, 64, y, 64, x, x, 0, 1, 64, 0));
    REFUSED(bgk_embed(x, 64, y, BGK_BF16, ids, 1, 1, 64, 0));
    REFUSED(bgk_embed(x, 64, y, BGK_F32, ids, 1, -1, 64, 0));
    REFUSED(bgk_add(x, 64, y, 64, 1, 0, 0));
    REFUSED(bgk_glu(x, 64, y, 128, BGK_SILU, -1, 64, 0));
    REFUSED(bgk_gather(x, 64, y, 64, ids, 1, 0, 0));
    REFUSED(bgk_softcap(x, 64, 0, 0));
    REFUSED(bgk_softcap(x, -1, 1, 0));
    REFUSED(bgk_poison(&stride, 1, 64, 0));
    REFUSED(bgk_find_bad((unsigned long long *)x, &rows, 1, 0, 0));
#undef REFUSED
    CU(bgk_rms_norm(&rows, x, 64, NULL, 0, x, 0, 0, 64, 0));
    CU(bgk_embed(x, 64, y, BGK_F32, ids, 1, 0, 64, 0));
    CU(bgk_add(x, 64, y, 64, 0, 64, 0));
    CU(bgk_glu(x, 64, y, 128, BGK_SILU, 0, 64, 0));
    CU(bgk_gather(x, 64, y, 64, ids, 0, 64, 0));
    CU(bgk_softcap(x, 0, 1, 0));
    char *got = from_device(base, 1 << 16);
    cr_assert(all_poison(got, 1 << 16));
    CU(cudaFree(base));
    free(got);
}

/* ---- times
 * ----------------------------------------------------------------------------------------- */

typedef struct timed {
    bgk_out out;
    float *x, *y, *w;
    int rows, cols, what;
} timed;

static void timed_call(void *ctx, cudaStream_t stream)
{
    const timed *t = ctx;
    if (t->what == 2)
        CU(bgk_add(t->x, t->cols, t->y, t->cols, t->rows, t->cols, stream));
    else
        CU(bgk_rms_norm(&t->out, t->x, t->cols, t->what ? t->y : NULL, t->cols, t->w, 1e-6f,
                        t->rows, t->cols, stream));
}

Test(elementwise, bench_norm)
{
    NEEDS_GPU();
    if (gpu_small()) return;
    static const int rows[] = {1, 16, 64, 512, 2048, 8192};
    static const char *const names[] = {"norm to tiles", "add and norm to tiles", "add"};
    static const int bytes[] = {6, 14, 12}; /* a value */
    for (int what = 0; what < 3; what++)
        for (int i = 0; i < 6; i++) {
            const int cols = 4096, r = rows[i];
            const size_t n = (size_t)r * (size_t)cols, ts = tile_stride(r);
            timed t = {.rows = r, .cols = cols, .what = what};
            char *base;
            CU(cudaMalloc((void **)&t.x, n * 4));
            CU(cudaMalloc((void **)&t.y, n * 4));
            CU(cudaMalloc((void **)&t.w, (size_t)cols * 4));
            CU(cudaMalloc((void **)&base, ts * (size_t)cols * 2 + 1024));
            CU(cudaMemset(t.x, 0, n * 4));
            CU(cudaMemset(t.y, 0, n * 4));
            CU(cudaMemset(t.w, 0, (size_t)cols * 4));
            t.out = (bgk_out){base + (-(uintptr_t)base) % 1024, BGK_TILES, (int64_t)ts};
            const double us = gpu_time_us(timed_call, &t, 50);
            printf("%-22s [%4d, %d]: %8.2f us, %5.0f GB/s\n", names[what], r, cols, us,
                   (double)n * bytes[what] / us * 1e-3);
            CU(cudaFree(t.x));
            CU(cudaFree(t.y));
            CU(cudaFree(t.w));
            CU(cudaFree(base));
        }
}
