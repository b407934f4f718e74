"""Loaders with a state of their own go on after the batches that were used. Oracle: the run that never stopped."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, SubsetRandomSampler

from tests.support import tiny
from tests.support.pool import run_ranks

PER_EPOCH, STEPS = 6, 15


class Continued(DataLoader[Any]):
    """Counts its batches, as torchdata's StatefulDataLoader does, and skips as many after ``load_state_dict``."""

    given, _skipped = 0, 0

    def __iter__(self) -> Any:
        for _ in range(1 + 2 * bool(self._skipped)):  # as torchdata, which begins with its sampler several times
            iter(self.batch_sampler.sampler)  # type: ignore[union-attr]
        batches: Any = super().__iter__()
        self.given, self._skipped = self._skipped, 0
        for _ in range(self.given):
            next(batches)
        return self._give(batches)

    def _give(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self.given += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._skipped = state["given"]


class Corpus:
    """Reads on from where it is, in every epoch; its length is not known."""

    def __init__(self, fails_at: int = 0, noise: float = 0.0) -> None:
        self.place = {"read": 0}  # changed in place: whoever keeps a state must copy it
        self._noise = noise
        self._fails_at, self._rank = fails_at, int(os.environ["RANK"])

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            self.place["read"] += 1
            if self.place["read"] == self._fails_at:
                raise OSError("no more of it can be read now")
            sample = torch.full((2, 4), float(self.place["read"] + 100 * self._rank))
            yield sample + torch.rand(1) * self._noise if self._noise else sample
            if self.place["read"] % PER_EPOCH == 0:
                return

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


def data(kind: str, fails_at: int = 0) -> Any:
    """A loader; the order of the first kind is drawn from a generator of its sampler's, seeded by the process."""
    world = int(os.environ["WORLD_SIZE"])
    numbers = torch.arange(2.0 * PER_EPOCH * world).unsqueeze(1).expand(-1, 4).clone()
    if kind == "plain":
        return DataLoader(numbers, batch_size=2, shuffle=True)  # type: ignore[arg-type]
    if kind == "secretive":
        return Continued(numbers, batch_size=2, sampler=Secretive(len(numbers)))  # type: ignore[arg-type]
    if kind == "noisy corpus":
        return Corpus(noise=0.1)
    generator = torch.Generator().manual_seed(int(torch.randint(1000, ())))
    loader = Continued(numbers, batch_size=2, sampler=SubsetRandomSampler(range(len(numbers)), generator=generator))  # type: ignore[arg-type]
    if kind == "loader":
        return loader
    corpus = Corpus(fails_at)
    return corpus if kind == "corpus" else CombinedLoader({"loader": loader, "corpus": corpus}, "min_size")


class Net(pl.LightningModule):
    """Keeps the numbers of each step, and draws from the process in it."""

    def __init__(self, fails_at: int = 0) -> None:
        super().__init__()
        self.layers, self.steps, self._fails_at = nn.Linear(4, 4), list[Any](), fails_at

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step + 1 == self._fails_at:
            raise OSError("a step fails")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parts = batch if isinstance(batch, dict) else {"": batch}
        self.steps.append((self.current_epoch, batch_idx, {key: part[:, 0].tolist() for key, part in parts.items()}))
        loss: Tensor = nn.functional.dropout(self.layers(torch.cat([*parts.values()]) / 100)).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


def fit(kind: str, resume: str | None = None, net_fails: int = 0, data_fails: int = 0, **options: Any) -> Any:
    pl.seed_everything(9 if resume else 1)
    net, strategy = Net(net_fails), options.pop("strategy", {})
    trainer = tiny.trainer(strategy, **{"max_epochs": 9, "limit_val_batches": 0} | options)
    with suppress(OSError):
        trainer.fit(net, data(kind, data_fails), ckpt_path=resume)
    trainer.fit_loop.teardown()
    return trainer, net


WAYS = ("in an epoch", "at its end", "in the next", "after max_steps", "after max_epochs", "step fails", "data fail")
KINDS = {1: ("loader", "corpus"), 2: ("both",)}
"""Kinds of loaders, by the number of ranks."""


def first_part(kind: str, way: str, directory: str) -> str:
    """Train until something is saved; return its path."""
    path = f"{directory}/a.ckpt"
    if way in (stops := {"in an epoch": 4, "at its end": 6, "in the next": 9}):
        fit(kind, max_steps=10, callbacks=[tiny.SaveAt(stops[way], path)])
    elif way.startswith("after"):
        trainer, _ = fit(kind, **{"max_steps": 4} if way == "after max_steps" else {"max_epochs": 2})
        trainer.save_checkpoint(path)
    else:
        saving, path = OnExceptionCheckpoint(directory), f"{directory}/on_exception.ckpt"
        fails = {"net_fails": 5} if way == "step fails" else {"data_fails": 9}
        fit(kind, callbacks=[saving], enable_checkpointing=True, **fails)
    return path


def run_all(directory: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in KINDS[int(os.environ["WORLD_SIZE"])]:
        _, net = fit(kind, max_steps=STEPS)
        found[kind] = straight = (net.steps, tiny.full_state(net, []))
        for way in ways(kind):
            path = first_part(kind, way, f"{directory}/{kind}, {way}")
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                _, net = fit(kind, path, max_steps=STEPS)
            said = [str(each.message) for each in caught if "samples" in str(each.message)]
            same = tiny.differences(straight[1], tiny.full_state(net, [])) == []
            found[f"{kind}, {way}"] = net.steps, same, said
    return found


def ways(kind: str) -> list[str]:
    return [way for way in WAYS if way != "data fail" or kind != "loader"]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[dict[str, Any]]]:
    @cache
    def find(world: int) -> list[dict[str, Any]]:
        return run_ranks(world, run_all, str(tmp_path_factory.mktemp("runs")), timeout_s=300)

    return find


DONE = {"in an epoch": 4, "at its end": 6, "in the next": 9, "after max_steps": 4, "after max_epochs": 12}
DONE |= {"step fails": 4}


@pytest.mark.parametrize(
    ("world", "kind", "way"),
    [
        pytest.param(world, kind, way, marks=[pytest.mark.slow] * (world > 1))
        for world, kinds in KINDS.items()
        for kind in kinds
        for way in ways(kind)
    ],
)
def test_no_batch_is_lost_or_comes_twice(
    world: int, kind: str, way: str, seen: Callable[[int], list[dict[str, Any]]]
) -> None:
    for rank in seen(world):
        steps, same, said = rank[f"{kind}, {way}"]
        done = DONE.get(way, 7 if kind == "corpus" else 8)  # the ninth batch fails, which may be drawn ahead
        assert steps == rank[kind][0][done:]
        assert same and not said


def resume_noisy(directory: str) -> tuple[Any, Any, list[str]]:
    """Return the steps of a run that did not stop and of one that resumed, and its warnings."""
    _, straight = fit("noisy corpus", max_steps=8)
    path = first_part("noisy corpus", "in an epoch", directory)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, resumed = fit("noisy corpus", path, max_steps=8)
    return straight.steps, resumed.steps, [str(w.message) for w in caught if "samples" in str(w.message)]


def test_random_numbers_of_a_batch_that_was_drawn_ahead_are_drawn_anew_and_this_is_told(tmp_path: Path) -> None:
    ((straight, resumed, (said,)),) = run_ranks(1, resume_noisy, str(tmp_path))
    numbers = [[int(step[2][""][0]) for step in steps] for steps in (straight[4:], resumed)]
    assert numbers[0] == numbers[1] and straight[4:] != resumed  # the samples are the next ones, their noise is not
    assert "Corpus draws from the random generators of the training process" in said


class Secretive(Sampler[int]):
    """Draws from a generator that cannot be found."""

    def __init__(self, count: int) -> None:
        self._count, self._secret = count, random.Random(int(torch.randint(1000, ())))

    def __iter__(self) -> Iterator[int]:
        return iter(self._secret.sample(range(self._count), self._count))

    def __len__(self) -> int:
        return self._count


def save_each_kind(directory: str) -> None:
    for kind in ("loader", "corpus", "secretive"):
        fit(kind, max_steps=4, callbacks=[tiny.SaveAt(3, f"{directory}/{kind}.ckpt")])


def resume_otherwise(directory: str, loaders: dict[str, str]) -> dict[str, list[str]]:
    """Resume from the checkpoint of each kind of loader with another kind; return warnings about samples."""
    said = {}
    for saved, kind in loaders.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(kind, f"{directory}/{saved}.ckpt", max_steps=4)
        said[saved] = [str(each.message) for each in caught if "samples" in str(each.message)]
    return said


@pytest.mark.slow
def test_a_state_that_cannot_be_taken_is_told_by_the_name_of_the_loader(tmp_path: Path) -> None:
    run_ranks(2, save_each_kind, str(tmp_path))
    (alone,) = run_ranks(1, resume_otherwise, str(tmp_path), {"loader": "loader", "corpus": "corpus"})
    ((loader,), (corpus,)) = alone["loader"], alone["corpus"]
    assert "Continued has a state of its own" in loader and "Corpus has a state of its own" in corpus
    assert all("data-parallel ranks was 2, and is 1" in said and "begins anew" in said for said in (loader, corpus))
    two, _ = run_ranks(2, resume_otherwise, str(tmp_path), {"loader": "plain", "secretive": "secretive"})
    assert ["another kind of loader" in said for said in two["loader"]] == [True]
    assert ["Secretive drew another order" in said for said in two["secretive"]] == [True]
