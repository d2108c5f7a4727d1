#include <criterion/criterion.h>

#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/utf8.h"
#include "input/input.h"

/* ---- memory that runs out
 * ------------------------------------------------------------------------- */

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { CAN_FAIL = 0 };
static long allocations_left = -1;
#else
enum { CAN_FAIL = 1 };
static long allocations_left = -1; /* -1: no end */

extern void *__libc_malloc(size_t n);
extern void *__libc_calloc(size_t n, size_t size);
extern void *__libc_realloc(void *p, size_t n);

static bool refuse(void)
{
    if (allocations_left < 0) return false;
    if (allocations_left == 0) {
        errno = ENOMEM;
        return true;
    }
    allocations_left--;
    return false;
}

void *malloc(size_t n)
{
    return refuse() ? NULL : __libc_malloc(n);
}

void *calloc(size_t n, size_t size)
{
    return refuse() ? NULL : __libc_calloc(n, size);
}

void *realloc(void *p, size_t n)
{
    return refuse() ? NULL : __libc_realloc(p, n);
}
#endif

/* ---- one line
 * --------------------------------------------------------------------------------------- */

static bg_status parse_n(bg_request *r, const char *s, size_t n)
{
    bg_gen gen;
    bg_gen_defaults(&gen);
    bg_line line = {.record = 6, .line = 7, .data = s, .n = n};
    bg_error err = {0};
    return bg_request_parse(r, &line, &gen, NULL, &err);
}

static bg_request parse(const char *s)
{
    bg_request r;
    cr_assert_eq(parse_n(&r, s, strlen(s)), BG_OK);
    return r;
}

static char text[8192];

static const char *chat(const char *fields)
{
    snprintf(text, sizeof text,
             "{\"custom_id\":\"a\",\"method\":\"POST\",\"url\":\"/v1/chat/completions\",\"body\":{"
             "\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]%s%s}}",
             *fields ? "," : "", fields);
    return text;
}

static const char *completion(const char *fields)
{
    snprintf(text, sizeof text,
             "{\"custom_id\":\"a\",\"method\":\"POST\",\"url\":\"/v1/completions\",\"body\":{%s}}",
             fields);
    return text;
}

static const char *message(const char *m)
{
    snprintf(text, sizeof text,
             "{\"custom_id\":\"a\",\"method\":\"POST\",\"url\":\"/v1/chat/completions\",\"body\":{"
             "\"messages\":[{\"role\":\"user\",\"content\":\"hi\"},%s]}}",
             m);
    return text;
}

/* ---- what is refused, and how it is named
 * ----------------------------------------------------------- */

typedef struct refusal {
    const char *fields, *code, *param;
} refusal;

static void expect_refusals(const char *(*line)(const char *), const refusal *list, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        bg_request r = parse(line(list[i].fields));
        cr_expect(r.error_code && !strcmp(r.error_code, list[i].code), "%s: %s (%s)",
                  list[i].fields, r.error_code ? r.error_code : "passed", r.error_message);
        cr_expect(r.error_param && !strcmp(r.error_param, list[i].param), "%s: param %s",
                  list[i].fields, r.error_param);
        cr_expect(r.error_message && strstr(r.error_message, list[i].param), "%s: message %s",
                  list[i].fields, r.error_message);
        cr_expect_str_eq(r.id, "\"a\"");
        bg_request_release(&r);
    }
}

#define REFUSED(line, list) expect_refusals(line, list, sizeof list / sizeof *list)

Test(request, chat_fields_refused)
{
    static const refusal list[] = {
        {"\"temperature\":-0.1", BG_CODE_FIELD, "body.temperature"},
        {"\"temperature\":\"1\"", BG_CODE_FIELD, "body.temperature"},
        {"\"temperature\":1e99", BG_CODE_FIELD, "body.temperature"},
        {"\"temperature\":[1]", BG_CODE_FIELD, "body.temperature"},
        {"\"top_p\":1.0001", BG_CODE_FIELD, "body.top_p"},
        {"\"min_p\":-1", BG_CODE_FIELD, "body.min_p"},
        {"\"top_k\":-2", BG_CODE_FIELD, "body.top_k"},
        {"\"top_k\":1.5", BG_CODE_FIELD, "body.top_k"},
        {"\"top_k\":4294967297", BG_CODE_FIELD, "body.top_k"},
        {"\"repetition_penalty\":0", BG_CODE_FIELD, "body.repetition_penalty"},
        {"\"repetition_penalty\":0.009", BG_CODE_FIELD, "body.repetition_penalty"},
        {"\"repetition_penalty\":1e-300", BG_CODE_FIELD, "body.repetition_penalty"},
        {"\"repetition_penalty\":1.5,\"repeat_penalty\":1.1", BG_CODE_FIELD, "body.repeat_penalty"},
        {"\"presence_penalty\":2.1", BG_CODE_FIELD, "body.presence_penalty"},
        {"\"frequency_penalty\":true", BG_CODE_FIELD, "body.frequency_penalty"},
        {"\"max_tokens\":0", BG_CODE_FIELD, "body.max_tokens"},
        {"\"max_tokens\":2147483648", BG_CODE_FIELD, "body.max_tokens"},
        {"\"max_tokens\":4,\"max_completion_tokens\":0", BG_CODE_FIELD,
         "body.max_completion_tokens"},
        {"\"max_tokens\":0,\"max_completion_tokens\":4", BG_CODE_FIELD, "body.max_tokens"},
        {"\"max_tokens\":4,\"min_tokens\":5", BG_CODE_FIELD, "body.min_tokens"},
        {"\"n\":0", BG_CODE_FIELD, "body.n"},
        {"\"n\":129", BG_CODE_FIELD, "body.n"},
        {"\"n\":2,\"best_of\":1", BG_CODE_FIELD, "body.best_of"},
        {"\"n\":2,\"best_of\":3", BG_CODE_UNSUPPORTED, "body.best_of"},
        {"\"logprobs\":3", BG_CODE_FIELD, "body.logprobs"},
        {"\"logprobs\":true,\"top_logprobs\":21", BG_CODE_FIELD, "body.top_logprobs"},
        {"\"top_logprobs\":2", BG_CODE_FIELD, "body.top_logprobs"},
        {"\"logprobs\":false,\"top_logprobs\":2", BG_CODE_FIELD, "body.top_logprobs"},
        {"\"seed\":1.5", BG_CODE_FIELD, "body.seed"},
        {"\"seed\":1e30", BG_CODE_FIELD, "body.seed"},
        {"\"seed\":18446744073709551616", BG_CODE_FIELD, "body.seed"},
        {"\"stop\":{}", BG_CODE_FIELD, "body.stop"},
        {"\"stop\":[\"a\",3]", BG_CODE_FIELD, "body.stop[1]"},
        {"\"stop\":[\"a\",\"\"]", BG_CODE_FIELD, "body.stop[1]"},
        {"\"stop\":\"a\\u0000b\"", BG_CODE_FIELD, "body.stop"},
        {"\"stop_token_ids\":5", BG_CODE_FIELD, "body.stop_token_ids"},
        {"\"stop_token_ids\":[1,-1]", BG_CODE_FIELD, "body.stop_token_ids[1]"},
        {"\"logit_bias\":[]", BG_CODE_FIELD, "body.logit_bias"},
        {"\"logit_bias\":{\"x\":1}", BG_CODE_FIELD, "body.logit_bias.x"},
        {"\"logit_bias\":{\"01\":1}", BG_CODE_FIELD, "body.logit_bias.01"},
        {"\"logit_bias\":{\"-1\":1}", BG_CODE_FIELD, "body.logit_bias.-1"},
        {"\"logit_bias\":{\"4294967296\":1}", BG_CODE_FIELD, "body.logit_bias.4294967296"},
        {"\"logit_bias\":{\"5\":101}", BG_CODE_FIELD, "body.logit_bias.5"},
        {"\"logit_bias\":{\"5\":\"1\"}", BG_CODE_FIELD, "body.logit_bias.5"},
        {"\"ignore_eos\":1", BG_CODE_FIELD, "body.ignore_eos"},
        {"\"response_format\":{\"type\":\"json_object\"}", BG_CODE_UNSUPPORTED,
         "body.response_format"},
        {"\"response_format\":{}", BG_CODE_MISSING, "body.response_format.type"},
        {"\"guided_json\":{}", BG_CODE_UNSUPPORTED, "body.guided_json"},
        {"\"logits_processors\":[\"x\"]", BG_CODE_UNSUPPORTED, "body.logits_processors"},
        {"\"tool_choice\":\"required\"", BG_CODE_UNSUPPORTED, "body.tool_choice"},
        {"\"tool_choice\":{\"type\":\"function\"}", BG_CODE_UNSUPPORTED, "body.tool_choice"},
        {"\"tool_choice\":1", BG_CODE_FIELD, "body.tool_choice"},
        {"\"tools\":{}", BG_CODE_FIELD, "body.tools"},
        {"\"tools\":[1]", BG_CODE_FIELD, "body.tools[0]"},
        {"\"chat_template_kwargs\":[]", BG_CODE_FIELD, "body.chat_template_kwargs"},
        {"\"add_generation_prompt\":\"no\"", BG_CODE_FIELD, "body.add_generation_prompt"},
        {"\"echo\":true", BG_CODE_UNSUPPORTED, "body.echo"},
        {"\"use_beam_search\":true", BG_CODE_UNSUPPORTED, "body.use_beam_search"},
        {"\"n_predict\":5", BG_CODE_UNSUPPORTED, "body.n_predict"},
        {"\"modalities\":[\"text\",\"audio\"]", BG_CODE_UNSUPPORTED, "body.modalities"},
        {"\"model\":5", BG_CODE_FIELD, "body.model"},
        {"\"add_special_tokens\":true", BG_CODE_UNSUPPORTED, "body.add_special_tokens"},
        {"\"prompt\":\"x\"", BG_CODE_FIELD, "body.prompt"},
    };
    REFUSED(chat, list);
}

Test(request, completion_fields_refused)
{
    static const refusal list[] = {
        {"\"max_tokens\":4", BG_CODE_MISSING, "body.prompt"},
        {"\"prompt\":null", BG_CODE_MISSING, "body.prompt"},
        {"\"prompt\":5", BG_CODE_FIELD, "body.prompt"},
        {"\"prompt\":[]", BG_CODE_EMPTY, "body.prompt"},
        {"\"prompt\":[\"a\",\"\"]", BG_CODE_EMPTY, "body.prompt[1]"},
        {"\"prompt\":[\"a\",5]", BG_CODE_FIELD, "body.prompt[1]"},
        {"\"prompt\":[\"a\",[5]]", BG_CODE_FIELD, "body.prompt[1]"},
        {"\"prompt\":[5,\"a\"]", BG_CODE_FIELD, "body.prompt[1]"},
        {"\"prompt\":[5,1.5]", BG_CODE_FIELD, "body.prompt[1]"},
        {"\"prompt\":[5,-1]", BG_CODE_TOKEN, "body.prompt[1]"},
        {"\"prompt\":[[1,2],[3,2147483648]]", BG_CODE_TOKEN, "body.prompt[1][1]"},
        {"\"prompt\":[[1],[]]", BG_CODE_EMPTY, "body.prompt[1]"},
        {"\"prompt\":[{}]", BG_CODE_FIELD, "body.prompt[0]"},
        {"\"prompt\":\"a\",\"messages\":[]", BG_CODE_FIELD, "body.messages"},
        {"\"prompt\":\"a\",\"suffix\":\"x\"", BG_CODE_UNSUPPORTED, "body.suffix"},
        {"\"prompt\":\"a\",\"logprobs\":true", BG_CODE_FIELD, "body.logprobs"},
        {"\"prompt\":\"a\",\"logprobs\":21", BG_CODE_FIELD, "body.logprobs"},
        {"\"prompt\":\"a\",\"echo\":true,\"logprobs\":1", BG_CODE_UNSUPPORTED, "body.echo"},
        {"\"prompt\":\"a\",\"add_special_tokens\":false", BG_CODE_UNSUPPORTED,
         "body.add_special_tokens"},
    };
    REFUSED(completion, list);
}

Test(request, messages_refused)
{
    static const refusal list[] = {
        {"5", BG_CODE_FIELD, "body.messages[1]"},
        {"{}", BG_CODE_MISSING, "body.messages[1].role"},
        {"{\"role\":null}", BG_CODE_MISSING, "body.messages[1].role"},
        {"{\"role\":5}", BG_CODE_FIELD, "body.messages[1].role"},
        {"{\"role\":\"robot\"}", BG_CODE_FIELD, "body.messages[1].role"},
        {"{\"role\":\"user\"}", BG_CODE_MISSING, "body.messages[1].content"},
        {"{\"role\":\"assistant\",\"content\":null}", BG_CODE_FIELD, "body.messages[1].content"},
        {"{\"role\":\"user\",\"content\":{}}", BG_CODE_FIELD, "body.messages[1].content"},
        {"{\"role\":\"user\",\"content\":[]}", BG_CODE_EMPTY, "body.messages[1].content"},
        {"{\"role\":\"user\",\"content\":[\"x\"]}", BG_CODE_FIELD, "body.messages[1].content[0]"},
        {"{\"role\":\"user\",\"content\":[{\"type\":\"text\"}]}", BG_CODE_MISSING,
         "body.messages[1].content[0].text"},
        {"{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":null}]}", BG_CODE_FIELD,
         "body.messages[1].content[0].text"},
        {"{\"role\":\"user\",\"content\":[{\"text\":\"a\"}]}", BG_CODE_MISSING,
         "body.messages[1].content[0].type"},
        {"{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"a\"},"
         "{\"type\":\"input_audio\"}]}",
         BG_CODE_UNSUPPORTED, "body.messages[1].content[1]"},
        {"{\"role\":\"user\",\"content\":\"a\",\"name\":5}", BG_CODE_FIELD,
         "body.messages[1].name"},
        {"{\"role\":\"assistant\",\"tool_calls\":{}}", BG_CODE_FIELD,
         "body.messages[1].tool_calls"},
        {"{\"role\":\"assistant\",\"tool_calls\":[{}]}", BG_CODE_FIELD,
         "body.messages[1].tool_calls[0].function"},
        {"{\"role\":\"assistant\",\"tool_calls\":[{\"function\":{\"name\":\"f\",\"arguments\":5}}]"
         "}",
         BG_CODE_FIELD, "body.messages[1].tool_calls[0].function.arguments"},
        {"{\"role\":\"tool\",\"content\":null,\"tool_call_id\":\"c\"}", BG_CODE_FIELD,
         "body.messages[1].content"},
    };
    REFUSED(message, list);
}

/* Asking for what happens anyway is no reason to refuse. */
Test(request, harmless_fields)
{
    bg_request r =
        parse(chat("\"stream\":true,\"stream_options\":{},\"user\":\"u\",\"store\":true,"
                   "\"metadata\":{\"a\":\"b\"},"
                   "\"best_of\":1,\"suffix\":\"\",\"use_beam_search\":false,\"length_penalty\":1.0,"
                   "\"typical_p\":1,\"mirostat\":0,\"logits_processors\":[],\"response_format\":{"
                   "\"type\":\"text\"},"
                   "\"tool_choice\":\"auto\",\"modalities\":[\"text\"],\"echo\":false,\"tools\":[],"
                   "\"guided_json\":null,\"parallel_tool_calls\":true,\"whatever\":{\"x\":[1]},"
                   "\"add_special_tokens\":false"));
    cr_expect_null(r.error_code, "%s", r.error_message);
    cr_expect_null(r.tools);
    bg_request_release(&r);
}

/* ---- what is read
 * ------------------------------------------------------------------------------------- */

Test(request, chat_settings)
{
    bg_request r = parse(chat(
        "\"model\":\"m\",\"temperature\":0.5,\"top_p\":0.25,\"min_p\":0.125,\"top_k\":40,"
        "\"repeat_penalty\":1.5,\"presence_penalty\":-1,\"frequency_penalty\":2,\"n\":3,"
        "\"max_tokens\":4,\"max_completion_tokens\":6,\"min_tokens\":2,\"seed\":9007199254740993,"
        "\"logprobs\":true,\"top_logprobs\":5,\"ignore_eos\":true,\"skip_special_tokens\":false,"
        "\"include_stop_str_in_output\":true,\"stop\":[\"x\",\"yy\"],\"stop_token_ids\":[7,2.0],"
        "\"logit_bias\":{\"50\":-100,\"0\":2.5},\"tools\":[{\"type\":\"function\"}],"
        "\"chat_template_kwargs\":{\"a\":1,\"enable_thinking\":true},\"enable_thinking\":false,"
        "\"reasoning_effort\":\"low\",\"add_generation_prompt\":false"));
    cr_assert_null(r.error_code, "%s", r.error_message);
    const bg_gen *g = &r.gen;
    cr_expect(r.openai && r.api == BG_API_CHAT && r.record == 6 && r.line == 7);
    cr_expect_str_eq(r.model, "m");
    cr_expect(g->temperature == 0.5 && g->top_p == 0.25 && g->min_p == 0.125 && g->top_k == 40);
    cr_expect(g->repetition_penalty == 1.5 && g->presence_penalty == -1 &&
              g->frequency_penalty == 2);
    cr_expect(g->n == 3 && g->max_tokens == 6 && g->min_tokens == 2 && g->logprobs == 5);
    cr_expect(g->has_seed && g->seed == UINT64_C(9007199254740993));
    cr_expect(g->ignore_eos && g->show_special && g->include_stop && !g->echo);
    cr_assert_eq(r.n_stops, 2);
    cr_expect_str_eq(r.stops[1], "yy");
    cr_assert_eq(r.n_stop_ids, 2);
    cr_expect(r.stop_ids[0] == 7 && r.stop_ids[1] == 2);
    cr_assert_eq(r.n_bias, 2);
    cr_expect(r.bias[0].token == 50 && r.bias[0].bias == -100 && r.bias[1].token == 0);
    cr_expect_eq(json_array_size(r.tools), 1);
    cr_expect_eq(json_array_size(r.messages), 1);
    cr_expect(json_is_true(json_object_get(r.template_kwargs, "enable_thinking")));
    cr_expect_str_eq(json_string_value(json_object_get(r.template_kwargs, "reasoning_effort")),
                     "low");
    cr_expect_not(r.add_generation_prompt);
    bg_request_release(&r);
}

Test(request, null_keeps_defaults)
{
    const char *s = chat("\"temperature\":null,\"max_tokens\":null,\"n\":null,\"seed\":null,"
                         "\"logprobs\":null,\"tools\":null,\"stop\":null,\"logit_bias\":null");
    bg_gen d = {.temperature = 0.75,
                .top_p = 0.5,
                .repetition_penalty = 1,
                .n = 2,
                .max_tokens = 9,
                .logprobs = 3,
                .has_seed = true,
                .seed = 5,
                .show_special = true};
    bg_line line = {.data = s, .n = strlen(s)};
    bg_error err = {0};
    bg_request r;
    cr_assert_eq(bg_request_parse(&r, &line, &d, NULL, &err), BG_OK);
    cr_expect_null(r.error_code, "%s", r.error_message);
    cr_expect_arr_eq(&r.gen, &d, sizeof d);
    bg_request_release(&r);
}

Test(request, numbers_at_the_edges)
{
    bg_request r = parse(chat("\"temperature\":-0.0,\"max_tokens\":4.0,\"seed\":-1,\"top_k\":-1"));
    cr_assert_null(r.error_code, "%s", r.error_message);
    cr_expect(r.gen.temperature == 0 && !signbit(r.gen.temperature));
    cr_expect(r.gen.max_tokens == 4 && r.gen.seed == UINT64_MAX && r.gen.top_k == 0);
    bg_request_release(&r);
    r = parse(chat("\"temperature\":1e-40,\"max_tokens\":2e3,\"top_p\":0"));
    cr_assert_null(r.error_code, "%s", r.error_message);
    cr_expect(r.gen.temperature == 0 && r.gen.max_tokens == 2000 && r.gen.top_p == 0);
    bg_request_release(&r);
}

Test(request, prompts_of_four_kinds)
{
    bg_request r = parse(completion("\"prompt\":\"a\\u0000b\",\"logprobs\":0,\"echo\":false"));
    cr_assert_null(r.error_code, "%s", r.error_message);
    cr_expect(r.api == BG_API_COMPLETION && r.n_prompts == 1 && r.gen.logprobs == 0);
    cr_expect(r.prompts[0].n_text == 3 && !memcmp(r.prompts[0].text, "a\0b", 3));
    bg_request_release(&r);
    r = parse(completion("\"prompt\":[\"a\",\"bc\"],\"echo\":true"));
    cr_assert_null(r.error_code, "%s", r.error_message);
    cr_expect(r.n_prompts == 2 && r.prompts[1].n_text == 2 && r.gen.echo);
    bg_request_release(&r);
    r = parse(completion("\"prompt\":[5,6.0]"));
    cr_assert_null(r.error_code, "%s", r.error_message);
    cr_expect(r.n_prompts == 1 && !r.prompts[0].text && r.prompts[0].n_ids == 2);
    cr_expect(r.prompts[0].ids[0] == 5 && r.prompts[0].ids[1] == 6);
    bg_request_release(&r);
    r = parse(completion("\"prompt\":[[5],[6,7]]"));
    cr_assert_null(r.error_code, "%s", r.error_message);
    cr_expect(r.n_prompts == 2 && r.prompts[1].n_ids == 2 && r.prompts[1].ids[1] == 7);
    bg_request_release(&r);
}

Test(request, messages_as_clients_write_them)
{
    bg_request r = parse(message(
        "{\"role\":\"assistant\",\"content\":null,\"refusal\":null,\"audio\":null,\"tool_calls\":["
        "{\"id\":\"c\",\"type\":\"function\",\"function\":{\"name\":\"f\",\"arguments\":\"{}\"}}]},"
        "{\"role\":\"tool\",\"tool_call_id\":\"c\",\"content\":[{\"type\":\"text\",\"text\":\"4\"}]"
        "},"
        "{\"role\":\"developer\",\"content\":\"\",\"weight\":1}"));
    cr_assert_null(r.error_code, "%s", r.error_message);
    const json_t *m = json_array_get(r.messages, 1);
    cr_expect_null(json_object_get(m, "refusal"), "null fields are gone");
    cr_expect(json_is_null(json_object_get(m, "content")), "content stays null");
    cr_expect(json_is_array(json_object_get(json_array_get(r.messages, 2), "content")));
    bg_request_release(&r);
}

Test(request, plain_lines)
{
    static const struct {
        const char *line;
        bool chat;
        const char *id; /* NULL: none */
    } good[] = {
        {"{\"prompt\":\"x\"}", false, NULL},
        {"{\"prompt\":\"x\",\"id\":\"a\\u00e9\\u2028\"}", false, "\"a\xc3\xa9\\u2028\""},
        {"{\"prompt\":\"x\",\"id\":-12}", false, "-12"},
        {"{\"custom_id\":\"c\",\"messages\":[{\"role\":\"user\",\"content\":\"x\"}]}", true,
         "\"c\""},
        {"{\"id\":\"\",\"prompt\":\"x\",\"messages\":null,\"logprobs\":true,\"top_logprobs\":1}",
         false, "\"\""},
        {"{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}],\"logprobs\":1}", true, NULL},
        {"\xef\xbb\xbf{\"prompt\":\"joined files\"}  ", false, NULL},
    };
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        bg_request r = parse(good[i].line);
        cr_expect_null(r.error_code, "%s: %s", good[i].line, r.error_message);
        cr_expect(!r.openai && (r.api == BG_API_CHAT) == good[i].chat, "%s", good[i].line);
        cr_expect(good[i].id ? r.id && !strcmp(r.id, good[i].id) : !r.id, "%s: id %s", good[i].line,
                  r.id);
        bg_request_release(&r);
    }
    static const refusal bad[] = {
        {"{\"prompt\":\"x\",\"messages\":[]}", BG_CODE_FIELD, "prompt"},
        {"{\"prompt\":\"x\",\"id\":1.5}", BG_CODE_FIELD, "id"},
        {"{\"prompt\":\"x\",\"id\":[]}", BG_CODE_FIELD, "id"},
        {"{\"id\":1}", BG_CODE_MISSING, "prompt"},
        {"{\"prompt\":\"x\",\"top_p\":2}", BG_CODE_FIELD, "top_p"},
        {"{\"custom_id\":5,\"method\":\"POST\",\"url\":\"/v1/completions\",\"body\":{}}",
         BG_CODE_FIELD, "custom_id"},
        {"{\"custom_id\":\"a\",\"url\":\"/v1/completions\",\"body\":{}}", BG_CODE_MISSING,
         "method"},
        {"{\"custom_id\":\"a\",\"method\":\"POST\",\"body\":{}}", BG_CODE_MISSING, "url"},
        {"{\"custom_id\":\"a\"}", BG_CODE_MISSING, "method"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        bg_request r = parse(bad[i].fields);
        cr_expect(r.error_code && !strcmp(r.error_code, bad[i].code), "%s: %s", bad[i].fields,
                  r.error_code);
        cr_expect_str_eq(r.error_param, bad[i].param);
        bg_request_release(&r);
    }
}

/* ---- lines that are no JSON
 * --------------------------------------------------------------------------- */

Test(request, ids_of_broken_lines)
{
    static const struct {
        const char *line, *id, *says;
    } list[] = {
        {"{\"custom_id\":\"a\",\"n\":NaN}", "\"a\"", "near byte"},
        {"{\"n\":[1,{\"custom_id\":\"no\"}],\"custom_id\":\"a\\\"b\", oops", "\"a\\\"b\"",
         "near byte"},
        {"{\"id\":\"x\",\"custom_id\":\"y\",}", "\"y\"", "near byte"},
        {"{\"id\":17,\"prompt\":\"x}", "17", "near byte"},
        {"{\"prompt\":\"x\", oops, \"id\":\"behind the damage\"}", NULL, "near byte"},
        {"{\"custom_id\":\"a\",\"custom_id\":\"b\"}", NULL, "custom_id is given twice"},
        {"{\"body\":{\"n\":1,\"n\":2},\"custom_id\":\"a\"}", NULL, "body.n is given twice"},
        {"{\"custom_id\":\"a\",\"body\":{\"n\":1,\"n\":2}}", "\"a\"", "body.n is given twice"},
        {"{\"custom_id\":\"\\ud800\",\"x\":1}", NULL, "near byte"},
        {"{\"id\":12", NULL, "near byte"},
        {"{\"id\":1}{\"id\":2}", NULL, "more follows"},
        {"{\"id\":\"a\",\"x\":[0,{\"y\":[3,99999999999999999999]}]}", "\"a\"",
         "x[1].y[1] is out of range"},
        {"{\"id\":\"a\",\"x\":\"\xff\"}", "\"a\"", "not UTF-8 at byte 15"},
        {"{\"id\":\"a\",\"x\":\"\xc3\"}", "\"a\"", "not UTF-8"},
        {"\xff\xfe{\0", NULL, "UTF-16"},
    };
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        bg_request r = parse(list[i].line);
        cr_assert(r.error_code, "%s", list[i].line);
        cr_expect(strstr(r.error_message, list[i].says), "%s: %s", list[i].line, r.error_message);
        if (r.id)
            cr_expect_eq(r.openai, strstr(list[i].line, "custom_id\":\"") != NULL, "%s",
                         list[i].line);
        cr_expect(list[i].id ? r.id && !strcmp(r.id, list[i].id) : !r.id, "%s: id %s", list[i].line,
                  r.id);
        bg_request_release(&r);
    }
}

Test(request, long_and_deep_lines)
{
    bg_line line = {
        .line = 3, .data = "{\"custom_id\":\"a\",\"method\":\"PO", .n = 28, .too_long = true};
    bg_gen gen;
    bg_gen_defaults(&gen);
    bg_error err = {0};
    bg_request r;
    cr_assert_eq(bg_request_parse(&r, &line, &gen, NULL, &err), BG_OK);
    cr_expect_str_eq(r.error_code, BG_CODE_LINE_LONG);
    cr_expect_str_eq(r.id, "\"a\"");
    bg_request_release(&r);

    static char deep[100000];
    memset(deep, '[', sizeof deep);
    cr_assert_eq(parse_n(&r, deep, sizeof deep), BG_OK);
    cr_expect_str_eq(r.error_code, BG_CODE_DEEP);
    bg_request_release(&r);
    cr_assert_eq(parse_n(&r, "{\"prompt\":\0\"x\"}", 15), BG_OK);
    cr_expect_str_eq(r.error_code, BG_CODE_JSON);
    bg_request_release(&r);
}

/* ---- content
 * ------------------------------------------------------------------------------------------ */

static uint64_t content(const char *line)
{
    bg_request r = parse(line);
    cr_assert_null(r.error_code, "%s: %s", line, r.error_message);
    uint64_t h = r.content_hash;
    cr_assert_neq(h, 0);
    bg_request_release(&r);
    return h;
}

Test(request, content_hash_is_of_the_content)
{
    static const char *const same[][2] = {
        {"{\"id\":1,\"prompt\":\"x\",\"n\":1}",
         "{ \"n\" : 1, \"prompt\":\"\\u0078\", \"id\":\"other\"}"},
        {"{\"id\":1,\"prompt\":\"x\"}", "{\"prompt\":\"x\",\"seed\":null,\"custom_id\":\"b\"}"},
        {"{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}]}",
         "{\"messages\":[{\"content\":\"x\",\"role\":\"user\"}]}"},
        {"{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"x\"}]}]}",
         "{\"messages\":[{\"role\":\"user\",\"content\":[{\"text\":\"x\",\"type\":\"text\"}]}]}"},
    };
    for (size_t i = 0; i < sizeof same / sizeof *same; i++)
        cr_expect_eq(content(same[i][0]), content(same[i][1]), "%s", same[i][0]);
    /* All of these differ from each other. */
    static const char *const others[] = {
        "{\"prompt\":\"x\"}",
        "{\"prompt\":\"y\"}",
        "{\"prompt\":\"x\",\"n\":1}",
        "{\"prompt\":\"x\",\"n\":2}",
        "{\"prompt\":\"x\",\"seed\":9007199254740992}",
        "{\"prompt\":\"x\",\"seed\":9007199254740993}",
        "{\"prompt\":\"x\",\"temperature\":0}",
        "{\"prompt\":\"x\",\"temperature\":0.5}",
        "{\"prompt\":\"x\",\"temperature\":0.50000000000000011}",
        "{\"prompt\":\"x\",\"top_p\":0.5}",
        "{\"prompt\":[\"x\"]}",
        "{\"prompt\":[\"x\",\"y\"]}",
        "{\"prompt\":[\"y\",\"x\"]}",
        "{\"prompt\":[1,2]}",
        "{\"prompt\":[12]}",
        "{\"prompt\":[[1],[2]]}",
        "{\"prompt\":[[1,2]]}",
        "{\"prompt\":\"x\\u0000\"}",
        "{\"prompt\":\"x\",\"stop\":\"a\"}",
        "{\"prompt\":\"x\",\"stop\":[\"a\"]}",
        "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}]}",
        "{\"messages\":[{\"role\":\"system\",\"content\":\"x\"}]}",
        "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"},{\"role\":\"user\",\"content\":\"y\"}"
        "]}",
        "{\"messages\":[{\"role\":\"user\",\"content\":\"y\"},{\"role\":\"user\",\"content\":\"x\"}"
        "]}",
        "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}],\"tools\":[{\"a\":1,\"b\":2}]}",
        "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}],\"tools\":[{\"b\":2,\"a\":1}]}",
        "{\"custom_id\":\"q\",\"method\":\"POST\",\"url\":\"/v1/completions\","
        "\"body\":{\"prompt\":\"x\"}}",
        "{\"custom_id\":\"q\",\"method\":\"POST\",\"url\":\"/v1/completions\","
        "\"body\":{\"prompt\":\"x\",\"id\":1}}",
    };
    enum { N = sizeof others / sizeof *others };
    uint64_t h[N];
    for (size_t i = 0; i < N; i++) {
        h[i] = content(others[i]);
        for (size_t k = 0; k < i; k++)
            cr_expect_neq(h[i], h[k], "%s and %s", others[i], others[k]);
    }
}

/* A bad record can be paired, too: by its fields, or by its bytes when they cannot be read. */
Test(request, content_hash_of_bad_lines)
{
    static const char *const lines[] = {"{\"prompt\":", "{\"prompt\": ", "[1]",
                                        "{\"prompt\":\"x\",\"n\":-1}"};
    uint64_t h[4];
    for (size_t i = 0; i < 4; i++) {
        bg_request r = parse(lines[i]);
        cr_assert(r.error_code);
        h[i] = r.content_hash;
        cr_expect_neq(h[i], 0);
        for (size_t k = 0; k < i; k++)
            cr_expect_neq(h[i], h[k]);
        bg_request_release(&r);
    }
}

/* ---- texts and ids in messages
 * ------------------------------------------------------------------------------------------ */

Test(request, a_name_with_nul_behind_it_is_another_name)
{
    static const char *const lines[] = {
        "{\"messages\":[{\"role\":\"user\\u0000x\",\"content\":\"a\"}]}",
        "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\\u0000\",\"text\":\"a\"}]}"
        "]}",
        "{\"prompt\":\"a\",\"response_format\":{\"type\":\"text\\u0000\"}}",
        "{\"prompt\":\"a\",\"modalities\":[\"text\\u0000\"]}",
        "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],\"tool_choice\":\"none\\u0000\"}",
        "{\"custom_id\":\"a\",\"method\":\"POST\\u0000\",\"url\":\"/v1/completions\",\"body\":{"
        "\"prompt\":\"a\"}}",
        "{\"custom_id\":\"a\",\"method\":\"POST\",\"url\":\"/v1/completions\\u0000\",\"body\":{"
        "\"prompt\":\"a\"}}",
    };
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
        bg_request r = parse(lines[i]);
        cr_expect(r.error_code, "%s", lines[i]);
        bg_request_release(&r);
    }
}

/* Messages quote the user's text up to some length, which may fall inside a character. */
Test(request, messages_are_utf8)
{
    for (int n = 30; n < 90; n++) {
        bg_buf b = {0};
        bg_buf_str(&b, "{\"prompt\":\"a\",\"logit_bias\":{\"");
        for (int i = 0; i < n; i++)
            bg_buf_str(&b, i % 7 ? "\xe2\x82\xac" : "x");
        bg_buf_str(&b, "\":1}}");
        bg_request r;
        cr_assert_eq(parse_n(&r, b.data, b.len), BG_OK);
        cr_assert(r.error_code && r.error_param);
        cr_expect(bg_utf8_valid(r.error_message, strlen(r.error_message)), "%s", r.error_message);
        cr_expect(bg_utf8_valid(r.error_param, strlen(r.error_param)), "%s", r.error_param);
        bg_request_release(&r);
        bg_buf_release(&b);
    }
}

Test(request, id_of_a_broken_line_is_the_value_of_its_key)
{
    static const char *const lines[][2] = {
        {"{\"id\": \"a\" \"prompt\": \"b\"}", "\"a\""},
        {"{\"id\": \"a\", \"prompt\" \"b\"}", "\"a\""},
        {"{\"id\": 5 6, \"prompt\": }", "5"},
        {"{\"id\": \"a\", \"id\": \"b\"", NULL},
        {"{\"id\": \"a", NULL},
        {"{\"x\": {\"id\": \"a\"}, oops", NULL},
    };
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
        bg_request r = parse(lines[i][0]);
        cr_expect_str_eq(r.error_code, BG_CODE_JSON);
        if (lines[i][1])
            cr_expect(r.id && strcmp(r.id, lines[i][1]) == 0, "%s: %s", lines[i][0], r.id);
        else
            cr_expect_null(r.id, "%s: %s", lines[i][0], r.id);
        bg_request_release(&r);
    }
}

/* ---- nesting
 * ------------------------------------------------------------------------------------------ */

/* `depth` levels in all: the object of the line and arrays, or objects, in its field x. */
static char *nested(size_t depth, bool objects, bool closed, bool unusual)
{
    static const char open_object[] = "{\"a\":";
    char *s = malloc(depth * 8 + 256), *p = s;
    cr_assert(s);
    /* a long key, which the fast reader leaves to jansson */
    p += sprintf(p, "{\"id\":\"n\",\"prompt\":\"p\",\"%0*d\":[[],{}],\"x\":", unusual ? 100 : 1, 0);
    for (size_t i = 1; i < depth; i++)
        p += sprintf(p, "%s", objects ? open_object : "[");
    *p++ = '1';
    for (size_t i = 1; closed && i < depth; i++)
        *p++ = objects ? '}' : ']';
    if (closed) *p++ = '}';
    *p = 0;
    return s;
}

static const char *code_of(size_t depth, bool objects, bool closed, bool unusual, int max)
{
    char *s = nested(depth, objects, closed, unusual);
    bg_gen gen;
    bg_gen_defaults(&gen);
    bg_line line = {.line = 1, .data = s, .n = strlen(s)};
    bg_error err = {0};
    bg_request_limits limits = {.max_nesting = max};
    bg_request r;
    cr_assert_eq(bg_request_parse(&r, &line, &gen, &limits, &err), BG_OK);
    cr_expect_str_eq(r.id, "\"n\"");
    const char *code = r.error_code ? r.error_code : "";
    if (strcmp(code, BG_CODE_DEEP) == 0) {
        cr_expect(r.error_message && strstr(r.error_message, "byte "), "%s", r.error_message);
        cr_expect_eq(strncmp(r.error_param, "x", 1), 0, "%s", r.error_param);
    }
    bg_request_release(&r);
    free(s);
    return code;
}

static const char *code_of_nested(size_t depth, bool objects, bool closed, int max)
{
    const char *code = code_of(depth, objects, closed, false, max);
    cr_expect_str_eq(code_of(depth, objects, closed, true, max), code);
    return code;
}

Test(request, nesting)
{
    for (int objects = 0; objects < 2; objects++) {
        cr_expect_str_eq(code_of_nested(63, objects, true, 0), "");
        cr_expect_str_eq(code_of_nested(64, objects, true, 0), "");
        cr_expect_str_eq(code_of_nested(65, objects, true, 0), BG_CODE_DEEP);
        cr_expect_str_eq(code_of_nested(65, objects, false, 0), BG_CODE_DEEP);
        cr_expect_str_eq(code_of_nested(64, objects, false, 0), BG_CODE_JSON);
        cr_expect_str_eq(code_of_nested(100000, objects, true, 0), BG_CODE_DEEP);
        cr_expect_str_eq(code_of_nested(1024, objects, true, 1024), "");
        cr_expect_str_eq(code_of_nested(1025, objects, true, 1024), BG_CODE_DEEP);
        cr_expect_str_eq(code_of_nested(4, objects, true, 4), "");
        cr_expect_str_eq(code_of_nested(5, objects, true, 4), BG_CODE_DEEP);
    }
    /* Neither breadth nor brackets in text count. */
    bg_buf b = {0};
    bg_buf_str(&b, "{\"prompt\":\"\\\\\",\"a\":\"\\\"[[");
    for (int i = 0; i < 200; i++)
        bg_buf_str(&b, "[{");
    bg_buf_str(&b, "\",\"b\":[");
    for (int i = 0; i < 200; i++)
        bg_buf_str(&b, "[{}],");
    bg_buf_str(&b, "0]}");
    bg_request r;
    cr_assert_eq(parse_n(&r, b.data, b.len), BG_OK);
    cr_expect_null(r.error_code, "%s", r.error_message);
    bg_request_release(&r);
    bg_buf_release(&b);
}

/* What recurses over a line's data has a bounded stack: the deepest that an option allows fits into
 * the smallest that threads are given anywhere. */
static void *parse_deepest(void *arg)
{
    (void)arg;
    static char failed[] = "failed";
    for (int objects = 0; objects < 2; objects++)
        if (strcmp(code_of_nested(1024, objects, true, 1024), "") != 0) return failed;
    return NULL;
}

Test(request, deepest_nesting_in_a_small_stack)
{
    pthread_attr_t attr;
    pthread_t t;
    void *failed = NULL;
    pthread_attr_init(&attr);
    cr_assert_eq(pthread_attr_setstacksize(&attr, CAN_FAIL ? 256 << 10 : 4 << 20), 0);
    cr_assert_eq(pthread_create(&t, &attr, parse_deepest, NULL), 0);
    pthread_join(t, &failed);
    cr_expect_null(failed);
    pthread_attr_destroy(&attr);
}

Test(request, reject_replaces_the_message)
{
    bg_request r = parse("{\"prompt\":\"x\"}");
    bg_request_reject(&r, BG_CODE_TOO_LONG, "prompt", "%d tokens", 5);
    bg_request_reject(&r, BG_CODE_INTERNAL, r.error_param, "%s again", r.error_message);
    cr_expect_str_eq(r.error_code, BG_CODE_INTERNAL);
    cr_expect_str_eq(r.error_message, "5 tokens again");
    cr_expect_str_eq(r.error_param, "prompt");
    bg_request_release(&r);
}

/* Each allocation failing in turn: BG_NOMEM, never a crash or another answer. */
Test(request, memory_runs_out)
{
    if (!CAN_FAIL) return;
    static const char *const lines[] = {
        "{\"custom_id\":\"a\",\"method\":\"POST\",\"url\":\"/v1/chat/"
        "completions\",\"body\":{\"model\":"
        "\"m\",\"messages\":[{\"role\":\"user\",\"content\":\"hi\",\"name\":null}],\"stop\":[\"a\"]"
        ","
        "\"stop_token_ids\":[1],\"logit_bias\":{\"1\":2},\"reasoning_effort\":\"low\"}}",
        "{\"id\":1,\"prompt\":[[1,2],[3]],\"n\":2}",
        "{\"id\":1,\"prompt\":\"x\",\"n\":-2}",
        "{\"id\":\"a\", oops",
        "{\"id\":\"a\",\"n\":1e999}",
    };
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
        bg_request want = parse(lines[i]);
        for (long n = 0;; n++) {
            bg_request r;
            allocations_left = n;
            bg_status st = parse_n(&r, lines[i], strlen(lines[i]));
            bool ran_out = allocations_left == 0;
            allocations_left = -1;
            cr_assert(st == BG_OK || st == BG_NOMEM);
            if (st == BG_OK) {
                cr_expect_eq(!r.error_code, !want.error_code, "%s after %ld", lines[i], n);
                if (want.error_code) cr_expect_str_eq(r.error_code, want.error_code);
            }
            bg_request_release(&r);
            if (!ran_out) {
                cr_expect_eq(st, BG_OK);
                break;
            }
            cr_assert_lt(n, 500);
        }
        bg_request_release(&want);
    }
}
