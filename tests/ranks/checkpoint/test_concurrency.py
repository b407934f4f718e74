"""Several processes at one path: each of them finds a whole checkpoint or none, and no save disturbs another."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_shardckpt.errors import CheckpointNotFoundError
from lightning_shardckpt.format.index import ROOT_NAME
from lightning_shardckpt.storage.local_storage import LocalDraft, LocalStorage
from lightning_shardckpt.storage.protocol import read_all
from tests.support.faults import without_flags
from tests.support.pool import run_ranks

LOCAL = LocalStorage()
LOCAL_WITHOUT_FLAGS = LocalStorage(rename=without_flags)
FILES = tuple(f"model-dist-00000-shard-0000{number}.safetensors" for number in (1, 2, 3))
WAYS = pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "in place"])


def save_id(rank: int, number: int) -> str:
    return f"{number:08x}{rank:08x}{0:016x}"


def begun(path: str, name: str, exchange: bool = True) -> LocalDraft:
    draft = (LOCAL if exchange else LOCAL_WITHOUT_FLAGS).draft(path, name)
    draft.begin()
    return draft


def finish(draft: LocalDraft, name: str) -> None:
    fill(draft, name)
    draft.publish()


def fill(draft: LocalDraft, name: str) -> None:
    for file in FILES:
        draft.write(file, [name.encode(), bytes(100)])
    draft.write(ROOT_NAME, [b'"prefix":"' + draft.prefix.encode() + b'"', name.encode()])


def held(path: str) -> str | None:
    """The save whose checkpoint is at the path, None if there is none; fails if it is not whole."""
    for _ in range(100):
        try:
            reader = LOCAL.open(path)
        except CheckpointNotFoundError:
            return None
        try:
            root = read_all(reader, ROOT_NAME)
            found = {root[-32:], *(read_all(reader, file)[:32] for file in FILES)}
        except OSError as error:  # a load begins again, too
            assert error.errno == errno.ESTALE
            continue
        finally:
            reader.close()
        (content,) = found
        return content.decode()
    raise AssertionError(f"{path} is always being replaced")


def gathered(value: Any) -> list[Any]:
    """What every rank says; also a barrier."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def contested(path: str, rounds: int, exchange: bool) -> None:
    """Both ranks save to one path at once, again and again."""
    rank = dist.get_rank()
    for number in range(rounds):
        name, outcome = save_id(rank, number), "won"
        dist.barrier()
        try:
            finish(begun(path, name, exchange), name)
        except FileExistsError as error:
            assert "another process is saving" in str(error)
            outcome = "lost"
        outcomes, current = gathered(outcome), held(path)
        assert current in [save_id(r, number) for r, outcome in enumerate(outcomes) if outcome == "won"]
        assert gathered(current) == [current] * 2


@WAYS
def test_of_two_saves_to_one_path_at_least_one_wins_and_it_is_whole(exchange: bool, tmp_path: Path) -> None:
    run_ranks(2, contested, str(tmp_path / "x"), 30, exchange)
    left = [name for name in os.listdir(tmp_path) if name != "x"]
    begun(str(tmp_path / "x"), "f" * 32).discard()
    assert os.listdir(tmp_path) == ["x"], left


def saved_while_read(path: str, rounds: int, exchange: bool) -> None:
    """Rank 0 saves without a pause; rank 1 reads without a pause, then for rounds in step."""
    rank, seen = dist.get_rank(), []
    if rank == 0:
        finish(begun(path, save_id(0, 0)), save_id(0, 0))
    dist.barrier()
    for number in range(1, rounds):  # out of step
        if rank == 0:
            finish(begun(path, save_id(0, number), exchange), save_id(0, number))
        else:
            seen.append(held(path))
    assert None not in seen
    assert seen == sorted(seen)  # never an older one after a newer one
    dist.barrier()
    for number in range(rounds, 2 * rounds):  # in step: replaced while it is open, and no file of it is open yet
        reader = LOCAL.open(path) if rank == 1 else None
        dist.barrier()
        if rank == 0:
            finish(begun(path, save_id(0, number), exchange), save_id(0, number))
        dist.barrier()
        if reader is not None:
            with pytest.raises(OSError, match="was replaced or deleted while it was read"):
                read_all(reader, FILES[0])
            reader.close()
        assert held(path) == save_id(0, number)


@WAYS
def test_a_reader_finds_the_old_one_or_the_new_one_whole(exchange: bool, tmp_path: Path) -> None:
    run_ranks(2, saved_while_read, str(tmp_path / "x"), 25, exchange)
    begun(str(tmp_path / "x"), "f" * 32).discard()
    assert os.listdir(tmp_path) == ["x"]


def saved_and_deleted(path: str, rounds: int) -> None:
    """Rank 0 saves, rank 1 deletes, rank 2 reads, all at once."""
    rank = dist.get_rank()
    for number in range(rounds):
        dist.barrier()
        if rank == 0:
            finish(begun(path, save_id(0, number)), save_id(0, number))
        elif rank == 1:
            with suppress(FileNotFoundError):
                assert LOCAL.remove(path) == []
        else:
            assert held(path) in (None, save_id(0, number), save_id(0, number - 1))
        dist.barrier()
        assert held(path) in (None, save_id(0, number))


def test_saving_deleting_and_reading_at_once(tmp_path: Path) -> None:
    run_ranks(3, saved_and_deleted, str(tmp_path / "x"), 30)
    finish(begun(str(tmp_path / "x"), "f" * 32), "f" * 32)
    assert os.listdir(tmp_path) == ["x"]
