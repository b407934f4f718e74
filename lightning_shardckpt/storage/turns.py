"""How do the ranks of one machine take turns? By a lock on a file that they all find."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_shardckpt.storage import locks

_POLL_S, _LONGEST_POLL_S = 0.01, 0.5
_WAIT_S = 3600.0


@contextmanager
def one_per_machine(wait_s: float = _WAIT_S) -> Iterator[None]:
    """While it is entered, no other process of this user on this machine has entered it; nor another thread.

    A process that dies leaves it. Where there are no locks, it does not wait.

    Raises:
        TimeoutError: if it takes longer than ``wait_s``.
    """
    path = os.path.join(tempfile.gettempdir(), f"lightning-shardckpt-uploads-{os.getuid()}")
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        deadline, pause = time.monotonic() + wait_s, _POLL_S
        while locks.take(file) is False:
            if time.monotonic() > deadline:
                raise TimeoutError(f"other ranks of this machine have uploaded for {wait_s:g} s ({path} is locked)")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL_S)
        yield
    finally:
        locks.release(file)
