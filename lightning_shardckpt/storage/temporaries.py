"""Temporary names: content is written under one, claimed by its process, and then renamed to its path.

The content of a target is written under ``.tmp-<hash of the target's base name>-<save id>``, and its process holds the
lock of a claim meanwhile: a file of that name followed by ``.<hash of the machine>``. So a temporary whose claim is of
this machine and can be locked is a leftover of a dead process. Locks may not reach other machines, or may not exist: a
temporary of another machine, or without a claim, is a leftover if it has not changed for an hour. Nothing else of other
processes is deleted, and never the target of a link.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache, partial
from typing import TypeAlias
from uuid import uuid4

from lightning_shardckpt.format.value_checks import checksum
from lightning_shardckpt.storage.posix import (
    errors_with_path,
    exchange,
    keep_owner_and_mode,
    locked,
    make_directories,
    release,
    status_of,
    sync_directory,
    try_lock,
)

QUIET_S = 3600.0
_FOLDER_WAIT_S = 5.0  # for the lock of a folder, which is held only briefly
_NAME = re.compile(r"(\.tmp-([0-9a-f]{16})-([0-9a-f]{32}))(?:\.([0-9a-f]{16}))?")


def temporary_name(target: str, save_id: str, folder: str | None = None) -> str:
    """Return the path under which the content of ``target`` is written; by default in the folder of the target."""
    key = checksum(os.fsencode(os.path.basename(target)))
    return os.path.join(os.path.dirname(target) if folder is None else folder, f".tmp-{key}-{save_id}")


def is_temporary(name: str) -> bool:
    """Return True if a name is one of a temporary or of a claim."""
    return _NAME.fullmatch(name) is not None


@cache
def this_machine() -> str:
    """Return 16 hex digits for the running kernel, whose processes see each other's locks."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            return checksum(file.read())
    except OSError:  # a sandbox
        return checksum(os.uname().nodename.encode())


class Temporary:
    """A temporary name that this process has claimed, until ``publish`` or ``drop``.

    Args:
        target: the absolute path where the content will appear.
        save_id: 32 hex digits for the name.
        folder: of the temporary, by default that of the target. Leftovers of dead processes in it are deleted.
        machine: the name of this machine; tests pass others.

    Attributes:
        path: the temporary path; nothing is there at first.
        notes: sentences for the user about leftovers and what could not be deleted.
        living: the ids of saves in the same folder that may still be going on.

    Raises:
        FileExistsError: if another process is writing ``target`` right now; nothing was changed then.
    """

    def __init__(self, target: str, save_id: str, folder: str | None = None, machine: str | None = None) -> None:
        self.path, self.notes, self.living = temporary_name(target, save_id, folder), list[str](), set[str]()
        self._folder, machine = os.path.dirname(self.path), machine or this_machine()
        self._claim, self._file = f"{self.path}.{machine}", -1
        try:
            self._take(target, machine)
        except BaseException:
            self._release(is_done=True)
            raise

    def _take(self, target: str, machine: str) -> None:
        """Claim the name, and delete leftovers in the folder."""
        with locked(self._folder, os.O_RDONLY | os.O_DIRECTORY, _FOLDER_WAIT_S):  # or without: its holder is no save
            others = _temporaries_in(self._folder)
            held = {path: _is_held(path, owner) for path, owner in others.items()}
            for path in filter(held.get, others):
                if path.startswith(self.path[:-32]):
                    raise FileExistsError(
                        f"another process is saving to {target!r} right now (it, or a process that it started, holds "
                        f"{path!r}); let each job save to paths of its own"
                    )
            self._file = _create(self._claim)
            try_lock(self._file)
        if others:
            sync_directory(self._folder)  # or else a loss of power might bring back the name of what is deleted here
        quiet_since = os.fstat(self._file).st_mtime - QUIET_S  # by the clock of the file system
        for path, owner in others.items():
            is_dead = owner == machine and held[path] is False
            if held[path] or not (is_dead or _last_change(path, owner) <= quiet_since):
                self.living.add(path[-32:])
            else:
                self.notes += _remove_leftover(path, owner)

    @property
    def is_held(self) -> bool:
        """True until ``publish`` or ``drop``."""
        return self._file >= 0

    def publish(self, move: Callable[[], Iterable[str]], *, sync: bool, old: str = "the replaced checkpoint") -> None:
        """Move the content to its place, sync the folder, and delete what was there; a failure to do so is a note.

        Args:
            move: moves the content, and returns the paths that are to be deleted. If it raises, the claim is kept.
            sync: make the move durable before anything is deleted.
            old: describes what is deleted.
        """
        paths, is_done = move(), False  # if the sync fails, nothing may be deleted
        try:
            if sync:
                sync_directory(self._folder)
            errors = [(path, error) for path in paths if (error := delete(path)) is not None]
            is_done = not errors
            self.notes += [f"could not remove {old} {path!r}: {error}" for path, error in errors[:1]]
        finally:
            self._release(is_done)

    def drop(self) -> OSError | None:
        """Delete the content, unless it was published; return the error if it stays, as a leftover."""
        error = delete(self.path) if self.is_held else None
        self._release(is_done=error is None)
        return error

    def _release(self, is_done: bool) -> None:
        if self.is_held:
            if is_done:
                with suppress(OSError):
                    os.unlink(self._claim)
            release(self._file)
            self._file = -1


def _temporaries_in(folder: str) -> dict[str, str | None]:
    """Return the machine that claimed each temporary in a folder, by path; None for one without a claim."""
    matches = [match for name in sorted(os.listdir(folder)) if (match := _NAME.fullmatch(name))]
    return {os.path.join(folder, match[1]): match[4] for match in matches}  # a claim follows its temporary


def _is_held(path: str, owner: str | None) -> bool | None:
    """Return True if a process holds the claim; None if that is unknown: without a claim, or without locks."""
    try:
        file = os.open(f"{path}.{owner}", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        is_free = try_lock(file)
        return None if is_free is None else not is_free
    finally:
        release(file)


def _remove_leftover(path: str, owner: str | None) -> list[str]:
    """Delete a temporary and its claim; return sentences for the user."""
    exists, error = os.path.lexists(path), delete(path)
    if error is not None:
        return [f"could not remove the leftover of an unfinished save, {path!r}: {error}"]
    if owner is not None:
        delete(f"{path}.{owner}")
    return [f"removed the leftover of an unfinished save, {path!r}"] if exists else []


def _last_change(path: str, owner: str | None) -> float:
    """Return when a temporary, its claim, or a file in it was changed last."""
    last = 0.0
    for name in (path, f"{path}.{owner}"):
        with suppress(OSError):
            last = max(last, os.lstat(name).st_mtime)
            with os.scandir(name) as entries:
                last = max([last, *(entry.stat(follow_symlinks=False).st_mtime for entry in entries)])
    return last


def delete(path: str) -> OSError | None:
    """Delete a directory or a file without following links; return the error if it could not be deleted."""
    while os.path.lexists(path):
        try:
            if os.path.isdir(path) and not os.path.islink(path):
                with suppress(OSError):
                    os.chmod(path, 0o700)  # an old checkpoint may be read-only
                shutil.rmtree(path)
            else:
                os.unlink(path)
        except FileNotFoundError:  # another process is deleting it, too
            pass
        except OSError as error:
            return error
    return None


# ── outputs of exports ────────────────────────────────────────────────────────────────────────────────────────────────
# An output is in place and durable when its context ends, with the mode, owner and group of what it replaces; after an
# error in the context, none of it is left.

NewFile: TypeAlias = Callable[[str], AbstractContextManager[int]]
"""Creates a file with a name, which may contain slashes; yields its descriptor."""


@contextmanager
def output_file(path: str, *, overwrite: bool) -> Iterator[tuple[int, list[str]]]:
    """Create a file, and yield its descriptor and notes for the user. With ``overwrite``, it may replace a file.

    Raises:
        FileExistsError: if anything is at ``path`` at the end, or another process is creating it.
        PermissionError: if the file that is there has an owner or group that cannot be kept.
    """

    def put(new: str, target: str) -> list[str]:
        if not overwrite and os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, "a file appeared there meanwhile", target)
        os.replace(new, target)
        return []

    with _output(path, lambda name: os.close(_create(name)), put) as new:
        file = os.open(new.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            yield file, new.notes
            os.fsync(file)
        finally:
            os.close(file)


@contextmanager
def output_directory(path: str, replaceable: Callable[[str], bool]) -> Iterator[tuple[NewFile, list[str]]]:
    """Create a directory, and yield a function that creates files in it, and notes for the user.

    At the end, ``replaceable`` is called with the path of a directory that is there.

    Raises:
        OSError: if ``path`` must not be replaced, or another process is creating it.
        PermissionError: if the directory that is there has an owner or group that cannot be kept.
    """

    def put(new: str, target: str) -> list[str]:
        if not (os.path.isdir(target) and not os.path.islink(target) and os.listdir(target) and replaceable(target)):
            os.rename(new, target)  # which replaces nothing but an empty directory
            return []
        if exchange(new, target):
            return [new]
        if (error := delete(target)) is not None:  # a file system that can't exchange two names
            raise error
        os.rename(new, target)
        return []

    with _output(path, os.mkdir, put) as new:
        yield partial(_create_in, new.path), new.notes
        for folder, _, names in os.walk(new.path, topdown=False):
            for name in names:
                with open(os.path.join(folder, name), "rb") as file, errors_with_path(file.name):
                    os.fsync(file.fileno())
            sync_directory(folder)


@contextmanager
def _output(path: str, make: Callable[[str], object], put: Callable[[str, str], list[str]]) -> Iterator[Temporary]:
    target = os.path.abspath(path)
    status_of(target)  # a path may be too long, and a name, which only shows if its parent exists
    make_directories(os.path.dirname(target))
    status_of(target)
    new = Temporary(target, uuid4().hex)
    try:
        make(new.path)
        if not keep_owner_and_mode(target, new.path, writable=True):
            text = "its owner or group can't be kept: delete it, or give another path"
            raise PermissionError(errno.EPERM, text, target)
        with errors_with_path(new.path):
            yield new
        keep_owner_and_mode(target, new.path)
        new.publish(lambda: put(new.path, target), sync=True, old="the replaced export")
    finally:
        new.drop()


def _create(path: str) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


@contextmanager
def _create_in(folder: str, name: str) -> Iterator[int]:
    """Create a file below a folder, and yield its descriptor."""
    path = os.path.join(folder, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    file = _create(path)
    try:
        yield file
    finally:
        os.close(file)
