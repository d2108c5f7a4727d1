#!/bin/sh
# mkmodel.sh MKMODEL - the same command gives the same bytes, whatever the number of threads; another
# seed gives others; every architecture and mix can be made; nonsense is refused.
set -eu
mk=$1
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
fail() { echo "mkmodel.sh: $*" >&2; exit 1; }

for preset in $("$mk" --help | sed -n '/^presets/,/^mixes/p' | tr ' ' '\n' | grep '^tiny-'); do
    "$mk" --preset "$preset" --threads 1 -o "$dir/a.gguf" >/dev/null || fail "$preset"
    "$mk" --preset "$preset" --threads 3 -o "$dir/b.gguf" >/dev/null || fail "$preset"
    cmp "$dir/a.gguf" "$dir/b.gguf" || fail "$preset: the threads change the bytes"
done
for mix in $("$mk" --help | sed -n '/^mixes/,/^tokenizers/p' | grep '^ '); do
    "$mk" --arch qwen3moe --mix "$mix" -o "$dir/b.gguf" >/dev/null || fail "$mix"
done
"$mk" --arch llama --seed 1 -o "$dir/a.gguf" >/dev/null
"$mk" --arch llama --seed 2 -o "$dir/b.gguf" >/dev/null
cmp -s "$dir/a.gguf" "$dir/b.gguf" && fail "the seed changes nothing"
"$mk" --arch llama --split-max-tensors 10 -o "$dir/s.gguf" >/dev/null
[ -f "$dir/s-00004-of-00004.gguf" ] || fail "31 tensors are not four parts of 10"
"$mk" --arch llama --heads 7 -o "$dir/x.gguf" >/dev/null 2>&1 && fail "7 heads of 4 KV heads were taken"
"$mk" --arch llama --vocab 300 -o "$dir/x.gguf" >/dev/null 2>&1 && fail "300 tokens were taken"
"$mk" --arch nonsense -o "$dir/x.gguf" >/dev/null 2>&1 && fail "arch nonsense was taken"
echo "mkmodel.sh: ok"
