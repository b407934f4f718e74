"""Describe the state that a save stores, on one rank: Lightning's checkpoint dict, or a flat dict of objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from lightning_shardckpt.checkpoint.background import Background
from lightning_shardckpt.checkpoint.checkpoint import check_loaded
from lightning_shardckpt.checkpoint.save_job import PlanCache, RunInfo
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.errors import StateError
from lightning_shardckpt.format.layout import parts_of_rank
from lightning_shardckpt.state.dtensor_layout import layout_of, this_rank
from lightning_shardckpt.state.hf_directory import describe_hugging_face
from lightning_shardckpt.state.model import WholeNames
from lightning_shardckpt.state.nested_dict import NestedObjects, checkpoint_of
from lightning_shardckpt.state.snapshot import Snapshot
from lightning_shardckpt.state.trainer import snapshot

RANK_STATE = "rank_state"
"""Key of Lightning's checkpoint dict under which ``ShardedStrategy`` passes the state of this rank alone."""


@dataclass(slots=True)
class SaveGroup:
    """The ranks that save and load together, their pending save, and what saves keep for the next one.

    Attributes:
        ranks: the ranks.
        background: writes asynchronous saves, and does what follows saves.
        members: their ranks in the default process group; None if they are all its ranks, in order.
        plans: of the last save.
    """

    ranks: Ranks = field(default_factory=Ranks.alone)
    background: Background = field(default_factory=lambda: Background(Ranks.alone()))
    members: tuple[int, ...] | None = None
    plans: PlanCache = field(default_factory=PlanCache)


def run_info(state: Mapping[str, Any], topology: Mapping[str, int]) -> RunInfo:
    """Return the step and epoch of a state, where they are valid numbers, with the topology."""
    numbers = [state.get(key) for key in ("global_step", "step", "epoch")]
    global_step, step, epoch = (n if type(n) is int and 0 <= n < 1 << 63 else None for n in numbers)
    return RunInfo(step if global_step is None else global_step, epoch, dict(topology))


def describe_checkpoint(
    checkpoint: Mapping[str, Any],
    group: SaveGroup,
    module: nn.Module | None,
    names: WholeNames | None = None,
    *,
    rank_state: Any = None,
    adapters_only: bool = False,
    pickle_objects: bool | None = None,
) -> Snapshot:
    """Return this rank's part of a save of Lightning's checkpoint dict, with the document of a Hugging Face model.

    Args:
        checkpoint: the dict; it is not changed.
        group: the ranks that save.
        module: the live module, if it is known.
        names: see ``snapshot``, as are the other arguments.
        rank_state: state of this rank alone.
        adapters_only: leave out state that training does not change.
        pickle_objects: pickle objects that are not plain values.

    Raises:
        StateError: listing state that can't be stored, by path.
    """
    options: dict[str, Any] = {"adapters_only": adapters_only, "pickle_objects": pickle_objects}
    described = snapshot(checkpoint, module, rank_state, names, **options)
    if module is None or group.ranks.rank != 0 or "model" not in described.leaves:
        return described
    document, notes = describe_hugging_face(module, names.state if names is not None else ())
    documents = described.documents if document is None else {**described.documents, "huggingface": document}
    return replace(described, documents=documents, notes=(*described.notes, *notes))


# ── a flat dict of objects ────────────────────────────────────────────────────────────────────────────────────────────


def describe_state(state: dict[str, Any], order: list[str], group: SaveGroup, prefix: str) -> Snapshot:
    """Return this rank's part of a save of a flat dict.

    Args:
        state: the dict.
        order: the keys of the objects in rank 0's dict.
        group: the ranks that save.
        prefix: prepended to the names of parameters and buffers.

    Raises:
        StateError: listing state that can't be stored; for objects whose load failed.
        TypeError: if the state is not a dict with strings as keys.
    """
    objects = NestedObjects.of(state, order)
    check_loaded(objects.filled)
    names = objects.parameter_names(prefix=prefix)
    module = objects.root if objects.modules else None
    described = describe_checkpoint(checkpoint_of(state, objects, names), group, module)
    _check_members(described, group)
    return _add_prefix(described, prefix) if prefix else described


def _add_prefix(described: Snapshot, prefix: str) -> Snapshot:
    documents = {role: document for role, document in described.documents.items() if role != "huggingface"}
    if "model" not in described.leaves:
        return replace(described, documents=documents)
    model = described.leaves["model"].renamed(lambda name: prefix + name)
    documents["model"] = {prefix + key: value for key, value in documents["model"].items()}
    versions = (documents["versions"] or {}).items()
    documents["versions"] = {f"{prefix}{name}".removesuffix("."): version for name, version in versions}
    return replace(described, leaves={**described.leaves, "model": model}, documents=documents)


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
