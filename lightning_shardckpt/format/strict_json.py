"""Strict JSON: no duplicate keys, no NaN, no deep nesting, and a size limit that bounds the memory of parsing.

Indexes are compact JSON of one format in one version. FORMAT.md has the rules.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from lightning_shardckpt.errors import FormatError
from lightning_shardckpt.format.value_checks import shown

FORMAT = "lightning-shardckpt"
VERSION = "1.0"
MAX_JSON_BYTES = 1 << 26
MAX_VALUES = 1 << 21  # in one JSON text; Python needs up to 80 bytes for each
MAX_DEPTH = 128
_T = TypeVar("_T")
_ONE_KIND = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - set(b'[]{}"'))


def to_json_texts(values: list[str]) -> list[str]:
    """Return each string as JSON. One ``json.dumps`` encodes all, since a call costs more than a string."""
    return json.dumps(values, separators=("\n", ":"), ensure_ascii=False)[1:-1].split("\n") if values else []


def parse_json(text: bytes, where: str) -> Any:
    """Parse JSON without duplicate keys, NaN or deep nesting, and of limited size.

    Raises:
        FormatError: with ``where`` and the position of the error.
    """
    check_json_size(text, where)
    _check_depth(text, where)
    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=_build_object, parse_constant=_refuse_constant)
    except RecursionError:
        raise FormatError(f"{where}: not valid JSON: nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise FormatError(f"{where}: not valid JSON: {error}") from None


def check_json_size(text: bytes, where: str) -> None:
    """Refuse JSON that is too large to parse. Commas and brackets in strings count, too: the text is not parsed.

    Raises:
        FormatError: with ``where``, the size and the limit.
    """
    if len(text) > MAX_JSON_BYTES:
        raise FormatError(f"{where}: {len(text)} bytes of JSON, more than the limit of {MAX_JSON_BYTES}")
    if len(text) > MAX_VALUES and sum(map(text.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise FormatError(f"{where}: JSON of more than {MAX_VALUES} values")


def _check_depth(text: bytes, where: str) -> None:
    """Refuse deeply nested JSON before it is parsed, since the readers of the value may recurse.

    Makes all brackets outside strings one type, and removes the innermost pairs until none is left.
    """
    if text.count(b'"') > 4 * MAX_VALUES:  # a key and a string for each value
        raise FormatError(f"{where}: JSON of more than {MAX_VALUES} values")
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    brackets = b"".join(text.translate(_ONE_KIND, _NO_BRACKETS).split(b'"')[::2])
    for _ in range(MAX_DEPTH):
        outer = brackets.replace(b"[]", b"")
        if len(outer) == len(brackets):  # none left, or invalid JSON
            return
        brackets = outer
    if brackets:
        raise FormatError(f"{where}: not valid JSON: nested deeper than {MAX_DEPTH} levels")


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise ValueError(f"duplicate key {shown(counts.most_common(1)[0][0])}")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def compact(value: Any) -> str:
    """Return a value as JSON without spaces."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def decode_index(value: Any, where: str, decode: Callable[[dict[str, Any]], _T]) -> _T:
    """Check the format and version of an index, and decode it."""
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise FormatError(f"{where}: not an index of {FORMAT}")
    if value.get("version") != VERSION:
        raise FormatError(
            f"{where}: format version {shown(value.get('version'))}, but this package reads {VERSION}; use the "
            "lightning-shardckpt that wrote it"
        )
    try:
        return decode(value)
    except FormatError as error:
        raise FormatError(f"{where}: {error}") from None
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        cause = f"{type(error).__name__}: {str(error)[:200]}"
        raise FormatError(f"{where}: a part is missing or malformed: {cause}") from None
