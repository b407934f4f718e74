"""prove-resume names what a resume loses, on any command line. Oracle: what the script loses by construction."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from lightning_shardckpt.cli import main
from lightning_shardckpt.errors import RankError
from lightning_shardckpt.tools.prove_resume import prove_resume
from tests.support.pool import ROOT
from tests.support.warm_python import Run

SCRIPT = '''"""An ordinary script with saves, a logger and dropout; the last argument: does a resume lose some?"""
import sys
import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset
from lightning_shardckpt import ShardCkptIO, ShardedStrategy

KIND = sys.argv[2]

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.seen = torch.nn.Linear(4, 1), 0

    def training_step(self, batch, index):
        self.seen += 1
        loss = torch.nn.functional.dropout(self.net(batch[0])).square().mean()
        self.log("loss", loss)
        return loss * self.seen if KIND == "loses" else loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)

class Counts(Callback):
    batches = 0

    def on_train_batch_end(self, *args):
        self.batches += 1

    def state_dict(self):
        return {"batches": self.batches}

    def load_state_dict(self, state):
        self.batches = state["batches"] if KIND != "loses" else 0

pl.seed_everything(3)
saves = ModelCheckpoint(sys.argv[1], every_n_train_steps=1, save_top_k=-1)
data = DataLoader(TensorDataset(torch.arange(48.0).view(12, 4) / 48), 2, shuffle=True)
options = {"logger": CSVLogger(sys.argv[1]), "default_root_dir": sys.argv[1], "log_every_n_steps": 1}
options |= {"strategy": ShardedStrategy(), "plugins": [ShardCkptIO()]}
pl.Trainer(accelerator="cpu", devices=1, max_epochs=1, callbacks=[saves, Counts()], **options).fit(Net(), data)
raise SystemExit("never reached")
'''


def proof_of_script(python: Run, folder: Path, kind: str) -> tuple[int, str]:
    """Return the exit status of the command, and what it printed."""
    (folder / "train.py").write_text(SCRIPT)
    command = ["prove-resume", "--steps=4", "-o", folder / "proof", "--", folder / "train.py", folder / "own", kind]
    done = python(["-m", "lightning_shardckpt", *command], env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert not (folder / "own").exists()  # its ModelCheckpoint saved in the folder of the proof, its logger nowhere
    return done.returncode, done.stdout


@pytest.mark.sweep
def test_a_training_that_resumes_is_equal(tmp_path: Path, python: Run) -> None:
    status, text = proof_of_script(python, tmp_path, "nothing")
    assert status == 0 and text.startswith("4 steps, resumed after step 2: compared "), text
    assert text.endswith(", bit by bit\nEQUAL\n")


@pytest.mark.slow
def test_what_a_resume_loses_is_named(tmp_path: Path, python: Run) -> None:
    status, text = proof_of_script(python, tmp_path, "loses")
    names = re.findall(r"^  (\S+): ", text, re.M)
    found = {re.sub("optimizer/0/net.(.*)/momentum_buffer", r"momentum of \1", name) for name in names}
    weights = {f"{part}{name}" for name in ("weight", "bias") for part in ("model/net.", "momentum of ")}
    assert status == 1 and found == weights | {"trainer/callbacks/Counts/batches"}, text
    assert "trainer/callbacks/Counts/batches: expected 4, found 2" in text


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("", "ended before step 8: it trained fewer batches"),
        ("raise SystemExit('a reason of its own')", "ended with status 1.*\n.*\n  a reason of its own"),
        ("import time; time.sleep(600)", "did not end in 2 s and was killed:"),
    ],
    ids=["no fit", "a failure", "a hang"],
)
def test_a_run_that_makes_no_proof_is_an_error(tmp_path: Path, script: str, said: str) -> None:
    (tmp_path / "train.py").write_text(script)
    with pytest.raises(RankError, match=said):
        prove_resume([sys.executable, str(tmp_path / "train.py")], output=str(tmp_path / "proof"), timeout_s=2)


def test_trouble_has_exit_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").touch()
    assert main(["prove-resume", "-o", str(tmp_path / "proof"), "--", str(tmp_path / "train.py")]) == 2
    assert main(["prove-resume", "--steps", "1", "--", str(tmp_path / "train.py")]) == 2
    assert main(["prove-resume", "-o", str(tmp_path), "--", str(tmp_path / "train.py")]) == 2
    assert main(["prove-resume", "--steps", "4"]) == 2
    shown = capsys.readouterr().err
    assert "ended before step 8" in shown and "at least 2 steps" in shown and "is not empty" in shown
