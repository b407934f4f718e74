"""Faults of a resume, planted one at a time: each resumed run has lost or changed one thing, which is to be named.

The training has some of all that a checkpoint must bring back. Runs in a rank.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric

from lightning_shardckpt import ShardCkptIO, ShardedStrategy
from lightning_shardckpt.recording import RunRecorder
from lightning_shardckpt.tools.prove_resume import RunPlan, compare_runs, read_records

STEPS, MIDDLE = 8, 4
Change = Callable[[pl.Trainer, "Net"], object]


class Net(pl.LightningModule):
    """Draws from every random stream; keeps a generator, a count and a metric of its own."""

    def __init__(self, *, epoch_mean: bool = False) -> None:
        super().__init__()
        self.left, self.right, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(4, 1)
        self.mean = MeanMetric()
        self.mean.persistent(True)
        self.noise = torch.Generator().manual_seed(5)
        self.seen = 0
        self.epoch_mean = epoch_mean

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.seen += 1
        drawn = random.random() + float(np.random.rand()) + float(torch.rand((), generator=self.noise))
        hidden = self.norm(self.left(batch) * self.right(batch + 0.1 * drawn))
        loss: Tensor = (self.head(self.drop(hidden)) - batch.sum(1, keepdim=True)).square().mean()
        self.mean.update(loss.detach())
        self.log("loss", loss, on_epoch=self.epoch_mean, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        groups = [{"params": [*self.left.parameters(), *self.right.parameters()]}]
        groups += [{"params": [*self.norm.parameters(), *self.head.parameters()], "lr": 3e-3}]
        optimizer = torch.optim.Adam(groups, lr=1e-2)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5), "interval": "step"}]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["own"] = {"noise": self.noise.get_state(), "seen": self.seen}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.noise.set_state(checkpoint["own"]["noise"])
        self.seen = checkpoint["own"]["seen"]


class Average(Callback):
    """A moving average of a weight, and a count of batches."""

    def __init__(self) -> None:
        self.weight, self.batches = torch.zeros(4, 4), 0

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        self.weight = 0.9 * self.weight + 0.1 * pl_module.left.weight.detach()
        self.batches += 1

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight, "batches": self.batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.weight, self.batches = state_dict["weight"], state_dict["batches"]


class Numbers(Dataset[Tensor]):
    def __init__(self) -> None:
        self._rows = torch.randn(18, 4, generator=torch.Generator().manual_seed(8))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Tensor:
        return self._rows[index]


class Plant(Callback):
    """Changes something when a hook runs for the first time."""

    def __init__(self, hook: str, change: Change) -> None:
        self._changes = {hook: change}.pop

    def _once(self, hook: str, trainer: pl.Trainer, module: Any) -> None:
        with torch.no_grad():
            self._changes(hook, lambda trainer, module: None)(trainer, module)

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._once("on_train_start", trainer, pl_module)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        self._once("on_train_batch_start", trainer, pl_module)


@dataclass(frozen=True, slots=True)
class Fault:
    """What is lost at a resume, and the text with which the first difference begins."""

    named: str
    change: Change = lambda trainer, module: None
    hook: str = "on_train_start"


def first_optimizer_state(trainer: pl.Trainer, module: Net) -> dict[str, Any]:
    found: dict[str, Any] = trainer.optimizers[0].state[module.left.weight]
    return found


def swap(trainer: pl.Trainer, module: Net) -> None:
    kept = module.left.weight.clone()
    module.left.weight.copy_(module.right.weight)
    module.right.weight.copy_(kept)


def permute_rows(trainer: pl.Trainer, module: Net) -> None:
    module.right.weight.copy_(module.right.weight[[1, 0, 2, 3]])


def set_lr(trainer: pl.Trainer, module: Net) -> None:
    trainer.optimizers[0].param_groups[1]["lr"] *= 2


def step_scheduler(trainer: pl.Trainer, module: Net) -> None:
    trainer.lr_scheduler_configs[0].scheduler.last_epoch -= 1


def reset_average(trainer: pl.Trainer, module: Net) -> None:
    average(trainer).weight.zero_()


def reset_count(trainer: pl.Trainer, module: Net) -> None:
    average(trainer).batches = 0


def average(trainer: pl.Trainer) -> Average:
    return next(callback for callback in trainer.callbacks if isinstance(callback, Average))  # type: ignore[attr-defined]


def set_scale(trainer: pl.Trainer, module: Net) -> None:
    scaler = trainer.precision_plugin.scaler
    scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0})


def skip_batch(trainer: pl.Trainer, module: Net) -> None:
    loader: Any = trainer.train_dataloader
    begin = loader.begin
    loader.begin = lambda indices: islice(begin(indices), 1, None)


def set_shuffle_seed(trainer: pl.Trainer, module: Net) -> None:
    loader: Any = trainer.train_dataloader
    begin = loader.begin

    def begin_with_another(indices: Any) -> Any:
        loader.sampler.seed = 7  # after it was set to what the checkpoint has
        return begin(indices)

    loader.begin = begin_with_another


def set_seen(trainer: pl.Trainer, module: Net) -> None:
    module.seen = 0


def count_back(trainer: pl.Trainer, module: Net) -> None:
    trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress.total.completed -= 1
    trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed -= 1


LOADED = "as loaded after step 4: "
NEXT = "step 5, at its start: "
FAULTS = {
    "a batch that is skipped": Fault(NEXT + "batch/batch on rank 0", skip_batch),
    "the seed of the shuffle": Fault(NEXT + "batch/batch on rank 0", set_shuffle_seed),
    "torch's random stream": Fault(
        NEXT + "random/torch on rank 0", lambda t, m: torch.manual_seed(1), "on_train_batch_start"
    ),
    "python's random stream": Fault(
        NEXT + "random/python on rank 0", lambda t, m: random.seed(1), "on_train_batch_start"
    ),
    "numpy's random stream": Fault(
        NEXT + "random/numpy on rank 0", lambda t, m: np.random.seed(1), "on_train_batch_start"
    ),
    "a generator of the module": Fault(LOADED + "module/noise", lambda t, m: m.noise.manual_seed(1)),
    "a momentum": Fault(
        LOADED + "optimizer/0/left.weight/exp_avg on", lambda t, m: first_optimizer_state(t, m)["exp_avg"].zero_()
    ),
    "a step of Adam": Fault(
        LOADED + "optimizer/0/left.weight/step", lambda t, m: first_optimizer_state(t, m)["step"].sub_(1)
    ),
    "a state that is not there": Fault(
        LOADED + "optimizer/0/left.weight/step on rank 0: expected float32 () with digest ",
        lambda t, m: t.optimizers[0].state.pop(m.left.weight),
    ),
    "the scheduler's step": Fault(LOADED + "schedulers/0/StepLR/last_epoch on rank 0: expected 4,", step_scheduler),
    "the lr of a group": Fault(LOADED + "param_groups/0/1/lr", set_lr),
    "a buffer": Fault(LOADED + "buffers/norm.running_mean", lambda t, m: m.norm.running_mean.zero_()),
    "a counter among the buffers": Fault(
        LOADED + "buffers/norm.num_batches_tracked", lambda t, m: m.norm.num_batches_tracked.zero_()
    ),
    "a metric": Fault(LOADED + "metrics/mean", lambda t, m: m.mean.reset()),
    "an average of the weights": Fault(LOADED + "callbacks/Average (0)/state_dict/weight", reset_average),
    "a callback's count": Fault(LOADED + "callbacks/Average (0)/state_dict/batches", reset_count),
    "an attribute of the module": Fault(LOADED + "module/seen on rank 0: expected 4,", set_seen),
    "precision of a weight": Fault(
        LOADED + "weights/left.weight", lambda t, m: m.left.weight.copy_(m.left.weight.bfloat16().float())
    ),
    "two tensors swapped": Fault(LOADED + "weights/left.weight", swap),
    "two rows permuted": Fault(LOADED + "weights/right.weight", permute_rows),
    "a sign": Fault(LOADED + "weights/head.bias", lambda t, m: m.head.bias.neg_()),
    "one bit of an element": Fault(
        LOADED + "weights/right.weight", lambda t, m: m.right.weight.view(torch.int32)[2, 1].bitwise_xor_(1)
    ),
    "a step in the count of steps": Fault(NEXT + "counters/global_step on rank 0: expected 4, found 3", count_back),
    "the loss scale": Fault(LOADED + "precision/scale on rank 0: expected 64.0, found 2.0", set_scale),
}


LOST_BY_LIGHTNING: dict[str, dict[str, Any]] = {
    "an accumulated gradient": {"accumulate_grad_batches": 3},
    "a mean over the epoch": {"epoch_mean": True},
}
"""What no checkpoint of Lightning has: options of runs that lose it at a resume."""


def run(folder: Path, first: int, last: int, fault: Fault | None = None, **options: Any) -> None:
    """Train under a plan; from the checkpoint in ``folder`` if the run does not begin with the first batch."""
    random.seed(first)  # a run that resumes begins with other random numbers and weights
    np.random.seed(first)
    torch.manual_seed(first)
    fault = fault or Fault("")
    name, epoch_mean = f"{first}-{last}", options.pop("epoch_mean", False)
    save_to = str(folder / "a.ckpt") if (first, last) == (0, MIDDLE) else None
    resume_from = str(folder / "a.ckpt") if first else None
    plan = RunPlan(str(folder / name), str(folder / "files"), str(folder / "saves"), first, last, save_to, resume_from)
    recorder = RunRecorder(plan, end=lambda: None)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=ShardedStrategy(),
        plugins=[ShardCkptIO(), MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", 64.0))],
        callbacks=[Average(), recorder, Plant(fault.hook, fault.change)],
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    data = DataLoader(Numbers(), 3, shuffle=True)
    net = Net(epoch_mean=epoch_mean)
    arguments: dict[str, Any] = {"model": net, "train_dataloaders": data}
    recorder.begin(trainer, arguments)
    trainer.fit(**arguments)


def compared(folder: Path) -> list[str]:
    """Return what differs between the straight run in a folder and the resumed one."""
    straight, resumed = (read_records(str(folder / name)) for name in (f"0-{STEPS}", f"{MIDDLE}-{STEPS}"))
    return [str(d) for d in compare_runs(straight, resumed, first=MIDDLE, last=STEPS).differences]


def found_faults(directory: str) -> dict[str, list[str]]:
    """Return by fault what was found; under the empty name, of a resume without one."""
    folder, found = Path(directory), {}
    run(folder, 0, STEPS)
    run(folder, 0, MIDDLE)
    for name, fault in {"": None, **FAULTS}.items():
        with warnings.catch_warnings(action="ignore" if fault else None):  # a resume notices some of them itself
            run(folder, MIDDLE, STEPS, fault)
        found[name] = compared(folder)
    for name, options in LOST_BY_LIGHTNING.items():
        for first, last in ((0, STEPS), (0, MIDDLE), (MIDDLE, STEPS)):
            run(folder / name, first, last, **options)
        found[name] = compared(folder / name)
    return found
