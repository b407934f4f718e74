"""More kinds of models: experts, operators, packed sequences, columns that a plan shards, and what modules keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.sweeps.twins.base import WIDTH, Natural, Net


class FourierLayer(nn.Module):  # as in Fourier neural operators: complex weights
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, dtype=torch.complex128) / 3)
        self.unused = nn.Parameter(torch.randn(4, 2, dtype=torch.complex128))
        self.skip = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x)
        out = torch.zeros_like(spectrum)
        out[:, :4] = spectrum[:, :4] * self.weight.sum(0)
        return torch.fft.irfft(out, n=6) + self.skip(x)


class Spectral(Natural, gradient_clip_val=0.5):
    def build(self) -> None:
        self.operator, self.net = FourierLayer(), Net()

    def loss(self, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(self.net(self.operator(batch[0])), batch[1])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append(float(self.operator.weight.grad.abs().norm()))
        self.seen.append(float(self.operator.weight.detach().norm()))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 1e-2, eps=1e-3)


class SpectralOnce(Spectral):  # complex weights that only some steps use
    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        if index % 2:
            return self.loss(batch) + self.operator.unused.abs().square().sum()
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append(float(sum(p.grad is None for p in self.parameters())))


class KeepsComplexPartsNegative(Natural):
    """Poles of a filter, by their parts, conjugates and angles; an odd number of them."""

    def build(self) -> None:
        super().build()
        self.poles = nn.Parameter(torch.randn(5, dtype=torch.cdouble))

    def loss(self, batch: list[Tensor]) -> Tensor:
        p = self.poles
        return super().loss(batch) + (p * p.conj()).real.sum() + p.imag.sum() + 0.1 * p.angle().sum()

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            self.poles.real.clamp_(max=-0.1)
            self.seen.append(float(self.poles.real.sum()))


# ── what modules keep beside their parameters: running means, averages, decisions ──────────────────────────────────


class RunningMean(nn.Module):  # normalizes by a mean of the batches so far, each rank by its own
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


class NormalizesByRunningMean(Natural):
    def build(self) -> None:
        super().build()
        self.norm = RunningMean()

    def loss(self, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(self.net(self.norm(batch[0])), batch[1])


class NormalizesByAllRanks(Natural):  # the same, with what all ranks have
    def build(self) -> None:
        super().build()
        self.register_buffer("mean", torch.zeros(6))

    def loss(self, batch: list[Tensor]) -> Tensor:
        mean = self.trainer.strategy.reduce(batch[0].mean(0), reduce_op="mean")
        self.mean = 0.9 * self.mean + 0.1 * mean
        self.seen.append(float(self.mean.sum()))
        return F.cross_entropy(self.net(batch[0] - self.mean), batch[1])


class DecidesAlone(Natural):  # a weight that is multiplied by a number of the rank's own batch
    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: list[Tensor], index: int) -> None:
        self.net.head.weight.mul_(1 - 0.01 * batch[0].abs().mean().item())


class ScalesByItsOwnLoss(Natural):  # a learning rate that follows the loss of the rank's own batch
    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = self.loss(batch)
        self.trainer.optimizers[0].param_groups[0]["lr"] = 0.05 * loss.item()
        return loss


# ── between a layer whose columns a tensor-parallel plan shards, and the next one, whose rows it shards ─────────────


class Between(nn.Module):  # a block that does something to its hidden activation
    def __init__(self, hidden: Callable[[Between, Tensor], Tensor], wide: int) -> None:
        super().__init__()
        self.a, self.b, self.hidden = nn.Linear(WIDTH, wide), nn.Linear(12, WIDTH), hidden
        if hidden in OF_PARAMETERS:
            self.norm, self.gain = nn.LayerNorm(12), nn.Parameter(torch.linspace(0.5, 1.5, 12))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(self.hidden(self, self.a(x)))


def gated(block: Between, h: Tensor) -> Tensor:
    """GLU: halves of the columns, multiplied."""
    value, gate = h.chunk(2, -1)
    return value * gate.sigmoid()


def normed(block: Between, h: Tensor) -> Tensor:
    return F.gelu(block.norm(h))


def weighted(block: Between, h: Tensor) -> Tensor:
    """A parameter for each column."""
    return torch.relu(h) * block.gain


OF_PARAMETERS = (normed, weighted)
HIDDEN: dict[str, Callable[[Between, Tensor], Tensor]] = {
    "HiddenGated": gated,
    "HiddenSoftmax": lambda block, h: h.softmax(-1),
    "HiddenNormed": normed,
    "HiddenWeighted": weighted,
}
for _name, _hidden in HIDDEN.items():
    _wide = 24 if "Gated" in _name else 12
    type(_name, (Natural,), {"Layer": staticmethod(lambda of=_hidden, wide=_wide: Between(of, wide))})
