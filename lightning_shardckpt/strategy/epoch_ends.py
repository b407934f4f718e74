"""Comparison of how many batches the ranks train on in an epoch, where that is not known before.

A rank whose epoch is over, because its loader or the run ends, waits for the others before anything else, in the store:
if another one goes on, its collectives must not meet those of the next epoch. That one sees it, and reports it.
"""

from __future__ import annotations

from collections.abc import Callable

import lightning.pytorch as pl

from lightning_shardckpt.compat.lightning_loops import batches_begun, watch_epoch_ends
from lightning_shardckpt.distributed.host_numbers import any_rank
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.distributed.world import current_world, unequal_batches_text
from lightning_shardckpt.errors import UnsupportedCodeError


def compare_epoch_ends(trainer: pl.Trainer, ranks: Ranks) -> Callable[[], None]:
    """Compare the ends of the epochs from now on; return the undo. Call it when training starts.

    An epoch in which all ranks have the known number of batches costs nothing.

    Collective: every rank of ``ranks`` must call it.
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
        with current_world().epoch_over():
            ranks.step(f"ending epoch {epoch}", lambda: batches, lambda all: _refuse_difference(epoch, all))

    return watch_epoch_ends(trainer, compare, any_rank)


def _refuse_difference(epoch: int, batches: list[int]) -> None:
    """Raise an UnsupportedCodeError if the ranks have had different numbers of batches in an epoch."""
    least, most = min(batches), max(batches)
    if least != most:
        raise UnsupportedCodeError(
            unequal_batches_text(epoch, batches.index(least), least, batches.index(most), most)
        )
