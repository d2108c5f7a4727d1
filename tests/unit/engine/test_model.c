/* The engine over ranks with a real, tiny model: each sequence's tokens and the bits of its
 * log-probabilities are the same whatever the batch, the chunks, the cache, and whoever is killed.
 *
 * BATCHGEN_MODEL=FILE runs another model, with longer sequences. */
#include "engine/engine.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include <criterion/criterion.h>

#include "base/rng.h"
#include "engine/engine_internal.h"

enum { N = 14, MAX_OUT = 64, CONTEXT = 320 };

typedef struct variant {
    const char *name;
    int tp, max_num_seqs, max_batched_tokens, n_blocks, depth;
    bool prefix_cache, greedy;
    int kill_at; /* events; 0: never */
} variant;

typedef struct output {
    int n;
    bg_sampled tokens[MAX_OUT];
    bg_finish finish;
} output;

typedef struct run {
    const variant *v;
    bg_ranks *ranks;
    int n_events;
    output out[N];
} run;

static void on_events(void *ctx, const bg_token_event *ev, int n)
{
    run *r = ctx;
    for (int i = 0; i < n; i++) {
        output *o = ev[i].user;
        if (ev[i].has_token && o->n < MAX_OUT) o->tokens[o->n++] = ev[i].sampled;
        o->finish = ev[i].finish;
    }
    int before = r->n_events;
    r->n_events += n;
    if (before < r->v->kill_at && r->n_events >= r->v->kill_at) {
        pid_t pid = bg_ranks_pid(r->ranks, r->v->tp - 1);
        if (pid > 0) kill(pid, SIGKILL);
    }
}

static const char *model_path(void)
{
    const char *m = getenv("BATCHGEN_MODEL");
    return m ? m : "tests/golden/models/tiny-llama.q2_k.gguf";
}

/* Prompts of which some begin alike or are equal; greedy and sampled, with and without extras. */
static void submit_all(run *r, bg_engine *e)
{
    static const bg_logit_bias bias[] = {{5, 2.5f}, {9, -100}};
    bg_error err = {0};
    for (int i = 0; i < N; i++) {
        int32_t prompt[200];
        int n = 1 + (int)(bg_mix64((uint64_t)i) % (i % 3 ? 30 : 180)),
            text = i % 4 == 3 ? i - 1 : i;
        if (text != i) n = 1 + (int)(bg_mix64((uint64_t)text) % (text % 3 ? 30 : 180));
        for (int k = 0; k < n; k++) {
            uint64_t base = k < 40 && i % 2 ? 1000 : 2000 + (uint64_t)text * 500;
            prompt[k] = (int32_t)(3 + bg_mix64(base + (uint64_t)k) % 700);
        }
        bg_sampling s = {.temperature = i % 3 == 1 ? 0.9f : 0,
                         .top_k = i % 2 ? 40 : 0,
                         .top_p = i % 5 == 1 ? 0.8f : 1,
                         .repetition_penalty = i % 4 == 1 ? 1.2f : 1,
                         .presence_penalty = i % 4 == 2 ? 0.5f : 0,
                         .n_logprobs = i % 3 - 1,
                         .seed = (uint64_t)i,
                         .n_bias = i % 5 == 0 ? 2 : 0,
                         .bias = bias};
        bg_seq_spec spec = {.user = &r->out[i],
                            .order = i,
                            .prompt = prompt,
                            .n_prompt = n,
                            .max_tokens = getenv("BATCHGEN_MODEL") ? 50 + i : 20 + i,
                            .ignore_eos = true,
                            .sampling = s};
        uint64_t id;
        cr_assert_eq(bg_engine_submit(e, &spec, &id, &err), BG_OK, "%s", err.text);
    }
}

static bg_engine_stats go(run *r, const variant *v)
{
    bg_error err = {0};
    bg_engine *e;
    bg_engine_stats stats;
    *r = (run){.v = v};
    const bg_rank_config rc = {.model_path = model_path(),
                               .tp = v->tp,
                               .compute = BG_COMPUTE_NATIVE,
                               .cache_type = BG_CACHE_F16,
                               .threads_per_rank = 1,
                               .check = true,
                               .n_blocks = v->n_blocks,
                               .block_tokens = 16,
                               .max_num_seqs = v->max_num_seqs,
                               .max_step_tokens = v->max_batched_tokens,
                               .max_model_len = CONTEXT};
    cr_assert_eq(bg_ranks_start(&r->ranks, &rc, &bg_rank_ops_model, NULL, &err), BG_OK);
    cr_assert_eq(bg_ranks_wait_ready(r->ranks, NULL, NULL, NULL, &err), BG_OK, "%s", err.text);
    cr_assert_gt(bg_ranks_memory(r->ranks), 0);
    const bg_engine_config ec = {.prefix_cache = v->prefix_cache,
                                 .window = 100,
                                 .max_batched_tokens = v->max_batched_tokens,
                                 .max_restarts = 3,
                                 .on_events = on_events,
                                 .ctx = r};
    const bg_engine_tuning t = {.depth = v->depth, .hang_ns = 600000000000, .greedy = v->greedy};
    cr_assert_eq(bg_engine_new_tuned(&e, r->ranks, &ec, &t, &err), BG_OK, "%s", err.text);
    submit_all(r, e);
    cr_assert_eq(bg_engine_drain(e, &err), BG_OK, "%s: %s", v->name, err.text);
    bg_engine_get_stats(e, &stats);
    bg_engine_stop(e);
    cr_assert_eq(bg_engine_verify(e, &err), BG_OK, "%s", err.text);
    bg_engine_free(e);
    bg_ranks_stop(r->ranks);
    return stats;
}

static void expect_same(const run *a, const run *b)
{
    for (int i = 0; i < N; i++) {
        const output *p = &a->out[i], *q = &b->out[i];
        cr_assert_eq(p->n, q->n, "%s: sequence %d: %d tokens, want %d", b->v->name, i, q->n, p->n);
        cr_assert_eq(q->finish, BG_FINISH_LENGTH);
        for (int k = 0; k < p->n; k++) {
            const bg_sampled *x = &p->tokens[k], *y = &q->tokens[k];
            cr_assert_eq(x->token, y->token, "%s (tp %d): sequence %d: token %d is %d, want %d",
                         b->v->name, b->v->tp, i, k, y->token, x->token);
            cr_assert(memcmp(&x->logprob, &y->logprob, sizeof x->logprob) == 0 &&
                          x->n_top == y->n_top &&
                          memcmp(x->top, y->top, sizeof *x->top * (size_t)x->n_top) == 0,
                      "%s: sequence %d: log-probabilities of token %d differ", b->v->name, i, k);
        }
    }
}

static void all_variants(int tp)
{
#ifdef __SANITIZE_THREAD__
    if (tp > 1) return; /* ranks share no thread; spinning on each other they take minutes */
#endif
    const variant alone = {"alone", tp, 1, 256, 22, 1, false, false, 0};
    const variant others[] = {
        {"many at once", tp, 32, 256, 400, 2, false, false, 0},
        {"prefix cache", tp, 8, 256, 400, 2, true, false, 0},
        {"small chunks", tp, 4, 7, 400, 1, true, false, 0},
        {"few blocks", tp, 8, 64, 26, 2, true, true, 0},
        {"a rank is killed", tp, 8, 64, 200, 2, true, false, 90},
    };
    static run want, got;
    go(&want, &alone);
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        const variant *v = &others[i];
        bg_engine_stats st = go(&got, v);
        expect_same(&want, &got);
        if (v->kill_at) cr_assert_eq(st.restarts, 1);
        if (v->greedy) cr_assert_gt(st.preemptions, 0);
        if (v->prefix_cache) cr_assert_gt(st.cached_tokens, 0);
    }
}

Test(model, one_rank)
{
    all_variants(1);
}

Test(model, two_ranks)
{
    all_variants(2);
}

Test(model, four_ranks)
{
    all_variants(4);
}

Test(model, a_damaged_file_is_named)
{
    const bg_rank_config rc = {.model_path = "tests/golden/models/README.md",
                               .tp = 2,
                               .threads_per_rank = 1,
                               .n_blocks = 8,
                               .block_tokens = 16,
                               .max_num_seqs = 2,
                               .max_step_tokens = 16,
                               .max_model_len = 64};
    bg_ranks *r;
    bg_error err = {0};
    cr_assert_eq(bg_ranks_start(&r, &rc, &bg_rank_ops_model, NULL, &err), BG_OK);
    cr_assert_eq(bg_ranks_wait_ready(r, NULL, NULL, NULL, &err), BG_FORMAT);
    cr_assert(strstr(err.text, "README.md"), "%s", err.text);
    bg_ranks_stop(r);
}
