"""``ShardedStrategy`` of the Trainer: Lightning's hooks in the order in which it calls them.

How modules are sharded and steps run is in ``parallel/``, what both strategies do around hooks in ``strategy/``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torchmetrics import Metric
from typing_extensions import override

from lightning_shardckpt.checkpoint_io import ShardCkptIO
from lightning_shardckpt.compat.lightning_fabric import optimizer_to_device, reduced
from lightning_shardckpt.compat.lightning_trainer import (
    forget_optimizers,
    keep_order_of_training,
    set_device,
    set_device_mesh,
    syncs_batch_norms,
    wrap_actions,
)
from lightning_shardckpt.compat.module_state import live_state_dict
from lightning_shardckpt.compat.torchmetrics import gather_metrics_over
from lightning_shardckpt.distributed.error_report import is_of_a_collective
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.errors import TopologyError
from lightning_shardckpt.format.clean_fqn import clean_fqn
from lightning_shardckpt.from_checkpoint import load_from_checkpoint
from lightning_shardckpt.parallel.deferred_init.deferred import DeferredInit
from lightning_shardckpt.parallel.deferred_init.materialize import broadcast_weights
from lightning_shardckpt.parallel.pipeline.joint_updates import JointUpdates
from lightning_shardckpt.parallel.pipeline.stage_optimizer import user_code, watch_state
from lightning_shardckpt.parallel.rebind_optimizer import empty_optimizers_allowed, rebind_optimizer
from lightning_shardckpt.parallel.shard_model import ShardedModule
from lightning_shardckpt.parallel.sharding.batch_norm import broadcast_statistics, synchronize_batch_norms
from lightning_shardckpt.parallel.sharding.clip_grad import clip_by_norm, clip_by_value
from lightning_shardckpt.parallel.sharding.consistency import check_batch, check_loss
from lightning_shardckpt.parallel.sharding.fsdp import reshard
from lightning_shardckpt.parallel.sharding.random_streams import broadcast_rng, same_rng
from lightning_shardckpt.parallel.tensors import written_numbers
from lightning_shardckpt.parallel.tensors.values import check_state_of_shards
from lightning_shardckpt.state.data_position import ResumableLoader, make_resumable
from lightning_shardckpt.state.model import WholeNames
from lightning_shardckpt.state.module_io import parameter_names
from lightning_shardckpt.state.optimizer import optimizer_state
from lightning_shardckpt.state.peft_modules import unchanging
from lightning_shardckpt.strategy.batch_agreement import BatchAgreement
from lightning_shardckpt.strategy.ckpt_path import ResolvingLauncher, begins_anew
from lightning_shardckpt.strategy.disk_space import check_room, state_bytes, tensor_bytes
from lightning_shardckpt.strategy.mesh_strategy import MeshStrategy, scaler_factor
from lightning_shardckpt.strategy.module_record import check_filled, recall, remember
from lightning_shardckpt.strategy.pipelined_steps import PipelinedSteps
from lightning_shardckpt.strategy.preemption import Preemption
from lightning_shardckpt.strategy.replicated_values import ReplicatedValues
from lightning_shardckpt.strategy.run_checkpoints import RunCheckpoints
from lightning_shardckpt.strategy.trainer_checkpoint import DataShare
from lightning_shardckpt.system.gc_pause import gc_paused

__all__ = ["ShardCkptIO", "ShardedStrategy", "load_from_checkpoint"]

_HOOKS = ("[LightningModule]", "[Callback]")  # what names of actions in Lightning's profiler start with


class ShardedStrategy(MeshStrategy, ParallelStrategy):  # type: ignore[misc]  # gives ShardCkptIO, takes any CheckpointIO
    """Trains one LightningModule under any mix of replicated and sharded data parallel, tensor and pipeline parallel.

    The module is an ordinary one: layers built in ``__init__`` or ``configure_model``, steps unchanged. One that
    shards itself in ``configure_model`` with ``self.device_mesh["data_parallel"]`` and ``["tensor_parallel"]``, as for
    Lightning's ModelParallelStrategy, is left as it is. Initial weights are the same on every topology.

    Sharded parameters are DTensors that act as whole tensors in steps, hooks and optimizers; see ``parallel.sharding``.
    Each layer's are gathered at once while it runs, and freed until the backward, as FSDP does it. Every rank must read
    and change them alike. Where the shard axis has size 1, parameters are plain tensors, and gradients are averaged.

    Precision: ``bf16-mixed`` runs autocast over parameters that are stored, gathered and reduced in float32, so every
    topology computes the same numbers; ``bf16-true`` and ``64-true`` convert the module before it is sharded.

    The tests run on CPU with gloo. CUDA with NCCL and ``cpu_offload`` there have not been run. Of several nodes, two
    hosts have been run that one machine simulates, in network namespaces over one directory, with one and two processes
    each; see "Clusters" in the documentation.
    """

    is_distributed = True  # Lightning knows its own strategies by class; others must say so to get a sampler

    @override
    def _prepare(self) -> None:
        self.num_nodes = 1  # the Trainer's connector overwrites it
        self._sharded: ShardedModule | None = None
        self._deferred: DeferredInit | None = None
        self._pipelined: PipelinedSteps | None = None
        self._unmark_user_code: Callable[[], None] = lambda: None
        self._checks_loss = True  # of the first backward of an epoch
        self._preemption, self._agreement = Preemption(), BatchAgreement()
        self._joint_updates = JointUpdates()
        self._checkpoints = RunCheckpoints()

    # --- what it is ---

    @property
    def sharded(self) -> ShardedModule:
        """The LightningModule as it was sharded."""
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
        """Set up processes; Lightning calls it again for every fit, validate, test and predict."""
        super().setup_environment()
        if self._meshes is None:
            self._meshes = self._new_meshes()
        assert self.lightning_module is not None
        set_device_mesh(self.lightning_module, self._meshes.user)
        self._enable_async()
        self._checkpoints.begin()

    def _meet(self) -> Ranks:
        """Return the ranks that run, validate, … together. The launcher calls it before any code of the user's runs."""
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
        """Return the context of ``configure_model``, on every stage; only the first one may build."""
        assert self.lightning_module is not None
        known = recall(self.lightning_module, self.topology)
        if known is not None:
            with known.gradients.strangers():
                yield
            return
        broadcast_weights(self.lightning_module, self.root_device)
        with same_rng():
            if not self._defer_init:
                yield
                return
            self._deferred = DeferredInit(self.tuning)
            with self._deferred:
                yield

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None and self.lightning_module is not None
        fitting = trainer.state.fn == TrainerFn.FITTING
        self.accelerator.setup(trainer)
        keep_order_of_training(trainer)
        self._checkpoints.begin_setup(fitting=fitting)
        written_numbers.forget_numbers()
        self._sharded = recall(self.lightning_module, self.topology) or self._shard()
        self._pipelined = self._pipeline_of(self._sharded)
        self.model = self.lightning_module
        self.model_to_device()
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            loop.inference_mode = False  # DTensors need version counters: no_grad instead
        if fitting:
            self._agreement = BatchAgreement()
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fitting and not self._recipe.cpu_offload:
            for optimizer in self.optimizers:
                optimizer_to_device(optimizer, self.root_device)
        if fitting and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._check_room(trainer)
        self.barrier()
        self._checkpoints.restore(trainer, self._launcher, self._ranks)
        if self._pipelined is not None:
            self._unmark_user_code()
            self._unmark_user_code = wrap_actions(trainer.profiler, _in_user_code)  # type: ignore[attr-defined]  # set late
            for optimizer in self.optimizers:
                watch_state(optimizer)

    def _check_room(self, trainer: pl.Trainer) -> None:
        """Collective: a stage of a pipeline knows only its own part of the model."""

        def part() -> tuple[int, tuple[int, int]]:
            assert self.lightning_module is not None
            state = self.lightning_module_state_dict()
            left_out = unchanging(self.lightning_module) if self.checkpoint_io.adapters_only else frozenset()
            tensors = [t for n, t in state.items() if isinstance(t, Tensor) and clean_fqn(n) not in left_out]
            return self.meshes.pipeline_rank, (tensor_bytes(tensors), state_bytes(self.optimizers))

        def lead(parts: list[tuple[int, tuple[int, int]]]) -> None:
            model, optimizer = map(sum, zip(*dict(parts).values(), strict=True))
            twice = self.checkpoint_io.save_options.also is not None
            check_room(trainer.checkpoint_callbacks, model * 2 if twice else model, optimizer)

        self._ranks.step("checking the room for checkpoints", part, lead)

    def _shard(self) -> ShardedModule:
        assert self.lightning_module is not None
        module = self.precision_plugin.convert_module(self.lightning_module)
        if syncs_batch_norms(self) and self._trainer().state.fn == TrainerFn.FITTING:
            synchronize_batch_norms(module, self.meshes.data_parallel_group, self.root_device)
        wanted, phase = self._pretrained, "deciding whether weights to begin with are needed"
        if wanted is not None and not self._ranks.step(phase, self._begins_anew, any):
            wanted = None
        record = self._cut(module, self._deferred, wanted)
        self._deferred = None
        remember(self.lightning_module, record)
        for size, group in (
            (self.topology.tensor, self.meshes.tensor_group),
            (self.topology.pipeline, self.meshes.pipeline_group),
        ):
            if size > 1:
                broadcast_rng(group)
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
        """Return the factor by which Lightning is going to multiply the loss."""
        return scaler_factor(self.precision_plugin) / self._trainer().accumulate_grad_batches

    @override
    def model_to_device(self) -> None:
        """Parameters and buffers were placed when they were sharded; what remains is what Lightning remembers."""
        assert self.lightning_module is not None
        set_device(self.lightning_module, self.root_device)
        for module in self.lightning_module.modules():
            if isinstance(module, Metric):
                module.to(self.root_device)

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        forget_optimizers(self)
        with empty_optimizers_allowed() if self.topology.pipeline > 1 else nullcontext():
            super().setup_optimizers(trainer)
        if self.topology.pipeline > 1 and any(isinstance(o, torch.optim.LBFGS) for o in self.optimizers):
            raise TopologyError("LBFGS looks at all parameters at once, which are on different stages of a pipeline")
        for optimizer in self.optimizers:  # LightningCLI builds them before the module is sharded
            rebind_optimizer(optimizer, self.sharded)

    @override
    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()
        plugin = self.precision_plugin
        plugin.clip_grad_by_norm = self._clip_by_norm  # type: ignore[method-assign]  # Lightning asks the plugin
        plugin.clip_grad_by_value = self._clip_by_value  # type: ignore[method-assign]
        self._unscale_over_ranks(plugin)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Workers are seeded by data-parallel rank: ranks of one tensor group must draw the same batches."""
        if int(os.environ.get("PL_SEED_WORKERS", "0")) and getattr(dataloader, "worker_init_fn", 0) is None:
            rank = self.meshes.data_parallel_rank
            dataloader.worker_init_fn = partial(pl_worker_init_function, rank=rank)  # type: ignore[attr-defined]
        make_resumable(dataloader)
        trainer = self._trainer()
        if trainer.training and trainer.state.fn == TrainerFn.FITTING:
            loader = dataloader if isinstance(dataloader, ResumableLoader) else None
            if loader is not None:
                loader.train()
            self._checkpoints.await_start(loader, trainer, self._launcher)
        return dataloader

    # --- steps ---

    def _heed_preemption(self) -> None:
        self._preemption.agree(self._trainer(), self._any_rank_told)

    def _any_rank_told(self, told: bool) -> bool:
        """Return whether any rank was told to end. Collective: every rank of the world must call it."""
        if self._apart:
            return told
        return self._agreement.any_rank_told(told, self.meshes, self.root_device, self.tuning)

    def _compare_written(self) -> None:
        """Find ranks that have drifted apart. Collective: every rank of the world must call it."""
        if not self._apart:
            self._agreement.meet(self._ranks, self.meshes, self.root_device)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._checkpoints.stopping.forget()
        if self._agreement.values is not None and batch_idx == 0:
            self._agreement.values.begin()
        self._heed_preemption()
        self._checks_loss |= batch_idx == 0
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
        if self._checks_loss and self.topology.tensor > 1 and self._pipelined is None:
            check_loss(closure_loss, self.meshes.tensor_group, self.root_device)
        self._checks_loss = False
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
        if _may_use_loss(optimizer) and not self._apart:
            closure = partial(self._loss_of_all, closure)
        if self._pipelined is not None:
            closure = partial(self._check_updates, optimizer, closure)
        with user_code(False), self.checkpoint_io.async_saves.around_step(optimizer, closure) as gradients:
            return super().optimizer_step(optimizer, gradients, model, **kwargs)

    def _loss_of_all(self, closure: Callable[[], Any]) -> Any:
        """Return what the closure of a step returns, its loss as the mean over all data-parallel ranks."""
        loss = closure()
        return self.reduce(loss.detach().clone()) if isinstance(loss, Tensor) else loss

    def _check_updates(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
        """Return what the closure of a step returns, after a look at the optimizer that is going to step."""
        loss = closure()
        self._joint_updates.check(optimizer, loss, self.root_device)
        return loss

    def _clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        with user_code(False):
            parameters = list(self.precision_plugin.main_params(optimizer))
        clip_by_norm(parameters, clip_val, device=self.root_device, ranks_of=self.sharded.ranks_of)

    def _clip_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        with user_code(False):
            clip_by_value(self.precision_plugin.main_params(optimizer), clip_val)

    # --- other ranks ---

    @property
    @override
    def _apart(self) -> bool:
        """True also where hooks after an exception run here, and it is not known that they do on the other ranks, too.

        What they ask of the others is then answered by this rank alone; the others may be in the middle of training.
        """
        trainer: pl.Trainer | None = getattr(self.lightning_module, "_trainer", None)
        return super()._apart or (trainer is not None and self._checkpoints.answers_alone(trainer))

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: dist.ReduceOp | str | None = "mean") -> Any:
        """Reduce over the data-parallel group by default: the ranks of a tensor group hold the same value."""
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        if not isinstance(tensor, Tensor) or self._apart:
            return tensor
        ranks = group or self.meshes.data_parallel_group
        return tensor if ranks.size() == 1 else reduced(tensor, ranks, reduce_op)

    # --- the end ---

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self._sharded is not None:
            self._sharded.gradients.reset()
        if self._pipelined is not None:
            self._pipelined.reset()
        self._checkpoints.leave()
        if (first := self._ranks.leave(exception, roll_call=is_of_a_collective(exception))) is not None:
            exception.add_note(first)
        self.checkpoint_io.leave(exception)

    @override
    def teardown(self) -> None:
        """Tear down all but the model, which stays where it is: DTensors cannot leave their mesh's device."""
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
        self._checkpoints.stopping.unwatch()
        self._preemption.unwatch()
        self._unmark_user_code()

    # --- checkpoints ---

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return not self._checkpoints.restored

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return False  # load_checkpoint has done it

    @property
    def _data_share(self) -> DataShare:
        topology = self.topology
        return DataShare(
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
        """The names of the whole model, also on a stage that has a part of it."""
        parameters = dict.fromkeys(self.sharded.canonical_names.values()) if self.topology.pipeline > 1 else ()
        return WholeNames(self.sharded.state_names, self.sharded.state_ties, tuple(parameters))

    @override
    @gc_paused()
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return live shards by FQN."""
        self.reshard()
        if self.sharded.pipeline is not None:
            self.sharded.pipeline.absent.check_own()
        if self.checkpoint_io.async_saves.overlaps_copies:  # which compares versions
            return super().lightning_module_state_dict()
        assert self.lightning_module is not None
        return live_state_dict(self.lightning_module)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state by parameter FQN; the tensors are this rank's shards."""
        assert self.lightning_module is not None
        check_state_of_shards(optimizer)
        return optimizer_state(optimizer, parameter_names(self.lightning_module, self._names))

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Do nothing: load_checkpoint has done it."""

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Put into the module what load_checkpoint could not fill in place, and what hooks have changed since."""
        assert self.lightning_module is not None
        self._checkpoints.put_edited(self.lightning_module, checkpoint["state_dict"], self._names)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Write this rank's slices. Collective: every rank must call it, with the same path."""
        if not self._trainer().interrupted:
            self._compare_written()
        self._checkpoints.save(
            self._attached_io(),
            self._trainer(),
            self._ranks,
            self._data_share,
            checkpoint,
            filepath,
            storage_options,
            meeting_s=self.tuning.exception_meeting_s,
        )

    @override
    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Fill the live model and optimizers in place, from any topology. Collective: every rank must call it."""
        self.reshard()
        assert isinstance(self._launcher, ResolvingLauncher)
        safe = self._launcher.weights_only if weights_only is None else weights_only
        return self._checkpoints.load(self._attached_io(), self._trainer(), self._data_share, checkpoint_path, safe)

    @override
    def on_validation_start(self) -> None:
        check_filled(self._trainer().lightning_module)

    on_test_start = on_predict_start = on_validation_start

    @override
    def on_train_start(self) -> None:
        check_filled(self._trainer().lightning_module)
        is_shared = self.topology.data_parallel > 1
        module = self._trainer().lightning_module
        self._agreement.values = ReplicatedValues([module], self.tuning) if is_shared else None
        self._preemption.watch(self._trainer())
        self._checkpoints.start(self._trainer())

    @override
    def on_train_end(self) -> None:
        self._compare_written()

    def _trainer(self) -> pl.Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer


def _may_use_loss(optimizer: Optimizer) -> bool:
    """Return whether a step may look at the loss that its closure returns: of torch's, only L-BFGS does."""
    return isinstance(optimizer, torch.optim.LBFGS) or not type(optimizer).__module__.startswith("torch.optim.")


def _in_user_code(action: str) -> AbstractContextManager[None]:
    """Return a context in which hooks and callbacks see the parameters of all pipeline stages in param groups."""
    return user_code(action.startswith(_HOOKS))
