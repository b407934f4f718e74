"""Stored state of any format as one frozen value, and the source of this package's checkpoints. No torch.

Every source describes its tensors by the same specs, so that comparing and planning do not depend on the format;
``open_source`` detects it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeAlias

from lightning_shardckpt.errors import StateError
from lightning_shardckpt.format.box import Box, Shape
from lightning_shardckpt.format.index import Component, RootIndex, TensorSpec
from lightning_shardckpt.format.layout import Part
from lightning_shardckpt.format.plan import ByteRuns, Overlap, byte_runs, plan_load
from lightning_shardckpt.format.value_checks import DTYPE_BYTES
from lightning_shardckpt.state.documents import document_of
from lightning_shardckpt.storage.protocol import Reader
from lightning_shardckpt.transfer.reader import Checkpoint
from lightning_shardckpt.transfer.shard_reader import Request


class StoredTensor(Protocol):
    """A stored tensor: a layout and indexes (``IndexedTensor``), or listed boxes (``ListedTensor``). Immutable."""

    @property
    def component(self) -> str:
        """Its component in the checkpoint."""

    @property
    def key(self) -> str:
        """Its key in the checkpoint."""

    @property
    def spec(self) -> TensorSpec:
        """Its dtype and shape."""

    def check(self) -> None:
        """Raise a ShardCkptError if it cannot be read, or no files of its size exist."""

    def requests(self, parts: tuple[Part, ...], shape: Shape, memory: memoryview) -> list[Request]:
        """Return the requests that fill ``memory``, an array of ``shape`` with the regions ``parts``."""


Tables: TypeAlias = Mapping[str, Mapping[str, StoredTensor]]
Aliases: TypeAlias = Mapping[str, Mapping[str, str]]
Stored: TypeAlias = Callable[[str], Any]
"""Returns a tensor of the component trainer by key, or what takes its place."""


@dataclass(frozen=True, eq=False)
class Source:
    """Stored state of any format, on one rank.

    Attributes:
        path: of the checkpoint.
        reader: of its files.
        table: stored tensors by component and name.
        aliases: further names of tensors, by component.
        documents: returns the JSON of a role of ``Snapshot.documents`` for a rank; None if there is none.
        trainer: returns the trainer's state.
        verify: whether reads compare checksums.
        root: the root index of a checkpoint of this package.
        all_modules: returns the source with all modules, if this one has one of several.
        original: the source with the stored names; None if it is this one.
    """

    path: str
    reader: Reader
    table: Tables
    aliases: Aliases
    documents: Callable[[str, int], Any]
    trainer: Callable[[Stored], dict[str, Any]]
    verify: bool = False
    root: RootIndex | None = None
    all_modules: Callable[[], Source] | None = None
    original: Source | None = None

    @cached_property
    def _components(self) -> dict[str, Component]:
        return {
            name: Component({key: stored.spec for key, stored in table.items()}, dict(self.aliases.get(name, {})))
            for name, table in self.table.items()
        }

    def components(self) -> Mapping[str, Component]:
        """Return the tensors by component."""
        return self._components

    def document(self, role: str, rank: int = 0) -> Any:
        """Return the JSON of a role; None if there is none."""
        return self.documents(role, rank)

    def close(self) -> None:
        """Close the files."""
        self.reader.close()

    def spec(self, component: str, key: str) -> TensorSpec:
        """Return the dtype and shape of a tensor."""
        return self.table[component][key].spec

    def requests(
        self, component: str, key: str, parts: tuple[Part, ...], shape: Shape, memory: memoryview
    ) -> list[Request]:
        """Return the requests that fill ``memory``, an array of ``shape`` with the regions ``parts``, from a tensor."""
        return self.table[component][key].requests(parts, shape, memory)

    def with_names(self, table: Tables, aliases: Aliases, documents: Mapping[str, Any]) -> Source:
        """Return the source with other tables, aliases and documents in place of its own, by component and role."""

        def document(role: str, rank: int) -> Any:
            return documents[role] if role in documents else self.documents(role, rank)

        kept = {name: of for name, of in self.aliases.items() if name not in table}
        table, aliases = {**self.table, **table}, {**kept, **aliases}
        return replace(self, table=table, aliases=aliases, documents=document, original=self.original or self)

    def checked_shape(self, component: str, key: str) -> tuple[int, ...]:
        """Return the shape of a stored tensor after checking that files of its size exist.

        Raises:
            ShardCkptError: if an index lacks one of its boxes, or a file is not the saved one.
        """
        stored = self.table[component][key]
        stored.check()
        return stored.spec.shape


# ── checkpoints of this package ───────────────────────────────────────────────────────────────────────────────────────


def sharded_source(
    checkpoint: Checkpoint, verify: bool = True, *, weights_only: bool = True, for_export: bool = False
) -> Source:
    """Return a checkpoint directory of this package as a source.

    Args:
        checkpoint: the open checkpoint, which the source closes.
        verify: whether reads compare checksums.
        weights_only: refuse pickled objects in the trainer's state.
        for_export: keep pickled objects and configurations of the trainer's state as they are stored.
    """
    plans, components = dict[tuple[Any, ...], _Plan](), checkpoint.root.components
    table = {
        component: {key: IndexedTensor(checkpoint, plans, component, key, spec) for key, spec in of.tensors.items()}
        for component, of in components.items()
    }

    def document(role: str, rank: int) -> Any:
        return document_of(checkpoint, role, rank)

    def trainer(stored: Stored) -> dict[str, Any]:
        from lightning_shardckpt.state.json_tree import decode  # imports torch, which tools that move bytes don't need

        content = document("trainer", 0) or {}
        state: dict[str, Any] = decode(content, stored, unpickles=not weights_only, makes_configs=not for_export)
        if not for_export:
            _refuse_pickled(checkpoint.path, state)
        return state

    aliases, reader, root = {name: of.aliases for name, of in components.items()}, checkpoint.reader, checkpoint.root
    return Source(checkpoint.path, reader, table, aliases, document, trainer, verify, root)


def _refuse_pickled(path: str, state: Mapping[str, Any]) -> None:
    """Raise a StateError for pickled objects in trainer state, outside of hyper-parameters."""
    from lightning_shardckpt.state.json_tree import Pickled, lost_values
    from lightning_shardckpt.state.trainer import HYPER_PARAMETERS

    lost = lost_values({key: value for key, value in state.items() if key not in HYPER_PARAMETERS})
    pickled = [f"{place}  {value.type_name}" for place, value in lost.items() if isinstance(value, Pickled)]
    if pickled:
        listed = "\n  ".join(pickled)
        raise StateError(
            f"checkpoint {path!r} has pickled objects, which are not read: they could execute any code.\n"
            f"  {listed}\nIf you trust its author, load it with weights_only=False, an argument of fit, validate, "
            "test, predict and load."
        )


_MAX_CACHED_PLANS = 4096  # an export has one for each window


_Plan: TypeAlias = list[tuple[Overlap, ByteRuns]]


class IndexedTensor(NamedTuple):
    """A tensor of a checkpoint of this package; implements ``StoredTensor``. ``plans`` are those of all tensors."""

    checkpoint: Checkpoint
    plans: dict[tuple[Any, ...], _Plan]
    component: str
    key: str
    spec: TensorSpec

    def check(self) -> None:
        """Raise a ShardCkptError if an index lacks one of the tensor's boxes, or a file is not the saved one."""
        whole = Box.whole(self.spec.shape)
        replica = self.checkpoint.replicas(self.component)[self.key]
        for overlap in plan_load(self.spec, replica, (Part(whole, whole.start),)):
            file = self.checkpoint.entry(self.component, self.key, overlap).file
            self.checkpoint.check_file(self.component, overlap.writer, file)

    def requests(self, parts: tuple[Part, ...], shape: Shape, memory: memoryview) -> list[Request]:
        """Return the requests that fill ``memory``, an array of ``shape`` with the regions ``parts``."""
        checkpoint, plans, component, key, spec = self
        replica = checkpoint.replicas(component)[key]
        kind = id(spec), replica, parts, shape  # equal tensors share one spec object
        if (plan := plans.get(kind)) is None:
            plan = []
            for overlap in plan_load(spec, replica, parts):
                entry = checkpoint.entry(component, key, overlap)  # most boxes of a hostile layout do not exist
                overlap = replace(overlap, stored=entry.box)  # which other tensors share, so that it is found faster
                plan.append((overlap, byte_runs(overlap, shape, DTYPE_BYTES[spec.dtype])))
            if len(plans) < _MAX_CACHED_PLANS:
                plans[kind] = plan
        requests = []
        for overlap, runs in plan:
            entry = checkpoint.entry(component, key, overlap)
            checkpoint.check_file(component, overlap.writer, entry.file)
            requests.append(Request(key, overlap.writer, entry, runs, memory))
        return requests
