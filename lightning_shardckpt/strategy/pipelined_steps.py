"""Run steps on a pipeline so that neither a LightningModule nor its callbacks, nor a script, notice.

The step's return value, what it logged and what it changed in the module are those of the last stage, on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_shardckpt.distributed.host_numbers import Copied, on_device, wait_for_copies
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.pipeline.runner import Pipeline
from lightning_shardckpt.parallel.sharding.fqn import own_parameters
from lightning_shardckpt.parallel.tensors.unreduced_gradients import UnreducedGradients
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
        copied = Copied(scale)
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
        parameters = [p for p in own if p.requires_grad and p not in UnreducedGradients.of_leaf]
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
