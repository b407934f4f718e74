"""The steps and backward passes of one LightningModule under a Trainer: of all of it, or of a stage of a pipeline.

Knows neither Lightning's plugins nor its loops: they come as contexts, or run inside one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.shard_model import ShardedModule
from lightning_shardckpt.parallel.sharding.batch_norm import broadcast_statistics
from lightning_shardckpt.parallel.sharding.consistency import check_batch, check_loss
from lightning_shardckpt.parallel.sharding.fsdp import reshard
from lightning_shardckpt.parallel.sharding.mesh import Meshes
from lightning_shardckpt.strategy.pipelined_steps import PipelinedSteps

StepContext = Callable[[], AbstractContextManager[Any]]


class TrainerSteps:
    """Runs the steps of a LightningModule as it was sharded.

    Args:
        module: whose steps they are.
        sharded: how it was sharded.
        meshes: of the strategy that runs them; another Trainer's may have sharded the module.
        device: of this rank.
        loss_scale: gives the factor by which the Trainer is going to multiply the loss.

    Attributes:
        sharded: how the module was sharded.

    Raises:
        UnsupportedCodeError: for a module that optimizes manually, in a pipeline.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        sharded: ShardedModule,
        meshes: Meshes,
        device: torch.device,
        loss_scale: Callable[[], float],
    ) -> None:
        self.sharded = sharded
        self._module, self._meshes, self._device = module, meshes, device
        self._checks_loss = True  # of the first backward of an epoch
        self._pipelined: PipelinedSteps | None = None
        if sharded.pipeline is None:
            return
        if not module.automatic_optimization:
            raise UnsupportedCodeError(
                f"{type(module).__name__} optimizes manually (automatic_optimization = False), which cannot be "
                "pipelined: its step is not one forward and one backward. Use pipeline_parallel_size=1."
            )
        self._pipelined = PipelinedSteps(module, sharded.pipeline, device, loss_scale)

    def begin_batch(self, batch: Any, batch_idx: int) -> None:
        """Call before each batch of training: those of a tensor group are compared when an epoch begins.

        Collective: every rank of the world must call it.
        """
        if batch_idx == 0:
            self._checks_loss = True
            if self._meshes.topology.tensor > 1:
                check_batch(batch, self._meshes.tensor_group)

    def train(self, context: StepContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``training_step`` inside ``context``. Collective in a pipeline: every rank of it must call it."""
        if self._pipelined is not None:
            return self._pipelined.training_step(context, args, kwargs)
        return self._run("training_step", context, args, kwargs)

    def evaluate(self, name: str, context: StepContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a validation, test or predict step, by its name, inside ``context``. Collective as ``train`` is."""
        if self._pipelined is not None:
            output = self._pipelined.evaluate(name, context, args, kwargs)
        else:
            output = self._run(name, context, args, kwargs)
        self.reshard()
        return output

    def _run(self, name: str, context: StepContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        step = partial(getattr(self._module, name), *args, **kwargs)
        with context():
            return self.sharded.run(step)

    def reshard(self) -> None:
        """Free what FSDP2 has gathered, where the module has applied it by itself. No communication."""
        reshard(self.sharded.root)

    def check_loss(self, loss: Tensor) -> None:
        """Compare the first loss of an epoch over the ranks of a tensor group.

        Collective: every rank of the world must call it.

        Raises:
            UnsupportedCodeError: if they differ.
        """
        if self._checks_loss and self._meshes.topology.tensor > 1 and self._pipelined is None:
            check_loss(loss, self._meshes.tensor_group)
        self._checks_loss = False

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Return the context of the loss's backward; gradients are final after it.

        Collective: every rank of the world must call it.
        """
        if self._pipelined is not None:
            yield
            self._pipelined.backward()
        else:
            with self.sharded.gradients.backward():
                yield
        if not self.sharded.gradients.is_blocked:
            broadcast_statistics(self._module, self._meshes.data_parallel_group)  # autograd needed them until now

    def reset(self) -> None:
        """Forget a step that did not finish."""
        self.sharded.gradients.reset()
        if self._pipelined is not None:
            self._pipelined.reset()
