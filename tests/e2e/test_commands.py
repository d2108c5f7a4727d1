#!/usr/bin/env python3
"""status, cat, merge and repair, on outputs of real runs."""
import gzip
import json
import os
import subprocess
import tempfile
import unittest

from common import (BATCHGEN, LONG, MODEL, TMP, batchgen, by_line, digest, environment, make_model, prompts, results,
                    start_job, wait_for_commits, write_lines)


def setUpModule():
    make_model()


def lines(data):
    return data.split(b"\n")[:-1]


class Commands(unittest.TestCase):
    def setUp(self):
        self.dir = tempfile.mkdtemp(dir=TMP)
        records = prompts(24) + ["{broken"]
        self.input = write_lines(f"{self.dir}/in.jsonl", records)
        self.n = len(records)

    def path(self, name):
        return f"{self.dir}/{name}"

    def run_job(self, name, *args, code=1):
        batchgen("run", self.input, "-o", self.path(name), "-m", MODEL, *args, code=code)
        return self.path(name)

    def ordered(self, path):
        return [raw for _, raw in sorted(by_line(path).items())]

    def halfway(self, name, commits=2):
        """A job that was killed after some commits."""
        out = self.path(name)
        job = start_job(self.input, "-o", out, "-m", MODEL, *LONG)
        self.assertTrue(wait_for_commits(job, out, commits))
        job.kill()
        job.communicate()
        return out

    def status(self, *paths, code):
        out, _ = batchgen("status", "--json", *paths, code=code)
        return [json.loads(x) for x in out.splitlines()]

    # ---- status

    def test_status_of_a_job_through_its_life(self):
        out = self.path("life.jsonl.lz4")
        [s] = self.status(out, code=66)
        self.assertEqual(s["state"], "missing")
        job = start_job(self.input, "-o", out, "-m", MODEL, *LONG)
        self.assertTrue(wait_for_commits(job, out, 3))
        [s] = self.status(out, code=75)
        self.assertEqual(s["state"], "running")
        self.assertEqual((s["lock"]["held"], s["lock"]["pid"], s["lock"]["alive"]), (True, job.pid, True))
        self.assertEqual(s["last_run"]["pid"], job.pid)
        self.assertGreaterEqual(s["last_commit"]["age_seconds"], 0)
        text, _ = batchgen("status", out, code=75)
        self.assertIn(f"held by pid {job.pid}".encode(), text)
        job.kill()
        job.communicate()
        [s] = self.status(out, code=75)
        self.assertEqual((s["state"], s["lock"]["held"], s["last_run"]["alive"]), ("unfinished", False, False))
        done = s["records"]["done"]
        self.assertGreater(done + s["tokens"]["saved_in_flight"], 0)
        text, _ = batchgen("status", out, code=75)
        self.assertIn(b"is gone", text)
        self.assertIn(b"start the same command again", text)
        batchgen("run", self.input, "-o", out, "-m", MODEL, *LONG, code=1)
        [s] = self.status(out, code=0)
        self.assertEqual((s["state"], s["records"]["done"], s["records"]["failed"]), ("finished", self.n, 1))
        self.assertGreaterEqual(s["records"]["done"], done)
        want = [json.loads(x)["usage"]["completion_tokens"] for x in results(out) if b'"usage"' in x]
        self.assertEqual(s["tokens"]["output"], sum(want))

    def test_status_of_several(self):
        good, half = self.run_job("good.jsonl"), self.halfway("half.jsonl")
        lost = self.run_job("lost.jsonl.lz4")
        os.remove(lost + ".journal")
        rows = self.status(good, half, lost, self.path("none"), code=65)
        self.assertEqual([r["state"] for r in rows], ["finished", "unfinished", "needs_repair", "missing"])
        text, _ = batchgen("status", good, half, code=75)
        self.assertEqual(len(text.split(b"\n\n")), 2)
        out, _ = batchgen("status", "-q", good)
        self.assertEqual(out, b"")
        batchgen("status", code=64)
        with open(lost, "r+b") as f:
            f.truncate(10)
        batchgen("status", lost, code=65)

    # ---- cat

    def test_cat_is_what_is_in_the_output(self):
        for name in ("a.jsonl.lz4", "a.jsonl"):
            out = self.run_job(name, "--commit-bytes", "1")
            got, err = batchgen("cat", out)
            self.assertEqual(lines(got), results(out))
            self.assertEqual(err, b"")
            got, _ = batchgen("cat", "--ordered", out)
            self.assertEqual(lines(got), self.ordered(out))
            got, _ = batchgen("cat", out, out)
            self.assertEqual(lines(got), results(out) * 2)

    def test_cat_to_files(self):
        out = self.run_job("a.jsonl.lz4")
        want = results(out)
        for name in ("x.jsonl", "x.jsonl.gz", "x.jsonl.lz4", "x.jsonl.zst"):
            batchgen("cat", out, "-o", self.path(name))
            with open(self.path(name), "rb") as f:
                data = f.read()
            if name.endswith(".gz"):
                data = gzip.decompress(data)
            for suffix in ("lz4", "zst"):
                if name.endswith(suffix):
                    tool = {"lz4": "lz4", "zst": "zstd"}[suffix]
                    data = subprocess.run([tool, "-dc"], input=data, check=True, capture_output=True).stdout
            self.assertEqual(lines(data), want, name)
        self.assertFalse([x for x in os.listdir(self.dir) if ".part." in x])
        before = digest(out)
        for bad in (out, out + ".journal"):
            batchgen("cat", out, "-o", bad, code=64)
        self.assertEqual(digest(out), before)
        batchgen("cat", self.path("none"), code=66)
        batchgen("cat", out, "-o", self.path("no/folder"), code=73)
        batchgen("cat", code=64)
        batchgen("cat", "-", code=64)

    def test_cat_fields(self):
        out = self.run_job("a.jsonl.lz4")
        got, _ = batchgen("cat", out, "--fields", "id,usage.completion_tokens", "--fields", "error.code", "--ordered")
        rows = [json.loads(x) for x in lines(got)]
        self.assertEqual(list(rows[0]), ["id", "usage.completion_tokens", "error.code"])
        for row, raw in zip(rows, self.ordered(out)):
            r = json.loads(raw)
            self.assertEqual(row, {"id": r["id"], "usage.completion_tokens": r.get("usage", {}).get("completion_tokens"),
                                   "error.code": r.get("error", {}).get("code")})
        inp = write_lines(self.path("chat.jsonl"), [
            {"custom_id": f"c{i}", "method": "POST", "url": "/v1/chat/completions",
             "body": {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}} for i in range(3)])
        out = self.path("chat.out.jsonl.lz4")
        batchgen("run", inp, "-o", out, "-m", MODEL)
        path = "response.body.choices.0.message.content"
        got, _ = batchgen("cat", out, "--fields", f"custom_id,{path},response.body.choices.7", "--ordered")
        want = [{"custom_id": r["custom_id"], path: r["response"]["body"]["choices"][0]["message"]["content"],
                 "response.body.choices.7": None} for r in map(json.loads, self.ordered(out))]
        self.assertEqual([json.loads(x) for x in lines(got)], want)
        batchgen("cat", out, "--fields", ",", code=64)

    def test_cat_of_an_unfinished_output(self):
        for name in ("half.jsonl.lz4", "half.jsonl"):
            out = self.halfway(name, 4)
            [s] = self.status(out, code=75)
            with open(out, "r+b") as f:  # as a kill in the middle of a write leaves it
                f.truncate(s["bytes"]["output"] - s["bytes"]["uncommitted"])
                f.seek(0, 2)
                f.write(b'{"line":99,"id":"torn"' if name.endswith(".jsonl") else b"\x04\x22\x4d\x18torn")
            got, err = batchgen("cat", out)
            self.assertEqual(len(lines(got)), s["records"]["done"])
            self.assertIn(b"not committed", err)
            self.assertNotIn(b"torn", got)
            _, err = batchgen("cat", "-q", out)
            self.assertEqual(err, b"")

    def test_cat_of_a_running_job(self):
        out = self.path("running.jsonl.lz4")
        job = start_job(self.input, "-o", out, "-m", MODEL, *LONG)
        self.assertTrue(wait_for_commits(job, out, 4))
        got, _ = batchgen("cat", out)
        for raw in lines(got):
            self.assertIn("line", json.loads(raw))
        job.kill()
        job.communicate()

    def test_cat_of_damage(self):
        out = self.run_job("a.jsonl.lz4", "--commit-bytes", "1")
        want = results(out)
        with open(out, "r+b") as f:
            data = bytearray(f.read())
            data[len(data) // 2] ^= 0x10
            f.seek(0)
            f.write(data)
        got, err = batchgen("cat", out, code=65)
        self.assertTrue(0 < len(lines(got)) < len(want))
        self.assertEqual(lines(got), want[:len(lines(got))])
        self.assertIn(b"damaged at byte", err)
        with open(self.path("keep.jsonl"), "w") as f:
            f.write("old\n")
        batchgen("cat", out, "-o", self.path("keep.jsonl"), code=65)
        with open(self.path("keep.jsonl")) as f:
            self.assertEqual(f.read(), "old\n")
        self.assertEqual([x for x in os.listdir(self.dir) if ".part." in x], [])

    def test_cat_to_where_nothing_fits(self):
        out = self.run_job("a.jsonl.lz4")
        with open("/dev/full", "w") as full:
            p = subprocess.run([BATCHGEN, "cat", out], stdout=full, stderr=subprocess.PIPE, env=environment())
        self.assertEqual(p.returncode, 74)
        self.assertIn(b"No space", p.stderr)
        batchgen("cat", out, "-o", "/dev/full", code=74)
        read, write = os.pipe()
        os.close(read)  # a reader that has enough
        p = subprocess.run([BATCHGEN, "cat", out], stdout=write, stderr=subprocess.PIPE, env=environment())
        os.close(write)
        self.assertEqual((p.returncode, p.stderr), (0, b""))

    # ---- merge

    def shards(self, n, *args, errors=False):
        out = []
        for i in range(1, n + 1):
            more = ["--error-file", self.path(f"err{i}.jsonl")] if errors else []
            out.append(self.run_job(f"s{i}.jsonl.lz4", "--shard", f"{i}/{n}", *args, *more, code=None))
        return out

    def test_merged_shards_are_the_whole_job(self):
        whole = self.run_job("whole.jsonl.lz4", "--ordered")
        for errors in (False, True):
            s = self.shards(3, errors=errors)
            if errors:
                self.assertEqual(sum(len(results(self.path(f"err{i}.jsonl"))) for i in (1, 2, 3)), 1)
                files = [x for i in (1, 2, 3) for x in (s[i - 1], self.path(f"err{i}.jsonl"))]
                out, _ = batchgen("cat", "--ordered", *files)
                self.assertEqual(lines(out), results(whole))
            merged = self.path(f"merged{errors:d}.jsonl.lz4")
            out, _ = batchgen("merge", s[2], s[0], s[1], "-o", merged, "--json")
            self.assertEqual(json.loads(out), {"output": merged, "shards": 3, "records": self.n, "failed": 1,
                                               "from_error_files": int(errors), "bytes": os.path.getsize(merged)})
            self.assertEqual(results(merged), results(whole))
            _, err = batchgen("run", self.input, "-o", merged, "-m", MODEL, code=1)
            self.assertIn(b"nothing to do", err)
            _, err = batchgen("run", self.input, "-o", merged, "-m", MODEL, "--ordered", code=1)
            self.assertIn(b"nothing to do", err)
            self.assertEqual(self.status(merged, code=0)[0]["state"], "finished")
            self.assertEqual([x for x in os.listdir(self.dir) if ".part." in x], [])
            for path in s:
                os.remove(path), os.remove(path + ".journal")

    def test_merge_refuses_what_is_no_whole_job(self):
        s = self.shards(3)
        out = self.path("m.jsonl.lz4")

        def refused(*paths, code=64):
            _, err = batchgen("merge", *paths, "-o", out, code=code)
            self.assertFalse(os.path.exists(out) or os.path.exists(out + ".journal"), err)
            self.assertEqual([x for x in os.listdir(self.dir) if ".part." in x], [])
            return err

        self.assertIn(b"shard 2 of 3 is missing", refused(s[0], s[2]))
        self.assertIn(b"both shard 1 of 3", refused(s[0], s[1], s[2], s[0]))
        other = self.run_job("other.jsonl.lz4", "--shard", "3/3", "--temperature", "0.5", code=None)
        err = refused(s[0], s[1], other)
        self.assertIn(b"temperature", err)
        self.assertNotIn(b"seed", err)
        four = self.run_job("four.jsonl.lz4", "--shard", "3/4", code=None)
        self.assertIn(b"of 4", refused(s[0], s[1], four))
        whole = self.run_job("whole.jsonl.lz4")
        self.assertIn(b"whole job", refused(whole, whole))
        refused(s[0], s[1], self.path("none"), code=66)
        batchgen("merge", *s, code=64)
        batchgen("merge", *s, "-o", s[0], code=64)
        batchgen("merge", *s, "-o", "-", code=64)
        batchgen("merge", *s, "-o", self.path("no/folder"), code=73)
        half = self.path("half.jsonl.lz4")
        job = start_job(self.input, "-o", half, "-m", MODEL, *LONG, "--shard", "3/3")
        self.assertTrue(wait_for_commits(job, half, 1))
        job.kill()
        job.communicate()
        self.assertIn(b"not finished", refused(s[0], s[1], half, code=75))
        os.remove(s[2] + ".journal")
        self.assertIn(b"no journal", refused(*s, code=65))
        batchgen("repair", s[2])
        self.assertIn(b"start its job again", refused(*s, code=75))
        batchgen("run", self.input, "-o", s[2], "-m", MODEL, "--shard", "3/3", code=None)
        batchgen("merge", *s, "-o", out)
        self.assertEqual(len(results(out)), self.n)
        before = digest(out)
        _, err = batchgen("merge", *s, "-o", out, code=64)
        self.assertIn(b"is there already", err)
        self.assertEqual(digest(out), before)

    def test_merge_of_a_damaged_shard(self):
        s = self.shards(2)
        with open(s[1], "r+b") as f:
            f.seek(40)
            byte = f.read(1)
            f.seek(40)
            f.write(bytes([byte[0] ^ 1]))
        out = self.path("m.jsonl")
        _, err = batchgen("merge", *s, "-o", out, code=65)
        self.assertIn(b"s2.jsonl.lz4", err)
        self.assertFalse(os.path.exists(out))

    # ---- repair

    def test_a_lost_journal(self):
        for name in ("half.jsonl.lz4", "half.jsonl"):
            want = self.ordered(self.run_job("undisturbed." + name, *LONG))
            out = self.halfway(name, 4)
            [s] = self.status(out, code=75)
            os.remove(out + ".journal")
            batchgen("run", self.input, "-o", out, "-m", MODEL, *LONG, code=65)
            with open(out, "ab") as f:
                f.write(b"\0" * 100)
            text, _ = batchgen("repair", out)
            self.assertIn(b"cut off", text)
            got, _ = batchgen("cat", out)
            self.assertGreaterEqual(len(lines(got)), s["records"]["done"])
            text, _ = batchgen("repair", out)
            self.assertIn(b"nothing to repair", text)
            batchgen("run", self.input, "-o", out, "-m", MODEL, *LONG, code=1)
            self.assertEqual(self.ordered(out), want)

    def test_damage_in_the_middle(self):
        want = self.ordered(self.run_job("undisturbed.jsonl.lz4", *LONG))
        out = self.halfway("half.jsonl.lz4", 12)
        before = by_line(out)
        with open(out, "r+b") as f:
            data = bytearray(f.read())
            data[len(data) // 2] ^= 0x10
            f.seek(0)
            f.write(data)
        batchgen("status", out, code=None)
        _, err = batchgen("run", self.input, "-o", out, "-m", MODEL, *LONG, code=65)
        self.assertIn(b"damaged", err)
        info, _ = batchgen("repair", out, "--json", code=65)
        info = json.loads(info)
        self.assertEqual(info["damaged_places"], 1)
        self.assertTrue(info["job_known"])
        lost = int(info["lost_records"]) + 1
        self.assertEqual(os.path.getsize(info["damaged_file"]), info["damaged_bytes"])
        self.assertTrue(os.path.exists(info["old_journal"]))
        after = by_line(out)
        self.assertEqual({**after, lost: before[lost]}, before)
        batchgen("run", self.input, "-o", out, "-m", MODEL, *LONG, code=1)
        self.assertEqual(self.ordered(out), want)

    def test_repair_of_another_inputs_output_is_refused_by_the_run(self):
        out = self.run_job("a.jsonl.lz4")
        os.remove(out + ".journal")
        batchgen("repair", out)
        other = write_lines(self.path("other.jsonl"), prompts(24, seed=9)[::-1] + ["{broken"])
        before = digest(out)
        _, err = batchgen("run", other, "-o", out, "-m", MODEL, code=64)
        self.assertIn(b"another id", err)
        self.assertEqual(digest(out), before)

    def test_repair_while_a_run_holds_it(self):
        out = self.path("held.jsonl.lz4")
        job = start_job(self.input, "-o", out, "-m", MODEL, *LONG)
        self.assertTrue(wait_for_commits(job, out, 1))
        _, err = batchgen("repair", out, code=75)
        self.assertIn(str(job.pid).encode(), err)
        job.kill()
        job.communicate()
        batchgen("repair", self.path("none"), code=66)
        batchgen("repair", code=64)
        self.assertFalse(os.path.exists(self.path("none")))


class Inspect(unittest.TestCase):
    """The largest model there is, of which only headers exist."""
    TP = 8

    def setUp(self):
        self.dir = tempfile.mkdtemp(dir=TMP)
        make_model(f"{self.dir}/glm.gguf", "glm-5", "ud_q4_k", "--header-only", "--split-max-tensors", "300")
        self.model = f"{self.dir}/glm-00001-of-00007.gguf"

    def look(self, *args, code=0):
        out, err = batchgen("inspect", self.model, "--load-format", "dummy", *args, code=code)
        return out or err

    def test_who_holds_what(self):
        j = json.loads(self.look("--tp", self.TP, "--json", "--device-memory", "141GB"))
        params = {k["kind"]: k["parameters"] for k in j["kinds"]}
        self.assertEqual(round(j["active_params"] / 1e9, 1), 40.1)
        self.assertEqual(round(sum(params.values()) / 1e9, 3), 753.864)
        self.assertEqual(round((sum(params.values()) - params["not used"]) / 1e9, 2), 743.91)
        self.assertEqual(j["n_params"], sum(params.values()) - params["not used"])
        self.assertEqual(round(params["experts"] / 1e9, 2), round(75 * 256 * 3 * 6144 * 2048 / 1e9, 2))
        self.assertEqual(j["kv_bytes_per_token"], self.TP * 78 * (576 + 128) * 2)  # of all ranks: each has it all
        for r in j["ranks"]:
            self.assertEqual((r["n_heads"], r["n_ff"], r["n_expert_ff"], r["n_vocab"]), (8, 1536, 256, 19360))
            self.assertEqual(r["expert_bytes"], 75 * 256 * 3 * 6144 * 256 * 144 // 256)
        self.assertEqual(sum(r["expert_bytes"] for r in j["ranks"]),
                         [k["bytes"] for k in j["kinds"] if k["kind"] == "experts"][0])
        room = j["device_memory"]
        self.assertGreater(room["tokens"], 500000)
        self.assertLess(room["weight_bytes"] + room["buffer_bytes"] + room["tokens"] * 78 * 704 * 2, 141e9 * 0.92)

    def test_floors(self):
        """Bytes of a step from the shapes, by hand. Q8_0 has 34 bytes for 32 values, Q4_K 144 for 256."""
        j = json.loads(self.look("--tp", self.TP, "--json", "--kv-cache-dtype", "bf16"))
        d, layers, moe, q8 = 6144, 78, 75, 34 / 32
        whole = layers * d * (2048 + 576) * q8 + moe * d * 256 * 4
        heads = layers * 64 * (2048 * 256 + 192 * 512 + 512 * 256 + 256 * d) * q8
        ffn = (3 * 12288 + moe * 2048) * 3 * d * q8 + d * 154880 * q8
        for f in j["floors"]:
            chosen = 256 * (1 - (1 - 8 / 256) ** f["batch"])
            experts = moe * chosen * 3 * d * 2048 * 144 / 256
            keys, index = f["context"], 0
            weights = whole + (heads + ffn + experts) / self.TP
            if keys > 2048:  # the indexer chooses
                weights += layers * (2048 * 4096 + d * 128) * q8 + layers * d * 32 * 4
                keys, index = 2048, keys * layers * 128 * 2
            kv = f["batch"] * (keys * layers * 576 * 2 + index)
            self.assertAlmostEqual(f["experts"], chosen, places=6)
            self.assertAlmostEqual(f["weight_bytes"] / weights, 1, delta=2e-3, msg=f)  # and norms
            self.assertAlmostEqual(f["kv_bytes"] / kv, 1, places=9)
            read = (f["weight_bytes"] + f["kv_bytes"]) / 4.3e12
            self.assertAlmostEqual(f["ms"], 1e3 * max(read, f["flops"] / 790e12), places=9)
        first = j["floors"][0]
        self.assertEqual((first["batch"], first["context"]), (1, 1024))
        flops = 2 * (j["active_params"] + 7 * layers * d * (2048 + 576) + 7 * moe * d * 256) / self.TP
        self.assertAlmostEqual(first["flops"] / (flops + 10.86e6 / 8 * 1024), 1, delta=1e-3)

    def test_text(self):
        out = self.look("--tp", "3", "--device-memory", "141GB", "-q").decode()
        for part in ("256 experts of 2048 columns, 8 a token, by sigmoid", "the first 3 layers are dense",
                     "1 more block to predict further tokens", "latent attention (512 + 64", "156 all-reduces",
                     "On GPUs of 141 GB", "0+22", "43+21"):
            self.assertIn(part, out)
        self.assertNotIn("KV heads", out)

    def test_a_file_cut_off(self):
        _, err = batchgen("inspect", self.model, "--json", code=78)
        self.assertIn(b"cut off", err)

    def test_uneven_shares(self):
        """Widths of experts that no blocks of 256 divide; more ranks than KV heads."""
        for preset, tp in (("tiny-gpt-oss", 3), ("tiny-glm4moe", 8), ("tiny-mixtral", 8), ("tiny-dsv3", 2)):
            model = make_model(f"{self.dir}/{preset}.gguf", preset)
            out, _ = batchgen("inspect", model, "--tp", tp, "--json")
            j = json.loads(out)
            experts = [k["bytes"] for k in j["kinds"] if k["kind"] == "experts"][0]
            self.assertEqual(sum(r["n_heads"] for r in j["ranks"]), j["n_heads"], preset)
            self.assertEqual(sum(r["n_expert_ff"] for r in j["ranks"]), j["d_ff_expert"], preset)
            self.assertGreaterEqual(sum(r["expert_bytes"] for r in j["ranks"]), experts, preset)
            for r in j["ranks"]:
                table = [k["bytes"] for k in j["kinds"] if k["kind"] == "embedding"][0]
                self.assertEqual(r["weight_bytes"], r["replicated_bytes"] + r["sharded_bytes"] + r["expert_bytes"]
                                 + table, preset)
            out, _ = batchgen("inspect", model, "--tp", tp)
            self.assertIn(b"of an expert", out)


if __name__ == "__main__":
    unittest.main()
