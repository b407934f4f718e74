"""Functions of whole tensors run on gathered tensors; values that they write, also through views, reach the shards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from lightning_shardckpt.compat.dtensor import local_tensor
from lightning_shardckpt.compat.torch_tensors import map_tensors, memory_id, version_of, without_torch_function
from lightning_shardckpt.parallel.tensors.gathered_weights import version_key
from lightning_shardckpt.parallel.tensors.kinds import Kind, kind_of, name_of, writes_first
from lightning_shardckpt.parallel.tensors.placement import local_part
from lightning_shardckpt.parallel.tensors.sharded import (
    LEAF,
    TAKES_PRECEDENCE,
    Function,
    is_sharded,
    map_nested,
    new_like,
    tensors_in,
)
from lightning_shardckpt.parallel.tensors.values import Scatter, check_equal_on_ranks, gather_whole, sharding_of


class ShardView(Tensor):
    """A view of a gathered tensor, such as ``weight[0]``; changing it changes the shards."""

    _origin: GatheredTensor

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if kind_of(func) in (Kind.METADATA, Kind.DERIVATIVE, Kind.HOOK):
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
        """Copy the whole tensor, which must be equal on all ranks, into the shards, with its history."""
        sharding = sharding_of(self.shards)
        check_equal_on_ranks(self.whole.detach(), sharding, what)
        if torch.is_grad_enabled() and self.whole.requires_grad:
            self.shards.copy_(Scatter.apply(self.whole, self.shards))  # type: ignore[no-untyped-call]  # torch's
        else:
            with torch.no_grad():
                local_tensor(self.shards).copy_(local_part(self.whole, sharding))
            increment_version(self.shards)
        self.version = version_key(self.shards)


_kept: dict[tuple[int, bool], GatheredTensor] | None = None
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


def _gather(tensor: DTensor, what: str, *, on_model_axes: bool) -> GatheredTensor:
    """Gather a tensor, or return the one that `keep_gathered` kept."""
    key, version = (id(tensor), on_model_axes), version_key(tensor)
    kept = _kept if torch.is_grad_enabled() and tensor.requires_grad and tensor.is_leaf else None
    if kept is not None and key in kept and kept[key].version == version:
        return kept[key]
    gathered = GatheredTensor(tensor, gather_whole(tensor, what, on_model_axes=on_model_axes), version)
    if kept is not None:
        kept[key] = gathered
    return gathered


def run_gathered(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function on gathered tensors; values that it writes into their memory reach the shards.

    A result over such memory is the sharded tensor itself if that was written, and else a view of it. All other results
    are plain; beside activations of a tensor-parallel plan, parameters are DTensors as the plan shards them.
    Collective: every rank that has a shard must call it.
    """
    with without_torch_function():
        name = name_of(func)
        written = [*tensors_in(args[:1] if writes_first(func) else (), {}), *tensors_in((kwargs.get("out"),), {})]
        if torch.is_grad_enabled():
            for target in written:
                leaf = target._origin.shards if isinstance(target, ShardView) else target
                if leaf.requires_grad and leaf.is_leaf:
                    raise RuntimeError(LEAF)
        tensors = tensors_in(args, kwargs)
        on_model_axes = bool(written) or not any(isinstance(t, DTensor) and not is_sharded(t) for t in tensors)
        origins: dict[int, GatheredTensor] = {}  # by memory
        arguments: dict[int, tuple[Tensor, Tensor, int]] = {}  # by id: itself, the plain one, and that one's version

        def to_plain(value: Tensor) -> Tensor:
            if id(value) in arguments:
                return arguments[id(value)][1]
            if isinstance(value, ShardView):
                origin, plain = value._origin, value.as_subclass(Tensor)
                origin.refresh()
            elif isinstance(value, DTensor) and is_sharded(value):
                origin = _gather(value, name, on_model_axes=on_model_axes)
                plain = origin.whole
                if torch.is_grad_enabled() and any(value is target for target in written):
                    plain = plain.clone()  # which autograd allows to change in place
                    origin = GatheredTensor(value, plain, origin.version)
            else:
                return value
            if not isinstance(plain, DTensor):
                origins[_memory(plain)] = origin
            arguments[id(value)] = value, plain, version_of(plain)
            return plain

        result = func(*map_nested(args, to_plain), **map_nested(kwargs, to_plain))
        for memory in dict.fromkeys(_memory(t) for _, t, before in arguments.values() if version_of(t) != before):
            origins[memory].write_back(name)  # changed by the function, or because of a flag, such as inplace=True
        targets = {id(arguments[id(t)][1]): t for t in written if id(t) in arguments}
        return map_tensors(lambda t: targets[id(t)] if id(t) in targets else _connect(t, origins), result)


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
    """Return an id of a tensor's memory; 0 for a tensor that can't share that of a gathered one."""
    return 0 if isinstance(value, DTensor) or value.layout != torch.strided else memory_id(value)
