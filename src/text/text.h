/* text/text.h - text to token ids and back; messages to prompt text; stop strings.
 *
 * Everything here is built once from a GGUF and then read-only: any number of threads may use one
 * bg_vocab or bg_template at a time. Nothing depends on locale. */
#ifndef BG_TEXT_TEXT_H
#define BG_TEXT_TEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <jansson.h>

#include "base/buf.h"
#include "base/error.h"
#include "gguf/gguf.h"

/* ---- token ids ------------------------------------------------------------------------------ */

typedef struct bg_ids { /* growable; starts as {0}; failed is sticky like bg_buf's */
    int32_t *v;
    size_t n, cap;
    bool failed;
} bg_ids;

bool bg_ids_add(bg_ids *ids, int32_t id);
void bg_ids_release(bg_ids *ids);

/* ---- vocabulary: SPM ("llama") and byte-level BPE ("gpt2") ----------------------------------- */

typedef struct bg_vocab bg_vocab;

typedef enum bg_token_kind {
    BG_TOKEN_NORMAL = 1,
    BG_TOKEN_UNKNOWN,
    BG_TOKEN_CONTROL,
    BG_TOKEN_USER,
    BG_TOKEN_UNUSED,
    BG_TOKEN_BYTE
} bg_token_kind;

/* Builds the tokenizer that g describes. BG_FORMAT: damaged, or a kind or `pre` we do not have
 * (named in the text). *v is the caller's; it keeps no pointer into g. */
bg_status bg_vocab_new(bg_vocab **v, const bg_gguf *g, bg_error *err);
void bg_vocab_free(bg_vocab *v);

int32_t bg_vocab_size(const bg_vocab *v);
/* -1: the vocabulary has none. */
int32_t bg_vocab_bos(const bg_vocab *v);
int32_t bg_vocab_eos(const bg_vocab *v);
int32_t bg_vocab_find(const bg_vocab *v, const char *text, size_t n); /* exact token text, or -1 */
/* Every token that ends a generation (eos, eot, eom and their known names), ascending; *n of them.
 */
const int32_t *bg_vocab_eog(const bg_vocab *v, size_t *n);
bool bg_vocab_add_bos(const bg_vocab *v);
bool bg_vocab_add_eos(const bg_vocab *v);
bg_token_kind bg_vocab_kind(const bg_vocab *v, int32_t id);
/* The token's text as the file has it (for inspecting); the bytes it stands for: bg_token_bytes. */
bg_str bg_vocab_text(const bg_vocab *v, int32_t id);

/* A run of prompt text. With parse_special, text that spells a control or user-defined token
 * becomes that token; without it only user-defined tokens do, as tokenizers.md says: control tokens
 * never come out of such text. */
typedef struct bg_segment {
    const char *p;
    size_t n;
    bool parse_special;
} bg_segment;

/* Tokenises the segments into ids (appended), as one text: words and merges run across segments,
 * whose borders only decide what may be a control token. add_special: put bos in front and
 * eos behind if the vocabulary wants them (a bos that the first segment spells already is not
 * doubled). Invalid UTF-8 is tokenised bytewise as tokenizers.md says. BG_NOMEM. */
bg_status bg_tokenize(const bg_vocab *v, const bg_segment *segs, size_t n_segs, bool add_special,
                      bg_ids *ids, bg_error *err);

/* The bytes that `id` contributes to text (control tokens: none unless special). An SPM word start
 * is a space; the leading-space rule of a whole text is bg_detok's. Valid while v lives. */
bg_str bg_token_bytes(const bg_vocab *v, int32_t id, bool special);

/* ---- detokeniser and stop strings: one for each sequence ------------------------------------- */

/* Turns generated ids into text as they come. Bytes that may still become a UTF-8 character are
 * held back, and so is text that may be the start of a stop string; what can never become valid
 * becomes U+FFFD. Text starts after the prompt: the prompt never matches a stop string, and no
 * leading space is stripped from a continuation. */
typedef struct bg_detok bg_detok;

/* Copies the stop strings (n_stops may be 0, empty strings are refused before). NULL: no memory.
 * include_stop keeps the matched string in the text. */
bg_detok *bg_detok_new(const bg_vocab *v, const char *const *stops, size_t n_stops,
                       bool include_stop, bool show_special);
void bg_detok_free(bg_detok *d);
/* Appends the text that became certain to out. Returns the index of the stop string that ended the
 * text, the earliest occurrence in the text (ties: the longest), or -1. After a match no more text
 * comes. While a stop string that is there could still turn out to be part of one that began
 * earlier, or of a longer one at its place ("\n" of "\n\n"), nothing is decided yet: then -1, as
 * before. */
int bg_detok_add(bg_detok *d, int32_t id, bg_buf *out);
/* The end: what was held back comes out, an unfinished character as U+FFFD. Returns the stop string
 * that ended the text if that was still undecided or known already, else -1. */
int bg_detok_finish(bg_detok *d, bg_buf *out);

/* ---- chat templates ---------------------------------------------------------------------------
 */

typedef struct bg_template bg_template;

/* Parses the Jinja source. BG_FORMAT: a syntax error, with line and column, or a limit. */
bg_status bg_template_new(bg_template **t, const char *source, size_t n, const char *name,
                          bg_error *err);
void bg_template_free(bg_template *t);

typedef struct bg_chat_input {
    const json_t *messages; /* array of objects, as in the request */
    const json_t *tools;    /* array, or NULL */
    const json_t *kwargs;   /* object of further variables (chat_template_kwargs), or NULL */
    const char *bos, *eos;  /* token texts, "" when there is none */
    bool add_generation_prompt;
    int64_t wall_s; /* what strftime_now() shows; seconds since 1970, UTC */
} bg_chat_input;

typedef struct bg_chat_limits { /* 0: the default in parentheses */
    size_t output_bytes;        /* 64 MiB */
    int64_t steps;              /* 10,000,000 expression and statement evaluations */
    int depth;                  /* 200 nested calls, loops, includes of macros */
} bg_chat_limits;

/* A rendered prompt: its text, and which bytes came from the template itself (trusted: they may
 * spell control tokens) and which from the request (never control tokens). */
typedef struct bg_rendered {
    bg_buf text;
    bg_segment *segs; /* pointing into text, in order, covering it; parse_special = trusted */
    size_t n_segs;
} bg_rendered;

void bg_rendered_release(bg_rendered *r);

/* Renders. BG_ARG: the template refused (raise_exception; its own message is the text) or failed on
 * this input; BG_NOMEM. Where provenance cannot be kept (a filter mixed both) bytes are untrusted.
 */
bg_status bg_chat_render(const bg_template *t, const bg_chat_input *in,
                         const bg_chat_limits *limits, bg_rendered *out, bg_error *err);

#endif
