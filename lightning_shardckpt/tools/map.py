"""A page that shows the slices of every tensor by rank: ``python -m lightning_shardckpt map PATH``.

Its content is computed here from the root index, without torch. The script of the page lays out, colors, searches and
sorts. Names are data in the page, never markup, and the page loads nothing else.

To keep the page small, tensors of one dtype, shape and layout share a *kind*, and kinds share *drawings*. A drawing is
a grid: the edges of its cells along each dim, and for each cell in row-major order the number of its group of ranks.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from itertools import chain, product
from math import prod
from pathlib import Path
from typing import Any, TypeVar

from lightning_shardckpt.format.index import COMPONENTS, ROOT_NAME, TensorSpec
from lightning_shardckpt.format.layout import (
    Box,
    Layout,
    Part,
    Shape,
    as_holders,
    parts_of_shard,
    replicas,
    shards_meeting,
)
from lightning_shardckpt.format.plan import plan_load
from lightning_shardckpt.format.value_checks import DTYPE_BYTES
from lightning_shardckpt.sources.open_source import open_checkpoint
from lightning_shardckpt.tools.inspect import aliases_by_key
from lightning_shardckpt.transfer.reader import Checkpoint

_T = TypeVar("_T")
_TEMPLATE = Path(__file__).with_name("map.html")


def write_map(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> Path:
    """Write a page about a checkpoint and return its path; an existing file is replaced.

    Args:
        path: the checkpoint.
        output: the page; may not be inside a checkpoint.
        storage_options: for URLs, see ``ShardCkptIO``.

    Returns:
        The path of the page.

    Raises:
        CheckpointNotFoundError: if there is no checkpoint; describes the content of the path.
        ValueError: if the page would be inside a checkpoint.
    """
    target = Path(output)
    if (target.absolute().parent / ROOT_NAME).exists():
        raise ValueError(f"{os.fspath(output)!r} lies inside a checkpoint: write the page somewhere else")
    with open_checkpoint(path, storage_options=storage_options) as checkpoint:
        content = _describe(checkpoint)
    target.write_text(_fill_template(content), encoding="utf-8")
    return target


def _fill_template(content: Mapping[str, Any]) -> str:
    data = json.dumps(content, separators=(",", ":"))  # ASCII; only its strings can have these:
    for char in "<>&":
        data = data.replace(char, f"\\u{ord(char):04x}")
    title = escape(content["name"]).encode("ascii", "xmlcharrefreplace").decode()
    return _TEMPLATE.read_text(encoding="utf-8").replace("<!--title-->", title, 1).replace("<!--data-->", data, 1)


@dataclass(frozen=True, slots=True)
class _Tables:
    """Distinct values of the page by number."""

    kinds: dict[TensorSpec, int] = field(default_factory=dict)
    drawings: dict[tuple[int, ...], int] = field(default_factory=dict)
    lists: dict[tuple[int, ...], int] = field(default_factory=dict)
    groups: dict[tuple[int, ...], int] = field(default_factory=dict)
    described: list[dict[str, Any]] = field(default_factory=list)  # by number of the kind
    elements: dict[int, Counter[int]] = field(default_factory=dict)  # of each rank, by number of the drawing
    known: dict[tuple[TensorSpec, int | None], tuple[int, int]] = field(default_factory=dict)

    def add_tensor(self, spec: TensorSpec, replica: int | None) -> tuple[int, int]:
        """Return the numbers of a tensor's kind and of its drawing as written."""
        if (spec, replica) not in self.known:
            kind = _number(self.kinds, replace(spec, pinned=False))
            if kind == len(self.described):
                held = self._add_drawing(spec.shape, ((part.box, ranks) for part, ranks in _held_parts(spec)))
                self.described.append({**_describe_kind(spec), "held": held})
            whole = Box.whole(spec.shape)
            stored = plan_load(spec, replica, (Part(whole, whole.start),))
            written = self._add_drawing(spec.shape, ((one.stored, [one.writer]) for one in stored))
            self.known[spec, replica] = kind, written
        return self.known[spec, replica]

    def _add_drawing(self, shape: Shape, boxes: Iterable[tuple[Box, Sequence[int]]]) -> int:
        """Return the number of a drawing of boxes with their ranks; cells outside of all boxes have group -1."""
        elements, group_of = Counter[int](), dict[Box, int]()
        for box, ranks in boxes:
            group_of[box] = _number(self.groups, tuple(chain.from_iterable(as_holders(list(ranks)))))
            elements.update(dict.fromkeys(ranks, box.numel))
        ends = [(0,) * len(shape), shape, *(end for box in group_of for end in (box.start, box.stop))]
        edges = [sorted(set(along)) for along in zip(*ends, strict=True)]
        places = [{edge: i for i, edge in enumerate(along)} for along in edges]
        cells = dict.fromkeys(product(*(range(len(along) - 1) for along in edges)), -1)
        for box, group in group_of.items():
            spans = [range(at[a], at[b]) for at, a, b in zip(places, box.start, box.stop, strict=True)]
            cells.update(dict.fromkeys(product(*spans), group))
        drawing = tuple(_number(self.lists, tuple(numbers)) for numbers in (*edges, cells.values()))
        self.elements[_number(self.drawings, drawing)] = elements
        return self.drawings[drawing]


def _held_parts(spec: TensorSpec) -> Iterator[tuple[Part, Sequence[int]]]:
    """Yield the parts of every non-empty shard, each with its holders."""
    if not prod(spec.shape):
        return
    for shard in shards_meeting(spec.layout, spec.shape, Box.whole(spec.shape)):
        holders = replicas(spec.layout, spec.holders, shard)
        for part in parts_of_shard(spec.layout, spec.shape, shard):
            yield part, holders


def _number(table: dict[_T, int], value: _T) -> int:
    return table.setdefault(value, len(table))


def _describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the content of the page, as values that JSON can hold."""
    root, tables = checkpoint.root, _Tables()
    mesh = [(axis, size) for axis, size in root.topology.items() if size > 1]
    names = [name for name in COMPONENTS if name in root.components]
    return {
        "name": Path(checkpoint.path).name or checkpoint.path,
        "path": str(checkpoint.path),
        "step": root.step,
        "epoch": root.epoch,
        "world": root.world_size,
        "mesh": mesh if mesh and prod(size for _, size in mesh) == root.world_size else [("rank", root.world_size)],
        "software": [f"{name} {version}" for name, version in root.software.items()],
        "components": [_describe_component(checkpoint, name, tables) for name in names],
        "kinds": tables.described,
        "drawings": list(tables.drawings),
        "lists": list(tables.lists),
        "groups": list(tables.groups),
    }


def _describe_component(checkpoint: Checkpoint, name: str, tables: _Tables) -> dict[str, Any]:
    """Return a component's bytes by rank; per tensor its name, the numbers of its kind and drawing, and aliases."""
    component = checkpoint.root.components[name]
    specs, chosen, aliases = component.tensors, checkpoint.replicas(name), aliases_by_key(component)
    rows = [[key, *tables.add_tensor(spec, chosen[key]), *aliases.get(key, ())] for key, spec in specs.items()]
    held, written = Counter[int](), Counter[int]()
    for (number, drawing), count in Counter((row[1], row[2]) for row in rows).items():
        kind = tables.described[number]
        for total, elements in (held, tables.elements[kind["held"]]), (written, tables.elements[drawing]):
            total.update({rank: n * kind["bytes"] * count for rank, n in elements.items()})
    ranks = range(checkpoint.root.world_size)
    return {"name": name, "tensors": rows, "held": [held[r] for r in ranks], "written": [written[r] for r in ranks]}


def _describe_kind(spec: TensorSpec) -> dict[str, Any]:
    """Return the description of all tensors of one dtype, shape and layout; ``down`` is the dim drawn downwards."""
    cut = {cut.dim for cut in spec.layout.cuts if spec.layout.axes[cut.axis].size > 1}
    all_but_last = range(len(spec.shape) - 1)
    down = next((dim for dim in all_but_last if dim in cut), 0 if all_but_last else -1)
    about = {"dtype": spec.dtype, "shape": spec.shape, "bytes": DTYPE_BYTES[spec.dtype]}
    return {**about, "how": _layout_text(spec.layout), "down": down}


def _layout_text(layout: Layout) -> str:
    by_dim: dict[int, str] = {}
    for cut in layout.cuts:
        axis = layout.axes[cut.axis]
        if axis.size > 1:
            blocks = f" in {cut.blocks} blocks" if cut.blocks > 1 else ""
            by_dim[cut.dim] = by_dim.get(cut.dim, f"dim {cut.dim}") + f" ÷ {axis.name} {axis.size}{blocks}"
    return ", ".join(by_dim.values()) or "whole"
