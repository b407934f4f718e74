"""Ranks that hold different tensors, as pipeline stages or per-rank experts do, save one checkpoint together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_shardckpt.checkpoint.checkpoint import load_full, save
from lightning_shardckpt.checkpoint.save_job import RunInfo, SaveOptions
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.errors import FormatError, MismatchError
from lightning_shardckpt.state.snapshot import Leaves, Snapshot
from tests.support.pool import run_ranks


def tensor(seed: int) -> torch.Tensor:
    return torch.randn(50, 9, generator=torch.Generator().manual_seed(seed))


# Of each rank: seeds of tensors by name, and aliases.
HELD: dict[str, list[tuple[dict[str, int], dict[str, str]]]] = {
    "nothing in common": [({"a": 1}, {}), ({"b": 2}, {}), ({"c": 3}, {})],
    "nothing at all on a rank": [({}, {}), ({"a": 1, "b": 2}, {}), ({"c": 3}, {})],
    "one tensor on all ranks": [({"a": 1, "b": 2}, {}), ({"b": 2}, {}), ({"b": 2, "c": 3}, {})],
    "known by an alias only": [({"a": 1, "c": 3}, {"b": "a"}), ({"b": 1}, {}), ({"b": 1}, {})],
    "an alias of one": [({"a": 1, "c": 3}, {}), ({"a": 1, "c": 3}, {"b": "a"}), ({"a": 1}, {})],
}


def save_all(folder: str) -> None:
    ranks = Ranks.of_default_group(30)
    for case, by_rank in HELD.items():
        seeds, aliases = by_rank[ranks.rank]
        leaves = Leaves({name: tensor(seed) for name, seed in seeds.items()}, aliases)
        snapshot = Snapshot({"model": leaves}, {}, {"trainer": {"global_step": 1}})
        save(f"{folder}/{case}.ckpt", lambda s=snapshot: s, ranks=ranks, run=RunInfo(1), options=SaveOptions(1))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of each case."""
    folder = tmp_path_factory.mktemp("groups")
    run_ranks(3, save_all, str(folder))
    return folder


@pytest.mark.parametrize("case", HELD)
def test_union_of_what_the_ranks_hold_is_stored_once(case: str, saved: Path) -> None:
    by_rank, found = HELD[case], load_full(saved / f"{case}.ckpt")["state_dict"]
    expected = {name: seed for seeds, _ in by_rank for name, seed in seeds.items()}
    expected |= {alias: expected[of] for _, aliases in by_rank for alias, of in aliases.items()}
    assert found.keys() == expected.keys() == set("abc")
    assert all(torch.equal(found[name], tensor(seed)) for name, seed in expected.items())


def refused(leaves: dict[str, torch.Tensor], path: str) -> str:
    with pytest.raises((FormatError, MismatchError)) as raised:
        save(
            path,
            lambda: Snapshot({"model": Leaves(leaves)}, {}, {}),
            ranks=Ranks.of_default_group(30),
            run=RunInfo(),
            options=SaveOptions(1),
        )
    return str(raised.value)


def disagree(path: str) -> list[str]:
    """A tensor has other shapes on other ranks; a rank lacks a key of a sharded tensor."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (3,))
    sharded = {n: distribute_tensor(tensor(1), mesh, [Shard(0)]) for n in "abc" if (rank, n) != (1, "b")}
    return [refused({"a": torch.zeros(rank + 1)}, path), refused(sharded, path)]


def test_ranks_that_hold_what_does_not_fit_together_are_named_on_all(tmp_path: Path) -> None:
    for shapes, lacking in run_ranks(3, disagree, str(tmp_path / "a.ckpt")):
        assert "'a'" in shapes and "(1,)" in shapes and "(2,)" in shapes
        assert "model: the boxes of 'b'" in lacking and "none of the ranks ((0, 1), (2, 3)) has the box" in lacking
    assert list(tmp_path.iterdir()) == []
