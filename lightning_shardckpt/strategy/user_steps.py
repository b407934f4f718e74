"""One call of a user's step, as a pipeline runs it, and its effects, which are repeated on all ranks.

A step is a method of a LightningModule or a function of a script. The last stage reports its output and its changes of
the module to all ranks; for a LightningModule also logged values, changes of param groups, and a request to stop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from lightning_shardckpt.compat.torch_tensors import tree_map
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.pipeline.agree import from_portable, to_portable
from lightning_shardckpt.parallel.pipeline.placeholder import first_placeholder, leak_error
from lightning_shardckpt.parallel.pipeline.runner import PipelineRunner
from lightning_shardckpt.parallel.pipeline.side_effects import Change, ChangeRecorder, ModuleSnapshot, apply_changes

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
    """The output and the effects of a step on the last stage, which all ranks must know.

    Attributes:
        output: of the step.
        changes: of modules outside of layers.
        logged: for each run that counts, its share of the samples and its calls of ``log``.
        should_stop: whether the step has asked the Trainer to stop.
        groups: the numbers in param groups.
    """

    output: Any
    changes: list[Change]
    logged: list[tuple[float, list[_LogCall]]]
    should_stop: bool
    groups: list[dict[str, Any]]


class StepCall:
    """One call of a user's step, as a `UserStep` of the pipeline.

    Args:
        name: of the step, for messages.
        step: runs it on a batch.
        pipeline: the stages over which it runs.
        batch: the whole batch.
        train: True if a backward follows.
        module: the LightningModule, for a step of one.
        context: of each run.
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
        self._snapshot: ModuleSnapshot | None = None  # for the next early runs
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
        """Return the loss in an output of the step.

        Raises:
            UnsupportedCodeError: if it is no tensor.
        """
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
            losses = [self.loss(output) for output, _ in outputs]
            return self._merge("the loss", losses, shares)
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


def lightning_step(
    module: pl.LightningModule, pipeline: PipelineRunner, name: str, context: StepContext, batch: Any, *args: Any
) -> StepCall:
    """Return one call of a step method of a LightningModule, whose runs are in ``context``.

    Raises:
        UnsupportedCodeError: for a step that takes an iterator of batches.
    """
    if isinstance(batch, Iterator):
        raise UnsupportedCodeError(
            f"{name} takes an iterator of batches (dataloader_iter). All stages of a pipeline run the step, so it "
            "must take the batch itself: use the arguments (batch, batch_idx)."
        )

    def step(part: Any) -> Any:
        return getattr(module, name)(part, *args)

    return StepCall(name, step, pipeline, batch, train=name == "training_step", module=module, context=context)


def _merge_logged(call: _LogCall, values: list[Any], weights: list[float]) -> Tensor:
    """Return the value of a batch from those of microbatches, by ``reduce_fx`` of the call.

    Raises:
        UnsupportedCodeError: for a function that can't join them.
    """
    stacked = torch.stack([torch.as_tensor(value, dtype=torch.float64) for value in values])
    reduce = call.kwargs.get("reduce_fx", "mean")
    name = reduce if isinstance(reduce, str) else getattr(reduce, "__name__", repr(reduce))
    if name == "mean":
        factors = torch.tensor(weights, dtype=torch.float64)
        result = (stacked * factors).sum() / factors.sum()
    elif name in ("sum", "max", "min"):
        result = stacked.sum() if name == "sum" else getattr(stacked, f"a{name}")()
    else:
        raise UnsupportedCodeError(
            f"{call.name!r} is logged with reduce_fx={name}, which cannot join the values of microbatches: use "
            'mean, sum, max or min, or Pipeline(loss="batch")'
        )
    is_float = isinstance(values[0], Tensor) and values[0].is_floating_point()
    return result.to(values[0].dtype if is_float else torch.float32)


def _detach(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach()


def _encode(name: str, value: Any) -> Any:
    """Return a value to be sent to other ranks; `from_portable` reverts it.

    Raises:
        UnsupportedCodeError: naming the value by ``name``, if it depends on modules of other stages.
    """
    placeholder = first_placeholder(value)
    if placeholder is not None:
        raise leak_error(name, placeholder)
    return to_portable(tree_map(_detach, value))
