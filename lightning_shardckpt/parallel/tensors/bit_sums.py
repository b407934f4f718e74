"""Sums over the bits of tensors, which change when values do. As fast as memory is read."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

_WORD = 8  # bytes
_ROW = 1021  # words; odd, so that the signs of a row of float64 that is negated don't cancel
_SMALL = 1 << 16  # bytes; of smaller tensors all are kept


def row_sums(tensor: Tensor) -> Tensor:
    """Sum rows of 8 KB of a tensor, as integers that wrap around; what is left is as it is.

    One element that changes always shows, and so does a tensor that is scaled, clamped, filled, negated or rolled. An
    order that changes within a row does not.

    Returns:
        Int64, 1-D: a number for each row, and a few thousand at most of what is left.
    """
    rows, rest = _rows(tensor)
    return torch.cat([rows.sum(1), *rest])


def row_and_column_sums(tensor: Tensor) -> Tensor:
    """The same with the sums of columns over these rows, so that an order that changes within a row shows, too."""
    rows, rest = _rows(tensor)
    return torch.cat([rows.sum(1), rows.sum(0), *rest] if len(rows) else rest)


class Marks:
    """Marks of tensors, by which changes of their values are found.

    Args:
        tensors: plain ones, on one device.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._small = [n for n, tensor in enumerate(tensors) if tensor.nbytes <= _SMALL]
        self._large = [n for n, tensor in enumerate(tensors) if tensor.nbytes > _SMALL]
        self._parts = _joined([_bytes(tensors[n]) for n in self._small])
        self._sums = _joined([row_sums(tensors[n]) for n in self._large])

    def changed(self, now: Marks) -> list[int]:
        """The positions of the tensors whose values are others now, when the same tensors were marked again."""
        found = _differing(self._parts, now._parts, self._small) + _differing(self._sums, now._sums, self._large)
        return sorted(found)


_Joined = tuple[Tensor, list[int]]
"""Vectors one after another, and their lengths."""


def _joined(vectors: list[Tensor]) -> _Joined:
    return (torch.cat(vectors) if vectors else torch.empty(0)), [len(vector) for vector in vectors]


def _differing(before: _Joined, now: _Joined, numbers: list[int]) -> list[int]:
    (old, lengths), (new, new_lengths) = before, now
    if lengths == new_lengths and torch.equal(old, new):
        return []
    if lengths != new_lengths:
        return [n for n, a, b in zip(numbers, lengths, new_lengths, strict=True) if a != b]
    differs, ends = old != new, pairwise(accumulate(lengths, initial=0))
    return [n for n, (begin, end) in zip(numbers, ends, strict=True) if differs[begin:end].any()]


def _rows(tensor: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Words of a tensor in whole rows, and what they leave."""
    flat = _bytes(tensor)
    if flat.storage_offset() % _WORD:
        flat = flat.clone()
    count = len(flat) // _WORD
    words, end = flat[: count * _WORD].view(torch.int64), flat[count * _WORD :]
    whole = count // _ROW * _ROW
    return words[:whole].view(-1, _ROW), [words[whole:], *([end.to(torch.int64)] if len(end) else [])]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
