"""Replacement of a module's parameters by sharded ones; references to the old ones keep working.

A replaced parameter still behaves like the new one, but is another object: a set, a dict or ``is`` would not find the
new one. So the new ones are put into attributes of modules, and into containers there (lists, tuples, sets, dicts, also
with ids of parameters), in place. Buffers that share the memory of a parameter are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from lightning_shardckpt.compat.dtensor import local_tensor, new_dtensor, spec_of
from lightning_shardckpt.compat.torch_modules import parameter_slots, refresh_flat_weights
from lightning_shardckpt.compat.torch_tensors import (
    accumulation_hooks,
    below_functions,
    dispatches,
    gradient_hooks,
    mark_as_parameter,
    memory_id,
    set_accumulation_hooks,
    set_gradient_hooks,
)
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.tensors.operations import wrap_hook
from lightning_shardckpt.parallel.tensors.placement import NAME, own_rows, resolve_sharding, spec_over
from lightning_shardckpt.parallel.tensors.sharded import ShardedTensor, as_sharded, map_nested
from lightning_shardckpt.parallel.tensors.values import PARTIAL


class ReplacedParameter(nn.Parameter):
    """A parameter from before sharding: functions of it run on the sharded one in its place."""

    _replacement: nn.Parameter | None

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = map_nested((tuple(args), kwargs or {}), _current)
        return func(*args, **kwargs)

    @property
    def data(self) -> Tensor:
        """The ``data`` of the sharded parameter."""
        return _current(self).data  # type: ignore[no-any-return]  # of a Tensor

    @data.setter
    def data(self, value: Tensor) -> None:
        _current(self).data = value


def _current(value: Tensor) -> Any:
    if not isinstance(value, ReplacedParameter):
        return value
    if value._replacement is None:
        raise UnsupportedCodeError(
            "this parameter is on another pipeline stage. Access parameters through the module, not through "
            "references from before it was sharded, and only the parameters of this stage."
        )
    return value._replacement


def shard_parameters(
    root: nn.Module,
    data_mesh: DeviceMesh | None,
    root_mesh: DeviceMesh,
    device: torch.device,
    *,
    ignored: Collection[nn.Parameter] = (),
    partial: Iterable[str] = (),
    partial_group: dist.ProcessGroup | None = None,
) -> None:
    """Replace the parameters of ``root`` by sharded ones.

    Args:
        root: a module with plain parameters or DTensors of a tensor-parallel plan, with values or on the meta device.
        data_mesh: the mesh whose last axis shards the rows; None to replace only DTensors, with their own placements.
        root_mesh: the mesh of all ranks.
        device: the device of the shards.
        ignored: plain parameters that stay so.
        partial: names of parameters whose gradients are partial sums over ``partial_group``.
        partial_group: the tensor-parallel ranks.

    Raises:
        UnsupportedCodeError: for a parameter of a subclass, whose behavior would be lost.
    """
    partial, new = frozenset(partial), dict[nn.Parameter, Any]()
    for prefix, module in root.named_modules():
        slots = parameter_slots(module)
        for name, old in list(slots.items()):
            if old is None or old in ignored or (not isinstance(old, DTensor) and (data_mesh is None or old.ndim == 0)):
                continue
            fqn = f"{prefix}.{name}" if prefix else name
            if type(old) is not nn.Parameter and not isinstance(old, DTensor):
                raise UnsupportedCodeError(
                    f"the parameter {fqn} is of the class {type(old).__name__}, which cannot be sharded: make it an "
                    "nn.Parameter, or train with data_parallel_shard_size=1"
                )
            if old not in new:
                new[old] = _shard(old, data_mesh, root_mesh, device)
                new[old].__dict__[NAME] = fqn
            if fqn in partial:
                new[old].__dict__[PARTIAL] = partial_group
            slots[name] = new[old]
        refresh_flat_weights([module])


def _shard(old: Any, data_mesh: DeviceMesh | None, root_mesh: DeviceMesh, device: torch.device) -> ShardedTensor:
    spec = spec_of(old) if data_mesh is None else spec_over(old, data_mesh, root_mesh)
    with torch.no_grad():
        part = own_rows(local_tensor(old).detach(), resolve_sharding(spec.mesh, tuple(spec.placements)))
        if part.is_meta:
            local = torch.empty(part.shape, dtype=part.dtype, device=device)
        else:
            local = part.to(device, copy=True, memory_format=torch.contiguous_format)
        leaf = as_sharded(new_dtensor(local, spec))
    leaf.requires_grad_(old.requires_grad)
    mark_as_parameter(leaf)
    return leaf


def retire_parameter(old: nn.Parameter, leaf: nn.Parameter | None) -> None:
    """Move a parameter's attributes and hooks to its replacement, and free its memory.

    The old parameter becomes a `ReplacedParameter`; ``leaf`` is None if this rank has no replacement. Hooks move in the
    same dictionaries, since their handles refer to these.
    """
    if type(old) is not nn.Parameter or old is leaf:
        return
    if leaf is not None:
        leaf.__dict__.update({k: v for k, v in vars(old).items() if k not in vars(leaf)})
        for after, hooks in ((False, gradient_hooks(old)), (True, accumulation_hooks(old))):
            if hooks and isinstance(leaf, ShardedTensor):
                hooks.update({number: wrap_hook(hook, after=after) for number, hook in hooks.items()})
            if hooks:
                (set_accumulation_hooks if after else set_gradient_hooks)(leaf, hooks)
    old.grad = None
    if not old.is_meta:
        old.data = old.data.new_empty(0)
    old.__class__ = ReplacedParameter
    old.__dict__["_replacement"] = leaf


def refuse_shared_memory(root: nn.Module) -> None:
    """Raise for the first buffer that shares the memory of a parameter."""
    with below_functions():
        names = {_memory(parameter): name for name, parameter in root.named_parameters()}
        for name, buffer in root.named_buffers():
            memory = _memory(buffer)
            if memory is not None and memory in names and not isinstance(buffer, nn.Parameter):
                raise UnsupportedCodeError(
                    f"the buffer {name} is in the memory of the parameter {names[memory]}: it would change with every "
                    "step on one process, but not when the parameter is sharded. Register a clone(), or read the "
                    "parameter."
                )


def _memory(tensor: Tensor) -> int | None:
    """Return an id of the memory of a tensor, if it has some."""
    has_none = isinstance(tensor, UninitializedBuffer | UninitializedParameter)
    if has_none or dispatches(type(tensor)) or tensor.layout is not torch.strided:
        return None
    return memory_id(tensor) if tensor.numel() else None


_DEPTH = 4  # of containers in containers
_REGISTRIES = frozenset(vars(nn.Module()))  # such as ``_parameters``


def follow_parameters(root: nn.Module, replaced: Mapping[nn.Parameter, Tensor]) -> None:
    """Replace old parameters by new ones, or by placeholders, in the attributes of modules inside ``root``."""
    new_by_id: dict[int, Any] = {id(old): new for old, new in replaced.items() if old is not new}
    if not new_by_id:
        return
    for module in root.modules():
        for name, value in list(vars(module).items()):
            if name not in _REGISTRIES:
                new = _follow(value, new_by_id, _DEPTH)
                if new is not value:
                    module.__dict__[name] = new


def _follow(value: Any, new_by_id: Mapping[int, Any], depth: int) -> Any:
    """Return the new value; a list, set or dict is changed in place."""
    if isinstance(value, nn.Parameter):
        return new_by_id.get(id(value), value)
    if type(value) is int and value in new_by_id:
        return id(new_by_id[value])
    if type(value) not in (list, tuple, set, frozenset, dict) or not depth:
        return value
    if len(value) > len(new_by_id) + 100:  # longer containers hold data
        return value
    items = [*value.items()] if type(value) is dict else [*value]
    new_items = [_follow(item, new_by_id, depth - 1) for item in items]
    if all(new is old for new, old in zip(new_items, items, strict=True)):
        return value
    if type(value) in (tuple, frozenset):
        return type(value)(new_items)
    value.clear()
    value.extend(new_items) if type(value) is list else value.update(new_items)
    return value
