"""Steps that optimize by themselves: gradients are read, changed and replaced, in several passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from tests.sweeps.twins.base import BY_FUNCTION, SECOND_DERIVATIVES, WIDTH, Manual

EDITS: dict[str, Callable[[Any, int], Any]] = {
    "ClipsByNorm": lambda m, i: m.seen.append(float(nn.utils.clip_grad_norm_(m.net.layers.parameters(), 0.1))),
    "ClipsByLargest": lambda m, i: m.seen.append(float(nn.utils.clip_grad_norm_(m.parameters(), 0.1, float("inf")))),
    "ClipsByValue": lambda m, i: nn.utils.clip_grad_value_(m.parameters(), 1e-2),
    "ClipsByLightning": lambda m, i: m.clip_gradients(m.optimizers(), 0.1, "norm"),
}
for _name, _edit in EDITS.items():
    type(_name, (Manual,), {"edit": _edit})


class GuardsAgainstNan(Manual):
    def loss(self, batch: list[Tensor]) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return super().loss(batch) * (float("nan") if self.calls == 2 else 1.0)

    def edit(self, index: int) -> bool:
        fine = all(torch.isfinite(p.grad).all() for p in self.parameters() if p.grad is not None)
        self.seen.append(float(fine))
        return fine


class EditsGradients(Manual):
    def edit(self, index: int) -> None:  # by noise, by a mask, by replacing them
        torch.manual_seed(index)
        for p in self.parameters():
            p.grad.add_(torch.randn_like(p.grad), alpha=1e-2)
            mask = (torch.arange(p.numel(), device=p.device) % 3 > 0).view_as(p)
            p.grad.mul_(mask)
            p.grad[mask.logical_not()] = 1e-3
            if index == 2:
                p.grad = p.grad.sign() * 1e-2


class WritesIntoParts(Manual):
    def edit(self, index: int) -> None:
        self.net.head.weight.grad[0].zero_()
        self.net.embed.weight.grad.view(-1)[:5] = 1e-2
        self.net.layers[0].a.weight.grad[:, 1].mul_(2)
        self.net.layers[0].b.weight.grad.t()[3].add_(1e-3)


class BackwardOfItsOwn(Manual):
    def training_step(self, batch: list[Tensor], index: int) -> None:
        self.loss(batch).backward()
        self.optimizers().step()
        self.optimizers().zero_grad(set_to_none=False)


class Closure(Manual):
    def training_step(self, batch: list[Tensor], index: int) -> None:
        def closure() -> Tensor:
            self.optimizers().zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        self.optimizers().step(closure=closure)


class PCGrad(Manual, whole=BY_FUNCTION):
    def training_step(self, batch: list[Tensor], index: int) -> None:
        params = list(self.parameters())
        out = self.net(batch[0])
        one = torch.autograd.grad(F.cross_entropy(out, batch[1]), params, retain_graph=True)
        two = torch.autograd.grad(out.square().mean(), params)
        flat1, flat2 = (torch.cat([g.flatten() for g in some]) for some in (one, two))
        dot = torch.dot(flat1, flat2)
        if dot < 0:
            flat1 = flat1 - dot / flat2.norm() ** 2 * flat2
        self.seen.append(dot.item())
        for p, part in zip(params, (flat1 + flat2).split([p.numel() for p in params]), strict=True):
            p.grad = part.view_as(p)
        self.optimizers().step()
        self.optimizers().zero_grad()


class Maml(Manual, refused=SECOND_DERIVATIVES, whole=BY_FUNCTION):  # gradients through a step of gradient descent
    def loss(self, batch: list[Tensor]) -> Tensor:
        params = dict(self.net.named_parameters())
        half = len(batch[0]) // 2
        inner = F.cross_entropy(self.net(batch[0][:half]), batch[1][:half])
        grads = torch.autograd.grad(inner, list(params.values()), create_graph=True)
        fast = {name: p - 0.1 * g for (name, p), g in zip(params.items(), grads, strict=True)}
        return F.cross_entropy(functional_call(self.net, fast, (batch[0][half:],)), batch[1][half:])


class PenaltyOnGradients(Manual, refused=SECOND_DERIVATIVES, whole=BY_FUNCTION):
    def loss(self, batch: list[Tensor]) -> Tensor:
        loss = super().loss(batch)
        grads = torch.autograd.grad(loss, [self.net.head.weight, self.net.layers[0].b.weight], create_graph=True)
        return loss + 0.1 * sum(g.square().sum() for g in grads)


class RestoresItsState(Manual):
    def training_step(self, batch: list[Tensor], index: int) -> None:
        before = {k: v.clone() for k, v in self.net.state_dict().items()}
        super().training_step(batch, index)
        if index == 1:
            self.net.load_state_dict(before)


class GanToggled(Manual):
    def build(self) -> None:
        self.generator = nn.Sequential(nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 6))
        self.judge = nn.Sequential(nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def configure_optimizers(self) -> Any:
        adam = torch.optim.Adam(self.generator.parameters(), lr=1e-2, eps=1e-3)
        return [adam, torch.optim.SGD(self.judge.parameters(), lr=1e-2, momentum=0.9)]

    def training_step(self, batch: list[Tensor], index: int) -> None:
        x, _, z, _ = batch
        losses = (
            lambda: F.softplus(-self.judge(self.generator(z))).mean(),
            lambda: F.softplus(self.judge(self.generator(z).detach())).mean() + F.softplus(-self.judge(x)).mean(),
        )
        for optimizer, loss in zip(self.optimizers(), losses, strict=True):
            self.toggle_optimizer(optimizer)
            self.manual_backward(loss())
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)
