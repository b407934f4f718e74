"""Ask autograd what runs and who has hooks; change what functions and optimizers get; call kernels over many tensors.

Checked with torch 2.12 to 2.15."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.optim import Optimizer, optimizer
from torch.utils import _foreach_utils as clipping


def accumulated_leaf(node: Node) -> Tensor | None:
    """The leaf whose gradient a node accumulates; None for other nodes.

    Relies on the name of the nodes that torch makes for leaves, and on their attribute ``variable``.
    """
    if node.name() != "torch::autograd::AccumulateGrad":
        return None
    return cast(Tensor, cast(Any, node).variable)


def in_backward() -> bool:
    """Return whether a backward pass is running in this thread."""
    return backward_number() != -1


def backward_number() -> int:
    """A number of the backward pass that runs in this thread; -1 for none.

    Relies on ``torch._C._current_graph_task_id``.
    """
    return int(torch._C._current_graph_task_id())


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


def packing_hook() -> Callable[[Tensor], Any] | None:
    """Return the first of the ``saved_tensors_hooks`` that are active in this thread, or None."""
    found = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return None if found is None else found[0]


def on_node_hook(check: Callable[[Any], None]) -> Callable[[], None]:
    """Let ``check`` get each hook that is registered on a node of autograd's graph, before it is.

    Relies on ``Node.register_hook`` and ``register_prehook`` calling ``torch.autograd.Function._register_hook``.

    Returns:
        What ends it.
    """
    function: Any = torch.autograd.Function
    register = function._register_hook

    def checked(hooks: Any, hook: Any) -> Any:
        check(hook)
        return register(hooks, hook)

    function._register_hook = staticmethod(checked)

    def put_back() -> None:
        del function._register_hook  # torch's own is that of a base

    return put_back


def node_hooks(leaf: Tensor) -> list[Any]:
    """Return the hooks on the node that accumulates the gradient of a leaf, but not those of the leaf itself.

    Relies on the garbage collector's seeing the dicts of a node's hooks, which it does while no graph has the node.
    """
    dicts = [found for found in gc.get_referents(get_gradient_edge(leaf).node) if isinstance(found, dict)]
    return [hook for hooks in dicts if hooks is not leaf._backward_hooks for hook in hooks.values()]


def is_batched(tensor: Tensor) -> bool:
    """Return whether a tensor stands for a batch of tensors, inside of ``vmap`` or of batched gradients."""
    return torch._C._functorch.is_batchedtensor(tensor) or torch._C._functorch.is_legacy_batchedtensor(tensor)


_NOT_OF_USERS = ("torch.", "lightning_shardckpt.")
_OF_TORCH: Any = torch.autograd.Function.__dict__["apply"]


def change_arguments(change: Callable[[type, tuple[Any, ...]], tuple[Any, ...]]) -> Callable[[], None]:
    """Let every ``Function.apply``, but those of torch and of this package, get ``change(function, args)``.

    Relies on ``apply`` being a class method of ``torch.autograd.Function``. One change at a time.

    Returns:
        What ends it.
    """

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if not cls.__module__.startswith(_NOT_OF_USERS):
            args = change(cls, args)
        return _OF_TORCH.__get__(None, cls)(*args, **kwargs)

    _set_apply(classmethod(apply))
    return lambda: _set_apply(_OF_TORCH)


def _set_apply(descriptor: Any) -> None:
    torch.autograd.Function.apply = descriptor  # type: ignore[method-assign]  # put back, or changed on purpose


Unscale = Callable[[Optimizer, Tensor, Tensor, bool], dict[torch.device, Tensor]]
"""(optimizer, inverse scale, a zero, whether float16 is allowed) → by device, 1 if a gradient is infinite or NaN."""


def norms(tensors: Sequence[Tensor], norm_type: float, dtype: torch.dtype) -> list[Tensor]:
    """The norm of each of some tensors of one device and dtype, computed in ``dtype``; on CUDA by a few kernels."""
    return list(torch._foreach_norm(list(tensors), norm_type, dtype=dtype))


def unscale(gradients: Sequence[Tensor], inverse_scale: Tensor, found_inf: Tensor) -> None:
    """Multiply gradients of one device and dtype in place; writes 1 to ``found_inf`` if one is infinite or NaN."""
    torch._amp_foreach_non_finite_check_and_unscale_(list(gradients), found_inf, inverse_scale)


def replace_unscale(scaler: torch.amp.GradScaler, function: Unscale) -> None:
    """Let ``scaler.unscale_`` and ``scaler.step`` call a function of ours; torch has no public way to."""
    scaler._unscale_grads_ = function  # type: ignore[method-assign,assignment]  # called by position


def copy_each(tensors: Sequence[Tensor], copies: Sequence[Tensor], *, non_blocking: bool) -> None:
    """Fill each copy with a tensor of its shape; ``non_blocking`` as in ``Tensor.copy_``, which takes longer to call.

    Relies on ``torch._foreach_copy_``, which does not take empty lists.
    """
    if tensors:
        torch._foreach_copy_(list(copies), list(tensors), non_blocking)


# ── optimizers ────────────────────────────────────────────────────────────────────────────────────────────────────────


def allow_lists_of(kind: type[Tensor]) -> Callable[[], None]:
    """Let torch's optimizers and clipping run functions of lists on a tensor class by default, as on plain tensors.

    They do so on GPUs, if all parameters are of the classes in ``_foreach_supported_types``, of which torch has two
    lists, and to which torch adds DTensor.

    Returns:
        A function that ends it.
    """
    allowed: list[list[type]] = [optimizer._foreach_supported_types, clipping._foreach_supported_types]  # type: ignore[list-item]
    for kinds in allowed:
        kinds.append(kind)

    def put_back() -> None:
        for kinds in allowed:
            kinds.remove(kind)

    return put_back


@contextmanager
def changed_parameters(change: Callable[[Any], Any]) -> Iterator[None]:
    """Inside, ``Optimizer.__init__`` gets ``change(params)`` in place of its first argument.

    Checked with torch 2.12 to 2.15. Relies on every optimizer calling it with the parameters, before it does anything
    with them.
    """
    original = Optimizer.__init__

    def initialise(optimizer: Optimizer, params: Any, defaults: dict[str, Any]) -> None:
        original(optimizer, change(params), defaults)

    Optimizer.__init__ = initialise  # type: ignore[method-assign,assignment]  # restored below
    try:
        yield
    finally:
        Optimizer.__init__ = original  # type: ignore[method-assign]


def saves_in_its_own_way(optimizer: Optimizer) -> bool:
    """Return whether ``state_dict()`` may have other entries than torch's: the method is overridden, or has hooks after
    it.

    Relies on ``_optimizer_state_dict_post_hooks``, where ``register_state_dict_post_hook`` puts them.
    """
    return type(optimizer).state_dict is not Optimizer.state_dict or bool(
        getattr(optimizer, "_optimizer_state_dict_post_hooks", None)
    )


def has_load_hooks(optimizer: Optimizer) -> bool:
    """Return whether functions run before or after ``load_state_dict``.

    Relies on the dicts of ``register_load_state_dict_pre_hook`` and ``register_load_state_dict_post_hook``, which an
    optimizer that wraps another one may lack.
    """
    kinds = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")
    return any(getattr(optimizer, kind, None) for kind in kinds)


def loads_in_its_own_way(optimizer: Optimizer) -> bool:
    """Return whether ``load_state_dict`` may take other entries than torch's: the method is overridden."""
    return type(optimizer).load_state_dict is not Optimizer.load_state_dict
