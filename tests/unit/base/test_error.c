/* Errors: the first one wins, texts are cut visibly. */
#include "base/error.h"

#include <errno.h>
#include <string.h>

#include <criterion/criterion.h>

Test(error, the_first_failure_wins)
{
    bg_error err = {0};
    cr_expect_eq(bg_fail(&err, BG_FORMAT, "first %d", 1), BG_FORMAT);
    int line = __LINE__ - 1;
    cr_expect_eq(bg_fail(&err, BG_NOMEM, "second"), BG_FORMAT);
    errno = ENOENT;
    cr_expect_eq(bg_fail_os(&err, "third"), BG_FORMAT);
    cr_expect_eq(err.status, BG_FORMAT);
    cr_expect_str_eq(err.text, "first 1");
    cr_expect_eq(err.line, line);
    cr_expect_not_null(strstr(err.file, "test_error.c"));
    cr_expect_eq(err.os, 0);
}

Test(error, what_the_system_said_is_appended)
{
    bg_error err = {0};
    errno = ENOENT;
    cr_expect_eq(bg_fail_os(&err, "%s: cannot open", "x"), BG_IO);
    cr_expect_eq(err.os, ENOENT);
    cr_expect_str_eq(err.text, "x: cannot open: No such file or directory");
}

Test(error, wrapping_puts_a_name_in_front)
{
    bg_error err = {0};
    bg_fail(&err, BG_BUSY, "locked");
    cr_expect_eq(bg_wrap(&err, "rank %d", 3), BG_BUSY);
    bg_wrap(&err, "node a");
    cr_expect_str_eq(err.text, "node a: rank 3: locked");
}

static void expect_cut(const bg_error *err, const char *start)
{
    cr_expect_eq(strlen(err->text), BG_ERROR_TEXT - 1);
    cr_expect_eq(strncmp(err->text, start, strlen(start)), 0);
    cr_expect_str_eq(err->text + BG_ERROR_TEXT - 4, "...");
}

Test(error, long_texts_end_in_dots)
{
    bg_error err = {0};
    char x[2 * BG_ERROR_TEXT];
    memset(x, 'x', sizeof x - 1);
    x[sizeof x - 1] = 0;
    bg_fail(&err, BG_ARG, "%s", x);
    expect_cut(&err, "xxx");
    bg_wrap(&err, "name");
    expect_cut(&err, "name: xxx");
    bg_wrap(&err, "%s", x);
    expect_cut(&err, "xxx");

    bg_error io = {0};
    errno = EACCES;
    bg_fail_os(&io, "%.*s", BG_ERROR_TEXT - 8, x);
    expect_cut(&io, "xxx");

    bg_error fits = {0};
    bg_fail(&fits, BG_ARG, "%.*s", BG_ERROR_TEXT - 1, x);
    cr_expect_eq(strlen(fits.text), BG_ERROR_TEXT - 1);
    cr_expect_eq(fits.text[BG_ERROR_TEXT - 2], 'x', "what just fits is not cut");
}

Test(error, names_of_statuses)
{
    cr_expect_str_eq(bg_status_name(BG_OK), "BG_OK");
    cr_expect_str_eq(bg_status_name(BG_NOMEM), "BG_NOMEM");
    cr_expect_str_eq(bg_status_name(BG_DEVICE), "BG_DEVICE");
    cr_expect_str_eq(bg_status_name(BG_INTERNAL), "BG_INTERNAL");
    cr_expect_str_eq(bg_status_name((bg_status)99), "BG_?");
}
