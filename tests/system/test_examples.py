"""The main job does what it prints: all its legs, as a user starts them, only with fewer steps."""

from __future__ import annotations

import csv
import json
import os
import re
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from lightning_shardckpt import cli
from tests.support.pool import ROOT, run_ranks
from tests.support.warm_python import Run

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "examples"
STEPS = 6
ENV = os.environ | {"PYTHONPATH": str(ROOT)}
TOPOLOGIES = {"first": (4, 1, 2, 2), "second": (4, 2, 2, 1), "third": (1, 1, 1, 1)}  # world, pipeline, shard, tensor
# float32 sums in another order, through AdamW: seen up to 5e-7 after 240 steps.
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Job:
    folder: Path
    output: str

    def checkpoint(self, leg: str) -> Path:
        (last,) = (self.folder / leg / "checkpoints").glob(f"epoch=*-step={self.steps(leg)}.ckpt")
        return last

    @staticmethod
    def steps(leg: str) -> int:
        return {"first": STEPS // 3, "second": 2 * STEPS // 3}.get(leg, STEPS)

    def losses(self, leg: str) -> dict[int, float]:
        with (self.folder / leg / "metrics.csv").open(newline="") as file:
            return {int(row["step"]): float(row["loss"]) for row in csv.DictReader(file)}

    @cached_property
    def resumed(self) -> dict[int, float]:
        return self.losses("first") | self.losses("second") | self.losses("third")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, python: Run) -> Job:
    folder = tmp_path_factory.mktemp("examples") / "job"
    done = python([EXAMPLES / "main_job.py", "--steps", str(STEPS), "--dir", folder], env=ENV, timeout_s=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return Job(folder, done.stdout)


@pytest.mark.parametrize("leg", TOPOLOGIES)
def test_each_leg_ran_on_the_topology_that_is_claimed(
    leg: str, job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["inspect", "--json", str(job.checkpoint(leg))]) == 0
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    mesh = facts["topology"]
    assert (facts["world_size"], mesh["pipeline"], mesh["shard"], mesh["tensor"]) == TOPOLOGIES[leg]
    assert facts["step"] == job.steps(leg)


def test_output_in_a_file_tells_the_steps_the_time_that_is_left_and_where_the_logs_are(job: Job) -> None:
    found = re.findall(r"^step (\d+) of (\d+), about \d+ s left$", job.output, re.M)
    told = [(int(step), int(of)) for step, of in found]
    assert {of for _, of in told} == {2 * STEPS} and told == sorted(told) and told[-1][0] == 2 * STEPS
    for leg in TOPOLOGIES:
        (log,) = re.findall(rf"^training {leg} .*; its output: (.*)$", job.output, re.M)
        assert "Trainer.fit" in Path(log).read_text()


def test_each_leg_trains_its_own_steps_only(job: Job) -> None:
    third = STEPS // 3
    assert sorted(job.losses("uninterrupted")) == list(range(STEPS))
    for number, leg in enumerate(TOPOLOGIES):
        assert sorted(job.losses(leg)) == list(range(number * third, (number + 1) * third))


def test_the_resumed_run_has_the_losses_of_the_uninterrupted_one(job: Job) -> None:
    whole, first = job.losses("uninterrupted"), job.losses("first")
    assert first == {step: whole[step] for step in first}  # the same topology: bit for bit
    assert job.resumed == pytest.approx(whole, abs=TOLERANCE)
    assert whole[STEPS - 1] < whole[0] - 1


def twin(steps: int) -> list[float]:
    """Return the losses of the same training in plain torch: one process, no Trainer."""
    import torch
    from torch import nn

    sys.path.insert(0, str(EXAMPLES))
    from text import ByteTransformer, PythonDocs

    torch.manual_seed(1)
    model = ByteTransformer(total_steps=steps)
    model.configure_model()
    made: Any = model.configure_optimizers()
    optimizer, schedule = made["optimizer"], made["lr_scheduler"]["scheduler"]
    windows, size = PythonDocs().windows(), PythonDocs().global_batch_size
    windows = windows[: len(windows) // size * size]
    losses = []
    for epoch in range(3):
        order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(1 + epoch))
        for batch in order.split(size)[: steps // 3]:
            tokens = windows[batch]
            loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
    return losses


def test_the_losses_are_those_of_plain_torch(job: Job) -> None:
    expected = run_ranks(1, twin, STEPS, init_process_group=False)[0]
    assert list(job.losses("uninterrupted").values()) == pytest.approx(expected, abs=TOLERANCE)
    assert list(job.resumed.values()) == pytest.approx(expected, abs=TOLERANCE)


def generate(file: str) -> tuple[list[str], str]:
    import torch

    sys.path.insert(0, str(EXAMPLES))
    import main_job

    return sorted(torch.load(file)), main_job.generate_from(Path(file))


def test_plain_torch_loads_the_consolidated_file_and_generates(job: Job) -> None:
    keys, text = run_ranks(1, generate, str(job.folder / "model.pt"), init_process_group=False)[0]
    assert {"state_dict", "hyper_parameters", "optimizer_states", "loops"} <= set(keys)
    assert text.startswith('The "assert" statement') and len(text) > 200
    assert text in job.output


def test_the_output_has_both_curves_the_verdicts_and_the_seconds(job: Job) -> None:
    lines = job.output.splitlines()
    assert sum("is whole" in line for line in lines) == len(TOPOLOGIES)
    assert any(line.startswith("first   leg") and line.endswith("equal bit for bit") for line in lines)
    curves = [line.split() for line in lines if line.startswith(("uninterrupted  █", "resumed        █"))]
    assert len(curves) == 2 and curves[0][1] == curves[1][1]
    head = next(number for number, line in enumerate(lines) if line.split()[:2] == ["step", "uninterrupted"])
    table = [line.split() for line in lines[head + 1 : lines.index("", head)]]
    assert [int(row[0]) for row in table] == list(range(1, STEPS + 1))
    assert [float(row[1]) for row in table] == pytest.approx(list(job.losses("uninterrupted").values()), abs=1e-6)
    seconds = lines[lines.index("Seconds") + 2 :][:5]
    assert [line.split()[0] for line in seconds] == ["uninterrupted", *TOPOLOGIES, "all"]


def test_the_losses_are_drawn_with_a_curve_for_each_leg(job: Job, tmp_path: Path, python: Run) -> None:
    pytest.importorskip("matplotlib")  # of the extra bench, which the tests do without
    done = python([EXAMPLES / "losses.py", job.folder, tmp_path / "losses.svg"], env=ENV)
    assert done.returncode == 0, done.stdout + done.stderr
    drawn = (tmp_path / "losses.svg").read_text()
    assert re.findall(r">(\w+) leg<", drawn) == list(TOPOLOGIES)


@pytest.mark.parametrize("steps", ["0", "10"])
def test_a_number_of_steps_that_makes_no_legs_is_refused(steps: str, tmp_path: Path, python: Run) -> None:
    done = python([EXAMPLES / "main_job.py", "--steps", steps, "--dir", tmp_path], env=ENV)
    assert done.returncode == 2
    assert "multiple of 3" in done.stderr
