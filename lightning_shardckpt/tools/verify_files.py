"""Compare the files of a checkpoint with its indexes: shard files, and the mirror for transformers. No torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning_shardckpt.errors import CorruptionError, FormatError, ShardCkptError
from lightning_shardckpt.format.box import Box
from lightning_shardckpt.format.checksum import checksum
from lightning_shardckpt.format.file_names import FileInfo
from lightning_shardckpt.format.index import ROOT_NAME, ShardEntry
from lightning_shardckpt.format.layout import Part
from lightning_shardckpt.format.plan import plan_load
from lightning_shardckpt.format.safetensors_files import OutputTensor
from lightning_shardckpt.format.safetensors_header import (
    LENGTH_BYTES,
    HeaderLengthError,
    HeaderTensor,
    parse_header,
    read_header,
)
from lightning_shardckpt.format.shard_header import save_id_of
from lightning_shardckpt.format.strict_json import parse_json
from lightning_shardckpt.format.value_checks import DTYPE_BYTES, shown
from lightning_shardckpt.state.documents import HUGGING_FACE, checked
from lightning_shardckpt.state.hf_directory import pick
from lightning_shardckpt.storage.protocol import Reader, read_all
from lightning_shardckpt.system.text import one_line
from lightning_shardckpt.transfer.read_plan import Request, single_run
from lightning_shardckpt.transfer.reader import Checkpoint
from lightning_shardckpt.transfer.shard_reader import BlockChecksums, fetch
from lightning_shardckpt.transfer.whole_tensors import windows

_CHUNK_BYTES = 4 << 20
_NAMED = 5
_TENSORS = ".safetensors"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as it was saved."""

    file: str
    problem: str
    tensor: str | None = None
    rank: int | None = None

    def __str__(self) -> str:
        by = f" (rank {self.rank})" if self.rank is not None else ""
        of = f"{self.tensor!r}: " if self.tensor is not None else ""
        return one_line(f"{self.file}{by}: {of}{self.problem}")


@dataclass(frozen=True, slots=True)
class ShardFile:
    """A shard file as the index of a rank describes it."""

    info: FileInfo
    rank: int
    save_id: str
    entries: Mapping[str, ShardEntry]

    def finding(self, problem: str, tensor: str | None = None) -> Finding:
        """Return a finding in this file."""
        return Finding(self.info.name, problem, tensor, self.rank)


def check_shard_file(reader: Reader, file: ShardFile, quick: bool, advance: Callable[[int], Any]) -> Iterator[Finding]:
    """Yield how a shard file differs from its index: size, header, save id, positions, and every block of data.

    Args:
        reader: reads the file.
        file: its description.
        quick: does not look at the data.
        advance: told of the bytes of data as they are read.
    """
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
    """Name the tensors with data beyond ``size`` bytes."""
    lost = sorted(key for key, entry in file.entries.items() if entry.nbytes and entry.begin + entry.nbytes > size)
    more = f" and {len(lost) - _NAMED} more" if len(lost) > _NAMED else ""
    return f"; it held data of {', '.join(map(repr, lost[:_NAMED]))}{more}" if lost else ""


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
        what = "file is of" if file.info.save_id else "checkpoint is"
        yield file.finding(f"belongs to save {save_id}, this {what} save {file.save_id}")
    elif not intact:
        yield file.finding("the header is damaged: it does not match its checksum")
    if save_id == file.save_id:
        yield from _compare(file, header.tensors, _corners(header.metadata), len(start))


def _corners(metadata: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return each tensor's position in the header's entry for torch."""
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
    """Yield how the files of a mirror differ from the shards; ``quick``: by size and header."""
    files = checkpoint.root.mirror
    if not files:
        return
    try:
        document = checked("huggingface", checkpoint.document(HUGGING_FACE), HUGGING_FACE)
        model = pick(document, "")
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
    """Compare one file, and take the tensors that it has out of ``expected``."""
    reader = checkpoint.reader
    if reader.size(info.name) != info.nbytes:
        yield Finding(info.name, f"{reader.size(info.name)} bytes, expected {info.nbytes}")
    start = read_header(partial(reader.read_into, info.name), info.nbytes)
    if checksum(start) != info.checksum:
        raise CorruptionError("the header is damaged, or it is of another save")
    for name, there in parse_header(start, info.name).tensors.items():
        one = expected.pop(name, None)
        if one is None or (one.dtype, one.shape) != (there.dtype, there.shape):
            yield Finding(info.name, f"{there.dtype} {there.shape}, expected {one and (one.dtype, one.shape)}", name)
        elif not quick:
            yield from _compare_tensor(checkpoint, info.name, one, there.begin)


def _compare_tensor(checkpoint: Checkpoint, file: str, one: OutputTensor, begin: int) -> Iterator[Finding]:
    """Compare a tensor with its box in the shards, a window at a time; a corrupted shard is a finding elsewhere."""
    size, at = DTYPE_BYTES[one.dtype], begin
    box = one.box or Box.whole(one.shape)
    memory = [memoryview(bytearray(min(one.nbytes, max(_CHUNK_BYTES, size)))) for _ in range(2)]
    for window in windows(box.shape, _CHUNK_BYTES // size) if one.nbytes else ():
        here, there = (data[: window.numel * size] for data in memory)
        part = Part(window.shift(box.start), (0,) * len(window.start))
        try:
            fetch(checkpoint, _requests(checkpoint, one, part, here), verify=True)
        except CorruptionError as error:
            yield Finding(file, f"cannot be compared: {error}", one.name)
            return
        checkpoint.reader.read_into(file, at, there)
        if here != there:
            yield Finding(file, f"bytes {at} to {at + len(there)} are not those of the shards", one.name)
            return
        at += len(there)


def _requests(checkpoint: Checkpoint, one: OutputTensor, part: Part, target: memoryview) -> Iterator[Request]:
    key = one.source[1]
    spec = checkpoint.root.components["model"].tensors[key]
    replicas: Mapping[str, int | None] = checkpoint.replicas("model")
    shape = part.box.shape
    for overlap in plan_load(spec, replicas[key], (part,)):
        entry = checkpoint.entry("model", key, overlap)
        checkpoint.check_file("model", overlap.writer, entry.file)
        yield Request(key, overlap, entry, shape, single_run(overlap, shape, DTYPE_BYTES[one.dtype]), target)
