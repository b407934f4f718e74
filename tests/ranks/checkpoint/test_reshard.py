"""A checkpoint from any topology loads on any other, bit for bit. Oracle: torch's own gather before the save."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from lightning_shardckpt import metadata as open_metadata
from tests.support import tiny
from tests.support.pool import run_ranks

FSDP: dict[str, Any] = {}
HSDP: dict[str, Any] = {"data_parallel_replicate_size": 2}
TP = {"tensor_parallel_plan": tiny.TP_PLAN}
TP2 = {"tensor_parallel_size": 2, **TP}
OFFLOADED: dict[str, Any] = {"cpu_offload": True}
TP4 = {"tensor_parallel_size": 4, **TP}


def save(strategy: dict[str, Any], path: str, optimizer: str) -> dict[str, Any]:
    return tiny.fit(strategy, 2, save=path, model={"optimizer": optimizer})["state"]


def load(strategy: dict[str, Any], path: str, optimizer: str, save_as: str | None = None) -> dict[str, Any]:
    """From other initial weights; trains no step, so that the state is what was loaded."""
    return tiny.fit(strategy, 2, resume=path, save=save_as, seed=7, model={"optimizer": optimizer})["state"]


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
    ("factored state", 3, FSDP, "adafactor", [(2, FSDP), (1, FSDP)]),
    ("offloaded", 2, OFFLOADED, "adamw", [(1, FSDP), (3, OFFLOADED)]),
]


SWEPT = ("fsdp4-to-others", "tp2", "fsdp4-to-tp", "tp4", "offloaded")
"""What others combine."""


def marks(name: str) -> list[pytest.MarkDecorator]:
    return [] if name == "tp2-fsdp2" else [pytest.mark.slow, *([pytest.mark.sweep] if name in SWEPT else [])]


Run = tuple[Any, Callable[..., dict[str, Any]], tuple[Any, ...]]
"""A key, and what is called with which arguments."""


def run_all(runs: list[Run]) -> dict[Any, dict[str, Any]]:
    """States by key, one after another in the same processes."""
    return {key: fn(*args) for key, fn, args in runs}


def by_world(runs: Iterable[tuple[int, Run]]) -> dict[Any, list[dict[str, Any]]]:
    """The states of all ranks by key."""
    found: dict[Any, list[dict[str, Any]]] = {}
    of_world: dict[int, list[Run]] = {}
    for world, run in runs:
        of_world.setdefault(world, []).append(run)
    for world, jobs in of_world.items():
        ranks = run_ranks(world, run_all, jobs, timeout_s=300)
        found |= {key: [rank[key] for rank in ranks] for key, *_ in jobs}
    return found


@pytest.fixture(scope="module")
def states(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, list[Any]]:
    """Of the cases that are selected: what each saved, by name, and what each target has of it, by name and number."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    names = {item.callspec.params["case"][0] for item in items if "case" in item.callspec.params}
    folder, cases = tmp_path_factory.mktemp("states"), [case for case in CASES if case[0] in names]
    saved = by_world(
        (world, (name, save, (strategy, f"{folder}/{name}", optimizer)))
        for name, world, strategy, optimizer, _ in cases
    )
    loaded = by_world(
        (world, ((name, number), load, (target, f"{folder}/{name}", optimizer)))
        for name, *_, optimizer, targets in cases
        for number, (world, target) in enumerate(targets)
    )
    return saved | loaded


@pytest.mark.parametrize("case", [pytest.param(c, id=c[0], marks=marks(c[0])) for c in CASES])
def test_state_is_equal_on_every_other_topology(case: Any, states: dict[Any, list[Any]]) -> None:
    name, _, _, optimizer, targets = case
    expected = states[name][0]
    assert any("/state/" in key for key in expected) == (optimizer != "sgd")
    for number, (world, _) in enumerate(targets):
        assert len(states[name, number]) == world
        for found in states[name, number]:
            assert tiny.differences(expected, found) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(HSDP, id="hsdp", marks=pytest.mark.sweep),
        pytest.param(TP4, id="tp", marks=pytest.mark.sweep),
        pytest.param({**TP2, "data_parallel_replicate_size": 2}, id="two"),
    ],
)
def test_every_element_is_written_once(strategy: dict[str, Any], tmp_path: Path) -> None:
    """Replicas of HSDP, and norms that each rank of a tensor group has."""
    run_ranks(4, save, strategy, str(tmp_path / "a.ckpt"), "adamw")
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


@pytest.mark.slow
def test_a_chain_of_topologies_keeps_every_bit(tmp_path: Path) -> None:
    first, second, third = (str(tmp_path / f"{i}.ckpt") for i in range(3))
    expected = run_ranks(4, save, TP2, first, "adamw")[0]
    run_ranks(3, load, FSDP, first, "adamw", second)
    run_ranks(2, load, TP2, second, "adamw", third)
    assert tiny.differences(expected, run_ranks(1, load, FSDP, third, "adamw")[0]) == []
