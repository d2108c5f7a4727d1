/* job/summary.h - what a run says at its end: to a file and --notify as JSON, to people as text. */
#ifndef BG_JOB_SUMMARY_H
#define BG_JOB_SUMMARY_H

#include "job/collect.h"
#include "job/job.h"

typedef struct bg_summary {
    const bg_job *job;
    const bg_text_model *model; /* all zero when it was not read */
    const bg_memory_plan *plan; /* all zero when it was not made */
    const bg_outcome *outcome;
    bg_engine_stats engine;
    const bg_collect_counts *counts; /* NULL: nothing ran */
    const char *failures;            /* by code; "" when there are none */
    uint64_t text_bytes, file_bytes, commits;
    int64_t commit_ns, commit_cpu_ns; /* in commits, which the engine does not wait for */
    int64_t run_ns, total_ns;         /* generating; with loading */
    bg_status status;
    const char *error; /* its text; "" */
} bg_summary;

/* JSON text, the caller's to free; NULL: out of memory. */
char *bg_summary_json(const bg_summary *s);
/* Writes it to path. BG_IO. */
bg_status bg_summary_write(const char *json, const char *path, bg_error *err);
void bg_summary_print(const bg_summary *s, FILE *out);
/* The one line that --quiet prints when records have failed. */
void bg_summary_print_failures(const bg_summary *s, FILE *out);

#endif
