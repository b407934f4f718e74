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
from lightning_shardckpt.format.index import Component, TensorSpec
from lightning_shardckpt.format.layout import Part
from lightning_shardckpt.format.plan import ByteRuns, Overlap, byte_runs, plan_load
from lightning_shardckpt.format.value_checks import DTYPE_BYTES
from lightning_shardckpt.state.documents import document_of
from lightning_shardckpt.transfer.reader import Checkpoint
from lightning_shardckpt.transfer.shard_reader import Request, StoredTensors


class TensorFiles(StoredTensors, Protocol):
    """Tensors in files: described by layouts and indexes (``IndexedTensors``), or by listed boxes (``ForeignTensors``).

    Attributes:
        verify: whether reads compare checksums.
    """

    verify: bool

    def check(self, component: str, key: str) -> None:
        """Raise a ShardCkptError if a tensor cannot be read, or no files of its size exist."""


class StoredTensor(NamedTuple):
    """A stored tensor: its files, its component and key there, and its dtype and shape."""

    files: TensorFiles
    component: str
    key: str
    spec: TensorSpec


Tables: TypeAlias = Mapping[str, Mapping[str, StoredTensor]]
Aliases: TypeAlias = Mapping[str, Mapping[str, str]]
Stored: TypeAlias = Callable[[str], Any]
"""Returns a tensor of the component trainer by key, or what takes its place."""


@dataclass(frozen=True, eq=False)
class Source:
    """Stored state of any format, on one rank.

    Attributes:
        path: of the checkpoint.
        tensors: the tensors as bytes in files, for copies of whole tensors.
        table: stored tensors by component and name.
        aliases: further names of tensors, by component.
        documents: returns the JSON of a role of ``Snapshot.documents`` for a rank; None if there is none.
        trainer: returns the trainer's state.
        is_own: whether it is a checkpoint of this package.
        all_modules: returns the source with all modules, if this one has one of several.
        original: the source with the stored names; None if it is this one.
    """

    path: str
    tensors: TensorFiles
    table: Tables
    aliases: Aliases
    documents: Callable[[str, int], Any]
    trainer: Callable[[Stored], dict[str, Any]]
    is_own: bool = False
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
        self.tensors.reader.close()

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
        stored.files.check(stored.component, stored.key)
        return stored.spec.shape


def tables_of(files: TensorFiles, components: Mapping[str, Component]) -> tuple[Tables, Aliases]:
    """Return the tables and the aliases of a source that has all tensors of its files under their stored names."""
    table = {n: {k: StoredTensor(files, n, k, s) for k, s in c.tensors.items()} for n, c in components.items()}
    return table, {name: component.aliases for name, component in components.items()}


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
    files = IndexedTensors(checkpoint, verify)

    def document(role: str, rank: int) -> Any:
        return document_of(checkpoint, role, rank)

    def trainer(stored: Stored) -> dict[str, Any]:
        from lightning_shardckpt.state.json_tree import decode  # imports torch, which tools that move bytes don't need

        content = document("trainer", 0) or {}
        state: dict[str, Any] = decode(content, stored, unpickles=not weights_only, makes_configs=not for_export)
        if not for_export:
            _refuse_pickled(checkpoint.path, state)
        return state

    return Source(checkpoint.path, files, *tables_of(files, checkpoint.root.components), document, trainer, is_own=True)


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


class IndexedTensors:
    """The tensors of a checkpoint of this package; implements ``TensorFiles``."""

    def __init__(self, checkpoint: Checkpoint, verify: bool = True) -> None:
        self.checkpoint, self.path, self.reader = checkpoint, checkpoint.path, checkpoint.reader
        self.verify = verify
        self._plans: dict[tuple[Any, ...], list[tuple[Overlap, ByteRuns]]] = {}

    def spec(self, component: str, key: str) -> TensorSpec:
        """Return the spec of a tensor."""
        return self.checkpoint.root.components[component].tensors[key]

    def check(self, component: str, key: str) -> None:
        """Raise a ShardCkptError if an index lacks one of a tensor's boxes, or a file is not the saved one."""
        spec = self.spec(component, key)
        whole = Box.whole(spec.shape)
        for overlap in plan_load(spec, self.checkpoint.replicas(component)[key], (Part(whole, whole.start),)):
            file = self.checkpoint.entry(component, key, overlap).file
            self.checkpoint.check_file(component, overlap.writer, file)

    def requests(
        self, component: str, key: str, parts: tuple[Part, ...], shape: Shape, memory: memoryview
    ) -> list[Request]:
        """Return the requests that fill ``memory``, an array of ``shape`` with the regions ``parts``, from a tensor."""
        checkpoint = self.checkpoint
        spec, replica = self.spec(component, key), checkpoint.replicas(component)[key]
        kind = id(spec), replica, parts, shape  # equal tensors share one spec object
        if (plan := self._plans.get(kind)) is None:
            plan = []
            for overlap in plan_load(spec, replica, parts):
                checkpoint.entry(component, key, overlap)  # at once, since most boxes of a hostile layout do not exist
                plan.append((overlap, byte_runs(overlap, shape, DTYPE_BYTES[spec.dtype])))
            if len(self._plans) < _MAX_CACHED_PLANS:
                self._plans[kind] = plan
        requests = []
        for overlap, runs in plan:
            entry = checkpoint.entry(component, key, overlap)
            checkpoint.check_file(component, overlap.writer, entry.file)
            requests.append(Request(key, overlap.writer, entry, runs, memory))
        return requests
