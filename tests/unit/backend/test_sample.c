/* Sampling: every choice against a plain float64 sampler, the distribution against chi-square, and
 * independence of batch and threads. */
#include "unit/backend/cpu_fixture.h"

enum { MOST = 50000 };

typedef struct ranked {
    double logit;
    int id;
} ranked;

static int by_rank(const void *a, const void *b)
{
    const ranked *x = a, *y = b;
    if (x->logit != y->logit) return x->logit > y->logit ? -1 : 1;
    return x->id < y->id ? -1 : 1;
}

/* The contract of bg_sampling, word for word, in float64. changed gets the logits after penalties.
 */
static int reference(const float *logits, int vocab, const bg_slot *slot, double *changed)
{
    const bg_sampling *p = &slot->sampling;
    for (int i = 0; i < vocab; i++)
        changed[i] = (double)logits[i];
    for (int i = 0; i < p->n_bias; i++)
        changed[p->bias[i].token] += p->bias[i].bias <= -100 ? -INFINITY : (double)p->bias[i].bias;
    for (int i = 0; slot->n_generated < p->min_tokens && i < p->n_stop_ids; i++)
        changed[p->stop_ids[i]] = -INFINITY;
    for (int i = 0; i < vocab; i++) {
        int seen = 0, output = 0;
        for (int j = 0; j < slot->n_tokens; j++) {
            seen += slot->tokens[j] == i;
            output += slot->tokens[j] == i && j >= slot->n_tokens - slot->n_generated;
        }
        if (seen)
            changed[i] = changed[i] > 0 ? changed[i] / (double)p->repetition_penalty
                                        : changed[i] * (double)p->repetition_penalty;
        if (output)
            changed[i] -= (double)p->presence_penalty + (double)p->frequency_penalty * output;
    }
    ranked *r = malloc((size_t)vocab * sizeof *r);
    for (int i = 0; i < vocab; i++)
        r[i] = (ranked){changed[i], i};
    qsort(r, (size_t)vocab, sizeof *r, by_rank);
    int token = r[0].id;
    if (p->temperature > 0) {
        int n = p->top_k > 0 && p->top_k < vocab ? p->top_k : vocab;
        double *w = malloc((size_t)vocab * sizeof *w), total = 0, sum = 0, best = -INFINITY;
        for (int i = 0; i < n; i++)
            total += w[i] = exp((r[i].logit - r[0].logit) / (double)p->temperature);
        for (int i = 0; p->top_p < 1 && i < n; i++)
            if ((sum += w[i]) >= (double)p->top_p * total) n = i + 1;
        for (int i = 0; i < n; i++) {
            if (!(w[i] >= (double)p->min_p)) continue;
            const uint32_t word =
                bg_sample_word(p->seed, (uint64_t)slot->n_generated, (uint32_t)r[i].id);
            const double score = (r[i].logit - r[0].logit) / (double)p->temperature -
                                 log(-log(((double)word + 0.5) / 4294967296.0));
            if (score > best) {
                best = score;
                token = r[i].id;
            }
        }
        free(w);
    }
    free(r);
    return token;
}

typedef struct rig {
    bg_backend *b;
    bg_sampler *s;
    const bg_kernels *k;
} rig;

static rig rig_of(const char *isa)
{
    bg_backend_config config = config_of(isa, 1);
    config.vocab_size = MOST;
    rig r = {.b = backend_of(&config)};
    r.s = ((bg_cpu *)r.b)->samplers;
    r.k = ((bg_cpu *)r.b)->kernels;
    return r;
}

/* Settings drawn from a number, over all their ranges. */
static bg_sampling draw(uint64_t i, int vocab)
{
    static const float temperatures[] = {1, 0.7f, 0.05f, 5, 1e-7f, 0};
    static const int32_t top_ks[] = {0, 1, 5, 50, 700, 0};
    static const float top_ps[] = {1, 0.9f, 0.5f, 0, 0.999f, 1};
    static const float min_ps[] = {0, 0.05f, 0, 1, 0, 0.3f};
    bg_sampling p = greedy;
    p.temperature = temperatures[(int)(uniform(1, i) * 6)];
    p.top_k = top_ks[(int)(uniform(2, i) * 6)];
    p.top_p = top_ps[(int)(uniform(3, i) * 6)];
    p.min_p = min_ps[(int)(uniform(4, i) * 6)];
    if (i % 11 == 0) p.top_k = vocab;
    p.seed = i * 77;
    return p;
}

Test(sample, every_choice_is_the_references)
{
    static const int vocabs[] = {1, 2, 5, 63, 64, 65, 127, 1000, 49152};
    float *x = malloc(MOST * sizeof *x);
    double *changed = malloc(MOST * sizeof *changed);
    for (const char *const *isa = isas(); *isa; isa++) {
        rig r = rig_of(*isa);
        for (size_t v = 0; v < sizeof vocabs / sizeof *vocabs; v++) {
            const int vocab = vocabs[v], rounds = vocab > 1000 ? 12 : 150;
            for (uint64_t i = 0; i < (uint64_t)rounds; i++) {
                const bool ties = i % 3 == 0;
                for (int j = 0; j < vocab; j++) {
                    x[j] = normal(100 + i, (uint64_t)j) * 3;
                    if (ties) x[j] = roundf(x[j] * 2) / 2;
                    if (i % 7 == 1 && j % 3) x[j] = -INFINITY;
                }
                bg_slot slot = {.sampling = draw(i + v * 1000, vocab), .n_generated = (int)i * 3};
                slot.sampling.seed += i;
                int32_t none[1];
                slot.tokens = none;
                bg_sampled got;
                bg_slot without_history = slot;
                without_history.n_tokens = 0;
                bg_sample_row(r.s, r.k, x, vocab, &without_history, &got);
                const int want = reference(x, vocab, &without_history, changed);
                cr_expect_eq(got.token, want,
                             "%s, vocabulary %d, round %d: %d, want %d (t %g k %d p %g min %g)",
                             *isa, vocab, (int)i, got.token, want,
                             (double)slot.sampling.temperature, slot.sampling.top_k,
                             (double)slot.sampling.top_p, (double)slot.sampling.min_p);
                cr_expect(isnan(got.logprob) && got.n_top == 0);
            }
        }
        bg_backend_free(r.b);
    }
    free(x);
    free(changed);
}

/* -0 and 0 are the same logit: the lower id comes first. */
Test(sample, zeros_of_both_signs_tie)
{
    const float x[] = {-1, -0.0f, 0.0f, -0.0f, -3};
    for (const char *const *isa = isas(); *isa; isa++) {
        rig r = rig_of(*isa);
        bg_slot slot = {.sampling = greedy};
        slot.sampling.n_logprobs = 3;
        bg_sampled got;
        bg_sample_row(r.s, r.k, x, 5, &slot, &got);
        cr_expect_eq(got.token, 1);
        for (int i = 0; i < 3; i++)
            cr_expect_eq(got.top[i].token, i + 1, "%s: %d at %d", *isa, got.top[i].token, i);
        bg_backend_free(r.b);
    }
}

/* Vocabularies so flat that the nucleus is large, and all equal logits. */
Test(sample, flat_distributions)
{
    float *x = malloc(MOST * sizeof *x);
    double *changed = malloc(MOST * sizeof *changed);
    rig r = rig_of(NULL);
    for (int i = 0; i < 24; i++) {
        for (int j = 0; j < 30000; j++)
            x[j] = i % 6 < 3 ? 2.0f : normal(9, (uint64_t)j) * 0.01f;
        bg_slot slot = {.sampling = greedy};
        slot.sampling.temperature = 1;
        slot.sampling.seed = (uint64_t)i;
        slot.sampling.top_p = i % 3 == 0 ? 0.4f / (float)(1 + i * i) : i % 3 == 1 ? 1 : 0.9f;
        slot.sampling.top_k = i % 3 == 1 ? 20000 : 0;
        bg_sampled got;
        bg_sample_row(r.s, r.k, x, 30000, &slot, &got);
        cr_expect_eq(got.token, reference(x, 30000, &slot, changed), "%d", i);
    }
    bg_backend_free(r.b);
    free(x);
    free(changed);
}

Test(sample, follows_the_distribution)
{
    enum { VOCAB = 8, N = 20000 };
    static const float x[VOCAB] = {0.5f, 1.5f, -1, 0, 2, 1, -0.5f, 0.25f};
    rig r = rig_of(NULL);
    for (int k = 0; k < 4; k++) {
        const float t = k % 2 ? 0.6f : 1;
        double p[VOCAB], total = 0, chi = 0;
        int count[VOCAB] = {0};
        bg_slot slot = {.sampling = greedy};
        slot.sampling.temperature = t;
        slot.sampling.top_k = k / 2 ? 5 : 0; /* 4, 1, 5, 0, 7 */
        for (int i = 0; i < VOCAB; i++) {
            const bool kept = k < 2 || (i != 2 && i != 3 && i != 6);
            total += p[i] = kept ? exp((double)(x[i] / t)) : 0;
        }
        for (int i = 0; i < N; i++) {
            slot.n_generated = i % 100;
            slot.sampling.seed = (uint64_t)(i / 100 + 1000 * k);
            bg_sampled got;
            bg_sample_row(r.s, r.k, x, VOCAB, &slot, &got);
            count[got.token]++;
        }
        int freedom = -1;
        for (int i = 0; i < VOCAB; i++) {
            const double want = N * p[i] / total;
            if (p[i] > 0) {
                chi += (count[i] - want) * (count[i] - want) / want;
                freedom++;
            } else
                cr_expect_eq(count[i], 0);
        }
        /* 24.3 at 7, 18.5 at 4 degrees of freedom have probability 1e-3 */
        cr_expect(chi < (freedom == 7 ? 24.3 : 18.5), "%d: chi-square %.1f at %d", k, chi, freedom);
    }
    bg_backend_free(r.b);
}

Test(sample, bias_bans_and_penalties)
{
    enum { VOCAB = 200 };
    float x[VOCAB];
    double changed[VOCAB];
    for (const char *const *isa = isas(); *isa; isa++) {
        rig r = rig_of(*isa);
        int moved = 0;
        for (uint64_t i = 0; i < 300; i++) {
            fill_normal(x, VOCAB, i);
            for (int j = 0; j < VOCAB; j++)
                x[j] *= 3;
            int32_t history[40], stop[2];
            bg_logit_bias bias[4];
            for (int j = 0; j < 40; j++) /* mostly the likely ones, many of them twice */
                history[j] = (int32_t)(uniform(5, i * 40 + (uint64_t)j) * (j % 2 ? VOCAB : 20));
            bg_slot slot = {.sampling = draw(i, VOCAB), .tokens = history, .n_tokens = 40};
            slot.n_generated = (int)(i % 30);
            bg_sampling *p = &slot.sampling;
            bg_sampled plain;
            p->n_logprobs = -1;
            bg_sample_row(r.s, r.k, x, VOCAB, &slot, &plain);
            if (i % 2) p->repetition_penalty = i % 4 == 1 ? 1.3f : 0.8f;
            if (i % 3) p->presence_penalty = 0.7f;
            if (i % 5) p->frequency_penalty = i % 5 == 1 ? -0.4f : 0.6f;
            p->n_logprobs = i % 2 ? 5 : 0;
            /* the favourite is stopped, the next one banned, two others favoured */
            bg_sampled was;
            bg_sampling saved = *p;
            *p = greedy;
            p->n_logprobs = 2;
            bg_sample_row(r.s, r.k, x, VOCAB, &slot, &was);
            *p = saved;
            stop[0] = was.top[0].token;
            stop[1] = 3;
            p->stop_ids = stop;
            p->n_stop_ids = 2;
            p->min_tokens = 20;
            bias[0] = (bg_logit_bias){was.top[1].token, i % 2 ? -100 : -150};
            bias[1] = (bg_logit_bias){(int32_t)(i % VOCAB), 4};
            bias[2] = (bg_logit_bias){7, -2};
            bias[3] = (bg_logit_bias){7, 1.5f};
            p->bias = bias;
            p->n_bias = 4;

            bg_sampled got;
            float before[VOCAB];
            memcpy(before, x, sizeof x);
            bg_sample_row(r.s, r.k, x, VOCAB, &slot, &got);
            cr_expect(same_bits(before, x, VOCAB), "the logits themselves must stay");
            const int want = reference(x, VOCAB, &slot, changed);
            cr_expect_eq(got.token, want, "%s, round %d: %d, want %d", *isa, (int)i, got.token,
                         want);
            cr_expect(got.token != bias[0].token);
            if (slot.n_generated < 20) cr_expect(got.token != stop[0]);
            moved += got.token != plain.token;

            double total = 0, max = -INFINITY;
            for (int j = 0; j < VOCAB; j++)
                max = changed[j] > max ? changed[j] : max;
            for (int j = 0; j < VOCAB; j++)
                total += exp(changed[j] - max);
            cr_expect(fabs((double)got.logprob - (changed[got.token] - max - log(total))) < 4e-6);
            for (int j = 0; j < VOCAB; j++)
                cr_assert_eq(r.s->count[j], 0);
        }
        cr_expect(moved > 100);
        bg_backend_free(r.b);
    }
}

Test(sample, logprobs_match_float64)
{
    float *x = malloc(MOST * sizeof *x);
    ranked *order = malloc(MOST * sizeof *order);
    static const int vocabs[] = {3, 64, 1000, 49152};
    for (const char *const *isa = isas(); *isa; isa++) {
        rig r = rig_of(*isa);
        for (int v = 0; v < 4; v++)
            for (int top = 0; top <= 20; top += 10) {
                const int vocab = vocabs[v];
                double total = 0;
                for (int i = 0; i < vocab; i++) {
                    x[i] = roundf(normal(17, (uint64_t)i) * 64) / 16; /* ties at the top */
                    order[i] = (ranked){(double)x[i], i};
                    total += exp((double)x[i]);
                }
                qsort(order, (size_t)vocab, sizeof *order, by_rank);
                bg_slot slot = {.sampling = greedy};
                slot.sampling.n_logprobs = top;
                slot.sampling.temperature = 2; /* does not show in logprobs */
                slot.sampling.seed = (uint64_t)v;
                bg_sampled got;
                bg_sample_row(r.s, r.k, x, vocab, &slot, &got);
                cr_expect_eq(got.n_top, top < vocab ? top : vocab);
                cr_expect(fabs((double)got.logprob - ((double)x[got.token] - log(total))) < 2e-6);
                for (int i = 0; i < got.n_top; i++) {
                    cr_expect_eq(got.top[i].token, order[i].id, "%s, %d of %d: %d, want %d", *isa,
                                 i, vocab, got.top[i].token, order[i].id);
                    cr_expect(fabs((double)got.top[i].logprob - (order[i].logit - log(total))) <
                              2e-6);
                }
            }
        bg_backend_free(r.b);
    }
    free(x);
    free(order);
}

Test(sample, words_are_philox_in_all_instruction_sets)
{
    for (const char *const *isa = isas(); *isa; isa++) {
        rig r = rig_of(*isa);
        for (uint64_t i = 0; i < 50; i++) {
            const uint64_t seed = bg_mix64(i), pos = bg_mix64(i + 99) >> (i % 64);
            uint32_t word[BG_CHUNK_TOKENS];
            r.k->words(word, seed, pos, (uint32_t)i * 16);
            for (uint32_t j = 0; j < BG_CHUNK_TOKENS; j++)
                cr_assert_eq(word[j], bg_sample_word(seed, pos, (uint32_t)i * 64 + j), "%s", *isa);
        }
        bg_backend_free(r.b);
    }
}

/* The race leaves a token out by this bound only: it must hold for the extreme words too. */
Test(sample, gumbel_bound_is_a_bound)
{
    static const uint32_t edge[] = {0, 1, 2, 3, 0x7fffffff, 0x80000000, 0xfffffffe, 0xffffffff};
    for (const char *const *isa = isas(); *isa; isa++) {
        rig r = rig_of(*isa);
        for (uint64_t i = 0; i < 300; i++) {
            uint32_t word[BG_CHUNK_TOKENS];
            float x[BG_CHUNK_TOKENS], bound[BG_CHUNK_TOKENS], most;
            for (uint64_t j = 0; j < BG_CHUNK_TOKENS; j++) {
                const uint64_t m = bg_mix64(i * 64 + j);
                word[j] = j < 8 ? edge[j] : (uint32_t)m | (j % 2 ? ~0u << (m >> 59) : 0);
                x[j] = normal(2, i * 64 + j) * 5 - 20;
            }
            most = r.k->gumbel_bound(bound, x, word, BG_CHUNK_TOKENS, 1.5f, 0.8f);
            double largest = -INFINITY;
            for (int j = 0; j < BG_CHUNK_TOKENS; j++) {
                const double score = ((double)x[j] - 1.5) * (double)0.8f -
                                     log(-log(((double)word[j] + 0.5) * 0x1p-32));
                cr_assert((double)bound[j] + 1e-3 >= score, "%s: word %08x: %g < %g", *isa, word[j],
                          (double)bound[j], score);
                /* and close to it where a token can win */
                if (word[j] > 0xf0000000u && word[j] < 0xffffffc0u)
                    cr_assert((double)bound[j] < score + 0.15, "%s: word %08x", *isa, word[j]);
                largest = (double)bound[j] > largest ? (double)bound[j] : largest;
            }
            cr_assert_eq((double)most, largest);
        }
        bg_backend_free(r.b);
    }
}

/* Through the op: the same tokens for any number of threads and any company, appended to histories.
 */
Test(sample, independent_of_batch_and_threads)
{
    enum { VOCAB = 3000, SEQS = 7, STEPS = 5 };
    int32_t alone[SEQS][STEPS];
    for (int pass = 0; pass < 4; pass++) {
        bg_backend_config config = config_of(NULL, 1 + pass % 3);
        config.vocab_size = VOCAB;
        bg_backend *b = backend_of(&config);
        bg_cpu *c = (bg_cpu *)b;
        for (int q = 0; q < SEQS; q++) {
            bg_sampling p = draw((uint64_t)q + 40, VOCAB);
            p.repetition_penalty = 1.2f;
            p.frequency_penalty = 0.3f;
            p.n_logprobs = q;
            const int32_t tokens[] = {q, 2 * q, 5};
            OK(b->ops->slot_seat(b, q, &p, tokens, 3, 0, err));
        }
        for (int step = 0; step < STEPS; step++)
            for (int from = 0; from < SEQS; from += pass == 0 ? 1 : SEQS) {
                bg_seq_step steps[SEQS];
                const int n = pass == 0 ? 1 : SEQS;
                for (int i = 0; i < n; i++) {
                    const int q = pass == 2 ? SEQS - 1 - i : from + i; /* another order */
                    steps[i] = (bg_seq_step){.slot = q,
                                             .pos0 = step ? 2 + step : 0,
                                             .n_tokens = step ? 1 : 3,
                                             .sample = true};
                }
                const bg_batch batch = {n, steps, false};
                OK(b->ops->begin_step(b, &batch, err));
                for (int i = 0; i < n; i++)
                    fill_normal(c->logits + i * VOCAB, VOCAB,
                                (uint64_t)(steps[i].slot * 100 + step));
                c->has_logits = true;
                bg_sampled got[SEQS];
                int n_got = 0;
                OK(bg_op_sample(b, err));
                OK(bg_op_fetch(b, got, &n_got, err));
                cr_assert_eq(n_got, n);
                for (int i = 0; i < n; i++) {
                    const int q = steps[i].slot;
                    cr_assert_eq(got[i].slot, q);
                    cr_expect_eq(c->s.slots[q].tokens[3 + step], got[i].token);
                    cr_expect_eq(c->s.slots[q].n_tokens, 4 + step);
                    if (pass == 0)
                        alone[q][step] = got[i].token;
                    else
                        cr_expect_eq(got[i].token, alone[q][step], "pass %d, slot %d", pass, q);
                }
            }
        bg_backend_free(b);
    }
}

/* Rows that a broken model leaves must not bring the process down. */
Test(sample, survives_not_a_number)
{
    enum { VOCAB = 150 };
    for (const char *const *isa = isas(); *isa; isa++) {
        rig r = rig_of(*isa);
        for (uint64_t i = 0; i < 200; i++) {
            float x[VOCAB];
            fill_normal(x, VOCAB, i);
            for (int j = 0; j < VOCAB; j++) {
                if (i % 4 == 0 || bg_mix64(i * 999 + (uint64_t)j) % 3 == 0) x[j] = NAN;
                if (i % 4 == 1) x[j] = -INFINITY;
                if (i % 4 == 2 && j % 50 == 9) x[j] = INFINITY;
            }
            bg_slot slot = {.sampling = draw(i, VOCAB)};
            slot.sampling.n_logprobs = 5;
            bg_sampled got;
            bg_sample_row(r.s, r.k, x, VOCAB, &slot, &got);
            cr_assert(got.token >= 0 && got.token < VOCAB);
            for (int j = 0; j < got.n_top; j++)
                cr_assert(got.top[j].token >= 0 && got.top[j].token < VOCAB);
        }
        bg_backend_free(r.b);
    }
}
