"""Numbers that code writes into sharded tensors: every rank must write the same, or the shards drift apart.

Tensors are compared where they are written. A number (``w.mul_(loss.item())``, a learning rate of a rank's own loss)
costs too much to compare each time; all of them are summed up in one, which ranks compare from time to time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_BITS = (1 << 62) - 1

NOTHING = -(1 << 62)
"""Less than anything that is compared."""


class _Numbers:
    mark = 0
    last: tuple[str, Sequence[float], Sequence[int]] = ("", (), ())


def note_numbers(name: str, shape: Sequence[int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Call when ``name`` is about to write into a sharded tensor of ``shape``."""
    numbers = [a for a in args if type(a) in (float, int)]
    if kwargs:
        numbers += [a for a in kwargs.values() if type(a) in (float, int)]
    if numbers:
        _Numbers.last = name, numbers, shape
        _Numbers.mark = hash((_Numbers.mark, *numbers)) & _BITS


def votes(stage: int, stages: int) -> list[int]:
    """Return this rank's part of a maximum over all ranks that shows whether those of each stage noted the same."""
    found = [NOTHING] * (2 * stages)
    found[2 * stage], found[2 * stage + 1] = _Numbers.mark, -_Numbers.mark
    return found


def differ(maxima: list[int]) -> bool:
    """Return whether ranks of a stage noted different numbers.

    >>> differ([5, -5, NOTHING, NOTHING]), differ([7, -5])
    (False, True)
    """
    return any(a != -b for a, b in zip(maxima[::2], maxima[1::2], strict=True) if a != NOTHING)


def last_noted() -> str:
    """The last write of a number on this rank, for an error."""
    name, numbers, shape = _Numbers.last
    return f"{name}({', '.join(map(repr, numbers))}) into a tensor of shape {tuple(shape)}" if name else "nothing"


def forget_numbers() -> None:
    """Begin anew; every rank must do so at the same place."""
    _Numbers.mark, _Numbers.last = 0, ("", (), ())
