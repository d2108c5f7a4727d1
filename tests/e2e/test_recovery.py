#!/usr/bin/env python3
"""What a start finds, and what it does then: torn tails, files lost, older or another job's, an
input or options that changed, signals, locks, clocks."""
import json
import os
import pty
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest

from common import (BATCHGEN, SANITIZED, TMP, alive, batchgen, by_line, commits, descendants, digest, environment, make_model,
                    prompts, results, start_job, wait_for_commits, write_lines)

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "crash"))
from journal import Journal, check, decompress, ranges, read  # noqa: E402

CASES = "tests/golden/cases"
EACH = ["--commit-bytes", "1", "--commit-interval", "0.01"]
SLOW = ["--threads", "1", "--max-num-seqs", "2", *EACH]  # seen half-way, whatever the machine
MODEL = f"{TMP}/m.gguf"
OTHER = f"{TMP}/other.gguf"


def setUpModule():
    make_model(MODEL)
    make_model(OTHER, "tiny-llama", "q4_k_m", "--seed", "2")


def write(path, data):
    with open(path, "wb") as f:
        f.write(data)


def small(n=24):
    return [{"id": f"r{i}", "prompt": "light " * (i % 5 + 1), "max_tokens": 4 + i % 7, "ignore_eos": True}
            for i in range(n)]


class Case(unittest.TestCase):
    def setUp(self):
        self.dir = tempfile.mkdtemp(dir=TMP)

    def path(self, name):
        return f"{self.dir}/{name}"

    def run_job(self, inp, out, *args, code=0, **kw):
        return batchgen("run", inp, "-o", out, "-m", MODEL, *args, code=code, **kw)

    def stop_half_way(self, inp, out, *args, n=4, model=MODEL):
        """Kills a run after n more commits of results."""
        for _ in range(20):
            goal = self.result_commits(out) + n
            job = start_job(inp, "-o", out, "-m", model, *args)
            while job.poll() is None and self.result_commits(out) < goal:
                select.select([], [], [], 0.002)
            caught = job.poll() is None
            job.kill()
            job.communicate()
            if caught and Journal(read(out + ".journal")).end is None:
                return Journal(read(out + ".journal"))
            for name in (out, out + ".journal"):
                os.unlink(name)
        raise AssertionError("never caught half-way")

    @staticmethod
    def result_commits(out):
        """Without those that only save tokens."""
        raw = read(out + ".journal") or b""
        return raw.count(b'{"commit"') - raw.count(b'"bytes":0,"text":0')

    def files(self, *paths):
        return [read(p) for p in paths]

    def refused(self, out, run, *says, code=64):
        """run() is refused with these words and changes nothing."""
        before = self.files(out, out + ".journal"), sorted(os.listdir(self.dir))
        _, err = run(code)
        self.assertEqual(before, (self.files(out, out + ".journal"), sorted(os.listdir(self.dir))), "touched")
        for word in says:
            self.assertIn(word.encode(), err)
        return err


class TornTails(Case):
    """Whatever follows the last commit goes; the records are run again; the result is the same."""

    def both(self, test):
        for name in ("out.jsonl.lz4", "out.jsonl"):
            inp, out = write_lines(self.path("in.jsonl"), small()), self.path(name)
            self.run_job(inp, self.path("want-" + name))
            want = sorted(results(self.path("want-" + name)))
            journal = self.stop_half_way(inp, out, *SLOW)
            end = journal.commits[-1]["offset"] + journal.commits[-1]["bytes"]
            good = read(out)[:end], read(out + ".journal")

            def resume(data, journal, why):
                write(out, data)
                write(out + ".journal", journal)
                self.run_job(inp, out, "-q", "--threads", "1")
                self.assertEqual(sorted(results(out)), want, (name, why))

            test(good[0], good[1], resume)

    def test_output_cut(self):
        def test(data, journal, resume):
            step = 1 if data[:1] != b"{" else 9  # of lz4 every length
            for n in list(range(1, 65, step)) + [len(data) - 1]:
                resume(data[:len(data) - n], journal, f"{n} bytes cut")
        self.both(test)

    def test_journal_cut(self):
        def test(data, journal, resume):
            for n in range(1, 65, 6):
                resume(data, journal[:len(journal) - n], f"{n} bytes cut")
        self.both(test)

    def test_zeros_appended(self):
        def test(data, journal, resume):
            for n in [1, 2, 7, 32, 64]:
                resume(data + bytes(n), journal, f"{n} zeros")
                resume(data, journal + bytes(n), f"{n} zeros in the journal")
        self.both(test)

    def test_noise_appended(self):
        rnd = random.Random(3)

        def test(data, journal, resume):
            for n in [1, 2, 7, 32, 64]:
                resume(data + rnd.randbytes(n), journal, f"{n} bytes of noise")
                resume(data, journal + rnd.randbytes(n), f"{n} bytes of noise in the journal")
                resume(data + rnd.randbytes(n), journal + rnd.randbytes(n), f"{n} bytes of noise in both")
        self.both(test)

    def test_whole_units_that_no_entry_names(self):
        """A frame, or lines, that were written but not committed: they go, and are not twice."""
        def test(data, journal, resume):
            last = Journal(journal).commits[-1]
            resume(data + data[last["offset"]:last["offset"] + last["bytes"]], journal, "the last commit again")
        self.both(test)

    def test_nothing_is_glued_to_a_torn_line(self):
        inp, out = write_lines(self.path("in.jsonl"), small()), self.path("out.jsonl")
        self.stop_half_way(inp, out, *SLOW)
        with open(out, "ab") as f:
            f.write(b'{"line":24,"id":"r23","te')
        self.run_job(inp, out)
        self.assertEqual(sorted(by_line(out)), list(range(1, 25)))


class Lost(Case):
    """Files that are missing, older, or of another job."""

    def setUp(self):
        super().setUp()
        self.inp = write_lines(self.path("in.jsonl"), small())
        self.out = self.path("out.jsonl.lz4")
        self.journal = self.out + ".journal"
        self.run_job(self.inp, self.path("want.jsonl"))
        self.want = sorted(results(self.path("want.jsonl")))

    def again(self, code=0, *args):
        return self.run_job(self.inp, self.out, *args, code=code)

    def half(self, n=4):
        return self.stop_half_way(self.inp, self.out, *SLOW, n=n)

    def test_journal_lost(self):
        for finished in (False, True):
            self.again() if finished else self.half()
            for lose in (os.unlink, lambda p: write(p, b"")):
                lose(self.journal)
                self.refused(self.out, lambda code: self.again(code), "journal", "repair", "--overwrite", code=65)
            self.again(0, "--overwrite")
            self.assertEqual(sorted(results(self.out)), self.want)

    def test_output_lost(self):
        """A finished job whose results are gone is not done, and not silently begun again."""
        self.again()
        journal = read(self.journal)
        os.unlink(self.out)
        _, err = self.again(65)
        self.assertIn(b"--overwrite", err)
        self.assertEqual(read(self.journal), journal)
        self.assertFalse(os.path.exists(self.out), "made by the refused start")
        write(self.out, b"")
        self.refused(self.out, lambda code: self.again(code), "journal", "--overwrite", code=65)
        self.again(0, "--overwrite")
        self.assertEqual(sorted(results(self.out)), self.want)

    def test_results_lost(self):
        """What the journal tells of beyond the output's end: said, also to --quiet, and run again."""
        journal = self.half(8)
        data, first = read(self.out), next(c for c in journal.commits if c["bytes"])
        write(self.out, b"")  # all of them: somebody has taken the file away
        self.refused(self.out, lambda code: self.again(code), "put it back", "--overwrite", code=65)
        for keep in (1, first["bytes"], first["bytes"] + 1):
            write(self.out, data[:keep])
            shutil.copy(self.journal, self.path("kept"))
            _, err = self.again(0, "-q")
            lost = len(journal.done) - (len(ranges(first["records"])) if keep > 1 else 0)
            self.assertIn(f"{lost} results that were committed are not in the file any more".encode(), err)
            self.assertEqual(sorted(results(self.out)), self.want)
            shutil.copy(self.path("kept"), self.journal)

    def test_journal_of_another_job(self):
        other = self.path("other.jsonl.lz4")
        self.run_job(self.inp, other, "--temperature", "0.5")
        self.half()
        shutil.copy(other + ".journal", self.journal)
        self.refused(self.out, lambda code: self.again(code), "another job", "temperature")

    def test_journal_of_another_output_of_the_same_job(self):
        """Its commits name bytes that this output does not have: nothing may be cut for that."""
        other = self.path("other.jsonl.lz4")
        self.again()
        self.run_job(self.inp, other, "--max-num-seqs", "1", *EACH)
        shutil.copy(other + ".journal", self.journal)
        self.refused(self.out, lambda code: self.again(code), code=65)

    def test_journal_that_is_older(self):
        """The output has whole commits that it does not know: no crash leaves more than one."""
        self.half(3)
        older = read(self.journal)
        self.half(5)
        write(self.journal, older)
        err = self.refused(self.out, lambda code: self.again(code), "repair", code=65)
        self.assertIn(b"journal", err)

    def test_how_much_is_cut_is_said(self):
        """Of a plain output nobody can tell a torn tail from what an older journal does not know."""
        self.out = self.path("out.jsonl")
        self.journal = self.out + ".journal"
        end = self.half(4).commits[-1]
        with open(self.out, "r+b") as f:
            f.truncate(end["offset"] + end["bytes"])
            f.seek(0, os.SEEK_END)
            f.write(b"x" * 123)
        _, err = self.again()
        self.assertIn(b"tail of 123 bytes", err)
        self.assertEqual(sorted(results(self.out)), self.want)

    def test_damage_before_the_end_is_refused(self):
        self.half(6)
        data, journal = read(self.out), read(self.journal)
        second = [c for c in Journal(journal).commits if c["bytes"]][1]
        for at in (second["offset"] + second["bytes"] // 2, 5):
            write(self.out, data[:at] + bytes([data[at] ^ 1]) + data[at + 1:])
            self.refused(self.out, lambda code: self.again(code), "repair", code=65)
        write(self.out, data)
        at = journal.index(b'{"commit"') + 20
        write(self.journal, journal[:at] + b"#" + journal[at + 1:])
        self.refused(self.out, lambda code: self.again(code), "repair", code=65)
        write(self.journal, journal)
        self.again()
        self.assertEqual(sorted(results(self.out)), self.want)

    def test_something_else_in_its_place(self):
        write(self.out, b"a text that nobody wrote for us\n")
        self.refused(self.out, lambda code: self.again(code), "--overwrite", code=65)
        os.unlink(self.out)
        write(self.journal, b"a text that nobody wrote for us\n")
        _, err = self.again(65)
        self.assertEqual(read(self.journal), b"a text that nobody wrote for us\n")
        self.assertIn(b"journal", err)


class Changed(Case):
    """Another input, model or option: refused, and nothing is touched."""

    def setUp(self):
        super().setUp()
        self.records = small()
        self.inp = write_lines(self.path("in.jsonl"), self.records)
        self.out = self.path("out.jsonl.lz4")
        self.stop_half_way(self.inp, self.out, *SLOW)
        with open(self.out, "ab") as f:
            f.write(b"torn")  # must stay, too

    def again(self, code=64, *args):
        return self.run_job(self.inp, self.out, *args, code=code)

    def test_input(self):
        good = read(self.inp)
        lines = good.splitlines(keepends=True)
        for name, data in (("edited at once", good.replace(b"light", b"night", 1)),
                           ("edited behind", good[:-40].rstrip() + b" " * (len(good) - len(good[:-40].rstrip()))),
                           ("grown", good + lines[0].replace(b"r0", b"r99")),
                           ("truncated", b"".join(lines[:-3])), ("empty", b""),
                           ("replaced", b'{"prompt":"x"}\n' * 24),
                           ("swapped", b"".join([lines[1], lines[0], *lines[2:]])),
                           ("one line less, same size", b" " * (len(lines[0]) - 1) + b"\n" + b"".join(lines[1:]))):
            write(self.inp, data)
            with self.subTest(name):
                err = self.refused(self.out, self.again)
                self.assertIn(b"input", err)
        os.unlink(self.inp)
        self.refused(self.out, self.again, code=66)
        write(self.inp, good)
        self.again(0)
        self.assertEqual(sorted(by_line(self.out)), list(range(1, 25)))

    def test_input_of_another_name_with_the_same_content(self):
        shutil.move(self.inp, self.path("moved.jsonl"))
        self.inp = self.path("moved.jsonl")
        self.again(0)
        self.assertEqual(sorted(by_line(self.out)), list(range(1, 25)))

    def test_model(self):
        def run(code):
            return batchgen("run", self.inp, "-o", self.out, "-m", OTHER, code=code)
        self.refused(self.out, run, "model")

    def test_options(self):
        for args, name in ((["--temperature", "0.25"], "temperature"), (["--top-k", "3"], "top_k"),
                           (["--top-p", "0.5"], "top_p"), (["--min-p", "0.1"], "min_p"), (["--seed", "4"], "seed"),
                           (["--repetition-penalty", "1.5"], "repetition_penalty"),
                           (["--presence-penalty", "1"], "presence_penalty"),
                           (["--frequency-penalty", "1"], "frequency_penalty"), (["--max-tokens", "9"], "max_tokens"),
                           (["--min-tokens", "2"], "min_tokens"), (["--stop", "x"], "stop"),
                           (["--ignore-eos"], "ignore_eos"), (["--max-model-len", "512"], "max_model_len"),
                           (["--compute", "f32"], "compute"), (["--kv-cache-dtype", "f32"], "kv_cache_dtype"),
                           (["--tensor-parallel-size", "2"], "tensor_parallel_size"),
                           (["--max-nesting", "32"], "max_nesting"), (["--max-n", "2"], "max_n")):
            with self.subTest(name):
                err = self.refused(self.out, lambda code, args=args: self.again(code, *args), name, "--overwrite")
                self.assertEqual(err.count(b" was "), 2 if name == "compute" else 1, err)  # it sets the cache's type

    def test_several_differences_are_all_named(self):
        self.refused(self.out, lambda code: self.again(code, "--seed", "9", "--top-k", "5"), "seed", "top_k", "5", "9")

    def test_options_that_change_no_result_are_fine(self):
        self.again(0, "--max-num-seqs", "3", "--threads", "1", "--no-prefix-cache", "--commit-bytes", "77")
        self.assertEqual(sorted(by_line(self.out)), list(range(1, 25)))


class LongAnswer(Case):
    def test_goes_on_where_it_was(self):
        """2,000 tokens, killed again and again: what is saved is not generated again."""
        records = [{"id": "long", "prompt": "Tell me everything", "max_tokens": 2000, "ignore_eos": True},
                   {"id": "drawn", "prompt": "and more", "max_tokens": 1900, "ignore_eos": True, "temperature": 0.9,
                    "seed": 5}]
        inp, out = write_lines(self.path("in.jsonl"), records), self.path("out.jsonl")
        args = ["--commit-bytes", "1MiB", "--commit-interval", "0.02", "--max-model-len", "4096", "--threads", "1",
                "--compute", "f32"]  # slow
        self.run_job(inp, self.path("want.jsonl"), *args[4:])
        want = by_line(self.path("want.jsonl"))
        answers = {1: 2000, 2: 1900}
        saved, resumed = {}, 0
        for more in (40, 100, 100, 200, 200):
            goal = max(map(len, saved.values()), default=0) + more
            job = start_job(inp, "-o", out, "-m", MODEL, *args)
            while job.poll() is None:
                raw = read(out + ".journal") or b""
                if sorted(map(len, Journal(raw).partial.values()))[-2:-1] >= [goal]:  # of both
                    break
                select.select([], [], [], 0.002)
            self.assertIsNone(job.poll(), "it ended before it was killed")
            job.kill()
            job.communicate()
            journal = Journal(read(out + ".journal"))
            for key, tokens in saved.items():
                self.assertEqual(journal.partial[key][:len(tokens)], tokens, "saved tokens became fewer or others")
            froms = [e for e in journal.froms if e[0] in saved and e[1] == len(saved[e[0]])]
            resumed += len({key for key, _, _ in froms})
            saved = dict(journal.partial)
        self.assertEqual(len(saved), 2)
        self.assertGreaterEqual(resumed, 8, "entries that continue what was saved before the kill")
        batchgen("run", inp, "-o", out, "-m", MODEL, *args, "--summary", self.path("sum.json"))
        self.assertEqual(by_line(out), want)
        with open(self.path("sum.json")) as f:
            made = json.load(f)["usage"]["output_tokens"]
        self.assertEqual(made, sum(answers.values()) - sum(map(len, saved.values())))


SHIM = r"""
#define _GNU_SOURCE
#include <stdatomic.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

/* The wall clock jumps by up to ten days back and forth, at every reading. */
static long jump(void)
{
    static _Atomic unsigned long n;
    unsigned long x = atomic_fetch_add(&n, 1) * 2654435761ul + (unsigned long)getpid();
    return (long)(x >> 7) % 1728000 - 864000;
}
int clock_gettime(clockid_t id, struct timespec *t)
{
    int rc = (int)syscall(SYS_clock_gettime, id, t);
    if (rc == 0 && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) t->tv_sec += jump();
    return rc;
}
int gettimeofday(struct timeval *restrict t, void *restrict zone)
{
    struct timespec s;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &s);
    t->tv_sec = s.tv_sec;
    t->tv_usec = s.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *out)
{
    struct timespec s;
    clock_gettime(CLOCK_REALTIME, &s);
    if (out) *out = s.tv_sec;
    return s.tv_sec;
}
"""


class Clock(Case):
    @unittest.skipIf(SANITIZED, "a sanitizer's own library must be the first to be loaded")
    def test_wall_clock_jumps(self):
        shim = self.path("shim.so")
        write_lines(self.path("shim.c"), [SHIM])
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", shim, self.path("shim.c")], check=True)
        env = environment(LD_PRELOAD=shim)
        out, _ = subprocess.Popen(["date", "+%s"], env=env, stdout=subprocess.PIPE).communicate()
        inp = write_lines(self.path("in.jsonl"), prompts(40))
        self.run_job(inp, self.path("want.jsonl"))
        out = self.path("out.jsonl")
        args = [inp, "-o", out, "-m", MODEL, *SLOW]
        for n in (2, 9):
            job = subprocess.Popen([BATCHGEN, "run", *args], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, env=env)
            self.assertTrue(wait_for_commits(job, out, n))
            job.kill()
            job.communicate()
        batchgen("run", *args, "--progress", "0.01", "--time-limit", "1h", env=env)
        self.assertEqual(by_line(out), by_line(self.path("want.jsonl")))
        starts = [e["run"]["start"] for e in Journal(read(out + ".journal")).entries if "run" in e]
        self.assertTrue(starts)


class Locks(Case):
    def setUp(self):
        super().setUp()
        self.inp = write_lines(self.path("in.jsonl"), prompts(60))
        self.out = self.path("out.jsonl.lz4")
        self.args = [self.inp, "-o", self.out, "-m", MODEL, *SLOW]

    def test_twenty_at_once(self):
        """One works, the others end with 75 and change nothing."""
        self.run_job(self.inp, self.path("want.jsonl"))
        jobs = [start_job(*self.args, "--ignore-eos", "--max-tokens", "200") for _ in range(20)]
        errs = [j.communicate()[1] for j in jobs]
        codes = sorted(j.returncode for j in jobs)
        self.assertEqual(set(codes), {0, 75}, errs)
        # One that starts after the winner has ended says that there is nothing to do.
        self.assertEqual(codes.count(0), 1 + sum(b"nothing to do" in e for e in errs), errs)
        self.assertGreaterEqual(codes.count(75), 1)
        journal = Journal(read(self.out + ".journal"))
        self.assertEqual(journal.runs, 1)
        self.assertEqual(sorted(by_line(self.out)), list(range(1, 61)))

    def test_second_start_changes_nothing(self):
        """The first is stopped still, so that every byte of both files must stay."""
        job = start_job(*self.args)
        try:
            self.assertTrue(wait_for_commits(job, self.out, 2))
            job.send_signal(signal.SIGSTOP)
            while b") T " not in read(f"/proc/{job.pid}/stat"):
                select.select([], [], [], 0.001)
            before = self.files(self.out, self.out + ".journal"), sorted(os.listdir(self.dir))
            _, err = batchgen("run", *self.args, code=75)
            self.assertIn(b"another run", err)
            self.assertIn(str(job.pid).encode(), err)
            batchgen("run", *self.args, "--overwrite", code=75)
            batchgen("run", *self.args, "--retry-failed", code=75)
            self.assertEqual(before, (self.files(self.out, self.out + ".journal"), sorted(os.listdir(self.dir))))
        finally:
            job.kill()
            job.communicate()

    def test_lock_comes_before_the_model(self):
        job = start_job(*self.args)
        try:
            self.assertTrue(wait_for_commits(job, self.out, 1))
            write(self.path("bad.gguf"), b"no model at all")
            batchgen("run", *self.args[:3], "-m", self.path("bad.gguf"), code=75)
        finally:
            job.kill()
            job.communicate()

    def test_lock_is_free_after_a_kill(self):
        for n in (1, 5, 9):
            job = start_job(*self.args)
            wait_for_commits(job, self.out, n)
            job.kill()
            job.communicate()
        batchgen("run", *self.args)  # at once: nothing to clean, nothing to wait for

    def test_wait(self):
        job = start_job(*self.args)
        self.assertTrue(wait_for_commits(job, self.out, 2))
        second = start_job(*self.args, "--wait", "5m")
        third = start_job(*self.args, "--wait", "0.2")
        _, err = third.communicate()
        if job.poll() is None:
            self.assertEqual(third.returncode, 75, err)
        job.kill()
        job.communicate()
        _, err = second.communicate()
        self.assertEqual(second.returncode, 0, err)
        self.assertEqual(sorted(by_line(self.out)), list(range(1, 61)))


class StopAndResume(Case):
    """tests/golden/cases, 14: resume.jsonl and resume_edited.jsonl."""

    def setUp(self):
        super().setUp()
        self.inp = self.path("in.jsonl")
        shutil.copy(f"{CASES}/resume.jsonl", self.inp)
        self.out = self.path("out.jsonl.lz4")
        self.args = ["--ignore-eos"]

    def want(self, inp=None):
        out = self.path("want.jsonl")
        self.run_job(inp or self.inp, out, *self.args, "--overwrite")
        return self.by_id(out)

    def by_id(self, out):
        found = {}
        for raw in results(out):
            r = json.loads(raw)
            self.assertNotIn(r["custom_id"], found, "twice")
            found[r["custom_id"]] = r
        return found

    def answer(self, r):
        return r["response"]["body"]["choices"], r["response"]["body"]["usage"], r["error"]

    def test_1_killed_until_it_ends(self):
        want, rnd, kills = self.want(), random.Random(1), 0
        for _ in range(60):
            before = commits(self.out)
            job = start_job(self.inp, "-o", self.out, "-m", MODEL, *self.args, *SLOW)
            if wait_for_commits(job, self.out, before + rnd.randint(1, 4)):
                job.kill()
                kills += 1
            job.communicate()
            if job.returncode == 0:
                break
        else:  # a slow machine: it was killed often enough
            self.run_job(self.inp, self.out, *self.args)
        self.assertGreater(kills, 5)
        got = self.by_id(self.out)
        self.assertEqual(len(got), 40)
        self.assertEqual(got, want)
        texts = {json.dumps(got[f"r-{i}"]["response"]["body"]["choices"]) for i in range(11, 21)}
        self.assertEqual(len(texts), 1, "equal prompts, decoded greedily")

    def test_2_and_3_torn_ends(self):
        want = self.want()
        self.stop_half_way(self.inp, self.out, *self.args, *SLOW, n=6)
        good, rnd = self.files(self.out, self.out + ".journal"), random.Random(2)
        last = Journal(good[1]).commits[-1]
        past = len(good[0]) - last["offset"] + 3
        tails = [good[0][:-n] for n in (1, 2, 3, 7, past - 3, past)]
        tails += [good[0] + bytes(n) for n in (1, 2, 33, 64)] + [good[0] + rnd.randbytes(n) for n in (1, 2, 33, 64)]
        for data in tails:
            write(self.out, data)
            write(self.out + ".journal", good[1])
            self.run_job(self.inp, self.out, *self.args)
            self.assertEqual(self.by_id(self.out), want)

    def test_4_readable_by_the_ordinary_decompressor(self):
        self.stop_half_way(self.inp, self.out, *self.args, *SLOW, n=6)
        journal = Journal(read(self.out + ".journal"))
        text, bad = decompress(None, self.out)
        end = journal.commits[-1]["offset"] + journal.commits[-1]["bytes"]
        whole, complains = decompress(read(self.out)[:end])
        self.assertFalse(complains)
        self.assertTrue(text.startswith(whole) and whole.endswith(b"\n"))
        self.assertTrue(not bad or os.path.getsize(self.out) > end)
        self.assertEqual(len([json.loads(x) for x in whole.splitlines()]), len(journal.done))

    def test_5_nothing_to_do(self):
        self.run_job(self.inp, self.out, *self.args)
        before = self.files(self.out, self.out + ".journal"), os.stat(self.out).st_mtime_ns
        _, err = self.run_job(self.inp, self.out, *self.args)
        self.assertIn(b"nothing to do", err)
        self.assertEqual(before, (self.files(self.out, self.out + ".journal"), os.stat(self.out).st_mtime_ns))

    def test_6_edited_input(self):
        first = self.want()
        edited_want = {k: self.answer(v) for k, v in self.want(f"{CASES}/resume_edited.jsonl").items()}
        self.stop_half_way(self.inp, self.out, *self.args, *SLOW, n=24)
        had = set(self.by_id_committed())
        shutil.copy(f"{CASES}/resume_edited.jsonl", self.inp)
        self.refused(self.out, lambda code: self.run_job(self.inp, self.out, *self.args, code=code), "input")
        self.run_job(self.inp, self.out, *self.args, "--on-input-change", "match", "--summary", self.path("s.json"))
        got = self.by_id(self.out)
        self.assertEqual({k: self.answer(v) for k, v in got.items()}, edited_want)
        with open(self.inp, encoding="utf-8") as f:
            lines = [json.loads(x)["custom_id"] for x in f]
        self.assertEqual({v["line"]: k for k, v in got.items()}, dict(enumerate(lines, 1)))
        self.assertNotIn("r-05", got)
        self.assertNotEqual(self.answer(got["r-10"]), self.answer(first["r-10"]))
        kept = had - {"r-05", "r-10"}
        self.assertGreater(len(kept), 5)
        with open(self.path("s.json")) as f:
            made = json.load(f)["usage"]["output_tokens"]
        every = sum(v["response"]["body"]["usage"]["completion_tokens"] for v in got.values())
        mine = sum(got[k]["response"]["body"]["usage"]["completion_tokens"] for k in kept)
        self.assertLessEqual(made, every - mine, "kept results were generated again")

    def by_id_committed(self):
        state = check(self.out, lambda r, _: r["line"] - 1)
        return {json.loads(line)["custom_id"] for _, line in state.results.values()}

    def test_7_another_model_or_options(self):
        self.stop_half_way(self.inp, self.out, *self.args, *SLOW)
        self.refused(self.out, lambda code: batchgen("run", self.inp, "-o", self.out, "-m", OTHER, *self.args, code=code),
                     "model")
        self.refused(self.out, lambda code: self.run_job(self.inp, self.out, *self.args, "--min-tokens", "3", code=code),
                     "min_tokens")

    def test_8_failed_records_only_when_asked(self):
        records = small(12)
        records[3] = {"id": "r3", "prompt": 5}
        records[7] = "{broken"
        inp = write_lines(self.path("bad.jsonl"), records)
        out = self.path("bad.out.jsonl.lz4")
        self.run_job(inp, out, code=1)
        before = self.files(out, out + ".journal")
        _, err = self.run_job(inp, out, code=1)
        self.assertIn(b"nothing to do", err)
        self.assertEqual(before, self.files(out, out + ".journal"))
        lines = by_line(out)
        _, err = self.run_job(inp, out, "--retry-failed", "--summary", self.path("s.json"), code=1)
        self.assertNotIn(b"nothing to do", err)
        self.assertEqual(by_line(out), lines)
        self.assertEqual(os.listdir(self.dir).count("bad.out.jsonl.lz4.rewrite"), 0)
        # Unfinished, with a failed record among what is committed.
        self.stop_half_way(inp, self.path("half.jsonl"), *SLOW, n=6)
        self.run_job(inp, self.path("half.jsonl"), "--retry-failed", code=1)
        self.assertEqual(by_line(self.path("half.jsonl")), lines)


class StopAndLock(Case):
    """tests/golden/cases, 15: stop_and_lock.jsonl."""

    def setUp(self):
        super().setUp()
        self.inp = self.path("in.jsonl")
        shutil.copy(f"{CASES}/stop_and_lock.jsonl", self.inp)
        self.out = self.path("out.jsonl.lz4")
        self.args = ["-m", MODEL, "--ignore-eos"]
        self.slow = [*self.args, *SLOW]

    def want(self):
        batchgen("run", self.inp, "-o", self.path("want.jsonl"), *self.args)
        return by_line(self.path("want.jsonl"))

    def start(self, *more, **kw):
        return start_job(self.inp, "-o", self.out, *self.slow, *more, **kw)

    def goes_on(self, want):
        state = check(self.out, lambda r, _: r["line"] - 1)
        self.assertTrue(state.results or state.journal.partial)
        batchgen("run", self.inp, "-o", self.out, *self.args)
        self.assertEqual(by_line(self.out), want)

    def test_1_signals(self):
        want = self.want()
        for sig in (signal.SIGTERM, signal.SIGINT):
            before = commits(self.out)
            job = self.start("--grace", "0.1")
            self.assertTrue(wait_for_commits(job, self.out, before + 3))
            job.send_signal(sig)
            _, err = job.communicate()
            self.assertEqual(job.returncode, 75)
            self.assertIn(b"again", err)
            state = check(self.out, lambda r, _: r["line"] - 1)
            self.assertEqual((state.tail, state.journal.torn, state.stage), (0, b"", "open"))
        self.goes_on(want)

    def test_1_what_runs_may_finish(self):
        """Within the grace time the two in flight end, and nothing new starts."""
        job = self.start("--grace", "1h")
        self.assertTrue(wait_for_commits(job, self.out, 2))
        job.send_signal(signal.SIGTERM)
        job.communicate()
        self.assertEqual(job.returncode, 75)
        journal = Journal(read(self.out + ".journal"))
        self.assertLess(len(journal.done), 60)
        self.assertEqual(journal.partial, {}, "all that was started is finished")

    def test_1_second_sigint(self):
        for sig in (signal.SIGINT, signal.SIGTERM):
            job = self.start("--grace", "1h", "--max-num-seqs", "64", "--threads", "1")
            self.assertTrue(wait_for_commits(job, self.out, 1))
            family = descendants(job.pid)
            while job.poll() is None:
                job.send_signal(sig)
                select.select([], [], [], 0.01)
            job.communicate()
            self.assertIn(job.returncode, (128 + sig, -sig, 75))  # -sig: it was at its end already
            for pid in family:
                while alive(pid):
                    select.select([], [], [], 0.002)
        self.goes_on(self.want())

    def test_2_hangup_of_a_terminal(self):
        want = self.want()
        pid, terminal = pty.fork()
        if pid == 0:
            os.execve(BATCHGEN, [BATCHGEN, "run", self.inp, "-o", self.out, *self.slow], environment())
        while commits(self.out) < 3:
            if select.select([terminal], [], [], 0.005)[0]:
                os.read(terminal, 4096)
        os.close(terminal)  # its owner is gone: SIGHUP, and writing to it fails from now on
        _, status = os.waitpid(pid, 0)
        self.assertTrue(os.WIFEXITED(status), f"killed by signal {status & 127}")
        self.assertIn(os.WEXITSTATUS(status), (0, 75))
        batchgen("run", self.inp, "-o", self.out, *self.args)
        self.assertEqual(by_line(self.out), want)

    def test_2_closed_stdout_and_stderr(self):
        want = self.want()
        for stream in ("stdout", "stderr", "both"):
            shutil.rmtree(self.out, ignore_errors=True)
            for name in (self.out, self.out + ".journal"):
                if os.path.exists(name):
                    os.unlink(name)
            r, w = os.pipe()
            os.close(r)  # nobody reads: writing gives SIGPIPE
            p = subprocess.Popen([BATCHGEN, "run", self.inp, "-o", self.out, *self.args, "--progress", "0.01",
                                  "--log-level", "debug"], env=environment(),
                                 stdout=subprocess.DEVNULL if stream == "stderr" else w,
                                 stderr=subprocess.DEVNULL if stream == "stdout" else w)
            os.close(w)
            self.assertEqual(p.wait(), 0, stream)
            self.assertEqual(by_line(self.out), want)
        for closed in (">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"):  # not even open: the output must not become fd 1 or 2
            for name in (self.out, self.out + ".journal"):
                os.unlink(name)
            p = subprocess.run(["sh", "-c", f'exec "$@" {closed}', "sh", BATCHGEN, "run", self.inp, "-o", self.out,
                                *self.args, "--progress", "0.01"], env=environment(), capture_output=True)
            self.assertEqual(p.returncode, 0, closed)
            self.assertEqual(by_line(self.out), want, closed)

    def test_2_stdout_that_is_the_output_and_closed(self):
        r, w = os.pipe()
        os.close(r)
        p = subprocess.run([BATCHGEN, "run", self.inp, "-o", "-", *self.args], stdout=w, stderr=subprocess.PIPE,
                           env=environment())
        os.close(w)
        self.assertEqual(p.returncode, 74, p.stderr)

    def test_3_time_limit(self):
        want = self.want()
        limit, done, stops = 0.2, 0, 0
        while True:
            args = self.slow if stops < 2 else self.args
            p = subprocess.run([BATCHGEN, "run", self.inp, "-o", self.out, *args, "--grace", "0.1", "--time-limit",
                                f"{limit:.3f}"], env=environment(), stderr=subprocess.PIPE)
            if p.returncode == 0:
                break
            self.assertEqual(p.returncode, 75, p.stderr)
            self.assertIn(b"again", p.stderr)
            stops += 1
            now = len(check(self.out, lambda r, _: r["line"] - 1).results)
            self.assertGreaterEqual(now, done)
            done, limit = now, limit * 1.3  # a machine may need longer to get anywhere at all
        self.assertGreater(stops, 0)
        self.assertEqual(by_line(self.out), want)

    def test_5_no_terminal_no_tricks(self):
        for args in (["--progress", "0.01"], ["--progress", "0.01", "--log-level", "debug"]):
            out, err = batchgen("run", self.inp, "-o", self.path(f"{len(args)}.jsonl"), *self.args, *args)
            self.assertEqual(out, b"")
            self.assertFalse(set(err) & set(b"\r\x1b\x08"))
        self.assertEqual(batchgen("run", self.inp, "-o", self.out, *self.args, "-q"), (b"", b""))

    def test_6_output_is_input_or_another_jobs(self):
        for name in (self.inp, os.path.join(self.dir, ".", "in.jsonl")):
            before = digest(self.inp)
            batchgen("run", self.inp, "-o", name, *self.args, code=64)
            self.assertEqual(digest(self.inp), before)
        os.link(self.inp, self.path("link.jsonl"))
        batchgen("run", self.inp, "-o", self.path("link.jsonl"), *self.args, code=64)
        batchgen("run", self.inp, "-o", self.out, *self.args)
        self.refused(self.out, lambda code: batchgen("run", self.inp, "-o", self.out, *self.args, "--seed", "3",
                                                     "--min-tokens", "1", code=code), "another job", "--overwrite")
        batchgen("run", self.inp, "-o", self.out, *self.args, "--min-tokens", "1", "--overwrite")
        self.assertEqual(len(by_line(self.out)), 60)


if __name__ == "__main__":
    unittest.main(verbosity=1)
