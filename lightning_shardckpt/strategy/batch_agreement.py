"""Agreement of the ranks before a batch to stop, and comparison of their replicated values and of their epochs' ends.

One reduction of numbers from host memory decides whether to stop. With steps of a few milliseconds, a reduction before
each step would take too long, so there is one before the first batches, then one per several batches within a bound on
time. The number of batches follows from the last reduction, so it is the same on all ranks.

Parameters and buffers that are not sharded must be equal on all data-parallel ranks. A value computed from a rank's own
batch (a learning rate, a running mean) would make them differ without an error, and a checkpoint would have the
values of one rank. Statistics of norms are excluded: they are broadcast, see ``parallel.sharding.shared_values``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_shardckpt.checkpoint.save_agreement import Digests, combine_digests, digest_replicas, find_differences
from lightning_shardckpt.compat.lightning_loops import batches_begun, watch_epoch_ends
from lightning_shardckpt.compat.torch_modules import (
    NormWithStatistics,
    buffer_slots,
    non_persistent_buffers,
    parameter_slots,
)
from lightning_shardckpt.distributed.host_numbers import any_rank, gather_numbers
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.distributed.world import current_world, unequal_batches_text
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.sharding.mesh import Meshes
from lightning_shardckpt.parallel.tensors.values import refuse_different_numbers, report_numbers
from lightning_shardckpt.system.host import Tuning
from lightning_shardckpt.system.text import list_some


class BatchAgreement:
    """The agreements of the ranks in one run of training. Every rank must make the same calls in the same order."""

    def __init__(self) -> None:
        self._skips = 0  # batches until the next agreement
        self._limit = 1  # of batches between agreements; it doubles, so that one short step doesn't postpone many
        self._batches, self._agreed_s = 0, time.monotonic()  # batches since the last agreement, and its time

    def should_stop(self, is_told: bool, meshes: Meshes, tuning: Tuning) -> bool:
        """Return True if the ranks agree before this batch, and one of them was told to stop.

        Collective: every rank of the world must call it.

        Args:
            is_told: True if this rank was told to stop; it must be passed until the result is True.
            meshes: the meshes of the strategy.
            tuning: bounds the time between agreements.

        Raises:
            UnsupportedCodeError: if ranks wrote different numbers into sharded tensors.
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


def compare_ranks(modules: Iterable[nn.Module], ranks: Ranks, meshes: Meshes, *, parameters: bool) -> None:
    """Compare the numbers that ranks wrote into sharded tensors, and the replicated values of modules.

    Collective: every rank of the world must call it. The error names a rank that doesn't.

    Args:
        modules: the sharded modules.
        ranks: of the world.
        meshes: the meshes of the strategy.
        parameters: compare parameters, too; a save does so anyway.

    Raises:
        UnsupportedCodeError: naming the values that differ, on every rank.
        Exception: as in `Ranks.step`.
    """
    digests: Digests = {}
    if meshes.topology.data_parallel > 1:
        tensor_rank = meshes.root.get_local_rank("tensor") if meshes.topology.tensor > 1 else 0
        digests = digest_replicas(
            (f"{number} {meshes.pipeline_rank} {tensor_rank}", name, tensor)
            for number, module in enumerate(modules)
            for name, tensor in _replicated(module, parameters=parameters)
        )
    numbers, combined = report_numbers(meshes.pipeline_rank, meshes.topology.pipeline), combine_digests(digests)

    def join(reports: list[tuple[list[int], Digests]]) -> tuple[list[int], bool]:
        maxima = [max(column) for column in zip(*(numbers for numbers, _ in reports), strict=True)]
        return maxima, bool(find_differences(replicas for _, replicas in reports))

    written, differ = ranks.step("comparing the ranks", lambda: (numbers, combined), join)
    refuse_different_numbers(written)
    if not differ:
        return
    reports: list[Digests] = ranks.step("comparing replicated values", lambda: digests, lambda reports: reports)
    names = list_some([*find_differences(reports)], 5)
    raise UnsupportedCodeError(
        f"{names} differs between the data-parallel ranks, which each compute it from their own batches: the model "
        "differs from one process, and a checkpoint would have the values of one rank. Reduce values that are computed "
        "from a batch (self.all_gather(x).mean(0), self.trainer.strategy.reduce(x)) before they are used; if a buffer "
        "may differ between ranks, use register_buffer(…, persistent=False)."
    )


def _replicated(root: nn.Module, *, parameters: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a module that all data-parallel ranks must hold equally, by FQN."""
    for prefix, module in root.named_modules():
        slots: dict[str, Tensor | None] = {**parameter_slots(module)} if parameters else {}
        if not isinstance(module, NormWithStatistics):
            passing = non_persistent_buffers(module)
            slots |= {name: buffer for name, buffer in buffer_slots(module).items() if name not in passing}
        for name, value in slots.items():
            if not isinstance(value, Tensor) or type(value) not in (Tensor, nn.Parameter):
                continue
            if value.layout == torch.strided and value.numel():
                yield f"{prefix}.{name}" if prefix else name, value


# ── ends of epochs ────────────────────────────────────────────────────────────────────────────────────────────────────


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
            least, most = min(every), max(every)
            if least != most:
                places = every.index(least), least, every.index(most), most
                raise UnsupportedCodeError(unequal_batches_text(epoch, *places))

        with current_world().epoch_over():
            ranks.step(f"ending epoch {epoch}", lambda: batches, refuse_difference)

    return watch_epoch_ends(trainer, compare, any_rank)
