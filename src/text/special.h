/* text/special.h - finds the tokens that a text spells out: user-defined ones everywhere, control
 * tokens only where the text is trusted. */
#ifndef BG_TEXT_SPECIAL_H
#define BG_TEXT_SPECIAL_H

#include <stddef.h>
#include <stdint.h>

#include "text/text.h"

typedef struct bg_special bg_special;

/* From the texts, kinds and flags of v. BG_NOMEM. */
bg_status bg_special_new(bg_special **s, const bg_vocab *v, bg_error *err);
void bg_special_free(bg_special *s);

typedef struct bg_fragment {
    size_t at, n; /* bytes of the text */
    int32_t id;   /* the token they spell; -1: text to tokenise */
} bg_fragment;

typedef struct bg_fragments {
    bg_fragment *v;
    size_t n;
} bg_fragments;

/* Cuts text, the segments' bytes end to end, into fragments, in order; bytes that a token's LSTRIP
 * or RSTRIP drops are in none. The longest token is cut out everywhere before the next is looked
 * for (ties: the lower id), each from left to right. A control token counts only if all its bytes
 * are in segments with parse_special. frags->v is the caller's to free. BG_NOMEM. */
bg_status bg_special_split(const bg_special *s, const bg_vocab *v, const char *text,
                           const bg_segment *segs, size_t n_segs, bg_fragments *frags,
                           bg_error *err);

#endif
