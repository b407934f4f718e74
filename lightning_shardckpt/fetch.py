"""How do bytes come back? Ranged reads of what a load needs, compared with their checksums, and put into place.

Requests become tasks: a span of neighbouring bytes that is read by one call, or a region whose rows lie apart and go
through a window. The tasks are taken in the order of the files, so that the system reads ahead; where a rank has two
cores, by two threads, of which one reads while the other computes checksums. Where every call takes long, there are
more. Extra memory is a window for each of them. No torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from typing import NamedTuple, Protocol, TypeAlias

import numpy

from lightning_shardckpt.box import Shape, corners
from lightning_shardckpt.errors import CorruptionError
from lightning_shardckpt.header import DTYPE_BYTES, block_checksums
from lightning_shardckpt.index import ShardEntry
from lightning_shardckpt.pages import pages
from lightning_shardckpt.plan import Overlap, byte_runs
from lightning_shardckpt.processes import own_cores
from lightning_shardckpt.storage.protocol import Reader
from lightning_shardckpt.threads import Done, NoThreadError, start

HELD_BYTES = 24 << 20
"""How much a load from files may hold between verifying it and putting it into its place."""
SMALL_BYTES = 64 << 10
"""The largest tensor that is held: a larger one is sooner read a second time."""
_WINDOW_BYTES = 4 << 20  # of one read with checksums, at least a block; still in the cache when they are computed
_FAR_WINDOW_BYTES = 8 << 20  # where a read takes a round trip over a network
_PART_BYTES = 16 << 20  # of one read without
_DIRECT_BYTES = 64 << 10  # so much is read into its place, less goes through a window
_FAR_DIRECT_BYTES = 4 << 20  # where neighbours are better read together: every request is waited for, and billed
_GAP_BYTES = 16 << 10  # between rows: reading so much is no slower than a call
_GAP_SHARE = 16  # and of neighbouring tensors' bytes, one in so many
_FOREIGN_GAP_BYTES = 512  # between rows that nobody has read before, of which one in _GAP_SHARE bytes may be a gap, too
_THREADED_BYTES = 32 << 20  # less is not worth a thread
_FAR_THREADS = 16  # where the network is what is waited for
_ITEMS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}  # numpy types; only their size matters


class Files(Protocol):
    """An opened checkpoint, of any format."""

    path: str
    reader: Reader


class Request(NamedTuple):
    """Fill a region of ``target``, the bytes of a row-major array of ``local_shape``, from a stored box.

    ``run``: where the region lies in the box and in the target, and its length, in bytes; None if it is in pieces.
    Without a target the region is only verified.
    """

    key: str
    overlap: Overlap
    entry: ShardEntry
    local_shape: Shape
    run: tuple[int, int, int] | None
    target: memoryview | None

    @property
    def nbytes(self) -> int:
        """Bytes of the region."""
        return self.run[2] if self.run is not None else self.overlap.common.numel * DTYPE_BYTES[self.entry.dtype]

    def untargeted(self) -> Request:
        """The same, only to be verified."""
        return self._replace(target=None)


def single_run(overlap: Overlap, local_shape: Shape, itemsize: int) -> tuple[int, int, int] | None:
    """The ``run`` of a request."""
    runs = byte_runs(overlap, local_shape, itemsize)
    first = next(runs)
    return first if next(runs, None) is None else None


def fetch(files: Files, requests: Iterable[Request], *, verify: bool) -> None:
    """Read what the requests need; compare it with the checksums, put it into their targets, or both in one pass.

    With ``verify`` every block that a request touches is read whole. If this raises, targets may be filled in part.
    Files must have been checked by ``Checkpoint.check_file``.

    Raises:
        CorruptionError: naming the file, the tensor and the rank that wrote it.
    """
    _Fetch(files, verify).run(_in_files(requests, verify))


def planned_reads(
    files: Files, requests: Iterable[Request], *, verify: bool
) -> Iterator[tuple[str, int, int]]:
    """The ranged reads that ``fetch`` would make: file, offset, length. Nothing is read, and no target is touched."""
    yield from _Fetch(files, verify).reads(_in_files(requests, verify))


def _in_files(requests: Iterable[Request], verify: bool) -> list[Request]:
    """Those for which something is to be done, in the order of the files."""
    wanted = (request for request in requests if verify or request.target is not None)
    return sorted(wanted, key=lambda r: (r.entry.file, r.entry.begin))


class _Slice(NamedTuple):
    """Bytes ``[low, high)`` of a file; those in ``[start, stop)`` belong at ``at`` in the target."""

    request: Request
    low: int
    high: int
    start: int
    stop: int
    at: int


class _Rows:
    """A region as groups of rows: in a group, bytes that are not needed lie between needed ones in small gaps only."""

    def __init__(self, request: Request, gap_bytes: int, gap_share: int = 1 << 62) -> None:
        overlap, size = request.overlap, DTYPE_BYTES[request.entry.dtype]
        self.shape = overlap.common.shape
        self.pitches, self.target_pitches = _pitches(overlap.stored.shape, size), _pitches(request.local_shape, size)
        lengths = [size]  # of bytes from the first to the last needed one, by dim, from the last dim on
        for n, pitch in zip(self.shape[::-1], self.pitches[::-1], strict=True):
            lengths.append((n - 1) * pitch + lengths[-1])
        lengths.reverse()
        dims = range(len(self.shape))
        gaps = [max(gap_bytes, length // gap_share) for length in lengths[1:]]
        wide = [d for d in dims if self.shape[d] > 1 and self.pitches[d] - lengths[d + 1] > gaps[d]]
        fitting = next(d for d in dims if self.pitches[d] <= _WINDOW_BYTES)
        self.dim = max([fitting, *(d + 1 for d in wide)])
        self.row_bytes, self.group_bytes = lengths[self.dim + 1], lengths[self.dim]
        self._source, self._target = overlap.common.within(overlap.stored).start, overlap.local.start

    def groups(self) -> Iterator[tuple[int, int]]:
        """Where each group begins: (offset in the box, offset in the target), ascending."""
        first = sum(a * p for a, p in zip(self._source, self.pitches, strict=True))
        at = sum(a * p for a, p in zip(self._target, self.target_pitches, strict=True))
        for corner in corners(self.shape[: self.dim]):
            yield (
                first + sum(i * p for i, p in zip(corner, self.pitches, strict=False)),
                at + sum(i * p for i, p in zip(corner, self.target_pitches, strict=False)),
            )

    def copy(self, window: memoryview, offset: int, target: memoryview, at: int, rows: int, kind: str) -> None:
        """``rows`` of them, the first at ``offset`` in the window, into the target from ``at`` on."""
        shape, dim = (rows, *self.shape[self.dim + 1 :]), self.dim
        source = numpy.ndarray(shape, kind, window, offset, self.pitches[dim:])
        numpy.ndarray(shape, kind, target, at, self.target_pitches[dim:])[...] = source


def _pitches(shape: Shape, size: int) -> Shape:
    pitches = [size]
    for n in shape[:0:-1]:
        pitches.append(pitches[-1] * n)
    return tuple(pitches[::-1])


class _Other(threading.Thread):
    """Does ``work`` with a reader of its own."""

    def __init__(self, reader: Reader, work: Callable[[Reader], None]) -> None:
        super().__init__(name="shardckpt-reader")
        self._reader, self._work, self._done = reader, work, Done()

    def run(self) -> None:
        try:
            self._work(self._reader)
        finally:
            self._done.set()

    def end(self) -> list[BaseException]:
        """Wait for it, if it was started; returns what interrupted that."""
        interrupts = list[BaseException]()
        while self.ident is not None and not self._done.is_set():
            try:  # not Thread.join alone, which takes a thread for ended when it is interrupted (Python 3.11)
                self._done.wait()
            except BaseException as error:
                interrupts.append(error)
        self._reader.close()
        if self.ident is not None:
            self.join()
        return interrupts


_Task: TypeAlias = "list[_Slice] | Request"


class _Fetch:
    """One call of ``fetch``."""

    def __init__(self, files: Files, verify: bool) -> None:
        self._files, self._verify = files, verify
        self._lock, self._failures = threading.Lock(), list[BaseException]()
        self._tasks: Iterator[_Task] = iter(())
        self._window_bytes = _FAR_WINDOW_BYTES if files.reader.is_far else _WINDOW_BYTES
        self._direct_bytes = _FAR_DIRECT_BYTES if files.reader.is_far else _DIRECT_BYTES

    def run(self, requests: Sequence[Request]) -> None:
        self._tasks = self._tasks_of(requests)
        nbytes = sum(request.nbytes for request in requests)
        if self._files.reader.is_far:
            tasks = max(len(requests), nbytes // self._window_bytes)  # or fewer
            self._with_threads(min(_FAR_THREADS, tasks) - 1)
        elif nbytes >= _THREADED_BYTES and own_cores() > 1:
            self._with_threads(1)
        else:
            self._work(self._files.reader)
        if self._failures:
            raise self._failures[0]

    def _with_threads(self, count: int) -> None:
        others = [_Other(self._files.reader.twin(), self._work) for _ in range(count)]
        try:
            with suppress(NoThreadError):  # then without
                start(*others)
            self._work(self._files.reader)
        except BaseException as error:
            self._failures.append(error)
        for other in others:
            self._failures += other.end()

    def _work(self, reader: Reader) -> None:
        try:
            window = memoryview(pages(2 * self._window_bytes))
            while not self._failures:
                with self._lock:
                    task = next(self._tasks, None)
                if task is None:
                    return
                if isinstance(task, Request):
                    self._region(task, reader, window)
                else:
                    self._span(task, reader, window)
        except BaseException as error:
            self._failures.append(error)

    def reads(self, requests: Sequence[Request]) -> Iterator[tuple[str, int, int]]:
        """What ``run`` reads: see ``planned_reads``."""
        for task in self._tasks_of(requests):
            if isinstance(task, Request):
                rows, first = self._rows(task), task.entry.begin
                for source, _ in rows.groups():
                    for low, high in self._pieces(task.entry, first + source, first + source + rows.group_bytes):
                        yield task.entry.file, low, high - low
            else:
                yield task[0].request.entry.file, task[0].low, max(piece.high for piece in task) - task[0].low

    # ── tasks ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _tasks_of(self, requests: Sequence[Request]) -> Iterator[_Task]:
        """Requests in the order of the files, cut into slices that are joined to spans; in pieces where that is not."""
        for _, of_file in groupby(requests, key=lambda r: r.entry.file):
            span: list[_Slice] = []
            low = high = wanted = 0
            for request in of_file:
                if self._is_region(request):
                    yield request
                    continue
                for piece in self._slices(request):
                    if self._is_direct(piece):
                        yield [piece]
                        continue
                    # several requests for one box may come in any order, or interleave: a step back begins a new span
                    near = low <= piece.low <= high + wanted // _GAP_SHARE and piece.high - low <= self._window_bytes
                    if span and not near:
                        yield span
                        span = []
                    if not span:
                        low, high, wanted = piece.low, piece.low, 0
                    span.append(piece)
                    high, wanted = max(high, piece.high), wanted + piece.high - piece.low
            if span:
                yield span

    def _is_region(self, request: Request) -> bool:
        if request.run is not None or request.target is None:
            return False
        return self._verify or next(self._runs(request))[2] < _DIRECT_BYTES

    def _is_direct(self, piece: _Slice) -> bool:
        """Whether it is read into its place."""
        low, high = piece.low, piece.high
        has_target = piece.request.target is not None
        return has_target and (piece.start, piece.stop) == (low, high) and high - low >= self._direct_bytes

    def _slices(self, request: Request) -> Iterable[_Slice]:
        if request.run is not None:  # a shortcut: nearly all are one slice
            entry, (source, at, length) = request.entry, request.run
            low, high = source, source + length
            if self._verify:
                low, high = low // entry.block * entry.block, min(-(-high // entry.block) * entry.block, entry.nbytes)
            if high - low <= self._window_bytes:
                start = entry.begin + source
                return (_Slice(request, entry.begin + low, entry.begin + high, start, start + length, at),)
        return self._many_slices(request)

    def _many_slices(self, request: Request) -> Iterator[_Slice]:
        begin = request.entry.begin
        if self._verify:
            for source, at, length in self._runs(request):
                for low, high in self._windows(request.entry, source, length):
                    start, stop = max(begin + source, low), min(begin + source + length, high)
                    yield _Slice(request, low, high, start, stop, at + start - begin - source)
            return
        for source, at, length in self._runs(request):
            for i in range(0, length, _PART_BYTES):
                low, high = begin + source + i, begin + source + min(i + _PART_BYTES, length)
                yield _Slice(request, low, high, low, high, at + i)

    def _runs(self, request: Request) -> Iterator[tuple[int, int, int]]:
        """(offset in the box, offset in the target, length); of rows that are only verified, the second is 0."""
        if request.run is not None:
            yield request.run
        elif request.target is not None:
            yield from byte_runs(request.overlap, request.local_shape, DTYPE_BYTES[request.entry.dtype])
        else:
            rows = _Rows(request, request.entry.block)
            yield from ((source, 0, rows.group_bytes) for source, _ in rows.groups())

    def _windows(self, entry: ShardEntry, source: int, length: int) -> Iterator[tuple[int, int]]:
        """Whole blocks that hold ``length`` bytes from ``source`` on, as ranges of the file of at most a window."""
        block = entry.block
        step = max(self._window_bytes // block, 1) * block
        first, last = source // block * block, min(-(-(source + length) // block) * block, entry.nbytes)
        for low in range(first, last, step):
            yield entry.begin + low, entry.begin + min(low + step, last)

    # ── work ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _span(self, span: list[_Slice], reader: Reader, window: memoryview) -> None:
        first, low, target = span[0].request, span[0].low, span[0].request.target
        direct = len(span) == 1 and self._is_direct(span[0])
        size = max(piece.high for piece in span) - low
        data = target[span[0].at : span[0].at + size] if direct and target is not None else window[:size]
        self._read(reader, first, low, data)
        for piece in span:
            if self._verify:
                self._compare(piece.request, data[piece.low - low : piece.high - low], piece.low)
            target = piece.request.target
            if target is not None and not direct:
                target[piece.at : piece.at + piece.stop - piece.start] = data[piece.start - low : piece.stop - low]

    def _region(self, request: Request, reader: Reader, window: memoryview) -> None:
        rows, target = self._rows(request), request.target
        assert target is not None
        pitch, kind = rows.pitches[rows.dim], _ITEMS[DTYPE_BYTES[request.entry.dtype]]
        for source, at in rows.groups():
            first, end = request.entry.begin + source, request.entry.begin + source + rows.group_bytes
            done, left = 0, 0  # rows copied; bytes in the window of the row that is not complete
            for low, high in self._pieces(request.entry, first, end):
                data = window[left : left + high - low]
                self._read(reader, request, low, data)
                if self._verify:
                    self._compare(request, data, low)
                begin = low - left  # of the window, in the file
                complete = min(max((high - first - rows.row_bytes) // pitch + 1, done), rows.shape[rows.dim])
                if complete > done:
                    offset = first + done * pitch - begin
                    where = at + done * rows.target_pitches[rows.dim]
                    rows.copy(window, offset, target, where, complete - done, kind)
                done = complete
                left = high - min(max(first + done * pitch, begin), high)
                window[:left] = window[high - begin - left : high - begin]

    def _rows(self, request: Request) -> _Rows:
        """Without checksums there was no first pass that has brought all to the page cache: gaps cost more then."""
        if self._verify:
            return _Rows(request, request.entry.block)
        if request.entry.checksums:
            return _Rows(request, _GAP_BYTES)
        return _Rows(request, _FOREIGN_GAP_BYTES, _GAP_SHARE)

    def _pieces(self, entry: ShardEntry, first: int, end: int) -> Iterator[tuple[int, int]]:
        """Ranges of a file that follow one another and cover ``[first, end)``; whole blocks if they are verified."""
        if self._verify:
            yield from self._windows(entry, first - entry.begin, end - first)
        else:
            yield from ((low, min(low + _WINDOW_BYTES, end)) for low in range(first, end, _WINDOW_BYTES))

    def _read(self, reader: Reader, request: Request, offset: int, target: memoryview) -> None:
        try:
            reader.read_into(request.entry.file, offset, target)
        except (EOFError, FileNotFoundError) as error:
            where = f"checkpoint {self._files.path!r}, file {request.entry.file}"
            raise CorruptionError(f"{where}: {error}") from None

    def _compare(self, request: Request, data: memoryview, low: int) -> None:
        """``data`` begins at ``low`` in the file, where a block begins."""
        entry = request.entry
        block, number = entry.block, (low - entry.begin) // entry.block
        found = block_checksums(data, block)
        if found == entry.checksums[number : number + len(found)]:
            return
        at = next(i for i, one in enumerate(found) if one != entry.checksums[number + i]) * block
        raise CorruptionError(
            f"checkpoint {self._files.path!r}: corrupted data of {request.key!r} in {entry.file}, written "
            f"by rank {request.overlap.writer}, bytes {low + at} to {low + min(at + block, len(data))}"
        )
