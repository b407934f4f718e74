"""What killed saves leave is found, told and deleted, and nothing else is."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_shardckpt.errors import CheckpointNotFoundError
from lightning_shardckpt.format.index import ROOT_NAME, prefix_of
from lightning_shardckpt.storage.local import leftovers
from lightning_shardckpt.storage.local.local_storage import LocalDraft, LocalStorage
from lightning_shardckpt.storage.local.posix import rename_with_flag
from lightning_shardckpt.storage.protocol import read_all
from lightning_shardckpt.storage.router import StorageRouter
from tests.support.file_systems import without_flags
from tests.support.killed import killed
from tests.support.pool import run_ranks
from tests.unit.storage.test_storage import (
    ID,
    LOCAL,
    OTHER_ID,
    beside,
    content,
    new_file,
    put,
)

NAMES = ("0123456789abcdef", "f" * 32)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "runs" / "step-1.ckpt")


def begun(path: str, save_id: str = ID, *, storage: LocalStorage = LOCAL, **files: bytes) -> LocalDraft:
    """A save that goes on in this process."""
    draft = storage.draft(path, save_id)
    draft.begin()
    for name, data in files.items():
        draft.write(name, [data])
    return draft


def saved(path: str, save_id: str = OTHER_ID, storage: LocalStorage = LOCAL) -> list[str]:
    """The notes of a save."""
    draft = begun(path, save_id, storage=storage, **{ROOT_NAME: save_id.encode()})
    draft.publish()
    return draft.notes


# ── whose is it? ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_rank_derives_the_same_name_and_every_target_another(tmp_path: Path) -> None:
    def name(target: str) -> str:
        draft = begun(target)
        found, _ = sorted(os.listdir(tmp_path))  # and its claim
        draft.discard()
        return found

    path = f"{tmp_path}/x.ckpt"
    names = {name(target) for target in (path, f"{path}/", f"file://{path}", f"{tmp_path}/b/../x.ckpt")}
    assert names == {os.path.basename(leftovers.temporary_name(path, ID))}
    assert names != {name(f"{tmp_path}/y.ckpt")}


@pytest.mark.parametrize("target", ["step-1.ckpt", "step-0.ckpt"], ids=["same target", "another target"])
def test_the_leftover_of_a_killed_save_is_removed_and_told(target: str, path: str) -> None:
    killed(lambda: begun(os.path.join(os.path.dirname(path), target), a=bytes(3 << 20), b=b"", c=b"1"))
    name, _ = beside(path)
    assert saved(path) == [f"removed the leftover of an unfinished save, 3 files, 3.00 MiB, {name}"]
    assert beside(path) == []
    assert saved(path) == []


def test_a_save_to_the_same_path_at_the_same_time_is_refused_and_changes_nothing(path: str) -> None:
    put(LOCAL, path, a=b"old")
    first = begun(path, OTHER_ID, a=b"new")
    before = sorted(os.walk(os.path.dirname(path)))
    for same in (path, path + "/", "file://" + path):
        second = LOCAL.draft(same, "2" * 32)
        with pytest.raises(FileExistsError, match=r"another process is saving to '.*step-1\.ckpt' right now"):
            second.begin()
        second.discard()
    assert sorted(os.walk(os.path.dirname(path))) == before
    first.write(ROOT_NAME, [b""])
    first.publish()
    assert content(LOCAL, path)["a"] == b"new"
    assert saved(path) == []


def test_a_save_to_another_path_goes_on_and_is_not_disturbed(path: str) -> None:
    other = begun(path + ".other", a=b"1")
    assert saved(path) == []
    other.write(ROOT_NAME, [b""])
    other.publish()
    assert content(LOCAL, path + ".other")["a"] == b"1"


def test_a_process_that_was_forked_during_a_save_does_not_hold_the_path(path: str) -> None:
    draft = begun(path, a=b"1")
    gate = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(gate[1])
        os.read(gate[0], 1)
        os._exit(0)
    try:
        draft.write(ROOT_NAME, [b""])
        draft.publish()
        assert saved(path) == []
        begun(path, "2" * 32).discard()
        assert saved(path) == []
        assert beside(path) == []
    finally:
        os.close(gate[0])
        os.close(gate[1])
        os.waitpid(child, 0)


def strange(kind: str, path: Path) -> None:
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()
        (path / "thesis").touch()


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("fifo", f".tmp-{NAMES[0]}-{NAMES[1]}"),
        ("directory", f".tmp-{NAMES[0].upper()}-{NAMES[1]}"),
        ("directory", f".tmp-{NAMES[0]}-{NAMES[1]}0"),
        ("directory", f".tmp-{NAMES[0]}-{NAMES[1]}\n"),
        ("directory", f"x.tmp-{NAMES[0]}-{NAMES[1]}"),
        ("directory", f".tmp-{NAMES[1]}"),
    ],
)
def test_what_only_looks_like_a_leftover_is_left_alone(kind: str, name: str, path: str) -> None:
    os.makedirs(os.path.dirname(path))
    strange(kind, Path(path).parent / name)
    before = set(Path(path).parent.rglob("*"))
    assert saved(path) == []
    assert {p for p in Path(path).parent.rglob("*") if not p.is_relative_to(path)} == before


def test_a_link_that_a_killed_save_replaced_goes_and_what_it_names_stays(path: str) -> None:
    parent, name = Path(path).parent, f".tmp-{NAMES[0]}-{NAMES[1]}"
    (parent / "precious").mkdir(parents=True)
    (parent / "precious" / "thesis").touch()
    (parent / name).symlink_to("precious")
    (parent / f"{name}.{leftovers.this_machine()}").touch()
    assert saved(path) == [f"removed the leftover of an unfinished save, 1 file, 0 B, {name}"]
    assert not os.path.lexists(parent / name) and (parent / "precious" / "thesis").exists()


def test_links_in_a_leftover_are_not_followed(path: str, tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis").touch()

    temporary = leftovers.temporary_name(path, ID)

    def leave() -> None:
        begun(path, a=b"")
        os.symlink(tmp_path / "precious", os.path.join(temporary, "to a directory"))
        os.symlink(tmp_path / "precious" / "thesis", os.path.join(temporary, "to a file"))
        os.makedirs(os.path.join(temporary, "deep", "er"))

    killed(leave)
    (note,) = saved(path)
    assert "1 file," in note
    assert beside(path) == []
    assert os.listdir(tmp_path / "precious") == ["thesis"]


def refusing(error: int) -> Callable[..., Any]:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(error, os.strerror(error))

    return refuse


@pytest.mark.parametrize("name", ["rmdir", "unlink"])
def test_a_leftover_that_cannot_be_removed_is_told_and_the_save_succeeds(
    name: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(lambda: begun(path, a=b"1"))
    with monkeypatch.context() as patch:
        patch.setattr(os, name, refusing(errno.EPERM))
        draft = begun(path, OTHER_ID, **{ROOT_NAME: b""})
    draft.publish()
    (note,) = draft.notes
    assert note.startswith("could not remove the leftover") and "Operation not permitted" in note
    assert len(beside(path)) == 2 and ROOT_NAME in content(LOCAL, path)
    assert len(saved(path)) == 1 and beside(path) == []


@pytest.mark.parametrize("name", ["rmdir", "unlink"])
def test_an_old_checkpoint_that_cannot_be_removed_is_told_and_the_save_succeeds(
    name: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(LOCAL, path, a=b"old")
    draft = begun(path, OTHER_ID, a=b"new", **{ROOT_NAME: b""})
    with monkeypatch.context() as patch:
        patch.setattr(os, name, refusing(errno.EPERM))
        draft.publish()
    assert content(LOCAL, path)["a"] == b"new"
    (note,) = draft.notes
    assert "could not remove the replaced checkpoint" in note and "Operation not permitted" in note
    with monkeypatch.context() as patch:
        patch.setattr(os, name, refusing(errno.EPERM))
        assert "could not remove the deleted checkpoint" in LOCAL.remove(path)[-1]
    with pytest.raises(CheckpointNotFoundError):
        LOCAL.open(path)
    assert saved(path, "2" * 32) and beside(path) == []


def made_old(folder: str) -> None:
    """Let all that lies below a folder have been changed two hours ago."""
    long_ago = time.time() - 7200
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            os.utime(os.path.join(parent, name), (long_ago, long_ago))


@pytest.mark.parametrize("error", ["EBADF", "ENOLCK", "EOPNOTSUPP", "ENOSYS"])
def test_without_locks_leftovers_are_left_for_an_hour(error: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    killed(lambda: begun(path, a=b"1"))
    monkeypatch.setattr(fcntl, "flock", refusing(getattr(errno, error)))
    for _ in range(2):
        assert saved(path) == []
        assert len(beside(path)) == 2 and ROOT_NAME in content(LOCAL, path)
    LOCAL.remove(path)
    assert len(beside(path)) == 2
    made_old(os.path.dirname(path))
    assert len(saved(path)) == 1 and beside(path) == []


def test_another_error_of_a_lock_fails_the_save(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    os.makedirs(os.path.dirname(path))
    monkeypatch.setattr(fcntl, "flock", refusing(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        LOCAL.draft(path, ID).begin()
    assert os.listdir(os.path.dirname(path)) == []


def test_where_other_machines_write_only_what_has_been_quiet_for_long_is_removed(path: str) -> None:
    of_many = LocalStorage(machine="f" * 16)
    killed(lambda: begun(path, a=b"1", b=b"2"))
    name, claim = beside(path)
    assert saved(path, storage=of_many) == []
    leftover, long_ago = os.path.join(os.path.dirname(path), name), time.time() - 7200
    os.utime(os.path.join(leftover, "a"), (long_ago, long_ago))
    os.utime(leftover, (long_ago, long_ago))
    os.utime(f"{os.path.dirname(path)}/{claim}", (long_ago, long_ago))
    assert saved(path, storage=of_many) == [] and beside(path) == [name, claim]  # b is young
    os.utime(os.path.join(leftover, "b"), (long_ago, long_ago))
    (note,) = saved(path, storage=of_many)
    assert note.startswith("removed the leftover") and beside(path) == []


def test_a_stranger_who_holds_the_lock_of_the_parent_does_not_stop_a_save(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept = [0.0]
    monkeypatch.setattr(time, "sleep", lambda seconds: slept.append(slept[-1] + seconds))
    monkeypatch.setattr(time, "monotonic", lambda: slept[-1])
    os.makedirs(os.path.dirname(path))
    held = os.open(os.path.dirname(path), os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    assert saved(path) == [] and slept[-1] > 1
    os.close(held)


def test_the_lock_of_the_parent_is_waited_for(path: str) -> None:
    os.makedirs(os.path.dirname(path))
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        held = os.open(os.path.dirname(path), os.O_RDONLY)
        fcntl.flock(held, fcntl.LOCK_EX)
        os.write(ready[1], b".")
        os.read(go[0], 1)
        os._exit(0)  # gives the lock back
    os.read(ready[0], 1)
    sleep, slept = time.sleep, []

    def then(seconds: float) -> None:
        if not slept:
            os.write(go[1], b".")
            os.waitpid(child, 0)
        slept.append(seconds)
        sleep(seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "sleep", then)
        assert saved(path) == []
    if not slept:
        os.write(go[1], b".")
        os.waitpid(child, 0)
    assert slept
    for end in (*ready, *go):
        os.close(end)


# ── replaced while it is read, or while the disk fails ────────────────────────────────────────────────────────────


@pytest.mark.parametrize("how", ["exchanged", "removed", "in place"])
def test_a_reader_of_a_checkpoint_that_is_replaced_reads_open_files_and_is_told(how: str, path: str) -> None:
    if how == "in place":
        os.makedirs(path)
    put(LOCAL, path, a=b"old", b=b"old")
    reader, prefix = LOCAL.open(path), prefix_of(ID) if how == "in place" else ""
    assert read_all(reader, f"{prefix}a") == b"old"
    assert LOCAL.remove(path) == [] if how == "removed" else saved(path) == []
    assert beside(path) == []
    clone = reader.clone()
    for each in (clone, reader):
        assert read_all(each, f"{prefix}a") == b"old"
        with pytest.raises(OSError, match="was replaced or deleted while it was read: load again"):
            read_all(each, f"{prefix}b")
        each.close()


@pytest.mark.parametrize("how", ["exchanged", "removed"])
def test_a_save_beside_leaves_what_is_just_being_deleted_to_whoever_does_it(
    how: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(LOCAL, path, a=b"old")
    notes, beside_it = list[list[str]](), os.path.join(os.path.dirname(path), "other.ckpt")
    rename, sync = os.rename, os.fsync

    def renames(source: str, target: str) -> None:
        rename(source, target)
        saves_beside() if source == path else None

    def syncs(file: int) -> None:
        sync(file)
        if how == "exchanged" and os.path.samestat(os.fstat(file), os.stat(os.path.dirname(path))):
            saves_beside()

    def saves_beside() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", rename)
            patch.setattr(os, "fsync", sync)
            notes.append(saved(beside_it, "4" * 32))

    draft = begun(path, OTHER_ID, a=b"new", **{ROOT_NAME: b""}) if how == "exchanged" else None
    monkeypatch.setattr(os, "rename", renames)
    monkeypatch.setattr(os, "fsync", syncs)
    if draft is None:
        assert LOCAL.remove(path) == []
    else:
        draft.publish()
        assert draft.notes == []
    monkeypatch.undo()
    assert notes and not any(notes)
    assert beside(path) == ["other.ckpt"]


def test_nothing_is_deleted_if_it_is_unknown_whether_the_new_name_is_durable(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(LOCAL, path, a=b"old")
    draft = begun(path, OTHER_ID, a=b"new", **{ROOT_NAME: b""})
    monkeypatch.setattr(os, "fsync", refusing(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        draft.publish()
    draft.discard()
    monkeypatch.undo()
    assert content(LOCAL, path)["a"] == b"new"
    name, _ = beside(path)
    assert (Path(path).parent / name / "a").read_bytes() == b"old"


# ── a rank that does not see yet what rank 0 made ─────────────────────────────────────────────────────────────────


class Lag:
    """A network file system that shows a new directory late: after so many looks, each after a pause."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: str, looks: int, error: int) -> None:
        self._open, self._directory, self._left, self._error = os.open, directory, looks, error
        self.clock, self.listed = 0.0, 0
        monkeypatch.setattr(os, "open", self.open)
        monkeypatch.setattr(time, "sleep", self.sleep)
        monkeypatch.setattr(time, "monotonic", lambda: self.clock)
        listdir = os.listdir

        def listing(path: Any) -> list[str]:
            self.listed += path == os.path.dirname(directory)
            return listdir(path)

        monkeypatch.setattr(os, "listdir", listing)

    def open(self, path: str, *args: Any, **kwargs: Any) -> int:
        if path.startswith(self._directory) and self._left:
            self._left -= 1
            raise OSError(self._error, os.strerror(self._error), path)
        return self._open(path, *args, **kwargs)

    def sleep(self, seconds: float) -> None:
        self.clock += seconds


@pytest.mark.parametrize("error", [errno.ENOENT, errno.ESTALE])
def test_a_rank_waits_until_it_sees_the_directory_of_rank_0(
    error: int, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = begun(path, **{ROOT_NAME: b""})
    second = LOCAL.draft(path, ID)
    lag = Lag(monkeypatch, leftovers.temporary_name(path, ID), 20, error)
    second.write("b", [b"2"])
    assert lag.listed == 20 and 5 < lag.clock < 60
    monkeypatch.undo()
    first.publish()
    assert content(LOCAL, path)["b"] == b"2"


def test_a_rank_that_never_sees_the_directory_says_so(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = begun(path), LocalStorage(visible_within_s=7).draft(path, ID)
    directory = leftovers.temporary_name(path, ID)
    lag = Lag(monkeypatch, directory, 10**9, errno.ENOENT)
    with pytest.raises(FileNotFoundError) as caught:
        second.write("b", [b"2"])
    assert 7 <= lag.clock <= 8
    for part in (os.uname().nodename, "does not see this directory", "7 s", "all ranks share", directory):
        assert part in str(caught.value)
    monkeypatch.undo()
    first.discard()


@pytest.mark.parametrize("who", ["the rank that made it", "a rank that saw it"])
def test_a_directory_that_was_seen_and_is_gone_is_an_error_at_once(
    who: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = begun(path)
    draft = first
    if who == "a rank that saw it":
        draft = LOCAL.draft(path, ID)
        draft.write("a", [b"1"])
    Lag(monkeypatch, leftovers.temporary_name(path, ID), 1, errno.ENOENT)
    with pytest.raises(FileNotFoundError):
        draft.write("b", [b"2"])
    monkeypatch.undo()
    first.discard()


class LateStorage(LocalStorage):
    """On one rank, opens something else a few times: what was there before."""

    def __init__(self, looks: int, before: str, visible_within_s: float) -> None:
        super().__init__(visible_within_s)
        self.left, self._before, self.opened = looks, before, 0

    def open(self, path: str) -> Any:
        self.opened += 1
        if self.left:
            self.left -= 1
            return super().open(self._before)
        return super().open(path)


def load_late(directory: str, late: int, looks: int, before: str, visible_within_s: float) -> tuple[str, int]:
    import torch.distributed as dist

    from lightning_shardckpt.distributed.ranks import Ranks
    from lightning_shardckpt.sources import open_source

    rank = dist.get_rank()
    storage = LateStorage(looks if rank == late else 0, f"{directory}/{before}", visible_within_s)
    try:
        with open_source.open_on_ranks(f"{directory}/new", ranks=Ranks.of_default_group(), storage=storage) as source:
            assert source.root is not None
            return source.root.save_id, storage.opened
    except (OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}", storage.opened


def save_two(directory: str) -> None:
    import torch

    from lightning_shardckpt.checkpoint.checkpoint import save
    from lightning_shardckpt.checkpoint.save_job import RunInfo, SaveOptions
    from lightning_shardckpt.distributed.ranks import Ranks
    from lightning_shardckpt.state.trainer import snapshot

    for number, name in enumerate(("old", "new")):
        state = {"state_dict": {"w": torch.ones(2)}, "global_step": number}
        save(
            f"{directory}/{name}",
            lambda state=state: snapshot(state),  # type: ignore[misc]
            ranks=Ranks.alone(),
            run=RunInfo(number),
            options=SaveOptions(1),
        )


@pytest.mark.parametrize(("before", "late"), [("old", 1), pytest.param("nothing", 0, marks=pytest.mark.slow)])
def test_a_rank_that_sees_what_was_there_before_looks_again(before: str, late: int, tmp_path: Path) -> None:
    run_ranks(1, save_two, str(tmp_path))
    (a, looks), (b, _) = run_ranks(2, load_late, str(tmp_path), late, 2, before, 1000.0)
    assert a == b and len(a) == 32 and looks == 3
    (a, _), (b, _) = run_ranks(2, load_late, str(tmp_path), late, 10**9, before, 0.0)
    expected = "MismatchError: .*see different" if before == "old" else rf"CheckpointNotFoundError: .*ranks \[{late}\]"
    for answer in (a, b):
        assert re.search(expected, answer), answer


def test_a_checkpoint_that_no_rank_sees_is_not_waited_for(tmp_path: Path) -> None:
    for answer, looks in run_ranks(2, load_late, str(tmp_path), 0, 0, "", 20.0):
        assert "nothing at this path" in answer and looks == 1


# ── one file, as consolidate writes it ────────────────────────────────────────────────────────────────────────────


def written(output: str, data: bytes = b"data") -> list[str]:
    with new_file(output) as (file, notes):
        os.write(file, data)
    return notes


def leave_file(output: str) -> None:
    with new_file(output) as (file, _):
        os.write(file, bytes(2 << 20))
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("next_one", ["a file", "a checkpoint"])
def test_the_leftover_of_a_killed_consolidation_is_removed_and_told(next_one: str, path: str) -> None:
    killed(lambda: leave_file(path))
    name, _ = sorted(os.listdir(os.path.dirname(path)))
    notes = written(path) if next_one == "a file" else saved(path)
    assert notes == [f"removed the leftover of an unfinished save, 1 file, 2.00 MiB, {name}"]
    assert beside(path) == []


def test_a_file_is_made_by_one_process_at_a_time_and_replaces_nothing(path: str) -> None:
    with new_file(path) as (file, _):
        os.write(file, b"first")
        with pytest.raises(FileExistsError, match="another process is saving"):
            written(path, b"second")
        assert written(path + "2", b"other") == []
    assert Path(path).read_bytes() == b"first"
    with pytest.raises(FileExistsError):
        written(path, b"third")
    assert Path(path).read_bytes() == b"first"
    assert beside(path) == ["step-1.ckpt2"]


@pytest.mark.parametrize("flags", [True, False], ids=["renameat2", "rename"])
def test_a_file_that_appears_meanwhile_is_not_replaced(flags: bool, path: str) -> None:
    rename = rename_with_flag if flags else without_flags
    with new_file(path + "2", rename):
        pass
    os.unlink(path + "2")
    with pytest.raises(FileExistsError), new_file(path, rename):
        Path(path).write_bytes(b"thesis")
    assert Path(path).read_bytes() == b"thesis" and beside(path) == []


def test_an_error_leaves_no_file(path: str) -> None:
    with pytest.raises(ZeroDivisionError), new_file(path):
        _ = 1 // 0
    assert os.listdir(os.path.dirname(path)) == []


# ── what the user sees ────────────────────────────────────────────────────────────────────────────────────────────


def test_all_that_a_save_found_is_one_warning(path: str) -> None:
    import torch

    from lightning_shardckpt import ShardCkptIO

    killed(lambda: [begun(path + name, a=b"1") for name in ("1", "2")])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            io = ShardCkptIO()
            io.storage = StorageRouter(LOCAL)
            io.save_checkpoint({"state_dict": {"w": torch.ones(2)}}, path)
    (warning,) = caught
    assert str(warning.message).count("removed the leftover of an unfinished save, 1 file, 1 B") == 2
