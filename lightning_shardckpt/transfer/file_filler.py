"""Fill files with stored tensors, by several threads: the place of each region is known before a byte is read.

A container says which tensor goes where; a zip archive also what stands right before each region once its CRC-32 is
known. One thread reads a region from its start to its end in windows, verifies, sums, converts and writes it, while
others do the next ones; small regions that lie side by side are one task. A region of a stream, such as an upload,
waits for its turn; one with a head is read once to be summed, and then once more. No torch.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lightning_shardckpt.format.box import Box
from lightning_shardckpt.format.value_checks import DTYPE_BYTES
from lightning_shardckpt.storage.local.posix import begin_writeback, write_at
from lightning_shardckpt.storage.protocol import File
from lightning_shardckpt.system.tuning import TUNING, Tuning
from lightning_shardckpt.system.workers import run_tasks
from lightning_shardckpt.transfer.read_plan import Request, single_run
from lightning_shardckpt.transfer.shard_reader import ShardReader, clone_reader
from lightning_shardckpt.transfer.whole_tensors import StoredBox, StoredTensors, read_windows, windows

_ALIGNMENT = 64

Head = Callable[[int, int], bytes]
"""Gives the bytes right before a region, by its number and the CRC-32 of its bytes; any thread calls it, once."""


@dataclass(frozen=True, slots=True)
class DtypeConversion:
    """The conversion of elements of ``stored`` bytes to elements of ``written`` bytes; any thread calls ``convert``."""

    convert: Callable[[memoryview], memoryview]
    stored: int
    written: int


@dataclass(frozen=True, slots=True)
class Region:
    """``nbytes`` of a file from ``begin`` on, right after a head of ``head_nbytes``; ``box``: a part of the tensor."""

    begin: int
    nbytes: int
    head_nbytes: int
    content: memoryview | tuple[str, str]
    """The bytes, or component and key of the tensor that is stored."""
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
    file: File | Sequence[File],
    regions: Sequence[Region],
    tensors: StoredTensors,
    head: Head | None,
    advance: Callable[[int], Any],
    *,
    tuning: Tuning = TUNING,
) -> None:
    """Write the regions, which ascend in each file, and their heads.

    Args:
        file: one, or several, to which the regions refer by number; nothing is synced.
        regions: what to write. In a stream the first one begins where that is, and there are no gaps.
        tensors: where their bytes are; nobody else may use it meanwhile.
        head: gives the bytes before each region; None if there are none, so that nothing needs to be summed.
        advance: told of the bytes of regions as they are written, by one thread at a time.
        tuning: sizes, and how many threads.

    Raises:
        CorruptionError: naming file, tensor and rank; the first error of any thread, when all have ended.
    """
    files = tuple(file) if isinstance(file, Sequence) else (file,)
    output = _Output(files, regions, advance, tuning)
    window_bytes = tuning.fill_window_bytes

    @contextmanager
    def open_worker() -> Iterator[Callable[[_Task], None]]:
        with clone_reader(tensors.path, tensors.reader) as reader:
            source = ShardReader(
                tensors.path, reader, target_bytes=window_bytes, span_gap_bytes=tuning.row_gap_bytes, tuning=tuning
            )
            yield lambda task: task(source)

    nbytes = sum(region.head_nbytes + region.nbytes for region in regions)
    # no more than there are windows; two even on one core, since one may wait for the disk
    threads = min(max(len(os.sched_getaffinity(0)), 2), tuning.fill_threads, nbytes // window_bytes + 1)
    tasks = _tasks(regions, tensors, output, head, window_bytes)
    run_tasks(tasks, open_worker, threads=threads, name="shardckpt-filler", on_failure=output.give_up)


@dataclass(frozen=True, slots=True)
class _Item:
    """A region by its number, the dtype of its tensor, and where that is stored; of bytes in memory nothing."""

    number: int
    region: Region
    shape: tuple[int, ...] = ()
    dtype: str = ""
    boxes: Sequence[StoredBox] = ()

    def pieces(self, source: ShardReader, window_bytes: int) -> Iterator[memoryview]:
        """Yield the bytes of the region as they are written, in order; each is valid until the next one."""
        content, change = self.region.content, self.region.conversion
        if isinstance(content, memoryview):
            yield from (content[at : at + window_bytes] for at in range(0, len(content), window_bytes))
            return
        of_box = None if self.region.box is None else self._windows_of_box(self.region.box, source, window_bytes)
        for data in of_box or read_windows(source, self.shape, self.boxes, window_bytes):
            yield data if change is None else change.convert(data)

    def _windows_of_box(self, box: Box, source: ShardReader, window_bytes: int) -> Iterator[memoryview]:
        """Yield the bytes of a part of the tensor; each window reads and verifies the blocks that it touches."""
        size = DTYPE_BYTES[self.dtype]
        for window in (one.shift(box.start) for one in windows(box.shape, window_bytes // size)):
            data, requests = source.target[: window.numel * size], list[Request]()
            for stored in self.boxes:
                if (common := stored.box.intersect(window)) is not None:
                    overlap = replace(stored.place.overlap, common=common, local=common.within(window))
                    run = single_run(overlap, window.shape, size)
                    requests.append(Request(stored.key, overlap, stored.entry, window.shape, run, data))
            source.fetch(requests)
            yield data


_Task = Callable[[ShardReader], None]
"""Writes one large region, or small ones that lie side by side."""


def _tasks(
    regions: Sequence[Region], tensors: StoredTensors, output: _Output, head: Head | None, window_bytes: int
) -> Iterator[_Task]:
    """Yield the tasks in the order of the regions. For one thread at a time."""
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
    """Write one region in windows, and its head: in a stream before it, else when all of it is summed."""
    region, crc, is_stream = item.region, 0, output.is_stream(item.region.file)
    if head is not None and is_stream:
        for piece in item.pieces(source, window_bytes):
            crc = zlib.crc32(piece, crc)
        output.write(region.file, memoryview(head(item.number, crc)), region.first)
    at = region.begin
    for piece in item.pieces(source, window_bytes):
        output.write(region.file, piece, at, counted=len(piece))
        at += len(piece)
        if head is not None and not is_stream:
            crc = zlib.crc32(piece, crc)
    if head is not None and not is_stream:
        output.write(region.file, memoryview(head(item.number, crc)), region.first)


def _write_small(output: _Output, head: Head | None, items: list[_Item], source: ShardReader) -> None:
    """Write whole regions that lie side by side, and their heads, with one write."""
    first, end = items[0].region.first, items[-1].region.end
    base = first - first % _ALIGNMENT  # so that the tensors are aligned in memory as in the file
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


class _GivenUpError(Exception):
    """Another thread failed, so this one ends, too."""


class _Output:
    """Files and streams that several threads write to; a stream takes its bytes in order, and threads wait for that.

    What a thread waits for belongs to a task that was begun before its own, so it comes.
    """

    def __init__(
        self, files: Sequence[File], regions: Sequence[Region], advance: Callable[[int], Any], tuning: Tuning
    ) -> None:
        self._files, self._advance, self._writeback_bytes = files, advance, tuning.writeback_bytes
        self._lock, self._turns = threading.Lock(), threading.RLock()  # taken in one step, so Ctrl-C leaves none taken
        self._turn = threading.Condition(self._turns)
        self._writing = [threading.Lock() for _ in files]
        self._unsent = [0] * len(files)
        self._ends = {region.file: region.first for region in reversed(regions)}  # of the bytes that streams got
        self._has_failed = False

    def is_stream(self, file: int) -> bool:
        """Return whether a file, by its number, takes its bytes in order."""
        return not isinstance(self._files[file], int)

    def give_up(self) -> None:
        """Have every other thread end at its next write."""
        with self._turns:
            self._has_failed = True
            self._turn.notify_all()

    def write(self, number: int, data: memoryview, offset: int, *, counted: int = 0) -> None:
        """Write bytes of a file, by its number; ``counted`` of them are told to the user."""
        file = self._files[number]
        if self._has_failed:
            raise _GivenUpError
        if isinstance(file, int):
            with self._writing[number]:  # the kernel lets one thread at a time write to a file; the others would spin
                write_at(file, data, offset)
                self._unsent[number] += len(data)
                if self._unsent[number] >= self._writeback_bytes:
                    begin_writeback(file)
                    self._unsent[number] = 0
        elif len(data):
            self._give(number, file, data, offset)
        if counted:
            with self._lock:
                self._advance(counted)

    def _give(self, number: int, stream: Callable[[memoryview], object], data: memoryview, offset: int) -> None:
        with self._turns:
            while self._ends[number] != offset:
                assert self._ends[number] < offset, f"{self._ends[number]} bytes were given, now come those at {offset}"
                if self._has_failed:
                    raise _GivenUpError
                self._turn.wait()
        stream(data)
        with self._turns:
            self._ends[number] += len(data)
            self._turn.notify_all()
