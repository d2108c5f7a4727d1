/* UTF-8 against a reference that knows only how code points are encoded: it writes them all and
 * remembers every string that begins one. */
#include "base/utf8.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <criterion/criterion.h>

static uint8_t
    *begins[4]; /* bit for each string of 1, 2, 3 bytes: a proper beginning of a character */

static uint32_t number(const unsigned char *s, size_t n)
{
    uint32_t v = 0;
    for (size_t i = 0; i < n; i++)
        v = v << 8 | s[i];
    return v;
}

static bool begins_char(const unsigned char *s, size_t n)
{
    uint32_t v = number(s, n);
    return begins[n][v >> 3] >> (v & 7) & 1;
}

/* The formula of the standard, for any scalar value. */
static size_t encode(uint32_t cp, unsigned char *s)
{
    static const unsigned char leads[] = {0, 0, 0xc0, 0xe0, 0xf0};
    size_t n = cp < 0x80 ? 1 : cp < 0x800 ? 2 : cp < 0x10000 ? 3 : 4;
    for (size_t i = n; i-- > 1; cp >>= 6)
        s[i] = (unsigned char)(0x80 | (cp & 0x3f));
    s[0] = (unsigned char)(leads[n] | cp);
    return n;
}

static bool is_scalar(uint32_t cp)
{
    return cp < 0xd800 || (cp >= 0xe000 && cp < 0x110000);
}

static void make_reference(void)
{
    for (int n = 1; n < 4; n++)
        begins[n] = calloc(1, ((size_t)1 << 8 * n) / 8);
    for (uint32_t cp = 0x80; cp < 0x110000; cp++) {
        unsigned char s[4];
        if (!is_scalar(cp)) continue;
        size_t n = encode(cp, s);
        for (size_t k = 1; k < n; k++) {
            uint32_t v = number(s, k);
            begins[k][v >> 3] |= (uint8_t)(1 << (v & 7));
        }
    }
}

static void drop_reference(void)
{
    for (int n = 1; n < 4; n++)
        free(begins[n]);
}

TestSuite(utf8, .init = make_reference, .fini = drop_reference);

Test(utf8, every_scalar_value_round_trips)
{
    for (uint32_t cp = 0; cp < 0x110000; cp++) {
        unsigned char want[4];
        char got[4];
        uint32_t back;
        if (!is_scalar(cp)) continue;
        size_t n = encode(cp, want);
        cr_assert_eq(bg_utf8_put(got, cp), n, "U+%04X", cp);
        cr_assert_eq(memcmp(got, want, n), 0, "U+%04X", cp);
        cr_assert_eq(bg_utf8_next(got, n, &back), n, "U+%04X", cp);
        cr_assert_eq(back, cp);
        cr_assert(bg_utf8_valid(got, n));
        for (size_t k = 1; k < n; k++) { /* cut short: one ill-formed part, of all there is */
            cr_assert_eq(bg_utf8_next(got, k, &back), k, "U+%04X cut to %zu", cp, k);
            cr_assert_eq(back, BG_UTF8_BAD);
            cr_assert_eq(bg_utf8_unfinished(got, k), k);
            cr_assert_not(bg_utf8_valid(got, k));
        }
    }
}

/* What the standard says of s[0..n): the first character, or the maximal ill-formed part. */
static size_t reference(const unsigned char *s, size_t n, uint32_t *cp)
{
    *cp = s[0];
    if (s[0] < 0x80) return 1;
    *cp = BG_UTF8_BAD;
    size_t k = 0;
    while (k < n && k < 3 && begins_char(s, k + 1))
        k++;
    if (k == 0) return 1;
    if (k == n || (s[k] & 0xc0) != 0x80) return k;
    /* k bytes begin a character and k + 1 do not: with one more continuation it is complete, or not
     * a beginning of anything. */
    uint32_t v = s[0] & (k == 1 ? 0x1f : k == 2 ? 0x0f : 0x07);
    for (size_t i = 1; i <= k; i++)
        v = v << 6 | (s[i] & 0x3f);
    unsigned char again[4];
    if (is_scalar(v) && encode(v, again) == k + 1 && memcmp(again, s, k + 1) == 0) {
        *cp = v;
        return k + 1;
    }
    return k;
}

Test(utf8, all_leads_with_boundary_continuations)
{
    static const unsigned char edge[] = {0x00, 0x41, 0x7f, 0x80, 0x8f, 0x90,
                                         0x9f, 0xa0, 0xbf, 0xc0, 0xe0, 0xff};
    const size_t n_edge = sizeof edge;
    for (uint32_t two = 0; two < 0x10000; two++) {
        for (size_t i = 0; i < n_edge * n_edge; i++) {
            unsigned char s[4] = {(unsigned char)(two >> 8), (unsigned char)two, edge[i / n_edge],
                                  edge[i % n_edge]};
            for (size_t n = 2; n <= 4; n++) {
                uint32_t want, got;
                size_t want_n = reference(s, n, &want), got_n = bg_utf8_next((char *)s, n, &got);
                cr_assert(want_n == got_n && want == got,
                          "%02x %02x %02x %02x, %zu bytes: %zu U+%04X, want %zu U+%04X", s[0], s[1],
                          s[2], s[3], n, got_n, got, want_n, want);
            }
        }
    }
}

Test(utf8, unfinished_is_what_more_bytes_could_complete)
{
    static const unsigned char edge[] = {0x41, 0x80, 0x8f, 0x90, 0x9f, 0xa0, 0xbf, 0xc1,
                                         0xc2, 0xe0, 0xed, 0xef, 0xf0, 0xf4, 0xf5, 0xff};
    const size_t n_edge = sizeof edge;
    for (size_t i = 0; i < n_edge * n_edge * n_edge * n_edge; i++) {
        unsigned char s[4] = {edge[i / n_edge / n_edge / n_edge],
                              edge[i / n_edge / n_edge % n_edge], edge[i / n_edge % n_edge],
                              edge[i % n_edge]};
        size_t want = 0;
        for (size_t k = 1; k <= 3; k++)
            if (begins_char(s + 4 - k, k)) want = k;
        cr_assert_eq(bg_utf8_unfinished((char *)s, 4), want, "%02x %02x %02x %02x: want %zu", s[0],
                     s[1], s[2], s[3], want);
    }
    cr_expect_eq(bg_utf8_unfinished("", 0), 0);
}

Test(utf8, valid)
{
    cr_expect(bg_utf8_valid("", 0));
    cr_expect(bg_utf8_valid("a\xc3\xa9\xe2\x82\xac\xf4\x8f\xbf\xbf\0z", 12));
    cr_expect_not(bg_utf8_valid("a\xc0\x80", 3), "overlong NUL");
    cr_expect_not(bg_utf8_valid("\xe0\x9f\xbf", 3), "overlong U+07FF");
    cr_expect_not(bg_utf8_valid("\xed\xa0\x80", 3), "surrogate");
    cr_expect_not(bg_utf8_valid("\xf0\x8f\xbf\xbf", 4), "overlong U+FFFF");
    cr_expect_not(bg_utf8_valid("\xf4\x90\x80\x80", 4), "over U+10FFFF");
    cr_expect_not(bg_utf8_valid("ab\x80", 3));
}

Test(utf8, mend)
{
    static const char *const texts[][2] = {
        {"", ""},
        {"caf\xc3\xa9 \xe2\x82\xac", "caf\xc3\xa9 \xe2\x82\xac"},
        {"caf\xe9", "caf?"},
        {"\xe9\xe9x", "??x"},
        {"a\xe2\x82", "a??"},
        {"\xff\xc3\xa9\xed\xa0\x80", "?\xc3\xa9???"},
    };
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        char s[32];
        snprintf(s, sizeof s, "%s", texts[i][0]);
        bg_utf8_mend(s);
        cr_expect_str_eq(s, texts[i][1]);
        cr_expect(bg_utf8_valid(s, strlen(s)));
    }
}
