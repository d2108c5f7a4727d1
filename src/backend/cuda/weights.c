/* Weights: linears and the embedding table, from GGUF blocks to what the kernels read: tiles, or
 * plain matrices of half or float32. */
#include "backend/cuda/cuda.h"

#include <stdlib.h>
#include <string.h>

#include "backend/cuda/tune_table.h"
#include "gguf/gguf.h"
#include "pack.h"

static size_t weight_bytes(const bg_cuda *c)
{
    return c->weights == BGK_F32 ? sizeof(float) : sizeof(uint16_t);
}

/* Block number i of a block-diagonal linear. */
static bg_linear_part block_of(const bg_linear_spec *spec, int i)
{
    bg_linear_part p = spec->parts[0];
    if (p.data) p.data = (const char *)p.data + i * spec->block_bytes;
    return p;
}

bg_status bg_cuda_load_values(bg_cuda *c, void *to, const bg_linear_part *p, int64_t k_padded,
                              bg_error *err)
{
    const int64_t piece = bg_cuda_load_piece(p, NULL);
    bg_status st = BG_OK;
    for (int64_t r = 0; !st && r < p->n_rows; r += piece) {
        const int64_t n = p->n_rows - r < piece ? p->n_rows - r : piece;
        bgk_source from[2];
        st = bg_cuda_load_rows(c, p, NULL, r, n, from, err);
        if (st) break;
        st = bg_cuda_done(err,
                          bgk_dequant((char *)to + (size_t)r * (size_t)k_padded * weight_bytes(c),
                                      c->weights, from, (int)p->n_cols, k_padded, c->stream),
                          p->name);
        if (!st) st = bg_cuda_load_used(c, p->name, err);
    }
    return st;
}

/* ---- plain ------------------------------------------------------------------------------------
 */

static bg_status upload_bias(bg_cuda *c, bg_linear *l, const bg_linear_spec *spec, bg_error *err)
{
    bool any = false;
    for (int i = 0; i < spec->n_parts; i++)
        any = any || spec->parts[i].bias;
    if (!any) return BG_OK;
    float *host = calloc((size_t)l->n_rows + 1, sizeof *host);
    if (!host) return bg_fail(err, BG_NOMEM, "%s: out of memory", spec->name);
    int64_t at = 0;
    for (int i = 0; i < spec->n_parts; at += spec->parts[i++].n_rows)
        if (spec->parts[i].bias && spec->parts[i].n_rows)
            memcpy(host + at, spec->parts[i].bias, (size_t)spec->parts[i].n_rows * sizeof *host);
    bg_status st = bg_cuda_take(c, &l->bias, (size_t)l->n_rows * sizeof *host, spec->name, err);
    if (!st) st = bg_cuda_put(l->bias, host, (size_t)l->n_rows * sizeof *host, spec->name, err);
    free(host);
    return st;
}

static bg_status plain_linear(bg_cuda *c, bg_linear *l, const bg_linear_spec *spec, bg_error *err)
{
    const size_t row_bytes = (size_t)l->k_padded * weight_bytes(c);
    l->w_bytes = (uint64_t)l->n_rows * row_bytes;
    bg_status st = bg_cuda_take(c, &l->w, l->w_bytes, spec->name, err);
    char *at = l->w;
    for (int i = 0; !st && i < (spec->n_blocks ? spec->n_blocks : spec->n_parts); i++) {
        const bg_linear_part p = spec->n_blocks ? block_of(spec, i) : spec->parts[i];
        if (l->k) st = bg_cuda_load_values(c, at, &p, l->k_padded, err);
        at += (size_t)p.n_rows * row_bytes;
    }
    if (!st) st = upload_bias(c, l, spec, err);
    const int most =
        c->config.max_tokens > c->config.max_out ? c->config.max_tokens : c->config.max_out;
    const size_t scratch = (size_t)most * (size_t)l->k_padded * sizeof(uint16_t);
    if (!st && scratch > c->scratch_bytes) { /* a narrower one stays until the backend ends */
        st = bg_cuda_take(c, &c->scratch, scratch, "scratch", err);
        c->scratch_bytes = st ? 0 : scratch;
    }
    return st;
}

/* ---- tiled: bgk.h says how ----------------------------------------------------------------------
 */

enum { TILE = 64 };

/* Parts that fill tiles together: one, or gate and up. */
typedef struct group {
    const bg_linear_part *rows, *up;
    bgk_format format;
    int64_t n_tiles, tile_bytes;
} group;

/* The format that both parts fit; values of other types come as float32. */
static bgk_format format_of(const bg_linear_part *rows, const bg_linear_part *up)
{
    bgk_format a = bgk_format_of((int)rows->type), b = up ? bgk_format_of((int)up->type) : a;
    if (a == b) return a == BGK_FORMATS ? BGK_W16 : a;
    return a <= BGK_W5 && b <= BGK_W5 ? BGK_W5 : BGK_W16;
}

static bg_status load_group(bg_cuda *c, const bg_linear *l, const group *g, int64_t row0,
                            char *chunks, float *row_scale, bg_error *err)
{
    const int64_t piece = bg_cuda_load_piece(g->rows, g->up), n_rows = g->rows->n_rows,
                  tiles_each = g->up ? 2 : 1;
    bg_status st = BG_OK;
    for (int64_t r = 0; !st && r < n_rows; r += piece) {
        const int64_t n = n_rows - r < piece ? n_rows - r : piece, tile = r / TILE * tiles_each;
        bgk_source from[2];
        st = bg_cuda_load_rows(c, g->rows, g->up, r, n, from, err);
        if (st) break;
        st = bg_cuda_done(err,
                          bgk_repack(chunks + tile * g->tile_bytes, row_scale + tile * TILE,
                                     g->format, from, g->up ? from + 1 : NULL, l->k, c->stream),
                          g->rows->name);
        if (!st) st = bg_cuda_fast_rows(c, l, row0 + r, from, err);
        if (!st && g->up) st = bg_cuda_fast_rows(c, l, row0 + n_rows + r, from + 1, err);
        if (!st) st = bg_cuda_load_used(c, g->rows->name, err);
    }
    return st;
}

/* Of row `row` of a group's tile, the bias; 0 where there is none. */
static float bias_at(const group *g, int tile, int row)
{
    int source;
    const int n = pack_row_of(g->up != NULL, tile, row, &source);
    const bg_linear_part *p = source ? g->up : g->rows;
    return p->bias && n < p->n_rows ? p->bias[n] : 0;
}

static int groups_of(const bg_linear_spec *spec, int k, group groups[4])
{
    const int n = spec->glu ? 1 : spec->n_parts;
    for (int i = 0; i < n; i++) {
        group *g = &groups[i];
        *g = (group){.rows = &spec->parts[i], .up = spec->glu ? &spec->parts[1] : NULL};
        g->format = format_of(g->rows, g->up);
        g->n_tiles = (g->rows->n_rows + TILE - 1) / TILE * (g->up ? 2 : 1);
        g->tile_bytes = (int64_t)((k + TILE - 1) / TILE) * bgk_chunk_bytes(g->format);
    }
    return n;
}

/* The table of tiles and the bias, both in the order of the tiles. */
static bg_status tables(bg_cuda *c, bg_linear *l, const bg_linear_spec *spec, const group *groups,
                        int n_groups, float **row_scale, bg_error *err)
{
    bgk_weights *t = &l->tiles;
    const size_t n = (size_t)t->n_tiles;
    bool any = false;
    for (int i = 0; i < spec->n_parts; i++)
        any = any || (spec->parts[i].bias && spec->parts[i].n_rows);
    bgk_wtile *tiles = calloc(n + 1, sizeof *tiles), *at = tiles;
    float *bias = calloc(n * TILE + 1, sizeof *bias), *b = bias;
    if (!tiles || !bias) {
        free(tiles);
        free(bias);
        return bg_fail(err, BG_NOMEM, "%s: out of memory", spec->name);
    }
    bg_status st = BG_OK;
    const char *w = l->w;
    int64_t out0 = 0;
    for (int i = 0; !st && i < n_groups; i++) {
        const group *g = &groups[i];
        for (int64_t j = 0; j < g->n_tiles; j++, at++, w += g->tile_bytes) {
            const int64_t left = g->rows->n_rows - j * TILE;
            *at = (bgk_wtile){.w = w, .format = (int32_t)g->format, .n_rows = TILE};
            if (!g->up) {
                at->out0 = (int32_t)(out0 + j * TILE);
                at->n_rows = (int32_t)(left < TILE ? left : TILE);
            }
            for (int r = 0; r < TILE; r++)
                *b++ = bias_at(g, (int)j, r);
        }
        out0 += g->rows->n_rows;
    }
    bgk_wtile *to = NULL;
    float *to_bias = NULL;
    if (!st) st = bg_cuda_take(c, &to, n * sizeof *to, spec->name, err);
    if (!st) st = bg_cuda_put(to, tiles, n * sizeof *to, spec->name, err);
    if (!st) st = bg_cuda_take(c, row_scale, n * TILE * sizeof **row_scale, spec->name, err);
    if (!st && any) st = bg_cuda_take(c, &to_bias, n * TILE * sizeof *bias, spec->name, err);
    if (!st && any) st = bg_cuda_put(to_bias, bias, n * TILE * sizeof *bias, spec->name, err);
    t->tiles = to;
    t->row_scale = *row_scale;
    t->bias = to_bias;
    free(tiles);
    free(bias);
    return st;
}

static bg_status tiled_linear(bg_cuda *c, bg_linear *l, const bg_linear_spec *spec, bg_error *err)
{
    group groups[4];
    if (spec->glu && (spec->n_parts != 2 || spec->parts[0].n_rows != spec->parts[1].n_rows))
        return bg_fail(err, BG_INTERNAL, "%s: gate and up are of different sizes", spec->name);
    const int n_groups = groups_of(spec, l->k, groups);
    int64_t n_tiles = 0;
    for (int i = 0; i < n_groups; i++) {
        n_tiles += groups[i].n_tiles;
        l->w_bytes += (uint64_t)(groups[i].n_tiles * groups[i].tile_bytes);
        if (groups[i].n_tiles) l->tiles.formats |= 1u << groups[i].format;
    }
    if (n_tiles > INT32_MAX / TILE)
        return bg_fail(err, BG_ARG, "%s: %d rows are too many", spec->name, l->n_rows);
    l->tiles.n_tiles = (int)n_tiles;
    l->tiles.n_chunks = (l->k + TILE - 1) / TILE;
    l->tiles.splits = bg_cuda_splits(n_tiles, l->k);
    l->tiles.idle = c->ranks != NULL;
    l->tiles.n_ff = spec->glu ? (int)spec->parts[0].n_rows : 0;
    l->tiles.n_out = l->n_rows;
    bg_cuda_pick_shapes(c, &l->tiles);
    float *row_scale = NULL;
    bg_status st = bg_cuda_take(c, &l->w, l->w_bytes, spec->name, err);
    if (!st) st = tables(c, l, spec, groups, n_groups, &row_scale, err);
    if (!st) st = bg_cuda_fast_linear_new(c, l, err);
    if (!st && l->half) st = upload_bias(c, l, spec, err);
    char *at = l->w;
    int64_t row0 = 0;
    for (int i = 0; !st && i < n_groups; i++) {
        st = load_group(c, l, &groups[i], row0, at, row_scale, err);
        row0 += groups[i].rows->n_rows;
        at += groups[i].n_tiles * groups[i].tile_bytes;
        row_scale += groups[i].n_tiles * TILE;
    }
    return st;
}

/* ---- tiled, block-diagonal ----------------------------------------------------------------------
 * A block's tiles have its rows alone. What a block reads begins at a multiple of 64 columns, or
 * its weights have columns of zeros before: so as halves. */

/* Groups of columns that all blocks' lie in. */
static int64_t all_groups(const bg_linear_spec *spec)
{
    return ((spec->n_blocks - 1) * spec->x_stride + spec->parts[0].n_cols + TILE - 1) / TILE;
}

/* The first of the n_chunks groups that block i reads; its columns begin there or later. */
static int64_t first_group(const bg_linear_spec *spec, int i, int64_t n_chunks)
{
    const int64_t first = i * spec->x_stride / TILE, last = all_groups(spec) - n_chunks;
    return first < last ? first : last;
}

static bool aligned_blocks(const bg_linear_spec *spec)
{
    return spec->x_stride % TILE == 0 || spec->n_blocks == 1;
}

/* As load_group() for one block whose columns begin within a group. */
static bg_status load_shifted(bg_cuda *c, const bg_linear *l, const bg_linear_part *p,
                              int64_t before, float *scratch, char *chunks, float *row_scale,
                              bg_error *err)
{
    const int64_t cols = (int64_t)l->tiles.n_chunks * TILE;
    float *values = scratch + p->n_rows * cols; /* [n_rows, n_cols] */
    bgk_source from[2] = {{.rows = scratch,
                           .type = BGK_GGUF_F32,
                           .n_rows = (int)p->n_rows,
                           .row_bytes = cols * (int64_t)sizeof(float)}};
    bgk_source rows[2];
    bg_status st = bg_cuda_load_rows(c, p, NULL, 0, p->n_rows, rows, err);
    if (st) return st;
    cudaError_t e = bgk_dequant(values, BGK_F32, rows, l->k, l->k, c->stream);
    if (e == cudaSuccess)
        e = cudaMemsetAsync(scratch, 0, (size_t)(p->n_rows * cols) * sizeof(float), c->stream);
    if (e == cudaSuccess)
        e = cudaMemcpy2DAsync(scratch + before, (size_t)cols * sizeof(float), values,
                              (size_t)l->k * sizeof(float), (size_t)l->k * sizeof(float),
                              (size_t)p->n_rows, cudaMemcpyDeviceToDevice, c->stream);
    if (e == cudaSuccess)
        e = bgk_repack(chunks, row_scale, BGK_W16, from, NULL, (int)cols, c->stream);
    st = bg_cuda_done(err, e, p->name);
    return st ? st : bg_cuda_load_used(c, p->name, err);
}

static bg_status load_blocks(bg_cuda *c, bg_linear *l, const bg_linear_spec *spec,
                             const group *each, char *at, float *row_scale, bg_error *err)
{
    const bg_linear_part *first = &spec->parts[0];
    const int64_t row = (int64_t)bg_qtype_row_bytes(first->type, first->k_total);
    group g = *each;
    bg_status st = BG_OK;
    if (aligned_blocks(spec) && first->n_rows % TILE == 0 &&
        spec->block_bytes == first->n_rows * row) { /* one matrix after another: a taller one */
        bg_linear_part all = *first;
        all.n_rows *= spec->n_blocks;
        all.n_total = all.n_rows;
        g.rows = &all;
        return load_group(c, l, &g, 0, at, row_scale, err);
    }
    float *scratch = NULL;
    const int64_t values = first->n_rows * ((int64_t)l->tiles.n_chunks * TILE + l->k);
    if (!aligned_blocks(spec) &&
        cudaMalloc((void **)&scratch, (size_t)values * sizeof *scratch + 1) != cudaSuccess)
        return bg_fail(err, BG_NOMEM, "%s: out of memory on the GPU", spec->name);
    for (int i = 0; !st && i < spec->n_blocks; i++) {
        const bg_linear_part p = block_of(spec, i);
        g.rows = &p;
        st = scratch
                 ? load_shifted(c, l, &p,
                                i * spec->x_stride - first_group(spec, i, l->tiles.n_chunks) * TILE,
                                scratch, at, row_scale, err)
                 : load_group(c, l, &g, 0, at, row_scale, err);
        at += g.n_tiles * g.tile_bytes;
        row_scale += g.n_tiles * TILE;
    }
    if (scratch) {
        cudaStreamSynchronize(c->stream);
        cudaFree(scratch);
    }
    return st;
}

static bg_status block_tables(bg_cuda *c, bg_linear *l, const bg_linear_spec *spec, const group *g,
                              float **row_scale, bg_error *err)
{
    const int64_t n = g->n_tiles * spec->n_blocks, rows = g->rows->n_rows;
    bgk_wtile *tiles = calloc((size_t)n + 1, sizeof *tiles), *to = NULL;
    if (!tiles) return bg_fail(err, BG_NOMEM, "%s: out of memory", spec->name);
    for (int64_t i = 0; i < n; i++) {
        const int64_t block = i / g->n_tiles, row = i % g->n_tiles * TILE;
        tiles[i] =
            (bgk_wtile){.w = (char *)l->w + i * g->tile_bytes,
                        .format = (int32_t)g->format,
                        .out0 = (int32_t)(block * rows + row),
                        .n_rows = (int32_t)(rows - row < TILE ? rows - row : TILE),
                        .x_chunk0 = (int32_t)first_group(spec, (int)block, l->tiles.n_chunks)};
    }
    bg_status st = bg_cuda_take(c, &to, (size_t)n * sizeof *to, spec->name, err);
    if (!st) st = bg_cuda_put(to, tiles, (size_t)n * sizeof *to, spec->name, err);
    if (!st)
        st = bg_cuda_take(c, row_scale, (size_t)n * TILE * sizeof **row_scale, spec->name, err);
    l->tiles.tiles = to;
    l->tiles.row_scale = *row_scale;
    free(tiles);
    return st;
}

static bg_status tiled_blocks(bg_cuda *c, bg_linear *l, const bg_linear_spec *spec, bg_error *err)
{
    const bg_linear_part *first = &spec->parts[0];
    bgk_weights *t = &l->tiles;
    group g = {.rows = first, .format = format_of(first, NULL)};
    if (!first->n_rows || !l->k) return BG_OK; /* nothing to multiply */
    if (!aligned_blocks(spec)) g.format = BGK_W16;
    for (int i = 0; i < spec->n_blocks; i++) { /* groups that its columns lie in */
        const int64_t chunks = (i * spec->x_stride % TILE + l->k + TILE - 1) / TILE;
        if (chunks > t->n_chunks) t->n_chunks = (int)chunks;
    }
    g.n_tiles = (first->n_rows + TILE - 1) / TILE;
    g.tile_bytes = (int64_t)t->n_chunks * bgk_chunk_bytes(g.format);
    if (g.n_tiles * spec->n_blocks > INT32_MAX / TILE)
        return bg_fail(err, BG_ARG, "%s: %d rows are too many", spec->name, l->n_rows);
    l->w_bytes = (uint64_t)(g.n_tiles * spec->n_blocks * g.tile_bytes);
    t->n_tiles = (int)(g.n_tiles * spec->n_blocks);
    t->block_tiles = (int)g.n_tiles;
    t->formats = 1u << g.format;
    t->splits = bg_cuda_splits(t->n_tiles, l->k);
    t->idle = c->ranks != NULL;
    t->n_out = l->n_rows;
    float *row_scale = NULL;
    bg_status st = bg_cuda_take(c, &l->w, l->w_bytes, spec->name, err);
    if (!st) st = block_tables(c, l, spec, &g, &row_scale, err);
    return st ? st : load_blocks(c, l, spec, &g, l->w, row_scale, err);
}

bg_status bg_cuda_linear_new(bg_backend *b, bg_linear **out, const bg_linear_spec *spec,
                             bg_error *err)
{
    bg_cuda *c = (bg_cuda *)b;
    *out = NULL;
    bg_status st = bg_cuda_grow(&c->linears, c->n_linears, &c->linears_cap, err);
    if (st) return st;
    bg_linear *l = calloc(1, sizeof *l);
    if (!l) return bg_fail(err, BG_NOMEM, "%s: out of memory", spec->name);
    c->linears[c->n_linears++] = l; /* freed with the backend from here on */
    l->name = strdup(spec->name);
    int64_t rows = 0, k = spec->n_parts ? spec->parts[0].n_cols : 0;
    for (int i = 0; i < spec->n_parts; i++) {
        const bg_linear_part *p = &spec->parts[i];
        if (!bg_qtype_get(p->type)->dequant)
            return bg_fail(err, BG_ARG, "%s: type %u cannot be used", p->name, (unsigned)p->type);
        if (p->n_cols != k)
            return bg_fail(err, BG_INTERNAL, "%s: %lld columns, its neighbour has %lld", p->name,
                           (long long)p->n_cols, (long long)k);
        rows += p->n_rows;
    }
    if (spec->n_blocks) {
        if (spec->n_parts != 1 || spec->parts[0].bias || spec->glu || spec->x_stride < k)
            return bg_fail(err, BG_INTERNAL, "%s: no block-diagonal linear", spec->name);
        rows *= spec->n_blocks;
    }
    if (!l->name || rows > INT32_MAX || k > INT32_MAX - BGK_K_PAD)
        return bg_fail(err, l->name ? BG_ARG : BG_NOMEM, "%s: [%lld, %lld] is too large",
                       spec->name, (long long)rows, (long long)k);
    l->n_rows = (int)rows;
    l->k = (int)k;
    l->k_padded = (int)((k + BGK_K_PAD - 1) / BGK_K_PAD * BGK_K_PAD);
    l->n_in = l->k;
    l->n_weights = (uint64_t)rows * (uint64_t)k;
    if (spec->n_blocks) {
        l->n_blocks = spec->n_blocks;
        l->x_stride = (int)spec->x_stride;
        l->n_in = (int)((spec->n_blocks - 1) * spec->x_stride + k);
    }
    if (!c->tiled)
        st = plain_linear(c, l, spec, err);
    else
        st = spec->n_blocks ? tiled_blocks(c, l, spec, err) : tiled_linear(c, l, spec, err);
    if (!st) *out = l;
    return st;
}

int64_t bg_cuda_linear_rows(const bg_linear *l)
{
    return l->n_rows;
}

bg_status bg_cuda_embedding_new(bg_backend *b, bg_embedding **e, const bg_tensor *t, bg_error *err)
{
    bg_cuda *c = (bg_cuda *)b;
    *e = NULL;
    const bg_qtype_info *info = bg_qtype_get(t->type);
    if (!info->dequant || t->ne[0] % info->block_values != 0)
        return bg_fail(err, BG_ARG, "%s: type %s with rows of %lld values cannot be looked up",
                       t->cname, info->name ? info->name : "unknown", (long long)t->ne[0]);
    if (t->ne[1] < c->config.vocab_size)
        return bg_fail(err, BG_ARG, "%s: %lld rows for a vocabulary of %d", t->cname,
                       (long long)t->ne[1], c->config.vocab_size);
    bg_status st = bg_cuda_grow(&c->embeddings, c->n_embeddings, &c->embeddings_cap, err);
    bg_embedding *made = st ? NULL : calloc(1, sizeof *made);
    if (st) return st;
    if (!made) return bg_fail(err, BG_NOMEM, "%s: out of memory", t->cname);
    c->embeddings[c->n_embeddings++] = made;
    void *table = NULL;
    st = bg_cuda_take(c, &table, (size_t)t->ne[1] * (size_t)t->ne[0] * weight_bytes(c), t->cname,
                      err);
    const bg_linear_part all = {.name = t->cname,
                                .type = t->type,
                                .data = t->data,
                                .k_total = t->ne[0],
                                .n_total = t->ne[1],
                                .n_rows = t->ne[1],
                                .n_cols = t->ne[0]};
    if (!st) st = bg_cuda_load_values(c, table, &all, t->ne[0], err);
    *made = (bg_embedding){.data = table, .vocab = t->ne[1], .cols = t->ne[0]};
    if (!st) *e = made;
    return st;
}
