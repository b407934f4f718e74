"""Whole files of an export: planned first, then each is begun without its tensors, and filled like any other.

A plan knows the names, dtypes, shapes and order of all tensors; it has read nothing. Exporting a checkpoint of this
package needs torch only for a torch file, and if dtypes are converted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from lightning_shardckpt.errors import FormatError
from lightning_shardckpt.format.value_checks import DTYPE_BYTES
from lightning_shardckpt.sources.source import Source
from lightning_shardckpt.state.documents import CONFIG, CONFIGS
from lightning_shardckpt.storage.local.local_outputs import NewFile
from lightning_shardckpt.storage.local.posix import write_at
from lightning_shardckpt.system.tuning import TUNING, Tuning
from lightning_shardckpt.transfer.file_filler import DtypeConversion, Region, fill

OPTIMIZER = "optimizer.json"
WRITER = ("writer", "lightning-shardckpt")
"""Metadata of every safetensors file of an export that may replace an earlier one."""
_SUFFIXES = (".safetensors", ".safetensors.index.json")
_WRITTEN_LAST = (_SUFFIXES[1], CONFIG)
_WRITER_ENTRY, _HEAD_BYTES = '"{}":"{}"'.format(*WRITER).encode(), 4096  # the metadata come first in a header


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
    open_files: int = 64,
    tuning: Tuning = TUNING,
) -> None:
    """Write all files of an export; the one that completes it is written last.

    Args:
        stored: the checkpoint.
        export: the plan.
        create: creates a file.
        advance: called with the number of bytes that were written.
        open_files: at a time; the usual limit of a process is 1,024.
        tuning: buffer sizes and the number of threads.

    Raises:
        CorruptionError: naming file, tensor and rank.
        FormatError: if two files would have the same name.
    """
    for name in export.documents.keys() & {file.name for file in export.files}:
        raise FormatError(f"two files would be called {name!r}")
    for first in range(0, len(export.files), open_files):
        with ExitStack() as stack:
            batch = export.files[first : first + open_files]
            files = [stack.enter_context(create(file.name)) for file in batch]
            begun = ((number, file.begin(files[number])) for number, file in enumerate(batch))
            regions = [replace(region, file=number) for number, every in begun for region in every]
            fill(files, regions, stored, advance, tuning=tuning)
    for name in sorted(export.documents, key=lambda name: (name in _WRITTEN_LAST, name.endswith(_WRITTEN_LAST))):
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
    names = [os.path.join(folder, name) for folder, _, names in os.walk(directory) for name in names]
    others = {os.path.join(directory, name) for name in (*CONFIGS, OPTIMIZER)}
    if not all(name in others or name.endswith(_SUFFIXES) for name in names):
        return False
    tensor_files = [name for name in names if name.endswith(_SUFFIXES[0])]
    return all(map(_was_exported, tensor_files)) if tensor_files else not names


def _was_exported(path: str) -> bool:
    """Return True if the metadata of a safetensors file name an export as its writer."""
    with open(path, "rb") as file:
        start = file.read(8 + _HEAD_BYTES)
    return _WRITER_ENTRY in start[8 : 8 + int.from_bytes(start[:8], "little")]
