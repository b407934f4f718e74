"""Steps that optimize by themselves: gradients are read, changed and replaced, in several passes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from tests.sweeps.twins.base import BY_FUNCTION, SECOND_DERIVATIVES, WIDTH, Manual, case


class Edited(Manual):
    """One loss, one backward, something done to the gradients."""

    def training_step(self, batch: list[Tensor], index: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch))
        if self.edit(index) is not False:
            optimizer.step()
        optimizer.zero_grad()

    def edit(self, index: int) -> Any:
        raise NotImplementedError


@case()
class ClipsByNorm(Edited):
    def edit(self, index: int) -> None:
        self.seen.append(float(nn.utils.clip_grad_norm_(self.net.layers.parameters(), 0.1)))


@case()
class ClipsByLargest(Edited):
    def edit(self, index: int) -> None:
        self.seen.append(float(nn.utils.clip_grad_norm_(self.parameters(), 0.1, norm_type=float("inf"))))


@case()
class ClipsByValue(Edited):
    def edit(self, index: int) -> None:
        nn.utils.clip_grad_value_(self.parameters(), 1e-2)


@case()
class ClipsByLightning(Edited):
    def edit(self, index: int) -> None:
        self.clip_gradients(self.optimizers(), gradient_clip_val=0.1, gradient_clip_algorithm="norm")


@case()
class GuardsAgainstNan(Edited):
    def loss(self, batch: list[Tensor]) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return super().loss(batch) * (float("nan") if self.calls == 2 else 1.0)

    def edit(self, index: int) -> bool:
        fine = all(torch.isfinite(p.grad).all() for p in self.parameters() if p.grad is not None)
        self.seen.append(float(fine))
        return fine


@case()
class AddsNoise(Edited):
    def edit(self, index: int) -> None:
        torch.manual_seed(index)
        for p in self.parameters():
            p.grad.add_(torch.randn_like(p.grad), alpha=1e-2)


@case()
class Masks(Edited):
    def edit(self, index: int) -> None:
        for p in self.parameters():
            mask = (torch.arange(p.numel(), device=p.device) % 3 > 0).view_as(p)
            p.grad.mul_(mask)
            p.grad[mask.logical_not()] = 1e-3


@case()
class Replaces(Edited):
    def edit(self, index: int) -> None:
        for p in self.parameters():
            p.grad = p.grad.sign() * 1e-2


@case()
class WritesIntoParts(Edited):
    def edit(self, index: int) -> None:
        self.net.head.weight.grad[0].zero_()
        self.net.embed.weight.grad.view(-1)[:5] = 1e-2
        self.net.layers[0].a.weight.grad[:, 1].mul_(2)
        self.net.layers[0].b.weight.grad.t()[3].add_(1e-3)


@case()
class BackwardOfItsOwn(Manual):
    def training_step(self, batch: list[Tensor], index: int) -> None:
        optimizer = self.optimizers()
        self.loss(batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


@case()
class Closure(Manual):
    def training_step(self, batch: list[Tensor], index: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)


@case()
class Accumulates(Manual):
    def training_step(self, batch: list[Tensor], index: int) -> None:
        self.manual_backward(self.loss(batch) / 2)
        if index % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()


@case()
class Sam(Manual):
    def training_step(self, batch: list[Tensor], index: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch))
        steps = []
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in self.parameters()]).norm()
            for p in self.parameters():
                step = p.grad * (0.05 / (norm + 1e-12))
                p.add_(step)
                steps.append(step)
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        with torch.no_grad():
            for p, step in zip(self.parameters(), steps, strict=True):
                p.sub_(step)
        optimizer.step()
        optimizer.zero_grad()


@case(whole=BY_FUNCTION)
class GradientsByFunction(Manual):
    def training_step(self, batch: list[Tensor], index: int) -> None:
        params = list(self.parameters())
        for p, g in zip(params, torch.autograd.grad(self.loss(batch), params), strict=True):
            p.grad = g
        self.optimizers().step()
        self.optimizers().zero_grad()


@case(whole=BY_FUNCTION)
class PCGrad(Manual):
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
        position = 0
        for p in params:
            p.grad = (flat1 + flat2)[position : position + p.numel()].view_as(p)
            position += p.numel()
        self.optimizers().step()
        self.optimizers().zero_grad()


@case(refused=SECOND_DERIVATIVES, whole=BY_FUNCTION)
class Maml(Manual):
    """Gradients through a step of gradient descent."""

    def training_step(self, batch: list[Tensor], index: int) -> None:
        params = dict(self.net.named_parameters())
        half = len(batch[0]) // 2
        inner = F.cross_entropy(self.net(batch[0][:half]), batch[1][:half])
        grads = torch.autograd.grad(inner, list(params.values()), create_graph=True)
        fast = {name: p - 0.1 * g for (name, p), g in zip(params.items(), grads, strict=True)}
        out = functional_call(self.net, fast, (batch[0][half:],))
        self.manual_backward(F.cross_entropy(out, batch[1][half:]))
        self.optimizers().step()
        self.optimizers().zero_grad()


@case(refused=SECOND_DERIVATIVES, whole=BY_FUNCTION)
class PenaltyOnGradients(Manual):
    def training_step(self, batch: list[Tensor], index: int) -> None:
        loss = self.loss(batch)
        grads = torch.autograd.grad(loss, [self.net.head.weight, self.net.layers[0].b.weight], create_graph=True)
        self.manual_backward(loss + 0.1 * sum(g.square().sum() for g in grads))
        self.optimizers().step()
        self.optimizers().zero_grad()


@case()
class LooksAtItsState(Manual):
    def training_step(self, batch: list[Tensor], index: int) -> None:
        loss = self.loss(batch)
        state = self.state_dict()
        self.seen.append(sum(float(v.abs().sum()) for v in state.values()))
        self.manual_backward(loss)
        self.optimizers().step()
        self.optimizers().zero_grad()
        with torch.no_grad():
            after = self.net(batch[0].new_ones(2, 6))
        self.seen.append(float(after.sum()))


@case()
class RestoresItsState(Manual):
    def training_step(self, batch: list[Tensor], index: int) -> None:
        before = {k: v.clone() for k, v in self.net.state_dict().items()}
        self.manual_backward(self.loss(batch))
        self.optimizers().step()
        self.optimizers().zero_grad()
        if index == 1:
            self.net.load_state_dict(before)


# ── several networks ────────────────────────────────────────────────────────────────────────────────────────────────


class Gan(Manual):
    def build(self) -> None:
        self.generator = nn.Sequential(nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 6))
        self.judge = nn.Sequential(nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.generator.parameters(), lr=1e-2, eps=1e-3),
            torch.optim.SGD(self.judge.parameters(), lr=1e-2, momentum=0.9),
        ]


@case()
class GanToggled(Gan):
    def training_step(self, batch: list[Tensor], index: int) -> None:
        x, _, z, _ = batch
        for_generator, for_judge = self.optimizers()
        self.toggle_optimizer(for_generator)
        self.manual_backward(F.softplus(-self.judge(self.generator(z))).mean())
        for_generator.step()
        for_generator.zero_grad()
        self.untoggle_optimizer(for_generator)
        self.toggle_optimizer(for_judge)
        fake = self.judge(self.generator(z).detach())
        self.manual_backward(F.softplus(fake).mean() + F.softplus(-self.judge(x)).mean())
        for_judge.step()
        for_judge.zero_grad()
        self.untoggle_optimizer(for_judge)


@case()
class HalvesAndClips(Manual):
    def training_step(self, batch: list[Tensor], index: int) -> None:
        self.optimizers().zero_grad()
        for k in range(2):
            self.manual_backward(self.loss([part[k::2] for part in batch]) / 2)
        gradients = [p.grad for p in self.parameters()]
        total = torch.sqrt(sum((g**2).sum() for g in gradients))
        self.seen.append(total.item())
        torch._foreach_div_(gradients, total + 1e-6)
        torch.nn.utils.clip_grads_with_norm_(self.parameters(), 0.5, total)
        self.seen.append(torch.nn.utils.parameters_to_vector(self.parameters()).norm().item())
        self.optimizers().step()
