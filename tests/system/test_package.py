"""The package as it is installed, as it runs from a source tree, and a process that has trained with it."""

from __future__ import annotations

import builtins
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from lightning_shardckpt.compat.supported_versions import SUPPORTED
from tests.support.pool import ROOT
from tests.support.warm_python import Run

NAME, MODULE = "lightning-shardckpt", "lightning_shardckpt"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SITE = Path(sysconfig.get_path("purelib"))
PIP = ("-m", "pip", "--quiet", "--disable-pip-version-check", "--no-cache-dir")
WORKFLOWS = ("checks", "release")


def interpret(*arguments: str | Path, paths: list[Path], cwd: Path) -> str:
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


def test_a_star_import_brings_what_is_public_and_hides_nothing_of_python() -> None:
    names: dict[str, object] = {}
    exec(f"from {MODULE} import *", names)
    assert {"ShardedStrategy", "save", "load", "metadata"} <= names.keys()
    assert not names.keys() & vars(builtins).keys() - {"__builtins__"}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling", reason="builds the package; of the extra `test`")
    folder = tmp_path_factory.mktemp("sdist")
    run("-m", "hatchling", "build", "-t", "sdist", "-d", folder, cwd=ROOT)
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built of the sdist, as an index would have it."""
    folder = tmp_path_factory.mktemp("wheel")
    run(*PIP, "wheel", "--no-index", "--no-deps", "--no-build-isolation", "-w", folder, sdist, cwd=folder)
    (built,) = folder.iterdir()
    return built


def test_the_sdist_has_every_file_of_the_repository(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", ".ci/run"} - names == set()
    if (ROOT / ".git").exists() and shutil.which("git"):
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
        tracked = {name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()}
        assert tracked - names == set()


def test_the_wheel_has_the_package_and_nothing_else(wheel: Path) -> None:
    expected = {str(path.relative_to(ROOT)) for path in (ROOT / MODULE).rglob("*") if path.is_file()}
    expected = {name for name in expected if "__pycache__" not in name}
    assert {f"{MODULE}/FORMAT.md", f"{MODULE}/py.typed", f"{MODULE}/tools/map.html"} < expected
    info = f"{MODULE}-{PROJECT['version']}.dist-info"
    assert names_in(wheel) == expected | {
        f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")
    }


def test_workflows_run_the_commands_of_ci_with_every_supported_torch() -> None:
    checks, release = (yaml.safe_load((ROOT / f".github/workflows/{name}.yml").read_text()) for name in WORKFLOWS)
    matrix = checks["jobs"]["versions"]["strategy"]["matrix"]
    first, last = SUPPORTED["torch"]
    assert [tuple(map(int, torch.split(".")[:2])) for torch in matrix["torch"]] == [
        (first[0], minor) for minor in range(first[1], last[1] + 1)
    ]
    assert all(f'"{torch}"' in (ROOT / "configs/noxfile.py").read_text() for torch in matrix["torch"])
    done = {step["run"] for step in checks["jobs"]["versions"]["steps"] if "run" in step}
    assert {"ruff check .", "mypy", 'python -m pytest -m "not slow"'} <= done
    assert {".ci/run"} <= {step.get("run") for step in checks["jobs"]["suite"]["steps"]}
    assert not any("publish" in str(step) or "upload --" in str(step) for step in release["jobs"]["build"]["steps"])


def test_the_installed_wheel_runs_its_tools(wheel: Path, tmp_path: Path) -> None:
    installed, golden, page = tmp_path / "installed", ROOT / "tests/golden/v1.0/golden.ckpt", tmp_path / "map.html"
    run(*PIP, "install", "--no-index", "--no-deps", "--target", installed, wheel, cwd=tmp_path)
    paths = [installed, others(tmp_path / "others")]
    assert interpret("-m", MODULE, "--help", paths=paths, cwd=tmp_path).startswith(f"usage: python -m {MODULE}")
    assert interpret("-m", MODULE, "--version", paths=paths, cwd=tmp_path) == f"{NAME} {PROJECT['version']}\n"
    interpret("-m", MODULE, "map", golden, "-o", page, paths=paths, cwd=tmp_path)
    assert page.read_text().startswith("<!doctype html>")
    script = installed / "bin/shardckpt"
    assert interpret(script, "verify", golden, paths=paths, cwd=tmp_path).startswith(f"{golden} is whole: ")
    damaged = Path(shutil.copytree(golden, tmp_path / "damaged.ckpt"))
    (damaged / "trainer-state.json").write_text("{}")
    with pytest.raises(AssertionError, match="trainer-state"):
        interpret(script, "verify", damaged, paths=paths, cwd=tmp_path)


def run(*arguments: str | Path, cwd: Path) -> None:
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_an_import_that_fails_tells_its_cause(python: Run) -> None:
    script = """
import lightning, torch
del torch.nn.InstanceNorm3d  # as if another build of torch were without it
try:
    from lightning_shardckpt import ShardedStrategy
except ImportError as error:
    print(error)
"""
    printed = python(["-c", script], env=os.environ | {"PYTHONPATH": str(ROOT)}).stdout
    assert "module 'torch.nn' has no attribute 'InstanceNorm3d'" in printed and "ShardedStrategy" in printed


TRAINING = """
import copy, sys, warnings
warnings.simplefilter("ignore")
import lightning.pytorch as pl, torch, torch.distributed as dist, torchmetrics.metric
from lightning.fabric import strategies as fabric_strategies, wrappers
from lightning.pytorch import cli, strategies
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.distributed.tensor import DTensor
from torch.optim import optimizer

class Model(BoringModel):
    def training_step(self, batch, batch_idx):
        for owner in changed():
            seen.add(owner)
        return super().training_step(batch, batch_idx)

OWNERS = (
    *(torch, dist, torch.Tensor, torch.nn.Module, torch.nn.Parameter, torch.optim.Optimizer, torch.autograd.Function),
    *(torch.autograd, DTensor, pl.Trainer, pl.LightningModule, copy, warnings, cli.LightningCLI),
    *(strategies.Strategy, fabric_strategies.Strategy, fabric_strategies.FSDPStrategy),
    *(wrappers, wrappers._FabricModule, torchmetrics.metric),
)

def state():
    found = {
        f"{o.__name__}.{k}": v for o in OWNERS for k, v in vars(o).items()
        if callable(v) or isinstance(v, property) or "apply" in k
    }
    found |= {f"deepcopy of {kind.__name__}": how for kind, how in copy._deepcopy_dispatch.items()}
    found |= {f"DTensor handler of {op}": how for op, how in DTensor._op_dispatcher._custom_op_handlers.items()}
    found["lists of torch.optim.optimizer"] = tuple(optimizer._foreach_supported_types)
    return found | {f"finder {finder}": finder for finder in sys.meta_path if "shardckpt" in type(finder).__module__}

def changed():
    now = state()
    return sorted(name for name in before.keys() | now.keys() if before.get(name) is not now.get(name)
                  and before.get(name) != now.get(name))

before, seen = state(), set()
import lightning_shardckpt
from lightning_shardckpt import ShardCkptIO, ShardedStrategy, fabric
strategy = ShardedStrategy(data_parallel_shard_size=2)
trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, plugins=[ShardCkptIO()], max_steps=2,
                     limit_val_batches=1, logger=False, enable_progress_bar=False, default_root_dir=sys.argv[1])
trainer.fit(Model())
if trainer.global_rank == 0:
    print("while it trains:", *sorted(seen), sep="\\n")
    print("after it:", *changed(), sep="\\n")
"""
WHILE_IT_TRAINS = {
    "Function.apply",  # custom functions get whole tensors
    "deepcopy of Parameter",  # the gradients of copies are averaged
    "lists of torch.optim.optimizer",  # sharded tensors among them
    "torchmetrics.metric.gather_all_tensors",  # over the data-parallel ranks
}


@pytest.mark.slow
def test_torch_and_lightning_are_as_before_after_a_training(tmp_path: Path, python: Run) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = python([script, tmp_path], env=env)
    assert run.returncode == 0, run.stderr
    during, after = run.stdout.split("while it trains:\n")[1].split("after it:\n")
    assert set(during.splitlines()) >= WHILE_IT_TRAINS
    assert after.strip() == ""
