"""Do the reads of a plan on one thread: read, compare with checksums, put into place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from lightning_shardckpt.format.index import MAX_BLOCK_BYTES
from lightning_shardckpt.storage.local.posix import naming
from lightning_shardckpt.storage.protocol import Reader
from lightning_shardckpt.system.page_memory import pages
from lightning_shardckpt.system.tuning import TUNING, Tuning
from lightning_shardckpt.transfer.read_plan import ReadPlan, Request, Rows, Slice, Span, Task
from lightning_shardckpt.transfer.verified_reads import check_blocks, read_verbatim


class ShardReader:
    """Reads stored boxes on one thread, through a window that is its own.

    Args:
        path: of the checkpoint, for messages.
        reader: of its files; stays the caller's to close.
        verify: whether blocks are compared with their checksums, where there are any.
        target_bytes: how much ``target`` holds, memory for callers to put results together in; at least a block.
        span_gap_bytes: how much one read may bring that nobody needs, where neighbours are read together.
        tuning: sizes.
    """

    def __init__(
        self,
        path: str,
        reader: Reader,
        *,
        verify: bool = True,
        target_bytes: int = 0,
        span_gap_bytes: int = 0,
        tuning: Tuning = TUNING,
    ) -> None:
        self.path, self.reader = path, reader
        self._plan = ReadPlan(verify, reader.high_latency, tuning, span_gap_bytes)
        most = max(self._plan.window_bytes, tuning.verified_part_bytes, target_bytes, MAX_BLOCK_BYTES)
        self.window = memoryview(pages(2 * most))  # nothing is paid for memory that is not used
        self.target = memoryview(pages(max(target_bytes, MAX_BLOCK_BYTES)))

    def fetch(self, requests: Iterable[Request]) -> None:
        """Fill the targets of the requests, verified.

        Raises:
            CorruptionError: naming file, tensor and rank; targets may be filled in part.
        """
        for task in self._plan.tasks(self._plan.in_order(requests)):
            self.do(task)

    def do(self, task: Task) -> None:
        """Do one task of a plan that was made with the same arguments."""
        if isinstance(task, Rows):
            self._read_rows(task)
        elif task.direct:
            self._read_direct(task.slices[0])
        else:
            self._read_span(task)

    def _read_direct(self, piece: Slice) -> None:
        request, target, at = piece.request, piece.request.target, piece.at - piece.low
        assert target is not None
        file = request.entry.file
        for low, high in self._plan.direct_ranges(piece):
            data = target[at + low : at + high]
            read_verbatim(self, file, low, data)
            self._verify(request, data, low)

    def _read_span(self, span: Span) -> None:
        low, data = span.low, self.window[: span.nbytes]
        read_verbatim(self, span.slices[0].request.entry.file, low, data)
        for piece in span.slices:
            request, first = piece.request, piece.low
            here = data[first - low : piece.high - low]
            self._verify(request, here, first)
            if request.target is not None:
                piece.place(here, request.target)

    def _read_rows(self, task: Rows) -> None:
        request, groups, window = task.request, task.groups, self.window
        entry, target, pitch = request.entry, request.target, groups.pitch
        assert target is not None
        for source, at in groups.groups():
            first = entry.begin + source
            done, left = 0, 0  # rows copied; bytes in the window of the row that is not complete
            for low, high in self._plan.ranges(request, first, groups.group_bytes):
                data = window[left : left + high - low]
                read_verbatim(self, entry.file, low, data)
                self._verify(request, data, low)
                begin = low - left  # of the window, in the file
                complete = min(max((high - first - groups.row_bytes) // pitch + 1, done), groups.rows)
                if complete > done:
                    offset = first + done * pitch - begin
                    groups.copy(window, offset, target, at + done * groups.target_pitch, complete - done)
                done = complete
                left = high - min(max(first + done * pitch, begin), high)
                window[:left] = window[high - begin - left : high - begin]

    def _verify(self, request: Request, data: memoryview, low: int) -> None:
        if self._plan.verify and request.entry.checksums:
            check_blocks(self.path, request.key, request.overlap.writer, request.entry, data, low)


@contextmanager
def cloned(path: str, reader: Reader) -> Iterator[Reader]:
    """Another reader of the checkpoint at ``path``, for this thread; closed at the end."""
    with naming(path):
        found = reader.clone()
    try:
        yield found
    finally:
        found.close()
