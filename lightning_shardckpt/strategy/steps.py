"""Steps, backward passes and optimizer steps of a module: of all of it, or of a stage of a pipeline.

Pipelined steps run so that neither a LightningModule nor its callbacks, nor a script, notice: the step's return value,
what it logged and what it changed in the module are those of the last stage, on every rank. Lightning's plugins and
loops come as contexts, or run inside one; its precision plugins, which look at the gradients of one rank, scale and
clip those of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_shardckpt.distributed.host_numbers import HostCopy, on_device, wait_for_copies
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.pipeline.runner import Pipeline
from lightning_shardckpt.parallel.pipeline.stage_optimizer import user_code
from lightning_shardckpt.parallel.rebind_optimizer import rebind_optimizer
from lightning_shardckpt.parallel.shard_model import ShardedModule
from lightning_shardckpt.parallel.sharding.batch_norm import broadcast_statistics
from lightning_shardckpt.parallel.sharding.clip_grad import RanksOf, clip_by_norm, clip_by_value, unscale_over_ranks
from lightning_shardckpt.parallel.sharding.consistency import check_batch, check_loss
from lightning_shardckpt.parallel.sharding.fqn import own_parameters
from lightning_shardckpt.parallel.sharding.fsdp import reshard
from lightning_shardckpt.parallel.sharding.mesh import Meshes
from lightning_shardckpt.strategy.user_steps import FunctionStep, LightningStep


class PipelinedSteps:
    """The steps of one module under one strategy.

    Args:
        scale: gives the gradient that the loss is going to have, for schedules that run backward passes at once.
        make_step: makes of a step's name, context and arguments what the pipeline runs; by default a LightningModule's.
    """

    def __init__(
        self,
        module: nn.Module,
        pipeline: Pipeline,
        device: torch.device,
        scale: Callable[[], float],
        make_step: Callable[..., LightningStep | FunctionStep] | None = None,
    ) -> None:
        self._module, self._pipeline, self._device, self._scale = module, pipeline, device, scale
        if make_step is None:
            assert isinstance(module, pl.LightningModule)
            make_step = partial(LightningStep, module, pipeline)
        self._make_step = make_step
        self._gradients: list[tuple[nn.Parameter, Tensor]] = []
        self._assumed_scale = torch.ones(())
        self._received_scales: list[Tensor] = []

    def training_step(
        self, context: Callable[[], AbstractContextManager[Any]], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the forward passes, or all passes if the schedule mixes them; returns what the step returned."""
        early = self._pipeline.backward_early
        if early:
            with self._gradients_aside():
                output = self._run(
                    "training_step", context, args, kwargs, torch.tensor(self._scale(), dtype=torch.float64)
                )
        else:
            output = self._run("training_step", context, args, kwargs, None)
        if output is None:
            return None
        if isinstance(output, Mapping):
            return {**output, "loss": self._attached(output["loss"])}
        return self._attached(output)

    def evaluate(
        self,
        name: str,
        context: Callable[[], AbstractContextManager[Any]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a validation, test or predict step."""
        return self._run(name, context, args, kwargs, None)

    def backward(self) -> None:
        """Make the gradients of the parameters, after the backward of the loss that `training_step` returned.

        Raises:
            UnsupportedCodeError: if the loss was scaled otherwise than a schedule with early backward passes assumed.
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
        copied = HostCopy(scale)
        wait_for_copies(self._device)
        rtol, scale = 1e-2 if scale.dtype.itemsize < 4 else 1e-5, copied.read()
        if not torch.allclose(scale.double(), self._assumed_scale.double(), rtol=rtol):
            raise UnsupportedCodeError(
                f"the gradient of the loss is {scale.item():g}, but this pipeline_schedule has run its backward passes "
                f'with {self._assumed_scale.item():g}: something scales the loss. Use pipeline_schedule="gpipe".'
            )
        self._pipeline.add(self._gradients)
        self._gradients.clear()

    def reset(self) -> None:
        """Forget a step that did not finish."""
        self._pipeline.reset()
        self._gradients.clear()
        self._received_scales.clear()

    def _run(
        self,
        name: str,
        context: Callable[[], AbstractContextManager[Any]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        scale: Tensor | None,
    ) -> Any:
        step = self._make_step(name, context, args, kwargs)
        if scale is not None:
            self._assumed_scale = scale
        given = None if scale is None else on_device([float(scale)], scale.dtype, self._device)[0]
        report = self._pipeline.forward(step, given)
        return step.settle(report, self._device, source=self._pipeline.has_last_stage)

    @contextmanager
    def _gradients_aside(self) -> Iterator[None]:
        """Gradients made inside are kept for `backward`: Lightning sets gradients to zero between step and backward."""
        own = (p for _, p in own_parameters(self._module))
        parameters = [p for p in own if p.requires_grad]
        before = [p.grad for p in parameters]
        for parameter in parameters:
            parameter.grad = None
        try:
            yield
        finally:
            self._gradients = [(p, p.grad) for p in parameters if p.grad is not None]
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient

    def _attached(self, value: Any) -> Tensor:
        """The loss as a tensor whose gradient reaches `backward`."""
        self._received_scales.clear()
        anchor = torch.zeros((), dtype=value.dtype, device=self._device, requires_grad=True)
        attached: Tensor = _CatchScale.apply(anchor, value, self._received_scales)  # type: ignore[no-untyped-call]
        return attached


class _CatchScale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, received: list[Tensor]) -> Tensor:
        ctx.received = received
        return value.detach().clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.received.append(grad.detach())
        return torch.zeros_like(grad), None, None


StepContext = Callable[[], AbstractContextManager[Any]]


class TrainerSteps:
    """Runs the steps of a LightningModule as it was sharded.

    Args:
        module: whose steps they are.
        sharded: how it was sharded.
        meshes: of the strategy that runs them; another Trainer's may have sharded the module.
        device: of this rank.
        loss_scale: gives the factor by which the Trainer is going to multiply the loss.

    Attributes:
        sharded: how the module was sharded.

    Raises:
        UnsupportedCodeError: for a module that optimizes manually, in a pipeline.
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
        self._module, self._meshes, self._device = module, meshes, device
        self._checks_loss = True  # of the first backward of an epoch
        self._pipelined: PipelinedSteps | None = None
        if sharded.pipeline is None:
            return
        if not module.automatic_optimization:
            raise UnsupportedCodeError(
                f"{type(module).__name__} optimizes manually (automatic_optimization = False), which cannot be "
                "pipelined: its step is not one forward and one backward. Use pipeline_parallel_size=1."
            )
        self._pipelined = PipelinedSteps(module, sharded.pipeline, device, loss_scale)

    def begin_batch(self, batch: Any, batch_idx: int) -> None:
        """Call before each batch of training: those of a tensor group are compared when an epoch begins.

        Collective: every rank of the world must call it.
        """
        if batch_idx == 0:
            self._checks_loss = True
            if self._meshes.topology.tensor > 1:
                check_batch(batch, self._meshes.tensor_group)

    def train(self, context: StepContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``training_step`` inside ``context``. Collective in a pipeline: every rank of it must call it."""
        if self._pipelined is not None:
            return self._pipelined.training_step(context, args, kwargs)
        return self._run("training_step", context, args, kwargs)

    def evaluate(self, name: str, context: StepContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a validation, test or predict step, by its name, inside ``context``. Collective as ``train`` is."""
        if self._pipelined is not None:
            output = self._pipelined.evaluate(name, context, args, kwargs)
        else:
            output = self._run(name, context, args, kwargs)
        self.reshard()
        return output

    def _run(self, name: str, context: StepContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        step = partial(getattr(self._module, name), *args, **kwargs)
        with context():
            return self.sharded.run(step)

    def reshard(self) -> None:
        """Free what FSDP2 has gathered, where the module has applied it by itself. No communication."""
        reshard(self.sharded.root)

    def check_loss(self, loss: Tensor) -> None:
        """Compare the first loss of an epoch over the ranks of a tensor group.

        Collective: every rank of the world must call it.

        Raises:
            UnsupportedCodeError: if they differ.
        """
        if self._checks_loss and self._meshes.topology.tensor > 1 and self._pipelined is None:
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
        """Forget a step that did not finish."""
        self.sharded.gradients.reset()
        if self._pipelined is not None:
            self._pipelined.reset()


def adopt_optimizers(optimizers: Sequence[Optimizer], sharded: ShardedModule) -> None:
    """Make optimizers hold the parameters that a module has since it was sharded.

    Args:
        optimizers: of the module, whenever they were built: LightningCLI does so before it is sharded.
        sharded: the module.

    Raises:
        UnsupportedCodeError: for one that cannot step with the parameters of a stage, or holds those of another module.
    """
    if sharded.pipeline is not None and any(isinstance(o, torch.optim.LBFGS) for o in optimizers):
        raise UnsupportedCodeError("LBFGS looks at all parameters at once, which are on different stages of a pipeline")
    for optimizer in optimizers:
        rebind_optimizer(optimizer, sharded)


def with_mean_loss(
    optimizer: Optimizer, closure: Callable[[], Any], mean: Callable[[Tensor], Tensor]
) -> Callable[[], Any]:
    """Return the closure of a step; where the optimizer may look at the loss, it gives the mean of all ranks.

    Args:
        optimizer: that is going to step. Of torch's, only L-BFGS looks at the loss.
        closure: computes the loss, and the gradients.
        mean: over all data-parallel ranks; in place, and collective.
    """
    if type(optimizer).__module__.startswith("torch.optim.") and not isinstance(optimizer, torch.optim.LBFGS):
        return closure

    def loss_of_all() -> Any:
        loss = closure()
        return mean(loss.detach().clone()) if isinstance(loss, Tensor) else loss

    return loss_of_all


def scaler_factor(precision: object) -> float:
    """Return what the gradient scaler of a precision plugin multiplies the loss with; 1 without one."""
    scaler = getattr(precision, "scaler", None)
    return float(scaler.get_scale()) if isinstance(scaler, torch.amp.GradScaler) else 1.0


def autocast_dtype(precision: object) -> torch.dtype | None:
    """Return the dtype to which a precision plugin lets autocast cast parameters in steps; None without autocast."""
    return {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(getattr(precision, "precision", ""))


def unscale_shards(precision: object, device: torch.device) -> None:
    """Let the gradient scaler of a precision plugin, if there is one, look at the shards of all ranks.

    Args:
        precision: of the Trainer or of Fabric.
        device: where the ranks meet.
    """
    scaler = getattr(precision, "scaler", None)
    if isinstance(scaler, torch.amp.GradScaler):
        unscale_over_ranks(scaler, device)


def clip_shards(precision: Precision, device: torch.device, ranks_of: RanksOf) -> None:
    """Let a Trainer's precision plugin, which it asks to clip, do so over all ranks, however parameters are sharded.

    Its ``clip_grad_by_norm`` becomes collective: every rank of the world must call it.

    Args:
        precision: of the Trainer.
        device: where the ranks meet.
        ranks_of: tells how many ranks hold a parameter or a part of it.
    """
    by_norm = partial(_clip_by_norm, precision, device, ranks_of)
    precision.clip_grad_by_norm = by_norm  # type: ignore[method-assign]  # of this plugin alone
    precision.clip_grad_by_value = partial(_clip_by_value, precision)  # type: ignore[method-assign]


def _clip_by_norm(
    precision: Precision, device: torch.device, ranks_of: RanksOf, optimizer: Optimizer, clip_val: float
) -> None:
    with user_code(False):
        parameters = list(precision.main_params(optimizer))
    clip_by_norm(parameters, clip_val, device=device, ranks_of=ranks_of)


def _clip_by_value(precision: Precision, optimizer: Optimizer, clip_val: float) -> None:
    with user_code(False):
        clip_by_value(precision.main_params(optimizer), clip_val)
