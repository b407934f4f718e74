"""Many tensors are copied as `Tensor.copy_` copies each, as `compat.copies` does it."""

from __future__ import annotations

import pytest
import torch

from lightning_shardckpt.compat.copies import copy_each


def test_each_copy_is_filled_as_torch_fills_one() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    tensors = [
        base.t(),
        base[:, 1::2],
        torch.tensor(3, dtype=torch.int16),
        torch.empty(0, 5),
        torch.tensor([1 + 2j, 3 - 1j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
        base.to(torch.float8_e4m3fn),
    ]
    copies = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
    copy_each(tensors, copies, non_blocking=False)
    for tensor, copy in zip(tensors, copies, strict=True):
        assert copy.is_contiguous() and not copy.is_conj() and not copy.is_neg()
        assert copy.tolist() == tensor.tolist()


def test_nothing_is_copied_of_nothing() -> None:
    copy_each([], [], non_blocking=True)


def test_lists_of_two_lengths_are_refused() -> None:
    with pytest.raises(RuntimeError):
        copy_each([torch.ones(1)], [torch.ones(1), torch.ones(1)], non_blocking=False)
