"""Strict JSON: no duplicate keys, no NaN, no deep nesting, and a size that bounds the memory that parsing takes.

Indexes are compact JSON of one format and a few versions; see FORMAT.md for the rules.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from lightning_shardckpt.errors import FormatError
from lightning_shardckpt.format.value_checks import shown

FORMAT = "lightning-shardckpt"
VERSION = 4
"""The highest that is read. A file that needs no later version is written as version 1."""
MAX_JSON_BYTES = 1 << 26
MAX_VALUES = 1 << 21  # of one JSON text: Python needs up to 80 bytes for each
MAX_DEPTH = 128
_T = TypeVar("_T")
_ONE_KIND = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - set(b'[]{}"'))


def texts(values: list[str]) -> list[str]:
    """Return each value as JSON; by one call, since a call costs more than a text."""
    return json.dumps(values, separators=("\n", ":"), ensure_ascii=False)[1:-1].split("\n") if values else []


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


def compact(value: Any) -> str:
    """Return a value as JSON without spaces."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def decode_index(value: Any, where: str, decode: Callable[[dict[str, Any]], _T], versions: tuple[int, ...]) -> _T:
    """Return what ``decode`` makes of a JSON object of our format.

    Args:
        value: the JSON.
        where: the file, for errors.
        decode: makes the index of the object.
        versions: those that it can have, in ascending order.

    Raises:
        FormatError: for everything that ``decode`` trips over, too.
    """
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise FormatError(f"{where}: not an index of {FORMAT}")
    version = value.get("version")
    if type(version) is not int or version not in versions:
        *others, newest = versions
        raise FormatError(
            f"{where}: format version {shown(version)}, this package reads {', '.join(map(str, others))} and "
            f"{newest}; use the lightning-shardckpt that wrote it"
        )
    try:
        return decode(value)
    except FormatError as error:
        raise FormatError(f"{where}: {error}") from None
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        what = f"{type(error).__name__}: {str(error)[:200]}"
        raise FormatError(f"{where}: a part is missing or malformed: {what}") from None
