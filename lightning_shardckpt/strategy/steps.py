"""Steps, backward passes and optimizer steps of a sharded module, whole or in pipeline stages.

A step is a method of a LightningModule or a function of a script. In a pipeline every rank gets the output, the logged
values and the side effects of the last stage, so modules, callbacks and scripts see the same as on one process.
Lightning's precision plugins, which see the gradients of one rank, unscale and clip by the gradients of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_shardckpt.compat.torch_modules import replace_attributes
from lightning_shardckpt.compat.torch_tensors import tree_map
from lightning_shardckpt.distributed.host_numbers import HostCopy, on_device, wait_for_copies
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.optimizers import user_code
from lightning_shardckpt.parallel.pipeline.agree import from_portable, to_portable
from lightning_shardckpt.parallel.pipeline.placeholder import first_placeholder, leak_error
from lightning_shardckpt.parallel.pipeline.runner import PipelineRunner
from lightning_shardckpt.parallel.pipeline.side_effects import Change, ChangeRecorder, ModuleSnapshot, apply_changes
from lightning_shardckpt.parallel.sharding.clip_grad import RanksOf, clip_by_norm, clip_by_value, unscale_over_ranks
from lightning_shardckpt.parallel.sharding.fqn import own_parameters

StepContext = Callable[[], AbstractContextManager[Any]]
_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class _LogCall:
    """One call of ``LightningModule.log``; ``metric`` is the name of a logged Metric object."""

    name: str
    value: Any
    metric: str | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class StepReport:
    """The output and the effects of a step on the last stage, which all ranks must know."""

    output: Any
    changes: list[Change]  # of modules outside of layers
    logged: list[tuple[float, list[_LogCall]]]  # of each run that counts, with its share of the samples
    should_stop: bool  # as the step has asked the Trainer
    groups: list[dict[str, Any]]  # the numbers in param groups


class StepCall:
    """One call of a user's step, as a `UserStep` of the pipeline.

    ``step`` runs it on ``batch`` or a part of it, each time in ``context``, and a backward follows if ``train``. Only a
    step of a LightningModule has a ``module``.
    """

    def __init__(
        self,
        name: str,
        step: Callable[[Any], Any],
        pipeline: PipelineRunner,
        batch: Any,
        *,
        train: bool,
        module: pl.LightningModule | None = None,
        context: StepContext = nullcontext,
    ) -> None:
        self.name, self.batch, self.train = name, batch, train
        self._step, self._module, self._context, self._modules = step, module, context, pipeline.common
        self._changes = ChangeRecorder(self._modules) if pipeline.has_last_stage else None
        # for early runs; taken now, since the check of microbatches runs the step in evaluation mode
        self._snapshot: ModuleSnapshot | None = ModuleSnapshot(self._modules.values())
        self._logged: list[tuple[float, list[_LogCall]]] = []

    # --- for the pipeline ---

    def run(self, batch: Any, share: float | None) -> Any:
        """Run the step on a part of the batch; undo the effects on modules of a run without a ``share``."""
        self._snapshot = None if share is not None else self._snapshot or ModuleSnapshot(self._modules.values())
        try:
            with self._recording(share), self._context():
                return self._step(batch)
        finally:
            if self._snapshot is not None:
                self._snapshot.restore()

    def loss(self, output: Any) -> Tensor | None:
        """Return the loss in an output of the step; raise an UnsupportedCodeError if it is no tensor."""
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if loss is None:
            return None
        if not isinstance(loss, Tensor):
            raise UnsupportedCodeError(
                f"{self.name} must return a loss tensor, None or a dict with a loss, got {loss!r}"
            )
        return loss.full_tensor() if isinstance(loss, DTensor) else loss

    def report(self, outputs: list[tuple[Any, float]]) -> StepReport:
        """Return the effects of the step on the last stage."""
        output = _encode(f"the result of {self.name}", self._merge_outputs(outputs))
        groups = [{k: v for k, v in g.items() if isinstance(v, int | float | tuple)} for g in self._param_groups()]
        should_stop = self._module is not None and self._module.trainer.should_stop
        assert self._changes is not None  # of the last stage
        return StepReport(output, self._changes.changes(), self._logged, should_stop, groups)

    def apply_report(self, report: StepReport, device: torch.device, *, is_source: bool) -> Any:
        """Repeat the effects of the last stage on this rank, log its values, and return its output."""
        if not is_source:
            apply_changes(self._modules, report.changes, device)
            for group, numbers in zip(self._param_groups(), report.groups, strict=False):
                group.update(numbers)
        if self._module is not None:
            self._module.trainer.should_stop = report.should_stop
            self._log(self._module, report)
        return from_portable(report.output, device)

    def _param_groups(self) -> list[dict[str, Any]]:
        if self._module is None or self._module.trainer.state.fn != TrainerFn.FITTING:
            return []
        return [group for optimizer in self._module.trainer.optimizers for group in optimizer.param_groups]

    # --- logged values ---

    @contextmanager
    def _recording(self, share: float | None) -> Iterator[None]:
        """Record calls of the module's ``log`` instead of executing them, or discard them if ``share`` is None."""
        if self._module is None:
            yield
            return
        module, calls = self._module, list[_LogCall]()

        def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            if share is None:
                return
            kwargs.pop("metric_attribute", None)
            on_step = kwargs.get("on_step", args[2] if len(args) > 2 else None)  # after prog_bar and logger
            if isinstance(value, Metric) and share < 1 and (self.train if on_step is None else on_step):
                raise UnsupportedCodeError(
                    f"{self.name} logs the metric object {name!r} for each step, but with the losses of microbatches "
                    "it has no value for a batch. Log it with on_step=False, on_epoch=True, or use "
                    'Pipeline(loss="batch").'
                )
            metric = {one: n for n, one in module.named_modules()}[value] if isinstance(value, Metric) else None
            encoded = _encode(f"the value logged as {name!r}", None if metric else value)
            calls.append(_LogCall(name, encoded, metric, args, kwargs))

        module.__dict__["log"] = log
        try:
            yield
        finally:
            del module.__dict__["log"]
        if share is not None:
            self._logged.append((share, calls))

    def _log(self, module: pl.LightningModule, report: StepReport) -> None:
        """Log the values of a step, each merged from those of the runs."""
        shares = [share for share, _ in report.logged]
        for calls in zip(*(calls for _, calls in report.logged), strict=True):
            first = calls[0]
            sizes = [call.kwargs["batch_size"] for call in calls if call.kwargs.get("batch_size") is not None]
            size = {"batch_size": sum(sizes)} if sizes else {}
            if first.metric is not None:
                value: Any = module.get_submodule(first.metric)
            else:
                values = [from_portable(call.value, _HOST) for call in calls]
                value = values[0] if len(values) == 1 else _merge_logged(first, values, sizes or shares)
            with self._context():  # it may set the dtype in which numbers become tensors
                module.log(first.name, value, *first.args, **{**first.kwargs, **size})

    # --- values of microbatches ---

    def _merge_outputs(self, outputs: list[tuple[Any, float]]) -> Any:
        """Return the output for the batch from the outputs for microbatches: losses and other floats are averaged."""
        first, shares = outputs[0][0], [share for _, share in outputs]
        if len(outputs) == 1:
            return first
        if not isinstance(first, Mapping):
            return self._merge("the loss", [self.loss(output) for output, _ in outputs], shares)
        return {key: self._merge(repr(key), [output[key] for output, _ in outputs], shares) for key in first}

    def _merge(self, name: str, values: list[Any], shares: list[float]) -> Any:
        tensors = [_detach(value) for value in values if isinstance(value, Tensor)]
        if len(tensors) == len(values) and all(tensor.ndim for tensor in tensors):
            return torch.cat(tensors)
        if len(tensors) == len(values) and all(tensor.is_floating_point() for tensor in tensors):
            return sum(tensor * share for tensor, share in zip(tensors, shares, strict=True))
        if not tensors and all(value == values[0] for value in values):
            return values[0]
        raise UnsupportedCodeError(
            f"{self.name} returns {name} for each microbatch, and {values} cannot be made one value for the batch. "
            'Return tensors with a dim of samples or single floats, or use Pipeline(loss="batch").'
        )


def _merge_logged(call: _LogCall, values: list[Any], weights: list[float]) -> Tensor:
    """Return the value of a batch from those of microbatches, by ``reduce_fx`` of the call."""
    stacked = torch.stack([torch.as_tensor(value, dtype=torch.float64) for value in values])
    reduce = call.kwargs.get("reduce_fx", "mean")
    name = reduce if isinstance(reduce, str) else getattr(reduce, "__name__", repr(reduce))
    factors = torch.tensor(weights, dtype=torch.float64)
    joins: dict[str, Callable[[], Tensor]] = {"sum": stacked.sum, "max": stacked.amax, "min": stacked.amin}
    joins["mean"] = lambda: (stacked * factors).sum() / factors.sum()
    if name not in joins:
        raise UnsupportedCodeError(
            f"{call.name!r} is logged with reduce_fx={name}, which cannot join the values of microbatches: use "
            'mean, sum, max or min, or Pipeline(loss="batch")'
        )
    is_float = isinstance(values[0], Tensor) and values[0].is_floating_point()
    return joins[name]().to(values[0].dtype if is_float else torch.float32)


def _detach(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach()


def _encode(name: str, value: Any) -> Any:
    """Return a value, called ``name``, to be sent to other ranks; `from_portable` reverts it."""
    if (placeholder := first_placeholder(value)) is not None:
        raise leak_error(name, placeholder)
    return to_portable(tree_map(_detach, value))


class PipelinedSteps:
    """Runs the steps of one module in a pipeline.

    ``scale`` returns the later gradient of the loss, for schedules that run backward passes early.
    """

    def __init__(
        self, module: nn.Module, pipeline: PipelineRunner, device: torch.device, scale: Callable[[], float]
    ) -> None:
        self._module, self._pipeline, self._device, self._scale = module, pipeline, device, scale
        self._gradients: list[tuple[nn.Parameter, Tensor]] = []
        self._assumed_scale = 1.0
        self._received_scales: list[Tensor] = []

    def run_method(self, module: pl.LightningModule, name: str, context: StepContext, batch: Any, *args: Any) -> Any:
        """Run a step method of a LightningModule, each time in ``context``; see `run`."""
        if isinstance(batch, Iterator):
            raise UnsupportedCodeError(
                f"{name} takes an iterator of batches (dataloader_iter). All stages of a pipeline run the step, so it "
                "must take the batch itself: use the arguments (batch, batch_idx)."
            )
        step, train = lambda part: getattr(module, name)(part, *args), name == "training_step"
        return self.run(StepCall(name, step, self._pipeline, batch, train=train, module=module, context=context))

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
        """Compute the gradients of the parameters, after the backward of the loss that `run` returned."""
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


def with_mean_loss(
    optimizer: Optimizer, closure: Callable[[], Any], mean: Callable[[Tensor], Tensor]
) -> Callable[[], Any]:
    """Return a closure that returns the mean loss of all ranks, if the optimizer may use the loss; else ``closure``.

    Among torch's optimizers, only L-BFGS uses it. ``mean`` averages in place, and is collective.
    """
    if type(optimizer).__module__.startswith("torch.optim.") and not isinstance(optimizer, torch.optim.LBFGS):
        return closure

    def mean_closure() -> Any:
        loss = closure()
        return mean(loss.detach().clone()) if isinstance(loss, Tensor) else loss

    return mean_closure


def refuse_unpipelined(trainer: pl.Trainer) -> None:
    """Refuse manual optimization, L-BFGS and callbacks that average weights in a copy, when optimizers are set up."""
    module = trainer.lightning_module
    if not module.automatic_optimization:
        raise UnsupportedCodeError(
            f"{type(module).__name__} optimizes manually (automatic_optimization = False), which cannot be pipelined: "
            "its step is not one forward and one backward. Use pipeline_parallel_size=1."
        )
    if trainer.state.fn != TrainerFn.FITTING:
        return
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in trainer.strategy.optimizers):
        raise UnsupportedCodeError(
            "LBFGS updates all parameters as one, and a pipeline stage has only some of them. Use an optimizer that "
            "treats each parameter by itself, or pipeline_parallel_size=1."
        )
    kinds = (StochasticWeightAveraging, getattr(pl.callbacks, "WeightAveraging", StochasticWeightAveraging))
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set later
        if isinstance(callback, kinds):
            raise UnsupportedCodeError(
                f"{type(callback).__name__} averages the weights in a copy of the whole module, but a pipeline "
                "stage has only a part of it. Use pipeline_parallel_size=1, or average in a callback of your own: it "
                "begins with [p.detach().clone() for p in module.parameters()], and changes each by mul_ and add_."
            )


def scaler_factor(precision: object) -> float:
    """Return the factor by which a precision plugin's gradient scaler multiplies the loss; 1 without one."""
    scaler = getattr(precision, "scaler", None)
    return float(scaler.get_scale()) if isinstance(scaler, torch.amp.GradScaler) else 1.0


def autocast_dtype(precision: object) -> torch.dtype | None:
    """Return the dtype to which autocast converts parameters under a precision plugin; None without autocast."""
    return {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(getattr(precision, "precision", ""))


def unscale_shards(precision: object, device: torch.device) -> Callable[[], None]:
    """Make a precision plugin's gradient scaler check the shards of all ranks for infinities; return the undo."""
    scaler = getattr(precision, "scaler", None)
    return unscale_over_ranks(scaler, device) if isinstance(scaler, torch.amp.GradScaler) else lambda: None


def clip_shards(precision: Precision, device: torch.device, ranks_of: RanksOf) -> Callable[[], None]:
    """Make a Trainer's precision plugin clip gradients by `clip_by_norm` and `clip_by_value`; return the undo.

    Its ``clip_grad_by_norm`` becomes collective: every rank of the world must call it.
    """

    def by_norm(optimizer: Optimizer, clip_val: float) -> None:
        with user_code(False):
            parameters = list(precision.main_params(optimizer))
        clip_by_norm(parameters, clip_val, device=device, ranks_of=ranks_of)

    def by_value(optimizer: Optimizer, clip_val: float) -> None:
        with user_code(False):
            clip_by_value(precision.main_params(optimizer), clip_val)

    return replace_attributes(precision, clip_grad_by_norm=by_norm, clip_grad_by_value=by_value)
