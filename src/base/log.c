#include "base/log.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/clock.h"

enum { FIRST = 3, MAX_KEYS = 64, MAX_KEY = 48 };
#define INTERVAL_NS INT64_C(60000000000)

typedef struct repeated {
    char key[MAX_KEY];
    bg_log_level level;
    uint64_t seen, held; /* held: counted since a line told of this key */
    int64_t told_ns;
} repeated;

struct bg_log {
    int fd;
    bg_log_level level;
    bg_log_format format;
    pthread_mutex_t lock;
    void (*before)(void *), (*after)(void *);
    void *ctx;
    uint64_t first;
    int64_t interval_ns;
    repeated keys[MAX_KEYS]; /* the last one is shared by all keys that came too late */
    int n_keys;
};

bg_log *bg_log_new(int fd, bg_log_level level)
{
    bg_log *log = calloc(1, sizeof *log);
    if (!log) return NULL;
    log->fd = fd;
    log->level = level;
    log->first = FIRST;
    log->interval_ns = INTERVAL_NS;
    pthread_mutex_init(&log->lock, NULL);
    return log;
}

void bg_log_free(bg_log *log)
{
    if (!log) return;
    bg_log_flush(log);
    pthread_mutex_destroy(&log->lock);
    free(log);
}

void bg_log_set_format(bg_log *log, bg_log_format format)
{
    if (!log) return;
    pthread_mutex_lock(&log->lock);
    log->format = format;
    pthread_mutex_unlock(&log->lock);
}

void bg_log_set_repeat(bg_log *log, int n, int64_t interval_ns)
{
    if (!log) return;
    pthread_mutex_lock(&log->lock);
    log->first = n > 0 ? (uint64_t)n : 0;
    log->interval_ns = interval_ns;
    pthread_mutex_unlock(&log->lock);
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

/* With the lock held. */
static void put(bg_log *log, bg_log_level level, const char *text)
{
    static const char *const names[] = {"error", "warn", "info", "debug"};
    bool json = log->format == BG_LOG_JSON;
    char ts[32];
    bg_format_time(bg_wall_ns(), ts, sizeof ts);
    bg_buf b = {0};
    bg_buf_printf(&b, json ? "{\"ts\":\"%s\",\"level\":\"%s\",\"msg\":" : "ts=%s level=%s msg=", ts,
                  names[level]);
    bg_buf_json(&b, text, strlen(text));
    bg_buf_str(&b, json ? "}\n" : "\n");
    if (!b.failed) {
        if (log->before) log->before(log->ctx);
        ssize_t w = write(log->fd, b.data, b.len); /* a log that cannot be written ends nothing */
        (void)w;
        if (log->after) log->after(log->ctx);
    }
    bg_buf_release(&b);
}

void bg_log_at(bg_log *log, bg_log_level level, const char *fmt, ...)
{
    if (!log || level > log->level) return;
    char text[2048];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    pthread_mutex_lock(&log->lock);
    put(log, level, text);
    pthread_mutex_unlock(&log->lock);
}

static repeated *find(bg_log *log, const char *key)
{
    for (int i = 0; i < log->n_keys; i++)
        if (strncmp(log->keys[i].key, key, MAX_KEY - 1) == 0) return &log->keys[i];
    if (log->n_keys == MAX_KEYS) return &log->keys[MAX_KEYS - 1];
    repeated *r = &log->keys[log->n_keys++];
    snprintf(r->key, sizeof r->key, "%s", log->n_keys == MAX_KEYS ? "others" : key);
    return r;
}

static void tell(bg_log *log, repeated *r, int64_t now)
{
    if (!r->held) return;
    char text[MAX_KEY + 40];
    snprintf(text, sizeof text, "%llu more: %s", (unsigned long long)r->held, r->key);
    r->held = 0;
    r->told_ns = now;
    put(log, r->level, text);
}

void bg_log_repeat(bg_log *log, bg_log_level level, const char *key, const char *fmt, ...)
{
    if (!log || level > log->level) return;
    char text[2048];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    int64_t now = bg_now_ns();
    pthread_mutex_lock(&log->lock);
    repeated *r = find(log, key);
    r->level = level;
    if (r->seen++ < log->first) {
        put(log, level, text);
        r->told_ns = now;
    } else {
        r->held++;
        if (now - r->told_ns >= log->interval_ns) tell(log, r, now);
    }
    pthread_mutex_unlock(&log->lock);
}

void bg_log_flush(bg_log *log)
{
    if (!log) return;
    int64_t now = bg_now_ns();
    pthread_mutex_lock(&log->lock);
    for (int i = 0; i < log->n_keys; i++)
        tell(log, &log->keys[i], now);
    pthread_mutex_unlock(&log->lock);
}
