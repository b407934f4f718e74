"""Comparison of two checkpoints: ``python -m lightning_shardckpt diff A B``. No torch.

They may have different topologies. Every tensor is read from both a window at a time, verified and compared.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf, isfinite
from typing import Any, NamedTuple

import numpy
from numpy.typing import NDArray

from lightning_shardckpt.format.index import Component, TensorSpec
from lightning_shardckpt.format.value_checks import DTYPE_BYTES, bytes_in
from lightning_shardckpt.sources.open_source import open_checkpoint
from lightning_shardckpt.sources.source import sharded_source
from lightning_shardckpt.state.documents import document_of, entries_of
from lightning_shardckpt.system.text import count_text, shape_text, table
from lightning_shardckpt.tools.inspect import is_selected
from lightning_shardckpt.transfer.reader import Checkpoint
from lightning_shardckpt.transfer.shard_reader import WindowReader

_WINDOW_BYTES = 8 << 20  # of each tensor at a time
_LISTED = 20
_ABSENT = "–"
_SHOWN = 32
_DIFFERENCES = ("different", "changed", "removed", "added")


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

    ``tensors`` has the tensors that are different (with the ``largest`` difference of an element, and the same
    ``relative`` to the largest element), changed in dtype or shape, removed or added. ``values`` has the other values
    of the trainer, the optimizers and each rank, by name.

    Args:
        a: a checkpoint.
        b: another one.
        tensors: compare only tensors and values whose name matches this pattern (``*``, ``?``, ``[…]``) or contains
            this text.
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
        readers = [WindowReader(sharded_source(checkpoint), _WINDOW_BYTES) for checkpoint in (first, second)]
        lists: dict[str, list[dict[str, Any]]] = {kind: [] for kind in ("same", *_DIFFERENCES)}
        pairs = list(_pairs(first, second, tensors))
        expect(sum(pair.nbytes for pair in pairs))
        for pair in pairs:
            kind, entry = _compare(pair, readers, advance)
            lists[kind].append({"component": pair.component, "name": pair.name, **entry})
        values = [_values(one, tensors) for one in (first, second)]
        if tensors is not None and not any(lists.values()) and not any(values):
            raise ValueError(f"neither checkpoint has a tensor whose name matches {tensors!r} or contains it")
        return {
            "a": os.fspath(a),
            "b": os.fspath(b),
            "about": _changes(_about(first), _about(second)),
            "tensors": {**lists, "same": len(lists["same"])},
            "values": _changes(*values),
            "values_compared": len({**values[0], **values[1]}),
        }


def is_same(report: dict[str, Any]) -> bool:
    """Return whether all tensors are the same."""
    return not any(report["tensors"][kind] for kind in _DIFFERENCES)


def _values(checkpoint: Checkpoint, pattern: str | None) -> dict[str, str]:
    """Return the values of a checkpoint that are in its documents, as JSON by name; tagged JSON is not decoded."""
    roles = [(role, 0) for role in ("model", "optimizer", "trainer")]
    roles += [("rank", rank) for rank in range(checkpoint.root.world_size)]
    entries = (entries_of(role, document_of(checkpoint, role, rank), rank) for role, rank in roles)
    every = (item for found in entries for item in found.items())
    encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, sort_keys=True).encode
    return {name: encode(value) for name, value in every if is_selected([name], pattern)}


def _about(checkpoint: Checkpoint) -> dict[str, str]:
    root = checkpoint.root
    facts = {"step": str(root.step), "epoch": str(root.epoch), "ranks": str(root.world_size)}
    facts |= {f"topology/{axis}": str(size) for axis, size in root.topology.items()}
    return facts | {f"software/{name}": version for name, version in root.software.items()}


def _changes(a: dict[str, str], b: dict[str, str]) -> dict[str, list[str | None]]:
    """Return both values of names whose values differ."""
    return {name: [a.get(name), b.get(name)] for name in {**a, **b} if a.get(name) != b.get(name)}


# ── pairs of tensors ──────────────────────────────────────────────────────────────────────────────────────────────


class _Pair(NamedTuple):
    """A tensor by a common name: its key and spec in each checkpoint, None if a checkpoint lacks it."""

    component: str
    name: str
    keys: tuple[str | None, str | None]
    specs: tuple[TensorSpec | None, TensorSpec | None]

    @property
    def kind(self) -> str:
        """The list of the report to which the tensor belongs without a look at its values: "same" or a difference."""
        a, b = self.specs
        if a is None or b is None:
            return "added" if a is None else "removed"
        return "same" if (a.dtype, a.shape) == (b.dtype, b.shape) else "changed"

    @property
    def nbytes(self) -> int:
        """The bytes to compare."""
        spec = self.specs[0]
        return bytes_in(spec.shape, spec.dtype) if spec is not None and self.kind == "same" else 0


def _pairs(first: Checkpoint, second: Checkpoint, pattern: str | None) -> Iterator[_Pair]:
    """Yield every tensor of either checkpoint, by any of its names; each pair of keys once."""
    for component in {**first.root.components, **second.root.components}:
        a, b = (checkpoint.root.components.get(component, Component({})) for checkpoint in (first, second))
        of_a, of_b, seen = a.names, b.names, set[tuple[str | None, str | None]]()
        for name in {**of_a, **of_b}:
            keys = of_a.get(name), of_b.get(name)
            if keys not in seen and is_selected([name], pattern):
                seen.add(keys)
                yield _Pair(component, name, keys, (a.tensors.get(keys[0] or ""), b.tensors.get(keys[1] or "")))


def _compare(
    pair: _Pair, readers: Sequence[WindowReader], advance: Callable[[int], Any]
) -> tuple[str, dict[str, Any]]:
    """Return the list of the report that a tensor belongs to, and its entry there. Reads a window of each at a time."""
    a, b = ({} if spec is None else {"dtype": spec.dtype, "shape": list(spec.shape)} for spec in pair.specs)
    if pair.kind != "same":
        return pair.kind, {"a": a, "b": b} if pair.kind == "changed" else a or b
    is_same, largest, magnitude = True, 0.0, 0.0
    streams = [reader.read(pair.component, key or "") for reader, key in zip(readers, pair.keys, strict=True)]
    for first, second in zip(*streams, strict=True):
        is_same = is_same and first == second
        for one, size in _distances(first, second, str(a["dtype"])):
            largest, magnitude = max(largest, one), max(magnitude, size)
        advance(len(first))
    if is_same:
        return "same", {}
    known = isfinite(largest)  # JSON has no infinity
    relative = largest / magnitude if known and magnitude else None
    return "different", {**a, "largest": largest if known else None, "relative": relative}


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


def _distances(first: memoryview, second: memoryview, dtype: str) -> Iterator[tuple[float, float]]:
    """Yield, for parts of a window, the largest difference of elements, and the largest finite element of the first.

    The difference is infinite where an element is infinite or NaN on one side, and for 8-bit floats, which numpy lacks.
    """
    if dtype.startswith("F8_"):
        yield inf if first != second else 0.0, 0.0
        return
    step, kind = _AT_ONCE * DTYPE_BYTES[dtype], numpy.complex128 if dtype.startswith("C") else numpy.float64
    with numpy.errstate(all="ignore"):  # for NaNs, and differences that overflow
        for begin in range(0, len(first), step):
            a, b = (_numbers(data[begin : begin + step], dtype).astype(kind) for data in (first, second))
            sizes = numpy.abs(a)
            apart = numpy.where(a == b, 0.0, numpy.abs(b - a))
            apart[numpy.isnan(apart)] = inf
            apart[numpy.isnan(a) & numpy.isnan(b)] = 0.0
            yield float(apart.max(initial=0.0)), float(sizes.max(initial=0.0, where=numpy.isfinite(sizes)))


def _numbers(data: memoryview, dtype: str) -> NDArray[Any]:
    """Return the elements of a tensor as an array of equal values; bfloat16 becomes float32."""
    if dtype == "BF16":
        bits: NDArray[numpy.uint32] = numpy.frombuffer(data, numpy.uint16).astype(numpy.uint32) << numpy.uint32(16)
        return bits.view(numpy.float32)
    return numpy.frombuffer(data, f"<{_NUMPY[dtype]}")


# ── text ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def render(report: dict[str, Any], everything: bool = False) -> str:
    """Render the result of ``diff`` as text for people."""
    limit, tensors = None if everything else _LISTED, report["tensors"]
    blocks = [f"A  {report['a']}\nB  {report['b']}"]
    for title, kind in (("about", "about"), ("value", "values")):
        rows = [(name, _cut(a), _cut(b)) for name, (a, b) in report[kind].items()]
        blocks += [table((title, "A", "B"), rows, limit=limit)] if rows else []
    for component in dict.fromkeys(t["component"] for t in tensors["different"]):
        own = [t for t in tensors["different"] if t["component"] == component]
        own.sort(key=lambda t: (-inf if t["relative"] is None else -t["relative"], t["name"]))  # the largest first
        sizes = [["" if t[k] is None else f"{t[k]:.3g}" for k in ("largest", "relative")] for t in own]
        rows = [(t["name"], t["dtype"], shape_text(t["shape"]), *two) for t, two in zip(own, sizes, strict=True)]
        header = (f"{component}: differs", "dtype", "shape", "largest", "relative")
        blocks.append(table(header, rows, header[3:], limit=limit))
    others = [(t["name"], _spec_text(t["a"]), _spec_text(t["b"]), "changed") for t in tensors["changed"]]
    others += [(t["name"], _spec_text(t), _ABSENT, "removed") for t in tensors["removed"]]
    others += [(t["name"], _ABSENT, _spec_text(t), "added") for t in tensors["added"]]
    blocks += [table(("tensor", "A", "B", ""), others, limit=limit)] if others else []
    counts = [f", {len(tensors[kind]):,} {kind}" for kind in _DIFFERENCES if tensors[kind]]
    return "\n\n".join([*blocks, f"{count_text(tensors['same'], 'tensor')} the same{''.join(counts)}"])


def _spec_text(spec: dict[str, Any]) -> str:
    return f"{spec['dtype']} {shape_text(spec['shape'])}"


def _cut(text: str | None) -> str:
    return _ABSENT if text is None else text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
