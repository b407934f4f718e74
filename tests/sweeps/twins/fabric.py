"""Training loops of Fabric, as scripts write them, run on one process and sharded; in the ranks."""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.fabric import Fabric, seed_everything
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_shardckpt.fabric import ShardCkptIO, ShardedStrategy
from tests.sweeps.twins.base import BATCH, STEPS, WIDTH, Net, dataset
from tests.sweeps.twins.run import TOPOLOGIES, Found, described, whole

Script = Callable[["Loop"], None]
SCRIPTS: dict[str, Script] = {}


@dataclass
class Loop:
    """What a script works with, and leaves behind.

    Attributes:
        seen: numbers that must be the same on every rank, and on one process.
        modules: whose state is compared at the end.
    """

    fabric: Fabric
    seen: list[float] = field(default_factory=list)
    modules: dict[str, nn.Module] = field(default_factory=dict)

    @property
    def place(self) -> tuple[int, int]:
        """The number of data-parallel ranks, and which one this is."""
        strategy: Any = self.fabric.strategy
        found = getattr(strategy, "distributed_sampler_kwargs", None) or {"num_replicas": 1, "rank": 0}
        return found["num_replicas"], found["rank"]

    def batches(self) -> Iterator[list[Tensor]]:
        """Of each 16 rows, those of this rank: r, r + n, …"""
        ranks, rank = self.place
        for start in range(0, BATCH * STEPS, BATCH):
            rows = range(start + rank, start + BATCH, ranks)
            yield [torch.stack(column) for column in zip(*(dataset()[n] for n in rows), strict=True)]

    def net(self) -> Net:
        """A network that is built, but not set up."""
        with self.fabric.init_module():
            return Net()

    def setup(self, name: str, module: nn.Module, *optimizers: Any) -> Any:
        """``fabric.setup``, of what is compared."""
        found = self.fabric.setup(module, *optimizers)
        self.modules[name] = module
        return found

    def set_up(self, **options: Any) -> tuple[Net, Any, Any]:
        """A network, what ``fabric.setup`` makes of it, and its SGD."""
        net = self.net()
        model, optimizer = self.setup("net", net, torch.optim.SGD(net.parameters(), 0.1, **options))
        return net, model, optimizer

    def learn(self, loss: Tensor, optimizer: Any) -> None:
        self.fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def script(function: Script) -> Script:
    SCRIPTS[function.__name__] = function
    return function


def scripts(names: Sequence[str], topology: str | None = None) -> dict[str, Found]:
    """What scripts leave; without a topology on one process, under Fabric's own strategy."""
    return {name: _run(name, topology) for name in names}


def _run(name: str, topology: str | None) -> Found:
    seed_everything(7, verbose=False)
    devices, arguments = TOPOLOGIES[topology or "one"]
    sharded = {"strategy": ShardedStrategy(**arguments, timeout_s=30), "plugins": [ShardCkptIO()]}
    fabric = Fabric(accelerator="cpu", devices=devices, precision="64-true", **(sharded if topology else {}))
    fabric.launch()
    loop = Loop(fabric)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)  # what scripts make by themselves
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            SCRIPTS[name](loop)
            return Found(whole(nn.ModuleDict(loop.modules)), loop.seen)
    except Exception as error:
        return Found({}, [], described(error))
    finally:
        torch.set_default_dtype(before)


def loss_of(model: Any, batch: Sequence[Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


@script
def accumulates_without_sync(loop: Loop) -> None:
    _, model, optimizer = loop.set_up(momentum=0.9)
    for number, batch in enumerate(loop.batches()):
        last = number % 2 == 1
        with loop.fabric.no_backward_sync(model, enabled=not last):
            loop.fabric.backward(loss_of(model, batch) / 2)
        if last:
            loop.seen.append(float(loop.fabric.clip_gradients(model, optimizer, max_norm=0.3)))
            optimizer.step()
            optimizer.zero_grad()


@script
def sets_up_apart(loop: Loop) -> None:
    """``setup_module`` first; param groups, a scheduler."""
    net = loop.net()
    loop.modules["net"] = net
    model = loop.fabric.setup_module(net)
    groups = [{"params": model.layers.parameters(), "lr": 0.05}, {"params": [*model.head.parameters(), model.scale]}]
    optimizer = loop.fabric.setup_optimizers(torch.optim.SGD(groups, lr=0.1, momentum=0.9))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for batch in loop.batches():
        loop.learn(loss_of(model, batch), optimizer)
        scheduler.step()
        loop.seen += scheduler.get_last_lr()


@script
def trains_a_gan(loop: Loop) -> None:
    with loop.fabric.init_module():
        maker = nn.Sequential(nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 6))
        judge = nn.Sequential(nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    makes, for_maker = loop.setup("maker", maker, torch.optim.Adam(maker.parameters(), 1e-2, eps=1e-3))
    judges, for_judge = loop.setup("judge", judge, torch.optim.Adam(judge.parameters(), 1e-2, eps=1e-3))
    for x, _, z, _ in loop.batches():
        fake = makes(z)
        for_judge.zero_grad()
        loop.learn(F.softplus(judges(fake.detach())).mean() + F.softplus(-judges(x)).mean(), for_judge)
        loop.learn(F.softplus(-judges(fake)).mean(), for_maker)


@script
def follows_slowly(loop: Loop) -> None:
    """An average that is a deep copy, made before the setup and after it."""
    net = loop.net()
    before = copy.deepcopy(net)
    model, optimizer = loop.setup("net", net, torch.optim.SGD(net.parameters(), 0.1))
    slow = loop.setup("before", before)
    after = copy.deepcopy(net).requires_grad_(False)
    loop.modules["after"] = after
    for batch in loop.batches():
        with torch.no_grad():
            wanted = slow(batch[2]).softmax(1)
        loop.learn(loss_of(model, batch) + F.cross_entropy(model(batch[2]), wanted), optimizer)
        with torch.no_grad():
            for averages in (slow, after):
                for p, q in zip(averages.parameters(), model.parameters(), strict=True):
                    p.lerp_(q, 0.2)
        loop.seen.append(float(sum(p.norm() for p in after.parameters())))


@script
def penalizes_gradients(loop: Loop) -> None:
    """Refused by ``fully_shard``, and where a plan shards layers."""
    _, model, optimizer = loop.set_up()
    for batch in loop.batches():
        loss = loss_of(model, batch)
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        loop.learn(loss + 0.1 * sum(g.square().sum() for g in grads), optimizer)


@script
def keeps_a_mean(loop: Loop) -> None:
    """A running mean of the rank's own batches, in a buffer; a save compares it."""
    net = loop.net()
    net.register_buffer("mean", torch.zeros(6, dtype=torch.float64))
    model, optimizer = loop.setup("net", net, torch.optim.SGD(net.parameters(), 0.1))
    for batch in loop.batches():
        net.mean.lerp_(batch[0].mean(0), 0.1)
        loop.learn(F.cross_entropy(model(batch[0] - net.mean), batch[1]), optimizer)
    with tempfile.TemporaryDirectory() as folder:
        loop.fabric.save(f"{folder}/state", {"net": model})


@script
def calls_other_methods(loop: Loop) -> None:
    """Methods of the module besides its forward, marked as such and not."""
    net, model, optimizer = loop.set_up()
    model.mark_forward_method("features")
    for batch in loop.batches():
        features = model.features(batch[0]).double()  # Fabric makes float32 of what a strategy returns
        loop.learn(F.cross_entropy(net.head(features), batch[1]) + model(batch[2]).square().mean(), optimizer)


@script
def casts_by_autocast(loop: Loop) -> None:
    net, model, optimizer = loop.set_up()
    for batch in loop.batches():
        with loop.fabric.autocast():
            loss = F.cross_entropy(F.linear(net.features(batch[0]), net.head.weight, net.head.bias), batch[1])
        loop.learn(loss + model(batch[2]).square().mean(), optimizer)
