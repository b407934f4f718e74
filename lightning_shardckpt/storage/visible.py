"""How does a rank write where another machine made the directory? It waits until it sees that."""

from __future__ import annotations

import errno
import os
import time
from contextlib import suppress

_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 1.0


def create(path: str, visible_within_s: float | None, *, shared: bool = False) -> int:
    """Open a new file; waits until this machine sees its directory, unless it did before: then None.

    ``shared``: another rank may have made it.

    Raises:
        FileNotFoundError: if it does not within ``visible_within_s``.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_NOFOLLOW if shared else os.O_EXCL)
    directory, pause = os.path.dirname(path), _PAUSE_S
    deadline = time.monotonic() + (visible_within_s or 0.0)
    while True:
        try:
            return os.open(path, flags, 0o666)
        except OSError as error:
            if visible_within_s is None or error.errno not in (errno.ENOENT, errno.ESTALE):
                raise
            if time.monotonic() >= deadline:
                raise FileNotFoundError(
                    errno.ENOENT,
                    f"the machine {os.uname().nodename!r} does not see this directory, which rank 0 made at least "
                    f"{visible_within_s:g} s ago; the path must be on a file system that all ranks share",
                    directory,
                ) from None
        with suppress(OSError):
            os.listdir(os.path.dirname(directory))  # has a network file system look again
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
