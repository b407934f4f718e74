"""The host: page-aligned memory, pauses of the garbage collector, processes, threads, and sizes and times.

Ctrl-C is safe at any point. ``threading.Event``, ``Semaphore``, ``with`` of a ``Condition``, and ``Thread.start`` take
a lock in several steps of Python code; Ctrl-C between two of them leaves the lock taken forever (Python 3.11). A Lock
or an RLock is taken in one step; a Condition of an RLock releases it in one.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import signal
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

T = TypeVar("T")
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
_END = object()
_HUGE_BYTES = 2 << 20  # the size of a huge page on most machines


def allocate_pages(nbytes: int) -> mmap.mmap:
    """Return ``nbytes`` (at least one) of writable, zeroed memory, which a forked child copies.

    Uses huge pages where possible: with small ones, the first touch costs more than filling the memory.
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
    """Start no collection inside this context, or decorated function.

    It would scan all plans and free nothing, which doubles the time of a save or load of many small tensors.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


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


class NoThreadError(RuntimeError):
    """The system can start no more threads, or the interpreter is about to exit; not an error of a signal handler."""


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Defer signal handlers, which Python runs in the main thread, to the end of the block."""
    # replaces the handlers, since another thread could receive a blocked signal
    received = list[int]()
    handlers = {number: handler for number in _INTERRUPTS if callable(handler := signal.getsignal(number))}
    if threading.current_thread() is not threading.main_thread():
        handlers.clear()
    try:
        for signum in handlers:
            signal.signal(signum, lambda number, frame: received.append(number))
        yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        for number in received:
            signal.raise_signal(number)


def cores_per_rank() -> int:
    """Return this rank's share of the host's cores, by the launcher's variables, or less if only WORLD_SIZE is set."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or "1"
    return len(os.sched_getaffinity(0)) // int(ranks)


def start_thread(thread: threading.Thread) -> None:
    """Start a thread, with signals deferred. Raises NoThreadError if the system can't."""
    with signals_deferred():
        try:
            thread.start()
        except RuntimeError as error:
            raise NoThreadError(str(error)) from error


def run_tasks(tasks: Iterable[T], new_worker: Callable[[], Callable[[T], object]], *, threads: int, name: str) -> None:
    """Do all tasks, in this order, in the calling thread and others; each calls ``new_worker`` once for the function.

    ``threads`` includes the calling one. Raises the first error of any thread or of ``tasks``, or an interrupt, when
    every thread has ended, since the caller may free files and memory that they use. Tasks that have not begun are
    dropped.
    """
    remaining, taking, failures = iter(tasks), threading.Lock(), list[BaseException]()

    def work() -> None:
        try:
            do = new_worker()
            while not failures:
                with taking:
                    task = next(remaining, _END)
                if task is _END:
                    return
                do(task)  # type: ignore[arg-type]  # not _END
        except BaseException as error:
            failures.append(error)

    others = [threading.Thread(target=work, name=name) for _ in range(threads - 1)]
    try:
        for thread in others:
            start_thread(thread)
        work()
    except BaseException as error:  # an interrupt, or a lack of threads
        failures.append(error)
    try:
        with signals_deferred():  # when interrupted, `join` regards the thread as ended (Python 3.11)
            for thread in others:
                if thread.ident is not None:
                    thread.join()
        if failures:
            raise failures[0]
    finally:
        failures.clear()  # their tracebacks hold references to the threads' memory


WRITERS: WeakSet[Any] = WeakSet()
"""Background writers: ``drain`` waits for their work, ``forget`` drops it in a forked child, whose parent does it."""
os.register_at_fork(after_in_child=lambda: [writer.forget() for writer in list(WRITERS)])


def drain_all() -> None:
    """Wait for all saves of this process, since a load may read any of them. Not collective; raises nothing."""
    for writer in list(WRITERS):
        writer.drain()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Sizes in bytes and times in seconds, which change no stored bytes. Functions take ``tuning: Tuning = TUNING``."""

    upload_part_bytes: int = 8 << 20  # S3's minimum is 5 MiB
    retry_attempts: int = 6  # of a request to an object store
    retry_pause_s: float = 0.2  # before the second one; later pauses double
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
