"""How much memory does a process need? Imports nothing, so that it can be asked of a process that imports little."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path


def grown_mib(act: Callable[[], object], at_most: int = 256) -> int:
    """By how much resident memory grows; of new address space there are ``at_most`` MiB, and beyond them an error."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + (at_most << 20),) * 2)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    act()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
