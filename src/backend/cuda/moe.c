/* Mixture of experts: routers and experts as the kernels read them, and their two ops.
 *
 * A router's products are float32 in effect: its weights are two halves, one for what the other
 * leaves, and K is cut into parts, so that one token keeps many processors busy. Where weights are
 * plain it is float32. Experts are tiles, all of a layer in one allocation for each of the two
 * products; what lies between the products is for all layers the same memory. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cuda/cuda.h"
#include "base/hash.h"
#include "base/rng.h"
#include "pack.h"

enum {
    TILE = 64,
    ROUTE_BYTES = 32 << 20, /* of products at a time, so that they stay in the cache */
    MOST_PARTS = 8,         /* of a router's K */
    MOST_N = 128,           /* tokens in an item */
};

struct bg_cuda_moe {
    bg_router **routers;
    size_t n_routers, routers_cap;
    bg_experts **experts;
    size_t n_experts, experts_cap;
    float *parts; /* a router's products */
    size_t parts_size;
    int32_t *pos, *n_items, *counts; /* bgk_moe */
    bgk_moe_item *items;
    size_t pos_size, items_size, counts_size;
    char *x, *act; /* BGK_TILES: gathered rows; gated ones. Of so many rows: */
    int64_t x_rows, act_rows;
    size_t x_size, act_size;
    void *rows; /* [result rows, d] halves */
    size_t rows_size;
    /* Of so few rows that the experts' kernel chooses, the router whose products are there and the
     * activation that becomes its route; NULL: none. */
    const bg_router *chooses;
    const bg_act *route;
};

static bg_status room(bg_cuda *c, struct bg_cuda_moe **m, bg_error *err)
{
    if (!c->moe) c->moe = calloc(1, sizeof *c->moe);
    *m = c->moe;
    return c->moe ? BG_OK : bg_fail(err, BG_NOMEM, "experts: out of memory");
}

void bg_cuda_moe_free(bg_cuda *c)
{
    struct bg_cuda_moe *m = c->moe;
    if (!m) return;
    for (size_t i = 0; i < m->n_routers; i++)
        free(m->routers[i]);
    for (size_t i = 0; i < m->n_experts; i++) {
        free(m->experts[i]->name);
        free(m->experts[i]);
    }
    free(m->routers);
    free(m->experts);
    free(m);
    c->moe = NULL;
}

/* Device memory of at least `bytes`, that of before if it is enough; a smaller one stays until the
 * backend ends. Zeros. */
static bg_status at_least(bg_cuda *c, void *p, size_t *size, size_t bytes, const char *what,
                          bg_error *err)
{
    void *at = NULL;
    if (bytes <= *size) return BG_OK;
    bg_status st = bg_cuda_take(c, &at, bytes + 1024, what, err);
    if (!st) st = bg_cuda_done(err, cudaMemsetAsync(at, 0, bytes + 1024, c->stream), what);
    if (st) return st;
    at = (char *)at + -(uintptr_t)at % 1024; /* cudaMalloc aligns to 256 */
    memcpy(p, &at, sizeof at);
    *size = bytes;
    return BG_OK;
}

/* ---- routers ------------------------------------------------------------------------------------
 */

/* Random, of a deviation of 1 / sqrt(d): every expert is chosen about as often. */
static void random_weights(float *w, int64_t n, int64_t d, const char *name)
{
    const uint64_t seed = bg_hash64(name, strlen(name), 0);
    const double scale = sqrt(3.0 / (double)d);
    for (int64_t i = 0; i < n; i++)
        w[i] =
            (float)(((double)bg_mix64(seed + (uint64_t)i * 0x9e3779b97f4a7c15ull) * 0x1p-63 - 1) *
                    scale);
}

/* [n, d] on the host: the experts' rows, then the shared gate. */
static float *router_weights(const bg_cuda *c, const bg_router_spec *spec, int n)
{
    const size_t d = (size_t)spec->d_model, experts = (size_t)spec->n_experts;
    float *w = malloc((size_t)n * d * sizeof *w + 1);
    if (!w) return NULL;
    if (c->config.dummy) {
        random_weights(w, (int64_t)n * spec->d_model, spec->d_model, spec->name);
        return w;
    }
    memcpy(w, spec->weights, experts * d * sizeof *w);
    if (spec->shared_gate) memcpy(w + experts * d, spec->shared_gate, d * sizeof *w);
    return w;
}

/* w becomes its leading 11 bits, low what is left (Dekker's splitting; both exact). */
static void split_halves(float *w, float *low, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const float big = w[i] * 8193.0f, away = big - w[i], high = big - away;
        low[i] = w[i] - high;
        w[i] = high;
    }
}

/* Parts of K: as many as there are, of the same number of chunks, four at least. */
static int router_parts(int n_chunks)
{
    for (int p = MOST_PARTS; p > 1; p--)
        if (n_chunks % p == 0 && n_chunks / p >= 4) return p;
    return 1;
}

/* Tiles of part p of K of both halves: products [2 n_parts, n], columns of the parts in order. */
static bg_status router_tiles(bg_cuda *c, bg_router *r, float *w, const char *name, bg_error *err)
{
    const size_t values = (size_t)r->n * (size_t)r->d;
    const int each = (r->n + TILE - 1) / TILE, n_chunks = (r->d + TILE - 1) / TILE,
              parts = router_parts(n_chunks), chunks = n_chunks / parts, n_tiles = 2 * parts * each;
    const size_t tile_bytes = (size_t)chunks * (size_t)bgk_chunk_bytes(BGK_W16);
    r->n_parts = 2 * parts;
    float *low = malloc(values * sizeof *low + 1), *device = NULL, *row_scale = NULL;
    bgk_wtile *tiles = calloc((size_t)n_tiles, sizeof *tiles), *to = NULL;
    char *data = NULL;
    bg_status st = BG_OK;
    if (!low || !tiles) {
        free(low);
        free(tiles);
        return bg_fail(err, BG_NOMEM, "%s: out of memory", name);
    }
    if (cudaMalloc((void **)&device, 2 * values * sizeof *device + 16) != cudaSuccess)
        st = bg_fail(err, BG_NOMEM, "%s: out of memory on the GPU", name);
    if (!st) {
        split_halves(w, low, values);
        st = bg_cuda_put(device, w, values * sizeof *w, name, err);
    }
    if (!st) st = bg_cuda_put(device + values, low, values * sizeof *w, name, err);
    if (!st) st = bg_cuda_take(c, &data, (size_t)n_tiles * tile_bytes, name, err);
    if (!st)
        st = bg_cuda_take(c, &row_scale, (size_t)n_tiles * TILE * sizeof *row_scale, name, err);
    if (!st) st = bg_cuda_take(c, &to, (size_t)n_tiles * sizeof *to, name, err);
    for (int i = 0; !st && i < 2 * parts; i++) {
        const int p = i % parts, col = p * chunks * TILE;
        const bgk_source from = {.rows = device + (size_t)(i / parts) * values + col,
                                 .type = BGK_GGUF_F32,
                                 .n_rows = r->n,
                                 .row_bytes = (int64_t)r->d * (int64_t)sizeof *device};
        const int left = r->d - col, k = left < chunks * TILE ? left : chunks * TILE;
        for (int j = 0; j < each; j++)
            tiles[i * each + j] =
                (bgk_wtile){.w = data + (size_t)(i * each + j) * tile_bytes,
                            .format = BGK_W16,
                            .out0 = i * r->n + j * TILE,
                            .n_rows = r->n - j * TILE < TILE ? r->n - j * TILE : TILE,
                            .x_chunk0 = p * chunks};
        st = bg_cuda_done(err,
                          bgk_repack(data + (size_t)(i * each) * tile_bytes,
                                     row_scale + (size_t)(i * each) * TILE, BGK_W16, &from, NULL, k,
                                     c->stream),
                          name);
    }
    if (!st) st = bg_cuda_put(to, tiles, (size_t)n_tiles * sizeof *to, name, err);
    if (!st) st = bg_cuda_done(err, cudaStreamSynchronize(c->stream), name);
    r->tiles = (bgk_weights){.tiles = to,
                             .row_scale = row_scale,
                             .n_tiles = n_tiles,
                             .n_chunks = chunks,
                             .splits = 1,
                             .idle = c->ranks != NULL,
                             .formats = 1u << BGK_W16,
                             .n_out = r->n_parts * r->n,
                             .block_tiles = each};
    cudaFree(device);
    free(low);
    free(tiles);
    return st;
}

static bg_status router_plain(bg_cuda *c, bg_router *r, const float *w, const char *name,
                              bg_error *err)
{
    const size_t row = (size_t)r->k_padded * sizeof *w;
    r->n_parts = 1;
    bg_status st = bg_cuda_take(c, &r->w, (size_t)r->n * row, name, err);
    if (st) return st;
    cudaError_t e = cudaMemset(r->w, 0, (size_t)r->n * row);
    if (e == cudaSuccess)
        e = cudaMemcpy2D(r->w, row, w, (size_t)r->d * sizeof *w, (size_t)r->d * sizeof *w,
                         (size_t)r->n, cudaMemcpyHostToDevice);
    if (e == cudaSuccess) e = cudaStreamSynchronize(cudaStreamLegacy); /* as bg_cuda_put() */
    return bg_cuda_done(err, e, name);
}

/* bgk_route() is left to the op that follows: its first kernel chooses for itself. */
static bool choice_waits(const bg_cuda *c, const bg_router *r, int n_rows)
{
    return c->tiled && !c->base.check && n_rows <= BGK_MOE_FEW && r->r.n_groups <= 1;
}

static cudaError_t choose_late(bg_cuda *c)
{
    struct bg_cuda_moe *m = c->moe;
    const bg_router *r = m->chooses;
    const bg_act *route = m->route;
    m->chooses = NULL;
    if (!r) return cudaSuccess;
    return bgk_route((float *)route->data, route->cols, m->parts, (int64_t)r->n_parts * r->n,
                     r->n_parts, &r->r, c->s.n_rows, c->stream);
}

static bg_status put_vector(bg_cuda *c, const float **out, const float *host, int n,
                            const char *name, bg_error *err)
{
    float *to = NULL;
    if (!host) return BG_OK;
    bg_status st = bg_cuda_take(c, &to, (size_t)n * sizeof *to, name, err);
    if (!st) st = bg_cuda_put(to, host, (size_t)n * sizeof *to, name, err);
    *out = to;
    return st;
}

/* Rows at a time: a multiple of 256, for parts of BGK_TILES. */
static int route_rows(const bg_cuda *c, const bg_router *r)
{
    const int64_t rows =
        ROUTE_BYTES / ((int64_t)r->n_parts * r->n * (int64_t)sizeof(float)) / 256 * 256;
    const int64_t most = c->config.max_tokens;
    return (int)(rows < 256 ? (most < 256 ? most : 256) : rows < most ? rows : most);
}

bg_status bg_cuda_router_new(bg_backend *b, bg_router **out, const bg_router_spec *spec,
                             bg_error *err)
{
    static const bgk_gating gating[] = {[BG_GATING_SOFTMAX] = BGK_GATE_SOFTMAX,
                                        [BG_GATING_SIGMOID] = BGK_GATE_SIGMOID,
                                        [BG_GATING_SOFTMAX_CHOSEN] = BGK_GATE_CHOSEN};
    bg_cuda *c = (bg_cuda *)b;
    struct bg_cuda_moe *m;
    *out = NULL;
    if (spec->n_experts < 1 || spec->n_experts > BGK_MAX_EXPERTS || spec->n_used < 1 ||
        spec->n_used > BGK_MAX_USED || spec->n_used > spec->n_experts || spec->d_model < 1 ||
        (spec->n_groups > 1 && spec->n_experts % spec->n_groups))
        return bg_fail(err, BG_ARG,
                       "%s: %d of %d experts in %d groups: this GPU backend has up to %d of %d",
                       spec->name, spec->n_used, spec->n_experts, spec->n_groups, BGK_MAX_USED,
                       BGK_MAX_EXPERTS);
    bg_status st = room(c, &m, err);
    if (!st) st = bg_cuda_grow(&m->routers, m->n_routers, &m->routers_cap, err);
    if (st) return st;
    bg_router *r = calloc(1, sizeof *r);
    if (!r) return bg_fail(err, BG_NOMEM, "%s: out of memory", spec->name);
    m->routers[m->n_routers++] = r;
    r->d = spec->d_model;
    r->n = spec->n_experts + (spec->shared_gate ? 1 : 0);
    r->k_padded = (r->d + BGK_K_PAD - 1) / BGK_K_PAD * BGK_K_PAD;
    r->r = (bgk_router){.n_experts = spec->n_experts,
                        .n_used = spec->n_used,
                        .gating = gating[spec->gating],
                        .n_groups = spec->n_groups,
                        .n_groups_used = spec->n_groups_used,
                        .renormalise = spec->renormalise,
                        .shared_gate = spec->shared_gate != NULL,
                        .scale = spec->scale};
    st = put_vector(c, &r->r.bias, spec->bias, spec->n_experts, spec->name, err);
    if (!st)
        st = put_vector(c, &r->r.choice_bias, spec->choice_bias, spec->n_experts, spec->name, err);
    float *w = st ? NULL : router_weights(c, spec, r->n);
    if (!st && !w) st = bg_fail(err, BG_NOMEM, "%s: out of memory", spec->name);
    if (!st)
        st = c->tiled ? router_tiles(c, r, w, spec->name, err)
                      : router_plain(c, r, w, spec->name, err);
    free(w);
    if (!st)
        st = at_least(c, &m->parts, &m->parts_size,
                      (size_t)route_rows(c, r) * (size_t)(r->n_parts * r->n) * sizeof(float),
                      "router", err);
    if (!st) *out = r;
    return st;
}

bg_status bg_cuda_route(bg_backend *b, bg_act *route, const bg_router *r, const bg_act *h,
                        bg_error *err)
{
    bg_cuda *c = (bg_cuda *)b;
    const bgk_out in = bg_cuda_out(h);
    const int n_rows = c->s.n_rows, cols = r->n_parts * r->n, most = route_rows(c, r);
    if (n_rows > h->max_rows || n_rows > route->max_rows || route->cols < 2 * r->r.n_used + 1 ||
        h->cols < r->d || (in.layout == BGK_TILES) != c->tiled)
        return bg_fail(err, BG_INTERNAL, "op route: %s to %s", h->name, route->name);
    const bg_status waits = bg_cuda_flush(c, err);
    if (waits) return waits;
    const bool later = choice_waits(c, r, n_rows);
    c->moe->chooses = later ? r : NULL;
    c->moe->route = route;
    for (int t = 0; t < n_rows; t += most) {
        const int n = n_rows - t < most ? n_rows - t : most;
        const bgk_out parts = {c->moe->parts, BGK_ROWS, cols};
        cudaError_t e;
        if (c->tiled)
            e = bgk_matmul(&parts, &r->tiles, (const char *)in.data + (size_t)t * TILE * 2,
                           in.stride, n, BGK_SILU, c->stream);
        else
            e = bgk_linear(c->moe->parts, cols, r->w, BGK_F32, NULL,
                           (const float *)h->data + t * h->cols, h->cols, n, r->n, r->d,
                           r->k_padded, NULL, c->stream);
        if (e == cudaSuccess && !later)
            e = bgk_route((float *)route->data + t * route->cols, route->cols, c->moe->parts, cols,
                          r->n_parts, &r->r, n, c->stream);
        if (e != cudaSuccess) return bg_cuda_fail(err, e, "op route");
    }
    return BG_OK;
}

/* ---- experts ------------------------------------------------------------------------------------
 */

/* One of the two products: what its parts are. */
typedef struct side {
    const bg_linear_part *rows, *up; /* of expert 0; up NULL: the second product */
    size_t stride, up_stride;
    const bg_linear_part *shared, *shared_up; /* of shared expert 0 */
    const float *bias, *up_bias;              /* [n_experts, rows] */
    bgk_format format, shared_format;
    int tiles, k;
} side;

static bgk_format format_of(const bg_linear_part *rows, const bg_linear_part *up)
{
    bgk_format a = bgk_format_of((int)rows->type), b = up ? bgk_format_of((int)up->type) : a;
    if (a == b) return a == BGK_FORMATS ? BGK_W16 : a;
    return a <= BGK_W5 && b <= BGK_W5 ? BGK_W5 : BGK_W16;
}

static size_t tile_bytes(const side *s, bgk_format f)
{
    return (size_t)((s->k + TILE - 1) / TILE) * (size_t)bgk_chunk_bytes(f);
}

/* The experts of a file's stack, as many at a time as the loader likes. */
static bg_status load_stack(bg_cuda *c, const side *s, int n_experts, char *chunks,
                            float *row_scale, bg_error *err)
{
    const int64_t each = s->rows->n_rows, all = each * n_experts;
    int64_t piece = bg_cuda_load_piece(s->rows, s->up);
    const bool whole = each % TILE != 0; /* else a taller matrix, to be cut anywhere */
    if (whole) piece = piece < each ? each : piece / each * each;
    bg_status st = BG_OK;
    for (int64_t r = 0; !st && r < all; r += piece) {
        const int64_t n = all - r < piece ? all - r : piece,
                      tile = whole ? r / each * s->tiles : r / TILE * (s->up ? 2 : 1);
        bgk_source from[2];
        st = bg_cuda_load_stack(c, s->rows, s->up, s->stride, s->up_stride, r, n, from, err);
        if (st) break;
        st = bg_cuda_done(err,
                          bgk_repack_stack(chunks + (size_t)tile * tile_bytes(s, s->format),
                                           row_scale + tile * TILE, s->format, from,
                                           s->up ? from + 1 : NULL, (int)(whole ? each : n), s->k,
                                           c->stream),
                          s->rows->name);
        if (!st) st = bg_cuda_load_used(c, s->rows->name, err);
    }
    return st;
}

/* Shared expert number i. */
static bg_linear_part shared_part(const bg_linear_part *p, int64_t first, bool columns)
{
    bg_linear_part of = *p;
    if (columns)
        of.col0 += first;
    else
        of.row0 += first;
    return of;
}

static bg_status load_shared(bg_cuda *c, const side *s, int64_t first, char *chunks,
                             float *row_scale, bg_error *err)
{
    const bg_linear_part rows = shared_part(s->shared, first, !s->up),
                         up = s->up ? shared_part(s->shared_up, first, false) : rows;
    side one = *s;
    one.rows = &rows;
    one.up = s->up ? &up : NULL;
    one.stride = one.up_stride = 0;
    one.format = s->shared_format;
    return load_stack(c, &one, 1, chunks, row_scale, err);
}

/* Biases of experts in the order of the tiles' rows. */
static bg_status side_biases(bg_cuda *c, bgk_weights *w, const bg_experts *e, const side *s,
                             bg_error *err)
{
    const size_t n = (size_t)(e->n_experts + e->n_shared) * (size_t)s->tiles * TILE;
    float *bias, *to = NULL;
    if (!s->bias && !s->up_bias) return BG_OK;
    bias = calloc(n + 1, sizeof *bias);
    if (!bias) return bg_fail(err, BG_NOMEM, "%s: out of memory", e->name);
    for (int64_t i = 0; i < (int64_t)e->n_experts * s->tiles * TILE; i++) {
        const int64_t expert = i / TILE / s->tiles;
        int source;
        const int row =
            pack_row_of(s->up != NULL, (int)(i / TILE % s->tiles), (int)(i % TILE), &source);
        const float *from = source ? s->up_bias : s->bias;
        if (from && row < s->rows->n_rows) bias[i] = from[expert * s->rows->n_rows + row];
    }
    bg_status st = bg_cuda_take(c, &to, n * sizeof *to, e->name, err);
    if (!st) st = bg_cuda_put(to, bias, n * sizeof *to, e->name, err);
    w->bias = to;
    free(bias);
    return st;
}

/* Parts of K, by the shape alone: with few tiles of the experts that one token has, several. */
static int side_splits(const bg_experts *e, const bgk_weights *w)
{
    const int64_t active = (int64_t)w->n_tiles * (e->n_used + e->n_shared);
    if (active <= 100 && w->n_chunks >= 32) return 4;
    return active <= 200 && w->n_chunks >= 64 ? 2 : 1;
}

static bg_status load_side(bg_cuda *c, bgk_weights *w, bg_experts *e, side *s,
                           const bg_experts_spec *spec, bg_error *err)
{
    s->format = format_of(s->rows, s->up);
    s->shared_format = e->n_shared ? format_of(s->shared, s->up ? s->shared_up : NULL) : s->format;
    s->k = (int)s->rows->n_cols;
    s->tiles = (int)((s->rows->n_rows + TILE - 1) / TILE) * (s->up ? 2 : 1);
    *w = (bgk_weights){.n_tiles = s->tiles,
                       .n_chunks = (s->k + TILE - 1) / TILE,
                       .formats = 1u << s->format | 1u << s->shared_format,
                       .n_ff = s->up ? e->n_ff : 0,
                       .n_out = (int)s->rows->n_rows,
                       .stack_format = {s->format, s->shared_format},
                       .n_first = e->n_experts};
    w->splits = side_splits(e, w);
    const size_t each = (size_t)s->tiles * tile_bytes(s, s->format),
                 shared = (size_t)s->tiles * tile_bytes(s, s->shared_format),
                 routed = each * (size_t)e->n_experts,
                 scales = (size_t)(e->n_experts + e->n_shared) * (size_t)s->tiles * TILE;
    e->expert_bytes += (double)each;
    e->shared_bytes += (double)shared;
    char *data = NULL;
    float *row_scale = NULL;
    bg_status st = bg_cuda_take(c, &data, routed + shared * (size_t)e->n_shared, e->name, err);
    if (!st) st = bg_cuda_take(c, &row_scale, scales * sizeof *row_scale, e->name, err);
    w->row_scale = row_scale;
    w->stack[0] = data;
    w->stack[1] = data + routed;
    if (!st) st = side_biases(c, w, e, s, err);
    if (!st) st = load_stack(c, s, e->n_experts, data, row_scale, err);
    for (int i = 0; !st && i < e->n_shared; i++)
        st = load_shared(c, s, i * spec->shared_step, data + routed + (size_t)i * shared,
                         row_scale + (size_t)(e->n_experts + i) * (size_t)s->tiles * TILE, err);
    return st;
}

static bg_status tiled_experts(bg_cuda *c, bg_experts *e, const bg_experts_spec *spec,
                               bg_error *err)
{
    side first = {.rows = &spec->gate,
                  .up = &spec->up,
                  .stride = spec->gate_stride,
                  .up_stride = spec->up_stride,
                  .shared = &spec->shared_gate,
                  .shared_up = &spec->shared_up,
                  .bias = spec->gate_bias,
                  .up_bias = spec->up_bias};
    side second = {.rows = &spec->down,
                   .stride = spec->down_stride,
                   .shared = &spec->shared_down,
                   .bias = spec->down_bias};
    bg_status st = load_side(c, &e->gate_up, e, &first, spec, err);
    return st ? st : load_side(c, &e->down, e, &second, spec, err);
}

/* ---- plain ---- */

static bg_status plain_values(bg_cuda *c, char *to, const bg_linear_part *p, int64_t padded,
                              bg_error *err)
{
    return p->n_rows ? bg_cuda_load_values(c, to, p, padded, err) : BG_OK;
}

static bg_linear_part nth(const bg_linear_part *p, size_t stride, int i)
{
    bg_linear_part of = *p;
    if (of.data) of.data = (const char *)of.data + (size_t)i * stride;
    return of;
}

static bg_status plain_biases(bg_cuda *c, bg_experts *e, const bg_experts_spec *spec, bg_error *err)
{
    const size_t f = (size_t)e->n_ff, d = (size_t)e->d,
                 n = (size_t)e->n_experts + (size_t)e->n_shared;
    float *host = calloc(n * (2 * f + d) + 1, sizeof *host), *down = host ? host + n * 2 * f : NULL;
    if (!host) return bg_fail(err, BG_NOMEM, "%s: out of memory", e->name);
    for (size_t i = 0; i < (size_t)e->n_experts; i++) {
        if (spec->gate_bias) memcpy(host + i * 2 * f, spec->gate_bias + i * f, f * sizeof *host);
        if (spec->up_bias) memcpy(host + (2 * i + 1) * f, spec->up_bias + i * f, f * sizeof *host);
        if (spec->down_bias) memcpy(down + i * d, spec->down_bias + i * d, d * sizeof *host);
    }
    bg_status st = BG_OK;
    if (spec->gate_bias || spec->up_bias)
        st = put_vector(c, &e->plain.bias, host, (int)(n * 2 * f), e->name, err);
    if (!st && spec->down_bias)
        st = put_vector(c, &e->plain.down_bias, down, (int)(n * d), e->name, err);
    free(host);
    return st;
}

static bg_status plain_experts(bg_cuda *c, bg_experts *e, const bg_experts_spec *spec,
                               bg_error *err)
{
    const size_t value = c->weights == BGK_F32 ? sizeof(float) : sizeof(uint16_t);
    const size_t n = (size_t)e->n_experts + (size_t)e->n_shared, f = (size_t)e->n_ff,
                 d = (size_t)e->d;
    bgk_plain_experts *p = &e->plain;
    p->type = c->weights;
    p->n_ff = e->n_ff;
    p->ff_padded = (p->n_ff + BGK_K_PAD - 1) / BGK_K_PAD * BGK_K_PAD;
    const size_t row = (size_t)p->k_padded * value, down_row = (size_t)p->ff_padded * value;
    char *gate_up = NULL, *down = NULL;
    bg_status st = bg_cuda_take(c, &gate_up, n * 2 * f * row, e->name, err);
    if (!st) st = bg_cuda_take(c, &down, n * d * down_row, e->name, err);
    p->gate_up = gate_up;
    p->down = down;
    for (int i = 0; !st && i < (int)n; i++) {
        const int s = i - e->n_experts;
        const bg_linear_part gate =
            s < 0 ? nth(&spec->gate, spec->gate_stride, i)
                  : shared_part(&spec->shared_gate, s * spec->shared_step, false);
        const bg_linear_part up = s < 0
                                      ? nth(&spec->up, spec->up_stride, i)
                                      : shared_part(&spec->shared_up, s * spec->shared_step, false);
        const bg_linear_part last =
            s < 0 ? nth(&spec->down, spec->down_stride, i)
                  : shared_part(&spec->shared_down, s * spec->shared_step, true);
        st = plain_values(c, gate_up + (size_t)i * 2 * f * row, &gate, p->k_padded, err);
        if (!st)
            st = plain_values(c, gate_up + ((size_t)i * 2 + 1) * f * row, &up, p->k_padded, err);
        if (!st) st = plain_values(c, down + (size_t)i * d * down_row, &last, p->ff_padded, err);
    }
    e->expert_bytes = e->shared_bytes = (double)(2 * f * row + d * down_row);
    return st ? st : plain_biases(c, e, spec, err);
}

/* ---- memory between the products ---- */

static int64_t stride_for(int64_t rows)
{
    return (rows + MOST_N + BGK_TILE_ROWS - 1) / BGK_TILE_ROWS * BGK_TILE_ROWS;
}

/* Of a row of results, for loads of eight. */
static int64_t row_halves(const bg_experts *e)
{
    return (e->d + 7) / 8 * 8;
}

static bg_status scratch(bg_cuda *c, const bg_experts *e, bg_error *err)
{
    struct bg_cuda_moe *s = c->moe;
    const int most = c->config.max_tokens;
    const bgk_moe m = {.n_experts = e->n_experts,
                       .n_used = e->n_used,
                       .n_shared = e->n_shared,
                       .tokens = most,
                       .n = 8};
    const size_t slots = (size_t)e->n_used + (size_t)e->n_shared;
    if (!c->tiled) /* rows: the gated activations */
        return at_least(c, &s->rows, &s->rows_size,
                        (size_t)most * slots * (size_t)e->n_ff * sizeof(float), "experts", err);
    const int64_t gathered = stride_for(bgk_moe_gathered(&m)), rows = stride_for(bgk_moe_rows(&m));
    const size_t groups = (size_t)e->gate_up.n_chunks, ff_groups = (size_t)e->down.n_chunks;
    bg_status st = at_least(c, &s->pos, &s->pos_size,
                            (size_t)most * (size_t)e->n_used * sizeof *s->pos, "experts", err);
    if (!st)
        st = at_least(c, &s->items, &s->items_size, (size_t)bgk_moe_items(&m) * sizeof *s->items,
                      "experts", err);
    if (!st)
        st = at_least(c, &s->counts, &s->counts_size,
                      (size_t)(bgk_moe_counts(&m) + 64) * sizeof *s->counts, "experts", err);
    if (!st) s->n_items = s->counts; /* a line of its own before the counts */
    if (!st)
        st = at_least(c, &s->x, &s->x_size, groups * (size_t)gathered * TILE * 2,
                      "rows for experts", err);
    if (!st)
        st = at_least(c, &s->act, &s->act_size, ff_groups * (size_t)rows * TILE * 2,
                      "activations of experts", err);
    if (!st)
        st = at_least(c, &s->rows, &s->rows_size, (size_t)rows * (size_t)row_halves(e) * 2,
                      "results of experts", err);
    return st;
}

static bg_status check_spec(const bg_experts_spec *s, bg_error *err)
{
    const bg_linear_part *parts[] = {&s->gate,        &s->up,        &s->down,
                                     &s->shared_gate, &s->shared_up, &s->shared_down};
    if (s->n_experts < 1 || s->n_experts > BGK_MAX_EXPERTS || s->n_used < 1 ||
        s->n_used > BGK_MAX_USED || s->n_used > s->n_experts || s->n_shared < 0 || s->n_shared > 64)
        return bg_fail(err, BG_ARG, "%s: %d of %d experts, %d shared: too many for this backend",
                       s->name, s->n_used, s->n_experts, s->n_shared);
    for (int i = 0; i < (s->n_shared ? 6 : 3); i++) {
        const bg_linear_part *p = parts[i], *like = parts[i % 3];
        if (!bg_qtype_get(p->type)->dequant)
            return bg_fail(err, BG_ARG, "%s: type %u cannot be used", p->name, (unsigned)p->type);
        if (p->n_rows != like->n_rows || p->n_cols != like->n_cols || p->bias ||
            p->n_rows > INT32_MAX / 2 || p->n_cols > INT32_MAX / 2)
            return bg_fail(err, BG_INTERNAL, "%s: [%lld, %lld]", p->name, (long long)p->n_rows,
                           (long long)p->n_cols);
    }
    if (s->gate.n_rows != s->up.n_rows || s->gate.n_cols != s->up.n_cols ||
        s->down.n_cols != s->gate.n_rows)
        return bg_fail(err, BG_INTERNAL, "%s: gate, up and down do not fit", s->name);
    return BG_OK;
}

bg_status bg_cuda_experts_new(bg_backend *b, bg_experts **out, const bg_experts_spec *spec,
                              bg_error *err)
{
    bg_cuda *c = (bg_cuda *)b;
    struct bg_cuda_moe *m;
    *out = NULL;
    bg_status st = check_spec(spec, err);
    if (!st) st = room(c, &m, err);
    if (!st) st = bg_cuda_grow(&m->experts, m->n_experts, &m->experts_cap, err);
    if (st) return st;
    bg_experts *e = calloc(1, sizeof *e);
    if (!e) return bg_fail(err, BG_NOMEM, "%s: out of memory", spec->name);
    m->experts[m->n_experts++] = e;
    e->name = strdup(spec->name);
    if (!e->name) return bg_fail(err, BG_NOMEM, "%s: out of memory", spec->name);
    e->n_experts = spec->n_experts;
    e->n_used = spec->n_used;
    e->n_shared = spec->n_shared;
    e->d = (int)spec->down.n_rows;
    e->n_ff = (int)spec->gate.n_rows;
    e->fn = bg_cuda_act_fn((bg_act_fn)spec->fn);
    e->plain.k = (int)spec->gate.n_cols;
    e->plain.k_padded = (e->plain.k + BGK_K_PAD - 1) / BGK_K_PAD * BGK_K_PAD;
    e->plain.cols = e->d;
    e->plain.fn = e->fn;
    if (!e->n_ff) /* a rank without columns of theirs; its down_bias may still count */
        st = plain_biases(c, e, spec, err);
    else
        st = c->tiled ? tiled_experts(c, e, spec, err) : plain_experts(c, e, spec, err);
    if (!st && e->n_ff) st = scratch(c, e, err);
    if (!st) *out = e;
    return st;
}

/* ---- the op -------------------------------------------------------------------------------------
 */

int bg_cuda_item_tokens(int n_experts, int n_used, int tokens)
{
    const double mean = (double)tokens * n_used / n_experts;
    if (tokens <= BGK_DIRECT || mean < 4) return 8;
    return mean <= 12 ? 16 : mean <= 26 ? 32 : mean <= 48 ? 64 : MOST_N;
}

static cudaError_t tiled_moe(bg_cuda *c, bg_act *out, const bg_experts *e, const bgk_moe *m,
                             const bg_act *route, const bg_act *h, const bg_act *add)
{
    struct bg_cuda_moe *s = c->moe;
    const int64_t rows = stride_for(bgk_moe_rows(m));
    const bgk_out in = bg_cuda_out(h), act = {s->act, BGK_TILES, rows},
                  x = {s->x, BGK_TILES, stride_for(bgk_moe_gathered(m))},
                  results = {s->rows, BGK_HALF_ROWS, row_halves(e)};
    const bool gathers = m->tokens > BGK_DIRECT;
    if (bgk_moe_few_fits(&e->gate_up, &e->down, m)) {
        bgk_moe_choice choice = {
            .r.n_experts = e->n_experts, .route = route->data, .route_cols = route->cols};
        if (s->chooses && s->route == route) {
            choice.r = s->chooses->r;
            choice.parts = s->parts;
            choice.n_parts = s->chooses->n_parts;
            choice.parts_cols = (int64_t)s->chooses->n_parts * s->chooses->n;
            s->chooses = NULL;
        }
        return bgk_moe_few(out->data, out->cols, &e->gate_up, &e->down, &act, &in, &choice,
                           add ? add->data : NULL, add ? add->cols : 0, m, e->fn, c->stream);
    }
    cudaError_t st = choose_late(c);
    if (st == cudaSuccess) st = bgk_moe_plan(m, c->stream);
    if (st == cudaSuccess) st = bgk_moe_gather(&x, &in, m, e->gate_up.n_chunks, c->stream);
    if (st == cudaSuccess)
        st = bgk_moe_matmul(&act, &e->gate_up, &in, &x, m, e->fn, gathers, c->stream);
    if (st == cudaSuccess)
        st = bgk_moe_matmul(&results, &e->down, NULL, &act, m, e->fn, true, c->stream);
    if (st == cudaSuccess)
        st = bgk_moe_combine(out->data, out->cols, s->rows, results.stride, add ? add->data : NULL,
                             add ? add->cols : 0, m, e->d, c->stream);
    return st;
}

bg_status bg_cuda_moe(bg_backend *b, bg_act *out, const bg_experts *e, const bg_act *route,
                      const bg_act *h, const bg_act *add, bg_error *err)
{
    bg_cuda *c = (bg_cuda *)b;
    struct bg_cuda_moe *s = c->moe;
    const int n_rows = c->s.n_rows;
    if (n_rows > out->max_rows || n_rows > route->max_rows || n_rows > h->max_rows ||
        out->cols < e->d || h->cols < e->plain.k || route->cols < 2 * e->n_used + 1 ||
        out->layout != BGK_ROWS || (h->layout == BGK_TILES) != c->tiled ||
        (add && (add->layout != BGK_ROWS || add->max_rows < n_rows || add->cols < e->d)))
        return bg_fail(err, BG_INTERNAL, "op moe: %s, from %s to %s", e->name, h->name, out->name);
    const bg_status waits = bg_cuda_flush(c, err);
    if (waits) return waits;
    const bgk_moe m = {.n_experts = e->n_experts,
                       .n_used = e->n_used,
                       .n_shared = e->n_shared,
                       .tokens = n_rows,
                       .n = bg_cuda_item_tokens(e->n_experts, e->n_used, n_rows),
                       .route = route->data,
                       .route_cols = route->cols,
                       .pos = s->pos,
                       .items = s->items,
                       .n_items = s->n_items,
                       .counts = s->counts ? s->counts + 64 : NULL};
    cudaError_t st;
    if (c->tiled && e->n_ff)
        st = tiled_moe(c, out, e, &m, route, h, add);
    else
        st = choose_late(c);
    if (st == cudaSuccess && !(c->tiled && e->n_ff))
        st = bgk_moe_plain(out->data, out->cols, &e->plain, h->data, h->cols,
                           add ? add->data : NULL, add ? add->cols : 0, &m, s->rows, c->stream);
    return bg_cuda_done(err, st, e->name);
}

void bg_cuda_moe_cost(const bg_backend *b, const bg_experts *e, int64_t n_rows, bg_cost *cost)
{
    (void)b;
    const double used = (double)e->n_used / e->n_experts,
                 read = e->n_experts * (1 - pow(1 - used, (double)n_rows));
    *cost = (bg_cost){
        .bytes = n_rows ? read * e->expert_bytes + e->n_shared * e->shared_bytes : 0,
        .flops = 6.0 * (double)n_rows * (e->n_used + e->n_shared) * e->d * e->n_ff,
    };
}
