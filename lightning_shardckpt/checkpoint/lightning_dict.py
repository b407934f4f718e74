"""Load a checkpoint as Lightning's dict, with whole tensors on a device."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch.serialization import MAP_LOCATION

from lightning_shardckpt.checkpoint.checkpoint import load_full
from lightning_shardckpt.compat.pytree import map_tensors
from lightning_shardckpt.sources.hugging_face import is_safetensors
from lightning_shardckpt.state.state_dicts import METADATA
from lightning_shardckpt.storage.protocol import Storage
from lightning_shardckpt.storage.router import StorageRouter


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
