"""Record a training run for prove-resume: weights, optimizer state, random streams, batches and logs of every step.

``RunRecorder`` is a callback. It comes last of all callbacks, so that it sees their effects, changes nothing of the
training, and ends the run as a kill would: no hook runs, so that the script writes nothing that an interrupted run
would not have written. ``tools.run_records`` has the plan, the records and their comparison.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
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
from lightning_shardckpt.compat.lightning_trainer import set_default_root_dir
from lightning_shardckpt.compat.trainer_fit import intercept_fit, is_tuning
from lightning_shardckpt.errors import StateError
from lightning_shardckpt.format.checksum import checksum
from lightning_shardckpt.format.clean_fqn import clean_fqn
from lightning_shardckpt.state.compound_tensors import is_compound, take_apart
from lightning_shardckpt.state.dtensor_layout import local_views
from lightning_shardckpt.state.model import is_elsewhere
from lightning_shardckpt.state.module_io import parameter_names
from lightning_shardckpt.system.random_generators import GENERATORS, generator_state, get_rng_state
from lightning_shardckpt.tools.run_records import (
    BoxRecord,
    Entry,
    Phase,
    RunPlan,
    Sections,
    Setting,
    rank_file,
    to_line,
)

_NO_PARAMETER = "a tensor that is no parameter"


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
        if self._records(trainer) and self._plan.resume_from is not None:
            self._record("restored", self._state())

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if not self._records(trainer):
            return
        self._step += 1
        sections: Sections = {
            "batch": self._values.entries("batch", batch),
            "random": self._random(),
            "param_groups": self._param_groups(),
            "counters": self._counters(),
        }
        self._record("before", sections)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._records(trainer):
            return
        sections = self._state() | {
            "loss": self._values.entries("what training_step returned", outputs),
            "logged": self._logged(),
            "gradients": self._tensors((name, p.grad) for name, p in trainer.lightning_module.named_parameters()),
            "random": self._random(),
            "counters": self._counters(),
        }
        self._record("after", sections)
        if self._step >= self._plan.last_step:
            self._finish(trainer)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    def _records(self, trainer: pl.Trainer) -> bool:
        return self._file is not None and trainer is self._trainer

    def _record(self, phase: Phase, sections: Sections) -> None:
        self._write(step=self._step, phase=phase, sections=sections, unobserved=self._values.unobserved)

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

    def _state(self) -> dict[str, Mapping[str, Entry]]:
        """Return the state that a checkpoint should bring back."""
        trainer, module, values = self._trainer, self._trainer.lightning_module, self._values
        metrics = [(name, sub) for name, sub in module.named_modules() if isinstance(sub, Metric)]
        return {
            "weights": self._tensors(module.named_parameters()),
            "buffers": self._tensors(module.named_buffers()),
            "optimizer": self._optimizers(),
            "param_groups": self._param_groups(),
            "schedulers": _merge(
                values.entries(f"{i}/{type(config.scheduler).__name__}/{key}", value)
                for i, config in enumerate(trainer.lr_scheduler_configs)
                for key, value in config.scheduler.state_dict().items()
                if not callable(value)
            ),
            "precision": values.entries("precision", trainer.precision_plugin.state_dict()),
            "metrics": _merge(values.entries(name, dict(of.metric_state)) for name, of in metrics),
            "module": self._attributes(module),
            "datamodule": self._datamodule(),
            "callbacks": _merge(map(self._callback, range(len(trainer.callbacks)), trainer.callbacks)),
        }

    def _tensors(self, named: Iterable[tuple[str, Tensor | None]]) -> dict[str, Entry]:
        present = ((clean_fqn(name), tensor) for name, tensor in named if tensor is not None)
        return _merge(self._values.entries(name, tensor) for name, tensor in present if not is_elsewhere(tensor))

    def _optimizers(self) -> dict[str, Entry]:
        names, entries = parameter_names(self._trainer.lightning_module), list[dict[str, Entry]]()
        for number, optimizer in enumerate(self._trainer.optimizers):
            with self._outside_hooks():
                state = list(optimizer.state.items())
            for parameter, values in state:
                name = f"{number}/{names.get(id(parameter), _NO_PARAMETER)}"
                items = values.items() if isinstance(values, Mapping) else (("", values),)
                entries += [self._values.entries(f"{name}/{key}", value) for key, value in items]
        return _merge(entries)

    def _outside_hooks(self) -> Any:
        """Look at optimizers as they are: in hooks, a pipeline shows a whole that no stage has, or refuses to."""
        return self._trainer.profiler.profile("[prove-resume]record")

    def _param_groups(self) -> dict[str, Entry]:
        names, entries = parameter_names(self._trainer.lightning_module), dict[str, Entry]()
        for number, optimizer in enumerate(self._trainer.optimizers):
            for i, group in enumerate(optimizer.param_groups):
                for key in group.keys() - {"params", "param_names"}:
                    entries |= self._values.entries(f"{number}/param_groups/{i}/{key}", group[key])
                with self._outside_hooks():
                    parameters = list(group["params"])
                has = [names.get(id(parameter), _NO_PARAMETER) for parameter in parameters]
                entries |= {f"{number}/param_groups/{i} has {name}": Entry("yes") for name in has}
        return entries

    def _attributes(self, module: nn.Module) -> dict[str, Entry]:
        skipped = ("torch.", "lightning.", "torchmetrics.")
        own = [(n, m) for n, m in module.named_modules() if not type(m).__module__.startswith(skipped)]
        given = _given_by(pl.LightningModule)
        return _merge(self._values.attributes(n, m, given) for n, m in own if not isinstance(m, Metric))

    def _datamodule(self) -> dict[str, Entry]:
        datamodule = getattr(self._trainer, "datamodule", None)
        if datamodule is None:
            return {}
        state = self._values.entries("state_dict", datamodule.state_dict())
        return state | self._values.attributes("", datamodule, _given_by(pl.LightningDataModule))

    def _callback(self, number: int, callback: Callback) -> dict[str, Entry]:
        name = f"{type(callback).__name__} ({number})"
        if isinstance(callback, Timer):
            self._values.unobserved[f"callback {name}"] = "it measures time, which is never the same"
        if isinstance(callback, Timer | RunRecorder):
            return {}
        only = (Tensor, *_GENERATORS) if type(callback).__module__.startswith("lightning") else (object,)
        state = self._values.entries(f"{name}/state_dict", callback.state_dict())
        return state | self._values.attributes(name, callback, {"_trainer"}, only=only)

    def _random(self) -> dict[str, Entry]:
        streams: dict[str, Entry] = {}
        for name, state in get_rng_state().items():
            many = {f"cuda:{i}": each for i, each in enumerate(state)} if name == "cuda" else {name: state}
            streams |= {name: Entry(_state_digest(each)) for name, each in many.items()}
        streams |= self._values.attributes("module", self._trainer.lightning_module, (), only=_GENERATORS)
        for number, loader in enumerate(train_loaders(self._trainer)):
            sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", getattr(loader, "sampler", None))
            for name, owner in ((f"loader {number}", loader), (f"loader {number} sampler", sampler)):
                for key in ("generator", "seed", "epoch"):
                    value = getattr(owner, key, None)
                    if isinstance(value, (*_GENERATORS, int)):
                        streams |= self._values.entries(f"{name} {key}", value)
            if workers := getattr(loader, "num_workers", 0):
                name = f"loader {number}: random streams of its workers"
                self._values.unobserved[name] = f"they are in {workers} other processes"
        return streams

    def _counters(self) -> dict[str, Entry]:
        trainer = self._trainer
        loop = trainer.fit_loop.epoch_loop
        steps = {"global_step": trainer.global_step, "epoch": trainer.current_epoch}
        counters = steps | {"batch_idx": loop.batch_idx, "batches over all epochs": loop.total_batch_idx}
        return {name: Entry(str(value), float(value)) for name, value in counters.items()}

    def _logged(self) -> dict[str, Entry]:
        entries: dict[str, Entry] = {}
        for logged in logged_values(self._trainer):
            values = {} if logged.of_batch is None else {logged.name: (logged.of_batch, logged.synced)}
            for part, value in logged.of_epoch.items():
                values[f"{logged.name} over the epoch so far ({part})"] = value, False
            for name, (value, shared) in values.items():
                number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value  # can be printed
                of_value = self._values.entries(name, number)
                entries |= {key: dataclasses.replace(entry, shared=shared) for key, entry in of_value.items()}
        return entries


def _merge(many: Iterable[dict[str, Entry]]) -> dict[str, Entry]:
    return {name: entry for each in many for name, entry in each.items()}


@cache
def _given_by(kind: type) -> frozenset[str]:
    """Return the attributes that Lightning gives every object of a class."""
    return frozenset(vars(kind())) | SET_LATER


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


# ── values ────────────────────────────────────────────────────────────────────────────────────────────────────────

_OURS = "lightning_shardckpt."
_SHORT, _DEEPEST, _MOST = 80, 6, 1000
_CODE = (FunctionType, BuiltinFunctionType, MethodType, ModuleType, type)
_SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, Enum, range)
_CONTAINERS = (Mapping, list, tuple, deque, set, frozenset)
_GENERATORS = (torch.Generator, random.Random)


class _Values:
    """Turns values into entries; ``unobserved`` has the reasons where it cannot, by name.

    Args:
        replaced: texts that differ between runs by nature, such as the folder of this run, and their replacements.
    """

    def __init__(self, replaced: Mapping[str, str]) -> None:
        self._replaced = replaced
        self.unobserved: dict[str, str] = {}

    def entries(self, name: str, value: Any) -> dict[str, Entry]:
        """Return the entries of a value and of all values in it, by name."""
        return dict(self._walk(name, value, 0))

    def attributes(
        self, name: str, owner: object, without: Collection[str], *, only: tuple[type, ...] = (object,)
    ) -> dict[str, Entry]:
        """Return the entries of an object's attributes of some types, but for code and the names in ``without``."""
        entries: dict[str, Entry] = {}
        for key, value in list(vars(owner).items()):
            if key not in without and isinstance(value, only) and not isinstance(value, _CODE):
                entries |= self.entries(f"{name}.{key}" if name else key, value)
        return entries

    def _walk(self, name: str, value: Any, depth: int) -> Iterator[tuple[str, Entry]]:
        if isinstance(value, Tensor):
            try:
                yield from _tensor_entries(name, value).items()
            except (StateError, RuntimeError, NotImplementedError) as error:
                self.unobserved[name] = str(error)
        elif isinstance(value, _SCALARS):
            yield name, self._scalar(value)
        elif isinstance(value, GENERATORS):
            yield name, Entry(_state_digest(generator_state(value)), shared=False)
        elif isinstance(value, np.ndarray | np.generic):
            yield name, Entry(f"{value.dtype} {value.shape} {checksum(np.ascontiguousarray(value).tobytes())}")
        elif isinstance(value, nn.Module):
            for key, tensor in value.state_dict().items():
                yield from self._walk(f"{name}.{key}", tensor, depth + 1)
        elif depth < _DEEPEST and isinstance(value, _CONTAINERS):
            yield from self._contents(name, value, depth)
        elif type(value).__module__.startswith(_OURS):
            return  # the strategy keeps it with a module
        elif depth < _DEEPEST and dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {of.name: getattr(value, of.name, None) for of in dataclasses.fields(value)}
            yield from self._walk(name, fields, depth + 1)
        elif not isinstance(value, _CODE):
            self.unobserved[name] = f"a value of {type(value).__module__}.{type(value).__qualname__}"

    def _contents(self, name: str, value: Any, depth: int) -> Iterator[tuple[str, Entry]]:
        if isinstance(value, set | frozenset):
            value = sorted(value, key=repr)
        items = list(value.items() if isinstance(value, Mapping) else enumerate(value))
        yield f"{name} (its length)", Entry(str(len(items)), float(len(items)))
        if len(items) <= _MOST:
            for key, item in items:
                yield from self._walk(f"{name}[{key!r}]", item, depth + 1)
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


def _state_digest(state: Any) -> str:
    """Return a digest of a generator's state: a tensor, a dict, or nested tuples of numbers and arrays."""
    if isinstance(state, Tensor):
        return checksum(state.cpu().numpy().tobytes())
    if not isinstance(state, dict):
        state = tuple(part.tobytes() if isinstance(part, np.ndarray) else part for part in state)
    return checksum(repr(state).encode())


# ── tensors ───────────────────────────────────────────────────────────────────────────────────────────────────────

_PROJECTIONS = 4  # of 16 bits of an element's key each
_SEED = np.uint64(0xD6E8FEB86659FD93)


@torch.no_grad()
def _tensor_entries(name: str, tensor: Tensor) -> dict[str, Entry]:
    """Return the entry of a tensor by its name; of a compound one, those of the tensors inside.

    Raises:
        StateError: for a tensor without elements in boxes: lazy, sparse and nested tensors, partial sums.
    """
    if is_lazy(tensor) or tensor.is_meta or tensor.is_nested or tensor.layout is not torch.strided:
        raise StateError("a lazy, meta, nested or sparse tensor has no elements that could be digested")
    if not is_compound(tensor):
        return {name: tensor_entry(tensor)}
    inside, records = take_apart(name, tensor)
    entries = {key: Entry(checksum(repr(record).encode())) for key, record in records.items()}
    return entries | {key: tensor_entry(of) for key, of in inside.items()}


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
