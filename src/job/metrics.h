/* job/metrics.h - numbers of a run in Prometheus' text format, for node_exporter's textfile
 * collector.
 *
 * Every sample carries output="..." (and shard="I/N"), so that the files of several jobs can lie in
 * one folder. The file is replaced as a whole, by rename: a reader never sees half of one. */
#ifndef BG_JOB_METRICS_H
#define BG_JOB_METRICS_H

#include <stdint.h>

#include "base/error.h"

typedef enum bg_run_state {
    BG_RUN_LOADING,
    BG_RUN_RUNNING,
    BG_RUN_STOPPING,
    BG_RUN_COMPLETED, /* every record has its result */
    BG_RUN_STOPPED,   /* records are left */
    BG_RUN_FAILED,
} bg_run_state;

typedef struct bg_metrics {
    const char *version, *model, *output, *shard; /* labels; shard NULL: none */
    bg_run_state state;
    int64_t start_wall_ns, last_commit_wall_ns;  /* 0: none yet, and then left out */
    int64_t records_done, records_failed;        /* results in the output, of earlier runs too */
    int64_t records_in_flight, running, waiting; /* records; sequences */
    /* Of this run: */
    int64_t prompt_tokens, cached_tokens, output_tokens;
    double output_tokens_per_second;
    int64_t commits, text_bytes, file_bytes; /* file_bytes: of the whole output */
    int64_t restarts, preemptions;
    int64_t kv_blocks_used, kv_blocks; /* kv_blocks 0: unknown, both left out */
    double input_share;                /* read so far, 0 to 1; negative or NaN: unknown, left out */
} bg_metrics;

/* Writes path.tmp and renames it to path; never through a link. Not synced: it is of no use after a
 * crash. BG_ARG: path is there and no regular file. BG_IO. BG_NOMEM. */
bg_status bg_metrics_write(const char *path, const bg_metrics *m, bg_error *err);

#endif
