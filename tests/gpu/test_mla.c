/* tests/gpu/test_mla.c - latent attention and its indexer over a paged cache, against float64; and
 * the same bits for a row in prompts, in decode, alone, spread over the GPU, by a list of all keys.
 */
#include <stdio.h>

#include "gpu.h"

enum { LAYERS = 2, LAYER = 1, RANK = 512, ROT = 64, DIM = RANK + ROT, NOPE = 16, TAIL = 21 };
enum { N_SMS = 132, MOST_SEQS = 16 };

typedef struct shape {
    int heads;
    bgk_type type;
    int block_tokens;
    bool neox;
} shape;

typedef struct setup {
    shape s;
    int n_seqs, n_rows, n_blocks, n_tables;
    int ctx[MOST_SEQS], row0[MOST_SEQS], pos0[MOST_SEQS], block0[MOST_SEQS], n[MOST_SEQS];
    int32_t *tables;
    float *k;         /* [n_blocks * block_tokens, DIM] what the cache holds */
    float *q_lat, *q; /* [n_rows, heads * RANK], [n_rows, heads * (NOPE + ROT)], as kernels read */
    float freq[ROT / 2];
    bgk_mla a; /* on the device, as the rest */
    bgk_rows rows;
    void *parts;
    size_t parts_bytes;
    char *q_memory;
} setup;

static uint16_t narrow(float v, bgk_type type)
{
    return type == BGK_BF16 ? bg_f32_to_bf16(v) : bg_f32_to_f16(v);
}

static float widen(uint16_t v, bgk_type type)
{
    return type == BGK_BF16 ? bg_bf16_to_f32(v) : bg_f16_to_f32(v);
}

static float rounded(float v, bgk_type type)
{
    return type == BGK_F32 ? v : widen(narrow(v, type), type);
}

/* Byte of value i of a token in its block. */
static size_t place(const bgk_cache *c, int token, int i)
{
    const int elem = c->type == BGK_F32 ? 4 : 2, b = c->block_tokens;
    const int in_row = ((i % 64 / 8) ^ (token % 8)) * 8 + i % 8;
    if (c->type == BGK_Q8)
        return (size_t)(i < RANK ? token * RANK + i : b * RANK + token * 128 + in_row * 2);
    if (!bgk_mla_fits(c)) return (size_t)(token * c->k_dim + i) * (size_t)elem;
    return (size_t)((i / 64 * b + token) * 64 + in_row) * 2;
}

static float *scale_at(const bgk_cache *c, const char *block, int token)
{
    return (float *)(void *)(block + c->block_tokens * (RANK + 2 * ROT) + token * 4);
}

/* A row of DIM values, as x to the cache, and as the cache holds it, back to x. */
static void put_row(const bgk_cache *c, char *block, int token, float *x)
{
    float most = 0;
    for (int i = 0; i < RANK; i++)
        most = fmaxf(most, fabsf(x[i]));
    for (int i = 0; i < DIM; i++) {
        char *at = block + place(c, token, i);
        if (c->type == BGK_F32) {
            *(float *)(void *)at = x[i];
        } else if (c->type == BGK_Q8 && i < RANK) {
            *(int8_t *)at = (int8_t)lrintf(x[i] * 127 / most);
            x[i] = (float)*(int8_t *)at * (most / 127);
        } else {
            *(uint16_t *)(void *)at = narrow(x[i], c->type);
            x[i] = widen(narrow(x[i], c->type), c->type);
        }
    }
    if (c->type == BGK_Q8) *scale_at(c, block, token) = most / 127;
}

static float get_value(const bgk_cache *c, const char *block, int token, int i)
{
    const char *at = block + place(c, token, i);
    if (c->type == BGK_F32) return *(const float *)(const void *)at;
    if (c->type == BGK_Q8 && i < RANK)
        return (float)*(const int8_t *)at * *scale_at(c, block, token);
    return widen(*(const uint16_t *)(const void *)at, c->type);
}

static void shuffle(int32_t *x, int n)
{
    for (int i = n - 1; i > 0; i--) {
        const int j = (int)(bg_mix64((uint64_t)i * 77 + 5) % (uint64_t)(i + 1));
        const int32_t v = x[i];
        x[i] = x[j];
        x[j] = v;
    }
}

/* A shuffled table for each sequence; block 0 belongs to none. */
static void make_tables(setup *t)
{
    t->n_blocks = 1;
    for (int i = 0; i < t->n_seqs; i++) {
        t->block0[i] = t->n_blocks - 1;
        t->n_blocks += (t->ctx[i] + t->s.block_tokens - 1) / t->s.block_tokens;
    }
    t->n_tables = t->n_blocks - 1;
    t->tables = malloc((size_t)(t->n_tables + 1) * sizeof *t->tables);
    for (int i = 0; i < t->n_tables; i++)
        t->tables[i] = i + 1;
    shuffle(t->tables, t->n_tables);
}

/* Row of the host's k. */
static size_t slot_of(const setup *t, int seq, int pos)
{
    const int b = t->s.block_tokens;
    return (size_t)t->tables[t->block0[seq] + pos / b] * (size_t)b + (size_t)(pos % b);
}

/* All NaN but the sequences' own keys. */
static void fill_cache(setup *t)
{
    bgk_cache *c = &t->a.cache;
    const size_t block = bgk_mla_block_bytes(c), layer = block * (size_t)t->n_blocks;
    char *host = malloc(layer);
    memset(host, 0xff, layer);
    for (int i = 0; i < t->n_seqs; i++)
        for (int p = 0; p < t->ctx[i]; p++) {
            const size_t slot = slot_of(t, i, p);
            const size_t b = slot / (size_t)t->s.block_tokens;
            for (int d = 0; d < DIM; d++)
                t->k[slot * DIM + (size_t)d] =
                    gpu_random(11, slot * DIM + (size_t)d) * (p % 3 ? 1.0f : 0.3f);
            put_row(c, host + b * block, p % t->s.block_tokens, t->k + slot * DIM);
        }
    c->k = poisoned(LAYERS * layer);
    CU(cudaMemcpy((char *)c->k + LAYER * layer, host, layer, cudaMemcpyHostToDevice));
    free(host);
}

static void send_rows(setup *t)
{
    const size_t n = (size_t)t->n_rows;
    int32_t *pos = malloc((n + 1) * sizeof *pos), *seq = malloc((n + 1) * sizeof *seq);
    for (int i = 0; i < t->n_seqs; i++)
        for (int j = 0; j < t->n[i]; j++) {
            pos[t->row0[i] + j] = t->pos0[i] + j;
            seq[t->row0[i] + j] = i;
        }
    t->rows = (bgk_rows){.pos = to_device(pos, n * sizeof *pos),
                         .seq = to_device(seq, n * sizeof *seq),
                         .blocks = to_device(t->tables, (size_t)t->n_tables * sizeof(int32_t)),
                         .block0 = to_device(t->block0, sizeof t->block0),
                         .rows = t->n_rows};
    free(pos);
    free(seq);
}

/* Queries in 16 bits, as tensor cores want them; the F32 cache's as floats. */
static void send_queries(setup *t)
{
    const size_t n = (size_t)t->n_rows, lat = (size_t)t->s.heads * RANK;
    const size_t cols = (size_t)t->s.heads * (NOPE + ROT), stride = (n + 255) / 256 * 256;
    const size_t groups = (cols + 63) / 64;
    t->q_lat = random_f32(n * lat, 13, 1.5f);
    t->q = random_f32(n * cols, 14, 1.5f);
    if (t->s.type == BGK_F32) {
        t->a.q_lat = (bgk_out){to_device(t->q_lat, n * lat * 4), BGK_ROWS, (int64_t)lat};
        t->q_memory = to_device(t->q, n * cols * 4);
        t->a.q = (bgk_out){t->q_memory, BGK_ROWS, (int64_t)cols};
        return;
    }
    uint16_t *half = malloc(n * lat * sizeof *half);
    for (size_t i = 0; i < n * lat; i++) {
        half[i] = bg_f32_to_f16(t->q_lat[i]);
        t->q_lat[i] = bg_f16_to_f32(half[i]);
    }
    for (size_t i = 0; i < n * cols; i++)
        t->q[i] = bg_f16_to_f32(bg_f32_to_f16(t->q[i]));
    t->a.q_lat = (bgk_out){to_device(half, n * lat * 2), BGK_HALF_ROWS, (int64_t)lat};
    uint16_t *tiles = to_tiles(t->q, n, cols, stride);
    t->q_memory = poisoned(groups * stride * 128 + 1024);
    char *at = t->q_memory + (-(uintptr_t)t->q_memory & 1023);
    CU(cudaMemcpy(at, tiles, groups * stride * 128, cudaMemcpyHostToDevice));
    t->a.q = (bgk_out){at, BGK_TILES, (int64_t)stride};
    free(half);
    free(tiles);
}

static setup make(shape s, const int *ctx, int n_seqs)
{
    setup t = {.s = s, .n_seqs = n_seqs};
    const int tail = gpu_small() ? 3 : TAIL;
    for (int i = 0; i < n_seqs; i++) {
        t.ctx[i] = ctx[i];
        t.n[i] = ctx[i] < tail ? ctx[i] : tail;
        if (i % 4 == 3) t.n[i] = ctx[i] < 140 ? ctx[i] : 140; /* several tiles */
        t.pos0[i] = ctx[i] - t.n[i];
        t.row0[i] = t.n_rows;
        t.n_rows += t.n[i];
    }
    make_tables(&t);
    for (int i = 0; i < ROT / 2; i++)
        t.freq[i] = powf(10000.0f, -(float)i / (ROT / 2));
    t.k = calloc((size_t)t.n_blocks * (size_t)s.block_tokens * DIM, sizeof *t.k);
    t.a = (bgk_mla){
        .layer = LAYER,
        .n_heads = s.heads,
        .nope = NOPE,
        .scale = 0.09f,
        .rope = {to_device(t.freq, sizeof t.freq), ROT, s.neox, 1.25f},
        .cache = {.type = s.type,
                  .n_blocks = t.n_blocks,
                  .n_kv_heads = 1,
                  .block_tokens = s.block_tokens,
                  .k_dim = DIM,
                  .v_dim = RANK},
    };
    fill_cache(&t);
    send_rows(&t);
    send_queries(&t);
    t.parts_bytes = (size_t)24 << 20;
    t.parts = poisoned(t.parts_bytes + GUARD);
    CU(cudaMemset(t.parts, 0, t.parts_bytes));
    return t;
}

/* Also looks at the parts, which every launch leaves as they were. */
static void drop(setup *t)
{
    unsigned char *parts = from_device(t->parts, t->parts_bytes + GUARD);
    for (size_t i = 0; i < t->parts_bytes; i++)
        cr_assert_eq(parts[i], 0, "byte %zu of the parts is not 0 any more", i);
    cr_assert(all_poison(parts + t->parts_bytes, GUARD), "the parts' guard was written over");
    free(parts);
    void *device[] = {
        t->a.cache.k,           t->a.q_lat.data,     t->q_memory,         t->parts,
        (void *)t->a.rope.freq, (void *)t->rows.pos, (void *)t->rows.seq, (void *)t->rows.blocks,
        (void *)t->rows.block0};
    for (size_t i = 0; i < sizeof device / sizeof *device; i++)
        CU(cudaFree(device[i]));
    free(t->tables);
    free(t->k);
    free(t->q_lat);
    free(t->q);
}

/* x, y turned in float64, from the float32 angle that kernels have. */
static void turn(double *x, double *y, int pos, float freq, double mscale)
{
    const double angle = (double)((float)pos * freq), c = cos(angle) * mscale;
    const double s = sin(angle) * mscale, u = *x, v = *y;
    *x = u * c - v * s;
    *y = u * s + v * c;
}

/* ---- attention ------------------------------------------------------------------------------- */

typedef struct selection { /* on the host; list NULL: all keys */
    int32_t *list, *count;
    int top_k;
    bgk_selected device;
} selection;

static void reference(const setup *t, const selection *s, int seq, int pos, int row, int head,
                      double *out, double *mag)
{
    double q[DIM], most = -INFINITY, total = 0;
    const size_t heads = (size_t)t->s.heads, at = (size_t)row * heads + (size_t)head;
    for (int i = 0; i < RANK; i++)
        q[i] = (double)rounded(t->q_lat[at * RANK + (size_t)i], t->s.type);
    for (int i = 0; i < ROT / 2; i++) {
        const int lo = t->s.neox ? i : 2 * i, hi = t->s.neox ? i + ROT / 2 : 2 * i + 1;
        const float *from = t->q + at * (NOPE + ROT) + NOPE;
        double x = (double)from[lo], y = (double)from[hi];
        turn(&x, &y, pos, t->freq[i], 1.25);
        q[RANK + lo] = (double)rounded((float)x, t->s.type);
        q[RANK + hi] = (double)rounded((float)y, t->s.type);
    }
    const int count = s && s->count[row] >= 0 ? s->count[row] : -1;
    const int32_t *list = count >= 0 ? s->list + (size_t)row * (size_t)s->top_k : NULL;
    const int n = count >= 0 ? count : pos + 1;
    double *p = malloc((size_t)n * sizeof *p);
    for (int j = 0; j < n; j++) {
        const float *k = t->k + slot_of(t, seq, list ? list[j] : j) * DIM;
        double x = 0;
        for (int d = 0; d < DIM; d++)
            x += q[d] * (double)k[d];
        p[j] = x * (double)t->a.scale;
        if (p[j] > most) most = p[j];
    }
    for (int j = 0; j < n; j++)
        total += p[j] = exp(p[j] - most);
    for (int d = 0; d < RANK; d++)
        out[d] = mag[d] = 0;
    for (int j = 0; j < n; j++) {
        const float *k = t->k + slot_of(t, seq, list ? list[j] : j) * DIM;
        for (int d = 0; d < RANK; d++) {
            out[d] += p[j] / total * (double)k[d];
            mag[d] += p[j] / total * fabs((double)k[d]);
        }
    }
    free(p);
}

typedef struct result {
    char *memory, *data; /* data: 1024-byte aligned, as tiles are */
    size_t bytes;
    bgk_out out;
} result;

static result result_new(size_t rows, size_t cols, bgk_layout layout)
{
    const size_t stride = (rows + 255) / 256 * 256, groups = (cols + 63) / 64;
    result r = {.bytes = layout == BGK_TILES ? groups * stride * 128 : rows * cols * sizeof(float)};
    r.memory = poisoned(r.bytes + GUARD + 1024);
    r.data = r.memory + (-(uintptr_t)r.memory & 1023);
    r.out = (bgk_out){r.data, layout, (int64_t)(layout == BGK_TILES ? stride : cols)};
    return r;
}

/* What is there, after the guard was looked at. */
static void *result_take(result *r)
{
    CU(cudaGetLastError());
    unsigned char *host = from_device(r->data, r->bytes + GUARD);
    cr_assert(all_poison(host + r->bytes, GUARD), "the guard was written over");
    CU(cudaFree(r->memory));
    return host;
}

static result attention_result(const setup *t, bgk_layout layout)
{
    return result_new((size_t)t->n_rows, (size_t)t->s.heads * RANK, layout);
}

static void *run_tiles(const setup *t, bgk_layout layout, int tokens)
{
    bgk_item *items = malloc((size_t)(t->n_rows + 1) * sizeof *items);
    result r = attention_result(t, layout);
    int n = 0;
    for (int i = 0; i < t->n_seqs; i++)
        for (int at = 0; at < t->n[i]; at += tokens) {
            const int left = t->n[i] - at;
            items[n++] = (bgk_item){t->row0[i] + at, t->pos0[i] + at, t->block0[i],
                                    left < tokens ? left : tokens};
        }
    bgk_item *d = to_device(items, (size_t)n * sizeof *items);
    CU(bgk_mla_tiles(&r.out, &t->a, t->rows.blocks, d, n, 0));
    void *host = result_take(&r);
    CU(cudaFree(d));
    free(items);
    return host;
}

/* Every row by itself: `together` of them a launch. */
static void *run_single(const setup *t, bgk_layout layout, int together, int n_sms, size_t parts)
{
    bgk_item *items = malloc((size_t)(t->n_rows + 1) * sizeof *items);
    result r = attention_result(t, layout);
    int n = 0;
    for (int i = 0; i < t->n_seqs; i++)
        for (int j = 0; j < t->n[i]; j++)
            items[n++] = (bgk_item){t->row0[i] + j, t->pos0[i] + j, t->block0[i], INT32_MAX};
    bgk_item *d = to_device(items, (size_t)n * sizeof *items);
    for (int at = 0; at < n; at += together)
        CU(bgk_mla_single(&r.out, &t->a, t->rows.blocks, d + at,
                          n - at < together ? n - at : together, t->parts, parts, n_sms, 0));
    void *host = result_take(&r);
    CU(cudaFree(d));
    free(items);
    return host;
}

static void *run_selected(const setup *t, const selection *s, bgk_layout layout, int n_sms,
                          size_t parts)
{
    result r = attention_result(t, layout);
    CU(bgk_mla_selected(&r.out, &t->a, &t->rows, &s->device, t->parts, parts, n_sms, 0));
    return result_take(&r);
}

static void *run_plain(const setup *t, const selection *s, bgk_layout layout)
{
    const bgk_selected none = {0};
    result r = attention_result(t, layout);
    CU(bgk_mla_plain(&r.out, &t->a, &t->rows, s ? &s->device : &none, 0));
    return result_take(&r);
}

static void same_bits(const setup *t, const float *a, const float *b, const char *what)
{
    const size_t cols = (size_t)t->s.heads * RANK;
    for (size_t i = 0; i < (size_t)t->n_rows * cols; i++)
        cr_assert_eq(bg_f32_bits(a[i]), bg_f32_bits(b[i]),
                     "%d heads, type %d: %s: row %zu col %zu: %a, else %a", t->s.heads,
                     (int)t->s.type, what, i / cols, i % cols, (double)b[i], (double)a[i]);
}

static void check_values(const setup *t, const selection *s, const float *got, double bound,
                         const char *what)
{
    double want[RANK], mag[RANK], worst_err = 0;
    for (int i = 0; i < t->n_seqs; i++)
        for (int j = 0; j < t->n[i]; j++) {
            if (j % 7 && j != t->n[i] - 1) continue;
            for (int h = 0; h<t->s.heads; h += t->s.heads> 8 ? 5 : 1) {
                const int row = t->row0[i] + j;
                const float *at = got + ((size_t)row * (size_t)t->s.heads + (size_t)h) * RANK;
                reference(t, s, i, t->pos0[i] + j, row, h, want, mag);
                const worst w = worst_of(at, want, mag, 1e-5, RANK);
                if (w.err > worst_err) worst_err = w.err;
                cr_assert(w.err < bound,
                          "%s: %d heads, type %d, blocks of %d: position %d head %d value %zu: off "
                          "by %g, want %g, got %g",
                          what, t->s.heads, (int)t->s.type, t->s.block_tokens, t->pos0[i] + j, h,
                          w.at, w.err, want[w.at], (double)at[w.at]);
            }
        }
    if (getenv("GPU_TEST_VERBOSE"))
        fprintf(stderr, "%s: %d heads, type %d, blocks of %d: worst %.2g\n", what, t->s.heads,
                (int)t->s.type, t->s.block_tokens, worst_err);
}

/* Tiles hold the rows' values as halves, and nothing is written beyond them. */
static void check_layout(const float *rows, const uint16_t *tiles, size_t n, size_t cols,
                         const char *what)
{
    const size_t stride = (n + 255) / 256 * 256, all = (cols + 63) / 64 * 64;
    for (size_t r = 0; r < stride; r++)
        for (size_t c = 0; c < all; c++) {
            const uint16_t got = tiles[tile_index(stride, r, c)];
            const uint16_t want = r >= n     ? 0xffff
                                  : c < cols ? bg_f32_to_f16(rows[r * cols + c])
                                             : 0;
            cr_assert_eq(got, want, "%s: tiles, row %zu col %zu: %04x, want %04x", what, r, c, got,
                         want);
        }
}

static void check_attention_layout(const setup *t, const float *rows, uint16_t *tiles,
                                   const char *what)
{
    check_layout(rows, tiles, (size_t)t->n_rows, (size_t)t->s.heads * RANK, what);
    free(tiles);
}

static double bound_of(const shape *s) /* P has 8 or 11 bits */
{
    return s->type == BGK_F32 ? 2e-5 : s->type == BGK_BF16 ? 4.5e-3 : 7e-4;
}

static void check_shape(shape s, const int *ctx, int n_seqs)
{
    setup t = make(s, ctx, n_seqs);
    float *tiles = run_tiles(&t, BGK_ROWS, BGK_MLA_TOKENS);
    check_values(&t, NULL, tiles, bound_of(&s), "tiles");
    float *b = run_tiles(&t, BGK_ROWS, 7);
    same_bits(&t, tiles, b, "tiles of 7 tokens");
    free(b);
    b = run_single(&t, BGK_ROWS, 65535, 1, 0);
    same_bits(&t, tiles, b, "decode, all at once, not spread");
    free(b);
    b = run_single(&t, BGK_ROWS, 20, N_SMS, t.parts_bytes);
    same_bits(&t, tiles, b, "decode in a batch of 20");
    free(b);
    b = run_single(&t, BGK_ROWS, 1, N_SMS, t.parts_bytes);
    same_bits(&t, tiles, b, "decode alone, spread");
    free(b);
    setup said = t;
    said.a.max_keys = 1500; /* as lengths[] has them */
    b = run_single(&said, BGK_ROWS, 1, N_SMS, t.parts_bytes);
    same_bits(&t, tiles, b, "decode alone, known to be short");
    free(b);
    static const size_t room[] = {1, 2, 3, 5, 9, 13, 23};
    for (size_t i = 0; i < sizeof room / sizeof *room; i++) {
        b = run_single(&t, BGK_ROWS, 3, N_SMS * 16, (size_t)s.heads * (RANK + 64) * 12 * room[i]);
        same_bits(&t, tiles, b, "decode by three, spread as room allows");
        free(b);
    }
    check_attention_layout(&t, tiles, run_tiles(&t, BGK_TILES, BGK_MLA_TOKENS), "tiles");
    check_attention_layout(&t, tiles, run_single(&t, BGK_TILES, 2, N_SMS, t.parts_bytes),
                           "decode, spread");
    check_attention_layout(&t, tiles, run_single(&t, BGK_TILES, 200, 1, 0), "decode");
    free(tiles);
    drop(&t);
}

static const int lengths[] = {1, 15, 64, 65, 700, 128, 129, 300, 1500};

static void check_shapes(const shape *s, size_t n)
{
    static const int few[] = {1, 66, 300};
    if (gpu_small()) /* for tools that make a kernel a hundred times slower */
        check_shape(s[0], few, 3);
    else
        for (size_t i = 0; i < n; i++)
            check_shape(s[i], lengths, 9);
}

/* A long sequence: many units for each of few blocks, many blocks, chunks by chunks. */
static void check_long(shape s, int ctx)
{
    static const int sms[] = {2, 3, 5, 12, 31, 64, N_SMS};
    static const size_t room[] = {1, 3, 40, 2000}; /* parts of so many heads */
    setup t = make(s, &ctx, 1);
    float *tiles = run_tiles(&t, BGK_ROWS, BGK_MLA_TOKENS);
    check_values(&t, NULL, tiles, bound_of(&s), "long");
    for (size_t i = 0; i < sizeof sms / sizeof *sms; i++)
        for (size_t j = 0; j < sizeof room / sizeof *room; j++) {
            const size_t most = (size_t)s.heads * (RANK + 128) * 4 * room[j];
            float *b = run_single(&t, BGK_ROWS, 1 + (int)i % 2, sms[i],
                                  most < t.parts_bytes ? most : t.parts_bytes);
            same_bits(&t, tiles, b, "long, spread");
            free(b);
        }
    free(tiles);
    drop(&t);
}

Test(mla, long_ones)
{
    NEEDS_GPU();
    if (gpu_small()) return;
    check_long((shape){3, BGK_F16, 32, false}, 1024);
    check_long((shape){8, BGK_F16, 32, false}, 4096);
    check_long((shape){8, BGK_F16, 64, true}, 4500);
    check_long((shape){1, BGK_F16, 32, false}, 36000); /* more chunks than a warp lists at once */
    check_long((shape){20, BGK_BF16, 16, false}, 9000);
    check_long((shape){40, BGK_F16, 192, false}, 2100);
    check_long((shape){3, BGK_Q8, 32, true}, 7000);
}

enum { CLUSTER_KEYS = 2048 }; /* of a single row that is by itself a cluster's */

/* Whether the device, not a part of it, has clusters of 16 blocks. */
static bool has_clusters(void)
{
    int major = 0, sms = 0;
    CU(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
    CU(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
    return major == 9 && sms >= 100;
}

/* Single rows of which is said that they are short: the bits they have without. */
static void check_cluster(shape s)
{
    static const int ctx[] = {1, 63, 64, 65, 1024, 1025, 2047, CLUSTER_KEYS};
    setup t = make(s, ctx, gpu_small() ? 3 : 8), said = t, more = t;
    said.a.max_keys = CLUSTER_KEYS;
    more.a.max_keys = CLUSTER_KEYS + 1;
    float *rows = run_single(&t, BGK_ROWS, 1, N_SMS, t.parts_bytes), *b;
    check_values(&t, NULL, rows, bound_of(&s), "short rows");
    for (int i = 0; i < 3; i++) {
        b = run_single(&said, BGK_ROWS, 1, N_SMS, t.parts_bytes);
        same_bits(&t, rows, b, "short rows, known to be");
        free(b);
    }
    check_attention_layout(&t, rows, run_single(&said, BGK_TILES, 1, N_SMS, t.parts_bytes),
                           "short rows, known to be");
    static const int sms[] = {1, 15, 16}, together[] = {1, 2, 3};
    for (int i = 0; i < 3; i++) {
        b = run_single(&said, BGK_ROWS, together[i], sms[i], t.parts_bytes);
        same_bits(&t, rows, b, "short rows, known to be, by few blocks or some a launch");
        free(b);
    }
    b = run_single(&more, BGK_ROWS, 1, N_SMS, t.parts_bytes);
    same_bits(&t, rows, b, "short rows that could be longer");
    free(b);
    /* A cluster has no parts: what is there makes no difference. */
    said.parts = poisoned(t.parts_bytes);
    b = run_single(&said, BGK_ROWS, 1, N_SMS, t.parts_bytes);
    if (has_clusters()) same_bits(&t, rows, b, "short rows, not in a cluster");
    free(b);
    CU(cudaFree(said.parts));
    free(rows);
    drop(&t);
}

/* Rows that see more than they should end, and write what is theirs; one that is none writes
 * nothing. */
static void check_cluster_wrong(shape s)
{
    const int ctx = CLUSTER_KEYS + 150;
    setup t = make(s, &ctx, 1);
    const size_t n = (size_t)(t.n_rows * s.heads * RANK);
    t.a.max_keys = CLUSTER_KEYS;
    float *rows = run_single(&t, BGK_ROWS, 1, N_SMS, t.parts_bytes);
    for (size_t i = 0; i < n; i++)
        cr_assert(isfinite(rows[i]), "too long a row: value %zu", i);
    free(rows);
    result r = attention_result(&t, BGK_ROWS);
    const bgk_item none = {0, -1, t.block0[0], 1};
    bgk_item *d = to_device(&none, sizeof none);
    CU(bgk_mla_single(&r.out, &t.a, t.rows.blocks, d, 1, t.parts, t.parts_bytes, N_SMS, 0));
    void *host = result_take(&r);
    cr_assert(all_poison(host, n * sizeof(float)), "a row that is none was written");
    CU(cudaFree(d));
    free(host);
    drop(&t);
}

Test(mla, cluster)
{
    NEEDS_GPU();
    check_cluster((shape){8, BGK_F16, 32, false});
    if (gpu_small()) return;
    check_cluster((shape){8, BGK_BF16, 64, true});
    check_cluster((shape){8, BGK_Q8, 32, false});
    check_cluster((shape){5, BGK_F16, 16, true});
    check_cluster((shape){1, BGK_Q8, 128, true});
    check_cluster_wrong((shape){8, BGK_F16, 32, false});
    check_cluster_wrong((shape){3, BGK_Q8, 64, false});
}

/* One short sequence, one head: where everything else is wrong, too, this says what. */
Test(mla, first)
{
    NEEDS_GPU();
    static const int one[] = {1}, few[] = {16}, tile[] = {64};
    const shape s = {1, BGK_F16, 16, false};
    check_shape(s, one, 1);
    check_shape(s, few, 1);
    check_shape(s, tile, 1);
}

Test(mla, f16)
{
    NEEDS_GPU();
    static const shape s[] = {
        {8, BGK_F16, 32, false}, {3, BGK_F16, 16, true},   {20, BGK_F16, 16, false},
        {64, BGK_F16, 64, true}, {16, BGK_F16, 128, true}, {1, BGK_F16, 8, false},
        {40, BGK_F16, 32, true},
    };
    check_shapes(s, sizeof s / sizeof *s);
}

Test(mla, bf16)
{
    NEEDS_GPU();
    static const shape s[] = {{8, BGK_BF16, 32, true}, {20, BGK_BF16, 16, false}};
    check_shapes(s, sizeof s / sizeof *s);
}

Test(mla, q8)
{
    NEEDS_GPU();
    static const shape s[] = {{8, BGK_Q8, 32, false},
                              {3, BGK_Q8, 16, true},
                              {20, BGK_Q8, 64, true},
                              {16, BGK_Q8, 8, false}};
    check_shapes(s, sizeof s / sizeof *s);
}

Test(mla, plain)
{
    NEEDS_GPU();
    static const shape s[] = {{3, BGK_F32, 16, false},
                              {5, BGK_F32, 32, true},
                              {4, BGK_F16, 32, false},
                              {2, BGK_BF16, 16, true}};
    for (size_t i = 0; i < sizeof s / sizeof *s; i++) {
        setup t = make(s[i], lengths, gpu_small() ? 2 : 9);
        float *rows = run_plain(&t, NULL, BGK_ROWS);
        check_values(&t, NULL, rows, bound_of(&s[i]), "plain");
        check_attention_layout(&t, rows, run_plain(&t, NULL, BGK_TILES), "plain");
        free(rows);
        drop(&t);
    }
}

/* Random keys of rows that have more than top_k of them. */
static selection select_keys(const setup *t, int top_k)
{
    const size_t n = (size_t)t->n_rows, list = n * (size_t)top_k;
    selection s = {.list = malloc(list * sizeof *s.list),
                   .count = malloc(n * sizeof *s.count),
                   .top_k = top_k};
    memset(s.list, 0xff, list * sizeof *s.list);
    for (int i = 0; i < t->n_seqs; i++)
        for (int j = 0; j < t->n[i]; j++) {
            const int row = t->row0[i] + j, n_keys = t->pos0[i] + j + 1;
            s.count[row] = n_keys <= top_k ? -1 : top_k;
            for (int k = 0, put = 0; n_keys > top_k && k < n_keys; k++) {
                const uint64_t u = bg_mix64((uint64_t)(row * 5000 + k));
                if (u % (uint64_t)(n_keys - k) < (uint64_t)(top_k - put))
                    s.list[row * top_k + put++] = k;
            }
        }
    s.device = (bgk_selected){to_device(s.list, list * sizeof *s.list),
                              to_device(s.count, n * sizeof *s.count), top_k};
    return s;
}

static void drop_selection(selection *s)
{
    CU(cudaFree((void *)s->device.list));
    CU(cudaFree((void *)s->device.count));
    free(s->list);
    free(s->count);
}

static void check_selected(shape s, int top_k)
{
    setup t = make(s, lengths, gpu_small() ? 3 : 9);
    selection some = select_keys(&t, top_k), all = select_keys(&t, 4096);
    float *rows = run_selected(&t, &some, BGK_ROWS, 1, 0);
    check_values(&t, &some, rows, bound_of(&s), "selected");
    check_attention_layout(&t, rows, run_selected(&t, &some, BGK_TILES, 1, 0), "selected");
    float *b, *plain = s.type == BGK_Q8 ? NULL : run_plain(&t, &some, BGK_ROWS);
    if (plain) check_values(&t, &some, plain, bound_of(&s), "selected, plain");
    free(plain);
    free(rows);
    rows = run_tiles(&t, BGK_ROWS, BGK_MLA_TOKENS);
    b = run_selected(&t, &all, BGK_ROWS, 1, 0);
    same_bits(&t, rows, b, "selected, all keys");
    free(b);
    free(rows);
    drop_selection(&some);
    drop_selection(&all);
    drop(&t);

    t = make(s, lengths + 7, 2); /* few rows */
    some = select_keys(&t, top_k);
    rows = run_selected(&t, &some, BGK_ROWS, 1, 0);
    b = run_selected(&t, &some, BGK_ROWS, N_SMS, t.parts_bytes);
    same_bits(&t, rows, b, "selected, spread");
    free(b);
    free(rows);
    drop_selection(&some);
    drop(&t);
}

/* The first rows of a long sequence, one to five in a launch: rows of lists, and of all keys. */
static void check_selected_few(shape s, int ctx, int top_k)
{
    setup t = make(s, &ctx, 1);
    selection some = select_keys(&t, top_k);
    float *rows = run_selected(&t, &some, BGK_ROWS, 1, 0);
    check_values(&t, &some, rows, bound_of(&s), "selected, few");
    for (int n = 1; n <= 5; n++) {
        setup few = t;
        few.n_rows = few.rows.rows = n;
        float *b = run_selected(&few, &some, BGK_ROWS, N_SMS, t.parts_bytes);
        same_bits(&few, rows, b, "selected, few rows");
        free(b);
        few.a.early = true;
        few.a.max_keys = ctx;
        b = run_selected(&few, &some, BGK_ROWS, N_SMS, t.parts_bytes);
        same_bits(&few, rows, b, "selected, few rows, queries that are there");
        few.a.early = false;
        few.a.max_keys = t.a.max_keys;
        free(b);
        check_attention_layout(&few, rows,
                               run_selected(&few, &some, BGK_TILES, N_SMS, t.parts_bytes),
                               "selected, few rows");
    }
    free(rows);
    drop_selection(&some);
    drop(&t);
}

Test(mla, selected_few)
{
    NEEDS_GPU();
    if (gpu_small()) return;
    check_selected_few((shape){8, BGK_F16, 32, false}, 2300, 2048);
    check_selected_few((shape){8, BGK_F16, 32, true}, 1500, 1000);
    check_selected_few((shape){8, BGK_F16, 64, true}, 1100, 4096);
    check_selected_few((shape){8, BGK_F16, 16, false}, 3000, 2500);
    check_selected_few((shape){3, BGK_BF16, 32, false}, 400, 100);
    check_selected_few((shape){8, BGK_Q8, 32, false}, 2100, 2000);
}

Test(mla, selected)
{
    NEEDS_GPU();
    check_selected((shape){8, BGK_F16, 32, false}, 64);
    check_selected((shape){3, BGK_BF16, 16, true}, 290);
    check_selected((shape){20, BGK_F16, 64, false}, 517);
    check_selected((shape){8, BGK_Q8, 16, false}, 130);
}

/* ---- store ----------------------------------------------------------------------------------- */

static void check_store(shape s, int q_rank, bgk_layout layout)
{
    setup t = make(s, lengths, 9);
    const size_t n = (size_t)t.n_rows, cols = (size_t)q_rank + DIM + 4;
    const bgk_cache *c = &t.a.cache;
    const size_t block = bgk_mla_block_bytes(c), bytes = LAYERS * block * (size_t)t.n_blocks;
    float *in = random_f32(n * cols, 21, 3), *q_norm = random_f32((size_t)q_rank, 22, 1);
    float *kv_norm = random_f32(RANK, 23, 1);
    float *d_in = to_device(in, n * cols * 4), *d_q = to_device(q_norm, (size_t)q_rank * 4);
    float *d_kv = to_device(kv_norm, RANK * 4);
    result r = result_new(n, (size_t)(q_rank ? q_rank : 4), layout);
    CU(cudaMemset(c->k, 0xff, bytes));
    CU(bgk_mla_store(&r.out, d_in, (int64_t)cols, c, &t.rows, LAYER, q_rank, d_q, d_kv, 1e-5f,
                     &t.a.rope, 0));
    char *got = from_device(c->k, bytes);
    void *qa = result_take(&r);
    uint8_t *written = calloc((size_t)t.n_blocks * (size_t)s.block_tokens, 1);
    for (int i = 0; i < t.n_seqs; i++)
        for (int j = 0; j < t.n[i]; j++) {
            const int row = t.row0[i] + j, pos = t.pos0[i] + j;
            const float *x = in + (size_t)row * cols;
            const size_t slot = slot_of(&t, i, pos);
            double want[DIM], sum = 0, q_sum = 0;
            for (int d = 0; d < RANK; d++)
                sum += (double)x[q_rank + d] * (double)x[q_rank + d];
            for (int d = 0; d < RANK; d++)
                want[d] = (double)x[q_rank + d] / sqrt(sum / RANK + 1e-5) * (double)kv_norm[d];
            for (int d = 0; d < ROT / 2; d++) {
                const int lo = s.neox ? d : 2 * d, hi = s.neox ? d + ROT / 2 : 2 * d + 1;
                double *k = want + RANK;
                k[lo] = (double)x[q_rank + RANK + lo];
                k[hi] = (double)x[q_rank + RANK + hi];
                turn(&k[lo], &k[hi], pos, t.freq[d], 1.25);
            }
            const double bound = s.type == BGK_F32 ? 2e-6 : s.type == BGK_BF16 ? 4e-3 : 6e-4;
            const char *at =
                got + (LAYER * (size_t)t.n_blocks + slot / (size_t)s.block_tokens) * block;
            double most = 0;
            for (int d = 0; d < RANK; d++)
                most = fmax(most, fabs(want[d]));
            written[slot] = 1;
            for (int d = 0; d < DIM; d++) {
                const double v = (double)get_value(c, at, pos % s.block_tokens, d);
                const double off = s.type == BGK_Q8 && d < RANK
                                       ? most / 127 * 0.501
                                       : bound * (fabs(want[d]) + 1e-2) + 1e-6;
                cr_assert(fabs(v - want[d]) <= off,
                          "type %d: row %d position %d value %d: %g, want %g", (int)s.type, row,
                          pos, d, v, want[d]);
            }
            for (int d = 0; d < q_rank; d++)
                q_sum += (double)x[d] * (double)x[d];
            for (int d = 0; d < q_rank; d++) {
                const double w = (double)x[d] / sqrt(q_sum / q_rank + 1e-5) * (double)q_norm[d];
                const size_t stride = (n + 255) / 256 * 256;
                const double v =
                    layout == BGK_TILES
                        ? (double)bg_f16_to_f32(
                              ((uint16_t *)qa)[tile_index(stride, (size_t)row, (size_t)d)])
                        : (double)((float *)qa)[(size_t)row * (size_t)q_rank + (size_t)d];
                cr_assert(fabs(v - w) <= (layout == BGK_TILES ? 6e-4 : 2e-6) * (fabs(w) + 1e-2),
                          "q latent: row %d value %d: %g, want %g", row, d, v, w);
            }
        }
    for (size_t b = 0; b < LAYERS * (size_t)t.n_blocks; b++)
        for (int k = 0; k < s.block_tokens; k++) {
            const size_t slot = b % (size_t)t.n_blocks * (size_t)s.block_tokens + (size_t)k;
            for (int d = 0; (b < (size_t)t.n_blocks || !written[slot]) && d < DIM; d++)
                cr_assert(isnan(get_value(c, got + b * block, k, d)),
                          "block %zu token %d was written", b, k);
        }
    CU(cudaFree(d_in));
    CU(cudaFree(d_q));
    CU(cudaFree(d_kv));
    free(written);
    free(got);
    free(qa);
    free(in);
    free(q_norm);
    free(kv_norm);
    drop(&t);
}

Test(mla, store)
{
    NEEDS_GPU();
    check_store((shape){1, BGK_F16, 32, false}, 768, BGK_TILES);
    check_store((shape){1, BGK_BF16, 16, true}, 0, BGK_TILES);
    check_store((shape){1, BGK_F16, 64, true}, 2048, BGK_ROWS);
    check_store((shape){1, BGK_Q8, 16, false}, 768, BGK_TILES);
    check_store((shape){1, BGK_F32, 16, false}, 100, BGK_ROWS);
    check_store((shape){1, BGK_F16, 24, false}, 100, BGK_TILES); /* not for tensor cores */
}

/* ---- indexer --------------------------------------------------------------------------------- */

typedef struct ranked {
    float score;
    int pos;
} ranked;

static int better(const void *a, const void *b)
{
    const ranked *x = a, *y = b;
    if (x->score != y->score) return x->score > y->score ? -1 : 1;
    return x->pos < y->pos ? -1 : 1;
}

static int by_pos(const void *a, const void *b)
{
    return *(const int32_t *)a < *(const int32_t *)b ? -1 : 1;
}

static void check_list(const float *scores, int n, int top_k, const int32_t *list, int count,
                       int row)
{
    if (n <= top_k) {
        cr_assert_eq(count, -1, "row %d: %d keys", row, n);
        return;
    }
    ranked *r = malloc((size_t)n * sizeof *r);
    int32_t *want = malloc((size_t)top_k * sizeof *want);
    for (int i = 0; i < n; i++)
        r[i] = (ranked){scores[i], i};
    qsort(r, (size_t)n, sizeof *r, better);
    for (int i = 0; i < top_k; i++)
        want[i] = r[i].pos;
    qsort(want, (size_t)top_k, sizeof *want, by_pos);
    cr_assert_eq(count, top_k);
    for (int i = 0; i < top_k; i++)
        cr_assert_eq(list[i], want[i], "row %d of %d keys, place %d: %d, want %d", row, n, i,
                     list[i], want[i]);
    free(r);
    free(want);
}

/* Rows of a long sequence: keys of earlier positions are stored by steps of their own. */
static void check_index(bgk_type type, int heads, int dim, int block_tokens, int top_k)
{
    const int n = gpu_small() ? 150 : 700, n_rot = dim / 2;
    const int n_tables = (n + block_tokens - 1) / block_tokens, n_blocks = n_tables + 1;
    const size_t rows = (size_t)n, cols = (size_t)(dim + heads), elem = type == BGK_F32 ? 4 : 2;
    int32_t *table = malloc((size_t)n_tables * 4), *pos = malloc(rows * 4);
    int32_t *seq = calloc(rows, 4), block0 = 0;
    float *freq = malloc((size_t)n_rot * 2);
    for (int i = 0; i < n_tables; i++)
        table[i] = i + 1;
    shuffle(table, n_tables);
    for (int i = 0; i < n; i++)
        pos[i] = i;
    for (int i = 0; i < n_rot / 2; i++)
        freq[i] = powf(10000.0f, -(float)i / ((float)n_rot / 2));
    float *iq = random_f32(rows * (size_t)(heads * dim), 31, 1),
          *ik = random_f32(rows * cols, 32, 1);
    for (size_t i = 0; i < rows; i++) /* some keys are alike, and some heads have no say */
        if (i % 5 == 4) memcpy(ik + i * cols, ik + (i - 3) * cols, (size_t)dim * 4);
    float *norm = random_f32((size_t)dim, 33, 1), *norm_b = random_f32((size_t)dim, 34, 0.2f);
    const bgk_rows r = {.pos = to_device(pos, rows * 4),
                        .seq = to_device(seq, rows * 4),
                        .blocks = to_device(table, (size_t)n_tables * 4),
                        .block0 = to_device(&block0, 4),
                        .rows = n};
    const size_t key_bytes = 2 * (size_t)(n_blocks * block_tokens * dim) * elem;
    bgk_index x = {.keys = poisoned(key_bytes),
                   .type = type,
                   .n_blocks = n_blocks,
                   .block_tokens = block_tokens,
                   .layer = 1,
                   .n_heads = heads,
                   .dim = dim,
                   .k_norm = to_device(norm, (size_t)dim * 4),
                   .k_norm_b = to_device(norm_b, (size_t)dim * 4),
                   .eps = 1e-6f,
                   .rope = {to_device(freq, (size_t)n_rot * 2), n_rot, false, 1},
                   .scale = 0.07f};
    void *q = poisoned(rows * (size_t)(heads * dim) * elem);
    float *w = poisoned(rows * (size_t)heads * 4), *scores = poisoned(rows * rows * 4);
    float *d_iq = to_device(iq, rows * (size_t)(heads * dim) * 4);
    float *d_ik = to_device(ik, rows * cols * 4);
    int32_t *list = poisoned(rows * (size_t)top_k * 4), *count = poisoned(rows * 4);
    const bgk_out in = {d_iq, BGK_ROWS, heads * dim};
    CU(bgk_index_store(&x, q, w, &in, d_ik, (int64_t)cols, &r, 0));
    for (int at = 0; at < n; at += 300) { /* in slices */
        const int m = n - at < 300 ? n - at : 300;
        CU(bgk_index_scores(scores + (size_t)at * rows, n, &x, q, w, &r, at, m, top_k, n, N_SMS,
                            0));
        CU(bgk_index_select(list, count, scores + (size_t)at * rows, n, &r, at, m, top_k, 0));
    }
    float *alone = poisoned(rows * 4); /* the last row by itself */
    CU(bgk_index_scores(alone, n, &x, q, w, &r, n - 1, 1, top_k, n, N_SMS, 0));
    float *got = from_device(scores, rows * rows * 4), *got_alone = from_device(alone, rows * 4);
    int32_t *lists = from_device(list, rows * (size_t)top_k * 4),
            *counts = from_device(count, rows * 4);
    cr_assert_eq(memcmp(got_alone, got + (rows - 1) * rows, rows * 4), 0, "a row alone");

    double *key = malloc(rows * (size_t)dim * sizeof *key), *qd = malloc((size_t)dim * sizeof *qd);
    for (int i = 0; i < n; i++) {
        const float *v = ik + (size_t)i * cols;
        double mean = 0, var = 0, *k = key + (size_t)(i * dim);
        for (int d = 0; d < dim; d++)
            mean += (double)v[d] / dim;
        for (int d = 0; d < dim; d++)
            var += ((double)v[d] - mean) * ((double)v[d] - mean) / dim;
        for (int d = 0; d < dim; d++)
            k[d] = ((double)v[d] - mean) / sqrt(var + 1e-6) * (double)norm[d] + (double)norm_b[d];
        for (int d = 0; d < n_rot / 2; d++)
            turn(&k[2 * d], &k[2 * d + 1], i, freq[d], 1);
        for (int d = 0; d < dim; d++)
            k[d] = (double)rounded((float)k[d], type);
    }
    for (int row = 0; row < n; row += 97) {
        double *want = calloc(rows, sizeof *want), *mag = calloc(rows, sizeof *mag);
        for (int h = 0; h < heads; h++) {
            const double by = (double)ik[(size_t)row * cols + (size_t)(dim + h)] * 0.07;
            for (int d = 0; d < dim; d++)
                qd[d] = (double)iq[(size_t)((row * heads + h) * dim + d)];
            for (int d = 0; d < n_rot / 2; d++)
                turn(&qd[2 * d], &qd[2 * d + 1], row, freq[d], 1);
            for (int d = 0; d < dim; d++)
                qd[d] = (double)rounded((float)qd[d], type);
            for (int j = 0; j <= row; j++) {
                double dot = 0, size = 0;
                for (int d = 0; d < dim; d++) {
                    dot += qd[d] * key[j * dim + d];
                    size += fabs(qd[d] * key[j * dim + d]);
                }
                want[j] += dot > 0 ? by * dot : 0;
                mag[j] += fabs(by) * size;
            }
        }
        if (row >= top_k) {
            const double bound = type == BGK_F32 ? 2e-6 : type == BGK_F16 ? 1e-4 : 1e-3;
            const worst e = worst_of(got + (size_t)row * rows, want, mag, 1e-9, (size_t)row + 1);
            cr_assert(e.err < bound, "type %d: row %d key %zu: off by %g", (int)type, row, e.at,
                      e.err);
        }
        free(want);
        free(mag);
    }
    for (int row = 0; row < n; row++)
        check_list(got + (size_t)row * rows, row + 1, top_k, lists + (size_t)(row * top_k),
                   counts[row], row);
    void *device[] = {x.keys,
                      (void *)x.k_norm,
                      (void *)x.k_norm_b,
                      (void *)x.rope.freq,
                      q,
                      w,
                      scores,
                      d_iq,
                      d_ik,
                      list,
                      count,
                      alone,
                      (void *)r.pos,
                      (void *)r.seq,
                      (void *)r.blocks,
                      (void *)r.block0};
    void *host[] = {table,  pos, seq,       freq,  iq,     ik,  norm,
                    norm_b, got, got_alone, lists, counts, key, qd};
    for (size_t i = 0; i < sizeof device / sizeof *device; i++)
        CU(cudaFree(device[i]));
    for (size_t i = 0; i < sizeof host / sizeof *host; i++)
        free(host[i]);
}

Test(mla, index)
{
    NEEDS_GPU();
    check_index(BGK_F16, 32, 128, 32, 64);
    check_index(BGK_BF16, 16, 64, 16, 200);
    check_index(BGK_F32, 4, 64, 16, 100);
    check_index(BGK_F16, 5, 96, 24, 33);
}

/* Scores with many equal ones, zeros of both signs and infinities; long rows. */
Test(mla, select)
{
    NEEDS_GPU();
    enum { ROWS = 12 };
    static const int lens[ROWS] = {1, 64, 65, 100, 511, 512, 513, 2000, 5000, 5000, 5000, 5000};
    const int stride = 5000, top_k = 64;
    float *s = malloc(sizeof *s * ROWS * (size_t)stride);
    int32_t pos[ROWS];
    for (int r = 0; r < ROWS; r++) {
        pos[r] = lens[r] - 1;
        for (int i = 0; i < stride; i++) {
            const uint64_t u = bg_mix64((uint64_t)(r * stride + i));
            float v = gpu_random(41, u);
            if (r == 8) v = (float)(u % 3);                      /* ties */
            if (r == 9) v = u % 50 ? 0.0f : -1.0f;               /* almost all zero */
            if (r == 10) v = u % 400 ? -v * v : (float)INFINITY; /* few large */
            if (r == 11) v = 1.0f + (float)(u % 7) * 0x1p-23f;   /* low bits only */
            s[r * stride + i] = v;
        }
    }
    const bgk_rows rows = {.pos = to_device(pos, sizeof pos), .rows = ROWS};
    float *d = to_device(s, sizeof *s * ROWS * (size_t)stride);
    int32_t *list = poisoned(ROWS * top_k * 4), *count = poisoned(ROWS * 4);
    CU(bgk_index_select(list, count, d, stride, &rows, 0, ROWS, top_k, 0));
    int32_t *lists = from_device(list, ROWS * top_k * 4), *counts = from_device(count, ROWS * 4);
    for (int r = 0; r < ROWS; r++)
        check_list(s + r * stride, lens[r], top_k, lists + r * top_k, counts[r], r);
    CU(cudaFree((void *)rows.pos));
    CU(cudaFree(d));
    CU(cudaFree(list));
    CU(cudaFree(count));
    free(s);
    free(lists);
    free(counts);
}

/* ---- speed ----------------------------------------------------------------------------------- */

typedef struct bench {
    bgk_mla a;
    bgk_out out;
    const int32_t *blocks;
    bgk_item *items;
    int n, layers, next;
    bool tiles;
    bgk_rows rows;
    bgk_selected some; /* list NULL: none are selected */
    void *parts;
} bench;

enum { PARTS = 80 << 20 };

static void bench_call(void *ctx, cudaStream_t stream)
{
    bench *b = ctx;
    b->a.layer = b->next++ % b->layers;
    if (b->some.list)
        CU(bgk_mla_selected(&b->out, &b->a, &b->rows, &b->some, b->parts, PARTS, N_SMS, stream));
    else if (b->tiles)
        CU(bgk_mla_tiles(&b->out, &b->a, b->blocks, b->items, b->n, stream));
    else
        CU(bgk_mla_single(&b->out, &b->a, b->blocks, b->items, b->n, b->parts, PARTS, N_SMS,
                          stream));
}

/* top_k keys, evenly spread, of each of n rows, the last ones of their sequences. */
static void bench_lists(bench *b, int n, int ctx, int per, int top_k)
{
    int32_t *list = malloc((size_t)n * (size_t)top_k * 4), *x = malloc((size_t)n * 16);
    for (int i = 0; i < n; i++) {
        x[i] = ctx - 1;
        x[n + i] = i;
        x[2 * n + i] = i * per;
        x[3 * n + i] = top_k;
        for (int k = 0; k < top_k; k++)
            list[i * top_k + k] = (int32_t)((int64_t)k * ctx / top_k);
    }
    const int32_t *d = to_device(x, (size_t)n * 16);
    b->rows =
        (bgk_rows){.pos = d, .seq = d + n, .blocks = b->blocks, .block0 = d + 2 * n, .rows = n};
    b->some = (bgk_selected){to_device(list, (size_t)n * (size_t)top_k * 4), d + 3 * n, top_k};
    free(list);
    free(x);
}

/* n sequences of `ctx` tokens: the last token of each (top_k: of so many selected keys), or all of
 * them. */
static void bench_one(int n, int ctx, int heads, bool tiles, bgk_type type, int top_k)
{
    enum { BLOCK = 32, NOPE_BENCH = 192 };
    const int per = (ctx + BLOCK - 1) / BLOCK, n_blocks = n * per + 1;
    const int rows = tiles ? n * ctx : n, each = (ctx + BGK_MLA_TOKENS - 1) / BGK_MLA_TOKENS;
    const size_t stride = ((size_t)rows + 255) / 256 * 256,
                 row = type == BGK_Q8 ? RANK + 2 * ROT + 4 : 2 * DIM;
    const size_t layer = (size_t)n_blocks * BLOCK * row;
    const size_t lat = (size_t)heads * RANK, cols = (size_t)heads * (NOPE_BENCH + ROT);
    int32_t *table = malloc((size_t)n_blocks * 4);
    bgk_item *items = malloc((size_t)(tiles ? n * each : n) * sizeof *items);
    for (int i = 0; i < n_blocks - 1; i++)
        table[i] = i + 1;
    shuffle(table, n_blocks - 1);
    bench b = {.tiles = tiles, .layers = (int)(((size_t)300 << 20) / layer) + 1};
    for (int i = 0; i < n; i++) {
        for (int t = each - 1; tiles && t >= 0; t--) {
            const int at = t * BGK_MLA_TOKENS, left = ctx - at;
            items[b.n++] = (bgk_item){i * ctx + at, at, i * per,
                                      left < BGK_MLA_TOKENS ? left : BGK_MLA_TOKENS};
        }
        if (!tiles) items[b.n++] = (bgk_item){i, ctx - 1, i * per, 0};
    }
    char *memory = poisoned(cols / 64 * stride * 128 + 1024);
    char *out = poisoned(lat / 64 * stride * 128 + 1024);
    float freq[ROT / 2] = {0};
    void *cache = NULL, *q_lat = NULL;
    CU(cudaMalloc(&cache, layer * (size_t)b.layers));
    CU(cudaMemset(cache, 0x2c, layer * (size_t)b.layers));
    CU(cudaMalloc(&q_lat, (size_t)rows * lat * 2));
    CU(cudaMemset(q_lat, 0x2c, (size_t)rows * lat * 2));
    CU(cudaMemset(memory, 0x2c, cols / 64 * stride * 128 + 1024));
    b.blocks = to_device(table, (size_t)n_blocks * 4);
    b.items = to_device(items, (size_t)b.n * sizeof *items);
    CU(cudaMalloc(&b.parts, PARTS));
    CU(cudaMemset(b.parts, 0, PARTS));
    if (top_k) bench_lists(&b, n, ctx, per, top_k);
    b.out = (bgk_out){out + (-(uintptr_t)out & 1023), BGK_TILES, (int64_t)stride};
    b.a = (bgk_mla){
        .q_lat = {q_lat, BGK_HALF_ROWS, (int64_t)lat},
        .q = {memory + (-(uintptr_t)memory & 1023), BGK_TILES, (int64_t)stride},
        .n_heads = heads,
        .nope = NOPE_BENCH,
        .scale = 0.01f,
        .rope = {to_device(freq, sizeof freq), ROT, false, 1},
        .cache = {cache, NULL, type, n_blocks, 1, BLOCK, DIM, RANK, NULL, NULL},
        .max_keys = ctx,
    };
    CU(cudaDeviceSynchronize());
    const double us = gpu_time_us(bench_call, &b, tiles ? 4 : 32);
    const double keys = tiles ? (double)n * ctx * (ctx + 1) / 2 : (double)n * (top_k ? top_k : ctx);
    const double bytes = tiles ? 0 : keys * (double)row;
    fprintf(stderr, "%-7s %s %4d x %5d, %3d heads: %9.1f us %6.2f TB/s %7.1f TFLOP/s\n",
            tiles   ? "prompts"
            : top_k ? "lists"
                    : "decode",
            type == BGK_Q8 ? "q8 " : "f16", n, ctx, heads, us, bytes / us * 1e-6,
            keys * heads * 2 * (DIM + RANK) / us * 1e-6);
    void *device[] = {cache,
                      q_lat,
                      memory,
                      out,
                      (void *)b.blocks,
                      (void *)b.items,
                      b.parts,
                      (void *)b.a.rope.freq,
                      (void *)b.rows.pos,
                      (void *)b.some.list};
    for (size_t i = 0; i < sizeof device / sizeof *device; i++)
        CU(cudaFree(device[i]));
    free(table);
    free(items);
}

Test(mla, bench_mla)
{
    NEEDS_GPU();
    if (gpu_small()) return;
    static const int batch[] = {1, 8, 32, 128, 256}, heads[] = {8, 20, 64};
    static const bgk_type types[] = {BGK_F16, BGK_Q8};
    for (int k = 0; k < 2; k++)
        for (int h = 0; h < 3; h++) {
            bench_one(1, 2048, heads[h], false, types[k], 0);
            for (int i = 0; i < 5; i++) {
                bench_one(batch[i], 1024, heads[h], false, types[k], 0);
                bench_one(batch[i], 4096, heads[h], false, types[k], 0);
            }
            for (int i = 0; i < 4; i++)
                bench_one(batch[i], 4096, heads[h], false, types[k], 2048);
            bench_one(8, 1024, heads[h], true, types[k], 0);
            bench_one(2, 4096, heads[h], true, types[k], 0);
        }
}
