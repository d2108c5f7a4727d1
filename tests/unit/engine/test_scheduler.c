/* Policy without ranks: who is admitted when, in which chunks, and who must give way. */
#include "engine/scheduler.h"

#include <stdlib.h>
#include <string.h>

#include <criterion/criterion.h>

#include "base/rng.h"

enum { MAX_SEQS = 64 };

typedef struct bench {
    bg_sched *s;
    bg_sched_config c;
    bg_plan plan;
    bg_sampled out[MAX_SEQS];
    bg_token_event events[MAX_SEQS];
    int n_events;
    uint64_t ids;
} bench;

static const bg_sched_config plain = {.n_blocks = 101,
                                      .block_tokens = 4,
                                      .max_num_seqs = 8,
                                      .max_batched_tokens = 16,
                                      .max_model_len = 200,
                                      .window = 20,
                                      .prefix_cache = true};

static bench *open_bench(const bg_sched_config *c)
{
    bench *b = calloc(1, sizeof *b);
    bg_error err = {0};
    b->c = *c;
    cr_assert_eq(bg_sched_new(&b->s, c, &err), BG_OK, "%s", err.text);
    b->plan.items = calloc((size_t)c->max_num_seqs, sizeof *b->plan.items);
    return b;
}

static void close_bench(bench *b)
{
    bg_sched_free(b->s);
    free(b->plan.items);
    free(b);
}

/* A prompt of n tokens that begins with `head`, repeated; different heads share nothing. */
static bg_seq *add(bench *b, int order, int head, int n, int max_tokens)
{
    int32_t prompt[256];
    bg_error err = {0};
    bg_seq *q;
    for (int i = 0; i < n; i++)
        prompt[i] = head;
    bg_seq_spec spec = {.order = order,
                        .prompt = prompt,
                        .n_prompt = n,
                        .max_tokens = max_tokens,
                        .ignore_eos = true};
    cr_assert_eq(bg_seq_new(&q, &spec, b->c.max_model_len, &err), BG_OK, "%s", err.text);
    q->id = ++b->ids;
    cr_assert_eq(bg_sched_check(b->s, q, &err), BG_OK, "%s", err.text);
    cr_assert_eq(bg_sched_add(b->s, q, &err), BG_OK);
    return q;
}

static bool plan(bench *b)
{
    bg_error err = {0};
    bg_plan_kind kind;
    cr_assert_eq(bg_sched_plan(b->s, &b->plan, &kind, &err), BG_OK, "%s", err.text);
    cr_assert_eq(bg_sched_verify(b->s, &err), BG_OK, "%s", err.text);
    cr_assert_leq(b->plan.n_items, b->c.max_num_seqs);
    return kind == BG_PLAN_STEP;
}

/* Answers the step just planned with tokens that stop nothing, and frees who is over. */
static int apply(bench *b)
{
    bg_error err = {0};
    int n = 0, n_done = 0;
    for (int i = 0; i < b->plan.n_items; i++)
        if (b->plan.items[i].sample)
            b->out[n++] = (bg_sampled){.slot = b->plan.items[i].seq->slot, .token = 7};
    cr_assert_eq(bg_sched_apply(b->s, &b->plan, b->out, n, b->events, &b->n_events, &err), BG_OK);
    cr_assert_eq(bg_sched_verify(b->s, &err), BG_OK, "%s", err.text);
    for (bg_seq *q; (q = bg_sched_take_done(b->s)) != NULL; n_done++)
        bg_seq_free(q);
    return n_done;
}

static int64_t order_of(const bench *b, int item)
{
    return b->plan.items[item].seq->order;
}

Test(scheduler, dear_ones_first_equal_prompts_together_then_by_record)
{
    bg_sched_config c = plain;
    c.max_batched_tokens = 1000;
    bench *b = open_bench(&c);
    add(b, 0, 10, 8, 4);
    add(b, 1, 11, 8, 4);
    add(b, 2, 10, 8, 4);  /* like record 0 */
    add(b, 3, 12, 8, 64); /* dear */
    add(b, 4, 11, 8, 4);  /* like record 1 */
    add(b, 5, 10, 9, 4);  /* begins like record 0 */
    cr_assert(plan(b));
    static const int64_t want[] = {3, 0, 2, 5, 1, 4};
    cr_assert_eq(b->plan.n_items, 6);
    for (int i = 0; i < 6; i++)
        cr_assert_eq(order_of(b, i), want[i], "place %d: record %d", i, (int)order_of(b, i));
    /* of the second of equal prompts all full blocks but the one with the last token are there
     * already */
    cr_assert(b->plan.items[1].pos0 == 0 && b->plan.items[1].n_tokens == 8);
    cr_assert(b->plan.items[2].pos0 == 4 && b->plan.items[2].n_tokens == 4);
    cr_assert(b->plan.items[3].pos0 == 8 && b->plan.items[3].n_tokens == 1);
    close_bench(b);
}

Test(scheduler, long_prompts_go_in_chunks_and_only_the_last_samples)
{
    bench *b = open_bench(&plain);
    add(b, 0, 1, 40, 4);
    add(b, 1, 2, 5, 4);
    static const struct {
        int n_items, n0, sample0;
    } want[] = {{1, 16, 0}, {1, 16, 0}, {2, 8, 1}};
    for (int i = 0; i < 3; i++) {
        cr_assert(plan(b));
        cr_assert(b->plan.prefill);
        cr_assert_eq(b->plan.n_items, want[i].n_items);
        cr_assert_eq(b->plan.items[0].pos0, 16 * i);
        cr_assert_eq(b->plan.items[0].n_tokens, want[i].n0);
        cr_assert_eq(b->plan.items[0].sample, want[i].sample0);
        cr_assert_eq(b->plan.items[0].seat, i == 0);
        apply(b);
    }
    cr_assert(plan(b)); /* now both decode */
    cr_assert(!b->plan.prefill && b->plan.n_items == 2 && b->plan.n_rows == 2);
    cr_assert_eq(b->plan.items[0].pos0, 40);
    close_bench(b);
}

Test(scheduler, a_cached_prompt_still_computes_its_last_token)
{
    for (int n = 1; n <= 13; n++) {
        bench *b = open_bench(&plain);
        add(b, 0, 5, n, 1);
        cr_assert(plan(b));
        cr_assert_eq(apply(b), 1);
        add(b, 1, 5, n, 1);
        cr_assert(plan(b));
        cr_assert_eq(b->plan.items[0].pos0, (n - 1) / 4 * 4);
        cr_assert_eq(b->plan.items[0].pos0 + b->plan.items[0].n_tokens, n);
        cr_assert_eq(apply(b), 1);
        cr_assert_eq(b->events[0].n_cached, (n - 1) / 4 * 4);
        bg_engine_stats st = {0};
        bg_sched_add_stats(b->s, &st);
        cr_assert_eq(st.blocks_free, st.blocks_total);
        close_bench(b);
    }
}

Test(scheduler, no_prefill_for_a_few_seats)
{
    bg_sched_config c = plain;
    c.max_num_seqs = 64;
    c.max_batched_tokens = 64;
    c.n_blocks = 3000;
    bench *b = open_bench(&c);
    for (int i = 0; i < 64; i++)
        add(b, i, 100 + i, 1, i < 6 ? 3 + i : 100);
    for (int i = 64; i < 84; i++)
        add(b, i, 100 + i, 1, 100);
    while (plan(b) && b->plan.prefill)
        apply(b);
    cr_assert_eq(b->plan.n_items, 64);
    int free_before = 0, n_prefills = 0;
    for (int step = 0; step < 30; step++) {
        free_before += apply(b);
        cr_assert(plan(b));
        if (!b->plan.prefill) continue;
        n_prefills++;
        cr_assert_geq(free_before, 4); /* 1/16 of 64 */
        free_before -= b->plan.n_items;
    }
    cr_assert_eq(n_prefills, 1);
    close_bench(b);
}

Test(scheduler, decode_pipelines_without_knowing_the_tokens)
{
    bg_error err = {0};
    bench *b = open_bench(&plain);
    bg_plan second = {.items = calloc(8, sizeof(bg_plan_item))};
    bg_plan_kind kind;
    bg_seq *q = add(b, 0, 1, 4, 3);
    cr_assert(plan(b)); /* prefill: token 1 under way */
    cr_assert_eq(bg_sched_plan(b->s, &second, &kind, &err), BG_OK);
    cr_assert(kind == BG_PLAN_STEP && !second.prefill && second.items[0].pos0 == 4);
    cr_assert_eq(second.items[0].n_blocks, 1); /* position 4 begins a block */
    cr_assert_eq(bg_sched_in_flight(b->s), 2);
    apply(b); /* token 1 */
    bg_sampled out = {.slot = q->slot, .token = 8};
    cr_assert(plan(b)); /* token 3, the last, while token 2 is unknown */
    cr_assert_eq(b->plan.items[0].pos0, 5);
    bg_plan third = b->plan;
    bg_plan_item item = third.items[0];
    cr_assert_not(plan(b)); /* its end is known by count: nothing more to do */
    b->plan.n_items = 1, b->plan.items[0] = item;
    int n;
    cr_assert_eq(bg_sched_apply(b->s, &second, &out, 1, b->events, &n, &err), BG_OK);
    cr_assert_eq(b->events[0].finish, BG_FINISH_NONE);
    cr_assert_eq(apply(b), 1);
    cr_assert_eq(b->events[0].finish, BG_FINISH_LENGTH);
    free(second.items);
    close_bench(b);
}

Test(scheduler, a_token_after_the_end_is_dropped_and_the_blocks_held_until_then)
{
    static const int32_t eog[] = {9};
    bg_error err = {0};
    bg_sched_config c = plain;
    c.eog = eog, c.n_eog = 1;
    bench *b = open_bench(&c);
    bg_plan second = {.items = calloc(8, sizeof(bg_plan_item))};
    bg_plan_kind kind;
    bg_engine_stats st = {0};
    bg_seq *q = add(b, 0, 1, 4, 50);
    q->ignore_eos = false;
    cr_assert(plan(b));
    cr_assert_eq(bg_sched_plan(b->s, &second, &kind, &err), BG_OK);
    bg_sampled end = {.slot = q->slot, .token = 9}, more = {.slot = q->slot, .token = 3};
    int n;
    cr_assert_eq(bg_sched_apply(b->s, &b->plan, &end, 1, b->events, &n, &err), BG_OK);
    cr_assert(n == 1 && b->events[0].finish == BG_FINISH_STOP);
    cr_assert_null(bg_sched_take_done(b->s));
    bg_sched_add_stats(b->s, &st);
    cr_assert_eq(st.blocks_total - st.blocks_free, 2);
    cr_assert_not(plan(b));
    cr_assert_not(bg_sched_cancel(b->s, q)); /* too late */
    cr_assert_eq(bg_sched_apply(b->s, &second, &more, 1, b->events, &n, &err), BG_OK);
    cr_assert_eq(n, 0);
    cr_assert_eq(bg_sched_take_done(b->s), q);
    bg_sched_add_stats(b->s, &st);
    cr_assert_eq(st.blocks_free, st.blocks_total);
    bg_seq_free(q);
    free(second.items);
    close_bench(b);
}

Test(scheduler, the_youngest_gives_way_and_comes_back_first)
{
    bg_sched_config c = plain;
    c.n_blocks = 1 + 10;
    c.greedy = true; /* else it would foresee it */
    c.prefix_cache = false;
    bench *b = open_bench(&c);
    for (int i = 0; i < 3; i++)
        add(b, i, 1 + i, 8, 16); /* 6 blocks each in the end */
    add(b, 3, 9, 8, 1);
    int done = 0, preempted = 0;
    for (int step = 0; step < 200 && done < 4; step++) {
        cr_assert(plan(b));
        bg_engine_stats st = {0};
        bg_sched_add_stats(b->s, &st);
        for (int i = 1; i < b->plan.n_items; i++)
            cr_assert_lt(b->plan.items[i - 1].seq->seniority, b->plan.items[i].seq->seniority);
        preempted = (int)st.preemptions;
        done += apply(b);
    }
    cr_assert_eq(done, 4);
    cr_assert_gt(preempted, 0);
    close_bench(b);
}

Test(scheduler, foresight_avoids_preemption_when_lengths_are_certain)
{
    bg_sched_config c = plain;
    c.n_blocks = 1 + 30;
    bench *b = open_bench(&c);
    for (int i = 0; i < 12; i++)
        add(b, i, 1 + i, 5 + i, 20 + i);
    int done = 0;
    for (int step = 0; step < 1000 && done < 12; step++) {
        cr_assert(plan(b));
        done += apply(b);
    }
    bg_engine_stats st = {0};
    bg_sched_add_stats(b->s, &st);
    cr_assert_eq(done, 12);
    cr_assert_eq(st.preemptions, 0);
    close_bench(b);
}

Test(scheduler, nothing_starves)
{
    bg_sched_config c = plain;
    c.max_num_seqs = 1;
    c.window = 5;
    bench *b = open_bench(&c);
    bg_seq *cheap = add(b, 0, 1, 4, 1); /* dearer ones always come in before it */
    bool seen = false;
    int order = 1, admitted = 0;
    for (; admitted < 100 && !seen; admitted++) {
        while (bg_sched_n_new(b->s) < 5) {
            add(b, order, 1 + order, 4, 50);
            order++;
        }
        do {
            cr_assert(plan(b));
            seen = seen || b->plan.items[0].seq == cheap;
        } while (apply(b) == 0);
    }
    cr_assert_leq(admitted, 2 * c.window + 2);
    cr_assert(seen);
    close_bench(b);
}

Test(scheduler, cancel_anywhere)
{
    bench *b = open_bench(&plain);
    bg_seq *run = add(b, 0, 1, 4, 50), *wait;
    cr_assert(plan(b));
    wait = add(b, 1, 2, 4, 50);
    cr_assert(bg_sched_cancel(b->s, wait));
    cr_assert_not(bg_sched_cancel(b->s, wait));
    cr_assert_eq(bg_sched_take_done(b->s), wait);
    bg_seq_free(wait);
    cr_assert(bg_sched_cancel(b->s, run)); /* in flight */
    cr_assert_null(bg_sched_take_done(b->s));
    cr_assert_eq(apply(b), 1);
    cr_assert_eq(b->n_events, 0);
    cr_assert_not(plan(b));
    close_bench(b);
}

Test(scheduler, restart_requeues_with_tokens)
{
    bench *b = open_bench(&plain);
    bg_seq *q = add(b, 0, 1, 6, 50), *gone = add(b, 1, 2, 6, 50);
    for (int i = 0; i < 5; i++) {
        cr_assert(plan(b));
        apply(b);
    }
    cr_assert(plan(b)); /* and this one is lost */
    cr_assert(bg_sched_cancel(b->s, gone));
    bg_sched_restart(b->s);
    cr_assert_eq(bg_sched_take_done(b->s), gone);
    bg_seq_free(gone);
    bg_engine_stats st = {0};
    bg_sched_add_stats(b->s, &st);
    cr_assert_eq(st.blocks_free, st.blocks_total);
    int n = q->n_tokens;
    cr_assert_gt(n, 6);
    cr_assert(plan(b));
    cr_assert(b->plan.prefill && b->plan.items[0].seq == q && b->plan.items[0].seat);
    cr_assert(b->plan.items[0].pos0 == 0 && b->plan.items[0].n_tokens == n);
    close_bench(b);
}

Test(scheduler, refuses_answers_that_do_not_match)
{
    bg_error err = {0};
    int n;
    bench *b = open_bench(&plain);
    bg_seq *q = add(b, 0, 1, 6, 50);
    cr_assert(plan(b));
    bg_sampled wrong = {.slot = q->slot + 1, .token = 7};
    cr_assert_eq(bg_sched_apply(b->s, &b->plan, &wrong, 1, b->events, &n, &err), BG_INTERNAL);
    bg_sched_restart(b->s);
    cr_assert(plan(b));
    cr_assert_eq(bg_sched_apply(b->s, &b->plan, NULL, 0, b->events, &n, &(bg_error){0}),
                 BG_INTERNAL);
    close_bench(b);
}

/* The peak against a simulation token by token, with blocks counted exactly for block size 1. */
Test(scheduler, peak_of_held_blocks)
{
    for (uint64_t i = 0; i < 300; i++) {
        bg_load l[6], copy[6];
        int n = 1 + (int)(bg_mix64(i) % 6);
        for (int k = 0; k < n; k++) {
            uint64_t r = bg_mix64(i * 10 + (uint64_t)k);
            l[k] = copy[k] = (bg_load){(int32_t)(r % 20), (int32_t)(r >> 8 & 15)};
        }
        int64_t want = 0;
        for (int t = 0; t < 16; t++) {
            int64_t sum = 0;
            for (int k = 0; k < n; k++)
                if (copy[k].remaining >= t) sum += copy[k].held + t;
            if (sum > want) want = sum;
        }
        int64_t got = bg_sched_peak_blocks(l, n, 1);
        cr_assert(got >= want && got <= want + n / 2, "%d: %d, want %d", (int)i, (int)got,
                  (int)want);
    }
}
