"""Functions of whole tensors run on gathered tensors; values that they write, also through views, reach the shards."""

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
from lightning_shardckpt.compat.torch_tensors import map_tensors, memory_id, version_of, without_torch_function
from lightning_shardckpt.parallel.tensors.gathered_weights import SavedParameters, version_key
from lightning_shardckpt.parallel.tensors.kinds import Kind, kind_of, name_of, writes_first
from lightning_shardckpt.parallel.tensors.placement import local_part
from lightning_shardckpt.parallel.tensors.sharded import (
    TAKES_PRECEDENCE,
    Function,
    check_not_leaf,
    is_sharded,
    map_nested,
    new_like,
    scatter,
    tensors_in,
)
from lightning_shardckpt.parallel.tensors.values import check_equal_on_ranks, gather_whole, sharding_of


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


@dataclass(slots=True)
class GatheredTensor:
    """A sharded tensor, gathered.

    Attributes:
        shards: the sharded tensor.
        whole: the gathered one.
        version: the `version_key` of ``shards`` when it was gathered.
    """

    shards: DTensor
    whole: Tensor
    version: tuple[int, int]

    def refresh(self) -> None:
        """Gather again into the same memory, if the shards have changed."""
        if self.version != version_key(self.shards):
            with torch.no_grad():
                self.whole.copy_(gather_whole(new_like(self.shards, local_tensor(self.shards).detach()), "a view"))
            self.version = version_key(self.shards)

    def write_back(self, what: str) -> None:
        """Copy the whole tensor into the shards, through autograd if it requires a gradient."""
        sharding = sharding_of(self.shards)
        check_equal_on_ranks(self.whole.detach(), sharding, what)
        if torch.is_grad_enabled() and self.whole.requires_grad:
            self.shards.copy_(scatter(self.whole, self.shards))
        else:
            with torch.no_grad():
                local_tensor(self.shards).copy_(local_part(self.whole.detach(), sharding))
            increment_version(self.shards)
        self.version = version_key(self.shards)


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
    """Gather a tensor, or return the one that `keep_gathered` kept."""
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
        if saved is not None:
            saved.end_forward()
        return map_tensors(lambda t: targets[id(t)] if id(t) in targets else _connect(t, origins), result)


def _save_parameters(origins: Iterable[GatheredTensor]) -> SavedParameters | None:
    """Return the hooks for parameters that autograd may save during a function; None if it saves none."""
    saved = [o for o in origins if o.shards.is_leaf and o.whole.requires_grad]
    if not saved or not torch.is_grad_enabled():
        return None
    return SavedParameters("", [o.shards for o in saved], [o.whole for o in saved], [None] * len(saved))


def connect_to_shards(value: Tensor, shards: DTensor, whole: Tensor) -> Tensor:
    """Turn a plain tensor over the memory of ``whole``, gathered from ``shards``, into a `ShardView` of them."""
    return _connect(value, {_memory(whole): GatheredTensor(shards, whole, version_key(shards))})


def _connect(value: Tensor, origins: dict[int, GatheredTensor]) -> Tensor:
    """Turn a result over the memory of a gathered tensor into a `ShardView`; return other results as they are."""
    origin = origins.get(_memory(value)) if type(value) is Tensor else None
    if origin is not None:
        value.__class__ = ShardView
        value._origin = origin  # type: ignore[attr-defined]  # it is a ShardView now
    return value


def _memory(value: Tensor) -> int:
    if isinstance(value, DTensor) or value.layout != torch.strided:
        return 0
    return memory_id(value)
