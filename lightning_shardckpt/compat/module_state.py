"""A module's state dict, sooner than torch makes it. Checked with torch 2.12 to 2.15."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shardckpt.compat.dtensor import local_tensor, new_dtensor, spec_of


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
