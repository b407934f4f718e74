"""Collect the parts that a rank's boxes have in the digests of a component's tensors, while a save writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from struct import pack

from lightning_shardckpt.format.box_digest import RunsOfBox
from lightning_shardckpt.format.crc64 import joined, part
from lightning_shardckpt.format.plan import Piece
from lightning_shardckpt.format.value_checks import DTYPE_BYTES

_FEW = 200  # boxes: less work for a call for each than for numpy


class DigestParts:
    """The part of each box in the digest of its tensor. First all boxes are added; then they are known.

    Whoever adds pieces keeps their plan meanwhile.
    """

    def __init__(self) -> None:
        self._keys: list[str] = []
        self._last_parts: list[int] = []
        self._after: list[int] = []
        self._runs: dict[tuple[int, int], RunsOfBox] = {}  # many boxes are alike, and share spec and box

    def add(self, piece: Piece, data: memoryview) -> None:
        """Add a box; ``data`` are its bytes."""
        spec, box = piece.spec, piece.part.box
        runs = self._runs.get((id(spec), id(box))) or self._runs_of(piece)
        self._keys.append(piece.key)
        self._last_parts.append(runs.last_part(data) if runs.dims else part(data))
        self._after.append(runs.after)

    def begin(self, piece: Piece, data: memoryview) -> Callable[[memoryview], object] | None:
        """Add a large box; what is returned must be told of its bytes, one piece after the other.

        So they are hashed while the CPU's cache has them. None if they are hashed already: pieces would be of other
        runs than the box.
        """
        place = len(self._keys)
        if self._runs_of(piece).dims:
            self.add(piece, data)
            return None
        self.add(piece, data[:0])

        def follow(data: memoryview) -> None:
            self._last_parts[place] = part(data, self._last_parts[place])

        return follow

    def add_known(self, key: str, of_box: int) -> None:
        """Add a box whose part an earlier save computed."""
        self._keys.append(key)
        self._last_parts.append(of_box)
        self._after.append(0)

    def _runs_of(self, piece: Piece) -> RunsOfBox:
        spec, box = piece.spec, piece.part.box
        found = RunsOfBox.of(box, spec.shape, DTYPE_BYTES[spec.dtype])
        return self._runs.setdefault((id(spec), id(box)), found)

    @cached_property
    def _parts(self) -> list[int]:
        if len(self._keys) > _FEW:
            from lightning_shardckpt.format.crc64_arrays import followed  # numpy, which a save needs for nothing else

            return followed(self._last_parts, self._after)
        return [joined(last, 0, after) for last, after in zip(self._last_parts, self._after, strict=True)]

    def of_tensors(self) -> dict[str, int]:
        """Return the part that all boxes of each tensor have together, by its key."""
        found = dict(zip(self._keys, self._parts, strict=True))
        if len(found) < len(self._keys):  # some tensor has several boxes
            found = dict.fromkeys(found, 0)
            for key, of_box in zip(self._keys, self._parts, strict=True):
                found[key] ^= of_box
        return found

    def text(self, keys: Iterable[str]) -> str:
        """Return the parts as an index with these tensors has them: 16 digits for each box."""
        order, parts = list(keys), self._parts
        if order != self._keys:  # some tensor has several boxes: they belong together, in the order of their addition
            places = {key: place for place, key in enumerate(order)}
            boxes = sorted(zip(self._keys, parts, strict=True), key=lambda box: places[box[0]])
            parts = [of_box for _, of_box in boxes]
        return pack(f">{len(parts)}Q", *parts).hex()
