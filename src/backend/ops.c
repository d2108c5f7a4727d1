/* The ops as models call them: the vtable's function, with poison before and a check after it when
 * the backend asks for them, and its time. */
#include "backend/ops.h"

#include <stdio.h>

#include "base/clock.h"

typedef enum op_kind {
    OP_EMBED,
    OP_RMS_NORM,
    OP_ADD,
    OP_ADD_RMS_NORM,
    OP_NORM_ADD_NORM,
    OP_LINEAR,
    OP_ROPE_STORE,
    OP_ATTENTION,
    OP_GLU,
    OP_LINEAR_GLU,
    OP_ROUTE,
    OP_MOE,
    OP_MLA_STORE,
    OP_MLA_QUERY,
    OP_MLA_ATTENTION,
    OP_INDEX,
    OP_ALL_REDUCE,
    OP_ALL_REDUCE_NORM,
    OP_GATHER_OUT,
    OP_LOGITS,
    OP_SAMPLE,
    OP_FETCH,
    OP_FETCH_LOGITS,
    N_OPS
} op_kind;

static const char *const op_names[N_OPS] = {
    "embed",      "rms_norm",  "add",           "add_rms_norm", "norm_add_norm", "linear",
    "rope_store", "attention", "glu",           "linear_glu",   "route",         "moe",
    "mla_store",  "mla_query", "mla_attention", "index",        "all_reduce",    "all_reduce_norm",
    "gather_out", "logits",    "sample",        "fetch",        "fetch_logits",
};
_Static_assert((int)N_OPS <= (int)BG_OP_KINDS, "op_ns has too few places");

const char *bg_op_kind_name(int kind)
{
    return kind >= 0 && kind < N_OPS ? op_names[kind] : NULL;
}

bg_op_group bg_op_kind_group(int kind)
{
    switch (kind) {
    case OP_LINEAR:
    case OP_LINEAR_GLU:
    case OP_LOGITS:
    case OP_MOE:
    case OP_MLA_QUERY:
        return BG_OPS_GEMM;
    case OP_ATTENTION:
    case OP_ROPE_STORE:
    case OP_MLA_STORE:
    case OP_MLA_ATTENTION:
    case OP_INDEX:
        return BG_OPS_ATTENTION;
    case OP_ALL_REDUCE:
    case OP_ALL_REDUCE_NORM:
        return BG_OPS_COLLECTIVES;
    default:
        return BG_OPS_OTHER;
    }
}

void bg_profile_take(bg_backend *b, bg_profile *p)
{
    if (b->ops->op_times) b->ops->op_times(b);
    for (int k = 0; k < BG_OP_KINDS; k++) {
        p->ns[k] = b->op_ns[k];
        p->calls[k] = b->op_calls[k];
        p->cost[k] = b->op_cost[k];
        b->op_ns[k] = b->op_calls[k] = 0;
        b->op_cost[k] = (bg_cost){0};
    }
}

void bg_backend_free(bg_backend *b)
{
    if (b) b->ops->free(b);
}

/* ---- what an op costs: its activations here, weights and cache by the backend -------------------
 */

static double act_bytes(const bg_act *a, int64_t rows, int64_t cols)
{
    return (double)rows * (double)cols * (a->layout ? 2 : 4);
}

static void count(bg_backend *b, op_kind kind, double bytes, double flops)
{
    if (!b->profile) return;
    b->op_cost[kind].bytes += bytes;
    b->op_cost[kind].flops += flops;
}

static void count_linear(bg_backend *b, op_kind kind, const bg_linear *l, const bg_act *x,
                         int64_t rows, double out_bytes)
{
    bg_cost w = {0};
    if (!b->profile) return;
    if (b->ops->linear_cost) b->ops->linear_cost(b, l, rows, &w);
    count(b, kind, w.bytes + act_bytes(x, rows, x->cols) + out_bytes, w.flops);
}

static void count_attention(bg_backend *b, const bg_act *out, const bg_act *q, const bg_attn *p)
{
    bg_cost kv = {0};
    if (!b->profile) return;
    const int64_t rows = b->ops->n_rows(b);
    if (b->ops->attention_cost) b->ops->attention_cost(b, p, &kv);
    count(b, OP_ATTENTION,
          kv.bytes + act_bytes(q, rows, (int64_t)p->n_heads * p->head_dim) +
              act_bytes(out, rows, (int64_t)p->n_heads * p->v_dim),
          kv.flops);
}

/* ---- around every op ----------------------------------------------------------------------------
 */

/* fresh: the op overwrites out and does not read it, so all its rows are poisoned first. */
static int64_t before(bg_backend *b, op_kind kind, bg_act *out, bool fresh)
{
    if (b->check && out && fresh) b->ops->poison(b, out, out->max_rows);
    if (!b->ops->op_begin) return b->profile ? bg_now_ns() : 0;
    b->ops->op_begin(b, kind);
    return 0;
}

static bg_status after(bg_backend *b, op_kind kind, int64_t start_ns, const bg_act *out,
                       int64_t rows, int64_t cols, bg_status st, bg_error *err)
{
    if (b->ops->op_end) {
        b->ops->op_end(b, kind);
    } else if (b->profile) {
        b->ops->sync(b);
        b->op_ns[kind] += bg_now_ns() - start_ns;
        b->op_calls[kind]++;
    }
    if (st || !b->check || !out) return st;
    int64_t row = 0, col = 0;
    if (b->ops->all_finite(b, out, rows, cols, &row, &col)) return BG_OK;
    return bg_fail(err, BG_INTERNAL,
                   "op %s: %s[%lld, %lld] is not finite after it (%lld rows of %lld columns)",
                   op_names[kind], out->name ? out->name : "?", (long long)row, (long long)col,
                   (long long)rows, (long long)cols);
}

bg_status bg_op_embed(bg_backend *b, bg_act *out, const bg_embedding *e, float scale, bg_error *err)
{
    const int64_t t = before(b, OP_EMBED, out, true);
    count(b, OP_EMBED, act_bytes(out, b->ops->n_rows(b), out->cols) * 1.5, 0); /* of halves */
    bg_status st = b->ops->embed(b, out, e, scale, err);
    return after(b, OP_EMBED, t, out, b->ops->n_rows(b), out->cols, st, err);
}

bg_status bg_op_rms_norm(bg_backend *b, bg_act *out, const bg_act *x, const bg_vec *w, float eps,
                         int n_rows, bg_error *err)
{
    const int64_t t = before(b, OP_RMS_NORM, out, out->data != x->data);
    count(b, OP_RMS_NORM, act_bytes(x, n_rows, x->cols) + act_bytes(out, n_rows, x->cols), 0);
    bg_status st = b->ops->rms_norm(b, out, x, w, eps, n_rows, err);
    return after(b, OP_RMS_NORM, t, out, n_rows, out->cols, st, err);
}

bg_status bg_op_add(bg_backend *b, bg_act *x, const bg_act *y, bg_error *err)
{
    const int64_t t = before(b, OP_ADD, x, false);
    count(b, OP_ADD, 3 * act_bytes(x, b->ops->n_rows(b), x->cols), 0);
    bg_status st = b->ops->add(b, x, y, err);
    return after(b, OP_ADD, t, x, b->ops->n_rows(b), x->cols, st, err);
}

bg_status bg_op_add_rms_norm(bg_backend *b, bg_act *out, bg_act *x, const bg_act *y,
                             const bg_vec *w, float eps, bg_error *err)
{
    const int64_t t = before(b, OP_ADD_RMS_NORM, out, true);
    count(b, OP_ADD_RMS_NORM,
          3 * act_bytes(x, b->ops->n_rows(b), x->cols) + act_bytes(out, b->ops->n_rows(b), x->cols),
          0);
    bg_status st = b->ops->add_rms_norm(b, out, x, y, w, eps, err);
    return after(b, OP_ADD_RMS_NORM, t, out, b->ops->n_rows(b), out->cols, st, err);
}

bg_status bg_op_norm_add_norm(bg_backend *b, bg_act *out, bg_act *x, bg_act *y, const bg_vec *post,
                              const bg_vec *w, float eps, bg_error *err)
{
    const int n_rows = b->ops->n_rows(b);
    if (!b->ops->norm_add_norm) {
        bg_status st = bg_op_rms_norm(b, y, y, post, eps, n_rows, err);
        return st ? st : bg_op_add_rms_norm(b, out, x, y, w, eps, err);
    }
    const int64_t t = before(b, OP_NORM_ADD_NORM, out, true);
    count(b, OP_NORM_ADD_NORM, 3 * act_bytes(x, n_rows, x->cols) + act_bytes(out, n_rows, x->cols),
          0);
    bg_status st = b->ops->norm_add_norm(b, out, x, y, post, w, eps, err);
    return after(b, OP_NORM_ADD_NORM, t, out, n_rows, out->cols, st, err);
}

bg_status bg_op_linear(bg_backend *b, bg_act *out, const bg_linear *l, const bg_act *x, int n_rows,
                       bg_error *err)
{
    const int64_t t = before(b, OP_LINEAR, out, true);
    count_linear(b, OP_LINEAR, l, x, n_rows, act_bytes(out, n_rows, b->ops->linear_rows(l)));
    bg_status st = b->ops->linear(b, out, l, x, n_rows, err);
    return after(b, OP_LINEAR, t, out, n_rows, b->ops->linear_rows(l), st, err);
}

bg_status bg_op_rope_store(bg_backend *b, bg_act *q_out, const bg_act *qkv, const bg_attn_in *p,
                           bg_error *err)
{
    const int64_t t = before(b, OP_ROPE_STORE, q_out, true);
    count(b, OP_ROPE_STORE,
          act_bytes(qkv, b->ops->n_rows(b), qkv->cols) + /* and K and V again, as halves */
              act_bytes(q_out, b->ops->n_rows(b), (int64_t)p->n_heads * p->head_dim) +
              2.0 * b->ops->n_rows(b) * p->n_kv_heads * (p->head_dim + p->v_dim),
          0);
    bg_status st = b->ops->rope_store(b, q_out, qkv, p, err);
    return after(b, OP_ROPE_STORE, t, q_out, b->ops->n_rows(b), (int64_t)p->n_heads * p->head_dim,
                 st, err);
}

bg_status bg_op_attention(bg_backend *b, bg_act *out, const bg_act *q, const bg_attn *p,
                          bg_error *err)
{
    const int64_t t = before(b, OP_ATTENTION, out, true);
    count_attention(b, out, q, p);
    bg_status st = b->ops->attention(b, out, q, p, err);
    return after(b, OP_ATTENTION, t, out, b->ops->n_rows(b), (int64_t)p->n_heads * p->v_dim, st,
                 err);
}

bg_status bg_op_glu(bg_backend *b, bg_act *out, const bg_act *gate_up, bg_act_fn fn, bg_error *err)
{
    const int64_t t = before(b, OP_GLU, out, true);
    count(b, OP_GLU,
          act_bytes(gate_up, b->ops->n_rows(b), 2 * out->cols) +
              act_bytes(out, b->ops->n_rows(b), out->cols),
          0);
    bg_status st = b->ops->glu(b, out, gate_up, fn, err);
    return after(b, OP_GLU, t, out, b->ops->n_rows(b), out->cols, st, err);
}

bg_status bg_op_linear_glu(bg_backend *b, bg_act *out, bg_act *gate_up, const bg_linear *l,
                           const bg_act *x, bg_act_fn fn, bg_error *err)
{
    if (!b->ops->fuses_glu || !b->ops->fuses_glu(b)) {
        bg_status st = bg_op_linear(b, gate_up, l, x, b->ops->n_rows(b), err);
        return st ? st : bg_op_glu(b, out, gate_up, fn, err);
    }
    const int64_t t = before(b, OP_LINEAR_GLU, out, true);
    count_linear(b, OP_LINEAR_GLU, l, x, b->ops->n_rows(b),
                 act_bytes(out, b->ops->n_rows(b), out->cols));
    bg_status st = b->ops->linear_glu(b, out, l, x, fn, err);
    return after(b, OP_LINEAR_GLU, t, out, b->ops->n_rows(b), out->cols, st, err);
}

bg_status bg_op_route(bg_backend *b, bg_act *route, const bg_router *r, const bg_act *h,
                      bg_error *err)
{
    const int64_t t = before(b, OP_ROUTE, route, true);
    count(b, OP_ROUTE, act_bytes(h, b->ops->n_rows(b), h->cols), 0);
    bg_status st = b->ops->route(b, route, r, h, err);
    return after(b, OP_ROUTE, t, route, b->ops->n_rows(b), route->cols, st, err);
}

bg_status bg_op_moe(bg_backend *b, bg_act *out, const bg_experts *e, const bg_act *route,
                    const bg_act *h, const bg_act *add, bg_error *err)
{
    const int64_t t = before(b, OP_MOE, out, !add || add->data != out->data);
    bg_cost w = {0};
    if (b->profile && b->ops->moe_cost) b->ops->moe_cost(b, e, b->ops->n_rows(b), &w);
    count(b, OP_MOE,
          w.bytes + act_bytes(h, b->ops->n_rows(b), h->cols) +
              act_bytes(out, b->ops->n_rows(b), out->cols),
          w.flops);
    bg_status st = b->ops->moe(b, out, e, route, h, add, err);
    return after(b, OP_MOE, t, out, b->ops->n_rows(b), out->cols, st, err);
}

bg_status bg_op_mla_store(bg_backend *b, bg_act *qa, const bg_act *in, const bg_mla_in *p,
                          bg_error *err)
{
    const int64_t t = before(b, OP_MLA_STORE, qa, true);
    count(b, OP_MLA_STORE, 1.5 * act_bytes(in, b->ops->n_rows(b), in->cols), 0);
    bg_status st = b->ops->mla_store(b, qa, in, p, err);
    return after(b, OP_MLA_STORE, t, qa, b->ops->n_rows(b), p->q_rank, st, err);
}

bg_status bg_op_mla_query(bg_backend *b, bg_act *q_lat, const bg_linear *k_b, const bg_act *q,
                          bg_error *err)
{
    const int64_t t = before(b, OP_MLA_QUERY, q_lat, true), n_rows = b->ops->n_rows(b);
    count_linear(b, OP_MLA_QUERY, k_b, q, n_rows,
                 act_bytes(q_lat, n_rows, b->ops->linear_rows(k_b)));
    bg_status st = b->ops->mla_query(b, q_lat, k_b, q, err);
    return after(b, OP_MLA_QUERY, t, q_lat, n_rows, b->ops->linear_rows(k_b), st, err);
}

bg_status bg_op_mla_attention(bg_backend *b, bg_act *out, const bg_act *q_lat, const bg_act *q,
                              const bg_mla *p, bg_error *err)
{
    const int64_t t = before(b, OP_MLA_ATTENTION, out, true), n_rows = b->ops->n_rows(b);
    const int64_t cols = (int64_t)p->n_heads * p->kv_rank;
    bg_cost kv = {0};
    if (b->profile && b->ops->mla_cost) b->ops->mla_cost(b, p, &kv);
    count(b, OP_MLA_ATTENTION, kv.bytes + 2 * act_bytes(out, n_rows, cols), kv.flops);
    bg_status st = b->ops->mla_attention(b, out, q_lat, q, p, err);
    return after(b, OP_MLA_ATTENTION, t, out, n_rows, cols, st, err);
}

bg_status bg_op_index(bg_backend *b, const bg_act *iq, const bg_act *ik, const bg_index *p,
                      bg_error *err)
{
    const int64_t t = before(b, OP_INDEX, NULL, false);
    count(b, OP_INDEX, act_bytes(iq, b->ops->n_rows(b), iq->cols), 0);
    bg_status st = b->ops->index(b, iq, ik, p, err);
    return after(b, OP_INDEX, t, NULL, 0, 0, st, err);
}

bg_status bg_op_all_reduce(bg_backend *b, bg_act *x, bg_error *err)
{
    const int64_t t = before(b, OP_ALL_REDUCE, x, false);
    bg_status st = b->ops->all_reduce(b, x, err);
    return after(b, OP_ALL_REDUCE, t, x, b->ops->n_rows(b), x->cols, st, err);
}

bg_status bg_op_all_reduce_add_rms_norm(bg_backend *b, bg_act *out, bg_act *x, bg_act *y,
                                        const bg_vec *w, float eps, bg_error *err)
{
    if (!b->ops->fuses_sum || !b->ops->fuses_sum(b, out, y)) {
        bg_status st = bg_op_all_reduce(b, y, err);
        return st ? st : bg_op_add_rms_norm(b, out, x, y, w, eps, err);
    }
    const int n_rows = b->ops->n_rows(b);
    const int64_t t = before(b, OP_ALL_REDUCE_NORM, out, true);
    count(b, OP_ALL_REDUCE_NORM,
          3 * act_bytes(x, n_rows, x->cols) + act_bytes(out, n_rows, x->cols), 0);
    bg_status st = b->ops->all_reduce_norm(b, out, x, y, w, eps, err);
    return after(b, OP_ALL_REDUCE_NORM, t, out, n_rows, out->cols, st, err);
}

bg_status bg_op_gather_out(bg_backend *b, bg_act *out, const bg_act *x, bg_error *err)
{
    const int64_t t = before(b, OP_GATHER_OUT, out, true);
    count(b, OP_GATHER_OUT, 2 * act_bytes(out, b->ops->n_out(b), out->cols), 0);
    bg_status st = b->ops->gather_out(b, out, x, err);
    return after(b, OP_GATHER_OUT, t, out, b->ops->n_out(b), out->cols, st, err);
}

bg_status bg_op_logits(bg_backend *b, const bg_linear *head, const bg_act *x,
                       const int64_t *rank_rows, float softcap, bg_error *err)
{
    const int64_t t = before(b, OP_LOGITS, NULL, false);
    b->logits_bytes = 4.0 * b->ops->n_out(b) * (double)b->ops->linear_rows(head);
    count_linear(b, OP_LOGITS, head, x, b->ops->n_out(b), b->logits_bytes);
    bg_status st = b->ops->logits(b, head, x, rank_rows, softcap, err);
    return after(b, OP_LOGITS, t, NULL, 0, 0, st, err);
}

bg_status bg_op_sample(bg_backend *b, bg_error *err)
{
    const int64_t t = before(b, OP_SAMPLE, NULL, false);
    count(b, OP_SAMPLE, b->logits_bytes, 0);
    bg_status st = b->ops->sample(b, err);
    return after(b, OP_SAMPLE, t, NULL, 0, 0, st, err);
}

bg_status bg_op_fetch(bg_backend *b, bg_sampled *out, int *n, bg_error *err)
{
    const int64_t t = before(b, OP_FETCH, NULL, false);
    bg_status st = b->ops->fetch(b, out, n, err);
    return after(b, OP_FETCH, t, NULL, 0, 0, st, err);
}

bg_status bg_op_fetch_logits(bg_backend *b, float *out, bg_error *err)
{
    const int64_t t = before(b, OP_FETCH_LOGITS, NULL, false);
    bg_status st = b->ops->fetch_logits(b, out, err);
    return after(b, OP_FETCH_LOGITS, t, NULL, 0, 0, st, err);
}

void bg_load_times_text(const bg_load_times *t, char *out, size_t size)
{
    char bytes[32];
    if (size) *out = 0;
    if (!t->bytes) return;
    bg_format_bytes((uint64_t)t->bytes, bytes, sizeof bytes);
    snprintf(out, size,
             "%s in %.2f s (reading %.2f s, waiting %.2f s; the GPU: copies %.2f s, repacking %.2f "
             "s)",
             bytes, (double)t->total_ns * 1e-9, (double)t->read_ns * 1e-9,
             (double)t->wait_ns * 1e-9, (double)t->copy_ns * 1e-9, (double)t->repack_ns * 1e-9);
}
