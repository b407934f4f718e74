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
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, Protocol, TypeAlias

from lightning_shardckpt.errors import CorruptionError
from lightning_shardckpt.format.index import MAX_BLOCK_BYTES, ShardEntry, TensorSpec
from lightning_shardckpt.format.layout import Box, Part, Shape, iterate_indices
from lightning_shardckpt.format.plan import ByteRuns
from lightning_shardckpt.format.value_checks import DIGITS, DTYPE_BYTES, checksum_blocks, slice_checksums
from lightning_shardckpt.storage.protocol import Reader
from lightning_shardckpt.system.host import allocate_pages
from lightning_shardckpt.system.threads import cores_per_rank, run_tasks

WINDOW_BYTES = 32 << 20  # of memory for tensors that are read window by window
_GAP_SHARE = 16  # one in this many bytes that are read may lie in a gap between needed ones
_NUMPY_TYPES = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}  # only the size matters; numpy copies these fastest


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
    threaded: int = 16 << 20


LOCAL = ReadSizes(window=1 << 20, direct=64 << 10)  # the window is still in a core's cache when it is hashed
REMOTE = ReadSizes(window=8 << 20, direct=4 << 20, threads=16)  # each read costs a wait and money


class Request(NamedTuple):
    """A request to fill a region of ``target`` from the stored box ``entry`` of the tensor ``key``."""

    key: str
    writer: int
    entry: ShardEntry
    runs: ByteRuns
    target: memoryview


class Files(Protocol):
    """An opened checkpoint, of any format."""

    @property
    def path(self) -> str:
        """The path, for messages."""

    @property
    def reader(self) -> Reader:
        """The reader of its files."""


class StoredTensors(Files, Protocol):
    """Stored tensors of any format, as boxes of bytes in files. Not thread-safe."""

    def spec(self, component: str, key: str) -> TensorSpec:
        """Return the spec of a tensor."""

    def requests(
        self, component: str, key: str, parts: tuple[Part, ...], shape: Shape, memory: memoryview
    ) -> list[Request]:
        """Return the requests that fill ``memory``, an array of ``shape`` with the regions ``parts``, from a tensor.

        Raises:
            ShardCkptError: naming file and tensor, if the files cannot contain the boxes.
        """


def fetch(
    files: Files,
    requests: Iterable[Request],
    *,
    verify: bool,
    sizes: ReadSizes | None = None,
) -> None:
    """Read the regions of the requests into their targets, and verify their checksums, in one pass.

    Args:
        files: an opened checkpoint, whose files ``Checkpoint.check_file`` has checked.
        requests: requests in any order.
        verify: read the whole of every block that a request touches, and compare its checksum, if there is one.
        sizes: sizes of reads; by default those for the latency of the files.

    Raises:
        CorruptionError: naming the file, the tensor and the rank that wrote it. Targets may be partly filled.
    """
    ordered = sorted(requests, key=lambda request: (request.entry.file, request.entry.begin + request.runs.source))
    is_remote = files.reader.high_latency
    sizes = sizes or (REMOTE if is_remote else LOCAL)
    nbytes = sum(request.runs.nbytes for request in ordered)
    if is_remote:
        threads = max(min(sizes.threads, max(len(ordered), nbytes // sizes.window)), 1)
    else:
        threads = sizes.threads if nbytes >= sizes.threaded and cores_per_rank() > 1 else 1

    def new_worker() -> Callable[[Sequence[Segment]], None]:
        window = memoryview(allocate_pages(max(sizes.window, MAX_BLOCK_BYTES)))  # unused pages cost nothing
        return lambda segments: _read(files, segments, window, sizes.direct, verify)

    run_tasks(_plan_reads(ordered, verify, sizes), new_worker, threads=threads, name="shardckpt-reader")


# ── plan ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Segment(NamedTuple):
    """Bytes ``[low, high)`` of a file, of which a request needs some; if it verifies them, whole blocks."""

    request: Request
    low: int
    high: int

    @property
    def is_needed_whole(self) -> bool:
        """Whether all bytes are contiguous in the target."""
        runs, begin = self.request.runs, self.request.entry.begin + self.request.runs.source
        return not runs.dims and begin <= self.low and self.high <= begin + runs.length


def _plan_reads(requests: Iterable[Request], verify: bool, sizes: ReadSizes) -> Iterator[list[Segment]]:
    """Yield segments that one read covers, for requests that are sorted by file and offset."""
    read: list[Segment] = []
    file, low, high, needed = "", 0, 0, 0
    for request in requests:
        entry = request.entry
        for segment in _segments(request, verify, sizes):
            _, first, last = segment
            length = last - first
            if length >= sizes.direct and segment.is_needed_whole:
                yield [segment]
                continue
            # requests for one box may interleave: a step back begins a new read
            is_near = low <= first <= high + needed // _GAP_SHARE and last - low <= sizes.window
            if read and not (is_near and entry.file == file):
                yield read
                read = []
            if not read:
                file, low, high, needed = entry.file, first, first, 0
            read.append(segment)
            high, needed = max(high, last), needed + length
    if read:
        yield read


def _segments(request: Request, verify: bool, sizes: ReadSizes) -> Iterator[Segment]:
    """Yield the segments of a request, in order; none is larger than the window, except a single block."""
    entry = request.entry
    block = entry.block if verify and entry.checksums else 1
    step = max(sizes.window // block, 1) * block
    for start, stop in _ranges(request, sizes.gap):
        low, high = start // block * block, min(-(-stop // block) * block, entry.nbytes)
        for at in range(low, high, step):
            yield Segment(request, entry.begin + at, entry.begin + min(at + step, high))


def _ranges(request: Request, gap: int) -> Iterator[tuple[int, int]]:
    """Yield ascending ranges of the box that contain the region.

    Gaps between its runs lie within a range if they are small: at most a block, so that no block is in two ranges.
    """
    source, _, length, dims = request.runs
    outer = list(dims)
    while outer:
        count, pitch, _ = outer[-1]
        if pitch - length > (request.entry.block if request.entry.checksums else max(gap, length // _GAP_SHARE)):
            break
        outer.pop()
        length += (count - 1) * pitch
    for index in iterate_indices(tuple(count for count, _, _ in outer)):
        low = source + sum(i * pitch for i, (_, pitch, _) in zip(index, outer, strict=True))
        yield low, low + length


# ── reads ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _read(files: Files, segments: Sequence[Segment], window: memoryview, direct: int, verify: bool) -> None:
    """Read, verify and copy segments of one file that one read covers; raises like ``fetch``."""
    request, low, _ = segments[0]
    is_direct = len(segments) == 1 and segments[0].high - low >= direct and segments[0].is_needed_whole
    high = max(segment.high for segment in segments)
    at = request.runs.at + low - request.entry.begin - request.runs.source
    data = request.target[at : at + high - low] if is_direct else window[: high - low]
    try:
        files.reader.read_into(request.entry.file, low, data)
    except (EOFError, FileNotFoundError) as error:
        raise CorruptionError(f"checkpoint {files.path!r}, file {request.entry.file}: {error}") from None
    for request, first, last in segments:
        part, offset, entry = data[first - low : last - low], first - request.entry.begin, request.entry
        bad = find_corruption(entry, part, offset) if verify and entry.checksums else ()
        for begin, end in bad:
            raise CorruptionError(
                f"checkpoint {files.path!r}: corrupted data of {request.key!r} in {entry.file}, written by "
                f"rank {request.writer}, bytes {begin} to {end}. Load another checkpoint, or restore the file; "
                "verify lists all damage"
            )
        if not is_direct:
            _copy(request.runs, DTYPE_BYTES[entry.dtype], part, offset, request.target)


def _copy(runs: ByteRuns, size: int, data: memoryview, offset: int, target: memoryview) -> None:
    """Copy what ``data``, the bytes of a box from ``offset`` on, has of a region of ``size``-byte elements."""
    source, at, length, dims = runs
    end = offset + len(data)
    if not dims:
        start, stop = max(source, offset), min(source + length, end)
        if start < stop:
            target[at + start - source : at + stop - source] = data[start - offset : stop - offset]
        return
    (count, pitch, step), *inner = dims
    extent = length + sum((n - 1) * inner_pitch for n, inner_pitch, _ in inner)  # of a row, to its last needed byte
    first = max(-((source - offset) // pitch), 0)  # rows from here to ``stop`` are whole
    stop = min((end - source - extent) // pitch + 1, count)
    if first < stop:
        shape = (stop - first, *(n for n, _, _ in inner), length // size)
        pitches, steps = [d[1] for d in dims], [d[2] for d in dims]
        source_array = data, source + first * pitch - offset, (*pitches, size)
        _copy_strided(shape, size, source_array, (target, at + first * step, (*steps, size)))
    last = min(-((source - end) // pitch), count)  # rows from here on begin after the data
    for row in (*range(max(first - 1, 0), min(first, last)), *range(max(first, stop), last)):
        if source + row * pitch + extent > offset:
            _copy(ByteRuns(source + row * pitch, at + row * step, length, tuple(inner)), size, data, offset, target)


_Strided: TypeAlias = tuple[memoryview, int, Shape]
"""(memory, offset of the first element, bytes from one index to the next along each dim)."""


def _copy_strided(shape: Shape, size: int, source: _Strided, target: _Strided) -> None:
    """Copy an array of ``shape``, whose elements have ``size`` bytes. The GIL is released meanwhile."""
    import numpy  # imported here, since only non-contiguous copies need it

    dtype = _NUMPY_TYPES[size]
    numpy.ndarray(shape, dtype, *target)[...] = numpy.ndarray(shape, dtype, *source)


def find_corruption(entry: ShardEntry, data: memoryview, offset: int) -> list[tuple[int, int]]:
    """Return the ranges of the file that don't match their checksums, one for each block.

    Args:
        entry: of the box.
        data: whole blocks of it.
        offset: of the first one in the box.
    """
    block, actual, expected = entry.block, checksum_blocks(data, entry.block), entry.checksums
    if len(actual) < len(expected):
        expected = slice_checksums(expected, offset // block, len(actual) // DIGITS)
    if actual == expected:
        return []
    begin, blocks = entry.begin + offset, range(0, len(data), block)
    return [
        (begin + at, begin + min(at + block, len(data)))
        for number, at in enumerate(blocks)
        if slice_checksums(actual, number, 1) != slice_checksums(expected, number, 1)
    ]


# ── windows ───────────────────────────────────────────────────────────────────────────────────────────────────────


def windows(shape: Shape, limit: int) -> Iterator[Box]:
    """Yield boxes of at most ``limit`` elements that are consecutive in row-major memory and cover ``shape``.

    >>> [(w.start, w.stop) for w in windows((3, 2), 4)]
    [((0, 0), (2, 2)), ((2, 0), (3, 2))]
    """
    if not shape:
        yield Box((), ())
    if not shape or 0 in shape:
        return
    dim = next((d for d in range(len(shape)) if prod(shape[d + 1 :]) <= limit), len(shape) - 1)
    step, inner = max(limit // prod(shape[dim + 1 :]), 1), shape[dim + 1 :]
    for index in iterate_indices(shape[:dim]):
        stop = tuple(i + 1 for i in index)
        for low in range(0, shape[dim], step):
            yield Box((*index, low, *(0 for _ in inner)), (*stop, min(low + step, shape[dim]), *inner))


def read_windows(
    tensors: StoredTensors, wanted: Iterable[tuple[str, str, Box | None]], nbytes: int = WINDOW_BYTES
) -> Iterator[tuple[int, memoryview]]:
    """Yield the bytes of tensors or of parts of them, window by window; every byte is verified if it has a checksum.

    Windows that fit into memory together are read together. Each window reads the whole of the blocks that it touches,
    so a block that two windows share is read for both: windows should be much larger than blocks.

    Args:
        tensors: the tensors.
        wanted: component and key of each tensor, and the part of it, None for all of it.
        nbytes: the size of the memory.

    Yields:
        The number of the tensor in ``wanted``, and its next bytes, which are valid until the next step.

    Raises:
        CorruptionError: naming file, tensor and rank.
    """
    memory, used = memoryview(allocate_pages(nbytes)), 0
    batch, requests = list[tuple[int, memoryview]](), list[Request]()
    for number, (component, key, part) in enumerate(wanted):
        spec = tensors.spec(component, key)
        size, region = DTYPE_BYTES[spec.dtype], part or Box.whole(spec.shape)
        for window in windows(region.shape, nbytes // size):
            length = window.numel * size
            if used + length > nbytes:
                fetch(tensors, requests, verify=True)
                yield from batch
                batch, requests, used = [], [], 0
            target = memory[used : used + length]
            parts = (Part(window.shift(region.start), (0,) * len(spec.shape)),)
            requests += tensors.requests(component, key, parts, window.shape, target)
            batch.append((number, target))
            used += length
    fetch(tensors, requests, verify=True)
    yield from batch
