"""``ShardCkptIO``: Lightning's door to sharded checkpoints."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, get_args

import lightning
import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.fabric.strategies.strategy import Strategy as FabricStrategy
from lightning.pytorch.core.saving import _load_state
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.migration.utils import _pl_migrate_checkpoint
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from lightning_shardckpt import checkpoint as engine
from lightning_shardckpt.assigned import check_asks
from lightning_shardckpt.background import Background
from lightning_shardckpt.collector import resting
from lightning_shardckpt.describing import about_of
from lightning_shardckpt.errors import MismatchError, StateError
from lightning_shardckpt.formats.places import is_safetensors
from lightning_shardckpt.loading import Live
from lightning_shardckpt.mirroring import Also
from lightning_shardckpt.parts import PARTS, checked_parts, checked_patterns
from lightning_shardckpt.pending import drain_all
from lightning_shardckpt.planning import Plans
from lightning_shardckpt.pretrained.fitted import fitted_to
from lightning_shardckpt.ranks import Ranks
from lightning_shardckpt.saving import Replicas
from lightning_shardckpt.state.adapters import adapter_tensors
from lightning_shardckpt.state.documents import FROZEN
from lightning_shardckpt.state.huggingface import HuggingFace
from lightning_shardckpt.state.model import WholeNames, canonical_name, is_value, model_leaves
from lightning_shardckpt.state.snapshot import Snapshot
from lightning_shardckpt.state.statedicts import checkpoint_of_states, is_lightnings, states_of_checkpoint
from lightning_shardckpt.state.trainer import snapshot
from lightning_shardckpt.state.tree import Dropped
from lightning_shardckpt.storage.local import LocalStorage
from lightning_shardckpt.storage.places import Places, file_path, is_url
from lightning_shardckpt.storage.protocol import Storage
from lightning_shardckpt.storage.remote import RemoteStorage

_T = TypeVar("_T")
_VERSION = "pytorch-lightning_version"
_WITHOUT_STRATEGY = (
    "it was saved with adapters_only=True. Load it with ShardedStrategy, which lets them be as they are; with another "
    "strategy set strict_loading=False on the LightningModule."
)
RANK_STATE = "rank_state"
"""Key of Lightning's checkpoint dict under which ``ShardedStrategy`` passes what only this rank knows."""


class ShardCkptIO(CheckpointIO):
    """Writes a checkpoint as a directory of per-rank shard files with indexes, and reads it on any topology.

    With ``ShardedStrategy`` every rank writes its own slices. With those strategies of Lightning and Fabric that call a
    CheckpointIO on rank 0 alone, that rank writes everything, and each rank loads whole tensors; a checkpoint from
    any topology can be loaded there. Those that call none, such as FSDPStrategy, are refused.

    Args:
        size_per_shard: limit of a shard file in MB (2^20 bytes); a larger tensor gets a file of its own.
        verify: compare all loaded bytes with their checksums, before anything in memory changes.
        use_async: return from a save when all is copied to host memory; a thread of every rank writes and commits it
            while training goes on. An error there is raised on all ranks at the next save, in ``wait`` or at the end of
            the run. Loads wait, removals queue up behind the saves before them, and nothing leaves the process undone.
        max_pending: how many asynchronous saves may wait behind the one that is being written; one more waits until
            there is room. Host memory for so many copies and one is kept until the end of the run.
        overlap_copy: return from an asynchronous save at once, and copy optimizer state and the parameters that
            optimizers have during the next forward and backward; no optimizer steps before that is done. If something
            else changes one of them, and torch counts that up as its version, the save fails; see ``CopiesBehind``.
            Lightning's own strategies copy before they return, as without it.
        cast: read floating tensors into a model of another floating dtype, with a note, so that a run in ``bf16-true``
            can go on from one in float32; moments that have their parameter's dtype keep to it. False refuses that.
        sync_files: make a save durable before it returns. With False it is faster, and still survives a death of the
            process at any moment, old or new; behind a crash of the machine or a loss of power neither may be left.
        share_reads: on a load under ``ShardedStrategy``, let ranks that hold the same of a DTensor (replicas of HSDP,
            norms under tensor parallelism) each read and verify a share of it and exchange the shares. That spares a
            network file system, or storage slower than the interconnect; from a page cache each is faster alone. By
            default it is measured where there is much to share; True or False says it.
        replicas: whether tensors that several ranks hold must be the ``"same"``, or the ``"first"`` rank's are stored.
            Those that differ (training without a reduction of gradients, a bug) would be mixed: an error names them.
        adapters_only: save what training changes alone: adapters of PEFT, other parameters that are trained, buffers,
            optimizers and the rest of the trainer. Frozen parameters of the base model are left out, and a load leaves
            them as they are, so the module must have them from elsewhere. For ``ShardedStrategy``.
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
    """

    def __init__(
        self,
        size_per_shard: float = 1024,
        verify: bool = True,
        use_async: bool = False,
        max_pending: int = 1,
        overlap_copy: bool = False,
        cast: bool = True,
        sync_files: bool = True,
        share_reads: bool | None = None,
        replicas: Replicas = "same",
        adapters_only: bool = False,
        also: Also | None = None,
        storage_options: Mapping[str, Any] | None = None,
        throttle_uploads: bool = False,
        pre_download: str | os.PathLike[str] | None = None,
        resume: Sequence[str] | None = None,
        resume_skip: Sequence[str] = (),
    ) -> None:
        if size_per_shard <= 0:
            raise ValueError(f"size_per_shard is a size in MB and must be positive, got {size_per_shard}")
        if max_pending < 0:
            raise ValueError(f"max_pending is a number of saves and can't be negative, got {max_pending}")
        if also not in (None, "huggingface"):
            raise ValueError(f'also is "huggingface" or None, got {also!r}')
        if overlap_copy and not use_async:
            raise ValueError("overlap_copy is about asynchronous saves: set use_async=True, too")
        if adapters_only and also is not None:
            raise ValueError(f"adapters_only leaves out the base model, so also={also!r} cannot write it: choose one")
        self.resume, self.resume_skip = checked_parts(resume), checked_patterns("resume_skip", resume_skip)
        self.size_per_shard = size_per_shard
        self.verify, self.cast = verify, cast
        self.share_reads, self.adapters_only = share_reads, adapters_only
        if replicas not in get_args(Replicas):
            raise ValueError(f'replicas is "same" or "first", got {replicas!r}')
        self.also, self.replicas = also, replicas
        self.overlap_copy = overlap_copy
        self.use_async, self.max_pending = use_async, max_pending
        self._background: Background | None = None
        self._hook: RemovableHandle | None = None
        self._closure_first: Optimizer | None = None
        self._told_of_waiting = False
        self.storage: Storage = Places(
            LocalStorage(sync_files=sync_files),
            storage_options=storage_options,
            throttle_uploads=throttle_uploads,
            pre_download=pre_download,
        )
        self._plans = Plans()
        self._hugging_face = HuggingFace()
        self._ranks = Ranks.alone()
        self._module: nn.Module | None = None
        self._topology: dict[str, int] = {}
        self.names = WholeNames()
        self._fabric: FabricStrategy | None = None  # it asks for Fabric's states

    def assigned_to(self, strategy: Strategy | FabricStrategy) -> None:
        """From now on, save and load what this strategy asks for: a Trainer's checkpoint, or the state of Fabric.

        Raises:
            TypeError: for a strategy that writes and reads checkpoints by itself, saying what to do.
        """
        check_asks(strategy, type(self).__name__)
        self._ranks, self._module, self._topology, self.names = Ranks.alone(), None, {}, WholeNames()
        self._fabric = strategy if isinstance(strategy, FabricStrategy) else None

    def attach(
        self, ranks: Ranks, module: nn.Module, topology: dict[str, int], *, names: WholeNames | None = None
    ) -> None:
        """From now on, all of ``ranks`` call this object together to save and load ``module``.

        ``names`` is of the whole model, where a rank's ``module`` is a pipeline stage and has a part of it.
        """
        self._ranks, self._module, self._topology = ranks, module, topology
        self.names = names or WholeNames()

    def go_behind(self, ranks: Ranks) -> None:
        """From now until ``teardown`` or ``leave``, save asynchronously over ``ranks``, which are for that alone.

        Behind those a save is complete on return again: nobody might come to ask for its errors.
        """
        self._behind(ranks)
        if self.overlap_copy and self._hook is None:
            self._hook = register_optimizer_step_pre_hook(self._before_step)

    def _stay(self) -> None:
        """Save synchronously again."""
        self._background = None
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _behind(self, ranks: Ranks) -> Background:
        self._background = Background(ranks, self.max_pending)
        return self._background

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Save Lightning's checkpoint dict at ``path``; complete, and durable with ``sync_files``, if not asynchronous.

        Or the state of Fabric, with state dicts of objects in their places.
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
        if self.adapters_only and self._module is None:
            raise StateError(
                "ShardCkptIO(adapters_only=True) must know the module to tell what is frozen, which Lightning's own "
                "strategies don't tell a CheckpointIO. Use ShardedStrategy, with one device, too."
            )
        storage = self._storage_for(path, storage_options)
        if self.also is not None and is_url(path):
            raise ValueError(
                f"also={self.also!r} needs a file system, where ranks can write parts of one file; {os.fspath(path)!r} "
                "is a URL. Leave it out, and export the checkpoint with `python -m lightning_shardckpt.consolidate`"
            )
        taken: list[Snapshot] = []

        def describe() -> Snapshot:
            given = checkpoint if self._module is not None else self._lightnings(checkpoint)
            rest = {k: v for k, v in given.items() if k != RANK_STATE}
            own, rank_state = self._module, checkpoint.get(RANK_STATE)
            found = snapshot(rest, own, rank_state, self.names, adapters_only=self.adapters_only)
            taken.append(self._with_hugging_face(found))
            return taken[0]

        background = self._background
        if background is None and self.use_async and self._module is None:  # Lightning's own strategy
            background = self._behind(Ranks.alone())
        about = about_of(checkpoint, self._topology)
        common: dict[str, Any] = {"ranks": self._ranks, "about": about, "size_per_shard": self.size_per_shard}
        common |= {"storage": storage, "plans": self._plans, "also": self.also, "replicas": self.replicas}
        overlap = self.overlap_copy and self._module is not None  # else nobody would call wait_for_copies
        if background is None:
            notes = engine.save(os.fspath(path), describe, **common)
        else:
            engine.save_async(os.fspath(path), describe, **common, background=background, overlap_copy=overlap)
            notes = self._notes_of(background)
        self._warn([*taken[0].notes, *(["\n".join(notes)] if notes else [])])

    def _lightnings(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """What another strategy gave, as Lightning's checkpoint dict: Fabric's has state dicts of objects."""
        if is_lightnings(checkpoint) and not (self._fabric is not None and _VERSION not in checkpoint):
            return checkpoint
        found = checkpoint_of_states(checkpoint, nested=False)
        return checkpoint if found is None else found

    def _storage_for(self, path: str | os.PathLike[str], options: Mapping[str, Any] | None) -> Storage:
        if options is None:
            return self.storage
        if not is_url(path) or not isinstance(self.storage, Places):
            raise ValueError(f"storage_options are for URLs, and {os.fspath(path)!r} is none: leave out {options!r}")
        return self.storage.having(options)

    def _with_hugging_face(self, found: Snapshot) -> Snapshot:
        """With what the module knows about Hugging Face, on the rank that stores it."""
        if self._module is None or self._ranks.rank != 0 or "model" not in found.leaves:
            return found
        document, notes = self._hugging_face.document(self._module, self.names.state)
        documents = found.documents if document is None else {**found.documents, "huggingface": document}
        return replace(found, documents=documents, notes=(*found.notes, *notes))

    def _notes_of(self, background: Background) -> list[str]:
        notes = background.notes()
        if background.waited and not self._told_of_waiting:
            self._told_of_waiting = True
            notes.append(
                f"a save waited until an earlier one was written: saves come faster than they can be written, and only "
                f"max_pending={self.max_pending} may wait. This is said once."
            )
        return notes

    def wait(self) -> None:
        """Wait until every asynchronous save is complete, durable with ``sync_files``, and what was to be removed is.

        Collective under ``ShardedStrategy``: every rank must call it. With Lightning's own strategies rank 0 alone has
        something to wait for.

        Raises:
            Exception: what a save failed with, on every rank; each failure is raised once.
        """
        if self._background is None:
            return
        try:
            self._background.settle(self._ranks)
        finally:
            notes = self._notes_of(self._background)
            self._warn(["\n".join(notes)] if notes else [])

    def wait_for_copies(self) -> None:
        """With ``overlap_copy``, wait until parameters and optimizer state may change. Not collective."""
        if self._background is not None:
            self._background.wait_for_copies()

    @contextmanager
    def waiting_between(self, optimizer: Optimizer, closure: Callable[[], _T]) -> Iterator[Callable[[], _T]]:
        """Around a step of ``optimizer``: wait behind the closure, which has forward and backward, if that comes first.

        It does in torch's own optimizers. Others, and those that step meanwhile, wait in the beginning.
        """

        def waiting() -> _T:
            found = closure()
            self.wait_for_copies()
            return found

        self._closure_first = optimizer if type(optimizer).__module__.startswith("torch.optim") else None
        try:
            yield waiting
        finally:
            self._closure_first = None

    def _before_step(self, optimizer: Optimizer, *args: Any) -> None:
        if optimizer is not self._closure_first:
            self.wait_for_copies()

    def leave(self, error: BaseException) -> None:
        """On a rank that got an exception, which others may not have: finish what is queued; ``error`` gets notes.

        Not collective. Behind it a save is complete on return.
        """
        background = self._background
        self._stay()
        if background is not None:
            background.leave(error)
            notes = self._notes_of(background)
            self._warn(["\n".join(notes)] if notes else [])

    def _warn(self, notes: Iterable[str]) -> None:
        if self._ranks.rank == 0:
            for note in notes:
                warnings.warn(note, stacklevel=3)

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """The whole checkpoint as Lightning's dict, for strategies that hold whole tensors. Not collective.

        For one of Fabric, the state that was saved, as Fabric's own strategies distribute it.

        Also reads plain files of ``torch.save``, and weights of other formats whose names are the module's. Waits for
        asynchronous saves of this process.

        Args:
            path: the checkpoint.
            map_location: the device for all tensors; by default the CPU. For a file of ``torch.save``, as in
                ``torch.load``.
            weights_only: for a file of ``torch.save``, as in ``torch.load``; True by default.

        Raises:
            TypeError: for a ``map_location`` that is no device, and a checkpoint that is no file of ``torch.save``.
            StateError: with ``resume`` or ``resume_skip``.
        """
        path = file_path(path)
        if self.resumes_partly:
            raise StateError(
                "ShardCkptIO(resume=…, resume_skip=…) must know whether it is fit that loads, which Lightning's own "
                "strategies don't tell a CheckpointIO. Use ShardedStrategy, with one device, too."
            )
        if self._fabric is not None and self.use_async:
            drain_all()
            self._fabric.barrier("asynchronous saves of rank 0")
        found = self.load_whole(path, map_location, weights_only)
        if self._fabric is not None:
            return states_of_checkpoint(found)
        if os.path.isfile(path) and not is_safetensors(os.fspath(path)):
            of_objects = None if is_lightnings(found) else checkpoint_of_states(found, nested=True, only="model")
            if of_objects is None:
                return found
            found = of_objects
        return as_of_a_trainer(found, os.fspath(path))

    @property
    def resumes_partly(self) -> bool:
        """Whether ``fit`` leaves something of its checkpoint."""
        return bool(self.resume_skip) or self.resume != frozenset(PARTS)

    def load_whole(
        self, path: str | os.PathLike[str], map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """The whole checkpoint as it is: of a Trainer, of Fabric, or of other programs. Not collective.

        Arguments and errors are those of ``load_checkpoint``.
        """
        drain_all()
        path, safe = file_path(path), weights_only is not False
        if os.path.isfile(path) and not is_safetensors(os.fspath(path)):
            plain: dict[str, Any] = torch.load(path, map_location=map_location or "cpu", weights_only=safe)
            return plain
        device = device_of(map_location)
        found = engine.load_full(os.fspath(path), verify=self.verify, weights_only=safe, storage=self.storage)
        if frozen := found.pop(FROZEN, None):
            self._warn([f"{os.fspath(path)!r} has no {len(frozen)} frozen parameters: {_WITHOUT_STRATEGY}"])
        return moved_to(found, device)

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
        regroup: Callable[[Mapping[str, Any]], None] | None = None,
        partly: bool = False,
    ) -> engine.Loaded:
        """Load straight into live tensors: a sharded checkpoint of any topology, or one of another format.

        Collective: every rank must call it.

        Args:
            path: the checkpoint.
            state_dict: of the live module; its tensors are filled.
            optimizers: the live optimizers; None to load weights only.
            names: FQN by ``id`` of the live parameters.
            strict: raise one MismatchError for all differences instead of loading the rest.
            weights_only: for a file of ``torch.save``, as in ``torch.load``; True by default.
            pick_rank: see ``checkpoint.load``.
            regroup: see ``loading.Live``.
            partly: leave out what ``resume`` and ``resume_skip`` say.
        """
        drain_all()
        with resting():
            tensors = {k: v for k, v in state_dict.items() if not is_value(k, v)}
            leaves, _ = model_leaves(tensors, self._module, self.names)
            extra_state = frozenset(canonical_name(k) for k, v in state_dict.items() if is_value(k, v))
            adapters = adapter_tensors(self._module, leaves.tensors) if self._module is not None else frozenset[str]()
            fitting = partial(fitted_to, module=self._module or nn.Module(), live=leaves, whole=self.names)
            live = Live(leaves, extra_state, optimizers, names, self.names, adapters, fitting)
            live = replace(live, regroup=regroup, cast=self.cast)
            if partly:
                live = replace(live, parts=self.resume, skip=self.resume_skip)
            loaded = engine.load(
                os.fspath(path),
                live,
                ranks=self._ranks,
                strict=strict,
                verify=self.verify,
                weights_only=weights_only is not False,
                pick_rank=pick_rank,
                share_reads=self.share_reads,
                storage=self.storage,
            )
        self._warn(loaded.notes)
        return loaded

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Delete the checkpoint, the link or the plain file at ``path``; does nothing where there is nothing.

        What can't be deleted, or is no checkpoint, stays, with a warning: training must not end for that. Behind an
        asynchronous save it is removed when that is complete; if that failed, it stays, with a warning.
        """

        path = file_path(path)

        def remove() -> list[str]:
            try:
                if is_url(path):
                    return self._removed_from_store(os.fspath(path))
                if os.path.isfile(path) and not os.path.islink(path):
                    os.unlink(path)
                elif os.path.lexists(path):
                    return self.storage.remove(os.fspath(path))
            except OSError as error:
                return [f"not removed: {error}"]
            return []

        if self._background is None:
            self._warn(remove())
        else:
            self._background.remove(os.fspath(path), remove)
            self._warn(self._notes_of(self._background))

    def _removed_from_store(self, url: str) -> list[str]:
        storage = self.storage.of(url) if isinstance(self.storage, Places) else self.storage
        if isinstance(storage, RemoteStorage) and storage.is_object(url):
            storage.delete_object(url)
            return []
        if isinstance(storage, RemoteStorage) and storage.is_empty(url):
            return []
        return storage.remove(url)

    def teardown(self) -> None:
        """Wait for asynchronous saves, as ``wait`` does, and free their memory.

        Collective under ``ShardedStrategy``, as ``wait`` is.
        """
        try:
            self.wait()
        finally:
            self._stay()


def device_of(map_location: Any) -> torch.device:
    """The device that a ``map_location`` names; None is the CPU.

    Raises:
        TypeError: for a function or a dict, since nothing here was on a device when it was stored.
    """
    if map_location is None or isinstance(map_location, str | int | torch.device):
        return torch.device("cpu" if map_location is None else map_location)
    raise TypeError(
        f"map_location is a device, such as 'cpu' or 'cuda:0', got {map_location!r}: a sharded checkpoint does not "
        "record devices that could be mapped"
    )


def moved_to(found: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """A checkpoint dict with all its tensors on a device; what was one tensor stays one."""
    there: dict[int, torch.Tensor] = {}

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return there.setdefault(id(tensor), tensor.to(device)) if tensor.device != device else tensor

    moved: dict[str, Any] = tree_map_only(torch.Tensor, move, found)
    return moved


def as_of_a_trainer(checkpoint: dict[str, Any], path: str, *, fitting: bool = True) -> dict[str, Any]:
    """Lightning's checkpoint dict, also where the checkpoint is of something else: training begins at step 0 then."""
    if _VERSION not in checkpoint:
        checkpoint = {"epoch": 0, "global_step": 0, "lr_schedulers": [], **checkpoint, _VERSION: lightning.__version__}
        if fitting:
            rank_zero_warn(
                f"{path!r} is not of Lightning's Trainer: it has no loops and no learning rate schedulers. Training "
                "begins at step 0, with its weights and optimizer state."
            )
    return checkpoint


_Loadable = TypeVar("_Loadable", bound="pl.LightningModule | pl.LightningDataModule")


def load_from_checkpoint(
    cls: type[_Loadable],
    checkpoint_path: str | os.PathLike[str],
    *,
    map_location: torch.device | str | int | None = None,
    strict: bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
    pre_download: str | os.PathLike[str] | None = None,
    **kwargs: Any,
) -> _Loadable:
    """A module with the hyper-parameters and weights of a checkpoint, on one device, in this process alone.

    What ``LightningModule.load_from_checkpoint`` does for a file, for a sharded checkpoint of any topology. Waits for
    asynchronous saves of this process. Frozen parameters that a checkpoint of adapters leaves out stay as the module
    was constructed, in ``__init__`` or ``configure_model``.

    Args:
        cls: the class to construct.
        checkpoint_path: the checkpoint.
        map_location: the device for the module; the CPU by default.
        strict: whether all names must match; by default as the module's ``strict_loading`` says.
        storage_options: for URLs, see ``ShardCkptIO``.
        pre_download: for URLs, see ``ShardCkptIO``.
        kwargs: hyper-parameters that replace the stored ones.

    Raises:
        StateError: if a hyper-parameter could not be stored and is not given.
        MismatchError: listing what is missing although the checkpoint does not leave it out, for one of adapters.
    """
    drain_all()
    device = device_of(map_location)
    if os.path.isfile(checkpoint_path):
        where: Any = os.fspath(checkpoint_path)
        return cls.load_from_checkpoint(where, map_location=device, strict=strict, **kwargs)  # type: ignore[return-value]
    places = Places(storage_options=storage_options, pre_download=pre_download)
    checkpoint = engine.load_full(os.fspath(checkpoint_path), optimizers=False, storage=places)
    checkpoint = moved_to(checkpoint, device)
    checkpoint = as_of_a_trainer(checkpoint, os.fspath(checkpoint_path), fitting=False)
    checkpoint = _pl_migrate_checkpoint(checkpoint, checkpoint_path=os.fspath(checkpoint_path))
    hyper = checkpoint.setdefault(cls.CHECKPOINT_HYPER_PARAMS_KEY, {})
    hyper.update(kwargs)
    lost = {name: value for name, value in hyper.items() if isinstance(value, Dropped)}
    if lost:
        raise StateError(
            f"checkpoint {os.fspath(checkpoint_path)!r} does not hold the hyper-parameter(s) {lost} of {cls.__name__}; "
            f"pass them: load_from_checkpoint({cls.__name__}, path, {', '.join(f'{name}=…' for name in lost)})"
        )
    if issubclass(cls, pl.LightningModule) and FROZEN in checkpoint:
        return _load_adapters(cls, checkpoint, os.fspath(checkpoint_path), strict, **kwargs)  # type: ignore[return-value]
    if issubclass(cls, pl.LightningModule):
        return _load_state(cls, checkpoint, strict=strict, **kwargs)  # type: ignore[return-value]  # typed as either kind
    return _load_state(cls, checkpoint, **kwargs)  # type: ignore[return-value]


def _load_adapters(
    cls: type[pl.LightningModule], checkpoint: dict[str, Any], path: str, strict: bool | None, **kwargs: Any
) -> pl.LightningModule:
    """The module with what a checkpoint without frozen parameters has; those that it left out may be missing."""
    left_out = checkpoint.pop(FROZEN)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Found keys that are (in the model state dict but not|not in the model)")
        module = _load_state(cls, checkpoint, strict=False, **kwargs)
    assert isinstance(module, pl.LightningModule)
    live = {canonical_name(name) for name in module.state_dict()}
    stored = {canonical_name(name) for name in checkpoint["state_dict"]}
    problems = [f"{name}  in model only" for name in sorted(live - stored - left_out.keys())]
    problems += [f"{name}  in checkpoint only" for name in sorted((stored | left_out.keys()) - live)]
    if problems and (module.strict_loading if strict is None else strict):
        listed = "\n  ".join(problems[:20])
        raise MismatchError(f"cannot load {path!r} into {cls.__name__}: {len(problems)} differences\n  {listed}")
    return module
