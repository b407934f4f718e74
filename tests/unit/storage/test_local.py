"""Directories of a file system: whose they are, what killed saves leave, and disks that fail."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import shutil
import signal
import stat
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_shardckpt import load, save
from lightning_shardckpt.errors import CheckpointNotFoundError
from lightning_shardckpt.format.index import ROOT_NAME, prefix_of
from lightning_shardckpt.storage.local_files import open_output, temporary_path, this_machine
from lightning_shardckpt.storage.local_storage import LocalDraft
from lightning_shardckpt.storage.protocol import read_all
from lightning_shardckpt.tools.verify import verify
from tests.support.faults import killed
from tests.support.published import ID, LOCAL, OTHER_ID, SHARD, THIRD_ID, beside, content, own_mounts, put, root_of, run
from tests.sweeps.faults.inject import Interposer

IS_ROOT = os.geteuid() == 0
NOBODY = 65534


@pytest.fixture(params=["beside", "in place"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A path that a save replaces, or fills."""
    path = tmp_path / "runs" / "step-1.ckpt"
    (path if request.param == "in place" else path.parent).mkdir(parents=True)
    return str(path)


beside_only = pytest.mark.parametrize("path", ["beside"], indirect=True)


def put_without_exchange(path: str, **files: bytes) -> list[str]:
    """Publish in a file system that can't exchange two names."""
    with Interposer(os.path.dirname(path), exchange=False):
        return put(LOCAL, path, OTHER_ID, **files)


def begun_elsewhere(path: str, save_id: str) -> tuple[LocalDraft, str]:
    """What a save on another machine, whose locks do not reach this one, has made so far; and its temporary path."""
    draft = begun(path, save_id, a=b"other")
    place = Path(path if draft.prefix else os.path.dirname(path))
    temporary = next(place.glob(f".tmp-*.{this_machine()}"))
    other = temporary.with_suffix("." + "f" * 16)
    shutil.copytree(temporary, other)
    shutil.rmtree(temporary)
    return draft, str(other)


def begun(path: str, save_id: str = OTHER_ID, **files: bytes) -> LocalDraft:
    """A save that goes on in this process."""
    draft = LOCAL.draft(path, save_id)
    draft.begin()
    for name, data in files.items():
        draft.write(name, [data])
    return draft


def finish(draft: LocalDraft, save_id: str = OTHER_ID) -> list[str]:
    draft.write(ROOT_NAME, [root_of(save_id, draft.prefix)])
    draft.publish()
    return draft.notes


def refusing(error: int) -> Callable[..., Any]:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(error, os.strerror(error))

    return refuse


def made_old(folder: str) -> None:
    """Let all that lies below a folder have been changed two hours ago."""
    long_ago = time.time() - 7200
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            os.utime(os.path.join(parent, name), (long_ago, long_ago), follow_symlinks=False)


# A group that this process may give a file, other than its own.
GROUP = NOBODY if IS_ROOT else next((group for group in os.getgroups() if group != os.getegid()), os.getegid())


def properties(path: str | Path) -> tuple[int, int, int]:
    """Mode, owner and group."""
    found = os.stat(path)
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


def test_a_prepared_directory_is_filled_and_stays_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    path.mkdir()
    os.chown(path, -1, GROUP)
    os.chmod(path, 0o2770)
    before, inode = properties(path), path.stat().st_ino
    for save_id in (ID, OTHER_ID):
        put(LOCAL, str(path), save_id, a=save_id.encode())
        assert content(LOCAL, str(path)) == {"a": save_id.encode()}
        assert sorted(os.listdir(path)) == sorted([ROOT_NAME, f"{prefix_of(save_id)}a"])
        assert (properties(path), path.stat().st_ino, os.listdir(tmp_path)) == (before, inode, ["a.ckpt"])
        assert {file.stat().st_gid for file in path.iterdir()} == {GROUP}
    LOCAL.remove(str(path))
    assert (properties(path), os.listdir(path)) == (before, [])


@pytest.mark.parametrize("what", ["checkpoint", "file", "directory"])
def test_what_is_replaced_keeps_mode_and_group(what: str, tmp_path: Path) -> None:
    path = tmp_path / "a"
    put(LOCAL, str(path), a=b"old") if what == "checkpoint" else path.touch() if what == "file" else path.mkdir()
    os.chown(path, -1, GROUP)
    os.chmod(path, 0o2770)
    before, inode = properties(path), path.stat().st_ino
    if what == "checkpoint":
        put(LOCAL, str(path), OTHER_ID, a=b"new")
    else:
        opened = open_output(str(path), is_file=what == "file", replaceable=lambda _: True)
        with opened as (create, _), create("a") as file:
            os.write(file, b"new")
    assert (path if what == "file" else path / "a").read_bytes() == b"new"
    assert properties(path) == before and path.stat().st_ino != inode and os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("why", ["of another owner", "below another owner's", "no exchange of names"])
def test_what_cannot_be_replaced_is_filled_in_place(why: str, folder: Path) -> None:
    path = folder / "a.ckpt"
    put(LOCAL, str(path), **{SHARD: b"old"})
    if why == "of another owner":
        if not IS_ROOT:
            pytest.skip("only root can make a directory of another user")
        os.chown(path, 0, NOBODY)
        os.chmod(path, 0o2770)
        os.chmod(folder, 0o777)
    elif IS_ROOT:
        for place in (path, *path.iterdir(), *([folder] if why.startswith("no") else [])):
            os.chown(place, NOBODY, NOBODY)
    if why == "below another owner's":
        os.chmod(folder, 0o555)
    before, inode = properties(path), path.stat().st_ino
    save_again = put_without_exchange if why.startswith("no") else partial(put, LOCAL, save_id=OTHER_ID)
    as_user(lambda: save_again(path=str(path), **{SHARD: b"new"}))
    assert (properties(path), path.stat().st_ino) == (before, inode)
    assert content(LOCAL, str(path)) == {SHARD: b"new"}
    assert len(os.listdir(path)) == 2 and beside(str(path)) == []


IN_PLACE = """
import os, subprocess, sys
from tests.support.published import ID, LOCAL, OTHER_ID, content, put
path = sys.argv[1] + '/a.ckpt'
subprocess.run(['mount', '-t', 'tmpfs', 'none', path], check=True)
inode = os.stat(path).st_ino
for save_id in (ID, OTHER_ID):
    put(LOCAL, path, save_id, a=save_id.encode())
    assert content(LOCAL, path) == {"a": save_id.encode()}
    assert os.stat(path).st_ino == inode and len(os.listdir(path)) == 2
assert LOCAL.remove(path) == [] and os.listdir(path) == [] and os.listdir(sys.argv[1]) == ["a.ckpt"]
print("as it should be")
"""


def test_a_mount_point_is_filled_in_place(tmp_path: Path) -> None:
    (tmp_path / "runs" / "a.ckpt").mkdir(parents=True)
    run(IN_PLACE, str(tmp_path / "runs"), *own_mounts())


def test_the_current_directory_is_filled_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for value in (1, 2):
        save(".", {"w": torch.full((5,), value)}, overwrite=True)
        assert load(".")["w"].tolist() == [value] * 5 and verify(".").findings == ()
    assert os.listdir(tmp_path) == ["here"]


def test_a_link_is_replaced_and_removed_and_what_it_names_is_read_and_stays(tmp_path: Path) -> None:
    other, path = str(tmp_path / "other.ckpt"), str(tmp_path / "last.ckpt")
    put(LOCAL, other, a=b"other")
    os.symlink("other.ckpt", path)
    assert content(LOCAL, path) == {"a": b"other"}
    with Interposer(os.path.dirname(path), exchange=False):
        draft = begun(path)
        with pytest.raises(FileExistsError, match="can't replace it by a directory in one step"):
            finish(draft)
        draft.discard()
    LOCAL.remove(path)
    for named in ("other.ckpt", "nowhere"):
        os.symlink(named, path)
        if named == "nowhere":
            with pytest.raises(CheckpointNotFoundError, match="nothing at this path"):
                LOCAL.open(path)
        put(LOCAL, path, OTHER_ID, a=b"new")
        assert not os.path.islink(path) and beside(path) == ["other.ckpt"]
        assert (content(LOCAL, path), content(LOCAL, other)) == ({"a": b"new"}, {"a": b"other"})
        LOCAL.remove(path)


def test_a_save_to_the_same_path_at_the_same_time_is_refused_and_changes_nothing(path: str) -> None:
    put(LOCAL, path, a=b"old")
    first = begun(path, a=b"new")
    before = sorted(os.walk(os.path.dirname(path)))
    for same in (path, path + "/"):
        second = LOCAL.draft(same, THIRD_ID)
        with pytest.raises(FileExistsError, match=r"another process is saving to '.*step-1\.ckpt' right now"):
            second.begin()
        second.discard()
    assert sorted(os.walk(os.path.dirname(path))) == before
    assert put(LOCAL, path + ".other", ID) == []
    if (child := os.fork()) == 0:  # a process that was forked during a save does not hold the path
        signal.pause()
    try:
        finish(first)
        assert content(LOCAL, path) == {"a": b"new"} and beside(path) == ["step-1.ckpt.other"]
        assert put(LOCAL, path, THIRD_ID) == []
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_files_of_a_save_that_another_machine_may_be_writing_stay_for_an_hour(path: str) -> None:
    other, temporary = begun_elsewhere(path, ID)
    place = os.path.dirname(temporary)
    assert put(LOCAL, path, OTHER_ID, a=b"new") == []
    assert content(LOCAL, path) == {"a": b"new"} and os.path.exists(temporary)
    made_old(place)
    if not other.prefix:
        os.utime(f"{temporary}/a")
        assert put(LOCAL, path, THIRD_ID) == [] and os.path.exists(temporary)  # one file is young
        made_old(place)
    put(LOCAL, path, "3" * 32)
    assert not os.path.exists(temporary) and beside(path) == [] and len(os.listdir(path)) == 1


def test_a_save_whose_files_were_deleted_is_not_committed(tmp_path: Path) -> None:
    path = str(tmp_path / "a.ckpt")
    os.mkdir(path)
    put(LOCAL, path, a=b"old")
    draft = begun(path, a=b"new")
    os.unlink(f"{path}/{prefix_of(OTHER_ID)}a")
    with pytest.raises(FileExistsError, match="another process saved to"):
        finish(draft)
    draft.discard()
    assert content(LOCAL, path) == {"a": b"old"} and len(os.listdir(path)) == 2


def test_a_directory_that_another_save_began_to_fill_is_not_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "a.ckpt")
    draft = begun(path)
    os.mkdir(path)
    other = begun(path, THIRD_ID, a=b"other")
    with pytest.raises(OSError, match=r"Directory not empty: .* -> '.*a\.ckpt'"):
        finish(draft)
    draft.discard()
    finish(other, THIRD_ID)
    assert content(LOCAL, path) == {"a": b"other"} and beside(path) == []


def test_more_files_than_a_process_may_open_are_read(path: str) -> None:
    put(LOCAL, path, **{f"f{i}": bytes([i]) for i in range(200)})
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    reader = LOCAL.open(path)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 80, before[1]))
    try:
        for i in [*range(200)] * 2:
            assert read_all(reader, f"f{i}") == bytes([i])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        reader.close()


def written(output: str, data: bytes = b"data", dies: bool = False) -> list[str]:
    opened = open_output(output, is_file=True, replaceable=lambda _: False)
    with opened as (create, notes), create("") as file:
        os.write(file, data)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
    return notes


@beside_only
def test_what_a_killed_save_or_export_leaves_is_removed_and_told(path: str) -> None:
    def begin() -> None:
        begun(path, a=b"1").write(ROOT_NAME, [root_of(OTHER_ID)])

    for leave in (begin, lambda: written(path, b"1", dies=True)):
        for act in (lambda: put(LOCAL, path + "2"), lambda: written(path + "3")):
            killed(leave)
            with pytest.raises(CheckpointNotFoundError):
                LOCAL.open(path)
            (note,) = act()
            assert note.startswith("removed the leftover of an unfinished save, '") and "/.tmp-" in note
            for name in beside(path):
                shutil.rmtree(Path(path).parent / name) if name.endswith("2") else os.unlink(Path(path).parent / name)


@beside_only
def test_what_only_looks_like_a_leftover_and_what_links_in_one_name_are_left_alone(path: str, tmp_path: Path) -> None:
    machine = this_machine()
    names = [f".tmp-{'A' * 16}-{ID}.{machine}", f".tmp-{'a' * 16}-{ID}.{machine}0", f"x.tmp-{'a' * 16}-{ID}.{machine}"]
    for name in names:
        (Path(path).parent / name).mkdir()
    folder = os.path.dirname(path)
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis").touch()

    def leave() -> None:
        begun(path, a=b"")
        os.symlink(tmp_path / "precious", os.path.join(temporary_path(path, OTHER_ID, folder), "to a directory"))
        os.symlink(tmp_path / "precious", temporary_path(path + "2", ID, folder))

    killed(leave)
    assert len(put(LOCAL, path, ID)) == 2
    assert beside(path) == sorted(names) and os.listdir(tmp_path / "precious") == ["thesis"]


@beside_only
def test_what_cannot_be_removed_is_told_and_the_save_succeeds(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put(LOCAL, path, a=b"old")
    killed(lambda: begun(path, THIRD_ID, a=b"1"))
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refusing(errno.EPERM))
        said = put(LOCAL, path, OTHER_ID, a=b"new")
        assert [note[:30] for note in said] == ["could not remove the leftover ", "could not remove what was repl"]
        assert content(LOCAL, path) == {"a": b"new"}
        assert LOCAL.remove(path)[-1].startswith("could not remove all files of the deleted checkpoint")
    with pytest.raises(CheckpointNotFoundError):
        LOCAL.open(path)
    assert put(LOCAL, path, ID) and beside(path) == []


def test_without_locks_leftovers_are_left_for_an_hour(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    killed(lambda: begun(path, a=b"1").write(ROOT_NAME, [b""]))
    monkeypatch.setattr(fcntl, "flock", refusing(errno.ENOLCK))
    for save_id in (ID, THIRD_ID):
        assert put(LOCAL, path, save_id, a=b"2") == []
        assert content(LOCAL, path) == {"a": b"2"}
    assert len([*Path(path).parent.rglob(".tmp-*")]) == 1
    made_old(os.path.dirname(path))
    assert len(put(LOCAL, path, "3" * 32)) == 1 and not [*Path(path).parent.rglob(".tmp-*")]


@beside_only
def test_a_stranger_who_holds_the_lock_of_the_parent_does_not_stop_a_save(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept = [0.0]
    monkeypatch.setattr(time, "sleep", lambda seconds: slept.append(slept[-1] + seconds))
    monkeypatch.setattr(time, "monotonic", lambda: slept[-1])
    held = os.open(os.path.dirname(path), os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    assert put(LOCAL, path) == [] and slept[-1] > 1
    os.close(held)


@beside_only
def test_nothing_is_deleted_if_it_is_unknown_whether_the_new_name_is_durable(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(LOCAL, path, a=b"old")
    draft = begun(path, a=b"new")
    draft.write(ROOT_NAME, [root_of(OTHER_ID)])
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refusing(errno.EIO))
        with pytest.raises(OSError, match="Input/output error"):
            draft.publish()
        draft.discard()
    assert content(LOCAL, path) == {"a": b"new"}
    (name,) = beside(path)
    assert (Path(path).parent / name / "a").read_bytes() == b"old"


@beside_only
def test_an_exported_file_is_made_by_one_process_at_a_time_and_replaces_nothing(path: str) -> None:
    with open_output(path, is_file=True, replaceable=lambda _: True) as (create, _), create("") as file:
        os.write(file, b"first")
        with pytest.raises(FileExistsError, match="another process is saving"):
            written(path, b"second")
        assert written(path + "2", b"other") == []
    with pytest.raises(FileExistsError):
        written(path, b"second")
    with pytest.raises(ZeroDivisionError), open_output(path, is_file=True, replaceable=lambda _: True):
        _ = 1 // 0
    assert Path(path).read_bytes() == b"first" and beside(path) == ["step-1.ckpt2"]
