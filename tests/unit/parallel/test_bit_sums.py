"""Marks of tensors change with any value. Oracle: the change itself, made by hand."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_shardckpt.parallel.sharding.consistency import fingerprint
from lightning_shardckpt.parallel.tensors.bit_sums import Marks, row_and_column_sums

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.complex128, torch.int32, torch.uint8]
DTYPES += [torch.bool, torch.float8_e4m3fn]
SIZES = [0, 1, 3, 1_000, 100_003]
CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "filled": lambda x: x.fill_(1),
    "negated": lambda x: x.neg_(),
    "scaled": lambda x: x.mul_(2),
    "clamped": lambda x: x.clamp_(-1, 1),
    "rolled": lambda x: x.copy_(x.roll(1)),
    "one bit more": lambda x: x[77_777:77_778].copy_(torch.nextafter(x[77_777], torch.tensor(9e9, dtype=x.dtype))),
}


def drawn(size: int, dtype: torch.dtype, begin: int = 0) -> Tensor:
    """Random bits, of which the first few elements are left out."""
    generator = torch.Generator().manual_seed(size)
    some = torch.randint(256, ((size + begin) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return (some % 2 if dtype == torch.bool else some).view(dtype)[begin:]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_byte_that_changes_anywhere_shows_in_its_tensor_alone(dtype: torch.dtype) -> None:
    for begin in (0, 1, 3):
        tensors = [drawn(size, dtype, begin) for size in SIZES]
        before = Marks(tensors)
        assert before.changed(Marks([tensor.clone() for tensor in tensors])) == []
        for number, tensor in enumerate(tensors):
            memory = tensor.view(torch.uint8)
            for at in {0, len(memory) // 2, len(memory) - 1} if len(memory) else ():
                memory[at] ^= 1
                assert before.changed(Marks(tensors)) == [number]
                memory[at] ^= 1


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("drawn_from", [torch.zeros, torch.randn])
def test_a_change_of_all_elements_shows(change: str, dtype: torch.dtype, drawn_from: Callable[..., Tensor]) -> None:
    x = drawn_from(1 << 17, dtype=dtype)
    before, old = Marks([x]), x.clone()
    CHANGES[change](x)
    assert before.changed(Marks([x])) == ([] if torch.equal(x.view(torch.uint8), old.view(torch.uint8)) else [0])


MEMORIES: list[Callable[[], Tensor]] = [
    lambda: torch.ones(1).expand(70_000),
    lambda: torch.ones(9, 9_000).T,
    lambda: torch.full((9_000,), 1 + 2j).conj(),
    lambda: torch.full((9_000,), 1 + 2j).conj().imag,
]


@pytest.mark.parametrize("memory_of", MEMORIES)
def test_a_tensor_in_any_memory_is_marked_by_its_values(memory_of: Callable[[], Tensor]) -> None:
    x = memory_of()
    assert Marks([x, x[:3]]).changed(Marks([x.clone(), x[:3].clone()])) == []
    assert Marks([x, x[:3]]).changed(Marks([x.clone(), x[:3] + 1])) == [1]
    assert fingerprint([x]) == fingerprint([x.clone()]) != fingerprint([x + 1])


def test_a_tensor_of_another_size_has_changed() -> None:
    assert Marks([torch.zeros(5), torch.zeros(1 << 17)]).changed(Marks([torch.zeros(6), torch.zeros(1 << 17)])) == [0]


@pytest.mark.parametrize("size", [64, 1 << 17])
def test_another_order_is_another_batch(size: int) -> None:
    x = drawn(size, torch.float32)
    for y in (x.roll(2), x.flip(0), torch.cat([x[2:4], x[:2], x[4:]])):
        assert fingerprint([x]) != fingerprint([y])
        assert not torch.equal(row_and_column_sums(x), row_and_column_sums(y))
    assert fingerprint([x]) == fingerprint([x.clone()])


def kinds_of(x: torch.Tensor) -> list[torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, that some of this may change
        nested = [torch.nested.nested_tensor([x[0], x[1, :2]], layout=kind) for kind in (torch.strided, torch.jagged)]
        return [x.to_sparse(), x.to_sparse_csr(), x.to_sparse_csc(), *nested]


@pytest.mark.parametrize("kind", range(5))
def test_sparse_and_nested_tensors_are_compared_by_what_they_hold(kind: int) -> None:
    x = torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, 0.0]])
    same, other, elsewhere = (kinds_of(y)[kind] for y in (x.clone(), x * 2, x.flip(1)))
    assert fingerprint([kinds_of(x)[kind]]) == fingerprint([same])
    assert len({fingerprint([y]) for y in (same, other, elsewhere)}) == 3
