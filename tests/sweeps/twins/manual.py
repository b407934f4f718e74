"""Steps that optimize by themselves: gradients are read, changed and replaced, in several passes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from tests.sweeps.twins.base import BY_FUNCTION, SECOND_DERIVATIVES, WIDTH, Manual, Net, case


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
class ClipsAllForeach(Edited):
    def edit(self, index: int) -> None:
        norm = nn.utils.clip_grad_norm_(self.parameters(), 0.1, norm_type=3.0, foreach=True)
        self.seen.append(norm.item())


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
class Scales(Edited):
    def edit(self, index: int) -> None:
        for p in self.parameters():
            p.grad *= 0.1


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
class Centralizes(Edited):
    def edit(self, index: int) -> None:
        for p in self.parameters():
            if p.ndim > 1:
                p.grad.sub_(p.grad.mean(dim=tuple(range(1, p.ndim)), keepdim=True))


@case()
class LogsNorms(Edited):
    def edit(self, index: int) -> None:
        norms = torch.stack([p.grad.norm() for p in self.parameters()])
        self.log("norm", norms.norm())
        self.seen += [norms.norm().item(), float(norms.max()), self.net.head.weight.grad.abs().mean().item()]
        self.seen += [g.square().sum().sqrt().item() for g in (self.net.scale.grad, self.net.layers[1].a.weight.grad)]


@case()
class DropsSmallGradients(Edited):
    def edit(self, index: int) -> None:
        for p in self.parameters():
            p.grad[p.grad.abs() < p.grad.abs().median()] = 0.0
            p.grad = torch.where(p.grad.abs() > 1e-2, p.grad.sign() * 1e-2, p.grad)


@case()
class WritesIntoParts(Edited):
    def edit(self, index: int) -> None:
        self.net.head.weight.grad[0].zero_()
        self.net.embed.weight.grad.view(-1)[:5] = 1e-2
        self.net.layers[0].a.weight.grad[:, 1].mul_(2)
        self.net.layers[0].b.weight.grad.t()[3].add_(1e-3)


@case()
class Normalizes(Edited):
    def edit(self, index: int) -> None:
        for p in self.parameters():
            p.grad.div_(p.grad.norm() + 1e-3)


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
class TwoLossesOneGraph(Manual):
    def training_step(self, batch: list[Tensor], index: int) -> None:
        out = self.net(batch[0])
        self.manual_backward(F.cross_entropy(out, batch[1]), retain_graph=True)
        first = [p.grad.clone() for p in self.parameters()]
        self.manual_backward(out.square().mean())
        self.seen.append(sum(float((p.grad - g).norm()) for p, g in zip(self.parameters(), first, strict=True)))
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


@case()
class SamByData(Manual):
    def training_step(self, batch: list[Tensor], index: int) -> None:
        self.manual_backward(self.loss(batch))
        before = [p.data.clone() for p in self.parameters()]
        for p in self.parameters():
            p.data.add_(p.grad, alpha=0.05)
        self.zero_grad()
        self.manual_backward(self.loss(batch))
        for p, old in zip(self.parameters(), before, strict=True):
            p.data = old
        self.optimizers().step()
        self.optimizers().zero_grad()


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
class GradNorm(Manual):
    """Weights of two tasks that even out the norms of their gradients."""

    def build(self) -> None:
        super().build()
        self.weights = nn.Parameter(torch.ones(2))

    def training_step(self, batch: list[Tensor], index: int) -> None:
        out = self.net(batch[0])
        losses = [F.cross_entropy(out, batch[1]), out.square().mean()]
        shared = self.net.layers[1].a.weight
        total = sum(w * loss for w, loss in zip(self.weights, losses, strict=True))
        self.manual_backward(total, retain_graph=True)
        self.weights.grad = None
        norms = [
            torch.autograd.grad(w * loss, shared, retain_graph=True, create_graph=True)[0].norm()
            for w, loss in zip(self.weights, losses, strict=True)
        ]
        mean = (sum(norms) / 2).detach()
        (self.weights.grad,) = torch.autograd.grad(sum((n - mean).abs() for n in norms), [self.weights])
        self.seen += [n.item() for n in norms]
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
class GradientReversal(Manual):
    def build(self) -> None:
        super().build()
        self.domain = nn.Linear(WIDTH, 2)

    def training_step(self, batch: list[Tensor], index: int) -> None:
        features = self.net.features(batch[0])
        loss = F.cross_entropy(self.net.head(features), batch[1])
        loss = loss + F.cross_entropy(self.domain(_Reversed.apply(features)), batch[1] % 2)
        self.manual_backward(loss)
        self.optimizers().step()
        self.optimizers().zero_grad()


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return -g


@case()
class LooksAhead(Manual):
    def training_step(self, batch: list[Tensor], index: int) -> None:
        if index == 0:
            self.slow = [p.detach().clone() for p in self.parameters()]
        self.manual_backward(self.loss(batch))
        self.optimizers().step()
        self.optimizers().zero_grad()
        if index % 2:
            with torch.no_grad():
                for p, slow in zip(self.parameters(), self.slow, strict=True):
                    slow += 0.5 * (p - slow)
                    p.copy_(slow)


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
class GanUntoggled(Gan):
    def training_step(self, batch: list[Tensor], index: int) -> None:
        x, _, z, _ = batch
        for_generator, for_judge = self.optimizers()
        fake = self.generator(z)
        for_judge.zero_grad()
        self.manual_backward(F.softplus(self.judge(fake.detach())).mean() + F.softplus(-self.judge(x)).mean())
        for_judge.step()
        for_generator.zero_grad()
        self.manual_backward(F.softplus(-self.judge(fake)).mean())
        for_generator.step()


@case()
class GanWithPenalty(Gan):
    """WGAN-GP."""

    def training_step(self, batch: list[Tensor], index: int) -> None:
        x, _, z, _ = batch
        for_generator, for_judge = self.optimizers()
        between = (0.3 * x + 0.7 * self.generator(z).detach()).requires_grad_()
        (slope,) = torch.autograd.grad(self.judge(between).sum(), between, create_graph=True)
        penalty = ((slope.norm(2, dim=1) - 1) ** 2).mean()
        loss = self.judge(self.generator(z).detach()).mean() - self.judge(x).mean() + 10 * penalty
        self.manual_backward(loss)
        for_judge.step()
        for_judge.zero_grad()
        if index % 2:
            self.manual_backward(-self.judge(self.generator(z)).mean())
            for_generator.step()
        for_generator.zero_grad()
        for_judge.zero_grad()


@case()
class GanClipped(Gan):
    """WGAN."""

    def training_step(self, batch: list[Tensor], index: int) -> None:
        x, _, z, _ = batch
        for_generator, for_judge = self.optimizers()
        self.manual_backward(self.judge(self.generator(z).detach()).mean() - self.judge(x).mean())
        for_judge.step()
        for_judge.zero_grad()
        for p in self.judge.parameters():
            p.data.clamp_(-0.05, 0.05)
        self.manual_backward(-self.judge(self.generator(z)).mean())
        for_generator.step()
        self.zero_grad()


@case()
class GanWithAverage(Gan):
    """R1 penalty, and a slow copy of the generator."""

    def build(self) -> None:
        super().build()
        self.slow = nn.Sequential(nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 6))
        self.slow.load_state_dict(self.generator.state_dict())
        self.slow.requires_grad_(False)

    def training_step(self, batch: list[Tensor], index: int) -> None:
        x, _, z, _ = batch
        for_generator, for_judge = self.optimizers()
        real = x.clone().requires_grad_()
        score = self.judge(real)
        (slope,) = torch.autograd.grad(score.sum(), real, create_graph=True)
        loss = F.softplus(self.judge(self.generator(z).detach())).mean() + F.softplus(-score).mean()
        self.manual_backward(loss + 5 * slope.square().sum(1).mean())
        for_judge.step()
        for_judge.zero_grad()
        self.manual_backward(F.softplus(-self.judge(self.generator(z))).mean())
        for_generator.step()
        self.zero_grad()
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.generator.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
            self.seen.append(float(self.slow(x.new_ones(1, 6)).sum()))


@case()
class CycleGan(Manual):
    def build(self) -> None:
        self.there, self.back = nn.Linear(6, 6), nn.Linear(6, 6)
        self.judges = nn.ModuleDict({"a": nn.Linear(6, 1), "b": nn.Linear(6, 1)})

    def configure_optimizers(self) -> Any:
        both = [*self.there.parameters(), *self.back.parameters()]
        return [torch.optim.SGD(both, 0.1), torch.optim.SGD(self.judges.parameters(), 0.1)]

    def training_step(self, batch: list[Tensor], index: int) -> None:
        a, _, b, _ = batch
        for_both, for_judges = self.optimizers()
        fake_b, fake_a = self.there(a), self.back(b)
        cycle = F.l1_loss(self.back(fake_b), a) + F.l1_loss(self.there(fake_a), b)
        judged = (self.judges["b"](fake_b) - 1).square().mean() + (self.judges["a"](fake_a) - 1).square().mean()
        for_both.zero_grad()
        self.manual_backward(cycle + judged)
        for_both.step()
        for_judges.zero_grad()
        pairs = (("a", a, fake_a), ("b", b, fake_b))
        loss = sum((self.judges[k](r) - 1).square().mean() for k, r, _ in pairs)
        loss += sum(self.judges[k](f.detach()).square().mean() for k, _, f in pairs)
        self.manual_backward(loss)
        for_judges.step()


@case()
class ActorCritic(Manual):
    """SAC-like: two critics, slow copies of them, a temperature."""

    def build(self) -> None:
        self.actor = nn.Sequential(nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 6))
        self.critics = nn.ModuleList(nn.Linear(12, 1) for _ in range(2))
        self.targets = nn.ModuleList(nn.Linear(12, 1) for _ in range(2))
        self.targets.load_state_dict(self.critics.state_dict())
        self.log_alpha = nn.Parameter(torch.tensor(-1.0))

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.actor.parameters(), 1e-2, eps=1e-3),
            torch.optim.Adam(self.critics.parameters(), 1e-2, eps=1e-3),
            torch.optim.Adam([self.log_alpha], 1e-2, eps=1e-3),
        ]

    def training_step(self, batch: list[Tensor], index: int) -> None:
        state, reward, following, _ = batch
        for_actor, for_critics, for_alpha = self.optimizers()
        with torch.no_grad():
            pair = torch.cat([following, self.actor(following)], 1)
            wanted = reward[:, None] + 0.9 * torch.minimum(*(t(pair) for t in self.targets))
        pair = torch.cat([state, self.actor(state).detach()], 1)
        for_critics.zero_grad()
        self.manual_backward(sum(F.mse_loss(c(pair), wanted) for c in self.critics))
        for_critics.step()
        action = self.actor(state)
        value = torch.minimum(*(c(torch.cat([state, action], 1)) for c in self.critics))
        entropy = action.square().mean()
        for_actor.zero_grad()
        self.manual_backward((self.log_alpha.exp().detach() * entropy - value).mean())
        for_actor.step()
        for_alpha.zero_grad()
        self.manual_backward(-(self.log_alpha * (entropy.detach() - 0.5)).mean())
        for_alpha.step()
        for slow, fast in zip(self.targets.parameters(), self.critics.parameters(), strict=True):
            slow.data.copy_(0.1 * fast.data + 0.9 * slow.data)
        self.seen.append(self.log_alpha.exp().item())


@case()
class DeepQ(Manual):
    """A target network that is a hard copy of every second step."""

    def build(self) -> None:
        super().build()
        self.target = Net()
        self.target.load_state_dict(self.net.state_dict())

    def training_step(self, batch: list[Tensor], index: int) -> None:
        with torch.no_grad():
            wanted = self.target(batch[2]).max(1).values
        value = self.net(batch[0]).gather(1, batch[1][:, None]).squeeze(1)
        self.optimizers().zero_grad()
        self.manual_backward(F.smooth_l1_loss(value, wanted))
        self.optimizers().step()
        if index % 2:
            self.target.load_state_dict(self.net.state_dict())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), 0.1)


@case()
class SeveralEpochsOnABatch(Manual):
    """PPO-like."""

    def training_step(self, batch: list[Tensor], index: int) -> None:
        with torch.no_grad():
            old = self.net(batch[0]).log_softmax(1).gather(1, batch[1][:, None])
        for _ in range(3):
            new = self.net(batch[0]).log_softmax(1).gather(1, batch[1][:, None])
            ratio = (new - old).exp()
            loss = -torch.minimum(ratio, ratio.clamp(0.8, 1.2)).mean()
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(self.optimizers(), gradient_clip_val=0.5)
            self.optimizers().step()


@case()
class Alternates(Manual):
    """One of two optimizers, in turn, as for EM or k-means heads."""

    def configure_optimizers(self) -> Any:
        body = [p for n, p in self.net.named_parameters() if not n.startswith("head")]
        return [torch.optim.SGD(body, 0.1), torch.optim.AdamW(self.net.head.parameters(), 1e-2, eps=1e-3)]

    def training_step(self, batch: list[Tensor], index: int) -> None:
        optimizer = self.optimizers()[index % 2]
        self.manual_backward(self.loss(batch))
        optimizer.step()
        self.zero_grad()


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


@case(refused=SECOND_DERIVATIVES, whole=BY_FUNCTION)
class HessianVectorProducts(Manual):
    def training_step(self, batch: list[Tensor], index: int) -> None:
        params = list(self.net.parameters())
        grads = torch.autograd.grad(self.loss(batch), params, create_graph=True)
        directions = [torch.ones_like(p) for p in params]
        inner = sum((g * v).sum() for g, v in zip(grads, directions, strict=True))
        products = torch.autograd.grad(inner, params)
        self.seen.append(sum((h * v).sum() for h, v in zip(products, directions, strict=True)).item())
        for p, g, h in zip(params, grads, products, strict=True):
            p.grad = g.detach() + 0.01 * h
        self.optimizers().step()
