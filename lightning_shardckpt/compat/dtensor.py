"""Private names of DTensors, their meshes, and state dicts of modules that have them.

Checked with torch 2.12 to 2.15. Unlike ``DTensor.to_local`` and ``DTensor.from_local``, functions here record no
history and check no shapes over all ranks."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from torch import Size, Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
from torch.distributed.tensor._dtensor_spec import TensorMeta as TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

StridedShard = _StridedShard
"""The placement of a dim that inner axes have split into ``split_factor`` parts: FSDP over tensor parallelism."""


def local_tensor(tensor: Tensor) -> Tensor:
    """Return a DTensor's local tensor itself, or a plain tensor unchanged."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


# no ``def``, since optimizers call them thousands of times in a step
spec_of: Callable[[DTensor], DTensorSpec] = attrgetter("_spec")
"""The mesh, the placements and the global shape, strides and dtype of a DTensor, in one hashable value."""
rows_of: Callable[[DTensor], Tensor] = attrgetter("_local_tensor")
"""A DTensor's local tensor itself."""


def shape_of(tensor: Tensor) -> Size:
    """Return a tensor's shape, faster than ``DTensor.shape``, which builds another Size."""
    meta = tensor._spec.tensor_meta if isinstance(tensor, DTensor) else None
    return tensor.shape if meta is None else meta.shape


def new_dtensor(local: Tensor, spec: DTensorSpec) -> DTensor:
    """Return a DTensor over the memory of ``local``, without history, communication, checks or a slow ``__init__``."""
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


def replace_local(tensor: DTensor, other: DTensor) -> None:
    """Give a DTensor the local tensor and the spec of another; other fields stay unchanged."""
    tensor._local_tensor, tensor._spec = other._local_tensor, other._spec


def sibling_ranks(mesh: DeviceMesh) -> Tensor:
    """Return the ranks of a mesh and of all its siblings, equal on every rank, in shape ``(siblings, *mesh.shape)``."""
    return mesh._layout.remap_to_tensor(mesh._rank_map)


def has_own_state_dict(module: nn.Module) -> bool:
    """Return whether code of a module may give ``state_dict()`` other tensors than its parameters and buffers."""
    names = "state_dict", "_save_to_state_dict"
    return any(
        part._state_dict_hooks
        or any(name in vars(part) or getattr(type(part), name) is not getattr(nn.Module, name) for name in names)
        for part in module.modules()
    )


def live_state_dict(module: nn.Module) -> dict[str, Any]:
    """Return ``module.state_dict()``, without torch's slow detach of each DTensor.

    Its DTensors share the module's memory but have their own version counters: to compare versions, call
    ``state_dict``. A module with its own ``state_dict`` or with hooks that change the result gets that.
    """
    has_own = type(module).state_dict is not nn.Module.state_dict
    if has_own or any(part._state_dict_hooks for part in module.modules()):
        return module.state_dict()
    state: dict[str, Any] = module.state_dict(keep_vars=True)
    for name, value in state.items():
        if isinstance(value, DTensor):
            state[name] = new_dtensor(local_tensor(value).detach(), spec_of(value))
            state[name].__class__ = type(value)
        elif isinstance(value, Tensor):
            state[name] = value.detach()
    return state
