"""Open checkpoints, and read regions of stored boxes into memory. No torch.

``Checkpoint`` reads and verifies indexes, documents and headers of shard files. A request asks for a region of one
stored box. Its bytes become segments of the file, which with checksums are whole blocks. Near segments of a file are
one read into a window, from which the regions are copied; a large segment that is contiguous in the target is read
straight into it.

Reads are executed in the order of the files, so that the kernel reads ahead. With two cores per process there are two
threads, so that one can read while the other computes checksums; with high latency there are more. Each thread needs
memory for a window.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import NamedTuple

from lightning_shardckpt.errors import CheckpointNotFoundError, CorruptionError, FormatError
from lightning_shardckpt.format.index import (
    MAX_BLOCK_BYTES,
    ROOT_NAME,
    FileInfo,
    RankIndex,
    ShardEntry,
    rank_index_from_json,
    root_from_json,
)
from lightning_shardckpt.format.layout import Box, Shape, iterate_indices
from lightning_shardckpt.format.plan import ByteRuns, Overlap, check_cover, check_plausible, choose_replicas
from lightning_shardckpt.format.safetensors_header import read_header
from lightning_shardckpt.format.value_checks import DIGITS, DTYPE_BYTES, checksum, checksum_blocks, slice_checksums
from lightning_shardckpt.storage.protocol import Reader, Storage, read_all
from lightning_shardckpt.system.host import allocate_pages, cores_per_rank, run_tasks

_GAP_SHARE = 16  # one in this many bytes that are read may lie in a gap between needed ones
_NUMPY_TYPES = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}  # only the size matters; numpy copies these fastest


class Checkpoint:
    """A checkpoint opened for reading: its root index, and the rank indexes read so far. Not thread-safe.

    Raises:
        CheckpointNotFoundError: if there is no complete checkpoint.
        CorruptionError, FormatError: if the root index is damaged or not valid.
    """

    def __init__(self, storage: Storage, path: str) -> None:
        self.path, self.reader = path, storage.open(path)
        self._indexes: dict[tuple[str, int], RankIndex] = {}
        self._replicas: dict[str, dict[str, int | None]] = {}
        self._checked: set[tuple[str, int, str]] = set()
        try:
            self.root = root_from_json(self._read(ROOT_NAME), self._where(ROOT_NAME))
            for name, component in self.root.components.items():
                check_plausible(component, f"{self._where(ROOT_NAME)}, {name}")
        except BaseException:
            self.reader.close()
            raise

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.reader.close()

    def replicas(self, component: str) -> dict[str, int | None]:
        """Return the number of the replica that wrote each tensor of a component; see ``choose_replicas``.

        Raises:
            FormatError: if the boxes of a tensor leave a gap.
        """
        if component not in self._replicas:
            tensors = self.root.components[component].tensors
            check_cover(f"{self._where(ROOT_NAME)}, {component}", tensors)
            self._replicas[component] = choose_replicas(tensors)
        return self._replicas[component]

    def document(self, name: str) -> bytes:
        """Return the verified content of a JSON document."""
        return self._read_verified(self.root.documents[name])

    def index(self, component: str, rank: int) -> RankIndex:
        """Return the index of a component that ``rank`` wrote, verified against the root index.

        Raises:
            CorruptionError: if the file is missing or damaged, or of another save.
            FormatError: if it is invalid, or the index of another rank or component.
        """
        if (known := self._indexes.get((component, rank))) is not None:
            return known
        info = self.root.components[component].indexes.get(rank)
        if info is None:
            wanted = f"rank {rank} should have written some of {component!r}, but has no index"
            raise FormatError(f"{self._where(ROOT_NAME)}: {wanted}")
        where = self._where(info.name)
        index = rank_index_from_json(self._read_verified(info), where)
        if index.save_id != self.root.save_id:
            raise CorruptionError(
                f"{where}: belongs to save {index.save_id}, this checkpoint is save {self.root.save_id}"
            )
        if (index.component, index.rank) != (component, rank):
            raise FormatError(f"{where}: this is the index of rank {index.rank} for {index.component!r}")
        self._indexes[component, rank] = index
        return index

    def entry(self, component: str, key: str, overlap: Overlap) -> ShardEntry:
        """Return the stored box that a plan refers to.

        Raises:
            FormatError: if the rank's index lacks it, or describes it differently from the root index.
        """
        spec, stored = self.root.components[component].tensors[key], overlap.stored
        for entry in self.index(component, overlap.writer).shards.get(key, ()):
            same = entry.box is stored or entry.box == stored
            if same and entry.dtype == spec.dtype and entry.global_shape == spec.shape:
                return entry
        raise FormatError(
            f"{self._where(ROOT_NAME)}: the index of rank {overlap.writer} has no box {stored.start}..{stored.stop} of "
            f"{key!r}, {spec.dtype} {spec.shape}"
        )

    def check_file(self, component: str, rank: int, name: str) -> None:
        """Check the size of a shard file, and the checksum of its header; repeated calls for a file do nothing.

        Raises:
            CorruptionError: if the file is missing or damaged, or of another save.
        """
        if (component, rank, name) in self._checked:
            return
        info = self.index(component, rank).files[name]
        self._check_size(info)
        with self._errors_named(name):
            start = read_header(partial(self.reader.read_into, name), info.nbytes)
        if checksum(start) != info.checksum:
            raise CorruptionError(f"{self._where(name)}: the header of the shard file is damaged, or of another save")
        self._checked.add((component, rank, name))

    def _read_verified(self, info: FileInfo) -> bytes:
        self._check_size(info)
        content = self._read(info.name)
        if checksum(content) != info.checksum:
            sums = f"checksum {checksum(content)}, expected {info.checksum}"
            raise CorruptionError(f"{self._where(info.name)}: damaged, or of another save: {sums}")
        return content

    def _check_size(self, info: FileInfo) -> None:
        with self._errors_named(info.name):
            size = self.reader.size(info.name)
        if size != info.nbytes:
            raise CorruptionError(f"{self._where(info.name)}: {size} bytes, expected {info.nbytes}")

    def _read(self, name: str) -> bytes:
        with self._errors_named(name):
            return read_all(self.reader, name)

    @contextmanager
    def _errors_named(self, name: str) -> Iterator[None]:
        """Raise the errors of a reader as errors of this package that name the checkpoint and the file."""
        try:
            yield
        except FileNotFoundError:
            if name == ROOT_NAME:
                raise CheckpointNotFoundError(f"{self.path!r} is not a complete checkpoint: it has no {name}") from None
            note = f"; if another machine has just written it, {os.uname().nodename!r} may not see it yet"
            hint = "" if self.reader.high_latency else note
            raise CorruptionError(f"{self._where(name)}: the file is missing{hint}") from None
        except EOFError as error:
            raise CorruptionError(f"{self._where(name)}: {error}") from None
        except ValueError as error:  # too large, or not a regular file
            raise FormatError(f"{self._where(name)}: {error}") from None

    def _where(self, name: str) -> str:
        return f"checkpoint {self.path!r}, file {name}"


# ── requests ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSizes:
    """Sizes in bytes, and numbers of threads, which change no result."""

    window: int  # of one read at most, except of a single larger block
    direct: int  # the least that is read straight into the target; less goes through the window
    gap: int = 512  # between two rows without checksums: reading it is no slower than another call
    threads: int = 2  # at most, including the calling one
    threaded: int = 16 << 20  # the least for which a second thread pays off, with low latency


LOCAL = ReadSizes(window=1 << 20, direct=64 << 10)  # the window is still in a core's cache when it is hashed
REMOTE = ReadSizes(window=8 << 20, direct=4 << 20, threads=16)  # each read costs a wait and money


class Request(NamedTuple):
    """A request to fill a region of ``target`` from the stored box ``entry`` of the tensor ``key``."""

    key: str
    writer: int
    entry: ShardEntry
    runs: ByteRuns
    target: memoryview


def fetch(
    path: str, reader: Reader, requests: Iterable[Request], *, verify: bool, sizes: ReadSizes | None = None
) -> None:
    """Read the regions of the requests into their targets, and verify their checksums, in one pass.

    Args:
        path: of the checkpoint, for messages.
        reader: of its files, which ``Checkpoint.check_file`` has checked.
        requests: in any order.
        verify: read the whole of every block that a request touches, and compare its checksum, if there is one.
        sizes: sizes of reads; by default those for the latency of the files.

    Raises:
        CorruptionError: naming the file, the tensor and the rank that wrote it. Targets may be partly filled.
    """
    ordered = sorted(requests, key=lambda request: (request.entry.file, request.entry.begin + request.runs.source))
    sizes = sizes or (REMOTE if reader.high_latency else LOCAL)
    nbytes = sum([request.runs.nbytes for request in ordered])
    if reader.high_latency:
        threads = max(min(sizes.threads, max(len(ordered), nbytes // sizes.window)), 1)
    else:
        threads = sizes.threads if nbytes >= sizes.threaded and cores_per_rank() > 1 else 1

    def new_worker() -> Callable[[Sequence[Segment]], None]:
        window = memoryview(allocate_pages(max(sizes.window, MAX_BLOCK_BYTES)))  # unused pages cost nothing
        return lambda segments: _read(path, reader, segments, window, sizes.direct, verify)

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
    """Yield ascending segments that contain the region of a request, of at most a window or a single block.

    Gaps between its runs lie within a segment if they are small: at most a block, so that no block is in two segments.
    """
    entry, (start, _, length, dims) = request.entry, request.runs
    block = entry.block if verify and entry.checksums else 1
    step, outer = max(sizes.window // block, 1) * block, list(dims)
    while outer:
        count, pitch, _ = outer[-1]
        if pitch - length > (entry.block if entry.checksums else max(sizes.gap, length // _GAP_SHARE)):
            break
        outer.pop()
        length += (count - 1) * pitch
    for index in iterate_indices(tuple(count for count, _, _ in outer)) if outer else ((),):  # most have one run
        first = start + sum(i * pitch for i, (_, pitch, _) in zip(index, outer, strict=True)) if index else start
        low, high = first // block * block, min(-(-(first + length) // block) * block, entry.nbytes)
        for at in range(low, high, step):
            yield Segment(request, entry.begin + at, entry.begin + min(at + step, high))


# ── reads ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _read(
    path: str, reader: Reader, segments: Sequence[Segment], window: memoryview, direct: int, verify: bool
) -> None:
    """Read, verify and copy segments of one file that one read covers; raises like ``fetch``."""
    request, low, _ = segments[0]
    is_direct = len(segments) == 1 and segments[0].high - low >= direct and segments[0].is_needed_whole
    high = max(segment.high for segment in segments)
    at = request.runs.at + low - request.entry.begin - request.runs.source
    data = request.target[at : at + high - low] if is_direct else window[: high - low]
    try:
        reader.read_into(request.entry.file, low, data)
    except (EOFError, FileNotFoundError) as error:
        raise CorruptionError(f"checkpoint {path!r}, file {request.entry.file}: {error}") from None
    for request, first, last in segments:
        part, offset, entry = data[first - low : last - low], first - request.entry.begin, request.entry
        for begin, end in find_corruption(entry, part, offset) if verify and entry.checksums else ():
            raise CorruptionError(
                f"checkpoint {path!r}: corrupted data of {request.key!r} in {entry.file}, written by "
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
        import numpy  # imported here, since only non-contiguous copies need it

        shape, dtype = (stop - first, *(n for n, _, _ in inner), length // size), _NUMPY_TYPES[size]
        pitches, steps = [d[1] for d in dims], [d[2] for d in dims]
        rows = numpy.ndarray(shape, dtype, data, source + first * pitch - offset, (*pitches, size))
        numpy.ndarray(shape, dtype, target, at + first * step, (*steps, size))[...] = rows  # releases the GIL
    last = min(-((source - end) // pitch), count)  # rows from here on begin after the data
    for row in (*range(max(first - 1, 0), min(first, last)), *range(max(first, stop), last)):
        if source + row * pitch + extent > offset:
            _copy(ByteRuns(source + row * pitch, at + row * step, length, tuple(inner)), size, data, offset, target)


def find_corruption(entry: ShardEntry, data: memoryview, offset: int) -> list[tuple[int, int]]:
    """Return the ranges of the file that don't match their checksums, one for each block.

    ``data`` are whole blocks of the box ``entry``, from its byte ``offset`` on.
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
