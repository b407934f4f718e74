"""Collect the parts that a rank's boxes have in the digests of a component's tensors, while a save writes them.

What follows from the plan of a save is computed once, for all saves with this plan. Of each box a save only takes the
CRC; all else is done for all boxes at once when they are written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

from lightning_shardckpt.format.box_digest import RunsOfBox
from lightning_shardckpt.format.box_order import BoxOrder
from lightning_shardckpt.format.component_digest import ComponentString
from lightning_shardckpt.format.crc64 import ONES, rest
from lightning_shardckpt.format.crc64_arrays import Parts, parts_of
from lightning_shardckpt.format.plan import Piece
from lightning_shardckpt.format.value_checks import DTYPE_BYTES


class DigestPlan:
    """What the digests of a component take that follows from the plan of a rank. For one save at a time.

    Args:
        string: of the component.
        pieces: that the rank writes, in any order. They are known by identity, and must not go before this does.
    """

    def __init__(self, string: ComponentString, pieces: Iterable[Piece]) -> None:
        self.string = string
        alike: dict[tuple[int, int], RunsOfBox] = {}  # many pieces share spec and box
        self._after: dict[int, int] = {}
        self.in_runs: dict[int, RunsOfBox] = {}
        """By identity, the pieces that are more than one range of bytes of their tensors."""
        for piece in pieces:
            spec, box = piece.spec, piece.part.box
            runs = alike.get((id(spec), id(box)))
            if runs is None:
                runs = alike[id(spec), id(box)] = RunsOfBox.of(box, spec.shape, DTYPE_BYTES[spec.dtype])
            self._after[id(piece)] = runs.after
            if runs.dims:
                self.in_runs[id(piece)] = runs
        self._order: tuple[list[Piece], BoxOrder] | None = None

    def order_of(self, pieces: list[Piece]) -> BoxOrder:
        """Return the order in which some of the pieces were written, which is mostly that of the last save."""
        if self._order is None or self._order[0] != pieces:
            after = [self._after[id(piece)] for piece in pieces]
            self._order = pieces, BoxOrder([piece.key for piece in pieces], after, self.string)
        return self._order[1]


class DigestParts:
    """The part of each box in the digest of its tensor, in one save. First all boxes are added; then they are known.

    Boxes are announced by ``expect``, many at once, and added in this order.
    """

    def __init__(self, plan: DigestPlan) -> None:
        self._plan, self._in_runs = plan, plan.in_runs
        self._pieces: list[Piece] = []
        self._rests: list[int] = []  # of the last runs, which are their parts, inverted
        self._known: dict[int, int] = {}

    def expect(self, pieces: Sequence[Piece]) -> None:
        """Announce the boxes that are added next."""
        self._pieces += pieces

    def add(self, piece: Piece, data: memoryview) -> None:
        """Add a box; ``data`` are its bytes."""
        if self._in_runs and id(piece) in self._in_runs:
            self._rests.append(self._in_runs[id(piece)].last_part(data) ^ ONES)
        else:
            self._rests.append(rest(data, ONES))

    def begin(self, piece: Piece, data: memoryview) -> Callable[[memoryview], object] | None:
        """Add a large box; what is returned must be told of its bytes, one piece after the other.

        So they are hashed while the CPU's cache has them. None if they are hashed already: pieces would be of other
        runs than the box.
        """
        if id(piece) in self._in_runs:
            self.add(piece, data)
            return None
        place = len(self._rests)
        self._rests.append(ONES)

        def follow(data: memoryview) -> None:
            self._rests[place] = rest(data, self._rests[place])

        return follow

    def add_known(self, of_box: int) -> None:
        """Add a box whose part an earlier save computed."""
        self._known[len(self._rests)] = of_box
        self._rests.append(ONES)

    def of_component(self) -> int:
        """Return the part that all boxes have together in the digest of the component."""
        return self._order.of_component(self._parts)

    def text(self, keys: Sequence[str]) -> str:
        """Return the parts as an index has them: 16 digits for each box.

        Args:
            keys: of the tensors in the index, which has boxes in the order in which they were added.
        """
        if list(keys) != self._order.keys:
            raise ValueError("an index has other tensors than were added, or in another order")
        return self._order.text(self._parts)

    @cached_property
    def _order(self) -> BoxOrder:
        return self._plan.order_of(self._pieces)

    @cached_property
    def _parts(self) -> Parts:
        found = self._order.followed(~parts_of(self._rests))
        for place, of_box in self._known.items():
            found[place] = of_box
        return found
