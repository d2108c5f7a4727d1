#!/bin/sh
# eight_gpus.sh BUILD/eight_gpus - its rehearsal without a GPU: several ranks give one rank's texts (in float32, but for
# ties), and a job loses and changes nothing when a rank or a replica is killed half-way; and it says so if not.
set -eu
build=$(dirname "$1")
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
fail() { echo "eight_gpus.sh: $*" >&2; cat "$dir/said"; cat "$dir/log" 2>/dev/null; exit 1; }

GPUS=0 RANKS=4 WORK=$dir tools/eight_gpus.sh "$build" slice kill >"$dir/said" 2>&1 || fail "exit status"
[ "$(grep -c '^kill .*byte-identical' "$dir/said")" = 2 ] || fail "two kills"
[ "$(grep -c '^slice .*in float32 .*equal' "$dir/said")" = 3 ] || fail "three numbers of ranks"
GPUS=0 RANKS=4 WORK=$dir tools/eight_gpus.sh "$build" sums >"$dir/said" 2>&1 && fail "sums without a GPU"
GPUS=0 RANKS=2 WORK=$dir tools/eight_gpus.sh "$dir/nothing" kill >"$dir/said" 2>&1 && fail "no build, and no failure"
exit 0
