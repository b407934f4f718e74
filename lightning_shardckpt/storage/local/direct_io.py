"""How does a file get to the disk at the speed of the disk? Past the page cache, while the next parts are being made.

A buffered write copies into pages of the cache, and the sync behind it waits for all of them. Here parts are gathered
in a few aligned buffers, and a thread writes those with O_DIRECT. Where that is refused, they go through the cache.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Iterable
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from types import TracebackType

from lightning_shardckpt.pages import pages
from lightning_shardckpt.storage.protocol import Bytes
from lightning_shardckpt.threads import Done, NoThreadError, start

_BUFFERS, _BUFFER_BYTES = 3, 8 << 20
_ALIGNMENT = 4096  # of offsets and sizes; enough for all but exotic disks, which say EINVAL
_SMALL_BYTES = 1 << 20  # a file below that gains nothing
_LARGE_BYTES = 64 << 10  # from here on it is worth the call to copy with numpy, which lets other threads run


def write_durably(file: int, parts: Iterable[Bytes]) -> None:
    """Write all parts into a new file, and sync it.

    The parts are made in the thread that calls, and dropped as soon as they are copied. No other thread is left behind.
    """
    with _Writer(file) as writer:
        for part in parts:
            writer.add(part)
        writer.flush()
    os.fsync(file)


class _Writer:
    """Takes parts and hands full buffers to a thread, which is there if there is more than one. Use it as a context."""

    def __init__(self, file: int) -> None:
        self._target = _Target(file)
        self._buffer, self._filled, self._made = pages(_BUFFER_BYTES), 0, 1
        self._full, self._free = SimpleQueue[tuple[mmap.mmap, int] | None](), SimpleQueue[mmap.mmap]()
        self._thread: Thread | None = None
        self._done = Done()
        self._error: BaseException | None = None
        self._abandoned = False

    def __enter__(self) -> _Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._abandoned = kind is not None
        self._stop()
        if kind is None:
            self._check()

    def add(self, part: Bytes) -> None:
        """Copy a part."""
        end = self._filled + len(part)
        if end < len(self._buffer) and len(part) < _LARGE_BYTES:
            self._buffer[self._filled : end] = part
            self._filled = end
            return
        rest = memoryview(part)
        while len(rest):
            now = rest[: len(self._buffer) - self._filled]
            _copy(now, self._buffer, self._filled)
            self._filled += len(now)
            rest = rest[len(now) :]
            if self._filled == len(self._buffer):
                self.flush()

    def flush(self) -> None:
        """Have written what is there; no more may be added unless that filled the buffer."""
        if self._thread is None and self._filled == len(self._buffer):
            self._start()
        if self._thread is None:
            self._target.write(memoryview(self._buffer)[: self._filled])
        else:
            self._full.put((self._buffer, self._filled))
            self._buffer = self._next_buffer()
            self._check()
        self._filled = 0

    def _next_buffer(self) -> mmap.mmap:
        if self._made == _BUFFERS:
            return self._free.get()
        self._made += 1
        return pages(_BUFFER_BYTES)

    def _start(self) -> None:
        self._thread = Thread(target=self._run, name="shardckpt-disk")
        try:
            start(self._thread)
        except NoThreadError:  # then without
            self._thread = None

    def _stop(self) -> None:
        """Wait for the thread, also if that is interrupted: it must not write to a file that is closed.

        Not with ``Thread.join`` alone, which takes a thread for ended when it is interrupted (Python 3.11).
        """
        self._full.put(None)
        if self._thread is None or self._thread.ident is None:  # interrupted in ``start``: it finds nothing to write
            return
        interrupt: BaseException | None = None
        while not self._done.is_set():
            try:
                self._done.wait()
            except BaseException as error:
                interrupt = error
        self._thread.join()
        if interrupt is not None:
            raise interrupt

    def _run(self) -> None:
        try:
            while (full := self._full.get()) is not None:
                buffer, size = full
                if self._error is None and not self._abandoned:
                    try:
                        self._target.write(memoryview(buffer)[:size])
                    except BaseException as error:
                        self._error = error
                self._free.put(buffer)
        finally:
            self._done.set()

    def _check(self) -> None:
        """Raise what the thread failed with."""
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # it knows this object, which would stay with its buffers


class _Target:
    """A file that is written from its start on; directly, from what is not small on to what is not aligned."""

    def __init__(self, file: int) -> None:
        self._file, self._offset, self._direct = file, 0, False

    def write(self, data: memoryview) -> None:
        """Write what comes next."""
        if self._offset == 0 and len(data) >= _SMALL_BYTES:
            with suppress(OSError):  # a file system need not offer that
                self._set_direct(True)
        while len(data):
            size = len(data) // _ALIGNMENT * _ALIGNMENT if self._direct else len(data)
            if size == 0:
                self._set_direct(False)
                continue
            try:
                count = os.pwrite(self._file, data[:size], self._offset)
            except OSError as error:
                if not self._direct or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                self._set_direct(False)  # it is aligned in another way
                continue
            self._offset += count
            data = data[count:]

    def _set_direct(self, direct: bool) -> None:
        """Set the flag on the open file: ``os.open`` with it would leave a file behind where it is refused."""
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL) & ~os.O_DIRECT
        fcntl.fcntl(self._file, fcntl.F_SETFL, flags | (os.O_DIRECT if direct else 0))
        self._direct = direct


def _copy(source: memoryview, target: mmap.mmap, begin: int) -> None:
    """Copy in such a way that other threads can run meanwhile."""
    import numpy  # here: tools that write no such files start without it

    window = numpy.frombuffer(target, numpy.uint8, len(source), begin)
    numpy.copyto(window, numpy.frombuffer(source, numpy.uint8))
