"""Let one rule stand for the names of all layers, which differ in numbers alone. No torch."""

from __future__ import annotations

import re
from typing import Any, TypeAlias

NamedBoxes: TypeAlias = "list[list[Any]]"
"""Of one entry of a state dict: name, start and stop of the box, shape, of each tensor that it becomes."""

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")


def pattern_of(name: str) -> str:
    """The name with ``#`` for each number between dots.

    >>> pattern_of("layers.7.conv1.0.w")
    'layers.#.conv1.#.w'
    """
    return _NUMBER.sub("#", name)


def general(name: str, found: NamedBoxes) -> NamedBoxes:
    """The parts of a name with ``#`` for the numbers that the name has, in its order."""
    numbers = _NUMBER.findall(name)
    alike: NamedBoxes = []
    for to, *box in found:
        left = list(numbers)

        def replaced(match: re.Match[str], left: list[str] = left) -> str:
            return "#" if left and left.pop(0) == match[0] else match[0]

        text = _NUMBER.sub(replaced, to)
        alike.append([text, *box])
    return alike


def applied(pattern: str, parts: NamedBoxes, name: str) -> NamedBoxes | None:
    """The parts of ``name``, if the pattern, a name with ``#`` for numbers, is one of it.

    >>> applied("layers.#.w", [["layers.#.0.w", [0], [2], [2]]], "layers.7.w")
    [['layers.7.0.w', [0], [2], [2]]]
    """
    if "#" not in pattern:
        return parts if pattern == name else None
    numbers = _NUMBER.findall(name)
    if pattern_of(name) != pattern:
        return None
    return [[_filled(to, numbers), *box] for to, *box in parts]


def _filled(text: str, numbers: list[str]) -> str:
    pieces = text.split("#")
    return "".join(a + b for a, b in zip(pieces, [*numbers, *[""] * len(pieces)], strict=False))
