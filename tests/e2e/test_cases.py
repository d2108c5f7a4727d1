#!/usr/bin/env python3
"""Hard inputs: what each line must become, in a check and in a run, and that no line touches another.

tests/golden/cases holds made-up inputs with what each line must become in expected.jsonl (outcome
ok, error, skip, or policy: decided here, in POLICY); more/ has further ones, with their codes.
"""
import collections
import gzip
import json
import os
import random
import re
import struct
import tempfile
import unittest

from common import MODEL, TMP, batchgen, make_model, results, write_lines

CASES = "tests/golden/cases"
# These are about stopping and resuming, not about lines: tests of their own run them.
OTHER = {"resume.jsonl", "resume_edited.jsonl", "stop_and_lock.jsonl"}
# Files that are run with a context of 64 tokens.
SHORT = {"limits.jsonl", "more/context.jsonl"}
# Structured output is not available: a schema that could be honoured is refused, too, rather than
# run without. These lines of schemas.jsonl are expected to be ok once it is there.
UNSUPPORTED = {1, 2, 9, 13, 14}
# What is left to policy: the code of the error, or None for a result.
POLICY = {
    ("bom.jsonl", 3): None,  # a mark at the start of a later line is dropped
    ("surrogate.jsonl", 2): "invalid_json",  # half a character is no text
    ("surrogate.jsonl", 3): "invalid_json",
    ("surrogate.jsonl", 4): "invalid_json",
    ("surrogate.jsonl", 5): "invalid_json",
    ("surrogate.jsonl", 6): "invalid_json",
    ("malformed.jsonl", 21): None,  # stream is ignored
    ("empty_prompts.jsonl", 1): None,  # an empty text is a text
    ("empty_prompts.jsonl", 5): "empty_prompt",
    ("empty_prompts.jsonl", 8): None,  # as the template does it: an empty text
    ("empty_prompts.jsonl", 9): "empty_prompt",
    ("empty_prompts.jsonl", 10): None,  # one choice for each prompt, in order
    ("empty_prompts.jsonl", 11): None,
    ("limits.jsonl", 4): None,  # the rest of the context, then length
    ("limits.jsonl", 6): "invalid_field",
    ("limits.jsonl", 8): None,  # max_completion_tokens rules
    ("limits.jsonl", 9): "prompt_too_long",  # with this model's vocabulary
    ("limits.jsonl", 10): "prompt_too_long",
    ("limits.jsonl", 11): "prompt_too_long",
    ("numbers.jsonl", 6): "invalid_field",  # seeds are numbers of 63 bits and a sign
    ("numbers.jsonl", 8): None,  # a negative seed is one of the 2^64
    ("numbers.jsonl", 11): None,  # top_p 0 keeps the best token
    ("numbers.jsonl", 13): None,  # 4.0 is 4
    ("stops.jsonl", 3): None,  # up to 64
    ("stops.jsonl", 4): "invalid_field",
    ("stops.jsonl", 5): "invalid_field",
    ("stops.jsonl", 10): None,
    ("schemas.jsonl", 4): "unsupported",
    ("schemas.jsonl", 8): "unsupported",
    ("schemas.jsonl", 10): "unsupported",
    ("schemas.jsonl", 16): "unsupported",
    ("roles.jsonl", 2): None,  # as the template does it
    ("roles.jsonl", 3): None,
    ("roles.jsonl", 4): None,
    ("roles.jsonl", 5): None,
    ("roles.jsonl", 8): None,
    ("roles.jsonl", 9): None,
}
CODES = {"invalid_json", "line_too_long", "too_deep", "invalid_field", "missing_field", "unsupported",
         "unsupported_url", "duplicate_id", "empty_prompt", "prompt_too_long", "template_error", "invalid_token",
         "model_mismatch", "result_too_long", "internal_error"}
# Found by what needs a model at hand, or mostly so.
NEED_MODEL = {"prompt_too_long", "template_error", "invalid_token"}


def setUpModule():
    make_model()


def not_json(name):
    raise AssertionError(f"{name} in an output line")


def read(raw):
    """A result line, strictly: valid UTF-8, one JSON value, nothing that readers take for a line end."""
    text = raw.decode("utf-8")
    for c in "\u2028\u2029\u0085":
        assert c not in text, f"U+{ord(c):04X} is not escaped in {raw[:200]}"
    assert text == text.strip(), raw[:200]
    return json.loads(text, parse_constant=not_json)


def id_of(result):
    return result["custom_id"] if "custom_id" in result else result["id"]


def code_of(result):
    return result["error"]["code"] if result.get("error") else None


def text_of(result, choice=0):
    if "text" in result:
        return result["text"]
    c = result["choices"] if "choices" in result else result["response"]["body"]["choices"]
    return c[choice]["message"]["content"] if "message" in c[choice] else c[choice]["text"]


def finish_of(result):
    if "finish_reason" in result:
        return result["finish_reason"], result.get("stop_reason")
    c = result["response"]["body"]["choices"][0]
    return c["finish_reason"], c["stop_reason"]


def usage_of(result):
    return result["usage"] if "usage" in result else result["response"]["body"]["usage"]


def without_numbers(raw):
    """A result's bytes without the record's number and line."""
    raw = re.sub(rb'"(id|request_id)":"(batch_req|req|chatcmpl|cmpl)[-_]\d+"', rb'"\1":""', raw)
    return re.sub(rb'"line":\d+', b'"line":0', raw)


def lines_of(path):
    with open(path, "rb") as f:
        data = f.read()
    lines = data.split(b"\n")
    return lines[:-1] if lines[-1] == b"" else lines


def run(path, out, *args, code=None):
    """Runs a file; {line: raw result}."""
    batchgen("run", path, "-o", out, "-m", MODEL, "-q", "--overwrite", *args, code=code)
    got = {}
    for raw in results(out):
        r = read(raw)
        assert r["line"] not in got, f"line {r['line']} twice"
        got[r["line"]] = raw
    return got


def check(path, *args, code=None):
    """What a check says: {line: code}, counts."""
    out, _ = batchgen("check", path, "--json", *args, code=code)
    said = [json.loads(x, parse_constant=not_json) for x in out.splitlines()]
    return {x["line"]: x["code"] for x in said[:-1]}, said[-1]


def expectations():
    files = collections.OrderedDict()
    for name in ("expected.jsonl", "more/expected.jsonl"):
        with open(f"{CASES}/{name}", encoding="utf-8") as f:
            for line in f:
                e = json.loads(line)
                if e["file"] not in OTHER:
                    files.setdefault(e["file"], []).append(e)
    return files


def wanted(e):
    """(outcome, code or None when any will do)"""
    at = e["file"], e["line"]
    if at in POLICY:
        assert e["outcome"] == "policy", at
        return ("error" if POLICY[at] else "ok"), POLICY[at]
    if e["file"] == "schemas.jsonl" and e["line"] in UNSUPPORTED:
        assert e["outcome"] == "ok", at
        return "error", "unsupported"
    assert e["outcome"] != "policy", f"{at} is left to policy: say which in POLICY"
    return e["outcome"], e.get("code")


class Cases(unittest.TestCase):
    """The files and what their expectations say."""

    @classmethod
    def setUpClass(cls):
        cls.dir = tempfile.mkdtemp(dir=TMP)
        cls.files = expectations()
        cls.got = {}
        for name, rows in cls.files.items():
            code = 1 if any(wanted(e)[0] == "error" for e in rows) else 0
            cls.got[name] = run(f"{CASES}/{name}", f"{cls.dir}/out.jsonl", *cls.args(name), code=code)

    @staticmethod
    def args(name):
        return ["--max-model-len", "64"] if name in SHORT else []

    def each(self):
        return [(name, rows, {k: read(v) for k, v in self.got[name].items()}) for name, rows in self.files.items()]

    def test_every_file_has_its_expectations(self):
        here = {os.path.relpath(f"{d}/{x}", CASES) for d, _, fs in os.walk(CASES) for x in fs}
        self.assertEqual({x for x in here if not x.endswith("expected.jsonl")}, set(self.files) | OTHER)
        for name, rows in self.files.items():
            self.assertEqual([e["line"] for e in rows], list(range(1, len(lines_of(f"{CASES}/{name}")) + 1)), name)

    def test_each_line_becomes_what_is_expected(self):
        for name, rows, got in self.each():
            with self.subTest(file=name):
                for e in rows:
                    outcome, code = wanted(e)
                    where = f"{name}:{e['line']}: {e['note']}: {got.get(e['line'])}"
                    if outcome == "skip":
                        self.assertNotIn(e["line"], got, where)
                        continue
                    self.assertIn(e["line"], got, where)
                    r = got[e["line"]]
                    self.assertEqual("error" if r.get("error") else "ok", outcome, where)
                    if code:
                        self.assertEqual(code_of(r), code, where)
                    self.assertEqual(id_of(r), e["custom_id"], where)
                    self.assertIs(type(id_of(r)), type(e["custom_id"]), where)

    def test_each_line_that_is_not_blank_has_one_result(self):
        for name, _, got in self.each():
            with self.subTest(file=name):
                lines = lines_of(f"{CASES}/{name}")
                self.assertEqual(sorted(got), [i + 1 for i, x in enumerate(lines) if x.strip(b" \t\r")])

    def test_errors_say_where_and_what(self):
        for name, _, got in self.each():
            with self.subTest(file=name):
                for line, r in got.items():
                    if not r.get("error"):
                        continue
                    e = r["error"]
                    where = f"{name}:{line}: {e}"
                    self.assertIn(e["code"], CODES, where)
                    self.assertEqual(r["line"], line, where)
                    if "response" in r:
                        body = r["response"]["body"]["error"]
                        self.assertEqual(r["response"]["status_code"], 400, where)
                        self.assertEqual((body["code"], body["message"]), (e["code"], e["message"]), where)
                        e = body
                    if e["code"] == "duplicate_id":
                        self.assertRegex(e["message"], r"line \d+", where)
                    elif e["code"] == "prompt_too_long":
                        self.assertRegex(e["message"], r"\d+ tokens .* \d+", where)
                    elif e["code"] == "template_error":
                        self.assertTrue(e["message"], where)
                    elif e["code"] in ("invalid_json", "too_deep"):
                        self.assertRegex(e["message"], r"byte \d+|the line is", where)
                    else:
                        self.assertTrue(e["param"], where)
                        if e["code"] not in NEED_MODEL:
                            self.assertIn(e["param"].split(".")[-1], e["message"], where)

    def test_good_records_do_not_notice_the_bad_ones(self):
        for name, _, got in self.each():
            with self.subTest(file=name):
                good = [line for line, r in sorted(got.items()) if not r.get("error")]
                lines = lines_of(f"{CASES}/{name}")
                path = f"{self.dir}/good.jsonl"
                with open(path, "wb") as f:
                    f.write(b"".join(lines[i - 1] + b"\n" for i in good))
                alone = run(path, f"{self.dir}/good.out.jsonl", *self.args(name), code=0)
                self.assertEqual(len(alone), len(good))
                for i, line in enumerate(good):
                    self.assertEqual(without_numbers(alone[i + 1]), without_numbers(self.got[name][line]),
                                     f"{name}:{line}")

    def test_a_check_says_the_same(self):
        for name, _, got in self.each():
            with self.subTest(file=name):
                want = {line: code_of(r) for line, r in got.items() if r.get("error")}
                said, counts = check(f"{CASES}/{name}", "-m", MODEL, *self.args(name), code=65 if want else 0)
                self.assertEqual(said, want)
                self.assertEqual((counts["records"], counts["bad"]), (len(got), len(want)))
                said, _ = check(f"{CASES}/{name}")
                self.assertLessEqual(said.items(), want.items(), "without a model")
                self.assertLessEqual({k: v for k, v in want.items() if v not in NEED_MODEL}.items(), said.items())

    def test_a_strict_run_starts_nothing(self):
        out = f"{self.dir}/strict.jsonl"
        for name in ("dup_ids.jsonl", "malformed.jsonl", "surrogate.jsonl", "more/bytes.jsonl"):
            with self.subTest(file=name):
                _, said = batchgen("run", f"{CASES}/{name}", "-o", out, "-m", MODEL, "--strict", code=65)
                self.assertFalse(os.path.exists(out) and os.path.getsize(out), "it wrote results")
                n = sum(1 for e in self.files[name] if wanted(e)[0] == "error")
                self.assertEqual(len(re.findall(rb"^line \d+: ", said, re.M)), n, said.decode())

    # ---- what single files are about

    def result(self, name, line):
        return read(self.got[name][line])

    def test_one_character_however_it_is_written(self):
        same = [self.result("surrogate.jsonl", i) for i in (1, 8, 9)]
        self.assertEqual({text_of(r) for r in same}, {text_of(same[0])})
        self.assertEqual({usage_of(r)["prompt_tokens"] for r in same}, {usage_of(same[0])["prompt_tokens"]})

    def test_duplicates_name_the_first_line(self):
        for line in (2, 3):
            self.assertRegex(self.result("dup_ids.jsonl", line)["error"]["message"], r"line 1\b")

    def test_limits(self):
        for line in (2, 3):
            message = self.result("limits.jsonl", line)["error"]["message"]
            self.assertIn("615 tokens", message)
            self.assertIn("64", message)
        r = self.result("limits.jsonl", 4)
        self.assertEqual(usage_of(r)["total_tokens"], 64)
        self.assertEqual(finish_of(r), ("length", None))
        r = self.result("limits.jsonl", 5)
        self.assertTrue(finish_of(r)[0] == "stop" or usage_of(r)["total_tokens"] == 64, r)
        self.assertLessEqual(usage_of(self.result("limits.jsonl", 8))["completion_tokens"], 6)
        self.assertGreater(usage_of(self.result("limits.jsonl", 8))["completion_tokens"], 4)
        fits = self.result("more/context.jsonl", 5)
        self.assertEqual((usage_of(fits)["prompt_tokens"], usage_of(fits)["completion_tokens"]), (60, 4))
        for line, n in ((1, 2), (2, 1), (6, 4), (7, 4), (8, 1), (10, 63), (11, 4)):
            r = self.result("more/context.jsonl", line)
            self.assertEqual((usage_of(r)["completion_tokens"], finish_of(r)[0]), (n, "length"), line)
        r = self.result("more/context.jsonl", 9)
        self.assertEqual([c["finish_reason"] for c in r["choices"]], ["length"] * 3)

    def test_numbers(self):
        same = [text_of(self.result("numbers.jsonl", i)) for i in (11, 16, 17, 21)]
        self.assertEqual(same, same[:1] * 4, "greedy is greedy")
        self.assertNotEqual(text_of(self.result("numbers.jsonl", 4)), text_of(self.result("numbers.jsonl", 5)),
                            "2^53 + 1 is another seed than 2^53")
        self.assertLessEqual(usage_of(self.result("numbers.jsonl", 13))["completion_tokens"], 4)

    def test_a_cut_answer_is_whole_characters(self):
        for line, n in ((12, 1), (13, 2), (14, 3)):
            r = self.result("stops.jsonl", line)
            self.assertLessEqual(usage_of(r)["completion_tokens"], n)

    def test_text_never_becomes_a_control_token(self):
        """In this vocabulary ids from 768 on are control tokens; the template writes two a message, and one at the
        end, and the tokenizer one in front."""
        for name in ("control_text.jsonl", "more/control.jsonl", "more/messages.jsonl"):
            lines = lines_of(f"{CASES}/{name}")
            good = [i for i in sorted(self.got[name]) if not read(self.got[name][i]).get("error")]
            path = f"{self.dir}/render.jsonl"
            with open(path, "wb") as f:
                f.write(b"".join(lines[i - 1] + b"\n" for i in good))
            ids, _ = batchgen("render", path, "-m", MODEL, "-q", "--ids", code=0)
            text, _ = batchgen("render", path, "-m", MODEL, "-q", code=0)
            ids = [[int(t) for t in x.split()] for x in ids.decode().splitlines()]
            self.assertEqual(len(ids), len(good))
            for row, i in zip(ids, good):
                request = json.loads(lines[i - 1])
                messages = request.get("body", request)["messages"]
                self.assertEqual(sum(t >= 768 for t in row), 2 * len(messages) + 2, f"{name}:{i}")
                for m in messages:
                    if isinstance(m["content"], str):
                        self.assertIn(m["content"].encode(), text, f"{name}:{i}: not as typed")


class Stops(unittest.TestCase):
    """Texts end in front of the earliest stop string, wherever the tokens' borders lie."""

    def setUp(self):
        self.dir = tempfile.mkdtemp(dir=TMP)

    def run_records(self, records):
        path = f"{self.dir}/in.jsonl"
        with open(path, "w", encoding="utf-8") as f:
            f.write("".join(json.dumps(r) + "\n" for r in records))
        got = run(path, f"{self.dir}/out.jsonl", code=0)
        return [read(got[i + 1]) for i in range(len(records))]

    @staticmethod
    def cut(text, stops, include=False):
        """The text, its stop string or None."""
        found = [(text.find(s), -len(s), s) for s in stops if s in text]
        if not found:
            return text, None
        at, _, s = min(found)
        return text[:at + len(s) if include else at], s

    def expect(self, got, full, stops, include=False):
        want, reason = self.cut(full, stops, include)
        self.assertEqual(text_of(got), want, (full, stops))
        self.assertEqual(finish_of(got)[1], reason, (full, stops))
        if reason is not None:
            self.assertEqual(finish_of(got)[0], "stop")
        if not include:
            self.assertFalse(any(s in text_of(got) for s in stops), (full, stops))

    def test_the_cases_texts(self):
        records = [json.loads(x) for x in lines_of(f"{CASES}/stops.jsonl")]
        bad = {4, 5, 9}
        records = [r for i, r in enumerate(records) if i + 1 not in bad]
        stops = [r["body"].pop("stop", None) or [] for r in records]
        full = self.run_records(records)
        for r, s in zip(records, stops):
            r["body"]["stop"] = s
        for got, whole, s in zip(self.run_records(records), full, stops):
            self.expect(got, text_of(whole), [s] if isinstance(s, str) else s)

    def test_any_piece_of_the_text_as_stop(self):
        base = [{"id": f"s{i}", "prompt": p, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
                for i, p in enumerate(("The sea and a stone.", "Say a.", "One two three", "Count up from 1."))]
        full = [text_of(r) for r in self.run_records(base)]
        records, wants = [], []
        for b, text in zip(base, full):
            self.assertGreater(len(text), 12, "the model's noise must be text")
            pieces = [text[i:i + n] for n in (1, 2, 3, 7) for i in range(0, len(text) - n, 3)]
            pieces = [p for p in pieces if "\ufffd" not in p and "\0" not in p]
            lists = [[p] for p in pieces[::2]] + [[pieces[-1], pieces[0], "no such text"]]
            lists += [[p, p[:1]] for p in pieces if len(p) == 3][:4] + [[p + "\ufdd0", p] for p in pieces[:4]]
            if "\ufffd" not in text:
                lists.append([text])  # the whole answer
            for k, stops in enumerate(lists):
                for include in (False, True):
                    records.append({**b, "id": f"{b['id']}-{k}-{include}", "stop": stops,
                                    "include_stop_str_in_output": include})
                    wants.append((text, stops, include))
        self.assertGreater(len(records), 100)
        for got, want in zip(self.run_records(records), wants):
            self.expect(got, *want)

    def test_the_prompt_does_not_count(self):
        r = self.run_records([{"id": 1, "prompt": "abcabc", "stop": "abcabc", "max_tokens": 8, "temperature": 0},
                              {"id": 2, "prompt": "abcabc", "max_tokens": 8, "temperature": 0}])
        self.assertEqual(text_of(r[0]), self.cut(text_of(r[1]), ["abcabc"])[0])


GOOD = [b'{"id":"g%d","prompt":"Say %d.","max_tokens":2,"temperature":0}' % (i, i) for i in range(6)]


class Whole(unittest.TestCase):
    """What is wrong with a file as a whole, and what is too large to lie about as a file."""

    def setUp(self):
        self.dir = tempfile.mkdtemp(dir=TMP)
        self.out = f"{self.dir}/out.jsonl"

    def put(self, data, name="in.jsonl"):
        path = f"{self.dir}/{name}"
        with open(path, "wb") as f:
            f.write(data)
        return path

    def put_lines(self, *lines, **kw):
        return self.put(b"".join((x if isinstance(x, bytes) else x.encode()) + b"\n" for x in lines), **kw)

    def refused(self, *paths, code=65):
        """Runs files that cannot be read to their end; (results so far, what was said)."""
        _, said = batchgen("run", *paths, "-o", self.out, "-m", MODEL, "-q", "--overwrite", code=code)
        got = [read(x) for x in results(self.out)] if os.path.exists(self.out) else []
        _, checked = batchgen("check", *paths, "-q", code=code)
        last = said.decode().strip().splitlines()[-1]
        self.assertIn(last.split("batchgen: ", 1)[-1], checked.decode(), "a check says the same")
        return got, last

    def test_nothing_to_do(self):
        for data in (b"", b"\n", b"\n\n\r\n \t\r\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n", b"\xef\xbb\xbf \r\n\n", b"  ",
                     gzip.compress(b""), gzip.compress(b"\n\n")):
            with self.subTest(data=data):
                path = self.put(data)
                self.assertEqual(run(path, self.out, code=0), {})
                self.assertEqual(check(path, code=0)[1]["records"], 0)
        self.assertEqual(run("/dev/null", self.out, code=0), {})

    def test_other_encodings_are_told_once(self):
        text = "\n".join(x.decode() for x in GOOD) + "\n"
        for codec, name in (("utf-16", "UTF-16"), ("utf-16-le", "UTF-16"), ("utf-16-be", "UTF-16"),
                            ("utf-32", "UTF-32"), ("utf-32-le", "UTF-32"), ("utf-32-be", "UTF-32")):
            for mark in ("", "\ufeff"):
                for pack in (bytes, gzip.compress):
                    with self.subTest(codec=codec, mark=mark, pack=pack):
                        got, said = self.refused(self.put(pack((mark + text).encode(codec))))
                        self.assertEqual(got, [])
                        self.assertIn(name, said)
        got, said = self.refused(self.put_lines(*GOOD, name="a.jsonl"), self.put(text.encode("utf-16"), "b.jsonl"))
        self.assertIn("b.jsonl", said)
        self.assertEqual(sorted(r["id"] for r in got), [f"g{i}" for i in range(6)], "the file before it has run")

    def test_a_mark_in_each_of_several_inputs(self):
        a, b = (self.put_lines(b"\xef\xbb\xbf" + GOOD[i], name=f"{i}.jsonl") for i in range(2))
        batchgen("run", a, b, "-o", self.out, "-m", MODEL, "-q", code=0)
        self.assertEqual(sorted(r["id"] for r in map(read, results(self.out))), ["g0", "g1"])

    def test_carriage_returns_alone_end_no_line(self):
        got = run(self.put(b"\r".join(GOOD)), self.out, code=1)
        self.assertEqual(list(got), [1])
        self.assertIn("CR", read(got[1])["error"]["message"])
        got = run(self.put(b"\r\n".join(GOOD)), self.out, code=0)
        self.assertEqual(len(got), 6)

    # Frames by hand: no tool is needed, and their bytes are known.
    @staticmethod
    def zstd(data):
        blocks = [data[i:i + 100] for i in range(0, len(data), 100)] or [b""]
        out = b"\x28\xb5\x2f\xfd\xa0" + struct.pack("<I", len(data))
        for i, b in enumerate(blocks):
            out += struct.pack("<I", len(b) << 3 | (i == len(blocks) - 1))[:3] + b
        return out

    @staticmethod
    def lz4(data):
        out = b"\x04\x22\x4d\x18\x60\x40\x82"
        for i in range(0, len(data), 100):
            out += struct.pack("<I", len(data[i:i + 100]) | 0x80000000) + data[i:i + 100]
        return out + bytes(4)

    def packers(self):
        return (gzip.compress, "gz"), (self.zstd, "zst"), (self.lz4, "lz4")

    def test_compression_is_told_by_the_bytes(self):
        data = b"\n".join(GOOD) + b"\n"
        want = run(self.put(data), self.out, code=0)
        for pack, suffix in self.packers():
            for name in ("in.jsonl", f"in.jsonl.{suffix}", "in.gz", "in.zst", "in.lz4", "in"):
                self.assertEqual(run(self.put(pack(data), name), self.out, code=0), want, (suffix, name))
        two = gzip.compress(data[:100]) + self.zstd(data[100:200]) + self.lz4(data[200:])
        self.assertEqual(run(self.put(two), self.out, code=0), want, "several members are one text")
        self.assertEqual(run(self.put(data, "in.gz"), self.out, code=0), want, "plain text under the name of another")

    def test_damaged_compression(self):
        """What comes before the damage runs; the message has the file; the end is not taken for the end."""
        data = b"\n".join(GOOD) + b"\n"
        first = GOOD[0] + b"\n"
        for pack, suffix in self.packers():
            whole = pack(first) + pack(data)
            for what, damaged in (("cut", whole[:-20]), ("cut in a header", pack(data) + pack(data)[:3]),
                                  ("garbage behind", whole + b"garbage"), ("zeros behind", whole + bytes(100)),
                                  ("text behind", pack(first) + data)):
                with self.subTest(suffix=suffix, what=what):
                    got, said = self.refused(self.put(damaged, f"in.{suffix}"))
                    self.assertIn(f"in.{suffix}", said)
                    self.assertRegex(said, r"byte \d+")
                    ids = [r["id"] for r in got if not r.get("error")]
                    self.assertIn("g0", ids)
                    self.assertEqual(len(ids) + sum(code_of(r) == "duplicate_id" for r in got), len(got), got)
        for data, name in ((b"\xfd7zXZ\0\0\4", "xz"), (b"BZh91AY&SY", "bzip2"), (b"PK\3\4\x14\0\0\0", "zip")):
            got, said = self.refused(self.put(data))
            self.assertEqual(got, [])
            self.assertIn(name, said)

    def test_inputs_that_are_no_files(self):
        for path in (f"{self.dir}/missing.jsonl", self.dir):
            batchgen("run", path, "-o", self.out, "-m", MODEL, "-q", code=66)
            batchgen("check", path, code=66)
            self.assertFalse(os.path.exists(self.out) and os.path.getsize(self.out))

    def test_names_that_are_not_utf8(self):
        """Names of files are bytes: what is made of them in output is text all the same."""
        name = os.fsdecode(f"{self.dir}/caf".encode() + b"\xe9")
        for i in range(2):
            with open(f"{name}{i}.jsonl", "wb") as f:
                f.write(GOOD[i] + b"\n" + b"broken\n")
        model = f"{name}.gguf"
        os.link(MODEL, model)
        args = ["run", f"{name}0.jsonl", f"{name}1.jsonl", "-o", f"{name}.out", "-m", model, "-q", "--error-file",
                f"{name}.err", "--summary", f"{name}.sum"]
        batchgen(*args, code=1)
        batchgen(*args, code=1)  # the same job
        got = [read(x) for x in results(f"{name}.out") + results(f"{name}.err")]
        self.assertEqual(sorted((r["file"][-7:], r["line"]) for r in got),
                         [(f"{i}.jsonl", line) for i in range(2) for line in (1, 2)])
        with open(f"{name}.sum", encoding="utf-8") as f:
            json.load(f)
        out, _ = batchgen("check", "--json", f"{name}0.jsonl", f"{name}1.jsonl", code=65)
        self.assertEqual([json.loads(x).get("line") for x in out.splitlines()], [2, 2, None])

    def test_the_first_use_of_an_id_in_several_inputs(self):
        a, b = self.put_lines(GOOD[0], GOOD[1], name="a.jsonl"), self.put_lines(GOOD[2], GOOD[1], name="b.jsonl")
        batchgen("run", a, b, "-o", self.out, "-m", MODEL, "-q", code=1)
        bad = [r for r in map(read, results(self.out)) if r.get("error")]
        self.assertEqual([(r["file"], r["line"], code_of(r)) for r in bad], [(b, 2, "duplicate_id")])
        self.assertIn("record 1", bad[0]["error"]["message"])

    def test_ids_do_not_depend_on_what_a_model_finds(self):
        """A prompt that is too long has used its id; a line that is no request has not."""
        long = b'{"id":"x","prompt":"%s","max_tokens":2,"temperature":0}' % (b"word " * 500)
        short = b'{"id":"x","prompt":"Say a.","max_tokens":2,"temperature":0}'
        args = ["--max-model-len", "64"]
        for lines, want in (([long, short], ["prompt_too_long", "duplicate_id"]),
                            ([short, long], [None, "duplicate_id"]),
                            ([b'{"id":"x","prompt":5}', short], ["invalid_field", None]),
                            ([b'{"id":"x"', short, short], ["invalid_json", None, "duplicate_id"])):
            got = run(self.put_lines(*lines), self.out, *args, code=1)
            self.assertEqual([code_of(read(got[i + 1])) for i in range(len(lines))], want)

    def test_stop_strings_of_the_job(self):
        path = self.put_lines(*GOOD)
        for stop in ("", b"a\xff"):
            batchgen("run", path, "-o", self.out, "-m", MODEL, "--stop", os.fsdecode(stop), code=64)

    def test_standard_input_gives_the_same(self):
        with open(f"{CASES}/more/bytes.jsonl", "rb") as f:
            data = f.read()
        want = run(f"{CASES}/more/bytes.jsonl", self.out)
        batchgen("run", "-", "-o", self.out, "-m", MODEL, "-q", "--overwrite", stdin=data, code=1)
        self.assertEqual({read(x)["line"]: x for x in results(self.out)}, want)

    # ---- too large for files of their own

    def one_between(self, line, *args, code=1):
        """Runs a line between two good ones; its result."""
        got = run(self.put_lines(GOOD[0], line, GOOD[1]), self.out, *args, code=code)
        self.assertEqual([code_of(read(got[1])), code_of(read(got[3]))], [None, None])
        self.assertEqual(sorted(got), [1, 2, 3])
        return read(got[2])

    def test_deep_nesting(self):
        for a, b in (("[", "]"), ('{"a":', "}")):
            for n in (100, 1000, 100000):
                r = self.one_between('{"id":"deep","prompt":"a","x":' + a * n + "1" + b * n + "}")
                self.assertEqual((id_of(r), code_of(r)), ("deep", "too_deep"))
            r = self.one_between('{"id":"deep","prompt":"a","max_tokens":1,"x":' + a * 63 + "1" + b * 63 + "}", code=0)
            for n, code in ((1023, None), (1024, "too_deep")):
                r = self.one_between('{"id":"deep","prompt":"a","max_tokens":1,"x":' + a * n + "1" + b * n + "}",
                                     "--max-nesting", "1024", code=1 if code else 0)
                self.assertEqual(code_of(r), code)
        r = self.one_between("[" * 1000000)
        self.assertEqual((id_of(r), code_of(r)), (None, "too_deep"))
        # Deep data that a template walks through.
        deep = "[" * 900 + "]" * 900
        r = self.one_between('{"id":"deep","messages":[{"role":"user","content":"a","x":' + deep + '}],"max_tokens":1}',
                             "--max-nesting", "1024")
        self.assertEqual(code_of(r), "template_error")

    def test_a_huge_id_comes_back(self):
        name = "é😀\u2028 x" * 150000
        r = self.one_between(json.dumps({"id": name, "prompt": "a", "max_tokens": 1}, ensure_ascii=False), code=0)
        self.assertEqual(id_of(r), name)

    def test_a_huge_line(self):
        line = json.dumps({"id": "huge", "prompt": "word " * 400000, "max_tokens": 1})
        r = self.one_between(line, "--max-model-len", "128")
        self.assertEqual((id_of(r), code_of(r)), ("huge", "prompt_too_long"))
        r = self.one_between(line, "--max-line", "64KiB")
        self.assertEqual((id_of(r), code_of(r)), ("huge", "line_too_long"))
        self.assertIn("65536", r["error"]["message"])
        got = run(self.put(line.encode()), self.out, "--max-line", "64KiB", code=1)
        self.assertEqual([code_of(read(x)) for x in got.values()], ["line_too_long"])

    def test_many_messages(self):
        line = json.dumps({"id": "many", "messages": [{"role": "user", "content": "Hi."}] * 10000, "max_tokens": 1})
        r = self.one_between(line, "--max-model-len", "256")
        self.assertEqual(code_of(r), "prompt_too_long")
        self.assertRegex(r["error"]["message"], r"\d{5,} tokens .* 256")

    def test_many_of_everything(self):
        for fields, n in (({"prompt": [f"a {i}" for i in range(1000)]}, 1000), ({"prompt": "a", "n": 128}, 128),
                          ({"prompt": "a", "n": 2, "logit_bias": {str(i): 1 for i in range(1024)}}, 2),
                          ({"prompt": "a", "n": 2, "stop_token_ids": [i % 700 for i in range(1024)]}, 2),
                          ({"prompt": "a", "n": 2, "stop": ["x" * 1000 + str(i) for i in range(64)]}, 2),
                          ({"prompt": "a", "n": 2, "logprobs": 20}, 2)):
            r = self.one_between(json.dumps({"id": "all", "max_tokens": 2, **fields}), "--max-model-len", "64", code=0)
            self.assertEqual(len(r["choices"]), n)

    def test_too_many_of_something(self):
        for fields, param in (({"prompt": ["a"] * 65537}, "prompt"), ({"prompt": ["a"] * 600, "n": 128}, "prompt"),
                              ({"prompt": "a", "stop": "x" * 65537}, "stop"),
                              ({"prompt": "a", "stop": ["x" * 1100] * 60}, "stop")):
            r = self.one_between(json.dumps({"id": "all", "max_tokens": 2, **fields}))
            self.assertEqual((code_of(r), r["error"]["param"]), ("invalid_field", param))
            self.assertIn("65536", r["error"]["message"])


class Extremes(unittest.TestCase):
    """Settings at the ends of what is allowed, mixed at random: no record ends the run or loses another."""

    CHOICES = {
        "temperature": [0, 1e-7, 1e-6, 5e-324, 0.001, 1, 99.9, 100, 1e-40], "top_p": [0, 1e-320, 0.5, 1, 1 - 1e-16],
        "min_p": [0, 1e-320, 0.5, 1], "top_k": [-1, 0, 1, 1023, 1025, 2**31 - 1],
        "repetition_penalty": [0.01, 1, 100], "presence_penalty": [-2, 2, 1e-320, -0.0], "frequency_penalty": [-2, 2],
        "seed": [0, -1, 2**63 - 1, -2**63, 1e15], "n": [1, 2, 5], "logprobs": [True, False],
        "ignore_eos": [True, False], "include_stop_str_in_output": [True], "skip_special_tokens": [False],
        "stop": ["a", ["\n", " "], ["x" * 100], ["\ufffd"], [" ", " a", "e", "t"]],
        "stop_token_ids": [[], [0], list(range(1023)), [771]],
        "logit_bias": [{}, {"0": 100}, {str(k): -100 for k in range(1024)}, {str(k): 100 for k in range(1024)},
                       {str(k): -100 for k in range(1023)}],
        "max_tokens": [1, 2, 5, 2**31 - 1],
    }
    PROMPTS = ["a", "\0", "é" * 20, [1], [1023], [0] * 30, ["a", "b"], [[1], [2, 3]], "<|im_end|>", "\ud7ff", [771, 772]]

    def test_no_record_ends_the_run(self):
        rnd = random.Random(7)
        records = []
        for i in range(300):
            r = {"id": f"e{i}", "prompt": rnd.choice(self.PROMPTS)}
            r.update({k: rnd.choice(v) for k, v in self.CHOICES.items() if rnd.random() < 0.35})
            records.append(r)
        path = write_lines(f"{TMP}/extremes.jsonl", records)
        got = run(path, f"{TMP}/extremes.out", "--max-model-len", "64", code=0)
        self.assertEqual(len(got), 300)


class Limits(unittest.TestCase):
    """Limits that hold: an error for the record that goes over one, with the limit in its message."""

    def setUp(self):
        self.dir = tempfile.mkdtemp(dir=TMP)

    def limited(self, records, *args, checked=True):
        """{id: (code, message)} of a run; a check must say the same."""
        path = f"{self.dir}/in.jsonl"
        with open(path, "w", encoding="utf-8") as f:
            f.write("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
        got = run(path, f"{self.dir}/out.jsonl", *args)
        if checked:
            said, _ = check(path, "-m", MODEL, *args)
            self.assertEqual(said, {k: code_of(read(v)) for k, v in got.items() if read(v).get("error")})
        return {id_of(r): (code_of(r), (r.get("error") or {}).get("message")) for r in map(read, got.values())}

    def record(self, id, **more):
        return {"id": id, "prompt": "Say a.", "max_tokens": 2, "temperature": 0, **more}

    def test_nesting(self):
        got = self.limited([self.record("ok", x=[[{}]]), self.record("deep", x=[[[{}]]]), self.record("last")],
                           "--max-nesting", "4")
        self.assertEqual({k: v[0] for k, v in got.items()}, {"ok": None, "deep": "too_deep", "last": None})
        self.assertIn("4 levels", got["deep"][1])

    def test_prompt_tokens(self):
        got = self.limited([self.record("at", prompt=[5] * 10), self.record("over", prompt=[5] * 11),
                            self.record("second", prompt=[[5], [5] * 11]), self.record("last", prompt=[5])],
                           "--max-prompt-tokens", "10")
        self.assertEqual({k: v[0] for k, v in got.items()},
                         {"at": None, "over": "prompt_too_long", "second": "prompt_too_long", "last": None})
        self.assertRegex(got["over"][1], r"\b11\b.*\b10\b")

    def test_choices(self):
        got = self.limited([self.record("at", n=3), self.record("over", n=4), self.record("last")], "--max-n", "3")
        self.assertEqual({k: v[0] for k, v in got.items()}, {"at": None, "over": "invalid_field", "last": None})
        self.assertIn("3", got["over"][1])
        got = self.limited([self.record("more", n=130)], "--max-n", "200")
        self.assertEqual(got["more"][0], None)

    def test_template_steps(self):
        def chat(id, n):
            return {"id": id, "messages": [{"role": "user", "content": "a"}] * n, "max_tokens": 1}
        got = self.limited([chat("few", 2), chat("many", 1000), chat("last", 1)], "--template-steps", "1000")
        self.assertEqual({k: v[0] for k, v in got.items()}, {"few": None, "many": "template_error", "last": None})
        self.assertIn("1000", got["many"][1])

    def test_result(self):
        got = self.limited([self.record("fits", echo=True), self.record("long", prompt="a " * 2000, echo=True),
                            self.record("last")], "--max-result", "1024", checked=False)
        self.assertEqual({k: v[0] for k, v in got.items()}, {"fits": None, "long": "result_too_long", "last": None})
        self.assertIn("1024", got["long"][1])

    def test_line(self):
        got = self.limited([self.record("fits", x="a" * 900), self.record("long", x="a" * 2000), self.record("last")],
                           "--max-line", "1024")
        self.assertEqual({k: v[0] for k, v in got.items()}, {"fits": None, "long": "line_too_long", "last": None})
        self.assertIn("1024", got["long"][1])


if __name__ == "__main__":
    unittest.main(verbosity=1)
