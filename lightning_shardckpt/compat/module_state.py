"""A module's state dict, sooner than torch makes it. Checked with torch 2.12 to 2.15."""

from __future__ import annotations

from copy import copy as shallow_copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shardckpt.compat.dtensor import local_tensor, new_dtensor, spec_of
from lightning_shardckpt.compat.tensor_subclass import memory_id


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
