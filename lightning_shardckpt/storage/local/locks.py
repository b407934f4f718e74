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

from lightning_shardckpt.system.tuning import TUNING

_POLL_S, _LONGEST_POLL_S, _ATTEMPTS = 0.01, 0.5, 20
_UNSUPPORTED = (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def try_lock(file: int, *, shared: bool = False) -> bool | None:
    """Lock an open file or directory without waiting.

    Returns:
        True if this process has the lock now, False if another has it, None if the file system has no locks.
    """
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
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


def lock_unless_read(file: int) -> bool:
    """Lock a directory that is about to be deleted; return False if a process is reading it.

    Returns True if the file system has no locks.
    """
    for _ in range(_ATTEMPTS):
        if try_lock(file) is not False:
            return True
        if try_lock(file, shared=True):
            return False
        time.sleep(_POLL_S)  # another process holds the exclusive lock briefly, to check the owner
    return False


def release(file: int) -> None:
    """Unlock and close a file."""
    with suppress(OSError):  # the file system has no locks
        fcntl.flock(file, fcntl.LOCK_UN)
    os.close(file)


@contextmanager
def locked_directory(directory: str, wait_s: float = TUNING.lock_wait_s) -> Iterator[None]:
    """Hold the lock of a directory, in which only one process at a time may begin a save.

    Proceeds without the lock after ``wait_s``, and if the file system has no locks: a process that holds it for so long
    is stopped or not one of ours, and a save must not depend on it.
    """
    file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        lock(file, wait_s)
        yield
    finally:
        release(file)


@contextmanager
def machine_upload_lock(wait_s: float = TUNING.turn_wait_s) -> Iterator[None]:
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
