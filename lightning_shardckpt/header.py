"""What is in a shard file? A safetensors header: names, dtypes, byte ranges; and strict JSON, which every index uses.

The header also carries the corner of every shard in the form that torch's HuggingFaceStorageReader reads
(``DCP_SHARDING_INFO``), so that torch alone can load and reshard. Source of the container format: the safetensors
README; of the key: ``torch/distributed/checkpoint/_hf_utils.py`` (torch 2.13).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from typing import Any

import xxhash

from lightning_shardckpt.box import Shape
from lightning_shardckpt.errors import FormatError

DTYPE_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
    "C128": 16,
}
"""Bytes per element of every dtype that a checkpoint can hold. C128 is ours: stored as pairs of F64."""

MAX_HEADER_BYTES = 100_000_000  # the safetensors library refuses more
MAX_JSON_BYTES = 1 << 28
_SAVE_ID = "save_id"


def checksum(*parts: bytes | memoryview) -> str:
    """xxh3-64 of the concatenation, as 16 hex digits.

    >>> checksum(b"abc") == checksum(b"a", b"bc")
    True
    """
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a shard file: a box of the tensor ``key`` whose corner is ``start``."""

    key: str
    dtype: str
    shape: Shape
    start: Shape

    @property
    def nbytes(self) -> int:
        """Length of the data in bytes."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


def encode(entries: list[Entry], save_id: str) -> tuple[bytes, list[int]]:
    """The first bytes of a shard file, and the file offset at which each entry's data begins, in order.

    The data of the entries follow without gaps; the header is padded so that they begin at a multiple of 8.
    """
    header: dict[str, Any] = {}
    corners, begins, offset = {}, [], 0
    if any(entry.key == "__metadata__" for entry in entries):
        raise FormatError("no tensor can be called '__metadata__': safetensors keeps the name for itself")
    for entry in entries:
        pair = entry.dtype == "C128"
        header[entry.key] = {
            "dtype": "F64" if pair else entry.dtype,
            "shape": [*entry.shape, 2] if pair else list(entry.shape),
            "data_offsets": [offset, offset + entry.nbytes],
        }
        corners[entry.key] = {"saved_offsets": [*entry.start, 0] if pair else list(entry.start)}
        begins.append(offset)
        offset += entry.nbytes
    header["__metadata__"] = {
        "format": "pt",
        "DCP_SHARDING_INFO": json.dumps(corners),
        "DCP_VERSION": "1.0",
        _SAVE_ID: save_id,
    }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise FormatError(
            f"a shard file of {len(entries)} tensors needs a header of {len(text)} bytes, more than "
            f"{MAX_HEADER_BYTES}; use a smaller size_per_shard"
        )
    return len(text).to_bytes(8, "little") + text, [8 + len(text) + begin for begin in begins]


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a tensor lies in a shard file, as the file itself says; ``begin`` is an offset in the file."""

    dtype: str
    shape: Shape
    begin: int
    nbytes: int


def decode(text: bytes, where: str) -> tuple[dict[str, Stored], str]:
    """Tensors and save id of a shard file from its header (without the 8 length bytes).

    Raises:
        FormatError: if the header is not a valid safetensors header of ours.
    """
    header = parse_json(text, where)
    if not isinstance(header, dict) or not isinstance(header.get("__metadata__"), dict):
        raise FormatError(f"{where}: the header is not a JSON object with __metadata__")
    save_id = str(header.pop("__metadata__").get(_SAVE_ID))
    try:
        found = {key: _stored(value, 8 + len(text)) for key, value in header.items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"{where}: the header describes a tensor wrongly: {error!r}") from None
    return found, save_id


def _stored(value: dict[str, Any], data: int) -> Stored:
    begin, end = value["data_offsets"]
    dtype, shape = value["dtype"], tuple(value["shape"])
    if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
        raise ValueError("lengths must be non-negative integers")
    if prod(shape) * DTYPE_BYTES[dtype] != end - begin:
        raise ValueError(f"{dtype} {shape} does not fill {end - begin} bytes")
    return Stored(dtype, shape, data + begin, end - begin)


def parse_json(text: bytes, where: str) -> Any:
    """JSON without duplicate keys, NaN or deep nesting.

    Raises:
        FormatError: with ``where`` and the position, for anything else.
    """
    if len(text) > MAX_JSON_BYTES:
        raise FormatError(f"{where}: {len(text)} bytes of JSON, more than the limit of {MAX_JSON_BYTES}")
    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where}: not valid JSON: {error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [k for k, _ in pairs]
        raise ValueError(f"duplicate key {next(k for k in keys if keys.count(k) > 1)!r}")
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
