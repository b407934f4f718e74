"""Files of a local or shared POSIX file system: durable writes, locks, and temporaries that replace what is there.

The content of a target is written under ``.tmp-<hash of the target's base name>-<save id>``, and its process holds the
lock of a claim meanwhile: a file of that name followed by ``.<hash of the machine>``. So a temporary whose claim is of
this machine and can be locked is a leftover of a dead process. Locks may not reach other machines, or may not exist: a
temporary of another machine, or without a claim, is a leftover if it has not changed for an hour. Nothing else of other
processes is deleted, and never the target of a link.

Locks are advisory ``flock`` locks on open files, which the kernel releases when the process that holds them ends. A
process that was forked in the meantime, such as a data loader's worker, shares them, so they are always unlocked
explicitly, not by closing. Some network file systems have no locks.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from typing import TypeAlias
from uuid import uuid4

from lightning_shardckpt.format.value_checks import checksum
from lightning_shardckpt.storage.protocol import Bytes

WRITEBACK_BYTES = 8 << 20  # no difference from 1 to 32 MiB
_QUIET_S = 3600.0
_FOLDER_WAIT_S = 5.0  # for the lock of a folder, which is held only briefly
_POLL_S = 0.05
_CALL_BYTES = 256 << 10  # measured on ext4, Linux 6.18, with little free memory: calls of 1 to 4 MiB took twice as long
_BUFFER_BYTES = 128 << 10  # for small parts; less than a call, so that larger parts are not copied
_AT_FDCWD, _EXCHANGE = -100, 2  # RENAME_EXCHANGE
_WRITE = 2  # SYNC_FILE_RANGE_WRITE alone: with a flag that waits, errors would be reported here and not by fsync
_NO_LOCKS = (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_NAME = re.compile(r"(\.tmp-([0-9a-f]{16})-([0-9a-f]{32}))(?:\.([0-9a-f]{16}))?")


@contextmanager
def errors_with_path(path: str) -> Iterator[None]:
    """Add a path to errors of the operating system, since calls on a descriptor raise them without one."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and not (error.filename and os.path.isabs(error.filename)):
            error.filename = path
        raise


# ── directories and names ─────────────────────────────────────────────────────────────────────────────────────────────


def make_directories(path: str, *, sync: bool = True) -> None:
    """Create directories like ``os.makedirs``; with ``sync``, they are durable on return."""
    missing = []
    while not os.path.lexists(path):
        missing.append(path)
        path = os.path.dirname(path)
    for name in reversed(missing):
        with suppress(FileExistsError):
            os.mkdir(name)
        if sync:
            sync_directory(os.path.dirname(name))


def sync_directory(path: str) -> None:
    """Sync a directory, which makes the names in it durable."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with errors_with_path(path):
            os.fsync(directory)
    finally:
        os.close(directory)


def exchange(one: str, other: str) -> bool:
    """Exchange two names in one step; return False if the system or the file system does not support it."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(code, f"exchanging {one!r} and {other!r}: {os.strerror(code)}")


def keep_owner_and_mode(target: str, new: str, *, writable: bool = False) -> bool:
    """Give a new directory or file the owner, group and mode of what is at ``target``, unless that is a link.

    Args:
        target: the path that ``new`` will be renamed to; nothing needs to be there.
        new: a directory or regular file of this process.
        writable: let this process's user write to it in any case, until the next call without this.

    Returns:
        False if the owner or the group cannot be kept; the mode is not changed then.
    """
    old, own = os.lstat(target) if os.path.lexists(target) else None, os.lstat(new)
    if old is None or stat.S_IFMT(old.st_mode) != stat.S_IFMT(own.st_mode):
        return True
    if (old.st_uid, old.st_gid) != (own.st_uid, own.st_gid):
        try:
            os.chown(new, old.st_uid, old.st_gid, follow_symlinks=False)
        except PermissionError:
            return False
    mode = stat.S_IMODE(old.st_mode) | (stat.S_IRWXU if writable else 0)
    if mode != stat.S_IMODE(os.lstat(new).st_mode):  # a change of the owner may have cleared bits
        os.chmod(new, mode)
    return True


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


# ── content of files ──────────────────────────────────────────────────────────────────────────────────────────────────


def write_file(path: str, parts: Iterable[Bytes], *, sync: bool) -> None:
    """Write all parts into a new file, one after the other, and with ``sync`` make it durable.

    The kernel writes earlier parts to the disk while the next parts are produced, so that the final sync has little to
    wait for. The file stays in the page cache for a later load.
    """
    dirty_bytes = 0
    with errors_with_path(path), open(path, "xb", buffering=_BUFFER_BYTES) as file:
        for part in parts:
            for at in range(0, len(part), _CALL_BYTES):
                file.write(part[at : at + _CALL_BYTES])
            dirty_bytes += len(part)
            if sync and dirty_bytes >= WRITEBACK_BYTES:
                begin_writeback(file.fileno())
                dirty_bytes = 0
        file.flush()
        if sync:
            os.fsync(file.fileno())


def begin_writeback(file: int) -> None:
    """Ask the kernel to write a file's dirty pages to the disk, without waiting.

    It is only a hint: ``fsync`` must follow, and reports failed writes.
    """
    if (sync_file_range := getattr(ctypes.CDLL(None), "sync_file_range", None)) is not None:
        sync_file_range(file, ctypes.c_int64(0), ctypes.c_int64(0), _WRITE)  # a length of 0 means to the end


def write_at(file: int, data: memoryview, offset: int) -> None:
    """Write all of ``data`` at an offset of an open file."""
    while len(data):
        count = os.pwrite(file, data[:_CALL_BYTES], offset)
        data, offset = data[count:], offset + count


# ── locks ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def locked(path: str, flags: int, wait_s: float) -> Iterator[int | None]:
    """Open a file or directory with ``flags``, and hold its lock; proceed without in a file system that has none.

    Yields the descriptor, or None if another process holds the lock for longer than ``wait_s``.
    """
    file, deadline = os.open(path, flags | os.O_CLOEXEC, 0o600), time.monotonic() + wait_s
    try:
        while not (is_ours := _try_lock(file) is not False) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        yield file if is_ours else None
    finally:
        _release(file)


def _try_lock(file: int) -> bool | None:
    """Lock an open file without waiting: False if another process has the lock, None if there are no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        raise
    return True


def _release(file: int) -> None:
    with suppress(OSError):  # the file system has no locks
        fcntl.flock(file, fcntl.LOCK_UN)
    os.close(file)


# ── temporaries ───────────────────────────────────────────────────────────────────────────────────────────────────────


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

    Attributes:
        path: the temporary path; nothing is there at first.
        notes: sentences for the user about leftovers and what could not be deleted.
        living: the ids of saves in the same folder that may still be going on.

    Raises:
        FileExistsError: if another process is writing ``target`` right now; nothing was changed then.
    """

    def __init__(self, target: str, save_id: str, folder: str | None = None) -> None:
        machine, self.path = this_machine(), temporary_name(target, save_id, folder)
        self.notes, self.living = list[str](), set[str]()
        self._folder, self._claim, self._file = os.path.dirname(self.path), f"{self.path}.{machine}", -1
        try:
            with locked(self._folder, os.O_RDONLY | os.O_DIRECTORY, _FOLDER_WAIT_S):  # its holder may be no save
                matches = filter(None, map(_NAME.fullmatch, sorted(os.listdir(self._folder))))
                others = {os.path.join(self._folder, match[1]): match[4] for match in matches}  # None: without a claim
                held = {path: _is_held(f"{path}.{owner}") for path, owner in others.items()}
                for path in filter(held.get, others):
                    if path.startswith(self.path[:-32]):
                        raise FileExistsError(
                            f"another process is saving to {target!r} right now (it, or a process that it started, "
                            f"holds {path!r}); let each job save to paths of its own"
                        )
                self._file = os.open(self._claim, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
                _try_lock(self._file)
            if others:
                sync_directory(self._folder)  # else a loss of power might bring back the name of what is deleted here
            quiet_since = os.fstat(self._file).st_mtime - _QUIET_S  # by the clock of the file system
            for path, owner in others.items():
                is_dead = held[path] is False and owner == machine
                if is_dead or (not held[path] and _last_change(path, owner) <= quiet_since):
                    self._remove_leftover(path, f"{path}.{owner}")
                else:
                    self.living.add(path[-32:])
        except BaseException:
            self._let_go()
            raise

    @property
    def is_held(self) -> bool:
        """True until ``publish`` or ``drop``."""
        return self._file >= 0

    def publish(self, replaced: Iterable[str] = (), *, sync: bool, old: str = "the replaced checkpoint") -> None:
        """Sync the folder after the content was moved to its place, and delete what was there; a failure is a note.

        Args:
            replaced: paths to delete, beside the temporary path, which what was there has after an exchange of names.
            sync: make the move durable before anything is deleted.
            old: describes what is deleted.
        """
        try:
            if sync:
                sync_directory(self._folder)  # if it fails, nothing may be deleted
            errors = [(path, error) for path in (*replaced, self.path) if (error := delete(path)) is not None]
            self.notes += [f"could not remove {old} {path!r}: {error}" for path, error in errors[:1]]
        finally:
            self._let_go()

    def drop(self) -> OSError | None:
        """Delete the content, unless it was published; return the error if it or its claim stays, as a leftover."""
        error = delete(self.path) if self.is_held else None
        return self._let_go() or error

    def _let_go(self) -> OSError | None:
        error = None
        if self.is_held:
            if not os.path.lexists(self.path):
                error = delete(self._claim)
            _release(self._file)
            self._file = -1
        return error

    def _remove_leftover(self, path: str, claim: str) -> None:
        exists, error = os.path.lexists(path), delete(path) or delete(claim)
        if error is not None:
            self.notes.append(f"could not remove the leftover of an unfinished save, {path!r}: {error}")
        elif exists:
            self.notes.append(f"removed the leftover of an unfinished save, {path!r}")


def _is_held(claim: str) -> bool | None:
    """Return True if a process holds the claim; None if that is unknown: without a claim, or without locks."""
    try:
        file = os.open(claim, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        is_free = _try_lock(file)
        return None if is_free is None else not is_free
    finally:
        _release(file)


def _last_change(path: str, owner: str | None) -> float:
    """Return when a temporary, its claim, or a file in it was changed last."""
    names, changes = [path, f"{path}.{owner}"], [0.0]
    with suppress(OSError):
        names += [os.path.join(path, name) for name in os.listdir(path)]
    for name in names:
        with suppress(OSError):
            changes.append(os.lstat(name).st_mtime)
    return max(changes)


# ── outputs of exports ────────────────────────────────────────────────────────────────────────────────────────────────

NewFile: TypeAlias = Callable[[str], AbstractContextManager[int]]
"""Creates a file with a name, which may contain slashes; yields its descriptor."""


@contextmanager
def open_output(
    path: str, *, is_file: bool, replaceable: Callable[[str], bool]
) -> Iterator[tuple[NewFile, list[str]]]:
    """Create a file or a directory at a path; yield a function that creates files, and notes for the user.

    It is in place and durable when the context ends, with the mode, owner and group of what it replaces; after an error
    in the context, none of it is left.

    Args:
        path: of the output.
        is_file: the output is the one file that is created, whatever its name.
        replaceable: called at the end with the path if a file, or a directory that is not empty, is there.

    Raises:
        OSError: if what is there must not be replaced, or another process is creating it.
        PermissionError: if the owner or group of what is there cannot be kept.
    """
    target = os.path.abspath(path)
    make_directories(os.path.dirname(target))
    new = Temporary(target, uuid4().hex)
    content = os.path.join(new.path, "content") if is_file else new.path

    @contextmanager
    def create(name: str) -> Iterator[int]:
        place = content if is_file else os.path.join(content, name)
        os.makedirs(os.path.dirname(place), exist_ok=True)
        file = os.open(place, os.O_RDWR | os.O_CLOEXEC | (0 if is_file else os.O_CREAT | os.O_EXCL), 0o666)
        try:
            yield file
        finally:
            os.close(file)

    try:
        os.mkdir(new.path)
        if is_file:
            write_file(content, (), sync=False)
        if not keep_owner_and_mode(target, content, writable=True):
            text = "its owner or group can't be kept: delete it, or give another path"
            raise PermissionError(errno.EPERM, text, target)
        with errors_with_path(content):
            yield create, new.notes
        for folder, _, names in os.walk(new.path, topdown=False):
            for name in names:
                with open(os.path.join(folder, name), "rb") as file, errors_with_path(file.name):
                    os.fsync(file.fileno())
            sync_directory(folder)
        keep_owner_and_mode(target, content)
        if is_file:
            if os.path.lexists(target) and not replaceable(target):
                raise FileExistsError(errno.EEXIST, "a file appeared there meanwhile", target)
            os.replace(content, target)
        elif not (os.path.isdir(target) and os.listdir(target) and replaceable(target)):
            os.rename(content, target)  # which replaces nothing but an empty directory
        elif not exchange(content, target):
            text = "the file system can't replace a directory in one step: delete it, or give another path"
            raise FileExistsError(errno.EEXIST, text, target)
        new.publish(sync=True, old="the replaced export")
    finally:
        new.drop()
