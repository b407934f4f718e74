"""The common base of both strategies: arguments, processes on a device mesh, and sharding of modules over it.

The strategies of ``pytorch`` and ``fabric`` derive from it and from Lightning's ``ParallelStrategy`` of the Trainer or
of Fabric. It must not know either.

Parameters and buffers that are not sharded must be equal on all data-parallel ranks. A value computed from a rank's own
batch (a learning rate, a running mean) would make them differ without an error, and a checkpoint would have the
values of one rank. Statistics of norms are excluded: they are broadcast, see ``parallel.sharding.shared_values``.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Literal, TypeVar
from weakref import ref

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.fabric.utilities.seed import pl_worker_init_function, reset_seed
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torchmetrics import Metric
from typing_extensions import override

from lightning_shardckpt.checkpoint.save_job import Digests, combine_digests, digest_replicas, find_differences
from lightning_shardckpt.checkpoint_io import ShardCkptIO
from lightning_shardckpt.compat.data_loading import draw_orders_by_epoch
from lightning_shardckpt.compat.lightning_runs import init_process_group
from lightning_shardckpt.compat.torch_modules import NormWithStatistics, non_persistent_buffers
from lightning_shardckpt.distributed.host_numbers import any_rank, broadcast_object, reduce_tensor
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.distributed.world import current_world
from lightning_shardckpt.errors import TopologyError, UnsupportedCodeError
from lightning_shardckpt.parallel.first_values.one_rank import Build
from lightning_shardckpt.parallel.pipeline.build import Pipeline
from lightning_shardckpt.parallel.shard_model import Recipe, ShardedModule, shard
from lightning_shardckpt.parallel.sharding.fsdp import FSDP, reshard
from lightning_shardckpt.parallel.sharding.mesh import Meshes, Topology, build_meshes, resolve_topology
from lightning_shardckpt.parallel.sharding.shared_values import all_gather_tensors, broadcast_statistics
from lightning_shardckpt.parallel.tensors.values import refuse_different_numbers, report_numbers, share_rng
from lightning_shardckpt.state.local_tensors import copy_slice
from lightning_shardckpt.state.model import WholeNames
from lightning_shardckpt.storage.router import file_path
from lightning_shardckpt.strategy.batch_agreement import BatchAgreement
from lightning_shardckpt.strategy.pretrained import Pretrained, find_pretrained, load_pretrained
from lightning_shardckpt.strategy.steps import PipelinedSteps, autocast_dtype
from lightning_shardckpt.system.host import TUNING, Tuning
from lightning_shardckpt.system.text import list_some

_DRAWS = "random numbers"
T = TypeVar("T")


class OneProcess(LightningEnvironment):
    """The environment of a process that is the only rank. It leaves the variables of the environment as they are."""

    creates_processes_externally = True

    @override
    def local_rank(self) -> int:
        return 0

    node_rank = local_rank

    @override
    def teardown(self) -> None:
        pass


class MeshStrategy:
    """The common part of both strategies; the base class before Lightning's ``ParallelStrategy``."""

    parallel_devices: list[torch.device] | None
    cluster_environment: ClusterEnvironment | None
    num_nodes: int
    node_rank: int
    local_rank: int
    global_rank: int
    world_size: int
    _checkpoint_io: ShardCkptIO | None
    axis_sizes: dict[str, Any]  # as requested; ``topology`` has the resolved ones
    tuning: Tuning = TUNING  # timeouts of ranks; ``ShardCkptIO.load_options`` has the sizes of a load

    def __init__(
        self,
        *,
        data_parallel_shard_size: int | Literal["auto"] = "auto",
        data_parallel_replicate_size: int = 1,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        tensor_parallel_plan: str | dict[str, Any] | Callable[..., Any] = "auto",
        fsdp: FSDP | None = None,
        pipeline: Pipeline | None = None,
        pretrained: str | Pretrained | None = None,
        timeout_s: float = 1800.0,
    ) -> None:
        """Set the options; no process is started.

        Args:
            data_parallel_shard_size: Processes that shard parameters (FSDP); ``"auto"`` takes the remaining processes.
            data_parallel_replicate_size: Replicas of the sharded model (HSDP).
            tensor_parallel_size: Processes that compute one layer together.
            pipeline_parallel_size: Processes over which the layers are distributed, each with some of them. See
                "Pipelines" in the documentation for the requirements on a module; in Fabric, steps run by ``run_step``.
            tensor_parallel_plan: ``"auto"`` (the Hugging Face model's own), a dict of module pattern to style, a
                function of (module, tensor mesh) that shards the module, or the import path of one. In a pattern
                ``*`` is any part of one component of a module name, ``**`` any number of components; the last match
                decides. A style is a torch ParallelStyle or a name: colwise, rowwise, colwise_gather_output,
                rowwise_split_input, embedding_rowwise, embedding_colwise, replicate, replicated_with_grad_allreduce.
            fsdp: How parameters are sharded and gathered, as ``FSDP(…)``.
            pipeline: How layers are distributed over stages and run, as ``Pipeline(…)``.
            pretrained: Path of initial weights: a Hugging Face directory, a file of safetensors or of ``torch.save``,
                or a checkpoint; or ``Pretrained(…)``, with options. Each rank reads its slices when the module is
                sharded, unless the Trainer is given a ckpt_path; in Fabric, for the module that is set up first. See
                "Pretrained weights" in the documentation.
            timeout_s: Of the collectives of training, and of a rank that waits for the others while saving or loading.

        Raises:
            TopologyError: for options of ``fsdp`` and ``pipeline`` that don't go together.
        """
        super().__init__()
        self.axis_sizes = {
            "shard": data_parallel_shard_size,
            "replicate": data_parallel_replicate_size,
            "tensor": tensor_parallel_size,
            "pipeline": pipeline_parallel_size,
        }
        self._recipe = Recipe(tensor_parallel_plan, fsdp or FSDP(), pipeline or Pipeline())
        self._recipe.pipeline.check(pipeline_parallel_size)
        if self._recipe.fsdp.reshard_after_forward and pipeline_parallel_size > 1:
            raise TopologyError(
                "FSDP(reshard_after_forward=True) would gather the parameters of a pipeline again for each microbatch. "
                "Use reshard_after_forward=False, which gathers them once for all"
            )
        if pretrained is not None and not isinstance(pretrained, Pretrained):
            pretrained = Pretrained(os.fspath(pretrained))
        self._pretrained = pretrained and replace(pretrained, path=file_path(pretrained.path))
        self._timeout_s = timeout_s
        self._meshes: Meshes | None = None
        self._group: ref[dist.ProcessGroup] | None = None
        self._ranks = Ranks.alone()
        self._sharded = list[ShardedModule]()  # the modules, in the order in which they were set up
        self._build, self._agreement = Build(), BatchAgreement()
        self._prepare()

    @abstractmethod
    def _prepare(self) -> None:
        """Set the rest of the initial state; called once, at the end of ``__init__``."""

    # --- properties ---

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
                "the device mesh is created with the process group: the Trainer does so in fit, validate, …; with "
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
    def checkpoint_io(self) -> ShardCkptIO:
        if self._checkpoint_io is None:
            self._checkpoint_io = ShardCkptIO()
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        if not isinstance(io, ShardCkptIO):
            raise TypeError(
                f"ShardedStrategy saves with ShardCkptIO, got {type(io).__name__}: every rank writes its own slices. "
                "Pass plugins=[ShardCkptIO()], not inside of another CheckpointIO; use_async=True makes it asynchronous"
            )
        self._checkpoint_io = io

    @property
    def _sizes_by_axis(self) -> dict[str, int]:
        return asdict(self.topology)

    # --- processes ---

    def set_world_ranks(self) -> None:
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        setattr(rank_zero_only, "rank", self.global_rank)  # noqa: B010  # a function attribute, unknown to mypy

    def _choose_environment(self) -> None:
        """Let a process that trains alone know nothing of the ranks among which a launcher may have started it.

        A script may train on one device and then on several: processes started for the latter run the former, too.
        """
        if self.num_nodes * self.num_processes == 1 and type(self.cluster_environment) is LightningEnvironment:
            self.cluster_environment = OneProcess()

    @property
    def _has_group(self) -> bool:
        """True if the process group is that of this strategy's meshes."""
        return self._meshes is not None and self._group is not None and self._group() is dist.group.WORLD

    def _setup_distributed(self) -> None:
        """Initialize the process group, if there is none. Collective: every rank of the world must call it.

        Raises:
            TopologyError: if there is one of another size, with more than this process.
        """
        reset_seed()
        self.set_world_ranks()
        assert self.cluster_environment is not None
        size = self.num_nodes * self.num_processes
        if dist.is_initialized() and dist.get_world_size() != size:
            if (found := dist.get_world_size()) > 1:
                raise TopologyError(
                    f"this Trainer or Fabric has {size} process(es), but the process group of this script has {found}: "
                    "give all of them the same devices and num_nodes, or run them in scripts of their own, from a "
                    "checkpoint"
                )
            dist.destroy_process_group()  # of an earlier run of this process alone
        init_process_group(self.cluster_environment, self.root_device, timeout_s=self._timeout_s)
        assert dist.group.WORLD is not None
        self._group = ref(dist.group.WORLD)
        if size > 1:
            current_world().watch(self.tuning)

    def _new_meshes(self) -> Meshes:
        topology = resolve_topology(self.world_size, **self.axis_sizes)
        return build_meshes(topology, self.root_device.type, self._timeout_s)

    def _new_ranks(self) -> Ranks:
        """Return new ranks for saves and loads."""
        return Ranks.of_group(timeout_s=self._timeout_s, tuning=self.tuning)

    def _enable_async(self) -> None:
        """Start asynchronous saves, if ShardCkptIO has them."""
        if self.checkpoint_io.is_async:
            self.checkpoint_io.enable_async(self._new_ranks())

    # --- loaders and modules ---

    def process_dataloader(self, loader: Any) -> Any:
        """Prepare a loader in place. Ranks of one tensor group draw the same batches, so workers need equal seeds."""
        draw_orders_by_epoch(loader)
        init = getattr(loader, "worker_init_fn", 0)
        is_lightnings = isinstance(init, partial) and init.func is pl_worker_init_function
        if is_lightnings or (init is None and int(os.environ.get("PL_SEED_WORKERS", "0"))):
            loader.worker_init_fn = partial(pl_worker_init_function, rank=self.meshes.data_parallel_rank)
        return loader

    def _shard_module(
        self,
        module: nn.Module,
        build: Build,
        pretrained: Pretrained | None,
        *,
        precision: object,
        restores: Callable[[], bool] = lambda: False,
        is_called: bool = False,
        is_last: bool = True,
    ) -> ShardedModule:
        """Shard a module in place, and fill it with its initial or pretrained values. Collective.

        ``restores`` and ``is_called`` are passed to `shard`, ``is_last`` to `find_pretrained`.
        """
        build.compare(module, self._ranks)
        opening: dict[str, Any] = {"ranks": self._ranks, "storage": self.checkpoint_io.storage}
        loaded, adapters = frozenset[str](), frozenset[str]()
        if pretrained is not None:
            loaded, adapters = find_pretrained(pretrained, module, is_last=is_last, **opening)
        with share_rng():  # some modules initialize their weights only now
            sharded = shard(
                module,
                self.meshes,
                replace(self._recipe, autocast_dtype=autocast_dtype(precision)),
                device=self.root_device,
                build=build,
                copy_slice=copy_slice,
                loaded=loaded,
                restores=restores,
                is_called=is_called,
            )
        if pretrained is not None:
            whole = WholeNames(sharded.state_names, sharded.state_ties)
            load_pretrained(pretrained, module, whole, adapters, **opening)
        return sharded

    def reshard(self) -> None:
        """Free gathered parameters of modules that apply FSDP2 themselves. No communication."""
        for sharded in self._sharded:
            reshard(sharded.root)

    # --- steps ---

    @contextmanager
    def _reducing(self, pipelined: PipelinedSteps | None) -> Iterator[None]:
        """Run a backward inside, and that of a pipeline after it; then gradients and statistics are those of all ranks.

        Collective: every rank of the world must call it.
        """
        with ExitStack() as stack:
            for sharded in self._sharded if pipelined is None else ():
                stack.enter_context(sharded.gradients.backward())
            yield
        if pipelined is not None:
            pipelined.backward()
        for sharded in self._sharded:
            if not sharded.gradients.is_blocked:  # autograd needed the statistics until now
                broadcast_statistics(sharded.root, self.meshes.data_parallel_group)

    def _refuse_stored_metrics(self, module: nn.Module) -> None:
        """Refuse metrics whose states are saved with their module: each data-parallel rank has states of its own."""
        for name, one in module.named_modules() if self.topology.data_parallel > 1 else ():
            if isinstance(one, Metric) and one.state_dict():
                raise UnsupportedCodeError(
                    f"the state of {name or type(one).__name__} is saved with the model (persistent(True)), but each "
                    "data-parallel rank has the state of its own batches: use metric.persistent(False), and save its "
                    "result"
                )

    def _compare_ranks(self, *, parameters: bool, draws: int = 0) -> None:
        """Check that ranks have not diverged. Collective: every rank of the world must call it."""
        if not self._is_alone:
            roots = [one.root for one in self._sharded]
            compare_ranks(roots, self._ranks, self.meshes, parameters=parameters, draws=draws)

    # --- collectives ---

    @property
    def _is_alone(self) -> bool:
        """True if collectives involve only this rank."""
        return not dist.is_initialized() or dist.get_world_size() == 1

    def _data_parallel(self, group: Any) -> Any:
        """Return the data-parallel group for None and for WORLD, Lightning's default: other ranks have equal values."""
        return self.meshes.data_parallel_group if group is None or group is dist.group.WORLD else group

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Gather over the data-parallel group by default. The result has a dim of ranks, also for a single process."""
        if self._is_alone and not (dist.is_initialized() and dist.get_world_size() == 1):
            return tensor
        return all_gather_tensors(tensor, self._data_parallel(group), sync_grads=sync_grads)

    def all_reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over the data-parallel group by default, since the ranks of a tensor group have equal values.

        Other values are returned as they are.
        """
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        if not isinstance(tensor, Tensor) or self._is_alone:
            return tensor
        ranks = self._data_parallel(group)
        return tensor if ranks.size() == 1 else reduce_tensor(tensor, ranks, reduce_op)

    reduce = all_reduce  # its name in the Trainer

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if self._is_alone:
            return decision
        return not any_rank(not decision) if all else any_rank(decision)

    def barrier(self, name: str | None = None) -> None:
        if not self._is_alone:
            any_rank(False)

    def broadcast(self, obj: T, src: int = 0) -> T:
        return obj if self._is_alone else broadcast_object(obj, src)


# Python uses this name in errors about unknown arguments; users construct a ShardedStrategy.
MeshStrategy.__init__.__qualname__ = "ShardedStrategy.__init__"


def compare_ranks(
    modules: Iterable[nn.Module], ranks: Ranks, meshes: Meshes, *, parameters: bool, draws: int = 0
) -> None:
    """Compare numbers written into sharded tensors, replicated values of modules, and ``draws`` of tensor groups.

    Collective: every rank of the world must call it. The error names a rank that doesn't. A save compares
    ``parameters`` anyway.

    Raises:
        UnsupportedCodeError: naming the values that differ, on every rank.
        Exception: as in `Ranks.step`.
    """
    digests, stage = Digests(), meshes.pipeline_rank
    tensor_rank = meshes.root.get_local_rank("tensor") if meshes.topology.tensor > 1 else 0
    if meshes.topology.data_parallel > 1:
        digests = digest_replicas(
            (f"{number} {stage} {tensor_rank}", name, tensor)
            for number, module in enumerate(modules)
            for name, tensor in _replicated(module, parameters=parameters)
        )
    if meshes.topology.tensor > 1:
        digests[f"draws {stage} {meshes.data_parallel_rank}"] = {_DRAWS: str(draws)}
    numbers, combined = report_numbers(stage, meshes.topology.pipeline), combine_digests(digests)

    def join(reports: list[tuple[list[int], Digests]]) -> tuple[list[int], bool]:
        maxima = [max(column) for column in zip(*(numbers for numbers, _ in reports), strict=True)]
        return maxima, bool(find_differences(replicas for _, replicas in reports))

    written, differ = ranks.step("comparing the ranks", lambda: (numbers, combined), join)
    refuse_different_numbers(written)
    if not differ:
        return
    reports: list[Digests] = ranks.step("comparing replicated values", lambda: digests, lambda reports: reports)
    names = find_differences(reports)
    if _DRAWS in names:
        raise UnsupportedCodeError(
            "the ranks of a tensor-parallel group drew different random numbers in training_step (dropout, noise), so "
            "they no longer train one model. Code that runs on some ranks only (if self.global_rank == 0) drew from "
            "the global generators before: let all ranks draw, or draw there from a torch.Generator of its own."
        )
    raise UnsupportedCodeError(
        f"{list_some([*names], 5)} differs between the data-parallel ranks, which each compute it from their own "
        "batches: the model differs from one process, and a checkpoint would have the values of one rank. Reduce "
        "values that are computed from a batch (self.all_gather(x).mean(0), self.trainer.strategy.reduce(x)) before "
        "they are used; if a buffer may differ between ranks, use register_buffer(…, persistent=False)."
    )


def _replicated(root: nn.Module, *, parameters: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a module that all data-parallel ranks must hold equally, by FQN."""
    for prefix, module in root.named_modules():
        named: list[tuple[str, Tensor]] = [*module.named_parameters(prefix, recurse=False)] if parameters else []
        if not isinstance(module, NormWithStatistics):
            passing, buffers = non_persistent_buffers(module), module.named_buffers(prefix, recurse=False)
            named += [(name, buffer) for name, buffer in buffers if name.rpartition(".")[2] not in passing]
        for name, value in named:
            if type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided and value.numel():
                yield name, value
