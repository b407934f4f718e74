"""Digests of tensors change with any bit and with its place. Oracle: the change itself, made by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_shardckpt.parallel.sharding.consistency import fingerprint
from lightning_shardckpt.system.tensor_digest import bit_digest, byte_view, digest_values, keyed_sum

Digest = Callable[[Tensor], Tensor]


def on_an_accelerator(tensor: Tensor) -> Tensor:
    """Return the digest that a tensor would have there."""
    return keyed_sum(byte_view(tensor.resolve_conj().resolve_neg().contiguous()))


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.complex128, torch.int32, torch.uint8]
DTYPES += [torch.bool, torch.float8_e4m3fn]
SIZES = [0, 1, 3, 1_000, 100_003]


def drawn(size: int, dtype: torch.dtype, begin: int = 0) -> Tensor:
    """Random bits, of which the first few elements are left out."""
    generator = torch.Generator().manual_seed(size)
    some = torch.randint(256, ((size + begin) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return (some % 2 if dtype == torch.bool else some).view(dtype)[begin:]


@pytest.mark.parametrize("digest", [bit_digest, on_an_accelerator])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_byte_that_changes_anywhere_changes_the_digest(dtype: torch.dtype, digest: Digest) -> None:
    for begin in (0, 1, 3):
        for tensor in (drawn(size, dtype, begin) for size in SIZES):
            before = digest_values([digest(tensor), digest(tensor.clone())])
            assert before[0] == before[1]
            memory = tensor.view(torch.uint8)
            for at in {0, len(memory) // 2, len(memory) - 1} if len(memory) else ():
                memory[at] ^= 1
                assert int(digest(tensor)) != before[0]
                memory[at] ^= 1


@pytest.mark.parametrize("digest", [bit_digest, on_an_accelerator])
def test_equal_values_in_another_order_have_another_digest(digest: Digest) -> None:
    """The sums of words, of rows and of columns are the same, and those of words with the signs of two changed."""
    x, signs = torch.randn(3, 1 << 20), torch.ones(1 << 12)
    signs[[9, 19]] = -1  # each the upper half of a word of 64 bits
    others = [(x, x[[2, 0, 1]]), (x, x[:, torch.randperm(1 << 20)]), (torch.ones(1 << 12), signs)]
    others += [(torch.eye(4), torch.eye(4)[[1, 0, 3, 2]])]
    assert not any(torch.equal(digest(one), digest(other)) for one, other in others)


MEMORIES: list[Callable[[], Tensor]] = [
    lambda: torch.ones(1).expand(70_000),
    lambda: torch.ones(9, 9_000).T,
    lambda: torch.full((9_000,), 1 + 2j).conj(),
    lambda: torch.full((9_000,), 1 + 2j).conj().imag,
]


@pytest.mark.parametrize("memory_of", MEMORIES)
def test_a_tensor_in_any_memory_is_marked_by_its_values(memory_of: Callable[[], Tensor]) -> None:
    x = memory_of()
    copy = x.clone()
    assert digest_values([bit_digest(x), bit_digest(x[:3])]) == digest_values([bit_digest(copy), bit_digest(copy[:3])])
    assert not torch.equal(bit_digest(x), bit_digest(x + 1))
    assert fingerprint([x]) == fingerprint([x.clone()]) != fingerprint([x + 1])
