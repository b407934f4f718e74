"""A run that stopped goes on as if it had not: how it stopped × topology × loader, in one table and by one runner.

Oracle: the run that never stopped, of which the rest must repeat steps, samples, losses, rates, logs and state.
"""

from __future__ import annotations

import os
import random
import signal
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint, StochasticWeightAveraging, Timer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, Dataset, IterableDataset, SubsetRandomSampler

from lightning_shardckpt import Pipeline
from tests.support import tiny
from tests.support.pool import run_ranks, selected

PER_EPOCH, STEPS = 4, 9  # batches

# ── what runs ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Told(DummyLogger):  # keeps what is logged, with the step
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))


class Recorded(tiny.TinyLM):  # keeps which samples each step had, where, and its loss; and when an epoch began
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.steps: list[tuple[int, int, list[Any], float]] = []
        self.begun: list[tuple[int, int]] = []

    def on_train_epoch_start(self) -> None:
        self.begun.append((self.current_epoch, len(self.steps)))

    def training_step(self, batch: Any, index: int) -> Any:
        return super().training_step((torch.cat(_parts(batch)),), index)

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        samples = [part[:, 0].tolist() for part in _parts(batch)]
        self.steps.append((self.current_epoch, index, samples, float(outputs["loss"])))


def _parts(batch: Any) -> list[torch.Tensor]:
    return [part[0] for part in batch.values() if part is not None] if isinstance(batch, dict) else [batch[0]]


class OneRate(Recorded):  # without a scheduler of its own
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class PerEpoch(Recorded):  # with a scheduler that steps once an epoch
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2], 0.5)]


class Estimating(Recorded):  # makes Lightning prepare the loaders before a checkpoint is loaded, as for OneCycleLR
    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches > 0 and self.trainer.train_dataloader is not None
        return super().configure_optimizers()


def noise() -> torch.Tensor:
    """Return tokens of the process's random generators."""
    return torch.randint(tiny.VOCABULARY, (9,)) + random.randint(0, 1)


class Augmented(Dataset[Any]):  # draws each sample anew, as random augmentation does
    def __len__(self) -> int:
        return 2 * PER_EPOCH

    def __getitem__(self, index: int) -> Any:
        return (noise() // 2,)


class Corpus:  # reads on from where it is, in every epoch; its length is not known
    def __init__(self) -> None:
        self.place = {"read": 0}  # changed in place: a state of it must be copied

    def __iter__(self) -> Any:
        while True:
            self.place["read"] += 1
            yield (torch.full((2, 9), self.place["read"] % tiny.VOCABULARY),)
            if self.place["read"] % PER_EPOCH == 0:
                return

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class Continued(DataLoader[Any]):
    """Counts its batches, as torchdata's StatefulDataLoader does, and skips as many after ``load_state_dict``."""

    given, _skipped = 0, 0

    def __iter__(self) -> Any:
        for _ in range(1 + 2 * bool(self._skipped)):  # as torchdata, which begins with its sampler several times
            iter(self.sampler)
        batches: Any = super().__iter__()
        self.given, self._skipped = self._skipped, 0
        for _ in range(self.given):
            next(batches)
        return self._give(batches)

    def _give(self, batches: Any) -> Any:
        for batch in batches:
            self.given += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._skipped = state["given"]


def continued(count: int) -> Continued:
    """A loader whose order is drawn from a generator of its sampler's, seeded by the process."""
    generator = torch.Generator().manual_seed(int(torch.randint(1000, ())))
    sampler = SubsetRandomSampler(range(count), generator=generator)
    return Continued(tiny.loader(count=count).dataset, 2, sampler=sampler)


class Stream(IterableDataset[Any]):  # shuffles as it goes, with the generator of the process
    def __iter__(self) -> Any:
        for index in torch.randperm(2 * PER_EPOCH).tolist():
            yield (torch.full((9,), index),)


def data(kind: str, world: int) -> Any:
    """A loader of so many batches for each rank, in the order of a DistributedSampler or of the process's state."""

    def plain(**options: Any) -> Any:
        return tiny.loader(**{"count": 2 * PER_EPOCH * world, **options})

    kinds: dict[str, Callable[[], Any]] = {
        "shuffled": plain,
        "two workers": lambda: plain(workers=2),
        "persistent worker": lambda: plain(workers=1, persistent_workers=True),
        "own generator": lambda: plain(generator=torch.Generator().manual_seed(5)),
        "max_size_cycle": lambda: CombinedLoader({"long": plain(), "short": plain(count=4)}, "max_size_cycle"),
        "min_size": lambda: CombinedLoader({"long": plain(count=12), "short": plain()}, "min_size"),
        "augmentation": lambda: {n: DataLoader(Augmented(), batch_size=2, shuffle=True) for n in ("one", "other")},
        "iterable": lambda: DataLoader(Stream(), batch_size=2),
        "corpus": Corpus,
        "continued": lambda: continued(2 * PER_EPOCH * world),
        "both": lambda: CombinedLoader({"a": continued(2 * PER_EPOCH * world), "b": Corpus()}, "min_size"),
    }
    return kinds[kind]()


class Stop(pl.Callback):  # tells the Trainer to stop after a step, or sends this process SIGTERM in it
    def __init__(self, step: int, *, by_signal: bool = False) -> None:
        self._step, self._by_signal = step, by_signal

    def on_before_backward(self, trainer: pl.Trainer, *args: Any) -> None:
        if self._by_signal and trainer.global_step == self._step - 1 and trainer.is_global_zero:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if not self._by_signal and trainer.global_step == self._step:
            trainer.should_stop = True


class Fails(pl.Callback):  # raises in a step of training, or in a batch of validation of all that there were
    def __init__(self, number: int, *, validates: bool = False) -> None:
        self._number, self._validates, self._validated = number, validates, 0

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == self._number and not self._validates:
            raise OSError("a step")

    def on_validation_batch_start(self, *args: Any) -> None:
        self._validated += 1
        if self._validated == self._number + 1 and self._validates:
            raise OSError("a validation")


class Overflows(pl.Callback):
    """Makes the gradient infinite in some steps, so that the scale shrinks and the step is left out."""

    def on_after_backward(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        for parameter in module.parameters() if trainer.fit_loop.total_batch_idx in (1, 6) else ():
            if parameter.grad is not None:
                parameter.grad.mul_(float("inf"))


class OutOfTime(Timer):  # a Timer whose time is up after a step
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


# ── the table ───────────────────────────────────────────────────────────────────────────────────────────────────────

TP2 = {"tensor_parallel_size": 2, "tensor_parallel_plan": tiny.TP_PLAN}
PP2: dict[str, Any] = {"pipeline_parallel_size": 2}
TOPOLOGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "fsdp2": (2, {}),
    "pp2, 1f1b": (2, {**PP2, "pipeline": Pipeline(schedule="1f1b", loss="microbatch")}),
    "fsdp2 x tp2": (4, TP2),
    "pp2 x fsdp2": (4, PP2),
}
AVERAGES: dict[str, Callable[[], Any]] = {
    "StochasticWeightAveraging": lambda: StochasticWeightAveraging(0.1, swa_epoch_start=2),
    "EMAWeightAveraging": lambda: pl.callbacks.EMAWeightAveraging(decay=0.8, update_every_n_steps=1),
}
EACH = {"limit_val_batches": 2, "val_check_interval": 2}


class Row(NamedTuple):
    """A way to stop and to go on.

    ``stop``: how, and after how many steps, or batches of validation. "save" and "validation" are checkpoints of the
    run that never stops; others end with a save after them, by a ModelCheckpoint at the end of each epoch ("epoch
    end"), or by an OnExceptionCheckpoint. ``first``: options of the first run alone.
    """

    topology: str
    data: str
    stop: str
    options: dict[str, Any] = {}  # noqa: RUF012
    model: dict[str, Any] = {}  # noqa: RUF012
    kind: type[Recorded] = Recorded
    averages: str = ""
    scaled: bool = False
    first: dict[str, Any] = {}  # noqa: RUF012

    def __str__(self) -> str:
        kind = [] if self.kind is Recorded else [self.kind.__name__]
        more = [self.averages] * bool(self.averages) + ["scaled"] * self.scaled
        return ", ".join([self.topology, self.data, self.stop, *self.options, *self.model, *kind, *more])

    @property
    def same(self) -> str:
        """What rows have in common that share the run which never stops."""
        return repr(self._replace(stop="", first={}))


LATE, MOMENTUM = {"build_late": True}, {"optimizer": "momentum"}
OF_VALIDATIONS = {**EACH, "max_epochs": 2, "enable_checkpointing": True}
ROWS = [
    Row("one process", "shuffled", "max_steps@2, after"),
    Row("one process", "shuffled", "SIGTERM@3, after"),
    Row("one process", "shuffled", "save@6"),
    Row("one process", "shuffled", "save@3", model=MOMENTUM),
    Row("one process", "shuffled", "should_stop@3, epoch end", EACH),
    Row("one process", "shuffled", "validation@4", OF_VALIDATIONS),
    Row("one process", "shuffled", "save@6", {"max_epochs": 4}, kind=OneRate, averages="StochasticWeightAveraging"),
    Row("one process", "shuffled", "save@6", kind=PerEpoch),
    Row("one process", "shuffled", "save@8", kind=PerEpoch),
    Row("one process", "shuffled", "save@6", scaled=True),
    Row("one process", "shuffled", "error@3, on exception", EACH),
    Row("one process", "shuffled", "error@7, on exception", {**EACH, "max_epochs": 2}),
    Row("one process", "shuffled", "validation error@2, on exception", {"limit_val_batches": 2}),
    Row("one process", "shuffled", "validation error@4, on exception", EACH),
    Row("one process", "two workers", "max_steps@5, epoch end"),
    *(
        Row("one process", kind, "save@6")
        for kind in ("own generator", "max_size_cycle", "min_size", "augmentation", "iterable")
    ),
    Row("one process", "persistent worker", "save@6"),
    Row("one process", "persistent worker", "save@4"),
    Row("one process", "shuffled", "save@2", kind=Estimating),
    Row("fsdp2", "shuffled", "save@6"),
    Row("fsdp2", "shuffled", "SIGTERM@4, after", EACH),
    Row("fsdp2", "shuffled", "max_time@5, epoch end"),
    Row("fsdp2", "shuffled", "validation error@6, on exception", EACH),
    Row("one process", "corpus", "save@6"),
    Row("one process", "corpus", "error@5, on exception"),
    Row("one process", "continued", "save@3"),
    Row("one process", "continued", "max_steps@4, after"),
    Row("fsdp2", "both", "save@3"),
    Row("fsdp2", "both", "error@6, on exception"),
    Row("pp2, 1f1b", "shuffled", "save@2"),
    Row("pp2, 1f1b", "shuffled", "SIGTERM@3, after"),
    Row("fsdp2 x tp2", "shuffled", "save@2", model=LATE),
    Row("pp2 x fsdp2", "shuffled", "save@6", model=MOMENTUM),
]
if hasattr(pl.callbacks, "EMAWeightAveraging"):  # since Lightning 2.6
    ROWS += [Row("one process", "shuffled", f"save@{n}", kind=OneRate, averages="EMAWeightAveraging") for n in (4, 6)]
NAMED = {str(row): row for row in ROWS}


def fit(row: Row, directory: str, *, resume: str | None = None, callbacks: Any = (), **options: Any) -> dict[str, Any]:
    world, strategy = TOPOLOGIES[row.topology]
    pl.seed_everything(9 if resume else 1)
    module, logger, own = row.kind(**row.model), Told(), list[pl.Callback]()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    if row.averages:
        own.append(AVERAGES[row.averages]())
        warnings.filterwarnings("ignore", "You're using the WeightAveraging callback with a model that overrides")
    if row.scaled:
        own.append(Overflows())
        options["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler), tiny.ShardCkptIO()]
    if row.stop.startswith("validation@"):
        own.append(ModelCheckpoint(directory, monitor="val_loss", save_top_k=-1, filename="{step}"))
    options = {"max_steps": -1, "max_epochs": 9, "limit_val_batches": 0, **row.options, **options}
    if world == 1:
        options["use_distributed_sampler"] = False
    run = tiny.trainer(strategy, logger=logger, callbacks=[*own, *callbacks], **options)
    held_out = tiny.loader(count=8, shuffle=False) if options["limit_val_batches"] else None
    with suppress(SystemExit, OSError):
        run.fit(module, data(row.data, run.world_size), held_out, ckpt_path=resume)
    run.fit_loop.teardown()  # which Lightning does not do after an exception
    averages = [c._average_model for c in own if getattr(c, "_average_model", None) is not None]
    state = {f"average/{n}": tiny.whole(t) for average in averages for n, t in average.state_dict().items()}
    return {
        "run": run,
        "steps": module.steps,
        "begun": module.begun,
        "logged": logger.rows,
        "state": tiny.full_state(module, run.optimizers) | state | {"scale": scaler.get_scale()},
        "counted": (run.global_step, run.current_epoch),
        "lr": [group["lr"] for optimizer in run.optimizers for group in optimizer.param_groups],
    }


def stopped(row: Row, directory: str) -> dict[str, Any]:
    """The run that ends as the row says, with a checkpoint of its end or of an epoch's end at directory/a.ckpt."""
    how, _, saver = row.stop.partition(", ")
    name, _, number = how.partition("@")
    step = int(number)
    limits = {name: step} if name.startswith("max_") and name != "max_time" else {}
    ends = {
        "max_time": OutOfTime, "should_stop": Stop, "SIGTERM": lambda step: Stop(step, by_signal=True),
        "error": Fails, "validation error": lambda number: Fails(number, validates=True),
    }
    callbacks = [ends[name](step)] if name in ends else []  # type: ignore[operator]
    if saver == "epoch end":
        callbacks.append(ModelCheckpoint(directory, "a", save_on_train_epoch_end=True))
        limits["enable_checkpointing"] = True  # type: ignore[assignment]
    if saver == "on exception":
        callbacks.append(OnExceptionCheckpoint(directory, "a"))
        limits["enable_checkpointing"] = True  # type: ignore[assignment]
    found = fit(row, directory, callbacks=callbacks, **row.first | limits)
    if saver == "after":
        found["run"].save_checkpoint(f"{directory}/a.ckpt")
    return found


def run_rows(rows: list[Row], directory: str, steps: int = STEPS) -> list[tuple[Any, Any, Any]]:
    """Of every row: the run that never stops, the one that does unless it is the same, and what continues it."""
    found, straight = dict[int, tuple[Any, Any, Any]](), dict[str, dict[str, Any]]()
    for number, row in enumerate(rows):
        last = {} if "max_epochs" in row.options else {"max_steps": steps}
        where, path = f"{directory}/{number}", f"{directory}/{number}/a.ckpt"
        if row.same not in straight:
            alike = {n: other for n, other in enumerate(rows) if other.same == row.same}
            saves = {n: int(other.stop[5:]) for n, other in alike.items() if other.stop.startswith("save@")}
            saving = [tiny.SaveAt(step, f"{directory}/{n}/a.ckpt") for n, step in saves.items()]
            straight[row.same] = fit(row, where, callbacks=saving, **last)
        first, more = None, list[pl.Callback]()
        if row.stop.startswith("validation@"):
            path = f"{where}/step={row.stop[11:]}.ckpt"
        elif not row.stop.startswith("save@"):
            first = stopped(row, where)
        if row.stop.endswith("epoch end"):  # which the next run has, too
            more.append(ModelCheckpoint(where, "b", save_on_train_epoch_end=True))
            last = last | {"enable_checkpointing": True}
        found[number] = straight[row.same], first, fit(row, where, resume=path, callbacks=more, **last)
    for run in (run for runs in found.values() for run in runs if run is not None):
        run.pop("run", None)
    return list(found.values())


def wrong(row: Row, straight: dict[str, Any], first: dict[str, Any] | None, rest: dict[str, Any]) -> list[str]:
    """What of the two runs is not what the one that never stopped had."""
    stop = int(row.stop.partition(",")[0].partition("@")[2]) if first is None else len(first["steps"])
    expected = {key: straight[key] for key in ("counted", "lr")} | {"steps": straight["steps"][stop:]}
    found = [key for key, value in expected.items() if rest[key] != value]
    epochs = [epoch for epoch, begun in straight["begun"] if begun >= stop]
    if [epoch for epoch, _ in rest["begun"]] != epochs or not 0 < len(rest["steps"]) < len(straight["steps"]):
        found.append(f"epochs begun: {rest['begun']}, not {epochs}")
    # After the last step, the first run may have validated because it was told to stop, or not yet because of SIGTERM.
    rows = [told for told in straight["logged"] if told[0] >= stop]
    if rest["logged"][-len(rows) :] != rows:
        found.append("logged")
    if first is not None and first["steps"] != straight["steps"][:stop]:
        found.append("the first run")
    return found + tiny.differences(straight["state"], rest["state"])


@pytest.fixture(scope="module")
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[Any]]:
    """What each rank saw of all selected rows of so many ranks, which run in the same processes."""
    rows = [NAMED[name] for name in selected(request, "name")]

    @cache
    def find(world: int) -> list[dict[str, Any]]:
        chosen = [row for row in rows if TOPOLOGIES[row.topology][0] == world]
        ranks = run_ranks(world, run_rows, chosen, str(tmp_path_factory.mktemp("runs")), timeout_s=600)
        return [dict(zip(map(str, chosen), found, strict=True)) for found in ranks]

    return find


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (TOPOLOGIES[r.topology][0] == 4)) for n, r in NAMED.items()],
)
def test_a_run_that_stopped_goes_on_as_one_that_never_did(name: str, seen: Callable[[int], list[Any]]) -> None:
    row = NAMED[name]
    for rank in seen(TOPOLOGIES[row.topology][0]):
        assert wrong(row, *rank[name]) == []


def test_an_epoch_that_is_over_by_a_lower_limit_is_followed_by_the_next_one(tmp_path: Path) -> None:
    """Oracle: the second epoch of the run that never stopped, whose DistributedSampler shuffles by the epoch."""
    row = Row("fsdp2", "shuffled", "max_steps@3, after", {"limit_train_batches": 2}, first={"limit_train_batches": 4})
    for ((straight, _, rest),) in run_ranks(2, run_rows, [row], str(tmp_path), 2 * PER_EPOCH):
        where = [step[:3] for step in rest["steps"][:2]]
        assert where == [step[:3] for step in straight["steps"] if step[0] == 1]


# ── random numbers ──────────────────────────────────────────────────────────────────────────────────────────────────


class Draws(pl.Callback):
    """Draws from each generator before each batch; with ``seeds``, every rank first seeds them with its own number."""

    def __init__(self, *, seeds: bool) -> None:
        self._seeds, self.drawn = seeds, list[tuple[float, ...]]()

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self._seeds:
            pl.seed_everything(100 + trainer.global_rank)

    def on_train_batch_start(self, *args: Any) -> None:
        self.drawn.append((random.random(), np.random.random(), torch.rand(()).item()))


def drawn(path: str, steps: int, *, resume: bool) -> list[tuple[float, ...]]:
    """Train on global batches of 4; return what was drawn before each. The run that does not resume saves at step 2."""
    callbacks = [draws := Draws(seeds=not resume), *([] if resume else [tiny.SaveAt(2, path)])]
    data = {"batch_size": 4 // dist.get_world_size()}
    tiny.fit({}, steps, resume=path if resume else None, seed=99, data=data, callbacks=callbacks)
    return draws.drawn


def test_each_rank_continues_with_its_own_random_numbers(tmp_path: Path) -> None:
    """Ranks that were added draw numbers of their own; augmentation must not repeat that of others."""
    path = str(tmp_path / "a.ckpt")
    straight = run_ranks(2, drawn, path, 4, resume=False)
    assert run_ranks(2, drawn, path, 4, resume=True) == [rank[2:] for rank in straight]
    assert not {*straight[0]} & {*straight[1]}
    more = [rank[0] for rank in run_ranks(4, drawn, path, 3, resume=True)]
    assert more[:2] == [rank[2] for rank in straight]
    assert all(len({*numbers}) == 4 for numbers in zip(*more, strict=True))  # of each generator


def with_and_without_saves(directory: str) -> tuple[dict[str, Any], dict[str, Any]]:
    saves = [tiny.SaveAt(step, f"{directory}/{step}.ckpt") for step in (1, 2, 3)]
    return tiny.fit({}, 4, callbacks=saves), tiny.fit({}, 4)


def test_saving_leaves_no_trace_in_training(tmp_path: Path) -> None:
    for saving, plain in run_ranks(2, with_and_without_saves, str(tmp_path)):
        assert saving["losses"] == plain["losses"]
        assert tiny.differences(saving["state"], plain["state"]) == []


class NoisyCorpus(Corpus):
    def __iter__(self) -> Any:
        for (sample,) in super().__iter__():
            yield (sample // 2 + torch.randint(2, (9,)),)


def warnings_of_noise(path: str) -> list[str]:
    options: dict[str, Any] = {"limit_val_batches": 0, "max_epochs": 9}
    tiny.trainer({}, max_steps=3, callbacks=[tiny.SaveAt(2, path)], **options).fit(tiny.TinyLM(), NoisyCorpus())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tiny.trainer({}, max_steps=3, **options).fit(tiny.TinyLM(), NoisyCorpus(), ckpt_path=path)
    return [str(each.message) for each in caught if "samples" in str(each.message)]


def test_random_numbers_of_a_batch_that_was_drawn_ahead_are_drawn_anew_and_this_is_told(tmp_path: Path) -> None:
    (((said,)),) = run_ranks(1, warnings_of_noise, str(tmp_path / "a.ckpt"))
    assert "can't be continued exactly by NoisyCorpus" in said
