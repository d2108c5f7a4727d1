/* tests/gpu/test_attention.c - rope_store and attention over a paged cache, against float64; and
 * the same bits for a row in prompts, in decode, alone, spread over the GPU, in any chunking. */
#include <stdio.h>

#include "backend/cuda/cuda.h"
#include "gpu.h"

enum { LAYERS = 2, LAYER = 1, TAIL = 37, N_SMS = 132 };

typedef struct shape {
    int dim, n_kv, group;
    bgk_type type;
    int block_tokens, window;
    float softcap;
    bool sinks;
    int first_kv; /* of a rank's heads */
} shape;

typedef struct setup {
    shape s;
    int n_heads, n_seqs, n_rows, n_blocks, n_tables;
    int ctx[16], row0[16], pos0[16], block0[16],
        n[16]; /* a sequence's tokens, its rows: the last n */
    int32_t *tables;
    float *k, *v;     /* [n_blocks, n_kv, block_tokens, dim], what the cache holds */
    float *q, *sinks; /* [n_rows, n_heads * dim] as the kernel reads them */
    bgk_cache cache;  /* on the device, as the rest */
    void *d_q, *d_tables, *d_sinks, *parts;
    size_t parts_bytes;
} setup;

static uint16_t narrow(float v, bgk_type type)
{
    return type == BGK_BF16 ? bg_f32_to_bf16(v) : bg_f32_to_f16(v);
}

static float widen(uint16_t v, bgk_type type)
{
    return type == BGK_BF16 ? bg_bf16_to_f32(v) : bg_f16_to_f32(v);
}

static size_t slot_of(const setup *t, int block, int kv, int at)
{
    return ((size_t)block * (size_t)t->s.n_kv + (size_t)kv) * (size_t)t->s.block_tokens +
           (size_t)at;
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
    for (int i = t->n_tables - 1; i > 0; i--) {
        const int j = (int)(bg_mix64((uint64_t)i * 77 + 5) % (uint64_t)(i + 1));
        const int32_t x = t->tables[i];
        t->tables[i] = t->tables[j];
        t->tables[j] = x;
    }
}

/* Cache memory on the device: all NaN but the sequences' own keys. host gets what it holds. */
static void *fill_cache(const setup *t, float *host, float **scales, uint64_t seed)
{
    const shape *s = &t->s;
    const size_t dim = (size_t)s->dim, elem = s->type == BGK_Q8 ? 1 : 2;
    const size_t slots = slot_of(t, t->n_blocks, 0, 0), layer = slots * dim * elem;
    unsigned char *raw = malloc(layer);
    float *scale = malloc(slots * sizeof *scale);
    memset(raw, 0xff, layer);
    memset(scale, 0xff, slots * sizeof *scale);
    for (int i = 0; i < t->n_seqs; i++)
        for (int p = 0; p < t->ctx[i]; p++)
            for (int kv = 0; kv < s->n_kv; kv++) {
                const int block = t->tables[t->block0[i] + p / s->block_tokens];
                const size_t at = slot_of(t, block, kv, p % s->block_tokens);
                scale[at] = 0.01f * (1.5f + gpu_random(seed + 9, at));
                for (size_t d = 0; d < dim; d++) {
                    const float v = gpu_random(seed, at * dim + d);
                    if (s->type == BGK_Q8) {
                        ((int8_t *)raw)[at * dim + d] = (int8_t)lrintf(127 * v);
                        host[at * dim + d] = scale[at] * (float)lrintf(127 * v);
                    } else {
                        ((uint16_t *)raw)[at * dim + d] = narrow(v, s->type);
                        host[at * dim + d] = widen(narrow(v, s->type), s->type);
                    }
                }
            }
    char *device = poisoned(LAYERS * layer);
    CU(cudaMemcpy(device + LAYER * layer, raw, layer, cudaMemcpyHostToDevice));
    *scales = poisoned(LAYERS * slots * sizeof *scale);
    CU(cudaMemcpy(*scales + LAYER * slots, scale, slots * sizeof *scale, cudaMemcpyHostToDevice));
    free(raw);
    free(scale);
    return device;
}

static setup make(shape s, const int *ctx, int n_seqs)
{
    setup t = {.s = s, .n_heads = s.n_kv * s.group, .n_seqs = n_seqs};
    const int tail = gpu_small() ? 5 : TAIL;
    for (int i = 0; i < n_seqs; i++) {
        t.ctx[i] = ctx[i];
        t.n[i] = ctx[i] < tail ? ctx[i] : tail;
        if (i % 4 == 3) t.n[i] = ctx[i] < 300 ? ctx[i] : 300; /* several tiles */
        t.pos0[i] = ctx[i] - t.n[i];
        t.row0[i] = t.n_rows;
        t.n_rows += t.n[i];
    }
    make_tables(&t);
    const size_t values = slot_of(&t, t.n_blocks, 0, 0) * (size_t)s.dim;
    const size_t n_q = (size_t)t.n_rows * (size_t)t.n_heads * (size_t)s.dim;
    t.k = calloc(values, sizeof *t.k);
    t.v = calloc(values, sizeof *t.v);
    t.cache = (bgk_cache){.type = s.type,
                          .n_blocks = t.n_blocks,
                          .n_kv_heads = s.n_kv,
                          .block_tokens = s.block_tokens,
                          .k_dim = s.dim,
                          .v_dim = s.dim};
    t.cache.k = fill_cache(&t, t.k, &t.cache.k_scale, 11);
    t.cache.v = fill_cache(&t, t.v, &t.cache.v_scale, 12);
    uint16_t *q = malloc((n_q + 1) * sizeof *q);
    t.q = random_f32(n_q, 13, 4);
    for (size_t i = 0; i < n_q; i++) {
        q[i] = narrow(t.q[i], s.type);
        t.q[i] = widen(q[i], s.type);
    }
    t.d_q = to_device(q, n_q * sizeof *q);
    t.sinks = random_f32((size_t)t.n_heads, 14, 3);
    t.d_sinks = to_device(t.sinks, (size_t)t.n_heads * sizeof *t.sinks);
    t.d_tables = to_device(t.tables, (size_t)t.n_tables * sizeof *t.tables);
    t.parts_bytes = (size_t)8 << 20;
    t.parts = poisoned(t.parts_bytes);
    CU(cudaMemset(t.parts, 0, t.parts_bytes));
    free(q);
    return t;
}

static void drop(setup *t)
{
    void *device[] = {t->cache.k, t->cache.v,  t->cache.k_scale, t->cache.v_scale,
                      t->d_q,     t->d_tables, t->d_sinks,       t->parts};
    for (size_t i = 0; i < sizeof device / sizeof *device; i++)
        CU(cudaFree(device[i]));
    free(t->tables);
    free(t->k);
    free(t->v);
    free(t->q);
    free(t->sinks);
}

static float scale_of(const shape *s)
{
    return 0.7f / sqrtf((float)s->dim);
}

static bgk_att att_of(const setup *t)
{
    return (bgk_att){.q = t->d_q,
                     .q_cols = (int64_t)t->n_heads * t->s.dim,
                     .cache = t->cache,
                     .blocks = t->d_tables,
                     .heads = {.layer = LAYER,
                               .n_heads = t->n_heads,
                               .head0 = t->s.first_kv * t->s.group,
                               .kv_head0 = t->s.first_kv,
                               .group = t->s.group,
                               .scale = scale_of(&t->s),
                               .softcap = t->s.softcap,
                               .window = t->s.window,
                               .sinks = t->s.sinks ? t->d_sinks : NULL}};
}

/* One row and head: out [dim], and the same with |v|. */
static void reference(const setup *t, int seq, int pos, int row, int head, double *out, double *mag)
{
    const shape *s = &t->s;
    const int first = s->window && pos >= s->window ? pos - s->window + 1 : 0;
    const float *q = t->q + ((size_t)row * (size_t)t->n_heads + (size_t)head) * (size_t)s->dim;
    double *p = malloc((size_t)(pos + 1) * sizeof *p), most = s->sinks ? t->sinks[head] : -INFINITY;
    for (int j = first; j <= pos; j++) {
        const int block = t->tables[t->block0[seq] + j / s->block_tokens];
        const float *k =
            t->k + slot_of(t, block, head / s->group, j % s->block_tokens) * (size_t)s->dim;
        double x = 0;
        for (int d = 0; d < s->dim; d++)
            x += (double)q[d] * (double)k[d];
        x *= (double)scale_of(s);
        if (s->softcap > 0) x = (double)s->softcap * tanh(x / (double)s->softcap);
        p[j] = x;
        if (x > most) most = x;
    }
    double total = s->sinks ? exp((double)t->sinks[head] - most) : 0;
    for (int j = first; j <= pos; j++)
        total += p[j] = exp(p[j] - most);
    for (int d = 0; d < s->dim; d++)
        out[d] = mag[d] = 0;
    for (int j = first; j <= pos; j++) {
        const int block = t->tables[t->block0[seq] + j / s->block_tokens];
        const float *v =
            t->v + slot_of(t, block, head / s->group, j % s->block_tokens) * (size_t)s->dim;
        for (int d = 0; d < s->dim; d++) {
            out[d] += p[j] / total * (double)v[d];
            mag[d] += p[j] / total * fabs((double)v[d]);
        }
    }
    free(p);
}

static bgk_item *send_items(const bgk_item *items, int n)
{
    return to_device(items, (size_t)n * sizeof *items);
}

typedef struct result {
    char *memory, *data; /* data: 1024-byte aligned, as tiles are */
    size_t bytes;
    bgk_out out;
} result;

static result result_new(const setup *t, bgk_layout layout)
{
    const size_t cols = (size_t)t->n_heads * (size_t)t->s.dim, rows = (size_t)t->n_rows;
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

/* Prompts in tiles of at most `tokens`. */
static void *run_tiles(const setup *t, bgk_layout layout, int tokens)
{
    bgk_item *items = malloc((size_t)(t->n_rows + 1) * sizeof *items);
    const bgk_att a = att_of(t);
    result r = result_new(t, layout);
    int n = 0;
    for (int i = 0; i < t->n_seqs; i++)
        for (int at = 0; at < t->n[i]; at += tokens) {
            const int left = t->n[i] - at;
            items[n++] = (bgk_item){t->row0[i] + at, t->pos0[i] + at, t->block0[i],
                                    left < tokens ? left : tokens};
        }
    bgk_item *d = send_items(items, n);
    CU(bgk_attention_tiles(&r.out, &a, d, n, 0));
    void *host = result_take(&r);
    CU(cudaFree(d));
    free(items);
    return host;
}

/* Every row by itself: `together` of them a launch. */
static void *run_single(const setup *t, bgk_layout layout, int together, int n_sms, size_t parts)
{
    bgk_item *items = malloc((size_t)(t->n_rows + 1) * sizeof *items);
    const bgk_att a = att_of(t);
    result r = result_new(t, layout);
    int n = 0, n_parts = 0;
    for (int i = 0; i < t->n_seqs; i++)
        for (int j = 0; j < t->n[i]; j++) {
            if (n % together == 0) n_parts = 0;
            items[n++] = (bgk_item){t->row0[i] + j, t->pos0[i] + j, t->block0[i], n_parts};
            n_parts += (t->pos0[i] + j) / BGK_UNIT + 1;
        }
    bgk_item *d = send_items(items, n);
    for (int at = 0; at < n; at += together)
        CU(bgk_attention_single(&r.out, &a, d + at, n - at < together ? n - at : together, t->parts,
                                parts, n_sms, 0));
    void *host = result_take(&r);
    CU(cudaFree(d));
    free(items);
    return host;
}

/* The first place where two results differ. */
static void same_bits(const setup *t, const float *a, const float *b, const char *what)
{
    const size_t cols = (size_t)t->n_heads * (size_t)t->s.dim;
    for (size_t i = 0; i < (size_t)t->n_rows * cols; i++)
        cr_assert_eq(bg_f32_bits(a[i]), bg_f32_bits(b[i]),
                     "dim %d group %d type %d: %s: row %zu col %zu: %a, in tiles %a", t->s.dim,
                     t->s.group, (int)t->s.type, what, i / cols, i % cols, (double)b[i],
                     (double)a[i]);
}

static void check_values(const setup *t, const float *got)
{
    const size_t dim = (size_t)t->s.dim, heads = (size_t)t->n_heads;
    double *want = malloc(dim * sizeof *want), *mag = malloc(dim * sizeof *mag);
    const double bound = t->s.type == BGK_BF16 ? 4.5e-3 : 7e-4; /* P has 8 or 11 bits */
    for (int i = 0; i < t->n_seqs; i++)
        for (int j = 0; j < t->n[i]; j++) {
            if (t->n[i] > TAIL && j % 16 && j != t->n[i] - 1) continue;
            for (size_t h = 0; h < heads; h++) {
                const int row = t->row0[i] + j;
                reference(t, i, t->pos0[i] + j, row, (int)h, want, mag);
                const worst w =
                    worst_of(got + ((size_t)row * heads + h) * dim, want, mag, 1e-5, dim);
                cr_assert(w.err < bound,
                          "dim %zu group %d type %d window %d: position %d head %zu value %zu: "
                          "off by %g, want %g, got %g",
                          dim, t->s.group, (int)t->s.type, t->s.window, t->pos0[i] + j, h, w.at,
                          w.err, want[w.at], (double)got[((size_t)row * heads + h) * dim + w.at]);
            }
        }
    free(want);
    free(mag);
}

/* Tiles hold the rows' values as halves, and zeros behind the last column. */
static void check_layout(const setup *t, const float *rows, const uint16_t *tiles, const char *what)
{
    const size_t cols = (size_t)t->n_heads * (size_t)t->s.dim, all = (cols + 63) / 64 * 64;
    const size_t stride = ((size_t)t->n_rows + 255) / 256 * 256;
    for (size_t r = 0; r < stride; r++)
        for (size_t c = 0; c < all; c++) {
            const uint16_t got = tiles[tile_index(stride, r, c)];
            const uint16_t want = r >= (size_t)t->n_rows ? 0xffff
                                  : c < cols             ? bg_f32_to_f16(rows[r * cols + c])
                                                         : 0;
            cr_assert_eq(got, want, "dim %d: %s: tiles, row %zu col %zu: %04x, want %04x", t->s.dim,
                         what, r, c, got, want);
        }
}

static void check_shape(shape s, const int *ctx, int n_seqs)
{
    setup t = make(s, ctx, n_seqs);
    float *tiles = run_tiles(&t, BGK_ROWS, BGK_TILE_TOKENS);
    check_values(&t, tiles);
    float *b = run_tiles(&t, BGK_ROWS, 7);
    same_bits(&t, tiles, b, "tiles of 7 tokens");
    free(b);
    b = run_single(&t, BGK_ROWS, 65535, 1, 0);
    same_bits(&t, tiles, b, "decode, all at once, not spread");
    free(b);
    b = run_single(&t, BGK_ROWS, 100, N_SMS, t.parts_bytes);
    same_bits(&t, tiles, b, "decode in a batch of 100");
    free(b);
    b = run_single(&t, BGK_ROWS, 1, N_SMS, t.parts_bytes);
    same_bits(&t, tiles, b, "decode alone, spread");
    free(b);
    b = run_single(&t, BGK_ROWS, 3, N_SMS * 16, (size_t)3 << 16);
    same_bits(&t, tiles, b, "decode by three, spread as room allows");
    free(b);
    uint16_t *halves = run_tiles(&t, BGK_TILES, BGK_TILE_TOKENS);
    check_layout(&t, tiles, halves, "tiles");
    free(halves);
    halves = run_single(&t, BGK_TILES, 2, N_SMS, t.parts_bytes);
    check_layout(&t, tiles, halves, "decode, spread");
    free(halves);
    halves = run_single(&t, BGK_TILES, 200, 1, 0);
    check_layout(&t, tiles, halves, "decode");
    free(halves);
    free(tiles);
    drop(&t);
}

static const int lengths[] = {1, 2, 31, 200, 63, 64, 65, 513, 127, 128, 1500};

static void check_shapes(const shape *s, size_t n, int n_lengths)
{
    static const int few[] = {1, 66, 600};
    if (gpu_small()) /* for tools that make a kernel a hundred times slower */
        check_shape(s[0], few, 3);
    else
        for (size_t i = 0; i < n; i++)
            check_shape(s[i], lengths, n_lengths);
}

Test(attention, f16)
{
    NEEDS_GPU();
    static const shape s[] = {
        {128, 2, 4, BGK_F16, 32, 0, 0, false, 0},   {64, 2, 1, BGK_F16, 16, 1, 0, false, 0},
        {64, 3, 3, BGK_F16, 24, 37, 0, true, 5},    {96, 1, 5, BGK_F16, 32, 0, 0, false, 0},
        {128, 1, 16, BGK_F16, 64, 512, 0, true, 0}, {256, 1, 4, BGK_F16, 32, 512, 50, false, 1},
        {256, 1, 1, BGK_F16, 8, 0, 0, true, 0},
    };
    check_shapes(s, sizeof s / sizeof *s, 11);
}

Test(attention, many_heads)
{
    NEEDS_GPU();
    static const shape s[] = {
        {128, 4, 4, BGK_F16, 32, 0, 0, false, 0},
        {64, 8, 8, BGK_F16, 256, 0, 0, false, 0},
        {128, 8, 3, BGK_Q8, 16, 70, 0, true, 0},
        {64, 1, 20, BGK_F16, 32, 0, 0, true, 0}, /* more than 16 to a KV head */
        {64, 1, 150, BGK_F16, 32, 0, 0, false, 0},
        {96, 6, 12, BGK_BF16, 24, 0, 0, false, 3},
    };
    check_shapes(s, sizeof s / sizeof *s, 6);
}

Test(attention, bf16)
{
    NEEDS_GPU();
    static const shape s[] = {
        {128, 2, 8, BGK_BF16, 8, 0, 30, false, 0},
        {96, 2, 3, BGK_BF16, 48, 37, 0, true, 0},
        {256, 1, 8, BGK_BF16, 32, 0, 0, false, 0},
        {64, 4, 1, BGK_BF16, 32, 512, 0, false, 0},
    };
    check_shapes(s, sizeof s / sizeof *s, 11);
}

Test(attention, q8)
{
    NEEDS_GPU();
    static const shape s[] = {
        {128, 2, 4, BGK_Q8, 32, 0, 0, false, 0}, {64, 1, 8, BGK_Q8, 16, 37, 0, true, 0},
        {96, 2, 3, BGK_Q8, 32, 0, 0, false, 0},  {256, 1, 16, BGK_Q8, 64, 512, 50, false, 0},
        {128, 1, 5, BGK_Q8, 9, 1, 0, false, 0},
    };
    check_shapes(s, sizeof s / sizeof *s, 11);
}

/* The kernels of float32 caches and odd sizes, by the same reference (their own arithmetic). */
Test(attention, plain)
{
    NEEDS_GPU();
    const shape s = {128, 2, 4, BGK_F16, 32, 37, 30, true, 0};
    setup t = make(s, lengths, gpu_small() ? 2 : 7);
    const size_t n_q = (size_t)t.n_rows * (size_t)t.n_heads * (size_t)s.dim;
    float *q = to_device(t.q, n_q * sizeof *q);
    int32_t *pos = malloc((size_t)t.n_rows * sizeof *pos),
            *seq = malloc((size_t)t.n_rows * sizeof *seq);
    for (int i = 0; i < t.n_seqs; i++)
        for (int j = 0; j < t.n[i]; j++) {
            pos[t.row0[i] + j] = t.pos0[i] + j;
            seq[t.row0[i] + j] = i;
        }
    int32_t *d_pos = to_device(pos, (size_t)t.n_rows * sizeof *pos);
    int32_t *d_seq = to_device(seq, (size_t)t.n_rows * sizeof *seq);
    int32_t *d_block0 = to_device(t.block0, sizeof t.block0);
    const bgk_rows rows = {d_pos, d_seq, t.d_tables, d_block0, t.n_rows};
    const bgk_att a = att_of(&t);
    result r = result_new(&t, BGK_ROWS);
    CU(bgk_attention(&r.out, q, a.q_cols, &t.cache, &rows, &a.heads, 0));
    float *got = result_take(&r);
    check_values(&t, got);
    result r2 = result_new(&t, BGK_TILES);
    CU(bgk_attention(&r2.out, q, a.q_cols, &t.cache, &rows, &a.heads, 0));
    uint16_t *halves = result_take(&r2);
    check_layout(&t, got, halves, "plain");
    void *device[] = {q, d_pos, d_seq, d_block0};
    for (size_t i = 0; i < 4; i++)
        CU(cudaFree(device[i]));
    free(got);
    free(halves);
    free(pos);
    free(seq);
    drop(&t);
}

/* ---- rope_store ------------------------------------------------------------------------------ */

typedef struct rope_case {
    int dim, v_dim, n_heads, n_kv, n_rot;
    bool neox, norms;
    bgk_type type;
} rope_case;

/* The head's values as they should be: normed, rotated. */
static void rope_reference(const rope_case *c, const float *x, const float *norm, const float *freq,
                           int pos, float mscale, double *out)
{
    double sum = 0;
    for (int i = 0; i < c->dim; i++)
        sum += (double)x[i] * (double)x[i];
    const double f = 1 / sqrt(sum / c->dim + 1e-6);
    for (int i = 0; i < c->dim; i++)
        out[i] = norm ? (double)x[i] * f * (double)norm[i] : (double)x[i];
    for (int i = 0; i < c->n_rot / 2; i++) {
        const int lo = c->neox ? i : 2 * i, hi = c->neox ? i + c->n_rot / 2 : 2 * i + 1;
        const float angle = (float)pos * freq[i];
        const double co = cos((double)angle) * (double)mscale;
        const double si = sin((double)angle) * (double)mscale, p = out[lo], q = out[hi];
        out[lo] = p * co - q * si;
        out[hi] = p * si + q * co;
    }
}

/* Value i of a stored head. */
static double stored(const void *p, bgk_type type, const float *scale, size_t i)
{
    switch (type) {
    case BGK_F32:
        return (double)((const float *)p)[i];
    case BGK_Q8:
        return (double)((const int8_t *)p)[i] * (double)*scale;
    default:
        return (double)widen(((const uint16_t *)p)[i], type);
    }
}

static double rope_bound(bgk_type type)
{
    static const double bounds[] = {
        [BGK_F32] = 2e-6, [BGK_F16] = 6e-4, [BGK_BF16] = 5e-3, [BGK_Q8] = 5e-3};
    return bounds[type];
}

static void check_head(const char *what, const void *got, bgk_type type, const float *scale,
                       const double *want, int dim, int row)
{
    double most = 0;
    for (int i = 0; i < dim; i++)
        most = fmax(most, fabs(want[i]));
    for (int i = 0; i < dim; i++)
        cr_assert(fabs(stored(got, type, scale, (size_t)i) - want[i]) <= rope_bound(type) * most,
                  "type %d dim %d: %s of row %d, value %d: %g, want %g", (int)type, dim, what, row,
                  i, stored(got, type, scale, (size_t)i), want[i]);
}

static void check_rope(rope_case c)
{
    enum { ROWS = 9, BLOCK_TOKENS = 16, BLOCKS = ROWS + 1 };
    static const int32_t pos[ROWS] = {0, 1, 15, 16, 1000, 131071, 70000, -1, 5};
    const int cols = (c.n_heads + c.n_kv) * c.dim + c.n_kv * c.v_dim;
    float *x = random_f32((size_t)(ROWS * cols), 21, 2);
    float *norm = random_f32((size_t)(2 * c.dim), 22, 1), freq[256];
    for (int i = 0; i < c.n_rot / 2; i++)
        freq[i] = powf(10000.0f, -2.0f * (float)i / (float)c.n_rot);
    /* A row's own block stands wherever its position asks for it. */
    int32_t seq[ROWS], block0[ROWS], *tables;
    int n_tables = 0;
    for (int i = 0; i < ROWS; i++) {
        seq[i] = ROWS - 1 - i; /* not the identity */
        block0[seq[i]] = n_tables;
        n_tables += (pos[i] < 0 ? 0 : pos[i] / BLOCK_TOKENS) + 1;
    }
    tables = calloc((size_t)n_tables, sizeof *tables);
    for (int i = 0; i < ROWS; i++)
        if (pos[i] >= 0) tables[block0[seq[i]] + pos[i] / BLOCK_TOKENS] = 1 + (i * 4) % ROWS;
    const size_t elem = c.type == BGK_F32 ? 4 : c.type == BGK_Q8 ? 1 : 2;
    const size_t slots = (size_t)LAYERS * BLOCKS * (size_t)c.n_kv * BLOCK_TOKENS;
    const size_t k_bytes = slots * (size_t)c.dim * elem, v_bytes = slots * (size_t)c.v_dim * elem;
    const bgk_cache cache = {.k = poisoned(k_bytes),
                             .v = poisoned(v_bytes),
                             .type = c.type,
                             .n_blocks = BLOCKS,
                             .n_kv_heads = c.n_kv,
                             .block_tokens = BLOCK_TOKENS,
                             .k_dim = c.dim,
                             .v_dim = c.v_dim,
                             .k_scale = poisoned(slots * 4),
                             .v_scale = poisoned(slots * 4)};
    const bool half = c.type != BGK_F32;
    const size_t q_row = (size_t)(c.n_heads * c.dim), q_bytes = ROWS * q_row * (half ? 2 : 4);
    void *q = poisoned(q_bytes + GUARD);
    void *device[] = {to_device(x, (size_t)(ROWS * cols) * 4),
                      to_device(norm, (size_t)c.dim * 4),
                      to_device(norm + c.dim, (size_t)c.dim * 4),
                      to_device(freq, sizeof freq),
                      to_device(pos, sizeof pos),
                      to_device(seq, sizeof seq),
                      to_device(tables, (size_t)n_tables * 4),
                      to_device(block0, sizeof block0)};
    const bgk_rows rows = {device[4], device[5], device[6], device[7], ROWS};
    CU(bgk_rope_store(q, half, (int64_t)q_row, device[0], cols, &cache, &rows, LAYER, c.n_heads,
                      c.norms ? device[1] : NULL, c.norms ? device[2] : NULL, 1e-6f,
                      c.n_rot ? device[3] : NULL, c.n_rot, c.neox, 1.25f, 0));
    CU(cudaGetLastError());
    unsigned char *got_q = from_device(q, q_bytes + GUARD), *k = from_device(cache.k, k_bytes);
    unsigned char *v = from_device(cache.v, v_bytes);
    float *k_scale = from_device(cache.k_scale, slots * 4);
    float *v_scale = from_device(cache.v_scale, slots * 4);
    cr_assert(all_poison(got_q + q_bytes, GUARD));
    double want[512];
    size_t written = 0;
    for (int r = 0; r < ROWS; r++) {
        if (pos[r] < 0) continue;
        const float *in = x + r * cols;
        for (int h = 0; h < c.n_heads; h++) {
            rope_reference(&c, in + h * c.dim, c.norms ? norm : NULL, freq, pos[r], 1.25f, want);
            const bgk_type type = !half ? BGK_F32 : c.type == BGK_BF16 ? BGK_BF16 : BGK_F16;
            check_head("q", got_q + ((size_t)r * q_row + (size_t)(h * c.dim)) * (half ? 2 : 4),
                       type, NULL, want, c.dim, r);
        }
        for (int h = 0; h < c.n_kv; h++) {
            const int block = 1 + (r * 4) % ROWS;
            const size_t slot =
                ((size_t)(LAYER * BLOCKS + block) * (size_t)c.n_kv + (size_t)h) * BLOCK_TOKENS +
                (size_t)(pos[r] % BLOCK_TOKENS);
            rope_reference(&c, in + (c.n_heads + h) * c.dim, c.norms ? norm + c.dim : NULL, freq,
                           pos[r], 1.25f, want);
            check_head("k", k + slot * (size_t)c.dim * elem, c.type, k_scale + slot, want, c.dim,
                       r);
            for (int i = 0; i < c.v_dim; i++)
                want[i] = (double)in[(c.n_heads + c.n_kv) * c.dim + h * c.v_dim + i];
            check_head("v", v + slot * (size_t)c.v_dim * elem, c.type, v_scale + slot, want,
                       c.v_dim, r);
            memset(k + slot * (size_t)c.dim * elem, 0xff, (size_t)c.dim * elem);
            memset(v + slot * (size_t)c.v_dim * elem, 0xff, (size_t)c.v_dim * elem);
            written++;
        }
    }
    cr_assert_eq(written, (size_t)(ROWS - 1) * (size_t)c.n_kv);
    cr_assert(all_poison(k, k_bytes) && all_poison(v, v_bytes), "other places were written");
    for (size_t i = 0; i < sizeof device / sizeof *device; i++)
        CU(cudaFree(device[i]));
    void *more[] = {cache.k, cache.v, cache.k_scale, cache.v_scale, q};
    for (size_t i = 0; i < sizeof more / sizeof *more; i++)
        CU(cudaFree(more[i]));
    void *host[] = {x, norm, tables, got_q, k, v, k_scale, v_scale};
    for (size_t i = 0; i < sizeof host / sizeof *host; i++)
        free(host[i]);
}

Test(attention, rope_store)
{
    NEEDS_GPU();
    static const rope_case cases[] = {
        {128, 128, 8, 2, 128, true, false, BGK_F16}, {128, 128, 4, 1, 128, false, true, BGK_BF16},
        {64, 64, 3, 1, 32, true, true, BGK_Q8},      {256, 256, 4, 1, 256, true, true, BGK_F16},
        {96, 96, 5, 5, 96, false, false, BGK_Q8},    {192, 128, 3, 3, 64, false, true, BGK_F32},
        {80, 80, 2, 2, 0, true, false, BGK_F32},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        check_rope(cases[i]);
}

/* What launchers do not take. */
Test(attention, refusals)
{
    NEEDS_GPU();
    bgk_cache c = {
        .type = BGK_F16, .n_kv_heads = 1, .block_tokens = 32, .k_dim = 128, .v_dim = 128};
    cr_assert(bgk_attention_fits(&c));
    c.v_dim = 64;
    cr_assert_not(bgk_attention_fits(&c));
    c.v_dim = c.k_dim = 80;
    cr_assert_not(bgk_attention_fits(&c));
    c.v_dim = c.k_dim = 128;
    c.type = BGK_F32;
    cr_assert_not(bgk_attention_fits(&c));
}

/* ---- the plan: host code, no GPU needed --------------------------------------------------------
 */

/* Every row is in one item; single rows first, then tiles, a sequence's last one first. */
Test(attention, plan)
{
    static const int n_tokens[] = {1, 300, 1, 128, 129, 1}, pos0[] = {63, 5, 64, 0, 1000, 700};
    enum { SEQS = 6, ROWS = 560, PADDED = 3 };
    bg_step_seq seqs[SEQS] = {0};
    bg_cuda *c = calloc(1, sizeof *c);
    int32_t step[8 + 4 * (ROWS + PADDED)] = {0}, rows_seen[ROWS + PADDED] = {0};
    c->step = c->block0 = step;
    c->att_plan = step + 8;
    int rows = 0;
    for (int i = 0; i < SEQS; i++) {
        seqs[i] = (bg_step_seq){.slot = i, .pos0 = pos0[i], .n_tokens = n_tokens[i], .row0 = rows};
        step[i] = 100 * i;
        rows += n_tokens[i];
    }
    c->s.seqs = seqs;
    c->s.n_seqs = SEQS;
    c->s.n_rows = rows;
    cr_assert_eq(rows, ROWS);
    cr_assert_eq(bg_cuda_attention_ints(c, ROWS + PADDED, 8), 4u * (ROWS + PADDED));
    bg_cuda_attention_plan(c, step + 8, ROWS + 2, 8); /* two rows of padding: sequences 6 and 7 */
    cr_assert_eq(c->att.n_single, 5);
    cr_assert_eq(c->att.n_tiles, 3 + 1 + 2);
    const bgk_item *item = (const bgk_item *)(step + 8);
    static const int32_t parts[] = {0, 1, 3, 14, 15};
    for (int i = 0; i < 5; i++) {
        cr_assert_eq(item[i].n, parts[i], "parts before row %d: %d", i, item[i].n);
        rows_seen[item[i].row0]++;
    }
    cr_assert_eq(item[4].row0, ROWS + 1);
    for (int i = 5; i < 11; i++) {
        cr_assert(item[i].n >= 1 && item[i].n <= BGK_TILE_TOKENS);
        for (int j = 0; j < item[i].n; j++)
            rows_seen[item[i].row0 + j]++;
    }
    for (int i = 0; i < ROWS + 2; i++)
        cr_assert_eq(rows_seen[i], 1, "row %d is in %d items", i, rows_seen[i]);
    cr_assert(item[5].row0 == 1 + 256 && item[5].pos0 == 5 + 256 && item[5].n == 44);
    cr_assert_eq(item[5].block0, 100);
    free(c);
}

/* ---- times ----------------------------------------------------------------------------------- */

typedef struct bench {
    bgk_out out;
    bgk_att a;
    bgk_item *items;
    int n_single, n_tiles;
    void *parts;
    size_t parts_bytes;
} bench;

static void bench_call(void *ctx, cudaStream_t stream)
{
    bench *b = ctx;
    CU(bgk_attention_single(&b->out, &b->a, b->items, b->n_single, b->parts, b->parts_bytes, N_SMS,
                            stream));
    CU(bgk_attention_tiles(&b->out, &b->a, b->items + b->n_single, b->n_tiles, stream));
    b->a.heads.layer = (b->a.heads.layer + 1) % 4; /* so that the L2 cache is no help */
}

/* n sequences of ctx tokens, of which the last `rows` are computed; blocks lie in order or
 * scattered.
 */
static double bench_time(bgk_type type, int n_seqs, int ctx, int rows, int bt, bool in_order)
{
    const int heads = 32, kv = 8, dim = 128, per = (ctx + bt - 1) / bt;
    const size_t elem = type == BGK_Q8 ? 1 : 2, slots = (size_t)(n_seqs * per + 1) * kv * bt * 4;
    const size_t stride = ((size_t)(n_seqs * rows) + 255) / 256 * 256;
    bench b = {.parts_bytes = (size_t)80 << 20};
    void *p[8];
    const size_t bytes[8] = {
        slots * dim * elem, slots * dim * elem,        slots * 4,
        slots * 4,          stride * heads * dim * 2,  stride * heads * dim * 2,
        b.parts_bytes,      (size_t)(n_seqs * per) * 4};
    for (int i = 0; i < 8; i++) {
        CU(cudaMalloc(&p[i], bytes[i] + 1024));
        CU(cudaMemset(p[i], 0, bytes[i] + 1024));
    }
    int32_t *tables = malloc(bytes[7]);
    for (int i = 0; i < n_seqs * per; i++)
        tables[i] = 1 + (int)((int64_t)i * (in_order ? 1 : 7919) % (n_seqs * per));
    CU(cudaMemcpy(p[7], tables, bytes[7], cudaMemcpyHostToDevice));
    bgk_item *items = malloc((size_t)(n_seqs * rows) * sizeof *items);
    int n = 0, parts = 0;
    for (int i = 0; i < n_seqs; i++)
        if (rows == 1) {
            items[n++] = (bgk_item){i, ctx - 1, i * per, parts};
            parts += (ctx - 1) / BGK_UNIT + 1;
        } else {
            for (int t = (rows - 1) / BGK_TILE_TOKENS * BGK_TILE_TOKENS; t >= 0;
                 t -= BGK_TILE_TOKENS)
                items[n++] = (bgk_item){i * rows + t, ctx - rows + t, i * per,
                                        rows - t < BGK_TILE_TOKENS ? rows - t : BGK_TILE_TOKENS};
        }
    b.items = to_device(items, (size_t)n * sizeof *items);
    b.n_single = rows == 1 ? n : 0;
    b.n_tiles = n - b.n_single;
    b.parts = p[6];
    b.out = (bgk_out){p[5], BGK_TILES, (int64_t)stride};
    b.a = (bgk_att){.q = p[4],
                    .q_cols = heads * dim,
                    .cache = {.k = p[0],
                              .v = p[1],
                              .type = type,
                              .n_blocks = n_seqs * per + 1,
                              .n_kv_heads = kv,
                              .block_tokens = bt,
                              .k_dim = dim,
                              .v_dim = dim,
                              .k_scale = p[2],
                              .v_scale = p[3]},
                    .blocks = p[7],
                    .heads = {.n_heads = heads, .group = heads / kv, .scale = 0.1f}};
    const double us = gpu_time_us(bench_call, &b, 32);
    for (int i = 0; i < 8; i++)
        CU(cudaFree(p[i]));
    CU(cudaFree(b.items));
    free(items);
    free(tables);
    return us;
}

Test(attention, bench_decode)
{
    NEEDS_GPU();
    if (gpu_small()) return;
    static const bgk_type types[] = {BGK_F16, BGK_Q8};
    static const int batches[] = {1, 8, 32, 128, 512}, ctxs[] = {200, 768};
    for (int k = 0; k < 2; k++)
        for (int c = 0; c < 2; c++)
            for (int i = 0; i < 5; i++) {
                const double us = bench_time(types[k], batches[i], ctxs[c], 1, 32, false);
                const double head = types[k] == BGK_Q8 ? 132 : 256;
                fprintf(stderr, "decode %s batch %3d ctx %4d: %8.2f us, %.3f TB/s\n",
                        k ? "q8 " : "f16", batches[i], ctxs[c], us,
                        2.0 * batches[i] * ctxs[c] * 8 * head / us * 1e-6);
            }
    fprintf(stderr, "decode f16 batch   1 ctx 131072: %8.2f us\n",
            bench_time(BGK_F16, 1, 131072, 1, 32, false));
    for (int bt = 32; bt <= 256; bt *= 2)
        for (int in_order = 0; in_order < 2; in_order++)
            fprintf(stderr, "decode f16 batch 512 ctx  768, blocks of %3d %s: %8.2f us\n", bt,
                    in_order ? "in order" : "scattered",
                    bench_time(BGK_F16, 512, 768, 1, bt, in_order));
}

Test(attention, bench_prompts)
{
    NEEDS_GPU();
    if (gpu_small()) return;
    static const int n[] = {1, 16, 2}, rows[] = {128, 512, 8192};
    static const bgk_type types[] = {BGK_F16, BGK_Q8};
    for (int k = 0; k < 2; k++)
        for (int i = 0; i < 3; i++) {
            const double us = bench_time(types[k], n[i], rows[i], rows[i], 32, false);
            fprintf(stderr, "prompts %s %2d x %4d: %8.2f us, %.0f TFLOP/s\n", k ? "q8 " : "f16",
                    n[i], rows[i], us,
                    4.0 * 32 * 128 * n[i] * rows[i] * (rows[i] + 1) / 2 / us * 1e-6);
        }
}
