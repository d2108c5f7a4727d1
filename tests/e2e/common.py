"""What the end-to-end tests share: the program, a tiny synthetic model, inputs, results.

BUILD names the build folder (build). Nothing here needs the network or a real model, and nothing
sleeps: to catch a job half-way the tests wait for a commit.
"""
import atexit
import hashlib
import json
import os
import random
import select
import shutil
import subprocess
import tempfile

BUILD = os.environ.get("BUILD", "build")
BATCHGEN = os.path.abspath(f"{BUILD}/batchgen")
SANITIZED = "address" in os.path.basename(BUILD)  # its shadow memory fits under no limit
MKMODEL = os.path.abspath(f"{BUILD}/mkmodel")
TMP = tempfile.mkdtemp(prefix="batchgen-e2e.")
MODEL = f"{TMP}/tiny.gguf"
LONG = ["--ignore-eos", "--max-tokens", "150", "--commit-bytes", "1", "--commit-interval", "0.01"]


atexit.register(shutil.rmtree, TMP, ignore_errors=True)


def make_model(path=MODEL, preset="tiny-llama", mix="q4_k_m", *more):
    """Makes the model if it is not there; gives its path."""
    if not os.path.exists(path):
        subprocess.run([MKMODEL, "--preset", preset, "--mix", mix, "-o", path, *more], check=True,
                       stdout=subprocess.DEVNULL)
    return path


def environment(**more):
    env = {k: v for k, v in os.environ.items() if not k.startswith("BATCHGEN_")}
    env.update(XDG_CONFIG_HOME=f"{TMP}/config", BATCHGEN_DEVICE="cpu", **more)
    return env


def batchgen(*args, code=0, stdin=None, env=None, **kw):
    """Runs the program, expects an exit status, returns (stdout, stderr) as bytes."""
    p = subprocess.run([BATCHGEN, *map(str, args)], input=stdin, capture_output=True,
                       env=env or environment(), timeout=300, **kw)
    if code is not None and p.returncode != code:
        raise AssertionError(f"batchgen {args}: exit {p.returncode}, want {code}\n"
                             f"{p.stdout.decode(errors='replace')[-2000:]}\n"
                             f"{p.stderr.decode(errors='replace')[-4000:]}")
    return p.stdout, p.stderr


def results(path):
    """Result lines of an output, as bytes; reads what the ordinary decompressor reads."""
    if path.endswith(".lz4"):
        data = subprocess.run(["lz4", "-dc", path], check=True, capture_output=True).stdout
    else:
        with open(path, "rb") as f:
            data = f.read()
    assert data == b"" or data.endswith(b"\n"), "a line is not whole"
    return data.split(b"\n")[:-1]


def by_line(path):
    """{line number: result}, each once."""
    out = {}
    for raw in results(path):
        r = json.loads(raw)
        assert r["line"] not in out, f"line {r['line']} twice"
        out[r["line"]] = raw
    return out


def write_lines(path, records):
    with open(path, "w", encoding="utf-8") as f:
        for r in records:
            f.write((r if isinstance(r, str) else json.dumps(r, ensure_ascii=False)) + "\n")
    return path


def digest(path):
    with open(path, "rb") as f:
        return hashlib.sha256(f.read()).hexdigest()


def prompts(n, seed=1):
    rnd = random.Random(seed)
    words = "the sea and a stone under light of morning where nobody had been before".split()
    out = []
    for i in range(n):
        text = " ".join(rnd.choice(words) for _ in range(rnd.randint(1, 40)))
        if i % 3 == 0:
            text = "A common beginning that many records share, long enough to fill blocks of the cache: " * 2 + text
        r = {"id": f"r{i}", "prompt": text, "max_tokens": rnd.randint(1, 40)}
        if i % 4 == 1:
            r.update(temperature=0.8, top_p=0.9)
        if i % 7 == 2:
            r.update(n=2, temperature=1.2, seed=i)
        if i % 5 == 3:
            r = {"id": f"r{i}", "messages": [{"role": "user", "content": text}], "max_tokens": 12}
        out.append(r)
    return out


def start_job(*args):
    return subprocess.Popen([BATCHGEN, "run", *map(str, args)], stderr=subprocess.PIPE,
                            stdout=subprocess.DEVNULL, env=environment())


def commits(out):
    try:
        with open(out + ".journal", "rb") as f:
            return f.read().count(b'{"commit"')
    except FileNotFoundError:
        return 0


def wait_for_commits(job, out, n=1):
    """Until the journal has n commits or the job has ended. Watches a file: it has no event to wait for."""
    while job.poll() is None:
        if commits(out) >= n:
            return True
        select.select([], [], [], 0.005)
    return False


def descendants(pid):
    """Processes below pid, deepest last."""
    out, todo = [], [pid]
    while todo:
        p = todo.pop(0)
        try:
            for t in os.listdir(f"/proc/{p}/task"):
                with open(f"/proc/{p}/task/{t}/children") as f:
                    kids = [int(x) for x in f.read().split()]
                out += kids
                todo += kids
        except FileNotFoundError:
            pass
    return out


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
