"""State of a plain script, and comparisons of any state: its whole tensors, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import StepLR

State = dict[str, Any]


class Net(nn.Module):  # odd sizes, a tie, a buffer, a frozen parameter and extra state
    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.told = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x).relu()
        self.count += 1
        return self.head(x)

    def get_extra_state(self) -> int:
        return self.told

    def set_extra_state(self, state: int) -> None:
        self.told = state


def trained(seed: int, steps: int = 2, cut: Callable[[nn.Module], object] | None = None) -> State:
    """A model, its optimizer and scheduler, and other state, after some steps; 0 steps: as a script begins."""
    torch.manual_seed(seed)
    model = Net()
    if cut is not None:
        cut(model)
    decayed = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.ndim <= 1]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others}], lr=0.01 * seed)
    scheduler = StepLR(optimizer, 1, 0.5)
    tokens = torch.arange(6).view(2, 3)
    for _ in range(steps):
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    model.told = seed * steps
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "step": steps,
        "nested": {"mean": torch.full((2, 3), float(seed)), "names": ["a", seed], "big": torch.full((600,), seed)},
    }


def whole(value: Any) -> Any:
    """A value with whole tensors and without objects."""
    if isinstance(value, nn.Module):
        return whole(dict(value.state_dict()))
    if isinstance(value, torch.optim.Optimizer):
        return whole(value.state_dict())
    if isinstance(value, DTensor):
        return value.full_tensor().detach().clone()
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {k: whole(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [whole(v) for v in value]
    return whole(value.state_dict()) if hasattr(value, "state_dict") else value


def differing(a: Any, b: Any, path: str = "") -> list[str]:
    """Where two whole values differ, bit for bit."""
    if isinstance(a, dict) and isinstance(b, dict):
        return [d for k in a.keys() | b.keys() for d in differing(a.get(k, "-"), b.get(k, "-"), f"{path}/{k}")]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [d for i, (x, y) in enumerate(zip(a, b, strict=True)) for d in differing(x, y, f"{path}/{i}")]
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return [] if a.dtype == b.dtype and torch.equal(a, b) else [path]
    return [] if type(a) is type(b) and a == b else [path]
