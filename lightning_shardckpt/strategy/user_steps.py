"""Users' steps as a pipeline runs them, and their side effects, which are repeated on all ranks.

A step is a method of a LightningModule or a function of a script. The last stage reports its output and its changes of
the module to all ranks; for a LightningModule also logged values, changes of param groups, and a request to stop.
Direct calls of the Trainer's loggers are recorded, and repeated once, on rank zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from lightning_shardckpt.compat.pytree import tree_map
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.pipeline.agree import from_portable, to_portable
from lightning_shardckpt.parallel.pipeline.placeholder import first_placeholder, leak_error
from lightning_shardckpt.parallel.pipeline.runner import PipelineRunner
from lightning_shardckpt.parallel.pipeline.side_effects import Change, ModuleSnapshot

_HOST = torch.device("cpu")


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


@dataclass(frozen=True, slots=True)
class StepReport:
    """The output and the side effects of a step, which all ranks must know."""

    output: Any
    log_calls: list[_LogCall]
    logger_calls: list[LoggerCall]
    changes: list[Change]
    should_stop: bool
    clipping: tuple[Any, Any]
    hyperparameters: list[dict[str, Any]]


class _SideEffects:
    """Undoes or keeps the changes that runs of a step make in modules.

    Attributes:
        start: the snapshot at the start of the step.
        drew: True if an undone run drew from a random generator in an attribute.
    """

    def __init__(self, pipeline: PipelineRunner) -> None:
        self._pipeline, self._modules = pipeline, pipeline.common
        self.start, self.drew = ModuleSnapshot(self._modules), False
        self._latest: ModuleSnapshot | None = self.start  # None if modules may have changed since

    @contextmanager
    def of_run(self, *, counts: bool) -> Iterator[None]:
        """Keep the changes of a run that counts, and undo those of another one."""
        if counts:
            self._latest = None
            yield
            return
        snapshot = self._latest = self._latest or ModuleSnapshot(self._modules)
        try:
            yield
        finally:
            self.drew = snapshot.restore() or self.drew

    def changes(self, name: str) -> list[Change]:
        """Return the changes of the step, given by name, on the last stage, for `ModuleSnapshot.apply`.

        Raises:
            UnsupportedCodeError: if it has registered a metric, which other stages don't have.
        """
        before = set(map(id, self._modules.values()))
        for module in self._pipeline.common.values():
            if id(module) not in before and isinstance(module, Metric):
                raise UnsupportedCodeError(
                    f"{name} registers a metric, {type(module).__name__}, while it runs over the stages of a pipeline. "
                    "Make it in __init__, or in a hook such as on_train_epoch_start."
                )
        return self.start.changes()


class FunctionStep:
    """One call of a script's step function, as a `UserStep`."""

    name = "the step function"

    def __init__(self, step: Callable[[Any], Any], pipeline: PipelineRunner, batch: Any, *, train: bool) -> None:
        self.batch, self.train = batch, train
        self._step, self._effects = step, _SideEffects(pipeline)

    @property
    def drew(self) -> bool:
        return self._effects.drew

    def run(self, batch: Any, share: float | None) -> Any:
        with self._effects.of_run(counts=share is not None):
            return self._step(batch)

    def loss(self, output: Any) -> Tensor | None:
        return _get_loss(self.name, output)

    def report(self, outputs: list[tuple[Any, float]]) -> tuple[Any, list[Change]]:
        output = _encode("the result of the step function", _merge_outputs(self.name, outputs))
        return output, self._effects.changes(self.name)

    def apply_report(self, report: tuple[Any, list[Change]], device: torch.device, *, is_source: bool) -> Any:
        """Repeat the side effects of the last stage on this rank, and return the output."""
        output, changes = report
        if not is_source:
            self._effects.start.apply(changes, device)
        return from_portable(output, device)


class LightningStep:
    """One call of a step method of a LightningModule, as a `UserStep`."""

    def __init__(
        self,
        module: pl.LightningModule,
        pipeline: PipelineRunner,
        name: str,
        context: Callable[[], AbstractContextManager[Any]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.name, self.train = name, name == "training_step"
        self._module, self._context, self._effects = module, context, _SideEffects(pipeline)
        self._log_calls: list[_LogCall] = []
        self._logger_calls: list[LoggerCall] = []
        # Lightning passes the batch first, or by its name if the step has keyword-only arguments.
        self._args, self._kwargs = args, kwargs
        self._key = next(iter(kwargs), None)
        self.batch = args[0] if args else kwargs[self._key] if self._key else None
        if isinstance(self.batch, Iterator):
            raise UnsupportedCodeError(
                f"{name} takes an iterator of batches (dataloader_iter). All stages of a pipeline run the step, so it "
                "must take the batch itself: use the arguments (batch, batch_idx)."
            )

    @property
    def drew(self) -> bool:
        return self._effects.drew

    def run(self, batch: Any, share: float | None) -> Any:
        args, kwargs = self._args, self._kwargs
        if args:
            args = (batch, *args[1:])
        elif self._key:
            kwargs = {**kwargs, self._key: batch}
        with self._effects.of_run(counts=share is not None), self._context(), self._record_logs(share):
            return getattr(self._module, self.name)(*args, **kwargs)

    def loss(self, output: Any) -> Tensor | None:
        return _get_loss(self.name, output)

    def report(self, outputs: list[tuple[Any, float]]) -> StepReport:
        trainer = self._module.trainer
        return StepReport(
            output=_encode("the result of the step", _merge_outputs(self.name, outputs)),
            log_calls=self._log_calls,
            logger_calls=self._logger_calls,
            changes=self._effects.changes(self.name),
            should_stop=trainer.should_stop,
            clipping=(trainer.gradient_clip_val, trainer.gradient_clip_algorithm),
            hyperparameters=_get_hyperparameters(trainer),
        )

    def apply_report(self, report: StepReport, device: torch.device, *, is_source: bool) -> Any:
        """Log the values and repeat the side effects of the last stage on this rank, and return the output."""
        if not is_source:
            self._effects.start.apply(report.changes, device)
            trainer = self._module.trainer
            trainer.should_stop = report.should_stop
            trainer.gradient_clip_val, trainer.gradient_clip_algorithm = report.clipping
            _set_hyperparameters(self._module.trainer, report.hyperparameters)
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
        for logger_call in report.logger_calls:
            logger_call.repeat(self._module.trainer.loggers, device)
        return from_portable(report.output, device)

    @contextmanager
    def _record_logs(self, share: float | None) -> Iterator[None]:
        """Record calls of ``log`` and of loggers instead of executing them; discard them if ``share`` is None."""
        counts: dict[str, int] = {}

        def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            if share is None:
                return
            metric = None
            if isinstance(value, Metric):
                metric = next((n for n, m in self._module.named_modules() if m is value), None)
                if metric is None:
                    raise UnsupportedCodeError(
                        f"{self.name} logs a metric as {name!r} that is no attribute of the module: make it one"
                    )
                if self._is_logged_per_step(args, kwargs) and share < 1:
                    raise UnsupportedCodeError(
                        f"{self.name} logs the metric object {metric!r} for each step, but with the losses of "
                        "microbatches it has no value for a batch. Log it with on_step=False, on_epoch=True, or use "
                        'Pipeline(loss="batch").'
                    )
                value = None
            kwargs.pop("metric_attribute", None)
            number = counts[name] = counts.get(name, -1) + 1
            value = _encode(f"the value logged as {name!r}", value)
            self._log_calls.append(_LogCall(name, number, value, metric, args, kwargs, share))

        def record(call: LoggerCall) -> None:
            if share is not None:
                args, kwargs = _encode("the arguments of a logger call", (call.args, call.kwargs))
                self._logger_calls.append(LoggerCall(call.path, args, kwargs))

        self._module.__dict__["log"] = log
        try:
            with record_loggers(self._module.trainer, record):
                yield
        finally:
            del self._module.__dict__["log"]

    def _is_logged_per_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return True if arguments of ``log`` (prog_bar, logger, on_step, …) ask for a value per step."""
        on_step = kwargs.get("on_step", args[2] if len(args) > 2 else None)
        return self.train if on_step is None else bool(on_step)


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


def _get_hyperparameters(trainer: pl.Trainer) -> list[dict[str, Any]]:
    """Return the numbers in all param groups, which a step may change."""
    if trainer.state.fn != TrainerFn.FITTING:
        return []
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    return [{k: v for k, v in group.items() if isinstance(v, int | float | tuple)} for group in groups]


def _set_hyperparameters(trainer: pl.Trainer, hyperparameters: list[dict[str, Any]]) -> None:
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    for group, values in zip(groups, hyperparameters, strict=False):
        group.update(values)


@dataclass(frozen=True, slots=True)
class LoggerCall:
    """One call of a method of a logger, or of its experiment.

    ``path`` is the index of the logger, then names of attributes, and keys in lists of one.
    """

    path: tuple[Any, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def repeat(self, loggers: Sequence[Any], device: torch.device) -> None:
        """Call the method of the logger, with tensors on ``device``."""
        number, *keys = self.path
        target = loggers[number]
        for key in keys:
            target = target[key[0]] if isinstance(key, list) else getattr(target, key)
        args, kwargs = from_portable((self.args, self.kwargs), device)
        target(*args, **kwargs)


@contextmanager
def record_loggers(trainer: pl.Trainer, record: Callable[[LoggerCall], None]) -> Iterator[None]:
    """Pass calls of methods of the Trainer's loggers to ``record`` instead. Other attributes can be read."""
    loggers = trainer.loggers
    if not loggers:
        yield
        return
    trainer.loggers = [_Recorder(logger, (n,), record) for n, logger in enumerate(loggers)]  # type: ignore[misc]
    try:
        yield
    finally:
        trainer.loggers = loggers


class _Recorder:
    """Stands for a logger, its experiment, or another object or method in an attribute of them."""

    def __init__(self, target: Any, path: tuple[Any, ...], record: Callable[[LoggerCall], None]) -> None:
        self.__dict__.update(_target=target, _path=path, _record=record)

    @property  # type: ignore[misc]  # so that isinstance works as for the target
    def __class__(self) -> type:
        return type(self._target)

    def __getattr__(self, name: str) -> Any:
        return self._wrap(getattr(self.__dict__["_target"], name), name)

    def __getitem__(self, key: Any) -> Any:
        return self._wrap(self._target[key], [key])

    def __setitem__(self, key: Any, value: Any) -> None:
        self._record(LoggerCall((*self._path, "__setitem__"), (key, value), {}))

    def _wrap(self, value: Any, key: Any) -> Any:
        is_plain = type(value).__module__ == "builtins" or isinstance(value, PurePath | Tensor)
        return value if is_plain and not callable(value) else _Recorder(value, (*self._path, key), self._record)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._record(LoggerCall(self._path, args, kwargs))
