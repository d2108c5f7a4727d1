/* Which ids begin and end a text, and which of all tokens end a generation: keys of the file first,
 * then well-known names. */
#include <stdlib.h>
#include <string.h>

#include "text/vocab.h"

#define BAR   "\xef\xbd\x9c" /* U+FF5C */
#define BLOCK "\xe2\x96\x81" /* U+2581 */

enum { NAMES = 12, KEYS = 2 };

typedef struct known_id {
    const char *key[KEYS];   /* without "tokenizer.ggml."; the second is an older name */
    const char *name[NAMES]; /* searched in this order when the keys give none */
    bool ends;               /* in the EOG set, if there is such an id */
} known_id;

static const known_id EOT = {{"eot_token_id"},
                             {"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>",
                              "<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>", "[EOT]",
                              "<" BAR "end" BLOCK "of" BLOCK "sentence" BAR ">",
                              "<end_of_utterance>"},
                             true};
static const known_id EOM = {{"eom_token_id"}, {"<|eom_id|>"}, true};

/* Fill-in-the-middle marks: they become control tokens, and those that begin another file or pad
 * end a generation. */
static const known_id FIM[] = {
    {{"fim_pre_token_id", "prefix_token_id"},
     {"<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<" BAR "fim" BLOCK "begin" BAR ">",
      "<PRE>", BLOCK "<PRE>", "<|code_prefix|>", "<|prefix|>"},
     false},
    {{"fim_suf_token_id", "suffix_token_id"},
     {"<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<" BAR "fim" BLOCK "hole" BAR ">", "<SUF>",
      BLOCK "<SUF>", "<|code_suffix|>", "<|suffix|>"},
     false},
    {{"fim_mid_token_id", "middle_token_id"},
     {"<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<" BAR "fim" BLOCK "end" BAR ">", "<MID>",
      BLOCK "<MID>", "<|code_middle|>", "<|middle|>"},
     false},
    {{"fim_pad_token_id"}, {"<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"}, true},
    {{"fim_rep_token_id"},
     {"<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"},
     true},
    {{"fim_sep_token_id"}, {"<|file_sep|>"}, true},
};

static const char *const END_NAMES[] = {
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<" BAR "end" BLOCK "of" BLOCK "sentence" BAR ">",
    "[e~[",
};

/* Shown in the output, so that whoever reads it can tell the channels apart. */
static const char *const CHANNEL_MARKS[] = {"<|channel|>", "<|message|>", "<|start|>",
                                            "<|constrain|>"};

static int32_t find(const bg_vocab *v, const char *name)
{
    return bg_vocab_find(v, name, strlen(name));
}

static void make_control(bg_vocab *v, int32_t id)
{
    v->kind[id] = BG_TOKEN_CONTROL;
    v->flags[id] |= BG_TOKEN_TRUSTED_ONLY;
}

/* Reads an id; def if the key is absent, -1 if its value says "none". With strict, an id outside
 * the vocabulary is BG_FORMAT, else it is none. */
static bg_status read_id(const bg_vocab *v, const bg_gguf *g, const char *key, int32_t def,
                         bool strict, int32_t *id, bg_error *err)
{
    char full[64];
    snprintf(full, sizeof full, "tokenizer.ggml.%s", key);
    int64_t x;
    bg_status st = bg_gguf_get_int(g, full, -2, &x, err);
    if (st) return st;
    if (x == -2) {
        *id = def < v->n ? def : -1;
        return BG_OK;
    }
    *id = x >= 0 && x < v->n ? (int32_t)x : -1;
    if (strict && *id < 0 && x != -1 && x != UINT32_MAX)
        return bg_fail(err, BG_FORMAT, "%s: %lld, but the vocabulary has %d tokens", full,
                       (long long)x, v->n);
    return BG_OK;
}

/* The id that k's keys or names give, or -1; one found by name becomes a control token. */
static bg_status find_known(bg_vocab *v, const bg_gguf *g, const known_id *k, bool strict,
                            int32_t *id, bg_error *err)
{
    *id = -1;
    for (int i = 0; i < KEYS && k->key[i] && *id < 0; i++) {
        bg_status st = read_id(v, g, k->key[i], -1, strict, id, err);
        if (st) return st;
    }
    for (int i = 0; i < NAMES && k->name[i] && *id < 0; i++) {
        *id = find(v, k->name[i]);
        if (*id >= 0) make_control(v, *id);
    }
    return BG_OK;
}

static bg_status read_ids(bg_vocab *v, const bg_gguf *g, bg_error *err)
{
    bg_status st = read_id(v, g, "bos_token_id", v->spm ? 1 : -1, true, &v->bos, err);
    if (!st) st = read_id(v, g, "eos_token_id", v->spm ? 2 : -1, true, &v->eos, err);
    if (!st) st = read_id(v, g, "unknown_token_id", v->spm ? 0 : -1, true, &v->unk, err);
    if (!st)
        st = bg_gguf_get_bool(g, "tokenizer.ggml.add_bos_token", v->spm || v->pre->add_bos,
                              &v->add_bos, err);
    if (!st) st = bg_gguf_get_bool(g, "tokenizer.ggml.add_eos_token", false, &v->add_eos, err);
    if (!st)
        st = bg_gguf_get_bool(g, "tokenizer.ggml.add_space_prefix", v->spm, &v->space_prefix, err);
    return st;
}

static void hide_unused(bg_vocab *v)
{
    for (int32_t i = 0; i < v->n; i++) {
        const bg_str t = bg_arena_get(&v->text, i);
        if (v->kind[i] == BG_TOKEN_CONTROL && memmem(t.p, t.n, "unused", 6))
            v->kind[i] = BG_TOKEN_UNUSED;
    }
}

/* Drops an id from the set, if both are there. */
static void drop(bool *ends, int32_t id)
{
    if (id >= 0) ends[id] = false;
}

static bool has(const bg_vocab *v, const bool *ends, const char *name)
{
    const int32_t id = find(v, name);
    return id >= 0 && ends[id];
}

static void correct(bg_vocab *v, bool *ends)
{
    const bool call = has(v, ends, "<|call|>") || has(v, ends, "<|calls|>");
    const int32_t end = find(v, "<|end|>"), eos = find(v, "</s>");
    if (has(v, ends, "<|end|>") && call &&
        (has(v, ends, "<|return|>") || has(v, ends, "<|flush|>"))) {
        /* Harmony: it ends a message, and another may follow. */
        drop(ends, end);
        v->kind[end] = BG_TOKEN_USER;
    }
    if (has(v, ends, "<|tool_response>") && has(v, ends, "</s>")) {
        drop(ends, eos);
        v->kind[eos] = BG_TOKEN_NORMAL;
        v->flags[eos] &= (uint8_t)~BG_TOKEN_TRUSTED_ONLY;
    }
    for (size_t i = 0; i < sizeof CHANNEL_MARKS / sizeof CHANNEL_MARKS[0]; i++) {
        const int32_t id = find(v, CHANNEL_MARKS[i]);
        if (id >= 0) v->kind[id] = BG_TOKEN_USER;
    }
}

bg_status bg_vocab_set_special(bg_vocab *v, const bg_gguf *g, bg_error *err)
{
    bg_status st = read_ids(v, g, err);
    if (st) return st;
    bool *ends = calloc((size_t)v->n, sizeof *ends);
    if (!ends) return bg_fail(err, BG_NOMEM, "vocabulary: out of memory");
    st = find_known(v, g, &EOT, true, &v->eot, err);
    if (!st) st = find_known(v, g, &EOM, true, &v->eom, err);
    for (size_t i = 0; i < sizeof FIM / sizeof FIM[0] && !st; i++) {
        int32_t id;
        st = find_known(v, g, &FIM[i], false, &id, err);
        if (!st && id >= 0 && FIM[i].ends) ends[id] = true;
    }
    if (st) goto out;
    hide_unused(v);
    for (size_t i = 0; i < sizeof END_NAMES / sizeof END_NAMES[0]; i++) {
        const int32_t id = find(v, END_NAMES[i]);
        if (id < 0) continue;
        ends[id] = true;
        make_control(v, id);
    }
    const int32_t by_key[] = {v->eos, v->eot, v->eom};
    for (size_t i = 0; i < 3; i++)
        if (by_key[i] >= 0) ends[by_key[i]] = true;
    correct(v, ends);
    for (int32_t i = 0; i < v->n; i++)
        v->n_eog += ends[i];
    v->eog = malloc((v->n_eog + 1) * sizeof *v->eog);
    if (!v->eog) {
        st = bg_fail(err, BG_NOMEM, "vocabulary: out of memory");
        goto out;
    }
    for (int32_t i = 0, n = 0; i < v->n; i++)
        if (ends[i]) v->eog[n++] = i;
out:
    free(ends);
    return st;
}
