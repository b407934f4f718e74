"""Hooks on sharded tensors, and gradients with respect to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.tensor import DTensor

from lightning_shardckpt.compat.torch_tensors import with_torch_function, without_torch_function
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.tensors.kinds import name_of
from lightning_shardckpt.parallel.tensors.sharded import (
    Function,
    is_alike,
    is_sharded,
    like,
    mapped,
    rows_like,
    sharded,
)
from lightning_shardckpt.parallel.tensors.values import whole

CARRIED = "_shardckpt_carried"
"""Attribute of a parameter that ``fully_shard`` has gathered: the name of its module. And of a node in autograd's graph
that gave such parameters to a forward: their ids."""
REMEDY = 'Use ShardedStrategy(fsdp_engine="exact")'


def whole_arguments(function: type, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of an autograd function of the user's with whole tensors, whose gradients come back."""
    if not any(isinstance(arg, Tensor) and is_sharded(arg) for arg in args):
        return args
    _given.add(function.__qualname__)
    with without_torch_function():
        return tuple(whole(arg, function.__name__) if is_sharded(arg) else arg for arg in args)


_given = set[str]()
"""The names of functions that `whole_arguments` gave whole tensors."""


@contextmanager
def name_unused_arguments() -> Iterator[None]:
    """Inside a backward, name the functions of users whose own backward may have asked for gradients of whole tensors.

    Raises:
        UnsupportedCodeError: if autograd found no use of a tensor, and a function got whole parameters.
    """
    try:
        yield
    except RuntimeError as error:
        if not _given or "appears to not have been used in the graph" not in str(error):
            raise
        raise UnsupportedCodeError(
            f"an autograd function ({', '.join(sorted(_given))}) runs a module in its backward, and asks for gradients "
            "of parameters that it was given. It gets whole tensors in their place, but the module has the parameters: "
            "use torch.utils.checkpoint, or call torch.autograd.backward there, and give it no parameters."
        ) from error


def differentiate(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Differentiate by edges of the graph in place of tensors: in hooks of users, tensors must act as ever."""
    if func is not torch.autograd.grad and func is not torch.autograd.backward:
        with without_torch_function():
            return func(*args, **kwargs)
    outputs, *rest = args
    given = rest.pop(0) if func is torch.autograd.grad and rest else kwargs.pop("inputs", None)
    inputs = () if given is None else tuple(given.values() if isinstance(given, dict) else given)
    if func is torch.autograd.grad and any(not t.requires_grad for t in inputs):
        raise RuntimeError("One of the differentiated Tensors does not require grad")
    _refuse_carried(func, outputs, inputs)
    materialize = kwargs.pop("materialize_grads", False)
    kwargs["allow_unused"] = kwargs.get("allow_unused") or materialize
    if func is torch.autograd.backward:
        del kwargs["allow_unused"]
    with without_torch_function():
        edges = [get_gradient_edge(t) if is_sharded(t) else t for t in inputs]
        heads, rest, kwargs = mapped([*outputs], _total), mapped(rest, _total), mapped(kwargs, _total)
    if func is torch.autograd.backward:
        return func(heads, *rest, **kwargs, **({"inputs": edges} if given is not None else {}))
    batched = kwargs.pop("is_grads_batched", False)
    found = _batched(heads, edges, **kwargs) if batched else func(heads, edges, *rest, **kwargs)
    with without_torch_function():
        found = [_of_input(g, t) for g, t in zip(found, inputs, strict=True)]
        if materialize:
            found = [torch.zeros_like(t) if g is None else g for t, g in zip(inputs, found, strict=True)]
    return tuple(found)


def _refuse_carried(func: Function, outputs: Any, inputs: Sequence[Tensor]) -> None:
    """Raise if the graph of ``outputs`` uses one of ``inputs`` in a forward for which ``fully_shard`` gathered it."""
    carried = {id(tensor): tensor for tensor in inputs if CARRIED in vars(tensor)}
    if not carried:
        return
    with without_torch_function():
        heads = [outputs] if isinstance(outputs, Tensor | GradientEdge) else outputs
        nodes = [head.grad_fn if isinstance(head, Tensor) else head.node for head in heads]
    seen = {None, *nodes}
    while nodes:
        node = nodes.pop()
        for tensor in (carried[number] for number in getattr(node, CARRIED, ()) if number in carried):
            raise UnsupportedCodeError(
                f"{func.__name__} asks for the gradient of a parameter of {vars(tensor)[CARRIED] or 'the module'}, of "
                f"shape {tuple(tensor.shape)}. fully_shard has the gradients of parameters in a whole backward alone: "
                f"loss.backward(). {REMEDY}"
            )
        following = {edge[0] for edge in node.next_functions} - seen if node is not None else ()
        seen.update(following)
        nodes.extend(following)


def _batched(heads: list[Any], edges: list[Any], *, grad_outputs: Any, **kwargs: Any) -> list[Tensor | None]:
    """Return the gradients for each of a batch of ``grad_outputs``, stacked: collectives take no batches of vmap."""
    batch = [grad_outputs] if isinstance(grad_outputs, Tensor) else grad_outputs
    count = next(len(g) for g in batch if g is not None)
    kwargs["retain_graph"] = True  # the first ones must leave it, and what holds it is freed with it
    each = []
    for n in range(count):
        given = [None if g is None else g[n] for g in batch]
        found = torch.autograd.grad(heads, edges, grad_outputs=given, **kwargs)
        each.append([whole(g, "gradients") if isinstance(g, DTensor) else g for g in found])
    return [None if any(g is None for g in some) else torch.stack(some) for some in zip(*each, strict=True)]


def _of_input(gradient: Tensor | None, tensor: Tensor) -> Tensor | None:
    if not is_sharded(tensor) or not isinstance(gradient, DTensor):
        return gradient
    assert isinstance(tensor, DTensor)
    if gradient.placements != tensor.placements:  # such as a partial sum
        gradient = gradient.redistribute(placements=tensor.placements)
    return sharded(gradient)


def _total(output: Tensor) -> Tensor:
    """Return what is sharded as a whole: a parameter or a gradient that is differentiated."""
    return whole(output, "backward") if isinstance(output, DTensor) and is_sharded(output) else output


def register_hook(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, hook = args
    with without_torch_function():
        return func(tensor, wrapped_hook(tensor, hook, after=name_of(func) != "register_hook"))


def wrapped_hook(tensor: Tensor, hook: Function, *, after: bool) -> Function:
    """A hook under the names of the user's that gets the gradient of all batches, sharded, and may return a plain one.

    Args:
        tensor: whose hook it is.
        after: for a hook that is called with the tensor itself, after its gradient has been accumulated.
    """
    if after:

        @wraps(hook)
        def accumulated(leaf: Tensor) -> None:
            with with_torch_function():
                if leaf.grad is not None:
                    hook(leaf)

        return accumulated

    @wraps(hook)
    def changed(gradient: Tensor | None) -> Tensor | None:
        if gradient is None:  # other tensors that were gathered together have one
            return None
        with with_torch_function():
            found: Tensor | None = hook(sharded(gradient) if isinstance(gradient, DTensor) else gradient)
        if found is None or not isinstance(gradient, DTensor):
            return found
        with without_torch_function():
            return found if is_alike(found, gradient) else like(gradient, rows_like(found, gradient, "a hook"))

    return changed
