"""Wrong paths, damaged files, other models, failing ranks: one clear error on every rank, and nothing is lost."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_shardckpt.header import checksum
from tests import tiny
from tests.pool import run_ranks

WORLD = 2


def save(path: str) -> dict[str, Any]:
    return tiny.fit({}, 2, save=path)["state"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("saved") / "a.ckpt")
    run_ranks(WORLD, save, path)
    return path


def try_to_load(path: str, model: dict[str, Any] | None = None) -> tuple[str, str, list[str]]:
    """Class and message of the error, and what changed in the model."""
    pl.seed_everything(3)
    module, run = tiny.TinyLM(**(model or {})), tiny.trainer({}, max_steps=4, limit_val_batches=0)
    before: dict[str, Any] = {}
    run.strategy._attached_io = _remember(run.strategy._attached_io, module, before)  # type: ignore[attr-defined]
    try:
        run.fit(module, tiny.loader(), ckpt_path=path)
    except Exception as error:
        return type(error).__name__, str(error), tiny.differences(before, tiny.full_state(module, []))
    return "", "no error", []


def _remember(original: Callable[[], Any], module: Any, before: dict[str, Any]) -> Callable[[], Any]:
    def wrapped() -> Any:
        before.update(tiny.full_state(module, []))
        return original()

    return wrapped


def load_fails(path: str, kind: str, *words: str, model: dict[str, Any] | None = None) -> None:
    for rank, (found, message, changed) in enumerate(run_ranks(WORLD, try_to_load, path, model, timeout_s=60)):
        assert found == kind, f"rank {rank}: {found}: {message}"
        assert [word for word in words if word not in message] == [], f"rank {rank}: {message}"
        assert changed == []


def test_path_that_is_no_checkpoint(tmp_path: Path, saved: str) -> None:
    load_fails(str(tmp_path / "nothing.ckpt"), "CheckpointNotFoundError", "nothing.ckpt")
    (tmp_path / "empty.ckpt").mkdir()
    load_fails(str(tmp_path / "empty.ckpt"), "CheckpointNotFoundError", "not a complete checkpoint")
    load_fails(os.path.dirname(saved), "CheckpointNotFoundError", f"did you mean {saved!r}")
    (tmp_path / "dcp.ckpt").mkdir()
    (tmp_path / "dcp.ckpt" / ".metadata").touch()
    load_fails(str(tmp_path / "dcp.ckpt"), "FormatError", "dcp.ckpt", ".metadata")


def damaged(saved: str, directory: Path) -> Path:
    target = directory / "a.ckpt"
    shutil.copytree(saved, target)
    return target


def flip(file: Path, position: int) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 0x10
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model-dist-00001-shard-00001.safetensors", ("rank 1", "written by rank 1")),
        ("optimizer-dist-00000-shard-00001.safetensors", ("written by rank 0",)),
        ("optimizer-meta-dist-00001.index.json", ()),
        ("optimizer-state-dist-00000.json", ()),
        ("trainer-state.json", ()),
        ("checkpoint.index.json", ("damaged",)),
    ],
)
def test_flipped_bit_is_an_error_that_names_the_file(saved: str, tmp_path: Path, name: str, words: Any) -> None:
    target = damaged(saved, tmp_path)
    flip(target / name, (target / name).stat().st_size - 9)
    load_fails(str(target), "CorruptionError", name, *words[1:])


def test_truncated_missing_and_foreign_shard_files(saved: str, tmp_path: Path) -> None:
    name = "model-dist-00000-shard-00001.safetensors"
    target = damaged(saved, tmp_path)
    with (target / name).open("r+b") as file:
        file.truncate(100)
    load_fails(str(target), "CorruptionError", name, "100 bytes, expected")
    (target / name).unlink()
    load_fails(str(target), "CorruptionError", name, "missing")
    other = str(tmp_path / "other.ckpt")
    run_ranks(WORLD, save, other)
    shutil.copy(Path(other) / name, target / name)
    load_fails(str(target), "CorruptionError", name, "another save")


def resealed(index: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Edit the root index as someone would who knows the format."""
    root = json.loads(index.read_text())
    del root["checksum"]
    change(root)
    body = json.dumps(root).encode()[1:]
    index.write_bytes(b'{"checksum":"' + checksum(body).encode() + b'",\n' + body)


def test_gap_in_an_edited_index_is_an_error_and_never_filled_with_zeros(saved: str, tmp_path: Path) -> None:
    target = damaged(saved, tmp_path)

    def drop_a_holder(root: dict[str, Any]) -> None:
        for layout in root["layouts"]:
            layout["holders"] = [[0, 1]]

    resealed(target / "checkpoint.index.json", drop_a_holder)
    load_fails(str(target), "FormatError", "do not tile it", "of 'gate'", "(1, 0)..(2, 16)")


def test_newer_format_version_is_refused(saved: str, tmp_path: Path) -> None:
    target = damaged(saved, tmp_path)
    resealed(target / "checkpoint.index.json", lambda root: root.update(version=99))
    load_fails(str(target), "FormatError", "version 99", "newer lightning-shardckpt")


class Wider(tiny.TinyLM):
    def _build(self) -> None:
        super()._build()
        self.head = torch.nn.Linear(16, tiny.VOCABULARY + 1)
        self.blocks.append(tiny.Block())
        self.mean = self.mean.float()


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
        assert "mean  dtype F64 in checkpoint, F32 in model" in error[1]
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


def save_twice(first: str, second: str) -> list[tuple[str, str]]:
    """A good save, then one that fails; then again a good one."""
    run = tiny.trainer({}, max_steps=1, limit_val_batches=0)
    run.fit(tiny.TinyLM(), tiny.loader())
    run.save_checkpoint(first)
    errors = []
    try:
        run.save_checkpoint(second)
    except Exception as error:
        errors.append((type(error).__name__, str(error)))
    run.save_checkpoint(first)
    return errors


def test_file_or_foreign_directory_in_the_way_is_kept_and_named_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file.ckpt").write_text("precious")
    (tmp_path / "mine.ckpt").mkdir()
    (tmp_path / "mine.ckpt" / "thesis.txt").write_text("precious")
    for name in ("file.ckpt", "mine.ckpt"):
        found = run_ranks(WORLD, save_twice, str(tmp_path / "good.ckpt"), str(tmp_path / name))
        for ((kind, message),) in found:
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


def test_topology_that_does_not_divide_the_world() -> None:
    for found in run_ranks(3, fit_on, {"tensor_parallel_size": 2, "tensor_parallel_plan": tiny.TP_PLAN}):
        assert found[0] == "TopologyError" and "3" in found[1] and "2" in found[1]


def test_tensor_parallel_plan_that_matches_nothing() -> None:
    for found in run_ranks(2, fit_on, {"tensor_parallel_size": 2, "tensor_parallel_plan": {"blocks.*.upp": "colwise"}}):
        assert found[0] == "TopologyError" and "blocks.*.upp" in found[1]


def fit_on(strategy: dict[str, Any]) -> tuple[str, str]:
    try:
        tiny.fit(strategy, 1)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""
