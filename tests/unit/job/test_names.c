/* Dates and shards in file names. */
#include "job/names.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <criterion/criterion.h>

/* 2027-01-02 03:04:05 UTC: a Saturday of the last ISO week of 2026. */
#define T 1798859045

static void utc(void)
{
    setenv("TZ", "UTC", 1);
}

static void good(const char *name, int64_t t, int64_t index, int64_t count, const char *want)
{
    char *out = NULL;
    bg_error err = {0};
    bg_status st = bg_name_expand(name, t, index, count, &out, &err);
    cr_expect(!st && out && strcmp(out, want) == 0, "%s: got %s, want %s (%s)", name,
              out ? out : "(none)", want, err.text);
    free(out);
}

static void bad(const char *name, const char *why)
{
    char *out = NULL;
    bg_error err = {0};
    bg_status st = bg_name_expand(name, T, 0, 0, &out, &err);
    cr_expect(st == BG_ARG && !out && strstr(err.text, why), "%s: status %d, \"%s\" lacks \"%s\"",
              name, st, err.text, why);
}

TestSuite(names, .init = utc);

Test(names, plain_ones_stay)
{
    good("answers.jsonl.lz4", T, 0, 0, "answers.jsonl.lz4");
    good("", T, 0, 0, "");
    good("-", T, 0, 0, "-");
    good("a{b}c{}{shardx}{shard", T, 0, 0, "a{b}c{}{shardx}{shard");
    char *out = (char *)"x";
    bg_error err = {0};
    cr_expect(!bg_name_expand(NULL, T, 0, 0, &out, &err) && !out);
}

Test(names, every_field)
{
    good("%Y|%m|%d|%H|%M|%S", T, 0, 0, "2027|01|02|03|04|05");
    good("%F|%j|%G-%V", T, 0, 0, "2027-01-02|002|2026-53");
    good("100%%|%%F|%%", T, 0, 0, "100%|%F|%");
    good("%Y/%m/answers-%F.jsonl.lz4", T, 0, 0, "2027/01/answers-2027-01-02.jsonl.lz4");
    good("%Y", 0, 0, 0, "1970");
}

Test(names, local_time)
{
    setenv("TZ", "XXX5", 1); /* five hours west */
    good("%F %H:%M", T, 0, 0, "2027-01-01 22:04");
    setenv("TZ", "XXX-14", 1);
    good("%F %H:%M", T, 0, 0, "2027-01-02 17:04");
}

Test(names, shards)
{
    good("out-{shard}of{shards}.jsonl", T, 1, 4, "out-2of4.jsonl");
    good("{shard}{shard}", T, 0, 10, "0101");
    good("{shard}/{shards}", T, 99, 100, "100/100");
    good("{shard}", T, 6, 1000, "0007");
    bad("out-{shard}.jsonl", "has {shard}, but there is no --shard");
    bad("{shards}", "has {shards}, but there is no --shard");
}

Test(names, unknown_fields_are_named)
{
    bad("50%off", "%o is no field");
    bad("%y", "%y is no field");
    bad("%n", "%n is no field");
    bad("%s%s%s", "%s is no field");
    bad("a%", "ends in a lone %");
    bad("% F", "% ");
    bad("%-d", "%- is no field");
}
