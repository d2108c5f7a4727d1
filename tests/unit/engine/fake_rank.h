/* A rank with a model that anyone can compute, over a cache that shows every scheduling mistake.
 *
 * The cache keeps, per block and offset, a state: a hash of the state of the position before (read
 * through the block table) and of the token. The next token is a hash of the states of all
 * positions (read through the table), the seed and the number of generated tokens. So a wrong
 * table, a block handed out too early, a false prefix hit or a forgotten recomputation changes the
 * text.
 *
 * model_path may say "fail_rank=R fail_step=S": rank R fails with BG_DEVICE in its S-th step of
 * every life; "start_error=1": the last rank's start fails with BG_FORMAT; "die_step=S": abort() in
 * the S-th step of every life; "lag=L": a step is ready only when it was asked L times, so that the
 * next one may be started before (L 0: there is never a second); "pairs=N": or when a second one is
 * there, and more than N steps without one are a failure. */
#ifndef FAKE_RANK_H
#define FAKE_RANK_H

#include <limits.h>
#include <math.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/rng.h"
#include "engine/engine.h"

enum { FAKE_VOCAB = 97, FAKE_EOG = 0 };

typedef struct fake_slot {
    bg_sampling s;
    int32_t stop_ids[8], *tokens;
    int n, n_generated;
} fake_slot;

typedef struct fake {
    const bg_rank_config *c;
    int rank, n_steps;
    int fail_rank, fail_step, die_step, lag, pairs, n_alone;
    bg_sampled *results[BG_STEPS_AHEAD]; /* of the steps under way */
    int n_results[BG_STEPS_AHEAD], n_under_way, asked;
    atomic_uint
        *lives; /* in the communicator's memory: how many ranks joined since it was zeroed */
    uint64_t *cache;
    fake_slot *slots;
} fake;

static uint64_t fake_state(uint64_t before, int32_t token, int pos)
{
    return bg_mix64(before ^ bg_mix64((uint64_t)token * 1000003 + (uint64_t)pos));
}

static uint64_t fake_fold(uint64_t sum, uint64_t state)
{
    return bg_mix64(sum * 31 + state);
}

static int32_t fake_token(uint64_t sum, const bg_sampling *s, int n_generated)
{
    int32_t t = (int32_t)(bg_mix64(sum ^ bg_mix64(s->seed + (uint64_t)n_generated)) % FAKE_VOCAB);
    for (int i = 0; n_generated < s->min_tokens && i < s->n_stop_ids; i++)
        if (t == s->stop_ids[i]) t = (t + 1) % FAKE_VOCAB, i = -1;
    return t;
}

static int fake_option(const char *text, const char *name)
{
    const char *p = strstr(text, name);
    return p ? atoi(p + strlen(name)) : -1;
}

static bg_status fake_start(void **state, const bg_rank_config *c, int rank, void *comm_memory,
                            void (*progress)(void *, uint64_t, uint64_t), void *ctx, bg_error *err)
{
    if (fake_option(c->model_path, "start_error=") > 0 && rank == c->tp - 1)
        return bg_fail(err, BG_FORMAT, "fake.gguf: it is damaged");
    fake *f = calloc(1, sizeof *f);
    *state = f;
    f->c = c;
    f->rank = rank;
    f->fail_rank = fake_option(c->model_path, "fail_rank=");
    f->fail_step = fake_option(c->model_path, "fail_step=");
    f->die_step = fake_option(c->model_path, "die_step=");
    f->lag = fake_option(c->model_path, "lag=");
    f->pairs = fake_option(c->model_path, "pairs=");
    for (int i = 0; i < BG_STEPS_AHEAD; i++)
        f->results[i] = calloc((size_t)c->max_num_seqs, sizeof(bg_sampled));
    f->lives = comm_memory;
    size_t n = (size_t)c->n_blocks * (size_t)c->block_tokens;
    f->cache = malloc(n * sizeof *f->cache);
    memset(f->cache, 0x5a, n * sizeof *f->cache);
    f->slots = calloc((size_t)c->max_num_seqs, sizeof *f->slots);
    for (int i = 0; i < c->max_num_seqs; i++)
        f->slots[i].tokens = calloc((size_t)c->max_model_len + 2, sizeof(int32_t));
    progress(ctx, 50, 100);
    if (atomic_fetch_add(f->lives, 1) >= (unsigned)c->tp)
        return bg_fail(err, BG_INTERNAL, "the communicator's memory was not zeroed");
    progress(ctx, 100, 100);
    return BG_OK;
}

static bg_status fake_seat(void *state, int slot, const bg_sampling *s, const int32_t *tokens,
                           int n_tokens, int n_generated, bg_error *err)
{
    fake *f = state;
    fake_slot *q = &f->slots[slot];
    if (s->n_stop_ids > 8) return bg_fail(err, BG_ARG, "too many stop ids");
    q->s = *s;
    for (int i = 0; i < s->n_stop_ids; i++)
        q->stop_ids[i] = s->stop_ids[i];
    q->s.stop_ids = q->stop_ids;
    memcpy(q->tokens, tokens, (size_t)n_tokens * sizeof *tokens);
    q->n = n_tokens;
    q->n_generated = n_generated;
    return BG_OK;
}

static uint64_t *fake_at(const fake *f, const bg_seq_step *q, int pos)
{
    int bt = f->c->block_tokens;
    return &f->cache[(size_t)q->blocks[pos / bt] * (size_t)bt + (size_t)(pos % bt)];
}

static bg_status fake_launch(void *state, const bg_batch *batch, bg_error *err)
{
    fake *f = state;
    if (f->n_under_way == (f->lag > 0 ? BG_STEPS_AHEAD : 1))
        return bg_fail(err, BG_INTERNAL, "%d steps are under way", f->n_under_way);
    bg_sampled *out = f->results[f->n_under_way];
    int *n = &f->n_results[f->n_under_way++];
    f->n_steps++;
    if (f->n_steps == f->fail_step && f->rank == f->fail_rank)
        return bg_fail(err, BG_DEVICE, "fake device fell over in step %d", f->n_steps);
    if (f->n_steps == f->die_step) abort();
    for (int i = 0; i < batch->n_seqs; i++) {
        const bg_seq_step *q = &batch->seqs[i];
        for (int p = q->pos0; p < q->pos0 + q->n_tokens; p++) {
            if (p / f->c->block_tokens >= q->n_blocks)
                return bg_fail(err, BG_INTERNAL, "position %d is not in the table", p);
            uint64_t before = p ? *fake_at(f, q, p - 1) : 0;
            *fake_at(f, q, p) = fake_state(before, f->slots[q->slot].tokens[p], p);
        }
    }
    *n = 0;
    for (int i = 0; i < batch->n_seqs; i++) {
        const bg_seq_step *q = &batch->seqs[i];
        if (!q->sample) continue;
        fake_slot *slot = &f->slots[q->slot];
        uint64_t sum = 0;
        for (int p = 0; p < q->pos0 + q->n_tokens; p++)
            sum = fake_fold(sum, *fake_at(f, q, p));
        int32_t t = fake_token(sum, &slot->s, slot->n_generated);
        slot->tokens[slot->n++] = t;
        slot->n_generated++;
        bg_sampled *o = &out[(*n)++];
        *o = (bg_sampled){.slot = q->slot, .token = t, .logprob = NAN};
        if (slot->s.n_logprobs >= 0) {
            o->logprob = -(float)t / 8;
            o->n_top = slot->s.n_logprobs;
            for (int k = 0; k < o->n_top; k++)
                o->top[k] = (bg_top){t + k, -(float)k};
        }
    }
    return BG_OK;
}

static bool fake_ready(void *state)
{
    fake *f = state;
    if (f->pairs > 0 && f->n_under_way == BG_STEPS_AHEAD) return true;
    return f->lag <= 0 || f->asked++ >= f->lag;
}

static bg_status fake_fetch(void *state, bg_sampled *out, int *n, bg_error *err)
{
    fake *f = state;
    if (!f->n_under_way) return bg_fail(err, BG_INTERNAL, "no step is under way");
    f->n_alone += f->n_under_way < BG_STEPS_AHEAD;
    if (f->pairs > 0 && f->n_alone > f->pairs)
        return bg_fail(err, BG_INTERNAL, "%d steps had none behind them", f->n_alone);
    bg_sampled *first = f->results[0];
    *n = f->n_results[0];
    memcpy(out, first, (size_t)*n * sizeof *out);
    for (int i = 1; i < BG_STEPS_AHEAD; i++) {
        f->results[i - 1] = f->results[i];
        f->n_results[i - 1] = f->n_results[i];
    }
    f->results[BG_STEPS_AHEAD - 1] = first;
    f->n_under_way--;
    f->asked = 0;
    return BG_OK;
}

static void fake_stop(void *state)
{
    fake *f = state;
    for (int i = 0; i < BG_STEPS_AHEAD; i++)
        free(f->results[i]);
    for (int i = 0; i < f->c->max_num_seqs; i++)
        free(f->slots[i].tokens);
    free(f->slots);
    free(f->cache);
    free(f);
}

static uint64_t fake_memory(void *state)
{
    (void)state;
    return 1000;
}

static void fake_device_times(void *state, int64_t *work_ns, int64_t *idle_ns)
{
    (void)state;
    *work_ns = 700;
    *idle_ns = 30;
}

static const bg_rank_ops fake_ops = {fake_start,  fake_seat,  fake_launch,
                                     fake_ready,  fake_fetch, fake_stop,
                                     fake_memory, NULL,       fake_device_times};

/* What the fake says to a spec, computed from the tokens alone. out has room; *finish too. */
static int fake_expect(const bg_seq_spec *s, int max_model_len, int32_t *out, bg_finish *finish)
{
    uint64_t state = 0, sum = 0;
    int pos = 0, n = 0;
    for (; pos < s->n_prompt; pos++) {
        state = fake_state(state, s->prompt[pos], pos);
        sum = fake_fold(sum, state);
    }
    for (;;) {
        int32_t t = out[n] = fake_token(sum, &s->sampling, n);
        n++;
        bool stop = t == FAKE_EOG && !s->ignore_eos;
        for (int i = 0; i < s->sampling.n_stop_ids; i++)
            stop = stop || (t == s->sampling.stop_ids[i] && t != FAKE_EOG);
        if (stop || n == s->max_tokens || s->n_prompt + n == max_model_len) {
            *finish = stop ? BG_FINISH_STOP : BG_FINISH_LENGTH;
            return n;
        }
        state = fake_state(state, t, pos++);
        sum = fake_fold(sum, state);
    }
}

#endif
