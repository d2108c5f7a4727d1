/* The growable buffer: appending, sticky failure, JSON strings. */
#include "base/buf.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <criterion/criterion.h>

Test(buf, grows_and_keeps_a_nul_behind)
{
    bg_buf b = {0};
    for (int i = 0; i < 1000; i++) {
        bg_buf_add(&b, "ab", 2);
        bg_buf_char(&b, 'c');
        bg_buf_printf(&b, "%d,", i);
        cr_assert_eq(b.data[b.len], 0);
    }
    cr_expect_eq(b.len, 1000 * 4 + 10 + 90 * 2 + 900 * 3);
    cr_expect_eq(memcmp(b.data, "abc0,abc1,", 10), 0);
    cr_expect_eq(memcmp(b.data + b.len - 7, "abc999,", 7), 0);
    bg_buf_clear(&b);
    cr_expect_eq(b.len, 0);
    cr_expect_str_eq(b.data, "");
    bg_buf_str(&b, "again");
    char *s = bg_buf_take(&b);
    cr_expect_str_eq(s, "again");
    cr_expect(b.data == NULL && b.len == 0 && b.cap == 0);
    free(s);
    bg_buf_release(&b);
}

Test(buf, zero_bytes_and_long_prints)
{
    bg_buf b = {0};
    bg_buf_add(&b, NULL, 0);
    cr_expect_str_eq(b.data, "", "an append of nothing makes an empty string");
    bg_buf_add(&b, "a\0b", 3);
    cr_expect_eq(b.len, 3);
    bg_buf_printf(&b, "%5000s|", "x");
    cr_expect_eq(b.len, 3 + 5001);
    cr_expect_eq(b.data[b.len - 2], 'x');
    bg_buf_release(&b);
    char *s = bg_buf_take(&b);
    cr_expect_str_eq(s, "", "taking what nothing was put into");
    free(s);
}

Test(buf, failure_is_sticky)
{
    bg_buf b = {0};
    bg_buf_str(&b, "kept");
    cr_expect_not(bg_buf_reserve(&b, SIZE_MAX));
    cr_expect(b.failed);
    bg_buf_str(&b, "dropped");
    bg_buf_char(&b, 'x');
    bg_buf_printf(&b, "%d", 1);
    cr_expect_eq(b.len, 4);
    cr_expect_str_eq(b.data, "kept");
    cr_expect_null(bg_buf_take(&b));
    cr_expect(b.data == NULL && !b.failed);
    bg_buf_reserve(&b, SIZE_MAX / 2);
    cr_expect(b.failed, "half of all memory is not there either");
    bg_buf_clear(&b);
    cr_expect_not(b.failed);
    bg_buf_str(&b, "ok");
    cr_expect_str_eq(b.data, "ok");
    bg_buf_release(&b);
}

static void expect_json(const char *s, size_t n, const char *want)
{
    bg_buf b = {0};
    bg_buf_json(&b, s, n);
    cr_expect_str_eq(b.data, want);
    bg_buf_release(&b);
}

Test(buf, json_strings)
{
    expect_json("", 0, "\"\"");
    expect_json("a\"b\\c/d", 7, "\"a\\\"b\\\\c/d\"");
    expect_json("\n\r\t\b\f\0\x1f\x7f", 8, "\"\\n\\r\\t\\u0008\\u000c\\u0000\\u001f\\u007f\"");
    expect_json("\xc3\xa9\xf0\x9f\x98\x80", 6, "\"\xc3\xa9\xf0\x9f\x98\x80\"");
    expect_json("\xe2\x80\xa8\xe2\x80\xa9\xc2\x85", 8, "\"\\u2028\\u2029\\u0085\"");
    expect_json("x\xff\xe2\x80y", 5, "\"x\xef\xbf\xbd\xef\xbf\xbdy\"");
    expect_json("\xed\xa0\x80", 3, "\"\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\"");
    expect_json("\xf0\x9f\x98", 3, "\"\xef\xbf\xbd\"");
}
