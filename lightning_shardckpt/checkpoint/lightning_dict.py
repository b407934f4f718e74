"""Lightning's checkpoint dict: describe it for a save, on one rank, and load a checkpoint as one with whole tensors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.serialization import MAP_LOCATION

from lightning_shardckpt.checkpoint.checkpoint import load_full
from lightning_shardckpt.compat.pytree import map_tensors
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.errors import StateError
from lightning_shardckpt.sources.detect import is_safetensors
from lightning_shardckpt.state.hf_document import HuggingFace
from lightning_shardckpt.state.model import WholeNames
from lightning_shardckpt.state.module_versions import METADATA
from lightning_shardckpt.state.snapshot import Snapshot
from lightning_shardckpt.state.state_dicts import VERSION, is_lightning_dict, lift_state_dicts
from lightning_shardckpt.state.trainer import snapshot
from lightning_shardckpt.storage.protocol import Storage
from lightning_shardckpt.storage.router import StorageRouter

RANK_STATE = "rank_state"
"""Key of Lightning's checkpoint dict under which ``ShardedStrategy`` passes the state of this rank alone."""


@dataclass(frozen=True, slots=True)
class Attached:
    """The ranks and the module that ``ShardCkptIO.attach`` sets; no module under Lightning's own strategies."""

    ranks: Ranks = field(default_factory=Ranks.alone)
    module: nn.Module | None = None
    topology: Mapping[str, int] = field(default_factory=dict)
    names: WholeNames = field(default_factory=WholeNames)


def describe_checkpoint(
    checkpoint: dict[str, Any],
    attached: Attached,
    hugging_face: HuggingFace,
    *,
    adapters_only: bool,
    pickle_objects: bool,
    is_fabric: bool,
) -> Snapshot:
    """Return this rank's part of a save of Lightning's checkpoint dict.

    Args:
        checkpoint: the dict, or without a module a state of Fabric; it is not changed.
        attached: the ranks that save, and the module.
        hugging_face: makes documents of models, and caches the last one.
        adapters_only: leave out state that training does not change.
        pickle_objects: pickle objects that are not plain values.
        is_fabric: True if ``checkpoint`` is a state of Fabric.

    Raises:
        StateError: listing state that can't be stored, by path; for ``adapters_only`` without a module.
    """
    module, names = attached.module, attached.names
    if adapters_only and module is None:
        raise StateError(
            "ShardCkptIO(adapters_only=True) needs the module to find its frozen parameters, and Lightning's own "
            "strategies don't pass it to a CheckpointIO. Use ShardedStrategy, also with one device."
        )
    rank_state = checkpoint.get(RANK_STATE)
    if module is None and not (is_lightning_dict(checkpoint) and (VERSION in checkpoint or not is_fabric)):
        checkpoint = lift_state_dicts(checkpoint)
    described = snapshot(
        {key: value for key, value in checkpoint.items() if key != RANK_STATE},
        module,
        rank_state,
        names,
        adapters_only=adapters_only,
        pickle_objects=pickle_objects,
    )
    if module is not None and attached.ranks.rank == 0 and "model" in described.leaves:
        document, notes = hugging_face.document(module, names.state)
        documents = described.documents if document is None else {**described.documents, "huggingface": document}
        described = replace(described, documents=documents, notes=(*described.notes, *notes))
    return described


# ── load ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def is_torch_file(path: str | os.PathLike[str]) -> bool:
    """Return True if ``path`` is a file for ``torch.load``."""
    return os.path.isfile(path) and not is_safetensors(os.fspath(path))


def load_whole(
    path: str,
    map_location: MAP_LOCATION = None,
    *,
    optimizers: bool = True,
    verify: bool = True,
    weights_only: bool = True,
    storage: Storage | None = None,
) -> dict[str, Any]:
    """Return a checkpoint as Lightning's dict on a device, like ``checkpoint.load_full``, or the dict of a plain file.

    Args:
        path: a checkpoint, or a file of ``torch.save``.
        map_location: the device, or a dict or function as in ``torch.load``; the CPU by default.
        optimizers: read optimizer state.
        verify: compare checksums.
        weights_only: for a file of ``torch.save``, as in ``torch.load``.
        storage: of ``path``; by default the file system, or an object store for a URL.

    Raises:
        TypeError: for a ``map_location`` of another type.
    """
    if is_torch_file(path):
        plain: dict[str, Any] = torch.load(path, map_location=map_location or "cpu", weights_only=weights_only)
        return plain
    device = device_of(map_location)
    storage = storage or StorageRouter()
    full = load_full(path, optimizers=optimizers, verify=verify, weights_only=weights_only, storage=storage)
    return move_to(full, device)


def device_of(map_location: object) -> torch.device:
    """Return the device of ``map_location``, as ``torch.load`` chooses it for CPU tensors.

    A sharded checkpoint does not record devices: a dict is looked up for ``"cpu"``, a function is called with an empty
    CPU storage.

    Raises:
        TypeError: if it is not a device, dict or function.
    """
    if isinstance(map_location, Mapping):
        map_location = map_location.get("cpu", "cpu")
    elif callable(map_location) and not isinstance(map_location, torch.device):
        located = map_location(torch.empty(0).untyped_storage(), "cpu")
        map_location = getattr(located, "device", located)
    if map_location is None or isinstance(map_location, str | int | torch.device):
        return torch.device("cpu" if map_location is None else map_location)
    raise TypeError(f"map_location is a device, such as 'cpu' or 'cuda:0', or a dict or function, got {map_location!r}")


def move_to(checkpoint: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return a checkpoint dict with all tensors on a device; shared tensors stay shared."""
    moved: dict[int, torch.Tensor] = {}

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return moved.setdefault(id(tensor), tensor.to(device)) if tensor.device != device else tensor

    result = map_tensors(move, checkpoint)
    if (versions := getattr(checkpoint.get("state_dict"), METADATA, None)) is not None:
        vars(result["state_dict"])[METADATA] = versions
    return result
