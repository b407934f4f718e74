"""Verification of a checkpoint, byte by byte: ``python -m lightning_shardckpt verify PATH``. No torch.

The root index determines the boxes and files of a checkpoint, the rank indexes the places of boxes in files, which the
headers of shard files repeat; checksums cover everything. All findings are collected.
"""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from lightning_shardckpt.errors import CheckpointNotFoundError, CorruptionError, FormatError, ShardCkptError
from lightning_shardckpt.format.box import Box, find_cover_error
from lightning_shardckpt.format.checksum import checksum
from lightning_shardckpt.format.file_names import FileInfo, shard_file_name
from lightning_shardckpt.format.index import ROOT_NAME, RankIndex, ShardEntry, TensorSpec
from lightning_shardckpt.format.layout import Part
from lightning_shardckpt.format.plan import check_cover, choose_replicas, plan_load
from lightning_shardckpt.format.safetensors_files import OutputTensor
from lightning_shardckpt.format.safetensors_header import (
    LENGTH_BYTES,
    HeaderLengthError,
    HeaderTensor,
    parse_header,
    read_header,
    save_id_of,
)
from lightning_shardckpt.format.strict_json import parse_json
from lightning_shardckpt.format.value_checks import shown
from lightning_shardckpt.sources.did_you_mean import open_checkpoint
from lightning_shardckpt.state.documents import HUGGING_FACE, parse_document
from lightning_shardckpt.state.hf_directory import pick_model
from lightning_shardckpt.storage.protocol import Reader, read_all
from lightning_shardckpt.system.text import count_text, list_some, one_line, size_text
from lightning_shardckpt.system.workers import run_tasks
from lightning_shardckpt.transfer.reader import Checkpoint
from lightning_shardckpt.transfer.shard_reader import BlockChecksums, ShardReader
from lightning_shardckpt.transfer.whole_tensors import WholeTensors, read_part

_CHUNK_BYTES = 4 << 20
_TENSORS = ".safetensors"
_MORE_BOXES = 16  # compare at most this many times the boxes that the indexes have for a tensor
_THREADS = 4  # one reads while another computes checksums
Boxes = dict[tuple[str, Box], TensorSpec]


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
        advance: called with the bytes of shard files as they are checked, by any thread, one at a time.
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
        job.findings += check_mirror(checkpoint, quick=quick)
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
    """One verification: the file names and indexes so far, and the findings."""

    def __init__(self, checkpoint: Checkpoint, quick: bool) -> None:
        self._checkpoint, self._root, self._quick = checkpoint, checkpoint.root, quick
        self.findings: list[Finding] = []
        self.files: list[tuple[str, RankIndex, FileInfo]] = []
        self.known = {ROOT_NAME, *self._root.documents, *self._root.mirror}
        self._unknown_shards: set[str] = set()

    @property
    def nbytes(self) -> int:
        """The bytes of all shard files that the indexes name."""
        return sum(info.nbytes for _, _, info in self.files)

    def _find(self, file: str, problem: str, tensor: str | None = None, rank: int | None = None) -> None:
        self.findings.append(Finding(file, problem, tensor, rank))

    def check_indexes(self, name: str) -> None:
        """Check that the rank indexes of a component are intact and have the boxes that the root index implies."""
        component = self._root.components[name]
        indexes: dict[int, RankIndex] = {}
        for rank, info in sorted(component.indexes.items()):
            self.known.add(info.name)
            try:
                indexes[rank] = self._checkpoint.index(name, rank)
            except (ShardCkptError, OSError) as error:
                problem = f"{_short(error, info.name)}; the shard files that it describes cannot be checked"
                self._find(info.name, problem, None, rank)
                self._unknown_shards.add(shard_file_name(name, rank, 1).partition("-shard-")[0])
                continue
            self.files += [(name, indexes[rank], file) for file in indexes[rank].files.values()]
            self.known |= indexes[rank].files.keys()
        expected = self._expected(name, indexes)
        for rank in sorted(expected.keys() - component.indexes.keys()):
            keys = sorted({key for key, _ in expected[rank]})
            self._find(ROOT_NAME, f"no index of rank {rank} for {name!r}, which should have written {keys[:5]}")
        suspects: set[str] = set()
        for rank, index in indexes.items():
            suspects.update(self._compare(index, expected.get(rank, {}), rank))
        if indexes.keys() == component.indexes.keys():
            self._check_cover(name, suspects, indexes)

    def _expected(self, name: str, indexes: Mapping[int, RankIndex]) -> dict[int, Boxes]:
        """Return the boxes of each rank that the root index implies; a tensor that they do not cover is a finding.

        The number of boxes of a tensor is limited by the number in the indexes, since all others are missing, too.
        """
        tensors = self._root.components[name].tensors
        chosen, expected = choose_replicas(tensors), dict[int, Boxes]()
        stored = Counter(key for index in indexes.values() for key, entries in index.shards.items() for _ in entries)
        unread = len(self._root.components[name].indexes) - len(indexes)
        for key, spec in tensors.items():
            try:
                check_cover(name, {key: spec})
            except ShardCkptError as error:
                self._find(ROOT_NAME, str(error))
                continue
            whole = Box.whole(spec.shape)
            most = (stored[key] + unread + 1) * _MORE_BOXES
            overlaps = islice(plan_load(spec, chosen[key], (Part(whole, whole.start),)), most)
            for writer, box in [(o.writer, o.stored) for o in overlaps] or [(spec.holders[0][0], whole)]:
                expected.setdefault(writer, {})[key, box] = spec
        return expected

    def _compare(self, index: RankIndex, expected: Boxes, rank: int) -> Iterator[str]:
        """Yield the tensors whose boxes differ from those that the rank should have written."""
        file = self._root.components[index.component].indexes[rank].name
        found: Boxes = {}
        for key, entries in index.shards.items():
            for entry in entries:
                spec = expected.get((key, entry.box))
                if spec is None:
                    problem = f"a box {_extent(entry.box)} that this rank should not have written"
                elif (key, entry.box) in found:
                    problem = f"the box {_extent(entry.box)} twice"
                elif (spec.dtype, spec.shape) != (entry.dtype, entry.global_shape):
                    problem = f"{entry.dtype} {entry.global_shape}, {spec.dtype} {spec.shape} in {ROOT_NAME}"
                else:
                    found[key, entry.box] = spec
                    continue
                self._find(file, problem, key, rank)
                yield key
        for key, box in sorted(expected.keys() - found.keys()):
            self._find(file, f"no box {_extent(box)}, which this rank should have written", key, rank)
            yield key

    def _check_cover(self, name: str, suspects: set[str], indexes: dict[int, RankIndex]) -> None:
        """Check whether boxes that differ from the plan still tile their tensors."""
        for key in sorted(suspects):
            spec = self._root.components[name].tensors.get(key)
            boxes = [entry.box for index in indexes.values() for entry in index.shards.get(key, ())]
            problem = find_cover_error(spec.shape, boxes) if spec is not None else "it is not in the root index"
            if problem is not None:
                self._find(ROOT_NAME, f"the stored boxes do not tile the tensor: {problem}", f"{name}: {key}")

    def check_shard_files(self, advance: Callable[[int], Any]) -> None:
        """Check all shard files, several at a time, each with its own reader, so that few files are open."""
        save_id = self._root.save_id

        of_files: list[list[Finding]] = [[] for _ in self.files]
        advancing = threading.Lock()

        def check(number: int) -> None:
            _, index, info = self.files[number]
            entries = {k: e for k, every in index.shards.items() for e in every if e.file == info.name}
            reader, left = self._checkpoint.reader.clone(), info.nbytes

            def advance_file(nbytes: int) -> None:
                nonlocal left
                left -= nbytes
                with advancing:
                    advance(nbytes)

            try:
                shard_file = ShardFile(info, index.rank, info.save_id or save_id, entries)
                of_files[number] = list(check_shard_file(reader, shard_file, self._quick, advance_file))
            finally:
                reader.close()
            advance_file(left)  # the header, and unreadable data

        numbers = range(len(self.files))
        run_tasks(numbers, lambda: nullcontext(check), threads=min(_THREADS, len(numbers)), name="shardckpt-verifier")
        self.findings += [finding for findings in of_files for finding in findings]

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
                    for key in sorted(set(_references(content)) - stored):
                        self._find(name, "is referred to, but not stored", key)
            except FileNotFoundError:
                self._find(name, "the file is missing")
            except (ShardCkptError, OSError) as error:
                self._find(name, _short(error, name))

    def check_names(self) -> None:
        """Find files that no index names, except files of a rank with an unreadable index."""
        for name in self._checkpoint.reader.names():
            if name not in self.known and name.partition("-shard-")[0] not in self._unknown_shards:
                self._find(name, "extra: no index of this checkpoint names it; left by another save, or put here later")


def _extent(box: Box) -> str:
    return f"{list(box.start)} to {list(box.stop)}"


def _short(error: Exception, name: str) -> str:
    """Return the message without the file, which the finding has."""
    text = str(error)
    return text.partition(f", file {name}: ")[2] or text


def _references(value: Any) -> Iterator[str]:
    """Yield the keys of the stored tensors that a document refers to."""
    if isinstance(value, list):
        for item in value:
            yield from _references(item)
    elif isinstance(value, dict):
        if value.get("$") == "stored":
            yield shown(value.get("v")) if not isinstance(value.get("v"), str) else value["v"]
        for item in value.values():
            yield from _references(item)


# ── shard files ───────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class ShardFile:
    """The description of a shard file in the index of a rank."""

    info: FileInfo
    rank: int
    save_id: str
    entries: Mapping[str, ShardEntry]

    def finding(self, problem: str, tensor: str | None = None) -> Finding:
        """Return a finding in this file."""
        return Finding(self.info.name, problem, tensor, self.rank)


def check_shard_file(reader: Reader, file: ShardFile, quick: bool, advance: Callable[[int], Any]) -> Iterator[Finding]:
    """Yield the differences of a shard file from its index: size, header, save id, positions, and blocks of data."""
    try:
        size = reader.size(file.info.name)
        if size != file.info.nbytes:
            yield file.finding(f"{size} bytes, expected {file.info.nbytes}{_lost(file, size)}")
            return
        yield from _check_header(reader, file)
        if not quick:
            for key, entry in sorted(file.entries.items(), key=lambda item: item[1].begin):
                yield from _check_data(reader, file, key, entry, advance)
    except FileNotFoundError:
        yield file.finding(f"the file is missing{_lost(file, 0)}")
    except (OSError, EOFError, FormatError) as error:
        yield file.finding(f"cannot be read: {error}")


def _lost(file: ShardFile, size: int) -> str:
    """Return a text that names the tensors with data beyond ``size`` bytes."""
    lost = sorted(key for key, entry in file.entries.items() if entry.nbytes and entry.begin + entry.nbytes > size)
    return f"; it held data of {list_some([*map(repr, lost)], 5)}" if lost else ""


def _check_header(reader: Reader, file: ShardFile) -> Iterator[Finding]:
    if file.info.nbytes < LENGTH_BYTES:
        yield file.finding("too short for a header")
        return
    try:
        start = read_header(partial(reader.read_into, file.info.name), file.info.nbytes)
    except HeaderLengthError as error:
        yield file.finding(str(error))
        return
    intact = checksum(start) == file.info.checksum
    try:
        header = parse_header(start, "header")
    except FormatError as error:
        yield file.finding(f"the header is damaged: {error}")
        return
    save_id = save_id_of(header)
    if save_id != file.save_id:
        subject = "file is of" if file.info.save_id else "checkpoint is"
        yield file.finding(f"belongs to save {save_id}, this {subject} save {file.save_id}")
    elif not intact:
        yield file.finding("the header is damaged: it does not match its checksum")
    if save_id == file.save_id:
        yield from _compare(file, header.tensors, _corners(header.metadata), len(start))


def _corners(metadata: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return each tensor's offsets in the header's entry for torch."""
    try:
        info = parse_json(metadata["DCP_SHARDING_INFO"].encode(), "header")
        return {key: value["saved_offsets"] for key, value in info.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def _compare(
    file: ShardFile, stored: Mapping[str, HeaderTensor], corners: Mapping[str, list[int]], data: int
) -> Iterator[Finding]:
    """Compare header and index, and check that the tensors fill the file without gap or overlap."""
    for key in sorted(stored.keys() - file.entries.keys()):
        yield file.finding("in the header of the file, not in the index of the rank", key)
    for key, entry in file.entries.items():
        if key not in stored:
            yield file.finding("in the index of the rank, not in the header of the file", key)
            continue
        if stored[key] != entry.stored:
            yield file.finding(f"{_place(stored[key])} in the header, {_place(entry.stored)} in the index", key)
        corner = [*entry.box.start, 0] if entry.dtype == "C128" else list(entry.box.start)
        if corners.get(key) != corner:
            found = shown(corners.get(key))
            yield file.finding(f"at {found} of the tensor in the header, at {corner} in the index", key)
    position = data
    for key, entry in sorted(file.entries.items(), key=lambda item: (item[1].begin, item[1].nbytes)):
        if entry.begin != position:
            kind = "overlaps the data before it" if entry.begin < position else "follows a gap"
            yield file.finding(f"begins at byte {entry.begin}, the data before it ends at {position}: it {kind}", key)
        position = entry.begin + entry.nbytes
    if position != file.info.nbytes:
        yield file.finding(f"{file.info.nbytes} bytes, but its tensors end at byte {position}")


def _place(stored: HeaderTensor) -> str:
    return f"{stored.dtype} {json.dumps(stored.shape)} at byte {stored.begin}"


def _check_data(
    reader: Reader, file: ShardFile, key: str, entry: ShardEntry, advance: Callable[[int], Any]
) -> Iterator[Finding]:
    blocks, bad = BlockChecksums(entry), list[tuple[int, int]]()
    buffer = memoryview(bytearray(min(_CHUNK_BYTES, entry.nbytes)))
    while blocks.at < entry.nbytes:
        piece = buffer[: entry.nbytes - blocks.at]
        reader.read_into(file.info.name, entry.begin + blocks.at, piece)
        bad += blocks.feed(piece)
        advance(len(piece))
    if bad:
        more = f" and {len(bad) - 1} more blocks" if len(bad) > 1 else ""
        yield file.finding(f"corrupted data, bytes {bad[0][0]} to {bad[0][1]}{more}", key)


# ── the mirror for transformers ───────────────────────────────────────────────────────────────────────────────────


def check_mirror(checkpoint: Checkpoint, *, quick: bool) -> Iterator[Finding]:
    """Yield the differences of a mirror's files from the shards; with ``quick``, of sizes and headers only."""
    files = checkpoint.root.mirror
    if not files:
        return
    try:
        document = parse_document("huggingface", checkpoint.document(HUGGING_FACE), HUGGING_FACE)
        model = pick_model(document, "")
        expected = {one.name: one for one in model.tensors(checkpoint.root.components["model"])} if model else {}
    except (ShardCkptError, OSError, LookupError, ValueError) as error:
        yield Finding(HUGGING_FACE, f"what {sorted(files)} should be cannot be told: {error}")
        return
    unread = False
    for info in files.values():
        try:
            if info.name.endswith(_TENSORS):
                yield from _check_tensors(checkpoint, info, expected, quick)
            elif not quick:
                _check_whole(checkpoint, info)
            elif checkpoint.reader.size(info.name) != info.nbytes:
                yield Finding(info.name, f"{checkpoint.reader.size(info.name)} bytes, expected {info.nbytes}")
        except (ShardCkptError, OSError, EOFError, ValueError) as error:
            unread = True
            yield Finding(info.name, "the file is missing" if isinstance(error, FileNotFoundError) else str(error))
    if not unread:
        yield from (Finding(ROOT_NAME, "none of the files for Hugging Face has it", name) for name in sorted(expected))


def _check_whole(checkpoint: Checkpoint, info: FileInfo) -> None:
    content = read_all(checkpoint.reader, info.name)
    if (len(content), checksum(content)) != (info.nbytes, info.checksum):
        raise CorruptionError(f"{len(content)} bytes with checksum {checksum(content)}, expected {info}")


def _check_tensors(
    checkpoint: Checkpoint, info: FileInfo, expected: dict[str, OutputTensor], quick: bool
) -> Iterator[Finding]:
    """Compare one file, and remove its tensors from ``expected``."""
    reader = checkpoint.reader
    if reader.size(info.name) != info.nbytes:
        yield Finding(info.name, f"{reader.size(info.name)} bytes, expected {info.nbytes}")
    start = read_header(partial(reader.read_into, info.name), info.nbytes)
    if checksum(start) != info.checksum:
        raise CorruptionError("the header is damaged, or it is of another save")
    for name, stored in parse_header(start, info.name).tensors.items():
        one = expected.pop(name, None)
        if one is None or (one.dtype, one.shape) != (stored.dtype, stored.shape):
            yield Finding(info.name, f"{stored.dtype} {stored.shape}, expected {one and (one.dtype, one.shape)}", name)
        elif not quick:
            yield from _compare_tensor(checkpoint, info.name, one, stored.begin)


def _compare_tensor(checkpoint: Checkpoint, file: str, one: OutputTensor, begin: int) -> Iterator[Finding]:
    """Compare a tensor with its box in the shards, a window at a time."""
    if not one.nbytes:
        return
    at, memory = begin, memoryview(bytearray(min(one.nbytes, _CHUNK_BYTES)))
    source = ShardReader(checkpoint.path, checkpoint.reader, target_bytes=_CHUNK_BYTES)
    try:
        boxes = WholeTensors(checkpoint).boxes(*one.source)
        for in_shards in read_part(source, one.box or Box.whole(one.shape), boxes, _CHUNK_BYTES):
            in_file = memory[: len(in_shards)]
            checkpoint.reader.read_into(file, at, in_file)
            if in_shards != in_file:
                yield Finding(file, f"bytes {at} to {at + len(in_file)} differ from the shards", one.name)
                return
            at += len(in_file)
    except CorruptionError as error:
        yield Finding(file, f"cannot be compared: {error}", one.name)
