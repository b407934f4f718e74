"""The module that ``fabric.setup`` returns for a sharded one, and how its gradients are held back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from lightning_shardckpt.compat.lightning_attributes import fabric_forward
from lightning_shardckpt.compat.lightning_fabric import BackwardSyncControl
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.shard_model import ShardedModule
from lightning_shardckpt.parallel.sharding.fsdp import reshard
from lightning_shardckpt.state.nested_dict import WRAPPED


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
