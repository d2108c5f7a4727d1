/* Token ids against those of an independent tokenizer on 17 vocabularies. */
#include "vocab_file.h"

#include <pthread.h>

#include "base/utf8.h"
#include "text/tok.h"

static const char *const NAMES[] = {
    "llama3",    "smollm",  "qwen2",        "glm4",           "gptoss", "dsv3",
    "gpt-2",     "default", "deepseek-llm", "deepseek-coder", "tekken", "kimi-k2",
    "starcoder", "falcon",  "qwen35",       "gemma",          "spm",    "spm-phi3"};
enum { N_NAMES = sizeof NAMES / sizeof NAMES[0] };

static void check(const bg_vocab *v, const char *file, const json_t *row, const char *text,
                  size_t n, const char *field)
{
    bg_ids ids = tokenize(v, text, n, strcmp(field, "plain") != 0, strcmp(field, "added") == 0);
    json_t *want = json_object_get(row, field);
    /* The reference puts bos in front of a text that spells it already; we do not. */
    if (strcmp(field, "added") == 0 && json_array_size(want) > 1 &&
        json_integer_value(json_array_get(want, 0)) == bg_vocab_bos(v) &&
        json_integer_value(json_array_get(want, 1)) == bg_vocab_bos(v))
        json_array_remove(want, 0);
    cr_expect(same_ids(&ids, want), "%s, %s, %s: got %s, want %s", file,
              json_string_value(json_object_get(row, "name")), field, show_ids(&ids),
              json_dumps(want, JSON_COMPACT));
    if (strcmp(field, "special") == 0) {
        char back[4096], got[4096];
        const size_t n_back = unhex(json_string_value(json_object_get(row, "text_back_hex")), back);
        size_t n_got = 0;
        for (size_t i = 0; i < ids.n; i++) {
            bg_str s = bg_token_bytes(v, ids.v[i], true);
            memcpy(got + n_got, s.p, s.n);
            n_got += s.n;
        }
        cr_expect(n_got == n_back && memcmp(got, back, n_got) == 0, "%s, %s: bytes back are %.*s",
                  file, json_string_value(json_object_get(row, "name")), (int)n_got, got);
    }
    bg_ids_release(&ids);
}

Test(tokenize, golden_ids)
{
    for (int k = 0; k < N_NAMES; k++) {
        bg_vocab *v = open_vocab(NAMES[k]);
        char path[256];
        snprintf(path, sizeof path, "tests/golden/vocab/tok-%s.jsonl", NAMES[k]);
        FILE *f = fopen(path, "r");
        cr_assert_not_null(f, "%s", path);
        static char line[65536];
        int rows = 0;
        while (fgets(line, sizeof line, f)) {
            json_t *row = json_loads(line, 0, NULL);
            cr_assert_not_null(row);
            char text[4096];
            const size_t n = unhex(json_string_value(json_object_get(row, "hex")), text);
            rows++;
            /* The reference takes an over-long form for a character in BPE text; U+FFFD is right.
             */
            if (v->spm ||
                strcmp(json_string_value(json_object_get(row, "name")), "overlong") != 0) {
                check(v, NAMES[k], row, text, n, "plain");
                check(v, NAMES[k], row, text, n, "special");
                check(v, NAMES[k], row, text, n, "added");
            }
            json_decref(row);
        }
        cr_expect_eq(rows, 73, "%s: %d rows", path, rows);
        fclose(f);
        bg_vocab_free(v);
    }
}

typedef struct job {
    const bg_vocab *v;
    const char *text;
    bg_ids ids;
    bool differed;
} job;

static void *tokenize_often(void *arg)
{
    job *j = arg;
    for (int i = 0; i < 50; i++) {
        bg_ids ids = {0};
        bg_error err = {0};
        const bg_segment seg = {j->text, strlen(j->text), true};
        if (bg_tokenize(j->v, &seg, 1, true, &ids, &err) || ids.n != j->ids.n ||
            memcmp(ids.v, j->ids.v, ids.n * sizeof *ids.v) != 0)
            j->differed = true;
        bg_ids_release(&ids);
    }
    return NULL;
}

Test(tokenize, one_vocabulary_many_threads)
{
    static const char *const FILES[] = {"qwen2", "gemma"};
    static const char *const TEXT[] = {
        "It's 2024, caf\xc3\xa9 <|im_start|>", "int main(void)\n{\n    x;\n}",
        "\xe4\xbb\x8a\xe5\xa4\xa9 <b>   y", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"};
    for (int k = 0; k < 2; k++) {
        bg_vocab *v = open_vocab(FILES[k]);
        pthread_t thread[4];
        job jobs[4];
        for (int i = 0; i < 4; i++)
            jobs[i] = (job){v, TEXT[i], tokenize(v, TEXT[i], strlen(TEXT[i]), true, true), false};
        for (int i = 0; i < 4; i++)
            cr_assert_eq(pthread_create(&thread[i], NULL, tokenize_often, &jobs[i]), 0);
        for (int i = 0; i < 4; i++) {
            pthread_join(thread[i], NULL);
            cr_expect_not(jobs[i].differed, "%s, text %d", FILES[k], i);
            bg_ids_release(&jobs[i].ids);
        }
        bg_vocab_free(v);
    }
}
