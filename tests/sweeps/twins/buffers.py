"""What modules keep beside their parameters: running means, codebooks, counters, queues, averages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.sweeps.twins.base import CLASSES, WIDTH, Natural, Net, case


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
class CountsClasses(Natural):
    """Logit adjustment by the frequency of classes that each rank has seen."""

    def build(self) -> None:
        super().build()
        self.register_buffer("counts", torch.ones(CLASSES))

    def loss(self, batch: list[Tensor]) -> Tensor:
        self.counts += torch.bincount(batch[1], minlength=CLASSES)
        prior = (self.counts / self.counts.sum()).log()
        return F.cross_entropy(self.net(batch[0]) + prior, batch[1])


@case()
class Centers(Natural):
    """DINO: a centre of teacher outputs, over all ranks; a teacher by a schedule of momentum."""

    def build(self) -> None:
        self.net, self.teacher = Net(), Net()
        self.teacher.load_state_dict(self.net.state_dict())
        for p in self.teacher.parameters():
            p.requires_grad = False
        self.register_buffer("center", torch.zeros(1, CLASSES))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(batch[0])
            probabilities = ((wanted - self.center) / 0.5).softmax(-1)
        loss = -(probabilities * self.net(batch[2]).log_softmax(-1)).sum(-1).mean()
        self.update(wanted)
        return loss

    @torch.no_grad()
    def update(self, wanted: Tensor) -> None:
        every = self.all_gather(wanted).reshape(-1, CLASSES)
        self.center = self.center * 0.9 + every.mean(0, keepdim=True) * 0.1

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        m = 0.9 + 0.02 * index
        with torch.no_grad():
            for q, k in zip(self.net.parameters(), self.teacher.parameters(), strict=True):
                k.data.mul_(m).add_((1 - m) * q.detach().data)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), 0.1)


@case()
class RemembersLosses(Natural):
    """A queue of the last losses in a Python list, the mean of which weighs the next; reduced over ranks."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = self.loss(batch)
        mean = self.all_gather(loss.detach()).mean()
        self.history = [*getattr(self, "history", []), mean.item()][-2:]
        return loss * (mean / (sum(self.history) / len(self.history)))


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


class Quantizer(nn.Module):
    """VQ with an average of codes in buffers, over all ranks; usage, and codes that are replaced when unused."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(5, 4))
        self.register_buffer("sizes", torch.ones(5))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, z: Tensor, gather: Any) -> tuple[Tensor, Tensor]:
        nearest = torch.cdist(z, self.codes).argmin(1)
        chosen = F.one_hot(nearest, 5).to(z.dtype)
        if self.training:
            with torch.no_grad():
                sums = gather(chosen.t() @ z).reshape(-1, 5, 4).sum(0)
                counts = gather(chosen.sum(0)).reshape(-1, 5).sum(0)
                self.sizes.mul_(0.8).add_(counts, alpha=0.2)
                self.sums.mul_(0.8).add_(sums, alpha=0.2)
                self.codes.copy_(self.sums / self.sizes.clamp(min=1e-3)[:, None])
        quantized = self.codes[nearest]
        return z + (quantized - z).detach(), F.mse_loss(z, quantized)


@case()
class KeepsCodes(Natural):
    def build(self) -> None:
        self.encoder, self.decoder, self.quantizer = nn.Linear(6, 4), nn.Linear(4, 6), Quantizer()

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        quantized, commitment = self.quantizer(self.encoder(batch[0]), self.all_gather)
        return F.mse_loss(self.decoder(quantized), batch[0]) + 0.25 * commitment


@case()
class Observes(Natural):
    """Quantisation-aware training: an observer of activations, each rank's own."""

    def build(self) -> None:
        super().build()
        self.register_buffer("largest", torch.tensor(0.0))

    def loss(self, batch: list[Tensor]) -> Tensor:
        x = self.net.features(batch[0])
        self.largest.copy_(torch.maximum(self.largest, x.detach().abs().max()))
        grid = x / self.largest * 7
        x = x + ((grid.round() - grid) * self.largest / 7).detach()
        return F.cross_entropy(self.net.head(x), batch[1])


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
