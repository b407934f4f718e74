"""Ask the engine of autograd about the backward that runs, and the graph about its nodes.

Checked with torch 2.12 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge


def after_backward(function: Callable[[], None]) -> None:
    """Call a function when the backward that runs in this thread has done everything else.

    Relies on ``queue_callback``, which DistributedDataParallel and FSDP use.
    """
    torch.autograd.Variable._execution_engine.queue_callback(function)


def returns_gradient_of(leaf: Tensor) -> bool:
    """Return, in a hook of a leaf, whether ``torch.autograd.grad`` asks for its gradient, which is then not
    accumulated.

    Relies on ``_will_engine_execute_node`` refusing to answer for leaves then, and only then.
    """
    try:
        torch._C._will_engine_execute_node(get_gradient_edge(leaf).node)
    except RuntimeError:
        return True
    return False


def accumulates_gradient_of(leaf: Tensor) -> bool:
    """Return, in a backward, whether it is going to accumulate the gradient of a leaf; ``autograd.grad`` is not.

    Relies on what ``returns_gradient_of`` does.
    """
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(leaf).node)
    except RuntimeError:
        return False


def is_result_of(tensor: Tensor, function: type[torch.autograd.Function]) -> bool:
    """Return whether a tensor with history was returned by ``function.apply``."""
    return isinstance(tensor.grad_fn, function._backward_cls)


def packing_hook() -> Callable[[Tensor], Any] | None:
    """Return the first of the ``saved_tensors_hooks`` that are active in this thread, or None."""
    found = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return None if found is None else found[0]


def is_batched(tensor: Tensor) -> bool:
    """Return whether a tensor stands for a batch of tensors, inside of ``vmap`` or of batched gradients."""
    return torch._C._functorch.is_batchedtensor(tensor) or torch._C._functorch.is_legacy_batchedtensor(tensor)
