"""DTensors, their meshes, and state dicts of modules that have them.

Checked with torch 2.12 to 2.15. ``DTensor.to_local`` and ``DTensor.from_local`` record history and check shapes over
all ranks; what is here does neither."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy as shallow_copy
from operator import attrgetter
from typing import Any

import torch
from torch import Size, Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
from torch.distributed.tensor._dtensor_spec import TensorMeta as TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from lightning_shardckpt.compat.torch_tensors import memory_id

StridedShard = _StridedShard
"""The shard of a dim that inner axes split into ``split_factor`` parts before: FSDP over tensor parallelism."""


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor: a DTensor's local tensor itself, without history; a plain one as it is."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


spec_of: Callable[[DTensor], DTensorSpec] = attrgetter("_spec")
"""The mesh, the placements and the global shape, strides and dtype of a DTensor, in one hashable value.

No ``def``: optimizers ask thousands of times in a step.
"""


def shape_of(tensor: Tensor) -> Size:
    """Return a tensor's shape; a DTensor would make another one of the same numbers, which takes longer."""
    meta = tensor._spec.tensor_meta if isinstance(tensor, DTensor) else None
    return tensor.shape if meta is None else meta.shape


def new_dtensor(local: Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor over the memory of ``local``, without history. No communication, no checks.

    Leaves out ``DTensor.__init__``, which does nothing, in a wrapper for compilers that takes longer than all the rest.
    """
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


def look_for_anomalies_in_rows() -> Callable[[], None]:
    """Let ``torch.autograd.detect_anomaly`` look at this rank's part of a DTensor, for which torch has no strategy.

    Relies on the handlers of DTensor's dispatcher. A rank that finds NaN raises alone, as autograd does.

    Returns:
        A function that ends it.
    """

    def handler(op: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        return op(local_tensor(args[0]))

    handlers: dict[object, Any] = DTensor._op_dispatcher._custom_op_handlers  # type: ignore[assignment]  # typed later
    operation = torch.ops.aten._is_any_true.default
    if operation in handlers:  # torch's own, some day
        return lambda: None
    handlers[operation] = handler
    return lambda: handlers.pop(operation, None) and None


def replace_local(tensor: DTensor, other: DTensor) -> None:
    """Make a DTensor have the local tensor and the spec of another one; its own tensor fields stay as they are."""
    tensor._local_tensor, tensor._spec = other._local_tensor, other._spec


# ── meshes ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def joined_mesh(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """The mesh with the axes of all ``meshes``, slices of one root mesh, in that order, and their process groups.

    Checked with torch 2.12 to 2.15. The public way, slicing the root, is not possible for meshes of different roots
    (torch 2.13).
    """
    return DeviceMesh._concatenate(list(meshes))


def sibling_ranks(mesh: DeviceMesh) -> Tensor:
    """The ranks of a mesh and of all its siblings, the same on every rank: of shape ``(how many, *mesh.shape)``.

    Relies on ``DeviceMesh._layout`` and ``_rank_map`` of torch 2.13: which ranks the root has, and how this mesh's axes
    run through them. ``mesh.mesh`` has the ranks of this one alone.
    """
    return mesh._layout.remap_to_tensor(mesh._rank_map)


# ── state dicts ───────────────────────────────────────────────────────────────────────────────────────────────────────


def live_state_dict(module: nn.Module) -> dict[str, Any]:
    """Return what ``module.state_dict()`` does, without the long way on which torch detaches each DTensor.

    A DTensor in it has the memory of the module's, but a version of its own: whoever compares versions must call
    ``state_dict``. That is called here, too, for a module that has its own, or hooks that change what is in it.

    Relies on ``Module._state_dict_hooks``, and on ``keep_vars`` making no other difference than that.
    """
    has_own = type(module).state_dict is not nn.Module.state_dict
    if has_own or any(part._state_dict_hooks for part in module.modules()):
        return module.state_dict()
    found: dict[str, Any] = module.state_dict(keep_vars=True)
    for name, value in found.items():
        if isinstance(value, DTensor):
            found[name] = _detached(value)
        elif isinstance(value, Tensor):
            found[name] = value.detach()
    return found


def _detached(tensor: DTensor) -> DTensor:
    found = new_dtensor(local_tensor(tensor).detach(), spec_of(tensor))
    found.__class__ = type(tensor)  # one that acts as a whole tensor, or torch's own
    return found


def copied_state_dict(live: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict with tensors in memory of their own, which they share where those of ``live`` share it.

    A DTensor's copy has this rank's rows. Of other subclasses of Tensor, and of what is no strided tensor with memory,
    the entries are those of ``live``.
    """
    storages: dict[int, torch.UntypedStorage] = {}

    def copy(value: Any) -> Any:
        local = local_tensor(value) if isinstance(value, DTensor) else value
        if type(local) not in (Tensor, nn.Parameter) or local.layout != torch.strided or local.is_meta:
            return value
        memory = local.untyped_storage()
        if memory_id(local) not in storages:
            storages[memory_id(local)] = memory.clone()
        own = local.new_empty(0)
        own.set_(storages[memory_id(local)], local.storage_offset(), local.size(), local.stride())
        if not isinstance(value, DTensor):
            return own
        shards = new_dtensor(own, spec_of(value))
        shards.__class__ = type(value)
        return shards

    found = shallow_copy(live)  # with what torch keeps in an attribute of it
    with torch.no_grad():
        found.update({name: copy(value) for name, value in live.items()})
    return found
