"""What is in a shard file? A safetensors header: names, dtypes, byte ranges; and strict JSON, which every index uses.

The header also carries the corner of every shard in the form that torch's HuggingFaceStorageReader reads
(``DCP_SHARDING_INFO``), so that torch alone can load and reshard. Source of the container format: the safetensors
README; of the key: ``torch/distributed/checkpoint/_hf_utils.py`` (torch 2.13).
"""

from __future__ import annotations

import json
import re
import reprlib
from collections import Counter
from collections.abc import Sequence
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

MAX_JSON_BYTES = 1 << 26
MAX_HEADER_BYTES = MAX_JSON_BYTES  # the safetensors library takes 100,000,000
MAX_VALUES = 1 << 21  # of one JSON text: Python needs up to 80 bytes for each
MAX_DEPTH = 128
_ONE_KIND = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - set(b'[]{}"'))
MAX_NDIM = 64  # as in numpy and torch
SAVE_ID_LENGTH = 32
_SAVE_ID = "save_id"
_SAVE_ID_PATTERN = re.compile(rf"[0-9a-f]{{{SAVE_ID_LENGTH}}}")
_FILE_NAME_PATTERN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_DIGEST_PATTERN = re.compile(r"[0-9a-f]{16}")
_HEX_PATTERN = re.compile(r"[0-9a-f]*")


def checksum(*parts: bytes | memoryview) -> str:
    """xxh3-64 of the concatenation, as 16 hex digits.

    >>> checksum(b"abc") == checksum(b"a", b"bc")
    True
    """
    if len(parts) == 1:
        return xxhash.xxh3_64_hexdigest(parts[0])
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def block_checksums(data: memoryview, block: int) -> tuple[str, ...]:
    """The checksum of every ``block`` bytes; the last may be shorter. None for no bytes."""
    digest = xxhash.xxh3_64_hexdigest  # not ``checksum``: there are many blocks
    return tuple([digest(data[at : at + block]) for at in range(0, len(data), block)])


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


@dataclass(frozen=True, slots=True)
class Header:
    """The first bytes of a shard file but for the save id, and where in the file each entry's data begins, in order."""

    _before_id: bytes
    _behind_id: bytes
    begins: tuple[int, ...]

    def of(self, save_id: str) -> bytes:
        """The bytes for one save."""
        return self._before_id + save_id.encode() + self._behind_id


def plan_header(entries: Sequence[Entry]) -> Header:
    """The header of a file in which the data of the entries follow one another without gaps.

    It is padded so that they begin at a multiple of 8.
    """
    if any(entry.key == "__metadata__" for entry in entries):
        raise FormatError("no tensor can be called '__metadata__': safetensors keeps the name for itself")
    names = texts([check_text(entry.key) for entry in entries])
    kinds: dict[tuple[str, Shape, Shape], tuple[str, str, int]] = {}  # many tensors are alike
    items, corners, begins, offset = [], [], [], 0
    for entry, name in zip(entries, names, strict=True):
        kind = entry.dtype, entry.shape, entry.start
        if kind not in kinds:
            kinds[kind] = _kind_to_json(entry)
        about, corner, nbytes = kinds[kind]
        items.append(f'{name}:{{{about},"data_offsets":[{offset},{offset + nbytes}]}}')
        corners.append(f"{name}: {corner}")
        begins.append(offset)
        offset += nbytes
    metadata = {
        "format": "pt",
        "DCP_SHARDING_INFO": f"{{{', '.join(corners)}}}",
        "DCP_VERSION": "1.0",
        _SAVE_ID: "0" * SAVE_ID_LENGTH,
    }
    items.append(f'"__metadata__":{json.dumps(metadata, separators=(",", ":"), ensure_ascii=False)}')
    text = f"{{{','.join(items)}}}".encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise FormatError(
            f"a shard file of {len(entries)} tensors needs a header of {len(text)} bytes, more than "
            f"{MAX_HEADER_BYTES}; use a smaller size_per_shard"
        )
    id_at = text.rindex(b"0" * SAVE_ID_LENGTH)  # nothing but brackets and spaces is behind it
    before = len(text).to_bytes(8, "little") + text[:id_at]
    begins_at = 8 + len(text)
    return Header(before, text[id_at + SAVE_ID_LENGTH :], tuple(begins_at + begin for begin in begins))


def texts(values: list[str]) -> list[str]:
    """Each as JSON; by one call, since a call costs more than a text."""
    return json.dumps(values, separators=("\n", ":"), ensure_ascii=False)[1:-1].split("\n") if values else []


def _kind_to_json(entry: Entry) -> tuple[str, str, int]:
    """What a header says of all entries that are alike, the value of ``DCP_SHARDING_INFO``, and the length in bytes."""
    pair = entry.dtype == "C128"
    dtype, shape, start = entry.dtype, list(entry.shape), list(entry.start)
    if pair:
        dtype, shape, start = "F64", [*shape, 2], [*start, 0]
    compact = json.dumps({"dtype": dtype, "shape": shape}, separators=(",", ":"))
    return compact[1:-1], json.dumps({"saved_offsets": start}), entry.nbytes


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
    found, metadata = decode_with_metadata(text, where)
    return found, str(metadata.get(_SAVE_ID))


def decode_with_metadata(text: bytes, where: str) -> tuple[dict[str, Stored], dict[str, Any]]:
    """The same with all of ``__metadata__`` in place of the save id."""
    header = parse_json(text, where)
    if not isinstance(header, dict) or not isinstance(header.get("__metadata__"), dict):
        raise FormatError(f"{where}: the header is not a JSON object with __metadata__")
    metadata: dict[str, Any] = header.pop("__metadata__")
    return _tensors(header, text, where), metadata


def decode_foreign(text: bytes, where: str) -> dict[str, Stored]:
    """The same for a file of any writer, of which ``__metadata__`` is optional and not looked at."""
    header = parse_json(text, where)
    if not isinstance(header, dict):
        raise FormatError(f"{where}: the header is not a JSON object")
    header.pop("__metadata__", None)
    return _tensors(header, text, where)


def _tensors(header: dict[str, Any], text: bytes, where: str) -> dict[str, Stored]:
    try:
        found = {check_text(key): _stored(value, 8 + len(text)) for key, value in header.items()}
        position = 8 + len(text)
        for key, stored in sorted(found.items(), key=lambda item: (item[1].begin, item[1].nbytes)):
            if stored.begin != position:
                kind = "overlaps the data before it" if stored.begin < position else "follows a gap"
                raise ValueError(f"{key!r} {kind}: it begins at byte {stored.begin}, not {position}")
            position += stored.nbytes
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"{where}: the header describes a tensor wrongly: {shown(error)}") from None
    return found


def _stored(value: dict[str, Any], data: int) -> Stored:
    begin, end = map(check_size, value["data_offsets"])
    dtype, shape = check_dtype(value["dtype"]), check_shape(value["shape"])
    if bytes_in(shape, dtype) != end - begin:
        raise ValueError(f"{dtype} {shape} does not fill {end - begin} bytes")
    return Stored(dtype, shape, data + begin, end - begin)


# ── what a value of the format may be ─────────────────────────────────────────────────────────────────────────────


_BOUNDED = reprlib.Repr()
_BOUNDED.maxlevel = 4
_BOUNDED.maxlist = _BOUNDED.maxtuple = _BOUNDED.maxdict = _BOUNDED.maxset = _BOUNDED.maxfrozenset = 20
_BOUNDED.maxstring = _BOUNDED.maxlong = _BOUNDED.maxother = 250


def shown(value: Any) -> str:
    """The start of a value's repr, for a message: whoever wrote the file chose its length."""
    nested = isinstance(value, list | tuple | dict | set | frozenset) and any(
        isinstance(item, list | tuple | dict | set | frozenset)
        for item in (value.values() if isinstance(value, dict) else value)
    )
    text = _BOUNDED.repr(value) if nested else repr(value)  # what refers to itself again and again has no end
    return text if len(text) <= 200 else f"{text[:200]}…"


def check_size(value: Any) -> int:
    """``value``, which must be an integer from 0 to 2^63 - 1."""
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise FormatError(f"{shown(value)} is not a size")
    return value


def check_shape(value: Any) -> Shape:
    """``value``, a list of at most 64 lengths, as a tuple."""
    shape = tuple(map(check_size, value))
    if len(shape) > MAX_NDIM:
        raise FormatError(f"{len(shape)} dims, more than {MAX_NDIM}")
    return shape


def bytes_in(shape: Sequence[int], dtype: str) -> int:
    """Bytes of a tensor. Lengths of 0 don't make the others harmless: strides are computed from them, too."""
    if prod(n or 1 for n in shape) * DTYPE_BYTES[dtype] >= 1 << 63:
        raise FormatError(f"{dtype} {tuple(shape)} has more than 2^63 bytes")
    return prod(shape) * DTYPE_BYTES[dtype]


def check_save_id(value: Any) -> str:
    """``value``, which must be 32 hexadecimal digits."""
    if not isinstance(value, str) or not _SAVE_ID_PATTERN.fullmatch(value):
        raise FormatError(f"{shown(value)} is not a save id")
    return value


def check_dtype(value: Any) -> str:
    """``value``, which must be the name of a dtype of the format."""
    if value not in DTYPE_BYTES:
        raise FormatError(f"unknown dtype {shown(value)}")
    return str(value)


def check_file_name(value: Any) -> str:
    """``value``, which must be a base name that leads nowhere else."""
    if not isinstance(value, str) or not _FILE_NAME_PATTERN.fullmatch(value):
        raise FormatError(f"{shown(value)} is not a file name that a checkpoint may use")
    return value


def check_digest(value: Any) -> str:
    """``value``, which must be 16 hexadecimal digits."""
    if not isinstance(value, str) or not _DIGEST_PATTERN.fullmatch(value):
        raise FormatError(f"{shown(value)} is not a checksum")
    return value


def check_digests(values: Any) -> tuple[str, ...]:
    """``values``, a list of checksums, as a tuple; as fast as there are many of them."""
    digests = tuple(values)
    are_long_enough = set(map(type, digests)) <= {str} and set(map(len, digests)) <= {16}
    if are_long_enough and _HEX_PATTERN.fullmatch("".join(digests)):
        return digests
    return tuple(map(check_digest, digests))


def check_text(value: Any) -> str:
    """``value``, which must be a string that UTF-8 can hold: JSON can escape half a character."""
    if not isinstance(value, str):
        raise FormatError(f"{shown(value)} is not text")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise FormatError(f"{shown(value)} is not text that UTF-8 can hold") from None
    return value


# ── JSON ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def parse_json(text: bytes, where: str) -> Any:
    """JSON without duplicate keys, NaN or deep nesting, and of a size that bounds the memory for it.

    Raises:
        FormatError: with ``where`` and the position, for anything else.
    """
    check_json_size(text, where)
    _check_depth(text, where)
    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError:
        raise FormatError(f"{where}: not valid JSON: nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise FormatError(f"{where}: not valid JSON: {error}") from None


def check_json_size(text: bytes, where: str) -> None:
    """Refuse JSON that no reader would parse; counts values without parsing, so those in strings count, too."""
    if len(text) > MAX_JSON_BYTES:
        raise FormatError(f"{where}: {len(text)} bytes of JSON, more than the limit of {MAX_JSON_BYTES}")
    if len(text) > MAX_VALUES and sum(map(text.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise FormatError(f"{where}: JSON of more than {MAX_VALUES} values")


def _check_depth(text: bytes, where: str) -> None:
    """Refuse JSON that is nested deep, before it is parsed; what reads the value may use recursion.

    Of the brackets outside of strings, made one kind, the innermost pairs are taken away again and again.
    """
    if text.count(b'"') > 4 * MAX_VALUES:  # of a key and a text for each value
        raise FormatError(f"{where}: JSON of more than {MAX_VALUES} values")
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    brackets = b"".join(text.translate(_ONE_KIND, _NO_BRACKETS).split(b'"')[::2])
    for _ in range(MAX_DEPTH):
        outer = brackets.replace(b"[]", b"")
        if len(outer) == len(brackets):  # nothing is left, or not JSON
            return
        brackets = outer
    if brackets:
        raise FormatError(f"{where}: not valid JSON: nested deeper than {MAX_DEPTH} levels")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise ValueError(f"duplicate key {shown(counts.most_common(1)[0][0])}")
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
