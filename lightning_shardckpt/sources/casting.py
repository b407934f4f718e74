"""Stored tensors in the dtype of the tensors that they are read into, through a bounded amount of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from lightning_shardckpt.index import Component
from lightning_shardckpt.sources import Source, Target
from lightning_shardckpt.staging import TORCH_DTYPES
from lightning_shardckpt.state.geometry import local_tensor, view_at
from lightning_shardckpt.whole import Tensors, windows

_FLOATING = ("F64", "F32", "F16", "BF16")  # not F8: what those mean, other tensors say
_COMPLEX = ("C64", "C128")
_WINDOW_BYTES, _BATCH_BYTES = 8 << 20, 32 << 20  # of stored elements on their way to another dtype


def converts(stored: str, live: str | None) -> bool:
    """Whether a tensor of one dtype may be loaded into one of another.

    >>> converts("BF16", "F32"), converts("I64", "I32"), converts("F8_E4M3", "BF16")
    (True, False, False)
    """
    return stored == live or any(stored in kind and live in kind for kind in (_FLOATING, _COMPLEX))


class CastingSource:
    """Another source, whose tensors may be read into tensors of another dtype; it stays the caller's to close."""

    def __init__(self, source: Source) -> None:
        self.path, self._source = source.path, source

    @property
    def tensors(self) -> Tensors:
        """As they are stored."""
        return self._source.tensors

    def close(self) -> None:
        """Nothing: what is stored is the caller's."""

    def components(self) -> Mapping[str, Component]:
        """As they are stored, in the stored dtypes."""
        return self._source.components()

    def document(self, role: str, rank: int = 0) -> Any:
        """As it is stored."""
        return self._source.document(role, rank)

    def trainer(self, stored: Callable[[str], torch.Tensor]) -> dict[str, Any]:
        """As it is stored."""
        return self._source.trainer(stored)

    def alike(self, names: Sequence[str]) -> bool:
        """Whether stored tensors are equal."""
        return self._source.alike(names)

    def backed(self, component: str, key: str) -> tuple[int, ...]:
        """The shape of a stored tensor."""
        return self._source.backed(component, key)

    def verify(self, targets: list[Target]) -> int:
        """Verify all; what is to be converted is read for that alone, unless nobody minds what is in its memory."""
        found = self._source.verify([target for target in targets if not self._is_converted(target)])
        for batch in self._batches([t for t in targets if self._is_converted(t) and not t.fresh]):
            found += self._source.verify(batch)
        return found

    def fill(self, targets: list[Target]) -> None:
        """Read into memory what keeps its dtype, and the rest through a bounded amount of it, verified once more."""
        self._source.fill([target for target in targets if not self._is_converted(target)])
        for batch in self._batches([t for t in targets if self._is_converted(t)]):
            self._source.verify(batch)
            self._source.fill(batch)
            for window in batch:
                assert window.region is not None
                view_at(local_tensor(window.tensor), window.region).copy_(window.local)

    def _stored(self, target: Target) -> torch.dtype:
        return TORCH_DTYPES[self.components()[target.component].tensors[target.key].dtype]

    def _is_converted(self, target: Target) -> bool:
        return self._stored(target) != target.local.dtype

    def _batches(self, targets: Sequence[Target]) -> Iterator[list[Target]]:
        """Windows of the targets, with memory of the stored dtype, not much of it at a time."""
        batch: list[Target] = []
        for target in targets:
            for window in self._windows(target):
                if batch and sum(t.local.nbytes for t in batch) + window.local.nbytes > _BATCH_BYTES:
                    yield batch
                    batch = []
                batch.append(window)
        if batch:
            yield batch

    def _windows(self, target: Target) -> Iterator[Target]:
        dtype = self._stored(target)
        corner = target.region.start if target.region is not None else (0,) * target.local.ndim
        for window in windows(tuple(target.local.shape), _WINDOW_BYTES // dtype.itemsize):
            yield Target(target.component, target.key, target.tensor, True, window.shift(corner), dtype=dtype)
