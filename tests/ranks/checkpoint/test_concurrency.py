"""Several processes at one path: each of them finds a whole checkpoint or none, and no save disturbs another."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_shardckpt import load, save
from lightning_shardckpt.errors import CheckpointNotFoundError
from tests.support.pool import run_ranks

PREPARED = pytest.mark.parametrize("prepared", [False, True], ids=["exchanged", "filled in place"])


class Job:
    """This rank alone, as a process of its own."""

    def __init__(self, path: str) -> None:
        self.rank, self.path = dist.get_rank(), path
        self.alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][self.rank]

    def save(self, value: int) -> None:
        state = {"w": torch.full((600,), value), "value": value}
        save(self.path, state, overwrite=True, process_group=self.alone)

    def held(self) -> int | None:
        """The value of the checkpoint that is at the path, None if there is none; fails if it is not whole."""
        for _ in range(100):
            try:
                found = load(self.path, process_group=self.alone)
            except CheckpointNotFoundError:
                return None
            except OSError as error:  # a third one came while it was read
                assert error.errno == errno.ESTALE
                continue
            assert found["w"].unique().tolist() == [found["value"]]
            return int(found["value"])
        raise AssertionError(f"{self.path} is always being replaced")


def gathered(value: Any) -> list[Any]:
    """What every rank says; also a barrier."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def contested(path: str) -> None:
    """Both ranks save to one path at once, again and again."""
    job = Job(path)
    for number in range(0, 60, 2):
        dist.barrier()
        outcome = number + job.rank
        try:
            job.save(outcome)
        except FileExistsError as error:
            assert "another process is saving" in str(error)
            outcome = -1
        outcomes, current = gathered(outcome), job.held()
        assert current in outcomes and gathered(current) == [current] * 2


@PREPARED
def test_of_two_saves_to_one_path_at_least_one_wins_and_it_is_whole(prepared: bool, tmp_path: Path) -> None:
    (tmp_path / ("x" if prepared else ".")).mkdir(exist_ok=True)
    run_ranks(2, contested, str(tmp_path / "x"))
    assert os.listdir(tmp_path) == ["x"]


def saved_while_read(path: str) -> None:
    """Rank 0 saves without a pause; rank 1 reads without a pause."""
    job, seen = Job(path), list[int | None]()
    if job.rank == 0:
        job.save(0)
    dist.barrier()
    for number in range(1, 40):
        job.save(number) if job.rank == 0 else seen.append(job.held())
    assert None not in seen
    assert seen == sorted(seen)  # type: ignore[type-var]  # never an older one after a newer one


@PREPARED
def test_a_reader_finds_the_old_one_or_the_new_one_whole(prepared: bool, tmp_path: Path) -> None:
    (tmp_path / ("x" if prepared else ".")).mkdir(exist_ok=True)
    run_ranks(2, saved_while_read, str(tmp_path / "x"))
    assert os.listdir(tmp_path) == ["x"]
