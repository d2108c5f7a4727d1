/* Any bytes as text, cut into segments, through five small vocabularies. Ids are in range, control
 * tokens come out of trusted bytes only, and the tokens' bytes are the text again if it is valid
 * UTF-8. Run from the repository's root: the vocabularies lie in tests/golden/vocab. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/utf8.h"
#include "text/vocab.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const char *const NAMES[] = {"llama3", "gptoss", "gemma", "spm-phi3", "deepseek-llm"};
enum { N_NAMES = sizeof NAMES / sizeof NAMES[0] };
static bg_vocab *vocab[N_NAMES];

#define CHECK(x) ((x) ? (void)0 : (fprintf(stderr, "failed: %s\n", #x), abort()))

static void open_vocabs(void)
{
    for (int i = 0; i < N_NAMES; i++) {
        char path[128];
        snprintf(path, sizeof path, "tests/golden/vocab/tok-%s.gguf", NAMES[i]);
        bg_error err = {0};
        bg_gguf *g;
        CHECK(!bg_gguf_open(&g, path, &err));
        CHECK(!bg_vocab_new(&vocab[i], g, &err));
        bg_gguf_close(g);
    }
}

static void check_back(const bg_vocab *v, const bg_ids *ids, const char *text, size_t n,
                       bool strict)
{
    bg_buf back = {0}, out = {0};
    bg_detok *d = bg_detok_new(v, NULL, 0, false, true);
    CHECK(d);
    for (size_t i = 0; i < ids->n; i++) {
        bg_str s = bg_token_bytes(v, ids->v[i], true);
        bg_buf_add(&back, s.p, s.n);
        bg_detok_add(d, ids->v[i], &out);
    }
    bg_detok_finish(d, &out);
    bg_detok_free(d);
    CHECK(!back.failed && !out.failed);
    CHECK(bg_utf8_valid(out.data ? out.data : "", out.len));
    if (strict) {
        CHECK(back.len == n && (n == 0 || memcmp(back.data, text, n) == 0));
        if (bg_utf8_valid(text, n))
            CHECK(out.len == n && (n == 0 || memcmp(out.data, text, n) == 0));
    }
    bg_buf_release(&back);
    bg_buf_release(&out);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (!vocab[0]) open_vocabs();
    if (size < 4) return 0;
    const bg_vocab *v = vocab[data[0] % N_NAMES];
    const bool special = data[0] & 0x80;
    const char *text = (const char *)data + 4;
    const size_t n = size - 4;
    /* Three segments, the middle one of the other kind. */
    size_t a = data[1] < n ? data[1] : n, b = data[2] < n ? data[2] : n;
    if (a > b) b = a;
    const bg_segment segs[] = {
        {text, a, special}, {text + a, b - a, !special}, {text + b, n - b, special}};
    const bg_segment plain = {text, n, false};
    for (int mixed = 0; mixed < 2; mixed++) {
        bg_ids ids = {0};
        bg_error err = {0};
        CHECK(!bg_tokenize(v, mixed ? segs : &plain, mixed ? 3 : 1, false, &ids, &err));
        for (size_t i = 0; i < ids.n; i++) {
            CHECK(ids.v[i] >= 0 && ids.v[i] < bg_vocab_size(v));
            CHECK(mixed || !(v->flags[ids.v[i]] & BG_TOKEN_TRUSTED_ONLY));
        }
        /* A prefix space and stripped white space are not in the text; U+2581 is a space to SPM. A
         * bad lead byte takes the bytes behind it along, an escaped space too. */
        bool strict = bg_utf8_valid(text, n);
        if (v->spm) strict &= !v->space_prefix && !memmem(text, n, "\xe2\x96\x81", 3);
        check_back(v, &ids, text, n, strict);
        bg_ids_release(&ids);
    }
    return 0;
}
