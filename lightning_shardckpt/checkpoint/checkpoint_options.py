"""Options of saves and loads, as frozen values that validate themselves. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Replicas = Literal["same", "first"]
"""How replicas of a tensor are stored: they must be equal, or the lowest rank's is stored."""


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """Options of writing a checkpoint.

    Attributes:
        size_per_shard: limit of a shard file in MB (2^20 bytes); a larger tensor gets a file of its own.
        replicas: "same" requires equal replicas of each tensor; "first" stores the first rank's.

    Raises:
        ValueError: for an invalid value, naming the option.
    """

    size_per_shard: float = 1024
    replicas: Replicas = "same"

    def __post_init__(self) -> None:
        if not isinstance(self.size_per_shard, int | float) or not self.size_per_shard > 0:
            raise ValueError(
                f"size_per_shard is a size in MB (2^20 bytes) and must be a positive number, got "
                f"{self.size_per_shard!r}: write size_per_shard=1024 for 1 GB"
            )
        if self.replicas not in get_args(Replicas):
            raise ValueError(f'replicas is "same" or "first", got {self.replicas!r}')


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Options of reading a checkpoint.

    Attributes:
        strict: raise an error for differences between checkpoint and live objects instead of loading the rest.
        verify: compare checksums.
        weights_only: passed to ``torch.load`` for a file of ``torch.save``.
    """

    strict: bool = True
    verify: bool = True
    weights_only: bool = True
