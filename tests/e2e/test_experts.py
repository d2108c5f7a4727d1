#!/usr/bin/env python3
"""Jobs of models with experts, latent attention and an indexer, on one rank and on several."""
import json
import os
import signal
import tempfile
import unittest

from common import (LONG, TMP, batchgen, by_line, descendants, make_model, prompts, start_job, wait_for_commits,
                    write_lines)

# The indexer chooses 64 keys: most answers get longer than that.
PRESETS = ("tiny-qwen3moe", "tiny-glm-dsa")


class Experts(unittest.TestCase):
    def setUp(self):
        self.dir = tempfile.mkdtemp(dir=TMP)
        self.input = write_lines(f"{self.dir}/in.jsonl", prompts(24))

    def each(self):
        for preset in PRESETS:
            with self.subTest(preset):
                yield preset, make_model(f"{TMP}/{preset}.gguf", preset)

    def run_job(self, name, model, *args):
        out = f"{self.dir}/{name}"
        batchgen("run", self.input, "-o", out, "-m", model, "--max-model-len", 1024, *args)
        return by_line(out)

    def test_results_do_not_depend_on_scheduling(self):
        for preset, model in self.each():
            for tp in (1, 2):
                want = self.run_job(f"{preset}-{tp}.jsonl", model, "--tp", tp)
                self.assertFalse([x for x in want.values() if "error" in json.loads(x)])
                for i, args in enumerate((["--max-num-seqs", "1"], ["--max-num-seqs", "3", "--no-prefix-cache"],
                                          ["--max-num-seqs", "7", "--max-num-batched-tokens", "16"])):
                    self.assertEqual(self.run_job(f"{preset}-{tp}-{i}.jsonl", model, "--tp", tp, *args), want, args)

    def test_f32_with_checked_ops_and_tensor_parallel(self):
        """Sums of ranks are rounded elsewhere than those of one: what hangs on the last bit may differ."""
        args = ["--compute", "f32", "--check", "--temperature", "0"]
        for preset, model in self.each():
            base = self.run_job(f"{preset}.jsonl", model, *args)
            for tp in (2, 4):
                got = self.run_job(f"{preset}-{tp}.jsonl", model, "--tp", tp, *args)
                same = sum(got[k] == base[k] for k in base)
                self.assertGreaterEqual(same, 21, f"tp {tp}: {same} of 24 equal")

    def test_every_family(self):
        """Whole and in uneven shares, with checked ops; the two forms of keys' and values' matrix."""
        write_lines(self.input, prompts(8))
        args = ["--compute", "f32", "--check", "--temperature", "0"]
        for preset in ("tiny-mixtral", "tiny-qwen2moe", "tiny-glm4", "tiny-glm4moe", "tiny-gpt-oss", "tiny-mla",
                       "tiny-v2-lite", "tiny-v2-lite --legacy-kv-b", "tiny-dsv3"):
            with self.subTest(preset):
                name, *more = preset.split()
                model = make_model(f"{TMP}/{''.join(preset.split())}.gguf", name, "q8_0", *more)
                base = self.run_job(f"{name}{len(more)}.jsonl", model, *args)
                self.assertFalse([x for x in base.values() if "error" in json.loads(x)])
                for tp in (3, 5):
                    got = self.run_job(f"{name}{len(more)}-{tp}.jsonl", model, "--tp", tp, *args)
                    same = sum(got[k] == base[k] for k in base)
                    self.assertGreaterEqual(same, 6, f"tp {tp}: {same} of 8 equal")

    def test_the_order_and_the_parts_of_the_file_do_not_matter(self):
        for preset, model in self.each():
            want = self.run_job(f"{preset}.jsonl", model, "--tp", "2")
            make_model(f"{self.dir}/{preset}-shuffled.gguf", preset, "q4_k_m", "--shuffle")
            make_model(f"{self.dir}/{preset}-split.gguf", preset, "q4_k_m", "--shuffle", "--split-max-tensors", "9")
            split = sorted(f for f in os.listdir(self.dir) if f.startswith(f"{preset}-split-") and f.endswith("gguf"))
            self.assertGreater(len(split), 2)
            for i, other in enumerate((f"{preset}-shuffled.gguf", split[-1])):
                self.assertEqual(self.run_job(f"{preset}-{i}.jsonl", f"{self.dir}/{other}", "--tp", "2",
                                              "--served-model-name", preset), want, other)

    def test_kill_and_resume_gives_the_same_bytes(self):
        for preset, model in self.each():
            args = ["--tp", "2", *LONG]
            want = self.run_job(f"{preset}-undisturbed.jsonl", model, *args)
            out = f"{self.dir}/{preset}-killed.jsonl.lz4"
            args = [self.input, "-o", out, "-m", model, "--max-model-len", 1024, *args]
            kills = 0
            for n in (1, 6, 12):
                job = start_job(*args)
                kills += wait_for_commits(job, out, n)
                job.kill()
                job.communicate()
            self.assertGreaterEqual(kills, 2)
            batchgen("run", *args)
            self.assertEqual(by_line(out), want)

    def test_a_rank_killed(self):
        for preset, model in self.each():
            args = ["--tp", "2", *LONG]
            want = self.run_job(f"{preset}-undisturbed.jsonl", model, *args)
            out = f"{self.dir}/{preset}-worker.jsonl"
            job = start_job(self.input, "-o", out, "-m", model, "--max-model-len", 1024, *args)
            self.assertTrue(wait_for_commits(job, out))
            os.kill(descendants(job.pid)[-1], signal.SIGKILL)
            _, err = job.communicate()
            self.assertEqual(job.returncode, 0, err)
            self.assertEqual(by_line(out), want)


if __name__ == "__main__":
    unittest.main()
