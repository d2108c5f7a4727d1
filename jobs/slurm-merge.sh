#!/bin/bash
# slurm-merge.sh - the step after slurm.sh: one output of all shards, in the order of the input.
#
#   sbatch --dependency=afterok:JOBID slurm-merge.sh
#
# merge refuses if a shard is missing, unfinished or of another job: nothing is left out silently.

#SBATCH --job-name=batchgen-merge
#SBATCH --time=01:00:00
#SBATCH --output=batchgen-merge-%j.log

exec batchgen merge answers-*of*.jsonl.lz4 -o answers.jsonl.lz4
