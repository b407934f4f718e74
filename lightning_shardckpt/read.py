"""How do bytes come back? Ranged reads of what a load plan names, verified first, then straight into place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from lightning_shardckpt.errors import CheckpointNotFoundError, CorruptionError, FormatError
from lightning_shardckpt.header import DTYPE_BYTES, MAX_HEADER_BYTES, Stored, checksum, decode, shown
from lightning_shardckpt.index import (
    MAX_BLOCK_BYTES,
    ROOT_NAME,
    FileInfo,
    RankIndex,
    RootIndex,
    ShardEntry,
    rank_index_from_json,
    root_from_json,
)
from lightning_shardckpt.plan import Overlap, byte_runs, check_cover, check_plausible, choose_replicas
from lightning_shardckpt.storage.protocol import Reader, Storage, read_all

_DIRECT_BYTES = 64 * 1024  # runs at least this long are read where they belong, shorter ones through a buffer
_BUFFER_BYTES = MAX_BLOCK_BYTES


class Checkpoint:
    """A checkpoint opened for reading: its root index, and the rank indexes that were asked for. Close it after use."""

    def __init__(self, storage: Storage, path: str) -> None:
        self.path = path
        self.reader: Reader = storage.open(path)
        self._indexes: dict[tuple[str, int], RankIndex] = {}
        self._replicas: dict[str, dict[str, int | None]] = {}
        self._headers: dict[tuple[str, int], dict[str, dict[str, Stored]]] = {}
        self._checked: set[tuple[str, int, str]] = set()
        try:
            self.root: RootIndex = root_from_json(self._read(ROOT_NAME), self._where(ROOT_NAME))
            for name, component in self.root.components.items():
                check_plausible(component, f"{self._where(ROOT_NAME)}, {name}")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the files."""
        self.reader.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def replicas(self, component: str) -> dict[str, int | None]:
        """Which replica wrote each tensor of a component, as the save planned it.

        Raises:
            FormatError: if the boxes of a tensor leave a gap or overlap.
        """
        if component not in self._replicas:
            tensors = self.root.components[component].tensors
            check_cover(f"{self._where(ROOT_NAME)}, {component}", tensors)
            self._replicas[component] = choose_replicas(tensors)
        return self._replicas[component]

    def document(self, name: str) -> bytes:
        """The content of a JSON document, verified."""
        return self._verified(self.root.documents[name])

    def index(self, component: str, rank: int) -> RankIndex:
        """What ``rank`` wrote of ``component``, verified against the root index."""
        if (component, rank) not in self._indexes:
            info = self.root.components[component].indexes.get(rank)
            if info is None:
                raise FormatError(
                    f"{self._where(ROOT_NAME)}: rank {rank} should have written some of {component!r}, but has no index"
                )
            found = rank_index_from_json(self._verified(info), self._where(info.name))
            self._own(found.save_id, info.name)
            if (found.component, found.rank) != (component, rank):
                raise FormatError(
                    f"{self._where(info.name)}: this is the index of rank {found.rank} for {found.component!r}"
                )
            self._indexes[component, rank] = found
        return self._indexes[component, rank]

    def entry(self, component: str, key: str, overlap: Overlap) -> ShardEntry:
        """The stored box that a plan refers to.

        Raises:
            FormatError: if the rank's index does not have it as the root index describes it.
        """
        spec = self.root.components[component].tensors[key]
        index = self.index(component, overlap.writer)
        for entry in index.shards.get(key, ()):
            if entry.box == overlap.stored and entry.dtype == spec.dtype and entry.global_shape == spec.shape:
                return entry
        raise FormatError(
            f"{self._where(ROOT_NAME)}: the index of rank {overlap.writer} has no box {overlap.stored.start}.."
            f"{overlap.stored.stop} of {key!r}, {spec.dtype} {spec.shape}"
        )

    def check_file(self, component: str, rank: int, name: str) -> None:
        """Make sure that a shard file is the one that was saved: size, header, save id. Once per file."""
        if (component, rank, name) in self._checked:
            return
        info = self.index(component, rank).files[name]
        self._check_size(info)
        prefix = bytearray(8)
        _fill(self, name, 0, memoryview(prefix))
        length = int.from_bytes(prefix, "little")
        if length > min(info.nbytes - 8, MAX_HEADER_BYTES):
            raise CorruptionError(f"{self._where(name)}: the header claims {length} bytes of a file of {info.nbytes}")
        header = bytearray(length)
        _fill(self, name, 8, memoryview(header))
        if checksum(memoryview(prefix), memoryview(header)) != info.checksum:
            raise CorruptionError(
                f"{self._where(name)}: the header of the shard file is damaged, or it is of another save"
            )
        stored, save_id = decode(bytes(header), self._where(name))
        self._own(save_id, name)
        expected = self._described(component, rank).get(name, {})
        for key in sorted(stored.keys() | expected.keys()):
            if stored.get(key) != expected.get(key):
                raise FormatError(
                    f"{self._where(name)}: {shown(key)} is {stored.get(key)} in the header of the file, "
                    f"{expected.get(key)} in the index of rank {rank}"
                )
        if sum(one.nbytes for one in stored.values()) != info.nbytes - 8 - length:
            raise FormatError(f"{self._where(name)}: its tensors do not fill the file of {info.nbytes} bytes")
        self._checked.add((component, rank, name))

    def _described(self, component: str, rank: int) -> dict[str, dict[str, Stored]]:
        """By file and tensor, what the index of a rank says that the headers of its files must say."""
        if (component, rank) not in self._headers:
            headers: dict[str, dict[str, Stored]] = {}
            for key, entries in self.index(component, rank).shards.items():
                for entry in entries:
                    headers.setdefault(entry.file, {})[key] = entry.stored
            self._headers[component, rank] = headers
        return self._headers[component, rank]

    def _verified(self, info: FileInfo) -> bytes:
        self._check_size(info)
        content = self._read(info.name)
        if checksum(content) != info.checksum:
            raise CorruptionError(
                f"{self._where(info.name)}: damaged, or of another save: checksum {checksum(content)}, expected "
                f"{info.checksum}"
            )
        return content

    def _check_size(self, info: FileInfo) -> None:
        try:
            size = self.reader.size(info.name)
        except FileNotFoundError:
            raise CorruptionError(f"{self._where(info.name)}: the file is missing") from None
        except FormatError as error:
            raise FormatError(f"{self._where(info.name)}: {error}") from None
        if size != info.nbytes:
            raise CorruptionError(f"{self._where(info.name)}: {size} bytes, expected {info.nbytes}")

    def _own(self, save_id: str, name: str) -> None:
        if save_id != self.root.save_id:
            raise CorruptionError(
                f"{self._where(name)}: belongs to save {save_id}, this checkpoint is save {self.root.save_id}"
            )

    def _read(self, name: str) -> bytes:
        try:
            return read_all(self.reader, name)
        except FileNotFoundError:
            raise CheckpointNotFoundError(f"{self.path!r} is not a complete checkpoint: it has no {name}") from None
        except EOFError as error:
            raise CorruptionError(f"{self._where(name)}: {error}") from None
        except ValueError as error:  # too long, or no regular file
            raise FormatError(f"{self._where(name)}: {error}") from None

    def _where(self, name: str) -> str:
        return f"checkpoint {self.path!r}, file {name}"


@dataclass(frozen=True, slots=True)
class Request:
    """Fill a region of ``target``, the row-major memory of ``local_shape``, from a stored box."""

    key: str
    overlap: Overlap
    entry: ShardEntry
    local_shape: tuple[int, ...]

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """(offset in the file, offset in the target, length), in bytes."""
        itemsize = DTYPE_BYTES[self.entry.dtype]
        for source, target, length in byte_runs(self.overlap, self.local_shape, itemsize):
            yield self.entry.begin + source, target, length


def verify_requests(checkpoint: Checkpoint, component: str, requests: Iterable[Request]) -> None:
    """Read every checksum block that the requests touch, and compare. Nothing is kept.

    Raises:
        CorruptionError: naming the file, the tensor and the rank that wrote it.
    """
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    for request in requests:
        checkpoint.check_file(component, request.overlap.writer, request.entry.file)
        for first, last in _touched_blocks(request):
            _verify_blocks(checkpoint, request, first, last, buffer)


def _touched_blocks(request: Request) -> Iterator[tuple[int, int]]:
    """Ranges ``[first, last)`` of blocks, ascending and disjoint."""
    block, begin = request.entry.block, request.entry.begin
    low = high = 0
    for source, _, length in request.runs():
        first, last = (source - begin) // block, -(-(source - begin + length) // block)
        if first > high:
            if low < high:
                yield low, high
            low = first
        high = max(high, last)
    if low < high:
        yield low, high


def _verify_blocks(checkpoint: Checkpoint, request: Request, first: int, last: int, buffer: memoryview) -> None:
    entry = request.entry
    step = max(len(buffer) // entry.block, 1)
    for at in range(first, last, step):
        stop = min((min(at + step, last)) * entry.block, entry.nbytes)
        data = buffer[: stop - at * entry.block]
        _fill(checkpoint, entry.file, entry.begin + at * entry.block, data)
        for i, expected in enumerate(entry.checksums[at : min(at + step, last)]):
            if checksum(data[i * entry.block : (i + 1) * entry.block]) != expected:
                first = entry.begin + (at + i) * entry.block
                last = min(first + entry.block, entry.begin + entry.nbytes)
                raise CorruptionError(
                    f"checkpoint {checkpoint.path!r}: corrupted data of {request.key!r} in {entry.file}, written by "
                    f"rank {request.overlap.writer}, bytes {first} to {last}"
                )


def fill(
    checkpoint: Checkpoint, request: Request, target: memoryview, advance: Callable[[int], Any] = lambda n: None
) -> None:
    """Read a request into ``target``, the bytes of its whole local tensor."""
    short: list[tuple[int, int, int]] = []
    name = request.entry.file
    for source, at, length in request.runs():
        if length >= _DIRECT_BYTES:
            _fill(checkpoint, name, source, target[at : at + length])
        elif short and source + length - short[0][0] > _BUFFER_BYTES:
            _fill_short(checkpoint, name, short, target)
            short = [(source, at, length)]
        else:
            short.append((source, at, length))
    _fill_short(checkpoint, name, short, target)
    advance(request.overlap.common.numel * DTYPE_BYTES[request.entry.dtype])


def _fill_short(checkpoint: Checkpoint, name: str, runs: list[tuple[int, int, int]], target: memoryview) -> None:
    """Many short runs by one read of the span that holds them."""
    if not runs:
        return
    first = runs[0][0]
    span = memoryview(bytearray(runs[-1][0] + runs[-1][2] - first))
    _fill(checkpoint, name, first, span)
    for source, at, length in runs:
        target[at : at + length] = span[source - first : source - first + length]


def _fill(checkpoint: Checkpoint, name: str, offset: int, target: memoryview) -> None:
    try:
        checkpoint.reader.read_into(name, offset, target)
    except (EOFError, FileNotFoundError) as error:
        raise CorruptionError(f"checkpoint {checkpoint.path!r}, file {name}: {error}") from None
