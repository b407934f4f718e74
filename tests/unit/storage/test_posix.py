"""Files are written whole, and stay in the page cache. Oracle: the joined parts."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from lightning_shardckpt.checkpoint.checkpoint import load_full, save
from lightning_shardckpt.checkpoint.save_job import RunInfo, SaveOptions
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.state.trainer import snapshot
from lightning_shardckpt.storage.local.local_storage import LocalStorage
from lightning_shardckpt.storage.local.posix import begin_writeback, write_parts
from lightning_shardckpt.storage.protocol import Bytes
from tests.sweeps.faults.inject import Fault, Interposer

MB = 1 << 20
RANDOM = numpy.random.default_rng(0).bytes(4 * MB)
EDGES = (0, 1, MB - 1, MB, MB + 1, 3 * MB + 7)


@pytest.fixture(autouse=True)
def no_open_files() -> Iterator[None]:
    before = sorted(os.listdir("/proc/self/fd"))
    yield
    assert sorted(os.listdir("/proc/self/fd")) == before


def written(path: Path, parts: Any, writeback_bytes: int = 2 * MB) -> bytes:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        write_parts(file, parts, sync=True, writeback_bytes=writeback_bytes)
    finally:
        os.close(file)
    return path.read_bytes()


def split(sizes: Sequence[int]) -> list[Bytes]:
    """Parts of random bytes, some of them views at odd addresses."""
    found: list[Bytes] = []
    for number, size in enumerate(sizes):
        part = memoryview(RANDOM)[number : number + size]
        found.append(bytes(part) if number % 2 else part)
    return found


@pytest.mark.parametrize("sizes", [(), *((size,) for size in EDGES), EDGES, [700] * 2000, [MB] * 9 + [0] * 600 + [5]])
@pytest.mark.parametrize("writeback_bytes", [1, 8 * MB])
def test_parts_of_all_sizes_arrive_whole(sizes: Sequence[int], writeback_bytes: int, tmp_path: Path) -> None:
    parts = split(sizes)
    assert written(tmp_path / "a", iter(parts), writeback_bytes) == b"".join(parts)


def test_what_was_written_durably_can_be_read_without_the_disk(tmp_path: Path) -> None:
    written(tmp_path / "a", [RANDOM])
    found, file = bytearray(len(RANDOM)), os.open(tmp_path / "a", os.O_RDONLY)
    try:
        assert os.preadv(file, [found], 0, os.RWF_NOWAIT) == len(RANDOM)
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        pytest.skip(f"the file system of {tmp_path} does not say what is in the page cache")
    finally:
        os.close(file)
    assert found == RANDOM


def test_the_kernel_takes_the_advice_for_a_file_and_for_nothing_else(tmp_path: Path) -> None:
    with (tmp_path / "a").open("wb") as file:
        file.write(RANDOM)
        assert begin_writeback(file.fileno())
    pipe = os.pipe()
    assert not begin_writeback(pipe[1])
    for end in pipe:
        os.close(end)


# ── errors ──────────────────────────────────────────────────────────────────────────────────────────────────────────

PARTS = split([1000, 3 * MB, 7, MB // 2])


def ended(folder: Path, fault: Fault) -> tuple[bytes | OSError, list[str]]:
    """What was written, or the error; and the calls."""
    with Interposer(str(folder), fault) as interposer:
        try:
            found: bytes | OSError = written(folder / "a", PARTS)
        except OSError as error:
            found = error
    return found, [call.split()[0] for call in interposer.calls]


def each_call(folder: Path, *names: str) -> list[int]:
    """The numbers of the calls of these names."""
    found, made = ended(folder, Fault("errno"))
    assert found == b"".join(PARTS)
    return [number for number, name in enumerate(made, 1) if name in names]


@pytest.mark.parametrize("kind", ["short", "short from on"])
def test_what_a_write_left_over_is_written(kind: Any, tmp_path: Path) -> None:
    for number in each_call(tmp_path, "writev"):
        assert ended(tmp_path, Fault(kind, number))[0] == b"".join(PARTS)


@pytest.mark.parametrize("kind", ["errno", "sticky"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_every_error_is_raised_and_nothing_follows(kind: Any, code: int, tmp_path: Path) -> None:
    for number in each_call(tmp_path, "writev", "fsync"):
        found, made = ended(tmp_path, Fault(kind, number, code))
        assert isinstance(found, OSError) and found.errno == code
        assert made[number:] == []


def test_an_error_names_the_file(tmp_path: Path) -> None:
    draft = LocalStorage().draft(str(tmp_path / "a.ckpt"), "0" * 32)
    draft.begin()
    with (
        Interposer(str(tmp_path), Fault("sticky", 3, errno.ENOSPC)),
        pytest.raises(OSError, match=rf"No space left.*{tmp_path}.*large\.safetensors"),
    ):
        draft.write("large.safetensors", [bytes(9 * MB)] * 3)
    draft.discard()


# ── without syncs ─────────────────────────────────────────────────────────────────────────────────────────────────


def state(step: int) -> dict[str, Any]:
    return {"state_dict": {"a": torch.arange(600_000.0) + step}, "global_step": step}


def saved(path: str, step: int, *, sync_files: bool) -> list[str]:
    """Save, and remove what was saved; the calls."""
    storage, run_info = LocalStorage(sync_files=sync_files), RunInfo(step)
    with Interposer(os.path.dirname(os.path.dirname(path))) as interposer:
        ranks, options = Ranks.alone(), SaveOptions(1)
        save(path, lambda: snapshot(state(step)), ranks=ranks, run=run_info, options=options, storage=storage)
        assert torch.equal(load_full(path)["state_dict"]["a"], state(step)["state_dict"]["a"])
        storage.remove(path)
    return [call.split()[0] for call in interposer.calls]


def test_without_syncs_a_save_and_a_removal_sync_nothing_and_do_all_else(tmp_path: Path) -> None:
    path = str(tmp_path / "runs" / "a.ckpt")
    made = saved(path, 1, sync_files=False)
    synced = saved(path, 2, sync_files=True)
    assert "fsync" in synced and {"fsync", "fdatasync"} & set(made) == set()
    assert made[1:] == [name for name in synced if name != "fsync"]  # the first one made a directory
