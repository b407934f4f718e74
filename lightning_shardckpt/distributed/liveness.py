"""Liveness of the ranks' processes on this host, and the number of ranks that share its cores.

Liveness comes from Linux's /proc; without it, every process counts as alive.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from lightning_shardckpt.errors import RankError

_PAUSE_S = 0.2
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Process:
    """A process, identified on its host by its id and its start time, since the system reuses ids."""

    pid: int
    started: str

    @classmethod
    def this(cls) -> Process:
        """Return the calling process."""
        return cls(os.getpid(), (_stat(os.getpid()) or ("", ""))[1] if _has_own_proc() else "")

    def is_gone(self) -> bool:
        """Return True if the process has ended, for any reason; a stopped or busy process has not.

        Valid only on the host of the process.
        """
        if not self.started:
            return False
        now = _stat(self.pid)
        return now is None or now[1] != self.started or now[0] in "ZX"


def local_rank_count() -> int:
    """Return the number of ranks on this host from the launcher's variables; an upper bound if only WORLD_SIZE is set.

    At least one.
    """
    size = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or "1"
    return max(int(size), 1) if size.isdecimal() else 1


def cores_per_rank() -> int:
    """Return this rank's share of the host's cores; at least one."""
    return max(len(os.sched_getaffinity(0)) // local_rank_count(), 1)


def host(boot_id: Path = _BOOT_ID) -> str:
    """Return a name that is equal for two processes if they can look each other up in /proc.

    Without /proc or without ``boot_id``, as in some sandboxes, no two processes have the same name.
    """
    name = os.uname().nodename
    if not _has_own_proc():
        return f"{name}-{os.getpid()}"
    try:
        booted = boot_id.read_text().strip()
        return f"{name}-{booted}-{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return f"{name}-{os.getpid()}"


def _has_own_proc() -> bool:
    """Return True if /proc exists and belongs to this process's pid namespace: another's may be mounted."""
    try:
        return os.readlink("/proc/self") == str(os.getpid())
    except OSError:
        return False


def _stat(pid: int) -> tuple[str, str] | None:
    """Return the state and start time (in clock ticks since boot) of a process, or None if it does not exist."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the process name before it may contain any character
    return fields[0], fields[19]


# ── before there is a process group ───────────────────────────────────────────────────────────────────────────────────


def _python_parent() -> Process | None:
    """Return the process that started this one, if it runs Python, as Lightning's launcher does."""
    try:
        command = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return None
    stat = _stat(os.getppid()) if b"python" in os.path.basename(command[0]) else None
    return None if stat is None else Process(os.getppid(), stat[1])


_PARENT = _python_parent()


def wait_for_launcher(address: str, port: int, rank: int, timeout_s: float) -> None:
    """Wait until rank 0 listens, in a process that its launcher has started; for ``timeout_s``, and in vain if need be.

    torch's own wait does not notice that rank 0 has ended before it listened.

    Raises:
        RankError: if the process that started this one has ended.
    """
    deadline = time.monotonic() + timeout_s
    while _PARENT is not None and time.monotonic() < deadline:
        try:
            socket.create_connection((address, port), timeout=_PAUSE_S).close()
        except OSError:
            if _PARENT.is_gone():
                raise RankError(
                    f"rank {rank} can't join the process group: the process that started it, pid {_PARENT.pid}, which "
                    f"is rank 0 or the first rank of this host, is gone, and nobody listens at {address}:{port}"
                ) from None
            time.sleep(_PAUSE_S)
        else:
            return
