"""Where awscrt can't be imported, saves say so before they begin, or record no digests; everything else goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pool import ROOT

WITHOUT = """
import sys
sys.modules["awscrt"] = None  # what an import of it finds
"""
SAVED_AND_LOADED = """
import torch, lightning_shardckpt
from lightning_shardckpt import ShardCkptIO

path, model = sys.argv[1], torch.nn.Linear(3, 2)
weight = model.weight.detach().clone()
ShardCkptIO(digest=False)
for incremental in (False, True):
    lightning_shardckpt.save(path, {"model": model}, digest=False, incremental=incremental, overwrite=True)
torch.nn.init.zeros_(model.weight)
lightning_shardckpt.load(path, {"model": model})
assert torch.equal(model.weight, weight)
"""


def python(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT + script, *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)


def test_saves_without_digests_and_loads_and_tools_do_without_it(tmp_path: Path) -> None:
    run = python(SAVED_AND_LOADED, str(tmp_path / "a.ckpt"))
    assert run.returncode == 0, run.stderr
    for tool in ("inspect", "verify"):
        arguments = f"sys.argv[1:] = [{tool!r}, {str(tmp_path / 'a.ckpt')!r}]"
        run = python(f"{arguments}\nfrom lightning_shardckpt.cli import main\nsys.exit(main(sys.argv[1:]))")
        assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    "script",
    [
        "from lightning_shardckpt import ShardCkptIO; ShardCkptIO()",
        "import lightning_shardckpt; lightning_shardckpt.save(sys.argv[1], {})",
        "from lightning_shardckpt.cli import main; sys.exit(main(['digest', sys.argv[1]]))",
    ],
)
def test_what_needs_it_says_so_and_writes_nothing(script: str, tmp_path: Path) -> None:
    run = python(script, str(tmp_path / "a.ckpt"))
    assert run.returncode == 1
    (error,) = (line for line in run.stderr.splitlines() if "awscrt 0.31" in line)
    assert 'Run `pip install "awscrt>=0.31"`, or save without digests, by digest=False' in error
    assert not list(tmp_path.iterdir())
