/* text/jinja_lex.h - template source to tokens, one at a time.
 *
 * White space control happens here: `-` and `+` at tags, trim_blocks (the newline after a block tag
 * or comment goes away) and lstrip_blocks (so do spaces between a line's start and such a tag). */
#ifndef BG_TEXT_JINJA_LEX_H
#define BG_TEXT_JINJA_LEX_H

#include <stdbool.h>
#include <stddef.h>

typedef enum jn_token_kind {
    JN_T_EOF,
    JN_T_ERROR, /* text of the token is the message */
    JN_T_DATA,
    JN_T_VAR_BEGIN,
    JN_T_VAR_END,
    JN_T_BLOCK_BEGIN,
    JN_T_BLOCK_END,
    JN_T_NAME,
    JN_T_STRING, /* with its quotes */
    JN_T_INT,
    JN_T_FLOAT,
    JN_T_OP, /* op says which: its character, or one of the following */
} jn_token_kind;

enum { JN_OP_EQ = 256, JN_OP_NE, JN_OP_LE, JN_OP_GE, JN_OP_FLOORDIV, JN_OP_POW };

typedef struct jn_token {
    jn_token_kind kind;
    int op;
    const char *p; /* where it is in the source */
    size_t n;
} jn_token;

enum { JN_MAX_BRACKETS = 200 };

typedef struct jn_lexer {
    const char *src, *end, *at;
    enum { JN_IN_DATA, JN_IN_VAR, JN_IN_BLOCK } in;
    bool line_start; /* `at` is at the start of a line */
    jn_token queued; /* a tag's start, when the text before it came out first */
    bool has_queued;
    char closers[JN_MAX_BRACKETS]; /* what closes the open brackets */
    int n_open;
} jn_lexer;

/* src has newlines as \n only and outlives the lexer. */
void jn_lex_init(jn_lexer *lx, const char *src, size_t n);
jn_token jn_lex_next(jn_lexer *lx);

#endif
