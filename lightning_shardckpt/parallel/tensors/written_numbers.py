"""Numbers that code writes into sharded tensors, which must be equal on all ranks.

Tensors are compared when they are written. For a number (``w.mul_(loss.item())``, a learning rate computed from a
rank's own loss) that would cost too much: all numbers are hashed into one, which ranks compare from time to time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_BITS = (1 << 62) - 1

NOTHING = -(1 << 62)
"""Less than any hash or its negative."""


class _Numbers:
    mark = 0
    last: tuple[str, Sequence[float], Sequence[int]] = ("", (), ())


def record_numbers(name: str, shape: Sequence[int], values: Sequence[Any]) -> None:
    """Record the numbers among the values that the function ``name`` is about to write into a tensor of ``shape``."""
    numbers = [value for value in values if type(value) in (float, int)]
    if numbers:
        _Numbers.last = name, numbers, shape
        _Numbers.mark = hash((_Numbers.mark, *numbers)) & _BITS


def reports(stage: int, stages: int) -> list[int]:
    """Return numbers whose maxima over all ranks show whether the ranks of each stage recorded the same."""
    own = [NOTHING] * (2 * stages)
    own[2 * stage], own[2 * stage + 1] = _Numbers.mark, -_Numbers.mark
    return own


def differ(maxima: list[int]) -> bool:
    """Return whether ranks of a stage recorded different numbers, given the maxima of `reports`.

    >>> differ([5, -5, NOTHING, NOTHING]), differ([7, -5])
    (False, True)
    """
    return any(a != -b for a, b in zip(maxima[::2], maxima[1::2], strict=True) if a != NOTHING)


def describe_last_numbers() -> str:
    """Return the last write of a number on this rank, for an error."""
    name, numbers, shape = _Numbers.last
    return f"{name}({', '.join(map(repr, numbers))}) into a tensor of shape {tuple(shape)}" if name else "nothing"


def reset_numbers() -> None:
    """Forget all recorded numbers; every rank must do so at the same point of the run."""
    _Numbers.mark, _Numbers.last = 0, ("", (), ())
