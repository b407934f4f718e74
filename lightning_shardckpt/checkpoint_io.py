"""``ShardCkptIO``: Lightning's door to sharded checkpoints."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.pytorch.core.saving import _load_state
from lightning.pytorch.utilities.migration.utils import _pl_migrate_checkpoint
from torch import nn
from torch.optim import Optimizer

from lightning_shardckpt import checkpoint as engine
from lightning_shardckpt.errors import StateError
from lightning_shardckpt.loading import Live
from lightning_shardckpt.ranks import Ranks
from lightning_shardckpt.saving import About
from lightning_shardckpt.state.model import WholeNames, canonical_name, is_extra_state, model_leaves
from lightning_shardckpt.state.snapshot import Snapshot
from lightning_shardckpt.state.trainer import snapshot
from lightning_shardckpt.state.tree import Dropped
from lightning_shardckpt.storage.local import LocalStorage

RANK_STATE = "rank_state"
"""Key of Lightning's checkpoint dict under which ``ShardedStrategy`` passes what only this rank knows."""


class ShardCkptIO(CheckpointIO):
    """Writes a checkpoint as a directory of per-rank shard files with indexes, and reads it on any topology.

    With ``ShardedStrategy`` every rank writes its own slices. With Lightning's own strategies, which call a
    CheckpointIO on rank 0 alone, that rank writes everything, and each rank loads whole tensors; a checkpoint from
    any topology can be loaded there.

    Args:
        size_per_shard: limit of a shard file in MB (2^20 bytes); a larger tensor gets a file of its own.
        verify: compare all loaded bytes with their checksums, before anything in memory changes.
    """

    def __init__(self, size_per_shard: float = 1024, verify: bool = True) -> None:
        if size_per_shard <= 0:
            raise ValueError(f"size_per_shard is a size in MB and must be positive, got {size_per_shard}")
        self.size_per_shard = size_per_shard
        self.verify = verify
        self._ranks = Ranks.alone()
        self._module: nn.Module | None = None
        self._topology: dict[str, int] = {}
        self.names = WholeNames()

    def attach(
        self, ranks: Ranks, module: nn.Module, topology: dict[str, int], *, names: WholeNames | None = None
    ) -> None:
        """From now on, all of ``ranks`` call this object together to save and load ``module``.

        ``names`` is of the whole model, where a rank's ``module`` is a pipeline stage and has a part of it.
        """
        self._ranks, self._module, self._topology = ranks, module, topology
        self.names = names or WholeNames()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Save Lightning's checkpoint dict at ``path``; complete and durable on return.

        Collective under ``ShardedStrategy``: every rank must call it.

        Raises:
            TypeError: for ``storage_options``, of which there are none.
            StateError: listing state that cannot be stored, by path.
        """
        if storage_options is not None:
            raise TypeError(f"ShardCkptIO has no storage options, got {storage_options!r}")
        taken: list[Snapshot] = []

        def describe() -> Snapshot:
            rest = {k: v for k, v in checkpoint.items() if k != RANK_STATE}
            taken.append(snapshot(rest, self._module, checkpoint.get(RANK_STATE), self.names))
            return taken[0]

        notes = engine.save(
            os.fspath(path),
            describe,
            ranks=self._ranks,
            about=About(checkpoint.get("global_step"), checkpoint.get("epoch"), self._topology),
            size_per_shard=self.size_per_shard,
        )
        self._warn([*taken[0].notes, *(["\n".join(notes)] if notes else [])])

    def _warn(self, notes: Iterable[str]) -> None:
        if self._ranks.rank == 0:
            for note in notes:
                warnings.warn(note, stacklevel=3)

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """The whole checkpoint as Lightning's dict, for strategies that hold whole tensors. Not collective.

        Also reads plain files of ``torch.save``.
        """
        if os.path.isfile(path):
            safe = weights_only is not False
            found: dict[str, Any] = torch.load(path, map_location=map_location or "cpu", weights_only=safe)
            return found
        return engine.load_full(os.fspath(path), verify=self.verify)

    def load_into(
        self,
        path: str | os.PathLike[str],
        state_dict: Mapping[str, Any],
        optimizers: Sequence[Optimizer] | None,
        names: Mapping[int, str],
        *,
        strict: bool,
        weights_only: bool | None = None,
        pick_rank: Callable[[Any], int] | None = None,
    ) -> engine.Loaded:
        """Load straight into live tensors: a sharded checkpoint of any topology, or a plain file.

        Collective: every rank must call it.

        Args:
            path: the checkpoint.
            state_dict: of the live module; its tensors are filled.
            optimizers: the live optimizers; None to load weights only.
            names: FQN by ``id`` of the live parameters.
            strict: raise one MismatchError for all differences instead of loading the rest.
            weights_only: for a plain file, as in ``torch.load``; True by default.
            pick_rank: see ``checkpoint.load``.
        """
        tensors = {k: v for k, v in state_dict.items() if not is_extra_state(k)}
        leaves, _ = model_leaves(tensors, self._module, self.names)
        extra_state = frozenset(canonical_name(k) for k in state_dict if is_extra_state(k))
        live = Live(leaves, extra_state, optimizers, names, self.names)
        loaded = engine.load(
            os.fspath(path),
            live,
            ranks=self._ranks,
            strict=strict,
            verify=self.verify,
            weights_only=weights_only is not False,
            pick_rank=pick_rank,
        )
        self._warn(loaded.notes)
        return loaded

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Delete the checkpoint, the link or the plain file at ``path``; does nothing where there is nothing.

        What can't be deleted, or is no checkpoint, stays, with a warning: training must not end for that.
        """
        try:
            if os.path.isfile(path) and not os.path.islink(path):
                os.unlink(path)
            elif os.path.lexists(path):
                self._warn(LocalStorage().remove(os.fspath(path)))
        except OSError as error:
            self._warn([f"not removed: {error}"])

    def teardown(self) -> None:
        """Nothing is pending: a save that returned is durable."""


_Loadable = TypeVar("_Loadable", bound="pl.LightningModule | pl.LightningDataModule")


def load_from_checkpoint(
    cls: type[_Loadable], checkpoint_path: str | os.PathLike[str], *, strict: bool | None = None, **kwargs: Any
) -> _Loadable:
    """A module with the hyper-parameters and weights of a checkpoint, on the CPU, in this process alone.

    What ``LightningModule.load_from_checkpoint`` does for a file, for a sharded checkpoint of any topology.

    Args:
        cls: the class to construct.
        checkpoint_path: the checkpoint.
        strict: whether all names must match; by default as the module's ``strict_loading`` says.
        kwargs: hyper-parameters that replace the stored ones.

    Raises:
        StateError: if a hyper-parameter could not be stored and is not given.
    """
    if os.path.isfile(checkpoint_path):
        return cls.load_from_checkpoint(os.fspath(checkpoint_path), strict=strict, **kwargs)  # type: ignore[return-value]
    checkpoint = engine.load_full(os.fspath(checkpoint_path), optimizers=False)
    checkpoint = _pl_migrate_checkpoint(checkpoint, checkpoint_path=os.fspath(checkpoint_path))
    hyper = checkpoint.setdefault(cls.CHECKPOINT_HYPER_PARAMS_KEY, {})
    hyper.update(kwargs)
    lost = {name: value for name, value in hyper.items() if isinstance(value, Dropped)}
    if lost:
        raise StateError(
            f"checkpoint {os.fspath(checkpoint_path)!r} does not hold the hyper-parameter(s) {lost} of {cls.__name__}; "
            f"pass them: load_from_checkpoint({cls.__name__}, path, {', '.join(f'{name}=…' for name in lost)})"
        )
    if issubclass(cls, pl.LightningModule):
        return _load_state(cls, checkpoint, strict=strict, **kwargs)  # type: ignore[return-value]  # typed as either kind
    return _load_state(cls, checkpoint, **kwargs)  # type: ignore[return-value]
