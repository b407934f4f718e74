"""Several processes at one path: each of them finds a whole checkpoint or none, and no save disturbs another."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_shardckpt.errors import CheckpointNotFoundError
from lightning_shardckpt.format.index import ROOT_NAME
from lightning_shardckpt.storage.local_reader import LocalReader
from lightning_shardckpt.storage.local_storage import LocalDraft, LocalStorage
from lightning_shardckpt.storage.posix import Rename, rename_with_flag
from lightning_shardckpt.storage.protocol import read_all
from tests.support.faults import without_flags
from tests.support.pool import run_ranks

LOCAL = LocalStorage()
LOCAL_WITHOUT_FLAGS = LocalStorage(rename=without_flags)
FILES = tuple(f"model-dist-00000-shard-0000{number}.safetensors" for number in (1, 2, 3))
WAYS = pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "in place"])
IN_PLACE_IS_SLOW = pytest.mark.parametrize(
    "exchange", [pytest.param(True, id="exchange"), pytest.param(False, id="in place", marks=pytest.mark.slow)]
)


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


def contested(path: str, rounds: int, exchange: bool) -> int:
    """Both ranks save to one path at once; returns how many rounds had a loser."""
    rank, lost, current = dist.get_rank(), 0, None
    for number in range(rounds):
        name, outcome = save_id(rank, number), "won"
        dist.barrier()
        try:
            finish(begun(path, name, exchange), name)
        except FileExistsError as error:
            assert "another process is saving" in str(error)
            outcome = "lost"
        outcomes = gathered(outcome)
        assert "won" in outcomes
        lost += "lost" in outcomes
        current = held(path)
        assert current in [save_id(r, number) for r, outcome in enumerate(outcomes) if outcome == "won"]
        assert gathered(current) == [current] * 2
    return lost


@IN_PLACE_IS_SLOW
def test_of_two_saves_to_one_path_at_least_one_wins_and_it_is_whole(exchange: bool, tmp_path: Path) -> None:
    run_ranks(2, contested, str(tmp_path / "x"), 30, exchange)
    left = [name for name in os.listdir(tmp_path) if name != "x"]
    begun(str(tmp_path / "x"), "f" * 32).discard()
    assert os.listdir(tmp_path) == ["x"], left


def while_the_other_saves(path: str, rounds: int, exchange: bool) -> int:
    """In turn one rank is in the middle of a save and the other one tries; returns how often that was refused."""
    rank, refused = dist.get_rank(), 0
    for number in range(rounds):
        name, first = save_id(rank, number), number % 2 == rank
        draft = begun(path, name, exchange) if first else None
        before = gathered(held(path))[0]
        if draft is None:
            try:
                begun(path, name, exchange)
            except FileExistsError:
                refused += 1
        assert gathered(held(path)) == [before] * 2
        if draft is not None:
            finish(draft, name)
            assert draft.notes == []
        dist.barrier()
        assert gathered(held(path)) == [save_id(number % 2, number)] * 2
    return refused


@IN_PLACE_IS_SLOW
def test_who_saves_to_a_path_that_is_being_saved_to_is_refused_each_time(exchange: bool, tmp_path: Path) -> None:
    assert run_ranks(2, while_the_other_saves, str(tmp_path / "x"), 20, exchange) == [10, 10]
    assert os.listdir(tmp_path) == ["x"]


def saved_while_read(path: str, rounds: int, exchange: bool) -> tuple[int, int]:
    """Rank 0 saves without a pause; rank 1 reads without a pause, then for rounds in step."""
    rank = dist.get_rank()
    if rank == 0:
        finish(begun(path, save_id(0, 0)), save_id(0, 0))
    dist.barrier()
    seen = []
    for number in range(1, rounds):  # out of step
        if rank == 0:
            finish(begun(path, save_id(0, number), exchange), save_id(0, number))
        else:
            seen.append(held(path))
    assert None not in seen
    assert seen == sorted(seen)  # never an older one after a newer one
    changes = len(set(seen))
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
    return changes, len(seen)


@WAYS
def test_a_reader_finds_the_old_one_or_the_new_one_whole(exchange: bool, tmp_path: Path) -> None:
    run_ranks(2, saved_while_read, str(tmp_path / "x"), 25, exchange)
    begun(str(tmp_path / "x"), "f" * 32).discard()
    assert os.listdir(tmp_path) == ["x"]


def saved_and_deleted(path: str, rounds: int) -> tuple[int, int]:
    """Rank 0 saves, rank 1 deletes, rank 2 reads, all at once; returns how many times rank 1 and 2 found one."""
    rank, found = dist.get_rank(), 0
    for number in range(rounds):
        dist.barrier()
        if rank == 0:
            finish(begun(path, save_id(0, number)), save_id(0, number))
        elif rank == 1:
            try:
                assert LOCAL.remove(path) == []
                found += 1
            except FileNotFoundError:
                pass
        else:
            seen = held(path)
            found += seen is not None
            assert seen in (None, save_id(0, number), save_id(0, number - 1))
        dist.barrier()
        assert held(path) in (None, save_id(0, number))
    return rank, found


def test_saving_deleting_and_reading_at_once(tmp_path: Path) -> None:
    run_ranks(3, saved_and_deleted, str(tmp_path / "x"), 30)
    finish(begun(str(tmp_path / "x"), "f" * 32), "f" * 32)
    assert os.listdir(tmp_path) == ["x"]


# ── one at a time: what another process does between two lines ────────────────────────────────────────────────────


def once(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, act: Callable[[], object], *, after: bool) -> None:
    """Have somebody act before or after the next call of a function."""
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(owner, name, original)
        if not after:
            act()
        result = original(*args, **kwargs)
        if after:
            act()
        return result

    monkeypatch.setattr(owner, name, call)


@pytest.fixture
def path(tmp_path: Path) -> str:
    path = str(tmp_path / "x")
    finish(begun(path, save_id(0, 0)), save_id(0, 0))
    return path


def ready(path: str, rename: Rename = rename_with_flag) -> LocalDraft:
    """A draft that was written, and waits to be published."""
    draft = LocalStorage(rename=rename).draft(path, save_id(0, 1))
    draft.begin()
    fill(draft, save_id(0, 1))
    return draft


@pytest.fixture
def draft(path: str) -> LocalDraft:
    return ready(path)


def test_the_target_is_deleted_right_before_the_exchange(path: str) -> None:
    calls = list[int]()

    def removed_before(source: str, target: str, flag: int) -> bool:
        calls.append(flag)
        if len(calls) == 1:
            LOCAL.remove(path)
        return rename_with_flag(source, target, flag)

    ready(path, removed_before).publish()
    assert calls
    assert held(path) == save_id(0, 1) and os.listdir(os.path.dirname(path)) == ["x"]


def test_the_target_is_deleted_while_it_is_looked_at(
    path: str, draft: LocalDraft, monkeypatch: pytest.MonkeyPatch
) -> None:
    once(monkeypatch, os, "listdir", lambda: LOCAL.remove(path), after=True)
    draft.publish()
    assert held(path) == save_id(0, 1) and os.listdir(os.path.dirname(path)) == ["x"]


def test_a_checkpoint_appears_right_before_the_rename(
    path: str, draft: LocalDraft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.rename(path, tmp_path / "y")
    once(monkeypatch, os, "rename", lambda: shutil.copytree(tmp_path / "y", path), after=False)
    draft.publish()
    assert held(path) == save_id(0, 1) and sorted(os.listdir(tmp_path)) == ["x", "y"]


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "in place"])
@pytest.mark.parametrize("after", [False, True])
def test_what_a_reader_opens_is_replaced(
    exchange: bool, after: bool, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = ready(path, rename_with_flag if exchange else without_flags)
    once(monkeypatch, LocalReader, "is_checkpoint", draft.publish, after=after)
    assert held(path) == save_id(0, 1)


def test_a_removed_checkpoint_is_not_found(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    once(monkeypatch, os, "open", lambda: LocalStorage().remove(path), after=False)  # it was looked at before
    assert held(path) is None
    finish(begun(path, save_id(0, 2)), save_id(0, 2))
    once(monkeypatch, os, "rename", lambda: shutil.rmtree(path), after=False)
    with pytest.raises(FileNotFoundError):
        LOCAL.remove(path)
