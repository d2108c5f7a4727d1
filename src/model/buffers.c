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

enum { N_BUFFERS = 10 };

static void plan_buffers(buffer *list, const bg_desc *d, const bg_shard *s,
                         const bg_backend_config *c)
{
#define AT(member) (offsetof(bg_model, a.member) - offsetof(bg_model, a))
    const int64_t t = c->max_tokens, o = c->max_out, d_model = d->d_model;
    const int64_t q = bg_shard_range(s, d, DIM_Q).n, att = bg_shard_range(s, d, DIM_ATT).n;
    const int64_t kv = bg_shard_range(s, d, DIM_K).n + bg_shard_range(s, d, DIM_V).n;
    const buffer all[N_BUFFERS] = {
        {"x", ROWS, AT(x), t, d_model},
        {"h", INPUT, AT(h), t, d_model},
        {"y", ROWS, AT(y), t, d_model},
        {"qkv", ROWS, AT(qkv), t, q + kv},
        {"q", ROWS, AT(q), t, q},
        {"att", INPUT, AT(att), t, att},
        {"gate_up", GATE_UP, AT(gate_up), t, 2 * (int64_t)s->n_ff},
        {"ff", INPUT, AT(ff), t, s->n_ff},
        {"out", ROWS, AT(out), o, d_model},
        {"out_h", INPUT, AT(out_h), o, d_model},
    };
#undef AT
    for (int i = 0; i < N_BUFFERS; i++) {
        list[i] = all[i];
        if (list[i].cols < 1) list[i].cols = 1; /* a rank without heads or FFN columns */
    }
}

bg_status bg_buffers_new(bg_model *m, const bg_backend_config *c, bg_error *err)
{
    bg_status st = BG_OK;
    buffer list[N_BUFFERS];
    const bg_ops *ops = m->b->ops;
    plan_buffers(list, &m->d, &m->s, c);
    for (int i = 0; !st && i < N_BUFFERS; i++) {
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
    buffer list[N_BUFFERS];
    uint64_t values = (uint64_t)c->max_out * (uint64_t)d->vocab_size; /* logits */
    plan_buffers(list, d, s, c);
    for (int i = 0; i < N_BUFFERS; i++)
        values += (uint64_t)list[i].rows * (uint64_t)list[i].cols;
    return values * sizeof(float);
}

uint64_t bg_gpu_act_bytes(const bg_desc *d, const bg_shard *s, const bg_backend_config *c,
                          bool tiled)
{
    buffer list[N_BUFFERS];
    uint64_t bytes = (uint64_t)c->max_out * (uint64_t)d->vocab_size * sizeof(float);
    uint64_t widest = 0;
    plan_buffers(list, d, s, c);
    for (int i = 0; i < N_BUFFERS; i++) {
        uint64_t rows = (uint64_t)list[i].rows, cols = (uint64_t)list[i].cols;
        if (list[i].use == GATE_UP && tiled) continue;
        if (list[i].use == INPUT && tiled) { /* halves in whole tiles */
            rows = (rows + 255) / 256 * 256;
            cols = (cols + 63) / 64 * 64 / 2;
        }
        bytes += rows * cols * sizeof(float);
        if (list[i].use == INPUT && cols > widest) widest = cols;
    }
    /* Else linears round their input to halves, in memory of their own. */
    return tiled ? bytes : bytes + (uint64_t)c->max_tokens * (widest + 64) * 2;
}
