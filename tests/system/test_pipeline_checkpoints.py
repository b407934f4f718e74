"""Checkpoints of pipelines: what each stage writes, and any topology to any other, bit for bit.

Oracle: torch's own gather of every stage before the save.
"""

from __future__ import annotations

import json
from pathlib import Path

import lightning.pytorch as pl
import pytest
from safetensors import safe_open

from lightning_shardckpt import Pipeline
from tests.support import nets, tiny
from tests.support.pipes import LOOPED, State, train, union
from tests.support.pool import run_ranks

FSDP: State = {}
TP = {"tensor_parallel_plan": tiny.TP_PLAN}
TP2, TP4 = {"tensor_parallel_size": 2, **TP}, {"tensor_parallel_size": 4, **TP}
PP2, PP4 = {"pipeline_parallel_size": 2}, {"pipeline_parallel_size": 4}
INTERLEAVED = {**PP2, "pipeline": Pipeline(stages_per_rank=2, schedule="interleaved_1f1b", loss="microbatch")}
SWEEP = [pytest.mark.slow, pytest.mark.sweep]
CASES = [
    pytest.param(2, PP2, "adamw", [(1, FSDP), (2, LOOPED)], id="pp2", marks=pytest.mark.slow),
    pytest.param(2, INTERLEAVED, "momentum", [(3, {"pipeline_parallel_size": 3})], id="interleaved"),
    pytest.param(2, FSDP, "amsgrad", [(4, PP2)], id="fsdp2", marks=pytest.mark.slow),
    pytest.param(4, PP2, "adamw", [(4, {**PP2, **TP2}), (4, PP4)], id="pp2 x fsdp2", marks=SWEEP),
    pytest.param(
        8, {**PP2, **TP2}, "adamw", [(8, TP4), (8, FSDP), (8, {**PP2, **TP4}), (1, FSDP)], id="cube", marks=SWEEP
    ),
]


@pytest.mark.parametrize(("world", "strategy", "optimizer", "targets"), CASES)
def test_state_is_equal_on_every_other_topology_and_back(
    world: int, strategy: State, optimizer: str, targets: list[tuple[int, State]], tmp_path: Path
) -> None:
    path, back = str(tmp_path / "a.ckpt"), str(tmp_path / "back.ckpt")
    expected = union(run_ranks(world, train, strategy, 2, path, None, optimizer, 1, timeout_s=300))
    assert any("/state/" in key for key in expected)
    for number, (target_world, target) in enumerate(targets):
        save = None if number else back
        states = run_ranks(target_world, train, target, 2, save, path, optimizer, 7, timeout_s=300)
        assert tiny.differences(expected, union(states)) == []
    states = run_ranks(world, train, strategy, 2, None, back, optimizer, 8, timeout_s=300)
    assert tiny.differences(expected, union(states)) == []


def names_in(directory: Path, component: str) -> list[set[str]]:
    """Return the names of the tensors in the shard files of both ranks, read by the safetensors library."""
    found: list[set[str]] = [set(), set()]
    for file in directory.glob(f"{component}-dist-*.safetensors"):
        with safe_open(file, "pt") as opened:
            found[int(file.name.split("-")[2])] |= {key.removeprefix("0/") for key in opened.keys()}  # noqa: SIM118
    return found


def test_files_of_a_stage_hold_only_its_names(tmp_path: Path) -> None:
    run_ranks(2, train, PP2, 2, str(tmp_path / "a.ckpt"), None, "adamw", 1)
    everywhere = ("gate", "scale", "seen", "mean")
    of_stages = [("embed", "blocks.0", "blocks.1"), ("blocks.2", "blocks.3", "head")]
    for component in ("model", "optimizer"):
        names = names_in(tmp_path / "a.ckpt", component)
        for own, found in zip(of_stages, names, strict=True):
            assert {name for name in found if not name.startswith((*own, *everywhere))} == set()
            assert any(name.startswith(own) for name in found)
        assert names[0].isdisjoint(names[1])
    root = json.loads((tmp_path / "a.ckpt/checkpoint.index.json").read_text())
    assert root["topology"] == {"pipeline": 2, "replicate": 1, "shard": 1, "tensor": 1}


def train_tied(strategy: State, save: str | None, resume: str | None, seed: int) -> State:
    pl.seed_everything(seed)
    module = nets.Module(nets.Case(net="tied llama"))
    run = tiny.trainer(strategy, max_steps=2, limit_val_batches=0, use_distributed_sampler=False)
    run.fit(module, ckpt_path=resume)
    if save is not None:
        run.save_checkpoint(save)
    return tiny.full_state(module, run.optimizers)


@pytest.mark.slow
def test_a_weight_tied_across_stages_is_stored_once_and_tied_again(tmp_path: Path) -> None:
    path, one = tmp_path / "a.ckpt", tmp_path / "one.ckpt"
    stages = union(run_ranks(2, train_tied, PP2, str(path), None, 1))
    (alone,) = run_ranks(1, train_tied, FSDP, str(one), str(path), 7)
    models = [json.loads((p / "checkpoint.index.json").read_text())["components"]["model"] for p in (path, one)]
    assert set(models[0]["tensors"]) == set(models[1]["tensors"])
    assert models[0]["aliases"] == models[1]["aliases"] != {}
    both = {key: value for key, value in alone.items() if key in stages}
    assert tiny.differences(both, {key: stages[key] for key in both}) == []
    assert tiny.differences(stages, union(run_ranks(2, train_tied, PP2, None, str(one), 7))) == []
