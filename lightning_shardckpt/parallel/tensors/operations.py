"""Functions of torch applied to sharded tensors, by `kinds.Kind`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from lightning_shardckpt.compat.dtensor import local_tensor, shape_of, spec_of
from lightning_shardckpt.compat.torch_tensors import without_torch_function
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.tensors.derivatives import differentiate, register_hook
from lightning_shardckpt.parallel.tensors.kinds import Kind, name_of, writes_first
from lightning_shardckpt.parallel.tensors.placement import local_part
from lightning_shardckpt.parallel.tensors.sharded import (
    HANDLERS,
    LEAF,
    Function,
    ShardedTensor,
    is_alike,
    is_sharded,
    like,
    local_of,
    mapped,
    refuse_leaf,
    rows_like,
    sharded,
    tensors_in,
)
from lightning_shardckpt.parallel.tensors.values import (
    check_same,
    combined,
    differentiable_sum,
    drawn_alike,
    is_same_everywhere,
    where_is,
    whole,
)
from lightning_shardckpt.parallel.tensors.views import ShardView, on_wholes
from lightning_shardckpt.parallel.tensors.written_numbers import note_numbers

_MOVES = ("cpu", "cuda", "to")
_NUMBERS = (float, int, bool)
_POWERS = {"sum": 1.0, "mean": 1.0, "nansum": 1.0, "count_nonzero": 1.0}
_POWERS |= {"amax": math.inf, "max": math.inf, "any": math.inf, "amin": -math.inf, "min": -math.inf, "all": -math.inf}


def _accessor(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Get or set ``data`` or ``grad`` by another way than the attribute."""
    tensor, *value = args
    if func.__name__ == "__get__":
        return getattr(tensor, name_of(func))
    return setattr(tensor, name_of(func), *(value or [None]))


def _as_it_is(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with without_torch_function():
        return func(*args, **kwargs)


def _example(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    first, *others = args
    if is_sharded(first):
        return on_wholes(func, args, kwargs)
    with without_torch_function():
        return func(first, *(_stand_in(t) if is_sharded(t) else t for t in others), **kwargs)


def _stand_in(tensor: Tensor) -> Tensor:
    return torch.empty(1, dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


def _made_like(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    (tensor, *rest), kwargs = args, dict(kwargs)
    gradient = kwargs.pop("requires_grad", False)
    with without_torch_function():
        return like(tensor, func(local_tensor(tensor), *rest, **kwargs)).requires_grad_(gradient)


def _random(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw the whole tensor on every rank, and keep this rank's rows."""
    tensor = args[0]
    if not is_sharded(tensor):
        return on_wholes(func, args, kwargs)
    name, where = name_of(func), where_is(tensor)
    in_place, gradient = writes_first(func), kwargs.pop("requires_grad", False)
    with without_torch_function(), drawn_alike(where, tensor.device, name), torch.no_grad():
        drawn = func(torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device), *args[1:], **kwargs)
        if kwargs.get("generator") is not None:  # one of the user's
            check_same(drawn, where, name)
    if not in_place:
        return like(tensor, local_part(drawn, where).clone()).requires_grad_(gradient)
    with without_torch_function():
        refuse_leaf(tensor, func)
        with torch.no_grad():
            local_tensor(tensor).copy_(local_part(drawn, where))
        increment_version(tensor)
        return tensor


def _elementwise(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not torch.is_grad_enabled() and (found := _on_rows(func, args, kwargs)) is not None:
        return found
    with without_torch_function():
        tensors = list(tensors_in(args, kwargs))
        if any(isinstance(t, ShardView) for t in tensors):  # it may be older than the shards
            return on_wholes(func, args, kwargs)
        first = next(t for t in tensors if is_sharded(t))
        target = kwargs.get("out", args[0] if writes_first(func) else None)
        if target is not None:
            return _written(func, args, kwargs, target, tensors)
        name = name_of(func)
        if name in _MOVES and (moved := _moved(func, args, kwargs)) is not None:
            return moved
        with_history = torch.is_grad_enabled() and name != "detach" and any(t.requires_grad for t in tensors)
        plain = [t for t in tensors if not is_alike(t, first)]
        if with_history:
            return on_wholes(func, args, kwargs) if plain else _with_history(func, args, kwargs)
        if any(isinstance(t, DTensor) or t.ndim or t.requires_grad for t in plain):
            return on_wholes(func, args, kwargs)
        if any(not is_same_everywhere(t, where_is(first), name) for t in plain):
            return on_wholes(func, args, kwargs)
        return _on_locals(func, args, kwargs, first)


def _on_rows(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply a function to this rank's rows, in the case of which the steps of optimizers are made; else return None.

    That is: sharded tensors that are laid out alike, the first argument being one, and numbers.
    """
    if not args or type(args[0]) is not ShardedTensor or (name := name_of(func)) in _MOVES:
        return None
    target: ShardedTensor = args[0]
    spec, rows = spec_of(target), list[Any]()
    for value in args:
        if type(value) is ShardedTensor and (spec_of(value) is spec or is_alike(value, target)):
            rows.append(local_tensor(value))
        elif type(value) in _NUMBERS:
            rows.append(value)
        else:
            return None
    for value in kwargs.values():
        if type(value) not in _NUMBERS:
            return None
    if not writes_first(func):
        return _as_example(func(*rows, **kwargs), args, target)
    note_numbers(name, shape_of(target), args, kwargs)
    func(*rows, **kwargs)
    increment_version(target)
    return target


def _with_history(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply a function as torch's DTensor does; elementwise operations on tensors that are laid out alike are right."""
    found = func(*args, **kwargs)
    return tuple(map(sharded, found)) if isinstance(found, tuple) else sharded(found)


def _on_locals(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], example: DTensor) -> Any:
    return _as_example(func(*mapped(args, local_of), **mapped(kwargs, local_of)), (*args, *kwargs.values()), example)


def _as_example(found: Any, args: tuple[Any, ...], example: DTensor) -> Any:
    """Return what a function made of rows as tensors laid out like ``example``; one of its arguments as that."""
    if isinstance(found, tuple):
        return tuple(like(example, part) for part in found)
    if not isinstance(found, Tensor):
        return found
    same = next((t for t in tensors_in(args, {}) if is_sharded(t) and local_tensor(t) is found), None)
    return like(example, found) if same is None else same


def _moved(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return what ``cpu``, ``cuda`` and ``to`` give on another device: the whole tensor there, since it is read."""
    tensor = args[0]
    examples = [t for t in (*args[1:], *kwargs.values()) if isinstance(t, Tensor)]
    if not is_sharded(tensor) or any(map(is_sharded, examples)):
        replaced = mapped(args[1:], lambda t: _stand_in(t) if is_sharded(t) else t)
        keywords = mapped(kwargs, lambda t: _stand_in(t) if is_sharded(t) else t)
        if not is_sharded(tensor):
            return func(tensor, *replaced, **keywords)  # type: ignore[no-any-return]  # a Tensor
        return _elementwise(func, (tensor, *replaced), keywords) if examples else None
    empty = local_tensor(tensor).new_empty(0)
    device = func(empty, *args[1:], **kwargs).device
    if device == empty.device:
        if examples:
            kind = func(empty, *args[1:], **kwargs).dtype
            return _elementwise(Tensor.to, (tensor, kind), {})  # type: ignore[no-any-return]
        return None
    return func(whole(tensor, name_of(func)), *args[1:], **kwargs)  # type: ignore[no-any-return]


def _written(
    func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], target: Tensor, tensors: list[Tensor]
) -> Any:
    """An elementwise change of ``target``: the first argument, or ``out``."""
    name, history = name_of(func), torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    if not isinstance(target, DTensor) or not is_sharded(target):
        return on_wholes(func, args, kwargs)
    refuse_leaf(target, func)
    note_numbers(name, target.shape, args, kwargs)
    if history and "out" not in kwargs and all(is_alike(t, target) for t in tensors):
        return _with_history(func, args, kwargs)
    if history or any(
        not is_alike(t, target) and (is_sharded(t) or (t.numel() != 1 and t.shape != target.shape)) for t in tensors
    ):
        return on_wholes(func, args, kwargs)
    where = where_is(target)

    def rows(value: Tensor) -> Tensor:
        if is_alike(value, target):
            return local_tensor(value)
        check_same(value, where, name)
        if value.ndim == 0 or value.shape != target.shape:
            return value.reshape(()).to(target.device) if value.device != target.device and value.ndim else value
        return local_part(value.to(target.device), where)

    func(*mapped(args, rows), **mapped(kwargs, rows))
    increment_version(target)
    return target


def _lists(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply a function of lists to each tensor of a list with those at its place in the others."""
    with without_torch_function():
        name = name_of(func)
        tensors = list(tensors_in(args, kwargs))
        if any(isinstance(t, ShardView) for t in tensors):  # what is written there must reach the shards
            return on_wholes(func, args, kwargs)
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            if writes_first(func):
                raise RuntimeError(LEAF)
            return on_wholes(func, args, kwargs)
        lists = [a for a in args if isinstance(a, list | tuple) and a and isinstance(a[0], Tensor)]
        targets = [next((t for t in row if is_sharded(t)), None) for row in zip(*lists, strict=False)]
        if writes_first(func):
            targets = [row[0] if is_sharded(row[0]) else None for row in zip(*lists, strict=False)]
            note_numbers(name, targets[0].shape if targets and targets[0] is not None else (), args, kwargs)
        found = func(*(_list_of_rows(a, targets, name) for a in args), **mapped(kwargs, local_of))
        if name.startswith(("_fused_", "_amp_")) or found is None or writes_first(func):
            return args[0] if found is not None else None
        return type(found)(
            part if target is None else like(target, part) for part, target in zip(found, targets, strict=True)
        )


def _list_of_rows(value: Any, targets: Sequence[DTensor | None], what: str) -> Any:
    """A list of tensors as far as this rank's results depend on them."""
    if not isinstance(value, list | tuple) or not value or not isinstance(value[0], Tensor):
        return mapped(value, local_of)
    rows = []
    for tensor, target in zip(value, [*targets, *[None] * (len(value) - len(targets))], strict=False):
        if target is None:
            rows.append(whole(tensor, what) if is_sharded(tensor) else tensor)
        elif not isinstance(tensor, DTensor) and tensor.numel() == 1 and tensor.shape != target.shape:
            rows.append(tensor)  # a number, such as a count of steps, also where the parameter has one element
        else:
            rows.append(rows_like(tensor, target, what))
    return rows


def _address(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise UnsupportedCodeError(
        f"{name_of(func)} asks for the memory of a sharded tensor of shape {tuple(args[0].shape)}, of which this rank "
        "has some rows. Code that works on memory itself (kernels of its own, 8-bit optimizers) can't run on it: give "
        "it tensor.full_tensor(), train without sharding (data_parallel_shard_size=1), or use another optimizer."
    )


def _extreme_or_reduction(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``max`` of two tensors is elementwise; that of one is a reduction."""
    if name_of(func) in ("max", "min") and len(list(tensors_in(args, {**kwargs, "out": None}))) == 2:
        return _elementwise(func, args, kwargs)
    return _reduce(func, args, kwargs)


# ── numbers of all elements: sums, norms, extremes ──────────────────────────────────────────────────────────────────


def _reduce(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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


def _reduce_each(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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


HANDLERS.update(
    {
        Kind.ACCESSOR: _accessor,
        Kind.METADATA: _as_it_is,
        Kind.AUTOGRAD: differentiate,
        Kind.HOOK: register_hook,
        Kind.EXAMPLE: _example,
        Kind.LIKE: _made_like,
        Kind.RANDOM: _random,
        Kind.ELEMENTWISE: _elementwise,
        Kind.REDUCTION: _extreme_or_reduction,
        Kind.LISTS: _lists,
        Kind.LIST_REDUCTION: _reduce_each,
        Kind.ADDRESS: _address,
        Kind.TEXT: lambda func, args, kwargs: repr(args[0]),
        Kind.WHOLE: on_wholes,
    }
)
