#!/usr/bin/env python3
"""What happens when a GPU's rank dies, errs, hangs or runs out of memory; and tensor and data
parallel ranks, which share one GPU unless there are more (BATCHGEN_TEST_GPUS: how many). Prints PASS or FAIL for each case; exit 1 if one failed."""
import json
import os
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "e2e"))
from common import BATCHGEN, TMP, commits, descendants, digest, environment, make_model, prompts, write_lines  # noqa: E402

MODEL = f"{TMP}/failures.gguf"
EACH = ["--commit-bytes", "1", "--commit-interval", "0.01"]
DIR = tempfile.mkdtemp(dir=TMP)
LIMIT_S = 100  # of one run
N_GPUS = int(os.environ.get("BATCHGEN_TEST_GPUS", "1"))
GOLDEN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "golden", "models")
# One of each family beyond the dense ones: experts, latents, indexer, sinks.
FAMILIES = ["tiny-qwen3moe.q8_0", "tiny-qwen2moe.q5_1", "tiny-mixtral.q5_0", "tiny-glm4.q5_0", "tiny-glm4moe.q5_0",
            "tiny-gpt-oss.mxfp4", "tiny-dsv3.q8_0", "tiny-v2.legacy", "tiny-dsa.q8_0"]
FAMILIES = os.environ.get("BATCHGEN_TEST_FAMILIES", " ".join(FAMILIES)).split()


def gpus(n_ranks):
    return "cuda:" + ",".join(str(i % N_GPUS) for i in range(n_ranks))


class Bad(Exception):
    pass


def must(ok, why):
    if not ok:
        raise Bad(why)


class Run:
    """A job on the GPU: its output, exit status, messages and summary."""

    def __init__(self, name, inp, *args, device="cuda:0", fault=None, on_start=None, model=None):
        self.out = f"{DIR}/{name}.jsonl"
        summary = f"{DIR}/{name}.summary"
        env = environment()
        if fault:
            env["BATCHGEN_TEST_GPU_FAULT"] = fault
        command = [BATCHGEN, "run", inp, "-m", model or MODEL, "-o", self.out, "--ordered", "--device", device, "--overwrite",
                   "--max-model-len", "1024", "--max-num-seqs", "8", "--temperature", "0", "--kv-cache-memory", "256MiB",
                   "--summary", summary, "--log-level", "info", *map(str, args)]
        job = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, env=env)
        try:
            if on_start:
                on_start(job, self.out)
            _, err = job.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            for p in [job.pid, *descendants(job.pid)]:
                os.kill(p, signal.SIGKILL)
            _, err = job.communicate()
            raise Bad(f"{name}: not over after {LIMIT_S} s: {err.decode(errors='replace')[-1500:]}") from None
        self.code, self.messages = job.returncode, err.decode(errors="replace")
        self.summary = {}
        if os.path.exists(summary):
            with open(summary) as f:
                self.summary = json.load(f)

    def good(self):
        must(self.code == 0, f"exit {self.code}: {self.messages[-1500:]}")
        return self

    def restarts(self):
        return self.summary["engine"]["restarts"]

    def texts(self):
        with open(self.out) as f:
            return [[json.loads(line).get(k) for k in ("text", "message", "choices")] for line in f]


def same_share(a, b):
    a, b = a.texts(), b.texts()
    must(len(a) == len(b), f"{len(a)} and {len(b)} results")
    return sum(x == y for x, y in zip(a, b)) / len(a)


def name_of(pid):
    try:
        with open(f"/proc/{pid}/comm") as f:
            return f.read().strip()
    except OSError:
        return ""


def kill_rank(which):
    """Once there are some results."""

    def do(job, out):
        end = time.monotonic() + LIMIT_S
        while job.poll() is None and commits(out) < 3 and time.monotonic() < end:
            time.sleep(0.002)
        for pid in descendants(job.pid):
            if name_of(pid) == f"bg-rank{which}":
                os.kill(pid, signal.SIGKILL)
                return
        raise Bad("no such rank half-way")

    return do


_made = {}


def made(name, *args, **kw):
    """A run that several cases compare with, made once."""
    if name not in _made:
        _made[name] = Run(name, *args, **kw).good()
    return _made[name]


def one():
    return made("one", LONG)


def short(tp, *args, name=None, **kw):
    return made(name or f"short{tp}", SHORT, "--tp", tp, *args, device=gpus(tp), **kw)


# ---- cases ------------------------------------------------------------------------------------------


def case_killed():
    r = Run("killed", LONG, *EACH, on_start=kill_rank(0)).good()
    must(r.restarts() >= 1, "was not started again")
    must(digest(r.out) == digest(one().out), "another output")


def case_sticky():
    r = Run("sticky", LONG, fault="step:60,illegal-address").good()
    must(r.restarts() >= 1, "no failure")
    must("starting the ranks again" in r.messages and "CUDA" in r.messages, f"not said: {r.messages[-800:]}")
    must(digest(r.out) == digest(one().out), "another output")


def case_no_memory_in_a_step():
    r = Run("oom", LONG, fault="step:60,oom").good()
    must(r.restarts() >= 1, "no failure")
    must(digest(r.out) == digest(one().out), "another output")


def case_hang():
    start = time.monotonic()
    r = Run("hang", LONG, "--hang-timeout", "5", fault="step:100,hang").good()
    must(r.restarts() >= 1, "no failure")
    must("no rank got on for" in r.messages, f"not said: {r.messages[-800:]}")
    must(digest(r.out) == digest(one().out), "another output")
    return f"{time.monotonic() - start:.0f} s, {r.restarts()} restarts"


def case_always_failing():
    r = Run("always", LONG, fault="step:1,illegal-address")
    must(r.code == 69, f"exit {r.code}: {r.messages[-800:]}")
    must("failed 3 times" in r.messages, f"not said: {r.messages[-800:]}")


def case_capture():
    r = Run("capture", SHORT, fault="step:0,capture")
    must(r.code == 69 and "--eager" in r.messages, f"exit {r.code}: {r.messages[-800:]}")


def case_eager():
    r = Run("eager", LONG, "--eager").good()
    must(digest(r.out) == digest(one().out), "eager and graphs differ")


def case_too_large():
    r = Run("large", SHORT, "--max-num-seqs", "4096", "--kv-cache-memory", "4000GiB", "--max-model-len", "131072")
    must(r.code in (64, 69, 70), f"exit {r.code}: {r.messages[-800:]}")
    must("--" in r.messages and "GB" in r.messages, f"not said: {r.messages[-800:]}")
    return r.messages.strip().splitlines()[-1][:150]


def case_too_few_gpus():
    r = Run("few", SHORT, "--tp", "64", device="cuda")
    must(r.code == 64 and "cuda:0,0" in r.messages, f"exit {r.code}: {r.messages[-800:]}")
    r = Run("none", SHORT, device="cuda:77")
    must(r.code == 64 and "no GPU 77" in r.messages, f"exit {r.code}: {r.messages[-800:]}")


def tp_case(tp):
    captured, eager = short(tp), short(tp, "--eager", name=f"eager{tp}")
    must(digest(captured.out) == digest(eager.out), "eager and graphs differ")
    share, cpu = same_share(captured, short(1)), made(f"cpu{tp}", SHORT, "--tp", tp, device="cpu")
    must(share >= 0.7, f"only {share:.0%} as with one rank")
    return f"{share:.0%} of texts as with one rank, {same_share(captured, cpu):.0%} as on the CPU"


def case_tp2():
    return tp_case(2)


def case_tp4():
    return tp_case(4)


def case_tp2_exact():
    """--compute f32: the CPU's very tokens, but for ties."""
    gpu = made("f32", SHORT, "--tp", 2, "--compute", "f32", device=gpus(2))
    cpu = made("f32cpu", SHORT, "--tp", 2, "--compute", "f32", device="cpu")
    share = same_share(gpu, cpu)
    must(share >= 0.9, f"only {share:.0%} as on the CPU")
    return f"{share:.0%} of texts as on the CPU"


def case_tp2_killed():
    """Ranks that share a GPU take milliseconds for a sum; with two GPUs only a longer job can be met half-way."""
    inp, whole = (SHORT, short(2)) if N_GPUS < 2 else (LONG, made("long2", LONG, "--tp", 2, device=gpus(2)))
    r = Run("tp2killed", inp, "--tp", 2, *EACH, device=gpus(2), on_start=kill_rank(1)).good()
    must(r.restarts() >= 1, "was not started again")
    must(digest(r.out) == digest(whole.out), "another output")


def case_tp2_sticky():
    r = Run("tp2sticky", SHORT, "--tp", 2, device=gpus(2), fault="step:6,illegal-address,rank:1").good()
    must(r.restarts() >= 1, "no failure")
    must(digest(r.out) == digest(short(2).out), "another output")


def case_tp2_hang():
    r = Run("tp2hang", SHORT, "--tp", 2, "--hang-timeout", "5", device=gpus(2), fault="step:8,hang,rank:1").good()
    must(r.restarts() >= 1, "no failure")
    must(digest(r.out) == digest(short(2).out), "another output")


def case_tp2_bench():
    p = subprocess.run([BATCHGEN, "bench", "-m", MODEL, "--device", gpus(2), "--tp", "2", "--batch", "1,2", "-p", "16",
                        "-g", "4"], capture_output=True, env=environment(), timeout=LIMIT_S, text=True)
    must(p.returncode == 0, f"exit {p.returncode}: {p.stderr[-800:]}")
    return p.stdout.strip().splitlines()[-1]


def case_dp2():
    r = Run("dp2", LONG, "--dp", 2, device="cuda:0").good()
    must(digest(r.out) == digest(one().out), "another output")


def case_dp2_killed():
    r = Run("dp2killed", LONG, "--dp", 2, *EACH, device="cuda:0", on_start=kill_rank(0)).good()
    must(digest(r.out) == digest(one().out), "another output")


def families(tp, inp):
    """float32: the CPU's texts, with as many ranks; native: the same bytes as graphs and eager."""
    notes, bad = [], []
    for family in FAMILIES:
        args = {"model": f"{GOLDEN}/{family}.gguf", "device": gpus(tp)}
        exact = Run(f"{family}.f32.{tp}", inp, "--tp", tp, "--compute", "f32", **args).good()
        cpu = Run(f"{family}.cpu.{tp}", inp, "--tp", tp, "--compute", "f32", model=args["model"], device="cpu").good()
        share = same_share(exact, cpu)
        graph = Run(f"{family}.graph.{tp}", inp, "--tp", tp, **args).good()
        eager = Run(f"{family}.eager.{tp}", inp, "--tp", tp, "--eager", **args).good()
        same = digest(graph.out) == digest(eager.out)
        notes.append(f"{family} {share:.0%}/{same_share(graph, cpu):.0%}")
        if share < 0.85 or not same:
            bad.append(f"{family}: {share:.0%} of texts as on the CPU, graphs and eager {'the same' if same else 'differ'}")
    must(not bad, "; ".join(bad))
    return "texts as on the CPU in float32 / native: " + ", ".join(notes)


def case_families():
    return families(1, SHORT)


def case_families_alone():
    """A record has the same bytes one at a time, in small pieces of prompts, and with every op's output checked."""
    bad = []
    for family in FAMILIES:
        model = f"{GOLDEN}/{family}.gguf"
        whole = Run(f"{family}.whole", SHORT, model=model).good()
        for name, args in (("one", ["--max-num-seqs", 1]), ("pieces", ["--max-num-batched-tokens", 16, "--no-prefix-cache"]),
                           ("check", ["--check", "--eager"]), ("killed", EACH)):
            r = Run(f"{family}.{name}", SHORT, *args, model=model,
                    fault="step:4,illegal-address" if name == "killed" else None).good()
            if digest(r.out) != digest(whole.out):
                bad.append(f"{family}: another output, {name}")
            if name == "killed" and not r.restarts():
                bad.append(f"{family}: no failure")
    must(not bad, "; ".join(bad))
    return f"{len(FAMILIES)} families"


def case_indexer():
    """An indexer as wide as GLM-5's kernels want it, and more keys than it chooses: a record has the same bytes alone and
    with up to 25 others, where other kernels overlap, as a graph and eager, and with every op's output checked."""
    bad = []
    inp = write_lines(f"{DIR}/indexer.jsonl",
                      [{"id": str(i), "prompt": " ".join(f"word{(i * 7 + k * k) % 90}" for k in range(20 + 13 * (i % 10))),
                        "max_tokens": 24} for i in range(26)])
    ends = ["--ignore-eos"]
    for mix in ("q8_0", "ud_q4_k"):
        model = f"{DIR}/indexer.{mix}.gguf"
        make_model(model, "tiny-glm-dsa", mix)
        whole = Run(f"indexer.{mix}.whole", inp, *ends, model=model).good()
        for name, args in (("one", ["--max-num-seqs", 1]), ("two", ["--max-num-seqs", 2]), ("four", ["--max-num-seqs", 4]),
                           ("eager", ["--eager", "--max-num-seqs", 1]), ("check", ["--check", "--eager"]),
                           ("pieces", ["--max-num-batched-tokens", 16, "--no-prefix-cache"])):
            r = Run(f"indexer.{mix}.{name}", inp, *ends, *args, model=model).good()
            if digest(r.out) != digest(whole.out):
                bad.append(f"{mix}: another output, {name}")
        exact = Run(f"indexer.{mix}.f32", inp, *ends, "--compute", "f32", model=model).good()
        cpu = Run(f"indexer.{mix}.cpu", inp, *ends, "--compute", "f32", model=model, device="cpu").good()
        if same_share(exact, cpu) < 0.85:
            bad.append(f"{mix}: float32 gives {same_share(exact, cpu):.0%} of the CPU's texts")
    must(not bad, "; ".join(bad))


def case_families_tp2():
    return families(2, SHORT if N_GPUS > 1 else FEW)


def case_families_tp8():
    """Eight ranks are more than most of these have heads, or experts' columns to share."""
    return families(8, FEW)


def main():
    cases = {k[5:]: v for k, v in globals().items() if k.startswith("case_")}
    wanted = sys.argv[1:] or list(cases)
    failed = 0
    for name in wanted:
        start = time.monotonic()
        try:
            note, verdict = cases[name]() or "", "PASS"
        except Exception as e:  # whatever it is: the other cases are run
            note, verdict = f"{type(e).__name__}: {e}", "FAIL"
            failed += 1
        print(f"{verdict} {name} ({time.monotonic() - start:.1f} s) {note}", flush=True)
    print(f"{len(wanted) - failed} of {len(wanted)} passed")
    return failed != 0


make_model(MODEL, "tiny-llama", "q4_k_m", "--layers", "2")
LONG = write_lines(f"{DIR}/long.jsonl", prompts(60))
SHORT = write_lines(f"{DIR}/short.jsonl", [{"id": r["id"], "prompt": r.get("prompt", "the sea")[:120], "max_tokens": 8}
                                           for r in prompts(16, seed=2)])
FEW = write_lines(f"{DIR}/few.jsonl", [{"id": r["id"], "prompt": r.get("prompt", "the sea")[:60], "max_tokens": 3}
                                       for r in prompts(6, seed=3)])
if __name__ == "__main__":
    sys.exit(main())
