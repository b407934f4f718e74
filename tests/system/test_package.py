"""The package as it is installed, and as it runs from a source tree."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

from tests.support.pool import ROOT

NAME, MODULE = "lightning-shardckpt", "lightning_shardckpt"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SITE = Path(sysconfig.get_path("purelib"))


def python(*arguments: str | Path, paths: list[Path], cwd: Path) -> str:
    """Return what a fresh interpreter prints, which looks for packages in ``paths`` and nowhere else."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-S", *map(str, arguments)]
    done = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def others(folder: Path) -> Path:
    """Return a folder with all packages of this environment but this one, and but what finds it in its source tree."""
    folder.mkdir()
    for path in SITE.iterdir():
        if MODULE not in path.name and path.suffix != ".pth":
            (folder / path.name).symlink_to(path)
    return folder


def test_the_version_is_not_known_where_the_package_is_not_installed(tmp_path: Path) -> None:
    printed = python("-m", MODULE, "--version", paths=[ROOT, others(tmp_path / "others")], cwd=tmp_path)
    assert printed == f"{NAME} is not installed, so its version is not known\n"
