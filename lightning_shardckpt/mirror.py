"""Which bytes of files with whole tensors does each rank have? It writes them there, and nobody gathers anything.

A mirror is the model of a checkpoint a second time, in safetensors files as Hugging Face has them. Where each tensor
lies follows from what all ranks know, so a rank knows the offsets of what it writes. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_shardckpt.box import Box, Shape
from lightning_shardckpt.errors import StateError
from lightning_shardckpt.header import DTYPE_BYTES, bytes_in
from lightning_shardckpt.plan import Overlap, Piece, byte_runs

INDEX_NAME = "model.safetensors.index.json"
_ALIGNMENT = 8


class Exported(NamedTuple):
    """A tensor of another program: its name and shape there, and the box of the stored tensor ``key`` that it is."""

    name: str
    shape: Shape
    dtype: str
    key: str
    box: Box

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return bytes_in(self.shape, self.dtype)


@dataclass(frozen=True, slots=True)
class MirrorFile:
    """A file with whole tensors: its first bytes, its size, and where in it each tensor begins."""

    name: str
    header: bytes
    nbytes: int
    tensors: tuple[tuple[Exported, int], ...]


@dataclass(frozen=True, slots=True)
class Mirror:
    """Files with whole tensors; ``index`` is the content of ``INDEX_NAME``, where there are several files."""

    files: tuple[MirrorFile, ...]
    index: bytes | None


def plan_mirror(tensors: Sequence[Exported], limit_bytes: int) -> Mirror:
    """The files for tensors, of at most ``limit_bytes`` of data each. A larger tensor gets a file of its own.

    In a file, wide elements are first, so that all are aligned.

    Raises:
        StateError: for a dtype that safetensors does not have.
    """
    groups: list[list[Exported]] = []
    room = 0
    for tensor in tensors:
        if tensor.dtype == "C128":
            raise StateError(f"safetensors has no dtype for {tensor.key!r}, which is complex128")
        if not groups or tensor.nbytes > room:
            groups.append([])
            room = limit_bytes
        groups[-1].append(tensor)
        room -= tensor.nbytes
    names = [_file_name(number, len(groups)) for number in range(1, len(groups) + 1)]
    files = tuple(_file(name, group) for name, group in zip(names, groups, strict=True))
    return Mirror(files, _index(files) if len(files) > 1 else None)


def _file_name(number: int, count: int) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors" if count > 1 else "model.safetensors"


def _file(name: str, tensors: list[Exported]) -> MirrorFile:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins, offset = list[tuple[Exported, int]](), 0
    for tensor in sorted(tensors, key=lambda t: -DTYPE_BYTES[t.dtype]):
        end = offset + tensor.nbytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (offset, end)}
        begins.append((tensor, offset))
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    data = 8 + len(text)
    places = tuple((tensor, data + begin) for tensor, begin in begins)
    return MirrorFile(name, len(text).to_bytes(8, "little") + text, data + offset, places)


def _index(files: Iterable[MirrorFile]) -> bytes:
    total = sum(tensor.nbytes for file in files for tensor, _ in file.tensors)
    names = {tensor.name: file.name for file in files for tensor, _ in file.tensors}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": names}, indent=2, sort_keys=True).encode()


class Run(NamedTuple):
    """Bytes ``[begin, begin + nbytes)`` of a piece, and where in the file they belong."""

    offset: int
    piece: Piece
    begin: int
    nbytes: int


def runs_by_file(mirror: Mirror, pieces: Iterable[Piece]) -> dict[str, Iterator[Run]]:
    """What of each file is in a rank's pieces, in runs that are contiguous in both; one tensor after the other."""
    of_key: dict[str, list[Piece]] = {}
    for piece in pieces:
        of_key.setdefault(piece.key, []).append(piece)
    mine = {file.name: [one for one in file.tensors if one[0].key in of_key] for file in mirror.files}
    return {name: _runs(tensors, of_key) for name, tensors in mine.items() if tensors}


def _runs(tensors: list[tuple[Exported, int]], pieces: Mapping[str, list[Piece]]) -> Iterator[Run]:
    for tensor, offset in tensors:
        for piece in pieces[tensor.key]:
            box = piece.part.box
            common = box.intersect(tensor.box) if tensor.box.numel else None
            if common is not None:
                overlap = Overlap(piece.writer, box, common, common.within(tensor.box))
                for begin, at, nbytes in byte_runs(overlap, tensor.box.shape, DTYPE_BYTES[tensor.dtype]):
                    yield Run(offset + at, piece, begin, nbytes)
