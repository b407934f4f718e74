"""Stored state of any format as one frozen value: the sources of this package's checkpoints and of other programs'.

Every source describes its tensors by the same specs, so that comparing and planning do not depend on the format;
``open_source`` detects it. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, NamedTuple, TypeAlias, TypeVar

from lightning_shardckpt.errors import CorruptionError, FormatError, StateError
from lightning_shardckpt.format.index import Component, RootIndex, ShardEntry, TensorSpec
from lightning_shardckpt.format.layout import REPLICATED, Box, Part, Shape, find_cover_error
from lightning_shardckpt.format.plan import ByteRuns, Overlap, byte_runs, plan_load
from lightning_shardckpt.format.value_checks import DTYPE_BYTES, bytes_in
from lightning_shardckpt.state.documents import FROZEN, StoredOptimizer, document_of
from lightning_shardckpt.state.state_dicts import VERSION, add_versions
from lightning_shardckpt.storage.protocol import Reader
from lightning_shardckpt.transfer.reader import Checkpoint
from lightning_shardckpt.transfer.shard_reader import Request

StoredTensor: TypeAlias = "IndexedTensor | ListedTensor"
"""A stored tensor: a layout and indexes, or listed boxes. Both tell their component, key and spec."""
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

    def has_weights_only(self) -> bool:
        """Return whether this has only weights from another program, whose names may differ from the model's.

        Checkpoints of Lightning and of this package have the model's names, and so have those with optimizer state.
        """
        stored = self.original or self
        if stored.root is not None or stored.document("optimizer") is not None:
            return False
        return "model" in stored.components() and VERSION not in stored.trainer(lambda key: None)

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

    aliases = {name: of.aliases for name, of in components.items()}
    return Source(checkpoint.path, checkpoint.reader, table, aliases, document, trainer, verify, checkpoint.root)


def _refuse_pickled(path: str, state: Mapping[str, Any]) -> None:
    """Raise a StateError for pickled objects in trainer state, outside of hyper-parameters."""
    from lightning_shardckpt.state.json_tree import Pickled, lost_values
    from lightning_shardckpt.state.trainer import HYPER_PARAMETERS

    lost = lost_values({key: value for key, value in state.items() if key not in HYPER_PARAMETERS})
    if pickled := [f"{place}  {value.type_name}" for place, value in lost.items() if isinstance(value, Pickled)]:
        listed = "\n  ".join(pickled)
        raise StateError(
            f"checkpoint {path!r} has pickled objects, which could execute any code:\n  {listed}\n"
            "If you trust its author, load it with weights_only=False"
        )


_MAX_CACHED_PLANS = 4096  # an export has one for each window


_Plan: TypeAlias = list[tuple[Overlap, ByteRuns]]


class IndexedTensor(NamedTuple):
    """A tensor of a checkpoint of this package. Immutable; ``plans`` are those of all tensors."""

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


# ── other programs' checkpoints ───────────────────────────────────────────────────────────────────────────────────────
# Boxes of bytes in files tile each tensor. A tensor in a safetensors file is one box, a tensor of torch's distributed
# checkpoint has a box for each chunk, and a tensor joined from several stored tensors a box for each of these. Such
# files have no checksums to compare.


_STEP_BYTES = 1 << 20  # the block size of boxes without checksums


class ForeignBox(NamedTuple):
    """A region of a tensor, and the offset of its bytes in a file: row-major and contiguous."""

    box: Box
    file: str
    begin: int


@dataclass(frozen=True, slots=True)
class ForeignTensor:
    """A tensor of another format; its dtype is named as in safetensors."""

    dtype: str
    shape: Shape
    boxes: tuple[ForeignBox, ...]


class ListedTensor(NamedTuple):
    """A tensor of another format. Immutable."""

    component: str
    key: str
    located: ForeignTensor
    spec: TensorSpec

    def check(self) -> None:
        """Do nothing: the sizes of the files have been checked."""

    def requests(self, parts: tuple[Part, ...], shape: Shape, memory: memoryview) -> list[Request]:
        """Return the requests that fill ``memory``, an array of ``shape`` with the regions ``parts``."""
        tensor, requests, size = self.located, list[Request](), DTYPE_BYTES[self.located.dtype]
        for box, file, begin in tensor.boxes:
            for part in parts:
                common = box.intersect(part.box)
                if common is not None and common.numel:
                    runs = byte_runs(Overlap(0, box, common, common.within(part.box).shift(part.at)), shape, size)
                    nbytes = box.numel * size
                    entry = ShardEntry(box, tensor.shape, tensor.dtype, file, begin, _STEP_BYTES, nbytes, "")
                    requests.append(Request(self.key, 0, entry, runs, memory))
        return requests


def list_tensors(
    path: str, reader: Reader, component: str, tensors: Mapping[str, ForeignTensor]
) -> dict[str, StoredTensor]:
    """Return stored tensors by key, after checking their boxes; ``path`` is of the checkpoint.

    Raises:
        FormatError: if the boxes of a tensor do not tile it.
        CorruptionError: if a file is too short for a box, or missing.
    """

    @cache
    def size(file: str) -> int:
        try:
            return reader.size(file)
        except FileNotFoundError:
            raise CorruptionError(f"{path!r}, file {file}: the file is missing") from None

    listed: dict[str, StoredTensor] = {}
    for key, tensor in tensors.items():
        problem = find_cover_error(tensor.shape, (box for box, _, _ in tensor.boxes))
        if problem is not None:
            raise FormatError(f"{path!r}: {key!r}, {tensor.dtype} {tensor.shape}: {problem}")
        for box, file, begin in tensor.boxes:
            end = begin + bytes_in(box.shape, tensor.dtype)
            if not 0 <= begin <= end <= size(file):
                where = f"{path!r}, file {file}"
                raise CorruptionError(f"{where}: {key!r} should be at bytes {begin} to {end} of {size(file)}")
        spec = TensorSpec(tensor.dtype, tensor.shape, REPLICATED, ((0, 1),))
        listed[key] = ListedTensor(component, key, tensor, spec)
    return listed


_R = TypeVar("_R", bound=Reader)


@contextmanager
def close_on_error(reader: _R) -> Iterator[_R]:
    """Close a reader if the block fails."""
    try:
        yield reader
    except BaseException:
        reader.close()
        raise


def foreign_source(
    path: str,
    reader: Reader,
    tensors: Mapping[str, Mapping[str, ForeignTensor]],
    aliases: Mapping[str, Mapping[str, str]] | None = None,
    documents: Mapping[str, Any] | None = None,
    rest: dict[str, Any] | None = None,
    all_modules: Callable[[], Source] | None = None,
) -> Source:
    """Return a checkpoint of another format as a source; it raises like ``list_tensors``.

    Args:
        path: of the checkpoint.
        reader: of its files.
        tensors: by component ("model", "optimizer", "trainer") and key, as in a checkpoint of this package; optimizer
            state as ``<n>/<FQN>/<state>``.
        aliases: further names of tensors, by component.
        documents: of "model" and "optimizer", from ``model_leaves`` and ``optimizer_leaves``.
        rest: Lightning's checkpoint dict without ``state_dict`` and ``optimizer_states``.
        all_modules: see ``Source``.
    """
    return Source(
        path=path,
        reader=reader,
        table={component: list_tensors(path, reader, component, of) for component, of in tensors.items()},
        aliases=aliases or {},
        documents=lambda role, rank: (documents or {}).get(role),
        trainer=lambda stored: dict(rest or {}),
        all_modules=all_modules,
    )


# ── Lightning's dict ──────────────────────────────────────────────────────────────────────────────────────────────────


def assemble(
    source: Source,
    tensor: Callable[[str, str], Any],
    decode: Callable[[Any], Any],
    *,
    optimizers: bool = True,
) -> dict[str, Any]:
    """Return Lightning's checkpoint dict with whole tensors.

    Args:
        source: the stored state.
        tensor: returns the tensor of a component and key; called once for each.
        decode: decodes the result of ``encode_small``.
        optimizers: whether to include the optimizers.
    """
    components = source.components()
    tensor = cache(tensor)  # a hostile document may refer to one tensor a million times
    checkpoint = source.trainer(lambda key: tensor("trainer", key))
    if "model" in components:
        state: dict[str, Any] = {key: tensor("model", key) for key in components["model"].tensors}
        state |= {alias: state[of] for alias, of in components["model"].aliases.items()}
        state |= {name: decode(value) for name, value in (source.document("model") or {}).items()}
        versions = source.document("versions")
        decoded_versions = None if versions is None else {name: decode(value) for name, value in versions.items()}
        checkpoint["state_dict"] = add_versions(state, decoded_versions)
        if frozen := source.document("frozen"):
            checkpoint[FROZEN] = frozen
    document = source.document("optimizer") if optimizers else None
    if document is not None:
        component = components.get("optimizer")
        whole = {key: tensor("optimizer", key) for key in component.tensors} if component is not None else {}
        stored = [StoredOptimizer(i, document[str(i)], component, decode) for i in range(len(document))]
        checkpoint["optimizer_states"] = [one.state_dict(whole) for one in stored]
    return checkpoint
