"""Stored state of any format as one frozen value: the sources of this package's checkpoints and of other programs'.

A stored tensor is a spec and a function that finds its bytes, so that comparing and planning do not depend on the
format; ``open_source`` detects it. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

from lightning_shardckpt.errors import CorruptionError, FormatError, StateError
from lightning_shardckpt.format.index import Component, RootIndex, ShardEntry, TensorSpec
from lightning_shardckpt.format.layout import REPLICATED, Box, Part, Shape, find_cover_error
from lightning_shardckpt.format.plan import ByteRuns, Overlap, byte_runs, plan_load
from lightning_shardckpt.format.value_checks import DTYPE_BYTES, bytes_in
from lightning_shardckpt.state.documents import FROZEN, StoredOptimizer, document_of
from lightning_shardckpt.state.state_dicts import VERSION, add_versions
from lightning_shardckpt.storage.protocol import Reader
from lightning_shardckpt.transfer.reader import Checkpoint, Request

Found: TypeAlias = tuple[int, ShardEntry, ByteRuns]
"""The rank that wrote a box, the box, and where its bytes belong."""
Tables: TypeAlias = Mapping[str, Mapping[str, "StoredTensor"]]
Stored: TypeAlias = Callable[[str], Any]
"""Returns a tensor of the component trainer by key, or what takes its place."""


class ForeignBox(NamedTuple):
    """A region of a tensor, and the offset of its bytes in a file: row-major and contiguous."""

    box: Box
    file: str
    begin: int


class ForeignTensor(NamedTuple):
    """A tensor of another format: its dtype, named as in safetensors, its shape, and the boxes that tile it."""

    dtype: str
    shape: Shape
    boxes: tuple[ForeignBox, ...]


class StoredTensor(NamedTuple):
    """A stored tensor of any format.

    Attributes:
        component: of the tensor.
        key: of the tensor.
        spec: its dtype and shape.
        find: returns the stored boxes that meet parts of the tensor, given the shape of the array to fill; raises a
            ShardCkptError if a file is missing, or not the saved one.
        located: its boxes, if it is of another format.
    """

    component: str
    key: str
    spec: TensorSpec
    find: Callable[[tuple[Part, ...], Shape], Iterable[Found]]
    located: ForeignTensor | None = None

    def requests(self, parts: tuple[Part, ...], shape: Shape, memory: memoryview) -> list[Request]:
        """Return the requests that fill ``memory``, an array of ``shape`` with the regions ``parts``."""
        return [Request(self.key, writer, entry, runs, memory) for writer, entry, runs in self.find(parts, shape)]


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
        has_weights_only: whether these are weights alone of another program, whose names may differ from the model's.
            Checkpoints of Lightning and of this package have the model's, and so have those with optimizer state.
    """

    path: str
    reader: Reader
    table: Tables
    aliases: Mapping[str, Mapping[str, str]]
    documents: Callable[[str, int], Any]
    trainer: Callable[[Stored], dict[str, Any]]
    verify: bool = False
    root: RootIndex | None = None
    all_modules: Callable[[], Source] | None = None
    has_weights_only: bool = False

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

    def with_names(
        self, table: Tables, aliases: Mapping[str, Mapping[str, str]], documents: Mapping[str, Any]
    ) -> Source:
        """Return the source with other tables, aliases and documents in place of its own, by component and role."""

        def document(role: str, rank: int) -> Any:
            return documents[role] if role in documents else self.documents(role, rank)

        kept = {name: of for name, of in self.aliases.items() if name not in table}
        return replace(self, table={**self.table, **table}, aliases={**kept, **aliases}, documents=document)

    def checked_shape(self, component: str, key: str) -> tuple[int, ...]:
        """Return the shape of a stored tensor after checking that files of its size exist.

        Raises:
            ShardCkptError: if an index lacks one of its boxes, or a file is not the saved one.
        """
        stored = self.table[component][key]
        whole = Box.whole(stored.spec.shape)
        stored.requests((Part(whole, whole.start),), stored.spec.shape, memoryview(b""))
        return stored.spec.shape


# ── checkpoints of this package ───────────────────────────────────────────────────────────────────────────────────────

_MAX_CACHED_PLANS = 4096  # an export has one for each window
_Plan: TypeAlias = list[tuple[Overlap, ByteRuns]]


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

    def find(component: str, key: str, spec: TensorSpec, parts: tuple[Part, ...], shape: Shape) -> Iterator[Found]:
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
        for overlap, runs in plan:
            entry = checkpoint.entry(component, key, overlap)
            checkpoint.check_file(component, overlap.writer, entry.file)
            yield overlap.writer, entry, runs

    def document(role: str, rank: int) -> Any:
        return document_of(checkpoint, role, rank)

    def trainer(stored: Stored) -> dict[str, Any]:
        from lightning_shardckpt.state.json_tree import decode  # imports torch, which tools that move bytes don't need

        content = document("trainer", 0) or {}
        state: dict[str, Any] = decode(content, stored, unpickles=not weights_only, makes_configs=not for_export)
        if not for_export:
            _refuse_pickled(checkpoint.path, state)
        return state

    table = {
        name: {key: StoredTensor(name, key, spec, partial(find, name, key, spec)) for key, spec in of.tensors.items()}
        for name, of in components.items()
    }
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


# ── other programs' checkpoints ───────────────────────────────────────────────────────────────────────────────────────
# Boxes of bytes in files tile each tensor. A tensor in a safetensors file is one box, a tensor of torch's distributed
# checkpoint has a box for each chunk, and a tensor joined from several stored tensors a box for each of these. Such
# files have no checksums to compare.

_STEP_BYTES = 1 << 20  # the block size of boxes without checksums


def list_tensors(reader: Reader, component: str, tensors: Mapping[str, ForeignTensor]) -> dict[str, StoredTensor]:
    """Return stored tensors by key, after checking their boxes.

    Raises:
        FormatError: if the boxes of a tensor do not tile it.
        CorruptionError: if a file is too short for a box, or missing.
    """

    @cache
    def size(file: str) -> int:
        try:
            return reader.size(file)
        except FileNotFoundError:
            raise CorruptionError(f"file {file}: the file is missing") from None

    listed: dict[str, StoredTensor] = {}
    for key, tensor in tensors.items():
        dtype, shape, boxes = tensor
        problem = find_cover_error(shape, (box for box, _, _ in boxes))
        if problem is not None:
            raise FormatError(f"{key!r}, {dtype} {shape}: {problem}")
        for box, file, begin in boxes:
            end = begin + bytes_in(box.shape, dtype)
            if not 0 <= begin <= end <= size(file):
                raise CorruptionError(f"file {file}: {key!r} should be at bytes {begin} to {end} of {size(file)}")
        spec = TensorSpec(dtype, shape, REPLICATED, ((0, 1),))
        listed[key] = StoredTensor(component, key, spec, partial(_find_boxes, tensor), tensor)
    return listed


def _find_boxes(tensor: ForeignTensor, parts: tuple[Part, ...], shape: Shape) -> Iterator[Found]:
    dtype, size = tensor.dtype, DTYPE_BYTES[tensor.dtype]
    for box, file, begin in tensor.boxes:
        entry = ShardEntry(box, tensor.shape, dtype, file, begin, _STEP_BYTES, box.numel * size, "")
        for part in parts:
            if (common := box.intersect(part.box)) is not None:
                overlap = Overlap(0, box, common, common.within(part.box).shift(part.at))
                yield 0, entry, byte_runs(overlap, shape, size)


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
    found, others = dict(documents or {}), rest or {}
    return Source(
        path=path,
        reader=reader,
        table={component: list_tensors(reader, component, of) for component, of in tensors.items()},
        aliases=aliases or {},
        documents=lambda role, rank: found.get(role),
        trainer=lambda stored: dict(others),
        all_modules=all_modules,
        has_weights_only="model" in tensors and found.get("optimizer") is None and VERSION not in others,
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
