/* The pre-tokenisers: pieces against vectors made with another regex engine, and what must hold for
 * all of them. */
#include "vocab_file.h"

#include "text/pretok.h"

typedef struct pieces {
    const char *at; /* where the next one must begin */
    size_t n, longest;
    size_t bytes[4096];
    bool broken;
} pieces;

static bg_status take(void *ctx, const char *p, size_t n, bg_error *err)
{
    pieces *x = ctx;
    (void)err;
    if (p != x->at || n == 0) x->broken = true;
    x->at = p + n;
    if (x->n < 4096) x->bytes[x->n] = n;
    if (n > x->longest) x->longest = n;
    x->n++;
    return BG_OK;
}

static void split(const bg_pre *pre, const char *text, size_t n, pieces *x)
{
    bg_error err = {0};
    bg_pretok *t;
    cr_assert_eq(bg_pretok_new(&t, pre, &err), BG_OK, "%s: %s", pre->name, err.text);
    bg_pretok_scratch *s = bg_pretok_scratch_new(t);
    cr_assert_not_null(s);
    *x = (pieces){.at = text};
    cr_assert_eq(bg_pretok_split(t, s, text, n, take, x, &err), BG_OK, "%s: %s", pre->name,
                 err.text);
    cr_expect(!x->broken && x->at == text + n, "%s: pieces are not the text", pre->name);
    bg_pretok_scratch_free(s);
    bg_pretok_free(t);
}

Test(pretok, vectors)
{
    FILE *f = fopen("tests/golden/pretok_vectors.jsonl", "r");
    cr_assert_not_null(f);
    static char line[65536];
    static pieces x;
    int rows = 0;
    for (; fgets(line, sizeof line, f); rows++) {
        json_t *row = json_loads(line, 0, NULL);
        const char *name = json_string_value(json_object_get(row, "pre"));
        const char *text = json_string_value(json_object_get(row, "text"));
        const json_t *want = json_object_get(row, "pieces");
        const bg_pre *pre = bg_pre_find(name, strlen(name));
        cr_assert_not_null(pre, "%s", name);
        split(pre, text, strlen(text), &x);
        cr_expect_eq(x.n, json_array_size(want), "%s: \"%s\": %zu pieces, want %zu", name, text,
                     x.n, json_array_size(want));
        for (size_t i = 0, at = 0; i < x.n && i < json_array_size(want); at += x.bytes[i++]) {
            const char *w = json_string_value(json_array_get(want, i));
            cr_expect(strlen(w) == x.bytes[i] && memcmp(w, text + at, x.bytes[i]) == 0,
                      "%s: \"%s\": piece %zu is \"%.*s\", want \"%s\"", name, text, i,
                      (int)x.bytes[i], text + at, w);
        }
        json_decref(row);
    }
    cr_expect_eq(rows, 228);
    fclose(f);
}

/* "pre|text|pieces separated by |": rules that the vectors do not reach. */
static const char *const RULES[][3] = {
    {"tiny_aya", "1234567 x", "1|234|567| x"},
    {"tiny_aya", "1234567x", "123|456|7|x"}, /* no word ends behind the digits: stage 2 cuts */
    {"afmoe", "1234567x", "1|234|567|x"},
    {"afmoe", "\xd9\xa1\xd9\xa2\xd9\xa3\xd9\xa4", "\xd9\xa1|\xd9\xa2\xd9\xa3\xd9\xa4"},
    {"superbpe", "a1234567b", "a|1|234|567|b"},
    {"superbpe", "123456", "123|456"},
    {"exaone-moe", " ab cd, ef", " ab cd|,| ef"},
    {"deepseek-llm", "a  \t", "a|  \t"},
    {"deepseek-llm", "a  b", "a| | b"},
    {"chameleon", "IMGIMGABCZ12    x", "IMGIMGABCZ|1|2|    |x"},
    {"spark2_5", "12345 a\n\nb!", "1|2|3|4|5| a|\n|\n|b|!"},
    {"ufakzeka", "it's", "it|'s"},
    {"jais-2", "a     b", "a|    | b"},
    {"youtu", "ABCdef 12", "ABCdef| |1|2"},
    {"laguna", "a \n\n b", "a| |\n\n| b"},
    {"viking", "ab 12.c", "ab| |1|2|.|c"},
    {"kimi-k2",
     "\xe4\xb8\xad\xe3\x80\x85"
     "aBc",
     "\xe4\xb8\xad\xe3\x80\x85|a|Bc"},
    {"gpt-4o",
     "A'LL b\xcc\x81"
     "c",
     "A'LL| b\xcc\x81"
     "c"},
    /* U+180E is no space in Unicode, though PCRE2's \s says so. */
    {"gpt-2", "a\xe1\xa0\x8e b", "a|\xe1\xa0\x8e| b"},
};

Test(pretok, rules)
{
    static pieces x;
    for (size_t i = 0; i < sizeof RULES / sizeof RULES[0]; i++) {
        const bg_pre *pre = bg_pre_find(RULES[i][0], strlen(RULES[i][0]));
        cr_assert_not_null(pre);
        split(pre, RULES[i][1], strlen(RULES[i][1]), &x);
        char got[256];
        size_t n = 0, at = 0;
        for (size_t k = 0; k < x.n; at += x.bytes[k++])
            n += (size_t)snprintf(got + n, sizeof got - n, "%s%.*s", k ? "|" : "", (int)x.bytes[k],
                                  RULES[i][1] + at);
        cr_expect_str_eq(got, RULES[i][2], "%s: got %s, want %s", RULES[i][0], got, RULES[i][2]);
    }
}

/* Long runs that would be quadratic, or fill PCRE2's stack, in the published form of some regexes.
 */
Test(pretok, long_runs)
{
    static const char *const RUN[] = {
        "a",  "A", "1",       " ", "\n", " \n", "!", "\xe4\xb8\xad", "\xe0\xa4\xbf",
        "aB", "'", "\xd9\xa1"};
    enum { BYTES = 60000 };
    char *text = malloc(BYTES + 8);
    static pieces x;
    const bg_pretok_stage *last = NULL;
    for (size_t k = 0; bg_pre_at(k); k++) {
        if (bg_pre_at(k)->stages == last) continue; /* names that share their regexes */
        last = bg_pre_at(k)->stages;
        for (size_t i = 0; i < sizeof RUN / sizeof RUN[0]; i++) {
            size_t n = 0;
            while (n < BYTES) {
                memcpy(text + n, RUN[i], strlen(RUN[i]));
                n += strlen(RUN[i]);
            }
            text[n++] = 'x';
            split(bg_pre_at(k), text, n, &x);
        }
    }
    free(text);
}

Test(pretok, unknown_names)
{
    cr_expect_null(bg_pre_find("llama", 5));
    cr_expect_null(bg_pre_find("", 0));
    cr_expect_not_null(bg_pre_find("qwen2x", 5));
}
