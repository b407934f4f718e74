"""``DropoutBySample``: a callback with which dropout depends on the sample and the module, and not on the topology."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from typing_extensions import override

from lightning_shardckpt.compat.lightning_loops import train_loaders
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.format.clean_fqn import matching_fqns
from lightning_shardckpt.parallel.pipeline.microbatch import samples_in
from lightning_shardckpt.parallel.sharding.fqn import named_modules
from lightning_shardckpt.parallel.sharding.keyed_dropout import (
    OTHER_RANDOM,
    DropoutSettings,
    is_droppable,
    key_dropout,
    unkey_dropout,
)
from lightning_shardckpt.parallel.sharding.sample_numbers import SampleNumbers, other_draws, set_running_samples
from lightning_shardckpt.state.data_position import ResumableLoader
from lightning_shardckpt.system.random_generators import rng_checksum


class DropoutBySample(Callback):
    """Lets each ``nn.Dropout`` of the model drop, in training, by a hash of seed, epoch, sample, module and element.

    So the same elements are dropped for the same place in the epoch's order of samples, on any number of data-parallel
    ranks, in any microbatch, under tensor parallelism, and under Lightning's own strategies: a run continues on another
    topology with the dropout that it would have had. It draws no random numbers.

    The samples must be a dim of their own in the input of each dropout. Under tensor parallelism, a dropout of columns
    or heads is named as ``ShardedDropout`` in ``tensor_parallel_plan``. Where a module is called more than once in a
    step, its calls are told apart by their number.

    Args:
        seed: of all streams. A run that resumes takes the one that it was begun with.
        samples_dim: the dim of a dropout's input that has the samples: for all, or by patterns of module names (the
            others have 0).
        strict: whether it is an error that the model draws random numbers otherwise: before training for modules that
            are known to, else when a step does. What a pipeline's loss draws after its layers is not noticed. If false,
            those are drawn as ever.
    """

    def __init__(self, seed: int = 0, samples_dim: int | Mapping[str, int] = 0, strict: bool = True) -> None:
        self.seed, self.samples_dim, self.strict = seed, samples_dim, strict
        self._keyed: list[nn.Module] = []
        self._drawn: int | None = None
        self._batch_size = 0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the model's dropouts over.

        Raises:
            MisconfigurationException: if modules of the model draw random numbers that are not known by sample, or a
                pattern matches no dropout.
        """
        modules = named_modules(pl_module)
        if self.strict:
            self._check(modules)
        dims, group = self._dims(modules), _tensor_group(trainer.strategy)
        for fqn, module in modules.items():
            if is_droppable(module):
                key_dropout(module, DropoutSettings(fqn, self.seed, dims.get(fqn, 0), group))
                self._keyed.append(module)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Say which samples the batch has."""
        numbers = self._numbers(trainer, batch, batch_idx)
        set_running_samples(SampleNumbers(trainer.current_epoch, numbers, alone=self.strict))
        topology = getattr(trainer.strategy, "topology", None)
        pipelined = topology is not None and topology.pipeline > 1
        self._drawn = rng_checksum() if self.strict and not pipelined else None  # a pipeline draws, and looks itself

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look whether the step drew random numbers otherwise.

        Raises:
            UnsupportedCodeError: if it did.
        """
        if self._drawn is not None and self._drawn != rng_checksum():
            raise other_draws("the training step")

    @override
    def on_train_batch_end(self, *args: Any) -> None:
        """The samples are used."""
        set_running_samples(None)

    @override
    def on_train_end(self, *args: Any) -> None:
        """Give the dropouts back."""
        self._end()

    @override
    def on_exception(self, *args: Any) -> None:
        """Give the dropouts back."""
        self._end()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.seed}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the seed of the run that is continued."""
        if state_dict["seed"] != self.seed:
            rank_zero_warn(
                f"DropoutBySample(seed={self.seed}) continues with seed {state_dict['seed']}, that of the checkpoint"
            )
        self.seed = state_dict["seed"]

    def _end(self) -> None:
        set_running_samples(None)
        for module in self._keyed:
            unkey_dropout(module)
        self._keyed.clear()

    def _check(self, modules: Mapping[str, nn.Module]) -> None:
        other = {fqn: what for fqn, module in modules.items() if (what := _draws_otherwise(module)) is not None}
        if other:
            named = ", ".join(f"{fqn} ({what})" for fqn, what in other.items())
            raise MisconfigurationException(
                f"DropoutBySample can key nn.Dropout and nn.Dropout1d to 3d, but these draw random numbers by "
                f"themselves: {named}. Set their probability to 0, use nn.Dropout modules in their place, or let them "
                "be with strict=False."
            )

    def _dims(self, modules: Mapping[str, nn.Module]) -> dict[str, int]:
        dropouts = {fqn: module for fqn, module in modules.items() if is_droppable(module)}
        if isinstance(self.samples_dim, int):
            return dict.fromkeys(dropouts, self.samples_dim)
        found: dict[str, int] = {}
        for pattern, dim in self.samples_dim.items():
            matched = matching_fqns(dropouts, pattern)
            if not matched:
                raise MisconfigurationException(
                    f"DropoutBySample(samples_dim=…): {pattern!r} matches none of the dropouts {sorted(dropouts)}"
                )
            found |= dict.fromkeys(matched, dim)
        return found

    def _numbers(self, trainer: pl.Trainer, batch: Any, batch_idx: int) -> torch.Tensor:
        """The places of this rank's samples in the epoch's order of all data-parallel ranks."""
        try:
            count = samples_in(batch)
        except UnsupportedCodeError as error:
            raise MisconfigurationException(
                f"DropoutBySample must know the samples of a batch, and the first dims of its tensors differ: {error}"
            ) from error
        share = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {"num_replicas": 1, "rank": 0}
        ranks, rank = share["num_replicas"], share["rank"]
        loaders = train_loaders(trainer)
        first: int | None = loaders[0].first_sample(batch_idx) if isinstance(loaders[0], ResumableLoader) else None
        if first is None:
            self._batch_size = getattr(loaders[0], "batch_size", None) or max(count, self._batch_size)
            first = batch_idx * ranks * self._batch_size
        return torch.arange(first + rank, first + rank + count * ranks, ranks)


def _draws_otherwise(module: nn.Module) -> str | None:
    """Return what in a module draws random numbers that are not of a dropout module; None if nothing does."""
    if isinstance(module, OTHER_RANDOM) and getattr(module, "p", 1.0) > 0:
        return type(module).__name__
    inner = getattr(module, "dropout", 0.0)
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase) and inner > 0:
        return f"{type(module).__name__} with dropout={inner}"
    return None


def _tensor_group(strategy: Any) -> dist.ProcessGroup | None:
    """The tensor-parallel ranks, of ShardedStrategy or Lightning's ModelParallelStrategy; None if there are none."""
    mesh: Any = getattr(strategy, "device_mesh", None)
    for name in ("tensor", "tensor_parallel"):
        if mesh is not None and name in (mesh.mesh_dim_names or ()) and mesh[name].size() > 1:
            group: dist.ProcessGroup = mesh.get_group(name)
            return group
    return None
