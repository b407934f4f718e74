"""Proof that a training resumes: comparison of a straight run with an interrupted and resumed run, step by step.

The script runs three times: all steps; the first part, which saves a checkpoint and ends as if it was killed; the rest,
from that checkpoint. The first part is compared with the straight run, too, since a resume of a training that is not
reproducible cannot be judged. An entry point of Lightning, found by ``PYTHONPATH``, brings the recorder (``recording``)
to every rank, however it is started.

Each rank of a run writes JSON lines: its setting, then entries by section and name for each moment of each step. A
tensor is recorded by its boxes, whose digests add up, so that it can be compared over all ranks on any topology. Runs
on the same topology are compared bit by bit. On another topology sums have another order, so that values may differ
within a tolerance, except for state that has just been loaded.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from lightning_shardckpt.errors import RankError
from lightning_shardckpt.system.text import count_text, list_some

DEFAULT_STEPS = 8
DEFAULT_TIMEOUT_S = 1800.0
OTHER_TOPOLOGY_TOLERANCE = 1e-4

_LOG_LINES, _LINE = 20, "\n  "
Phase = Literal["restored", "before", "after"]
"""A moment of a step: state loaded from a checkpoint, before the training step, after the optimizer's step."""

_STATE = ("metrics", "precision", "schedulers", "module", "datamodule", "callbacks")
SECTIONS: dict[Phase, tuple[str, ...]] = {
    "restored": ("weights", "buffers", "optimizer", "param_groups", *_STATE),
    "before": ("batch", "random", "counters"),
    "after": (
        *("loss", "logged", "logged_by_rank", "gradients", "optimizer", "weights", "buffers", *_STATE),
        *("param_groups", "random", "counters"),
    ),
}
"""The sections of each moment, causes before their effects."""

_OF_A_TOPOLOGY = {
    "batch": "each rank has its own share",
    "random": "each rank draws its own random numbers",
    "loss": "each rank has the loss of its own share; values logged with sync_dist=True are compared",
    "logged_by_rank": "each rank has its own value (self.log without sync_dist=True, or over an epoch)",
    "gradients": "until the optimizer steps they may be sums over some of the ranks; the weights are compared",
    "metrics": "each rank counts its own share until the metric is computed",
}
"""Sections that are not compared on another topology, and the reasons."""
_PHASES = {"restored": "as loaded after step {}", "before": "step {}, at its start", "after": "step {}"}
_FLOOR = 1e-4  # a tensor whose norm is less than this part of its section's largest norm counts as noise


# ── records ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The plan of a run, for its recorders.

    Attributes:
        records: the folder for the records of all ranks.
        files: the folder that replaces ``default_root_dir``; a LightningCLI writes its config there once.
        saves: the folder that replaces ``dirpath`` of the script's own ModelCheckpoints.
        first_step: the number of batches trained before this run.
        last_step: the batch after which the run ends, counted from the beginning of training.
        save_to: the checkpoint to save after the last batch, if any.
        resume_from: the checkpoint to resume from; None leaves the script's ``ckpt_path``.
    """

    records: str
    files: str
    saves: str
    first_step: int
    last_step: int
    save_to: str | None = None
    resume_from: str | None = None


@dataclass(frozen=True, slots=True)
class BoxRecord:
    """A box of a tensor: its start, its lengths, the digest of its elements, and their moments.

    Digests and moments of boxes add up to digest and moments of the tensor. The moments are the sum of squares, and
    projections on fixed pseudo-random vectors.
    """

    start: tuple[int, ...]
    lengths: tuple[int, ...]
    digest: int
    moments: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """A recorded value or tensor.

    Attributes:
        text: of a value, which may be a digest; the dtype of a tensor.
        number: of a value that is a number.
        shared: whether the value is the same on all ranks, on any topology.
        shape: the global shape of a tensor.
        boxes: this rank's boxes of a tensor.
    """

    text: str
    number: float | None = None
    shared: bool = True
    shape: tuple[int, ...] | None = None
    boxes: tuple[BoxRecord, ...] = ()

    @property
    def digest(self) -> int:
        """The digest of a tensor's elements."""
        return sum(box.digest for box in self.boxes) % 2**64

    @property
    def moments(self) -> list[float]:
        """The moments of the whole tensor; empty if a box has none."""
        return [math.fsum(column) for column in zip(*(box.moments for box in self.boxes), strict=False)]

    @property
    def norm(self) -> float:
        """The L2 norm of a tensor; 0 if it has no moments, or is not finite."""
        total = (self.moments or [0.0])[0]
        return math.sqrt(total) if math.isfinite(total) else 0.0

    def __str__(self) -> str:
        tensor = f" {self.shape} with digest {self.digest:016x} and a norm of {self.norm:.6g}"
        return self.text if self.shape is None else self.text + tensor


Sections = Mapping[str, Mapping[str, Entry]]


@dataclass(frozen=True, slots=True)
class Setting:
    """The rank and the world size, the strategy and its precision."""

    rank: int
    world: int
    strategy: str
    precision: str


@dataclass(slots=True)
class RankRecords:
    """The records of one rank: sections by step and phase, and reasons why entries could not be recorded, by name."""

    setting: Setting
    moments: dict[tuple[int, Phase], Sections] = field(default_factory=dict)
    unobserved: dict[str, str] = field(default_factory=dict)

    @property
    def last_step(self) -> int:
        """The number of batches that were trained."""
        return max((step for step, _ in self.moments), default=0)


def rank_file(folder: str, rank: int) -> Path:
    """Return the path of a rank's records."""
    return Path(folder, f"rank-{rank:05}.jsonl")


def to_line(**values: Any) -> str:
    """Return a line of a rank's file: its ``setting``, or a moment's ``step``, ``phase`` and ``sections``."""
    return json.dumps(values, default=astuple, separators=(",", ":")) + "\n"


def read_records(folder: str) -> list[RankRecords]:
    """Read the records of all ranks of a run that recorded, in the order of ranks."""
    return [_read(path) for path in sorted(Path(folder).glob("rank-*.jsonl")) if path.stat().st_size]


def _read(path: Path) -> RankRecords:
    whole = (line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n"))  # a kill may cut it
    first, *moments = map(json.loads, whole)
    records = RankRecords(Setting(*first["setting"]))
    for moment in moments:
        records.moments[moment["step"], moment["phase"]] = {
            section: {name: _entry(*values) for name, values in entries.items()}
            for section, entries in moment["sections"].items()
        }
        records.unobserved.update(moment.get("unobserved", {}))
    return records


def _entry(text: str, number: float | None, shared: bool, shape: Any, boxes: list[Any]) -> Entry:
    of_boxes = tuple(BoxRecord(tuple(at), tuple(of), digest, tuple(moments)) for at, of, digest, moments in boxes)
    return Entry(text, number, shared, None if shape is None else tuple(shape), of_boxes)


# ── comparison ────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference of two runs.

    Attributes:
        step: counted in batches from 1; with ``restored``, the step after which the checkpoint was saved.
        phase: the moment of the step.
        section: such as ``weights``.
        name: in the section.
        rank: None for a tensor or value over all ranks.
        expected: the value of the straight run.
        found: the value of the other run.
    """

    step: int
    phase: Phase
    section: str
    name: str
    rank: int | None
    expected: str
    found: str

    def __str__(self) -> str:
        where = "over all ranks" if self.rank is None else f"on rank {self.rank}"
        name = f"{self.section}/{self.name}"  # as --ignore takes it
        return f"{_PHASES[self.phase].format(self.step)}: {name} {where}: expected {self.expected}, found {self.found}"


@dataclass(slots=True)
class Comparison:
    """All differences of two runs in the first moment and section that differ.

    ``compared`` has the number of entries by section, ``skipped`` the reasons why entries were not compared, by name.
    """

    differences: list[Difference] = field(default_factory=list)
    compared: Counter[str] = field(default_factory=Counter)
    skipped: dict[str, str] = field(default_factory=dict)


def same_topology(a: Sequence[RankRecords], b: Sequence[RankRecords]) -> bool:
    """Return whether two runs have the same ranks, with the same boxes of the weights."""
    return [(of.setting, _weight_boxes(of)) for of in a] == [(of.setting, _weight_boxes(of)) for of in b]


def _weight_boxes(records: RankRecords) -> list[tuple[str, object]]:
    weights = records.moments.get((records.last_step, "after"), {}).get("weights", {})
    return [(name, _places(entry)) for name, entry in sorted(weights.items())]


def _places(entry: Entry) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(box.start, box.lengths) for box in entry.boxes]


def compare_runs(
    straight: Sequence[RankRecords],
    other: Sequence[RankRecords],
    *,
    first: int,
    last: int,
    tolerance: float = 0.0,
    ignore: Sequence[str] = (),
) -> Comparison:
    """Compare the records of two runs of the same steps."""
    result, same = Comparison(), same_topology(straight, other)
    steps: list[tuple[int, Phase]] = [(n, when) for n in range(first + 1, last + 1) for when in ("before", "after")]
    for step, phase in [(first, "restored"), *steps]:
        left = [of.moments.get((step, "after" if phase == "restored" else phase), {}) for of in straight]
        right = [of.moments.get((step, phase), {}) for of in other]
        if phase == "restored" and not any(right):
            continue
        for section in SECTIONS[phase]:
            if not same and section in _OF_A_TOPOLOGY:
                result.skipped[section] = _OF_A_TOPOLOGY[section]
                continue
            pairs = list(_pairs([of.get(section, {}) for of in left], [of.get(section, {}) for of in right], same))
            norm = max((expected.norm for _, _, expected, _ in pairs if expected is not None), default=0.0)
            for rank, name, expected, actual in pairs:
                if any(fnmatchcase(f"{section}/{name}", pattern) for pattern in ignore):
                    result.skipped[f"{section}/{name}"] = "ignored by --ignore"
                elif not same and not all(of.shared for of in (expected, actual) if of is not None):
                    result.skipped[f"{section}/{name}"] = _OF_A_TOPOLOGY["random"]
                else:
                    result.compared[section] += 1
                    distance = _distance(expected, actual, norm * _FLOOR)
                    if not distance <= (0.0 if phase == "restored" else tolerance):
                        texts = [str(of or "nothing") for of in (expected, actual)]
                        if actual is not None and actual.boxes and math.isfinite(distance):
                            texts[1] += f", a relative L2 difference of about {distance:.2g}"
                        result.differences.append(Difference(step, phase, section, name, rank, *texts))
            if result.differences:
                return result
    return result


_Named = Mapping[str, Entry]
_Pair = tuple[int | None, str, Entry | None, Entry | None]
"""Rank, name, and the entries of the straight run and of the other run."""


def _pairs(a: Sequence[_Named], b: Sequence[_Named], same: bool) -> Iterator[_Pair]:
    """Yield the entries to compare: by rank on the same topology, else over all ranks.

    Even on the same topology, a tensor whose boxes have changed is compared over all ranks: an optimizer may create
    whole state on every rank, and get it back sharded.
    """
    for name in dict.fromkeys(name for entries in (*a, *b) for name in entries):
        left, right = ([entries.get(name) for entries in side] for side in (a, b))
        ranks = list(zip(left, right, strict=False))
        if same and all(x is None or y is None or _places(x) == _places(y) for x, y in ranks):
            yield from ((rank, name, x, y) for rank, (x, y) in enumerate(ranks) if x is not None or y is not None)
        else:
            yield None, name, _merge(left), _merge(right)


def _merge(entries: Iterable[Entry | None]) -> Entry | None:
    """Return an entry over all ranks: a tensor with each box once, or the value of the lowest rank that has it."""
    present = [entry for entry in entries if entry is not None]
    boxes = {(box.start, box.lengths): box for entry in reversed(present) for box in entry.boxes}
    return replace(present[0], boxes=tuple(boxes.values())) if present else None


def _distance(a: Entry | None, b: Entry | None, floor: float) -> float:
    """Return the relative difference of two entries: 0 if they are equal, infinite if they are of different kinds.

    For tensors it estimates the L2 norm of the difference: the square of a projection on uniform numbers of [-1, 1] is
    a third of its square on average. The norm is divided by at least ``floor``.
    """
    if a is None or b is None:
        return math.inf
    if (a.text, a.shape, a.digest) == (b.text, b.shape, b.digest):
        return 0.0
    if a.number is not None and b.number is not None:
        return abs(a.number - b.number) / (max(abs(a.number), abs(b.number)) or 1.0)
    squares = [(x - y) ** 2 for x, y in zip(a.moments[1:], b.moments[1:], strict=False)]
    is_float = a.text.startswith(("float", "bfloat"))
    if (a.text, a.shape) != (b.text, b.shape) or not is_float or not squares or not math.isfinite(sum(squares)):
        return math.inf
    distance = max(math.sqrt(3 * sum(squares) / len(squares)), abs(a.norm - b.norm))
    return max(distance / (max(a.norm, b.norm, floor) or 1.0), math.ulp(0.0))  # their bits differ


# ── proof ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class ResumeReport:
    """The result of a proof.

    Attributes:
        equal: None if the training is not reproducible, so that a resume cannot be judged.
        differences: all differences in the first moment and section that differ.
        straight: the ranks of the uninterrupted run.
        resumed: the ranks of the resumed run.
        steps: batches of training.
        interrupt_at: batches before the checkpoint.
        tolerance: of values, relative; 0 if bits were compared.
        compared: the number of compared entries by section.
        not_compared: reasons why entries were not compared, by name.
        folder: the folder of records, outputs and the checkpoint; None if it was removed.
    """

    equal: bool | None
    differences: tuple[Difference, ...]
    straight: str
    resumed: str
    steps: int
    interrupt_at: int
    tolerance: float
    compared: dict[str, int]
    not_compared: dict[str, str]
    folder: str | None

    @property
    def status(self) -> int:
        """The exit status: 0 for equal, 1 for different, 2 for not reproducible."""
        return 2 if self.equal is None else int(not self.equal)

    def __str__(self) -> str:
        how = f"within {self.tolerance:g}" if self.tolerance else "bit by bit"
        lines = [
            f"straight:  {self.steps} steps on {self.straight}",
            f"resumed:   after step {self.interrupt_at} on {self.resumed}",
            f"compared:  {how}: " + ", ".join(f"{section} {n}" for section, n in sorted(self.compared.items())),
        ]
        if self.equal:
            lines.append("EQUAL")
        else:
            result = "DIFFERENT" if self.equal is False else "NOT REPRODUCIBLE: two runs differ before any resume"
            lines.append(f"{result}; first at:\n  {list_some([*map(str, self.differences)], between=_LINE)}")
        if self.equal is None:
            lines.append("Seed everything (seed_everything: 1), use deterministic kernels, or give --tolerance.")
        if self.not_compared:
            reasons = [f"{name}: {why}" for name, why in self.not_compared.items()]
            lines.append(f"not compared:\n  {list_some(reasons, 40, _LINE)}")
        if self.folder is not None:
            lines.append(f"Records and outputs are in {self.folder}")
        return "\n".join(lines)


def prove_resume(
    command: Sequence[str],
    *,
    steps: int = DEFAULT_STEPS,
    interrupt_at: int | None = None,
    resumed_args: Sequence[str] = (),
    tolerance: float | None = None,
    ignore: Sequence[str] = (),
    output: str | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> ResumeReport:
    """Run a training straight, and interrupted and resumed, and compare both runs.

    The script is unchanged: each of its Trainers gets a callback that records, and ends the process after the last
    step, so that no code after the first ``fit`` runs. Files of its ModelCheckpoints and in ``default_root_dir`` go to
    the folder of the proof; its loggers write nothing. Other files that the script writes are written three times.

    Args:
        command: a Python script and its arguments, or a program that starts one, such as ``torchrun``.
        steps: batches of training on each rank, over epochs.
        interrupt_at: batches before the checkpoint; by default half of them.
        resumed_args: further arguments for the resumed run only, such as options of another topology.
        tolerance: of values, relative; by default 0, and 1e-4 if the resumed run has another topology.
        ignore: patterns of ``SECTION/NAME`` to leave out, such as ``callbacks/Timer*``.
        output: a new or empty folder, which is kept; by default a temporary folder, which is kept if the runs differ.
        timeout_s: seconds for each of the three runs.

    Returns:
        The report of the comparison.

    Raises:
        RankError: if a run fails, takes too long, or records nothing.
        ValueError: for an empty command, steps without an interruption, or a folder that is not empty.
    """
    middle = steps // 2 if interrupt_at is None else interrupt_at
    if not command or not 0 < middle < steps:
        raise ValueError(f"a proof needs a command, and 0 < interrupt_at < steps; got {middle} and {steps}")
    folder = Path(tempfile.mkdtemp(prefix="prove-resume-") if output is None else output).absolute()
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty; give a folder that is")

    def run(name: str, plan: RunPlan) -> str:
        arguments = [*command, *resumed_args] if name == "resumed" else command
        return _run_command(arguments, plan, folder / name, timeout_s)

    report = prove_runs(run, folder, steps=steps, interrupt_at=middle, tolerance=tolerance, ignore=ignore)
    if output is None and report.equal:
        shutil.rmtree(folder)
        report = replace(report, folder=None)
    return report


def prove_runs(
    run: Callable[[str, RunPlan], str],
    folder: Path,
    *,
    steps: int,
    interrupt_at: int,
    tolerance: float | None = None,
    ignore: Sequence[str] = (),
) -> ResumeReport:
    """Do the three runs of a proof by ``run``, and compare their records."""
    checkpoint = str(folder / "checkpoint.ckpt")

    def record(name: str, first: int, last: int, save_to: str | None, resume_from: str | None) -> list[RankRecords]:
        saves_of = "straight" if name == "straight" else "interrupted"  # a resumed run finds its own checkpoints
        records, files = (str(folder / name / part) for part in ("records", "files"))
        plan = RunPlan(records, files, str(folder / saves_of / "saves"), first, last, save_to, resume_from)
        description = run(name, plan)
        ranks = read_records(plan.records)
        if not ranks:
            raise RankError(
                f"the {name} run ended by itself and recorded nothing: {_NO_FIT}\nThe command was {description}"
            )
        if len(ranks) != ranks[0].setting.world:
            raise RankError(f"the {name} run has {ranks[0].setting.world} ranks, of which {len(ranks)} recorded here")
        for one in ranks:
            if (last, "after") not in one.moments:
                raise RankError(
                    f"the {name} run ended by itself after step {one.last_step} (rank {one.setting.rank}), "
                    f"before step {last}. The first fit counts. Let it train for longer, or prove fewer --steps.\n"
                    f"The command was {description}"
                )
        return ranks

    straight = record("straight", 0, steps, None, None)
    interrupted = record("interrupted", 0, interrupt_at, checkpoint, None)
    resumed = record("resumed", interrupt_at, steps, None, checkpoint)

    within = tolerance or 0.0
    result = compare_runs(straight, interrupted, first=0, last=interrupt_at, tolerance=within, ignore=ignore)
    equal = None if result.differences else True
    if equal:
        if tolerance is None and not same_topology(straight, resumed):
            within = OTHER_TOPOLOGY_TOLERANCE
        result = compare_runs(straight, resumed, first=interrupt_at, last=steps, tolerance=within, ignore=ignore)
        equal = not result.differences
    unobserved = {name: why for of in (*straight, *interrupted, *resumed) for name, why in of.unobserved.items()}
    return ResumeReport(
        equal,
        tuple(result.differences),
        _ranks_text(straight),
        _ranks_text(resumed),
        steps,
        interrupt_at,
        within,
        dict(result.compared),
        result.skipped | {name: f"cannot be observed: {why}" for name, why in unobserved.items()},
        str(folder),
    )


_NO_FIT = (
    "it began no fit of a Trainer of Lightning. Give the command that trains, with its arguments. A training loop in "
    "the script, such as Fabric's, is not recorded: save at the end of a straight and of a resumed run, and compare "
    "both by `python -m lightning_shardckpt diff A B`. Neither is a Python that ignores PYTHONPATH (-I, -E)."
)


def _ranks_text(ranks: list[RankRecords]) -> str:
    setting = ranks[0].setting
    return f"{count_text(setting.world, 'rank')} ({setting.strategy}, {setting.precision})"


# ── commands ──────────────────────────────────────────────────────────────────────────────────────────────────────

_PACKAGE = Path(__file__).parents[1]
_ENTRY_POINTS = """[lightning.pytorch.callbacks_factory]
prove_resume = shardckpt_prove_resume:callbacks
"""
_HOOK = '''"""Written by prove-resume: gives a recorder to every Trainer of this run."""


def callbacks():
    from lightning_shardckpt.recording import recorder_of

    return [recorder_of({plan!r})]
'''


def _run_command(command: Sequence[str], plan: RunPlan, folder: Path, timeout_s: float) -> str:
    """Run a training command under a plan, wait for its end, and return the command and the end of its output."""
    path = _python_path(folder, plan)
    log = folder / "output.txt"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *command] if command[0].endswith(".py") else list(command),
            env=os.environ | {"PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # ranks that outlived the first process, too
            process.wait()
    lines = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
    description = "\n".join([" ".join(command), f"The last lines of {log}:", *(f"  {line}" for line in lines)])
    if status is None:
        raise RankError(f"the {folder.name} run did not end in {timeout_s:g} s and was killed: {description}")
    if status:
        raise RankError(f"the {folder.name} run ended with status {status}: {description}")
    return description


def _python_path(folder: Path, plan: RunPlan) -> str:
    """Write an entry point, and return a ``PYTHONPATH`` that begins with it and this package."""
    added = folder / "added"
    about = added / "shardckpt_prove_resume-1.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: shardckpt-prove-resume\nVersion: 1\n")
    (about / "entry_points.txt").write_text(_ENTRY_POINTS)
    (folder / "plan.json").write_text(json.dumps(asdict(plan)))
    (added / "shardckpt_prove_resume.py").write_text(_HOOK.format(plan=str(folder / "plan.json")))
    with suppress(FileExistsError):
        (added / _PACKAGE.name).symlink_to(_PACKAGE, target_is_directory=True)
    return os.pathsep.join(filter(None, [str(added), os.environ.get("PYTHONPATH")]))
