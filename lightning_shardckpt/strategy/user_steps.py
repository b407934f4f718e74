"""Users' steps as a pipeline runs them, and their side effects, which are repeated on all ranks.

A step is a method of a LightningModule or a function of a script. The last stage reports its output and its changes of
the module to all ranks; for a LightningModule also logged values, changes of param groups, and a request to stop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NoReturn

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
from lightning_shardckpt.parallel.pipeline.side_effects import Change, ModuleSnapshot

StepContext = Callable[[], AbstractContextManager[Any]]
_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class StepReport:
    """The output and the side effects of a step, which all ranks must know."""

    output: Any
    changes: list[Change]
    log_calls: list[_LogCall]
    trainer: dict[str, Any]
    groups: list[dict[str, Any]]


class StepCall:
    """One call of a user's step, as a `UserStep` of the pipeline.

    Args:
        name: of the step, for messages.
        step: runs it on a batch.
        pipeline: the stages over which it runs.
        batch: the whole batch.
        train: True if a backward follows.
        lightning: repeats effects on the Trainer, for a step of a LightningModule.
    """

    def __init__(
        self,
        name: str,
        step: Callable[[Any], Any],
        pipeline: PipelineRunner,
        batch: Any,
        *,
        train: bool,
        lightning: TrainerEffects | None = None,
    ) -> None:
        self.name, self.batch, self.train = name, batch, train
        self._step, self._pipeline, self._lightning = step, pipeline, lightning
        self._modules = pipeline.common
        self._start = ModuleSnapshot(self._modules)
        self._latest: ModuleSnapshot | None = self._start  # None if modules may have changed since

    def run(self, batch: Any, share: float | None) -> Any:
        """Run the step on a part of the batch; undo the changes in modules of a run without a ``share``."""
        with nullcontext() if self._lightning is None else self._lightning.of_run(share):
            if share is not None:
                self._latest = None
                return self._step(batch)
            snapshot = self._latest = self._latest or ModuleSnapshot(self._modules)
            try:
                return self._step(batch)
            finally:
                snapshot.restore()

    def loss(self, output: Any) -> Tensor | None:
        """Return the loss in an output of the step."""
        return _get_loss(self.name, output)

    def report(self, outputs: list[tuple[Any, float]]) -> StepReport:
        """Return the effects of the step on the last stage.

        Raises:
            UnsupportedCodeError: if it has registered a metric, which other stages don't have.
        """
        before = set(map(id, self._modules.values()))
        for module in self._pipeline.common.values():
            if id(module) not in before and isinstance(module, Metric):
                raise UnsupportedCodeError(
                    f"{self.name} registers a metric, {type(module).__name__}, while it runs over the stages of a "
                    "pipeline. Make it in __init__, or in a hook such as on_train_epoch_start."
                )
        output = _encode(f"the result of {self.name}", _merge_outputs(self.name, outputs))
        if self._lightning is None:
            return StepReport(output, self._start.changes(), [], {}, [])
        return StepReport(output, self._start.changes(), *self._lightning.report())

    def apply_report(self, report: StepReport, device: torch.device, *, is_source: bool) -> Any:
        """Repeat the side effects of the last stage on this rank, log its values, and return its output."""
        if not is_source:
            self._start.apply(report.changes, device)
        if self._lightning is not None:
            self._lightning.repeat(report, is_source=is_source)
        return from_portable(report.output, device)


def lightning_step(
    module: pl.LightningModule,
    pipeline: PipelineRunner,
    name: str,
    context: StepContext,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> StepCall:
    """Return one call of a step method of a LightningModule, which runs in ``context``.

    Raises:
        UnsupportedCodeError: for a step that takes an iterator of batches.
    """
    key = next(iter(kwargs), None)  # the batch is first, or by its name if the step has keyword-only arguments
    batch = args[0] if args else kwargs[key] if key else None
    if isinstance(batch, Iterator):
        raise UnsupportedCodeError(
            f"{name} takes an iterator of batches (dataloader_iter). All stages of a pipeline run the step, so it "
            "must take the batch itself: use the arguments (batch, batch_idx)."
        )

    def step(part: Any) -> Any:
        run = getattr(module, name)
        with context():
            return run(part, *args[1:], **kwargs) if args else run(**kwargs | ({key: part} if key else {}))

    train = name == "training_step"
    return StepCall(name, step, pipeline, batch, train=train, lightning=TrainerEffects(module, name, context))


# ── effects on the Trainer ────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _LogCall:
    """One call of ``LightningModule.log``.

    ``metric`` is the name of a logged Metric object; ``number`` counts the calls of one run with the same name.
    """

    name: str
    number: int
    value: Any
    metric: str | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    share: float


class TrainerEffects:
    """The effects of one step of a LightningModule on its Trainer: logged values, param groups, a request to stop."""

    def __init__(self, module: pl.LightningModule, name: str, context: StepContext) -> None:
        self._module, self._name, self._context = module, name, context
        self._log_calls: list[_LogCall] = []

    @contextmanager
    def of_run(self, share: float | None) -> Iterator[None]:
        """Record calls of ``log`` instead of executing them, or discard them if ``share`` is None; refuse loggers."""
        counts: dict[str, int] = {}

        def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            if share is None:
                return
            metric = self._metric_name(name, value, args, kwargs, share) if isinstance(value, Metric) else None
            kwargs.pop("metric_attribute", None)
            number = counts[name] = counts.get(name, -1) + 1
            encoded = _encode(f"the value logged as {name!r}", None if metric else value)
            self._log_calls.append(_LogCall(name, number, encoded, metric, args, kwargs, share))

        trainer = self._module.trainer
        loggers, self._module.__dict__["log"] = trainer.loggers, log
        trainer.loggers = [_NoLogger()] * len(loggers)  # type: ignore[list-item]  # refuses every use
        try:
            yield
        finally:
            trainer.loggers = loggers
            del self._module.__dict__["log"]

    def _metric_name(
        self, name: str, value: Metric, args: tuple[Any, ...], kwargs: dict[str, Any], share: float
    ) -> str:
        """Return the name of a logged metric in the module; ``args`` are (prog_bar, logger, on_step, …)."""
        metric: str | None = next((n for n, m in self._module.named_modules() if m is value), None)
        if metric is None:
            raise UnsupportedCodeError(
                f"{self._name} logs a metric as {name!r} that is no attribute of the module: make it one"
            )
        on_step = kwargs.get("on_step", args[2] if len(args) > 2 else None)
        if share < 1 and (self._name == "training_step" if on_step is None else on_step):
            raise UnsupportedCodeError(
                f"{self._name} logs the metric object {metric!r} for each step, but with the losses of "
                "microbatches it has no value for a batch. Log it with on_step=False, on_epoch=True, or use "
                'Pipeline(loss="batch").'
            )
        return metric

    def report(self) -> tuple[list[_LogCall], dict[str, Any], list[dict[str, Any]]]:
        """Return the recorded calls, and the numbers that a step may change, of the Trainer and in param groups."""
        names = ("should_stop", "gradient_clip_val", "gradient_clip_algorithm")
        state = {name: getattr(self._module.trainer, name) for name in names}
        groups = [{k: v for k, v in g.items() if isinstance(v, int | float | tuple)} for g in self._param_groups()]
        return self._log_calls, state, groups

    def _param_groups(self) -> list[dict[str, Any]]:
        trainer = self._module.trainer
        optimizers = trainer.optimizers if trainer.state.fn == TrainerFn.FITTING else []
        return [group for optimizer in optimizers for group in optimizer.param_groups]

    def repeat(self, report: StepReport, *, is_source: bool) -> None:
        """Log the values of the last stage on this rank, and set the numbers of its Trainer."""
        if not is_source:
            for group, numbers in zip(self._param_groups(), report.groups, strict=False):
                group.update(numbers)
            for attribute, number in report.trainer.items():
                setattr(self._module.trainer, attribute, number)
        by_name: dict[tuple[str, int], list[_LogCall]] = {}
        for call in report.log_calls:
            decoded = replace(call, value=from_portable(call.value, _HOST))
            by_name.setdefault((call.name, call.number), []).append(decoded)
        for (name, _), calls in by_name.items():
            first = calls[0]
            value: Any = _merge_log_calls(calls) if first.metric is None else self._module.get_submodule(first.metric)
            sizes = [call.kwargs["batch_size"] for call in calls if call.kwargs.get("batch_size") is not None]
            size = {"batch_size": sum(sizes)} if sizes else {}
            with self._context():  # it may set the dtype in which numbers become tensors
                self._module.log(name, value, *first.args, **{**first.kwargs, **size})


class _NoLogger:
    """Stands for a logger of the Trainer in a step that runs several times, on all stages."""

    def __getattribute__(self, name: str) -> NoReturn:
        raise UnsupportedCodeError(
            f"a step over the stages of a pipeline uses a logger of the Trainer ({name}), but it runs several times: "
            "use self.log, or write to the logger in a hook such as on_train_batch_end"
        )


# ── values of microbatches ────────────────────────────────────────────────────────────────────────────────────────────


def _get_loss(name: str, output: Any) -> Tensor | None:
    """Return the loss in the output of a step; raises an UnsupportedCodeError if it is no tensor."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if loss is None:
        return None
    if not isinstance(loss, Tensor):
        raise UnsupportedCodeError(f"{name} must return a loss tensor, None or a dict with a loss, got {loss!r}")
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


def _merge_outputs(name: str, outputs: list[tuple[Any, float]]) -> Any:
    """Return the output for the batch from the outputs for microbatches: losses and other numbers are averaged.

    Raises:
        UnsupportedCodeError: for values that cannot be merged.
    """
    if len(outputs) == 1:
        return outputs[0][0]
    first = outputs[0][0]
    if isinstance(first, Mapping):
        return {key: _merge_values(name, key, [(o[key], share) for o, share in outputs]) for key in first}
    losses = [(_get_loss(name, output), share) for output, share in outputs]
    return sum(loss.detach() * share for loss, share in losses if loss is not None)  # the stage runner refuses None


def _merge_values(name: str, key: Any, outputs: list[tuple[Any, float]]) -> Any:
    values = [_detach(value) for value, _ in outputs]
    if all(isinstance(value, Tensor) and value.ndim for value in values):
        return torch.cat(values)
    if all(isinstance(value, Tensor) and value.is_floating_point() for value in values):
        return sum(value * share for value, (_, share) in zip(values, outputs, strict=True))
    if all(isinstance(value, list) for value in values):
        return [item for value in values for item in value]
    if all(not isinstance(value, Tensor) and value == values[0] for value in values):
        return values[0]
    raise UnsupportedCodeError(
        f"{name} returns {key!r} for each microbatch, and {values} cannot be made one value for the batch. "
        'Return tensors with a dim of samples or single floats, or use Pipeline(loss="batch").'
    )


def _merge_log_calls(calls: list[_LogCall]) -> Any:
    """Return the value for a batch from values for microbatches, by ``reduce_fx`` and ``batch_size`` of the calls."""
    if len(calls) == 1:
        return calls[0].value
    values = torch.stack([torch.as_tensor(call.value, dtype=torch.float64) for call in calls])
    reduce = calls[0].kwargs.get("reduce_fx", "mean")
    name = reduce if isinstance(reduce, str) else getattr(reduce, "__name__", repr(reduce))
    if name == "mean":
        weights = torch.tensor([call.kwargs.get("batch_size") or call.share for call in calls], dtype=torch.float64)
        result = (values * weights).sum() / weights.sum()
    elif name in ("sum", "max", "min"):
        result = values.sum() if name == "sum" else getattr(values, f"a{name}")()
    else:
        raise UnsupportedCodeError(
            f"{calls[0].name!r} is logged with reduce_fx={name}, which cannot join the values of microbatches: use "
            'mean, sum, max or min, or Pipeline(loss="batch")'
        )
    if not isinstance(calls[0].value, Tensor):
        return result.item()
    dtype = calls[0].value.dtype
    return result.to(dtype if dtype.is_floating_point else torch.float32)


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
