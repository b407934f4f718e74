"""Measure how much memory a process needs. Imports nothing, so it can be asked of a process that imports little."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path


def grown_mib(act: Callable[[], object], at_most: int = 256) -> int:
    """By how much resident memory grows; of new address space there are ``at_most`` MiB, and beyond them an error."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + (at_most << 20),) * 2)
    before = _most_kib()
    act()
    return (_most_kib() - before) // 1024


def _most_kib() -> int:
    """The most that was resident so far. Not ru_maxrss, which a process takes over from the one that started it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
