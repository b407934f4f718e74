"""A batch comes back whole from its microbatches, and a result from its parts. Oracles: `torch.cat`, slicing."""

from __future__ import annotations

import itertools
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.pipeline.microbatch import count_samples, join, slice_for_trial, split_batch


class Pair(NamedTuple):
    x: Tensor
    names: list[str]


@dataclass
class Derived:
    """Has a field that ``__init__`` doesn't take, and makes another one of the first."""

    x: Tensor
    scaled: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.x, self.scaled = self.x + 1, self.x * 2


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Tensor
    name: str


class Encoded(UserDict[str, Any]):
    """As the BatchEncoding of Hugging Face: a mapping that is no dict."""


def rows(samples: int, *shape: int) -> Tensor:
    return torch.arange(samples * int(np.prod(shape))).reshape(samples, *shape)


Part = Callable[[Any], Any]  # the same part of whatever there is once per sample
SCALAR, ROW = torch.tensor(3.0), rows(1, 5)
BATCHES: dict[str, Callable[[Part, int], Any]] = {
    "nested": lambda of, n: {"a": [of(rows(n, 2)), (of(rows(n)), {"b": of(rows(n, 1))})], "c": None},
    "namedtuple": lambda of, n: Pair(of(rows(n, 2)), of([f"name {i}" for i in range(n)])),
    "frozen dataclass": lambda of, n: Frozen(of(rows(n, 2)), "train"),
    "user dict": lambda of, n: Encoded(input_ids=of(rows(n, 4)), labels=of(rows(n))),
    "strings": lambda of, n: [of(rows(n, 2)), of([f"name {i}" if i % 2 else None for i in range(n)])],
    "other lists": lambda of, n: {"x": of(rows(n)), "sizes": [224, 224, 3, 1, 5, 6, 7, 8, 9], "pair": (1, 2, 3)},
    "numbers": lambda of, n: {"x": of(rows(n)), "0-dim": SCALAR, "kind": torch.float32, "flag": True},
    "one row": lambda of, n: {"x": of(rows(n, 2)), "positions": ROW},
}


def look(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, Frozen):
        return look((value.x, value.name))
    if isinstance(value, dict | UserDict):
        return {key: look(item) for key, item in value.items()}
    return [look(item) for item in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize(("samples", "count"), [(8, 2), (7, 4), (5, 5)])
@pytest.mark.parametrize("name", BATCHES)
def test_microbatches_hold_each_sample_once_and_in_order(name: str, samples: int, count: int) -> None:
    batch = BATCHES[name](lambda value: value, samples)
    parts, sizes = split_batch(batch, count)
    ends = [0, *itertools.accumulate(len(part) for part in np.array_split(np.arange(samples), count))]
    expected = [BATCHES[name](lambda v, a=a, b=b: v[a:b], samples) for a, b in itertools.pairwise(ends)]
    assert (count_samples(batch), sizes) == (samples, [b - a for a, b in itertools.pairwise(ends)])
    assert look(parts) == look(expected) and all(type(part) is type(batch) for part in parts)


def test_a_dataclass_with_a_derived_field_stays_what_it_is() -> None:
    derived = Derived(rows(4, 2))
    (first, _), _ = split_batch(derived, 2)
    assert torch.equal(first.x, derived.x[:2]) and torch.equal(first.scaled, derived.scaled[:2])


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (rows(4, 2), r"first dims.*differ.*8.*batch\['more'\]\[0\]\".*4.*Pipeline\(microbatches=1\)"),
        (np.ones(8), r"batch\['more'\]\[0\] is a ndarray"),
        (object(), r"batch\['more'\]\[0\] is a object"),
        (torch.nested.nested_tensor([torch.ones(2)] * 8, layout=torch.jagged), r"\['more'\]\[0\] is a NestedTensor"),
    ],
    ids=["lengths", "ndarray", "object", "nested"],
)
def test_what_cannot_be_split_is_an_error_that_says_where_it_is(more: Any, said: str) -> None:
    with pytest.raises(UnsupportedCodeError, match=f"(?s){said}"):
        count_samples(batch := {"x": rows(8), "more": [more]})
        split_batch(batch, 2)


@pytest.mark.parametrize("sizes", [(4, 4), (3, 2, 2), (1, 1), (1,), (2, 0, 1)])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_parts_are_joined_along_the_dim_that_makes_the_known_shape(dim: int, sizes: tuple[int, ...]) -> None:
    """Also where other dims are as large as parts are: only one dim can add up. Gradients are those of a cat."""
    for other in (1, 2, 4, sum(sizes)):
        parts = [torch.rand([other] * dim + [size] + [other] * (2 - dim), requires_grad=True) for size in sizes]
        whole = torch.cat(parts, dim)
        weights = torch.rand(whole.shape)
        joined = join(parts, whole.shape, "x")
        assert torch.equal(joined.whole, whole) and joined.requires_grad and not joined.whole.requires_grad
        expected, found = torch.autograd.grad(whole, parts, weights), joined.split(weights, len(parts))
        assert all(a is not None and torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert list(joined.split(None, len(parts))) == [None] * len(parts)


@pytest.mark.parametrize("whole", [(8, 5), (8, 3, 1), (7, 3), (4, 3)])
def test_parts_that_make_no_whole_are_an_error_with_their_shapes(whole: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedCodeError, match=r"tensor 1 of head cannot be joined.*Pipeline\(loss=") as caught:
        join([torch.rand(4, 3), torch.rand(4, 3)], whole, "tensor 1 of head")
    assert str([(4, 3), (4, 3)]) in str(caught.value) and str(whole) in str(caught.value)


def test_a_part_for_a_trial_has_other_places_and_an_even_size_and_is_no_middle() -> None:
    for samples, count in itertools.product(range(2, 40), range(2, 9)):
        (whole, part), (most, start, stop) = slice_for_trial(torch.arange(samples), count)
        assert torch.equal(part, whole[start:stop]) and len(whole) == most == min(samples, max(6, samples // count))
        assert 1 <= start < stop <= most and start != most - stop
        assert (stop - start) % 2 == 0 or most == 2
