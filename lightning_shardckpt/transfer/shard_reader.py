"""Reads of regions of stored boxes into memory: ranges are planned, read, verified and copied in a few threads.

A request asks for a region of one stored box. Its bytes become segments of the file, which with checksums are whole
blocks. Near segments of a file are one read into a window, from which the regions are copied; a large segment that is
contiguous in the target is read straight into it.

Reads are executed in the order of the files, so that the kernel reads ahead. With two cores per process there are two
threads, so that one can read while the other computes checksums; with high latency there are more. Each thread needs
memory for a window. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, Protocol, TypeAlias

from lightning_shardckpt.distributed.liveness import cores_per_rank
from lightning_shardckpt.errors import CorruptionError
from lightning_shardckpt.format.box import Box, Shape, iterate_indices
from lightning_shardckpt.format.checksum import DIGITS, checksum_blocks, slice_checksums
from lightning_shardckpt.format.index import MAX_BLOCK_BYTES, ShardEntry
from lightning_shardckpt.format.plan import Overlap, byte_runs
from lightning_shardckpt.format.value_checks import DTYPE_BYTES
from lightning_shardckpt.storage.local.posix import errors_with_path
from lightning_shardckpt.storage.protocol import Reader
from lightning_shardckpt.system.memory import allocate_pages
from lightning_shardckpt.system.workers import run_tasks

_GAP_SHARE = 16  # one in this many bytes that are read may lie in a gap between needed ones


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSizes:
    """Sizes in bytes, and numbers of threads, which change no result.

    Attributes:
        window: of one read at most, except of a single larger block.
        direct: the least that is read straight into the target; less goes through the window.
        gap: between two rows without checksums: reading a gap of this size is no slower than another call.
        threads: at most, including the calling one.
        threaded: the least for which a second thread pays off, with low latency.
    """

    window: int
    direct: int
    gap: int = 512
    threads: int = 2
    threaded: int = 32 << 20


LOCAL = ReadSizes(window=1 << 20, direct=64 << 10)  # the window is still in a core's cache when it is hashed
REMOTE = ReadSizes(window=8 << 20, direct=4 << 20, threads=16)  # each read costs a wait and money


_NUMPY_TYPES = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}  # only the size matters; numpy copies these fastest

Strided: TypeAlias = tuple[memoryview, int, Shape]
"""(memory, offset of the first element, pitch of each dim), in bytes."""


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


class Files(Protocol):
    """An opened checkpoint, of any format."""

    path: str
    reader: Reader


def fetch(
    files: Files,
    requests: Iterable[Request],
    *,
    verify: bool,
    sizes: ReadSizes | None = None,
    threads: int | None = None,
) -> None:
    """Read the regions of the requests into their targets, and verify their checksums, in one pass.

    Args:
        files: an opened checkpoint, whose files ``Checkpoint.check_file`` has checked.
        requests: requests in any order.
        verify: read the whole of every block that a request touches, and compare its checksum, if there is one.
        sizes: sizes of reads; by default those for the latency of the files.
        threads: the number of threads, including the calling thread; by default it depends on the work.

    Raises:
        CorruptionError: naming the file, the tensor and the rank that wrote it. Targets may be partly filled.
    """
    ordered, is_remote = _sort(requests), files.reader.high_latency
    sizes = sizes or (REMOTE if is_remote else LOCAL)
    if threads is None:
        nbytes = sum(request.nbytes for request in ordered)
        if is_remote:
            threads = max(min(sizes.threads, max(len(ordered), nbytes // sizes.window)), 1)
        else:
            threads = sizes.threads if nbytes >= sizes.threaded and cores_per_rank() > 1 else 1

    @contextmanager
    def open_worker() -> Iterator[Callable[[Sequence[Segment]], None]]:
        with clone_reader(files.path, files.reader) if threads > 1 else nullcontext(files.reader) as reader:
            yield ShardReader(files.path, reader, verify=verify, sizes=sizes).read

    run_tasks(_plan_reads(ordered, verify, sizes), open_worker, threads=threads, name="shardckpt-reader")


# ── plan ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Segment(NamedTuple):
    """Bytes ``[low, high)`` of a file, of which a request needs some; if it verifies them, whole blocks."""

    request: Request
    low: int
    high: int

    @property
    def is_needed_whole(self) -> bool:
        """Whether all bytes are contiguous in the target."""
        request, low, high = self
        if request.run is None:
            return False
        begin, length = request.entry.begin + request.run[0], request.run[2]
        return begin <= low and high <= begin + length


def _sort(requests: Iterable[Request]) -> list[Request]:
    """Return the requests, sorted by file and offset."""
    by_file: dict[str, list[Request]] = {}
    for request in requests:
        by_file.setdefault(request.entry.file, []).append(request)
    for file_requests in by_file.values():
        file_requests.sort(key=lambda request: request.entry.begin)
    return [request for _, file_requests in sorted(by_file.items()) for request in file_requests]


def _plan_reads(requests: Iterable[Request], verify: bool, sizes: ReadSizes) -> Iterator[list[Segment]]:
    """Yield segments that one read covers, for requests that ``_sort`` returned."""
    window, direct = sizes.window, sizes.direct
    read: list[Segment] = []
    file, low, high, needed = "", 0, 0, 0
    for request in requests:
        for segment in _segments(request, verify, sizes):
            _, first, last = segment
            length = last - first
            if length >= direct and segment.is_needed_whole:
                yield [segment]
                continue
            # several requests for one box may come in any order, or interleave: a step back begins a new read
            is_near = low <= first <= high + needed // _GAP_SHARE and last - low <= window
            if read and not (is_near and request.entry.file == file):
                yield read
                read = []
            if not read:
                file, low, high, needed = request.entry.file, first, first, 0
            read.append(segment)
            high, needed = max(high, last), needed + length
    if read:
        yield read


def _segments(request: Request, verify: bool, sizes: ReadSizes) -> Iterable[Segment]:
    """Return the segments of a request, in order; none is larger than the window, except a single block."""
    entry, run = request.entry, request.run
    block = entry.block if verify and entry.checksums else 1
    if run is not None:  # a fast path: nearly all requests are one segment
        low, high = run[0], run[0] + run[2]
        if block > 1 and run[2] != entry.nbytes:
            low, high = low // block * block, min(-(-high // block) * block, entry.nbytes)
        if high - low <= sizes.window:
            return (Segment(request, entry.begin + low, entry.begin + high),)
    return _cut(request, block, sizes)


def _cut(request: Request, block: int, sizes: ReadSizes) -> Iterator[Segment]:
    begin, step = request.entry.begin, max(sizes.window // block, 1) * block
    for low, high in _join(_ranges(request, sizes), block, request.entry.nbytes):
        for at in range(low, high, step):
            yield Segment(request, begin + at, begin + min(at + step, high))


def _join(ranges: Iterable[tuple[int, int]], block: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield ascending ranges as ranges of whole blocks, none of which is in two of them."""
    low = high = 0
    for start, stop in ranges:
        first, last = start // block * block, min(-(-stop // block) * block, nbytes)
        if first > high:
            if high > low:
                yield low, high
            low = first
        high = last
    yield low, high


def _ranges(request: Request, sizes: ReadSizes) -> Iterator[tuple[int, int]]:
    """Yield ascending ranges of the box that contain the region, with small gaps between its rows."""
    if request.run is not None:
        yield request.run[0], request.run[0] + request.run[2]
        return
    entry, stored, common = request.entry, request.overlap.stored, request.overlap.common
    pitches = pitches_of(stored.shape, DTYPE_BYTES[entry.dtype])
    shape, start = common.shape, common.within(stored).start
    length, dim = DTYPE_BYTES[entry.dtype], len(shape)  # of a range, from its first to its last needed byte
    while dim > 0:
        gap = entry.block if entry.checksums else max(sizes.gap, length // _GAP_SHARE)
        if shape[dim - 1] > 1 and pitches[dim - 1] - length > gap:
            break
        dim -= 1
        length += (shape[dim] - 1) * pitches[dim]
    first = _position(start, pitches)
    for index in iterate_indices(shape[:dim]):
        low = first + _position(index, pitches)
        yield low, low + length


# ── one thread ────────────────────────────────────────────────────────────────────────────────────────────────────


class ShardReader:
    """Reads stored boxes in one thread, through a window of its own.

    Args:
        path: the checkpoint's path, for messages.
        reader: the reader of its files; the caller closes it.
        verify: compare blocks with their checksums, if there are any.
        target_bytes: the size of ``target``, a buffer for callers; at least one block.
        sizes: sizes of reads; by default those for the latency of the files.
    """

    def __init__(
        self, path: str, reader: Reader, *, verify: bool = True, target_bytes: int = 0, sizes: ReadSizes | None = None
    ) -> None:
        self.path, self.reader = path, reader
        self._verify, self._sizes = verify, sizes or (REMOTE if reader.high_latency else LOCAL)
        self._window = memoryview(allocate_pages(max(self._sizes.window, MAX_BLOCK_BYTES)))  # unused pages cost nothing
        self.target = memoryview(allocate_pages(max(target_bytes, MAX_BLOCK_BYTES)))

    def fetch(self, requests: Iterable[Request]) -> None:
        """Fill the targets of the requests, and verify checksums.

        Raises:
            CorruptionError: naming file, tensor and rank. Targets may be partly filled.
        """
        for segments in _plan_reads(_sort(requests), self._verify, self._sizes):
            self.read(segments)

    def read(self, segments: Sequence[Segment]) -> None:
        """Read, verify and copy segments of one file that one read covers; raises like ``fetch``."""
        request, low, high = segments[0]
        file = request.entry.file
        if len(segments) == 1 and high - low >= self._sizes.direct and segments[0].is_needed_whole:
            assert request.run is not None
            at = request.run[1] - request.entry.begin - request.run[0]
            data = request.target[at + low : at + high]
            _read_verbatim(self, file, low, data)
            self._check(request, data, low)
            return
        data = self._window[: max(segment.high for segment in segments) - low]
        _read_verbatim(self, file, low, data)
        for request, first, last in segments:
            part = data[first - low : last - low]
            self._check(request, part, first)
            _place(request, part, first - request.entry.begin)

    def _check(self, request: Request, data: memoryview, low: int) -> None:
        entry = request.entry
        if self._verify and entry.checksums:
            _check_blocks(self.path, request, data, low - entry.begin)


@contextmanager
def clone_reader(path: str, reader: Reader) -> Iterator[Reader]:
    """Yield a clone of a reader of the checkpoint at ``path``, for another thread, and close it at the end."""
    with errors_with_path(path):
        clone = reader.clone()
    try:
        yield clone
    finally:
        clone.close()


# ── copies ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _place(request: Request, data: memoryview, offset: int) -> None:
    """Copy what a request needs of ``data``, the bytes of its box from ``offset`` on, into the target."""
    target, run = request.target, request.run
    if run is not None:
        source, at, length = run
        start, stop = max(source, offset), min(source + length, offset + len(data))
        target[at + start - source : at + stop - source] = data[start - offset : stop - offset]
        return
    overlap, size = request.overlap, DTYPE_BYTES[request.entry.dtype]
    # in bytes, since the data may begin and end within an element
    shape, local_shape = _in_bytes(overlap.stored.shape, size), _in_bytes(request.local_shape, size)
    region, local = _box_in_bytes(overlap.common.within(overlap.stored), size), _box_in_bytes(overlap.local, size)
    pitches, local_pitches = pitches_of(shape, 1), pitches_of(local_shape, 1)
    for box in _row_major_boxes(shape, offset, offset + len(data)):
        if (part := box.intersect(region)) is not None:
            begin = _position(part.start, pitches) - offset
            at = _position(part.within(region).shift(local.start).start, local_pitches)
            unit = size if part.start[-1] % size == part.stop[-1] % size == 0 else 1
            lengths = (*part.shape[:-1], part.shape[-1] // unit)
            strides, local_strides = (*pitches[:-1], unit), (*local_pitches[:-1], unit)
            copy_strided(lengths, unit, (data, begin, strides), (target, at, local_strides))


def _position(index: Shape, pitches: Shape) -> int:
    return sum(i * pitch for i, pitch in zip(index, pitches, strict=False))


def _in_bytes(shape: Shape, size: int) -> Shape:
    return (*shape[:-1], shape[-1] * size) if shape else (size,)


def _box_in_bytes(box: Box, size: int) -> Box:
    return Box((*box.start[:-1], box.start[-1] * size), (*box.stop[:-1], box.stop[-1] * size))


def _row_major_boxes(shape: Shape, low: int, high: int) -> Iterator[Box]:
    """Yield boxes that are the elements ``[low, high)`` of a row-major array: an end of a row, whole rows, a start.

    >>> [(box.start, box.stop) for box in _row_major_boxes((4, 3), 2, 10)]
    [((0, 2), (1, 3)), ((1, 0), (3, 3)), ((3, 0), (4, 1))]
    """
    if len(shape) == 1:
        yield Box((low,), (high,))
        return
    inner, row = shape[1:], prod(shape[1:])
    while low < high:
        index, start = divmod(low, row)
        count = (high - low) // row if not start else 0
        if count:
            yield Box((index, *(0 for _ in inner)), (index + count, *inner))
            low += count * row
        else:
            stop = min(high, (index + 1) * row)
            for box in _row_major_boxes(inner, start, stop - index * row):
                yield Box((index, *box.start), (index + 1, *box.stop))
            low = stop


def pitches_of(shape: Shape, size: int) -> Shape:
    """Return the distance in bytes of adjacent elements along each dim of a row-major array of ``size``-byte elements.

    >>> pitches_of((2, 3), 4), pitches_of((), 4)
    ((12, 4), ())
    """
    pitches = [size]
    for n in shape[:0:-1]:
        pitches.append(pitches[-1] * n)
    return tuple(pitches[::-1]) if shape else ()


def copy_strided(shape: Shape, size: int, source: Strided, target: Strided) -> None:
    """Copy an array of ``shape``, whose elements have ``size`` bytes. The GIL is released meanwhile."""
    import numpy  # imported here, since only non-contiguous copies need it

    dtype = _NUMPY_TYPES[size]
    numpy.ndarray(shape, dtype, *target)[...] = numpy.ndarray(shape, dtype, *source)


# ── checksums ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _read_verbatim(files: Files, file: str, offset: int, target: memoryview) -> None:
    """Fill ``target`` with a file's bytes from ``offset`` on, without verification."""
    try:
        files.reader.read_into(file, offset, target)
    except (EOFError, FileNotFoundError) as error:
        raise CorruptionError(f"checkpoint {files.path!r}, file {file}: {error}") from None


def _check_blocks(path: str, request: Request, data: memoryview, offset: int) -> None:
    """Compare whole blocks of a box, from ``offset`` on, with its checksums."""
    entry = request.entry
    for first, last in find_corruption(entry, data, offset):
        raise CorruptionError(
            f"checkpoint {path!r}: corrupted data of {request.key!r} in {entry.file}, written by rank "
            f"{request.overlap.writer}, bytes {first} to {last}. Load another checkpoint, or restore the file; verify "
            "lists all damage"
        )


def find_corruption(entry: ShardEntry, data: memoryview, offset: int) -> list[tuple[int, int]]:
    """Return the ranges of the file that don't match their checksums, one for each block.

    Args:
        entry: of the box.
        data: whole blocks of it.
        offset: of the first one in the box.
    """
    block, actual = entry.block, checksum_blocks(data, entry.block)
    expected = slice_checksums(entry.checksums, offset // block, len(actual) // DIGITS)
    if actual == expected:
        return []
    begin, blocks = entry.begin + offset, range(0, len(data), block)
    return [
        (begin + at, begin + min(at + block, len(data)))
        for number, at in enumerate(blocks)
        if slice_checksums(actual, number, 1) != slice_checksums(expected, number, 1)
    ]
