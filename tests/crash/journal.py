"""Output and journal read a second time, by other code than the program's.

check() is what a user may rely on at every moment, also after a kill:

  - each journal line is a JSON object and its XXH3-64; only the last may be cut short
  - the commits cover the output's beginning without a gap; each one's bytes have its hash, are
    whole lines, and hold exactly the results of the records that it names
  - `lz4 -dc` gives all of that text; it may complain only of what follows the last commit
  - tokens saved for a sequence only ever grow at their end

A file's state is that of its journal; a journal that ends with "rewrite" stands for the files
beside it (PATH.rewrite, PATH.journal.rewrite), which the next start puts in place.
"""
import ctypes
import json
import os
import subprocess

try:
    _xxh = ctypes.CDLL("libxxhash.so.0").XXH3_64bits
    _xxh.restype = ctypes.c_uint64
    _xxh.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
except OSError:
    _xxh = None


class Violation(Exception):
    pass


def require(condition, *what):
    if not condition:
        raise Violation(" ".join(str(x) for x in what))


def hash64(data):
    """16 hex digits, or None where the library is missing."""
    return f"{_xxh(data, len(data)):016x}" if _xxh else None


def read(path):
    try:
        with open(path, "rb") as f:
            return f.read()
    except (FileNotFoundError, ProcessLookupError):
        return None


def ranges(text):
    out = []
    for part in text.split(",") if text else []:
        first, _, last = part.partition("-")
        out += range(int(first), int(last or first) + 1)
    return out


class Journal:
    """A journal's whole entries. torn: what follows them. partial: {(record, choice): tokens}."""

    def __init__(self, data):
        self.entries, self.commits, self.runs = [], [], 0
        self.identity = self.end = None
        self.rewrite = False
        self.done, self.partial, self.froms = set(), {}, []
        self.ever = {}  # tokens saved at any time, also of records that are done
        pos = 0
        while pos < len(data):
            stop = data.find(b"\n", pos)
            if stop < 0:
                break
            line = data[pos:stop]
            body, space, digits = line[:-17], line[-17:-16], line[-16:].decode("latin-1")
            try:
                obj = json.loads(body)
            except ValueError:
                obj = None
            good = isinstance(obj, dict) and space == b" " and hash64(body) in (None, digits)
            require(good, f"journal: byte {pos}: a damaged entry before the end: {line[:200]}")
            self._take(obj, pos)
            pos = stop + 1
        self.size, self.torn = pos, data[pos:]

    def _take(self, obj, pos):
        where = f"journal: byte {pos}:"
        require(bool(self.entries) == ("batchgen" not in obj), where, "identity belongs first, once")
        require((self.end is None or "rewrite" in obj) and not self.rewrite, where, "an entry after the end")
        self.entries.append(obj)
        if "batchgen" in obj:
            self.identity = obj.get("identity")
            self.format = obj["format"]
        elif "run" in obj:
            self.runs += 1
        elif "commit" in obj:
            self._commit(obj["commit"], where)
        elif "end" in obj:
            self.end = obj["end"]
            require(self.end["records"] == len(self.done), where, "end counts", self.end["records"],
                    "records, committed are", len(self.done))
        elif "rewrite" in obj:
            self.rewrite = True
        else:
            require(False, where, "an unknown entry", list(obj))

    def _commit(self, c, where):
        if self.commits:
            last = self.commits[-1]
            require(c["n"] == last["n"] + 1, where, "commit", c["n"], "after", last["n"])
            require(c["offset"] == last["offset"] + last["bytes"], where, "a gap between commits")
        else:
            require(c["offset"] == 0, where, "the first commit begins at", c["offset"])
        records = ranges(c["records"])
        again = self.done.intersection(records)
        require(not again, where, "committed twice:", sorted(again)[:10])
        if "keys" in c:
            require(len(c["keys"]) == 16 * len(records), where, "keys and records differ in number")
        self.done.update(records)
        for key in [k for k in self.partial if k[0] in self.done]:
            del self.partial[key]
        for p in c.get("partial", []):
            key, start, tokens = (p["record"], p["choice"]), p["from"], p["tokens"]
            require(p["record"] not in self.done, where, "tokens of a committed record", key)
            had = self.partial.get(key, [])
            require(start <= len(had), where, "tokens of", key, "from", start, "but saved are", len(had))
            now = had[:start] + tokens
            require(now[:len(had)] == had[:len(now)], where, "tokens of", key, "are replaced by others")
            require(len(now) >= len(had), where, "tokens of", key, "went from", len(had), "to", len(now))
            self.froms.append((key, start, len(tokens)))
            self.partial[key] = now
            if len(now) > len(self.ever.get(key, [])):
                self.ever[key] = now
        self.commits.append(c)


def agree(truth, key, tokens):
    """What is saved never contradicts what another run saved for the same sequence."""
    known = truth.get(key, [])
    n = min(len(known), len(tokens))
    require(known[:n] == tokens[:n], "tokens saved for", key, "contradict the undisturbed answer")
    if len(tokens) > len(known):
        truth[key] = list(tokens)


def decompress(data, path=None):
    """(text, complained) of bytes, or of a file, as the ordinary decompressor has it."""
    p = subprocess.run(["lz4", "-dc", path] if path else ["lz4", "-dc"], capture_output=True,
                       input=None if path else data)
    return p.stdout, p.returncode != 0


def is_lz4(path):
    return path.removesuffix(".rewrite").endswith(".lz4")


class State:
    """What is committed: {record: (part, line)}, part 0 the output and 1 the error file."""

    def __init__(self):
        self.results, self.journal = {}, None
        self.stage = "none"  # then "open", "end", or "rewrite"
        self.tail = 0        # bytes behind the last commit


def _part(path, spans, results, record_of, identity, part):
    """The committed text of one file, and its lines by record."""
    data = read(path) or b""
    end = spans[-1][0] + spans[-1][1] if spans else 0
    require(len(data) >= end, f"{path}: {len(data)} bytes, the journal has committed {end}")
    for offset, n, _, digits, _ in spans:
        if n:
            require(hash64(data[offset:offset + n]) in (None, digits), f"{path}: bytes {offset} to "
                    f"{offset + n} are not what was committed")
    text = data[:end]
    if is_lz4(path) and end:
        text, bad = decompress(data[:end])
        require(not bad, f"{path}: lz4 -dc complains of the committed part")
    if is_lz4(path) and data:
        seen, bad = decompress(None, path)
        require(seen.startswith(text), f"{path}: lz4 -dc does not give all that is committed")
        require(not bad or len(data) > end, f"{path}: lz4 -dc complains")
    require(not text or text.endswith(b"\n"), f"{path}: a committed line is not whole")
    at = 0
    for offset, _, n_text, _, wanted in spans:
        lines = text[at:at + n_text].split(b"\n")
        require(lines.pop() == b"", f"{path}: the commit at {offset} is not whole lines")
        at += n_text
        for line in lines:
            try:
                obj = json.loads(line)
            except ValueError:
                raise Violation(f"{path}: not JSON: {line[:200]}") from None
            record = record_of(obj, identity)
            require(record in wanted, f"{path}: the commit at {offset} holds record {record}, which "
                    "its entry does not name")
            require(record not in results, f"{path}: record {record} twice")
            results[record] = (part, line)
    require(at == len(text), f"{path}: {len(text)} bytes of text, the journal counts {at}")
    return len(data) - end


def check(out, record_of, errors=None, truth=None):
    """Verifies everything above; gives a State. record_of(result, identity): its record number."""
    s = State()
    raw = read(out + ".journal")
    if raw is None or not raw:
        require(not os.path.exists(out) or os.path.getsize(out) == 0, f"{out}: results, and no journal")
        return s
    j = s.journal = Journal(raw)
    if j.rewrite:
        s.stage = "rewrite"
        new = read(out + ".journal.rewrite")
        if is_lz4(out):
            text, bad = decompress(None, out)
            require(not bad and (not text or text.endswith(b"\n")), f"{out}: unreadable in a rewrite")
        if new is not None:
            j = s.journal = Journal(new)
            out = out + ".rewrite" if os.path.exists(out + ".rewrite") else out
            if errors and os.path.exists(errors + ".rewrite"):
                errors += ".rewrite"
    if not j.entries:
        require(not os.path.exists(out) or os.path.getsize(out) == 0, f"{out}: results, and no identity")
        return s
    for key, tokens in j.ever.items() if truth is not None else ():
        agree(truth, key, tokens)
    if s.stage != "rewrite":
        s.stage = "end" if j.end else "open"
    wanted = [set(ranges(c["records"])) for c in j.commits]
    spans = [(c["offset"], c["bytes"], c["text"], c["hash"], w) for c, w in zip(j.commits, wanted)]
    s.tail = _part(out, spans, s.results, record_of, j.identity, 0)
    if errors:
        spans = [(e["offset"], e["bytes"], e["text"], e["hash"], w)
                 for e, w in ((c.get("errors"), w) for c, w in zip(j.commits, wanted)) if e]
        s.tail += _part(errors, spans, s.results, record_of, j.identity, 1)
    missing = j.done.difference(s.results)
    require(not missing, f"{out}: committed, but not there: records {sorted(missing)[:10]}")
    failed = sum(c["failed"] for c in j.commits)
    there = sum(failed_line(line) for _, line in s.results.values())
    require(failed == there, f"{out}: the journal counts {failed} error results, there are {there}")
    if j.end:
        require(s.tail == 0 and not j.torn, f"{out}: bytes after the end of a finished job")
    return s


def failed_line(line):
    return json.loads(line).get("error") is not None
