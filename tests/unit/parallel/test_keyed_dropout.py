"""Masks that are functions of places: their statistics, their parts, and what they depend on."""

from __future__ import annotations

import itertools
import math
import warnings

import pytest
import torch
from torch import Tensor, nn

from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.sharding.keyed_dropout import (
    DimPart,
    DropoutSettings,
    keep_mask,
    key_dropout,
    row_keys,
    unkey_dropout,
)
from lightning_shardckpt.parallel.sharding.sample_numbers import (
    SampleNumbers,
    for_samples,
    running_samples,
    split_running_samples,
)

CPU = torch.device("cpu")


def keys(rows: int, seed: int = 0, epoch: int = 0, fqn: str = "a.b", call: int = 1) -> Tensor:
    return row_keys(seed, SampleNumbers(epoch, torch.arange(rows)), fqn, call, CPU)


def mix(value: int) -> int:
    """The finalizer of splitmix64, in whole numbers of python."""
    mask = (1 << 64) - 1
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & mask
    return value ^ value >> 31


def kept_by_hand(key: int, place: int, p: float) -> bool:
    mask, golden = (1 << 64) - 1, 0x9E3779B97F4A7C15
    word = ((mix(((place + 1) * golden) & mask) ^ key) * 0xBF58476D1CE4E5B9) & mask
    word = ((word ^ word >> 32) * 0x94D049BB133111EB) & mask
    return (word - (1 << 64) if word >= 1 << 63 else word) >= int((p - 0.5) * 2.0**64)


def test_a_mask_is_that_of_whole_numbers_by_hand() -> None:
    found = keep_mask(keys(3), (2, 5), 0.3)
    for row, key in enumerate(keys(3).tolist()):
        by_hand = [kept_by_hand(key % (1 << 64), place, 0.3) for place in range(10)]
        assert found[row].flatten().tolist() == by_hand


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_elements_are_dropped_as_often_as_asked_and_independently(p: float) -> None:
    kept = keep_mask(keys(256), (64, 64), p).double().flatten(1)
    count, sigma = kept.numel(), math.sqrt(p * (1 - p))
    assert abs(kept.mean().item() - (1 - p)) <= 4.5 * sigma / math.sqrt(count)
    if sigma == 0:
        return
    normal = (kept - (1 - p)) / sigma
    for of_rows in (normal, normal.T):  # means of samples, and of places, spread as those of independent draws
        means = of_rows.mean(1) * math.sqrt(of_rows.shape[1])
        assert abs(means.std().item() - 1) < 5 / math.sqrt(2 * len(means))
    for lag in (1, 2, 3, 8, 63, 64, 65):  # neighbours, and those of the next row
        assert abs((normal[:, lag:] * normal[:, :-lag]).mean().item()) < 5 / math.sqrt(count)
    between = normal @ normal.T / normal.shape[1]
    between.fill_diagonal_(0)
    assert between.abs().max().item() < 6.5 / math.sqrt(normal.shape[1])


def test_a_mask_depends_on_all_that_keys_it_and_on_nothing_else() -> None:
    def mask(**changed: object) -> Tensor:
        return keep_mask(keys(8, **changed), (512,), 0.5)  # type: ignore[arg-type]

    every = [mask(), mask(seed=1), mask(epoch=1), mask(fqn="a.c"), mask(call=2)]
    for one, other in itertools.combinations(every, 2):
        assert abs((one == other).double().mean().item() - 0.5) < 0.05
    torch.manual_seed(3)
    assert torch.equal(mask(), every[0])
    many = keys(5000)
    assert torch.equal(keep_mask(many, (4096,), 0.5)[4096:], keep_mask(many[4096:], (4096,), 0.5))  # hashed in parts


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_part_of_a_dim_has_its_part_of_the_mask(dim: int) -> None:
    row = [4, 6, 8]
    whole = keep_mask(keys(3), row, 0.4)
    half = row[dim] // 2
    part = [*row[:dim], half, *row[dim + 1 :]]
    for start in (0, half):
        found = keep_mask(keys(3), part, 0.4, DimPart(dim, start, row[dim]))
        assert torch.equal(found, whole.narrow(dim + 1, start, half))


def keyed(module: nn.Module, dim: int = 0) -> nn.Module:
    key_dropout(module, DropoutSettings("drop", 0, dim))
    return module


def samples(*numbers: int) -> SampleNumbers:
    return SampleNumbers(0, torch.tensor(numbers))


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Dropout(0.5), (4, 3, 5)),
        (nn.Dropout(0.5), (4,)),
        (nn.Dropout1d(0.5), (4, 6, 5)),
        (nn.Dropout2d(0.5), (4, 6, 3, 5)),
        (nn.Dropout3d(0.5), (4, 6, 2, 3, 5)),
        (nn.Dropout(1.0), (4, 3)),
        (nn.Dropout(0.5, inplace=True), (4, 3)),
    ],
)
def test_what_is_kept_is_scaled_and_its_gradient_too(module: nn.Module, shape: tuple[int, ...]) -> None:
    x = torch.rand(shape, dtype=torch.float64) + 1
    leaf = x.clone().requires_grad_()
    with for_samples(samples(3, 1, 4, 15)):
        out = keyed(module)(leaf * 1)
    out.sum().backward()
    assert leaf.grad is not None
    p = float(module.p)  # type: ignore[arg-type]
    factor = out.detach() / x
    assert set(factor.flatten().tolist()) <= {0.0, 1 / (1 - p) if p < 1 else 0.0}
    assert torch.equal(leaf.grad, factor.round())
    if not isinstance(module, nn.Dropout):
        assert all(len(set(channel.flatten().tolist())) == 1 for row in factor for channel in row)


def test_samples_are_told_apart_by_number_wherever_they_are() -> None:
    module, x = keyed(nn.Dropout(0.5)), torch.ones(4, 32)
    with for_samples(samples(10, 11, 12, 13)):
        whole = module(x)
    with for_samples(samples(13, 11)):
        some = module(x[:2])
    assert torch.equal(some, whole[[3, 1]])
    with for_samples(samples(10, 11, 12, 13)):
        transposed = keyed(nn.Dropout(0.5), dim=1)(x.T)
    assert torch.equal(transposed.T, whole)


def test_without_samples_or_in_evaluation_it_is_the_dropout_of_torch() -> None:
    module, x = keyed(nn.Dropout(0.5)), torch.ones(4, 32)
    torch.manual_seed(1)
    found = module(x)
    torch.manual_seed(1)
    assert torch.equal(found, nn.functional.dropout(x, 0.5))
    with for_samples(samples(1, 2, 3, 4)):
        assert torch.equal(module.eval()(x), x)
    unkey_dropout(module)
    assert type(module) is nn.Dropout


def test_parts_of_a_batch_have_calls_of_their_own_and_one_division() -> None:
    assert running_samples() is None and split_running_samples([2, 2]) == [None, None]
    with for_samples(samples(5, 6, 7)):
        first, second = split_running_samples([2, 1])
        assert first is not None and second is not None
        assert (first.numbers.tolist(), second.numbers.tolist()) == ([5, 6], [7])
        with pytest.raises(UnsupportedCodeError, match="a second training step on one batch"):
            split_running_samples([3])


def test_a_tensor_of_other_samples_is_refused() -> None:
    said = r"shape \(6, 2\), but dim 0 should have the 3"
    with for_samples(samples(1, 2, 3)), pytest.raises(UnsupportedCodeError, match=said):
        keyed(nn.Dropout(0.5))(torch.ones(6, 2))


def test_compiled_code_around_a_keyed_dropout_computes_the_same() -> None:
    net = nn.Sequential(nn.Linear(4, 4), keyed(nn.Dropout(0.5)))
    x = torch.ones(3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(net, backend="eager")
        for numbers in ((1, 2, 3), (4, 5, 6)):
            with for_samples(samples(*numbers)):
                expected = net(x)
            with for_samples(samples(*numbers)):
                assert torch.equal(compiled(x), expected)
