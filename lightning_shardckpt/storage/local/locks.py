"""Locks on files and directories that end with the process that holds them, however it ends.

They are the kernel's advisory ``flock`` locks on what is open. A process that was forked meanwhile, such as a data
loader's worker, shares them, so they are always released by name, not by closing. Some network file systems have none.
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
_NO_LOCKS = (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def take(file: int, *, shared: bool = False) -> bool | None:
    """Lock an open file or directory, without waiting: True if it is ours now, None where there are no locks."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        raise
    return True


def wait_for(file: int, wait_s: float) -> bool:
    """Lock an open file or directory; False if another process has it for longer. True where there are no locks."""
    deadline, pause = time.monotonic() + wait_s, _POLL_S
    while take(file) is False:
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_POLL_S)
    return True


def take_unless_read(file: int) -> bool:
    """Lock a directory that is going to be deleted, unless it is being read; True also where there are no locks."""
    for _ in range(_ATTEMPTS):
        if take(file) is not False:
            return True
        if take(file, shared=True):
            return False
        time.sleep(_POLL_S)  # another process looks whose it is
    return False


def release(file: int) -> None:
    """Unlock and close."""
    with suppress(OSError):  # no locks here
        fcntl.flock(file, fcntl.LOCK_UN)
    os.close(file)


@contextmanager
def alone_in(directory: str, wait_s: float = TUNING.lock_wait_s) -> Iterator[None]:
    """Be the only process that begins something in a directory.

    After ``wait_s`` it goes on all the same, as on a file system without locks: who holds this lock for so long is
    stopped or a stranger, and a save must not depend on them.
    """
    file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        wait_for(file, wait_s)
        yield
    finally:
        release(file)


@contextmanager
def one_per_machine(wait_s: float = TUNING.turn_wait_s) -> Iterator[None]:
    """Be the only process of this user on this machine that uploads, and its only thread.

    A process that dies leaves it. Where there are no locks, it does not wait.

    Raises:
        TimeoutError: if it takes longer than ``wait_s``.
    """
    path = os.path.join(tempfile.gettempdir(), f"lightning-shardckpt-uploads-{os.getuid()}")
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        if not wait_for(file, wait_s):
            raise TimeoutError(f"other ranks of this machine have uploaded for {wait_s:g} s ({path} is locked)")
        yield
    finally:
        release(file)
