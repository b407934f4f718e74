"""Plans of safetensors files with whole tensors: names, headers and offsets; no I/O.

The safetensors library reads these files. It has fewer dtypes than our format, and headers that it would refuse are
refused here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lightning_shardckpt.errors import FormatError
from lightning_shardckpt.format.box import Box, Shape
from lightning_shardckpt.format.safetensors_header import LENGTH_BYTES, build_header
from lightning_shardckpt.format.value_checks import DTYPE_BYTES, bytes_in, check_unpacked

_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library, 0.8
_ALIGNMENT = 64  # of the first tensor, so that programs that map the file can use it in place
_SAFE = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._")
_NAME_BYTES = 255


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """A tensor to write, and its source: (component, key) of a stored tensor and a box of it (None: the whole)."""

    name: str
    dtype: str
    shape: Shape
    source: tuple[str, str]
    box: Box | None = None

    @property
    def nbytes(self) -> int:
        """Length of the tensor in bytes."""
        return bytes_in(self.shape, self.dtype)


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file: its header, its tensors in stored order, and the offset at which each begins."""

    name: str
    header: bytes
    tensors: tuple[OutputTensor, ...]
    begins: tuple[int, ...]


def plan_file(name: str, tensors: Sequence[OutputTensor], metadata: Mapping[str, str]) -> OutputFile:
    """Return the plan of a file; the widest elements come first, so that every tensor is aligned.

    Raises:
        FormatError: naming a tensor that safetensors cannot hold.
    """
    for tensor in tensors:
        check_unpacked(tensor.dtype, repr(tensor.name))
    tensors = sorted(tensors, key=lambda tensor: -DTYPE_BYTES[tensor.dtype])
    complex128 = next((tensor.name for tensor in tensors if tensor.dtype == "C128"), None)
    if complex128 is not None:
        raise FormatError(f"{complex128!r} is complex128, which safetensors lacks; leave it out, or write for torch")
    named = [(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors]
    header, begins = build_header(named, metadata, alignment=_ALIGNMENT)
    nbytes = len(header) - LENGTH_BYTES
    if nbytes > _MAX_HEADER_BYTES:
        raise FormatError(f"{name}: a header of {nbytes} bytes is more than safetensors reads; use split 'chunks'")
    return OutputFile(name, header, tuple(tensors), begins)


def group_by_size(tensors: Iterable[OutputTensor], limit: int) -> list[list[OutputTensor]]:
    """Group tensors, in their order, into groups of at most ``limit`` bytes; a larger tensor gets its own group.

    >>> def sized(n): return OutputTensor(str(n), "U8", (n,), ("model", "x"))
    >>> [[t.name for t in group] for group in group_by_size(map(sized, (3, 4, 20, 5)), 8)]
    [['3', '4'], ['20'], ['5']]
    """
    groups: list[list[OutputTensor]] = []
    size = 0
    for tensor in tensors:
        if not groups or (size + tensor.nbytes > limit and size > 0):
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.nbytes
    return groups


def name_chunks(stem: str, count: int) -> list[str]:
    """Return the names of a model's or optimizer's files by the convention of Hugging Face.

    >>> name_chunks("model", 1), name_chunks("model", 2)
    (['model.safetensors'], ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors'])
    """
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def name_tensor_file(stem: str, tensor: str) -> str:
    """Return the file name of a single tensor; unique per tensor even on case-insensitive file systems.

    >>> name_tensor_file("model", "a.b-c"), name_tensor_file("model", "A/b")
    ('model.a.b%2Dc.safetensors', 'model.%41%2Fb.safetensors')
    """
    safe = "".join(c if c in _SAFE and not c.isupper() else "".join(f"%{b:02X}" for b in c.encode()) for c in tensor)
    name = f"{stem}.{safe}.safetensors"
    if len(name) > _NAME_BYTES:
        raise FormatError(f"{tensor!r} is too long for the name of a file; use split 'chunks'")
    return name


def build_index(files: Sequence[OutputFile]) -> bytes:
    """Return the content of Hugging Face's index of several files: the file of each tensor, and the total size."""
    weight_map = {tensor.name: file.name for file in files for tensor in file.tensors}
    total = sum(tensor.nbytes for file in files for tensor in file.tensors)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()
