"""Gradients that steps and hooks join, project, measure, clip and differentiate again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.sweeps.twins.base import BY_FUNCTION, SECOND_DERIVATIVES, WIDTH, Manual, Natural, case


def unitwise_norm(x: Tensor) -> Tensor:
    """As in timm."""
    if x.ndim <= 1:
        return x.norm(2.0)
    return x.norm(2.0, dim=tuple(range(1, x.ndim)), keepdim=True)


@case()
class ClipsAdaptively(Natural):
    """AGC."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.parameters():
            if p.grad is None:
                continue
            p_data, g_data = p.detach(), p.grad.detach()
            max_norm = unitwise_norm(p_data).clamp_(min=1e-3).mul_(0.01)
            grad_norm = unitwise_norm(g_data)
            clipped = g_data * (max_norm / grad_norm.clamp(min=1e-6))
            p.grad.detach().copy_(torch.where(grad_norm < max_norm, g_data, clipped))


@case()
class ClipsByGroup(Natural):
    """A limit for each param group, by hand."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(
            [
                {"params": self.net.layers.parameters(), "clip": 0.02},
                {"params": self.net.head.parameters(), "clip": 0.3},
            ],
            lr=1e-2,
            eps=1e-3,
        )

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        for group in optimizer.param_groups:
            grads = [p.grad for p in group["params"] if p.grad is not None]
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads, 2.0)), 2.0)
            torch._foreach_mul_(grads, torch.clamp(group["clip"] / (norm + 1e-6), max=1.0))
            self.seen.append(float(norm))


@case()
class ClipsByPercentile(Natural):
    """AutoClip: the limit is a percentile of the norms so far."""

    def build(self) -> None:
        super().build()
        self.history: list[float] = []

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        total = 0.0
        for p in self.parameters():
            if p.grad is not None:
                total += p.grad.data.norm(2).item() ** 2
        self.history.append(total**0.5)
        limit = torch.quantile(torch.tensor(self.history), 0.25).item()
        self.clip_gradients(optimizer, gradient_clip_val=limit, gradient_clip_algorithm="norm")


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
class KeepsLargest(Natural):
    """Gradients of which the largest tenth is kept, and the rest is carried over: error feedback."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if not hasattr(self, "rest"):
            self.rest = {n: torch.zeros_like(p) for n, p in self.named_parameters()}
        for name, p in self.named_parameters():
            total = p.grad + self.rest[name]
            count = max(1, p.numel() // 10)
            flat = total.flatten()
            _, places = flat.abs().topk(count)
            kept = torch.zeros_like(flat).scatter_(0, places, flat[places]).view_as(total)
            self.rest[name] = total - kept
            p.grad = kept


@case()
class ComparesGradients(Natural):
    """Cosine of gradients of one step and the next; gradient noise scale."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        flat = torch.cat([p.grad.flatten() for p in self.parameters()])
        last = getattr(self, "last", None)
        if last is not None:
            self.seen.append(F.cosine_similarity(flat, last, dim=0).item())
            self.seen.append(float((flat - last).pow(2).mean() / flat.pow(2).mean()))
        self.last = flat.clone()
        ranks = [torch.linalg.matrix_rank(p.grad).item() for p in self.parameters() if p.ndim == 2]
        self.seen += [float(r) for r in ranks]


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


@case(refused=SECOND_DERIVATIVES, whole=BY_FUNCTION)
class LearnsItsRate(Manual):
    """A hypergradient: the learning rate is learned through one step."""

    def build(self) -> None:
        super().build()
        self.log_lr = nn.Parameter(torch.tensor(-2.0))

    def training_step(self, batch: list[Tensor], index: int) -> None:
        params = [p for n, p in self.named_parameters() if n != "log_lr"]
        names = [n.removeprefix("net.") for n, _ in self.named_parameters() if n != "log_lr"]
        grads = torch.autograd.grad(self.loss(batch), params, create_graph=True)
        after = {n: p - self.log_lr.exp() * g for n, p, g in zip(names, params, grads, strict=True)}
        outer = F.cross_entropy(torch.func.functional_call(self.net, after, batch[2]), batch[1])
        (slope,) = torch.autograd.grad(outer, [self.log_lr])
        with torch.no_grad():
            self.log_lr -= 0.1 * slope
            for p, g in zip(params, grads, strict=True):
                p -= self.log_lr.exp() * g
        self.seen.append(self.log_lr.item())


@case(accumulate_grad_batches=2)
class SkipsSteps(Natural):
    """Steps that are left out by the norm of what accumulated, counted."""

    def optimizer_step(self, epoch: int, index: int, optimizer: Any, closure: Any = None) -> None:
        def watched() -> Any:
            loss = closure()
            grads = [p.grad.detach() for p in self.parameters() if p.grad is not None]
            norm = torch.norm(torch.stack([g.norm(2) for g in grads]), 2)
            self.seen.append(norm.item())
            if norm > 0.8:
                for p in self.parameters():
                    p.grad = None
            return loss

        optimizer.step(closure=watched)


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


@case()
class LooksAtJacobian(Manual):
    """Jacobians of outputs by inputs, and double backwards through activations alone."""

    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))

    def training_step(self, batch: list[Tensor], index: int) -> None:
        x = batch[0].clone().requires_grad_()
        out = self.net(x)
        rows = [torch.autograd.grad(out[:, k].sum(), x, create_graph=True)[0] for k in range(3)]
        jacobian = torch.stack(rows, 1)
        trace = sum(torch.autograd.grad(jacobian[:, k, k].sum(), x, create_graph=True)[0][:, k] for k in range(3))
        self.manual_backward(out.square().mean() + jacobian.square().mean() + trace.mean())
        self.optimizers().step()
        self.optimizers().zero_grad()


@case(whole=BY_FUNCTION)
class LooksAtKernel(Manual):
    """A neural tangent kernel of the mean sample, by batched gradients."""

    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))

    def training_step(self, batch: list[Tensor], index: int) -> None:
        out = self.all_gather(self.net(batch[0]), sync_grads=True).reshape(-1, 3).mean(0)
        params = list(self.net.parameters())
        grads = torch.autograd.grad(
            out, params, grad_outputs=torch.eye(3, dtype=out.dtype), is_grads_batched=True, retain_graph=True
        )
        rows = torch.cat([g.flatten(1) for g in grads], 1)
        self.seen += (rows @ rows.t()).flatten().tolist()
        self.manual_backward(out.square().sum())
        self.optimizers().step()
        self.optimizers().zero_grad()


def _pairs(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((n, p) for n, p in module.named_parameters() if p.grad is not None)


@case()
class RecordsByHooks(Natural):
    """Norms of gradients and their histograms from hooks after accumulation."""

    def on_fit_start(self) -> None:
        self.hist: dict[str, list[float]] = {}
        for name, p in self.named_parameters():
            p.register_post_accumulate_grad_hook(
                lambda q, name=name: self.hist.setdefault(name, []).append(float(q.grad.abs().max()))
            )

    def on_before_zero_grad(self, optimizer: Any) -> None:
        with torch.no_grad() if self.global_step else nullcontext():
            for name, p in _pairs(self):
                self.seen.append(float(torch.histc(p.grad.float(), 3, -0.1, 0.1)[1]))
                self.seen.append(self.hist[name][-1])
