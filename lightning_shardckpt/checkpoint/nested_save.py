"""Describe a nested dict of objects for a save, on one rank."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from lightning_shardckpt.checkpoint.background import Background
from lightning_shardckpt.checkpoint.incremental import SaveHistory
from lightning_shardckpt.checkpoint.plan_cache import PlanCache
from lightning_shardckpt.checkpoint.save_job import RunInfo
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.errors import CheckpointNotFoundError, StateError
from lightning_shardckpt.format.layout import parts_of_rank
from lightning_shardckpt.format.value_checks import shown
from lightning_shardckpt.state.dtensor_layout import layout_of, this_rank
from lightning_shardckpt.state.hf_document import HuggingFace
from lightning_shardckpt.state.nested_dict import NestedObjects, checkpoint_of, names_for, objects_in
from lightning_shardckpt.state.snapshot import Leaves, Snapshot
from lightning_shardckpt.state.trainer import snapshot
from lightning_shardckpt.storage.router import StorageRouter, is_url


@dataclass(slots=True)
class SaveGroup:
    """The ranks that save and load together, and what they keep between calls."""

    ranks: Ranks
    members: tuple[int, ...] | None
    """Ranks of the default process group, where these are not all of them."""
    plans: PlanCache = field(default_factory=PlanCache)
    history: SaveHistory = field(default_factory=SaveHistory)
    hugging_face: HuggingFace = field(default_factory=HuggingFace)
    background: Background | None = None


class NestedSave:
    """One save of a state: its description, once asked for, and what a user should know.

    Collective: every rank must make it, with its own state.
    """

    def __init__(
        self,
        party: SaveGroup,
        path: str,
        state: dict[str, Any],
        *,
        overwrite: bool,
        prefix: str,
        named_by: nn.Module | None,
        storage: StorageRouter,
    ) -> None:
        self.path, self.notes = path, list[str]()
        self._party, self._state, self._overwrite = party, state, overwrite
        self._prefix, self._named_by, self._storage = prefix, named_by, storage
        self._order = order_of_state(state, party.ranks, f"preparing to save {path!r}")
        self.about = about_of(state if isinstance(state, dict) else {}, {})  # else ``describe`` says so, on all ranks

    def describe(self) -> Snapshot:
        """Return what this rank contributes."""
        if not self._overwrite and self._party.ranks.rank == 0:
            _refuse_existing(self.path, self._storage)
        objects = check_state(self._state).in_order(self._order)
        names = names_for(objects, self._named_by, prefix=self._prefix)
        module = objects.root if objects.modules else None
        found = snapshot(checkpoint_of(self._state, objects, names), module)
        _check_members(found, self._party)
        if module is not None and self._party.ranks.rank == 0 and not self._prefix:
            document, notes = self._party.hugging_face.document(module)
            if document is not None:
                found = replace(found, documents={**found.documents, "huggingface": document})
            self.notes += notes
        self.notes += [*found.notes, *objects.notes]
        return _with_prefix(found, self._prefix)


def about_of(state: Mapping[str, Any], topology: dict[str, int]) -> RunInfo:
    """Return what the root index says of a run, from what its state has as numbers of steps and epochs."""
    known = [state.get(key) for key in ("global_step", "step", "epoch")]
    step, other, epoch = (n if type(n) is int and 0 <= n < 1 << 63 else None for n in known)
    return RunInfo(other if step is None else step, epoch, topology)


def _with_prefix(found: Snapshot, prefix: str) -> Snapshot:
    if not prefix or "model" not in found.leaves:
        return found
    plain = found.leaves["model"]
    model = Leaves(
        {prefix + key: tensor for key, tensor in plain.tensors.items()},
        {prefix + alias: prefix + of for alias, of in plain.aliases.items()},
        frozenset(prefix + key for key in plain.pinned),
        records={prefix + key: record for key, record in plain.records.items()},
        frozen=frozenset(prefix + key for key in plain.frozen),
    )
    other = {prefix + key: value for key, value in found.documents["model"].items()}
    versions = {f"{prefix}{name}".removesuffix("."): v for name, v in (found.documents["versions"] or {}).items()}
    documents = {**found.documents, "model": other, "versions": versions}
    return replace(found, leaves={**found.leaves, "model": model}, documents=documents)


def _refuse_existing(path: str, storage: StorageRouter) -> None:
    if is_url(path):
        try:
            storage.open(path).close()
        except CheckpointNotFoundError:
            return
    if is_url(path) or (os.path.lexists(path) and not (os.path.isdir(path) and not os.listdir(path))):
        raise FileExistsError(f"{path!r} exists already; pass overwrite=True to replace a checkpoint")


def _check_members(found: Snapshot, party: SaveGroup) -> None:
    """Check that the places of ranks among themselves say which slices of a DTensor they have, if only some of them
    save.

    Raises:
        StateError: for a DTensor that other ranks have a part of, too, or of which the ranks here have other slices.
    """
    if party.members is None:
        return
    for component, leaves in found.leaves.items():
        for key, tensor in leaves.tensors.items():
            if not isinstance(tensor, DTensor):
                continue
            mesh, shape = tensor.device_mesh, tuple(tensor.shape)
            layout = layout_of(tensor)
            as_numbered = [parts_of_rank(layout, shape, rank) for rank in range(len(party.members))]
            if not {*mesh.mesh.flatten().tolist()} <= {*party.members} or as_numbered != [
                parts_of_rank(layout, shape, rank) for rank in party.members
            ]:
                raise StateError(
                    f"{component}/{key} is on {mesh}, which rank {this_rank()} cannot save with the ranks "
                    f"{list(party.members)} alone: let all ranks of the job save it"
                )


def order_of_state(state: Any, ranks: Ranks, phase: str) -> list[str]:
    """Return the places of the objects in rank 0's state, in its order; none if that is no state.

    Collective: every rank must call it, in the same phase of what it does.
    """

    def look() -> list[str]:
        try:
            return check_state(state).keys
        except (StateError, TypeError):  # which are raised when the state is described
            return []

    found: list[str] = ranks.step(phase, look, itemgetter(0))
    return found


def check_state(state: dict[str, Any]) -> NestedObjects:
    """Return what is in a state, checked to be one.

    Raises:
        TypeError: if it is no dict with texts as keys.
        StateError: see ``objects_in``.
    """
    if isinstance(state, dict) and all(isinstance(key, str) for key in state):
        return objects_in(state)
    found = f"keys {shown([*state])}" if isinstance(state, dict) else type(state).__name__
    raise TypeError(f'a state is a dict by texts of objects and values, such as {{"model": model}}, got {found}')
