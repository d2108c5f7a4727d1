/* job/check.h - reading all input without running it. */
#ifndef BG_JOB_CHECK_H
#define BG_JOB_CHECK_H

#include "job/feed.h"

typedef struct bg_check_counts {
    int64_t records, bad, choices;
    int64_t prompt_tokens, longest_prompt; /* only with a model */
    int64_t answer_tokens;                 /* what may be generated at most */
    uint64_t bytes;
} bg_check_counts;

/* Reads every record in order; report (may be NULL) gets the bad ones. model may be NULL. */
bg_status bg_check_input(const bg_job *job, const bg_text_model *model, bg_check_counts *counts,
                         void (*report)(void *ctx, const bg_request *r), void *ctx, bg_error *err);
/* --strict: lists the bad lines on messages; BG_FORMAT if there is one. */
bg_status bg_check_strict(const bg_job *job, const bg_text_model *model, FILE *messages,
                          bg_error *err);
/* "line 12: code: message (param)" */
void bg_check_print(FILE *out, const bg_job *job, const bg_request *r);

#endif
