"""Name temporary directories and files, and delete those that killed processes left.

A temporary is ``.tmp-<hash of the target's base name>-<save id>``. Who works at one holds its lock, so one that can be
locked is of a process that is gone. What is to be deleted first takes a name with the hash of no target, so that it is
not taken for a save to that target. Nothing is deleted that has no name of this pattern, nor what a link names.
"""

from __future__ import annotations

import errno
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

# ── what a save may replace ───────────────────────────────────────────────────────────────────────────────────────────
# Check that what a save would replace is nothing that somebody would miss.


def check_replaceable(target: str) -> None:
    """Raise unless nothing is at ``target``, or an empty directory, a checkpoint of ours or a link.

    Raises:
        FileExistsError: for anything else.
        OSError: if no file system would take the name.
    """
    there = check_name(target)
    if there is None:
        return
    if stat.S_ISLNK(there.st_mode):  # such as ModelCheckpoint's "last": the link is replaced, not what it names
        return
    if not stat.S_ISDIR(there.st_mode):
        raise FileExistsError(
            f"a file is in the way at {target!r}: a sharded checkpoint is a directory; move it or use another path"
        )
    with suppress(FileNotFoundError):  # it was removed since
        strange = os.listdir(target) and not os.path.exists(os.path.join(target, ROOT_NAME))
        if strange and os.path.samestat(there, os.lstat(target)):  # it was there all the time
            raise FileExistsError(
                f"the directory {target!r} is not empty and holds no checkpoint of ours, so it is not "
                "replaced; move it or use another path"
            )


def check_name(path: str) -> os.stat_result | None:
    """Return what is known of what is at a path, None if nothing is.

    Raises:
        OSError: saying so if the name is too long; making something there would fail only at the end.
    """
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):  # making the parent says which one is a file
        return None
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        length = len(os.fsencode(os.path.basename(path)))
        problem = f"a name of {length} bytes in a path of {len(os.fsencode(path))} is too long for this file system"
        raise OSError(errno.ENAMETOOLONG, problem + "; shorten it", path) from None


_PATTERN = re.compile(r"\.tmp-([0-9a-f]{16})-[0-9a-f]{32}")
_DELETE_ATTEMPTS = 3


def temporary_name(target: str, save_id: str) -> str:
    """The path at which every rank of a save writes what will be at ``target``."""
    return os.path.join(os.path.dirname(target), f".tmp-{_key(target)}-{save_id}")


def aside_name(path: str) -> str:
    """Return where an old checkpoint waits while the new one takes its name, if they can't be exchanged in one step."""
    return os.path.join(os.path.dirname(path), f".old-{_key(path)}")


def doomed_name(path: str) -> str:
    """A new path beside ``path`` for what is to be deleted."""
    return os.path.join(os.path.dirname(path), f".tmp-{_key('')}-{uuid.uuid4().hex}")


def _key(target: str) -> str:
    return checksum(os.fsencode(os.path.basename(target)))


@dataclass(slots=True)
class Claim:
    """A temporary that no other process takes for a leftover, until it is released; ``notes`` are for the user."""

    file: int
    notes: list[str]

    def release(self) -> None:
        """Let others have it; it must not be a temporary any more, else it is a leftover now."""
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
    """Make a temporary of ``target`` and hold its lock; delete what dead processes left beside it.

    Args:
        target: where it will appear.
        temporary: its name until then, of ``temporary_name``.
        make: makes and opens it.
        file_system: on which it is.
        tuning: how long to wait for others, and what counts as abandoned where locks do not reach everybody.

    Raises:
        FileExistsError: if another process is making a ``target`` right now; nothing was changed then.
    """
    parent = os.path.dirname(temporary)
    with locks.alone_in(parent, tuning.lock_wait_s):
        own = Claim(make(temporary), [])
        quiet_s = None if file_system.locks_bind_everybody(parent) else tuning.leftover_quiet_s
        try:
            if locks.take(own.file) is False:
                raise _in_use(target, temporary)
            doomed = list(_doom_all(_dead(target, temporary, own.notes, quiet_s), parent, own.notes))
        except BaseException:
            delete(temporary)
            own.release()
            raise
    for name, path, file in doomed:
        said = _describe(path)
        error = delete(path)
        locks.release(file)
        own.notes.append(f"removed {said}, {name}" if error is None else f"could not remove {said}, {path!r}: {error}")
    return own


@dataclass(slots=True)
class Doomed:
    """A checkpoint that is to be deleted, under a new name, or the link to one under its own.

    Attributes:
        path: where it is now.
        file: holds its lock; None if somebody still reads it, and for a link.
        notes: what went wrong, as sentences: it is out of the way already, so that is no reason to fail.
    """

    path: str
    file: int | None = None
    notes: list[str] = field(default_factory=list)

    def delete(self) -> list[str]:
        """Delete it, unless somebody reads it: that is left to the next save. Returns the notes."""
        link = os.path.islink(self.path)
        why = delete(self.path) if link or self.file is not None else None
        self.keep()
        return self.notes + ([] if why is None else [f"could not remove the replaced checkpoint {self.path!r}: {why}"])

    def keep(self) -> None:
        """Leave it to the next save."""
        if self.file is not None:
            locks.release(self.file)
            self.file = None


def doom(path: str) -> Doomed:
    """Rename a checkpoint to something to be deleted. It is locked before, so that no save takes it for a leftover.

    Raises:
        OSError: if that is not possible.
    """
    if os.path.islink(path):
        return Doomed(path)
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    doomed = Doomed(doomed_name(path), file)
    try:
        unread = locks.take_unless_read(file)
        os.rename(path, doomed.path)
        replaced = not os.path.samestat(os.fstat(file), os.lstat(doomed.path))  # since it was opened
    except BaseException:
        doomed.keep()
        raise
    if replaced or not unread:
        doomed.keep()
    return doomed


def doom_replaced(path: str) -> Doomed:
    """Do the same with what a new checkpoint replaced; what is not possible becomes a note."""
    try:
        return doom(path)
    except FileNotFoundError:  # another process took it for a leftover
        return Doomed(path)
    except OSError as error:
        return Doomed(path, notes=[f"could not remove the replaced checkpoint {path!r}: {error}"])


def _dead(target: str, own: str, notes: list[str], quiet_s: float | None) -> dict[str, int]:
    """The leftovers beside a temporary that this process just made, by name, locked.

    Args:
        target: of the temporary.
        own: the temporary.
        notes: gets sentences about what is left.
        quiet_s: how long one must not have changed; None where all who may write it see its lock.

    Raises:
        FileExistsError: if one is of a live process with the same target.
    """
    parent, dead = os.path.dirname(own), dict[str, int]()
    try:
        for name in sorted(os.listdir(parent)):
            match, path = _PATTERN.fullmatch(name), os.path.join(parent, name)
            file = None if match is None or path == own else _open_leftover(path, notes)
            if match is not None and os.path.islink(path):
                with suppress(OSError):  # another process may be about to do it
                    os.unlink(path)
                    notes.append(f"removed a link that an interrupted save replaced, {name}")
            if match is None or file is None:
                continue
            took = locks.take(file)
            if took is False and match[1] == _key(target) and locks.take(file, shared=True) is False:
                os.close(file)  # a reader's lock would have been shared
                raise _in_use(target, path)
            why = None if took else "this file system has no locks, so nobody can tell"
            if took and quiet_s is not None and _changed_since(path, _now(own) - quiet_s):
                why = "it changed within the last hour, and another machine may be writing it"
            if took and why is None:
                dead[name] = file
                continue
            locks.release(file)
            if took is not False:
                notes.append(f"left {path!r}, maybe of an unfinished save: {why}; remove it when no save is running")
    except BaseException:
        for file in dead.values():
            locks.release(file)
        raise
    return dead


def _doom_all(dead: dict[str, int], parent: str, notes: list[str]) -> Iterator[tuple[str, str, int]]:
    """Each leftover under a name of something to be deleted: the name it had, the new path, and its lock."""
    for name, file in dead.items():
        path = os.path.join(parent, name)
        doomed = doomed_name(path)
        try:
            os.rename(path, doomed)
        except OSError as error:
            if not isinstance(error, FileNotFoundError):  # else whoever left it deletes it
                notes.append(f"could not remove {_describe(path)}, {path!r}: {error}")
            locks.release(file)
        else:
            yield name, doomed, file


def _open_leftover(path: str, notes: list[str]) -> int | None:
    """A directory or a regular file of a temporary's name; None for anything else."""
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
    """Yield what is known of a temporary and of the files in it."""
    with suppress(OSError):
        yield os.lstat(path)
        for name in os.listdir(path):
            yield os.lstat(os.path.join(path, name))


def _now(own: str) -> float:
    """Return what the clock of the file system said just now."""
    return os.lstat(own).st_mtime


def _changed_since(path: str, when: float) -> bool:
    return any(found.st_mtime > when for found in _contents(path))


def _describe(path: str) -> str:
    files = [found for found in _contents(path) if stat.S_ISREG(found.st_mode)]
    complete = os.path.exists(os.path.join(path, ROOT_NAME))
    what = "a checkpoint that was replaced or deleted" if complete else "the leftover of an unfinished save"
    return f"{what}, {count_text(len(files), 'file')}, {size_text(sum(found.st_size for found in files))}"


def delete(path: str) -> OSError | None:
    """Delete a directory or a file; links in it are not followed. Returns why it is still there."""
    for _ in range(_DELETE_ATTEMPTS):
        try:
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            else:
                os.unlink(path)
            return None
        except FileNotFoundError:  # somebody deletes it, too
            if not os.path.lexists(path):
                return None
        except OSError as error:
            return error
    return OSError(f"{path!r} changes while it is deleted")
