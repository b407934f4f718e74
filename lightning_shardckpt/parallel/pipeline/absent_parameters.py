"""Parameters and modules of other pipeline stages: placeholders, and copies of modules without weights.

``parameters()`` returns all parameters on every stage, in the order of the whole module. A parameter of another stage
is a placeholder: it has a shape, and tells if there is a gradient. An in-place change of it alone takes place on its
stage. Using its value is an error.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_shardckpt.compat.dtensor import local_tensor
from lightning_shardckpt.compat.torch_modules import keep_hooks, parameter_slots, unregister_tensors, withhold_state
from lightning_shardckpt.compat.torch_tensors import (
    accumulation_hooks,
    gradient_hooks,
    with_hooks,
    without_torch_function,
)
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.pipeline.placeholder import Placeholder
from lightning_shardckpt.parallel.sharding.replaced_functions import is_of_user


class AbsentParameters:
    """All parameters of a pipelined module: the parameters of this rank, and placeholders for the others.

    Args:
        parameters: the name of each parameter of the whole module, in the same order on all ranks, with the parameter
            or None, and the placeholder or None.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter | None, Placeholder | None]]) -> None:
        self.parameters = list(parameters)

    def gradient_flags(self, has_gradient: Callable[[nn.Parameter], bool]) -> list[int]:
        """Return for each parameter of the whole module 1 if this rank has it with a gradient, else 0."""
        return [int(own is not None and has_gradient(own)) for _, own, _ in self.parameters]

    def set_gradient_flags(self, table: Tensor) -> None:
        """Set ``has_gradient`` of the placeholders, from the `gradient_flags` of all ranks of the pipeline."""
        for (_, own, absent), flag in zip(self.parameters, table.amax(0).tolist(), strict=True):
            if own is None and absent is not None:
                absent.has_gradient = bool(flag)

    def check_data(self) -> None:
        """Check that this rank's parameters have their data.

        Raises:
            UnsupportedCodeError: for a parameter whose ``data`` was set to the data of a placeholder.
        """
        for name, own, _ in self.parameters:
            if own is None:
                continue
            part = local_tensor(own)
            if part.untyped_storage().nbytes() < part.numel() * part.itemsize and part.numel() > 1:
                raise UnsupportedCodeError(
                    f"{name} was given the data of a parameter that only another pipeline stage has (by .data = …, or "
                    "torch.nn.utils.vector_to_parameters). Change each parameter by itself, or use "
                    "pipeline_parallel_size=1."
                )

    def check_hooks(self) -> None:
        """Check the hooks of this rank's parameters.

        Raises:
            UnsupportedCodeError: for a hook of the user.
        """
        owned = [(name, own) for name, own, _ in self.parameters if own is not None]
        with without_torch_function():
            hooked = set(map(id, with_hooks([own for _, own in owned])))
        for name, own in owned:
            if id(own) not in hooked:
                continue
            hooks = [*(gradient_hooks(own) or {}).values(), *(accumulation_hooks(own) or {}).values()]
            if any(map(is_of_user, hooks)):
                raise UnsupportedCodeError(f"{name} {_HOOKED}")


_HOOKED = (
    "has a hook (register_hook, register_post_accumulate_grad_hook), which in a pipeline sees gradients of "
    "microbatches, on one stage. Change gradients in on_before_optimizer_step, or use pipeline_parallel_size=1."
)


def has_gradient(parameter: nn.Parameter) -> bool:
    """Return True if a parameter has a gradient. No communication."""
    with without_torch_function():
        return parameter.grad is not None


# ── modules of other stages ───────────────────────────────────────────────────────────────────────────────────────────


def copy_without_weights(
    module: nn.Module,
    fqn: str,
    device: torch.device,
    placeholders: dict[int, Placeholder],
    outside: Iterable[nn.Module] = (),
) -> nn.Module:
    """Return a copy of ``module`` with the same classes and attributes, but no parameters, buffers and hooks.

    Plain attributes hold placeholders for the weights, so that the copy can be called, indexed and asked for shapes.
    `register_placeholders` makes them parameters. New placeholders are added to ``placeholders``, by the ``id`` of the
    parameter or buffer, so that copies of modules that share a parameter share its placeholder. Modules
    ``outside``, to which an attribute may refer, are not copied.

    Raises:
        UnsupportedCodeError: if the module cannot be copied.
    """
    memo: dict[int, Any] = {id(other): other for other in outside}
    for named in (module.named_parameters(fqn), module.named_buffers(fqn)):
        for name, tensor in named:
            memo[id(tensor)] = placeholders.setdefault(id(tensor), Placeholder.like(tensor, name, device))
    try:
        weightless = copy.deepcopy(module, memo)
    except Exception as error:
        raise UnsupportedCodeError(
            f"{fqn} ({type(module).__name__}) is on another pipeline stage for some ranks, and cannot be copied "
            f"without its weights: {type(error).__name__}: {error}"
        ) from error
    for name, part in weightless.named_modules(prefix=fqn):
        _strip(part, name)
    return weightless


def register_placeholders(weightless: nn.Module, present: Container[int]) -> None:
    """Register the placeholders in a copy without weights as its parameters, so that ``parameters()`` returns them.

    Leaves out ``present``, the ids of placeholders for parameters that this rank has under another name.
    """
    for part in weightless.modules():
        for name, weight in list(vars(part).items()):
            if isinstance(weight, Placeholder) and isinstance(weight, nn.Parameter) and id(weight) not in present:
                del part.__dict__[name]
                parameter_slots(part)[name] = weight


def _strip(module: nn.Module, fqn: str) -> None:
    def refuse() -> None:
        raise UnsupportedCodeError(
            f"the state_dict of {fqn} was called, a module that only another pipeline stage has. Read its state from a "
            "checkpoint, or use pipeline_parallel_size=1."
        )

    unregister_tensors(module)
    keep_hooks(module)
    withhold_state(module, refuse)  # the stage that has the module saves and loads it
