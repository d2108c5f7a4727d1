/* job/feed.h - input to requests with token ids, in order, with text threads in between.
 *
 *     reader thread -> ordered map (parse, render, tokenise) -> bg_feed_next()
 *
 * Used by run, check and --strict. Ids are compared in record order, so which use of an id is "the
 * second" never depends on timing. */
#ifndef BG_JOB_FEED_H
#define BG_JOB_FEED_H

#include "job/job.h"

typedef struct bg_feed bg_feed;

typedef struct bg_feed_item {
    bg_request req; /* data released by bg_feed_item_free() unless moved out */
    bg_ids *ids;    /* n_prompts of them; NULL: none (error, done, or no model) */
    int n_prompts;
    bool uses_id;         /* a well-formed request with an id */
    bool done;            /* its result is in the output already: only its id was of interest */
    bool other;           /* not of this shard or sample: only its id is of interest */
    bg_input_place place; /* input up to and with its line */
    char *data;           /* the line, while it is worked on */
    bg_line line;
    bg_status st; /* BG_NOMEM while parsing */
    bg_error err;
} bg_feed_item;

void bg_feed_item_free(bg_feed_item *item);

typedef struct bg_feed_config {
    const bg_job *job;
    const bg_text_model *model; /* NULL: lines are parsed, not tokenised */
    /* Whether a record has its result already; NULL: none has. Called by the reader. */
    bool (*is_done)(void *ctx, int64_t record);
    void *ctx;
    int64_t wall_s; /* the time that templates see; 0: bg_job_wall_s() */
    bg_log *log;
} bg_feed_config;

/* Opens the input and starts the threads. */
bg_status bg_feed_open(bg_feed **f, const bg_feed_config *c, bg_error *err);
/* The next record of the selection, in order; *item is the caller's, NULL at the end or after
 * bg_feed_stop(). A failure of the input (damaged compression, I/O) is returned after the whole
 * lines before it. */
bg_status bg_feed_next(bg_feed *f, bg_feed_item **item, bg_error *err);
void bg_feed_stop(bg_feed *f); /* wakes both sides; bg_feed_next() then says the end */
void bg_feed_close(bg_feed *f);
void bg_feed_progress(bg_feed *f, uint64_t *read, uint64_t *total, int64_t *records);

/* The part of the input that a job wants, in words ("limit=100 sample=0.5"); "" when it is all (a
 * shard is another job, not a selection). *out is the caller's; NULL: out of memory. */
char *bg_job_selection(const bg_job *job);

/* The time that templates see: a day of the input, so that a check renders what a run will. A job
 * that goes on keeps the one it began with, which its journal knows. */
int64_t bg_job_wall_s(const bg_job *job);

#endif
