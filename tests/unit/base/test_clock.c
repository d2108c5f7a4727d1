/* Times and sizes as people read them. */
#include "base/clock.h"

#include <stdio.h>
#include <string.h>

#include <criterion/criterion.h>

static void expect_time(int64_t ns, const char *want)
{
    char out[32];
    bg_format_time(ns, out, sizeof out);
    cr_expect_str_eq(out, want);
}

Test(clock, wall_time_is_rfc3339)
{
    const int64_t s = 1000000000;
    expect_time(0, "1970-01-01T00:00:00.000Z");
    expect_time(s - 1, "1970-01-01T00:00:00.999Z");
    expect_time(INT64_C(951782399) * s, "2000-02-28T23:59:59.000Z");
    expect_time(INT64_C(951782400) * s + 5000000, "2000-02-29T00:00:00.005Z");
    expect_time(INT64_C(1795971600) * s + 123456789, "2026-11-29T17:00:00.123Z");
    char exact[25], small[8];
    bg_format_time(0, exact, sizeof exact);
    cr_expect_str_eq(exact, "1970-01-01T00:00:00.000Z");
    bg_format_time(0, small, sizeof small);
    cr_expect_str_eq(small, "1970-01");
}

static void expect_duration(double s, const char *want)
{
    char out[32];
    bg_format_duration((int64_t)(s * 1e9), out, sizeof out);
    cr_expect_str_eq(out, want, "%g s: %s, want %s", s, out, want);
}

Test(clock, durations)
{
    expect_duration(0, "0.0s");
    expect_duration(12.34, "12.3s");
    expect_duration(59.9, "59.9s");
    expect_duration(60, "1m00s");
    expect_duration(187.9, "3m07s");
    expect_duration(3599.9, "59m59s");
    expect_duration(3600, "1h00m");
    expect_duration(3725, "1h02m");
    expect_duration(360000, "100h00m");
}

static void expect_bytes(uint64_t n, const char *want)
{
    char out[32];
    bg_format_bytes(n, out, sizeof out);
    cr_expect_str_eq(out, want, "%llu: %s, want %s", (unsigned long long)n, out, want);
}

Test(clock, sizes)
{
    expect_bytes(0, "0 B");
    expect_bytes(17, "17 B");
    expect_bytes(999, "999 B");
    expect_bytes(1000, "1.0 kB");
    expect_bytes(1500000, "1.5 MB");
    expect_bytes(9949, "9.9 kB");
    expect_bytes(9950, "10 kB");
    expect_bytes(999499, "999 kB");
    expect_bytes(999500, "1.0 MB");
    expect_bytes(UINT64_C(402000000000), "402 GB");
    expect_bytes(UINT64_MAX, "18 EB");
}

Test(clock, clocks_do_not_run_backwards)
{
    int64_t last = bg_now_ns();
    for (int i = 0; i < 1000; i++) {
        int64_t now = bg_now_ns();
        cr_assert_geq(now, last);
        last = now;
    }
    cr_expect_gt(bg_wall_ns(), INT64_C(1700000000) * 1000000000);
}
