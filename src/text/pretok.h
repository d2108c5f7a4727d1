/* text/pretok.h - cuts text into the words that BPE merges within, as `tokenizer.ggml.pre` names
 * it.
 *
 * A pre value stands for a list of regexes applied one after another: regex 1 cuts the text into
 * its matches and the gaps between them, each of these pieces is cut by regex 2, and so on. Nothing
 * is dropped. Lookahead sees only the piece. Properties and classes are PCRE2's (UTF, JIT). */
#ifndef BG_TEXT_PRETOK_H
#define BG_TEXT_PRETOK_H

#include <stdbool.h>
#include <stddef.h>

#include "base/error.h"

enum { BG_PRETOK_STAGES = 6 };

typedef enum bg_pretok_cut {
    BG_CUT_MATCH,        /* before and behind each match */
    BG_CUT_THIRDS,       /* the same, and inside so that groups of 3 characters end at its end */
    BG_CUT_THIRDS_INSIDE /* between such groups only; before the match if they fill it */
} bg_pretok_cut;

/* A regex in the dialect of the published listings, which pretok.c turns into PCRE2's: \s and \S
 * are Unicode White_Space, \d is [0-9], \uXXXX and \UXXXXXXXX are code points. */
typedef struct bg_pretok_stage {
    const char *regex; /* NULL: end of the list */
    bg_pretok_cut cut;
} bg_pretok_stage;

typedef struct bg_pre {
    const char *name;
    const bg_pretok_stage *stages;
    bool ignore_merges; /* a word that is a token as a whole is that token */
    bool add_bos;       /* default of tokenizer.ggml.add_bos_token */
    bool raw;           /* pieces are plain UTF-8, not spelled in the byte alphabet */
    bool blocks;        /* every space becomes U+2581 first */
} bg_pre;

const bg_pre *bg_pre_find(const char *name, size_t n); /* NULL: unknown */
const bg_pre *bg_pre_at(size_t i); /* all of them in order; NULL: past the end */

typedef struct bg_pretok bg_pretok;                 /* compiled; shared by any number of threads */
typedef struct bg_pretok_scratch bg_pretok_scratch; /* what one split at a time needs */

bg_status bg_pretok_new(bg_pretok **t, const bg_pre *pre, bg_error *err);
void bg_pretok_free(bg_pretok *t);
bg_pretok_scratch *bg_pretok_scratch_new(const bg_pretok *t); /* NULL: no memory */
void bg_pretok_scratch_free(bg_pretok_scratch *s);

/* Takes one piece; a failure ends the split and is passed on. */
typedef bg_status bg_pretok_emit(void *ctx, const char *p, size_t n, bg_error *err);

/* Hands the words of text[0..n), valid UTF-8, to emit in order. */
bg_status bg_pretok_split(const bg_pretok *t, bg_pretok_scratch *s, const char *text, size_t n,
                          bg_pretok_emit *emit, void *ctx, bg_error *err);

#endif
