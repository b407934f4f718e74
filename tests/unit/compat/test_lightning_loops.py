"""What the fit loop keeps to itself still means what we take it for, on one process with Lightning's own strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader, IterableDataset

from lightning_shardckpt.compat import lightning_loops as compat
from tests.support.boring import Asks, batches, trainer
from tests.support.tiny import EXECUTES


def test_loaders_are_those_that_training_draws_from(tmp_path: Path) -> None:
    loader = batches(2)
    before = Asks("setup", lambda run: compat.train_loaders(run))
    during = Asks("on_train_start", lambda run: (compat.train_loaders(run), compat.cycles_loaders(run)))
    trainer(tmp_path, before, during).fit(BoringModel(), loader)
    assert before.found == [[]] and during.found == [([loader], True)]  # Lightning's default mode cycles


class Counts(DataLoader[Any]):
    """Counts its iterators, and draws a random number for each."""

    begun: ClassVar[list[int]] = []

    def __iter__(self) -> Any:
        self.begun.append(int(torch.rand(()) < 1))
        return super().__iter__()


def test_loaders_begin_when_they_are_told(tmp_path: Path) -> None:
    begun = Counts.begun
    count = Asks("on_train_start", lambda run: (begun.clear(), compat.begin_loaders(run), len(begun))[2])
    trainer(tmp_path, count).fit(BoringModel(), Counts(RandomDataset(32, 4)))
    assert count.found == [1]


class Unsized(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(torch.zeros(3, 32))


def test_batches_are_counted_when_they_are_drawn_one_ahead_where_there_is_no_length(tmp_path: Path) -> None:
    for loader, ahead in ((batches(3), 0), (DataLoader(Unsized()), 1)):
        drawn = Asks("on_train_batch_start", compat.batches_drawn)
        trainer(tmp_path, drawn, max_steps=4, limit_val_batches=0).fit(BoringModel(), loader)
        assert drawn.found == [(1, 1 + ahead), (1, 2 + ahead), (1, 3), (2, 1 + ahead)]


def test_an_evaluation_over_a_stream_knows_its_last_batch(tmp_path: Path) -> None:
    for loader, number, ends in ((batches(2), 2, None), (DataLoader(Unsized()), float("inf"), [False, False, True])):
        lengths = Asks("on_test_start", compat.batches_of_evaluation)
        asks = Asks("on_test_batch_start", compat.is_stream_at_end)
        trainer(tmp_path, lengths, asks).test(BoringModel(), loader, verbose=False)
        assert lengths.found == [[number]] and asks.found == (ends or [None, None])


def test_where_an_epoch_and_a_run_end(tmp_path: Path) -> None:
    asks = Asks("on_train_batch_end", lambda run: (compat.is_last_batch(run), compat.ends_within_epoch(run)))
    trainer(tmp_path, asks, max_steps=5, limit_val_batches=0).fit(BoringModel(), batches(3))
    assert asks.found == [(False, False), (False, False), (True, False), (False, False), (False, True)]


@pytest.mark.parametrize("length", [2, 3])
def test_the_end_of_an_epoch_is_seen_before_its_validation(length: int, tmp_path: Path) -> None:
    found, undone = list[Any](), list[Any]()

    def watch(run: pl.Trainer) -> None:
        undone.append(compat.watch_epoch_ends(run, lambda: found.append(compat.batches_begun(run)), bool))

    validations = Asks("on_validation_start", lambda _: found.append("validation"))
    run = trainer(tmp_path, Asks("on_train_start", watch), validations, max_steps=5)
    run.fit(BoringModel(), batches(2) if length == 2 else DataLoader(Unsized()))
    last = divmod(5, length)
    whole = [(epoch, length) for epoch in range(last[0])]
    assert found == [entry for end in whole for entry in (end, "validation", end)] + [last, last]
    undone.pop()()
    assert not {"on_advance_end"} & {*vars(run.fit_loop), *vars(run.fit_loop.epoch_loop)}


def test_a_step_can_be_taken_back_in_what_a_checkpoint_has_of_a_loop(tmp_path: Path) -> None:
    steps = Asks("on_train_batch_end", lambda run: run.fit_loop.state_dict())
    trainer(tmp_path, steps, max_steps=2).fit(BoringModel(), batches(4))
    before, after = (state["epoch_loop.state_dict"] for state in steps.found)
    assert after["_batches_that_stepped"] == before["_batches_that_stepped"] + 1
    compat.take_back_step(steps.found[1])
    assert after["_batches_that_stepped"] == before["_batches_that_stepped"]


def test_the_end_of_a_batch_can_be_wrapped_where_a_validation_is_foreseen(tmp_path: Path) -> None:
    found, undone = list[tuple[bool, bool]](), list[Any]()

    def watch(run: pl.Trainer) -> None:
        def around(fetcher: Any, original: compat.EndBatch) -> None:
            validates, before = compat.would_validate(run, fetcher), validations.found.copy()
            original()
            found.append((validates, validations.found != before))

        undone.append(compat.wrap_batch_end(run, around))

    validations = Asks("on_validation_start", lambda run: run.global_step)
    run = trainer(tmp_path, Asks("on_train_start", watch), validations, max_steps=4, val_check_interval=2)
    run.fit(BoringModel(), batches(4))
    assert found == [(False, False), (True, True)] * 2
    undone[0]()
    assert "on_advance_end" not in vars(run.fit_loop.epoch_loop)


def test_the_broadcast_before_every_batch_can_be_left_out(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    loop = run.fit_loop.epoch_loop
    assert "_broadcast_sigterm_tensor" in type(loop).advance.__code__.co_names  # what asks for it, on several ranks
    undo = compat.skip_sigterm_broadcast(run)
    assert "_broadcast_sigterm_tensor" in vars(loop)
    undo()
    assert "_broadcast_sigterm_tensor" not in vars(loop)
    undo()


class Fails(BoringModel):
    def __init__(self, step: str) -> None:
        super().__init__()
        self._step = step

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert self._step != "training" or batch_idx < 2
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        assert self._step != "validation" or batch_idx < 1
        return super().validation_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize("step", ["training", "validation"])
def test_what_an_exception_interrupted_is_seen_in_the_state_of_the_loop_and_goes_on(step: str, tmp_path: Path) -> None:
    path, options = tmp_path / "a.ckpt", {"limit_val_batches": 3, "max_epochs": 1, "max_steps": -1}
    run = trainer(tmp_path, **options)
    with pytest.raises(AssertionError):
        run.fit(Fails(step), batches(3), batches(3))
    run.save_checkpoint(path)
    state = run.fit_loop.state_dict()
    progress = state["epoch_loop.batch_progress"]
    is_begun = progress["current"]["processed"] < progress["current"]["ready"]
    assert (is_begun, compat.is_validation_interrupted(state)) == (step == "training", step == "validation")
    assert progress["is_last_batch"]
    trained, validated = (Asks(f"on_{name}_batch_start", lambda run: 1) for name in ("train", "validation"))
    go_on = Asks("on_train_start", lambda run: compat.continue_validation(run))
    # five batches of training, so that the validation is not due where the run goes on
    trainer(tmp_path, go_on, trained, validated, **options).fit(
        BoringModel(), batches(5), batches(3), ckpt_path=str(path), **EXECUTES
    )
    assert (len(trained.found), len(validated.found)) == ((3, 3) if step == "training" else (0, 2))


def test_a_run_begins_the_next_epoch_as_if_it_had_finished_the_last_one(tmp_path: Path) -> None:
    path, epochs = tmp_path / "a.ckpt", Asks("on_train_epoch_start", lambda run: run.current_epoch)
    save = Asks("on_train_epoch_end", lambda run: run.save_checkpoint(path))
    trainer(tmp_path, save, max_epochs=1, max_steps=-1, limit_val_batches=0).fit(BoringModel(), batches(3))

    go_on = Asks("on_train_start", lambda run: (Counts.begun.clear(), compat.begin_next_epoch(run, 1, ended=False)))
    steps = Asks("on_train_batch_start", lambda run: run.fit_loop.epoch_loop.batch_idx)
    options = {"max_steps": 6, "limit_val_batches": 0}
    run = trainer(tmp_path, go_on, epochs, steps, **options)
    run.fit(BoringModel(), Counts(RandomDataset(32, 3)), ckpt_path=str(path), **EXECUTES)
    assert epochs.found == [1] and steps.found == [0, 1, 2] and run.global_step == 6 and Counts.begun == [1]


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_a_validation_that_was_done_is_skipped_without_drawing_random_numbers(tmp_path: Path) -> None:
    path, states = tmp_path / "a.ckpt", list[torch.Tensor]()
    options = {"val_check_interval": 2, "limit_val_batches": 1, "max_epochs": 1, "max_steps": -1}
    save = Asks("on_validation_end", lambda run: run.save_checkpoint(path))
    trainer(tmp_path, save, **options | {"max_steps": 2}).fit(BoringModel(), batches(4), batches(1))

    def go_on(run: pl.Trainer) -> None:
        compat.continue_validation(run)
        states.append(torch.get_rng_state())

    first = Asks("on_train_batch_start", lambda run: states.append(torch.get_rng_state()))
    validated = Asks("on_validation_batch_start", lambda run: run.global_step)
    run = trainer(tmp_path, Asks("on_train_start", go_on), first, validated, **options)
    run.fit(BoringModel(), batches(4), Counts(RandomDataset(32, 1)), ckpt_path=str(path), **EXECUTES)
    assert validated.found == [4] and torch.equal(states[0], states[1])


def test_whether_optimizers_step(tmp_path: Path) -> None:
    asks = Asks("on_train_batch_end", compat.is_accumulating)
    trainer(tmp_path, asks, accumulate_grad_batches=2).fit(BoringModel(), batches(4))
    assert asks.found == [True, False, True, False]
