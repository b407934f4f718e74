"""Reuse save plans as long as the set of tensors does not change between saves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import prod
from typing import Generic, TypeVar

from lightning_shardckpt.format.index import ROOT_NAME, Component, RootIndex
from lightning_shardckpt.format.index_json import COMPONENTS, TablesText, root_from_json, root_to_json, tables_to_text
from lightning_shardckpt.format.plan import check_cover, plan_save
from lightning_shardckpt.transfer.writer import FilePlan, plan_files

Tables = dict[str, Component]
"""The tensors and aliases of every component, without files."""

K = TypeVar("K")
V = TypeVar("V")


class LastResult(Generic[K, V]):
    """A cache of one result, for the last key."""

    def __init__(self) -> None:
        self._last: tuple[K, V] | None = None

    def get(self, key: K, make: Callable[[], V]) -> V:
        """Return the last result if its key is equal, otherwise the result of ``make``.

        Neither result nor key may change afterwards.
        """
        if self._last is None or self._last[0] != key:
            self._last = key, make()
        return self._last[1]


@dataclass(frozen=True, slots=True)
class SavePlan:
    """The files that a rank writes, and on rank 0 the tables' text in the root index.

    Attributes:
        tables: of all ranks.
        files: of this rank, by component.
        elements: the number of elements that this rank writes.
        all_elements: the number of elements of all tensors; on rank 0.
        text: the tables in the root index; on rank 0.
    """

    tables: Tables = field(default_factory=dict)
    files: dict[str, list[FilePlan]] = field(default_factory=dict)
    elements: int = 0
    all_elements: int = 0
    text: TablesText | None = None


@dataclass(frozen=True, slots=True)
class PlanCache:
    """Cached results of the last save of one caller. Holds no tensors; not for concurrent use."""

    digest: LastResult[Tables, str] = field(default_factory=LastResult)
    plan: LastResult[tuple[Tables, int, int, float], SavePlan] = field(default_factory=LastResult)


def plan_rank(tables: Tables, rank: int, world: int, size_per_shard: float) -> SavePlan:
    """Return the plan of ``rank`` for tables that all ranks have agreed on."""
    files: dict[str, list[FilePlan]] = {}
    for component in filter(tables.__contains__, COMPONENTS):
        pieces = plan_save(tables[component].tensors, rank)
        files[component] = plan_files(component, rank, pieces, size_per_shard)
    elements = sum(p.part.box.numel for planned in files.values() for file in planned for p in file.pieces)
    if rank != 0:
        return SavePlan(tables, files, elements)
    for name, table in tables.items():
        check_cover(name, table.tensors)
    all_elements = sum(prod(spec.shape) for table in tables.values() for spec in table.tensors.values())
    text = tables_to_text(tables)
    _check(RootIndex("0" * 32, world, {n: replace(t, indexes={}) for n, t in tables.items()}, {}), text)
    return SavePlan(tables, files, elements, all_elements, text)


def check_new_parts(root: RootIndex) -> None:
    """Check that a loader accepts the parts of a root index that differ between saves of the same tables.

    A root index that it refuses must not replace a good checkpoint.
    """
    _check(replace(root, components={n: Component({}, {}, c.indexes) for n, c in root.components.items()}))


def _check(root: RootIndex, text: TablesText | None = None) -> None:
    root_from_json(root_to_json(root, text), ROOT_NAME)
