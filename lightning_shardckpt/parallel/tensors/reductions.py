"""Numbers of all elements of sharded tensors: sums, norms, extremes, of one or of each of a list."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_shardckpt.compat.dtensor import local_tensor
from lightning_shardckpt.compat.torch_tensors import without_torch_function
from lightning_shardckpt.parallel.tensors.kinds import name_of
from lightning_shardckpt.parallel.tensors.sharded import Function, is_sharded
from lightning_shardckpt.parallel.tensors.values import combined, differentiable_sum, where_is
from lightning_shardckpt.parallel.tensors.views import on_wholes

_POWERS = {"sum": 1.0, "mean": 1.0, "nansum": 1.0, "count_nonzero": 1.0}
_POWERS |= {"amax": math.inf, "max": math.inf, "any": math.inf, "amin": -math.inf, "min": -math.inf, "all": -math.inf}


def reduce(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, name = args[0] if args else kwargs["input"], name_of(func)
    with without_torch_function():
        power = _power(name, args[1:], kwargs)
        exact = not tensor.is_complex() and (tensor.dtype == torch.bool or tensor.is_floating_point())
        if power is None or not is_sharded(tensor) or not exact or tensor.numel() == 0 or "out" in kwargs:
            return on_wholes(func, args, kwargs)
        history = torch.is_grad_enabled() and tensor.requires_grad
        if history and name not in ("sum", "mean"):
            return on_wholes(func, args, kwargs)
        like = func(local_tensor(tensor).new_zeros((1,) * max(1, tensor.ndim)), *args[1:], **kwargs)
        if history:
            total = differentiable_sum(tensor, name).to(like.dtype)
            return total / tensor.numel() if name == "mean" else total
        (found,) = combined([tensor], name, [power], [_number(local_tensor(tensor), name, power)])
        found = found / tensor.numel() if name == "mean" else found
        return torch.tensor(found, dtype=torch.float64).to(like.device, like.dtype)


def _power(name: str, rest: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float | None:
    """The power of a norm, or what stands for another reduction (see `combined`); None if it is not of all elements."""
    if name in _POWERS:
        return _POWERS[name] if not rest and not kwargs.keys() - {"dtype", "input"} else None
    orders = {"p": "fro", "ord": 2} if name == "norm" else {"ord": 2}
    given = [*rest, *(kwargs[k] for k in orders if k in kwargs)]
    if len(given) > 1 or kwargs.keys() - {*orders, "dtype", "input"}:
        return None
    order = given[0] if given else None
    if order in (None, "fro"):
        return 2.0
    return float(order) if isinstance(order, int | float) and order > 0 else None


def _number(local: Tensor, name: str, power: float) -> float:
    """The reduction of this rank's elements, in double precision."""
    if name in ("sum", "mean"):
        return float(local.sum(dtype=torch.float64))
    if name == "nansum":
        return float(local.nansum(dtype=torch.float64))
    if name == "count_nonzero":
        return float(local.count_nonzero())
    if name in ("norm", "vector_norm"):
        if not local.numel():
            return 0.0
        if local.dtype in (torch.float16, torch.bfloat16):
            local = local.float()
        return float(torch.linalg.vector_norm(local, power))
    if not local.numel():
        return -power
    return float((local.amax() if power > 0 else local.amin()) if local.dtype != torch.bool else _bool(local, power))


def _bool(local: Tensor, power: float) -> bool:
    return bool(local.any() if power > 0 else local.all())


def reduce_each(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with without_torch_function():
        name = name_of(func)
        tensors, rest = args[0], args[1:]
        order = [*rest, *(kwargs[k] for k in ("ord",) if k in kwargs)]
        power = math.inf if name == "_foreach_max" else float(order[0]) if order else 2.0
        history = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        if history or power <= 0 or any(not t.is_floating_point() or not t.numel() for t in tensors):
            return on_wholes(func, args, kwargs)
        kind = "norm" if name == "_foreach_norm" else "max"
        found: list[Any] = [None if is_sharded(t) else func([t], *rest, **kwargs)[0] for t in tensors]
        groups: dict[Any, list[int]] = {}
        for n, t in enumerate(tensors):
            if found[n] is None:
                groups.setdefault(id(where_is(t)), []).append(n)
        for places in groups.values():
            some = [tensors[n] for n in places]
            values = [_number(local_tensor(t), kind, power) for t in some]
            for n, value in zip(places, combined(some, name, [power] * len(some), values), strict=True):
                dtype = kwargs.get("dtype") or tensors[n].dtype
                found[n] = torch.tensor(value, dtype=torch.float64).to(tensors[n].device, dtype)
        return tuple(found)
