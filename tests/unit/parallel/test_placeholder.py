"""A tensor without a value is told apart from a real one by nothing but its value.

Oracle: the same function on real tensors of the same shape, the original of a weightless copy, plain autograd.
"""

from __future__ import annotations

import operator
import pickle
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.pipeline.absent_parameters import copy_without_weights
from lightning_shardckpt.parallel.pipeline.placeholder import Placeholder, first_placeholder, in_stage_run

CPU = torch.device("cpu")
ORIGIN = "net.layers.3.weight"

Op = Callable[..., Any]


@pytest.fixture(autouse=True)
def _in_a_step() -> Iterator[None]:
    torch.manual_seed(0)
    with in_stage_run():
        yield


def unknown(*shape: int, dtype: torch.dtype = torch.float32) -> Placeholder:
    return Placeholder.of(torch.empty(shape, dtype=dtype, device="meta"), ORIGIN, CPU)


def as_unknown(value: Any) -> Any:
    return Placeholder.like(value, ORIGIN, CPU) if isinstance(value, Tensor) else value


def looks(value: Any) -> Any:
    """All that can be known of a value without its numbers."""

    def look(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return (tuple(leaf.shape), leaf.stride(), leaf.dtype, str(leaf.device), leaf.is_contiguous())
        return leaf

    return [look(leaf) for leaf in tree_leaves(value)]


X = (2, 3, 4)  # the shape of the first argument of all

OPS: dict[str, Op] = {
    "it plus real": lambda x: x + torch.ones(2, 1, 4, dtype=torch.float64),
    "real @ it": lambda x: torch.ones(5, 3) @ x,
    "a tensor of indices": lambda x: x[:, torch.tensor([2, 0, 1, 1])],
    "a real tensor by indices": lambda x: torch.ones(7, 2)[x.long()],
    "chunk": lambda x: x.chunk(2, -1),
    "iterate": list,
    "where": lambda x: torch.where(torch.ones(3, 1, dtype=torch.bool), x, 0.0),
    "masked_fill": lambda x: x.masked_fill(torch.ones(4, dtype=torch.bool), float("-inf")),
    "topk": lambda x: x.topk(2),
    "sdpa": lambda x: F.scaled_dot_product_attention(x, x, torch.ones(X), is_causal=True),
    "dropout": lambda x: F.dropout(x, 0.3),
    "one_hot": lambda x: F.one_hot(x.long(), 3),
    "to, by names": lambda x: x.to(device="cpu", dtype=torch.float64),
    "meshgrid": lambda x: torch.meshgrid(x[0, 0], torch.ones(2), indexing="ij"),
    "broadcast_tensors": lambda x: torch.broadcast_tensors(x, torch.ones(3, 1)),  # type: ignore[no-untyped-call]  # torch
    "np number": lambda x: np.float32(2) * x,
}


@pytest.mark.parametrize("name", OPS)
def test_a_result_differs_from_that_on_real_tensors_in_its_value_only(name: str) -> None:
    real, made = OPS[name](torch.rand(X)), OPS[name](unknown(*X))
    assert looks(made) == looks(real)
    assert type(made) is type(real) or isinstance(made, Placeholder)
    leaves = [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
    expected_known = {"broadcast_tensors": 1, "meshgrid": 0}.get(name, 0)
    assert sum(not isinstance(leaf, Placeholder) for leaf in leaves) <= expected_known
    assert all(leaf.origin == ORIGIN for leaf in leaves if isinstance(leaf, Placeholder))


VALUES: dict[str, Op] = {
    "if": lambda x: 1 if x.sum() > 0 else 2,
    "item": lambda x: x[0, 0, 0].item(),
    "range": lambda x: range(x.long().max()),
    "index a list": lambda x: [1, 2][x[0, 0, 0].long()],
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "format": lambda x: f"{x.mean():.3f}",
    "equal": lambda x: torch.equal(x, torch.ones(X)),
    "boolean mask": lambda x: torch.ones(X)[x > 0],
    "where": torch.where,
    "torch.tensor of a list": lambda x: torch.tensor([x.mean(), x.sum()]),
    "pickle": pickle.dumps,
}


@pytest.mark.parametrize("name", VALUES)
def test_asking_for_a_value_is_an_error_that_names_where_it_comes_from(name: str) -> None:
    with pytest.raises(UnsupportedCodeError, match=r"needs the value of net\.layers\.3\.weight") as caught:
        VALUES[name](unknown(*X))
    assert "Pipeline(modules=" in str(caught.value)


SILENT: dict[str, Op] = {
    "torch.tensor": torch.tensor,
    "full_like": lambda x: torch.full_like(x, x.sum()),
    "alpha": lambda x: torch.add(torch.ones(2), torch.ones(2), alpha=x.sum()),
    "vmap": lambda x: torch.vmap(lambda row: row * 2)(x),
    "jit": lambda x: torch.jit.script(_double)(x),
    "data": lambda x: _with_data(torch.zeros(X), x),
}


def _double(x: Tensor) -> Tensor:
    return x * 2


def _with_data(real: Tensor, x: Tensor) -> Tensor:
    real.data = x
    return real


@pytest.mark.parametrize("name", SILENT)
def test_no_way_around_torch_functions_gives_a_number_that_looks_right(name: str) -> None:
    try:
        with warnings.catch_warnings(action="ignore"):  # torch.tensor of a tensor is advised against
            made = SILENT[name](unknown(*X))
    except (UnsupportedCodeError, RuntimeError, TypeError):
        return
    assert isinstance(made, Placeholder) or bool(made.isnan().all())


def _set_slice(x: Tensor, u: Tensor) -> None:
    x[:, 1:] = u[:, 1:]


WRITES: dict[str, Op] = {
    "slice": _set_slice,
    "copy_": lambda x, u: x.copy_(u),
    "+=": operator.iadd,
    "masked_fill_": lambda x, u: x.masked_fill_(u > 0, 0),
    "out=": lambda x, u: torch.add(u, 1, out=x),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_fresh_tensor_that_something_unknown_is_written_into_is_unknown(name: str) -> None:
    x, before = torch.zeros(X), torch.zeros(X)
    WRITES[name](x, unknown(*X))
    assert isinstance(x, Placeholder)
    assert looks(x) == looks(before)
    with pytest.raises(UnsupportedCodeError, match=ORIGIN):
        x.sum().item()


ALIASES: dict[str, Op] = {
    "itself": lambda x: x,
    "a view": lambda x: x[:],
    "data": lambda x: x.data,
    "a detached tensor": lambda x: x.detach(),
}


@torch.no_grad()
@pytest.mark.parametrize("alias", ALIASES)
@pytest.mark.parametrize("name", WRITES)
def test_writing_into_a_parameter_or_an_alias_is_an_error_and_changes_nothing(name: str, alias: str) -> None:
    for x in (nn.Parameter(torch.zeros(X)), torch.zeros(X)):
        if alias != "itself" or isinstance(x, nn.Parameter):
            with pytest.raises(UnsupportedCodeError, match=rf"writes {ORIGIN}.*torch\.cat or torch\.where"):
                WRITES[name](ALIASES[alias](x), unknown(*X))
        assert torch.equal(x, torch.zeros(X)) and not isinstance(x, Placeholder)


def test_what_became_real_is_the_same_object_and_an_ordinary_tensor() -> None:
    for shape in ((2, 3), (), (0, 4)):
        x, value = unknown(*shape), torch.rand(shape)
        assert x.become(value, requires_grad=False) is None
        assert type(x) is Tensor and torch.equal(x, value) and vars(x) == {}
        assert x.is_leaf and not x.requires_grad
        assert torch.equal(pickle.loads(pickle.dumps(x)), value)


def _write(x: Tensor) -> Tensor:
    x[:, 0] = 3.0
    x += 1
    return x.sin()


_recomputed = partial(checkpoint, use_reentrant=False)

USES: dict[str, Op] = {
    "views": lambda x: x[:, :2].exp().sum() + x.t()[1],
    "written": _write,
    "checkpoints": lambda x: _recomputed(torch.sin, checkpoint(torch.exp, x, use_reentrant=True)) + x,
}


@pytest.mark.parametrize("name", USES)
def test_the_gradient_of_what_became_real_is_that_of_plain_autograd(name: str) -> None:
    value = torch.rand(3, 4, dtype=torch.float64)
    leaf: Any = torch.zeros(3, 4, dtype=torch.float64, requires_grad=True)
    plain = USES[name](leaf + value)  # not a leaf either, so that it may be changed in place
    weights = torch.rand(plain.shape, dtype=torch.float64)
    plain.backward(weights)

    x = unknown(3, 4, dtype=torch.float64)
    entry: Any = x.become(value.clone(), requires_grad=True)
    assert x.requires_grad
    result = USES[name](x)
    assert torch.equal(result, plain)
    assert not isinstance(entry.grad, Tensor)
    result.backward(weights)
    assert torch.equal(entry.grad, leaf.grad)


def test_what_was_done_in_place_before_does_not_stand_in_the_way() -> None:
    x: Any = unknown(2, 3)
    x += torch.ones(3, requires_grad=True)
    tainted: Any = torch.zeros(2, 3) * torch.ones(3, requires_grad=True)
    tainted.copy_(unknown(2, 3))
    for one in (x, tainted):
        assert type(one) is Placeholder
        entry: Any = one.become(torch.ones(2, 3), requires_grad=True)
        torch.autograd.backward(one * 2, torch.ones(2, 3))
        assert torch.equal(entry.grad, torch.full((2, 3), 2.0))


class Shared(nn.Module):
    """One weight under two names, a submodule under two, and an extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.out.weight = self.embed.weight
        self.again = self.embed
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("cache", torch.ones(4), persistent=False)

    def get_extra_state(self) -> Any:
        return {"calls": 1}

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        return {"logits": self.out(self.embed(tokens) * self.scale + self.cache), "again": self.again(tokens)}


MODULES: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "gru": (lambda: nn.GRU(8, 6, 2, batch_first=True, dropout=0.1), torch.rand(2, 5, 8)),
    "shared": (Shared, torch.randint(7, (2, 5))),
}


def versions(module: nn.Module) -> list[tuple[int, int]]:
    return [(id(tensor), tensor._version) for tensor in (*module.parameters(), *module.buffers())]


@pytest.mark.parametrize("name", MODULES)
def test_a_weightless_copy_returns_the_shapes_of_its_original(name: str) -> None:
    build, given = MODULES[name]
    module = build().train()
    before = versions(module)
    twin = copy_without_weights(module, "net.layer", CPU, {})
    assert isinstance(twin, type(module))
    assert not [*twin.parameters(), *twin.buffers(), *nn.ModuleList([twin]).state_dict()]
    with pytest.raises(UnsupportedCodeError, match=r"the state_dict of net\.layer was called"):
        twin.state_dict()
    assert [n for n, _ in twin.named_modules()] == [n for n, _ in module.named_modules()]
    assert versions(module) == before
    shapes = partial(tree_map, lambda t: (tuple(t.shape), t.dtype) if isinstance(t, Tensor) else t)
    expected, rng = shapes(module(given)), torch.get_rng_state()
    assert shapes(twin(given)) == shapes(twin(as_unknown(given))) == expected
    assert torch.equal(rng, torch.get_rng_state())  # for unknown tensors it draws nothing
    assert first_placeholder(twin(given)) is not None
