/* The CUDA backend: objects, the step, and ops as calls of kernels.
 *
 * Everything goes out on one stream, in order; only fetches wait. Weights are dequantised at load
 * to half (proof mode: float32); activations and sums are float32. */
#include "backend/cuda/cuda.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/f16.h"
#include "gguf/gguf.h"

static bg_status cuda_fail(bg_error *err, cudaError_t e, const char *what)
{
    return bg_fail(err, e == cudaErrorMemoryAllocation ? BG_NOMEM : BG_DEVICE, "%s: CUDA: %s", what,
                   cudaGetErrorString(e));
}

static bg_status done(bg_error *err, cudaError_t e, const char *what)
{
    return e == cudaSuccess ? BG_OK : cuda_fail(err, e, what);
}

/* ---- memory ---------------------------------------------------------------------------------- */

/* Room for one more pointer in the array that *list points to. */
static bg_status grow(void *list, size_t n, size_t *cap, bg_error *err)
{
    void ***array = list;
    if (n < *cap) return BG_OK;
    const size_t more = *cap ? 2 * *cap : 64;
    void **p = realloc(*array, more * sizeof *p);
    if (!p) return bg_fail(err, BG_NOMEM, "out of memory for %zu objects", more);
    *array = p;
    *cap = more;
    return BG_OK;
}

static bg_status take(bg_cuda *c, void *p, size_t bytes, const char *what, bg_error *err)
{
    void *at = NULL;
    bg_status st = grow(&c->memory, c->n_memory, &c->memory_cap, err);
    if (st) return st;
    cudaError_t e = cudaMalloc(&at, bytes ? bytes : 1);
    if (e != cudaSuccess)
        return bg_fail(err, BG_NOMEM, "%s: %zu bytes on GPU %d: %s", what, bytes, c->device,
                       cudaGetErrorString(e));
    c->memory[c->n_memory++] = at;
    c->bytes += bytes;
    memcpy(p, &at, sizeof at); /* into a pointer of any type */
    return BG_OK;
}

static bg_status put(void *to, const void *from, size_t bytes, const char *what, bg_error *err)
{
    return done(err, cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), what);
}

static void cuda_free(bg_backend *b)
{
    bg_cuda *c = (bg_cuda *)b;
    if (c->stream) cudaStreamSynchronize(c->stream);
    for (size_t i = 0; i < c->n_memory; i++)
        cudaFree(c->memory[i]);
    free(c->memory);
    for (size_t i = 0; i < c->n_linears; i++) {
        free(c->linears[i]->name);
        free(c->linears[i]);
    }
    free(c->linears);
    for (size_t i = 0; i < c->n_embeddings; i++)
        free(c->embeddings[i]);
    free(c->embeddings);
    if (c->host_step) cudaFreeHost(c->host_step);
    if (c->host_logits) cudaFreeHost(c->host_logits);
    if (c->stream) cudaStreamDestroy(c->stream);
    bg_steps_release(&c->s);
    free(c->results);
    free(c->sampler.logits);
    free(c->sampler.chunk_max);
    free(c->sampler.keys);
    free(c->sampler.count);
    free(c);
}

static uint64_t cuda_memory(const bg_backend *b)
{
    return ((const bg_cuda *)b)->bytes;
}

/* ---- objects --------------------------------------------------------------------------------- */

static bg_status cuda_act_new(bg_backend *b, bg_act *a, const char *name, int64_t max_rows,
                              int64_t cols, bg_error *err)
{
    *a = (bg_act){0};
    if (max_rows < 0 || cols < 0 || (cols > 0 && max_rows > INT64_MAX / 16 / cols))
        return bg_fail(err, BG_INTERNAL, "%s: [%lld, %lld] is no shape", name, (long long)max_rows,
                       (long long)cols);
    void *data = NULL;
    bg_status st = take((bg_cuda *)b, &data, (size_t)(max_rows * cols) * sizeof(float), name, err);
    if (!st) *a = (bg_act){data, max_rows, cols, name};
    return st;
}

static bg_status cuda_vec_new(bg_backend *b, bg_vec *v, const char *name, const float *host,
                              int64_t n, bg_error *err)
{
    *v = (bg_vec){0};
    float *data = NULL;
    if (n < 0) return bg_fail(err, BG_INTERNAL, "%s: %lld values", name, (long long)n);
    bg_status st = take((bg_cuda *)b, &data, (size_t)n * sizeof *data, name, err);
    if (!st && n) st = put(data, host, (size_t)n * sizeof *data, name, err);
    if (!st) *v = (bg_vec){data, n, name};
    return st;
}

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
        st = put((char *)to + (size_t)r * (size_t)k_padded * size, piece,
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
    bg_status st = take(c, &l->bias, (size_t)l->n_rows * sizeof *host, spec->name, err);
    if (!st) st = put(l->bias, host, (size_t)l->n_rows * sizeof *host, spec->name, err);
    free(host);
    return st;
}

static bg_status cuda_linear_new(bg_backend *b, bg_linear **out, const bg_linear_spec *spec,
                                 bg_error *err)
{
    bg_cuda *c = (bg_cuda *)b;
    *out = NULL;
    bg_status st = grow(&c->linears, c->n_linears, &c->linears_cap, err);
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
    st = take(c, &l->w, (size_t)rows * row_bytes, spec->name, err);
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
        st = take(c, &c->scratch, scratch, "scratch", err);
        c->scratch_bytes = st ? 0 : scratch;
    }
    if (!st) *out = l;
    return st;
}

static int64_t cuda_linear_rows(const bg_linear *l)
{
    return l->n_rows;
}

static bg_status cuda_embedding_new(bg_backend *b, bg_embedding **e, const bg_tensor *t,
                                    bg_error *err)
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
    bg_status st = grow(&c->embeddings, c->n_embeddings, &c->embeddings_cap, err);
    bg_embedding *made = st ? NULL : calloc(1, sizeof *made);
    if (st) return st;
    if (!made) return bg_fail(err, BG_NOMEM, "%s: out of memory", t->cname);
    c->embeddings[c->n_embeddings++] = made;
    void *table = NULL;
    st = take(c, &table, (size_t)t->ne[1] * (size_t)t->ne[0] * weight_bytes(c), t->cname, err);
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

/* Offsets of the step's arrays in one buffer, so that one copy brings them all. */
static bg_status make_step(bg_cuda *c, bg_error *err)
{
    const size_t t = (size_t)c->config.max_tokens, q = (size_t)c->config.max_seqs;
    const size_t o = (size_t)c->config.max_out;
    c->step_ints = 3 * t + q + o + c->s.blocks_cap;
    bg_status st = take(c, &c->step, c->step_ints * sizeof *c->step, "step", err);
    if (!st)
        st = done(err, cudaMallocHost((void **)&c->host_step, c->step_ints * sizeof *c->step),
                  "step");
    if (st) return st;
    c->ids = c->step;
    c->pos = c->ids + t;
    c->seq = c->pos + t;
    c->block0 = c->seq + t;
    c->out_row = c->block0 + q;
    c->blocks = c->out_row + o;
    return BG_OK;
}

static bg_status cuda_cache_new(bg_backend *b, const bg_cache_spec *spec, bg_error *err)
{
    static const bgk_type types[] = {
        [BG_CACHE_F16] = BGK_F16, [BG_CACHE_BF16] = BGK_BF16, [BG_CACHE_F32] = BGK_F32};
    bg_cuda *c = (bg_cuda *)b;
    if (c->has_cache) return bg_fail(err, BG_INTERNAL, "a backend has one KV cache");
    const size_t elem = spec->type == BG_CACHE_F32 ? 4 : 2;
    const size_t slots = (size_t)spec->n_layers * (size_t)spec->n_blocks *
                         (size_t)spec->n_kv_heads * (size_t)spec->block_tokens;
    c->cache = (bgk_cache){.type = types[spec->type],
                           .n_blocks = spec->n_blocks,
                           .n_kv_heads = spec->n_kv_heads,
                           .block_tokens = spec->block_tokens,
                           .k_dim = spec->k_dim,
                           .v_dim = spec->v_dim};
    c->n_layers = spec->n_layers;
    bg_status st = take(c, &c->cache.k, slots * (size_t)spec->k_dim * elem, "KV cache", err);
    if (!st) st = take(c, &c->cache.v, slots * (size_t)spec->v_dim * elem, "KV cache", err);
    if (!st) st = bg_steps_cache(&c->s, spec, err);
    if (!st) st = make_step(c, err);
    c->has_cache = !st;
    return st;
}

/* ---- slots and the step ---------------------------------------------------------------------- */

static bg_status cuda_slot_seat(bg_backend *b, int slot, const bg_sampling *s,
                                const int32_t *tokens, int n_tokens, int n_generated, bg_error *err)
{
    bg_cuda *c = (bg_cuda *)b;
    return bg_steps_seat(&c->s, slot, s, tokens, n_tokens, n_generated, err);
}

static bg_status cuda_begin_step(bg_backend *b, const bg_batch *batch, bg_error *err)
{
    bg_cuda *c = (bg_cuda *)b;
    c->sampled = c->has_logits = false;
    if (!c->has_cache) return bg_fail(err, BG_INTERNAL, "step: before the KV cache");
    bg_status st = bg_steps_begin(&c->s, batch, err);
    if (st) return st;
    /* The copy before this one has been read: fetch waited for its step. Without a fetch (pieces of
     * prompts) nothing has, so wait here. */
    st = done(err, cudaStreamSynchronize(c->stream), "step");
    if (st) return st;
    const bg_steps *s = &c->s;
    int32_t *host = c->host_step;
    const ptrdiff_t pos = c->pos - c->step, seq = c->seq - c->step, block0 = c->block0 - c->step;
    const ptrdiff_t out = c->out_row - c->step, blocks = c->blocks - c->step;
    int32_t at = 0;
    for (int i = 0; i < s->n_seqs; i++) {
        const bg_step_seq *q = &s->seqs[i];
        host[block0 + i] = at;
        if (s->block_tokens) at += (q->pos0 + q->n_tokens + s->block_tokens - 1) / s->block_tokens;
    }
    for (int i = 0; i < s->n_rows; i++) {
        const bg_step_seq *q = &s->seqs[s->row_seq[i]];
        host[i] = s->slots[q->slot].tokens[s->row_pos[i]];
        host[pos + i] = s->row_pos[i];
        host[seq + i] = s->row_seq[i];
    }
    memcpy(host + out, s->out_row, (size_t)s->n_out * sizeof *host);
    memcpy(host + blocks, s->blocks, s->n_block_ids * sizeof *host);
    c->rows = (bgk_rows){c->pos, c->seq, c->blocks, c->block0, s->n_rows};
    return done(err,
                cudaMemcpyAsync(c->step, host, ((size_t)blocks + s->n_block_ids) * sizeof *host,
                                cudaMemcpyHostToDevice, c->stream),
                "step");
}

static int cuda_n_rows(const bg_backend *b)
{
    return ((const bg_cuda *)b)->s.n_rows;
}

static int cuda_n_out(const bg_backend *b)
{
    return ((const bg_cuda *)b)->s.n_out;
}

/* ---- ops ------------------------------------------------------------------------------------- */

static bg_status fits(const bg_act *a, int64_t rows, int64_t cols, const char *op, bg_error *err)
{
    if (rows <= a->max_rows && cols <= a->cols) return BG_OK;
    return bg_fail(err, BG_INTERNAL, "op %s: %s is [%lld, %lld], [%lld, %lld] are needed", op,
                   a->name, (long long)a->max_rows, (long long)a->cols, (long long)rows,
                   (long long)cols);
}

static bg_status cuda_embed(bg_backend *b, bg_act *out, const bg_embedding *e, float scale,
                            bg_error *err)
{
    bg_cuda *c = (bg_cuda *)b;
    bg_status st = fits(out, c->s.n_rows, e->cols, "embed", err);
    if (st) return st;
    return done(err,
                bgk_embed(out->data, out->cols, e->data, c->weights, c->ids, scale, c->s.n_rows,
                          (int)e->cols, c->stream),
                "op embed");
}

static bg_status cuda_rms_norm(bg_backend *b, bg_act *out, const bg_act *x, const bg_vec *w,
                               float eps, int n_rows, bg_error *err)
{
    bg_cuda *c = (bg_cuda *)b;
    bg_status st = fits(out, n_rows, w->n, "rms_norm", err);
    if (!st) st = fits(x, n_rows, w->n, "rms_norm", err);
    if (st) return st;
    return done(err,
                bgk_rms_norm(out->data, out->cols, x->data, x->cols, NULL, 0, w->data, eps, n_rows,
                             (int)w->n, c->stream),
                "op rms_norm");
}

static bg_status cuda_add(bg_backend *b, bg_act *x, const bg_act *y, bg_error *err)
{
    bg_cuda *c = (bg_cuda *)b;
    bg_status st = fits(y, c->s.n_rows, x->cols, "add", err);
    if (!st) st = fits(x, c->s.n_rows, x->cols, "add", err);
    if (st) return st;
    return done(err,
                bgk_add(x->data, x->cols, y->data, y->cols, c->s.n_rows, (int)x->cols, c->stream),
                "op add");
}

static bg_status cuda_add_rms_norm(bg_backend *b, bg_act *out, bg_act *x, const bg_act *y,
                                   const bg_vec *w, float eps, bg_error *err)
{
    bg_cuda *c = (bg_cuda *)b;
    bg_status st = fits(out, c->s.n_rows, w->n, "add_rms_norm", err);
    if (!st) st = fits(x, c->s.n_rows, w->n, "add_rms_norm", err);
    if (!st) st = fits(y, c->s.n_rows, w->n, "add_rms_norm", err);
    if (st) return st;
    return done(err,
                bgk_rms_norm(out->data, out->cols, x->data, x->cols, y->data, y->cols, w->data, eps,
                             c->s.n_rows, (int)w->n, c->stream),
                "op add_rms_norm");
}

static bg_status run_linear(bg_cuda *c, float *out, int64_t out_cols, const bg_linear *l,
                            const bg_act *x, int n_rows, bg_error *err)
{
    if (!n_rows || !l->n_rows) return BG_OK;
    if (!l->k) { /* a rank with nothing to sum: the bias, or 0 */
        cudaError_t e = cudaSuccess;
        for (int r = 0; r < n_rows && e == cudaSuccess; r++)
            e = l->bias
                    ? cudaMemcpyAsync(out + r * out_cols, l->bias, (size_t)l->n_rows * sizeof *out,
                                      cudaMemcpyDeviceToDevice, c->stream)
                    : cudaMemsetAsync(out + r * out_cols, 0, (size_t)l->n_rows * sizeof *out,
                                      c->stream);
        return done(err, e, l->name);
    }
    return done(err,
                bgk_linear(out, out_cols, l->w, c->weights, l->bias, x->data, x->cols, n_rows,
                           l->n_rows, l->k, l->k_padded, c->scratch, c->stream),
                l->name);
}

static bg_status cuda_linear(bg_backend *b, bg_act *out, const bg_linear *l, const bg_act *x,
                             int n_rows, bg_error *err)
{
    bg_status st = fits(out, n_rows, l->n_rows, "linear", err);
    if (!st) st = fits(x, n_rows, l->k, "linear", err);
    return st ? st : run_linear((bg_cuda *)b, out->data, out->cols, l, x, n_rows, err);
}

/* A rotation's frequencies on the device, brought there at their first use. */
static bg_status freq_of(bg_cuda *c, const bg_rope *rope, const float **out, bg_error *err)
{
    const int n = rope->n_rot / 2;
    for (int i = 0; i < c->n_freqs; i++)
        if (c->freqs[i].host == rope->freq && c->freqs[i].n == n) {
            *out = c->freqs[i].device;
            return BG_OK;
        }
    if (c->n_freqs == (int)(sizeof c->freqs / sizeof *c->freqs))
        return bg_fail(err, BG_INTERNAL, "more rotations than any model has");
    float *device = NULL;
    bg_status st = take(c, &device, (size_t)n * sizeof *device, "rope", err);
    if (!st) st = put(device, rope->freq, (size_t)n * sizeof *device, "rope", err);
    if (st) return st;
    c->freqs[c->n_freqs].host = rope->freq;
    c->freqs[c->n_freqs].device = device;
    c->freqs[c->n_freqs++].n = n;
    *out = device;
    return BG_OK;
}

static bg_status check_layer(const bg_cuda *c, int layer, int n_kv, int k_dim, int v_dim,
                             const char *op, bg_error *err)
{
    if (layer >= 0 && layer < c->n_layers && n_kv == c->cache.n_kv_heads &&
        k_dim == c->cache.k_dim && v_dim == c->cache.v_dim)
        return BG_OK;
    return bg_fail(
        err, BG_INTERNAL,
        "op %s: layer %d with %d KV heads of %d and %d does not fit the cache: %d layers, %d "
        "heads of %d and %d",
        op, layer, n_kv, k_dim, v_dim, c->n_layers, c->cache.n_kv_heads, c->cache.k_dim,
        c->cache.v_dim);
}

static bg_status cuda_rope_store(bg_backend *b, bg_act *q_out, const bg_act *qkv,
                                 const bg_attn_in *p, bg_error *err)
{
    bg_cuda *c = (bg_cuda *)b;
    const int64_t q_cols = (int64_t)p->n_heads * p->head_dim;
    const int64_t cols = q_cols + (int64_t)p->n_kv_heads * (p->head_dim + p->v_dim);
    const float *freq = NULL;
    bg_status st =
        check_layer(c, p->layer, p->n_kv_heads, p->head_dim, p->v_dim, "rope_store", err);
    if (!st) st = fits(q_out, c->s.n_rows, q_cols, "rope_store", err);
    if (!st) st = fits(qkv, c->s.n_rows, cols, "rope_store", err);
    if (!st && p->rope) st = freq_of(c, p->rope, &freq, err);
    if (st) return st;
    return done(err,
                bgk_rope_store(q_out->data, q_out->cols, qkv->data, qkv->cols, &c->cache, &c->rows,
                               p->layer, p->n_heads, p->q_norm ? p->q_norm->data : NULL,
                               p->k_norm ? p->k_norm->data : NULL, p->norm_eps, freq,
                               p->rope ? p->rope->n_rot : 0, p->rope && p->rope->neox,
                               p->rope ? p->rope->mscale : 1.0f, c->stream),
                "op rope_store");
}

static bg_status cuda_attention(bg_backend *b, bg_act *out, const bg_act *q, const bg_attn *p,
                                bg_error *err)
{
    bg_cuda *c = (bg_cuda *)b;
    if (!p->n_heads) return BG_OK;
    bg_status st = check_layer(c, p->layer, p->n_kv_heads, p->head_dim, p->v_dim, "attention", err);
    if (!st) st = fits(out, c->s.n_rows, (int64_t)p->n_heads * p->v_dim, "attention", err);
    if (!st) st = fits(q, c->s.n_rows, (int64_t)p->n_heads * p->head_dim, "attention", err);
    if (st) return st;
    return done(err,
                bgk_attention(out->data, out->cols, q->data, q->cols, &c->cache, &c->rows, p->layer,
                              p->n_heads, p->head0, p->kv_head0, p->group, p->scale, p->softcap,
                              p->window, p->sinks ? p->sinks->data : NULL, c->stream),
                "op attention");
}

static bg_status cuda_glu(bg_backend *b, bg_act *out, const bg_act *gate_up, bg_act_fn fn,
                          bg_error *err)
{
    static const bgk_act fns[] = {
        [BG_SILU] = BGK_SILU, [BG_GELU_TANH] = BGK_GELU_TANH, [BG_GELU_ERF] = BGK_GELU_ERF};
    bg_cuda *c = (bg_cuda *)b;
    bg_status st = fits(gate_up, c->s.n_rows, 2 * out->cols, "glu", err);
    if (!st) st = fits(out, c->s.n_rows, out->cols, "glu", err);
    if (st) return st;
    return done(err,
                bgk_glu(out->data, out->cols, gate_up->data, gate_up->cols, fns[fn], c->s.n_rows,
                        (int)out->cols, c->stream),
                "op glu");
}

static bg_status cuda_all_reduce(bg_backend *b, bg_act *x, bg_error *err)
{
    const bg_cuda *c = (const bg_cuda *)b;
    if (!c->config.comm || bg_comm_size(c->config.comm) == 1) return BG_OK;
    return bg_fail(err, BG_ARG, "op all_reduce: %s: several GPUs are not supported yet", x->name);
}

static bg_status cuda_gather_out(bg_backend *b, bg_act *out, const bg_act *x, bg_error *err)
{
    bg_cuda *c = (bg_cuda *)b;
    bg_status st = fits(out, c->s.n_out, x->cols, "gather_out", err);
    if (st) return st;
    return done(err,
                bgk_gather(out->data, out->cols, x->data, x->cols, c->out_row, c->s.n_out,
                           (int)x->cols, c->stream),
                "op gather_out");
}

static bool cuda_all_finite(bg_backend *b, const bg_act *a, int64_t rows, int64_t cols,
                            int64_t *row, int64_t *col);

static bg_status cuda_logits(bg_backend *b, const bg_linear *head, const bg_act *x,
                             const int64_t *rank_rows, float softcap, bg_error *err)
{
    bg_cuda *c = (bg_cuda *)b;
    const int64_t vocab = c->config.vocab_size;
    if (head->n_rows != vocab || (rank_rows && rank_rows[0] != vocab))
        return bg_fail(err, BG_INTERNAL, "op logits: the head has %d rows, the vocabulary is %lld",
                       head->n_rows, (long long)vocab);
    bg_status st = fits(x, c->s.n_out, head->k, "logits", err);
    c->has_logits = true;
    if (st || !c->s.n_out) return st;
    bg_act all = {c->logits, c->s.n_out, vocab, "logits"};
    if (b->check) b->ops->poison(b, &all, c->s.n_out);
    st = run_linear(c, c->logits, vocab, head, x, c->s.n_out, err);
    if (!st && softcap > 0)
        st = done(err, bgk_softcap(c->logits, c->s.n_out * vocab, softcap, c->stream), "op logits");
    int64_t row = 0, col = 0;
    if (!st && b->check && !cuda_all_finite(b, &all, c->s.n_out, vocab, &row, &col))
        st = bg_fail(err, BG_INTERNAL, "op logits: logits[%lld, %lld] is not finite after it",
                     (long long)row, (long long)col);
    return st;
}

/* On the host, by the CPU backend's sampler: the same tokens from the same logits. */
static bg_status cuda_sample(bg_backend *b, bg_error *err)
{
    bg_cuda *c = (bg_cuda *)b;
    const int vocab = c->config.vocab_size;
    if (!c->has_logits || c->s.all_logits || c->sampled)
        return bg_fail(err, BG_INTERNAL, "op sample: %s",
                       c->sampled        ? "twice in a step"
                       : c->s.all_logits ? "all rows yield logits in this step"
                                         : "before the step's logits");
    bg_status st = b->ops->fetch_logits(b, c->host_logits, err);
    const bg_kernels *kernels = bg_isa_best() >= BG_ISA_AVX512 ? &bg_kernels_avx512
                                : bg_isa_best() == BG_ISA_AVX2 ? &bg_kernels_avx2
                                                               : &bg_kernels_plain;
    for (int i = 0; !st && i < c->s.n_out; i++) {
        const int slot = c->s.seqs[c->s.out_seq[i]].slot;
        c->results[i].slot = slot;
        bg_sample_row(&c->sampler, kernels, c->host_logits + (size_t)i * (size_t)vocab, vocab,
                      &c->s.slots[slot], &c->results[i]);
    }
    for (int i = 0; !st && i < c->s.n_out; i++)
        bg_steps_append(&c->s, c->results[i].slot, c->results[i].token);
    c->sampled = !st;
    return st;
}

static bg_status cuda_fetch(bg_backend *b, bg_sampled *out, int *n, bg_error *err)
{
    bg_cuda *c = (bg_cuda *)b;
    *n = 0;
    if (!c->sampled && c->s.n_out > 0)
        return bg_fail(err, BG_INTERNAL, "fetch: nothing was sampled in this step");
    if (c->sampled && c->s.n_out > 0) memcpy(out, c->results, (size_t)c->s.n_out * sizeof *out);
    *n = c->s.n_out;
    return BG_OK;
}

static bg_status cuda_fetch_logits(bg_backend *b, float *out, bg_error *err)
{
    bg_cuda *c = (bg_cuda *)b;
    if (!c->has_logits) return bg_fail(err, BG_INTERNAL, "fetch_logits: before the step's logits");
    const size_t bytes = (size_t)c->s.n_out * (size_t)c->config.vocab_size * sizeof *out;
    cudaError_t e = cudaMemcpyAsync(out, c->logits, bytes, cudaMemcpyDeviceToHost, c->stream);
    if (e == cudaSuccess) e = cudaStreamSynchronize(c->stream);
    return done(err, e, "fetch_logits");
}

static void cuda_poison(bg_backend *b, bg_act *a, int64_t rows)
{
    bg_cuda *c = (bg_cuda *)b;
    bgk_poison(a->data, rows * a->cols, c->stream);
}

static bool cuda_all_finite(bg_backend *b, const bg_act *a, int64_t rows, int64_t cols,
                            int64_t *row, int64_t *col)
{
    bg_cuda *c = (bg_cuda *)b;
    unsigned long long bad = ~0ull;
    *row = *col = 0;
    if (!rows || !cols) return true;
    cudaMemcpyAsync(c->bad, &bad, sizeof bad, cudaMemcpyHostToDevice, c->stream);
    bgk_find_bad(c->bad, a->data, a->cols, rows, cols, c->stream);
    cudaMemcpyAsync(&bad, c->bad, sizeof bad, cudaMemcpyDeviceToHost, c->stream);
    if (cudaStreamSynchronize(c->stream) != cudaSuccess) return false;
    if (bad == ~0ull) return true;
    *row = (int64_t)(bad / (unsigned long long)cols);
    *col = (int64_t)(bad % (unsigned long long)cols);
    return false;
}

static void cuda_sync(bg_backend *b)
{
    cudaStreamSynchronize(((bg_cuda *)b)->stream);
}

static const bg_ops cuda_ops = {
    .name = "cuda",
    .free = cuda_free,
    .act_new = cuda_act_new,
    .vec_new = cuda_vec_new,
    .linear_new = cuda_linear_new,
    .embedding_new = cuda_embedding_new,
    .cache_new = cuda_cache_new,
    .slot_seat = cuda_slot_seat,
    .begin_step = cuda_begin_step,
    .n_rows = cuda_n_rows,
    .n_out = cuda_n_out,
    .embed = cuda_embed,
    .rms_norm = cuda_rms_norm,
    .add = cuda_add,
    .add_rms_norm = cuda_add_rms_norm,
    .linear = cuda_linear,
    .rope_store = cuda_rope_store,
    .attention = cuda_attention,
    .glu = cuda_glu,
    .all_reduce = cuda_all_reduce,
    .gather_out = cuda_gather_out,
    .logits = cuda_logits,
    .sample = cuda_sample,
    .fetch = cuda_fetch,
    .fetch_logits = cuda_fetch_logits,
    .poison = cuda_poison,
    .all_finite = cuda_all_finite,
    .sync = cuda_sync,
    .linear_rows = cuda_linear_rows,
    .memory = cuda_memory,
};

/* ---- making one ------------------------------------------------------------------------------ */

static bg_status make_sampling(bg_cuda *c, bg_error *err)
{
    const size_t vocab = (size_t)c->config.vocab_size, max_out = (size_t)c->config.max_out;
    bg_sampler *s = &c->sampler;
    s->logits = calloc(vocab, sizeof *s->logits);
    s->keys = calloc(vocab, sizeof *s->keys);
    s->count = calloc(vocab, sizeof *s->count);
    s->chunk_max = calloc(vocab / BG_CHUNK_TOKENS + 1, sizeof *s->chunk_max);
    c->results = calloc(max_out, sizeof *c->results);
    if (!s->logits || !s->keys || !s->count || !s->chunk_max || !c->results)
        return bg_fail(err, BG_NOMEM, "sampler: out of memory");
    bg_status st = take(c, &c->logits, max_out * vocab * sizeof(float), "logits", err);
    if (!st) st = take(c, &c->bad, sizeof *c->bad, "check", err);
    if (!st)
        st = done(err, cudaMallocHost((void **)&c->host_logits, max_out * vocab * sizeof(float)),
                  "logits");
    return st;
}

bg_status bg_cuda_backend_new(bg_backend **b, const bg_backend_config *config, int device,
                              bg_error *err)
{
    *b = NULL;
    if (config->max_tokens < 1 || config->max_seqs < 1 || config->max_out < 1 ||
        config->max_ctx < 1 || config->vocab_size < 1)
        return bg_fail(
            err, BG_ARG,
            "backend: %d tokens, %d sequences, %d rows of logits, %d positions, a vocabulary "
            "of %d: all must be positive",
            config->max_tokens, config->max_seqs, config->max_out, config->max_ctx,
            config->vocab_size);
    bg_status st = done(err, cudaSetDevice(device), "choosing the GPU");
    if (st) return st;
    bg_cuda *c = calloc(1, sizeof *c);
    if (!c) return bg_fail(err, BG_NOMEM, "backend: out of memory");
    c->base.ops = &cuda_ops;
    c->base.check = config->check;
    c->base.profile = config->profile;
    c->config = *config;
    c->device = device;
    c->weights = config->compute == BG_COMPUTE_F32 ? BGK_F32 : BGK_F16;
    st = done(err, cudaStreamCreateWithFlags(&c->stream, cudaStreamNonBlocking), "stream");
    if (!st) st = bg_steps_init(&c->s, config, err);
    if (!st) st = make_sampling(c, err);
    if (st) {
        cuda_free(&c->base);
        return st;
    }
    *b = &c->base;
    return BG_OK;
}

int bg_cuda_abi(void)
{
    return BG_CUDA_ABI;
}

bg_status bg_cuda_gpus(bg_gpu *list, int cap, int *n, bg_error *err)
{
    *n = 0;
    int count = 0;
    cudaError_t e = cudaGetDeviceCount(&count);
    if (e == cudaErrorNoDevice || e == cudaErrorInsufficientDriver) return BG_OK;
    if (e != cudaSuccess) return cuda_fail(err, e, "looking for GPUs");
    for (int i = 0; i < count && i < cap; i++) {
        struct cudaDeviceProp p;
        size_t free_bytes = 0, total = 0;
        if (cudaGetDeviceProperties(&p, i) != cudaSuccess || cudaSetDevice(i) != cudaSuccess ||
            cudaMemGetInfo(&free_bytes, &total) != cudaSuccess)
            return bg_fail(err, BG_DEVICE, "GPU %d: cannot be asked", i);
        bg_gpu *g = &list[(*n)++];
        *g = (bg_gpu){.device = i,
                      .free_bytes = free_bytes,
                      .total_bytes = total,
                      .capability = p.major * 10 + p.minor};
        memcpy(g->name, p.name, sizeof g->name - 1);
    }
    return BG_OK;
}
