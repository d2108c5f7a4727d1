/* Log lines: both formats, levels, escaping, repeated lines folded into counts. */
#include "base/log.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <criterion/criterion.h>
#include <jansson.h>

static int fd;
static char text[1 << 20];

static void make(void)
{
    fd = memfd_create("log", MFD_CLOEXEC);
    cr_assert_geq(fd, 0);
}

TestSuite(log, .init = make);

static const char *so_far(void)
{
    ssize_t n = pread(fd, text, sizeof text - 1, 0);
    cr_assert_geq(n, 0);
    text[n] = 0;
    return text;
}

static int count(const char *what)
{
    int n = 0;
    for (const char *at = so_far(); (at = strstr(at, what)); at += strlen(what))
        n++;
    return n;
}

Test(log, logfmt)
{
    bg_log *log = bg_log_new(fd, BG_LOG_INFO);
    bg_log_at(log, BG_LOG_WARN, "line %d: \"x\"\n\\", 3);
    bg_log_at(log, BG_LOG_DEBUG, "too deep");
    bg_log_free(log);
    const char *s = so_far();
    cr_expect(strncmp(s, "ts=2", 4) == 0 && s[7] == '-' && strncmp(s + 26, "Z ", 2) == 0, "%s", s);
    cr_expect_str_eq(s + 28, "level=warn msg=\"line 3: \\\"x\\\"\\n\\\\\"\n");
}

Test(log, json)
{
    static const char *const levels[] = {"error", "warn", "info", "debug"};
    bg_log *log = bg_log_new(fd, BG_LOG_DEBUG);
    bg_log_set_format(log, BG_LOG_JSON);
    for (int i = 0; i < 4; i++)
        bg_log_at(log, (bg_log_level)i, "a \"quoted\"\tline\n%d \xff é", i);
    bg_log_free(log);
    int n = 0;
    char *save = NULL;
    so_far();
    for (char *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save), n++) {
        json_error_t je;
        json_t *j = json_loads(line, JSON_REJECT_DUPLICATES, &je);
        cr_assert(j, "%s: %s", line, je.text);
        cr_expect_eq(json_object_size(j), 3);
        cr_expect_eq(strlen(json_string_value(json_object_get(j, "ts"))), 24);
        cr_expect_str_eq(json_string_value(json_object_get(j, "level")), levels[n]);
        char want[80];
        snprintf(want, sizeof want, "a \"quoted\"\tline\n%d \xef\xbf\xbd é", n);
        cr_expect_str_eq(json_string_value(json_object_get(j, "msg")), want);
        json_decref(j);
    }
    cr_expect_eq(n, 4);
}

Test(log, the_first_three_then_counts)
{
    bg_log *log = bg_log_new(fd, BG_LOG_WARN);
    for (int i = 0; i < 1000; i++) {
        bg_log_repeat(log, BG_LOG_WARN, "prompt_too_long", "line %d: prompt_too_long", i);
        if (i % 2) bg_log_repeat(log, BG_LOG_ERROR, "invalid_json", "line %d: invalid_json", i);
        bg_log_repeat(log, BG_LOG_INFO, "silent", "below the level");
    }
    cr_expect_eq(count("\n"), 6);
    cr_expect_eq(count("line 2: prompt_too_long"), 1);
    cr_expect_eq(count("line 3: prompt_too_long"), 0);
    bg_log_flush(log);
    cr_expect_eq(count("level=warn msg=\"997 more: prompt_too_long\"\n"), 1);
    cr_expect_eq(count("level=error msg=\"497 more: invalid_json\"\n"), 1);
    bg_log_flush(log);
    cr_expect_eq(count("\n"), 8, "a count is told once");
    bg_log_repeat(log, BG_LOG_WARN, "prompt_too_long", "again");
    cr_expect_eq(count("\n"), 8, "and the key is still known");
    bg_log_free(log);
    cr_expect_eq(count("msg=\"1 more: prompt_too_long\""), 1, "the end tells the rest");
    cr_expect_eq(count("\n"), 9);
}

Test(log, counts_come_at_the_interval)
{
    bg_log *log = bg_log_new(fd, BG_LOG_WARN);
    bg_log_set_repeat(log, 1, 0); /* an interval that is always over */
    for (int i = 0; i < 3; i++)
        bg_log_repeat(log, BG_LOG_WARN, "k", "first");
    cr_expect_eq(count("first"), 1);
    cr_expect_eq(count("1 more: k"), 2);
    bg_log_set_repeat(log, 1, INT64_MAX);
    for (int i = 0; i < 3; i++)
        bg_log_repeat(log, BG_LOG_WARN, "k", "first");
    cr_expect_eq(count("\n"), 3);
    bg_log_free(log);
    cr_expect_eq(count("3 more: k"), 1);
}

/* Keys are error codes; were they something else, memory stays bounded and nothing goes uncounted.
 */
Test(log, many_keys)
{
    bg_log *log = bg_log_new(fd, BG_LOG_WARN);
    bg_log_set_repeat(log, 1, INT64_MAX);
    for (int k = 0; k < 1000; k++) {
        char key[200];
        snprintf(key, sizeof key, "%0150d", k); /* alike in what is kept of them */
        bg_log_repeat(log, BG_LOG_WARN, key, "long");
        snprintf(key, sizeof key, "key %d", k);
        bg_log_repeat(log, BG_LOG_WARN, key, "short");
    }
    bg_log_free(log);
    cr_expect_eq(count("999 more: 000"), 1);
    int shown = count("short");
    char want[64];
    snprintf(want, sizeof want, "%d more: others", 1000 - shown);
    cr_expect_eq(count(want), 1, "%s", so_far());
}

static void *shout(void *log)
{
    for (int i = 0; i < 2000; i++)
        bg_log_repeat(log, BG_LOG_WARN, "shared", "from a thread");
    return NULL;
}

Test(log, threads_lose_no_count)
{
    bg_log *log = bg_log_new(fd, BG_LOG_WARN);
    pthread_t t[4];
    for (int i = 0; i < 4; i++)
        cr_assert_eq(pthread_create(&t[i], NULL, shout, log), 0);
    for (int i = 0; i < 4; i++)
        pthread_join(t[i], NULL);
    bg_log_free(log);
    cr_expect_eq(count("from a thread"), 3);
    cr_expect_eq(count("7997 more: shared"), 1);
}

static int calls;
static void before(void *p)
{
    *(int *)p += 1;
    calls += 10;
}
static void after(void *p)
{
    *(int *)p -= 1;
    calls += 1;
}

Test(log, hooks_and_null)
{
    int depth = 0;
    bg_log *log = bg_log_new(fd, BG_LOG_WARN);
    bg_log_hooks(log, before, after, &depth);
    bg_log_set_repeat(log, 0, INT64_MAX);
    bg_log_at(log, BG_LOG_WARN, "x");
    bg_log_repeat(log, BG_LOG_WARN, "k", "y");
    bg_log_free(log);
    cr_expect_eq(calls, 22, "around each line, the counts included");
    cr_expect_eq(depth, 0);
    bg_log_at(NULL, BG_LOG_ERROR, "x");
    bg_log_repeat(NULL, BG_LOG_ERROR, "k", "x");
    bg_log_flush(NULL);
    bg_log_set_format(NULL, BG_LOG_JSON);
    bg_log_set_repeat(NULL, 1, 1);
    bg_log_free(NULL);
}
