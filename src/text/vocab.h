/* text/vocab.h - what a bg_vocab holds; private to src/text.
 *
 * Token texts lie end to end in one arena, id i at [text_at[i], text_at[i + 1]); the bytes that
 * tokens stand for lie the same way in another. Everything is filled by bg_vocab_new() and never
 * written again. */
#ifndef BG_TEXT_VOCAB_H
#define BG_TEXT_VOCAB_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "text/map.h"
#include "text/pretok.h"
#include "text/special.h"
#include "text/text.h"

enum {
    /* Never made out of ordinary text, neither by merging nor by whole-word lookup: the token was
     * of type control or unknown in the file or became control (a known end-of-turn name). Stays
     * when gpt-oss's channel marks turn user-defined for display, so that no prompt text can forge
     * one. */
    BG_TOKEN_TRUSTED_ONLY = 1,
    BG_TOKEN_LSTRIP = 2, /* white space before it is dropped from the text */
    BG_TOKEN_RSTRIP = 4, /* white space behind it is */
};

typedef struct bg_token_arena {
    char *p;
    uint32_t *at; /* n + 1 offsets */
} bg_token_arena;

struct bg_vocab {
    int32_t n;
    bool spm; /* else BPE */
    bg_token_arena text, bytes;
    uint8_t *kind;  /* bg_token_kind */
    uint8_t *flags; /* BG_TOKEN_... */
    bg_map by_text;

    int32_t bos, eos, eot, eom, unk;
    int32_t *eog;
    size_t n_eog;
    bool add_bos, add_eos, space_prefix;
    bg_special *special; /* finds the spelled tokens of a text */

    /* Id of the token that stands for byte b alone: BPE the one-byte piece (raw pre and SPM:
     * "<0xHH>", SPM else the one-byte text), or -1. */
    int32_t byte_id[256];

    /* SPM */
    float *score;
    uint64_t *glue; /* bit set over hashed pairs of adjacent characters that occur in some token */
    uint32_t max_text;

    /* BPE */
    const bg_pre *pre;
    bg_pretok *pretok;
    bg_pairs merges;
    bg_map by_bytes; /* whole-word lookup; only when pre->ignore_merges */
};

static inline bg_str bg_arena_get(const bg_token_arena *a, int32_t id)
{
    return (bg_str){a->p + a->at[id], a->at[id + 1] - a->at[id]};
}

/* Sets bos, eos and their kin, changes the kinds that go with them, and collects the EOG set, as
 * tokenizers.md section 5 orders it. After kinds, texts and by_text are there. BG_FORMAT, BG_NOMEM.
 */
bg_status bg_vocab_set_special(bg_vocab *v, const bg_gguf *g, bg_error *err);

/* Appends the bytes that token id stands for, control tokens written out, where no byte alphabet is
 * involved. */
void bg_vocab_plain_bytes(const bg_vocab *v, int32_t id, bg_buf *out);
/* Makes the bytes v's, whose bytes.at[0..n) are set. BG_FORMAT: too many. BG_NOMEM. */
bg_status bg_vocab_take_bytes(bg_vocab *v, bg_buf *bytes, bg_error *err);

#endif
