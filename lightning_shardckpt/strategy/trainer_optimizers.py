"""The optimizers of a Trainer's run: they hold the parameters of this rank, and see the loss of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.rebind_optimizer import rebind_optimizer
from lightning_shardckpt.parallel.shard_model import ShardedModule


def adopt_optimizers(optimizers: Sequence[Optimizer], sharded: ShardedModule) -> None:
    """Make optimizers hold the parameters that a module has since it was sharded.

    Args:
        optimizers: of the module, whenever they were built: LightningCLI does so before it is sharded.
        sharded: the module.

    Raises:
        UnsupportedCodeError: for one that cannot step with the parameters of a stage, or holds those of another module.
    """
    if sharded.pipeline is not None and any(isinstance(o, torch.optim.LBFGS) for o in optimizers):
        raise UnsupportedCodeError("LBFGS looks at all parameters at once, which are on different stages of a pipeline")
    for optimizer in optimizers:
        rebind_optimizer(optimizer, sharded)


def with_mean_loss(
    optimizer: Optimizer, closure: Callable[[], Any], mean: Callable[[Tensor], Tensor]
) -> Callable[[], Any]:
    """Return the closure of a step; where the optimizer may look at the loss, it gives the mean of all ranks.

    Args:
        optimizer: that is going to step. Of torch's, only L-BFGS looks at the loss.
        closure: computes the loss, and the gradients.
        mean: over all data-parallel ranks; in place, and collective.
    """
    if type(optimizer).__module__.startswith("torch.optim.") and not isinstance(optimizer, torch.optim.LBFGS):
        return closure

    def loss_of_all() -> Any:
        loss = closure()
        return mean(loss.detach().clone()) if isinstance(loss, Tensor) else loss

    return loss_of_all
