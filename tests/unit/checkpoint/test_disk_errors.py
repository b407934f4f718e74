"""Errors of full and read-only file systems name the directory and the space. Oracle: a file system of known size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import lightning_shardckpt as ckpt
from lightning_shardckpt.errors import StateError
from tests.unit.storage.test_storage import mounted, own_mounts, run

SAVE = """
import errno, os, sys
import torch
import lightning_shardckpt as ckpt
path = sys.argv[1]
ckpt.save(path, {"model": torch.nn.Linear(10, 10)})
before = sorted((name, open(os.path.join(path, name), "rb").read()) for name in os.listdir(path))
LIMIT
try:
    ckpt.save(path, {"model": torch.nn.Linear(1024, 1024, bias=False)}, overwrite=True)
except OSError as error:
    assert error.errno == EXPECTED, error
    assert repr(os.path.dirname(path)) in str(error) and "save to another directory" in str(error), error
    assert all(word in str(error) for word in WORDS), error
    after = sorted((name, open(os.path.join(path, name), "rb").read()) for name in os.listdir(path))
    assert after == before
    print("as it should be")
"""


def test_a_full_disk_names_the_space_that_is_needed(tmp_path: Path) -> None:
    words = "('4.00 MiB are needed by this rank', 'are free in')"  # 1024 x 1024 floats, and a header
    script = SAVE.replace("LIMIT", "").replace("EXPECTED", "errno.ENOSPC").replace("WORDS", words)
    run(mounted(script, "-osize=2m"), str(tmp_path), *own_mounts())


def test_a_read_only_file_system_is_named(tmp_path: Path) -> None:
    limit = "import subprocess; subprocess.run(['mount', '-o', 'remount,ro', os.path.dirname(path)], check=True)"
    script = SAVE.replace("LIMIT", limit).replace("EXPECTED", "errno.EROFS").replace("WORDS", "('is read-only',)")
    run(mounted(script, "-osize=8m"), str(tmp_path), *own_mounts())


@pytest.mark.parametrize("protocol", ["http", "https"])
def test_a_url_of_the_web_is_refused_for_saves(protocol: str) -> None:
    with pytest.raises(ValueError, match="can be read, but not written: save to a path or to an object store"):
        ckpt.save(f"{protocol}://127.0.0.1:1/a.ckpt", {"model": nn.Linear(2, 2)})


def test_a_lazy_module_is_told_to_see_a_batch_first(tmp_path: Path) -> None:
    lazy = nn.LazyLinear(2)
    ckpt.save(tmp_path / "a", {"model": nn.Linear(4, 2)})
    for name, call in (("a", ckpt.load), ("b", ckpt.save)):
        with pytest.raises(StateError, match="model/weight: the lazy module has not seen a batch yet"):
            call(tmp_path / name, {"model": lazy})
    lazy(torch.ones(1, 4))
    ckpt.load(tmp_path / "a", {"model": lazy})
