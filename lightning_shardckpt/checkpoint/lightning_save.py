"""Describe Lightning's checkpoint dict for a save on one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from lightning_shardckpt.checkpoint.nested_save import run_info
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.errors import StateError
from lightning_shardckpt.state.hf_document import HuggingFace
from lightning_shardckpt.state.model import WholeNames
from lightning_shardckpt.state.snapshot import Snapshot
from lightning_shardckpt.state.state_dicts import lightnings_of
from lightning_shardckpt.state.trainer import snapshot

RANK_STATE = "rank_state"
"""Key of Lightning's checkpoint dict under which ``ShardedStrategy`` passes the state of this rank alone."""


@dataclass(frozen=True, slots=True)
class Attached:
    """The ranks and the module that ``ShardCkptIO.attach`` sets; no module under Lightning's own strategies."""

    ranks: Ranks = field(default_factory=Ranks.alone)
    module: nn.Module | None = None
    topology: Mapping[str, int] = field(default_factory=dict)
    names: WholeNames = field(default_factory=WholeNames)


class LightningSave:
    """One save of Lightning's checkpoint dict.

    Args:
        checkpoint: the dict, or without a module a state of Fabric; it is not changed.
        attached: the ranks that save, and the module.
        hugging_face: makes documents of models, and caches the last one.
        adapters_only: leave out state that training does not change.
        pickle_objects: pickle objects that are not plain values.
        is_fabric: True if ``checkpoint`` is a state of Fabric.

    Attributes:
        run: step, epoch and topology, for the root index.
        notes: sentences for the user, after ``describe``.

    Raises:
        StateError: for ``adapters_only`` without a module.
    """

    def __init__(
        self,
        checkpoint: dict[str, Any],
        attached: Attached,
        hugging_face: HuggingFace,
        *,
        adapters_only: bool,
        pickle_objects: bool,
        is_fabric: bool,
    ) -> None:
        if adapters_only and attached.module is None:
            raise StateError(
                "ShardCkptIO(adapters_only=True) needs the module to find its frozen parameters, and Lightning's own "
                "strategies don't pass it to a CheckpointIO. Use ShardedStrategy, also with one device."
            )
        self.run = run_info(checkpoint, dict(attached.topology))
        self.notes: tuple[str, ...] = ()
        self._checkpoint, self._attached = checkpoint, attached
        self._hugging_face, self._is_fabric = hugging_face, is_fabric
        self._adapters_only, self._pickle_objects = adapters_only, pickle_objects

    def describe(self) -> Snapshot:
        """Return this rank's state.

        Raises:
            StateError: listing state that can't be stored, by path.
        """
        module, names, checkpoint = self._attached.module, self._attached.names, self._checkpoint
        if module is None:
            checkpoint = lightnings_of(checkpoint, of_fabric=self._is_fabric)
        described = snapshot(
            {key: value for key, value in checkpoint.items() if key != RANK_STATE},
            module,
            self._checkpoint.get(RANK_STATE),
            names,
            adapters_only=self._adapters_only,
            pickle_objects=self._pickle_objects,
        )
        if module is not None and self._attached.ranks.rank == 0 and "model" in described.leaves:
            document, notes = self._hugging_face.document(module, names.state)
            documents = described.documents if document is None else {**described.documents, "huggingface": document}
            described = replace(described, documents=documents, notes=(*described.notes, *notes))
        self.notes = described.notes
        return described
