/* tests/gpu/test_repack.c - GGUF blocks to weight tiles and to values: against bg_dequant_row, read
 * by the layout's text (tiles_host.h). Tests named host_* run the threads' work on the CPU. */
#include "gpu.h"
#include "tiles_host.h"

#include <stdio.h>

#include "gguf/gguf.h"
#include "pack.h"

typedef struct type_info {
    int type, d_at, m_at; /* where a block's half scales are; -1: none */
} type_info;

static const type_info types[] = {
    {BGK_Q4_0, 0, -1},     {BGK_Q4_1, 0, 2},      {BGK_Q5_0, 0, -1},      {BGK_Q5_1, 0, 2},
    {BGK_Q8_0, 0, -1},     {BGK_Q3_K, 108, -1},   {BGK_Q4_K, 0, 2},       {BGK_Q5_K, 0, 2},
    {BGK_Q6_K, 208, -1},   {BGK_IQ4_NL, 0, -1},   {BGK_IQ4_XS, 0, -1},    {BGK_MXFP4, -1, -1},
    {BGK_GGUF_F32, 0, -1}, {BGK_GGUF_F16, 0, -1}, {BGK_GGUF_BF16, 0, -1},
};
enum { N_TYPES = sizeof types / sizeof *types };

/* PLAIN: scales within a factor of 2. WIDE: over a factor of 1e6. TINY: denormal and zero ones. */
typedef enum scale_kind { PLAIN, WIDE, TINY, KINDS } scale_kind;

static uint64_t word(uint64_t seed, uint64_t i)
{
    return bg_mix64(seed * 0x9e3779b97f4a7c15ull + i);
}

static float random_scale(scale_kind kind, uint64_t r)
{
    const float u = 1 + (float)(r % 1000) / 1000, sign = r >> 60 & 1 ? -1.0f : 1.0f;
    const int wide = (int)(r >> 20 & 15);
    if (kind == PLAIN) return sign * u * 0.01f;
    if (kind == WIDE) return sign * u * ldexpf(1, -wide * 20 / 15);
    return r >> 30 & 1 ? 0 : sign * u * 0x1p-23f;
}

static void put_half(uint8_t *at, float v)
{
    const uint16_t h = bg_f32_to_f16(v);
    memcpy(at, &h, 2);
}

/* Rows of random blocks; with KIND TINY row 1 is all zero. */
static uint8_t *random_rows(const type_info *t, int rows, int k, scale_kind kind, uint64_t seed)
{
    const bg_qtype_info *info = bg_qtype_get((uint32_t)t->type);
    const size_t row_bytes = bg_qtype_row_bytes((uint32_t)t->type, k),
                 bytes = (size_t)info->block_bytes;
    uint8_t *p = malloc((size_t)rows * row_bytes + 8);
    for (size_t i = 0; i < (size_t)rows * row_bytes; i++)
        p[i] = (uint8_t)(word(seed, i / 8) >> 8 * (i % 8));
    for (size_t i = 0; i < (size_t)rows * row_bytes / bytes; i++) {
        uint8_t *b = p + i * bytes;
        const uint64_t r = word(seed + 1, i);
        float d = random_scale(kind, r), m = random_scale(kind, bg_mix64(r));
        const float v = d * (float)((double)bg_mix64(r + 7) * 0x1p-63 - 1);
        if (kind == TINY && i * bytes / row_bytes == 1) d = m = 0;
        if (t->type == BGK_MXFP4)
            b[0] = (uint8_t)(kind == TINY ? r % 4 : kind == WIDE ? 110 + r % 20 : 120 + r % 2);
        else if (t->type == BGK_GGUF_F32)
            memcpy(b, &v, 4);
        else if (t->type == BGK_GGUF_F16)
            put_half(b, v);
        else if (t->type == BGK_GGUF_BF16)
            memcpy(b, (const uint8_t *)&v + 2, 2);
        if (info->block_values > 1 && t->d_at >= 0) put_half(b + t->d_at, d);
        if (t->m_at >= 0) put_half(b + t->m_at, m);
    }
    return p;
}

typedef struct tiles {
    bgk_format format;
    int n_tiles, n_chunks;
    size_t bytes;
    uint8_t *data;
    float *row_scale;
} tiles;

static tiles tiles_for(bgk_format format, int rows, int k, bool glu)
{
    tiles t = {
        .format = format, .n_tiles = (rows + 63) / 64 * (glu ? 2 : 1), .n_chunks = (k + 63) / 64};
    t.bytes = (size_t)t.n_tiles * (size_t)t.n_chunks * (size_t)bgk_chunk_bytes(format);
    return t;
}

static pack_row source_row(const bgk_source *a, int n)
{
    return (pack_row){n < a->n_rows ? (const uint8_t *)a->rows + n * a->row_bytes : NULL, a->type,
                      0};
}

static float host_row_scale(bgk_format f, pack_row r, int k)
{
    float s = 0, m = 0;
    for (int c = 0; r.p && c < k; c += f == BGK_W16 ? 1 : 16) {
        s = fmaxf(
            s, pack_size(f == BGK_W16 ? pack_value(r.type, r.p, c) : pack_scale(r.type, r.p, c)));
        if (f != BGK_W16) m = fmaxf(m, pack_size(pack_min(r.type, r.p, c)));
    }
    return ldexpf(1, pack_exponent(f, s, m));
}

/* What bgk_repack() does, by the same code, on the host. */
static tiles host_repack(bgk_format f, const bgk_source *rows, const bgk_source *up, int k)
{
    tiles t = tiles_for(f, rows->n_rows, k, up != NULL);
    t.data = malloc(t.bytes + 1);
    memset(t.data, 0xff, t.bytes + 1);
    t.row_scale = malloc((size_t)t.n_tiles * 64 * sizeof *t.row_scale);
    for (int tile = 0; tile < t.n_tiles; tile++) {
        pack_row r[64];
        for (int i = 0; i < 64; i++) {
            int from;
            const int n = pack_row_of(up != NULL, tile, i, &from);
            r[i] = source_row(from ? up : rows, n);
            t.row_scale[tile * 64 + i] = host_row_scale(f, r[i], k);
            r[i].e = ilogbf(t.row_scale[tile * 64 + i]);
        }
        for (int c = 0; c < t.n_chunks; c++)
            for (int i = 0; i < 128; i++) {
                const int row = i / 32 * 16 + i % 32 / 4;
                pack_thread(f,
                            t.data + ((size_t)tile * (size_t)t.n_chunks + (size_t)c) *
                                         (size_t)bgk_chunk_bytes(f),
                            i, r[row], r[row + 8], 64 * c, k);
            }
    }
    cr_assert_eq(t.data[t.bytes], 0xff);
    return t;
}

static tiles gpu_repack(bgk_format f, const bgk_source *rows, const bgk_source *up, int k)
{
    tiles t = tiles_for(f, rows->n_rows, k, up != NULL);
    const size_t n_scales = (size_t)t.n_tiles * 64;
    void *data = poisoned(t.bytes + GUARD);
    float *scale = poisoned((n_scales + GUARD) * sizeof *scale);
    CU(bgk_repack(data, scale, f, rows, up, k, 0));
    t.data = from_device(data, t.bytes + GUARD);
    t.row_scale = from_device(scale, (n_scales + GUARD) * sizeof *scale);
    cr_assert(all_poison(t.data + t.bytes, GUARD), "wrote past the tiles");
    cr_assert(all_poison(t.row_scale + n_scales, GUARD * sizeof *scale), "wrote past the scales");
    cudaFree(data);
    cudaFree(scale);
    return t;
}

static void tiles_free(tiles *t)
{
    free(t->data);
    free(t->row_scale);
}

static double stored(const tiles *t, int tile, int row, int c)
{
    const uint8_t *chunk = t->data + ((size_t)tile * (size_t)t->n_chunks + (size_t)(c / 64)) *
                                         (size_t)bgk_chunk_bytes(t->format);
    return tile_value(t->format, chunk, row, c % 64) * (double)t->row_scale[tile * 64 + row];
}

/* Rows `host` (of the same bytes as the source's) against what is in the tiles. */
static void check_rows(const tiles *t, const bgk_source *host, bool glu, bool up, int k,
                       const char *what)
{
    const int padded = t->n_chunks * 64, rows = (host->n_rows + 63) / 64 * 64;
    const bg_qtype_info *info = bg_qtype_get((uint32_t)host->type);
    float *want = malloc(((size_t)k + 1) * sizeof *want);
    for (int r = 0; r < rows; r++) {
        int tile, row;
        tile_of_row(glu, up, r, &tile, &row);
        const uint8_t *p = (const uint8_t *)host->rows + r * host->row_bytes;
        const bool there = r < host->n_rows;
        const double e = (double)t->row_scale[tile * 64 + row];
        if (there) bg_dequant_row((uint32_t)host->type, p, want, k);
        cr_assert(ilogb(e) >= -126 && e == ldexp(1, ilogb(e)), "%s: row %d: scale %g", what, r, e);
        for (int c = 0; c < padded; c++) {
            const double got = stored(t, tile, row, c);
            if (!there || c >= k) {
                cr_assert_eq(got, 0, "%s: row %d column %d: %g beyond the end", what, r, c, got);
                continue;
            }
            double size = fabs((double)want[c]);
            if (info->block_values > 1) {
                const double m = fabs((double)pack_min(host->type, p, c));
                size = size + 2 * m; /* |s q| + |m| */
            }
            /* Halves below 2^-14 have fewer bits: of a scale 2^20 smaller, of minima as they are.
             */
            const double floor = e * (t->format == BGK_W16 || t->format < BGK_W6 ? 0x1p-25 : 0) +
                                 e * 0x1p-25 * 0x1p-20 * 128;
            const double diff = fabs(got - (double)want[c]);
            cr_assert(diff <= 0x1p-11 * size + floor,
                      "%s: row %d column %d: %.9g, want %.9g, scale %g", what, r, c, got,
                      (double)want[c], e);
        }
    }
    free(want);
}

/* The largest stored scale (W16: value) of each row has to use the half's range. */
static void check_range(const tiles *t, const char *what)
{
    for (int at = 0; at < t->n_tiles * 64; at++) {
        double s = 0, m = 0;
        for (int c = 0; c < t->n_chunks * 64; c++) {
            const uint8_t *chunk =
                t->data + ((size_t)(at / 64) * (size_t)t->n_chunks + (size_t)(c / 64)) *
                              (size_t)bgk_chunk_bytes(t->format);
            const tile_place p = tile_place_of(at % 64, c % 64);
            if (t->format == BGK_W16) {
                s = fmax(s, fabs(tile_value(BGK_W16, chunk, at % 64, c % 64)));
                continue;
            }
            const float h = tile_half_at(chunk, tile_scale_at(t->format, p, c % 64));
            s = fmax(s, fabs(ldexp((double)h, 24 - tile_scale_shift(t->format, p))));
            if (t->format < BGK_W6) m = fmax(m, fabs((double)tile_half_at(chunk, tile_min_at(p))));
        }
        if (s == 0 && m == 0) {
            cr_assert_eq(t->row_scale[at], 1, "%s: scale %g of zeros", what,
                         (double)t->row_scale[at]);
        } else if (t->row_scale[at] == 0x1p-126f) { /* the smallest there is */
            cr_assert(s <= 60000 && m <= 60000, "%s: %g, %g", what, s, m);
        } else if (t->format == BGK_W16) {
            cr_assert(s > 127.9 && s <= 256, "%s: largest value %g", what, s);
        } else {
            cr_assert(m <= 60000 && s <= 60000, "%s: %g, %g", what, s, m);
            cr_assert(s >= 29984 || m >= 29984, "%s: largest scale %g, minimum %g", what, s, m);
        }
    }
}

static const int all_rows[] = {1, 63, 64, 65, 100}, all_k[] = {32, 64, 96, 256, 576, 4096};

static bgk_source source_of(const type_info *t, const void *rows, int n_rows, int k)
{
    return (bgk_source){.rows = rows,
                        .type = t->type,
                        .n_rows = n_rows,
                        .row_bytes = (int64_t)bg_qtype_row_bytes((uint32_t)t->type, k)};
}

typedef tiles repack_fn(bgk_format, const bgk_source *, const bgk_source *, int);

/* As on the GPU or here, with the same bytes for both. */
static bgk_source moved(const bgk_source *host, bool gpu, size_t bytes)
{
    bgk_source s = *host;
    if (gpu) s.rows = to_device(host->rows, bytes);
    return s;
}

static void one_matrix(const type_info *t, bgk_format f, int rows, int k, scale_kind kind, bool gpu)
{
    char what[96];
    snprintf(what, sizeof what, "%s as format %d [%d, %d] kind %d",
             bg_qtype_get((uint32_t)t->type)->name, f, rows, k, kind);
    uint8_t *bytes = random_rows(t, rows, k, kind, (uint64_t)(rows * 10000 + k));
    const bgk_source host = source_of(t, bytes, rows, k);
    const bgk_source from = moved(&host, gpu, (size_t)rows * (size_t)host.row_bytes);
    tiles got = (gpu ? gpu_repack : host_repack)(f, &from, NULL, k);
    check_rows(&got, &host, false, false, k, what);
    check_range(&got, what);
    if (gpu) {
        tiles same = host_repack(f, &host, NULL, k);
        cr_assert_arr_eq(got.data, same.data, same.bytes, "%s: not what the host makes", what);
        tiles_free(&same);
        cudaFree((void *)(uintptr_t)from.rows);
    }
    tiles_free(&got);
    free(bytes);
}

static void all_matrices(bool gpu)
{
    for (int i = 0; i < N_TYPES; i++)
        for (size_t r = 0; r < sizeof all_rows / sizeof *all_rows; r++)
            for (size_t c = 0; c < sizeof all_k / sizeof *all_k; c++)
                for (int kind = 0; kind < KINDS; kind++) {
                    const int k = all_k[c], rows = all_rows[r];
                    const bgk_format f = bgk_format_of(types[i].type);
                    if (k % bg_qtype_get((uint32_t)types[i].type)->block_values) continue;
                    if (k == 4096 && rows % 64 != 1) continue;
                    if (gpu && gpu_small() && (k > 256 || rows > 65)) continue;
                    one_matrix(&types[i], f, rows, k, (scale_kind)kind, gpu);
                    if (rows != 65 || k > 576) continue;
                    one_matrix(&types[i], BGK_W16, rows, k, (scale_kind)kind, gpu);
                    if (f == BGK_W4) one_matrix(&types[i], BGK_W5, rows, k, (scale_kind)kind, gpu);
                }
}

Test(repack, host_every_type)
{
    all_matrices(false);
}

Test(repack, every_type)
{
    NEEDS_GPU();
    all_matrices(true);
}

/* gate and up, also of two types. */
static void all_glu(bool gpu)
{
    static const struct {
        int gate, up;
        bgk_format format;
    } pairs[] = {{6, 6, BGK_W4},  {7, 7, BGK_W5},  {6, 7, BGK_W5}, {8, 5, BGK_W6},
                 {4, 11, BGK_W8}, {8, 6, BGK_W16}, {2, 0, BGK_W5}, {12, 13, BGK_W16}};
    static const int sizes[] = {1, 16, 33, 64, 65, 130};
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
        for (size_t j = 0; j < sizeof sizes / sizeof *sizes; j++) {
            const int n = sizes[j], k = 512;
            const type_info *a = &types[pairs[i].gate], *b = &types[pairs[i].up];
            uint8_t *gate = random_rows(a, n, k, PLAIN, 5), *up = random_rows(b, n, k, PLAIN, 6);
            const bgk_source host[2] = {source_of(a, gate, n, k), source_of(b, up, n, k)};
            const bgk_source from[2] = {
                moved(&host[0], gpu, (size_t)n * (size_t)host[0].row_bytes),
                moved(&host[1], gpu, (size_t)n * (size_t)host[1].row_bytes)};
            tiles t = (gpu ? gpu_repack : host_repack)(pairs[i].format, &from[0], &from[1], k);
            check_rows(&t, &host[0], true, false, k, "gate");
            check_rows(&t, &host[1], true, true, k, "up");
            tiles_free(&t);
            free(gate);
            free(up);
        }
}

Test(repack, host_glu)
{
    all_glu(false);
}

Test(repack, glu)
{
    NEEDS_GPU();
    all_glu(true);
}

/* Rows from row0 on, columns from col0 on, of a larger matrix: as the share alone. */
static void all_shares(bool gpu)
{
    for (int i = 0; i < N_TYPES; i++) {
        const bg_qtype_info *info = bg_qtype_get((uint32_t)types[i].type);
        const int k_total = 1024, rows = 150, row0 = 37, n = 70, col0 = 256, k = 512;
        uint8_t *bytes = random_rows(&types[i], rows, k_total, WIDE, 11);
        const bgk_source all = source_of(&types[i], bytes, rows, k_total);
        const bgk_source on = moved(&all, gpu, (size_t)rows * (size_t)all.row_bytes);
        const int64_t at = row0 * all.row_bytes + col0 / info->block_values * info->block_bytes;
        bgk_source from = on, host = all;
        from.rows = (const uint8_t *)on.rows + at;
        host.rows = bytes + at;
        from.n_rows = host.n_rows = n;
        tiles t = (gpu ? gpu_repack : host_repack)(bgk_format_of(types[i].type), &from, NULL, k);
        check_rows(&t, &host, false, false, k, info->name);
        tiles_free(&t);
        free(bytes);
    }
}

Test(repack, host_shares)
{
    all_shares(false);
}

Test(repack, shares)
{
    NEEDS_GPU();
    all_shares(true);
}

Test(repack, host_values)
{
    for (int i = 0; i < N_TYPES; i++)
        for (int kind = 0; kind < KINDS; kind++) {
            enum { ROWS = 5, K = 512 };
            float want[K];
            uint8_t *bytes = random_rows(&types[i], ROWS, K, (scale_kind)kind, 3);
            const bgk_source s = source_of(&types[i], bytes, ROWS, K);
            for (int r = 0; r < ROWS; r++) {
                const uint8_t *p = bytes + r * s.row_bytes;
                bg_dequant_row((uint32_t)s.type, p, want, K);
                for (int c = 0; c < K; c++)
                    cr_assert_eq(pack_value(s.type, p, c), want[c], "type %d column %d", s.type, c);
            }
            free(bytes);
        }
}

Test(repack, values)
{
    NEEDS_GPU();
    enum { ROWS = 7, K = 768, PADDED = 832 };
    float *want = malloc(K * sizeof *want);
    for (int i = 0; i < N_TYPES; i++)
        for (int half = 0; half < 2; half++) {
            const size_t n = (size_t)ROWS * PADDED, size = half ? 2 : 4;
            uint8_t *bytes = random_rows(&types[i], ROWS, K, WIDE, 17);
            const bgk_source host = source_of(&types[i], bytes, ROWS, K);
            const bgk_source from = moved(&host, true, (size_t)ROWS * (size_t)host.row_bytes);
            void *out = poisoned((n + GUARD) * size);
            CU(bgk_dequant(out, half ? BGK_F16 : BGK_F32, &from, K, PADDED, 0));
            uint8_t *got = from_device(out, (n + GUARD) * size);
            cr_assert(all_poison(got + n * size, GUARD * size));
            for (size_t j = 0; j < n; j++) {
                const size_t r = j / PADDED, c = j % PADDED;
                if (c == 0)
                    bg_dequant_row((uint32_t)host.type, bytes + r * (size_t)host.row_bytes, want,
                                   K);
                const float w = c < K ? want[c] : 0;
                const float v = half ? bg_f16_to_f32(((uint16_t *)got)[j]) : ((float *)got)[j];
                cr_assert_eq(v, half ? bg_f16_to_f32(bg_f32_to_f16(w)) : w, "type %d at %zu",
                             host.type, j);
            }
            cudaFree(out);
            free(got);
            free(bytes);
        }
    free(want);
}

/* Random blocks: mean 0, the deviation asked for, nothing infinite. */
static void check_random(int type, const uint8_t *blocks, int n)
{
    const bg_qtype_info *info = bg_qtype_get((uint32_t)type);
    double sum = 0, squares = 0;
    float v[256];
    const double std = 1.0 / 64;
    for (int i = 0; i < n; i++) {
        bg_dequant_row((uint32_t)type, blocks + (size_t)i * (size_t)info->block_bytes, v,
                       info->block_values);
        for (int j = 0; j < info->block_values; j++) {
            sum += (double)v[j];
            squares += (double)v[j] * (double)v[j];
        }
    }
    const double count = (double)n * info->block_values, got = sqrt(squares / count);
    cr_assert(got > 0.6 * std && got < 1.6 * std, "%s: deviation %g of %g", info->name, got, std);
    cr_assert(fabs(sum / count) < 0.15 * std, "%s: mean %g, deviation %g", info->name, sum / count,
              got);
}

Test(repack, host_random_blocks)
{
    for (int i = 0; i < N_TYPES; i++) {
        const bg_qtype_info *info = bg_qtype_get((uint32_t)types[i].type);
        const int n = 65536 / info->block_values;
        uint8_t *blocks = malloc((size_t)n * (size_t)info->block_bytes);
        for (int j = 0; j < n; j++)
            pack_random_block(types[i].type, blocks + (size_t)j * (size_t)info->block_bytes,
                              info->block_bytes, 3, (uint64_t)j, 1.0f / 64);
        check_random(types[i].type, blocks, n);
        free(blocks);
    }
}

Test(repack, random_blocks)
{
    NEEDS_GPU();
    for (int i = 0; i < N_TYPES; i++) {
        const bg_qtype_info *info = bg_qtype_get((uint32_t)types[i].type);
        const int n = 65536 / info->block_values;
        const size_t bytes = (size_t)n * (size_t)info->block_bytes;
        uint8_t *blocks = poisoned(bytes + GUARD);
        CU(bgk_random_blocks(blocks, types[i].type, n, 3, 0, 1.0f / 64, 0));
        uint8_t *got = from_device(blocks, bytes + GUARD);
        cr_assert(all_poison(got + bytes, GUARD));
        for (int j = 0; j < n; j++) {
            uint8_t want[256] = {0};
            const uint8_t *block = got + (size_t)j * (size_t)info->block_bytes;
            pack_random_block(types[i].type, want, info->block_bytes, 3, (uint64_t)j, 1.0f / 64);
            for (int k = 0; k < info->block_bytes; k++)
                cr_assert_eq(block[k], want[k], "%s block %d byte %d: %d, want %d", info->name, j,
                             k, block[k], want[k]);
        }
        check_random(types[i].type, got, n);
        cudaFree(blocks);
        free(got);
    }
}

static double value_at(bgk_type type, const void *row, int64_t i)
{
    switch (type) {
    case BGK_F32:
        return (double)((const float *)row)[i];
    case BGK_F16:
        return (double)bg_f16_to_f32(((const uint16_t *)row)[i]);
    case BGK_BF16:
        return (double)bg_bf16_to_f32(((const uint16_t *)row)[i]);
    default:
        return ((const int8_t *)row)[i];
    }
}

/* Rows of uneven ends, one that is more than the grid, more of them than the grid has. */
Test(repack, random_values)
{
    NEEDS_GPU();
    static const struct {
        bgk_type type;
        int64_t value; /* bytes */
        float mid, spread;
        double rounding;
    } cases[] = {{BGK_F32, 4, 0, 1.7320508f, 0x1p-23}, {BGK_F16, 2, 0, 1.7320508f, 0x1p-10},
                 {BGK_BF16, 2, 0, 1.7320508f, 0x1p-7}, {BGK_Q8, 1, 0, 127, 0},
                 {BGK_F32, 4, 0.0136f, 0, 0},          {BGK_F16, 2, 3, 0.5f, 0x1p-9}};
    static const int64_t shapes[][3] = {/* rows, values, bytes between rows */
                                        {1, 1, 0},       {1, 4093, 0}, {3, 1031, 48},
                                        {9000, 21, 16},  {2, 64, 0},   {1, (5 << 20) + 3, 0},
                                        {4500, 1100, 32}};
    const size_t n_shapes = sizeof shapes / sizeof *shapes;
    for (size_t i = 0; i < sizeof cases / sizeof *cases * n_shapes; i++) {
        const bgk_type type = cases[i / n_shapes].type;
        const int64_t *shape = shapes[i % n_shapes], n = shape[1];
        const int64_t size = n * cases[i / n_shapes].value, each = (size + 15) / 16 * 16 + shape[2];
        const int64_t rows = gpu_small() && shape[0] * size > 1 << 20 ? 1 : shape[0];
        const size_t bytes = (size_t)(rows * each);
        const double mid = (double)cases[i / n_shapes].mid,
                     spread = (double)cases[i / n_shapes].spread,
                     most = spread + cases[i / n_shapes].rounding;
        uint8_t *got[3];
        for (int turn = 0; turn < 3; turn++) { /* the last from another seed */
            uint8_t *p = poisoned(bytes + GUARD);
            CU(bgk_random_values(p, type, rows, n, each, (float)mid, (float)spread,
                                 7 + (uint64_t)(turn == 2), 0));
            got[turn] = from_device(p, bytes + GUARD);
            cudaFree(p);
        }
        cr_assert(all_poison(got[0] + bytes, GUARD));
        cr_assert_eq(memcmp(got[0], got[1], bytes), 0, "type %d: not the same again", (int)type);
        double sum = 0, squares = 0, same = 0, repeated = 0;
        for (int64_t r = 0; r < rows; r++) {
            const uint8_t *row = got[0] + r * each;
            cr_assert(all_poison(row + size, (size_t)(each - size)), "type %d row %lld", (int)type,
                      (long long)r);
            for (int64_t j = 0; j < n; j++) {
                const double v = value_at(type, row, j) - mid;
                cr_assert(fabs(v) <= most, "type %d: row %lld value %lld is %g", (int)type,
                          (long long)r, (long long)j, v + mid);
                sum += v;
                squares += v * v;
                same += v == value_at(type, got[2] + r * each, j) - mid;
                repeated += r && v == value_at(type, row - each, j) - mid;
            }
        }
        const double count = (double)(rows * n);
        if (spread > 0 && count > 3000) {
            const double bound = 5 * spread / sqrt(3 * count) + 0.005 * spread;
            cr_assert(fabs(sum / count) < bound, "type %d: mean %g", (int)type, sum / count);
            cr_assert(fabs(sqrt(squares / count) - spread / sqrt(3)) < bound,
                      "type %d: deviation %g", (int)type, sqrt(squares / count));
            cr_assert(same < 0.05 * count && repeated < 0.05 * count,
                      "type %d: %g values of %g with another seed, %g in the row before", (int)type,
                      same, count, repeated);
        }
        for (int turn = 0; turn < 3; turn++)
            free(got[turn]);
    }
    char *p = poisoned(256);
    CU(bgk_random_values(p, BGK_F32, 0, 8, 0, 0, 1, 1, 0));
    CU(bgk_random_values(p, BGK_F32, 2, 0, 0, 0, 1, 1, 0));
    const float off = NAN;
    for (int i = 0; i < 6; i++)
        cr_assert_eq(bgk_random_values(p + (i == 0 ? 8 : 0), BGK_Q8, i == 1 ? -1 : 2, 16,
                                       i == 2   ? 24
                                       : i == 3 ? 0
                                                : 16,
                                       i == 4 ? 1 : 0, i == 5 ? off : 127, 1, 0),
                     cudaErrorInvalidValue, "%d", i);
    uint8_t *untouched = from_device(p, 256);
    cr_assert(all_poison(untouched, 256));
    free(untouched);
    cudaFree(p);
}

/* The larger part of what memory can is enough: a GPU's cache is filled in the time of a few steps.
 */
Test(repack, bench_random_values)
{
    NEEDS_GPU();
    const int64_t bytes = gpu_small() ? 1 << 20 : (int64_t)4 << 30;
    uint8_t *p = poisoned((size_t)bytes);
    cudaEvent_t a, b;
    CU(cudaEventCreate(&a));
    CU(cudaEventCreate(&b));
    for (int type = BGK_F32; type <= BGK_Q8; type++) {
        const int64_t value = type == BGK_F32 ? 4 : type == BGK_Q8 ? 1 : 2;
        float ms = 0;
        for (int turn = 0; turn < 2; turn++) {
            CU(cudaEventRecord(a, 0));
            CU(bgk_random_values(p, (bgk_type)type, 1, bytes / value, 0, 0, 1, 1, 0));
            CU(cudaEventRecord(b, 0));
            CU(cudaEventSynchronize(b));
            CU(cudaEventElapsedTime(&ms, a, b));
        }
        printf("random values of type %d: %.0f GB/s\n", type, (double)bytes / (double)ms * 1e-6);
    }
    CU(cudaEventDestroy(a));
    CU(cudaEventDestroy(b));
    cudaFree(p);
}

Test(repack, refusals)
{
    NEEDS_GPU();
    uint8_t *p = poisoned(1 << 16);
    float *scale = poisoned(1 << 16);
    bgk_source s = {.rows = p, .type = BGK_Q4_K, .n_rows = 4, .row_bytes = 144};
    const bgk_source good = s;
    cr_assert_eq(bgk_repack(p, scale, BGK_W4, &s, NULL, 128, 0), cudaErrorInvalidValue);
    cr_assert_eq(bgk_repack(p, scale, BGK_W4, &s, NULL, 512, 0), cudaErrorInvalidValue);
    cr_assert_eq(bgk_repack(p, scale, BGK_W8, &s, NULL, 256, 0), cudaErrorInvalidValue);
    s.type = BG_Q2_K;
    cr_assert_eq(bgk_repack(p, scale, BGK_W16, &s, NULL, 256, 0), cudaErrorInvalidValue);
    s = good;
    s.n_rows = 5;
    cr_assert_eq(bgk_repack(p, scale, BGK_W4, &good, &s, 256, 0), cudaErrorInvalidValue);
}

/* 100 GB/s of GGUF bytes is enough: a file is not read faster. */
Test(repack, bench_repack)
{
    NEEDS_GPU();
    const int rows = 14336, k = 4096;
    for (int i = 0; i < N_TYPES; i++) {
        const size_t bytes = (size_t)rows * bg_qtype_row_bytes((uint32_t)types[i].type, k);
        const bg_qtype_info *info = bg_qtype_get((uint32_t)types[i].type);
        uint8_t *from = poisoned(bytes);
        const tiles t = tiles_for(bgk_format_of(types[i].type), rows, k, false);
        void *data = poisoned(t.bytes);
        float *scale = poisoned((size_t)t.n_tiles * 64 * sizeof *scale), ms = 0;
        cudaEvent_t a, b;
        CU(cudaEventCreate(&a));
        CU(cudaEventCreate(&b));
        CU(bgk_random_blocks(from, types[i].type, (int64_t)(bytes / (size_t)info->block_bytes), 1,
                             0, 0.02f, 0));
        const bgk_source s = source_of(&types[i], from, rows, k);
        CU(bgk_repack(data, scale, t.format, &s, NULL, k, 0));
        CU(cudaEventRecord(a, 0));
        CU(bgk_repack(data, scale, t.format, &s, NULL, k, 0));
        CU(cudaEventRecord(b, 0));
        CU(cudaEventSynchronize(b));
        CU(cudaEventElapsedTime(&ms, a, b));
        printf("repack %-7s [%d, %d]: %6.2f ms, %6.1f GB/s of blocks\n", info->name, rows, k,
               (double)ms, (double)bytes / (double)ms * 1e-6);
        cudaFree(from);
        cudaFree(data);
        cudaFree(scale);
    }
}
