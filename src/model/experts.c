/* model/experts.c - mixture of experts: its hyper-parameters, its weights, and the FFN of a layer
 * that has them.
 *
 *     y = sum over the n_used experts chosen of w_e FFN_e(h)  + shared FFN(h)
 *
 * Every rank holds a part of the columns of every expert and the whole router, so all ranks choose
 * the same experts; their sums are added once, together with the shared FFN's. */
#include "model/load.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_EXPERTS = 512, MAX_WIDTH = 1 << 21 };

/* ---- hyper-parameters ----------------------------------------------------------------------- */

static bg_status read_groups(bg_desc *d, const bg_gguf *g, bg_error *err)
{
    bg_status st = bg_hparam_int(d, g, "expert_group_count", 0, 0, d->n_experts, &d->n_groups, err);
    if (!st)
        st = bg_hparam_int(d, g, "expert_group_used_count", 0, 0, MAX_EXPERTS, &d->n_groups_used,
                           err);
    if (st) return st;
    if (d->n_groups < 2) {
        d->n_groups = d->n_groups_used = 1;
        return BG_OK;
    }
    if (d->n_experts % d->n_groups)
        return bg_fail(err, BG_FORMAT, "%d experts are no multiple of %d groups", d->n_experts,
                       d->n_groups);
    if (d->n_groups_used < 1 || d->n_groups_used >= d->n_groups)
        return bg_fail(err, BG_FORMAT, "%s.expert_group_used_count is %d, only 1..%d is possible",
                       d->arch_name, d->n_groups_used, d->n_groups - 1);
    if (d->n_used > d->n_experts / d->n_groups * d->n_groups_used)
        return bg_fail(err, BG_FORMAT, "%d experts are used, but %d groups have only %d", d->n_used,
                       d->n_groups_used, d->n_experts / d->n_groups * d->n_groups_used);
    return BG_OK;
}

bg_status bg_experts_read(bg_desc *d, const bg_gguf *g, bg_error *err)
{
    const bg_arch *a = d->arch;
    bg_status st = bg_hparam_int(d, g, "expert_count", a->always_experts ? -1 : 0,
                                 a->always_experts, MAX_EXPERTS, &d->n_experts, err);
    if (st || !d->n_experts) return st;
    if (!a->experts)
        return bg_fail(err, BG_ARG,
                       "%s.expert_count is %d: a mixture of experts is not supported in this "
                       "architecture",
                       d->arch_name, d->n_experts);
    st = bg_hparam_int(d, g, "expert_used_count", -1, 1, d->n_experts, &d->n_used, err);
    if (!st) st = bg_hparam_int(d, g, "expert_shared_count", 0, 0, MAX_EXPERTS, &d->n_shared, err);
    if (!st)
        st =
            bg_hparam_int(d, g, "leading_dense_block_count", 0, 0, BG_MAX_LAYERS, &d->n_dense, err);
    if (!st) st = bg_hparam_float(d, g, "expert_weights_scale", 0, 0, 1e6, &d->expert_scale, err);
    if (!st) st = bg_hparam_bool(d, g, "expert_weights_norm", false, &d->renormalise, err);
    if (!st) st = read_groups(d, g, err);
    if (d->expert_scale == 0) d->expert_scale = 1;
    if (d->n_dense > d->n_layers) d->n_dense = d->n_layers;
    return st;
}

bg_status bg_expert_width(bg_desc *d, const bg_gguf *g, int def, bg_error *err)
{
    bg_status st =
        bg_hparam_int(d, g, "expert_feed_forward_length", def, 1, MAX_WIDTH, &d->d_ff_expert, err);
    if (!st && d->n_shared > MAX_WIDTH / d->d_ff_expert)
        st = bg_fail(err, BG_FORMAT, "%s.expert_shared_count is %d: too many of %d columns",
                     d->arch_name, d->n_shared, d->d_ff_expert);
    if (!st) d->d_ff_shared = d->n_shared * d->d_ff_expert;
    return st;
}

bg_status bg_hparam_gating(bg_desc *d, const bg_gguf *g, bg_gating def, bg_error *err)
{
    static const bg_gating by_key[] = {BG_GATING_SOFTMAX, BG_GATING_SIGMOID,
                                       BG_GATING_SOFTMAX_CHOSEN};
    int key = 0;
    bg_status st = bg_hparam_int(d, g, "expert_gating_func", 0, 0, 1 << 16, &key, err);
    if (!st && key > 3)
        st = bg_fail(err, BG_ARG,
                     "%s.expert_gating_func is %d; supported are 1 (softmax), 2 (sigmoid) and 3 "
                     "(softmax over the experts chosen)",
                     d->arch_name, key);
    d->gating = st || !key ? def : by_key[key - 1];
    return st;
}

/* ---- weights -------------------------------------------------------------------------------- */

static bg_status load_router(bg_loader *ld, bg_layer *layer, int l, bg_error *err)
{
    static const bg_role roles[] = {ROLE_ROUTER, ROLE_ROUTER_B, ROLE_CHOICE_B, ROLE_ROUTER_SHEXP};
    const bg_desc *d = &ld->m->d;
    const bg_tensor *t[4];
    float *v[4] = {NULL, NULL, NULL, NULL};
    char name[48];
    bg_status st = BG_OK;
    snprintf(name, sizeof name, "blk.%d.ffn_gate_inp", l);
    for (int i = 0; !st && i < 4; i++) {
        t[i] = bg_load_find(ld, roles[i], l);
        if (t[i]) st = bg_load_floats(ld, t[i], 0, t[i]->ne[0] * t[i]->ne[1], 0, &v[i], err);
    }
    const bg_router_spec spec = {
        .name = name,
        .n_experts = d->n_experts,
        .n_used = d->n_used,
        .d_model = d->d_model,
        .gating = d->gating,
        .weights = v[0],
        .bias = v[1],
        .choice_bias = v[2],
        .n_groups = d->n_groups,
        .n_groups_used = d->n_groups_used,
        .renormalise = d->renormalise,
        .scale = d->expert_scale,
        .shared_gate = v[3],
    };
    if (!st) st = ld->m->b->ops->router_new(ld->m->b, &layer->router, &spec, err);
    for (int i = 0; i < 4; i++) {
        if (!st && t[i]) bg_load_progress(ld, t[i]->bytes);
        free(v[i]);
    }
    return st;
}

/* Rows [row0, + rows.n) and columns `cols` of each matrix of a stack; none: no tensor. */
static bg_linear_part part_of(const bg_tensor *t, int64_t row0, int64_t n_rows, bg_range cols)
{
    return (bg_linear_part){.name = t->cname,
                            .type = t->type,
                            .data = t->data,
                            .k_total = t->ne[0],
                            .n_total = t->ne[1],
                            .row0 = row0,
                            .n_rows = n_rows,
                            .col0 = cols.at,
                            .n_cols = cols.n};
}

static size_t stride_of(const bg_tensor *t)
{
    return (size_t)t->ne[1] * bg_qtype_row_bytes(t->type, t->ne[0]);
}

/* Values [at, at + n) of each expert's bias. */
static bg_status stack_of_biases(bg_loader *ld, bg_role r, int l, bg_range own, float **out,
                                 bg_error *err)
{
    const bg_tensor *t = bg_load_find(ld, r, l);
    if (!t || !own.n) return BG_OK;
    const int64_t width = t->ne[0], n = t->ne[1];
    bg_status st = bg_load_floats(ld, t, 0, width * n, 0, out, err);
    if (st) return st;
    for (int64_t e = 0; e < n; e++)
        memmove(*out + e * own.n, *out + e * width + own.at, (size_t)own.n * sizeof **out);
    return BG_OK;
}

static uint64_t part_bytes(const bg_linear_part *p, int n)
{
    return p->n_cols ? (uint64_t)n * (uint64_t)p->n_rows * bg_qtype_row_bytes(p->type, p->n_cols)
                     : 0;
}

static bg_status load_stacks(bg_loader *ld, bg_layer *layer, int l, bg_error *err)
{
    const bg_desc *d = &ld->m->d;
    const bg_shard *s = &ld->m->s;
    const bg_range own = {s->ffe0, s->n_ffe}, in = {0, d->d_model};
    const bg_tensor *both = bg_load_find(ld, ROLE_GATE_UP_EXPS, l);
    const bg_tensor *gate = both ? both : bg_load_find(ld, ROLE_GATE_EXPS, l);
    const bg_tensor *up = both ? both : bg_load_find(ld, ROLE_UP_EXPS, l);
    const bg_tensor *down = bg_load_find(ld, ROLE_DOWN_EXPS, l);
    const bg_tensor *shared[3] = {NULL, NULL, NULL};
    float *biases[3] = {NULL, NULL, NULL};
    char name[48];
    snprintf(name, sizeof name, "blk.%d.ffn_exps", l);
    bg_experts_spec spec = {
        .name = name,
        .n_experts = d->n_experts,
        .n_used = d->n_used,
        .gate = part_of(gate, own.at, own.n, in),
        .up = part_of(up, both ? d->d_ff_expert + own.at : own.at, own.n, in),
        .down = part_of(down, 0, d->d_model, own),
        .gate_stride = stride_of(gate),
        .up_stride = stride_of(up),
        .down_stride = stride_of(down),
        .fn = (int)d->act_fn,
    };
    if (d->n_shared && s->merged) {
        shared[0] = bg_load_find(ld, ROLE_GATE_SHEXP, l);
        shared[1] = bg_load_find(ld, ROLE_UP_SHEXP, l);
        shared[2] = bg_load_find(ld, ROLE_DOWN_SHEXP, l);
        spec.n_shared = d->n_shared;
        spec.shared_step = d->d_ff_expert;
        spec.shared_gate = part_of(shared[0], own.at, own.n, in);
        spec.shared_up = part_of(shared[1], own.at, own.n, in);
        spec.shared_down = part_of(shared[2], 0, d->d_model, own);
    }
    bg_status st = stack_of_biases(ld, ROLE_GATE_EXPS_B, l, own, &biases[0], err);
    if (!st) st = stack_of_biases(ld, ROLE_UP_EXPS_B, l, own, &biases[1], err);
    /* Partial sums of all ranks are added: the bias belongs to one of them. */
    if (!st && s->rank == 0) st = stack_of_biases(ld, ROLE_DOWN_EXPS_B, l, in, &biases[2], err);
    spec.gate_bias = biases[0];
    spec.up_bias = biases[1];
    spec.down_bias = biases[2];
    if (!st) st = ld->m->b->ops->experts_new(ld->m->b, &layer->experts, &spec, err);
    if (st) bg_wrap(err, "%s", name);
    const bg_tensor *used[] = {gate, both ? NULL : up, down, shared[0], shared[1], shared[2]};
    for (size_t i = 0; i < sizeof used / sizeof *used; i++)
        if (used[i]) bg_gguf_drop_pages(ld->g, used[i]->data, used[i]->bytes);
    if (!st)
        bg_load_progress(ld, part_bytes(&spec.gate, d->n_experts) +
                                 part_bytes(&spec.up, d->n_experts) +
                                 part_bytes(&spec.down, d->n_experts) +
                                 part_bytes(&spec.shared_gate, spec.n_shared) +
                                 part_bytes(&spec.shared_up, spec.n_shared) +
                                 part_bytes(&spec.shared_down, spec.n_shared));
    for (int i = 0; i < 3; i++)
        free(biases[i]);
    return st;
}

static bg_status load_shared(bg_loader *ld, bg_layer *layer, int l, bg_error *err)
{
    bg_builder b;
    bg_part_start(&b, "blk.%d.ffn_gate_up_shexp", l);
    b.spec.glu = true;
    bg_status st = bg_part_add_role(ld, &b, ROLE_GATE_SHEXP, N_ROLES, l, err);
    if (!st) st = bg_part_add_role(ld, &b, ROLE_UP_SHEXP, N_ROLES, l, err);
    if (!st) st = bg_part_finish(ld, &b, &layer->shared_gate_up, err);
    bg_part_release(&b);
    if (!st)
        st = bg_load_linear(ld, &layer->shared_down, "ffn_down_shexp", ROLE_DOWN_SHEXP, N_ROLES, l,
                            err);
    return st;
}

bg_status bg_experts_load(bg_loader *ld, bg_layer *layer, int l, bg_error *err)
{
    const bg_ops *ops = ld->m->b->ops;
    if (!ops->router_new || !ops->experts_new || !ops->route || !ops->moe)
        return bg_fail(err, BG_ARG, "the %s backend has no mixture of experts yet", ops->name);
    bg_status st = load_router(ld, layer, l, err);
    if (!st) st = load_stacks(ld, layer, l, err);
    if (!st && ld->m->d.n_shared && !ld->m->s.merged) st = load_shared(ld, layer, l, err);
    return st;
}

/* ---- forward -------------------------------------------------------------------------------- */

bg_status bg_experts_branch(bg_model *m, int layer, bg_error *err)
{
    const bg_layer *w = &m->layers[layer];
    bg_backend *b = m->b;
    bg_act *h = &m->a.h, *y = &m->a.y;
    bg_status st = BG_OK;
    if (w->shared_gate_up)
        st = bg_op_linear_glu(b, &m->a.shared_ff, &m->a.shared_gate_up, w->shared_gate_up, h,
                              m->d.act_fn, err);
    if (!st && w->shared_down)
        st = bg_op_linear(b, y, w->shared_down, &m->a.shared_ff, b->ops->n_rows(b), err);
    if (!st) st = bg_op_route(b, &m->a.route, w->router, h, err);
    if (!st) st = bg_op_moe(b, y, w->experts, &m->a.route, h, w->shared_down ? y : NULL, err);
    return st;
}
