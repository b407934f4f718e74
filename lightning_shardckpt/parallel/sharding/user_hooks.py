"""Tell hooks of users from those of torch and this package, and refuse those that nothing could run as one process."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from lightning_shardckpt.compat.torch_autograd import node_hooks
from lightning_shardckpt.errors import UnsupportedCodeError

# Modules whose hooks may be there; Fabric's only checks who calls backward.
_OWNERS = ("torch.distributed.", "torch.utils.", "lightning_shardckpt.", "lightning.fabric.wrappers")
_LIKE_USERS = "torch.distributed.optim."  # steps optimizers in a backward


def module_of(hook: Any) -> str:
    """Return the name of the module of Python that a function is from."""
    return getattr(hook.func if isinstance(hook, partial) else hook, "__module__", None) or ""


def is_of_user(hook: Any) -> bool:
    """Return whether a hook of gradients is of the user's, and not of what runs the training."""
    module = module_of(hook)
    return not module.startswith(_OWNERS) or module.startswith(_LIKE_USERS)


def refuse_node_hook(hook: Any) -> None:
    """Check a hook that is registered on a node of autograd's graph.

    Raises:
        UnsupportedCodeError: for one of the user's. The node of a parameter gets the gradient of a rank's part, or
            none, and other nodes of pipelines get those of microbatches; nothing tells which node it is.
    """
    module = module_of(hook)
    if not module.startswith(("torch.", "lightning_shardckpt.")) or module.startswith(_LIKE_USERS):
        raise UnsupportedCodeError(
            f"the hook {getattr(hook, '__qualname__', hook)} is registered on a node of autograd's graph, as grad_fn, "
            "get_gradient_edge or torch.distributed.optim give them. What runs there is the gradient of a rank's part. "
            "Register it on the tensor or parameter (register_hook, register_post_accumulate_grad_hook) or the module "
            "(register_full_backward_hook), or change gradients in on_before_optimizer_step."
        )


def refuse_node_hooks(root: nn.Module) -> None:
    """Check the parameters of a module that is going to be sharded, as `refuse_node_hook` does those that follow."""
    for parameter in root.parameters():
        if parameter.requires_grad and type(parameter) is nn.Parameter:
            for hook in node_hooks(parameter):
                refuse_node_hook(hook)
