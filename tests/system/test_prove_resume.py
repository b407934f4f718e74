"""prove-resume: planted faults are found and named, and a whole command runs. Oracle: what was planted."""

from __future__ import annotations

import os
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_shardckpt.cli import main
from lightning_shardckpt.errors import RankError
from lightning_shardckpt.tools.prove_resume import (
    ResumeReport,
    RunPlan,
    Setting,
    prove_resume,
    prove_runs,
    rank_file,
    read_records,
    to_line,
)
from tests.support import planted_faults
from tests.support.pages import DOCS
from tests.support.pool import ROOT, run_ranks
from tests.support.warm_python import Run
from tests.sweeps.twins.proved import proof

SCRIPT = '''"""An ordinary script: a Trainer of its own, with Lightning's own strategy, in its first fit."""
import sys
import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        loss = torch.nn.functional.dropout(self.net(batch[0])).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)

if "unseeded" not in sys.argv:
    pl.seed_everything(3)
saves = ModelCheckpoint(sys.argv[1], every_n_train_steps=1, save_top_k=-1)
data = DataLoader(TensorDataset(torch.arange(48.0).view(12, 4) / 48), 2)
options = {"logger": CSVLogger(sys.argv[1]), "default_root_dir": sys.argv[1], "log_every_n_steps": 1}
pl.Trainer(accelerator="cpu", devices=1, max_epochs=1, callbacks=[saves], **options).fit(Net(), data)
'''


# ── planted faults ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    result: dict[str, list[str]] = run_ranks(1, planted_faults.found_faults, str(tmp_path_factory.mktemp("faults")))[0]
    return result


def test_a_resume_without_a_fault_is_equal(found: dict[str, list[str]]) -> None:
    assert found[""] == []


@pytest.mark.parametrize("fault", planted_faults.FAULTS)
def test_a_planted_fault_is_named_first(found: dict[str, list[str]], fault: str) -> None:
    assert found[fault][:1] and found[fault][0].startswith(planted_faults.FAULTS[fault].named)


def test_what_lightning_does_not_save_is_named(found: dict[str, list[str]]) -> None:
    assert found["an accumulated gradient"][0].startswith("step 5: gradients/left.weight on rank 0")
    assert found["a mean over the epoch"][0].startswith("step 5: logged_by_rank/loss over the epoch so far (value)")


# ── commands ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_a_script_whose_strategy_does_not_go_on_in_the_data(tmp_path: Path, python: Run) -> None:
    script, own, proof = tmp_path / "train.py", tmp_path / "own", tmp_path / "proof"
    script.write_text(SCRIPT)
    command = ["-m", "lightning_shardckpt", "prove-resume", "--steps", "5", "-o", proof, "--", script, own]
    done = python(command, env=os.environ)
    printed = done.stdout
    assert done.returncode == 1, printed + done.stderr
    assert re.search(r"^  step 3, at its start: batch/batch/0 on rank 0: .*$", printed, re.MULTILINE)
    assert not own.exists()  # its ModelCheckpoint saved in the folder of the proof, its logger nowhere
    assert len(list((proof / "straight" / "saves").rglob("*.ckpt"))) == 5
    (straight,), (resumed,) = (read_records(str(proof / run / "records")) for run in ("straight", "resumed"))
    assert [*resumed.moments] == [(2, "restored")] + [(n, when) for n in (3, 4, 5) for when in ("before", "after")]
    assert "loss" in straight.moments[3, "after"]["logged_by_rank"]
    assert resumed.moments[2, "restored"]["weights"] == straight.moments[2, "after"]["weights"]


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("", "recorded nothing"),
        ("raise SystemExit('a reason of its own')", "ended with status 1.*\n.*\n  a reason of its own"),
        ("import time; time.sleep(600)", "did not end in 2 s and was killed:"),
    ],
    ids=["no fit", "a failure", "a hang"],
)
def test_a_run_that_makes_no_proof_is_an_error(tmp_path: Path, script: str, said: str) -> None:
    (tmp_path / "train.py").write_text(script)
    with pytest.raises(RankError, match=said):
        prove_resume([sys.executable, str(tmp_path / "train.py")], output=str(tmp_path / "proof"), timeout_s=2)


SETTING = Setting(rank=0, world=1, strategy="S", precision="32")


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "recorded nothing: it began no fit of a Trainer.*\n.*what it was$"),
        ([to_line(setting=SETTING)], r"after step 0 \(rank 0\), before step 4. The first"),
        ([to_line(setting=replace(SETTING, world=2))], "has 2 ranks, of which 1 recorded here"),
    ],
    ids=["no fit", "too short", "ranks elsewhere"],
)
def test_what_was_recorded_instead_of_a_training_is_said(tmp_path: Path, lines: list[str], said: str) -> None:
    def run(name: str, plan: RunPlan) -> str:
        Path(plan.records).mkdir(parents=True)
        rank_file(plan.records, 0).write_text("".join(lines))
        return "what it was"

    with pytest.raises(RankError, match=said):
        prove_runs(run, tmp_path, steps=4, interrupt_at=2)


def test_trouble_has_exit_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").touch()
    assert main(["prove-resume", "-o", str(tmp_path / "proof"), "--", str(tmp_path / "train.py")]) == 2
    assert main(["prove-resume", "--steps", "1", "--", str(tmp_path / "train.py")]) == 2
    assert main(["prove-resume", "-o", str(tmp_path), "--", str(tmp_path / "train.py")]) == 2
    assert main(["prove-resume", "--steps", "4"]) == 2
    shown = capsys.readouterr().err
    assert "recorded nothing" in shown and "0 < interrupt_at < steps" in shown and "is not empty" in shown


# ── twins ─────────────────────────────────────────────────────────────────────────────────────────────────────────


SWEPT = (("one", "AccumulatesByEpoch", 2), ("tp2", "Adam", 2), ("fsdp2", "LAMB", 2), ("pp2 x fsdp2", "Adam", 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "name", "interrupt_at"),
    [
        ("pp2", "Adam", 2),
        ("one", "Finetunes", 4),  # after BaseFinetuning has thawed layers
        *(pytest.param(*case, marks=pytest.mark.sweep) for case in SWEPT),
    ],
)
def test_natural_training_code_resumes(topology: str, name: str, interrupt_at: int) -> None:
    found = proof(name, topology, interrupt_at=interrupt_at)
    assert found.outcome == "proved", found.said
    assert found.report is not None and {"weights", "optimizer", "gradients", "random"} <= found.report.compared.keys()


# ── whole proofs ──────────────────────────────────────────────────────────────────────────────────────────────────

CONFIG, ONE = str(ROOT / "configs/transformer.yaml"), str(ROOT / "configs/single.yaml")
MAIN_JOB = [str(ROOT / "examples/train.py"), "fit", "--config", CONFIG, "--config", ONE]
TWO, ALONE = ([f"--trainer.devices={n}", f"--trainer.strategy.data_parallel_shard_size={n}"] for n in (2, 1))


@pytest.mark.sweep
def test_the_documented_proof_prints_what_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("examples", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    page = (DOCS / "tools.md").read_text()
    block = re.search(r"```\n\$ python -m lightning_shardckpt (prove-resume .*)\n((?:.*\n)+?)```", page)
    assert block is not None
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(block[1])) == 0
    assert capsys.readouterr().out == block[2]


@pytest.mark.sweep
@pytest.mark.parametrize(("straight", "resumed"), [(TWO, []), (TWO, ALONE), ([], TWO)], ids=["2", "2 to 1", "1 to 2"])
def test_the_main_job_resumes(
    straight: list[str], resumed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    report = prove_resume([*MAIN_JOB, *straight], steps=6, resumed_args=resumed)
    assert report.equal and report.folder is None, report
    assert (report.tolerance > 0) == bool(resumed) == ("random" in report.not_compared)


@pytest.mark.sweep
def test_a_training_that_does_not_repeat_itself_cannot_be_judged(tmp_path: Path) -> None:
    report = proof_of_script(tmp_path, "unseeded")
    assert report.status == 2 and "NOT REPRODUCIBLE" in str(report)
    assert (report.differences[0].step, report.differences[0].phase) == (1, "before")


@pytest.mark.sweep
def test_a_training_that_is_shorter_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"ended by itself after step 6 \(rank 0\), before step 7"):
        proof_of_script(tmp_path, steps=7)


def proof_of_script(folder: Path, *arguments: str, steps: int = 4) -> ResumeReport:
    (folder / "train.py").write_text(SCRIPT)
    command = [str(folder / "train.py"), str(folder / "own"), *arguments]
    return prove_resume(command, steps=steps, output=str(folder / "proof"))
