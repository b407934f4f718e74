"""Record a training run for prove-resume: weights, optimizer state, random streams, batches and logs of every step.

``RunRecorder`` is a callback. It comes last of all callbacks, so that it sees their effects, changes nothing of the
training, and ends the run as a kill would: no hook runs, so that the script writes nothing that an interrupted run
would not have written. ``tools.prove_resume`` has the plan, the records and their comparison.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from enum import Enum
from functools import cache
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, TextIO

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, Timer
from lightning.pytorch.loggers.logger import DummyLogger
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torchmetrics import Metric
from typing_extensions import override

from lightning_shardckpt.checkpoint_io import ShardCkptIO
from lightning_shardckpt.compat.lightning_attributes import SET_LATER
from lightning_shardckpt.compat.lightning_loops import logged_values, train_loaders
from lightning_shardckpt.compat.lightning_trainer import intercept_fit, is_tuning, set_default_root_dir
from lightning_shardckpt.errors import StateError
from lightning_shardckpt.format.checksum import checksum
from lightning_shardckpt.format.clean_fqn import clean_fqn
from lightning_shardckpt.state.dtensor_layout import local_views
from lightning_shardckpt.state.model import is_elsewhere
from lightning_shardckpt.state.module_io import parameter_names
from lightning_shardckpt.system.random_generators import GENERATORS, generator_state, get_rng_state
from lightning_shardckpt.tools.prove_resume import BoxRecord, Entry, Phase, RunPlan, Setting, rank_file, to_line


@cache
def recorder_of(plan_file: str) -> RunRecorder:
    """Return the recorder of this process, which records its first fit; each Trainer may be given it.

    Args:
        plan_file: a ``RunPlan`` as JSON.
    """
    recorder = RunRecorder(RunPlan(**json.loads(Path(plan_file).read_text())))
    intercept_fit(recorder.begin)
    return recorder


def _end_process() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class RunRecorder(Callback):
    """Records the first fit that begins.

    Args:
        plan: where to begin and to end, and the folder for the records.
        end: ends the run, on every rank, after the last step's record, and the save if there is one.
    """

    def __init__(self, plan: RunPlan, end: Callable[[], None] = _end_process) -> None:
        self._plan, self._end = plan, end
        self._trainer: Any = None
        self._step = plan.first_step
        self._values = _Values({plan.saves: "…", plan.files: "…"})
        self._file: TextIO | None = None

    def begin(self, trainer: pl.Trainer, arguments: dict[str, Any]) -> None:
        """Prepare a fit that is about to begin; all but the first that trains are left alone.

        Args:
            trainer: of the fit.
            arguments: of the call, by name; takes the checkpoint of the plan.
        """
        if self._trainer is not None or self not in trainer.callbacks or is_tuning(trainer):  # type: ignore[attr-defined]  # set later
            return
        self._trainer = trainer
        if self._plan.resume_from is not None:
            arguments["ckpt_path"] = self._plan.resume_from
        self._redirect_saves()
        set_default_root_dir(trainer, self._plan.files)
        trainer.loggers = [_StandInLogger(self._plan.files) for _ in trainer.loggers]

    def _redirect_saves(self) -> None:
        for number, callback in enumerate(self._trainer.checkpoint_callbacks):
            if isinstance(callback, ModelCheckpoint):
                callback.dirpath = os.path.join(self._plan.saves, str(number))

    # ── hooks ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if trainer is not self._trainer or stage != "fit" or self._file is not None:
            return
        self._redirect_saves()  # of callbacks that the module has configured, too
        others = [callback for callback in trainer.callbacks if callback is not self]
        trainer.callbacks = [*others, self]  # a new list: Lightning goes through the old
        os.makedirs(self._plan.records, exist_ok=True)
        self._file = rank_file(self._plan.records, trainer.global_rank).open("w", encoding="utf-8")
        ranks = trainer.global_rank, trainer.world_size
        self._write(setting=Setting(*ranks, type(trainer.strategy).__name__, str(trainer.precision)))

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._plan.resume_from is not None:
            self._record("restored", trainer, self._state)

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._step += trainer is self._trainer
        self._record("before", trainer, lambda: {"batch": {"batch": batch}} | self._position())

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        def sections() -> dict[str, dict[str, Any]]:
            gradients = {name: p.grad for name, p in trainer.lightning_module.named_parameters() if p.grad is not None}
            loss = {"loss": {"returned": outputs}, "gradients": gradients}
            return self._state() | loss | self._position() | self._logged()

        if self._record("after", trainer, sections) and self._step >= self._plan.last_step:
            self._finish(trainer)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    def _record(self, phase: Phase, trainer: pl.Trainer, sections: Callable[[], dict[str, dict[str, Any]]]) -> bool:
        """Write the values of a moment by section and name; returns whether this run is recorded."""
        if self._file is None or trainer is not self._trainer:
            return False
        entries = {section: self._values.of_section(named) for section, named in sections().items()}
        self._write(step=self._step, phase=phase, sections=entries, unobserved=self._values.unobserved)
        return True

    def _write(self, **values: Any) -> None:
        assert self._file is not None
        self._file.write(to_line(**values))
        self._file.flush()

    def _finish(self, trainer: pl.Trainer) -> None:
        if self._plan.save_to is not None:
            trainer.save_checkpoint(self._plan.save_to)
            io = trainer.strategy.checkpoint_io
            if isinstance(io, ShardCkptIO):
                io.wait()
            else:
                io.teardown()  # ends a thread that saves
        self.teardown(trainer, trainer.lightning_module, "fit")
        trainer.strategy.barrier("the end of a recorded run")  # until all have recorded
        self._end()

    # ── sections ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _state(self) -> dict[str, dict[str, Any]]:
        """Return the state that a checkpoint should bring back."""
        trainer, module = self._trainer, self._trainer.lightning_module
        schedulers = enumerate(config.scheduler for config in trainer.lr_scheduler_configs)
        optimizer, param_groups = self._optimizers()
        return {
            "weights": dict(module.named_parameters()),
            "buffers": dict(module.named_buffers()),
            "optimizer": optimizer,
            "param_groups": param_groups,
            "schedulers": {f"{i}/{type(of).__name__}": of.state_dict() for i, of in schedulers},
            "precision": trainer.precision_plugin.state_dict(),
            "metrics": {name: dict(m.metric_state) for name, m in module.named_modules() if isinstance(m, Metric)},
            "module": _module_attributes(module),
            "datamodule": _with_attributes(getattr(trainer, "datamodule", None), _given_by(pl.LightningDataModule)),
            "callbacks": dict(self._callbacks()),
        }

    def _optimizers(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return state and param groups as they are: in hooks, a pipeline shows a whole that no stage has."""
        names, state, groups = parameter_names(self._trainer.lightning_module), dict[str, Any](), dict[str, Any]()
        with self._trainer.profiler.profile("[prove-resume]record"):  # not in a hook
            for number, optimizer in enumerate(self._trainer.optimizers):
                for parameter, values in optimizer.state.items():
                    state[f"{number}/{names.get(id(parameter), _NO_PARAMETER)}"] = values
                for i, group in enumerate(optimizer.param_groups):
                    has = [names.get(id(parameter), _NO_PARAMETER) for parameter in group["params"]]
                    options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
                    groups[f"{number}/{i}"] = options | {f"has {name}": True for name in has}
        return state, groups

    def _callbacks(self) -> Iterator[tuple[str, Any]]:
        for number, callback in enumerate(self._trainer.callbacks):
            name, kind = f"{type(callback).__name__} ({number})", type(callback).__module__
            if callback is self:
                continue
            if isinstance(callback, Timer):
                self._values.unobserved[f"callback {name}"] = "it measures time, which is never the same"
            elif kind.startswith(("lightning.", _OURS)):
                yield name, {"state_dict": callback.state_dict()}
            else:
                yield name, _with_attributes(callback, {"_trainer"})

    def _position(self) -> dict[str, dict[str, Any]]:
        """Return the random streams and the counters of steps."""
        trainer, loop = self._trainer, self._trainer.fit_loop.epoch_loop
        streams: dict[str, Any] = {name: Entry(_digest(state)) for name, state in get_rng_state().items()}
        for number, loader in enumerate(train_loaders(trainer)):
            sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", getattr(loader, "sampler", None))
            for name, owner in ((f"loader {number}", loader), (f"loader {number} sampler", sampler)):
                values = {key: getattr(owner, key, None) for key in ("generator", "seed", "epoch")}
                streams[name] = {key: of for key, of in values.items() if isinstance(of, (*GENERATORS, int))}
            if workers := getattr(loader, "num_workers", 0):
                name = f"loader {number}: random streams of its workers"
                self._values.unobserved[name] = f"they are in {workers} other processes"
        counters = {"global_step": trainer.global_step, "epoch": trainer.current_epoch, "batch_idx": loop.batch_idx}
        return {"random": streams, "counters": counters | {"batches over all epochs": loop.total_batch_idx}}

    def _logged(self) -> dict[str, dict[str, Any]]:
        synced, own = dict[str, Any](), dict[str, Any]()
        for logged in logged_values(self._trainer):
            if logged.of_batch is not None:
                (synced if logged.synced else own)[logged.name] = logged.of_batch
            own |= {f"{logged.name} over the epoch so far ({part})": value for part, value in logged.of_epoch.items()}
        return {"logged": synced, "logged_by_rank": own}


class _StandInLogger(DummyLogger):
    """Takes the place of a logger: nothing is written or sent anywhere.

    Args:
        directory: for code that asks a logger where to write.
    """

    def __init__(self, directory: str) -> None:
        super().__init__()
        self._directory = directory

    @property
    @override
    def save_dir(self) -> str:
        return self._directory

    @property
    @override
    def log_dir(self) -> str:
        return self._directory


_NO_PARAMETER = "a tensor that is no parameter"


def _module_attributes(module: nn.Module) -> dict[str, Any]:
    given, libraries = _given_by(pl.LightningModule), ("torch.", "lightning.", "torchmetrics.")
    return {
        f"{name}.{key}" if name else key: value
        for name, sub in module.named_modules()
        if not type(sub).__module__.startswith(libraries) and not isinstance(sub, Metric)
        for key, value in vars(sub).items()
        if key not in given
    }


def _with_attributes(owner: Any, without: Collection[str]) -> dict[str, Any]:
    """Return the ``state_dict()`` of an object and its attributes; nothing of None."""
    if owner is None:
        return {}
    return {"state_dict": owner.state_dict()} | {key: of for key, of in vars(owner).items() if key not in without}


@cache
def _given_by(kind: type) -> frozenset[str]:
    """Return the attributes that Lightning gives every object of a class."""
    return frozenset(vars(kind())) | SET_LATER


# ── values ────────────────────────────────────────────────────────────────────────────────────────────────────────

_OURS = "lightning_shardckpt."
_SHORT, _DEEPEST, _MOST = 80, 7, 1000
_CODE = (FunctionType, BuiltinFunctionType, MethodType, ModuleType, type)
_SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, Enum, range)


class _Values:
    """Turns values into entries; ``unobserved`` has the reasons where it cannot, by name.

    Args:
        replaced: texts that differ between runs by nature, such as the folder of this run, and their replacements.
    """

    def __init__(self, replaced: Mapping[str, str]) -> None:
        self._replaced = replaced
        self.unobserved: dict[str, str] = {}

    def of_section(self, named: Mapping[str, Any]) -> dict[str, Entry]:
        """Return the entries of values by name; of equal names, such as of 1 and "1", the later ones are numbered."""
        found: dict[str, Entry] = {}
        for name, value in named.items():
            for key, entry in self.entries(name, value):
                unique = key
                for number in itertools.count(2):
                    if unique not in found:
                        break
                    unique = f"{key} ({number})"
                found[unique] = entry
        return found

    def entries(self, name: str, value: Any, depth: int = 0) -> Iterator[tuple[str, Entry]]:
        """Yield the entries of a value and of all values in it, by name."""
        if isinstance(value, Tensor):
            try:
                yield from _tensor_entries(clean_fqn(name), value)
            except (StateError, RuntimeError, NotImplementedError) as error:
                self.unobserved[name] = str(error)
        elif isinstance(value, Entry):
            yield name, value
        elif isinstance(value, _SCALARS):
            yield name, self._scalar(value)
        elif isinstance(value, GENERATORS):
            yield name, Entry(_digest(generator_state(value)), shared=False)
        elif isinstance(value, np.ndarray | np.generic):
            yield name, Entry(f"{value.dtype} {value.shape} {_digest(value)}")
        elif not isinstance(value, _CODE) and not type(value).__module__.startswith(_OURS):  # those are the strategy's
            yield from self._contents(name, value, depth)

    def _contents(self, name: str, value: Any, depth: int) -> Iterator[tuple[str, Entry]]:
        items = _items(value)
        if items is None or depth == _DEEPEST:
            self.unobserved[name] = f"a value of {type(value).__module__}.{type(value).__qualname__}"
        elif not items:
            yield name, Entry(f"empty {type(value).__name__}")
        elif len(items) <= _MOST or isinstance(value, nn.Module):
            for key, item in items:
                yield from self.entries(f"{name}/{key}" if name else str(key), item, depth + 1)
        elif all(isinstance(item, _SCALARS) for _, item in items):
            yield name, Entry(checksum(repr(items).encode()))
        else:
            self.unobserved[name] = f"more than {_MOST} items"

    def _scalar(self, value: Any) -> Entry:
        if isinstance(value, str):
            for old, new in self._replaced.items():
                value = value.replace(old, new)
        text = repr(value)
        is_exact = isinstance(value, float) or (isinstance(value, int) and abs(value) < 1 << 53)
        return Entry(text if len(text) <= _SHORT else checksum(text.encode()), float(value) if is_exact else None)


def _items(value: Any) -> list[tuple[Any, Any]] | None:
    """Return the values in a container by key; None of other objects."""
    if isinstance(value, nn.Module):
        value = value.state_dict()
    elif dataclasses.is_dataclass(value):
        value = {of.name: getattr(value, of.name, None) for of in dataclasses.fields(value)}
    elif isinstance(value, set | frozenset):
        value = sorted(value, key=repr)
    if isinstance(value, Mapping):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, list | tuple | deque) else None


def _digest(state: Any) -> str:
    """Return a digest of tensors, arrays and plain values, also nested."""
    if isinstance(state, Tensor):
        state = state.cpu().numpy()
    if isinstance(state, np.ndarray | np.generic):
        return checksum(np.ascontiguousarray(state).tobytes())
    if isinstance(state, Mapping):
        state = tuple(state.items())
    return checksum(repr(tuple(map(_digest, state)) if isinstance(state, list | tuple) else state).encode())


# ── tensors ───────────────────────────────────────────────────────────────────────────────────────────────────────

_PROJECTIONS = 4  # of 16 bits of an element's key each
_SEED = np.uint64(0xD6E8FEB86659FD93)


@torch.no_grad()
def _tensor_entries(name: str, tensor: Tensor) -> list[tuple[str, Entry]]:
    """Return the entry of a tensor by its name; none for a tensor of another pipeline stage."""
    if is_elsewhere(tensor):
        return []
    if is_lazy(tensor) or tensor.is_meta or tensor.is_nested or tensor.layout is not torch.strided:
        raise StateError("a lazy, meta, nested or sparse tensor has no elements that could be digested")
    return [(name, tensor_entry(tensor))]


@torch.no_grad()
def tensor_entry(tensor: Tensor) -> Entry:
    """Return the entry of a plain or distributed tensor: the boxes that this rank has."""
    views = ((box.start, box.shape, view.detach().cpu().contiguous()) for box, view in local_views(tensor))
    boxes = tuple(box_record(start, lengths, local) for start, lengths, local in views)
    return Entry(str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape), boxes=boxes)


def box_record(start: tuple[int, ...], lengths: tuple[int, ...], local: Tensor) -> BoxRecord:
    """Return the record of a box of a tensor, with its elements on the CPU.

    The digest is the sum of a hash of each element's bits and of its place in the tensor; the moments are the sum of
    squares, and of the products of each element with numbers of [-1, 1] that follow from its place.
    """
    places = np.full((1,) * len(lengths), _SEED, np.uint64)
    for dim, (first, length) in enumerate(zip(start, lengths, strict=True)):
        along = np.arange(first, first + length, dtype=np.uint64).reshape([-1] + [1] * (len(lengths) - dim - 1))
        places = _mix(places ^ (along + np.uint64(dim + 1)) * np.uint64(0x9E3779B97F4A7C15))
    places = places.reshape(-1)
    data: NDArray[np.uint8] = local.reshape(-1).view(torch.uint8).numpy().reshape(len(places), -1)
    words = np.zeros((len(places), -(-data.shape[1] // 8) * 8 if len(places) else 8), np.uint8)
    words[:, : data.shape[1]] = data
    hashes = places
    for word in words.view(np.uint64).T:
        hashes = _mix(hashes ^ word)
    digest = int(hashes.sum(dtype=np.uint64))
    if local.is_complex():
        return BoxRecord(start, lengths, digest, ())
    values: NDArray[np.float64] = local.reshape(-1).double().numpy()
    weights = [(places >> np.uint64(16 * i) & np.uint64(0xFFFF)).astype(np.float64) for i in range(_PROJECTIONS)]
    with np.errstate(all="ignore"):  # the sums show what is not finite
        sums = [float(values @ values)] + [float(values @ (of / 32767.5 - 1)) for of in weights]
    return BoxRecord(start, lengths, digest, tuple(sums))


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the finalizer of splitmix64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
