"""A batch comes back whole from its microbatches, and a result from its parts. Oracles: `torch.cat`, slicing."""

from __future__ import annotations

import itertools
from collections import OrderedDict, UserDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.pipeline.microbatch import (
    copy_batch,
    count_samples,
    join,
    slice_for_trial,
    split_batch,
)


class Pair(NamedTuple):
    x: Tensor
    names: list[str]


@dataclass
class Record:
    x: Tensor
    more: dict[str, Tensor]
    scale: float = 2.0


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


def rows(samples: int, *shape: int, start: int = 0) -> Tensor:
    count = samples * int(np.prod(shape))
    return torch.arange(start, start + count).reshape(samples, *shape)


BATCHES: dict[str, Any] = {
    "tensor": lambda n: rows(n, 3),
    "dict": lambda n: {"x": rows(n, 2, 2), "y": rows(n)},
    "nested": lambda n: {"a": [rows(n, 2), (rows(n), {"b": rows(n, 1)})], "c": None},
    "namedtuple": lambda n: Pair(rows(n, 2), [f"name {i}" for i in range(n)]),
    "dataclass": lambda n: Record(rows(n, 2), {"y": rows(n)}),
    "frozen dataclass": lambda n: Frozen(rows(n, 2), "train"),
    "user dict": lambda n: Encoded(input_ids=rows(n, 4), labels=rows(n)),
    "ordered": lambda n: OrderedDict(z=rows(n), a=rows(n, 2)),
    "strings": lambda n: [rows(n, 2), [f"name {i}" for i in range(n)], tuple(range(n))],
    "other lists": lambda n: {"x": rows(n), "sizes": [224, 224, 3, 1, 5, 6, 7, 8, 9], "note": "n", "pair": (1, 2, 3)},
    "numbers": lambda n: {"x": rows(n), "0-dim": torch.tensor(3.0), "kind": torch.float32, "flag": True},
    "one row": lambda n: {"x": rows(n, 2), "positions": rows(1, 5)},
}
COUNTS = [(8, 1), (8, 2), (8, 3), (7, 4), (5, 5), (1, 1)]


def cat(parts: list[Any], whole: Any, samples: int) -> Any:
    """The inverse, written for tests: joins what is there once per sample, and checks that the rest is the whole's."""
    if isinstance(whole, Tensor):
        if whole.ndim and whole.shape[0] == samples and (samples > 1 or len(parts) == 1):
            return torch.cat(parts)
        assert all(part is whole for part in parts)
        return whole
    if isinstance(whole, list | tuple) and len(whole) == samples and all(isinstance(v, str | int) for v in whole):
        return list(itertools.chain(*parts))
    return None


def leaves(value: Any) -> list[Any]:
    if isinstance(value, Record | Frozen):
        value = (
            {name: getattr(value, name) for name in type(value).__slots__}
            if hasattr(value, "__slots__")
            else vars(value)
        )
    if isinstance(value, UserDict):
        value = dict(value)
    found: list[Any] = []
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]:
        if isinstance(item, dict | tuple) or (isinstance(item, list) and not isinstance(item[0], str | int)):
            found += [item] if isinstance(item, tuple) and isinstance(item[0], int) else leaves(item)
        else:
            found.append(item)
    return found


@pytest.mark.parametrize(("samples", "count"), COUNTS)
@pytest.mark.parametrize("name", BATCHES)
def test_microbatches_hold_each_sample_once_and_in_order(name: str, samples: int, count: int) -> None:
    batch = BATCHES[name](samples)
    assert count_samples(batch) == samples or samples == 1
    parts, sizes = split_batch(batch, count)
    if count == 1:
        assert parts[0] is batch
        return
    # as numpy splits, whose sizes differ by one at most, larger ones first
    assert sizes == [len(part) for part in np.array_split(np.arange(samples), count)]
    assert all(type(part) is type(batch) for part in parts)
    whole, split = leaves(batch), [leaves(part) for part in parts]
    assert all(len(part) == len(whole) for part in split)
    for position, item in enumerate(whole):
        these = [part[position] for part in split]
        if isinstance(item, Tensor):
            assert torch.equal(cat(these, item, samples), item)
            continue
        joined = cat(these, item, samples)
        assert joined == list(item) if joined is not None else all(one == item for one in these)


def test_a_batch_encoding_of_hugging_face_stays_one() -> None:
    from transformers import BatchEncoding

    batch = BatchEncoding({"input_ids": rows(4, 3), "attention_mask": rows(4, 3)})
    parts, sizes = split_batch(batch, 2)
    assert sizes == [2, 2]
    assert [type(part) for part in parts] == [BatchEncoding] * 2
    for key, value in batch.items():
        assert torch.equal(torch.cat([part[key] for part in parts]), value)


def test_microbatches_are_views_of_the_batch() -> None:
    batch = {"x": torch.zeros(4, 2)}
    parts, _ = split_batch(batch, 2)
    assert all(part["x"]._base is batch["x"] for part in parts)


def test_what_has_no_tensors_counts_as_one_sample() -> None:
    for batch in (None, 3, "a", {"n": 1}, torch.tensor(2.0), [torch.ones(1, 3)]):
        assert count_samples(batch) == 1
        assert split_batch(batch, 1) == ([batch], [1])


def test_tensors_that_disagree_are_an_error_that_lists_them() -> None:
    batch = {"x": rows(8, 2), "y": [rows(8), rows(4, 2)]}
    message = r"batch\['x'\]': 8.*batch\['y'\]\[1\]\": 4.*Pipeline\(microbatches=1\)"
    with pytest.raises(UnsupportedCodeError, match=r"first dims.*differ.*8.*4.*Pipeline\(microbatches=1\)") as caught:
        count_samples(batch)
    assert "batch['y'][1]" in str(caught.value), message


@pytest.mark.parametrize(
    ("value", "what"), [(np.ones(4), "ndarray"), ({1, 2}, "set"), (object(), "object"), (iter([]), "list_iterator")]
)
def test_what_cannot_be_split_is_an_error_that_says_where_it_is(value: Any, what: str) -> None:
    with pytest.raises(UnsupportedCodeError, match=rf"batch\['more'\]\[1\] is a {what}"):
        split_batch({"x": rows(4), "more": [1, value]}, 2)


class Strict(dict[str, Any]):
    def __init__(self, *, size: int) -> None:
        super().__init__(x=rows(size))


def test_a_mapping_that_cannot_be_made_from_a_dict_is_an_error() -> None:
    with pytest.raises(UnsupportedCodeError, match="Strict cannot be made from a dict"):
        split_batch(Strict(size=4), 2)


def test_a_named_tuple_of_numbers_is_not_mistaken_for_one_number_per_sample() -> None:
    class Size(NamedTuple):
        height: int
        width: int

    parts, _ = split_batch({"x": rows(2, 3), "size": Size(4, 5)}, 2)
    assert [part["size"] for part in parts] == [Size(4, 5)] * 2


def test_a_list_with_gaps_is_split_like_one_without() -> None:
    parts, _ = split_batch({"x": rows(4), "names": ["a", None, "c", None]}, 2)
    assert [part["names"] for part in parts] == [["a", None], ["c", None]]


# ── joining ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("sizes", [(4, 4), (2, 2), (3, 2, 2), (1, 1), (1,), (2, 1, 1, 1)])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_parts_are_joined_along_the_dim_that_makes_the_known_shape(dim: int, sizes: tuple[int, ...]) -> None:
    """Also where other dims are as large as parts are: only one dim can add up."""
    for other in (1, 2, 4, sum(sizes)):
        shapes = [[other] * dim + [size] + [other] * (2 - dim) for size in sizes]
        parts = [torch.rand(shape) for shape in shapes]
        whole = torch.cat(parts, dim)
        joined = join(parts, whole.shape, "x")
        assert torch.equal(joined.whole, whole)
        if len(parts) > 1:
            assert joined.dim == dim


@pytest.mark.parametrize(
    ("shapes", "whole", "dim"),
    [
        ([(4, 4), (4, 4)], (8, 4), 0),
        ([(4, 4), (4, 4)], (4, 8), 1),
        ([(2, 2), (2, 2)], (4, 2), 0),
        ([(2,), (1,)], (3,), 0),
        ([(0, 3), (2, 3)], (2, 3), 0),
        ([(2, 0), (2, 0)], (4, 0), 0),
    ],
)
def test_the_dim_is_told_by_the_shape(shapes: list[tuple[int, ...]], whole: tuple[int, ...], dim: int) -> None:
    parts = [torch.rand(shape) for shape in shapes]
    joined = join(parts, whole, "x")
    assert joined.dim == dim
    assert torch.equal(joined.whole, torch.cat(parts, dim))
    # brute force: no other dim would do
    fitting = []
    for other in range(len(whole)):
        try:
            fitting += [other] if torch.cat(parts, other).shape == whole else []
        except RuntimeError:
            continue
    assert fitting == [dim]


@pytest.mark.parametrize(
    ("shapes", "whole"),
    [
        ([(), ()], ()),  # a mean over samples, say
        ([(1, 3), (1, 3)], (1, 3)),
        ([(4, 3), (4, 5)], (8, 5)),
        ([(4, 3), (4, 3)], (8, 3, 1)),
        ([(4, 3), (4, 3)], (7, 3)),
        ([(6,), (6,)], (6,)),
    ],
)
def test_parts_that_make_no_whole_are_an_error_with_their_shapes(shapes: list[Any], whole: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedCodeError, match=r"tensor 1 of head cannot be joined.*Pipeline\(loss=") as caught:
        join([torch.rand(shape) for shape in shapes], whole, "tensor 1 of head")
    assert str(shapes) in str(caught.value)
    assert str(whole) in str(caught.value)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("sizes", [(4,), (2, 2), (3, 2, 1)])
def test_gradients_come_back_as_autograd_of_cat_makes_them(dim: int, sizes: tuple[int, ...]) -> None:
    parts = [torch.rand((3, size) if dim else (size, 3), requires_grad=True) for size in sizes]
    oracle = torch.cat(parts, dim)
    weights = torch.rand(oracle.shape)
    expected = torch.autograd.grad(oracle, parts, weights)
    joined = join(parts, oracle.shape, "x")
    assert joined.requires_grad
    assert not joined.whole.requires_grad
    found = joined.split(weights)
    assert len(found) == len(expected)
    assert all(a is not None and torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert list(joined.split(None)) == [None] * len(parts)


def test_a_whole_requires_gradients_if_one_part_does() -> None:
    a, b = torch.rand(2), torch.rand(2, requires_grad=True)
    assert join([a, b], (4,), "x").requires_grad
    assert not join([a, a], (4,), "x").requires_grad
    assert len(tree_leaves(join([a, a], (4,), "x").split(torch.ones(4)))) == 2


def test_nested_tensors_are_refused_by_their_place() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    with pytest.raises(UnsupportedCodeError, match=r"batch\['x'\] is a NestedTensor"):
        split_batch({"x": nested, "y": torch.ones(2)}, 2)


def test_a_part_for_a_trial_has_other_places_and_an_even_size_and_is_no_middle() -> None:
    for samples, count in itertools.product(range(2, 40), range(2, 9)):
        (whole, part), (most, start, stop) = slice_for_trial(torch.arange(samples), count)
        assert torch.equal(part, whole[start:stop]) and len(whole) == most == min(samples, max(6, samples // count))
        assert 1 <= start < stop <= most
        assert (stop - start) % 2 == 0 or most == 2
        assert start != most - stop


def test_a_dataclass_keeps_what_it_was_given() -> None:
    batch = Derived(rows(4, 2))
    assert torch.equal(copy_batch(batch).x, batch.x) and copy_batch(batch).x is not batch.x
    (first, _), _ = split_batch(batch, 2)
    assert torch.equal(first.x, batch.x[:2]) and torch.equal(first.scaled, batch.scaled[:2])
