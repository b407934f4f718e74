"""The Trainer's door: ``ShardedStrategy`` for ``lightning.pytorch``.

Lightning's hooks in the order the Trainer calls them; what they do is in ``parallel/``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.fabric.utilities.distributed import (
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torchmetrics import Metric
from typing_extensions import override

from lightning_shardckpt.adapt import gather_metrics_over, mark_user_code
from lightning_shardckpt.checkpoint_io import ShardCkptIO, load_from_checkpoint
from lightning_shardckpt.collector import resting
from lightning_shardckpt.errors import TopologyError
from lightning_shardckpt.latest import ResolvingLauncher, begins_anew
from lightning_shardckpt.on_mesh import OnMesh
from lightning_shardckpt.parallel.clip import clip_by_norm, clip_by_value
from lightning_shardckpt.parallel.cutting import PipelineRecipe
from lightning_shardckpt.parallel.deferred import DeferredInit
from lightning_shardckpt.parallel.fsdp import reshard
from lightning_shardckpt.parallel.materialize import broadcast_weights
from lightning_shardckpt.parallel.mesh import Meshes
from lightning_shardckpt.parallel.model import (
    Recipe,
    ShardedModule,
    empty_optimizers_allowed,
    rebind_optimizer,
)
from lightning_shardckpt.parallel.replicas import check_batch
from lightning_shardckpt.parallel.rng import same_rng, share_rng
from lightning_shardckpt.parallel.sharding import numbers
from lightning_shardckpt.parallel.sharding.values import check_state_of_shards
from lightning_shardckpt.parallel.stage_optimizer import user_code, watch_state
from lightning_shardckpt.parallel.statistics import broadcast_statistics, synchronize_batch_norms
from lightning_shardckpt.pipelined import PipelinedSteps
from lightning_shardckpt.preemption import Ending, Preemption, save_behind_exception
from lightning_shardckpt.preflight import check_room, state_bytes, tensor_bytes
from lightning_shardckpt.pretrained.start import Pretrained, imported
from lightning_shardckpt.ranks import Ranks, is_of_a_collective
from lightning_shardckpt.resume import (
    Continuation,
    Place,
    keep_groups,
    load_checkpoint,
    save_checkpoint,
)
from lightning_shardckpt.state.adapters import unchanging
from lightning_shardckpt.state.live import load_edited, not_live, parameter_names
from lightning_shardckpt.state.model import WholeNames, canonical_name
from lightning_shardckpt.state.optimizer import optimizer_state
from lightning_shardckpt.state.position import make_resumable
from lightning_shardckpt.stopping import Stopping
from lightning_shardckpt.storage.places import is_url

__all__ = ["ShardCkptIO", "ShardedStrategy", "load_from_checkpoint"]

_RECORD = "_shardckpt_record"  # on the LightningModule: a second Trainer must find what the first one cut


class ShardedStrategy(OnMesh, ParallelStrategy):  # type: ignore[misc]  # gives ShardCkptIO, takes any CheckpointIO
    """Trains one LightningModule under any mix of replicated and sharded data parallel, tensor and pipeline parallel.

    The module is an ordinary one: layers built in ``__init__`` or ``configure_model``, steps unchanged. One that
    cuts itself in ``configure_model`` with ``self.device_mesh["data_parallel"]`` and ``["tensor_parallel"]``, as for
    Lightning's ModelParallelStrategy, is left as it is. Initial weights are the same on every topology.

    Sharded parameters are DTensors that act as whole tensors in steps, hooks and optimizers; see ``parallel.sharding``.
    Each layer's are gathered at once while it runs, and freed until the backward, as FSDP does it. Every rank must read
    and change them alike. Where the shard axis has size 1, parameters are plain tensors, and gradients are averaged.

    Precision: ``bf16-mixed`` runs autocast over parameters that are stored, gathered and reduced in float32, so every
    topology computes the same numbers; ``bf16-true`` and ``64-true`` convert the module before it is cut.

    The tests run on CPU with gloo. CUDA with NCCL and ``cpu_offload`` there have not been run. Of several nodes, two
    hosts have been run that one machine simulates, in network namespaces over one directory, with one and two processes
    each; see "Several nodes" in the README.

    Args:
        data_parallel_shard_size: Processes that shard parameters (FSDP); ``"auto"`` takes those that the others leave.
        data_parallel_replicate_size: Replicas of the sharded model (HSDP).
        tensor_parallel_size: Processes that compute one layer together.
        pipeline_parallel_size: Processes over which the layers are distributed, each with some of them. See "Pipelines"
            in the README for what that asks of a module.
        pipeline_layers: Patterns that name the layers in the order in which they run; by default those of the largest
            list of layers of one class, or of the largest Sequential.
        pipeline_split: ``"even"`` gives every stage as many layers, ``"cost"`` as many parameters, those of other
            modules included; or the names of the first layers of all stages but the first.
        pipeline_modules: Pattern → ``"first"``, ``"last"`` or ``"every"`` stage, for modules other than layers. By
            default what is registered before the layers is on the first stage, what is behind them on the last.
        pipeline_schedule: ``"gpipe"``, ``"1f1b"``, ``"interleaved_1f1b"``, ``"looped_bfs"``, or of the zero-bubble kind
            ``"interleaved_zero_bubble"``, ``"zbv_zero_bubble"``, ``"dualpipe_v"``; torch's names are understood, too.
        pipeline_microbatches: Into how many microbatches a batch is cut; by default twice the number of processes, and
            never more than it has samples.
        pipeline_loss: ``"batch"`` runs the step behind the layers once, on the whole batch: exact for any loss.
            ``"microbatch"`` averages the losses of microbatches by their number of samples, which is the same for
            losses that are means over samples; schedules that mix forward and backward passes need it.
        pipeline_stages_per_rank: Above 1, every process has so many parts of the layers.
        tensor_parallel_plan: ``"auto"`` (the Hugging Face model's own), a dict of module pattern to style, a function
            of (module, tensor mesh) that cuts the module, or the import path of one. In a pattern ``*`` is any part
            of one component of a module name, ``**`` any number of components; the last match decides. A style is a
            torch ParallelStyle or a name: colwise, rowwise, colwise_gather_output, rowwise_split_input,
            embedding_rowwise, embedding_colwise, replicate, replicated_with_grad_allreduce.
        fsdp_units: Patterns or class names of the modules that are gathered one by one; by default the layers of the
            largest homogeneous ModuleList or Sequential. The rest is gathered for the whole step.
        reshard_after_forward: Free gathered parameters between forward and backward. By default True, but False in
            pipelines, which would gather them for each microbatch again.
        activation_checkpointing: Recompute activations of the FSDP units (True) or of modules by pattern or class.
        cpu_offload: Keep parameters, gradients and optimizer state in CPU memory.
        pretrained: Path of weights to begin with: a Hugging Face directory, a file of safetensors or of ``torch.save``,
            or a checkpoint. Each rank reads its slices when the module is cut, unless the Trainer is given a ckpt_path.
            See "Pretrained weights" in the README.
        pretrained_key_mapping: From stored names to those of the model, where they don't fit by themselves: regular
            expression → replacement (None leaves a tensor out), all of them applied at once; or a function from a
            name to another one or None, or the import path of one.
        pretrained_strict: Make missing and unexpected tensors an error instead of a warning.
        defer_init: Run ``configure_model`` without allocating weights; every rank then builds only its slices.
        accumulate_unsharded: While gradients accumulate, keep them whole on every rank and communicate once. False
            communicates every backward and keeps the memory of gradients sharded.
        timeout_s: For the collectives of training.
        checkpoint_timeout_s: For a rank to wait for the others while saving or loading.
        process_group_backend: By default gloo on CPU and nccl on CUDA.
    """

    is_distributed = True  # Lightning knows its own strategies by class; others must say so to get a sampler

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
        defer_init: bool = True,
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
        self._defer_init = defer_init
        self._accumulate_unsharded = accumulate_unsharded
        self._timeout_s = timeout_s
        self._process_group_backend = process_group_backend
        self.checkpoint_timeout_s = checkpoint_timeout_s
        self.num_nodes = 1  # the Trainer's connector overwrites it
        self._meshes: Meshes | None = None
        self._sharded: ShardedModule | None = None
        self._deferred: DeferredInit | None = None
        self._preemption = Preemption()
        self._unmark: Callable[[], None] = lambda: None
        self._pipelined: PipelinedSteps | None = None
        self._ranks = Ranks.alone()
        self._ending = Ending.NONE
        self._continuation: Continuation | None = None
        self._stopping = Stopping()
        self._awaited = False
        self._restored = False
        self._loaded: tuple[dict[str, Any], frozenset[str]] | None = None

    # --- what it is ---

    @property
    def sharded(self) -> ShardedModule:
        """The LightningModule as it was cut."""
        if self._sharded is None:
            raise RuntimeError("the module is cut in strategy.setup, which has not run for this LightningModule")
        return self._sharded

    @property
    def ties(self) -> list[list[str]]:
        """Clean FQNs of each tied parameter, canonical first."""
        return self.sharded.ties

    @property
    def canonical_names(self) -> dict[str, str]:
        """Every parameter name as registered → its clean canonical FQN."""
        return self.sharded.canonical_names

    # --- processes ---

    @override
    def connect(self, model: pl.LightningModule) -> None:
        super().connect(model)
        self._sharded = None

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._launcher = ResolvingLauncher(
            self.cluster_environment, self.num_processes, self.num_nodes, meet=self._meet
        )

    @override
    def setup_environment(self) -> None:
        """Called again for every fit, validate, test and predict."""
        super().setup_environment()
        if self._meshes is None:
            self._meshes = self._new_meshes()
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._meshes.user
        self._go_behind()
        self._ending = Ending.NONE
        self._restored = False

    def _meet(self) -> Ranks:
        """Those that run, validate, … together; called by the launcher, before any code of the user's runs."""
        assert self.accelerator is not None
        if self._meshes is None:
            self.accelerator.setup_device(self.root_device)
            self._setup_distributed()
        self._ranks = self._new_ranks()
        return self._ranks

    # --- model ---

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        meta: AbstractContextManager[Any] = torch.device("meta") if empty_init else nullcontext()
        with meta, self.precision_plugin.tensor_init_context():
            yield

    @contextmanager
    @override
    def model_sharded_context(self) -> Generator[None, None, None]:
        """Around ``configure_model``, on every stage; only the first one may build."""
        assert self.lightning_module is not None
        if self._found() is not None:
            yield
            return
        broadcast_weights(self.lightning_module, self.root_device)
        with same_rng():
            if not self._defer_init:
                yield
                return
            self._deferred = DeferredInit()
            with self._deferred:
                yield

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        self._continuation = self._loaded = None
        numbers.forget_numbers()
        if trainer.state.fn == TrainerFn.FITTING:
            self._stopping.forget()
        self._sharded = self._found() or self._shard()
        self._pipelined = self._pipeline_of(self._sharded)
        self.model = self.lightning_module
        self.model_to_device()
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            loop.inference_mode = False  # DTensors need version counters: no_grad instead
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING and not self._recipe.cpu_offload:
            _optimizers_to_device(self.optimizers, self.root_device)
        if trainer.state.fn == TrainerFn.FITTING and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._check_room(trainer)
        self.barrier()
        self._restore(trainer)
        if self._pipelined is not None:
            self._unmark()
            self._unmark = mark_user_code(trainer.profiler)  # type: ignore[attr-defined]  # set late
            for optimizer in self.optimizers:
                watch_state(optimizer)

    def _restore(self, trainer: pl.Trainer) -> None:
        """Load the checkpoint of a fit, so that ``on_fit_start`` sees it, as on one process.

        What Lightning itself has still to find, such as "hpc", it loads behind that hook.
        """
        path, looking = self._path_to_resume(), "looking for a checkpoint"
        if trainer.state.fn == TrainerFn.FITTING and self._ranks.step(looking, self._will_resume, any):
            connector = trainer._checkpoint_connector
            connector._restore_modules_and_callbacks(None if path is None else os.fspath(path))
            keep_groups(trainer)
            self._restored = True

    def _path_to_resume(self) -> Any:
        """What the user gave, None where Lightning has still to find one."""
        connector = self._trainer()._checkpoint_connector
        assert isinstance(self._launcher, ResolvingLauncher)
        return self._launcher.resumes_from or (connector._ckpt_path if connector._user_managed else None)

    def _will_resume(self) -> bool:
        """As far as this rank sees."""
        path = self._path_to_resume()
        given = path is not None and (is_url(path) or os.path.lexists(path))
        return given or self._trainer()._checkpoint_connector._hpc_resume_path is not None

    def _check_room(self, trainer: pl.Trainer) -> None:
        """Collective: a stage of a pipeline knows only its own part of the model."""

        def part() -> tuple[int, tuple[int, int]]:
            assert self.lightning_module is not None
            state = self.lightning_module_state_dict()
            left_out = unchanging(self.lightning_module) if self.checkpoint_io.adapters_only else frozenset()
            tensors = [t for n, t in state.items() if isinstance(t, Tensor) and canonical_name(n) not in left_out]
            return self.meshes.pipeline_rank, (tensor_bytes(tensors), state_bytes(self.optimizers))

        def lead(parts: list[tuple[int, tuple[int, int]]]) -> None:
            model, optimizer = map(sum, zip(*dict(parts).values(), strict=True))
            twice = self.checkpoint_io.also is not None
            check_room(trainer.checkpoint_callbacks, model * 2 if twice else model, optimizer)

        self._ranks.step("checking the room for checkpoints", part, lead)

    def _shard(self) -> ShardedModule:
        assert self.lightning_module is not None
        module = self.precision_plugin.convert_module(self.lightning_module)
        if self._layer_sync is not None and self._trainer().state.fn == TrainerFn.FITTING:
            synchronize_batch_norms(module, self.meshes.data_parallel_group, self.root_device)
        wanted, phase = self._pretrained, "deciding whether weights to begin with are needed"
        if wanted is not None and not self._ranks.step(phase, self._begins_anew, any):
            wanted = None
        record = self._cut(module, self._deferred, wanted)
        self._deferred = None
        object.__setattr__(module, _RECORD, record)
        for size, group in (
            (self.topology.tensor, self.meshes.tensor_group),
            (self.topology.pipeline, self.meshes.pipeline_group),
        ):
            if size > 1:
                share_rng(group)
                gather_metrics_over(self.meshes.data_parallel_group, module)
        return record

    def _begins_anew(self) -> bool:
        io, fitting = self.checkpoint_io, self._trainer().state.fn == TrainerFn.FITTING
        lacks_weights = fitting and (io.resume_skip or "model" not in io.resume)
        return bool(lacks_weights) or begins_anew(self._trainer(), self._launcher)

    def _pipeline_of(self, sharded: ShardedModule) -> PipelinedSteps | None:
        module = self.lightning_module
        assert module is not None
        if sharded.pipeline is None:
            return None
        if not module.automatic_optimization:
            raise TopologyError(
                f"{type(module).__name__} optimizes manually (automatic_optimization = False), which cannot be "
                "pipelined: its step is not one forward and one backward. Use pipeline_parallel_size=1."
            )
        return PipelinedSteps(module, sharded.pipeline, self.root_device, self._loss_scale)

    def _loss_scale(self) -> float:
        """What Lightning is going to multiply the loss with."""
        scaler = getattr(self.precision_plugin, "scaler", None)
        factor = scaler.get_scale() if isinstance(scaler, torch.amp.GradScaler) else 1.0
        return float(factor) / self._trainer().accumulate_grad_batches

    def _found(self) -> ShardedModule | None:
        """What was cut of the present module earlier, by this strategy or another Trainer's."""
        assert self.lightning_module is not None
        record: ShardedModule | None = getattr(self.lightning_module, _RECORD, None)
        if record is None or not record.holds(self.lightning_module):
            return None
        if record.meshes.topology != self.topology:
            raise TopologyError(
                f"this LightningModule is already sharded as {record.meshes.topology}, the strategy asks for "
                f"{self.topology}. Use the same sizes, or a new module."
            )
        return record

    @override
    def model_to_device(self) -> None:
        """Parameters and buffers were placed when they were cut; what remains is what Lightning remembers."""
        assert self.lightning_module is not None
        _update_properties(self.lightning_module, device=self.root_device)
        for module in self.lightning_module.modules():
            if isinstance(module, Metric):
                module.to(self.root_device)

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        self._reset_optimizers_and_schedulers()
        with empty_optimizers_allowed() if self.topology.pipeline > 1 else nullcontext():
            super().setup_optimizers(trainer)
        if self.topology.pipeline > 1 and any(isinstance(o, torch.optim.LBFGS) for o in self.optimizers):
            raise TopologyError("LBFGS looks at all parameters at once, which are on different stages of a pipeline")
        for optimizer in self.optimizers:  # LightningCLI builds them before the module is cut
            rebind_optimizer(optimizer, self.sharded)

    @override
    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()
        plugin = self.precision_plugin
        plugin.clip_grad_by_norm = self._clip_by_norm  # type: ignore[method-assign]  # Lightning asks the plugin
        plugin.clip_grad_by_value = self._clip_by_value  # type: ignore[method-assign]
        self._unscale_over_ranks(getattr(plugin, "scaler", None))

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Workers are seeded by data-parallel rank: ranks of one tensor group must draw the same batches."""
        if int(os.environ.get("PL_SEED_WORKERS", "0")) and getattr(dataloader, "worker_init_fn", 0) is None:
            rank = self.meshes.data_parallel_rank
            dataloader.worker_init_fn = partial(pl_worker_init_function, rank=rank)  # type: ignore[attr-defined]
        resumable, trainer = make_resumable(dataloader), self._trainer()
        if trainer.training and trainer.state.fn == TrainerFn.FITTING:
            self._await_continuation(dataloader if resumable else None)
        return dataloader

    def _await_continuation(self, loader: Any | None) -> None:
        """For a loader of training, None for one that can't wait."""
        if loader is not None and (self._continuation is not None or self._will_resume()):
            loader.wait()
            self._awaited = True
        elif loader is None and self._continuation is not None:
            self._continuation.before_loaders()

    # --- steps ---

    def _heed_preemption(self) -> None:
        self._preemption.agree(self._trainer(), self._agreed)

    def _agreed(self, told: bool) -> bool:
        """Whether any rank was told to end.

        Collective: every rank of the world must call it.

        Raises:
            TopologyError: if ranks wrote different numbers into sharded tensors since they met last.
        """
        if self._apart:
            return told
        stages = self.topology.pipeline
        found = torch.tensor([int(told), *numbers.votes(self.meshes.pipeline_rank, stages)], device=self.root_device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        anybody, *maxima = found.tolist()
        if numbers.differ(maxima):
            raise TopologyError(
                "the ranks wrote different numbers into sharded parameters or optimizer state since the last batch, "
                f"so their shards belong to different models now. Here the last was {numbers.last_noted()}. Reduce "
                "what is computed from a rank's own batch before it is used: self.all_gather(loss).mean(), or "
                "self.log(…, sync_dist=True) for what schedulers and callbacks read."
            )
        return bool(anybody)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._stopping.forget()
        self._heed_preemption()
        if batch_idx == 0 and self.topology.tensor > 1:
            check_batch(batch, self.meshes.tensor_group, self.root_device)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        assert self.lightning_module is not None
        if self._pipelined is not None:
            return self._pipelined.training_step(self.precision_plugin.train_step_context, args, kwargs)  # type: ignore[no-any-return]
        return self._run_step("training_step", self.precision_plugin.train_step_context(), args, kwargs)  # type: ignore[no-any-return]

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        return self._evaluate("validation_step", self.precision_plugin.val_step_context, args, kwargs)  # type: ignore[no-any-return]

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        return self._evaluate("test_step", self.precision_plugin.test_step_context, args, kwargs)  # type: ignore[no-any-return]

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("predict_step", self.precision_plugin.predict_step_context, args, kwargs)

    def _evaluate(self, name: str, context: Callable[[], AbstractContextManager[Any]], args: Any, kwargs: Any) -> Any:
        if self._trainer().state.fn == TrainerFn.FITTING:
            self._heed_preemption()  # a validation may be longer than the time that is left
        if self._pipelined is not None:
            output = self._pipelined.evaluate(name, context, args, kwargs)
        else:
            output = self._run_step(name, context(), args, kwargs)
        self.reshard()
        return output

    def _run_step(self, name: str, context: AbstractContextManager[Any], args: Any, kwargs: Any) -> Any:
        step = partial(getattr(self.lightning_module, name), *args, **kwargs)
        with context:
            return self.sharded.run(step)

    def reshard(self) -> None:
        """Free what FSDP2 has gathered, where the module has applied it by itself. No communication."""
        if self._sharded is not None:
            reshard(self._sharded.root)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Gradients are final before the on_after_backward hooks see them."""
        plugin, module, sharded = self.precision_plugin, self.lightning_module, self.sharded
        assert module is not None
        loss = plugin.pre_backward(closure_loss, module)
        if self._pipelined is not None:
            plugin.backward(loss, module, optimizer, *args, **kwargs)
            self._pipelined.backward()
        else:
            with sharded.gradients.backward():
                plugin.backward(loss, module, optimizer, *args, **kwargs)
        if not sharded.gradients.is_blocked:
            broadcast_statistics(module, self.meshes.data_parallel_group)  # autograd needed them until now
        return plugin.post_backward(loss, module)

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        if not self._accumulate_unsharded:
            yield
            return
        with self.sharded.gradients.blocked():
            yield

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        with user_code(False), self.checkpoint_io.waiting_between(optimizer, closure) as gradients:
            return super().optimizer_step(optimizer, gradients, model, **kwargs)

    def _clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        with user_code(False):
            parameters = list(self.precision_plugin.main_params(optimizer))
        clip_by_norm(parameters, clip_val, device=self.root_device, ranks_of=self.sharded.holders.__getitem__)

    def _clip_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        with user_code(False):
            clip_by_value(self.precision_plugin.main_params(optimizer), clip_val)

    # --- other ranks ---

    @property
    @override
    def _apart(self) -> bool:
        """Also where hooks behind an exception run here, and it is not known that they do on the other ranks, too.

        What they ask of the others is then answered by this rank alone; the others may be in the middle of training.
        """
        if super()._apart:
            return True
        trainer = getattr(self.lightning_module, "_trainer", None)
        if trainer is None or not trainer.interrupted or trainer.received_sigterm:  # all agreed to end
            return False
        return self._ending in (Ending.NONE, Ending.ALONE)

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: dist.ReduceOp | str | None = "mean") -> Any:
        """Over the data-parallel group by default: the ranks of a tensor group hold the same value."""
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        if not isinstance(tensor, Tensor) or self._apart:
            return tensor
        return _sync_ddp_if_available(tensor, group or self.meshes.data_parallel_group, reduce_op=reduce_op)

    # --- the end ---

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self._sharded is not None:
            self._sharded.gradients.reset()
        if self._pipelined is not None:
            self._pipelined.reset()
        self._ending = Ending.LEFT
        if (first := self._ranks.leave(exception, roll_call=is_of_a_collective(exception))) is not None:
            exception.add_note(first)
        self.checkpoint_io.leave(exception)

    @override
    def teardown(self) -> None:
        """Unlike Lightning's, leaves the model where it is: DTensors cannot leave their mesh's device."""
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
        self._stopping.unwatch()
        self._unmark()

    # --- checkpoints ---

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return not self._restored

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return False  # load_checkpoint has done it

    @property
    def _place(self) -> Place:
        topology = self.topology
        return Place(
            self.meshes.data_parallel_rank,
            topology.data_parallel,
            topology.tensor,
            self.meshes.pipeline_rank,
            topology.pipeline,
        )

    def _attached_io(self) -> ShardCkptIO:
        """The CheckpointIO, told who saves together."""
        assert self.lightning_module is not None
        self.checkpoint_io.attach(self._ranks, self.lightning_module, self._sizes_by_axis, names=self._names)
        return self.checkpoint_io

    @property
    def _names(self) -> WholeNames:
        """Of the whole model, also on a stage that has a part of it."""
        parameters = dict.fromkeys(self.sharded.canonical_names.values()) if self.topology.pipeline > 1 else ()
        return WholeNames(self.sharded.state_names, self.sharded.state_ties, tuple(parameters))

    @override
    @resting()
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Live shards by FQN."""
        self.reshard()
        if self.sharded.pipeline is not None:
            self.sharded.pipeline.absent.check_own()
        return super().lightning_module_state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """By parameter FQN; the tensors are this rank's shards."""
        assert self.lightning_module is not None
        check_state_of_shards(optimizer)
        return optimizer_state(optimizer, parameter_names(self.lightning_module, self._names))

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Done by load_checkpoint."""

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """What load_checkpoint could not fill in place, and what on_load_checkpoint hooks changed since."""
        assert self.lightning_module is not None
        if self._loaded is not None:
            loaded, copies = self._loaded
            self._loaded = None
            load_edited(self.lightning_module, loaded, checkpoint["state_dict"], copies, self._names)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Collective: every rank writes its own slices, under the same path."""
        trainer, io = self._trainer(), self._attached_io()
        position = self._stopping.position(trainer)
        save = partial(save_checkpoint, io, position, self._place, checkpoint, filepath, storage_options)
        if not trainer.interrupted or self._ending is Ending.LEFT:
            save()
        elif self._ending is not Ending.ALONE:
            agreed = trainer.received_sigterm or self._ending is Ending.TOGETHER
            self._ending = save_behind_exception(self._ranks, save, self.checkpoint_io.wait, agreed=agreed)

    @override
    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Collective: fills the live model and optimizers in place, from any topology."""
        trainer = self._trainer()
        self.reshard()
        assert isinstance(self._launcher, ResolvingLauncher)
        weights_only = self._launcher.weights_only if weights_only is None else weights_only
        checkpoint, rank_state = load_checkpoint(
            self._attached_io(), trainer, self._place, checkpoint_path, weights_only=weights_only
        )
        state_dict = dict(checkpoint["state_dict"])
        self._loaded = state_dict, not_live(trainer.lightning_module, state_dict)
        if trainer.state.fn == TrainerFn.FITTING and rank_state is not None:
            self._continuation = Continuation(checkpoint, rank_state, self._place, self.checkpoint_io.resume)
        return checkpoint

    @override
    def on_train_start(self) -> None:
        trainer = self._trainer()
        self._preemption.watch(trainer)
        self._stopping.watch(trainer)
        if self._continuation is not None:
            self._continuation.apply(trainer)
        elif self._awaited and trainer.fit_loop._data_fetcher is not None:
            iter(trainer.fit_loop._data_fetcher)
        self._continuation, self._awaited = None, False

    @override
    def on_train_end(self) -> None:
        self._agreed(False)

    def _trainer(self) -> pl.Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer
