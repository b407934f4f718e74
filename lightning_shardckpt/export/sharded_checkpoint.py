"""A checkpoint of this package as an export source."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_shardckpt.format.index import Component
from lightning_shardckpt.state.documents import document_of
from lightning_shardckpt.state.json_values import decode_with
from lightning_shardckpt.transfer.reader import Checkpoint
from lightning_shardckpt.transfer.whole_tensors import WholeTensors


class ShardedCheckpoint:
    """An open checkpoint, as far as an export needs it."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.tensors = WholeTensors(checkpoint)

    def components(self) -> dict[str, Component]:
        """Tensors by component."""
        return self._checkpoint.root.components

    def document(self, role: str) -> Any:
        """The JSON of a role, from all groups of ranks; None if nothing was stored."""
        return document_of(self._checkpoint, role)

    def trainer(self, stored: Callable[[str], Any]) -> dict[str, Any]:
        """The trainer's state, with records of a file for ``torch.load`` in place of tensors."""
        from lightning_shardckpt.export.torch_archive import of_torch  # torch, which other exports do without

        found: dict[str, Any] = decode_with(of_torch(stored), self.document("trainer") or {})
        return found
