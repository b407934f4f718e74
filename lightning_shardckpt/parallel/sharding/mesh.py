"""The topology: the sizes of all mesh axes, and their process groups. Knows nothing about models."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from functools import cached_property
from typing import Literal
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_shardckpt.distributed.host_numbers import any_rank, notices
from lightning_shardckpt.errors import TopologyError
from lightning_shardckpt.parallel.tensors.placement import READ_TIMEOUT_S, build_peers

AXES = ("pipeline", "replicate", "shard", "tensor")
"""The axes of the root mesh, outermost first; ranks are laid out row-major."""


@dataclass(frozen=True, slots=True)
class Topology:
    """The size of each mesh axis, in the order of `AXES`."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    tensor: int = 1

    @property
    def data_parallel(self) -> int:
        """The number of different batches in a step."""
        return self.replicate * self.shard

    @property
    def world_size(self) -> int:
        return self.pipeline * self.data_parallel * self.tensor


def resolve_topology(
    world_size: int, *, replicate: int = 1, shard: int | Literal["auto"] = "auto", tensor: int = 1, pipeline: int = 1
) -> Topology:
    """Return the topology of ``world_size`` processes; ``shard="auto"`` uses all processes that the other axes leave.

    Raises:
        TopologyError: if a size is below one or the sizes don't multiply to ``world_size``.
    """
    sizes = {"pipeline": pipeline, "replicate": replicate, "shard": shard, "tensor": tensor}
    wrong = {name: size for name, size in sizes.items() if size != "auto" and (not isinstance(size, int) or size < 1)}
    if wrong:
        raise TopologyError(f"mesh sizes must be integers of at least 1, found {wrong}")
    others = pipeline * replicate * tensor
    sized = max(1, world_size // others) if shard == "auto" else shard
    if others * sized != world_size:
        auto = f"{world_size} is not a multiple of {others}"
        raise TopologyError(
            f"{world_size} processes cannot form a mesh of pipeline {pipeline} x replicate {replicate} x shard {shard} "
            f"x tensor {tensor}: {auto if shard == 'auto' else f'that takes {others * sized}'}. "
            "Change the number of devices or the sizes given to ShardedStrategy."
        )
    return Topology(pipeline, replicate, sized, tensor)


@dataclass(frozen=True)  # no slots: groups are looked up once
class Meshes:
    """The process groups of one topology."""

    topology: Topology
    root: DeviceMesh  # with the axes pipeline, replicate, shard, tensor
    user: DeviceMesh  # data_parallel, tensor_parallel; no slice of `root`: torch 2.13 deprecates it for flattened axes
    timeout_s: float  # of the collectives of training

    def __deepcopy__(self, memo: dict[int, object]) -> Meshes:
        """Return itself, so that a module can be copied: process groups can't."""
        return self

    @cached_property
    def fsdp(self) -> DeviceMesh:
        """The mesh of the data axes: two axes for HSDP, else one, which may have the size 1."""
        return self.root["replicate", "shard"] if self.topology.replicate > 1 else self.root["shard"]

    @cached_property
    def data_parallel_group(self) -> dist.ProcessGroup:
        return self.user.get_group("data_parallel")

    @cached_property
    def data_parallel_rank(self) -> int:
        return self.user.get_local_rank("data_parallel")

    @cached_property
    def pipeline_group(self) -> dist.ProcessGroup:
        return self.root.get_group("pipeline")

    @cached_property
    def pipeline_rank(self) -> int:
        return self.root.get_local_rank("pipeline")

    @cached_property
    def tensor_group(self) -> dist.ProcessGroup:
        return self.root.get_group("tensor")


_kept: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[Topology, str, float], Meshes]] = WeakKeyDictionary()


def keep_meshes(meshes: Meshes) -> None:
    """Let a later `build_meshes` take the process groups of a run that ended without an error."""
    assert dist.group.WORLD is not None
    key = meshes.topology, meshes.root.device_type, meshes.timeout_s
    _kept.setdefault(dist.group.WORLD, {})[key] = replace(meshes)  # without the groups looked up, to keep none alive


def forget_meshes() -> None:
    """Let no later run take process groups: after an error, collectives may still be under way in them."""
    _kept.clear()
    notices.clear()


def build_meshes(topology: Topology, device_type: str, timeout_s: float = READ_TIMEOUT_S) -> Meshes:
    """Return the meshes of ``topology``: on all ranks the meshes of an earlier run, or new ones.

    ``timeout_s`` is the timeout of the collectives of training; reads of sharded tensors wait at most 300 s.

    Collective: every rank of the world must call it.
    """
    assert dist.group.WORLD is not None
    kept = _kept.get(dist.group.WORLD, {}).pop((topology, device_type, timeout_s), None)
    if not any_rank(kept is None):  # a rank may have ended with an error alone
        assert kept is not None
        return kept
    root = init_device_mesh(device_type, astuple(topology), mesh_dim_names=AXES)
    build_peers(root, min(timeout_s, READ_TIMEOUT_S))
    plain = (topology.pipeline, topology.data_parallel, topology.tensor)
    named = init_device_mesh(device_type, plain, mesh_dim_names=("pipeline", "data_parallel", "tensor_parallel"))
    return Meshes(topology, root, named["data_parallel", "tensor_parallel"], timeout_s)
