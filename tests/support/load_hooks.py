"""Modules that run code of their own when they are loaded, in a table; beside each, one that has what is stored."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver
from torch.nn.utils import parametrizations

from lightning_shardckpt.state.model import is_elsewhere


class Linear(nn.Module):
    """Some rows for every rank."""

    def __init__(self, first: float = 0.0, rows: int = 6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(4.0 * rows).reshape(rows, 4) / 8 + first)
        self.register_buffer("count", torch.tensor(first))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T @ torch.ones(len(self.weight), 4)


class RebuiltTable(Linear):
    def __init__(self, first: float = 0.0) -> None:
        super().__init__(first)
        self.register_buffer("table", torch.zeros(4), persistent=False)
        self.register_load_state_dict_post_hook(self.rebuild)  # type: ignore[no-untyped-call]  # torch's

    @staticmethod
    def rebuild(module: Any, keys: Any) -> None:
        with torch.no_grad():
            module.table.copy_(module.weight.cumsum(0)[-1] + module.count)


class Doubled(Linear):
    def __init__(self, first: float = 0.0) -> None:
        super().__init__(first)
        self.register_load_state_dict_pre_hook(self.twice)  # type: ignore[no-untyped-call]  # torch's

    @staticmethod
    def twice(module: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        state[prefix + "weight"] = state[prefix + "weight"].cumsum(0) * 2 + module.weight.detach()
        state[prefix + "count"].add_(1)


class OldName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.arange(24.0).reshape(6, 4) - 3)
        self.register_buffer("count", torch.tensor(5.0))


class Renamed(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(self.rename)  # type: ignore[no-untyped-call]  # torch's

    @staticmethod
    def rename(module: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        if prefix + "kernel" in state:
            state[prefix + "weight"] = state.pop(prefix + "kernel")


class Kept(Linear):
    """Never loads its weight, and drops what it has not."""

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        state[prefix + "weight"] = self.weight.detach().clone()
        state.pop(prefix + "other", None)
        super()._load_from_state_dict(state, prefix, *rest)


class WithOther(Linear):
    def __init__(self) -> None:
        super().__init__(9.0)
        self.register_buffer("other", torch.ones(3))


class Queue(Linear):
    """A buffer that is as long as what is stored."""

    def __init__(self, length: int = 0) -> None:
        super().__init__(float(length))
        self.register_buffer("queue", torch.arange(1.0 * length))

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        self.queue = torch.empty_like(state[prefix + "queue"])
        super()._load_from_state_dict(state, prefix, *rest)


class First(Linear):
    """Its first version."""


class Second(Linear):
    """Version 2 has half the values."""

    _version = 2

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, metadata: Any, *rest: Any) -> None:
        if metadata.get("version", 0) < 2:
            state[prefix + "weight"] = state[prefix + "weight"] / 2
        super()._load_from_state_dict(state, prefix, metadata, *rest)


class Uncounted(nn.Module):
    """A BatchNorm of old."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.arange(4.0)), nn.Parameter(torch.arange(4.0) + 1)
        self.register_buffer("running_mean", torch.arange(4.0) + 2)
        self.register_buffer("running_var", torch.arange(4.0) + 3)


class NotStrict(Linear):
    """Forgives that what is new is missing."""

    def __init__(self) -> None:
        super().__init__()
        self.new = nn.Parameter(torch.full((6, 2), 7.0))
        self.register_load_state_dict_post_hook(self.forgive)  # type: ignore[no-untyped-call]  # torch's

    @staticmethod
    def forgive(module: Any, keys: Any) -> None:
        keys.missing_keys[:] = [key for key in keys.missing_keys if not key.endswith("new")]


class Extra(Linear):
    """Its extra state says how its hook changes the weight, which runs after it."""

    def __init__(self, factor: int = 1) -> None:
        super().__init__(float(factor))
        self.factor = factor
        self.register_load_state_dict_post_hook(self.scale)  # type: ignore[no-untyped-call]  # torch's

    def get_extra_state(self) -> Any:
        return {"factor": self.factor}

    def set_extra_state(self, state: Any) -> None:
        self.factor = state["factor"]

    @staticmethod
    def scale(module: Any, keys: Any) -> None:
        with torch.no_grad():
            module.weight.mul_(module.factor)


class Container(nn.Module):
    """Its hook renames an entry of a child."""

    def __init__(self, name: str = "inner", first: float = 0.0) -> None:
        super().__init__()
        setattr(self, name, Linear(first))
        self.last = Linear(first + 1)
        self.register_load_state_dict_pre_hook(self.rename)  # type: ignore[no-untyped-call]  # torch's

    @staticmethod
    def rename(module: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name in [name for name in state if name.startswith(prefix + "old.")]:
            state[prefix + "inner." + name.removeprefix(prefix + "old.")] = state.pop(name)


class SavedOtherwise(Linear):
    """Saves its weight under another name, and what follows from it."""

    def __init__(self, first: float = 0.0) -> None:
        super().__init__(first)
        self.register_state_dict_post_hook(self.rename)  # type: ignore[no-untyped-call]  # torch's
        self.register_load_state_dict_pre_hook(self.name_back)  # type: ignore[no-untyped-call]  # torch's

    @staticmethod
    def rename(module: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        state[prefix + "packed"] = state.pop(prefix + "weight")
        state[prefix + "sum"] = state[prefix + "count"] + 5

    @staticmethod
    def name_back(module: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        state[prefix + "weight"] = state.pop(prefix + "packed")
        state[prefix + "count"] = state.pop(prefix + "sum") * 2


def quantized(seen: bool) -> nn.Module:
    observer = MovingAverageMinMaxObserver.with_args(dtype=torch.qint8, qscheme=torch.per_tensor_symmetric)
    found = FakeQuantize(observer, -128, 127)  # type: ignore[no-untyped-call]  # torch's
    if seen:
        found(torch.arange(8.0))
        found.disable_observer()
    return found


def per_channel(seen: bool) -> nn.Module:
    found: nn.Module = torch.ao.quantization.default_per_channel_weight_fake_quant()
    if seen:
        found(torch.arange(24.0).reshape(6, 4))
    return found


def weight_norm(old: bool) -> nn.Module:
    linear = nn.Linear(4, 6)
    with torch.no_grad():
        linear.weight.copy_(torch.arange(24.0).reshape(6, 4) + (1 if old else 0))
        linear.bias.fill_(old)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's, of the old one
        return torch.nn.utils.weight_norm(linear) if old else parametrizations.weight_norm(linear)


@dataclass(frozen=True)
class Case:
    stored: Callable[[], nn.Module]
    fresh: Callable[[], nn.Module]


CASES: Mapping[str, Case] = {
    "a hook after rebuilds a table": Case(lambda: RebuiltTable(3.0), RebuiltTable),
    "a hook before changes values": Case(lambda: Doubled(3.0), Doubled),
    "a hook before renames": Case(OldName, Renamed),
    "a hook before renames what a child has": Case(lambda: Container("old", 2.0), Container),
    "hooks save under another name": Case(lambda: SavedOtherwise(3.0), SavedOtherwise),
    "an override keeps what is there": Case(WithOther, Kept),
    "an override makes a buffer longer": Case(lambda: Queue(5), Queue),
    "an older version is converted": Case(lambda: First(3.0), Second),
    "the same version is not": Case(lambda: Second(3.0), Second),
    "a hook after forgives": Case(lambda: Linear(3.0), NotStrict),
    "extra state comes before hooks after": Case(lambda: Extra(3), Extra),
    "BatchNorm without a count": Case(Uncounted, lambda: nn.BatchNorm1d(4)),
    "quantization that has seen data": Case(lambda: quantized(True), lambda: quantized(False)),
    "quantization of each channel": Case(lambda: per_channel(True), lambda: per_channel(False)),
    "weight_norm of old": Case(lambda: weight_norm(True), lambda: weight_norm(False)),
}


def whole(value: Any) -> Any:
    """A tensor without shards, on which a script may do anything."""
    return value.detach().full_tensor() if hasattr(value, "full_tensor") else value.detach().clone()


def contents(module: nn.Module) -> dict[str, Any]:
    """Everything that loading may have changed, whole; every rank must call it."""
    named = chain(module.named_parameters(), module.named_buffers())
    found = {name: whole(tensor) for name, tensor in named if not is_elsewhere(tensor)}
    extra = {name: part.factor for name, part in module.named_modules() if hasattr(part, "factor")}
    return found | {f"{name}.factor".removeprefix("."): factor for name, factor in extra.items()}


def same(found: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """The names under which two differ."""
    names = {*found, *expected}
    return sorted(n for n in names if n not in found or n not in expected or not equal(found[n], expected[n]))


def equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b)
