"""A checkpoint of this package as an export source, without torch."""

from __future__ import annotations

from typing import Any

from lightning_shardckpt.format.index import Component
from lightning_shardckpt.state.documents import HUGGING_FACE, checked
from lightning_shardckpt.state.optimizer_merge import merge_optimizers
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
        """The JSON of "model", "optimizer" or "huggingface", from all groups of ranks; None if nothing was stored."""
        begin = HUGGING_FACE if role == "huggingface" else f"{role}-state-dist-"
        names = sorted(name for name in self._checkpoint.root.documents if name.startswith(begin))
        where = f"checkpoint {self._checkpoint.path!r}"
        found = [checked(role, self._checkpoint.document(name), f"{where}, {name}") for name in names]
        if role == "optimizer" and len(found) > 1:
            return merge_optimizers(found)
        return {name: value for one in reversed(found) for name, value in one.items()} if found else None
