/* job/collect.h - from token events to result lines: detokenise, find stop strings, assemble,
 * write.
 *
 * One thread owns the writer and every record in flight. Others talk to it through a queue:
 * the admitting thread announces records, the engine's thread sends token events. */
#ifndef BG_JOB_COLLECT_H
#define BG_JOB_COLLECT_H

#include <stdatomic.h>

#include "job/feed.h"

typedef struct bg_collect bg_collect;

typedef struct bg_collect_config {
    const bg_job *job;
    const bg_text_model *model;
    bg_writer *writer;
    const bg_partial *partials; /* tokens of an earlier run to continue from */
    int n_partials;
    bg_log *log;
    bool ordered; /* write in record order: for standard output, which cannot be sorted later */
    int64_t max_failed;             /* failed records of this run that are borne; -1: any number */
    void (*on_too_many)(void *ctx); /* once, when there are more */
    /* Called once, from the collecting thread, when the output cannot be written any more. */
    void (*on_failure)(void *ctx);
    /* Called when everything announced has been written and bg_collect_end() came, or after a
     * failure. */
    void (*on_finished)(void *ctx);
    void *ctx;
} bg_collect_config;

typedef struct bg_collect_counts { /* of this run; read by any thread */
    atomic_llong records, failed, prompt_tokens, output_tokens, in_flight;
} bg_collect_counts;

/* Failed records of this run by code: "invalid_json 3, prompt_too_long 1". Call after the join. */
void bg_collect_failures(const bg_collect *c, char *out, size_t size);

bg_status bg_collect_new(bg_collect **c, const bg_collect_config *config, bg_error *err);
void bg_collect_free(bg_collect *c); /* ends its thread; what is not written is dropped */
/* The engine cancels go to; set before the first record is announced. */
void bg_collect_set_engine(bg_collect *c, bg_replicas *e);

/* A record enters: its error result is written, or its sequences become specs[0 .. *n_specs) to be
 * submitted by the caller (the array and what it points to live until the record's result is
 * written). takes item. input_end and hash go into the next commit. BG_NOMEM. */
bg_status bg_collect_announce(bg_collect *c, bg_feed_item *take_item, bg_seq_spec **specs,
                              int *n_specs, bg_error *err);
/* The engine's sink. */
void bg_collect_events(void *c, const bg_token_event *events, int n);
/* A submit failed: the sequence of this spec will never run. */
void bg_collect_refused(bg_collect *c, const bg_seq_spec *spec, const char *message);
/* Nothing more will be announced; all_done: then the output is complete and gets its end entry. */
void bg_collect_end(bg_collect *c, bool all_done);
/* Waits for the thread. The writer's failure, if there was one. */
bg_status bg_collect_join(bg_collect *c, bg_error *err);
const bg_collect_counts *bg_collect_get_counts(const bg_collect *c);

#endif
