"""Functions of whole tensors run on gathered tensors; values that they write, also through views, reach the shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_shardckpt.compat.pytree import map_tensors
from lightning_shardckpt.compat.torch_tensors import (
    in_functional_transform,
    memory_id,
    version_of,
    without_torch_function,
)
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.tensors.gather import REMEDY
from lightning_shardckpt.parallel.tensors.gathered import (
    CAST_FUNCTIONS,
    GatheredTensor,
    SavedParameters,
    gathered_in_forward,
    is_in_forward,
)
from lightning_shardckpt.parallel.tensors.kinds import Kind, kind_of, name_of, writes_first
from lightning_shardckpt.parallel.tensors.placement import version_key
from lightning_shardckpt.parallel.tensors.sharded import (
    TAKES_PRECEDENCE,
    Function,
    check_not_leaf,
    is_sharded,
    map_nested,
    tensors_in,
)
from lightning_shardckpt.parallel.tensors.values import gather_whole

_VIEWS = "_shardckpt_views"


class ShardView(Tensor):
    """A view of a gathered tensor, such as ``weight[0]``; changing it changes the shards."""

    _origin: GatheredTensor

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if kind_of(func) in (Kind.METADATA, Kind.AUTOGRAD, Kind.HOOK):
            with without_torch_function():
                return func(*args, **(kwargs or {}))
        if not TAKES_PRECEDENCE.isdisjoint(types):
            return NotImplemented
        return run_gathered(func, tuple(args), kwargs or {})


_kept: dict[tuple[int, torch.device, bool], GatheredTensor] | None = None
"""Parameters that the running step has gathered for autograd; None between steps."""


@contextmanager
def keep_gathered() -> Iterator[None]:
    """Inside, a parameter is gathered once for autograd, and again only after a change."""
    global _kept
    before, _kept = _kept, {} if _kept is None else _kept
    try:
        yield
    finally:
        _kept = before


def _gather(tensor: DTensor, what: str, device: torch.device, *, on_model_axes: bool) -> GatheredTensor:
    """Gather a tensor, or return the one that a running forward has gathered, or `keep_gathered` kept."""
    found = gathered_in_forward(tensor)
    if found is not None and not (on_model_axes and isinstance(found.whole, DTensor)):
        return found
    is_kept = torch.is_grad_enabled() and tensor.requires_grad and tensor.is_leaf
    key, version = (id(tensor), device, on_model_axes), version_key(tensor)
    if is_kept and _kept is not None and (kept := _kept.get(key)) is not None and kept.version == version:
        return kept
    whole = gather_whole(tensor, what, on_model_axes=on_model_axes, device=device)
    gathered = GatheredTensor(tensor, whole, version)
    if is_kept and _kept is not None:
        _kept[key] = gathered
    return gathered


def _device_of(tensors: Sequence[Tensor], sharded: Tensor) -> torch.device:
    """Return the device to gather on: if shards are offloaded to the CPU, the device of the other tensors."""
    others = (t.device for t in tensors if t.ndim and not is_sharded(t)) if sharded.is_cpu else ()
    return next(iter(others), sharded.device)


def run_gathered(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function on gathered tensors; values that it writes into their memory reach the shards."""
    with without_torch_function():
        name = name_of(func)
        written = [*tensors_in(args[:1] if writes_first(func) else (), {}), *tensors_in((kwargs.get("out"),), {})]
        for target in written:
            check_not_leaf(target._origin.shards if isinstance(target, ShardView) else target, func)
        tensors = list(tensors_in(args, kwargs))
        has_activations = any(isinstance(t, DTensor) and not is_sharded(t) for t in tensors)
        origins: dict[int, GatheredTensor] = {}  # by memory
        plain: dict[int, Tensor] = {}  # by the id of the argument
        versions: dict[int, tuple[Tensor, int]] = {}  # by memory

        def to_plain(value: Tensor) -> Tensor:
            if id(value) in plain:
                return plain[id(value)]
            if isinstance(value, ShardView):
                origin = value._origin
                origin.refresh()
                tensor = value.as_subclass(Tensor)
            elif isinstance(value, DTensor) and is_sharded(value):
                on_model_axes = bool(written) or not has_activations
                origin = _gather(value, name, _device_of(tensors, value), on_model_axes=on_model_axes)
                tensor = origin.whole
                if torch.is_grad_enabled() and any(value is target for target in written):
                    tensor = tensor.clone()  # which autograd allows to change in place
                    origin = GatheredTensor(value, tensor, origin.version)
            else:
                return value
            plain[id(value)] = tensor
            if not isinstance(tensor, DTensor):
                memory = _memory(tensor)
                origins[memory], versions[memory] = origin, (tensor, version_of(tensor))
            return tensor

        args, kwargs = map_nested(args, to_plain), map_nested(kwargs, to_plain)
        saved = _save_parameters(origins.values())
        with nullcontext() if saved is None else saved.hooks():
            result = func(*args, **kwargs)
        targets: dict[int, Tensor] = {}
        for target in written:
            tensor = plain.get(id(target))
            if tensor is not None:
                origins[_memory(tensor)].write_back(name)
                versions.pop(_memory(tensor), None)
                targets[id(tensor)] = target
        for memory, (tensor, version) in versions.items():
            if version_of(tensor) != version:  # changed because of a flag, such as inplace=True or max_norm
                with torch.no_grad():
                    origins[memory].write_back(name)
        return map_tensors(lambda t: targets[id(t)] if id(t) in targets else _connect(t, origins), result)


def run_in_forward(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any] | None:
    """Run a function on parameters that a running forward has gathered.

    A function that changes a parameter itself runs on its shards. Views of parameters are `ShardView`.

    Returns:
        The result; None if no argument is such a parameter.
    """
    replaced, whole = dict[int, GatheredTensor](), kwargs
    with without_torch_function():
        plain = [_replace(value, func, replaced) for value in args]
        if kwargs:
            whole = {name: _replace(value, func, replaced) for name, value in kwargs.items()}
    if not replaced or (writes_first(func) and is_in_forward(args[0])) or (kwargs and is_in_forward(kwargs.get("out"))):
        return None
    if name_of(func) == "detach":
        return None  # a sharded tensor, which may be kept
    if func in CAST_FUNCTIONS and any(gathered.history is not None for gathered in replaced.values()):
        if any(type(value) is str for value in (*args, *kwargs.values())):
            return None  # with padding="same", other functions are called inside
        if torch.is_grad_enabled() and in_functional_transform():
            raise UnsupportedCodeError(
                f"torch.func or torch.vmap calls {name_of(func)} in a forward under autocast, and fully_shard has "
                f"gathered its weight in the dtype of autocast. {REMEDY}"
            )
    result = func(*plain, **whole)
    if id(result) in replaced:  # as of contiguous()
        return (replaced[id(result)].shards,)
    origins = {_memory(gathered.whole): gathered for gathered in replaced.values()}
    with without_torch_function():
        return (map_tensors(lambda t: _connect(t, origins), result),)


def _replace(value: Any, func: Function, replaced: dict[int, GatheredTensor]) -> Any:
    """Return an argument with gathered values for parameters of running forwards, and add these to ``replaced``."""
    if is_in_forward(value):
        found = gathered_in_forward(value, func)
        if found is None:
            return value
        plain = found.use()
        replaced[id(plain)] = found
        return plain
    if type(value) in (list, tuple):
        return type(value)(_replace(item, func, replaced) for item in value)
    return value


def _save_parameters(origins: Iterable[GatheredTensor]) -> SavedParameters | None:
    """Return the hooks for parameters that autograd may save during a function; None if it saves none."""
    saved = [o for o in origins if o.shards.is_leaf and o.whole.requires_grad]
    if not saved or not torch.is_grad_enabled():
        return None
    return SavedParameters("", saved)


def _connect(value: Tensor, origins: dict[int, GatheredTensor]) -> Tensor:
    """Turn a result over the memory of a gathered tensor into a `ShardView`; return other results as they are."""
    origin = origins.get(_memory(value)) if type(value) is Tensor else None
    if origin is not None:
        value.__class__ = ShardView
        value._origin = origin  # type: ignore[attr-defined]  # it is a ShardView now
        if origin.regather is not None and not value.requires_grad:
            views_of(origin.whole).append(ref(value))
    return value


def views_of(whole: Tensor) -> list[ref[Tensor]]:
    """Return references to the views, without gradients, of a tensor whose memory torch's engine frees."""
    views: list[ref[Tensor]] = whole.__dict__.setdefault(_VIEWS, [])
    return views


def _memory(value: Tensor) -> int:
    if isinstance(value, DTensor) or value.layout != torch.strided:
        return 0
    return memory_id(value)
