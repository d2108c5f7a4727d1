/* tests/gpu/test_sample.c - sampling on the GPU: tokens against the CPU backend's sampler,
 * log-probabilities against float64, rows alone against rows in a batch, frequencies. */
#include "gpu.h"

#include "backend/cuda/cuda.h"

enum { HISTORY = 6000, MAX_ROWS = 70, CASES = 30 };

static const int vocabs[] = {1, 5, 63, 1000, 32000, 128256, 262144};
static const bg_sampling plain = {.top_p = 1, .repetition_penalty = 1, .n_logprobs = -1};

static double normal(uint64_t seed, uint64_t i)
{
    const double u =
        ((double)(bg_mix64(seed * 0x9e3779b97f4a7c15ull + 2 * i) >> 11) + 0.5) * 0x1p-53;
    const double v = (double)(bg_mix64(seed * 0x9e3779b97f4a7c15ull + 2 * i + 1) >> 11) * 0x1p-53;
    return sqrt(-2 * log(u)) * cos(6.283185307179586 * v);
}

/* ---- rows to sample ---------------------------------------------------------------------------
 */

typedef struct rows { /* on the host: row j belongs to slot slot_of(j) */
    int n, vocab;
    float *logits;           /* [n, vocab] */
    bg_slot slots[MAX_ROWS]; /* of row j */
    bool skip[MAX_ROWS];     /* padding */
} rows;

static int slot_of(int j)
{
    return (j * 37 + 5) % MAX_ROWS;
}

static rows rows_new(int n, int vocab)
{
    rows r = {.n = n, .vocab = vocab};
    r.logits = malloc((size_t)n * (size_t)vocab * sizeof *r.logits);
    for (int j = 0; j < n; j++) {
        r.slots[j].tokens = malloc((HISTORY + 1) * sizeof(int32_t));
        r.slots[j].sampling = plain;
    }
    return r;
}

static void rows_free(rows *r)
{
    for (int j = 0; j < r->n; j++) {
        free(r->slots[j].tokens);
        free(r->slots[j].bias);
        free(r->slots[j].stop_ids);
    }
    free(r->logits);
}

/* Shapes of logits: as a model's, ties, bans, no numbers, all equal, nearly flat, far apart. */
static void fill_logits(float *x, int vocab, uint64_t seed, int shape)
{
    for (int i = 0; i < vocab; i++) {
        const float v = (float)(3 * normal(seed, (uint64_t)i));
        x[i] = v;
        if (shape == 1) x[i] = roundf(v * 2) / 2;
        if (shape == 2 && bg_mix64(seed + (uint64_t)i) % 3) x[i] = -INFINITY;
        if (shape == 3 && bg_mix64(seed + (uint64_t)i) % 50 == 0) x[i] = NAN;
        if (shape == 4) x[i] = 1.25f;
        if (shape == 5) x[i] = v * 1e-3f;
        if (shape == 6) x[i] = v * 1e3f;
        if (shape == 7) x[i] = -INFINITY;
    }
}

static void fill_history(bg_slot *slot, int vocab, uint64_t seed, int n)
{
    const int kinds = vocab < 400 || seed % 2 ? vocab : 400;
    for (int i = 0; i < n; i++)
        slot->tokens[i] = (int32_t)(bg_mix64(seed * 31 + (uint64_t)i) % (uint64_t)kinds);
    slot->n_tokens = n;
    slot->n_generated = (int)(seed % (uint64_t)n);
}

static void add_lists(bg_slot *slot, int vocab, uint64_t seed, int n_bias, int n_stop)
{
    bg_sampling *p = &slot->sampling;
    free(slot->bias);
    free(slot->stop_ids);
    slot->bias = malloc((size_t)(n_bias + 1) * sizeof *slot->bias);
    slot->stop_ids = malloc((size_t)(n_stop + 1) * sizeof *slot->stop_ids);
    for (int i = 0; i < n_bias; i++) { /* by token, with tokens that come twice */
        const int32_t at = (int32_t)((int64_t)vocab * (i / 2) / (n_bias / 2 + 1));
        const float b = 6 * gpu_random(seed, (uint64_t)i);
        slot->bias[i] = (bg_logit_bias){at, i % 5 == 3 ? -100 : b};
    }
    for (int i = 0; i < n_stop; i++)
        slot->stop_ids[i] = (int32_t)(bg_mix64(seed + (uint64_t)i) % (uint64_t)vocab);
    p->n_bias = n_bias;
    p->bias = slot->bias;
    p->n_stop_ids = n_stop;
    p->stop_ids = slot->stop_ids;
}

/* Case i of CASES: every option by itself, then mixes. */
static void fill_case(bg_slot *slot, int vocab, int i, uint64_t seed)
{
    bg_sampling *p = &slot->sampling;
    *p = plain;
    p->seed = bg_mix64(seed);
    if (i > 0) p->temperature = 1;
    switch (i) {
    case 2:
        p->temperature = 1e-6f;
        break;
    case 3:
        p->temperature = 1e6f;
        break;
    case 4:
        p->top_k = 1;
        break;
    case 5:
        p->top_k = 2;
        break;
    case 6:
        p->top_k = 50;
        break;
    case 7:
        p->top_k = vocab;
        break;
    case 8:
        p->top_k = vocab + 7;
        break;
    case 9:
        p->top_k = vocab / 2;
        break;
    case 10:
        p->top_p = 0;
        break;
    case 11:
        p->top_p = 0.1f;
        break;
    case 12:
        p->top_p = 0.9f;
        break;
    case 13:
        p->top_p = 0.999999f;
        break;
    case 14:
        p->min_p = 0.05f;
        break;
    case 15:
        p->min_p = 1;
        break;
    case 16:
        p->repetition_penalty = 1.3f;
        break;
    case 17:
        p->presence_penalty = 1.5f;
        break;
    case 18:
        p->frequency_penalty = 0.25f;
        break;
    case 19:
        add_lists(slot, vocab, seed, 40, 0);
        break;
    case 20:
        add_lists(slot, vocab, seed, 0, 30);
        p->min_tokens = slot->n_generated + 1;
        break;
    case 21:
        add_lists(slot, vocab, seed, 0, 30);
        p->min_tokens = slot->n_generated; /* no longer */
        break;
    case 22:
        p->n_logprobs = 0;
        break;
    case 23:
        p->n_logprobs = 20;
        break;
    case 24:
        p->temperature = 0;
        p->n_logprobs = 5;
        p->repetition_penalty = 0.8f;
        break;
    case 25:
        p->top_k = 50;
        p->top_p = 0.9f;
        p->n_logprobs = 3;
        break;
    case 26:
        p->top_k = 700;
        p->top_p = 0.5f;
        p->min_p = 0.01f;
        p->temperature = 1.7f;
        break;
    case 27:
        p->top_k = 3000;
        p->top_p = 0.95f;
        p->min_p = 1e-4f;
        break;
    case 28:
    case 29:
        add_lists(slot, vocab, seed, 12, 5);
        p->min_tokens = slot->n_generated + 3;
        p->temperature = 0.7f;
        p->top_p = 0.95f;
        p->min_p = i == 28 ? 0.02f : 0;
        p->repetition_penalty = 1.1f;
        p->presence_penalty = 0.3f;
        p->frequency_penalty = -0.2f;
        p->n_logprobs = i == 28 ? 20 : 1;
        break;
    }
}

/* ---- on the GPU --------------------------------------------------------------------------------
 */

typedef struct outcome { /* the caller's, ends with outcome_free() */
    bgk_sampled *sampled;
    bgk_top *tops;
    int32_t *history;
    float *logits;
} outcome;

static void outcome_free(outcome *o)
{
    free(o->sampled);
    free(o->tops);
    free(o->history);
    free(o->logits);
}

typedef struct device { /* what bgk_sample reads and writes */
    bgk_sample_args a;
    void *list[MAX_ROWS];
    int n_lists;
} device;

static device device_new(const rows *r, const int *which, int n)
{
    device d = {.n_lists = 0};
    const size_t vocab = (size_t)r->vocab;
    bgk_sampling *settings = calloc(MAX_ROWS, sizeof *settings);
    int32_t *history = malloc(MAX_ROWS * (HISTORY + 1) * sizeof *history);
    float *logits = malloc((size_t)n * vocab * sizeof *logits);
    int32_t slot[MAX_ROWS], len[MAX_ROWS], generated[MAX_ROWS];
    memset(settings, 0xff, MAX_ROWS * sizeof *settings);
    memset(history, 0xff, MAX_ROWS * (HISTORY + 1) * sizeof *history);
    for (int i = 0; i < n; i++) {
        const int j = which[i], at = slot_of(j);
        const bg_slot *s = &r->slots[j];
        const bg_sampling *p = &s->sampling;
        memcpy(logits + (size_t)i * vocab, r->logits + (size_t)j * vocab, vocab * sizeof *logits);
        slot[i] = r->skip[j] ? -1 : at;
        len[i] = s->n_tokens;
        generated[i] = s->n_generated;
        memcpy(history + (size_t)at * (HISTORY + 1), s->tokens,
               (size_t)s->n_tokens * sizeof *history);
        const size_t bias = (size_t)p->n_bias * sizeof *p->bias;
        const size_t stop = (size_t)p->n_stop_ids * sizeof *p->stop_ids;
        char *list = malloc(bias + stop + 1);
        if (bias) memcpy(list, p->bias, bias);
        if (stop) memcpy(list + bias, p->stop_ids, stop);
        char *on_device = d.list[d.n_lists++] = to_device(list, bias + stop);
        free(list);
        settings[at] = (bgk_sampling){.temperature = p->temperature,
                                      .top_p = p->top_p,
                                      .min_p = p->min_p,
                                      .repetition_penalty = p->repetition_penalty,
                                      .presence_penalty = p->presence_penalty,
                                      .frequency_penalty = p->frequency_penalty,
                                      .top_k = p->top_k,
                                      .n_logprobs = p->n_logprobs,
                                      .min_tokens = p->min_tokens,
                                      .n_bias = p->n_bias,
                                      .n_stop = p->n_stop_ids,
                                      .seed = p->seed,
                                      .bias = (const bgk_bias *)(void *)on_device,
                                      .stop = (const int32_t *)(void *)(on_device + bias)};
    }
    const size_t scratch = bgk_sample_scratch(n, r->vocab);
    d.a =
        (bgk_sample_args){.logits = to_device(logits, (size_t)n * vocab * sizeof *logits),
                          .n_rows = n,
                          .max_rows = n,
                          .vocab = r->vocab,
                          .slot = to_device(slot, (size_t)n * sizeof *slot),
                          .len = to_device(len, (size_t)n * sizeof *len),
                          .generated = to_device(generated, (size_t)n * sizeof *generated),
                          .settings = to_device(settings, MAX_ROWS * sizeof *settings),
                          .history = to_device(history, MAX_ROWS * (HISTORY + 1) * sizeof *history),
                          .history_stride = HISTORY + 1,
                          .sampled = poisoned((size_t)(n + GUARD) * sizeof(bgk_sampled)),
                          .tops = poisoned((size_t)(n + GUARD) * BGK_MAX_TOP * sizeof(bgk_top)),
                          .scratch = poisoned(scratch + GUARD)};
    CU(cudaMemset(d.a.scratch, 0, scratch));
    free(settings);
    free(history);
    free(logits);
    return d;
}

static void device_free(device *d)
{
    const void *all[] = {d->a.logits,  d->a.slot,    d->a.len,  d->a.generated, d->a.settings,
                         d->a.history, d->a.sampled, d->a.tops, d->a.scratch};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        CU(cudaFree((void *)(uintptr_t)all[i]));
    for (int i = 0; i < d->n_lists; i++)
        CU(cudaFree(d->list[i]));
}

/* Rows which[0..n) of r in this order. Twice, for what a launch leaves in scratch; the logits of
 * the first go in again. */
static outcome sample(const rows *r, const int *which, int n)
{
    device d = device_new(r, which, n);
    const size_t values = (size_t)n * (size_t)r->vocab;
    void *logits = NULL;
    CU(cudaMalloc(&logits, values * sizeof(float)));
    CU(cudaMemcpy(logits, d.a.logits, values * sizeof(float), cudaMemcpyDeviceToDevice));
    CU(bgk_sample(&d.a, 0));
    outcome first = {.sampled = from_device(d.a.sampled, (size_t)n * sizeof(bgk_sampled))};
    CU(cudaMemcpy(d.a.logits, logits, values * sizeof(float), cudaMemcpyDeviceToDevice));
    CU(cudaMemset(d.a.sampled, 0xff, (size_t)n * sizeof(bgk_sampled)));
    CU(cudaMemset(d.a.tops, 0xff, (size_t)n * BGK_MAX_TOP * sizeof(bgk_top)));
    CU(bgk_sample(&d.a, 0));
    const size_t guarded = (size_t)(n + GUARD);
    const outcome o = {.sampled = from_device(d.a.sampled, guarded * sizeof(bgk_sampled)),
                       .tops = from_device(d.a.tops, guarded * BGK_MAX_TOP * sizeof(bgk_top)),
                       .history =
                           from_device(d.a.history, MAX_ROWS * (HISTORY + 1) * sizeof(int32_t)),
                       .logits = from_device(d.a.logits, values * sizeof(float))};
    cr_assert(!memcmp(first.sampled, o.sampled, (size_t)n * sizeof *o.sampled),
              "the same again: other bits");
    cr_assert(all_poison(o.sampled + n, GUARD * sizeof *o.sampled), "behind the results");
    cr_assert(all_poison(o.tops + (size_t)n * BGK_MAX_TOP, GUARD * BGK_MAX_TOP * sizeof *o.tops),
              "behind the best tokens");
    char *scratch = from_device(d.a.scratch, bgk_sample_scratch(n, r->vocab) + GUARD);
    cr_assert(all_poison(scratch + bgk_sample_scratch(n, r->vocab), GUARD), "behind scratch");
    free(scratch);
    outcome_free(&first);
    CU(cudaFree(logits));
    device_free(&d);
    return o;
}

/* ---- against the CPU ---------------------------------------------------------------------------
 */

static bg_sampler sampler_new(int vocab)
{
    return (bg_sampler){.logits = calloc((size_t)vocab, sizeof(float)),
                        .keys = calloc((size_t)vocab, sizeof(uint64_t)),
                        .count = calloc((size_t)vocab, sizeof(uint32_t)),
                        .chunk_max = calloc((size_t)vocab / BG_CHUNK_TOKENS + 1, sizeof(float))};
}

static void sampler_free(bg_sampler *s)
{
    free(s->logits);
    free(s->keys);
    free(s->count);
    free(s->chunk_max);
}

/* A token may differ where mass or probability lies at a border up to rounding: then it is what
 * the CPU takes with the border moved a little. */
static bool near_border(bg_sampler *s, const float *x, int vocab, const bg_slot *slot, int token)
{
    for (int i = 0; i < 4; i++) {
        bg_slot moved = *slot;
        bg_sampled got;
        const float d = i % 2 ? 2e-6f : -2e-6f;
        if (i < 2)
            moved.sampling.top_p = fminf(fmaxf(moved.sampling.top_p + d, 0), 1);
        else
            moved.sampling.min_p *= 1 + d;
        bg_sample_row(s, &bg_kernels_plain, x, vocab, &moved, &got);
        if (got.token == token) return true;
    }
    return false;
}

/* Logits after biases and penalties, in float64. */
static double *changed(const float *x, int vocab, const bg_slot *slot)
{
    const bg_sampling *p = &slot->sampling;
    double *v = malloc((size_t)vocab * sizeof *v);
    int *seen = calloc((size_t)vocab, sizeof *seen), *output = calloc((size_t)vocab, sizeof *seen);
    for (int i = 0; i < vocab; i++)
        v[i] = (double)x[i];
    for (int i = 0; i < p->n_bias; i++)
        v[p->bias[i].token] += p->bias[i].bias <= -100 ? -INFINITY : (double)p->bias[i].bias;
    for (int i = 0; slot->n_generated < p->min_tokens && i < p->n_stop_ids; i++)
        v[p->stop_ids[i]] = -INFINITY;
    for (int i = 0; i < slot->n_tokens; i++) {
        seen[slot->tokens[i]]++;
        output[slot->tokens[i]] += i >= slot->n_tokens - slot->n_generated;
    }
    for (int i = 0; i < vocab; i++) {
        if (seen[i])
            v[i] = v[i] > 0 ? v[i] / (double)p->repetition_penalty
                            : v[i] * (double)p->repetition_penalty;
        if (output[i])
            v[i] -= (double)p->presence_penalty + (double)p->frequency_penalty * output[i];
    }
    free(seen);
    free(output);
    return v;
}

/* Up to float32's rounding of numbers as large as scale. */
static bool close_to(float got, double want, double scale)
{
    return isnan(want) ? isnan(got)
                       : (double)got == want || fabs((double)got - want) <= 1e-5 + 1e-6 * scale;
}

static void check_logprobs(const rows *r, int j, const bgk_sampled *got, const bgk_top *top,
                           const bg_sampled *want)
{
    const float *x = r->logits + (size_t)j * (size_t)r->vocab;
    double *v = changed(x, r->vocab, &r->slots[j]), most = -INFINITY, total = 0;
    for (int i = 0; i < r->vocab; i++)
        most = v[i] > most ? v[i] : most;
    for (int i = 0; i < r->vocab; i++)
        total += isnan(v[i]) ? 0 : exp(v[i] - most);
    const double log_total = most + log(total);
    if (!close_to(got->logprob, v[got->token] - log_total, fabs(most) + fabs(v[got->token])))
        cr_expect(0, "vocabulary %d, row %d: log-probability %.9g of %d, want %.9g", r->vocab, j,
                  (double)got->logprob, got->token, v[got->token] - log_total);
    for (int i = 0; i < want->n_top; i++) {
        cr_expect_eq(top[i].token, want->top[i].token,
                     "vocabulary %d, row %d: best %d is %d, not %d", r->vocab, j, i, top[i].token,
                     want->top[i].token);
        if (top[i].token < 0 || top[i].token >= r->vocab) break;
        cr_expect(close_to(top[i].logprob, v[top[i].token] - log_total,
                           fabs(most) + fabs(v[top[i].token])),
                  "vocabulary %d, row %d: best %d: %.9g, want %.9g", r->vocab, j, i,
                  (double)top[i].logprob, v[top[i].token] - log_total);
    }
    free(v);
}

/* Row i of an outcome is row j of r. Returns whether it was excused as lying at a border. */
static bool check_row(const rows *r, int j, const outcome *o, int i, bg_sampler *s)
{
    const float *x = r->logits + (size_t)j * (size_t)r->vocab;
    const bg_slot *slot = &r->slots[j];
    const bg_sampling *p = &slot->sampling;
    const bgk_sampled *got = &o->sampled[i];
    const int32_t *history = o->history + (size_t)slot_of(j) * (HISTORY + 1);
    if (r->skip[j]) {
        cr_expect(all_poison(got, sizeof *got), "padding was sampled");
        cr_expect(
            !memcmp(o->logits + (size_t)i * (size_t)r->vocab, x, (size_t)r->vocab * sizeof *x),
            "padding: logits were changed");
        cr_expect_eq(history[slot->n_tokens], -1, "padding: a token was put down");
        return false;
    }
    bg_sampled want;
    bool excused = false;
    bg_sample_row(s, &bg_kernels_plain, x, r->vocab, slot, &want);
    if (got->token != want.token) {
        excused = got->token >= 0 && got->token < r->vocab &&
                  near_border(s, x, r->vocab, slot, got->token);
        cr_expect(excused,
                  "vocabulary %d, row %d of %d: %d, want %d (t %g k %d p %g min %g rep %g pres %g "
                  "freq %g, %d biases)",
                  r->vocab, j, r->n, got->token, want.token, (double)p->temperature, p->top_k,
                  (double)p->top_p, (double)p->min_p, (double)p->repetition_penalty,
                  (double)p->presence_penalty, (double)p->frequency_penalty, p->n_bias);
        if (!excused) return false;
        bg_sample_row(s, &bg_kernels_plain, x, r->vocab, slot, &want);
    }
    cr_expect_eq(got->slot, slot_of(j));
    cr_expect_eq(got->n_top, want.n_top);
    if (p->n_logprobs >= 0)
        check_logprobs(r, j, got, o->tops + (size_t)i * BGK_MAX_TOP, &want);
    else
        cr_expect(isnan(got->logprob), "a log-probability that nobody asked for");
    cr_expect(all_poison(o->tops + (size_t)i * BGK_MAX_TOP + want.n_top,
                         (size_t)(BGK_MAX_TOP - want.n_top) * sizeof(bgk_top)),
              "more best tokens than asked for");
    cr_expect_eq(history[slot->n_tokens], got->token, "history");
    cr_expect(!memcmp(history, slot->tokens, (size_t)slot->n_tokens * sizeof *history));
    if (slot->n_tokens < HISTORY) cr_expect_eq(history[slot->n_tokens + 1], -1, "history, beyond");
    return excused;
}

/* All rows in a batch against the CPU, then some alone and a pair turned round, against the batch.
 * Returns how many were excused. */
static int check_rows(const rows *r, bg_sampler *s)
{
    int which[MAX_ROWS], excused = 0;
    for (int j = 0; j < r->n; j++)
        which[j] = j;
    outcome all = sample(r, which, r->n);
    for (int j = 0; j < r->n; j++)
        excused += check_row(r, j, &all, j, s);
    for (int k = 0; k < 3 && k < r->n; k++) {
        const int j = k * (r->n - 1) / 2, pair[2] = {j, (j + 1) % r->n};
        const int turned[2] = {pair[1], pair[0]};
        for (int n = 1; n <= 2 && n <= r->n; n++) {
            outcome few = sample(r, n == 1 ? pair : turned, n);
            cr_expect(!memcmp(&few.sampled[n - 1], &all.sampled[j], sizeof *few.sampled),
                      "vocabulary %d, row %d in a batch of %d and of %d: not the same", r->vocab, j,
                      r->n, n);
            cr_expect(!memcmp(few.tops + (n - 1) * BGK_MAX_TOP, all.tops + j * BGK_MAX_TOP,
                              BGK_MAX_TOP * sizeof *few.tops),
                      "vocabulary %d, row %d: other best tokens in a batch", r->vocab, j);
            outcome_free(&few);
        }
    }
    outcome_free(&all);
    return excused;
}

Test(sample, as_on_the_cpu)
{
    NEEDS_GPU();
    int total = 0, excused = 0;
    for (size_t v = 0; v < sizeof vocabs / sizeof *vocabs; v++) {
        const int vocab = vocabs[v];
        bg_sampler s = sampler_new(vocab);
        /* cases and shapes of logits have no common divisor, so that all pairs come by */
        const int n_rows = vocab > 1000 ? 3 : MAX_ROWS;
        const int rounds = gpu_small() ? 1 : vocab > 1000 ? CASES / 3 : 4;
        for (int round = 0; round < rounds; round++) {
            rows r = rows_new(n_rows, vocab);
            for (int j = 0; j < n_rows; j++) {
                const uint64_t seed = (uint64_t)(v * 100000 + (size_t)(round * n_rows + j));
                fill_logits(r.logits + (size_t)j * (size_t)vocab, vocab, seed,
                            (round * n_rows + j + (int)v) % 13);
                fill_history(&r.slots[j], vocab, seed,
                             j % 9 == 4 ? HISTORY : 1 + (int)(seed % 700));
                fill_case(&r.slots[j], vocab, (round * n_rows + j) % CASES, seed);
            }
            excused += check_rows(&r, &s);
            total += n_rows;
            rows_free(&r);
        }
        sampler_free(&s);
    }
    cr_expect(excused * 50 <= total, "%d of %d rows at a border", excused, total);
}

/* Splits of a row into blocks are few where rows are many: large vocabularies too. */
Test(sample, many_rows_of_a_large_vocabulary)
{
    NEEDS_GPU();
    const int vocab = gpu_small() ? 4097 : 32000;
    bg_sampler s = sampler_new(vocab);
    rows r = rows_new(MAX_ROWS, vocab);
    for (int j = 0; j < MAX_ROWS; j++) {
        fill_logits(r.logits + (size_t)j * (size_t)vocab, vocab, 77 + (uint64_t)j, j % 7);
        fill_history(&r.slots[j], vocab, 5 + (uint64_t)j, 1 + j * 11);
        fill_case(&r.slots[j], vocab, (j * 7 + 1) % CASES, 900 + (uint64_t)j);
    }
    cr_expect_leq(check_rows(&r, &s), 2);
    rows_free(&r);
    sampler_free(&s);
}

/* Nearly flat logits, so that any token may win; options are set so that the winner is the last
 * token kept, or the first one left out. */
Test(sample, borders)
{
    NEEDS_GPU();
    static const int sizes[] = {2, 5, 300, 5000};
    for (int v = 0; v < 4; v++) {
        const int vocab = sizes[v];
        bg_sampler s = sampler_new(vocab);
        rows r = rows_new(MAX_ROWS, vocab);
        for (int j = 0; j < MAX_ROWS; j++) {
            float *x = r.logits + (size_t)j * (size_t)vocab;
            bg_sampling *p = &r.slots[j].sampling;
            bg_sampled winner;
            fill_history(&r.slots[j], vocab, 1, 1);
            for (int i = 0; i < vocab; i++) /* equal, or each its own */
                x[i] = j % 2 ? 0 : -1e-9f * (float)((int64_t)i * 7919 % vocab);
            p->temperature = 1;
            p->seed = 4000 + (uint64_t)(v * MAX_ROWS + j);
            bg_sample_row(&s, &bg_kernels_plain, x, vocab, &r.slots[j], &winner);
            int rank = 1;
            for (int i = 0; i < vocab; i++)
                rank += x[i] > x[winner.token] || (x[i] == x[winner.token] && i < winner.token);
            const float kept = (float)rank - 0.5f - (float)(j / 2 % 2); /* with the winner or not */
            const int among = rank + 20 < vocab ? rank + 20 : vocab;
            if (j / 4 % 3 == 0) p->top_k = (int32_t)(kept + 0.5f); /* rank 1, without: off */
            if (j / 4 % 3 == 1) p->top_p = fmaxf(kept, 0) / (float)vocab;
            if (j / 4 % 3 == 2) {
                p->top_k = among;
                p->top_p = fmaxf(kept, 0) / (float)among;
            }
        }
        cr_expect_leq(check_rows(&r, &s), 1);
        rows_free(&r);
        sampler_free(&s);
    }
}

/* More equal logits than the list of the best has room for, the lowest of them not where warps
 * look first. */
Test(sample, best_of_many_equal)
{
    NEEDS_GPU();
    enum { VOCAB = 32000, WORSE = 200 };
    bg_sampler s = sampler_new(VOCAB);
    rows r = rows_new(2, VOCAB);
    for (int j = 0; j < 2; j++) {
        fill_history(&r.slots[j], VOCAB, 1, 1);
        for (int i = 0; i < VOCAB; i++)
            r.logits[j * VOCAB + i] = i < WORSE ? -1 : 1;
        r.slots[j].sampling.n_logprobs = 20;
        r.slots[j].sampling.temperature = 1;
        if (j) r.slots[j].sampling.top_k = 100;
    }
    cr_expect_eq(check_rows(&r, &s), 0);
    rows_free(&r);
    sampler_free(&s);
}

Test(sample, padding_is_left_alone)
{
    NEEDS_GPU();
    bg_sampler s = sampler_new(1000);
    rows r = rows_new(8, 1000);
    for (int j = 0; j < 8; j++) {
        fill_logits(r.logits + (size_t)j * 1000, 1000, (uint64_t)j, 0);
        fill_history(&r.slots[j], 1000, 3 + (uint64_t)j, 40);
        fill_case(&r.slots[j], 1000, 28, (uint64_t)j);
        r.skip[j] = j % 3 == 1 || j >= 6;
    }
    check_rows(&r, &s);
    rows_free(&r);
    sampler_free(&s);
}

/* As often as their probabilities say, and never a token that an option leaves out. */
Test(sample, frequencies)
{
    NEEDS_GPU();
    enum { VOCAB = 9 };
    const int launches = gpu_small() ? 10 : 300;
    static const int kept[] = {VOCAB, 4, 3}; /* all, top_k 4, top_p 0.68 */
    for (int kind = 0; kind < 3; kind++) {
        rows r = rows_new(MAX_ROWS, VOCAB);
        double p[VOCAB], total = 0;
        int count[VOCAB] = {0}, which[MAX_ROWS];
        for (int j = 0; j < MAX_ROWS; j++) {
            which[j] = j;
            for (int i = 0; i < VOCAB; i++)
                r.logits[j * VOCAB + i] = 2 - 0.3f * (float)i;
            fill_history(&r.slots[j], VOCAB, 1, 1);
            r.slots[j].sampling.temperature = 0.8f;
            r.slots[j].sampling.seed = 1000 + (uint64_t)j;
            if (kind == 1) r.slots[j].sampling.top_k = 4;
            if (kind == 2) r.slots[j].sampling.top_p = 0.68f;
        }
        for (int i = 0; i < kept[kind]; i++)
            total += p[i] = exp(-0.3 * i / 0.8);
        device d = device_new(&r, which, MAX_ROWS);
        int32_t *generated = (int32_t *)(uintptr_t)d.a.generated;
        for (int n = 0; n < launches; n++) {
            int32_t at[MAX_ROWS];
            for (int j = 0; j < MAX_ROWS; j++)
                at[j] = n;
            CU(cudaMemcpy(generated, at, sizeof at, cudaMemcpyHostToDevice));
            CU(bgk_sample(&d.a, 0));
            bgk_sampled *got = from_device(d.a.sampled, MAX_ROWS * sizeof *got);
            for (int j = 0; j < MAX_ROWS; j++)
                count[got[j].token]++;
            free(got);
        }
        double chi = 0;
        for (int i = 0; i < VOCAB; i++) {
            const double expected = i < kept[kind] ? p[i] / total * MAX_ROWS * launches : 0;
            if (i < kept[kind])
                chi += (count[i] - expected) * (count[i] - expected) / expected;
            else
                cr_expect_eq(count[i], 0, "kind %d: token %d was left out", kind, i);
        }
        cr_expect_lt(chi, 35, "kind %d: chi-square %g", kind, chi); /* 8 degrees: once in 40000 */
        device_free(&d);
        rows_free(&r);
    }
}

/* ---- the backend's part
 * -------------------------------------------------------------------------- */

/* Seats, steps and fetches of a backend with logits put in by hand: biases in any order, lists that
 * grow, seats taken again, tokens appended. */
Test(sample, through_the_backend)
{
    NEEDS_GPU();
    enum { VOCAB = 1000, SEATS = 4, STEPS = 6 };
    const bg_backend_config config = {.n_threads = 1,
                                      .first_cpu = -1,
                                      .max_tokens = 64,
                                      .max_seqs = SEATS,
                                      .max_out = SEATS,
                                      .max_ctx = 128,
                                      .vocab_size = VOCAB,
                                      .eager = true};
    bg_error err = {0};
    bg_backend *b = NULL;
    cr_assert_eq(bg_cuda_backend_new(&b, &config, 0, &err), BG_OK, "%s", err.text);
    bg_cuda *c = (bg_cuda *)b;
    const bg_cache_spec cache = {.n_layers = 1,
                                 .n_blocks = 64,
                                 .block_tokens = 16,
                                 .n_kv_heads = 1,
                                 .k_dim = 64,
                                 .v_dim = 64,
                                 .type = BG_CACHE_F16};
    cr_assert_eq(b->ops->cache_new(b, &cache, &err), BG_OK, "%s", err.text);
    bg_sampler s = sampler_new(VOCAB);
    bg_slot mine[SEATS] = {{0}};
    float *x = malloc(SEATS * VOCAB * sizeof *x);
    const int32_t blocks[] = {1, 2, 3, 4, 5, 6, 7, 8};
    for (int i = 0; i < SEATS; i++)
        mine[i].tokens = malloc((HISTORY + 1) * sizeof(int32_t));
    for (int step = 0; step < STEPS; step++) {
        bg_seq_step seqs[SEATS];
        for (int i = 0; i < SEATS; i++) {
            const uint64_t seed = (uint64_t)(step * SEATS + i);
            if (step % 3 == 0) { /* another sequence sits down */
                fill_history(&mine[i], VOCAB, seed, 9 + i);
                fill_case(&mine[i], VOCAB, 28, seed);
                add_lists(&mine[i], VOCAB, seed, 10 + 20 * step, 7);
                for (int k = 0; k < mine[i].sampling.n_bias; k++) { /* in another order */
                    const int o = (int)(bg_mix64(seed + (uint64_t)k) % (uint64_t)(k + 1));
                    const bg_logit_bias t = mine[i].bias[k];
                    mine[i].bias[k] = mine[i].bias[o];
                    mine[i].bias[o] = t;
                }
                mine[i].sampling.min_tokens = mine[i].n_generated + 1 + i % 2;
                cr_assert_eq(b->ops->slot_seat(b, i, &mine[i].sampling, mine[i].tokens,
                                               mine[i].n_tokens, mine[i].n_generated, &err),
                             BG_OK, "%s", err.text);
            }
            fill_logits(x + i * VOCAB, VOCAB, 50 + seed, i % 3);
            seqs[i] = (bg_seq_step){.slot = i,
                                    .pos0 = mine[i].n_tokens - 1,
                                    .n_tokens = 1,
                                    .n_blocks = 8,
                                    .blocks = blocks,
                                    .sample = true};
        }
        const bg_batch batch = {.n_seqs = SEATS, .seqs = seqs};
        cr_assert_eq(b->ops->begin_step(b, &batch, &err), BG_OK, "%s", err.text);
        CU(cudaMemcpyAsync(c->logits, x, SEATS * VOCAB * sizeof *x, cudaMemcpyHostToDevice,
                           c->stream));
        c->has_logits = true;
        bg_sampled got[SEATS], want;
        int n = 0;
        cr_assert_eq(b->ops->sample(b, &err), BG_OK, "%s", err.text);
        cr_assert_eq(b->ops->fetch(b, got, &n, &err), BG_OK, "%s", err.text);
        cr_assert_eq(n, SEATS);
        for (int i = 0; i < SEATS; i++) {
            bg_sample_row(&s, &bg_kernels_plain, x + i * VOCAB, VOCAB, &mine[i], &want);
            cr_expect_eq(got[i].slot, i);
            cr_expect_eq(got[i].token, want.token, "step %d, seat %d: %d, want %d", step, i,
                         got[i].token, want.token);
            cr_expect_float_eq(got[i].logprob, want.logprob, 1e-4f);
            cr_expect_eq(got[i].n_top, 20);
            for (int k = 0; k < want.n_top; k++)
                cr_expect_eq(got[i].top[k].token, want.top[k].token);
            mine[i].tokens[mine[i].n_tokens++] = got[i].token;
            mine[i].n_generated++;
        }
    }
    for (int i = 0; i < SEATS; i++) {
        free(mine[i].tokens);
        free(mine[i].bias);
        free(mine[i].stop_ids);
    }
    free(x);
    sampler_free(&s);
    bg_backend_free(b);
}

/* ---- times
 * ---------------------------------------------------------------------------------------- */

static void timed_call(void *ctx, cudaStream_t stream)
{
    const device *d = ctx;
    CU(bgk_sample(&d->a, stream));
}

/* Rows share slots and logits of 16 rows where they are many: what is timed does not change. */
Test(sample, bench_sample)
{
    NEEDS_GPU();
    if (gpu_small()) return;
    enum { VOCAB = 128256, DISTINCT = 16, MOST = 512 };
    static const char *const names[] = {"greedy",     "temperature 1", "top_k 50 top_p 0.9",
                                        "top_p 0.9",  "top_k 5000",    "penalties, 2000 tokens",
                                        "20 logprobs"};
    static const int sizes[] = {1, 32, MOST};
    for (int kind = 0; kind < 7; kind++) {
        rows r = rows_new(DISTINCT, VOCAB);
        int which[DISTINCT];
        for (int j = 0; j < DISTINCT; j++) {
            bg_sampling *p = &r.slots[j].sampling;
            which[j] = j;
            fill_logits(r.logits + (size_t)j * VOCAB, VOCAB, (uint64_t)j, 0);
            fill_history(&r.slots[j], VOCAB, 1 + (uint64_t)j, kind == 5 ? 2000 : 100);
            p->temperature = kind ? 1 : 0;
            p->seed = (uint64_t)j;
            if (kind == 2) p->top_k = 50;
            if (kind == 2 || kind == 3) p->top_p = 0.9f;
            if (kind == 4) p->top_k = 5000;
            if (kind == 5) p->repetition_penalty = 1.0001f; /* again and again on the same logits */
            if (kind == 6) p->n_logprobs = 20;
        }
        device d = device_new(&r, which, DISTINCT), big = d;
        const size_t row = VOCAB * sizeof(float), scratch = bgk_sample_scratch(MOST, VOCAB);
        int32_t slot[MOST], len[MOST], generated[MOST];
        CU(cudaMalloc((void **)&big.a.logits, MOST * row));
        for (int j = 0; j < MOST; j++) {
            const int from = j % DISTINCT;
            slot[j] = slot_of(from);
            len[j] = r.slots[from].n_tokens;
            generated[j] = j;
            if (generated[j] > len[j]) generated[j] = len[j];
            CU(cudaMemcpy(big.a.logits + (size_t)j * VOCAB, d.a.logits + (size_t)from * VOCAB, row,
                          cudaMemcpyDeviceToDevice));
        }
        big.a.max_rows = MOST;
        big.a.slot = to_device(slot, sizeof slot);
        big.a.len = to_device(len, sizeof len);
        big.a.generated = to_device(generated, sizeof generated);
        big.a.sampled = poisoned(MOST * sizeof(bgk_sampled));
        big.a.tops = poisoned(MOST * BGK_MAX_TOP * sizeof(bgk_top));
        big.a.scratch = poisoned(scratch);
        CU(cudaMemset(big.a.scratch, 0, scratch));
        for (int i = 0; i < 3; i++) {
            big.a.n_rows = sizes[i];
            const double us = gpu_time_us(timed_call, &big, 10);
            printf("%-24s %4d rows of %d: %8.1f us, %5.0f GB/s\n", names[kind], sizes[i], VOCAB, us,
                   (double)sizes[i] * (double)row / us * 1e-3);
        }
        const void *all[] = {big.a.logits,  big.a.slot, big.a.len,    big.a.generated,
                             big.a.sampled, big.a.tops, big.a.scratch};
        for (size_t i = 0; i < sizeof all / sizeof *all; i++)
            CU(cudaFree((void *)(uintptr_t)all[i]));
        device_free(&d);
        rows_free(&r);
    }
}
