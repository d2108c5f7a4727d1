/* route and moe: against float64, the same bits for a token whatever else is in the step and on any
 * number of threads, and native arithmetic bit for bit that of linears of one expert each. */
#include "unit/backend/cpu_fixture.h"

#include "gguf/gguf.h"

enum { GUARD = 8 };

/* Also "avx512vnni", where the processor has it. */
static const char *isa_at(int i)
{
    static const char *const names[] = {"plain", "avx2", "avx512", "avx512vnni"};
    bg_isa isa;
    if (i >= 4 || !bg_isa_by_name(names[i], &isa) || isa > bg_isa_best()) return NULL;
    return names[i];
}

/* rows x cols values in use; the columns after them and the rows behind are NaN. */
static bg_act new_act(bg_backend *b, const char *name, int64_t rows, int64_t cols)
{
    bg_act a;
    OK(b->ops->act_new(b, &a, name, rows + 1, cols, err));
    b->ops->poison(b, &a, rows + 1);
    a.max_rows = rows;
    return a;
}

static void expect_guard(const bg_act *a)
{
    for (int64_t i = 0; i < a->cols; i++)
        cr_assert(isnan(((float *)a->data)[a->max_rows * a->cols + i]), "%s: wrote past the end",
                  a->name);
}

/* ---- route ----------------------------------------------------------------------------------- */

typedef struct routing {
    const char *name;
    int n_experts, n_used, d;
    bg_gating gating;
    bool bias, choice_bias, shared_gate, renormalise;
    int n_groups, n_groups_used;
    float scale;
} routing;

static const routing routings[] = {
    {"softmax", 5, 2, 96, BG_GATING_SOFTMAX, false, false, false, true, 0, 0, 1},
    {"softmax, as it is", 60, 4, 100, BG_GATING_SOFTMAX, false, false, true, false, 1, 1, 1},
    {"softmax, scaled", 64, 6, 33, BG_GATING_SOFTMAX, false, false, false, false, 8, 3, 16},
    {"sigmoid", 17, 3, 64, BG_GATING_SIGMOID, false, true, false, true, 0, 0, 1.8f},
    {"sigmoid, groups", 32, 4, 128, BG_GATING_SIGMOID, false, true, false, true, 8, 2, 2.5f},
    {"sigmoid, groups of one", 6, 2, 31, BG_GATING_SIGMOID, true, true, false, true, 6, 3, 1},
    {"chosen", 32, 4, 96, BG_GATING_SOFTMAX_CHOSEN, true, false, false, false, 0, 0, 1},
    {"all", 3, 3, 7, BG_GATING_SOFTMAX_CHOSEN, true, true, true, true, 0, 0, 0.5f},
    {"one", 1, 1, 5, BG_GATING_SIGMOID, false, false, false, false, 0, 0, 1},
};
enum { N_ROUTINGS = sizeof routings / sizeof *routings };

typedef struct router_values {
    float *weights, *bias, *choice_bias, *shared_gate;
} router_values;

static router_values make_router(bg_backend *b, bg_router **r, const routing *s, uint64_t seed)
{
    const int64_t n = s->n_experts, d = s->d;
    router_values v = {malloc((size_t)(n * d) * 4), malloc((size_t)n * 4), malloc((size_t)n * 4),
                       malloc((size_t)d * 4)};
    fill_normal(v.weights, n * d, seed);
    for (int64_t i = 0; i < n * d; i++)
        v.weights[i] /= sqrtf((float)d);
    fill_normal(v.bias, n, seed + 1);
    fill_normal(v.choice_bias, n, seed + 2);
    fill_normal(v.shared_gate, d, seed + 3);
    const bg_router_spec spec = {.name = "router",
                                 .n_experts = s->n_experts,
                                 .n_used = s->n_used,
                                 .d_model = s->d,
                                 .gating = s->gating,
                                 .weights = v.weights,
                                 .bias = s->bias ? v.bias : NULL,
                                 .choice_bias = s->choice_bias ? v.choice_bias : NULL,
                                 .n_groups = s->n_groups,
                                 .n_groups_used = s->n_groups_used,
                                 .renormalise = s->renormalise,
                                 .scale = s->scale,
                                 .shared_gate = s->shared_gate ? v.shared_gate : NULL};
    OK(b->ops->router_new(b, r, &spec, err));
    return v;
}

static void free_router(router_values *v)
{
    free(v->weights);
    free(v->bias);
    free(v->choice_bias);
    free(v->shared_gate);
}

static double dot(const float *x, const float *y, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += (double)x[i] * (double)y[i];
    return sum;
}

/* The place of the first largest value that is not marked; marks it. */
static int first_largest(const double *x, bool *marked, int n)
{
    int best = -1;
    for (int i = 0; i < n; i++)
        if (!marked[i] && (best < 0 || x[i] > x[best])) best = i;
    marked[best] = true;
    return best;
}

static void soft(double *x, int n)
{
    double sum = 0, most = x[0];
    for (int i = 0; i < n; i++)
        most = fmax(most, x[i]);
    for (int i = 0; i < n; i++)
        sum += x[i] = exp(x[i] - most);
    for (int i = 0; i < n; i++)
        x[i] /= sum;
}

static void route_reference(double *out, const routing *s, const router_values *v, const float *h)
{
    const int n = s->n_experts, k = s->n_used;
    double p[64], choice[64], group[64], sum = 0;
    bool out_of_it[64] = {false}, kept[64] = {false};
    for (int e = 0; e < n; e++)
        p[e] = dot(v->weights + e * s->d, h, s->d) + (s->bias ? (double)v->bias[e] : 0);
    if (s->gating == BG_GATING_SOFTMAX) soft(p, n);
    for (int e = 0; e < n; e++) {
        if (s->gating == BG_GATING_SIGMOID) p[e] = 1 / (1 + exp(-p[e]));
        choice[e] = p[e] + (s->choice_bias ? (double)v->choice_bias[e] : 0);
    }
    if (s->n_groups > 1) {
        const int size = n / s->n_groups;
        for (int g = 0; g < s->n_groups; g++) {
            bool marked[64] = {false};
            group[g] = choice[g * size + first_largest(choice + g * size, marked, size)];
            if (size > 1)
                group[g] += choice[g * size + first_largest(choice + g * size, marked, size)];
        }
        for (int i = 0; i < s->n_groups_used; i++)
            first_largest(group, kept, s->n_groups);
        for (int e = 0; e < n; e++)
            out_of_it[e] = !kept[e / size];
    }
    for (int i = 0; i < k; i++) {
        const int e = first_largest(choice, out_of_it, n);
        out[i] = e;
        out[k + i] = p[e];
    }
    if (s->gating == BG_GATING_SOFTMAX_CHOSEN) soft(out + k, k);
    for (int i = 0; i < k; i++)
        sum += out[k + i];
    for (int i = 0; i < k; i++)
        out[k + i] *= (s->renormalise ? 1 / fmax(sum, 0x1p-14) : 1) * (double)s->scale;
    out[2 * k] = s->shared_gate ? 1 / (1 + exp(-dot(v->shared_gate, h, s->d))) : 1;
}

Test(moe, route_matches_float64_and_rows_are_independent)
{
    enum { ROWS = 37, MORE = 3 };
    for (int at = 0; isa_at(at); at++)
        for (int i = 0; i < N_ROUTINGS; i++) {
            const routing *s = &routings[i];
            bg_backend_config config = config_of(isa_at(at), 3);
            config.check = true;
            bg_backend *b = backend_of(&config);
            bg_router *r;
            router_values v = make_router(b, &r, s, (uint64_t)(10 * i + 1));
            const int64_t cols = 2 * s->n_used + 1 + MORE, h_cols = s->d + MORE;
            bg_act h = new_act(b, "h", ROWS, h_cols), route = new_act(b, "route", ROWS, cols);
            for (int t = 0; t < ROWS; t++)
                fill_normal((float *)h.data + t * h_cols, s->d, (uint64_t)(1000 * i + t));
            step_of(b, ROWS);
            OK(bg_op_route(b, &route, r, &h, err));
            for (int t = 0; t < ROWS; t++) {
                const float *got = (float *)route.data + t * cols;
                double want[129];
                route_reference(want, s, &v, (float *)h.data + t * h_cols);
                for (int j = 0; j < 2 * s->n_used + 1; j++)
                    cr_assert(fabs((double)got[j] - want[j]) <= 3e-6 * fabs(want[j]),
                              "%s, %s: row %d value %d is %.9g, not %.9g", isa_at(at), s->name, t,
                              j, (double)got[j], want[j]);
                for (int j = 2 * s->n_used + 1; j < cols; j++)
                    cr_assert_eq(got[j], 0);
            }
            expect_guard(&route);
            bg_act alone = new_act(b, "alone", 1, cols);
            step_of(b, 1);
            for (int t = 0; t < ROWS; t++) {
                const bg_act one = {(float *)h.data + t * h_cols, 1, h_cols, "one", 0};
                OK(bg_op_route(b, &alone, r, &one, err));
                cr_assert(same_bits(alone.data, (float *)route.data + t * cols, cols),
                          "%s, %s: row %d alone is another", isa_at(at), s->name, t);
            }
            free_router(&v);
            bg_backend_free(b);
        }
}

Test(moe, equal_experts_are_chosen_by_lower_number)
{
    enum { N = 12, K = 3, D = 40 };
    float weights[N * D] = {0}, x[D];
    fill_normal(x, D, 5);
    for (int e = 0; e < N; e++) /* 7 and 9 are the best, then 2, 4 and 11; the rest is 0 */
        for (int i = 0; i < D; i++)
            weights[e * D + i] = (e == 7 || e == 9              ? 2.0f
                                  : e == 2 || e == 4 || e == 11 ? 1.0f
                                                                : 0.0f) *
                                 x[i] / D;
    for (int at = 0; isa_at(at); at++)
        for (int groups = 0; groups < 2; groups++) {
            const bg_backend_config config = config_of(isa_at(at), 2);
            bg_backend *b = backend_of(&config);
            bg_router_spec spec = {.name = "ties",
                                   .n_experts = N,
                                   .n_used = K,
                                   .d_model = D,
                                   .gating = BG_GATING_SIGMOID,
                                   .weights = weights,
                                   .n_groups = groups ? 6 : 0, /* the group of 11 is one too many */
                                   .n_groups_used = groups ? 4 : 0,
                                   .scale = 1};
            bg_router *r;
            OK(b->ops->router_new(b, &r, &spec, err));
            bg_act h = new_act(b, "h", 1, D), route = new_act(b, "route", 1, 2 * K + 1);
            memcpy(h.data, x, sizeof x);
            step_of(b, 1);
            OK(bg_op_route(b, &route, r, &h, err));
            const float *got = route.data;
            cr_expect(got[0] == 7 && got[1] == 9 && got[2] == 2, "%g %g %g", (double)got[0],
                      (double)got[1], (double)got[2]);

            memset(h.data, 0, sizeof x); /* all are equal */
            OK(bg_op_route(b, &route, r, &h, err));
            cr_expect(got[0] == 0 && got[1] == 1 && got[2] == 2, "%g %g %g", (double)got[0],
                      (double)got[1], (double)got[2]);
            bg_backend_free(b);
        }
}

Test(moe, tiny_weights_are_divided_by_the_least_sum)
{
    enum { D = 32 };
    float weights[2 * D];
    for (int i = 0; i < 2 * D; i++)
        weights[i] = -1;
    const bg_router_spec spec = {.name = "tiny",
                                 .n_experts = 2,
                                 .n_used = 1,
                                 .d_model = D,
                                 .gating = BG_GATING_SIGMOID,
                                 .weights = weights,
                                 .renormalise = true,
                                 .scale = 1};
    const bg_backend_config config = config_of(NULL, 1);
    bg_backend *b = backend_of(&config);
    bg_router *r;
    OK(b->ops->router_new(b, &r, &spec, err));
    bg_act h = new_act(b, "h", 1, D), route = new_act(b, "route", 1, 3);
    for (int i = 0; i < D; i++)
        ((float *)h.data)[i] = 0.5f; /* a logit of -16 */
    step_of(b, 1);
    OK(bg_op_route(b, &route, r, &h, err));
    const double want = 1 / (1 + exp(16)) * 0x1p14;
    cr_expect(fabs((double)((float *)route.data)[1] - want) < 1e-6 * want);
    bg_backend_free(b);
}

/* ---- moe ------------------------------------------------------------------------------------- */

typedef struct shape {
    int n_experts, n_used, n_shared;
    int d, f, f_total, f0; /* this rank's part of the inner width */
    uint32_t in_type, up_type, down_type, shared_type;
    bool bias;
    bg_act_fn fn;
} shape;

static const shape shapes[] = {
    {5, 2, 0, 96, 160, 160, 0, BG_Q8_0, BG_Q8_0, BG_Q8_0, BG_Q8_0, false, BG_SILU},
    {5, 3, 1, 96, 160, 256, 32, BG_Q4_0, BG_Q8_0, BG_Q5_1, BG_Q8_0, false, BG_SILU},
    {7, 4, 2, 64, 32, 96, 64, BG_Q8_0, BG_Q8_0, BG_Q4_1, BG_F16, false, BG_GELU_TANH},
    {6, 2, 0, 160, 96, 128, 32, BG_MXFP4, BG_MXFP4, BG_MXFP4, BG_F32, true, BG_SWIGLU_CLAMP},
    {9, 1, 1, 256, 256, 256, 0, BG_Q4_K, BG_Q4_K, BG_Q6_K, BG_Q4_K, false, BG_SILU},
    {4, 2, 1, 288, 70, 72, 2, BG_F16, BG_Q8_0, BG_F16, BG_F32, true, BG_GELU_ERF},
    {3, 3, 2, 512, 256, 512, 256, BG_Q2_K, BG_Q3_K, BG_Q5_K, BG_Q8_0, true, BG_SILU},
    {5, 2, 1, 96, 0, 64, 32, BG_Q8_0, BG_Q8_0, BG_Q8_0, BG_Q8_0, true, BG_SILU},
};
enum { N_SHAPES = sizeof shapes / sizeof *shapes };

/* n matrices [rows, cols] in blocks, one after another, and their values. */
typedef struct stack {
    uint8_t *data;
    float *value;
    size_t bytes; /* of one */
} stack;

static stack make_stack(uint32_t type, int n, int64_t rows, int64_t cols, uint64_t seed)
{
    const size_t row_bytes = bg_qtype_row_bytes(type, cols);
    stack s = {malloc((size_t)(n * rows) * row_bytes + 1),
               malloc((size_t)(n * rows * cols + 1) * sizeof(float)), (size_t)rows * row_bytes};
    float *row = malloc((size_t)cols * sizeof *row);
    for (int64_t r = 0; r < n * rows; r++) {
        for (int64_t i = 0; i < cols; i++) /* of variance 1.5 / sqrt(cols) */
            row[i] =
                (float)(uniform(seed, (uint64_t)(r * cols + i)) - 0.5) * 5.2f / sqrtf((float)cols);
        uint8_t *to = s.data + (size_t)r * row_bytes;
        if (!bg_quant_row(type, row, to, cols)) { /* MXFP4: any bits, scales of 1/8 and 1/16 */
            cr_assert_eq(type, BG_MXFP4);
            for (size_t i = 0; i < row_bytes; i++)
                to[i] = i % 17 ? (uint8_t)bg_mix64(seed + (uint64_t)r * 4099 + i)
                               : (uint8_t)(123 + i / 17 % 2);
        }
        bg_dequant_row(type, to, s.value + r * cols, cols);
    }
    free(row);
    return s;
}

typedef struct layer {
    shape s;
    stack gate, up, down, shared_gate, shared_up, shared_down;
    float *gate_bias, *up_bias, *down_bias;
    bg_experts_spec spec;
} layer;

static bg_linear_part rows_of(const char *name, uint32_t type, const stack *w, int64_t total,
                              int64_t row0, int64_t n, int64_t cols)
{
    return (bg_linear_part){.name = name,
                            .type = type,
                            .data = w->data,
                            .k_total = cols,
                            .n_total = total,
                            .row0 = row0,
                            .n_rows = n,
                            .n_cols = cols};
}

static bg_linear_part cols_of(const char *name, uint32_t type, const stack *w, int64_t total,
                              int64_t col0, int64_t n, int64_t rows)
{
    return (bg_linear_part){.name = name,
                            .type = type,
                            .data = w->data,
                            .k_total = total,
                            .n_total = rows,
                            .n_rows = rows,
                            .col0 = col0,
                            .n_cols = n};
}

static void make_layer(layer *l, const shape *s, uint64_t seed)
{
    const int n = s->n_experts, many = s->n_shared > 1 ? s->n_shared : 1;
    const int64_t biases = (int64_t)n * (s->f + s->d);
    *l = (layer){.s = *s};
    l->gate = make_stack(s->in_type, n, s->f_total, s->d, seed + 1);
    l->up = make_stack(s->up_type, n, s->f_total, s->d, seed + 2);
    l->down = make_stack(s->down_type, n, s->d, s->f_total, seed + 3);
    l->shared_gate = make_stack(s->shared_type, 1, many * s->f_total, s->d, seed + 4);
    l->shared_up = make_stack(s->shared_type, 1, many * s->f_total, s->d, seed + 5);
    l->shared_down = make_stack(s->shared_type, 1, s->d, many * s->f_total, seed + 6);
    l->gate_bias = malloc((size_t)(biases + 1) * sizeof(float));
    l->up_bias = malloc((size_t)(biases + 1) * sizeof(float));
    l->down_bias = malloc((size_t)(biases + 1) * sizeof(float));
    fill_normal(l->gate_bias, biases, seed + 7);
    fill_normal(l->up_bias, biases, seed + 8);
    fill_normal(l->down_bias, biases, seed + 9);
    l->spec = (bg_experts_spec){
        .name = "experts",
        .n_experts = n,
        .n_used = s->n_used,
        .n_shared = s->n_shared,
        .gate = rows_of("gate", s->in_type, &l->gate, s->f_total, s->f0, s->f, s->d),
        .up = rows_of("up", s->up_type, &l->up, s->f_total, s->f0, s->f, s->d),
        .down = cols_of("down", s->down_type, &l->down, s->f_total, s->f0, s->f, s->d),
        .gate_stride = l->gate.bytes,
        .up_stride = l->up.bytes,
        .down_stride = l->down.bytes,
        .shared_gate = rows_of("shared gate", s->shared_type, &l->shared_gate, many * s->f_total,
                               s->f0, s->f, s->d),
        .shared_up = rows_of("shared up", s->shared_type, &l->shared_up, many * s->f_total, s->f0,
                             s->f, s->d),
        .shared_down = cols_of("shared down", s->shared_type, &l->shared_down, many * s->f_total,
                               s->f0, s->f, s->d),
        .shared_step = s->f_total,
        .gate_bias = s->bias ? l->gate_bias : NULL,
        .up_bias = s->bias ? l->up_bias : NULL,
        .down_bias = s->bias ? l->down_bias : NULL,
        .fn = s->fn,
    };
}

static void free_layer(layer *l)
{
    stack *const all[] = {&l->gate,        &l->up,        &l->down,
                          &l->shared_gate, &l->shared_up, &l->shared_down};
    for (int i = 0; i < 6; i++) {
        free(all[i]->data);
        free(all[i]->value);
    }
    free(l->gate_bias);
    free(l->up_bias);
    free(l->down_bias);
}

static double act_of(bg_act_fn fn, double g, double u)
{
    switch (fn) {
    case BG_SILU:
        return g / (1 + exp(-g)) * u;
    case BG_GELU_TANH:
        return 0.5 * g * (1 + tanh(0.79788456080286535588 * (g + 0.044715 * g * g * g))) * u;
    case BG_GELU_ERF:
        return 0.5 * g * erfc(-g * 0.70710678118654752440) * u;
    default:
        g = fmin(g, 7);
        u = fmin(fmax(u, -7), 7);
        return g / (1 + exp(-1.702 * g)) * (u + 1);
    }
}

/* Adds weight * FFN(h) to out, and to size what its terms amount to. gate and up point at this
 * rank's first row, down at its first column. */
static void ffn_reference(double *out, double *size, const shape *s, const float *gate,
                          const float *up, const float *down, int64_t down_cols,
                          const float *const bias[3], double weight, const float *h)
{
    double act[512];
    for (int j = 0; j < s->f; j++) {
        const double g = dot(gate + (int64_t)j * s->d, h, s->d) + (bias ? (double)bias[0][j] : 0);
        const double u = dot(up + (int64_t)j * s->d, h, s->d) + (bias ? (double)bias[1][j] : 0);
        act[j] = act_of(s->fn, g, u);
    }
    for (int i = 0; i < s->d; i++) {
        double y = bias ? (double)bias[2][i] : 0, terms = fabs(y);
        for (int j = 0; j < s->f; j++) {
            const double w = (double)down[i * down_cols + j];
            y += w * act[j];
            terms += fabs(w) * (1 + fabs(act[j]));
        }
        out[i] += weight * y;
        size[i] += fabs(weight) * terms;
    }
}

static void moe_reference(double *out, double *size, const layer *l, const float *route,
                          const float *h, const float *add)
{
    const shape *s = &l->s;
    for (int i = 0; i < s->d; i++)
        out[i] = size[i] = 0;
    for (int k = 0; k < s->n_used; k++) {
        const int64_t e = (int64_t)route[k], at = e * s->f_total + s->f0;
        const float *const bias[] = {l->gate_bias + e * s->f, l->up_bias + e * s->f,
                                     l->down_bias + e * s->d};
        ffn_reference(out, size, s, l->gate.value + at * s->d, l->up.value + at * s->d,
                      l->down.value + e * s->d * s->f_total + s->f0, s->f_total,
                      s->bias ? bias : NULL, (double)route[s->n_used + k], h);
    }
    for (int k = 0; k < s->n_shared; k++) {
        const int64_t at = (int64_t)k * s->f_total + s->f0;
        ffn_reference(out, size, s, l->shared_gate.value + at * s->d,
                      l->shared_up.value + at * s->d, l->shared_down.value + at,
                      (int64_t)s->n_shared * s->f_total, NULL, 1, h);
    }
    for (int i = 0; add && i < s->d; i++) {
        out[i] += (double)route[2 * s->n_used] * (double)add[i];
        size[i] += fabs((double)route[2 * s->n_used] * (double)add[i]);
    }
}

/* Random different experts and weights for each row; row 0's go to expert 0 and up. */
static void random_route(bg_act *route, const shape *s, int n_rows, uint64_t seed)
{
    for (int t = 0; t < n_rows; t++) {
        float *r = (float *)route->data + t * route->cols;
        const int first = (int)(uniform(seed, (uint64_t)t * 2) * s->n_experts) * (t > 0);
        const int back = uniform(seed, (uint64_t)t * 2 + 1) < 0.5;
        for (int k = 0; k < s->n_used; k++) {
            r[k] = (float)((first + (back ? s->n_experts - k : k)) % s->n_experts);
            r[s->n_used + k] = normal(seed + 1, (uint64_t)(t * 64 + k));
        }
        r[2 * s->n_used] = normal(seed + 2, (uint64_t)t);
    }
}

static void random_rows(bg_act *a, int n_rows, int64_t n, uint64_t seed)
{
    for (int t = 0; t < n_rows; t++)
        fill_normal((float *)a->data + t * a->cols, n, seed * 7919 + (uint64_t)t);
}

/* Inputs of a step, with NaN after the columns in use. */
typedef struct inputs {
    bg_act h, route, add;
} inputs;

static inputs make_inputs(bg_backend *b, const shape *s, int n_rows, uint64_t seed)
{
    inputs in = {new_act(b, "h", n_rows, s->d + 5), new_act(b, "route", n_rows, 2 * s->n_used + 3),
                 new_act(b, "add", n_rows, s->d + 2)};
    random_rows(&in.h, n_rows, s->d, seed);
    random_rows(&in.add, n_rows, s->d, seed + 1);
    random_route(&in.route, s, n_rows, seed + 2);
    return in;
}

static bg_backend *moe_backend(const char *isa, int n_threads, bg_compute compute, int max_tokens)
{
    bg_backend_config config = config_of(isa, n_threads);
    config.check = true;
    config.compute = compute;
    config.max_tokens = max_tokens;
    return backend_of(&config);
}

Test(moe, f32_mode_matches_float64)
{
    static const int rows[] = {1, 2, 23};
    for (int i = 0; i < N_SHAPES; i++) {
        const shape *s = &shapes[i];
        layer l;
        make_layer(&l, s, (uint64_t)(100 * i + 7));
        for (int at = 0; isa_at(at); at++) {
            bg_backend *b = moe_backend(isa_at(at), 3, BG_COMPUTE_F32, 23);
            bg_experts *e;
            OK(b->ops->experts_new(b, &e, &l.spec, err));
            for (int k = 0; k < 3; k++) {
                const int n = rows[k];
                inputs in = make_inputs(b, s, n, (uint64_t)(i * 10 + k));
                bg_act out = new_act(b, "out", n, s->d);
                const bg_act *add = (i + k) % 2 ? &in.add : NULL;
                step_of(b, n);
                OK(bg_op_moe(b, &out, e, &in.route, &in.h, add, err));
                expect_guard(&out);
                for (int t = 0; t < n; t++) {
                    double want[512], size[512];
                    moe_reference(want, size, &l, (float *)in.route.data + t * in.route.cols,
                                  (float *)in.h.data + t * in.h.cols,
                                  add ? (float *)add->data + t * add->cols : NULL);
                    for (int j = 0; j < s->d; j++) {
                        const double got = (double)((float *)out.data)[t * s->d + j];
                        cr_assert(fabs(got - want[j]) <= 4e-6 * size[j],
                                  "%s, shape %d, row %d of %d, column %d: %.9g, not %.9g",
                                  isa_at(at), i, t, n, j, got, want[j]);
                    }
                }
            }
            bg_backend_free(b);
        }
        free_layer(&l);
    }
}

/* The linear of one expert's part. */
static bg_linear *single(bg_backend *b, const bg_linear_part *part, size_t offset,
                         const float *bias)
{
    bg_linear_spec spec = {.name = "single", .n_parts = 1, .parts = {*part}};
    spec.parts[0].data = (const uint8_t *)part->data + offset;
    spec.parts[0].bias = bias;
    bg_linear *l;
    OK(b->ops->linear_new(b, &l, &spec, err));
    return l;
}

/* y = down(fn(gate x) * up x) of one row by linears. */
static void by_linears(bg_backend *b, bg_linear *const ffn[3], const shape *s, const bg_act *x,
                       bg_act *gate_up, bg_act *act, bg_act *y)
{
    bg_act up = *gate_up; /* its second half */
    up.data = (float *)gate_up->data + s->f;
    OK(b->ops->linear(b, gate_up, ffn[0], x, 1, err));
    up.max_rows = 1;
    up.cols = gate_up->cols;
    OK(b->ops->linear(b, &up, ffn[1], x, 1, err));
    if (s->f) OK(b->ops->glu(b, act, gate_up, s->fn, err));
    OK(b->ops->linear(b, y, ffn[2], act, 1, err));
}

Test(moe, native_mode_is_that_of_linears_bit_for_bit)
{
    enum { ROWS = 19 };
    for (int i = 0; i < N_SHAPES; i++) {
        const shape *s = &shapes[i];
        layer l;
        make_layer(&l, s, (uint64_t)(100 * i + 50));
        for (int at = 0; isa_at(at); at++) {
            bg_backend *b = moe_backend(isa_at(at), 2, BG_COMPUTE_NATIVE, ROWS);
            bg_experts *e;
            OK(b->ops->experts_new(b, &e, &l.spec, err));
            inputs in = make_inputs(b, s, ROWS, (uint64_t)i + 99);
            bg_act out = new_act(b, "out", ROWS, s->d);
            step_of(b, ROWS);
            OK(bg_op_moe(b, &out, e, &in.route, &in.h, &in.add, err));

            bg_linear *ffn[16][3];
            for (int k = 0; k < s->n_experts; k++) {
                ffn[k][0] = single(b, &l.spec.gate, (size_t)k * l.gate.bytes,
                                   s->bias ? l.gate_bias + k * s->f : NULL);
                ffn[k][1] = single(b, &l.spec.up, (size_t)k * l.up.bytes,
                                   s->bias ? l.up_bias + k * s->f : NULL);
                ffn[k][2] = single(b, &l.spec.down, (size_t)k * l.down.bytes,
                                   s->bias ? l.down_bias + k * s->d : NULL);
            }
            bg_linear *shared[4][3];
            for (int k = 0; k < s->n_shared; k++) {
                bg_linear_part part[] = {l.spec.shared_gate, l.spec.shared_up, l.spec.shared_down};
                part[0].row0 += k * s->f_total;
                part[1].row0 += k * s->f_total;
                part[2].col0 += k * s->f_total;
                for (int m = 0; m < 3; m++)
                    shared[k][m] = single(b, &part[m], 0, NULL);
            }
            bg_act gate_up = new_act(b, "gate_up", 1, 2 * s->f), act = new_act(b, "act", 1, s->f);
            bg_act y = new_act(b, "y", 1, s->d), want = new_act(b, "want", 1, s->d);
            float *w = want.data;
            const bg_kernels *kernels = ((bg_cpu *)b)->kernels;
            step_of(b, 1);
            for (int t = 0; t < ROWS; t++) {
                const float *route = (float *)in.route.data + t * in.route.cols;
                const bg_act x = {(float *)in.h.data + t * in.h.cols, 1, in.h.cols, "x", 0};
                memset(w, 0, (size_t)s->d * sizeof *w);
                for (int k = 0; k < s->n_used + s->n_shared; k++) {
                    const bool routed = k < s->n_used;
                    by_linears(b, routed ? ffn[(int)route[k]] : shared[k - s->n_used], s, &x,
                               &gate_up, &act, &y);
                    kernels->add_scaled(w, y.data, routed ? route[s->n_used + k] : 1.0f, s->d);
                }
                kernels->add_scaled(w, (float *)in.add.data + t * in.add.cols, route[2 * s->n_used],
                                    s->d);
                cr_assert(same_bits(w, (float *)out.data + t * s->d, s->d),
                          "%s, shape %d: row %d is not what linears give", isa_at(at), i, t);
            }
            bg_backend_free(b);
        }
        free_layer(&l);
    }
}

/* out of rows [t0, t0 + n) of the inputs as a step of their own. */
static void run_rows(bg_backend *b, bg_experts *e, const inputs *in, bg_act *out, int t0, int n)
{
    bg_act part[4] = {in->h, in->route, in->add, *out};
    for (int i = 0; i < 4; i++) {
        part[i].data = (float *)part[i].data + t0 * part[i].cols;
        part[i].max_rows = n;
    }
    step_of(b, n);
    OK(bg_op_moe(b, &part[3], e, &part[1], &part[0], &part[2], err));
}

Test(moe, a_token_has_the_same_bits_alone_and_among_others)
{
    static const bg_compute modes[] = {BG_COMPUTE_NATIVE, BG_COMPUTE_F32};
    enum { ROWS = 43 };
    for (int i = 0; i < N_SHAPES; i++) {
        const shape *s = &shapes[i];
        layer l;
        make_layer(&l, s, (uint64_t)(100 * i + 70));
        for (int at = 0; isa_at(at); at++)
            for (int m = 0; m < 2; m++) {
                bg_backend *b = moe_backend(isa_at(at), 1, modes[m], ROWS);
                bg_backend *many = moe_backend(isa_at(at), 3, modes[m], ROWS);
                bg_experts *e, *e_many;
                OK(b->ops->experts_new(b, &e, &l.spec, err));
                OK(many->ops->experts_new(many, &e_many, &l.spec, err));
                inputs in = make_inputs(b, s, ROWS, (uint64_t)i + 5);
                bg_act all = new_act(b, "all", ROWS, s->d), cut = new_act(b, "cut", ROWS, s->d);
                const size_t n = (size_t)(ROWS * s->d);
                run_rows(many, e_many, &in, &all, 0, ROWS);
                for (int t = 0; t < ROWS; t++)
                    run_rows(t % 8 ? b : many, t % 8 ? e : e_many, &in, &cut, t, 1);
                cr_assert(same_bits(all.data, cut.data, (int64_t)n), "%s, shape %d: alone",
                          isa_at(at), i);
                for (int t = 0, len = 1; t < ROWS; t += len, len += 5)
                    run_rows(b, e, &in, &cut, t, ROWS - t < len ? ROWS - t : len);
                cr_assert(same_bits(all.data, cut.data, (int64_t)n), "%s, shape %d: in pieces",
                          isa_at(at), i);
                /* What is added may be where the sum goes. */
                step_of(b, ROWS);
                for (int t = 0; t < ROWS; t++)
                    memcpy((float *)cut.data + t * s->d, (float *)in.add.data + t * in.add.cols,
                           (size_t)s->d * sizeof(float));
                OK(bg_op_moe(b, &cut, e, &in.route, &in.h, &cut, err));
                cr_assert(same_bits(all.data, cut.data, (int64_t)n), "%s, shape %d: in place",
                          isa_at(at), i);
                bg_backend_free(b);
                bg_backend_free(many);
            }
        free_layer(&l);
    }
}

Test(moe, more_tokens_than_are_worked_on_at_once)
{
    enum { ROWS = 1050 };
    const shape *s = &shapes[2];
    layer l;
    make_layer(&l, s, 3);
    bg_backend *b = moe_backend(NULL, 2, BG_COMPUTE_NATIVE, ROWS);
    bg_experts *e;
    OK(b->ops->experts_new(b, &e, &l.spec, err));
    inputs in = make_inputs(b, s, ROWS, 5);
    bg_act all = new_act(b, "all", ROWS, s->d), cut = new_act(b, "cut", ROWS, s->d);
    run_rows(b, e, &in, &all, 0, ROWS);
    expect_guard(&all);
    for (int t = 0; t < ROWS; t += 50)
        run_rows(b, e, &in, &cut, t, 50);
    cr_expect(same_bits(all.data, cut.data, ROWS * s->d));
    free_layer(&l);
    bg_backend_free(b);
}

Test(moe, what_does_not_fit_is_refused)
{
    const shape *s = &shapes[1];
    layer l;
    make_layer(&l, s, 3);
    bg_backend *b = moe_backend(NULL, 2, BG_COMPUTE_F32, 4);
    bg_experts *e;
    OK(b->ops->experts_new(b, &e, &l.spec, err));
    inputs in = make_inputs(b, s, 4, 5);
    bg_act out = new_act(b, "out", 4, s->d);
    float *route = in.route.data;
    step_of(b, 4);
    route[in.route.cols * 2 + 1] = 5;
    FAILS(BG_INTERNAL, "row 2", bg_op_moe(b, &out, e, &in.route, &in.h, NULL, err));
    route[in.route.cols * 2 + 1] = NAN;
    FAILS(BG_INTERNAL, "row 2", bg_op_moe(b, &out, e, &in.route, &in.h, NULL, err));
    route[in.route.cols * 2 + 1] = 0;
    ((float *)in.h.data)[3] = NAN; /* a poisoned input does not stay unseen */
    FAILS(BG_INTERNAL, "not finite", bg_op_moe(b, &out, e, &in.route, &in.h, NULL, err));
    bg_act small = out;
    small.max_rows = 3;
    FAILS(BG_INTERNAL, "needed", bg_op_moe(b, &small, e, &in.route, &in.h, NULL, err));

    bg_experts_spec spec = l.spec;
    spec.up.n_rows -= 32;
    FAILS(BG_ARG, "no FFN", b->ops->experts_new(b, &e, &spec, err));
    spec = l.spec;
    spec.n_used = 6;
    FAILS(BG_ARG, "6 of 5", b->ops->experts_new(b, &e, &spec, err));
    spec = l.spec;
    spec.n_shared = 2;
    FAILS(BG_ARG, "not inside", b->ops->experts_new(b, &e, &spec, err));
    const float w[8] = {0};
    bg_router_spec router = {
        .name = "r", .n_experts = 4, .n_used = 5, .d_model = 2, .weights = w, .scale = 1};
    bg_router *r;
    FAILS(BG_ARG, "5 of 4", b->ops->router_new(b, &r, &router, err));
    router.n_used = 3;
    router.n_groups = 4;
    router.n_groups_used = 2;
    FAILS(BG_ARG, "2 of 4 groups", b->ops->router_new(b, &r, &router, err));
    free_layer(&l);
    bg_backend_free(b);
}

Test(moe, cost_counts_each_expert_by_how_often_it_is_read)
{
    const shape *s = &shapes[0];
    layer l;
    make_layer(&l, s, 3);
    bg_backend *b = moe_backend(NULL, 1, BG_COMPUTE_NATIVE, 4);
    bg_experts *e;
    OK(b->ops->experts_new(b, &e, &l.spec, err));
    bg_cost one, two, all;
    b->ops->moe_cost(b, e, 1, &one);
    b->ops->moe_cost(b, e, 2, &two);
    b->ops->moe_cost(b, e, 10000, &all);
    cr_expect_float_eq(one.bytes / all.bytes, 0.4, 1e-9);
    cr_expect_float_eq(two.bytes / all.bytes, 1 - 0.6 * 0.6, 1e-9);
    const double weights = 5.0 * (double)(l.gate.bytes + l.up.bytes + l.down.bytes);
    cr_expect(all.bytes >= weights && all.bytes < 1.05 * weights + 8192, "%g of %g", all.bytes,
              weights);
    cr_expect_float_eq(two.flops, 2.0 * 2 * 2 * 3 * 96 * 160, 1);
    free_layer(&l);
    bg_backend_free(b);
}

/* ---- the clamped gate ------------------------------------------------------------------------ */

Test(moe, clamped_swiglu_matches_float64)
{
    enum { F = 37, ROWS = 40 };
    for (int at = 0; isa_at(at); at++) {
        const bg_backend_config config = config_of(isa_at(at), 2);
        bg_backend *b = backend_of(&config);
        bg_act gate_up = new_act(b, "gate_up", ROWS, 2 * F), out = new_act(b, "out", ROWS, F);
        float *x = gate_up.data;
        for (int i = 0; i < ROWS * 2 * F; i++)
            x[i] = normal(3, (uint64_t)i) * (i % 3 ? 1.0f : 9.0f);
        step_of(b, ROWS);
        OK(bg_op_glu(b, &out, &gate_up, BG_SWIGLU_CLAMP, err));
        int clamped = 0;
        for (int t = 0; t < ROWS; t++)
            for (int i = 0; i < F; i++) {
                const float g = x[t * 2 * F + i], u = x[t * 2 * F + F + i];
                const double want = act_of(BG_SWIGLU_CLAMP, (double)g, (double)u);
                const double got = (double)((float *)out.data)[t * F + i];
                clamped += g > 7 || fabsf(u) > 7;
                cr_assert(fabs(got - want) <= 2e-7 * (10 + fabs((double)g)) * fabs(want) + 1e-30,
                          "%s: %g, %g: %g, not %g", isa_at(at), (double)g, (double)u, got, want);
            }
        cr_expect_gt(clamped, 100);
        expect_guard(&out);
        x[5] = x[2 * F + F] = NAN;
        OK(bg_op_glu(b, &out, &gate_up, BG_SWIGLU_CLAMP, err));
        cr_expect(isnan(((float *)out.data)[5]) && isnan(((float *)out.data)[F]));
        bg_backend_free(b);
    }
}
