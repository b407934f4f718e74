"""The part of a tensor that each rank holds: rows over the data axes (FSDP), any placement over the others.

The data axes are "replicate" and "shard"; the others are tensor-parallel. A rank's tensor-parallel part is split over
"shard" along dim 0, into equal runs of rows as by ``torch.chunk``. Tensors without dims stay plain.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from lightning_shardckpt.compat.dtensor import DTensorSpec, StridedShard, TensorMeta, join_meshes, local_tensor
from lightning_shardckpt.parallel.tensors.peers import Peers, peers_of

DATA_AXES = ("replicate", "shard")
NAME = "_shardckpt_name"
"""Attribute of a sharded parameter, its gradient and tensors like it: the name, which ranks compare in reads."""

ASSIGNMENTS = "_shardckpt_assignments"
"""Attribute of a sharded tensor: the number of assignments to its ``data``."""


@dataclass(frozen=True, slots=True, eq=False)
class Sharding:
    """The sharding of all tensors with the same mesh and placements.

    Attributes:
        shard: the ranks of the axis "shard", over which dim 0 is sharded; None for a size of 1.
        replicate: the ranks of the axis "replicate"; None for a size of 1.
        model_mesh: the tensor-parallel axes; None without tensor parallelism.
        model: the placements on ``model_mesh``.
    """

    shard: Peers | None
    replicate: Peers | None
    model_mesh: DeviceMesh | None
    model: tuple[Placement, ...]

    @property
    def batches(self) -> int:
        """The number of data-parallel ranks."""
        return prod(peers.size for peers in (self.shard, self.replicate) if peers is not None)


def describe(tensor: DTensor) -> str:
    """Return the name and shape of a sharded tensor, for messages and comparisons."""
    return f"{tensor.__dict__.get(NAME, 'a tensor')} of shape {tuple(tensor.shape)}"


@lru_cache(maxsize=4096)
def resolve_sharding(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Sharding:
    """Return the sharding that a mesh and placements stand for."""
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    axes = {name: (placement, size) for name, placement, size in zip(names, placements, mesh.shape, strict=True)}
    peers = {name: axis_peers(mesh, name) for name in DATA_AXES if name in axes and axes[name][1] > 1}
    others = tuple(name for name in names if name not in DATA_AXES)
    model_mesh = None if not others else mesh if len(others) == mesh.ndim else mesh[others]
    model = tuple(axes[name][0] for name in others)
    return Sharding(peers.get("shard"), peers.get("replicate"), model_mesh, model)


def axis_peers(mesh: DeviceMesh, name: str) -> Peers:
    """Return the ranks of one axis of a mesh."""
    return peers_of(mesh if mesh.ndim == 1 else mesh[name])


def spec_over(tensor: Tensor, data_mesh: DeviceMesh, root: DeviceMesh) -> DTensorSpec:
    """Return the spec that shards a tensor's rows over ``data_mesh``, in addition to its tensor-parallel placements.

    Args:
        tensor: plain, or a DTensor on tensor-parallel axes of ``root``.
        data_mesh: its axes are "replicate" and "shard", or "shard" only.
        root: the mesh of all ranks.
    """
    meta = TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)
    rows: Placement = Shard(0)
    replicas = (Replicate(),) * (data_mesh.ndim - 1)
    if not isinstance(tensor, DTensor):
        return DTensorSpec(data_mesh, (*replicas, rows), tensor_meta=meta)
    parts = prod(
        size
        for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True)
        if isinstance(placement, Shard | StridedShard) and placement.dim == 0
    )
    if parts > 1:
        rows = StridedShard(0, split_factor=parts)
    mesh = _joined(data_mesh, tensor.device_mesh, root)
    return DTensorSpec(mesh, (*replicas, rows, *tensor.placements), tensor_meta=meta)


@lru_cache(maxsize=64)
def _joined(data_mesh: DeviceMesh, model_mesh: DeviceMesh, root: DeviceMesh) -> DeviceMesh:
    model_names = model_mesh.mesh_dim_names or ()
    names = (*(data_mesh.mesh_dim_names or ()), *model_names)
    if set(names) <= set(root.mesh_dim_names or ()) and root[model_names] == model_mesh:
        return root[names]
    return join_meshes([data_mesh, model_mesh])


def rows_of(count: int, peers: Peers) -> tuple[int, int]:
    """Return this rank's half-open range of ``count`` rows."""
    each = -(-count // peers.size)
    start = min(peers.rank * each, count)
    return start, min(start + each, count)


def model_part(whole: Tensor, sharding: Sharding) -> Tensor:
    """Return this rank's tensor-parallel part of a whole tensor; may share its memory. No communication."""
    if sharding.model_mesh is None:
        return whole
    return local_tensor(distribute_tensor(whole, sharding.model_mesh, sharding.model, src_data_rank=None))


def local_part(whole: Tensor, sharding: Sharding) -> Tensor:
    """Return this rank's part of a whole tensor; may share its memory. No communication."""
    part = model_part(whole, sharding)
    if sharding.shard is None:
        return part
    start, stop = rows_of(part.shape[0], sharding.shard)
    return part[start:stop]


@lru_cache(maxsize=4096)
def model_shape(shape: torch.Size, sharding: Sharding) -> torch.Size:
    """Return the shape of this rank's tensor-parallel part."""
    return model_part(torch.empty(shape, device="meta"), sharding).shape
