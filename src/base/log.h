/* base/log.h - log lines: logfmt text, one write a line, any thread.
 *
 *     ts=2026-11-29T17:00:00.123Z level=warn msg="..." key=value
 *
 * A handle is passed to whoever may log; NULL is allowed and silent. Prompt text is never logged.
 */
#ifndef BG_BASE_LOG_H
#define BG_BASE_LOG_H

typedef enum bg_log_level { BG_LOG_ERROR, BG_LOG_WARN, BG_LOG_INFO, BG_LOG_DEBUG } bg_log_level;

typedef struct bg_log bg_log;

/* Logs to fd (kept open by the caller) from `level` down to errors. NULL: out of memory. */
bg_log *bg_log_new(int fd, bg_log_level level);
void bg_log_free(bg_log *log);
/* The message becomes msg="..." with quotes and control characters escaped. */
void bg_log_at(bg_log *log, bg_log_level level, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
/* Called before and after each line, so that a progress bar can step aside. */
void bg_log_hooks(bg_log *log, void (*before)(void *), void (*after)(void *), void *ctx);

#endif
