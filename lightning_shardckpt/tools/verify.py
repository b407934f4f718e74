"""Verification of a checkpoint, byte by byte: ``python -m lightning_shardckpt verify PATH``. No torch.

The root index determines the boxes and files of a checkpoint, the rank indexes the places of boxes in files, which the
headers of shard files repeat; checksums cover everything. All findings are collected.
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
from lightning_shardckpt.format.index import EXPORT_FOLDER, ROOT_NAME, FileInfo, RankIndex, ShardEntry
from lightning_shardckpt.format.layout import Box, Part
from lightning_shardckpt.format.plan import check_cover, choose_replicas, plan_load
from lightning_shardckpt.format.value_checks import parse_json, shown
from lightning_shardckpt.sources.open_source import open_checkpoint
from lightning_shardckpt.state.documents import stored_keys
from lightning_shardckpt.storage.protocol import Reader
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

    findings: tuple[Finding, ...]
    files: int
    nbytes: int


def verify(
    path: str | os.PathLike[str], *, quick: bool = False, storage_options: Mapping[str, Any] | None = None
) -> VerifyReport:
    """Compare a checkpoint with its indexes and return all findings.

    Args:
        path: the checkpoint.
        quick: check structure and sizes only, without the content of tensors and documents.
        storage_options: for URLs, see ``ShardCkptIO``.

    Raises:
        CheckpointNotFoundError: if there is no checkpoint; describes the content of the path.
    """
    findings = list[Finding]()
    try:
        checkpoint = open_checkpoint(path, storage_options=storage_options)
    except CheckpointNotFoundError:
        raise
    except (ShardCkptError, OSError) as error:
        return VerifyReport((Finding(ROOT_NAME, _short(error, ROOT_NAME)),), 1, 0)
    with checkpoint:
        indexes, root = _check_indexes(checkpoint, findings), checkpoint.root
        files = [(index, info) for index in indexes for info in index.files.values()]
        readable = [(index, info) for index, info in files if _is_intact(checkpoint, index, info, findings)]
        nbytes = sum(info.nbytes for _, info in files)
        if not quick:
            with progress(nbytes) as advance, ThreadPoolExecutor(_THREADS) as pool:
                for number, found in enumerate(pool.map(partial(_find, checkpoint.reader), readable)):
                    findings += found
                    advance(readable[number][1].nbytes)
        _check_documents(checkpoint, findings, quick=quick)
        stored = [info.name for component in root.components.values() for info in component.indexes.values()]
        known = {ROOT_NAME, *root.documents, *stored, *(info.name for _, info in files)}
        for name in checkpoint.reader.names():
            is_described = len(indexes) == len(stored) or "-shard-" not in name  # else by an index that can't be read
            if name not in known and is_described and name.partition("/")[0] != EXPORT_FOLDER:
                problem = "extra: no index of this checkpoint names it; left by another save, or put here later"
                findings.append(Finding(name, problem))
        return VerifyReport(tuple(findings), len(known), nbytes)


def render(report: VerifyReport, path: str, *, quick: bool) -> str:
    """Render the result of ``verify`` as text for people."""
    checked = f"{count_text(report.files, 'file')}, {size_text(report.nbytes)} of shards"
    if not report.findings:
        return f"{path} is {'complete' if quick else 'whole'}: {checked}"
    count = count_text(len(report.findings), "problem")
    return "\n".join([*map(str, report.findings), f"{count} in {path} ({checked})"])


@contextmanager
def _noting(
    findings: list[Finding], file: str, tensor: str | None = None, rank: int | None = None, *, then: str = ""
) -> Iterator[None]:
    """Make an error of the block a finding; ``then`` is appended to it.

    The checks of structure are the same as in a load. They raise the first problem of a tensor or a file.
    """
    try:
        yield
    except (ShardCkptError, OSError) as error:
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


def _is_intact(checkpoint: Checkpoint, index: RankIndex, info: FileInfo, findings: list[Finding]) -> bool:
    """Check the size and the header of a shard file; return whether its data can be read."""
    lost = f"; it holds data of {list_some([repr(key) for key, _ in _entries(index, info)], 5)}"
    before = len(findings)
    with _noting(findings, info.name, rank=index.rank, then=lost):
        checkpoint.check_file(index.component, index.rank, info.name)
    return len(findings) == before


def _entries(index: RankIndex, info: FileInfo) -> list[tuple[str, ShardEntry]]:
    """Return the boxes in a file, in the order of their bytes."""
    entries = ((key, entry) for key, every in index.shards.items() for entry in every if entry.file == info.name)
    return sorted(entries, key=lambda item: item[1].begin)


def _find(reader: Reader, file: tuple[RankIndex, FileInfo]) -> list[Finding]:
    """Return the tensors in a file whose bytes differ from their checksums. Runs in several threads."""
    (index, info), findings = file, list[Finding]()
    for key, entry in _entries(index, info):
        bad, step = list[tuple[int, int]](), max(_CHUNK_BYTES // entry.block, 1) * entry.block
        buffer = memoryview(bytearray(min(step, entry.nbytes)))
        try:
            for at in range(0, entry.nbytes, step):
                piece = buffer[: entry.nbytes - at]
                reader.read_into(info.name, entry.begin + at, piece)
                bad += find_corruption(entry, piece, at)
        except (OSError, EOFError, FormatError) as error:
            return [*findings, Finding(info.name, f"cannot be read: {error}", key, index.rank)]
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
