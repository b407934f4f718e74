"""Scan a rank index that is spelled as this package spells it: several times as fast as parsing it as any JSON. Pure.

Such an index is one text: a head, then an entry for each tensor, in all of which the same things stand in the same
order without spaces. What is spelled otherwise, or has a tensor in several boxes, is not refused here, but left to the
parser. So this only has to be right about what it accepts: that is JSON without duplicate keys, with the values that
the parser would find.
"""

from __future__ import annotations

import re
from itertools import chain
from typing import Any, TypeAlias

from lightning_shardckpt.errors import FormatError
from lightning_shardckpt.format.strict_json import check_json_size, parse_json

_PITCH = 19  # from one checksum to the next: 16 letters, quotes and a comma
_NUMBER = r"0|[1-9][0-9]{0,17}"  # no longer one: it is less than 2^63
_VALUE = r'[^"{}]*+'  # nothing but numbers in brackets is valid JSON: whoever parses what entries have in common sees
_ENTRY = re.compile(
    r'"([^"\\\x00-\x1f]*+)":\{'
    rf'("offsets":{_VALUE}"lengths":{_VALUE}"global_shape":{_VALUE}'
    r'"dtype":"[A-Z0-9_]*+","file":"[A-Za-z0-9._-]*+","rank":[0-9]++),'
    rf'"begin":({_NUMBER}),"block":({_NUMBER}),"checksums":\[([0-9a-f",]*+)\]\}},'
)
_AROUND = len('"":{,"begin":,"block":,"checksums":[]},')  # of an entry, beside the groups
_METADATA = ',"metadata":{'
_END = "}}"


ScannedEntry: TypeAlias = tuple[str, str, int, str, str]
"""One box: the key of its tensor; JSON without braces, which many boxes have in common; begin; block; checksums."""


def scan_rank_index(text: bytes, where: str) -> tuple[dict[str, Any], list[ScannedEntry]] | None:
    """All but the metadata of a rank index, and its boxes in order; None if it is to be parsed.

    Raises:
        FormatError: if it is too large.
    """
    check_json_size(text, where)
    try:
        head, metadata, body = text.decode().partition(_METADATA)
        value = parse_json(f"{head}}}".encode(), where)
    except (UnicodeDecodeError, FormatError):
        return None
    if not metadata or not body.endswith(_END) or not isinstance(value, dict) or "metadata" in value:
        return None
    found = _ENTRY.findall(f"{body.removesuffix(_END)},")  # so that each entry ends with a comma
    matched = len("".join(chain.from_iterable(found))) + len(found) * _AROUND
    if matched != len(body) - len(_END) + 1 or len({key for key, *_ in found}) != len(found):
        return None
    entries = [(key, about, int(begin), block, _digests(sums)) for key, about, begin, block, sums in found]
    if any(sums is None for *_, sums in entries):
        return None
    return value, entries  # type: ignore[return-value]  # none of them is None


def _digests(text: str) -> str | None:
    """The checksums in a list of them, of which only the letters were looked at; None if it is no such list."""
    if len(text) == _PITCH - 1 and text[0] == text[-1] == '"' and text.count('"') == 2 and "," not in text:
        return text[1:-1]  # a shortcut: of small tensors, of which there are many
    if not text:
        return ""
    count = (len(text) + 1) // _PITCH
    quotes, commas = '"' * count, "," * (count - 1)
    is_list = (
        len(text) == count * _PITCH - 1
        and text[::_PITCH] == text[_PITCH - 2 :: _PITCH] == quotes
        and text[_PITCH - 1 :: _PITCH] == commas
        and text.count('"') == 2 * count
        and text.count(",") == count - 1
    )
    return text[1:-1] if is_list else None
