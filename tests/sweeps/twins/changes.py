"""Parameters that something other than an optimizer changes: in steps and hooks, in place, by assignment or loading."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.sweeps.twins.base import CLASSES, WIDTH, Natural, Net, case


class Teacher(Natural):
    """A student, and a teacher that follows it."""

    def build(self) -> None:
        self.net, self.teacher = Net(), Net()
        self.teacher.load_state_dict(self.net.state_dict())
        self.teacher.requires_grad_(False)

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self.teacher.parameters(), self.net.parameters(), strict=True)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(batch[2]).softmax(1)
        loss = self.loss(batch) + F.cross_entropy(self.net(batch[2]), wanted)
        self.follow()
        return loss

    def follow(self) -> None: ...

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net.parameters(), 1e-2, eps=1e-3)


@case()
class FollowsByData(Teacher):
    def follow(self) -> None:
        for slow, fast in self.pairs():
            slow.data.mul_(0.9).add_(fast.data, alpha=0.1)


@case()
class FollowsByAssignment(Teacher):
    def follow(self) -> None:
        for slow, fast in self.pairs():
            slow.data = 0.9 * slow.data + 0.1 * fast.data


@case()
class FollowsForeach(Teacher):
    def follow(self) -> None:
        with torch.no_grad():
            torch._foreach_lerp_([slow for slow, _ in self.pairs()], [fast for _, fast in self.pairs()], 0.1)


@case()
class FollowsByState(Teacher):
    @torch.no_grad()
    def follow(self) -> None:
        fast = self.net.state_dict()
        for name, slow in self.teacher.state_dict().items():
            slow.copy_(slow * 0.9 + fast[name] * 0.1)


@case()
class FollowsByVector(Teacher):
    @torch.no_grad()
    def follow(self) -> None:
        slow, fast = parameters_to_vector(self.teacher.parameters()), parameters_to_vector(self.net.parameters())
        vector_to_parameters(0.9 * slow + 0.1 * fast, self.teacher.parameters())


class Byol(pl.Callback):
    """As in Lightning Bolts."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *args: Any) -> None:
        tau = 0.9
        for (_, online), (_, target) in zip(
            module.net.named_parameters(), module.teacher.named_parameters(), strict=True
        ):
            target.data = tau * target.data + (1 - tau) * online.data


@case(callbacks=lambda: [Byol()])
class FollowsByCallback(Teacher): ...


@case()
class FollowsByTorch(Natural):
    """torch's AveragedModel, made when fit starts."""

    def on_fit_start(self) -> None:
        if not hasattr(self, "average"):
            object.__setattr__(self, "average", AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.9)))

    def on_train_batch_end(self, *args: Any) -> None:
        self.average.update_parameters(self.net)
        with torch.no_grad():
            ones = torch.ones(2, 6, dtype=self.net.scale.dtype, device=self.device)
            self.seen.append(float(self.average(ones).sum()))


class LitEma(nn.Module):
    """As in Stable Diffusion: a copy of the parameters, in buffers."""

    def __init__(self, model: nn.Module, decay: float = 0.9) -> None:
        super().__init__()
        self.names = {}
        self.register_buffer("decay", torch.tensor(decay))
        self.register_buffer("updates", torch.tensor(0))
        for name, p in model.named_parameters():
            if p.requires_grad:
                self.names[name] = name.replace(".", "")
                self.register_buffer(self.names[name], p.clone().detach().data)
        self.collected: list[Tensor] = []

    def forward(self, model: nn.Module) -> None:
        self.updates += 1
        rate = 1.0 - min(self.decay, (1 + self.updates) / (10 + self.updates))
        with torch.no_grad():
            shadow = dict(self.named_buffers())
            for name, p in model.named_parameters():
                if p.requires_grad:
                    buffer = shadow[self.names[name]].type_as(p)
                    shadow[self.names[name]].sub_(rate * (buffer - p))

    def copy_to(self, model: nn.Module) -> None:
        shadow = dict(self.named_buffers())
        for name, p in model.named_parameters():
            if p.requires_grad:
                p.data.copy_(shadow[self.names[name]].data)

    @contextmanager
    def scope(self, model: nn.Module) -> Iterator[None]:
        kept = [p.clone() for p in model.parameters()]
        self.copy_to(model)
        yield
        for old, p in zip(kept, model.parameters(), strict=True):
            p.data.copy_(old.data)


@case(limit_val_batches=2)
class KeepsShadowInBuffers(Natural):
    def build(self) -> None:
        super().build()
        self.ema = LitEma(self.net)

    def on_train_batch_end(self, *args: Any) -> None:
        self.ema(self.net)

    val_dataloader = Natural.loader

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        with self.ema.scope(self.net):
            loss = self.loss(batch)
        self.log("val", loss, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.seen.append(float(self.trainer.callback_metrics["val"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), 0.1)


class SwapsAround(pl.Callback):
    """Weights of its own while the module is validated."""

    def on_fit_start(self, trainer: pl.Trainer, module: Any) -> None:
        self.shadow = [p.detach().clone() * 0.5 for p in module.parameters()]

    def on_validation_start(self, trainer: pl.Trainer, module: Any) -> None:
        self.backup = [p.data for p in module.parameters()]
        for p, shadow in zip(module.parameters(), self.shadow, strict=True):
            p.data = shadow

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        for p, backup in zip(module.parameters(), self.backup, strict=True):
            p.data = backup


@case(callbacks=lambda: [SwapsAround()], limit_val_batches=1)
class IsSwappedForValidation(Natural):
    val_dataloader = Natural.loader

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.seen.append(float(self.trainer.callback_metrics["val"]))


@case()
class ConstrainsNorms(Natural):
    @torch.no_grad()
    def on_train_batch_end(self, *args: Any) -> None:
        for p in self.parameters():
            n = p.norm().item()
            if n > 1:
                p.mul_(1 / n)


@case()
class ConstrainsRows(Natural):
    """Max-norm of rows, as Keras has it."""

    @torch.no_grad()
    def on_train_batch_end(self, *args: Any) -> None:
        w = self.net.head.weight
        w.copy_(w.renorm(p=2, dim=0, maxnorm=0.7))
        torch.renorm(self.net.embed.weight, 2, 0, 0.5, out=self.net.embed.weight)


@case()
class ClampsInStep(Natural):
    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.net.scale.data.clamp_(max=0.99)
        self.net.head.weight.data.clamp_(-0.2, 0.2)
        with torch.no_grad():
            self.net.layers[1].a.weight.clamp_(-0.3, 0.3)
        return self.loss(batch)


class NormalizedLinear(nn.Linear):
    """Changes its weight in its own forward."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.weight.copy_(F.normalize(self.weight, dim=1))
        return super().forward(x)


@case()
class NormalizesInForward(Natural):
    def build(self) -> None:
        super().build()
        self.net.head = NormalizedLinear(WIDTH, CLASSES)


class Positive(nn.Linear):
    """Changes it through ``data``."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.clamp_(min=0.0)
        return super().forward(x)


@case(refused={"fsdp2 x tp2": "changes a parameter of shape (8, 12) that tensor parallelism shards"})
class IsPositive(Natural):
    def build(self) -> None:
        super().build()
        self.net.layers[1].b = Positive(12, WIDTH)


@case()
class ResetsItsHead(Natural):
    def on_train_batch_start(self, batch: Any, index: int) -> None:
        if index == 2:
            torch.manual_seed(3)
            nn.init.xavier_uniform_(self.net.head.weight)
            nn.init.zeros_(self.net.head.bias)
            nn.init.orthogonal_(self.net.embed.weight)
            nn.init.trunc_normal_(self.net.layers[0].a.weight, std=0.2)
            nn.init.kaiming_normal_(self.net.layers[1].b.weight)
            self.net.layers[1].a.reset_parameters()
            self.net.layers[0].norm.weight.data.normal_(1.0, 0.1)


@case()
class LoadsInStep(Natural):
    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        if index == 2:
            torch.manual_seed(5)
            self.net.embed.load_state_dict(nn.Linear(6, WIDTH, dtype=self.net.scale.dtype).state_dict())
        return self.loss(batch)


@case()
class DecaysByHand(Natural):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        with torch.no_grad():
            for p in self.parameters():
                p.mul_(1 - 1e-2)
                p -= 1e-3 * p.sign()
                p.grad += 1e-2 * p


@case()
class CopiesItself(Natural):
    """A copy of a part that is made while it trains, and used."""

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        if index == 0:
            object.__setattr__(self, "old", copy.deepcopy(self.net))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = self.loss(batch)
        if index > 0:
            with torch.no_grad():
                before = self.old(batch[0])
            loss = loss + (self.net(batch[0]) - before).square().mean()
        return loss


@case()
class Freezes(Natural):
    """Thaws and freezes parts while it trains."""

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        self.net.layers[0].requires_grad_(index % 2 == 1)
        self.net.embed.weight.requires_grad = index > 1


@case()
class Tied(Natural):
    def build(self) -> None:
        super().build()
        self.net.decoder = nn.Linear(WIDTH, 6, bias=False)
        self.net.embed = nn.Linear(6, WIDTH)
        self.net.decoder.weight = nn.Parameter(torch.randn(6, WIDTH) / 3)
        self.net.again = nn.Linear(WIDTH, 6, bias=False)
        self.net.again.weight = self.net.decoder.weight

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        features = self.net.features(batch[0])
        with torch.no_grad():
            self.net.again.weight.mul_(0.99)
        loss = F.mse_loss(self.net.decoder(features), batch[0]) + F.mse_loss(self.net.again(features), batch[2])
        return loss + F.linear(features, self.net.decoder.weight).square().mean()


@case()
class HoldsAList(Natural):
    """Keeps parameters in a list of its own."""

    def build(self) -> None:
        super().build()
        self.weights = [p for n, p in self.net.named_parameters() if n.endswith("weight") and p.ndim > 1]

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.seen.append(sum(float(w.detach().abs().sum()) for w in self.weights))
        return self.loss(batch) + 1e-2 * sum(w.square().sum() for w in self.weights)

    def on_train_batch_end(self, *args: Any) -> None:
        for w in self.weights:
            w.data.clamp_(-0.5, 0.5)


@case()
class WritesThroughViews(Natural):
    @torch.no_grad()
    def on_train_batch_end(self, *args: Any) -> None:
        w = self.net.head.weight
        for row in w:
            row.div_(row.norm().clamp(min=1.0))
        for i in range(len(w)):
            if w[i].sum() > 0:
                w[i] -= 0.01
        w[w.abs() < 0.01] = 0
        w[:, [0, 2]] *= 0.9
        torch.add(w, 0.001, out=w)
        w.T.mul_(1.01)
        w.chunk(2)[0].add_(0.002)
        w.data[0, 0] = 0.5
        w.masked_fill_(w > 0.6, 0.6).index_fill_(0, torch.tensor([1], device=w.device), 0.1)
        w.scatter_(1, torch.zeros(5, 1, dtype=torch.long, device=w.device), 0.05).fill_diagonal_(0.2)
        w.copy_(w.flip(0))


@case()
class AssignsTwiceInStep(Natural):
    """New memory may lie where memory of the values before the last ones was."""

    def build(self) -> None:
        super().build()
        self.weight = nn.Parameter(torch.ones(64, WIDTH))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        for _ in range(4):
            self.weight.data = self.weight.data * 0.9
            self.weight.data = self.weight.data + 1
            self.seen += [float(self.weight.sum()), float((self.weight.t() @ self.weight).sum())]
        return self.loss(batch) + self.weight.square().mean()


@case()
class AssignsOneElement(Natural):
    """One rank has no row of the bias."""

    lr = 0.01  # with more, the weights grow without bound

    def build(self) -> None:
        super().build()
        self.net.head = nn.Linear(WIDTH, 1)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        total = batch[0].new_zeros(())
        for bound in (0.0, 0.1, 0.2):
            self.net.head.bias.data = self.net.head.bias.data.clamp(-bound, bound) + 1
            total = total + self.net(batch[0]).square().mean()
            self.seen.append(float(self.net.head.bias.sum()))
        return total
