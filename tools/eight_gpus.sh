#!/bin/sh
# eight_gpus.sh [BUILD [PART...]] - what only several GPUs can show, with 2, 4 or 8 of them; one table at the end.
# Exit 1: a part failed, sums are wrong, or results differ that must not.
#
#     tools/eight_gpus.sh build                  all parts: 215 s with two H200s
#     tools/eight_gpus.sh build sums glm5        these: as each fits into a few minutes
#
# Parts: sums   all-reduces right and how long, by size, way and number of GPUs (build/tests/gpu/test_comm)
#        glm5   GLM-5's shapes and random weights at TP = all GPUs (fewer layers where it does not fit):
#               start, memory, decode steps by batch and context, graph and eager, profile; a job
#        slice  a few layers of its widths, real file: TP 1, 2, 4, 8 give the same tokens (in float32; in native mode
#               how many), eager and graphs the same bytes
#        llama  Llama-3.1-8B's shape: one job with --dp 1, 2, 4, 8 and --tp N; the coordinator's share
#        kill   a rank of a TP job and a replica of a DP job killed half-way: the same bytes
#
# Variables: WORK   folder for models and outputs (a new one in TMPDIR, removed at the end)
#            GPUS   how many to use (all)      LOG  where everything is written in full (WORK/log)
#            RANKS  more than GPUs: they share them, with smaller models and jobs; a rehearsal, whose times mean nothing;
#                   with GPUS=0 on the CPU with tiny models, which is how the tests run it
# It needs make all gpu-tests, python3, nvidia-smi, and disk for the models: some 12 GB.
set -eu
build=${1:-build}
[ $# -gt 0 ] && shift
BUILD=$build exec python3 "$(dirname "$0")/eight_gpus.py" "$@"
