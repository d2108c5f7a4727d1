/* job/progress.h - a bar with ETA on a terminal, a line now and then elsewhere. */
#ifndef BG_JOB_PROGRESS_H
#define BG_JOB_PROGRESS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

typedef struct bg_progress_numbers {
    int64_t done, failed;                 /* results in the output */
    int64_t done_now;                     /* of them by this run */
    int64_t prompt_tokens, output_tokens; /* by this run */
    int running, waiting;
    uint64_t read, total; /* bytes of input; total 0: unknown */
    int64_t records_read;
    double wanted; /* share of the records that the job takes (shards, sample); 0: all */
    int64_t limit; /* records of the input at most; 0: no limit */
    int64_t in_flight;
} bg_progress_numbers;

typedef struct bg_progress bg_progress;

/* tty: redraw one line; else a line every interval_s seconds (0: never). NULL: out of memory. */
bg_progress *bg_progress_new(FILE *out, bool tty, bool color, double interval_s);
void bg_progress_free(bg_progress *p);
/* Shows the state if its time has come (or now, when forced). */
void bg_progress_show(bg_progress *p, const bg_progress_numbers *n, bool force);
void bg_progress_note(bg_progress *p, const char *what,
                      double share); /* "loading the model", 0..1 */
/* Takes the bar off the screen, and lets it come back: around other output. */
void bg_progress_hide(void *p);
void bg_progress_unhide(void *p);

#endif
