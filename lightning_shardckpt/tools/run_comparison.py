"""Find the first difference between two recorded runs. Pure.

On the same topology every rank is compared with itself, bit by bit. On another one each tensor is put together from the
boxes of all ranks, and compared within a tolerance, since sums are in another order there; state that has just been
loaded has to be bit-equal on any topology.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from lightning_shardckpt.tools.run_records import SECTIONS, BoxRecord, Entry, Phase, RankRecords

_FLOOR = 1e-4  # a tensor whose norm is less than this part of the largest one of its section counts as noise
_OWN_STREAMS = "on another topology the ranks draw random numbers of their own"
_OWN_SHARE = {
    "batch": "each rank has its own share; the samples of all ranks are compared instead",
    "loss": "each rank has the loss of its own share; values logged with sync_dist=True are compared",
    "metrics": "each rank counts its own share until the metric is computed",
}
_OWN_VALUE = "each rank has a value of its own (self.log without sync_dist=True)"
_END_OF_STEP = {
    "logger": "loggers are told when a step ends, and the interrupted run ended before that",
    "validation": "a run that resumes does not validate after the step that was saved; interrupt at another one",
}
_PARTIAL = "they are sums over a part of the ranks until the optimizer steps"


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


Ranks = Sequence[RankRecords]
_Named = Mapping[str, Entry]
_Pair = tuple[int | None, str, Entry | None, Entry | None]
"""Rank, name, and the entries of the straight run and of the other one."""


def same_topology(a: Ranks, b: Ranks) -> bool:
    """Return whether two runs have the same ranks, which hold the same boxes of the weights."""
    return [r.setting for r in a] == [r.setting for r in b] and list(map(_weight_boxes, a)) == list(
        map(_weight_boxes, b)
    )


def compare_runs(
    straight: Ranks, other: Ranks, *, first: int, last: int, tolerance: float = 0.0, ignore: Sequence[str] = ()
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
    result = Comparison()
    for step, phase in _moments(first, last, other):
        left = [r.moments.get((step, "after" if phase == "restored" else phase), {}) for r in straight]
        right = [r.moments.get((step, phase), {}) for r in other]
        for section in SECTIONS[phase]:
            if first and step == first + 1 and section in _END_OF_STEP:
                if any(sections.get(section) for sections in left):
                    result.skipped[f"{section} of step {first}"] = _END_OF_STEP[section]
                continue
            a, b = ([sections.get(section, {}) for sections in side] for side in (left, right))
            pairs = list(_pairs(section, a, b, straight, other, result.skipped))
            if section == "gradients" and pairs and pairs[0][0] is None and not _steps(straight, step):
                result.skipped["gradients of batches without a step of the optimizer"] = _PARTIAL
                continue
            norm = max((_norm(expected) for _, _, expected, _ in pairs), default=0.0)
            for rank, name, expected, actual in pairs:
                if any(fnmatchcase(f"{section}/{name}", pattern) for pattern in ignore):
                    result.skipped[f"{section}/{name}"] = "ignored by --ignore"
                    continue
                result.compared[section] += 1
                if not _is_close(expected, actual, 0.0 if phase == "restored" else tolerance, norm):
                    before, after = _texts(expected, actual)
                    result.differences.append(Difference(step, phase, section, name, rank, before, after))
            if result.differences:
                return result
    return result


def _moments(first: int, last: int, other: Ranks) -> Iterator[tuple[int, Phase]]:
    if any((first, "restored") in records.moments for records in other):
        yield first, "restored"
    for step in range(first + 1, last + 1):
        yield step, "before"
        yield step, "after"


def _steps(records: Ranks, step: int) -> bool:
    """Return whether the optimizer stepped after a batch."""
    counters = [records[0].moments.get((step, phase), {}).get("counters", {}) for phase in ("before", "after")]
    return counters[0].get("global_step") != counters[1].get("global_step")


# ── entries that belong together ──────────────────────────────────────────────────────────────────────────────────


def _pairs(
    section: str, a: Sequence[_Named], b: Sequence[_Named], straight: Ranks, other: Ranks, skipped: dict[str, str]
) -> Iterator[_Pair]:
    """Yield the entries to compare: of each rank on the same topology, else over all ranks."""
    if same_topology(straight, other):
        if section != "samples":
            yield from _by_rank(a, b)
        return
    shares = any(records.setting.data_size > 1 for records in (*straight, *other))
    own = _OWN_STREAMS if section == "random" else _OWN_SHARE.get(section) if shares else None
    if own is not None:
        if any(a):
            skipped[section] = own
        return
    whole = _all_samples if section == "samples" else _whole
    for _, name, expected, actual in _by_name(None, whole(a, straight), whole(b, other)):
        either = expected or actual
        if shares and either is not None and not either.shared:
            skipped[f"{section}/{name}"] = _OWN_VALUE
        else:
            yield None, name, expected, actual


def _by_name(rank: int | None, x: _Named, y: _Named) -> Iterator[_Pair]:
    return ((rank, name, x.get(name), y.get(name)) for name in {**x, **y})


def _by_rank(a: Sequence[_Named], b: Sequence[_Named]) -> Iterator[_Pair]:
    """Pair the entries of each rank; over all ranks those of a tensor of which the ranks have other boxes than before.

    An optimizer may make state whole on every rank, and get it back in slices.
    """
    ranks = list(zip(a, b, strict=True))
    moved = {name for x, y in ranks for name in x.keys() & y.keys() if _boxes_of(x[name]) != _boxes_of(y[name])}
    for rank, (x, y) in enumerate(ranks):
        yield from (pair for pair in _by_name(rank, x, y) if pair[1] not in moved)
    yield from (pair for pair in _by_name(None, _whole(a), _whole(b)) if pair[1] in moved)


def _boxes_of(entry: Entry) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(box.start, box.lengths) for box in entry.boxes]


def _weight_boxes(records: RankRecords) -> list[tuple[str, object]]:
    last = max((step for step, phase in records.moments if phase == "after"), default=None)
    weights = {} if last is None else records.moments[last, "after"]["weights"]
    return [(name, _boxes_of(entry)) for name, entry in sorted(weights.items())]


def _all_samples(ranks: Sequence[_Named], records: Ranks) -> _Named:
    """Return the samples of one step over all data-parallel ranks, sorted."""
    shares = {of.setting.data_rank: entries for of, entries in zip(records, ranks, strict=True)}
    rows: dict[str, list[str]] = {}
    for entries in shares.values():
        for name, entry in entries.items():
            rows.setdefault(name, []).extend(entry.rows or ())
    return {name: Entry("", rows=tuple(sorted(each))) for name, each in rows.items()}


def _whole(ranks: Sequence[_Named], records: Ranks = ()) -> _Named:
    """Return every entry over all ranks: a tensor with each box once; a value of the lowest rank that has it."""
    entries: dict[str, Entry] = {}
    boxes: dict[str, dict[object, BoxRecord]] = {}
    for of_rank in ranks:
        for name, entry in of_rank.items():
            entries.setdefault(name, entry)
            for box in entry.boxes:
                boxes.setdefault(name, {}).setdefault((box.start, box.lengths), box)
    return {name: replace(entry, boxes=tuple(boxes.get(name, {}).values())) for name, entry in entries.items()}


# ── two entries ───────────────────────────────────────────────────────────────────────────────────────────────────


def _is_close(a: Entry | None, b: Entry | None, tolerance: float, norm: float) -> bool:
    """Return whether two entries are equal, or differ by no more than the tolerance."""
    if a is None or b is None or (a.text, a.shape, a.rows) != (b.text, b.shape, b.rows):
        numbers = [entry.number for entry in (a, b) if entry is not None and entry.number is not None]
        return len(numbers) == 2 and abs(numbers[0] - numbers[1]) <= tolerance * max(map(abs, numbers))
    if _digest(a) == _digest(b):
        return True
    distance = _distance(a, b) if tolerance and a.text.startswith(("float", "bfloat", "complex")) else None
    return distance is not None and distance <= tolerance * max(_norm(a), _norm(b), norm * _FLOOR)


def _digest(entry: Entry) -> int:
    return sum(box.digest for box in entry.boxes) % 2**64


def _sums(entry: Entry) -> list[float]:
    """Return the moments of the whole tensor; nothing where a box has none."""
    return [math.fsum(column) for column in zip(*(box.moments for box in entry.boxes), strict=False)]


def _norm(entry: Entry | None) -> float:
    total = (_sums(entry) if entry is not None else []) or [0.0]
    return math.sqrt(total[0]) if math.isfinite(total[0]) else 0.0


def _distance(a: Entry, b: Entry) -> float | None:
    """Estimate the L2 norm of the difference; a projection on uniform numbers of [-1, 1] has a third of its square.

    None if something is not finite.
    """
    squares = [(x - y) ** 2 for x, y in zip(_sums(a)[1:], _sums(b)[1:], strict=False)]
    if not squares or not math.isfinite(sum(squares)):
        return None
    return max(math.sqrt(3 * sum(squares) / len(squares)), abs(_norm(a) - _norm(b)))


def _texts(a: Entry | None, b: Entry | None) -> tuple[str, str]:
    """Return the expected entry and the actual one, as texts that show how they differ."""
    if a is None or b is None or (a.text, a.shape) != (b.text, b.shape):
        return _text(a), _text(b)
    if a.rows is not None and b.rows is not None:
        common = sum((Counter(a.rows) & Counter(b.rows)).values())
        return _text(a), f"{_text(b)}, {common} of them the same"
    distance, norm = _distance(a, b), _norm(a)
    if distance is None:
        return f"digest {_digest(a):016x}", f"digest {_digest(b):016x}"
    relative = f", relative L2 difference about {distance / norm:.2g}" if norm else ""
    return f"a norm of {norm:.6g}", f"a norm of {_norm(b):.6g}{relative}"


def _text(entry: Entry | None) -> str:
    if entry is None:
        return "nothing"
    if entry.shape is not None:
        return f"{entry.text} {entry.shape} with a norm of {_norm(entry):.6g}"
    return entry.text if entry.rows is None else f"{len(entry.rows)} samples"
