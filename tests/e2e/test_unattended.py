#!/usr/bin/env python3
"""Jobs that nobody watches: cron, systemd, Slurm and Kubernetes as jobs/ has them, run the way those
run them; metrics, logs and the command at the end. Slurm itself: tests/slurm/run.sh."""
import contextlib
import datetime
import glob
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import unittest

from common import (BATCHGEN, MODEL, TMP, batchgen, by_line, commits, environment, make_model, prompts, results,
                    wait_for_commits, write_lines)

EACH = ["--commit-bytes", "1", "--commit-interval", "0.01"]
SLOW = {"threads": 1, "max_num_seqs": 2, "commit_bytes": 1, "commit_interval": 0.01}  # seen half-way
BAD = "{\"prompt\": broken"


def setUpModule():
    make_model()


def long_prompts(n):
    return [{"id": f"r{i}", "prompt": f"light {i}", "max_tokens": 40, "ignore_eos": True} for i in range(n)]


class Case(unittest.TestCase):
    def setUp(self):
        self.dir = tempfile.mkdtemp(dir=TMP)

    def tearDown(self):
        shutil.rmtree(self.dir, ignore_errors=True)

    def path(self, name):
        return f"{self.dir}/{name}"

    def job_file(self, records, name="job.json", **more):
        write_lines(self.path("prompts.jsonl"), records)
        with open(self.path(name), "w") as f:
            json.dump({"input": ["prompts.jsonl"], "model": MODEL, **more}, f)
        return self.path(name)

    def read(self, name):
        with open(self.path(name), encoding="utf-8") as f:
            return f.read()


def by_record(path):
    """Result lines in the order of the input."""
    return [raw for _, raw in sorted(by_line(path).items())]


# ---- cron -----------------------------------------------------------------------------------------


class Cron(Case):
    def entries(self):
        """(command, environment) of each line of jobs/crontab, read as cron reads them."""
        env, out = {}, []
        with open("jobs/crontab") as f:
            for line in f.read().splitlines():
                if not line.strip() or line.startswith("#"):
                    continue
                m = re.fullmatch(r"(\w+)=(.*)", line)
                if m:
                    env[m[1]] = m[2]
                    continue
                fields = line.split(None, 5)
                self.assertEqual(len(fields), 6, line)
                for f5, top in zip(fields[:5], (59, 23, 31, 12, 7)):
                    self.assertRegex(f5, r"^(\*(/\d+)?|\d+(-\d+)?(/\d+)?(,\d+(-\d+)?)*)$")
                    self.assertLessEqual(max(map(int, re.findall(r"\d+", f5)), default=0), top)
                # Without its backslash a percent sign would end the command.
                self.assertIsNone(re.search(r"(?<!\\)%", fields[5]), line)
                out.append(fields[5].replace("\\%", "%"))
        self.assertEqual(len(out), 2)
        return out, env

    def start(self, which=0, more=""):
        """What cron does: /bin/sh, next to no environment, no terminal, no input."""
        commands, env = self.entries()
        command = commands[which].replace("/srv/batchgen", self.dir) + more
        env["PATH"] = f"{os.path.dirname(BATCHGEN)}:/usr/bin:/bin"
        env.update(TZ=self.tz, HOME=self.dir, LOGNAME="nobody", SHELL="/bin/sh")
        return subprocess.Popen(["/bin/sh", "-c", command], env=env, cwd=self.dir, stdin=subprocess.DEVNULL,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)

    def run_it(self, which=0, more=""):
        """(exit status, what cron would mail)"""
        p = self.start(which, more)
        said = p.communicate()[0]
        return p.returncode, said.decode()

    def setUp(self):
        super().setUp()
        # Where it is noon: no test sees midnight.
        now = datetime.datetime.now(datetime.timezone.utc)
        self.tz = f"NOON{now.hour - 12:+d}"
        self.out = self.path(f"answers-{(now + datetime.timedelta(hours=12 - now.hour)).date()}.jsonl.lz4")

    def test_silent_from_start_to_done(self):
        self.job_file(prompts(20), "nightly.json")
        self.assertEqual(self.run_it(), (0, ""))
        self.assertEqual(len(by_line(self.out)), 20)
        self.assertEqual(self.run_it(), (0, ""), "started again when done")

    def test_a_second_start_is_silent_and_the_first_goes_on(self):
        self.job_file(long_prompts(200), "nightly.json", **SLOW)
        first = self.start()
        self.assertTrue(wait_for_commits(first, self.out, 3), "it was too fast")
        os.killpg(first.pid, signal.SIGSTOP)  # still there when the second start has looked
        self.assertEqual(self.run_it(), (75, ""), "another run holds the output")
        # A reboot: nothing is told, the next start goes on, and that it did is nobody's business.
        os.killpg(first.pid, signal.SIGKILL)
        self.assertEqual(first.communicate()[0], b"")
        self.assertEqual(self.run_it(), (0, ""))
        self.assertEqual(len(by_line(self.out)), 200)

    def test_stopped_in_order_is_silent(self):
        self.job_file(long_prompts(200), "nightly.json", **SLOW)
        first = self.start(more=" --grace 0")
        self.assertTrue(wait_for_commits(first, self.out, 3))
        os.killpg(first.pid, signal.SIGTERM)
        said = first.communicate()[0]
        self.assertIn(first.returncode, (75, -signal.SIGTERM), "batchgen, or the shell around it")
        self.assertEqual(said, b"")
        self.assertEqual(self.run_it(), (0, ""))

    def test_the_time_limit_is_silent(self):
        self.job_file(long_prompts(2000), "nightly.json", **SLOW)
        code, said = self.run_it(more=" --time-limit 0.5 --grace 0")
        self.assertEqual((code, said), (75, ""))

    def test_trouble_is_told_once(self):
        self.job_file([*prompts(5), BAD, BAD], "nightly.json")
        code, said = self.run_it()
        self.assertEqual(code, 1)
        self.assertRegex(said, r"^batchgen: \S+answers-\S+: 2 of 7 records .*invalid_json.*\n$")
        self.assertEqual(self.run_it(), (1, ""), "the next start of the night says it no more")

    def test_trouble_says_what_to_do(self):
        self.job_file(prompts(5), "nightly.json")
        os.unlink(self.path("prompts.jsonl"))
        code, said = self.run_it()
        self.assertEqual(code, 66, said)
        self.assertIn("prompts.jsonl", said)
        self.assertEqual(said.count("\n"), 1, said)

        with open(self.path("nightly.json"), "w") as f:
            f.write("{\"input\": 1")
        code, said = self.run_it()
        self.assertEqual(code, 78, said)
        self.assertIn("nightly.json", said)

        self.job_file(prompts(5), "nightly.json", temperature=-1)
        code, said = self.run_it()
        self.assertEqual(code, 78, said)
        self.assertIn("temperature", said)

        # Another job's output of the same name.
        self.job_file(prompts(5), "nightly.json")
        self.assertEqual(self.run_it()[0], 0)
        self.job_file(prompts(5), "nightly.json", seed=2)
        code, said = self.run_it()
        self.assertEqual(code, 64, said)
        self.assertIn("seed", said)

    def test_the_weekly_line(self):
        self.job_file(prompts(5), "nightly.json")
        self.assertEqual(self.run_it(), (0, ""))
        self.assertEqual(self.run_it(1), (0, ""))
        p = subprocess.run(["gzip", "-dc", self.path("month.jsonl.gz")], check=True, capture_output=True)
        self.assertEqual(sorted(p.stdout.splitlines()), sorted(results(self.out)))


class Names(Case):
    def test_dates_are_local(self):
        inp = write_lines(self.path("in.jsonl"), prompts(1))
        day = datetime.timedelta(days=1)
        for tz, hours in (("AAA12", -12), ("BBB-14", 14)):
            def local():
                now = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(hours=hours)
                return now.date()
            before = local()
            batchgen("run", inp, "-o", f"{self.dir}/{tz}-%F.jsonl", "-m", MODEL,
                     "--summary", f"{self.dir}/{tz}-%j.json", env=environment(TZ=tz))
            dates = {before + k * day for k in range((local() - before).days + 1)}
            self.assertTrue(any(os.path.exists(f"{self.dir}/{tz}-{d.isoformat()}.jsonl") for d in dates))
            self.assertTrue(any(os.path.exists(f"{self.dir}/{tz}-{d.strftime('%j')}.json") for d in dates))

    def test_what_is_no_field_is_refused(self):
        inp = write_lines(self.path("in.jsonl"), prompts(1))
        for name, word in (("a-%o.jsonl", "%o"), ("a%", "lone %"), ("a-{shard}.jsonl", "--shard")):
            _, said = batchgen("run", inp, "-o", self.path(name), "-m", MODEL, code=64)
            self.assertIn(word, said.decode())
        self.assertEqual(os.listdir(self.dir), ["in.jsonl"])
        batchgen("run", inp, "-o", self.path("100%%.jsonl"), "-m", MODEL)
        self.assertTrue(os.path.exists(self.path("100%.jsonl")))


# ---- systemd --------------------------------------------------------------------------------------


class Manager:
    """The service manager's end of NOTIFY_SOCKET."""

    def __init__(self, address):
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.sock.bind("\0" + address[1:] if address[0] == "@" else address)
        self.said = []  # (name, value) in order

    def read(self, timeout):
        if not select.select([self.sock], [], [], timeout)[0]:
            return False
        for line in self.sock.recv(4096).decode().splitlines():
            self.said.append(tuple(line.split("=", 1)))
        return True

    def until(self, job, name, value=""):
        """Reads until an assignment comes whose value holds that; False: the job ended before."""
        seen = len(self.said)
        while True:
            while seen < len(self.said):
                if self.said[seen][0] == name and value in self.said[seen][1]:
                    return True
                seen += 1
            if not self.read(0.05) and job.poll() is not None and not self.read(0):
                return False

    def drain(self, job):
        while self.read(0.05) or job.poll() is None:
            pass

    def at(self, name):
        return [i for i, (n, _) in enumerate(self.said) if n == name]


class Systemd(Case):
    def start(self, address, *args, **env):
        return subprocess.Popen([BATCHGEN, "run", "--job", self.path("job.json"), *args],
                                env=environment(NOTIFY_SOCKET=address, **env), stderr=subprocess.PIPE,
                                stdout=subprocess.DEVNULL)

    def test_the_life_of_a_service(self):
        self.job_file(long_prompts(4000), output="out.jsonl.lz4", **SLOW)
        m = Manager(self.path("sock"))
        with contextlib.closing(m.sock):
            job = self.start(self.path("sock"), "--grace", "5", WATCHDOG_USEC="100000")
            self.assertTrue(m.until(job, "READY", "1"), m.said)
            self.assertTrue(m.until(job, "STATUS", "records done"), m.said)
            self.assertTrue(m.until(job, "WATCHDOG", "1"), m.said)
            self.assertTrue(m.until(job, "WATCHDOG", "1"), m.said)
            self.assertFalse(m.at("STOPPING"), m.said)
            job.send_signal(signal.SIGTERM)
            self.assertTrue(m.until(job, "STOPPING", "1"), m.said)
            m.drain(job)
            self.assertEqual(job.wait(), 75, job.stderr.read())
            job.stderr.close()
        self.assertEqual(len(m.at("READY")), 1)
        self.assertEqual(len(m.at("STOPPING")), 1)
        self.assertTrue([i for i in m.at("EXTEND_TIMEOUT_USEC") if i > m.at("STOPPING")[0]], m.said)
        for name, _ in m.said:
            self.assertIn(name, ("READY", "STATUS", "WATCHDOG", "STOPPING", "EXTEND_TIMEOUT_USEC"))

    def test_a_job_to_its_end_over_an_abstract_socket(self):
        self.job_file(prompts(5), output="out.jsonl.lz4")
        address = f"@batchgen-test-{os.getpid()}"
        m = Manager(address)
        with contextlib.closing(m.sock):
            for run in ("first", "already done"):
                m.said.clear()
                job = self.start(address)
                m.drain(job)
                self.assertEqual(job.wait(), 0, job.stderr.read())
                job.stderr.close()
                # A service of Type=notify that ends without READY has failed, whatever its status.
                self.assertEqual(len(m.at("READY")), 1, (run, m.said))
                self.assertFalse(m.at("WATCHDOG"), "nobody asked for it")

    def test_an_address_that_is_none(self):
        self.job_file(prompts(2), output="out.jsonl.lz4")
        # Nobody listens: the job runs all the same.
        job = self.start(self.path("nobody"))
        said = job.communicate()[1]
        self.assertEqual(job.returncode, 0, said)

    def test_units(self):
        if not shutil.which("systemd-analyze"):
            self.skipTest("there is no systemd-analyze")
        for name in ("batchgen@.service", "batchgen@.timer"):
            with open(f"jobs/{name}") as f:
                text = f.read()
            with open(self.path(name), "w") as f:
                f.write(text.replace("/usr/local/bin/batchgen", BATCHGEN))
        p = subprocess.run(["systemd-analyze", "verify", "--man=no", self.path("batchgen@.service"),
                            self.path("batchgen@.timer")], capture_output=True, text=True)
        ours = [line for line in (p.stdout + p.stderr).splitlines() if "batchgen" in line]
        self.assertEqual(ours, [], "it warns with status 0")
        self.assertEqual(p.returncode, 0, p.stderr)
        # It can fail.
        with open(self.path("batchgen@.service"), "a") as f:
            f.write("WatchdogSecs=1\n")
        p = subprocess.run(["systemd-analyze", "verify", "--man=no", self.path("batchgen@.service")],
                           capture_output=True, text=True)
        self.assertIn("WatchdogSecs", p.stdout + p.stderr)

    def test_units_agree_with_the_program(self):
        with open("jobs/batchgen@.service") as f:
            unit = dict(line.split("=", 1) for line in f.read().splitlines() if re.match(r"\w+=", line))
        self.assertEqual(unit["Type"], "notify")
        self.assertIn("75", unit["RestartForceExitStatus"].split())
        self.assertIn("1", unit["SuccessExitStatus"].split())
        grace = int(re.search(r"--grace (\d+)", unit["ExecStart"])[1])
        stop = re.fullmatch(r"(\d+)(min|s)", unit["TimeoutStopSec"])
        self.assertGreater(int(stop[1]) * (60 if stop[2] == "min" else 1), grace + 30)
        # The command line of the unit is one that the program takes.
        self.job_file(prompts(3), "x.json", output="out-%F.jsonl.lz4")
        args = unit["ExecStart"].replace("%i", "x").replace("/etc/batchgen", self.dir).split()
        self.assertEqual(args[0], "/usr/local/bin/batchgen")
        batchgen(*args[1:])
        self.assertEqual(len(glob.glob(self.path("out-2*.jsonl.lz4"))), 1)


# ---- shards: Slurm and Kubernetes by their environment ----------------------------------------------


class Shards(Case):
    RECORDS = [*prompts(37), BAD, *long_prompts(20)]

    def setUp(self):
        super().setUp()
        os.mkdir(self.path("bin"))
        os.symlink(BATCHGEN, self.path("bin/batchgen"))
        with open(self.path("bin/scontrol"), "w") as f:
            f.write("#!/bin/sh\necho \"$@\" >> scontrol.log\n")
        os.chmod(self.path("bin/scontrol"), 0o755)

    def env(self, **more):
        env = environment(**more)
        for name in list(env):
            if re.match("SLURM_|JOB_COMPLETION|PBS_|SGE_", name) and name not in more:
                del env[name]
        env["PATH"] = f"{self.path('bin')}:{env['PATH']}"
        return env

    def whole(self):
        batchgen("run", "--job", self.path("job.json"), "-o", self.path("whole.jsonl"), code=1)
        return by_record(self.path("whole.jsonl"))

    def check_shards(self):
        for i in range(4):
            lines = sorted(by_line(self.path(f"answers-{i + 1}of4.jsonl.lz4")))
            self.assertEqual(lines, list(range(i + 1, len(self.RECORDS) + 1, 4)))

    def slurm(self, task, **more):
        env = {"SLURM_ARRAY_JOB_ID": "4711", "SLURM_JOB_ID": str(4711 + task), "SLURM_ARRAY_TASK_ID": str(task),
               "SLURM_ARRAY_TASK_COUNT": "4", "SLURM_ARRAY_TASK_MIN": "1", "SLURM_ARRAY_TASK_MAX": "4",
               "SLURM_ARRAY_TASK_STEP": "1", "SLURM_CPUS_PER_TASK": "1", **more}
        return subprocess.Popen(["bash", os.path.abspath("jobs/slurm.sh")], env=self.env(**env), cwd=self.dir,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def test_slurm(self):
        self.job_file(self.RECORDS, **SLOW)
        whole = self.whole()
        # A signal before the time limit, sent to the script alone (B:).
        job = self.slurm(2)
        out = self.path("answers-2of4.jsonl.lz4")
        self.assertTrue(wait_for_commits(job, out, 2))
        job.send_signal(signal.SIGTERM)
        said = job.communicate()[0]
        self.assertEqual(job.returncode, 75, said)
        self.assertEqual(self.read("scontrol.log"), "requeue 4713\n")
        # batchgen killed under the script: queued again, but not for ever.
        job = self.slurm(2)
        self.assertTrue(wait_for_commits(job, out, commits(out) + 1))
        with open(f"/proc/{job.pid}/task/{job.pid}/children") as f:
            os.kill(int(f.read().split()[0]), signal.SIGKILL)
        said = job.communicate()[0]
        self.assertEqual(job.returncode, 137, said)
        self.assertEqual(self.read("scontrol.log"), "requeue 4713\n" * 2)
        job = self.slurm(1, SLURM_RESTART_COUNT="10", BATCHGEN_MODEL="/none")
        job.communicate()
        self.assertNotEqual(job.returncode, 0)
        self.assertEqual(self.read("scontrol.log"), "requeue 4713\n" * 2)
        for task in (1, 2, 3, 4):
            job = self.slurm(task)
            said = job.communicate()[0]
            self.assertEqual(job.returncode, 0, said)  # also of the shard with a bad line
        self.check_shards()
        if not self.has_merge():
            self.skipTest("there is no merge yet")
        p = subprocess.run(["bash", os.path.abspath("jobs/slurm-merge.sh")], env=self.env(), cwd=self.dir,
                           capture_output=True, text=True)
        self.assertIn(p.returncode, (0, 1), p.stderr)
        self.assertEqual(results(self.path("answers.jsonl.lz4")), whole, "in the order of the input")

    def test_slurm_one_shard_again(self):
        self.job_file(prompts(8))
        job = self.slurm(3, SLURM_ARRAY_TASK_COUNT="1", SLURM_ARRAY_TASK_MIN="3", SLURM_ARRAY_TASK_MAX="3",
                         BATCHGEN_SHARD_COUNT="4")
        said = job.communicate()[0]
        self.assertEqual(job.returncode, 0, said)
        self.assertEqual(sorted(by_line(self.path("answers-3of4.jsonl.lz4"))), [3, 7])

    @staticmethod
    def has_merge():
        return b"merge" in batchgen("--help")[0]

    @staticmethod
    def pod_command(which):
        """The shell line of the run's or the merge's container, without a YAML reader."""
        with open("jobs/kubernetes.yaml") as f:
            text = f.read().split("\n---\n")[which]
        if which:
            return re.search(r"args: \[\"(.*)\"\]", text)[1]
        block = re.search(r"args:\n +- \|\n((?: {14}.*\n)+)", text)[1]
        return re.sub("^ {14}", "", block, flags=re.M)

    def pod(self, which=0, **env):
        command = self.pod_command(which).replace("/data/", f"{self.dir}/")
        return subprocess.Popen(["/bin/sh", "-c", command], env=self.env(**env), cwd="/",
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def test_kubernetes(self):
        self.job_file(self.RECORDS, **SLOW)
        whole = self.whole()
        job = self.pod(JOB_COMPLETION_INDEX="3", JOB_COMPLETIONS="4")
        self.assertTrue(wait_for_commits(job, self.path("answers-4of4.jsonl.lz4"), 2))
        job.send_signal(signal.SIGTERM)  # the pod is evicted
        said = job.communicate()[0]
        self.assertEqual(job.returncode, 75, said)
        for index in range(4):
            job = self.pod(JOB_COMPLETION_INDEX=str(index), JOB_COMPLETIONS="4")
            said = job.communicate()[0]
            self.assertEqual(job.returncode, 0, said)
        self.check_shards()
        if not self.has_merge():
            self.skipTest("there is no merge yet")
        job = self.pod(1)
        said = job.communicate()[0]
        self.assertEqual(job.returncode, 0, said)
        self.assertEqual(results(self.path("answers.jsonl.lz4")), whole)

    def test_kubernetes_says_what_is_missing(self):
        self.job_file(prompts(2))
        job = self.pod(JOB_COMPLETION_INDEX="0")
        said = job.communicate()[0].decode()
        self.assertEqual(job.returncode, 64, said)
        self.assertIn("JOB_COMPLETIONS", said)

    def test_kubernetes_manifest(self):
        try:
            import yaml
        except ImportError:
            self.skipTest("python has no yaml")
        with open("jobs/kubernetes.yaml") as f:
            run, merge = yaml.safe_load_all(f)
        for d in (run, merge):
            self.assertEqual((d["apiVersion"], d["kind"]), ("batch/v1", "Job"))
            pod = d["spec"]["template"]["spec"]
            self.assertEqual(pod["restartPolicy"], "Never", "podFailurePolicy demands it")
            mounts = {v["name"] for c in pod["containers"] for v in c["volumeMounts"]}
            self.assertEqual(mounts, {v["name"] for v in pod["volumes"]})
        spec = run["spec"]
        container, = spec["template"]["spec"]["containers"]
        env = {e["name"]: e["value"] for e in container["env"]}
        self.assertEqual(spec["completionMode"], "Indexed")
        self.assertEqual(env["JOB_COMPLETIONS"], str(spec["completions"]))
        self.assertEqual(container["command"], ["/bin/sh", "-c"])
        self.assertEqual(container["args"], [self.pod_command(0)])
        self.assertEqual(merge["spec"]["template"]["spec"]["containers"][0]["args"], [self.pod_command(1)])
        rules = {(r["action"], code) for r in spec["podFailurePolicy"]["rules"] if "onExitCodes" in r
                 for code in r["onExitCodes"]["values"]}
        self.assertIn(("Ignore", 75), rules)
        self.assertNotIn(("FailJob", 75), rules)
        for r in spec["podFailurePolicy"]["rules"]:
            self.assertEqual(r.get("onExitCodes", {}).get("containerName", container["name"]), container["name"])
        grace = int(re.search(r"--grace (\d+)", container["args"][0])[1])
        self.assertGreater(spec["template"]["spec"]["terminationGracePeriodSeconds"], grace + 30)

    def test_auto_outside_an_array(self):
        self.job_file(prompts(2))
        _, said = batchgen("run", "--job", self.path("job.json"), "-o", self.path("o.jsonl"), "--shard", "auto",
                           code=64, env=self.env())
        self.assertIn(b"SLURM_ARRAY_TASK_ID", said)
        self.assertFalse(os.path.exists(self.path("o.jsonl")))


# ---- the command at the end ---------------------------------------------------------------------------


class Notify(Case):
    SCRIPT = "cat > \"$DIR/summary\"; echo \"$BATCHGEN_STATUS $BATCHGEN_EXIT $BATCHGEN_OUTPUT\" >> \"$DIR/said\""

    def run_job(self, code, *args, command=SCRIPT):
        return batchgen("run", "--job", self.path("job.json"), "--notify", command, *args, code=code,
                        env=environment(DIR=self.dir))

    def test_the_summary_and_the_status(self):
        self.job_file([*prompts(6), BAD], output="out.jsonl.lz4")
        out = self.path("out.jsonl.lz4")
        self.run_job(1)
        self.assertEqual(self.read("said"), f"completed_with_failures 1 {out}\n")
        summary = json.loads(self.read("summary"))
        self.assertEqual(summary["request_counts"]["failed"], 1)
        self.assertEqual(summary["request_counts"]["completed"], 6)
        # A job that is done was told of: a cron line that starts it again tells nobody.
        self.run_job(1)
        self.assertEqual(self.read("said").count("\n"), 1)

    def test_what_it_does_changes_no_status(self):
        self.job_file(prompts(3), output="out.jsonl.lz4")
        _, said = self.run_job(0, "-q", command="exit 9")
        self.assertRegex(said.decode(), r"^batchgen: --notify: .*status 9.*\n$")
        out, said = self.run_job(0, "--overwrite", "-o", "-", command="echo from the command")
        self.assertEqual(len(out.splitlines()), 3, "its words are no results")
        self.assertIn(b"from the command", said)

    def test_stopped_and_locked(self):
        self.job_file(long_prompts(400), output="out.jsonl.lz4", grace=0, **SLOW)
        first = subprocess.Popen([BATCHGEN, "run", "--job", self.path("job.json"), "--notify", self.SCRIPT],
                                 env=environment(DIR=self.dir), stderr=subprocess.DEVNULL)
        self.assertTrue(wait_for_commits(first, self.path("out.jsonl.lz4"), 2))
        self.run_job(75)
        self.assertFalse(os.path.exists(self.path("said")), "the other run tells")
        first.send_signal(signal.SIGTERM)
        self.assertEqual(first.wait(), 75)
        self.assertEqual(self.read("said"), f"stopped 75 {self.path('out.jsonl.lz4')}\n")
        self.assertEqual(json.loads(self.read("summary"))["status"], "stopped")


# ---- metrics and logs ---------------------------------------------------------------------------------


def metrics(text):
    """{name or name{state}: value}; every line is a comment or a sample, whole."""
    out = {}
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("#"):
            assert re.fullmatch(r"# (HELP|TYPE) batchgen_\w+ .+", line), line
            continue
        m = re.fullmatch(r"(batchgen_\w+)\{(.*)\} (\S+)", line)
        assert m, line
        state = re.search(r'state="(\w+)"', m[2])
        out[m[1] + (f"/{state[1]}" if state else "")] = float(m[3])
    return out


class Metrics(Case):
    def test_while_it_runs_and_at_the_end(self):
        self.job_file([BAD, *long_prompts(200)], output="out.jsonl.lz4", metrics_file="job.prom", **SLOW)
        out = self.path("out.jsonl.lz4")
        job = subprocess.Popen([BATCHGEN, "run", "--job", self.path("job.json")], env=environment(),
                               stderr=subprocess.DEVNULL)
        self.assertTrue(wait_for_commits(job, out, 3))
        while not os.path.exists(self.path("job.prom")) and job.poll() is None:
            select.select([], [], [], 0.005)
        first = metrics(self.read("job.prom"))
        for _ in range(50):  # never half a file
            metrics(self.read("job.prom"))
        self.assertEqual(first["batchgen_run_state/running"], 1)
        self.assertGreater(first["batchgen_start_time_seconds"], 1.7e9)
        job.send_signal(signal.SIGKILL)
        job.wait()
        self.assertEqual(metrics(self.read("job.prom"))["batchgen_run_state/running"], 1)
        batchgen("run", "--job", self.path("job.json"), code=1)
        last = metrics(self.read("job.prom"))
        self.assertEqual(last["batchgen_run_state/completed"], 1)
        self.assertEqual(last["batchgen_run_state/running"], 0)
        self.assertEqual(last["batchgen_records_done_total"], 201)
        self.assertEqual(last["batchgen_records_failed_total"], 1)
        self.assertEqual(last["batchgen_records_in_flight"], 0)
        self.assertEqual(last["batchgen_output_file_bytes"], os.path.getsize(out))
        self.assertGreater(last["batchgen_last_commit_timestamp_seconds"], first["batchgen_start_time_seconds"])
        self.assertEqual(sorted(n for n in os.listdir(self.dir) if "prom" in n), ["job.prom", "prompts.jsonl"])

    def test_a_file_that_cannot_be_written(self):
        self.job_file(prompts(3), output="out.jsonl.lz4", metrics_file="none/job.prom")
        _, said = batchgen("run", "--job", self.path("job.json"))
        self.assertIn(b"none/job.prom", said)
        self.assertEqual(len(by_line(self.path("out.jsonl.lz4"))), 3)


class Logs(Case):
    def test_json_and_counts(self):
        self.job_file([*[BAD] * 50, *prompts(3)], output="out.jsonl.lz4", log_file="log", log_level="debug",
                      log_format="json")
        batchgen("run", "--job", self.path("job.json"), code=1)
        lines = [json.loads(line) for line in self.read("log").splitlines()]
        told = [x["msg"] for x in lines if "invalid_json" in x["msg"]]
        self.assertEqual(len(told), 4, told)
        self.assertEqual(told[3], "47 more: invalid_json")
        for x in lines:
            self.assertIn(x["level"], ("error", "warn", "info", "debug"))
            self.assertRegex(x["ts"], r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z$")

    def test_logfmt(self):
        self.job_file([*[BAD] * 5, *prompts(3)], output="out.jsonl.lz4")
        _, said = batchgen("run", "--job", self.path("job.json"), code=1)
        self.assertEqual(len(re.findall(rb"^ts=\S+ level=warn msg=\".*invalid_json.*\"$", said, re.M)), 4)

    def test_no_prompt_text_anywhere(self):
        secret = "xyzzy7plugh"
        records = [
            {"id": "a", "prompt": secret},
            {"id": "b", "messages": [{"role": "user", "content": secret}], "max_tokens": 3},
            {"prompt": f"{secret} " * 3000, "max_tokens": 3},                # too long
            f"{{\"prompt\": \"{secret}",                                     # cut
            f"{secret}",
            f"{{\"prompt\": \"x\", \"{secret}\": 1}}",
            {"prompt": {secret: secret}},
            {"prompt": "x", "model": secret},
            {"prompt": "x", "stop": [secret], "max_tokens": 3},
            {"prompt": "x", "temperature": secret},
            {"messages": [{"role": secret, "content": secret}]},
            {"messages": [{"role": "user", "content": [{"type": secret, secret: secret}]}]},
            {"prompt": "x", "response_format": {"type": secret}},
            {"custom_id": "c", "method": "POST", "url": f"/v1/{secret}", "body": {"prompt": secret}},
            {"custom_id": secret, "method": "POST", "url": "/v1/completions", "body": secret},
            {"prompt": "x", "tools": [{"type": secret}]},
            {"prompt": "x", "logit_bias": {secret: 1}},
        ]
        self.job_file(records, output="out.jsonl", max_model_len=256)
        common = ["run", "--job", self.path("job.json"), "--log-level", "debug", "--overwrite", "--metrics-file",
                  self.path("metrics"), "--max-tokens", "5"]
        for extra in ([], ["-q"], ["--log-file", self.path("log")], ["--log-format", "json"], ["--strict-model"]):
            _, said = batchgen(*common, "--summary", self.path("summary"), *extra, code=1)
            self.assertNotIn(secret, said.decode())
        self.assertNotIn(secret, self.read("log"))
        self.assertNotIn(secret, self.read("metrics"))
        self.assertNotIn(secret, self.read("summary"))
        self.assertNotIn(secret, self.read("out.jsonl.journal"))
        self.assertIn("invalid_json", self.read("log"))


if __name__ == "__main__":
    unittest.main()
