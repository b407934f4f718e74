"""Ways of packages that may not be installed. Each is imported when it is used; see ``PACKAGES`` for how to get them.

They are no dependencies, since nothing else needs them and some pin old versions. A scratch environment will do:

    pip install --no-deps torchsnapshot torch_checkpointing megatron-core ai2-olmo-core
    pip install psutil aiofiles nest_asyncio importlib-metadata importlib_resources pyyaml cached_path omegaconf rich
    pip install bettermap dataclass-extensions
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from limits import BUFFERED, DIRECT, READ
from state import State
from torch import Tensor
from turns import Missing, Way

PACKAGES = {
    "torchsnapshot": "torchsnapshot",
    "torch_checkpointing": "torch_checkpointing",
    "megatron.core.dist_checkpointing": "megatron-core",
    "olmo_core.distributed.checkpoint": "ai2-olmo-core",
}


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = PACKAGES[name]
        raise Missing(f"not installed: pip install {package} ({type(error).__name__}: {error})") from None


def import_all() -> None:
    """Before ranks are forked, so that none of them needs the time in its first turn."""
    for name in PACKAGES:
        try:
            _module(name)
        except Missing as error:
            print(error)


def _locals(state: State) -> dict[str, Tensor]:
    return {name: t.to_local() if t.ndim else t for name, t in state.kept["flat"].items()}


def _made(path: str) -> str:
    os.makedirs(path, exist_ok=True)
    dist.barrier()
    return path


# ── torchsnapshot: knows no DTensor, so its shards are plain tensors of each rank; no fsync ───────────────────────────


def _snapshot_save(state: State, path: str) -> None:
    module = _module("torchsnapshot")
    module.Snapshot.take(path, {"state": module.StateDict(**_locals(state))})


def _snapshot_load(state: State, path: str) -> None:
    module = _module("torchsnapshot")
    found = _locals(state)
    into = module.StateDict(**found)
    module.Snapshot(path).restore({"state": into})
    for name, tensor in found.items():
        if into[name] is not tensor:
            tensor.copy_(into[name])


# ── torch_checkpointing: its sharded metadata wants CUDA, so each rank has a file of its own; no fsync ────────────────


def _manager(state: State) -> Any:
    if "manager" not in state.kept:
        _module("torch_checkpointing")
        config = importlib.import_module("torch_checkpointing.checkpoint_manager").CheckpointManager.Config
        storage = importlib.import_module("torch_checkpointing.storage.filesystem").LocalFileSystemStorageConfig
        made = config.with_sync_save()
        made.storage_config = storage(use_direct_io=False)  # its own way to write fails on ext4: EINVAL
        state.kept["manager"] = made.build()
    return state.kept["manager"]


def _manager_save(state: State, path: str) -> None:
    _manager(state).save(path, {"state": _locals(state)})


def _manager_load(state: State, path: str) -> None:
    _manager(state).load(path, {"state": _locals(state)}, strict=True)


# ── Megatron-Core: its torch_dist format ──────────────────────────────────────────────────────────────────────────────


def _megatron_state(state: State) -> dict[str, Any]:
    sharded_tensor = _module("megatron.core.dist_checkpointing").ShardedTensor
    rank, world = dist.get_rank(), dist.get_world_size()
    found = {}
    for name, tensor in state.kept["flat"].items():
        if tensor.ndim:
            cut = (tensor.placements[0].dim, rank, world)
            found[name] = sharded_tensor.from_rank_offsets(name, tensor.to_local(), cut)
        else:
            found[name] = sharded_tensor.from_rank_offsets(name, tensor.view(1), replica_id=rank)
    return found


def _megatron_save(state: State, path: str) -> None:
    # which it calls on a CPU, too
    with patch("torch.cuda.synchronize"), patch("torch.cuda.current_device", lambda: torch.device("cpu")):
        _module("megatron.core.dist_checkpointing").save(_megatron_state(state), _made(path))


def _megatron_load(state: State, path: str) -> None:
    loaded = _module("megatron.core.dist_checkpointing").load(_megatron_state(state), path)
    for name, tensor in _locals(state).items():
        if loaded[name].data_ptr() != tensor.data_ptr():
            tensor.copy_(loaded[name].view(tensor.shape))


# ── OLMo-core: DCP with a writer of its own; no fsync ─────────────────────────────────────────────────────────────────


def _olmo(name: str) -> Callable[[State, str], None]:
    def call(state: State, path: str) -> None:
        getattr(_module("olmo_core.distributed.checkpoint"), name)(path, state.kept["flat"])

    return call


SAVES = [
    Way("torchsnapshot", _snapshot_save, _snapshot_load, BUFFERED, "DCP, no fsync"),
    Way("torch_checkpointing", _manager_save, _manager_load, BUFFERED, "DCP, no fsync"),
    Way("Megatron-Core", _megatron_save, _megatron_load, DIRECT, "DCP"),
    Way("OLMo-core", _olmo("save_state_dict"), _olmo("load_state_dict"), BUFFERED, "DCP, no fsync"),
]
LOADS = [Way(way.name, way.save, way.load, READ, "DCP") for way in SAVES]
