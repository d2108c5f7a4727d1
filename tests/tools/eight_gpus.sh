#!/bin/sh
# eight_gpus.sh BUILD/eight_gpus - its rehearsal without a GPU: several ranks give one rank's texts (in float32, but for
# ties), graphs and eager the same, and a job loses and changes nothing when a rank or a replica is killed half-way.
set -eu
build=$(dirname "$1")
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
GPUS=0 RANKS=4 WORK=$dir tools/eight_gpus.sh "$build" slice kill >"$dir/said" 2>&1 || { cat "$dir/said" "$dir/log"; exit 1; }
cat "$dir/said"
[ "$(grep -c '^kill .*byte-identical' "$dir/said")" = 2 ]
[ "$(grep -cE '^slice .*in float32 *(9.|100)% equal' "$dir/said")" = 3 ]
[ "$(grep -c '^slice .*eager and graphs *equal' "$dir/said")" = 3 ]
