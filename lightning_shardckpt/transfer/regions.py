"""Regions of files to fill: what each holds, where it lies, and what happens to it on the way. Values; no I/O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightning_shardckpt.format.box import Box

Head = Callable[[int, int], bytes]
"""Gives what stands right before a region, by its number and the CRC-32 of its bytes; any thread calls it, once."""


@dataclass(frozen=True, slots=True)
class DtypeConversion:
    """The conversion of elements of ``stored`` bytes to elements of ``written`` bytes; any thread calls ``convert``."""

    convert: Callable[[memoryview], memoryview]
    stored: int
    written: int


@dataclass(frozen=True, slots=True)
class Destination:
    """The place of ``nbytes`` of a tensor, from ``at`` on, in a file, by its number: from ``begin`` on."""

    at: int
    nbytes: int
    begin: int
    file: int = 0


@dataclass(frozen=True, slots=True)
class Region:
    """``nbytes`` of a file from ``begin`` on, right after a head of ``head_nbytes``.

    ``box``: what of a tensor it is, if not all. ``destinations``: those of a tensor that is to be in several,
    ascending in it; what is in none is read, but not written. ``nbytes`` are those of the tensor then, and ``begin``
    means nothing; none may be a stream.
    """

    begin: int
    nbytes: int
    head_nbytes: int
    content: memoryview | tuple[str, str]
    """The bytes, or component and key of the tensor that is stored."""
    file: int = 0
    conversion: DtypeConversion | None = None
    box: Box | None = None
    destinations: tuple[Destination, ...] = ()

    @property
    def first(self) -> int:
        """The offset where the head begins."""
        return self.begin - self.head_nbytes

    @property
    def end(self) -> int:
        """The offset where the bytes end."""
        return self.begin + self.nbytes
