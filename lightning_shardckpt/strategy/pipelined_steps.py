"""How does a step run on a pipeline, so that neither a LightningModule nor its callbacks, nor a script, notice?

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

from lightning_shardckpt.errors import TopologyError
from lightning_shardckpt.function_job import FunctionJob
from lightning_shardckpt.job import LightningJob
from lightning_shardckpt.parallel.names import own_parameters
from lightning_shardckpt.parallel.pipeline import Pipeline
from lightning_shardckpt.parallel.sharding.held import HeldGradients


class PipelinedSteps:
    """The steps of one module under one strategy.

    Args:
        scale: gives the gradient that the loss is going to have, for schedules that run backward passes at once.
        job_of: makes of a step's name, context and arguments what the pipeline runs; by default a LightningModule's.
    """

    def __init__(
        self,
        module: nn.Module,
        pipeline: Pipeline,
        device: torch.device,
        scale: Callable[[], float],
        job_of: Callable[..., LightningJob | FunctionJob] | None = None,
    ) -> None:
        self._module, self._pipeline, self._device, self._scale = module, pipeline, device, scale
        if job_of is None:
            assert isinstance(module, pl.LightningModule)
            job_of = partial(LightningJob, module, pipeline)
        self._job_of = job_of
        self._gradients: list[tuple[Tensor, Tensor]] = []
        self._assumed = torch.ones((), device=device)
        self._received: list[Tensor] = []

    def training_step(
        self, context: Callable[[], AbstractContextManager[Any]], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the forward passes, or all passes if the schedule mixes them; returns what the step returned."""
        early = self._pipeline.backward_early
        if early:
            with self._aside():
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
        """After the backward of the loss that `training_step` returned: make the gradients of the parameters.

        Raises:
            TopologyError: if the loss was scaled in another way than a schedule with early backward passes assumed.
        """
        if len(self._received) != 1:
            raise TopologyError(
                f"the loss of a pipelined training_step must go through exactly one backward, found "
                f"{len(self._received)}: call loss.backward() once in LightningModule.backward"
            )
        scale = self._received.pop()
        if not self._pipeline.backward_early:
            self._pipeline.backward(scale)
            return
        if not torch.allclose(scale.double(), self._assumed.double(), rtol=1e-2 if scale.dtype.itemsize < 4 else 1e-5):
            raise TopologyError(
                f"the gradient of the loss is {scale.item():g}, but this pipeline_schedule has run its backward passes "
                f'with {self._assumed.item():g}: something scales the loss. Use pipeline_schedule="gpipe".'
            )
        self._pipeline.add(self._gradients)
        self._gradients.clear()

    def reset(self) -> None:
        """Forget a step that did not finish."""
        self._pipeline.reset()
        self._gradients.clear()
        self._received.clear()

    def _run(
        self,
        name: str,
        context: Callable[[], AbstractContextManager[Any]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        scale: Tensor | None,
    ) -> Any:
        job = self._job_of(name, context, args, kwargs)
        if scale is not None:
            self._assumed = scale
        report = self._pipeline.forward(job, None if scale is None else scale.to(self._device))
        return job.settle(report, self._device, source=self._pipeline.has_last_stage)

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Gradients made inside are kept for `backward`: Lightning sets gradients to zero between step and backward."""
        own = (p for _, p in own_parameters(self._module))
        parameters = [p for p in own if p.requires_grad and p not in HeldGradients.of_leaf]
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
        self._received.clear()
        anchor = torch.zeros((), dtype=value.dtype, device=self._device, requires_grad=True)
        attached: Tensor = _Receive.apply(anchor, value, self._received)  # type: ignore[no-untyped-call]
        return attached


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, received: list[Tensor]) -> Tensor:
        ctx.received = received
        return value.detach().clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.received.append(grad.detach())
        return torch.zeros_like(grad), None, None
