"""Every optimizer of torch, and kinds that others bring."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tests.sweeps.twins.base import STEPS, Natural, case

KINDS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "SGD nesterov": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "SGD foreach": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True, maximize=True),
    "SGD fused": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, 1e-2, eps=1e-3),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, 1e-2, eps=1e-3, amsgrad=True),
    "Adam foreach": lambda p: torch.optim.Adam(p, 1e-2, eps=1e-3, foreach=True),
    "Adam capturable": lambda p: torch.optim.Adam(p, torch.tensor(1e-2), eps=1e-3),
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-2, eps=1e-3),
    "AdamW fused": lambda p: torch.optim.AdamW(p, 1e-2, eps=1e-3, fused=True),
    "Adamax": lambda p: torch.optim.Adamax(p, 1e-2, eps=1e-3),
    "Adamax foreach": lambda p: torch.optim.Adamax(p, 1e-2, eps=1e-3, foreach=True),
    "NAdam": lambda p: torch.optim.NAdam(p, 1e-2, eps=1e-3),
    "RAdam": lambda p: torch.optim.RAdam(p, 1e-2, eps=1e-3),
    "RAdam foreach": lambda p: torch.optim.RAdam(p, 1e-2, eps=1e-3, foreach=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 1e-2, eps=1e-3, centered=True, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 1e-2, eps=1e-3),
    "Adagrad fused": lambda p: torch.optim.Adagrad(p, 1e-2, eps=1e-3, fused=True),
    "Adadelta": lambda p: torch.optim.Adadelta(p, 0.5),
    "ASGD": lambda p: torch.optim.ASGD(p, 1e-2),
    "ASGD foreach": lambda p: torch.optim.ASGD(p, 1e-2, foreach=True),
    "Rprop": lambda p: torch.optim.Rprop(p, 1e-2),
    "Rprop foreach": lambda p: torch.optim.Rprop(p, 1e-2, foreach=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 1e-2),
    "Adafactor foreach": lambda p: torch.optim.Adafactor(p, 1e-2, foreach=True),
}


class Simple(Natural):
    kind: Callable[[Any], Optimizer]

    def configure_optimizers(self) -> Optimizer:
        return type(self).kind(self.parameters())


for _name, _kind in KINDS.items():
    _made = type(f"With{_name.title().replace(' ', '')}", (Simple,), {"kind": staticmethod(_kind)})
    case(_name)(_made)


@case()
class Muon(Natural):
    """Matrices by Muon, the rest by AdamW."""

    def configure_optimizers(self) -> list[Optimizer]:
        matrices = [p for p in self.net.layers.parameters() if p.ndim == 2]
        others = [p for p in self.parameters() if not any(p is m for m in matrices)]
        return [torch.optim.Muon(matrices, 1e-2), torch.optim.AdamW(others, 1e-2, eps=1e-3)]

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], index: int) -> None:
        self.manual_backward(self.loss(batch))
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()


@case()
class Lbfgs(Natural):
    def configure_optimizers(self) -> Optimizer:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3, history_size=2)


def simple(build: Callable[[Natural], Any]) -> type:
    """A module with this optimizer."""

    class Optimized(Natural):
        def configure_optimizers(self) -> Any:
            return build(self)

    return Optimized


class OfEach(Optimizer):
    """Updates one parameter after the other."""

    def __init__(self, params: Any, lr: float = 1e-2, **defaults: Any) -> None:
        super().__init__(params, {"lr": lr, **defaults})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = torch.enable_grad()(closure)() if closure is not None else None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, self.state[p], group)
        return loss

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


class Lamb(OfEach):
    """Trust ratios as tensors."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state.update(step=0, m=torch.zeros_like(p.data), v=p.new_zeros(p.shape))
        state["step"] += 1
        state["m"].lerp_(grad, 1 - group["betas"][0])
        state["v"].mul_(group["betas"][1]).addcmul_(grad, grad, value=1 - group["betas"][1])
        update = state["m"] / (state["v"].sqrt() + 1e-3) + 1e-2 * p
        w, u = p.norm(p=2), update.norm(p=2)
        ratio = torch.where(w > 0, torch.where(u > 0, w / u, 1.0), 1.0).clamp(max=10)
        p.data.add_(update * ratio, alpha=-group["lr"])


class Shampoo(OfEach):
    """Needs whole matrices; its state has other shapes than parameters."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        g = grad.view(p.shape[0], -1) if p.ndim > 1 else grad.view(1, -1)
        if not state:
            state["left"] = 1e-1 * torch.eye(g.shape[0], dtype=g.dtype, device=g.device)
            state["right"] = 1e-1 * torch.eye(g.shape[1], dtype=g.dtype, device=g.device)
        state["left"] += g @ g.t()
        state["right"] += g.t() @ g
        p.sub_((_root(state["left"]) @ g @ _root(state["right"])).view_as(p), alpha=group["lr"])


def _root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values.pow(-0.25)) @ vectors.t()


case("LAMB")(simple(lambda m: Lamb(m.parameters(), betas=(0.9, 0.99))))
case("Shampoo")(simple(lambda m: Shampoo(m.parameters())))


class CountingSGD(torch.optim.SGD):
    """Keeps numbers beside its state, in its own ``state_dict``."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.steps, self.warm = 0, torch.zeros(3)

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] = 0.1 / math.sqrt(1 + self.steps)
        self.steps += 1
        self.warm[self.steps % 3] += 1
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "steps": self.steps, "warm": self.warm}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        state = dict(state)
        self.steps, self.warm = state.pop("steps"), state.pop("warm")
        super().load_state_dict(state)


@case()
class CountsByItself(Natural):
    def configure_optimizers(self) -> Optimizer:
        return CountingSGD(self.parameters(), 0.1)

    def on_train_end(self) -> None:
        optimizer = self.trainer.optimizers[0]
        self.seen += [float(optimizer.steps), *optimizer.warm.tolist()]


@case()
class GroupsByLayer(Natural):
    """Learning rates that fall from layer to layer, a scheduler, groups without decay."""

    def configure_optimizers(self) -> Any:
        groups = [{"params": [*layer.parameters()], "lr": 0.1 * 0.5**n} for n, layer in enumerate(self.net.layers)]
        inside = {id(p) for group in groups for p in group["params"]}
        rest = [p for p in self.parameters() if id(p) not in inside]
        groups.append({"params": [p for p in rest if p.ndim > 1], "weight_decay": 0.1})
        groups.append({"params": [p for p in rest if p.ndim == 1], "weight_decay": 0.0})
        optimizer = torch.optim.AdamW(groups, 1e-2, eps=1e-3)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=2 * STEPS + 1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@case()
class AddsAGroup(Natural):
    """Parameters that come to the optimizer later."""

    def build(self) -> None:
        super().build()
        self.net.embed.requires_grad_(False)

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], 1e-2, eps=1e-3)

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        optimizer = self.trainer.optimizers[0]
        if self.trainer.global_step >= 1 and len(optimizer.param_groups) == 1:
            self.net.embed.requires_grad_(True)
            optimizer.add_param_group({"params": list(self.net.embed.parameters()), "lr": 5e-2})


@case()
class TransformersAdafactor(Natural):
    def configure_optimizers(self) -> Optimizer:
        from transformers.optimization import Adafactor

        return Adafactor(self.parameters(), lr=1e-2, scale_parameter=True, relative_step=False, warmup_init=False)
