#!/usr/bin/env python3
"""Kills batchgen hundreds of times, resumes it each time, and looks for a lost line.

    BUILD=build python3 tests/crash/kill.py --kills 200 [--seed 1] [--seconds 300] [--jobs 2]

A campaign is one job of some shape (SHAPES), killed with SIGKILL again and again until its share of
kills is used up, then run to its end. After every kill the files are verified (journal.py), and
against the same job undisturbed: each committed result is byte-equal to that one's, none is twice
or under another id, none that was committed before is missing, the tokens saved for sequences in
flight agree with that one's and never become fewer. At the end all lines are equal, and the run
that ended generated exactly the tokens that no earlier one had saved.

What is done when follows from --seed; the moments themselves are the machine's. The first violation
ends everything with status 1 and leaves the job's folder, with the files as they were before the
last start in before/. Needs python3, lz4 and the build folder's batchgen and mkmodel only.
"""
import argparse
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from campaign import Campaign, Reference  # noqa: E402
from journal import Violation, read  # noqa: E402
from processes import BATCHGEN, MKMODEL, die_with_parent, environment, kill  # noqa: E402
from shapes import SHAPES  # noqa: E402


COUNTS = ("starts", "verified", "busy", "regained", "gave_up", "replacing", "tails", "looks", "repairs")


def in_child(work):
    """Runs work() in a process that dies with this one; gives (pid, pipe) for its JSON answer."""
    r, w = os.pipe()
    parent, pid = os.getpid(), os.fork()
    if pid:
        os.close(w)
        return pid, r
    code = 2
    try:
        die_with_parent()
        os.close(r)
        if os.getppid() != parent:
            os._exit(2)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        answer = json.dumps(work()).encode()
        while answer:
            answer = answer[os.write(w, answer):]
        code = 0
    except BaseException as e:  # whatever it is, it is told and the process ends here
        print(f"kill.py: {type(e).__name__}: {e}", file=sys.stderr)
    finally:
        sys.stderr.flush()
        os._exit(code)


def campaign_work(ref, folder, model, seed, budget, stop_file, deadline, shard):
    def stop():
        return os.path.exists(stop_file) or time.monotonic() > deadline

    def work():
        c = Campaign(ref, folder, model, seed, budget, shard)
        why = None
        try:
            c.run(stop)
        except Violation as e:
            why = str(e)
        except Exception as e:
            why = f"{type(e).__name__}: {e}"
        return {"why": why, "kills": c.kills, "dir": folder, "shape": c.shape.name, **{k: getattr(c, k) for k in COUNTS}}
    return work


def add_up(into, kills):
    for k, n in kills.items():
        into[k] = into.get(k, 0) + n


def report(total, missing, began):
    real = {k: n for k, n in total["kills"].items() if "not a kill" not in k}
    kinds, moments = {}, {}
    for k, n in total["kills"].items():
        kind, moment = [(k[:-len(m) - 1], m) for m in ("start-up", "recovery", "growth", "write", "finish", "replace",
                                                                     "after another kill")
                        if k.endswith(" " + m)][0]
        kinds[kind] = kinds.get(kind, 0) + n
        if k in real:
            moments[moment] = moments.get(moment, 0) + n
    print(f"{sum(real.values())} kills, {total['starts']} starts, {total['campaigns']} jobs, "
          f"{total['verified']} results verified, {time.monotonic() - began:.0f} s")
    print("  by kind:   " + ", ".join(f"{k} {n}" for k, n in sorted(kinds.items(), key=lambda x: -x[1])))
    print("  by moment: " + ", ".join(f"{k} {n}" for k, n in sorted(moments.items(), key=lambda x: -x[1])))
    print("  by shape:  " + ", ".join(f"{k} {n}" for k, n in sorted(total["shapes"].items())))
    print(f"  {total['regained']} tokens of sequences in flight taken over from journals, none generated again; "
          f"{total['busy']} starts found the lock still held by a dying process, {total['gave_up']} ended with 69")
    print(f"  {total['tails']} kills fell between results and their journal entry, {total['replacing']} between the first and the "
          "last step of replacing files")
    print(f"  cat and status agreed {total['looks']} times, {total['repairs']} journals were lost and repaired")
    for name, why in missing.items():
        print(f"  not there, not tested: {name} ({why})")


def main():
    a = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    a.add_argument("--kills", type=int, default=200, help="end after so many [200]")
    a.add_argument("--seed", type=int, default=1)
    a.add_argument("--seconds", type=float, default=0, help="start nothing new after so many; 0: no limit")
    a.add_argument("--jobs", type=int, default=2, help="jobs at a time [2]")
    a.add_argument("--burst", type=int, default=0, help="kills of one job [8 to 40]")
    a.add_argument("--shape", action="append", help="only this one (may be given several times)")
    a.add_argument("--list", action="store_true", help="list the shapes")
    a.add_argument("--dir", help="work here and keep everything")
    o = a.parse_args()
    if o.list:
        print("\n".join(s.name for s in SHAPES))
        return 0
    shapes = [s for s in SHAPES if not o.shape or s.name in o.shape]
    if not shapes or not os.access(BATCHGEN, os.X_OK) or not shutil.which("lz4"):
        print(f"kill.py: needs {BATCHGEN}, lz4, and a known --shape", file=sys.stderr)
        return 64
    began = time.monotonic()
    deadline = began + o.seconds if o.seconds else float("inf")
    top = o.dir or tempfile.mkdtemp(prefix="batchgen-crash.")
    os.makedirs(top, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    bad = None
    try:
        bad = run_all(o, shapes, top, began, deadline)
    except KeyboardInterrupt:
        return 130
    finally:  # of an interrupted run, too, nothing is left
        if not bad and not o.dir:
            shutil.rmtree(top, ignore_errors=True)
    return 1 if bad else 0


def make_models(shapes, top):
    models = {}
    for preset in {s.preset for s in shapes}:
        models[preset] = f"{top}/{preset}.gguf"
        if not os.path.exists(models[preset]):
            subprocess.run([MKMODEL, "--preset", preset, "-o", models[preset]], check=True, stdout=subprocess.DEVNULL)
    return models


def run_all(o, shapes, top, began, deadline):
    models = make_models(shapes, top)
    refs, missing, running = {}, {}, {}
    total = {"kills": {}, "shapes": {}, "campaigns": 0, **{k: 0 for k in COUNTS}}
    stop_file, bad, number = f"{top}/stop", None, 0
    rnd = random.Random(o.seed)

    def kills():
        return sum(n for k, n in total["kills"].items() if "not a kill" not in k)

    def promised():
        return kills() + sum(b for b, _ in running.values())

    queue, merging = [], {}
    try:
        while True:
            wanted = not bad and time.monotonic() < deadline and promised() < o.kills
            while wanted and len(running) < o.jobs:
                if not queue:
                    queue = [s for s in shapes if s.name not in missing]
                    rnd.shuffle(queue)
                if not queue:
                    break
                s = queue.pop(0)
                number += 1
                if s.name not in refs:
                    try:
                        refs[s.name] = Reference(s, f"{top}/undisturbed-{s.name}", models[s.preset])
                    except Violation as e:
                        bad = {"shape": s.name, "why": str(e), "dir": f"{top}/undisturbed-{s.name}"}
                        break
                    if refs[s.name].missing:
                        missing[s.name] = refs[s.name].missing
                        continue
                for shard in range(1, s.shards + 1):
                    budget = max(1, min(o.burst or rnd.randint(8, 40), o.kills - promised()))
                    folder = f"{top}/{number:04d}-{s.name}" + (f"-{shard}" if s.shards > 1 else "")
                    merging[folder] = (number, s, shard)
                    seed = o.seed * 1000003 + number * 10 + shard
                    pid, pipe = in_child(campaign_work(refs[s.name], folder, models[s.preset], seed, budget, stop_file,
                                                       deadline, shard))
                    running[pipe] = (budget, pid)
                wanted = promised() < o.kills and time.monotonic() < deadline
            if not running:
                break
            ready, _, _ = select.select(list(running), [], [], 1)
            for pipe in ready:
                answer = b""
                while piece := os.read(pipe, 1 << 16):
                    answer += piece
                os.close(pipe)
                _, pid = running.pop(pipe)
                os.waitpid(pid, 0)
                got = json.loads(answer) if answer else \
                    {"why": "the campaign's process failed", "kills": {}, "shape": "?", "dir": top}
                add_up(total["kills"], got["kills"])
                for k in COUNTS:
                    total[k] += got.get(k, 0)
                total["campaigns"] += 1
                add_up(total["shapes"], {got["shape"]: sum(n for k, n in got["kills"].items() if "not a kill" not in k)})
                if got["why"]:
                    bad = bad or got
                    with open(stop_file, "w"):
                        pass
                elif not o.dir and refs[got["shape"]].shape.shards == 1:
                    shutil.rmtree(got["dir"], ignore_errors=True)
                elif refs[got["shape"]].shape.shards > 1:
                    bad = bad or merged(merging, got["dir"], refs[got["shape"]], running, top)
    finally:
        for _, pid in running.values():
            kill(pid)
    report(total, missing, began)
    if bad:
        print(f"VIOLATION in {bad['shape']}: {bad['why']}\n  files: {bad['dir']} (before/: as they were before the last start)\n"
              f"  again: --seed {o.seed} --shape {bad['shape']}")
    else:
        print("clean" if kills() else "nothing was killed")
    return bad or not kills()


def merged(merging, folder, ref, running, top):
    """When all shards of a job are complete: merged, they are the job. None, or what is wrong."""
    number, shape, _ = merging.pop(folder)
    others = [f for f, (n, _, _) in merging.items() if n == number]
    done = [f"{top}/{number:04d}-{shape.name}-{k}/{shape.out}" for k in range(1, shape.shards + 1)]
    if others:
        return None
    out = f"{folder}-merged.jsonl"
    p = subprocess.run([BATCHGEN, "merge", *done, "-o", out], capture_output=True, env=environment())
    have = sorted((read(out) or b"").split(b"\n")[:-1])
    if p.returncode not in (0, 1) or have != sorted(line for _, line in ref.results.values()):
        return {"shape": shape.name, "why": f"merged shards differ: exit {p.returncode} {p.stderr[-300:]}", "dir": folder}
    return None


if __name__ == "__main__":
    sys.exit(main())
