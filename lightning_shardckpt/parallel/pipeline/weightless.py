"""Modules of other pipeline stages: copies with classes, attributes and shapes, but without values and state.

Every stage runs the user's own step, which calls all modules; between steps, code goes over all parameters. What the
copies compute, and what stands for their parameters, is `unknown`.
"""

from __future__ import annotations

import copy
from collections.abc import Container
from typing import Any

import torch
from torch import nn

from lightning_shardckpt.errors import TopologyError
from lightning_shardckpt.parallel.unknown import Unknown


def hollow(module: nn.Module, fqn: str, device: torch.device, known: dict[int, Unknown]) -> nn.Module:
    """A copy of ``module`` without values: same classes and attributes, no parameters, no buffers, no hooks.

    Weights are there as unknown attributes, so that its parts can be called, indexed and asked for their shapes;
    `list_weights` makes them parameters of the copy.

    Args:
        known: what stands for parameters and buffers already, by ``id``; those of this module are added. A parameter
            that modules share is one in their copies, too.

    Raises:
        TopologyError: if it cannot be copied.
    """
    memo: dict[int, Any] = {}
    for named in (module.named_parameters(fqn), module.named_buffers(fqn)):
        for name, tensor in named:
            memo[id(tensor)] = known.setdefault(id(tensor), Unknown.like(tensor, name, device))
    try:
        twin = copy.deepcopy(module, memo)
    except Exception as error:
        raise TopologyError(
            f"{fqn} ({type(module).__name__}) is on another pipeline stage for some ranks, and cannot be copied "
            f"without its weights: {type(error).__name__}: {error}"
        ) from error
    for part in twin.modules():
        _strip(part)
    return twin


def list_weights(twin: nn.Module, here: Container[int]) -> None:
    """Make the weights of a hollow copy its parameters, so that code which goes over all parameters meets them.

    Args:
        here: by ``id``, those that this rank has under another name; the code meets that one.
    """
    for part in twin.modules():
        for name, weight in list(vars(part).items()):
            if isinstance(weight, Unknown) and isinstance(weight, nn.Parameter) and id(weight) not in here:
                del part.__dict__[name]
                part._parameters[name] = weight


class _Hollow(nn.Module):
    """Mixed into the class of a hollow module: it has no state."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        pass

    def _load_from_state_dict(self, *args: Any) -> None:
        """The stage that has the module loads what is given."""

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        return self

    def get_extra_state(self) -> Any:
        return nn.Module.get_extra_state(self)

    def set_extra_state(self, state: Any) -> None:
        return nn.Module.set_extra_state(self, state)


def _strip(module: nn.Module) -> None:
    for registered in (module._parameters, module._buffers):
        for name, value in list(registered.items()):
            if value is not None:
                del registered[name]
                module.__dict__[name] = value
    module._non_persistent_buffers_set.clear()
    for name, hooks in vars(module).items():
        if name.startswith("_") and "_hooks" in name and isinstance(hooks, dict):
            hooks.clear()
    kind = type(module)
    module.__class__ = type(kind.__name__, (_Hollow, kind), {"__module__": kind.__module__})
