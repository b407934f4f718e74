"""Names for everything in the documents of a checkpoint, as for tensors in its files. No torch: nothing is decoded.

``optimizer/0/head.weight/step``, ``optimizer/0/param_groups/1/lr``, ``trainer/callbacks/EarlyStopping/wait_count``,
``rank/3/rng/torch``, and values of modules under their own names. What is nested has a name for each leaf; a list or
tuple of plain values alone, such as betas, is one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_shardckpt.format.box import Shape

_TAG = "$"
_MAPPINGS = ("map", "odict", "counter", "namespace")
_SEQUENCES = ("tuple", "deque")
_PLAIN = ("frozen", "versions", "peft", "huggingface")


@dataclass(frozen=True, slots=True)
class ValueInfo:
    """A stored value: ``kind`` is its type ("tensor", "int", "str", …), with dtype and shape where it has those."""

    kind: str
    dtype: str | None = None
    shape: Shape | None = None


@dataclass(frozen=True, slots=True)
class DocumentEntry:
    """A value as the document has it: tagged JSON, see ``json_tree.decode``; ``is_plain``: JSON without tags."""

    info: ValueInfo
    value: Any
    is_plain: bool = False


def entries_of(role: str, document: Any, rank: int = 0) -> dict[str, DocumentEntry]:
    """Everything in a document of a role by name, but for what is stored as a tensor in a file.

    >>> found = entries_of("trainer", {"loops": {"step": 3}, "names": ["a"]})
    >>> {name: entry.info.kind for name, entry in found.items()}
    {'trainer/loops/step': 'int', 'trainer/names': 'list'}
    """
    found: dict[str, DocumentEntry] = {}
    for name, entry in _named(role, document, rank):
        key, number = name, 1
        while key in found:  # {"a/b": …} and {"a": {"b": …}}
            number += 1
            key = f"{name}#{number}"
        found[key] = entry
    return found


def _named(role: str, document: Any, rank: int) -> Iterator[tuple[str, DocumentEntry]]:
    if document is None:
        return
    if role in _PLAIN:
        yield role, DocumentEntry(ValueInfo("dict"), document, is_plain=True)
    elif role == "model":
        for name, value in document.items():
            yield name, DocumentEntry(_info(value), value)
    elif role == "optimizer":
        for number, one in document.items():
            yield from _of_optimizer(f"optimizer/{number}", one)
    else:
        yield from _leaves(document, role if role == "trainer" else f"rank/{rank}")


def _of_optimizer(place: str, one: Mapping[str, Any]) -> Iterator[tuple[str, DocumentEntry]]:
    for name, shared in one["values"].items():
        for item in shared:
            for param in item["params"]:
                yield f"{place}/{param}/{name}", DocumentEntry(_info(item["value"]), item["value"])
    for number, group in one["groups"].items():
        yield from _leaves(group["hyper"], f"{place}/param_groups/{number}")
        yield f"{place}/param_groups/{number}/params", DocumentEntry(ValueInfo("list"), group["params"], is_plain=True)
    for key, value in one.get("own", {}).items():
        yield from _leaves(value, f"{place}/own/{key}")


def _leaves(value: Any, path: str) -> Iterator[tuple[str, DocumentEntry]]:
    tag = value.get(_TAG) if isinstance(value, dict) else None
    if tag == "stored":
        return
    inner: list[tuple[Any, Any]] = []
    if isinstance(value, list) or tag in _SEQUENCES:
        items = value if isinstance(value, list) else _list(value.get("v"))
        inner = list(enumerate(items)) if any(isinstance(item, list | dict) for item in items) else []
    elif tag in _MAPPINGS:
        inner = [tuple(pair) for pair in _list(value.get("v")) if isinstance(pair, list) and len(pair) == 2]
    elif isinstance(value, dict) and tag is None:
        inner = list(value.items())
    for key, item in inner:
        yield from _leaves(item, f"{path}/{_text(key)}")
    if not inner:
        yield path, DocumentEntry(_info(value), value)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(key: Any) -> str:
    """A key of a mapping, which may be tagged itself."""
    return str(key.get("v")) if isinstance(key, dict) else str(key)


def _info(value: Any) -> ValueInfo:
    tag = value.get(_TAG) if isinstance(value, dict) else None
    if tag is None:
        return ValueInfo("none" if value is None else type(value).__name__)
    if tag in ("tensor", "numpy"):
        shape = tuple(n for n in _list(value.get("shape")) if type(n) is int)
        return ValueInfo("tensor" if tag == "tensor" else "ndarray", str(value.get("dtype")), shape)
    return ValueInfo(str(tag))
