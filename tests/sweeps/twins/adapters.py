"""Adapters beside frozen weights: added by hooks, merged, swapped within a step, composed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.sweeps.twins.base import CLASSES, WIDTH, Manual, Natural, Net


class LowRank(nn.Module):  # the change of a linear layer by two narrow matrices
    def __init__(self, linear: nn.Linear, rank: int = 2, scale: float = 0.5) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.linspace(-0.5, 0.5, rank * linear.in_features).view(rank, linear.in_features))
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank))
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.down.t() @ self.up.t()) * self.scale

    def delta(self) -> Tensor:
        return self.up @ self.down * self.scale


class Frozen(Natural, abstract=True):  # a frozen network; what trains is added by others
    def build(self) -> None:
        self.net = Net().requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=2e-2)


class LoraByHooksOfParts(Frozen):
    """The adapters belong to the layers that they change, and see them by the hook's arguments."""

    def build(self) -> None:
        super().build()
        for linear in [m for m in self.net.layers.modules() if isinstance(m, nn.Linear)]:
            linear.lora = LowRank(linear)
            linear.register_forward_hook(lambda module, args, output: output + module.lora(args[0]))
        self.net.head.requires_grad_(True)


class SwapsAdaptersByBatch(Frozen, max_epochs=2):
    class Layer(nn.Module):  # a layer with two adapters, of which one is active
        active = "one"

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
            self.adapters = nn.ModuleDict({n: LowRank(self.linear, scale=k) for k, n in enumerate(("one", "two"), 1)})

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.tanh(self.linear(x) + self.adapters[self.active](x))

    def build(self) -> None:
        super().build()
        self.net.layers = nn.ModuleList(self.Layer() for _ in range(2))
        self.net.head.requires_grad_(True)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        for layer in self.net.layers:
            layer.active = "one" if index % 2 else "two"
        loss = self.loss(batch)
        for layer in self.net.layers:
            layer.active = "one"
        return loss


class SwapsAttributesInStep(Manual):
    """Two heads, put as modules into one place of the network, one after the other, each with its own optimizer."""

    def build(self) -> None:
        super().build()
        self.heads = nn.ModuleList([self.net.head, nn.Linear(WIDTH, CLASSES)])

    def configure_optimizers(self) -> Any:
        body = [p for name, p in self.net.named_parameters() if not name.startswith("head.")]
        return [torch.optim.SGD([*head.parameters(), *body], lr=0.05) for head in self.heads]

    def training_step(self, batch: list[Tensor], index: int) -> None:
        for head, optimizer, source in zip(self.heads, self.optimizers(), (batch[0], batch[2]), strict=True):
            self.net.head = head
            optimizer.zero_grad()
            self.manual_backward(F.cross_entropy(self.net(source), batch[1]))
            optimizer.step()
        self.net.head = self.heads[0]
