"""Steps, backward passes and optimizer steps of a sharded module, whole or in pipeline stages.

In a pipeline every rank gets the output, the logged values and the side effects of the last stage, so modules,
callbacks and scripts see the same as on one process. Lightning's plugins and loops are passed as contexts. Its
precision plugins, which see the gradients of one rank, unscale and clip by the gradients of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_shardckpt.compat.torch_modules import override_methods
from lightning_shardckpt.distributed.host_numbers import HostCopy, on_device, wait_for_copies
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.optimizers import user_code
from lightning_shardckpt.parallel.pipeline.runner import PipelineRunner
from lightning_shardckpt.parallel.shard_model import ShardedModule
from lightning_shardckpt.parallel.sharding.clip_grad import RanksOf, clip_by_norm, clip_by_value, unscale_over_ranks
from lightning_shardckpt.parallel.sharding.consistency import check_batch, check_draws, check_loss
from lightning_shardckpt.parallel.sharding.fqn import own_parameters
from lightning_shardckpt.parallel.sharding.fsdp import reshard
from lightning_shardckpt.parallel.sharding.mesh import Meshes
from lightning_shardckpt.parallel.sharding.shared_values import broadcast_statistics
from lightning_shardckpt.strategy.user_steps import StepCall, StepContext, lightning_step
from lightning_shardckpt.system.random_generators import checksum_of_states, differing_generators, get_rng_state


class PipelinedSteps:
    """Runs the steps of one module in a pipeline.

    Args:
        module: the module.
        pipeline: its pipeline.
        device: of this rank.
        scale: returns the later gradient of the loss, for schedules that run backward passes early.
    """

    def __init__(
        self, module: nn.Module, pipeline: PipelineRunner, device: torch.device, scale: Callable[[], float]
    ) -> None:
        self._module, self._pipeline, self._device, self._scale = module, pipeline, device, scale
        self._gradients: list[tuple[nn.Parameter, Tensor]] = []
        self._assumed_scale = 1.0
        self._received_scales: list[Tensor] = []

    def run(self, step: StepCall) -> Any:
        """Run the forward passes, or all passes if the schedule interleaves them, and return the step's output.

        The loss in the output of a training step is a tensor whose backward leads to `backward`.
        """
        if step.train and self._pipeline.backward_early:
            self._assumed_scale = self._scale()
            scale = on_device([self._assumed_scale], torch.float64, self._device)[0]
            with self._set_gradients_aside():
                report = self._pipeline.forward(step, scale)
        else:
            report = self._pipeline.forward(step)
        output = step.apply_report(report, self._device, is_source=self._pipeline.has_last_stage)
        if not step.train or output is None:
            return output
        if isinstance(output, Mapping):
            return {**output, "loss": self._attach(output["loss"])}
        return self._attach(output)

    def backward(self) -> None:
        """Compute the gradients of the parameters, after the backward of the loss that `run` returned.

        Raises:
            UnsupportedCodeError: if the loss has another scale than early backward passes have assumed.
        """
        if len(self._received_scales) != 1:
            raise UnsupportedCodeError(
                f"the loss of a pipelined training_step must go through exactly one backward, found "
                f"{len(self._received_scales)}: call loss.backward() once in LightningModule.backward"
            )
        scale = self._received_scales.pop()
        if not self._pipeline.backward_early:
            self._pipeline.backward(scale)
            return
        copy = HostCopy(scale)
        wait_for_copies(self._device)
        rtol, found, assumed = 1e-2 if scale.dtype.itemsize < 4 else 1e-5, copy.read().item(), self._assumed_scale
        if abs(found - assumed) > rtol * abs(assumed):
            raise UnsupportedCodeError(
                f"the gradient of the loss is {found:g}, but this Pipeline(schedule=…) has run its backward passes "
                f'with {assumed:g}: something scales the loss. Use Pipeline(schedule="gpipe").'
            )
        self._pipeline.add(self._gradients)
        self._gradients.clear()

    def reset(self) -> None:
        """Discard the state of a step that failed."""
        self._pipeline.reset()
        self._gradients.clear()
        self._received_scales.clear()

    @contextmanager
    def _set_gradients_aside(self) -> Iterator[None]:
        """Keep new gradients for `backward`, since Lightning zeroes gradients between the step and the backward."""
        parameters = [p for _, p in own_parameters(self._module)]  # also frozen ones, which the step may thaw
        before = [p.grad for p in parameters]
        for parameter in parameters:
            parameter.grad = None
        try:
            yield
        finally:
            self._gradients = [(p, p.grad) for p in parameters if p.grad is not None]
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient

    def _attach(self, loss: Tensor) -> Tensor:
        """Return the loss as a tensor whose gradient is kept for `backward`."""
        self._received_scales.clear()
        leaf = loss.detach().clone().requires_grad_()
        leaf.register_hook(lambda gradient: self._received_scales.append(gradient.detach()))  # type: ignore[no-untyped-call]
        return leaf * 1  # users may change it in place


class TrainerSteps:
    """Runs the steps of a sharded LightningModule.

    Args:
        module: the LightningModule.
        sharded: the sharded module.
        meshes: of the strategy that runs the steps; another Trainer's strategy may have sharded the module.
        device: of this rank.
        loss_scale: returns the factor by which the Trainer will multiply the loss.

    Raises:
        UnsupportedCodeError: for manual optimization in a pipeline.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        sharded: ShardedModule,
        meshes: Meshes,
        device: torch.device,
        loss_scale: Callable[[], float],
    ) -> None:
        self.sharded = sharded
        self._module, self._meshes = module, meshes
        self._checks_loss = True  # of the first backward of an epoch
        self._compared = set[Any]()  # loaders of which this evaluation has compared a batch
        self._draws = 0  # a checksum of the random states with which steps began to draw
        self._pipelined: PipelinedSteps | None = None
        if sharded.pipeline is not None:
            if not module.automatic_optimization:
                raise UnsupportedCodeError(
                    f"{type(module).__name__} optimizes manually (automatic_optimization = False), which cannot be "
                    "pipelined: its step is not one forward and one backward. Use pipeline_parallel_size=1."
                )
            self._pipelined = PipelinedSteps(module, sharded.pipeline, device, loss_scale)
        self._compares = meshes.topology.tensor > 1 and self._pipelined is None

    def begin_batch(self, batch: Any, batch_idx: int) -> None:
        """Compare the first batch of an epoch over the ranks of a tensor group. Call it before each training batch.

        Collective: every rank of the world must call it.
        """
        if batch_idx == 0:
            self._checks_loss = True
            if self._meshes.topology.tensor > 1:
                check_batch(batch, self._meshes.tensor_group)
                self.check_draws()

    def begin_evaluation(self) -> None:
        """Compare the batches of a tensor group again, the first one of each loader."""
        self._compared.clear()

    def check_draws(self) -> None:
        """Compare which random numbers the steps of a tensor group drew.

        Collective: every rank of the world must call it.
        """
        if self._compares:
            check_draws(self._draws, self._meshes.tensor_group)

    def train(self, context: StepContext, *args: Any) -> Any:
        """Run ``training_step`` inside ``context``. Collective in a pipeline: every rank of the world must call it."""
        if not self._compares:
            return self._run("training_step", context, *args)
        before = get_rng_state(every_device=False)
        output = self._run("training_step", context, *args)
        if drawn := differing_generators(before, get_rng_state(every_device=False)):
            self._draws = checksum_of_states(drawn, self._draws)
        return output

    def evaluate(self, name: str, context: StepContext, *args: Any) -> Any:
        """Run a validation, test or predict step, given by name, inside ``context``. Collective as `train`."""
        loader = args[2:]  # its number, if there are several
        if self._compares and loader not in self._compared:
            self._compared.add(loader)
            # other data-parallel ranks may have no batch of this loader
            check_batch(args, self._meshes.tensor_group, of_all_groups=False)
        output = self._run(name, context, *args)
        self.reshard()
        return output

    def _run(self, name: str, context: StepContext, *args: Any) -> Any:
        if self._pipelined is not None:
            assert self.sharded.pipeline is not None
            return self._pipelined.run(lightning_step(self._module, self.sharded.pipeline, name, context, *args))
        with context():
            return self.sharded.run(partial(getattr(self._module, name), *args))

    def reshard(self) -> None:
        """Free parameters that FSDP2 has gathered, if the module applies FSDP2 itself. No communication."""
        reshard(self.sharded.root)

    def check_loss(self, loss: Tensor) -> None:
        """Compare the first loss of an epoch over the ranks of a tensor group.

        Collective: every rank of the world must call it.

        Raises:
            UnsupportedCodeError: if they differ.
        """
        if self._checks_loss and self._compares:
            check_loss(loss, self._meshes.tensor_group)
        self._checks_loss = False

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Return the context of the loss's backward; gradients are final after it.

        Collective: every rank of the world must call it.
        """
        if self._pipelined is not None:
            yield
            self._pipelined.backward()
        else:
            with self.sharded.gradients.backward():
                yield
        if not self.sharded.gradients.is_blocked:
            broadcast_statistics(self._module, self._meshes.data_parallel_group)  # autograd needed them until now

    def reset(self) -> None:
        """Discard the state of a step that failed."""
        self.sharded.gradients.reset()
        if self._pipelined is not None:
            self._pipelined.reset()


def with_mean_loss(
    optimizer: Optimizer, closure: Callable[[], Any], mean: Callable[[Tensor], Tensor]
) -> Callable[[], Any]:
    """Return a closure that returns the mean loss of all ranks, if the optimizer may use the loss; else ``closure``.

    Args:
        optimizer: of the step. Among torch's optimizers, only L-BFGS uses the loss.
        closure: computes the loss and the gradients.
        mean: averages over all data-parallel ranks, in place and collectively.
    """
    if type(optimizer).__module__.startswith("torch.optim.") and not isinstance(optimizer, torch.optim.LBFGS):
        return closure

    def mean_closure() -> Any:
        loss = closure()
        return mean(loss.detach().clone()) if isinstance(loss, Tensor) else loss

    return mean_closure


# ── precision plugins ─────────────────────────────────────────────────────────────────────────────────────────────────


def scaler_factor(precision: object) -> float:
    """Return the factor by which a precision plugin's gradient scaler multiplies the loss; 1 without one."""
    scaler = getattr(precision, "scaler", None)
    return float(scaler.get_scale()) if isinstance(scaler, torch.amp.GradScaler) else 1.0


def autocast_dtype(precision: object) -> torch.dtype | None:
    """Return the dtype to which autocast converts parameters under a precision plugin; None without autocast."""
    return {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(getattr(precision, "precision", ""))


def unscale_shards(precision: object, device: torch.device) -> Callable[[], None]:
    """Make a precision plugin's gradient scaler, if there is one, check the shards of all ranks for infinities.

    Returns the undo.

    Args:
        precision: of the Trainer or of Fabric.
        device: of the collectives.
    """
    scaler = getattr(precision, "scaler", None)
    return unscale_over_ranks(scaler, device) if isinstance(scaler, torch.amp.GradScaler) else lambda: None


def clip_shards(precision: Precision, device: torch.device, ranks_of: RanksOf) -> Callable[[], None]:
    """Make a Trainer's precision plugin clip gradients over all ranks; return the undo.

    Its ``clip_grad_by_norm`` becomes collective: every rank of the world must call it.

    Args:
        precision: of the Trainer.
        device: of the collectives.
        ranks_of: returns the number of ranks that have a parameter or a part of it.
    """

    def by_norm(optimizer: Optimizer, clip_val: float) -> None:
        with user_code(False):
            parameters = list(precision.main_params(optimizer))
        clip_by_norm(parameters, clip_val, device=device, ranks_of=ranks_of)

    def by_value(optimizer: Optimizer, clip_val: float) -> None:
        with user_code(False):
            clip_by_value(precision.main_params(optimizer), clip_val)

    return override_methods(precision, clip_grad_by_norm=by_norm, clip_grad_by_value=by_value)
