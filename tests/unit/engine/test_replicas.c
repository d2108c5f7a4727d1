/* Several engines on one queue: whatever replica computes a sequence, also one that takes over what
 * another began, its tokens are those that the fake says to it alone. */
#include "engine/engine.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include <criterion/criterion.h>

#include "unit/engine/fake_rank.h"

enum { MAX_LEN = 128, N_SEQS = 150, MAX_REPLICAS = 4 };

typedef struct seq_case {
    bg_seq_spec spec;
    int32_t prompt[MAX_LEN], want[MAX_LEN], got[MAX_LEN];
    int n_want, n_got, n_last, cancel_after;
    bg_finish want_finish, finish;
    uint64_t id; /* of its last event */
} seq_case;

typedef struct job {
    bg_replicas *replicas;
    bg_rank_config configs[MAX_REPLICAS];
    int n;
    pthread_mutex_t lock;
    seq_case cases[N_SEQS];
} job;

static void on_events(void *ctx, const bg_token_event *ev, int n)
{
    job *j = ctx;
    pthread_mutex_lock(&j->lock);
    for (int i = 0; i < n; i++) {
        seq_case *c = ev[i].user;
        if (ev[i].has_token && c->n_got < MAX_LEN) c->got[c->n_got++] = ev[i].sampled.token;
        if (ev[i].finish != BG_FINISH_NONE) {
            c->n_last++;
            c->finish = ev[i].finish;
        }
        c->id = ev[i].seq;
        if (c->cancel_after && c->n_got == c->cancel_after)
            bg_replicas_cancel(j->replicas, ev[i].seq);
    }
    pthread_mutex_unlock(&j->lock);
}

/* fakes: what is said to each replica; NULL ends the list. */
static void start(job *j, const char *const *fakes, int window, int max_restarts)
{
    bg_error err = {0};
    memset(j, 0, sizeof *j);
    pthread_mutex_init(&j->lock, NULL);
    for (; fakes[j->n]; j->n++)
        j->configs[j->n] = (bg_rank_config){.model_path = fakes[j->n],
                                            .tp = 1 + j->n % 2,
                                            .n_blocks = 64,
                                            .block_tokens = 8,
                                            .max_num_seqs = 6,
                                            .max_step_tokens = 32,
                                            .max_model_len = MAX_LEN};
    cr_assert_eq(bg_replicas_start(&j->replicas, j->configs, j->n, &fake_ops, NULL, &err), BG_OK,
                 "%s", err.text);
    cr_assert_eq(bg_replicas_wait_ready(j->replicas, NULL, NULL, NULL, &err), BG_OK, "%s",
                 err.text);
    static const int32_t eog[] = {FAKE_EOG};
    const bg_engine_config c = {.prefix_cache = true,
                                .window = window,
                                .max_batched_tokens = 32,
                                .max_restarts = max_restarts,
                                .eog = eog,
                                .n_eog = 1,
                                .on_events = on_events,
                                .ctx = j};
    cr_assert_eq(bg_replicas_open(j->replicas, &c, &err), BG_OK, "%s", err.text);
}

static void make_cases(job *j)
{
    uint64_t rng = 7;
    for (int i = 0; i < N_SEQS; i++) {
        seq_case *c = &j->cases[i];
        const int n = 1 + (int)(bg_mix64(++rng) % 40);
        for (int k = 0; k < n; k++)
            c->prompt[k] = (int32_t)(bg_mix64(k < 10 ? (uint64_t)k : ++rng) % FAKE_VOCAB);
        c->spec = (bg_seq_spec){.user = c,
                                .order = i,
                                .prompt = c->prompt,
                                .n_prompt = n,
                                .max_tokens = 1 + (int)(bg_mix64(++rng) % 60),
                                .sampling = {.seed = bg_mix64(++rng), .n_logprobs = -1}};
        c->n_want = fake_expect(&c->spec, MAX_LEN, c->want, &c->want_finish);
    }
}

static bg_status submit_all(job *j, bg_error *err)
{
    bg_status st = BG_OK;
    for (int i = 0; i < N_SEQS && !st; i++) {
        uint64_t id;
        st = bg_replicas_submit(j->replicas, &j->cases[i].spec, &id, err);
    }
    return st;
}

static void check_all(const job *j)
{
    for (int i = 0; i < N_SEQS; i++) {
        const seq_case *c = &j->cases[i];
        cr_assert_eq(c->n_last, 1, "sequence %d: %d ends", i, c->n_last);
        cr_assert_eq(c->finish, c->want_finish, "sequence %d: ended by %d", i, c->finish);
        cr_assert_eq(c->n_got, c->n_want, "sequence %d: %d of %d tokens", i, c->n_got, c->n_want);
        cr_assert_eq(memcmp(c->got, c->want, (size_t)c->n_got * sizeof *c->got), 0);
    }
}

static void run(const char *const *fakes, int window, int max_restarts, bool *used)
{
    static job j;
    bg_error err = {0};
    start(&j, fakes, window, max_restarts);
    make_cases(&j);
    cr_assert_eq(submit_all(&j, &err), BG_OK, "%s", err.text);
    cr_assert_eq(bg_replicas_drain(j.replicas, &err), BG_OK, "%s", err.text);
    check_all(&j);
    for (int i = 0; i < N_SEQS; i++)
        used[(j.cases[i].id - 1) % (uint64_t)j.n] = true;
    bg_engine_stats s;
    bg_replicas_get_stats(j.replicas, &s);
    cr_assert_eq(s.n_running + s.n_waiting, 0);
    bg_replicas_free(j.replicas);
}

Test(replicas, share_the_queue)
{
    bool used[MAX_REPLICAS] = {0};
    run((const char *const[]){"", "", "", NULL}, 4, 3, used);
    cr_assert(used[0] && used[1] && used[2]);
}

Test(replicas, one_alone_is_an_engine)
{
    bool used[MAX_REPLICAS] = {0};
    run((const char *const[]){"", NULL}, 1000, 3, used);
}

Test(replicas, ranks_that_die_are_started_again)
{
    bool used[MAX_REPLICAS] = {0};
    run((const char *const[]){"die_step=40", "fail_rank=0 fail_step=30", NULL}, 16, 3, used);
    cr_assert(used[0] && used[1]);
}

/* max_restarts 1: the first death is the last. Its sequences have some tokens by then; the shortest
 * may have ended before. */
Test(replicas, others_take_over)
{
    bool used[MAX_REPLICAS] = {0};
    run((const char *const[]){"", "fail_rank=0 fail_step=25", "die_step=10", NULL}, 1000, 1, used);
    cr_assert(used[0]);
}

Test(replicas, others_take_over_with_small_windows)
{
    bool used[MAX_REPLICAS] = {0};
    run((const char *const[]){"fail_rank=0 fail_step=15", "", NULL}, 2, 1, used);
}

Test(replicas, none_left)
{
    static job j;
    bg_error err = {0}, drain_err = {0};
    start(&j, (const char *const[]){"die_step=10", "fail_rank=0 fail_step=30", NULL}, 1000, 1);
    make_cases(&j);
    bg_status st = submit_all(&j, &err);
    cr_assert(st == BG_OK || st == BG_DEVICE, "%s", err.text);
    cr_assert_eq(bg_replicas_drain(j.replicas, &drain_err), BG_DEVICE);
    bg_replicas_free(j.replicas);
}

Test(replicas, cancel_finds_the_engine)
{
    static job j;
    bg_error err = {0};
    start(&j, (const char *const[]){"", "", NULL}, 1000, 3);
    make_cases(&j);
    for (int i = 0; i < N_SEQS; i++)
        j.cases[i].cancel_after = j.cases[i].n_want > 30 ? 2 : 0;
    cr_assert_eq(submit_all(&j, &err), BG_OK, "%s", err.text);
    cr_assert_eq(bg_replicas_drain(j.replicas, &err), BG_OK, "%s", err.text);
    for (int i = 0; i < N_SEQS; i++) {
        const seq_case *c = &j.cases[i];
        cr_assert_eq(c->n_last, 1);
        if (c->cancel_after) cr_assert(c->finish == BG_FINISH_CANCEL && c->n_got < c->n_want);
    }
    bg_replicas_free(j.replicas);
}

/* A submitter that waits for room gives up; nobody has to be asked twice. */
static void *stopper(void *p)
{
    job *j = p;
    bool begun = false;
    while (!begun) {
        pthread_mutex_lock(&j->lock);
        for (int i = 0; i < N_SEQS; i++)
            begun = begun || j->cases[i].n_got > 0;
        pthread_mutex_unlock(&j->lock);
    }
    bg_replicas_wind_down(j->replicas);
    return NULL;
}

Test(replicas, wind_down_wakes_a_submitter)
{
    static job j;
    bg_error err = {0};
    pthread_t t;
    start(&j, (const char *const[]){"", "", NULL}, 1, 3);
    make_cases(&j);
    cr_assert_eq(pthread_create(&t, NULL, stopper, &j), 0);
    bg_status st = submit_all(&j, &err);
    cr_assert(st == BG_BUSY || st == BG_OK, "%s", err.text);
    pthread_join(t, NULL);
    err = (bg_error){0};
    cr_assert_eq(bg_replicas_drain(j.replicas, &err), BG_OK, "%s", err.text);
    bg_replicas_free(j.replicas);
}
