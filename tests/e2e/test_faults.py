"""Full disks, bad devices, no memory: tests/faults/libfault.c fails the n-th call of a kind.

After each fault the same must hold: an exit status that says what happened (never a signal, a hang,
or success without the results), every committed result whole and right, and the next start without
the fault completes with the bytes of an undisturbed run.

FAULTS=full tries every n of every sweep; without it the long ones take samples.
"""
import contextlib
import errno
import gzip
import json
import os
import random
import re
import resource
import shutil
import struct
import subprocess
import tempfile
import unittest

from common import (BATCHGEN, BUILD, MODEL, TMP, batchgen, commits, environment, make_model, results, start_job, wait_for_commits,
                    write_lines)

SHIM = f"{TMP}/libfault.so"
FULL = os.environ.get("FAULTS") == "full"
SANITIZED = "address" in BUILD or "thread" in BUILD
SMALL = ["-c", "256", "--threads", "2", "--text-threads", "1", "--max-num-seqs", "4"]
EACH = ["--commit-bytes", "1", "--commit-interval", "0.01"]  # a commit for nearly each record
NAMES = {0: "done", 1: "some failed", 65: "data", 66: "input", 69: "rank", 70: "memory", 73: "create", 74: "I/O",
         75: "again", 78: "config"}


def setUpModule():
    if SANITIZED:
        raise unittest.SkipTest("a sanitizer's own allocator leaves no room for a second one")
    make_model()
    subprocess.run([os.environ.get("CC", "cc"), "-shared", "-fPIC", "-O1", "-D_GNU_SOURCE", "-o", SHIM,
                    "tests/faults/libfault.c", "-ldl"], check=True)


def fault(call, n=0, how="EIO", path=None, who="main", start=False, once=False, count=None):
    """The environment of a run with a fault; n 0 only counts. start: every call from the n-th on."""
    env = {"LD_PRELOAD": SHIM, "FAULT_CALL": call, "FAULT_N": str(n), "FAULT_HOW": how, "FAULT_WHO": who}
    if path:
        env["FAULT_PATH"] = path
    if start:
        env["FAULT_FROM"] = "1"
    if once:
        env["FAULT_ONCE"] = "1"
    if count:
        env["FAULT_COUNT"] = count
    return environment(**env)


def records():
    """Few records of every kind: each goes another way through the program."""
    return [{"id": "a", "prompt": "the sea", "max_tokens": 20, "ignore_eos": True},
            {"id": "b", "messages": [{"role": "user", "content": "a stone under the light"}], "max_tokens": 4},
            {"id": "c", "prompt": "morning", "max_tokens": 3, "n": 2, "temperature": 0.9, "stop": ["zq", "qz"]},
            {"id": "d", "prompt": "nobody had been", "max_tokens": 3, "logprobs": 2},
            {"id": "e", "prompt": 7},
            {"custom_id": "f", "method": "POST", "url": "/v1/chat/completions",
             "body": {"messages": [{"role": "user", "content": "once more"}], "max_tokens": 3, "logit_bias": {"300": 1}}},
            {"id": "g", "prompt": "the last " * 12, "max_tokens": 40, "ignore_eos": True}]


def tearDownModule():
    print(f"{Faults.tried} faults tried")


class Faults(unittest.TestCase):
    rnd = random.Random(7)
    tried = 0

    @classmethod
    def setUpClass(cls):
        cls.dir = tempfile.mkdtemp(dir=TMP)
        cls.input = write_lines(f"{cls.dir}/in.jsonl", records())
        cls.want = {}
        for name in ("want.jsonl", "want.jsonl.lz4"):
            batchgen("run", cls.input, "-o", f"{cls.dir}/{name}", "-m", MODEL, *SMALL, code=1)
        cls.want = sorted(results(f"{cls.dir}/want.jsonl"))
        assert len(cls.want) == 7 and cls.want == sorted(results(f"{cls.dir}/want.jsonl.lz4"))

    def setUp(self):
        self.out = f"{self.dir}/out.jsonl"

    def args(self, *more):
        return ["run", self.input, "-o", self.out, "-m", MODEL, "-q", *SMALL, *more]

    def clean(self):
        """Where a job starts: from nothing."""
        for name in os.listdir(self.dir):
            if name.startswith("out"):
                os.unlink(f"{self.dir}/{name}")

    def start(self, env, *more, where="", **kw):
        try:
            p = subprocess.run([BATCHGEN, *self.args(*more)], env=env, capture_output=True, timeout=60, **kw)
        except subprocess.TimeoutExpired as e:
            self.fail(f"{where}: hangs; {e.stderr}")
        err = p.stderr.decode(errors="replace")
        self.assertIn(p.returncode, NAMES, f"{where}: exit status {p.returncode}\n{err}")
        if p.returncode not in (0, 1):
            self.assertTrue(err.startswith("batchgen: ") or "\nbatchgen: " in err, f"{where}: says nothing: {err!r}")
            self.assertNotIn("this is a bug", err, where)
        return p.returncode, err

    def committed(self, path=None):
        path = path or self.out
        return sorted(results(path)) if os.path.exists(path) and os.path.getsize(path) else []

    def readable(self, where):
        """What is committed is readable, right, and there once. An uncommitted tail may be torn."""
        got = []
        try:
            with open(self.out + ".journal", "rb") as f:
                sizes = [json.loads(x.rsplit(b" ", 1)[0]) for x in f.read().split(b"\n")[:-1]]
        except (FileNotFoundError, ValueError):
            sizes = []
        end = max([x["commit"]["offset"] + x["commit"]["bytes"] for x in sizes if "commit" in x], default=0)
        if end:
            with open(self.out, "rb") as f:
                data = f.read(end)
            self.assertEqual(len(data), end, f"{where}: the journal promises more than there is")
            copy = f"{self.dir}/committed" + (".lz4" if self.out.endswith(".lz4") else "")
            with open(copy, "wb") as f:
                f.write(data)
            got = results(copy)
        self.assertEqual(len(got), len(set(got)), f"{where}: a result twice")
        for line in got:
            self.assertIn(line, self.want, where)
        return got

    def complete(self, where, *more):
        code, err = self.start(environment(), *more, where=f"{where}, then again")
        self.assertEqual(code, 1, f"{where}, then again: {err}")
        self.assertEqual(self.committed(), self.want, f"{where}, then again")

    def one(self, where, env, *more, codes=NAMES, says=()):
        """A run with a fault and one without; returns the first one's exit status."""
        self.clean()
        code, err = self.start(dict(env, FAULT_COUNT=self.fresh_counts()), *more, where=where)
        if not self.counts()[3]:  # how many commits there are is a matter of timing
            codes = (1,)
        self.assertIn(code, codes, f"{where}: exit {code}: {err}")
        if code in (0, 1):
            self.assertEqual(self.committed(), self.want, f"{where}: exit {code} without all results")
        else:
            for text in says:
                self.assertIn(text, err, where)
        self.readable(where)
        self.complete(where, *more)
        return code

    def run_with(self, *args, limits=(), code=None, **kw):
        def set_limits():
            for what, value in limits:
                resource.setrlimit(what, (value, resource.getrlimit(what)[1]))
        p = subprocess.run([BATCHGEN, *map(str, args)], env=environment(), stderr=subprocess.PIPE, timeout=60,
                           preexec_fn=set_limits, **kw)
        err = p.stderr.decode(errors="replace")
        if code is not None:
            self.assertEqual(p.returncode, code, err)
        return p.returncode, err

    def fresh_counts(self):
        path = f"{self.dir}/counts"
        with open(path, "wb") as f:
            f.write(bytes(40))
        return path

    def counts(self):
        """Matching calls in the coordinator, the nursery, the ranks; failures."""
        with open(f"{self.dir}/counts", "rb") as f:
            got = struct.unpack("<4Q", f.read(32))
        Faults.tried += got[3] > 0
        return got

    def count(self, *more, **what):
        """How often a call is made by the (coordinator, nursery, ranks), undisturbed."""
        self.clean()
        code, err = self.start(fault(count=self.fresh_counts(), **what), *more)
        self.assertEqual(code, 1, err)
        return self.counts()[:3]

    def sample(self, n, most):
        """1..n, or at most `most` of them: the first ones, and others by chance."""
        if FULL or n <= most:
            return range(1, n + 1)
        return sorted([*range(1, most // 4), *self.rnd.sample(range(most // 4, n + 1), most - most // 4 + 1)])


class Disk(Faults):
    def test_every_write_sync_cut_and_close(self):
        """Every n of every call on output and journal; each kind of failure."""
        for name, hows in (("write", ("ENOSPC", "EDQUOT", "EFBIG", "EIO", "short+ENOSPC", "short", "EINTR")),
                           ("sync", ("EIO", "ENOSPC", "EDQUOT")), ("ftruncate", ("EIO",)), ("close", ("EIO", "ENOSPC")),
                           ("open", ("EMFILE", "EIO", "ENOSPC")), ("flock", ("ENOLCK",)), ("fstat", ("EIO",)),
                           ("rename", ("EIO", "ENOSPC")), ("unlink", ("EIO",)), ("read", ("EIO", "EINTR", "short"))):
            for out in ("out.jsonl", "out.jsonl.lz4"):
                self.out = f"{self.dir}/{out}"
                n = self.count(*EACH, call=name, path=out)[0]
                for i in self.sample(n, 30):
                    for how in hows if FULL else (hows[i % len(hows)],):
                        harmless = how in ("short", "EINTR") or name in ("close", "unlink")
                        where = f"{name} {i} of {n} on {out}: {how}"
                        codes = (1, 74) if name == "close" else (1,) if harmless else (73, 74)
                        if name in ("rename", "fstat"):  # some of them have another way
                            codes = (1, 73, 74)
                        env = fault(name, i, how, out, start=how not in ("short", "EINTR") and i % 2 == 0)
                        says = [out, "batchgen: "]
                        if how.startswith("E"):
                            says.append(os.strerror(getattr(errno, how)))
                        with self.subTest(where):
                            self.one(where, env, *EACH, codes=codes, says=says)

    def test_every_write_to_standard_output(self):
        """No journal there: a failure is told, and what came out are whole lines of the right results."""
        args = ["run", self.input, "-o", "-", "-m", MODEL, "-q", *SMALL, *EACH]
        path = f"{self.dir}/stdout.txt"
        for i in range(1, 99):
            for how in ("ENOSPC", "EIO", "short", "EINTR", "short+ENOSPC"):
                env = fault("write", i, how, "stdout.txt", count=self.fresh_counts())
                with open(path, "wb") as f:
                    p = subprocess.run([BATCHGEN, *args], env=env, stdout=f, stderr=subprocess.PIPE, timeout=60)
                failed = self.counts()[3]
                harmless = how in ("short", "EINTR") or not failed
                self.assertEqual(p.returncode, 1 if harmless else 74, f"write {i}: {how}: {p.stderr}")
                with open(path, "rb") as f:
                    got = f.read().split(b"\n")
                if harmless:
                    self.assertEqual(sorted(got[:-1]), self.want)
                else:
                    self.assertIn(b"standard output", p.stderr)
                self.assertTrue(set(got[:-1]) <= set(self.want))
            if not failed:
                break
        self.assertGreater(i, 3)


class Memory(Faults):
    def sweep(self, call, who, most, codes, *more, how="ENOMEM", **what):
        n = self.count(*more, call=call, who=who)[("main", "child", "grandchild").index(who)]
        self.assertGreater(n, 0)
        for i in self.sample(n, most):
            where = f"{call} {i} of {n} in {who}"
            with self.subTest(where):
                self.one(where, fault(call, i, how, who=who, start=i % 3 == 0, **what), *more, codes=codes)

    def test_allocations_of_the_coordinator(self):
        self.sweep("alloc", "main", 60, (1, 70, 74))

    def test_allocations_with_everything_beside(self):
        """Summary, metrics, log: whatever they miss, the results are right."""
        more = ["--summary", f"{self.dir}/out.sum", "--metrics-file", f"{self.dir}/out.prom", "--log-file", f"{self.dir}/out.log",
                "--log-level", "debug", "--log-format", "json", "--strict-model", "--max-failed", "5", "--limit", "7", *EACH]
        self.sweep("alloc", "main", 20, (1, 70, 74), *more)

    def test_allocations_of_a_rank(self):
        self.sweep("alloc", "grandchild", 15, (1, 69, 70, 74))
        self.sweep("alloc", "grandchild", 15, (1, 69, 70, 74), once=True)

    def test_mappings(self):
        self.sweep("mmap", "main", 10, (1, 70, 74))
        self.sweep("mmap", "grandchild", 10, (69, 70, 74))

    def test_threads_and_processes(self):
        for call, who in (("pthread_create", "main"), ("pthread_create", "grandchild"), ("fork", "main"), ("fork", "child"),
                          ("pipe2", "main"), ("eventfd", "main"), ("signalfd", "main"), ("signalfd", "child"),
                          ("fcntl", "child"), ("open", "child")):
            self.sweep(call, who, 20, (66, 69, 70, 74), how="EAGAIN" if call in ("fork", "pthread_create") else "EMFILE")


class States(Faults):
    """Faults in what a job does besides running: going on, taking out, renumbering, sorting, two files."""
    EVERY = (("write", ("ENOSPC", "EIO", "short+EDQUOT")), ("sync", ("EIO", "ENOSPC")), ("ftruncate", ("EIO",)),
             ("rename", ("EIO", "ENOSPC")), ("open", ("EMFILE", "ENOSPC")), ("unlink", ("EIO",)), ("flock", ("ENOLCK",)),
             ("fstat", ("EIO",)), ("close", ("EIO",)), ("read", ("EIO", "short", "EINTR")), ("alloc", ("ENOMEM",)))
    MOST = 6

    def setUp(self):
        super().setUp()
        self.state = {}
        self.errors = None
        self.in_order = False

    def clean(self):
        super().clean()
        for name, data in self.state.items():
            with open(f"{self.dir}/{name}", "wb") as f:
                f.write(data)

    def keep(self):
        """What is there now is where each run starts."""
        self.state = {}
        for name in os.listdir(self.dir):
            if name.startswith("out"):
                with open(f"{self.dir}/{name}", "rb") as f:
                    self.state[name] = f.read()

    def committed(self, path=None):
        got = results(self.out) if os.path.exists(self.out) else []
        if self.errors and os.path.exists(self.errors):
            wrong = results(self.errors)
            for line in wrong:
                self.assertIn(b'"error"', line)
            got = got + wrong
        return got if self.in_order else sorted(got)

    def readable(self, where):
        """Half-way between two sets of files only the next start knows them; but lines are whole."""
        if self.in_order or self.state:
            for line in results(self.out) if os.path.exists(self.out) and not self.torn() else []:
                json.loads(line)
        else:
            super().readable(where)

    def torn(self):
        """An uncommitted tail may end anywhere."""
        with open(self.out, "rb") as f:
            data = f.read()
        return data and (self.out.endswith(".lz4") or not data.endswith(b"\n"))

    def every(self, *more):
        for call, hows in self.EVERY:
            n = self.count(*more, call=call, path=None if call == "alloc" else "out")[0]
            for i in self.sample(n, self.MOST):
                for how in hows if FULL else (hows[i % len(hows)],):
                    where = f"{call} {i} of {n}: {how}"
                    env = fault(call, i, how, path=None if call == "alloc" else "out",
                                start=i % 2 == 0 and how not in ("short", "EINTR"))
                    with self.subTest(where):
                        harmless = how in ("short", "EINTR")
                        self.one(where, env, *more, codes=(1,) if harmless else (1, 70, 73, 74))

    def half(self, *more):
        """A job that is killed after some of its commits."""
        self.clean()
        p = subprocess.run([BATCHGEN, *self.args(*EACH, *more)], capture_output=True,
                           env=fault("sync", 9, "sig9", path="out"))
        self.assertEqual(p.returncode, -9, p.stderr)
        self.keep()

    def test_going_on(self):
        for out in ("out.jsonl", "out.jsonl.lz4"):
            self.out = f"{self.dir}/{out}"
            self.state = {}
            self.half()
            self.every(*EACH)

    def test_two_files(self):
        self.errors = f"{self.dir}/out.errors.jsonl"
        self.every(*EACH, "--error-file", self.errors)
        self.half("--error-file", self.errors)
        self.every(*EACH, "--error-file", self.errors)

    def test_sorting(self):
        lines = {json.loads(x).get("custom_id") or json.loads(x)["id"]: x for x in self.want}
        self.want = [lines[x] for x in "abcdefg"]
        self.in_order = True
        self.every("--ordered")

    def test_failed_ones_again(self):
        self.clean()
        self.start(environment())
        self.keep()
        self.every("--retry-failed")

    def test_changed_input(self):
        self.clean()
        self.start(environment())
        self.keep()
        changed = records()
        del changed[1]
        changed[2]["prompt"] = "nobody has been"
        changed.reverse()
        self.input = write_lines(f"{self.dir}/changed.jsonl", changed)
        os.replace(self.input, f"{self.dir}/in2.jsonl")
        self.input = f"{self.dir}/in2.jsonl"
        self.start(environment(), "--on-input-change=match")
        self.want = sorted(results(self.out))
        self.assertEqual(len(self.want), 6)
        self.every("--on-input-change=match")


class Commands(Faults):
    """The other commands: they succeed with what they always say, or say that they do not."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.results = f"{cls.dir}/made.jsonl"
        for name, more in (("made.jsonl", []), ("made.jsonl.lz4", []), ("shard1.jsonl", ["--shard", "1/2"]),
                           ("shard2.jsonl", ["--shard", "2/2"])):
            batchgen("run", cls.input, "-o", f"{cls.dir}/{name}", "-m", MODEL, *SMALL, *EACH, *more, code=None)

    def files(self):
        """What a command has made; a journal's start times are other ones each time."""
        got = {}
        for name in sorted(os.listdir(self.dir)):
            if name.startswith("out"):
                got[name] = None
                if name.endswith(".journal"):
                    continue
                with open(f"{self.dir}/{name}", "rb") as f:
                    got[name] = f.read()
        return got

    @staticmethod
    def ageless(text):
        return re.sub(rb"[0-9.]+ ?[a-z]+ ago", b"X ago", text)

    def try_out(self, where, args, env, want, before):
        self.clean()
        for name, data in before.items():
            with open(f"{self.dir}/{name}", "wb") as f:
                f.write(data)
        try:
            p = subprocess.run([BATCHGEN, *args], env=dict(env, FAULT_COUNT=self.fresh_counts()), capture_output=True, timeout=60)
        except subprocess.TimeoutExpired:
            self.fail(f"{where}: hangs")
        self.counts()
        if p.returncode == want[0]:
            self.assertEqual(self.ageless(p.stdout), self.ageless(want[1]), where)
            self.assertEqual(self.files(), want[2], where)
            for name in want[2]:
                if name.endswith(".journal"):
                    batchgen("cat", f"{self.dir}/{name[:-8]}")
        else:
            self.assertIn(p.returncode, (70, 73, 74), f"{where}: {p.returncode} {p.stderr}")
            self.assertTrue(p.stderr.startswith(b"batchgen: "), f"{where}: {p.stderr}")
            self.assertNotIn(b"this is a bug", p.stderr, where)
        return p.returncode

    def sweep(self, args, most=12, before=(), calls=(("alloc", ("ENOMEM",)),)):
        before = dict(before)
        for name, data in before.items():
            with open(f"{self.dir}/{name}", "wb") as f:
                f.write(data)
        self.clean()
        for name, data in before.items():
            with open(f"{self.dir}/{name}", "wb") as f:
                f.write(data)
        p = subprocess.run([BATCHGEN, *args], env=environment(), capture_output=True, timeout=60)
        want = p.returncode, p.stdout, self.files()
        self.assertIn(p.returncode, (0, 1, 65), p.stderr)
        failed = 0
        for call, hows in calls:
            what = None if call == "alloc" else "out|made|shard"
            self.try_out("count", args, fault(call, path=what), want, before)
            n = self.counts()[0]
            for i in self.sample(n, most):
                for how in hows if FULL else (hows[i % len(hows)],):
                    where = f"{args[0]}: {call} {i} of {n}: {how}"
                    with self.subTest(where):
                        failed += self.try_out(where, args, fault(call, i, how, path=what, start=i % 2 == 0), want,
                                               before) != want[0]
        self.assertGreater(failed, 0)
        # and a run without a fault over whatever the last one left
        p = subprocess.run([BATCHGEN, *args], env=environment(), capture_output=True, timeout=60)
        return p.returncode, p.stderr

    FILES = (("alloc", ("ENOMEM",)), ("write", ("ENOSPC", "EIO", "short+EDQUOT")), ("sync", ("EIO",)), ("read", ("EIO",)),
             ("open", ("EMFILE", "EIO")), ("rename", ("EIO",)))

    def test_check(self):
        self.sweep(["check", self.input, "-m", MODEL, "--text-threads", "1"], most=30)
        self.sweep(["check", self.input, "--json", "--text-threads", "1"])

    def test_status(self):
        for name in ("made.jsonl", "made.jsonl.lz4"):
            self.sweep(["status", f"{self.dir}/{name}"], calls=self.FILES[:1] + self.FILES[3:5])

    def test_cat(self):
        self.sweep(["cat", f"{self.dir}/made.jsonl.lz4"], calls=self.FILES[:1] + self.FILES[3:5])
        self.sweep(["cat", f"{self.dir}/made.jsonl", "--ordered", "--fields", "id,text"])
        for name in ("out.jsonl", "out.jsonl.gz"):
            self.sweep(["cat", f"{self.dir}/made.jsonl", "--ordered", "-o", f"{self.dir}/{name}"], calls=self.FILES)

    def test_merge(self):
        code, err = self.sweep(["merge", f"{self.dir}/shard1.jsonl", f"{self.dir}/shard2.jsonl", "-o", f"{self.dir}/out.m.jsonl"],
                               calls=self.FILES)

    def test_repair(self):
        with open(f"{self.dir}/made.jsonl", "rb") as f:
            data = f.read()
        self.sweep(["repair", f"{self.dir}/out.r.jsonl"], calls=self.FILES, before={"out.r.jsonl": data})


class Inputs(Faults):
    def test_bad_device_under_the_input(self):
        """A read that fails is an error; one that is short or interrupted is not."""
        packed = f"{self.dir}/in.jsonl.gz"
        with open(self.input, "rb") as f, gzip.open(packed, "wb") as g:
            g.write(f.read())
        for inp in (self.input, packed):
            name = os.path.basename(inp)
            for who, model in ((name, MODEL), ("tiny.gguf", MODEL)):
                self.clean()
                args = ["run", inp, "-o", self.out, "-m", model, "-q", *SMALL]
                p = subprocess.run([BATCHGEN, *args], env=fault("read", count=self.fresh_counts(), path=who),
                                   capture_output=True, timeout=60)
                n = self.counts()[0]
                for how, codes in (("EIO", (74,)), ("short", (1,)), ("EINTR", (1,))):
                    for i in range(1, n + 1):
                        with self.subTest(f"read {i} of {n} of {who}: {how}"):
                            self.clean()
                            p = subprocess.run([BATCHGEN, *args], env=fault("read", i, how, who), capture_output=True, timeout=60)
                            self.assertIn(p.returncode, codes, p.stderr)
                            if how == "EIO":
                                self.assertIn(who.encode(), p.stderr)
                                self.assertIn(b"Input/output error", p.stderr)
                            p = subprocess.run([BATCHGEN, *args], env=environment(), capture_output=True, timeout=60)
                            self.assertEqual(self.committed(), self.want, p.stderr)


class Devices(Faults):
    """Real full disks, pipes and limits, without the shim."""

    @contextlib.contextmanager
    def small_disk(self):
        disk = f"{self.dir}/disk"
        os.makedirs(disk, exist_ok=True)
        if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", disk],
                                               capture_output=True).returncode != 0:
            self.skipTest("mounting a tmpfs is not permitted here")
        try:
            yield disk
        finally:
            subprocess.run(["umount", disk], check=True)

    @staticmethod
    def remount(disk, how):
        subprocess.run(["mount", "-o", f"remount,{how}", disk], check=True)

    def test_small_disk(self):
        inp = write_lines(f"{self.dir}/many.jsonl", [{"id": i, "prompt": f"text {i}", "max_tokens": 12, "logprobs": 3,
                                                      "ignore_eos": True} for i in range(60)])
        whole = f"{self.dir}/whole.jsonl"
        batchgen("run", inp, "-o", whole, "-m", MODEL, *SMALL)
        self.assertGreater(os.path.getsize(whole), 100_000)
        with self.small_disk() as disk:
            for name in ("o.jsonl", "o.jsonl.lz4"):
                out = f"{disk}/{name}"
                args = ["run", inp, "-o", out, "-m", MODEL, "-q", *SMALL, "--commit-bytes", "1"]
                for _ in range(2):  # a second start in vain takes nothing away
                    _, err = self.run_with(*args, code=74)
                    self.assertIn(out, err)
                    self.assertIn(os.strerror(errno.ENOSPC), err)
                with open(out + ".journal", "rb") as f:
                    self.assertIn(b'{"commit"', f.read())
                self.remount(disk, "size=4m")
                self.run_with(*args, code=0)
                self.assertEqual(sorted(results(out)), sorted(results(whole)))
                os.unlink(out)
                os.unlink(out + ".journal")
                self.remount(disk, "size=64k")

    def test_side_files_on_a_full_disk(self):
        with self.small_disk() as disk:
            with open(f"{disk}/filler", "wb", buffering=0) as f, contextlib.suppress(OSError):
                while f.write(bytes(4096)):
                    pass
            for option, code in (("--summary", 74), ("--metrics-file", 1), ("--log-file", 1)):
                self.clean()
                _, err = self.run_with(*self.args(option, f"{disk}/x"), code=code)
                self.assertEqual(self.committed(), self.want, option)
                if code == 74:
                    self.assertIn(os.strerror(errno.ENOSPC), err)
                self.complete(option)
            self.remount(disk, "ro")
            _, err = self.run_with("run", self.input, "-o", f"{disk}/o.jsonl", "-m", MODEL, code=73)
            self.assertIn(os.strerror(errno.EROFS), err)

    def test_few_descriptors(self):
        for n in (4, 5, 6, 7, 8, 10, 12, 16, 24):  # 3 are too few to load a library
            self.clean()
            code, err = self.run_with(*self.args(), limits=[(resource.RLIMIT_NOFILE, n)])
            self.assertIn(code, (1, 66, 69, 70, 73, 74, 78) if n < 24 else (1,), f"{n} descriptors: {err}")
            if code == 1:
                self.assertEqual(self.committed(), self.want)
            else:
                self.assertIn("batchgen: ", err)
            self.complete(f"{n} descriptors")

    def test_full_and_closed_standard_output(self):
        args = ["run", self.input, "-o", "-", "-m", MODEL, "-q", *SMALL]
        with open("/dev/full", "wb") as full:
            _, err = self.run_with(*args, stdout=full, code=74)
            self.assertIn(os.strerror(errno.ENOSPC), err)
            for other in (["check", self.input, "-m", MODEL], ["check", self.input, "--json"], ["inspect", MODEL],
                          ["tokenize", "-m", MODEL, "x"], ["render", self.input, "-m", MODEL], ["--help"], ["--job-schema"]):
                _, err = self.run_with(*other, stdout=full, code=74)
                self.assertIn("standard output", err, other)
        r, w = os.pipe()
        os.close(r)
        _, err = self.run_with(*args, stdout=w, code=74)
        os.close(w)
        self.assertIn(os.strerror(errno.EPIPE), err)
        p = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", BATCHGEN, *args], env=environment(), capture_output=True)
        self.assertEqual(p.returncode, 74)
        _, err = self.run_with("run", self.input, "-o", "/dev/full", "-m", MODEL, code=64)
        self.assertIn("/dev/full", err)

    def test_closed_streams_get_no_file(self):
        """With all three closed, files get their numbers; no message may land in one."""
        self.clean()
        p = subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", BATCHGEN, "run", self.input, "-o", self.out, "-m",
                            MODEL, "--progress", "0.001", *SMALL], env=environment())
        self.assertEqual(p.returncode, 1)
        self.assertEqual(self.committed(), self.want)
        self.complete("closed streams")

    def test_limit_of_file_sizes(self):
        for size in (0, 100, 1000, 1800):
            self.clean()
            _, err = self.run_with(*self.args(*EACH), limits=[(resource.RLIMIT_FSIZE, size)], code=74)
            self.assertIn(self.out, err)
            self.assertIn(os.strerror(errno.EFBIG), err)
            self.readable(f"limit {size}")
            self.complete(f"limit {size}", *EACH)

    def test_side_files(self):
        """What cannot be written beside the results takes none of them away."""
        nowhere, full = f"{self.dir}/nowhere/x", "/dev/full"
        for option, path, code in (("--summary", full, 74), ("--summary", nowhere, 73), ("--log-file", full, 1),
                                   ("--metrics-file", nowhere, 1)):
            self.clean()
            _, err = self.run_with(*self.args(option, path), code=code)
            self.assertEqual(self.committed(), self.want, option)
            if code != 1:
                self.assertIn(path, err)
            self.complete(option)
        self.clean()
        _, err = self.run_with(*self.args("--log-file", nowhere), code=73)
        self.assertIn(nowhere, err)
        self.assertFalse(os.path.exists(self.out))
        with open("/dev/full", "wb") as f:  # nobody hears the messages
            p = subprocess.run([BATCHGEN, *self.args()], env=environment(), stderr=f)
        self.assertEqual(p.returncode, 1)
        self.complete("stderr full")

    def test_notification_that_cannot_start(self):
        for call in ("fork", "exec", "pipe2"):
            n = self.count("--notify", "cat > /dev/null", call=call)[0]
            for i in range(1, n + 1):
                where = f"{call} {i} of {n}"
                with self.subTest(where):
                    self.one(where, fault(call, i, "EAGAIN"), "--notify", "cat > /dev/null", codes=(1, 69, 74))

    def test_mode_of_files(self):
        for mask in (0o022, 0o077, 0o002):
            self.clean()
            more = {"--summary": "out.sum", "--log-file": "out.log", "--metrics-file": "out.prom"}
            args = self.args(*[x for k, v in more.items() for x in (k, f"{self.dir}/{v}")])
            p = subprocess.run([BATCHGEN, *args], env=environment(), capture_output=True, umask=mask)
            self.assertEqual(p.returncode, 1, p.stderr)
            for name in ("out.jsonl", "out.jsonl.journal", *more.values()):
                mode = os.stat(f"{self.dir}/{name}").st_mode & 0o7777
                self.assertEqual(mode, 0o666 & ~mask, f"{name}: {mode:o} under {mask:o}")


class Limits(Faults):
    """ulimit -s and -v."""

    @staticmethod
    def nested(n, v=1):
        for _ in range(n):
            v = {"a": v}
        return v

    def hard(self):
        user = [{"role": "user", "content": "x"}]
        return write_lines(f"{self.dir}/hard.jsonl", [
            {"id": "template", "messages": user, "max_tokens": 2, "chat_template_kwargs": {"deep": self.nested(58)}},
            {"id": "ignored", "prompt": "x", "max_tokens": 2, "metadata": self.nested(60)},
            '{"id":"too deep","prompt":"x","m":' + "[" * 100000 + "]" * 100000 + "}",
            {"id": "long", "prompt": "word " * 200_000, "max_tokens": 2},
            {"id": "one word", "prompt": "a" * 300_000, "max_tokens": 2},
            {"id": "wide", "messages": [{"role": "user", "content": "w\u00f6rd \U0001F600" * 50_000}], "max_tokens": 2},
            {"id": "tools", "messages": user, "max_tokens": 2, "tools": [{"type": "function", "function": {
                "name": "f", "description": "d" * 1000, "parameters": self.nested(50)}}] * 50},
            {"id": "stops", "prompt": "x", "max_tokens": 9, "ignore_eos": True, "stop": ["ab" * 500, "ba" * 700]},
            {"id": "many", "prompt": ["x"] * 20, "n": 3, "max_tokens": 3, "logprobs": 20}])

    def test_small_stacks(self):
        inp = self.hard()
        names = [json.loads(x)["id"] for x in results(inp) if not x.startswith(b'{"id":"too')]
        templates = {
            "macros": "{% macro f(n) %}{% call g(n) %}{{ f(n - 1) }}{% endcall %}{% endmacro %}"
                      "{% macro g(n) %}{{ caller() }}{% endmacro %}{{ f(100000) }}",
            "brackets": "{{ " + "(" * 90 + "1" + ")" * 90 + " }}",
            "blocks": "{% for i in [1] %}" * 60 + "x" + "{% endfor %}" * 60,
            "large": "{{ messages[0].content }}" + "some text " * 100_000,
            "data": "{{ deep | tojson }}{{ deep }}{{ deep == deep }}"}
        stack = [(resource.RLIMIT_STACK, 256 << 10)]
        self.run_with("check", inp, "-m", MODEL, limits=stack, code=65, stdout=subprocess.DEVNULL)
        out = f"{self.dir}/out.hard.jsonl"
        self.run_with("run", inp, "-o", out, "-m", MODEL, *SMALL, limits=stack, code=1)
        got = {json.loads(x)["id"]: json.loads(x).get("error", {}).get("code") for x in results(out)}
        self.assertEqual(got, {**dict.fromkeys(names), "too deep": "too_deep", "long": "prompt_too_long",
                               "one word": "prompt_too_long", "wide": "prompt_too_long"})
        for name, text in templates.items():
            path = f"{self.dir}/{name}.jinja"
            with open(path, "w", encoding="utf-8") as f:
                f.write(text)
            _, err = self.run_with("check", inp, "-m", MODEL, "--chat-template", path, limits=stack, code=65,
                                   stdout=subprocess.DEVNULL)

    def test_address_space(self):
        """200 MB of addresses are enough for this model; with less and less it ends in words."""
        for mib in (200, 100, 60, 48, 40, 32, 24, 16, 12):
            limit = [(resource.RLIMIT_AS, mib << 20)]
            self.clean()
            code, err = self.run_with(*self.args(), limits=limit)
            self.assertIn(code, (1,) if mib >= 200 else (1, 70, 74), f"{mib} MiB: {err}")
            if code == 1:
                self.assertEqual(self.committed(), self.want)
            else:
                self.assertRegex(err, "batchgen: .*(memory|temporarily unavailable)")
            self.complete(f"{mib} MiB")
            code, err = self.run_with("check", self.input, "-m", MODEL, limits=limit, stdout=subprocess.DEVNULL)
            self.assertIn(code, (65,) if mib >= 200 else (65, 70, 74), f"{mib} MiB: {err}")
        _, err = self.run_with("run", self.input, "-o", self.out, "-m", MODEL, "--overwrite",  # sizes as they come
                               limits=[(resource.RLIMIT_AS, 1 << 30)], code=1)

    def test_going_on_with_other_memory(self):
        """The context that free memory allowed is the job's: more of it later changes nothing."""
        self.clean()
        args = ["run", self.input, "-o", self.out, "-m", MODEL, "--threads", "2", "--max-num-seqs", "4", *EACH]
        contexts = set()
        for mib, more in ((300, ["--limit", "2"]), (340, ["--limit", "3"]), (400, ["--limit", "4"]), (None, [])):
            limits = [(resource.RLIMIT_AS, mib << 20)] if mib else []
            code, err = self.run_with(*args, *more, limits=limits)
            self.assertIn(code, (0, 1), f"{mib}: {err}")
            contexts.add(re.search(r"context (\d+)", err)[1])
        self.assertEqual(len(contexts), 1)
        self.assertNotEqual(contexts, {"131072"})
        self.assertEqual(self.committed(), self.want)


class CutModel(Faults):
    """A mapped model that becomes shorter: SIGBUS for who reads it."""

    def setUp(self):
        super().setUp()
        self.model = f"{self.dir}/copy.gguf"
        shutil.copy(MODEL, self.model)

    def job(self, *more):
        return ["run", self.input, "-o", self.out, "-m", self.model, "-q", *SMALL, *EACH, *more]

    def test_under_a_rank(self):
        self.clean()
        inp = write_lines(f"{self.dir}/long.jsonl", [{"id": i, "prompt": f"text {i}", "max_tokens": 120, "ignore_eos": True}
                                                    for i in range(24)])
        args = [inp, "-o", self.out, "-m", self.model, "-q", *SMALL, *EACH, "--max-num-seqs", "1"]
        job = start_job(*args)
        while not (os.path.exists(self.out) and os.path.getsize(self.out)):
            self.assertTrue(wait_for_commits(job, self.out, commits(self.out) + 1))
        size = os.path.getsize(self.model)
        os.truncate(self.model, 4096)
        _, err = job.communicate(timeout=60)
        self.assertIn(job.returncode, (69, 78), err)
        self.assertRegex(err.decode(), "rank 0")
        kept = self.committed()
        self.assertTrue(kept)
        shutil.copy(MODEL, self.model)
        self.assertEqual(os.path.getsize(self.model), size)
        batchgen("run", *args)
        self.assertEqual(len(self.committed()), 24)
        self.assertTrue(set(kept) <= set(self.committed()))

    def test_under_the_coordinator(self):
        self.clean()
        p = subprocess.run([BATCHGEN, *self.job()], capture_output=True, timeout=60,
                           env=fault("fstat", 1, "cut", path="copy.gguf"))
        self.assertIn(p.returncode, (74, 78), p.stderr)
        self.assertIn(b"model", p.stderr)
        self.assertEqual(self.committed(), [])
        shutil.copy(MODEL, self.model)
        code, err = self.start(environment(), where="whole again")
        self.assertEqual(code, 1, err)
        self.assertEqual(self.committed(), self.want)

    def test_while_ranks_load(self):
        self.clean()
        p = subprocess.run([BATCHGEN, *self.job()], capture_output=True, timeout=60,
                           env=fault("fstat", 1, "cut", path="copy.gguf", who="grandchild"))
        self.assertIn(p.returncode, (69, 74, 78), p.stderr)
        self.assertIn(b"rank 0", p.stderr)


class NothingRuns(Faults):
    def test_hostile_names(self):
        """No name or text is ever run: no exec, no spawn, no library loaded."""
        marks = [f"{self.dir}/mark{i}" for i in range(9)]
        hostile = [f"$(touch {marks[0]})", f"`touch {marks[1]}`", f"; touch {marks[2]} #", f"| touch {marks[3]}",
                   f"'; touch {marks[4]}; '", f"x\ntouch {marks[5]}\n", "-rf", "%s%n%n", "../../../etc/passwd"]
        recs = [{"id": h, "prompt": h, "model": h, "max_tokens": 2, "stop": [h]} for h in hostile]
        recs += [{"id": h + "c", "messages": [{"role": "user", "content": h, "name": h}], "max_tokens": 2} for h in hostile]
        recs += [{"id": h + "t", "messages": [{"role": "user", "content": "{{ self.__init__ }}{% include '/etc/passwd' %}"}],
                  "max_tokens": 2, "user": h} for h in hostile]
        folder = f"{self.dir}/$(touch mark7);`touch mark8`"
        os.makedirs(folder, exist_ok=True)
        inp = write_lines(f"{folder}/in put;$(touch mark7).jsonl", recs)
        model = f"{folder}/mo`touch mark8`del.gguf"
        shutil.copy(MODEL, model)
        template = f"{folder}/$(touch mark7).jinja"
        with open(template, "w", encoding="utf-8") as f:
            f.write("{{ messages[0].content }}{{ ''.__class__ }}{{ cycler.__init__.__globals__.os.popen('touch mark8') }}")
        for i, more in enumerate(([], ["--chat-template", template])):
            out = f"{folder}/o;$(touch mark7)`touch mark8`{i}.jsonl.lz4"
            env = fault("exec", who="all", count=self.fresh_counts())
            p = subprocess.run([BATCHGEN, "run", inp, "-o", out, "-m", model, *SMALL, *more], env=env, cwd=self.dir,
                               capture_output=True, timeout=60)
            self.assertIn(p.returncode, (0, 1), p.stderr)
            self.assertEqual(self.counts()[:3], (0, 0, 0))
            self.assertEqual(len(results(out)), len(recs))
        self.assertEqual([x for x in os.listdir(self.dir) if x.startswith("mark")], [])

    def test_the_counter_counts(self):
        """A notification is run, by a shell: the count above can be other than zero."""
        self.clean()
        env = fault("exec", who="all", count=self.fresh_counts())
        code, err = self.start(env, "--notify", "cat > /dev/null")
        self.assertEqual(code, 1, err)
        self.assertGreater(sum(self.counts()[:3]), 0)


if __name__ == "__main__":
    unittest.main(verbosity=1)
