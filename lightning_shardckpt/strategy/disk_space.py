"""Warn when training starts if the disk has no room for the checkpoints that a run is going to keep."""

from __future__ import annotations

import os
from collections.abc import Iterable

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.callbacks.callback import Callback
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from lightning_shardckpt.checkpoint_io import ShardCkptIO
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.format.clean_fqn import clean_fqn
from lightning_shardckpt.sources.did_you_mean import READABLE
from lightning_shardckpt.state.dtensor_layout import local_tensor
from lightning_shardckpt.state.peft_modules import unchanging
from lightning_shardckpt.storage.router import file_path, is_url

# Tensors of a parameter's size that an optimizer keeps for it; of others it is not known before the first step.
_STATES = {"Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "RMSprop": 1, "Adagrad": 1, "Adadelta": 2}


def check_room_for_run(trainer: pl.Trainer, io: ShardCkptIO, ranks: Ranks, *, stage: int) -> None:
    """Warn, on rank 0, if the disk has no room for the checkpoints of a run, of which each rank knows its own part.

    Collective: every rank of ``ranks`` must call it, when the optimizers are set up.

    Args:
        trainer: whose run it is.
        io: what saves.
        ranks: who saves together.
        stage: of a pipeline, on this rank; each is counted once.
    """

    def part() -> tuple[int, tuple[int, int]]:
        state = trainer.strategy.lightning_module_state_dict()
        left_out = unchanging(trainer.lightning_module) if io.adapters_only else frozenset()
        tensors = [t for n, t in state.items() if isinstance(t, torch.Tensor) and clean_fqn(n) not in left_out]
        return stage, (tensor_bytes(tensors), state_bytes(trainer.strategy.optimizers))

    def lead(parts: list[tuple[int, tuple[int, int]]]) -> None:
        model, optimizer = map(sum, zip(*dict(parts).values(), strict=True))
        twice = io.save_options.also is not None
        check_room(trainer.checkpoint_callbacks, model * 2 if twice else model, optimizer)

    ranks.step("checking the room for checkpoints", part, lead)


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of whole tensors, given this rank's shards of them; tied ones count once."""
    once = {(local_tensor(t).data_ptr() or id(t), t.numel()): t for t in tensors}
    return sum(tensor.numel() * tensor.element_size() for tensor in once.values())


def state_bytes(optimizers: Iterable[Optimizer]) -> int:
    """Return the least bytes that the state of optimizers takes, for whole parameters."""
    total = 0
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            copies = _STATES.get(type(optimizer).__name__, int(bool(group.get("momentum"))))
            total += copies * sum(p.numel() * p.element_size() for p in group["params"] if p.requires_grad)
    return total


def check_room(callbacks: Iterable[Callback], model_bytes: int, optimizer_bytes: int) -> None:
    """Warn if the file system of a ModelCheckpoint has no room for all that it keeps, and one more while it saves.

    No more than a warning, since a hook may save less, and the file system may compress.
    """
    for callback in callbacks:
        if not isinstance(callback, ModelCheckpoint) or callback.dirpath is None or callback.save_top_k == 0:
            continue
        directory = file_path(callback.dirpath)
        if is_url(directory):
            continue  # a store has room
        nbytes = model_bytes + (0 if callback.save_weights_only else optimizer_bytes)
        free = _free_bytes(directory)
        keeps = max(callback.save_top_k, 1) + (callback.save_last is True)
        more = max(keeps - _kept(directory), 0) + 1
        if free is not None and more * nbytes > free:
            rank_zero_warn(
                f"ModelCheckpoint saves to {directory!r}, where {_gb(free)} are free. It keeps up to {keeps} "
                f"checkpoints of {_gb(nbytes)} or more, and needs room for one more while it saves: "
                f"{_gb(more * nbytes)} from now on. Free some space, or lower save_top_k."
            )


def _free_bytes(directory: str) -> int | None:
    """Return the free bytes of the file system on which the directory is, or will be."""
    directory = os.path.abspath(directory)
    while not os.path.exists(directory):
        directory = os.path.dirname(directory)
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize if found.f_blocks else None  # some file systems do not tell


def _kept(directory: str) -> int:
    """Complete checkpoints that are there already, those of Lightning's own sharded strategies included."""
    if not os.path.isdir(directory):
        return 0
    paths = [os.path.join(directory, name) for name in os.listdir(directory)]
    return sum(any(os.path.exists(os.path.join(path, mark)) for mark in READABLE) for path in paths)


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.3g} GB"
