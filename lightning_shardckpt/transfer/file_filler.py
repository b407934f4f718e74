"""Fill a file with stored tensors in several threads; all offsets are known before a byte is read.

A large tensor is read, verified, converted and written window by window; small ones that follow one another in a file
are read and written together, with what lies between them in the file. No torch.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from lightning_shardckpt.format.layout import Box, Part, Shape
from lightning_shardckpt.storage.posix import begin_writeback, write_at
from lightning_shardckpt.system.memory import allocate_pages
from lightning_shardckpt.system.threads import run_tasks
from lightning_shardckpt.system.tuning import TUNING, Tuning
from lightning_shardckpt.transfer.shard_reader import Request, ShardReader, StoredTensors, plan_windows


@dataclass(frozen=True, slots=True)
class DtypeConversion:
    """Conversion of elements of ``stored`` bytes to elements of ``written`` bytes. Any thread may call ``convert``."""

    convert: Callable[[memoryview], memoryview]
    stored: int
    written: int


@dataclass(frozen=True, slots=True)
class Region:
    """``nbytes`` bytes of a file from ``begin`` on. ``content``: the bytes, or (component, key) of a stored tensor.

    ``box`` is a part of the tensor.
    """

    begin: int
    nbytes: int
    content: memoryview | tuple[str, str]
    conversion: DtypeConversion | None = None
    box: Box | None = None

    @property
    def end(self) -> int:
        """The offset where the bytes end."""
        return self.begin + self.nbytes


class _Window(NamedTuple):
    """Bytes of a file from ``begin`` on: ``data``, or ``nbytes`` of memory that ``requests`` fill, converted.

    ``counted`` bytes of regions are reported. The others, between small regions, are in the file already.
    """

    begin: int
    counted: int
    nbytes: int = 0
    requests: Sequence[Request] = ()
    conversion: DtypeConversion | None = None
    data: memoryview = memoryview(b"")


def fill(
    file: int,
    regions: Sequence[Region],
    tensors: StoredTensors,
    advance: Callable[[int], Any],
    *,
    tuning: Tuning = TUNING,
) -> None:
    """Write the regions, which ascend in the file. Nothing is synced.

    Args:
        file: the descriptor of the file.
        regions: the regions.
        tensors: the source of the tensors' bytes; not used by other threads meanwhile.
        advance: called with the number of bytes of regions that were written, by one thread at a time.
        tuning: buffer sizes and the number of threads.

    Raises:
        CorruptionError: naming file, tensor and rank. The first error of any thread is raised after all have ended.
    """
    # a block that two windows share is read for both: of an object store, where that costs, larger windows read less
    window_bytes = tuning.fill_window_bytes * (4 if tensors.reader.high_latency else 1)
    written_bytes = 0
    writing = threading.Lock()  # the kernel lets one thread at a time write to a file; others would spin

    @contextmanager
    def open_worker() -> Iterator[Callable[[_Window], None]]:
        memory = memoryview(allocate_pages(window_bytes))
        source = ShardReader(tensors.path, tensors.reader)

        def fill_window(window: _Window) -> None:
            nonlocal written_bytes
            data = _content(source, window, file, memory)
            with writing:
                write_at(file, data, window.begin)
                written_bytes += len(data)
                if written_bytes >= tuning.writeback_bytes:
                    begin_writeback(file)
                    written_bytes = 0
                advance(window.counted)

        yield fill_window

    nbytes = sum(region.nbytes for region in regions)
    # at most one per window; two even on one core, since one may wait for the disk
    threads = min(max(len(os.sched_getaffinity(0)), 2), tuning.fill_threads, nbytes // window_bytes + 1)
    run_tasks(_windows(regions, tensors, window_bytes), open_worker, threads=threads, name="shardckpt-filler")


def _windows(regions: Sequence[Region], tensors: StoredTensors, window_bytes: int) -> Iterator[_Window]:
    """Yield windows of large regions, and small regions that fit into one window together. Not thread-safe."""
    small = list[Region]()
    for region in regions:
        is_whole = region.conversion is None and region.box is None and not isinstance(region.content, memoryview)
        is_small = is_whole and region.nbytes <= window_bytes
        is_near = small and region.end - small[0].begin <= window_bytes
        if small and not (is_small and is_near):  # never across another region, which another thread writes
            yield _join(small, tensors)
            small = []
        if is_small:
            small.append(region)
        elif isinstance(region.content, memoryview):
            yield _Window(region.begin, region.nbytes, data=region.content)
        else:
            begin, conversion = region.begin, region.conversion
            for nbytes, requests in plan_windows(tensors, *region.content, region.box, window_bytes):
                written = nbytes if conversion is None else nbytes // conversion.stored * conversion.written
                yield _Window(begin, written, nbytes, requests, conversion)
                begin += written
    if small:
        yield _join(small, tensors)


def _join(regions: Sequence[Region], tensors: StoredTensors) -> _Window:
    """Return one window for regions of whole tensors, which follow one another in a file."""
    begin, requests = regions[0].begin, list[Request]()
    for region in regions:
        assert not isinstance(region.content, memoryview)
        shape = tensors.spec(*region.content).shape
        for request in tensors.requests(*region.content, _whole(shape), shape, memoryview(b"")):
            at = request.runs.at + region.begin - begin
            requests.append(request._replace(runs=request.runs._replace(at=at)))
    counted = sum(region.nbytes for region in regions)
    return _Window(begin, counted, regions[-1].end - begin, requests)


@lru_cache(maxsize=1024)
def _whole(shape: Shape) -> tuple[Part, ...]:
    return (Part(Box.whole(shape), (0,) * len(shape)),)


def _content(source: ShardReader, window: _Window, file: int, memory: memoryview) -> memoryview:
    """Return the bytes of a window, in ``memory`` unless they are given or converted."""
    if not window.nbytes:
        return window.data
    data = memory[: window.nbytes]
    if window.conversion is None and window.counted < window.nbytes:
        os.preadv(file, [data], window.begin)  # what lies between the tensors is there already
    source.fetch(request._replace(target=data) for request in window.requests)
    return data if window.conversion is None else window.conversion.convert(data)
