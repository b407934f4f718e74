"""Will the disk hold what a run is going to keep? Asked when training starts, not when a save fails at night."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.callbacks.callback import Callback
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from lightning_shardckpt.index import ROOT_NAME

# Tensors of a parameter's size that an optimizer keeps for it; of others it is not known before the first step.
_STATES = {"Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "RMSprop": 1, "Adagrad": 1, "Adadelta": 2}


def state_bytes(tensors: Iterable[torch.Tensor], optimizers: Iterable[Optimizer]) -> int:
    """The least that a checkpoint of these (whole) tensors and the state of their optimizers takes."""
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            copies = _STATES.get(type(optimizer).__name__, int(bool(group.get("momentum"))))
            total += copies * sum(p.numel() * p.element_size() for p in group["params"] if p.requires_grad)
    return total


def check_room(callbacks: Iterable[Callback], nbytes: int) -> None:
    """Warn if the file system of a ModelCheckpoint has no room for all that it keeps, and one more while it saves.

    Args:
        callbacks: of the Trainer.
        nbytes: of one checkpoint, at least.

    Raises:
        OSError: (ENOSPC) if not even one fits.
    """
    for callback in callbacks:
        if not isinstance(callback, ModelCheckpoint) or callback.dirpath is None or callback.save_top_k == 0:
            continue
        directory = os.fspath(callback.dirpath)
        free = _free_bytes(directory)
        keeps = max(callback.save_top_k, 1) + (callback.save_last is True)
        needed = (max(keeps - _kept(directory), 0) + 1) * nbytes
        if free is None or needed <= free:
            continue
        room = f"ModelCheckpoint saves to {directory!r}, where {_gb(free)} are free"
        if nbytes > free:
            raise OSError(errno.ENOSPC, f"{room}; one checkpoint of this model takes at least {_gb(nbytes)}")
        rank_zero_warn(
            f"{room}; it keeps up to {keeps} checkpoints of at least {_gb(nbytes)} each, and needs room for one more "
            "while it saves. Free some space, or lower save_top_k."
        )


def _free_bytes(directory: str) -> int | None:
    """Of the file system on which the directory is, or will be; None for what is no path here."""
    if "://" in directory:
        return None
    directory = os.path.abspath(directory)
    while not os.path.exists(directory):
        directory = os.path.dirname(directory)
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


def _kept(directory: str) -> int:
    """Complete checkpoints that are there already."""
    if not os.path.isdir(directory):
        return 0
    return sum(os.path.exists(os.path.join(directory, name, ROOT_NAME)) for name in os.listdir(directory))


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.3g} GB"
