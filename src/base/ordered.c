#include "base/ordered.h"

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/prctl.h>

typedef struct slot {
    void *item;
    bool worked;
} slot;

struct bg_ordered {
    pthread_mutex_t lock;
    pthread_cond_t has_room, has_work, has_result;
    uint64_t pushed, taken, popped; /* items so far; slot of item i is i % window */
    size_t window;
    bool ended, stopped;
    void (*work)(void *, void *);
    void *ctx;
    int n_threads;
    pthread_t *threads;
    slot slots[];
};

static void *worker(void *arg)
{
    bg_ordered *o = arg;
    prctl(PR_SET_NAME, "bg-text"); /* as tools show it */
    pthread_mutex_lock(&o->lock);
    for (;;) {
        while (o->taken == o->pushed && !o->ended && !o->stopped)
            pthread_cond_wait(&o->has_work, &o->lock);
        if (o->stopped || o->taken == o->pushed) break;
        slot *s = &o->slots[o->taken++ % o->window];
        pthread_mutex_unlock(&o->lock);
        o->work(o->ctx, s->item);
        pthread_mutex_lock(&o->lock);
        s->worked = true;
        pthread_cond_signal(&o->has_result);
    }
    pthread_mutex_unlock(&o->lock);
    return NULL;
}

bg_status bg_ordered_new(bg_ordered **out, int n_threads, size_t window,
                         void (*work)(void *, void *), void *ctx, bg_error *err)
{
    *out = NULL;
    bg_ordered *o = calloc(1, sizeof *o + window * sizeof(slot));
    if (o) o->threads = calloc((size_t)n_threads, sizeof *o->threads);
    if (!o || !o->threads) {
        free(o);
        return bg_fail(err, BG_NOMEM, "out of memory for %d text threads", n_threads);
    }
    o->window = window;
    o->work = work;
    o->ctx = ctx;
    pthread_mutex_init(&o->lock, NULL);
    pthread_cond_init(&o->has_room, NULL);
    pthread_cond_init(&o->has_work, NULL);
    pthread_cond_init(&o->has_result, NULL);
    for (; o->n_threads < n_threads; o->n_threads++) {
        int rc = pthread_create(&o->threads[o->n_threads], NULL, worker, o);
        if (rc) {
            bg_ordered_free(o, NULL);
            return bg_fail_at(err, BG_IO, rc, __FILE__, __LINE__, "cannot start a text thread");
        }
    }
    *out = o;
    return BG_OK;
}

bool bg_ordered_push(bg_ordered *o, void *item)
{
    pthread_mutex_lock(&o->lock);
    while (o->pushed - o->popped == o->window && !o->stopped)
        pthread_cond_wait(&o->has_room, &o->lock);
    bool ok = !o->stopped;
    if (ok) {
        o->slots[o->pushed++ % o->window] = (slot){.item = item};
        pthread_cond_signal(&o->has_work);
    }
    pthread_mutex_unlock(&o->lock);
    return ok;
}

void bg_ordered_end(bg_ordered *o)
{
    pthread_mutex_lock(&o->lock);
    o->ended = true;
    pthread_cond_broadcast(&o->has_work);
    pthread_cond_broadcast(&o->has_result);
    pthread_mutex_unlock(&o->lock);
}

void *bg_ordered_pop(bg_ordered *o)
{
    void *item = NULL;
    pthread_mutex_lock(&o->lock);
    for (;;) {
        if (o->stopped) break;
        if (o->popped < o->pushed) {
            slot *s = &o->slots[o->popped % o->window];
            if (s->worked) {
                item = s->item;
                o->popped++;
                pthread_cond_signal(&o->has_room);
                break;
            }
        } else if (o->ended) {
            break;
        }
        pthread_cond_wait(&o->has_result, &o->lock);
    }
    pthread_mutex_unlock(&o->lock);
    return item;
}

void bg_ordered_stop(bg_ordered *o)
{
    pthread_mutex_lock(&o->lock);
    o->stopped = true;
    pthread_cond_broadcast(&o->has_room);
    pthread_cond_broadcast(&o->has_work);
    pthread_cond_broadcast(&o->has_result);
    pthread_mutex_unlock(&o->lock);
}

void bg_ordered_free(bg_ordered *o, void (*drop)(void *item))
{
    if (!o) return;
    bg_ordered_stop(o);
    for (int i = 0; i < o->n_threads; i++)
        pthread_join(o->threads[i], NULL);
    for (; drop && o->popped < o->pushed; o->popped++)
        drop(o->slots[o->popped % o->window].item);
    pthread_cond_destroy(&o->has_room);
    pthread_cond_destroy(&o->has_work);
    pthread_cond_destroy(&o->has_result);
    pthread_mutex_destroy(&o->lock);
    free(o->threads);
    free(o);
}
