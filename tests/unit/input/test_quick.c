/* The fast reader against jansson: whatever it reads, jansson reads as the same value. */
#include "input/quick.h"

#include <stdlib.h>
#include <string.h>

#include <criterion/criterion.h>

#include "base/buf.h"
#include "base/rng.h"

static const size_t FLAGS = JSON_REJECT_DUPLICATES | JSON_DECODE_ANY | JSON_ALLOW_NUL;

/* json_equal() takes 1 and 1.0 apart, and compares reals and strings exactly. Order, too, counts.
 */
static bool same(const json_t *a, const json_t *b)
{
    char *x = json_dumps(a, JSON_ENCODE_ANY | JSON_COMPACT);
    char *y = json_dumps(b, JSON_ENCODE_ANY | JSON_COMPACT);
    bool ok = json_equal(a, b) && x && y && strcmp(x, y) == 0;
    free(x);
    free(y);
    return ok;
}

/* Whether the fast reader took it. */
static bool agree(const char *s, size_t n)
{
    bool nomem;
    char *copy =
        malloc(n ? n : 1); /* exactly as long: reading past the end is seen by sanitizers */
    memcpy(copy, s, n);
    json_t *got = bg_quick_load(copy, n, &nomem);
    cr_expect(!nomem);
    if (got) {
        json_t *want = json_loadb(s, n, FLAGS, NULL);
        cr_expect(want != NULL && same(got, want), "differs from jansson: %.*s", (int)n, s);
        json_decref(want);
    }
    json_decref(got);
    free(copy);
    return got != NULL;
}

Test(quick, takes_what_lines_are_made_of)
{
    static const char *const lines[] = {
        "{\"id\":\"a\",\"prompt\":\"hello, w\\u00f6rld \\ud83d\\ude00\",\"max_tokens\":12}",
        " {\"messages\" : [ {\"role\":\"user\",\"content\":\"a\\n\\\"b\\\"\\\\\\/\\b\\f\\r\\t\"} ] "
        "}\t",
        "{\"temperature\":0.7,\"top_p\":1e-3,\"seed\":-12,\"n\":0,\"stop\":null,\"x\":[true,false,["
        "]]}",
        "{\"prompt\":\"na\xc3\xafve \xe2\x82\xac \xf0\x9f\x98\x80 "
        "0123456789abcdef0123456789abcdef\"}",
        "{}",
        "[]",
        "\"\"",
        "0",
        "-0",
        "123456789012345678",
        "[1.5, -2.25E+10, 0.1]"};
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++)
        cr_expect(agree(lines[i], strlen(lines[i])), "left to jansson: %s", lines[i]);
}

Test(quick, leaves_the_rest)
{
    static const char *const lines[] = {"",
                                        " ",
                                        "{",
                                        "{\"a\":1,}",
                                        "[1,]",
                                        "{\"a\":1,\"a\":2}",
                                        "{\"a\":1} x",
                                        "01",
                                        "1.",
                                        ".5",
                                        "+1",
                                        "1e",
                                        "-",
                                        "nul",
                                        "NaN",
                                        "Infinity",
                                        "1e400",
                                        "1e-400",
                                        "12345678901234567890123",
                                        "\"\\u0000\"",
                                        "\"\\ud800\"",
                                        "\"\\udc00\"",
                                        "\"\\ud800\\u0041\"",
                                        "\"\\x41\"",
                                        "\"\\u12g4\"",
                                        "\"a",
                                        "\"\x01\"",
                                        "\"\xc0\x80\"",
                                        "\"\xed\xa0\x80\"",
                                        "\"\xff\"",
                                        "\"\xe2\x82\"",
                                        "{\"a\" 1}",
                                        "{1:2}",
                                        "'a'",
                                        "\"\\",
                                        "\"\\u",
                                        "\"\\u12",
                                        "\"\\ud83d\\u",
                                        "\"abc\\\"",
                                        "[\"\xf4\x90\x80\x80\"]"};
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++)
        cr_expect(!agree(lines[i], strlen(lines[i])), "taken: %s", lines[i]);
}

typedef struct source {
    uint64_t state;
} source;

static unsigned next(source *r, unsigned n)
{
    r->state = bg_mix64(r->state + 0x9e3779b97f4a7c15ull);
    return (unsigned)(r->state >> 33) % n;
}

static void random_text(source *r, bg_buf *b)
{
    static const char *const bits[] = {"a",
                                       "the sea ",
                                       "\\n",
                                       "\\\"",
                                       "\\\\",
                                       "\\u00e9",
                                       "\\ud83d\\ude00",
                                       "\xc3\xa9",
                                       "\xe2\x80\xa8",
                                       "\xf0\x9f\x98\x80",
                                       "\\/",
                                       "\x7f",
                                       "0123456789abcdefghijklmnopqrstuv",
                                       "{",
                                       "]",
                                       ":",
                                       "'"};
    bg_buf_char(b, '"');
    for (unsigned k = next(r, 9); k; k--)
        bg_buf_str(b, bits[next(r, sizeof bits / sizeof *bits)]);
    bg_buf_char(b, '"');
}

static void random_value(source *r, bg_buf *b, int depth)
{
    static const char *const scalars[] = {
        "true", "false", "null", "0", "-7", "1.25", "3e8", "-0.0", "9007199254740993",
        "0.1",  "1E-7"};
    static const char *const space[] = {"", "", "", " ", "\t", " \n "};
    unsigned kind = next(r, depth > 4 ? 2 : 4);
    bg_buf_str(b, space[next(r, 6)]);
    if (kind == 0) {
        bg_buf_str(b, scalars[next(r, sizeof scalars / sizeof *scalars)]);
    } else if (kind == 1) {
        random_text(r, b);
    } else {
        unsigned n = next(r, 5);
        bg_buf_char(b, kind == 2 ? '[' : '{');
        for (unsigned k = 0; k < n; k++) {
            if (k) bg_buf_char(b, ',');
            if (kind == 3)
                bg_buf_printf(b, "\"k%u%s\"%s:", k, next(r, 4) ? "" : "\\t", space[next(r, 6)]);
            random_value(r, b, depth + 1);
        }
        bg_buf_char(b, kind == 2 ? ']' : '}');
    }
    bg_buf_str(b, space[next(r, 6)]);
}

Test(quick, random_values_and_mutations_agree)
{
    enum { ROUNDS = 20000 };
    source r = {.state = 20261129};
    int taken = 0;
    for (int i = 0; i < ROUNDS; i++) {
        bg_buf b = {0};
        random_value(&r, &b, 0);
        cr_assert(!b.failed);
        bool ok = agree(b.data, b.len);
        taken += ok;
        for (int m = 0; m < 4 && b.len; m++) { /* a byte changed, or the end cut off */
            size_t at = next(&r, (unsigned)b.len);
            if (next(&r, 3))
                b.data[at] =
                    (char)(next(&r, 2) ? "\"\\{}[],:0u\xc3\x80"[next(&r, 13)] : (int)next(&r, 256));
            else
                b.len = at;
            agree(b.data, b.len);
        }
        bg_buf_release(&b);
    }
    cr_expect_eq(taken, ROUNDS, "%d of %d good values were left to jansson", ROUNDS - taken,
                 ROUNDS);
}
