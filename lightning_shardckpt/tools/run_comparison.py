"""Find the first thing that differs between two recorded runs: pure functions of their records.

On the same topology every rank is compared with itself, bit by bit. On another one the whole of every tensor is put
together from the boxes of all ranks, and compared within a tolerance, since sums are in another order there; what has
just been loaded has to be bit-equal on any topology.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import reduce
from operator import xor

from lightning_shardckpt.tools.run_records import (
    SECTIONS,
    BoxRecord,
    Entry,
    Phase,
    RankRecords,
    RowsRecord,
    TensorRecord,
    ValueRecord,
)

_FLOOR = 1e-4  # a tensor whose norm is less than this part of the largest one of its section counts as noise
_OWN_STREAMS = "on another topology the ranks draw random numbers of their own"
_OWN_SHARE = {
    "batch": "each rank has its own share; the samples of all ranks are compared instead",
    "loss": "each rank has the loss of its own share; what is logged with sync_dist=True is compared",
    "metrics": "each rank counts its own share until the metric is computed",
}
_OWN_VALUE = "each rank has a value of its own (self.log does without sync_dist=True)"
_END_OF_STEP = {
    "logger": "loggers are told when a step ends, and the interrupted run ended before that",
    "validation": "a run that resumes does not validate after the step that was saved; interrupt at another one",
}
_PARTIAL = "they are sums of a part of the ranks until the optimizer steps"


@dataclass(frozen=True, slots=True)
class Difference:
    """Something that differs.

    Attributes:
        step: counted in batches from 1; of ``restored``, after which the checkpoint was saved.
        phase: the moment of that step.
        section: such as ``weights``.
        name: in that section.
        rank: None for the whole of all ranks.
        expected: what the run has that was not interrupted.
        found: what the other one has.
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
    """What was found: all that differs at the first moment and in the first section where something does.

    ``compared``: the number of entries by section; ``skipped``: what was not compared, and why.
    """

    differences: list[Difference] = field(default_factory=list)
    compared: Counter[str] = field(default_factory=Counter)
    skipped: dict[str, str] = field(default_factory=dict)


def same_topology(a: Sequence[RankRecords], b: Sequence[RankRecords]) -> bool:
    """Return whether two runs have the same ranks, which hold the same boxes of the weights."""
    return [r.setting for r in a] == [r.setting for r in b] and all(
        _boxes(left) == _boxes(right) for left, right in zip(a, b, strict=True)
    )


def _boxes(records: RankRecords) -> list[tuple[str, list[tuple[tuple[int, ...], tuple[int, ...]]]]]:
    last = max((step for step, phase in records.moments if phase == "after"), default=None)
    weights = {} if last is None else records.moments[last, "after"]["weights"]
    return [(name, _boxes_of(entry)) for name, entry in sorted(weights.items()) if isinstance(entry, TensorRecord)]


def compare_runs(
    straight: Sequence[RankRecords],
    other: Sequence[RankRecords],
    *,
    first: int,
    last: int,
    tolerance: float = 0.0,
    ignore: Sequence[str] = (),
) -> Comparison:
    """Compare what two runs recorded of the same steps.

    Args:
        straight: of all ranks of a run that was not interrupted.
        other: of all ranks of another one, which may have other ranks.
        first: the number of batches after which the other one began.
        last: the last batch to compare.
        tolerance: relative L2 norm of a difference that is none; of numbers relative to the larger one.
        ignore: patterns of ``SECTION/NAME`` that are not compared.
    """
    by_rank = same_topology(straight, other)
    found = Comparison()
    for step, phase, of in _moments(first, last, began=any((first, "restored") in r.moments for r in other)):
        left = [r.moments.get((step, "after" if phase == "restored" else phase), {}) for r in straight]
        right = [r.moments.get((step, phase), {}) for r in other]
        for section in of:
            if step == first + 1 and first and section in _END_OF_STEP:
                if any(r.get(section) for r in left):
                    found.skipped[f"{section} of step {first}"] = _END_OF_STEP[section]
                continue
            a, b = [r.get(section, {}) for r in left], [r.get(section, {}) for r in right]
            pairs = list(_pairs(section, a, b, straight, other, found, by_rank=by_rank))
            if section == "gradients" and pairs and not by_rank and not _stepped(straight, step):
                found.skipped["gradients of batches without a step of the optimizer"] = _PARTIAL
                continue
            norm = max((_norm(x) for _, _, x, _ in pairs), default=0.0)
            for rank, name, x, y in pairs:
                if any(fnmatchcase(f"{section}/{name}", pattern) for pattern in ignore):
                    found.skipped[f"{section}/{name}"] = "ignored, as asked for"
                    continue
                found.compared[section] += 1
                within = 0.0 if phase == "restored" else tolerance
                if x != y and not _close(x, y, within, norm):
                    expected, seen = _described(x, y)
                    seen += _known_as(section, name, y, pairs, straight, rank)
                    found.differences.append(Difference(step, phase, section, name, rank, expected, seen))
            if found.differences:
                return found
    return found


def _moments(first: int, last: int, *, began: bool) -> Iterator[tuple[int, Phase, tuple[str, ...]]]:
    if began:
        yield first, "restored", SECTIONS["restored"]
    for step in range(first + 1, last + 1):
        yield step, "before", SECTIONS["before"]
        yield step, "after", SECTIONS["after"]


def _stepped(records: Sequence[RankRecords], step: int) -> bool:
    counters = [records[0].moments.get((step, phase), {}).get("counters", {}) for phase in ("before", "after")]
    return len(counters) == 2 and counters[0].get("global_step") != counters[1].get("global_step")


# ── what belongs together ─────────────────────────────────────────────────────────────────────────────────────────

_Named = dict[str, Entry]
_Pair = tuple[int | None, str, Entry | None, Entry | None]


def _pairs(
    section: str,
    a: Sequence[object],
    b: Sequence[object],
    straight: Sequence[RankRecords],
    other: Sequence[RankRecords],
    found: Comparison,
    *,
    by_rank: bool,
) -> Iterator[_Pair]:
    left, right = [dict(x) for x in a], [dict(y) for y in b]  # type: ignore[call-overload]  # mappings
    if by_rank:
        if section != "samples":
            yield from _by_rank(left, right)
        return
    shares = any(records.setting.data_size > 1 for records in (*straight, *other))
    own = _OWN_STREAMS if section == "random" else _OWN_SHARE.get(section) if shares else None
    if own is not None:
        if any(left):
            found.skipped[section] = own
        return
    if section == "samples":
        x, y = _all_samples(left, straight), _all_samples(right, other)
    else:
        x, y = _whole(left), _whole(right)
    for name in x | y:
        either = x.get(name, y.get(name))
        if shares and isinstance(either, ValueRecord) and not either.shared:
            found.skipped[f"{section}/{name}"] = _OWN_VALUE
        else:
            yield None, name, x.get(name), y.get(name)


def _by_rank(left: Sequence[_Named], right: Sequence[_Named]) -> Iterator[_Pair]:
    """Pair what each rank has; the whole of a tensor of which ranks have other boxes than before.

    Such is state that an optimizer makes whole on every rank, and gets back in slices.
    """
    ranks = list(zip(left, right, strict=True))
    moved = {name for x, y in ranks for name in x.keys() & y.keys() if _boxes_of(x[name]) != _boxes_of(y[name])}
    for rank, (x, y) in enumerate(ranks):
        yield from ((rank, name, x.get(name), y.get(name)) for name in x | y if name not in moved)
    whole_left, whole_right = ([{n: e for n, e in x.items() if n in moved} for x in of] for of in (left, right))
    x, y = _whole(whole_left), _whole(whole_right)
    yield from ((None, name, x.get(name), y.get(name)) for name in sorted(moved))


def _boxes_of(entry: Entry) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(box.start, box.lengths) for box in entry.boxes] if isinstance(entry, TensorRecord) else []


def _all_samples(ranks: Sequence[_Named], of: Sequence[RankRecords]) -> _Named:
    """Return the samples of one step over all data-parallel ranks, in a fixed order."""
    shares = {records.setting.data_rank: found for records, found in zip(of, ranks, strict=True)}
    rows: dict[str, list[str]] = {}
    for found in shares.values():
        for name, entry in found.items():
            if isinstance(entry, RowsRecord):
                rows.setdefault(name, []).extend(entry.rows)
    return {name: RowsRecord(tuple(sorted(each))) for name, each in rows.items()}


def _whole(ranks: Sequence[_Named]) -> _Named:
    """Return every entry over all ranks: the boxes of a tensor once each; a value of the lowest rank that has it."""
    found: _Named = {}
    boxes: dict[str, dict[tuple[tuple[int, ...], tuple[int, ...]], BoxRecord]] = {}
    for entries in ranks:
        for name, entry in entries.items():
            found.setdefault(name, entry)
            if isinstance(entry, TensorRecord):
                for box in entry.boxes:
                    boxes.setdefault(name, {}).setdefault((box.start, box.lengths), box)
    for name, entry in found.items():
        if isinstance(entry, TensorRecord):
            found[name] = TensorRecord(entry.dtype, entry.shape, (_summed(entry.shape, list(boxes[name].values())),))
    return found


def _summed(shape: tuple[int, ...], boxes: Sequence[BoxRecord]) -> BoxRecord:
    """Return one box for the whole tensor: digests are XORs of parts, and moments sums, over boxes."""
    digest = reduce(xor, (int(box.digest, 16) for box in boxes), 0)
    moments = tuple(math.fsum(column) for column in zip(*(box.moments for box in boxes), strict=False))
    return BoxRecord((0,) * len(shape), shape, f"{digest:016x}", moments)


# ── one thing ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _close(a: Entry | None, b: Entry | None, tolerance: float, norm: float) -> bool:
    """Return whether two entries that are not equal have equal elements, or differ by no more than the tolerance."""
    if isinstance(a, ValueRecord) and isinstance(b, ValueRecord):
        if a.number is None or b.number is None:
            return a.text == b.text
        return a.text == b.text or abs(a.number - b.number) <= tolerance * max(abs(a.number), abs(b.number))
    if not isinstance(a, TensorRecord) or not isinstance(b, TensorRecord) or (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    x, y = _summed(a.shape, a.boxes), _summed(b.shape, b.boxes)
    if x.digest == y.digest:
        return True
    if not tolerance or not a.dtype.startswith(("float", "bfloat", "complex")):
        return False
    distance = _distance(x, y)
    return distance is not None and distance <= tolerance * max(_norm(a), _norm(b), norm * _FLOOR)


def _norm(entry: Entry | None) -> float:
    if not isinstance(entry, TensorRecord) or not entry.boxes or not entry.boxes[0].moments:
        return 0.0
    total = math.fsum(box.moments[0] for box in entry.boxes)
    return math.sqrt(total) if math.isfinite(total) else 0.0


def _distance(a: BoxRecord, b: BoxRecord) -> float | None:
    """Estimate the L2 norm of the difference; a projection on uniform numbers of [-1, 1] has a third of its square.

    None if something is not finite.
    """
    squares = [(x - y) ** 2 for x, y in zip(a.moments[1:], b.moments[1:], strict=True)]
    if not squares or not math.isfinite(sum(squares)):
        return None
    of_norms = abs(math.sqrt(max(a.moments[0], 0.0)) - math.sqrt(max(b.moments[0], 0.0)))
    return max(math.sqrt(3 * sum(squares) / len(squares)), of_norms)


def _described(a: Entry | None, b: Entry | None) -> tuple[str, str]:
    """Return what is expected and what is found, as texts that show how they differ."""
    if a is None or b is None:
        return tuple("nothing" if each is None else _alone(each) for each in (a, b))  # type: ignore[return-value]
    if isinstance(a, RowsRecord) and isinstance(b, RowsRecord):
        common = sum((Counter(a.rows) & Counter(b.rows)).values())
        return f"{len(a.rows)} samples", f"{len(b.rows)} samples, {common} of which are those"
    if isinstance(a, TensorRecord) and isinstance(b, TensorRecord) and (a.dtype, a.shape) == (b.dtype, b.shape):
        x, y = _summed(a.shape, a.boxes), _summed(b.shape, b.boxes)
        distance, norm = _distance(x, y), _norm(a)
        if distance is None:
            return f"digest {x.digest}", f"digest {y.digest}"
        relative = f", relative L2 difference about {distance / norm:.2g}" if norm else ""
        return f"a norm of {norm:.6g}", f"a norm of {_norm(b):.6g}{relative}"
    return _alone(a), _alone(b)


def _known_as(
    section: str,
    name: str,
    found: Entry | None,
    pairs: Sequence[_Pair],
    straight: Sequence[RankRecords],
    rank: int | None,
) -> str:
    """Say whether what was found is what another name should have, or, of a batch, another step."""
    if not isinstance(found, TensorRecord):
        return ""
    if section == "batch" and rank is not None:
        for (step, phase), sections in straight[rank].moments.items():
            if phase == "before" and sections["batch"].get(name) == found:
                return f" (that of step {step})"
    others = [other for _, other, expected, _ in pairs if other != name and expected == found]
    return f" (that of {others[0]})" if len(others) == 1 else ""


def _alone(entry: Entry) -> str:
    if isinstance(entry, TensorRecord):
        return f"{entry.dtype} {entry.shape} with a norm of {_norm(entry):.6g}"
    return entry.text if isinstance(entry, ValueRecord) else f"{len(entry.rows)} samples"
