"""Write a file past the page cache, while its next parts are being made.

A buffered write copies into pages of the cache, and the sync after it waits for all of them. Here parts are gathered
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

from lightning_shardckpt.storage.protocol import Bytes
from lightning_shardckpt.system.page_memory import pages
from lightning_shardckpt.system.tuning import TUNING, Tuning
from lightning_shardckpt.system.workers import TaskQueue

_ALIGNMENT = 4096  # of offsets and sizes; enough for all but exotic disks, which say EINVAL


def write_durably(file: int, parts: Iterable[Bytes], tuning: Tuning = TUNING) -> None:
    """Write all parts into a new file, and sync it.

    The parts are made in the thread that calls, and dropped as soon as they are copied. No other thread is left.

    Args:
        file: a descriptor, at the start of an empty file.
        parts: of any size; their memory need not be aligned.
        tuning: sizes and number of the buffers.

    Raises:
        OSError: of the first write that failed, without a path.
    """
    writer = _BufferedWriter(file, tuning)
    try:
        for part in parts:
            writer.add(part)
        writer.flush()
    except BaseException as error:
        writer.fail(error)
    writer.end()
    os.fsync(file)


class _Buffer:
    """Aligned memory, of which the first ``filled`` bytes are to be written."""

    def __init__(self, nbytes: int) -> None:
        self.memory, self.filled = pages(nbytes), 0

    def is_full(self) -> bool:
        return self.filled == len(self.memory)


class _BufferedWriter:
    """Gathers parts in buffers, and has a thread write those that are full, if there is more than one."""

    def __init__(self, file: int, tuning: Tuning) -> None:
        self._tuning, self._target = tuning, _DirectFile(file, tuning.direct_io_bytes)
        self._buffer, self._made, self._is_threaded = _Buffer(tuning.disk_buffer_bytes), 1, False
        self._free = SimpleQueue[_Buffer]()
        # neither function knows this object: buffers must go when it does, without the garbage collector
        self._full = TaskQueue(self._target.write_from, threads=1, name="shardckpt-disk", release=self._free.put)
        self.fail, self.end = self._full.fail, self._full.end

    def add(self, part: Bytes) -> None:
        """Copy a part."""
        buffer = self._buffer
        end = buffer.filled + len(part)
        if end < len(buffer.memory) and len(part) < self._tuning.numpy_copy_bytes:
            buffer.memory[buffer.filled : end] = part
            buffer.filled = end
            return
        rest = memoryview(part)
        while len(rest):
            buffer = self._buffer
            now = rest[: len(buffer.memory) - buffer.filled]
            _copy(now, buffer.memory, buffer.filled)
            buffer.filled += len(now)
            rest = rest[len(now) :]
            if buffer.is_full():
                self.flush()

    def flush(self) -> None:
        """Have written what is there; no more may be added unless that filled the buffer."""
        self._is_threaded = self._is_threaded or self._buffer.is_full()
        if self._is_threaded:
            self._full.put(self._buffer)
            self._buffer = self._next_buffer()
        else:
            self._target.write_from(self._buffer)

    def _next_buffer(self) -> _Buffer:
        if self._made < self._tuning.disk_buffers and self._free.empty():
            self._made += 1
            return _Buffer(self._tuning.disk_buffer_bytes)
        found = self._free.get()
        found.filled = 0
        return found


class _DirectFile:
    """A file that is written from its start on: directly, until a write is not aligned, if the first one is large."""

    def __init__(self, file: int, direct_io_bytes: int) -> None:
        self._file, self._offset, self._direct = file, 0, False
        self._direct_io_bytes = direct_io_bytes

    def write_from(self, buffer: _Buffer) -> None:
        """Write what comes next."""
        data = memoryview(buffer.memory)[: buffer.filled]
        if self._offset == 0 and len(data) >= self._direct_io_bytes:
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
        """Set the flag on the open file: ``os.open`` with it would leave a file where it is refused."""
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL) & ~os.O_DIRECT
        fcntl.fcntl(self._file, fcntl.F_SETFL, flags | (os.O_DIRECT if direct else 0))
        self._direct = direct


def _copy(source: memoryview, target: mmap.mmap, begin: int) -> None:
    """Copy in such a way that other threads can run meanwhile."""
    import numpy  # here: tools that write no such files start without it

    window = numpy.frombuffer(target, numpy.uint8, len(source), begin)
    numpy.copyto(window, numpy.frombuffer(source, numpy.uint8))
