#include <criterion/criterion.h>

#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "base/rng.h"
#include "output/lens.h"

static bg_slice whole(const char *text)
{
    bg_slice v;
    bg_lens_skip(text, text + strlen(text), &v);
    return v;
}

static void expect_at(const char *text, const char *path, const char *want)
{
    bg_slice v = bg_lens_path(whole(text), path);
    if (!want) {
        cr_expect_null(v.p, "%s of %s: %.*s", path, text, (int)v.n, v.p ? v.p : "");
        return;
    }
    cr_assert_not_null(v.p, "%s of %s: nothing", path, text);
    cr_expect(v.n == strlen(want) && memcmp(v.p, want, v.n) == 0, "%s of %s: %.*s, want %s", path,
              text, (int)v.n, v.p, want);
}

Test(lens, paths)
{
    const char *t = "{\"a\":1,\"b\":{\"c\":[10,{\"d\":\"x,}\\\"\"},[]],\"\":null}, \"e\" : true ,"
                    "\"f\":{},\"1\":-2.5e+3}";
    expect_at(t, "a", "1");
    expect_at(t, "b.c", "[10,{\"d\":\"x,}\\\"\"},[]]");
    expect_at(t, "b.c.0", "10");
    expect_at(t, "b.c.1.d", "\"x,}\\\"\"");
    expect_at(t, "b.c.2", "[]");
    expect_at(t, "b.c.3", NULL);
    expect_at(t, "b.c.x", NULL);
    expect_at(t, "b.c.2.0", NULL);
    expect_at(t, "e", "true");
    expect_at(t, "f.g", NULL);
    expect_at(t, "1", "-2.5e+3");
    expect_at(t, "a.b", NULL);
    expect_at(t, "none", NULL);
    expect_at("[]", "0", NULL);
    expect_at("[[1],[2,3]]", "1.1", "3");
}

/* Values that JSON allows, and texts that it does not. */
Test(lens, what_is_a_value)
{
    static const char *const good[] = {"0",    "-1.5E-3", "\"\\u00e9\\n\"", "[1, 2 ,3]",
                                       "null", "[{}]",    "{\"a\":[[],{}]}"};
    static const char *const bad[] = {
        "",        "01",       "1.",    "-",   "\"\\x\"",    "\"a", "[1,]",        "[1 2]",
        "{\"a\"}", "{\"a\":}", "{a:1}", "[1}", "{\"a\":1,}", "nul", "\"\\u12g4\"", "\"\n\"",
        "[",       "{",        "1e",    "+1",  "\"\\",       "]"};
    bg_slice v;
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        const char *end = good[i] + strlen(good[i]);
        cr_expect_eq(bg_lens_skip(good[i], end, &v), end, "%s", good[i]);
    }
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        const char *end = bad[i] + strlen(bad[i]), *p = bg_lens_skip(bad[i], end, &v);
        cr_expect(p != end || p == bad[i], "%s", bad[i]);
    }
}

Test(lens, depth_is_bounded)
{
    enum { DEEP = 4096 };
    char text[2 * DEEP + 5] = {0};
    bg_slice v;
    memset(text, '[', DEEP);
    memset(text + DEEP, ']', DEEP);
    cr_expect_eq(bg_lens_skip(text, text + 2 * DEEP, &v), text + 2 * DEEP);
    memset(text, '[', DEEP + 2);
    memset(text + DEEP + 2, ']', DEEP + 2);
    cr_expect_null(bg_lens_skip(text, text + 2 * DEEP + 4, &v));
}

/* Against jansson: what it can parse we can skip, and what we can skip it can parse. */
Test(lens, agrees_with_a_parser)
{
    static const char letters[] = "{}[]\",:01.-eE\\un tfals r";
    int agreed = 0;
    for (int i = 0; i < 60000; i++) {
        char text[48] = "{\"a\":[1,{\"b\":\"\\u0041\"},-2.5e3,true],\"c\":null}";
        for (uint32_t k = 0, edits = (uint32_t)i % 3; k < edits; k++) {
            bg_philox r = bg_philox4x32(5, (uint64_t)i, k);
            text[r.v[0] % strlen(text)] = letters[r.v[1] % (sizeof letters - 1)];
        }
        bg_slice v;
        const char *end = text + strlen(text), *p = bg_lens_skip(text, end, &v);
        json_t *j = json_loads(text, JSON_DECODE_ANY, NULL);
        cr_assert_eq(p == end, j != NULL, "%s", text);
        agreed += j != NULL;
        json_decref(j);
    }
    cr_expect_gt(agreed, 1000);
}
