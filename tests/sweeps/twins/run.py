"""Run pieces of code on one process, sharded, and resumed; in the ranks."""

from __future__ import annotations

import fnmatch
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_shardckpt import FSDP, ShardCkptIO, ShardedStrategy
from tests.support.tiny import EXECUTES, QUIET
from tests.sweeps.twins import (
    adapters,
    architectures,
    callbacks,
    changes,
    flags,
    growth,
    hooks,
    kept,
    manual,
    models,
    optimizers,
    packages,
    recipes,
    updates,
    weights,
)
from tests.sweeps.twins.base import CASES as CASES
from tests.sweeps.twins.base import PLAN, Case

MODULES = (manual, changes, hooks, callbacks, models, optimizers, kept)  # they register the cases
# Those that the suite leaves out:
SWEPT = {m.__name__ for m in (weights, updates, growth, architectures, flags, recipes, adapters, packages)}

ALONE, FSDP2 = {"data_parallel_shard_size": 1}, {"data_parallel_shard_size": 2}
REPLICAS, PP = {**ALONE, "data_parallel_replicate_size": 2}, {"pipeline_parallel_size": 2}
TP = {"tensor_parallel_size": 2, "tensor_parallel_plan": PLAN}
TOPOLOGIES: dict[str, tuple[int, Mapping[str, Any]]] = {
    "one": (1, {}),
    "fsdp2": (2, {}),
    "replicas": (2, REPLICAS),
    "tp2": (2, ALONE | TP),
    "pp2": (2, ALONE | PP),
    "hsdp": (4, FSDP2 | {"data_parallel_replicate_size": 2}),
    "fsdp2 x tp2": (4, FSDP2 | TP),
    "pp2 x fsdp2": (4, FSDP2 | PP),
    "pp2 x replicas": (4, REPLICAS | PP),
    "fsdp2, nothing ignored": (2, {"fsdp": FSDP(ignored=[])}),
    "pp2 x tp2": (4, ALONE | PP | TP),
}
"""How many ranks, and the arguments of the strategy."""

OUTSIDE_PIPELINES = frozenset(
    {"Langevin", "SamOptimizer", "StepsByPolyak"}  # optimizers that join or draw
    | {"CountsInLayers", "MarksWeightsInForward", "ReadsGradientInForward", "WatchesEveryModule", "WatchesModules"}
    | {"AssignsTwiceInStep", "ClampsInStep"}  # change weights before or after the layers
    | {"NormalizesByAllRanks", "NormalizesByRunningMean", "TakesFromAnIterator"}  # leave something behind
    | {"DrawsByItself", "KeepsMeters"}  # change objects of classes of one's own
    | {"PenalizesInputGradients", "ValidatesWithGradients"}  # Python's and torch's own errors
)
"""Cases that the contract of pipelines does not cover, and that differ or fail there."""


@dataclass
class Found:
    """What a run left behind, or the error that it ended with."""

    state: dict[str, Tensor]
    seen: list[float]
    error: str = ""


class SavesAfterOneEpoch(pl.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def is_pipelined(topology: str) -> bool:
    """Whether each rank has only its own stage's state at the end."""
    return "pipeline_parallel_size" in TOPOLOGIES[topology][1]


def is_swept(case: Case) -> bool:
    """Whether the suite leaves the case out, but for those that it names."""
    return case.module.__module__ in SWEPT


def is_manual(case: Case) -> bool:
    """Whether the module optimizes by itself."""
    return not _example(case.module).automatic_optimization


def fits(case: Case, topology: str) -> bool:
    """Whether the module has what the tensor-parallel plan shards, and keeps the contract of pipelines."""
    if is_pipelined(topology) and case.name in OUTSIDE_PIPELINES:
        return False
    if "tensor_parallel_plan" not in TOPOLOGIES[topology][1]:
        return True
    names = [name for name, _ in _example(case.module).named_modules()]
    return all(fnmatch.filter(names, pattern.removeprefix("*")) for pattern in PLAN)


@cache
def _example(module: Callable[[], pl.LightningModule]) -> pl.LightningModule:
    """One that is only looked at."""
    return module()


def twins(names: Sequence[str], folder: Path | None = None, *, resume: bool = False) -> dict[str, Found]:
    """On one process, under Lightning's own strategy.

    Args:
        folder: for the checkpoints after one epoch.
        resume: whether to begin with those, for one more epoch.
    """
    return {name: _run(CASES[name], None, folder and folder / f"{name}.ckpt", resume) for name in names}


def twins_resumed(names: Sequence[str], folder: Path) -> dict[str, Found]:
    """``twins`` that begin with what others saved."""
    return twins(names, folder, resume=True)


def run(names: Sequence[str], topology: str, folder: Path | None = None, resume: bool = False) -> dict[str, Found]:
    """Sharded; ``folder`` and ``resume`` as for `twins`."""
    return {name: _run(CASES[name], topology, folder and folder / name, resume) for name in names}


def difference(found: Found, expected: Found, tolerance: float) -> str:
    """Where two runs differ, in words; nothing if they don't."""
    if found.error:
        return found.error
    if found.state.keys() != expected.state.keys():
        return f"only one of them has {sorted(found.state.keys() ^ expected.state.keys())}"
    for name, value in expected.state.items():
        got = found.state[name]
        if got.shape != value.shape or got.dtype != value.dtype:
            return f"{name} is {got.dtype} {tuple(got.shape)}, not {value.dtype} {tuple(value.shape)}"
        exact = torch.complex128 if value.is_complex() else torch.float64
        largest = float(value.to(exact).abs().max()) if value.numel() else 0.0
        off = float((got.to(exact) - value.to(exact)).abs().max()) if value.numel() else 0.0
        if not off <= tolerance * max(largest, 1e-3):  # what should be zero is a sum that rounds
            return f"{name} is off by {off} of {largest}"
    if len(found.seen) != len(expected.seen):
        return f"{len(found.seen)} numbers were seen, not {len(expected.seen)}"
    for place, (got_number, number) in enumerate(zip(found.seen, expected.seen, strict=True)):
        if not abs(got_number - number) <= tolerance * max(abs(number), 1e-6):
            return f"the number seen at {place} is {got_number}, not {number}"
    return ""


def difference_of_stages(ranks: Sequence[Found], expected: Found, tolerance: float) -> str:
    """Where the stages of a pipeline, each with its own part of the state, differ from the twin; '' if they don't."""
    for found in ranks:
        part = {name: value for name, value in expected.state.items() if name in found.state}
        if differs := difference(found, replace(expected, state=part), tolerance):
            return differs
    lost = expected.state.keys() - set().union(*(found.state for found in ranks))
    return f"no stage has {sorted(lost)}" if lost else ""


def prepared(
    case: Case, topology: str | None, extra: Sequence[pl.Callback] = (), *, more_epochs: int = 0, seed: int = 7
) -> tuple[pl.Trainer, Any]:
    """A Trainer and a module.

    Args:
        topology: None for one process under Lightning's own strategy.
        extra: callbacks, after those of the case.
        more_epochs: than the case says.
        seed: of the weights, and of what is drawn besides.
    """
    pl.seed_everything(seed, verbose=False)
    options = {"max_epochs": 1, "limit_val_batches": 0, "precision": "64-true"}
    options |= {"use_distributed_sampler": False, **case.options}
    module = case.module()
    if options["precision"] == "64-true":  # so that Lightning loads checkpoints without rounding
        module.double()
    options["max_epochs"] += more_epochs
    devices, arguments = TOPOLOGIES[topology or "one"]
    if topology is not None:
        if case.whole and "tensor_parallel_plan" not in arguments:
            arguments = {"fsdp": FSDP(ignored=["*"]), **arguments}
        options |= {"strategy": ShardedStrategy(**arguments, timeout_s=30), "plugins": [ShardCkptIO()]}
    on_gpus = dist.is_initialized() and "nccl" in dist.get_backend_config()  # as in `run_on_gpus`
    options = QUIET | options | {"accelerator": "cuda" if on_gpus else "cpu"}
    callbacks = [*options.pop("callbacks", list)(), *extra]
    return pl.Trainer(devices=devices, callbacks=callbacks, **options), module


def _run(case: Case, topology: str | None, path: Path | None, resume: bool) -> Found:
    extra = [SavesAfterOneEpoch(path)] if path is not None and not resume else []
    trainer, module = prepared(case, topology, extra, more_epochs=int(resume))
    try:
        with warnings.catch_warnings():  # of natural code there are some, on rank zero alone
            warnings.simplefilter("ignore")
            trainer.fit(module, ckpt_path=path if resume else None, **(EXECUTES if resume else {}))
    except Exception as error:
        return Found({}, [], described(error))
    return Found(whole(module), module.seen)


def described(error: Exception) -> str:
    """An error in one line, and where it comes from."""
    return f"{type(error).__name__}: {error}\n{traceback.format_exc()}"


def whole(module: torch.nn.Module) -> dict[str, Tensor]:
    """Return a copy of a module's tensors, without shards."""
    state = {name: value.detach() for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    return {n: (v.full_tensor() if isinstance(v, DTensor) else v).to("cpu", copy=True) for n, v in state.items()}
