"""Who is at work here? Locks of the kernel, which end with the process that holds them, however it ends.

They are advisory ``flock`` locks on open directories and files. A process that was forked meanwhile, such as a data
loader's worker, shares them, so they are always released by name, not by closing. Some network file systems have none.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

WAIT_S, _POLL_S, _ATTEMPTS = 5.0, 0.01, 20
_NO_LOCKS = (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_OF_ONE_MACHINE = frozenset(
    ("bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs")
)


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


def unread(file: int) -> bool:
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
def alone_in(directory: str) -> Iterator[None]:
    """Be the only process that begins something in a directory.

    After ``WAIT_S`` it goes on all the same, as on a file system without locks: who holds this lock for so long is
    stopped or a stranger, and a save must not depend on them.
    """
    file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + WAIT_S
        while take(file) is False and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        yield
    finally:
        release(file)


def bind_everybody(directory: str) -> bool:
    """Whether all who may write to a directory see its locks: False where other machines may write to it, too.

    Network file systems often keep locks to the machine that took them (NFS with local_lock, Lustre with localflock,
    BeeGFS by default), which cannot be seen from here.
    """
    path, kind, longest = os.path.realpath(directory), "", -1
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
            lines = mounts.readlines()
    except OSError:
        return False
    for line in lines:
        fields = line.split(" ")
        place = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), fields[4])  # a space is \040
        inside = place == "/" or path == place or path.startswith(place + "/")
        if inside and len(place) >= longest:  # the last one of a place is on top of the others
            kind, longest = fields[fields.index("-") + 1], len(place)
    return kind in _OF_ONE_MACHINE
