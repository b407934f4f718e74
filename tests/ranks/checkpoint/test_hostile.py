"""A hostile directory can make a load fail, quickly and in little memory; it runs nothing and opens nothing outside.

All checksums above an edit are right, as an attacker would make them. Every case goes through every tool.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import struct
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lightning_shardckpt.checkpoint import checkpoint
from lightning_shardckpt.consolidate import consolidate
from lightning_shardckpt.errors import CheckpointNotFoundError, CorruptionError, FormatError, MismatchError
from lightning_shardckpt.format.checksum import checksum
from lightning_shardckpt.format.strict_json import MAX_JSON_BYTES
from lightning_shardckpt.tools.inspect import inspect, render
from lightning_shardckpt.tools.verify import verify
from tests.support import small
from tests.support.pool import run_ranks, selected
from tests.support.small import DOCUMENT, INDEX, OTHER_INDEX, ROOT, SHARD, Edit, edit, put, put_header, put_header_json
from tests.sweeps import fuzz

LIMIT_S = 20  # SIGALRM: a hang is an error, a slow machine is none
LIMIT_BYTES = 256 << 20
DOCUMENTED = (FormatError, CorruptionError, CheckpointNotFoundError, MismatchError)
TOOLS = ("load", "load_full", "verify", "consolidate")  # inspect looks at indexes only
Change = Callable[[Path], None]
W = "components/model/tensors/w"


class Case(NamedTuple):
    """What is done to the checkpoint, and words of the refusal; the tools that do not look there accept it."""

    name: str
    change: Change
    words: str
    accepted_by: tuple[str, ...] = ("inspect",)


def at(path: str, new: Any) -> Edit:
    def change(value: Any) -> None:
        *above, last = path.split("/")
        for part in above:
            value = value[int(part) if isinstance(value, list) else part]
        value[int(last) if isinstance(value, list) else last] = new

    return change


def root(*edits: tuple[str, Any]) -> Change:
    return lambda p: edit(p, ROOT, lambda value: [at(path, new)(value) for path, new in edits] and None)


def index(path: str, new: Any) -> Change:
    return lambda p: edit(p, INDEX, at(path, new))


def document(value: Any) -> Change:
    """Under a key of a callback's state."""
    return lambda p: edit(p, DOCUMENT, at("callbacks/Best", value))


def optimizer(path: str, new: Any) -> Change:
    return lambda p: edit(p, "optimizer-state-dist-00000.json", at(path, new))


def raw(name: str, content: bytes | Callable[[bytes], bytes]) -> Change:
    return lambda p: put(p, name, content if isinstance(content, bytes) else content((p / name).read_bytes()))


def raw_root(change: Callable[[bytes], bytes]) -> Change:
    def apply(folder: Path) -> None:
        rest = change((folder / ROOT).read_bytes().partition(b"\n")[2])
        (folder / ROOT).write_bytes(b'{"checksum":"' + checksum(rest).encode() + b'",\n' + rest)

    return apply


def header(change: Edit) -> Change:
    return lambda p: put_header_json(p, change)


def replaced(name: str, make: Change) -> Change:
    def apply(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return apply


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        here = os.open(path.parent, os.O_DIRECTORY)
        made.bind(f"/proc/self/fd/{here}/{path.name}")
        os.close(here)


def sparse(size: int) -> Change:
    def make(path: Path) -> None:
        path.touch()
        os.truncate(path, size)

    return make


def both_boxes(*edits: tuple[str, Any]) -> Change:
    """Of ``w``, in the indexes of both ranks and in the root index."""

    def apply(folder: Path) -> None:
        root((f"{W}/1", dict(edits)["global_shape"]))(folder)
        for name in (INDEX, OTHER_INDEX):
            for key, new in edits:
                edit(folder, name, at(f"metadata/w/{key}", new))

    return apply


def a_layout(**fields: Any) -> Change:
    return root(*((f"layouts/1/{key}", new) for key, new in fields.items()))


def huge_world(folder: Path) -> None:
    world = 1 << 16
    root(("world_size", world), ("layouts/1/axes", [["shard", world, 1]]), ("layouts/1/holders", [[1, world]]))(folder)
    root((f"{W}/1", [1 << 30, 4]), ("layouts/1/cuts", [[0, 0, 1 << 16]]))(folder)


def claimed_indexes(folder: Path) -> None:
    """Names of index files that are not there, one per rank."""
    world = 20_000
    one = ["x.json", 1 << 20, "0" * 16]
    root(
        ("world_size", world),
        ("layouts/1/axes", [["shard", world, 1]]),
        ("layouts/1/holders", [[0, world]]),
        ("components/model/indexes", {str(rank): one for rank in range(world)}),
        (f"{W}/1", [1 << 20, 4]),
    )(folder)


def deep(opening: str, closing: str, depth: int) -> bytes:
    return (opening * depth + "1" + closing * depth).encode()


CODE = b"cos\nsystem\n(S'touch /tmp/executed'\ntR."


def ambiguous(folder: Path) -> None:
    (folder / ".metadata").write_bytes(CODE)


def planted(folder: Path) -> None:
    """Files that other loaders would execute; with them, the checkpoint is damaged elsewhere."""
    for name in ("meta.pt", "data.pkl", "mp_rank_00_model_states.pt", "model.pkl"):
        (folder / name).write_bytes(CODE)
    (folder / "torch.py").write_text("raise SystemExit('imported')")
    (folder / "conftest.py").write_text("raise SystemExit('imported')")
    document({"$": "pickle", "v": "gASVHwAAAAAAAACMBXBvc2l4"})(folder)


def one_for_all(folder: Path) -> None:
    """Many tensors in the same few bytes."""
    many = {f"t{i}": ["F32", [6, 4], 1] for i in range(2000)}
    edit(folder, ROOT, lambda v: v["components"]["model"]["tensors"].update(many))
    for name in (INDEX, OTHER_INDEX):
        edit(folder, name, lambda v: v["metadata"].update(dict.fromkeys(many, v["metadata"]["w"])))


def overlapping(value: Any) -> None:
    value["b"]["data_offsets"] = value["norm"]["data_offsets"]


def lying_length(length: int) -> Change:
    return lambda p: put_header(p, lambda h: struct.pack("<Q", length) + h[8:])


def keys_of_one_hash(count: int) -> list[int]:
    return [i * ((1 << 61) - 1) for i in range(count)]


BASE64 = {"$": "tensor", "dtype": "F32", "v": "AAAAAA=="}
CASES = [
    # names
    Case("name with NUL", root(("documents", {"a\0b": [1, "0" * 16]})), "not a file name"),
    Case("file of no rank", index("metadata/w/file", "checkpoint.index.json"), "KeyError"),
    # other kinds of files
    *(
        Case(f"{kind} as {name}", replaced(name, make), "regular file|link|not a complete|not bytes|unfinished")
        for name in (SHARD, ROOT)
        for kind, make in {
            "link out": lambda p: p.symlink_to("/etc/passwd"),
            "fifo": lambda p: os.mkfifo(p),
            "socket": listening,
            "directory": lambda p: p.mkdir(),
        }.items()
    ),
    # JSON
    Case(
        "many keys, the last one twice",
        raw(INDEX, json.dumps({str(i): 0 for i in range(60_000)}).encode()[:-1] + b',"1":0}'),
        "duplicate key '1'",
    ),
    Case("half a character", raw_root(lambda t: t.replace(b'"norm"', b'"\\ud800"')), "UTF-8"),
    Case("depth bomb of lists", raw(INDEX, deep("[", "]", 100_000)), "nested deeper"),
    Case("deep unknown key", raw_root(lambda t: t[:-1] + b',"x":' + deep("[", "]", 300) + b"}"), "nested deeper"),
    Case("root index of 2^40 bytes", replaced(ROOT, sparse(1 << 40)), f"more than the limit of {MAX_JSON_BYTES}"),
    Case("rank index of 2^40 bytes", replaced(INDEX, sparse(1 << 40)), "1099511627776 bytes"),
    Case("65 MB of JSON", raw_root(lambda t: t + b" " * (65 << 20)), f"more than the limit of {MAX_JSON_BYTES}"),
    Case("millions of entries", raw(DOCUMENT, b'{"a":[' + b"{}," * 3_000_000 + b"{}]}"), "more than 2097152 values"),
    Case(
        "number of 5000 digits", raw_root(lambda t: t.replace(b'"step":2', b'"step":' + b"9" * 5000)), "not valid JSON"
    ),
    # numbers
    *(
        Case(f"length {length!r}", root((f"{W}/1", [length, 4])), "is not a size")
        for length in (1 << 63, -1, True)
    ),
    Case("shape that overflows", root((f"{W}/1", [1 << 62, 1 << 62])), "more than 2\\^63 bytes"),
    Case("100,000 dims", root((f"{W}/1", [1 << 62] * 100_000)), "100000 dims"),
    Case("2^40 elements that no file has", root((f"{W}/1", [1 << 38, 4])), "do not fit into indexes"),
    Case(
        "2^22 elements that no file has",
        root(("components/trainer/tensors", {"callbacks/EMA/mean": ["F32", [1 << 22], 0, 1]})),
        "has no box",
    ),
    Case("2^40 elements with their boxes", both_boxes(("global_shape", [1 << 38, 4])), "do not fit"),
    Case(
        "2^30 elements of optimizer state",
        lambda p: edit(
            p, ROOT, lambda v: v["components"]["optimizer"]["tensors"].update({"0/b/exp_avg": ["F32", [1 << 26], 1]})
        ),
        "has no box",
    ),
    # boxes
    Case("many tensors in the same bytes", one_for_all, "share bytes|cannot"),
    # layouts
    Case("axis of 2^62 ranks", a_layout(axes=[["a", 1 << 62, 1]]), "more than 65536 ranks"),
    Case("2^40 blocks", a_layout(cuts=[[0, 0, 1 << 40]]), "blocks"),
    Case("order without a holder", a_layout(order=[5, 7]), "not in"),
    Case("huge world with nothing in it", huge_world, "do not fit"),
    Case("world of 2^63", root(("world_size", (1 << 63) - 1)), "a world of"),
    Case("indexes that are not there", claimed_indexes, "1 difference|the file is missing"),
    Case("index of a rank outside", root(("components/model/indexes/7", ["x.json", 1, "0" * 16])), "the index of rank"),
    # the rest of the indexes
    Case("fourth item of a tensor", root((f"{W}", ["F32", [6, 4], 1, "x"])), "nothing or a 1"),
    # headers
    Case("header length of 0", lying_length(0), "header"),
    Case("header shorter than it is", lying_length(16), "header|JSON"),
    Case("header with overlaps", header(overlapping), "overlaps|follows a gap|wrongly"),
    Case("header with a tensor more", lambda p: put_header(p, _with_extra), "in the header|header"),
    Case("depth bomb in a header", lambda p: put_header(p, lambda h: _framed(deep("[", "]", 50_000))), "nested deeper"),
    Case("header of 1 GB", replaced(SHARD, sparse(1 << 30)), "1073741824 bytes"),
    # files for Hugging Face
    # documents
    Case("metadata of DCP beside", ambiguous, "at once, so the format is ambiguous", ("inspect", "verify")),
    Case("planted pickles", planted, "'pickle' is malformed", ("inspect", "verify")),
    *(
        Case(f"tagged {number} {str(value)[:40]}", document(value), words, ("inspect", "verify"))
        for number, (value, words) in enumerate(
            (
                ({"$": "os.system", "v": "true"}, "'os.system' is malformed"),
                ({"$": "tuple"}, "KeyError"),
                ({"$": "tuple", "v": "abc"}, "not a list"),
                ({"$": "int", "v": "9" * 5000}, "'int' is malformed"),
                ({"$": "int", "v": 1.5}, "not a string"),
                ({"$": "float", "v": "1e999"}, "malformed"),
                ({"$": "bytes", "v": "@@@"}, "malformed"),
                ({"$": "dtype", "v": "float32.__class__"}, "malformed"),
                ({"$": "device", "v": "cuda:99999999999999999999"}, "not a device"),
                ({"$": "namespace", "v": [[1, 2]]}, "not a string"),
                ({"$": "deque", "v": [], "maxlen": 1 << 70}, "malformed"),
                ({"$": "range", "v": [0, 1, 0]}, "malformed"),
                ({"$": "set", "v": [[1]]}, "malformed"),
                ({"$": "map", "v": [[k, 0] for k in keys_of_one_hash(100_000)]}, "few different hashes"),
                ({"$": "timedelta", "v": [1 << 70]}, "malformed"),
                ({"$": "numpy", "dtype": "O", "shape": [1], "v": "AAAA"}, "malformed"),
                ({"$": "numpy", "dtype": "<f4", "shape": [-1], "v": "AAAAAA=="}, "not a size"),
                ({"$": "numpy", "dtype": "<f4", "shape": [1 << 40], "v": "AAAAAA=="}, "cannot reshape"),
                ({**BASE64, "shape": [1 << 40]}, "malformed|bytes for"),
                ({**BASE64, "shape": [1 << 40, [0]]}, "not a size"),
                ({**BASE64, "shape": [0, 1 << 62, 1 << 62]}, "2\\^63"),
                ({**BASE64, "dtype": "__class__", "shape": [1]}, "malformed"),
            )
        )
    ),
    Case("stored tensor that is none", document({"$": "stored", "v": "x"}), "x"),
    Case("stored tensor of another kind", document({"$": "stored", "v": ["x"]}), "malformed|not stored"),
    Case("trainer state that is a list", raw(DOCUMENT, b"[]"), "not an object", ("inspect", "verify")),
    Case(
        "trainer state that is a tuple", raw(DOCUMENT, b'{"$":"tuple","v":[]}'), "not an object", ("inspect", "verify")
    ),
    *(
        Case(f"optimizer {path} {str(new)[:20]}", optimizer(path, new), words, ("inspect", "verify"))
        for path, new, words in (
            ("0", [], "not an object"),
            ("7", {}, "has keys"),
            ("0/groups/0", {"params": []}, "with hyper"),
            ("0/groups/0/hyper", [], "not an object"),
            ("0/groups/0/params", [["w"]], "names no parameter"),
            ("0/groups/5", {"hyper": {}, "params": []}, "has keys"),
            ("0/numbered", True, "names no parameter"),
            ("0/numbered", 1, "not true or false"),
            ("0/values", {"step": 3}, "not a list"),
            ("0/values", {"step": [{"value": 3}]}, "with value, params"),
        )
    ),
]


def _framed(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _with_extra(content: bytes) -> bytes:
    value = json.loads(content[8:])
    end = max(v["data_offsets"][1] for k, v in value.items() if k != "__metadata__")
    value["extra"] = {"dtype": "F32", "shape": [0], "data_offsets": [end, end]}
    return _framed(json.dumps(value).encode())


# ── what runs in a process of its own ─────────────────────────────────────────────────────────────────────────────


# What tools read of the machine, whatever the checkpoint says: memory, and which boot this is.
OF_THE_SYSTEM = ("/proc/self/status", "/proc/sys/kernel/random/boot_id")


class Watch:
    """Notes what the interpreter is asked to do while it is on: nothing of this may come from a file's content."""

    FORBIDDEN = ("exec", "compile", "import", "pickle.find_class", "subprocess.Popen", "os.system", "os.exec")

    def __init__(self, allowed: Path) -> None:
        self.seen: list[str] = []
        self._on, self._allowed = False, str(allowed)
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._on:
            return
        if event in self.FORBIDDEN or event.startswith("socket."):
            self.seen.append(f"{event} {str(arguments)[:100]}")
        if event == "open" and isinstance(arguments[0], str | bytes):
            path = os.fsdecode(arguments[0])
            # names without a directory are opened relative to the checkpoint's descriptor
            if os.path.dirname(path) and not path.startswith((self._allowed, *OF_THE_SYSTEM)):
                self.seen.append(f"open {path}")

    @contextmanager
    def on(self) -> Iterator[None]:
        self._on = True
        try:
            yield
        finally:
            self._on = False


def peak_bytes() -> int:
    """Of resident memory, since ``forget_peak``."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) << 10


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def found_by_verify(path: str) -> None:
    report = verify(path)
    lines = [str(finding) for finding in report.findings]
    assert all("\n" not in line for line in lines)
    if lines:
        raise CorruptionError("\n".join(lines[:50]))


def attempts(path: Path) -> dict[str, Callable[[], Any]]:
    return {
        "load": lambda: small.load(str(path)),
        "load_full": lambda: checkpoint.load_full(str(path)),
        "verify": lambda: found_by_verify(str(path)),
        "inspect": lambda: (render(inspect(str(path)), True), json.dumps(inspect(str(path)))),
        "consolidate": lambda: consolidate(path, path.parent / "one.ckpt"),
    }


def outcome(attempt: Callable[[], Any], watch: Watch) -> tuple[str, str, int]:
    """Kind and words of the error, if any, and the memory that it took."""
    forget_peak()
    before = peak_bytes()
    signal.alarm(LIMIT_S)
    try:
        with watch.on():
            attempt()
        return "", "", peak_bytes() - before
    except DOCUMENTED as error:
        return type(error).__name__, str(error)[:4000], peak_bytes() - before
    except BaseException as error:
        return f"undocumented {type(error).__name__}", str(error)[:1000], peak_bytes() - before
    finally:
        signal.alarm(0)


def half_of_the_cases(good: str, parent: str, names: set[str]) -> dict[str, dict[str, tuple[str, str, int]]]:
    """Case -> tool -> outcome; "watch" has what the interpreter was asked to do. Two processes share the cases."""
    signal.signal(signal.SIGALRM, _too_slow)
    half = int(os.environ["RANK"])
    folder = f"{parent}/{half}"
    os.mkdir(folder)
    place = Path(folder) / "hostile.ckpt"
    watch = Watch(Path(folder))
    found: dict[str, Any] = {}
    shutil.copytree(good, place)
    for attempt in attempts(place).values():
        attempt()  # what is imported when first needed is so now
    cases = [case for case in CASES if case.name in names]
    for case in [Case("untouched", lambda p: None, ""), *cases][half::2]:
        shutil.rmtree(folder)
        os.mkdir(folder)
        shutil.copytree(good, place)
        case.change(place)
        watch.seen.clear()
        found[case.name] = {tool: outcome(attempt, watch) for tool, attempt in attempts(place).items()}
        found[case.name]["watch"] = list(watch.seen)
        found[case.name]["left"] = sorted(os.listdir(folder))
    return found


def _too_slow(number: int, frame: Any) -> None:
    raise TimeoutError(f"not refused within {LIMIT_S} s")


# ── the tests ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Of the cases that are selected."""
    names = {case.name for case in selected(request, "case")}
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "work").mkdir()
    good = str(folder / "good.ckpt")
    run_ranks(2, small.save, good)
    work = str(folder / "work")
    one, other = run_ranks(2, half_of_the_cases, good, work, names, timeout_s=300, init_process_group=False)
    return one | other


def test_there_are_many_cases_and_the_untouched_one_is_accepted(outcomes: dict[str, dict[str, Any]]) -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 60
    untouched = outcomes["untouched"]
    assert {tool: untouched[tool][0] for tool in (*TOOLS, "inspect")} == dict.fromkeys((*TOOLS, "inspect"), "")
    assert untouched["watch"] == []


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
def test_a_hostile_checkpoint_is_refused(case: Case, outcomes: dict[str, dict[str, Any]]) -> None:
    found = outcomes[case.name]
    tools = {tool: found[tool] for tool in (*TOOLS, "inspect")}
    wrong = {tool: one for tool, one in tools.items() if one[0].startswith("undocumented")}
    assert not wrong, wrong
    accepted = {tool for tool, (kind, _, _) in tools.items() if not kind}
    assert accepted <= set(case.accepted_by), tools
    assert re.search(case.words, "\n".join(words for _, words, _ in tools.values())), tools
    assert max(used for _, _, used in tools.values()) < LIMIT_BYTES, {t: u >> 20 for t, (_, _, u) in tools.items()}
    assert found["watch"] == [] and found["left"] == ["hostile.ckpt"]


def mutated(count: int, files: fuzz.Files) -> Counter[str]:
    return fuzz.run(count, int(os.environ["RANK"]), files=files)


@pytest.mark.slow
def test_a_mutated_checkpoint_is_refused_or_right() -> None:
    """`python -m tests.sweeps.fuzz` makes more."""
    count = 1500
    one, other = run_ranks(2, mutated, count, fuzz.good_files(), timeout_s=300, init_process_group=False)
    counts = one + other
    ends = Counter(kind.rpartition(": ")[2] for kind in counts.elements())
    whole = Counter(kind.rpartition(": ")[2] for kind in counts.elements() if "loaded whole" in kind)
    assert ends["FormatError"] > count and ends["accepted"] > count / 5
    assert whole["FormatError"] > count / 50 and whole["accepted"] > count / 250
