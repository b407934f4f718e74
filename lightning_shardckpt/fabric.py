"""Fabric's door: ``ShardedStrategy`` for ``lightning.fabric``.

Fabric's hooks in the order in which a script calls them; what they do is in ``parallel/`` and ``restoring``.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from lightning.fabric import wrappers
from lightning.fabric.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.fabric.strategies.parallel import ParallelStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from lightning.fabric.utilities.distributed import (
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.optimizer import _optimizer_to_device
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_shardckpt.checkpoint_io import ShardCkptIO
from lightning_shardckpt.errors import TopologyError
from lightning_shardckpt.function_job import FunctionJob
from lightning_shardckpt.on_mesh import OnMesh
from lightning_shardckpt.parallel.clip import clip_by_norm, clip_by_value
from lightning_shardckpt.parallel.cutting import PipelineRecipe
from lightning_shardckpt.parallel.deferred import DeferredInit
from lightning_shardckpt.parallel.fsdp import reshard
from lightning_shardckpt.parallel.materialize import meta_slots
from lightning_shardckpt.parallel.mesh import Meshes
from lightning_shardckpt.parallel.model import Recipe, ShardedModule, rebind_optimizer
from lightning_shardckpt.parallel.rng import same_rng, share_rng
from lightning_shardckpt.parallel.statistics import broadcast_statistics
from lightning_shardckpt.parts import PARTS
from lightning_shardckpt.pending import drain_all
from lightning_shardckpt.pipelined import PipelinedSteps
from lightning_shardckpt.pretrained.start import Pretrained, imported
from lightning_shardckpt.ranks import Ranks
from lightning_shardckpt.restoring import Restore
from lightning_shardckpt.state.model import WholeNames
from lightning_shardckpt.state.objects import WRAPPED, Objects, checkpoint_of, names_for, objects_in
from lightning_shardckpt.state.statedicts import states_of_checkpoint

__all__ = ["ShardCkptIO", "ShardedStrategy"]


class ShardedStrategy(OnMesh, ParallelStrategy):  # type: ignore[misc]  # gives ShardCkptIO, takes any CheckpointIO
    """Trains what Fabric sets up under any mix of replicated and sharded data parallel, tensor and pipeline parallel.

    ``fabric.setup`` cuts a module that was built like any other. An optimizer that was built before gets the parameters
    that the module has afterwards. Initial weights are the same on every topology.

    Sharded parameters act as whole tensors, as the Trainer's ``ShardedStrategy`` describes it.

    Each rank saves its slices with ``fabric.save``, in the format of the Trainer's ``ShardedStrategy`` and of
    ``lightning_shardckpt.save``: each loads the other's model and optimizers. Keys belong together as there.

    Args:
        data_parallel_shard_size: Processes that shard parameters (FSDP); ``"auto"`` takes those that the others leave.
        data_parallel_replicate_size: Replicas of the sharded model (HSDP).
        tensor_parallel_size: Processes that compute one layer together.
        pipeline_parallel_size: Processes over which the layers are distributed. Steps run by ``run_step`` then. It and
            the other arguments for pipelines are those of ``lightning_shardckpt.ShardedStrategy``.
        pipeline_layers: See there.
        pipeline_split: See there.
        pipeline_modules: See there.
        pipeline_schedule: See there.
        pipeline_microbatches: See there.
        pipeline_loss: See there.
        pipeline_stages_per_rank: See there.
        tensor_parallel_plan: See ``lightning_shardckpt.ShardedStrategy``, as for all others.
        fsdp_units: The modules that are gathered one by one.
        reshard_after_forward: Free gathered parameters between forward and backward.
        activation_checkpointing: Recompute activations of the FSDP units (True) or of modules by pattern or class.
        cpu_offload: Keep parameters, gradients and optimizer state in CPU memory.
        pretrained: Path of weights to begin with, for the module that is set up first: a Hugging Face directory, a file
            of safetensors or of ``torch.save``, or a checkpoint. Each rank reads its slices when the module is cut.
        pretrained_key_mapping: See ``lightning_shardckpt.ShardedStrategy``, as for the next.
        pretrained_strict: Make missing and unexpected tensors an error instead of a warning.
        accumulate_unsharded: Under ``fabric.no_backward_sync``, keep gradients whole and communicate once.
        timeout_s: For the collectives of training.
        checkpoint_timeout_s: For a rank to wait for the others while saving or loading.
        process_group_backend: By default gloo on CPU and nccl on CUDA.
    """

    def __init__(
        self,
        *,
        data_parallel_shard_size: int | Literal["auto"] = "auto",
        data_parallel_replicate_size: int = 1,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        pipeline_layers: list[str] | None = None,
        pipeline_split: str | list[str] = "even",
        pipeline_modules: dict[str, Literal["first", "last", "every"]] | None = None,
        pipeline_schedule: str = "gpipe",
        pipeline_microbatches: int | None = None,
        pipeline_loss: Literal["batch", "microbatch"] = "batch",
        pipeline_stages_per_rank: int = 1,
        tensor_parallel_plan: str | dict[str, Any] | Callable[..., Any] = "auto",
        fsdp_units: list[str] | None = None,
        reshard_after_forward: bool | None = None,
        activation_checkpointing: bool | list[str] = False,
        cpu_offload: bool = False,
        pretrained: str | None = None,
        pretrained_key_mapping: dict[str, str | None] | str | Callable[..., Any] | None = None,
        pretrained_strict: bool = False,
        accumulate_unsharded: bool = True,
        timeout_s: float = 1800.0,
        checkpoint_timeout_s: float = 1800.0,
        process_group_backend: str | None = None,
    ) -> None:
        super().__init__()
        self._sizes: dict[str, Any] = {
            "shard": data_parallel_shard_size,
            "replicate": data_parallel_replicate_size,
            "tensor": tensor_parallel_size,
            "pipeline": pipeline_parallel_size,
        }
        pipelined = PipelineRecipe(
            layers=pipeline_layers,
            split=pipeline_split,
            modules=pipeline_modules or {},
            schedule=pipeline_schedule,
            microbatches=pipeline_microbatches,
            loss=pipeline_loss,
            stages_per_rank=pipeline_stages_per_rank,
        )
        pipelined.check(pipeline_parallel_size)
        self._recipe = Recipe(
            tensor_parallel_plan=tensor_parallel_plan,
            fsdp_units=fsdp_units,
            reshard_after_forward=reshard_after_forward,
            activation_checkpointing=activation_checkpointing,
            cpu_offload=cpu_offload,
            pipeline=pipelined,
        )
        mapping = imported(pretrained_key_mapping)
        self._pretrained = Pretrained(str(pretrained), mapping, pretrained_strict) if pretrained is not None else None
        self._accumulate_unsharded = accumulate_unsharded
        self._timeout_s, self.checkpoint_timeout_s = timeout_s, checkpoint_timeout_s
        self._process_group_backend = process_group_backend
        self._num_nodes = 1  # Fabric's connector overwrites it
        self._meshes: Meshes | None = None
        self._sharded: list[ShardedModule] = []
        self._running: ShardedModule | None = None
        self._stepped: PipelinedSteps | None = None  # the one whose loss has not gone through a backward yet
        self._deferred: list[DeferredInit] = []
        self._ranks = Ranks.alone()
        self._backward_sync_control = _HeldBackward(self)

    # --- what it is ---

    @property
    @override
    def num_nodes(self) -> int:
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    # --- processes ---

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if not self.cluster_environment.creates_processes_externally:
            self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self._num_nodes)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        if self._meshes is not None:
            return
        self._setup_distributed()
        self._meshes, self._ranks = self._new_meshes(), self._new_ranks()
        behind = self._go_behind()
        if behind is not None:
            atexit.register(behind.linger)  # nobody tears a strategy of Fabric down
        if self.topology.tensor > 1:
            share_rng(self.meshes.tensor_group)
        self._unscale_over_ranks(getattr(self.precision, "scaler", None))

    # --- modules and optimizers ---

    @contextmanager
    @override
    def module_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Modules are built on the CPU, alike on all ranks; with ``empty_init`` without memory until they are cut."""
        with ExitStack() as stack:
            stack.enter_context(same_rng())
            if empty_init:
                self._deferred.append(stack.enter_context(DeferredInit()))
            stack.enter_context(self.precision.module_init_context())
            yield

    @override
    def module_to_device(self, module: nn.Module) -> None:
        """Parameters and buffers are placed when the module is cut."""

    @override
    def setup_module(self, module: nn.Module) -> nn.Module:
        """Collective: every rank of the world must call it."""
        slots = meta_slots(module)
        values = next((d for d in self._deferred if any(d.knows(owner, name) for owner, name in slots)), None)
        wanted, self._pretrained = self._pretrained, None
        record = self._cut(module, values, wanted, is_called=True)
        self._sharded.append(record)
        return _Forward(record, self)

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        if not self._sharded:
            raise TopologyError(
                f"{type(optimizer).__name__} is set up before any module: call fabric.setup(model, optimizer), or "
                "fabric.setup_module(model) first"
            )
        replaced = {old: new for record in self._sharded for old, new in record.replaced.items()}
        elsewhere = {old: new for record in self._sharded for old, new in record.elsewhere.items()}
        rebind_optimizer(optimizer, replace(self._sharded[0], replaced=replaced, elsewhere=elsewhere))
        if not self._recipe.cpu_offload:
            _optimizer_to_device(optimizer, self.root_device)
        return optimizer

    @override
    def process_dataloader(self, dataloader: DataLoader[Any]) -> DataLoader[Any]:
        """Workers are seeded by data-parallel rank: ranks of one tensor group must draw the same batches."""
        seeding = dataloader.worker_init_fn
        if isinstance(seeding, partial) and seeding.func is pl_worker_init_function:
            dataloader.worker_init_fn = partial(pl_worker_init_function, rank=self.meshes.data_parallel_rank)
        return dataloader

    # --- steps ---

    @override
    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Gradients are final when this returns. Collective: every rank of the world must call it."""
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        stepped, self._stepped = self._stepped, None
        with ExitStack() as stack:
            if stepped is None:
                for record in self._sharded:
                    stack.enter_context(record.gradients.backward())
            super().backward(tensor, module, *args, **kwargs)
        if stepped is not None:
            stepped.backward()
        for record in self._sharded:
            if not record.gradients.is_blocked:
                broadcast_statistics(record.root, self.meshes.data_parallel_group)

    def run_step(
        self, step: Callable[[Any], Any], batch: Any, module: nn.Module | None = None, *, scale: float = 1.0
    ) -> Any:
        """What a step function returns for a batch; of a pipeline all stages run it, and what the last one returns is
        returned on all. Without pipelines, the same as ``step(batch)``.

        Collective: every rank of the world must call it, with the same batch on all ranks of a pipeline. With gradients
        enabled it must return a loss tensor or a dict with one as "loss", for ``fabric.backward``.

        Args:
            step: calls the module, and computes the loss. It runs several times.
            batch: its argument, which is cut into microbatches along the first dim of its tensors.
            module: what ``fabric.setup`` returned, if several modules were set up.
            scale: what the loss is going to be multiplied with before the backward, for schedules that run backward
                passes at once.

        Raises:
            TopologyError: for steps that can't be pipelined, on every rank; see "Pipelines" in the README.
        """
        if self.topology.pipeline == 1:
            return step(batch)
        record = self._record_of(module)
        assert record.pipeline is not None
        pipeline, train = record.pipeline, torch.is_grad_enabled()

        def job_of(name: str, context: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FunctionJob:
            return FunctionJob(step, pipeline, args[0], train=train)

        scaler = getattr(self.precision, "scaler", None)
        factor = scaler.get_scale() if isinstance(scaler, torch.amp.GradScaler) else 1.0
        steps = PipelinedSteps(record.root, pipeline, self.root_device, lambda: factor * scale, job_of)
        self._running, self._stepped = record, None
        try:
            with _in_backward() if pipeline.backward_early else nullcontext():
                if train:
                    output = steps.training_step(nullcontext, (batch,), {})
                else:
                    output = steps.evaluate("evaluation", nullcontext, (batch,), {})
        except BaseException:
            steps.reset()
            raise
        finally:
            self._running = None
        if train and output is not None:
            self._stepped = steps
        return output

    def _record_of(self, module: nn.Module | None) -> ShardedModule:
        if module is None and len(self._sharded) == 1:
            return self._sharded[0]
        forward = getattr(module, "_forward_module", module)
        record = None if forward is None else forward.__dict__.get("record")
        if not isinstance(record, ShardedModule):
            raise TopologyError(
                f"run_step needs to know the module, of the {len(self._sharded)} that were set up: pass module=, what "
                "fabric.setup returned"
            )
        return record

    def reshard(self) -> None:
        """Free what FSDP2 has gathered, where a module has applied it by itself. No communication."""
        for record in self._sharded:
            reshard(record.root)

    @override
    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Over all ranks, however parameters are cut. Collective: every rank of the world must call it."""
        self.precision.unscale_gradients(optimizer)
        holders = {p: ranks for record in self._sharded for p, ranks in record.holders.items()}
        return clip_by_norm(
            list(self.precision.main_params(optimizer)),
            max_norm,
            device=self.root_device,
            ranks_of=lambda p: holders.get(p, self.world_size),
            norm_type=norm_type,
            error_if_nonfinite=error_if_nonfinite,
        )

    @override
    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        self.precision.unscale_gradients(optimizer)
        clip_by_value(self.precision.main_params(optimizer), clip_val)

    # --- other ranks ---

    @override
    def all_reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Over the data-parallel group by default."""
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        if not isinstance(tensor, Tensor):
            return tensor
        return _sync_ddp_if_available(tensor, self._data_parallel(group), reduce_op=reduce_op)

    # --- checkpoints ---

    def wait(self) -> None:
        """Wait for asynchronous saves, and raise what they failed with.

        Collective: every rank must call it. Without it, errors are raised by the next save, or shown at the end.
        """
        self.checkpoint_io.wait()

    @override
    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: dict[str, Any],
        storage_options: Any | None = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Collective: every rank writes its own slices, at the path of rank 0."""
        self.reshard()
        found: list[tuple[Objects, WholeNames, dict[str, Any]]] = []

        def describe() -> str:
            objects = objects_in(state)
            whole = self._whole(objects)
            checkpoint = checkpoint_of(state, objects, names_for(objects, self._all, whole), filter)
            found.append((objects, whole, checkpoint))
            return os.fspath(path)

        chosen: str = self._ranks.step("describing what to save", describe, lambda paths: paths[0])
        ((objects, whole, checkpoint),) = found
        self.checkpoint_io.attach(self._ranks, objects.root, self._sizes_by_axis, names=whole)
        self.checkpoint_io.save_checkpoint(checkpoint, chosen, storage_options)

    @override
    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: nn.Module | Optimizer | dict[str, Any] | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Collective: fills live objects in place, from any topology; without a state, each rank gets everything."""
        path, io = self.broadcast(path), self.checkpoint_io
        if io.resume != frozenset(PARTS):
            raise ValueError("ShardCkptIO(resume=…) is for a Trainer; leave parts out of the state that is loaded")
        self.reshard()
        if not state and not isinstance(state, nn.Module | Optimizer):
            return states_of_checkpoint(io.load_whole(path, weights_only=weights_only))
        drain_all()
        one = state if isinstance(state, dict) else {"state": state}
        objects = objects_in(one)
        names: dict[str, Any] = {"named_by": self._all, "whole": self._whole(objects)}
        restore = Restore(one, objects, **names, skip=io.resume_skip, cast=io.cast)
        remainder, loaded = restore.run(
            os.fspath(path),
            self._ranks,
            strict=strict,
            verify=io.verify,
            share_reads=io.share_reads,
            storage=io.storage,
            weights_only=weights_only is not False,
        )
        for note in loaded.notes:
            rank_zero_warn(note)
        for note in loaded.skipped:
            rank_zero_info(note)
        return remainder if isinstance(state, dict) else {}

    @property
    def _all(self) -> nn.Module:
        """All modules that were set up, as one."""
        objects = Objects()
        objects.modules |= {(number,): record.root for number, record in enumerate(self._sharded)}
        return objects.root

    def _whole(self, objects: Objects) -> WholeNames:
        """Names of the whole modules, also on a stage that has parts of them."""
        records = {id(record.root): record for record in self._sharded}
        names, ties = set[str](), list[tuple[str, ...]]()
        for path, prefix in objects.prefixes.items():
            record = records.get(id(objects.modules[path]))
            if record is not None:
                names |= {prefix + name for name in record.state_names}
                ties += [tuple(prefix + name for name in tie) for tie in record.state_ties]
            else:
                names |= {prefix + name for name in objects.modules[path].state_dict()}
        return WholeNames(frozenset(names), tuple(ties))


class _Forward(nn.Module):
    """Runs the forward of a module that was cut, under the hooks of FSDP."""

    def __init__(self, record: ShardedModule, strategy: ShardedStrategy) -> None:
        super().__init__()
        self.__dict__["record"] = record  # not a submodule: Fabric has the module itself
        self.__dict__[WRAPPED] = record.root
        self._strategy = strategy

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        record: ShardedModule = self.__dict__["record"]
        if record.pipeline is not None:
            if self._strategy._running is not record:
                raise TopologyError(
                    f"{type(record.root).__name__} is a pipeline, of which this rank has a part: call it in a "
                    "function of the batch, by fabric.strategy.run_step(function, batch)"
                )
            return record.root(*args, **kwargs)
        found = record.run(partial(record.root, *args, **kwargs))
        if not torch.is_grad_enabled():  # no backward will follow
            reshard(record.root)
        return found


@contextmanager
def _in_backward() -> Generator[None, None, None]:
    """Inside, Fabric lets backward passes run: the schedule's, before ``fabric.backward`` is called."""
    before, wrappers._in_fabric_backward = wrappers._in_fabric_backward, True
    try:
        yield
    finally:
        wrappers._in_fabric_backward = before


class _HeldBackward(_BackwardSyncControl):
    def __init__(self, strategy: ShardedStrategy) -> None:
        self._strategy = strategy

    @override
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        record = module.__dict__.get("record")
        if not isinstance(record, ShardedModule):
            raise TypeError(f"{type(module).__name__} was not set up by fabric.setup")
        return record.gradients.blocked() if enabled and self._strategy._accumulate_unsharded else nullcontext()
