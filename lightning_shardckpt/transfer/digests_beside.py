"""Digests of a component's boxes, computed in a thread while a save writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightning_shardckpt.format.plan import Piece
from lightning_shardckpt.format.tensor_digest import TensorDigest
from lightning_shardckpt.format.value_checks import DTYPE_BYTES
from lightning_shardckpt.system.workers import Worker

_THREAD_BYTES = 1 << 20  # of a box that is worth a thread


class BoxDigests:
    """What each box adds to the digest of its tensor, by the tensor's key, in the order in which they are written."""

    def __init__(self) -> None:
        self.found: dict[str, list[TensorDigest]] = {}

    @contextmanager
    def beside(self, piece: Piece, data: memoryview) -> Iterator[None]:
        """Compute the digest of a box while the block runs; ``data`` are its bytes."""
        worker = Worker(lambda: self._add(piece, data), name="shardckpt-digests")
        if len(data) < _THREAD_BYTES:
            self._add(piece, data)
            yield
            return
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
            self.found.setdefault(piece.key, []).append(known)

    def _add(self, piece: Piece, data: memoryview) -> None:
        from lightning_shardckpt.format.box_digest import box_digest  # numpy, which nothing else of a save needs

        found = box_digest(data, DTYPE_BYTES[piece.spec.dtype], piece.part.box, piece.spec.shape)
        self.found.setdefault(piece.key, []).append(found)
