/* Philox against the known answers published with Random123 (file kat_vectors), SplitMix64 against
 * those of its author's reference. */
#include "base/rng.h"

#include <criterion/criterion.h>

static void expect_philox(uint64_t seed, uint64_t lo, uint64_t hi, uint32_t a, uint32_t b,
                          uint32_t c, uint32_t d)
{
    bg_philox p = bg_philox4x32(seed, lo, hi);
    cr_expect(p.v[0] == a && p.v[1] == b && p.v[2] == c && p.v[3] == d,
              "%08x %08x %08x %08x, want %08x %08x %08x %08x", p.v[0], p.v[1], p.v[2], p.v[3], a, b,
              c, d);
}

Test(rng, philox_known_answers)
{
    expect_philox(0, 0, 0, 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8);
    expect_philox(UINT64_MAX, UINT64_MAX, UINT64_MAX, 0x408f276d, 0x41c83b0e, 0xa20bc7c6,
                  0x6d5451fd);
    expect_philox(UINT64_C(0x299f31d0a4093822), UINT64_C(0x85a308d3243f6a88),
                  UINT64_C(0x0370734413198a2e), 0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1);
}

Test(rng, words_of_tokens_are_the_words_of_blocks)
{
    for (uint32_t id = 0; id < 1000; id++)
        cr_assert_eq(bg_sample_word(42, 7, id), bg_philox4x32(42, id / 4, 7).v[id % 4]);
    cr_expect_neq(bg_sample_word(42, 7, 3), bg_sample_word(42, 8, 3));
    cr_expect_neq(bg_sample_word(42, 7, 3), bg_sample_word(43, 7, 3));
}

Test(rng, uniform_is_inside_the_open_interval)
{
    cr_expect_eq(bg_uniform(0), 0x1p-33);
    cr_expect_eq(bg_uniform(UINT32_MAX), 1 - 0x1p-33);
    cr_expect_lt(bg_uniform(UINT32_MAX), 1.0);
    double sum = 0;
    enum { N = 1 << 16 };
    for (uint32_t i = 0; i < N; i++)
        sum += bg_uniform(bg_sample_word(1, 2, i));
    /* mean 1/2, standard error sqrt(1/12/N) = 0.0011; the numbers are fixed, so this cannot flicker
     */
    cr_expect_float_eq(sum / N, 0.5, 0.005);
}

Test(rng, splitmix64_known_answers)
{
    cr_expect_eq(bg_mix64(0), UINT64_C(0xe220a8397b1dcdaf));
    cr_expect_eq(bg_mix64(UINT64_C(0x9e3779b97f4a7c15)), UINT64_C(0x6e789e6aa1b965f4));
    cr_expect_eq(bg_mix64(1234567), UINT64_C(6457827717110365317));
}
