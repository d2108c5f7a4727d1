#include <criterion/criterion.h>

#include <stdio.h>
#include <string.h>

#include "base/rng.h"
#include "output/output.h"

static char *printed(const bg_ranges *s)
{
    bg_buf b = {0};
    cr_assert(bg_ranges_print(s, &b));
    return bg_buf_take(&b);
}

Test(ranges, text_both_ways)
{
    static const struct {
        const char *in, *out;
        int64_t count, prefix;
    } list[] = {{"", "", 0, 0},
                {"0", "0", 1, 1},
                {"0-63,70", "0-63,70", 65, 64},
                {"70,0-63", "0-63,70", 65, 64},
                {"1,2,3", "1-3", 3, 0},
                {"5-9,0-4", "0-9", 10, 10},
                {"0-3,2-8,20-30,9", "0-9,20-30", 21, 10},
                {"3,1,2,0,5", "0-3,5", 5, 4},
                {"10-20,12-13", "10-20", 11, 0},
                {"10,12,14,9-15", "9-15", 7, 0}};
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        bg_ranges *s = bg_ranges_new();
        cr_assert(bg_ranges_parse(s, list[i].in, strlen(list[i].in)), "%s", list[i].in);
        char *got = printed(s);
        cr_expect_str_eq(got, list[i].out);
        cr_expect_eq(bg_ranges_count(s), list[i].count, "%s", list[i].in);
        cr_expect_eq(bg_ranges_prefix(s), list[i].prefix, "%s", list[i].in);
        free(got);
        bg_ranges_free(s);
    }
    static const char *const bad[] = {"-",
                                      "1-",
                                      "-1",
                                      "2-1",
                                      "1,",
                                      ",1",
                                      "1,,2",
                                      "a",
                                      "1 2",
                                      "1-2-3",
                                      "9223372036854775807",
                                      "99999999999999999999",
                                      "0x1",
                                      "1.5"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        bg_ranges *s = bg_ranges_new();
        cr_expect_not(bg_ranges_parse(s, bad[i], strlen(bad[i])), "%s", bad[i]);
        bg_ranges_free(s);
    }
}

/* Against an array of flags. */
Test(ranges, random_adds)
{
    enum { N = 300 };
    for (uint64_t seed = 0; seed < 20; seed++) {
        bool in[N + 1] = {false};
        bg_ranges *s = bg_ranges_new();
        for (uint64_t i = 0; i < 120; i++) {
            int first = (int)(bg_sample_word(seed, i, 0) % N);
            int len = (int)(bg_sample_word(seed, i, 1) % (seed % 2 ? 2 : 9));
            int last = first + len < N ? first + len : N - 1;
            cr_assert(bg_ranges_add(s, first, last));
            for (int v = first; v <= last; v++)
                in[v] = true;
        }
        int64_t count = 0, prefix = 0;
        for (int v = 0; v <= N; v++) {
            cr_expect_eq(bg_ranges_has(s, v), in[v], "seed %d: %d", (int)seed, v);
            count += in[v];
        }
        while (in[prefix])
            prefix++;
        cr_expect_eq(bg_ranges_count(s), count);
        cr_expect_eq(bg_ranges_prefix(s), prefix);
        char *text = printed(s);
        bg_ranges *again = bg_ranges_new();
        cr_expect(bg_ranges_parse(again, text, strlen(text)));
        char *text2 = printed(again);
        cr_expect_str_eq(text, text2);
        free(text);
        free(text2);
        bg_ranges_free(again);
        bg_ranges_free(s);
    }
}
