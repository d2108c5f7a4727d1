/* What recurses over a user's data or a template's values stays within a small stack, however deep
 * the limits let it go. Each case runs in a thread with STACK bytes; overflowing it is a crash. */
#include <criterion/criterion.h>

#include <pthread.h>
#include <string.h>

#include "base/buf.h"
#include "text/text.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { STACK = 4 << 20 }; /* frames are several times as large */
#else
enum { STACK = 256 << 10 };
#endif

typedef struct job {
    const char *source;
    int depth; /* of the data in messages[0].x */
    bool objects;
    bg_status st;
    bg_error err;
} job;

static void repeat(bg_buf *b, const char *text, int n)
{
    for (int i = 0; i < n; i++)
        bg_buf_str(b, text);
}

static void *render(void *arg)
{
    job *j = arg;
    bg_buf b = {0};
    bg_buf_str(&b, "[{\"role\":\"user\",\"content\":\"hi\",\"x\":");
    repeat(&b, j->objects ? "{\"a\":" : "[", j->depth);
    bg_buf_char(&b, '1');
    repeat(&b, j->objects ? "}" : "]", j->depth);
    bg_buf_str(&b, "}]");
    json_t *messages = json_loadb(b.data, b.len, 0, NULL);
    bg_template *t = NULL;
    j->st = bg_template_new(&t, j->source, strlen(j->source), "t", &j->err);
    if (!j->st) {
        bg_chat_input in = {.messages = messages, .bos = "", .eos = ""};
        bg_rendered out;
        j->st = bg_chat_render(t, &in, NULL, &out, &j->err);
        if (!j->st) bg_rendered_release(&out);
    }
    bg_template_free(t);
    json_decref(messages);
    bg_buf_release(&b);
    return NULL;
}

static job run(const char *source, int depth, bool objects)
{
    job j = {.source = source, .depth = depth, .objects = objects};
    pthread_attr_t attr;
    pthread_t t;
    pthread_attr_init(&attr);
    cr_assert_eq(pthread_attr_setstacksize(&attr, STACK), 0);
    cr_assert_eq(pthread_create(&t, &attr, render, &j), 0);
    pthread_join(t, NULL);
    pthread_attr_destroy(&attr);
    return j;
}

/* Deep data of a request, printed, compared, dumped, walked. messages and its object are two levels
 * of the 200. */
Test(stack, data)
{
    static const char *const sources[] = {
        "{{ messages[0].x }}",
        "{{ messages[0].x | tojson }}",
        "{{ messages[0].x | tojson(indent=2) }}",
        "{{ messages[0].x | string | length }}",
        "{{ messages[0].x == messages[0].x }}",
        "{{ messages[0].x in [messages[0].x] }}",
        "{{ [messages[0], messages[0]] | unique | list | length }}",
        "{% for n in messages[0].x recursive %}{% if n is iterable %}{{ loop(n) }}{% endif %}"
        "{% endfor %}",
        "{% macro w(v) %}{% if v is iterable and v is not string %}{% for n in v %}{{ w(n) }}"
        "{% endfor %}{% endif %}{% endmacro %}{{ w(messages[0].x) }}",
    };
    for (size_t i = 0; i < sizeof sources / sizeof *sources; i++)
        for (int objects = 0; objects < 2; objects++) {
            job j = run(sources[i], 198, objects);
            cr_expect(j.st == BG_OK || j.err.text[0], "%s", sources[i]);
            if (i < 6) cr_expect_eq(j.st, BG_OK, "%s: %s", sources[i], j.err.text);
            j = run(sources[i], 2000, objects);
            cr_expect_eq(j.st, BG_ARG, "%s: %s", sources[i], j.err.text);
            cr_expect(strstr(j.err.text, "200 levels"), "%s", j.err.text);
        }
}

/* Values that a template nests itself. */
Test(stack, values)
{
    static const char *const uses[] = {
        "{{ ns.v }}",
        "{{ ns.v | tojson }}",
        "{{ ns.v == ns.w }}",
        "{{ ns.v in [ns.w] }}",
        "{{ ns.v < ns.w }}",
        "{{ {ns.v: 1}[ns.w] }}",
        "{{ ns.v | string }}",
        "{{ '%s' | format(ns.v) }}",
        "{{ ns.v | pprint }}",
        "{{ [ns.v, ns.w] | sort }}",
        "{{ [ns.v, ns.w] | unique | list }}",
        "{{ ns.v ~ ns.w }}",
    };
    static const char *const makes[] = {"[ns.v]", "(ns.v,)", "{'a': ns.v}",
                                        "ns.v | list | batch(1) | list"};
    for (size_t m = 0; m < sizeof makes / sizeof *makes; m++)
        for (size_t u = 0; u < sizeof uses / sizeof *uses; u++)
            for (int times = 590; times <= 5000; times += 4410) {
                bg_buf b = {0};
                bg_buf_printf(&b,
                              "{%% set ns = namespace(v=[], w=[]) %%}{%% for i in range(%d) %%}"
                              "{%% set ns.v = %s %%}{%% endfor %%}{%% set ns.w = ns.v %%}",
                              times, makes[m]);
                bg_buf_str(&b, uses[u]);
                job j = run(b.data, 1, false);
                cr_expect(j.st == BG_OK || j.err.text[0], "%s", b.data);
                bg_buf_release(&b);
            }
}

/* Calls inside calls, and syntax inside syntax. */
Test(stack, calls_and_syntax)
{
    static const char *const sources[] = {
        "{% macro a(n) %}{{ a(n + 1) }}{% endmacro %}{{ a(0) }}",
        "{% macro a(n) %}{% if n < 190 %}{% call(x) a(n + 1) %}{{ x }}{% endcall %}{% endif %}{{ "
        "caller(n) if "
        "caller else '' }}{% endmacro %}{{ a(0) }}",
        "{% for n in [1] recursive %}{{ loop([1]) }}{% endfor %}",
        "{% macro a(f) %}{{ f(f) }}{% endmacro %}{{ a(a) }}",
        "{% macro a(n) %}{% for i in [1] %}{% set x %}{{ a(n + 1) | upper }}{% endset %}{{ x }}{% "
        "endfor %}"
        "{% endmacro %}{{ a(0) }}",
    };
    for (size_t i = 0; i < sizeof sources / sizeof *sources; i++) {
        job j = run(sources[i], 1, false);
        cr_expect(j.st == BG_OK || j.err.text[0], "%s", sources[i]);
    }
    static const char *const syntax[][3] = {
        {"{{ ", "(", "1"},
        {"{{ ", "[", "1"},
        {"{{ ", "{'a':", "1"},
        {"{{ ", "not ", "1"},
        {"{{ ", "- ", "1"},
        {"{{ ", "a(", "1"},
        {"{{ ", "1 if 1 else ", "1"},
        {"", "{% if 1 %}", "x"},
        {"", "{% for a in b %}", "x"},
        {"{{ a", ".b", ""},
        {"{{ a", "[0]", ""},
        {"{{ a", "|list", ""},
        {"{{ 1", " + 1", ""},
        {"{{ 1", " ** 1", ""},
        {"{{ 'a'", " ~ 'a'", ""},
    };
    for (size_t i = 0; i < sizeof syntax / sizeof *syntax; i++)
        for (int n = 50; n <= 20000; n *= 20) {
            bg_buf b = {0};
            bg_buf_str(&b, syntax[i][0]);
            repeat(&b, syntax[i][1], n);
            bg_buf_str(&b, syntax[i][2]);
            const char *close =
                strchr("([{", syntax[i][1][0]) && syntax[i][1][1] != '%' ? NULL : "";
            if (!close)
                repeat(&b, syntax[i][1][0] == '(' ? ")" : syntax[i][1][0] == '[' ? "]" : "}", n);
            if (strcmp(syntax[i][1], "a(") == 0) repeat(&b, ")", n);
            if (syntax[i][0][0]) bg_buf_str(&b, " }}");
            if (strncmp(syntax[i][1], "{% if", 5) == 0) repeat(&b, "{% endif %}", n);
            if (strncmp(syntax[i][1], "{% for", 6) == 0) repeat(&b, "{% endfor %}", n);
            job j = run(b.data, 1, false);
            cr_expect(j.st == BG_OK || j.err.text[0], "%s", syntax[i][1]);
            bg_buf_release(&b);
        }
}
