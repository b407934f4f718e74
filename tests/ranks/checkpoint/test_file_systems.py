"""Paths, links, copies, modes and full disks: what file systems and their users do to checkpoints."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lightning_shardckpt.errors import CheckpointNotFoundError
from lightning_shardckpt.format.index import ROOT_NAME
from lightning_shardckpt.storage.router import StorageRouter
from lightning_shardckpt.storage.temporaries import output_file
from tests.support.pool import run_ranks
from tests.support.published import (
    ID,
    LOCAL,
    OTHER_ID,
    SAVE,
    beside,
    content,
    mounted,
    own_mounts,
    put,
    run,
)

WHOLE = {"a": b"1"}


# ── names ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "name",
    [
        "plain.ckpt",
        "with spaces and 'quotes'\".ckpt",
        "größe=1,5 损失 🎉.ckpt",
        "new\nline.ckpt",
        "back\\slash%20.ckpt",
        "-rf.ckpt",
        "~.ckpt",
        "x" * 255,
    ],
)
def test_any_name_will_do(name: str, tmp_path: Path) -> None:
    path = str(tmp_path / name)
    for _ in range(2):
        put(LOCAL, path, a=b"1")
        assert content(LOCAL, path) == WHOLE
        assert os.listdir(tmp_path) == [name]
    LOCAL.remove(path)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "as_written", ["{}", "{}/", "{}//", "file://{}", "file://{}/", "a.ckpt", "./a.ckpt/", "../{0.parent.name}/a.ckpt"]
)
def test_one_place_has_many_paths(as_written: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path, storage = as_written.format(tmp_path / "a.ckpt"), StorageRouter()
    put(storage, path, a=b"1")
    assert content(LOCAL, str(tmp_path / "a.ckpt")) == content(storage, path) == WHOLE
    put(storage, path, OTHER_ID, a=b"2")
    assert content(storage, path)["a"] == b"2" and os.listdir(tmp_path) == ["a.ckpt"]
    storage.remove(path)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "name", ["x" * 256, "ü" * 128, "d/" * 2100 + "x"], ids=["letters", "letters of two bytes", "the whole path"]
)
def test_a_name_that_is_too_long_is_an_error_before_anything_is_written(name: str, tmp_path: Path) -> None:
    path = str(tmp_path / name)
    for act in (LOCAL.draft(path, ID).begin, output_file(path, overwrite=False).__enter__):
        with pytest.raises(OSError, match="File name too long") as caught:
            act()
        assert caught.value.errno == errno.ENAMETOOLONG
        assert not [p for p in tmp_path.rglob("*") if not p.is_dir() or p.name.startswith(".")]


# ── links ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_path_below_a_linked_directory_is_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "runs").symlink_to("scratch")
    path = str(tmp_path / "runs" / "a.ckpt")
    for _ in range(2):
        put(LOCAL, path, a=b"1")
        assert content(LOCAL, str(tmp_path / "scratch" / "a.ckpt")) == WHOLE
    assert (tmp_path / "runs").is_symlink() and os.listdir(tmp_path / "scratch") == ["a.ckpt"]
    LOCAL.remove(path)
    assert sorted(os.listdir(tmp_path)) == ["runs", "scratch"] and os.listdir(tmp_path / "scratch") == []


def test_a_save_through_either_path_of_a_linked_directory_sees_the_other(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "runs").symlink_to("scratch")
    first = LOCAL.draft(str(tmp_path / "runs" / "a.ckpt"), ID)
    first.begin()
    with pytest.raises(FileExistsError, match="another process is saving"):
        LOCAL.draft(str(tmp_path / "scratch" / "a.ckpt"), OTHER_ID).begin()
    first.discard()


def test_a_link_into_another_directory_is_replaced_where_it_is(tmp_path: Path) -> None:
    other, path = str(tmp_path / "other" / "a.ckpt"), str(tmp_path / "runs" / "a.ckpt")
    put(LOCAL, other, a=b"1")
    os.mkdir(tmp_path / "runs")
    os.symlink("../other/a.ckpt", path)
    assert content(LOCAL, path) == WHOLE
    put(LOCAL, path, OTHER_ID, a=b"2")
    assert content(LOCAL, other) == WHOLE and content(LOCAL, path)["a"] == b"2"
    assert beside(path) == beside(other) == []


# ── copies ────────────────────────────────────────────────────────────────────────────────────────────────────────


def moved(source: Path, target: Path) -> None:
    source.rename(target)


def copied(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)


def archived(source: Path, target: Path) -> None:
    archive = shutil.make_archive(str(target), "tar", source)
    shutil.unpack_archive(archive, target, filter="data")
    os.unlink(archive)


@pytest.mark.parametrize("how", [moved, copied, archived])
def test_a_checkpoint_can_be_moved_and_copied_and_is_one_like_any_other(how: Any, tmp_path: Path) -> None:
    put(LOCAL, str(tmp_path / "a.ckpt"), a=b"1")
    (tmp_path / "elsewhere").mkdir()
    path = tmp_path / "elsewhere" / "b.ckpt"
    how(tmp_path / "a.ckpt", path)
    assert content(LOCAL, str(path)) == WHOLE
    put(LOCAL, str(tmp_path / "elsewhere" / "c.ckpt"), OTHER_ID)  # which cleans up beside it
    assert content(LOCAL, str(path)) == WHOLE
    put(LOCAL, str(path), OTHER_ID, a=b"2")
    LOCAL.remove(str(path))
    assert os.listdir(path.parent) == ["c.ckpt"]


def test_what_is_copied_in_the_middle_of_a_save_is_the_old_checkpoint_and_a_leftover(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "a.ckpt"
    put(LOCAL, str(path), a=b"1")
    draft = LOCAL.draft(str(path), OTHER_ID)
    draft.begin()
    draft.write("a", [b"2"])
    copied(path.parent, tmp_path / "copy")
    draft.write(ROOT_NAME, [b""])
    draft.publish()
    copy = str(tmp_path / "copy" / "a.ckpt")
    leftover, _ = beside(copy)  # and its claim
    assert content(LOCAL, copy) == WHOLE
    with pytest.raises(CheckpointNotFoundError):
        LOCAL.open(os.path.join(tmp_path, "copy", leftover))
    put(LOCAL, copy, "2" * 32)
    assert beside(copy) == []


# ── modes, and places for temporary files ─────────────────────────────────────────────────────────────────────────


def modes(directory: Path) -> dict[str, int]:
    return {str(p.relative_to(directory)): stat.S_IMODE(p.stat().st_mode) for p in directory.rglob("*")}


@pytest.mark.parametrize("umask", [0o077, 0o002])
def test_all_modes_follow_the_umask(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        put(LOCAL, str(tmp_path / "deep" / "er" / "a.ckpt"), a=b"")
        with output_file(str(tmp_path / "out" / "file"), overwrite=False) as (file, _):
            os.write(file, b"1")
    finally:
        os.umask(before)
    found = modes(tmp_path)
    files = {"deep/er/a.ckpt/a", f"deep/er/a.ckpt/{ROOT_NAME}", "out/file"}
    assert {name: mode for name, mode in found.items() if name in files} == dict.fromkeys(files, 0o666 & ~umask)
    assert {mode for name, mode in found.items() if name not in files} == {0o777 & ~umask}


def everything(directory: str, temporary: str) -> list[str]:
    """Save, load, replace, consolidate and remove with a TMPDIR that is of no use."""
    import tempfile

    import torch

    from lightning_shardckpt import ShardCkptIO
    from lightning_shardckpt.consolidate import consolidate

    os.environ["TMPDIR"] = temporary

    def refuse(*args: object, **kwargs: object) -> str:
        raise AssertionError("the place for temporary files was asked for")

    tempfile.gettempdir = tempfile.mkstemp = tempfile.mkdtemp = refuse  # type: ignore[assignment]
    io, path = ShardCkptIO(), f"{directory}/a.ckpt"
    for number in range(2):
        state = {"state_dict": {"w": torch.full((1000,), float(number))}, "pytorch-lightning_version": "2.6.0"}
        io.save_checkpoint(state | {"global_step": number}, path)
        assert io.load_checkpoint(path)["state_dict"]["w"][0] == number
    assert torch.load(consolidate(path))["global_step"] == 1
    io.remove_checkpoint(path)
    return os.listdir(directory)


def test_the_directory_for_temporary_files_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    temporary = "/nowhere/at/all"
    assert run_ranks(1, everything, str(tmp_path / "runs"), temporary) == [["a.ckpt.consolidated"]]


def test_a_parent_that_may_not_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere; test_storage has a file system that is read-only")
    (tmp_path / "closed").mkdir(mode=0o555)
    with pytest.raises(PermissionError, match="closed"):
        put(LOCAL, str(tmp_path / "closed" / "a.ckpt"))


def test_what_is_in_the_way_of_a_parent_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(NotADirectoryError, match="file"), output_file(str(tmp_path / "file" / "a"), overwrite=False):
        pass
    for path in ("link/a.ckpt", "link/deep/a.ckpt"):
        with pytest.raises(FileNotFoundError, match="link"):
            put(LOCAL, str(tmp_path / path))


# ── full disks ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("options", ["-osize=1m", "-osize=4m,nr_inodes=6"], ids=["bytes", "inodes"])
def test_a_full_disk_leaves_the_old_checkpoint_and_nothing_else(options: str, tmp_path: Path) -> None:
    # with the root of the file system: the old checkpoint and its 2 files, the new one and its first
    script = SAVE.replace("LIMIT", "").replace("EXPECTED", "errno.ENOSPC")
    run(mounted(script, options), str(tmp_path), *own_mounts())


FULL = """
import errno, os
from lightning_shardckpt.storage.posix import write_at
from lightning_shardckpt.storage.temporaries import output_file
output = sys.argv[1]
try:
    with output_file(output, overwrite=False) as (file, notes):
        write_at(file, memoryview(bytes(2 << 20)), 0)
except OSError as error:
    assert error.errno == errno.ENOSPC, error
    assert os.listdir(os.path.dirname(output)) == []
    print("as it should be")
"""


def test_a_full_disk_leaves_nothing_of_a_consolidation(tmp_path: Path) -> None:
    run(mounted(FULL, "-osize=1m"), str(tmp_path), *own_mounts())
