"""A file of ``torch.save``, such as Lightning's checkpoints and those that were consolidated, as a source."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from lightning_shardckpt.errors import CheckpointNotFoundError, FormatError
from lightning_shardckpt.index import Component
from lightning_shardckpt.sources import Target
from lightning_shardckpt.state.documents import FROZEN, check_frozen
from lightning_shardckpt.state.geometry import this_rank, view_at
from lightning_shardckpt.state.model import model_leaves
from lightning_shardckpt.state.optimizer import optimizer_leaves
from lightning_shardckpt.state.snapshot import Leaves, specs_of
from lightning_shardckpt.whole import Tensors


class PlainSource:
    """A file of ``torch.save`` with Lightning's keys, memory-mapped: each rank copies its slices out of it."""

    def __init__(self, path: str, weights_only: bool = True) -> None:
        self.path = path
        self._checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
        self._leaves: dict[str, Leaves] = {}
        self._documents: dict[str, Any] = {}
        if not isinstance(self._checkpoint, dict) or "state_dict" not in self._checkpoint:
            raise CheckpointNotFoundError(f"{path!r} is a file, but no Lightning checkpoint: it has no state_dict")
        self._leaves["model"], self._documents["model"] = model_leaves(self._checkpoint["state_dict"])
        if "optimizer_states" in self._checkpoint:
            states = self._checkpoint["optimizer_states"]
            self._leaves["optimizer"], self._documents["optimizer"] = optimizer_leaves(states)
        if FROZEN in self._checkpoint:
            check_frozen(self._checkpoint[FROZEN])
            self._documents["frozen"] = self._checkpoint[FROZEN]

    @property
    def tensors(self) -> Tensors:
        """Not as bytes in files: torch has mapped them."""
        raise FormatError(f"{self.path!r} is a file for torch.load already; only sharded checkpoints are converted")

    def close(self) -> None:
        """Nothing: the mapping ends with the tensors."""

    def components(self) -> Mapping[str, Component]:
        """Tensors by component, each whole."""
        return {n: Component(specs_of(n, leaves, ((0, 1),)), leaves.aliases) for n, leaves in self._leaves.items()}

    def document(self, role: str, rank: int = 0) -> Any:
        """The JSON of "model", "optimizer" or "frozen"."""
        return self._documents.get(role)

    def trainer(self, stored: Callable[[str], torch.Tensor]) -> dict[str, Any]:
        """Everything but model and optimizers, as it was pickled."""
        return {k: v for k, v in self._checkpoint.items() if k not in ("state_dict", "optimizer_states", FROZEN)}

    def backed(self, component: str, key: str) -> tuple[int, ...]:
        """Its shape: torch has mapped the tensor."""
        return tuple(self._leaves[component].tensors[key].shape)

    def verify(self, targets: list[Target]) -> int:
        """Nothing to compare with: such a file has no checksums that torch would verify."""
        return 0

    def fill(self, targets: list[Target]) -> None:
        """Copy the slices."""
        for target in targets:
            full = self._leaves[target.component].tensors[target.key]
            for part in target.parts(this_rank()):
                view_at(target.local, part.local).copy_(view_at(full, part.box))
