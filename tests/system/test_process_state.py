"""A training leaves torch, Lightning and Python in this process as they were."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.pool import ROOT
from tests.support.warm_python import Run

TRAINING = """
import copy, sys, warnings
warnings.simplefilter("ignore")
import lightning.pytorch as pl, torch, torch.distributed as dist, torchmetrics.metric
from lightning.fabric import strategies as fabric_strategies, wrappers
from lightning.pytorch import cli, strategies
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.distributed.tensor import DTensor
from torch.optim import optimizer
from torch.utils import _foreach_utils

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
    for module in (optimizer, _foreach_utils):
        found[f"lists of {module.__name__}"] = tuple(module._foreach_supported_types)
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
    "DTensor handler of aten._is_any_true.default",  # detect_anomaly
    "lists of torch.optim.optimizer",  # sharded tensors among them
    "lists of torch.utils._foreach_utils",
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
