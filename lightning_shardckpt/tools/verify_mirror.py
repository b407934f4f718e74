"""Compare the mirror of a checkpoint, its files for transformers, with the shards. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from lightning_shardckpt.errors import CorruptionError, ShardCkptError
from lightning_shardckpt.format.box import Box
from lightning_shardckpt.format.checksum import checksum
from lightning_shardckpt.format.file_names import FileInfo
from lightning_shardckpt.format.index import ROOT_NAME
from lightning_shardckpt.format.layout import Part
from lightning_shardckpt.format.plan import plan_load
from lightning_shardckpt.format.safetensors_files import OutputTensor
from lightning_shardckpt.format.safetensors_header import parse_header, read_header
from lightning_shardckpt.format.value_checks import DTYPE_BYTES
from lightning_shardckpt.state.documents import HUGGING_FACE, checked
from lightning_shardckpt.state.hf_directory import pick
from lightning_shardckpt.storage.protocol import read_all
from lightning_shardckpt.tools.verify_shards import Finding
from lightning_shardckpt.transfer.fetch import fetch
from lightning_shardckpt.transfer.read_plan import Request, single_run
from lightning_shardckpt.transfer.reader import Checkpoint
from lightning_shardckpt.transfer.tensor_windows import windows

_WINDOW_BYTES = 4 << 20
_TENSORS = ".safetensors"


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
            yield from _compare(checkpoint, info.name, one, there.begin)


def _compare(checkpoint: Checkpoint, file: str, one: OutputTensor, begin: int) -> Iterator[Finding]:
    """Compare a tensor with its box in the shards, a window at a time; a corrupted shard is a finding elsewhere."""
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


def _requests(checkpoint: Checkpoint, one: OutputTensor, part: Part, target: memoryview) -> Iterator[Request]:
    key = one.source[1]
    spec = checkpoint.root.components["model"].tensors[key]
    replicas: Mapping[str, int | None] = checkpoint.replicas("model")
    shape = part.box.shape
    for overlap in plan_load(spec, replicas[key], (part,)):
        entry = checkpoint.entry("model", key, overlap)
        checkpoint.check_file("model", overlap.writer, entry.file)
        yield Request(key, overlap, entry, shape, single_run(overlap, shape, DTYPE_BYTES[one.dtype]), target)
