#include "base/clock.h"

#include <stdio.h>
#include <time.h>

static int64_t now(clockid_t id)
{
    struct timespec t;
    clock_gettime(id, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

int64_t bg_now_ns(void)
{
    return now(CLOCK_MONOTONIC);
}

int64_t bg_cpu_ns(void)
{
    return now(CLOCK_THREAD_CPUTIME_ID);
}

int64_t bg_wall_ns(void)
{
    return now(CLOCK_REALTIME);
}

void bg_format_time(int64_t wall_ns, char *out, size_t size)
{
    time_t s = (time_t)(wall_ns / 1000000000);
    struct tm tm;
    char text[32];
    gmtime_r(&s, &tm);
    strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%S", &tm);
    snprintf(out, size, "%s.%03dZ", text, (int)(wall_ns / 1000000 % 1000));
}

void bg_format_duration(int64_t ns, char *out, size_t size)
{
    int64_t s = ns / 1000000000;
    if (s < 60)
        snprintf(out, size, "%.1fs", (double)ns * 1e-9);
    else if (s < 3600)
        snprintf(out, size, "%dm%02ds", (int)(s / 60), (int)(s % 60));
    else
        snprintf(out, size, "%lldh%02dm", (long long)(s / 3600), (int)(s / 60 % 60));
}

void bg_format_bytes(uint64_t bytes, char *out, size_t size)
{
    static const char *const units[] = {"B", "kB", "MB", "GB", "TB", "PB", "EB"};
    double v = (double)bytes;
    int u = 0;
    while (v >= 999.5 && u < 6) {
        v /= 1000;
        u++;
    }
    snprintf(out, size, u && v < 9.95 ? "%.1f %s" : "%.0f %s", v, units[u]);
}
