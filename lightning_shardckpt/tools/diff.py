"""Comparison of two checkpoints: ``python -m lightning_shardckpt diff A B``. torch is needed only if some differ.

They may have different topologies. Every tensor is read from both a window at a time, verified and compared.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import Any, TypeAlias

from lightning_shardckpt.format.index import TensorSpec
from lightning_shardckpt.format.value_checks import bytes_in
from lightning_shardckpt.sources.open_source import open_checkpoint
from lightning_shardckpt.sources.source import Source, read_windows, sharded_source
from lightning_shardckpt.state.documents import document_of, entries_of
from lightning_shardckpt.system.text import count_text, progress, shape_text, table
from lightning_shardckpt.tools.inspect import LISTED, is_selected
from lightning_shardckpt.transfer.reader import Checkpoint

_ABSENT = "–"
_SHOWN = 32
_Pair: TypeAlias = tuple[dict[str, Any], tuple[str | None, ...]]
"""The entry of a tensor that both checkpoints have, and its key in each."""


def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    tensors: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the differences of two checkpoints, as values that JSON can hold.

    ``tensors`` lists the tensors that differ; their ``kind`` is "different" (with the ``largest`` difference of an
    element, and the same ``relative`` to the largest element), "changed" in dtype or shape, "removed" or "added".
    ``values`` has the other values of the trainer, the optimizers and each rank, by name.

    Args:
        a: a checkpoint.
        b: another one.
        tensors: only tensors and values whose name matches this pattern (``*``, ``?``, ``[…]``) or contains this text.
        storage_options: for URLs, of both; see ``ShardCkptIO``.

    Raises:
        CheckpointNotFoundError: if there is no checkpoint.
        CorruptionError: naming file, tensor and rank.
        ValueError: if no name matches ``tensors``.
    """
    with (
        open_checkpoint(a, storage_options=storage_options) as first,
        open_checkpoint(b, storage_options=storage_options) as second,
    ):
        entries = _compare(first, second, tensors)
        differing = [entry for entry in entries if entry["kind"] != "same"]
        values = [_values(one, tensors) for one in (first, second)]
        if tensors is not None and not entries and not any(values):
            raise ValueError(f"neither checkpoint has a tensor whose name matches {tensors!r} or contains it")
        return {
            "a": os.fspath(a),
            "b": os.fspath(b),
            "about": _changes(_about(first), _about(second)),
            "tensors": differing,
            "same": len(entries) - len(differing),
            "values": _changes(*values),
            "values_compared": len({**values[0], **values[1]}),
        }


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


def _compare(first: Checkpoint, second: Checkpoint, pattern: str | None) -> list[dict[str, Any]]:
    """Return an entry for every tensor of either checkpoint, by one of its names, after comparing the values."""
    sources = [sharded_source(one) for one in (first, second)]
    entries, both = list[dict[str, Any]](), list[_Pair]()
    for component in {**first.root.components, **second.root.components}:
        stored, seen = [source.component(component) for source in sources], set[tuple[str | None, ...]]()
        for name in {**stored[0].names, **stored[1].names}:
            keys = tuple(one.names.get(name) for one in stored)
            if keys in seen or not is_selected([name], pattern):
                continue
            seen.add(keys)
            a, b = (_describe(one.tensors.get(key or "")) for one, key in zip(stored, keys, strict=True))
            kind = "added" if a is None else "removed" if b is None else "same" if a == b else "changed"
            about = {"component": component, "name": name, "kind": kind, "a": a, "b": b}
            entries.append({**about, "largest": None, "relative": None})
            if kind == "same":
                both.append((entries[-1], keys))
    for number, data, other in _windows(sources, both):
        if data != other:
            both[number][0]["kind"] = "different"
    different = [pair for pair in both if pair[0]["kind"] == "different"]
    sizes = [(0.0, 0.0)] * len(different)  # the largest difference and the largest element of each tensor
    for number, data, other in _windows(sources, different):
        from lightning_shardckpt.state.local_tensors import largest_difference  # imports torch

        found = largest_difference(data, other, different[number][0]["a"]["dtype"])
        sizes[number] = max(sizes[number][0], found[0]), max(sizes[number][1], found[1])
    for (entry, _), (largest, magnitude) in zip(different, sizes, strict=True):
        if isfinite(largest):  # JSON has no infinity
            entry |= {"largest": largest, "relative": largest / magnitude if magnitude else None}
    return entries


def _windows(sources: Sequence[Source], pairs: Sequence[_Pair]) -> Iterator[tuple[int, memoryview, memoryview]]:
    """Yield the bytes of pairs of tensors by their number, window by window."""
    streams = [
        read_windows(source, [(entry["component"], str(keys[side]), None) for entry, keys in pairs])
        for side, source in enumerate(sources)
    ]
    with progress(sum(bytes_in(entry["a"]["shape"], entry["a"]["dtype"]) for entry, _ in pairs)) as advance:
        for (number, data), (_, other) in zip(*streams, strict=True):
            yield number, data, other
            advance(len(data))


def _describe(spec: TensorSpec | None) -> dict[str, Any] | None:
    return None if spec is None else {"dtype": spec.dtype, "shape": list(spec.shape)}


def render(report: dict[str, Any], everything: bool = False) -> str:
    """Return the result of ``diff`` as text for people, the tensors that differ most first."""
    limit, blocks = None if everything else LISTED, [f"A  {report['a']}\nB  {report['b']}"]
    for title, kind in (("about", "about"), ("value", "values")):
        rows = [(name, _cut(a), _cut(b)) for name, (a, b) in report[kind].items()]
        blocks += [table((title, "A", "B"), rows, limit=limit)] if rows else []
    ordered = sorted(report["tensors"], key=lambda t: (t["component"], -(t["relative"] or 0.0)))
    header = ("tensor", "A", "B", "", "largest", "relative")
    rows = list[Any]()
    for t in ordered:
        numbers = ("" if t[name] is None else f"{t[name]:.3g}" for name in header[-2:])
        rows.append((t["name"], _spec_text(t["a"]), _spec_text(t["b"]), t["kind"], *numbers))
    blocks += [table(header, rows, header[-2:], limit=limit)] if rows else []
    counts = Counter(t["kind"] for t in ordered)
    listed = [f", {counts[kind]:,} {kind}" for kind in ("different", "changed", "removed", "added") if counts[kind]]
    return "\n\n".join([*blocks, f"{count_text(report['same'], 'tensor')} the same{''.join(listed)}"])


def _spec_text(spec: dict[str, Any] | None) -> str:
    return _ABSENT if spec is None else f"{spec['dtype']} {shape_text(spec['shape'])}"


def _cut(text: str | None) -> str:
    return _ABSENT if text is None else text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
