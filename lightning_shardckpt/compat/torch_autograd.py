"""Private names of autograd and GradScaler: running backwards, hooks, arguments, kernels over many tensors.

Checked with torch 2.12 to 2.15."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.optim import optimizer

from lightning_shardckpt.compat.torch_modules import replace_attributes


def in_backward() -> bool:
    """Return whether a backward pass is running in this thread."""
    return int(torch._C._current_graph_task_id()) != -1


def after_backward(function: Callable[[], None]) -> None:
    """Call a function at the end of the backward that runs in this thread, as DistributedDataParallel and FSDP do."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def accumulates_gradient_of(leaf: Tensor) -> bool:
    """Return True if the running backward will accumulate the gradient of a leaf; ``autograd.grad`` does not.

    Relies on ``_will_engine_execute_node`` raising for leaves in ``autograd.grad``, and only there.
    """
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(leaf).node)
    except RuntimeError:
        return False


def packing_hook() -> Callable[[Tensor], Any] | None:
    """Return the pack hook of the innermost active ``saved_tensors_hooks`` of this thread, or None."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return None if hooks is None else hooks[0]


def on_node_hook(check: Callable[[Any], None]) -> Callable[[], None]:
    """Call ``check`` with each hook before it is registered on a node of autograd's graph; return the undo.

    Relies on ``Node.register_hook`` and ``register_prehook`` calling ``torch.autograd.Function._register_hook``.
    """
    function: Any = torch.autograd.Function
    register = function._register_hook

    def check_and_register(hooks: Any, hook: Any) -> Any:
        check(hook)
        return register(hooks, hook)

    return replace_attributes(function, _register_hook=staticmethod(check_and_register))


def node_hooks(leaf: Tensor) -> list[Any]:
    """Return the hooks on the node that accumulates the gradient of a leaf, without the hooks of the leaf itself.

    Relies on the garbage collector, which sees the dicts of a node's hooks while no graph has the node.
    """
    dicts = [value for value in gc.get_referents(get_gradient_edge(leaf).node) if isinstance(value, dict)]
    return [hook for hooks in dicts if hooks is not leaf._backward_hooks for hook in hooks.values()]


def is_batched(tensor: Tensor) -> bool:
    """Return whether a tensor is a batched tensor of ``vmap`` or of batched gradients."""
    return torch._C._functorch.is_batchedtensor(tensor) or torch._C._functorch.is_legacy_batchedtensor(tensor)


def check_unused_inputs(check: Callable[[Sequence[Any], Sequence[Tensor | None] | None], None]) -> Callable[[], None]:
    """Call ``check`` when ``torch.autograd.grad`` finds unused inputs inside a backward; return the undo.

    It gets the inputs and their gradients, or None if autograd has raised. Relies on ``torch.autograd.grad`` calling
    the ``_engine_run_backward`` of its module, with the inputs as the fifth argument by position.
    """
    module: Any = torch.autograd
    run_backward = module._engine_run_backward

    def run(*args: Any, **kwargs: Any) -> Any:
        if len(args) < 5 or not args[4] or not in_backward():
            return run_backward(*args, **kwargs)
        try:
            gradients = run_backward(*args, **kwargs)
        except RuntimeError as error:
            if "appears to not have been used in the graph" in str(error):
                check(args[4], None)
            raise
        if any(gradient is None for gradient in gradients or ()):
            check(args[4], gradients)
        return gradients

    return replace_attributes(module, _engine_run_backward=run)


def change_arguments(change: Callable[[type, tuple[Any, ...]], tuple[Any, ...]]) -> Callable[[], None]:
    """Call ``apply`` of users' autograd functions with ``change(function, args)``; return the undo.

    Relies on ``apply`` being a class method of ``torch.autograd.Function``.
    """
    function: Any = torch.autograd.Function
    original = vars(function)["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if not cls.__module__.startswith(("torch.", "lightning_shardckpt.")):
            args = change(cls, args)
        return original.__get__(None, cls)(*args, **kwargs)

    return replace_attributes(function, apply=classmethod(apply))


def norms(tensors: Sequence[Tensor], norm_type: float, dtype: torch.dtype) -> list[Tensor]:
    """Return the norms of tensors, computed in ``dtype``; on CUDA by a few kernels, if all have one dtype."""
    return list(torch._foreach_norm(list(tensors), norm_type, dtype=dtype))


def unscale(gradients: Sequence[Tensor], inverse_scale: Tensor, found_inf: Tensor) -> None:
    """Multiply gradients of one device and dtype in place; write 1 to ``found_inf`` if one is infinite or NaN."""
    torch._amp_foreach_non_finite_check_and_unscale_(list(gradients), found_inf, inverse_scale)


def replace_unscale(scaler: torch.amp.GradScaler, function: Callable[..., Any]) -> Callable[[], None]:
    """Make ``scaler.unscale_`` and ``scaler.step`` call ``function``, and return the undo; torch has no public way.

    It gets the optimizer, the inverse scale, a zero, and whether float16 is allowed; it returns 1 by device, if a
    gradient is infinite or NaN.
    """
    return replace_attributes(scaler, _unscale_grads_=function)  # called by position


def allow_lists_of(kind: type[Tensor]) -> Callable[[], None]:
    """Make torch's optimizers use foreach functions on GPUs for a tensor class by default; return the undo."""
    kinds: list[type] = optimizer._foreach_supported_types  # type: ignore[assignment]
    kinds.append(kind)
    return partial(kinds.remove, kind)
