/* tests/gpu/tiles_host.h - weight tiles written and read on the host, by the text of bgk.h alone:
 * no code is shared with kernels/. For tests of what makes tiles and of what reads them. */
#ifndef TESTS_GPU_TILES_HOST_H
#define TESTS_GPU_TILES_HOST_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/f16.h"
#include "base/rng.h"
#include "bgk.h"

#define TILES_UNUSED __attribute__((unused))

/* ---- places in a chunk ------------------------------------------------------------------------
 */

typedef struct tile_place { /* of row 0..63 and column 0..63 of a chunk */
    int thread, pair;       /* 32 w + lane; row pair 8 w + lane / 4 */
    int r1, step;           /* 1: the row is an r1 */
    int second, high;       /* the column is i + 4; is one of 32..63 */
} tile_place;

static inline tile_place tile_place_of(int row, int col)
{
    const int w = row / 16, c = col % 32;
    return (tile_place){.thread = 32 * w + row % 8 * 4 + c % 4,
                        .pair = 8 * w + row % 8,
                        .r1 = row % 16 / 8,
                        .step = c / 8,
                        .second = c % 8 / 4,
                        .high = col / 32};
}

/* Byte of the quant's low four bits (or its eight, or its half), and the bits' place there. */
static inline size_t tile_quant_at(bgk_format f, tile_place p, int *shift)
{
    *shift = 0;
    if (f == BGK_W16)
        return (size_t)(2048 * p.step + 16 * p.thread + 4 * (2 * p.second + p.r1) + 2 * p.high);
    if (f == BGK_W8)
        return (size_t)(p.step / 2 * 2048 + 16 * p.thread + p.step % 2 * 8 + 4 * p.second +
                        2 * p.high + p.r1);
    *shift = 4 * p.r1;
    return (size_t)(16 * p.thread + 4 * p.step + 2 * p.high + p.second);
}

/* The uint32 with the upper bits (W5, W6), and the place of the lowest of them. */
static inline size_t tile_upper_at(bgk_format f, tile_place p, int *shift)
{
    const int base = p.second ? (p.r1 ? 12 : 0) : (p.r1 ? 8 : 4);
    if (f == BGK_W5) {
        *shift = base + p.step + 16 * p.high;
        return (size_t)(2560 + 4 * p.thread);
    }
    *shift = base + 2 * (p.step % 2) + 16 * p.high;
    return (size_t)(2560 + 8 * p.thread + p.step / 2 * 4);
}

static inline size_t tile_scale_at(bgk_format f, tile_place p, int col)
{
    if (f == BGK_W8) return (size_t)(4096 + 8 * p.pair + 4 * p.r1 + 2 * p.high);
    return (size_t)(2048 + 16 * p.pair + 8 * p.r1 + 2 * p.high +
                    (f == BGK_W6 ? col % 32 / 16 * 4 : 0));
}

static inline size_t tile_min_at(tile_place p) /* W4, W5 */
{
    return (size_t)(2048 + 16 * p.pair + 8 * p.r1 + 4 + 2 * p.high);
}

static inline int tile_scale_shift(bgk_format f, tile_place p)
{
    return f < BGK_W8 && p.r1 ? 20 : 24;
}

static inline float tile_half_at(const uint8_t *chunk, size_t at)
{
    uint16_t h;
    memcpy(&h, chunk + at, 2);
    return bg_f16_to_f32(h);
}

static inline void tile_put_half(uint8_t *chunk, size_t at, float v)
{
    const uint16_t h = bg_f32_to_f16(v);
    memcpy(chunk + at, &h, 2);
}

/* ---- reading ----------------------------------------------------------------------------------
 */

/* The stored value at (row, col) of a chunk, exactly; times 2^e of the row it is the weight's. */
static TILES_UNUSED double tile_value(bgk_format f, const uint8_t *chunk, int row, int col)
{
    const tile_place p = tile_place_of(row, col);
    int shift, up;
    const size_t at = tile_quant_at(f, p, &shift);
    if (f == BGK_W16) return tile_half_at(chunk, at);
    const double s =
        ldexp((double)tile_half_at(chunk, tile_scale_at(f, p, col)), -tile_scale_shift(f, p));
    if (f == BGK_W8) return s * (chunk[at] - 128);
    int q = chunk[at] >> shift & 15;
    if (f != BGK_W4) {
        uint32_t word;
        memcpy(&word, chunk + tile_upper_at(f, p, &up), 4);
        q |= (int)(word >> up & (f == BGK_W5 ? 1 : 3)) << 4;
    }
    if (f == BGK_W6) return s * (q - 32);
    return s * q + (double)tile_half_at(chunk, tile_min_at(p));
}

/* Column n's tile and row there, of a plain part or of glu (up: of up's rows). */
static inline void tile_of_row(bool glu, bool up, int n, int *tile, int *row)
{
    if (!glu) {
        *tile = n / 64;
        *row = n % 64;
        return;
    }
    const int j = n % 64, c = j % 32; /* q is c % 4, 4 more in the upper half */
    *tile = n / 64 * 2 + c / 16;
    *row = 16 * (c % 16 / 4) + c % 4 + 4 * (j / 32) + 8 * up;
}

/* ---- writing ----------------------------------------------------------------------------------
 */

/* A matrix [rows, k] in a format's own terms: value(r, c) = s (q - zero) + m, or v. */
typedef struct tile_matrix {
    bgk_format format;
    int rows, k;
    uint8_t *q; /* [rows, k]: 0-15, 0-31, 0-63 or 0-255 */
    float *s;   /* [rows, ceil(k / 16)]; W6 alone may differ between the two 16 of 32 columns */
    float *m;   /* [rows, ceil(k / 32)]; W4, W5 */
    float *v;   /* [rows, k]; W16 */
} tile_matrix;

static TILES_UNUSED void tile_matrix_free(tile_matrix *a)
{
    free(a->q);
    free(a->s);
    free(a->m);
    free(a->v);
    *a = (tile_matrix){0};
}

static inline int tile_zero(bgk_format f)
{
    return f == BGK_W6 ? 32 : f == BGK_W8 ? 128 : 0;
}

/* Random quants; scales within a factor of 8, so that values have a deviation of about 2 std. */
static TILES_UNUSED tile_matrix tile_matrix_random(bgk_format f, int rows, int k, uint64_t seed,
                                                   float std)
{
    static const int levels[BGK_FORMATS] = {16, 32, 64, 256, 0};
    const size_t n = (size_t)rows * (size_t)k, s16 = (size_t)((k + 15) / 16),
                 s32 = (size_t)((k + 31) / 32);
    tile_matrix a = {.format = f, .rows = rows, .k = k};
    a.q = malloc(n + 1);
    a.s = calloc((size_t)rows * s16 + 1, sizeof *a.s);
    a.m = calloc((size_t)rows * s32 + 1, sizeof *a.m);
    a.v = malloc((n + 1) * sizeof *a.v);
#define TILE_RANDOM(i) bg_mix64((seed << 40) ^ ((i)*0x9e3779b97f4a7c15ull) ^ seed)
    for (size_t i = 0; i < n; i++) {
        const uint64_t r = TILE_RANDOM(i);
        if (f == BGK_W16)
            a.v[i] = (float)((double)(r >> 11) * 0x1p-52 - 1) * 1.7f * std;
        else
            a.q[i] = (uint8_t)(r >> 20) % levels[f];
    }
    if (f != BGK_W16)
        for (size_t r = 0; r < (size_t)rows; r++)
            for (size_t j = 0; j < s16; j++) {
                const uint64_t z = TILE_RANDOM(n + r * s16 + (f == BGK_W6 ? j : j / 2 * 2));
                const float scale =
                    std * (0.4f + 3.0f * (float)(z % 1024) / 1024) / (0.29f * (float)levels[f]);
                const bool minus = f != BGK_W4 && z >> 30 & 1;
                a.s[r * s16 + j] = minus ? -scale : scale;
                if (f < BGK_W6)
                    a.m[r * s32 + j / 2] = -a.s[r * s16 + j / 2 * 2] * (float)levels[f] *
                                           (0.4f + 0.2f * (float)(z >> 40 & 255) / 256);
            }
#undef TILE_RANDOM
    return a;
}

static inline double tile_matrix_at(const tile_matrix *a, int r, int c)
{
    const size_t at = (size_t)r * (size_t)a->k + (size_t)c, row = (size_t)r;
    if (a->format == BGK_W16) return (double)a->v[at];
    return (double)a->s[row * (size_t)((a->k + 15) / 16) + (size_t)(c / 16)] *
               (a->q[at] - tile_zero(a->format)) +
           (a->format < BGK_W6 ? (double)a->m[row * (size_t)((a->k + 31) / 32) + (size_t)(c / 32)]
                               : 0);
}

static inline int tile_exponent(const tile_matrix *a, int r)
{
    double s = 0, m = 0;
    for (int c = 0; c < a->k; c++) {
        const size_t row = (size_t)r;
        if (a->format == BGK_W16)
            s = fmax(s, fabs((double)a->v[row * (size_t)a->k + (size_t)c]));
        else
            s = fmax(s, fabs((double)a->s[row * (size_t)((a->k + 15) / 16) + (size_t)(c / 16)]));
        if (a->format < BGK_W6)
            m = fmax(m, fabs((double)a->m[row * (size_t)((a->k + 31) / 32) + (size_t)(c / 32)]));
    }
    const double most = a->format == BGK_W16 ? 256 : 60000;
    const int shift = a->format == BGK_W16 ? 0 : 24;
    int e = s == 0 && m == 0 ? 0 : -1000;
    while (ldexp(s, shift - e) > most || ldexp(m, -e) > most)
        e++;
    return e;
}

/* One linear's tiles on the host. */
typedef struct host_tiles {
    bgk_format format;
    int n_tiles, n_chunks;
    size_t bytes;     /* of data: n_tiles * n_chunks * bgk_chunk_bytes(format) */
    uint8_t *data;    /* tile T's chunks begin at T * n_chunks * bgk_chunk_bytes */
    float *row_scale; /* [n_tiles * 64] */
} host_tiles;

static TILES_UNUSED void host_tiles_free(host_tiles *t)
{
    free(t->data);
    free(t->row_scale);
    *t = (host_tiles){0};
}

static inline void tile_put_row(host_tiles *t, int tile, int row, const tile_matrix *a, int r)
{
    const bgk_format f = a->format;
    const int e = tile_exponent(a, r), chunk_bytes = bgk_chunk_bytes(f);
    t->row_scale[tile * 64 + row] = ldexpf(1, e);
    for (int c = 0; c < a->k; c++) {
        uint8_t *chunk =
            t->data + ((size_t)tile * (size_t)t->n_chunks + (size_t)(c / 64)) * (size_t)chunk_bytes;
        const tile_place p = tile_place_of(row, c % 64);
        const size_t at = (size_t)r * (size_t)a->k + (size_t)c;
        int shift, up;
        const size_t to = tile_quant_at(f, p, &shift);
        if (f == BGK_W16) {
            tile_put_half(chunk, to, ldexpf(a->v[at], -e));
            continue;
        }
        const size_t s = (size_t)r * (size_t)((a->k + 15) / 16) + (size_t)(c / 16);
        tile_put_half(chunk, tile_scale_at(f, p, c % 64),
                      ldexpf(a->s[s], tile_scale_shift(f, p) - e));
        const int q = a->q[at];
        chunk[to] = (uint8_t)(f == BGK_W8 ? q : chunk[to] | (q & 15) << shift);
        if (f == BGK_W5 || f == BGK_W6) {
            uint32_t word;
            const size_t word_at = tile_upper_at(f, p, &up);
            memcpy(&word, chunk + word_at, 4);
            word |= (uint32_t)(q >> 4) << up;
            memcpy(chunk + word_at, &word, 4);
        }
        if (f < BGK_W6)
            tile_put_half(
                chunk, tile_min_at(p),
                ldexpf(a->m[(size_t)r * (size_t)((a->k + 31) / 32) + (size_t)(c / 32)], -e));
    }
}

/* The tiles of one part; with up not NULL (of the same format and shape) of gate and up as glu. */
static TILES_UNUSED host_tiles pack_tiles_host(const tile_matrix *a, const tile_matrix *up)
{
    host_tiles t = {.format = a->format, .n_chunks = (a->k + 63) / 64};
    t.n_tiles = (a->rows + 63) / 64 * (up ? 2 : 1);
    t.bytes = (size_t)t.n_tiles * (size_t)t.n_chunks * (size_t)bgk_chunk_bytes(a->format);
    t.data = calloc(t.bytes + 1, 1);
    t.row_scale = malloc(((size_t)t.n_tiles * 64 + 1) * sizeof *t.row_scale);
    for (int i = 0; i < t.n_tiles * 64; i++)
        t.row_scale[i] = 1;
    for (int r = 0; r < a->rows; r++) {
        int tile, row;
        tile_of_row(up != NULL, false, r, &tile, &row);
        tile_put_row(&t, tile, row, a, r);
        tile_of_row(up != NULL, true, r, &tile, &row);
        if (up) tile_put_row(&t, tile, row, up, r);
    }
    return t;
}

/* The weight that a tile's row holds at column c, as stored: rounded, with its row's scale. */
static TILES_UNUSED double host_tiles_at(const host_tiles *t, int tile, int row, int c)
{
    const uint8_t *chunk = t->data + ((size_t)tile * (size_t)t->n_chunks + (size_t)(c / 64)) *
                                         (size_t)bgk_chunk_bytes(t->format);
    return tile_value(t->format, chunk, row, c % 64) * (double)t->row_scale[tile * 64 + row];
}

#endif
