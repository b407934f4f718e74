"""Optimizers as users write or bring them: second moments of matrices, distances, noise, codes, wrappers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tests.sweeps.twins.base import Natural, case
from tests.sweeps.twins.optimizers import OfEach, simple


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
