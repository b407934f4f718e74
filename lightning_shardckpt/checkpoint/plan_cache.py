"""Reuse save plans while the set of tensors is unchanged, as it nearly always is from one save to the next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import prod
from typing import Generic, TypeVar

from lightning_shardckpt.format.index import ROOT_NAME, Component, RootIndex
from lightning_shardckpt.format.index_json import (
    COMPONENTS,
    TablesText,
    root_from_json,
    root_to_json,
    tables_to_text,
)
from lightning_shardckpt.format.plan import check_cover, plan_save
from lightning_shardckpt.format.safetensors_files import OutputFile, OutputTensor
from lightning_shardckpt.transfer.writer import FilePlan, plan_files

Tables = dict[str, Component]
"""The tensors of every component, and the names that share one; without files."""

K = TypeVar("K")
V = TypeVar("V")


class LastResult(Generic[K, V]):
    """The result for the last key, made again for another one."""

    def __init__(self) -> None:
        self._known: tuple[K, V] | None = None

    def of(self, key: K, make: Callable[[], V]) -> V:
        """Return the result of ``make``, or the last one if its key is equal.

        Neither result nor key may change afterwards.
        """
        if self._known is None or self._known[0] != key:
            self._known = key, make()
        return self._known[1]


@dataclass(frozen=True, slots=True)
class SavePlan:
    """The plan of what a rank writes for some tables, and what rank 0 says of them in the root index.

    ``elements`` are those of this rank and of all ranks.
    """

    tables: Tables = field(default_factory=dict)
    files: dict[str, list[FilePlan]] = field(default_factory=dict)
    elements: int = 0
    all_elements: int = 0
    text: TablesText | None = None


@dataclass(frozen=True, slots=True)
class PlanCache:
    """Results for the last save of somebody who saves again and again. Holds no tensors; for one thread at a time."""

    digest: LastResult[Tables, str] = field(default_factory=LastResult)
    plan: LastResult[tuple[Tables, int, int, float], SavePlan] = field(default_factory=LastResult)
    mirror: LastResult[tuple[list[OutputTensor], int], list[OutputFile]] = field(default_factory=LastResult)


def plan_rank(tables: Tables, rank: int, world: int, size_per_shard: float) -> SavePlan:
    """Return the plan of ``rank`` for tables that all ranks have agreed on.

    Raises:
        FormatError: on rank 0, if a loader would refuse what the root index will say of the tables.
    """
    files: dict[str, list[FilePlan]] = {}
    for component in filter(tables.__contains__, COMPONENTS):
        pieces = plan_save(tables[component].tensors, rank)
        files[component] = plan_files(component, rank, pieces, size_per_shard)
    here = sum(p.part.box.numel for planned in files.values() for file in planned for p in file.pieces)
    if rank != 0:
        return SavePlan(tables, files, here)
    for name, table in tables.items():
        check_cover(name, table.tensors)
    everywhere = sum(prod(spec.shape) for table in tables.values() for spec in table.tensors.values())
    text = tables_to_text(tables)
    _check(RootIndex("0" * 32, world, {n: replace(t, indexes={}) for n, t in tables.items()}, {}), text)
    return SavePlan(tables, files, here, everywhere, text)


def check_new_parts(root: RootIndex) -> None:
    """Make sure that a loader would not refuse what differs between two saves of the same tables.

    What it would refuse must not replace a good checkpoint.
    """
    _check(replace(root, components={n: Component({}, {}, c.indexes) for n, c in root.components.items()}))


def _check(root: RootIndex, text: TablesText | None = None) -> None:
    root_from_json(root_to_json(root, text), ROOT_NAME)
