"""Write pieces of regions to files and streams as they come, and the heads of regions when all of these is summed.

A stream, such as an upload, takes the bytes of a file in order: a thread whose piece is not next waits with it, and
nothing more is kept. Regions are begun in order, so what a thread waits for is being made by another one.
"""

from __future__ import annotations

import threading
import zlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

from lightning_shardckpt.storage.local.posix import begin_writeback, write_at
from lightning_shardckpt.storage.protocol import File
from lightning_shardckpt.system.crc32 import PiecewiseCRC
from lightning_shardckpt.system.tuning import Tuning
from lightning_shardckpt.transfer.regions import Destination, Head, Region


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
