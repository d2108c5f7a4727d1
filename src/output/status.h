/* output/status.h - how far a job is, by its output and journal alone.
 *
 * The lock is looked for in /proc/locks and never taken. */
#ifndef BG_OUTPUT_STATUS_H
#define BG_OUTPUT_STATUS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "base/error.h"

typedef enum bg_state {
    BG_STATE_MISSING,     /* neither output nor journal */
    BG_STATE_NOT_STARTED, /* an empty output without a journal */
    BG_STATE_RUNNING,
    BG_STATE_REWRITING, /* a run is replacing the output by a changed one */
    BG_STATE_UNFINISHED,
    BG_STATE_FINISHED,
    BG_STATE_NEEDS_REPAIR, /* results, but no journal that can be used */
    BG_STATE_DAMAGED,      /* committed results are not there */
} bg_state;

typedef enum bg_lock_state {
    BG_LOCK_FREE,
    BG_LOCK_HELD,
    BG_LOCK_UNKNOWN, /* nobody here has it, but the last run was on another host */
} bg_lock_state;

typedef struct bg_job_status { /* numbers < 0: not known */
    bg_state state;
    char why[512];  /* what is wrong, or "" */
    char next[512]; /* what to do, or "" */
    bg_lock_state lock;
    int64_t holder; /* its pid; -1: not known */
    bool holder_alive;
    int64_t run_pid; /* of the last start; -1: none */
    char run_host[64], run_start[40];
    bool run_here, run_alive;                  /* on this host; and its process is there */
    bool rebuilt;                              /* by repair: the job is not known */
    int64_t n_runs, n_done, n_failed, n_total; /* n_total: an estimate, unless all input is read */
    int64_t prompt_tokens, output_tokens;
    int64_t partial_sequences, partial_tokens;
    double share; /* of the input */
    uint64_t input_read, input_total;
    double record_rate, token_rate; /* a second, over the present or last run */
    double eta_s;
    int64_t commit_at_ns; /* wall time of the last commit; 0: not known */
    double commit_age_s;
    uint64_t out_bytes, text_bytes, journal_bytes, tail_bytes;
    int64_t error_bytes;
    char shard[48], selection[128];
} bg_job_status;

/* BG_IO, BG_ARG, BG_NOMEM. wall_ns: now. */
bg_status bg_job_status_read(bg_job_status *s, const char *path, int64_t wall_ns, bg_error *err);
const char *bg_state_name(bg_state s); /* as in JSON: "not_started" */
void bg_job_status_print(const bg_job_status *s, const char *path, FILE *out);
/* One line, schemas/status.schema.json. False: no memory. */
bool bg_job_status_json(const bg_job_status *s, const char *path, FILE *out);

#endif
