"""What mypy says of a user's code: the public names have types, right calls pass, and wrong ones are found."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pool import ROOT

RIGHT = """
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, assert_type

import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer
from torch import nn

import lightning_shardckpt
from lightning_shardckpt import (
    CheckpointMonitor,
    ShardCkptIO,
    ShardedStrategy,
    export_adapters,
    full_state_dict,
    load,
    load_from_checkpoint,
    load_keys,
    metadata,
    save,
    save_async,
    wait,
)
from lightning_shardckpt.consolidate import consolidate
from lightning_shardckpt.errors import MismatchError, ShardCkptError
from lightning_shardckpt.fabric import ShardedStrategy as FabricStrategy


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)


io = ShardCkptIO(use_async=True)
plan = {"layer": "colwise"}
strategy = ShardedStrategy(data_parallel_shard_size=2, tensor_parallel_size=2, tensor_parallel_plan=plan)
trainer = Trainer(strategy=strategy, plugins=[io], callbacks=[CheckpointMonitor()])
trainer.fit(Net(), ckpt_path="last")
io.wait()
fabric = Fabric(strategy=FabricStrategy(data_parallel_shard_size=2), plugins=[ShardCkptIO()])

net = Net()
state: dict[str, Any] = {"model": net, "optimizer": torch.optim.AdamW(net.parameters()), "step": 1}
save("a.ckpt", state, overwrite=True)
assert_type(save_async(Path("b.ckpt"), state, replicas="first"), Future[None])
wait()
try:
    assert_type(load("a.ckpt", state, strict=False), dict[str, Any])
except (MismatchError, ShardCkptError) as error:
    print(error)

assert_type(load_keys("a.ckpt", ["model/layer.weight"]), Iterator[tuple[str, Any]])
shapes = {name: tensor.shape for name, tensor in metadata("a.ckpt").tensors.items()}
assert_type(shapes, dict[str, tuple[int, ...]])
with lightning_shardckpt.open("a.ckpt") as checkpoint:
    lazy = checkpoint["model/layer.weight"]
    assert_type(lazy.shape, tuple[int, ...])
    part = lazy[:1]
assert_type(load_from_checkpoint(Net, "a.ckpt"), Net)
assert_type(full_state_dict(net), dict[str, Any])
assert_type(consolidate("a.ckpt", "a.safetensors", format="safetensors"), Path | str)
assert_type(export_adapters("a.ckpt", "adapters"), list[Path | str])
"""
WRONG = """
import lightning_shardckpt
from lightning_shardckpt import ShardCkptIO, ShardedStrategy, load, metadata, save  # right
from lightning_shardckpt import ShardedCheckpointIO  # attr-defined
from lightning_shardckpt.consolidate import consolidate  # right

ShardCkptIO(use_async="yes")  # arg-type
ShardCkptIO(asynchronous=True)  # call-arg
ShardedStrategy(data_parallel_shard_size="2")  # arg-type
save("a.ckpt")  # call-arg
save("a.ckpt", {}, True)  # call-arg
load(1, {})  # arg-type
load("a.ckpt", {}).step  # attr-defined
metadata("a.ckpt").tensors["a"].size  # attr-defined
lightning_shardckpt.open("a.ckpt", mode="r")  # call-arg
consolidate("a.ckpt", format="pickle")  # arg-type
"""
"""Each line with the code of the error that it has."""


@pytest.mark.slow
@pytest.mark.sweep
def test_mypy_passes_right_calls_and_finds_wrong_ones(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="judges the types; of the extra `dev`")
    for name, code in {"right.py": RIGHT, "wrong.py": WRONG}.items():
        (tmp_path / name).write_text(code)
    where = tmp_path / "installed"  # where mypy looks as it does in site-packages: types count only beside py.typed
    where.mkdir()
    (where / "lightning_shardckpt").symlink_to(ROOT / "lightning_shardckpt")
    env = os.environ | {"PYTHONPATH": str(where)}
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--no-error-summary", "right.py", "wrong.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=400, check=False)
    errors = re.findall(r"^(\S+):(\d+): error: .*\[([\w-]+)\]$", done.stdout, re.MULTILINE)
    codes = [line.rpartition("# ")[2] for line in WRONG.splitlines()]
    expected = [("wrong.py", str(n), code) for n, code in enumerate(codes, 1) if re.fullmatch(r"[a-z]+-[a-z]+", code)]
    assert sorted(errors) == sorted(expected), done.stdout + done.stderr
