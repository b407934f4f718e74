"""Strict JSON and checks of its values: dtypes, shapes, sizes, names and checksums. FORMAT.md has the rules.

Every value from a file passes one of these checks before it is used; a check returns the value, or raises a FormatError
that quotes a bounded part of it. A checksum is xxh3-64 as 16 hexadecimal digits.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import xxhash

from lightning_shardckpt.errors import FormatError
from lightning_shardckpt.format.layout import Shape

_DTYPES = {
    "F64": (8, "float64"), "F32": (4, "float32"), "F16": (2, "float16"), "BF16": (2, "bfloat16"),
    "I64": (8, "int64"), "I32": (4, "int32"), "I16": (2, "int16"), "I8": (1, "int8"),
    "U64": (8, "uint64"), "U32": (4, "uint32"), "U16": (2, "uint16"), "U8": (1, "uint8"), "BOOL": (1, "bool"),
    "C64": (8, "complex64"), "C128": (16, "complex128"),  # C128 is our addition, stored as pairs of F64
    "F8_E4M3": (1, "float8_e4m3fn"), "F8_E5M2": (1, "float8_e5m2"), "F8_E8M0": (1, "float8_e8m0fnu"),
    "F8_E4M3FNUZ": (1, "float8_e4m3fnuz"), "F8_E5M2FNUZ": (1, "float8_e5m2fnuz"),
}
DTYPE_BYTES = {name: nbytes for name, (nbytes, _) in _DTYPES.items()}
"""Bytes per element of every dtype that a checkpoint can hold."""
TORCH_NAMES = {name: torch_name for name, (_, torch_name) in _DTYPES.items()}
"""The name in torch of every dtype that a checkpoint can hold."""

MAX_NDIM = 64  # as in numpy and torch
SAVE_ID_LENGTH = 32

_BOUNDED = reprlib.Repr()
_BOUNDED.maxlevel, _BOUNDED.maxlist, _BOUNDED.maxtuple, _BOUNDED.maxdict = 4, 20, 20, 20
_BOUNDED.maxstring = _BOUNDED.maxlong = _BOUNDED.maxother = 200


def shown(value: Any) -> str:
    """Return a value's repr for a message, cut to a bounded length, also if shared values would let it grow."""
    text = _BOUNDED.repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def check_size(value: Any) -> int:
    """Return an integer from 0 to 2^63 - 1."""
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise FormatError(f"{shown(value)} is not a size")
    return value


def check_shape(value: Any) -> Shape:
    """Return a list of at most 64 sizes as a tuple."""
    shape = tuple(map(check_size, value))
    if len(shape) > MAX_NDIM:
        raise FormatError(f"{len(shape)} dims, more than {MAX_NDIM}")
    return shape


def bytes_in(shape: Sequence[int], dtype: str) -> int:
    """Return the bytes of a tensor.

    Raises:
        FormatError: if it has 2^63 bytes or more. Lengths of 0 count as 1, since strides are computed from the others.
    """
    if prod(n or 1 for n in shape) * DTYPE_BYTES[dtype] >= 1 << 63:
        raise FormatError(f"{dtype} {tuple(shape)} has more than 2^63 bytes")
    return prod(shape) * DTYPE_BYTES[dtype]


def check_dtype(value: Any) -> str:
    """Return the name of a dtype of the format."""
    if not isinstance(value, str) or value not in DTYPE_BYTES:
        raise FormatError(f"unknown dtype {shown(value)}")
    return value


def text_check(pattern: str, expected: str) -> Callable[[Any], str]:
    """Return the check for text of a pattern."""
    compiled = re.compile(pattern)

    def check(value: Any) -> str:
        if not isinstance(value, str) or not compiled.fullmatch(value):
            raise FormatError(f"{shown(value)} is not {expected}")
        return value

    return check


check_file_name = text_check(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}", "a file name that a checkpoint may use")
"""The name stays in its directory."""
_check_unicode = text_check(r"[^\ud800-\udfff]*", "text that UTF-8 can hold")  # JSON can escape half a surrogate pair
_check_hex = text_check(r"[0-9a-f]*", "a string of checksums")


def check_text(value: Any) -> str:
    """Return text that UTF-8 can hold."""
    return value if isinstance(value, str) and value.isascii() else _check_unicode(value)


def check_digests(value: Any, count: int) -> str:
    """Return the digits of ``count`` checksums."""
    if len(text := _check_hex(value)) != DIGITS * count:
        raise FormatError(f"{len(text)} digits of checksums, expected {DIGITS} for each of {count} blocks")
    return text


DIGITS = 16
checksum: Callable[[bytes | memoryview], str] = xxhash.xxh3_64_hexdigest
"""Return the xxh3-64 of bytes as 16 hex digits."""


def checksum_blocks(data: memoryview, block: int) -> str:
    """Return the checksums of all blocks of ``block`` bytes as one string; the last block may be shorter."""
    if 0 < len(data) <= block:  # a fast path for small tensors, which are many
        return checksum(data)
    return "".join([checksum(data[at : at + block]) for at in range(0, len(data), block)])


def slice_checksums(checksums: str, first: int, count: int) -> str:
    """Return ``count`` of the checksums, from block number ``first`` on."""
    return checksums[first * DIGITS : (first + count) * DIGITS]


# ── JSON ──────────────────────────────────────────────────────────────────────────────────────────────────────────────

MAX_JSON_BYTES = 1 << 26
MAX_VALUES = 1 << 21  # in one JSON text; Python needs up to 80 bytes for each
MAX_DEPTH = 128

compact: Callable[[Any], str] = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode
"""Return a value as JSON without spaces."""


def parse_json(text: bytes, where: str) -> Any:
    """Parse JSON without duplicate keys, NaN or deep nesting, and of limited size.

    Raises:
        FormatError: with ``where`` and the position of the error.
    """
    check_json_size(text, where)
    too_deep = f"{where}: not valid JSON: nested deeper than {MAX_DEPTH} levels"
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_build_object, parse_constant=_refuse_constant)
    except RecursionError:
        raise FormatError(too_deep) from None
    except ValueError as error:
        raise FormatError(f"{where}: not valid JSON: {error}") from None
    level, nested = [value] if isinstance(value, dict | list) else [], {dict, list}
    for _ in range(MAX_DEPTH):  # readers of the value recurse
        values = [item.values() if type(item) is dict else item for item in level]
        level = [inner for items in values for inner in items if type(inner) in nested]
    if level:
        raise FormatError(too_deep)
    return value


def check_json_size(text: bytes, where: str) -> None:
    """Raise a FormatError for JSON that is too large to parse. It is not parsed: commas in strings count, too."""
    if len(text) > MAX_JSON_BYTES:
        raise FormatError(f"{where}: {len(text)} bytes of JSON, more than the limit of {MAX_JSON_BYTES}")
    if len(text) > MAX_VALUES and sum(map(text.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise FormatError(f"{where}: JSON of more than {MAX_VALUES} values")


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise ValueError(f"duplicate key {shown(counts.most_common(1)[0][0])}")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
