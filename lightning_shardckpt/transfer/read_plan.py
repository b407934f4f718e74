"""Plan the ranged reads that bring regions of stored boxes into memory. Pure: nothing is read.

A request asks for a region of one stored box. Requests become tasks, in the order of the files:

- a ``Span``: neighbouring bytes, read by one call, straight into their place or through a window;
- ``Rows``: a region whose rows lie apart, too far or too many for one window, read piece after piece.

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

_GAP_SHARE = 16  # one in so many bytes may be a gap: between neighbouring tensors, and between rows not read before
_NO_SHARE = 1 << 62


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
        """Return a request for the same region, only to be verified."""
        return self._replace(target=None)


def single_run(overlap: Overlap, local_shape: Shape, itemsize: int) -> tuple[int, int, int] | None:
    """The ``run`` of a request; None if the region is not contiguous both in the box and in the target."""
    runs = byte_runs(overlap, local_shape, itemsize)
    first = next(runs)
    return first if next(runs, None) is None else None


class RowGroups:
    """A region as groups of rows: in a group, bytes that are not needed lie between needed ones in small gaps only.

    Args:
        overlap: the region.
        local_shape: of the target.
        size: of an element, in bytes.
        window_bytes: no row is longer.
        gap_bytes: of gaps within a group at most.
        gap_share: larger gaps, too, that are at most one in so many bytes.
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
        lengths = [size]  # of bytes from the first to the last needed one, by dim, from the last dim on
        for n, pitch in zip(self.shape[::-1], self.pitches[::-1], strict=True):
            lengths.append((n - 1) * pitch + lengths[-1])
        lengths.reverse()
        dims = range(len(self.shape))
        gaps = [max(gap_bytes, length // gap_share) for length in lengths[1:]]
        wide = [d for d in dims if self.shape[d] > 1 and self.pitches[d] - lengths[d + 1] > gaps[d]]
        fitting = next(d for d in dims if self.pitches[d] <= window_bytes)
        self.dim = max([fitting, *(d + 1 for d in wide)])
        self.row_bytes, self.group_bytes = lengths[self.dim + 1], lengths[self.dim]
        self.rows = self.shape[self.dim]  # of a group
        self.pitch, self.target_pitch = self.pitches[self.dim], self.target_pitches[self.dim]
        self._source, self._target = overlap.common.within(overlap.stored).start, overlap.local.start

    def groups(self) -> Iterator[tuple[int, int]]:
        """Yield where each group begins: (offset in the box, offset in the target), in bytes, ascending."""
        first = sum(a * p for a, p in zip(self._source, self.pitches, strict=True))
        at = sum(a * p for a, p in zip(self._target, self.target_pitches, strict=True))
        for corner in iterate_indices(self.shape[: self.dim]):
            yield (
                first + sum(i * p for i, p in zip(corner, self.pitches, strict=False)),
                at + sum(i * p for i, p in zip(corner, self.target_pitches, strict=False)),
            )

    def copy(self, window: memoryview, offset: int, target: memoryview, at: int, rows: int) -> None:
        """Copy ``rows`` rows, the first at ``offset`` in the window, into the target from ``at`` on."""
        shape, dim = (rows, *self.shape[self.dim + 1 :]), self.dim
        copy_strided(shape, self._size, (window, offset, self.pitches[dim:]), (target, at, self.target_pitches[dim:]))


class Slice(NamedTuple):
    """Bytes ``[low, high)`` of a file; those in ``[start, stop)`` belong at ``at`` in the target.

    ``rows``: they are rows that lie apart in the target, from ``at`` on; else they are contiguous there.
    """

    request: Request
    low: int
    high: int
    start: int
    stop: int
    at: int
    rows: RowGroups | None = None

    def place(self, data: memoryview, target: memoryview) -> None:
        """Copy into the target what belongs there; ``data`` are the bytes of the slice."""
        if self.rows is not None:
            self.rows.copy(data, self.start - self.low, target, self.at, self.rows.rows)
        else:
            target[self.at : self.at + self.stop - self.start] = data[self.start - self.low : self.stop - self.low]


class Span(NamedTuple):
    """Slices of one file that are read by one call; a ``direct`` one is a single slice, read into its place.

    A direct one with checksums is read piece after piece, so that each is hashed while a core's own cache has it.
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
    """A region whose rows are read through a window, in pieces."""

    request: Request
    groups: RowGroups


Task: TypeAlias = Span | Rows
"""What one thread does without another."""


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Rules by which requests become reads.

    Args:
        verify: every block that a request touches is read whole, where there are checksums.
        high_latency: every call takes a round trip over a network.
        tuning: sizes.
        span_gap_bytes: a span may read so much at once that nobody needs; by default only a share of what is needed.
    """

    verify: bool
    high_latency: bool
    tuning: Tuning
    span_gap_bytes: int = 0

    @property
    def window_bytes(self) -> int:
        """The most that one task reads by one call, in bytes, but for a single block or a direct read."""
        return self.tuning.high_latency_window_bytes if self.high_latency else self.tuning.read_window_bytes

    @property
    def _direct_bytes(self) -> int:
        return self.tuning.high_latency_direct_bytes if self.high_latency else self.tuning.direct_read_bytes

    def in_order(self, requests: Iterable[Request]) -> list[Request]:
        """The requests for which something is to be done, in the order of the files."""
        by_file: dict[str, list[Request]] = {}
        for request in requests:
            if request.target is not None or self.verifies(request):
                by_file.setdefault(request.entry.file, []).append(request)
        for of_file in by_file.values():
            of_file.sort(key=lambda request: request.entry.begin)
        return [request for _, of_file in sorted(by_file.items()) for request in of_file]

    def verifies(self, request: Request) -> bool:
        """Return whether checksums are compared; a box of another format has none."""
        return self.verify and bool(request.entry.checksums)

    def tasks(self, requests: Sequence[Request]) -> Iterator[Task]:
        """The tasks for requests that are in the order of the files; made as they are asked for."""
        window_bytes, direct_bytes, least_gap = self.window_bytes, self._direct_bytes, self.span_gap_bytes
        for _, of_file in groupby(requests, key=lambda r: r.entry.file):
            span: list[Slice] = []
            low = high = wanted = 0
            for request in of_file:
                for piece in self._pieces_of(request):
                    if isinstance(piece, Rows):
                        yield piece
                        continue
                    first, last = piece.low, piece.high
                    if last - first >= direct_bytes and piece.rows is None and _fills_its_place(piece):
                        yield Span((piece,), direct=True)
                        continue
                    # several requests for one box may come in any order, or interleave: a step back begins a new span
                    reach = high + max(wanted // _GAP_SHARE, least_gap)
                    near = low <= first <= reach and last - low <= window_bytes
                    if span and not near:
                        yield Span(span)
                        span = []
                    if not span:
                        low, high, wanted = first, first, 0
                    span.append(piece)
                    high, wanted = max(high, last), wanted + last - first
            if span:
                yield Span(span)

    def reads(self, requests: Sequence[Request]) -> Iterator[tuple[str, int, int]]:
        """The reads of the tasks: file, offset, length."""
        for task in self.tasks(requests):
            if isinstance(task, Rows):
                entry, groups = task.request.entry, task.groups
                for source, _ in groups.groups():
                    for low, high in self.ranges(task.request, entry.begin + source, groups.group_bytes):
                        yield entry.file, low, high - low
            else:
                file = task.slices[0].request.entry.file
                ranges = self.direct_ranges(task.slices[0]) if task.direct else [(task.low, task.low + task.nbytes)]
                yield from ((file, low, high - low) for low, high in ranges)

    def direct_ranges(self, piece: Slice) -> Iterable[tuple[int, int]]:
        """Ranges of a file that follow one another and cover a slice that is read into its place."""
        low, high = piece.low, piece.high
        if not self.verifies(piece.request):
            return ((low, high),)
        block = piece.request.entry.block
        step = max(self.window_bytes // block, 1) * block
        return ((at, min(at + step, high)) for at in range(low, high, step))

    def ranges(self, request: Request, first: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """Ranges of a file that follow one another, cover ``[first, first + nbytes)`` and fit into the window."""
        if self.verifies(request):
            yield from self._whole_blocks(request.entry, first - request.entry.begin, nbytes)
        else:
            end, step = first + nbytes, self.window_bytes
            yield from ((low, min(low + step, end)) for low in range(first, end, step))

    def _whole_blocks(
        self, entry: ShardEntry, source: int, nbytes: int, most: int | None = None
    ) -> Iterator[tuple[int, int]]:
        block = entry.block
        step = max((most or self.window_bytes) // block, 1) * block
        first, last = source // block * block, min(-(-(source + nbytes) // block) * block, entry.nbytes)
        for low in range(first, last, step):
            yield entry.begin + low, entry.begin + min(low + step, last)

    def _pieces_of(self, request: Request) -> Iterable[Slice | Rows]:
        if request.run is not None:  # a shortcut: nearly all are one slice
            entry, (source, at, length) = request.entry, request.run
            begin, low, high = entry.begin, source, source + length
            if length != entry.nbytes and self.verifies(request):
                low, high = low // entry.block * entry.block, min(-(-high // entry.block) * entry.block, entry.nbytes)
            is_direct = high - low == length and request.target is not None and not self.high_latency
            if high - low <= (self.tuning.verified_part_bytes if is_direct else self.window_bytes):
                return (Slice(request, begin + low, begin + high, begin + source, begin + source + length, at),)
        elif self._is_of_short_runs(request):
            return (self._rows_or_slice(request),)
        return self._slices(request)

    def _is_of_short_runs(self, request: Request) -> bool:
        if request.target is None:
            return False
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
        """Ranges of a file that cover ``nbytes`` of a box: large ones where they can be read into their place."""
        entry = request.entry
        if not self.verifies(request):
            end, part = entry.begin + source + nbytes, self.tuning.read_part_bytes
            yield from ((low, min(low + part, end)) for low in range(entry.begin + source, end, part))
            return
        stop, block = source + nbytes, entry.block
        first, last = -(-source // block) * block, stop if stop == entry.nbytes else stop // block * block
        if request.target is None or self.high_latency or first >= last:
            yield from self._whole_blocks(entry, source, nbytes)
            return
        if source < first:  # a block of which a part is needed goes through the window
            yield entry.begin + first - block, entry.begin + first
        yield from self._whole_blocks(entry, first, last - first, self.tuning.verified_part_bytes)
        if last < stop:
            yield entry.begin + last, entry.begin + min(last + block, entry.nbytes)

    def _runs(self, request: Request) -> Iterator[tuple[int, int, int]]:
        """(offset in the box, offset in the target, length); of rows that are only verified, the second is 0."""
        if request.run is not None:
            yield request.run
        elif request.target is not None:
            yield from byte_runs(request.overlap, request.local_shape, DTYPE_BYTES[request.entry.dtype])
        else:
            groups = self._groups(request)
            yield from ((source, 0, groups.group_bytes) for source, _ in groups.groups())

    def _groups(self, request: Request) -> RowGroups:
        """Return row groups; without checksums no first pass has brought all to the page cache: gaps cost more then."""
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


_row_groups = lru_cache(maxsize=1024)(RowGroups)  # many tensors are alike


def _fills_its_place(piece: Slice) -> bool:
    return piece.request.target is not None and (piece.start, piece.stop) == (piece.low, piece.high)
