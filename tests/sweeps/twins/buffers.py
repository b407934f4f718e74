"""What modules keep beside their parameters: running means, codebooks, counters, queues, averages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.sweeps.twins.base import CLASSES, WIDTH, Natural, case


class RunningMean(nn.Module):
    """Normalizes by a mean of the batches so far, each rank by its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
                self.count += 1
        return x - self.mean


@case()
class NormalizesByRunningMean(Natural):
    def build(self) -> None:
        super().build()
        self.norm = RunningMean()

    def loss(self, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(self.net(self.norm(batch[0])), batch[1])


@case()
class NormalizesByAllRanks(Natural):
    """The same, with what all ranks have."""

    def build(self) -> None:
        super().build()
        self.register_buffer("mean", torch.zeros(6))

    def loss(self, batch: list[Tensor]) -> Tensor:
        mean = self.trainer.strategy.reduce(batch[0].mean(0), reduce_op="mean")
        self.mean = 0.9 * self.mean + 0.1 * mean
        self.seen.append(float(self.mean.sum()))
        return F.cross_entropy(self.net(batch[0] - self.mean), batch[1])


@case()
class DecidesAlone(Natural):
    """A weight that is multiplied by a number of the rank's own batch."""

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: list[Tensor], index: int) -> None:
        self.net.head.weight.mul_(1 - 0.01 * batch[0].abs().mean().item())


@case()
class ScalesByItsOwnLoss(Natural):
    """A learning rate that follows the loss of the rank's own batch."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = self.loss(batch)
        self.trainer.optimizers[0].param_groups[0]["lr"] = 0.05 * loss.item()
        return loss


@case()
class StepsByPolyak(Natural):
    """A step size of the loss over the squared norm of the gradient."""

    def configure_optimizers(self) -> Any:
        return Polyak(self.parameters())


class Polyak(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"limit": 0.5})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        params = [p for group in self.param_groups for p in group["params"]]
        norm = sum(p.grad.square().sum() for p in params)
        rate = min(float(loss / norm), 0.5)
        for p in params:
            p.sub_(p.grad, alpha=rate)
        return loss


@case()
class KeepsCopiesInBuffers(Natural):
    """Buffers that are computed of weights: their products, norms, and a projection."""

    def build(self) -> None:
        super().build()
        self.register_buffer("gram", torch.zeros(CLASSES, CLASSES), persistent=False)
        self.register_buffer("norms", torch.zeros(WIDTH))

    @torch.no_grad()
    def on_train_batch_end(self, *args: Any) -> None:
        w = self.net.head.weight
        self.gram = w @ w.t()
        self.norms.copy_(w.norm(dim=0)).mul_(0.5)
        self.seen += [float(self.gram.trace()), float(self.norms.sum())]

    def loss(self, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(self.net(batch[0]) @ (torch.eye(CLASSES).to(self.gram) + 0.1 * self.gram), batch[1])
