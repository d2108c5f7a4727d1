#!/usr/bin/env python3
"""Kills batchgen hundreds of times, resumes it each time, and looks for a lost line.

    BUILD=build python3 tests/crash/kill.py --kills 200 [--seed 1] [--seconds 300] [--jobs 2]

A campaign is one job of some shape (SHAPES), killed with SIGKILL again and again until its share of
kills is used up, then run to its end. After every kill the files are verified (journal.py), and
against the same job undisturbed: each committed result is byte-equal to that one's, none is twice
or under another id, none that was committed before is missing, the tokens saved for sequences in
flight agree with that one's and never become fewer. At the end all lines are equal, and the run
that ended generated exactly the tokens that no earlier one had saved.

What is done when follows from --seed; the moments themselves are the machine's. The first violation
ends everything with status 1 and leaves the job's folder, with the files as they were before the
last start in before/. Needs python3, lz4 and the build folder's batchgen and mkmodel only.
"""
import argparse
import copy
import ctypes
import gzip
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from journal import Journal, State, Violation, agree, check, failed_line, read, require  # noqa: E402

BUILD = os.path.abspath(os.environ.get("BUILD", "build"))
BATCHGEN, MKMODEL = f"{BUILD}/batchgen", f"{BUILD}/mkmodel"
HANG = 120  # seconds without an end after which a job counts as hung
GONE = 20   # seconds for a killed job's processes to go
LIBC = ctypes.CDLL(None)
POLL = 0.001


# ---- processes ---------------------------------------------------------------------------------

def die_with_parent():
    LIBC.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


def environment():
    env = {k: v for k, v in os.environ.items() if not k.startswith("BATCHGEN_")}
    env["XDG_CONFIG_HOME"] = "/nonexistent"
    return env


def start(args, log):
    with open(log, "ab") as f:
        return subprocess.Popen([BATCHGEN, *map(str, args)], stdin=subprocess.DEVNULL, stdout=f, stderr=f,
                                env=environment(), start_new_session=True, preexec_fn=die_with_parent)


def descendants(pid):
    """[(pid, name)] below pid."""
    out, todo = [], [pid]
    while todo:
        p = todo.pop(0)
        try:
            for t in os.listdir(f"/proc/{p}/task"):
                with open(f"/proc/{p}/task/{t}/children") as f:
                    kids = [int(x) for x in f.read().split()]
                for k in kids:
                    with open(f"/proc/{k}/comm") as f:
                        out.append((k, f.read().strip()))
                todo += kids
        except (FileNotFoundError, ProcessLookupError):
            pass
    return out


def members(session):
    """[(pid, name)] of the living processes of a session."""
    out = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        stat = (read(f"/proc/{pid}/stat") or b"").decode(errors="replace")
        fields = stat.rsplit(")", 1)[-1].split()
        if fields and fields[0] not in "ZX" and fields[3] == str(session):
            out.append((int(pid), stat[stat.find("(") + 1:stat.rfind(")")]))
    return out


def nap():
    select.select([], [], [], POLL)


def kill(pid):
    try:
        os.kill(pid, signal.SIGKILL)
        return True
    except ProcessLookupError:
        return False


class Events:
    """Names of a folder's files as they are made, written and renamed (inotify)."""

    def __init__(self, folder):
        self.fd = LIBC.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        # IN_MODIFY, IN_MOVED_FROM, IN_MOVED_TO, IN_CREATE, IN_DELETE
        if self.fd < 0 or LIBC.inotify_add_watch(self.fd, folder.encode(), 0x2 | 0x40 | 0x80 | 0x100 | 0x200) < 0:
            raise OSError("inotify is needed")

    def read(self, seconds):
        if not select.select([self.fd], [], [], seconds)[0]:
            return []
        data, names, at = os.read(self.fd, 1 << 16), [], 0
        while at < len(data):
            n = int.from_bytes(data[at + 12:at + 16], sys.byteorder)
            names.append(data[at + 16:at + 16 + n].rstrip(b"\0").decode())
            at += 16 + n
        return names

    def close(self):
        os.close(self.fd)


# ---- jobs --------------------------------------------------------------------------------------

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
    Shape("logprobs", logprobs(80), *EACH, exact=False),
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


def shape_of(shape, **other):
    s = copy.copy(shape)
    s.__dict__.update({"edit": None, **other})
    return s


class Reference:
    """The same job undisturbed: results, and tokens as far as its journal had them. before: the same of
    the input as it was before it was edited."""

    def __init__(self, shape, folder, model):
        self.before = None
        if shape.edit:
            self.before = Reference(shape_of(shape), folder + "-before", model)
            shape = shape_of(shape, records=shape.edit(shape.records), edit=shape.edit)
        self.shape, self.truth, self.results, self.first_commit = shape, {}, {}, 0.1
        self.missing = None
        for k in range(shape.shards):
            self._run(shape, f"{folder}/{k + 1}", model, k + 1)
        if not self.missing and shape.shards == 1:
            require(sorted(self.results) == list(range(len(shape.records))), shape.name, "undisturbed: not all records")

    def _run(self, shape, folder, model, shard):
        os.makedirs(folder)
        job = Job(shape, folder, model, shard)
        began = time.monotonic()
        p = job.start("--summary", f"{folder}/summary.json")
        last, first = b"", None
        while p.poll() is None:
            now = read(job.out + ".journal") or b""
            if len(now) < len(last):  # it was folded, at the end or in between
                self.learn(last)
            last = now
            if first is None and b'{"commit"' in now:
                first = time.monotonic() - began
            require(time.monotonic() - began < HANG, shape.name, "undisturbed: hangs")
            nap()
        self.learn(last)
        if p.returncode == 64 and shape.needs:
            self.missing = "refused"
            return
        require(p.returncode in (0, 1), shape.name, "undisturbed: exit", p.returncode,
                (read(job.log) or b"").decode(errors="replace")[-500:])
        self.code = p.returncode
        self.first_commit = first or self.first_commit
        state = job.check()
        self.results.update(state.results)
        self.text = self._text(job)
        with open(f"{folder}/summary.json") as f:
            self.summary = json.load(f)
        if shape.saves:
            for (record, _), line in (((r, 0), v[1]) for r, v in state.results.items()):
                have, all_of_it = len(self.truth.get((record, 0), [])), completion_tokens(line)
                require(have >= all_of_it / 2, shape.name, "undisturbed: of record", record, "only", have, "of", all_of_it,
                        "tokens were ever saved")
        if shape.name == "preempted":
            require(self.summary["engine"]["preemptions"] > 0, "the tiny pool preempts nothing")
        works = {"error-file": lambda: any(part for part, _ in self.results.values()),
                 "ordered": lambda: (order := [(p, r) for r, (p, _) in state.results.items()]) == sorted(order),
                 "shard": lambda: len(state.results) <= len(shape.records) * 0.6}
        if shape.needs in works and not works[shape.needs]():
            self.missing = "without effect"

    def learn(self, journal):
        for key, tokens in Journal(journal).ever.items():
            agree(self.truth, key, tokens)

    @staticmethod
    def _text(job):
        return subprocess.run(["lz4", "-dc", job.out], capture_output=True, check=True).stdout \
            if job.out.endswith(".lz4") else read(job.out)


# ---- a campaign ----------------------------------------------------------------------------------

def completion_tokens(line):
    obj = json.loads(line)
    body = (obj.get("response") or {}).get("body") or obj
    return (body.get("usage") or {}).get("completion_tokens", 0)


class Campaign:
    def __init__(self, reference, folder, model, seed, budget, shard=1):
        self.ref, self.shape, self.dir, self.budget = reference, reference.shape, folder, budget
        self.rnd = random.Random(seed)
        os.makedirs(folder, exist_ok=True)
        self.model = model
        self.job = Job((self.ref.before or self.ref).shape, folder, model, shard)
        self.editing = self.ref.before is not None  # the input is still as it was before
        self.state = self.job.check()
        self.wanted = {r: v for r, v in (self.ref.before or self.ref).results.items()
                       if self.shape.shards == 1 or r % self.shape.shards == shard - 1}
        self.old_job, self.edited, self.limit = None, False, self.shape.limit
        self.kills, self.starts, self.verified, self.busy = {}, 0, 0, 0
        self.regained = self.gave_up = self.replacing = self.tails = self.looks = self.repairs = 0

    def made(self):
        return sum(self.kills.values())

    def count(self, kind, moment):
        key = f"{kind} {moment}"
        self.kills[key] = self.kills.get(key, 0) + 1

    # -- files

    def save_before(self):
        to = f"{self.dir}/before"
        shutil.rmtree(to, ignore_errors=True)
        os.makedirs(to)
        for name in os.listdir(self.dir):
            if name.startswith((self.shape.out, self.shape.errors or self.shape.out)):
                shutil.copy2(f"{self.dir}/{name}", to)

    def verify(self, retried=False):
        self.replacing += any(n.endswith((".rewrite", ".journal.new")) for n in os.listdir(self.dir))
        if self.old_job and not self.replaced():
            self.state = self.check_against(self.old_job, self.ref.before, self.state, False)
            return self.state
        old, self.old_job = self.state, None
        if self.edited:  # the answers of records that are still there go with them
            lines = {json.dumps(r): i for i, r in enumerate(self.ref.shape.records) if isinstance(r, dict) and "id" in r}
            kept = [lines.get(json.dumps(self.ref.before.shape.records[r]))
                    for r, (_, line) in old.results.items() if not failed_line(line)]
            old, self.edited = State(), False
            old.results = {r: self.ref.results[r] for r in kept if r is not None}
        self.state = self.check_against(self.job, self.ref if not self.editing else self.ref.before, old, retried)
        return self.state

    def replaced(self):
        """Whether the files are those of the edited input."""
        for name in (".journal", ".journal.rewrite"):
            raw = read(self.job.out + name) or b""
            if raw.endswith(b"\n") or name == ".journal":
                j = Journal(raw)
                if j.identity and j.identity["input_bytes"] == str(os.path.getsize(f"{self.dir}/{self.job.inputs[0]}")):
                    return True
                if not j.rewrite:
                    return False
        return False

    def edit(self):
        """From now on the input is another one."""
        self.old_job, self.edited, self.editing = self.job, True, False
        self.job = Job(self.ref.shape, self.dir, self.model)
        self.job.args += ["--on-input-change", "match"]
        self.wanted = self.ref.results

    def check_against(self, job, ref, old, retried):
        new = job.check(ref.truth)
        results = ref.results if self.shape.edit else self.wanted
        for record, (part, line) in new.results.items():
            require(record in results, "record", record, "is not of this job")
            require((part, line) == results[record], "record", record, "differs from the undisturbed run's:\n ",
                    line[:300], "\n ", results[record][1][:300])
        lost = [r for r in old.results if r not in new.results and not (retried and failed_line(old.results[r][1]))]
        require(not lost, "committed results are lost: records", lost[:10])
        if old.journal and new.journal:
            for key, tokens in old.journal.partial.items():
                if key[0] in new.journal.done:
                    continue
                now = new.journal.partial.get(key, [])
                require(now[:len(tokens)] == tokens, "tokens saved for", key, "became fewer:", len(tokens), "->", len(now))
        if new.journal:
            for (record, _), tokens in new.journal.partial.items():
                most = completion_tokens(results[record][1])
                require(len(tokens) <= most, "record", record, "has", len(tokens), "tokens saved, its answer only", most)
        self.verified += len(new.results)
        self.tails += new.tail > 0
        return new

    # -- what else a user does in between

    def command(self, *args):
        p = subprocess.run([BATCHGEN, *args], capture_output=True, env=environment(), timeout=HANG, stdin=subprocess.DEVNULL)
        return p.returncode, p.stdout, p.stderr.decode(errors="replace")[-500:]

    def look(self):
        """status and cat agree with what was found, and change nothing."""
        files = [self.job.out, self.job.out + ".journal"]
        before = [read(f) for f in files]
        code, out, err = self.command("cat", self.job.out)
        have = [line for part, line in self.state.results.values() if part == 0]
        require(code == 0 and sorted(out.split(b"\n")[:-1]) == sorted(have), "cat: exit", code, err, len(have), "results are committed")
        code, out, err = self.command("status", self.job.out, "--json")
        require(code in (0, 1, 75) and json.loads(out)["records"]["done"] == len(self.state.results), "status: exit", code, err, out[:500])
        require([read(f) for f in files] == before, "status or cat changed files")
        self.looks += 1

    def lose_journal(self):
        """repair makes it anew, and no result is lost by that."""
        os.unlink(self.job.out + ".journal")
        code, _, err = self.command("repair", self.job.out, *([self.job.errors] if self.job.errors else []))
        require(code == 0, "repair: exit", code, err)
        self.state.journal.partial = {}  # tokens in flight were in the lost journal only
        self.verify()
        self.repairs += 1

    def disturb(self):
        if self.state.stage != "open" or not self.state.results or not self.state.journal.commits:
            return
        dice = self.rnd.random()
        if dice < 0.15:
            self.look()
        elif dice < 0.2 and not self.shape.edit:
            self.lose_journal()

    # -- moments

    def commits(self):
        return (read(self.job.out + ".journal") or b"").count(b'{"commit"')

    def await_moment(self, p, moment, events):
        """Waits for it; False when the job ended before. Then some more time is let pass.

        start-up  some time after the start
        growth    the journal has a few commits more, and then some time
        write     the output is being written: perhaps between the results and their entry
        finish    almost all is committed, and then a few events in the folder
        replace   a few events after a file that will replace another appeared
        """
        rnd, began = self.rnd, time.monotonic()
        goal = self.commits() + rnd.randint(1, self.shape.grow)
        jitter = rnd.choice([0, 0, rnd.uniform(0, 0.002), rnd.uniform(0, 0.02)])
        delay = rnd.uniform(0, 1.2 * self.ref.first_commit)
        left, near = rnd.randint(1, 9), False
        name = self.shape.out
        while p.poll() is None:
            passed = time.monotonic() - began
            require(passed < HANG, "the job hangs")
            if moment == "start-up":
                if passed >= delay:
                    return True
                continue
            for event in events.read(0.002):
                if moment == "growth" and event == name + ".journal" and self.commits() >= goal:
                    until = time.monotonic() + jitter
                    while time.monotonic() < until and p.poll() is None:
                        nap()
                    return p.poll() is None
                if moment == "write" and event == name and (near or self.commits() >= goal - 1):
                    near = True
                    left -= left > 1 or rnd.random() < 0.5
                    if left <= 7:
                        return True
                if moment == "replace" and (near or event.endswith((".new", ".rewrite"))):
                    near, left = True, left - 1
                if moment == "finish":
                    near = near or self.committed(read(self.job.out + ".journal") or b"") >= len(self.wanted) - 2
                    left -= near
                if left <= 0:
                    return True
        return False

    @staticmethod
    def committed(raw):
        try:
            return len(Journal(raw).done)
        except Violation:  # read while it is written or replaced
            return 0

    def choose(self):
        fresh = not self.state.results
        near = self.made() > self.budget * 0.7 or len(self.state.results) > len(self.wanted) * 0.8
        late = 4 if near or self.shape.retry else 0
        rewrites = 25 if self.edited or self.shape.retry and self.state.stage == "end" else late
        moment = self.rnd.choices(["start-up", "growth", "write", "finish", "replace"], [3, 8, 6, late, rewrites])[0]
        target = self.rnd.choices(["coordinator", "rank", "nursery", "all", "ranks", "term"], [12, 4, 2, 3, 1, 2])[0]
        return target, moment, "start-up" if fresh and moment == "start-up" else \
            "recovery" if moment == "start-up" else moment

    # -- kills

    def strike(self, p, target, moment):
        """Kills; True when the coordinator is among the dead."""
        family = descendants(p.pid)
        ranks = [k for k, name in family if name.startswith("bg-rank")]
        nursery = [k for k, name in family if name == "bg-nursery"]
        if target == "rank" and ranks and kill(self.rnd.choice(ranks)):
            self.count("rank", moment)
            return False
        if target == "ranks" and ranks:
            self.rnd.shuffle(ranks)
            if any([kill(k) for k in ranks]):
                self.count("every rank", moment)
            return False
        if target == "nursery" and nursery and kill(nursery[0]):
            self.count("nursery", moment)
            return False
        if target == "term":
            p.send_signal(signal.SIGTERM)
            self.count("SIGTERM, not a kill", moment)
            return False
        if target == "all":
            everyone = [p.pid] + [k for k, _ in family]
            self.rnd.shuffle(everyone)
            for k in everyone:
                kill(k)
            self.count("all at once", moment)
            return True
        kill(p.pid)
        self.count("coordinator", moment)
        return True

    def wait(self, p):
        until = time.monotonic() + HANG
        while p.poll() is None:
            require(time.monotonic() < until, "the job hangs")
            nap()
        return p.returncode

    def gone(self, p):
        """Nothing that the job started outlives it, also what was being forked at that moment."""
        until = time.monotonic() + GONE
        while left := members(p.pid):
            require(time.monotonic() < until, "outlives its job:", left)
            nap()

    def ended(self, p, before, struck, retried):
        """The job ended by itself. True: it is complete."""
        code, said = p.returncode, (read(self.job.log) or b"").decode(errors="replace")[-600:]
        if code == 75 and "SIGTERM, not a kill" in struck:
            self.count_tokens(before, self.verify(retried))
            return False
        if code == 75 and "another run" in said and not struck:
            self.busy += 1
            require(self.busy < 20, "the lock of a killed run stays")
            nap()
            return False
        if code == 69 and struck:
            self.gave_up += 1
            self.verify(retried)
            return False
        want = (self.ref.before if self.editing else self.ref).code
        require(code == want, f"exit {code} and not {want}; it says: {said}")
        state = self.verify(retried)
        require(state.stage == "end", "it ended with", code, "but its journal has no end")
        self.count_tokens(before, state)
        return True

    def count_tokens(self, before, after):
        """What the run generated is committed or saved, and what was saved it did not generate again."""
        if not self.shape.exact or self.shape.retry or self.shape.edit or before.stage == "end" and not self.shape.limit:
            return
        with open(f"{self.dir}/summary.json") as f:
            made = json.load(f)["usage"]["output_tokens"]
        new = sum(completion_tokens(line) for r, (_, line) in after.results.items() if r not in before.results)
        had, have = (sum(map(len, x.journal.partial.values())) if x.journal else 0 for x in (before, after))
        # Of several choices of a record, one that is complete is not saved further.
        good = made >= new + have - had if any(key[1] for key in after.journal.partial) else made == new + have - had
        require(good, "the run generated", made, "tokens; committed are", new, "more, saved were", had, "and are now", have)
        self.regained += had - have if after.stage == "end" else 0

    def run_once(self, killing):
        """One start. True when the job is complete."""
        self.save_before()
        more = ["--summary", f"{self.dir}/summary.json"]
        retried = self.shape.retry and (self.state.stage == "end" or self.state.stage == "rewrite" or self.rnd.random() < 0.3)
        if retried:
            more.append("--retry-failed")
        if self.limit and self.state.stage == "end":
            self.limit = 0
        if self.limit:
            more += ["--limit", self.limit]
        target, moment, called = self.choose()
        if target == "term":
            more += ["--grace", "0"]
        before = self.state
        with open(self.job.log, "wb"):
            pass
        events = Events(self.dir)
        p = self.job.start(*more)
        self.starts += 1
        struck = []
        try:
            while killing and self.await_moment(p, moment, events):
                had = dict(self.kills)
                dead = self.strike(p, target, called)
                struck += [k.rsplit(" ", 1)[0] for k in self.kills if self.kills[k] != had.get(k)]
                if dead:
                    break
                if target == "term":
                    break
                target, moment, called = "coordinator", "growth", "after another kill"  # while ranks start anew
            self.wait(p)
            self.gone(p)
            if p.returncode in (-signal.SIGKILL, -signal.SIGTERM) and struck:  # SIGTERM: before it is handled
                self.verify(retried)
                self.disturb()
                return False
            return self.ended(p, before, struck, retried)
        finally:
            events.close()
            if p.poll() is None:
                kill(p.pid)
                p.wait()
            for pid, _ in members(p.pid):  # after a violation
                kill(pid)

    def run(self, stop):
        idle = 0
        while self.made() < self.budget and not stop():
            if self.editing and (len(self.state.results) > self.rnd.uniform(0.2, 1) * len(self.wanted) or
                                 self.state.stage == "end"):
                self.edit()
            had = self.made()
            done = self.run_once(True)
            idle = idle + 1 if self.made() == had else 0
            if done and not self.editing and not self.limit and (not self.shape.retry or idle > 5):
                break
        if self.editing:
            self.edit()
        quiet = 0
        while not self.state.stage == "end" or self.limit or self.old_job or self.shape.retry and quiet == 0:
            quiet += 1
            require(quiet < 10, "it does not end even undisturbed")
            if self.run_once(False) and not self.limit:
                break
        self.final()

    def final(self):
        have = sorted(line for _, line in self.state.results.values())
        want = sorted(line for _, line in self.wanted.values())
        require(have == want, "the sorted output differs from the undisturbed run's")
        if self.shape.needs == "ordered":
            require(self.ref._text(self.job) == self.ref.text, "the ordered output differs from the undisturbed run's")
        left = [n for n in os.listdir(self.dir) if n.endswith((".new", ".rewrite"))]
        require(not left, "left behind:", left)
        files = [self.job.out, self.job.out + ".journal"] + ([self.job.errors] if self.job.errors else [])
        before = [read(f) for f in files]
        p = self.job.start()
        self.wait(p)
        require(p.returncode in (0, 1), "started again when done: exit", p.returncode)
        require([read(f) for f in files] == before, "started again when done: files changed")


# ---- all of them -----------------------------------------------------------------------------------

def in_child(work):
    """Runs work() in a process that dies with this one; gives (pid, pipe) for its JSON answer."""
    r, w = os.pipe()
    parent, pid = os.getpid(), os.fork()
    if pid:
        os.close(w)
        return pid, r
    code = 2
    try:
        die_with_parent()
        os.close(r)
        if os.getppid() != parent:
            os._exit(2)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        answer = json.dumps(work()).encode()
        while answer:
            answer = answer[os.write(w, answer):]
        code = 0
    except BaseException as e:  # whatever it is, it is told and the process ends here
        print(f"kill.py: {type(e).__name__}: {e}", file=sys.stderr)
    finally:
        sys.stderr.flush()
        os._exit(code)


def campaign_work(ref, folder, model, seed, budget, stop_file, deadline, shard):
    def stop():
        return os.path.exists(stop_file) or time.monotonic() > deadline

    def work():
        c = Campaign(ref, folder, model, seed, budget, shard)
        why = None
        try:
            c.run(stop)
        except Violation as e:
            why = str(e)
        except Exception as e:
            why = f"{type(e).__name__}: {e}"
        return {"why": why, "kills": c.kills, "starts": c.starts, "verified": c.verified, "busy": c.busy,
                "regained": c.regained, "gave_up": c.gave_up, "replacing": c.replacing, "tails": c.tails, "looks": c.looks, "repairs": c.repairs, "dir": folder, "shape": c.shape.name, "results": len(c.state.results)}
    return work


def add_up(into, kills):
    for k, n in kills.items():
        into[k] = into.get(k, 0) + n


def report(total, missing, began):
    real = {k: n for k, n in total["kills"].items() if "not a kill" not in k}
    kinds, moments = {}, {}
    for k, n in total["kills"].items():
        kind, moment = [(k[:-len(m) - 1], m) for m in ("start-up", "recovery", "growth", "write", "finish", "replace",
                                                                     "after another kill")
                        if k.endswith(" " + m)][0]
        kinds[kind] = kinds.get(kind, 0) + n
        if k in real:
            moments[moment] = moments.get(moment, 0) + n
    print(f"{sum(real.values())} kills, {total['starts']} starts, {total['campaigns']} jobs, "
          f"{total['verified']} results verified, {time.monotonic() - began:.0f} s")
    print("  by kind:   " + ", ".join(f"{k} {n}" for k, n in sorted(kinds.items(), key=lambda x: -x[1])))
    print("  by moment: " + ", ".join(f"{k} {n}" for k, n in sorted(moments.items(), key=lambda x: -x[1])))
    print("  by shape:  " + ", ".join(f"{k} {n}" for k, n in sorted(total["shapes"].items())))
    print(f"  {total['regained']} tokens of sequences in flight taken over from journals, none generated again; "
          f"{total['busy']} starts found the lock still held by a dying process, {total['gave_up']} ended with 69")
    print(f"  {total['tails']} kills fell between results and their journal entry, {total['replacing']} between the first and the "
          "last step of replacing files")
    print(f"  cat and status agreed {total['looks']} times, {total['repairs']} journals were lost and repaired")
    for name, why in missing.items():
        print(f"  not there, not tested: {name} ({why})")


def main():
    a = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    a.add_argument("--kills", type=int, default=200, help="end after so many [200]")
    a.add_argument("--seed", type=int, default=1)
    a.add_argument("--seconds", type=float, default=0, help="start nothing new after so many; 0: no limit")
    a.add_argument("--jobs", type=int, default=2, help="jobs at a time [2]")
    a.add_argument("--burst", type=int, default=0, help="kills of one job [8 to 40]")
    a.add_argument("--shape", action="append", help="only this one (may be given several times)")
    a.add_argument("--list", action="store_true", help="list the shapes")
    a.add_argument("--dir", help="work here and keep everything")
    o = a.parse_args()
    if o.list:
        print("\n".join(s.name for s in SHAPES))
        return 0
    shapes = [s for s in SHAPES if not o.shape or s.name in o.shape]
    if not shapes or not os.access(BATCHGEN, os.X_OK) or not shutil.which("lz4"):
        print(f"kill.py: needs {BATCHGEN}, lz4, and a known --shape", file=sys.stderr)
        return 64
    began = time.monotonic()
    deadline = began + o.seconds if o.seconds else float("inf")
    top = o.dir or tempfile.mkdtemp(prefix="batchgen-crash.")
    os.makedirs(top, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    bad = None
    try:
        bad = run_all(o, shapes, top, began, deadline)
    except KeyboardInterrupt:
        return 130
    finally:  # of an interrupted run, too, nothing is left
        if not bad and not o.dir:
            shutil.rmtree(top, ignore_errors=True)
    return 1 if bad else 0


def make_models(shapes, top):
    models = {}
    for preset in {s.preset for s in shapes}:
        models[preset] = f"{top}/{preset}.gguf"
        if not os.path.exists(models[preset]):
            subprocess.run([MKMODEL, "--preset", preset, "-o", models[preset]], check=True, stdout=subprocess.DEVNULL)
    return models


def run_all(o, shapes, top, began, deadline):
    models = make_models(shapes, top)
    refs, missing, running = {}, {}, {}
    total = {"kills": {}, "starts": 0, "verified": 0, "campaigns": 0, "busy": 0, "regained": 0, "gave_up": 0, "replacing": 0, "tails": 0, "looks": 0, "repairs": 0, "shapes": {}}
    stop_file, bad, number = f"{top}/stop", None, 0
    rnd = random.Random(o.seed)

    def kills():
        return sum(n for k, n in total["kills"].items() if "not a kill" not in k)

    def promised():
        return kills() + sum(b for b, _ in running.values())

    queue, merging = [], {}
    try:
        while True:
            wanted = not bad and time.monotonic() < deadline and promised() < o.kills
            while wanted and len(running) < o.jobs:
                if not queue:
                    queue = [s for s in shapes if s.name not in missing]
                    rnd.shuffle(queue)
                if not queue:
                    break
                s = queue.pop(0)
                number += 1
                if s.name not in refs:
                    try:
                        refs[s.name] = Reference(s, f"{top}/undisturbed-{s.name}", models[s.preset])
                    except Violation as e:
                        bad = {"shape": s.name, "why": str(e), "dir": f"{top}/undisturbed-{s.name}"}
                        break
                    if refs[s.name].missing:
                        missing[s.name] = refs[s.name].missing
                        continue
                for shard in range(1, s.shards + 1):
                    budget = max(1, min(o.burst or rnd.randint(8, 40), o.kills - promised()))
                    folder = f"{top}/{number:04d}-{s.name}" + (f"-{shard}" if s.shards > 1 else "")
                    merging[folder] = (number, s, shard)
                    pid, pipe = in_child(campaign_work(refs[s.name], folder, models[s.preset], o.seed * 1000003 + number * 10 + shard,
                                                       budget, stop_file, deadline, shard))
                    running[pipe] = (budget, pid)
                wanted = promised() < o.kills and time.monotonic() < deadline
            if not running:
                break
            ready, _, _ = select.select(list(running), [], [], 1)
            for pipe in ready:
                answer = b""
                while piece := os.read(pipe, 1 << 16):
                    answer += piece
                os.close(pipe)
                _, pid = running.pop(pipe)
                os.waitpid(pid, 0)
                got = json.loads(answer) if answer else {"why": "the campaign's process failed", "kills": {}, "shape": "?", "dir": top}
                add_up(total["kills"], got["kills"])
                for k in ("starts", "verified", "busy", "regained", "gave_up", "replacing", "tails", "looks", "repairs"):
                    total[k] += got.get(k, 0)
                total["campaigns"] += 1
                add_up(total["shapes"], {got["shape"]: sum(n for k, n in got["kills"].items() if "not a kill" not in k)})
                if got["why"]:
                    bad = bad or got
                    with open(stop_file, "w"):
                        pass
                elif not o.dir and refs[got["shape"]].shape.shards == 1:
                    shutil.rmtree(got["dir"], ignore_errors=True)
                elif refs[got["shape"]].shape.shards > 1:
                    bad = bad or merged(merging, got["dir"], refs[got["shape"]], running, top)
    finally:
        for _, pid in running.values():
            kill(pid)
    report(total, missing, began)
    if bad:
        print(f"VIOLATION in {bad['shape']}: {bad['why']}\n  files: {bad['dir']} (before/: as they were before the last start)\n"
              f"  again: --seed {o.seed} --shape {bad['shape']}")
    else:
        print("clean" if kills() else "nothing was killed")
    return bad or not kills()


def merged(merging, folder, ref, running, top):
    """When all shards of a job are complete: merged, they are the job. None, or what is wrong."""
    number, shape, _ = merging.pop(folder)
    others = [f for f, (n, _, _) in merging.items() if n == number]
    done = [f"{top}/{number:04d}-{shape.name}-{k}/{shape.out}" for k in range(1, shape.shards + 1)]
    if others:
        return None
    out = f"{folder}-merged.jsonl"
    p = subprocess.run([BATCHGEN, "merge", *done, "-o", out], capture_output=True, env=environment())
    have = sorted((read(out) or b"").split(b"\n")[:-1])
    if p.returncode not in (0, 1) or have != sorted(line for _, line in ref.results.values()):
        return {"shape": shape.name, "why": f"merged shards differ: exit {p.returncode} {p.stderr[-300:]}", "dir": folder}
    return None


if __name__ == "__main__":
    sys.exit(main())
