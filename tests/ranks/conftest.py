"""The checkpoint that tests look at which need no other one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support import zoo
from tests.support.pool import run_ranks


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 4 ranks, with rows, columns and both; tests must not change it."""
    path = tmp_path_factory.mktemp("saved") / "zoo.ckpt"
    run_ranks(4, zoo.save, str(path))
    return path


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "zoo.ckpt"))
