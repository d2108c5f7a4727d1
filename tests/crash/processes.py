"""The program under test as processes: started, found, watched, killed."""
import ctypes
import os
import select
import signal
import subprocess
import sys

from journal import read

BUILD = os.path.abspath(os.environ.get("BUILD", "build"))
BATCHGEN, MKMODEL = f"{BUILD}/batchgen", f"{BUILD}/mkmodel"
LIBC = ctypes.CDLL(None)
POLL = 0.001


def die_with_parent():
    LIBC.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


def environment():
    env = {k: v for k, v in os.environ.items() if not k.startswith("BATCHGEN_")}
    env["XDG_CONFIG_HOME"] = "/nonexistent"
    env["BATCHGEN_DEVICE"] = "cpu"
    return env


def start(args, log):
    with open(log, "ab") as f:
        return subprocess.Popen([BATCHGEN, *map(str, args)], stdin=subprocess.DEVNULL, stdout=f, stderr=f,
                                env=environment(), start_new_session=True, preexec_fn=die_with_parent)


def descendants(pid):
    """[(pid, name)] below pid."""
    out, todo = [], [pid]
    while todo:
        p = todo.pop(0)
        try:
            for t in os.listdir(f"/proc/{p}/task"):
                with open(f"/proc/{p}/task/{t}/children") as f:
                    kids = [int(x) for x in f.read().split()]
                for k in kids:
                    with open(f"/proc/{k}/comm") as f:
                        out.append((k, f.read().strip()))
                todo += kids
        except (FileNotFoundError, ProcessLookupError):
            pass
    return out


def members(session):
    """[(pid, name)] of the living processes of a session."""
    out = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        stat = (read(f"/proc/{pid}/stat") or b"").decode(errors="replace")
        fields = stat.rsplit(")", 1)[-1].split()
        if fields and fields[0] not in "ZX" and fields[3] == str(session):
            out.append((int(pid), stat[stat.find("(") + 1:stat.rfind(")")]))
    return out


def nap():
    select.select([], [], [], POLL)


def kill(pid):
    try:
        os.kill(pid, signal.SIGKILL)
        return True
    except ProcessLookupError:
        return False


class Events:
    """Names of a folder's files as they are made, written and renamed (inotify)."""

    def __init__(self, folder):
        self.fd = LIBC.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        # IN_MODIFY, IN_MOVED_FROM, IN_MOVED_TO, IN_CREATE, IN_DELETE
        if self.fd < 0 or LIBC.inotify_add_watch(self.fd, folder.encode(), 0x2 | 0x40 | 0x80 | 0x100 | 0x200) < 0:
            raise OSError("inotify is needed")

    def read(self, seconds):
        if not select.select([self.fd], [], [], seconds)[0]:
            return []
        data, names, at = os.read(self.fd, 1 << 16), [], 0
        while at < len(data):
            n = int.from_bytes(data[at + 12:at + 16], sys.byteorder)
            names.append(data[at + 16:at + 16 + n].rstrip(b"\0").decode())
            at += 16 + n
        return names

    def close(self):
        os.close(self.fd)
