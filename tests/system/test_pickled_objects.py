"""Objects of any class are kept where the user asks for it twice: when saving, and when loading."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist

from lightning_shardckpt import ShardCkptIO, load, load_from_checkpoint
from lightning_shardckpt.consolidate import consolidate
from lightning_shardckpt.errors import StateError
from lightning_shardckpt.tools.verify import verify
from tests.support import tiny
from tests.support.boring import Encoder, Encodes, Keeps, Trap
from tests.support.pool import run_each, run_ranks

CALLBACK, ADDED = Encoder("c"), Encoder("added")


def trainer(callback: Keeps, pickles: bool = True, **options: Any) -> pl.Trainer:
    options = tiny.QUIET | {"limit_val_batches": 1, "max_steps": 1} | options
    plugins: list[Any] = [ShardCkptIO(pickle_objects=pickles)]
    return pl.Trainer(
        devices=dist.get_world_size(), strategy="sharded", plugins=plugins, callbacks=[callback], **options
    )


def save(path: str, value: Any, added: Any) -> None:
    module = Encodes(Encoder("a", "b"))
    module.added = added
    run = trainer(Keeps(value))
    run.fit(module)
    run.save_checkpoint(path)


def resumed(path: str, call: str, weights_only: bool | None) -> Any:
    """Collective: every rank must call it. Returns what callback and module have got, or the error."""
    module, callback = Encodes(Encoder("other")), Keeps()
    run = trainer(callback, max_steps=2)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            getattr(run, call)(module, ckpt_path=path, weights_only=weights_only)
    except StateError as error:
        return str(error)
    return callback.value, module.added


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two ranks."""
    path = tmp_path_factory.mktemp("pickled") / "sharded"
    run_ranks(2, save, str(path), CALLBACK, ADDED)
    return path


def test_a_trainer_gets_them_with_weights_only_false_and_else_is_told(saved: Path) -> None:
    ways = [("fit", None), ("validate", None), ("fit", False)]
    found = run_each({way: (2, resumed, str(saved), *way) for way in ways})
    assert found["fit", False] == [(CALLBACK, ADDED)] * 2
    for said in (*found["fit", None], *found["validate", None]):
        for part in ("callbacks/Keeps/value  tests.support.boring.Encoder", "added/0  ", "weights_only=False"):
            assert part in said


def test_a_module_is_constructed_with_them_or_the_error_says_what_to_pass(saved: Path, tmp_path: Path) -> None:
    path = str(saved)
    module = load_from_checkpoint(Encodes, path, weights_only=False)
    assert module.hparams["encoder"] == Encoder("a", "b") and module.added == ADDED
    with pytest.raises(StateError, match="load it with weights_only=False"):
        load_from_checkpoint(Encodes, path)
    run_ranks(1, save, str(tmp_path / "a"), 1, None)
    with pytest.raises(StateError, match=r"encoder  .*\n.*encoder=….*pickled .*weights_only=False"):
        load_from_checkpoint(Encodes, tmp_path / "a")
    assert load_from_checkpoint(Encodes, tmp_path / "a", encoder=Encoder("mine")).hparams["encoder"] == Encoder("mine")


def test_functions_and_tools_read_none_unless_they_are_told_to(
    saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = saved
    assert load(path, weights_only=False)["added"] == [ADDED]
    with pytest.raises(StateError, match="weights_only=False"):
        load(path)
    assert verify(path).findings == ()
    file = consolidate(path, tmp_path / "file.ckpt")
    assert "added/0: left out, <not loaded: tests.support.boring.Encoder" in caplog.text
    found = torch.load(file, weights_only=True)
    assert found["added"] == [None] and "encoder" not in found["hyper_parameters"]


def save_trap(path: str, trap: str) -> None:
    save(path, Trap(trap), None)


def test_nothing_is_executed_without_consent(tmp_path: Path) -> None:
    trap = tmp_path / "trapped"
    run_ranks(1, save_trap, str(tmp_path / "a"), str(trap))
    for found in run_ranks(1, resumed, str(tmp_path / "a"), "fit", None):
        assert "weights_only=False" in found
    for attempt in (lambda: load(tmp_path / "a"), lambda: load_from_checkpoint(Encodes, tmp_path / "a")):
        with pytest.raises(StateError):
            attempt()
    consolidate(tmp_path / "a", tmp_path / "file.ckpt")
    verify(tmp_path / "a")
    assert not trap.exists()
    run_ranks(1, resumed, str(tmp_path / "a"), "fit", False)
    assert trap.exists()


def refused(folder: str) -> list[str]:
    """Collective: every rank must call it. Returns the errors of saves of what can't be kept."""
    said = []
    for pickles, make in (
        (False, lambda p: Encoder()),
        (True, lambda p: lambda: 1),
        (True, lambda p: Encoder(inside=p)),
    ):
        callback, module = Keeps(), Encodes(Encoder())
        run = trainer(callback, pickles=pickles)
        run.fit(module)
        callback.value = make(module.layer.weight)
        try:
            run.save_checkpoint(f"{folder}/{len(said)}")
        except StateError as error:
            said.append(str(error))
    return said


def test_what_cannot_be_pickled_and_sharded_tensors_are_refused(tmp_path: Path) -> None:
    for said in run_ranks(2, refused, str(tmp_path)):
        assert ["callbacks/Keeps/value: " in text for text in said] == [True] * 3
        assert ["pickle_objects=True" in text for text in said] == [True, False, False]
