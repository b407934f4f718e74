"""Which bytes of files with whole tensors does each rank have? It writes them there, and nobody gathers anything.

A mirror is the model of a checkpoint a second time, in safetensors files as Hugging Face has them. Where each tensor
lies follows from what all ranks know, so a rank knows the offsets of what it writes. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from lightning_shardckpt.box import Box
from lightning_shardckpt.containers import Container, Tensor, chunk_names, chunks, container
from lightning_shardckpt.header import DTYPE_BYTES
from lightning_shardckpt.plan import Overlap, Piece, byte_runs


def plan_mirror(tensors: Sequence[Tensor], limit_bytes: int) -> list[Container]:
    """The files for tensors, of at most ``limit_bytes`` of data each. A larger tensor gets a file of its own.

    Raises:
        FormatError: naming a tensor that safetensors cannot hold.
    """
    groups = chunks(tensors, limit_bytes)
    names = chunk_names("model", len(groups))
    return [container(name, group, {"format": "pt"}) for name, group in zip(names, groups, strict=True)]


class Run(NamedTuple):
    """Bytes ``[begin, begin + nbytes)`` of a piece, and where in the file they belong."""

    offset: int
    piece: Piece
    begin: int
    nbytes: int


def runs_by_file(files: Iterable[Container], pieces: Iterable[Piece]) -> dict[str, Iterator[Run]]:
    """What of each file is in a rank's pieces, in runs that are contiguous in both; one tensor after the other."""
    of_key: dict[str, list[Piece]] = {}
    for piece in pieces:
        of_key.setdefault(piece.key, []).append(piece)
    found = {}
    for file in files:
        mine = [one for one in zip(file.tensors, file.begins, strict=True) if one[0].source[1] in of_key]
        if mine:
            found[file.name] = _runs(mine, of_key)
    return found


def _runs(tensors: list[tuple[Tensor, int]], pieces: Mapping[str, list[Piece]]) -> Iterator[Run]:
    for tensor, offset in tensors:
        for piece in pieces[tensor.source[1]]:
            wanted = tensor.box or Box.whole(piece.spec.shape)
            common = piece.part.box.intersect(wanted) if wanted.numel else None
            if common is not None:
                overlap = Overlap(piece.writer, piece.part.box, common, common.within(wanted))
                for begin, at, nbytes in byte_runs(overlap, wanted.shape, DTYPE_BYTES[tensor.dtype]):
                    yield Run(offset + at, piece, begin, nbytes)
