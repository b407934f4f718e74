"""Every optimizer of torch, and kinds that others bring."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tests.sweeps.twins.base import STEPS, Manual, Natural


def simple(name: str, build: Callable[[Any], Any], **options: Any) -> None:
    """Make a case with this optimizer."""
    members = {"configure_optimizers": lambda self: build(self), "__module__": build.__module__}
    type(name, (Natural,), members, **options)


EPS: dict[str, Any] = {"lr": 1e-2, "eps": 1e-3}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", {"lr": 0.1}),
    "SGD nesterov": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-2}),
    "SGD foreach": ("SGD", {"lr": 0.1, "momentum": 0.9, "foreach": True, "maximize": True}),
    "SGD fused": ("SGD", {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "Adam amsgrad": ("Adam", EPS | {"amsgrad": True}),
    "Adam foreach": ("Adam", EPS | {"foreach": True}),
    "Adam capturable": ("Adam", EPS | {"lr": torch.tensor(1e-2)}),
    "AdamW": ("AdamW", EPS),
    "AdamW fused": ("AdamW", EPS | {"fused": True}),
    "Adamax": ("Adamax", EPS),
    "Adamax foreach": ("Adamax", EPS | {"foreach": True}),
    "NAdam": ("NAdam", EPS),
    "RAdam": ("RAdam", EPS),
    "RAdam foreach": ("RAdam", EPS | {"foreach": True}),
    "RMSprop": ("RMSprop", EPS | {"centered": True, "momentum": 0.9}),
    "Adagrad": ("Adagrad", EPS),
    "Adagrad fused": ("Adagrad", EPS | {"fused": True}),
    "Adadelta": ("Adadelta", {"lr": 0.5}),
    "ASGD": ("ASGD", {"lr": 1e-2}),
    "ASGD foreach": ("ASGD", {"lr": 1e-2, "foreach": True}),
    "Rprop": ("Rprop", {"lr": 1e-2}),
    "Rprop foreach": ("Rprop", {"lr": 1e-2, "foreach": True}),
    "Adafactor": ("Adafactor", {"lr": 1e-2}),
    "Adafactor foreach": ("Adafactor", {"lr": 1e-2, "foreach": True}),
}


def _build(module: Natural, kind: str, options: dict[str, Any]) -> Optimizer:
    return getattr(torch.optim, kind)(module.parameters(), **copy.deepcopy(options))


for _name, (_kind, _options) in KINDS.items():
    simple(_name, lambda module, kind=_kind, options=_options: _build(module, kind, options))


class Muon(Manual):  # matrices by Muon, the rest by AdamW
    def configure_optimizers(self) -> list[Optimizer]:
        matrices = [p for p in self.net.layers.parameters() if p.ndim == 2]
        others = [p for p in self.parameters() if not any(p is m for m in matrices)]
        return [torch.optim.Muon(matrices, 1e-2), torch.optim.AdamW(others, 1e-2, eps=1e-3)]

    def training_step(self, batch: list[Tensor], index: int) -> None:
        self.manual_backward(self.loss(batch))
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()


class Lbfgs(Natural):
    def configure_optimizers(self) -> Optimizer:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3, history_size=2)


class Own(Optimizer):  # what an optimizer of users begins with
    def __init__(self, params: Any, **defaults: Any) -> None:
        super().__init__(params, {"lr": 1e-2, **defaults})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = torch.enable_grad()(closure)() if closure is not None else None
        self.update_all(loss)
        return loss

    def update_all(self, loss: Any) -> None:
        raise NotImplementedError


class OfEach(Own):  # updates one parameter after the other
    def update_all(self, loss: Any) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, self.state[p], group)

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


class Lamb(OfEach):  # trust ratios as tensors
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


class Shampoo(OfEach):  # needs whole matrices; its state has other shapes than parameters
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


simple("LAMB", lambda m: Lamb(m.parameters(), betas=(0.9, 0.99)))
simple("Shampoo", lambda m: Shampoo(m.parameters()))


class GroupsByLayer(Natural):  # learning rates that fall from layer to layer, a scheduler, groups without decay
    def configure_optimizers(self) -> Any:
        groups = [{"params": [*layer.parameters()], "lr": 0.1 * 0.5**n} for n, layer in enumerate(self.net.layers)]
        inside = {id(p) for group in groups for p in group["params"]}
        rest = [p for p in self.parameters() if id(p) not in inside]
        groups.append({"params": [p for p in rest if p.ndim > 1], "weight_decay": 0.1})
        groups.append({"params": [p for p in rest if p.ndim == 1], "weight_decay": 0.0})
        optimizer = torch.optim.AdamW(groups, 1e-2, eps=1e-3)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=2 * STEPS + 1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class AddsAGroup(Natural):  # parameters that come to the optimizer later
    configure_optimizers = Natural.adamw

    def build(self) -> None:
        super().build()
        self.net.embed.requires_grad_(False)

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        optimizer = self.trainer.optimizers[0]
        if self.trainer.global_step >= 1 and len(optimizer.param_groups) == 1:
            self.net.embed.requires_grad_(True)
            optimizer.add_param_group({"params": list(self.net.embed.parameters()), "lr": 5e-2})


class TransformersAdafactor(Natural):
    def configure_optimizers(self) -> Optimizer:
        from transformers.optimization import Adafactor

        return Adafactor(self.parameters(), lr=1e-2, scale_parameter=True, relative_step=False, warmup_init=False)
