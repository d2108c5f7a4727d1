#!/bin/sh
# run.sh BUILD FUZZER... - runs each fuzzer for SECONDS_EACH seconds from its corpus; SEED=n explores otherwise.
set -eu
build=$1
shift
for f; do
    corpus=$build/corpus/$f
    mkdir -p "$corpus" "$build/crashes"
    seeds=tests/fuzz/corpus/${f#fuzz_}
    [ -d "$seeds" ] || seeds=""
    echo "fuzz $f for ${SECONDS_EACH:-60} s"
    # shellcheck disable=SC2086
    "$build/$f" -seed="${SEED:-1}" -max_total_time="${SECONDS_EACH:-60}" -timeout=20 -rss_limit_mb=4096 -print_final_stats=1 \
        -artifact_prefix="$build/crashes/" "$corpus" $seeds >"$build/$f.log" 2>&1 || {
        tail -40 "$build/$f.log"
        echo "fuzz $f: found something; the input is in $build/crashes"
        exit 1
    }
    grep -E 'number_of_executed_units|DONE' "$build/$f.log" | tail -2
done
