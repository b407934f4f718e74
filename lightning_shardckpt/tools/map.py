"""A page that shows the slices of every tensor by rank: ``python -m lightning_shardckpt map PATH``.

Its content is computed from the root index, without torch. Names are data in the page, never markup, and the page
loads nothing else. Tensors of one dtype, shape and layout share a *kind*, and kinds share *drawings*. A drawing is a
grid: the edges of its cells along each dim, and for each cell in row-major order the number of its group of ranks.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from html import escape
from itertools import chain, product
from math import prod
from pathlib import Path
from typing import Any

from lightning_shardckpt.format.index import COMPONENTS, ROOT_NAME, TensorSpec
from lightning_shardckpt.format.layout import Box, Part, Shape, as_holders, parts_of_shard, replicas, shards_meeting
from lightning_shardckpt.format.plan import plan_load
from lightning_shardckpt.format.value_checks import DTYPE_BYTES
from lightning_shardckpt.sources.open_source import open_checkpoint
from lightning_shardckpt.tools.inspect import aliases_by_key, cuts_of, cuts_text
from lightning_shardckpt.transfer.reader import Checkpoint

_TEMPLATE = Path(__file__).with_name("map.html")


def write_map(
    path: str | os.PathLike[str], output: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
) -> Path:
    """Write a page about a checkpoint and return its path; an existing file is replaced.

    Args:
        path: the checkpoint.
        output: the page; may not be inside a checkpoint.
        storage_options: for URLs, see ``ShardCkptIO``.
    """
    target = Path(output)
    if (target.absolute().parent / ROOT_NAME).exists():
        raise ValueError(f"{os.fspath(output)!r} lies inside a checkpoint: write the page somewhere else")
    with open_checkpoint(path, storage_options=storage_options) as checkpoint:
        content = _describe(checkpoint)
    data = json.dumps(content, separators=(",", ":"))  # ASCII; only its strings can have these:
    for char in "<>&":
        data = data.replace(char, f"\\u{ord(char):04x}")
    title = escape(content["name"]).encode("ascii", "xmlcharrefreplace").decode()
    page = _TEMPLATE.read_text(encoding="utf-8").replace("<!--title-->", title, 1).replace("<!--data-->", data, 1)
    target.write_text(page, encoding="utf-8")
    return target


def _describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the content of the page, as values that JSON can hold."""
    root, kinds, drawings, groups = checkpoint.root, dict[str, int](), dict[str, int](), dict[str, int]()

    def number(table: dict[str, int], value: Any) -> int:
        return table.setdefault(json.dumps(value), len(table))

    def draw(spec: TensorSpec, boxes: Iterable[tuple[Box, Sequence[int]]]) -> tuple[int, Counter[int]]:
        """Return the number of a drawing of boxes with their ranks, and the bytes of each rank."""
        nbytes, group_of, shape = Counter[int](), dict[Box, int](), spec.shape
        for box, ranks in boxes:
            group_of[box] = number(groups, [*chain.from_iterable(as_holders(list(ranks)))])
            nbytes.update(dict.fromkeys(ranks, box.numel * DTYPE_BYTES[spec.dtype]))
        return number(drawings, _grid(shape, group_of)), nbytes

    @cache
    def add(spec: TensorSpec, replica: int | None) -> tuple[int, int, Counter[int], Counter[int]]:
        """Return the numbers of a kind and of the drawing as written, and the bytes that ranks held and wrote."""
        whole = Box.whole(spec.shape)
        held, held_bytes = draw(spec, _held(spec))
        stored = plan_load(spec, replica, (Part(whole, whole.start),))
        written, written_bytes = draw(spec, ((one.stored, [one.writer]) for one in stored))
        return number(kinds, {**_describe_kind(spec), "held": held}), written, held_bytes, written_bytes

    components = []
    for name in (name for name in COMPONENTS if name in root.components):
        component, chosen, rows = root.components[name], checkpoint.replicas(name), list[Any]()
        aliases, totals = aliases_by_key(component), (Counter[int](), Counter[int]())
        for key, spec in component.tensors.items():
            kind, written, *counts = add(spec, chosen[key])
            rows.append([key, kind, written, *aliases.get(key, ())])
            for total, count in zip(totals, counts, strict=True):
                total.update(count)
        held, wrote = ([total[rank] for rank in range(root.world_size)] for total in totals)
        components.append({"name": name, "tensors": rows, "held": held, "written": wrote})
    mesh = [(axis, size) for axis, size in root.topology.items() if size > 1]
    return {
        "name": Path(checkpoint.path).name or checkpoint.path,
        "path": str(checkpoint.path),
        "step": root.step,
        "epoch": root.epoch,
        "world": root.world_size,
        "mesh": mesh if mesh and prod(size for _, size in mesh) == root.world_size else [("rank", root.world_size)],
        "software": [f"{name} {version}" for name, version in root.software.items()],
        "components": components,
        **{name: [*map(json.loads, table)] for name, table in (("kinds", kinds), ("drawings", drawings))},
        "groups": [*map(json.loads, groups)],
    }


def _grid(shape: Shape, group_of: Mapping[Box, int]) -> list[list[int]]:
    """Return the edges of a drawing along each dim, and the group of each cell, -1 outside of all boxes."""
    ends = [(0,) * len(shape), shape, *(end for box in group_of for end in (box.start, box.stop))]
    edges = [sorted(set(along)) for along in zip(*ends, strict=True)]
    places = [{edge: i for i, edge in enumerate(along)} for along in edges]
    cells = dict.fromkeys(product(*(range(len(along) - 1) for along in edges)), -1)
    for box, group in group_of.items():
        spans = [range(at[a], at[b]) for at, a, b in zip(places, box.start, box.stop, strict=True)]
        cells.update(dict.fromkeys(product(*spans), group))
    return [*edges, [*cells.values()]]


def _held(spec: TensorSpec) -> Iterator[tuple[Box, Sequence[int]]]:
    """Yield the boxes of every non-empty shard, each with the ranks that hold it."""
    if prod(spec.shape):
        for shard in shards_meeting(spec.layout, spec.shape, Box.whole(spec.shape)):
            holders = replicas(spec.layout, spec.holders, shard)
            yield from ((part.box, holders) for part in parts_of_shard(spec.layout, spec.shape, shard))


def _describe_kind(spec: TensorSpec) -> dict[str, Any]:
    """Return the description of all tensors of one dtype, shape and layout; ``down`` is the dim drawn downwards."""
    cut = {cut.dim for cut in spec.layout.cuts if spec.layout.axes[cut.axis].size > 1}
    all_but_last = range(len(spec.shape) - 1)
    down = next((dim for dim in all_but_last if dim in cut), 0 if all_but_last else -1)
    about = {"dtype": spec.dtype, "shape": spec.shape, "bytes": DTYPE_BYTES[spec.dtype]}
    return {**about, "how": cuts_text(cuts_of(spec.layout)), "down": down}
