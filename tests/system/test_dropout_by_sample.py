"""Dropout by sample is the same on every topology.

Oracle: the same module on one process, under Lightning's own strategy for one device. In float64, so that the order of
sums changes no more than the last digits, while other dropout changes the first ones.
"""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_shardckpt import DropoutBySample, ShardedDropout, full_state_dict
from tests.support import tiny
from tests.support.pool import run_ranks, selected

SEED = 5
TIMED = {"timed": 1}
SAMPLES, HEADS, LENGTH, WIDTH = 20, 2, 3, 8


class Attention(nn.Module):
    """Drops attention weights [samples, heads, queries, keys], of which a tensor-parallel rank has some heads."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        def heads(layer: nn.Linear) -> Tensor:
            return layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)

        query, key, value = heads(self.query), heads(self.key), heads(self.value)
        weights = self.drop(torch.softmax(query @ key.transpose(-1, -2), -1))
        return self.out((weights @ value).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.inner = nn.Dropout(0.5)
        self.channels = nn.Dropout1d(0.2)
        self.checkpointed = False

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed:
            return checkpoint(self._forward, x, use_reentrant=False)
        return self._forward(x)

    def _forward(self, x: Tensor) -> Tensor:
        x = x + self.channels(self.attention(x))
        return x + self.down(self.inner(torch.tanh(self.up(x))))


class Net(pl.LightningModule):
    """One dropout is used before each block and after the last one; time comes first in the input of another one."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.shared = nn.Dropout(0.2)
        self.timed = nn.Dropout(0.2)
        self.head = nn.Linear(WIDTH, 1)
        for block in self.blocks:
            block.checkpointed = checkpointed

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        for block in self.blocks:
            x = block(self.shared(x))
        x = self.timed(self.shared(x).transpose(0, 1)).transpose(0, 1)
        return self.head(x).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


PLAN: dict[str, Any] = {
    "blocks.*.attention.query": "colwise",
    "blocks.*.attention.key": "colwise",
    "blocks.*.attention.value": "colwise",
    "blocks.*.attention.out": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
}
SHARDED = {"blocks.*.attention.drop": ShardedDropout(1), "blocks.*.inner": ShardedDropout()}
TP2: dict[str, Any] = {"tensor_parallel_size": 2, "tensor_parallel_plan": PLAN | SHARDED}
PP2: dict[str, Any] = {"pipeline_parallel_size": 2, "pipeline_microbatches": 2}
TOPOLOGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp2": (2, {}),
    "fsdp4": (4, {}),
    "tp2": (2, TP2),
    "fsdp2 x tp2": (4, TP2),
    "pp2": (2, PP2),
    "pp2 by microbatch": (2, PP2 | {"pipeline_loss": "microbatch", "pipeline_schedule": "1f1b"}),
    "pp2 x fsdp2": (4, PP2),
    "fsdp2, checkpointed": (2, {}),
    "pp2, checkpointed": (2, PP2 | {"pipeline_loss": "microbatch", "pipeline_schedule": "1f1b"}),
}
QUICK = {"pp2"}
SLOW = {"fsdp2"}  # what is resumed ends as the topology that goes on
RESUMED: dict[str, tuple[str, str]] = {"on stages": ("fsdp2", "pp2"), "on 4 ranks": ("pp2", "fsdp2 x tp2")}
"""The topology of two ranks whose checkpoint, of the middle of an epoch, is resumed; the one that goes on."""


def dropout(seed: int = 3) -> DropoutBySample:
    return DropoutBySample(seed, TIMED)


def data(ranks: int) -> DataLoader[Any]:
    """Samples in an order that depends on the seed and the epoch; Lightning's sampler for ranks draws it so, too."""
    x = torch.randn(SAMPLES, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    samples = TensorDataset(x)
    if ranks > 1:
        return DataLoader(samples, 8 // ranks, shuffle=True)
    return DataLoader(samples, 8, sampler=DistributedSampler(samples, 1, 0, seed=SEED))


def train(strategy: Any, ranks: int, net: Net, callback: DropoutBySample | None, **options: Any) -> dict[str, Tensor]:
    """Return the weights after two epochs, whose last batches are smaller; of a pipeline, those of this stage."""
    pl.seed_everything(SEED, verbose=False)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.2)
    path = options.pop("ckpt_path", None)
    callbacks = [*options.pop("callbacks", []), *([] if callback is None else [callback])]
    run = tiny.trainer(strategy, callbacks=callbacks, **{"max_epochs": 2, "precision": "64-true"} | options)
    run.fit(net, data(ranks), ckpt_path=path)
    return {name: value.clone() for name, value in full_state_dict(net).items()}


def run_one(name: str, **options: Any) -> dict[str, Tensor]:
    world, strategy = TOPOLOGIES[name]
    ranks = world // strategy.get("tensor_parallel_size", 1) // strategy.get("pipeline_parallel_size", 1)
    return train(strategy, ranks, Net("checkpointed" in name), dropout(), **options)


def run_all(names: list[str], resumed: list[str], directory: str) -> dict[str, Any]:
    found = {name: run_one(name, callbacks=[tiny.SaveAt(2, f"{directory}/{name}.ckpt")]) for name in names}
    for name in resumed:
        saved, onto = RESUMED[name]
        found[name] = run_one(onto, ckpt_path=f"{directory}/{saved}.ckpt")
    return found


def run_alone() -> dict[str, Tensor]:
    return train("auto", 1, Net(), dropout(), plugins=[])


@pytest.fixture(scope="module")
def alone() -> dict[str, Tensor]:
    (found,) = run_ranks(1, run_alone, init_process_group=False)
    return found


@pytest.fixture(scope="module")
def seen(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Tensor]]]:
    """The weights of each rank, by selected topology; those on as many ranks run in the same processes."""
    directory, found = str(tmp_path_factory.mktemp("runs")), {}
    wanted = {*selected(request, "name")}
    wanted |= {RESUMED[name][0] for name in wanted & RESUMED.keys()}
    for world in (2, 4):
        names = [name for name, (ranks, _) in TOPOLOGIES.items() if ranks == world and name in wanted]
        resumed = [name for name, (_, onto) in RESUMED.items() if TOPOLOGIES[onto][0] == world and name in wanted]
        if names or resumed:
            every = run_ranks(world, run_all, names, resumed, directory)
            found |= {name: [rank[name] for rank in every] for name in (*names, *resumed)}
    return found


def marked(name: str) -> Any:
    marks = [] if name in QUICK else [pytest.mark.slow] if name in SLOW | RESUMED.keys() else [pytest.mark.sweep]
    return pytest.param(name, marks=marks)


@pytest.mark.parametrize("name", [marked(name) for name in (*TOPOLOGIES, *RESUMED)])
def test_a_topology_drops_what_one_process_does(
    name: str, seen: dict[str, list[dict[str, Tensor]]], alone: dict[str, Tensor]
) -> None:
    ranks = seen[name]
    assert set().union(*ranks) == set(alone)
    for found in ranks:
        for key, value in found.items():
            torch.testing.assert_close(value, alone[key], rtol=1e-9, atol=1e-11)


# --- what cannot be keyed ---


class Functional(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        return super().training_step([nn.functional.dropout(x, 0.1)], batch_idx)


class FunctionalLayer(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.1)


class Joined(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.drop(x.flatten(0, 1)).view_as(x)


def with_layer(layer: nn.Module) -> Net:
    net = Net()
    net.blocks[1].attention = layer
    return net


def again(net: Net) -> Net:
    for block in net.blocks:
        block.inner = block.attention.drop
        block.checkpointed = True
    return net


REFUSED: dict[str, tuple[Any, str, Any, str]] = {
    "a function in the step": (Functional, "fsdp2", {}, "the training step drew random numbers without"),
    "a function in the step of stages": (Functional, "pp2", {}, "training_step drew random numbers without"),
    "a function in a layer of stages": (
        lambda: with_layer(FunctionalLayer()), "pp2", {}, "blocks.1 drew random numbers without",
    ),
    "attention of torch": (
        lambda: with_layer(nn.MultiheadAttention(WIDTH, 2, dropout=0.1)), "fsdp2", {},
        "blocks.1.attention (MultiheadAttention with dropout=0.1)",
    ),
    "samples that are joined with something": (
        lambda: with_layer(Joined()), "fsdp2", {}, "dropout blocks.1.attention.drop got a tensor of shape (24, 8)",
    ),
    "a part that is not declared": (Net, "tp2, undeclared", {}, "ShardedDropout(dim=-1)"),
    "a call that is repeated and not known": (
        lambda: again(Net()), "fsdp2", {}, "blocks.2.attention.drop was called 2 times for a sample",
    ),
    "a pattern that matches nothing": (Net, "fsdp2", {"samples_dim": {"absent": 1}}, "'absent' matches none of"),
}  # fmt: skip


def refusals(names: list[str]) -> dict[str, str]:
    pl.seed_everything(SEED, verbose=False)
    said = {}
    for name in names:
        make, topology, settings, _ = REFUSED[name]
        strategy = {**TP2, "tensor_parallel_plan": PLAN} if "undeclared" in topology else TOPOLOGIES[topology][1]
        callback = DropoutBySample(**{"samples_dim": TIMED} | settings)
        run = tiny.trainer(strategy, callbacks=[callback], max_steps=1, precision="64-true")
        try:
            run.fit(make(), data(1))
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


@pytest.fixture(scope="module")
def said() -> list[dict[str, str]]:
    return run_ranks(2, refusals, list(REFUSED))


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_depend_on_the_topology_is_refused_by_name(name: str, said: list[dict[str, str]]) -> None:
    for rank in said:
        assert REFUSED[name][3] in rank[name]


def lenient() -> tuple[list[str], dict[str, Any], list[type]]:
    net, callback = Functional(), DropoutBySample(4, TIMED, strict=False)
    train({}, 1, net, callback)
    resumed = DropoutBySample(9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed.load_state_dict(callback.state_dict())
    return [str(each.message) for each in caught], resumed.state_dict(), [type(net.shared), type(net.timed)]


def test_the_seed_is_that_of_the_run_which_began_and_modules_are_given_back() -> None:
    ((said, state, kinds),) = run_ranks(1, lenient)
    assert said == ["DropoutBySample(seed=9) continues with seed 4 from the checkpoint"]
    assert state == {"seed": 4} and kinds == [nn.Dropout, nn.Dropout]
