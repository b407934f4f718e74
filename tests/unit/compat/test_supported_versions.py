"""Versions of torch and Lightning that have not been tested are refused where they are needed, and nowhere else."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from lightning_shardckpt.compat.supported_versions import SUPPORTED, require_supported_versions
from tests.support.pages import DOCS, table
from tests.support.pool import ROOT

GOLDEN = ROOT / "tests" / "golden" / "v1.0" / "golden.ckpt"
NEEDS_TORCH = ("-c", "import lightning_shardckpt.compat")


def python(site: Path, *arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a fresh interpreter, for which the packages are of the versions that a folder tells."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join((str(site), str(ROOT)))} | variables
    command = [sys.executable, "-W", "error", *map(str, arguments)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)


def site(folder: Path, **versions: str) -> Path:
    """Write the metadata of packages as pip installs it."""
    for name, version in versions.items():
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder


@pytest.mark.parametrize("name", SUPPORTED)
def test_pip_and_the_package_agree_on_every_minor_version(name: str) -> None:
    texts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (bounds,) = (wanted.specifier for wanted in map(Requirement, texts) if wanted.name == name)
    first, last = SUPPORTED[name]
    for number in [(major, minor) for major in range(1, 4) for minor in range(40)]:
        for patch in (0, 9):
            assert bounds.contains(".".join(map(str, (*number, patch)))) == (first <= number <= last)


@pytest.mark.parametrize("name", SUPPORTED)
def test_the_page_and_the_sessions_of_nox_have_every_minor_version_and_no_other(name: str) -> None:
    (major, first), (_, last) = SUPPORTED[name]
    supported = {f"{major}.{minor}" for minor in range(first, last + 1)}
    rows = table(DOCS / "compatibility.md", "| torch | Lightning |")
    tested = [row[list(SUPPORTED).index(name)] for row in rows]
    tree = ast.parse((ROOT / "configs" / "noxfile.py").read_text())
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    sessions = [text for text in texts if re.fullmatch(r"\d+\.\d+\.\d+", text)]
    assert {text.rpartition(".")[0] for text in tested} == supported
    assert set(tested) <= set(sessions)


@pytest.mark.filterwarnings("error")
def test_the_installed_versions_pass() -> None:
    require_supported_versions()


@pytest.mark.parametrize(
    ("versions", "refused"),
    [
        ({"torch": "2.16.0.dev20261120+cu130"}, "torch 2.16.0.dev20261120+cu130 is installed, 2.12 to 2.15"),
        ({"torch": "2.15.3+cpu", "lightning": "2.4.0"}, "versions: lightning 2.4.0 is installed"),
    ],
    ids=str,
)
def test_another_version_is_refused_with_what_is_installed_and_what_to_do(
    versions: dict[str, str], refused: str, tmp_path: Path
) -> None:
    run = python(site(tmp_path, **versions), *NEEDS_TORCH)
    assert run.returncode == 1
    (error,) = (line for line in run.stderr.splitlines() if line.startswith("ImportError: "))
    assert refused in error
    assert 'pip install "torch>=2.12,<2.16" "lightning>=2.5,<2.7"' in run.stderr


def test_tools_that_run_without_torch_do_not_ask_for_its_version(tmp_path: Path) -> None:
    folder = site(tmp_path, torch="2.16.0", lightning="3.0.0")
    run = python(folder, "-m", "lightning_shardckpt", "inspect", GOLDEN)
    assert (run.returncode, run.stderr) == (0, "") and "checkpoint" in run.stdout
