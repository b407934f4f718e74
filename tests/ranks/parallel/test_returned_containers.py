"""Containers that modules return: of their own class, with the same gradients as on one process, whoever made them."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence
from transformers.modeling_outputs import BaseModelOutput

from lightning_shardckpt import FSDP
from lightning_shardckpt.errors import UnsupportedCodeError
from tests.support import tiny
from tests.support.nets import full_state
from tests.support.pool import run_each, run_ranks
from tests.sweeps.twins.base import CLASSES, Natural

TOPOLOGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp2": (2, {}),
    "fsdp2, recomputed": (2, {"fsdp": FSDP(activation_checkpointing=True)}),
}
Pair = namedtuple("Pair", ["x", "w"])


class Attributes(dict[str, Any]):
    """As EasyDict, Munch and addict are."""

    __getattr__ = dict.__getitem__

    def __init__(self, note: str, **values: Any) -> None:
        super().__init__(values)
        self.__dict__["note"] = note


@dataclass(frozen=True)
class Frozen:
    x: Tensor
    w: Tensor


BY_KEY, BY_NAME, BY_PLACE = (lambda c: (c["x"], c["w"])), (lambda c: (c.x, c.w)), tuple
CONTAINERS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], Any]]] = {
    "tuple": (lambda x, w: (x, w), BY_PLACE),
    "dict": (lambda x, w: {"x": x, "w": w}, BY_KEY),
    "dict of a class": (lambda x, w: Attributes("a note", x=x, w=w), lambda c: (c.x, c.w) * bool(c.note)),
    "namedtuple": (Pair, BY_NAME),
    "packed sequence": (lambda x, w: PackedSequence(x, torch.tensor([1] * len(x)), None, w), lambda c: (c[0], c[3])),
    "output of transformers": (
        lambda x, w: BaseModelOutput(last_hidden_state=x, hidden_states=(w,)),
        lambda c: (c.last_hidden_state, c.hidden_states[0]),
    ),
    "dataclass": (Frozen, BY_NAME),
    "object": (lambda x, w: SimpleNamespace(x=x, w=w), BY_NAME),
    "distribution": (lambda x, w: (Normal(x, torch.ones_like(x)), w), lambda c: (c[0].icdf(torch.full((), 0.7)), c[1])),
    "nested": (
        lambda x, w: {"all": [BaseModelOutput(last_hidden_state=x), {"w": (w, None)}]},
        lambda c: (c["all"][0].last_hidden_state, c["all"][1]["w"][0]),
    ),
}


class Returning(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        return CONTAINERS[self.kind][0](x + torch.tanh(self.linear(x)), self.linear.weight)


class Containers(Natural):
    """Every layer returns a container of another kind, with its weight in it."""

    def build(self) -> None:
        self.layers = nn.ModuleList(Returning(kind) for kind in CONTAINERS)
        self.head = nn.Linear(6, CLASSES)
        self.classes = dict[str, str]()

    def loss(self, batch: list[Tensor]) -> Tensor:
        x, penalty = batch[0], torch.zeros(())
        for layer in self.layers:
            found = layer(x)
            self.classes[layer.kind] = type(found).__name__
            x, weight = CONTAINERS[layer.kind][1](found)
            penalty = penalty + (weight**2).mean()
        return F.cross_entropy(self.head(x), batch[1]) + penalty


def train(strategy: dict[str, Any] | str) -> tuple[dict[str, str], dict[str, Tensor]]:
    pl.seed_everything(3, verbose=False)
    module = Containers()
    tiny.trainer(strategy, max_epochs=1, precision="64-true", use_distributed_sampler=False).fit(module)
    return module.classes, full_state(module)


def test_what_a_module_returns_keeps_its_class_and_its_gradients() -> None:
    ((expected_classes, expected),) = run_ranks(1, train, "auto", init_process_group=False)
    for topology, ranks in run_each({name: (world, train, way) for name, (world, way) in TOPOLOGIES.items()}).items():
        for classes, state in ranks:
            assert classes == expected_classes, topology
            torch.testing.assert_close(state, expected, rtol=0, atol=1e-10, msg=topology)


class Plain:
    """A class that pytree does not know."""

    def __init__(self, x: Tensor, w: Tensor, at_work: Any = None) -> None:
        self.x, self.w, self.at_work = x, w, at_work


class ByContext(torch.autograd.Function):
    """Keeps the weight as an attribute of its context."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x, ctx.weight = x, weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient @ ctx.weight, gradient.t() @ ctx.x


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.linear.register_forward_hook(self.keep)
        self.kept: list[Tensor] = []

    def keep(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.kept[:] = [module.weight, module.bias]

    def forward(self, x: Tensor) -> Plain:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t * 1.0):
            y = x + torch.tanh(self.linear(x))
        weight = self.linear.weight
        y = y + torch.tanh(ByContext.apply(y, weight))  # type: ignore[no-untyped-call]  # torch's
        return Plain(y, weight, lambda x: x @ weight)


class UsesWhatIsReturned(Natural):
    """What is read of weights that a forward returned, and what is done to them, in the step, in hooks and after it."""

    def build(self) -> None:
        self.layers, self.head = nn.ModuleList([Keeps(), Keeps()]), nn.Linear(6, CLASSES)
        self.refused = ""

    @property
    def layer(self) -> Any:
        return self.layers[1]

    def loss(self, batch: list[Tensor]) -> Tensor:
        self.found = found = self.layer(self.layers[0](batch[0]).x)
        if len(self.seen) == 0:
            found.w.register_hook(lambda g: self.seen.append(float(g.norm())))
            found.w.note = "seen"
        penalty = found.w.square().mean() + 0.1 * (self.layer.linear.weight * found.w).sum() + found.w[0].sum()
        again = ByContext.apply(found.x, found.w)  # type: ignore[no-untyped-call]  # torch's
        return F.cross_entropy(self.head(found.at_work(found.x) + again), batch[1]) + 0.1 * penalty

    def on_train_batch_end(self, *args: Any) -> None:
        weight, (kept, bias) = self.found.w, self.layer.kept
        self.seen += [float(weight.detach().sum()), float(weight.grad.norm()), float(bias.data.sum())]
        with torch.no_grad():
            weight.mul_(0.9)
            kept.data[0] += 0.1
            bias.data.clamp_(min=-0.1)
            kept.copy_(kept * 2 - weight)
        weight.grad.mul_(0.5)
        weight.data = weight.data * 0.99
        bias.requires_grad_(False)
        self.seen += [self.layer.linear.weight.detach().sum().item(), float(self.layer.linear.bias.requires_grad)]
        bias.requires_grad = True
        assert self.layer.linear.weight.note == "seen" and torch.equal(kept, self.layer.linear.weight)
        try:
            torch.optim.SGD([weight])
        except UnsupportedCodeError as error:
            self.refused = str(error)


def use(strategy: dict[str, Any] | str) -> tuple[list[float], dict[str, Tensor], str]:
    pl.seed_everything(3, verbose=False)
    module = UsesWhatIsReturned()
    tiny.trainer(strategy, max_epochs=1, precision="64-true", use_distributed_sampler=False).fit(module)
    return module.seen, full_state(module), module.refused


def test_a_parameter_in_an_object_that_a_forward_returns_is_the_parameter() -> None:
    ((seen, state, _),) = run_ranks(1, use, "auto", init_process_group=False)
    whole = {"fsdp": FSDP(ignored=["*"])}  # its hooks keep views of weights
    calls = {name: (world, use, strategy | whole) for name, (world, strategy) in TOPOLOGIES.items()}
    for topology, ranks in run_each(calls).items():
        for found in ranks:
            torch.testing.assert_close(found[:2], (seen, state), rtol=0, atol=1e-10, msg=topology)
            assert not found[2]  # it is the same tensor


def test_hooks_that_keep_views_of_weights_are_refused_under_fully_shard() -> None:
    outcomes = run_ranks(2, use, {}, expect_errors=True)
    assert all("keeps a view of a parameter when its forward is done" in o.error.message for o in outcomes)
