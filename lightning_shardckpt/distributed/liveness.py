"""Liveness of processes on this host, and the number of ranks that share its cores.

Linux's /proc tells the former; where there is none, nobody is called dead.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Process:
    """A process as others of its host can look it up: by its id, and when it started, since ids are given anew."""

    pid: int
    started: str

    @classmethod
    def this(cls) -> Process:
        """The calling one."""
        return cls(os.getpid(), (_stat(os.getpid()) or ("", ""))[1] if _proc_is_ours() else "")

    def is_gone(self) -> bool:
        """Return whether the process has ended, for whatever reason; a stopped or busy one has not.

        Call it on its host only.
        """
        if not self.started:
            return False
        now = _stat(self.pid)
        return now is None or now[1] != self.started or now[0] in "ZX"


def local_ranks() -> int:
    """Return how many ranks share this host, as launchers say it: at most so many, if they only tell of all hosts."""
    told = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or "1"
    return max(int(told), 1) if told.isdecimal() else 1


def own_cores() -> int:
    """Return how many cores there are for this rank, if each has its share; at least one."""
    return max(len(os.sched_getaffinity(0)) // local_ranks(), 1)


def host() -> str:
    """Names the set of processes that see each other: equal for two if they can look each other up."""
    name = os.uname().nodename
    if not _proc_is_ours():
        return f"{name}-{os.getpid()}"
    booted = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{name}-{booted}-{os.stat('/proc/self/ns/pid').st_ino}"


def _proc_is_ours() -> bool:
    """Return whether /proc is there, and numbers processes as this one's calls do: another's may be mounted."""
    try:
        return os.readlink("/proc/self") == str(os.getpid())
    except OSError:
        return False


def _stat(pid: int) -> tuple[str, str] | None:
    """State and start time (in clock ticks since the host booted), or None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold anything
    return fields[0], fields[19]
