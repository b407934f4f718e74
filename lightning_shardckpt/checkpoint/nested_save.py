"""Describe a flat dict of objects for a save on one rank."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

from torch.distributed.tensor import DTensor

from lightning_shardckpt.checkpoint.background import Background
from lightning_shardckpt.checkpoint.partly_loaded import check_loaded
from lightning_shardckpt.checkpoint.plan_cache import PlanCache
from lightning_shardckpt.checkpoint.save_job import RunInfo
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.errors import CheckpointNotFoundError, StateError
from lightning_shardckpt.format.layout import parts_of_rank
from lightning_shardckpt.state.dtensor_layout import layout_of, this_rank
from lightning_shardckpt.state.hf_document import HuggingFace
from lightning_shardckpt.state.module_versions import METADATA
from lightning_shardckpt.state.nested_dict import NestedObjects, checkpoint_of
from lightning_shardckpt.state.snapshot import Leaves, Snapshot
from lightning_shardckpt.state.state_dicts import lift_state_dicts
from lightning_shardckpt.state.trainer import snapshot
from lightning_shardckpt.storage.router import StorageRouter, is_url


@dataclass(slots=True)
class SaveGroup:
    """The ranks that save and load together, and their caches between calls."""

    ranks: Ranks
    members: tuple[int, ...] | None
    """Their ranks in the default process group; None if they are all its ranks, in order."""
    plans: PlanCache = field(default_factory=PlanCache)
    hugging_face: HuggingFace = field(default_factory=HuggingFace)
    background: Background | None = None


class NestedSave:
    """One save of a state.

    Collective: every rank must construct it, with its own state.

    Args:
        group: the ranks that save together.
        path: of the checkpoint.
        state: the dict.
        overwrite: replace an existing checkpoint.
        prefix: prepended to the names of parameters and buffers.
        storage: of ``path``.

    Attributes:
        run: step and epoch, for the root index.
        notes: sentences for the user, after ``describe``.
    """

    def __init__(
        self,
        group: SaveGroup,
        path: str,
        state: dict[str, Any],
        *,
        overwrite: bool,
        prefix: str,
        storage: StorageRouter,
    ) -> None:
        self.path, self.notes = path, list[str]()
        self._group, self._state, self._overwrite = group, state, overwrite
        self._prefix, self._storage = prefix, storage
        self._order = order_of_state(state, group.ranks, f"preparing to save {path!r}")
        self.run = run_info(state if isinstance(state, dict) else {}, {})  # ``describe`` raises for other types

    def describe(self) -> Snapshot:
        """Return this rank's state.

        Raises:
            FileExistsError: on rank 0, for an existing checkpoint, without ``overwrite``.
            StateError: listing state that can't be stored; for objects whose load failed.
            TypeError: if the state is not a dict with strings as keys.
        """
        if not self._overwrite and self._group.ranks.rank == 0:
            _refuse_existing(self.path, self._storage)
        objects = NestedObjects.of(self._state).in_order(self._order)
        check_loaded([*objects.modules.values(), *objects.optimizers.values()])
        names = objects.parameter_names(prefix=self._prefix)
        module = objects.root if objects.modules else None
        is_state_dict = hasattr(self._state, METADATA)
        checkpoint = self._state if is_state_dict else checkpoint_of(self._state, objects, names)
        checkpoint = checkpoint if objects.modules else lift_state_dicts(checkpoint)
        described = snapshot(checkpoint, module)
        _check_members(described, self._group)
        if module is not None and self._group.ranks.rank == 0 and not self._prefix:
            document, notes = self._group.hugging_face.document(module)
            if document is not None:
                described = replace(described, documents={**described.documents, "huggingface": document})
            self.notes += notes
        self.notes += [*described.notes, *objects.notes]
        return _add_prefix(described, self._prefix)


def run_info(state: Mapping[str, Any], topology: dict[str, int]) -> RunInfo:
    """Return the step and epoch of a state, where they are valid numbers, with the topology."""
    numbers = [state.get(key) for key in ("global_step", "step", "epoch")]
    global_step, step, epoch = (n if type(n) is int and 0 <= n < 1 << 63 else None for n in numbers)
    return RunInfo(step if global_step is None else global_step, epoch, topology)


def _add_prefix(described: Snapshot, prefix: str) -> Snapshot:
    if not prefix or "model" not in described.leaves:
        return described
    leaves = described.leaves["model"]
    model = Leaves(
        {prefix + key: tensor for key, tensor in leaves.tensors.items()},
        {prefix + alias: prefix + key for alias, key in leaves.aliases.items()},
        frozenset(prefix + key for key in leaves.pinned),
    )
    values = {prefix + key: value for key, value in described.documents["model"].items()}
    versions = {f"{prefix}{name}".removesuffix("."): v for name, v in (described.documents["versions"] or {}).items()}
    documents = {**described.documents, "model": values, "versions": versions}
    return replace(described, leaves={**described.leaves, "model": model}, documents=documents)


def _refuse_existing(path: str, storage: StorageRouter) -> None:
    if is_url(path):
        try:
            storage.open(path).close()
        except CheckpointNotFoundError:
            return
    if is_url(path) or (os.path.lexists(path) and not (os.path.isdir(path) and not os.listdir(path))):
        raise FileExistsError(f"{path!r} exists already; pass overwrite=True to replace a checkpoint")


def _check_members(described: Snapshot, group: SaveGroup) -> None:
    """Check that ranks of a group have the same slices of each DTensor by group rank as by global rank."""
    if group.members is None:
        return
    for component, leaves in described.leaves.items():
        for key, tensor in leaves.tensors.items():
            if not isinstance(tensor, DTensor):
                continue
            mesh, shape = tensor.device_mesh, tuple(tensor.shape)
            layout = layout_of(tensor)
            by_group_rank = [parts_of_rank(layout, shape, rank) for rank in range(len(group.members))]
            if not {*mesh.mesh.flatten().tolist()} <= {*group.members} or by_group_rank != [
                parts_of_rank(layout, shape, rank) for rank in group.members
            ]:
                raise StateError(
                    f"{component}/{key} is on {mesh}, which rank {this_rank()} cannot save with the ranks "
                    f"{list(group.members)} alone: let all ranks of the job save it"
                )


def order_of_state(state: Any, ranks: Ranks, phase: str) -> list[str]:
    """Return the keys of the objects in rank 0's state, in order; empty if it is invalid.

    Collective: every rank must call it, with the same ``phase``.
    """

    def keys() -> list[str]:
        try:
            return NestedObjects.of(state).keys
        except (StateError, TypeError):  # raised later, when the state is described
            return []

    order: list[str] = ranks.step(phase, keys, itemgetter(0))
    return order
