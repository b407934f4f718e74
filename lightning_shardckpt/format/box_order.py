"""The boxes that a rank writes of a component, and their parts in digests: all of them at once, in numpy. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy

from lightning_shardckpt.format.component_digest import ComponentString
from lightning_shardckpt.format.crc64_arrays import Parts, followed, parts_of, steps_of

_BIG_ENDIAN = ">u8"


class BoxOrder:
    """What follows from the tensors of boxes and from where in these they lie, and not from their bytes.

    Args:
        keys: of the tensor of each box.
        after: bytes of the tensor that follow each box.
        string: of the component.
    """

    def __init__(self, keys: Sequence[str], after: Sequence[int], string: ComponentString) -> None:
        self.keys = list(dict.fromkeys(keys))
        """Of the tensors, in the order of their first boxes."""
        self._string, self._steps = string, steps_of(after)
        number_of = {key: number for number, key in enumerate(self.keys)}
        self._words = numpy.array([number_of.get(key, len(self.keys)) for key in string.keys], numpy.intp)
        self._by_tensor, self._first = None, None
        if len(self.keys) < len(keys):  # some tensor has several boxes, which an index has together
            numbers = numpy.array([number_of[key] for key in keys], numpy.intp)
            self._by_tensor = numpy.argsort(numbers, kind="stable")
            self._first = numpy.searchsorted(numbers[self._by_tensor], numpy.arange(len(self.keys)))

    def followed(self, last_parts: Parts) -> Parts:
        """Return the parts of boxes, from those of their last runs if nothing followed these."""
        return followed(last_parts, self._steps)

    def text(self, parts: Parts) -> str:
        """Return the parts of boxes as an index has them: 16 digits for each box, tensor by tensor."""
        text: str = self._sorted(parts).astype(_BIG_ENDIAN).tobytes().hex()
        return text

    def of_component(self, parts: Parts) -> int:
        """Return the part that boxes have together in the component's digest, from those in their tensors'."""
        tensors = self._sorted(parts)
        if self._first is not None:
            tensors = numpy.bitwise_xor.reduceat(tensors, self._first)
        words = numpy.append(tensors, parts_of([0]))[self._words]  # the last one for tensors that have no box here
        return self._string.part(words.astype(_BIG_ENDIAN).tobytes())

    def _sorted(self, parts: Parts) -> Parts:
        return parts if self._by_tensor is None else parts[self._by_tensor]
