"""What happens between a layer whose columns a tensor-parallel plan shards, and the next one, whose rows it shards."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.sweeps.twins.base import WIDTH, Natural, Net, case


class Between(nn.Module):
    """A block that does something to its hidden activation."""

    kept: Tensor

    def __init__(self, hidden: Callable[[Between, Tensor], Tensor], wide: int) -> None:
        super().__init__()
        self.a, self.b, self.hidden = nn.Linear(WIDTH, wide), nn.Linear(12, WIDTH), hidden
        if hidden in OF_PARAMETERS:
            self.norm, self.gain = nn.LayerNorm(12), nn.Parameter(torch.linspace(0.5, 1.5, 12))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(self.hidden(self, self.a(x)))


def gated(block: Between, h: Tensor) -> Tensor:
    """GLU: halves of the columns, multiplied."""
    value, gate = h.chunk(2, -1)
    return value * gate.sigmoid()


def sparse(block: Between, h: Tensor) -> Tensor:
    """The largest activations alone."""
    kept, places = h.topk(4, dim=-1)
    return torch.zeros_like(h).scatter(-1, places, kept)


def penalized(block: Between, h: Tensor) -> Tensor:
    """Keeps its hidden activation for a penalty of the step."""
    block.kept = torch.relu(h)
    return block.kept


def normed(block: Between, h: Tensor) -> Tensor:
    return F.gelu(block.norm(h))


def weighted(block: Between, h: Tensor) -> Tensor:
    """A parameter for each column."""
    return torch.relu(h) * block.gain


OF_PARAMETERS = (normed, weighted)
HIDDEN: dict[str, tuple[Callable[[Between, Tensor], Tensor], int]] = {
    "Gated": (gated, 24),
    "GatedByTorch": (lambda block, h: F.glu(h), 24),
    "GatedBySlices": (lambda block, h: h[..., :12] * F.silu(h[..., 12:]), 24),
    "Softmax": (lambda block, h: h.softmax(-1), 12),
    "Normed": (normed, 12),
    "NormedByHand": (lambda block, h: h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-5), 12),
    "Standard": (lambda block, h: F.layer_norm(h, h.shape[-1:]), 12),
    "ScaledByWidth": (lambda block, h: torch.relu(h) / h.shape[-1] ** 0.5, 12),
    "MaxOfColumns": (lambda block, h: h - h.max(-1, keepdim=True).values, 12),
    "Sparse": (sparse, 12),
    "Rolled": (lambda block, h: h.flip(-1), 12),
    "Grouped": (lambda block, h: F.group_norm(h, 2), 12),
    "Weighted": (weighted, 12),
}


def between(hidden: Callable[[Between, Tensor], Tensor], wide: int) -> type:
    class Blocks(Natural):
        def build(self) -> None:
            self.net = Net()
            self.net.layers = nn.ModuleList(Between(hidden, wide) for _ in range(2))

    return Blocks


for _name, _of in HIDDEN.items():
    case(f"Hidden{_name}")(between(*_of))


@case()
class HiddenPenalized(between(penalized, 12)):  # type: ignore[misc]  # made above
    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = self.loss(batch)
        return loss + sum(0.1 * layer.kept.square().mean() + 0.1 * layer.kept.mean() for layer in self.net.layers)
