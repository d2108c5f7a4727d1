/* Weights: linears and the embedding table, from GGUF blocks to what the kernels read. */
#include "backend/cuda/cuda.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/f16.h"
#include "gguf/gguf.h"

static size_t weight_bytes(const bg_cuda *c)
{
    return c->weights == BGK_F32 ? sizeof(float) : sizeof(uint16_t);
}

/* One row's values [0, n) from floats; what is behind, up to padded, becomes 0. */
static void put_row(const bg_cuda *c, void *to, const float *from, int64_t n, int64_t padded)
{
    if (c->weights == BGK_F32) {
        memcpy(to, from, (size_t)n * sizeof *from);
        memset((float *)to + n, 0, (size_t)(padded - n) * sizeof *from);
        return;
    }
    uint16_t *half = to;
    for (int64_t i = 0; i < n; i++)
        half[i] = bg_f32_to_f16(from[i]);
    memset(half + n, 0, (size_t)(padded - n) * sizeof *half);
}

/* Dequantises rows [row0, row0 + n) of a matrix with k_total columns, of each the columns from col0
 * on, and copies them to the device in pieces. */
static bg_status upload(bg_cuda *c, void *to, const bg_linear_part *p, int64_t k_padded,
                        bg_error *err)
{
    enum { PIECE = 256 };
    const size_t row_bytes = bg_qtype_row_bytes(p->type, p->k_total), size = weight_bytes(c);
    float *values = malloc((size_t)p->k_total * sizeof *values);
    char *piece = malloc(PIECE * (size_t)k_padded * size);
    if (!values || !piece) {
        free(values);
        free(piece);
        return bg_fail(err, BG_NOMEM, "%s: out of memory", p->name);
    }
    bg_status st = BG_OK;
    for (int64_t r = 0; !st && r < p->n_rows; r += PIECE) {
        const int64_t n = p->n_rows - r < PIECE ? p->n_rows - r : PIECE;
        for (int64_t i = 0; i < n; i++) {
            const char *from = (const char *)p->data + (size_t)(p->row0 + r + i) * row_bytes;
            bg_dequant_row(p->type, from, values, p->k_total);
            put_row(c, piece + (size_t)i * (size_t)k_padded * size, values + p->col0, p->n_cols,
                    k_padded);
        }
        st = bg_cuda_put((char *)to + (size_t)r * (size_t)k_padded * size, piece,
                         (size_t)n * (size_t)k_padded * size, p->name, err);
    }
    free(values);
    free(piece);
    return st;
}

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
    if (!l->name || rows > INT32_MAX || k > INT32_MAX - BGK_K_PAD)
        return bg_fail(err, l->name ? BG_ARG : BG_NOMEM, "%s: [%lld, %lld] is too large",
                       spec->name, (long long)rows, (long long)k);
    l->n_rows = (int)rows;
    l->k = (int)k;
    l->k_padded = (int)((k + BGK_K_PAD - 1) / BGK_K_PAD * BGK_K_PAD);
    const size_t row_bytes = (size_t)l->k_padded * weight_bytes(c);
    l->w_bytes = (uint64_t)rows * row_bytes;
    l->n_weights = (uint64_t)(rows * k);
    st = bg_cuda_take(c, &l->w, (size_t)rows * row_bytes, spec->name, err);
    char *at = l->w;
    for (int i = 0; !st && i < spec->n_parts; i++) {
        if (k) st = upload(c, at, &spec->parts[i], l->k_padded, err);
        at += (size_t)spec->parts[i].n_rows * row_bytes;
    }
    if (!st) st = upload_bias(c, l, spec, err);
    const int most =
        c->config.max_tokens > c->config.max_out ? c->config.max_tokens : c->config.max_out;
    const size_t scratch = (size_t)most * (size_t)l->k_padded * sizeof(uint16_t);
    if (!st && scratch > c->scratch_bytes) { /* a narrower one stays until the backend ends */
        st = bg_cuda_take(c, &c->scratch, scratch, "scratch", err);
        c->scratch_bytes = st ? 0 : scratch;
    }
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
    if (!st) st = upload(c, table, &all, t->ne[0], err);
    *made = (bg_embedding){.data = table, .vocab = t->ne[1], .cols = t->ne[0]};
    if (!st) *e = made;
    return st;
}
