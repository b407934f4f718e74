"""Write the model a second time, in safetensors files that transformers loads from the checkpoint as it is.

Where each tensor lies in such a mirror follows from what all ranks know, so nobody gathers anything: each rank writes
its slices to their places in files that all of them fill, and rank 0 adds headers, index and configuration. The files
are durable before the root index lists them, and ``verify`` compares them with the shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lightning_shardckpt.checkpoint.checkpoint_options import ExtraFormat
from lightning_shardckpt.errors import StateError
from lightning_shardckpt.format.box import Box
from lightning_shardckpt.format.checksum import checksum
from lightning_shardckpt.format.file_names import FileInfo
from lightning_shardckpt.format.plan import Overlap, Piece, byte_runs
from lightning_shardckpt.format.safetensors_files import (
    OutputFile,
    OutputTensor,
    build_index,
    group_by_size,
    name_chunks,
    plan_file,
)
from lightning_shardckpt.format.value_checks import DTYPE_BYTES
from lightning_shardckpt.state.hf_directory import Model, pick
from lightning_shardckpt.storage.protocol import Draft
from lightning_shardckpt.storage.router import is_url
from lightning_shardckpt.transfer.writer import Stage

INDEX_NAME = "model.safetensors.index.json"


def check_place(path: str, also: ExtraFormat | None) -> None:
    """Refuse an extra format where ranks can't write parts of one file.

    Args:
        path: of the checkpoint.
        also: the format.

    Raises:
        ValueError: for a URL.
    """
    if also is not None and is_url(path):
        raise ValueError(
            f"also={also!r} needs a file system, where ranks can write parts of one file; {path!r} is a URL. Leave it "
            "out, and export the checkpoint with `python -m lightning_shardckpt.consolidate`"
        )


def only_model(document: Mapping[str, Any] | None) -> Model:
    """The one model of transformers that the saved module has.

    Raises:
        StateError: if there is none, or several.
    """
    try:
        model = pick(document, "")
    except ValueError as error:
        raise StateError(f"only one model can be saved for Hugging Face, too: {error}") from None
    if model is None:
        raise StateError(
            'ShardCkptIO(also="huggingface") is for a LightningModule that has a model of transformers, found none; '
            "`python -m lightning_shardckpt.consolidate --format safetensors` converts any checkpoint"
        )
    return model


def plan_mirror(tensors: Sequence[OutputTensor], limit_bytes: int) -> list[OutputFile]:
    """The files for tensors, of at most ``limit_bytes`` of data each. A larger tensor gets a file of its own.

    Raises:
        FormatError: naming a tensor that safetensors cannot hold.
    """
    groups = group_by_size(tensors, limit_bytes)
    names = name_chunks("model", len(groups))
    return [plan_file(name, group, {"format": "pt"}) for name, group in zip(names, groups, strict=True)]


class MirrorRun(NamedTuple):
    """Bytes ``[begin, begin + nbytes)`` of a piece, and where in the file they belong."""

    offset: int
    piece: Piece
    begin: int
    nbytes: int


def runs_by_file(files: Iterable[OutputFile], pieces: Iterable[Piece]) -> dict[str, Iterator[MirrorRun]]:
    """Return what of each file is in a rank's pieces, in runs contiguous in both; one tensor after the other."""
    of_key: dict[str, list[Piece]] = {}
    for piece in pieces:
        of_key.setdefault(piece.key, []).append(piece)
    found = {}
    for file in files:
        mine = [one for one in zip(file.tensors, file.begins, strict=True) if one[0].source[1] in of_key]
        if mine:
            found[file.name] = _runs(mine, of_key)
    return found


def _runs(tensors: list[tuple[OutputTensor, int]], pieces: Mapping[str, list[Piece]]) -> Iterator[MirrorRun]:
    for tensor, offset in tensors:
        for piece in pieces[tensor.source[1]]:
            wanted = tensor.box or Box.whole(piece.spec.shape)
            common = piece.part.box.intersect(wanted) if wanted.numel else None
            if common is not None:
                overlap = Overlap(piece.writer, piece.part.box, common, common.within(wanted))
                for begin, at, nbytes in byte_runs(overlap, wanted.shape, DTYPE_BYTES[tensor.dtype]):
                    yield MirrorRun(offset + at, piece, begin, nbytes)


class HFMirror:
    """The mirror of one save, on one rank.

    Args:
        files: what goes where.
        texts: further files, which rank 0 writes, by name.
    """

    def __init__(self, files: list[OutputFile], texts: Mapping[str, bytes]) -> None:
        self._files, self._texts = files, texts

    def write(self, draft: Draft, pieces: Iterable[Piece], stage: Stage) -> None:
        """Write this rank's pieces, durable on return as all that a draft writes. Runs on every rank."""
        for name, runs in runs_by_file(self._files, pieces).items():
            draft.write_pieces(name, _bytes(runs, stage))

    def finish(self, draft: Draft) -> dict[str, FileInfo]:
        """Write what makes the files whole, and return all of them. Runs on rank 0, when all ranks have written."""
        found = []
        for file in self._files:
            draft.write_pieces(file.name, [(0, file.header)])
            nbytes = len(file.header) + sum(tensor.nbytes for tensor in file.tensors)
            found.append(FileInfo(file.name, nbytes, checksum(file.header)))
        index = {INDEX_NAME: build_index(self._files)} if len(self._files) > 1 else {}
        for name, content in {**self._texts, **index}.items():
            draft.write(name, [content])
            found.append(FileInfo(name, len(content), checksum(content)))
        return {info.name: info for info in found}


def _bytes(runs: Iterator[MirrorRun], stage: Stage) -> Iterator[tuple[int, memoryview]]:
    piece, data = None, memoryview(b"")
    for run in runs:
        if run.piece is not piece:
            piece, data = run.piece, stage(run.piece)
        yield run.offset, data[run.begin : run.begin + run.nbytes]
