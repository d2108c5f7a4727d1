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
# Headers alone begin as the whole files do; the largest model's are small.
"$mk" --preset tiny-v2-lite --legacy-kv-b -o "$dir/a.gguf" >/dev/null
"$mk" --preset tiny-v2-lite --legacy-kv-b --header-only -o "$dir/b.gguf" >/dev/null
size=$(wc -c <"$dir/b.gguf")
[ "$size" -lt 100000 ] || fail "a header of $size bytes"
cmp -n "$size" "$dir/a.gguf" "$dir/b.gguf" || fail "--header-only changes the header"
"$mk" --preset tiny-v2-lite -o "$dir/b.gguf" >/dev/null
cmp -s "$dir/a.gguf" "$dir/b.gguf" && fail "--legacy-kv-b changes nothing"
"$mk" --preset glm-5 --header-only --split-max-tensors 300 -o "$dir/g.gguf" >/dev/null
[ -f "$dir/g-00007-of-00007.gguf" ] || fail "1809 tensors are not seven parts of 300"
"$mk" --preset glm-5 --list | grep -q '^glm-5: 1809 tensors, 753.864 billion' || fail "GLM-5 has other sizes"
"$mk" --arch qwen3 --legacy-kv-b -o "$dir/x.gguf" >/dev/null 2>&1 && fail "--legacy-kv-b was taken by qwen3"
"$mk" --arch llama --heads 7 -o "$dir/x.gguf" >/dev/null 2>&1 && fail "7 heads of 4 KV heads were taken"
"$mk" --arch llama --vocab 300 -o "$dir/x.gguf" >/dev/null 2>&1 && fail "300 tokens were taken"
"$mk" --arch nonsense -o "$dir/x.gguf" >/dev/null 2>&1 && fail "arch nonsense was taken"
echo "mkmodel.sh: ok"
