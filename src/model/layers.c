/* model/layers.c - pieces of forward passes that families share. */
#include "model/arch.h"

bg_status bg_attention_branch(bg_model *m, int layer, bg_error *err)
{
    const bg_desc *d = &m->d;
    const bg_shard *s = &m->s;
    const bg_layer *w = &m->layers[layer];
    const bool windowed = bg_layer_windowed(d, layer);
    bg_backend *b = m->b;
    bg_status st = BG_OK;
    if (d->kv_rank) return bg_mla_branch(m, layer, err);
    if (s->n_heads) {
        const bg_attn_in in = {
            .layer = layer,
            .n_heads = s->n_heads,
            .n_kv_heads = s->n_kv_heads,
            .head_dim = d->head_dim,
            .v_dim = d->v_dim,
            .q_norm = w->q_norm.n ? &w->q_norm : NULL,
            .k_norm = w->k_norm.n ? &w->k_norm : NULL,
            .norm_eps = d->eps,
            .rope = &m->rope[windowed],
        };
        const bg_attn attn = {
            .layer = layer,
            .n_heads = s->n_heads,
            .n_kv_heads = s->n_kv_heads,
            .head0 = s->head0,
            .kv_head0 = s->kv_head0,
            .group = d->n_heads / d->n_kv_heads,
            .head_dim = d->head_dim,
            .v_dim = d->v_dim,
            .scale = d->attn_scale,
            .softcap = d->attn_softcap,
            .window = windowed ? d->window : 0,
            .sinks = w->sinks.n ? &w->sinks : NULL,
        };
        st = bg_op_linear(b, &m->a.qkv, w->qkv, &m->a.h, b->ops->n_rows(b), err);
        if (!st) st = bg_op_rope_store(b, &m->a.q, &m->a.qkv, &in, err);
        if (!st) st = bg_op_attention(b, &m->a.att, &m->a.q, &attn, err);
    }
    if (!st) st = bg_op_linear(b, &m->a.y, w->o, &m->a.att, b->ops->n_rows(b), err);
    return st;
}

bg_status bg_ffn_branch(bg_model *m, int layer, bg_error *err)
{
    const bg_layer *w = &m->layers[layer];
    bg_backend *b = m->b;
    bg_status st = BG_OK;
    if (w->router) return bg_experts_branch(m, layer, err);
    if (m->s.n_ff) {
        st = bg_op_linear_glu(b, &m->a.ff, &m->a.gate_up, w->gate_up, &m->a.h, m->d.act_fn, err);
    }
    if (!st) st = bg_op_linear(b, &m->a.y, w->down, &m->a.ff, b->ops->n_rows(b), err);
    return st;
}

bg_status bg_head(bg_model *m, bg_error *err)
{
    bg_backend *b = m->b;
    const int n = b->ops->n_out(b);
    if (!n) return BG_OK; /* only pieces of prompts in this step */
    bg_status st = bg_op_gather_out(b, &m->a.out, &m->a.x, err);
    if (!st) st = bg_op_rms_norm(b, &m->a.out_h, &m->a.out, &m->output_norm, m->d.eps, n, err);
    if (!st) st = bg_op_logits(b, m->head, &m->a.out_h, m->rank_rows, m->d.final_softcap, err);
    return st;
}

bg_status bg_prenorm_forward(bg_model *m, bg_error *err)
{
    bg_backend *b = m->b;
    const float eps = m->d.eps;
    const int n_rows = b->ops->n_rows(b), n_layers = m->d.n_layers;
    bg_act *x = &m->a.x, *h = &m->a.h, *y = &m->a.y;
    bg_status st = bg_op_embed(b, x, m->embedding, m->d.embed_scale, err);
    if (!st) st = bg_op_rms_norm(b, h, x, &m->layers[0].attn_norm, eps, n_rows, err);
    for (int l = 0; !st && l < n_layers; l++) {
        st = bg_attention_branch(m, l, err);
        if (!st) st = bg_op_all_reduce_add_rms_norm(b, h, x, y, &m->layers[l].ffn_norm, eps, err);
        if (!st) st = bg_ffn_branch(m, l, err);
        if (!st && l + 1 < n_layers)
            st = bg_op_all_reduce_add_rms_norm(b, h, x, y, &m->layers[l + 1].attn_norm, eps, err);
    }
    if (!st) st = bg_op_all_reduce(b, y, err);
    if (!st) st = bg_op_add(b, x, y, err); /* the last norm is for the rows that need it */
    if (!st) st = bg_head(m, err);
    return st;
}

bg_status bg_sandwich_forward(bg_model *m, bg_error *err)
{
    bg_backend *b = m->b;
    const float eps = m->d.eps;
    const int n_rows = b->ops->n_rows(b), n_layers = m->d.n_layers;
    bg_act *x = &m->a.x, *h = &m->a.h, *y = &m->a.y;
    bg_status st = bg_op_embed(b, x, m->embedding, m->d.embed_scale, err);
    if (!st) st = bg_op_rms_norm(b, h, x, &m->layers[0].attn_norm, eps, n_rows, err);
    for (int l = 0; !st && l < n_layers; l++) {
        const bg_layer *w = &m->layers[l];
        st = bg_attention_branch(m, l, err);
        if (!st) st = bg_op_all_reduce(b, y, err);
        if (!st) st = bg_op_norm_add_norm(b, h, x, y, &w->post_attn_norm, &w->ffn_norm, eps, err);
        if (!st) st = bg_ffn_branch(m, l, err);
        if (!st) st = bg_op_all_reduce(b, y, err);
        if (!st && l + 1 < n_layers) {
            st = bg_op_norm_add_norm(b, h, x, y, &w->post_ffn_norm, &w[1].attn_norm, eps, err);
        } else if (!st) { /* the last norm is for the rows that need it */
            st = bg_op_rms_norm(b, y, y, &w->post_ffn_norm, eps, n_rows, err);
            if (!st) st = bg_op_add(b, x, y, err);
        }
    }
    if (!st) st = bg_head(m, err);
    return st;
}

bg_status bg_model_begin(bg_model *m, const bg_batch *batch, bg_error *err)
{
    return m->b->ops->begin_step(m->b, batch, err);
}

bg_status bg_model_forward(bg_model *m, bg_error *err)
{
    return m->d.arch->forward(m, err);
}

static bg_status forward(void *ctx, bg_error *err)
{
    return bg_model_forward(ctx, err);
}

bg_status bg_model_prepare(bg_model *m, bg_error *err)
{
    return m->b->ops->prepare ? m->b->ops->prepare(m->b, forward, m, err) : BG_OK;
}

bg_status bg_model_step(bg_model *m, const bg_batch *batch, bg_error *err)
{
    const bg_ops *ops = m->b->ops;
    if (ops->step) return ops->step(m->b, batch, forward, m, err);
    bg_status st = bg_model_begin(m, batch, err);
    if (!st) st = bg_model_forward(m, err);
    if (!st && ops->n_out(m->b) > 0) st = bg_op_sample(m->b, err);
    return st;
}

bool bg_model_ready(bg_model *m)
{
    return m->b->ops->ready ? m->b->ops->ready(m->b) : true;
}

bg_status bg_model_fetch(bg_model *m, bg_sampled *out, int *n, bg_error *err)
{
    return bg_op_fetch(m->b, out, n, err);
}
