/* Helpers of the tokenizer tests: golden vocabularies, hex, ids. */
#ifndef BG_TEST_VOCAB_FILE_H
#define BG_TEST_VOCAB_FILE_H

#include <criterion/criterion.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "text/text.h"

static inline bg_vocab *open_vocab(const char *name)
{
    char path[256];
    snprintf(path, sizeof path, "tests/golden/vocab/tok-%s.gguf", name);
    bg_error err = {0};
    bg_gguf *g;
    bg_vocab *v = NULL;
    cr_assert_eq(bg_gguf_open(&g, path, &err), BG_OK, "%s: %s", path, err.text);
    cr_assert_eq(bg_vocab_new(&v, g, &err), BG_OK, "%s: %s", path, err.text);
    bg_gguf_close(g);
    return v;
}

static inline size_t unhex(const char *hex, char *out)
{
    size_t n = strlen(hex) / 2;
    for (size_t i = 0; i < n; i++) {
        unsigned b;
        sscanf(hex + 2 * i, "%2x", &b);
        out[i] = (char)b;
    }
    return n;
}

static inline bg_ids tokenize(const bg_vocab *v, const char *p, size_t n, bool special, bool add)
{
    bg_error err = {0};
    bg_ids ids = {0};
    const bg_segment seg = {p, n, special};
    cr_assert_eq(bg_tokenize(v, &seg, 1, add, &ids, &err), BG_OK, "%s", err.text);
    return ids;
}

static inline bool same_ids(const bg_ids *ids, const json_t *want)
{
    if (ids->n != json_array_size(want)) return false;
    for (size_t i = 0; i < ids->n; i++)
        if (ids->v[i] != json_integer_value(json_array_get(want, i))) return false;
    return true;
}

/* "1 2 3", in a buffer that is overwritten by the fourth call from here. */
static inline const char *show_ids(const bg_ids *ids)
{
    static char text[4][1024];
    static int turn;
    char *t = text[turn++ % 4];
    size_t n = 0;
    t[0] = '\0';
    for (size_t i = 0; i < ids->n && n < 1000; i++)
        n += (size_t)snprintf(t + n, 1024 - n, "%d ", ids->v[i]);
    return t;
}

#endif
