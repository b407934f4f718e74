"""Verification of a checkpoint, byte by byte: ``python -m lightning_shardckpt verify PATH``. No torch.

The root index determines the boxes and files of a checkpoint, the rank indexes the places of boxes in files, which the
headers of shard files repeat; checksums cover everything. All findings are collected.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from lightning_shardckpt.errors import CheckpointNotFoundError, FormatError, ShardCkptError
from lightning_shardckpt.format.index import EXPORT_FOLDER, ROOT_NAME, FileInfo, RankIndex, ShardEntry
from lightning_shardckpt.format.layout import Box, Part
from lightning_shardckpt.format.plan import check_cover, choose_replicas, plan_load
from lightning_shardckpt.format.value_checks import parse_json, shown
from lightning_shardckpt.sources.open_source import open_checkpoint
from lightning_shardckpt.state.documents import stored_keys
from lightning_shardckpt.storage.protocol import Reader
from lightning_shardckpt.system.text import count_text, list_some, one_line, size_text
from lightning_shardckpt.system.threads import run_tasks
from lightning_shardckpt.transfer.reader import Checkpoint
from lightning_shardckpt.transfer.shard_reader import find_corruption

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
    path: str | os.PathLike[str],
    *,
    quick: bool = False,
    advance: Callable[[int], Any] = lambda nbytes: None,
    expect: Callable[[int], Any] = lambda nbytes: None,
    storage_options: Mapping[str, Any] | None = None,
) -> VerifyReport:
    """Compare a checkpoint with its indexes and return all findings.

    Args:
        path: the checkpoint.
        quick: check structure and sizes only, without the content of tensors and documents.
        advance: called with the size of each shard file that was checked, by any thread, one at a time.
        expect: called once before with the bytes of all shard files.
        storage_options: for URLs, see ``ShardCkptIO``.

    Raises:
        CheckpointNotFoundError: if there is no checkpoint; describes the content of the path.
    """
    try:
        checkpoint = open_checkpoint(path, storage_options=storage_options)
    except CheckpointNotFoundError:
        raise
    except (ShardCkptError, OSError) as error:
        return VerifyReport((Finding(ROOT_NAME, _short(error, ROOT_NAME)),), 1, 0)
    findings = list[Finding]()
    with checkpoint:
        root = checkpoint.root
        indexes = _check_indexes(checkpoint, findings)
        files = [(name, index, info) for (name, _), index in indexes.items() for info in index.files.values()]
        nbytes = sum(info.nbytes for _, _, info in files)
        expect(nbytes)
        _check_files(checkpoint, files, findings, quick=quick, advance=advance)
        _check_documents(checkpoint, findings, quick=quick)
        stored = [info.name for component in root.components.values() for info in component.indexes.values()]
        known = {ROOT_NAME, *root.documents, *stored, *(info.name for _, _, info in files)}
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
    return "\n".join(
        [*map(str, report.findings), f"{count_text(len(report.findings), 'problem')} in {path} ({checked})"]
    )


@contextmanager
def _noting(
    findings: list[Finding], file: str, tensor: str | None = None, rank: int | None = None, *, then: str = ""
) -> Iterator[None]:
    """Make an error of the block a finding; ``then`` is appended to it.

    The checks of structure are the same as in a load. They raise the first problem of a tensor or a file.
    """
    try:
        yield
    except FileNotFoundError:
        findings.append(Finding(file, f"the file is missing{then}", tensor, rank))
    except (ShardCkptError, OSError) as error:
        findings.append(Finding(file, f"{_short(error, file)}{then}", tensor, rank))


def _check_indexes(checkpoint: Checkpoint, findings: list[Finding]) -> dict[tuple[str, int], RankIndex]:
    """Return the rank indexes that are intact, by component and rank, if they have the boxes that a load looks for."""
    indexes, lost = dict[tuple[str, int], RankIndex](), "; the shard files that it describes cannot be checked"
    for name, component in checkpoint.root.components.items():
        for rank, info in sorted(component.indexes.items()):
            with _noting(findings, info.name, rank=rank, then=lost):
                indexes[name, rank] = checkpoint.index(name, rank)
        unreadable = {rank for rank in component.indexes if (name, rank) not in indexes}
        with _noting(findings, ROOT_NAME):
            replicas = choose_replicas(component.tensors)
            for key, spec in component.tensors.items():
                with _noting(findings, ROOT_NAME, key):
                    check_cover(name, {key: spec})
                    whole = Box.whole(spec.shape)
                    for overlap in plan_load(spec, replicas[key], (Part(whole, whole.start),)):
                        if overlap.writer in unreadable:
                            break  # as a load; a hostile index may describe many more boxes
                        checkpoint.entry(name, key, overlap)
    return indexes


def _check_files(
    checkpoint: Checkpoint,
    files: list[tuple[str, RankIndex, FileInfo]],
    findings: list[Finding],
    *,
    quick: bool,
    advance: Callable[[int], Any],
) -> None:
    """Check sizes and headers of shard files, then the data of several at a time, each with its own reader."""
    readable, of_files, advancing = list[bool](), [list[Finding]() for _ in files], threading.Lock()
    for component, index, info in files:
        size = 0
        with suppress(OSError):
            size = checkpoint.reader.size(info.name)
        lost = _lost(index, info, size) if size < info.nbytes else ""
        with _noting(findings, info.name, rank=index.rank, then=lost):
            checkpoint.check_file(component, index.rank, info.name)
        readable.append(size == info.nbytes)

    def check(number: int) -> None:
        _, index, info = files[number]
        if readable[number] and not quick:
            of_files[number] = list(_check_data(checkpoint.reader, index, info))
        with advancing:
            advance(info.nbytes)

    numbers = range(len(files))
    run_tasks(numbers, lambda: nullcontext(check), threads=min(_THREADS, len(numbers)), name="shardckpt-verifier")
    findings += [finding for found in of_files for finding in found]


def _check_documents(checkpoint: Checkpoint, findings: list[Finding], *, quick: bool) -> None:
    """Check that the JSON documents are intact, and refer only to stored tensors."""
    trainer = checkpoint.root.components.get("trainer")
    stored = trainer.tensors.keys() if trainer is not None else set[str]()
    for name, info in checkpoint.root.documents.items():
        with _noting(findings, name):
            size = checkpoint.reader.size(name)
            if size != info.nbytes:
                findings.append(Finding(name, f"{size} bytes, expected {info.nbytes}"))
            elif not quick:
                content = parse_json(checkpoint.document(name), name)
                for key in sorted({k if isinstance(k, str) else shown(k) for k in stored_keys(content)} - stored):
                    findings.append(Finding(name, "is referred to, but not stored", key))


def _short(error: Exception, name: str) -> str:
    """Return the message without the file, which the finding has."""
    text = str(error)
    return text.partition(f", file {name}: ")[2] or text


def _entries(index: RankIndex, info: FileInfo) -> list[tuple[str, ShardEntry]]:
    """Return the boxes in a file, in the order of their bytes."""
    entries = ((key, entry) for key, every in index.shards.items() for entry in every if entry.file == info.name)
    return sorted(entries, key=lambda item: item[1].begin)


def _lost(index: RankIndex, info: FileInfo, size: int) -> str:
    """Return a text that names the tensors with data beyond ``size`` bytes."""
    lost = sorted(key for key, entry in _entries(index, info) if entry.nbytes and entry.begin + entry.nbytes > size)
    return f"; it held data of {list_some([*map(repr, lost)], 5)}" if lost else ""


def _check_data(reader: Reader, index: RankIndex, info: FileInfo) -> Iterator[Finding]:
    """Yield the tensors in a file whose bytes differ from their checksums."""
    for key, entry in _entries(index, info):
        bad, step = list[tuple[int, int]](), max(_CHUNK_BYTES // entry.block, 1) * entry.block
        buffer = memoryview(bytearray(min(step, entry.nbytes)))
        try:
            for at in range(0, entry.nbytes, step):
                piece = buffer[: entry.nbytes - at]
                reader.read_into(info.name, entry.begin + at, piece)
                bad += find_corruption(entry, piece, at)
        except (OSError, EOFError, FormatError) as error:
            yield Finding(info.name, f"cannot be read: {error}", key, index.rank)
            return
        if bad:
            more = f" and {len(bad) - 1} more blocks" if len(bad) > 1 else ""
            yield Finding(info.name, f"corrupted data, bytes {bad[0][0]} to {bad[0][1]}{more}", key, index.rank)
