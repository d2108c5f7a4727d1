/* job/match.h - results of an earlier run, compared with the input as it is now. */
#ifndef BG_JOB_MATCH_H
#define BG_JOB_MATCH_H

#include "job/job.h"

typedef struct bg_matched {
    int64_t kept, moved; /* results; moved: of them under another record number */
    int64_t dropped;     /* their record is gone, was edited, or had failed */
} bg_matched;

/* --on-input-change=match: keeps each successful result whose id and content are in the input (in
 * the job's part of it) and renumbers it; takes the others out of the output. What was a result and
 * has no record any more goes to dropped_path. BG_IO, BG_FORMAT, BG_NOMEM. */
bg_status bg_match_input(const bg_job *job, bg_writer *w, const char *dropped_path, bg_matched *n,
                         bg_error *err);
/* After repair: whether the ids of the output's results are those of the input, line for line.
 * BG_ARG: one is not; the text names it. */
bg_status bg_match_ids(const bg_job *job, const bg_writer *w, bg_error *err);

#endif
