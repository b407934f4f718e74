"""Fill files with stored tensors in several threads; all offsets are known before a byte is read.

A region is the place of a tensor in a file. In a zip archive, each region follows a head, which contains the CRC-32 of
its bytes. One thread reads a region from start to end in windows, verifies, sums, converts and writes it, while other
threads process the next regions; small adjacent regions form one task. No torch.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning_shardckpt.format.box import Box
from lightning_shardckpt.storage.local.posix import begin_writeback, write_at
from lightning_shardckpt.system.tuning import TUNING, Tuning
from lightning_shardckpt.system.workers import run_tasks
from lightning_shardckpt.transfer.shard_reader import ShardReader, clone_reader
from lightning_shardckpt.transfer.whole_tensors import StoredBox, StoredTensors, read_windows

_ALIGNMENT = 64

Head = Callable[[int, int], bytes]
"""Returns the head of a region from its number and the CRC-32 of its bytes; called once per region, from any thread."""


@dataclass(frozen=True, slots=True)
class DtypeConversion:
    """Conversion of elements of ``stored`` bytes to elements of ``written`` bytes. Any thread may call ``convert``."""

    convert: Callable[[memoryview], memoryview]
    stored: int
    written: int


@dataclass(frozen=True, slots=True)
class Region:
    """``nbytes`` bytes of a file from ``begin`` on, after a head of ``head_nbytes``; ``box``: a part of the tensor."""

    begin: int
    nbytes: int
    head_nbytes: int
    content: memoryview | tuple[str, str]
    """The bytes, or (component, key) of a stored tensor."""
    file: int = 0
    conversion: DtypeConversion | None = None
    box: Box | None = None

    @property
    def first(self) -> int:
        """The offset where the head begins."""
        return self.begin - self.head_nbytes

    @property
    def end(self) -> int:
        """The offset where the bytes end."""
        return self.begin + self.nbytes


def fill(
    file: int | Sequence[int],
    regions: Sequence[Region],
    tensors: StoredTensors,
    head: Head | None,
    advance: Callable[[int], Any],
    *,
    tuning: Tuning = TUNING,
) -> None:
    """Write the regions, which ascend in each file, and their heads. Nothing is synced.

    Args:
        file: the descriptor of a file, or of several, to which the regions refer by number.
        regions: the regions.
        tensors: the source of the tensors' bytes; not used by other threads meanwhile.
        head: returns the head of a region; None if the regions have no heads, so that no CRC-32 is needed.
        advance: called with the number of bytes of regions that were written, by one thread at a time.
        tuning: buffer sizes and the number of threads.

    Raises:
        CorruptionError: naming file, tensor and rank. The first error of any thread is raised after all have ended.
    """
    files = tuple(file) if isinstance(file, Sequence) else (file,)
    output = _Output(files, advance, tuning)
    window_bytes = tuning.fill_window_bytes

    @contextmanager
    def open_worker() -> Iterator[Callable[[_Task], None]]:
        with clone_reader(tensors.path, tensors.reader) as reader:
            source = ShardReader(tensors.path, reader, target_bytes=window_bytes)
            yield lambda task: task(source)

    nbytes = sum(region.head_nbytes + region.nbytes for region in regions)
    # at most one per window; two even on one core, since one may wait for the disk
    threads = min(max(len(os.sched_getaffinity(0)), 2), tuning.fill_threads, nbytes // window_bytes + 1)
    tasks = _tasks(regions, tensors, output, head, window_bytes)
    run_tasks(tasks, open_worker, threads=threads, name="shardckpt-filler", on_failure=output.abort)


@dataclass(frozen=True, slots=True)
class _Item:
    """A region with its number and, unless its bytes are in memory, the shape, dtype and boxes of its tensor."""

    number: int
    region: Region
    shape: tuple[int, ...] = ()
    dtype: str = ""
    boxes: Sequence[StoredBox] = ()

    def pieces(self, source: ShardReader, window_bytes: int) -> Iterator[memoryview]:
        """Yield the bytes to write, in order; each piece is valid until the next one."""
        content, conversion = self.region.content, self.region.conversion
        if isinstance(content, memoryview):
            yield from (content[at : at + window_bytes] for at in range(0, len(content), window_bytes))
            return
        part = self.region.box or Box.whole(self.shape)
        for data in read_windows(source, part, self.boxes, window_bytes):
            yield data if conversion is None else conversion.convert(data)


_Task = Callable[[ShardReader], None]
"""Writes one large region, or adjacent small regions."""


def _tasks(
    regions: Sequence[Region], tensors: StoredTensors, output: _Output, head: Head | None, window_bytes: int
) -> Iterator[_Task]:
    """Yield the tasks in the order of the regions. Not thread-safe."""
    small: list[_Item] = []
    room = window_bytes - _ALIGNMENT
    for number, region in enumerate(regions):
        item = _Item(number, region)
        if not isinstance(region.content, memoryview):
            spec = tensors.spec(*region.content)
            item = _Item(number, region, spec.shape, spec.dtype, tensors.boxes(*region.content))
        is_small = region.conversion is None and region.box is None and region.end - region.first <= room
        if small:
            first, last = small[0].region, small[-1].region
            follows = (region.file, region.first) == (last.file, last.end) and region.end - first.first <= room
            if not (is_small and follows):
                yield partial(_write_small, output, head, small)
                small = []
        if is_small:
            small.append(item)
        else:
            yield partial(_write_large, output, head, item, window_bytes)
    if small:
        yield partial(_write_small, output, head, small)


def _write_large(output: _Output, head: Head | None, item: _Item, window_bytes: int, source: ShardReader) -> None:
    """Write one region in windows, and then its head."""
    region, crc = item.region, 0
    at = region.begin
    for piece in item.pieces(source, window_bytes):
        output.write(region.file, piece, at, counted=len(piece))
        at += len(piece)
        if head is not None:
            crc = zlib.crc32(piece, crc)
    if head is not None:
        output.write(region.file, memoryview(head(item.number, crc)), region.first)


def _write_small(output: _Output, head: Head | None, items: list[_Item], source: ShardReader) -> None:
    """Write adjacent whole regions, and their heads, with one write."""
    first, end = items[0].region.first, items[-1].region.end
    base = first - first % _ALIGNMENT  # aligns the tensors in memory as in the file
    requests = []
    for item in items:
        region, target = item.region, source.target[item.region.begin - base : item.region.end - base]
        if isinstance(region.content, memoryview):
            target[:] = region.content
        requests += [stored.request(item.shape, target) for stored in item.boxes]
    source.fetch(requests)
    data = source.target[first - base : end - base]
    for item in items if head is not None else ():
        assert head is not None
        begin = item.region.begin - first
        text = head(item.number, zlib.crc32(data[begin : begin + item.region.nbytes]))
        data[begin - item.region.head_nbytes : begin] = text
    output.write(items[0].region.file, data, first, counted=sum(item.region.nbytes for item in items))


class _AbortedError(Exception):
    """Raised in a thread after another thread failed."""


class _Output:
    """Files that several threads write to."""

    def __init__(self, files: Sequence[int], advance: Callable[[int], Any], tuning: Tuning) -> None:
        self._files, self._advance, self._writeback_bytes = files, advance, tuning.writeback_bytes
        self._advance_lock = threading.Lock()
        self._file_locks = [threading.Lock() for _ in files]
        self._dirty_bytes = [0] * len(files)
        self._has_failed = False

    def abort(self) -> None:
        """Make every other thread end at its next write."""
        self._has_failed = True

    def write(self, number: int, data: memoryview, offset: int, *, counted: int = 0) -> None:
        """Write bytes to the file with this number, and report ``counted`` of them to ``advance``."""
        if self._has_failed:
            raise _AbortedError
        file = self._files[number]
        with self._file_locks[number]:  # the kernel lets one thread at a time write to a file; others would spin
            write_at(file, data, offset)
            self._dirty_bytes[number] += len(data)
            if self._dirty_bytes[number] >= self._writeback_bytes:
                begin_writeback(file)
                self._dirty_bytes[number] = 0
        if counted:
            with self._advance_lock:
                self._advance(counted)
