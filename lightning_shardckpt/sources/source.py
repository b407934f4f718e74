"""Stored state of any format as one frozen value: the sources of this package's checkpoints and of other programs'.

A stored tensor is a spec and a function that finds its bytes, so that nothing else depends on the format. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, NamedTuple, TypeAlias

from lightning_shardckpt.errors import CorruptionError, FormatError, StateError
from lightning_shardckpt.format.index import Component, RootIndex, ShardEntry, TensorSpec
from lightning_shardckpt.format.layout import REPLICATED, Box, Part, Shape, find_cover_error
from lightning_shardckpt.format.plan import ByteRuns, Overlap, byte_runs, plan_load
from lightning_shardckpt.format.value_checks import DTYPE_BYTES, bytes_in
from lightning_shardckpt.state.documents import FROZEN, StoredOptimizer, document_of
from lightning_shardckpt.state.state_dicts import add_versions
from lightning_shardckpt.storage.protocol import Reader
from lightning_shardckpt.system.host import allocate_pages
from lightning_shardckpt.transfer.reader import Checkpoint, Request, fetch, windows

WINDOW_BYTES = 32 << 20  # of memory for tensors that are read window by window

Tables: TypeAlias = Mapping[str, Mapping[str, "StoredTensor"]]
MALFORMED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, EOFError, RecursionError)
"""Errors of Python for content that is not laid out as expected."""


class StoredTensor(NamedTuple):
    """A stored tensor of any format.

    Attributes:
        spec: its dtype and shape.
        requests: returns the requests that fill memory, given the regions of the tensor in it, the shape of its array,
            and the memory; raises a ShardCkptError if a file is missing, or not the saved one.
        located: its boxes, if it is of another format.
    """

    spec: TensorSpec
    requests: Callable[[tuple[Part, ...], Shape, memoryview], list[Request]]
    located: ForeignTensor | None = None


@dataclass(frozen=True, eq=False)
class Source:
    """Stored state of any format, on one rank.

    Attributes:
        path: of the checkpoint.
        reader: of its files.
        table: stored tensors by component and name.
        document: returns the JSON of a role of ``Snapshot.documents``, for a rank, by default 0; None if there is none.
        trainer: returns the trainer's state, given a function that returns one of its tensors, or a value in its place.
        aliases: further names of tensors, by component.
        verify: whether reads compare checksums.
        root: the root index of a checkpoint of this package.
        all_modules: returns the source with all modules, if this one has one of several.
        has_weights_only: whether these are weights alone of another program, whose names may differ from the model's.
            Checkpoints of Lightning and of this package have the model's, and so have those with optimizer state.
    """

    path: str
    reader: Reader
    table: Tables
    document: Callable[..., Any]
    trainer: Callable[[Callable[[str], Any]], dict[str, Any]]
    aliases: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    verify: bool = False
    root: RootIndex | None = None
    all_modules: Callable[[], Source] | None = None
    has_weights_only: bool = False

    def component(self, name: str) -> Component:
        """Return the specs and aliases of the tensors of a component, which may be none."""
        specs = {key: stored.spec for key, stored in self.table.get(name, {}).items()}
        return Component(specs, dict(self.aliases.get(name, {})))

    def close(self) -> None:
        """Close the files."""
        self.reader.close()

    def with_names(
        self, table: Tables, aliases: Mapping[str, Mapping[str, str]], documents: Mapping[str, Any]
    ) -> Source:
        """Return the source with other tables, aliases and documents in place of its own, by component and role."""

        def document(role: str, rank: int = 0) -> Any:
            return documents[role] if role in documents else self.document(role, rank)

        kept = {name: of for name, of in self.aliases.items() if name not in table}
        return replace(self, table={**self.table, **table}, aliases={**kept, **aliases}, document=document)

    def checked_shape(self, component: str, key: str) -> tuple[int, ...]:
        """Return the shape of a stored tensor. Raises a ShardCkptError if files of its size do not exist."""
        spec, requests, _ = self.table[component][key]
        whole = Box.whole(spec.shape)
        requests((Part(whole, whole.start),), spec.shape, memoryview(b""))
        return spec.shape


def read_windows(
    source: Source, wanted: Iterable[tuple[str, str, Box | None]], nbytes: int = WINDOW_BYTES
) -> Iterator[tuple[int, memoryview]]:
    """Yield the bytes of tensors or of parts of them, window by window; every byte is verified if it has a checksum.

    ``wanted`` has component and key of each tensor, and the part of it, None for all of it. Windows that fit into
    ``nbytes`` of memory together are read together; a block that two windows share is read for both.

    Yields:
        The number of the tensor in ``wanted``, and its next bytes, which are valid until the next step.

    Raises:
        CorruptionError: naming file, tensor and rank.
    """
    memory, used = memoryview(allocate_pages(nbytes)), 0
    batch, requests = list[tuple[int, memoryview]](), list[Request]()
    for number, (component, key, part) in enumerate(wanted):
        stored = source.table[component][key]
        size, region = DTYPE_BYTES[stored.spec.dtype], part or Box.whole(stored.spec.shape)
        for window in windows(region.shape, nbytes // size):
            length = window.numel * size
            if used + length > nbytes:
                fetch(source.path, source.reader, requests, verify=source.verify)
                yield from batch
                batch, requests, used = [], [], 0
            target = memory[used : used + length]
            parts = (Part(window.shift(region.start), (0,) * len(region.shape)),)
            requests += stored.requests(parts, window.shape, target)
            batch.append((number, target))
            used += length
    fetch(source.path, source.reader, requests, verify=source.verify)
    yield from batch


# ── checkpoints of this package ───────────────────────────────────────────────────────────────────────────────────────

_MAX_CACHED_PLANS = 4096  # an export has one for each window


def sharded_source(
    checkpoint: Checkpoint, verify: bool = True, *, weights_only: bool = True, for_export: bool = False
) -> Source:
    """Return a checkpoint directory of this package as a source, which closes it.

    Args:
        checkpoint: the open checkpoint.
        verify: whether reads compare checksums.
        weights_only: refuse pickled objects in the trainer's state.
        for_export: keep pickled objects and configurations of the trainer's state as they are stored.
    """
    plans, components = dict[tuple[Any, ...], list[tuple[Overlap, ByteRuns]]](), checkpoint.root.components

    def requests(
        component: str, key: str, spec: TensorSpec, parts: tuple[Part, ...], shape: Shape, memory: memoryview
    ) -> list[Request]:
        replica, found = checkpoint.replicas(component)[key], list[Request]()
        kind = id(spec), replica, parts, shape  # equal tensors share one spec object
        if (plan := plans.get(kind)) is None:
            plan = []
            for overlap in plan_load(spec, replica, parts):
                entry = checkpoint.entry(component, key, overlap)  # most boxes of a hostile layout do not exist
                overlap = overlap._replace(stored=entry.box)  # which other tensors share, so that it is found faster
                plan.append((overlap, byte_runs(overlap, shape, DTYPE_BYTES[spec.dtype])))
            if len(plans) < _MAX_CACHED_PLANS:
                plans[kind] = plan
        for overlap, runs in plan:
            entry = checkpoint.entry(component, key, overlap)
            checkpoint.check_file(component, overlap.writer, entry.file)
            found.append(Request(key, overlap.writer, entry, runs, memory))
        return found

    def trainer(stored: Callable[[str], Any]) -> dict[str, Any]:
        # these import torch, which tools that move bytes don't need
        from lightning_shardckpt.state.json_tree import Pickled, decode, lost_values
        from lightning_shardckpt.state.trainer import HYPER_PARAMETERS

        content = document_of(checkpoint, "trainer") or {}
        state: dict[str, Any] = decode(content, stored, unpickles=not weights_only, makes_configs=not for_export)
        lost = lost_values({key: value for key, value in state.items() if key not in HYPER_PARAMETERS})
        pickled = [f"{place}  {value.type_name}" for place, value in lost.items() if isinstance(value, Pickled)]
        if pickled and not for_export:
            listed = "\n  ".join(pickled)
            raise StateError(
                f"checkpoint {checkpoint.path!r} has pickled objects, which could execute any code:\n  {listed}\n"
                "If you trust its author, load it with weights_only=False"
            )
        return state

    table = {
        name: {key: StoredTensor(spec, partial(requests, name, key, spec)) for key, spec in of.tensors.items()}
        for name, of in components.items()
    }
    aliases, document = {name: of.aliases for name, of in components.items()}, partial(document_of, checkpoint)
    return Source(checkpoint.path, checkpoint.reader, table, document, trainer, aliases, verify, checkpoint.root)


# ── other programs' checkpoints ───────────────────────────────────────────────────────────────────────────────────────
# Boxes of bytes in files tile each tensor: one in a safetensors file, one for each chunk of torch's distributed
# checkpoints, one for each stored tensor of a joined one. There are no checksums.


class ForeignBox(NamedTuple):
    """A region of a tensor, and the offset of its row-major, contiguous bytes in a file."""

    box: Box
    file: str
    begin: int


class ForeignTensor(NamedTuple):
    """A tensor of another format: its dtype, named as in safetensors, its shape, and the boxes that tile it."""

    dtype: str
    shape: Shape
    boxes: tuple[ForeignBox, ...]


def list_tensors(reader: Reader, tensors: Mapping[str, ForeignTensor]) -> dict[str, StoredTensor]:
    """Return stored tensors by key. Raises an error if boxes do not tile a tensor, or a file is too short for one."""
    listed, size = dict[str, StoredTensor](), cache(reader.size)
    for key, tensor in tensors.items():
        dtype, shape, boxes = tensor
        if problem := find_cover_error(shape, (box for box, _, _ in boxes)):
            raise FormatError(f"{key!r}, {dtype} {shape}: {problem}")
        for box, file, begin in boxes:
            end = begin + bytes_in(box.shape, dtype)
            if not 0 <= begin <= end <= size(file):
                raise CorruptionError(f"file {file}: {key!r} should be at bytes {begin} to {end} of {size(file)}")
        spec = TensorSpec(dtype, shape, REPLICATED, ((0, 1),))
        listed[key] = StoredTensor(spec, partial(_requests, key, tensor), tensor)
    return listed


def _requests(
    key: str, tensor: ForeignTensor, parts: tuple[Part, ...], shape: Shape, memory: memoryview
) -> list[Request]:
    size, requests = DTYPE_BYTES[tensor.dtype], list[Request]()
    for box, file, begin in tensor.boxes:
        entry = ShardEntry(box, tensor.shape, tensor.dtype, file, begin, 1, box.numel * size, "")
        for part in parts:
            if (common := box.intersect(part.box)) is not None:
                overlap = Overlap(0, box, common, common.within(part.box).shift(part.at))
                requests.append(Request(key, 0, entry, byte_runs(overlap, shape, size), memory))
    return requests


# ── Lightning's dict ──────────────────────────────────────────────────────────────────────────────────────────────────


def assemble(
    source: Source, tensor: Callable[[str, str], Any], decode: Callable[[Any], Any], *, optimizers: bool = True
) -> dict[str, Any]:
    """Return Lightning's checkpoint dict with whole tensors, given a function that returns one by component and key.

    ``decode`` decodes the result of ``encode_small``.
    """
    tensor = cache(tensor)  # a hostile document may refer to one tensor a million times
    checkpoint = source.trainer(lambda key: tensor("trainer", key))
    if "model" in source.table:
        model = source.component("model")
        state: dict[str, Any] = {name: tensor("model", key) for name, key in model.names.items()}
        state |= {name: decode(value) for name, value in (source.document("model") or {}).items()}
        versions = source.document("versions")
        versions = versions and {name: decode(value) for name, value in versions.items()}
        checkpoint["state_dict"] = add_versions(state, versions)
        if frozen := source.document("frozen"):
            checkpoint[FROZEN] = frozen
    if optimizers and (document := source.document("optimizer")) is not None:
        component = source.component("optimizer")
        whole = {key: tensor("optimizer", key) for key in component.tensors}
        stored = [StoredOptimizer(i, document[str(i)], component, decode) for i in range(len(document))]
        checkpoint["optimizer_states"] = [one.state_dict(whole) for one in stored]
    return checkpoint
