"""Sources of other formats, whose tensors are boxes of bytes in files: each rank reads its slices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar

from lightning_shardckpt.errors import CorruptionError, FormatError
from lightning_shardckpt.format.box import Box, Shape, find_cover_error
from lightning_shardckpt.format.index import ShardEntry, TensorSpec
from lightning_shardckpt.format.layout import REPLICATED, Part
from lightning_shardckpt.format.plan import Overlap, byte_runs
from lightning_shardckpt.format.safetensors_header import (
    MAX_HEADER_BYTES,
    HeaderLengthError,
    parse_header,
    read_header,
    starts_of,
)
from lightning_shardckpt.format.value_checks import DTYPE_BYTES, bytes_in, refuse_lfs_pointer
from lightning_shardckpt.sources.source import Source, StoredTensor
from lightning_shardckpt.storage.protocol import Reader
from lightning_shardckpt.transfer.shard_reader import Request

# ── tensors in files of other programs ────────────────────────────────────────────────────────────────────────────────
# Boxes of bytes in files tile each tensor. A tensor in a safetensors file is one box, a tensor of torch's distributed
# checkpoint has a box for each chunk, and a tensor joined from several stored tensors a box for each of these. Such
# files have no checksums to compare.


def tensors_of(reader: Reader, name: str, where: str) -> dict[str, ForeignTensor]:
    """Return the tensors of a safetensors file by name; ``where`` is the path of its directory, for messages.

    A slice of a tensor is a tensor with one box, which does not begin at zeros or does not end at the tensor's end.
    """
    where_file = f"{where!r}, file {name}"
    header = parse_header(_header(reader, name, where), where_file)
    tensors = {}
    for key, start in starts_of(header, where_file).items():
        stored = header.tensors[key]
        box = Box.whole(stored.shape).shift(start)
        tensors[key] = ForeignTensor(stored.dtype, box.stop, (ForeignBox(box, name, stored.begin),))
    return tensors


def _header(reader: Reader, name: str, where: str) -> bytes:
    where = f"{where!r}, file {name}"
    try:
        return read_header(partial(reader.read_into, name), reader.size(name))
    except FileNotFoundError:
        raise CorruptionError(f"{where}: the file is missing") from None
    except EOFError as error:
        raise CorruptionError(f"{where}: not a safetensors file: {error}") from None
    except HeaderLengthError as error:
        if error.length <= MAX_HEADER_BYTES:
            raise CorruptionError(f"{where}: {error}; was it cut off?") from None
        start = bytearray(min(reader.size(name), 64))
        reader.read_into(name, 0, memoryview(start))
        refuse_lfs_pointer(start, where)
        raise FormatError(
            f"{where}: not a safetensors file: its header would have {error.length} bytes, more than {MAX_HEADER_BYTES}"
        ) from None


_STEP_BYTES = 1 << 20  # the block size of boxes without checksums


class ForeignBox(NamedTuple):
    """A region of a tensor, and the offset of its bytes in a file: row-major and contiguous."""

    box: Box
    file: str
    begin: int


@dataclass(frozen=True, slots=True)
class ForeignTensor:
    """A tensor of another format; its dtype is named as in safetensors."""

    dtype: str
    shape: Shape
    boxes: tuple[ForeignBox, ...]


class ListedTensor(NamedTuple):
    """A tensor of another format in the checkpoint at ``path``; implements ``StoredTensor``."""

    path: str
    component: str
    key: str
    located: ForeignTensor
    spec: TensorSpec

    def check(self) -> None:
        """Do nothing: the sizes of the files have been checked."""

    def requests(self, parts: tuple[Part, ...], shape: Shape, memory: memoryview) -> list[Request]:
        """Return the requests that fill ``memory``, an array of ``shape`` with the regions ``parts``."""
        tensor, requests = self.located, list[Request]()
        for one in tensor.boxes:
            for part in parts:
                common = one.box.intersect(part.box)
                if common is not None and common.numel:
                    overlap = Overlap(0, one.box, common, common.within(part.box).shift(part.at))
                    runs = byte_runs(overlap, shape, DTYPE_BYTES[tensor.dtype])
                    requests.append(Request(self.key, 0, _entry(tensor, one), runs, memory))
        return requests


def list_tensors(
    path: str, reader: Reader, component: str, tensors: Mapping[str, ForeignTensor]
) -> dict[str, StoredTensor]:
    """Return stored tensors by key, after checking their boxes; ``path`` is of the checkpoint.

    Raises:
        FormatError: if the boxes of a tensor do not tile it.
        CorruptionError: if a file is too short for a box, or missing.
    """

    @cache
    def size(file: str) -> int:
        try:
            return reader.size(file)
        except FileNotFoundError:
            raise CorruptionError(f"{path!r}, file {file}: the file is missing") from None

    listed: dict[str, StoredTensor] = {}
    for key, tensor in tensors.items():
        problem = find_cover_error(tensor.shape, (box for box, _, _ in tensor.boxes))
        if problem is not None:
            raise FormatError(f"{path!r}: {key!r}, {tensor.dtype} {tensor.shape}: {problem}")
        for box, file, begin in tensor.boxes:
            end = begin + bytes_in(box.shape, tensor.dtype)
            if not 0 <= begin <= end <= size(file):
                where = f"{path!r}, file {file}"
                raise CorruptionError(f"{where}: {key!r} should be at bytes {begin} to {end} of {size(file)}")
        spec = TensorSpec(tensor.dtype, tensor.shape, REPLICATED, ((0, 1),))
        listed[key] = ListedTensor(path, component, key, tensor, spec)
    return listed


def _entry(tensor: ForeignTensor, one: ForeignBox) -> ShardEntry:
    nbytes = one.box.numel * DTYPE_BYTES[tensor.dtype]
    return ShardEntry(one.box, tensor.shape, tensor.dtype, one.file, one.begin, _STEP_BYTES, nbytes, "")


_R = TypeVar("_R", bound=Reader)


@contextmanager
def close_on_error(reader: _R) -> Iterator[_R]:
    """Close a reader if the block fails."""
    try:
        yield reader
    except BaseException:
        reader.close()
        raise


def foreign_source(
    path: str,
    reader: Reader,
    tensors: Mapping[str, Mapping[str, ForeignTensor]],
    aliases: Mapping[str, Mapping[str, str]] | None = None,
    documents: Mapping[str, Any] | None = None,
    rest: dict[str, Any] | None = None,
    all_modules: Callable[[], Source] | None = None,
) -> Source:
    """Return a checkpoint of another format as a source; it raises like ``list_tensors``.

    Args:
        path: of the checkpoint.
        reader: of its files.
        tensors: by component ("model", "optimizer", "trainer") and key, as in a checkpoint of this package; optimizer
            state as ``<n>/<FQN>/<state>``.
        aliases: further names of tensors, by component.
        documents: of "model" and "optimizer", from ``model_leaves`` and ``optimizer_leaves``.
        rest: Lightning's checkpoint dict without ``state_dict`` and ``optimizer_states``.
        all_modules: see ``Source``.
    """
    return Source(
        path=path,
        reader=reader,
        table={component: list_tensors(path, reader, component, of) for component, of in tensors.items()},
        aliases=aliases or {},
        documents=lambda role, rank: (documents or {}).get(role),
        trainer=lambda stored: dict(rest or {}),
        all_modules=all_modules,
    )
