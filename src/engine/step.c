#include "engine/step.h"

#include <string.h>

typedef struct seat_head {
    int32_t kind, slot;
    uint64_t seed;
    float temperature;
    int32_t top_k;
    float top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty;
    int32_t n_logprobs, min_tokens, n_generated, n_tokens, n_blocks, n_bias, n_stop_ids;
} seat_head;

typedef struct step_head {
    int32_t kind, n_seqs;
    uint64_t number;
} step_head;

typedef struct entry_head {
    int32_t slot, pos0, n_tokens, n_blocks, sample;
} entry_head;

typedef struct result_head {
    int32_t kind, n;
    uint64_t number;
    int64_t step_ns;
} result_head;

typedef struct sampled_head {
    int32_t slot, token;
    float logprob;
    int32_t n_top;
} sampled_head;

_Static_assert(sizeof(seat_head) == 72 && sizeof(step_head) == 16 && sizeof(entry_head) == 20 &&
                   sizeof(result_head) == 24 && sizeof(sampled_head) == 16 &&
                   sizeof(bg_logit_bias) == 8 && sizeof(bg_top) == 8,
               "the layout in step.h");

static unsigned char *put(unsigned char *at, const void *data, size_t n)
{
    if (n) memcpy(at, data, n);
    return at + n;
}

/* The next n bytes; NULL: the message is too short. Counts are below 2^31, so nothing overflows. */
static const void *get(const unsigned char **at, size_t *left, int64_t count, size_t size)
{
    if (count < 0 || (uint64_t)count > *left / size) return NULL;
    const void *p = *at;
    *at += (size_t)count * size;
    *left -= (size_t)count * size;
    return p;
}

/* ---- seat ------------------------------------------------------------------------------------ */

size_t bg_msg_seat_bytes(const bg_msg_seat *s)
{
    return sizeof(seat_head) + 4 * ((size_t)s->n_tokens + (size_t)s->n_blocks) +
           sizeof(bg_logit_bias) * (size_t)s->sampling.n_bias + 4 * (size_t)s->sampling.n_stop_ids;
}

size_t bg_msg_put_seat(void *buf, size_t cap, const bg_msg_seat *s)
{
    const bg_sampling *p = &s->sampling;
    size_t n = bg_msg_seat_bytes(s);
    if (n > cap) return 0;
    seat_head h = {.kind = BG_MSG_SEAT,
                   .slot = s->slot,
                   .seed = p->seed,
                   .temperature = p->temperature,
                   .top_k = p->top_k,
                   .top_p = p->top_p,
                   .min_p = p->min_p,
                   .repetition_penalty = p->repetition_penalty,
                   .presence_penalty = p->presence_penalty,
                   .frequency_penalty = p->frequency_penalty,
                   .n_logprobs = p->n_logprobs,
                   .min_tokens = p->min_tokens,
                   .n_generated = s->n_generated,
                   .n_tokens = s->n_tokens,
                   .n_blocks = s->n_blocks,
                   .n_bias = p->n_bias,
                   .n_stop_ids = p->n_stop_ids};
    unsigned char *at = put(buf, &h, sizeof h);
    at = put(at, s->tokens, 4 * (size_t)s->n_tokens);
    at = put(at, s->blocks, 4 * (size_t)s->n_blocks);
    at = put(at, p->bias, sizeof *p->bias * (size_t)p->n_bias);
    put(at, p->stop_ids, 4 * (size_t)p->n_stop_ids);
    return n;
}

bg_status bg_msg_get_seat(const void *msg, size_t n, bg_msg_seat *s, bg_error *err)
{
    seat_head h;
    const unsigned char *at = msg;
    const void *head = get(&at, &n, 1, sizeof h);
    if (!head) return bg_fail(err, BG_INTERNAL, "seat message is cut short");
    memcpy(&h, head, sizeof h);
    const int32_t *tokens = get(&at, &n, h.n_tokens, 4);
    const int32_t *blocks = get(&at, &n, h.n_blocks, 4);
    const bg_logit_bias *bias = get(&at, &n, h.n_bias, sizeof *bias);
    const int32_t *stop_ids = get(&at, &n, h.n_stop_ids, 4);
    if (h.kind != BG_MSG_SEAT || !tokens || !blocks || !bias || !stop_ids || n || h.n_tokens < 1 ||
        h.n_generated < 0 || h.n_generated >= h.n_tokens)
        return bg_fail(err, BG_INTERNAL, "seat message for slot %d is damaged", (int)h.slot);
    *s = (bg_msg_seat){.slot = h.slot,
                       .n_generated = h.n_generated,
                       .n_tokens = h.n_tokens,
                       .n_blocks = h.n_blocks,
                       .tokens = tokens,
                       .blocks = blocks,
                       .sampling = {.temperature = h.temperature,
                                    .top_k = h.top_k,
                                    .top_p = h.top_p,
                                    .min_p = h.min_p,
                                    .repetition_penalty = h.repetition_penalty,
                                    .presence_penalty = h.presence_penalty,
                                    .frequency_penalty = h.frequency_penalty,
                                    .n_logprobs = h.n_logprobs,
                                    .min_tokens = h.min_tokens,
                                    .seed = h.seed,
                                    .n_bias = h.n_bias,
                                    .bias = bias,
                                    .n_stop_ids = h.n_stop_ids,
                                    .stop_ids = stop_ids}};
    return BG_OK;
}

/* ---- step and stop --------------------------------------------------------------------------- */

size_t bg_msg_step_bytes(int32_t n_seqs, int64_t n_blocks)
{
    return sizeof(step_head) + (size_t)n_seqs * sizeof(entry_head) + 4 * (size_t)n_blocks;
}

size_t bg_msg_put_step(void *buf, size_t cap, uint64_t number, const bg_msg_entry *e, int32_t n)
{
    int64_t n_blocks = 0;
    for (int32_t i = 0; i < n; i++)
        n_blocks += e[i].n_blocks;
    size_t bytes = bg_msg_step_bytes(n, n_blocks);
    if (bytes > cap) return 0;
    step_head h = {BG_MSG_STEP, n, number};
    unsigned char *at = put(buf, &h, sizeof h);
    for (int32_t i = 0; i < n; i++) {
        entry_head eh = {e[i].slot, e[i].pos0, e[i].n_tokens, e[i].n_blocks, e[i].sample};
        at = put(at, &eh, sizeof eh);
        at = put(at, e[i].blocks, 4 * (size_t)e[i].n_blocks);
    }
    return bytes;
}

size_t bg_msg_put_stop(void *buf, size_t cap)
{
    const int32_t h[2] = {BG_MSG_STOP, 0};
    if (cap < sizeof h) return 0;
    memcpy(buf, h, sizeof h);
    return sizeof h;
}

bg_status bg_msg_get_step(const void *msg, size_t n, bg_msg_step *s, bg_error *err)
{
    step_head h;
    const unsigned char *at = msg;
    const void *head = get(&at, &n, 1, sizeof h);
    if (!head) return bg_fail(err, BG_INTERNAL, "step message is cut short");
    memcpy(&h, head, sizeof h);
    if (h.kind != BG_MSG_STEP || h.n_seqs < 1 || (size_t)h.n_seqs > n / sizeof(entry_head))
        return bg_fail(err, BG_INTERNAL, "step message with %d sequences in %zu bytes is damaged",
                       (int)h.n_seqs, n);
    *s = (bg_msg_step){h.n_seqs, h.number, at, n};
    return BG_OK;
}

bg_status bg_msg_next_entry(bg_msg_step *s, bg_msg_entry *e, bg_error *err)
{
    entry_head h;
    const void *head = get(&s->at, &s->left, 1, sizeof h);
    if (!head) return bg_fail(err, BG_INTERNAL, "step message is cut short");
    memcpy(&h, head, sizeof h);
    const int32_t *blocks = get(&s->at, &s->left, h.n_blocks, 4);
    if (!blocks || h.n_tokens < 1 || h.pos0 < 0 || h.slot < 0 || (h.sample != 0 && h.sample != 1))
        return bg_fail(err, BG_INTERNAL, "step message: entry of slot %d is damaged", (int)h.slot);
    *e = (bg_msg_entry){h.slot, h.pos0, h.n_tokens, h.n_blocks, blocks, h.sample == 1};
    return BG_OK;
}

/* ---- result ---------------------------------------------------------------------------------- */

size_t bg_msg_result_max_bytes(int32_t n)
{
    return sizeof(result_head) +
           (size_t)n * (sizeof(sampled_head) + BG_MAX_TOP_LOGPROBS * sizeof(bg_top));
}

size_t bg_msg_put_result(void *buf, size_t cap, const bg_msg_result *head, const bg_sampled *s)
{
    size_t bytes = sizeof(result_head);
    for (int32_t i = 0; i < head->n; i++) {
        if (s[i].n_top < 0 || s[i].n_top > BG_MAX_TOP_LOGPROBS) return 0;
        bytes += sizeof(sampled_head) + (size_t)s[i].n_top * sizeof(bg_top);
    }
    if (bytes > cap) return 0;
    result_head h = {BG_MSG_RESULT, head->n, head->number, head->step_ns};
    unsigned char *at = put(buf, &h, sizeof h);
    for (int32_t i = 0; i < head->n; i++) {
        sampled_head sh = {s[i].slot, s[i].token, s[i].logprob, s[i].n_top};
        at = put(at, &sh, sizeof sh);
        at = put(at, s[i].top, (size_t)s[i].n_top * sizeof(bg_top));
    }
    return bytes;
}

bg_status bg_msg_get_result(const void *msg, size_t n, bg_msg_result *head, bg_sampled *out,
                            int32_t room, bg_error *err)
{
    result_head h;
    const unsigned char *at = msg;
    const void *p = get(&at, &n, 1, sizeof h);
    if (!p) return bg_fail(err, BG_INTERNAL, "result message is cut short");
    memcpy(&h, p, sizeof h);
    if (h.kind != BG_MSG_RESULT || h.n < 0 || h.n > room)
        return bg_fail(err, BG_INTERNAL, "result message of kind %d with %d tokens, at most %d fit",
                       (int)h.kind, (int)h.n, (int)room);
    *head = (bg_msg_result){h.n, h.number, h.step_ns};
    for (int32_t i = 0; i < h.n; i++) {
        sampled_head sh = {0};
        const void *q = get(&at, &n, 1, sizeof sh);
        if (q) memcpy(&sh, q, sizeof sh);
        const bg_top *top =
            q && sh.n_top <= BG_MAX_TOP_LOGPROBS ? get(&at, &n, sh.n_top, sizeof *top) : NULL;
        if (!top) return bg_fail(err, BG_INTERNAL, "result message: token %d is damaged", (int)i);
        out[i].slot = sh.slot;
        out[i].token = sh.token;
        out[i].logprob = sh.logprob;
        out[i].n_top = sh.n_top;
        memcpy(out[i].top, top, (size_t)sh.n_top * sizeof *top);
    }
    if (n) return bg_fail(err, BG_INTERNAL, "result message: %zu bytes too many", n);
    return BG_OK;
}

bg_status bg_msg_get_kind(const void *msg, size_t n, bg_msg_kind *kind, bg_error *err)
{
    int32_t k;
    if (n < 8) return bg_fail(err, BG_INTERNAL, "message of %zu bytes", n);
    memcpy(&k, msg, sizeof k);
    if (k < BG_MSG_SEAT || k > BG_MSG_RESULT)
        return bg_fail(err, BG_INTERNAL, "message of unknown kind %d", (int)k);
    *kind = (bg_msg_kind)k;
    return BG_OK;
}
