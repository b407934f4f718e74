"""Files of a local or shared POSIX file system: durable writes, locks, and temporaries that replace what is there.

New content is made in a directory ``.tmp-<hash of the target's base name>-<save id>.<hash of the machine>``, whose lock
its process holds meanwhile. So one of this machine that can be locked is a leftover of a dead process. Locks may not
reach other machines, or may not exist: another one is a leftover if it has not changed for an hour. Nothing else of
other processes is deleted, and never the target of a link.

A process that was forked meanwhile, such as a data loader's worker, shares locks: unlocked explicitly, not by closing.
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
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TypeAlias
from uuid import uuid4

from lightning_shardckpt.format.value_checks import checksum
from lightning_shardckpt.storage.protocol import Bytes

WRITEBACK_BYTES = 8 << 20  # no difference from 1 to 32 MiB
LOCK_WAIT_S = 3600.0  # for a process that uploads or downloads
_QUIET_S = 3600.0
_FOLDER_WAIT_S, _POLL_S = 5.0, 0.05  # for the lock of a folder, which is held only briefly
_CALL_BYTES = 256 << 10  # measured on ext4, Linux 6.18, with little free memory: calls of 1 to 4 MiB took twice as long
_BUFFER_BYTES = 128 << 10  # for small parts; less than a call, so that larger parts are not copied
_AT_FDCWD, _EXCHANGE = -100, 2  # RENAME_EXCHANGE
_WRITE = 2  # SYNC_FILE_RANGE_WRITE alone: with a flag that waits, errors would be reported here and not by fsync
_NO_LOCKS = (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
TEMPORARY_NAME = re.compile(r"(\.tmp-[0-9a-f]{16}-)([0-9a-f]{32})\.([0-9a-f]{16})")  # target, save, machine


@contextmanager
def opened(path: str, flags: int, mode: int = 0o666) -> Iterator[int]:
    """Open a file or directory for a context, at the end of which it is unlocked."""
    file = os.open(path, flags | os.O_CLOEXEC, mode)
    try:
        yield file
    finally:
        with suppress(OSError):  # the file system has no locks
            fcntl.flock(file, fcntl.LOCK_UN)
        os.close(file)


@contextmanager
def errors_with_path(path: str) -> Iterator[None]:
    """Add a path to errors of the operating system, since calls on a descriptor raise them without one."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and not (error.filename and os.path.isabs(error.filename)):
            error.filename = path
        raise


def make_directories(path: str, *, sync: bool = True) -> None:
    """Create directories like ``os.makedirs``; with ``sync``, they are durable on return."""
    if not os.path.lexists(path):
        parent = os.path.dirname(path)
        make_directories(parent, sync=sync)
        with suppress(FileExistsError):
            os.mkdir(path)
        if sync:
            sync_directory(parent)


def sync_directory(path: str) -> None:
    """Sync a directory, which makes the names in it durable."""
    with opened(path, os.O_RDONLY | os.O_DIRECTORY) as directory, errors_with_path(path):
        os.fsync(directory)


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
    """Give a new directory or file the owner, group and mode of one at ``target``, if there is one.

    ``writable``: this process's user may write to it in any case, until the next call. Returns False if the owner or
    the group cannot be kept; the mode is not changed then.
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
    try:
        if os.path.isdir(path) and not os.path.islink(path):
            with suppress(OSError):
                os.chmod(path, 0o700)  # an old checkpoint may be read-only
            shutil.rmtree(path)
        else:
            os.unlink(path)
    except FileNotFoundError:  # it is gone, or another process is deleting it, too
        return delete(path) if os.path.lexists(path) else None
    except OSError as error:
        return error
    return None


def delete_all(paths: Iterable[str], what: str) -> list[str]:
    """Delete what can be deleted; return a sentence with the first error if something stays."""
    errors = [*filter(None, map(delete, paths))]
    return [f"could not remove {what}: {error}" for error in errors[:1]]


def write_file(path: str, parts: Iterable[Bytes], *, sync: bool) -> None:
    """Write all parts into a new file, one after the other, and with ``sync`` make it durable."""
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
    """Ask the kernel to write a file's dirty pages to the disk, without waiting. ``fsync`` must follow."""
    if (sync_file_range := getattr(ctypes.CDLL(None), "sync_file_range", None)) is not None:
        sync_file_range(file, ctypes.c_int64(0), ctypes.c_int64(0), _WRITE)  # a length of 0 means to the end


def write_at(file: int, data: memoryview, offset: int) -> None:
    """Write all of ``data`` at an offset of an open file."""
    while len(data):
        count = os.pwrite(file, data[:_CALL_BYTES], offset)
        data, offset = data[count:], offset + count


@contextmanager
def locked(path: str, wait_s: float = LOCK_WAIT_S, *, is_folder: bool = False) -> Iterator[int]:
    """Hold the lock of a file, which is created if it is missing, if there are locks; yield its descriptor.

    If another process holds it for longer than ``wait_s``, raises TimeoutError, or for a folder proceeds without.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY if is_folder else os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    deadline = time.monotonic() + wait_s
    with opened(path, flags, 0o600) as file:
        while (is_locked := _try_lock(file)) is False and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if is_locked is False and not is_folder:
            raise TimeoutError(f"another process of this machine has held the lock of {path!r} for {wait_s:g} s")
        yield file


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


# ── temporaries ───────────────────────────────────────────────────────────────────────────────────────────────────────


def temporary_name(target: str, save_id: str) -> str:
    """Return the name of the temporary directory of a target, without that of the machine."""
    return f".tmp-{checksum(os.fsencode(os.path.basename(target)))}-{save_id}."


def temporary_path(target: str, save_id: str, folder: str) -> str:
    """Return the path of a temporary directory that a process of this machine makes in a folder."""
    return os.path.join(folder, temporary_name(target, save_id) + this_machine())


@cache
def this_machine() -> str:
    """Return 16 hex digits for the running kernel, whose processes see each other's locks."""
    with suppress(OSError):  # a sandbox
        return checksum(Path("/proc/sys/kernel/random/boot_id").read_bytes())
    return checksum(os.uname().nodename.encode())


class Temporary:
    """A new directory under a temporary name, which this process has locked until ``publish`` or ``drop``.

    It is in ``folder``, by default that of ``target``, an absolute path. Leftovers of dead processes there are deleted,
    with ``notes`` for the user; ``living`` has the ids of other saves there that may still be going on. Raises
    FileExistsError if another process is writing ``target`` right now; nothing was changed then.
    """

    def __init__(self, target: str, save_id: str, folder: str | None = None) -> None:
        self._folder, self._lock = os.path.dirname(target) if folder is None else folder, ExitStack()
        self.path = temporary_path(target, save_id, self._folder)
        self.is_held, self.notes, self.living = True, list[str](), set[str]()
        try:
            with locked(self._folder, _FOLDER_WAIT_S, is_folder=True):
                matches = filter(None, map(TEMPORARY_NAME.fullmatch, sorted(os.listdir(self._folder))))
                others = {os.path.join(self._folder, match[0]): match for match in matches}
                free = {path: _is_free(path) for path in others}
                for path, match in others.items():
                    if free[path] is False and temporary_name(target, save_id).startswith(match[1]):
                        raise FileExistsError(
                            f"another process is saving to {target!r} right now (it, or a process that it started, "
                            f"holds {path!r}); let each job save to paths of its own"
                        )
                os.mkdir(self.path)
                file = self._lock.enter_context(opened(self.path, os.O_RDONLY | os.O_DIRECTORY))
                _try_lock(file)
            if others:
                sync_directory(self._folder)  # else a loss of power might bring back the name of what is deleted here
            quiet_since = os.fstat(file).st_mtime - _QUIET_S  # by the clock of the file system
            for path, match in others.items():
                is_dead = free[path] and match[3] == this_machine()
                if not is_dead and (free[path] is False or _last_change(path) > quiet_since):
                    self.living.add(match[2])
                else:
                    what = "the leftover of an unfinished save"
                    self.notes += delete_all([path], what) or [f"removed {what}, {path!r}"]
        except BaseException:
            self.drop()
            raise

    def move(self, target: str, *, replaces: bool) -> None:
        """Move the directory to ``target``, in exchange for what it ``replaces``, or over an empty directory."""
        keep_owner_and_mode(target, self.path)
        if not replaces:
            os.rename(self.path, target)
            return
        with suppress(OSError):  # what gets the temporary name is locked, too; a link can't be
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
            _try_lock(self._lock.enter_context(opened(target, flags)))
        if not exchange(self.path, target):
            text = "the file system can't replace it by a directory in one step: delete it, or use another path"
            raise FileExistsError(errno.EEXIST, text, target)

    def publish(self, replaced: Iterable[str] = (), *, sync: bool) -> None:
        """Sync the folder after the move; then delete what was there, and ``replaced`` paths. A failure is a note."""
        try:
            if sync:
                sync_directory(self._folder)  # if it fails, nothing may be deleted
            self.notes += delete_all([*replaced, self.path], "what was replaced")
        finally:
            self.is_held = False
            self._lock.close()

    def drop(self) -> OSError | None:
        """Delete the content, unless it was published; return the error if it stays, as a leftover."""
        error = delete(self.path) if self.is_held else None
        self.is_held = False
        self._lock.close()
        return error


def _is_free(path: str) -> bool | None:
    """Return False if a process holds a temporary; None if that is unknown, since it can't be opened or locked."""
    try:
        with opened(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as file:
            return _try_lock(file)
    except OSError as error:
        return True if error.errno == errno.ELOOP else None  # a link, which a save replaced


def _last_change(path: str) -> float:
    """Return when a temporary or a file in it was changed last."""
    changes = [0.0]
    with suppress(OSError):  # what vanishes meanwhile is being deleted
        changes.append(os.lstat(path).st_mtime)
        changes += [os.lstat(os.path.join(path, name)).st_mtime for name in os.listdir(path)]
    return max(changes)


# ── outputs of exports ────────────────────────────────────────────────────────────────────────────────────────────────

NewFile: TypeAlias = Callable[[str], AbstractContextManager[int]]
"""Creates a file with a name, which may contain slashes; yields its descriptor. It is durable when that is closed."""


@contextmanager
def open_output(path: str, *, is_file: bool, replaceable: Callable[[str], bool]) -> Iterator[tuple[NewFile, list[str]]]:
    """Create a file or a directory at a path; yield a function that creates files, and notes for the user.

    It is in place and durable when the context ends, with the mode, owner and group of what it replaces; after an error
    in the context, none of it is left. Raises OSError if another process is creating it, too. With ``is_file``, it is
    the one file that is created, whatever its name. ``replaceable`` is called at the end with the path if a file, or a
    directory that is not empty, is there.
    """
    target = os.path.abspath(path)
    make_directories(os.path.dirname(target))
    new = Temporary(target, uuid4().hex)
    content = os.path.join(new.path, "content") if is_file else new.path

    @contextmanager
    def create(name: str) -> Iterator[int]:
        place = content if is_file else os.path.join(content, name)
        os.makedirs(os.path.dirname(place), exist_ok=True)
        with opened(place, os.O_RDWR | (0 if is_file else os.O_CREAT | os.O_EXCL)) as file, errors_with_path(place):
            yield file
            os.fsync(file)

    try:
        if is_file:
            write_file(content, (), sync=False)
        if not keep_owner_and_mode(target, content, writable=True):
            text = "its owner or group can't be kept: delete it, or give another path"
            raise PermissionError(errno.EPERM, text, target)
        yield create, new.notes
        for folder, _, _ in os.walk(new.path, topdown=False):
            sync_directory(folder)
        if not is_file:
            new.move(target, replaces=os.path.isdir(target) and bool(os.listdir(target)) and replaceable(target))
        elif os.path.lexists(target) and not replaceable(target):
            raise FileExistsError(errno.EEXIST, "a file appeared there meanwhile", target)
        else:
            keep_owner_and_mode(target, content)
            os.replace(content, target)
        new.publish(sync=True)
    finally:
        new.drop()
