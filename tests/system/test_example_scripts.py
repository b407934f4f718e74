"""The scripts in examples/, started as the documentation starts them; the oracle is a run on one process."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lightning_shardckpt import load_keys, metadata
from tests.support.pages import blocks, pages
from tests.support.pool import ROOT
from tests.support.warm_python import Run

pytestmark = pytest.mark.slow

ENV = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


@pytest.fixture
def printed_by(python: Run, tmp_path: Path) -> Callable[..., str]:
    """Runs a command of Python, in the folder of the test."""

    def run(*arguments: str | Path) -> str:
        done = python(arguments, env=ENV, folder=tmp_path, timeout_s=100)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Traceback" not in done.stderr, done.stderr
        return done.stdout

    return run


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


def test_a_plain_torch_script_goes_on_on_other_ranks_and_ends_when_all_is_written(
    tmp_path: Path, printed_by: Callable[..., str]
) -> None:
    script, moved = ROOT / "examples" / "plain_torch.py", tmp_path / "checkpoints" / "plain-torch"
    (first,) = documented_commands("plain_torch.py")
    assert printed_by(script, *first) == "step 4\n"
    printed = printed_by(*TORCHRUN, script, "--steps=6")
    assert "continuing after step 4 on 2 process(es)" in printed
    assert metadata(moved).world_size == 2
    alone = tmp_path / "checkpoints" / "alone"
    whole, rest = (printed_by(script, "--steps=8", f"--checkpoint={path}") for path in (alone, moved))
    assert "continuing" not in whole and "continuing after step 6" in rest
    assert_close(moved, alone)
    assert sorted(os.listdir(alone.parent)) == ["alone", "plain-torch"]


@pytest.mark.sweep
def test_a_fabric_script_goes_on_on_other_topologies_and_ends_when_all_is_written(
    tmp_path: Path, printed_by: Callable[..., str]
) -> None:
    script, moved = ROOT / "examples" / "with_fabric.py", tmp_path / "checkpoints" / "fabric"
    first, second = documented_commands("with_fabric.py")
    printed_by(script, *first)
    printed = printed_by(script, *second)
    assert "continuing after step 4 on Topology(pipeline=2, replicate=1, shard=1, tensor=1)" in printed
    alone = tmp_path / "checkpoints" / "alone"
    whole, rest = (printed_by(script, "--steps=10", f"--checkpoint={path}") for path in (alone, moved))
    assert "continuing" not in whole and "continuing after step 8" in rest
    assert_close(moved, alone)
    assert sorted(os.listdir(alone.parent)) == ["alone", "fabric"]
