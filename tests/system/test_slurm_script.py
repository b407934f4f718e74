"""examples/slurm.sh, with stand-ins for srun and scontrol: two "nodes" of one process each, on this machine."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from lightning_shardckpt import load_keys, metadata
from tests.support.pool import ROOT

SCRIPT = ROOT / "examples" / "slurm.sh"
JOB = str(os.getpid())  # Lightning makes the port of it
SRUN = f"""#!{sys.executable}
import os, signal, subprocess, sys, time
from pathlib import Path

assert sys.argv[1] == "--kill-on-bad-exit=0"

def started(rank):
    env = os.environ | {{"SLURM_PROCID": rank, "SLURM_NODEID": rank, "SLURM_LOCALID": "0"}}
    return subprocess.Popen(sys.argv[2:], env=env)

tasks = [started(rank) for rank in "01"]
limit = os.environ.get("TIME_IS_UP") == "after the first checkpoint"
while any(task.poll() is None for task in tasks):
    time.sleep(0.05)
    if limit and [*Path("checkpoints/slurm").glob("epoch*/checkpoint.index.json")]:
        limit = False
        for task in tasks:
            task.send_signal(signal.SIGTERM)
sys.exit(max(task.returncode if task.returncode >= 0 else 128 - task.returncode for task in tasks))
"""
SCONTROL = '#!/bin/bash\necho "$@" >> scontrol.log\n'
SMALL = [f"--trainer.{option}" for option in ("accelerator=cpu", "devices=1", "max_epochs=3", "limit_train_batches=40")]
SMALL += [f"--trainer.strategy.init_args.{axis}=1" for axis in ("data_parallel_shard_size", "tensor_parallel_size")]


def test_bash_understands_the_script() -> None:
    done = subprocess.run(["bash", "-n", SCRIPT], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_slurm_starts_a_process_for_each_device_of_the_config() -> None:
    trainer = yaml.safe_load((ROOT / "configs" / "slurm.yaml").read_text())["trainer"]
    options = dict(re.findall(r"^#SBATCH (--[\w-]+)=(\S+)", SCRIPT.read_text(), re.MULTILINE))
    assert (options["--nodes"], options["--ntasks-per-node"]) == (str(trainer["num_nodes"]), str(trainer["devices"]))
    sizes = [size for name, size in trainer["strategy"]["init_args"].items() if name.endswith("_size")]
    assert math.prod(sizes) == trainer["num_nodes"] * trainer["devices"]


def submitted(folder: Path, *arguments: str, time_is_up: str = "never") -> tuple[int, list[str], str]:
    """Run the script as a job in ``folder``; returns its exit status, calls of scontrol, and what it printed."""
    here = folder / "bin"
    if not here.exists():
        here.mkdir(parents=True)
        for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
            (here / name).write_text(text)
            (here / name).chmod(0o755)
        for name in ("examples", "configs"):
            (folder / name).symlink_to(ROOT / name)
    path = os.pathsep.join([str(here), str(Path(sys.executable).parent), os.environ["PATH"]])
    env = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TIME_IS_UP": time_is_up}
    env |= {"SLURM_JOB_ID": JOB, "SLURM_JOB_NAME": "shardckpt", "SLURM_SUBMIT_DIR": str(folder)}
    env |= {"SLURM_NNODES": "2", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1", "SLURM_NODELIST": "127.0.0.1"}
    command = ["bash", SCRIPT, *SMALL, *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    log = folder / "scontrol.log"
    return done.returncode, log.read_text().splitlines() if log.exists() else [], done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.sweep
def test_a_job_whose_time_is_up_is_requeued_and_ends_as_one_that_was_not_interrupted(tmp_path: Path) -> None:
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    status, asked, printed = submitted(cut, time_is_up="after the first checkpoint")
    assert (status, asked) == (0, [f"requeue {JOB}"]), printed
    stopped = metadata(cut / "checkpoints/slurm/on_exception.ckpt").step
    assert stopped is not None and 40 <= stopped < 120, printed
    status, asked, printed = submitted(cut)
    assert (status, asked) == (0, [f"requeue {JOB}"]), printed  # done, and not requeued again
    status, asked, printed = submitted(whole)
    assert (status, asked) == (0, []), printed
    (last,) = (path.name for path in (whole / "checkpoints/slurm").iterdir())
    assert os.listdir(cut / "checkpoints/slurm") == [last]
    ends = [folder / "checkpoints/slurm" / last for folder in (cut, whole)]
    assert [metadata(path).step for path in ends] == [120, 120]
    names = [name for name in metadata(ends[1]).tensors if not name.startswith("trainer/")]
    for (name, a), (_, b) in zip(*(load_keys(path, names) for path in ends), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.slow
@pytest.mark.sweep
def test_a_job_that_fails_is_not_requeued(tmp_path: Path) -> None:
    status, asked, printed = submitted(tmp_path / "job", "--model.width=17")  # which the heads do not divide
    assert (status, asked) == (1, []), printed
