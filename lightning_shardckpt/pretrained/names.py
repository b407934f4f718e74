"""Which stored name means which name of the model? Texts alone. No torch, no I/O."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TypeAlias

from lightning_shardckpt.errors import MismatchError

KeyMapping: TypeAlias = "Mapping[str, str | None] | Callable[[str], str | None]"
"""From stored names to others: replacements by regular expression, or a function. None leaves a tensor out."""

_BASE, _SAVED, _ORIGINAL = "base_layer", "modules_to_save", "original_module"
_LISTED = 10


def renamed(names: Iterable[str], mapping: KeyMapping | None) -> dict[str, str]:
    """New name → stored name.

    A dict is applied in one pass from left to right, so replacements may swap names: at each place, the pattern that
    matches first in the text, of several at the same place the first of the dict.

    >>> renamed(["a.x", "b.x", "scale"], {"^a": "b", "^b": "a", "^scale$": None})
    {'b.x': 'a.x', 'a.x': 'b.x'}

    Raises:
        MismatchError: listing the stored names that would get one name.
    """
    if mapping is None:
        return {name: name for name in names}
    change = mapping if callable(mapping) else _replacing(mapping)
    found: dict[str, list[str]] = {}
    for name in names:
        new = change(name)
        if new is not None and not isinstance(new, str):
            raise MismatchError(f"pretrained_key_mapping makes {new!r} of {name!r}; it must be a name, or None")
        if new is not None:
            found.setdefault(new, []).append(name)
    collisions = [f"{new}  of {', '.join(olds)}" for new, olds in found.items() if len(olds) > 1]
    if collisions:
        listed = "\n  ".join(limited(collisions))
        raise MismatchError(f"pretrained_key_mapping gives {len(collisions)} names several times\n  {listed}")
    return {new: olds[0] for new, olds in found.items()}


def _replacing(mapping: Mapping[str, str | None]) -> Callable[[str], str | None]:
    try:
        patterns = [(re.compile(pattern), replacement) for pattern, replacement in mapping.items()]
    except re.error as error:
        raise MismatchError(f"pretrained_key_mapping: {error.pattern!r} is no regular expression: {error}") from None

    def replace(name: str) -> str | None:
        done, at = "", 0
        while True:
            matches = [(match, new) for pattern, new in patterns if (match := pattern.search(name, at))]
            if not matches:
                return done + name[at:]
            match, new = min(matches, key=lambda found: found[0].start())
            if new is None:
                return None
            done += name[at : match.start()] + match.expand(new)
            at = match.end()
            if match.end() == match.start():  # of no length: behind the next character
                done, at = done + name[at : at + 1], at + 1
            if at >= len(name):
                return done

    return replace


def limited(lines: Collection[str], count: int = _LISTED) -> list[str]:
    """The first lines, and how many more there are."""
    shown = list(lines)[:count]
    return shown + ([f"… and {len(lines) - count} more"] if len(lines) > count else [])


def without_adapters(name: str) -> str:
    """The name that a parameter of a model wrapped by PEFT had before.

    >>> without_adapters("q_proj.base_layer.weight"), without_adapters("head.modules_to_save.default.weight")
    ('q_proj.weight', 'head.weight')
    """
    parts = name.split(".")
    if _SAVED in parts:
        at = parts.index(_SAVED)
        del parts[at : at + 2]
    return ".".join(part for part in parts if part not in (_BASE, _ORIGINAL))


def adapter_names(names: Collection[str]) -> frozenset[str]:
    """Those that PEFT's layers add beside the ones that they wrap.

    >>> sorted(adapter_names(["q.base_layer.weight", "q.lora_A.default.weight", "norm.weight"]))
    ['q.lora_A.default.weight']
    """
    owners = {name.partition(f".{_BASE}.")[0] for name in names if f".{_BASE}." in name}
    return frozenset(name for name in names if f".{_BASE}." not in name and any(a in owners for a in _above(name)))


def _above(name: str) -> Iterator[str]:
    while name := name.rpartition(".")[0]:
        yield name


def common_prefix(names: Collection[str]) -> str:
    """The components that all names begin with, a dot behind them; the last component of a name is never of it.

    >>> common_prefix(["net.a.w", "net.b"]), common_prefix(["a.w", "b"])
    ('net.', '')
    """
    if not names:
        return ""
    first, last = min(names).split("."), max(names).split(".")
    count = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    count = min(count, *(len(name.split(".")) - 1 for name in (min(names), max(names))))
    return "".join(f"{part}." for part in first[:count])
