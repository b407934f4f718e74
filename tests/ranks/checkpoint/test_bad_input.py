"""Wrong paths, damaged files, other models, failing ranks: one clear error on every rank, and nothing is lost."""

from __future__ import annotations

import enum
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_shardckpt import ShardCkptIO
from lightning_shardckpt.errors import StateError
from tests.support import tiny
from tests.support.pool import run_ranks

WORLD = 2


def save(path: str) -> dict[str, Any]:
    return tiny.fit({}, 2, save=path)["state"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("saved") / "a.ckpt")
    run_ranks(WORLD, save, path)
    return path


def try_to_load(path: str) -> tuple[str, str, list[str]]:
    """Class and message of the error, and what changed in the model."""
    pl.seed_everything(3)
    module = tiny.TinyLM()
    io = RemembersBefore(module)
    run = tiny.trainer({}, max_steps=4, limit_val_batches=0, plugins=[io])
    try:
        run.fit(module, tiny.loader(), ckpt_path=path)
    except Exception as error:
        return type(error).__name__, str(error), tiny.differences(io.before, tiny.full_state(module, []))
    return "", "no error", []


class RemembersBefore(ShardCkptIO):
    """Notes what a module has before something is loaded into it."""

    def __init__(self, module: tiny.TinyLM) -> None:
        super().__init__()
        self._module, self.before = module, dict[str, Any]()

    def load_into(self, *args: Any, **kwargs: Any) -> Any:
        self.before.update(tiny.full_state(self._module, []))
        return super().load_into(*args, **kwargs)


def try_each(paths: list[str]) -> list[tuple[str, str, list[str]]]:
    return [try_to_load(path) for path in paths]


def assert_refused(found: tuple[str, str, list[str]], kind: str, *words: str, is_kept: bool = True) -> None:
    """In one way on every rank, with the model as it was, if ``is_kept``."""
    got, message, changed = found
    assert got == kind, f"{got}: {message}"
    assert [word for word in words if word not in message] == [], message
    assert changed == [] or not is_kept


def test_path_that_is_no_checkpoint(tmp_path: Path, saved: str) -> None:
    expected = {
        str(tmp_path / "nothing.ckpt"): ("CheckpointNotFoundError", "nothing.ckpt"),
        str(tmp_path / "empty.ckpt"): ("CheckpointNotFoundError", "not a complete checkpoint"),
        os.path.dirname(saved): ("CheckpointNotFoundError", f"did you mean {saved!r}"),
        str(tmp_path / "dcp.ckpt"): ("FormatError", "dcp.ckpt", ".metadata"),
    }
    (tmp_path / "empty.ckpt").mkdir()
    (tmp_path / "dcp.ckpt").mkdir()
    (tmp_path / "dcp.ckpt" / ".metadata").touch()
    for rank in run_ranks(WORLD, try_each, list(expected)):
        for found, (kind, *words) in zip(rank, expected.values(), strict=True):
            assert_refused(found, kind, *words)


# ── damage: a change of a checkpoint, and the error that it must be ───────────────────────────────────────────────

SHARD, OTHER = (f"model-dist-0000{rank}-shard-00001.safetensors" for rank in range(2))


class Wider(tiny.TinyLM):
    def _build(self) -> None:
        super()._build()
        self.head = torch.nn.Linear(16, tiny.VOCABULARY + 1)
        self.blocks.append(tiny.Block())
        self.mean = self.mean.long()


def load_other_model(path: str, strict: bool) -> Any:
    pl.seed_everything(3)
    module, run = Wider(), tiny.trainer({}, max_steps=2, limit_val_batches=0)
    module.strict_loading = strict
    (error,) = [None]
    try:
        if strict:
            run.fit(module, tiny.loader(), ckpt_path=path)
        else:
            with pytest.warns(UserWarning, match="differences") if run.is_global_zero else _nothing():
                run.validate(module, tiny.loader(shuffle=False), ckpt_path=path, verbose=False)
    except Exception as raised:
        error = (type(raised).__name__, str(raised))
    return error, tiny.full_state(module, [])


def _nothing() -> Any:
    from contextlib import nullcontext

    return nullcontext()


def test_all_differences_between_model_and_checkpoint_are_listed_at_once(saved: str) -> None:
    for error, _ in run_ranks(WORLD, load_other_model, saved, True):
        assert error is not None and error[0] == "MismatchError"
        assert "head.weight  shape (37, 16) in checkpoint, (38, 16) in model" in error[1]
        assert "mean  dtype F64 in checkpoint, I64 in model" in error[1]
        assert "blocks.2.norm.weight  in model only; the checkpoint has 'blocks." in error[1]
        assert "optimizer 0: blocks.2.norm.weight  in model only" in error[1]


def test_without_strict_loading_the_intersection_is_loaded_and_the_rest_reported(saved: str) -> None:
    expected = run_ranks(1, plain_state, saved)[0]
    for error, state in run_ranks(WORLD, load_other_model, saved, False):
        assert error is None
        different = tiny.differences(expected, {k: v for k, v in state.items() if k in expected})
        assert different == ["model/head.bias", "model/head.weight", "model/mean"]


def plain_state(path: str) -> dict[str, Any]:
    run, module = tiny.trainer({}), tiny.TinyLM()
    run.validate(module, tiny.loader(shuffle=False), ckpt_path=path, verbose=False)
    return tiny.full_state(module, [])


def save_between(first: str, others: list[str]) -> list[tuple[str, str]]:
    """A good save, then each one that fails, with a good one after it."""
    run = tiny.trainer({}, max_steps=1, limit_val_batches=0)
    run.fit(tiny.TinyLM(), tiny.loader())
    run.save_checkpoint(first)
    errors = []
    for path in others:
        try:
            run.save_checkpoint(path)
        except Exception as error:
            errors.append((type(error).__name__, str(error)))
        run.save_checkpoint(first)
    return errors


def test_file_or_foreign_directory_in_the_way_is_kept_and_named_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file.ckpt").write_text("precious")
    (tmp_path / "mine.ckpt").mkdir()
    (tmp_path / "mine.ckpt" / "thesis.txt").write_text("precious")
    names = ("file.ckpt", "mine.ckpt")
    for found in run_ranks(WORLD, save_between, str(tmp_path / "good.ckpt"), [str(tmp_path / name) for name in names]):
        for name, (kind, message) in zip(names, found, strict=True):
            assert kind == "FileExistsError" and name in message
    assert (tmp_path / "file.ckpt").read_text() == (tmp_path / "mine.ckpt" / "thesis.txt").read_text() == "precious"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file.ckpt", "good.ckpt", "mine.ckpt"]


class Unstorable(tiny.TinyLM):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.global_rank == 1:
            checkpoint["mine"] = {"cache": lambda: 0}


def save_unstorable(path: str) -> tuple[str, str]:
    run = tiny.trainer({}, max_steps=1, limit_val_batches=0)
    run.fit(Unstorable(), tiny.loader())
    with pytest.raises(Exception) as raised:
        run.save_checkpoint(path)
    return type(raised.value).__name__, str(raised.value)


def test_state_that_cannot_be_stored_on_one_rank_fails_the_save_on_all(tmp_path: Path) -> None:
    for kind, message in run_ranks(WORLD, save_unstorable, str(tmp_path / "a.ckpt")):
        assert kind == "StateError"
        assert "rank 1" in message and "mine/cache: builtins.function" in message
    assert list(tmp_path.iterdir()) == []


class Kind(enum.Enum):
    ONE = "one"


class Keyed(pl.Callback):
    """Counts, under a key that need not be a string."""

    def __init__(self, key: Any) -> None:
        self._key, self.count = key, 0

    @property
    def state_key(self) -> Any:
        return type(self) if self._key == "type" else self._key

    def on_train_batch_end(self, *args: Any) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def keyed(directory: str, strategy: str | dict[str, Any]) -> list[Any]:
    """The message of a save with such a key, or what the callback has when training is done."""
    found: list[Any] = []
    for number, key in enumerate(["type", Kind.ONE, 7, ("a", 1)]):
        path = f"{directory}/{number}.ckpt"
        run = tiny.trainer(strategy, max_epochs=1, limit_val_batches=0, callbacks=[Keyed(key)])
        run.fit(tiny.TinyLM(), tiny.loader(count=4))
        try:
            run.save_checkpoint(path)
        except StateError as error:
            found.append(str(error))
            continue
        then = Keyed(key)
        run = tiny.trainer(strategy, max_epochs=2, limit_val_batches=0, callbacks=[then])
        run.fit(tiny.TinyLM(), tiny.loader(count=4), ckpt_path=path)
        found.append(then.count)
    return found


@pytest.mark.parametrize("strategy", [{}, "auto"], ids=str)
def test_state_key_that_is_no_string_is_restored_or_refused(strategy: Any, tmp_path: Path) -> None:
    ((by_type, by_enum, *restored),) = run_ranks(1, keyed, str(tmp_path), strategy)
    assert "callbacks: builtins.type" in by_type and "callbacks: tests.ranks.checkpoint.test_bad_input.Kind" in by_enum
    assert restored == [4, 4]
