"""Weights that forwards compute with, change, mark, share, hand out and look up in their own ways."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from tests.sweeps.twins.base import CLASSES, TENSOR_PARALLEL, WIDTH, Block, Manual, Natural, Net


class TrainsBinaryNet(Manual):
    class Head(nn.Linear):  # as in BinaryNet: the real weight is an attribute of the parameter, which holds its signs
        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self.weight, "org"):
                self.weight.org = self.weight.data.clone()
            self.weight.data = self.weight.org.sign() * 0.3
            return F.linear(x, self.weight, self.bias)

    def build(self) -> None:
        super().build()
        self.net.embed = self.Head(6, WIDTH)

    def training_step(self, batch: list[Tensor], index: int) -> None:
        self.optimizers().zero_grad()
        self.manual_backward(self.loss(batch))
        binary = [p for p in self.net.parameters() if hasattr(p, "org")]
        for p in binary:
            p.data.copy_(p.org)
        self.optimizers().step()
        for p in binary:
            p.org.copy_(p.data.clamp_(-1, 1))
            self.seen.append(float(p.org.sum()))


class ReadsMarksOfWeights(Natural):
    class Head(nn.Linear):  # its parameters carry facts: a mask, a learning-rate scale
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.weight.mask = (torch.arange(self.weight.numel()) % 3 > 0).view_as(self.weight)
            self.weight.gain = 0.5

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight * self.weight.mask.to(x.device) * self.weight.gain, self.bias)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.parameters():
            if hasattr(p, "gain"):
                p.grad.mul_(p.gain).mul_(p.mask.to(p.device))


class MarksWeightsInForward(Natural):
    class Head(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.calls = getattr(self.weight, "calls", 0) + 1
            return super().forward(x) * (1 + 0.1 * self.weight.calls)

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.append(float(getattr(self.net.head.weight, "calls", -1)))


class ReadsGradientInForward(Natural):
    class Head(nn.Linear):  # scales by what the last gradient was, as dynamic sparsity does
        def forward(self, x: Tensor) -> Tensor:
            w = self.weight
            if w.grad is not None:
                w = w * (w.grad.abs() > w.grad.abs().median())
            return F.linear(x, w, self.bias)

    def optimizer_zero_grad(self, epoch: int, index: int, optimizer: Any) -> None:
        """After the step, so that the gradient of the last one is there in the forward."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = self.loss(batch)
        self.zero_grad()
        return loss


class Table(nn.Module):  # hands its weight out
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(CLASSES, WIDTH))

    def forward(self) -> Tensor:
        return self.weight


class GetsWeightsByCall(Natural):
    def build(self) -> None:
        super().build()
        self.table = Table()

    def loss(self, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(self.net.features(batch[0]) @ self.table().t(), batch[1])


class ChangesWhatACallReturned(GetsWeightsByCall):  # an EMA of prototypes, which a module hands out
    def build(self) -> None:
        super().build()
        self.table.requires_grad_(False)

    @torch.no_grad()
    def on_train_batch_end(self, *args: Any) -> None:
        self.table().mul_(0.9).add_(self.net.head.weight, alpha=0.1)
        self.table().data.clamp_(-1, 1)


class LooksForLinear(Natural):  # ``type(m) == nn.Linear``, as torch's documentation of ``apply`` has it
    def build(self) -> None:
        super().build()
        self.mlp = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))

    def loss(self, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(self.net.head(self.mlp(self.net.features(batch[0]))), batch[1])

    def on_fit_start(self) -> None:
        def start(m: nn.Module) -> None:
            if type(m) == nn.Linear:  # noqa: E721  # as it is written there
                m.weight.data.fill_(0.1)
            elif type(m) is Block:
                m.norm.weight.data.fill_(0.5)

        self.apply(start)
        self.seen.append(float(sum(type(m) in (nn.Linear, Block, Net) for m in self.modules())))


class ClonesByClass(Natural):  # makes another one of the same class, and loads it
    def on_train_epoch_start(self) -> None:
        teacher = type(self.net)().double().to(self.device)
        state = self.net.state_dict().items()
        teacher.load_state_dict({k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in state})
        object.__setattr__(self, "teacher", teacher)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(batch[0])
        block = self.net.layers[0].__class__().double()
        self.seen.append(float(sum(p.numel() for p in block.parameters())))
        return self.loss(batch) + F.mse_loss(self.net(batch[0]), wanted)


class GroupsParametersEarly(Natural):  # decides in ``__init__`` what decays, by sets and ids
    def build(self) -> None:
        super().build()
        self.decayed = {p for p in self.net.parameters() if p.ndim > 1}
        self.slow = {id(p) for p in self.net.embed.parameters()}
        self.names = {p: n for n, p in self.net.named_parameters()}

    def configure_optimizers(self) -> Any:
        fast = [p for p in self.net.parameters() if id(p) not in self.slow]
        groups = [
            {"params": [p for p in fast if p in self.decayed], "weight_decay": 0.3},
            {"params": [p for p in fast if p not in self.decayed]},
            {"params": [p for p in self.net.parameters() if id(p) in self.slow], "lr": 1e-2},
        ]
        return torch.optim.SGD(groups, lr=0.1)

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.append(float(sum(len(self.names.get(p, "")) for p in self.net.parameters())))


class Scaled(nn.Parameter):  # a kind of parameter of the user's
    def scaled(self) -> Tensor:
        return self * 2.0


class HasItsOwnParameters(Natural):
    def build(self) -> None:
        super().build()
        self.gain = Scaled(torch.full((CLASSES,), 0.5))
        self.kept = [self.gain]

    def loss(self, batch: list[Tensor]) -> Tensor:
        self.seen.append(float(self.kept[0].detach().sum()))
        return F.cross_entropy(self.net(batch[0]) * self.gain.scaled(), batch[1])


class CallsWithOthers(Natural, refused=dict.fromkeys(TENSOR_PARALLEL, "computes with a plain tensor beside a DTensor")):
    """``functional_call`` with weights that are computed: averaged, perturbed, interpolated."""

    def build(self) -> None:
        self.net, self.other, self.alpha = Net(), Net(), nn.Parameter(torch.tensor(0.3))

    def loss(self, batch: list[Tensor]) -> Tensor:
        pairs = zip(self.net.named_parameters(), self.other.parameters(), strict=True)
        mixed = {name: self.alpha * p + (1 - self.alpha) * q for (name, p), q in pairs}
        return F.cross_entropy(functional_call(self.net, mixed, (batch[0],)), batch[1])


class CallsWithConstants(Natural):  # ``functional_call`` with plain tensors for a part of the weights
    def loss(self, batch: list[Tensor]) -> Tensor:
        fixed = {"head.weight": batch[0].new_full((CLASSES, WIDTH), 0.1), "scale": self.net.scale * 2}
        return super().loss(batch) + F.cross_entropy(functional_call(self.net, fixed, batch[0]), batch[1])


class ChangesInPlaceByFlag(Natural):  # functions with ``inplace=True`` on weights
    @torch.no_grad()
    def on_train_batch_end(self, *args: Any) -> None:
        F.leaky_relu(self.net.head.weight, 0.5, inplace=True)
        F.hardtanh(self.net.embed.weight, -0.3, 0.3, inplace=True)
        F.relu(self.net.layers[0].norm.weight, inplace=True)
        F.elu(self.net.layers[1].b.weight.data, inplace=True)
        F.threshold(self.net.scale.data, 0.99, 0.98, inplace=True)


class KeepsAView(Natural):
    class Head(nn.Linear):  # keeps views of its weight from its first forward on
        seen_weight: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.seen_weight is None:
                object.__setattr__(self, "seen_weight", self.weight.detach())
            return super().forward(x) + 0.1 * (x @ self.seen_weight.t())


class FreezesItselfInForward(Natural):
    class Head(nn.Linear):
        calls, thaws = 0, False

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.weight.requires_grad_((self.calls < 3) is not self.thaws)
            return super().forward(x)


class ThawsItselfInForward(Natural):
    momentum = 0.0

    class Head(FreezesItselfInForward.Head):
        thaws = True
