"""Read what a plan says into memory: read, compare with checksums, put into place, by a few threads.

Tasks are taken in the order of the files, so that the system reads ahead; where a process has two cores, by two
threads, of which one reads while the other computes checksums. Where every call takes long, there are more. Extra
memory is a window for each of them. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Protocol

import xxhash

from lightning_shardckpt.distributed.liveness import cores_per_rank
from lightning_shardckpt.errors import CorruptionError
from lightning_shardckpt.format.checksum import SEPARATOR, checksum_blocks, count_checksums, slice_checksums
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
    """Read what the requests need; compare it with the checksums, put it into their targets, or both in one pass.

    Args:
        files: an opened checkpoint, whose files were checked by ``Checkpoint.check_file``.
        requests: in any order; those without a target are only verified.
        verify: read every block that a request touches whole, and compare it, where there are checksums.
        tuning: sizes.
        threads: how many, the calling one included; by default as many as the work is worth.

    Raises:
        CorruptionError: naming the file, the tensor and the rank that wrote it. Targets may be filled in part.
    """
    plan = ReadPlan(verify, files.reader.high_latency, tuning)
    wanted = plan.in_order(requests)
    count = threads or _thread_count(plan, wanted)

    @contextmanager
    def open_worker() -> Iterator[Callable[[Task], None]]:
        with clone_reader(files.path, files.reader) if count > 1 else nullcontext(files.reader) as reader:
            yield ShardReader(files.path, reader, verify=verify, tuning=tuning).do

    run_tasks(plan.tasks(wanted), open_worker, threads=count, name="shardckpt-reader")


def planned_reads(
    files: Files, requests: Iterable[Request], *, verify: bool, tuning: Tuning = TUNING
) -> Iterator[tuple[str, int, int]]:
    """The ranged reads that ``fetch`` would make: file, offset, length. Nothing is read, and no target is touched."""
    plan = ReadPlan(verify, files.reader.high_latency, tuning)
    return plan.reads(plan.in_order(requests))


def _thread_count(plan: ReadPlan, requests: list[Request]) -> int:
    if not plan.high_latency and cores_per_rank() == 1:
        return 1
    nbytes = sum(request.nbytes for request in requests)
    if plan.high_latency:
        tasks = max(len(requests), nbytes // plan.window_bytes)  # or fewer
        return max(min(plan.tuning.high_latency_threads, tasks), 1)
    return 2 if nbytes >= plan.tuning.threaded_read_bytes else 1


# ── one thread ────────────────────────────────────────────────────────────────────────────────────────────────────


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
        self.window = memoryview(allocate_pages(2 * most))  # nothing is paid for memory that is not used
        self.target = memoryview(allocate_pages(max(target_bytes, MAX_BLOCK_BYTES)))

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
def clone_reader(path: str, reader: Reader) -> Iterator[Reader]:
    """Another reader of the checkpoint at ``path``, for this thread; closed at the end."""
    with errors_with_path(path):
        found = reader.clone()
    try:
        yield found
    finally:
        found.close()


# ── checksums ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Files(Protocol):
    """An opened checkpoint, of any format."""

    path: str
    reader: Reader


def read_verbatim(files: Files, file: str, offset: int, target: memoryview) -> None:
    """Fill ``target`` from ``offset`` on in a file; nothing is verified.

    Raises:
        CorruptionError: naming the file, if it is missing or ends before that.
    """
    try:
        files.reader.read_into(file, offset, target)
    except (EOFError, FileNotFoundError) as error:
        raise CorruptionError(f"checkpoint {files.path!r}, file {file}: {error}") from None


def check_blocks(path: str, key: str, writer: int, entry: ShardEntry, data: memoryview, low: int) -> None:
    """Compare whole blocks of a box with its checksums.

    Args:
        path: of the checkpoint, for the message.
        key: of the tensor, for the message.
        writer: the rank that wrote the box, for the message.
        entry: the box, with its checksums.
        data: bytes of the file from ``low`` on; it ends with a block, or with the box.
        low: where ``data`` begins in the file, in bytes; a block begins there.

    Raises:
        CorruptionError: naming the checkpoint, the tensor, the file, the rank that wrote it and the bytes.
    """
    block = entry.block
    found = checksum_blocks(data, block)
    if found == entry.checksums:  # a shortcut: of a box as a whole
        return
    expected = slice_checksums(entry.checksums, (low - entry.begin) // block, count_checksums(found))
    if found != expected:
        pairs = zip(found.split(SEPARATOR), expected.split(SEPARATOR), strict=True)
        at = next(i for i, (one, other) in enumerate(pairs) if one != other) * block
        raise corruption_error(path, key, writer, entry, low + at, low + min(at + block, len(data)))


def corruption_error(path: str, key: str, writer: int, entry: ShardEntry, first: int, last: int) -> CorruptionError:
    """The error for bytes ``[first, last)`` of a file that are not what was saved."""
    return CorruptionError(
        f"checkpoint {path!r}: corrupted data of {key!r} in {entry.file}, written by rank {writer}, "
        f"bytes {first} to {last}. Load another checkpoint, or restore the file; verify lists all damage"
    )


class BlockChecksums:
    """Compares the bytes of a stored box with its checksums as they come by, in order, in pieces of any size.

    A box without checksums, of another format, is taken as it is.
    """

    def __init__(self, entry: ShardEntry) -> None:
        self.at = 0
        self._entry, self._digest, self._nbytes = entry, xxhash.xxh3_64(), entry.nbytes

    def feed(self, data: memoryview) -> Iterator[tuple[int, int]]:
        """Ranges in the file, ``[first, last)``, of the blocks that ended in ``data`` and are not what was saved."""
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
                found = xxhash.xxh3_64_hexdigest(piece)
            else:
                self._digest.update(piece)
                found = self._digest.hexdigest()
                self._digest.reset()
            if entry.checksums and found != slice_checksums(entry.checksums, number, 1):
                yield entry.begin + number * block, entry.begin + self.at
