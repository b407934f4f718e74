"""Agreement of the ranks before a batch to stop, and comparison of their batches and of their epochs' ends.

One reduction of numbers from host memory decides whether to stop. With steps of a few milliseconds, a reduction before
each step would take too long, so there is one before the first batches, then one per several batches within a bound on
time. The number of batches follows from the last reduction, so it is the same on all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lightning_shardckpt.compat.lightning_loops import (
    batches_begun,
    batches_of_evaluation,
    is_stream_at_end,
    watch_epoch_ends,
)
from lightning_shardckpt.distributed.host_numbers import any_rank, gather_numbers
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.distributed.world import current_world, unequal_batches_text
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.sharding.consistency import check_batch, check_ends, check_lengths, check_loss
from lightning_shardckpt.parallel.sharding.mesh import Meshes
from lightning_shardckpt.parallel.tensors.values import refuse_different_numbers, report_numbers
from lightning_shardckpt.system.host import Tuning
from lightning_shardckpt.system.random_generators import differing_generators, get_rng_state, rng_checksum


class BatchAgreement:
    """The agreements of the ranks in one run of training. Every rank must make the same calls in the same order."""

    def __init__(self) -> None:
        self._skips = 0  # batches until the next agreement
        self._limit = 1  # of batches between agreements; it doubles, so that one short step doesn't postpone many
        self._batches, self._agreed_s = 0, time.monotonic()  # batches since the last agreement, and its time

    def should_stop(self, is_told: bool, meshes: Meshes, tuning: Tuning) -> bool:
        """Return True if the ranks agree before this batch, and one of them was told to stop.

        Collective: every rank of the world must call it. ``is_told`` must be passed until the result is True, and
        ``tuning`` bounds the time between agreements. Also compares the numbers written into sharded tensors.
        """
        self._batches += 1
        if self._skips > 0:
            self._skips -= 1
            return False
        now = time.monotonic()
        elapsed_us = int((now - self._agreed_s) * 1e6)
        reports = report_numbers(meshes.pipeline_rank, meshes.topology.pipeline)
        stop, longest_us, *maxima = gather_numbers(torch.tensor([int(is_told), elapsed_us, *reports])).amax(0).tolist()
        refuse_different_numbers(maxima)
        step_s = longest_us / self._batches / 1e6
        batches = tuning.agreement_s / step_s if step_s > 0 else self._limit
        self._skips = int(max(min(batches, self._limit) - 1, 0))
        self._limit = min(2 * self._limit, tuning.agreement_batches)
        self._batches, self._agreed_s = 0, now
        return bool(stop)


class StepChecks:
    """Compares what ranks must have in common in the steps of a Trainer.

    The ranks of a tensor group: the batches and losses in the first step of each epoch, and the first batch of each
    loader of an evaluation. Ranks that must step together: the number of batches of an evaluation. All methods are
    collective: every rank of the world must call them. Pipelines compare steps themselves, without ``of_steps``.

    Attributes:
        draws: a checksum of the random states with which steps began to draw, equal in a tensor group.
    """

    def __init__(self, trainer: pl.Trainer, meshes: Meshes, *, of_steps: bool) -> None:
        self.draws = 0
        self._trainer, self._meshes = trainer, meshes
        self._group = meshes.tensor_group if meshes.topology.tensor > 1 else None
        self._of_steps = self._group if of_steps else None
        self._checks_loss = True  # of the first backward of an epoch
        self._compared = set[Any]()  # loaders of which this evaluation has compared a batch

    def begin_batch(self, batch: Any, batch_idx: int) -> None:
        """Compare the first batch of an epoch. Call it before each training batch."""
        self._checks_loss |= batch_idx == 0
        if batch_idx == 0 and self._group is not None:
            check_batch(batch, self._group)

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Record which random numbers are drawn inside, in a training step."""
        before = None if self._of_steps is None else get_rng_state(every_device=False)
        yield
        if before and (drawn := differing_generators(before, get_rng_state(every_device=False))):
            self.draws = rng_checksum(drawn, self.draws)

    def check_loss(self, loss: Tensor) -> None:
        """Compare the first loss of an epoch; raises an UnsupportedCodeError if they differ."""
        if self._checks_loss and self._of_steps is not None:
            check_loss(loss, self._of_steps)
        self._checks_loss = False

    def begin_evaluation(self, *, alone: bool) -> None:
        """Compare the numbers of batches, unless collectives involve this rank ``alone``."""
        self._compared.clear()
        if not alone and (group := self._stepping_together) is not None:
            check_lengths(batches_of_evaluation(self._trainer), group)
            self.check_end()  # there may be no batch

    def check_end(self) -> None:
        """Compare whether loaders without a length end with this batch, on ranks that step together."""
        is_last, group = is_stream_at_end(self._trainer), self._stepping_together
        if is_last is not None and group is not None:
            check_ends(is_last, group)

    def check_evaluation(self, args: tuple[Any, ...]) -> None:
        """Compare the first batch of a loader of an evaluation, given the arguments of the step."""
        loader = args[2:]  # its number, if there are several
        if self._of_steps is not None and loader not in self._compared:
            self._compared.add(loader)
            # other data-parallel ranks may have no batch of this loader
            check_batch(args, self._of_steps, of_all_groups=False)

    @property
    def _stepping_together(self) -> dist.ProcessGroup | None:
        """The ranks that must run as many steps of an evaluation; None if each may run its own number.

        Ranks of one shard group gather parameters together; pipelines agree on the number of microbatches; in a
        validation during fit all ranks agree whether to stop.
        """
        if self._trainer.state.fn == TrainerFn.FITTING or self._meshes.topology.pipeline > 1:
            return self._meshes.data_parallel_group
        return self._meshes.root.get_group("shard") if self._meshes.topology.shard > 1 else None


def compare_epoch_ends(trainer: pl.Trainer, ranks: Ranks) -> Callable[[], None]:
    """Refuse epochs with other numbers of batches on other ranks from now on; return the undo.

    A rank whose epoch is over, because its loader or the run ends, waits for the others in the store before anything
    else: the collectives of one that goes on must not meet those of the next epoch. That one sees it, and reports it.
    An epoch in which all ranks have the known number of batches costs nothing.

    Collective: every rank of ``ranks`` must call it, when training starts.
    """
    length = trainer.num_training_batches
    are_equal = ranks.step("comparing lengths of loaders", lambda: length, lambda all: len({*all}) == 1)
    reloads = trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]  # set late
    are_known = are_equal and length != float("inf") and not reloads
    compared = (-1, 0)

    def compare() -> None:
        nonlocal compared
        epoch, batches = batches_begun(trainer)
        if trainer.received_sigterm or (are_known and batches == length) or compared == (epoch, batches):
            return  # all ranks end here
        compared = epoch, batches

        def refuse_difference(every: list[int]) -> None:
            if (least := min(every)) != (most := max(every)):
                places = every.index(least), least, every.index(most), most
                raise UnsupportedCodeError(unequal_batches_text(epoch, *places))

        with current_world().epoch_over():
            ranks.step(f"ending epoch {epoch}", lambda: batches, refuse_difference)

    return watch_epoch_ends(trainer, compare, any_rank)
