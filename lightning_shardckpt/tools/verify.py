"""Verification of a checkpoint, byte by byte: ``python -m lightning_shardckpt verify PATH``. No torch.

The root index determines the boxes, the rank indexes their places in files, which the headers of shard files repeat.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning_shardckpt.errors import CheckpointNotFoundError, FormatError, ShardCkptError
from lightning_shardckpt.format.index import EXPORT_FOLDER, ROOT_NAME, FileInfo, RankIndex
from lightning_shardckpt.format.layout import Box, Part
from lightning_shardckpt.format.plan import check_cover, choose_replicas, plan_load
from lightning_shardckpt.format.safetensors_header import HeaderTensor, parse_header, read_header, to_header_type
from lightning_shardckpt.format.value_checks import parse_json, shown
from lightning_shardckpt.sources.open_source import open_checkpoint
from lightning_shardckpt.state.documents import stored_keys
from lightning_shardckpt.system.text import count_text, list_some, one_line, progress, size_text
from lightning_shardckpt.transfer.reader import Checkpoint, find_corruption

_CHUNK_BYTES = 4 << 20
_THREADS = 4  # one reads while another computes checksums


@dataclass(frozen=True, slots=True)
class Finding:
    """A difference from the saved state."""

    file: str
    problem: str
    tensor: str | None = None
    rank: int | None = None

    def __str__(self) -> str:
        by = f" (rank {self.rank})" if self.rank is not None else ""
        of = f"{self.tensor!r}: " if self.tensor is not None else ""
        return one_line(f"{self.file}{by}: {of}{self.problem}")


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The findings, and the numbers of checked files and bytes."""

    path: str
    quick: bool
    findings: tuple[Finding, ...]
    files: int
    nbytes: int

    def __str__(self) -> str:
        checked = f"{count_text(self.files, 'file')}, {size_text(self.nbytes)} of shards"
        if not self.findings:
            return f"{self.path} is {'complete' if self.quick else 'whole'}: {checked}"
        count = count_text(len(self.findings), "problem")
        return "\n".join([*map(str, self.findings), f"{count} in {self.path} ({checked})"])


def verify(
    path: str | os.PathLike[str], *, quick: bool = False, storage_options: Mapping[str, Any] | None = None
) -> VerifyReport:
    """Compare a checkpoint with its indexes and return all findings.

    Args:
        path: the checkpoint.
        quick: check structure and sizes only, without the content of tensors and documents.
        storage_options: for URLs, see ``ShardCkptIO``.

    Raises:
        CheckpointNotFoundError: if there is no checkpoint.
    """
    try:
        checkpoint = open_checkpoint(path, storage_options=storage_options)
    except CheckpointNotFoundError:
        raise
    except (ShardCkptError, OSError) as error:
        return VerifyReport(os.fspath(path), quick, (Finding(ROOT_NAME, _short(error, ROOT_NAME)),), 1, 0)
    findings = list[Finding]()
    with checkpoint:
        indexes, root = _check_indexes(checkpoint, findings), checkpoint.root
        files = [(index, info) for index in indexes for info in index.files.values()]
        nbytes = sum(info.nbytes for _, info in files)
        with progress(nbytes) as advance, ThreadPoolExecutor(_THREADS) as pool:
            checked = pool.map(partial(_check_file, checkpoint, quick), files)
            for (_, info), found in zip(files, checked, strict=True):
                findings += found
                advance(info.nbytes)
        _check_documents(checkpoint, findings, quick=quick)
        stored = [info.name for component in root.components.values() for info in component.indexes.values()]
        known = {ROOT_NAME, *root.documents, *stored, *(info.name for _, info in files)}
        for name in checkpoint.reader.names():
            is_described = len(indexes) == len(stored) or "-shard-" not in name  # else by an index that can't be read
            if name not in known and is_described and name.partition("/")[0] != EXPORT_FOLDER:
                problem = "extra: no index of this checkpoint names it; left by another save, or put here later"
                findings.append(Finding(name, problem))
        return VerifyReport(os.fspath(path), quick, tuple(findings), len(known), nbytes)


@contextmanager
def _noting(
    findings: list[Finding], file: str, tensor: str | None = None, rank: int | None = None, *, then: str = ""
) -> Iterator[None]:
    """Make an error of the block, which checks as a load does, a finding; ``then`` is appended to it."""
    try:
        yield
    except (ShardCkptError, OSError, EOFError) as error:
        text = "the file is missing" if isinstance(error, FileNotFoundError) else _short(error, file)
        findings.append(Finding(file, f"{text}{then}", tensor, rank))


def _short(error: Exception, name: str) -> str:
    """Return the message without the file, which the finding has."""
    return str(error).partition(f", file {name}: ")[2] or str(error)


def _check_indexes(checkpoint: Checkpoint, findings: list[Finding]) -> list[RankIndex]:
    """Return the rank indexes that are intact, after checking that they have the boxes that a load looks for."""
    intact, lost = list[RankIndex](), "; the shard files that it describes cannot be checked"
    for name, component in checkpoint.root.components.items():
        readable = set[int]()
        for rank, info in sorted(component.indexes.items()):
            with _noting(findings, info.name, rank=rank, then=lost):
                intact.append(checkpoint.index(name, rank))
                readable.add(rank)
        with _noting(findings, ROOT_NAME):
            replicas = choose_replicas(component.tensors)
            for key, spec in component.tensors.items():
                with _noting(findings, ROOT_NAME, key):
                    check_cover(name, {key: spec})
                    whole = Box.whole(spec.shape)
                    for overlap in plan_load(spec, replicas[key], (Part(whole, whole.start),)):
                        if overlap.writer in component.indexes and overlap.writer not in readable:
                            break  # as a load; a hostile index may describe many more boxes
                        checkpoint.entry(name, key, overlap)
    return intact


def _check_file(checkpoint: Checkpoint, quick: bool, file: tuple[RankIndex, FileInfo]) -> list[Finding]:
    """Return the differences of a shard file from its index, in size, header and data. Runs in several threads."""
    (index, info), findings, reader = file, list[Finding](), checkpoint.reader
    own = ((key, entry) for key, every in index.shards.items() for entry in every if entry.file == info.name)
    entries = dict(sorted(own, key=lambda item: item[1].begin))
    lost = f"; it holds data of {list_some([*map(repr, entries)], 5)}"
    with _noting(findings, info.name, rank=index.rank, then=lost):
        checkpoint.check_file(index.component, index.rank, info.name)
        tensors, _ = parse_header(read_header(partial(reader.read_into, info.name), info.nbytes), "the file")
        described = {
            key: HeaderTensor(*to_header_type(entry.dtype, entry.box.shape), entry.begin, entry.nbytes)
            for key, entry in entries.items()
        }
        if tensors != described:
            raise FormatError("the header describes other tensors than the rank index")
    for key, entry in entries.items() if not (quick or findings) else ():
        bad, step = list[tuple[int, int]](), max(_CHUNK_BYTES // entry.block, 1) * entry.block
        buffer = memoryview(bytearray(min(step, entry.nbytes)))
        with _noting(findings, info.name, key, index.rank):
            for at in range(0, entry.nbytes, step):
                piece = buffer[: entry.nbytes - at]
                reader.read_into(info.name, entry.begin + at, piece)
                bad += find_corruption(entry, piece, at)
        if bad:
            more = f" and {len(bad) - 1} more blocks" if len(bad) > 1 else ""
            problem = f"corrupted data, bytes {bad[0][0]} to {bad[0][1]}{more}"
            findings.append(Finding(info.name, problem, key, index.rank))
    return findings


def _check_documents(checkpoint: Checkpoint, findings: list[Finding], *, quick: bool) -> None:
    """Check that the JSON documents are intact, and refer only to stored tensors."""
    trainer = checkpoint.root.components.get("trainer")
    stored = trainer.tensors.keys() if trainer is not None else set[str]()
    for name, info in checkpoint.root.documents.items():
        with _noting(findings, name):
            if quick:
                if (size := checkpoint.reader.size(name)) != info.nbytes:
                    findings.append(Finding(name, f"{size} bytes, expected {info.nbytes}"))
                continue
            content = parse_json(checkpoint.document(name), name)
            for key in sorted({k if isinstance(k, str) else shown(k) for k in stored_keys(content)} - stored):
                findings.append(Finding(name, "is referred to, but not stored", key))
