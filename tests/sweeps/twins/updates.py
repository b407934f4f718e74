"""Optimizers as users write or bring them: second moments of matrices, distances, noise, codes, wrappers."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tests.sweeps.twins.base import Manual, Natural, case
from tests.sweeps.twins.optimizers import OfEach, simple


class Soap(OfEach):
    """Adam in the eigenbasis of Shampoo's preconditioners."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if "step" not in state:
            state["step"] = 0
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(grad), torch.zeros_like(grad)
            state["GG"] = [torch.arange(n).to(grad).diag() * 1e-2 for n in grad.shape]
            state["Q"] = None
        self.precondition(grad, state)
        if state["Q"] is None:
            state["Q"] = [torch.linalg.eigh(m)[1] for m in state["GG"]]
        state["step"] += 1
        projected = self.project(grad, state["Q"])
        state["exp_avg"].lerp_(grad, 0.1)
        state["exp_avg_sq"].mul_(0.95).add_(projected.square(), alpha=0.05)
        update = self.project(state["exp_avg"], state["Q"]) / (state["exp_avg_sq"].sqrt() + group["eps"])
        p.add_(self.back(update, state["Q"]), alpha=-group["lr"])
        if state["step"] % group["every"] == 0:
            state["Q"] = [torch.linalg.qr(m @ q)[0] for m, q in zip(state["GG"], state["Q"], strict=True)]

    def precondition(self, grad: Tensor, state: dict[str, Any]) -> None:
        for n in range(grad.ndim):
            others = [*range(n), *range(n + 1, grad.ndim)]
            state["GG"][n].lerp_(torch.tensordot(grad, grad, dims=[others, others]), 0.1)

    def project(self, x: Tensor, bases: list[Tensor]) -> Tensor:
        for q in bases:
            x = torch.tensordot(x, q, dims=[[0], [0]])
        return x

    def back(self, x: Tensor, bases: list[Tensor]) -> Tensor:
        for q in bases:
            x = torch.tensordot(x, q, dims=[[0], [1]])
        return x


case("Soap")(simple(lambda m: Soap(m.parameters(), betas=(0.9, 0.95), eps=1e-3, every=2)))


class Prodigy(Optimizer):
    """A learning rate from global dot products; slices of parameters in its state."""

    def __init__(self, params: Any, slice_p: int = 2) -> None:
        super().__init__(params, {"lr": 1.0, "d": 1e-3, "d0": 1e-3, "numerator": 0.0, "k": 0, "slice_p": slice_p})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = torch.enable_grad()(closure)() if closure is not None else None
        group = self.param_groups[0]
        d, denominator, numerator = group["d"], 0.0, group["numerator"] * 0.95
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, every = self.state[p], group["slice_p"]
                if "step" not in state:
                    state["step"] = 0
                    state["s"] = torch.zeros_like(p.flatten()[::every]).detach()
                    state["p0"] = p.flatten()[::every].detach().clone() if p.any() else torch.tensor(0, dtype=p.dtype)
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p).detach(), torch.zeros_like(p).detach()
                grad = p.grad
                sliced = grad.flatten()[::every]
                numerator += d / group["d0"] * d * torch.dot(sliced, state["p0"] - p.flatten()[::every]).item()
                state["exp_avg"].mul_(0.9).add_(grad, alpha=d * 0.1)
                state["exp_avg_sq"].mul_(0.95).addcmul_(grad, grad, value=d * d * 0.05)
                state["s"].mul_(0.95).add_(sliced, alpha=d / group["d0"] * d)
                denominator += state["s"].abs().sum().item()
        d_hat = numerator / max(denominator, 1e-12)
        for group in self.param_groups:
            group["numerator"], group["d"], group["k"] = numerator, max(d, min(d_hat, d * 1.5)), group["k"] + 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["step"] += 1
                denom = state["exp_avg_sq"].sqrt().add_(group["d"] * 1e-2)
                p.data.addcdiv_(state["exp_avg"], denom, value=-group["d"])
        return loss


case("Prodigy")(simple(lambda m: Prodigy(m.parameters())))


class DAdaptation(Optimizer):
    """D-Adaptation of SGD: norms over all parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1.0, "d": 1e-2, "k": 0, "weighted": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = torch.enable_grad()(closure)() if closure is not None else None
        group, squares, s_squares, total = self.param_groups[0], 0.0, 0.0, 0.0
        live = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        for p in live:
            squares += (p.grad * p.grad).sum().item()
        if group["k"] == 0:
            group["g0"] = math.sqrt(squares)
        rate = group["d"] * group["lr"] / group["g0"]
        for p in live:
            state = self.state[p]
            if "z" not in state:
                state["z"], state["s"] = torch.clone(p.data).detach(), torch.zeros_like(p.data).detach()
                state["x0"] = torch.clone(p.data).detach()
            state["s"].data.add_(p.grad, alpha=rate)
            s_squares += (state["s"] * state["s"]).sum().item()
        group["weighted"] += rate * rate * squares
        d_hat = (s_squares - group["weighted"]) / (math.sqrt(s_squares) + 1e-12)
        group["d"], group["k"] = max(group["d"], d_hat), group["k"] + 1
        for p in live:
            state = self.state[p]
            state["z"].data.copy_(state["x0"] - state["s"])
            p.data.mul_(0.9).add_(state["z"], alpha=0.1)
            total += p.data.abs().sum().item()
        group["total"] = total
        return loss


case("DAdaptation")(simple(lambda m: DAdaptation(m.parameters())))


class ScheduleFree(Optimizer):
    """Weights that are swapped for evaluation by ``train`` and ``eval``."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "beta": 0.9, "k": 0, "train_mode": True})

    @torch.no_grad()
    def eval(self) -> None:
        self._switch(False)

    @torch.no_grad()
    def train(self) -> None:
        self._switch(True)

    def _switch(self, train: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] != train:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        weight = 1 - group["beta"] if train else 1 - 1 / group["beta"]
                        p.lerp_(end=self.state[p]["z"], weight=weight)
                group["train_mode"] = train

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = torch.enable_grad()(closure)() if closure is not None else None
        for group in self.param_groups:
            active = [p for p in group["params"] if p.grad is not None]
            for p in active:
                if "z" not in self.state[p]:
                    self.state[p]["z"] = torch.clone(p, memory_format=torch.preserve_format)
            y, grad, z = zip(*[(p, p.grad, self.state[p]["z"]) for p in active], strict=True)
            ckp1 = 1 / (group["k"] + 1)
            torch._foreach_lerp_(y, z, weight=ckp1)
            torch._foreach_add_(y, grad, alpha=group["lr"] * (group["beta"] * (1 - ckp1) - 1))
            torch._foreach_sub_(z, grad, alpha=group["lr"])
            group["k"] += 1
        return loss


@case(limit_val_batches=1)
class TrainsScheduleFree(Natural):
    val_dataloader = Natural.loader

    def configure_optimizers(self) -> Any:
        return ScheduleFree(self.parameters())

    def on_validation_start(self) -> None:
        self.optimizers().optimizer.eval()

    def on_validation_end(self) -> None:
        self.optimizers().optimizer.train()

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)


class SophiaG(Optimizer):
    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "rho": 0.04, "weight_decay": 0.1})

    @torch.no_grad()
    def update_hessian(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "hessian" not in state:
                    state["hessian"], state["exp_avg"] = torch.zeros_like(p), torch.zeros_like(p)
                state["hessian"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = torch.enable_grad()(closure)() if closure is not None else None
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "hessian" not in state:
                    state["hessian"], state["exp_avg"] = torch.zeros_like(p), torch.zeros_like(p)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                state["exp_avg"].mul_(0.96).add_(p.grad, alpha=0.04)
                ratio = (state["exp_avg"].abs() / (group["rho"] * 16 * state["hessian"] + 1e-3)).clamp(None, 1)
                p.addcmul_(state["exp_avg"].sign(), ratio, value=-group["lr"])
        return loss


@case()
class Sophia(Manual):
    def configure_optimizers(self) -> Any:
        return SophiaG(self.parameters())

    def training_step(self, batch: list[Tensor], index: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if index % 2 == 0:
            logits = self.net(batch[0])
            sampled = logits.detach().argmax(1)  # in place of a draw, which each rank makes for its own samples
            self.manual_backward(torch.nn.functional.cross_entropy(logits, sampled))
            optimizer.optimizer.update_hessian()
            optimizer.zero_grad(set_to_none=True)


class Adan(Optimizer):
    """Differences of gradients; lists of tensors for each group."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "step": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = torch.enable_grad()(closure)() if closure is not None else None
        device = self.param_groups[0]["params"][0].device
        global_norm = torch.zeros(1, device=device)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    global_norm.add_(p.grad.pow(2).sum())
        scale = torch.clamp(torch.tensor(0.5) / (torch.sqrt(global_norm) + 1e-8), max=1.0).item()
        for group in self.param_groups:
            group["step"] += 1
            lists = defaultdict(list)
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    for name in ("exp_avg", "exp_avg_sq", "exp_avg_diff"):
                        state[name] = torch.zeros_like(p)
                if "pre_grad" not in state or group["step"] == 1:
                    state["pre_grad"] = p.grad.clone().mul_(-scale)
                for name in ("exp_avg", "exp_avg_sq", "exp_avg_diff", "pre_grad"):
                    lists[name].append(state[name])
                lists["params"].append(p)
                lists["grads"].append(p.grad)
            torch._foreach_mul_(lists["grads"], scale)
            torch._foreach_add_(lists["pre_grad"], lists["grads"])
            torch._foreach_lerp_(lists["exp_avg"], lists["grads"], 0.02)
            torch._foreach_lerp_(lists["exp_avg_diff"], lists["pre_grad"], 0.08)
            torch._foreach_mul_(lists["pre_grad"], 0.92)
            torch._foreach_add_(lists["pre_grad"], lists["grads"])
            torch._foreach_mul_(lists["exp_avg_sq"], 0.99)
            torch._foreach_addcmul_(lists["exp_avg_sq"], lists["pre_grad"], lists["pre_grad"], value=0.01)
            denom = torch._foreach_sqrt(lists["exp_avg_sq"])
            torch._foreach_add_(denom, 1e-2)
            torch._foreach_addcdiv_(lists["params"], lists["exp_avg"], denom, [-group["lr"]] * len(denom))
            torch._foreach_zero_(lists["pre_grad"])
            torch._foreach_add_(lists["pre_grad"], lists["grads"], alpha=-1.0)
        return loss


case("Adan")(simple(lambda m: Adan(m.parameters())))


class QuantizedAdam(OfEach):
    """Blockwise codes in int8 and scales, in place of moments."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        moment = self.read(state, p) if state else torch.zeros_like(p)
        moment = 0.9 * moment + 0.1 * grad
        state["codes"], state["scales"] = self.write(moment)
        p.add_(self.read(state, p), alpha=-group["lr"])

    def write(self, moment: Tensor) -> tuple[Tensor, Tensor]:
        flat = moment.flatten()
        blocks = torch.nn.functional.pad(flat, (0, -len(flat) % 16)).view(-1, 16)
        scales = blocks.abs().amax(1, keepdim=True).clamp(min=1e-12)
        return (blocks / scales * 127).round().to(torch.int8), scales

    def read(self, state: dict[str, Any], p: Tensor) -> Tensor:
        return (state["codes"].to(p.dtype) / 127 * state["scales"]).flatten()[: p.numel()].view_as(p)


case("QuantizedAdam", tolerance=1e-8)(simple(lambda m: QuantizedAdam(m.parameters())))


class SamOptimizer(Optimizer):
    """As davda54's: wraps another optimizer, shares its groups."""

    def __init__(self, params: Any, base: Any, rho: float = 0.05, adaptive: bool = True, **kwargs: Any) -> None:
        super().__init__(params, {"rho": rho, "adaptive": adaptive, **kwargs})
        self.base_optimizer = base(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self) -> None:
        norm = self._grad_norm()
        for group in self.param_groups:
            scale = group["rho"] / (norm + 1e-12)
            for p in group["params"]:
                if p.grad is None:
                    continue
                self.state[p]["old_p"] = p.data.clone()
                p.add_((torch.pow(p, 2) if group["adaptive"] else 1.0) * p.grad * scale.to(p))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = self.state[p]["old_p"]
        self.base_optimizer.step()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        closure = torch.enable_grad()(closure)
        loss = closure()
        self.first_step()
        closure()
        self.second_step()
        return loss

    def _grad_norm(self) -> Tensor:
        return torch.norm(
            torch.stack(
                [
                    ((torch.abs(p) if group["adaptive"] else 1.0) * p.grad).norm(p=2)
                    for group in self.param_groups
                    for p in group["params"]
                    if p.grad is not None
                ]
            ),
            p=2,
        )


case("SamOptimizer")(simple(lambda m: SamOptimizer(m.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)))


class Langevin(Optimizer):
    """SGLD: noise in every step."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = torch.enable_grad()(closure)() if closure is not None else None
        self.steps = getattr(self, "steps", 0) + 1
        torch.manual_seed(self.steps)  # a run on several ranks is seeded anew when it begins, as under DDP
        for group in self.param_groups:
            for p in group["params"]:
                noise = torch.normal(torch.zeros_like(p), 1e-2 * torch.ones_like(p))
                p.add_(-group["lr"] * p.grad + noise + p.new(p.size()).normal_(0, 1e-2))
        return loss


case("Langevin")(simple(lambda m: Langevin(m.parameters())))


@case()
class SearchesLines(Natural):
    """L-BFGS with the search of strong Wolfe conditions."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=4, history_size=3, line_search_fn="strong_wolfe")
