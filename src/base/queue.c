#include "base/queue.h"

#include <pthread.h>
#include <stdlib.h>
#include <time.h>

struct bg_queue {
    pthread_mutex_t lock;
    pthread_cond_t not_empty, not_full;
    size_t capacity, head, len;
    bool closed;
    void *items[];
};

bg_queue *bg_queue_new(size_t capacity)
{
    bg_queue *q = calloc(1, sizeof *q + capacity * sizeof(void *));
    if (!q) return NULL;
    q->capacity = capacity;
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_mutex_init(&q->lock, NULL);
    pthread_cond_init(&q->not_empty, &attr);
    pthread_cond_init(&q->not_full, &attr);
    pthread_condattr_destroy(&attr);
    return q;
}

void bg_queue_free(bg_queue *q)
{
    if (!q) return;
    pthread_cond_destroy(&q->not_empty);
    pthread_cond_destroy(&q->not_full);
    pthread_mutex_destroy(&q->lock);
    free(q);
}

bool bg_queue_push(bg_queue *q, void *item)
{
    pthread_mutex_lock(&q->lock);
    while (q->len == q->capacity && !q->closed)
        pthread_cond_wait(&q->not_full, &q->lock);
    bool ok = !q->closed;
    if (ok) {
        q->items[(q->head + q->len++) % q->capacity] = item;
        pthread_cond_signal(&q->not_empty);
    }
    pthread_mutex_unlock(&q->lock);
    return ok;
}

static void *take(bg_queue *q) /* locked */
{
    if (!q->len) return NULL;
    void *item = q->items[q->head];
    q->head = (q->head + 1) % q->capacity;
    q->len--;
    pthread_cond_signal(&q->not_full);
    return item;
}

void *bg_queue_pop(bg_queue *q)
{
    pthread_mutex_lock(&q->lock);
    while (!q->len && !q->closed)
        pthread_cond_wait(&q->not_empty, &q->lock);
    void *item = take(q);
    pthread_mutex_unlock(&q->lock);
    return item;
}

void *bg_queue_try_pop(bg_queue *q)
{
    pthread_mutex_lock(&q->lock);
    void *item = take(q);
    pthread_mutex_unlock(&q->lock);
    return item;
}

void *bg_queue_pop_within(bg_queue *q, long long timeout_ns)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    long long ns = t.tv_nsec + timeout_ns;
    t.tv_sec += (time_t)(ns / 1000000000);
    t.tv_nsec = (long)(ns % 1000000000);
    pthread_mutex_lock(&q->lock);
    while (!q->len && !q->closed)
        if (pthread_cond_timedwait(&q->not_empty, &q->lock, &t) != 0) break;
    void *item = take(q);
    pthread_mutex_unlock(&q->lock);
    return item;
}

void bg_queue_close(bg_queue *q)
{
    pthread_mutex_lock(&q->lock);
    q->closed = true;
    pthread_cond_broadcast(&q->not_empty);
    pthread_cond_broadcast(&q->not_full);
    pthread_mutex_unlock(&q->lock);
}

bool bg_queue_closed(bg_queue *q)
{
    pthread_mutex_lock(&q->lock);
    bool r = q->closed && !q->len;
    pthread_mutex_unlock(&q->lock);
    return r;
}

size_t bg_queue_len(bg_queue *q)
{
    pthread_mutex_lock(&q->lock);
    size_t n = q->len;
    pthread_mutex_unlock(&q->lock);
    return n;
}
