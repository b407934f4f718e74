"""The module that ``fabric.setup`` returns for a sharded one, and how its gradients are held back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_shardckpt.compat.lightning_attributes import fabric_forward
from lightning_shardckpt.compat.lightning_fabric import BackwardSyncControl
from lightning_shardckpt.compat.pytree import tree_leaves
from lightning_shardckpt.compat.torch_autograd import accumulates_gradient_of
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.shard_model import ShardedModule
from lightning_shardckpt.parallel.sharding.fsdp import reshard
from lightning_shardckpt.state.nested_dict import WRAPPED

_accumulating: list[None] = []  # not empty in `gradients_accumulate`; hooks run in threads of autograd, too


@contextmanager
def gradients_accumulate() -> Iterator[None]:
    """Return the context of ``fabric.backward``, in which gradients of parameters are averaged over all ranks."""
    _accumulating.append(None)
    try:
        yield
    finally:
        _accumulating.pop()


def _refuse_other_backward(root: ref[nn.Module], gradient: Tensor) -> None:
    """Raise, in a backward that accumulates gradients of a module, if it is not that of ``fabric.backward``.

    Raises:
        UnsupportedCodeError: saying what to call.
    """
    module = root()
    if _accumulating or module is None:
        return
    if any(accumulates_gradient_of(p) for p in module.parameters() if p.requires_grad):
        raise UnsupportedCodeError(
            f"the gradients of {type(module).__name__} are those of one rank here: call fabric.backward(loss) instead "
            "of loss.backward(). torch.autograd.grad may be called anywhere."
        )


class ShardedForward(nn.Module):
    """Runs the forward of a sharded module, under the hooks of FSDP.

    Args:
        sharded: the module.
        running: gives the module whose pipeline runs a step now.
    """

    def __init__(self, sharded: ShardedModule, running: Callable[[], ShardedModule | None]) -> None:
        super().__init__()
        self.__dict__["sharded"] = sharded  # not a submodule: Fabric has the module itself
        self.__dict__[WRAPPED] = sharded.root
        self._running = running

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        sharded: ShardedModule = self.__dict__["sharded"]
        if sharded.pipeline is not None:
            if self._running() is not sharded:
                raise UnsupportedCodeError(
                    f"{type(sharded.root).__name__} is a pipeline, of which this rank has a part: call it in a "
                    "function of the batch, by fabric.strategy.run_step(function, batch)"
                )
            return sharded.root(*args, **kwargs)
        found = sharded.run(partial(sharded.root, *args, **kwargs))
        if not torch.is_grad_enabled():  # no backward will follow
            reshard(sharded.root)
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(partial(_refuse_other_backward, ref(sharded.root)))  # type: ignore[no-untyped-call]
        return found


def sharded_of(module: nn.Module | None) -> ShardedModule | None:
    """Return how a module was sharded, given what ``fabric.setup`` returned or its forward; None for others."""
    forward = fabric_forward(module)
    sharded = None if forward is None else forward.__dict__.get("sharded")
    return sharded if isinstance(sharded, ShardedModule) else None


class HeldBackward(BackwardSyncControl):
    """Lets ``fabric.no_backward_sync`` keep gradients whole on every rank.

    Args:
        enabled: whether it does; else every backward communicates.
    """

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled

    @override
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        sharded = sharded_of(module)
        if sharded is None:
            raise TypeError(f"{type(module).__name__} was not set up by fabric.setup")
        return sharded.gradients.blocked() if enabled and self._enabled else nullcontext()
