/* A CPU backend for the tests of its ops: fresh random numbers, poison, guard words. */
#ifndef BG_TESTS_CPU_FIXTURE_H
#define BG_TESTS_CPU_FIXTURE_H

#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cpu/cpu.h"
#include "backend/ops.h"
#include "base/rng.h"

#define OK(call)                                                 \
    do {                                                         \
        bg_error err_ = {0}, *err = &err_;                       \
        cr_assert_eq((call), BG_OK, "%s: %s", #call, err->text); \
    } while (0)

/* The call fails with this status, and its text contains the words. */
#define FAILS(st, words, call)                                                                \
    do {                                                                                      \
        bg_error err_ = {0}, *err = &err_;                                                    \
        cr_expect_eq((call), (st), "%s succeeded or failed otherwise: %s", #call, err->text); \
        cr_expect(strstr(err->text, (words)), "%s: '%s'", #call, err->text);                  \
    } while (0)

static inline double uniform(uint64_t seed, uint64_t i)
{
    return ((double)(bg_mix64(seed * 0x10001u + bg_mix64(i)) >> 11) + 0.5) * 0x1p-53;
}

/* About normal: variance 1, between -6 and 6. */
static inline float normal(uint64_t seed, uint64_t i)
{
    double sum = -6;
    for (uint64_t k = 0; k < 12; k++)
        sum += uniform(seed, i * 12 + k);
    return (float)sum;
}

static inline void fill_normal(float *x, int64_t n, uint64_t seed)
{
    for (int64_t i = 0; i < n; i++)
        x[i] = normal(seed, (uint64_t)i);
}

static inline bg_backend_config config_of(const char *isa, int n_threads)
{
    return (bg_backend_config){.compute = BG_COMPUTE_F32,
                               .n_threads = n_threads,
                               .first_cpu = -1,
                               .max_tokens = 256,
                               .max_seqs = 8,
                               .max_out = 64,
                               .max_ctx = 2048,
                               .vocab_size = 100,
                               .isa = isa};
}

static inline bg_backend *backend_of(const bg_backend_config *config)
{
    bg_backend *b = NULL;
    OK(bg_cpu_backend_new(&b, config, err));
    return b;
}

/* Instruction sets that this processor has, worst first; NULL ends them. */
static inline const char *const *isas(void)
{
    static const char *const all[] = {"plain", "avx2", "avx512", NULL};
    static const char *const two[] = {"plain", "avx2", NULL};
    static const char *const one[] = {"plain", NULL};
    const bg_isa best = bg_isa_best();
    return best >= BG_ISA_AVX512 ? all : best == BG_ISA_AVX2 ? two : one;
}

static const bg_sampling greedy = {.top_p = 1, .repetition_penalty = 1, .n_logprobs = -1};

/* Seats n_tokens tokens 0, 1, 2 ... (modulo the vocabulary). */
static inline void seat(bg_backend *b, int slot, int n_tokens)
{
    const int vocab = ((bg_cpu *)b)->config.vocab_size;
    int32_t *tokens = malloc((size_t)n_tokens * sizeof *tokens);
    for (int i = 0; i < n_tokens; i++)
        tokens[i] = i % vocab;
    OK(b->ops->slot_seat(b, slot, &greedy, tokens, n_tokens, 0, err));
    free(tokens);
}

/* A step of n rows of slot 0, for ops that do not look at positions. */
static inline void step_of(bg_backend *b, int n)
{
    const bg_seq_step q = {.slot = 0, .n_tokens = n};
    const bg_batch batch = {1, &q, false};
    seat(b, 0, n);
    OK(b->ops->begin_step(b, &batch, err));
}

static inline bool same_bits(const float *a, const float *b, int64_t n)
{
    return memcmp(a, b, (size_t)n * sizeof *a) == 0;
}

#endif
