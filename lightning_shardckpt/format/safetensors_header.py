"""Headers of safetensors files: one builder, one reader, one parser, for our own files and for those of others.

A file begins with the length of its header, eight bytes, little-endian; then comes the header, a JSON object with the
dtype, the shape and the byte range of each tensor; then the tensors' bytes. Source: the safetensors README.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from lightning_shardckpt.errors import FormatError
from lightning_shardckpt.format.box import Shape
from lightning_shardckpt.format.strict_json import MAX_JSON_BYTES, parse_json, texts
from lightning_shardckpt.format.value_checks import (
    PACKED_BITS,
    bytes_in,
    check_dtype,
    check_shape,
    check_size,
    check_text,
    check_texts,
    shown,
)

MAX_HEADER_BYTES = MAX_JSON_BYTES  # the safetensors library takes 100,000,000
LENGTH_BYTES = 8
_METADATA = "__metadata__"


NamedTensor: TypeAlias = tuple[str, str, Shape]
"""A tensor to describe in a header: its name, a dtype that safetensors has, and its shape."""


def build_header(
    tensors: Iterable[NamedTensor], metadata: Mapping[str, str], *, alignment: int, metadata_first: bool = True
) -> tuple[bytes, tuple[int, ...]]:
    """The start of a file in which the tensors follow one another without gaps, and where each of them begins.

    Args:
        tensors: in the order of the file.
        metadata: of the file, texts by key.
        alignment: the header is padded so that the first tensor begins at a multiple of so many bytes.
        metadata_first: whether the metadata stand before the tensors, rather than after them.

    Returns:
        The bytes before the first tensor, and the offset of every tensor in the file, in bytes.

    Raises:
        FormatError: for a name that a header cannot hold.
    """
    tensors = tuple(tensors)
    names = check_texts([name for name, _, _ in tensors])
    if _METADATA in names:
        raise FormatError(f"no tensor can be called {_METADATA!r}: safetensors keeps the name for itself")
    kinds: dict[tuple[str, Shape], tuple[str, int]] = {}  # many tensors are alike
    items, offsets, offset = [], [], 0
    for (_, dtype, shape), name in zip(tensors, texts(names), strict=True):
        kind = kinds.get((dtype, shape))
        if kind is None:
            kind = _compact({"dtype": dtype, "shape": shape})[1:-1], bytes_in(shape, dtype)
            kinds[dtype, shape] = kind
        about, nbytes = kind
        items.append(f'{name}:{{{about},"data_offsets":[{offset},{offset + nbytes}]}}')
        offsets.append(offset)
        offset += nbytes
    items.insert(0 if metadata_first else len(items), f'"{_METADATA}":{_compact(dict(metadata))}')
    text = f"{{{','.join(items)}}}".encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % alignment)
    start = len(text).to_bytes(LENGTH_BYTES, "little") + text
    return start, tuple([len(start) + offset for offset in offsets])


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


class HeaderLengthError(ValueError):
    """A file says that its header is longer than the file, or than any header may be. Callers say which file."""

    def __init__(self, length: int, file_nbytes: int) -> None:
        super().__init__(f"the header claims {length} bytes of a file of {file_nbytes}")
        self.length = length


def read_header(read_into: Callable[[int, memoryview], object], file_nbytes: int) -> bytes:
    """The bytes of a file before its first tensor: the length of the header and the header, not parsed.

    Args:
        read_into: fills memory from an offset of the file on; what it raises is passed on.
        file_nbytes: length of the file.

    Raises:
        HeaderLengthError: before memory is taken for a header that cannot be there.
    """
    prefix = bytearray(LENGTH_BYTES)
    read_into(0, memoryview(prefix))
    length = int.from_bytes(prefix, "little")
    if length > min(file_nbytes - LENGTH_BYTES, MAX_HEADER_BYTES):
        raise HeaderLengthError(length, file_nbytes)
    text = bytearray(length)
    read_into(LENGTH_BYTES, memoryview(text))
    return bytes(prefix + text)


@dataclass(frozen=True, slots=True)
class HeaderTensor:
    """The place of a tensor in a file, as the file itself says; ``begin`` is an offset in the file."""

    dtype: str
    shape: Shape
    begin: int
    nbytes: int


class Header(NamedTuple):
    """The header of a file: its tensors by name, and ``__metadata__``, of which nothing was checked."""

    tensors: dict[str, HeaderTensor]
    metadata: dict[str, Any]


def parse_header(start: bytes, where: str, *, needs_metadata: bool = True) -> Header:
    """Return what the first bytes of a file say, as ``read_header`` returns them.

    Args:
        start: the length of the header, and the header.
        where: the file, for messages.
        needs_metadata: whether a header is refused that none of ours is: without ``__metadata__``, or with dtypes of
            which torch has no tensors.

    Raises:
        FormatError: if it is no header of safetensors, or the tensors do not fill the file without gap and overlap.
    """
    header = parse_json(start[LENGTH_BYTES:], where)
    if not isinstance(header, dict):
        found = " with __metadata__" if needs_metadata else ""
        raise FormatError(f"{where}: the header is not a JSON object{found}")
    metadata = header.pop(_METADATA, None)
    if not isinstance(metadata, dict):
        if needs_metadata:
            raise FormatError(f"{where}: the header is not a JSON object with __metadata__")
        metadata = {}
    return Header(_tensors(header, len(start), where, packed=not needs_metadata), metadata)


def _tensors(header: dict[str, Any], data: int, where: str, *, packed: bool) -> dict[str, HeaderTensor]:
    """The tensors of a file whose data begins at ``data``."""
    try:
        found = {check_text(key): _tensor(value, data, packed) for key, value in header.items()}
        position = data
        for key, stored in sorted(found.items(), key=lambda item: (item[1].begin, item[1].nbytes)):
            if stored.begin != position:
                kind = "overlaps the data before it" if stored.begin < position else "follows a gap"
                raise ValueError(f"{key!r} {kind}: it begins at byte {stored.begin}, not {position}")
            position += stored.nbytes
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"{where}: the header describes a tensor wrongly: {shown(error)}") from None
    return found


def _tensor(value: dict[str, Any], data: int, packed: bool) -> HeaderTensor:
    begin, end = map(check_size, value["data_offsets"])
    dtype, shape = value["dtype"], check_shape(value["shape"])
    if not (packed and dtype in PACKED_BITS):
        check_dtype(dtype)
    if bytes_in(shape, dtype) != end - begin:
        raise ValueError(f"{dtype} {shape} does not fill {end - begin} bytes")
    return HeaderTensor(dtype, shape, data + begin, end - begin)
