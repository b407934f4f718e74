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
from lightning_shardckpt.errors import TopologyError
from lightning_shardckpt.parallel.shard_model import ShardedModule
from lightning_shardckpt.parallel.sharding.fsdp import reshard
from lightning_shardckpt.state.nested_dict import WRAPPED


class ShardedForward(nn.Module):
    """Runs the forward of a sharded module, under the hooks of FSDP.

    Args:
        record: the sharded module.
        running: gives the module whose pipeline runs a step now.
    """

    def __init__(self, record: ShardedModule, running: Callable[[], ShardedModule | None]) -> None:
        super().__init__()
        self.__dict__["record"] = record  # not a submodule: Fabric has the module itself
        self.__dict__[WRAPPED] = record.root
        self._running = running

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        record: ShardedModule = self.__dict__["record"]
        if record.pipeline is not None:
            if self._running() is not record:
                raise TopologyError(
                    f"{type(record.root).__name__} is a pipeline, of which this rank has a part: call it in a "
                    "function of the batch, by fabric.strategy.run_step(function, batch)"
                )
            return record.root(*args, **kwargs)
        found = record.run(partial(record.root, *args, **kwargs))
        if not torch.is_grad_enabled():  # no backward will follow
            reshard(record.root)
        return found


def record_of(module: nn.Module | None) -> ShardedModule | None:
    """Return how a module was sharded, given what ``fabric.setup`` returned or its forward; None for others."""
    forward = fabric_forward(module)
    record = None if forward is None else forward.__dict__.get("record")
    return record if isinstance(record, ShardedModule) else None


class HeldBackward(BackwardSyncControl):
    """Lets ``fabric.no_backward_sync`` keep gradients whole on every rank.

    Args:
        enabled: whether it does; else every backward communicates.
    """

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled

    @override
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        record = record_of(module)
        if record is None:
            raise TypeError(f"{type(module).__name__} was not set up by fabric.setup")
        return record.gradients.blocked() if enabled and self._enabled else nullcontext()
