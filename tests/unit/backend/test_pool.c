#include <criterion/criterion.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "backend/cpu/pool.h"

enum { MAX_THREADS = 5, N = 1000 };

struct ctx {
    bg_pool *pool;
    atomic_int seen[MAX_THREADS];
    atomic_int given[N];
    int plain[MAX_THREADS]; /* not atomic: the barrier alone orders its readers and writers */
    int n_wrong[MAX_THREADS];
};

static bg_pool *make(int n, int first_cpu)
{
    bg_error err = {0};
    bg_pool *p = NULL;
    cr_assert_eq(bg_pool_new(&p, n, first_cpu, &err), BG_OK, "%s", err.text);
    cr_assert_eq(bg_pool_threads(p), n);
    return p;
}

static void count(void *ctx, int i, int n)
{
    struct ctx *c = ctx;
    cr_assert_eq(n, bg_pool_threads(c->pool));
    atomic_fetch_add(&c->seen[i], 1);
}

Test(pool, every_thread_runs_once_in_each_run)
{
    for (int n = 1; n <= MAX_THREADS; n++) {
        struct ctx c = {.pool = make(n, -1)};
        for (int run = 1; run <= 200; run++) {
            bg_pool_run(c.pool, count, &c);
            for (int i = 0; i < MAX_THREADS; i++)
                cr_assert_eq(atomic_load(&c.seen[i]), i < n ? run : 0);
        }
        bg_pool_free(c.pool);
    }
}

static void barriers(void *ctx, int i, int n)
{
    struct ctx *c = ctx;
    for (int round = 1; round <= 100; round++) {
        c->plain[i] = round;
        bg_pool_barrier(c->pool);
        for (int j = 0; j < n; j++)
            c->n_wrong[i] += c->plain[j] != round;
        bg_pool_barrier(c->pool);
    }
}

Test(pool, nobody_passes_a_barrier_early)
{
    for (int n = 1; n <= MAX_THREADS; n++) {
        struct ctx c = {.pool = make(n, -1)};
        bg_pool_run(c.pool, barriers, &c);
        bg_pool_run(c.pool, barriers, &c);
        for (int i = 0; i < n; i++)
            cr_expect_eq(c.n_wrong[i], 0, "thread %d of %d", i, n);
        bg_pool_free(c.pool);
    }
}

static void take(void *ctx, int i, int n)
{
    (void)i, (void)n;
    struct ctx *c = ctx;
    for (int k; (k = bg_pool_next(c->pool)) < N;)
        atomic_fetch_add(&c->given[k], 1);
    bg_pool_barrier_reset(c->pool);
    for (int k; (k = bg_pool_next(c->pool)) < N;)
        atomic_fetch_add(&c->given[k], 1);
}

Test(pool, every_index_is_given_once)
{
    for (int n = 1; n <= MAX_THREADS; n++) {
        struct ctx c = {.pool = make(n, -1)};
        for (int run = 1; run <= 3; run++) {
            bg_pool_run(c.pool, take, &c);
            for (int k = 0; k < N; k++)
                cr_assert_eq(atomic_load(&c.given[k]), 2 * run, "index %d", k);
        }
        bg_pool_free(c.pool);
    }
}

Test(pool, pinned_threads_run_too)
{
    struct ctx c = {.pool = make(3, 0)}; /* the third processor may not exist */
    bg_pool_run(c.pool, count, &c);
    for (int i = 0; i < 3; i++)
        cr_expect_eq(atomic_load(&c.seen[i]), 1);
    bg_pool_free(c.pool);
}

Test(pool, refuses_no_threads)
{
    bg_error err = {0};
    bg_pool *p = (bg_pool *)&err;
    cr_expect_eq(bg_pool_new(&p, 0, -1, &err), BG_ARG);
    cr_expect_null(p);
    bg_pool_free(NULL);
}
