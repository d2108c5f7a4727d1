#!/bin/sh
# demo.sh BATCHGEN - a real job on a real small model, on the CPU.
set -eu
batchgen=$1
model=$(tools/fetch_model.sh)
out=${TMPDIR:-/tmp}/batchgen-demo.$(id -u).jsonl.lz4
echo
echo "\$ batchgen run jobs/demo.jsonl -o $out -m $model --overwrite --temperature 0 --max-tokens 120 --served-model-name smollm2"
"$batchgen" run jobs/demo.jsonl -o "$out" -m "$model" --overwrite --temperature 0 --max-tokens 120 --served-model-name smollm2
echo
echo "\$ lz4 -dc $out | head -12    (shown as text)"
lz4 -dc "$out" | head -12 | python3 -c '
import json, sys
for line in sys.stdin:
    r = json.loads(line)
    if "custom_id" in r:  # an OpenAI batch line
        texts = [c.get("text") or c["message"]["content"] for c in r["response"]["body"]["choices"]]
    else:
        texts = [r["text"]] if "text" in r else [c["text"] for c in r["choices"]]
    print("\n[%s]" % (r.get("custom_id") or r["id"]), " | ".join(t.strip() for t in texts))'
echo
echo "The whole output: lz4 -dc $out"
echo "Run the same command again and it says that there is nothing to do; kill it half-way and it goes on."
