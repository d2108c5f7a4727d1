/* Messages: what goes in comes out, and nothing damaged is believed. */
#include "engine/step.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <criterion/criterion.h>

#include "base/rng.h"

enum { CAP = 4096 };

static void expect_same(const bg_msg_seat *a, const bg_msg_seat *b)
{
    cr_assert(a->slot == b->slot && a->n_generated == b->n_generated &&
              a->n_tokens == b->n_tokens && a->n_blocks == b->n_blocks);
    cr_assert(memcmp(a->tokens, b->tokens, 4 * (size_t)a->n_tokens) == 0);
    cr_assert(memcmp(a->blocks, b->blocks, 4 * (size_t)a->n_blocks) == 0);
    const bg_sampling *s = &a->sampling, *t = &b->sampling;
    cr_assert(s->temperature == t->temperature && s->top_k == t->top_k && s->top_p == t->top_p &&
              s->min_p == t->min_p && s->repetition_penalty == t->repetition_penalty &&
              s->presence_penalty == t->presence_penalty &&
              s->frequency_penalty == t->frequency_penalty && s->n_logprobs == t->n_logprobs &&
              s->min_tokens == t->min_tokens && s->seed == t->seed && s->n_bias == t->n_bias &&
              s->n_stop_ids == t->n_stop_ids);
    cr_assert(memcmp(s->bias, t->bias, sizeof *s->bias * (size_t)s->n_bias) == 0);
    cr_assert(memcmp(s->stop_ids, t->stop_ids, 4 * (size_t)s->n_stop_ids) == 0);
}

static const int32_t tokens[5] = {7, 1, 1 << 30, 0, 3}, blocks[2] = {9, 4}, stops[3] = {2, 5, 8};
static const bg_logit_bias bias[2] = {{11, -100}, {12, 1.5f}};
static const bg_msg_seat seat = {.slot = 3,
                                 .n_generated = 2,
                                 .n_tokens = 5,
                                 .n_blocks = 2,
                                 .tokens = tokens,
                                 .blocks = blocks,
                                 .sampling = {.temperature = 0.7f,
                                              .top_k = 40,
                                              .top_p = 0.9f,
                                              .min_p = 0.01f,
                                              .repetition_penalty = 1.1f,
                                              .presence_penalty = 0.25f,
                                              .frequency_penalty = -0.5f,
                                              .n_logprobs = 4,
                                              .min_tokens = 6,
                                              .seed = UINT64_C(0xfedcba9876543210),
                                              .n_bias = 2,
                                              .bias = bias,
                                              .n_stop_ids = 3,
                                              .stop_ids = stops}};

Test(step, seat_there_and_back)
{
    _Alignas(8) unsigned char buf[CAP];
    bg_error err = {0};
    bg_msg_kind kind;
    bg_msg_seat got;
    size_t n = bg_msg_put_seat(buf, CAP, &seat);
    cr_assert_eq(n, bg_msg_seat_bytes(&seat));
    cr_assert_eq(n, 72 + 4 * 5 + 4 * 2 + 8 * 2 + 4 * 3);
    cr_assert_eq(bg_msg_put_seat(buf, n - 1, &seat), 0);
    cr_assert_eq(bg_msg_get_kind(buf, n, &kind, &err), BG_OK);
    cr_assert_eq(kind, BG_MSG_SEAT);
    cr_assert_eq(bg_msg_get_seat(buf, n, &got, &err), BG_OK, "%s", err.text);
    expect_same(&got, &seat);
}

Test(step, step_there_and_back)
{
    _Alignas(8) unsigned char buf[CAP];
    const bg_msg_entry e[3] = {
        {4, 0, 5, 2, blocks, false}, {0, 17, 1, 0, NULL, true}, {1, 3, 1, 1, blocks, true}};
    bg_error err = {0};
    size_t n = bg_msg_put_step(buf, CAP, 12345678901, e, 3);
    cr_assert_eq(n, bg_msg_step_bytes(3, 3));
    cr_assert_eq(bg_msg_put_step(buf, n - 1, 1, e, 3), 0);
    bg_msg_step s;
    cr_assert_eq(bg_msg_get_step(buf, n, &s, &err), BG_OK);
    cr_assert(s.n_seqs == 3 && s.number == 12345678901);
    for (int i = 0; i < 3; i++) {
        bg_msg_entry g;
        cr_assert_eq(bg_msg_next_entry(&s, &g, &err), BG_OK, "%s", err.text);
        cr_assert(g.slot == e[i].slot && g.pos0 == e[i].pos0 && g.n_tokens == e[i].n_tokens &&
                  g.n_blocks == e[i].n_blocks && g.sample == e[i].sample);
        cr_assert(!g.n_blocks || memcmp(g.blocks, e[i].blocks, 4 * (size_t)g.n_blocks) == 0);
    }
    bg_msg_entry g;
    cr_assert_eq(bg_msg_next_entry(&s, &g, &err), BG_INTERNAL);
}

Test(step, result_there_and_back)
{
    _Alignas(8) unsigned char buf[CAP];
    bg_sampled in[3] = {
        {.slot = 1, .token = 9, .logprob = NAN},
        {.slot = 0, .token = 4, .logprob = -0.5f, .n_top = 2, .top = {{4, -0.5f}, {3, -2}}},
        {.slot = 7, .token = 1, .logprob = -3, .n_top = BG_MAX_TOP_LOGPROBS}};
    bg_sampled out[3];
    bg_error err = {0};
    bg_msg_result h;
    size_t n = bg_msg_put_result(buf, CAP, &(bg_msg_result){3, 77, 123456789012}, in);
    cr_assert_eq(n, 24 + 3 * 16 + 22 * 8);
    cr_assert_leq(n, bg_msg_result_max_bytes(3));
    cr_assert_eq(bg_msg_get_result(buf, n, &h, out, 3, &err), BG_OK, "%s", err.text);
    cr_assert(h.n == 3 && h.number == 77 && h.step_ns == 123456789012);
    cr_assert(isnan(out[0].logprob));
    for (int i = 0; i < 3; i++) {
        cr_assert(out[i].slot == in[i].slot && out[i].token == in[i].token &&
                  out[i].n_top == in[i].n_top && (i == 0 || out[i].logprob == in[i].logprob));
        cr_assert(memcmp(out[i].top, in[i].top, sizeof(bg_top) * (size_t)in[i].n_top) == 0);
    }
    cr_assert_eq(bg_msg_get_result(buf, n, &h, out, 2, &err), BG_INTERNAL);
    in[1].n_top = 21;
    cr_assert_eq(bg_msg_put_result(buf, CAP, &(bg_msg_result){3, 77, 1}, in), 0);
}

/* Reads whatever it is, out of a heap block of exactly n bytes, so that a sanitizer sees every step
 * outside. Returns whether it was accepted. */
static bool read_all(const unsigned char *msg, size_t n)
{
    unsigned char *m = malloc(n ? n : 1);
    memcpy(m, msg, n);
    bg_msg_kind kind;
    bg_error err = {0};
    bg_sampled out[4];
    bg_msg_seat s;
    bg_msg_step st;
    bg_msg_result h;
    bool ok = false;
    if (!bg_msg_get_kind(m, n, &kind, &err)) {
        if (kind == BG_MSG_SEAT) ok = !bg_msg_get_seat(m, n, &s, &err);
        if (kind == BG_MSG_RESULT) ok = !bg_msg_get_result(m, n, &h, out, 4, &err);
        if (kind == BG_MSG_STEP) {
            ok = !bg_msg_get_step(m, n, &st, &err);
            for (int32_t i = 0; ok && i < st.n_seqs; i++) {
                bg_msg_entry e;
                ok = !bg_msg_next_entry(&st, &e, &err);
                for (int32_t k = 0; ok && k < e.n_blocks; k++)
                    ok = e.blocks[k] != INT32_MIN;
            }
        }
    }
    free(m);
    return ok;
}

Test(step, cut_and_flipped_messages_are_refused_or_harmless)
{
    _Alignas(8) unsigned char buf[3][CAP], bad[CAP];
    const bg_msg_entry e[3] = {
        {4, 0, 5, 2, blocks, false}, {0, 17, 1, 0, NULL, true}, {1, 3, 1, 1, blocks, true}};
    bg_sampled in[2] = {{.slot = 1, .token = 9}, {.slot = 0, .token = 4, .n_top = 2}};
    size_t n[3] = {bg_msg_put_seat(buf[0], CAP, &seat), bg_msg_put_step(buf[1], CAP, 5, e, 3),
                   bg_msg_put_result(buf[2], CAP, &(bg_msg_result){2, 7, 1}, in)};
    for (int m = 0; m < 3; m++) {
        cr_assert(read_all(buf[m], n[m]));
        for (size_t cut = 0; cut < n[m]; cut++)
            cr_assert_not(read_all(buf[m], cut), "message %d cut at %zu", m, cut);
        for (uint64_t i = 0; i < 20000; i++) {
            memcpy(bad, buf[m], n[m]);
            for (uint64_t k = 0; k <= i % 3; k++) {
                uint64_t r = bg_mix64(i * 3 + k);
                bad[r % n[m]] = (unsigned char)(r >> 32 & 1 ? 0xff : r >> 40);
            }
            read_all(bad, n[m]);
        }
    }
}
