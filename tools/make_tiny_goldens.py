#!/usr/bin/env python3
"""Makes golden files of tiny models with llama-cpp-python: what tests/unit/model/test_golden.c compares with.

    pip install llama-cpp-python
    build/mkmodel --preset tiny-glm4 --mix q5_0 -o tiny-glm4.q5_0.gguf
    tools/make_tiny_goldens.py -o tests/golden/models tiny-glm4.q5_0.gguf

For each model NAME.jsonl and NAME.exact.bin, as tests/golden/models/README.md says: llama.cpp on the same weights written
out as float32 (a temporary file), keys and values in float32, no flash attention, one sequence, greedy.
"""
import argparse
import ctypes
import hashlib
import json
import os
import random
import sys
import tempfile

import llama_cpp
import numpy as np

N_PREDICT = 16
LOOP = [17, 411, 93, 540, 205]


def prompts(n_vocab):
    rng = random.Random(7)
    ids = lambda n: [rng.randrange(3, n_vocab - 3) for _ in range(n)]
    return [("one", ids(1)), ("seven", ids(7)), ("all48", ids(48)), ("loop65", LOOP * 13), ("len97", ids(97)), ("len150", ids(150))]


def write_f32(path, out):
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = 0  # all float32
    params.allow_requantize = True
    params.nthread = os.cpu_count()
    if llama_cpp.llama_model_quantize(path.encode(), out.encode(), ctypes.byref(params)) != 0:
        sys.exit(f"{path}: cannot be written as float32")


def log_softmax(row):
    row = row.astype(np.float64)
    m = row.max()
    return row - m - np.log(np.exp(row - m).sum())


def run(llm, name, ids, rows):
    """Greedy; appends the logits that are kept to rows."""
    out = {"arith": "exact", "name": name, "prompt": ids, "n_predict": N_PREDICT, "ids": [], "top": [], "margin": [], "kv": "f32"}
    first, kept = len(ids) - 1, []
    llm.reset()
    llm.eval(ids)
    if name == "all48":
        first, kept = 30, [np.array(r) for r in llm.scores[30:len(ids) - 1]]
    for _ in range(N_PREDICT):
        row = np.array(llm.scores[llm.n_tokens - 1])
        logp = log_softmax(row)
        best = sorted(range(len(row)), key=lambda i: (-logp[i], i))[:5]
        out["ids"].append(int(row.argmax()))
        out["top"].append([[i, float(f"{logp[i]:.9g}")] for i in best])
        out["margin"].append(float(f"{logp[best[0]] - logp[best[1]]:.9g}"))
        kept.append(row)
        llm.eval([out["ids"][-1]])
    keep = {"all48": 20, "len97": 16, "len150": 8, "loop65": 4}.get(name, 1)
    kept = kept[:keep]
    out["logits"] = {"file": None, "row": len(rows), "rows": len(kept), "first_position": first}
    rows.extend(kept)
    return out


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("-o", "--out", required=True)
    p.add_argument("models", nargs="+")
    o = p.parse_args()
    for path in o.models:
        name = os.path.basename(path)[:-len(".gguf")]
        with tempfile.TemporaryDirectory() as tmp:
            f32 = os.path.join(tmp, "f32.gguf")
            write_f32(path, f32)
            llm = llama_cpp.Llama(f32, n_ctx=512, n_batch=512, n_ubatch=512, n_threads=1, logits_all=True, flash_attn=False,
                                  type_k=0, type_v=0, n_gpu_layers=0, verbose=False)
        n_vocab, rows = llm.n_vocab(), []
        lines = [run(llm, n, ids, rows) for n, ids in prompts(n_vocab)]
        np.array(rows, dtype="<f4").tofile(os.path.join(o.out, f"{name}.exact.bin"))
        with open(path, "rb") as f:
            sha = hashlib.sha256(f.read()).hexdigest()
        head = {"kind": "header", "model": f"{name}.gguf", "sha256": sha, "arch": llm.metadata["general.architecture"],
                "n_vocab": n_vocab, "tensor_types": [], "engine": f"llama-cpp-python {llama_cpp.__version__}"}
        with open(os.path.join(o.out, f"{name}.jsonl"), "w") as f:
            f.write(json.dumps(head) + "\n")
            for line in lines:
                line["logits"]["file"] = f"{name}.exact.bin"
                f.write(json.dumps(line) + "\n")
        print(f"{name}: {len(rows)} rows")


if __name__ == "__main__":
    main()
