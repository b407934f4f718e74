"""The part of a box in the digest of its tensor, which is the CRC of the tensor's row-major bytes.

A box lies there in runs, all of one length. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import prod

from lightning_shardckpt.format.box import Box, Shape
from lightning_shardckpt.format.crc64 import joined, part

_FEW_RUNS, _MANY_RUNS = 64, 1 << 15  # numpy pays from the former on; so many are taken at a time


@dataclass(frozen=True, slots=True)
class RunsOfBox:
    """Where the bytes of a box lie in the row-major bytes of its tensor.

    Attributes:
        nbytes: of each run.
        dims: along which there are several runs, outermost first: how many, and the bytes from one to the next.
        after: bytes of the tensor that follow the last run.
    """

    nbytes: int
    dims: tuple[tuple[int, int], ...]
    after: int

    @classmethod
    def of(cls, box: Box, shape: Shape, itemsize: int) -> RunsOfBox:
        """Return them for a box in the coordinates of a tensor of ``shape``, whose elements have ``itemsize`` bytes.

        >>> RunsOfBox.of(Box((1, 2, 0), (3, 4, 3)), (5, 4, 3), 2)
        RunsOfBox(nbytes=12, dims=((2, 24),), after=48)
        """
        lengths, inner = box.shape, len(shape)
        while inner and lengths[inner - 1] == shape[inner - 1]:
            inner -= 1
        inner = max(inner - 1, 0)  # dims from here on are in one run
        pitches = [itemsize * prod(shape[dim + 1 :]) for dim in range(len(shape))]
        nbytes = itemsize * prod(lengths[inner:])
        last = [*(stop - 1 for stop in box.stop[:inner]), *box.start[inner:]]
        end = sum(i * pitch for i, pitch in zip(last, pitches, strict=True)) + nbytes
        dims: list[tuple[int, int]] = []
        for length, pitch in zip(lengths[:inner], pitches, strict=False):
            if dims and dims[-1][1] == length * pitch:  # all of this dim: one sequence with the dim outside
                dims[-1] = (dims[-1][0] * length, pitch)
            elif length != 1:
                dims.append((length, pitch))
        return cls(nbytes, tuple(dims), itemsize * prod(shape) - end)

    def part(self, data: memoryview) -> int:
        """Return the part that the box has in the digest of its tensor.

        Args:
            data: the bytes of the box, row-major.
        """
        return joined(self.last_part(data), 0, self.after)

    def last_part(self, data: memoryview) -> int:
        """Return the same if nothing followed the last run."""
        return self._of_runs(data, self.dims) if self.dims and len(data) else part(data)

    def _of_runs(self, data: memoryview, dims: tuple[tuple[int, int], ...]) -> int:
        """Return the part of the runs along some dims, if nothing follows them."""
        count, pitch = dims[0]
        step = 1 if len(dims) > 1 else _MANY_RUNS
        nbytes, found = len(data) // count, 0
        for first, stop in pairwise([*range(0, count, step), count]):
            inside = data[first * nbytes : stop * nbytes]
            of = self._of_runs(inside, dims[1:]) if len(dims) > 1 else _of_row(inside, self.nbytes, pitch)
            found = joined(found, of, (stop - first) * pitch)
        return found


def _of_row(data: memoryview, nbytes: int, pitch: int) -> int:
    """Return the part of runs of ``nbytes`` that begin ``pitch`` bytes after one another, if nothing follows them."""
    if len(data) <= _FEW_RUNS * nbytes:
        found = 0
        for at in range(0, len(data), nbytes):
            found = joined(found, part(data[at : at + nbytes]), pitch)
        return found
    from lightning_shardckpt.format.crc64_arrays import part_of_pieces  # numpy, which a save needs for nothing else

    return part_of_pieces(data, nbytes, pitch)
