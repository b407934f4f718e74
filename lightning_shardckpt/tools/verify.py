"""Verification of a checkpoint, byte by byte: ``python -m lightning_shardckpt verify PATH``. No torch.

The root index determines the boxes and files of a checkpoint, the rank indexes the places of boxes in files, which the
headers of shard files repeat; checksums cover everything. All findings are collected.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from lightning_shardckpt.errors import CheckpointNotFoundError, FormatError, ShardCkptError
from lightning_shardckpt.format.index import EXPORT_FOLDER, ROOT_NAME, FileInfo, RankIndex, ShardEntry, shard_file_name
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
    with checkpoint:
        job = _Verification(checkpoint, quick)
        for name in checkpoint.root.components:
            try:
                job.check_indexes(name)
            except ShardCkptError as error:
                job.findings.append(Finding(ROOT_NAME, f"{name}: {_short(error, ROOT_NAME)}"))
        expect(job.nbytes)
        job.check_shard_files(advance)
        job.check_documents()
        job.check_names()
        return VerifyReport(tuple(job.findings), len(job.known), job.nbytes)


def render(report: VerifyReport, path: str, *, quick: bool) -> str:
    """Render the result of ``verify`` as text for people."""
    checked = f"{count_text(report.files, 'file')}, {size_text(report.nbytes)} of shards"
    if not report.findings:
        return f"{path} is {'complete' if quick else 'whole'}: {checked}"
    return "\n".join(
        [*map(str, report.findings), f"{count_text(len(report.findings), 'problem')} in {path} ({checked})"]
    )


class _Verification:
    """One verification: the shard files that the indexes name, and the findings.

    The checks of structure are the same as in a load. They raise the first problem of a tensor or a file.
    """

    def __init__(self, checkpoint: Checkpoint, quick: bool) -> None:
        self._checkpoint, self._root, self._quick = checkpoint, checkpoint.root, quick
        self.findings: list[Finding] = []
        self.files: list[tuple[str, RankIndex, FileInfo]] = []
        self.known = {ROOT_NAME, *self._root.documents}
        self._unknown_shards: set[str] = set()

    @property
    def nbytes(self) -> int:
        """The bytes of all shard files that the indexes name."""
        return sum(info.nbytes for _, _, info in self.files)

    def _find(self, file: str, problem: str, tensor: str | None = None, rank: int | None = None) -> None:
        self.findings.append(Finding(file, problem, tensor, rank))

    def check_indexes(self, name: str) -> None:
        """Check that the rank indexes of a component are intact and have the boxes that a load looks for."""
        component, unreadable = self._root.components[name], set[int]()
        for rank, info in sorted(component.indexes.items()):
            self.known.add(info.name)
            try:
                index = self._checkpoint.index(name, rank)
            except (ShardCkptError, OSError) as error:
                problem = f"{_short(error, info.name)}; the shard files that it describes cannot be checked"
                self._find(info.name, problem, None, rank)
                self._unknown_shards.add(shard_file_name(name, rank, 1).partition("-shard-")[0])
                unreadable.add(rank)
                continue
            self.files += [(name, index, file) for file in index.files.values()]
            self.known |= index.files.keys()
        replicas = choose_replicas(component.tensors)
        for key, spec in component.tensors.items():
            try:
                check_cover(name, {key: spec})
                whole = Box.whole(spec.shape)
                for overlap in plan_load(spec, replicas[key], (Part(whole, whole.start),)):
                    if overlap.writer in unreadable:
                        break  # as a load; a hostile index may describe many more boxes
                    self._checkpoint.entry(name, key, overlap)
            except ShardCkptError as error:
                self._find(ROOT_NAME, _short(error, ROOT_NAME), key)

    def check_shard_files(self, advance: Callable[[int], Any]) -> None:
        """Check sizes and headers, then the data of several files at a time, each with its own reader."""
        readable = [self._check_file(*file) for file in self.files]
        of_files: list[list[Finding]] = [[] for _ in self.files]
        advancing = threading.Lock()

        def check(number: int) -> None:
            _, index, info = self.files[number]
            if readable[number] and not self._quick:
                of_files[number] = list(_check_data(self._checkpoint.reader, index, info))
            with advancing:
                advance(info.nbytes)

        numbers = range(len(self.files))
        run_tasks(numbers, lambda: nullcontext(check), threads=min(_THREADS, len(numbers)), name="shardckpt-verifier")
        self.findings += [finding for findings in of_files for finding in findings]

    def _check_file(self, component: str, index: RankIndex, info: FileInfo) -> bool:
        """Check a shard file as a load does; return True if it has its size, so that its data can be checked."""
        size = 0
        try:
            size = self._checkpoint.reader.size(info.name)
            self._checkpoint.check_file(component, index.rank, info.name)
        except FileNotFoundError:
            self._find(info.name, f"the file is missing{_lost(index, info, 0)}", None, index.rank)
        except (ShardCkptError, OSError) as error:
            lost = _lost(index, info, size) if 0 < size < info.nbytes else ""
            self._find(info.name, f"{_short(error, info.name)}{lost}", None, index.rank)
        return size == info.nbytes

    def check_documents(self) -> None:
        """Check that the JSON documents are intact, and refer only to stored tensors."""
        component = self._root.components.get("trainer")
        stored = component.tensors.keys() if component is not None else set[str]()
        for name, info in self._root.documents.items():
            try:
                size = self._checkpoint.reader.size(name)
                if size != info.nbytes:
                    self._find(name, f"{size} bytes, expected {info.nbytes}")
                elif not self._quick:
                    content = parse_json(self._checkpoint.document(name), name)
                    for key in sorted({k if isinstance(k, str) else shown(k) for k in stored_keys(content)} - stored):
                        self._find(name, "is referred to, but not stored", key)
            except FileNotFoundError:
                self._find(name, "the file is missing")
            except (ShardCkptError, OSError) as error:
                self._find(name, _short(error, name))

    def check_names(self) -> None:
        """Find files that no index names, except files of a rank with an unreadable index, and an export."""
        for name in self._checkpoint.reader.names():
            is_export = name.partition("/")[0] == EXPORT_FOLDER
            if name not in self.known and name.partition("-shard-")[0] not in self._unknown_shards and not is_export:
                self._find(name, "extra: no index of this checkpoint names it; left by another save, or put here later")


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
