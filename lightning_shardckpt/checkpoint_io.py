"""``ShardCkptIO``: the CheckpointIO of Lightning and Fabric for sharded checkpoints.

It translates: Lightning's calls and dicts into those of ``checkpoint/``. Who saves together, with which module, it is
told by ``attach``; without that it is the CheckpointIO of one of Lightning's own strategies, on rank 0 alone.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import lightning
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.serialization import MAP_LOCATION

from lightning_shardckpt.checkpoint.checkpoint import Loaded, load
from lightning_shardckpt.checkpoint.checkpoint_options import (
    AsyncOptions,
    ExtraFormat,
    LoadOptions,
    Replicas,
    SaveOptions,
)
from lightning_shardckpt.checkpoint.finished_saves import FinishedSave
from lightning_shardckpt.checkpoint.hf_mirror import check_place
from lightning_shardckpt.checkpoint.lightning_save import Attached, LightningSave
from lightning_shardckpt.checkpoint.load_targets import PARTS, LoadTargets, check_parts, check_patterns
from lightning_shardckpt.checkpoint.save_series import AsyncSaves, SaveSeries, remove_any
from lightning_shardckpt.checkpoint.whole_load import is_torch_file, load_whole
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.errors import StateError
from lightning_shardckpt.state.documents import FROZEN
from lightning_shardckpt.state.hf_document import HuggingFace
from lightning_shardckpt.state.model import WholeNames
from lightning_shardckpt.state.state_dicts import VERSION, checkpoint_of_states, is_lightnings, states_of_checkpoint
from lightning_shardckpt.storage.local.local_storage import LocalStorage
from lightning_shardckpt.storage.protocol import Storage
from lightning_shardckpt.storage.router import StorageRouter, file_path, is_url
from lightning_shardckpt.system.pickle_by_arguments import PickleByArguments
from lightning_shardckpt.system.text import count_text
from lightning_shardckpt.system.threads import drain_all

_FIXED = {"size_per_shard", "verify", "also", "replicas", "incremental", "use_async", "max_pending"}
_WITHOUT_STRATEGY = (
    "it was saved with adapters_only=True. Load it with ShardedStrategy, which lets them be as they are; with another "
    "strategy set strict_loading=False on the LightningModule."
)


class ShardCkptIO(PickleByArguments, CheckpointIO):
    """Writes a checkpoint as a directory of per-rank shard files with indexes, and reads it on any topology.

    With ``ShardedStrategy`` every rank writes its own slices. With those strategies of Lightning and Fabric that call a
    CheckpointIO on rank 0 alone, that rank writes everything, and each rank loads whole tensors; a checkpoint from
    any topology can be loaded there. FSDPStrategy, ModelParallelStrategy and DeepSpeedStrategy don't belong to them:
    they write shards in their own format, and can't load the directory of a whole model that a CheckpointIO saves. With
    Fabric's own strategies, use ``lightning_shardckpt.fabric.ShardCkptIO``.

    Args:
        size_per_shard: limit of a shard file in MB (2^20 bytes); a larger tensor gets a file of its own.
        verify: compare all loaded bytes with their checksums. Under ``ShardedStrategy`` each tensor is filled as it is
            verified; if something is corrupted the run ends, and the module can't be used before it has loaded another
            checkpoint. With "first", and always in Fabric, nothing in memory changes before all is verified, for which
            live tensors are read twice.
        use_async: return from a save when all is copied to host memory; a thread of every rank writes and commits it
            while training goes on. An error there is raised on all ranks at the next save, in ``wait`` or at the end of
            the run. Loads wait, removals queue up after the saves before them, and the process ends when all is done.
        max_pending: how many asynchronous saves may wait while another one is being written; one more waits until
            there is room. Host memory for so many copies and one is kept until the end of the run.
        cast: read floating tensors into a model of another floating dtype, with a note, so that a run in ``bf16-true``
            can go on from one in float32; moments that have their parameter's dtype keep to it. False refuses that.
        sync_files: make a save durable before it returns. With False it is faster, and still survives a death of the
            process at any moment, old or new; after a crash of the machine or a loss of power neither may be left.
        replicas: whether tensors that several ranks hold must be the ``"same"``, or the ``"first"`` rank's are stored.
            Those that differ (training without a reduction of gradients, a bug) would be mixed: an error names them.
        adapters_only: save only what training changes: adapters of PEFT, other parameters that are trained, buffers,
            optimizers and the rest of the trainer. Frozen parameters of the base model are left out, and a load leaves
            them as they are, so the module must have them from elsewhere. For ``ShardedStrategy``.
        incremental: hard-link shard files whose content an earlier checkpoint of this run in the same directory has,
            instead of writing them again, such as those of a frozen base model. That they are equal is
            found by checksums of what is in memory. Links share their bytes on the disk, so damage of one is damage of
            all; deleting one checkpoint leaves the others whole. Where the place has no links, as
            object stores, everything is written, with a note.
        also: with "huggingface", every rank writes its slices of the model a second time, where they belong in the
            files that ``from_pretrained`` reads, into the same directory: the checkpoint can be loaded by transformers
            when it is committed. For a LightningModule that has a Hugging Face model; not on object stores.
        storage_options: for URLs, passed to ``fsspec.filesystem``, such as ``endpoint_url``, ``key`` and ``secret``.
            Lightning's ModelCheckpoint also looks at its ``dirpath``, and has no such options: give it what it needs by
            environment variables, such as ``AWS_ENDPOINT_URL``.
        throttle_uploads: for URLs, let only one rank of each node upload at a time.
        pre_download: for URLs, a local folder to which the files that a rank needs are copied before they are read,
            once per node, and where they are found again; by the id of the save, so nothing stale is read.
        resume: what ``fit`` takes from its ``ckpt_path``, by default all: "model", "optimizer" (the state of
            parameters), "param_groups" (learning rates and other hyper-parameters of optimizers), "schedulers",
            "loops" (epochs and steps), "data" (the position in it, and the state of a LightningDataModule),
            "callbacks" and "random" (states of random number generators). What is not named stays as the Trainer made
            it. For ``ShardedStrategy``; ``validate``, ``test`` and ``predict`` take the model whatever it says.
        resume_skip: patterns of names of tensors that ``fit`` leaves as they are, such as ``"head.*"``, with the state
            that optimizers have of them; names as ``metadata`` lists them, so that ``"optimizer/0/param_groups/*/lr"``
            leaves learning rates. For ``ShardedStrategy``. It is an error if a pattern is the name of nothing.
        pickle_objects: pickle objects that are no plain values (encoders, scalers, classes) in hyper-parameters, the
            state of callbacks and schedulers, and what ``on_save_checkpoint`` adds. Without it they are refused, or of
            hyper-parameters left out. They are read with ``weights_only=False`` alone, which executes what is in them.
    """

    _of_fabric = False

    def __init__(
        self,
        size_per_shard: float = 1024,
        verify: bool | Literal["first"] = True,
        use_async: bool = False,
        max_pending: int = 1,
        cast: bool = True,
        sync_files: bool = True,
        replicas: Replicas = "same",
        adapters_only: bool = False,
        incremental: bool = False,
        also: ExtraFormat | None = None,
        storage_options: Mapping[str, Any] | None = None,
        throttle_uploads: bool = False,
        pre_download: str | os.PathLike[str] | None = None,
        resume: Sequence[str] | None = None,
        resume_skip: Sequence[str] = (),
        pickle_objects: bool = False,
    ) -> None:
        self.save_options = SaveOptions(size_per_shard, also, replicas, incremental)
        async_options = AsyncOptions(max_pending)
        self.async_saves = AsyncSaves(async_options if use_async else None)
        self.load_options = LoadOptions(verify=bool(verify))
        if verify not in (True, False, "first"):
            raise ValueError(f'verify is True, False or "first", got {verify!r}')
        self._verify_first = verify == "first"
        if adapters_only and also is not None:
            raise ValueError(f"adapters_only leaves out the base model, so also={also!r} cannot write it: choose one")
        self.resume, self.resume_skip = check_parts(resume), check_patterns("resume_skip", resume_skip)
        self.cast, self.adapters_only, self.pickle_objects = cast, adapters_only, pickle_objects
        self.storage: Storage = StorageRouter(
            LocalStorage(sync_files=sync_files),
            storage_options=storage_options,
            throttle_uploads=throttle_uploads,
            pre_download=pre_download,
        )
        self._saves, self._hugging_face = SaveSeries(self.async_saves), HuggingFace()
        self._attached = Attached()

    @property
    def names(self) -> WholeNames:
        """Names of the whole model, also on a pipeline stage that has a part of it."""
        return self._attached.names

    @property
    def resumes_partly(self) -> bool:
        """True if ``fit`` leaves something of its checkpoint."""
        return bool(self.resume_skip) or self.resume != frozenset(PARTS)

    @property
    def finished_saves(self) -> tuple[FinishedSave, ...]:
        """The latest saves that are complete, at most 100, in the order in which they ended.

        On every rank that saves: under ``ShardedStrategy`` all, with Lightning's own strategies rank 0.
        """
        return self._saves.finished.latest()

    # --- who saves ---

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute that is no option: nothing would look at one that is set later."""
        if name in _FIXED:
            raise AttributeError(f"{name} is an option of ShardCkptIO({name}=…); make another ShardCkptIO to change it")
        super().__setattr__(name, value)

    def attach(
        self, ranks: Ranks, module: nn.Module, topology: Mapping[str, int], *, names: WholeNames | None = None
    ) -> None:
        """Let all of ``ranks`` call this object together, from now on, to save and load ``module``.

        Args:
            ranks: who saves and loads together.
            module: of this rank; of a pipeline, its stages' part.
            topology: the sizes of mesh axes by name, for the root index.
            names: of the whole model, where ``module`` is a part of it.
        """
        self._attached = Attached(ranks, module, topology, names or WholeNames())

    def teardown(self) -> None:
        """Wait for asynchronous saves, as ``wait`` does, free their memory, and forget the ranks of ``attach``.

        Collective under ``ShardedStrategy``, as ``wait`` is.
        """
        try:
            self.wait()
        finally:
            self.async_saves.disable()
            self._attached = Attached()

    def leave(self, error: BaseException) -> None:
        """Finish what is queued on a rank that got an exception, which others may not have; ``error`` gets notes.

        Not collective. After it a save is complete on return.
        """
        self._warn(self.async_saves.leave(error))

    # --- save ---

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Save Lightning's checkpoint dict at ``path``; complete, and durable with ``sync_files``, if not asynchronous.

        Collective under ``ShardedStrategy``: every rank must call it.

        Args:
            checkpoint: Lightning's dict.
            path: where to.
            storage_options: for this URL, in place of those of ``ShardCkptIO``.

        Raises:
            Exception: what an asynchronous save before this one failed with; this one is not begun then.
            ValueError: for ``also`` and a URL, and for ``storage_options`` and a path of the file system.
            StateError: listing state that cannot be stored, by path; for ``adapters_only`` under another strategy.
        """
        where, attached = os.fspath(path), self._attached
        storage = self._storage_for(where, storage_options)
        saving = LightningSave(
            checkpoint,
            attached,
            self._hugging_face,
            adapters_only=self.adapters_only,
            pickle_objects=self.pickle_objects,
            of_fabric=self._of_fabric,
        )
        check_place(where, self.save_options.also)
        if self.async_saves.background is None and attached.module is None:  # else the strategy has said when
            self.async_saves.enable(Ranks.alone())
        notes = self._saves.save(
            where,
            saving.describe,
            ranks=attached.ranks,
            about=saving.about,
            options=self.save_options,
            storage=storage,
        )
        self._warn([*saving.notes, *notes])

    def _storage_for(self, path: str, options: Mapping[str, Any] | None) -> Storage:
        if options is None:
            return self.storage
        if not is_url(path) or not isinstance(self.storage, StorageRouter):
            raise ValueError(f"storage_options are for URLs, and {path!r} is none: leave out {options!r}")
        return self.storage.with_options(options)

    # --- asynchronous saves ---

    def wait(self) -> None:
        """Wait until every asynchronous save is complete, durable with ``sync_files``, and what was to be removed is.

        Collective under ``ShardedStrategy``: every rank must call it. With Lightning's own strategies rank 0 alone has
        something to wait for.

        Raises:
            Exception: what a save failed with, on every rank; each failure is raised once.
        """
        try:
            self.async_saves.wait(self._attached.ranks)
        finally:
            self._warn(self.async_saves.notes())

    def _warn(self, notes: Iterable[str]) -> None:
        if self._attached.ranks.rank == 0:
            for note in notes:
                warnings.warn(note, stacklevel=3)

    # --- load ---

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the whole checkpoint as Lightning's dict, for strategies that hold whole tensors. Not collective.

        Also reads plain files of ``torch.save``, and weights of other formats whose names are the module's. Waits for
        asynchronous saves of this process.

        Args:
            path: the checkpoint.
            map_location: the device for all tensors, or a dict or function as in ``torch.load``; by default the CPU.
            weights_only: for a file of ``torch.save``, as in ``torch.load``; True by default.

        Raises:
            TypeError: for a ``map_location`` that is none of these.
            StateError: with ``resume`` or ``resume_skip``.
        """
        if self.resumes_partly:
            raise StateError(
                "ShardCkptIO(resume=…, resume_skip=…) must know whether it is fit that loads, which Lightning's own "
                "strategies don't tell a CheckpointIO. Use ShardedStrategy, with one device, too."
            )
        found = self.load_whole(path, map_location, weights_only)
        if self._of_fabric:
            return states_of_checkpoint(found)
        if is_torch_file(path := file_path(path)):
            of_objects = None if is_lightnings(found) else checkpoint_of_states(found, nested=True, only="model")
            if of_objects is None:
                return found
            found = of_objects
        return as_of_a_trainer(found, path)

    def load_whole(
        self,
        path: str | os.PathLike[str],
        map_location: MAP_LOCATION = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Return the whole checkpoint as it is: of a Trainer, of Fabric, or of other programs. Not collective.

        Arguments and errors are those of ``load_checkpoint``.
        """
        drain_all()
        path, safe = file_path(path), weights_only is not False
        verify, storage = self.load_options.verify, self.storage
        found = load_whole(path, map_location, verify=verify, weights_only=safe, storage=storage)
        self._saves.loaded(path)
        if not is_torch_file(path) and (frozen := found.pop(FROZEN, None)):
            self._warn([f"{path!r} lacks {count_text(len(frozen), 'frozen parameter')}: {_WITHOUT_STRATEGY}"])
        return found

    def load_into(
        self,
        path: str | os.PathLike[str],
        targets: LoadTargets,
        *,
        strict: bool,
        weights_only: bool | None = None,
        pick_rank: Callable[[Any], int] | None = None,
        partly: bool = False,
        filling: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Loaded:
        """Load straight into live tensors: a sharded checkpoint of any topology, or one of another format.

        Collective: every rank must call it.

        Args:
            path: the checkpoint.
            targets: what is filled.
            strict: raise one MismatchError for all differences instead of loading the rest.
            weights_only: for a file of ``torch.save``, as in ``torch.load``; True by default.
            pick_rank: see ``checkpoint.load``.
            partly: leave out what ``resume`` and ``resume_skip`` say.
            filling: see ``checkpoint.load``.
        """
        drain_all()
        targets = replace(targets, cast=self.cast)
        if partly:
            targets = replace(targets, parts=self.resume, skip=self.resume_skip)
        options = replace(
            self.load_options, strict=strict, weights_only=weights_only is not False, verify_first=self._verify_first
        )
        loaded = load(
            os.fspath(path),
            targets,
            ranks=self._attached.ranks,
            options=options,
            filling=filling,
            pick_rank=pick_rank,
            storage=self.storage,
        )
        self._saves.loaded(os.fspath(path))
        self._warn(loaded.notes)
        return loaded

    # --- remove ---

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Delete the checkpoint, the link or the plain file at ``path``; does nothing where there is nothing.

        What can't be deleted, or is no checkpoint, stays, with a warning: training must not end for that. After an
        asynchronous save it is removed when that is complete; if that failed, it stays, with a warning.
        """
        remove = partial(remove_any, file_path(path), self.storage)
        if self.async_saves.background is None:
            self._warn(remove())
        else:
            self.async_saves.background.remove(file_path(path), remove)
            self._warn(self.async_saves.notes())


def as_of_a_trainer(checkpoint: dict[str, Any], path: str, *, fitting: bool = True) -> dict[str, Any]:
    """Return Lightning's checkpoint dict, also where the checkpoint is not a Trainer's: it begins at step 0 then.

    Args:
        checkpoint: the dict that was read; it is not changed.
        path: of the checkpoint, for the warning.
        fitting: whether training is about to begin, of which the warning tells.
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
