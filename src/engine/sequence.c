#include "engine/sequence.h"

#include <stdlib.h>
#include <string.h>

static void *copy_of(const void *data, size_t n, size_t size)
{
    void *p = malloc(n > 0 ? n * size : 1);
    if (p && n) memcpy(p, data, n * size);
    return p;
}

static bg_status check_spec(const bg_seq_spec *spec, int max_model_len, bg_error *err)
{
    const bg_sampling *s = &spec->sampling;
    if (spec->n_prompt < 1 || spec->n_regained < 0 || s->n_bias < 0 || s->n_stop_ids < 0)
        return bg_fail(err, BG_ARG, "sequence with %d prompt tokens: at least 1 is needed",
                       spec->n_prompt);
    if (spec->max_tokens < 1)
        return bg_fail(err, BG_ARG, "max_tokens %d: at least 1 is needed", spec->max_tokens);
    if (spec->n_prompt >= max_model_len)
        return bg_fail(err, BG_ARG,
                       "prompt of %d tokens: with one token of output it is longer than the "
                       "context of %d",
                       spec->n_prompt, max_model_len);
    if (s->n_logprobs > BG_MAX_TOP_LOGPROBS)
        return bg_fail(err, BG_ARG, "%d top logprobs: at most %d", s->n_logprobs,
                       BG_MAX_TOP_LOGPROBS);
    return BG_OK;
}

bg_status bg_seq_new(bg_seq **out, const bg_seq_spec *spec, int max_model_len, bg_error *err)
{
    *out = NULL;
    bg_status st = check_spec(spec, max_model_len, err);
    if (st) return st;
    bg_seq *s = calloc(1, sizeof *s);
    if (!s) return bg_fail(err, BG_NOMEM, "sequence: out of memory");
    int room = max_model_len - spec->n_prompt;
    s->user = spec->user;
    s->order = spec->order;
    s->ignore_eos = spec->ignore_eos;
    s->n_prompt = spec->n_prompt;
    s->max_total = spec->n_prompt + (spec->max_tokens < room ? spec->max_tokens : room);
    s->n_tokens = spec->n_prompt + spec->n_regained;
    if (s->n_tokens > s->max_total) s->n_tokens = s->max_total;
    s->cap_tokens = s->n_tokens;
    s->slot = -1;
    s->sampling = spec->sampling;
    size_t n_prompt = (size_t)s->n_prompt, n_all = (size_t)s->n_tokens;
    s->tokens = malloc(n_all * sizeof *s->tokens);
    s->sampling.bias =
        copy_of(spec->sampling.bias, (size_t)spec->sampling.n_bias, sizeof *s->sampling.bias);
    s->sampling.stop_ids = copy_of(spec->sampling.stop_ids, (size_t)spec->sampling.n_stop_ids,
                                   sizeof *s->sampling.stop_ids);
    if (!s->tokens || !s->sampling.bias || !s->sampling.stop_ids) {
        bg_seq_free(s);
        return bg_fail(err, BG_NOMEM, "sequence of %zu tokens: out of memory", n_all);
    }
    memcpy(s->tokens, spec->prompt, n_prompt * sizeof *s->tokens);
    if (n_all > n_prompt)
        memcpy(s->tokens + n_prompt, spec->regained, (n_all - n_prompt) * sizeof *s->tokens);
    *out = s;
    return BG_OK;
}

void bg_seq_free(bg_seq *s)
{
    if (!s) return;
    free(s->tokens);
    free(s->blocks);
    free((void *)s->sampling.bias);
    free((void *)s->sampling.stop_ids);
    free(s);
}

bg_status bg_seq_reserve(bg_seq *s, int block_tokens, bg_error *err)
{
    if (s->blocks) return BG_OK;
    size_t n_blocks = ((size_t)s->max_total + (size_t)block_tokens - 1) / (size_t)block_tokens;
    int32_t *tokens = realloc(s->tokens, (size_t)s->max_total * sizeof *tokens);
    if (tokens) {
        s->tokens = tokens;
        s->cap_tokens = s->max_total;
        s->blocks = malloc(n_blocks * sizeof *s->blocks);
    }
    if (!s->blocks)
        return bg_fail(err, BG_NOMEM, "sequence of up to %d tokens: out of memory",
                       (int)s->max_total);
    return BG_OK;
}

static bool among(const int32_t *ids, size_t n, int32_t id)
{
    for (size_t i = 0; i < n; i++)
        if (ids[i] == id) return true;
    return false;
}

bg_finish bg_seq_finish(const bg_seq *s, const int32_t *eog, size_t n_eog)
{
    if (s->n_tokens == s->n_prompt) return BG_FINISH_NONE;
    int32_t last = s->tokens[s->n_tokens - 1];
    bool stops = among(eog, n_eog, last)
                     ? !s->ignore_eos
                     : among(s->sampling.stop_ids, (size_t)s->sampling.n_stop_ids, last);
    if (stops) return BG_FINISH_STOP;
    return s->n_tokens >= s->max_total ? BG_FINISH_LENGTH : BG_FINISH_NONE;
}
