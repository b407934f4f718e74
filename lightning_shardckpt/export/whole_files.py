"""Options and whole files of an export: planned, then each is begun without its tensors, and filled like any other.

A plan knows the names, dtypes, shapes and order of all tensors; it has read nothing. Exporting a checkpoint of this
package needs torch only for a torch file, and if dtypes are converted.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, NamedTuple, get_args

from lightning_shardckpt.errors import FormatError, MismatchError
from lightning_shardckpt.format.layout import Box
from lightning_shardckpt.format.value_checks import DTYPE_BYTES
from lightning_shardckpt.sources.key_mapping import KeyMapping, KeyMappingLike, map_names
from lightning_shardckpt.sources.source import Source
from lightning_shardckpt.state.documents import CONFIG, CONFIGS
from lightning_shardckpt.storage.local_files import WRITEBACK_BYTES, NewFile, begin_writeback, write_at
from lightning_shardckpt.system.host import TUNING, Tuning, allocate_pages
from lightning_shardckpt.system.threads import run_tasks
from lightning_shardckpt.transfer.shard_reader import Request, StoredTensors, fetch, plan_windows

Format = Literal["torch", "safetensors", "huggingface", "peft"]
Split = Literal["one_file", "one_file_per_tensor", "chunks"]
DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
SIZE_PER_SHARD = 5000.0
"""Default size of chunks in MB."""
_PARTS = {"split 'chunks'", "split 'one_file_per_tensor'"}
_REFUSED = {
    "torch": _PARTS,
    "safetensors": set[str](),
    "huggingface": {"split 'one_file_per_tensor'", "optimizer"},
    "peft": {*_PARTS, "optimizer", "dtype", "key_mapping", "overwrite"},
}

OPTIMIZER = "optimizer.json"
WRITER = ("writer", "lightning-shardckpt")
"""Metadata of every safetensors file of an export that may replace an earlier one."""
_WRITER_ENTRY, _HEAD_BYTES = '"{}":"{}"'.format(*WRITER).encode(), 4096  # the metadata come first in a header


# ── options ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Options:
    """Options of an export; ``consolidate`` describes them.

    Raises:
        ValueError: if a value is unknown, or options contradict each other.
    """

    format: Format = "torch"
    split: Split | None = None
    size_per_shard: float | None = None
    optimizer: bool | None = None
    dtype: str | None = None
    key_mapping: KeyMappingLike | None = None
    overwrite: bool = False
    mapping: KeyMapping = field(init=False)
    """The parsed ``key_mapping``."""

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("format", self.format, get_args(Format)),
            ("split", self.split, (None, *get_args(Split))),
            ("dtype", self.dtype, (None, *DTYPES)),
        ):
            if value not in choices:
                raise ValueError(f"{name} is one of {', '.join(str(c) for c in choices if c)}, got {value!r}")
        object.__setattr__(self, "mapping", KeyMapping.of(self.key_mapping))
        names = ("optimizer", "dtype", "key_mapping", "overwrite")
        given = {f"split {self.split!r}", *(name for name in names if getattr(self, name))}
        if refused := sorted(given & _REFUSED[self.format]):
            raise ValueError(f"format {self.format!r} takes no {' and no '.join(refused)}")
        if self.size_per_shard is not None and not (self.files == "chunks" and self.size_per_shard > 0):
            raise ValueError(f"size_per_shard is a positive size in MB for split 'chunks', got {self.size_per_shard}")

    @property
    def files(self) -> Split:
        """The split into safetensors files."""
        return self.split or ("chunks" if self.format == "huggingface" else "one_file")

    @property
    def chunk_mb(self) -> float:
        """Maximum size of a chunk in MB."""
        return SIZE_PER_SHARD if self.size_per_shard is None else self.size_per_shard

    @property
    def has_optimizer(self) -> bool:
        """True if the optimizers are exported, too."""
        return self.format == "torch" if self.optimizer is None else self.optimizer

    @property
    def is_file(self) -> bool:
        """True if the output is a file, not a directory."""
        return self.format == "torch" or (
            self.format == "safetensors" and self.files == "one_file" and not self.has_optimizer
        )

    def output_dtype(self, dtype: str) -> str:
        """Return the dtype of a model's tensor in the output for its stored dtype, by safetensors names."""
        is_floating = dtype.startswith(("F", "BF"))
        return DTYPES[self.dtype] if self.dtype is not None and is_floating else dtype

    def select(self, stored: Source) -> Source:
        """Return the stored state under the names of the output, without what is left out.

        Raises:
            ValueError: if entries of the mapping match no name, or give a name several times.
        """
        if self.mapping.is_empty:
            return stored
        try:
            selected, problems = map_names(stored, self.mapping, optimizers=None if self.has_optimizer else ())
        except MismatchError as error:
            raise ValueError(str(error)) from None
        if problems:
            raise ValueError(f"{stored.path!r}: " + "\n  ".join(problems))
        return selected


# ── files ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class WholeFile:
    """A file with tensors.

    Attributes:
        name: of the file, which may contain slashes.
        nbytes: the size of its tensors.
        begin: writes everything but the tensors into the empty file of a descriptor, and returns their regions, which
            ascend.
    """

    name: str
    nbytes: int
    begin: Callable[[int], Iterable[Region]]


@dataclass(slots=True)
class Export:
    """The plan of an export: files with tensors, the content of other files by name, and notes for the user."""

    files: list[WholeFile]
    documents: dict[str, bytes] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """The size of all tensors."""
        return sum(file.nbytes for file in self.files)


def write(
    stored: Source,
    export: Export,
    create: NewFile,
    advance: Callable[[int], Any] = lambda nbytes: None,
    *,
    tuning: Tuning = TUNING,
) -> None:
    """Write all files of an export, the config last.

    Args:
        stored: the checkpoint.
        export: the plan.
        create: creates a file.
        advance: called with the number of bytes that were written.
        tuning: buffer sizes and the number of threads.

    Raises:
        CorruptionError: naming file, tensor and rank.
        FormatError: if two files would have the same name.
    """
    for name in export.documents.keys() & {file.name for file in export.files}:
        raise FormatError(f"two files would be called {name!r}")
    for planned in export.files:
        with create(planned.name) as file:
            fill(file, [*planned.begin(file)], stored, advance, tuning=tuning)
    for name in sorted(export.documents, key=lambda name: name == CONFIG):
        with create(name) as file:
            write_at(file, memoryview(export.documents[name]), 0)


@cache
def plan_conversion(stored: str, written: str) -> DtypeConversion | None:
    """Return the conversion of bytes from one dtype to another, with the results of torch's ``Tensor.to``, if any."""
    if stored == written:
        return None
    import torch  # imported here, since it takes two seconds and exports without a conversion don't need it

    from lightning_shardckpt.state.tensor_bytes import TORCH_DTYPES, host_bytes

    def convert(data: memoryview) -> memoryview:
        return host_bytes(torch.frombuffer(data, dtype=TORCH_DTYPES[stored]).to(TORCH_DTYPES[written]))

    return DtypeConversion(convert, DTYPE_BYTES[stored], DTYPE_BYTES[written])


def is_replaceable(directory: str) -> bool:
    """Return True if a directory is empty, or an earlier export wrote all its files."""
    paths = [os.path.join(folder, name) for folder, _, names in os.walk(directory) for name in names]
    documents = {os.path.join(directory, name) for name in (*CONFIGS, OPTIMIZER)}
    others = [path for path in paths if path not in documents and not path.endswith(".safetensors.index.json")]
    return bool(others or not paths) and all(map(_was_exported, others))


def _was_exported(path: str) -> bool:
    """Return True if a file is of safetensors, whose metadata name an export as its writer."""
    with open(path, "rb") as file:
        start = file.read(8 + _HEAD_BYTES)
    return _WRITER_ENTRY in start[8 : 8 + int.from_bytes(start[:8], "little")]


# ── filling a file in several threads ─────────────────────────────────────────────────────────────────────────────────

# All offsets are known before a byte is read. A large tensor is read, verified, converted and written window by window;
# small ones are read together.


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
