/* job/shard.h - which part of the input this process takes: --shard.
 *
 * Shard I of N (I from 1) has the records r with r % N == I - 1. "auto" asks the environment that a
 * scheduler gives to the tasks of an array, the first of
 *
 *     BATCHGEN_SHARD_INDEX             1 to BATCHGEN_SHARD_COUNT
 *     SLURM_ARRAY_TASK_ID              from _MIN in steps of _STEP, _COUNT of them (sbatch --array)
 *     JOB_COMPLETION_INDEX             0 to JOB_COMPLETIONS - 1 (Kubernetes Indexed Job; the
 * manifest must set JOB_COMPLETIONS, or BATCHGEN_SHARD_COUNT) PBS_ARRAY_INDEX, PBS_ARRAYID     1 to
 * BATCHGEN_SHARD_COUNT (PBS, Torque) SGE_TASK_ID                      from SGE_TASK_FIRST to _LAST
 * in steps of _STEPSIZE
 *
 * BATCHGEN_SHARD_COUNT comes before what a scheduler says of its array, whose tasks are then 1 to
 * that (Kubernetes: from 0): so that one task can be submitted again alone and stays what it was.
 */
#ifndef BG_JOB_SHARD_H
#define BG_JOB_SHARD_H

#include <stdint.h>

#include "base/error.h"

/* text: "I/N", "auto", or NULL for no shards, which gives 0 and 0. *index is I - 1. env is
 * NULL-terminated, as environ. BG_ARG: malformed, out of range, or auto without an array; the text
 * names the variables and the remedy. */
bg_status bg_shard_resolve(const char *text, char *const *env, int64_t *index, int64_t *count,
                           bg_error *err);

#endif
