"""Harm to a process, a file or a file system, and measures of both; imports neither torch nor Lightning."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def killed(work: Callable[[], object]) -> None:
    """Do the work in a process that is killed then, as a job that its scheduler ends."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


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


def flip(path: Path, offset: int) -> None:
    """Change a bit of a file."""
    content = bytearray(path.read_bytes())
    content[offset] ^= 4
    path.write_bytes(content)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    import torch

    as_bytes = [t.contiguous().flatten().view(torch.uint8) if t.numel() else t for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*as_bytes)
