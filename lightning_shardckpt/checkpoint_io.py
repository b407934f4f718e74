"""``ShardCkptIO``, the CheckpointIO of Lightning and Fabric, translates their calls and dicts to ``checkpoint/``.

``attach`` sets the ranks and the module; without it, this is the CheckpointIO of one of Lightning's own strategies,
which call it on rank 0 alone.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Literal

import lightning
import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.serialization import MAP_LOCATION

from lightning_shardckpt.checkpoint.background import Background, SaveGroup
from lightning_shardckpt.checkpoint.checkpoint import LoadOptions, is_torch_file, load_full, save
from lightning_shardckpt.checkpoint.describe import RANK_STATE, add_libraries
from lightning_shardckpt.checkpoint.save_job import Replicas, RunInfo, SaveOptions
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.errors import StateError
from lightning_shardckpt.export.consolidation import export_beside
from lightning_shardckpt.sources.key_mapping import KeyMapping
from lightning_shardckpt.state.documents import FROZEN
from lightning_shardckpt.state.model import WholeNames
from lightning_shardckpt.state.state_dicts import VERSION, is_lightning_dict, lift_state_dicts, states_of_checkpoint
from lightning_shardckpt.state.trainer import Snapshot, snapshot
from lightning_shardckpt.storage.local_storage import LocalStorage
from lightning_shardckpt.storage.router import StorageRouter, absolute_path, file_path, is_url
from lightning_shardckpt.storage.run_folder import RunFolder
from lightning_shardckpt.system.host import drain_all
from lightning_shardckpt.system.text import count_text


class ShardCkptIO(CheckpointIO):
    """Writes a checkpoint as a directory of per-rank shard files with indexes, and reads it on any topology.

    With ``ShardedStrategy`` every rank writes its own slices. With the strategies of Lightning and Fabric that call a
    CheckpointIO on rank 0 alone, rank 0 writes everything and each rank loads whole tensors. FSDPStrategy,
    ModelParallelStrategy and DeepSpeedStrategy are not among them: they write shards in their own format. With Fabric's
    own strategies, use ``lightning_shardckpt.fabric.ShardCkptIO``.

    Args:
        size_per_shard: limit of a shard file in MB (2^20 bytes); a larger tensor gets a file of its own.
        verify: compare all loaded bytes with their checksums while they fill tensors; if the checkpoint is corrupted,
            the module can't be used until it has loaded another one.
        use_async: return from a save when its state is copied to host memory, which each rank keeps for it until the
            run ends; threads write and commit it while training goes on. Its error is raised on all ranks by the next
            save, by ``wait`` or at the end of the run, which wait for it, as loads do.
        sync_files: make a save durable before it returns. False is faster; then a machine crash or power loss may
            destroy the old and the new checkpoint, but the death of a process destroys neither.
        replicas: ``"same"`` requires that ranks holding the same tensor hold equal values, and names those that differ
            in an error; ``"first"`` stores the first rank's.
        adapters_only: save only the state that training changes. Frozen parameters are left out, and a load does not
            change them, so the module must have their values from another source. For ``ShardedStrategy``.
        export: with "huggingface", rank 0 exports the model of each complete checkpoint into a folder ``huggingface``
            in it, for ``from_pretrained``, while training goes on; the next save, ``wait`` and the end of the run wait
            for it. If the export fails, a warning says why.
        storage_options: for URLs, by fsspec's names, such as ``endpoint_url``, ``key`` and ``secret``, and with
            ``throttle_uploads: True``, only one rank of each node uploads at a time. Lightning's ModelCheckpoint takes
            no such options: configure it by environment variables, such as ``AWS_ENDPOINT_URL``.
        pre_download: for URLs, a local folder to which the files that a rank needs are copied before they are read,
            once per node. Later loads reuse them.
        key_mapping: from the names in a ``ckpt_path`` to names in the model: a dict of whole names or regular
            expressions to new names (None leaves a tensor out), or a function. See "Rename tensors" in the
            documentation. For ``ShardedStrategy``.
        pickle_objects: pickle objects that are not plain values in hyper-parameters, the state of callbacks and
            schedulers, and the entries that ``on_save_checkpoint`` adds; without it, they are refused, except in
            hyper-parameters, where they are left out. They are read only with ``weights_only=False``, which executes
            code in them.
    """

    _is_fabric = False

    def __init__(
        self,
        size_per_shard: float = 1024,
        verify: bool = True,
        use_async: bool = False,
        sync_files: bool = True,
        replicas: Replicas = "same",
        adapters_only: bool = False,
        export: Literal["huggingface"] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        pre_download: str | os.PathLike[str] | None = None,
        key_mapping: dict[str, str | None] | Callable[[str], Any] | None = None,
        pickle_objects: bool = False,
    ) -> None:
        if export not in (None, "huggingface"):
            raise ValueError(f'export is "huggingface" or None, got {export!r}')
        if adapters_only and export is not None:
            raise ValueError(f"adapters_only leaves out the base model, so export={export!r} has none: choose one")
        self.save_options, self.load_options = SaveOptions(size_per_shard, replicas), LoadOptions(verify=verify)
        self.is_async, self._exports, self.key_mapping = use_async, export is not None, KeyMapping.of(key_mapping)
        self._described_by = {"adapters_only": adapters_only, "pickle_objects": pickle_objects}
        local = LocalStorage(sync_files=sync_files)
        self.storage = StorageRouter(local, storage_options=storage_options, pre_download=pre_download)
        self._group, self._saves_in_background = SaveGroup(), False
        self._module: nn.Module | None = None
        self._topology: Mapping[str, int] = {}
        self.names = WholeNames()
        """Names of the whole model, also on ranks of a pipeline stage, which have a part of it."""

    # --- ranks and module ---

    def attach(
        self, ranks: Ranks, module: nn.Module, topology: Mapping[str, int], *, names: WholeNames | None = None
    ) -> None:
        """Set the ranks, which save and load together from now on, and the module of this rank.

        ``topology`` has the sizes of mesh axes; ``names`` are those of the whole model, if ``module`` is a part of it.
        """
        self._group.ranks, self._module = ranks, module
        self._topology, self.names = topology, names or WholeNames()

    def enable_async(self, ranks: Ranks) -> None:
        """Save asynchronously until ``teardown`` or ``leave``, if that was chosen. The writer alone uses ``ranks``."""
        if self.is_async:
            self._group.background.drain()
            self._group.background, self._saves_in_background = Background(ranks), True

    def teardown(self) -> None:
        """Wait as ``wait`` does, free the memory of asynchronous saves, and undo ``attach``. Collective as ``wait``."""
        try:
            self.wait()
        finally:
            self._group, self._saves_in_background = SaveGroup(), False
            self._module, self._topology, self.names = None, {}, WholeNames()

    def leave(self, error: BaseException) -> None:
        """Finish queued saves on a rank that got an exception, which other ranks may not have got.

        Not collective. Failures of these saves are added to the exception as notes. Later saves are complete on return.
        """
        self._group.background.leave(error)
        self._warn(self._group.background.notes())
        self._group.background, self._saves_in_background = Background(Ranks.alone()), False

    # --- save ---

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Save Lightning's checkpoint dict at a path or URL. Collective under ``ShardedStrategy``.

        Without ``use_async`` it is complete when this returns, and durable with ``sync_files``. ``storage_options`` are
        for this URL, instead of those of ``ShardCkptIO``.

        Raises:
            Exception: the failure of an earlier asynchronous save; then this save does not begin.
            ValueError: for ``storage_options`` with a path of the file system.
            StateError: listing state that can't be stored, by path; for ``adapters_only`` under another strategy.
        """
        self.save(lambda: checkpoint, path, RunInfo.of(checkpoint, self._topology), storage_options)

    def save(
        self,
        collect: Callable[[], dict[str, Any]],
        path: str | os.PathLike[str],
        run: RunInfo,
        storage_options: Mapping[str, Any] | None,
    ) -> None:
        """Save like ``save_checkpoint`` the dict that ``collect`` returns, whose error reaches all ranks."""
        path, group, storage = file_path(path), self._group, self.storage
        if storage_options is not None:
            if not is_url(path):
                raise ValueError(f"storage_options are for URLs, and {path!r} is none: leave out {storage_options!r}")
            storage = storage.with_options(storage_options)
        if not self._saves_in_background and self._module is None:  # otherwise the strategy enables it
            self.enable_async(Ranks.alone())
        group.background.settle(group.ranks, before=path)
        how: dict[str, Any] = {"options": self.save_options, "storage": storage}
        save(path, partial(self._describe, collect), group, run=run, in_background=self._saves_in_background, **how)
        if self._exports and group.ranks.rank == 0:
            export = partial(export_beside, absolute_path(path), storage)
            group.background.follow(path, export, "not exported for transformers")
        self._warn(group.background.notes())

    def _describe(self, collect: Callable[[], dict[str, Any]]) -> Snapshot:
        """Return this rank's part of a save of a checkpoint dict, or without a module also of a state of Fabric."""
        checkpoint, module = collect(), self._module
        state = {key: value for key, value in checkpoint.items() if key != RANK_STATE}
        if module is None and self._described_by["adapters_only"]:
            raise StateError(
                "ShardCkptIO(adapters_only=True) needs the module to find its frozen parameters, and Lightning's own "
                "strategies don't pass it to a CheckpointIO. Use ShardedStrategy, also with one device."
            )
        if module is None and not (is_lightning_dict(checkpoint) and (VERSION in checkpoint or not self._is_fabric)):
            state = lift_state_dicts(checkpoint)
        described = snapshot(state, module, checkpoint.get(RANK_STATE), self.names, **self._described_by)
        if module is None or self._group.ranks.rank != 0:
            return described
        return add_libraries(described, module, self.names.state)

    def wait(self) -> None:
        """Wait until all saves are complete and all removals are done, and raise the failure of a save, once.

        Collective under ``ShardedStrategy``: every rank must call it. With other strategies only rank 0 waits.
        """
        try:
            self._group.background.settle(self._group.ranks)
        finally:
            self._warn(self._group.background.notes())

    def _warn(self, notes: Iterable[str]) -> None:
        for note in notes if self._group.ranks.rank == 0 else ():
            warnings.warn(note, stacklevel=3)

    # --- load ---

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the whole checkpoint as Lightning's dict, for strategies that hold whole tensors. Not collective.

        Also reads files of ``torch.save``, and weights of other formats under the module's names. Waits for
        asynchronous saves of this process. ``map_location`` and ``weights_only`` (True by default) are as in
        ``torch.load``.

        Raises:
            StateError: with ``key_mapping``.
        """
        if not self.key_mapping.is_empty:
            raise StateError(
                "ShardCkptIO(key_mapping=…) is for ShardedStrategy; for another strategy, write the checkpoint under "
                "other names: lightning_shardckpt.consolidate has a key_mapping, too"
            )
        checkpoint = self.load_whole(path, map_location, weights_only)
        if self._is_fabric:
            return states_of_checkpoint(checkpoint)
        if is_torch_file(file_path(path)) and not is_lightning_dict(checkpoint):
            checkpoint = lift_state_dicts(checkpoint, only="model")
        return as_trainer_checkpoint(checkpoint, file_path(path))

    def load_whole(
        self, path: str | os.PathLike[str], map_location: MAP_LOCATION = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the whole checkpoint unchanged, with the arguments of ``load_checkpoint``. Not collective."""
        drain_all()
        path, safe = file_path(path), weights_only is not False
        if is_torch_file(path):
            plain: dict[str, Any] = torch.load(path, map_location=map_location or "cpu", weights_only=safe)
            return plain
        verify, storage = self.load_options.verify, self.storage
        checkpoint = load_full(path, map_location, verify=verify, weights_only=safe, storage=storage)
        if frozen := checkpoint.pop(FROZEN, None):
            note = (
                f"{path!r} lacks {count_text(len(frozen), 'frozen parameter')}: it was saved with adapters_only=True. "
                "Load it with ShardedStrategy, which leaves them unchanged; with another strategy set "
                "strict_loading=False on the LightningModule."
            )
            self._warn([note])
        return checkpoint

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Delete the checkpoint, the link or the plain file at ``path``, if there is one.

        Anything that can't be deleted, or is not a checkpoint, stays, with a warning. The removal waits for a pending
        save; if that fails, the checkpoint at ``path`` stays, with a warning. A checkpoint that ``shardckpt follow``
        evaluates is deleted after that.
        """
        place, background = absolute_path(path), self._group.background  # a chdir may come before the removal
        folder = os.path.dirname(place.rstrip("/"))
        background.follow(
            file_path(path), lambda: RunFolder(folder, self.storage).remove(place), "not removed", at_once=True
        )
        self._warn(background.notes())


def as_trainer_checkpoint(checkpoint: dict[str, Any], path: str, *, fitting: bool = True) -> dict[str, Any]:
    """Return a checkpoint dict of a Trainer; one that another program saved begins at step 0, with a warning in a fit.

    ``checkpoint`` is not changed.
    """
    if VERSION not in checkpoint:
        checkpoint = {"epoch": 0, "global_step": 0, "lr_schedulers": [], **checkpoint, VERSION: lightning.__version__}
        if fitting:
            rank_zero_warn(
                f"{path!r} is not of Lightning's Trainer: it has no loops and no learning rate schedulers. Training "
                "begins at step 0, with its weights and optimizer state. (Fabric's own strategies take "
                "lightning_shardckpt.fabric.ShardCkptIO.)"
            )
    return checkpoint
