"""How do ranks write the model a second time, so that transformers loads it from the checkpoint as it is?

Each writes its slices to their places in files that all of them fill; rank 0 adds headers, index and configuration.
The files are durable before the root index lists them, and ``verify`` compares them with the shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from lightning_shardckpt.files import FileInfo
from lightning_shardckpt.header import checksum
from lightning_shardckpt.hub import one_model
from lightning_shardckpt.mirror import INDEX_NAME, Mirror, Run, runs_by_file
from lightning_shardckpt.plan import Piece
from lightning_shardckpt.state.documents import unpacked
from lightning_shardckpt.storage.protocol import Draft
from lightning_shardckpt.write import Stage

Also = Literal["huggingface"]
"""Formats in which a save can write the model a second time."""


def companions(document: Mapping[str, Any] | None) -> dict[str, bytes]:
    """The files that stand beside the weights, of the one model that a Hugging Face document has; none without one."""
    if document is None:
        return {}
    files = {**document["files"], **one_model(document)["files"]}
    return {name: unpacked(content, name) for name, content in files.items() if "/" not in name}


class Mirroring:
    """The mirror of one save, on one rank.

    Args:
        mirror: what goes where.
        texts: content of further files, which rank 0 writes, by name.
    """

    def __init__(self, mirror: Mirror, texts: Mapping[str, bytes]) -> None:
        self._mirror, self._texts = mirror, texts

    def write(self, draft: Draft, pieces: Iterable[Piece], stage: Stage) -> None:
        """On every rank: its pieces, durable on return as all that a draft writes."""
        for name, runs in runs_by_file(self._mirror, pieces).items():
            draft.write_pieces(name, _bytes(runs, stage))

    def finish(self, draft: Draft) -> dict[str, FileInfo]:
        """On rank 0, when all ranks have written: what makes the files whole; returns all of them."""
        found = []
        for file in self._mirror.files:
            draft.write_pieces(file.name, [(0, file.header)])
            found.append(FileInfo(file.name, file.nbytes, checksum(file.header)))
        index = {} if self._mirror.index is None else {INDEX_NAME: self._mirror.index}
        for name, content in (index | dict(self._texts)).items():
            draft.write(name, [content])
            found.append(FileInfo(name, len(content), checksum(content)))
        return {info.name: info for info in found}


def _bytes(runs: Iterator[Run], stage: Stage) -> Iterator[tuple[int, memoryview]]:
    piece, data = None, memoryview(b"")
    for run in runs:
        if run.piece is not piece:
            piece, data = run.piece, stage(run.piece)
        yield run.offset, data[run.begin : run.begin + run.nbytes]
