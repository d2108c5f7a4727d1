/* tests/gpu/test_mla_store.c - latents stored with products of the normed queries in one launch:
 * the bits of the kernels that do each by itself, and latents and queries against float64. */
#include <stdio.h>

#include "gpu.h"
#include "tiles_host.h"

enum { RANK = 512, ROT = 64, DIM = RANK + ROT, LAYERS = 2, LAYER = 1, ROWS = BGK_STORE_LINEAR };
enum { N_BLOCKS = 12, MOST_TILES = 80, MOST_PARTS = 3 };

typedef struct part {
    bgk_format format;
    int rows;
} part;

/* ---- weights ----------------------------------------------------------------------------------
 */

typedef struct weights {
    bgk_weights w;
    void *data[MOST_PARTS];
    int cols;
} weights;

static weights make_weights(const part *parts, int n, int k, int splits, uint64_t seed)
{
    weights d = {.w = {.splits = splits, .n_chunks = (k + 63) / 64}};
    bgk_wtile list[MOST_TILES];
    float scales[MOST_TILES * 64], *bias = random_f32((size_t)MOST_TILES * 64, seed + 9, 0.3f);
    for (int p = 0; p < n; p++) {
        tile_matrix a =
            tile_matrix_random(parts[p].format, parts[p].rows, k, seed + (uint64_t)p, 0.05f);
        host_tiles t = pack_tiles_host(&a, NULL);
        const size_t each = (size_t)t.n_chunks * (size_t)bgk_chunk_bytes(t.format);
        d.data[p] = to_device(t.data, t.bytes);
        for (int i = 0; i < t.n_tiles; i++) {
            const int left = parts[p].rows - 64 * i;
            cr_assert_lt(d.w.n_tiles, MOST_TILES);
            memcpy(scales + d.w.n_tiles * 64, t.row_scale + i * 64, 64 * sizeof *scales);
            list[d.w.n_tiles++] = (bgk_wtile){.w = (char *)d.data[p] + (size_t)i * each,
                                              .format = t.format,
                                              .out0 = d.cols + 64 * i,
                                              .n_rows = left < 64 ? left : 64};
        }
        d.w.formats |= 1u << t.format;
        d.cols += parts[p].rows;
        host_tiles_free(&t);
        tile_matrix_free(&a);
    }
    d.w.n_out = d.cols;
    d.w.tiles = to_device(list, (size_t)d.w.n_tiles * sizeof *list);
    d.w.row_scale = to_device(scales, (size_t)d.w.n_tiles * 64 * sizeof *scales);
    if (seed % 2) d.w.bias = to_device(bias, (size_t)d.w.n_tiles * 64 * sizeof *bias);
    free(bias);
    return d;
}

static void drop_weights(weights *d)
{
    for (int p = 0; p < MOST_PARTS; p++)
        CU(cudaFree(d->data[p]));
    CU(cudaFree((void *)d->w.tiles));
    CU(cudaFree((void *)d->w.row_scale));
    CU(cudaFree((void *)d->w.bias));
}

/* ---- outputs ----------------------------------------------------------------------------------
 */

/* Device memory, all NaN, its first byte aligned as tiles are; and what is there afterwards. */
typedef struct buffer {
    char *memory, *data;
    size_t bytes;
} buffer;

static buffer buffer_new(size_t bytes)
{
    buffer b = {.bytes = bytes};
    b.memory = poisoned(bytes + GUARD + 1024);
    b.data = b.memory + (-(uintptr_t)b.memory & 1023);
    return b;
}

static unsigned char *buffer_take(buffer *b)
{
    unsigned char *host = from_device(b->data, b->bytes + GUARD);
    cr_assert(all_poison(host + b->bytes, GUARD), "the guard was written over");
    CU(cudaFree(b->memory));
    return host;
}

static bgk_out rows_out(const buffer *b, int cols)
{
    return (bgk_out){b->data, BGK_ROWS, cols};
}

/* ---- one case ---------------------------------------------------------------------------------
 */

typedef struct shape {
    bgk_type type;
    int q_rank, rows, splits;
    part w[MOST_PARTS];
    int second_splits;
    part second[MOST_PARTS]; /* without rows: there is none */
    int block_tokens;
    bool neox, skip; /* skip: the last row has no position */
} shape;

static int n_parts(const part *p)
{
    int n = 0;
    while (n < MOST_PARTS && p[n].rows)
        n++;
    return n;
}

typedef struct result {
    unsigned char *cache, *qa, *out, *other;
} result;

static void result_free(result *r)
{
    free(r->cache);
    free(r->qa);
    free(r->out);
    free(r->other);
}

static float widen(uint16_t v, bgk_type type)
{
    return type == BGK_BF16 ? bg_bf16_to_f32(v) : bg_f16_to_f32(v);
}

/* Value i of a token, as mla.cuh says where it lies. */
static double cached(const bgk_cache *c, const unsigned char *block, int token, int i)
{
    const int b = c->block_tokens, in_row = ((i % 64 / 8) ^ (token % 8)) * 8 + i % 8;
    uint16_t v;
    float scale;
    if (c->type == BGK_Q8 && i < RANK) {
        memcpy(&scale, block + b * (RANK + 2 * ROT) + token * 4, sizeof scale);
        return (double)(int8_t)block[token * RANK + i] * (double)scale;
    }
    const size_t at = c->type == BGK_Q8 ? (size_t)(b * RANK + token * 128 + in_row * 2)
                                        : (size_t)((i / 64 * b + token) * 64 + in_row) * 2;
    memcpy(&v, block + at, sizeof v);
    return (double)widen(v, c->type);
}

static double norm_of(const float *x, int n)
{
    double sum = 0;
    for (int i = 0; i < n; i++)
        sum += (double)x[i] * (double)x[i];
    return sqrt(sum / n + 1e-5);
}

static void check_row(const shape *s, const bgk_cache *c, const result *r, const float *x, int row,
                      int pos, int block, const float *q_norm, const float *kv_norm,
                      const float *freq)
{
    double want[DIM], most = 0;
    const float *kv = x + s->q_rank;
    const double q = norm_of(x, s->q_rank), n = norm_of(kv, RANK);
    for (int d = 0; d < DIM; d++) {
        want[d] = (double)kv[d] * (d < RANK ? (double)kv_norm[d] / n : 1);
        if (d < RANK) most = fmax(most, fabs(want[d]));
    }
    for (int d = 0; d < ROT / 2; d++) {
        const int lo = s->neox ? d : 2 * d, hi = s->neox ? d + ROT / 2 : 2 * d + 1;
        const double angle = (double)((float)pos * freq[d]), u = want[RANK + lo],
                     v = want[RANK + hi];
        want[RANK + lo] = 1.25 * (u * cos(angle) - v * sin(angle));
        want[RANK + hi] = 1.25 * (u * sin(angle) + v * cos(angle));
    }
    const size_t block_bytes = bgk_mla_block_bytes(c);
    const unsigned char *at = r->cache + (size_t)(LAYER * N_BLOCKS + block) * block_bytes;
    const double bound = s->type == BGK_BF16 ? 4e-3 : 6e-4;
    for (int d = 0; d < DIM; d++) {
        const double v = cached(c, at, pos % s->block_tokens, d);
        const double off = s->type == BGK_Q8 && d < RANK ? most / 127 * 0.501
                                                         : bound * (fabs(want[d]) + 1e-2) + 1e-6;
        cr_assert(fabs(v - want[d]) <= off, "type %d, rank %d: row %d value %d: %g, want %g",
                  (int)s->type, s->q_rank, row, d, v, want[d]);
    }
    for (int d = 0; d < (s->q_rank + 63) / 64 * 64; d++) {
        const double w = d < s->q_rank ? (double)x[d] / q * (double)q_norm[d] : 0;
        uint16_t h;
        memcpy(&h, r->qa + 2 * tile_index(256, (size_t)row, (size_t)d), sizeof h);
        cr_assert(fabs((double)bg_f16_to_f32(h) - w) <= 6e-4 * (fabs(w) + 1e-2),
                  "rank %d: query latent of row %d, value %d: %g, want %g", s->q_rank, row, d,
                  (double)bg_f16_to_f32(h), w);
    }
}

static void same_rows(const unsigned char *a, const unsigned char *b, int rows, int cols,
                      const shape *s, const char *what)
{
    for (int i = 0; a && i < rows * cols; i++)
        cr_assert_eq(memcmp(a + 4 * i, b + 4 * i, 4), 0,
                     "%s, type %d, rank %d, %d rows, %d parts, format %d: row %d col %d", what,
                     (int)s->type, s->q_rank, s->rows, s->splits, (int)s->w[0].format, i / cols,
                     i % cols);
}

static void check(const shape *s)
{
    const int cols = s->q_rank + DIM + 8, n = s->rows, blocks_each = N_BLOCKS / ROWS;
    const size_t groups = (size_t)(s->q_rank + 63) / 64;
    weights w = make_weights(s->w, n_parts(s->w), s->q_rank, s->splits, 31), o = {0};
    const bool two = s->second[0].rows > 0;
    w.w.idle = s->rows % 2; /* with a rehearsal */
    if (two) o = make_weights(s->second, n_parts(s->second), s->q_rank, s->second_splits, 40);
    float *in = random_f32((size_t)(ROWS * cols), 21, 3), freq[ROT / 2];
    float *q_norm = random_f32((size_t)s->q_rank, 22, 1), *kv_norm = random_f32(RANK, 23, 1);
    int32_t pos[ROWS], seq[ROWS], block0[ROWS], table[N_BLOCKS];
    for (int i = 0; i < ROT / 2; i++)
        freq[i] = powf(10000.0f, -(float)i / (ROT / 2));
    for (int i = 0; i < N_BLOCKS; i++)
        table[i] = i * 5 % N_BLOCKS;
    for (int i = 0; i < ROWS; i++) {
        seq[i] = ROWS - 1 - i;
        block0[i] = i * blocks_each;
        pos[i] = (7 + 13 * i) % (blocks_each * s->block_tokens);
    }
    if (s->skip) pos[n - 1] = -1;
    const bgk_rows rows = {.pos = to_device(pos, sizeof pos),
                           .seq = to_device(seq, sizeof seq),
                           .blocks = to_device(table, sizeof table),
                           .block0 = to_device(block0, sizeof block0),
                           .rows = n};
    const bgk_rotation rope = {to_device(freq, sizeof freq), ROT, s->neox, 1.25f};
    bgk_cache c = {.type = s->type,
                   .n_blocks = N_BLOCKS,
                   .n_kv_heads = 1,
                   .block_tokens = s->block_tokens,
                   .k_dim = DIM,
                   .v_dim = RANK};
    const size_t cache_bytes = LAYERS * N_BLOCKS * bgk_mla_block_bytes(&c);
    float *d_in = to_device(in, (size_t)(ROWS * cols) * 4);
    float *d_q = to_device(q_norm, (size_t)s->q_rank * 4), *d_kv = to_device(kv_norm, RANK * 4);
    cr_assert(bgk_mla_store_linear_fits(&w.w, &c, s->q_rank, n));
    cr_assert(!two || bgk_mla_store_linear_fits(&o.w, &c, s->q_rank, n));

    result r[2];
    for (int k = 0; k < 2; k++) {
        buffer cache = buffer_new(cache_bytes), qa = buffer_new(groups * 256 * 128);
        buffer out = buffer_new((size_t)(n * w.cols) * 4);
        buffer other = buffer_new((size_t)(n * (two ? o.cols : 1)) * 4);
        const bgk_out to_qa = {qa.data, BGK_TILES, 256};
        const bgk_product products[] = {{rows_out(&out, w.cols), &w.w},
                                        {rows_out(&other, o.cols), &o.w}};
        c.k = cache.data;
        if (k) {
            CU(bgk_mla_store_linear(products, two ? 2 : 1, &to_qa, d_in, cols, &c, &rows, LAYER,
                                    s->q_rank, d_q, d_kv, 1e-5f, &rope, 0));
        } else {
            CU(bgk_mla_store(&to_qa, d_in, cols, &c, &rows, LAYER, s->q_rank, d_q, d_kv, 1e-5f,
                             &rope, 0));
            for (int i = 0; i < (two ? 2 : 1); i++)
                CU(bgk_matmul(&products[i].out, products[i].w, qa.data, 256, n, BGK_SILU, 0));
        }
        r[k] =
            (result){buffer_take(&cache), buffer_take(&qa), buffer_take(&out), buffer_take(&other)};
    }
    for (size_t i = 0; i < cache_bytes; i++)
        cr_assert_eq(r[0].cache[i], r[1].cache[i], "type %d, rank %d, %d rows: byte %zu of %zu",
                     (int)s->type, s->q_rank, n, i, cache_bytes);
    cr_assert_eq(memcmp(r[0].qa, r[1].qa, groups * 256 * 128), 0, "query latents, rank %d",
                 s->q_rank);
    const int there = s->skip ? n - 1 : n; /* the product of a row that is not there is nobody's */
    same_rows(r[0].out, r[1].out, there, w.cols, s, "product");
    if (two) same_rows(r[0].other, r[1].other, there, o.cols, s, "second product");
    for (int i = 0; i < there; i++)
        check_row(s, &c, &r[1], in + i * cols, i, pos[i],
                  table[block0[seq[i]] + pos[i] / s->block_tokens], q_norm, kv_norm, freq);

    void *device[] = {d_in,
                      d_q,
                      d_kv,
                      (void *)rope.freq,
                      (void *)rows.pos,
                      (void *)rows.seq,
                      (void *)rows.blocks,
                      (void *)rows.block0};
    for (size_t i = 0; i < sizeof device / sizeof *device; i++)
        CU(cudaFree(device[i]));
    void *host[] = {in, q_norm, kv_norm};
    for (size_t i = 0; i < sizeof host / sizeof *host; i++)
        free(host[i]);
    for (int k = 0; k < 2; k++)
        result_free(&r[k]);
    drop_weights(&w);
    if (two) drop_weights(&o);
}

/* Runs s for 1 to 4 rows and 1, 2 and 4 parts of K; the second product with other numbers. */
static void check_all(shape s)
{
    static const int splits[] = {1, 2, 4};
    for (int rows = 1; rows <= (gpu_small() ? 2 : ROWS); rows++)
        for (int i = 0; i < 3; i++) {
            s.rows = rows;
            s.splits = splits[i];
            s.second_splits = splits[(i + rows) % 3];
            check(&s);
        }
}

Test(mla_store, alone, .timeout = 120)
{
    NEEDS_GPU();
    check_all((shape){BGK_F16, 2048, .w = {{BGK_W8, 192}}, .block_tokens = 32});
    check_all((shape){BGK_BF16, 768, .w = {{BGK_W4, 130}}, .block_tokens = 16, .neox = true});
    check_all((shape){BGK_Q8, 1536, .w = {{BGK_W8, 64}}, .block_tokens = 16});
    check_all((shape){BGK_F16, 100, .w = {{BGK_W8, 70}}, .block_tokens = 8, .neox = true});
    check_all((shape){BGK_F16, 1056, .w = {{BGK_W6, 64}, {BGK_W5, 20}}, .block_tokens = 32});
    check_all((shape){BGK_Q8, 4, .w = {{BGK_W16, 64}}, .block_tokens = 32});
}

Test(mla_store, two_products, .timeout = 120)
{
    NEEDS_GPU();
    check_all((shape){BGK_F16, 2048, .w = {{BGK_W8, 256}}, .second = {{BGK_W8, 128}},
                      .block_tokens = 32});
    check_all((shape){BGK_BF16, 768, .w = {{BGK_W4, 72}, {BGK_W16, 9}}, .second = {{BGK_W4, 128}},
                      .block_tokens = 16});
    check_all((shape){BGK_Q8, 1536, .w = {{BGK_W8, 17}}, .second = {{BGK_W8, 64}},
                      .block_tokens = 16, .neox = true});
    check_all(
        (shape){BGK_F16, 512, .w = {{BGK_W6, 64}}, .second = {{BGK_W5, 200}}, .block_tokens = 64});
}

/* A row that has no position is not stored. */
Test(mla_store, skipped)
{
    NEEDS_GPU();
    check_all((shape){BGK_F16, 768, .w = {{BGK_W8, 64}}, .second = {{BGK_W8, 40}},
                      .block_tokens = 32, .skip = true});
}

typedef struct call_args {
    bgk_out *qa;
    float *in;
    bgk_cache *cache;
    const bgk_rows *rows;
    const bgk_rotation *rope;
} call_args;

static cudaError_t store_with(const call_args *a, const bgk_product *products, int n)
{
    return bgk_mla_store_linear(products, n, a->qa, a->in, 768 + DIM, a->cache, a->rows, 0, 768,
                                a->in, a->in, 1e-5f, a->rope, 0);
}

Test(mla_store, refuses)
{
    NEEDS_GPU();
    weights w = make_weights((part[]){{BGK_W8, 64}}, 1, 768, 2, 3);
    bgk_cache c = {.type = BGK_F16,
                   .n_blocks = 2,
                   .n_kv_heads = 1,
                   .block_tokens = 16,
                   .k_dim = DIM,
                   .v_dim = RANK};
    cr_expect(bgk_mla_store_linear_fits(&w.w, &c, 768, 1));
    cr_expect(!bgk_mla_store_linear_fits(&w.w, &c, 768, ROWS + 1));
    cr_expect(!bgk_mla_store_linear_fits(&w.w, &c, 0, 1));
    cr_expect(!bgk_mla_store_linear_fits(&w.w, &c, 1024, 1), "the weights have other columns");
    w.w.n_chunks = 64;
    cr_expect(!bgk_mla_store_linear_fits(&w.w, &c, 4096, 1));
    w.w.n_chunks = 12;
    c.type = BGK_F32;
    cr_expect(!bgk_mla_store_linear_fits(&w.w, &c, 768, 1));
    c.type = BGK_F16;
    w.w.splits = 3;
    cr_expect(!bgk_mla_store_linear_fits(&w.w, &c, 768, 1));
    w.w.splits = 2;
    w.w.n_ff = 32;
    cr_expect(!bgk_mla_store_linear_fits(&w.w, &c, 768, 1));
    w.w.n_ff = 0;
    buffer b = buffer_new(1 << 20);
    const int32_t zero = 0;
    void *ints = to_device(&zero, sizeof zero);
    const bgk_rows rows = {ints, ints, ints, ints, 1};
    const bgk_rotation rope = {(float *)(void *)b.data, ROT, false, 1};
    bgk_out qa = {b.data, BGK_ROWS, 768}, out = {b.data, BGK_ROWS, 64};
    float *f = (float *)(void *)b.data;
    c.k = b.data;
    const bgk_product two[] = {{out, &w.w}, {{b.data, BGK_TILES, 100}, &w.w}};
    const call_args call = {&qa, f, &c, &rows, &rope};
    cr_expect_eq(store_with(&call, two, 1), cudaErrorInvalidValue, "queries as rows");
    qa.layout = BGK_TILES;
    qa.stride = 256;
    cr_expect_eq(store_with(&call, two, 2), cudaErrorInvalidValue, "a result's stride");
    cr_expect_eq(store_with(&call, two, 0), cudaErrorInvalidValue, "no product");
    cr_expect_eq(store_with(&call, two, 3), cudaErrorInvalidValue, "three products");
    CU(cudaFree(b.memory));
    CU(cudaFree(ints));
    drop_weights(&w);
}

/* ---- speed ------------------------------------------------------------------------------------
 */

enum { SETS = 24, BENCH_RANK = 2048 };

typedef struct bench {
    bgk_weights w[SETS], other[SETS];
    bool one_launch, two;
    int next;
    char *out, *qa, *other_out;
    float *in;
    bgk_cache cache;
    bgk_rows rows;
    bgk_rotation rope;
} bench;

/* All bytes the same: what a kernel takes does not depend on them. */
static bgk_weights bench_weights(const part *parts, int n, int k, int splits)
{
    bgk_weights w = {.splits = splits, .n_chunks = k / 64};
    bgk_wtile list[MOST_TILES];
    for (int p = 0, out0 = 0; p < n; out0 += parts[p++].rows) {
        const size_t each = (size_t)(k / 64) * (size_t)bgk_chunk_bytes(parts[p].format);
        const int tiles = (parts[p].rows + 63) / 64;
        char *data = NULL;
        CU(cudaMalloc((void **)&data, (size_t)tiles * each));
        CU(cudaMemset(data, 0x2c, (size_t)tiles * each));
        for (int i = 0; i < tiles; i++) {
            const int left = parts[p].rows - 64 * i;
            list[w.n_tiles++] = (bgk_wtile){data + (size_t)i * each, parts[p].format, out0 + 64 * i,
                                            left < 64 ? left : 64, 0};
        }
        w.formats |= 1u << parts[p].format;
        w.n_out = out0 + parts[p].rows;
    }
    w.tiles = to_device(list, (size_t)w.n_tiles * sizeof *list);
    float *scale = NULL;
    CU(cudaMalloc((void **)&scale, (size_t)w.n_tiles * 256));
    CU(cudaMemset(scale, 0, (size_t)w.n_tiles * 256));
    w.row_scale = scale;
    return w;
}

static void bench_call(void *ctx, cudaStream_t stream)
{
    bench *b = ctx;
    const int i = b->next++ % SETS;
    const bgk_out qa = {b->qa, BGK_TILES, 256}, out = {b->out, BGK_ROWS, b->w[i].n_out},
                  other = {b->other_out, BGK_ROWS, b->other[i].n_out};
    const bgk_product products[] = {{out, &b->w[i]}, {other, &b->other[i]}};
    if (b->one_launch) {
        CU(bgk_mla_store_linear(products, b->two ? 2 : 1, &qa, b->in, BENCH_RANK + DIM, &b->cache,
                                &b->rows, 0, BENCH_RANK, b->in, b->in, 1e-5f, &b->rope, stream));
        return;
    }
    CU(bgk_mla_store(&qa, b->in, BENCH_RANK + DIM, &b->cache, &b->rows, 0, BENCH_RANK, b->in, b->in,
                     1e-5f, &b->rope, stream));
    CU(bgk_matmul(&out, &b->w[i], b->qa, 256, b->rows.rows, BGK_SILU, stream));
    if (b->two) CU(bgk_matmul(&other, &b->other[i], b->qa, 256, b->rows.rows, BGK_SILU, stream));
}

Test(mla_store, bench_mla_store, .timeout = 120)
{
    NEEDS_GPU();
    if (gpu_small()) return;
    const part q[] = {{BGK_W8, 2048}}, index_q[] = {{BGK_W8, 4096}};
    const int32_t zeros[ROWS] = {0}, seqs[ROWS] = {0};
    bench b = {.cache = {.type = BGK_F16,
                         .n_blocks = 2,
                         .n_kv_heads = 1,
                         .block_tokens = 32,
                         .k_dim = DIM,
                         .v_dim = RANK}};
    void **all[] = {(void **)&b.out, (void **)&b.qa, (void **)&b.other_out, (void **)&b.in,
                    &b.cache.k};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        CU(cudaMalloc(all[i], 4 << 20));
        CU(cudaMemset(*all[i], 0, 4 << 20));
    }
    void *d = to_device(zeros, sizeof zeros);
    b.rows = (bgk_rows){d, to_device(seqs, sizeof seqs), d, d, 1};
    b.rope = (bgk_rotation){b.in, ROT, false, 1};
    for (int k = 0; k < 3; k++) {
        const int splits = k == 0 ? 4 : k == 1 ? 2 : 4;
        b.two = k > 0;
        for (int i = 0; i < SETS; i++) {
            b.w[i] = bench_weights(b.two ? index_q : q, 1, BENCH_RANK, splits);
            b.other[i] = bench_weights(q, 1, BENCH_RANK, 4);
        }
        for (int rows = 1; rows <= ROWS; rows *= 2) {
            b.rows.rows = rows;
            b.one_launch = true;
            const double us = gpu_time_us(bench_call, &b, 2 * SETS);
            b.one_launch = false;
            fprintf(
                stderr,
                "store, product [%d, %d] in %d parts%s, %d rows: %5.2f us, each by itself %5.2f\n",
                b.w[0].n_out, BENCH_RANK, splits, b.two ? ", of another [2048, 2048]" : "", rows,
                us, gpu_time_us(bench_call, &b, 2 * SETS));
        }
        for (int i = 0; i < SETS; i++) {
            bgk_wtile first[MOST_TILES];
            const bgk_weights *pair[] = {&b.w[i], &b.other[i]};
            for (int j = 0; j < 2; j++) {
                CU(cudaMemcpy(first, pair[j]->tiles, (size_t)pair[j]->n_tiles * sizeof *first,
                              cudaMemcpyDeviceToHost));
                for (int t = 0; t < pair[j]->n_tiles; t++)
                    if (!first[t].out0 || first[t].format != first[t - 1].format)
                        CU(cudaFree((void *)first[t].w));
                CU(cudaFree((void *)pair[j]->tiles));
                CU(cudaFree((void *)pair[j]->row_scale));
            }
        }
    }
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        CU(cudaFree(*all[i]));
    CU(cudaFree(d));
    CU(cudaFree((void *)b.rows.seq));
}
