"""Parameters that code reads and computes with, and that something other than an optimizer changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.sweeps.twins.base import WIDTH, Natural, Net, Validated

# ── reads ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class LogsGradients(Natural):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = grad_norm(self, norm_type=2)
        self.log_dict(norms)
        self.seen += [float(v) for v in norms.values()]

    def on_after_backward(self) -> None:
        self.seen += [p.grad.norm().item() for p in self.parameters()]
        self.seen.append(nn.utils.get_total_norm([p.grad for p in self.parameters()]).item())


class LogsWeights(Natural):
    def on_train_batch_end(self, *args: Any) -> None:
        for p in self.parameters():
            self.seen += [p.mean().item(), p.std().item(), p.abs().max().item(), p.min().item(), p.norm(1).item()]
            self.seen += [float(p.detach().sum()), p.detach().square().sum().sqrt().item(), float(p.var())]
            self.seen += [float((p > 0).sum()), float(p.count_nonzero()), float(p.isnan().any()), float(p.median())]
        w = self.net.head.weight
        self.seen += [w[0, 0].item(), float(w.max(dim=1).values.sum()), float(w.argmax()), float(w.sum(0)[1])]
        self.seen += [float(torch.linalg.matrix_norm(w, 2)), float(torch.linalg.norm(w)), w.amax().item()]
        self.seen += [float(w.norm(float("inf"))), float(w.logsumexp((0, 1)))]
        self.seen.append(float(torch.dist(w, torch.zeros_like(w))))


class ReadsAsNumpy(Natural):
    def on_train_batch_end(self, *args: Any) -> None:
        w = self.net.head.weight.detach()
        self.seen += w.cpu().numpy().ravel()[:4].tolist() + w.tolist()[3][:2]
        self.seen += np.asarray(w)[4].tolist() + torch.histc(w, bins=3).tolist()
        self.seen += [float(x) for x in self.net.head.bias.detach()]
        self.seen += [float(f"{self.net.scale[0]:.4f}"), len(w), w.topk(2).values.sum().item()]
        self.seen += torch.quantile(w, torch.tensor([0.1, 0.5], dtype=w.dtype)).tolist()
        self.seen += [float(torch.allclose(w, w + 1e-3)), float(torch.equal(w, w.clone())), float(w.unique().numel())]


class DecidesByValues(Natural):
    @torch.no_grad()
    def on_train_batch_end(self, *args: Any) -> None:
        w = self.net.head.weight
        if w.norm() > 0.9:
            w.mul_(0.9)
        if (w.abs() > 0.3).any():
            w.clamp_(-0.3, 0.3)
        if bool(self.net.scale.mean() > 1) or not torch.isfinite(w).all():
            self.net.scale.sub_(0.01)
        while self.net.embed.weight.square().sum() > 3.0:
            self.net.embed.weight *= 0.95
        self.net.head.bias.add_(float(w.mean()) * w.shape[0])


class PenalizesWeights(Natural):  # by squares, orthogonality, spectral norms and variance
    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        w, v = self.net.head.weight, self.net.layers[1].b.weight
        penalty = sum(p.pow(2).sum() for p in self.parameters())
        sparse = w.abs().sum() + self.net.layers[0].a.weight.norm() + self.net.scale.mean()
        overlap = (w @ w.t() - torch.eye(len(w), dtype=w.dtype, device=w.device)).square().sum()
        spectral = torch.linalg.matrix_norm(v, 2) + F.normalize(v, dim=1).sum(0).square().mean()
        both = torch.cat([w.flatten(), v.flatten()]).var() + torch.einsum("ij,ij->", w, w) + w[1:3].mean()
        return self.loss(batch) + 1e-2 * (penalty + sparse) + 0.05 * (overlap + spectral + both)


class UsesWeightsByHand(Natural):
    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x = F.linear(batch[0], self.net.embed.weight, self.net.embed.bias) * self.net.scale
        for layer in self.net.layers:
            x = x + torch.addmm(layer.b.bias, F.gelu(x @ layer.a.weight.t() + layer.a.bias), layer.b.weight.t())
        x = F.layer_norm(x, x.shape[1:], self.net.norm.weight, self.net.norm.bias)
        return F.cross_entropy(torch.einsum("bi,ci->bc", x, self.net.head.weight) + self.net.head.bias, batch[1])


class UsesWeightsInInferenceMode(Natural):  # after each step, and changes one
    @torch.inference_mode()
    def on_train_batch_end(self, outputs: Any, batch: list[Tensor], index: int) -> None:
        weight = self.net.head.weight
        weight.mul_(0.99)
        x = torch.ones(2, WIDTH, dtype=weight.dtype, device=weight.device)
        self.seen += [float(v.sum()) for v in (F.linear(x, weight), x @ weight.t(), weight[0], (weight - 1)[0])]


class ReducesLoss(Natural):  # for a log, in place: the loss trains as it did
    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = self.loss(batch)
        self.seen.append(float(self.trainer.strategy.reduce(loss)))
        return loss


# ── a teacher that follows its student ──────────────────────────────────────────────────────────────────────────────


class Teacher(Natural, abstract=True):
    configure_optimizers = Natural.adamw

    def build(self) -> None:
        self.net, self.teacher = Net(), Net()
        self.teacher.load_state_dict(self.net.state_dict())
        self.teacher.requires_grad_(False)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(batch[2]).softmax(1)
        loss = self.loss(batch) + F.cross_entropy(self.net(batch[2]), wanted)
        self.follow(self.teacher, self.net)
        return loss

    def follow(self, slow: nn.Module, fast: nn.Module) -> None: ...


def by_data(self: Any, slow: nn.Module, fast: nn.Module) -> None:
    for p, q in zip(slow.parameters(), fast.parameters(), strict=True):
        p.data.mul_(0.9).add_(q.data, alpha=0.1)


def by_assignment(self: Any, slow: nn.Module, fast: nn.Module) -> None:
    for p, q in zip(slow.parameters(), fast.parameters(), strict=True):
        p.data = 0.9 * p.data + 0.1 * q.data


@torch.no_grad()
def by_foreach(self: Any, slow: nn.Module, fast: nn.Module) -> None:
    torch._foreach_lerp_([*slow.parameters()], [*fast.parameters()], 0.1)


@torch.no_grad()
def by_state(self: Any, slow: nn.Module, fast: nn.Module) -> None:
    new = fast.state_dict()
    for name, value in slow.state_dict().items():
        value.copy_(value * 0.9 + new[name] * 0.1)


@torch.no_grad()
def by_vector(self: Any, slow: nn.Module, fast: nn.Module) -> None:
    vectors = [parameters_to_vector(net.parameters()) for net in (slow, fast)]
    vector_to_parameters(0.9 * vectors[0] + 0.1 * vectors[1], slow.parameters())


WAYS: dict[str, Callable[[Any, nn.Module, nn.Module], None]] = {
    "FollowsByData": by_data,
    "FollowsByAssignment": by_assignment,
    "FollowsForeach": by_foreach,
    "FollowsByState": by_state,
    "FollowsByVector": by_vector,
}
for _name, _way in WAYS.items():
    type(_name, (Teacher,), {"follow": _way})


class FollowsByTorch(Natural):  # torch's AveragedModel, made when fit starts
    def on_fit_start(self) -> None:
        if not hasattr(self, "average"):
            object.__setattr__(self, "average", AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.9)))

    @torch.no_grad()
    def on_train_batch_end(self, *args: Any) -> None:
        self.average.update_parameters(self.net)
        ones = torch.ones(2, 6, dtype=self.net.scale.dtype, device=self.device)
        self.seen.append(float(self.average(ones).sum()))


class LitEma(nn.Module):  # as in Stable Diffusion: a copy of the parameters, in buffers
    def __init__(self, model: nn.Module, decay: float = 0.9) -> None:
        super().__init__()
        self.register_buffer("decay", torch.tensor(decay))
        self.register_buffer("updates", torch.tensor(0))
        self.names = {name: name.replace(".", "") for name, _ in model.named_parameters()}
        for name, p in model.named_parameters():
            self.register_buffer(self.names[name], p.clone().detach().data)

    def forward(self, model: nn.Module) -> None:
        self.updates += 1
        rate = 1.0 - min(self.decay, (1 + self.updates) / (10 + self.updates))
        with torch.no_grad():
            shadow = dict(self.named_buffers())
            for name, p in model.named_parameters():
                buffer = shadow[self.names[name]].type_as(p)
                shadow[self.names[name]].sub_(rate * (buffer - p))

    @contextmanager
    def scope(self, model: nn.Module) -> Iterator[None]:
        kept, shadow = [p.clone() for p in model.parameters()], dict(self.named_buffers())
        for name, p in model.named_parameters():
            p.data.copy_(shadow[self.names[name]].data)
        yield
        for old, p in zip(kept, model.parameters(), strict=True):
            p.data.copy_(old.data)


class KeepsShadowInBuffers(Validated, limit_val_batches=2):
    def build(self) -> None:
        super().build()
        self.ema = LitEma(self.net)

    def on_train_batch_end(self, *args: Any) -> None:
        self.ema(self.net)

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        with self.ema.scope(self.net):
            loss = self.loss(batch)
        self.log("val", loss, sync_dist=True)


class SwapsAround(pl.Callback):  # weights of its own while the module is validated
    def on_fit_start(self, trainer: pl.Trainer, module: Any) -> None:
        self.shadow = [p.detach().clone() * 0.5 for p in module.parameters()]

    def on_validation_start(self, trainer: pl.Trainer, module: Any) -> None:
        self.backup = [p.data for p in module.parameters()]
        for p, shadow in zip(module.parameters(), self.shadow, strict=True):
            p.data = shadow

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        for p, backup in zip(module.parameters(), self.backup, strict=True):
            p.data = backup


class IsSwappedForValidation(Validated, callbacks=lambda: [SwapsAround()], limit_val_batches=1):
    momentum = 0.9


# ── other changes ───────────────────────────────────────────────────────────────────────────────────────────────────


class ConstrainsRows(Natural):  # max-norm of rows, as Keras has it
    @torch.no_grad()
    def on_train_batch_end(self, *args: Any) -> None:
        w = self.net.head.weight
        w.copy_(w.renorm(p=2, dim=0, maxnorm=0.7))
        torch.renorm(self.net.embed.weight, 2, 0, 0.5, out=self.net.embed.weight)


class ClampsInStep(Natural):
    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.net.scale.data.clamp_(max=0.99)
        self.net.head.weight.data.clamp_(-0.2, 0.2)
        with torch.no_grad():
            self.net.layers[1].a.weight.clamp_(-0.3, 0.3)
        return self.loss(batch)


class NormalizesInForward(Natural):
    class Head(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                with torch.no_grad():
                    self.weight.copy_(F.normalize(self.weight, dim=1))
            return super().forward(x)


class Positive(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.clamp_(min=0.0)
        return super().forward(x)


class IsPositive(
    Natural, refused={"fsdp2 x tp2": "changes a parameter of shape (8, 12) that tensor parallelism shards"}
):
    def build(self) -> None:
        super().build()
        self.net.layers[1].b = Positive(12, WIDTH)


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


class LoadsInStep(Natural):
    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        if index == 2:
            torch.manual_seed(5)
            self.net.embed.load_state_dict(nn.Linear(6, WIDTH, dtype=self.net.scale.dtype).state_dict())
        return self.loss(batch)


class DecaysByHand(Natural):
    @torch.no_grad()
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.parameters():
            p.mul_(1 - 1e-2)
            p -= 1e-3 * p.sign()
            p.grad += 1e-2 * p


class Freezes(Natural):  # thaws and freezes parts while it trains
    def on_train_batch_start(self, batch: Any, index: int) -> None:
        self.net.layers[0].requires_grad_(index % 2 == 1)
        self.net.embed.weight.requires_grad = index > 1


class Tied(Natural):
    def build(self) -> None:
        super().build()
        self.net.decoder, self.net.again = (nn.Linear(WIDTH, 6, bias=False) for _ in range(2))
        self.net.decoder.weight = nn.Parameter(torch.randn(6, WIDTH) / 3)
        self.net.again.weight = self.net.decoder.weight

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        features = self.net.features(batch[0])
        with torch.no_grad():
            self.net.again.weight.mul_(0.99)
        loss = F.mse_loss(self.net.decoder(features), batch[0]) + F.mse_loss(self.net.again(features), batch[2])
        return loss + F.linear(features, self.net.decoder.weight).square().mean()


class HoldsAList(Natural):  # keeps parameters in a list of its own
    def build(self) -> None:
        super().build()
        self.weights = [p for n, p in self.net.named_parameters() if n.endswith("weight") and p.ndim > 1]

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.seen.append(sum(float(w.detach().abs().sum()) for w in self.weights))
        return self.loss(batch) + 1e-2 * sum(w.square().sum() for w in self.weights)

    def on_train_batch_end(self, *args: Any) -> None:
        for w in self.weights:
            w.data.clamp_(-0.5, 0.5)


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


class AssignsTwiceInStep(Natural):  # new memory may lie where memory of the values before the last ones was
    def build(self) -> None:
        super().build()
        self.weight = nn.Parameter(torch.ones(64, WIDTH))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        for _ in range(4):
            self.weight.data = self.weight.data * 0.9
            self.weight.data = self.weight.data + 1
            self.seen += [float(self.weight.sum()), float((self.weight.t() @ self.weight).sum())]
        return self.loss(batch) + self.weight.square().mean()


class AssignsOneElement(Natural):  # one rank has no row of the bias
    lr = 0.01  # with more, the weights grow without bound

    def build(self) -> None:
        self.net = Net(classes=1)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        total = batch[0].new_zeros(())
        for bound in (0.0, 0.1, 0.2):
            self.net.head.bias.data = self.net.head.bias.data.clamp(-bound, bound) + 1
            total = total + self.net(batch[0]).square().mean()
            self.seen.append(float(self.net.head.bias.sum()))
        return total
