"""Functions of whole tensors: run on what is gathered; what they write there, now or by a view, reaches the shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from lightning_shardckpt.compat.dtensor import local_tensor
from lightning_shardckpt.compat.pytree import map_tensors
from lightning_shardckpt.compat.torch_tensors import memory_id, version_of, without_torch_function
from lightning_shardckpt.parallel.tensors.kinds import Kind, kind_of, name_of, writes_first
from lightning_shardckpt.parallel.tensors.placement import local_part
from lightning_shardckpt.parallel.tensors.saved_parameters import SavedParameters, state_of
from lightning_shardckpt.parallel.tensors.sharded import (
    ANSWER_FIRST,
    Function,
    is_sharded,
    like,
    mapped,
    refuse_leaf,
    scattered,
    tensors_in,
)
from lightning_shardckpt.parallel.tensors.values import check_same, where_is, whole


class ShardView(Tensor):
    """A plain tensor over the memory of what was gathered, such as ``weight[0]``; changing it changes the shards."""

    _origin: ViewOrigin

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if kind_of(func) in (Kind.METADATA, Kind.AUTOGRAD, Kind.HOOK):
            with without_torch_function():
                return func(*args, **(kwargs or {}))
        if not ANSWER_FIRST.isdisjoint(types):
            return NotImplemented
        return on_wholes(func, tuple(args), kwargs or {})


@dataclass(slots=True)
class ViewOrigin:
    """A sharded tensor, what was gathered of it, and when: `state_of` it then."""

    of: DTensor
    gathered: Tensor
    state: tuple[int, int]

    def refresh(self) -> None:
        """Gather again into the same memory, if the shards have changed."""
        if self.state != state_of(self.of):
            with torch.no_grad():
                self.gathered.copy_(whole(like(self.of, local_tensor(self.of).detach()), "a view"))
            self.state = state_of(self.of)

    def store(self, what: str) -> None:
        """Take over into the shards what was written into the memory, with its history if there is one."""
        where = where_is(self.of)
        check_same(self.gathered.detach(), where, what)
        if torch.is_grad_enabled() and self.gathered.requires_grad:
            self.of.copy_(scattered(self.gathered, self.of))
        else:
            with torch.no_grad():
                local_tensor(self.of).copy_(local_part(self.gathered.detach(), where))
            increment_version(self.of)
        self.state = state_of(self.of)


_Key = tuple[int, torch.device, bool]
_kept: dict[_Key, ViewOrigin] | None = None
"""Parameters that the step that runs now has gathered with history; None between steps."""


@contextmanager
def kept_wholes() -> Iterator[None]:
    """Inside, a parameter that autograd needs is gathered once, and again only when it has changed."""
    global _kept
    before, _kept = _kept, {} if _kept is None else _kept
    try:
        yield
    finally:
        _kept = before


def _gather(tensor: DTensor, what: str, device: torch.device, *, on_model_axes: bool) -> ViewOrigin:
    """Return the whole tensor, as it was gathered before if it may be, with what is known of it."""
    is_kept = _kept is not None and torch.is_grad_enabled() and tensor.requires_grad and tensor.is_leaf
    key, state = (id(tensor), device, on_model_axes), state_of(tensor)
    if is_kept and _kept is not None and (known := _kept.get(key)) is not None and known.state == state:
        return known
    found = ViewOrigin(tensor, whole(tensor, what, on_model_axes=on_model_axes, device=device), state)
    if is_kept and _kept is not None:
        _kept[key] = found
    return found


def _device_of(tensors: Sequence[Tensor], sharded: Tensor) -> torch.device:
    """Return where to gather: beside the other tensors, where shards are offloaded to the memory of the host."""
    others = (t.device for t in tensors if t.ndim and not is_sharded(t)) if sharded.is_cpu else ()
    return next(iter(others), sharded.device)


def on_wholes(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function on gathered tensors. What it writes into their memory reaches the shards."""
    with without_torch_function():
        name = name_of(func)
        written = [*tensors_in(args[:1] if writes_first(func) else (), {}), *tensors_in((kwargs.get("out"),), {})]
        for target in written:
            refuse_leaf(target._origin.of if isinstance(target, ShardView) else target, func)
        tensors = list(tensors_in(args, kwargs))
        with_activations = any(isinstance(t, DTensor) and not is_sharded(t) for t in tensors)
        origins: dict[int, ViewOrigin] = {}
        wholes: dict[int, Tensor] = {}
        versions: dict[int, tuple[Tensor, int]] = {}

        def gathered(value: Tensor) -> Tensor:
            if id(value) in wholes:
                return wholes[id(value)]
            if isinstance(value, ShardView):
                origin = value._origin
                origin.refresh()
                found = value.as_subclass(Tensor)
            elif isinstance(value, DTensor) and is_sharded(value):
                on_model_axes = bool(written) or not with_activations
                origin = _gather(value, name, _device_of(tensors, value), on_model_axes=on_model_axes)
                found = origin.gathered
                if torch.is_grad_enabled() and any(value is target for target in written):
                    found = found.clone()  # so that autograd lets it be changed, with history
                    origin = ViewOrigin(value, found, origin.state)
            else:
                return value
            wholes[id(value)] = found
            if not isinstance(found, DTensor):
                memory = _memory(found)
                origins[memory], versions[memory] = origin, (found, version_of(found))
            return found

        args, kwargs = mapped(args, gathered), mapped(kwargs, gathered)
        saved = _notes(origins.values())
        with nullcontext() if saved is None else saved.context():
            result = func(*args, **kwargs)
        themselves: dict[int, Tensor] = {}
        for target in written:
            found = wholes.get(id(target))
            if found is not None:
                origins[_memory(found)].store(name)
                versions.pop(_memory(found), None)
                themselves[id(found)] = target
        for memory, (found, version) in versions.items():
            if version_of(found) != version:  # by a flag, as with inplace=True or max_norm
                with torch.no_grad():
                    origins[memory].store(name)
        if saved is not None:
            saved.end()
        return map_tensors(lambda t: themselves[id(t)] if id(t) in themselves else _connected(t, origins), result)


def _notes(origins: Iterable[ViewOrigin]) -> SavedParameters | None:
    """Return what sees changes of the parameters that a function gets, if autograd may save them."""
    some = [o for o in origins if o.of.is_leaf and o.gathered.requires_grad]
    if not some or not torch.is_grad_enabled():
        return None
    return SavedParameters("", [o.of for o in some], [o.gathered for o in some], [None] * len(some))


def connected(value: Tensor, shards: DTensor, whole: Tensor) -> Tensor:
    """A plain tensor over the memory of ``whole``, which was gathered of ``shards``, as a view of these from now on."""
    return _connected(value, {_memory(whole): ViewOrigin(shards, whole, state_of(shards))})


def _connected(value: Tensor, origins: dict[int, ViewOrigin]) -> Tensor:
    """A result over the memory of something gathered, as a view of the shards."""
    origin = origins.get(_memory(value)) if type(value) is Tensor else None
    if origin is not None:
        value.__class__ = ShardView
        value._origin = origin  # type: ignore[attr-defined]  # it is one now
    return value


def _memory(value: Tensor) -> int:
    if isinstance(value, DTensor) or value.layout != torch.strided:
        return 0
    return memory_id(value)
