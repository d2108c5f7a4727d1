#include "backend/cost.h"

void bg_attention_cost(const bg_steps *s, const bg_attn *p, double value_bytes, bg_cost *cost)
{
    double keys_read = 0, keys_seen = 0;
    for (int i = 0; i < s->n_seqs; i++) {
        const int pos0 = s->seqs[i].pos0, n = s->seqs[i].n_tokens;
        const int first = p->window && pos0 >= p->window ? pos0 - p->window + 1 : 0;
        keys_read += pos0 + n - first;
        for (int pos = pos0; pos < pos0 + n; pos++)
            keys_seen += p->window && pos >= p->window ? p->window : pos + 1;
    }
    const double head = p->head_dim + p->v_dim;
    cost->bytes = keys_read * p->n_kv_heads * head * value_bytes;
    cost->flops = 2 * keys_seen * p->n_heads * head;
}

void bg_mla_cost(const bg_steps *s, const bg_mla *p, int top_k, double value_bytes, bg_cost *cost)
{
    double keys_read = 0, keys_seen = 0;
    for (int i = 0; i < s->n_seqs; i++) {
        const int end = s->seqs[i].pos0 + s->seqs[i].n_tokens;
        double read = 0; /* rows may choose the same keys or others: at most all of them */
        for (int pos = s->seqs[i].pos0; pos < end; pos++) {
            const int n = p->selected && pos >= top_k ? top_k : pos + 1;
            keys_seen += n;
            read += n;
        }
        keys_read += read < end ? read : end;
    }
    cost->bytes = keys_read * (p->kv_rank + p->n_rot) * value_bytes;
    cost->flops = 2 * keys_seen * p->n_heads * (2.0 * p->kv_rank + p->n_rot);
}
