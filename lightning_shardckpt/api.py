"""Save and load the objects of a plain torch script, with neither a Trainer nor Fabric.

The state is a dict of modules, optimizers, learning rate schedulers, tensors and plain values, nested as you like; see
``state.nested_dict`` for what becomes of them. The checkpoints are those of ``ShardedStrategy``: each loads the other's
model and optimizers.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn

from lightning_shardckpt.checkpoint import checkpoint
from lightning_shardckpt.checkpoint.background import Background
from lightning_shardckpt.checkpoint.checkpoint_options import (
    AsyncOptions,
    ExtraFormat,
    LoadOptions,
    Replicas,
    SaveOptions,
)
from lightning_shardckpt.checkpoint.nested_load import NestedLoad
from lightning_shardckpt.checkpoint.nested_save import NestedSave, SaveGroup, check_state
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.format.checksum import checksum
from lightning_shardckpt.sources.key_mapping import KeyMapping, KeyMappingLike
from lightning_shardckpt.state.model import WholeNames
from lightning_shardckpt.state.nested_dict import NestedObjects, names_in
from lightning_shardckpt.state.state_dicts import states_of_checkpoint
from lightning_shardckpt.storage.local.local_storage import LocalStorage
from lightning_shardckpt.storage.router import StorageRouter
from lightning_shardckpt.system.threads import drain_all

_log = logging.getLogger(__name__)

_SAVERS: WeakKeyDictionary[dist.ProcessGroup, SaveGroup] = WeakKeyDictionary()
_ALONE = SaveGroup(Ranks.alone(), None)


def save(
    path: str | os.PathLike[str],
    state: dict[str, Any],
    *,
    overwrite: bool = False,
    prefix: str = "",
    named_by: nn.Module | None = None,
    size_per_shard: float = 1024,
    sync_files: bool = True,
    also: ExtraFormat | None = None,
    replicas: Replicas = "same",
    incremental: bool = False,
    process_group: dist.ProcessGroup | None = None,
    storage_options: Mapping[str, Any] | None = None,
    throttle_uploads: bool = False,
) -> None:
    """Write a checkpoint of everything in ``state``; it is complete when this returns, and durable with ``sync_files``.

    Collective: every rank of ``process_group`` must call it, with the same path. Each writes the slices that it has.
    Plain tensors must be the same on all ranks, also in the state of other objects than modules and optimizers; of
    buffers, and of values there, rank 0's are saved. Waits for saves of ``save_async`` that are under way.

    >>> import os, tempfile, torch
    >>> from lightning_shardckpt import load, save
    >>> model = torch.nn.Linear(2, 1)
    >>> path = os.path.join(tempfile.mkdtemp(), "step-3")
    >>> save(path, {"model": model, "step": 3})
    >>> state = {"model": torch.nn.Linear(2, 1), "step": 0}
    >>> load(path, state)
    {}
    >>> state["step"], torch.equal(state["model"].weight, model.weight)
    (3, True)

    Args:
        path: a directory that does not exist yet or is empty; with ``overwrite``, also a checkpoint.
        state: of modules, optimizers, other objects with ``state_dict`` and ``load_state_dict``, tensors, DTensors and
            plain values, in dicts and lists. The keys "state_dict", "optimizer_states" and "rank_state" are for objects
            only.
        overwrite: replace the checkpoint that is there; it can be loaded until the new one is complete.
        prefix: what is put before the names of parameters and buffers.
        named_by: the module that has the parameters of optimizers, where it is not in the state. Without names they are
            saved by number.
        size_per_shard: limit of a shard file in MB (2^20 bytes); a larger tensor gets a file of its own.
        sync_files: make the checkpoint durable before this returns; else a crash of the machine can spoil it.
        also: with "huggingface", write the model a second time, as ``from_pretrained`` reads it; see ``ShardCkptIO``.
        replicas: whether tensors that several ranks hold must be the ``"same"``, or the ``"first"`` rank's are stored.
        incremental: hard-link shard files whose content an earlier save into the same directory has already.
        process_group: who saves together; all ranks by default, or this process alone without ``torch.distributed``.
        storage_options: for URLs, passed to ``fsspec.filesystem``.
        throttle_uploads: for URLs, let only one rank of each node upload at a time.

    Raises:
        FileExistsError: on every rank, if something is at the path and ``overwrite`` is not set.
        StateError: listing what cannot be stored.
        MismatchError: naming what differs between ranks that hold the same.
        Exception: the first failure of any rank, on every rank, naming it.
    """
    savers = _savers_of(process_group)
    drain_all()  # one of them may be to this path
    where = os.fspath(path)
    options = SaveOptions(size_per_shard, also, replicas, incremental)
    storage = _storage(sync_files, storage_options, throttle_uploads)
    saving = NestedSave(savers, where, state, overwrite=overwrite, prefix=prefix, named_by=named_by, storage=storage)
    notes = checkpoint.save(
        where,
        saving.describe,
        ranks=savers.ranks,
        about=saving.about,
        options=options,
        storage=storage,
        plans=savers.plans,
        history=savers.history,
    )
    _warn(savers, [*saving.notes, *notes])


def save_async(
    path: str | os.PathLike[str],
    state: dict[str, Any],
    *,
    overwrite: bool = False,
    prefix: str = "",
    named_by: nn.Module | None = None,
    size_per_shard: float = 1024,
    sync_files: bool = True,
    also: ExtraFormat | None = None,
    replicas: Replicas = "same",
    incremental: bool = False,
    process_group: dist.ProcessGroup | None = None,
    storage_options: Mapping[str, Any] | None = None,
    throttle_uploads: bool = False,
    max_pending: int = 1,
) -> Future[None]:
    """Save as ``save`` does, but return when everything is copied to host memory; a thread writes and commits it.

    Collective, as ``save`` is. What is saved are the values at the call. Waits while an earlier save waits to be
    written. The process does not end before all is written; loads wait for it.

    Args:
        path: a directory that does not exist yet or is empty; with ``overwrite``, also a checkpoint.
        state: what to save, of the kinds that ``save`` takes.
        overwrite: replace the checkpoint that is there; it can be loaded until the new one is complete.
        prefix: what is put before the names of parameters and buffers.
        named_by: the module that has the parameters of optimizers, where it is not in the state.
        size_per_shard: limit of a shard file in MB (2^20 bytes); a larger tensor gets a file of its own.
        sync_files: make the checkpoint durable before it counts as complete.
        also: with "huggingface", write the model a second time, as ``from_pretrained`` reads it.
        replicas: whether tensors that several ranks hold must be the ``"same"``, or the ``"first"`` rank's are stored.
        incremental: hard-link shard files whose content an earlier save into the same directory has already.
        process_group: who saves together; all ranks by default, or this process alone without ``torch.distributed``.
        storage_options: for URLs, passed to ``fsspec.filesystem``.
        throttle_uploads: for URLs, let only one rank of each node upload at a time.
        max_pending: how many saves may wait while another one is being written, when this one is added; see
            ``ShardCkptIO``.

    Returns:
        Done when the checkpoint is complete on all ranks. Who doesn't look gets its error from the next ``save_async``
        or from ``wait``.

    Raises:
        Exception: what a save before this one failed with, on every rank; else as ``save`` does.
    """
    options = SaveOptions(size_per_shard, also, replicas, incremental)
    savers, where = _savers_of(process_group), os.fspath(path)
    background = _background(savers, process_group, AsyncOptions(max_pending).max_pending)
    storage = _storage(sync_files, storage_options, throttle_uploads)
    saving = NestedSave(savers, where, state, overwrite=overwrite, prefix=prefix, named_by=named_by, storage=storage)
    writing = checkpoint.save_async(
        where,
        saving.describe,
        ranks=savers.ranks,
        about=saving.about,
        options=options,
        background=background,
        storage=storage,
        plans=savers.plans,
        history=savers.history,
    )
    _warn(savers, [*saving.notes, *background.notes()])
    done: Future[None] = Future()
    done.set_running_or_notify_cancel()

    def tell(written: Future[list[str]]) -> None:
        error = written.exception()
        done.set_result(None) if error is None else done.set_exception(error)

    writing.add_done_callback(tell)
    return done


def _storage(sync_files: bool, storage_options: Mapping[str, Any] | None, throttle_uploads: bool) -> StorageRouter:
    local = LocalStorage(sync_files=sync_files)
    return StorageRouter(local, storage_options=storage_options, throttle_uploads=throttle_uploads)


def _background(savers: SaveGroup, process_group: dist.ProcessGroup | None, max_pending: int) -> Background:
    if savers.background is None:
        ranks = Ranks.of_group(_group(process_group)) if savers.ranks.world > 1 else Ranks.alone()
        savers.background = Background(ranks)
    savers.background.max_pending = max_pending
    return savers.background


def wait(process_group: dist.ProcessGroup | None = None) -> None:
    """Wait until every ``save_async`` is complete.

    Collective: every rank of ``process_group`` must call it.

    Raises:
        Exception: what a save failed with, on every rank; each failure is raised once.
    """
    savers = _savers_of(process_group)
    if savers.background is not None:
        savers.background.settle(savers.ranks)
        _warn(savers, savers.background.notes())


def load(
    path: str | os.PathLike[str],
    state: dict[str, Any] | None = None,
    *,
    strict: bool = True,
    skip: Sequence[str] = (),
    prefix: str = "",
    key_mapping: KeyMappingLike | None = None,
    named_by: nn.Module | None = None,
    verify: bool = True,
    cast: bool = True,
    process_group: dist.ProcessGroup | None = None,
    storage_options: Mapping[str, Any] | None = None,
    pre_download: str | os.PathLike[str] | None = None,
    weights_only: bool = True,
) -> dict[str, Any]:
    """Bring everything in ``state`` to what a checkpoint of any topology has.

    Collective: every rank of ``process_group`` must call it. Each reads the slices that it has. Modules, optimizers and
    tensors are filled in place, other objects get their ``load_state_dict`` called, plain values are replaced in the
    dict. All differences are found, and all bytes verified, before anything changes.

    What is asked for must match, and be there; what is not asked for is not read, but for plain state, which is
    returned. So ``{"model": model}`` loads the weights alone.

    Args:
        path: what ``save``, ``ShardedStrategy`` or Fabric saved, or a file of ``torch.save`` with Lightning's keys.
        state: see ``save``. A single module takes the single stored one, whatever its key; several are found by their
            keys, or as attributes of a LightningModule that was saved. Optimizers are found by their keys, or in order.
            A state dict may stand for the object that gave it, here and in what was saved.
            None: everything is returned with whole tensors on the CPU. Not collective then.
        strict: whether a difference is an error; else the rest is loaded.
        skip: patterns of names of tensors that stay as they are, such as ``"head.*"``, with the state that optimizers
            have of them; names of the state as ``metadata`` lists them, so that ``"optimizer/0/param_groups/*"``
            leaves learning rates and other settings. Other state is left out by leaving it out of ``state``. What was
            left is logged as information.
        prefix: of the stored names of parameters and buffers.
        key_mapping: from stored names, without ``prefix``, to names in the state: a dict of whole names or regular
            expressions to new names (None leaves a tensor out), a function, its import path, or a file. All names are
            mapped at once. It holds for the state of optimizers, too. An entry that is about nothing in the checkpoint
            is a difference. See "Rename tensors" in the documentation.
        named_by: see ``save``.
        verify: whether to compare checksums.
        cast: see ``ShardCkptIO``.
        process_group: see ``save``.
        storage_options: for URLs, see ``ShardCkptIO``.
        pre_download: for URLs, see ``ShardCkptIO``.
        weights_only: as in ``torch.load``, for a file of ``torch.save`` and for objects that were pickled with
            ``ShardCkptIO(pickle_objects=True)``. False executes what is in them.

    Returns:
        What the checkpoint has besides the model, the optimizers and what ``state`` asked for.

    Raises:
        CheckpointNotFoundError: if there is no complete checkpoint.
        KeyError: with ``strict``, for keys of ``state`` that the checkpoint does not have.
        MismatchError: with ``strict``, listing all other differences; for a pattern of ``skip`` that nothing matches.
        ValueError: for ``skip`` without a state.
        CorruptionError: naming file, tensor and rank; nothing has changed then.
    """
    drain_all()
    storage = StorageRouter(storage_options=storage_options, pre_download=pre_download)
    if state is None:
        if skip:
            raise ValueError(f"skip={skip!r} is about what a state keeps: give the state, too")
        found = checkpoint.load_full(os.fspath(path), verify=verify, weights_only=weights_only, storage=storage)
        return states_of_checkpoint(found)
    savers = _savers_of(process_group)
    objects, whole = _looked_at(state, named_by, savers.ranks)

    def make() -> NestedLoad:
        mapping = KeyMapping.of(key_mapping)
        return NestedLoad(
            state, objects, prefix=prefix, key_mapping=mapping, named_by=named_by, whole=whole, skip=skip, cast=cast
        )

    restore = NestedLoad.prepared(savers.ranks, make)
    options = LoadOptions(strict=strict, verify=verify, weights_only=weights_only)
    remainder, loaded = restore.run(os.fspath(path), savers.ranks, options=options, storage=storage)
    savers.history.loaded(os.fspath(path))
    _warn(savers, loaded.notes)
    for note in loaded.skipped if savers.ranks.rank == 0 else ():
        _log.info(note)
    return remainder


def _looked_at(state: dict[str, Any], named_by: nn.Module | None, ranks: Ranks) -> tuple[NestedObjects, WholeNames]:
    """Return what is in a state, and names over all ranks, if they have different ones: each a stage of a pipeline.

    Collective: every rank must call it.
    """
    objects, names = NestedObjects(), list[str]()

    def look() -> tuple[str, list[str]]:
        nonlocal objects
        objects = check_state(state)
        names.extend(sorted(names_in(objects, named_by)))
        return checksum("\n".join(names).encode()), objects.keys

    def compare(found: list[tuple[str, list[str]]]) -> tuple[bool, list[str]]:
        return len({names for names, _ in found}) == 1, found[0][1]

    are_same, order = ranks.step("looking at the state", look, compare)
    objects = objects.in_order(order)
    if are_same:
        return objects, WholeNames()
    joined: list[str] = ranks.step("joining names", lambda: names, lambda every: sorted({*chain(*every)}))
    return objects, WholeNames(frozenset(joined))


def _group(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    group = process_group if process_group is not None else dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"this rank is not in the process group, or it is none: {group!r}")
    return group


def _savers_of(process_group: dist.ProcessGroup | None) -> SaveGroup:
    if process_group is None and not dist.is_initialized():
        return _ALONE
    group = _group(process_group)
    if group not in _SAVERS:
        members = tuple(dist.get_process_group_ranks(group))
        partly = members if len(members) < dist.get_world_size() or members != tuple(sorted(members)) else None
        _SAVERS[group] = SaveGroup(Ranks.of_group(group), partly)
    return _SAVERS[group]


def _warn(savers: SaveGroup, notes: Iterable[str]) -> None:
    if savers.ranks.rank == 0:
        for note in notes:
            warnings.warn(note, stacklevel=3)
