"""Hooks of the user, and refusal of hooks that can't run as on a single process."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from lightning_shardckpt.compat.torch_autograd import node_hooks
from lightning_shardckpt.errors import UnsupportedCodeError

# Python modules whose hooks are allowed; Fabric's only checks how backward is called.
_OWNERS = ("torch.distributed.", "torch.utils.", "lightning_shardckpt.", "lightning.fabric.wrappers")
_LIKE_USERS = "torch.distributed.optim."  # steps optimizers in a backward


def module_of(hook: Any) -> str:
    """Return the name of the Python module that defines a function."""
    return getattr(hook.func if isinstance(hook, partial) else hook, "__module__", None) or ""


def is_of_user(hook: Any) -> bool:
    """Return whether a gradient hook is the user's."""
    module = module_of(hook)
    return not module.startswith(_OWNERS) or module.startswith(_LIKE_USERS)


def refuse_node_hook(hook: Any) -> None:
    """Check a hook that is registered on a node of autograd's graph.

    Raises:
        UnsupportedCodeError: for a hook of the user. The node of a parameter gets the gradient of this rank's part or
            none, other nodes of pipelines get gradients of microbatches, and a hook can't tell these nodes apart.
    """
    module = module_of(hook)
    if not module.startswith(("torch.", "lightning_shardckpt.")) or module.startswith(_LIKE_USERS):
        raise UnsupportedCodeError(
            f"the hook {getattr(hook, '__qualname__', hook)} is registered on a node of autograd's graph, as grad_fn, "
            "get_gradient_edge or torch.distributed.optim give them. There it would get the gradient of one rank's "
            "part. Register it on the tensor or parameter (register_hook, register_post_accumulate_grad_hook) or the "
            "module (register_full_backward_hook), or change gradients in on_before_optimizer_step."
        )


def refuse_node_hooks(root: nn.Module) -> None:
    """Check the hooks on nodes of parameters that were registered before ``root`` is sharded."""
    for parameter in root.parameters():
        if parameter.requires_grad and type(parameter) is nn.Parameter:
            for hook in node_hooks(parameter):
                refuse_node_hook(hook)
