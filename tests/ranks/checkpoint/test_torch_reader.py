"""Our files, loaded and resharded by torch alone.

Oracle: its HuggingFaceStorageReader, in ranks without this package.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.support.pool import run_ranks

State = dict[str, torch.Tensor]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 10), nn.BatchNorm1d(10), nn.Linear(10, 9), nn.Linear(9, 300)).bfloat16()


def save(path: str, size_per_shard: float) -> State:
    """On 4 ranks, FSDP2 over tensor parallelism with uneven dims; returns the whole state."""
    import lightning_shardckpt

    whole = {name: tensor.clone() for name, tensor in net().state_dict().items()}
    module, mesh = net(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    parallelize_module(module, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(module, mesh=mesh["shard"])
    state = {"model": module, "optimizer": torch.optim.SGD(module.parameters()), "average": torch.zeros(3000)}
    lightning_shardckpt.save(path, state, size_per_shard=size_per_shard)
    return whole


def load(path: str, state: State) -> State:
    dcp.load(dict(state), storage_reader=HuggingFaceStorageReader(path))
    assert not any(name.startswith("lightning_shardckpt") for name in sys.modules)
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in state.items()}


def empty(whole: State) -> State:
    return {name: torch.full_like(tensor, 7) for name, tensor in whole.items()}


def load_columns(path: str, whole: State) -> State:
    """On 2 ranks, cut along the last dim; what is 0-dim is replicated."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, Any] = {
        name: distribute_tensor(tensor, mesh, [Shard(tensor.ndim - 1) if tensor.ndim else Replicate()])
        for name, tensor in empty(whole).items()
    }
    return load(path, state)


def load_fsdp(path: str, whole: State) -> State:
    module = net()
    fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    with torch.no_grad():
        for tensor in module.state_dict().values():
            tensor.fill_(7)
    return load(path, module.state_dict())


def differing(found: State, whole: State) -> list[str]:
    assert found.keys() == whole.keys()
    return [name for name in whole if not torch.equal(found[name], whole[name])]


def test_torch_alone_reshards_our_model_files(tmp_path: Path) -> None:
    path = str(tmp_path / "a.ckpt")
    whole = run_ranks(4, save, path, 0.001)[0]
    assert len(list(Path(path).glob("model-*.safetensors"))) > 4
    for world, function in ((2, load_columns), (3, load_fsdp)):
        for found in run_ranks(world, function, path, whole, bare=True):
            assert differing(found, whole) == []
