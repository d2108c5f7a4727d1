/* jansson under a failing allocator: every allocation of a load and of a dump fails in turn. */
#include "base/json.h"

#include <stdlib.h>
#include <string.h>

#include <criterion/criterion.h>

static long left; /* the left-th allocation fails; 0: none */

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { CAN_FAIL = 0 };
#else
enum { CAN_FAIL = 1 };

extern void *__libc_malloc(size_t n);

void *malloc(size_t n)
{
    if (left > 0 && --left == 0) return NULL;
    return __libc_malloc(n);
}
#endif

/* Long enough that the reader's and the writer's buffers grow several times. */
static const char text[] =
    "{\"prompt\":\"a text of more than sixteen bytes, so that the buffer of the lexer has to grow "
    "again and again until all of it is there\",\"a name that is long as well\":[1,2.5,\"x\",null],"
    "\"n\":{\"deep\":{\"deeper\":[\"and a string of some length at the end of the line\"]}}}";

Test(json, load_and_text)
{
    bool nomem;
    json_error_t why;
    json_t *v = bg_json_load(text, strlen(text), 0, &why, &nomem);
    cr_assert(v && !nomem);
    char *back = bg_json_text(v, JSON_COMPACT);
    cr_assert_str_eq(back, text);
    free(back);
    json_decref(v);
    cr_assert_null(bg_json_load("{\"a\":", 5, 0, &why, &nomem));
    cr_assert(!nomem && why.text[0]);
}

Test(json, a_failed_allocation_is_never_shorter_text)
{
    if (!CAN_FAIL) cr_skip_test("a sanitizer's allocator cannot be told to fail");
    bool nomem = true;
    int tried = 0, dumps = 0;
    for (long i = 1; nomem; i++) {
        json_error_t why;
        left = i;
        json_t *v = bg_json_load(text, strlen(text), 0, &why, &nomem);
        left = 0;
        cr_assert(nomem ? !v : v != NULL, "load, allocation %ld", i);
        tried += nomem;
        if (v) {
            json_t *want = json_loads(text, 0, NULL);
            cr_assert(json_equal(v, want));
            json_decref(want);
        }
        json_decref(v);
    }
    json_t *v = json_loads(text, 0, NULL);
    char *got = NULL;
    for (long i = 1; !got; i++) {
        left = i;
        got = bg_json_text(v, JSON_COMPACT);
        left = 0;
        if (got) cr_assert_str_eq(got, text, "dump, allocation %ld", i);
        dumps += !got;
    }
    free(got);
    json_decref(v);
    cr_assert(tried > 20 && dumps > 5, "%d and %d allocations failed", tried, dumps);
}

Test(json, names_need_not_be_utf8)
{
    json_t *v = bg_json_name("caf\xe9.jsonl");
    cr_expect_str_eq(json_string_value(v), "caf?.jsonl");
    json_decref(v);
    v = bg_json_name("caf\xc3\xa9");
    cr_expect_str_eq(json_string_value(v), "caf\xc3\xa9");
    json_decref(v);
}
