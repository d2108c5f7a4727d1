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

/* Regexes that the table has in another form, as they are published (kimi-k2: the intersections as
 * lookaheads, which fill the stack on long words; tiny_aya: \b spelled out; its first stage only).
 */
static const bg_pretok_stage PUBLISHED[][BG_PRETOK_STAGES + 1] = {
    {{"\\p{sc:Han}+|[^\\r\\n\\p{L}\\p{N}]?(?:(?!\\p{sc:Han})[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}])*("
      "?:(?!\\p{sc:Han})[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}])+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\\r\\n\\p{L}"
      "\\p{N}]?(?:(?!\\p{sc:Han})[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}])+(?:(?!\\p{sc:Han})[\\p{Ll}"
      "\\p{Lm}\\p{Lo}\\p{M}])*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\\p{N}{1,3}| "
      "?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
      BG_CUT_MATCH}},
    {{"[\\r\\n]", BG_CUT_MATCH},
     {"\\s?[A-Za-z\\u00B5\\u00C0-\\u00D6\\u00D8-\\u00F6\\u00F8-\\u01BA\\u01BC-\\u01BF\\u01C4-"
      "\\u0293\\u0295-\\u02AF\\u0370-\\u0373\\u0376\\u0377\\u037B-\\u037D\\u037F\\u0386\\u0388-"
      "\\u038A\\u038C\\u038E-\\u03A1\\u03A3-\\u03F5\\u03F7-\\u0481\\u048A-\\u052F\\u0531-"
      "\\u0556\\u10A0-\\u10C5\\u13A0-\\u13F5\\u13F8-\\u13FD\\u1C90-\\u1CBA\\u1CBD-\\u1CBF\\u1D00-"
      "\\u1D2B\\u1D6B-\\u1D77\\u1D79-\\u1D9A\\u1E00-\\u1F15\\u1F18-\\u1F1D\\u1F20-\\u1F45\\u1F48-"
      "\\u1F4D\\u1F50-\\u1F57\\u1F59\\u1F5B\\u1F5D\\u1F5F-\\u1F7D\\u1F80-\\u1FB4\\u1FB6-"
      "\\u1FBC\\u1FBE\\u1FC2-\\u1FC4\\u1FC6-\\u1FCC\\u1FD0-\\u1FD3\\u1FD6-\\u1FDB\\u1FE0-"
      "\\u1FEC\\u1FF2-\\u1FF4\\u1FF6-\\u1FFC\\u2102\\u2107\\u210A-\\u2113\\u2115\\u2119-"
      "\\u211D\\u2124\\u2126\\u2128\\u212A-\\u212D\\u212F-\\u2134\\u2139\\u213C-\\u213F\\u2145-"
      "\\u2149\\u214E\\u2183\\u2184\\u2C00-\\u2C7B\\u2C7E-\\u2CE4\\u2CEB-"
      "\\u2CEE\\u2CF2\\u2CF3\\uA640-\\uA66D\\uA680-\\uA69B\\uA722-\\uA76F\\uA771-\\uA787\\uA78B-"
      "\\uA78E\\uAB70-\\uABBF\\uFB00-\\uFB06\\uFB13-\\uFB17\\uFF21-\\uFF3A\\uFF41-"
      "\\uFF5A\\U00010400-\\U0001044F\\U000104B0-\\U000104D3\\U000104D8-\\U000104FB\\U00010C80-"
      "\\U00010CB2\\U00010CC0-\\U00010CF2\\U000118A0-\\U000118DF\\U0001E900-\\U0001E943]+",
      BG_CUT_MATCH},
     {"\\s?[!-/:-~\\uFF01-\\uFF0F\\uFF1A-\\uFF5E\\u2018-\\u201F\\u3000-\\u3002]+", BG_CUT_MATCH},
     {"\\s+\\z", BG_CUT_MATCH},
     {"[\\u4E00-\\u9FA5\\u0800-\\u4E00\\uAC00-\\uD7FF]+", BG_CUT_MATCH},
     {"\\p{N}+", BG_CUT_MATCH}},
    {{"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\\r\\n\\p{L}\\p{N}]?(?:\\p{L}"
      "\\p{M}*(?: \\p{L}\\p{M}*)*)+|\\p{N}| "
      "?[^\\s\\p{L}\\p{N}]+[\\r\\n/]?|\\s*[\\r\\n]|\\s+(?!\\S)|\\s+",
      BG_CUT_MATCH}},
    {{"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{"
      "N}{1,3}| "
      "?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s{512}(?!\\S)|\\s{256}(?!\\S)|\\s{128}(?!\\S)|"
      "\\s{64}(?!\\S)|\\s{32}(?!\\S)|\\s{16}(?!\\S)|\\s{8}(?!\\S)|\\s{4}(?!\\S)|\\s{1,2}(?!\\S)|"
      "\\s{1}",
      BG_CUT_MATCH}},
    {{"\\d{1,3}(?=(?:\\d{3})*(?![\\p{L}\\p{M}\\p{N}\\p{Pc}]))", BG_CUT_MATCH}},
};
static const char *const REWRITTEN[] = {"kimi-k2", "deepseek-llm", "exaone-moe", "jais-2",
                                        "tiny_aya"};

Test(pretok, rewritten_regexes_match_the_same)
{
    static const char *const ATOM[] = {" ",
                                       "  ",
                                       "\n",
                                       "\r\n",
                                       "\t",
                                       "a",
                                       "B",
                                       "1",
                                       "12",
                                       "!",
                                       "'s",
                                       "/",
                                       "\xcc\x81",
                                       "\xe4\xb8\xad",
                                       "\xe3\x80\x85",
                                       "\xc7\x85",
                                       "_",
                                       "\xd9\xa1",
                                       "\xc2\xa0",
                                       "\xe2\x80\xa6",
                                       "            ",
                                       "345"};
    enum { N_ATOMS = sizeof ATOM / sizeof ATOM[0] };
    static pieces x, y;
    for (size_t k = 0; k < sizeof REWRITTEN / sizeof REWRITTEN[0]; k++) {
        bg_pre ours = *bg_pre_find(REWRITTEN[k], strlen(REWRITTEN[k])), published = ours;
        bg_pretok_stage first[2] = {ours.stages[0], {NULL, BG_CUT_MATCH}};
        published.stages = PUBLISHED[k];
        if (!PUBLISHED[k][1].regex) ours.stages = first;
        bg_error err = {0};
        bg_pretok *a, *b;
        cr_assert_eq(bg_pretok_new(&a, &ours, &err), BG_OK, "%s", err.text);
        cr_assert_eq(bg_pretok_new(&b, &published, &err), BG_OK, "%s", err.text);
        bg_pretok_scratch *sa = bg_pretok_scratch_new(a), *sb = bg_pretok_scratch_new(b);
        uint64_t rng = k + 1;
        for (int round = 0; round < 20000; round++) {
            char text[256] = "";
            for (int i = 0; i < 12; i++) {
                rng = rng * UINT64_C(6364136223846793005) + 1442695040888963407u;
                strcat(text, ATOM[(rng >> 33) % (round % 2 ? N_ATOMS : 9)]);
            }
            x = (pieces){.at = text};
            y = (pieces){.at = text};
            cr_assert_eq(bg_pretok_split(a, sa, text, strlen(text), take, &x, &err), BG_OK);
            cr_assert_eq(bg_pretok_split(b, sb, text, strlen(text), take, &y, &err), BG_OK);
            cr_assert(x.n == y.n && memcmp(x.bytes, y.bytes, x.n * sizeof x.bytes[0]) == 0,
                      "%s: \"%s\": %zu and %zu pieces", REWRITTEN[k], text, x.n, y.n);
        }
        bg_pretok_scratch_free(sa);
        bg_pretok_scratch_free(sb);
        bg_pretok_free(a);
        bg_pretok_free(b);
    }
}

Test(pretok, unknown_names)
{
    cr_expect_null(bg_pre_find("llama", 5));
    cr_expect_null(bg_pre_find("", 0));
    cr_expect_not_null(bg_pre_find("qwen2x", 5));
}
