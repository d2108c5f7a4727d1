#include <criterion/criterion.h>

#include <stdlib.h>
#include <string.h>

#include "base/rng.h"
#include "output/keys.h"

/* Dense, in a shard's steps, far apart, and in any order: against an array. */
Test(keys, random_records)
{
    enum { N = 3000 };
    static const int64_t steps[] = {1, 2, 64, 511, 512, 513, INT64_C(1) << 40};
    static uint64_t want[N];
    for (size_t s = 0; s < sizeof steps / sizeof *steps; s++) {
        bg_keys *k = bg_keys_new();
        memset(want, 0, sizeof want);
        for (uint64_t i = 0; i < 4000; i++) {
            uint32_t at = bg_sample_word(s, i, 0) % N;
            want[at] = bg_sample_word(s, i, 1) % 100 ? i * 77 + 1 : 0;
            cr_assert(bg_keys_set(k, at * steps[s], want[at]));
        }
        bg_ranges *all = bg_ranges_new(), *some = bg_ranges_new();
        for (int64_t i = 0; i < N; i++) {
            cr_assert_eq(bg_keys_get(k, i * steps[s]), want[i], "step %d, %d", (int)s, (int)i);
            if (steps[s] > 1) cr_assert_eq(bg_keys_get(k, i * steps[s] + 1), 0);
            cr_assert(bg_ranges_add(all, i * steps[s], i * steps[s]));
        }
        cr_expect_eq(bg_keys_get(k, -1), 0);
        cr_expect_eq(bg_keys_get(k, INT64_MAX), 0);
        cr_expect_not(bg_keys_set(k, -1, 1));
        /* as text, and back */
        bg_buf b = {0};
        bool nomem;
        bg_keys *again = bg_keys_new();
        cr_assert(bg_keys_print(k, all, &b));
        cr_expect_eq(b.len, N * 16);
        cr_assert(bg_keys_read(again, all, b.data, b.len, &nomem));
        for (int64_t i = 0; i < N; i++)
            cr_assert_eq(bg_keys_get(again, i * steps[s]), want[i]);
        cr_expect(!bg_keys_read(again, all, b.data, b.len - 16, &nomem) && !nomem);
        cr_expect(!bg_keys_read(again, all, b.data, b.len - 1, &nomem) && !nomem);
        b.data[17] = 'G';
        cr_expect(!bg_keys_read(again, all, b.data, b.len, &nomem) && !nomem);
        /* none of them known: nothing is said */
        bg_buf_clear(&b);
        bg_ranges_add(some, N * steps[s] + 5, N * steps[s] + 9);
        cr_expect(!bg_keys_print(k, some, &b) && b.len == 0);
        bg_buf_release(&b);
        bg_ranges_free(all);
        bg_ranges_free(some);
        bg_keys_free(again);
        bg_keys_free(k);
    }
    bg_keys_free(NULL);
}
