#include "base/log.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/clock.h"

struct bg_log {
    int fd;
    bg_log_level level;
    pthread_mutex_t lock;
    void (*before)(void *), (*after)(void *);
    void *ctx;
};

bg_log *bg_log_new(int fd, bg_log_level level)
{
    bg_log *log = calloc(1, sizeof *log);
    if (!log) return NULL;
    log->fd = fd;
    log->level = level;
    pthread_mutex_init(&log->lock, NULL);
    return log;
}

void bg_log_free(bg_log *log)
{
    if (!log) return;
    pthread_mutex_destroy(&log->lock);
    free(log);
}

void bg_log_hooks(bg_log *log, void (*before)(void *), void (*after)(void *), void *ctx)
{
    if (!log) return;
    pthread_mutex_lock(&log->lock);
    log->before = before;
    log->after = after;
    log->ctx = ctx;
    pthread_mutex_unlock(&log->lock);
}

void bg_log_at(bg_log *log, bg_log_level level, const char *fmt, ...)
{
    static const char *const names[] = {"error", "warn", "info", "debug"};
    if (!log || level > log->level) return;
    char ts[32], text[2048];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    bg_format_time(bg_wall_ns(), ts, sizeof ts);
    bg_buf b = {0};
    bg_buf_printf(&b, "ts=%s level=%s msg=", ts, names[level]);
    size_t n = 0;
    while (text[n])
        n++;
    bg_buf_json(&b, text, n);
    bg_buf_char(&b, '\n');
    if (!b.failed) {
        pthread_mutex_lock(&log->lock);
        if (log->before) log->before(log->ctx);
        ssize_t w = write(log->fd, b.data, b.len); /* a log that cannot be written ends nothing */
        (void)w;
        if (log->after) log->after(log->ctx);
        pthread_mutex_unlock(&log->lock);
    }
    bg_buf_release(&b);
}
