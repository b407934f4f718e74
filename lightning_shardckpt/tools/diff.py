"""Comparison of two checkpoints of any topologies: ``python -m lightning_shardckpt diff A B``. No torch.

Every tensor of both checkpoints is read from both a window at a time, verified, and compared.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import inf, isfinite, nan, prod, sqrt
from typing import Any

import numpy
from numpy.typing import NDArray

from lightning_shardckpt.format.index import MAX_BLOCK_BYTES, Component, TensorSpec
from lightning_shardckpt.format.value_checks import DTYPE_BYTES, bytes_in
from lightning_shardckpt.sources.did_you_mean import open_checkpoint
from lightning_shardckpt.state.documents import document_of, entries_of
from lightning_shardckpt.system.text import count_text, shape_text
from lightning_shardckpt.tools.listing import is_selected, long_table
from lightning_shardckpt.transfer.reader import Checkpoint
from lightning_shardckpt.transfer.shard_reader import ShardReader
from lightning_shardckpt.transfer.whole_tensors import WholeTensors, read_windows

_WINDOW_BYTES = MAX_BLOCK_BYTES  # of each tensor at a time, and the same again to scatter boxes
_LISTED = 20
_ABSENT = "–"
_SAVED = ("trainer/hyper_parameters/", "trainer/datamodule_hyper_parameters/")
_HYPER = re.compile(r"optimizer/\d+/param_groups/\d+/(?!params$)")
_PLAIN = ("tuple", "set", "frozenset", "int", "float", "path")
_SHOWN = 200


def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    tensors: str | None = None,
    advance: Callable[[int], Any] = lambda nbytes: None,
    expect: Callable[[int], Any] = lambda nbytes: None,
    storage_options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the differences of two checkpoints, as values that JSON can hold.

    Args:
        a: a checkpoint.
        b: another one.
        tensors: compare only tensors whose name matches this pattern (``*``, ``?``, ``[…]``) or contains this text.
        advance: called with the bytes of tensors as they are compared.
        expect: called once before with the total of these bytes.
        storage_options: for URLs, of both; see ``ShardCkptIO``.

    Raises:
        CheckpointNotFoundError: if there is no checkpoint; describes the content of the path.
        CorruptionError: naming file, tensor and rank of corrupted data.
        ValueError: if no name matches ``tensors``.
    """
    with (
        open_checkpoint(a, storage_options=storage_options) as first,
        open_checkpoint(b, storage_options=storage_options) as second,
    ):
        compare = _Comparison(first, second, advance)
        lists: dict[str, Any] = {"same": 0, "added": [], "removed": [], "changed": [], "different": []}
        pairs = list(_pairs(first, second, tensors))
        expect(sum(_compared_bytes(pair, first, second) for pair in pairs))
        for pair in pairs:
            kind, entry = _judge(pair, first, second, compare)
            if kind == "same":
                lists["same"] += 1
            else:
                lists[kind].append({"component": pair.component, "name": pair.name, **entry})
        if tensors is not None and not any(lists.values()):
            raise ValueError(f"neither checkpoint has a tensor whose name matches {tensors!r} or contains it")
        return {
            "a": os.fspath(a),
            "b": os.fspath(b),
            "about": _changes(_about(first), _about(second)),
            "hyper_parameters": _changes(hyper_parameters(first), hyper_parameters(second)),
            "tensors": lists,
        }


def is_same(report: dict[str, Any]) -> bool:
    """Return whether all tensors are the same."""
    return not any(report["tensors"][kind] for kind in ("added", "removed", "changed", "different"))


def _about(checkpoint: Checkpoint) -> dict[str, str]:
    root = checkpoint.root
    facts = {"step": str(root.step), "epoch": str(root.epoch), "ranks": str(root.world_size)}
    facts |= {f"topology/{axis}": str(size) for axis, size in root.topology.items()}
    return facts | {f"software/{name}": version for name, version in root.software.items()}


def _changes(a: dict[str, str], b: dict[str, str]) -> dict[str, list[str | None]]:
    """Return both values of names whose values differ."""
    return {name: [a.get(name), b.get(name)] for name in {**a, **b} if a.get(name) != b.get(name)}


# ── pairs of tensors ──────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Pair:
    """A tensor by a common name, and its key in each checkpoint; None if a checkpoint lacks it."""

    component: str
    name: str
    a: str | None
    b: str | None


def _pairs(first: Checkpoint, second: Checkpoint, pattern: str | None) -> Iterator[_Pair]:
    """Yield every tensor of either checkpoint, by any of its names; each pair of keys once."""
    for component in {**first.root.components, **second.root.components}:
        empty = Component({})
        a, b = (c.root.components.get(component, empty) for c in (first, second))
        keys = [{**{key: key for key in c.tensors}, **c.aliases} for c in (a, b)]
        seen: set[tuple[str | None, str | None]] = set()
        for name in {**keys[0], **keys[1]}:
            pair = keys[0].get(name), keys[1].get(name)
            if pair not in seen and is_selected([name], pattern):
                seen.add(pair)
                yield _Pair(component, name, *pair)


def _describe(spec: TensorSpec) -> dict[str, Any]:
    return {"dtype": spec.dtype, "shape": list(spec.shape)}


def _compared_bytes(pair: _Pair, first: Checkpoint, second: Checkpoint) -> int:
    """Return the bytes of a tensor to compare; 0 if dtypes or shapes differ, or a checkpoint lacks it."""
    if pair.a is None or pair.b is None:
        return 0
    a, b = (c.root.components[pair.component].tensors[key] for c, key in ((first, pair.a), (second, pair.b)))
    return bytes_in(a.shape, a.dtype) if (a.dtype, a.shape) == (b.dtype, b.shape) else 0


def _judge(pair: _Pair, first: Checkpoint, second: Checkpoint, compare: _Comparison) -> tuple[str, dict[str, Any]]:
    """Return the list of the report that a tensor belongs to, and its entry there."""
    if pair.b is None:
        assert pair.a is not None
        return "removed", _describe(first.root.components[pair.component].tensors[pair.a])
    b = second.root.components[pair.component].tensors[pair.b]
    if pair.a is None:
        return "added", _describe(b)
    a = first.root.components[pair.component].tensors[pair.a]
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return "changed", {"a": _describe(a), "b": _describe(b)}
    found = compare.differences(pair.component, (pair.a, pair.b), a)
    return ("different", _describe(a) | found) if found else ("same", {})


# ── equality ──────────────────────────────────────────────────────────────────────────────────────────────────────


class _Comparison:
    """A comparison that reads and verifies both tensors a window at a time, with the memory of four windows."""

    def __init__(self, first: Checkpoint, second: Checkpoint, advance: Callable[[int], Any]) -> None:
        both = (first, second)
        self._sides = [(WholeTensors(c), ShardReader(c.path, c.reader, target_bytes=_WINDOW_BYTES)) for c in both]
        self._advance = advance

    def differences(self, component: str, keys: tuple[str, str], spec: TensorSpec) -> dict[str, Any]:
        """Return numbers of the differences of two tensors; none if they are the same."""
        distance = TensorDistance()
        if prod(spec.shape):
            sides = zip(self._sides, keys, strict=True)
            streams = [
                read_windows(source, spec.shape, wholes.boxes(component, key), _WINDOW_BYTES)
                for (wholes, source), key in sides
            ]
            for a, b in zip(*streams, strict=True):
                distance.add(a, b, spec.dtype)
                self._advance(len(a))
        if not distance.elements:
            return {}
        return {
            "elements": distance.elements,
            "of": prod(spec.shape),
            "not_finite": distance.not_finite,
            "max_abs": distance.max_abs if isfinite(distance.max_abs) else None,  # JSON has no infinity
            "relative_l2": distance.relative_l2,
        }


# ── distance ──────────────────────────────────────────────────────────────────────────────────────────────────────────

_NUMPY = {
    "F64": "f8",
    "F32": "f4",
    "F16": "f2",
    "C64": "c8",
    "C128": "c16",
    "BOOL": "u1",
    **{f"{kind}{bits}": f"{kind.lower()}{bits // 8}" for kind in "IU" for bits in (8, 16, 32, 64)},
}
_AT_ONCE = 1 << 18  # elements: as doubles they still fit into a cache


def numbers(data: memoryview, dtype: str) -> NDArray[Any]:
    """Return the elements of a tensor as an array of equal values; bfloat16 becomes float32.

    >>> numbers(memoryview(bytes([0x80, 0x3F])), "BF16").tolist()
    [1.0]
    """
    if dtype == "BF16":
        bits: NDArray[numpy.uint32] = numpy.frombuffer(data, numpy.uint16).astype(numpy.uint32) << numpy.uint32(16)
        return bits.view(numpy.float32)
    return numpy.frombuffer(data, f"<{_NUMPY[dtype]}")


@dataclass(slots=True)
class TensorDistance:
    """The distance of two tensors of one dtype, summed over windows; for 8-bit floats only the number of elements.

    Attributes:
        elements: number of elements with different bits.
        not_finite: how many of these are infinite or NaN on either side; they do not count for magnitudes.
        max_abs: the largest difference.
    """

    elements: int = 0
    not_finite: int = 0
    max_abs: float = 0.0
    _squares: float = 0.0
    _of_first: float = 0.0

    def add(self, first: memoryview, second: memoryview, dtype: str) -> None:
        """Add a window of both tensors."""
        step = _AT_ONCE * DTYPE_BYTES[dtype]
        with numpy.errstate(all="ignore"):  # for NaNs, and squares of large doubles that overflow
            for begin in range(0, len(first), step):
                self._add(first[begin : begin + step], second[begin : begin + step], dtype)

    def _add(self, first: memoryview, second: memoryview, dtype: str) -> None:
        has_numbers = not dtype.startswith("F8_")  # numpy has no 8-bit floats
        kind = numpy.complex128 if dtype.startswith("C") else numpy.float64
        if has_numbers:
            a = numbers(first, dtype).astype(kind)
            self._of_first += _squares(a[numpy.isfinite(a)])
        if first == second:
            return
        bits = [numpy.frombuffer(data, "u1").reshape(-1, DTYPE_BYTES[dtype]) for data in (first, second)]
        differs = (bits[0] != bits[1]).any(axis=1)
        self.elements += int(differs.sum())
        if not has_numbers:
            self.max_abs = nan
            return
        a, b = a[differs], numbers(second, dtype)[differs].astype(kind)
        finite = numpy.isfinite(a) & numpy.isfinite(b)
        self.not_finite += int((~finite).sum())
        apart = numpy.abs(b[finite] - a[finite])
        self._squares += _squares(apart)
        self.max_abs = max(self.max_abs, float(apart.max(initial=0.0)))

    @property
    def relative_l2(self) -> float | None:
        """The norm of the difference divided by the norm of the first tensor; None if that is 0 or not finite."""
        if self._of_first in (0.0, inf) or self._squares == inf:
            return None
        ratio = sqrt(self._squares) / sqrt(self._of_first)
        return ratio if ratio < inf else None


def _squares(values: NDArray[Any]) -> float:
    return float(numpy.sum(values.real**2) + (numpy.sum(values.imag**2) if values.dtype.kind == "c" else 0.0))


# ── hyper-parameters ──────────────────────────────────────────────────────────────────────────────────────────────


def hyper_parameters(checkpoint: Checkpoint) -> dict[str, str]:
    """Return hyper-parameters of the model and the optimizers as text, by names such as ``…/param_groups/0/lr``.

    Tagged JSON is not decoded.

    Raises:
        CorruptionError: if a document is corrupted.
        FormatError: if a document is malformed.
    """
    trainer, optimizer = (entries_of(role, document_of(checkpoint, role)) for role in ("trainer", "optimizer"))
    values = {name.removeprefix("trainer/"): e.value for name, e in trainer.items() if name.startswith(_SAVED)}
    values |= {name: e.value for name, e in optimizer.items() if _HYPER.match(name)}
    return {name: _text(value) for name, value in values.items()}


def _text(value: Any) -> str:
    if isinstance(value, dict) and "v" in value and value.get("$") in _PLAIN:
        value = value["v"]
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


# ── text ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def render(report: dict[str, Any], everything: bool = False) -> str:
    """Render the result of ``diff`` as text for people."""
    limit, tensors = None if everything else _LISTED, report["tensors"]
    blocks = [f"A  {report['a']}\nB  {report['b']}"]
    for title, kind in (("about", "about"), ("hyper-parameter", "hyper_parameters")):
        rows: list[tuple[str, ...]] = [(name, a or _ABSENT, b or _ABSENT) for name, (a, b) in report[kind].items()]
        if rows:
            blocks.append(_rows_table((title, "A", "B"), rows, limit))
    components = dict.fromkeys(t["component"] for t in tensors["different"])
    blocks += [_different(name, tensors, limit) for name in components]
    blocks += [text] if (text := _others(tensors, limit)) else []
    return "\n\n".join([*blocks, _verdict(report)])


def _different(component: str, tensors: dict[str, Any], limit: int | None) -> str:
    """Return the table of tensors whose values differ, the largest change first."""
    rows: list[tuple[str, ...]] = []
    own = [t for t in tensors["different"] if t["component"] == component]
    for t in sorted(own, key=lambda t: (-(t.get("relative_l2") or 0.0), t["name"])):
        size = (t["name"], t["dtype"], shape_text(t["shape"]))
        largest, relative = ("" if t[k] is None else f"{t[k]:.3g}" for k in ("max_abs", "relative_l2"))
        odd = f" ({t['not_finite']:,} not finite)" if t["not_finite"] else ""
        rows.append((*size, f"{t['elements'] / t['of']:.1%}{odd}", largest, relative))
    header = (f"{component}: differs", "dtype", "shape", "elements", "largest", "relative L2")
    return _rows_table(header, rows, limit, header[3:])


def _others(tensors: dict[str, Any], limit: int | None) -> str:
    rows: list[tuple[str, ...]] = []
    for kind in ("changed", "removed", "added"):
        for t in tensors[kind]:
            a, b = (t["a"], t["b"]) if kind == "changed" else (t, t)
            cells = [f"{one['dtype']} {shape_text(one['shape'])}" for one in (a, b)]
            absent = {"removed": (cells[0], _ABSENT), "added": (_ABSENT, cells[1])}
            rows.append((t["name"], *absent.get(kind, cells), kind))
    return _rows_table(("tensor", "A", "B", ""), rows, limit) if rows else ""


def _rows_table(
    header: tuple[str, ...], rows: list[tuple[str, ...]], limit: int | None, right: tuple[str, ...] = ()
) -> str:
    return long_table(header, rows, lambda row: row, limit=limit, right=right)


def _verdict(report: dict[str, Any]) -> str:
    tensors = report["tensors"]
    counts = [(kind, len(tensors[kind])) for kind in ("different", "changed", "removed", "added")]
    text = f"{count_text(tensors['same'], 'tensor')} the same"
    return text + "".join(f", {number:,} {kind}" for kind, number in counts if number)
