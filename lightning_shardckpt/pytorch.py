"""``ShardedStrategy`` of the Trainer: Lightning's hooks in the order of their calls."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import Metric
from typing_extensions import override

from lightning_shardckpt.checkpoint.checkpoint import check_loaded
from lightning_shardckpt.checkpoint_io import ShardCkptIO
from lightning_shardckpt.compat import lightning_runs
from lightning_shardckpt.compat.dtensor import live_state_dict
from lightning_shardckpt.compat.lightning_loops import batches_begun, is_accumulating
from lightning_shardckpt.distributed.ranks import Ranks, refuse_unusable_world
from lightning_shardckpt.distributed.world import abort_unfinished, current_world
from lightning_shardckpt.errors import TopologyError
from lightning_shardckpt.from_checkpoint import load_from_checkpoint
from lightning_shardckpt.parallel.first_values.one_rank import Build, share_tensors
from lightning_shardckpt.parallel.optimizers import rebind_optimizer, user_code
from lightning_shardckpt.parallel.shard_model import ShardedModule
from lightning_shardckpt.parallel.sharding.mesh import forget_meshes, keep_meshes
from lightning_shardckpt.parallel.sharding.replaced_functions import replace_functions, restore_functions
from lightning_shardckpt.parallel.sharding.shared_values import share_optimizer_rng
from lightning_shardckpt.parallel.tensors.values import broadcast_rng, check_state_of_shards, reset_numbers
from lightning_shardckpt.state.model import WholeNames, parameter_names
from lightning_shardckpt.state.optimizer import optimizer_state
from lightning_shardckpt.strategy.batch_agreement import BatchAgreement, StepChecks, compare_epoch_ends
from lightning_shardckpt.strategy.ckpt_path import JoiningLauncher
from lightning_shardckpt.strategy.mesh_strategy import MeshStrategy
from lightning_shardckpt.strategy.resume import DataShare
from lightning_shardckpt.strategy.run_checkpoints import RunCheckpoints
from lightning_shardckpt.strategy.steps import (
    PipelinedSteps,
    StepContext,
    clip_shards,
    refuse_unpipelined,
    scaler_factor,
    unscale_shards,
    with_mean_loss,
)
from lightning_shardckpt.system.host import gc_paused

__all__ = ["ShardCkptIO", "ShardedStrategy", "load_from_checkpoint"]
_SHARDED = "_shardckpt_sharded"
"""The attribute of a LightningModule by which another Trainer finds the sharded module."""


class ShardedStrategy(MeshStrategy, ParallelStrategy):  # type: ignore[misc]  # gives ShardCkptIO, takes any CheckpointIO
    """Trains one LightningModule under any mix of replicated and sharded data parallel, tensor and pipeline parallel.

    The module needs no changes. One that shards itself in ``configure_model`` with
    ``self.device_mesh["data_parallel"]`` and ``["tensor_parallel"]``, as for Lightning's ModelParallelStrategy, is not
    sharded again. Initial weights are the same on every topology.

    Sharded parameters are DTensors that act as whole tensors in steps, hooks and optimizers; see ``parallel.tensors``.
    Every rank must read and change them in the same way. If the shard axis has size 1, parameters are plain tensors,
    and gradients are averaged.

    Precision: ``bf16-mixed`` runs autocast over parameters that are stored, gathered and reduced in float32;
    ``bf16-true`` and ``64-true`` convert the module before it is sharded.
    """

    is_distributed = True  # Lightning recognizes its own strategies by class; others need this to get a sampler

    @override
    def _prepare(self) -> None:
        self.num_nodes = 1  # the Trainer's connector overwrites it
        self._pipelined: PipelinedSteps | None = None
        self._checks: StepChecks  # from setup on
        self._failed = False  # in any run
        self._undo_setup, self._undo_training = ExitStack(), ExitStack()  # what both replace in Lightning's objects
        self._run: RunCheckpoints | None = None

    # --- the sharded module ---

    @property
    def _checkpoints(self) -> RunCheckpoints:
        """The checkpoints of the current or last run."""
        assert self._run is not None, "no run has begun"
        return self._run

    @property
    def sharded(self) -> ShardedModule:
        """The sharded LightningModule."""
        if not self._sharded:
            raise RuntimeError("the module is sharded in strategy.setup, which has not run for this LightningModule")
        return self._sharded[0]

    def _find_sharded(self) -> ShardedModule | None:
        """Return the sharded module of this or another Trainer of this topology; None if there is none, or outdated."""
        sharded: ShardedModule | None = getattr(self._module, _SHARDED, None)
        if sharded is None or not sharded.holds(self._module):
            return None
        if (found := sharded.meshes.topology) != self.topology:
            raise TopologyError(
                f"this LightningModule is already sharded as {found}, the strategy asks for {self.topology}. Use the "
                "same sizes, or a new module."
            )
        return sharded

    @property
    def _whole_names(self) -> WholeNames:
        """The names of the whole model, also on a pipeline stage that has only a part."""
        sharded = self.sharded
        parameters = sharded.parameter_names if sharded.pipeline is not None else ()
        return WholeNames(sharded.state_names, sharded.state_ties, parameters)

    # --- processes ---

    @override
    def connect(self, model: pl.LightningModule) -> None:
        super().connect(model)
        self._sharded, self._pipelined = [], None

    @override
    def _configure_launcher(self) -> None:
        self._choose_environment()
        assert self.cluster_environment is not None
        self._launcher = JoiningLauncher(
            self.cluster_environment, self.num_processes, self.num_nodes, join=self._connect
        )

    @override
    def setup_environment(self) -> None:
        """Set up processes; Lightning calls it again for every fit, validate, test and predict."""
        super().setup_environment()
        if self._meshes is None:
            self._meshes = self._new_meshes()
        assert isinstance(self._launcher, JoiningLauncher)
        lightning_runs.set_device_mesh(self._module, self._meshes.user)
        self._enable_async()
        share, before = DataShare.of(self._meshes), self._run
        self._run = RunCheckpoints(self._trainer, self._launcher, self._ranks, share, before, tuning=self.tuning)

    def _connect(self) -> Ranks:
        """Connect the ranks that run together, and return them. The launcher calls it before any user code runs."""
        assert self.accelerator is not None
        if not self._has_group:
            self._meshes = None
            self.accelerator.setup_device(self.root_device)
            self._setup_distributed()
        self._ranks = self._new_ranks()
        refuse_unusable_world(self._ranks)
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
        """Return the context of ``configure_model``. Lightning calls it in each fit, validate, …; the first builds."""
        sharded = self._find_sharded()
        if sharded is not None:
            with sharded.gradients.without_adoption():
                yield
            return
        share_tensors(self._module, self.root_device)
        with self._build.building(self._ranks, phase="building the module in configure_model"):
            yield

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        fitting = trainer.state.fn == TrainerFn.FITTING
        self.accelerator.setup(trainer)
        self._undo_setup.close()  # of a setup that had no teardown
        self._undo_setup.callback(lightning_runs.keep_order_of_training(trainer))
        self._refuse_stored_metrics(self._module)
        reset_numbers()
        if self.topology.world_size > 1:
            replace_functions()  # the module may have been sharded for an earlier fit
        sharded = self._find_sharded() or self._shard()
        self._sharded, self._pipelined = [sharded], None
        self._checks = StepChecks(trainer, self.meshes, of_steps=sharded.pipeline is None)
        if sharded.pipeline is not None:

            def loss_scale() -> float:
                return scaler_factor(self.precision_plugin) / trainer.accumulate_grad_batches

            self._pipelined = PipelinedSteps(self._module, sharded.pipeline, self.root_device, loss_scale)
        self.model = self._module
        if self.topology.world_size > 1:
            self._undo_setup.callback(lightning_runs.gather_metrics_over(self.meshes.data_parallel_group, self._module))
        self.model_to_device()
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            loop.inference_mode = False  # DTensors need version counters: no_grad instead
        if fitting:
            self._agreement = BatchAgreement()
            self.setup_optimizers(trainer)
        if sharded.pipeline is not None:
            refuse_unpipelined(trainer)
        self.setup_precision_plugin()
        self._undo_setup.callback(clip_shards(self.precision_plugin, self.root_device, sharded.ranks_of))
        self._undo_setup.callback(unscale_shards(self.precision_plugin, self.root_device))
        if fitting and not self._recipe.fsdp.cpu_offload:
            for optimizer in self.optimizers:
                lightning_runs.optimizer_to_device(optimizer, self.root_device)
        self.barrier()
        self._checkpoints.restore()
        if sharded.pipeline is not None:
            self._undo_setup.callback(lightning_runs.wrap_actions(trainer.profiler, user_code))  # type: ignore[attr-defined]  # set late

    def _shard(self) -> ShardedModule:
        module = self.precision_plugin.convert_module(self._module)
        if lightning_runs.syncs_batch_norms(self) and self._trainer.state.fn == TrainerFn.FITTING:
            torch.nn.SyncBatchNorm.convert_sync_batchnorm(module, self.meshes.data_parallel_group)  # type: ignore[no-untyped-call]  # torch's
        build, self._build, restores = self._build, Build(), self._checkpoints.restores
        sharded = self._shard_module(
            module,
            build,
            None if self._pretrained is None or restores() else self._pretrained,
            precision=self.precision_plugin,
            restores=restores,
            is_last=self._checkpoints.path_to_resume is None,
        )
        object.__setattr__(self._module, _SHARDED, sharded)  # no submodule
        for group in (self.meshes.tensor_group, self.meshes.pipeline_group):
            if group.size() > 1:
                broadcast_rng(group)
        return sharded

    @override
    def model_to_device(self) -> None:
        """Set the device that Lightning records, and move metrics; sharding has placed parameters and buffers."""
        lightning_runs.set_device(self._module, self.root_device)
        for module in self._module.modules():
            if isinstance(module, Metric):
                module.to(self.root_device)

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        self.optimizers, self.lr_scheduler_configs = [], []  # of an earlier run
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            rebind_optimizer(optimizer, self.sharded)  # LightningCLI builds them before the module is sharded

    @override
    def process_dataloader(self, loader: Any) -> Any:
        self._checkpoints.begin_loader(super().process_dataloader(loader))
        return loader

    # --- steps ---

    def _check_preemption(self) -> None:
        """Stop after this batch if any rank was told to. Collective: every rank of the world must call it."""
        is_told = self._checkpoints.is_told
        if is_told if self._is_alone else self._agreement.should_stop(is_told, self.meshes, self.tuning):
            self._checkpoints.is_told = False
            lightning_runs.receive_sigterm(self._trainer)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._checkpoints.ended_at = None
        if not self._is_alone:
            current_world().batch = batches_begun(self._trainer)
        self._check_preemption()
        self._checks.begin_batch(batch, batch_idx)

    @override
    def training_step(self, *args: Any) -> STEP_OUTPUT:
        with self._checks.drawing():
            return self._run_step("training_step", self.precision_plugin.train_step_context, *args)  # type: ignore[no-any-return]

    @override
    def validation_step(self, *args: Any) -> STEP_OUTPUT:
        return self._evaluate("validation_step", self.precision_plugin.val_step_context, *args)  # type: ignore[no-any-return]

    @override
    def test_step(self, *args: Any) -> STEP_OUTPUT:
        return self._evaluate("test_step", self.precision_plugin.test_step_context, *args)  # type: ignore[no-any-return]

    @override
    def predict_step(self, *args: Any) -> Any:
        return self._evaluate("predict_step", self.precision_plugin.predict_step_context, *args)

    def _evaluate(self, name: str, context: StepContext, *args: Any) -> Any:
        if not self._is_alone:
            self._checks.check_end()
        if self._trainer.state.fn == TrainerFn.FITTING:
            self._check_preemption()  # a validation may be longer than the time that is left
        self._checks.check_evaluation(args)
        output = self._run_step(name, context, *args)
        self.reshard()
        return output

    def _run_step(self, name: str, context: StepContext, *args: Any) -> Any:
        """Run a step inside ``context``. Collective in a pipeline: every rank of the world must call it."""
        if self._pipelined is not None:
            return self._pipelined.run_method(self._module, name, context, *args)
        with context():
            return self.sharded.run(partial(getattr(self._module, name), *args))

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Run the backward. Gradients are reduced before the on_after_backward hooks run."""
        plugin, module = self.precision_plugin, self._module
        self._checks.check_loss(closure_loss)
        loss = plugin.pre_backward(closure_loss, module)
        with self._reducing(self._pipelined):
            plugin.backward(loss, module, optimizer, *args, **kwargs)
        return plugin.post_backward(loss, module)

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        with self.sharded.gradients.no_sync():
            yield

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        if not self._is_alone:
            closure = with_mean_loss(optimizer, closure, self.reduce)
        group = None if self._is_alone else self.meshes.data_parallel_group
        with share_optimizer_rng(optimizer, closure, group) as gradients, user_code(False):
            return super().optimizer_step(optimizer, gradients, model, **kwargs)

    @property
    @override
    def _is_alone(self) -> bool:
        """True also while hooks run after an exception, if the other ranks may still be training."""
        return super()._is_alone or (self._run is not None and self._run.answers_alone)

    # --- the end ---

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._failed = True
        forget_meshes()
        for sharded in self._sharded:
            sharded.gradients.reset()
        if self._pipelined is not None:
            self._pipelined.reset()
        if self._run is not None:
            self._run.has_left = True
        self.checkpoint_io.leave(exception)
        abort_unfinished(self.root_device, self.tuning)

    @override
    def teardown(self) -> None:
        """Tear down all but the model, which stays on its device: DTensors cannot leave their mesh's device."""
        assert self.cluster_environment is not None and self.accelerator is not None
        restore_functions()
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
        # this rank may host the store, without which the others would end a complete run with an error
        self._ranks.wait_until_read()
        if self._run is not None:
            self._run.end()
        self._undo_training.close()
        self._undo_setup.close()
        if self._meshes is not None and not self._failed and dist.is_initialized():
            keep_meshes(self._meshes)

    # --- checkpoints ---

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return not self._checkpoints.is_loaded

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return self._checkpoints.is_loaded

    def _attached_io(self) -> ShardCkptIO:
        """Return the CheckpointIO after attaching the current ranks and names."""
        self.checkpoint_io.attach(self._ranks, self._module, self._sizes_by_axis, names=self._whole_names)
        return self.checkpoint_io

    @override
    @gc_paused()
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return live shards by FQN."""
        self.reshard()
        if self.sharded.pipeline is not None:
            self.sharded.pipeline.absent.check_data()
        return live_state_dict(self._module)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state by parameter FQN; the tensors are this rank's shards."""
        check_state_of_shards(optimizer)
        return optimizer_state(optimizer, parameter_names(self._module, self._whole_names))

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Check that hooks have left the optimizers as `load_checkpoint` filled them."""
        self._checkpoints.finish_optimizers(checkpoint["optimizer_states"])

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load what hooks have changed, or could not be filled in place. Collective: every rank must call it."""
        self._checkpoints.finish_load(self._module, checkpoint["state_dict"])

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Write this rank's slices. Collective: every rank must call it, with the same path."""
        if not self._trainer.interrupted:
            self._compare_ranks(parameters=False, draws=self._checks.draws)  # the save compares parameters
        self._checkpoints.save(self._attached_io(), checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Fill the live model and optimizers in place, from any topology. Collective: every rank must call it."""
        self.reshard()
        return self._checkpoints.load(self._attached_io(), checkpoint_path, weights_only)

    @override
    def on_validation_start(self) -> None:
        check_loaded([self._module])
        self._checkpoints.start_validation()
        self._checks.begin_evaluation(alone=self._is_alone)

    on_test_start = on_predict_start = on_validation_start

    @override
    def on_train_start(self) -> None:
        check_loaded([self._module])
        self._undo_training.close()  # of a trial run in this fit
        self._undo_training.callback(self._checkpoints.start_training())
        if not self._is_alone:
            self._undo_training.callback(compare_epoch_ends(self._trainer, self._ranks))

    @override
    def on_train_end(self) -> None:
        self._compare_ranks(parameters=True, draws=self._checks.draws)
        if is_accumulating(self._trainer):  # it ended before the last of the accumulated batches
            self.sharded.gradients.finish_passes()

    @property
    def _module(self) -> pl.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _trainer(self) -> pl.Trainer:
        return self._module.trainer
