"""The scripts in examples/, started as the documentation starts them; the oracle is a run on one process."""

from __future__ import annotations

import json
import os
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lightning_shardckpt import load_keys, metadata
from tests.support.pages import blocks, pages
from tests.support.pool import ROOT, run_ranks
from tests.support.warm_python import Run

pytestmark = pytest.mark.slow

ENV = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


@pytest.fixture
def printed_by(python: Run, tmp_path: Path) -> Callable[..., str]:
    """Runs a command of Python, in the folder of the test."""

    def run(*arguments: str | Path) -> str:
        done = python(arguments, env=ENV, folder=tmp_path, timeout_s=100)
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
    script, moved = ROOT / "examples" / "plain_torch.py", tmp_path / "checkpoints" / "plain-torch"
    (first,) = documented_commands("plain_torch.py")
    assert printed_by(script, *first) == "step 4\n"
    printed = printed_by(*TORCHRUN, script, "--steps=6")
    assert "continuing after step 4 on 2 process(es)" in printed
    assert metadata(moved).world_size == 2
    alone = tmp_path / "checkpoints" / "alone"
    whole, rest = (printed_by(script, "--steps=8", f"--checkpoint={path}") for path in (alone, moved))
    assert "continuing" not in whole and "continuing after step 6" in rest
    assert_close(moved, alone)
    assert sorted(os.listdir(alone.parent)) == ["alone", "plain-torch"]


@pytest.mark.sweep
def test_a_fabric_script_goes_on_on_other_topologies_and_ends_when_all_is_written(
    tmp_path: Path, printed_by: Callable[..., str]
) -> None:
    script, moved = ROOT / "examples" / "with_fabric.py", tmp_path / "checkpoints" / "fabric"
    first, second = documented_commands("with_fabric.py")
    printed_by(script, *first)
    printed = printed_by(script, *second)
    assert "continuing after step 4 on Topology(pipeline=2, replicate=1, shard=1, tensor=1)" in printed
    alone = tmp_path / "checkpoints" / "alone"
    whole, rest = (printed_by(script, "--steps=10", f"--checkpoint={path}") for path in (alone, moved))
    assert "continuing" not in whole and "continuing after step 8" in rest
    assert_close(moved, alone)
    assert sorted(os.listdir(alone.parent)) == ["alone", "fabric"]


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
