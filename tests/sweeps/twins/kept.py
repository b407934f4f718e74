"""What steps and layers keep in attributes, pass on in containers of their own, and draw from generators of theirs."""

from __future__ import annotations

import enum
import itertools
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.sweeps.twins.base import Block, Natural


class Meter:  # an average, as scripts have carried it with them since ImageNet
    def __init__(self) -> None:
        self.sum, self.count, self.latest = 0.0, 0, None

    def update(self, value: float, count: int = 1) -> None:
        self.sum, self.count, self.latest = self.sum + value * count, self.count + count, value


@dataclass
class Annealer:
    weight: float = 1.0
    history: list[float] = field(default_factory=list)

    def step(self) -> float:
        self.weight *= 0.9
        self.history.append(self.weight)
        return self.weight


class KeepsMeters(Natural):  # objects of one's own, which a step changes before its layers and after them
    def build(self) -> None:
        super().build()
        self.meters = {"rows": Meter(), "columns": [Meter()]}
        self.annealer = Annealer()

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        weight = self.annealer.step()
        self.meters["rows"].update(1.0, batch[0].shape[1])
        loss = self.loss(batch) * weight
        self.meters["columns"][0].update(weight)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        meters = self.meters["rows"], *self.meters["columns"]
        self.seen += [number for meter in meters for number in (meter.sum, meter.count, meter.latest)]
        self.seen += [self.annealer.weight, len(self.annealer.history), *self.annealer.history]


class Phase(enum.Enum):
    WARM = 1
    HOT = 2


class KeepsOtherValues(Natural):  # arrays, a queue, an enum, a path
    def build(self) -> None:
        super().build()
        self.counts, self.recent, self.phase = np.zeros(3), deque([0.0], maxlen=2), Phase.WARM
        self.step_of_numpy, self.folder = np.float64(0), Path("runs")

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.counts[index % 3] += 1
        self.recent.append(float(index))
        self.phase = Phase.HOT if index > 1 else Phase.WARM
        self.step_of_numpy += 1
        self.folder = Path("runs") / str(index)
        return self.loss(batch) * float(self.counts.sum()) * len(self.recent)

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen += [*self.counts.tolist(), *self.recent, self.phase.value, float(self.step_of_numpy)]
        self.seen.append(float(self.folder.name))


class DrawsByItself(Natural):  # from generators of its own, after the layers
    def build(self) -> None:
        super().build()
        self.draws = {"torch": torch.Generator().manual_seed(3), "numpy": np.random.default_rng(3)}
        self.drawn = Meter()

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = self.loss(batch)
        self.drawn.update(float(torch.rand((), generator=self.draws["torch"])) + self.draws["numpy"].random())
        return loss * self.drawn.latest

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen += [self.drawn.sum, float(torch.rand((), generator=self.draws["torch"]))]


class TakesFromAnIterator(Natural):  # targets of another source
    def build(self) -> None:
        super().build()
        self.weights = itertools.count(1)

    def loss(self, batch: list[Tensor]) -> Tensor:
        scale = 1 / next(self.weights)
        return F.cross_entropy(self.net(batch[0] * scale), batch[1])


class TakesFromAnIteratorAtItsEnd(TakesFromAnIterator):
    def loss(self, batch: list[Tensor]) -> Tensor:
        loss = Natural.loss(self, batch)
        return loss / next(self.weights)


class CountsInLayers(Natural):
    class Layer(Block):  # grows quiet with each call
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x) / self.calls


class CachesInLayers(Natural):
    class Layer(Block):  # computes a table once, and keeps its latest result to look at
        table: Any = None
        latest: Any = None
        width = 0

        def forward(self, x: Tensor) -> Tensor:
            if self.table is None or self.width != x.shape[-1]:
                self.width = x.shape[-1]
                self.table = torch.linspace(0.5, 1.5, self.width, dtype=x.dtype, device=x.device)
            self.latest = super().forward(x * self.table)
            return self.latest


@dataclass
class Hidden:  # what passes between layers that write reports
    x: Tensor
    aux: Tensor
    depth: int = 0


class PassesDataclasses(Natural):
    class Layer(Block):
        def forward(self, state: Hidden) -> Hidden:
            x = super().forward(state.x)
            return Hidden(x, state.aux + x.square().mean(1), state.depth + 1)

    def loss(self, batch: list[Tensor]) -> Tensor:
        x = self.net.embed(batch[0])
        state = Hidden(x, x.sum(1) * 0.01)
        for layer in self.net.layers:
            state = layer(state)
        x = self.net.head(self.net.norm(state.x) * self.net.scale)
        return F.cross_entropy(x, batch[1]) + 0.1 * state.aux.mean() / state.depth


class TwoViews(Natural):  # two views of each sample pass through the layers, next to each other
    def loss(self, batch: list[Tensor]) -> Tensor:
        a, b = self.net(torch.stack([batch[0], batch[2]], 1).flatten(0, 1)).unflatten(0, (-1, 2)).unbind(1)
        return F.cross_entropy(a, batch[1]) + (a - b).square().mean()


class TwoViewsInARow(Natural):  # … one half of the batch after the other
    def loss(self, batch: list[Tensor]) -> Tensor:
        a, b = self.net(torch.cat([batch[0], batch[2]])).chunk(2)
        return F.cross_entropy(a, batch[1]) + (a - b).square().mean()


class ScalesActivations(Natural):  # by hooks that a step registers on them, before the layers and after
    def loss(self, batch: list[Tensor]) -> Tensor:
        x = self.net.embed(batch[0])
        if x.requires_grad:
            x.register_hook(lambda g: g * 0.5)
        for layer in self.net.layers:
            x = layer(x)
        x = self.net.norm(x) * self.net.scale
        if x.requires_grad:
            x.register_hook(lambda g: g * 2)
        return F.cross_entropy(self.net.head(x), batch[1])


class WatchesActivations(Natural):
    def build(self) -> None:
        super().build()
        self.norms: list[float] = []

    def loss(self, batch: list[Tensor]) -> Tensor:
        self.features = self.net.features(batch[0])
        if self.features.requires_grad:
            self.features.register_hook(lambda g: self.norms.append(float(g.norm())))
            self.features.retain_grad()
        return F.cross_entropy(self.net.head(self.features), batch[1])


class PenalizesInputGradients(Natural):
    def loss(self, batch: list[Tensor]) -> Tensor:
        x = batch[0].detach().requires_grad_()
        out = self.net(x)
        (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return F.cross_entropy(out, batch[1]) + 0.1 * slope.square().mean()


class LogsNumbers(Natural):  # of Python, which become tensors in the precision of the Trainer
    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = self.loss(batch)
        self.log("third", 1 / 3)
        self.log("epoch", 1 / (index + 3), on_step=False, on_epoch=True, batch_size=1)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.append(float(self.trainer.callback_metrics["third"]))

    def on_train_epoch_end(self) -> None:
        self.seen.append(float(self.trainer.callback_metrics["epoch"]))
