/* base/rng.h - counter-based random numbers: Philox 4x32-10 (Salmon et al., "Parallel Random
 * Numbers: As Easy as 1, 2, 3", SC 2011). A number is a function of (seed, counter) only, so
 * results do not depend on batch, order, backend or rank. */
#ifndef BG_BASE_RNG_H
#define BG_BASE_RNG_H

#include <stdint.h>

typedef struct bg_philox {
    uint32_t v[4];
} bg_philox;

static inline bg_philox bg_philox4x32(uint64_t seed, uint64_t ctr_lo, uint64_t ctr_hi)
{
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    bg_philox c = {
        {(uint32_t)ctr_lo, (uint32_t)(ctr_lo >> 32), (uint32_t)ctr_hi, (uint32_t)(ctr_hi >> 32)}};
    for (int i = 0; i < 10; i++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c.v[0], p1 = (uint64_t)0xCD9E8D57u * c.v[2];
        c = (bg_philox){{(uint32_t)(p1 >> 32) ^ c.v[1] ^ k0, (uint32_t)p1,
                         (uint32_t)(p0 >> 32) ^ c.v[3] ^ k1, (uint32_t)p0}};
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c;
}

/* Uniform in (0, 1): (word + 0.5) / 2^32 in double, never 0 and never 1. */
static inline double bg_uniform(uint32_t word)
{
    return ((double)word + 0.5) * 0x1p-32;
}

/* The random word of token `id` at position `pos` (tokens generated before it) of a sequence. */
static inline uint32_t bg_sample_word(uint64_t seed, uint64_t pos, uint32_t id)
{
    return bg_philox4x32(seed, id >> 2, pos).v[id & 3];
}

/* SplitMix64 finaliser: mixes a counter into a seed. */
static inline uint64_t bg_mix64(uint64_t x)
{
    x += UINT64_C(0x9E3779B97F4A7C15);
    x = (x ^ x >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ x >> 27) * UINT64_C(0x94D049BB133111EB);
    return x ^ x >> 31;
}

#endif
