"""Headers of safetensors files: shard files, exports for other programs, files of other programs.

A file begins with the length of its header (eight bytes, little-endian). The header follows, a JSON object with the
dtype, the shape and the byte range of each tensor, and then the tensors' bytes. Source: the safetensors README.

The header of a shard file also has the save id, and the position of each shard in its tensor, in the form of torch's
HuggingFaceStorageReader, so that torch alone can load and reshard the tensors. Source of ``DCP_SHARDING_INFO``:
``torch/distributed/checkpoint/_hf_utils.py`` (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from lightning_shardckpt.errors import FormatError
from lightning_shardckpt.format.layout import Box, Shape
from lightning_shardckpt.format.value_checks import (
    MAX_JSON_BYTES,
    SAVE_ID_LENGTH,
    bytes_in,
    check_dtype,
    check_shape,
    check_size,
    check_text,
    compact,
    parse_json,
    shown,
)

LENGTH_BYTES = 8
_METADATA = "__metadata__"


def build_header(
    tensors: Iterable[tuple[str, str, Shape]],
    metadata: Mapping[str, str],
    *,
    alignment: int,
    metadata_first: bool = True,
) -> tuple[bytes, tuple[int, ...]]:
    """Return the bytes before the first tensor of a file, and the offset of every tensor in it, without gaps.

    Args:
        tensors: name, dtype and shape of the tensors, in the order of the file; dtypes are those of safetensors.
        metadata: strings for ``__metadata__``.
        alignment: the header is padded so that the first tensor begins at a multiple of this many bytes.
        metadata_first: put the metadata before the tensors, not after them.

    Raises:
        FormatError: for a name that a header cannot hold.
    """
    items, offsets, offset = [], [], 0
    for name, dtype, shape in tensors:
        if check_text(name) == _METADATA:
            raise FormatError(f"no tensor can be called {_METADATA!r}: safetensors reserves the name")
        end = offset + bytes_in(shape, dtype)
        items.append(f'{compact(name)}:{{"dtype":"{dtype}","shape":{compact(shape)},"data_offsets":[{offset},{end}]}}')
        offsets.append(offset)
        offset = end
    items.insert(0 if metadata_first else len(items), f'"{_METADATA}":{compact(dict(metadata))}')
    header = f"{{{','.join(items)}}}".encode()
    header += b" " * (-(LENGTH_BYTES + len(header)) % alignment)
    start = len(header).to_bytes(LENGTH_BYTES, "little") + header
    return start, tuple([len(start) + offset for offset in offsets])


_SAVE_ID, SHARDING_INFO = "save_id", "DCP_SHARDING_INFO"
_NO_ID = "0" * SAVE_ID_LENGTH
_ALIGNMENT = 8

HeaderEntry: TypeAlias = tuple[str, str, Shape, Shape]
"""A box in a shard file: the tensor's key and dtype, and the shape and the start of the box."""


class ShardHeader(NamedTuple):
    """The header of a shard file before and after its save id, and the offset of each entry's data in the file."""

    parts: Sequence[bytes]
    begins: tuple[int, ...]

    def of(self, save_id: str) -> bytes:
        """Return the bytes of the header for one save."""
        return save_id.encode().join(self.parts)


def plan_header(entries: Sequence[HeaderEntry]) -> ShardHeader:
    """Return the header of a shard file in which the entries' data follow one another without gaps.

    Raises:
        FormatError: if a header cannot hold a name, or is longer than a reader accepts.
    """
    starts = ((key, [*start, 0] if dtype == "C128" else [*start]) for key, dtype, _, start in entries)
    info = ", ".join([f'{compact(key)}: {{"saved_offsets": {start}}}' for key, start in starts])
    tensors = [(key, *to_header_type(dtype, shape)) for key, dtype, shape, _ in entries]
    metadata = {"format": "pt", SHARDING_INFO: f"{{{info}}}", "DCP_VERSION": "1.0", _SAVE_ID: _NO_ID}
    header, begins = build_header(tensors, metadata, alignment=_ALIGNMENT, metadata_first=False)
    nbytes = len(header) - LENGTH_BYTES
    if nbytes > MAX_JSON_BYTES:  # the safetensors library accepts 100,000,000
        raise FormatError(
            f"a shard file of {len(entries)} tensors needs a header of {nbytes} bytes, more than "
            f"{MAX_JSON_BYTES}; use a smaller size_per_shard"
        )
    return ShardHeader(header.rsplit(_NO_ID.encode(), 1), begins)  # only brackets and spaces follow it


def to_header_type(dtype: str, shape: Shape) -> tuple[str, Shape]:
    """Return the dtype and shape that a header has; C128, which safetensors lacks, is stored as pairs of F64."""
    return ("F64", (*shape, 2)) if dtype == "C128" else (dtype, shape)


def read_header(read_into: Callable[[int, memoryview], object], file_nbytes: int) -> bytes:
    """Return the bytes of a file before its first tensor, unparsed: the length of the header and the header.

    ``read_into`` fills memory with the file's bytes from an offset on. Raises an EOFError for a length that the file
    can't have, before memory is allocated for the header.
    """
    prefix = bytearray(LENGTH_BYTES)
    read_into(0, memoryview(prefix))
    length = int.from_bytes(prefix, "little")
    if length > min(file_nbytes - LENGTH_BYTES, MAX_JSON_BYTES):
        raise EOFError(f"the header claims {length} bytes of a file of {file_nbytes}")
    text = bytearray(length)
    read_into(LENGTH_BYTES, memoryview(text))
    return bytes(prefix + text)


class HeaderTensor(NamedTuple):
    """A tensor as the header of its file describes it; ``begin`` is an offset in the file."""

    dtype: str
    shape: Shape
    begin: int
    nbytes: int


def parse_header(start: bytes, where: str) -> tuple[dict[str, HeaderTensor], dict[str, Any]]:
    """Return the tensors of a file by name, and its unchecked ``__metadata__``, from the result of ``read_header``.

    Raises:
        FormatError: naming ``where``, for no safetensors header, or tensors that follow one another with gaps.
    """
    header = parse_json(start[LENGTH_BYTES:], where)
    metadata = header.pop(_METADATA, {}) if isinstance(header, dict) else None
    if not isinstance(metadata, dict):
        raise FormatError(f"{where}: the header, or its {_METADATA}, is not a JSON object")
    try:
        tensors = {check_text(key): _tensor(value, len(start)) for key, value in header.items()}
        position = len(start)
        for key, stored in sorted(tensors.items(), key=lambda item: item[1][2:]):
            if stored.begin != position:
                error = "overlaps the data before it" if stored.begin < position else "follows a gap"
                raise ValueError(f"{key!r} {error}: it begins at byte {stored.begin}, not {position}")
            position += stored.nbytes
    except (LookupError, TypeError, ValueError, AttributeError) as problem:
        raise FormatError(f"{where}: the header describes a tensor wrongly: {shown(problem)}") from None
    return tensors, metadata


def _tensor(value: dict[str, Any], data: int) -> HeaderTensor:
    begin, end = map(check_size, value["data_offsets"])
    dtype, shape = check_dtype(value["dtype"]), check_shape(value["shape"])
    if bytes_in(shape, dtype) != end - begin:
        raise ValueError(f"{dtype} {shape} does not fill {end - begin} bytes")
    return HeaderTensor(dtype, shape, data + begin, end - begin)


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
