"""What the strategies of Trainer and Fabric have in common: processes on a mesh, over which modules are cut."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.fabric.utilities.distributed import (
    _distributed_is_initialized,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
)
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.fabric.utilities.seed import reset_seed
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_shardckpt.checkpoint_io import ShardCkptIO
from lightning_shardckpt.parallel.deferred import DeferredInit
from lightning_shardckpt.parallel.gathered_values import all_gathered
from lightning_shardckpt.parallel.mesh import AXES, Meshes, Topology, build_meshes, resolve_topology
from lightning_shardckpt.parallel.model import Recipe, ShardedModule, shard
from lightning_shardckpt.parallel.rng import same_rng
from lightning_shardckpt.parallel.scaler import unscale_over_ranks
from lightning_shardckpt.pretrained.start import Pretrained, beginning
from lightning_shardckpt.ranks import Ranks
from lightning_shardckpt.resume import checked_io
from lightning_shardckpt.state.geometry import copy_slice
from lightning_shardckpt.state.model import WholeNames

TBroadcast = TypeVar("TBroadcast")


class OnMesh:
    """Goes before Lightning's ``ParallelStrategy``, of which the Trainer and Fabric have one each."""

    parallel_devices: list[torch.device] | None
    cluster_environment: ClusterEnvironment | None
    num_nodes: int
    node_rank: int
    local_rank: int
    global_rank: int
    world_size: int
    checkpoint_timeout_s: float
    _checkpoint_io: CheckpointIO | None
    _sizes: dict[str, Any]  # arguments of resolve_topology
    _recipe: Recipe
    _timeout_s: float
    _process_group_backend: str | None
    _meshes: Meshes | None
    _ranks: Ranks

    # --- what it is ---

    @property
    def topology(self) -> Topology:
        return self.meshes.topology

    @property
    def device_mesh(self) -> DeviceMesh:
        """The root mesh: axes pipeline, replicate, shard, tensor."""
        return self.meshes.root

    @property
    def meshes(self) -> Meshes:
        if self._meshes is None:
            raise RuntimeError(
                "the device mesh exists once the processes do: the Trainer sets them up in fit, validate, …; with "
                "Fabric, call fabric.launch() before"
            )
        return self._meshes

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.topology.data_parallel, "rank": self.meshes.data_parallel_rank}

    @property
    def process_group_backend(self) -> str | None:
        return self._process_group_backend

    @property
    def checkpoint_io(self) -> ShardCkptIO:
        if self._checkpoint_io is None:
            self._checkpoint_io = ShardCkptIO()
        return checked_io(self._checkpoint_io)

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = checked_io(io)

    @property
    def _sizes_by_axis(self) -> dict[str, int]:
        return dict(zip(AXES, self.topology.shape, strict=True))

    # --- processes ---

    def set_world_ranks(self) -> None:
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        setattr(rank_zero_only, "rank", self.global_rank)  # noqa: B010  # a function attribute, unknown to mypy

    def _setup_distributed(self) -> None:
        """Make the process group, where there is none yet. Collective: every rank of the world must call it."""
        reset_seed()
        self.set_world_ranks()
        device = self.root_device
        self._process_group_backend = self._process_group_backend or _get_default_process_group_backend_for_device(
            device
        )
        assert self.cluster_environment is not None
        _init_dist_connection(
            self.cluster_environment,
            self._process_group_backend,
            timeout=timedelta(seconds=self._timeout_s),
            device_id=device if device.type != "cpu" else None,
        )

    def _new_meshes(self) -> Meshes:
        return build_meshes(resolve_topology(self.world_size, **self._sizes), self.root_device.type, self._timeout_s)

    def _new_ranks(self) -> Ranks:
        """Those who save and load together."""
        return Ranks.of_default_group(self.checkpoint_timeout_s)

    def _go_behind(self) -> Ranks | None:
        """Where saves are to be asynchronous, let them be from now on; returns who saves behind the training."""
        if not self.checkpoint_io.use_async:
            return None
        self.checkpoint_io.go_behind(behind := self._new_ranks())
        return behind

    # --- modules ---

    def _cut(
        self, module: nn.Module, values: DeferredInit | None, wanted: Pretrained | None, *, is_called: bool = False
    ) -> ShardedModule:
        """Cut a module in place and give it its first values, or those it is to begin with.

        ``is_called``: whether it will be, itself, and not only modules inside it.
        Collective: every rank of the world must call it.
        """
        with beginning(wanted, module, ranks=self._ranks, storage=self.checkpoint_io.storage) as start:
            with same_rng():  # for modules that draw their own first values only now
                record = shard(
                    module,
                    self.meshes,
                    self._recipe,
                    device=self.root_device,
                    values=values,
                    copy_slice=copy_slice,
                    loaded=start.names,
                    is_called=is_called,
                )
            start.fill(module, WholeNames(record.state_names, record.state_ties), self._ranks)
        return record

    def _unscale_over_ranks(self, scaler: object) -> None:
        if isinstance(scaler, torch.amp.GradScaler):
            unscale_over_ranks(scaler, self.root_device)

    # --- other ranks ---

    @property
    def _apart(self) -> bool:
        """Whether this rank answers alone what is asked of all."""
        return not _distributed_is_initialized()

    def _data_parallel(self, group: Any) -> Any:
        """The data-parallel group by default, which Lightning spells WORLD: the others hold the same values."""
        return self.meshes.data_parallel_group if group is None or group is dist.group.WORLD else group

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Over the data-parallel group by default."""
        if self._apart:
            return tensor
        return all_gathered(tensor, self._data_parallel(group), sync_grads=sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if self._apart:
            return decision
        votes = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(votes)
        return bool(votes == self.world_size) if all else bool(votes)

    def barrier(self, name: str | None = None) -> None:
        if not self._apart:
            dist.barrier(device_ids=[self.root_device.index] if dist.get_backend() == "nccl" else None)

    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        if self._apart:
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src)
        return box[0]
