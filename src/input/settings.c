/* Generation settings of a record: one row a field, and what is refused because it would change the
 * answer and cannot be honoured. */
#include "input/parts.h"

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A temperature below this picks the best token in float32 all the same, but divides by next to
 * nothing. */
#define TINY_TEMPERATURE 1e-6

static bool get_real(bg_parse *c, const char *name, double min, double max, double *out)
{
    const json_t *v = bg_parse_field(c, name);
    if (!v) return true;
    double d = json_is_number(v) ? json_number_value(v) : NAN;
    if (!(d >= min && d <= max)) {
        char must[96];
        snprintf(must, sizeof must, "a number from %g to %g", min, max);
        return bg_parse_bad_value(c, name, v, must);
    }
    *out = d + 0.0; /* -0.0 becomes 0 */
    return true;
}

/* *given (may be NULL) is set when the field is there, and left alone otherwise. */
static bool get_whole(bg_parse *c, const char *name, int64_t min, int64_t max, int64_t *out,
                      bool *given)
{
    const json_t *v = bg_parse_field(c, name);
    if (!v) return true;
    int64_t i;
    if (!bg_json_whole(v, &i) || i < min || i > max) {
        char must[96];
        snprintf(must, sizeof must, "a whole number from %lld to %lld", (long long)min,
                 (long long)max);
        return bg_parse_bad_value(c, name, v, must);
    }
    *out = i;
    if (given) *given = true;
    return true;
}

static bool get_int(bg_parse *c, const char *name, int min, int max, int *out, bool *given)
{
    int64_t v = *out;
    if (!get_whole(c, name, min, max, &v, given)) return false;
    *out = (int)v;
    return true;
}

static bool get_bool(bg_parse *c, const char *name, bool *out)
{
    const json_t *v = bg_parse_field(c, name);
    if (!v) return true;
    if (!json_is_boolean(v)) return bg_parse_bad_value(c, name, v, "true or false");
    *out = json_is_true(v);
    return true;
}

static bool penalties(bg_parse *c)
{
    bg_gen *g = &c->r->gen;
    double other = 0;
    if (!get_real(c, "repetition_penalty", 0.01, 100, &g->repetition_penalty) ||
        !get_real(c, "repeat_penalty", 0.01, 100, &other) ||
        !get_real(c, "presence_penalty", -2, 2, &g->presence_penalty) ||
        !get_real(c, "frequency_penalty", -2, 2, &g->frequency_penalty))
        return false;
    if (other != 0) {
        if (bg_parse_field(c, "repetition_penalty") && other != g->repetition_penalty)
            return bg_parse_bad(c, BG_CODE_FIELD, "repeat_penalty",
                                "%srepeat_penalty and %srepetition_penalty are two names of one "
                                "setting and differ",
                                c->prefix, c->prefix);
        g->repetition_penalty = other;
    }
    return true;
}

static bool lengths(bg_parse *c)
{
    bg_gen *g = &c->r->gen;
    bool given = false, min_given = false;
    /* Both are checked; the newer name rules. */
    if (!get_int(c, "max_tokens", 1, INT_MAX, &g->max_tokens, &given) ||
        !get_int(c, "max_completion_tokens", 1, INT_MAX, &g->max_tokens, &given) ||
        !get_int(c, "min_tokens", 0, INT_MAX, &g->min_tokens, &min_given))
        return false;
    if (min_given && given && g->min_tokens > g->max_tokens)
        return bg_parse_bad(c, BG_CODE_FIELD, "min_tokens",
                            "%smin_tokens is %d, more than the %d tokens allowed for the answer",
                            c->prefix, g->min_tokens, g->max_tokens);
    return true;
}

/* Chat: a boolean, with the number beside it. Completions: the number. Plain lines may use either.
 */
static bool logprobs(bg_parse *c)
{
    bg_request *r = c->r;
    const json_t *v = bg_parse_field(c, "logprobs");
    bool chat = r->api == BG_API_CHAT, is_bool = json_is_boolean(v), top_given = false;
    int top = 0;
    if (v && is_bool && !chat && r->openai)
        return bg_parse_bad_value(c, "logprobs", v, "a whole number in a completions request");
    if (v && !is_bool && chat && r->openai)
        return bg_parse_bad_value(c, "logprobs", v, "true or false in a chat request");
    if (v && !is_bool && !get_int(c, "logprobs", 0, c->limits.max_logprobs, &r->gen.logprobs, NULL))
        return false;
    if (!get_int(c, "top_logprobs", 0, c->limits.max_logprobs, &top, &top_given)) return false;
    if (is_bool) r->gen.logprobs = json_is_true(v) ? top : -1;
    if (top_given && top > 0 && !(is_bool && json_is_true(v)))
        return bg_parse_bad(c, BG_CODE_FIELD, "top_logprobs", "%stop_logprobs needs logprobs: true",
                            c->prefix);
    return true;
}

static bool choices(bg_parse *c)
{
    bg_gen *g = &c->r->gen;
    int best = 0;
    if (!get_int(c, "n", 1, c->limits.max_n, &g->n, NULL) ||
        !get_int(c, "best_of", 1, INT_MAX, &best, NULL))
        return false;
    if (best && best < g->n)
        return bg_parse_bad(c, BG_CODE_FIELD, "best_of", "%sbest_of is %d, less than n, %d",
                            c->prefix, best, g->n);
    if (best > g->n)
        return bg_parse_bad(c, BG_CODE_UNSUPPORTED, "best_of",
                            "%sbest_of above n is not supported; ask for n choices and pick one",
                            c->prefix);
    return true;
}

/* Each sequence has an automaton of them, of some 32 bytes a byte. */
enum { MAX_STOP_BYTES = 64 << 10 };

static bool add_stop(bg_parse *c, const char *name, const json_t *v)
{
    bg_request *r = c->r;
    if (!json_is_string(v)) return bg_parse_bad_value(c, name, v, "a string");
    const char *s = json_string_value(v);
    if (!*s || strlen(s) != json_string_length(v))
        return bg_parse_bad(c, BG_CODE_FIELD, name, "%s%s is %s; leave it out instead", c->prefix,
                            name, json_string_length(v) ? "a string with a NUL" : "empty");
    r->stops[r->n_stops] = strdup(s);
    return r->stops[r->n_stops++] ? true : bg_parse_nomem(c);
}

static bool stops(bg_parse *c)
{
    bg_request *r = c->r;
    const json_t *v = bg_parse_field(c, "stop");
    if (!v) return true;
    if (!json_is_string(v) && !json_is_array(v))
        return bg_parse_bad_value(c, "stop", v, "a string or an array of strings");
    size_t n = json_is_array(v) ? json_array_size(v) : 1;
    if (n > (size_t)c->limits.max_stops)
        return bg_parse_bad(c, BG_CODE_FIELD, "stop",
                            "%sstop has %zu strings; at most %d are allowed", c->prefix, n,
                            c->limits.max_stops);
    size_t bytes = json_string_length(v);
    for (size_t i = 0; i < json_array_size(v); i++)
        bytes += json_string_length(json_array_get(v, i));
    if (bytes > MAX_STOP_BYTES)
        return bg_parse_bad(c, BG_CODE_FIELD, "stop",
                            "%sstop has %zu bytes in all; at most %d are allowed", c->prefix, bytes,
                            MAX_STOP_BYTES);
    r->stops = calloc(n + 1, sizeof *r->stops);
    if (!r->stops) return bg_parse_nomem(c);
    if (json_is_string(v)) return add_stop(c, "stop", v);
    for (size_t i = 0; i < n; i++) {
        char name[32];
        snprintf(name, sizeof name, "stop[%zu]", i);
        if (!add_stop(c, name, json_array_get(v, i))) return false;
    }
    return true;
}

static bool stop_ids(bg_parse *c)
{
    bg_request *r = c->r;
    const json_t *v = bg_parse_field(c, "stop_token_ids");
    if (!v) return true;
    if (!json_is_array(v))
        return bg_parse_bad_value(c, "stop_token_ids", v, "an array of token ids");
    size_t n = json_array_size(v);
    if (n > 1024)
        return bg_parse_bad(c, BG_CODE_FIELD, "stop_token_ids",
                            "%sstop_token_ids has %zu ids; at most 1024 are allowed", c->prefix, n);
    r->stop_ids = calloc(n + 1, sizeof *r->stop_ids);
    if (!r->stop_ids) return bg_parse_nomem(c);
    for (size_t i = 0; i < n; i++) {
        const json_t *id = json_array_get(v, i);
        int64_t t;
        if (!bg_json_whole(id, &t) || t < 0 || t > INT32_MAX) {
            char name[48];
            snprintf(name, sizeof name, "stop_token_ids[%zu]", i);
            return bg_parse_bad_value(c, name, id, "a token id");
        }
        r->stop_ids[r->n_stop_ids++] = (int32_t)t;
    }
    return true;
}

/* A key of logit_bias: a decimal token id in its shortest form, so that none comes twice. */
static bool token_key(const char *key, int32_t *out)
{
    size_t n = strlen(key);
    if (n == 0 || n > 10 || strspn(key, "0123456789") != n || (n > 1 && key[0] == '0'))
        return false;
    int64_t t = strtoll(key, NULL, 10);
    *out = (int32_t)t;
    return t <= INT32_MAX;
}

static bool logit_bias(bg_parse *c)
{
    bg_request *r = c->r;
    json_t *v = bg_parse_field(c, "logit_bias"), *bias;
    if (!v) return true;
    if (!json_is_object(v))
        return bg_parse_bad_value(c, "logit_bias", v, "an object of token id to number");
    r->bias = calloc(json_object_size(v) + 1, sizeof *r->bias);
    if (!r->bias) return bg_parse_nomem(c);
    const char *key;
    json_object_foreach(v, key, bias)
    {
        char name[64];
        snprintf(name, sizeof name, "logit_bias.%.32s", key);
        int32_t token;
        if (!token_key(key, &token))
            return bg_parse_bad(c, BG_CODE_FIELD, name, "%s%s: the key is not a token id",
                                c->prefix, name);
        double d = json_is_number(bias) ? json_number_value(bias) : NAN;
        if (!(d >= -100 && d <= 100))
            return bg_parse_bad_value(c, name, bias, "a number from -100 to 100");
        r->bias[r->n_bias++] = (bg_bias){token, (float)d};
    }
    return true;
}

/* What a field may say without asking for anything that is not there. */
enum {
    OK_FALSE = 1,
    OK_TRUE = 2,
    OK_ZERO = 4,
    OK_ONE = 8,
    OK_MINUS1 = 16,
    OK_EMPTY = 32,
    OK_NONE = 0
};

typedef struct refused {
    const char *name;
    int ok;
    const char *hint; /* what to do instead, or NULL */
} refused;

static const refused list[] = {
    {"guided_json", OK_NONE, NULL},
    {"guided_regex", OK_NONE, NULL},
    {"guided_choice", OK_NONE, NULL},
    {"guided_grammar", OK_NONE, NULL},
    {"guided_whitespace_pattern", OK_NONE, NULL},
    {"structured_outputs", OK_NONE, NULL},
    {"structural_tag", OK_NONE, NULL},
    {"grammar", OK_EMPTY, NULL},
    {"json_schema", OK_NONE, NULL},
    {"regex", OK_NONE, NULL},
    {"ebnf", OK_NONE, NULL},
    {"logits_processors", OK_EMPTY, NULL},
    {"logit_processors", OK_EMPTY, NULL},
    {"custom_logit_processor", OK_NONE, NULL},
    {"bad_words", OK_EMPTY, NULL},
    {"allowed_token_ids", OK_NONE, NULL},
    {"thinking_token_budget", OK_NONE, NULL},
    {"use_beam_search", OK_FALSE, NULL},
    {"length_penalty", OK_ONE, NULL},
    {"truncate_prompt_tokens", OK_NONE, NULL},
    {"prompt_logprobs", OK_NONE, NULL},
    {"prompt_embeds", OK_NONE, NULL},
    {"suffix", OK_EMPTY, NULL},
    {"continue_final_message", OK_FALSE, NULL},
    {"chat_template", OK_NONE, "use --chat-template for the whole job"},
    {"mm_processor_kwargs", OK_EMPTY, NULL},
    {"audio", OK_NONE, NULL},
    {"web_search_options", OK_NONE, NULL},
    {"functions", OK_EMPTY, "use tools"},
    {"return_tokens_as_token_ids", OK_FALSE, NULL},
    {"return_token_ids", OK_FALSE, NULL},
    {"typical_p", OK_ONE, NULL},
    {"top_a", OK_ZERO, NULL},
    {"tfs_z", OK_ONE, NULL},
    {"top_n_sigma", OK_ZERO | OK_MINUS1, NULL},
    {"mirostat", OK_ZERO, NULL},
    {"dynatemp_range", OK_ZERO, NULL},
    {"xtc_probability", OK_ZERO, NULL},
    {"dry_multiplier", OK_ZERO, NULL},
    {"no_repeat_ngram_size", OK_ZERO, NULL},
    {"num_beams", OK_ONE, NULL},
    {"n_predict", OK_NONE, "the name here is max_tokens"},
    {"num_predict", OK_NONE, "the name here is max_tokens"},
    {"max_new_tokens", OK_NONE, "the name here is max_tokens"},
    {"max_length", OK_NONE, "the name here is max_tokens"},
};

static bool harmless(const json_t *v, int ok)
{
    if (json_is_false(v)) return ok & OK_FALSE;
    if (json_is_true(v)) return ok & OK_TRUE;
    if (json_is_number(v)) {
        double d = json_number_value(v);
        return (d == 0 && ok & OK_ZERO) || (d == 1 && ok & OK_ONE) || (d == -1 && ok & OK_MINUS1);
    }
    bool empty = (json_is_string(v) && json_string_length(v) == 0) ||
                 (json_is_array(v) && json_array_size(v) == 0) ||
                 (json_is_object(v) && json_object_size(v) == 0);
    return empty && ok & OK_EMPTY;
}

static bool response_format(bg_parse *c)
{
    static const char *const known[] = {"json_object", "json_schema", "structural_tag", "grammar",
                                        "regex"};
    const json_t *v = bg_parse_field(c, "response_format");
    if (!v) return true;
    if (!json_is_object(v)) return bg_parse_bad_value(c, "response_format", v, "an object");
    const json_t *type = json_object_get(v, "type");
    if (!json_is_string(type))
        return bg_parse_bad(c, type ? BG_CODE_FIELD : BG_CODE_MISSING, "response_format.type",
                            "%sresponse_format.type must be a string", c->prefix);
    const char *t = json_string_value(type);
    if (bg_json_is(type, "text")) return true;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (bg_json_is(type, known[i]))
            return bg_parse_bad(c, BG_CODE_UNSUPPORTED, "response_format",
                                "%sresponse_format %s is not supported; only text is", c->prefix,
                                t);
    return bg_parse_bad(c, BG_CODE_FIELD, "response_format.type",
                        "%sresponse_format.type is %.40s, an unknown kind", c->prefix, t);
}

static bool choice_of_tool(bg_parse *c, const char *name)
{
    const json_t *v = bg_parse_field(c, name);
    if (!v) return true;
    if (!json_is_string(v) && !json_is_object(v))
        return bg_parse_bad_value(c, name, v, "\"none\" or \"auto\"");
    if (bg_json_is(v, "none") || bg_json_is(v, "auto")) return true;
    return bg_parse_bad(c, BG_CODE_UNSUPPORTED, name,
                        "%s%s: a call cannot be forced; only none and auto are supported",
                        c->prefix, name);
}

static bool modalities(bg_parse *c)
{
    const json_t *v = bg_parse_field(c, "modalities");
    if (!v) return true;
    if (!json_is_array(v)) return bg_parse_bad_value(c, "modalities", v, "an array");
    for (size_t i = 0; i < json_array_size(v); i++) {
        if (!bg_json_is(json_array_get(v, i), "text"))
            return bg_parse_bad(c, BG_CODE_UNSUPPORTED, "modalities",
                                "%smodalities: only text is supported", c->prefix);
    }
    return true;
}

static bool refuse(bg_parse *c)
{
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        const json_t *v = bg_parse_field(c, list[i].name);
        if (!v || harmless(v, list[i].ok)) continue;
        return bg_parse_bad(c, BG_CODE_UNSUPPORTED, list[i].name, "%s%s is not supported%s%s",
                            c->prefix, list[i].name, list[i].hint ? "; " : "",
                            list[i].hint ? list[i].hint : "");
    }
    /* Whether a start token is added is the tokenizer's and the template's business: only a wish
     * for what happens anyway can be granted. */
    bool chat = c->r->api == BG_API_CHAT, add = !chat;
    if (!get_bool(c, "add_special_tokens", &add)) return false;
    if (add == chat)
        return bg_parse_bad(c, BG_CODE_UNSUPPORTED, "add_special_tokens",
                            "%sadd_special_tokens cannot be changed here", c->prefix);
    return response_format(c) && modalities(c) && choice_of_tool(c, "tool_choice") &&
           choice_of_tool(c, "function_call");
}

static bool echo(bg_parse *c)
{
    bg_gen *g = &c->r->gen;
    if (!get_bool(c, "echo", &g->echo)) return false;
    if (c->r->api == BG_API_CHAT) {
        if (g->echo && bg_parse_field(c, "echo"))
            return bg_parse_bad(c, BG_CODE_UNSUPPORTED, "echo",
                                "%secho is not supported in a chat request", c->prefix);
        g->echo = false;
    }
    if (g->echo && g->logprobs >= 0)
        return bg_parse_bad(c, BG_CODE_UNSUPPORTED, "echo",
                            "%secho with logprobs is not supported: the prompt's tokens have none",
                            c->prefix);
    return true;
}

bool bg_parse_settings(bg_parse *c)
{
    bg_request *r = c->r;
    bg_gen *g = &r->gen;
    int64_t seed = 0;
    bool has_seed = false, skip_special = !g->show_special;
    if (!refuse(c) || !get_real(c, "temperature", 0, 100, &g->temperature) ||
        !get_real(c, "top_p", 0, 1, &g->top_p) || !get_real(c, "min_p", 0, 1, &g->min_p) ||
        !get_int(c, "top_k", -1, INT_MAX, &g->top_k, NULL) || !penalties(c) || !lengths(c) ||
        !choices(c) || !logprobs(c) ||
        !get_whole(c, "seed", INT64_MIN, INT64_MAX, &seed, &has_seed) ||
        !get_bool(c, "ignore_eos", &g->ignore_eos) ||
        !get_bool(c, "include_stop_str_in_output", &g->include_stop) ||
        !get_bool(c, "skip_special_tokens", &skip_special) || !echo(c) || !stops(c) ||
        !stop_ids(c) || !logit_bias(c))
        return false;
    if (has_seed) {
        g->has_seed = true;
        g->seed = (uint64_t)seed; /* a negative one is the same bits */
    }
    if (g->top_k < 0) g->top_k = 0;
    if (g->temperature < TINY_TEMPERATURE) g->temperature = 0;
    g->show_special = !skip_special;
    return true;
}
