/* The ops of a forward pass as calls of kernels. */
#include "backend/cuda/cuda.h"

bg_status bg_cuda_embed(bg_backend *b, bg_act *out, const bg_embedding *e, float scale,
                        bg_error *err)
{
    bg_cuda *c = (bg_cuda *)b;
    bg_status st = bg_cuda_fits(out, c->s.n_rows, e->cols, "embed", err);
    if (!st) st = bg_cuda_flush(c, err);
    if (st) return st;
    return bg_cuda_done(err,
                        bgk_embed(out->data, out->cols, e->data, c->weights, c->ids, scale,
                                  c->s.n_rows, (int)e->cols, c->stream),
                        "op embed");
}

bg_status bg_cuda_rms_norm(bg_backend *b, bg_act *out, const bg_act *x, const bg_vec *w, float eps,
                           int n_rows, bg_error *err)
{
    bg_cuda *c = (bg_cuda *)b;
    bg_status st = bg_cuda_fits(out, n_rows, w->n, "rms_norm", err);
    if (!st) st = bg_cuda_fits(x, n_rows, w->n, "rms_norm", err);
    if (!st) st = bg_cuda_flush(c, err);
    if (st) return st;
    const bgk_out o = bg_cuda_out(out);
    return bg_cuda_done(
        err,
        bgk_rms_norm(&o, x->data, x->cols, NULL, 0, w->data, eps, n_rows, (int)w->n, c->stream),
        "op rms_norm");
}

bg_status bg_cuda_add(bg_backend *b, bg_act *x, const bg_act *y, bg_error *err)
{
    bg_cuda *c = (bg_cuda *)b;
    bg_status st = bg_cuda_fits(y, c->s.n_rows, x->cols, "add", err);
    if (!st) st = bg_cuda_fits(x, c->s.n_rows, x->cols, "add", err);
    if (!st) st = bg_cuda_flush(c, err);
    if (st) return st;
    return bg_cuda_done(
        err, bgk_add(x->data, x->cols, y->data, y->cols, c->s.n_rows, (int)x->cols, c->stream),
        "op add");
}

bg_status bg_cuda_add_rms_norm(bg_backend *b, bg_act *out, bg_act *x, const bg_act *y,
                               const bg_vec *w, float eps, bg_error *err)
{
    bg_cuda *c = (bg_cuda *)b;
    bg_status st = bg_cuda_fits(out, c->s.n_rows, w->n, "add_rms_norm", err);
    if (!st) st = bg_cuda_fits(x, c->s.n_rows, w->n, "add_rms_norm", err);
    if (!st) st = bg_cuda_fits(y, c->s.n_rows, w->n, "add_rms_norm", err);
    if (!st) st = bg_cuda_flush(c, err);
    if (st) return st;
    const bgk_out o = bg_cuda_out(out);
    return bg_cuda_done(err,
                        bgk_rms_norm(&o, x->data, x->cols, y->data, y->cols, w->data, eps,
                                     c->s.n_rows, (int)w->n, c->stream),
                        "op add_rms_norm");
}

bg_status bg_cuda_norm_add_norm(bg_backend *b, bg_act *out, bg_act *x, bg_act *y,
                                const bg_vec *post, const bg_vec *w, float eps, bg_error *err)
{
    bg_cuda *c = (bg_cuda *)b;
    bg_status st = bg_cuda_fits(out, c->s.n_rows, w->n, "norm_add_norm", err);
    if (!st) st = bg_cuda_fits(x, c->s.n_rows, w->n, "norm_add_norm", err);
    if (!st) st = bg_cuda_fits(y, c->s.n_rows, w->n, "norm_add_norm", err);
    if (!st && post->n != w->n)
        st = bg_fail(err, BG_INTERNAL, "op norm_add_norm: %s has %lld weights, %s %lld", post->name,
                     (long long)post->n, w->name, (long long)w->n);
    if (!st) st = bg_cuda_flush(c, err);
    if (st) return st;
    const bgk_out o = bg_cuda_out(out);
    return bg_cuda_done(err,
                        bgk_norm_add_norm(&o, x->data, x->cols, y->data, y->cols, post->data,
                                          w->data, eps, c->s.n_rows, (int)w->n, c->stream),
                        "op norm_add_norm");
}

/* A rank with nothing to sum: the bias, or 0. */
static bg_status no_sum(bg_cuda *c, const bgk_out *out, const bg_linear *l, int n_rows,
                        bg_error *err)
{
    cudaError_t e = cudaSuccess;
    if (out->layout == BGK_TILES) {
        const size_t groups = ((size_t)l->n_rows + BGK_TILE_COLS - 1) / BGK_TILE_COLS;
        if (l->tiles.bias || l->bias)
            return bg_fail(err, BG_INTERNAL, "%s: a bias alone, as tiles", l->name);
        e = cudaMemset2DAsync(out->data, (size_t)out->stride * BGK_TILE_COLS * 2, 0,
                              (size_t)n_rows * BGK_TILE_COLS * 2, groups, c->stream);
        return bg_cuda_done(err, e, l->name);
    }
    for (int r = 0; r < n_rows && e == cudaSuccess; r++) {
        float *row = (float *)out->data + r * out->stride;
        e = l->bias ? cudaMemcpyAsync(row, l->bias, (size_t)l->n_rows * sizeof *row,
                                      cudaMemcpyDeviceToDevice, c->stream)
                    : cudaMemsetAsync(row, 0, (size_t)l->n_rows * sizeof *row, c->stream);
    }
    return bg_cuda_done(err, e, l->name);
}

static bg_status plain_product(bg_cuda *c, const bgk_out *out, const bg_linear *l, const bg_act *x,
                               int n_rows, bg_error *err)
{
    const int blocks = l->n_blocks ? l->n_blocks : 1, rows = l->n_rows / blocks;
    const size_t each = (size_t)rows * (size_t)l->k_padded *
                        (c->weights == BGK_F32 ? sizeof(float) : sizeof(uint16_t));
    cudaError_t e = cudaSuccess;
    for (int i = 0; i < blocks && e == cudaSuccess; i++)
        e = bgk_linear((float *)out->data + (int64_t)i * rows, out->stride,
                       (const char *)l->w + (size_t)i * each, c->weights, l->bias,
                       (const float *)x->data + (int64_t)i * l->x_stride, x->cols, n_rows, rows,
                       l->k, l->k_padded, c->scratch, c->stream);
    return bg_cuda_done(err, e, l->name);
}

bg_status bg_cuda_run_linear(bg_cuda *c, const bgk_out *out, const bg_linear *l, const bg_act *x,
                             int n_rows, bg_error *err)
{
    if (!n_rows || !l->n_rows) return BG_OK;
    if (!l->k) return no_sum(c, out, l, n_rows, err);
    if (!c->tiled) return plain_product(c, out, l, x, n_rows, err);
    const bgk_out in = bg_cuda_out(x);
    if (l->tiles.n_ff || in.layout != BGK_TILES)
        return bg_fail(err, BG_INTERNAL, "op linear: %s with %s", l->name, x->name);
    if (out->layout == BGK_ROWS && bg_cuda_fast_serves(l, out->data, n_rows))
        return bg_cuda_fast_linear(c, out->data, out->stride, l, &in, n_rows, err);
    return bg_cuda_done(
        err, bgk_matmul(out, &l->tiles, in.data, in.stride, n_rows, BGK_SILU, c->stream), l->name);
}

bg_status bg_cuda_linear(bg_backend *b, bg_act *out, const bg_linear *l, const bg_act *x,
                         int n_rows, bg_error *err)
{
    const bgk_out o = bg_cuda_out(out);
    bg_status st = bg_cuda_fits(out, n_rows, l->n_rows, "linear", err);
    if (!st) st = bg_cuda_fits(x, n_rows, l->n_in, "linear", err);
    bool done = false;
    if (!st) st = bg_cuda_mla_stored((bg_cuda *)b, &o, l, x, n_rows, &done, err);
    return st || done ? st : bg_cuda_run_linear((bg_cuda *)b, &o, l, x, n_rows, err);
}

static const bgk_act FNS[] = {
    [BG_SILU] = BGK_SILU,
    [BG_GELU_TANH] = BGK_GELU_TANH,
    [BG_GELU_ERF] = BGK_GELU_ERF,
    [BG_SWIGLU_CLAMP] = BGK_SWIGLU_CLAMP,
};

bgk_act bg_cuda_act_fn(bg_act_fn fn)
{
    return FNS[fn];
}

bg_status bg_cuda_linear_glu(bg_backend *b, bg_act *out, const bg_linear *l, const bg_act *x,
                             bg_act_fn fn, bg_error *err)
{
    bg_cuda *c = (bg_cuda *)b;
    const int n_rows = c->s.n_rows;
    bg_status st = bg_cuda_fits(x, n_rows, l->k, "linear_glu", err);
    if (!st) st = bg_cuda_fits(out, n_rows, l->tiles.n_ff, "linear_glu", err);
    if (!st) st = bg_cuda_flush(c, err);
    if (st || !n_rows) return st;
    const bgk_out o = bg_cuda_out(out), in = bg_cuda_out(x);
    if (bg_cuda_fast_serves(l, NULL, n_rows))
        return bg_cuda_fast_linear_glu(c, &o, l, &in, FNS[fn], n_rows, err);
    return bg_cuda_done(
        err, bgk_matmul(&o, &l->tiles, in.data, in.stride, n_rows, FNS[fn], c->stream), l->name);
}

bg_status bg_cuda_glu(bg_backend *b, bg_act *out, const bg_act *gate_up, bg_act_fn fn,
                      bg_error *err)
{
    bg_cuda *c = (bg_cuda *)b;
    bg_status st = bg_cuda_fits(gate_up, c->s.n_rows, 2 * out->cols, "glu", err);
    if (!st) st = bg_cuda_fits(out, c->s.n_rows, out->cols, "glu", err);
    if (!st) st = bg_cuda_flush(c, err);
    if (st) return st;
    return bg_cuda_done(err,
                        bgk_glu(out->data, out->cols, gate_up->data, gate_up->cols, FNS[fn],
                                c->s.n_rows, (int)out->cols, c->stream),
                        "op glu");
}

bg_status bg_cuda_all_reduce(bg_backend *b, bg_act *x, bg_error *err)
{
    bg_cuda *c = (bg_cuda *)b;
    bg_status st = bg_cuda_flush(c, err);
    return st ? st : bg_cuda_all_reduce_rows(c, x, c->s.n_rows, err);
}

bg_status bg_cuda_gather_out(bg_backend *b, bg_act *out, const bg_act *x, bg_error *err)
{
    bg_cuda *c = (bg_cuda *)b;
    bg_status st = bg_cuda_fits(out, c->s.n_out, x->cols, "gather_out", err);
    if (!st) st = bg_cuda_flush(c, err);
    if (st) return st;
    return bg_cuda_done(err,
                        bgk_gather(out->data, out->cols, x->data, x->cols, c->out_row, c->s.n_out,
                                   (int)x->cols, c->stream),
                        "op gather_out");
}

bg_status bg_cuda_logits(bg_backend *b, const bg_linear *head, const bg_act *x,
                         const int64_t *rank_rows, float softcap, bg_error *err)
{
    bg_cuda *c = (bg_cuda *)b;
    const int64_t vocab = c->config.vocab_size;
    const int64_t own = c->ranks ? rank_rows[bg_comm_rank(c->config.comm)] : vocab;
    if (head->n_rows != own)
        return bg_fail(err, BG_INTERNAL, "op logits: the head has %d rows, not %lld", head->n_rows,
                       (long long)own);
    bg_status st = bg_cuda_fits(x, c->s.n_out, head->k, "logits", err);
    if (!st) st = bg_cuda_flush(c, err);
    c->has_logits = true;
    if (st || !c->s.n_out) return st;
    bg_act all = {.data = c->logits, .max_rows = c->s.n_out, .cols = vocab, .name = "logits"};
    if (b->check) b->ops->poison(b, &all, c->s.n_out);
    const bgk_out o = {c->logits, BGK_ROWS, bg_cuda_shard_cols(c)};
    st = bg_cuda_run_linear(c, &o, head, x, c->s.n_out, err);
    if (!st) st = bg_cuda_gather_logits(c, c->s.n_out, rank_rows, err);
    if (!st && softcap > 0)
        st = bg_cuda_done(err, bgk_softcap(c->logits, c->s.n_out * vocab, softcap, c->stream),
                          "op logits");
    int64_t row = 0, col = 0;
    if (!st && b->check && !bg_cuda_all_finite(b, &all, c->s.n_out, vocab, &row, &col))
        st = bg_fail(err, BG_INTERNAL, "op logits: logits[%lld, %lld] is not finite after it",
                     (long long)row, (long long)col);
    return st;
}
