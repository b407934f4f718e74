"""Options of a save or a load, as frozen values that check themselves.

Knows neither what is saved nor where. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from lightning_shardckpt.system.tuning import TUNING, Tuning

ExtraFormat = Literal["huggingface"]
"""Formats in which a save can write the model a second time."""

Replicas = Literal["same", "first"]
"""What of tensors that several ranks hold is stored: they must be the same, or the lowest rank's counts."""


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """Options of writing a checkpoint.

    Attributes:
        size_per_shard: limit of a shard file in MB (2^20 bytes); a larger tensor gets a file of its own.
        also: a format in which the model is written a second time, into the same directory, by the same ranks.
        replicas: whether tensors that several ranks hold must be the same, or the first rank's are stored.
        incremental: link shard files that an earlier checkpoint in the same directory has already.

    Raises:
        ValueError: for a value that cannot be, naming the option.
    """

    size_per_shard: float = 1024
    also: ExtraFormat | None = None
    replicas: Replicas = "same"
    incremental: bool = False

    def __post_init__(self) -> None:
        if self.size_per_shard <= 0:
            raise ValueError(f"size_per_shard is a size in MB and must be positive, got {self.size_per_shard}")
        if self.also not in (None, *get_args(ExtraFormat)):
            raise ValueError(f'also is "huggingface" or None, got {self.also!r}')
        if self.replicas not in get_args(Replicas):
            raise ValueError(f'replicas is "same" or "first", got {self.replicas!r}')


@dataclass(frozen=True, slots=True)
class AsyncOptions:
    """Options of saves that go on after they have returned.

    Attributes:
        max_pending: how many saves may wait while another one is being written; each needs host memory.

    Raises:
        ValueError: for a negative number.
    """

    max_pending: int = 1

    def __post_init__(self) -> None:
        if self.max_pending < 0:
            raise ValueError(f"max_pending is a number of saves and can't be negative, got {self.max_pending}")


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Options of reading a checkpoint.

    Attributes:
        strict: whether a difference between checkpoint and live objects is an error; else the rest is loaded.
        verify: whether to compare checksums.
        verify_first: read all that is to be verified before anything in memory changes, and then once more to fill
            live tensors. Else each is filled as it is verified, and a load that fails leaves a mix behind.
        weights_only: passed to ``torch.load`` for a file of ``torch.save``.
        tuning: sizes of what is read and held; a checkpoint of another program is read with the defaults.
    """

    strict: bool = True
    verify: bool = True
    verify_first: bool = True
    weights_only: bool = True
    tuning: Tuning = TUNING
