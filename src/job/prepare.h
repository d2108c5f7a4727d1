/* job/prepare.h - everything before the model's weights: lock, model header, recovery, and what
 * --strict, --retry-failed and --on-input-change ask for.
 *
 * The lock comes first, so that a second start ends at once; nothing is changed on disk before the
 * job is known to be the output's own. */
#ifndef BG_JOB_PREPARE_H
#define BG_JOB_PREPARE_H

#include "job/job.h"

typedef struct bg_prepared {
    bg_text_model model;
    bg_memory_plan plan;
    bg_writer *writer;
    bg_recovered recovered;
    json_t *identity;
    char *selection;
    int64_t wall_s;     /* the time that templates see */
    bool nothing_to_do; /* the output is finished */
} bg_prepared;

/* p starts as {0} and ends with bg_prepared_release() in every case. Messages for people go to
 * `messages` unless the job is quiet. stop(ctx) is asked while waiting for the lock. outcome gets
 * the stage, and all of itself when there is nothing to do. Any status; BG_BUSY with
 * outcome->locked: another run holds the output. */
bg_status bg_prepare(bg_prepared *p, const bg_job *job, FILE *messages, bg_outcome *outcome,
                     bool (*stop)(void *), void *ctx, bg_error *err);
void bg_prepared_release(bg_prepared *p);

#endif
