"""What the tool shows is what was saved; it needs neither torch nor lightning. Oracle: the tensors before the save."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_shardckpt.cli import main
from lightning_shardckpt.tools.inspect import inspect
from tests.support import zoo
from tests.support.pool import ROOT


def test_json_lists_every_tensor_as_it_was(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(saved), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    model = {t["name"]: t for t in found["tensors"] if t["component"] == "model"}
    expected = zoo.whole_tensors()
    assert {name: (t["shape"], t["bytes"]) for name, t in model.items()} == {
        name: (list(t.shape), t.nbytes) for name, t in expected.items()
    }
    assert (found["step"], found["epoch"], found["world_size"]) == (7, 3, 4)
    assert found["topology"] == {"shard": 2, "tensor": 2}
    assert model["twice.large"]["cuts"] == [
        {"dim": 0, "axis": "tensor", "parts": 2, "blocks": 1},
        {"dim": 0, "axis": "shard", "parts": 2, "blocks": 1},
    ]
    assert model["rows.float64"]["aliases"] == ["tied.float64"]


def test_files_and_sizes_are_those_on_disk(saved: Path) -> None:
    found = inspect(saved)
    assert {f["name"]: f["bytes"] for f in found["files"]} == {p.name: p.stat().st_size for p in saved.iterdir()}
    assert all(f["rank"] == int(f["name"].split("-dist-")[1][:5]) for f in found["files"] if "-dist-" in f["name"])
    assert found["bytes"] == sum(p.stat().st_size for p in saved.iterdir())


@pytest.mark.parametrize("tool", [["inspect"], ["verify"], ["diff", "."], ["map", "-o", os.devnull]], ids=" ".join)
def test_the_tool_imports_neither_torch_nor_lightning(saved: Path, tool: list[str]) -> None:
    code = """
import sys
from lightning_shardckpt.cli import main
from lightning_shardckpt.system.text import size_text
status = main(sys.argv[1:])
loaded = sys.modules.keys() & {"torch", "lightning", "lightning_fabric", "pytorch_lightning", "pickle5"}
sys.exit(f"loaded {loaded}" if loaded else status)
"""
    tool = [str(saved) if word == "." else word for word in tool]
    command = [sys.executable, "-c", code, *tool, str(saved)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
