"""Records of training runs, and the first difference between two of them. Pure but for the files; no torch.

Each rank of a run writes JSON lines: its setting, then entries by section and name for each moment of each step. A
tensor is recorded by its boxes, whose digests add up, so that it can be compared over all ranks on any topology. On the
same topology runs are compared bit by bit. On another one sums are in another order, so that values may differ within a
tolerance, except for state that has just been loaded.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

Phase = Literal["restored", "before", "after"]
"""A moment of a step: state loaded from a checkpoint, before the training step, after the optimizer's step."""

_STATE = ("metrics", "precision", "schedulers", "module", "datamodule", "callbacks")
SECTIONS: dict[Phase, tuple[str, ...]] = {
    "restored": ("weights", "buffers", "optimizer", "param_groups", *_STATE),
    "before": ("batch", "random", "param_groups", "counters"),
    "after": (
        *("loss", "logged", "gradients", "optimizer", "weights", "buffers", *_STATE),
        *("param_groups", "random", "counters"),
    ),
}
"""The sections of each moment, causes before their effects."""

_OF_A_TOPOLOGY = {
    "batch": "each rank has its own share",
    "random": "each rank draws random numbers of its own",
    "loss": "each rank has the loss of its own share; values logged with sync_dist=True are compared",
    "gradients": "until the optimizer steps they may be sums over some of the ranks; the weights are compared",
    "metrics": "each rank counts its own share until the metric is computed",
}
"""Sections that are not compared on another topology, and why."""
_OF_A_RANK = "each rank has a value of its own (self.log without sync_dist=True)"
_FLOOR = 1e-4  # a tensor whose norm is less than this part of the largest one of its section counts as noise


@dataclass(frozen=True, slots=True)
class BoxRecord:
    """A box of a tensor: its start, its lengths, the digest of its elements, and their moments.

    Digests and moments of boxes add up to those of the tensor. The moments are the sum of squares, then projections on
    fixed pseudo-random vectors.
    """

    start: tuple[int, ...]
    lengths: tuple[int, ...]
    digest: int
    moments: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """A value or a tensor.

    Attributes:
        text: of a value, which may be a digest; the dtype of a tensor.
        number: of a value that is a number.
        shared: whether the value is the same on all ranks, on any topology.
        shape: of a tensor: the global one.
        boxes: of a tensor: those that the rank has.
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
        """The moments of the whole tensor; nothing where a box has none."""
        return [math.fsum(column) for column in zip(*(box.moments for box in self.boxes), strict=False)]

    @property
    def norm(self) -> float:
        """The L2 norm of a tensor; 0 if it has none, or not a finite one."""
        total = (self.moments or [0.0])[0]
        return math.sqrt(total) if math.isfinite(total) else 0.0

    def __str__(self) -> str:
        return self.text if self.shape is None else f"{self.text} {self.shape} with a norm of {self.norm:.6g}"


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
    """The records of one rank.

    Attributes:
        setting: the rank and its place.
        moments: sections by step and phase.
        unobserved: why something could not be recorded, by name.
    """

    setting: Setting
    moments: dict[tuple[int, Phase], Sections] = field(default_factory=dict)
    unobserved: dict[str, str] = field(default_factory=dict)

    @property
    def last_step(self) -> int:
        """The number of batches that were trained."""
        return max((step for step, _ in self.moments), default=0)


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The orders of a recorder.

    Attributes:
        records: the folder for the records of all ranks.
        files: the folder that replaces ``default_root_dir``; a LightningCLI writes its config there once.
        saves: the folder that replaces ``dirpath`` of the script's own ModelCheckpoints.
        first_step: batches that were trained before this run.
        last_step: the batch after which the run ends, counted from the beginning of training.
        save_to: the checkpoint to save after the last batch, if any.
        resume_from: the checkpoint to resume from; None leaves ``ckpt_path`` as the script gives it.
    """

    records: str
    files: str
    saves: str
    first_step: int
    last_step: int
    save_to: str | None = None
    resume_from: str | None = None


# ── files ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def rank_file(folder: str, rank: int) -> Path:
    """Return the path of a rank's records."""
    return Path(folder, f"rank-{rank:05}.jsonl")


def to_line(**values: Any) -> str:
    """Return a line of a rank's file: its ``setting``, or a moment's ``step``, ``phase`` and ``sections``."""
    return json.dumps(values, default=astuple, separators=(",", ":")) + "\n"


def read_records(folder: str) -> list[RankRecords]:
    """Read the records of all ranks of a run, in the order of ranks; none if none recorded."""
    return [_read(path) for path in sorted(Path(folder).glob("rank-*.jsonl")) if path.stat().st_size]


def _read(path: Path) -> RankRecords:
    whole = (line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n"))  # a kill cuts the last
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
        step: counted in batches from 1; of ``restored``, the step after which the checkpoint was saved.
        phase: the moment of that step.
        section: such as ``weights``.
        name: in that section.
        rank: None for a tensor or value over all ranks.
        expected: the value of the straight run.
        found: the value of the other one.
    """

    step: int
    phase: Phase
    section: str
    name: str
    rank: int | None
    expected: str
    found: str


@dataclass(slots=True)
class Comparison:
    """All differences of the first section of the first moment that differ.

    ``compared``: the number of entries by section; ``skipped``: why something was not compared, by name.
    """

    differences: list[Difference] = field(default_factory=list)
    compared: Counter[str] = field(default_factory=Counter)
    skipped: dict[str, str] = field(default_factory=dict)


def same_topology(a: Sequence[RankRecords], b: Sequence[RankRecords]) -> bool:
    """Return whether two runs have the same ranks, which hold the same boxes of the weights."""
    return [(of.setting, _weight_boxes(of)) for of in a] == [(of.setting, _weight_boxes(of)) for of in b]


def _weight_boxes(records: RankRecords) -> list[tuple[str, object]]:
    last = max((step for step, phase in records.moments if phase == "after"), default=None)
    weights = {} if last is None else records.moments[last, "after"]["weights"]
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
    """Compare the records of two runs of the same steps.

    Args:
        straight: of all ranks of a run that was not interrupted.
        other: of all ranks of another one, which may have another topology.
        first: the number of batches after which the other one began.
        last: the last batch to compare.
        tolerance: the relative L2 norm of a difference of tensors that is accepted; the relative one of numbers.
        ignore: patterns of ``SECTION/NAME`` that are not compared.
    """
    result, same = Comparison(), same_topology(straight, other)
    for step, phase in _moments(first, last, other):
        left = [of.moments.get((step, "after" if phase == "restored" else phase), {}) for of in straight]
        right = [of.moments.get((step, phase), {}) for of in other]
        for section in SECTIONS[phase]:
            if not same and section in _OF_A_TOPOLOGY:
                result.skipped[section] = _OF_A_TOPOLOGY[section]
                continue
            pairs = list(_pairs([of.get(section, {}) for of in left], [of.get(section, {}) for of in right], same))
            norm = max((expected.norm for _, _, expected, _ in pairs if expected is not None), default=0.0)
            for rank, name, expected, actual in pairs:
                either = expected or actual
                if any(fnmatchcase(f"{section}/{name}", pattern) for pattern in ignore):
                    result.skipped[f"{section}/{name}"] = "ignored by --ignore"
                elif not same and either is not None and not either.shared:
                    result.skipped[f"{section}/{name}"] = _OF_A_RANK
                else:
                    result.compared[section] += 1
                    if not _is_close(expected, actual, 0.0 if phase == "restored" else tolerance, norm):
                        texts = _texts(expected, actual)
                        result.differences.append(Difference(step, phase, section, name, rank, *texts))
            if result.differences:
                return result
    return result


def _moments(first: int, last: int, other: Sequence[RankRecords]) -> Iterator[tuple[int, Phase]]:
    if any((first, "restored") in records.moments for records in other):
        yield first, "restored"
    for step in range(first + 1, last + 1):
        yield step, "before"
        yield step, "after"


_Named = Mapping[str, Entry]
_Pair = tuple[int | None, str, Entry | None, Entry | None]
"""Rank, name, and the entries of the straight run and of the other one."""


def _pairs(a: Sequence[_Named], b: Sequence[_Named], same: bool) -> Iterator[_Pair]:
    """Yield the entries to compare: of each rank on the same topology, else over all ranks.

    Even on the same topology, a tensor of which the ranks have other boxes than before is compared over all ranks: an
    optimizer may make state whole on every rank, and get it back in slices.
    """
    for name in dict.fromkeys(name for entries in (*a, *b) for name in entries):
        left, right = ([entries.get(name) for entries in side] for side in (a, b))
        ranks = list(zip(left, right, strict=False))
        if same and all(x is None or y is None or _places(x) == _places(y) for x, y in ranks):
            yield from ((rank, name, x, y) for rank, (x, y) in enumerate(ranks) if x is not None or y is not None)
        else:
            yield None, name, _merge(left), _merge(right)


def _merge(entries: Iterable[Entry | None]) -> Entry | None:
    """Return an entry over all ranks: a tensor with each box once; a value of the lowest rank that has it."""
    present = [entry for entry in entries if entry is not None]
    boxes = {(box.start, box.lengths): box for entry in reversed(present) for box in entry.boxes}
    return replace(present[0], boxes=tuple(boxes.values())) if present else None


def _is_close(a: Entry | None, b: Entry | None, tolerance: float, norm: float) -> bool:
    """Return whether two entries are equal, or differ by no more than the tolerance."""
    if a is None or b is None or (a.text, a.shape) != (b.text, b.shape):
        numbers = [entry.number for entry in (a, b) if entry is not None and entry.number is not None]
        return len(numbers) == 2 and abs(numbers[0] - numbers[1]) <= tolerance * max(map(abs, numbers))
    if a.digest == b.digest:
        return True
    distance = _distance(a, b) if tolerance and a.text.startswith(("float", "bfloat", "complex")) else None
    return distance is not None and distance <= tolerance * max(a.norm, b.norm, norm * _FLOOR)


def _distance(a: Entry, b: Entry) -> float | None:
    """Estimate the L2 norm of the difference; a projection on uniform numbers of [-1, 1] has a third of its square.

    None if something is not finite.
    """
    squares = [(x - y) ** 2 for x, y in zip(a.moments[1:], b.moments[1:], strict=False)]
    if not squares or not math.isfinite(sum(squares)):
        return None
    return max(math.sqrt(3 * sum(squares) / len(squares)), abs(a.norm - b.norm))


def _texts(a: Entry | None, b: Entry | None) -> tuple[str, str]:
    """Return the expected entry and the actual one, as texts that show how they differ."""
    if a is None or b is None or (a.text, a.shape) != (b.text, b.shape):
        return str(a or "nothing"), str(b or "nothing")
    distance = _distance(a, b)
    if distance is None:
        return f"digest {a.digest:016x}", f"digest {b.digest:016x}"
    relative = f", relative L2 difference about {distance / a.norm:.2g}" if a.norm else ""
    return f"a norm of {a.norm:.6g}", f"a norm of {b.norm:.6g}{relative}"
