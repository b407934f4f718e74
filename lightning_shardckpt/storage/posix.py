"""File system calls: durable files and directories, renames, owners and modes, and locks.

Locks are advisory ``flock`` locks on open files, which the kernel releases when the process that holds them ends. A
process that was forked in the meantime, such as a data loader's worker, shares them, so they are always unlocked
explicitly, not by closing. Some network file systems have no locks.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

from lightning_shardckpt.storage.protocol import Bytes

Exchange = Callable[[str, str], bool]
"""Exchanges two names in one step, or returns False if the file system does not support it."""
_EXCHANGE = 2  # RENAME_EXCHANGE
_WRITE = 2  # SYNC_FILE_RANGE_WRITE alone: with a flag that waits, errors would be reported here and not by fsync
_AT_FDCWD = -100
_CALL_BYTES = 256 << 10  # measured on ext4, Linux 6.18, with little free memory: calls of 1 to 4 MiB took twice as long
_BUFFER_BYTES = 128 << 10  # for small parts; less than a call, so that larger parts are not copied
WRITEBACK_BYTES = 8 << 20  # no difference from 1 to 32 MiB
_POLL_S, _LONGEST_POLL_S = 0.01, 0.5
_NO_LOCKS = (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


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
    directory = os.open(path or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
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


def can_exchange(folder: str, exchange: Exchange) -> bool:
    """Return True if the file system of an empty directory exchanges two names."""
    names = os.path.join(folder, "1"), os.path.join(folder, "2")
    for name in names:
        os.mkdir(name)
    is_possible = exchange(*names)
    for name in names:
        os.rmdir(name)
    return is_possible


def status_of(path: str) -> os.stat_result | None:
    """Return the status of a path, not following a link; None if nothing is there. Raises OSError if it is too long."""
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):  # creating the parent will name the component that is a file
        return None


def keep_owner_and_mode(target: str, new: str, *, writable: bool = False) -> bool:
    """Give a new directory or file the owner, group and mode of what is at ``target``, unless that is a link.

    Args:
        target: the path that ``new`` will be renamed to; nothing needs to be there.
        new: a directory or regular file of this process.
        writable: let this process's user write to it in any case, until the next call without this.

    Returns:
        False if the owner or the group cannot be kept; the mode is not changed then.
    """
    old, own = status_of(target), os.lstat(new)
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


# ── content of files ──────────────────────────────────────────────────────────────────────────────────────────────────


def write_file(path: str, parts: Iterable[Bytes], *, sync: bool) -> None:
    """Write all parts into a new file, one after the other, and with ``sync`` make it durable.

    The kernel writes earlier parts to the disk while the next parts are produced, so that the final sync has little to
    wait for. The file stays in the page cache for a later load.
    """
    dirty_bytes = 0
    with errors_with_path(path), open(path, "xb", buffering=_BUFFER_BYTES) as file:
        for part in parts:
            if len(part) <= _CALL_BYTES:
                file.write(part)
            else:
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


def try_lock(file: int) -> bool | None:
    """Lock an open file or directory without waiting.

    Returns:
        True if this process has the lock now, False if another has it, None if the file system has no locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        raise
    return True


def release(file: int) -> None:
    """Unlock and close a file."""
    with suppress(OSError):  # the file system has no locks
        fcntl.flock(file, fcntl.LOCK_UN)
    os.close(file)


@contextmanager
def locked(path: str, flags: int, wait_s: float) -> Iterator[int | None]:
    """Open a file or directory with ``flags``, and hold its lock; proceed without in a file system that has none.

    Yields the descriptor, or None if another process holds the lock for longer than ``wait_s``.
    """
    file = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        deadline, pause = time.monotonic() + wait_s, _POLL_S
        while not (is_ours := try_lock(file) is not False) and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL_S)
        yield file if is_ours else None
    finally:
        release(file)
