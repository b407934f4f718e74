"""Modules that train on shards as on one process, where the engine has a branch of its own for what they do.

Oracle: the same module under plain Lightning on one process. `tests.sweeps.twins` has many more.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence
from transformers.modeling_outputs import BaseModelOutput

from lightning_shardckpt import FSDP
from lightning_shardckpt.errors import ShardCkptError
from tests.support import tiny
from tests.support.nets import full_state
from tests.support.pool import run_each, run_ranks
from tests.sweeps.twins.base import CLASSES, Natural

# ── what modules return ─────────────────────────────────────────────────────────────────────────────────────────────

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

    def loss(self, batch: list[Tensor]) -> Tensor:
        x, penalty = batch[0], torch.zeros(())
        for layer in self.layers:
            found = layer(x)
            assert type(found) is type(CONTAINERS[layer.kind][0](x, x))
            x, weight = CONTAINERS[layer.kind][1](found)
            penalty = penalty + (weight**2).mean()
        return F.cross_entropy(self.head(x), batch[1]) + penalty


# ── what they compute with ──────────────────────────────────────────────────────────────────────────────────────────


class OneElement(Natural):
    """Parameters of one element, which the numbers that optimizers keep beside them are not taken for."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def build(self) -> None:
        self.first, self.one, self.last = nn.Linear(6, 4), nn.Linear(4, 1), nn.Linear(1, CLASSES)
        self.cube, self.number = nn.Parameter(torch.ones(1, 1, 1)), nn.Parameter(torch.tensor(0.5))

    def loss(self, batch: list[Tensor]) -> Tensor:
        x = self.one(self.first(batch[0]))
        return F.cross_entropy(self.last(x * self.cube[0] * self.number), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), **self.options)


class Around(Natural):
    """Modules outside the layers are gathered together; so a module with a parameter of its own has units inside."""

    def build(self) -> None:
        super().build()
        self.other = nn.Linear(CLASSES, CLASSES)

    def loss(self, batch: list[Tensor]) -> Tensor:
        once = self.net(batch[0])
        with torch.no_grad():
            twice = self.net(2 * batch[0])
        return (once - twice).square().mean() + (self.net(3 * batch[0]).detach() - self.other(once)).square().mean()


class Attends(Natural):
    """torch computes otherwise in evaluation if the class of the parameters has functions of its own."""

    def __init__(self, nested: bool = False) -> None:
        self.nested = nested
        super().__init__()

    def build(self) -> None:
        layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=self.nested)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def loss(self, batch: list[Tensor]) -> Tensor:
        x = batch[0][:, None] + torch.arange(4.0, dtype=batch[0].dtype)[:, None]
        is_padding = torch.tensor([[False, False, False, True]]).expand(len(x), 4)
        encoded = self.encoder(x, src_key_padding_mask=is_padding)
        return self.attention(encoded, encoded, encoded, need_weights=False)[0].square().mean()

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.seen.append(float(self.trainer.strategy.reduce(self.loss(batch))))

    val_dataloader = Natural.loader


CASES: dict[str, tuple[Callable[[], Natural], list[str], float]] = {
    "containers": (Containers, ["fsdp2", "recomputed"], 1e-10),
    "fused": (partial(OneElement, fused=True), ["fsdp2", "tp2", "replicas"], 1e-10),
    "fused, its lr a tensor": (partial(OneElement, fused=True, lr=torch.tensor(1e-3)), ["fsdp2", "tp2"], 1e-10),
    "by lists": (partial(OneElement, foreach=True), ["fsdp2", "tp2"], 1e-10),
    "around": (Around, ["fsdp2", "other whole"], 1e-10),
    "attends": (Attends, ["fsdp2"], 1e-12),
}
"""A module, where it trains, and how far it may be off."""
TOPOLOGIES: dict[str, dict[str, Any]] = {
    "fsdp2": {},
    "recomputed": {"fsdp": FSDP(activation_checkpointing=True)},
    "kept": {"fsdp": FSDP(reshard_after_forward=False)},
    "other whole": {"fsdp": FSDP(ignored=["other"])},
    "replicas": {"data_parallel_shard_size": 1, "data_parallel_replicate_size": 2},
    "tp2": {"tensor_parallel_size": 2, "tensor_parallel_plan": {"first": "colwise_rep"}},
}


def fit(module: Natural, strategy: dict[str, Any] | str) -> dict[str, Tensor]:
    tiny.trainer(strategy, max_epochs=1, precision="64-true", use_distributed_sampler=False).fit(module)
    return {**full_state(module), "seen": torch.tensor(module.seen)}


def train(case: str, strategy: dict[str, Any] | str) -> dict[str, Tensor]:
    pl.seed_everything(3, verbose=False)
    return fit(CASES[case][0](), strategy)


def test_weights_and_losses_are_those_of_one_process() -> None:
    alone = run_each({case: (1, train, case, "auto") for case in CASES})
    ways = [(case, way) for case, (_, ways, _) in CASES.items() for way in ways]
    for (case, way), ranks in run_each({(case, way): (2, train, case, TOPOLOGIES[way]) for case, way in ways}).items():
        for found in ranks:
            torch.testing.assert_close(found, alone[case][0], rtol=0, atol=CASES[case][2], msg=f"{case}, {way}")


# ── errors ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Changing(tiny.TinyLM):
    """Changes parameters after its forward; the names decide which."""

    def __init__(self, suffix: str) -> None:
        super().__init__(frozen=False)
        self.suffix = suffix

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = super().training_step(batch, index)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name.endswith(self.suffix):
                    parameter.mul_(0.5)
        return loss


def change(strategy: dict[str, Any] | str) -> None:
    tiny.train(Changing(".up.bias"), strategy, 1)  # no gradient needs it
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        tiny.train(Changing("head.weight"), strategy, 1)


def test_a_weight_that_autograd_needs_must_not_change_before_its_backward() -> None:
    tensor = {"tensor_parallel_size": 2, "tensor_parallel_plan": tiny.TP_PLAN}
    ways = {"auto": (1, "auto"), "fsdp2": (2, {}), "kept": (2, TOPOLOGIES["kept"]), "tp2": (2, tensor)}
    run_each({name: (world, change, strategy) for name, (world, strategy) in ways.items()})


def attend() -> None:
    with pytest.raises(ShardCkptError, match="Build it with enable_nested_tensor=False"):
        fit(Attends(nested=True), {})


def test_encoders_that_would_leave_out_padding_in_evaluation_are_refused() -> None:
    run_ranks(2, attend)
