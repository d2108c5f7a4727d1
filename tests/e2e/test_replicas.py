#!/usr/bin/env python3
"""--dp: replicas on one queue give the bytes of one, also when ranks die and when a job goes on with
another number of them."""
import json
import os
import random
import signal
import tempfile
import unittest

from common import (MODEL, TMP, batchgen, commits, descendants, digest, make_model, prompts, start_job, wait_for_commits,
                    write_lines)

EACH = ["--commit-bytes", "1", "--commit-interval", "0.01"]


def setUpModule():
    make_model()


class Replicas(unittest.TestCase):
    def setUp(self):
        self.dir = tempfile.mkdtemp(dir=TMP)
        self.input = write_lines(f"{self.dir}/in.jsonl", prompts(60))

    def run_job(self, name, *args, code=0):
        out = f"{self.dir}/{name}"
        batchgen("run", self.input, "-m", MODEL, "-o", out, "--ordered", "--threads", "2", *args, code=code)
        return out

    def test_bytes_of_one(self):
        want = digest(self.run_job("one.jsonl"))
        for dp in (2, 3):
            self.assertEqual(digest(self.run_job(f"dp{dp}.jsonl", "--dp", dp)), want)

    def test_replicas_of_several_ranks(self):
        want = digest(self.run_job("tp.jsonl", "--tp", "2"))
        self.assertEqual(digest(self.run_job("both.jsonl", "--tp", "2", "--dp", "2")), want)

    def test_small_window(self):
        want = digest(self.run_job("one.jsonl"))
        self.assertEqual(digest(self.run_job("w.jsonl", "--dp", "2", "--window", "1", "--max-num-seqs", "2")), want)

    def test_killed_and_resumed_with_other_numbers(self):
        want = digest(self.run_job("one.jsonl"))
        out, caught = f"{self.dir}/k.jsonl", 0
        for dp in (2, 1, 3, 2):
            before = commits(out)
            job = start_job(self.input, "-m", MODEL, "-o", out, "--ordered", "--threads", "2", "--dp", dp,
                            "--max-num-seqs", "2", *EACH)
            caught += wait_for_commits(job, out, before + 3)
            job.kill()
            job.communicate()
        self.run_job("k.jsonl", "--dp", "2")
        self.assertEqual(digest(out), want)
        self.assertGreater(caught, 0)

    def test_stopped_and_resumed(self):
        want = digest(self.run_job("one.jsonl"))
        out = f"{self.dir}/s.jsonl"
        job = start_job(self.input, "-m", MODEL, "-o", out, "--ordered", "--threads", "2", "--dp", "2",
                        "--max-num-seqs", "1", "--grace", "0", *EACH)
        wait_for_commits(job, out, 2)
        job.send_signal(signal.SIGTERM)
        job.communicate()
        self.assertIn(job.returncode, (0, 75, 143))
        self.run_job("s.jsonl", "--dp", "3")
        self.assertEqual(digest(out), want)

    def test_ranks_killed(self):
        """Of both replicas, one after another: each is started again, nothing is lost or twice."""
        want = digest(self.run_job("one.jsonl"))
        out, rnd, killed = f"{self.dir}/r.jsonl", random.Random(5), 0
        job = start_job(self.input, "-m", MODEL, "-o", out, "--ordered", "--threads", "2", "--dp", "2",
                        "--max-num-seqs", "2", "--summary", f"{self.dir}/sum.json", *EACH)
        while job.poll() is None and killed < 4:
            if not wait_for_commits(job, out, 2 * (killed + 1)):
                break
            ranks = [p for p in descendants(job.pid) if name_of(p).startswith("bg-rank")]
            if len(ranks) == 2:
                os.kill(rnd.choice(ranks), signal.SIGKILL)
                killed += 1
        job.communicate()
        self.assertEqual(job.returncode, 0)
        self.assertEqual(digest(out), want)
        self.assertGreater(killed, 0)

    def test_summary_and_metrics_are_sums(self):
        self.run_job("m.jsonl", "--dp", "2", "--summary", f"{self.dir}/s.json", "--metrics-file", f"{self.dir}/m.prom")
        one = self.run_job("o.jsonl", "--summary", f"{self.dir}/s1.json")
        self.assertTrue(one)
        with open(f"{self.dir}/s.json") as f, open(f"{self.dir}/s1.json") as g:
            a, b = json.load(f)["usage"], json.load(g)["usage"]
        self.assertEqual(a["output_tokens"], b["output_tokens"])
        self.assertEqual(a["input_tokens"], b["input_tokens"])

    def test_too_many_ranks(self):
        _, err = batchgen("run", self.input, "-m", MODEL, "-o", f"{self.dir}/x.jsonl", "--tp", "8", "--dp", "9", code=64)
        self.assertIn(b"72 ranks, 64 at most", err)

    def test_device_lists(self):
        for bad in ("cuda:", "cuda:0,", "gpu:1", "cuda:0,x"):
            _, err = batchgen("run", self.input, "-m", MODEL, "-o", f"{self.dir}/x.jsonl", "--device", bad, code=64)
            self.assertIn(b"--device", err)


def name_of(pid):
    try:
        with open(f"/proc/{pid}/comm") as f:
            return f.read().strip()
    except OSError:
        return ""


if __name__ == "__main__":
    unittest.main()
