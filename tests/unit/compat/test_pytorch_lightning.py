"""Packages that import pytorch_lightning and those that import lightning.pytorch get one Lightning."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("pytorch_lightning")

UNIFIED = """
import lightning_shardckpt
lightning_shardckpt.unify_lightning()
lightning_shardckpt.unify_lightning()
import pytorch_lightning as pl
import lightning.pytorch, lightning.fabric.plugins.io.checkpoint_io
import lightning_fabric.plugins.io.checkpoint_io as io
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
assert pl is lightning.pytorch and ModelCheckpoint is lightning.pytorch.callbacks.ModelCheckpoint
assert io is lightning.fabric.plugins.io.checkpoint_io and pl.__spec__.name == "lightning.pytorch"
trainer = pl.Trainer(
    accelerator="cpu", devices=1, strategy=lightning_shardckpt.ShardedStrategy(), logger=False, max_steps=1,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
)
from pytorch_lightning.demos.boring_classes import BoringModel
trainer.fit(BoringModel())
assert trainer.global_step == 1
"""
LATE = """
import pytorch_lightning, lightning_shardckpt
try:
    lightning_shardckpt.unify_lightning()
except RuntimeError as error:
    assert "imported already, as packages of their own: lightning_fabric, pytorch_lightning" in str(error)
else:
    raise AssertionError
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [pytest.param(UNIFIED, id="unify_lightning"), pytest.param(LATE, id="late", marks=pytest.mark.sweep)],
)
def test_both_names_are_one_lightning(program: str) -> None:
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
