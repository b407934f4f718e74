"""Compare stored tensors with each other: names of one tensor may be stored apart."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_shardckpt.compat.dtensor import local_tensor, shape_of
from lightning_shardckpt.sources.source import ReadTarget, Source
from lightning_shardckpt.state.tensor_bytes import TORCH_DTYPES, bytes_of
from lightning_shardckpt.transfer.tensor_windows import windows

_WINDOW_BYTES = 8 << 20  # of each of two tensors


def are_equal(source: Source, component: str, keys: Sequence[str], like: torch.Tensor | None = None) -> bool:
    """Return whether stored tensors have the same dtype, shape and bytes.

    Args:
        source: where they are stored.
        component: which they are of.
        keys: their keys.
        like: a live tensor; if they have its shape, they are compared where this rank has a slice of it.

    Raises:
        CorruptionError: naming file, tensor and rank, where the format has checksums.
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
            target = ReadTarget(component, key, like, fresh=True, region=window, dtype=dtype)
            source.verify([target])
            source.fill([target])
            found = bytes_of(target.local)
            if first is not None and first != found:
                return False
            first = found
    return True
