#include "backend/cpu/pool.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
    LINE = 64,
    SPINS = 4000, /* looks before a sleep, some 50 us or more: longer than the gap between ops */
    SPINS_CROWDED = 20, /* more threads than processors: the awaited one may need this very core */
    YIELD_AFTER = 400,  /* looks without giving way: most waits end here */
    YIELD_EVERY = 32, /* then now and again, as the awaited thread may share this core after all */
};

/* A word that threads wait for. `sleepers` lets the side that changes it skip the system call. */
typedef struct gate {
    _Alignas(LINE) _Atomic uint32_t word;
    _Atomic uint32_t sleepers;
} gate;

struct worker {
    bg_pool *pool;
    pthread_t thread;
    int index;
};

struct bg_pool {
    gate run;     /* counts runs; workers wait for the next */
    gate running; /* workers still inside this run; the caller waits for 0 */
    gate barrier; /* counts barriers passed */
    _Alignas(LINE) _Atomic uint32_t arrived; /* at the barrier under way */
    _Alignas(LINE) _Atomic int next;         /* dynamic work */
    _Alignas(LINE) int n_threads;
    int n_started; /* workers that exist */
    int spins;
    bool stop;
    void (*fn)(void *ctx, int thread, int n_threads);
    void *ctx;
    struct worker *workers;
    cpu_set_t caller_cpus; /* the caller's processors before it was pinned */
    bool caller_pinned;
};

static void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

/* Returns once g's word differs from `old`. */
static uint32_t gate_wait(gate *g, uint32_t old, int spins)
{
    uint32_t now;
    for (int i = 0; i < spins; i++) {
        now = atomic_load_explicit(&g->word, memory_order_acquire);
        if (now != old) return now;
        if (i >= YIELD_AFTER && i % YIELD_EVERY == 0)
            sched_yield();
        else
            relax();
    }
    /* Announce first, then let the kernel compare: whoever changes the word afterwards sees us. */
    atomic_fetch_add(&g->sleepers, 1);
    while ((now = atomic_load(&g->word)) == old)
        syscall(SYS_futex, &g->word, FUTEX_WAIT_PRIVATE, old, NULL, NULL, 0);
    atomic_fetch_sub(&g->sleepers, 1);
    return now;
}

/* To be called after the word was changed with memory_order_seq_cst. */
static void gate_wake(gate *g)
{
    if (atomic_load(&g->sleepers))
        syscall(SYS_futex, &g->word, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
}

static void *work(void *arg)
{
    struct worker *w = arg;
    bg_pool *p = w->pool;
    for (uint32_t seen = 0;;) {
        seen = gate_wait(&p->run, seen, p->spins);
        if (p->stop) return NULL;
        p->fn(p->ctx, w->index, p->n_threads);
        /* The last one out wakes the caller; it may start the next run at once, so nothing of this
         * run is touched after the count. */
        if (atomic_fetch_sub(&p->running.word, 1) == 1) gate_wake(&p->running);
    }
}

void bg_pool_run(bg_pool *p, void (*fn)(void *ctx, int thread, int n_threads), void *ctx)
{
    atomic_store_explicit(&p->next, 0, memory_order_relaxed);
    if (p->n_threads == 1) {
        fn(ctx, 0, 1);
        return;
    }
    p->fn = fn;
    p->ctx = ctx;
    atomic_store_explicit(&p->running.word, (uint32_t)p->n_threads - 1, memory_order_relaxed);
    atomic_fetch_add(&p->run.word, 1);
    gate_wake(&p->run);
    fn(ctx, 0, p->n_threads);
    uint32_t left = atomic_load_explicit(&p->running.word, memory_order_acquire);
    while (left)
        left = gate_wait(&p->running, left, p->spins);
}

static void barrier(bg_pool *p, bool reset)
{
    if (p->n_threads == 1) {
        if (reset) atomic_store_explicit(&p->next, 0, memory_order_relaxed);
        return;
    }
    const uint32_t seen = atomic_load_explicit(&p->barrier.word, memory_order_relaxed);
    if (atomic_fetch_add(&p->arrived, 1) + 1 == (uint32_t)p->n_threads) {
        atomic_store_explicit(&p->arrived, 0, memory_order_relaxed);
        if (reset) atomic_store_explicit(&p->next, 0, memory_order_relaxed);
        atomic_fetch_add(&p->barrier.word, 1);
        gate_wake(&p->barrier);
    } else {
        gate_wait(&p->barrier, seen, p->spins);
    }
}

void bg_pool_barrier(bg_pool *p)
{
    barrier(p, false);
}

void bg_pool_barrier_reset(bg_pool *p)
{
    barrier(p, true);
}

int bg_pool_next(bg_pool *p)
{
    return atomic_fetch_add_explicit(&p->next, 1, memory_order_relaxed);
}

int bg_pool_threads(const bg_pool *p)
{
    return p->n_threads;
}

static void pin(pthread_t thread, int cpu, const cpu_set_t *allowed)
{
    if (cpu >= CPU_SETSIZE || !CPU_ISSET(cpu, allowed)) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    pthread_setaffinity_np(thread, sizeof set, &set);
}

bg_status bg_pool_new(bg_pool **pool, int n_threads, int first_cpu, bg_error *err)
{
    bg_status st = BG_OK;
    *pool = NULL;
    if (n_threads < 1) return bg_fail(err, BG_ARG, "%d threads: at least 1 is needed", n_threads);
    bg_pool *p = aligned_alloc(LINE, sizeof *p);
    if (!p) return bg_fail(err, BG_NOMEM, "%d threads: out of memory", n_threads);
    memset(p, 0, sizeof *p);
    p->n_threads = n_threads;
    p->workers = calloc((size_t)n_threads, sizeof *p->workers);
    if (!p->workers) {
        st = bg_fail(err, BG_NOMEM, "%d threads: out of memory", n_threads);
        goto out;
    }
    cpu_set_t allowed;
    CPU_ZERO(&allowed);
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) first_cpu = -1;
    p->spins = n_threads <= CPU_COUNT(&allowed) ? SPINS : SPINS_CROWDED;
    for (int i = 1; i < n_threads; i++) {
        struct worker *w = &p->workers[i];
        w->pool = p;
        w->index = i;
        const int e = pthread_create(&w->thread, NULL, work, w);
        if (e) {
            errno = e;
            st = bg_fail_os(err, "cannot start compute thread %d of %d", i, n_threads);
            goto out;
        }
        p->n_started++;
        if (first_cpu >= 0) pin(w->thread, first_cpu + i, &allowed);
    }
    if (first_cpu >= 0) { /* after the workers, which would inherit it */
        p->caller_cpus = allowed;
        p->caller_pinned = true;
        pin(pthread_self(), first_cpu, &allowed);
    }
    *pool = p;
    p = NULL;
out:
    bg_pool_free(p);
    return st;
}

void bg_pool_free(bg_pool *p)
{
    if (!p) return;
    p->stop = true;
    atomic_fetch_add(&p->run.word, 1);
    gate_wake(&p->run);
    for (int i = 1; i <= p->n_started; i++)
        pthread_join(p->workers[i].thread, NULL);
    if (p->caller_pinned)
        pthread_setaffinity_np(pthread_self(), sizeof p->caller_cpus, &p->caller_cpus);
    free(p->workers);
    free(p);
}
