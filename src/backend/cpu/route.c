/* The CPU backend's op route: which experts a token goes to, and how much each counts. All in
 * float32 with sums in fixed orders, so that all ranks of a replica choose the same. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cpu/cpu.h"

struct bg_router {
    bg_router_spec spec; /* its pointers are to the copies below */
    float values[];      /* weights, bias, choice_bias, shared_gate, those that there are */
};

static const float *copy(float **at, const float *from, size_t n)
{
    if (!from) return NULL;
    float *to = *at;
    memcpy(to, from, n * sizeof *to);
    *at += n;
    return to;
}

bg_status bg_cpu_router_new(bg_router **router, const bg_router_spec *spec, size_t *bytes,
                            bg_error *err)
{
    *router = NULL;
    const bool grouped = spec->n_groups > 1;
    if (spec->n_experts < 1 || spec->n_used < 1 || spec->n_used > spec->n_experts ||
        spec->d_model < 1 || !spec->weights || spec->gating > BG_GATING_SOFTMAX_CHOSEN)
        return bg_fail(err, BG_ARG, "%s: %d of %d experts, %d columns, gating %d", spec->name,
                       spec->n_used, spec->n_experts, spec->d_model, (int)spec->gating);
    if (grouped && (spec->n_experts % spec->n_groups || spec->n_groups_used < 1 ||
                    spec->n_groups_used > spec->n_groups ||
                    spec->n_experts / spec->n_groups * spec->n_groups_used < spec->n_used))
        return bg_fail(err, BG_ARG, "%s: %d of %d experts from %d of %d groups", spec->name,
                       spec->n_used, spec->n_experts, spec->n_groups_used, spec->n_groups);
    const size_t n = (size_t)spec->n_experts, d = (size_t)spec->d_model;
    *bytes = sizeof **router + (n * d + 2 * n + d) * sizeof(float);
    bg_router *r = malloc(*bytes);
    if (!r) return bg_fail(err, BG_NOMEM, "%s: out of memory", spec->name);
    float *at = r->values;
    r->spec = *spec;
    r->spec.weights = copy(&at, spec->weights, n * d);
    r->spec.bias = copy(&at, spec->bias, n);
    r->spec.choice_bias = copy(&at, spec->choice_bias, n);
    r->spec.shared_gate = copy(&at, spec->shared_gate, d);
    *router = r;
    return BG_OK;
}

static float sigmoid(float x)
{
    return 1.0f / (1.0f + expf(-x));
}

static void softmax(float *x, int n)
{
    float most = x[0], sum = 0;
    for (int i = 1; i < n; i++)
        most = x[i] > most ? x[i] : most;
    for (int i = 0; i < n; i++)
        sum += x[i] = expf(x[i] - most);
    for (int i = 0; i < n; i++)
        x[i] /= sum;
}

/* The first largest of the n values that are not taken; one of them even if they are no numbers. */
static int take_best(const float *x, bool *taken, int n)
{
    int best = -1;
    for (int i = 0; i < n; i++)
        if (!taken[i] && (best < 0 || x[i] > x[best])) best = i;
    taken[best] = true;
    return best;
}

/* Takes the experts that are in none of the best groups. */
static void take_groups(const bg_router_spec *s, const float *choice, bool *taken, float *score,
                        bool *used)
{
    const int size = s->n_experts / s->n_groups;
    for (int g = 0; g < s->n_groups; g++) {
        float first = -INFINITY, second = -INFINITY;
        for (int i = g * size; i < (g + 1) * size; i++) {
            if (choice[i] > first) {
                second = first;
                first = choice[i];
            } else if (choice[i] > second) {
                second = choice[i];
            }
        }
        score[g] = size > 1 ? first + second : first;
        used[g] = false;
    }
    for (int i = 0; i < s->n_groups_used; i++)
        take_best(score, used, s->n_groups);
    for (int i = 0; i < s->n_experts; i++)
        taken[i] = !used[i / size];
}

/* From the logits in p to the row of route. */
static void choose(const bg_router_spec *s, float *p, const bg_route_scratch *w, float *out)
{
    const int n = s->n_experts, k = s->n_used;
    float *weight = out + k, sum = 0;
    if (s->gating == BG_GATING_SOFTMAX) softmax(p, n);
    for (int i = 0; i < n; i++) {
        if (s->gating == BG_GATING_SIGMOID) p[i] = sigmoid(p[i]);
        w->choice[i] = s->choice_bias ? p[i] + s->choice_bias[i] : p[i];
        w->taken[i] = false;
    }
    if (s->n_groups > 1) take_groups(s, w->choice, w->taken, w->group, w->group_used);
    for (int i = 0; i < k; i++) {
        const int e = take_best(w->choice, w->taken, n);
        out[i] = (float)e;
        weight[i] = p[e];
    }
    if (s->gating == BG_GATING_SOFTMAX_CHOSEN) softmax(weight, k);
    for (int i = 0; i < k; i++)
        sum += weight[i];
    const float least = 0x1p-14f, by = sum < least ? least : sum;
    for (int i = 0; i < k; i++)
        weight[i] = (s->renormalise ? weight[i] / by : weight[i]) * s->scale;
}

typedef struct route_job {
    bg_cpu *c;
    const bg_router_spec *s;
    const float *h;
    float *route;
    int64_t h_cols, cols;
} route_job;

static void route_thread(void *ctx, int thread, int n_threads)
{
    const route_job *job = ctx;
    bg_cpu *c = job->c;
    const bg_router_spec *s = job->s;
    const int n_rows = c->s.n_rows, n = s->n_experts, k = s->n_used;
    for (int e = n * thread / n_threads; e < n * (thread + 1) / n_threads; e++)
        for (int r = 0; r < n_rows; r++)
            c->route_logits[(size_t)r * (size_t)n + (size_t)e] =
                c->kernels->dot(s->weights + (size_t)e * (size_t)s->d_model,
                                job->h + r * job->h_cols, s->d_model) +
                (s->bias ? s->bias[e] : 0.0f);
    if (n_threads > 1) bg_pool_barrier(c->pool);
    for (int r = (int)((int64_t)n_rows * thread / n_threads);
         r < (int)((int64_t)n_rows * (thread + 1) / n_threads); r++) {
        float *out = job->route + r * job->cols;
        choose(s, c->route_logits + (size_t)r * (size_t)n, &c->route_scratch[thread], out);
        out[2 * k] =
            s->shared_gate
                ? sigmoid(c->kernels->dot(s->shared_gate, job->h + r * job->h_cols, s->d_model))
                : 1.0f;
        for (int64_t i = 2 * k + 1; i < job->cols; i++)
            out[i] = 0;
    }
}

bg_status bg_cpu_route(bg_backend *b, bg_act *route, const bg_router *r, const bg_act *h,
                       bg_error *err)
{
    enum { SOLO = 1 << 15 }; /* products that the caller does alone */
    bg_cpu *c = (bg_cpu *)b;
    const bg_router_spec *s = &r->spec;
    if (c->s.n_rows > route->max_rows || c->s.n_rows > h->max_rows ||
        route->cols < 2 * s->n_used + 1 || h->cols < s->d_model)
        return bg_fail(err, BG_INTERNAL,
                       "op route: %d rows, %d of %d experts, %d columns; %s is [%lld, %lld], %s "
                       "[%lld, %lld]",
                       c->s.n_rows, s->n_used, s->n_experts, s->d_model, route->name,
                       (long long)route->max_rows, (long long)route->cols, h->name,
                       (long long)h->max_rows, (long long)h->cols);
    route_job job = {c, s, h->data, route->data, h->cols, route->cols};
    if ((int64_t)c->s.n_rows * s->n_experts * s->d_model > SOLO)
        bg_pool_run(c->pool, route_thread, &job);
    else
        route_thread(&job, 0, 1);
    return BG_OK;
}
