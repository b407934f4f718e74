"""Hooks on sharded tensors, and gradients with respect to them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor

from lightning_shardckpt.compat.torch_tensors import with_torch_function, without_torch_function
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.tensors.gather import GATHERED, REMEDY, takes_gradients_late
from lightning_shardckpt.parallel.tensors.kinds import name_of
from lightning_shardckpt.parallel.tensors.placement import describe
from lightning_shardckpt.parallel.tensors.sharded import (
    Function,
    as_sharded,
    is_alike,
    is_sharded,
    map_nested,
    new_like,
    rows_like,
)
from lightning_shardckpt.parallel.tensors.values import gather_whole


def gather_arguments(function: type, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of a custom autograd function with sharded tensors gathered. Differentiable."""
    if not any(isinstance(arg, Tensor) and is_sharded(arg) for arg in args):
        return args
    with without_torch_function():
        return tuple(gather_whole(arg, function.__name__) if is_sharded(arg) else arg for arg in args)


def refuse_unused_copies(inputs: Sequence[Any], gradients: Sequence[Tensor | None] | None) -> None:
    """Raise if gathered copies of parameters are among ``inputs``, and none of them has a gradient.

    A custom autograd function that runs a module in its backward, as adjoint methods do, asks for the gradients of the
    parameters that were its arguments. These are copies from its forward, but the module has used other ones.

    Args:
        inputs: of ``torch.autograd.grad``, some of them unused.
        gradients: None if autograd has refused unused inputs.

    Raises:
        UnsupportedCodeError: naming the shape of the first copy.
    """
    found = [None] * len(inputs) if gradients is None else gradients
    copies = [(t, g) for t, g in zip(inputs, found, strict=True) if hasattr(getattr(t, "grad_fn", None), GATHERED)]
    if copies and all(gradient is None for _, gradient in copies):
        raise UnsupportedCodeError(
            "a custom autograd function runs a module in its backward, and asks torch.autograd.grad for gradients of "
            f"parameters that were its arguments, the first of shape {tuple(copies[0][0].shape)}. It got gathered "
            "copies of them, but the module uses the parameters. Ask for those of the module itself there, use "
            "torch.utils.checkpoint (of torchdiffeq odeint, not odeint_adjoint), or call torch.autograd.backward, and "
            "don't pass the parameters."
        )


def differentiate(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run torch.autograd.grad or backward with graph edges in place of sharded inputs.

    So ``__torch_function__`` stays enabled while hooks of the user run.
    """
    if func is not torch.autograd.grad and func is not torch.autograd.backward:
        with without_torch_function():
            return func(*args, **kwargs)
    outputs, *rest = args
    argument = rest.pop(0) if func is torch.autograd.grad and rest else kwargs.pop("inputs", None)
    inputs = () if argument is None else tuple(argument.values() if isinstance(argument, dict) else argument)
    if func is torch.autograd.grad and any(not t.requires_grad for t in inputs):
        raise RuntimeError("One of the differentiated Tensors does not require grad")
    _refuse_gathered_by_fsdp(func, inputs)
    materialize = kwargs.pop("materialize_grads", False)
    kwargs["allow_unused"] = kwargs.get("allow_unused") or materialize
    if func is torch.autograd.backward:
        del kwargs["allow_unused"]
    with without_torch_function():
        edges = [get_gradient_edge(t) if is_sharded(t) else t for t in inputs]
        heads, rest, kwargs = map_nested([*outputs], _gather), map_nested(rest, _gather), map_nested(kwargs, _gather)
    if func is torch.autograd.backward:
        return func(heads, *rest, **kwargs, **({"inputs": edges} if argument is not None else {}))
    gradients = func(heads, edges, *rest, **kwargs)
    with without_torch_function():
        gradients = [_shard_gradient(g, t) for g, t in zip(gradients, inputs, strict=True)]
        if materialize:
            gradients = [torch.zeros_like(t) if g is None else g for t, g in zip(inputs, gradients, strict=True)]
    return tuple(gradients)


def _refuse_gathered_by_fsdp(func: Function, inputs: Sequence[Tensor]) -> None:
    for tensor in inputs:
        if isinstance(tensor, DTensor) and takes_gradients_late(tensor):
            raise UnsupportedCodeError(
                f"{func.__name__} asks for the gradient of {describe(tensor)}. fully_shard computes gradients of "
                f"parameters only in loss.backward(). {REMEDY}"
            )


def _shard_gradient(gradient: Tensor | None, tensor: Tensor) -> Tensor | None:
    """Return the gradient of an input with the sharding of the input."""
    if not is_sharded(tensor) or not isinstance(gradient, DTensor):
        return gradient
    assert isinstance(tensor, DTensor)
    if gradient.placements != tensor.placements:  # such as a partial sum
        gradient = gradient.redistribute(placements=tensor.placements)
    return as_sharded(gradient)


def _gather(output: Tensor) -> Tensor:
    return gather_whole(output, "backward") if isinstance(output, DTensor) and is_sharded(output) else output


def register_hook(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, hook = args
    with without_torch_function():
        return func(tensor, wrap_hook(hook, after=name_of(func) != "register_hook"))


def wrap_hook(hook: Function, *, after: bool) -> Function:
    """Return a hook that calls the user's with the sharded gradient of all batches; the user's may return a plain one.

    ``after``: True if it is called with the tensor, after its gradient has been accumulated.
    """
    if after:

        @wraps(hook)
        def on_accumulated(leaf: Tensor) -> None:
            with with_torch_function():
                if leaf.grad is not None:
                    hook(leaf)

        return on_accumulated

    @wraps(hook)
    def on_gradient(gradient: Tensor | None) -> Tensor | None:
        if gradient is None:  # only other tensors of the same gather have one
            return None
        with with_torch_function():
            new: Tensor | None = hook(as_sharded(gradient) if isinstance(gradient, DTensor) else gradient)
        if new is None or not isinstance(gradient, DTensor):
            return new
        with without_torch_function():
            return new if is_alike(new, gradient) else new_like(gradient, rows_like(new, gradient, "a hook"))

    return on_gradient
