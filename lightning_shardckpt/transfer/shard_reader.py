"""Execution of read plans: read, verify checksums and copy into the targets, in a few threads.

Tasks are executed in the order of the files, so that the kernel reads ahead. With two cores per process there are two
threads, so that one can read while the other computes checksums; with high latency there are more. Each thread needs
memory for a window. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Protocol

import xxhash

from lightning_shardckpt.distributed.liveness import cores_per_rank
from lightning_shardckpt.errors import CorruptionError
from lightning_shardckpt.format.checksum import DIGITS, checksum_blocks, slice_checksums
from lightning_shardckpt.format.index import MAX_BLOCK_BYTES, ShardEntry
from lightning_shardckpt.storage.local.posix import errors_with_path
from lightning_shardckpt.storage.protocol import Reader
from lightning_shardckpt.system.memory import allocate_pages
from lightning_shardckpt.system.tuning import TUNING, Tuning
from lightning_shardckpt.system.workers import run_tasks
from lightning_shardckpt.transfer.read_plan import ReadPlan, Request, Rows, Slice, Span, Task


def fetch(
    files: Files,
    requests: Iterable[Request],
    *,
    verify: bool,
    tuning: Tuning = TUNING,
    threads: int | None = None,
) -> None:
    """Read the regions of the requests into their targets, and verify their checksums, in one pass.

    Args:
        files: an opened checkpoint, whose files ``Checkpoint.check_file`` has checked.
        requests: requests in any order.
        verify: read the whole of every block that a request touches, and compare its checksum, if there is one.
        tuning: buffer sizes.
        threads: the number of threads, including the calling thread; by default it depends on the work.

    Raises:
        CorruptionError: naming the file, the tensor and the rank that wrote it. Targets may be partly filled.
    """
    plan = ReadPlan(verify, files.reader.high_latency, tuning)
    ordered = plan.sort(requests)
    count = threads or _thread_count(plan, ordered)

    @contextmanager
    def open_worker() -> Iterator[Callable[[Task], None]]:
        with clone_reader(files.path, files.reader) if count > 1 else nullcontext(files.reader) as reader:
            yield ShardReader(files.path, reader, verify=verify, tuning=tuning).execute

    run_tasks(plan.tasks(ordered), open_worker, threads=count, name="shardckpt-reader")


def _thread_count(plan: ReadPlan, requests: list[Request]) -> int:
    if not plan.high_latency and cores_per_rank() == 1:
        return 1
    nbytes = sum(request.nbytes for request in requests)
    if plan.high_latency:
        tasks = max(len(requests), nbytes // plan.window_bytes)  # an upper bound
        return max(min(plan.tuning.high_latency_threads, tasks), 1)
    return 2 if nbytes >= plan.tuning.threaded_read_bytes else 1


# ── one thread ────────────────────────────────────────────────────────────────────────────────────────────────────


class ShardReader:
    """Reads stored boxes in one thread, through a window of its own.

    Args:
        path: the checkpoint's path, for messages.
        reader: the reader of its files; the caller closes it.
        verify: compare blocks with their checksums, if there are any.
        target_bytes: the size of ``target``, a buffer for callers; at least one block.
        span_gap_bytes: the size of gaps that one read may contain between adjacent requests.
        tuning: buffer sizes.
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
        window_bytes = 2 * max(self._plan.window_bytes, tuning.verified_part_bytes, target_bytes, MAX_BLOCK_BYTES)
        self.window = memoryview(allocate_pages(window_bytes))  # pages that are not used cost nothing
        self.target = memoryview(allocate_pages(max(target_bytes, MAX_BLOCK_BYTES)))

    def fetch(self, requests: Iterable[Request]) -> None:
        """Fill the targets of the requests, and verify checksums.

        Raises:
            CorruptionError: naming file, tensor and rank. Targets may be partly filled.
        """
        for task in self._plan.tasks(self._plan.sort(requests)):
            self.execute(task)

    def execute(self, task: Task) -> None:
        """Execute one task of a plan with the same arguments; raises like ``fetch``."""
        if isinstance(task, Rows):
            self._read_rows(task)
        elif task.direct:
            self._read_direct(task.slices[0])
        else:
            self._read_span(task)

    def _read_direct(self, piece: Slice) -> None:
        request, target, at = piece.request, piece.request.target, piece.at - piece.low
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
            piece_data = data[first - low : piece.high - low]
            self._verify(request, piece_data, first)
            piece.place(piece_data, request.target)

    def _read_rows(self, task: Rows) -> None:
        request, groups, window = task.request, task.groups, self.window
        entry, target, pitch = request.entry, request.target, groups.pitch
        for source, at in groups.groups():
            first = entry.begin + source
            done, left = 0, 0  # rows copied; bytes of an incomplete row in the window
            for low, high in self._plan.ranges(request, first, groups.group_bytes):
                data = window[left : left + high - low]
                read_verbatim(self, entry.file, low, data)
                self._verify(request, data, low)
                begin = low - left  # offset of the window in the file
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
def clone_reader(path: str, reader: Reader) -> Iterator[Reader]:
    """Yield a clone of a reader of the checkpoint at ``path``, for another thread, and close it at the end."""
    with errors_with_path(path):
        clone = reader.clone()
    try:
        yield clone
    finally:
        clone.close()


# ── checksums ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Files(Protocol):
    """An opened checkpoint, of any format."""

    path: str
    reader: Reader


def read_verbatim(files: Files, file: str, offset: int, target: memoryview) -> None:
    """Fill ``target`` with a file's bytes from ``offset`` on, without verification."""
    try:
        files.reader.read_into(file, offset, target)
    except (EOFError, FileNotFoundError) as error:
        raise CorruptionError(f"checkpoint {files.path!r}, file {file}: {error}") from None


def check_blocks(path: str, key: str, writer: int, entry: ShardEntry, data: memoryview, low: int) -> None:
    """Compare whole blocks of a box with its checksums."""
    block = entry.block
    actual = checksum_blocks(data, block)
    if actual == entry.checksums:  # a fast path, for a whole box
        return
    expected = slice_checksums(entry.checksums, (low - entry.begin) // block, len(actual) // DIGITS)
    if actual != expected:
        digits = zip(actual, expected, strict=True)
        at = next(i for i, (left, right) in enumerate(digits) if left != right) // DIGITS * block
        raise corruption_error(path, key, writer, entry, low + at, low + min(at + block, len(data)))


def corruption_error(path: str, key: str, writer: int, entry: ShardEntry, first: int, last: int) -> CorruptionError:
    """Return the error for bytes ``[first, last)`` of a file that don't match their checksum."""
    return CorruptionError(
        f"checkpoint {path!r}: corrupted data of {key!r} in {entry.file}, written by rank {writer}, "
        f"bytes {first} to {last}. Load another checkpoint, or restore the file; verify lists all damage"
    )


class BlockChecksums:
    """Compares the bytes of a stored box with its checksums; they are fed in order, in pieces of any size.

    A box of another format has no checksums, and always matches.
    """

    def __init__(self, entry: ShardEntry) -> None:
        self.at = 0
        self._entry, self._digest, self._nbytes = entry, xxhash.xxh3_64(), entry.nbytes

    def feed(self, data: memoryview) -> Iterator[tuple[int, int]]:
        """Yield file ranges ``[first, last)`` of the blocks that end in ``data`` and don't match their checksums."""
        entry, block, done = self._entry, self._entry.block, 0
        while done < len(data):
            count = min(block - self.at % block, len(data) - done)
            piece = data[done : done + count]
            done, self.at = done + count, self.at + count
            if self.at % block and self.at != self._nbytes:
                self._digest.update(piece)
                continue
            number = (self.at - 1) // block
            if count == self.at - number * block:
                actual = xxhash.xxh3_64_hexdigest(piece)
            else:
                self._digest.update(piece)
                actual = self._digest.hexdigest()
                self._digest.reset()
            if entry.checksums and actual != slice_checksums(entry.checksums, number, 1):
                yield entry.begin + number * block, entry.begin + self.at
