/* Ids to text: UTF-8 across tokens, stop strings. The reference computes on the whole text at once.
 */
#include "vocab_file.h"

#include "base/rng.h"
#include "base/utf8.h"

static bg_vocab *vocab;

static void open_gemma(void)
{
    vocab = open_vocab("gemma");
}

static void close_gemma(void)
{
    bg_vocab_free(vocab);
}

TestSuite(detok, .init = open_gemma, .fini = close_gemma);

static int32_t byte_token(unsigned char b)
{
    char name[8];
    snprintf(name, sizeof name, "<0x%02X>", b);
    const int32_t id = bg_vocab_find(vocab, name, 6);
    cr_assert_geq(id, 0);
    return id;
}

static void whole(const bg_ids *ids, bg_buf *out)
{
    bg_buf raw = {0};
    for (size_t i = 0; i < ids->n; i++) {
        bg_str s = bg_token_bytes(vocab, ids->v[i], false);
        bg_buf_add(&raw, s.p, s.n);
    }
    bg_buf_clear(out);
    for (size_t i = 0; i < raw.len;) {
        uint32_t cp;
        size_t len = bg_utf8_next(raw.data + i, raw.len - i, &cp);
        bg_buf_add(out, cp == BG_UTF8_BAD ? "\xef\xbf\xbd" : raw.data + i,
                   cp == BG_UTF8_BAD ? 3 : len);
        i += len;
    }
    bg_buf_release(&raw);
}

/* The first occurrence in text: index of the stop string, its place and length; or -1. */
static int first_stop(const bg_buf *text, const char *const *stops, size_t n_stops, size_t *at,
                      size_t *len)
{
    for (size_t i = 0; i < text->len; i++) {
        int best = -1;
        *len = 0;
        for (size_t k = 0; k < n_stops; k++) {
            const size_t n = strlen(stops[k]);
            if (n <= text->len - i && memcmp(text->data + i, stops[k], n) == 0 && n > *len) {
                best = (int)k;
                *len = n;
            }
        }
        *at = i;
        if (best >= 0) return best;
    }
    return -1;
}

static size_t open_suffix(const bg_buf *text, const char *const *stops, size_t n_stops)
{
    size_t longest = 0;
    for (size_t k = 0; k < n_stops; k++)
        for (size_t n = 1; n < strlen(stops[k]) && n <= text->len; n++)
            if (memcmp(text->data + text->len - n, stops[k], n) == 0 && n > longest) longest = n;
    return longest;
}

/* Streams ids, checks after each that exactly what is certain came out, and at the end everything.
 */
static void check(const bg_ids *ids, const char *const *stops, size_t n_stops, bool include)
{
    bg_buf text = {0}, out = {0}, raw = {0}, seen = {0};
    whole(ids, &text);
    size_t at = 0, len = 0;
    const int want = first_stop(&text, stops, n_stops, &at, &len);
    const size_t want_bytes = want < 0 ? text.len : at + (include ? len : 0);
    bg_detok *d = bg_detok_new(vocab, stops, n_stops, include, false);
    cr_assert_not_null(d);
    int got = -1;
    for (size_t i = 0; i < ids->n && got < 0; i++) {
        got = bg_detok_add(d, ids->v[i], &out);
        bg_str s = bg_token_bytes(vocab, ids->v[i], false);
        bg_buf_add(&raw, s.p, s.n);
        if (got >= 0) break;
        bg_ids first = {ids->v, i + 1, 0, false};
        whole(&first, &seen); /* an unfinished character shows there as one U+FFFD */
        if (bg_utf8_unfinished(raw.data, raw.len)) seen.len -= 3;
        size_t found_at, found_len, sure = seen.len - open_suffix(&seen, stops, n_stops);
        if (first_stop(&seen, stops, n_stops, &found_at, &found_len) >= 0) {
            cr_expect_leq(sure, found_at, "a decided stop string was not reported");
            if (found_at < sure) sure = found_at;
        }
        cr_expect_eq(out.len, sure, "after token %zu: %zu bytes came out, %zu are certain", i,
                     out.len, sure);
    }
    const int end = bg_detok_finish(d, &out);
    cr_expect_eq(end, want, "stop string %d, want %d", end, want);
    if (got >= 0) cr_expect_eq(got, want);
    cr_expect(out.len == want_bytes &&
                  memcmp(out.data ? out.data : "", text.data ? text.data : "", want_bytes) == 0,
              "\"%.*s\", want \"%.*s\"", (int)out.len, out.data, (int)want_bytes, text.data);
    const size_t before = out.len;
    bg_detok_add(d, ids->n ? ids->v[0] : 5, &out);
    bg_detok_finish(d, &out);
    cr_expect_eq(out.len, before, "text came after the end");
    bg_detok_free(d);
    bg_buf_release(&text);
    bg_buf_release(&out);
    bg_buf_release(&raw);
    bg_buf_release(&seen);
}

static uint32_t random_below(uint64_t *state, uint32_t n)
{
    *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)(*state >> 33) % n;
}

/* Few different bytes, so that stop strings occur, overlap and nearly occur. */
Test(detok, random_tokens_and_stops)
{
    static const char *const ALPHABET[] = {"a", "b", "\xc3\xa9", "\xe2\x82\xac"};
    static const unsigned char RAW[] = {'a', 'b', 0xc3, 0xa9, 0xe2, 0x82, 0xac, 0xf0, 0x9f, 0xff};
    uint64_t rng = 7;
    for (int round = 0; round < 4000; round++) {
        char text[4][32];
        const char *stops[4];
        const size_t n_stops = random_below(&rng, 5);
        for (size_t k = 0; k < n_stops; k++) {
            const uint32_t n = 1 + random_below(&rng, 5);
            text[k][0] = '\0';
            for (uint32_t i = 0; i < n; i++)
                strcat(text[k], ALPHABET[random_below(&rng, round % 2 ? 2 : 4)]);
            stops[k] = text[k];
            for (size_t j = 0; j < k; j++) /* the same string twice: the first counts */
                if (strcmp(text[j], text[k]) == 0) strcat(text[k], "\x01");
        }
        bg_ids ids = {0};
        const uint32_t n = random_below(&rng, 40);
        for (uint32_t i = 0; i < n; i++) {
            if (random_below(&rng, 8) == 0)
                bg_ids_add(&ids, (int32_t)random_below(&rng, 2048));
            else if (round % 3 == 0)
                bg_ids_add(&ids, byte_token(RAW[random_below(&rng, 10)]));
            else
                bg_ids_add(&ids, byte_token("ab"[random_below(&rng, 2)]));
        }
        check(&ids, stops, n_stops, round % 5 == 0);
        bg_ids_release(&ids);
    }
}

static void add_text(bg_ids *ids, const char *s)
{
    for (; *s; s++)
        bg_ids_add(ids, byte_token((unsigned char)*s));
}

Test(detok, order_of_stop_strings)
{
    static const struct {
        const char *text, *stops[3], *want;
        int index;
    } CASES[] = {
        {"xxabcdyy", {"bc", "abcd", "zz"}, "xx", 1}, /* begins earlier, ends later */
        {"xxabcyy", {"bc", "abcd", "zz"}, "xxa", 0}, /* the earlier one did not come */
        {"xxabc", {"ab", "abc", "b"}, "xx", 1},      /* the same place: the longest */
        {"xxab", {"ab", "abc", "b"}, "xx", 0},       /* decided by the end */
        {"a\n\nb", {"\n\n", "\n", "q"}, "a", 0},
        {"a\nb", {"\n\n", "\n", "q"}, "a", 1},
        {"aaaaab", {"aab", "q", "r"}, "aaa", 0},
        {"ababac", {"abac", "q", "r"}, "ab", 0},
        {"nothing", {"nothingx", "ginx", "q"}, "nothing", -1},
    };
    for (size_t i = 0; i < sizeof CASES / sizeof CASES[0]; i++) {
        bg_ids ids = {0};
        add_text(&ids, CASES[i].text);
        check(&ids, CASES[i].stops, 3, false);
        bg_buf out = {0};
        bg_detok *d = bg_detok_new(vocab, CASES[i].stops, 3, false, false);
        for (size_t k = 0; k < ids.n; k++)
            bg_detok_add(d, ids.v[k], &out);
        cr_expect_eq(bg_detok_finish(d, &out), CASES[i].index, "%s", CASES[i].text);
        cr_expect(out.len == strlen(CASES[i].want) &&
                      memcmp(out.data ? out.data : "", CASES[i].want, out.len) == 0,
                  "%s: \"%.*s\"", CASES[i].text, (int)out.len, out.data);
        bg_detok_free(d);
        bg_buf_release(&out);
        bg_ids_release(&ids);
    }
}

Test(detok, holds_unfinished_characters)
{
    bg_detok *d = bg_detok_new(vocab, NULL, 0, false, false);
    bg_buf out = {0};
    static const struct {
        unsigned char byte;
        const char *out;
    } STEPS[] = {
        {'a', "a"},
        {0xe2, "a"},
        {0x82, "a"},
        {0xac, "a\xe2\x82\xac"},
        {0xe2, "a\xe2\x82\xac"},
        {'b', "a\xe2\x82\xac\xef\xbf\xbd"
              "b"}, /* never valid: at once */
        {0xff, "a\xe2\x82\xac\xef\xbf\xbd"
               "b\xef\xbf\xbd"},
        {0xf0, "a\xe2\x82\xac\xef\xbf\xbd"
               "b\xef\xbf\xbd"},
    };
    for (size_t i = 0; i < sizeof STEPS / sizeof STEPS[0]; i++) {
        bg_detok_add(d, byte_token(STEPS[i].byte), &out);
        cr_expect_str_eq(out.data, STEPS[i].out, "step %zu", i);
    }
    bg_detok_finish(d, &out);
    cr_expect_str_eq(out.data, "a\xe2\x82\xac\xef\xbf\xbd"
                               "b\xef\xbf\xbd\xef\xbf\xbd");
    bg_detok_free(d);
    bg_buf_release(&out);
}

Test(detok, control_tokens_and_spaces)
{
    const int32_t turn = bg_vocab_find(vocab, "<start_of_turn>", 15);
    const int32_t space = bg_vocab_find(vocab, "\xe2\x96\x81", 3);
    for (int show = 0; show < 2; show++) {
        bg_detok *d = bg_detok_new(vocab, NULL, 0, false, show);
        bg_buf out = {0};
        bg_detok_add(d, space, &out); /* a continuation: its leading space stays */
        bg_detok_add(d, turn, &out);
        bg_detok_add(d, -1, &out); /* ids that are none */
        bg_detok_add(d, 1 << 30, &out);
        bg_detok_finish(d, &out);
        cr_expect_str_eq(out.data, show ? " <start_of_turn>" : " ");
        bg_detok_free(d);
        bg_buf_release(&out);
    }
}
