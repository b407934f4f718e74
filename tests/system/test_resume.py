"""Training that was interrupted and resumed equals training that was not. Oracle: the uninterrupted run."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_shardckpt import Pipeline
from lightning_shardckpt.system.random_generators import preserve_rng
from tests.support import tiny
from tests.support.pool import run_each, run_ranks, selected

TP2 = {"tensor_parallel_size": 2, "tensor_parallel_plan": tiny.TP_PLAN}
PP2: dict[str, Any] = {"pipeline_parallel_size": 2}
PP2_1F1B: dict[str, Any] = {**PP2, "pipeline": Pipeline(schedule="1f1b", loss="microbatch")}  # of 2 microbatches


def all_straight_and_resumed(
    directory: str, runs: dict[str, tuple[Any, ...]]
) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    return {
        name: straight_and_resumed(strategy, f"{directory}/{name}", *rest) for name, (strategy, *rest) in runs.items()
    }


def straight_and_resumed(
    strategy: dict[str, Any], directory: str, steps: int, stop: int, model: dict[str, Any], data: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    saving = tiny.SaveAt(stop, f"{directory}/a.ckpt")
    straight = tiny.fit(strategy, steps, model=model, data=data, callbacks=[saving])
    resumed = tiny.fit(strategy, steps, resume=f"{directory}/a.ckpt", seed=99, model=model, data=data)
    return straight, resumed


# By the number of ranks: strategy, steps, where the run stops, model, data.
RUNS: dict[int, dict[str, tuple[Any, ...]]] = {
    4: {
        "fsdp2 x tp2, layers built in configure_model": (TP2, 4, 2, {"build_late": True}, {}),
        "pp2 x fsdp2 in the second epoch": (PP2, 6, 4, {"optimizer": "momentum"}, {"count": 12}),
        "pp2 x tp2": ({**PP2, **TP2}, 4, 2, {"build_late": True}, {"workers": 2}),
    },
    2: {
        "in the second epoch": ({}, 6, 4, {}, {"count": 12}),
        "at the end of an epoch": ({}, 5, 3, {}, {"count": 12}),
        "with worker processes": ({}, 4, 2, {}, {"workers": 2}),
        "pp2, 1f1b": (PP2_1F1B, 4, 2, {}, {}),
    },
    1: {"one process, random sampler": ({}, 6, 3, {"optimizer": "momentum"}, {"count": 20})},
}

SWEPT = ("pp2 x tp2", "at the end of an epoch", "with worker processes")  # test_stopped and one process have these

Seen = list[dict[str, tuple[dict[str, Any], dict[str, Any]]]]


@pytest.fixture(scope="module")
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Seen]:
    """What each rank saw of all selected runs on so many ranks, one after another in the same processes."""
    names = selected(request, "name")

    @cache
    def find(world: int) -> Seen:
        runs = {name: run for name, run in RUNS[world].items() if name in names}
        return run_ranks(world, all_straight_and_resumed, str(tmp_path_factory.mktemp("runs")), runs)

    return find


@pytest.mark.parametrize(
    ("world", "name"),
    [
        pytest.param(
            world, name, id=name, marks=[pytest.mark.slow] * (world == 4) + [pytest.mark.sweep] * (name in SWEPT)
        )
        for world in RUNS
        for name in RUNS[world]
    ],
)
def test_resumed_run_equals_the_uninterrupted_one(world: int, name: str, seen: Callable[[int], Seen]) -> None:
    _, steps, stop, *_ = RUNS[world][name]
    losses_per_step = 2 if "1f1b" in name else 1  # a step runs once for each microbatch
    for straight, resumed in (rank[name] for rank in seen(world)):
        assert len(straight["losses"]) == steps * losses_per_step
        assert resumed["losses"] == straight["losses"][stop * losses_per_step :]
        assert tiny.differences(straight["state"], resumed["state"]) == []
        assert (resumed["step"], resumed["lr"]) == (straight["step"], straight["lr"]) == (steps, straight["lr"])


class Draws(pl.Callback):
    """Draws from each generator before each batch; with ``seeds``, every rank first seeds them with its own number."""

    def __init__(self, *, seeds: bool) -> None:
        self._seeds, self.drawn = seeds, list[tuple[float, ...]]()

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self._seeds:
            pl.seed_everything(100 + trainer.global_rank)

    def on_train_batch_start(self, *args: Any) -> None:
        self.drawn.append((random.random(), np.random.random(), torch.rand(()).item()))


def drawn_straight_and_resumed(directory: str) -> tuple[list[tuple[float, ...]], list[tuple[float, ...]]]:
    straight, resumed = Draws(seeds=True), Draws(seeds=False)
    tiny.fit({}, 4, callbacks=[straight, tiny.SaveAt(2, f"{directory}/a.ckpt")])
    tiny.fit({}, 4, resume=f"{directory}/a.ckpt", seed=99, callbacks=[resumed])
    return straight.drawn, resumed.drawn


def test_each_rank_continues_with_its_own_random_numbers(tmp_path: Path) -> None:
    ranks = run_ranks(2, drawn_straight_and_resumed, str(tmp_path))
    for straight, resumed in ranks:
        assert resumed == straight[2:]
    assert not {*ranks[0][1]} & {*ranks[1][1]}


def with_and_without_saves(directory: str) -> tuple[dict[str, Any], dict[str, Any]]:
    saves = [tiny.SaveAt(step, f"{directory}/{step}.ckpt") for step in (1, 2, 3)]
    return tiny.fit({}, 4, callbacks=saves), tiny.fit({}, 4)


def test_saving_leaves_no_trace_in_training(tmp_path: Path) -> None:
    for saving, plain in run_ranks(2, with_and_without_saves, str(tmp_path)):
        assert saving["losses"] == plain["losses"]
        assert tiny.differences(saving["state"], plain["state"]) == []


class TwoLoaders(tiny.TinyLM):
    """Draws from two loaders, and validates in the middle of an epoch."""

    def training_step(self, batch: Any, index: int) -> Any:
        return super().training_step((torch.cat([part[0] for part in batch.values() if part is not None]),), index)


def with_loaders(kind: str, directory: str, resume: int = 0) -> tuple[list[float], dict[str, Any]]:
    """Train from the start and save at every stop; or train on from the checkpoint of one."""
    pl.seed_everything(9 if resume else 1)
    more: dict[str, Any] = {"use_distributed_sampler": False, "limit_val_batches": 0}
    module: tiny.TinyLM = tiny.TinyLM()
    data: Any = tiny.loader(count=12)
    held_out = None
    if kind == "persistent workers":
        data = tiny.loader(count=12, workers=1, persistent_workers=True)
    elif kind == "own generator":
        data = tiny.loader(count=12, generator=torch.Generator().manual_seed(5))
    elif kind in ("max_size_cycle", "min_size"):
        module = TwoLoaders()
        data = CombinedLoader({"long": tiny.loader(count=12), "short": tiny.loader(count=8)}, kind)
    elif kind == "augmentation":
        module = TwoLoaders()
        data = {name: DataLoader(Augmented(), batch_size=2, shuffle=True) for name in ("one", "other")}
    elif kind == "stateful beside":
        module = TwoLoaders()
        data = CombinedLoader({"stateful": Stateful(), "other": tiny.loader(count=12)}, "min_size")
    elif kind == "iterable":
        data = DataLoader(Stream(), batch_size=2)
    elif kind == "validation":
        held_out, more = tiny.loader(count=8, shuffle=False), more | {"limit_val_batches": 2, "val_check_interval": 3}
    saving = [] if resume else [tiny.SaveAt(stop, f"{directory}/{stop}.ckpt") for stop in stops(kind)]
    run = tiny.trainer({}, max_steps=10, callbacks=saving, **more)
    run.fit(module, data, held_out, ckpt_path=f"{directory}/{resume}.ckpt" if resume else None)
    return module.losses, tiny.full_state(module, run.optimizers)


Runs = dict[int, tuple[list[float], dict[str, Any]]]


def straight_with_loaders(directory: str) -> dict[str, Runs]:
    """Every kind of loader, from the start."""
    return {kind: {0: with_loaders(kind, f"{directory}/{kind}")} for kind in KINDS}


def resumed_with_loaders(directory: str) -> dict[str, Runs]:
    """Every kind of loader, from every stop."""
    return {kind: {stop: with_loaders(kind, f"{directory}/{kind}", stop) for stop in stops(kind)} for kind in KINDS}


def noise() -> torch.Tensor:
    """Return tokens of the process's random generators."""
    return torch.randint(tiny.VOCABULARY, (9,)) + random.randint(0, 1)


class Augmented(Dataset[Any]):
    """Draws each sample anew, as random augmentation does."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return (noise() // 2,)


class Stateful:
    """Six batches from the generators of the process, and its own position."""

    def __init__(self) -> None:
        self._begun = 0

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Any:
        begin, self._begun = self._begun, 0
        for self._begun in range(begin + 1, 7):
            yield ((noise() // 2)[None],)
        self._begun = 0

    def state_dict(self) -> dict[str, int]:
        return {"begun": self._begun}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._begun = state["begun"]


class Stream(IterableDataset[Any]):
    """Shuffles as it goes, with the generator of the process."""

    def __iter__(self) -> Any:
        for index in torch.randperm(12).tolist():
            yield (torch.full((9,), index),)


class BufferedStream(IterableDataset[Any]):
    """Draws samples from a buffer, from the process's generators or its own; or all when it begins; or changes them."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __iter__(self) -> Any:
        chosen = random if self._kind == "buffered" else random.Random(1)
        left = list(range(12))
        if self._kind == "shuffled":
            random.shuffle(left)
        while left:
            sample = torch.full((9,), left.pop(chosen.randrange(min(4, len(left)))))
            yield (noise() // 2 if self._kind == "augmented" else sample,)


KINDS = (
    "one",
    "persistent workers",
    "own generator",
    "max_size_cycle",
    "min_size",
    "augmentation",
    "stateful beside",
    "iterable",
    "validation",
)


def stops(kind: str) -> tuple[int, ...]:
    # not 6: Lightning does not run the validation that followed this save when it resumes
    return (4,) if kind == "validation" else (6, 7) if kind == "one" else (7,)


@pytest.fixture(scope="module")
def runs_with_loaders(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Runs], dict[str, Runs]]:
    """Straight and resumed runs, in a process each."""
    directory = str(tmp_path_factory.mktemp("loaders"))
    return run_ranks(1, straight_with_loaders, directory)[0], run_ranks(1, resumed_with_loaders, directory)[0]


@pytest.mark.parametrize(("kind", "stop"), [(kind, stop) for kind in KINDS for stop in stops(kind)])
def test_every_kind_of_loader_continues_with_the_batches_it_would_have_drawn(
    kind: str, stop: int, runs_with_loaders: tuple[dict[str, Runs], dict[str, Runs]]
) -> None:
    """With the random sampler of torch, whose order comes from the state of the process; six batches an epoch."""
    straight, continued = runs_with_loaders
    losses, state = straight[kind][0]
    resumed, state_resumed = continued[kind][stop]
    assert resumed == losses[stop:]
    assert tiny.differences(state, state_resumed) == []


class OneRate(tiny.TinyLM):
    """Without a scheduler of its own."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def averaging(directory: str, resume: bool) -> tuple[list[float], dict[str, Any]]:
    pl.seed_everything(9 if resume else 1)
    path, callbacks = f"{directory}/a.ckpt", [StochasticWeightAveraging(0.1, swa_epoch_start=2)]
    saving = [] if resume else [tiny.SaveAt(5, path)]
    run = tiny.trainer({}, max_epochs=4, callbacks=[*callbacks, *saving], limit_val_batches=0)
    run.fit(module := OneRate(), tiny.loader(count=6), ckpt_path=path if resume else None)
    return module.losses, tiny.full_state(module, run.optimizers)


def test_averaging_of_weights_goes_on_in_mid_epoch(tmp_path: Path) -> None:
    """From the second of three batches of its first epoch: with its learning rates, and the same average."""
    calls = {resume: (1, averaging, str(tmp_path), resume) for resume in (False, True)}
    ((losses, state),), ((resumed, state_resumed),) = run_each(calls).values()
    assert resumed == losses[5:]
    assert tiny.differences(state, state_resumed) == []


def next_numbers(path: str, resume: bool, batch_size: int) -> list[float]:
    """Return what the generators of torch, Python and NumPy draw after a save, in the run that saved or in the next."""
    pl.seed_everything(9 if resume else 1, workers=True)
    run = tiny.trainer({}, max_steps=4 if resume else 2, callbacks=[drawing := Drawing()], limit_val_batches=0)
    run.fit(tiny.TinyLM(), tiny.loader(batch_size=batch_size), ckpt_path=path if resume else None)
    if not resume:
        run.save_checkpoint(path)
        drawing.on_train_batch_start()
        return drawing.numbers[-3:]
    return drawing.numbers[:3]


class Drawing(pl.Callback):
    def __init__(self) -> None:
        self.numbers: list[float] = []

    def on_train_batch_start(self, *args: Any) -> None:
        with preserve_rng():
            self.numbers += [torch.rand(()).item(), random.random(), np.random.random()]


def test_added_ranks_draw_numbers_of_their_own_from_every_generator(tmp_path: Path) -> None:
    """The first ranks continue the streams of those that saved; augmentation of the others must not repeat theirs."""
    path = str(tmp_path / "a.ckpt")
    saved = run_ranks(2, next_numbers, path, False, 4)
    resumed = run_ranks(4, next_numbers, path, True, 2)
    assert resumed[:2] == saved
    for drawn in zip(*resumed, strict=True):  # of one generator
        assert len({*drawn}) == (3 if saved[0] == saved[1] else 4)


def at_the_end_of_validation(directory: str, resume: bool) -> tuple[list[float], dict[str, Any]]:
    pl.seed_everything(9 if resume else 1)
    keep = ModelCheckpoint(directory, monitor="val_loss", save_top_k=-1, filename="{step}")
    options = {"use_distributed_sampler": False, "val_check_interval": 0.5, "enable_checkpointing": True}
    run = tiny.trainer({}, max_epochs=2, callbacks=[keep], **options)
    path = f"{directory}/step=6.ckpt" if resume else None
    run.fit(module := tiny.TinyLM(), tiny.loader(count=12), tiny.loader(count=8, shuffle=False), ckpt_path=path)
    return module.losses, tiny.full_state(module, run.optimizers)


def test_checkpoint_of_the_validation_that_ends_an_epoch_continues_exactly(tmp_path: Path) -> None:
    calls = {resume: (1, at_the_end_of_validation, str(tmp_path), resume) for resume in (False, True)}
    ((losses, state),), ((resumed, state_resumed),) = run_each(calls).values()
    assert resumed == losses[6:]
    assert tiny.differences(state, state_resumed) == []


class Dropping(tiny.TinyLM):
    """Draws from a generator from which the stream draws, too."""

    def training_step(self, batch: Any, index: int) -> Any:
        random.random()
        return super().training_step(batch, index)


def warnings_of_buffers(directory: str) -> dict[str, list[str]]:
    """Return the warnings of the order of data, of runs that resume in mid-epoch, by the kind of the stream."""
    found = {}
    for kind in ("buffered", "augmented", "own generator", "shuffled"):
        path = f"{directory}/{kind}.ckpt"
        for steps in (3, 5):
            run = tiny.trainer({}, max_steps=steps, use_distributed_sampler=False, limit_val_batches=0)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                data = DataLoader(BufferedStream(kind), batch_size=2)
                run.fit(Dropping(), data, ckpt_path=path if steps == 5 else None)
            run.save_checkpoint(path, weights_only=False)
        found[kind] = [str(w.message) for w in caught if "order of its data" in str(w.message)]
    return found


def test_a_stream_whose_samples_depend_on_the_generators_of_steps_is_told(tmp_path: Path) -> None:
    (found,) = run_ranks(1, warnings_of_buffers, str(tmp_path))
    assert found["own generator"] == found["shuffled"] == []
    for kind in ("buffered", "augmented"):
        (warning,) = found[kind]
        assert "BufferedStream draws from the random generators of the training process" in warning


class Estimating(tiny.TinyLM):
    """Makes Lightning prepare the loaders before a checkpoint is loaded, as for OneCycleLR."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches > 0 and self.trainer.train_dataloader is not None
        return super().configure_optimizers()


def estimated(directory: str, stop: int, data: dict[str, Any]) -> list[Any]:
    """Return the losses after a step and the last state, of a run and of one that resumes from that step."""
    found = list[Any]()
    for resume in (False, True):
        pl.seed_everything(9 if resume else 1)
        saving = [] if resume else [tiny.SaveAt(stop, f"{directory}/a.ckpt")]
        run = tiny.trainer({}, max_epochs=3, limit_val_batches=0, callbacks=saving, use_distributed_sampler=False)
        path = f"{directory}/a.ckpt" if resume else None
        run.fit(module := Estimating(), tiny.loader(count=8, **data), ckpt_path=path)
        found += [module.losses[0 if resume else stop :], tiny.full_state(module, run.optimizers)]
    return found


@pytest.mark.parametrize(
    ("stop", "data"),
    [
        *((stop, {}) for stop in (2, 4)),  # in the middle of an epoch, and at its end
        (6, {"workers": 1, "persistent_workers": True}),
        *(pytest.param(stop, {"workers": 1}, marks=pytest.mark.sweep) for stop in (2, 4, 6)),
    ],
    ids=str,
)
def test_loaders_that_are_prepared_before_the_load_resume(stop: int, data: dict[str, Any], tmp_path: Path) -> None:
    ((losses, state, resumed, state_resumed),) = run_ranks(1, estimated, str(tmp_path), stop, data)
    assert len(losses) == 12 - stop and resumed == losses
    assert tiny.differences(state, state_resumed) == []


class Counted(IterableDataset[Any]):
    """A stream without a length, of so many batches of two; it keeps what it gave, over all epochs."""

    def __init__(self, batches: int) -> None:
        super().__init__()
        self._batches, self.given = batches, 0

    def __iter__(self) -> Any:
        for _ in range(2 * self._batches):
            self.given += 1
            yield (torch.full((9,), self.given % 37),)


def counted(directory: str, kind: type[tiny.TinyLM], stop: int) -> list[tuple[int, int]]:
    """How many samples a stream gave, and how many steps they made, in a run and in one that resumes."""
    found = []
    more: dict[str, Any] = {"use_distributed_sampler": False, "limit_val_batches": 0, "max_epochs": 9}
    for steps in (stop, 8):
        stream, path = Counted(4), f"{directory}/{stop}.ckpt"
        run = tiny.trainer({}, max_steps=steps, **more)
        run.fit(module := kind(), DataLoader(stream, batch_size=2), ckpt_path=path if steps == 8 else None)
        if steps == stop:
            run.save_checkpoint(path)
        found.append((stream.given, len(module.losses)))
    return found


def test_no_batch_of_a_stream_is_lost_by_a_resume(tmp_path: Path) -> None:
    """In the middle of an epoch the batches that were used are given again, and one is drawn ahead of its step."""
    expected = {4: [(8, 4), (8, 4)], 2: [(6, 2), (16, 6)]}  # at the end of an epoch, and in the middle
    runs = {(kind, stop): (1, counted, str(tmp_path / kind.__name__), kind, stop)
            for kind in (tiny.TinyLM, Estimating) for stop in expected}  # fmt: skip
    assert run_each(runs) == {(kind, stop): [expected[stop]] for kind, stop in runs}
