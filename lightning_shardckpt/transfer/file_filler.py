"""Fill a file with stored tensors in several threads; all offsets are known before a byte is read.

A large tensor is read, verified, converted and written window by window; small ones are read together. No torch.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from lightning_shardckpt.format.layout import Box
from lightning_shardckpt.storage.posix import WRITEBACK_BYTES, begin_writeback, write_at
from lightning_shardckpt.system.host import allocate_pages
from lightning_shardckpt.system.threads import run_tasks
from lightning_shardckpt.system.tuning import TUNING, Tuning
from lightning_shardckpt.transfer.shard_reader import Request, StoredTensors, fetch, plan_windows


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


class _Piece(NamedTuple):
    """``nbytes`` that ``requests`` read, or the bytes ``data``, for a file from ``begin`` on."""

    begin: int
    nbytes: int
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
    def open_worker() -> Iterator[Callable[[list[_Piece]], None]]:
        memory = memoryview(allocate_pages(window_bytes))

        def fill_pieces(pieces: list[_Piece]) -> None:
            nonlocal written_bytes
            for piece, data in _read(pieces, tensors, memory):
                with writing:
                    write_at(file, data, piece.begin)
                    written_bytes += len(data)
                    if written_bytes >= WRITEBACK_BYTES:
                        begin_writeback(file)
                        written_bytes = 0
                    advance(len(data))

        yield fill_pieces

    nbytes = sum(region.nbytes for region in regions)
    # at most one per window; two even on one core, since one may wait for the disk
    threads = min(max(len(os.sched_getaffinity(0)), 2), tuning.fill_threads, nbytes // window_bytes + 1)
    groups = _group(_pieces(regions, tensors, window_bytes), window_bytes)
    run_tasks(groups, open_worker, threads=threads, name="shardckpt-filler")


def _pieces(regions: Sequence[Region], tensors: StoredTensors, window_bytes: int) -> Iterator[_Piece]:
    """Yield pieces of regions that fit into a window. Not thread-safe."""
    for region in regions:
        if isinstance(region.content, memoryview):
            yield _Piece(region.begin, 0, data=region.content)
            continue
        begin, conversion = region.begin, region.conversion
        for nbytes, requests in plan_windows(tensors, *region.content, region.box, window_bytes):
            yield _Piece(begin, nbytes, requests, conversion)
            begin += nbytes if conversion is None else nbytes // conversion.stored * conversion.written


def _group(pieces: Iterator[_Piece], window_bytes: int) -> Iterator[list[_Piece]]:
    """Yield pieces that fit into one window together."""
    group, nbytes = list[_Piece](), 0
    for piece in pieces:
        if group and nbytes + piece.nbytes > window_bytes:
            yield group
            group, nbytes = [], 0
        group.append(piece)
        nbytes += piece.nbytes
    if group:
        yield group


def _read(pieces: list[_Piece], tensors: StoredTensors, memory: memoryview) -> Iterator[tuple[_Piece, memoryview]]:
    """Yield the bytes of pieces, which are read together into ``memory`` unless they are given."""
    targets, at = list[memoryview](), 0
    for piece in pieces:
        targets.append(memory[at : at + piece.nbytes])
        at += piece.nbytes
    requests = [
        request._replace(target=target)
        for piece, target in zip(pieces, targets, strict=True)
        for request in piece.requests
    ]
    fetch(tensors, requests, verify=True, threads=1)
    for piece, target in zip(pieces, targets, strict=True):
        data = target if piece.nbytes else piece.data
        yield piece, data if piece.conversion is None else piece.conversion.convert(data)
