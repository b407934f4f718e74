"""Describe Lightning's checkpoint dict for a save, on one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from lightning_shardckpt.checkpoint.nested_save import about_of
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.errors import StateError
from lightning_shardckpt.state.hf_document import HuggingFace
from lightning_shardckpt.state.model import WholeNames
from lightning_shardckpt.state.snapshot import Snapshot
from lightning_shardckpt.state.state_dicts import lightnings_of
from lightning_shardckpt.state.trainer import snapshot

RANK_STATE = "rank_state"
"""Key of Lightning's checkpoint dict under which ``ShardedStrategy`` passes what only this rank knows."""


@dataclass(frozen=True, slots=True)
class Attached:
    """The ranks that save and load together, and what; without a module, Lightning's own strategies on one rank."""

    ranks: Ranks = field(default_factory=Ranks.alone)
    module: nn.Module | None = None
    topology: Mapping[str, int] = field(default_factory=dict)
    names: WholeNames = field(default_factory=WholeNames)


class LightningSave:
    """One save of Lightning's dict: its description, once asked for, and what a person should know.

    Args:
        checkpoint: the dict, or a state of Fabric where there is no module; it is not changed.
        attached: who saves, and which module.
        hugging_face: makes documents of models; it keeps the last one.
        adapters_only: leave out what training does not change.
        pickle_objects: pickle what is no plain value.
        of_fabric: whether Fabric has given it.

    Attributes:
        about: for the root index.
        notes: what a person should know, once it is described.

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
        of_fabric: bool,
    ) -> None:
        if adapters_only and attached.module is None:
            raise StateError(
                "ShardCkptIO(adapters_only=True) must know the module to tell what is frozen, which Lightning's own "
                "strategies don't tell a CheckpointIO. Use ShardedStrategy, with one device, too."
            )
        self.about = about_of(checkpoint, dict(attached.topology))
        self.notes: tuple[str, ...] = ()
        self._checkpoint, self._attached = checkpoint, attached
        self._hugging_face, self._of_fabric = hugging_face, of_fabric
        self._adapters_only, self._pickle_objects = adapters_only, pickle_objects

    def describe(self) -> Snapshot:
        """Return what this rank contributes.

        Raises:
            StateError: listing what cannot be stored, by path.
        """
        module, names = self._attached.module, self._attached.names
        rank_state = self._checkpoint.get(RANK_STATE)
        given = self._checkpoint if module is not None else lightnings_of(self._checkpoint, of_fabric=self._of_fabric)
        shared = {key: value for key, value in given.items() if key != RANK_STATE}
        only, pickles = self._adapters_only, self._pickle_objects
        found = snapshot(shared, module, rank_state, names, adapters_only=only, pickle_objects=pickles)
        if module is not None and self._attached.ranks.rank == 0 and "model" in found.leaves:
            document, notes = self._hugging_face.document(module, names.state)
            documents = found.documents if document is None else {**found.documents, "huggingface": document}
            found = replace(found, documents=documents, notes=(*found.notes, *notes))
        self.notes = found.notes
        return found
