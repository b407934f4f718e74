"""Do the scripts in examples/ do what they say? As a user starts them; the oracle is a run on one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_shardckpt import load_keys, metadata
from tests.pool import ROOT

pytestmark = pytest.mark.slow

ENV = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def python(*arguments: str | Path) -> str:
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


def assert_close(found: Path, expected: Path) -> None:
    """Model and optimizer; sums of float32 in another order, through AdamW."""
    names = list(metadata(expected).tensors)
    assert set(names) == set(metadata(found).tensors)
    for (name, a), (_, b) in zip(load_keys(found, names), load_keys(expected, names), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5, msg=name)


def test_a_plain_torch_script_goes_on_on_other_ranks_and_ends_when_all_is_written(tmp_path: Path) -> None:
    script = ROOT / "examples" / "plain_torch.py"
    python(script, "--steps=6", f"--checkpoint={tmp_path / 'alone'}")
    python(script, "--steps=2", f"--checkpoint={tmp_path / 'moved'}")
    printed = python(*TORCHRUN, script, "--steps=4", f"--checkpoint={tmp_path / 'moved'}")
    assert "continuing after step 2 on 2 process(es)" in printed
    assert metadata(tmp_path / "moved").world_size == 2
    assert "continuing after step 4" in python(script, "--steps=6", f"--checkpoint={tmp_path / 'moved'}")
    assert_close(tmp_path / "moved", tmp_path / "alone")
    assert sorted(os.listdir(tmp_path)) == ["alone", "moved"]


def test_a_fabric_script_goes_on_on_other_topologies_and_ends_when_all_is_written(tmp_path: Path) -> None:
    script = ROOT / "examples" / "with_fabric.py"
    python(script, "--steps=6", f"--checkpoint={tmp_path / 'alone'}")
    python(script, "--steps=2", "--devices=2", f"--checkpoint={tmp_path / 'moved'}")
    printed = python(script, "--steps=4", "--devices=2", "--pipeline=2", f"--checkpoint={tmp_path / 'moved'}")
    assert "continuing after step 2 on Topology(pipeline=2, replicate=1, shard=1, tensor=1)" in printed
    python(script, "--steps=6", f"--checkpoint={tmp_path / 'moved'}")
    assert_close(tmp_path / "moved", tmp_path / "alone")
    assert sorted(os.listdir(tmp_path)) == ["alone", "moved"]
