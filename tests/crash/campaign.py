"""One job, killed again and again, and the same job undisturbed."""
import copy
import json
import os
import random
import shutil
import signal
import subprocess
import time

from journal import Journal, State, Violation, agree, failed_line, read, require
from processes import BATCHGEN, Events, descendants, environment, kill, members, nap
from shapes import Job

HANG = 120  # seconds without an end after which a job counts as hung
GONE = 20   # seconds for a killed job's processes to go


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
        require(code == 0 and sorted(out.split(b"\n")[:-1]) == sorted(have), "cat: exit", code, err, len(have),
                "results are committed")
        code, out, err = self.command("status", self.job.out, "--json")
        require(code in (0, 1, 75) and json.loads(out)["records"]["done"] == len(self.state.results), "status: exit", code,
                err, out[:500])
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
