#!/bin/bash
# tests/gpu/sanitize.sh [memcheck|racecheck|initcheck|synccheck...] - every GPU test, whole tiny
# models and a bench under compute-sanitizer; without arguments memcheck, then racecheck.
# `make sanitize` builds what this runs. BUILD: where that lies. KEEP=DIR: the logs stay there.
set -u
cd "$(dirname "$0")/../.." || exit 1
BUILD=${BUILD:-build}
SANITIZER=${SANITIZER:-$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)}
[ -x "$SANITIZER" ] || { echo "compute-sanitizer: not found; it comes with the CUDA toolkit"; exit 1; }
[ -x "$BUILD/one/golden" ] || { echo "$BUILD/one: run make sanitize-tests"; exit 1; }
logs=${KEEP:-$(mktemp -d)}
mkdir -p "$logs"
export GPU_TEST_SMALL=1 BATCHGEN_TEST_GPU=0 BATCHGEN_TEST_GPU_PROBE=here
failing=0

check() { # tool, name, command...
    local tool=$1 name=$2 log rc verdict=ok start=$SECONDS
    shift 2
    log=$logs/$tool.$name
    timeout 300 "$SANITIZER" --tool "$tool" --error-exitcode 99 --print-limit 20 "$@" >"$log" 2>&1
    rc=$?
    # Success is both: the program's own, and the tool's word that it looked and found nothing.
    if [ $rc -ne 0 ] || ! grep -qE 'ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards' "$log"; then
        verdict="FAILED (exit code $rc)"
        failing=1
    fi
    printf '%-9s  %-18s  %4d s  %s\n' "$tool" "$name" $((SECONDS - start)) "$verdict"
    [ "$verdict" = ok ] || grep -vE '^========= *$' "$log" | head -60
}

[ $# -gt 0 ] || set -- memcheck racecheck
# racecheck keeps every access: whole steps by the hundred outlast its time and the host's memory.
too_long() { [ "$1" = racecheck ] && [[ $2 = test_step || $2 = test_moe || $2 = golden ]]; }

for tool; do
    for t in "$BUILD"/one/test_*; do
        [ -x "$t" ] && [ ! -d "$t" ] || continue
        too_long "$tool" "$(basename "$t")" || check "$tool" "$(basename "$t")" "$t" -::bench
    done
    too_long "$tool" golden || check "$tool" golden "$BUILD/one/golden" native half_cache
    check "$tool" bench "$BUILD/one/batchgen" bench -m tests/golden/models/tiny-llama.q2_k.gguf --device cuda \
        --batch 1,5 -p 40 -g 4
    check "$tool" bench_dsa "$BUILD/one/batchgen" bench -m tests/golden/models/tiny-dsa.q8_0.gguf --device cuda \
        --batch 1,3 -p 40 -g 3
done
[ -n "${KEEP:-}" ] || rm -rf "$logs"
exit $failing
