"""Optimizers that keep what is of no parameter, as published ones do; imported in the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import SGD, Optimizer


class Counts(SGD):
    """As MADGRAD: a counter under a text in ``state``, on which the step depends."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        k = self.state.setdefault("k", torch.tensor([0]))  # type: ignore[call-overload]  # as MADGRAD does
        self.param_groups[0]["lr"] = 0.1 / (1 + k.item())
        loss = super().step(closure)
        k += 1
        return loss


class Adds(SGD):
    """As Ranger21 and SPAM: entries in ``state_dict``, a nested one and a tensor among them, taken back."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.steps, self.warmup, self.mean = 0, {"left": 5, "decay": (0.5, None)}, torch.zeros(3)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self.steps += 1
        self.mean += self.steps
        self.warmup = {**self.warmup, "left": self.warmup["left"] - 1}
        for group in self.param_groups:
            group["lr"] = 0.1 / self.steps + 0.001 * self.mean[0].item()
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "steps": self.steps, "warmup": self.warmup, "mean": self.mean}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.steps, self.warmup, self.mean = (state_dict[key] for key in ("steps", "warmup", "mean"))


class Wraps(SGD):
    """As Lookahead: a state dict of another kind."""

    def state_dict(self) -> dict[str, Any]:
        return {"base_optimizer": super().state_dict(), "slow": {}}


class Scales(Adds):
    """Its state dict changes the state of parameters."""

    def state_dict(self) -> dict[str, Any]:
        found = super().state_dict()
        return {**found, "state": {k: {"momentum_buffer": 2 * v["momentum_buffer"]} for k, v in found["state"].items()}}


class AddsObject(SGD):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "generator": object()}


KINDS: dict[str, type[Optimizer]] = {kind.__name__: kind for kind in (Counts, Adds, Wraps, Scales, AddsObject)}
