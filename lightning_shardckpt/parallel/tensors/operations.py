"""Functions of torch applied to sharded tensors, by `kinds.Kind`."""

from __future__ import annotations

from collections.abc import Sequence
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
    drawn_alike,
    is_same_everywhere,
    joined_norms,
    where_is,
    whole,
)
from lightning_shardckpt.parallel.tensors.views import ShardView, on_wholes
from lightning_shardckpt.parallel.tensors.written_numbers import note_numbers

_MOVES = ("cpu", "cuda", "to")
_NUMBERS = (float, int, bool)


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
    """Apply a function to this rank's rows; return None unless its arguments are numbers and tensors sharded alike.

    The first argument must be such a tensor. Steps of optimizers are made of these calls.
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
    """Return what ``cpu``, ``cuda`` and ``to`` give on another device: the whole tensor there, since it is read.

    None to change the dtype of rows, if a dtype was given, or nothing.
    """
    tensor, given = args[0], (args[1:], kwargs)
    has_examples = any(isinstance(value, Tensor) for value in (*args[1:], *kwargs.values()))
    rest, keywords = mapped(given, lambda t: _stand_in(t) if is_sharded(t) else t)
    if not is_sharded(tensor):
        return func(tensor, *rest, **keywords)  # type: ignore[no-any-return]  # a Tensor
    empty = local_tensor(tensor).new_empty(0)
    moved = func(empty, *rest, **keywords)
    if moved.device != empty.device:
        return func(whole(tensor, name_of(func)), *rest, **keywords)  # type: ignore[no-any-return]  # a Tensor
    copies = {"copy": kwargs.get("copy", False)}
    return _elementwise(Tensor.to, (tensor, moved.dtype), copies) if has_examples else None


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


# ── norms ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _norm(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute the norm of all elements from those of the shards."""
    tensor, *rest = args or (kwargs["input"],)
    names = ("p", "ord") if name_of(func) == "norm" else ("ord",)
    orders = [*rest, *(kwargs[name] for name in names if name in kwargs)] or [2.0]
    is_of_all = len(orders) == 1 and not kwargs.keys() - {*names, "input"}  # no dims, no other dtype
    order = 2.0 if orders[0] in (None, "fro") else orders[0]
    with without_torch_function():
        if not is_of_all or not is_sharded(tensor) or not _has_norm([tensor], order):
            return on_wholes(func, args, kwargs)
        return _norms([tensor], order)[0]


def _norm_of_each(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors, *rest = args
    order = [*rest, kwargs.get("ord", 2.0)][0]
    with without_torch_function():
        if len(rest) > 1 or "dtype" in kwargs or not _has_norm(tensors, order):
            return on_wholes(func, args, kwargs)
        found: list[Any] = [None if is_sharded(t) else func([t], *rest, **kwargs)[0] for t in tensors]
        alike: dict[int, list[int]] = {}
        for n, tensor in enumerate(tensors):
            if found[n] is None:
                alike.setdefault(id(where_is(tensor)), []).append(n)
        for places in alike.values():
            norms = _norms([tensors[n] for n in places], order)
            for n, norm in zip(places, norms, strict=True):
                found[n] = norm
        return tuple(found)


def _has_norm(tensors: Sequence[Tensor], order: Any) -> bool:
    """Return whether norms of this order follow from those of parts, without history."""
    if not isinstance(order, int | float) or order <= 0:
        return False
    if any(not tensor.is_floating_point() or not tensor.numel() for tensor in tensors):
        return False
    return not torch.is_grad_enabled() or not any(t.requires_grad for t in tensors)


def _norms(tensors: Sequence[Any], order: float) -> list[Tensor]:
    """Return the norm of each of some tensors that are laid out alike, joined in double precision from the rows'."""
    rows = [local_tensor(tensor) for tensor in tensors]
    wide = [part.float() if part.dtype in (torch.float16, torch.bfloat16) else part for part in rows]
    own = [float(torch.linalg.vector_norm(part, order)) if part.numel() else 0.0 for part in wide]
    every = joined_norms(tensors, own, order)
    return [
        torch.tensor(norm, dtype=torch.float64).to(part.device, part.dtype)
        for norm, part in zip(every, rows, strict=True)
    ]


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
        Kind.NORM: _norm,
        Kind.LISTS: _lists,
        Kind.LIST_OF_NORMS: _norm_of_each,
        Kind.ADDRESS: _address,
        Kind.TEXT: lambda func, args, kwargs: repr(args[0]),
        Kind.WHOLE: on_wholes,
    }
)
