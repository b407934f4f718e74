"""Steps of users as a pipeline runs them, and what they do besides gradients that all of its ranks must know.

A step is a method of a LightningModule or a function of a script. All ranks must know its result and what it changed in
the module; of a LightningModule also what it logged, what it changed in param groups, and whether it asked to stop.
What it writes to the Trainer's loggers by itself is noted, and written once, on rank zero.
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
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from lightning_shardckpt.compat.pytree import tree_map
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.pipeline.portable_values import moved_to, portable
from lightning_shardckpt.parallel.pipeline.runner import Pipeline
from lightning_shardckpt.parallel.pipeline.side_effects import Change, Memory
from lightning_shardckpt.parallel.tensors.placeholder import first_placeholder, leak_error

_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class _Logged:
    """One call of ``LightningModule.log``.

    ``metric`` is the name of a Metric that was logged as an object; ``turn`` counts the calls of one run by name.
    """

    name: str
    turn: int
    value: Any
    metric: str | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    share: float


@dataclass(frozen=True, slots=True)
class StepReport:
    """The facts that all ranks must know of a step."""

    output: Any
    logged: list[_Logged]
    written: list[WrittenCall]
    changes: list[Change]
    should_stop: bool
    hyper: list[dict[str, Any]]


class _Undo:
    """Undoes what runs of a step that don't count change in modules.

    Attributes:
        start: their memory when the step began.
        drew: whether such a run drew from a generator of theirs.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.start, self.drew = Memory(modules), False
        self._modules = modules
        self._written: dict[tuple[str, str], Tensor] = {}
        self._present: Memory | None = self.start  # None: not known

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Undo, at the end, what happens inside."""
        before = self._present or Memory(self._modules)
        try:
            with before.iterators.refused():
                yield
        finally:
            self.drew = self.drew or before.drew
            self._present = before if before.restore() else None
            self._compare(before.written)

    def _compare(self, written: Mapping[tuple[str, str], Tensor]) -> None:
        """Compare what a run wrote into buffers with what those of other microbatches did.

        Raises:
            UnsupportedCodeError: where it follows from the microbatch, and so do the activations that it is used for.
        """
        for (kind, name), value in written.items():
            if not _same(self._written.setdefault((kind, name), value), value):
                raise UnsupportedCodeError(
                    f"{name} of {kind} is a buffer that a step changes before the layers of a pipeline, where it sees "
                    "microbatches, not batches. Use pipeline_microbatches=1, or change it after the layers."
                )

    @contextmanager
    def kept(self) -> Iterator[None]:
        """What happens inside counts."""
        self._present = None
        yield


class FunctionStep:
    """One call of a script's step function, as a `UserStep`."""

    name = "the step function"

    def __init__(self, step: Callable[[Any], Any], pipeline: Pipeline, batch: Any, *, train: bool) -> None:
        self.batch, self.train = batch, train
        self._step, self._undo = step, _Undo(pipeline.common)

    @property
    def drew(self) -> bool:
        return self._undo.drew

    def run(self, batch: Any, share: float | None) -> Any:
        with self._undo.undone() if share is None else self._undo.kept():
            return self._step(batch)

    def loss(self, output: Any) -> Tensor | None:
        return loss_in(self.name, output)

    def report(self, outputs: list[tuple[Any, float]]) -> tuple[Any, list[Change]]:
        return sent("what the step function returns", merged(self.name, outputs)), self._undo.start.changes()

    def settle(self, report: tuple[Any, list[Change]], device: torch.device, *, source: bool) -> Any:
        """Remember and return, on every rank, what the last stage did."""
        output, changes = report
        if not source:
            self._undo.start.apply(changes, device)
        return moved_to(output, device)


class LightningStep:
    """One call of a step method of a LightningModule, as a `UserStep`."""

    def __init__(
        self,
        module: pl.LightningModule,
        pipeline: Pipeline,
        name: str,
        context: Callable[[], AbstractContextManager[Any]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.name, self.train = name, name == "training_step"
        self._module, self._context, self._undo = module, context, _Undo(pipeline.common)
        self._logged: list[_Logged] = []
        self._written: list[WrittenCall] = []
        # Lightning passes the batch first, or by its name if the step has keyword-only arguments.
        self._args, self._kwargs = args, kwargs
        self._key = next(iter(kwargs), None)
        self.batch = args[0] if args else kwargs[self._key] if self._key else None
        if isinstance(self.batch, Iterator):
            raise UnsupportedCodeError(
                f"{name} takes the iterator of its batches (dataloader_iter). All stages of a pipeline run the step, "
                "so it must be given its batch: take (batch, batch_idx)."
            )

    @property
    def drew(self) -> bool:
        return self._undo.drew

    def run(self, batch: Any, share: float | None) -> Any:
        args, kwargs = self._args, self._kwargs
        if args:
            args = (batch, *args[1:])
        elif self._key:
            kwargs = {**kwargs, self._key: batch}
        with self._undone() if share is None else self._undo.kept(), self._context(), self._recording(share):
            return getattr(self._module, self.name)(*args, **kwargs)

    @contextmanager
    def _undone(self) -> Iterator[None]:
        trainer = self._module.trainer
        should_stop, hyper = trainer.should_stop, _hyper(trainer)
        with self._undo.undone():
            try:
                yield
            finally:
                trainer.should_stop = should_stop
                _set_hyper(trainer, hyper)

    def loss(self, output: Any) -> Tensor | None:
        return loss_in(self.name, output)

    def report(self, outputs: list[tuple[Any, float]]) -> StepReport:
        output = sent("what the step returns", merged(self.name, outputs))
        trainer = self._module.trainer
        changes = self._undo.start.changes()
        return StepReport(output, self._logged, self._written, changes, trainer.should_stop, _hyper(trainer))

    def settle(self, report: StepReport, device: torch.device, *, source: bool) -> Any:
        """Log, remember and return, on every rank, what the last stage did."""
        if not source:
            self._undo.start.apply(report.changes, device)
            self._module.trainer.should_stop = report.should_stop
            _set_hyper(self._module.trainer, report.hyper)
        together: dict[tuple[str, int], list[_Logged]] = {}
        for logged in report.logged:
            known = replace(logged, value=moved_to(logged.value, _HOST))
            together.setdefault((logged.name, logged.turn), []).append(known)
        for (name, _), calls in together.items():
            first = calls[0]
            value: Any = _merged_log(calls) if first.metric is None else self._module.get_submodule(first.metric)
            sizes = [call.kwargs["batch_size"] for call in calls if call.kwargs.get("batch_size") is not None]
            size = {"batch_size": sum(sizes)} if sizes else {}
            with self._context():  # which may say in which precision numbers become tensors
                self._module.log(name, value, *first.args, **{**first.kwargs, **size})
        for written in report.written:
            written.repeat(self._module.trainer.loggers, device)
        return moved_to(report.output, device)

    @contextmanager
    def _recording(self, share: float | None) -> Iterator[None]:
        """Remember, in place of logging, what a run that counts logs; forget it otherwise."""
        turns: dict[str, int] = {}

        def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            if share is None:
                return
            metric = None
            if isinstance(value, Metric):
                metric = next((n for n, m in self._module.named_modules() if m is value), None)
                if metric is None:
                    raise UnsupportedCodeError(f"{self.name} logs a metric as {name!r}, no attribute of the module")
                if self._by_step(args, kwargs) and share < 1:
                    raise UnsupportedCodeError(
                        f"{self.name} logs the metric object {metric!r} for each step, but with the losses of "
                        "microbatches it has no value for a batch. Log it with on_step=False, on_epoch=True, or use "
                        'pipeline_loss="batch".'
                    )
                value = None
            kwargs.pop("metric_attribute", None)
            turn = turns[name] = turns.get(name, -1) + 1
            self._logged.append(
                _Logged(name, turn, sent(f"the value logged as {name!r}", value), metric, args, kwargs, share)
            )

        def write(call: WrittenCall) -> None:
            if share is not None:
                args, kwargs = sent("what is written to a logger", (call.args, call.kwargs))
                self._written.append(WrittenCall(call.path, args, kwargs))

        self._module.__dict__["log"] = log
        try:
            with recorded_loggers(self._module.trainer, write):
                yield
        finally:
            del self._module.__dict__["log"]

    def _by_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether a call of ``log`` (prog_bar, logger, on_step, …) asks for a value per step."""
        on_step = kwargs.get("on_step", args[2] if len(args) > 2 else None)
        return self.train if on_step is None else bool(on_step)


def loss_in(name: str, output: Any) -> Tensor | None:
    """Return the loss in what a step returned.

    Raises:
        UnsupportedCodeError: if that is none.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if loss is None:
        return None
    if not isinstance(loss, Tensor):
        raise UnsupportedCodeError(f"{name} must return a loss tensor, None or a dict with a loss, got {loss!r}")
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


def merged(name: str, outputs: list[tuple[Any, float]]) -> Any:
    """Return the result for the batch of those for microbatches: losses and other single numbers are averaged.

    Raises:
        UnsupportedCodeError: for values that cannot be joined.
    """
    if len(outputs) == 1:
        return outputs[0][0]
    first = outputs[0][0]
    if isinstance(first, Mapping):
        return {key: _merged_value(name, key, [(o[key], share) for o, share in outputs]) for key in first}
    losses = [(loss_in(name, output), share) for output, share in outputs]
    return sum(loss.detach() * share for loss, share in losses if loss is not None)  # the pipeline made sure


def _merged_value(name: str, key: Any, values: list[tuple[Any, float]]) -> Any:
    found = [_plain(value) for value, _ in values]
    if all(isinstance(value, Tensor) and value.ndim for value in found):
        return torch.cat(found)
    if all(isinstance(value, Tensor) and value.is_floating_point() for value in found):
        return sum(value * share for value, (_, share) in zip(found, values, strict=True))
    if all(isinstance(value, list) for value in found):
        return [item for value in found for item in value]
    if all(not isinstance(value, Tensor) and value == found[0] for value in found):
        return found[0]
    raise UnsupportedCodeError(
        f"{name} returns {key!r} for each microbatch, and {found} cannot be made one value for the batch. "
        'Return tensors with a dim of samples or single floats, or use pipeline_loss="batch".'
    )


def _merged_log(calls: list[_Logged]) -> Any:
    """Return a batch's value from those that microbatches logged, by the call's ``reduce_fx`` and ``batch_size``."""
    if len(calls) == 1:
        return calls[0].value
    values = torch.stack([torch.as_tensor(call.value, dtype=torch.float64) for call in calls])
    reduce = calls[0].kwargs.get("reduce_fx", "mean")
    name = reduce if isinstance(reduce, str) else getattr(reduce, "__name__", repr(reduce))
    if name == "mean":
        weights = torch.tensor([call.kwargs.get("batch_size") or call.share for call in calls], dtype=torch.float64)
        merged = (values * weights).sum() / weights.sum()
    elif name in ("sum", "max", "min"):
        merged = values.sum() if name == "sum" else getattr(values, f"a{name}")()
    else:
        raise UnsupportedCodeError(
            f"{calls[0].name!r} is logged with reduce_fx={name}, which cannot join the values of microbatches: use "
            'mean, sum, max or min, or pipeline_loss="batch"'
        )
    if not isinstance(calls[0].value, Tensor):
        return merged.item()
    kept = calls[0].value.dtype
    return merged.to(kept if kept.is_floating_point else torch.float32)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())


def _plain(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach()


def sent(what: str, value: Any) -> Any:
    """Return a value as it is sent to other ranks, who make it what it was by `moved_to`.

    Raises:
        UnsupportedCodeError: if it depends on what other stages have.
    """
    placeholder = first_placeholder(value)
    if placeholder is not None:
        raise leak_error(what, placeholder)
    return portable(tree_map(_plain, value))


def _hyper(trainer: pl.Trainer) -> list[dict[str, Any]]:
    """Return the settings of all param groups, which a step may change."""
    if trainer.state.fn != TrainerFn.FITTING:
        return []
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    return [{k: v for k, v in group.items() if isinstance(v, int | float | tuple)} for group in groups]


def _set_hyper(trainer: pl.Trainer, hyper: list[dict[str, Any]]) -> None:
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    for group, values in zip(groups, hyper, strict=False):
        group.update(values)


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """One call of a method of a logger, or of its experiment.

    ``path`` is the number of the logger, then names of attributes, and keys in lists of one.
    """

    path: tuple[Any, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def repeat(self, loggers: Sequence[Any], device: torch.device) -> None:
        """Make the call on a real logger, with tensors on ``device``."""
        number, *keys = self.path
        found = loggers[number]
        for key in keys:
            found = found[key[0]] if isinstance(key, list) else getattr(found, key)
        args, kwargs = moved_to((self.args, self.kwargs), device)
        found(*args, **kwargs)


@contextmanager
def recorded_loggers(trainer: pl.Trainer, note: Callable[[WrittenCall], None]) -> Iterator[None]:
    """Inside, ``note`` gets what is called of the loggers of ``trainer``; their other attributes are there."""
    loggers = trainer.loggers
    if not loggers:
        yield
        return
    trainer.loggers = [_Recorded(logger, (number,), note) for number, logger in enumerate(loggers)]  # type: ignore[misc]
    try:
        yield
    finally:
        trainer.loggers = loggers


class _Recorded:
    """Stands for a logger, its experiment, or another object or method that is found there."""

    def __init__(self, target: Any, path: tuple[Any, ...], note: Callable[[WrittenCall], None]) -> None:
        self.__dict__.update(_target=target, _path=path, _note=note)

    @property  # type: ignore[misc]  # so that isinstance says what it stands for
    def __class__(self) -> type:
        return type(self._target)

    def __getattr__(self, name: str) -> Any:
        return self._standing_for(getattr(self.__dict__["_target"], name), name)

    def __getitem__(self, key: Any) -> Any:
        return self._standing_for(self._target[key], [key])

    def __setitem__(self, key: Any, value: Any) -> None:
        self._note(WrittenCall((*self._path, "__setitem__"), (key, value), {}))

    def _standing_for(self, found: Any, key: Any) -> Any:
        is_value = type(found).__module__ == "builtins" or isinstance(found, PurePath | Tensor)
        return found if is_value and not callable(found) else _Recorded(found, (*self._path, key), self._note)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._note(WrittenCall(self._path, args, kwargs))
