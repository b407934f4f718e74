"""Options and whole files of an export: a file is begun without the bytes of its tensors, which are then filled in.

A plan knows the names, dtypes, shapes and order of all tensors; it has read nothing. Exporting a checkpoint of this
package needs torch only for a torch file, and if dtypes are converted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

from lightning_shardckpt.errors import FormatError, MismatchError
from lightning_shardckpt.format.safetensors_header import OutputTensor
from lightning_shardckpt.sources.key_mapping import KeyMapping, map_names
from lightning_shardckpt.sources.source import Source
from lightning_shardckpt.state.documents import CONFIG, CONFIGS
from lightning_shardckpt.storage.local_files import WRITEBACK_BYTES, NewFile, begin_writeback, write_at
from lightning_shardckpt.transfer.reader import WINDOW_BYTES, read_windows

Format = Literal["torch", "safetensors", "huggingface", "peft"]
Split = Literal["one_file", "one_file_per_tensor", "chunks"]
DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
SIZE_PER_SHARD = 5000.0
"""Default size of chunks in MB."""
_TAKES: dict[str, set[str]] = {
    "torch": {"optimizer", "dtype", "key_mapping"},
    "safetensors": {"split", "size_per_shard", "optimizer", "dtype", "key_mapping"},
    "huggingface": {"size_per_shard", "dtype", "key_mapping"},
    "peft": set(),
}

OPTIMIZER = "optimizer.json"
WRITER = ("writer", "lightning-shardckpt")
"""Metadata of every safetensors file of an export that may replace an earlier one."""
_WRITER_ENTRY, _HEAD_BYTES = '"{}":"{}"'.format(*WRITER).encode(), 4096  # the metadata come first in a header


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
    key_mapping: KeyMapping = field(default_factory=KeyMapping)

    def __post_init__(self) -> None:
        choices = {"format": get_args(Format), "split": get_args(Split), "dtype": DTYPES}
        for name, known in choices.items():
            if (value := getattr(self, name)) is not None and value not in known:
                raise ValueError(f"{name} is one of {', '.join(known)}, got {value!r}")
        given = {name for name in ("split", "size_per_shard", "optimizer", "dtype") if getattr(self, name)}
        given |= set() if self.key_mapping.is_empty else {"key_mapping"}
        if refused := sorted(given - _TAKES[self.format]):
            raise ValueError(f"format {self.format!r} takes no {' and no '.join(refused)}")
        if self.size_per_shard is not None and not (self.files == "chunks" and self.size_per_shard > 0):
            raise ValueError(f"size_per_shard is a positive size in MB for split 'chunks', got {self.size_per_shard}")

    @property
    def files(self) -> Split:
        """The split into safetensors files."""
        return self.split or ("chunks" if self.format == "huggingface" else "one_file")

    @property
    def has_optimizer(self) -> bool:
        """True if the optimizers are exported, too."""
        return self.format == "torch" if self.optimizer is None else self.optimizer

    @property
    def is_file(self) -> bool:
        """True if the output is a file, not a directory."""
        is_one = self.format == "safetensors" and self.files == "one_file" and not self.has_optimizer
        return self.format == "torch" or is_one

    def output_dtype(self, dtype: str) -> str:
        """Return the dtype of a model's tensor in the output for its stored dtype, by safetensors names."""
        is_floating = dtype.startswith(("F", "BF"))
        return DTYPES[self.dtype] if self.dtype is not None and is_floating else dtype

    def select(self, stored: Source) -> Source:
        """Return the stored state under the names of the output, without what is left out.

        Raises:
            ValueError: if entries of the mapping match no name, or give a name several times.
        """
        try:
            selected, problems = map_names(stored, self.key_mapping, optimizers=None if self.has_optimizer else ())
        except MismatchError as error:
            raise ValueError(str(error)) from None
        if problems:
            raise ValueError(f"{stored.path!r}: " + "\n  ".join(problems))
        return selected


class WholeFile(NamedTuple):
    """A file with tensors.

    Attributes:
        name: of the file, which may contain slashes.
        tensors: in any order.
        begin: writes everything but the tensors into the empty file of a descriptor, and returns where each begins.
    """

    name: str
    tensors: Sequence[OutputTensor]
    begin: Callable[[int], Sequence[int]]


@dataclass(slots=True)
class Export:
    """The plan of an export: files with tensors, the content of other files by name, and notes for the user."""

    files: list[WholeFile]
    documents: dict[str, bytes] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """The size of all tensors."""
        return sum(tensor.nbytes for file in self.files for tensor in file.tensors)


def write(
    stored: Source,
    export: Export,
    create: NewFile,
    advance: Callable[[int], Any] = lambda nbytes: None,
    *,
    window_bytes: int = WINDOW_BYTES,
) -> None:
    """Write all files of an export, the config last.

    Args:
        stored: the checkpoint.
        export: the plan.
        create: creates a file.
        advance: called with the number of bytes that were written.
        window_bytes: memory for tensors, which are read, verified, converted and written window by window.

    Raises:
        CorruptionError: naming file, tensor and rank.
        FormatError: if two files would have the same name.
    """
    for name in export.documents.keys() & {file.name for file in export.files}:
        raise FormatError(f"two files would be called {name!r}")
    for planned in export.files:
        with create(planned.name) as file:
            places, tensors, dirty_bytes = [*planned.begin(file)], planned.tensors, 0
            wanted = ((*tensor.source, tensor.box) for tensor in tensors)
            for number, data in read_windows(stored, wanted, window_bytes):
                data = _convert(data, stored.spec(*tensors[number].source).dtype, tensors[number].dtype)
                write_at(file, data, places[number])
                places[number] += len(data)
                advance(len(data))
                dirty_bytes += len(data)
                if dirty_bytes >= WRITEBACK_BYTES:
                    begin_writeback(file)
                    dirty_bytes = 0
    for name in sorted(export.documents, key=lambda name: name == CONFIG):
        with create(name) as file:
            write_at(file, memoryview(export.documents[name]), 0)


def _convert(data: memoryview, stored: str, written: str) -> memoryview:
    """Return numbers of one dtype in another, as torch's ``Tensor.to`` converts them."""
    if stored == written:
        return data
    import torch  # imported here, since it takes two seconds and exports without a conversion don't need it

    from lightning_shardckpt.state.tensor_bytes import TORCH_DTYPES, host_bytes

    return host_bytes(torch.frombuffer(data, dtype=TORCH_DTYPES[stored]).to(TORCH_DTYPES[written]))


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
