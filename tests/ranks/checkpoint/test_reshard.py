"""A checkpoint from any topology loads on any other, bit for bit. Oracle: torch's own gather before the save."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

import lightning_shardckpt
from lightning_shardckpt import metadata as open_metadata
from tests.support import tiny
from tests.support.pool import run_each, run_ranks, selected

FSDP: dict[str, Any] = {}
HSDP: dict[str, Any] = {"data_parallel_replicate_size": 2}
TP = {"tensor_parallel_plan": tiny.TP_PLAN}
TP2 = {"tensor_parallel_size": 2, **TP}
OFFLOADED: dict[str, Any] = {"fsdp": lightning_shardckpt.FSDP(cpu_offload=True)}
TP4 = {"tensor_parallel_size": 4, **TP}


def save(strategy: dict[str, Any], path: str, optimizer: str) -> dict[str, Any]:
    return tiny.fit(strategy, 2, save=path, model={"optimizer": optimizer})["state"]


def load(strategy: dict[str, Any], path: str, optimizer: str) -> dict[str, Any]:
    """From other initial weights; trains no step, so that the state is what was loaded."""
    return tiny.fit(strategy, 2, resume=path, seed=7, model={"optimizer": optimizer})["state"]


# Name, ranks, strategy and optimizer of the run that saves; ranks and strategy of each that loads.
CASES: list[tuple[str, int, dict[str, Any], str, list[tuple[int, dict[str, Any]]]]] = [
    ("fsdp4", 4, FSDP, "adamw", [(3, FSDP)]),
    ("fsdp4-to-others", 4, FSDP, "adamw", [(1, FSDP), (2, FSDP), (8, FSDP)]),
    ("tp2", 2, TP2, "amsgrad", [(4, TP4), (1, FSDP)]),
    ("tp2-fsdp2", 4, TP2, "momentum", [(4, FSDP)]),
    ("fsdp4-to-tp", 4, FSDP, "momentum", [(4, TP2)]),
    ("hsdp2x2", 4, HSDP, "adamw", [(3, FSDP)]),
    ("fsdp3", 3, FSDP, "sgd", [(4, HSDP)]),
    ("tp4", 4, TP4, "momentum", [(2, TP2)]),
    ("factored state", 3, FSDP, "adafactor", [(4, FSDP)]),
    ("offloaded", 2, OFFLOADED, "adamw", [(1, FSDP), (3, OFFLOADED)]),
]


SWEPT = ("hsdp2x2", "fsdp4", "fsdp4-to-others", "tp2", "fsdp4-to-tp", "fsdp3", "tp4", "offloaded")
"""What others combine."""


def marks(name: str) -> list[pytest.MarkDecorator]:
    return [] if name == "tp2-fsdp2" else [pytest.mark.slow, *([pytest.mark.sweep] if name in SWEPT else [])]


@pytest.fixture(scope="module")
def states(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, list[Any]]:
    """Of the cases that are selected: what each saved, by name, and what each target has of it, by name and number."""
    folder = tmp_path_factory.mktemp("states")
    saves, loads = {}, {}
    for name, world, strategy, optimizer, targets in (case for case in CASES if case[0] in selected(request, "name")):
        saves[name] = (world, save, strategy, f"{folder}/{name}", optimizer)
        for number, (target_world, target) in enumerate(targets):
            loads[name, number] = (target_world, load, target, f"{folder}/{name}", optimizer)
    return run_each(saves) | run_each(loads)


@pytest.mark.parametrize(
    ("name", "optimizer", "targets"), [pytest.param(c[0], *c[3:], id=c[0], marks=marks(c[0])) for c in CASES]
)
def test_state_is_equal_on_every_other_topology(
    name: str, optimizer: str, targets: Any, states: dict[Any, list[Any]]
) -> None:
    expected = states[name][0]
    assert any("/state/" in key for key in expected) == (optimizer != "sgd")
    for number, (world, _) in enumerate(targets):
        assert len(states[name, number]) == world
        for found in states[name, number]:
            assert tiny.differences(expected, found) == []


@pytest.mark.slow
def test_every_element_is_written_once(tmp_path: Path) -> None:
    """Replicas of HSDP, and norms that each rank of a tensor group has."""
    run_ranks(4, save, {**TP2, "data_parallel_replicate_size": 2}, str(tmp_path / "a.ckpt"), "adamw")
    tensors = open_metadata(tmp_path / "a.ckpt").tensors
    written = Counter[str]()
    for file in (tmp_path / "a.ckpt").glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # it has no iterator
                prefix = "" if file.name.startswith("model") else "optimizer/"
                written[prefix + name] += opened.get_tensor(name).numel()
    assert {name for name in tensors if "norm" in name or "scale" in name}
    for name, info in tensors.items():
        assert written[name] == math.prod(info.shape), name
