"""Modules of other pipeline stages: copies with classes, attributes and shapes, but without values and state.

Every stage runs the user's own step, which calls all modules; between steps, code goes over all parameters. What the
copies compute is a `Placeholder`, as is what stands for their parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Container
from typing import Any

import torch
from torch import nn

from lightning_shardckpt.compat.torch_modules import clear_hooks, parameter_slots, unregister_tensors, withhold_state
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.tensors.placeholder import Placeholder


def weightless_copy(module: nn.Module, fqn: str, device: torch.device, known: dict[int, Placeholder]) -> nn.Module:
    """A copy of ``module`` without values: same classes and attributes, no parameters, no buffers, no hooks.

    Weights are there as unknown attributes, so that its parts can be called, indexed and asked for their shapes;
    `register_placeholders` makes them parameters of the copy.

    Args:
        known: what stands for parameters and buffers already, by ``id``; those of this module are added. A parameter
            that modules share is one in their copies, too.

    Raises:
        UnsupportedCodeError: if it cannot be copied.
    """
    memo: dict[int, Any] = {}
    for named in (module.named_parameters(fqn), module.named_buffers(fqn)):
        for name, tensor in named:
            memo[id(tensor)] = known.setdefault(id(tensor), Placeholder.like(tensor, name, device))
    try:
        found = copy.deepcopy(module, memo)
    except Exception as error:
        raise UnsupportedCodeError(
            f"{fqn} ({type(module).__name__}) is on another pipeline stage for some ranks, and cannot be copied "
            f"without its weights: {type(error).__name__}: {error}"
        ) from error
    for name, part in found.named_modules(prefix=fqn):
        _strip(part, name)
    return found


def register_placeholders(weightless: nn.Module, here: Container[int]) -> None:
    """Make the weights of a weightless copy its parameters, so that code which goes over all parameters meets them.

    Args:
        here: by ``id``, those that this rank has under another name; the code meets that one.
    """
    for part in weightless.modules():
        for name, weight in list(vars(part).items()):
            if isinstance(weight, Placeholder) and isinstance(weight, nn.Parameter) and id(weight) not in here:
                del part.__dict__[name]
                parameter_slots(part)[name] = weight


def _strip(module: nn.Module, fqn: str) -> None:
    def asked() -> None:
        raise UnsupportedCodeError(
            f"the state_dict of {fqn} is asked for, which only another pipeline stage has. Read it from a saved "
            "checkpoint, or use pipeline_parallel_size=1."
        )

    unregister_tensors(module)
    clear_hooks(module)
    withhold_state(module, asked)  # the stage that has the module saves it, and loads what is given
