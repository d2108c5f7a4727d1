/* The whole engine over ranks with a fake model: whatever shares a batch, is preempted, cancelled
 * or killed, each sequence's tokens are those that the fake says to it alone. */
#include "engine/engine.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <criterion/criterion.h>

#include "engine/engine_internal.h"
#include "engine/workers.h"
#include "unit/engine/fake_rank.h"

enum { MAX_LEN = 256 };

typedef struct setup {
    int tp, n_blocks, block_tokens, max_num_seqs, max_batched_tokens, window, depth;
    bool prefix_cache, threads, greedy;
    const char *fake;
    int max_restarts;
    int64_t hang_ns;
    uint64_t seed;
    int n_seqs, max_tokens;
    int cancel_percent, regain_percent;
    int kill_every; /* events; 0: never. Negative: stop (SIGSTOP) instead of kill, once */
} setup;

typedef struct job job;

typedef struct seq_case {
    job *j;
    bg_seq_spec spec;
    int32_t prompt[MAX_LEN], want[MAX_LEN], got[MAX_LEN], stop_ids[3];
    int n_want, n_got, n_regained;
    int cancel_after; /* tokens of output; 0: never */
    bool cancel_sent;
    bg_finish finish, got_finish;
    int n_last; /* events with a finish */
    uint64_t id;
} seq_case;

struct job {
    const setup *s;
    bg_ranks *ranks;
    bg_engine *engine;
    seq_case *cases;
    uint64_t n_events, next_kill, rng;
    int n_kills;
    atomic_bool *gate; /* not NULL: the sink waits until it is open */
};

static uint64_t roll(uint64_t *rng, uint64_t n)
{
    return bg_mix64(++*rng) % n;
}

static void on_events(void *ctx, const bg_token_event *ev, int n)
{
    job *j = ctx;
    while (j->gate && !atomic_load(j->gate))
        sched_yield();
    for (int i = 0; i < n; i++) {
        seq_case *c = ev[i].user;
        j->n_events++;
        if (ev[i].has_token) {
            c->got[c->n_got++] = ev[i].sampled.token;
            if (c->spec.sampling.n_logprobs > 0 &&
                (ev[i].sampled.n_top != c->spec.sampling.n_logprobs ||
                 ev[i].sampled.top[0].token != ev[i].sampled.token))
                c->n_last += 1000;
        }
        if (ev[i].finish != BG_FINISH_NONE) {
            c->n_last++;
            c->got_finish = ev[i].finish;
        }
        if (c->cancel_after && c->n_got >= c->cancel_after && !c->cancel_sent) {
            c->cancel_sent = true;
            bg_engine_cancel(j->engine, ev[i].seq);
        }
    }
    if (j->s->kill_every && j->n_events >= j->next_kill) {
        pid_t pid = bg_ranks_pid(j->ranks, (int)roll(&j->rng, (uint64_t)j->s->tp));
        if (pid > 0 && (j->s->kill_every > 0 || j->n_kills == 0)) {
            kill(pid, j->s->kill_every > 0 ? SIGKILL : SIGSTOP);
            j->n_kills++;
        }
        j->next_kill = j->n_events + 1 + roll(&j->rng, (uint64_t)abs(j->s->kill_every));
    }
}

static void make_case(job *j, seq_case *c, int i)
{
    uint64_t *rng = &j->rng;
    int n = 1 + (int)roll(rng, 8), max = j->s->max_tokens;
    if (roll(rng, 3) == 0) n = 1 + (int)roll(rng, 200);
    uint64_t base = roll(rng, 4); /* four texts that many prompts begin with */
    int common = base ? (int)roll(rng, 120) : 0;
    if (roll(rng, 4) == 0 && i > 0) { /* the prompt before, again */
        n = c[-1].spec.n_prompt;
        memcpy(c->prompt, c[-1].prompt, sizeof c->prompt);
    } else {
        for (int k = 0; k < n; k++)
            c->prompt[k] = (int32_t)(k < common ? bg_mix64(base * 1000 + (uint64_t)k) % FAKE_VOCAB
                                                : roll(rng, FAKE_VOCAB));
    }
    c->j = j;
    c->stop_ids[0] = FAKE_EOG;
    c->stop_ids[1] = (int32_t)roll(rng, FAKE_VOCAB);
    c->spec = (bg_seq_spec){.user = c,
                            .order = i,
                            .prompt = c->prompt,
                            .n_prompt = n,
                            .max_tokens = 1 + (int)roll(rng, (uint64_t)max),
                            .ignore_eos = roll(rng, 5) == 0,
                            .sampling = {.seed = roll(rng, 1000),
                                         .n_logprobs = (int)roll(rng, 4) - 1,
                                         .min_tokens = (int)roll(rng, 2) * 5,
                                         .n_stop_ids = (int)roll(rng, 3),
                                         .stop_ids = c->stop_ids}};
    c->n_want = fake_expect(&c->spec, MAX_LEN, c->want, &c->finish);
    if ((int)roll(rng, 100) < j->s->regain_percent) {
        c->n_regained = (int)roll(rng, (uint64_t)c->n_want + 1);
        c->spec.regained = c->want;
        c->spec.n_regained = c->n_regained;
        memcpy(c->got, c->want, sizeof c->got);
        c->n_got = c->n_regained;
    }
    if ((int)roll(rng, 100) < j->s->cancel_percent)
        c->cancel_after = 1 + (int)roll(rng, (uint64_t)max);
}

static void check_case(const seq_case *c, int i)
{
    int n_want = c->n_want;
    bg_finish finish = c->finish;
    int by_cancel = c->cancel_after > c->n_regained + 1 ? c->cancel_after : c->n_regained + 1;
    if (c->cancel_after && by_cancel < n_want) {
        n_want = by_cancel;
        finish = BG_FINISH_CANCEL;
    }
    cr_assert_eq(c->n_last, 1, "sequence %d: %d last events", i, c->n_last);
    for (int k = 0; k < n_want && k < c->n_got; k++)
        cr_assert_eq(c->got[k], c->want[k], "sequence %d (prompt %d): token %d is %d, want %d", i,
                     c->spec.n_prompt, k, c->got[k], c->want[k]);
    cr_assert_eq(c->n_got, n_want, "sequence %d: %d tokens, want %d (cancel after %d)", i, c->n_got,
                 n_want, c->cancel_after);
    cr_assert_eq(c->got_finish, finish, "sequence %d: finish %d, want %d", i, c->got_finish,
                 finish);
}

static bg_rank_config rank_config(const setup *s)
{
    return (bg_rank_config){.model_path = s->fake ? s->fake : "",
                            .tp = s->tp,
                            .n_blocks = s->n_blocks,
                            .block_tokens = s->block_tokens,
                            .max_num_seqs = s->max_num_seqs,
                            .max_step_tokens = s->max_batched_tokens > s->max_num_seqs
                                                   ? s->max_batched_tokens
                                                   : s->max_num_seqs,
                            .max_model_len = MAX_LEN};
}

static const int32_t eog[] = {FAKE_EOG};

static void start(job *j, const setup *s)
{
    bg_error err = {0};
    bg_rank_config rc = rank_config(s);
    *j = (job){.s = s, .rng = s->seed * 1000};
    j->next_kill = s->kill_every ? 1 + roll(&j->rng, (uint64_t)abs(s->kill_every)) : 0;
    cr_assert_eq(bg_ranks_start_as(&j->ranks, &rc, &fake_ops, s->threads, NULL, &err), BG_OK, "%s",
                 err.text);
    cr_assert_eq(bg_ranks_wait_ready(j->ranks, NULL, NULL, NULL, &err), BG_OK, "%s", err.text);
    cr_assert_eq(bg_ranks_memory(j->ranks), 1000 * (uint64_t)s->tp);
    bg_engine_config ec = {.prefix_cache = s->prefix_cache,
                           .window = s->window,
                           .max_batched_tokens = s->max_batched_tokens,
                           .max_restarts = s->max_restarts ? s->max_restarts : 3,
                           .eog = eog,
                           .n_eog = 1,
                           .on_events = on_events,
                           .ctx = j};
    bg_engine_tuning t = {
        .depth = s->depth, .hang_ns = s->hang_ns ? s->hang_ns : 600000000000, .greedy = s->greedy};
    cr_assert_eq(bg_engine_new_tuned(&j->engine, j->ranks, &ec, &t, &err), BG_OK, "%s", err.text);
    j->cases = calloc((size_t)s->n_seqs + 1, sizeof *j->cases);
}

static void end(job *j)
{
    bg_engine_free(j->engine);
    bg_ranks_stop(j->ranks);
    free(j->cases);
}

static bg_engine_stats run(const setup *s)
{
    job j;
    bg_error err = {0};
    bg_engine_stats stats;
    start(&j, s);
    uint64_t rng = j.rng;
    j.rng = s->seed * 77; /* the sink rolls its own dice, on another thread */
    for (int i = 0; i < s->n_seqs; i++) {
        job dice = {.s = s, .rng = rng};
        make_case(&dice, &j.cases[i], i);
        rng = dice.rng;
    }
    for (int i = 0; i < s->n_seqs; i++) {
        seq_case *c = &j.cases[i];
        cr_assert_eq(bg_engine_submit(j.engine, &c->spec, &c->id, &err), BG_OK, "%s", err.text);
    }
    cr_assert_eq(bg_engine_drain(j.engine, &err), BG_OK, "%s", err.text);
    bg_engine_get_stats(j.engine, &stats);
    if (stats.steps)
        cr_expect(stats.device_work_ns == 700 && stats.device_idle_ns == 30, "times of the device");
    bg_engine_stop(j.engine);
    cr_assert_eq(bg_engine_verify(j.engine, &err), BG_OK, "%s", err.text);
    for (int i = 0; i < s->n_seqs; i++)
        check_case(&j.cases[i], i);
    end(&j);
    return stats;
}

static setup random_setup(uint64_t i, bool threads)
{
    uint64_t rng = i * 7919;
    static const int seats[] = {1, 2, 3, 8, 32}, chunks[] = {1, 7, 32, 300};
    setup s = {.tp = 1 + (int)roll(&rng, 2) * (int)(1 + roll(&rng, 2)),
               .block_tokens = 1 + (int)roll(&rng, 16),
               .max_num_seqs = seats[roll(&rng, 5)],
               .max_batched_tokens = chunks[roll(&rng, 4)],
               .window = 1 + (int)roll(&rng, 100),
               .depth = 1 + (int)roll(&rng, 2),
               .prefix_cache = roll(&rng, 2),
               .threads = threads,
               .seed = i,
               .n_seqs = 60,
               .max_tokens = 1 + (int)roll(&rng, 60),
               .cancel_percent = (int)roll(&rng, 2) * 30,
               .regain_percent = (int)roll(&rng, 2) * 30,
               .greedy = roll(&rng, 2)};
    int longest = (MAX_LEN + s.block_tokens - 1) / s.block_tokens;
    /* from just enough for one sequence, which forces preemption, to plenty */
    s.n_blocks = 1 + longest + (int)roll(&rng, 3) * longest / 2 + (int)roll(&rng, 2) * 9 * longest;
    if (i % 3 == 1) s.fake = "lag=2"; /* steps that overlap */
    if (s.greedy) {                   /* and the scheduler has no foresight */
        s.max_tokens = 100;
        if (s.max_num_seqs < 3) s.max_num_seqs = 16;
        s.n_blocks = 1 + longest + (int)roll(&rng, 3) * longest / 4;
    }
    return s;
}

Test(engine, one_sequence)
{
    for (int depth = 1; depth <= 2; depth++) {
        setup s = {.tp = 1,
                   .n_blocks = 40,
                   .block_tokens = 16,
                   .max_num_seqs = 4,
                   .window = 4,
                   .max_batched_tokens = 64,
                   .depth = depth,
                   .n_seqs = 1,
                   .max_tokens = 30};
        bg_engine_stats st = run(&s);
        cr_assert_eq(st.preemptions + st.restarts + st.recomputed_tokens, 0);
        cr_assert_eq(st.blocks_free, 39);
    }
}

/* The rank takes the next step before the answer to this one is due: all but the last have one
 * behind them. */
Test(engine, a_step_is_sent_before_the_answer_to_the_one_before)
{
    setup s = {.tp = 1,
               .n_blocks = 40,
               .block_tokens = 16,
               .max_num_seqs = 4,
               .window = 4,
               .max_batched_tokens = 64,
               .depth = 2,
               .n_seqs = 1,
               .max_tokens = 40,
               .fake = "lag=10000 pairs=1"};
    for (s.seed = 0; s.seed < 20; s.seed++) {
        bg_engine_stats st = run(&s);
        cr_assert_eq(st.restarts, 0);
        if (st.steps > 20) return; /* one that was long enough to tell */
    }
    cr_assert_fail("no long sequence");
}

Test(engine, random_jobs_on_processes)
{
    uint64_t preemptions = 0, cached = 0;
    for (uint64_t i = 0; i < 60; i++) {
        setup s = random_setup(i, false);
        bg_engine_stats st = run(&s);
        preemptions += st.preemptions;
        cached += st.cached_tokens;
        cr_assert_eq(st.restarts, 0);
        if (!st.preemptions) cr_assert_eq(st.recomputed_tokens, 0);
        if (!s.prefix_cache) cr_assert_eq(st.cached_tokens, 0);
    }
    cr_assert_gt(preemptions, 100); /* the mix must reach what it is meant to test */
    cr_assert_gt(cached, 5000);
}

Test(engine, random_jobs_on_threads)
{
    for (uint64_t i = 100; i < 130; i++) {
        setup s = random_setup(i, true);
        run(&s);
    }
}

Test(engine, killed_ranks_change_nothing)
{
    uint64_t restarts = 0;
    for (uint64_t i = 200; i < 216; i++) {
        setup s = random_setup(i, false);
        s.max_restarts = 1000;
        s.kill_every = 400;
        if (s.max_num_seqs < 8) s.max_num_seqs = 8;
        restarts += run(&s).restarts;
    }
    cr_assert_gt(restarts, 20);
}

/* The same on threads: ranks fail with an error now and then and are started again. */
Test(engine, failing_ranks_change_nothing)
{
    uint64_t restarts = 0;
    for (uint64_t i = 300; i < 308; i++) {
        setup s = random_setup(i, true);
        s.tp = 2;
        s.fake = "fail_rank=1 fail_step=6";
        if (s.max_num_seqs < 8) s.max_num_seqs = 8;
        if (s.max_batched_tokens < 32) s.max_batched_tokens = 32;
        if (s.max_tokens < 20) s.max_tokens = 20;
        s.n_seqs = 40;
        restarts += run(&s).restarts;
    }
    /* The fake's rank 0 does not wait for rank 1 and may have answered everything before it fails:
     * not each job needs a restart. */
    cr_assert_gt(restarts, 0);
}

Test(engine, a_hanging_rank_is_started_again)
{
    setup s = random_setup(400, false);
    s.tp = 1; /* the fake's ranks do not wait for each other, and only rank 0 answers */
    s.cancel_percent = 0;
    s.kill_every = -50;
    s.hang_ns = 400000000;
    cr_assert_eq(run(&s).restarts, 1);
}

Test(engine, gives_up_on_ranks_that_never_finish_a_step)
{
    for (int mode = 0; mode < 2; mode++) {
        setup s = {.tp = 2,
                   .n_blocks = 40,
                   .block_tokens = 16,
                   .max_num_seqs = 4,
                   .window = 2,
                   .max_batched_tokens = 64,
                   .depth = 2,
                   .n_seqs = 20,
                   .max_tokens = 30,
                   .fake = mode ? "die_step=1" : "fail_rank=1 fail_step=1"};
        job j;
        bg_error err = {0};
        bg_status st = BG_OK;
        start(&j, &s);
        if (!mode) /* rank 0 answers its first step; both must fail for "no step" to hold */
            end(&j), s.fake = "fail_rank=0 fail_step=1", start(&j, &s);
        for (int i = 0; i < s.n_seqs && !st; i++) {
            make_case(&j, &j.cases[i], i);
            uint64_t id;
            st = bg_engine_submit(j.engine, &j.cases[i].spec, &id, &err); /* must not hang */
        }
        cr_assert_eq(st, BG_DEVICE);
        cr_assert(strstr(err.text, "3 times"), "%s", err.text);
        cr_assert(strstr(err.text, mode ? "signal 6" : "fake device fell over"), "%s", err.text);
        bg_error again = {0}, drained = {0};
        cr_assert_eq(bg_engine_error(j.engine, &again), BG_DEVICE);
        cr_assert_eq(bg_engine_drain(j.engine, &drained), BG_DEVICE);
        bg_engine_stats stats;
        bg_engine_get_stats(j.engine, &stats);
        cr_assert_eq(stats.restarts, 2);
        bg_engine_cancel(j.engine, 1);
        end(&j);
    }
}

Test(engine, a_start_that_fails_says_why)
{
    for (int threads = 0; threads < 2; threads++) {
        setup s = {.tp = 3,
                   .n_blocks = 9,
                   .block_tokens = 4,
                   .max_num_seqs = 2,
                   .max_batched_tokens = 8,
                   .fake = "start_error=1"};
        bg_rank_config rc = rank_config(&s);
        bg_ranks *r;
        bg_error err = {0};
        cr_assert_eq(bg_ranks_start_as(&r, &rc, &fake_ops, threads, NULL, &err), BG_OK);
        cr_assert_eq(bg_ranks_wait_ready(r, NULL, NULL, NULL, &err), BG_FORMAT);
        cr_assert_str_eq(err.text, "rank 2: fake.gguf: it is damaged");
        bg_ranks_stop(r);
    }
}

Test(engine, refuses_what_can_never_run)
{
    setup s = {.tp = 1,
               .n_blocks = 9,
               .block_tokens = 4,
               .max_num_seqs = 2,
               .window = 2,
               .max_batched_tokens = 8,
               .depth = 2,
               .threads = true};
    job j;
    int32_t prompt[MAX_LEN] = {1};
    uint64_t id;
    start(&j, &s);
    bg_seq_spec spec = {.user = j.cases, .prompt = prompt, .n_prompt = MAX_LEN, .max_tokens = 1};
    bg_error err = {0};
    cr_assert_eq(bg_engine_submit(j.engine, &spec, &id, &err), BG_ARG, "%s", err.text);
    spec.n_prompt = 30, spec.max_tokens = 4; /* 33 positions, 32 fit */
    cr_assert_eq(bg_engine_submit(j.engine, &spec, &id, &(bg_error){0}), BG_ARG);
    spec.n_prompt = 0;
    cr_assert_eq(bg_engine_submit(j.engine, &spec, &id, &(bg_error){0}), BG_ARG);
    spec.n_prompt = 3, spec.max_tokens = 0;
    cr_assert_eq(bg_engine_submit(j.engine, &spec, &id, &(bg_error){0}), BG_ARG);
    spec.max_tokens = 2, spec.sampling.n_logprobs = 21;
    cr_assert_eq(bg_engine_submit(j.engine, &spec, &id, &(bg_error){0}), BG_ARG);
    spec.sampling.n_logprobs = -1;
    bg_logit_bias *bias = calloc(100000, sizeof *bias);
    spec.sampling.bias = bias, spec.sampling.n_bias = 100000;
    cr_assert_eq(bg_engine_submit(j.engine, &spec, &id, &(bg_error){0}), BG_ARG);
    free(bias);
    spec.sampling.bias = NULL, spec.sampling.n_bias = 0;
    spec.n_prompt = 30, spec.max_tokens = 3; /* 32 positions: exactly all there are */
    cr_assert_eq(bg_engine_submit(j.engine, &spec, &id, &err), BG_OK);
    cr_assert_eq(bg_engine_drain(j.engine, &err), BG_OK);
    end(&j);
}

typedef struct submitter {
    job *j;
    bg_status st;
    int n;
} submitter;

static void *submit_for_ever(void *arg)
{
    submitter *s = arg;
    bg_error err = {0};
    int32_t prompt[3] = {1, 2, 3};
    bg_seq_spec spec = {.user = s->j->cases,
                        .prompt = prompt,
                        .n_prompt = 3,
                        .max_tokens = 200,
                        .ignore_eos = true,
                        .sampling = {.n_logprobs = -1}};
    uint64_t id;
    while (!(s->st = bg_engine_submit(s->j->engine, &spec, &id, &err)))
        s->n++;
    return NULL;
}

static void ignore_events(void *ctx, const bg_token_event *ev, int n)
{
    (void)ctx, (void)ev, (void)n;
}

/* Stop wakes those who wait for room, and the same ranks serve another engine after it. */
Test(engine, stop_and_a_second_engine)
{
    for (int threads = 0; threads < 2; threads++) {
        setup s = {.tp = 2,
                   .n_blocks = 200,
                   .block_tokens = 16,
                   .max_num_seqs = 4,
                   .window = 2,
                   .max_batched_tokens = 64,
                   .depth = 2,
                   .threads = threads,
                   .n_seqs = 30,
                   .max_tokens = 30};
        job j;
        bg_error err = {0};
        start(&j, &s);
        bg_engine_free(j.engine);
        bg_engine_config ec = {
            .window = 2, .max_batched_tokens = 64, .max_restarts = 3, .on_events = ignore_events};
        cr_assert_eq(bg_engine_new(&j.engine, j.ranks, &ec, &err), BG_OK);
        submitter sub = {.j = &j};
        pthread_t t;
        pthread_create(&t, NULL, submit_for_ever, &sub);
        bg_engine_stats stats;
        do
            bg_engine_get_stats(j.engine, &stats);
        while (stats.output_tokens < 50);
        bg_engine_stop(j.engine);
        pthread_join(t, NULL);
        cr_assert_eq(sub.st, BG_BUSY);
        bg_engine_free(j.engine);
        ec.on_events = on_events;
        ec.ctx = &j;
        cr_assert_eq(bg_engine_new(&j.engine, j.ranks, &ec, &err), BG_OK);
        ec.eog = eog;
        for (int i = 0; i < s.n_seqs; i++) {
            make_case(&j, &j.cases[i], i);
            j.cases[i].spec.ignore_eos = true;
            j.cases[i].n_want =
                fake_expect(&j.cases[i].spec, MAX_LEN, j.cases[i].want, &j.cases[i].finish);
            j.cases[i].spec.sampling.n_stop_ids =
                0; /* this engine knows no end-of-generation ids */
            j.cases[i].spec.sampling.min_tokens = 0;
            j.cases[i].n_want =
                fake_expect(&j.cases[i].spec, MAX_LEN, j.cases[i].want, &j.cases[i].finish);
            cr_assert_eq(bg_engine_submit(j.engine, &j.cases[i].spec, &j.cases[i].id, &err), BG_OK);
        }
        cr_assert_eq(bg_engine_drain(j.engine, &err), BG_OK);
        for (int i = 0; i < s.n_seqs; i++)
            check_case(&j.cases[i], i);
        end(&j);
    }
}

/* Winding down: what runs goes on to its end, what never started is cancelled, nothing new is
 * taken. */
Test(engine, winding_down)
{
    setup s = {.tp = 1,
               .n_blocks = 300,
               .block_tokens = 16,
               .max_num_seqs = 4,
               .window = 100,
               .max_batched_tokens = 64,
               .depth = 2,
               .threads = true,
               .n_seqs = 60,
               .max_tokens = 60};
    job j;
    bg_error err = {0};
    atomic_bool gate = false;
    start(&j, &s);
    j.gate = &gate;
    for (int i = 0; i < s.n_seqs; i++) {
        make_case(&j, &j.cases[i], i);
        if (i == s.n_seqs - 1) break;
        cr_assert_eq(bg_engine_submit(j.engine, &j.cases[i].spec, &j.cases[i].id, &err), BG_OK);
    }
    bg_engine_wind_down(j.engine);
    atomic_store(&gate, true);
    seq_case *late = &j.cases[s.n_seqs - 1];
    cr_assert_eq(bg_engine_submit(j.engine, &late->spec, &late->id, &(bg_error){0}), BG_BUSY);
    cr_assert_eq(bg_engine_drain(j.engine, &err), BG_OK);
    int n_whole = 0, n_cancelled = 0;
    for (int i = 0; i < s.n_seqs - 1; i++) {
        seq_case *c = &j.cases[i];
        bool cancelled = c->got_finish == BG_FINISH_CANCEL;
        if (cancelled)
            cr_assert(c->n_got == 0 && c->n_last == 1);
        else
            check_case(c, i);
        *(cancelled ? &n_cancelled : &n_whole) += 1;
    }
    cr_assert_gt(n_cancelled, 0);
    cr_assert_eq(n_cancelled + n_whole, s.n_seqs - 1);
    end(&j);
}

/* Kills the coordinator; nursery and ranks must be gone soon, though they were in the middle of
 * work. */
Test(engine, nothing_outlives_a_killed_coordinator)
{
    int fds[2];
    pid_t pids[4];
    prctl(PR_SET_CHILD_SUBREAPER, 1); /* orphans become ours, so that we see them end */
    cr_assert_eq(pipe(fds), 0);
    pid_t coordinator = fork();
    if (coordinator == 0) {
        setup s = {.tp = 3,
                   .n_blocks = 200,
                   .block_tokens = 16,
                   .max_num_seqs = 4,
                   .max_batched_tokens = 64};
        bg_rank_config rc = rank_config(&s);
        bg_ranks *r;
        bg_error err = {0};
        if (bg_ranks_start(&r, &rc, &fake_ops, NULL, &err)) _exit(1);
        if (bg_ranks_wait_ready(r, NULL, NULL, NULL, &err)) _exit(1);
        for (int i = 0; i < 3; i++)
            pids[i] = bg_ranks_pid(r, i);
        if (write(fds[1], pids, 3 * sizeof *pids) < 0) _exit(1);
        for (;;)
            pause();
    }
    cr_assert_eq(read(fds[0], pids, 3 * sizeof *pids), (ssize_t)(3 * sizeof *pids));
    for (int i = 0; i < 3; i++)
        cr_assert(pids[i] > 0 && kill(pids[i], 0) == 0);
    /* Terminal signals reach the whole group and must not end a rank. */
    for (int i = 0; i < 3; i++) {
        kill(pids[i], SIGINT);
        kill(pids[i], SIGTERM);
        kill(pids[i], SIGHUP);
        cr_assert_eq(waitpid(pids[i], NULL, WNOHANG), -1);
    }
    kill(coordinator, SIGKILL);
    int n = 0, status;
    while (wait(&status) > 0) { /* coordinator, nursery, three ranks: all of them end */
        n++;
        cr_assert(WIFSIGNALED(status) ? WTERMSIG(status) == SIGKILL : true);
    }
    cr_assert_geq(n, 2);
    for (int i = 0; i < 3; i++)
        cr_assert_neq(kill(pids[i], 0), 0, "rank %d lives", i);
}

Test(engine, ranks_end_when_asked)
{
    setup s = {
        .tp = 3, .n_blocks = 200, .block_tokens = 16, .max_num_seqs = 4, .max_batched_tokens = 64};
    bg_rank_config rc = rank_config(&s);
    bg_ranks *r;
    bg_error err = {0};
    cr_assert_eq(bg_ranks_start(&r, &rc, &fake_ops, NULL, &err), BG_OK);
    bg_ranks_stop(r); /* at once, perhaps before they are ready */
    cr_assert_eq(bg_ranks_start(&r, &rc, &fake_ops, NULL, &err), BG_OK);
    cr_assert_eq(bg_ranks_wait_ready(r, NULL, NULL, NULL, &err), BG_OK);
    pid_t pids[3];
    for (int i = 0; i < 3; i++)
        pids[i] = bg_ranks_pid(r, i);
    bg_ranks_stop(r);
    for (int i = 0; i < 3; i++)
        cr_assert_neq(kill(pids[i], 0), 0);
    bg_ranks_stop(NULL);
}
