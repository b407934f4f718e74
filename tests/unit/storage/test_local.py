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
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_shardckpt import ShardCkptIO, load, save
from lightning_shardckpt.errors import CheckpointNotFoundError
from lightning_shardckpt.format.index import ROOT_NAME, prefix_of
from lightning_shardckpt.storage.local_storage import LocalDraft, LocalStorage
from lightning_shardckpt.storage.posix import write_file
from lightning_shardckpt.storage.protocol import read_all
from lightning_shardckpt.storage.router import StorageRouter
from lightning_shardckpt.storage.temporaries import output_directory, output_file, temporary_name, this_machine
from lightning_shardckpt.tools.verify import verify
from tests.support.faults import killed, without_flags
from tests.sweeps.faults.inject import Fault, Interposer
from tests.unit.storage.test_storage import (
    ID,
    LOCAL,
    OTHER_ID,
    SHARD,
    THIRD_ID,
    beside,
    content,
    mounted,
    own_mounts,
    put,
    root_of,
    run,
)

IS_ROOT = os.geteuid() == 0
NOBODY = 65534
WITHOUT_EXCHANGE = LocalStorage(rename=without_flags)
ELSEWHERE = LocalStorage(machine="f" * 16)


@pytest.fixture(params=["beside", "in place"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A path that a save replaces, or fills."""
    path = tmp_path / "runs" / "step-1.ckpt"
    (path if request.param == "in place" else path.parent).mkdir(parents=True)
    return str(path)


beside_only = pytest.mark.parametrize("path", ["beside"], indirect=True)


def begun(path: str, save_id: str = OTHER_ID, storage: LocalStorage = LOCAL, **files: bytes) -> LocalDraft:
    """A save that goes on in this process."""
    draft = storage.draft(path, save_id)
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


# ── mode, owner, group, mounts ────────────────────────────────────────────────────────────────────────────────────────


def other_group() -> int:
    """A group that this process may give a file, other than its own."""
    if IS_ROOT:
        return NOBODY
    return next((group for group in os.getgroups() if group != os.getegid()), os.getegid())


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
    os.chown(path, -1, other_group())
    os.chmod(path, 0o2770)
    before, inode = properties(path), path.stat().st_ino
    for save_id in (ID, OTHER_ID):
        put(LOCAL, str(path), save_id, a=save_id.encode())
        assert content(LOCAL, str(path)) == {"a": save_id.encode()}
        assert sorted(os.listdir(path)) == sorted([ROOT_NAME, f"{prefix_of(save_id)}a"])
        assert (properties(path), path.stat().st_ino, os.listdir(tmp_path)) == (before, inode, ["a.ckpt"])
        assert {file.stat().st_gid for file in path.iterdir()} == {other_group()}
    LOCAL.remove(str(path))
    assert (properties(path), os.listdir(path)) == (before, [])


@pytest.mark.parametrize("mode", [0o2770, 0o500])
@pytest.mark.parametrize("what", ["checkpoint", "file", "directory"])
def test_what_is_replaced_keeps_mode_and_group(what: str, mode: int, tmp_path: Path) -> None:
    path = tmp_path / "a"
    put(LOCAL, str(path), a=b"old") if what == "checkpoint" else path.touch() if what == "file" else path.mkdir()
    os.chown(path, -1, other_group())
    os.chmod(path, mode)
    before, inode = properties(path), path.stat().st_ino
    if what == "checkpoint":
        put(LOCAL, str(path), OTHER_ID, a=b"new")
    elif what == "file":
        with output_file(str(path), overwrite=True) as (file, _):
            os.write(file, b"new")
    else:
        with output_directory(str(path), lambda _: True) as (create, _), create("a") as file:
            os.write(file, b"new")
    assert (path if what == "file" else path / "a").read_bytes() == b"new"
    assert properties(path) == before and path.stat().st_ino != inode and os.listdir(tmp_path) == ["a"]


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
    assert (properties(path), content(LOCAL, str(path))) == (before, {SHARD: b"new"})
    assert len(os.listdir(path)) == 2 and beside(str(path)) == []


IN_PLACE = """
from tests.unit.storage.test_storage import ID, LOCAL, OTHER_ID, content, put
path = os.path.join(sys.argv[1], "a.ckpt")
inode = os.stat(path).st_ino
for save_id in (ID, OTHER_ID):
    put(LOCAL, path, save_id, a=save_id.encode())
    assert content(LOCAL, path) == {"a": save_id.encode()}
    assert os.stat(path).st_ino == inode and len(os.listdir(path)) == 2
assert LOCAL.remove(path) == [] and os.listdir(path) == [] and os.listdir(sys.argv[1]) == ["a.ckpt"]
print("as it should be")
"""
MOUNTS = {
    "tmpfs": "subprocess.run(['mount', '-t', 'tmpfs', 'none', path], check=True)",
    "bind, with a checkpoint": "\n".join(
        [
            "from tests.unit.storage.test_storage import LOCAL, SHARD, put",
            "other = tempfile.mkdtemp(dir=sys.argv[1] + '/..')",
            "put(LOCAL, f'{other}/x', **{SHARD: b'1'})",
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
    path = folder / "a.ckpt"
    path.mkdir(0o750)
    if IS_ROOT:
        os.chown(path, NOBODY, NOBODY)
    os.chmod(folder, 0o555)
    before = properties(path)

    def saves() -> None:
        for save_id in (ID, OTHER_ID):
            put(LOCAL, str(path), save_id, a=save_id.encode())
            assert content(LOCAL, str(path)) == {"a": save_id.encode()} and len(os.listdir(path)) == 2

    as_user(saves)
    assert properties(path) == before
    as_user(lambda: LOCAL.remove(str(path)))
    assert os.listdir(path) == []


def test_the_current_directory_is_filled_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(LOCAL, str(tmp_path / "there"), **{SHARD: b"old"})
    monkeypatch.chdir(tmp_path / "there")
    put(LOCAL, ".", OTHER_ID, **{SHARD: b"new"})
    assert content(LOCAL, ".") == {SHARD: b"new"} and len(os.listdir()) == 2 and os.listdir(tmp_path) == ["there"]
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    save(".", {"w": torch.arange(5.0)})
    assert load(".")["w"].tolist() == [0, 1, 2, 3, 4] and verify(".").findings == ()


def test_where_names_can_not_be_exchanged_a_checkpoint_is_filled_in_place(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    put(WITHOUT_EXCHANGE, str(path), **{SHARD: b"old"})
    inode = path.stat().st_ino
    assert sorted(os.listdir(path)) == [ROOT_NAME, SHARD]
    put(WITHOUT_EXCHANGE, str(path), OTHER_ID, **{SHARD: b"new"})
    assert content(LOCAL, str(path)) == {SHARD: b"new"} and len(os.listdir(path)) == 2
    assert (path.stat().st_ino, os.listdir(tmp_path)) == (inode, ["a.ckpt"])


# ── links ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_link_is_replaced_and_removed_and_what_it_names_is_read_and_stays(tmp_path: Path) -> None:
    other, path = str(tmp_path / "other.ckpt"), str(tmp_path / "last.ckpt")
    put(LOCAL, other, a=b"other")
    os.symlink("other.ckpt", path)
    assert content(LOCAL, path) == {"a": b"other"}
    with pytest.raises(FileExistsError, match="is a link, and the file system can't exchange it"):
        put(WITHOUT_EXCHANGE, path, OTHER_ID)
    LOCAL.remove(path)
    os.symlink("other.ckpt", path)
    put(LOCAL, path, OTHER_ID, a=b"new")
    assert not os.path.islink(path) and beside(path) == ["other.ckpt"]
    assert (content(LOCAL, path), content(LOCAL, other)) == ({"a": b"new"}, {"a": b"other"})


@pytest.mark.parametrize("storage", [LOCAL, WITHOUT_EXCHANGE], ids=["exchange", "no exchange"])
def test_saving_to_a_dangling_link_replaces_it(storage: LocalStorage, tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("nowhere")
    with pytest.raises(CheckpointNotFoundError, match="a link to 'nowhere', which is gone"):
        storage.open(str(tmp_path / "a"))
    put(storage, str(tmp_path / "a"), a=b"1")
    assert content(storage, str(tmp_path / "a")) == {"a": b"1"} and os.listdir(tmp_path) == ["a"]


# ── two jobs ──────────────────────────────────────────────────────────────────────────────────────────────────────────


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
    finish(first)
    assert content(LOCAL, path) == {"a": b"new"} and beside(path) == ["step-1.ckpt.other"]


def test_a_process_that_was_forked_during_a_save_does_not_hold_the_path(path: str) -> None:
    draft = begun(path, a=b"1")
    gate = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(gate[1])
        os.read(gate[0], 1)
        os._exit(0)
    try:
        finish(draft)
        assert put(LOCAL, path, THIRD_ID) == [] and beside(path) == []
    finally:
        os.close(gate[0])
        os.close(gate[1])
        os.waitpid(child, 0)


def test_files_of_a_save_that_another_machine_may_be_writing_stay_for_an_hour(path: str) -> None:
    """Locks do not reach: the claim of the other machine is a file that is not locked."""
    other = begun(path, ID, ELSEWHERE, a=b"other")
    place = path if other.prefix else os.path.dirname(path)
    claim = next(name for name in os.listdir(place) if name.endswith("f" * 16))
    shutil.copy(f"{place}/{claim}", f"{place}/{THIRD_ID[:16]}-x")
    os.replace(f"{place}/{THIRD_ID[:16]}-x", f"{place}/{claim}")
    assert put(LOCAL, path, OTHER_ID, a=b"new") == []
    assert content(LOCAL, path) == {"a": b"new"} and os.path.exists(f"{place}/{claim}")
    made_old(place)
    if not other.prefix:
        os.utime(next(Path(place).glob(".tmp-*/a")))
        assert put(LOCAL, path, THIRD_ID) == [] and os.path.exists(f"{place}/{claim}")  # one file is young
        made_old(place)
    put(LOCAL, path, "3" * 32)
    assert not os.path.exists(f"{place}/{claim}") and beside(path) == [] and len(os.listdir(path)) == 1


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
    other = begun(path, THIRD_ID, ELSEWHERE)
    with pytest.raises(FileExistsError, match="not replaced"):
        finish(draft)
    draft.discard()
    finish(other, THIRD_ID)
    assert content(LOCAL, path) == {} and beside(path) == []


def test_a_reader_of_a_checkpoint_that_is_replaced_reads_open_files_and_is_told(path: str) -> None:
    for replace in (lambda: put(LOCAL, path, OTHER_ID), lambda: LOCAL.remove(path)):
        put(LOCAL, path, THIRD_ID, a=b"old", b=b"old")
        reader = LOCAL.open(path)
        assert read_all(reader, "a") == b"old"
        assert replace() == []
        assert read_all(reader, "a") == b"old"
        with pytest.raises(OSError, match="was replaced or deleted while it was read: load again") as caught:
            read_all(reader, "b")
        assert caught.value.errno == errno.ESTALE
        reader.close()


def test_more_files_than_a_process_may_open_are_read(path: str) -> None:
    count = 200
    put(LOCAL, path, **{f"f{i}": bytes([i]) for i in range(count)})
    descriptors = sorted(os.listdir("/proc/self/fd"))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    reader = LOCAL.open(path)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 80, before[1]))
    try:
        for _ in range(2):
            assert [read_all(reader, f"f{i}") for i in range(count)] == [bytes([i]) for i in range(count)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        reader.close()
    assert sorted(os.listdir("/proc/self/fd")) == descriptors


# ── leftovers ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_rank_derives_the_same_name_which_is_no_checkpoint_to_lightning(tmp_path: Path) -> None:
    def names(target: str) -> list[str]:
        draft = begun(target, ID)
        found = sorted(os.listdir(tmp_path))
        draft.discard()
        return found

    path = f"{tmp_path}/x.ckpt"
    found = {tuple(names(target)) for target in (path, f"{path}/", f"{tmp_path}/b/../x.ckpt")}
    temporary = os.path.basename(temporary_name(path, ID))
    assert found == {(temporary, f"{temporary}.{this_machine()}")} != {tuple(names(f"{tmp_path}/y.ckpt"))}
    assert temporary.startswith(".tmp-") and "ckpt" not in temporary


def test_what_a_killed_save_leaves_is_invisible_removed_and_told(path: str) -> None:
    def begins() -> None:
        draft = begun(path, a=bytes(3 << 20), b=b"", c=b"1")
        draft.write(ROOT_NAME, [root_of(OTHER_ID, draft.prefix)])

    killed(begins)
    with pytest.raises(CheckpointNotFoundError):
        LOCAL.open(path)
    (note,) = put(LOCAL, path, THIRD_ID, a=b"new")
    assert "removed the leftover of an unfinished save, " in note
    killed(begins)
    assert content(LOCAL, path) == {"a": b"new"}
    assert len(put(LOCAL, path, ID, a=b"2")) == 1
    assert beside(path) == [] and len(os.listdir(path)) == 2


@beside_only
def test_a_save_and_an_export_beside_it_remove_it_and_say_how_large_it_is(path: str) -> None:
    for act in (lambda: put(LOCAL, path + "2"), lambda: written(path + "3")):
        killed(lambda: begun(path, a=bytes(3 << 20), b=b"", c=b"1"))
        (name, _), *_ = [sorted(n for n in beside(path) if n.startswith("."))]
        assert act() == [f"removed the leftover of an unfinished save, 3 files, 3.00 MiB, {name}"]
    assert beside(path) == ["step-1.ckpt2", "step-1.ckpt3"]


@beside_only
@pytest.mark.parametrize("name", [f".tmp-{'A' * 16}-{ID}", f".tmp-{'a' * 16}-{ID}0", f"x.tmp-{'a' * 16}-{ID}"])
def test_what_only_looks_like_a_leftover_is_left_alone(name: str, path: str) -> None:
    thesis = Path(path).parent / name / "thesis"
    thesis.parent.mkdir()
    thesis.touch()
    made_old(os.path.dirname(path))
    assert put(LOCAL, path) == [] and thesis.exists()


@beside_only
def test_links_in_a_leftover_and_in_its_place_are_not_followed(path: str, tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis").touch()
    temporary = temporary_name(path, OTHER_ID)

    def leave() -> None:
        begun(path, a=b"")
        os.symlink(tmp_path / "precious", os.path.join(temporary, "to a directory"))
        os.symlink(tmp_path / "precious" / "thesis", os.path.join(temporary, "to a file"))
        link = temporary_name(path + "2", ID)
        os.symlink(tmp_path / "precious", link)
        Path(f"{link}.{this_machine()}").touch()

    killed(leave)
    notes = put(LOCAL, path, ID)
    assert sorted(note[:53] for note in notes) == ["removed the leftover of an unfinished save, 1 file, 0"] * 2
    assert beside(path) == [] and os.listdir(tmp_path / "precious") == ["thesis"]


@beside_only
def test_what_cannot_be_removed_is_told_and_the_save_succeeds(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put(LOCAL, path, a=b"old")
    killed(lambda: begun(path, THIRD_ID, a=b"1"))
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refusing(errno.EPERM))
        first, second = put(LOCAL, path, OTHER_ID, a=b"new")
        assert first.startswith("could not remove the leftover") and "Operation not permitted" in first
        assert second.startswith("could not remove the replaced checkpoint") and "Operation not permitted" in second
        assert content(LOCAL, path) == {"a": b"new"}
        assert LOCAL.remove(path)[-1].startswith("could not remove the deleted checkpoint")
    with pytest.raises(CheckpointNotFoundError):
        LOCAL.open(path)
    assert put(LOCAL, path, ID) and beside(path) == []


@beside_only
def test_a_save_beside_leaves_what_is_just_being_deleted(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put(LOCAL, path, a=b"old")
    rmtree, notes = shutil.rmtree, list[str]()

    def saves_beside(old: str) -> None:
        monkeypatch.undo()
        notes.extend(put(LOCAL, path + "2"))
        rmtree(old)

    monkeypatch.setattr(shutil, "rmtree", saves_beside)
    assert put(LOCAL, path, OTHER_ID, a=b"new") == notes == []
    assert beside(path) == ["step-1.ckpt2"]


@pytest.mark.parametrize("error", ["ENOLCK", "EOPNOTSUPP"])
def test_without_locks_leftovers_are_left_for_an_hour(error: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    killed(lambda: begun(path, a=b"1").write(ROOT_NAME, [b""]))
    monkeypatch.setattr(fcntl, "flock", refusing(getattr(errno, error)))
    for save_id in (ID, THIRD_ID):
        assert put(LOCAL, path, save_id, a=b"2") == []
        assert content(LOCAL, path) == {"a": b"2"}
    assert len([*Path(path).parent.rglob(".tmp-*")]) == 2
    made_old(os.path.dirname(path))
    assert len(put(LOCAL, path, "3" * 32)) == 1 and not [*Path(path).parent.rglob(".tmp-*")]


@beside_only
def test_another_error_of_a_lock_fails_the_save(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", refusing(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        LOCAL.draft(path, ID).begin()
    assert os.listdir(os.path.dirname(path)) == []


@beside_only
def test_a_save_that_fails_at_its_begin_does_not_hold_the_path(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    killed(lambda: begun(path, a=b"1"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refusing(errno.EIO))  # which makes the deletion of leftovers safe
        with pytest.raises(OSError, match="Input/output error"):
            begun(path, THIRD_ID)
    assert len(put(LOCAL, path)) == 1 and beside(path) == []


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


def test_all_that_a_save_found_is_one_warning(tmp_path: Path) -> None:
    path = str(tmp_path / "a.ckpt")
    killed(lambda: [begun(path + name, a=b"1") for name in ("1", "2")])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            ShardCkptIO().save_checkpoint({"state_dict": {"w": torch.ones(2)}}, path)
    (warning,) = caught
    assert str(warning.message).count("removed the leftover of an unfinished save, 1 file, 1 B") == 2


# ── disks that are full, fail, or lose power ──────────────────────────────────────────────────────────────────────────

SAVE = f"""
import errno, os, sys
from lightning_shardckpt.storage.local_storage import LocalStorage
path, old, new = sys.argv[1], b"o" * 300_000, b"n" * 900_000
def put(save_id, content):
    draft = LocalStorage().draft(path, save_id)
    try:
        draft.begin()
        draft.write("a", [content[:1000], content[1000:]])
        draft.write({ROOT_NAME!r}, [b"root"])
        draft.publish()
    except OSError as error:
        draft.discard()
        return error.errno, str(error)
def check():
    reader = LocalStorage().open(path)
    found = bytearray(reader.size("a"))
    reader.read_into("a", 0, memoryview(found))
    assert found == old and reader.size({ROOT_NAME!r}) == 4
    assert os.listdir(os.path.dirname(path)) == [os.path.basename(path)], os.listdir(os.path.dirname(path))
assert put("0" * 32, old) is None
check()
LIMIT
found = put("1" * 32, new)
assert found and found[0] == EXPECTED, found
check()
print("as it should be")
"""


def test_a_file_that_may_not_grow_is_an_error_and_the_old_checkpoint_stays(tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))"
    run(SAVE.replace("LIMIT", limit).replace("EXPECTED", "errno.EFBIG"), str(tmp_path / "a.ckpt"))


def test_a_read_only_place_is_an_error_and_the_old_checkpoint_stays(tmp_path: Path) -> None:
    limit = "import subprocess; subprocess.run(['mount', '-o', 'remount,ro', os.path.dirname(path)], check=True)"
    script = SAVE.replace("LIMIT", limit).replace("EXPECTED", "errno.EROFS")
    run(mounted(script, "-osize=4m"), str(tmp_path), *own_mounts())


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
    name, _ = beside(path)
    assert (Path(path).parent / name / "a").read_bytes() == b"old"


def test_a_failing_discard_does_not_hide_why_the_save_failed(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = begun(path, a=b"1")
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refusing(errno.EIO))
        patch.setattr(os, "rmdir", refusing(errno.EIO))
        draft.discard()
    assert [*Path(path).parent.rglob("*a")]  # what could not be removed


@pytest.mark.parametrize("sizes", [[], [0], [1, 0, 2], [700] * 2000, [(1 << 20) + 1, 3, 9 << 20, 0, 5]])
def test_parts_of_all_sizes_arrive_whole_and_so_does_what_a_write_left_over(sizes: list[int], tmp_path: Path) -> None:
    parts = [os.urandom(size) for size in sizes]
    write_file(str(tmp_path / "a"), iter(parts), sync=True)
    with Interposer(str(tmp_path), Fault("short from on", 1)):
        write_file(str(tmp_path / "b"), map(memoryview, parts), sync=False)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() == b"".join(parts)


@beside_only
def test_an_error_names_the_file(path: str) -> None:
    draft = begun(path)
    with (
        Interposer(os.path.dirname(path), Fault("sticky", 3, errno.ENOSPC)),
        pytest.raises(OSError, match=rf"No space left.*{os.path.dirname(path)}.*large\.safetensors"),
    ):
        draft.write("large.safetensors", [bytes(9 << 20)] * 3)
    draft.discard()


def test_without_syncs_a_save_and_a_removal_sync_nothing_and_do_all_else(tmp_path: Path) -> None:
    def calls(storage: LocalStorage) -> list[str]:
        with Interposer(str(tmp_path)) as interposer:
            for save_id in (ID, OTHER_ID):
                put(storage, str(tmp_path / "runs" / "a.ckpt"), save_id, a=b"1")
            storage.remove(str(tmp_path / "runs" / "a.ckpt"))
        return [call.split()[0] for call in interposer.calls]

    made, synced = calls(LocalStorage(sync_files=False)), calls(LOCAL)
    assert "fsync" in synced and "fsync" not in made
    assert made[1:] == [name for name in synced if name != "fsync"]  # the first one made a directory


# ── one file, as consolidate writes it ────────────────────────────────────────────────────────────────────────────────


def written(output: str, data: bytes = b"data") -> list[str]:
    with output_file(output, overwrite=False) as (file, notes):
        os.write(file, data)
    return notes


def leave_file(output: str) -> None:
    with output_file(output, overwrite=False) as (file, _):
        os.write(file, bytes(2 << 20))
        os.kill(os.getpid(), signal.SIGKILL)


@beside_only
def test_the_leftover_of_a_killed_consolidation_is_removed_and_told(path: str) -> None:
    for act in (lambda: written(path + "2"), lambda: put(LOCAL, path)):
        killed(lambda: leave_file(path))
        (note,) = act()
        assert note.startswith("removed the leftover of an unfinished save, 1 file, 2.00 MiB, .tmp-")
    assert beside(path) == ["step-1.ckpt2"]


@beside_only
def test_a_file_is_made_by_one_process_at_a_time_and_replaces_nothing(path: str) -> None:
    with output_file(path, overwrite=False) as (file, _):
        os.write(file, b"first")
        with pytest.raises(FileExistsError, match="another process is saving"):
            written(path, b"second")
        assert written(path + "2", b"other") == []
    for rename in {"rename": without_flags}, {}:
        with pytest.raises(FileExistsError), output_file(path, overwrite=False, **rename):
            pass
        with pytest.raises(ZeroDivisionError), output_file(path, overwrite=True, **rename):
            _ = 1 // 0
    assert Path(path).read_bytes() == b"first" and beside(path) == ["step-1.ckpt2"]


def test_storage_options_of_a_path_are_not_used(tmp_path: Path) -> None:
    storage = StorageRouter(storage_options={"anything": 1})
    put(storage, f"file://{tmp_path}/a.ckpt", a=b"1")
    assert content(storage, str(tmp_path / "a.ckpt")) == {"a": b"1"}
