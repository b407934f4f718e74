"""What happens between a layer whose columns a tensor-parallel plan shards, and the next one, whose rows it shards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.sweeps.twins.base import WIDTH, Natural, Net, case


class Between(nn.Module):
    """A block that does something to its hidden activation."""

    def __init__(self, wide: int = 12) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, wide), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(self.hidden(self.a(x)))

    def hidden(self, h: Tensor) -> Tensor:
        raise NotImplementedError


def between(kind: type, *args: Any) -> type:
    class Blocks(Natural):
        def build(self) -> None:
            self.net = Net()
            self.net.layers = nn.ModuleList(kind(*args) for _ in range(2))

    return Blocks


class Gated(Between):
    """GLU: halves of the columns, multiplied."""

    def hidden(self, h: Tensor) -> Tensor:
        value, gate = h.chunk(2, -1)
        return value * gate.sigmoid()


class GatedByTorch(Between):
    def hidden(self, h: Tensor) -> Tensor:
        return F.glu(h)


class GatedBySlices(Between):
    def hidden(self, h: Tensor) -> Tensor:
        return h[..., :12] * F.silu(h[..., 12:])


class Softmax(Between):
    def hidden(self, h: Tensor) -> Tensor:
        return h.softmax(-1)


class Normed(Between):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12)

    def hidden(self, h: Tensor) -> Tensor:
        return F.gelu(self.norm(h))


class NormedByHand(Between):
    def hidden(self, h: Tensor) -> Tensor:
        return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-5)


class Standard(Between):
    def hidden(self, h: Tensor) -> Tensor:
        return F.layer_norm(h, h.shape[-1:])


class ScaledByWidth(Between):
    def hidden(self, h: Tensor) -> Tensor:
        return torch.relu(h) / h.shape[-1] ** 0.5


class MaxOfColumns(Between):
    def hidden(self, h: Tensor) -> Tensor:
        return h - h.max(-1, keepdim=True).values


class Sparse(Between):
    """The largest activations alone."""

    def hidden(self, h: Tensor) -> Tensor:
        kept, places = h.topk(4, dim=-1)
        return torch.zeros_like(h).scatter(-1, places, kept)


class Rolled(Between):
    def hidden(self, h: Tensor) -> Tensor:
        return h.flip(-1)


class Grouped(Between):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, 12, affine=False)

    def hidden(self, h: Tensor) -> Tensor:
        return self.norm(h)


class Weighted(Between):
    """A parameter for each column."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 12))

    def hidden(self, h: Tensor) -> Tensor:
        return torch.relu(h) * self.gain


class Penalized(Between):
    """Keeps its hidden activation for a penalty of the step."""

    kept: Tensor

    def hidden(self, h: Tensor) -> Tensor:
        self.kept = torch.relu(h)
        return self.kept


for _kind, _args in (
    (Gated, (24,)),
    (GatedByTorch, (24,)),
    (GatedBySlices, (24,)),
    (Softmax, ()),
    (Normed, ()),
    (NormedByHand, ()),
    (Standard, ()),
    (ScaledByWidth, ()),
    (MaxOfColumns, ()),
    (Sparse, ()),
    (Rolled, ()),
    (Grouped, ()),
    (Weighted, ()),
):
    case(f"Hidden{_kind.__name__}")(between(_kind, *_args))


@case()
class HiddenPenalized(between(Penalized)):  # type: ignore[misc]  # made above
    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = self.loss(batch)
        return loss + sum(0.1 * layer.kept.square().mean() + 0.1 * layer.kept.mean() for layer in self.net.layers)
