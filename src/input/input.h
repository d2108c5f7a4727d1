/* input/input.h - bytes to lines to requests.
 *
 * A bg_input streams the lines of one or more files (or stdin) whatever their compression, with
 * memory bounded by the longest line allowed. bg_request_parse() turns one line into a request or
 * into an error with a stable code; it is pure, so any number of threads may parse at a time.
 * Formats: OpenAI batch lines (custom_id, method, url, body) and plain lines (prompt or messages,
 * sampling fields beside them); schemas/request.schema.json describes both. */
#ifndef BG_INPUT_INPUT_H
#define BG_INPUT_INPUT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <jansson.h>

#include "base/error.h"

/* ---- lines -------------------------------------------------------------------------------------
 */

typedef struct bg_input bg_input;

typedef struct bg_line {
    int64_t
        record;   /* lines before this one in all inputs, blank ones included: its number, from 0 */
    int64_t line; /* line number in its own file, from 1 */
    int file;     /* which input, from 0 */
    uint64_t offset;  /* of its first byte in the decompressed bytes of its file */
    const char *data; /* without the line end (LF or CR LF) and, at a file's start, without a BOM;
                         valid until the next call; no NUL behind it */
    size_t n;
    bool too_long; /* over the limit: data holds only its first bytes; the rest was skipped */
    uint64_t end;  /* decompressed bytes of all inputs up to and with its line end */
    uint64_t hash; /* running hash of those bytes */
} bg_line;

/* paths[i] may be "-" (stdin). gz, zst and lz4 are told by their first bytes (several members and
 * frames one after another are one stream). Files are opened when their turn comes, but all are
 * checked to exist and to be readable here. max_line: bytes of the longest line. BG_IO, BG_NOMEM.
 */
bg_status bg_input_open(bg_input **in, const char *const *paths, int n_paths, size_t max_line,
                        bg_error *err);
void bg_input_close(bg_input *in);
/* The next line that is not blank. *got false: the end. BG_FORMAT: damaged compression (names the
 * file and offset; lines before it were whole), or a file of UTF-16 or UTF-32. BG_IO. */
bg_status bg_input_next(bg_input *in, bg_line *line, bool *got, bg_error *err);
/* Whether the next line is in memory already, so that bg_input_next() would not wait for it. */
bool bg_input_ready(const bg_input *in);
/* Bytes of the files as stored, and how many of them have been read: for progress. total 0:
 * unknown. */
void bg_input_progress(const bg_input *in, uint64_t *read, uint64_t *total);
int64_t bg_input_records(const bg_input *in); /* lines seen so far, blank ones included */
uint64_t bg_input_hash(const bg_input *in);   /* running hash of all bytes read as lines so far */

/* ---- requests
 * ------------------------------------------------------------------------------------ */

typedef enum bg_api { BG_API_CHAT, BG_API_COMPLETION } bg_api;

/* Generation settings: the job's defaults, then what the record says. */
typedef struct bg_gen {
    double temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty;
    int top_k;      /* 0: off */
    int n;          /* choices */
    int max_tokens; /* 0: the rest of the context */
    int min_tokens;
    int logprobs; /* -1: none; else how many best beside the chosen one */
    bool has_seed;
    uint64_t seed;
    bool ignore_eos, include_stop, show_special;
    bool echo; /* completions: the prompt's text in front of the answer */
} bg_gen;

void bg_gen_defaults(bg_gen *g); /* temperature 1, top_p 1, n 1, the rest off */

typedef struct bg_bias {
    int32_t token;
    float bias;
} bg_bias;

/* One prompt of a completions request: text, or ids when text is NULL. */
typedef struct bg_prompt {
    const char *text;
    size_t n_text;
    int32_t *ids;
    size_t n_ids;
} bg_prompt;

typedef struct bg_request {
    int64_t record, line;
    int file;
    bool openai; /* an OpenAI batch line: answered by one; else plain: answered by a flat line */
    bg_api api;
    char *id;    /* custom_id or id as JSON text (a string with its quotes, or a number); NULL: none
                    given    or unreadable. Strings are compared and echoed character for character */
    char *model; /* body.model, or NULL */
    bg_gen gen;
    json_t *messages; /* BG_API_CHAT: array, not empty, each an object with a string role */
    json_t *tools, *template_kwargs; /* or NULL */
    bool add_generation_prompt;
    bg_prompt *prompts; /* BG_API_COMPLETION: at least one, none empty */
    int n_prompts;
    char **stops; /* none empty */
    int n_stops;
    int32_t *stop_ids;
    int n_stop_ids;
    bg_bias *bias;
    int n_bias;
    uint64_t content_hash; /* of what was asked, the id left out, for pairing by content; of a line
                              that cannot be read: of its bytes. Never 0 */
    json_t *root;          /* what the pointers above point into */
    /* Not NULL: the record cannot run. code is one of the stable codes below; field names the
     * offending one. */
    const char *error_code;
    char *error_message;
    const char *error_param;
} bg_request;

/* Stable codes of bad records: also the values that schemas/result.schema.json lists. */
#define BG_CODE_JSON        "invalid_json" /* not JSON, or not UTF-8: with the byte offset */
#define BG_CODE_LINE_LONG   "line_too_long"
#define BG_CODE_DEEP        "too_deep"      /* nested deeper than the limit: with the byte offset */
#define BG_CODE_FIELD       "invalid_field" /* wrong type or value: names the field */
#define BG_CODE_MISSING     "missing_field"
#define BG_CODE_UNSUPPORTED "unsupported" /* a field we know and cannot honour */
#define BG_CODE_URL         "unsupported_url"
#define BG_CODE_DUPLICATE   "duplicate_id" /* names the first line */
#define BG_CODE_EMPTY       "empty_prompt"
#define BG_CODE_TOO_LONG    "prompt_too_long" /* with both numbers */
#define BG_CODE_TEMPLATE    "template_error"  /* the chat template refused: its own message */
#define BG_CODE_TOKEN       "invalid_token"   /* a token id that the vocabulary does not have */
#define BG_CODE_MODEL       "model_mismatch"  /* --strict-model */
#define BG_CODE_RESULT_LONG "result_too_long" /* --max-result */
#define BG_CODE_INTERNAL    "internal_error"

typedef struct bg_request_limits { /* 0: the default */
    int max_n;                     /* 128 */
    int max_stops;                 /* 64 */
    int max_logprobs;              /* 20 */
    int max_nesting;               /* 64: objects and arrays inside each other, 1,024 at most */
} bg_request_limits;

/* Parses a line into *r (caller's memory; end it with bg_request_release in every case). Bad lines
 * are no failure: r->error_code says why, with id where it could be read. BG_NOMEM only. Settings
 * not given keep `defaults`. Unknown fields are ignored when harmless, and listed by the schema;
 * fields that change what is generated and that we cannot honour (response_format other than text,
 * grammars, guided_*, images, logit processors, best_of > n, suffix, ...) are BG_CODE_UNSUPPORTED.
 * stream is ignored. */
bg_status bg_request_parse(bg_request *r, const bg_line *line, const bg_gen *defaults,
                           const bg_request_limits *limits, bg_error *err);
void bg_request_release(bg_request *r);
/* Makes r an error (frees nothing it holds): for later stages. message is printf-like. */
void bg_request_reject(bg_request *r, const char *code, const char *param, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

/* Remembers ids and finds the second use of one. Memory: about 24 bytes a record (128-bit hashes).
 */
typedef struct bg_id_set bg_id_set;
bg_id_set *bg_id_set_new(void);
void bg_id_set_free(bg_id_set *s);
/* Adds id text; returns 0 when new, else the record number + 1 of its first use; -1: out of memory.
 */
int64_t bg_id_set_add(bg_id_set *s, const char *id, size_t n, int64_t record);

#endif
