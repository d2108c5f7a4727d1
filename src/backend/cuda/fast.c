/* --fast-math: linears of steps with many rows as products of a library, cuBLASLt, on a copy of the
 * weights in half precision that is made beside the tiles as they are loaded.
 *
 * Half rather than bf16: activations come as halves (BGK_TILES), so that their rows are taken as
 * they are, and a dequantised weight keeps eight times the precision; the library is as fast with
 * either. Sums are float32. With gate and up in one, the product goes to halves and a kernel of
 * ours applies the activation.
 *
 *   bits      whatever the library does: a row's result may depend on how many rows there are
 *   memory    a copy of each linear; rows of the widest input and of gate and up; the library's
 *             workspace: all made once, before the first step
 *   capture   which algorithm is asked for once for each shape and class of rows, outside of it:
 *             a graph's first run launches the same ops one by one
 *
 * The library is looked for when --fast-math asks for it; a build without its header has none of
 * this. */
#include "backend/cuda/cuda.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#if __has_include(<cublasLt.h>)

#include <cublasLt.h>

enum { WORKSPACE_BYTES = 32 << 20, ALIGNMENT = 256 };

typedef struct lt { /* what is used of cublasLt.h */
    __typeof__(cublasLtCreate) *create;
    __typeof__(cublasLtDestroy) *destroy;
    __typeof__(cublasLtMatmulDescCreate) *desc_create;
    __typeof__(cublasLtMatmulDescDestroy) *desc_destroy;
    __typeof__(cublasLtMatmulDescSetAttribute) *desc_set;
    __typeof__(cublasLtMatrixLayoutCreate) *layout_create;
    __typeof__(cublasLtMatrixLayoutDestroy) *layout_destroy;
    __typeof__(cublasLtMatmulPreferenceCreate) *preference_create;
    __typeof__(cublasLtMatmulPreferenceDestroy) *preference_destroy;
    __typeof__(cublasLtMatmulPreferenceSetAttribute) *preference_set;
    __typeof__(cublasLtMatmulAlgoGetHeuristic) *heuristic;
    __typeof__(cublasLtMatmulAlgoCheck) *check;
    __typeof__(cublasLtMatmul) *matmul;
    __typeof__(cublasLtGetStatusString) *status_string;
} lt;

/* out = x w^T (+ bias): what an algorithm is chosen for. */
typedef struct product {
    const void *w, *x;
    const float *bias; /* NULL: none */
    void *out;
    int64_t out_cols;
    int n_rows, k; /* of w */
    bool half;     /* out is of halves, else of float32 */
} product;

typedef struct choice {
    int n_rows, k, rows; /* rows: the largest of the class */
    int64_t out_cols;
    bool half, bias;
    cublasLtMatmulAlgo_t algo;
} choice;

struct bg_cuda_fast {
    lt f;
    cublasLtHandle_t handle;
    cublasLtMatmulDesc_t plain, biased;
    cublasLtMatmulPreference_t preference;
    void *workspace;
    int widest_k, widest_ff; /* of the linears loaded */
    void *x, *glu;           /* NULL: not made yet */
    choice *choices;
    int n_choices, choices_cap;
};

/* ---- the library ----------------------------------------------------------------------------- */

static bool symbol(void *library, const char *name, void *fn)
{
    void *at = dlsym(library, name);
    memcpy(fn, &at, sizeof at); /* ISO C has no cast from it to a function's */
    return at != NULL;
}

static bg_status load_library(lt *f, bg_error *err)
{
    static const char *const places[] = {"libcublasLt.so.13",
                                         "libcublasLt.so.12",
                                         "/usr/local/cuda/lib64/libcublasLt.so.13",
                                         "/usr/local/cuda/lib/libcublasLt.so.13",
                                         "/usr/local/cuda/lib64/libcublasLt.so.12",
                                         "/usr/local/cuda/lib/libcublasLt.so.12"};
    void *l = NULL;
    for (size_t i = 0; !l && i < sizeof places / sizeof *places; i++)
        l = dlopen(places[i], RTLD_NOW | RTLD_LOCAL);
    if (!l)
        return bg_fail(err, BG_DEVICE,
                       "--fast-math needs cuBLASLt, and neither libcublasLt.so.13 nor .12 is "
                       "found: install CUDA's libcublas, name its folder in LD_LIBRARY_PATH, or "
                       "leave --fast-math out");
    symbol(l, "cublasLtGetStatusString", &f->status_string);
    if (symbol(l, "cublasLtCreate", &f->create) && symbol(l, "cublasLtDestroy", &f->destroy) &&
        symbol(l, "cublasLtMatmulDescCreate", &f->desc_create) &&
        symbol(l, "cublasLtMatmulDescDestroy", &f->desc_destroy) &&
        symbol(l, "cublasLtMatmulDescSetAttribute", &f->desc_set) &&
        symbol(l, "cublasLtMatrixLayoutCreate", &f->layout_create) &&
        symbol(l, "cublasLtMatrixLayoutDestroy", &f->layout_destroy) &&
        symbol(l, "cublasLtMatmulPreferenceCreate", &f->preference_create) &&
        symbol(l, "cublasLtMatmulPreferenceDestroy", &f->preference_destroy) &&
        symbol(l, "cublasLtMatmulPreferenceSetAttribute", &f->preference_set) &&
        symbol(l, "cublasLtMatmulAlgoGetHeuristic", &f->heuristic) &&
        symbol(l, "cublasLtMatmulAlgoCheck", &f->check) && symbol(l, "cublasLtMatmul", &f->matmul))
        return BG_OK;
    return bg_fail(err, BG_DEVICE, "--fast-math: libcublasLt lacks functions of CUDA 12 and later");
}

static bg_status done(const struct bg_cuda_fast *m, cublasStatus_t s, const char *what,
                      bg_error *err)
{
    if (s == CUBLAS_STATUS_SUCCESS) return BG_OK;
    return bg_fail(err, s == CUBLAS_STATUS_ALLOC_FAILED ? BG_NOMEM : BG_DEVICE,
                   "%s: cuBLASLt: %s (status %d; --fast-math)", what,
                   m->f.status_string ? m->f.status_string(s) : "failed", (int)s);
}

static bg_status make_desc(struct bg_cuda_fast *m, cublasLtMatmulDesc_t *d, bool bias,
                           bg_error *err)
{
    const cublasOperation_t transposed = CUBLAS_OP_T;
    const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
    bg_status st = done(m, m->f.desc_create(d, CUBLAS_COMPUTE_32F, CUDA_R_32F), "a product", err);
    if (!st)
        st = done(m, m->f.desc_set(*d, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed),
                  "a product", err);
    if (!st && bias)
        st = done(m, m->f.desc_set(*d, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue),
                  "a product", err);
    return st;
}

bg_status bg_cuda_fast_new(bg_cuda *c, bg_error *err)
{
    if (!c->config.fast_math) return BG_OK;
    if (!c->tiled)
        return bg_fail(err, BG_ARG,
                       "--fast-math needs a GPU of compute capability 9.x and native arithmetic");
    struct bg_cuda_fast *m = calloc(1, sizeof *m);
    if (!m) return bg_fail(err, BG_NOMEM, "backend: out of memory");
    c->fast = m;
    const uint64_t most = WORKSPACE_BYTES;
    bg_status st = load_library(&m->f, err);
    if (!st) st = done(m, m->f.create(&m->handle), "opening", err);
    if (!st) st = make_desc(m, &m->plain, false, err);
    if (!st) st = make_desc(m, &m->biased, true, err);
    if (!st) st = done(m, m->f.preference_create(&m->preference), "preferences", err);
    if (!st)
        st = done(m,
                  m->f.preference_set(m->preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                      &most, sizeof most),
                  "preferences", err);
    return st ? st : bg_cuda_take(c, &m->workspace, WORKSPACE_BYTES, "--fast-math workspace", err);
}

void bg_cuda_fast_free(bg_cuda *c)
{
    struct bg_cuda_fast *m = c->fast;
    if (!m) return;
    if (m->preference) m->f.preference_destroy(m->preference);
    if (m->plain) m->f.desc_destroy(m->plain);
    if (m->biased) m->f.desc_destroy(m->biased);
    if (m->handle) m->f.destroy(m->handle);
    free(m->choices);
    free(m);
    c->fast = NULL;
}

/* ---- weights and room ------------------------------------------------------------------------ */

/* Halves from one row of gate and up to the next. */
static int64_t glu_cols(int n_ff)
{
    return (2 * (int64_t)n_ff + 7) / 8 * 8;
}

bg_status bg_cuda_fast_linear_new(bg_cuda *c, bg_linear *l, bg_error *err)
{
    struct bg_cuda_fast *m = c->fast;
    if (!m || !l->n_rows || !l->k) return BG_OK;
    if (l->k_padded > m->widest_k) m->widest_k = l->k_padded;
    if (l->tiles.n_ff > m->widest_ff) m->widest_ff = l->tiles.n_ff;
    const size_t bytes = (size_t)l->n_rows * (size_t)l->k_padded * sizeof(uint16_t);
    bg_status st = bg_cuda_take(c, &l->half, bytes, l->name, err);
    if (st)
        bg_wrap(err, "a copy of the weights in half precision (--fast-math; without it, less is "
                     "needed)");
    return st;
}

bg_status bg_cuda_fast_rows(bg_cuda *c, const bg_linear *l, int64_t row0, const bgk_source *rows,
                            bg_error *err)
{
    if (!l->half) return BG_OK;
    return bg_cuda_done(err,
                        bgk_dequant((uint16_t *)l->half + row0 * l->k_padded, BGK_F16, rows, l->k,
                                    l->k_padded, c->stream),
                        l->name);
}

bg_status bg_cuda_fast_ready(bg_cuda *c, bg_error *err)
{
    struct bg_cuda_fast *m = c->fast;
    if (!m || m->x || !m->widest_k) return BG_OK;
    const bg_backend_config *f = &c->config;
    const size_t rows = (size_t)(f->max_tokens > f->max_out ? f->max_tokens : f->max_out);
    bg_status st = bg_cuda_take(c, &m->x, rows * (size_t)m->widest_k * sizeof(uint16_t),
                                "--fast-math input rows", err);
    if (!st && m->widest_ff)
        st = bg_cuda_take(c, &m->glu,
                          (size_t)f->max_tokens * (size_t)glu_cols(m->widest_ff) * sizeof(uint16_t),
                          "--fast-math gate and up", err);
    return st;
}

/* ---- products -------------------------------------------------------------------------------- */

typedef struct layouts { /* column by column, as the library has it: out^T = w x^T */
    cublasLtMatrixLayout_t w, x, out;
} layouts;

static void layouts_free(const struct bg_cuda_fast *m, layouts *l)
{
    if (l->w) m->f.layout_destroy(l->w);
    if (l->x) m->f.layout_destroy(l->x);
    if (l->out) m->f.layout_destroy(l->out);
}

static bg_status layouts_new(const struct bg_cuda_fast *m, layouts *l, const product *p, int rows,
                             bg_error *err)
{
    const uint64_t n = (uint64_t)p->n_rows, k = (uint64_t)p->k, t = (uint64_t)rows;
    *l = (layouts){0};
    cublasStatus_t s = m->f.layout_create(&l->w, CUDA_R_16F, k, n, (int64_t)k);
    if (!s) s = m->f.layout_create(&l->x, CUDA_R_16F, k, t, (int64_t)k);
    if (!s) s = m->f.layout_create(&l->out, p->half ? CUDA_R_16F : CUDA_R_32F, n, t, p->out_cols);
    return done(m, s, "layouts", err);
}

/* The largest number of rows that shares an algorithm with so many. */
static int row_class(int rows)
{
    const int step = rows <= 1024 ? 128 : 1024;
    return (rows + step - 1) / step * step;
}

static cublasLtMatmulDesc_t desc_of(const struct bg_cuda_fast *m, const product *p)
{
    return p->bias ? m->biased : m->plain;
}

/* The best algorithm for so many rows. */
static bg_status ask(const struct bg_cuda_fast *m, const product *p, int rows,
                     cublasLtMatmulAlgo_t *algo, bg_error *err)
{
    int n = 0;
    layouts l;
    cublasLtMatmulHeuristicResult_t best = {0};
    bg_status st = layouts_new(m, &l, p, rows, err);
    if (!st)
        st = done(m,
                  m->f.heuristic(m->handle, desc_of(m, p), l.w, l.x, l.out, l.out, m->preference, 1,
                                 &best, &n),
                  "choosing an algorithm", err);
    if (!st && n < 1) st = done(m, CUBLAS_STATUS_NOT_SUPPORTED, "choosing an algorithm", err);
    if (!st) st = done(m, best.state, "choosing an algorithm", err);
    *algo = best.algo;
    layouts_free(m, &l);
    return st;
}

/* The algorithm of p's shape and rows' class; NULL: err says why. */
static const choice *choose(bg_cuda *c, const product *p, int rows, bg_error *err)
{
    struct bg_cuda_fast *m = c->fast;
    const int most = row_class(rows);
    for (int i = 0; i < m->n_choices; i++) {
        const choice *o = &m->choices[i];
        if (o->n_rows == p->n_rows && o->k == p->k && o->rows == most &&
            o->out_cols == p->out_cols && o->half == p->half && o->bias == (p->bias != NULL))
            return o;
    }
    if (c->capturing) {
        bg_fail(err, BG_INTERNAL, "--fast-math: no algorithm was chosen for %d rows", rows);
        return NULL;
    }
    if (m->n_choices == m->choices_cap) {
        const int cap = m->choices_cap ? 2 * m->choices_cap : 32;
        choice *more = realloc(m->choices, (size_t)cap * sizeof *more);
        if (!more) {
            bg_fail(err, BG_NOMEM, "backend: out of memory");
            return NULL;
        }
        m->choices = more;
        m->choices_cap = cap;
    }
    choice *o = &m->choices[m->n_choices];
    *o = (choice){.n_rows = p->n_rows,
                  .k = p->k,
                  .rows = most,
                  .out_cols = p->out_cols,
                  .half = p->half,
                  .bias = p->bias != NULL};
    if (ask(m, p, most, &o->algo, err)) return NULL;
    m->n_choices++;
    return o;
}

static bg_status multiply(bg_cuda *c, const product *p, int rows, const char *name, bg_error *err)
{
    struct bg_cuda_fast *m = c->fast;
    const float one = 1, zero = 0;
    layouts l = {0};
    cublasLtMatmulHeuristicResult_t fit = {0};
    /* Before the algorithm is asked for, or checked: it may depend on where the bias lies. */
    bg_status st = !p->bias ? BG_OK
                            : done(m,
                                   m->f.desc_set(m->biased, CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                                                 &p->bias, sizeof p->bias),
                                   name, err);
    const choice *o = st ? NULL : choose(c, p, rows, err);
    if (!st && !o) st = err->status;
    if (!st) st = layouts_new(m, &l, p, rows, err);
    if (!st) {
        cublasLtMatmulAlgo_t algo = o->algo;
        /* One for the class's largest number of rows need not do for all of them. */
        if (m->f.check(m->handle, desc_of(m, p), l.w, l.x, l.out, l.out, &algo, &fit) ||
            fit.workspaceSize > WORKSPACE_BYTES)
            st = ask(m, p, rows, &algo, err);
        if (!st)
            st = done(m,
                      m->f.matmul(m->handle, desc_of(m, p), &one, p->w, l.w, p->x, l.x, &zero,
                                  p->out, l.out, p->out, l.out, &algo, m->workspace,
                                  WORKSPACE_BYTES, c->stream),
                      name, err);
    }
    layouts_free(m, &l);
    return st;
}

static bg_status rows_of(bg_cuda *c, const bg_linear *l, const bgk_out *x, int n_rows,
                         bg_error *err)
{
    bg_status st = bg_cuda_fast_ready(c, err);
    return st ? st
              : bg_cuda_done(
                    err,
                    bgk_tiles_to_rows(c->fast->x, l->k_padded, x, n_rows, l->k_padded, c->stream),
                    l->name);
}

bool bg_cuda_fast_serves(const bg_linear *l, const void *out, int n_rows)
{
    return l->half && n_rows >= BG_CUDA_FAST_ROWS && (uintptr_t)out % ALIGNMENT == 0;
}

bg_status bg_cuda_fast_linear(bg_cuda *c, float *out, int64_t out_cols, const bg_linear *l,
                              const bgk_out *x, int n_rows, bg_error *err)
{
    bg_status st = rows_of(c, l, x, n_rows, err);
    const product p = {.w = l->half,
                       .x = c->fast->x,
                       .bias = l->bias,
                       .out = out,
                       .out_cols = out_cols,
                       .n_rows = l->n_rows,
                       .k = l->k_padded};
    return st ? st : multiply(c, &p, n_rows, l->name, err);
}

bg_status bg_cuda_fast_linear_glu(bg_cuda *c, const bgk_out *out, const bg_linear *l,
                                  const bgk_out *x, bgk_act fn, int n_rows, bg_error *err)
{
    bg_status st = rows_of(c, l, x, n_rows, err);
    const int64_t cols = glu_cols(l->tiles.n_ff);
    const product p = {.w = l->half,
                       .x = c->fast->x,
                       .out = c->fast->glu,
                       .out_cols = cols,
                       .n_rows = l->n_rows,
                       .k = l->k_padded,
                       .half = true};
    if (!st) st = multiply(c, &p, n_rows, l->name, err);
    return st ? st
              : bg_cuda_done(
                    err,
                    bgk_glu_halves(out, p.out, cols, l->bias, fn, n_rows, l->tiles.n_ff, c->stream),
                    l->name);
}

#else

bg_status bg_cuda_fast_new(bg_cuda *c, bg_error *err)
{
    if (!c->config.fast_math) return BG_OK;
    return bg_fail(err, BG_DEVICE,
                   "--fast-math: this build has none of it: cublasLt.h was not there (install "
                   "CUDA's libcublas-dev and build again, or leave --fast-math out)");
}

void bg_cuda_fast_free(bg_cuda *c)
{
    (void)c;
}

bg_status bg_cuda_fast_linear_new(bg_cuda *c, bg_linear *l, bg_error *err)
{
    (void)c, (void)l, (void)err;
    return BG_OK;
}

bg_status bg_cuda_fast_rows(bg_cuda *c, const bg_linear *l, int64_t row0, const bgk_source *rows,
                            bg_error *err)
{
    (void)c, (void)l, (void)row0, (void)rows, (void)err;
    return BG_OK;
}

bg_status bg_cuda_fast_ready(bg_cuda *c, bg_error *err)
{
    (void)c, (void)err;
    return BG_OK;
}

bool bg_cuda_fast_serves(const bg_linear *l, const void *out, int n_rows)
{
    (void)l, (void)out, (void)n_rows;
    return false;
}

bg_status bg_cuda_fast_linear(bg_cuda *c, float *out, int64_t out_cols, const bg_linear *l,
                              const bgk_out *x, int n_rows, bg_error *err)
{
    (void)c, (void)out, (void)out_cols, (void)x, (void)n_rows;
    return bg_fail(err, BG_INTERNAL, "%s: no --fast-math", l->name);
}

bg_status bg_cuda_fast_linear_glu(bg_cuda *c, const bgk_out *out, const bg_linear *l,
                                  const bgk_out *x, bgk_act fn, int n_rows, bg_error *err)
{
    (void)c, (void)out, (void)x, (void)fn, (void)n_rows;
    return bg_fail(err, BG_INTERNAL, "%s: no --fast-math", l->name);
}

#endif
