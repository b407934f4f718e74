"""Checkpoints of pipelines: who writes what, and any topology to any other, bit for bit.

Oracle: torch's own gather of every stage before the save.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn

from lightning_shardckpt import Pipeline, ShardedStrategy
from lightning_shardckpt.consolidate import consolidate
from lightning_shardckpt.parallel.pipeline.placeholder import Placeholder
from tests.support import nets, tiny
from tests.support.pool import run_ranks

State = dict[str, Any]
FSDP: dict[str, Any] = {}
TP = {"tensor_parallel_plan": tiny.TP_PLAN}
PP2 = {"pipeline_parallel_size": 2}
PP3 = {"pipeline_parallel_size": 3}
PP4 = {"pipeline_parallel_size": 4}
LOOPED = {**PP2, "pipeline": Pipeline(stages_per_rank=2)}
IN_V = {**LOOPED, "pipeline": Pipeline(stages_per_rank=2, schedule="zbv_zero_bubble", loss="microbatch")}
TP2 = {"tensor_parallel_size": 2, **TP}


class Deep(tiny.TinyLM):
    """Enough layers for four stages."""

    def _build(self) -> None:
        super()._build()
        self.blocks = nn.ModuleList([tiny.Block() for _ in range(4)])
        if self.hparams["frozen"]:
            self.blocks[1].up.requires_grad_(False)


def train(strategy: State, steps: int, save: str | None, resume: str | None, optimizer: str, seed: int) -> State:
    pl.seed_everything(seed)
    run = tiny.train(module := Deep(optimizer, build_late=True), strategy, steps, save=save, resume=resume)
    return tiny.full_state(module, run.optimizers)


def union(states: list[State]) -> State:
    """What all stages have; what several have must be equal."""
    found: State = {}
    for state in states:
        assert differences_of_common(found, state) == []
        found |= state
    return found


def differences_of_common(a: State, b: State) -> list[str]:
    both = a.keys() & b.keys()
    return tiny.differences({key: a[key] for key in both}, {key: b[key] for key in both})


CASES = [
    ("pp2", 2, PP2, "adamw", [(1, FSDP), (2, LOOPED)]),
    ("in a v", 2, IN_V, "momentum", [(3, PP3)]),
    ("pp2-fsdp2", 4, PP2, "adamw", [(4, {**PP2, **TP2}), (4, PP4)]),
    ("fsdp2", 2, FSDP, "amsgrad", [(4, PP2)]),
]
MARKS = {"pp2": [pytest.mark.slow], "pp2-fsdp2": [pytest.mark.slow, pytest.mark.sweep], "fsdp2": [pytest.mark.slow]}


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c[0], marks=MARKS.get(c[0], [])) for c in CASES]
)
def test_state_is_equal_on_every_other_topology(case: Any, saved: tuple[Path, State], tmp_path: Path) -> None:
    name, world, strategy, optimizer, targets = case
    if name == "pp2":
        path, expected = str(saved[0]), saved[1]
    else:
        path = str(tmp_path / "a.ckpt")
        expected = union(run_ranks(world, train, strategy, 2, path, None, optimizer, 1))
    assert any("/state/" in key for key in expected)
    for target_world in {target_world: None for target_world, _ in targets}:
        some = [target for ranks, target in targets if ranks == target_world]
        for states in zip(*run_ranks(target_world, load_on_all, some, path, optimizer), strict=True):
            assert tiny.differences(expected, union(list(states))) == []


@pytest.mark.slow
@pytest.mark.sweep
def test_three_dimensions_on_eight_processes_and_back(tmp_path: Path) -> None:
    """PP2 x FSDP2 x TP2 to TP4 x FSDP2 and one process, and from there back; to FSDP8 and PP2 x TP4."""
    path = str(tmp_path / "a.ckpt")
    cube = {**PP2, **TP2}
    expected = union(run_ranks(8, train, cube, 2, path, None, "adamw", 1, timeout_s=300))
    targets: list[tuple[int, State]] = [(8, {"tensor_parallel_size": 4, **TP}), (1, FSDP)]
    for number, (world, target) in enumerate(targets):
        back = str(tmp_path / f"{number}.ckpt")
        if world == 8:
            both = tuple(zip(*run_ranks(8, train_twice, target, cube, path, back, timeout_s=300), strict=True))
        else:
            there = run_ranks(world, train, target, 2, back, path, "adamw", 7)
            both = there, run_ranks(8, train, cube, 2, None, back, "adamw", 8, timeout_s=300)
        assert [tiny.differences(expected, union(list(states))) for states in both] == [[], []]
    others = run_ranks(8, load_on_all, [FSDP, {**PP2, "tensor_parallel_size": 4, **TP}], path, "adamw", timeout_s=300)
    for states in zip(*others, strict=True):
        assert tiny.differences(expected, union(list(states))) == []


def load_on_all(targets: list[State], path: str, optimizer: str) -> list[State]:
    return [train(target, 2, None, path, optimizer, 7) for target in targets]


def train_twice(target: State, cube: State, path: str, back: str) -> tuple[State, State]:
    found = train(target, 2, back, path, "adamw", 7)
    dist.barrier()
    return found, train(cube, 2, None, back, "adamw", 8)


def names_in(directory: Path, component: str) -> dict[int, set[str]]:
    """The tensors in the shard files of each rank, read by the safetensors library."""
    found: dict[int, set[str]] = {}
    for file in directory.glob(f"{component}-dist-*.safetensors"):
        with safe_open(file, "pt") as opened:
            found.setdefault(int(file.name.split("-")[2]), set()).update(opened.keys())
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, State]:
    """A checkpoint of two stages, and what they had."""
    path = tmp_path_factory.mktemp("saved") / "a.ckpt"
    return path, union(run_ranks(2, train, PP2, 2, str(path), None, "adamw", 1))


def test_files_of_a_stage_hold_only_its_names(saved: tuple[Path, State]) -> None:
    path, _ = saved
    everywhere = {"gate", "scale", "seen", "mean"}
    first, last = ("embed", "blocks.0", "blocks.1"), ("blocks.2", "blocks.3", "head")
    model = names_in(path, "model")
    assert all(name.startswith(first) for name in model[0] - everywhere)
    assert all(name.startswith(last) for name in model[1] - everywhere)
    assert model[0].isdisjoint(model[1] - everywhere)
    optimizer = names_in(path, "optimizer")
    assert all(name.split("/")[1].startswith(first) for name in optimizer[0] if name.split("/")[1] not in everywhere)
    assert all(name.split("/")[1].startswith(last) for name in optimizer[1] if name.split("/")[1] not in everywhere)
    root = json.loads((path / "checkpoint.index.json").read_text())
    assert root["topology"] == {"pipeline": 2, "replicate": 1, "shard": 1, "tensor": 1}


def train_hugging_face(strategy: State, net: str, save: str | None, resume: str | None, seed: int) -> State:
    pl.seed_everything(seed)
    module = nets.Module(nets.Case(net=net))
    run = tiny.trainer(strategy, max_steps=2, limit_val_batches=0, use_distributed_sampler=False)
    run.fit(module, ckpt_path=resume)
    if save is not None:
        run.save_checkpoint(save)
    return tiny.full_state(module, run.optimizers)


def save_and_load(strategy: State, net: str, save: str, resume: str) -> tuple[State, State]:
    return train_hugging_face(strategy, net, save, None, 1), train_hugging_face(strategy, net, None, resume, 7)


def is_tied(net: str) -> bool:
    module = nets.BUILDERS[net]()
    return module.get_input_embeddings().weight is module.get_output_embeddings().weight


@pytest.mark.slow
def test_a_weight_tied_across_stages_is_stored_once_and_tied_again(tmp_path: Path) -> None:
    net = "tied llama"
    assert is_tied(net)
    path, one = tmp_path / "a.ckpt", tmp_path / "one.ckpt"
    stages, again = map(list, zip(*run_ranks(2, save_and_load, PP2, net, str(path), str(path)), strict=True))
    ((_, alone),) = run_ranks(1, save_and_load, FSDP, net, str(one), str(path))
    tables = [json.loads((p / "checkpoint.index.json").read_text()) for p in (path, one)]
    stored = [set(table["components"]["model"]["tensors"]) for table in tables]
    assert stored[0] == stored[1]
    assert tables[0]["components"]["model"]["aliases"] == tables[1]["components"]["model"]["aliases"] != {}
    expected = union(stages)
    assert differences_of_common(alone, expected) == []
    assert tiny.differences(expected, union(again)) == []


@pytest.mark.slow
def test_a_pipeline_consolidates_as_any_other_topology(saved: tuple[Path, State], tmp_path: Path) -> None:
    (path, expected), file = saved, tmp_path / "model.pt"
    consolidate(path, file)
    found = torch.load(file)
    weights = {f"model/{name}": tensor for name, tensor in found["state_dict"].items()}
    assert tiny.differences({k: v for k, v in expected.items() if k.startswith("model/")}, weights) == []
    module = Deep.load_from_checkpoint(file, optimizer="adamw", build_late=False)
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    assert torch.isfinite(module(tokens)).all()


def all_initial(strategy: State) -> list[tuple[dict[str, Tensor], int]]:
    return [initial(strategy, late) for late in (False, True)]


def initial(strategy: State, late: bool) -> tuple[dict[str, Tensor], int]:
    pl.seed_everything(5)
    module = Deep(build_late=late)
    run = tiny.trainer(strategy, max_steps=0)
    run.fit(module, tiny.loader())
    assert isinstance(run.strategy, ShardedStrategy)
    own = {name: p for name, p in module.named_parameters() if not isinstance(p, Placeholder)}
    return {name: tiny.whole(p) for name, p in own.items()}, sum(p.numel() for p in own.values())


@pytest.mark.slow
def test_initial_weights_are_the_same_on_every_topology_and_no_stage_has_all() -> None:
    """Of models that are built in ``__init__``, and in ``configure_model``."""
    (alone,) = run_ranks(1, all_initial, FSDP)
    for (whole, count), *found in zip(alone, *run_ranks(2, all_initial, LOOPED), strict=True):
        assert tiny.differences(whole, union([state for state, _ in found])) == []
        assert all(numel < count for _, numel in found)
