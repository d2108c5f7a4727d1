#!/bin/sh
# bench.sh BUILD - decode and prefill rates of SmolLM2-135M-shaped models of several quantisations, and,
# where PEERS names llama-batched-bench programs (separated by blanks), theirs in the same run:
#
#     PEERS="llama.cpp/build/bin/llama-batched-bench" make bench
#     MODELS="a.gguf b.gguf" make bench        these models instead
#
# Each program runs alone, one after another, with the same prompts (128 tokens) and answers (64).
set -eu
build=$1
threads=${THREADS:-$(nproc)}
dir=$build/bench
mkdir -p "$dir"
models=${MODELS:-}
if [ -z "$models" ]; then
    for mix in q4_1 q4_0 q4_k_m q8_0; do
        f=$dir/smollm2-135m-$mix.gguf
        [ -f "$f" ] || "$build/mkmodel" --preset smollm2-135m --mix $mix -o "$f" >/dev/null
        models="$models $f"
    done
fi
printf '%-34s %-28s %8s %8s %8s %9s\n' model program 'b 1' 'b 8' 'b 32' 'prefill'
for m in $models; do
    m=$(realpath "$m")
    name=$(basename "$m" .gguf)
    "$build/batchgen" bench -m "$m" --threads "$threads" --batch 1,8,32 -p 128 -g 64 --json |
        python3 -c '
import json, sys
r = json.load(sys.stdin)["rows"]
print("%-34s %-28s %8.1f %8.1f %8.1f %9.0f" % (sys.argv[1], "batchgen", *[x["decode_tokens_per_second"] for x in r],
      max(x["prefill_tokens_per_second"] for x in r)))' "$name"
    for p in ${PEERS:-}; do
        (cd "$dir" && "$p" -m "$m" -c 8192 -b 2048 -ub 512 -npp 128 -ntg 64 -npl 1,8,32 -t "$threads" 2>&1) |
            python3 -c '
import sys
d = {}
for line in sys.stdin:
    c = [x.strip() for x in line.split("|")]
    if len(c) > 9 and c[1].isdigit():
        d[int(c[3])] = (float(c[8]), float(c[6]))
print("%-34s %-28s %8.1f %8.1f %8.1f %9.0f" % (sys.argv[1], sys.argv[2], d[1][0], d[8][0], d[32][0],
      max(x[1] for x in d.values())))' "$name" "$(echo "$p" | rev | cut -d/ -f1-5 | rev | cut -c1-28)" || true
    done
done
