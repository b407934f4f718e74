"""How do several threads fill large files? By regions: each one's place is known before a byte is read.

A container says which tensor goes where; a zip archive also what stands right before each region once its CRC-32 is
known. What a region holds is read from a checkpoint in pieces, verified, summed and written, each piece by one thread;
the order does not matter. Regions are begun in the order in which they lie in a file, and in several files at a time.
On its way a piece may be converted to another dtype, or go to several places. No torch.

A stream, such as an upload, takes the bytes of a file in order. Since regions are begun in order, a thread whose piece
is not next just waits with it, and nothing more is kept. A head needs the sum of what follows it: for a stream, a large
region is read once to be summed, and then once more.
"""

from __future__ import annotations

import os
import threading
import zlib
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

from lightning_shardckpt.box import Box, Shape
from lightning_shardckpt.crc import PiecewiseCRC
from lightning_shardckpt.fetch import Request, fetch, single_run
from lightning_shardckpt.header import DTYPE_BYTES
from lightning_shardckpt.storage.durable import naming, write_at
from lightning_shardckpt.storage.protocol import File
from lightning_shardckpt.threads import start
from lightning_shardckpt.whole import Source, Span, Stored, Tensors, Windows, spans, windows

_WINDOW_BYTES = 4 << 20  # of each thread, twice; smaller ones stay in a cache, larger ones take fewer calls
_MOST_THREADS = 4  # one at a time can write to a file, and that is about half of the work
_ALIGNMENT = 64

Head = Callable[[int, int], bytes]
"""Gives what stands right before a region, by its number and the CRC-32 of its bytes; any thread calls it, once."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """From elements of ``stored`` bytes to elements of ``written`` bytes; any thread calls ``convert``."""

    convert: Callable[[memoryview], memoryview]
    stored: int
    written: int


@dataclass(frozen=True, slots=True)
class Destination:
    """Where ``nbytes`` of a tensor, from ``at`` on, are to be: from ``begin`` on in a file, by its number."""

    at: int
    nbytes: int
    begin: int
    file: int = 0


@dataclass(frozen=True, slots=True)
class Region:
    """``nbytes`` of a file from ``begin`` on, right behind a head of ``head_nbytes``.

    ``box``: what of a tensor it is, if not all. ``destinations``: those of a tensor that is to be in several,
    ascending in it; what is in none is read, but not written. ``nbytes`` are those of the tensor then, and ``begin``
    means nothing; none may be a stream.
    """

    begin: int
    nbytes: int
    head_nbytes: int
    content: memoryview | tuple[str, str]
    """The bytes, or component and key of the tensor that is stored."""
    file: int = 0
    conversion: Conversion | None = None
    box: Box | None = None
    destinations: tuple[Destination, ...] = ()

    @property
    def first(self) -> int:
        """Where the head begins."""
        return self.begin - self.head_nbytes

    @property
    def end(self) -> int:
        """Where the bytes end."""
        return self.begin + self.nbytes


def fill(
    file: File | Sequence[File],
    regions: Sequence[Region],
    tensors: Tensors,
    head: Head | None,
    advance: Callable[[int], Any],
) -> None:
    """Write the regions, which ascend in each file, and their heads.

    Args:
        file: one, or several, to which the regions refer by number; nothing is synced.
        regions: what to write. In a stream the first one begins where that is, and there are no gaps.
        tensors: where their bytes are; nobody else may use it meanwhile.
        head: what stands before each region; None if nothing does, so that nothing needs to be summed.
        advance: told of the bytes of regions as they are written, by one thread at a time.

    Raises:
        CorruptionError: naming file, tensor and rank; the first error of any thread, when all have ended.
    """
    files = tuple(file) if isinstance(file, Sequence) else (file,)
    work = _Work(files, regions, tensors, head, advance)
    helpers = [threading.Thread(target=work.do, name="shardckpt-filler") for _ in range(_thread_count(regions) - 1)]
    try:
        start(*helpers)
        work.do()
        work.end()
    except BaseException as error:  # KeyboardInterrupt, or no more threads
        work.fail(error)
        work.end_despite_interrupts()
    for helper in helpers:
        if helper.ident is not None:
            helper.join()  # has nothing to do any more
    if work.error is not None:
        raise work.error


def _thread_count(regions: Sequence[Region]) -> int:
    """No more than there are windows; two even on one core, since one may wait for the disk."""
    nbytes = sum(region.head_nbytes + region.nbytes for region in regions)
    return min(max(len(os.sched_getaffinity(0)), 2), _MOST_THREADS, nbytes // _WINDOW_BYTES + 1)


@dataclass(frozen=True, slots=True)
class _Item:
    """A region, where its tensor is stored, and what is to be done with it."""

    number: int
    region: Region
    shape: Shape
    boxes: list[Stored]
    is_summed: bool
    is_written: bool = True


class _GivenUpError(Exception):
    """Another thread failed, so what this one waits for does not come."""


_Task = Callable[[Source], bool]
"""Writes a piece of the file; True if it is to be called again, since there may be more."""


class _Work:
    """What is to be done, and what is done."""

    def __init__(
        self,
        files: Sequence[File],
        regions: Sequence[Region],
        tensors: Tensors,
        head: Head | None,
        advance: Callable[[int], Any],
    ) -> None:
        self._files, self._tensors, self._head, self._advance = files, tensors, head, advance
        self._lock, self._turns = threading.RLock(), threading.RLock()  # these are taken, see ``threads``
        self._idle, self._turn = threading.Condition(self._lock), threading.Condition(self._turns)
        self._writing = [threading.Lock() for _ in files]
        self._ends = {region.file: region.first for region in reversed(regions)}  # of what streams were given so far
        self._busy, self._is_over = 0, False
        self._tasks = self._planned(regions)
        self._shared: list[tuple[Windows, _Task]] = []
        self._crcs: dict[int, PiecewiseCRC] = {}
        self.error: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        """Have all threads end after what they are at; the first error counts."""
        with self._lock:
            self.error = self.error or error
        with self._turns:
            self._turn.notify_all()

    def end(self) -> None:
        """Wait until no thread is at work; none will be after that, even if it starts only then."""
        with self._lock:
            while self._busy:
                self._idle.wait()
            self._is_over = True

    def end_despite_interrupts(self) -> None:
        """Do so whatever a user does: a thread would write to a file that is closed by then."""
        while not self._is_over:  # not Thread.join: once interrupted, Python 3.11 takes the thread for stopped
            with suppress(KeyboardInterrupt):
                self.end()

    def do(self) -> None:
        """Take part until nothing is left, or something failed. For any thread."""
        taking_part = False
        try:
            with self._lock:
                if self._is_over:
                    return
                self._busy, taking_part = self._busy + 1, True
            self._take_part()
        finally:
            with self._lock:
                self._busy -= taking_part
                self._idle.notify_all()

    def _take_part(self) -> None:
        try:
            with naming(self._tensors.path):
                reader = self._tensors.reader.twin()
            try:
                source = Source(self._tensors.path, reader, _WINDOW_BYTES)
                while (task := self._next()) is not None:
                    while self.error is None and task(source):
                        pass
            finally:
                reader.close()
        except BaseException as error:
            self.fail(error)

    def _next(self) -> _Task | None:
        """What nobody has begun; else what another thread can be helped with."""
        with self._lock:
            if self.error is not None:
                return None
            self._shared = [(one, task) for one, task in self._shared if not one.is_exhausted]
            shared = next((task for _, task in self._shared), None)
            if shared is not None and not all(isinstance(file, int) for file in self._files):
                return shared  # what follows would have to wait for it
            return next(self._tasks, None) or shared

    # ── what there is to do ─────────────────────────────────────────────────────────────────────────────────────────

    def _planned(self, regions: Sequence[Region]) -> Iterator[_Task]:
        """Planned as it comes up, one call at a time; of several files in turn, so that several can be written to."""
        by_file: dict[int, list[tuple[int, Region]]] = {}
        for number, region in enumerate(regions):
            by_file.setdefault(region.file, []).append((number, region))
        waiting = iter([self._of_file(found) for found in by_file.values()])
        begun = deque(islice(waiting, _MOST_THREADS))
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
        for number, region in regions:
            item = self._located(number, region)
            is_small = region.end - region.first <= _WINDOW_BYTES - _ALIGNMENT or not region.nbytes
            is_small = is_small and region.conversion is None and region.box is None and not region.destinations
            if small and (
                not is_small
                or region.first != small[-1].region.end
                or region.end - small[0].region.first > _WINDOW_BYTES - _ALIGNMENT
            ):
                yield partial(self._write_small, small)
                small = []
            if is_small:
                small.append(item)
            else:
                if self._head is not None:
                    self._crcs[number] = PiecewiseCRC(region.nbytes)
                if self._head is not None and not isinstance(self._files[region.file], int):
                    yield from self._large(replace(item, is_written=False))
                    item = replace(item, is_summed=False)
                yield from self._large(item)
        if small:
            yield partial(self._write_small, small)

    def _located(self, number: int, region: Region) -> _Item:
        is_summed = self._head is not None
        if isinstance(region.content, memoryview):
            return _Item(number, region, (), [], is_summed)
        shape, boxes = self._tensors.spec(*region.content).shape, self._tensors.boxes(*region.content)
        return _Item(number, region, shape, boxes, is_summed)

    def _large(self, item: _Item) -> Iterator[_Task]:
        content = item.region.content
        if isinstance(content, memoryview):
            for at in range(0, len(content), _WINDOW_BYTES):
                yield partial(self._write_memory, item, at, content[at : at + _WINDOW_BYTES])
        elif item.region.box is not None:
            yield from self._boxed(item, item.region.box)
        elif all(_is_cut_anywhere(stored, item.region) for stored in item.boxes):
            for stored in item.boxes:
                for span in spans(stored):
                    yield partial(self._write_span, item, span)
        else:
            shared = Windows(item.shape, item.boxes, _WINDOW_BYTES)
            task = partial(self._write_window, item, shared)
            self._shared.append((shared, task))
            yield task

    def _boxed(self, item: _Item, box: Box) -> Iterator[_Task]:
        """Windows of a box of a tensor, each read and verified on its own: of the blocks that it touches."""
        size, at = DTYPE_BYTES[self._tensors.spec(*item.region.content).dtype], 0
        for window in windows(box.shape, _WINDOW_BYTES // size):
            yield partial(self._write_part, item, at, window.shift(box.start), size)
            at += window.numel * size

    # ── how it is done ──────────────────────────────────────────────────────────────────────────────────────────────

    def _write_small(self, items: list[_Item], source: Source) -> bool:
        """Whole regions side by side, and their heads, by one write."""
        first, end = items[0].region.first, items[-1].region.end
        base = first - first % _ALIGNMENT  # so that the tensors are aligned in memory as in the file
        targets = [source.target[item.region.begin - base : item.region.end - base] for item in items]
        source.many(
            (stored, item.shape, target) for item, target in zip(items, targets, strict=True) for stored in item.boxes
        )
        for item, target in zip(items, targets, strict=True):
            region = item.region
            if isinstance(region.content, memoryview):
                target[:] = region.content
            if self._head is not None:
                source.target[region.first - base : region.begin - base] = self._head(item.number, zlib.crc32(target))
        self._write(items[0].region.file, source.target[first - base : end - base], first)
        with self._lock:
            self._advance(sum(item.region.nbytes for item in items))
        return False

    def _write_memory(self, item: _Item, at: int, data: memoryview, source: Source) -> bool:
        self._write_piece(item, at, data)
        return False

    def _write_span(self, item: _Item, span: Span, source: Source) -> bool:
        self._write_piece(item, span.begin, source.span(span))
        return False

    def _write_window(self, item: _Item, windows: Windows, source: Source) -> bool:
        found = windows.fill(source)
        if found is not None:
            self._write_piece(item, *found)
        return found is not None

    def _write_part(self, item: _Item, at: int, window: Box, size: int, source: Source) -> bool:
        data = source.target[: window.numel * size]
        requests = []
        for stored in item.boxes:
            if (common := stored.box.intersect(window)) is not None:
                overlap = replace(stored.place.overlap, common=common, local=common.within(window))
                run = single_run(overlap, window.shape, size)
                requests.append(Request(stored.key, overlap, stored.entry, window.shape, run, data))
        fetch(source, requests, verify=all(stored.entry.checksums for stored in item.boxes))
        self._write_piece(item, at, data)
        return False

    def _write_piece(self, item: _Item, at: int, data: memoryview) -> None:
        region, change = item.region, item.region.conversion
        if change is not None:
            at, data = at // change.stored * change.written, change.convert(data)
        if item.is_written:
            if region.destinations:
                self._write_apart(region.destinations, at, data)
            else:
                self._write(region.file, data, region.begin + at)
            with self._lock:
                self._advance(len(data))
        if item.is_summed:
            self._sum(item, at, data)

    def _sum(self, item: _Item, at: int, data: memoryview) -> None:
        """Write the head of a region when all of it is summed."""
        crc = zlib.crc32(data)
        with self._lock:
            total = self._crcs[item.number].add(at, len(data), crc)
            if total is not None:
                del self._crcs[item.number]
        if total is not None and self._head is not None:
            self._write(item.region.file, memoryview(self._head(item.number, total)), item.region.first)

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
        elif len(data):
            self._give(number, file, data, offset)

    def _give(self, number: int, stream: Callable[[memoryview], object], data: memoryview, offset: int) -> None:
        """Wait for all that lies before: it is of tasks that were begun before, so it comes."""
        with self._turns:
            while self._ends[number] != offset:
                assert self._ends[number] < offset, f"{self._ends[number]} bytes were given, now come those at {offset}"
                if self.error is not None:
                    raise _GivenUpError
                self._turn.wait()
        stream(data)
        with self._turns:
            self._ends[number] += len(data)
            self._turn.notify_all()


def _is_cut_anywhere(stored: Stored, region: Region) -> bool:
    """Whether spans of a box can be written as they come: it lies in one piece, and no element is cut in two."""
    change = region.conversion
    return stored.place.in_one_piece and (change is None or stored.entry.block % change.stored == 0)
