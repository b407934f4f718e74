"""A save keeps mode, owner and group of what was there, and fills directories in place that it cannot replace."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from lightning_shardckpt import load, save
from lightning_shardckpt.errors import CheckpointNotFoundError
from lightning_shardckpt.format.index import ROOT_NAME, prefix_of
from lightning_shardckpt.storage.local.local_outputs import LocalOutputs
from lightning_shardckpt.storage.local.local_storage import LocalStorage
from lightning_shardckpt.storage.protocol import read_all
from tests.support.file_systems import without_flags
from tests.support.killed import killed
from tests.unit.storage.test_storage import ID, LOCAL, OTHER_ID, beside, content, own_mounts, put, root_of, run

IS_ROOT = os.geteuid() == 0
NOBODY = 65534
THIRD_ID = "2" * 32
SHARD = "model-dist-00000-shard-00001.safetensors"  # of other names no file is deleted


def other_group() -> int:
    """A group that this process may give a file, other than its own."""
    if IS_ROOT:
        return NOBODY
    return next((group for group in os.getgroups() if group != os.getegid()), os.getegid())


def properties(path: Path) -> tuple[int, int, int]:
    """Mode, owner and group."""
    found = path.stat()
    return stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid


@pytest.fixture
def folder() -> Iterator[Path]:
    """A directory that any user may enter; files of pytest are this user's alone."""
    name = tempfile.mkdtemp()
    os.chmod(name, 0o755)
    yield Path(name)
    for parent, _, _ in os.walk(name):
        os.chmod(parent, 0o700)
    shutil.rmtree(name)


def as_user(work: Callable[[], object]) -> None:
    """Do the work without the rights of root, in a process of its own."""
    child = os.fork()
    if child == 0:
        try:
            if IS_ROOT:
                os.setgroups([])
                os.setegid(NOBODY)
                os.seteuid(NOBODY)
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def given(path: Path, mode: int) -> None:
    """Make a directory of another user who is not root, if this is root."""
    path.mkdir()
    os.chmod(path, mode)
    if IS_ROOT:
        os.chown(path, NOBODY, NOBODY)


# ── mode, owner and group ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("mode", [0o700, 0o2770, 0o2755])
def test_an_empty_directory_is_filled_and_stays_what_it_is(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    path.mkdir()
    os.chown(path, -1, other_group())
    os.chmod(path, mode)
    before, inode = properties(path), path.stat().st_ino
    for save_id in (ID, OTHER_ID):
        put(LOCAL, str(path), save_id, a=save_id.encode())
        assert content(LOCAL, str(path)) == {"a": save_id.encode(), ROOT_NAME: root_of(save_id)}
        assert sorted(os.listdir(path)) == sorted([ROOT_NAME, f"{prefix_of(save_id)}a"])
        assert (properties(path), path.stat().st_ino, os.listdir(tmp_path)) == (before, inode, ["a.ckpt"])
        if mode & stat.S_ISGID:
            assert {file.stat().st_gid for file in path.iterdir()} == {other_group()}
    assert LOCAL.remove(str(path)) == []
    assert (properties(path), os.listdir(path)) == (before, [])
    with pytest.raises(CheckpointNotFoundError):
        LOCAL.open(str(path))


@pytest.mark.parametrize("mode", [0o700, 0o2770, 0o500])
def test_a_checkpoint_is_replaced_by_one_of_its_mode_and_group(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    put(LOCAL, str(path), a=b"old")
    os.chown(path, -1, other_group())
    os.chmod(path, mode)
    before, inode = properties(path), path.stat().st_ino
    put(LOCAL, str(path), OTHER_ID, a=b"new")
    assert (properties(path), content(LOCAL, str(path))["a"]) == (before, b"new")
    assert path.stat().st_ino != inode and os.listdir(tmp_path) == ["a.ckpt"]


def test_a_checkpoint_whose_owner_cannot_be_kept_is_filled_in_place(folder: Path) -> None:
    if not IS_ROOT:
        pytest.skip("only root can make a directory of another user")
    os.chmod(folder, 0o777)
    path = folder / "a.ckpt"
    put(LOCAL, str(path), **{SHARD: b"old"})
    os.chown(path, 0, NOBODY)
    os.chmod(path, 0o2770)
    before = properties(path)
    as_user(lambda: put(LOCAL, str(path), OTHER_ID, **{SHARD: b"new"}))
    assert (properties(path), content(LOCAL, str(path))[SHARD]) == (before, b"new")
    assert len(os.listdir(path)) == 2 and beside(str(path)) == []


@pytest.mark.parametrize("mode", [0o600, 0o640])
def test_an_exported_file_is_replaced_by_one_of_its_mode_and_group(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"old")
    os.chown(path, -1, other_group())
    os.chmod(path, mode)
    before = properties(path)
    with LocalOutputs().file(str(path), overwrite=True) as (file, _):
        assert {properties(found)[0] for found in tmp_path.glob(".tmp-*") if found.suffix == ""} == {mode | 0o700}
        os.write(file, b"new")
    assert (properties(path), path.read_bytes(), os.listdir(tmp_path)) == (before, b"new", [path.name])


def test_an_exported_directory_is_replaced_by_one_of_its_mode_and_group(tmp_path: Path) -> None:
    path = tmp_path / "hf"
    path.mkdir()
    os.chown(path, -1, other_group())
    os.chmod(path, 0o2750)
    before = properties(path)
    with LocalOutputs().directory(str(path), replaceable=lambda _: True) as (create, _), create("a") as file:
        os.write(file, b"new")
    assert (properties(path), (path / "a").read_bytes(), os.listdir(tmp_path)) == (before, b"new", ["hf"])


# ── what cannot be replaced ─────────────────────────────────────────────────────────────────────────────────────────

IN_PLACE = """
from tests.unit.storage.test_storage import ID, LOCAL, OTHER_ID, content, put
path = os.path.join(sys.argv[1], "a.ckpt")
inode = os.stat(path).st_ino
for save_id in (ID, OTHER_ID):
    put(LOCAL, path, save_id, a=save_id.encode())
    assert content(LOCAL, path)["a"] == save_id.encode()
    assert os.stat(path).st_ino == inode and len(os.listdir(path)) == 2
assert LOCAL.remove(path) == [] and os.listdir(path) == [] and os.listdir(sys.argv[1]) == ["a.ckpt"]
print("as it should be")
"""
MOUNTS = {
    "tmpfs": "subprocess.run(['mount', '-t', 'tmpfs', 'none', path], check=True)",
    "bind": "subprocess.run(['mount', '--bind', tempfile.mkdtemp(dir=sys.argv[1] + '/..'), path], check=True)",
    "bind, with a checkpoint": "\n".join(
        [
            "from tests.unit.storage.test_storage import ID, LOCAL, put",
            "other = tempfile.mkdtemp(dir=sys.argv[1] + '/..')",
            "put(LOCAL, f'{other}/x', ID, **{'model-dist-00000-shard-00001.safetensors': b'1'})",
            "subprocess.run(['mount', '--bind', f'{other}/x', path], check=True)",
        ]
    ),
}


@pytest.mark.parametrize("kind", MOUNTS)
def test_a_mount_point_is_filled_in_place(kind: str, tmp_path: Path) -> None:
    (tmp_path / "runs" / "a.ckpt").mkdir(parents=True)
    start = f"import os, subprocess, sys, tempfile\npath = sys.argv[1] + '/a.ckpt'\n{MOUNTS[kind]}\n"
    run(start + IN_PLACE, str(tmp_path / "runs"), *own_mounts())


def test_a_directory_of_ones_own_below_one_of_somebody_is_filled_in_place(folder: Path) -> None:
    given(folder / "a.ckpt", 0o750)
    os.chmod(folder, 0o555)
    path = folder / "a.ckpt"
    before = properties(path)

    def saves() -> None:
        for save_id in (ID, OTHER_ID):
            put(LOCAL, str(path), save_id, a=save_id.encode())
            assert content(LOCAL, str(path))["a"] == save_id.encode() and len(os.listdir(path)) == 2

    as_user(saves)
    assert properties(path) == before
    as_user(lambda: LOCAL.remove(str(path)))
    assert os.listdir(path) == []


@pytest.mark.parametrize("what", ["nothing", "empty directory"])
def test_where_nothing_can_be_written_a_save_is_refused_with_what_to_do(what: str, folder: Path) -> None:
    path = folder / "a.ckpt"
    if what == "empty directory":
        given(path, 0o555)
    os.chmod(folder, 0o555)
    words = "neither this directory nor its parent can be written; change" if what == "empty directory" else str(folder)

    def begins() -> None:
        with pytest.raises(PermissionError, match=words):
            LOCAL.draft(str(path), ID).begin()

    as_user(begins)
    assert list(folder.rglob("*")) == ([path] if what == "empty directory" else [])


def test_the_current_directory_is_filled_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for value in (1.0, 2.0):
        save(".", {"w": torch.full((3,), value)}, overwrite=True)
        assert load(".")["w"].tolist() == [value] * 3
    put(LOCAL, str(tmp_path / "there"), **{SHARD: b"old"})
    monkeypatch.chdir(tmp_path / "there")
    put(LOCAL, ".", OTHER_ID, **{SHARD: b"new"})
    assert content(LOCAL, ".")[SHARD] == b"new" and len(os.listdir()) == 2
    assert sorted(os.listdir(tmp_path)) == ["here", "there"]


def test_where_names_can_not_be_exchanged_a_checkpoint_is_filled_in_place(tmp_path: Path) -> None:
    path, storage = tmp_path / "a.ckpt", LocalStorage(rename=without_flags)
    put(storage, str(path), **{SHARD: b"old"})
    inode = path.stat().st_ino
    assert sorted(os.listdir(path)) == [ROOT_NAME, SHARD]
    put(storage, str(path), OTHER_ID, **{SHARD: b"new"})
    assert content(LOCAL, str(path))[SHARD] == b"new" and len(os.listdir(path)) == 2
    assert (path.stat().st_ino, os.listdir(tmp_path)) == (inode, ["a.ckpt"])


# ── saves in place ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "a.ckpt").mkdir()
    return str(tmp_path / "a.ckpt")


def test_nothing_is_there_before_it_is_published_and_every_rank_finds_the_place(path: str) -> None:
    put(LOCAL, path, a=b"old")
    first, second = LOCAL.draft(path, OTHER_ID), LOCAL.draft(path, OTHER_ID)
    first.begin()
    second.write("b", [b"2"])
    first.write(ROOT_NAME, [root_of(OTHER_ID)])
    assert content(LOCAL, path).keys() >= {"a", ROOT_NAME} and content(LOCAL, path)[ROOT_NAME] == root_of(ID)
    first.publish()
    assert content(LOCAL, path) == {"b": b"2", ROOT_NAME: root_of(OTHER_ID)}


def test_two_jobs_do_not_fill_one_directory(path: str) -> None:
    first = LOCAL.draft(path, ID)
    first.begin()
    before = os.listdir(path)
    with pytest.raises(FileExistsError, match="another process is saving"):
        LOCAL.draft(path, OTHER_ID).begin()
    assert os.listdir(path) == before
    first.discard()
    assert os.listdir(path) == []


@pytest.mark.parametrize("is_first", [True, False])
def test_a_killed_save_is_invisible_and_the_next_one_deletes_its_files(is_first: bool, path: str) -> None:
    def begins() -> None:
        draft = LOCAL.draft(path, OTHER_ID)
        draft.begin()
        draft.write("a", [bytes(3 << 20)])
        draft.write(ROOT_NAME, [root_of(OTHER_ID)])

    if not is_first:
        put(LOCAL, path, a=b"old")
    killed(begins)
    if is_first:
        with pytest.raises(CheckpointNotFoundError):
            LOCAL.open(path)
    else:
        assert read_all(LOCAL.open(path), ROOT_NAME) == root_of(ID)
    draft = LOCAL.draft(path, THIRD_ID)
    draft.begin()
    draft.write(ROOT_NAME, [root_of(THIRD_ID)])
    draft.publish()
    assert os.listdir(path) == [ROOT_NAME]
    assert "1 file, 3.00 MiB" in "\n".join(draft.notes)


def test_files_of_a_save_that_another_machine_may_be_writing_stay(path: str) -> None:
    put(LOCAL, path, a=b"old")
    other = LocalStorage(machine="f" * 16).draft(path, OTHER_ID)
    other.begin()
    other.write("a", [b"other"])
    locks_do_not_reach = LocalStorage(machine="e" * 16)
    claim = next(name for name in os.listdir(path) if name.endswith("f" * 16))
    shutil.copy(f"{path}/{claim}", f"{path}/x")
    os.replace(f"{path}/x", f"{path}/{claim}")  # the same name, and no lock
    put(locks_do_not_reach, path, THIRD_ID, a=b"new")
    other.write(ROOT_NAME, [root_of(OTHER_ID)])
    other.publish()
    assert content(LOCAL, path) == {"a": b"other", ROOT_NAME: root_of(OTHER_ID)}


def test_a_save_whose_files_were_deleted_is_not_committed(path: str) -> None:
    put(LOCAL, path, a=b"old")
    draft = LOCAL.draft(path, OTHER_ID)
    draft.begin()
    draft.write("a", [b"new"])
    draft.write(ROOT_NAME, [root_of(OTHER_ID)])
    os.unlink(f"{path}/{prefix_of(OTHER_ID)}a")
    with pytest.raises(FileExistsError, match="another process saved to"):
        draft.publish()
    draft.discard()
    assert content(LOCAL, path) == {"a": b"old", ROOT_NAME: root_of(ID)}


@pytest.mark.parametrize("written", [False, True])
def test_a_save_to_a_directory_that_is_removed_meanwhile_says_so(written: bool, tmp_path: Path) -> None:
    path, storage = str(tmp_path / "a.ckpt"), LocalStorage(rename=without_flags)
    put(storage, path, **{SHARD: b"old"})
    draft = storage.draft(path, OTHER_ID)
    draft.begin()
    for name in (SHARD, ROOT_NAME) if written else ():
        draft.write(name, [root_of(OTHER_ID)])
    os.rename(path, tmp_path / "removed")
    with pytest.raises(FileExistsError, match=r"another process removed .*a\.ckpt"):
        draft.publish() if written else draft.write(SHARD, [b"new"])
    draft.discard()


def test_the_tools_verify_and_move_a_checkpoint_that_was_filled_in_place(path: str, tmp_path: Path) -> None:
    from lightning_shardckpt.tools.verify import verify

    save(path, {"w": torch.arange(5.0)})
    assert verify(path).findings == ()
    subprocess.run(["cp", "-r", path, str(tmp_path / "copy")], check=True)
    assert load(tmp_path / "copy")["w"].tolist() == [0, 1, 2, 3, 4]


def test_a_removal_leaves_the_files_of_a_save_that_goes_on(path: str) -> None:
    put(LOCAL, path, a=b"old")
    draft = LOCAL.draft(path, OTHER_ID)
    draft.begin()
    draft.write("a", [b"new"])
    assert LOCAL.remove(path) == []
    draft.write(ROOT_NAME, [root_of(OTHER_ID)])
    draft.publish()
    assert content(LOCAL, path) == {"a": b"new", ROOT_NAME: root_of(OTHER_ID)}


def test_a_directory_that_another_save_began_to_fill_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    draft = LOCAL.draft(str(path), ID)
    draft.begin()
    draft.write(ROOT_NAME, [root_of(ID)])
    path.mkdir()
    other = LocalStorage(machine="f" * 16).draft(str(path), OTHER_ID)
    other.begin()
    with pytest.raises(FileExistsError, match="not replaced"):
        draft.publish()
    draft.discard()
    other.write(ROOT_NAME, [root_of(OTHER_ID)])
    other.publish()
    assert content(LOCAL, str(path)) == {ROOT_NAME: root_of(OTHER_ID)} and beside(str(path)) == []
