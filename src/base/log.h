/* base/log.h - log lines: logfmt or JSON, one write a line, any thread.
 *
 *     ts=2026-11-29T17:00:00.123Z level=warn msg="..."
 *     {"ts":"2026-11-29T17:00:00.123Z","level":"warn","msg":"..."}
 *
 * A handle is passed to whoever may log; NULL is allowed and silent. Prompt text is never logged.
 */
#ifndef BG_BASE_LOG_H
#define BG_BASE_LOG_H

#include <stdint.h>

typedef enum bg_log_level { BG_LOG_ERROR, BG_LOG_WARN, BG_LOG_INFO, BG_LOG_DEBUG } bg_log_level;
typedef enum bg_log_format { BG_LOG_LOGFMT, BG_LOG_JSON } bg_log_format;

typedef struct bg_log bg_log;

/* Logs to fd (kept open by the caller) from `level` down to errors, as logfmt. NULL: out of memory.
 */
bg_log *bg_log_new(int fd, bg_log_level level);
/* Flushes. */
void bg_log_free(bg_log *log);
void bg_log_set_format(bg_log *log, bg_log_format format);
/* The message becomes msg="..." with quotes and control characters escaped. */
void bg_log_at(bg_log *log, bg_log_level level, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
/* For what may come a million times, such as a record's error: the first few of a key (an error
 * code) are logged, the others counted, and "N more: KEY" says how many, once a minute at most, and
 * at the end. */
void bg_log_repeat(bg_log *log, bg_log_level level, const char *key, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));
/* The first n of a key one by one [3], then counts at most every interval_ns [60 s]. */
void bg_log_set_repeat(bg_log *log, int n, int64_t interval_ns);
/* Logs all counts that are held back. */
void bg_log_flush(bg_log *log);
/* Called before and after each line, so that a progress bar can step aside. */
void bg_log_hooks(bg_log *log, void (*before)(void *), void (*after)(void *), void *ctx);

#endif
