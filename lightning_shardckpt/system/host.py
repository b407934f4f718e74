"""The host: sizes and times that depend on it, page-aligned memory, pauses of the garbage collector, its processes."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
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


# ── sizes and times ───────────────────────────────────────────────────────────────────────────────────────────────────

# Functions that need a `Tuning` take ``tuning: Tuning = TUNING``; so do storages and ``Ranks``, and a strategy has one
# as an attribute. There is no global state, and nothing is read from the environment. No value changes stored bytes.
# Limits of the format, of S3 or of another program are not tuning and stay where they are used.


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Sizes in bytes, times in seconds and numbers of threads; the defaults were measured or are explained here."""

    # ── object stores ──
    upload_part_bytes: int = 8 << 20  # S3's minimum is 5 MiB

    # ── ranks and other processes ──
    retry_attempts: int = 6  # of a request to an object store
    retry_pause_s: float = 0.2  # before the second one; later pauses double
    retry_longest_pause_s: float = 10.0
    retry_total_s: float = 120.0
    host_look_s: float = 1.0  # between two checks of a waiting rank that the processes of its host live
    look_again_s: float = 0.1  # before ranks that see different checkpoints at a path look again
    rank_grace_s: float = 2.0  # a rank waits this much longer for rank 0 than rank 0 waits for the others
    rank_poll_s: float = 0.0005  # between a rank's first polls of the store; more with many ranks
    rank_longest_poll_s: float = 0.003  # between later polls; more with many ranks
    watch_s: float = 5.0  # between two looks of a rank for others that are lost; each takes about five requests
    agreement_s: float = 0.25  # between two agreements of training ranks whether to end; each takes 1 ms
    agreement_batches: int = 16  # ... at most, in case later batches take longer
    exception_agreement_s: float = 10.0  # within which all ranks that got the same exception start to save
    error_delivery_s: float = 2.0  # that rank 0 waits for the others to read an error


TUNING = Tuning()
"""The default of every ``tuning`` argument."""
