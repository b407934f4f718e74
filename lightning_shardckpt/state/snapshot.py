"""A rank's state for a save: live tensors by key, and JSON documents. Nothing is copied."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Leaves:
    """The tensors of one component.

    Attributes:
        tensors: live, sharded or replicated, by stored key.
        aliases: stored key by further name.
        pinned: keys of buffers, whose replicas may differ, so that the lowest rank that holds one writes it.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    pinned: frozenset[str] = frozenset()

    def renamed(self, name: Callable[[str], str]) -> Leaves:
        """Return the tensors under other names."""
        aliases = {name(alias): name(key) for alias, key in self.aliases.items()}
        return Leaves({name(key): one for key, one in self.tensors.items()}, aliases, frozenset(map(name, self.pinned)))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One rank's part of a save. Its values must not change until the save has returned.

    Attributes:
        leaves: by component.
        own: plain tensors of the trainer's state; rank 0's are stored.
        documents: by role: "trainer", "peft" and "huggingface" (rank 0's is stored), "rank" (every rank's), "model",
            "optimizer", "frozen" and "versions" (stored once per group of ranks that hold the same tensors). Other
            groups add keys to the trainer's state that rank 0 does not have.
        notes: sentences for the user.
        replicated: plain tensors of the trainer's state that must be equal on all ranks.
        contents: for components whose tensors have no values yet: returns the content of a key's tensor when it is
            written.
    """

    leaves: dict[str, Leaves]
    own: dict[str, torch.Tensor]
    documents: dict[str, Any]
    notes: tuple[str, ...] = ()
    replicated: dict[str, torch.Tensor] = field(default_factory=dict)
    contents: dict[str, Callable[[str], memoryview]] = field(default_factory=dict)
