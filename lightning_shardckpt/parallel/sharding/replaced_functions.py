"""Functions of torch that are replaced while sharded modules are trained, and refusal of hooks on nodes of graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from lightning_shardckpt.compat.torch_autograd import (
    allow_lists_of,
    change_arguments,
    check_unused_inputs,
    node_hooks,
    on_node_hook,
)
from lightning_shardckpt.compat.torch_modules import on_deepcopy
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.sharding.gathered_parameters import resolve_outliving
from lightning_shardckpt.parallel.sharding.gradient_sync import average_gradients_of_copy
from lightning_shardckpt.parallel.tensors.operations import gather_arguments, refuse_unused_copies
from lightning_shardckpt.parallel.tensors.sharded import ShardedTensor

_restore: list[Callable[[], None]] = []


def replace_functions() -> None:
    """Replace functions until `restore_functions`; does nothing if they are replaced already."""
    if not _restore:
        _restore.append(
            change_arguments(lambda kind, args: gather_arguments(kind, tuple(map(resolve_outliving, args))))
        )
        _restore.append(check_unused_inputs(refuse_unused_copies))  # of torch.autograd.grad in a backward
        _restore.append(on_deepcopy(average_gradients_of_copy))  # as those of the original
        _restore.append(on_node_hook(refuse_node_hook))
        _restore.append(allow_lists_of(ShardedTensor))  # in torch's optimizers on GPUs, as for plain tensors


def restore_functions() -> None:
    """Restore torch's functions. Modules that are still sharded can then be read and saved, but not trained."""
    while _restore:
        _restore.pop()()


# Python modules whose hooks are allowed; Fabric's only checks how backward is called.
_OWNERS = ("torch.distributed.", "torch.utils.", "lightning_shardckpt.", "lightning.fabric.wrappers")
_LIKE_USERS = "torch.distributed.optim."  # steps optimizers in a backward


def is_of_user(hook: Any, owners: tuple[str, ...] = _OWNERS) -> bool:
    """Return whether a gradient hook is the user's: defined in other Python modules than those of ``owners``."""
    module = getattr(hook.func if isinstance(hook, partial) else hook, "__module__", None) or ""
    return not module.startswith(owners) or module.startswith(_LIKE_USERS)


def refuse_node_hook(hook: Any) -> None:
    """Raise for a hook of the user on a node of autograd's graph, which gets the gradient of a part of the batch."""
    if is_of_user(hook, ("torch.", "lightning_shardckpt.")):
        raise UnsupportedCodeError(
            f"the hook {getattr(hook, '__qualname__', hook)} is registered on a node of autograd's graph, as grad_fn, "
            "get_gradient_edge or torch.distributed.optim give them. Register it on the tensor or parameter "
            "(register_hook, register_post_accumulate_grad_hook) or the module (register_full_backward_hook), or "
            "change gradients in on_before_optimizer_step."
        )


def refuse_node_hooks(root: nn.Module) -> None:
    """Check the hooks on nodes of parameters that were registered before ``root`` is sharded."""
    for parameter in root.parameters():
        if parameter.requires_grad and type(parameter) is nn.Parameter:
            for hook in node_hooks(parameter):
                refuse_node_hook(hook)
