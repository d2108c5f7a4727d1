"""What eight_gpus.sh runs; see there."""
import atexit
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

BUILD = os.path.abspath(os.environ.get("BUILD", "build"))
BATCHGEN, MKMODEL = f"{BUILD}/batchgen", f"{BUILD}/mkmodel"
if "WORK" in os.environ:
    WORK = os.path.abspath(os.environ["WORK"])
    os.makedirs(WORK, exist_ok=True)
else:
    WORK = tempfile.mkdtemp(prefix="batchgen-gpus.")
    atexit.register(shutil.rmtree, WORK, ignore_errors=True)
LOG = open(os.environ.get("LOG", f"{WORK}/log"), "a", encoding="utf-8")
TABLE = []  # (part, what, value)
WRONG = []  # what did not come out as it must
LIMIT_S = 580  # of one program


class Bad(Exception):
    pass


def say(part, what, value):
    TABLE.append((part, what, str(value)))
    print(f"{part:6} {what:58} {value}", flush=True)


def judge(part, what, value, ok):
    say(part, what, value)
    if not ok:
        WRONG.append(f"{part}: {what}: {value}")


def log(text):
    LOG.write(text + "\n")
    LOG.flush()


def run(*args, ok=True, limit=LIMIT_S):
    """Runs a program to its end; what it printed, both streams."""
    args = [str(a) for a in args]
    log("$ " + " ".join(args))
    p = subprocess.run(args, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=limit, errors="replace")
    log(p.stdout)
    if ok and p.returncode:
        raise Bad(f"{os.path.basename(args[0])} {args[1] if len(args) > 1 else ''}: exit {p.returncode}: {p.stdout[-600:]}")
    return p.stdout


def powers(n):
    return [k for k in (1, 2, 4, 8) if k <= n]


def gpus():
    """[bytes of each GPU]"""
    if os.environ.get("GPUS") == "0":
        return []
    try:
        out = subprocess.run(["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"],
                             capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as e:
        sys.exit(f"no GPUs are to be had: {e}; GPUS=0 RANKS=4: a rehearsal on the CPU")
    sizes = [int(x) << 20 for x in out.split()]
    return sizes[: int(os.environ.get("GPUS", len(sizes)))]


SIZES = gpus()
CPU = not SIZES  # tiny models instead of each
N = max(powers(int(os.environ.get("RANKS", len(SIZES)))), default=0)  # ranks
REHEARSAL = N > len(SIZES)  # ranks share GPUs: sums take milliseconds, models and jobs are small, no time counts
TINY = {"glm5-slice": "tiny-glm-dsa", "llama-3.1-8b": "tiny-llama"}


def device(n_ranks):
    """Names the GPUs of so many ranks; ranks beyond them share."""
    return "cpu" if CPU else "cuda:" + ",".join(str(i) for i in range(min(n_ranks, len(SIZES))))


def model(name, preset, mix, *args):
    path = f"{WORK}/{name}.gguf"
    args = ["--preset", TINY[preset] if CPU else preset, "--mix", mix, *([] if CPU else args)]
    if not os.path.exists(path):
        start = time.monotonic()
        run(MKMODEL, *args, "--threads", os.cpu_count() or 2, "-o", path + ".part")
        os.rename(path + ".part", path)
        log(f"{path}: made in {time.monotonic() - start:.1f} s")
    return path


def prompts(name, n, words, max_tokens):
    path = f"{WORK}/{name}.jsonl"
    text = ("the sea", "a house", "seven birds", "of the old town", "over", "it was late", "and then", "in winter", "she said")
    with open(path, "w", encoding="utf-8") as f:
        for i in range(n):
            prompt = " ".join(text[(i * 7 + j * (1 + i % 5)) % len(text)] for j in range(words))
            f.write(json.dumps({"id": f"r{i}", "prompt": f"{i}: {prompt}", "max_tokens": max_tokens}) + "\n")
    return path


# ---- jobs ----------------------------------------------------------------------------------------------


def children(pid):
    out = []
    for p in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{p}/stat") as f:
                if int(f.read().rpartition(")")[2].split()[1]) == pid:
                    out += [int(p), *children(int(p))]
        except OSError:
            pass
    return out


def comm(pid):
    try:
        with open(f"/proc/{pid}/comm") as f:
            return f.read().strip()
    except OSError:
        return ""


class Job:
    """One run to its end, watched: CPU seconds of the coordinator by thread, and a rank killed on the way."""

    def __init__(self, name, path, inp, *args, tp=1, dp=1, kill=None):
        self.out, self.summary = f"{WORK}/{name}.out", f"{WORK}/{name}.summary"
        command = [BATCHGEN, "run", inp, "-m", path, "-o", self.out, "--overwrite", "--ordered", "--temperature", 0,
                   "--ignore-eos", "--summary", self.summary, "--quiet", "--tp", tp, "--dp", dp,
                   "--device", device(tp * dp), *args]
        command = [str(a) for a in command]
        log("$ " + " ".join(command))
        self.threads, self.killed = {}, None
        start = time.monotonic()
        p = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        watch = threading.Thread(target=self.watch, args=(p, kill), daemon=True)
        watch.start()
        try:
            said, _ = p.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            for pid in [p.pid, *children(p.pid)]:
                os.kill(pid, signal.SIGKILL)
            said, _ = p.communicate()
            raise Bad(f"{name}: not over after {LIMIT_S} s: {said[-600:]}") from None
        watch.join()
        self.seconds = time.monotonic() - start
        log(said)
        if p.returncode:
            raise Bad(f"{name}: exit {p.returncode}: {said[-600:]}")
        with open(self.summary, encoding="utf-8") as f:
            self.sum = json.load(f)
        log(json.dumps(self.sum))
        if kill is not None and self.killed is None:
            raise Bad(f"{name}: no rank {kill} was there to be killed half-way")

    def watch(self, p, kill):
        tick = os.sysconf("SC_CLK_TCK")
        while p.poll() is None:
            seen = {}
            try:
                for t in os.listdir(f"/proc/{p.pid}/task"):
                    with open(f"/proc/{p.pid}/task/{t}/stat") as f:
                        head, _, rest = f.read().rpartition(")")
                    name, fields = head.partition("(")[2], rest.split()
                    seen[name] = seen.get(name, 0) + (int(fields[11]) + int(fields[12])) / tick
            except OSError:
                pass
            for name, s in seen.items():
                self.threads[name] = max(s, self.threads.get(name, 0))
            if kill is not None and self.killed is None and os.path.exists(self.out) and os.path.getsize(self.out) > 0:
                for pid in children(p.pid):
                    if comm(pid) == f"bg-rank{kill}":
                        os.kill(pid, signal.SIGKILL)
                        self.killed = time.monotonic()
                        break
            time.sleep(0.02 if kill is not None and self.killed is None else 0.2)

    def digest(self):
        with open(self.out, "rb") as f:
            return hashlib.sha256(f.read()).hexdigest()

    def texts(self):
        with open(self.out, encoding="utf-8") as f:
            return [json.dumps([json.loads(line).get(k) for k in ("text", "message", "choices")]) for line in f]

    def rate(self):
        return self.sum["output_tokens_per_second"]


def same_beginnings(a, b):
    """Share of texts that are equal, and of characters before the first that differs."""
    equal = sum(x == y for x, y in zip(a, b))
    before = 0.0
    for x, y in zip(a, b):
        n = next((i for i, (c, d) in enumerate(zip(x, y)) if c != d), min(len(x), len(y)))
        before += n / max(len(x), len(y), 1)
    return equal / len(a), before / len(a)


# ---- parts ---------------------------------------------------------------------------------------------


def part_sums():
    test = f"{BUILD}/tests/gpu/test_comm"
    out = run(test, "-j1", "--filter", "comm/*_peers" if REHEARSAL else "comm/*_gpus", ok=False)
    line = next((x for x in out.splitlines() if "Synthesis" in x), "no result")
    line = re.sub(r"\x1b\[[0-9;]*m", "", line)
    judge("sums", "right, bit for bit, eager and captured", line, "Failing: 0 | Crashing: 0" in line)
    out = run(test, "-j1", "--filter", "comm/bench_sums", ok=False)
    for line in out.splitlines():
        if re.match(r"us a sum|\s+KiB|\s+\d+(\s+([\d.]+|-)){6}$", line):
            say("sums", line, "")


def bench(path, *args):
    out = run(BATCHGEN, "bench", "-m", path, "--load-format", "dummy", "--device", device(N), "--tp", N, "--skip-prefill",
              "--profile", "--json", *args)
    return json.loads(out[out.index("{"):])


def show_steps(what, b):
    for r in b["rows"]:
        own = r.get("rank_0") or r.get("rank_alone") or {}
        step = own.get("step_ms", r["batch"] / r["decode_tokens_per_second"] * 1e3)
        more = ""
        if own:
            more = (f", sums {own['all_reduce_ms']:.2f} ms x {own['all_reduces']}, floor {own['memory_floor_ms']:.2f} ms, "
                    f"step/floor+sums {own['step_over_floor_with_all_reduces']:.2f}")
        say("glm5", f"{what}, batch {r['batch']}", f"{step:.2f} ms, {r['decode_tokens_per_second']:.0f} tok/s{more}")
    for r in b["rows"]:
        p = r.get("decode_profile")
        if p and r["batch"] in (1, 128):
            split = ", ".join(f"{k['name']} {k['ms']:.2f}" for k in sorted(p["by_op"], key=lambda k: -k["ms"])[:8])
            say("glm5", f"{what}, batch {r['batch']}: ms by op", split)


def part_glm5():
    whole, layers = 434e9, 78
    most = 4 if REHEARSAL else min(layers, int(layers * N * min(SIZES) * 0.65 / whole))
    args = [] if most == layers else ["--layers", most]
    path = model("glm5", "glm-5", "ud_q4_k", "--header-only", *args)
    tag = f"GLM-5, {most} of {layers} layers, TP={N}"
    many, few = ("1,128", "1") if REHEARSAL else ("1,32,128,256,512", "1,32")
    g, seqs = (4, 8) if REHEARSAL else (32, 512)
    b = bench(path, "--ctx", 1024, "-g", g, "--batch", many)
    say("glm5", f"{tag}: start", f"{b['start_seconds']:.1f} s; load {json.dumps(b.get('load', {}))}")
    say("glm5", f"{tag}: memory", f"{b['memory'] / N * 1e-9:.1f} GB a rank, of {b['weight_bytes'] / N * 1e-9:.1f} GB weights")
    show_steps(f"{tag}, context 1k, graphs", b)
    show_steps(f"{tag}, context 1k, eager", bench(path, "--ctx", 1024, "-g", g, "--batch", few, "--eager"))
    show_steps(f"{tag}, context 4k, graphs", bench(path, "--ctx", 4096, "-g", g, "--batch", many))
    show_steps(f"{tag}, context 4k, graphs, q8 cache",
               bench(path, "--ctx", 4096, "-g", g, "--batch", "128,256", "--kv-cache-dtype", "q8"))
    inp = prompts("glm5", 8 if REHEARSAL else 1024, 200, 8 if REHEARSAL else 128)
    j = Job("glm5", path, inp, "--load-format", "dummy", "--max-model-len", 2048, "--max-num-seqs", seqs, tp=N)
    say("glm5", f"{tag}: job of {j.sum['request_counts']['completed']}",
        f"{j.rate():.0f} tok/s, {j.sum['seconds']:.1f} s and {j.seconds - j.sum['seconds']:.1f} s around")


def part_slice():
    path = model("slice", "glm5-slice", "q4_k_m", "--layers", 3, "--experts", 64)
    inp = prompts("slice", 32, 40, 8 if REHEARSAL else 32)
    args = ["--max-model-len", 2048, "--max-num-seqs", 32]
    for what, compute in (("", "native"), (" in float32", "f32")):
        first = None
        for tp in powers(N):
            j = Job(f"slice{tp}{compute}", path, inp, *args, "--compute", compute, tp=tp)
            first = first or j.texts()
            equal, before = same_beginnings(first, j.texts())
            judge("slice", f"TP={tp}: texts as with TP=1{what}",
                  f"{equal:.0%} equal, {before:.0%} before the first difference", compute == "native" or equal >= 0.85)
            if compute == "native" and not CPU:  # where it makes a difference
                same = j.digest() == Job(f"slice{tp}eager", path, inp, *args, "--eager", tp=tp).digest()
                judge("slice", f"TP={tp}: eager and graphs", "equal" if same else "NOT EQUAL", same)


def llama():
    """In a rehearsal with few layers: tokens come as fast as from several GPUs."""
    if REHEARSAL:
        return model("llama-2-layers", "llama-3.1-8b", "q4_k_m", "--layers", 2)
    return model("llama", "llama-3.1-8b", "q4_k_m")


def part_llama():
    path, args = llama(), ["--max-model-len", 1024, "--max-num-seqs", 256]
    one = None
    for k in powers(N):
        j = Job(f"dp{k}", path, prompts("llama", 1000 * k, 100, 128), *args, dp=k)
        one = one or j.rate()
        work, idle = j.sum["engine"]["device_work_ms"], j.sum["engine"]["device_idle_ms"]
        say("llama", f"--dp {k}: output tok/s", f"{j.rate():.0f}, {j.rate() / one / k:.0%} of {k} x one; idle GPU "
                                                f"{idle / max(1, work + idle):.1%}")
        busy = sorted(j.threads.items(), key=lambda x: -x[1])[:5]
        say("llama", f"--dp {k}: coordinator's threads, CPU s of {j.seconds:.0f} s", ", ".join(f"{a} {s:.1f}" for a, s in busy))
    if N > 1:
        n, tokens = (64, 16) if REHEARSAL else (1000, 128)
        j = Job("tp", path, prompts("llama", n, 100, tokens), *args, tp=N)
        say("llama", f"--tp {N}: output tok/s", f"{j.rate():.0f}")


def part_kill():
    path = llama()
    often = ["--max-model-len", 1024, "--max-num-seqs", 64, "--commit-bytes", 1, "--commit-interval", 0.05]
    for way in ("tp", "dp"):
        n, tokens = (200, 8) if REHEARSAL and (CPU or way == "tp") else (400, 128)
        inp = prompts("kill", n, 50, tokens)
        whole = Job(f"{way}whole", path, inp, *often, **{way: N})
        j = Job(f"{way}killed", path, inp, *often, kill=N - 1, **{way: N})
        same = j.digest() == whole.digest()
        judge("kill", f"--{way} {N}: rank {N - 1} killed",
              f"{'byte-identical' if same else 'OTHER BYTES'}; {j.sum['engine']['restarts']} restarts, {j.seconds:.1f} s, "
              f"undisturbed {whole.seconds:.1f} s", same)


def main():
    if N < 2:
        sys.exit("two GPUs at least are needed; RANKS=8: that many ranks share those that there are, a rehearsal")
    parts = {k[5:]: v for k, v in globals().items() if k.startswith("part_")}
    if CPU:  # the others need a GPU's random weights, or its sums
        parts = {k: parts[k] for k in ("slice", "llama", "kill")}
    wanted = sys.argv[1:] or list(parts)
    if not set(wanted) <= set(parts):
        sys.exit(f"there are the parts {', '.join(parts)}{' on the CPU' if CPU else ''}, not {' '.join(wanted)}")
    for name in wanted:
        start = time.monotonic()
        try:
            parts[name]()
        except Exception as e:  # whatever it is: the other parts are run
            judge(name, "FAILED", f"{type(e).__name__}: {e}", False)
        log(f"{name}: {time.monotonic() - start:.1f} s")
    what = f"{len(SIZES)} GPUs of {SIZES[0] / 2**30:.0f} GiB" if SIZES else "The CPU"
    shared = f", shared by {N} ranks: no time here means anything" if REHEARSAL else ""
    print(f"\n{what}{shared}; the whole text: {LOG.name}\n")
    for part, what, value in TABLE:
        print(f"| {part} | {what} | {value} |")
    for text in WRONG:
        print(f"WRONG {text}", file=sys.stderr)
    sys.exit(bool(WRONG))


main()
