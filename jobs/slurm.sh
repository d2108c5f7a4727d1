#!/bin/bash
# slurm.sh - one job over an array of Slurm tasks: every task runs one shard, the last step merges.
#
#   id=$(sbatch --parsable slurm.sh)
#   sbatch --dependency=afterok:$id slurm-merge.sh
#
# Change the number of shards here only: --array=1-N; batchgen reads it from Slurm (--shard auto).
# Two minutes before the time limit Slurm sends SIGTERM: batchgen lets running records finish
# (--grace), commits and exits 75, and the task goes back into the queue and on from there, as often
# as it takes. The same after a preemption, or when a node dies (--requeue).
#
# One shard again, alone:  BATCHGEN_SHARD_COUNT=4 sbatch --array=3 slurm.sh
#
# GPUs: sbatch --gres=gpu:1 slurm.sh, one for each shard. A model that takes the eight of a node, as GLM-5 does:
# sbatch --array=1 --gres=gpu:8 --mem=0 slurm.sh, with "tensor_parallel_size": 8 in the job file.

#SBATCH --job-name=batchgen
#SBATCH --array=1-4
#SBATCH --cpus-per-task=16
#SBATCH --mem=32G
#SBATCH --time=08:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=batchgen-%A_%a.log

batchgen run --job "${BATCHGEN_JOB:-job.json}" --shard auto -o 'answers-{shard}of{shards}.jsonl.lz4' \
    --threads "${SLURM_CPUS_PER_TASK:-0}" --grace 60 --wait 5m &
pid=$!
trap 'told=1; kill -TERM "$pid"' TERM USR1

# A trapped signal ends `wait`, not batchgen: then wait again for its own status.
told=1
while [ "$told" = 1 ]; do
    told=0
    wait "$pid"
    status=$?
done

case $status in
0 | 1) # done; with 1 some records have error results
    exit 0 ;;
75) # records are left
    scontrol requeue "$SLURM_JOB_ID" && exit 75 ;;
69 | 70 | 74 | 13[0-9]) # a worker, memory or a disk failed, or something killed it
    [ "${SLURM_RESTART_COUNT:-0}" -lt 10 ] && scontrol requeue "$SLURM_JOB_ID" ;;
esac
exit "$status"
