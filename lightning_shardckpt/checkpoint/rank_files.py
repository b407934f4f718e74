"""Write the shard files and indexes of one rank: all of them, or those that no earlier checkpoint has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_shardckpt.checkpoint.checkpoint_options import SaveOptions
from lightning_shardckpt.checkpoint.incremental import Indexes, RankPieces, SaveHistory, write_changed
from lightning_shardckpt.checkpoint.plan_cache import SavePlan
from lightning_shardckpt.format.file_names import FileInfo
from lightning_shardckpt.storage.protocol import Draft, Storage
from lightning_shardckpt.transfer.writer import Stage, write_component, write_index


@dataclass(slots=True)
class RankFiles:
    """The files of one rank.

    Attributes:
        indexes: by component.
        nbytes: of all shard files.
        linked_nbytes: of those that were linked, and not written.
    """

    indexes: dict[str, FileInfo] = field(default_factory=dict)
    nbytes: int = 0
    linked_nbytes: int = 0


class RankWriter:
    """Writes what one rank has to save at ``path``.

    Args:
        path: of the checkpoint.
        rank: this one.
        options: what the caller of the save chose.
        storage: where ``path`` is.
        history: of earlier saves and loads by the same caller, whose files may be linked.
    """

    def __init__(self, path: str, rank: int, options: SaveOptions, storage: Storage, history: SaveHistory) -> None:
        self._path, self._rank, self._options = path, rank, options
        self._storage, self._history, self._indexes, self._prefix = storage, history, Indexes(), ""

    def write(
        self, draft: Draft, plan: SavePlan, frozen: Mapping[str, frozenset[str]], stage: Stage, save_id: str
    ) -> RankFiles:
        """Write the files of a plan.

        Args:
            draft: of the checkpoint.
            plan: of this rank.
            frozen: keys of parameters for which no gradient is computed, by component.
            stage: gives the bytes of a piece.
            save_id: of this save.
        """
        if self._options.incremental:
            return self._write_changed(draft, plan, frozen, stage, save_id)
        written = RankFiles()
        for name, files in plan.files.items():
            info = write_component(draft, name, self._rank, save_id, files, stage)
            if info is not None:
                written.indexes[name] = info
        written.nbytes = sum(file.nbytes for files in plan.files.values() for file in files)
        return written

    def _write_changed(
        self, draft: Draft, plan: SavePlan, frozen: Mapping[str, frozenset[str]], stage: Stage, save_id: str
    ) -> RankFiles:
        """Do the same, but link the files that an earlier checkpoint has."""
        written, self._prefix = RankFiles(), draft.prefix
        with self._history.base(self._path, draft, self._storage, self._rank) as base:
            for name, files in plan.files.items():
                pieces = [piece for file in files for piece in file.pieces]
                if not pieces:
                    continue
                mine = RankPieces(name, self._rank, pieces, frozen.get(name, frozenset()), self._options.size_per_shard)
                index, linked = write_changed(draft, mine, save_id, stage, base, self._history.component(name))
                self._indexes[name] = index
                written.indexes[name] = write_index(draft, index)
                written.nbytes += sum(file.nbytes for file in index.files.values())
                written.linked_nbytes += linked
        return written

    def completed(self) -> None:
        """Let later saves link the files of this one: it is complete on all ranks."""
        if self._options.incremental:
            self._history.saved(self._path, self._prefix, self._indexes)
