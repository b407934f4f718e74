"""The notebook in examples/: its cells run in order, in a process that is as interactive as a notebook's kernel.

The oracle is the same training without interruption, on the one process of the notebook.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.pool import ROOT
from tests.support.warm_python import Run

EXAMPLES = ROOT / "examples"
NOTEBOOK = json.loads((EXAMPLES / "quickstart.ipynb").read_text())

# What a kernel gives to the cells: a prompt, by which Lightning knows notebooks, and IPython.
KERNEL = """
import sys, types
sys.ps1 = "In : "
sys.modules["IPython"] = types.ModuleType("IPython")
sys.modules["IPython.display"] = types.SimpleNamespace(IFrame=lambda page, **size: open(page).close())
"""
JUDGE = """
from lightning.fabric import Fabric
from lightning_shardckpt.fabric import ShardedStrategy

fabric = Fabric(accelerator="cpu", devices=1, strategy=ShardedStrategy())
assert fabric.launch(lambda fabric: fabric.world_size) == 1
assert not {"LOCAL_RANK", "MASTER_PORT"} & os.environ.keys()
train("whole", 3 * STEPS)
expected, found = losses("whole"), [losses(leg) for leg in ("first", "second", "third")]
assert [sorted(leg) for leg in found] == [list(range(n * STEPS, (n + 1) * STEPS)) for n in range(3)]
assert found[0] == {step: expected[step] for step in found[0]}
assert max(abs(curve[step] - loss) for step, loss in expected.items()) < 1e-5  # of two stages, through AdamW
for name, stored in lightning_shardckpt.load_keys(third, list(model.state_dict())):
    assert torch.equal(model.state_dict()[name], stored)
"""


def sources(kind: str) -> list[str]:
    return ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == kind]


@pytest.mark.slow
def test_the_notebook_goes_on_on_other_processes_with_the_losses_of_an_uninterrupted_run(
    tmp_path: Path, python: Run
) -> None:
    code = "\n".join([KERNEL, *sources("code"), JUDGE])
    short = re.sub(r"^STEPS = \d+", "STEPS = 4", code, flags=re.MULTILINE)
    assert short != code
    (tmp_path / "cells.py").write_text(short)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (EXAMPLES, ROOT))), "OMP_NUM_THREADS": "1"}
    done = python(["cells.py"], env=env, folder=tmp_path, timeout_s=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "'pipeline': 2" in done.stdout and 'The "assert" statement' in done.stdout


def test_the_notebook_is_small_and_its_links_lead_somewhere() -> None:
    assert (EXAMPLES / "quickstart.ipynb").stat().st_size < 20_000
    links = re.findall(r"\]\(([^)]+)\)", "\n".join(sources("markdown")))
    assert links and [link for link in links if not (EXAMPLES / link).exists()] == []


def test_the_outputs_in_the_notebook_are_those_of_one_run_from_top_to_bottom() -> None:
    cells: list[dict[str, Any]] = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert {output["output_type"] for cell in cells for output in cell["outputs"]} <= {"stream", "execute_result"}
