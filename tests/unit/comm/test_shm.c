/* The shared-memory communicator: sums in rank order with the same bits on every rank, gathers,
 * pieces, barriers, abort; between threads (for the thread sanitizer) and between processes. */
#include "comm/comm.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <criterion/criterion.h>

#include "base/rng.h"

enum { MAX_RANKS = 8, MAX_N = 40000 };

/* Values of very different size, so that another order of addition gives other bits. */
static float value_of(int rank, int round, size_t i)
{
    uint64_t h = bg_mix64((uint64_t)rank << 48 ^ (uint64_t)round << 32 ^ i);
    float v = (float)(int32_t)(uint32_t)h;
    return h >> 40 & 1 ? v * 1e-9f : v;
}

typedef struct job {
    void *memory;
    int rank, n_ranks;
    size_t max_floats;
    int rounds;
    bool slow; /* one rank dawdles, so that others sleep */
} job;

static const size_t sizes[] = {1, 5, 64, 65, 1000, 4096, 8191, 8192, 20011, MAX_N};

/* Everything a rank does; 0 or the number of the first check that failed. */
static int work(const job *j)
{
    bg_error err = {0};
    bg_comm *c = NULL;
    int bad = 0;
    float *x = malloc(MAX_N * sizeof *x), *all = malloc(MAX_N * MAX_RANKS * sizeof *all);
    if (bg_comm_shm_join(&c, j->memory, j->rank, j->n_ranks, j->max_floats, &err)) return 1;
    if (bg_comm_rank(c) != j->rank || bg_comm_size(c) != j->n_ranks) bad = 2;
    for (int round = 0; !bad && round < j->rounds; round++) {
        const size_t n = sizes[(size_t)round % (sizeof sizes / sizeof *sizes)];
        for (size_t i = 0; i < n; i++)
            x[i] = value_of(j->rank, round, i);
        if (j->slow && j->rank == round % j->n_ranks && round % 7 == 0) {
            volatile unsigned spin = 0;
            while (spin < 3000000)
                spin++;
        }
        if (bg_comm_all_gather(c, x, n, all, &err)) bad = 3;
        for (int r = 0; !bad && r < j->n_ranks; r++)
            for (size_t i = 0; !bad && i < n; i++)
                if (all[(size_t)r * n + i] != value_of(r, round, i)) bad = 4;
        if (!bad && bg_comm_all_reduce(c, x, n, &err)) bad = 5;
        for (size_t i = 0; !bad && i < n; i++) {
            float want = value_of(0, round, i);
            for (int r = 1; r < j->n_ranks; r++)
                want += value_of(r, round, i);
            if (memcmp(&want, &x[i], sizeof want) != 0) bad = 6;
        }
        if (!bad && round % 3 == 0 && bg_comm_barrier(c, &err)) bad = 7;
    }
    bg_comm_free(c);
    free(x);
    free(all);
    return bad;
}

static void *work_thread(void *arg)
{
    return (void *)(intptr_t)work(arg);
}

static void *shared(size_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    cr_assert_neq(p, MAP_FAILED);
    return p;
}

static void run_threads(int n_ranks, size_t max_floats, int rounds, bool slow)
{
    pthread_t t[MAX_RANKS];
    job j[MAX_RANKS];
    void *memory = shared(bg_comm_shm_bytes(n_ranks, max_floats));
    for (int r = 0; r < n_ranks; r++) {
        j[r] = (job){memory, r, n_ranks, max_floats, rounds, slow};
        cr_assert_eq(pthread_create(&t[r], NULL, work_thread, &j[r]), 0);
    }
    for (int r = 0; r < n_ranks; r++) {
        void *bad;
        pthread_join(t[r], &bad);
        cr_expect_null(bad, "%d threads, slots of %zu: rank %d failed check %d", n_ranks,
                       max_floats, r, (int)(intptr_t)bad);
    }
}

static void run_processes(int n_ranks, size_t max_floats, int rounds)
{
    pid_t pid[MAX_RANKS];
    void *memory = shared(bg_comm_shm_bytes(n_ranks, max_floats));
    for (int r = 0; r < n_ranks; r++) {
        pid[r] = fork();
        cr_assert_geq(pid[r], 0);
        if (!pid[r]) _exit(work(&(job){memory, r, n_ranks, max_floats, rounds, true}));
    }
    for (int r = 0; r < n_ranks; r++) {
        int status;
        cr_assert_eq(waitpid(pid[r], &status, 0), pid[r]);
        cr_expect(WIFEXITED(status) && WEXITSTATUS(status) == 0,
                  "%d processes, slots of %zu: rank %d ended with %#x", n_ranks, max_floats, r,
                  status);
    }
}

Test(shm, threads)
{
    run_threads(1, 100, 20, false);
    run_threads(2, MAX_N, 20, true);
    run_threads(3, 20000, 20, true);
}

Test(shm, threads_with_pieces)
{
    run_threads(2, 16, 8, false);
    run_threads(4, 9000, 20, false);
}

Test(shm, processes)
{
    run_processes(2, MAX_N, 20);
    run_processes(3, 12345, 20);
    run_processes(4, MAX_N, 20);
    run_processes(8, MAX_N, 10);
}

/* ---- abort ------------------------------------------------------------------------------------
 */

typedef struct stuck {
    job j;
    _Atomic int *started;
    bg_status st, later;
} stuck;

static void *get_stuck(void *arg)
{
    stuck *s = arg;
    bg_error err = {0};
    bg_comm *c = NULL;
    float x[4] = {0};
    s->st = bg_comm_shm_join(&c, s->j.memory, s->j.rank, s->j.n_ranks, s->j.max_floats, &err);
    atomic_fetch_add(s->started, 1);
    if (!s->st) s->st = bg_comm_all_reduce(c, x, 4, &err);
    s->later = bg_comm_barrier(c, &err);
    bg_comm_free(c);
    return NULL;
}

Test(shm, abort_ends_waiting_and_later_operations, .timeout = 20)
{
    for (int round = 0; round < 50; round++) { /* asleep, spinning or not yet there */
        void *memory = shared(bg_comm_shm_bytes(3, 16));
        _Atomic int started = 0;
        stuck s[2];
        pthread_t t[2];
        for (int r = 0; r < 2; r++) {
            s[r] = (stuck){{memory, r, 3, 16, 0, false}, &started, BG_OK, BG_OK};
            cr_assert_eq(pthread_create(&t[r], NULL, get_stuck, &s[r]), 0);
        }
        while (atomic_load(&started) < round % 3)
            ;
        bg_comm_shm_abort(memory);
        for (int r = 0; r < 2; r++) {
            pthread_join(t[r], NULL);
            cr_expect_eq(s[r].st, BG_DEVICE);
            cr_expect_eq(s[r].later, BG_DEVICE);
        }
        munmap(memory, bg_comm_shm_bytes(3, 16));
    }
}

Test(shm, refuses_nonsense)
{
    bg_error err = {0};
    bg_comm *c = NULL;
    void *memory = shared(bg_comm_shm_bytes(2, 16));
    cr_expect_eq(bg_comm_shm_join(&c, memory, 2, 2, 16, &err), BG_ARG);
    cr_expect_null(c);
    err = (bg_error){0};
    cr_expect_eq(bg_comm_shm_join(&c, memory, -1, 2, 16, &err), BG_ARG);
    err = (bg_error){0};
    cr_expect_eq(bg_comm_shm_join(&c, memory, 0, 0, 16, &err), BG_ARG);
    err = (bg_error){0};
    cr_expect_eq(bg_comm_shm_join(&c, memory, 0, 2, 0, &err), BG_ARG);
    err = (bg_error){0};
    cr_expect_eq(bg_comm_shm_join(&c, (char *)memory + 4, 0, 2, 16, &err), BG_ARG);
}

/* One rank of four by itself: values stay, a gather has them four times, nobody is waited for. */
Test(shm, stand_in)
{
    bg_error err = {0};
    bg_comm *c = NULL;
    float x[5] = {1, 2, 3, 4, 5}, all[20];
    cr_assert_eq(bg_comm_standin_new(&c, 4, 4, 0, &err), BG_ARG);
    cr_assert_null(c);
    err = (bg_error){0};
    cr_assert_eq(bg_comm_standin_new(&c, 2, 4, 1000, &err), BG_OK, "%s", err.text);
    cr_assert_eq(bg_comm_rank(c), 2);
    cr_assert_eq(bg_comm_size(c), 4);
    cr_assert_eq(bg_comm_standin_ns(c), 1000);
    cr_assert_eq(bg_comm_all_reduce(c, x, 5, &err), BG_OK);
    cr_assert_eq(bg_comm_all_gather(c, x, 5, all, &err), BG_OK);
    cr_assert_eq(bg_comm_barrier(c, &err), BG_OK);
    for (int i = 0; i < 20; i++)
        cr_assert_eq(all[i], (float)(i % 5 + 1));
    bg_comm_free(c);
}
