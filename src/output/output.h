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
 * a frame. Standard output ("-") has no journal and cannot resume.
 *
 * With an error file, error results go there instead; one commit covers both files. */
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

enum { BG_PROBS_TOP = 20 };

/* Tokens that a sequence in flight has so far: what lets a long generation go on after a crash. */
typedef struct bg_probs { /* what a record that asks for logprobs has beside each token */
    float logprob;        /* of the token; finite, or -inf */
    int32_t n_top;
    struct {
        int32_t token;
        float logprob;
    } top[BG_PROBS_TOP];
} bg_probs;

typedef struct bg_partial {
    int64_t record;
    int choice;
    int32_t *tokens; /* all so far */
    int n_tokens;
    bg_probs *probs; /* n_tokens of them; NULL: not asked for */
} bg_partial;

/* A result's key: what it answers, for --on-input-change=match. The upper half is a hash of the id,
 * the lower one of the content; without an id all of it is of the content. 0: not known. */
uint64_t bg_result_key(const char *id, uint64_t content_hash);

typedef struct bg_done { /* a record's result, to the writer */
    int64_t record;
    uint64_t key;
    bool failed;
    int64_t prompt_tokens, output_tokens; /* for counts only */
} bg_done;

typedef struct bg_input_place { /* how far the input is read */
    uint64_t end, hash;         /* decompressed bytes up to here, and their running hash */
    uint64_t read, total;       /* bytes as stored, for estimates; total 0: unknown */
    int64_t records;            /* records up to here */
} bg_input_place;

/* ---- the lock
 * -----------------------------------------------------------------------------------------------
 */

typedef struct bg_out_lock bg_out_lock;

/* Opens the output (creating it, 0666 & umask) and takes its lock (flock), so that a second start
 * ends before it has read a model. Waits up to wait_ns for another holder, asking stop(ctx) (may be
 * NULL) several times a second; 0: does not wait. Never follows, or writes through, a symbolic link
 * or file of another owner in a sticky world-writable folder, nor a link that dangles. BG_BUSY:
 * another run holds it (the text says who), or stopped. BG_ARG: not a regular file. BG_IO. */
bg_status bg_out_lock_take(bg_out_lock **lock, const char *path, int64_t wait_ns,
                           bool (*stop)(void *), void *ctx, bg_error *err);
/* Gives it back; an output that the lock made and nobody wrote to is removed again. NULL is
 * allowed. */
void bg_out_lock_free(bg_out_lock *lock);

typedef struct bg_writer_config {
    const char *path;       /* "-": standard output, no journal */
    const char *error_path; /* error results go there; NULL: into the output. Its format: by name */
    bg_out_format format;
    const json_t *identity; /* flat object of strings, integers and reals: everything that must
                               match to resume */
    int64_t started_s;      /* when the job began, for whoever asks the journal; bg_out_first() */
    const char *may_differ; /* a name in identity whose difference is told, not refused; or NULL */
    const char *selection; /* which part of the input is wanted ("" or NULL: all). A finished output
                              of another selection is unfinished */
    bg_out_lock *take_lock; /* NULL: taken here, without waiting */
    bool overwrite;         /* start anew whatever is there */
    bool ordered;           /* bg_writer_finish() sorts by record */
    size_t commit_bytes;    /* 0: 512 KiB of text */
    int64_t commit_ns;      /* 0: 5 s */
    int level;              /* LZ4 level; 0: fast */
    uint64_t fold_bytes;    /* fold the journal when it has grown by this much; 0: 64 MiB */
} bg_writer_config;

/* What the journal of an output says of its job: its identity (the caller's to decref; NULL: there
 * is no journal, or it does not know) and started_s (0: not known). For what must stay as it was
 * when the job began. BG_IO, BG_NOMEM. */
bg_status bg_out_first(const char *path, json_t **identity, int64_t *started_s, bg_error *err);

typedef struct bg_writer bg_writer;

typedef struct bg_recovered {
    bool resumed;                /* an unfinished output of this job was there */
    bool finished;               /* a finished one: nothing to do */
    bool differs;                /* identity's may_differ is another one: bg_writer_rewrite() it */
    bool adopted;                /* the journal was rebuilt by repair and knows no identity */
    int64_t n_records, n_failed; /* committed so far */
    uint64_t n_commits;          /* 0: neither results nor tokens are there to be lost */
    uint64_t cut_bytes;          /* uncommitted tail, to be cut off */
    int64_t lost;                /* results that were committed and are not in the file any more */
    uint64_t input_end,
        input_hash;       /* all input up to input_end bytes was consumed with this hash; 0: none */
    bg_partial *partials; /* owned by the writer */
    int n_partials;
} bg_recovered;

/* Takes the lock (flock on the output), recovers what is there, or creates it and its directory
 * entry durably. BG_BUSY: another run holds it. BG_ARG: it is another job's output; the text names
 * each difference and the remedy, and nothing was touched. BG_FORMAT: not an output of ours, or
 * damaged in its committed part. BG_IO. take_lock is the writer's in every case. */
bg_status bg_writer_open(bg_writer **w, const bg_writer_config *c, bg_recovered *rec,
                         bg_error *err);
/* Starts writing: makes or empties the files, or cuts what was not committed, and notes the run in
 * the journal. bg_writer_open() only reads, so that a job whose input turns out to be another one
 * leaves every byte as it was. Called once, before the first add and after any bg_writer_rewrite();
 * not for a finished output. BG_IO, BG_NOMEM. */
bg_status bg_writer_begin(bg_writer *w, bg_error *err);
/* Releases everything without committing what was not. */
void bg_writer_close(bg_writer *w);
bool bg_writer_done(const bg_writer *w,
                    int64_t record); /* committed or added: must not run again */
int64_t bg_writer_count(const bg_writer *w, int64_t *n_failed); /* records committed or added */
/* The key of a committed record; 0: not known. */
uint64_t bg_writer_key(const bg_writer *w, int64_t record);

/* What becomes of a committed result. */
typedef struct bg_rewrite {
    /* False: it is taken out. *record, *line and *file_name (of a job with several inputs) are what
     * the result says; other values renumber it. NULL: all stay. */
    bool (*keep)(void *ctx, const bg_done *old, int64_t *record, int64_t *line,
                 const char **file_name);
    void *ctx;
    bool sort;                /* by record */
    bool same_input;          /* records are what they were: partial tokens stay, with keep too */
    const char *dropped_path; /* successful results taken out are appended to it; NULL: are gone */
} bg_rewrite;

/* Replaces output, error file and journal by what `how` leaves of them, with the config's identity:
 * all or nothing, also in a crash. With keep, partial tokens are forgotten unless same_input. Call
 * it before the first add. BG_IO, BG_FORMAT, BG_NOMEM: the old ones are untouched. */
bg_status bg_writer_rewrite(bg_writer *w, const bg_rewrite *how, int64_t *n_kept,
                            int64_t *n_dropped, bg_error *err);

/* Adds the line(s) of one record. It is durable after the next commit. Commits when enough has come
 * together. After a failure every later call fails the same way; nothing is retried. */
bg_status bg_writer_add(bg_writer *w, const bg_done *what, const char *line, size_t n,
                        bg_error *err);
/* Commits if the time has come and anything is pending; call it now and then. */
bg_status bg_writer_tick(bg_writer *w, bg_error *err);
/* Called by commit to learn what is in flight; may be NULL. Pointers stay the callback's; *n of
 * them. */
void bg_writer_on_partials(bg_writer *w, const bg_partial *(*get)(void *ctx, int *n), void *ctx);
/* How far the input is read; goes into the next commit. */
void bg_writer_input(bg_writer *w, const bg_input_place *place);
bg_status bg_writer_commit(bg_writer *w, bg_error *err); /* now; nothing pending is a no-op */
/* Commits, and writes the end entry: the job is complete. */
bg_status bg_writer_finish(bg_writer *w, bg_error *err);
void bg_writer_sizes(const bg_writer *w, uint64_t *text_bytes, uint64_t *file_bytes,
                     uint64_t *commits);
/* Time spent in commits; *cpu_ns: of it computing (compression, hashes), the rest waits for the
 * disk, which the engine does not. */
int64_t bg_writer_commit_ns(const bg_writer *w, int64_t *cpu_ns);
/* Called after each commit, from the committing thread; may be NULL. */
void bg_writer_on_commit(bg_writer *w, void (*done)(void *ctx), void *ctx);

#endif
