"""Save and load the objects of a plain torch script, without a Trainer or Fabric.

The state is a flat dict; see ``checkpoint.describe`` for how its values are stored. The checkpoints have the format of
``ShardedStrategy``: each loads the other's model and optimizers.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from operator import itemgetter
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from lightning_shardckpt.checkpoint import checkpoint
from lightning_shardckpt.checkpoint.background import Background, SaveGroup
from lightning_shardckpt.checkpoint.describe import NestedObjects, describe_state
from lightning_shardckpt.checkpoint.nested_load import NestedLoad
from lightning_shardckpt.checkpoint.save_job import Replicas, RunInfo, SaveOptions
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.sources.key_mapping import KeyMappingLike
from lightning_shardckpt.state.state_dicts import states_of_checkpoint
from lightning_shardckpt.storage.local_storage import LocalStorage
from lightning_shardckpt.storage.router import StorageRouter, file_path, refuse_existing
from lightning_shardckpt.system.host import drain_all

_GROUPS: WeakKeyDictionary[dist.ProcessGroup, SaveGroup] = WeakKeyDictionary()
_ALONE = SaveGroup()


def save(
    path: str | os.PathLike[str],
    state: dict[str, Any],
    *,
    overwrite: bool = False,
    prefix: str = "",
    size_per_shard: float = 1024,
    sync_files: bool = True,
    replicas: Replicas = "same",
    process_group: dist.ProcessGroup | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint of ``state``; it is complete when this returns, and durable with ``sync_files``.

    Collective: every rank of ``process_group`` must call it, with the same path. Each rank writes its own slices.
    Plain tensors must be equal on all ranks; buffers and plain values are saved from rank 0. Waits for pending saves of
    ``save_async``.

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
        state: by key, a module, an optimizer, another object with ``state_dict`` and ``load_state_dict``, or a list of
            these; or tensors, DTensors and plain values in dicts and lists, such as a state dict. The keys
            "state_dict", "optimizer_states" and "rank_state" may only hold objects.
        overwrite: replace an existing checkpoint, which can be loaded until the new one is complete.
        prefix: prepended to the names of parameters and buffers.
        size_per_shard: limit of a shard file in MB (2^20 bytes); a larger tensor gets a file of its own.
        sync_files: make the checkpoint durable before this returns; otherwise a machine crash can destroy it.
        replicas: ``"same"`` requires that ranks with the same tensor have equal values; ``"first"`` stores the first's.
        process_group: the ranks that save together; by default all.
        storage_options: for URLs, by fsspec's names; see ``ShardCkptIO``.

    Raises:
        FileExistsError: on every rank, if something exists at the path and ``overwrite`` is not set.
        StateError: listing state that can't be stored.
        MismatchError: naming the entries that differ between ranks that hold the same.
        Exception: the first failure of any rank, on every rank, naming it.
    """
    drain_all()  # a pending save may be to this path
    storage, options = _storage_of(sync_files, storage_options), SaveOptions(size_per_shard, replicas)
    _save(path, state, overwrite, prefix, options, storage, process_group)


def save_async(
    path: str | os.PathLike[str],
    state: dict[str, Any],
    *,
    overwrite: bool = False,
    prefix: str = "",
    size_per_shard: float = 1024,
    sync_files: bool = True,
    replicas: Replicas = "same",
    process_group: dist.ProcessGroup | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Future[None]:
    """Save like ``save``, but return when the state is copied to host memory; a thread writes and commits it.

    Collective as ``save``, whose arguments it takes. Saves the values at the time of the call. Waits until the save
    before is written. The process does not exit before all saves are written, and loads wait for them.

    Returns:
        A future that is done when the checkpoint is complete on all ranks. If it is not awaited, the next
        ``save_async`` or ``wait`` raises its error.

    Raises:
        Exception: the failure of an earlier save, on every rank; otherwise as ``save`` does.
    """
    storage, options = _storage_of(sync_files, storage_options), SaveOptions(size_per_shard, replicas)
    written = _save(path, state, overwrite, prefix, options, storage, process_group, in_background=True)
    assert written is not None
    return written


def _storage_of(sync_files: bool, storage_options: Mapping[str, Any] | None) -> StorageRouter:
    return StorageRouter(LocalStorage(sync_files=sync_files), storage_options=storage_options)


def _save(
    path: str | os.PathLike[str],
    state: dict[str, Any],
    overwrite: bool,
    prefix: str,
    options: SaveOptions,
    storage: StorageRouter,
    process_group: dist.ProcessGroup | None,
    *,
    in_background: bool = False,
) -> Future[None] | None:
    group, path = _group_of(process_group), file_path(path)
    if in_background:
        group.background.settle(group.ranks, before=path)  # it may be saving to this path

    def look() -> list[str]:
        if not overwrite and group.ranks.rank == 0:
            refuse_existing(path, storage)
        return NestedObjects.of(state).keys

    order: list[str] = group.ranks.step(f"preparing to save {path!r}", look, itemgetter(0))
    describe = partial(describe_state, state, order, group, prefix)  # with objects in the order of rank 0
    how: dict[str, Any] = {"options": options, "storage": storage, "in_background": in_background}
    written = checkpoint.save(path, describe, group, run=RunInfo.of(state, {}), **how)
    _warn(group, group.background.notes(), level=4)
    return written


def wait(process_group: dist.ProcessGroup | None = None) -> None:
    """Wait for saves, and raise a failure once. Collective: every rank of ``process_group`` must call it."""
    group = _group_of(process_group)
    group.background.settle(group.ranks)
    _warn(group, group.background.notes())


def load(
    path: str | os.PathLike[str],
    state: dict[str, Any] | None = None,
    *,
    strict: bool = True,
    prefix: str = "",
    key_mapping: KeyMappingLike | None = None,
    verify: bool = True,
    process_group: dist.ProcessGroup | None = None,
    storage_options: Mapping[str, Any] | None = None,
    pre_download: str | os.PathLike[str] | None = None,
    weights_only: bool = True,
) -> dict[str, Any]:
    """Load a checkpoint of any topology into the objects of ``state``.

    Collective: every rank of ``process_group`` must call it. Each rank reads its own slices. Modules, optimizers and
    tensors are filled in place, ``load_state_dict`` of other objects is called, plain values are replaced in the dict.
    All differences are collected before any object changes; bytes are verified while they fill the objects.

    Every entry of ``state`` must be in the checkpoint and match; adapters of PEFT keep their values, with a warning, if
    only weights are loaded and the checkpoint has no adapters. The rest of the checkpoint is not read, so ``{"model":
    model}`` loads only the weights; plain state is returned.

    Args:
        path: a checkpoint, or a file of ``torch.save`` with Lightning's keys.
        state: see ``save``. A single module takes the single stored one under any key; several are matched by their
            keys, or as attributes of a LightningModule that was saved. Optimizers are matched by their keys, or in
            order. Without a state, the whole checkpoint is returned with whole tensors on the CPU, not collectively.
        strict: raise one error for all differences instead of loading the rest.
        prefix: of the stored names of parameters and buffers.
        key_mapping: from stored names, without ``prefix``, to names in the state: a dict of whole names or regular
            expressions to new names (None leaves a tensor out), or a function. An entry that matches nothing in the
            checkpoint is a difference. See "Rename tensors" in the documentation.
        verify: compare checksums.
        process_group: see ``save``.
        storage_options: for URLs, see ``ShardCkptIO``.
        pre_download: for URLs, see ``ShardCkptIO``.
        weights_only: False executes code in a file of ``torch.save`` and in objects that were pickled with
            ``ShardCkptIO(pickle_objects=True)``.

    Returns:
        The checkpoint's state besides its modules and optimizers and the entries of ``state``.

    Raises:
        CheckpointNotFoundError: if there is no complete checkpoint.
        MismatchError: with ``strict``, listing all differences.
        CorruptionError: naming file, tensor and rank. What is filled in part refuses to be used or saved until it is
            loaded in full.
    """
    drain_all()
    storage = StorageRouter(storage_options=storage_options, pre_download=pre_download)
    if state is None:
        full = checkpoint.load_full(file_path(path), verify=verify, weights_only=weights_only, storage=storage)
        return states_of_checkpoint(full)
    group, path = _group_of(process_group), file_path(path)
    nested = NestedLoad(state, prefix=prefix, key_mapping=key_mapping)
    options = checkpoint.LoadOptions(strict=strict, verify=verify, weights_only=weights_only)
    remainder, result = nested.run(path, group.ranks, options=options, storage=storage)
    _warn(group, result.notes)
    return remainder


def _group_of(process_group: dist.ProcessGroup | None) -> SaveGroup:
    """Return the ranks that save together, with what they keep between saves."""
    if process_group is None and not dist.is_initialized():
        return _ALONE
    group = process_group or dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"this rank is not in the process group, or this is not a process group: {group!r}")
    if group not in _GROUPS:
        members = tuple(dist.get_process_group_ranks(group))
        is_world = len(members) == dist.get_world_size() and members == tuple(sorted(members))
        background = Background(Ranks.of_group(group))
        _GROUPS[group] = SaveGroup(Ranks.of_group(group), background, None if is_world else members)
    return _GROUPS[group]


def _warn(group: SaveGroup, notes: Iterable[str], level: int = 3) -> None:
    for note in notes if group.ranks.rank == 0 else ():
        warnings.warn(note, stacklevel=level)
