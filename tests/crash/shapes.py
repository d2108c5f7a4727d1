"""The kinds of jobs that are killed: their inputs, options and files."""
import gzip
import json
import os
import random

from journal import check, require
from processes import start

WORDS = "the sea and a stone under light of morning where nobody had been before".split()


def text(rnd, least, most):
    return " ".join(rnd.choice(WORDS) for _ in range(rnd.randint(least, most)))


def short(n, most=12):
    rnd = random.Random(n)
    return [{"id": f"s{i}", "prompt": text(rnd, 1, 30), "max_tokens": rnd.randint(1, most)} for i in range(n)]


def mixed(n):
    rnd = random.Random(n)
    out = []
    for i in range(n):
        r = {"id": f"m{i}", "prompt": text(rnd, 1, 40), "max_tokens": rnd.randint(1, 60)}
        if i % 3 == 0:
            r["prompt"] = "A common beginning that many records share, long enough to fill blocks: " * 2 + r["prompt"]
        if i % 4 == 1:
            r.update(temperature=0.9, top_p=0.95)
        if i % 5 == 3:
            r["messages"] = [{"role": "user", "content": r.pop("prompt")}]
        out.append(r)
    return out


def long(n, tokens):
    rnd = random.Random(tokens)
    return [{"id": f"l{i}", "prompt": text(rnd, 3, 20), "max_tokens": tokens - 10 * i, "ignore_eos": True,
             **({"temperature": 0.8, "seed": i} if i % 2 else {})} for i in range(n)]


def several(n):
    rnd = random.Random(n)
    return [{"id": f"n{i}", "prompt": text(rnd, 1, 10), "max_tokens": rnd.randint(20, 90), "n": 1 + i % 4,
             "temperature": 1.1, "ignore_eos": i % 2 == 0} for i in range(n)]


def with_errors(n):
    out = mixed(n)
    for i in range(0, n, 5):
        out[i] = ["{not json", {"prompt": 7, "id": f"e{i}"}, {"id": "m1", "prompt": "again"}, {"id": f"f{i}", "messages": []},
                  {"id": f"g{i}", "prompt": "word " * 3000}][i // 5 % 5]
    return out


def openai(n):
    rnd = random.Random(n)
    return [{"custom_id": f"o{i}", "method": "POST", "url": "/v1/chat/completions",
             "body": {"model": "m", "messages": [{"role": "user", "content": text(rnd, 1, 20)}],
                      "max_completion_tokens": rnd.randint(1, 80), "n": 1 + i % 2}} for i in range(n)]


def logprobs(n):
    return [{**r, "logprobs": 2} for r in mixed(n)]


def stops(n):
    return [{**r, "max_tokens": 200, "ignore_eos": True, "stop": ["e", "a"] if i % 2 else ["qu", "zz", "th"]}
            for i, r in enumerate(mixed(n))]


def edited(records):
    """Another first line, one less, another prompt, two swapped, others moved to the end, two more."""
    r = list(records)
    r[10] = {**r[10], "prompt": "something else"}
    r[20], r[21] = r[21], r[20]
    r = r[:30] + r[40:] + r[30:40]
    del r[5]
    return [{"id": "first", "prompt": "new"}] + r + [{"id": "more", "prompt": "new, too", "max_tokens": 9}]


EACH = ["--commit-bytes", 1, "--commit-interval", 0.01]
TINY_POOL = ["--max-model-len", 256, "--kv-cache-memory", "900KiB", "--max-num-seqs", 12]


class Shape:
    """A kind of job. extra: options that a feature needs, which is left out when it is not there."""

    def __init__(self, name, records, *args, out="out.jsonl.lz4", preset="tiny-llama", exact=True, inputs=1,
                 errors=None, needs=None, retry=False, shards=1, grow=4, saves=False, edit=None,
                 gz=False, limit=0):
        self.name, self.records, self.args, self.out, self.preset = name, records, list(args), out, preset
        self.exact = exact      # the tokens of the last run can be counted
        self.inputs, self.errors, self.needs, self.retry, self.shards = inputs, errors, needs, retry, shards
        self.gz = gz            # the input is compressed
        self.limit = limit      # records that are asked for first; then all
        self.edit = edit        # what the input becomes half-way
        self.saves = saves      # so long that most tokens must have been saved at some time
        self.grow = grow        # commits that a run gets at most before it is killed


SHAPES = [
    Shape("many-short", short(600), *EACH),
    Shape("plain-few", mixed(80), *EACH, "--max-num-seqs", 2, out="out.jsonl"),
    Shape("tp2", mixed(120), *EACH, "--tp", 2, "--threads", 2),
    Shape("tp2-plain-long", long(6, 300), *EACH, "--tp", 2, "--threads", 2, out="out.jsonl", grow=8, saves=True),
    Shape("long", long(8, 600), *EACH, "--max-num-seqs", 4, grow=10, saves=True),
    Shape("large-commits", mixed(300), "--commit-bytes", "8KiB", "--commit-interval", 0.05, grow=2),
    Shape("sampling-n", several(50), *EACH, "--seed", 7),
    Shape("errors", with_errors(150), *EACH, "--max-model-len", 512),
    Shape("preempted", long(24, 200), *EACH, *TINY_POOL, grow=6),
    Shape("gemma", mixed(60), *EACH, preset="tiny-gemma3"),
    Shape("two-inputs-openai", openai(80), *EACH, inputs=2),
    Shape("gz-input", mixed(80), *EACH, gz=True),
    Shape("limit-then-all", mixed(120), *EACH, limit=50),
    Shape("logprobs", logprobs(80), *EACH),
    Shape("stops", stops(60), *EACH, exact=False, out="out.jsonl"),
    Shape("f32", mixed(40), *EACH, "--compute", "f32", "--max-num-seqs", 3),
    Shape("error-file", with_errors(150), *EACH, "--max-model-len", 512, errors="bad.jsonl.lz4", needs="error-file"),
    Shape("ordered", mixed(80), *EACH, "--ordered", needs="ordered", grow=12),
    Shape("ordered-errors", with_errors(100), *EACH, "--ordered", "--max-model-len", 512, out="out.jsonl",
          errors="bad.jsonl", needs="ordered", grow=12),
    Shape("retry-failed", with_errors(100), *EACH, "--max-model-len", 512, needs="retry-failed", retry=True, grow=12),
    Shape("match", [r if i % 6 else {"prompt": "The same words", "max_tokens": 9, "temperature": 0}
                    for i, r in enumerate(short(120))], *EACH, needs="on-input-change", edit=edited, exact=False),
    Shape("match-errors", with_errors(90), *EACH, "--max-model-len", 512, needs="on-input-change", edit=edited,
          exact=False, out="out.jsonl", errors="bad.jsonl.lz4"),
    Shape("shard", mixed(120), *EACH, needs="shard", shards=2),
]


class Job:
    """A shape's input and command line in a folder."""

    def __init__(self, shape, folder, model, shard=1):
        self.shape, self.dir = shape, folder
        self.out = f"{folder}/{shape.out}"
        self.errors = f"{folder}/{shape.errors}" if shape.errors else None
        lines = [r if isinstance(r, str) else json.dumps(r, ensure_ascii=False) for r in shape.records]
        n, self.inputs, self.number = len(lines), [], {}
        for k in range(shape.inputs):  # the same paths in every folder: they are in the results
            name, first, last = f"in{k}.jsonl", k * n // shape.inputs, (k + 1) * n // shape.inputs
            data = "".join(x + "\n" for x in lines[first:last]).encode()
            name += ".gz" if shape.gz else ""
            with open(f"{folder}/{name}", "wb") as f:
                f.write(gzip.compress(data, mtime=0) if shape.gz else data)
            self.inputs.append(name)
            for i in range(first, last):
                self.number[(name if shape.inputs > 1 else None, i - first + 1)] = i
        self.args = ["run", *self.inputs, "-o", self.out, "-m", model, "-q", *shape.args]
        if self.errors:
            self.args += ["--error-file", self.errors]
        if shape.shards > 1:
            self.args += ["--shard", f"{shard}/{shape.shards}"]
        self.log = f"{folder}/log"

    def record_of(self, obj, _):
        """By line and file; and what the id says is the same record."""
        key = (obj.get("file"), obj.get("line"))
        require(key in self.number, "a result of line", key)
        record = self.number[key]
        wanted = self.shape.records[record]
        if isinstance(wanted, dict):
            for name in ("id", "custom_id"):
                if name in wanted:
                    require(obj.get(name) == wanted[name], "record", record, "has the id", obj.get(name),
                            "and not", wanted[name])
        return record

    def start(self, *more):
        here = os.getcwd()
        os.chdir(self.dir)
        try:
            return start(self.args + list(more), self.log)
        finally:
            os.chdir(here)

    def check(self, truth=None):
        return check(self.out, self.record_of, self.errors, truth)
