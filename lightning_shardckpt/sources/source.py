"""Sources of stored state, and the source of this package's checkpoints.

Every source, of any format, describes its tensors by the same specs, so that comparing and planning do not depend on
the format; ``open_source`` detects it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from lightning_shardckpt.compat.dtensor import shape_of
from lightning_shardckpt.errors import StateError
from lightning_shardckpt.format.box import Box
from lightning_shardckpt.format.index import Component
from lightning_shardckpt.format.layout import Part
from lightning_shardckpt.format.plan import Overlap, plan_load
from lightning_shardckpt.format.value_checks import DTYPE_BYTES
from lightning_shardckpt.state.documents import document_of
from lightning_shardckpt.state.dtensor_layout import local_tensor, parts_of, parts_within, this_rank, view_at
from lightning_shardckpt.state.json_tree import Pickled, decode, lost_values
from lightning_shardckpt.state.tensor_bytes import TORCH_DTYPES, bytes_of, is_host_memory
from lightning_shardckpt.state.trainer import HYPER_PARAMETERS
from lightning_shardckpt.system.tuning import TUNING, Tuning
from lightning_shardckpt.transfer.read_plan import Request, single_run
from lightning_shardckpt.transfer.reader import Checkpoint
from lightning_shardckpt.transfer.shard_reader import Files, fetch
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


_NOTHING = torch.empty(0, device="cpu")  # on the CPU for any default device
_NO_BYTES = memoryview(b"")


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

    def with_key(self, component: str, key: str) -> ReadTarget:
        """Return a target of the same memory, to fill with another stored tensor."""
        target = copy.copy(self)  # dataclasses.replace would allocate another ``local``
        target.component, target.key = component, key
        return target

    def parts(self, rank: int) -> tuple[Part, ...]:
        """Return the boxes to fill, and their offsets in ``local``; ``rank`` is this process's."""
        if self.box is not None:
            return (Part(self.box, (0,) * len(self.box.start)),)
        parts = parts_of(self.tensor, rank)
        return parts if self.region is None else parts_within(parts, self.region)


class TensorSource(Protocol):
    """Stored tensors, on one rank."""

    def components(self) -> Mapping[str, Component]:
        """Return the tensors by component."""

    def checked_shape(self, component: str, key: str) -> tuple[int, ...]:
        """Return the shape of a stored tensor after checking that files of its size exist."""

    def read(self, targets: list[ReadTarget]) -> None:
        """Fill the targets, and verify their bytes on the way.

        Raises:
            CorruptionError: naming file, tensor and rank. Some targets are filled then.
        """


class Source(TensorSource, Protocol):
    """Stored state, on one rank."""

    path: str

    @property
    def tensors(self) -> StoredTensors:
        """The tensors as bytes in files, for copies of whole tensors."""

    def close(self) -> None:
        """Close the files."""

    def document(self, role: str, rank: int = 0) -> Any:
        """Return the JSON of a role of ``Snapshot.documents``; None if there is none."""

    def trainer(self, stored: Callable[[str], torch.Tensor]) -> dict[str, Any]:
        """Return the trainer's state; ``stored`` returns a tensor of the component trainer by key."""


class ShardedSource:
    """A checkpoint directory of this package."""

    def __init__(
        self, checkpoint: Checkpoint, verify: bool = True, tuning: Tuning = TUNING, *, weights_only: bool = True
    ) -> None:
        self.path, self.checkpoint, self._verify, self._tuning = checkpoint.path, checkpoint, verify, tuning
        self._weights_only = weights_only
        self._plans: dict[tuple[Any, ...], list[tuple[Overlap, tuple[int, int, int] | None]]] = {}

    @property
    def tensors(self) -> StoredTensors:
        """The tensors as bytes in shard files."""
        return WholeTensors(self.checkpoint)

    def close(self) -> None:
        """Close the files."""
        self.checkpoint.close()

    def components(self) -> Mapping[str, Component]:
        """Return the tensors by component, from the root index."""
        return self.checkpoint.root.components

    def document(self, role: str, rank: int = 0) -> Any:
        """Return the JSON of a role, merged over groups of ranks that each store a part."""
        return document_of(self.checkpoint, role, rank)

    def trainer(self, stored: Callable[[str], torch.Tensor]) -> dict[str, Any]:
        """Return the decoded trainer state.

        Raises:
            StateError: with ``weights_only``, for pickled objects outside of hyper-parameters.
        """
        state: dict[str, Any] = decode(self.document("trainer") or {}, stored, unpickles=not self._weights_only)
        lost = lost_values({key: value for key, value in state.items() if key not in HYPER_PARAMETERS})
        pickled = [f"{place}  {value.type_name}" for place, value in lost.items() if isinstance(value, Pickled)]
        if pickled:
            listed = "\n  ".join(pickled)
            raise StateError(
                f"checkpoint {self.path!r} has pickled objects, which are not read: they could execute any code.\n"
                f"  {listed}\nIf you trust its author, load it with weights_only=False, an argument of fit, validate, "
                "test, predict and load."
            )
        return state

    def checked_shape(self, component: str, key: str) -> tuple[int, ...]:
        """Return the shape of a stored tensor after checking that files of its size exist.

        Raises:
            ShardCkptError: if an index lacks one of its boxes, or a file is not the saved one.
        """
        spec = self.checkpoint.root.components[component].tensors[key]
        whole = Box.whole(spec.shape)
        for overlap in plan_load(spec, self.checkpoint.replicas(component)[key], (Part(whole, whole.start),)):
            file = self.checkpoint.entry(component, key, overlap).file
            self.checkpoint.check_file(component, overlap.writer, file)
        return spec.shape

    def read(self, targets: list[ReadTarget]) -> None:
        """Fill the targets; every block that they touch is read once, and verified before its bytes count as loaded.

        Without ``verify``, only sizes, headers and save ids are checked.
        """
        wanted = []
        for target in targets:
            is_here = is_host_memory(target.local)
            memory = bytes_of(target.local) if is_here else _NO_BYTES
            wanted.append((_NOTHING if is_here else target.local, self._requests(target, memory)))
        fetch_into(self.checkpoint, wanted, verify=self._verify, tuning=self._tuning)

    def _requests(self, target: ReadTarget, memory: memoryview) -> list[Request]:
        """Return the requests of this rank for one tensor, whose local part is ``memory``."""
        name, key, shape, checkpoint = target.component, target.key, tuple(target.local.shape), self.checkpoint
        spec, replica = checkpoint.root.components[name].tensors[key], checkpoint.replicas(name)[key]
        parts = target.parts(this_rank())
        kind = id(spec), replica, parts, shape  # equal tensors share one spec object
        if kind not in self._plans:
            plan = []
            for overlap in plan_load(spec, replica, parts):
                checkpoint.entry(name, key, overlap)  # at once, since most boxes of a hostile layout do not exist
                plan.append((overlap, single_run(overlap, shape, DTYPE_BYTES[spec.dtype])))
            self._plans[kind] = plan
        requests = []
        for overlap, run in self._plans[kind]:
            entry = checkpoint.entry(name, key, overlap)
            checkpoint.check_file(name, overlap.writer, entry.file)
            requests.append(Request(key, overlap, entry, shape, run, memory))
        return requests


def fetch_into(
    files: Files, wanted: Iterable[tuple[torch.Tensor, list[Request]]], *, verify: bool, tuning: Tuning = TUNING
) -> None:
    """Fill local tensors; device tensors through host copies, a batch at a time.

    For a GPU the copies are pinned, and copied on the current stream while the next batch is read.

    Args:
        files: of the requests' boxes.
        wanted: requests with the device tensor that they fill through a host copy; with an empty tensor, requests are
            read into their own targets.
        verify: whether to verify the checksum of every block that is touched.
        tuning: sizes of reads.
    """
    batch: list[tuple[torch.Tensor, torch.Tensor]] = []
    requests: list[Request] = []
    nbytes = 0  # of the batch
    for local, own_requests in wanted:
        new = own_requests
        if local is not _NOTHING and not is_host_memory(local):
            if nbytes + local.nbytes > _BATCH_BYTES:
                _flush(files, batch, requests, verify, tuning)
                nbytes = 0
            host = torch.empty(local.shape, dtype=local.dtype, device="cpu", pin_memory=local.is_cuda)
            batch.append((local, host))
            nbytes += host.nbytes
            memory = bytes_of(host)
            new = [request._replace(target=memory) for request in own_requests]
        requests += new
    _flush(files, batch, requests, verify, tuning)


def _flush(
    files: Files,
    batch: list[tuple[torch.Tensor, torch.Tensor]],
    requests: list[Request],
    verify: bool,
    tuning: Tuning,
) -> None:
    fetch(files, requests, verify=verify, tuning=tuning)
    for local, host in batch:
        local.copy_(host, non_blocking=local.is_cuda)  # torch reuses pinned memory only after the copy
    batch.clear()
    requests.clear()
