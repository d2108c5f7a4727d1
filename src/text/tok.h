/* text/tok.h - one tokenising call: its scratch memory and the two algorithms. */
#ifndef BG_TEXT_TOK_H
#define BG_TEXT_TOK_H

#include "base/buf.h"
#include "text/merge.h"
#include "text/pretok.h"
#include "text/vocab.h"

typedef struct bg_tok {
    const bg_vocab *v;
    bg_ids *ids; /* where tokens go */
    bg_merger merger;
    bg_pretok_scratch *pretok; /* BPE */
    bg_buf text;               /* a fragment in the form that the algorithm wants */
} bg_tok;

/* Length of the character at p by its lead byte alone, as llama.cpp cuts SPM and raw BPE text:
 * bytes that are no lead byte count as characters. n >= 1 bytes are there. */
size_t bg_char_bytes(const char *p, size_t n);

/* Tokenise one text fragment. space: put the space in front that marks a word's start. BG_NOMEM;
 * BG_ARG: a character that the vocabulary cannot express. */
bg_status bg_spm_text(bg_tok *t, const char *p, size_t n, bool space, bg_error *err);
bg_status bg_bpe_text(bg_tok *t, const char *p, size_t n, bg_error *err);

/* Fill the parts of v that only the algorithm uses. BG_FORMAT, BG_NOMEM. */
bg_status bg_spm_load(bg_vocab *v, const bg_gguf *g, bg_error *err);
bg_status bg_bpe_load(bg_vocab *v, const bg_gguf *g, bg_error *err);

/* bg_tokenize(), adding to *steps what the merge loops did. */
bg_status bg_tokenize_count(const bg_vocab *v, const bg_segment *segs, size_t n_segs,
                            bool add_special, bg_ids *ids, uint64_t *steps, bg_error *err);

#endif
