"""The benchmark comparison, run as a user starts it, but with few layers, on sizes that say nothing about speed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.pool import ROOT

pytestmark = pytest.mark.slow

FOLDER = ROOT / "examples" / "benchmarks"
COMMAND = f"""
import runpy, sys
sys.path.insert(0, {str(FOLDER)!r})
import state
state.LAYERS = 2
runpy.run_path({str(FOLDER / "compare.py")!r}, run_name="__main__")
"""
# Cases by section. The others are run by hand: save, async, load, reshard, small, consolidate, planning, steps.
SECTIONS = {"remote": 1}
OPTIONAL = {"torchsnapshot", "torch_checkpointing", "Megatron-Core", "OLMo-core"}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("benchmarks")
    command = [
        *(sys.executable, "-c", COMMAND),
        "--gb=0.02",
        "--rounds=1",
        "--tensors=100",
        "--saves=2",
        f"--out={folder}/results.json",
        *("--only", *SECTIONS),
    ]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, f"--dir={folder}"], env=env, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = json.loads((folder / "results.json").read_text())
    assert "results.png" in done.stdout or "matplotlib" in done.stdout
    assert [path.name for path in folder.iterdir() if path.is_dir()] == [], "it leaves nothing behind"
    for section in SECTIONS:
        assert f"| {section}, " in done.stdout
    return results


@pytest.mark.parametrize("section", SECTIONS)
def test_every_section_has_rows_for_each_case(found: dict[str, Any], section: str) -> None:
    rows = found[section]["rows"]
    assert len({row["case"] for row in rows}) == SECTIONS[section]
    assert found[section]["about"]["rounds"] == 1


def test_what_is_saved_goes_to_the_store_and_is_loaded_from_there(found: dict[str, Any]) -> None:
    for row in found["remote"]["rows"]:
        for facts in row["rounds"]:
            assert min(facts["save_sent_mb"], facts["load_received_mb"]) > 19.5, "MB of 0.02 GB"
            assert min(facts["save_requests"], facts["load_requests"]) >= 2, "from each rank"


@pytest.mark.parametrize("section", SECTIONS)
def test_every_way_that_is_installed_brings_back_what_it_saved(found: dict[str, Any], section: str) -> None:
    for row in found[section]["rows"]:
        absent = row["way"] in OPTIONAL or "this version of ShardCkptIO" in row.get("error", "")
        assert "error" not in row or absent, row
        assert row["median"] or "error" in row, row
