"""Lists of tensors by name, and the shares of ranks, in memory and in files, that follow from the root index.

Every rank of a shard *holds* its boxes, and one of them *wrote* each. No file is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import TypeVar

from lightning_shardckpt.format.box import Box
from lightning_shardckpt.format.index import Component, RootIndex, TensorSpec
from lightning_shardckpt.format.layout import Part, parts_of_shard, replicas, shards_meeting
from lightning_shardckpt.format.plan import Overlap, plan_load
from lightning_shardckpt.format.value_checks import DTYPE_BYTES
from lightning_shardckpt.system.text import count_text, table


@dataclass(frozen=True, slots=True)
class Owned:
    """The share of a rank: the number of tensors of which it has elements, their boxes, and the boxes' bytes."""

    tensors: int = 0
    boxes: int = 0
    nbytes: int = 0

    def __add__(self, other: Owned) -> Owned:
        return Owned(self.tensors + other.tensors, self.boxes + other.boxes, self.nbytes + other.nbytes)


@dataclass(frozen=True, slots=True)
class OwnedBox:
    """A stored box, the rank that wrote it, and all ranks that hold it, ascending."""

    box: Box
    writer: int
    holders: Sequence[int]

    def as_overlap(self) -> Overlap:
        """Return the whole box as the overlap of a load."""
        return Overlap(self.writer, self.box, self.box, self.box)


def boxes_of(spec: TensorSpec, replica: int | None) -> Iterator[OwnedBox]:
    """Yield the stored boxes of a tensor.

    Args:
        spec: the tensor.
        replica: the replica that wrote it, from ``plan.choose_replicas``.
    """
    for part, holders in held_parts(spec):
        for overlap in plan_load(spec, replica, (Part(part.box, part.at),)):
            yield OwnedBox(overlap.stored, overlap.writer, holders)


def held_parts(spec: TensorSpec) -> Iterator[tuple[Part, Sequence[int]]]:
    """Yield the parts of every non-empty shard, each with its holders."""
    if not prod(spec.shape):
        return
    for shard in shards_meeting(spec.layout, spec.shape, Box.whole(spec.shape)):
        holders = replicas(spec.layout, spec.holders, shard)
        for part in parts_of_shard(spec.layout, spec.shape, shard):
            yield part, holders


def sum_held(tensors: Mapping[str, TensorSpec]) -> dict[int, Owned]:
    """Return the share that each rank holds; every replica counts."""
    total: dict[int, Owned] = {}
    for spec, count in Counter(tensors.values()).items():
        by_rank: dict[int, Owned] = {}
        for part, holders in held_parts(spec):
            for rank in holders:
                _add(by_rank, rank, part.box, spec)
        _merge(total, by_rank, count)
    return total


def sum_written(tensors: Mapping[str, TensorSpec], chosen: Mapping[str, int | None]) -> dict[int, Owned]:
    """Return the share that each rank wrote.

    Args:
        tensors: of one component.
        chosen: the replica that wrote each, from ``plan.choose_replicas``.
    """
    total: dict[int, Owned] = {}
    for (spec, replica), count in Counter((spec, chosen[key]) for key, spec in tensors.items()).items():
        by_rank: dict[int, Owned] = {}
        for one in boxes_of(spec, replica):
            _add(by_rank, one.writer, one.box, spec)
        _merge(total, by_rank, count)
    return total


def coordinates(root: RootIndex, rank: int) -> dict[str, int]:
    """Return a rank's coordinates by axis, outermost first; an empty dict if the topology does not fit the world.

    >>> coordinates(RootIndex("", 4, {}, {}, topology={"shard": 2, "tensor": 2}), 1)
    {'shard': 0, 'tensor': 1}
    """
    sizes = list(root.topology.values())
    if prod(sizes) != root.world_size:
        return {}
    return {axis: rank // prod(sizes[i + 1 :]) % size for i, (axis, size) in enumerate(root.topology.items())}


def _add(by_rank: dict[int, Owned], rank: int, box: Box, spec: TensorSpec) -> None:
    by_rank[rank] = by_rank.get(rank, Owned(tensors=1)) + Owned(0, 1, box.numel * DTYPE_BYTES[spec.dtype])


def _merge(total: dict[int, Owned], by_rank: Mapping[int, Owned], count: int) -> None:
    for rank, one in by_rank.items():
        total[rank] = total.get(rank, Owned()) + Owned(one.tensors * count, one.boxes * count, one.nbytes * count)


# ── lists ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


_Item = TypeVar("_Item")


def long_table(
    header: Sequence[str],
    items: Sequence[_Item],
    row: Callable[[_Item], Sequence[str]],
    *,
    limit: int | None,
    noun: str = "",
    hint: str = "--all lists them",
    right: Sequence[str] = ("size",),
) -> str:
    """Return a table of the first items, with a last line that counts the others and tells how to list them.

    >>> print(long_table(("file", "size"), range(3), lambda i: (f"f{i}", f"{i} B"), limit=1, noun="file"))
    file  size
    f0     0 B
    … and 2 more files: --all lists them

    Args:
        header: the names of the columns.
        items: one for each row.
        row: returns the cells of an item; called for listed items only.
        limit: the number of rows; None for all.
        noun: the name of an item, in the singular.
        hint: how to list the others.
        right: the columns that are aligned to the right.
    """
    text = table(header, [row(item) for item in items[:limit]], right)
    more = 0 if limit is None else max(len(items) - limit, 0)
    counted = count_text(more, f"more {noun}") if noun else f"{more:,} more"
    return f"{text}\n… and {counted}: {hint}" if more else text


def is_selected(names: Iterable[str], pattern: str | None) -> bool:
    """Return whether one of a tensor's names matches a pattern (``*``, ``?``, ``[…]``) or contains it as text.

    >>> is_selected(["a.weight"], "a.*"), is_selected(["a.weight"], "weigh"), is_selected(["a.weight"], "b.*")
    (True, True, False)
    """
    return pattern is None or any(fnmatchcase(name, pattern) or pattern in name for name in names)


def aliases_by_key(component: Component) -> dict[str, list[str]]:
    """Return the aliases of each tied tensor, by its stored name."""
    names: dict[str, list[str]] = {}
    for alias, key in component.aliases.items():
        names.setdefault(key, []).append(alias)
    return names
