/* Hashes: known answers, streaming, hexadecimal. */
#include "base/hash.h"

#include <string.h>

#include <criterion/criterion.h>

Test(hash, known_answers)
{
    cr_expect_eq(bg_hash64("", 0, 0), UINT64_C(0x2d06800538d394c2)); /* of the XXH3 specification */
    cr_expect_neq(bg_hash64("", 0, 1), bg_hash64("", 0, 0));
    cr_expect_neq(bg_hash64("ab", 2, 0), bg_hash64("ba", 2, 0));
}

Test(hash, streaming_equals_the_whole)
{
    char data[3000];
    bg_hasher *h = bg_hasher_new();
    cr_assert_not_null(h);
    for (size_t i = 0; i < sizeof data; i++)
        data[i] = (char)(i * 131 >> 3);
    for (size_t step = 1; step < 700; step = step * 3 + 1) {
        bg_hasher_reset(h);
        for (size_t at = 0; at < sizeof data; at += step) {
            cr_assert_eq(bg_hasher_value(h), bg_hash64(data, at, 0), "after %zu bytes", at);
            bg_hasher_add(h, data + at, at + step < sizeof data ? step : sizeof data - at);
            bg_hasher_add(h, NULL, 0);
        }
        cr_expect_eq(bg_hasher_value(h), bg_hash64(data, sizeof data, 0), "in steps of %zu", step);
    }
    bg_hasher_free(h);
    bg_hasher_free(NULL);
}

Test(hash, hexadecimal)
{
    char out[17];
    bg_hex64(0, out);
    cr_expect_str_eq(out, "0000000000000000");
    bg_hex64(UINT64_C(0x0123456789abcdef), out);
    cr_expect_str_eq(out, "0123456789abcdef");
    bg_hex64(UINT64_MAX, out);
    cr_expect_str_eq(out, "ffffffffffffffff");
}
