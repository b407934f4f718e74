"""Memory that comes from the system page by page: aligned, and nothing is paid for it before it is touched."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress

_HUGE_BYTES = 2 << 20  # of most machines


def pages(nbytes: int) -> mmap.mmap:
    """``nbytes`` (at least one) of writable memory, zeros.

    Of huge pages if possible: else to touch it first costs more than to fill it. Private: a child that is forked
    meanwhile sees a copy, which nobody uses there.
    """
    memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def prefer_huge_pages(address: int, nbytes: int) -> None:
    """Tell the system to back memory that was not touched yet by huge pages; of no effect where it has none."""
    first, last = -(-address // _HUGE_BYTES) * _HUGE_BYTES, (address + nbytes) // _HUGE_BYTES * _HUGE_BYTES
    if first < last:
        _C.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_HUGEPAGE)


_C = ctypes.CDLL(None)
