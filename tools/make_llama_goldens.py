#!/usr/bin/env python3
"""Makes golden files of real models with llama-cpp-python: what tests/unit/model/test_real.c compares with.

    pip install llama-cpp-python
    tools/make_llama_goldens.py -o tests/golden/real smollm2-135m-q4_1.gguf gemma3-270m-q4_k_m.gguf

For each model one JSON file, named like the model:

    model, bytes, sha256, engine
    prompts  a dozen: text, ids; and for each arithmetic (below) 64 greedy ids and, for each of them,
             the 5 best [id, log-probability] before it was chosen
    text     one text of some 500 tokens: ids; for each arithmetic the log-probability of every token
             but the first, given those before it, and the 8 best of each position
    chat     messages, the model's template rendered for them, and its ids

Arithmetic "native" is llama.cpp on the file as it is: it rounds activations to 8 bits. "exact" is
llama.cpp on the same weights written out as float32 (a temporary file of 4 bytes a parameter).
Always: keys and values in float32, no flash attention, special tokens of prompts as the vocabulary says.
"""
import argparse
import ctypes
import hashlib
import json
import os
import sys
import tempfile

import llama_cpp
import numpy as np
from llama_cpp import llama_chat_format

N_GREEDY = 64

PROMPTS = [
    ("short", "The capital of France is"),
    ("one_word", "Once"),
    ("list", "Shopping list:\n- milk\n- eggs\n-"),
    ("question", "Q: Why is the sky blue?\nA:"),
    ("code_c", "#include <stdio.h>\n\n/* Prints the first n squares. */\nvoid squares(int n)\n{\n    for (int i = 0;"),
    ("code_python", "def is_prime(n):\n    \"\"\"True if n is a prime number.\"\"\"\n    if n < 2:\n        return"),
    ("json", "{\"name\": \"Ada\", \"born\": 1815, \"languages\": [\"English\", \"French\"], \"city\":"),
    ("german", "Der Zug nach München hatte vierzig Minuten Verspätung, und auf dem Bahnsteig"),
    ("japanese", "昔々、あるところに、おじいさんとおばあさんが"),
    ("russian", "Зимой в деревне рано темнеет, и тогда"),
    ("numbers", "2, 4, 8, 16, 32, 64,"),
    ("long", None),  # the first half of TEXT
]

TEXT = """The lighthouse at the end of the bay was built by people who did not expect to see it finished. They cut the
stone in a quarry forty miles inland, loaded it on flat carts, and brought it down to the water one block at a time. Each
block had a number painted on its side, and each number stood for a place in the tower that nobody had yet seen. When the
wind was wrong the carts waited, sometimes for weeks, and the drivers played cards in the lee of the wheels.

The man who drew the plans was called Harrow. He had built two bridges and a courthouse, and he disliked the sea. Every
evening he walked out along the rocks with a notebook and wrote down how high the water had come. After three years he
knew the place better than the fishermen did, and after five they began to ask him when it would be safe to go out. He
never gave them a direct answer. He would look at the sky, then at the notebook, and say that on the whole he would rather
mend nets today.

There were accidents. A crane fell in the second winter and broke the legs of a boy named Peter Lund, who was then taught to
keep the accounts because he could no longer climb. He turned out to have a gift for it. He found that the company was
paying twice for lamp oil, and that one of the carts which brought the stone did not exist at all: somebody had been drawing
wages for a driver, two horses and a new axle every spring. Nobody was ever charged. But the following year the tower rose
eleven courses instead of six, and people noticed.

When the lamp was lit for the first time, it could be seen from nineteen miles away. Harrow watched it from the hill behind
the village with his collar turned up. Somebody asked him if he was proud. "It is 112 feet high," he said, "and it will
need a new roof in 1890." He was right about that, as it happens, although by then the lamp burned gas, the boy with the
broken legs was director of the company, and nobody remembered why every stone in the wall had a number on the side that
faced the dark.
"""

MESSAGES = [
    {"role": "user", "content": "Name three rivers in Europe."},
    {"role": "assistant", "content": "The Danube, the Rhine and the Loire."},
    {"role": "user", "content": "Which one is the longest?"},
]


def sha256(path):
    h = hashlib.sha256()
    with open(path, "rb") as f:
        for part in iter(lambda: f.read(1 << 20), b""):
            h.update(part)
    return h.hexdigest()


def write_f32(path, out):
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = 0  # all float32
    params.allow_requantize = True
    params.nthread = os.cpu_count()
    if llama_cpp.llama_model_quantize(path.encode(), out.encode(), ctypes.byref(params)) != 0:
        sys.exit(f"{path}: cannot be written as float32")


def load(path):
    return llama_cpp.Llama(path, n_ctx=1024, n_batch=1024, n_ubatch=512, n_threads=os.cpu_count(), logits_all=True,
                           flash_attn=False, type_k=0, type_v=0, n_gpu_layers=0, verbose=False)


def log_softmax(row):
    row = row.astype(np.float64)
    m = row.max()
    return row - m - np.log(np.exp(row - m).sum())


def best(logp, n):
    ids = np.argpartition(-logp, n)[:n]
    ids = sorted(ids.tolist(), key=lambda i: (-logp[i], i))
    return [[i, round(float(logp[i]), 5)] for i in ids]


def greedy(llm, ids):
    out, top = [], []
    llm.reset()
    llm.eval(ids)
    for _ in range(N_GREEDY):
        row = np.array(llm.scores[llm.n_tokens - 1])
        out.append(int(row.argmax()))
        top.append(best(log_softmax(row), 5))
        llm.eval([out[-1]])
    return {"ids": out, "top": top}


def score(llm, ids):
    logprob, top = [], []
    llm.reset()
    llm.eval(ids)
    for i in range(len(ids) - 1):
        logp = log_softmax(np.array(llm.scores[i]))
        logprob.append(round(float(logp[ids[i + 1]]), 5))
        top.append(best(logp, 8))
    return {"logprob": logprob, "top": top}


def piece(llm, token):
    return llm.detokenize([token], special=True).decode("utf-8", "replace") if token >= 0 else ""


def chat(llm):
    template = llm.metadata.get("tokenizer.chat_template")
    if not template:
        return None
    text = llama_chat_format.Jinja2ChatFormatter(
        template=template, eos_token=piece(llm, llm.token_eos()), bos_token=piece(llm, llm.token_bos()),
        add_generation_prompt=True)(messages=MESSAGES).prompt
    return {"messages": MESSAGES, "text": text,
            "ids": llm.tokenize(text.encode(), add_bos=False, special=True)}


def make(path, folder):
    golden = {"model": os.path.basename(path), "bytes": os.path.getsize(path), "sha256": sha256(path),
              "engine": f"llama-cpp-python {llama_cpp.__version__}",
              "options": "K and V float32, no flash attention, whole prompt in one batch, then token by token"}
    with tempfile.TemporaryDirectory(dir=folder) as tmp:
        f32 = os.path.join(tmp, "f32.gguf")
        write_f32(path, f32)
        for arith, file in (("native", path), ("exact", f32)):
            llm = load(file)
            if arith == "native":
                golden["n_vocab"] = llm.n_vocab()
                golden["chat"] = chat(llm)
                golden["prompts"] = [{"name": name, "text": text or TEXT[:len(TEXT) // 2]} for name, text in PROMPTS]
                golden["text"] = {"text": TEXT}
                for p in golden["prompts"] + [golden["text"]]:
                    p["ids"] = llm.tokenize(p["text"].encode(), add_bos=True, special=False)
            for p in golden["prompts"]:
                print(f"{golden['model']} {arith} {p['name']}", file=sys.stderr)
                p[arith] = greedy(llm, p["ids"])
            golden["text"][arith] = score(llm, golden["text"]["ids"])
            llm.close()
    out = os.path.join(folder, os.path.splitext(golden["model"])[0] + ".json")
    with open(out, "w", encoding="utf-8") as f:
        json.dump(golden, f, ensure_ascii=False, separators=(",", ":"))
        f.write("\n")
    print(out)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("-o", "--output", required=True, help="folder for the golden files")
    p.add_argument("models", nargs="+", help="GGUF files")
    args = p.parse_args()
    os.makedirs(args.output, exist_ok=True)
    for path in args.models:
        make(path, args.output)


if __name__ == "__main__":
    main()
