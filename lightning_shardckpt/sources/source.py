"""Sources of stored state, and the source of this package's checkpoints.

Every source, of any format, describes its tensors by the same specs, so that comparing and planning do not depend on
the format; ``open_source`` detects it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

from lightning_shardckpt.compat.dtensor import shape_of
from lightning_shardckpt.errors import StateError
from lightning_shardckpt.format.box import Box
from lightning_shardckpt.format.index import Component, TensorSpec
from lightning_shardckpt.format.layout import Part
from lightning_shardckpt.format.plan import Overlap, plan_load
from lightning_shardckpt.format.value_checks import DTYPE_BYTES
from lightning_shardckpt.state.documents import document_of
from lightning_shardckpt.state.dtensor_layout import local_tensor, parts_of, parts_within, this_rank, view_at
from lightning_shardckpt.state.json_tree import Pickled, decode, lost_values
from lightning_shardckpt.state.tensor_bytes import TORCH_DTYPES, bytes_of, is_host_memory
from lightning_shardckpt.state.trainer import HYPER_PARAMETERS
from lightning_shardckpt.transfer.reader import Checkpoint
from lightning_shardckpt.transfer.shard_reader import Files, Request, fetch, single_run
from lightning_shardckpt.transfer.whole_tensors import StoredTensors, WholeTensors, windows

_WINDOW_BYTES = 8 << 20  # of each of two tensors


def are_equal(source: Source, component: str, keys: Sequence[str], like: torch.Tensor | None = None) -> bool:
    """Return whether stored tensors have the same dtype, shape and bytes.

    Args:
        source: of the tensors.
        component: of the tensors.
        keys: of the tensors.
        like: a live tensor; stored tensors of its shape are compared only within this rank's part of it.

    Raises:
        CorruptionError: naming file, tensor and rank, if the format has checksums.
    """
    specs = [source.components()[component].tensors[key] for key in keys]
    if any((spec.dtype, spec.shape) != (specs[0].dtype, specs[0].shape) for spec in specs):
        return False
    dtype = TORCH_DTYPES[specs[0].dtype]
    if like is None or tuple(shape_of(like)) != specs[0].shape:
        like = torch.empty(specs[0].shape, device="meta")
    for window in windows(tuple(local_tensor(like).shape), _WINDOW_BYTES // dtype.itemsize):
        first: memoryview | None = None
        for key in keys:
            target = ReadTarget(component, key, like, region=window, dtype=dtype)
            source.read([target])
            content = bytes_of(target.local)
            if first is not None and first != content:
                return False
            first = content
    return True


_BATCH_BYTES = 64 << 20  # of host copies of device tensors; one larger tensor is a batch of its own


@dataclass(slots=True, eq=False)  # not frozen, which would dominate the time: there is one for each tensor
class ReadTarget:
    """Memory to fill: the local part of ``tensor``, with its region of the stored tensor ``key``. Treat as immutable.

    Attributes:
        component: of the stored tensor.
        key: of the stored tensor.
        tensor: the live tensor.
        region: of the local tensor, to fill only that.
        box: of the stored tensor, to fill a plain tensor with only that.
        dtype: of the stored tensor, if it differs from the live one's.
        local: the memory to fill; with ``dtype``, separate host memory.
    """

    component: str
    key: str
    tensor: torch.Tensor
    region: Box | None = None
    box: Box | None = None
    dtype: torch.dtype | None = None
    local: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        local = local_tensor(self.tensor)
        local = local if self.region is None else view_at(local, self.region)
        self.local = local if self.dtype is None else torch.empty(local.shape, dtype=self.dtype, device="cpu")

    def parts(self, rank: int) -> tuple[Part, ...]:
        """Return the boxes to fill, and their offsets in ``local``; ``rank`` is this process's."""
        if self.box is not None:
            return (Part(self.box, (0,) * len(self.box.start)),)
        parts = parts_of(self.tensor, rank)
        return parts if self.region is None else parts_within(parts, self.region)


class TensorFiles(StoredTensors, Protocol):
    """Tensors in files: described by layouts and indexes (``IndexedTensors``), or by listed boxes (``ForeignTensors``).

    Attributes:
        verify: whether reads compare checksums.
    """

    verify: bool

    def check(self, component: str, key: str) -> None:
        """Raise a ShardCkptError if a tensor cannot be read, or no files of its size exist."""

    def requests(self, component: str, key: str, parts: tuple[Part, ...], local: torch.Tensor) -> list[Request]:
        """Return the requests that fill ``local``, of which ``parts`` are regions, from a stored tensor."""


class StoredTensor(NamedTuple):
    """A stored tensor: its files, its component and key there, and its dtype and shape."""

    files: TensorFiles
    component: str
    key: str
    spec: TensorSpec


Tables: TypeAlias = Mapping[str, Mapping[str, StoredTensor]]
Aliases: TypeAlias = Mapping[str, Mapping[str, str]]
Stored: TypeAlias = Callable[[str], torch.Tensor]
"""Returns a tensor of the component trainer by key."""


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

    def read(self, targets: list[ReadTarget]) -> None:
        """Fill the targets; every block that they touch is read once, and verified before its bytes count as loaded.

        Where there are no checksums, or they are not compared, only sizes, headers and save ids are checked.

        Raises:
            CorruptionError: naming file, tensor and rank. Some targets are filled then.
        """
        by_files: dict[int, tuple[TensorFiles, list[tuple[torch.Tensor, list[Request]]]]] = {}
        for target in targets:
            files, component, key, _ = self.table[target.component][target.key]
            local = target.local
            requests = files.requests(component, key, target.parts(this_rank()), local)
            by_files.setdefault(id(files), (files, []))[1].append((local, requests))
        for files, wanted in by_files.values():
            fetch_into(files, wanted, verify=files.verify)


def tables_of(files: TensorFiles, components: Mapping[str, Component]) -> tuple[Tables, Aliases]:
    """Return the tables and the aliases of a source that has all tensors of its files under their stored names."""
    table = {n: {k: StoredTensor(files, n, k, s) for k, s in c.tensors.items()} for n, c in components.items()}
    return table, {name: component.aliases for name, component in components.items()}


# ── checkpoints of this package ───────────────────────────────────────────────────────────────────────────────────────


def sharded_source(checkpoint: Checkpoint, verify: bool = True, *, weights_only: bool = True) -> Source:
    """Return a checkpoint directory of this package as a source."""
    files = IndexedTensors(checkpoint, verify)

    def document(role: str, rank: int) -> Any:
        return document_of(checkpoint, role, rank)

    def trainer(stored: Stored) -> dict[str, Any]:
        return _decode_trainer(checkpoint.path, document("trainer", 0) or {}, stored, weights_only)

    return Source(checkpoint.path, files, *tables_of(files, checkpoint.root.components), document, trainer, is_own=True)


def _decode_trainer(path: str, document: Any, stored: Stored, weights_only: bool) -> dict[str, Any]:
    """Return the decoded trainer state.

    Raises:
        StateError: with ``weights_only``, for pickled objects outside of hyper-parameters.
    """
    state: dict[str, Any] = decode(document, stored, unpickles=not weights_only)
    lost = lost_values({key: value for key, value in state.items() if key not in HYPER_PARAMETERS})
    pickled = [f"{place}  {value.type_name}" for place, value in lost.items() if isinstance(value, Pickled)]
    if pickled:
        listed = "\n  ".join(pickled)
        raise StateError(
            f"checkpoint {path!r} has pickled objects, which are not read: they could execute any code.\n"
            f"  {listed}\nIf you trust its author, load it with weights_only=False, an argument of fit, validate, "
            "test, predict and load."
        )
    return state


class IndexedTensors(WholeTensors):
    """The tensors of a checkpoint of this package; implements ``TensorFiles``."""

    def __init__(self, checkpoint: Checkpoint, verify: bool = True) -> None:
        super().__init__(checkpoint)
        self.verify = verify
        self._overlaps: dict[tuple[Any, ...], list[tuple[Overlap, tuple[int, int, int] | None]]] = {}

    def check(self, component: str, key: str) -> None:
        """Raise a ShardCkptError if an index lacks one of a tensor's boxes, or a file is not the saved one."""
        spec = self.spec(component, key)
        whole = Box.whole(spec.shape)
        for overlap in plan_load(spec, self.checkpoint.replicas(component)[key], (Part(whole, whole.start),)):
            file = self.checkpoint.entry(component, key, overlap).file
            self.checkpoint.check_file(component, overlap.writer, file)

    def requests(self, component: str, key: str, parts: tuple[Part, ...], local: torch.Tensor) -> list[Request]:
        """Return the requests that fill ``local``, of which ``parts`` are regions, from a stored tensor."""
        shape, checkpoint, memory = tuple(local.shape), self.checkpoint, host_memory(local)
        spec, replica = self.spec(component, key), checkpoint.replicas(component)[key]
        kind = id(spec), replica, parts, shape  # equal tensors share one spec object
        if kind not in self._overlaps:
            plan = []
            for overlap in plan_load(spec, replica, parts):
                checkpoint.entry(component, key, overlap)  # at once, since most boxes of a hostile layout do not exist
                plan.append((overlap, single_run(overlap, shape, DTYPE_BYTES[spec.dtype])))
            self._overlaps[kind] = plan
        requests = []
        for overlap, run in self._overlaps[kind]:
            entry = checkpoint.entry(component, key, overlap)
            checkpoint.check_file(component, overlap.writer, entry.file)
            requests.append(Request(key, overlap, entry, shape, run, memory))
        return requests


def host_memory(local: torch.Tensor) -> memoryview:
    """Return the memory of a tensor on the host, to read into; empty for others, which are filled through a copy."""
    return bytes_of(local) if is_host_memory(local) else memoryview(b"")


# ── reads ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def fetch_into(files: Files, wanted: Iterable[tuple[torch.Tensor, list[Request]]], *, verify: bool) -> None:
    """Fill local tensors; device tensors through host copies, a batch at a time.

    For a GPU the copies are pinned, and copied on the current stream while the next batch is read.

    Args:
        files: of the requests' boxes.
        wanted: local tensors, each with the requests that fill it.
        verify: whether to verify the checksum of every block that is touched.
    """
    batch: list[tuple[torch.Tensor, torch.Tensor]] = []
    requests: list[Request] = []
    nbytes = 0  # of the batch
    for local, own_requests in wanted:
        new = own_requests
        if not is_host_memory(local):
            if nbytes + local.nbytes > _BATCH_BYTES:
                _flush(files, batch, requests, verify)
                nbytes = 0
            host = torch.empty(local.shape, dtype=local.dtype, device="cpu", pin_memory=local.is_cuda)
            batch.append((local, host))
            nbytes += host.nbytes
            memory = bytes_of(host)
            new = [request._replace(target=memory) for request in own_requests]
        requests += new
    _flush(files, batch, requests, verify)


def _flush(
    files: Files,
    batch: list[tuple[torch.Tensor, torch.Tensor]],
    requests: list[Request],
    verify: bool,
) -> None:
    fetch(files, requests, verify=verify)
    for local, host in batch:
        local.copy_(host, non_blocking=local.is_cuda)  # torch reuses pinned memory only after the copy
    batch.clear()
    requests.clear()
