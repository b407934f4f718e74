"""Fill files with stored tensors in several threads; all offsets are known before a byte is read.

A region is the place of a tensor in a file. One thread reads a region from start to end in windows, verifies, converts
and writes it, while other threads process the next regions; small regions that follow one another are read and written
together, with what lies between them in the file.
No torch.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from lightning_shardckpt.format.box import Box
from lightning_shardckpt.format.index import TensorSpec
from lightning_shardckpt.storage.local.posix import begin_writeback, write_at
from lightning_shardckpt.system.tuning import TUNING, Tuning
from lightning_shardckpt.system.workers import run_tasks
from lightning_shardckpt.transfer.shard_reader import Request, ShardReader, clone_reader
from lightning_shardckpt.transfer.whole_tensors import StoredBox, StoredTensors, read_windows

_ALIGNMENT = 64  # small tensors are aligned in memory as in the file


@dataclass(frozen=True, slots=True)
class DtypeConversion:
    """Conversion of elements of ``stored`` bytes to elements of ``written`` bytes. Any thread may call ``convert``."""

    convert: Callable[[memoryview], memoryview]
    stored: int
    written: int


@dataclass(frozen=True, slots=True)
class Region:
    """``nbytes`` bytes of a file from ``begin`` on. ``content``: the bytes, or (component, key) of a stored tensor.

    ``box`` is a part of the tensor; ``file`` is the number of the file.
    """

    begin: int
    nbytes: int
    content: memoryview | tuple[str, str]
    file: int = 0
    conversion: DtypeConversion | None = None
    box: Box | None = None

    @property
    def end(self) -> int:
        """The offset where the bytes end."""
        return self.begin + self.nbytes


class _Stored(NamedTuple):
    region: Region
    spec: TensorSpec
    boxes: list[StoredBox]


class _Piece(NamedTuple):
    file: int
    offset: int
    data: memoryview
    counted: int
    """Bytes that are reported."""


def fill(
    file: int | Sequence[int],
    regions: Sequence[Region],
    tensors: StoredTensors,
    advance: Callable[[int], Any],
    *,
    tuning: Tuning = TUNING,
) -> None:
    """Write the regions, which ascend in each file. Nothing is synced.

    Args:
        file: the descriptor of a file, or of several, to which the regions refer by number.
        regions: the regions.
        tensors: the source of the tensors' bytes; not used by other threads meanwhile.
        advance: called with the number of bytes of regions that were written, by one thread at a time.
        tuning: buffer sizes and the number of threads.

    Raises:
        CorruptionError: naming file, tensor and rank. The first error of any thread is raised after all have ended.
    """
    files = tuple(file) if isinstance(file, Sequence) else (file,)
    # a block that two windows share is read for both: of an object store, where that costs, larger windows read less
    window_bytes = tuning.fill_window_bytes * (4 if tensors.reader.high_latency else 1)
    written_bytes = [0] * len(files)
    # the kernel lets one thread at a time write to a file; others would spin
    writing, stopped = threading.Lock(), threading.Event()

    def write(piece: _Piece) -> None:
        with writing:
            write_at(files[piece.file], piece.data, piece.offset)
            written_bytes[piece.file] += len(piece.data)
            if written_bytes[piece.file] >= tuning.writeback_bytes:
                begin_writeback(files[piece.file])
                written_bytes[piece.file] = 0
            advance(piece.counted)

    @contextmanager
    def open_worker() -> Iterator[Callable[[list[_Stored] | Region], None]]:
        with clone_reader(tensors.path, tensors.reader) as reader:
            source = ShardReader(tensors.path, reader, target_bytes=window_bytes)

            def fill_regions(task: list[_Stored] | Region) -> None:
                for piece in _pieces(source, task, files, window_bytes):
                    if stopped.is_set():  # another thread failed
                        return
                    write(piece)

            yield fill_regions

    nbytes = sum(region.nbytes for region in regions)
    # at most one per window; two even on one core, since one may wait for the disk
    threads = min(max(len(os.sched_getaffinity(0)), 2), tuning.fill_threads, nbytes // window_bytes + 1)
    tasks = _tasks(regions, tensors, window_bytes)
    run_tasks(tasks, open_worker, threads=threads, name="shardckpt-filler", on_failure=stopped.set)


def _tasks(
    regions: Sequence[Region], tensors: StoredTensors, window_bytes: int
) -> Iterator[list[_Stored] | Region]:
    """Yield regions of bytes, one large region of a tensor, or small ones that fit a window. Not thread-safe.

    Small ones are neighbours: between them lies no region that another thread could be writing.
    """
    small, room = list[_Stored](), window_bytes - _ALIGNMENT
    for region in regions:
        is_alone = region.conversion is not None or region.box is not None or region.nbytes > room
        is_alone |= isinstance(region.content, memoryview)
        if small and (is_alone or region.file != small[0].region.file or region.end - small[0].region.begin > room):
            yield small
            small = []
        if isinstance(region.content, memoryview):
            yield region
            continue
        found = _Stored(region, tensors.spec(*region.content), tensors.boxes(*region.content))
        if is_alone:
            yield [found]
        else:
            small.append(found)
    if small:
        yield small


def _pieces(
    source: ShardReader, task: list[_Stored] | Region, files: Sequence[int], window_bytes: int
) -> Iterator[_Piece]:
    """Yield what is to be written; each piece is valid until the next one."""
    if isinstance(task, Region):
        assert isinstance(task.content, memoryview)
        yield _Piece(task.file, task.begin, task.content, task.nbytes)
        return
    (region, spec, boxes), at = task[0], task[0].region.begin
    if len(task) == 1:
        for data in read_windows(source, region.box or Box.whole(spec.shape), boxes, window_bytes):
            written = data if region.conversion is None else region.conversion.convert(data)
            yield _Piece(region.file, at, written, len(written))
            at += len(written)
        return
    counted, aligned = sum(region.nbytes for region, _, _ in task), at % _ALIGNMENT
    data = source.target[aligned : aligned + task[-1].region.end - at]
    if counted < len(data):  # what lies between the tensors is there already
        os.preadv(files[region.file], [data], at)
    requests = list[Request]()
    for region, spec, boxes in task:
        target = data[region.begin - at : region.end - at]
        requests += [stored.request(spec.shape, target) for stored in boxes]
    source.fetch(requests)
    yield _Piece(region.file, at, data, counted)
