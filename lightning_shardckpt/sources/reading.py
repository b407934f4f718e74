"""Reads of stored tensors into live ones, into host or device memory, also into other dtypes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch

from lightning_shardckpt.compat import dtensor
from lightning_shardckpt.format.layout import Box, Part
from lightning_shardckpt.sources.source import Source, StoredTensor, read_windows
from lightning_shardckpt.state.local_tensors import (
    TORCH_DTYPES,
    bytes_of,
    is_host_memory,
    parts_of,
    parts_within,
    this_rank,
    view_at,
)
from lightning_shardckpt.transfer.reader import Request, fetch, windows

_WINDOW_BYTES, _BATCH_BYTES = 16 << 20, 64 << 20  # of host memory, whose content is converted or copied to a device
_COMPARED_BYTES = 8 << 20  # of each tensor
_FLOATING = ("F64", "F32", "F16", "BF16")  # not F8, whose scales are in other tensors
_COMPLEX = ("C64", "C128")


class ReadTarget(NamedTuple):
    """A live tensor, whose local part the stored tensor of a component and key fills."""

    component: str
    key: str
    tensor: torch.Tensor


def plan_reads(source: Source, targets: Iterable[ReadTarget]) -> Callable[[], None]:
    """Plan how to fill the targets, and open the files for it.

    Every block that they touch is read once, and verified before its bytes count as loaded. Tensors of other dtypes,
    which are converted, and on devices are filled through windows of host memory, a batch at a time; on a GPU, a batch
    is copied on the current stream while the next one is read.

    Returns:
        A function that performs the reads; if it raises a CorruptionError, which names file, tensor and rank, some
        targets are filled.

    Raises:
        ShardCkptError: if a file is missing, or not the saved one.
    """
    direct, copied, rank = list[Request](), list[_Copied](), this_rank()
    for component, key, tensor in targets:
        stored, local, parts = source.table[component][key], dtensor.local_tensor(tensor), parts_of(tensor, rank)
        is_direct = local.dtype is TORCH_DTYPES[stored.spec.dtype] and is_host_memory(local)
        memory = bytes_of(local) if is_direct else memoryview(b"")
        requests = stored.requests(parts, tuple(local.shape), memory)  # opens files
        if is_direct:
            direct += requests
        else:
            copied.append((stored, parts, local.detach()))

    def read() -> None:
        if direct:
            fetch(source.path, source.reader, direct, verify=source.verify)
        for batch in _batches(copied):
            requests = chain.from_iterable(requests for _, _, requests in batch)
            fetch(source.path, source.reader, requests, verify=source.verify)
            for local, host, _ in batch:
                local.copy_(host, non_blocking=local.is_cuda)  # torch reuses pinned memory only after the copy

    return read


_Copied = tuple[StoredTensor, tuple[Part, ...], torch.Tensor]
"""A stored tensor, and its parts for a local tensor that is filled through other memory."""


def _batches(copied: Iterable[_Copied]) -> Iterator[list[tuple[torch.Tensor, torch.Tensor, list[Request]]]]:
    """Yield windows of the local tensors, host memory of the stored dtype, and its requests, in bounded batches."""
    batch, nbytes = list[tuple[torch.Tensor, torch.Tensor, list[Request]]](), 0
    for stored, parts, local in copied:
        dtype = TORCH_DTYPES[stored.spec.dtype]
        for window in windows(tuple(local.shape), _WINDOW_BYTES // dtype.itemsize):
            host = torch.empty(window.shape, dtype=dtype, device="cpu", pin_memory=local.is_cuda)
            if batch and nbytes + host.nbytes > _BATCH_BYTES:
                yield batch
                batch, nbytes = [], 0
            requests = stored.requests(parts_within(parts, window), window.shape, bytes_of(host))
            batch.append((view_at(local, window), host, requests))
            nbytes += host.nbytes
    if batch:
        yield batch


def converts(stored: str, live: str | None) -> bool:
    """Return whether a stored tensor of one dtype may be loaded into a live tensor of another."""
    return stored == live or any(stored in kind and live in kind for kind in (_FLOATING, _COMPLEX))


def are_equal(source: Source, component: str, keys: Sequence[str], like: torch.Tensor | None = None) -> bool:
    """Return whether stored tensors of a component have the same dtype, shape and bytes.

    Those of the shape of ``like``, a live tensor, are compared only within this rank's part of it.

    Raises:
        CorruptionError: naming file, tensor and rank, if the format has checksums.
    """
    specs = [source.table[component][key].spec for key in keys]
    if len({(spec.dtype, spec.shape) for spec in specs}) > 1:
        return False
    boxes = [Box.whole(specs[0].shape)]
    if like is not None and tuple(dtensor.shape_of(like)) == specs[0].shape:
        boxes = [part.box for part in parts_of(like, this_rank())]
    wanted = ([(component, key, box) for box in boxes] for key in keys)
    windows_of_each = (read_windows(source, of, _COMPARED_BYTES) for of in wanted)
    return all(len({bytes(data) for _, data in same}) == 1 for same in zip(*windows_of_each, strict=True))
