"""Check that a checkpoint is whole: ``python -m lightning_shardckpt verify PATH`` compares every byte with the save.

The root index says which boxes and files there must be; the rank indexes where in which file; the headers of the shard
files repeat it; checksums cover everything. All findings are collected. No torch.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

from lightning_shardckpt.errors import CheckpointNotFoundError, ShardCkptError
from lightning_shardckpt.format.box import Box, uncovered
from lightning_shardckpt.format.file_names import FileInfo, shard_file_name
from lightning_shardckpt.format.index import ROOT_NAME, RankIndex, TensorSpec
from lightning_shardckpt.format.layout import Part
from lightning_shardckpt.format.plan import check_cover, choose_replicas, plan_load
from lightning_shardckpt.format.strict_json import parse_json
from lightning_shardckpt.format.value_checks import shown
from lightning_shardckpt.sources.did_you_mean import open_checkpoint
from lightning_shardckpt.system.workers import run_tasks
from lightning_shardckpt.tools.verify_files import Finding, ShardFile, check_mirror, check_shard_file
from lightning_shardckpt.transfer.reader import Checkpoint

_MORE_BOXES = 16  # than an index has that was found: so many are compared before the rest is given up
_THREADS = 4  # one reads while another computes checksums
Boxes = dict[tuple[str, Box], TensorSpec]


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The findings, and how many files and bytes were checked."""

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
        quick: structure and sizes only; the content of tensors and documents is not read.
        advance: told of the bytes of shard files as they are checked, by any thread, one at a time.
        expect: told once, before, of the bytes of all shard files.
        storage_options: for URLs, see ``ShardCkptIO``.

    Raises:
        CheckpointNotFoundError: if there is none; says what is there.
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


class _Verification:
    """One run: the names and indexes known so far, and the findings."""

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
        """The rank indexes of a component: there, intact, and with the boxes that the root index implies."""
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
        """The boxes of each rank, as the root index implies them; a tensor that they do not cover is a finding.

        Of a tensor that has many more boxes than the indexes have for it, some are enough: the rest is missing, too.
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
        """Yield the tensors with other boxes than the rank should have written."""
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
            wrong = uncovered(spec.shape, boxes) if spec is not None else "it is not in the root index"
            if wrong is not None:
                self._find(ROOT_NAME, f"the stored boxes do not tile the tensor: {wrong}", f"{name}: {key}")

    def check_shard_files(self, advance: Callable[[int], Any]) -> None:
        """Check all shard files, several at a time; each with a reader of its own, so that few files are open."""
        save_id = self._root.save_id

        of_files: list[list[Finding]] = [[] for _ in self.files]
        advancing = threading.Lock()

        def check(number: int) -> None:
            _, index, info = self.files[number]
            entries = {k: e for k, found in index.shards.items() for e in found if e.file == info.name}
            reader, left = self._checkpoint.reader.clone(), info.nbytes

            def told(nbytes: int) -> None:
                nonlocal left
                left -= nbytes
                with advancing:
                    advance(nbytes)

            try:
                shard_file = ShardFile(info, index.rank, info.save_id or save_id, entries)
                of_files[number] = list(check_shard_file(reader, shard_file, self._quick, told))
            finally:
                reader.close()
            told(left)  # its header, and unreadable data

        numbers = range(len(self.files))
        run_tasks(numbers, lambda: nullcontext(check), threads=min(_THREADS, len(numbers)), name="shardckpt-verifier")
        self.findings += [finding for found in of_files for finding in found]

    def check_documents(self) -> None:
        """The JSON documents: there, intact, and referring only to tensors that are stored."""
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
        """Find files that no index names; files of a rank with an unreadable index are not judged."""
        for name in self._checkpoint.reader.names():
            if name not in self.known and name.partition("-shard-")[0] not in self._unknown_shards:
                self._find(name, "extra: no index of this checkpoint names it; left by another save, or put here later")


def _extent(box: Box) -> str:
    return f"{list(box.start)} to {list(box.stop)}"


def _short(error: Exception, name: str) -> str:
    """Return the message without the place, which the finding has."""
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
