"""Reads of stored tensors into live ones: whole or in part, into host or device memory, also into other dtypes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from lightning_shardckpt.compat.dtensor import shape_of
from lightning_shardckpt.format.box import Box
from lightning_shardckpt.format.layout import Part
from lightning_shardckpt.sources.source import Source, TensorFiles
from lightning_shardckpt.state.dtensor_layout import local_tensor, parts_of, parts_within, this_rank, view_at
from lightning_shardckpt.state.tensor_bytes import TORCH_DTYPES, bytes_of, is_host_memory
from lightning_shardckpt.transfer.shard_reader import Request, fetch
from lightning_shardckpt.transfer.whole_tensors import windows

_WINDOW_BYTES = 8 << 20  # of each tensor to compare, or of stored elements to convert
_CONVERTED_BYTES = 32 << 20  # of windows that are converted after one read
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


def read_targets(source: Source, targets: Iterable[ReadTarget]) -> None:
    """Fill the targets; every block that they touch is read once, and verified before its bytes count as loaded.

    Where there are no checksums, or they are not compared, only sizes, headers and save ids are checked.

    Raises:
        CorruptionError: naming file, tensor and rank. Some targets are filled then.
    """
    by_files: dict[int, tuple[TensorFiles, list[tuple[torch.Tensor, list[Request]]]]] = {}
    for target in targets:
        files, component, key, _ = source.table[target.component][target.key]
        local = target.local
        memory = bytes_of(local) if is_host_memory(local) else memoryview(b"")  # others are filled through a copy
        requests = files.requests(component, key, target.parts(this_rank()), tuple(local.shape), memory)
        by_files.setdefault(id(files), (files, []))[1].append((local, requests))
    for files, wanted in by_files.values():
        _fetch_into(files, wanted)


def _fetch_into(files: TensorFiles, wanted: Iterable[tuple[torch.Tensor, list[Request]]]) -> None:
    """Fill local tensors; device tensors through host copies, a batch at a time.

    For a GPU the copies are pinned, and copied on the current stream while the next batch is read.

    Args:
        files: of the requests' boxes.
        wanted: local tensors, each with the requests that fill it.
    """
    batch: list[tuple[torch.Tensor, torch.Tensor]] = []
    requests: list[Request] = []
    nbytes = 0  # of the batch
    for local, own_requests in wanted:
        new = own_requests
        if not is_host_memory(local):
            if nbytes + local.nbytes > _BATCH_BYTES:
                _flush(files, batch, requests)
                nbytes = 0
            host = torch.empty(local.shape, dtype=local.dtype, device="cpu", pin_memory=local.is_cuda)
            batch.append((local, host))
            nbytes += host.nbytes
            memory = bytes_of(host)
            new = [request._replace(target=memory) for request in own_requests]
        requests += new
    _flush(files, batch, requests)


def _flush(
    files: TensorFiles,
    batch: list[tuple[torch.Tensor, torch.Tensor]],
    requests: list[Request],
) -> None:
    fetch(files, requests, verify=files.verify)
    for local, host in batch:
        local.copy_(host, non_blocking=local.is_cuda)  # torch reuses pinned memory only after the copy
    batch.clear()
    requests.clear()


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
            read_targets(source, [target])
            content = bytes_of(target.local)
            if first is not None and first != content:
                return False
            first = content
    return True


# ── other dtypes ──────────────────────────────────────────────────────────────────────────────────────────────────────


_FLOATING = ("F64", "F32", "F16", "BF16")  # not F8, whose scales are in other tensors
_COMPLEX = ("C64", "C128")


def converts(stored: str, live: str | None) -> bool:
    """Return whether a stored tensor of one dtype may be loaded into a live tensor of another.

    >>> converts("BF16", "F32"), converts("I64", "I32"), converts("F8_E4M3", "BF16")
    (True, False, False)
    """
    return stored == live or any(stored in kind and live in kind for kind in (_FLOATING, _COMPLEX))


def read_converted(source: Source, targets: list[ReadTarget]) -> None:
    """Read like ``read_targets``, with targets of other dtypes, through a bounded amount of memory."""
    specs = {name: component.tensors for name, component in source.components().items()}
    converted = [t for t in targets if TORCH_DTYPES[specs[t.component][t.key].dtype] != t.local.dtype]
    others = {*converted}
    read_targets(source, [target for target in targets if target not in others] if converted else targets)
    for batch in _batches(source, converted):
        read_targets(source, batch)
        for window in batch:
            assert window.region is not None
            view_at(local_tensor(window.tensor), window.region).copy_(window.local)


def _batches(source: Source, targets: Sequence[ReadTarget]) -> Iterator[list[ReadTarget]]:
    """Yield windows of the targets with memory of the stored dtype, in batches of bounded size."""
    batch: list[ReadTarget] = []
    for target in targets:
        dtype = TORCH_DTYPES[source.components()[target.component].tensors[target.key].dtype]
        for region in windows(tuple(target.local.shape), _WINDOW_BYTES // dtype.itemsize):
            window = ReadTarget(target.component, target.key, target.tensor, region, dtype=dtype)
            if batch and sum(t.local.nbytes for t in batch) + window.local.nbytes > _CONVERTED_BYTES:
                yield batch
                batch = []
            batch.append(window)
    if batch:
        yield batch
