/* output/merge.h - the finished outputs of a job's shards as the output of the whole job. */
#ifndef BG_OUTPUT_MERGE_H
#define BG_OUTPUT_MERGE_H

#include <stdint.h>

#include "base/error.h"

typedef struct bg_merged {
    int n_shards;
    int64_t n_records, n_failed;
    int64_t n_from_errors; /* of them, results that lay in the shards' error files */
    uint64_t bytes, text_bytes;
} bg_merged;

/* Writes `out`, which must not be there, with all results in the order of their records and a
 * journal as the whole job would have it; both appear when they are complete. Results in error
 * files are put in their places in `out`.
 *
 * BG_ARG: not all shards of one job; the text names what differs, is missing or is there twice.
 * BG_BUSY: a shard is not finished. BG_FORMAT: a shard is damaged, or its results are not the ones
 * that its journal tells of. BG_IO, BG_NOMEM. Nothing is left of `out` then. */
bg_status bg_merge(const char *const *paths, int n_paths, const char *out, bg_merged *m,
                   bg_error *err);

#endif
