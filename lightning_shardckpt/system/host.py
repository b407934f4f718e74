"""The host: page-aligned memory, free of cost until touched; pauses of the garbage collector; identity of processes."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_HUGE_BYTES = 2 << 20  # the size of a huge page on most machines


def allocate_pages(nbytes: int) -> mmap.mmap:
    """Return ``nbytes`` (at least one) of writable, zeroed memory.

    Uses huge pages where possible: with small ones, the first touch costs more than filling the memory. The mapping is
    private, so a forked child gets a copy and can't write into it.
    """
    memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def prefer_huge_pages(address: int, nbytes: int) -> None:
    """Ask the system to back untouched memory by huge pages; does nothing where there are none."""
    first, last = -(-address // _HUGE_BYTES) * _HUGE_BYTES, (address + nbytes) // _HUGE_BYTES * _HUGE_BYTES
    if first < last:
        _C.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_HUGEPAGE)


_C = ctypes.CDLL(None)


@contextmanager
def gc_paused() -> Iterator[None]:
    """Start no collection inside this context; also works as a decorator.

    The collector would scan the plans and all other objects and free nothing, which doubles the time of a save or load
    of many small tensors.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# ── processes ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def host_id() -> str:
    """Return a text that is equal for two processes if they can look each other up in /proc."""
    with suppress(OSError):
        if os.readlink("/proc/self") == str(os.getpid()):  # the /proc of this pid namespace
            namespace = os.stat("/proc/self/ns/pid").st_ino
            return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}-{namespace}"
    return uuid.uuid4().hex


def start_time(pid: int) -> str:
    """Return when a process started, in clock ticks since boot: the system reuses ids. Empty if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    fields = text.rpartition(")")[2].split()  # the process name before it may contain any character
    return "" if fields[0] in "ZX" else fields[19]
