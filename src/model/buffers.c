/* model/buffers.c - every activation buffer of a rank, made once from its plan. */
#include "model/arch.h"

#include <stddef.h>

typedef enum use { ROWS, INPUT, GATE_UP } use; /* INPUT: only linears read it */

typedef struct buffer {
    const char *name;
    use use;
    size_t at; /* in bg_model.a */
    int64_t rows, cols;
} buffer;

enum { MAX_BUFFERS = 24 };

static int plan_buffers(buffer *list, const bg_desc *d, const bg_shard *s,
                        const bg_backend_config *c)
{
#define ADD(use, member, rows, cols)                                                   \
    list[n++] = (buffer)                                                               \
    {                                                                                  \
#member, use, offsetof(bg_model, a.member) - offsetof(bg_model, a), rows, cols \
    }
    const int64_t t = c->max_tokens, o = c->max_out, d_model = d->d_model;
    const int64_t q = bg_shard_range(s, d, DIM_Q).n, att = bg_shard_range(s, d, DIM_ATT).n;
    const int64_t kv = bg_shard_range(s, d, DIM_K).n + bg_shard_range(s, d, DIM_V).n;
    const int64_t latent = (int64_t)s->n_heads * d->kv_rank;
    int n = 0;
    ADD(ROWS, x, t, d_model);
    ADD(INPUT, h, t, d_model);
    ADD(ROWS, y, t, d_model);
    if (d->kv_rank) {
        const int64_t ik = d->index_heads ? d->index_dim + d->index_heads : 0;
        /* Rows of whole float4 (bgk_mla_store()). */
        ADD(ROWS, qkv, t, (d->q_rank + bg_dim_size(d, DIM_KV_A) + ik + 3) / 4 * 4);
        if (d->q_rank) ADD(INPUT, q_a, t, d->q_rank);
        ADD(INPUT, q, t, q);
        ADD(INPUT, q_lat, t, latent);
        ADD(INPUT, att_lat, t, latent);
        if (d->index_heads) ADD(ROWS, index_q, t, bg_dim_size(d, DIM_INDEX_Q));
    } else {
        ADD(ROWS, qkv, t, q + kv);
        ADD(ROWS, q, t, q);
    }
    ADD(INPUT, att, t, att);
    if (d->d_ff) {
        ADD(GATE_UP, gate_up, t, 2 * (int64_t)s->n_ff);
        ADD(INPUT, ff, t, s->n_ff);
    }
    if (d->n_experts) ADD(ROWS, route, t, 2 * (int64_t)d->n_used + 1);
    if (d->n_shared && !s->merged) {
        ADD(GATE_UP, shared_gate_up, t, 2 * (int64_t)s->n_ffs);
        ADD(INPUT, shared_ff, t, s->n_ffs);
    }
    ADD(ROWS, out, o, d_model);
    ADD(INPUT, out_h, o, d_model);
#undef ADD
    for (int i = 0; i < n; i++)
        if (list[i].cols < 1) list[i].cols = 1; /* a rank without heads or FFN columns */
    return n;
}

bg_status bg_buffers_new(bg_model *m, const bg_backend_config *c, bg_error *err)
{
    bg_status st = BG_OK;
    buffer list[MAX_BUFFERS];
    const bg_ops *ops = m->b->ops;
    const int n = plan_buffers(list, &m->d, &m->s, c);
    for (int i = 0; !st && i < n; i++) {
        const buffer *f = &list[i];
        const bool unneeded = f->use == GATE_UP && ops->fuses_glu && ops->fuses_glu(m->b);
        const bool input = f->use == INPUT && ops->act_input_new;
        st = (input ? ops->act_input_new : ops->act_new)(
            m->b, (bg_act *)((char *)&m->a + f->at), f->name, unneeded ? 0 : f->rows, f->cols, err);
    }
    return st;
}

uint64_t bg_act_bytes(const bg_desc *d, const bg_shard *s, const bg_backend_config *c)
{
    buffer list[MAX_BUFFERS];
    uint64_t values = (uint64_t)c->max_out * (uint64_t)d->vocab_size; /* logits */
    const int n = plan_buffers(list, d, s, c);
    for (int i = 0; i < n; i++)
        values += (uint64_t)list[i].rows * (uint64_t)list[i].cols;
    return values * sizeof(float);
}

uint64_t bg_gpu_act_bytes(const bg_desc *d, const bg_shard *s, const bg_backend_config *c,
                          bool tiled)
{
    buffer list[MAX_BUFFERS];
    uint64_t bytes = (uint64_t)c->max_out * (uint64_t)d->vocab_size * sizeof(float);
    uint64_t widest = 0;
    const int n = plan_buffers(list, d, s, c);
    for (int i = 0; i < n; i++) {
        uint64_t rows = (uint64_t)list[i].rows, cols = (uint64_t)list[i].cols;
        if (list[i].use == GATE_UP && tiled) continue;
        if (list[i].use == INPUT && tiled) { /* halves in whole tiles */
            rows = (rows + 255) / 256 * 256;
            cols = (cols + 63) / 64 * 64 / 2;
        }
        bytes += rows * cols * sizeof(float);
        if (list[i].use == INPUT && cols > widest) widest = cols;
    }
    if (d->n_experts) { /* rows by expert: halves of h and of what the down matrices read; sums */
        const uint64_t used = (uint64_t)d->n_used + (s->merged ? (uint64_t)d->n_shared : 0);
        bytes += (uint64_t)c->max_tokens * used *
                 (6 * (uint64_t)d->d_model + 2 * (((uint64_t)s->n_ffe + 63) / 64 * 64));
    }
    /* Else linears round their input to halves, in memory of their own. */
    return tiled ? bytes : bytes + (uint64_t)c->max_tokens * (widest + 64) * 2;
}
