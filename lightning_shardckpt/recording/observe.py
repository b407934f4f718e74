"""Record the state and the steps of a live Trainer, in the sections that ``tools.run_records.SECTIONS`` lists.

Nothing here changes what it looks at.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, Timer
from torch import nn
from torchmetrics import Metric

from lightning_shardckpt.compat.lightning_attributes import SET_LATER
from lightning_shardckpt.compat.lightning_loops import logged_values, train_loaders
from lightning_shardckpt.compat.lightning_trainer import validated_metrics
from lightning_shardckpt.errors import StateError
from lightning_shardckpt.format.clean_fqn import clean_fqn
from lightning_shardckpt.recording.plain_values import ValueRecorder, state_digest
from lightning_shardckpt.recording.tensor_record import row_digests, tensor_entries
from lightning_shardckpt.state.model import is_elsewhere
from lightning_shardckpt.state.module_io import parameter_names
from lightning_shardckpt.system.random_generators import get_rng_state
from lightning_shardckpt.tools.run_records import Entry, RowsRecord, Sections, Setting, ValueRecord

_NOT_HYPER = {"params", "param_names"}


class Observer:
    """Observes one Trainer on this rank.

    Args:
        trainer: whose fit is set up.
        values: turns plain values into records, and notes what nobody can observe.
        unseen: callbacks that are not the user's.
    """

    def __init__(self, trainer: pl.Trainer, values: ValueRecorder, unseen: Iterable[Callback]) -> None:
        self._trainer, self._values, self._unseen = trainer, values, list(unseen)
        self._names: dict[int, str] = {}

    @property
    def setting(self) -> Setting:
        """Who observes."""
        trainer = self._trainer
        share = trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
        kind = type(trainer.strategy).__name__
        ranks = trainer.global_rank, trainer.world_size, int(share["rank"]), int(share["num_replicas"])
        return Setting(*ranks, kind, str(trainer.precision))

    # ── moments ───────────────────────────────────────────────────────────────────────────────────────────────────

    def state(self) -> dict[str, Mapping[str, Entry]]:
        """Return the state that a checkpoint should bring back."""
        module = self._trainer.lightning_module
        self._names = parameter_names(module)
        return {
            "weights": self._tensors(module.named_parameters()),
            "buffers": self._tensors(module.named_buffers()),
            "optimizer": self._optimizers(),
            "param_groups": self._param_groups(),
            "schedulers": self._schedulers(),
            "precision": self._values.entries("precision", self._trainer.precision_plugin.state_dict()),
            "metrics": self._metrics(module),
            "module": self._attributes(module),
            "datamodule": self._datamodule(),
            "callbacks": self._callbacks(),
        }

    def before(self, batch: Any) -> dict[str, Mapping[str, Entry]]:
        """Return what a training step begins with."""
        samples: dict[str, Entry] = {}
        _collect_rows("batch", batch, samples)
        return {
            "batch": self._values.entries("batch", batch, shared=False),
            "samples": samples,
            "random": self._random(),
            "param_groups": self._param_groups(),
            "counters": self._counters(),
        }

    def after(self, outputs: Any) -> Sections:
        """Return what a training step and the optimizers made of it."""
        found = self.state()
        module = self._trainer.lightning_module
        gradients = ((name, p.grad) for name, p in module.named_parameters() if p.grad is not None)
        found |= {
            "loss": self._values.entries("what training_step returned", outputs, shared=False),
            "logged": self._logged(),
            "gradients": self._tensors(gradients),
            "random": self._random(),
            "counters": self._counters(),
        }
        return found

    def validation(self) -> dict[str, Entry]:
        """Return the metrics that the validation that is ending has logged."""
        return self._values.entries("validation", dict(validated_metrics(self._trainer)))

    # ── sections ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _tensors(self, named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Entry]:
        found: dict[str, Entry] = {}
        for name, tensor in named:
            if not is_elsewhere(tensor):
                self._put_tensor(found, clean_fqn(name), tensor)
        return found

    def _put_tensor(self, found: dict[str, Entry], name: str, tensor: torch.Tensor) -> None:
        try:
            found |= tensor_entries(name, tensor)
        except (StateError, RuntimeError, NotImplementedError) as error:
            self._values.note(name, str(error))

    def _optimizers(self) -> dict[str, Entry]:
        found: dict[str, Entry] = {}
        for number, optimizer in enumerate(self._trainer.optimizers):
            with self._outside_hooks():
                state = list(optimizer.state.items())
            for parameter, values in state:
                name = f"{number}/{self._names.get(id(parameter), 'a tensor that is no parameter')}"
                for key, value in values.items() if isinstance(values, Mapping) else (("", values),):
                    if isinstance(value, torch.Tensor):
                        self._put_tensor(found, f"{name}/{key}", value)
                    else:
                        found |= self._values.entries(f"{name}/{key}", value)
        return found

    def _outside_hooks(self) -> AbstractContextManager[None]:
        """Look at optimizers as they are: in hooks, a pipeline shows what no stage has alone, or refuses to."""
        return self._trainer.profiler.profile("[prove-resume]record")  # type: ignore[attr-defined,no-any-return]  # set later

    def _param_groups(self) -> dict[str, Entry]:
        found: dict[str, Entry] = {}
        for number, optimizer in enumerate(self._trainer.optimizers):
            for i, group in enumerate(optimizer.param_groups):
                hyper = {key: value for key, value in group.items() if key not in _NOT_HYPER}
                for key, value in hyper.items():
                    found |= self._values.entries(f"{number}/param_groups/{i}/{key}", value)
                with self._outside_hooks():
                    parameters = list(group["params"])
                for parameter in parameters:
                    name = self._names.get(id(parameter), "a tensor that is no parameter")
                    found[f"{number}/param_groups/{i} has {name}"] = ValueRecord("yes")
        return found

    def _schedulers(self) -> dict[str, Entry]:
        found: dict[str, Entry] = {}
        for number, config in enumerate(self._trainer.lr_scheduler_configs):
            state = config.scheduler.state_dict()
            for key, value in state.items():
                if not callable(value):
                    found |= self._values.entries(f"{number}/{type(config.scheduler).__name__}/{key}", value)
        return found

    def _metrics(self, module: nn.Module) -> dict[str, Entry]:
        found: dict[str, Entry] = {}
        for name, metric in module.named_modules():
            if isinstance(metric, Metric):
                found |= self._values.entries(name, dict(metric.metric_state), shared=False)
        return found

    def _attributes(self, module: pl.LightningModule) -> dict[str, Entry]:
        found: dict[str, Entry] = {}
        for name, sub in module.named_modules():
            own = not type(sub).__module__.startswith(("torch.", "lightning.", "torchmetrics."))
            if own and not isinstance(sub, Metric):
                found |= self._values.attributes(name, sub, _given_by(pl.LightningModule))
        return found

    def _datamodule(self) -> dict[str, Entry]:
        datamodule = getattr(self._trainer, "datamodule", None)
        if datamodule is None:
            return {}
        found = self._values.entries("state_dict", datamodule.state_dict())
        return found | self._values.attributes("", datamodule, _given_by(pl.LightningDataModule))

    def _callbacks(self) -> dict[str, Entry]:
        found: dict[str, Entry] = {}
        for number, callback in enumerate(self._trainer.callbacks):  # type: ignore[attr-defined]  # set later
            if callback in self._unseen:
                continue
            name = f"{type(callback).__name__} ({number})"
            if isinstance(callback, Timer):
                self._values.note(f"callback {name}", "it measures time, which is never the same")
                continue
            found |= self._values.entries(f"{name}/state_dict", callback.state_dict())
            own = not type(callback).__module__.startswith("lightning")
            found |= self._values.attributes(name, callback, {"_trainer"}, scalars=own)
        return found

    def _random(self) -> dict[str, Entry]:
        found: dict[str, Entry] = {}
        for name, state in get_rng_state().items():
            many = {f"cuda:{i}": each for i, each in enumerate(state)} if name == "cuda" else {name: state}
            found |= {name: ValueRecord(state_digest(each), shared=False) for name, each in many.items()}
        found |= self._values.attributes("module", self._trainer.lightning_module, (), scalars=False)
        for number, loader in enumerate(train_loaders(self._trainer)):
            found |= self._of_loader(f"loader {number}", loader)
        return {name: entry for name, entry in found.items() if isinstance(entry, ValueRecord)}

    def _of_loader(self, name: str, loader: Any) -> dict[str, Entry]:
        sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", getattr(loader, "sampler", None))
        found: dict[str, Entry] = {}
        for of, owner in (("", loader), (" sampler", sampler)):
            for key in ("generator", "seed", "epoch"):
                value = getattr(owner, key, None)
                if isinstance(value, torch.Generator | random.Random | int):
                    found |= self._values.entries(f"{name}{of} {key}", value, shared=False)
        if workers := getattr(loader, "num_workers", 0):
            self._values.note(f"{name}: random streams of its workers", f"they are in {workers} other processes")
        return found

    def _counters(self) -> dict[str, Entry]:
        trainer = self._trainer
        loop = trainer.fit_loop.epoch_loop
        counters = {
            "global_step": trainer.global_step,
            "epoch": trainer.current_epoch,
            "batch_idx": loop.batch_idx,
            "batches over all epochs": loop.total_batch_idx,
        }
        return {name: ValueRecord(str(value), float(value)) for name, value in counters.items()}

    def _logged(self) -> dict[str, Entry]:
        found: dict[str, Entry] = {}
        for logged in logged_values(self._trainer):
            if logged.of_batch is not None:
                found |= self._values.entries(logged.name, _number(logged.of_batch), shared=logged.synced)
            for part, value in logged.of_epoch.items():
                name = f"{logged.name} over the epoch so far ({part})"
                found |= self._values.entries(name, _number(value), shared=False)
        return found


def _number(value: Any) -> Any:
    """Return a tensor of one element as a number, which a report can print."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _collect_rows(name: str, value: Any, found: dict[str, Entry]) -> None:
    if isinstance(value, torch.Tensor) and value.ndim and value.layout is torch.strided and not value.is_nested:
        found[name] = RowsRecord(row_digests(value))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _collect_rows(f"{name}[{key!r}]", item, found)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            _collect_rows(f"{name}[{number}]", item, found)


@cache
def _given_by(kind: type) -> frozenset[str]:
    """Return the attributes that Lightning gives every object of a class."""
    return frozenset(vars(kind())) | SET_LATER
