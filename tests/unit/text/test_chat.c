/* Requests to prompts: templates as models have them, and what the messages become before. */
#include "golden_lines.h"

#include <stdio.h>

#include "text/text.h"

enum { CLOCK = 1741529106 }; /* 2025-03-09 14:05:06 UTC */

static bg_template *template_of(const char *source)
{
    bg_template *t;
    bg_error err = {0};
    cr_assert_eq(bg_template_new(&t, source, strlen(source), "chat template", &err), BG_OK, "%s",
                 err.text);
    return t;
}

static json_t *json_of(const char *text)
{
    json_error_t why;
    json_t *j = json_loads(text, 0, &why);
    cr_assert_not_null(j, "%s: %s", text, why.text);
    return j;
}

/* The text as bytes, with the trusted stretches between [ and ] if marks. The caller frees it. */
static char *shown(const bg_rendered *r, bool marks)
{
    char *out = calloc(1, r->text.len + 2 * r->n_segs + 1), *p = out;
    size_t at = 0;
    for (size_t i = 0; i < r->n_segs; i++) {
        const bg_segment *s = &r->segs[i];
        cr_assert_eq(s->p, r->text.data + at, "segments must follow each other");
        cr_assert_gt(s->n, 0);
        cr_assert(i == 0 || s->parse_special != s[-1].parse_special, "neighbours must differ");
        at += s->n;
        if (marks && s->parse_special) *p++ = '[';
        memcpy(p, s->p, s->n);
        p += s->n;
        if (marks && s->parse_special) *p++ = ']';
    }
    cr_assert_eq(at, r->text.len, "segments must cover the text");
    return out;
}

static void expect(const char *source, const char *messages, bool marks, const char *want)
{
    bg_template *t = template_of(source);
    json_t *m = json_of(messages);
    bg_chat_input in = {.messages = m, .bos = "<s>", .eos = "</s>", .wall_s = CLOCK};
    bg_rendered out;
    bg_error err = {0};
    cr_assert_eq(bg_chat_render(t, &in, NULL, &out, &err), BG_OK, "%s: %s", source, err.text);
    char *got = shown(&out, marks);
    cr_expect_str_eq(got, want, "%s\n  got  %s\n  want %s", source, got, want);
    free(got);
    bg_rendered_release(&out);
    json_decref(m);
    bg_template_free(t);
}

static void expect_refused(const char *source, const char *messages, const char *kwargs,
                           const char *want)
{
    bg_template *t = template_of(source);
    json_t *m = json_of(messages), *k = json_of(kwargs);
    bg_chat_input in = {.messages = m, .kwargs = k, .bos = "", .eos = "", .wall_s = CLOCK};
    bg_rendered out;
    bg_error err = {0};
    cr_expect_eq(bg_chat_render(t, &in, NULL, &out, &err), BG_ARG, "%s", source);
    cr_expect_str_eq(err.text, want);
    cr_expect_null(out.segs);
    bg_rendered_release(&out);
    json_decref(m);
    json_decref(k);
    bg_template_free(t);
}

/* ---- golden conversations ---- */

static void conversation(const json_t *line)
{
    const char *name = text_of(line, "template"), *case_name = text_of(line, "case");
    if (!name) return;
    char path[200];
    size_t n;
    snprintf(path, sizeof path, "tests/golden/chat/%s.jinja", name);
    char *source = golden_text(path, &n);
    bg_template *t;
    bg_error err = {0};
    cr_assert_eq(bg_template_new(&t, source, n, name, &err), BG_OK, "%s", err.text);
    const bg_chat_input in = {.messages = json_object_get(line, "messages"),
                              .tools = json_object_get(line, "tools"),
                              .kwargs = json_object_get(line, "kwargs"),
                              .bos = text_of(line, "bos"),
                              .eos = text_of(line, "eos"),
                              .add_generation_prompt =
                                  json_is_true(json_object_get(line, "add_generation_prompt")),
                              .wall_s = CLOCK};
    bg_rendered out;
    bg_status st = bg_chat_render(t, &in, NULL, &out, &err);
    const char *text = text_of(line, "text"), *refused = text_of(line, "refused");
    if (text) {
        cr_expect_eq(st, BG_OK, "%s %s: %s", name, case_name, err.text);
        char *got = st ? calloc(1, 1) : shown(&out, false);
        cr_expect_str_eq(got, text, "%s %s\n  got  %s\n  want %s", name, case_name, got, text);
        free(got);
    } else {
        const char *own = strchr(refused, ':') + 2; /* behind "TemplateError: " */
        cr_expect_eq(st, BG_ARG, "%s %s", name, case_name);
        cr_expect_str_eq(err.text, own, "%s %s", name, case_name);
    }
    bg_rendered_release(&out);
    bg_template_free(t);
    free(source);
}

Test(chat, golden_conversations)
{
    cr_assert_geq(golden_lines("tests/golden/chat/cases.jsonl", conversation), 150);
}

/* ---- provenance ---- */

#define CHATML                                                                                    \
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' " \
    "+ '\\n' }}{% endfor %}"

Test(chat, only_the_template_is_trusted)
{
    expect(CHATML, "[{\"role\":\"user\",\"content\":\"<|im_end|>\"}]", true,
           "[<|im_start|>user\n]<|im_end|>[<|im_end|>\n]");
    expect(CHATML, "[{\"role\":\"<|x|>\",\"content\":\"a\"}]", true,
           "[<|im_start|>]<|x|>[\n]a[<|im_end|>\n]");
    expect("{{ bos_token }}{{ messages[0].content|trim }}{{ eos_token }}",
           "[{\"role\":\"user\",\"content\":\" <s> \"}]", true, "[<s>]<s>[</s>]");
    expect("{{ messages[0].name }}", "[{\"role\":\"user\",\"name\":\"user\",\"content\":\"\"}]",
           true, "user");
    expect("{{ '<|' + messages[0].role + '|>' }}", "[{\"role\":\"user\",\"content\":\"\"}]", true,
           "[<|user|>]");
    expect("{{ messages[0].tool_calls[0].function.arguments|tojson }}",
           "[{\"role\":\"assistant\",\"tool_calls\":[{\"function\":{\"name\":\"f\",\"arguments\":"
           "\"{\\\"a\\\": \\\"<|x|>\\\"}\"}}]}]",
           true, "{\"a\": \"<|x|>\"}");
    expect("", "[]", true, "");
    expect("{{ messages|length }}", "[]", true, "[0]");
}

Test(chat, tools_and_variables_are_untrusted)
{
    bg_template *t = template_of("{{ tools|tojson }}|{{ x }}|{{ documents }}|{{ y is defined }}");
    json_t *m = json_of("[]"), *tools = json_of("[{\"a\": \"<|x|>\"}]"),
           *k = json_of("{\"x\":\"z\"}");
    bg_chat_input in = {.messages = m, .tools = tools, .kwargs = k, .bos = "", .eos = ""};
    bg_rendered out;
    bg_error err = {0};
    cr_assert_eq(bg_chat_render(t, &in, NULL, &out, &err), BG_OK, "%s", err.text);
    char *got = shown(&out, true);
    cr_expect_str_eq(got, "[{\"a\": \"<|x|>\"}][|]z[|None|False]", "%s", got);
    free(got);
    bg_rendered_release(&out);
    in.tools = NULL;
    cr_assert_eq(bg_chat_render(t, &in, NULL, &out, &err), BG_OK, "%s", err.text);
    got = shown(&out, true);
    cr_expect_str_eq(got, "[null|]z[|None|False]");
    free(got);
    bg_rendered_release(&out);
    json_decref(m);
    json_decref(tools);
    json_decref(k);
    bg_template_free(t);
}

/* ---- preparing messages ---- */

#define PARTS                                                              \
    "[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"a\"}," \
    "{\"type\":\"text\",\"text\":\"b\"}]}]"

Test(chat, parts_become_text_where_the_template_wants_text)
{
    expect("{% for m in messages %}{{ m.content }}{% endfor %}", PARTS, false, "a\nb");
    expect("{% for m in messages %}{{ m.content|trim }}{% endfor %}", PARTS, true, "a[\n]b");
    expect("{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
           "{% for p in m.content %}({{ p.text }}){% endfor %}{% endif %}{% endfor %}",
           PARTS, false, "(a)(b)");
    expect("{% for m in messages %}{% for p in m.content %}({{ p.text }}){% endfor %}{% endfor %}",
           "[{\"role\":\"user\",\"content\":\"x\"}]", false, "(x)");
    expect_refused("{% for m in messages %}{{ m.content }}{% endfor %}",
                   "[{\"role\":\"user\",\"content\":[{\"type\":\"image_url\"}]}]", "{}",
                   "messages[0].content[0]: a part of type 'image_url'; only text parts are "
                   "supported");
    expect_refused("{{ messages[0].content }}", "[{\"role\":\"user\",\"content\":[1]}]", "{}",
                   "messages[0].content[0]: a part without text; only text parts are supported");
}

Test(chat, null_content)
{
    static const char null[] = "[{\"role\":\"assistant\",\"content\":null}]";
    static const char none[] = "[{\"role\":\"assistant\",\"tool_calls\":[]}]";
    expect("{% for m in messages %}{{ '(' + m.content + ')' }}{% endfor %}", null, false, "()");
    expect("{% for m in messages %}{{ '(' + m.content + ')' }}{% endfor %}", none, false, "()");
    expect("{% for m in messages %}{{ 'N' if m.content is none else 'S' }}{% endfor %}", null,
           false, "N");
    expect("{% for m in messages %}{{ 'N' if m['content'] == none else 'S' }}{% endfor %}", none,
           false, "N");
    expect("{% for m in messages %}{% set content = m.content %}{{ 'S' if content is not none }}"
           "{% endfor %}",
           null, false, "");
}

#define CALL(args)                                                                      \
    "[{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[{\"type\":\"function\"," \
    "\"function\":{\"name\":\"f\",\"arguments\":" args "}}]}]"
#define EACH_CALL "{% for m in messages %}{% for c in m.tool_calls %}"
#define END_EACH  "{% endfor %}{% endfor %}"

Test(chat, arguments_of_calls)
{
    static const char as_text[] = CALL("\"{\\\"b\\\": 1, \\\"a\\\": [null]}\"");
    static const char as_object[] = CALL("{\"b\": 1, \"a\": [null]}");
    static const char not_json[] = CALL("\"{oops\"");
    static const char to_json[] = EACH_CALL "{{ c.function.arguments|tojson }}" END_EACH;
    static const char raw[] = EACH_CALL "{{ '<' + c.function.arguments + '>' }}" END_EACH;
    static const char walk[] =
        EACH_CALL "{% for k, v in c.function.arguments|items %}{{ k }}={{ v }};"
                  "{% endfor %}" END_EACH;
    expect(to_json, as_text, false, "{\"b\": 1, \"a\": [null]}");
    expect(to_json, as_object, false, "{\"b\": 1, \"a\": [null]}");
    expect(to_json, not_json, false, "\"{oops\"");
    expect(raw, as_text, false, "<{\"b\": 1, \"a\": [null]}>");
    expect(raw, as_object, false, "<{\"b\": 1, \"a\": [null]}>");
    expect(walk, as_text, false, "b=1;a=[None];");
}

/* ---- refusals and limits ---- */

Test(chat, refusals)
{
    expect_refused("{% if messages[0].role == 'system' %}{{ raise_exception('System role\n not "
                   "supported') }}{% endif %}",
                   "[{\"role\":\"system\",\"content\":\"\"}]", "{}", "System role  not supported");
    expect_refused("{{ messages[0].content + 1 }}", "[{\"role\":\"user\",\"content\":\"x\"}]", "{}",
                   "chat template: line 1: can only concatenate str (not \"int\") to str");
    expect_refused("", "{}", "{}", "messages: an array is required");
    expect_refused("", "[1]", "{}", "messages[0]: an object is required");
    expect_refused("", "[]", "{\"messages\": []}",
                   "chat_template_kwargs: 'messages' cannot be set there");
    expect_refused("", "[]", "[]", "chat_template_kwargs: an object is required");
    bg_template *t;
    bg_error err = {0};
    cr_expect_eq(bg_template_new(&t, "{{", 2, "x", &err), BG_FORMAT);
    cr_expect_null(t);
}

Test(chat, limits_are_the_callers)
{
    bg_template *t = template_of("{% for i in range(1000) %}abcdefgh{% endfor %}");
    json_t *m = json_of("[]");
    const bg_chat_input in = {.messages = m, .bos = "", .eos = ""};
    const bg_chat_limits limits[] = {
        {.output_bytes = 1000}, {.steps = 100}, {.output_bytes = 8000}};
    static const char *const words[] = {"bytes", "steps", NULL};
    for (int i = 0; i < 3; i++) {
        bg_rendered out;
        bg_error err = {0};
        bg_status st = bg_chat_render(t, &in, &limits[i], &out, &err);
        cr_expect_eq(st, words[i] ? BG_ARG : BG_OK, "%s", err.text);
        if (words[i]) cr_expect_not_null(strstr(err.text, words[i]), "%s", err.text);
        bg_rendered_release(&out);
    }
    json_decref(m);
    bg_template_free(t);
}

/* A template that never comes to an end for the made-up conversations still opens. */
Test(chat, a_template_that_loops_opens_and_then_fails)
{
    expect_refused(
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}", "[]",
        "{}", "chat template: line 1: the template runs longer than the limit of 10000000 steps");
}
