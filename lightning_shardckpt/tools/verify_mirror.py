"""Is what a checkpoint holds a second time the same as what it holds? For ``verify``; no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lightning_shardckpt.box import Box
from lightning_shardckpt.containers import Tensor
from lightning_shardckpt.errors import CorruptionError, FormatError, ShardCkptError
from lightning_shardckpt.fetch import Request, fetch, single_run
from lightning_shardckpt.files import FileInfo
from lightning_shardckpt.header import DTYPE_BYTES, MAX_HEADER_BYTES, checksum, decode_with_metadata
from lightning_shardckpt.hub import pick
from lightning_shardckpt.index import ROOT_NAME
from lightning_shardckpt.layout import Part
from lightning_shardckpt.plan import plan_load
from lightning_shardckpt.read import Checkpoint
from lightning_shardckpt.shardfile import Finding
from lightning_shardckpt.state.documents import HUGGING_FACE, checked
from lightning_shardckpt.storage.protocol import read_all
from lightning_shardckpt.whole import windows

_WINDOW_BYTES = 4 << 20
_TENSORS = ".safetensors"


def check_mirror(checkpoint: Checkpoint, *, quick: bool) -> Iterator[Finding]:
    """Compare the files that the root index lists as a mirror with the shards; ``quick``: sizes and headers only."""
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
    checkpoint: Checkpoint, info: FileInfo, expected: dict[str, Tensor], quick: bool
) -> Iterator[Finding]:
    """Takes the tensors that the file has out of ``expected``."""
    reader = checkpoint.reader
    if reader.size(info.name) != info.nbytes:
        yield Finding(info.name, f"{reader.size(info.name)} bytes, expected {info.nbytes}")
    prefix = bytearray(8)
    reader.read_into(info.name, 0, memoryview(prefix))
    length = int.from_bytes(prefix, "little")
    if length > min(info.nbytes - 8, MAX_HEADER_BYTES):
        raise FormatError(f"the header claims {length} bytes of a file of {info.nbytes}")
    header = bytearray(length)
    reader.read_into(info.name, 8, memoryview(header))
    if checksum(memoryview(prefix), memoryview(header)) != info.checksum:
        raise CorruptionError("the header is damaged, or it is of another save")
    stored, _ = decode_with_metadata(bytes(header), info.name)
    for name, there in stored.items():
        one = expected.pop(name, None)
        if one is None or (one.dtype, one.shape) != (there.dtype, there.shape):
            yield Finding(info.name, f"{there.dtype} {there.shape}, expected {one and (one.dtype, one.shape)}", name)
        elif not quick:
            yield from _compare(checkpoint, info.name, one, there.begin)


def _compare(checkpoint: Checkpoint, file: str, one: Tensor, begin: int) -> Iterator[Finding]:
    """A tensor with the box that it is, a window at a time; a corrupted shard is a finding of its own elsewhere."""
    size, at = DTYPE_BYTES[one.dtype], begin
    box = one.box or Box.whole(one.shape)
    memory = [memoryview(bytearray(min(one.nbytes, max(_WINDOW_BYTES, size)))) for _ in range(2)]
    for window in windows(box.shape, _WINDOW_BYTES // size) if one.nbytes else ():
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


def _requests(checkpoint: Checkpoint, one: Tensor, part: Part, target: memoryview) -> Iterator[Request]:
    key = one.source[1]
    spec = checkpoint.root.components["model"].tensors[key]
    replicas: Mapping[str, int | None] = checkpoint.replicas("model")
    shape = part.box.shape
    for overlap in plan_load(spec, replicas[key], (part,)):
        entry = checkpoint.entry("model", key, overlap)
        checkpoint.check_file("model", overlap.writer, entry.file)
        yield Request(key, overlap, entry, shape, single_run(overlap, shape, DTYPE_BYTES[one.dtype]), target)
