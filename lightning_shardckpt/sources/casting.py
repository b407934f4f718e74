"""Stored tensors in the dtype of the tensors that they are read into, through a bounded amount of memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from lightning_shardckpt.sources.source import ReadTarget
from lightning_shardckpt.sources.source_view import SourceView
from lightning_shardckpt.state.dtensor_layout import local_tensor, view_at
from lightning_shardckpt.state.tensor_bytes import TORCH_DTYPES
from lightning_shardckpt.transfer.tensor_windows import windows

_FLOATING = ("F64", "F32", "F16", "BF16")  # not F8: what those mean, other tensors say
_COMPLEX = ("C64", "C128")
_WINDOW_BYTES, _BATCH_BYTES = 8 << 20, 32 << 20  # of stored elements on their way to another dtype


def converts(stored: str, live: str | None) -> bool:
    """Return whether a tensor of one dtype may be loaded into one of another.

    >>> converts("BF16", "F32"), converts("I64", "I32"), converts("F8_E4M3", "BF16")
    (True, False, False)
    """
    return stored == live or any(stored in kind and live in kind for kind in (_FLOATING, _COMPLEX))


class CastingSource(SourceView):
    """Another source, whose tensors may be read into tensors of another dtype; it stays the caller's to close."""

    def verify(self, targets: list[ReadTarget]) -> int:
        """Verify all; what is to be converted is read for that alone, unless nobody minds what is in its memory."""
        same, converted = self._divided(targets)
        found = self._source.verify(same)
        for batch in self._batches([target for target in converted if not target.fresh]):
            found += self._source.verify(batch)
        return found

    def fill(self, targets: list[ReadTarget]) -> None:
        """Read into memory what keeps its dtype, and the rest through a bounded amount of it, verified once more."""
        same, converted = self._divided(targets)
        self._source.fill(same)
        for batch in self._batches(converted):
            self._source.verify(batch)
            self._source.fill(batch)
            for window in batch:
                assert window.region is not None
                view_at(local_tensor(window.tensor), window.region).copy_(window.local)

    def _stored(self, target: ReadTarget) -> torch.dtype:
        return TORCH_DTYPES[self.components()[target.component].tensors[target.key].dtype]

    def _divided(self, targets: list[ReadTarget]) -> tuple[list[ReadTarget], list[ReadTarget]]:
        """The targets that have the stored dtype, and those that have another one."""
        components = self.components()
        specs = {name: component.tensors for name, component in components.items()}
        converted = [t for t in targets if TORCH_DTYPES[specs[t.component][t.key].dtype] != t.local.dtype]
        if not converted:  # as nearly always
            return targets, []
        found = {id(target) for target in converted}
        return [target for target in targets if id(target) not in found], converted

    def _batches(self, targets: Sequence[ReadTarget]) -> Iterator[list[ReadTarget]]:
        """Windows of the targets, with memory of the stored dtype, not much of it at a time."""
        batch: list[ReadTarget] = []
        for target in targets:
            for window in self._windows(target):
                if batch and sum(t.local.nbytes for t in batch) + window.local.nbytes > _BATCH_BYTES:
                    yield batch
                    batch = []
                batch.append(window)
        if batch:
            yield batch

    def _windows(self, target: ReadTarget) -> Iterator[ReadTarget]:
        dtype = self._stored(target)
        corner = target.region.start if target.region is not None else (0,) * target.local.ndim
        for window in windows(tuple(target.local.shape), _WINDOW_BYTES // dtype.itemsize):
            yield ReadTarget(target.component, target.key, target.tensor, True, window.shift(corner), dtype=dtype)
