/* base/clock.h - time. Monotonic for intervals, wall only for what people read. */
#ifndef BG_BASE_CLOCK_H
#define BG_BASE_CLOCK_H

#include <stddef.h>
#include <stdint.h>

int64_t bg_now_ns(void);  /* CLOCK_MONOTONIC */
int64_t bg_cpu_ns(void);  /* CLOCK_THREAD_CPUTIME_ID: what this thread has computed */
int64_t bg_wall_ns(void); /* CLOCK_REALTIME */
/* RFC 3339 in UTC with milliseconds, "2026-11-29T17:00:00.123Z", 25 bytes with the NUL. */
void bg_format_time(int64_t wall_ns, char *out, size_t size);
/* "1h02m", "3m07s", "12.3s" */
void bg_format_duration(int64_t ns, char *out, size_t size);
/* "402 GB", "1.5 MB", "17 B": decimal units */
void bg_format_bytes(uint64_t bytes, char *out, size_t size);

#endif
