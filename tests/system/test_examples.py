"""Everything in examples/ as a user starts it, with fewer steps: main job, scripts, notebook, SLURM, benchmarks."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from safetensors.torch import load_file

from lightning_shardckpt import ShardCkptIO, cli, load_keys, metadata
from lightning_shardckpt.tools.diff import diff
from lightning_shardckpt.tools.verify import verify
from tests.support import tiny
from tests.support.pages import blocks, pages
from tests.support.pool import ROOT, run_ranks
from tests.support.warm_python import Run

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "examples"
STEPS = 6
ENV = os.environ | {"PYTHONPATH": str(ROOT)}
TOPOLOGIES = {"first": (4, 1, 2, 2), "second": (4, 2, 2, 1), "third": (1, 1, 1, 1)}  # world, pipeline, shard, tensor
# float32 sums in another order, through AdamW: seen up to 5e-7 after 240 steps.
TOLERANCE = 1e-5


def test_the_main_job_resumes_on_three_topologies_with_the_losses_of_one_run(
    tmp_path: Path, python: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, third = tmp_path / "job", STEPS // 3
    done = python([EXAMPLES / "main_job.py", "--steps", str(STEPS), "--dir", folder], env=ENV, timeout_s=500)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = {}
    for leg in ("uninterrupted", *TOPOLOGIES):
        with (folder / leg / "metrics.csv").open(newline="") as file:
            losses[leg] = {int(row["step"]): float(row["loss"]) for row in csv.DictReader(file)}
    whole = losses["uninterrupted"]
    assert sorted(whole) == list(range(STEPS)) and whole[STEPS - 1] < whole[0] - 1
    assert losses["first"] == {step: whole[step] for step in losses["first"]}  # the same topology: bit for bit
    for number, (leg, topology) in enumerate(TOPOLOGIES.items(), 1):
        expected = {step: whole[step] for step in range((number - 1) * third, number * third)}
        assert losses[leg] == pytest.approx(expected, abs=TOLERANCE)
        (last,) = (folder / leg / "checkpoints").glob(f"epoch=*-step={number * third}.ckpt")
        assert cli.main(["inspect", "--json", str(last)]) == 0
        facts: dict[str, Any] = json.loads(capsys.readouterr().out)
        mesh = facts["topology"]
        assert (facts["world_size"], mesh["pipeline"], mesh["shard"], mesh["tensor"]) == topology
        assert facts["step"] == number * third
    keys = torch.load(folder / "model.pt").keys()
    assert {"state_dict", "hyper_parameters", "optimizer_states", "loops"} <= keys
    assert 'The "assert" statement' in done.stdout


# ── benchmarks ───────────────────────────────────────────────────────────────────────────────────────────────────────


FOLDER = ROOT / "examples" / "benchmarks"
COMMAND = f"""
import runpy, sys
sys.path.insert(0, {str(FOLDER)!r})
import state
state.LAYERS = 2
runpy.run_path({str(FOLDER / "compare.py")!r}, run_name="__main__")
"""


def test_benchmarks_compare_every_way_and_leave_nothing_behind(tmp_path: Path, python: Run) -> None:
    """On sizes that say nothing about speed: each way brings back what it saved."""
    sizes = ("--gb=0.02", "--rounds=1", "--ranks=1", "--tensors=100", f"--out={tmp_path}/results.json")
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = python(["-c", COMMAND, *sizes, "--only", "async", f"--dir={tmp_path}"], env=env, timeout_s=900)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "results.json").read_text())["async"]["rows"]
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []
    assert "| async, " in done.stdout and rows and all("error" not in row and row["median"] for row in rows)


# ── slurm_script ─────────────────────────────────────────────────────────────────────────────────────────────────────


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


def test_slurm_starts_a_process_for_each_device_of_the_config() -> None:
    trainer = yaml.safe_load((ROOT / "configs" / "slurm.yaml").read_text())["trainer"]
    options = dict(re.findall(r"^#SBATCH (--[\w-]+)=(\S+)", SCRIPT.read_text(), re.MULTILINE))
    assert (options["--nodes"], options["--ntasks-per-node"]) == (str(trainer["num_nodes"]), str(trainer["devices"]))
    sizes = [size for name, size in trainer["strategy"]["init_args"].items() if name.endswith("_size")]
    assert math.prod(sizes) == trainer["num_nodes"] * trainer["devices"]


def submitted(folder: Path, time_is_up: str = "never") -> tuple[int, list[str], str]:
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
    done = subprocess.run(["bash", SCRIPT, *SMALL], env=env, capture_output=True, text=True, timeout=300)
    log = folder / "scontrol.log"
    return done.returncode, log.read_text().splitlines() if log.exists() else [], done.stdout + done.stderr


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
    ended, expected = (next((folder / "checkpoints/slurm").iterdir()) for folder in (cut, whole))
    assert ended.name == expected.name and metadata(ended).step == 120
    assert [one for one in diff(ended, expected)["tensors"] if one["component"] != "trainer"] == []


# ── ladder ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def steps_kept(folder: str) -> list[tuple[int, dict[str, set[int]]]]:
    """The step from which each of two runs began, and the steps whose checkpoints it left."""
    found = []
    for steps, resume in ((7, None), (11, "last")):
        began = list[int]()
        recent = ModelCheckpoint(
            f"{folder}/recent", "{step}", every_n_train_steps=1, monitor="step", mode="max", save_top_k=2
        )
        milestones = ModelCheckpoint(f"{folder}/milestones", "{step}", every_n_train_steps=3, save_top_k=-1)
        start = LambdaCallback(on_train_start=lambda run, _, began=began: began.append(run.global_step))
        options: dict[str, Any] = {"callbacks": [recent, milestones, start], "enable_checkpointing": True}
        tiny.fit({}, steps, resume=resume, plugins=[ShardCkptIO(use_async=True)], **options)
        kept = {name: {int(one[5:-5]) for one in os.listdir(f"{folder}/{name}")} for name in ("recent", "milestones")}
        found.append((began[0], kept))
    return found


def test_two_model_checkpoints_keep_the_last_ones_and_every_third_over_a_resume(tmp_path: Path) -> None:
    first, second = run_ranks(2, steps_kept, str(tmp_path))[0]
    assert first == (0, {"recent": {6, 7}, "milestones": {3, 6}})
    # ModelCheckpoint never deletes the checkpoint that the run resumed from
    assert second == (7, {"recent": {7, 10, 11}, "milestones": {3, 6, 9}})
    assert all(verify(path).findings == () for path in tmp_path.glob("*/*.ckpt"))


# ── example_scripts ──────────────────────────────────────────────────────────────────────────────────────────────────


ON_CPU = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


@pytest.fixture
def printed_by(python: Run, tmp_path: Path) -> Callable[..., str]:
    """Runs a command of Python, in the folder of the test."""

    def run(*arguments: str | Path) -> str:
        done = python(arguments, env=ON_CPU, folder=tmp_path, timeout_s=100)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Traceback" not in done.stderr, done.stderr
        return done.stdout

    return run


def documented_commands(script: str) -> list[list[str]]:
    """The arguments of each ``python`` that the documentation runs the script with, but for the script."""
    code = "".join(block.code for page in pages() for block in blocks(page))
    return [line.split() for line in re.findall(rf"^python examples/{script} (.*)$", code, re.MULTILINE)]


def assert_close(found: Path, expected: Path) -> None:
    """Model and optimizer; sums of float32 in another order, through AdamW."""
    names = list(metadata(expected).tensors)
    assert set(names) == set(metadata(found).tensors)
    for (name, a), (_, b) in zip(load_keys(found, names), load_keys(expected, names), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5, msg=name)


def test_a_plain_torch_script_goes_on_on_other_ranks_and_ends_when_all_is_written(
    tmp_path: Path, printed_by: Callable[..., str]
) -> None:
    (first,) = documented_commands("plain_torch.py")
    goes_on(tmp_path, printed_by, "plain_torch.py", [first, ["--steps=6"]], "2 process(es)", 6)


@pytest.mark.sweep
def test_a_fabric_script_goes_on_on_other_topologies_and_ends_when_all_is_written(
    tmp_path: Path, printed_by: Callable[..., str]
) -> None:
    commands = documented_commands("with_fabric.py")
    goes_on(tmp_path, printed_by, "with_fabric.py", commands, "Topology(pipeline=2, replicate=1, shard=1, tensor=1)", 8)


def goes_on(
    folder: Path, printed_by: Callable[..., str], name: str, commands: list[list[str]], where: str, saved: int
) -> None:
    """Oracle: the script that runs alone from its beginning to the end."""
    script, alone = ROOT / "examples" / name, folder / "checkpoints" / "alone"
    first, second = commands
    printed_by(script, *first)
    printed = printed_by(*(TORCHRUN if name == "plain_torch.py" else ()), script, *second)
    assert f"continuing after step 4 on {where}" in printed
    (moved,) = alone.parent.iterdir()
    whole, rest = (printed_by(script, f"--steps={saved + 2}", f"--checkpoint={path}") for path in (alone, moved))
    assert "continuing" not in whole and f"continuing after step {saved}" in rest
    assert_close(moved, alone)
    assert sorted(alone.parent.iterdir()) == sorted([alone, moved])


def test_adapters_continue_on_other_ranks_and_are_merged_into_the_base_model(
    tmp_path: Path, printed_by: Callable[..., str]
) -> None:
    for arguments in documented_commands("llama_lora.py"):
        printed_by(ROOT / "examples" / "llama_lora.py", *arguments)
    output = tmp_path / "lightning_logs" / "llama_lora"
    found = [metadata(output / "checkpoints" / f"step={step}.ckpt") for step in (4, 8)]
    assert [one.world_size for one in found] == [2, 1]
    assert not any(name.endswith("base_layer.weight") for one in found for name in one.tensors)
    base, merged = (load_file(tmp_path / path / "model.safetensors") for path in ("llama", output / "merged"))
    adapters = load_file(output / "adapter" / "adapter_model.safetensors")
    assert base.keys() == merged.keys() and len(adapters) == 2 * 7 * 2  # A and B of 7 linear layers in 2 blocks
    for name, weight in base.items():
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{prefix}.lora_A.weight" in adapters:  # alpha / r is 1, and PEFT adds in float32
            a, b = (adapters[f"{prefix}.lora_{part}.weight"].float() for part in "AB")
            assert b.abs().max() > 0  # they are zeros before training
            weight = (weight.float() + b @ a).to(weight.dtype)
        assert torch.equal(merged[name], weight), name


def test_each_checkpoint_is_evaluated_in_another_process(tmp_path: Path, printed_by: Callable[..., str]) -> None:
    losses = run_ranks(1, trained_and_evaluated, str(tmp_path / "run"), init_process_group=False)[0]
    script = ROOT / "examples" / "evaluate.py"
    printed = printed_by("-m", "lightning_shardckpt", "follow", "run", "--once", "--", script, "{}")
    assert [json.loads(line) for line in printed.splitlines()] == [{"eval/loss": loss} for loss in losses.values()]


def trained_and_evaluated(folder: str) -> dict[int, float]:
    """Save a model at two steps; return its losses in this process."""
    sys.path.insert(0, str(ROOT / "examples"))
    from evaluate import loss
    from lightning.pytorch import Callback, LightningModule, Trainer
    from text import ByteTransformer, PythonDocs

    losses = {}

    class Saves(Callback):
        def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
            if trainer.global_step % 2 == 0:
                trainer.save_checkpoint(f"{folder}/step={trainer.global_step}.ckpt")
                losses[trainer.global_step] = loss(module, PythonDocs().windows()[:64])
                module.train()

    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(accelerator="cpu", devices=1, strategy="sharded", max_steps=4, callbacks=[Saves()], **quiet)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The 'train_dataloader' does not have many workers")
        trainer.fit(ByteTransformer(width=16, depth=1), PythonDocs())
    return losses


# ── notebook ─────────────────────────────────────────────────────────────────────────────────────────────────────────


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


def test_the_notebook_goes_on_on_other_processes_with_the_losses_of_an_uninterrupted_run(
    tmp_path: Path, python: Run
) -> None:
    cells = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    code = "\n".join([KERNEL, *cells, JUDGE])
    short = re.sub(r"^STEPS = \d+", "STEPS = 4", code, flags=re.MULTILINE)
    assert short != code
    (tmp_path / "cells.py").write_text(short)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (EXAMPLES, ROOT))), "OMP_NUM_THREADS": "1"}
    done = python(["cells.py"], env=env, folder=tmp_path, timeout_s=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "'pipeline': 2" in done.stdout and 'The "assert" statement' in done.stdout
