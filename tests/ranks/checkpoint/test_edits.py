"""Edits of a checkpoint × readers: each edit is one documented error, soon and in little memory, or does no harm.

All checksums above an edit are right, as an attacker would make them, and every edit goes to every reader. Nothing that
a file says is run, and nothing outside of the checkpoint is opened. unit/format/test_format.py breaks each rule of the
format, and test_corruption.py changes bytes whose checksums tell.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import lightning_shardckpt
from lightning_shardckpt.checkpoint import checkpoint
from lightning_shardckpt.cli import main
from lightning_shardckpt.consolidate import consolidate
from lightning_shardckpt.errors import CheckpointNotFoundError, CorruptionError, FormatError, MismatchError
from lightning_shardckpt.format.value_checks import MAX_JSON_BYTES
from lightning_shardckpt.tools.inspect import inspect, render
from lightning_shardckpt.tools.verify import verify
from tests.support import small
from tests.support.pool import run_ranks, selected
from tests.support.small import DOCUMENT, INDEX, ROOT, SHARD, Edit, edit, put
from tests.sweeps import fuzz

LIMIT_S = 20  # SIGALRM: a hang is an error, a slow machine is none
LIMIT_BYTES = 256 << 20
DOCUMENTED = (FormatError, CorruptionError, CheckpointNotFoundError, MismatchError)
READERS = ("load", "load_full", "open", "verify", "consolidate", "inspect", "map", "diff")
# What shows indexes, and does not compare them with files; a load into a model has no use for documents of others.
LOOKS = ("inspect", "map")
OF_DOCUMENTS = (*LOOKS, "open", "verify", "diff")
OUTPUTS = {True: ("map.html", "one.ckpt"), False: ()}  # of readers that accept an edit
Change = Callable[[Path], None]


class Case(NamedTuple):
    """What is done to the checkpoint, and words of the refusal; the readers that do not look there accept it."""

    name: str
    change: Change
    words: str
    accepted_by: tuple[str, ...] = LOOKS


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


def parameters(value: Any) -> Change:
    return lambda p: edit(p, DOCUMENT, lambda content: content.update(hyper_parameters=value))


def optimizer(path: str, new: Any) -> Change:
    return lambda p: edit(p, "optimizer-state-dist-00000.json", at(path, new))


def raw(name: str, content: bytes | Callable[[bytes], bytes]) -> Change:
    return lambda p: put(p, name, content if isinstance(content, bytes) else content((p / name).read_bytes()))


def replaced(name: str, make: Change) -> Change:
    def apply(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return apply


def sparse(size: int) -> Change:
    def make(path: Path) -> None:
        path.touch()
        os.truncate(path, size)

    return make


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


DEEP: Any = 1
for _ in range(60):
    DEEP = {"a": DEEP}
HARMLESS: dict[str, Change] = {
    "software": root(("software", {"</script>": "\n\u2028"})),
    "an unknown tag": parameters({"x": {"$": 5}, "y": {"$": ["a"], "v": 1}}),
    "deep": parameters(DEEP),
}
"""What is shown, and refused at most by those that give it to a module."""
CASES = [
    # files
    Case("file of no rank", index("metadata/w/file", "checkpoint.index.json"), "KeyError"),
    *(
        Case(f"{kind} as {name}", replaced(name, make), "regular file|link|not a complete|not bytes|unfinished")
        for kind, name, make in (
            ("link out", SHARD, lambda p: p.symlink_to("/etc/passwd")),
            ("link out", ROOT, lambda p: p.symlink_to("/etc/passwd")),
            ("fifo", ROOT, os.mkfifo),
        )
    ),
    Case("metadata of DCP beside", ambiguous, "at once, so the format is ambiguous", (*LOOKS, "verify", "diff")),
    Case("planted pickles", planted, "'pickle' is malformed", OF_DOCUMENTS),
    # claims
    Case("depth bomb of lists", raw(INDEX, deep("[", "]", 100_000)), "nested deeper"),
    Case("root index of 2^40 bytes", replaced(ROOT, sparse(1 << 40)), f"more than the limit of {MAX_JSON_BYTES}"),
    Case(
        "millions of entries",
        raw(DOCUMENT, b'{"a":[' + b"{}," * 3_000_000 + b"{}]}"),
        "more than 2097152 values",
        (*LOOKS, "open"),
    ),
    Case(
        "2^22 elements that no file has",
        root(("components/trainer/tensors", {"callbacks/EMA/mean": ["F32", [1 << 22], 0, 1]})),
        "has no box",
        (*LOOKS, "diff"),
    ),
    Case("header of 1 GB", replaced(SHARD, sparse(1 << 30)), "1073741824 bytes"),
    *(
        Case(f"tagged {str(value)[:40]}", document(value), words, OF_DOCUMENTS)
        for value, words in (
            ({"$": "os.system", "v": "true"}, "'os.system' is malformed"),
            ({"$": "numpy", "dtype": "<f4", "shape": [1 << 40], "v": "AAAAAA=="}, "cannot reshape"),
            ({"$": "tensor", "dtype": "F32", "v": "AAAAAA==", "shape": [0, 1 << 62, 1 << 62]}, "2\\^63"),
        )
    ),
    # what files say of each other
    Case("index of another rank", index("rank", 1), "this is the index of rank 1"),
    Case("stored tensor that is none", document({"$": "stored", "v": "x"}), "x", (*LOOKS, "open", "diff")),
    *(
        Case(f"optimizer {path} {str(new)[:20]}", optimizer(path, new), words, OF_DOCUMENTS)
        for path, new, words in (
            ("0/groups/0/params", [["w"]], "is not text"),
            ("0/numbered", True, "is not a parameter's number"),
            ("0/values", {"step": [{"value": 3}]}, "with params, value"),
        )
    ),
    *(Case(name, change, "", READERS) for name, change in HARMLESS.items()),
]


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


def opened(path: str) -> None:
    with lightning_shardckpt.open(path) as found:
        for name in found:
            found[name][:]


def by_command(*arguments: str) -> None:
    out, error = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(error):
        status = main(arguments)
    said = error.getvalue()
    if status == (2 if arguments[0] == "diff" else 1):
        assert said.count("\n") < 3 and "Traceback" not in said
        raise FormatError(said)
    assert status < 2 and not said


def attempts(path: Path, good: str) -> dict[str, Callable[[], Any]]:
    return {
        "load": lambda: small.load(str(path)),
        "load_full": lambda: checkpoint.load_full(str(path)),
        "open": lambda: opened(str(path)),
        "verify": lambda: found_by_verify(str(path)),
        "consolidate": lambda: consolidate(path, path.parent / "one.ckpt"),
        "inspect": lambda: (render(inspect(str(path)), True), json.dumps(inspect(str(path)))),
        "map": lambda: by_command("map", str(path), "-o", str(path.parent / "map.html")),
        "diff": lambda: by_command("diff", str(path), good),
    }


def outcome(reader: str, attempt: Callable[[], Any], watch: Watch) -> tuple[str, str, int]:
    """Kind and words of the error, if any, and the memory that it took."""
    forget_peak()
    before = peak_bytes()
    signal.alarm(LIMIT_S)
    try:
        with nullcontext() if reader in ("map", "diff") else watch.on():  # their commands are parsed, which compiles
            attempt()
        return "", "", peak_bytes() - before
    except DOCUMENTED as error:
        return type(error).__name__, str(error)[:4000], peak_bytes() - before
    except BaseException as error:
        return f"undocumented {type(error).__name__}", str(error)[:1000], peak_bytes() - before
    finally:
        signal.alarm(0)


def half_of_the_cases(good: str, parent: str, names: set[str]) -> dict[str, dict[str, tuple[str, str, int]]]:
    """Case -> reader -> outcome; "watch" has what the interpreter was asked to do. Two processes share the cases."""
    signal.signal(signal.SIGALRM, _too_slow)
    half = int(os.environ["RANK"])
    folder = f"{parent}/{half}"
    os.mkdir(folder)
    place = Path(folder) / "hostile.ckpt"
    watch = Watch(Path(folder))
    found: dict[str, Any] = {}
    shutil.copytree(good, place)
    for attempt in attempts(place, good).values():
        attempt()  # what is imported when first needed is so now
    cases = [case for case in CASES if case.name in names]
    for case in [Case("untouched", lambda p: None, ""), *cases][half::2]:
        shutil.rmtree(folder)
        os.mkdir(folder)
        shutil.copytree(good, place)
        case.change(place)
        watch.seen.clear()
        found[case.name] = {reader: outcome(reader, read, watch) for reader, read in attempts(place, good).items()}
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


def test_the_untouched_checkpoint_is_accepted(outcomes: dict[str, dict[str, Any]]) -> None:
    untouched = outcomes["untouched"]
    assert {reader: untouched[reader][:2] for reader in READERS} == dict.fromkeys(READERS, ("", ""))
    assert untouched["watch"] == [] and len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
def test_an_edit_is_one_documented_error(case: Case, outcomes: dict[str, dict[str, Any]]) -> None:
    found = outcomes[case.name]
    readers = {reader: found[reader] for reader in READERS}
    wrong = {reader: one for reader, one in readers.items() if one[0].startswith("undocumented")}
    assert not wrong, wrong
    accepted = {reader for reader, (kind, _, _) in readers.items() if not kind}
    assert accepted <= set(case.accepted_by), readers
    assert re.search(case.words, "\n".join(words for _, words, _ in readers.values())), readers
    assert max(used for _, _, used in readers.values()) < LIMIT_BYTES, {r: u >> 20 for r, (_, _, u) in readers.items()}
    assert found["watch"] == [] and {"hostile.ckpt"} <= {*found["left"]} <= {"hostile.ckpt", *OUTPUTS[bool(accepted)]}


def mutated(count: int, files: fuzz.Files) -> Counter[str]:
    return fuzz.run(count, int(os.environ["RANK"]), files=files)


@pytest.mark.slow
def test_a_mutated_checkpoint_is_refused_or_right() -> None:
    """`python -m tests.sweeps.fuzz` makes more."""
    count = 1000
    one, other = run_ranks(2, mutated, count, fuzz.good_files(), timeout_s=300, init_process_group=False)
    counts = one + other
    ends = Counter(kind.rpartition(": ")[2] for kind in counts.elements())
    whole = Counter(kind.rpartition(": ")[2] for kind in counts.elements() if "loaded whole" in kind)
    assert ends["FormatError"] > count and ends["accepted"] > count / 5
    assert whole["FormatError"] > count / 100 and whole["accepted"] > count / 250
