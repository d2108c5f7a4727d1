/* Engines side by side. The numbers of sequences tell whose they are: of n engines, engine i gives
 * i + 1, i + 1 + n, ... */
#include "engine/engine.h"

#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#include "engine/engine_internal.h"
#include "engine/workers.h"

static const int64_t WAIT_NS = INT64_C(10000000); /* for room in a window, at a time */

typedef enum end { RUNS, HANDED_OVER, LOST } end;

typedef struct replica {
    bg_replicas *all;
    bg_ranks *ranks;
    bg_engine *engine;
    end end; /* lock */
} replica;

struct bg_replicas {
    int n;
    bg_log *log;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool stopping;  /* lock */
    int n_ended;    /* lock */
    replica list[]; /* [n] */
};

/* ---- ranks ----------------------------------------------------------------------------------- */

bg_status bg_replicas_start(bg_replicas **out, const bg_rank_config *c, int n,
                            const bg_rank_ops *ops, bg_log *log, bg_error *err)
{
    *out = NULL;
    bg_replicas *r = calloc(1, sizeof *r + (size_t)n * sizeof *r->list);
    if (!r) return bg_fail(err, BG_NOMEM, "%d replicas: out of memory", n);
    r->n = n;
    r->log = log;
    pthread_mutex_init(&r->lock, NULL);
    pthread_cond_init(&r->changed, NULL);
    bg_status st = BG_OK;
    for (int i = 0; i < n && !st; i++) {
        r->list[i].all = r;
        st = bg_ranks_start(&r->list[i].ranks, &c[i], ops, log, err);
    }
    if (st)
        bg_replicas_free(r);
    else
        *out = r;
    return st;
}

bg_status bg_replicas_wait_ready(bg_replicas *r,
                                 void (*progress)(void *, uint64_t done, uint64_t total), void *ctx,
                                 bool (*stop)(void *), bg_error *err)
{
    bg_status st = BG_OK;
    for (int i = 0; !st && i < r->n; i++)
        st = bg_ranks_wait_ready(r->list[i].ranks, progress, ctx, stop, err);
    return st;
}

void bg_replicas_kill(bg_replicas *r)
{
    for (int i = 0; r && i < r->n; i++) {
        bg_ranks_stop(r->list[i].ranks);
        r->list[i].ranks = NULL;
    }
}

uint64_t bg_replicas_memory(const bg_replicas *r)
{
    uint64_t sum = 0;
    for (int i = 0; i < r->n; i++)
        sum += bg_ranks_memory(r->list[i].ranks);
    return sum;
}

/* ---- engines --------------------------------------------------------------------------------- */

static bool give(void *p, const bg_seq_spec *spec)
{
    uint64_t seq;
    bg_error err = {0};
    return bg_replicas_submit(p, spec, &seq, &err) == BG_OK;
}

static void on_failed(void *p, bg_engine *e)
{
    replica *one = p;
    bg_replicas *r = one->all;
    bg_error err = {0};
    bg_engine_error(e, &err);
    bool handed_over = bg_engine_hand_over(e, give, r);
    if (handed_over)
        bg_log_at(r->log, BG_LOG_ERROR,
                  "replica %d is given up, the others go on with its sequences: %s",
                  (int)(one - r->list), err.text);
    pthread_mutex_lock(&r->lock);
    one->end = handed_over ? HANDED_OVER : LOST;
    r->n_ended++;
    pthread_cond_broadcast(&r->changed);
    pthread_mutex_unlock(&r->lock);
}

bg_status bg_replicas_open(bg_replicas *r, const bg_engine_config *c, bg_error *err)
{
    bg_status st = BG_OK;
    for (int i = 0; i < r->n && !st; i++) {
        bg_engine_config own = *c;
        own.id_first = (uint64_t)i + 1;
        own.id_step = (uint64_t)r->n;
        own.on_failed = r->n > 1 ? on_failed : NULL;
        own.failed_ctx = &r->list[i];
        st = bg_engine_new(&r->list[i].engine, r->list[i].ranks, &own, err);
    }
    return st;
}

static bool is_stopping(bg_replicas *r)
{
    pthread_mutex_lock(&r->lock);
    bool stopping = r->stopping;
    pthread_mutex_unlock(&r->lock);
    return stopping;
}

/* The engine with the least to do of those that live and have room; NULL: none, and *any says
 * whether one lives. */
static bg_engine *least_loaded(bg_replicas *r, bool *any)
{
    bg_engine *best = NULL;
    int64_t least = 0;
    *any = false;
    for (int i = 0; i < r->n; i++) {
        const bg_engine_room room = bg_engine_look(r->list[i].engine);
        if (room.failed) continue;
        *any = true;
        if (room.full || (best && room.load >= least)) continue;
        best = r->list[i].engine;
        least = room.load;
    }
    return best;
}

static void wait_a_little(bg_replicas *r)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    t.tv_nsec += WAIT_NS;
    t.tv_sec += t.tv_nsec / 1000000000;
    t.tv_nsec %= 1000000000;
    pthread_mutex_lock(&r->lock);
    if (!r->stopping) pthread_cond_timedwait(&r->changed, &r->lock, &t);
    pthread_mutex_unlock(&r->lock);
}

bg_status bg_replicas_submit(bg_replicas *r, const bg_seq_spec *spec, uint64_t *seq, bg_error *err)
{
    if (r->n == 1) return bg_engine_submit(r->list[0].engine, spec, seq, err);
    for (;;) {
        bool any;
        bg_error failure = {0};
        if (is_stopping(r)) return bg_fail(err, BG_BUSY, "the engines are stopping");
        bg_engine *e = least_loaded(r, &any);
        if (!any) return bg_engine_error(r->list[r->n - 1].engine, err);
        if (!e) { /* not inside one engine: another may have room sooner */
            wait_a_little(r);
            continue;
        }
        bg_status st = bg_engine_submit(e, spec, seq, &failure);
        bg_error engine_failure = {0};
        if (st && bg_engine_error(e, &engine_failure)) continue; /* it failed just now */
        if (st) *err = failure;
        return st;
    }
}

void bg_replicas_cancel(bg_replicas *r, uint64_t seq)
{
    bg_engine_cancel(r->list[(seq - 1) % (uint64_t)r->n].engine, seq);
}

static void say_stopping(bg_replicas *r)
{
    pthread_mutex_lock(&r->lock);
    r->stopping = true;
    pthread_cond_broadcast(&r->changed);
    pthread_mutex_unlock(&r->lock);
}

void bg_replicas_wind_down(bg_replicas *r)
{
    say_stopping(r);
    for (int i = 0; i < r->n; i++)
        bg_engine_wind_down(r->list[i].engine);
}

/* A failed engine: waits until its sequences are with others, or nowhere. */
static bool handed_over(bg_replicas *r, int i)
{
    if (r->n == 1) return false;
    pthread_mutex_lock(&r->lock);
    while (r->list[i].end == RUNS)
        pthread_cond_wait(&r->changed, &r->lock);
    bool good = r->list[i].end == HANDED_OVER;
    pthread_mutex_unlock(&r->lock);
    return good;
}

static int n_ended(bg_replicas *r)
{
    pthread_mutex_lock(&r->lock);
    int n = r->n_ended;
    pthread_mutex_unlock(&r->lock);
    return n;
}

/* All are waited for, also after a failure: what they have is paid for. Once more if one failed
 * meanwhile: its sequences may have gone to one already found empty. */
bg_status bg_replicas_drain(bg_replicas *r, bg_error *err)
{
    for (;;) {
        const int before = n_ended(r);
        bg_status st = BG_OK;
        for (int i = 0; i < r->n; i++) {
            bg_error own = {0};
            bg_status s = bg_engine_drain(r->list[i].engine, &own);
            bg_error failure = {0};
            if (s && bg_engine_error(r->list[i].engine, &failure) && handed_over(r, i)) continue;
            if (!s || st) continue;
            st = s;
            if (!err->status) *err = own;
        }
        if (st || n_ended(r) == before) return st;
    }
}

void bg_replicas_stop(bg_replicas *r)
{
    say_stopping(r);
    for (int i = 0; i < r->n; i++)
        if (r->list[i].engine) bg_engine_ask_stop(r->list[i].engine);
    for (int i = 0; i < r->n; i++)
        if (r->list[i].engine) bg_engine_stop(r->list[i].engine);
}

void bg_replicas_get_stats(bg_replicas *r, bg_engine_stats *s)
{
    *s = (bg_engine_stats){0};
    for (int i = 0; i < r->n && r->list[i].engine; i++) {
        bg_engine_stats one;
        bg_engine_get_stats(r->list[i].engine, &one);
        s->steps += one.steps;
        s->prefill_steps += one.prefill_steps;
        s->decode_steps += one.decode_steps;
        s->prompt_tokens += one.prompt_tokens;
        s->cached_tokens += one.cached_tokens;
        s->output_tokens += one.output_tokens;
        s->recomputed_tokens += one.recomputed_tokens;
        s->preemptions += one.preemptions;
        s->restarts += one.restarts;
        s->n_running += one.n_running;
        s->n_waiting += one.n_waiting;
        s->blocks_free += one.blocks_free;
        s->blocks_total += one.blocks_total;
        s->device_work_ns += one.device_work_ns;
        s->device_idle_ns += one.device_idle_ns;
        if (one.busy_ns > s->busy_ns) s->busy_ns = one.busy_ns;
    }
}

void bg_replicas_free(bg_replicas *r)
{
    if (!r) return;
    bg_replicas_stop(r); /* all of them, before the first is gone: one may hand over to another */
    for (int i = 0; i < r->n; i++)
        bg_engine_free(r->list[i].engine);
    bg_replicas_kill(r);
    pthread_mutex_destroy(&r->lock);
    pthread_cond_destroy(&r->changed);
    free(r);
}
