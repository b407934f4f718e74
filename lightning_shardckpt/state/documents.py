"""Is a document of the shape that its role says? What reads it may then rely on that; values are ``tree.decode``'s."""

from __future__ import annotations

import re
from typing import Any

from lightning_shardckpt.errors import FormatError
from lightning_shardckpt.header import parse_json, shown

_PARAM_NUMBER = re.compile(r"#(0|[1-9]\d{0,8})")


def checked(role: str, content: bytes, where: str) -> Any:
    """The JSON of a document of a role: "trainer", "rank", "model" or "optimizer".

    Raises:
        FormatError: naming ``where`` and what is wrong.
    """
    value = parse_json(content, where)
    try:
        if role == "optimizer":
            _optimizers(value)
        elif role != "rank":
            _object(value, "")
    except FormatError as error:
        raise FormatError(f"{where}: {error}") from None
    return value


def _object(value: Any, place: str, *keys: str) -> dict[str, Any]:
    if not isinstance(value, dict) or "$" in value or not value.keys() >= set(keys):
        wanted = f" with {', '.join(keys)}" if keys else ""
        raise FormatError(f"{place or 'the document'} is not an object{wanted}: {shown(value)}")
    return value


def _list(value: Any, place: str) -> list[Any]:
    if not isinstance(value, list):
        raise FormatError(f"{place} is not a list: {shown(value)}")
    return value


def _numbered(value: Any, place: str) -> list[tuple[str, Any]]:
    """The items of an object whose keys are 0, 1, 2 …"""
    found = _object(value, place)
    if found.keys() != {str(i) for i in range(len(found))}:
        raise FormatError(f"{place or 'the document'} has keys {shown(list(found))}, expected 0 to {len(found) - 1}")
    return [(f"{place}/{key}" if place else key, item) for key, item in found.items()]


def _optimizers(value: Any) -> None:
    for place, optimizer in _numbered(value, ""):
        _object(optimizer, place, "groups", "values", "numbered")
        numbered = optimizer["numbered"]
        if type(numbered) is not bool:
            raise FormatError(f"{place}/numbered is not true or false: {shown(numbered)}")
        for where, group in _numbered(optimizer["groups"], f"{place}/groups"):
            hyper = _object(group, where, "hyper", "params")["hyper"]
            if not isinstance(hyper, dict) or hyper.get("$", "map") != "map":
                raise FormatError(f"{where}/hyper is not an object: {shown(hyper)}")
            _params(group["params"], f"{where}/params", numbered)
        for name, shared in _object(optimizer["values"], f"{place}/values").items():
            where = f"{place}/values/{shown(name)}"
            for item in _list(shared, where):
                _params(_object(item, where, "value", "params")["params"], where, numbered)


def _params(value: Any, place: str, numbered: bool) -> None:
    for name in _list(value, place):
        if not isinstance(name, str) or (numbered and not _PARAM_NUMBER.fullmatch(name)):
            raise FormatError(f"{place} has {shown(name)}, which names no parameter")
