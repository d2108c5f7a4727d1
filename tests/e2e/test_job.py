#!/usr/bin/env python3
"""The program as a user runs it, on a tiny synthetic model."""
import gzip
import json
import os
import random
import resource
import select
import signal
import subprocess
import tempfile
import unittest

from common import (LONG, MODEL, SANITIZED, TMP, alive, batchgen, by_line, commits, descendants, digest, environment,
                    make_model, prompts, results, start_job, wait_for_commits, write_lines)


def setUpModule():
    make_model()


class Run(unittest.TestCase):
    def setUp(self):
        self.dir = tempfile.mkdtemp(dir=TMP)
        self.input = write_lines(f"{self.dir}/in.jsonl", prompts(40))

    def out(self, name="out.jsonl.lz4"):
        return f"{self.dir}/{name}"

    def run_job(self, name, *args, code=0, inp=None):
        path = self.out(name)
        batchgen("run", inp or self.input, "-o", path, "-m", MODEL, *args, code=code)
        return by_line(path)

    def test_every_record_has_one_result(self):
        got = self.run_job("a.jsonl.lz4")
        self.assertEqual(sorted(got), list(range(1, 41)))
        for line, raw in got.items():
            r = json.loads(raw)
            self.assertEqual(r["id"], f"r{line - 1}")
            self.assertNotIn("error", r)
            self.assertGreater(r["usage"]["completion_tokens"], 0)

    def test_results_do_not_depend_on_scheduling(self):
        want = self.run_job("base.jsonl")
        for i, args in enumerate((["--max-num-seqs", "1"], ["--max-num-seqs", "3", "--no-prefix-cache"],
                                  ["--max-num-seqs", "7", "--max-num-batched-tokens", "16"],
                                  ["--threads", "1", "--block-size", "32"],
                                  ["--kv-cache-memory", "3300KiB", "--max-model-len", "1024"])):
            base = want if "--max-model-len" not in args else self.run_job("short.jsonl", *args[2:])
            self.assertEqual(self.run_job(f"v{i}.jsonl", *args), base, args)

    def test_results_do_not_depend_on_the_order_of_the_input(self):
        records = prompts(40)
        want = {json.loads(x)["id"]: json.loads(x) for x in self.run_job("a.jsonl").values()}
        random.Random(5).shuffle(records)
        shuffled = write_lines(f"{self.dir}/shuffled.jsonl", records)
        for raw in self.run_job("b.jsonl", inp=shuffled).values():
            r = json.loads(raw)
            w = want[r["id"]]
            r.pop("line"), w.pop("line")
            self.assertEqual(r, w)

    def test_f32_with_checked_ops_and_tensor_parallel(self):
        base = self.run_job("f32.jsonl", "--compute", "f32", "--check", "--temperature", "0")
        for tp in (2, 4):
            got = self.run_job(f"tp{tp}.jsonl", "--compute", "f32", "--tp", tp, "--check", "--temperature", "0")
            same = sum(got[k] == base[k] for k in base)
            self.assertGreaterEqual(same, 36, f"tp {tp}: {same} of 40 equal")

    def test_kill_and_resume_gives_the_same_bytes(self):
        want = sorted(self.run_job("undisturbed.jsonl.lz4", *LONG).items())
        out = self.out("killed.jsonl.lz4")
        args = [self.input, "-o", out, "-m", MODEL, *LONG]
        kills = 0
        for n in (1, 6, 12, 20):
            job = start_job(*args)
            if wait_for_commits(job, out, n):
                kills += 1
            job.kill()
            job.communicate()
            results(out)  # whole lines at every moment
        self.assertGreaterEqual(kills, 2)
        batchgen("run", *args)
        self.assertEqual(sorted(by_line(out).items()), want)

    def test_logprobs_and_choices_in_flight_survive_a_kill(self):
        records = [{"id": f"r{i}", "prompt": f"the sea {i}", "max_tokens": 500, "ignore_eos": True,
                    "logprobs": i % 4 + 1, "n": 1 + i % 2} for i in range(6)]
        inp = write_lines(f"{self.dir}/lp.jsonl", records)
        args = ["-m", MODEL, "--commit-interval", "0.02", "--commit-bytes", "1"]
        batchgen("run", inp, "-o", self.out("undisturbed.jsonl"), *args)
        out = self.out("killed.jsonl")
        for n in (2, 5, 9):
            job = start_job(inp, "-o", out, *args)
            self.assertTrue(wait_for_commits(job, out, n))
            job.kill()
            job.communicate()
        batchgen("run", inp, "-o", out, *args, "--summary", self.out("sum.json"))
        self.assertEqual(by_line(out), by_line(self.out("undisturbed.jsonl")))
        with open(self.out("sum.json")) as f:  # tokens saved are not generated again
            self.assertLess(json.load(f)["usage"]["output_tokens"], 9 * 500)

    @unittest.skipIf(SANITIZED, "needs a limit of address space")
    def test_what_was_chosen_at_the_start_stays(self):
        """A context that depends on free memory is no other job when there is more of it later."""
        def run(kib, *more):
            limit = (kib << 10, kib << 10)
            batchgen("run", self.input, "-o", self.out("c.jsonl"), "-m", MODEL, *more,
                     preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, limit))
        run(1000000, "--limit", "5")
        run(1400000)
        with open(self.out("c.jsonl.journal")) as f:
            first = json.loads(f.readline().rsplit(" ", 1)[0])
        self.assertLess(first["identity"]["max_model_len"], 131072)
        self.assertEqual(len(by_line(self.out("c.jsonl"))), 40)

    def test_worker_killed(self):
        want = self.run_job("undisturbed.jsonl", *LONG)
        out = self.out("worker.jsonl")
        job = start_job(self.input, "-o", out, "-m", MODEL, *LONG)
        self.assertTrue(wait_for_commits(job, out))
        ranks = descendants(job.pid)
        self.assertTrue(ranks)
        os.kill(ranks[-1], signal.SIGKILL)
        _, err = job.communicate()
        self.assertEqual(job.returncode, 0, err)
        self.assertEqual(by_line(out), want)

    def test_nothing_outlives_a_killed_coordinator(self):
        out = self.out()
        job = start_job(self.input, "-o", out, "-m", MODEL, *LONG)
        self.assertTrue(wait_for_commits(job, out))
        ranks = descendants(job.pid)
        job.kill()
        job.communicate()
        for pid in ranks:  # they are gone, or about to be reaped
            while alive(pid):
                select.select([], [], [], 0.005)

    def test_finished_job_is_left_alone(self):
        self.run_job("a.jsonl.lz4")
        before = digest(self.out("a.jsonl.lz4")), digest(self.out("a.jsonl.lz4.journal"))
        _, err = batchgen("run", self.input, "-o", self.out("a.jsonl.lz4"), "-m", MODEL)
        self.assertIn(b"nothing to do", err)
        self.assertEqual(before, (digest(self.out("a.jsonl.lz4")), digest(self.out("a.jsonl.lz4.journal"))))

    def test_another_job_is_refused_untouched(self):
        self.run_job("a.jsonl.lz4")
        before = digest(self.out("a.jsonl.lz4"))
        _, err = batchgen("run", self.input, "-o", self.out("a.jsonl.lz4"), "-m", MODEL, "--temperature",
                          "0.5", code=64)
        self.assertIn(b"temperature", err)
        self.assertEqual(before, digest(self.out("a.jsonl.lz4")))
        batchgen("run", self.input, "-o", self.out("a.jsonl.lz4"), "-m", MODEL, "--temperature", "0.5",
                 "--overwrite")
        self.assertNotEqual(before, digest(self.out("a.jsonl.lz4")))

    def test_changed_input_is_refused(self):
        out = self.out()
        args = [self.input, "-o", out, "-m", MODEL, *LONG]
        job = start_job(*args)
        self.assertTrue(wait_for_commits(job, out, 3))
        job.kill()
        job.communicate()
        with open(self.input, "r+b") as f:  # same size, another text
            f.seek(20)
            f.write(b"X")
        _, err = batchgen("run", *args, code=64)
        self.assertIn(b"changed", err)

    def test_grown_input_is_told_what_to_do(self):
        out = self.out()
        args = [self.input, "-o", out, "-m", MODEL]
        batchgen("run", *args, "--limit", "10")
        before = digest(out), digest(out + ".journal")
        with open(self.input, "a") as f:
            f.write('{"id": "more", "prompt": "x"}\n')
        _, err = batchgen("run", *args, code=64)
        self.assertIn(b"grown or shrunk", err)
        self.assertIn(b"--on-input-change=match", err)
        self.assertEqual((digest(out), digest(out + ".journal")), before)
        batchgen("run", *args, "--on-input-change=match")
        self.assertEqual(len(by_line(out)), 41)

    def test_changed_input_of_a_job_without_results(self):
        """Nothing is there to be lost: it begins with the input as it is now."""
        out = self.out()
        args = [self.input, "-o", out, "-m", MODEL]
        batchgen("run", *args, "--time-limit", "0.001", code=75)
        self.assertEqual(os.path.getsize(out), 0)
        with open(self.input, "a") as f:
            f.write('{"id": "more", "prompt": "x"}\n')
        batchgen("run", *args)
        self.assertEqual(len(by_line(out)), 41)

    def test_second_start_ends_at_once(self):
        out = self.out()
        args = [self.input, "-o", out, "-m", MODEL, *LONG]
        job = start_job(*args)
        self.assertTrue(wait_for_commits(job, out))
        batchgen("run", *args, code=75)
        job.send_signal(signal.SIGKILL)
        job.communicate()
        batchgen("run", *args)

    def test_sigterm_stops_in_order_and_resumes(self):
        want = self.run_job("undisturbed.jsonl", *LONG)
        out = self.out("stopped.jsonl")
        for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            before = commits(out)
            job = start_job(self.input, "-o", out, "-m", MODEL, *LONG, "--grace", "0.2", "--max-num-seqs", "2")
            stopped = wait_for_commits(job, out, before + 1)
            job.send_signal(sig)
            job.communicate()
            self.assertEqual(job.returncode, 75 if stopped else 0)
        batchgen("run", self.input, "-o", out, "-m", MODEL, *LONG, "--max-num-seqs", "2")
        self.assertEqual(by_line(out), want)

    def test_streams_and_compressed_inputs(self):
        with open(self.input, "rb") as f:
            data = f.read()
        want = sorted(self.run_job("plain.jsonl").values())
        out, _ = batchgen("run", "-", "-o", "-", "-m", MODEL, stdin=data)
        self.assertEqual(sorted(out.split(b"\n")[:-1]), want)
        with open(self.out("in.gz"), "wb") as f:
            f.write(gzip.compress(data[:1000]) + gzip.compress(data[1000:]))
        for tool, name in (("zstd", "in.zst"), ("lz4", "in.lz4")):
            with open(self.out(name), "wb") as f:
                f.write(subprocess.run([tool, "-c", self.input], check=True, capture_output=True).stdout)
        for name in ("in.gz", "in.zst", "in.lz4"):
            got = self.run_job(name + ".out.jsonl", inp=self.out(name))
            self.assertEqual(sorted(got.values()), want, name)

    def test_several_inputs(self):
        other = write_lines(f"{self.dir}/more.jsonl", [{"id": "x", "prompt": "once more", "max_tokens": 3}])
        path = self.out("two.jsonl")
        batchgen("run", self.input, other, "-o", path, "-m", MODEL)
        rows = [json.loads(x) for x in results(path)]
        self.assertEqual(len(rows), 41)
        self.assertEqual([r["line"] for r in rows if r["file"] == other], [1])

    def test_bad_lines_are_results(self):
        bad = ['{"prompt": "fine", "id": "a", "max_tokens": 2}', "{not json", '{"prompt": 7, "id": "b"}',
               '{"prompt": "again", "id": "a"}', "", '{"messages": [], "id": "c"}',
               '{"prompt": "' + "word " * 3000 + '", "id": "long"}']
        inp = write_lines(f"{self.dir}/bad.jsonl", bad)
        got = self.run_job("bad.jsonl.out", "--max-model-len", "512", inp=inp, code=1)
        codes = {n: json.loads(x).get("error", {}).get("code") for n, x in got.items()}
        self.assertEqual(codes, {1: None, 2: "invalid_json", 3: "invalid_field", 4: "duplicate_id",
                                 6: codes[6], 7: "prompt_too_long"})
        self.assertIsNotNone(codes[6])
        out, _ = batchgen("check", inp, "-m", MODEL, "--max-model-len", "512", "--json", code=65)
        rows = [json.loads(x) for x in out.splitlines()]
        self.assertEqual({r["line"]: r["code"] for r in rows[:-1]}, {k: v for k, v in codes.items() if v})
        self.assertEqual(rows[-1]["bad"], 5)
        _, err = batchgen("run", inp, "-o", self.out("strict.jsonl"), "-m", MODEL, "--strict", code=65)
        self.assertIn(b"duplicate_id", err)
        self.assertFalse(os.path.exists(self.out("strict.jsonl")))

    def test_sampling_fields(self):
        recs = [{"id": "stop", "prompt": "a b c", "max_tokens": 200, "stop": ["e", "t", "a", "o", "i"], "ignore_eos": True},
                {"id": "lp", "prompt": "a b c", "max_tokens": 5, "logprobs": 3, "ignore_eos": True},
                {"id": "min", "prompt": "a b c", "max_tokens": 30, "min_tokens": 30},
                {"id": "bias", "prompt": "a b c", "max_tokens": 4, "logit_bias": {"300": 100}, "ignore_eos": True,
                 "logprobs": 0}]
        got = {json.loads(x)["id"]: json.loads(x) for x in
               self.run_job("s.jsonl", "--temperature", "0", inp=write_lines(f"{self.dir}/sampling.jsonl", recs)).values()}
        self.assertEqual(got["stop"]["finish_reason"], "stop")
        self.assertFalse(set(got["stop"]["text"]) & set("etaoi"))
        self.assertEqual(got["lp"]["usage"]["completion_tokens"], 5)
        self.assertEqual(got["min"]["usage"]["completion_tokens"], 30)
        self.assertEqual(got["min"]["finish_reason"], "length")
        self.assertEqual(got["bias"]["usage"]["completion_tokens"], 4)

    def test_quiet_says_nothing(self):
        out, err = batchgen("run", self.input, "-o", self.out(), "-m", MODEL, "-q")
        self.assertEqual((out, err), (b"", b""))

    def test_no_control_characters_without_a_terminal(self):
        _, err = batchgen("run", self.input, "-o", self.out(), "-m", MODEL, "--progress", "0.01")
        self.assertNotIn(b"\r", err)
        self.assertNotIn(b"\033", err)

    def test_summary(self):
        batchgen("run", self.input, "-o", self.out(), "-m", MODEL, "--summary", self.out("sum.json"))
        with open(self.out("sum.json")) as f:
            s = json.load(f)
        self.assertEqual(s["request_counts"], {"total": 40, "completed": 40, "failed": 0,
                                               "this_run": 40})
        self.assertEqual(s["status"], "completed")
        used = [json.loads(x)["usage"] for x in results(self.out())]
        self.assertEqual(s["usage"]["output_tokens"], sum(u["completion_tokens"] for u in used))

    def test_precedence_of_settings(self):
        inp = write_lines(f"{self.dir}/p.jsonl", [{"id": 1, "prompt": "x y z", "ignore_eos": True}])
        os.makedirs(f"{TMP}/config/batchgen", exist_ok=True)
        config = f"{TMP}/config/batchgen/config.json"
        try:
            with open(config, "w") as f:
                json.dump({"model": MODEL, "max_tokens": 2}, f)
            job = write_lines(f"{self.dir}/job.json", [{"input": "p.jsonl", "output": "j.jsonl", "max_tokens": 3}])

            def tokens(*args, **env):
                batchgen("run", *args, "--overwrite", env=environment(**env))
                return json.loads(results(self.out("j.jsonl"))[0])["usage"]["completion_tokens"]

            self.assertEqual(tokens(inp, "-o", self.out("j.jsonl")), 2)
            self.assertEqual(tokens("--job", job), 3)
            self.assertEqual(tokens("--job", job, BATCHGEN_MAX_TOKENS="4"), 4)
            self.assertEqual(tokens("--job", job, "-n", "5", BATCHGEN_MAX_TOKENS="4"), 5)
        finally:
            os.unlink(config)
        bad = write_lines(f"{self.dir}/bad.json", [{"max_tokns": 3}])
        _, err = batchgen("run", "--job", bad, code=78)
        self.assertIn(b"max_tokns", err)

    def test_usage_errors(self):
        for args, code in ((["run"], 64), (["run", self.input, "-o", self.out()], 64), (["nonsense"], 64),
                           (["run", self.input, "-o", self.input, "-m", MODEL], 64),
                           (["run", "/nowhere.jsonl", "-o", self.out(), "-m", MODEL], 66),
                           (["run", self.input, "-o", "/nowhere/x.jsonl", "-m", MODEL], 73),
                           (["run", self.input, "-o", self.out(), "-m", self.input], 78),
                           (["run", self.input, "--top-p", "2"], 64), (["run", "--no-such"], 64)):
            _, err = batchgen(*args, code=code)
            self.assertTrue(err.strip(), args)


class Look(unittest.TestCase):
    def test_inspect(self):
        out, _ = batchgen("inspect", MODEL)
        self.assertIn(b"blk.0.attn_q.weight", out)
        out, _ = batchgen("inspect", MODEL, "--tp", "3", "--json")
        j = json.loads(out)
        self.assertEqual(sum(r["n_heads"] for r in j["ranks"]), j["n_heads"])

    def test_tokenize_and_render(self):
        out, _ = batchgen("tokenize", "-m", MODEL, "--ids", "hello world")
        self.assertTrue(all(x.isdigit() for x in out.split()))
        line = json.dumps({"messages": [{"role": "user", "content": "{{ 7*7 }} hi"}]}).encode()
        out, _ = batchgen("render", "-", "-m", MODEL, stdin=line)
        self.assertIn(b"{{ 7*7 }} hi", out)

    def test_bench(self):
        out, _ = batchgen("bench", "-m", MODEL, "--batch", "1,2", "-p", "16", "-g", "4", "--json")
        rows = json.loads(out)["rows"]
        self.assertEqual([r["batch"] for r in rows], [1, 2])
        self.assertTrue(all(r["decode_tokens_per_second"] > 0 for r in rows))
        batchgen("bench", "-m", MODEL, "--batch", "2", "-p", "16", "-g", "4", "--tp", "2")
        out, _ = batchgen("bench", "-m", MODEL, "--batch", "2", "-p", "16", "-g", "4", "--rank-of", "4", "--json",
                          "--all-reduce-us", "50")
        alone = json.loads(out)["rows"][0]["rank_alone"]
        self.assertGreater(alone["all_reduces"], 0)
        self.assertAlmostEqual(alone["all_reduce_ms"], alone["all_reduces"] * 0.05, places=6)
        self.assertGreaterEqual(alone["step_ms"], alone["all_reduce_ms"])
        for wrong in (["--rank-of", "2", "--tp", "2"], ["--skip-prefill"]):
            batchgen("bench", "-m", MODEL, *wrong, code=64)
        for wrong in (["--tune", "--device", "cpu"], ["--tune", "--tp", "2"], ["--tune-out", "x"]):
            _, message = batchgen("bench", "-m", MODEL, *wrong, code=64)
            self.assertIn(b"--tune", message)

    def test_help_and_schema(self):
        for c in ("run", "check", "inspect", "bench", "tokenize", "render"):
            out, _ = batchgen(c, "--help")
            self.assertIn(b"--model", out)
        out, _ = batchgen("--job-schema")
        with open("schemas/job.schema.json") as f:
            self.assertEqual(json.loads(out), json.load(f), "batchgen --job-schema > schemas/job.schema.json")


if __name__ == "__main__":
    unittest.main(verbosity=1)
