"""Reads of stored tensors into live ones: whole or in part, into host or device memory, also into other dtypes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch

from lightning_shardckpt.compat.dtensor import shape_of
from lightning_shardckpt.format.layout import Box, Part
from lightning_shardckpt.sources.source import Source
from lightning_shardckpt.state.dtensor_layout import local_tensor, parts_of, parts_within, this_rank, view_at
from lightning_shardckpt.state.tensor_bytes import TORCH_DTYPES, bytes_of, is_host_memory
from lightning_shardckpt.transfer.shard_reader import Request, fetch, windows

_WINDOW_BYTES, _BATCH_BYTES = 16 << 20, 64 << 20  # of host memory, whose content is converted or copied to a device
_COMPARED_BYTES = 8 << 20  # of each tensor
_FLOATING = ("F64", "F32", "F16", "BF16")  # not F8, whose scales are in other tensors
_COMPLEX = ("C64", "C128")


@dataclass(slots=True, eq=False)  # not frozen, which would dominate the time: there is one for each tensor
class ReadTarget:
    """Memory to fill: the local part of ``tensor``, with its region of the stored tensor ``key``. Treat as immutable.

    Attributes:
        component: of the stored tensor.
        key: of the stored tensor.
        tensor: the live tensor.
        region: of the local tensor, to fill only that.
        box: of the stored tensor, to fill a plain tensor with only that.
        dtype: of the stored tensor, to fill separate host memory.
        local: the memory to fill.
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
        if self.dtype is not None:
            local = torch.empty(local.shape, dtype=self.dtype, device="cpu")
        self.local = local

    def requests(self, source: Source, memory: memoryview) -> list[Request]:
        """Return the requests that fill ``memory``, an array of the shape of ``local``."""
        if self.box is not None:
            parts: tuple[Part, ...] = (Part(self.box, (0,) * len(self.box.start)),)
        else:
            parts = parts_of(self.tensor, this_rank())
            parts = parts if self.region is None else parts_within(parts, self.region)
        return source.requests(self.component, self.key, parts, tuple(self.local.shape), memory)


def read_targets(source: Source, targets: Iterable[ReadTarget]) -> None:
    """Plan and perform reads at once; see ``plan_reads``."""
    plan_reads(source, targets)()


def plan_reads(source: Source, targets: Iterable[ReadTarget]) -> Callable[[], None]:
    """Plan how to fill the targets, and open the files for it.

    Every block that they touch is read once, and verified before its bytes count as loaded. Where there are no
    checksums, or they are not compared, only sizes, headers and save ids are checked. Floating and complex dtypes are
    converted. Tensors of other dtypes and on devices are filled through windows of host memory, a batch at a time; on a
    GPU, a batch is copied on the current stream while the next one is read.

    Returns:
        A function that performs the reads. It raises a CorruptionError that names file, tensor and rank; then some
        targets are filled.

    Raises:
        ShardCkptError: if a file is missing, or not the saved one.
    """
    direct, copied = list[Request](), list[tuple[ReadTarget, torch.dtype]]()
    for target in targets:
        local, dtype = target.local, TORCH_DTYPES[source.spec(target.component, target.key).dtype]
        if target.dtype is not None or (local.dtype is dtype and is_host_memory(local)):
            direct += target.requests(source, bytes_of(local))
        else:
            target.requests(source, memoryview(b""))  # opens the files
            copied.append((target, dtype))

    def read() -> None:
        if direct:
            fetch(source, direct, verify=source.verify)
        for batch in _batches(source, copied):
            fetch(source, chain.from_iterable(requests for _, _, requests in batch), verify=source.verify)
            for local, host, _ in batch:
                local.copy_(host, non_blocking=local.is_cuda)  # torch reuses pinned memory only after the copy

    return read


_Window = tuple[torch.Tensor, torch.Tensor, list[Request]]
"""A part of a local tensor, host memory of the stored dtype, and the requests that fill it."""


def _batches(source: Source, copied: Iterable[tuple[ReadTarget, torch.dtype]]) -> Iterator[list[_Window]]:
    """Yield the windows of all targets, in batches of bounded size."""
    batch, nbytes = list[_Window](), 0
    for target, dtype in copied:
        limit = _WINDOW_BYTES // dtype.itemsize
        is_small = target.local.numel() <= limit
        for region in (None,) if is_small else windows(tuple(target.local.shape), limit):
            part = target if region is None else ReadTarget(target.component, target.key, target.tensor, region)
            host = torch.empty(part.local.shape, dtype=dtype, device="cpu", pin_memory=part.local.is_cuda)
            if batch and nbytes + host.nbytes > _BATCH_BYTES:
                yield batch
                batch, nbytes = [], 0
            batch.append((part.local, host, part.requests(source, bytes_of(host))))
            nbytes += host.nbytes
    if batch:
        yield batch


def converts(stored: str, live: str | None) -> bool:
    """Return whether a stored tensor of one dtype may be loaded into a live tensor of another.

    >>> converts("BF16", "F32"), converts("I64", "I32"), converts("F8_E4M3", "BF16")
    (True, False, False)
    """
    return stored == live or any(stored in kind and live in kind for kind in (_FLOATING, _COMPLEX))


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
    first, *others = [source.spec(component, key) for key in keys]
    if any((spec.dtype, spec.shape) != (first.dtype, first.shape) for spec in others):
        return False
    dtype = TORCH_DTYPES[first.dtype]
    if like is None or tuple(shape_of(like)) != first.shape:
        like = torch.empty(first.shape, device="meta")
    for window in windows(tuple(local_tensor(like).shape), _COMPARED_BYTES // dtype.itemsize):
        targets = [ReadTarget(component, key, like, region=window, dtype=dtype) for key in keys]
        read_targets(source, targets)
        expected, *contents = [bytes_of(target.local) for target in targets]
        if any(content != expected for content in contents):
            return False
    return True
