#!/bin/bash
# Failures on a GPU, and ranks that share one: some two minutes on an H200. BUILD names the build folder.
# BATCHGEN_TEST_GPUS: how many GPUs ranks are dealt to (1). BATCHGEN_TEST_FAMILIES: only these models.
# With names as arguments only those cases: tests/gpu/failures.sh sticky hang
set -eu
cd "$(dirname "$0")/../.."
build=${BUILD:-build}
[ -e /dev/nvidiactl ] || [ -e /dev/dxg ] || { echo "SKIP: no GPU"; exit 0; }
[ -e "$build/libbatchgen_cuda.so" ] || { echo "$build/libbatchgen_cuda.so: not there; make it first" >&2; exit 1; }
BUILD=$build exec python3 tests/gpu/failures.py "$@"
