"""Fill large files with stored tensors, by several threads: the place of each region is known before a byte is read.

A container says which tensor goes where; a zip archive also what stands right before each region once its CRC-32 is
known. What a region holds is read from a checkpoint in pieces, verified, summed and written, each piece by one thread;
the order does not matter. Regions are begun in the order in which they lie in a file, and in several files at a time.
On its way a piece may be converted to another dtype, or go to several places. No torch.

Where a tensor's boxes each lie in one piece, what is read is whole checksum blocks, in any order. Else the tensor goes
by in ``TensorWindows``, in which any thread may take the next one. For a stream, a large region with a head is read
once to be summed, and then once more.
"""

from __future__ import annotations

import os
import threading
import zlib
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

from lightning_shardckpt.format.box import Box, Shape
from lightning_shardckpt.format.value_checks import DTYPE_BYTES
from lightning_shardckpt.storage.local.posix import begin_writeback, write_at
from lightning_shardckpt.storage.protocol import File
from lightning_shardckpt.system.crc32 import PiecewiseCRC
from lightning_shardckpt.system.tuning import TUNING, Tuning
from lightning_shardckpt.system.workers import run_tasks
from lightning_shardckpt.transfer.read_plan import Request, single_run
from lightning_shardckpt.transfer.regions import Destination, Head, Region
from lightning_shardckpt.transfer.shard_reader import ShardReader, cloned
from lightning_shardckpt.transfer.tensor_windows import TensorWindows, windows
from lightning_shardckpt.transfer.whole_tensors import StoredBox, StoredTensors

# ── writing pieces as they come ───────────────────────────────────────────────────────────────────────────────────────
# Write pieces of regions to files and streams as they come, and the heads of regions when all of these is summed.
#
# A stream, such as an upload, takes the bytes of a file in order: a thread whose piece is not next waits with it, and
# nothing more is kept. Regions are begun in order, so what a thread waits for is being made by another one.


class GivenUpError(Exception):
    """Another thread failed, so what this one waits for does not come."""


class RegionWriter:
    """Writes to a few files. For any thread.

    Args:
        files: to which the regions refer by number.
        regions: all that will be written; they ascend in each file.
        head: what stands before each region; None if nothing does, so that nothing needs to be summed.
        advance: told of the bytes of regions as they are written, by one thread at a time.
        tuning: how much is written before it begins to go to the disk.
    """

    def __init__(
        self,
        files: Sequence[File],
        regions: Sequence[Region],
        head: Head | None,
        advance: Callable[[int], Any],
        tuning: Tuning,
    ) -> None:
        self._files, self._head, self._advance = files, head, advance
        self._lock, self._turns = threading.Lock(), threading.RLock()  # taken in one step, so Ctrl-C leaves none taken
        self._turn = threading.Condition(self._turns)
        self._writing = [threading.Lock() for _ in files]
        self._unsent, self._writeback_bytes = [0] * len(files), tuning.writeback_bytes
        self._ends = {region.file: region.first for region in reversed(regions)}  # of what streams were given so far
        self._crcs: dict[int, PiecewiseCRC] = {}
        self.has_failed = False

    @property
    def needs_sums(self) -> bool:
        """True if the regions have heads."""
        return self._head is not None

    def is_stream(self, file: int) -> bool:
        """Return whether a file, by its number, takes its bytes in order."""
        return not isinstance(self._files[file], int)

    def fail(self) -> None:
        """Let go of the threads that wait for their turn."""
        with self._turns:
            self.has_failed = True
            self._turn.notify_all()

    def expect_sum(self, number: int, nbytes: int) -> None:
        """Prepare for the sum of a region that comes in pieces."""
        self._crcs[number] = PiecewiseCRC(nbytes)

    def write_whole(self, first: int, regions: Sequence[tuple[int, Region]], data: memoryview) -> None:
        """Write regions side by side with their heads by one call; ``data`` begins where the ``first`` head does.

        The heads are put into ``data`` here.
        """
        if self._head is not None:
            for number, region in regions:
                begin = region.begin - first
                head = self._head(number, zlib.crc32(data[begin : begin + region.nbytes]))
                data[begin - region.head_nbytes : begin] = head
        self._write(regions[0][1].file, data, first)
        with self._lock:
            self._advance(sum(region.nbytes for _, region in regions))

    def write_piece(
        self, number: int, region: Region, at: int, data: memoryview, *, is_written: bool, is_summed: bool
    ) -> None:
        """Take in what is stored of a region from ``at`` on: convert it, write it, sum it."""
        change = region.conversion
        if change is not None:
            at, data = at // change.stored * change.written, change.convert(data)
        if is_written:
            if region.destinations:
                self._write_apart(region.destinations, at, data)
            else:
                self._write(region.file, data, region.begin + at)
            with self._lock:
                self._advance(len(data))
        if is_summed:
            self._sum(number, region, at, data)

    def _sum(self, number: int, region: Region, at: int, data: memoryview) -> None:
        """Write the head of a region when all of it is summed."""
        crc = zlib.crc32(data)
        with self._lock:
            total = self._crcs[number].add(at, len(data), crc)
            if total is not None:
                del self._crcs[number]
        if total is not None and self._head is not None:
            self._write(region.file, memoryview(self._head(number, total)), region.first)

    def _write_apart(self, destinations: Sequence[Destination], at: int, data: memoryview) -> None:
        """Write what is in ``data``, a tensor's bytes from ``at`` on, to where it belongs."""
        end = at + len(data)
        for to in destinations[max(bisect_right(destinations, at, key=lambda to: to.at) - 1, 0) :]:
            if to.at >= end:
                break
            first, last = max(to.at, at), min(to.at + to.nbytes, end)
            if first < last:
                self._write(to.file, data[first - at : last - at], to.begin + first - to.at)

    def _write(self, number: int, data: memoryview, offset: int) -> None:
        file = self._files[number]
        if isinstance(file, int):
            with self._writing[number]:  # the kernel lets one thread at a time write to a file; the others would spin
                write_at(file, data, offset)
                self._unsent[number] += len(data)
                if self._unsent[number] >= self._writeback_bytes:
                    begin_writeback(file)
                    self._unsent[number] = 0
        elif len(data):
            self._give(number, file, data, offset)

    def _give(self, number: int, stream: Callable[[memoryview], object], data: memoryview, offset: int) -> None:
        """Wait for all that lies before: it is of tasks that were begun before, so it comes."""
        with self._turns:
            while self._ends[number] != offset:
                assert self._ends[number] < offset, f"{self._ends[number]} bytes were given, now come those at {offset}"
                if self.has_failed:
                    raise GivenUpError
                self._turn.wait()
        stream(data)
        with self._turns:
            self._ends[number] += len(data)
            self._turn.notify_all()


_ALIGNMENT = 64


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
        head: what stands before each region; None if nothing does, so that nothing needs to be summed.
        advance: told of the bytes of regions as they are written, by one thread at a time.
        tuning: sizes, and how many threads.

    Raises:
        CorruptionError: naming file, tensor and rank; the first error of any thread, when all have ended.
    """
    files = tuple(file) if isinstance(file, Sequence) else (file,)
    writer = RegionWriter(files, regions, head, advance, tuning)
    work = _Work(regions, tensors, writer, tuning)

    @contextmanager
    def open_worker() -> Iterator[Callable[[_Task], None]]:
        with cloned(tensors.path, tensors.reader) as reader:
            target_bytes, gap_bytes = tuning.fill_window_bytes, tuning.row_gap_bytes
            source = ShardReader(
                tensors.path, reader, target_bytes=target_bytes, span_gap_bytes=gap_bytes, tuning=tuning
            )
            yield partial(work.do, source)

    threads = _thread_count(regions, tuning)
    run_tasks(work.tasks(), open_worker, threads=threads, name="shardckpt-filler", on_failure=writer.fail)


def _thread_count(regions: Sequence[Region], tuning: Tuning) -> int:
    """No more than there are windows; two even on one core, since one may wait for the disk."""
    nbytes = sum(region.head_nbytes + region.nbytes for region in regions)
    return min(max(len(os.sched_getaffinity(0)), 2), tuning.fill_threads, nbytes // tuning.fill_window_bytes + 1)


@dataclass(frozen=True, slots=True)
class _Item:
    """A region, where its tensor is stored, and what is to be done with it."""

    number: int
    region: Region
    shape: Shape
    boxes: list[StoredBox]
    is_summed: bool
    is_written: bool = True


_Task = Callable[[ShardReader], bool]
"""Writes a piece of the file; True if it is to be called again, since there may be more."""


class _Work:
    """The tasks that remain. ``tasks`` is for one thread at a time, ``do`` for any."""

    def __init__(
        self, regions: Sequence[Region], tensors: StoredTensors, writer: RegionWriter, tuning: Tuning
    ) -> None:
        self._regions, self._tensors, self._writer = regions, tensors, writer
        self._window_bytes, self._span_bytes = tuning.fill_window_bytes, tuning.span_bytes
        self._most_files = tuning.fill_threads
        self._shared: list[tuple[TensorWindows, _Task]] = []

    def do(self, source: ShardReader, task: _Task) -> None:
        """Do a task, again and again if it is shared."""
        while not self._writer.has_failed and task(source):
            pass

    def tasks(self) -> Iterator[_Task]:
        """Yield what nobody has begun; else what another thread can be helped with."""
        planned = self._planned()
        has_streams = any(map(self._writer.is_stream, {region.file for region in self._regions}))
        while True:
            self._shared = [(one, task) for one, task in self._shared if not one.is_exhausted]
            shared = self._shared[0][1] if self._shared else None
            must_end = shared is not None and has_streams  # in a stream, what follows would have to wait for it
            task = shared if must_end else next(planned, shared)
            if task is None:
                return
            yield task

    # ── what there is to do ─────────────────────────────────────────────────────────────────────────────────────────

    def _planned(self) -> Iterator[_Task]:
        """Planned as it comes up, one call at a time; of several files in turn, so that several can be written to."""
        by_file: dict[int, list[tuple[int, Region]]] = {}
        for number, region in enumerate(self._regions):
            by_file.setdefault(region.file, []).append((number, region))
        waiting = iter([self._of_file(found) for found in by_file.values()])
        begun = deque(islice(waiting, self._most_files))
        while begun:
            one = begun.popleft()
            task = next(one, None)
            if task is not None:
                begun.append(one)
                yield task
            elif (another := next(waiting, None)) is not None:
                begun.append(another)

    def _of_file(self, regions: Iterable[tuple[int, Region]]) -> Iterator[_Task]:
        """Small regions side by side, large ones in pieces."""
        small: list[_Item] = []
        room = self._window_bytes - _ALIGNMENT
        for number, region in regions:
            item = self._located(number, region)
            is_plain = region.conversion is None and region.box is None and not region.destinations
            is_small = is_plain and (region.end - region.first <= room or not region.nbytes)
            fits = bool(small) and region.first == small[-1].region.end and region.end - small[0].region.first <= room
            if small and not (is_small and fits):
                yield partial(self._write_small, small)
                small = []
            if is_small:
                small.append(item)
            else:
                if item.is_summed:
                    self._writer.expect_sum(number, region.nbytes)
                if item.is_summed and self._writer.is_stream(region.file):
                    yield from self._large(replace(item, is_written=False))
                    item = replace(item, is_summed=False)
                yield from self._large(item)
        if small:
            yield partial(self._write_small, small)

    def _located(self, number: int, region: Region) -> _Item:
        is_summed = self._writer.needs_sums
        if isinstance(region.content, memoryview):
            return _Item(number, region, (), [], is_summed)
        shape, boxes = self._tensors.spec(*region.content).shape, self._tensors.boxes(*region.content)
        return _Item(number, region, shape, boxes, is_summed)

    def _large(self, item: _Item) -> Iterator[_Task]:
        content = item.region.content
        if isinstance(content, memoryview):
            for at in range(0, len(content), self._window_bytes):
                yield partial(self._write_memory, item, at, content[at : at + self._window_bytes])
        elif item.region.box is not None:
            yield from self._boxed(item, item.region.box)
        elif all(_may_be_split(stored, item.region) for stored in item.boxes):
            for stored in item.boxes:
                block, nbytes = stored.entry.block, stored.place.nbytes
                step = max(self._span_bytes // block, 1) * block
                for at in range(0, nbytes, step):
                    yield partial(self._write_blocks, item, stored, at, min(step, nbytes - at))
        else:
            shared = TensorWindows(item.shape, item.boxes, self._window_bytes)
            task = partial(self._write_window, item, shared)
            self._shared.append((shared, task))
            yield task

    def _boxed(self, item: _Item, box: Box) -> Iterator[_Task]:
        """Windows of a box of a tensor, each read and verified on its own: of the blocks that it touches."""
        size, at = DTYPE_BYTES[self._tensors.spec(*item.region.content).dtype], 0
        for window in windows(box.shape, self._window_bytes // size):
            yield partial(self._write_part, item, at, window.shift(box.start), size)
            at += window.numel * size

    # ── how it is done ──────────────────────────────────────────────────────────────────────────────────────────────

    def _write_small(self, items: list[_Item], source: ShardReader) -> bool:
        """Write whole regions that lie side by side, and their heads, by one write."""
        first, end = items[0].region.first, items[-1].region.end
        base = first - first % _ALIGNMENT  # so that the tensors are aligned in memory as in the file
        requests = []
        for item in items:
            region, target = item.region, source.target[item.region.begin - base : item.region.end - base]
            if isinstance(region.content, memoryview):
                target[:] = region.content
            requests += [stored.request(item.shape, target) for stored in item.boxes]
        source.fetch(requests)
        pairs = [(item.number, item.region) for item in items]
        self._writer.write_whole(first, pairs, source.target[first - base : end - base])
        return False

    def _write_memory(self, item: _Item, at: int, data: memoryview, source: ShardReader) -> bool:
        self._write_piece(item, at, data)
        return False

    def _write_blocks(self, item: _Item, stored: StoredBox, at: int, nbytes: int, source: ShardReader) -> bool:
        data = source.target[:nbytes]
        source.fetch([stored.part(at, nbytes, data)])
        self._write_piece(item, stored.place.begin + at, data)
        return False

    def _write_window(self, item: _Item, shared: TensorWindows, source: ShardReader) -> bool:
        found = shared.fill(source)
        if found is not None:
            self._write_piece(item, *found)
        return found is not None

    def _write_part(self, item: _Item, at: int, window: Box, size: int, source: ShardReader) -> bool:
        data = source.target[: window.numel * size]
        requests = []
        for stored in item.boxes:
            if (common := stored.box.intersect(window)) is not None:
                overlap = replace(stored.place.overlap, common=common, local=common.within(window))
                run = single_run(overlap, window.shape, size)
                requests.append(Request(stored.key, overlap, stored.entry, window.shape, run, data))
        source.fetch(requests)
        self._write_piece(item, at, data)
        return False

    def _write_piece(self, item: _Item, at: int, data: memoryview) -> None:
        self._writer.write_piece(
            item.number, item.region, at, data, is_written=item.is_written, is_summed=item.is_summed
        )


def _may_be_split(stored: StoredBox, region: Region) -> bool:
    """Return whether the blocks of a box can be written as they come: it lies in one piece, and no element is split."""
    change = region.conversion
    return stored.place.in_one_piece and (change is None or stored.entry.block % change.stored == 0)
