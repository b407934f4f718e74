"""Digests of a component's boxes, computed in a thread while a save writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from lightning_shardckpt.format.box import Box
from lightning_shardckpt.format.plan import Piece
from lightning_shardckpt.format.tensor_digest import TensorDigest
from lightning_shardckpt.format.value_checks import DTYPE_BYTES
from lightning_shardckpt.system.workers import Worker

_THREAD_BYTES = 1 << 20  # of a box that is worth a thread
_SMALL_BYTES, _TOGETHER_BYTES = 1 << 14, 1 << 18  # of boxes that are alike, which are computed together


@dataclass(slots=True)
class _Alike:
    """Small boxes that are alike, whose digests are to be computed: their bytes, and where the digests go."""

    first: Piece
    data: bytearray = field(default_factory=bytearray)
    places: list[tuple[list[TensorDigest], int]] = field(default_factory=list)


class BoxDigests:
    """What each box adds to the digest of its tensor."""

    def __init__(self) -> None:
        self._found: dict[str, list[TensorDigest]] = {}
        self._small: dict[tuple[int, Box], _Alike] = {}

    @property
    def found(self) -> dict[str, list[TensorDigest]]:
        """The digests by the tensor's key, in the order in which its boxes were written."""
        for alike in self._small.values():
            _compute(alike)
        return self._found

    @contextmanager
    def beside(self, piece: Piece, data: memoryview) -> Iterator[None]:
        """Compute the digest of a box while the block runs; ``data`` are its bytes."""
        if len(data) < _THREAD_BYTES:
            self._add(piece, data)
            yield
            return
        worker = Worker(lambda: self._add(piece, data), name="shardckpt-digests")
        interrupts = list[BaseException]()
        worker.start_or_run()
        try:
            yield
        finally:
            worker.end(interrupts.append)
        for error in (*interrupts, worker.error):
            if error is not None:
                raise error

    def add(self, piece: Piece, known: TensorDigest | None, data: Callable[[], memoryview]) -> None:
        """Note the digest of a box that is not written; computed from ``data``, if it is not known."""
        if known is None:
            self._add(piece, data())
        else:
            self._found.setdefault(piece.key, []).append(known)

    def _add(self, piece: Piece, data: memoryview) -> None:
        from lightning_shardckpt.format.box_digest import box_digest  # numpy, which nothing else of a save needs

        digests = self._found.setdefault(piece.key, [])
        if len(data) > _SMALL_BYTES:
            digests.append(box_digest(data, DTYPE_BYTES[piece.spec.dtype], piece.part.box, piece.spec.shape))
            return
        alike = self._small.setdefault((id(piece.spec), piece.part.box), _Alike(piece))  # it has the spec, so its id
        alike.places.append((digests, len(digests)))
        digests.append(TensorDigest())
        alike.data += data
        if len(alike.data) >= _TOGETHER_BYTES:
            _compute(alike)


def _compute(alike: _Alike) -> None:
    from lightning_shardckpt.format.box_digest import alike_digests

    spec, count = alike.first.spec, len(alike.places)
    if not count:
        return
    data = memoryview(bytes(alike.data))
    found = alike_digests(data, count, DTYPE_BYTES[spec.dtype], alike.first.part.box, spec.shape)
    for (digests, at), digest in zip(alike.places, found, strict=True):
        digests[at] = digest
    alike.places.clear()
    alike.data.clear()
