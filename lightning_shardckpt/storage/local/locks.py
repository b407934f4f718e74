"""Locks on files and directories, which the kernel releases when the process that holds them ends.

These are advisory ``flock`` locks on open files. A process that was forked in the meantime, such as a data loader's
worker, shares them, so they are always unlocked explicitly, not by closing. Some network file systems have no locks.
"""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_POLL_S, _LONGEST_POLL_S = 0.01, 0.5
_FOLDER_WAIT_S = 5.0  # for the lock of a folder, which is held only briefly
_TURN_WAIT_S = 3600.0  # for another process of this machine that uploads
_UNSUPPORTED = (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


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
        if error.errno in _UNSUPPORTED:
            return None
        raise
    return True


def lock(file: int, wait_s: float) -> bool:
    """Lock an open file or directory; return False if another process holds it for longer than ``wait_s``.

    Returns True if the file system has no locks.
    """
    deadline, pause = time.monotonic() + wait_s, _POLL_S
    while try_lock(file) is False:
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_POLL_S)
    return True


def release(file: int) -> None:
    """Unlock and close a file."""
    with suppress(OSError):  # the file system has no locks
        fcntl.flock(file, fcntl.LOCK_UN)
    os.close(file)


@contextmanager
def locked_directory(directory: str) -> Iterator[None]:
    """Hold the lock of a directory, in which only one process at a time may begin a save.

    Proceeds without the lock after a few seconds, and if the file system has no locks: a process that holds it for so
    long is stopped or not one of ours, and a save must not depend on it.
    """
    file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        lock(file, _FOLDER_WAIT_S)
        yield
    finally:
        release(file)


@contextmanager
def machine_upload_lock(wait_s: float = _TURN_WAIT_S) -> Iterator[None]:
    """Hold the upload lock, so that only one thread of this user's processes on this machine uploads.

    The lock of a process that dies is released. Without locks in the file system, does not wait.

    Raises:
        TimeoutError: if the lock is not available within ``wait_s``.
    """
    path = os.path.join(tempfile.gettempdir(), f"lightning-shardckpt-uploads-{os.getuid()}")
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        if not lock(file, wait_s):
            raise TimeoutError(f"other ranks of this machine have uploaded for {wait_s:g} s ({path} is locked)")
        yield
    finally:
        release(file)
