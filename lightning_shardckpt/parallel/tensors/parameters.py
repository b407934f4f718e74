"""Replacement of a module's parameters by sharded ones; references to the old ones keep working."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from lightning_shardckpt.compat.dtensor import local_tensor, new_dtensor, spec_of
from lightning_shardckpt.compat.torch_modules import parameter_slots, refresh_flat_weights
from lightning_shardckpt.compat.torch_tensors import (
    accumulation_hooks,
    gradient_hooks,
    mark_as_parameter,
    set_accumulation_hooks,
    set_gradient_hooks,
)
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.tensors.derivatives import wrap_hook
from lightning_shardckpt.parallel.tensors.gather import PARTIAL
from lightning_shardckpt.parallel.tensors.placement import NAME, resolve_sharding, rows_of, spec_over
from lightning_shardckpt.parallel.tensors.sharded import ShardedTensor, as_sharded


class ReplacedParameter(nn.Parameter):
    """A parameter from before sharding: functions of it run on the sharded one in its place."""

    _replacement: nn.Parameter | None

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*_current(tuple(args)), **_current(kwargs or {}))

    @property
    def data(self) -> Tensor:
        """The ``data`` of the sharded parameter."""
        return _current(self).data  # type: ignore[no-any-return]  # of a Tensor

    @data.setter
    def data(self, value: Tensor) -> None:
        _current(self).data = value


def _current(value: Any) -> Any:
    if isinstance(value, ReplacedParameter):
        if value._replacement is None:
            raise UnsupportedCodeError(
                "this parameter is on another pipeline stage. Access parameters through the module, not through "
                "references from before it was sharded, and only the parameters of this stage."
            )
        return value._replacement
    if isinstance(value, list | tuple):
        return type(value)(map(_current, value))
    if isinstance(value, dict):
        return {key: _current(item) for key, item in value.items()}
    return value


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
    """
    partial, new = frozenset(partial), dict[nn.Parameter, nn.Parameter]()
    for prefix, module in root.named_modules():
        slots = parameter_slots(module)
        for name, old in list(slots.items()):
            if old is None or old in ignored or (not isinstance(old, DTensor) and (data_mesh is None or old.ndim == 0)):
                continue
            fqn = f"{prefix}.{name}" if prefix else name
            if old not in new:
                _refuse_other_kinds(old, fqn)
                new[old] = _sharded(old, data_mesh, root_mesh, device)
                new[old].__dict__[NAME] = fqn
            if fqn in partial:
                new[old].__dict__[PARTIAL] = partial_group
            slots[name] = new[old]
        refresh_flat_weights([module])


def _refuse_other_kinds(parameter: nn.Parameter, fqn: str) -> None:
    """Raise for a parameter of a subclass, whose behavior would be lost."""
    if type(parameter) is nn.Parameter or isinstance(parameter, DTensor):
        return
    remedy = "run a batch through the module first" if is_lazy(parameter) else "make it an nn.Parameter"
    raise UnsupportedCodeError(
        f"the parameter {fqn} is of the class {type(parameter).__name__}, which cannot be sharded: {remedy}, or train "
        "with data_parallel_shard_size=1"
    )


def _sharded(
    old: nn.Parameter, data_mesh: DeviceMesh | None, root_mesh: DeviceMesh, device: torch.device
) -> nn.Parameter:
    if data_mesh is not None:
        spec = spec_over(old, data_mesh, root_mesh)
    else:
        assert isinstance(old, DTensor)
        spec = spec_of(old)
    sharding = resolve_sharding(spec.mesh, tuple(spec.placements))
    with torch.no_grad():
        part = local_tensor(old).detach()
        if sharding.shard is not None:
            start, stop = rows_of(part.shape[0], sharding.shard)
            part = part[start:stop]
        if part.is_meta:
            local = torch.empty(part.shape, dtype=part.dtype, device=device)
        else:
            local = part.to(device, copy=True, memory_format=torch.contiguous_format)
        made = as_sharded(new_dtensor(local, spec))
    leaf: Any = made.requires_grad_(old.requires_grad)
    mark_as_parameter(leaf)
    return leaf  # type: ignore[no-any-return]  # isinstance takes it for an nn.Parameter


def retire_parameter(old: nn.Parameter, leaf: nn.Parameter | None) -> None:
    """Move a parameter's attributes and hooks to its replacement, and free its memory.

    The old parameter becomes a `ReplacedParameter`; ``leaf`` is None if this rank has no replacement.
    """
    if type(old) is not nn.Parameter or old is leaf:
        return
    if leaf is not None:
        leaf.__dict__.update({k: v for k, v in vars(old).items() if k not in vars(leaf)})
        _move_hooks(old, leaf)
    old.grad = None
    if not old.is_meta:
        old.data = old.data.new_empty(0)
    old.__class__ = ReplacedParameter
    old.__dict__["_replacement"] = leaf


def _move_hooks(old: nn.Parameter, leaf: nn.Parameter) -> None:
    """Move hooks in the same dictionaries, since the hooks' handles refer to these."""
    for after, hooks in ((False, gradient_hooks(old)), (True, accumulation_hooks(old))):
        if not hooks:
            continue
        if isinstance(leaf, ShardedTensor):
            for number, hook in hooks.items():
                hooks[number] = wrap_hook(hook, after=after)
        (set_accumulation_hooks if after else set_gradient_hooks)(leaf, hooks)
