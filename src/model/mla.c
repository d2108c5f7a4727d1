/* model/mla.c - multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): its hyper-parameters,
 * its weights, and the attention of a layer.
 *
 *     t = [Wq_a h | Wkv_a h],  qa = rms(t's q latent),  [c | kr] = [rms(t's kv latent) | rope(..)]
 *     q = Wq_b qa  (no q latent: Wq h), heads of [nope | n_rot] values
 *     score_h(j) = scale (Wk_b_h q_h . c_j + rope(q_h's last) . kr_j),  u_h = sum_j p_j c_j
 *     y = Wo [Wv_b_h u_h, ..]
 *
 * Keys and values are never made: what turns the latent into them is applied to the query and to
 * the weighted sum instead ("absorbed"), for prompts and single tokens alike, so that a row's bits
 * do not depend on how its prompt was cut. A rank holds some of the heads, and all of the rest. */
#include "model/load.h"

#include <math.h>
#include <stdlib.h>

enum { MAX_RANK = 1 << 16, MAX_HEAD = 1 << 12 };

/* ---- hyper-parameters ----------------------------------------------------------------------- */

/* Present files (since 2025) say what the latent row is in key_length and value_length, and what a
 * head is in the _mla keys; older ones have the head in the former and k_b and v_b in one matrix.
 */
bg_status bg_mla_read(bg_desc *d, const bg_gguf *g, bg_error *err)
{
    int row = 0, value = 0;
    float temperature = 0;
    bg_status st = bg_hparam_int(d, g, "attention.kv_lora_rank", -1, 1, MAX_RANK, &d->kv_rank, err);
    if (!st) st = bg_hparam_int(d, g, "attention.q_lora_rank", 0, 0, MAX_RANK, &d->q_rank, err);
    if (!st) st = bg_hparam_int(d, g, "rope.dimension_count", -1, 2, MAX_HEAD, &d->n_rot, err);
    if (!st)
        st = bg_hparam_int(d, g, "attention.key_length_mla", 0, 0, MAX_HEAD, &d->head_dim, err);
    if (st) return st;
    if (d->n_rot % 2)
        return bg_fail(err, BG_FORMAT, "%s.rope.dimension_count is %d, which is odd", d->arch_name,
                       d->n_rot);
    d->kv_b = !d->head_dim;
    if (d->kv_b) {
        st = bg_hparam_int(d, g, "attention.key_length", -1, 1, MAX_HEAD, &d->head_dim, err);
        if (!st)
            st = bg_hparam_int(d, g, "attention.value_length", -1, 1, MAX_HEAD, &d->v_dim, err);
    } else {
        st = bg_hparam_int(d, g, "attention.value_length_mla", -1, 1, MAX_HEAD, &d->v_dim, err);
        if (!st)
            st = bg_hparam_int(d, g, "attention.key_length", d->kv_rank + d->n_rot, 1, 1 << 20,
                               &row, err);
        if (!st)
            st = bg_hparam_int(d, g, "attention.value_length", d->kv_rank, 1, 1 << 20, &value, err);
        if (!st && (row != d->kv_rank + d->n_rot || value != d->kv_rank))
            st = bg_fail(err, BG_FORMAT,
                         "%s.attention.key_length and value_length are %d and %d; ranks and "
                         "rotation say %d and %d",
                         d->arch_name, row, value, d->kv_rank + d->n_rot, d->kv_rank);
    }
    if (!st && d->head_dim <= d->n_rot)
        st = bg_fail(err, BG_FORMAT, "heads have %d values, and %d of them rotate: none are left",
                     d->head_dim, d->n_rot);
    if (!st)
        st = bg_hparam_float(d, g, "attention.temperature_scale", 0, -1e6, 1e6, &temperature, err);
    if (!st && temperature != 0)
        st = bg_fail(err, BG_ARG, "%s.attention.temperature_scale is %g, which is not supported",
                     d->arch_name, (double)temperature);
    d->nope = d->head_dim - d->n_rot;
    d->n_kv_heads = 1;
    return st;
}

bg_status bg_mla_resolve(bg_desc *d, const bg_gguf *g, bg_error *err)
{
    const bg_rope_scaling *s = &d->rope_scaling;
    float mscale = 1;
    const bool q_a = bg_role_tensor(g, ROLE_Q_A, 0);
    if (!q_a && bg_role_tensor(g, ROLE_Q, 0)) d->q_rank = 0;
    if (q_a && !d->q_rank)
        return bg_fail(err, BG_FORMAT, "%s.attention.q_lora_rank is missing", d->arch_name);
    float *freq = malloc((size_t)d->n_rot / 2 * sizeof *freq);
    if (!freq) return bg_fail(err, BG_NOMEM, "model: out of memory");
    bg_rope_table(d, false, NULL, freq, &mscale);
    free(freq);
    double mq = 1;
    if (s->yarn) {
        const double mul = s->log_mul > 0 ? s->log_mul : 0;
        mq = mscale * (s->factor > 1 ? 1 + 0.1 * mul * log(s->factor) : 1);
    }
    d->attn_scale = (float)(mq * mq / sqrt(d->head_dim));
    return BG_OK;
}

/* ---- weights -------------------------------------------------------------------------------- */

/* A matrix for each head of this rank: rows [row0, + n_rows) of every `pitch` rows of t. */
static bg_status load_heads(bg_loader *ld, bg_linear **out, const char *name, const bg_tensor *t,
                            int64_t pitch, int64_t row0, int64_t n_rows, int64_t x_stride, int l,
                            bg_error *err)
{
    const bg_shard *s = &ld->m->s;
    bg_builder b;
    bg_part_start(&b, "blk.%d.%s", l, name);
    b.spec.n_blocks = s->n_heads;
    b.spec.block_bytes = pitch * (int64_t)bg_qtype_row_bytes(t->type, t->ne[0]);
    b.spec.x_stride = x_stride;
    bg_status st =
        bg_part_add(ld, &b, t, s->head0 * pitch + row0, n_rows, (bg_range){0, t->ne[0]}, NULL, err);
    b.spec.parts[0].n_total = pitch * ld->m->d.n_heads;
    if (!st) st = bg_part_finish(ld, &b, out, err);
    bg_part_release(&b);
    return st;
}

/* k_b from the rows of attn_kv_b that make keys: for each head its transpose, as floats. */
static bg_status transpose_k_b(bg_loader *ld, bg_layer *layer, const bg_tensor *t, int l,
                               bg_error *err)
{
    const bg_desc *d = &ld->m->d;
    const bg_shard *s = &ld->m->s;
    const int64_t kl = d->kv_rank, nope = d->nope, block = kl * nope;
    const size_t row_bytes = bg_qtype_row_bytes(t->type, kl);
    float *row = malloc((size_t)kl * sizeof *row);
    float *k_b = calloc((size_t)(s->n_heads * block), sizeof *k_b);
    bg_status st = BG_OK;
    if (!row || !k_b) {
        st = bg_fail(err, BG_NOMEM, "model: out of memory");
        goto out;
    }
    for (int64_t h = 0; !ld->config->backend->dummy && h < s->n_heads; h++)
        for (int64_t i = 0; i < nope; i++) {
            const int64_t at = (s->head0 + h) * (nope + d->v_dim) + i;
            bg_dequant_row(t->type, (const char *)t->data + (size_t)at * row_bytes, row, kl);
            for (int64_t c = 0; c < kl; c++)
                k_b[h * block + c * nope + i] = row[c];
        }
    bg_linear_spec spec = {
        .name = t->cname,
        .n_parts = 1,
        .parts[0] = {.name = t->cname,
                     .type = BG_F32,
                     .data = k_b,
                     .k_total = nope,
                     .n_total = kl * s->n_heads,
                     .n_rows = kl,
                     .n_cols = nope},
        .n_blocks = s->n_heads,
        .block_bytes = block * (int64_t)sizeof *k_b,
        .x_stride = d->head_dim,
    };
    st = ld->m->b->ops->linear_new(ld->m->b, &layer->k_b, &spec, err);
    if (st) bg_wrap(err, "blk.%d.attn_k_b", l);
out:
    free(k_b);
    free(row);
    return st;
}

/* All but what qkv_a has: the key and the heads' weights. */
static bg_status load_index(bg_loader *ld, bg_layer *layer, int l, bg_error *err)
{
    bg_status st =
        bg_load_linear(ld, &layer->index_q, "indexer.attn_q_b", ROLE_INDEX_Q, N_ROLES, l, err);
    if (!st) st = bg_load_vec(ld, &layer->index_norm, ROLE_INDEX_K_NORM, l, err);
    if (!st) st = bg_load_vec(ld, &layer->index_norm_b, ROLE_INDEX_K_NORM_B, l, err);
    return st;
}

bg_status bg_mla_load(bg_loader *ld, bg_layer *layer, int l, bg_error *err)
{
    const bg_desc *d = &ld->m->d;
    const bg_ops *ops = ld->m->b->ops;
    const int64_t nope = d->nope, v = d->v_dim, kl = d->kv_rank;
    bg_builder b;
    if (!ops->mla_store || !ops->mla_query || !ops->mla_attention ||
        (d->index_heads && !ops->index))
        return bg_fail(err, BG_ARG, "the %s backend has no latent attention yet", ops->name);
    layer->index = -1;
    if (d->index_heads && bg_layer_indexed(d, l)) {
        layer->index = 0;
        for (int i = 0; i < l; i++)
            layer->index += bg_layer_indexed(d, i);
    }
    if (!ld->m->s.n_heads) return BG_OK; /* nothing to attend with */

    bg_part_start(&b, "blk.%d.attn_qkv_a", l);
    bg_status st = d->q_rank ? bg_part_add_role(ld, &b, ROLE_Q_A, N_ROLES, l, err) : BG_OK;
    if (!st) st = bg_part_add_role(ld, &b, ROLE_KV_A, N_ROLES, l, err);
    if (!st && layer->index >= 0) st = bg_part_add_role(ld, &b, ROLE_INDEX_K, N_ROLES, l, err);
    if (!st && layer->index >= 0) st = bg_part_add_role(ld, &b, ROLE_INDEX_PROJ, N_ROLES, l, err);
    if (!st) st = bg_part_finish(ld, &b, &layer->qkv_a, err);
    bg_part_release(&b);
    if (!st) st = bg_load_vec(ld, &layer->q_a_norm, ROLE_Q_A_NORM, l, err);
    if (!st) st = bg_load_vec(ld, &layer->kv_a_norm, ROLE_KV_A_NORM, l, err);
    if (!st)
        st = bg_load_linear(ld, &layer->q, d->q_rank ? "attn_q_b" : "attn_q",
                            d->q_rank ? ROLE_Q_B_LORA : ROLE_Q, N_ROLES, l, err);
    if (d->kv_b) {
        const bg_tensor *t = bg_load_find(ld, ROLE_KV_B, l);
        if (!st) st = transpose_k_b(ld, layer, t, l, err);
        if (!st) st = load_heads(ld, &layer->v_b, "attn_v_b", t, nope + v, nope, v, kl, l, err);
    } else {
        const bg_tensor *k_b = bg_load_find(ld, ROLE_K_B_MLA, l);
        const bg_tensor *v_b = bg_load_find(ld, ROLE_V_B_MLA, l);
        if (!st) st = load_heads(ld, &layer->k_b, "attn_k_b", k_b, kl, 0, kl, d->head_dim, l, err);
        if (!st) st = load_heads(ld, &layer->v_b, "attn_v_b", v_b, v, 0, v, kl, l, err);
    }
    if (!st && layer->index >= 0) st = load_index(ld, layer, l, err);
    return st;
}

/* ---- forward -------------------------------------------------------------------------------- */

static bg_status choose_keys(bg_model *m, const bg_layer *w, bg_error *err)
{
    const bg_desc *d = &m->d;
    const bg_index index = {
        .index_layer = w->index,
        .n_heads = d->index_heads,
        .dim = d->index_dim,
        .top_k = d->index_top_k,
        .ik_col0 = d->q_rank + bg_dim_size(d, DIM_KV_A),
        .k_norm = &w->index_norm,
        .k_norm_b = &w->index_norm_b,
        .norm_eps = 1e-6f, /* no key tells */
        .rope = &m->rope[0],
        .scale = 1 / sqrtf((float)d->index_heads * (float)d->index_dim),
    };
    return bg_op_index(m->b, &m->a.index_q, &m->a.qkv, &index, err);
}

static bg_status attend(bg_model *m, int layer, bg_error *err)
{
    const bg_desc *d = &m->d;
    const bg_layer *w = &m->layers[layer];
    bg_backend *b = m->b;
    const int n_rows = b->ops->n_rows(b);
    bg_act *q_a = d->q_rank ? &m->a.q_a : NULL;
    const bg_mla_in in = {
        .layer = layer,
        .q_rank = d->q_rank,
        .kv_rank = d->kv_rank,
        .q_norm = d->q_rank ? &w->q_a_norm : NULL,
        .kv_norm = &w->kv_a_norm,
        .norm_eps = d->eps,
        .rope = &m->rope[0],
    };
    const bg_mla mla = {
        .layer = layer,
        .n_heads = m->s.n_heads,
        .kv_rank = d->kv_rank,
        .nope = d->nope,
        .n_rot = d->n_rot,
        .scale = d->attn_scale,
        .rope = &m->rope[0],
        .selected = d->index_heads > 0,
    };
    bg_status st = bg_op_linear(b, &m->a.qkv, w->qkv_a, &m->a.h, n_rows, err);
    if (!st) st = bg_op_mla_store(b, q_a, &m->a.qkv, &in, err);
    /* In this order a backend may multiply by both of what mla_store norms in one go, and do the
     * query's next product while keys are chosen. */
    const bool chooses = w->index >= 0;
    if (!st && chooses) st = bg_op_linear(b, &m->a.index_q, w->index_q, &m->a.q_a, n_rows, err);
    if (!st) st = bg_op_linear(b, &m->a.q, w->q, q_a ? q_a : &m->a.h, n_rows, err);
    if (!st && chooses) st = choose_keys(m, w, err);
    if (!st) st = bg_op_mla_query(b, &m->a.q_lat, w->k_b, &m->a.q, err);
    if (!st) st = bg_op_mla_attention(b, &m->a.att_lat, &m->a.q_lat, &m->a.q, &mla, err);
    if (!st) st = bg_op_linear(b, &m->a.att, w->v_b, &m->a.att_lat, n_rows, err);
    return st;
}

bg_status bg_mla_branch(bg_model *m, int layer, bg_error *err)
{
    bg_backend *b = m->b;
    bg_status st = m->s.n_heads ? attend(m, layer, err) : BG_OK;
    if (!st) st = bg_op_linear(b, &m->a.y, m->layers[layer].o, &m->a.att, b->ops->n_rows(b), err);
    return st;
}
