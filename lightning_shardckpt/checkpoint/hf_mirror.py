"""How do ranks write the model a second time, so that transformers loads it from the checkpoint as it is?

Each writes its slices to their places in files that all of them fill; rank 0 adds headers, index and configuration.
The files are durable before the root index lists them, and ``verify`` compares them with the shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from lightning_shardckpt.containers import Container, index_json
from lightning_shardckpt.errors import StateError
from lightning_shardckpt.files import FileInfo
from lightning_shardckpt.header import checksum
from lightning_shardckpt.hub import Model, pick
from lightning_shardckpt.mirror import Run, runs_by_file
from lightning_shardckpt.plan import Piece
from lightning_shardckpt.storage.protocol import Draft
from lightning_shardckpt.write import Stage

Also = Literal["huggingface"]
"""Formats in which a save can write the model a second time."""

INDEX_NAME = "model.safetensors.index.json"


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


class Mirroring:
    """The mirror of one save, on one rank.

    Args:
        files: what goes where.
        texts: further files, which rank 0 writes, by name; a checkpoint is flat, so those in directories are left out.
    """

    def __init__(self, files: list[Container], texts: Mapping[str, bytes]) -> None:
        self._files = files
        self._texts = {name: content for name, content in texts.items() if "/" not in name}

    def write(self, draft: Draft, pieces: Iterable[Piece], stage: Stage) -> None:
        """On every rank: its pieces, durable on return as all that a draft writes."""
        for name, runs in runs_by_file(self._files, pieces).items():
            draft.write_pieces(name, _bytes(runs, stage))

    def finish(self, draft: Draft) -> dict[str, FileInfo]:
        """On rank 0, when all ranks have written: what makes the files whole; returns all of them."""
        found = []
        for file in self._files:
            draft.write_pieces(file.name, [(0, file.header)])
            nbytes = len(file.header) + sum(tensor.nbytes for tensor in file.tensors)
            found.append(FileInfo(file.name, nbytes, checksum(file.header)))
        index = {INDEX_NAME: index_json(self._files)} if len(self._files) > 1 else {}
        for name, content in {**self._texts, **index}.items():
            draft.write(name, [content])
            found.append(FileInfo(name, len(content), checksum(content)))
        return {info.name: info for info in found}


def _bytes(runs: Iterator[Run], stage: Stage) -> Iterator[tuple[int, memoryview]]:
    piece, data = None, memoryview(b"")
    for run in runs:
        if run.piece is not piece:
            piece, data = run.piece, stage(run.piece)
        yield run.offset, data[run.begin : run.begin + run.nbytes]
