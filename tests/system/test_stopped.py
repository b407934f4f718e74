"""However a run ended, and whoever saved it then, it continues where it was. Oracle: the run that never stopped."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.support import tiny
from tests.support.pool import run_ranks


class Told(DummyLogger):
    """Keeps what is logged, with the step."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))


class Recorded(tiny.TinyLM):
    """Keeps which samples each step had, where, and when an epoch began."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[int, int, list[int], float]] = []
        self.begun: list[int] = []

    def on_train_epoch_start(self) -> None:
        self.begun.append(self.current_epoch)

    def training_step(self, batch: Any, index: int) -> Any:
        loss = super().training_step(batch, index)
        self.steps.append((self.current_epoch, index, batch[0][:, 0].tolist(), loss.item()))
        return loss


class Summed(pl.LightningModule):
    """Stops, fails, or begins to accumulate again after the second of four accumulated batches."""

    def __init__(self, after: str) -> None:
        super().__init__()
        self.layers, self._after = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), after

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        for layer in self.layers:
            batch = layer(batch)
        return batch.square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        if index == 5 and self._after == "fails":
            raise OSError("of mine")
        if index == 5 and self._after == "zeroes":
            self.zero_grad(set_to_none=False)
        self.trainer.should_stop = index == 5 and self._after == "stops"

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def accumulate(strategy: dict[str, Any], after: str) -> dict[str, Tensor | None]:
    """Return this rank's gradients after a run, by name; then call functions of the module that compute with them."""
    pl.seed_everything(1, verbose=False)
    module, ranks = Summed(after), int(os.environ["WORLD_SIZE"]) // strategy.get("pipeline_parallel_size", 1)
    rows: Any = torch.randn(64, 4)
    with suppress(OSError):
        tiny.trainer(strategy, max_epochs=1, accumulate_grad_batches=4).fit(
            module, DataLoader(rows, batch_size=8 // ranks)
        )
    own = {name: p for name, p in module.named_parameters() if not getattr(p, "is_elsewhere", False)}
    gradients = {name: None if p.grad is None else tiny.whole(p.grad) for name, p in own.items()}
    module.cpu()
    module.zero_grad(set_to_none=False)
    return gradients


REPLICAS = {"data_parallel_shard_size": 1, "data_parallel_replicate_size": 2}


@pytest.mark.parametrize(
    ("world", "strategy", "after"),
    [
        (2, {}, "zeroes"),
        (2, REPLICAS, "stops"),
        (4, REPLICAS | {"data_parallel_shard_size": 2}, "stops"),
        (4, REPLICAS | {"pipeline_parallel_size": 2}, "stops"),
        pytest.param(2, {}, "stops", marks=pytest.mark.sweep),
        pytest.param(2, REPLICAS, "zeroes", marks=pytest.mark.sweep),
        pytest.param(4, REPLICAS | {"data_parallel_shard_size": 2}, "zeroes", marks=pytest.mark.sweep),
        pytest.param(4, REPLICAS | {"pipeline_parallel_size": 2}, "zeroes", marks=pytest.mark.sweep),
    ],
)
def test_gradients_that_no_step_used_are_of_all_ranks(world: int, strategy: dict[str, Any], after: str) -> None:
    (expected,) = run_ranks(1, accumulate, {}, after)
    for found in run_ranks(world, accumulate, strategy, after):
        assert found
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name])  # sums in another order


def test_a_run_that_failed_leaves_no_gradients_of_one_rank() -> None:
    assert all({*found.values()} == {None} for found in run_ranks(2, accumulate, REPLICAS, "fails"))


class Stop(pl.Callback):
    """Tells the Trainer to stop after a step, or sends this process SIGTERM in it."""

    def __init__(self, step: int, *, by_signal: bool = False) -> None:
        self._step, self._by_signal = step, by_signal

    def on_before_backward(self, trainer: pl.Trainer, *args: Any) -> None:
        if self._by_signal and trainer.global_step == self._step - 1 and trainer.is_global_zero:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if not self._by_signal and trainer.global_step == self._step:
            trainer.should_stop = True


class OutOfTime(Timer):
    """A Timer whose time is up after a step."""

    def __init__(self, step: int) -> None:
        super().__init__(timedelta(days=1))
        self._step, self._at = step, 0

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        self._at = trainer.global_step
        super().on_train_batch_end(trainer, *args, **kwargs)

    def time_elapsed(self, stage: Any = "train") -> float:
        return timedelta(days=2).total_seconds() if self._at == self._step else 0.0

    def state_dict(self) -> dict[str, Any]:
        return {}


PER_EPOCH = 4  # batches
STEPS = 9


def ended(kind: str) -> tuple[dict[str, Any], list[pl.Callback]]:
    """How the first run is told to end: options and callbacks."""
    name, _, number = kind.partition("@")
    step = int(number or 0)
    if name == "max_steps":
        return {"max_steps": step}, []
    if name == "max_epochs":
        return {"max_epochs": step}, []
    if name == "max_time":
        return {}, [OutOfTime(step)]
    if name == "should_stop":
        return {}, [Stop(step)]
    assert name == "SIGTERM"
    return {}, [Stop(step, by_signal=True)]


def fit(data: dict[str, Any], resume: str | None = None, **options: Any) -> dict[str, Any]:
    pl.seed_everything(9 if resume else 1)
    module, logger = Recorded(), Told()
    run = tiny.trainer({}, logger=logger, **{"max_steps": -1, "max_epochs": 9, "limit_val_batches": 0} | options)
    held_out = tiny.loader(count=8, shuffle=False) if options.get("limit_val_batches") else None
    with suppress(SystemExit):
        run.fit(module, tiny.loader(count=2 * PER_EPOCH * run.world_size, **data), held_out, ckpt_path=resume)
    run.fit_loop.teardown()  # which Lightning does not do after an exception
    return {
        "run": run,
        "steps": module.steps,
        "begun": module.begun,
        "logged": logger.rows,
        "state": tiny.full_state(module, run.optimizers),
        "counted": (run.global_step, run.current_epoch),
        "lr": [group["lr"] for optimizer in run.optimizers for group in optimizer.param_groups],
    }


Row = tuple[str, str, dict[str, Any], dict[str, Any]]


def all_three(rows: list[Row], directory: str, steps: int = STEPS) -> list[list[dict[str, Any]]]:
    """Of every row: the run that never stops, the one that does, and what continues it.

    The first is the same run for all rows with the same loader and options.
    """
    found, straight = [], dict[str, dict[str, Any]]()
    for number, (kind, saver, data, options) in enumerate(rows):
        path, before = f"{directory}/{number}", options.get("before", {})
        options = {key: value for key, value in options.items() if key != "before"}
        limits, callbacks = ended(kind)
        key, rest = repr((data, options)), []
        if key not in straight:
            straight[key] = fit(data, max_steps=steps, **options)
            del straight[key]["run"]
        runs = [straight[key]]
        if saver == "epoch end":
            first, then = (ModelCheckpoint(path, name, save_on_train_epoch_end=True) for name in "ab")
            callbacks, rest, options = [*callbacks, first], [then], options | {"enable_checkpointing": True}
        runs.append(fit(data, callbacks=callbacks, **options | before | limits))
        if saver == "after":
            runs[-1]["run"].save_checkpoint(f"{path}/a.ckpt")
        runs.append(fit(data, f"{path}/a.ckpt", max_steps=steps, callbacks=rest, **options))
        for run in runs[1:]:
            del run["run"]
        found.append(runs)
    return found


def wrong(straight: dict[str, Any], first: dict[str, Any], rest: dict[str, Any]) -> list[str]:
    """What of the two runs is not what the one that never stopped had."""
    stop = len(first["steps"])
    expected = {"steps": straight["steps"][stop:], "counted": straight["counted"], "lr": straight["lr"]}
    found = [key for key, value in expected.items() if rest[key] != value]
    if first["steps"] != straight["steps"][:stop] or len(rest["steps"]) == len(straight["steps"]):
        found.append("the first run")
    if first["begun"] + rest["begun"] != straight["begun"]:
        found.append(f"epochs begun: {first['begun']} and {rest['begun']}, not {straight['begun']}")
    # After the last step, the first run may have validated because it was told to stop, or not yet because of SIGTERM.
    rows = [row for row in straight["logged"] if row[0] >= stop]
    if rest["logged"][-len(rows) :] != rows or any(step >= stop for step, _ in first["logged"]):
        found.append("logged")
    return found + tiny.differences(straight["state"], rest["state"])


EACH = {"limit_val_batches": 2, "val_check_interval": 2}
IN_WORKERS: dict[str, Any] = {"workers": 2}

# By the number of ranks: how the first run ended, who saved, loader, options of the Trainer ("before": of the first).
# One process draws the order from its random state, two have a DistributedSampler. Four batches an epoch.
ROWS: dict[int, list[Row]] = {
    1: [
        ("max_steps@2", "after", {}, {}),
        ("max_steps@5", "epoch end", IN_WORKERS, {}),
        ("SIGTERM@3", "after", {}, {}),
        ("should_stop@3", "epoch end", {}, EACH),
        ("max_epochs@2", "epoch end", IN_WORKERS, {}),
    ],
    2: [
        ("max_steps@2", "after", {}, EACH),
        ("max_time@5", "epoch end", {}, {}),
        ("SIGTERM@4", "after", {}, EACH),
    ],
}
FAST = {1: 2, 2: 1}
CASES = [
    pytest.param(world, n, id=f"{world}: {kind}, {saver}, {'workers' if data else 'no worker'}, {', '.join(options)}",
                 marks=[] if n < FAST[world] else [pytest.mark.slow])
    for world, rows in ROWS.items()
    for n, (kind, saver, data, options) in enumerate(rows)
]  # fmt: skip


@pytest.fixture(scope="module")
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Any]:
    """What each rank saw of all selected rows of so many ranks."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    params = [item.callspec.params for item in items if "number" in item.callspec.params]

    @cache
    def find(world: int) -> list[dict[int, list[dict[str, Any]]]]:
        numbers = sorted({p["number"] for p in params if p["world"] == world})
        rows, directory = [ROWS[world][n] for n in numbers], str(tmp_path_factory.mktemp("runs"))
        found = run_ranks(world, all_three, rows, directory, timeout_s=600)
        return [dict(zip(numbers, runs, strict=True)) for runs in found]

    return find


@pytest.mark.parametrize(("world", "number"), CASES)
def test_a_run_that_ended_continues_as_one_that_never_stopped(
    world: int, number: int, seen: Callable[[int], Any]
) -> None:
    for rank in seen(world):
        assert wrong(*rank[number]) == []


SHORTER: list[Row] = [
    ("max_steps@3", "after", {}, {"limit_train_batches": 2, "before": {"limit_train_batches": 4}}),
    ("max_epochs@1", "after", {}, {"before": {"limit_train_batches": 2}}),
]


def test_an_epoch_that_is_over_by_the_limit_of_either_run_is_followed_by_the_next_one(tmp_path: Path) -> None:
    """Oracle: the second epoch of the run that never stopped, whose DistributedSampler shuffles by the epoch."""
    for below, raised in run_ranks(2, all_three, SHORTER, str(tmp_path), 2 * PER_EPOCH):
        for (straight, _, rest), length in ((below, 2), (raised, 4)):
            where = [step[:3] for step in rest["steps"][:length]]
            assert where == [step[:3] for step in straight["steps"] if step[0] == 1]
            assert rest["begun"][0] == 1
