/* output/output.h - results to lines, lines to frames, commits, recovery.
 *
 *     out.jsonl.lz4          LZ4 frames one after another, each whole JSON lines and nothing else;
 * only appended out.jsonl.lz4.journal  append-only: the job's identity, then one checksummed entry
 * a commit
 *
 * The journal is text, one entry a line: a JSON object, a space, 16 hex digits of the XXH3-64 of
 * the object's bytes, LF. Entries: {"batchgen":1,"identity":{...}} first; {"run":{pid,host,start}}
 * at each start; {"commit":{n, offset, bytes, hash, records:"0-63,70", failed, input:{end,hash},
 * partial:[...], ...}};
 * {"end":{...}}. Order on disk: frame, fdatasync, entry, fdatasync. output.c's head comment has
 * every byte. A plain .jsonl output has the same journal; a commit names a run of bytes instead of
 * a frame. Standard output ("-") has no journal and cannot resume. */
#ifndef BG_OUTPUT_OUTPUT_H
#define BG_OUTPUT_OUTPUT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <jansson.h>

#include "base/buf.h"
#include "base/error.h"

/* ---- result lines
 * ---------------------------------------------------------------------------------- */

typedef struct bg_top_text { /* one alternative of a position */
    const char *text;        /* the token's bytes, may be invalid UTF-8 */
    size_t n;
    int32_t token;
    float logprob;
} bg_top_text;

typedef struct bg_token_info {
    bg_top_text chosen;
    const bg_top_text *top;
    int n_top;
} bg_token_info;

typedef struct bg_choice {
    int index;
    const char *text; /* valid UTF-8 */
    size_t n_text;
    const char *finish_reason;   /* "stop" or "length" */
    const char *stop_text;       /* the stop string that ended it, or NULL */
    int32_t stop_id;             /* the request's own stop id that ended it, or -1 */
    const bg_token_info *tokens; /* NULL: no logprobs asked for */
    int n_tokens;
} bg_choice;

typedef struct bg_result {
    int64_t record, line;
    int file;
    const char *file_name; /* NULL when the job has one input: then no "file" is written */
    bool openai;
    bool chat;
    const char *id;    /* JSON text, or NULL */
    const char *model; /* what "model" says */
    const char *fingerprint;
    const bg_choice *choices;
    int n_choices;
    int64_t prompt_tokens, completion_tokens;
    const char *error_code; /* not NULL: an error result; choices are ignored */
    const char *error_message, *error_param;
} bg_result;

/* Appends the line, LF included, to out (whose .failed tells of missing memory). Nothing in it
 * depends on time, on batch mates or on what the prefix cache held, so that equal jobs give equal
 * bytes: created is 0, ids are made of the record number. -inf and NaN logprobs are written as
 * -9999.0. schemas/result.schema.json. */
void bg_result_line(const bg_result *r, bg_buf *out);

/* ---- sets of record numbers
 * -------------------------------------------------------------------------- */

typedef struct bg_ranges
    bg_ranges; /* of int64, kept as sorted ranges: small when nearly contiguous */
bg_ranges *bg_ranges_new(void);
void bg_ranges_free(bg_ranges *s);
bool bg_ranges_add(bg_ranges *s, int64_t first, int64_t last); /* inclusive; false: no memory */
bool bg_ranges_has(const bg_ranges *s, int64_t v);
int64_t bg_ranges_count(const bg_ranges *s);
int64_t bg_ranges_prefix(const bg_ranges *s);          /* the smallest v >= 0 not in the set */
bool bg_ranges_print(const bg_ranges *s, bg_buf *out); /* "0-63,70" */
bool bg_ranges_parse(bg_ranges *s, const char *text,
                     size_t n); /* adds; false: malformed or no memory */

/* ---- the output file
 * --------------------------------------------------------------------------------- */

typedef enum bg_out_format { BG_OUT_LZ4, BG_OUT_PLAIN } bg_out_format;

/* Tokens that a sequence in flight has so far: what lets a long generation go on after a crash. */
typedef struct bg_partial {
    int64_t record;
    int choice;
    int32_t *tokens; /* all so far */
    int n_tokens;
} bg_partial;

typedef struct bg_writer_config {
    const char *path; /* "-": standard output, no journal */
    bg_out_format format;
    const json_t *identity; /* flat object of strings, integers and reals: everything that must
                               match to resume */
    bool overwrite;         /* start anew whatever is there */
    size_t commit_bytes;    /* 0: 512 KiB of text */
    int64_t commit_ns;      /* 0: 5 s */
    int level;              /* LZ4 level; 0: fast */
} bg_writer_config;

typedef struct bg_writer bg_writer;

typedef struct bg_recovered {
    bool resumed;                /* an unfinished output of this job was there */
    bool finished;               /* a finished one: nothing to do */
    int64_t n_records, n_failed; /* committed so far */
    uint64_t cut_bytes;          /* uncommitted tail that was cut off */
    uint64_t input_end,
        input_hash;       /* all input up to input_end bytes was consumed with this hash; 0: none */
    bg_partial *partials; /* owned by the writer */
    int n_partials;
} bg_recovered;

/* Takes the lock (flock on the output), recovers what is there, or creates it and its directory
 * entry durably. BG_BUSY: another run holds it. BG_ARG: it is another job's output; the text names
 * each difference and the remedy, and nothing was touched. BG_FORMAT: not an output of ours, or
 * damaged in its committed part. BG_IO. */
bg_status bg_writer_open(bg_writer **w, const bg_writer_config *c, bg_recovered *rec,
                         bg_error *err);
/* Releases everything without committing what was not. */
void bg_writer_close(bg_writer *w);
bool bg_writer_done(const bg_writer *w,
                    int64_t record); /* committed or added: must not run again */
int64_t bg_writer_count(const bg_writer *w, int64_t *n_failed); /* records committed or added */
/* Adds the line(s) of one record. It is durable after the next commit. Commits when enough has come
 * together. After a failure every later call fails the same way; nothing is retried. */
bg_status bg_writer_add(bg_writer *w, int64_t record, const char *line, size_t n, bool failed,
                        bg_error *err);
/* Commits if the time has come and anything is pending; call it now and then. */
bg_status bg_writer_tick(bg_writer *w, bg_error *err);
/* Called by commit to learn what is in flight; may be NULL. Pointers stay the callback's; *n of
 * them. */
void bg_writer_on_partials(bg_writer *w, const bg_partial *(*get)(void *ctx, int *n), void *ctx);
/* What the input position is: every line up to `end` bytes has been read; goes into the next
 * commit. */
void bg_writer_input(bg_writer *w, uint64_t end, uint64_t hash);
bg_status bg_writer_commit(bg_writer *w, bg_error *err); /* now; nothing pending is a no-op */
/* Commits, and writes the end entry: the job is complete. */
bg_status bg_writer_finish(bg_writer *w, bg_error *err);
void bg_writer_sizes(const bg_writer *w, uint64_t *text_bytes, uint64_t *file_bytes,
                     uint64_t *commits);

#endif
