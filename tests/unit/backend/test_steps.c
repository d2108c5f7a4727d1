/* Seats and steps on the host, as every backend keeps them: places of tokens that are not known
 * yet. */
#include "backend/steps.h"

#include <criterion/criterion.h>

static const bg_backend_config config = {
    .max_tokens = 32, .max_seqs = 4, .max_out = 4, .max_ctx = 40, .vocab_size = 100};
static const bg_sampling plain = {.top_p = 1, .repetition_penalty = 1, .n_logprobs = -1};
static const int32_t tokens[] = {7, 8, 9, 10, 11};

static bg_status begin(bg_steps *s, const bg_seq_step *q, int n, bg_error *err)
{
    return bg_steps_begin(s, &(bg_batch){n, q, false}, err);
}

Test(steps, a_step_may_follow_before_its_token_is_known)
{
    bg_steps s;
    bg_error err = {0};
    cr_assert_eq(bg_steps_init(&s, &config, false, &err), BG_OK);
    cr_assert_eq(bg_steps_seat(&s, 2, &plain, tokens, 5, 1, &err), BG_OK, "%s", err.text);
    cr_assert_null(s.slots[2].tokens, "kept by the device");
    bg_seq_step q = {.slot = 2, .pos0 = 0, .n_tokens = 5, .sample = true};
    cr_assert_eq(begin(&s, &q, 1, &err), BG_OK, "%s", err.text);
    cr_expect_eq(s.slots[2].n_tokens, 5, "not yet");
    bg_steps_reserve(&s);
    cr_expect_eq(s.slots[2].n_tokens, 6);
    cr_expect_eq(s.slots[2].n_generated, 2);
    q = (bg_seq_step){.slot = 2, .pos0 = 5, .n_tokens = 1, .sample = true};
    cr_assert_eq(begin(&s, &q, 1, &err), BG_OK, "%s", err.text);
    bg_steps_reserve(&s);
    cr_expect_eq(s.slots[2].n_tokens, 7);
    q.pos0 = 7; /* the place after that is not there */
    cr_expect_eq(begin(&s, &q, 1, &err), BG_INTERNAL);
    /* A seat starts anew, whatever is under way. */
    cr_assert_eq(bg_steps_seat(&s, 2, &plain, tokens, 3, 0, &err), BG_OK);
    cr_expect_eq(s.slots[2].n_tokens, 3);
    cr_expect_eq(s.slots[2].n_generated, 0);
    bg_steps_release(&s);
}

Test(steps, only_outputs_get_a_place)
{
    bg_steps s;
    bg_error err = {0};
    cr_assert_eq(bg_steps_init(&s, &config, true, &err), BG_OK);
    for (int slot = 0; slot < 3; slot++)
        cr_assert_eq(bg_steps_seat(&s, slot, &plain, tokens, 5, 0, &err), BG_OK);
    const bg_seq_step q[] = {{.slot = 1, .pos0 = 0, .n_tokens = 5, .sample = true},
                             {.slot = 0, .pos0 = 0, .n_tokens = 3},
                             {.slot = 2, .pos0 = 0, .n_tokens = 5, .sample = true}};
    cr_assert_eq(begin(&s, q, 3, &err), BG_OK, "%s", err.text);
    bg_steps_reserve(&s);
    bg_steps_fill(&s, 1, 41);
    bg_steps_fill(&s, 2, 42);
    cr_expect_eq(s.slots[0].n_tokens, 5);
    cr_expect_eq(s.slots[1].tokens[5], 41);
    cr_expect_eq(s.slots[2].tokens[5], 42);
    cr_expect_eq(s.slots[2].tokens[4], 11);
    bg_steps_release(&s);
}
