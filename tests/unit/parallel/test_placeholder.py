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
from lightning_shardckpt.parallel.pipeline.placeholder import (
    Placeholder,
    first_placeholder,
    in_stage_run,
)

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


# ── functions ───────────────────────────────────────────────────────────────────────────────────────────────────────

X = (2, 3, 4)  # the shape of the first argument of all

OPS: dict[str, Op] = {
    "real plus it": lambda x: torch.ones(3, 1) + x,
    "it plus real": lambda x: x + torch.ones(2, 1, 4, dtype=torch.float64),
    "real @ it": lambda x: torch.ones(5, 3) @ x,
    "power": lambda x: 2.0**x,
    "compare": lambda x: x > torch.zeros(4),
    "view": lambda x: x.view(6, 4),
    "transpose": lambda x: x.transpose(1, 2),
    "slices": lambda x: x[:, 1:, ::2],
    "indices and None": lambda x: x[..., None, -1],
    "a tensor of indices": lambda x: x[:, torch.tensor([2, 0, 1, 1])],
    "a real tensor by indices": lambda x: torch.ones(7, 2)[x.long()],
    "expand": lambda x: x[:, :1].expand(2, 5, 4),
    "chunk": lambda x: x.chunk(2, -1),
    "iterate": list,
    "repeat_interleave": lambda x: x.repeat_interleave(3, 1),
    "unfold": lambda x: x.unfold(2, 2, 1),
    "cat": lambda x: torch.cat([x, torch.ones(2, 1, 4)], 1),
    "stack": lambda x: torch.stack([x, x, torch.ones(X)], -1),
    "where": lambda x: torch.where(torch.ones(3, 1, dtype=torch.bool), x, 0.0),
    "masked_fill": lambda x: x.masked_fill(torch.ones(4, dtype=torch.bool), float("-inf")),
    "gather": lambda x: x.gather(2, torch.zeros(2, 3, 2, dtype=torch.int64)),
    "scatter": lambda x: x.scatter(2, torch.zeros(2, 3, 1, dtype=torch.int64), 1.0),
    "topk": lambda x: x.topk(2),
    "argmax": lambda x: x.argmax(-1),
    "max of a dim": lambda x: x.max(1),
    "sum": lambda x: x.sum(),
    "logsumexp": lambda x: x.logsumexp(-1),
    "cumsum of bools": lambda x: (x > 0).cumsum(1),
    "softmax": lambda x: x.softmax(-1, dtype=torch.float64),
    "einsum": lambda x: torch.einsum("bij,jk->bik", x, torch.ones(4, 5)),
    "sdpa": lambda x: F.scaled_dot_product_attention(x, x, torch.ones(X), is_causal=True),
    "linear": lambda x: F.linear(x, torch.ones(5, 4), torch.ones(5)),
    "layer_norm": lambda x: F.layer_norm(x, (4,), torch.ones(4)),
    "conv1d": lambda x: F.conv1d(x, torch.ones(5, 3, 3), padding=1, stride=2),
    "interpolate": lambda x: F.interpolate(x, scale_factor=2.0, mode="linear", align_corners=False),
    "dropout": lambda x: F.dropout(x, 0.3),
    "cross_entropy": lambda x: F.cross_entropy(x.flatten(0, 1), torch.zeros(6, dtype=torch.int64), reduction="none"),
    "embedding": lambda x: F.embedding(x.long(), torch.ones(7, 5)),
    "one_hot": lambda x: F.one_hot(x.long(), 3),
    "to a dtype": lambda x: x.to(torch.float16),
    "to, by names": lambda x: x.to(device="cpu", dtype=torch.float64),
    "to like another": lambda x: x.to(torch.ones(1, dtype=torch.float64)),
    "detach": lambda x: x.detach(),
    "clone": lambda x: x.transpose(0, 1).clone(),
    "complex": lambda x: torch.view_as_complex(x.view(2, 3, 2, 2)),
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


IN_PLACE: dict[str, Op] = {
    "+=": operator.iadd,
    "add_": lambda x, y: x.add_(y),
    "copy_": lambda x, y: x.copy_(y),
    "relu_": lambda x, y: F.relu(x, inplace=True),
    "masked_fill_": lambda x, y: x.masked_fill_(torch.ones(4, dtype=torch.bool), 0.0),
    "index_add_": lambda x, y: x.index_add_(1, torch.tensor([0, 2]), y[:, :2]),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_what_works_in_place_returns_the_tensor_itself(name: str) -> None:
    for known in (True, False):
        x, y = unknown(*X), torch.rand(X) if known else unknown(*X)
        assert IN_PLACE[name](x, y) is x
    real = torch.rand(X)
    assert IN_PLACE[name](real, torch.rand(X)) is real  # the oracle
    assert looks(x) == looks(real)


def test_a_module_of_known_weights_makes_unknown_of_unknown() -> None:
    assert looks(nn.Linear(4, 7)(unknown(*X))) == looks(nn.Linear(4, 7)(torch.rand(X)).detach())
    assert isinstance(nn.MultiheadAttention(4, 2, batch_first=True)(*[unknown(*X)] * 3)[0], Placeholder)


# ── values ──────────────────────────────────────────────────────────────────────────────────────────────────────────


VALUES: dict[str, Op] = {
    "bool": bool,
    "if": lambda x: 1 if x.sum() > 0 else 2,
    "assert all": lambda x: torch.isfinite(x).all() or 1,
    "item": lambda x: x[0, 0, 0].item(),
    "float": lambda x: float(x.mean()),
    "range": lambda x: range(x.long().max()),
    "index a list": lambda x: [1, 2][x[0, 0, 0].long()],
    "a slice's bound": lambda x: torch.ones(4)[: x[0, 0, 0].long()],
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "np.asarray": np.asarray,
    "max": lambda x: max(x.flatten()),
    "format": lambda x: f"{x.mean():.3f}",
    "in it": lambda x: 1.0 in x,
    "equal": lambda x: torch.equal(x, torch.ones(X)),
    "is_nonzero": lambda x: torch.is_nonzero(x.sum()),
    "boolean mask": lambda x: torch.ones(X)[x > 0],
    "nonzero": lambda x: x.nonzero(),
    "where": torch.where,
    "repeat_interleave": lambda x: torch.ones(2).repeat_interleave(x[:, 0, 0].long()),
    "one_hot": lambda x: F.one_hot(x.long()),
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
    "torch.Tensor": torch.Tensor,
    "new_tensor": lambda x: torch.ones(1).new_tensor(x),
    "new_tensor of unknown": lambda x: x.new_tensor(x),
    "full": lambda x: torch.full((2,), x.sum()),
    "full_like": lambda x: torch.full_like(x, x.sum()),
    "new_full": lambda x: x.new_full((2,), x.sum()),
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


# ── writing into real tensors ───────────────────────────────────────────────────────────────────────────────────────


def _set_slice(x: Tensor, u: Tensor) -> None:
    x[:, 1:] = u[:, 1:]


WRITES: dict[str, Op] = {
    "slice": _set_slice,
    "index": lambda x, u: operator.setitem(x, 0, u[0]),
    "copy_": lambda x, u: x.copy_(u),
    "+=": operator.iadd,
    "add_": lambda x, u: x.add_(u),
    "fill_": lambda x, u: x.fill_(u.sum()),
    "masked_fill_": lambda x, u: x.masked_fill_(u > 0, 0),
    "scatter_": lambda x, u: x.scatter_(0, torch.zeros(X, dtype=torch.int64), u),
    "index_add_": lambda x, u: x.index_add_(0, torch.tensor([0, 1]), u),
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


REFUSED: dict[str, Op] = {
    "parameter": lambda: nn.Parameter(torch.zeros(X)),
    "view": lambda: torch.zeros(3, *X)[1],
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("name", WRITES)
def test_writing_into_a_view_or_a_parameter_is_an_error_and_changes_nothing(name: str, what: str) -> None:
    with torch.no_grad():
        x = REFUSED[what]()
        kind = type(x)
        with pytest.raises(UnsupportedCodeError, match=rf"writes {ORIGIN}.*torch\.cat or torch\.where"):
            WRITES[name](x, unknown(*X))
    assert type(x) is kind
    assert torch.equal(x, torch.zeros(X))


def _data(x: Tensor) -> Tensor:
    return x.data


def _detached(x: Tensor) -> Tensor:
    return x.detach()


@pytest.mark.parametrize("alias", [_data, _detached])
@pytest.mark.parametrize("kind", [nn.Parameter, torch.clone])
def test_writing_into_an_alias_does_not_leave_the_tensor_with_a_wrong_value(kind: Op, alias: Op) -> None:
    x = kind(torch.zeros(X))
    with pytest.raises(UnsupportedCodeError, match=ORIGIN):
        alias(x).copy_(unknown(*X))


def test_a_view_from_before_does_not_keep_a_wrong_value() -> None:
    x = torch.zeros(X)
    flat = x.view(-1)
    with pytest.raises(UnsupportedCodeError, match=ORIGIN):
        x[:, 0] = unknown(2, 4)
    assert torch.equal(flat, torch.zeros(24))


def test_writing_into_several_tensors_at_once_is_not_lost() -> None:
    x, first, second = torch.zeros(2), torch.zeros(2), torch.zeros(2, dtype=torch.int64)
    try:
        torch._foreach_add_([x], [unknown(2)])
        torch.max(unknown(2, 3), 1, out=(first, second))
    except UnsupportedCodeError:
        return
    assert all(isinstance(one, Placeholder) for one in (x, first, second))


# ── becoming real ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_became_real_is_the_same_object_and_an_ordinary_tensor() -> None:
    for shape in ((2, 3), (), (0, 4)):
        x, value = unknown(*shape), torch.rand(shape)
        holder = {"x": [x]}
        assert x.become(value, requires_grad=False) is None
        assert type(x) is Tensor
        assert holder["x"][0] is x
        assert torch.equal(x, value)
        assert not x.requires_grad
        assert x.is_leaf
        assert vars(x) == {}
        assert torch.equal(pickle.loads(pickle.dumps(x)), value)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


def _relu_inside(x: Tensor) -> Tensor:
    return F.relu(x, inplace=True)


def _write(x: Tensor) -> Tensor:
    x[:, 0] = 3.0
    x += 1
    return x.sin()


_recomputed = partial(checkpoint, use_reentrant=False)

USES: dict[str, Op] = {
    "once": lambda x: x.sin(),
    "twice": lambda x: x.sin() + x * 3,
    "views": lambda x: x[:, :2].exp().sum() + x.t()[1],
    "in place": lambda x: x.mul_(2).add_(1).sin(),
    "relu in place": _relu_inside,
    "written": _write,
    "autograd.Function": Square.apply,
    "checkpoint": lambda x: checkpoint(torch.sin, x, use_reentrant=False),
    "reentrant checkpoint": lambda x: checkpoint(torch.sin, x, use_reentrant=True),
    "checkpoints": lambda x: _recomputed(torch.sin, checkpoint(torch.exp, x, use_reentrant=True)) + x,
    "itself": lambda x: x,
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


def test_gradients_of_two_backward_passes_are_added() -> None:
    x: Any = unknown(3)
    entry: Any = x.become(torch.rand(3), requires_grad=True)
    (2 * x).backward(torch.ones(3))
    (3 * x).backward(torch.ones(3))
    assert torch.equal(entry.grad, torch.full((3,), 5.0))


def test_an_unknown_tensor_that_was_asked_for_gradients_can_become_real() -> None:
    first: Any = unknown(3)
    second: Any = unknown(3)
    first.requires_grad_()
    second.requires_grad = True
    for x in (first, second):
        entry = x.become(torch.ones(3), requires_grad=True)
        (2 * x).sum().backward()
        assert torch.equal(entry.grad, torch.full((3,), 2.0))


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


# ── weightless copies ─────────────────────────────────────────────────────────────────────────────────────────────────


class Shared(nn.Module):
    """One weight under two names, a submodule under two, and an extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.out.weight = self.embed.weight
        self.again = self.embed
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("cache", torch.ones(4), persistent=False)
        self.register_buffer("nothing", None)
        self.options = {"width": 4}

    def get_extra_state(self) -> Any:
        return {"calls": 1}

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        x = self.embed(tokens) * self.scale + self.cache
        return {"logits": self.out(x), "again": self.again(tokens)}


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList([torch.rand(4), torch.rand(4)])
        self.named = nn.ParameterDict({"a": torch.rand(4, 2), "b": torch.rand(4, 2)})

    def forward(self, x: Tensor) -> Tensor:
        for row in self.rows:
            x = x + row
        made: Tensor = x @ self.named["a"] + x @ self.rows[1][:, None] + sum(x @ p for p in self.named.values())
        return made


def _llama() -> nn.Module:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    config = LlamaConfig(hidden_size=8, intermediate_size=12, num_attention_heads=2, num_key_value_heads=1)
    config._attn_implementation = "sdpa"
    return LlamaDecoderLayer(config, 0)


X8 = (2, 5, 8)
Built = tuple[Op, Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]]


def _floats(*shapes: tuple[int, ...]) -> Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]:
    return lambda: (tuple(torch.rand(s) for s in shapes), {})


def _tokens() -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randint(7, (2, 5)),), {}


def _rotary() -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.rand(X8),), {"position_embeddings": (torch.rand(2, 5, 4), torch.rand(2, 5, 4))}


MODULES: dict[str, Built] = {
    "embedding": (lambda: nn.Embedding(7, 3, padding_idx=0), _tokens),
    "batch norm": (lambda: nn.BatchNorm1d(5), _floats(X8)),
    "attention": (lambda: nn.MultiheadAttention(8, 2, batch_first=True), _floats(X8, X8, X8)),
    "gru": (lambda: nn.GRU(8, 6, 2, batch_first=True, bidirectional=True, dropout=0.1), _floats(X8)),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 3)), _floats(X8)),
    "holder": (Holder, _floats((2, 4))),
    "shared": (Shared, _tokens),
    "llama layer": (_llama, _rotary),
}


def _digest(module: nn.Module) -> Any:
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: (id(t), t._version, t.detach().clone()) for name, t in state.items()}


@pytest.mark.parametrize("name", MODULES)
def test_a_weightless_copy_returns_the_shapes_of_its_original(name: str) -> None:
    build, inputs = MODULES[name]
    module = build().train()
    before = _digest(module)
    twin = copy_without_weights(module, "net.layer", CPU, {})

    assert isinstance(twin, type(module))
    assert not list(twin.parameters())
    assert not list(twin.buffers())
    assert not nn.ModuleList([twin]).state_dict()
    with pytest.raises(UnsupportedCodeError, match=r"the state_dict of net\.layer was called"):
        twin.state_dict()
    assert [n for n, _ in twin.named_modules()] == [n for n, _ in module.named_modules()]
    after = _digest(module)
    assert before.keys() == after.keys()
    for key, (identity, version, value) in before.items():
        assert after[key][:2] == (identity, version)
        assert torch.equal(after[key][2], value)

    args, kwargs = inputs()
    shapes = partial(tree_map, lambda t: (tuple(t.shape), t.dtype) if isinstance(t, Tensor) else t)
    expected = shapes(module(*args, **kwargs))
    rng = torch.get_rng_state()
    assert shapes(twin(*args, **kwargs)) == expected
    assert shapes(twin(*map(as_unknown, args), **tree_map(as_unknown, kwargs))) == expected
    # what it draws, it draws for unknown tensors: nothing
    assert torch.equal(rng, torch.get_rng_state())
    assert first_placeholder(twin(*args, **kwargs)) is not None


def test_a_weightless_copy_can_be_looked_into() -> None:
    twin: Any = copy_without_weights(Shared(), "net.ends", CPU, {})
    assert twin.options == {"width": 4}
    assert twin.nothing is None
    assert twin.embed.weight.shape == (7, 4)
    assert twin.embed.weight is twin.out.weight
    assert twin.again is twin.embed
    assert twin.embed.weight.origin == "net.ends.embed.weight"
    assert twin.scale.origin == "net.ends.scale"
    assert twin.out.in_features == 4
    layers: Any = copy_without_weights(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4)), "net.layers", CPU, {})
    assert looks(layers[1](layers[0](torch.ones(1, 2)))) == looks(torch.ones(1, 4))
    assert looks(torch.ones(5, 2) @ layers[0].weight.T) == looks(torch.ones(5, 3))
    with pytest.raises(UnsupportedCodeError, match=r"needs the value of net\.layers\.0\.bias"):
        layers[0].bias.sum().item()


def test_a_module_that_cannot_be_copied_is_an_error_that_says_why() -> None:
    module = nn.Linear(2, 2)
    module.lock = __import__("threading").Lock()
    with pytest.raises(UnsupportedCodeError, match=r"net\.layers\.1 \(Linear\) is on another .*TypeError.*lock"):
        copy_without_weights(module, "net.layers.1", CPU, {})
