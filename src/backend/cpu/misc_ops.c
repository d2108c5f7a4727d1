/* The CPU backend's ops that are loops over rows: embed, norms, add, glu, gather_out. */
#include <math.h>
#include <string.h>

#include "backend/cpu/cpu.h"
#include "gguf/gguf.h"

enum { WAKE_ELEMENTS = 16384, GLU_PIECE = 1024 }; /* less is done before the others have woken */

/* One op's arguments; run(op, i) does unit i of n_units, all independent of each other. */
typedef struct row_op {
    bg_cpu *c;
    void (*run)(const struct row_op *op, int64_t i);
    int64_t n_units;
    float *out, *x;
    const float *y, *w;
    int64_t cols, y_cols;
    float eps, scale;
    const bg_embedding *embedding;
    bg_act_fn fn;
} row_op;

static void slice(void *ctx, int thread, int n_threads)
{
    const row_op *op = ctx;
    const int64_t from = op->n_units * thread / n_threads;
    const int64_t to = op->n_units * (thread + 1) / n_threads;
    for (int64_t i = from; i < to; i++)
        op->run(op, i);
}

static void run_op(row_op *op, int64_t n_elements)
{
    if (op->n_units > 1 && n_elements >= WAKE_ELEMENTS && bg_pool_threads(op->c->pool) > 1)
        bg_pool_run(op->c->pool, slice, op);
    else
        slice(op, 0, 1);
}

static bg_status check_rows(const bg_act *a, int64_t rows, int64_t cols, const char *op,
                            bg_error *err)
{
    if (rows <= a->max_rows && cols <= a->cols) return BG_OK;
    return bg_fail(err, BG_INTERNAL, "op %s: %s is [%lld, %lld], [%lld, %lld] are needed", op,
                   a->name, (long long)a->max_rows, (long long)a->cols, (long long)rows,
                   (long long)cols);
}

static bg_status check_same(const bg_act *a, const bg_act *b, const char *op, bg_error *err)
{
    if (a->cols == b->cols) return BG_OK;
    return bg_fail(err, BG_INTERNAL, "op %s: %s has %lld columns, %s %lld", op, a->name,
                   (long long)a->cols, b->name, (long long)b->cols);
}

static void embed_row(const row_op *op, int64_t i)
{
    const bg_cpu *c = op->c;
    const bg_step_seq *seq = &c->s.seqs[c->s.row_seq[i]];
    const int32_t token = c->s.slots[seq->slot].tokens[c->s.row_pos[i]];
    float *out = op->out + i * op->cols;
    bg_dequant_row(op->embedding->type,
                   op->embedding->data + (size_t)token * op->embedding->row_bytes, out, op->cols);
    if (op->scale != 1)
        for (int64_t j = 0; j < op->cols; j++)
            out[j] *= op->scale;
}

bg_status bg_cpu_embed(bg_backend *b, bg_act *out, const bg_embedding *e, float scale,
                       bg_error *err)
{
    bg_cpu *c = (bg_cpu *)b;
    if (out->cols != e->cols || e->vocab < c->config.vocab_size)
        return bg_fail(err, BG_INTERNAL, "op embed: %s has %lld columns, the table is [%lld, %lld]",
                       out->name, (long long)out->cols, (long long)e->vocab, (long long)e->cols);
    bg_status st = check_rows(out, c->s.n_rows, e->cols, "embed", err);
    if (st) return st;
    row_op op = {c,
                 embed_row,
                 c->s.n_rows,
                 .out = out->data,
                 .cols = e->cols,
                 .scale = scale,
                 .embedding = e};
    run_op(&op, c->s.n_rows * e->cols);
    return BG_OK;
}

float bg_cpu_norm_factor(const bg_cpu *c, const float *x, int64_t n, float eps)
{
    return 1.0f / sqrtf(c->kernels->sum_squares(x, n) / (float)n + eps);
}

static void norm_row(const row_op *op, int64_t i)
{
    const bg_kernels *k = op->c->kernels;
    float *x = op->x + i * op->cols;
    if (op->y) k->add(x, op->y + i * op->cols, op->cols);
    k->scale_mul(op->out + i * op->cols, x, op->w, bg_cpu_norm_factor(op->c, x, op->cols, op->eps),
                 op->cols);
}

static bg_status norm(bg_backend *b, bg_act *out, const bg_act *x, const bg_act *y, const bg_vec *w,
                      float eps, int n_rows, bg_error *err)
{
    bg_cpu *c = (bg_cpu *)b;
    bg_status st = check_same(out, x, "rms_norm", err);
    if (!st && y) st = check_same(y, x, "add_rms_norm", err);
    if (!st) st = check_rows(out, n_rows, x->cols, "rms_norm", err);
    if (!st) st = check_rows(x, n_rows, x->cols, "rms_norm", err);
    if (!st && y) st = check_rows(y, n_rows, x->cols, "add_rms_norm", err);
    if (!st && w->n != x->cols)
        st = bg_fail(err, BG_INTERNAL, "op rms_norm: %s has %lld values, %s %lld columns", w->name,
                     (long long)w->n, x->name, (long long)x->cols);
    if (st) return st;
    row_op op = {c,
                 norm_row,
                 n_rows,
                 out->data,
                 .x = x->data,
                 .y = y ? y->data : NULL,
                 .w = w->data,
                 .cols = x->cols,
                 .eps = eps};
    run_op(&op, n_rows * x->cols);
    return BG_OK;
}

bg_status bg_cpu_rms_norm(bg_backend *b, bg_act *out, const bg_act *x, const bg_vec *w, float eps,
                          int n_rows, bg_error *err)
{
    return norm(b, out, x, NULL, w, eps, n_rows, err);
}

bg_status bg_cpu_add_rms_norm(bg_backend *b, bg_act *out, bg_act *x, const bg_act *y,
                              const bg_vec *w, float eps, bg_error *err)
{
    return norm(b, out, x, y, w, eps, ((bg_cpu *)b)->s.n_rows, err);
}

static void add_row(const row_op *op, int64_t i)
{
    op->c->kernels->add(op->x + i * op->cols, op->y + i * op->cols, op->cols);
}

bg_status bg_cpu_add(bg_backend *b, bg_act *x, const bg_act *y, bg_error *err)
{
    bg_cpu *c = (bg_cpu *)b;
    bg_status st = check_same(x, y, "add", err);
    if (!st) st = check_rows(x, c->s.n_rows, x->cols, "add", err);
    if (!st) st = check_rows(y, c->s.n_rows, x->cols, "add", err);
    if (st) return st;
    row_op op = {c, add_row, c->s.n_rows, .x = x->data, .y = y->data, .cols = x->cols};
    run_op(&op, c->s.n_rows * x->cols);
    return BG_OK;
}

static void glu_piece(const row_op *op, int64_t i)
{
    const int64_t pieces = (op->cols + GLU_PIECE - 1) / GLU_PIECE;
    const int64_t row = i / pieces, col = i % pieces * GLU_PIECE;
    const int64_t n = op->cols - col < GLU_PIECE ? op->cols - col : GLU_PIECE;
    const float *gate = op->y + row * op->y_cols + col;
    op->c->kernels->glu(op->out + row * op->cols + col, gate, gate + op->cols, n, op->fn);
}

bg_status bg_cpu_glu(bg_backend *b, bg_act *out, const bg_act *gate_up, bg_act_fn fn, bg_error *err)
{
    bg_cpu *c = (bg_cpu *)b;
    bg_status st = check_rows(out, c->s.n_rows, out->cols, "glu", err);
    if (!st) st = check_rows(gate_up, c->s.n_rows, 2 * out->cols, "glu", err);
    if (st) return st;
    row_op op = {c,
                 glu_piece,
                 c->s.n_rows * ((out->cols + GLU_PIECE - 1) / GLU_PIECE),
                 .out = out->data,
                 .y = gate_up->data,
                 .cols = out->cols,
                 .y_cols = gate_up->cols,
                 .fn = fn};
    run_op(&op, 4 * c->s.n_rows * out->cols); /* an exp is worth several products */
    return BG_OK;
}

bg_status bg_cpu_gather_out(bg_backend *b, bg_act *out, const bg_act *x, bg_error *err)
{
    bg_cpu *c = (bg_cpu *)b;
    bg_status st = check_same(out, x, "gather_out", err);
    if (!st) st = check_rows(out, c->s.n_out, x->cols, "gather_out", err);
    if (!st) st = check_rows(x, c->s.n_rows, x->cols, "gather_out", err);
    if (st) return st;
    for (int j = 0; j < c->s.n_out; j++)
        memcpy((float *)out->data + j * x->cols, (const float *)x->data + c->s.out_row[j] * x->cols,
               (size_t)x->cols * sizeof(float));
    return BG_OK;
}
