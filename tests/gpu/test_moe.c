/* tests/gpu/test_moe.c - routing, who works on what, and experts as the backend loads and runs
 * them, against float64; a token's bits alone and among others; times of the shapes of real models.
 */
#include "gpu.h"

#include "backend/cuda/cuda.h"
#include "gguf/gguf.h"

static bg_cuda *backend(bg_compute compute, bool dummy, int max_tokens)
{
    const bg_backend_config config = {.compute = compute,
                                      .n_threads = 1,
                                      .first_cpu = -1,
                                      .dummy = dummy,
                                      .max_tokens = max_tokens,
                                      .max_seqs = 4,
                                      .max_out = 4,
                                      .max_ctx = 64,
                                      .vocab_size = 16};
    bg_error err = {0};
    bg_backend *b;
    cr_assert_eq(bg_cuda_backend_new(&b, &config, 0, &err), BG_OK, "%s", err.text);
    return (bg_cuda *)b;
}

#define OK(call)                                                 \
    do {                                                         \
        bg_error err_ = {0};                                     \
        cr_assert_eq((call), BG_OK, "%s: %s", #call, err_.text); \
    } while (0)
#define err (&err_)

/* x [rows, cols] into an input buffer's first rows; NaN in the others and in filling columns of
 * plain rows. */
static void put_input(const bg_cuda *c, const bg_act *h, const float *x, size_t rows)
{
    const bgk_out o = bg_cuda_out(h);
    const size_t cols = (size_t)h->cols;
    if (c->tiled) {
        uint16_t *t = to_tiles(x, rows, cols, (size_t)o.stride);
        CU(cudaMemcpy(h->data, t, (cols + 63) / 64 * (size_t)o.stride * 128,
                      cudaMemcpyHostToDevice));
        free(t);
    } else {
        CU(cudaMemset(h->data, 0xff, (size_t)h->max_rows * cols * 4));
        CU(cudaMemcpy(h->data, x, rows * cols * 4, cudaMemcpyHostToDevice));
    }
    CU(cudaDeviceSynchronize());
}

static float *halves(size_t n, uint64_t seed, float scale)
{
    float *x = random_f32(n, seed, scale);
    for (size_t i = 0; i < n; i++)
        x[i] = bg_f16_to_f32(bg_f32_to_f16(x[i]));
    return x;
}

/* ---- routing -----------------------------------------------------------------------------------
 */

typedef struct routing {
    int n_experts, n_used, d;
    bg_gating gating;
    bool bias, choice_bias, shared_gate, renormalise;
    int n_groups, n_groups_used;
    float scale;
} routing;

static const routing routings[] = {
    {5, 2, 96, BG_GATING_SOFTMAX, false, false, false, true, 0, 0, 1},
    {60, 4, 100, BG_GATING_SOFTMAX, false, false, true, false, 1, 1, 1},
    {128, 8, 2048, BG_GATING_SOFTMAX, false, false, false, true, 0, 0, 1},
    {64, 4, 2048, BG_GATING_SIGMOID, false, true, false, true, 1, 1, 1.8f},
    {256, 8, 6144, BG_GATING_SIGMOID, false, true, false, true, 8, 4, 2.5f},
    {6, 2, 31, BG_GATING_SIGMOID, true, true, false, true, 6, 3, 1},
    {32, 4, 2880, BG_GATING_SOFTMAX_CHOSEN, true, false, false, false, 0, 0, 1},
    {3, 3, 7, BG_GATING_SOFTMAX_CHOSEN, true, true, true, true, 0, 0, 0.5f},
    {512, 16, 512, BG_GATING_SOFTMAX, false, false, true, true, 0, 0, 1},
};

static int by_choice(const double *v, int n, int i) /* how many come before i */
{
    int before = 0;
    for (int j = 0; j < n; j++)
        before += v[j] > v[i] || (v[j] == v[i] && j < i);
    return before;
}

/* One row: route's values from products, in float64. */
static void route_host(double *ids, double *weights, double *select, const routing *r, double *v,
                       const float *bias, const float *choice_bias)
{
    const int n = r->n_experts, k = r->n_used;
    double *prob = malloc((size_t)n * sizeof *prob), most = -INFINITY, sum = 0;
    for (int i = 0; i < n; i++) {
        if (r->bias) v[i] += (double)bias[i];
        most = fmax(most, v[i]);
    }
    for (int i = 0; i < n; i++)
        sum += exp(v[i] - most);
    for (int i = 0; i < n; i++) {
        prob[i] = r->gating == BG_GATING_SOFTMAX   ? exp(v[i] - most) / sum
                  : r->gating == BG_GATING_SIGMOID ? 1 / (1 + exp(-v[i]))
                                                   : v[i];
        select[i] = prob[i] + (r->choice_bias ? (double)choice_bias[i] : 0);
    }
    if (r->n_groups > 1) {
        const int each = n / r->n_groups;
        double score[BGK_MAX_EXPERTS];
        for (int g = 0; g < r->n_groups; g++) {
            double first = -INFINITY, second = -INFINITY;
            for (int j = g * each; j < (g + 1) * each; j++) {
                second = fmax(second, fmin(first, select[j]));
                first = fmax(first, select[j]);
            }
            score[g] = each > 1 ? first + second : first;
        }
        for (int i = 0; i < n; i++)
            if (by_choice(score, r->n_groups, i / each) >= r->n_groups_used) select[i] = -INFINITY;
    }
    most = -INFINITY;
    for (int i = 0; i < n; i++) {
        const int rank = by_choice(select, n, i);
        if (rank >= k) continue;
        ids[rank] = i;
        weights[rank] = prob[i];
        most = fmax(most, prob[i]);
    }
    free(prob);
    sum = 0;
    for (int j = 0; r->gating == BG_GATING_SOFTMAX_CHOSEN && j < k; j++)
        sum += exp(weights[j] - most);
    for (int j = 0; r->gating == BG_GATING_SOFTMAX_CHOSEN && j < k; j++)
        weights[j] = exp(weights[j] - most) / sum;
    sum = 0;
    for (int j = 0; j < k; j++)
        sum += weights[j];
    for (int j = 0; j < k; j++)
        weights[j] *= (double)r->scale / (r->renormalise ? fmax(sum, 0x1p-14) : 1);
}

static void check_routing(bg_compute compute, const routing *r)
{
    enum { MOST = 1100 };
    static const int counts[] = {1, 3, 9, 70, MOST};
    const int n = r->n_experts, k = r->n_used;
    const size_t d = (size_t)r->d, cols = (size_t)(2 * k + 1);
    bg_cuda *c = backend(compute, false, MOST);
    float *w = random_f32((size_t)n * d, 1, 1.7f / sqrtf((float)r->d)),
          *gate = random_f32(d, 2, 1.7f / sqrtf((float)r->d)), *bias = random_f32((size_t)n, 3, 1),
          *choice = random_f32((size_t)n, 4, 0.3f);
    if (n > 4) memcpy(w + 2 * d, w + 4 * d, d * sizeof *w); /* equal products */
    if (n > 4) bias[2] = bias[4], choice[2] = choice[4];
    const bg_router_spec spec = {.name = "router",
                                 .n_experts = n,
                                 .n_used = k,
                                 .d_model = r->d,
                                 .gating = r->gating,
                                 .weights = w,
                                 .bias = r->bias ? bias : NULL,
                                 .choice_bias = r->choice_bias ? choice : NULL,
                                 .n_groups = r->n_groups,
                                 .n_groups_used = r->n_groups_used,
                                 .renormalise = r->renormalise,
                                 .scale = r->scale,
                                 .shared_gate = r->shared_gate ? gate : NULL};
    bg_router *router;
    bg_act h, route;
    c->base.check = true; /* few rows' routes too are there after the op */
    OK(bg_cuda_router_new(&c->base, &router, &spec, err));
    OK(bg_cuda_act_input_new(&c->base, &h, "h", MOST, r->d, err));
    OK(bg_cuda_act_new(&c->base, &route, "route", MOST + 1, (int64_t)cols, err));
    float *x = halves(MOST * d, 5, 1), *all = NULL;
    put_input(c, &h, x, MOST);
    for (int i = (int)(sizeof counts / sizeof *counts) - 1; i >= 0; i--) {
        const int rows = counts[i];
        if (gpu_small() && rows > 9) continue;
        CU(cudaMemset(route.data, 0xff, (MOST + 1) * cols * 4));
        CU(cudaDeviceSynchronize());
        c->s.n_rows = rows;
        OK(bg_cuda_route(&c->base, &route, router, &h, err));
        float *got = from_device(route.data, (MOST + 1) * cols * 4);
        cr_expect(all_poison(got + (size_t)rows * cols, cols * 4), "wrote past the end");
        if (all) {
            cr_expect_arr_eq(got, all, (size_t)rows * cols * 4, "%d rows give other bits", rows);
            free(got);
            continue;
        }
        all = got;
        double *v = malloc((size_t)n * sizeof *v), *select = malloc((size_t)n * sizeof *select),
               ids[BGK_MAX_USED], weights[BGK_MAX_USED];
        int wrong = 0;
        double worst_weight = 0;
        for (int t = 0; t<rows; t += r->d> 1000 ? 7 : 1) {
            double g = 0;
            for (int e = 0; e < n; e++) {
                v[e] = 0;
                for (size_t j = 0; j < d; j++)
                    v[e] += (double)w[(size_t)e * d + j] * (double)x[(size_t)t * d + j];
            }
            for (size_t j = 0; j < d; j++)
                g += (double)gate[j] * (double)x[(size_t)t * d + j];
            route_host(ids, weights, select, r, v, bias, choice);
            const float *row = got + (size_t)t * cols;
            bool same = true;
            for (int j = 0; j < k; j++) {
                const int e = (int)row[j];
                if (e == (int)ids[j]) continue;
                same = false; /* allowed where the two are all but equal */
                if (!(e >= 0 && e < n && fabs(select[e] - select[(int)ids[j]]) < 1e-5)) wrong++;
            }
            for (int j = 0; same && j < k; j++) {
                const double e = fabs((double)row[k + j] - weights[j]) / (weights[j] + 1e-3);
                worst_weight = e <= worst_weight ? worst_weight : e;
            }
            const double want = r->shared_gate ? 1 / (1 + exp(-g)) : 1;
            cr_expect(fabs((double)row[2 * k] - want) < 1e-5, "row %d: last weight %g, want %g", t,
                      (double)row[2 * k], want);
        }
        cr_expect_eq(wrong, 0, "%d of %d experts, d %d, %d rows: %d chosen wrongly", k, n, r->d,
                     rows, wrong);
        cr_expect(worst_weight < 2e-5, "%d of %d experts, d %d: weights off by %g", k, n, r->d,
                  worst_weight);
        free(v);
        free(select);
    }
    free(all);
    free(w);
    free(gate);
    free(bias);
    free(choice);
    free(x);
    bg_backend_free(&c->base);
}

Test(moe, route, .timeout = 120)
{
    NEEDS_GPU();
    for (size_t i = 0; i < sizeof routings / sizeof *routings; i++)
        check_routing(BG_COMPUTE_NATIVE, &routings[i]);
}

Test(moe, route_float32, .timeout = 120)
{
    NEEDS_GPU();
    for (size_t i = 0; i < sizeof routings / sizeof *routings; i++)
        if (routings[i].d < 1000) check_routing(BG_COMPUTE_F32, &routings[i]);
}

/* ---- who works on what --------------------------------------------------------------------------
 */

enum { RANDOM, SAME, FEW, CHOICES }; /* how tokens choose */

/* [tokens, 2 k + 1] */
static float *routes(int tokens, int k, int n_experts, int how, uint64_t seed)
{
    const size_t cols = (size_t)(2 * k + 1);
    float *r = malloc((size_t)tokens * cols * sizeof *r + 1);
    const int among = how == FEW && n_experts / 2 >= k ? n_experts / 2 : n_experts;
    for (int t = 0; t < tokens; t++) {
        float *row = r + (size_t)t * cols;
        for (int j = 0; j < k; j++) {
            int e;
            bool taken = true;
            for (uint64_t n = 0; taken; n++) {
                e = how == SAME
                        ? (int)(n + (uint64_t)j) % n_experts
                        : (int)(bg_mix64(seed * 1000003 + (uint64_t)(t * 64 + j) * 4096 + n) %
                                (uint64_t)among);
                taken = false;
                for (int i = 0; i < j; i++)
                    taken = taken || (int)row[i] == e;
            }
            row[j] = (float)e;
            row[k + j] = 0.1f + 0.5f * fabsf(gpu_random(seed, (uint64_t)(t * 64 + j)));
        }
        row[2 * k] = gpu_random(seed + 1, (uint64_t)t);
    }
    return r;
}

static void check_plan(int tokens, int k, int n_experts, int n_shared, int n, int how)
{
    const size_t cols = (size_t)(2 * k + 1);
    float *r = routes(tokens, k, n_experts, how, 9);
    bgk_moe m = {.n_experts = n_experts,
                 .n_used = k,
                 .n_shared = n_shared,
                 .tokens = tokens,
                 .n = n,
                 .route = to_device(r, (size_t)tokens * cols * 4),
                 .route_cols = (int64_t)cols};
    const size_t n_pos = (size_t)(tokens * k), most = (size_t)bgk_moe_items(&m);
    m.pos = poisoned(n_pos * 4 + GUARD);
    m.items = poisoned(most * sizeof *m.items + GUARD);
    m.n_items = poisoned(4);
    m.counts = poisoned((size_t)bgk_moe_counts(&m) * 4);
    CU(bgk_moe_plan(&m, 0));
    int32_t *pos = from_device(m.pos, n_pos * 4 + GUARD), *count = from_device(m.n_items, 4);
    bgk_moe_item *items = from_device(m.items, most * sizeof *items + GUARD);
    cr_expect(all_poison((char *)pos + n_pos * 4, GUARD) &&
                  all_poison((char *)items + most * sizeof *items, GUARD),
              "wrote past the end");
    /* What it should be. */
    const bool direct = tokens <= BGK_DIRECT;
    const int padded = (tokens + 7) / 8 * 8;
    int *has = calloc((size_t)n_experts + 1, sizeof *has), row = n_shared * padded, at = 0,
        wrong = 0;
    int *first = calloc((size_t)n_experts + 1, sizeof *first);
    for (int i = 0; i < tokens * k; i++)
        has[(int)r[(size_t)(i / k) * cols + (size_t)(i % k)]]++;
    for (int s = 0; s < n_shared; s++)
        for (int t = 0; t < tokens; t += n, at++)
            wrong += items[at].expert != (n_experts + s) + (1 << 16) || items[at].x_row != t ||
                     items[at].out_row != s * padded + t ||
                     items[at].n != (tokens - t < n ? tokens - t : n);
    for (int e = 0; e < n_experts; e++) {
        const int rows = direct && has[e] ? tokens : has[e];
        first[e] = row;
        for (int t = 0; t < rows; t += n, at++)
            wrong += items[at].expert != e + (direct ? 1 << 16 : 0) ||
                     items[at].x_row != (direct ? 0 : row - n_shared * padded + t) ||
                     items[at].out_row != row + t || items[at].n != (rows - t < n ? rows - t : n);
        row += (rows + 7) / 8 * 8;
    }
    cr_expect_eq(*count, at, "%d items, want %d", *count, at);
    cr_expect_leq(at, (int)most);
    cr_expect_leq(row, (int)bgk_moe_rows(&m));
    memset(has, 0, (size_t)n_experts * sizeof *has);
    for (int i = 0; i < tokens * k; i++) {
        const int e = (int)r[(size_t)(i / k) * cols + (size_t)(i % k)];
        wrong += pos[i] != first[e] + (direct ? i / k : has[e]++);
    }
    cr_expect_eq(wrong, 0, "%d tokens, %d of %d experts, %d shared, by %d, %d: %d are wrong",
                 tokens, k, n_experts, n_shared, n, how, wrong);
    cudaFree((void *)m.route);
    cudaFree(m.pos);
    cudaFree(m.items);
    cudaFree(m.n_items);
    cudaFree(m.counts);
    free(r);
    free(pos);
    free(count);
    free(items);
    free(has);
    free(first);
}

Test(moe, plan)
{
    NEEDS_GPU();
    static const int counts[] = {1, 3, 8, 9, 33, 300, 1024, 1025, 5000};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
        for (int how = 0; how < CHOICES; how++) {
            check_plan(counts[i], 2, 5, 0, counts[i] > 8 ? 16 : 8, how);
            check_plan(counts[i], 8, 128, 0, counts[i] > 8 ? 32 : 8, how);
            check_plan(counts[i], 8, 256, 1, counts[i] > 8 ? 128 : 8, how);
            check_plan(counts[i], 16, 512, 2, counts[i] > 8 ? 64 : 8, how);
            check_plan(counts[i], 1, 1, 1, 8, how);
        }
}

/* ---- experts ------------------------------------------------------------------------------------
 */

typedef struct problem {
    int n_experts, n_used, n_shared, d, n_ff, ff_all, ff0; /* columns [ff0, + n_ff) of ff_all */
    uint32_t gate, down, shared;
    bool bias, add;
    bg_act_fn fn;
    int most; /* tokens */
} problem;

typedef struct stack { /* matrices [rows, k], one after another */
    uint32_t type;
    int64_t n, rows, k;
    uint8_t *data;
    size_t bytes; /* of one */
} stack;

static stack make_stack(uint32_t type, int64_t n, int64_t rows, int64_t k, uint64_t seed)
{
    const size_t row = bg_qtype_row_bytes(type, k);
    stack s = {type, n, rows, k, malloc((size_t)(n * rows) * row + 1), (size_t)rows * row};
    float *v = malloc((size_t)k * sizeof *v);
    for (int64_t r = 0; r < n * rows; r++) {
        for (int64_t c = 0; c < k; c++)
            v[c] = 1.7f / sqrtf((float)k) * gpu_random(seed, (uint64_t)(r * k + c));
        cr_assert(bg_quant_row(type, v, s.data + (size_t)r * row, k));
    }
    free(v);
    return s;
}

static void stack_row(const stack *s, int64_t number, int64_t r, float *to)
{
    bg_dequant_row(s->type,
                   s->data + (size_t)number * s->bytes +
                       (size_t)r * bg_qtype_row_bytes(s->type, s->k),
                   to, s->k);
}

typedef struct model {
    stack gate, up, down, sh_gate, sh_up, sh_down;
    float *gate_bias, *up_bias, *down_bias;
} model;

static bg_linear_part part_of(const stack *s, int64_t row0, int64_t n_rows, int64_t col0,
                              int64_t n_cols)
{
    return (bg_linear_part){.name = "experts",
                            .type = s->type,
                            .data = s->data,
                            .k_total = s->k,
                            .n_total = s->rows,
                            .row0 = row0,
                            .n_rows = n_rows,
                            .col0 = col0,
                            .n_cols = n_cols};
}

static double gate_host(bg_act_fn fn, double g, double u)
{
    switch (fn) {
    case BG_SILU:
        return g / (1 + exp(-g)) * u;
    case BG_GELU_TANH:
        return 0.5 * g * (1 + tanh(0.7978845608028654 * (g + 0.044715 * g * g * g))) * u;
    case BG_GELU_ERF:
        return 0.5 * g * (1 + erf(g * 0.7071067811865476)) * u;
    default:
        g = fmin(g, 7);
        u = fmax(fmin(u, 7), -7);
        return g / (1 + exp(-1.702 * g)) * (u + 1);
    }
}

/* want [tokens, d], of the first tokens. */
static double *moe_host(const problem *p, const model *m, const float *x, const float *route,
                        const float *add, int tokens)
{
    const size_t d = (size_t)p->d, f = (size_t)p->n_ff, cols = (size_t)(2 * p->n_used + 1);
    double *want = calloc((size_t)tokens * d, sizeof *want), *act = malloc(f * sizeof *act);
    float *row = malloc((d + (size_t)p->ff_all) * sizeof *row);
    float *g = malloc(f * d * sizeof *g), *u = malloc(f * d * sizeof *u),
          *w = malloc(d * f * sizeof *w);
    for (int e = 0; e < p->n_experts + p->n_shared; e++) {
        const int s = e - p->n_experts;
        const bool shared = s >= 0;
        /* Shared experts lie side by side in one matrix. */
        const int64_t first = p->ff0 + (shared ? s * p->ff_all : 0), n = shared ? 0 : e;
        for (size_t i = 0; i < f; i++) {
            stack_row(shared ? &m->sh_gate : &m->gate, n, first + (int64_t)i, row);
            memcpy(g + i * d, row, d * sizeof *g);
            stack_row(shared ? &m->sh_up : &m->up, n, first + (int64_t)i, row);
            memcpy(u + i * d, row, d * sizeof *u);
        }
        float *wide = malloc((size_t)(p->ff_all * (p->n_shared + 1)) * sizeof *wide);
        for (size_t i = 0; i < d; i++) {
            stack_row(shared ? &m->sh_down : &m->down, n, (int64_t)i, wide);
            memcpy(w + i * f, wide + first, f * sizeof *w);
        }
        free(wide);
        for (int t = 0; t < tokens; t++) {
            const float *r = route + (size_t)t * cols, *h = x + (size_t)t * d;
            double weight = shared ? 1 : 0;
            for (int j = 0; !shared && j < p->n_used; j++)
                if ((int)r[j] == e) weight = (double)r[p->n_used + j];
            if (weight == 0) continue;
            for (size_t i = 0; i < f; i++) {
                double a = 0, b = 0;
                for (size_t j = 0; j < d; j++) {
                    a += (double)g[i * d + j] * (double)h[j];
                    b += (double)u[i * d + j] * (double)h[j];
                }
                if (p->bias && !shared) {
                    a += (double)m->gate_bias[(size_t)e * f + i];
                    b += (double)m->up_bias[(size_t)e * f + i];
                }
                act[i] = gate_host(p->fn, a, b);
            }
            for (size_t i = 0; i < d; i++) {
                double y = p->bias && !shared ? (double)m->down_bias[(size_t)e * d + i] : 0;
                for (size_t j = 0; j < f; j++)
                    y += (double)w[i * f + j] * act[j];
                want[(size_t)t * d + i] += weight * y;
            }
        }
    }
    for (int t = 0; p->add && t < tokens; t++)
        for (size_t i = 0; i < d; i++)
            want[(size_t)t * d + i] +=
                (double)route[(size_t)t * cols + cols - 1] * (double)add[(size_t)t * d + i];
    free(act);
    free(row);
    free(g);
    free(u);
    free(w);
    return want;
}

static void run(bg_cuda *c, const bg_experts *e, bg_act *out, const bg_act *route, const bg_act *h,
                const bg_act *add, const float *x, const float *r, const float *a, size_t first,
                int rows)
{
    const size_t d = (size_t)out->cols, cols = (size_t)route->cols;
    put_input(c, h, x + first * d, (size_t)rows);
    CU(cudaMemcpy(route->data, r + first * cols, (size_t)rows * cols * 4, cudaMemcpyHostToDevice));
    if (add) CU(cudaMemcpy(add->data, a + first * d, (size_t)rows * d * 4, cudaMemcpyHostToDevice));
    CU(cudaMemset(out->data, 0xff, (size_t)out->max_rows * d * 4));
    CU(cudaDeviceSynchronize());
    c->s.n_rows = rows;
    OK(bg_cuda_moe(&c->base, out, e, route, h, add, err));
}

static void check_experts(bg_compute compute, const problem *p)
{
    static const int counts[] = {1, 3, 7, 8, 9, 17, 33, 100, 300, 700};
    const size_t d = (size_t)p->d, cols = (size_t)(2 * p->n_used + 1), most = (size_t)p->most;
    const int64_t all = p->ff_all, shared_all = all * (p->n_shared ? p->n_shared : 1);
    bg_cuda *c = backend(compute, false, p->most);
    model m = {.gate = make_stack(p->gate, p->n_experts, all, p->d, 1),
               .up = make_stack(p->gate, p->n_experts, all, p->d, 2),
               .down = make_stack(p->down, p->n_experts, p->d, all, 3),
               .sh_gate = make_stack(p->shared, 1, shared_all, p->d, 4),
               .sh_up = make_stack(p->shared, 1, shared_all, p->d, 5),
               .sh_down = make_stack(p->shared, 1, p->d, shared_all, 6),
               .gate_bias = random_f32((size_t)(p->n_experts * p->n_ff), 7, 1),
               .up_bias = random_f32((size_t)(p->n_experts * p->n_ff), 8, 1),
               .down_bias = random_f32((size_t)p->n_experts * d, 9, 1)};
    const bg_experts_spec spec = {.name = "experts",
                                  .n_experts = p->n_experts,
                                  .n_used = p->n_used,
                                  .n_shared = p->n_shared,
                                  .gate = part_of(&m.gate, p->ff0, p->n_ff, 0, p->d),
                                  .up = part_of(&m.up, p->ff0, p->n_ff, 0, p->d),
                                  .down = part_of(&m.down, 0, p->d, p->ff0, p->n_ff),
                                  .gate_stride = m.gate.bytes,
                                  .up_stride = m.up.bytes,
                                  .down_stride = m.down.bytes,
                                  .shared_gate = part_of(&m.sh_gate, p->ff0, p->n_ff, 0, p->d),
                                  .shared_up = part_of(&m.sh_up, p->ff0, p->n_ff, 0, p->d),
                                  .shared_down = part_of(&m.sh_down, 0, p->d, p->ff0, p->n_ff),
                                  .shared_step = p->ff_all,
                                  .gate_bias = p->bias ? m.gate_bias : NULL,
                                  .up_bias = p->bias ? m.up_bias : NULL,
                                  .down_bias = p->bias ? m.down_bias : NULL,
                                  .fn = p->fn};
    bg_experts *e;
    bg_act h, route, out, add;
    OK(bg_cuda_experts_new(&c->base, &e, &spec, err));
    OK(bg_cuda_act_input_new(&c->base, &h, "h", p->most, p->d, err));
    OK(bg_cuda_act_new(&c->base, &route, "route", p->most, (int64_t)cols, err));
    OK(bg_cuda_act_new(&c->base, &out, "out", p->most + 1, p->d, err));
    OK(bg_cuda_act_new(&c->base, &add, "add", p->most, p->d, err));
    float *x = halves(most * d, 11, 1), *a = random_f32(most * d, 12, 1);
    const int n_all = gpu_small() && p->most > 33 ? 33 : p->most;
    for (int how = 0; how < CHOICES; how++) {
        float *r = routes(p->most, p->n_used, p->n_experts, how, 13), *whole = NULL;
        double *want = NULL, size = 0;
        for (int i = (int)(sizeof counts / sizeof *counts) - 1; i >= 0; i--) {
            const int rows = counts[i];
            if (rows > n_all) continue;
            const int step = whole && rows < 9 ? n_all / 3 : n_all; /* some places */
            for (int first = 0; first + rows <= n_all; first += step) {
                run(c, e, &out, &route, &h, p->add ? &add : NULL, x, r, a, (size_t)first, rows);
                float *got = from_device(out.data, (size_t)out.max_rows * d * 4);
                cr_expect(all_poison(got + (size_t)rows * d, d * 4), "wrote past the end");
                if (!whole) {
                    const int n = rows < 40 ? rows : 40;
                    want = moe_host(p, &m, x, r, a, n);
                    for (size_t j = 0; j < (size_t)n * d; j++)
                        size += want[j] * want[j] / (double)((size_t)n * d);
                    double worst_err = 0, squares = 0;
                    for (size_t j = 0; j < (size_t)n * d; j++) {
                        const double off = fabs((double)got[j] - want[j]) / sqrt(size);
                        worst_err = off <= worst_err ? worst_err : off;
                        squares += off * off / (double)((size_t)n * d);
                    }
                    /* Weights and activations are halves: about 3e-4 of each, at random. */
                    cr_expect(c->tiled ? worst_err < 0.03 && squares < 2e-3 * 2e-3
                                       : worst_err < 1e-4,
                              "%d of %d experts, %d shared, [%d, %d], types %u %u %u, fn %d, %d "
                              "tokens, choice %d: error %.3g of the mean size, at most %.3g",
                              p->n_used, p->n_experts, p->n_shared, p->n_ff, p->d, p->gate, p->down,
                              p->shared, p->fn, rows, how, sqrt(squares), worst_err);
                    size_t bad = 0;
                    for (size_t j = 0; j < (size_t)rows * d; j++)
                        bad += !isfinite(got[j]);
                    cr_expect_eq(bad, 0, "%zu values are not finite", bad);
                    whole = got;
                    continue;
                }
                size_t other = 0, where = 0;
                for (size_t k = (size_t)rows * d; k-- > 0;)
                    if (memcmp(got + k, whole + (size_t)first * d + k, 4)) other++, where = k;
                cr_expect_eq(other, 0,
                             "types %u %u, %d tokens from %d on have other bits than among others "
                             "(choice %d) in %zu places, the first is %zu: %.9g, not %.9g",
                             p->gate, p->down, rows, first, how, other, where, (double)got[where],
                             (double)whole[(size_t)first * d + where]);
                free(got);
            }
        }
        free(whole);
        free(want);
        free(r);
    }
    stack *stacks[] = {&m.gate, &m.up, &m.down, &m.sh_gate, &m.sh_up, &m.sh_down};
    for (size_t i = 0; i < 6; i++)
        free(stacks[i]->data);
    free(m.gate_bias);
    free(m.up_bias);
    free(m.down_bias);
    free(x);
    free(a);
    bg_backend_free(&c->base);
}

Test(moe, experts, .timeout = 300)
{
    NEEDS_GPU();
    static const problem list[] = {
        {5, 2, 0, 96, 160, 160, 0, BG_F32, BG_F32, BG_F32, false, false, BG_SILU, 300},
        {5, 1, 1, 96, 160, 160, 0, BG_Q8_0, BG_Q8_0, BG_Q8_0, false, true, BG_SILU, 300},
        {5, 4, 0, 96, 96, 160, 64, BG_Q8_0, BG_Q4_0, BG_F32, true, false, BG_SWIGLU_CLAMP, 300},
        {8, 2, 0, 512, 256, 512, 256, BG_Q4_K, BG_Q6_K, BG_F32, false, false, BG_SILU, 700},
        {16, 8, 1, 256, 256, 256, 0, BG_Q4_K, BG_Q6_K, BG_Q8_0, false, false, BG_SILU, 300},
        {6, 3, 2, 256, 256, 512, 0, BG_Q6_K, BG_Q4_K, BG_Q4_K, false, true, BG_GELU_TANH, 300},
        {4, 2, 0, 256, 256, 256, 0, BG_Q5_K, BG_Q5_K, BG_F32, true, true, BG_GELU_ERF, 100},
        {8, 2, 0, 2048, 256, 256, 0, BG_Q4_K, BG_Q4_K, BG_F32, false, false, BG_SILU, 300},
        {8, 4, 0, 96, 96, 96, 0, BG_MXFP4, BG_MXFP4, BG_F32, true, false, BG_SWIGLU_CLAMP, 100},
        {4, 3, 0, 4096, 1536, 1536, 0, BG_Q8_0, BG_Q8_0, BG_F32, false, false, BG_SILU, 33},
        /* few chunks of down in many tiles (experts_few.cu), a last one of 44 rows */
        {24, 2, 1, 768, 256, 512, 256, BG_Q4_K, BG_Q4_K, BG_Q8_0, false, true, BG_SILU, 300},
        {12, 2, 1, 1004, 352, 352, 0, BG_F32, BG_Q8_0, BG_F32, true, false, BG_GELU_TANH, 300},
        {12, 2, 0, 1280, 512, 512, 0, BG_Q4_K, BG_Q6_K, BG_F32, true, false, BG_SILU, 100},
        /* GLM-5's widths on a rank of 8: parts of K in turn, items of 32, of 64 */
        {8, 2, 1, 6144, 256, 512, 256, BG_Q4_K, BG_Q4_K, BG_Q8_0, false, false, BG_SILU, 100},
        {16, 2, 1, 6144, 256, 256, 0, BG_Q4_K, BG_Q6_K, BG_Q8_0, false, false, BG_SILU, 300},
        /* as many experts as few_moe.cu has warps for, in two formats */
        {20, 15, 1, 224, 160, 160, 0, BG_Q4_0, BG_Q4_0, BG_Q8_0, false, true, BG_SILU, 33},
        {18, 14, 2, 256, 512, 512, 0, BG_Q6_K, BG_Q6_K, BG_Q8_0, false, false, BG_SILU, 33},
    };
    for (size_t i = 0; i < (gpu_small() ? 4 : sizeof list / sizeof *list); i++)
        check_experts(BG_COMPUTE_NATIVE, &list[i]);
}

Test(moe, experts_float32, .timeout = 120)
{
    NEEDS_GPU();
    static const problem list[] = {
        {5, 2, 0, 96, 160, 160, 0, BG_F32, BG_F32, BG_F32, false, false, BG_SILU, 100},
        {6, 3, 2, 256, 256, 512, 256, BG_Q6_K, BG_Q4_K, BG_Q8_0, true, true, BG_SWIGLU_CLAMP, 33},
    };
    for (size_t i = 0; i < sizeof list / sizeof *list; i++)
        check_experts(BG_COMPUTE_F32, &list[i]);
}

/* Few tokens' choice is made in the experts' own kernel: route and result as by a kernel each. */
static void check_choice(const routing *r, int n_shared, uint32_t type)
{
    enum { FF = 64, MOST = BGK_MOE_FEW + 2 };
    const int n = r->n_experts, k = r->n_used;
    const size_t d = (size_t)r->d, cols = (size_t)(2 * k + 1);
    bg_cuda *c = backend(BG_COMPUTE_NATIVE, false, MOST);
    float *w = random_f32((size_t)n * d, 21, 1.7f / sqrtf((float)r->d)),
          *gate = random_f32(d, 22, 1.7f / sqrtf((float)r->d)),
          *bias = random_f32((size_t)n, 23, 1), *choice = random_f32((size_t)n, 24, 0.3f),
          *x = halves(MOST * d, 25, 1), *a = random_f32(MOST * d, 26, 1);
    if (n > 4) memcpy(w + 2 * d, w + 4 * d, d * sizeof *w); /* equal products */
    if (n > 4) bias[2] = bias[4], choice[2] = choice[4];
    w[d / 2] = NAN; /* the first expert's score is none */
    const bg_router_spec router_spec = {.name = "router",
                                        .n_experts = n,
                                        .n_used = k,
                                        .d_model = r->d,
                                        .gating = r->gating,
                                        .weights = w,
                                        .bias = r->bias ? bias : NULL,
                                        .choice_bias = r->choice_bias ? choice : NULL,
                                        .n_groups = r->n_groups,
                                        .n_groups_used = r->n_groups_used,
                                        .renormalise = r->renormalise,
                                        .scale = r->scale,
                                        .shared_gate = r->shared_gate ? gate : NULL};
    if (r->gating != BG_GATING_SIGMOID) w[d / 2] = 1; /* it would spoil all */
    stack up = make_stack(type, n, FF, r->d, 1), down = make_stack(BG_Q8_0, n, r->d, FF, 2),
          sh_up = make_stack(BG_Q8_0, 1, FF * (n_shared + 1), r->d, 3),
          sh_down = make_stack(BG_Q8_0, 1, r->d, FF * (n_shared + 1), 4);
    const bg_experts_spec spec = {.name = "experts",
                                  .n_experts = n,
                                  .n_used = k,
                                  .n_shared = n_shared,
                                  .gate = part_of(&up, 0, FF, 0, r->d),
                                  .up = part_of(&up, 0, FF, 0, r->d),
                                  .down = part_of(&down, 0, r->d, 0, FF),
                                  .gate_stride = up.bytes,
                                  .up_stride = up.bytes,
                                  .down_stride = down.bytes,
                                  .shared_gate = part_of(&sh_up, 0, FF, 0, r->d),
                                  .shared_up = part_of(&sh_up, 0, FF, 0, r->d),
                                  .shared_down = part_of(&sh_down, 0, r->d, 0, FF),
                                  .shared_step = FF,
                                  .fn = BG_SILU};
    bg_router *router;
    bg_experts *e;
    bg_act h, route, out, add;
    OK(bg_cuda_router_new(&c->base, &router, &router_spec, err));
    OK(bg_cuda_experts_new(&c->base, &e, &spec, err));
    OK(bg_cuda_act_input_new(&c->base, &h, "h", MOST, r->d, err));
    OK(bg_cuda_act_new(&c->base, &route, "route", MOST, (int64_t)cols, err));
    OK(bg_cuda_act_new(&c->base, &out, "out", MOST, r->d, err));
    OK(bg_cuda_act_new(&c->base, &add, "add", MOST, r->d, err));
    put_input(c, &h, x, MOST);
    CU(cudaMemcpy(add.data, a, MOST * d * 4, cudaMemcpyHostToDevice));
    float *routes = NULL, *results = NULL;
    for (int rows = MOST; rows > 0; rows--)
        for (int check = 1; check >= 0; check--) {
            c->base.check = check;
            c->s.n_rows = rows;
            CU(cudaMemset(route.data, 0xff, MOST * cols * 4));
            CU(cudaMemset(out.data, 0xff, MOST * d * 4));
            CU(cudaDeviceSynchronize());
            OK(bg_cuda_route(&c->base, &route, router, &h, err));
            OK(bg_cuda_moe(&c->base, &out, e, &route, &h, r->shared_gate ? &add : NULL, err));
            float *got_route = from_device(route.data, MOST * cols * 4),
                  *got = from_device(out.data, MOST * d * 4);
            if (!routes) {
                routes = got_route;
                results = got;
                continue;
            }
            cr_expect_arr_eq(got_route, routes, (size_t)rows * cols * 4,
                             "%d of %d experts, %d tokens, check %d: other routes", k, n, rows,
                             check);
            cr_expect_arr_eq(got, results, (size_t)rows * d * 4,
                             "%d of %d experts, %d tokens, check %d: other results", k, n, rows,
                             check);
            cr_expect(all_poison(got_route + (size_t)rows * cols, (MOST - rows) * cols * 4) &&
                          all_poison(got + (size_t)rows * d, (MOST - rows) * d * 4),
                      "wrote past the end");
            free(got_route);
            free(got);
        }
    free(routes);
    free(results);
    free(up.data);
    free(down.data);
    free(sh_up.data);
    free(sh_down.data);
    free(w);
    free(gate);
    free(bias);
    free(choice);
    free(x);
    free(a);
    bg_backend_free(&c->base);
}

Test(moe, choice_with_experts, .timeout = 200)
{
    NEEDS_GPU();
    static const routing list[] = {
        {5, 2, 96, BG_GATING_SOFTMAX, false, false, false, true, 0, 0, 1},
        {256, 8, 1536, BG_GATING_SIGMOID, false, true, false, true, 1, 1, 2.5f},
        {60, 4, 160, BG_GATING_SOFTMAX, false, false, true, false, 1, 1, 1},
        {128, 8, 2048, BG_GATING_SOFTMAX, false, true, false, true, 0, 0, 1},
        {32, 4, 2880, BG_GATING_SOFTMAX_CHOSEN, true, false, false, false, 0, 0, 1},
        {3, 3, 256, BG_GATING_SOFTMAX_CHOSEN, true, true, true, true, 0, 0, 0.5f},
        {512, 12, 512, BG_GATING_SOFTMAX, false, false, true, true, 0, 0, 1},
        {64, 6, 256, BG_GATING_SIGMOID, true, true, false, true, 8, 4, 1},
    };
    for (size_t i = 0; i < (gpu_small() ? 3 : sizeof list / sizeof *list); i++)
        check_choice(&list[i], (int)i % 3, i % 2 ? BG_Q4_K : BG_Q8_0);
}

/* A rank that has no columns of the experts'. */
Test(moe, no_columns)
{
    NEEDS_GPU();
    enum { D = 100, T = 9 };
    bg_cuda *c = backend(BG_COMPUTE_NATIVE, false, T);
    float *bias = random_f32(2 * D, 6, 1);
    const stack s = make_stack(BG_F32, 2, 8, D, 1), down = make_stack(BG_F32, 2, D, 8, 2);
    const bg_experts_spec spec = {.name = "none",
                                  .n_experts = 2,
                                  .n_used = 1,
                                  .gate = part_of(&s, 0, 0, 0, D),
                                  .up = part_of(&s, 0, 0, 0, D),
                                  .down = part_of(&down, 0, D, 0, 0),
                                  .gate_stride = s.bytes,
                                  .up_stride = s.bytes,
                                  .down_stride = down.bytes,
                                  .down_bias = bias};
    bg_experts *e;
    bg_act h, route, out;
    OK(bg_cuda_experts_new(&c->base, &e, &spec, err));
    OK(bg_cuda_act_input_new(&c->base, &h, "h", T, D, err));
    OK(bg_cuda_act_new(&c->base, &route, "route", T, 3, err));
    OK(bg_cuda_act_new(&c->base, &out, "out", T, D, err));
    float *x = halves(T * D, 3, 1), *r = routes(T, 1, 2, RANDOM, 4), *a = random_f32(T * D, 5, 1);
    run(c, e, &out, &route, &h, NULL, x, r, a, 0, T);
    float *got = from_device(out.data, sizeof(float) * T * D);
    for (size_t i = 0; i < T * D; i++) {
        const float *row = r + i / D * 3;
        cr_assert(fabsf(got[i] - row[1] * bias[(size_t)row[0] * D + i % D]) < 1e-6f);
    }
    CU(cudaMemcpy(out.data, a, sizeof(float) * T * D, cudaMemcpyHostToDevice)); /* in place */
    OK(bg_cuda_moe(&c->base, &out, e, &route, &h, &out, err));
    float *more = from_device(out.data, sizeof(float) * T * D);
    for (size_t i = 0; i < T * D; i++)
        cr_assert(fabsf(more[i] - (got[i] + r[i / D * 3 + 2] * a[i])) < 1e-6f);
    free(got);
    free(more);
    free(bias);
    free(x);
    free(r);
    free(a);
    free(s.data);
    free(down.data);
    bg_backend_free(&c->base);
}

/* ---- times --------------------------------------------------------------------------------------
 */

typedef struct layer {
    const char *name;
    int n_experts, n_used, n_shared, d, n_ff, ff_all;
    bg_gating gating;
    uint32_t gate, down, shared;
} layer;

enum { SETS = 8, BENCH_MOST = 8192 };

typedef struct bench { /* of one layer; each call takes another of SETS choices */
    bg_cuda *c;
    bg_router *router;
    bg_experts *e;
    bg_act h, route, out;
    bgk_moe m[SETS];
    bgk_out x, act, rows;
    float *parts;
    int next, tokens, what;
} bench;

/* DOWN_BLOCKS: down in blocks, where experts_few.cu would take it */
enum {
    ROUTE,
    PRODUCTS,
    CHOICE,
    PLAN,
    GATHER,
    GATE_UP,
    DOWN,
    DOWN_BLOCKS,
    COMBINE,
    MOE,
    BOTH,
    WHATS
};

static void run_bench(void *ctx, cudaStream_t stream)
{
    bench *b = ctx;
    bg_cuda *c = b->c;
    const cudaStream_t own = c->stream;
    b->next = (b->next + 1) % SETS;
    const bgk_moe *m = &b->m[b->next];
    bg_act h = b->h, route = b->route;
    h.data = (char *)h.data + b->next * 8 * 128; /* other rows */
    bgk_out in = bg_cuda_out(&b->h);
    in.data = h.data;
    route.data = (float *)m->route;
    c->stream = stream;
    c->s.n_rows = b->tokens;
    c->base.check = b->what == ROUTE; /* else few tokens' choice is left to the experts' kernel */
    if (b->what == ROUTE || b->what == BOTH)
        OK(bg_cuda_route(&c->base, &route, b->router, &h, err));
    const int cols = b->router->n_parts * b->router->n;
    const bgk_out parts = {b->parts, BGK_ROWS, cols};
    if (b->what == PRODUCTS)
        CU(bgk_matmul(&parts, &b->router->tiles, in.data, in.stride, b->tokens, BGK_SILU, stream));
    if (b->what == CHOICE)
        CU(bgk_route(b->route.data, route.cols, b->parts, cols, b->router->n_parts, &b->router->r,
                     b->tokens, stream));
    if (b->what == PLAN) CU(bgk_moe_plan(m, stream));
    if (b->what == GATHER) CU(bgk_moe_gather(&b->x, &in, m, b->e->gate_up.n_chunks, stream));
    if (b->what == GATE_UP)
        CU(bgk_moe_matmul(&b->act, &b->e->gate_up, &in, &b->x, m, BGK_SILU, true, stream));
    if (b->what == DOWN)
        CU(bgk_moe_matmul(&b->rows, &b->e->down, NULL, &b->act, m, BGK_SILU, true, stream));
    if (b->what == DOWN_BLOCKS) { /* rows that begin anywhere */
        const bgk_out odd = {b->rows.data, BGK_HALF_ROWS, b->rows.stride + 2};
        CU(bgk_moe_matmul(&odd, &b->e->down, NULL, &b->act, m, BGK_SILU, true, stream));
    }
    if (b->what == COMBINE)
        CU(bgk_moe_combine(b->out.data, b->out.cols, b->rows.data, b->rows.stride, NULL, 0, m,
                           b->e->d, stream));
    if (b->what == MOE || b->what == BOTH)
        OK(bg_cuda_moe(&c->base, &b->out, b->e, &route, &h, NULL, err));
    c->stream = own;
}

static bg_linear_part dummy(const char *name, uint32_t type, int64_t n_total, int64_t k_total,
                            int64_t n_rows, int64_t n_cols)
{
    return (bg_linear_part){.name = name,
                            .type = type,
                            .k_total = k_total,
                            .n_total = n_total,
                            .n_rows = n_rows,
                            .n_cols = n_cols};
}

static void bench_layer(const layer *l)
{
    static const int counts[] = {1, 8, 32, 64, 128, 256, 512, 768, BENCH_MOST};
    static const char *const names[WHATS] = {"route",   "products", "choice",   "plan",
                                             "gather",  "gate_up",  "down",     "(in blocks)",
                                             "combine", "moe",      "route+moe"};
    bench b = {.c = backend(BG_COMPUTE_NATIVE, true, BENCH_MOST)};
    const int64_t d = l->d, f = l->n_ff, all = l->ff_all;
    const bg_router_spec router = {.name = l->name,
                                   .n_experts = l->n_experts,
                                   .n_used = l->n_used,
                                   .d_model = l->d,
                                   .gating = l->gating,
                                   .renormalise = true,
                                   .scale = 1};
    const bg_experts_spec spec = {.name = l->name,
                                  .n_experts = l->n_experts,
                                  .n_used = l->n_used,
                                  .n_shared = l->n_shared,
                                  .gate = dummy("gate", l->gate, all, d, f, d),
                                  .up = dummy("up", l->gate, all, d, f, d),
                                  .down = dummy("down", l->down, d, all, d, f),
                                  .gate_stride = (size_t)all * bg_qtype_row_bytes(l->gate, d),
                                  .up_stride = (size_t)all * bg_qtype_row_bytes(l->gate, d),
                                  .down_stride = (size_t)d * bg_qtype_row_bytes(l->down, all),
                                  .shared_gate = dummy("shared gate", l->shared, all, d, f, d),
                                  .shared_up = dummy("shared up", l->shared, all, d, f, d),
                                  .shared_down = dummy("shared down", l->shared, d, all, d, f),
                                  .shared_step = all};
    const int64_t cols = 2 * l->n_used + 1;
    bg_load_times times;
    OK(bg_cuda_router_new(&b.c->base, &b.router, &router, err));
    OK(bg_cuda_experts_new(&b.c->base, &b.e, &spec, err));
    OK(bg_cuda_load_end(&b.c->base, &times, err));
    OK(bg_cuda_act_input_new(&b.c->base, &b.h, "h", BENCH_MOST + SETS * 8 + 128, d, err));
    OK(bg_cuda_act_new(&b.c->base, &b.route, "route", BENCH_MOST, cols, err));
    OK(bg_cuda_act_new(&b.c->base, &b.out, "out", BENCH_MOST, d, err));
    const bgk_out in = bg_cuda_out(&b.h);
    CU(bgk_random_blocks(in.data, BGK_GGUF_F16, d / 64 * in.stride * 64, 1, 0, 1, b.c->stream));
    CU(cudaStreamSynchronize(b.c->stream));
    const double expert = b.e->expert_bytes, shared = b.e->shared_bytes;
    printf("%s: %d of %d + %d experts, d %d, ff %d; loaded in %.0f ms\n", l->name, l->n_used,
           l->n_experts, l->n_shared, l->d, l->n_ff, (double)times.total_ns * 1e-6);
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        const int t = counts[i];
        double busy = 0;
        b.tokens = t;
        for (int s = 0; s < SETS; s++) {
            bgk_moe *m = &b.m[s];
            *m = (bgk_moe){.n_experts = l->n_experts,
                           .n_used = l->n_used,
                           .n_shared = l->n_shared,
                           .tokens = t,
                           .n = bg_cuda_item_tokens(l->n_experts, l->n_used, t),
                           .route_cols = cols};
            m->route = poisoned((size_t)(t * cols) * 4);
            m->pos = poisoned((size_t)(t * l->n_used) * 4);
            m->items = poisoned((size_t)bgk_moe_items(m) * sizeof *m->items);
            m->n_items = poisoned(4);
            m->counts = poisoned((size_t)bgk_moe_counts(m) * 4);
        }
        const int64_t gathered = (bgk_moe_gathered(&b.m[0]) + 128 + 255) / 256 * 256,
                      rows = (bgk_moe_rows(&b.m[0]) + 128 + 255) / 256 * 256;
        char *x, *act, *res;
        CU(cudaMalloc((void **)&b.parts,
                      (size_t)t * (size_t)(b.router->n_parts * b.router->n) * sizeof(float)));
        CU(cudaMalloc((void **)&x, (size_t)(gathered * d * 2)));
        CU(cudaMalloc((void **)&act, (size_t)(rows * ((f + 63) / 64 * 64) * 2)));
        CU(cudaMalloc((void **)&res, (size_t)(rows * (d + 2) * 2)));
        b.x = (bgk_out){x, BGK_TILES, gathered};
        b.act = (bgk_out){act, BGK_TILES, rows};
        b.rows = (bgk_out){res, BGK_HALF_ROWS, d};
        for (int s = 0; s < SETS; s++) { /* choices and plans for the kernels by themselves */
            b.what = ROUTE;
            run_bench(&b, 0);
            b.next = (b.next + SETS - 1) % SETS;
            b.what = PLAN;
            run_bench(&b, 0);
        }
        CU(cudaDeviceSynchronize());
        for (int s = 0; s < SETS; s++) {
            float *r = from_device(b.m[s].route, (size_t)(t * cols) * 4);
            int seen[BGK_MAX_EXPERTS] = {0};
            for (int j = 0; j < t * l->n_used; j++)
                seen[(int)r[j / l->n_used * cols + j % l->n_used]] = 1;
            for (int j = 0; j < l->n_experts; j++)
                busy += (double)seen[j] / SETS;
            free(r);
        }
        const double bytes = busy * expert + l->n_shared * shared,
                     up_share = (double)b.e->gate_up.n_tiles * b.e->gate_up.n_chunks *
                                bgk_chunk_bytes(bgk_format_of((int)l->gate)) / expert,
                     flops = 2.0 * t * (l->n_used + l->n_shared) * l->d * l->n_ff;
        printf("%5d tokens (%.0f experts, items of %d):", t, busy, b.m[0].n);
        for (int what = 0; what < WHATS; what++) {
            b.what = what;
            const double us = gpu_time_us(run_bench, &b, t > 1000 ? SETS : 4 * SETS);
            printf(" %s %.1f", names[what], us);
            if (what == GATE_UP)
                printf(" (%.2f TB/s %.0f T)", bytes * up_share / us * 1e-6, 2 * flops / us * 1e-6);
            if (what == DOWN)
                printf(" (%.2f TB/s %.0f T)", bytes * (1 - up_share) / us * 1e-6,
                       flops / us * 1e-6);
            if (what == MOE)
                printf(" (%.2f TB/s %.0f T)", bytes / us * 1e-6, 3 * flops / us * 1e-6);
        }
        printf(" us\n");
        fflush(stdout);
        for (int s = 0; s < SETS; s++) {
            cudaFree((void *)b.m[s].route);
            cudaFree(b.m[s].pos);
            cudaFree(b.m[s].items);
            cudaFree(b.m[s].n_items);
            cudaFree(b.m[s].counts);
        }
        cudaFree(b.parts);
        cudaFree(x);
        cudaFree(act);
        cudaFree(res);
    }
    bg_backend_free(&b.c->base);
}

Test(moe, bench_moe, .timeout = 600)
{
    NEEDS_GPU();
    if (gpu_small()) cr_skip_test("large");
    static const layer layers[] = {
        {"Qwen3-30B-A3B", 128, 8, 0, 2048, 768, 768, BG_GATING_SOFTMAX, BG_Q4_K, BG_Q6_K, BG_Q4_K},
        {"GLM-4.7-Flash", 64, 4, 1, 2048, 1536, 1536, BG_GATING_SIGMOID, BG_Q4_K, BG_Q4_K, BG_Q4_K},
        {"GLM-5, a rank of 8", 256, 8, 1, 6144, 256, 2048, BG_GATING_SIGMOID, BG_Q4_K, BG_Q4_K,
         BG_Q8_0},
    };
    for (size_t i = 0; i < sizeof layers / sizeof *layers; i++)
        bench_layer(&layers[i]);
}
