"""Optimizers as users write or bring them, and gradients that steps and hooks join, project, clip and differentiate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from tests.sweeps.twins.base import SECOND_DERIVATIVES, Manual, Natural
from tests.sweeps.twins.optimizers import Own, simple

# ── gradients ───────────────────────────────────────────────────────────────────────────────────────────────────────


class CentralizesInOptimizerHook(Natural):
    def configure_optimizers(self) -> Any:
        def before(opt: Any, args: Any, kwargs: Any) -> None:
            for p in opt.param_groups[0]["params"]:
                if p.grad is not None and p.grad.dim() > 1:
                    p.grad.data.add_(-p.grad.data.mean(dim=tuple(range(1, p.grad.dim())), keepdim=True))

        @torch.no_grad()
        def after(opt: Any, args: Any, kwargs: Any) -> None:
            torch._foreach_mul_(opt.param_groups[0]["params"], 0.999)

        optimizer = super().configure_optimizers()
        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)
        return optimizer


class BackwardIntoSome(Manual, whole="backward asks for the gradient of net"):
    """``backward(inputs=…)``: auxiliary losses that train a part."""

    def training_step(self, batch: list[Tensor], index: int) -> None:
        out = self.net(batch[0])
        F.cross_entropy(out, batch[1]).backward(inputs=list(self.net.layers.parameters()), retain_graph=True)
        out.square().mean().backward(inputs=[self.net.head.weight, self.net.scale])
        self.seen.append(float(self.net.embed.weight.grad is None))
        self.optimizers().step()
        self.optimizers().zero_grad()


class WeighsTasks(Manual):  # MGDA: the smallest convex combination of two gradients, of shared layers
    def training_step(self, batch: list[Tensor], index: int) -> None:
        out = self.net(batch[0])
        losses = [F.cross_entropy(out, batch[1]), out.square().mean()]
        grads = []
        for loss in losses:
            self.optimizers().zero_grad()
            self.manual_backward(loss, retain_graph=True)
            grads.append([p.grad.detach().clone() for p in self.net.layers.parameters()])
        dots = [[sum((a * b).sum() for a, b in zip(g, h, strict=True)) for h in grads] for g in grads]
        gamma = ((dots[1][1] - dots[0][1]) / (dots[0][0] + dots[1][1] - 2 * dots[0][1])).clamp(0, 1).item()
        self.seen.append(gamma)
        self.optimizers().zero_grad()
        self.manual_backward(gamma * losses[0] + (1 - gamma) * losses[1])
        self.optimizers().step()


class AccumulatesByToggle(Manual):  # ``toggle_model(sync_grad=…)``, as Lightning's documentation accumulates by hand
    def training_step(self, batch: list[Tensor], index: int) -> None:
        optimizer = self.optimizers()
        last = index % 2 == 1
        with optimizer.toggle_model(sync_grad=last):
            self.manual_backward(self.loss(batch) / 2)
            if last:
                nn.utils.clip_grad_norm_(self.parameters(), 0.2)
                optimizer.step()
                optimizer.zero_grad()


class AdaHessian(Manual, refused=SECOND_DERIVATIVES, whole="has parameters whose gradients are differentiated"):
    """``create_graph=True``, and Hutchinson's estimate by ``grad_outputs``."""

    def training_step(self, batch: list[Tensor], index: int) -> None:
        self.manual_backward(self.loss(batch), create_graph=True)
        params = [p for p in self.parameters() if p.grad is not None]
        grads = [p.grad for p in params]
        torch.manual_seed(index)
        signs = [torch.randint_like(p, 0, 2) * 2.0 - 1.0 for p in params]
        products = torch.autograd.grad(grads, params, grad_outputs=signs, retain_graph=False)
        with torch.no_grad():
            for p, h, z in zip(params, products, signs, strict=True):
                curvature = (h * z).abs() + 1e-1
                p.sub_(0.05 * p.grad / curvature)
                p.grad = None


class ChecksFinite(Natural):  # skips by a test of all gradients at once, as mixed precision does it by hand
    scale = 2.0**3

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (loss * self.scale).backward()

    def on_after_backward(self) -> None:
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        found = torch.zeros(1, dtype=torch.float32, device=self.device)
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, torch.full_like(found, 1 / self.scale))
        self.seen.append(found.item())


# ── optimizers ──────────────────────────────────────────────────────────────────────────────────────────────────────


class SamOptimizer(Optimizer):  # as davda54's: wraps another optimizer, shares its groups
    def __init__(self, params: Any, base: Any, rho: float = 0.05, adaptive: bool = True, **kwargs: Any) -> None:
        super().__init__(params, {"rho": rho, "adaptive": adaptive, **kwargs})
        self.base_optimizer = base(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        closure = torch.enable_grad()(closure)
        loss = closure()
        active = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        norms = [((torch.abs(p) if group["adaptive"] else 1.0) * p.grad).norm(p=2) for p, group in active]
        norm = torch.norm(torch.stack(norms), p=2)
        for p, group in active:
            self.state[p]["old_p"] = p.data.clone()
            scale = group["rho"] / (norm + 1e-12)
            p.add_((torch.pow(p, 2) if group["adaptive"] else 1.0) * p.grad * scale.to(p))
        self.zero_grad()
        closure()
        for p, _ in active:
            p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        return loss


simple("SamOptimizer", lambda m: SamOptimizer(m.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9))


class Langevin(Own):  # SGLD: noise in every step
    steps = 0

    def update_all(self, loss: Any) -> None:
        self.steps += 1
        torch.manual_seed(self.steps)  # a run on several ranks is seeded anew when it begins, as under DDP
        for p in self.param_groups[0]["params"]:
            noise = torch.normal(torch.zeros_like(p), 1e-2 * torch.ones_like(p))
            p.add_(-0.05 * p.grad + noise + p.new(p.size()).normal_(0, 1e-2))


simple("Langevin", lambda m: Langevin(m.parameters()))


class Polyak(Own):  # a step size of the loss over the squared norm of the gradient
    def update_all(self, loss: Any) -> None:
        params = self.param_groups[0]["params"]
        rate = min(float(loss / sum(p.grad.square().sum() for p in params)), 0.5)
        for p in params:
            p.sub_(p.grad, alpha=rate)


simple("StepsByPolyak", lambda m: Polyak(m.parameters()))


class SearchesLines(Natural):  # L-BFGS with the search of strong Wolfe conditions
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=4, history_size=3, line_search_fn="strong_wolfe")
