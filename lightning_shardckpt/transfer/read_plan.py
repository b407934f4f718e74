"""Plans of the ranged reads that bring regions of stored boxes into memory. Pure: nothing is read.

A request asks for a region of one stored box. Requests become tasks, in the order of the files:

- ``Span``: adjacent bytes that one call reads, directly into the target or through a window;
- ``Rows``: a region of separate rows, too far apart or too many for one window, read in several pieces.

With checksums, every read consists of whole blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple, TypeAlias

from lightning_shardckpt.format.box import Shape, iterate_indices
from lightning_shardckpt.format.index import ShardEntry
from lightning_shardckpt.format.plan import Overlap, byte_runs
from lightning_shardckpt.format.value_checks import DTYPE_BYTES
from lightning_shardckpt.system.tuning import Tuning
from lightning_shardckpt.transfer.strided_copy import copy_strided, pitches_of

_GAP_SHARE = 16  # one in this many bytes may be a gap between adjacent tensors, or between rows not read before
_NO_SHARE = 1 << 62


class Request(NamedTuple):
    """A request to fill a region of ``target``, a row-major array of ``local_shape``, from a stored box.

    ``run`` is (offset in the box, offset in the target, length) in bytes; None if the region is not contiguous in both.
    """

    key: str
    overlap: Overlap
    entry: ShardEntry
    local_shape: Shape
    run: tuple[int, int, int] | None
    target: memoryview

    @property
    def nbytes(self) -> int:
        """Length of the region in bytes."""
        return self.run[2] if self.run is not None else self.overlap.common.numel * DTYPE_BYTES[self.entry.dtype]


def single_run(overlap: Overlap, local_shape: Shape, itemsize: int) -> tuple[int, int, int] | None:
    """Return the ``run`` of a request, or None if the region is not contiguous in the box and the target."""
    runs = byte_runs(overlap, local_shape, itemsize)
    first = next(runs)
    return first if next(runs, None) is None else None


class RowGroups:
    """A region as groups of rows, such that the gaps between needed bytes are small within a group.

    Args:
        overlap: the region.
        local_shape: the shape of the target.
        size: the size of an element in bytes.
        window_bytes: the maximum length of a row.
        gap_bytes: the maximum length of a gap within a group.
        gap_share: allow larger gaps of at most one in this many bytes, too.
    """

    def __init__(
        self,
        overlap: Overlap,
        local_shape: Shape,
        size: int,
        *,
        window_bytes: int,
        gap_bytes: int,
        gap_share: int = _NO_SHARE,
    ) -> None:
        self.shape, self._size = overlap.common.shape, size
        self.pitches = pitches_of(overlap.stored.shape, size)
        self.target_pitches = pitches_of(local_shape, size)
        lengths = [size]  # bytes from the first to the last needed one, by dim, starting with the last dim
        for n, pitch in zip(self.shape[::-1], self.pitches[::-1], strict=True):
            lengths.append((n - 1) * pitch + lengths[-1])
        lengths.reverse()
        dims = range(len(self.shape))
        gaps = [max(gap_bytes, length // gap_share) for length in lengths[1:]]
        wide = [d for d in dims if self.shape[d] > 1 and self.pitches[d] - lengths[d + 1] > gaps[d]]
        fitting = next(d for d in dims if self.pitches[d] <= window_bytes)
        self.dim = max([fitting, *(d + 1 for d in wide)])
        self.row_bytes, self.group_bytes = lengths[self.dim + 1], lengths[self.dim]
        self.rows = self.shape[self.dim]  # per group
        self.pitch, self.target_pitch = self.pitches[self.dim], self.target_pitches[self.dim]
        self._source, self._target = overlap.common.within(overlap.stored).start, overlap.local.start

    def groups(self) -> Iterator[tuple[int, int]]:
        """Yield (offset in the box, offset in the target) of each group, in bytes, ascending."""
        first = sum(a * p for a, p in zip(self._source, self.pitches, strict=True))
        at = sum(a * p for a, p in zip(self._target, self.target_pitches, strict=True))
        for index in iterate_indices(self.shape[: self.dim]):
            yield (
                first + sum(i * p for i, p in zip(index, self.pitches, strict=False)),
                at + sum(i * p for i, p in zip(index, self.target_pitches, strict=False)),
            )

    def copy(self, window: memoryview, offset: int, target: memoryview, at: int, rows: int) -> None:
        """Copy ``rows`` rows from ``offset`` on in the window to ``at`` on in the target."""
        shape, dim = (rows, *self.shape[self.dim + 1 :]), self.dim
        copy_strided(shape, self._size, (window, offset, self.pitches[dim:]), (target, at, self.target_pitches[dim:]))


class Slice(NamedTuple):
    """Bytes ``[low, high)`` of a file, of which ``[start, stop)`` belong at ``at`` in the target.

    With ``rows``, they are rows that are separate in the target; else they are contiguous there.
    """

    request: Request
    low: int
    high: int
    start: int
    stop: int
    at: int
    rows: RowGroups | None = None

    def place(self, data: memoryview, target: memoryview) -> None:
        """Copy the bytes ``[start, stop)`` into the target; ``data`` are all bytes of the slice."""
        if self.rows is not None:
            self.rows.copy(data, self.start - self.low, target, self.at, self.rows.rows)
        else:
            target[self.at : self.at + self.stop - self.start] = data[self.start - self.low : self.stop - self.low]


class Span(NamedTuple):
    """Slices of one file that one call reads. A ``direct`` span is a single slice that is read into the target.

    A direct span with checksums is read in pieces, so that each is hashed while it is in the cache of a core.
    """

    slices: Sequence[Slice]
    direct: bool = False

    @property
    def low(self) -> int:
        """The offset in the file where the read begins."""
        return self.slices[0].low

    @property
    def nbytes(self) -> int:
        """Length of the read."""
        return max(piece.high for piece in self.slices) - self.low


class Rows(NamedTuple):
    """A region of separate rows, which are read through a window in pieces."""

    request: Request
    groups: RowGroups


Task: TypeAlias = Span | Rows
"""A unit of work for one thread."""


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Rules that turn requests into reads.

    Args:
        verify: read the whole of every block that a request touches, if there are checksums.
        high_latency: each call takes a round trip over a network.
        tuning: buffer sizes.
        span_gap_bytes: a span may contain gaps of this size between requests; by default, only of a share of the
            requested bytes.
    """

    verify: bool
    high_latency: bool
    tuning: Tuning
    span_gap_bytes: int = 0

    @property
    def window_bytes(self) -> int:
        """The maximum length of a read in bytes, except for single blocks and direct reads."""
        return self.tuning.high_latency_window_bytes if self.high_latency else self.tuning.read_window_bytes

    @property
    def _direct_bytes(self) -> int:
        return self.tuning.high_latency_direct_bytes if self.high_latency else self.tuning.direct_read_bytes

    def sort(self, requests: Iterable[Request]) -> list[Request]:
        """Return the requests, sorted by file and offset."""
        by_file: dict[str, list[Request]] = {}
        for request in requests:
            by_file.setdefault(request.entry.file, []).append(request)
        for file_requests in by_file.values():
            file_requests.sort(key=lambda request: request.entry.begin)
        return [request for _, file_requests in sorted(by_file.items()) for request in file_requests]

    def verifies(self, request: Request) -> bool:
        """Return True if checksums are compared; boxes of other formats have none."""
        return self.verify and bool(request.entry.checksums)

    def tasks(self, requests: Sequence[Request]) -> Iterator[Task]:
        """Yield the tasks for requests that ``sort`` returned."""
        window_bytes, direct_bytes, min_gap = self.window_bytes, self._direct_bytes, self.span_gap_bytes
        for _, file_requests in groupby(requests, key=lambda r: r.entry.file):
            span: list[Slice] = []
            low = high = needed = 0
            for request in file_requests:
                for piece in self._split(request):
                    if isinstance(piece, Rows):
                        yield piece
                        continue
                    first, last = piece.low, piece.high
                    if last - first >= direct_bytes and piece.rows is None and _is_needed_whole(piece):
                        yield Span((piece,), direct=True)
                        continue
                    # several requests for one box may come in any order, or interleave: a step back begins a new span
                    reach = high + max(needed // _GAP_SHARE, min_gap)
                    is_near = low <= first <= reach and last - low <= window_bytes
                    if span and not is_near:
                        yield Span(span)
                        span = []
                    if not span:
                        low, high, needed = first, first, 0
                    span.append(piece)
                    high, needed = max(high, last), needed + last - first
            if span:
                yield Span(span)

    def direct_ranges(self, piece: Slice) -> Iterable[tuple[int, int]]:
        """Return consecutive ranges of the file that cover a slice that is read directly into the target."""
        low, high = piece.low, piece.high
        if not self.verifies(piece.request):
            return ((low, high),)
        block = piece.request.entry.block
        step = max(self.window_bytes // block, 1) * block
        return ((at, min(at + step, high)) for at in range(low, high, step))

    def ranges(self, request: Request, first: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """Yield consecutive ranges of the file that cover ``[first, first + nbytes)`` and fit into the window."""
        if self.verifies(request):
            yield from self._whole_blocks(request.entry, first - request.entry.begin, nbytes)
        else:
            end, step = first + nbytes, self.window_bytes
            yield from ((low, min(low + step, end)) for low in range(first, end, step))

    def _whole_blocks(
        self, entry: ShardEntry, source: int, nbytes: int, max_bytes: int | None = None
    ) -> Iterator[tuple[int, int]]:
        block = entry.block
        step = max((max_bytes or self.window_bytes) // block, 1) * block
        first, last = source // block * block, min(-(-(source + nbytes) // block) * block, entry.nbytes)
        for low in range(first, last, step):
            yield entry.begin + low, entry.begin + min(low + step, last)

    def _split(self, request: Request) -> Iterable[Slice | Rows]:
        if request.run is not None:  # a fast path: nearly all requests are one slice
            entry, (source, at, length) = request.entry, request.run
            begin, low, high = entry.begin, source, source + length
            if length != entry.nbytes and self.verifies(request):
                low, high = low // entry.block * entry.block, min(-(-high // entry.block) * entry.block, entry.nbytes)
            is_direct = high - low == length and not self.high_latency
            if high - low <= (self.tuning.verified_part_bytes if is_direct else self.window_bytes):
                return (Slice(request, begin + low, begin + high, begin + source, begin + source + length, at),)
        elif self._has_short_runs(request):
            return (self._rows_or_slice(request),)
        return self._slices(request)

    def _has_short_runs(self, request: Request) -> bool:
        return self.verifies(request) or next(self._runs(request))[2] < self.tuning.direct_read_bytes

    def _rows_or_slice(self, request: Request) -> Slice | Rows:
        groups = self._groups(request)
        if groups.dim == 0 and groups.group_bytes <= self.window_bytes:
            ((source, at),) = groups.groups()
            start = request.entry.begin + source
            stop = start + groups.group_bytes
            low, high = start, stop
            if self.verifies(request):
                block, begin, end = request.entry.block, request.entry.begin, request.entry.begin + request.entry.nbytes
                low = begin + source // block * block
                high = min(begin + -(-(source + groups.group_bytes) // block) * block, end)
            if high - low <= self.window_bytes:
                return Slice(request, low, high, start, stop, at, groups)
        return Rows(request, groups)

    def _slices(self, request: Request) -> Iterator[Slice]:
        begin = request.entry.begin
        for source, at, length in self._runs(request):
            for low, high in self._parts(request, source, length):
                start, stop = max(begin + source, low), min(begin + source + length, high)
                yield Slice(request, low, high, start, stop, at + start - begin - source)

    def _parts(self, request: Request, source: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """Yield ranges of the file that cover ``nbytes`` of a box; large ones if they can be read into the target."""
        entry = request.entry
        if not self.verifies(request):
            end, part = entry.begin + source + nbytes, self.tuning.read_part_bytes
            yield from ((low, min(low + part, end)) for low in range(entry.begin + source, end, part))
            return
        stop, block = source + nbytes, entry.block
        first, last = -(-source // block) * block, stop if stop == entry.nbytes else stop // block * block
        if self.high_latency or first >= last:
            yield from self._whole_blocks(entry, source, nbytes)
            return
        if source < first:  # a block that is only needed in part goes through the window
            yield entry.begin + first - block, entry.begin + first
        yield from self._whole_blocks(entry, first, last - first, self.tuning.verified_part_bytes)
        if last < stop:
            yield entry.begin + last, entry.begin + min(last + block, entry.nbytes)

    def _runs(self, request: Request) -> Iterator[tuple[int, int, int]]:
        """Yield (offset in the box, offset in the target, length)."""
        if request.run is not None:
            yield request.run
        else:
            yield from byte_runs(request.overlap, request.local_shape, DTYPE_BYTES[request.entry.dtype])

    def _groups(self, request: Request) -> RowGroups:
        """Return the row groups of a request.

        Gaps cost more if there are no checksums, since then no verifying pass has brought the file to the page cache.
        """
        gap_bytes, gap_share = self.tuning.unread_row_gap_bytes, _GAP_SHARE
        if request.entry.checksums:
            gap_share = _NO_SHARE
            gap_bytes = request.entry.block if self.verify else self.tuning.row_gap_bytes
        size = DTYPE_BYTES[request.entry.dtype]
        return _row_groups(
            request.overlap,
            request.local_shape,
            size,
            window_bytes=self.window_bytes,
            gap_bytes=gap_bytes,
            gap_share=gap_share,
        )


_row_groups = lru_cache(maxsize=1024)(RowGroups)  # many tensors have equal groups


def _is_needed_whole(piece: Slice) -> bool:
    return (piece.start, piece.stop) == (piece.low, piece.high)
