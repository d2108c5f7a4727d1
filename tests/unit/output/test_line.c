#include <criterion/criterion.h>

#include <locale.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "base/f16.h"
#include "base/rng.h"
#include "base/utf8.h"
#include "output/number.h"
#include "output/output.h"
#include "support/schema.h"

static bg_token_info tokens[3];
static bg_top_text tops[2];

static bg_choice choice(const char *text)
{
    return (bg_choice){
        .text = text, .n_text = strlen(text), .finish_reason = "length", .stop_id = -1};
}

static bg_choice with_logprobs(void)
{
    tops[0] = (bg_top_text){"a\"", 2, 5, -0.25f};
    tops[1] = (bg_top_text){"\xe2\x80", 2, 6, -INFINITY};
    tokens[0] = (bg_token_info){.chosen = {"a\"", 2, 5, -0.25f}, .top = tops, .n_top = 2};
    tokens[1] = (bg_token_info){.chosen = {"\xc3", 1, 7, NAN}};
    tokens[2] = (bg_token_info){.chosen = {"\xa9z", 2, 8, -1e-7f}};
    bg_choice c = choice("a\"\xc3\xa9z");
    c.tokens = tokens;
    c.n_tokens = 3;
    return c;
}

/* The line, checked for what holds for every line, and parsed. */
static json_t *line_of(const bg_result *r, bg_buf *b)
{
    bg_buf_clear(b);
    bg_result_line(r, b);
    cr_assert_not(b->failed);
    cr_expect(b->len > 1 && b->data[b->len - 1] == '\n');
    cr_expect_null(memchr(b->data, '\n', b->len - 1));
    cr_expect(bg_utf8_valid(b->data, b->len));
    cr_expect_null(strstr(b->data, "\xe2\x80\xa8"));
    cr_expect_null(strstr(b->data, "\xe2\x80\xa9"));
    cr_expect_null(strstr(b->data, "\xc2\x85"));
    json_error_t e;
    json_t *v = json_loadb(b->data, b->len, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, &e);
    cr_assert(v, "%s in %s", e.text, b->data);
    return v;
}

static void expect_line(const bg_result *r, const char *want)
{
    bg_buf b = {0};
    json_decref(line_of(r, &b));
    b.data[b.len - 1] = 0;
    cr_expect_str_eq(b.data, want);
    bg_buf_release(&b);
}

Test(line, openai_chat)
{
    bg_choice c = choice("hi \xe2\x80\xa8 \xf0\x9f\x98\x80");
    bg_result r = {.record = 6,
                   .line = 7,
                   .openai = true,
                   .chat = true,
                   .id = "\"x\"",
                   .model = "m",
                   .fingerprint = "fp",
                   .choices = &c,
                   .n_choices = 1,
                   .prompt_tokens = 3,
                   .completion_tokens = 2};
    expect_line(
        &r,
        "{\"id\":\"batch_req_6\",\"custom_id\":\"x\",\"response\":{\"status_code\":200,"
        "\"request_id\":\"req_6\",\"body\":{\"id\":\"chatcmpl-6\",\"object\":\"chat.completion\","
        "\"created\":0,\"model\":\"m\",\"choices\":[{\"index\":0,\"message\":{\"role\":"
        "\"assistant\",\"content\":\"hi \\u2028 \xf0\x9f\x98\x80\",\"refusal\":null},\"logprobs\":"
        "null,\"finish_reason\":\"length\",\"stop_reason\":null}],\"usage\":{\"prompt_tokens\":3,"
        "\"completion_tokens\":2,\"total_tokens\":5},\"system_fingerprint\":\"fp\"}},\"error\":"
        "null,"
        "\"line\":7}");
}

Test(line, openai_error)
{
    bg_result r = {.record = 0,
                   .line = 1,
                   .openai = true,
                   .chat = true,
                   .file_name = "a \"b\"",
                   .error_code = "invalid_field",
                   .error_message = "n is 0",
                   .error_param = "body.n"};
    expect_line(
        &r, "{\"id\":\"batch_req_0\",\"custom_id\":null,\"response\":{\"status_code\":400,"
            "\"request_id\":\"req_0\",\"body\":{\"error\":{\"message\":\"n is 0\",\"type\":"
            "\"invalid_request_error\",\"param\":\"body.n\",\"code\":\"invalid_field\"}}},"
            "\"error\":{\"code\":\"invalid_field\",\"message\":\"n is 0\",\"line\":1},\"line\":1,"
            "\"file\":\"a \\\"b\\\"\"}");
    r.error_code = "internal_error";
    r.error_message = NULL;
    bg_buf b = {0};
    json_t *v = line_of(&r, &b);
    cr_expect(strstr(b.data, "\"status_code\":500") && strstr(b.data, "server_error"));
    json_decref(v);
    bg_buf_release(&b);
}

Test(line, plain)
{
    bg_choice c[2] = {choice("one"), choice("two")};
    c[0].finish_reason = "stop";
    c[0].stop_text = "\n";
    bg_result r = {.record = 1,
                   .line = 2,
                   .id = "12",
                   .choices = c,
                   .n_choices = 1,
                   .prompt_tokens = 4,
                   .completion_tokens = 5};
    expect_line(&r,
                "{\"line\":2,\"id\":12,\"text\":\"one\",\"finish_reason\":\"stop\",\"stop_reason\":"
                "\"\\n\",\"usage\":{\"prompt_tokens\":4,\"completion_tokens\":5}}");
    c[1].index = 1;
    c[1].stop_id = 9;
    r.n_choices = 2;
    r.id = NULL;
    r.file_name = "f";
    expect_line(&r,
                "{\"line\":2,\"file\":\"f\",\"record\":1,\"id\":null,\"choices\":[{\"index\":0,"
                "\"text\":\"one\","
                "\"finish_reason\":\"stop\",\"stop_reason\":\"\\n\"},{\"index\":1,\"text\":\"two\","
                "\"finish_reason\":\"length\",\"stop_reason\":9}],\"usage\":{\"prompt_tokens\":4,"
                "\"completion_tokens\":5}}");
    r.error_code = "invalid_json";
    r.error_message = "not JSON \xff";
    expect_line(
        &r,
        "{\"line\":2,\"file\":\"f\",\"record\":1,\"id\":null,\"error\":{\"code\":\"invalid_json\","
        "\"message\":\"not JSON \xef\xbf\xbd\",\"param\":null}}");
}

Test(line, logprobs)
{
    bg_choice c = with_logprobs();
    bg_result r = {.line = 1, .openai = true, .chat = true, .choices = &c, .n_choices = 1};
    bg_buf b = {0};
    json_t *v = line_of(&r, &b);
    static const char content[] =
        "\"logprobs\":{\"content\":[{\"token\":\"a\\\"\",\"logprob\":-0.25,\"bytes\":[97,34],"
        "\"top_logprobs\":[{\"token\":\"a\\\"\",\"logprob\":-0.25,\"bytes\":[97,34]},{\"token\":"
        "\"\xef\xbf\xbd\",\"logprob\":-9999.0,\"bytes\":[226,128]}]},{\"token\":\"\xef\xbf\xbd\","
        "\"logprob\":-9999.0,\"bytes\":[195],\"top_logprobs\":[]},{\"token\":\"\xef\xbf\xbdz\","
        "\"logprob\":-1e-7,\"bytes\":[169,122],\"top_logprobs\":[]}],\"refusal\":null}";
    cr_expect(strstr(b.data, content), "%s", b.data);
    json_decref(v);
    r.chat = false;
    v = line_of(&r, &b);
    cr_expect(
        strstr(b.data,
               "\"logprobs\":{\"tokens\":[\"a\\\"\",\"bytes:\\\\xc3\",\"bytes:\\\\xa9\\\\x7a\"],"
               "\"token_logprobs\":[-0.25,-9999.0,-1e-7],\"top_logprobs\":[{\"a\\\"\":-0.25,"
               "\"bytes:\\\\xe2\\\\x80\":-9999.0},{},{}],\"text_offset\":[0,2,3]}"),
        "%s", b.data);
    json_decref(v);
    tops[1] = tops[0]; /* two tokens of one text */
    json_decref(line_of(&r, &b));
    r.openai = false;
    v = line_of(&r, &b);
    cr_expect_eq(json_array_size(json_object_get(v, "logprobs")), 3);
    json_decref(v);
    bg_buf_release(&b);
}

/* ---- against the schema
 * ---------------------------------------------------------------------------- */

Test(line, fits_the_schema)
{
    json_error_t e;
    json_t *schema = json_load_file("schemas/result.schema.json", 0, &e);
    cr_assert(schema, "%s", e.text);
    bg_choice c[2] = {with_logprobs(), choice("two")};
    c[1].index = 1;
    c[1].stop_text = "x";
    static const char *const codes[] = {NULL, "invalid_json", "duplicate_id", "prompt_too_long",
                                        "internal_error"};
    bg_buf b = {0};
    char why[256];
    int n = 0;
    for (int k = 0; k < 8; k++) {
        for (size_t i = 0; i < sizeof codes / sizeof *codes; i++) {
            for (int n_choices = 1; n_choices <= 2; n_choices++) {
                bg_result r = {.record = 4,
                               .line = 5,
                               .openai = k & 1,
                               .chat = k & 2,
                               .file_name = k & 4 ? "f" : NULL,
                               .id = k & 4 ? NULL : "\"a\"",
                               .model = "m",
                               .fingerprint = "f",
                               .choices = c + (i & 1),
                               .n_choices = n_choices,
                               .error_code = codes[i],
                               .error_message = "why"};
                if (i & 1) r.n_choices = 1;
                json_t *v = line_of(&r, &b);
                cr_expect(schema_fits(schema, v, why, sizeof why), "%s: %s", why, b.data);
                json_object_set_new(v, "surprise", json_true());
                cr_expect_not(schema_fits(schema, v, why, sizeof why), "the schema takes anything");
                json_object_del(v, "surprise");
                json_object_del(v, "line");
                cr_expect_not(schema_fits(schema, v, why, sizeof why), "line is required");
                json_decref(v);
                n++;
            }
        }
    }
    cr_expect_eq(n, 80);
    json_decref(schema);
    bg_buf_release(&b);
}

/* ---- numbers
 * ----------------------------------------------------------------------------------------- */

static const char *text_of(bg_buf *b, float f)
{
    bg_buf_clear(b);
    bg_number_put(b, f);
    return b->data;
}

Test(number, shortest_and_exact)
{
    static const struct {
        float f;
        const char *text;
    } list[] = {{0, "0.0"},
                {-0.0f, "0.0"},
                {1, "1.0"},
                {-9999, "-9999.0"},
                {-0.1f, "-0.1"},
                {-12.5f, "-12.5"},
                {1e-5f, "0.00001"},
                {1e-6f, "1e-6"},
                {-1.5e-7f, "-1.5e-7"},
                {100, "100.0"},
                {0.3333333433f, "0.33333334"},
                {16777216, "16777216.0"},
                {1e10f, "1e10"},
                {9.9999998f, "10.0"},
                {-0.000123f, "-0.000123"},
                {3.4028235e38f, "3.4028235e38"},
                {1.4e-45f, "1e-45"}};
    bg_buf b = {0};
    for (size_t i = 0; i < sizeof list / sizeof *list; i++)
        cr_expect_str_eq(text_of(&b, list[i].f), list[i].text);
    char s[64];
    for (uint64_t i = 0; i < 300000; i++) {
        uint32_t bits = bg_sample_word(3, i, 0);
        /* half of them any float, half near the log-probabilities that matter */
        float f = i & 1 ? bg_f32_from_bits(bits) : -(float)bits * 0x1p-28f;
        if (!isfinite(f)) continue;
        const char *text = text_of(&b, f);
        cr_assert_eq(strtof(text, NULL), f, "%.9g became %s", (double)f, text);
        cr_assert(strpbrk(text, ".e"), "%s", text);
        /* No decimal of fewer digits is nearer to f than half the smaller gap beside it (one that
         * lies just on the middle reads back too, but is not counted on). */
        double half = fabs((double)f - (double)nextafterf(f, 0)) * 0.498;
        int p = 1;
        while (p < 9 && (snprintf(s, sizeof s, "%.*e", p - 1, (double)f),
                         !(fabs(strtod(s, NULL) - (double)f) < half)))
            p++;
        int digits = 0, zeros = 0;
        for (const char *c = text; *c && *c != 'e'; c++) {
            if (*c < '0' || *c > '9' || (!digits && *c == '0')) continue;
            digits++;
            zeros = *c == '0' ? zeros + 1 : 0;
        }
        cr_assert(f == 0 || digits - zeros <= p, "%.9g became %s, %d digits do", (double)f, text,
                  p);
    }
    bg_buf_release(&b);
}
