"""Gradients that steps and hooks join, project, measure, clip and differentiate again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.sweeps.twins.base import SECOND_DERIVATIVES, Manual, Natural, case


@case()
class CentralizesInOptimizerHook(Natural):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)

        def before(opt: Any, args: Any, kwargs: Any) -> None:
            for group in opt.param_groups:
                for p in group["params"]:
                    if p.grad is not None and p.grad.dim() > 1:
                        p.grad.data.add_(-p.grad.data.mean(dim=tuple(range(1, p.grad.dim())), keepdim=True))

        def after(opt: Any, args: Any, kwargs: Any) -> None:
            with torch.no_grad():
                for group in opt.param_groups:
                    torch._foreach_mul_(group["params"], 0.999)

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)
        return optimizer


@case(whole="backward asks for the gradient of net")
class BackwardIntoSome(Manual):
    """``backward(inputs=…)``: auxiliary losses that train a part."""

    def training_step(self, batch: list[Tensor], index: int) -> None:
        out = self.net(batch[0])
        F.cross_entropy(out, batch[1]).backward(inputs=list(self.net.layers.parameters()), retain_graph=True)
        out.square().mean().backward(inputs=[self.net.head.weight, self.net.scale])
        self.seen.append(float(self.net.embed.weight.grad is None))
        self.optimizers().step()
        self.optimizers().zero_grad()


@case()
class WeighsTasks(Manual):
    """MGDA: the smallest convex combination of two gradients, of shared layers."""

    def training_step(self, batch: list[Tensor], index: int) -> None:
        out = self.net(batch[0])
        losses = [F.cross_entropy(out, batch[1]), out.square().mean()]
        shared = list(self.net.layers.parameters())
        grads = []
        for loss in losses:
            self.optimizers().zero_grad()
            self.manual_backward(loss, retain_graph=True)
            grads.append([p.grad.detach().clone() for p in shared])
        dots = [[sum((a * b).sum() for a, b in zip(g, h, strict=True)) for h in grads] for g in grads]
        gamma = ((dots[1][1] - dots[0][1]) / (dots[0][0] + dots[1][1] - 2 * dots[0][1])).clamp(0, 1).item()
        self.seen.append(gamma)
        self.optimizers().zero_grad()
        self.manual_backward(gamma * losses[0] + (1 - gamma) * losses[1])
        self.optimizers().step()


@case()
class AccumulatesByToggle(Manual):
    """``toggle_model(sync_grad=…)``, as Lightning's documentation accumulates by hand."""

    def training_step(self, batch: list[Tensor], index: int) -> None:
        optimizer = self.optimizers()
        last = index % 2 == 1
        with optimizer.toggle_model(sync_grad=last):
            self.manual_backward(self.loss(batch) / 2)
            if last:
                nn.utils.clip_grad_norm_(self.parameters(), 0.2)
                optimizer.step()
                optimizer.zero_grad()


@case(refused=SECOND_DERIVATIVES, whole="has parameters whose gradients are differentiated")
class AdaHessian(Manual):
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


@case()
class ChecksFinite(Natural):
    """Skips by a test of all gradients at once, as mixed precision does it by hand."""

    scale = 2.0**3

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (loss * self.scale).backward()

    def on_after_backward(self) -> None:
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        found = torch.zeros(1, dtype=torch.float32, device=self.device)
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, torch.full_like(found, 1 / self.scale))
        self.seen.append(found.item())
