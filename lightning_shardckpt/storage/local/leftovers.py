"""Temporary directories and files: their names, and the deletion of leftovers of killed processes.

A temporary is called ``.tmp-<hash of the target's base name>-<save id>``. The process that writes it holds its lock, so
a temporary that can be locked is a leftover of a dead process. Before a directory is deleted it is renamed to trash, a
temporary name with the hash of no target, so that it is not mistaken for a save to a target. Only entries with names of
this pattern are deleted, and never the target of a link.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from lightning_shardckpt.format.checksum import checksum
from lightning_shardckpt.format.index import ROOT_NAME
from lightning_shardckpt.storage.local import locks
from lightning_shardckpt.storage.local.posix import POSIX, FileSystem
from lightning_shardckpt.system.text import count_text, size_text
from lightning_shardckpt.system.tuning import TUNING, Tuning

# ── targets that a save may replace ───────────────────────────────────────────────────────────────────────────────────


def check_replaceable(target: str) -> None:
    """Check that a save may replace ``target``: a missing path, an empty directory, a checkpoint of ours or a link.

    Raises:
        FileExistsError: for anything else.
        OSError: if the name is too long.
    """
    entry = status_of(target)
    if entry is None:
        return
    if stat.S_ISLNK(entry.st_mode):  # such as ModelCheckpoint's "last"; the link is replaced, its target stays
        return
    if not stat.S_ISDIR(entry.st_mode):
        raise FileExistsError(
            f"a file is in the way at {target!r}: a sharded checkpoint is a directory; move it or use another path"
        )
    with suppress(FileNotFoundError):  # removed since
        is_foreign = os.listdir(target) and not os.path.exists(os.path.join(target, ROOT_NAME))
        if is_foreign and os.path.samestat(entry, os.lstat(target)):  # not replaced between these calls
            raise FileExistsError(
                f"the directory {target!r} is not empty and holds no checkpoint of this package, so it is not "
                "replaced; move it or use another path"
            )


def status_of(path: str) -> os.stat_result | None:
    """Return the status of a path, not following a link; None if nothing is there. Raises OSError if it is too long."""
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):  # creating the parent will name the component that is a file
        return None


_PATTERN = re.compile(r"\.tmp-([0-9a-f]{16})-[0-9a-f]{32}")
_DELETE_ATTEMPTS = 3


def temporary_name(target: str, save_id: str) -> str:
    """Return the path where all ranks of a save write the content of ``target``."""
    return os.path.join(os.path.dirname(target), f".tmp-{_key(target)}-{save_id}")


def aside_name(path: str) -> str:
    """Return the path to which an old checkpoint is moved for a moment if it can't be exchanged with the new one."""
    return os.path.join(os.path.dirname(path), f".old-{_key(path)}")


def trash_name(path: str) -> str:
    """Return a new path next to ``path`` for a directory that is about to be deleted."""
    return os.path.join(os.path.dirname(path), f".tmp-{_key('')}-{uuid.uuid4().hex}")


def _key(target: str) -> str:
    return checksum(os.fsencode(os.path.basename(target)))


@dataclass(slots=True)
class Claim:
    """The lock on a temporary, without which other processes would delete it as a leftover; and notes for the user."""

    file: int
    notes: list[str]

    def release(self) -> None:
        """Release the lock. A temporary that still has its name is a leftover from here on."""
        if self.file >= 0:
            locks.release(self.file)
            self.file = -1


def claim(
    target: str,
    temporary: str,
    make: Callable[[str], int],
    file_system: FileSystem = POSIX,
    tuning: Tuning = TUNING,
) -> Claim:
    """Create a temporary for ``target`` and lock it; delete leftovers of dead processes next to it.

    Args:
        target: the path where the temporary will appear when it is complete.
        temporary: its path until then, from ``temporary_name``.
        make: creates and opens the temporary.
        file_system: the file system's calls.
        tuning: timeout of the directory's lock, and the age of leftovers where other machines don't see locks.

    Raises:
        FileExistsError: if another process is writing ``target`` right now; nothing was changed then.
    """
    parent = os.path.dirname(temporary)
    with locks.locked_directory(parent, tuning.lock_wait_s):
        own = Claim(make(temporary), [])
        quiet_s = None if file_system.has_global_locks(parent) else tuning.leftover_quiet_s
        try:
            if locks.try_lock(own.file) is False:
                raise _in_use(target, temporary)
            leftovers = _lock_leftovers(target, temporary, own.notes, quiet_s)
            trash = list(_move_leftovers_to_trash(leftovers, parent, own.notes))
        except BaseException:
            delete(temporary)
            own.release()
            raise
    for name, path, file in trash:
        leftover = _describe(path)
        error = delete(path)
        locks.release(file)
        own.notes.append(
            f"removed {leftover}, {name}" if error is None else f"could not remove {leftover}, {path!r}: {error}"
        )
    return own


@dataclass(slots=True)
class Trash:
    """A checkpoint that was renamed in order to be deleted, or a link to one, which keeps its name.

    Attributes:
        path: the current path.
        file: a descriptor that holds the lock; None for a link, and while another process reads the checkpoint.
        notes: failures, as sentences for the user; the path is already free, so they are not raised.
    """

    path: str
    file: int | None = None
    notes: list[str] = field(default_factory=list)

    def delete(self) -> list[str]:
        """Delete it, unless a process is reading it: then the next save deletes it. Returns the notes."""
        is_link = os.path.islink(self.path)
        error = delete(self.path) if is_link or self.file is not None else None
        self.keep()
        if error is None:
            return self.notes
        return [*self.notes, f"could not remove the replaced checkpoint {self.path!r}: {error}"]

    def keep(self) -> None:
        """Release the lock, which leaves the deletion to the next save."""
        if self.file is not None:
            locks.release(self.file)
            self.file = None


def move_to_trash(path: str) -> Trash:
    """Rename a checkpoint in order to delete it. It is locked first, so that no save takes it for a leftover.

    Raises:
        OSError: if it cannot be opened or renamed.
    """
    if os.path.islink(path):
        return Trash(path)
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    trash = Trash(trash_name(path), file)
    try:
        unread = locks.lock_unless_read(file)
        os.rename(path, trash.path)
        replaced = not os.path.samestat(os.fstat(file), os.lstat(trash.path))  # since it was opened
    except BaseException:
        trash.keep()
        raise
    if replaced or not unread:
        trash.keep()
    return trash


def trash_replaced(path: str) -> Trash:
    """Do the same for a checkpoint that a new one replaced; a failure becomes a note."""
    try:
        return move_to_trash(path)
    except FileNotFoundError:  # another process took it for a leftover
        return Trash(path)
    except OSError as error:
        return Trash(path, notes=[f"could not remove the replaced checkpoint {path!r}: {error}"])


def _lock_leftovers(target: str, own: str, notes: list[str], quiet_s: float | None) -> dict[str, int]:
    """Lock the leftovers next to a temporary that this process just created.

    Args:
        target: the target of the temporary.
        own: the path of the temporary.
        notes: receives sentences about leftovers that stay.
        quiet_s: the time for which a leftover must not have changed; None if all possible writers see its lock.

    Returns:
        Descriptors that hold the locks, by name.

    Raises:
        FileExistsError: if a live process is writing to the same target.
    """
    parent, locked = os.path.dirname(own), dict[str, int]()
    try:
        for name in sorted(os.listdir(parent)):
            match, path = _PATTERN.fullmatch(name), os.path.join(parent, name)
            file = None if match is None or path == own else _open_leftover(path, notes)
            if match is not None and os.path.islink(path):
                with suppress(OSError):  # another process may have unlinked it
                    os.unlink(path)
                    notes.append(f"removed a link that an interrupted save replaced, {name}")
            if match is None or file is None:
                continue
            is_locked = locks.try_lock(file)
            if is_locked is False and match[1] == _key(target) and locks.try_lock(file, shared=True) is False:
                os.close(file)  # held exclusively: by a writer, since a reader's lock is shared
                raise _in_use(target, path)
            reason = None if is_locked else "this file system has no locks, so its owner can't be determined"
            if is_locked and quiet_s is not None and _changed_since(path, _now(own) - quiet_s):
                reason = "it changed within the last hour, and another machine may be writing it"
            if is_locked and reason is None:
                locked[name] = file
                continue
            locks.release(file)
            if is_locked is not False:
                notes.append(f"left {path!r}, maybe of an unfinished save: {reason}; remove it when no save is running")
    except BaseException:
        for file in locked.values():
            locks.release(file)
        raise
    return locked


def _move_leftovers_to_trash(
    leftovers: dict[str, int], parent: str, notes: list[str]
) -> Iterator[tuple[str, str, int]]:
    """Rename leftovers in order to delete them; yield the old name, the new path and the lock of each."""
    for name, file in leftovers.items():
        path = os.path.join(parent, name)
        trash = trash_name(path)
        try:
            os.rename(path, trash)
        except OSError as error:
            if not isinstance(error, FileNotFoundError):  # if it is gone, its owner has deleted it
                notes.append(f"could not remove {_describe(path)}, {path!r}: {error}")
            locks.release(file)
        else:
            yield name, trash, file


def _open_leftover(path: str, notes: list[str]) -> int | None:
    """Open a directory or a regular file with a temporary's name; return None for anything else."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if not os.path.islink(path) and os.path.isdir(path):
            notes.append(f"left {path!r}, maybe of an unfinished save: {error}")
        return None
    mode = os.fstat(file).st_mode
    if stat.S_ISDIR(mode) or stat.S_ISREG(mode):
        return file
    os.close(file)
    return None


def _in_use(target: str, path: str) -> FileExistsError:
    return FileExistsError(
        f"another process is saving to {target!r} right now (it holds {path!r}, or a process that it started does); "
        "let each job save to paths of its own"
    )


def _contents(path: str) -> Iterator[os.stat_result]:
    """Yield the ``lstat`` of a temporary and of the files in it."""
    with suppress(OSError):
        yield os.lstat(path)
        for name in os.listdir(path):
            yield os.lstat(os.path.join(path, name))


def _now(own: str) -> float:
    """Return the current time by the clock of the file system: the mtime of a temporary that was just created."""
    return os.lstat(own).st_mtime


def _changed_since(path: str, when: float) -> bool:
    return any(entry.st_mtime > when for entry in _contents(path))


def _describe(path: str) -> str:
    files = [entry for entry in _contents(path) if stat.S_ISREG(entry.st_mode)]
    complete = os.path.exists(os.path.join(path, ROOT_NAME))
    origin = "a checkpoint that was replaced or deleted" if complete else "the leftover of an unfinished save"
    return f"{origin}, {count_text(len(files), 'file')}, {size_text(sum(file.st_size for file in files))}"


def delete(path: str) -> OSError | None:
    """Delete a directory or a file without following links; return the error if it could not be deleted."""
    for _ in range(_DELETE_ATTEMPTS):
        try:
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            else:
                os.unlink(path)
            return None
        except FileNotFoundError:  # another process is deleting it, too
            if not os.path.lexists(path):
                return None
        except OSError as error:
            return error
    return OSError(f"{path!r} changes while it is deleted")
