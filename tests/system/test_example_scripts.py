"""The scripts in examples/, started as the documentation starts them; the oracle is a run on one process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from lightning_shardckpt import load_keys, metadata
from tests.support.pages import blocks, pages
from tests.support.pool import ROOT

pytestmark = pytest.mark.slow

ENV = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def python(*arguments: str | Path, folder: Path = ROOT) -> str:
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, env=ENV, cwd=folder, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


def side_by_side(*commands: Sequence[str | Path]) -> list[str]:
    with ThreadPoolExecutor() as threads:
        return list(threads.map(lambda command: python(*command), commands))


def documented_commands(script: str) -> list[list[str]]:
    """The arguments of each ``python`` that the documentation runs the script with, but for the script."""
    code = "".join(block.code for page in pages() for block in blocks(page))
    return [line.split() for line in re.findall(rf"^python examples/{script} (.*)$", code, re.MULTILINE)]


def assert_close(found: Path, expected: Path) -> None:
    """Model and optimizer; sums of float32 in another order, through AdamW."""
    names = list(metadata(expected).tensors)
    assert set(names) == set(metadata(found).tensors)
    for (name, a), (_, b) in zip(load_keys(found, names), load_keys(expected, names), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5, msg=name)


def test_a_plain_torch_script_goes_on_on_other_ranks_and_ends_when_all_is_written(tmp_path: Path) -> None:
    script, moved = ROOT / "examples" / "plain_torch.py", tmp_path / "checkpoints" / "plain-torch"
    (first,) = documented_commands("plain_torch.py")
    assert python(script, *first, folder=tmp_path) == "step 4\n"
    printed = python(*TORCHRUN, script, "--steps=6", folder=tmp_path)
    assert "continuing after step 4 on 2 process(es)" in printed
    assert metadata(moved).world_size == 2
    alone = tmp_path / "checkpoints" / "alone"
    whole, rest = side_by_side(*([script, "--steps=8", f"--checkpoint={path}"] for path in (alone, moved)))
    assert "continuing" not in whole and "continuing after step 6" in rest
    assert_close(moved, alone)
    assert sorted(os.listdir(alone.parent)) == ["alone", "plain-torch"]


@pytest.mark.sweep
def test_a_fabric_script_goes_on_on_other_topologies_and_ends_when_all_is_written(tmp_path: Path) -> None:
    script, moved = ROOT / "examples" / "with_fabric.py", tmp_path / "checkpoints" / "fabric"
    first, second = documented_commands("with_fabric.py")
    python(script, *first, folder=tmp_path)
    printed = python(script, *second, folder=tmp_path)
    assert "continuing after step 4 on Topology(pipeline=2, replicate=1, shard=1, tensor=1)" in printed
    alone = tmp_path / "checkpoints" / "alone"
    whole, rest = side_by_side(*([script, "--steps=10", f"--checkpoint={path}"] for path in (alone, moved)))
    assert "continuing" not in whole and "continuing after step 8" in rest
    assert_close(moved, alone)
    assert sorted(os.listdir(alone.parent)) == ["alone", "fabric"]
