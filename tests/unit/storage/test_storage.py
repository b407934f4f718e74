"""Every backend keeps the promises of the protocol. Oracles: what was written; a dict of paths."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lightning_shardckpt.errors import CheckpointNotFoundError
from lightning_shardckpt.format.index import ROOT_NAME
from lightning_shardckpt.storage.protocol import read_all
from lightning_shardckpt.storage.router import StorageRouter
from tests.support.published import ID, LOCAL, OTHER_ID, content, put, root_of
from tests.support.stores import IMPATIENT, Bucket


@pytest.fixture(params=["disk", "in place", "memory", "s3"])
def kind(request: pytest.FixtureRequest) -> str:
    """A file system, a directory in it that is filled in place, this process's memory, and a store that speaks S3."""
    found: str = request.param
    return found


@pytest.fixture
def storage(kind: str, request: pytest.FixtureRequest) -> StorageRouter:
    s3: Bucket | None = request.getfixturevalue("s3") if kind == "s3" else None
    return StorageRouter(tuning=IMPATIENT, storage_options=s3 and s3.options)


@pytest.fixture
def path(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    path = f"{tmp_path}/runs/step-1.ckpt"
    if kind == "s3":
        return str(request.getfixturevalue("s3").url("runs", "step-1.ckpt"))
    if kind == "in place":
        os.makedirs(path)
    return f"memory:/{path}" if kind == "memory" else path


def test_a_published_checkpoint_replaces_the_old_one_whole(storage: StorageRouter, path: str) -> None:
    put(storage, path, ID, a=b"old", only_old=b"")
    first, second = storage.draft(path, OTHER_ID), storage.draft(path, OTHER_ID)
    first.begin()
    second.write("b", [b"of another rank"])
    first.write("a", [b"one", memoryview(b"two"), b"", memoryview(b"three")])
    first.write("empty", [])
    with pytest.raises(FileExistsError):
        first.write("a", [b"again"])
    first.write(ROOT_NAME, (part for part in [root_of(OTHER_ID, first.prefix)]))
    assert content(storage, path) == {"a": b"old", "only_old": b""}
    first.publish()
    assert content(storage, path) == {"a": b"onetwothree", "b": b"of another rank", "empty": b""}
    assert first.notes == second.notes == []


def test_a_buffer_may_be_used_again_after_it_was_given(storage: StorageRouter, path: str) -> None:
    def parts() -> Iterator[memoryview]:
        buffer = bytearray(6 << 20)
        for value in range(4):
            buffer[:] = bytes([value]) * len(buffer)
            yield memoryview(buffer)

    draft = storage.draft(path, ID)
    draft.begin()
    draft.write("a", parts())
    draft.write(ROOT_NAME, [root_of(ID, draft.prefix)])
    draft.publish()
    assert content(storage, path)["a"] == b"".join(bytes([value]) * (6 << 20) for value in range(4))


def test_ranges_are_read_into_the_memory_that_is_given_by_several_threads(storage: StorageRouter, path: str) -> None:
    put(storage, path, a=bytes(range(100)))
    reader = storage.open(path)
    target = bytearray(b"." * 10)
    reader.read_into("a", 90, memoryview(target)[2:7])
    assert target == b".." + bytes(range(90, 95)) + b"..."
    reader.read_into("a", 100, memoryview(bytearray()))
    assert reader.size("a") == 100
    with pytest.raises(EOFError, match="a ends at byte 100"):
        reader.read_into("a", 95, memoryview(target))
    with pytest.raises(FileNotFoundError):
        reader.size("b")
    with pytest.raises(FileNotFoundError):
        reader.read_into("b", 0, memoryview(target))
    with ThreadPoolExecutor(4) as threads:
        assert set(threads.map(lambda _: read_all(reader, "a"), range(8))) == {bytes(range(100))}
    reader.close()
    reader.close()


def test_a_removal_and_a_save_leave_the_files_of_a_save_that_goes_on(
    storage: StorageRouter, path: str, kind: str
) -> None:
    put(storage, path, a=b"old")
    draft = storage.draft(path, OTHER_ID)
    draft.begin()
    draft.write("a", [b"new"])
    assert storage.remove(path) == []
    draft.write(ROOT_NAME, [root_of(OTHER_ID, draft.prefix)])
    if path.startswith("/"):
        draft.publish()
        assert content(storage, path) == {"a": b"new"}
    else:
        with pytest.raises(FileExistsError, match="or removed it"):
            draft.publish()
        draft.discard()


@pytest.mark.parametrize("when", ["before", "meanwhile"])
@pytest.mark.parametrize("what", ["a file", "a directory of somebody"])
def test_what_is_not_ours_is_never_replaced(what: str, when: str, tmp_path: Path) -> None:
    target = tmp_path / "step-1.ckpt"

    def appear() -> None:
        if what == "a file":
            target.write_text("thesis")
        else:
            target.mkdir()
            (target / "thesis").touch()

    draft = LOCAL.draft(str(target), ID)
    with pytest.raises(OSError, match=r"(?i)(not empty|not a directory).*step-1\.ckpt|step-1\.ckpt.* not empty"):
        if when == "before":
            appear()
        draft.begin()
        appear()
        draft.write(ROOT_NAME, [b""])
        draft.publish()
    draft.discard()
    assert os.listdir(tmp_path) == ["step-1.ckpt"]
    with pytest.raises(CheckpointNotFoundError):
        LOCAL.remove(str(target))
    assert target.is_file() or os.listdir(target) == ["thesis"]
