"""Paths, links, copies and modes: what file systems and their users do to checkpoints."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_shardckpt import load, save
from lightning_shardckpt.consolidate import consolidate


def put(path: str | Path, step: int = 1) -> None:
    save(path, {"w": torch.full((300,), step), "step": step}, overwrite=True)


def held(path: str | Path) -> int:
    found = load(path)
    assert found["w"].tolist() == [found["step"]] * 300
    return int(found["step"])


WRITTEN = ("{}/", "{}//", "file://{}", "file://{}/", "a.ckpt", "../{0.parent.name}/a.ckpt")


@pytest.mark.parametrize("as_written", WRITTEN)
def test_one_place_has_many_paths(as_written: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = as_written.format(tmp_path / "a.ckpt")
    for step in (1, 2):
        put(path, step)
        assert held(tmp_path / "a.ckpt") == held(path) == step and os.listdir(tmp_path) == ["a.ckpt"]


def test_a_link_into_another_directory_is_replaced_where_it_is(tmp_path: Path) -> None:
    put(tmp_path / "other" / "a.ckpt")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "a.ckpt").symlink_to("../other/a.ckpt")
    put(tmp_path / "runs" / "a.ckpt", 2)
    assert held(tmp_path / "other" / "a.ckpt") == 1 and held(tmp_path / "runs" / "a.ckpt") == 2


def moved(source: Path, target: Path) -> None:
    source.rename(target)


def copied(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)


@pytest.mark.parametrize("how", [moved, copied])
def test_a_checkpoint_can_be_moved_and_copied_and_is_one_like_any_other(how: Any, tmp_path: Path) -> None:
    put(tmp_path / "a.ckpt")
    path = tmp_path / "elsewhere" / "b.ckpt"
    path.parent.mkdir()
    how(tmp_path / "a.ckpt", path)
    assert held(path) == 1
    put(path.with_name("c.ckpt"))  # which cleans up beside it
    assert held(path) == 1
    put(path, 2)
    assert held(path) == 2 and sorted(os.listdir(path.parent)) == ["b.ckpt", "c.ckpt"]


@pytest.mark.parametrize("umask", [0o077, 0o002])
def test_all_modes_follow_the_umask(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        put(tmp_path / "deep" / "er" / "a.ckpt")
        consolidate(tmp_path / "deep" / "er" / "a.ckpt", tmp_path / "out" / "file")
    finally:
        os.umask(before)
    for path in tmp_path.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o777 if path.is_dir() else 0o666) & ~umask, path
