"""Lay whole tensors out in safetensors files: names, headers and offsets; no I/O.

Such files are read by the safetensors library: its list of dtypes is shorter than ours, and a header that it would
refuse is refused here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lightning_shardckpt.errors import FormatError
from lightning_shardckpt.format.box import Box, Shape
from lightning_shardckpt.format.safetensors_header import LENGTH_BYTES, build_header
from lightning_shardckpt.format.value_checks import DTYPE_BYTES, bytes_in, check_unpacked

_MAX_HEADER_BYTES = 100_000_000  # of the safetensors library, 0.8
_ALIGNMENT = 64  # of the first tensor: what maps the file uses it in place
_SAFE = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._")
_NAME_BYTES = 255


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """A tensor to write: component and key of the stored one that it is from, and which box of it, if not all."""

    name: str
    dtype: str
    shape: Shape
    source: tuple[str, str]
    box: Box | None = None

    @property
    def nbytes(self) -> int:
        """The file's length in bytes."""
        return bytes_in(self.shape, self.dtype)


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file: its header, and the tensors in the order in which they lie in it, each with where it begins."""

    name: str
    header: bytes
    tensors: tuple[OutputTensor, ...]
    begins: tuple[int, ...]


def container(name: str, tensors: Sequence[OutputTensor], metadata: Mapping[str, str]) -> OutputFile:
    """The layout of one file; the largest elements come first, so that every tensor is aligned.

    Raises:
        FormatError: naming a tensor that safetensors cannot hold.
    """
    for tensor in tensors:
        check_unpacked(tensor.dtype, repr(tensor.name))
    tensors = sorted(tensors, key=lambda tensor: -DTYPE_BYTES[tensor.dtype])
    wrong = next((tensor.name for tensor in tensors if tensor.dtype == "C128"), None)
    if wrong is not None:
        raise FormatError(f"{wrong!r} is complex128, which safetensors lacks; exclude it, or write for torch")
    named = [(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors]
    header, begins = build_header(named, metadata, alignment=_ALIGNMENT)
    nbytes = len(header) - LENGTH_BYTES
    if nbytes > _MAX_HEADER_BYTES:
        raise FormatError(f"{name}: a header of {nbytes} bytes is more than safetensors reads; use split 'chunks'")
    return OutputFile(name, header, tuple(tensors), begins)


def chunks(tensors: Iterable[OutputTensor], limit: int) -> list[list[OutputTensor]]:
    """Tensors in their order, in groups of at most ``limit`` bytes; a larger one is a group of its own.

    >>> def sized(n): return OutputTensor(str(n), "U8", (n,), ("model", "x"))
    >>> [[t.name for t in group] for group in chunks(map(sized, (3, 4, 20, 5)), 8)]
    [['3', '4'], ['20'], ['5']]
    """
    found: list[list[OutputTensor]] = []
    size = 0
    for tensor in tensors:
        if not found or (size + tensor.nbytes > limit and size > 0):
            found.append([])
            size = 0
        found[-1].append(tensor)
        size += tensor.nbytes
    return found


def chunk_names(stem: str, count: int) -> list[str]:
    """Return the names of the files of a model or an optimizer, as Hugging Face has them.

    >>> chunk_names("model", 1), chunk_names("model", 2)
    (['model.safetensors'], ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors'])
    """
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def file_name(stem: str, tensor: str) -> str:
    """The name of the file of one tensor; different for different tensors, also where case is not told apart.

    >>> file_name("model", "a.b-c"), file_name("model", "A/b")
    ('model.a.b%2Dc.safetensors', 'model.%41%2Fb.safetensors')
    """
    safe = "".join(c if c in _SAFE and not c.isupper() else "".join(f"%{b:02X}" for b in c.encode()) for c in tensor)
    name = f"{stem}.{safe}.safetensors"
    if len(name) > _NAME_BYTES:
        raise FormatError(f"{tensor!r} is too long for the name of a file; use split 'chunks'")
    return name


def index_json(containers: Sequence[OutputFile]) -> bytes:
    """The content of the index of several files: which tensor is where, and all their bytes."""
    weight_map = {tensor.name: one.name for one in containers for tensor in one.tensors}
    total = sum(tensor.nbytes for one in containers for tensor in one.tensors)
    found = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(found, indent=2, ensure_ascii=False) + "\n").encode()
