"""Checks of the values in a checkpoint's JSON: dtypes, shapes, sizes, names and checksums.

Every value from a file passes one of these checks before it is used. Messages quote a bounded part of an invalid
value, since a hostile file can contain values of any length.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Sequence
from math import prod
from typing import Any

from lightning_shardckpt.errors import FormatError
from lightning_shardckpt.format.box import Shape

DTYPE_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("BOOL", "I8", "U8"), 1),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0"), 1),
    "C128": 16,
}
"""Bytes per element of every dtype that a checkpoint can hold. C128 is our addition, stored as pairs of F64."""

TORCH_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
    "C128": "complex128",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
"""The name in torch of every dtype that a checkpoint can hold, by its name in the format."""

PACKED_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
"""Bits per element of safetensors dtypes that torch lacks. Files of other programs may have them, our files don't."""

MAX_NDIM = 64  # as in numpy and torch
SAVE_ID_LENGTH = 32
_SAVE_ID_PATTERN = re.compile(rf"[0-9a-f]{{{SAVE_ID_LENGTH}}}")
_FILE_NAME_PATTERN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_DIGEST_PATTERN = re.compile(r"[0-9a-f]{16}")
_HEX_PATTERN = re.compile(r"[0-9a-f]*")

_BOUNDED = reprlib.Repr()
_BOUNDED.maxlevel = 4
_BOUNDED.maxlist = _BOUNDED.maxtuple = _BOUNDED.maxdict = _BOUNDED.maxset = _BOUNDED.maxfrozenset = 20
_BOUNDED.maxstring = _BOUNDED.maxlong = _BOUNDED.maxother = 250


def shown(value: Any) -> str:
    """Return a value's repr for a message, cut to a bounded length."""
    nested = isinstance(value, list | tuple | dict | set | frozenset) and any(
        isinstance(item, list | tuple | dict | set | frozenset)
        for item in (value.values() if isinstance(value, dict) else value)
    )
    text = _BOUNDED.repr(value) if nested else repr(value)  # the repr of shared nested values can grow exponentially
    return text if len(text) <= 200 else f"{text[:200]}…"


def refuse_lfs_pointer(start: bytes | bytearray, where: str) -> None:
    """Refuse the text that Git keeps in place of a large file.

    Args:
        start: the first bytes of a file, at least 24 if it has them.
        where: names the file in errors.

    Raises:
        FormatError: if the file is such a text.
    """
    if start.startswith(b"version https://git-lfs."):
        raise FormatError(
            f"{where}: a pointer of Git LFS, not the file itself. Run `git lfs pull` in the repository, or download "
            "the file."
        )


def check_size(value: Any) -> int:
    """Return ``value`` if it is an integer from 0 to 2^63 - 1, else raise FormatError."""
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise FormatError(f"{shown(value)} is not a size")
    return value


def check_shape(value: Any) -> Shape:
    """Return a list of at most 64 lengths as a tuple; raise FormatError if it is not one."""
    shape = tuple(map(check_size, value))
    if len(shape) > MAX_NDIM:
        raise FormatError(f"{len(shape)} dims, more than {MAX_NDIM}")
    return shape


def bytes_in(shape: Sequence[int], dtype: str) -> int:
    """Return the bytes of a tensor.

    Raises:
        FormatError: if it has 2^63 bytes or more. Lengths of 0 count as 1, since strides are computed from the others.
    """
    bits = PACKED_BITS[dtype] if dtype in PACKED_BITS else 8 * DTYPE_BYTES[dtype]
    if prod(n or 1 for n in shape) * bits >= 1 << 66:
        raise FormatError(f"{dtype} {tuple(shape)} has more than 2^63 bytes")
    return prod(shape) * bits // 8


def check_save_id(value: Any) -> str:
    """Return ``value`` if it is 32 hexadecimal digits, else raise FormatError."""
    if not isinstance(value, str) or not _SAVE_ID_PATTERN.fullmatch(value):
        raise FormatError(f"{shown(value)} is not a save id")
    return value


def check_dtype(value: Any) -> str:
    """Return ``value`` if it is the name of a dtype of the format, else raise FormatError."""
    if not isinstance(value, str) or value not in DTYPE_BYTES:
        raise FormatError(f"unknown dtype {shown(value)}")
    return value


def check_unpacked(dtype: str, where: str) -> None:
    """Refuse to read a tensor whose elements are smaller than a byte.

    Raises:
        FormatError: with ``where``, if torch has no tensors of this dtype.
    """
    if dtype in PACKED_BITS:
        raise FormatError(
            f"{where} has dtype {dtype}, which torch lacks: leave it out (strict=False, a key "
            "mapping to None, an export of other keys), or convert it with the program that wrote it"
        )


def check_file_name(value: Any) -> str:
    """Return ``value`` if it is a base name that stays in its directory, else raise FormatError."""
    if not isinstance(value, str) or not _FILE_NAME_PATTERN.fullmatch(value):
        raise FormatError(f"{shown(value)} is not a file name that a checkpoint may use")
    return value


def check_digest(value: Any) -> str:
    """Return ``value`` if it is 16 hexadecimal digits, else raise FormatError."""
    if not isinstance(value, str) or not _DIGEST_PATTERN.fullmatch(value):
        raise FormatError(f"{shown(value)} is not a checksum")
    return value


def check_digests(value: Any, count: int) -> str:
    """Return ``value`` if it is the hexadecimal digits of ``count`` checksums, else raise FormatError."""
    if not isinstance(value, str) or not _HEX_PATTERN.fullmatch(value):
        raise FormatError(f"{shown(value)} is not a string of checksums")
    if len(value) != 16 * count:
        raise FormatError(f"{len(value)} digits of checksums, expected 16 for each of {count} blocks")
    return value


def check_texts(values: list[Any]) -> list[str]:
    """Return ``values`` if each passes ``check_text``, else raise FormatError. Fast for many values."""
    are_plain = set(map(type, values)) <= {str} and "".join(values).isascii()
    return values if are_plain else list(map(check_text, values))


def check_text(value: Any) -> str:
    """Return ``value`` if it is a string that UTF-8 can encode (JSON can escape half a surrogate pair), else raise."""
    if not isinstance(value, str):
        raise FormatError(f"{shown(value)} is not text")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise FormatError(f"{shown(value)} is not text that UTF-8 can hold") from None
    return value
