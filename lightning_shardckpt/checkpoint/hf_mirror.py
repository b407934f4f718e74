"""Write the model a second time, in safetensors files that transformers loads directly from the checkpoint.

All ranks compute the same offset of each tensor in this mirror, so no tensor is gathered: each rank writes its slices
into the common files, and rank 0 adds headers, index and configuration. The files are durable before the root index
lists them, and ``verify`` compares them with the shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lightning_shardckpt.checkpoint.checkpoint_options import ExtraFormat
from lightning_shardckpt.errors import StateError
from lightning_shardckpt.format.box import Box
from lightning_shardckpt.format.checksum import checksum
from lightning_shardckpt.format.index import FileInfo
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
from lightning_shardckpt.state.hf_directory import Model, pick_model
from lightning_shardckpt.storage.protocol import Draft
from lightning_shardckpt.storage.router import is_url
from lightning_shardckpt.transfer.writer import StagePiece

INDEX_NAME = "model.safetensors.index.json"


def check_path(path: str, also: ExtraFormat | None) -> None:
    """Check that ranks can write parts of one file, if an extra format needs it.

    Args:
        path: of the checkpoint.
        also: the extra format.

    Raises:
        ValueError: for an extra format and a URL.
    """
    if also is not None and is_url(path):
        raise ValueError(
            f"also={also!r} needs a file system, where ranks can write parts of one file; {path!r} is a URL. Leave it "
            "out, and export the checkpoint with `python -m lightning_shardckpt.consolidate`"
        )


def single_model(document: Mapping[str, Any] | None) -> Model:
    """Return the single transformers model of the saved module."""
    try:
        model = pick_model(document, "")
    except ValueError as error:
        raise StateError(f"only one model can be saved for Hugging Face, too: {error}") from None
    if model is None:
        raise StateError(
            'ShardCkptIO(also="huggingface") is for a LightningModule that has a model of transformers, found none; '
            "`python -m lightning_shardckpt.consolidate --format safetensors` converts any checkpoint"
        )
    return model


def plan_mirror(tensors: Sequence[OutputTensor], limit_bytes: int) -> list[OutputFile]:
    """Return files of at most ``limit_bytes`` of data each; a larger tensor gets a file of its own."""
    groups = group_by_size(tensors, limit_bytes)
    names = name_chunks("model", len(groups))
    return [plan_file(name, group, {"format": "pt"}) for name, group in zip(names, groups, strict=True)]


class MirrorRun(NamedTuple):
    """Bytes ``[begin, begin + nbytes)`` of a piece, and their offset in the file."""

    offset: int
    piece: Piece
    begin: int
    nbytes: int


def runs_by_file(files: Iterable[OutputFile], pieces: Iterable[Piece]) -> dict[str, Iterator[MirrorRun]]:
    """Return the runs of a rank's pieces by file, each contiguous in the piece and in the file, tensor by tensor."""
    by_key: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_key.setdefault(piece.key, []).append(piece)
    runs = {}
    for file in files:
        tensors = [item for item in zip(file.tensors, file.begins, strict=True) if item[0].source[1] in by_key]
        if tensors:
            runs[file.name] = _runs(tensors, by_key)
    return runs


def _runs(tensors: list[tuple[OutputTensor, int]], pieces: Mapping[str, list[Piece]]) -> Iterator[MirrorRun]:
    for tensor, offset in tensors:
        for piece in pieces[tensor.source[1]]:
            box = tensor.box or Box.whole(piece.spec.shape)
            common = piece.part.box.intersect(box) if box.numel else None
            if common is not None:
                overlap = Overlap(piece.writer, piece.part.box, common, common.within(box))
                for begin, at, nbytes in byte_runs(overlap, box.shape, DTYPE_BYTES[tensor.dtype]):
                    yield MirrorRun(offset + at, piece, begin, nbytes)


class HFMirror:
    """The mirror of one save, on one rank.

    Args:
        files: the safetensors files and the tensors in them.
        texts: the content of further files, which rank 0 writes, by name.
    """

    def __init__(self, files: list[OutputFile], texts: Mapping[str, bytes]) -> None:
        self._files, self._texts = files, texts

    def write(self, draft: Draft, pieces: Iterable[Piece], stage: StagePiece) -> None:
        """Write this rank's pieces; durable on return like every write of a draft. Runs on every rank."""
        for name, runs in runs_by_file(self._files, pieces).items():
            draft.write_pieces(name, _bytes(runs, stage))

    def finish(self, draft: Draft) -> dict[str, FileInfo]:
        """Write headers, index and texts, and return all files by name. Runs on rank 0, when all ranks have written."""
        infos = []
        for file in self._files:
            draft.write_pieces(file.name, [(0, file.header)])
            nbytes = len(file.header) + sum(tensor.nbytes for tensor in file.tensors)
            infos.append(FileInfo(file.name, nbytes, checksum(file.header)))
        index = {INDEX_NAME: build_index(self._files)} if len(self._files) > 1 else {}
        for name, content in {**self._texts, **index}.items():
            draft.write(name, [content])
            infos.append(FileInfo(name, len(content), checksum(content)))
        return {info.name: info for info in infos}


def _bytes(runs: Iterator[MirrorRun], stage: StagePiece) -> Iterator[tuple[int, memoryview]]:
    piece, data = None, memoryview(b"")
    for run in runs:
        if run.piece is not piece:
            piece, data = run.piece, stage(run.piece)
        yield run.offset, data[run.begin : run.begin + run.nbytes]
