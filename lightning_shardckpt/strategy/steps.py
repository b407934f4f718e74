"""Steps, backward passes and optimizer steps of a sharded module, whole or in pipeline stages.

In a pipeline every rank gets the output, the logged values and the side effects of the last stage, so modules,
callbacks and scripts see the same as on one process. Lightning's plugins and loops are passed as contexts. Its
precision plugins, which see the gradients of one rank, unscale and clip by the gradients of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_shardckpt.compat.torch_modules import override_methods
from lightning_shardckpt.distributed.host_numbers import HostCopy, on_device, wait_for_copies
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.optimizers import user_code
from lightning_shardckpt.parallel.pipeline.runner import PipelineRunner
from lightning_shardckpt.parallel.sharding.clip_grad import RanksOf, clip_by_norm, clip_by_value, unscale_over_ranks
from lightning_shardckpt.parallel.sharding.consistency import check_batch, check_draws, check_loss
from lightning_shardckpt.parallel.sharding.fqn import own_parameters
from lightning_shardckpt.parallel.sharding.mesh import Meshes
from lightning_shardckpt.strategy.user_steps import StepCall
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


class TensorGroupChecks:
    """Compares what the ranks of a tensor group must have in common in the steps of a Trainer; nothing without one.

    The batches, the losses and the random numbers that steps draw: the first of each epoch, and of each loader of an
    evaluation. All methods are collective: every rank of the world must call them.

    Args:
        meshes: of the strategy that runs the steps.
        of_steps: False in a pipeline, whose steps are compared by the pipeline itself.
    """

    def __init__(self, meshes: Meshes, *, of_steps: bool) -> None:
        self._group = meshes.tensor_group if meshes.topology.tensor > 1 else None
        self._of_steps = self._group if of_steps else None
        self._checks_loss = True  # of the first backward of an epoch
        self._compared = set[Any]()  # loaders of which this evaluation has compared a batch
        self._draws = 0  # a checksum of the random states with which steps began to draw

    def begin_batch(self, batch: Any, batch_idx: int) -> None:
        """Compare the first batch of an epoch. Call it before each training batch."""
        if batch_idx == 0:
            self._checks_loss = True
            if self._group is not None:
                check_batch(batch, self._group)
                self.check_draws()

    def begin_evaluation(self) -> None:
        """Compare the first batch of each loader again."""
        self._compared.clear()

    def check_evaluation(self, args: tuple[Any, ...]) -> None:
        """Compare the first batch of a loader of an evaluation, given the arguments of the step."""
        loader = args[2:]  # its number, if there are several
        if self._of_steps is not None and loader not in self._compared:
            self._compared.add(loader)
            # other data-parallel ranks may have no batch of this loader
            check_batch(args, self._of_steps, of_all_groups=False)

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Record which random numbers are drawn inside, in a training step."""
        if self._of_steps is None:
            yield
            return
        before = get_rng_state(every_device=False)
        yield
        if drawn := differing_generators(before, get_rng_state(every_device=False)):
            self._draws = checksum_of_states(drawn, self._draws)

    def check_draws(self) -> None:
        """Compare which random numbers were drawn."""
        if self._of_steps is not None:
            check_draws(self._draws, self._of_steps)

    def check_loss(self, loss: Tensor) -> None:
        """Compare the first loss of an epoch; raises an UnsupportedCodeError if they differ."""
        if self._checks_loss and self._of_steps is not None:
            check_loss(loss, self._of_steps)
        self._checks_loss = False


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
