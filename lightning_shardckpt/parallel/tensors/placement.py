"""Placement of a tensor's parts: rows over a mesh's data axes (FSDP), anything over the tensor-parallel ones.

The axes "replicate" and "shard" are data axes. Over "shard", dim 0 of what the other axes leave to a rank is split into
equal runs of rows, as ``torch.chunk`` does. Tensors without dims stay plain.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from lightning_shardckpt.compat.dtensor import DTensorSpec, StridedShard, TensorMeta, joined_mesh, local_tensor
from lightning_shardckpt.parallel.tensors.peers import Peers, peers_of

DATA_AXES = ("replicate", "shard")
NAME = "_shardckpt_name"
"""Attribute of a sharded parameter, and of what is made of it alone: its name, which the ranks compare in reads."""

ASSIGNMENTS = "_shardckpt_assignments"
"""Attribute of a sharded tensor: how often its ``data`` was assigned."""


@dataclass(frozen=True, slots=True, eq=False)
class Placements:
    """Sharding of the tensors of one mesh and one tuple of placements.

    Attributes:
        shard: the ranks of the axis "shard", over which dim 0 is sharded; None if there is but one.
        replicate: the ranks of the axis "replicate"; None if there is but one.
        model_mesh: the other axes; None if there are none.
        model: the placements on those.
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
    """Return what tells a sharded tensor from others."""
    return f"{tensor.__dict__.get(NAME, 'a tensor')} of shape {tuple(tensor.shape)}"


@lru_cache(maxsize=4096)
def placements_of(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Placements:
    """Return what a mesh and placements mean."""
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    axes = {name: (placement, size) for name, placement, size in zip(names, placements, mesh.shape, strict=True)}
    peers = {name: peers_of(_axis(mesh, name)) for name in DATA_AXES if name in axes and axes[name][1] > 1}
    others = tuple(name for name in names if name not in DATA_AXES)
    model_mesh = None if not others else mesh if len(others) == mesh.ndim else mesh[others]
    model = tuple(axes[name][0] for name in others)
    return Placements(peers.get("shard"), peers.get("replicate"), model_mesh, model)


def _axis(mesh: DeviceMesh, name: str) -> DeviceMesh:
    return mesh if mesh.ndim == 1 else mesh[name]


def spec_over(tensor: Tensor, data_mesh: DeviceMesh, root: DeviceMesh) -> DTensorSpec:
    """The spec of a tensor whose rows are to be sharded over ``data_mesh``, besides what tensor parallelism did.

    Args:
        tensor: plain, or a DTensor on other axes of ``root``.
        data_mesh: its axes are "replicate" and "shard", or "shard" alone.
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
    return joined_mesh([data_mesh, model_mesh])


def rows_of(count: int, peers: Peers) -> tuple[int, int]:
    """The half-open range of ``count`` rows that this rank has."""
    each = -(-count // peers.size)
    start = min(peers.rank * each, count)
    return start, min(start + each, count)


def model_part(whole: Tensor, where: Placements) -> Tensor:
    """Return what the tensor-parallel axes leave of a whole tensor to this rank; may share its memory.

    No communication.
    """
    if where.model_mesh is None:
        return whole
    return local_tensor(distribute_tensor(whole, where.model_mesh, where.model, src_data_rank=None))


def local_part(whole: Tensor, where: Placements) -> Tensor:
    """Return this rank's part of a whole tensor; may share its memory. No communication."""
    part = model_part(whole, where)
    if where.shard is None:
        return part
    start, stop = rows_of(part.shape[0], where.shard)
    return part[start:stop]


@lru_cache(maxsize=4096)
def model_shape(shape: torch.Size, where: Placements) -> torch.Size:
    """The shape of what the tensor-parallel axes leave of a tensor to this rank."""
    return model_part(torch.empty(shape, device="meta"), where).shape
