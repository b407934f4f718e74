"""The benchmark comparison, run as a user starts it, but with few layers, on sizes that say nothing about speed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.pool import ROOT
from tests.support.warm_python import Run

pytestmark = pytest.mark.slow

FOLDER = ROOT / "examples" / "benchmarks"
COMMAND = f"""
import runpy, sys
sys.path.insert(0, {str(FOLDER)!r})
import state
state.LAYERS = 2
runpy.run_path({str(FOLDER / "compare.py")!r}, run_name="__main__")
"""
# Cases by section. The others are run by hand: save, load, reshard.
SECTIONS = {"async": 1, "small": 1, "consolidate": 2, "training": 2}


@pytest.fixture(
    scope="module",
    params=["async", *(pytest.param(name, marks=pytest.mark.sweep) for name in ("small", "consolidate", "training"))],
)
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, python: Run
) -> tuple[str, dict[str, Any]]:
    """The name of a section, and what was found there."""
    section = str(request.param)
    folder: Path = tmp_path_factory.mktemp("benchmarks")
    command = [
        *("-c", COMMAND),
        "--gb=0.02",
        "--rounds=1",
        "--ranks=1",
        "--tensors=100",
        f"--out={folder}/results.json",
        *("--only", section),
    ]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = python([*command, f"--dir={folder}"], env=env, timeout_s=900)
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = json.loads((folder / "results.json").read_text())
    assert [path.name for path in folder.iterdir() if path.is_dir()] == [], "it leaves nothing behind"
    assert f"| {section}, " in done.stdout
    return section, results[section]


def test_every_section_has_rows_for_each_case(found: tuple[str, dict[str, Any]]) -> None:
    section, results = found
    assert len({row["case"] for row in results["rows"]}) == SECTIONS[section]
    assert results["about"]["rounds"] == 1


def test_every_way_that_is_installed_brings_back_what_it_saved(found: tuple[str, dict[str, Any]]) -> None:
    for row in found[1]["rows"]:
        assert "error" not in row and row["median"], row
