"""The root index and the rank indexes, as values and as JSON. FORMAT.md has the rules.

The root index holds the dtype, global shape and layout of every tensor, no lists of boxes. The rank that wrote a box
follows by arithmetic (``plan.py``); the file and the offset of a box are in the index of that rank. Equal tensors share
one spec object, and equal fields are checked once.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

from lightning_shardckpt.errors import CorruptionError, FormatError
from lightning_shardckpt.format.layout import MAX_RANKS, Axis, Box, DimShard, Holders, Layout, Shape
from lightning_shardckpt.format.value_checks import (
    DTYPE_BYTES,
    SAVE_ID_LENGTH,
    bytes_in,
    check_digests,
    check_dtype,
    check_file_name,
    check_json_size,
    check_shape,
    check_size,
    check_text,
    checksum,
    compact,
    parse_json,
    shown,
    text_check,
)

FORMAT, VERSION = "lightning-shardckpt", "1.0"
MAX_BLOCK_BYTES = 4 << 20  # a reader must hold a block in memory to verify its checksum
COMPONENTS = ("model", "optimizer", "trainer")
_T = TypeVar("_T")
_check_save_id = text_check(rf"[0-9a-f]{{{SAVE_ID_LENGTH}}}", "a save id")
_check_digest = text_check(r"[0-9a-f]{16}", "a checksum")


# ── names of files ────────────────────────────────────────────────────────────────────────────────────────────────────

ROOT_NAME = "checkpoint.index.json"
EXPORT_FOLDER = "huggingface"
"""A folder with an export of the model, which is no part of the checkpoint but goes with it."""
HEAD_BYTES = 4096  # of a root index; its prefix is within them
PREFIXED_NAME = re.compile(r"([0-9a-f]{16}-)[A-Za-z0-9_-][A-Za-z0-9._-]*")
_PREFIX = re.compile(rb'"prefix":"([0-9a-f]{16}-)"')
_PART = re.compile(r"([0-9a-f]{16}-)?(model|optimizer|trainer|frozen)-(dist|meta-dist|state)\b[A-Za-z0-9._-]*")


def shard_file_name(component: str, rank: int, number: int) -> str:
    """Return the name of a rank's shard file; numbers count from 1."""
    return f"{component}-dist-{rank:05d}-shard-{number:05d}.safetensors"


def rank_index_name(component: str, rank: int) -> str:
    """Return the name of a rank's index of a component."""
    return f"{component}-meta-dist-{rank:05d}.index.json"


def is_part(name: str) -> bool:
    """Return True for the name of a rank index, a shard file or a document, in a directory or an object store."""
    return _PART.fullmatch(name) is not None


def is_export(name: str) -> bool:
    """Return True if an object of a checkpoint is of its export, which must not outlive its root index."""
    return name.startswith(f"{EXPORT_FOLDER}/")


def is_ours(name: str) -> bool:
    """Return True if a file or object of a checkpoint has a name that a save gives. Nothing else is deleted.

    >>> is_ours("0123456789abcdef-x.json"), is_ours("model-meta-dist-00000.index.json"), is_ours("huggingface/x.json")
    (True, True, True)
    >>> is_ours("epoch=1.ckpt/model-dist-00000-shard-00001.safetensors"), is_ours("config.yaml")
    (False, False)
    """
    is_extra = is_export(name) or name in ("huggingface.json", "peft.json")
    return is_extra or is_part(name) or PREFIXED_NAME.fullmatch(name) is not None


def read_prefix(root: bytes) -> str:
    """Return the prefix that a root index records in its first bytes; empty if there is none."""
    match = _PREFIX.search(root, 0, HEAD_BYTES)
    return match[1].decode() if match else ""


def prefix_of(save_id: str) -> str:
    """Return the prefix of the names of a save's files, which no other save uses."""
    return save_id[:16] + "-"


# ── values ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class FileInfo(NamedTuple):
    """Base name, size and xxh3-64 of a file, a list in JSON; a shard file's checksum covers only its header."""

    name: str
    nbytes: int
    checksum: str


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Description of a tensor, the same on all ranks. The lowest holder of each shard writes a ``pinned`` one."""

    dtype: str
    shape: Shape
    layout: Layout
    holders: Holders
    pinned: bool = False


class ShardEntry(NamedTuple):
    """A written box: the file, the offset and the length of its bytes, and 16 hex digits for each ``block`` of them."""

    box: Box
    global_shape: Shape
    dtype: str
    file: str
    begin: int
    block: int
    nbytes: int
    checksums: str


@dataclass(frozen=True, slots=True)
class RankIndex:
    """The index of the boxes of one component that one rank wrote."""

    save_id: str
    component: str
    rank: int
    files: dict[str, FileInfo]
    shards: dict[str, tuple[ShardEntry, ...]]


@dataclass(frozen=True, slots=True)
class Component:
    """The tensors of one component of the state, its aliases (name -> stored tensor) and the ranks' index files."""

    tensors: dict[str, TensorSpec]
    aliases: dict[str, str] = field(default_factory=dict)
    indexes: dict[int, FileInfo] = field(default_factory=dict)

    @property
    def names(self) -> dict[str, str]:
        """The stored tensor by each of its names."""
        return {**{key: key for key in self.tensors}, **self.aliases}


@dataclass(frozen=True, slots=True)
class RootIndex:
    """Description of a checkpoint, with the JSON files of state that is not tensors, and the prefix of file names."""

    save_id: str
    world_size: int
    components: dict[str, Component]
    documents: dict[str, FileInfo]
    step: int | None = None
    epoch: int | None = None
    topology: dict[str, int] = field(default_factory=dict)
    software: dict[str, str] = field(default_factory=dict)
    prefix: str = ""


# ── values as JSON ────────────────────────────────────────────────────────────────────────────────────────────────────
# Named tuples are lists in JSON. An error of Python in a function that decodes becomes a FormatError in `_decode`.


def _row(values: Any, *checks: Callable[[Any], Any]) -> list[Any]:
    return [check(value) for check, value in zip(checks, values, strict=True)]


def _file_info(*values: Any) -> FileInfo:
    return FileInfo(*_row(values, check_file_name, check_size, _check_digest))


def _decode(text: bytes, where: str, decode: Callable[[dict[str, Any]], _T]) -> _T:
    """Parse an index, check its format and version, and decode it. Raises a FormatError that names ``where``."""
    value = parse_json(text, where)
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise FormatError(f"{where}: not an index of {FORMAT}")
    if value.get("version") != VERSION:
        raise FormatError(
            f"{where}: format version {shown(value.get('version'))}, but this package reads {VERSION}; use the "
            "lightning-shardckpt that wrote it"
        )
    try:
        return decode(value)
    except FormatError as error:
        raise FormatError(f"{where}: {error}") from None
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        cause = f"{type(error).__name__}: {str(error)[:200]}"
        raise FormatError(f"{where}: a part is missing or malformed: {cause}") from None


_FIELDS = ("offsets", "lengths", "global_shape", "dtype", "file", "rank", "begin", "block", "checksums")
_shared_fields = itemgetter("offsets", "lengths", "global_shape", "dtype", "file", "block")


def rank_index_to_json(index: RankIndex) -> bytes:
    """Return the bytes of a rank index. Raises FormatError if it is too large for a reader."""
    metadata: dict[str, Any] = {}
    for name, entries in index.shards.items():
        items = []
        for box, shape, dtype, file, begin, block, _, sums in entries:
            values = box.start, box.shape, shape, dtype, file, index.rank, begin, block, sums
            items.append(dict(zip(_FIELDS, values, strict=True)))
        metadata[name] = {**items[0], "more": items[1:]} if len(items) > 1 else items[0]
    files = {info.name: info[1:] for info in index.files.values()}
    head = {"format": FORMAT, "version": VERSION, "save_id": index.save_id}
    value = {"component": index.component, "rank": index.rank, "files": files, "metadata": metadata}
    text = compact(head | value).encode()
    check_json_size(text, "an index")
    return text


def rank_index_from_json(text: bytes, where: str) -> RankIndex:
    """Return the index that these bytes encode. Raises a FormatError that names ``where``."""
    return _decode(text, where, _rank_index)


def _rank_index(value: dict[str, Any]) -> RankIndex:
    files = {name: _file_info(name, *info) for name, info in value["files"].items()}
    left = {name: file.nbytes for name, file in files.items()}
    shards: dict[str, tuple[ShardEntry, ...]] = {}
    known: dict[str, ShardEntry] = {}
    for key, first in value["metadata"].items():
        entries: tuple[ShardEntry, ...] = (_entry(first, known),)  # nearly always the only one
        if "more" in first:
            entries += tuple([_entry(item, known) for item in first["more"]])
        for entry in entries:
            file, end = files[entry.file], entry.begin + entry.nbytes
            left[entry.file] -= entry.nbytes
            if end > file.nbytes:
                raise FormatError(f"{shown(key)} ends at byte {end} of {entry.file}, which has {file.nbytes}")
            if left[entry.file] < 0:
                raise FormatError(f"{shown(key)} and the tensors before it share bytes of {entry.file}")
        shards[check_text(key)] = entries
    rank, save_id = check_size(value["rank"]), _check_save_id(value["save_id"])
    return RankIndex(save_id, check_text(value["component"]), rank, files, shards)


def _entry(item: dict[str, Any], known: dict[str, ShardEntry]) -> ShardEntry:
    """Return an entry; ``known`` has checked ones by the repr of their shared fields, in which 1, 1.0, true differ."""
    text = repr(values := _shared_fields(item))
    if text not in known:
        offsets, lengths, global_shape, dtype, file, block = values
        start, shape = check_shape(offsets), check_shape(global_shape)
        box = Box(start, tuple(a + n for a, n in zip(start, check_shape(lengths), strict=True)))
        if any(b > n for b, n in zip(box.stop, shape, strict=True)):
            raise FormatError(f"box {start}..{box.stop} lies outside shape {shape}")
        bytes_in(shape, check_dtype(dtype))
        if not 1 <= check_size(block) <= MAX_BLOCK_BYTES:
            raise FormatError(f"checksums of {block} bytes each, expected 1 to {MAX_BLOCK_BYTES}")
        nbytes = box.numel * DTYPE_BYTES[dtype]
        known[text] = ShardEntry(box, shape, dtype, check_file_name(file), 0, block, nbytes, "")
    box, shape, dtype, file, _, block, nbytes, _ = known[text]
    sums = check_digests(item["checksums"], -(-nbytes // block))
    return ShardEntry(box, shape, dtype, file, check_size(item["begin"]), block, nbytes, sums)


_SEAL = re.compile(rb'\{"checksum":"([0-9a-f]{16})",\n')


def root_to_json(root: RootIndex) -> bytes:
    """Return the bytes of the root index. Raises FormatError if it is too large for a reader."""
    layouts: dict[tuple[Layout, Holders], int] = {}
    specs: dict[int, list[Any]] = {}  # equal tensors share one spec object
    components = {}
    for name, component in root.components.items():
        for spec in component.tensors.values():
            if id(spec) not in specs:
                number = layouts.setdefault((spec.layout, spec.holders), len(layouts))
                specs[id(spec)] = [spec.dtype, spec.shape, number] + ([1] if spec.pinned else [])
        tensors = {key: specs[id(spec)] for key, spec in component.tensors.items()}
        components[name] = {"tensors": tensors, "aliases": component.aliases, "indexes": component.indexes}
    value = {
        "format": FORMAT, "version": VERSION, "save_id": root.save_id,
        "step": root.step,
        "epoch": root.epoch,
        "world_size": root.world_size,
        "topology": root.topology,
        "software": root.software,
        **({"prefix": root.prefix} if root.prefix else {}),
        "layouts": [
            {"axes": layout.axes, "cuts": layout.cuts, "holders": holders}
            | ({} if layout.order is None else {"order": layout.order})
            for layout, holders in layouts
        ],
        "components": components,
        "documents": {info.name: info[1:] for info in root.documents.values()},
    }
    body = compact(value)[1:].encode()
    check_json_size(body, "the root index")
    return f'{{"checksum":"{checksum(body)}",\n'.encode() + body


def root_from_json(text: bytes, where: str) -> RootIndex:
    """Return the root index that these bytes encode.

    Raises:
        CorruptionError: if the checksum on the first line does not match the rest.
        FormatError: if they are not a valid root index, or of another version.
    """
    seal = _SEAL.match(text)
    if seal is None or checksum(text[seal.end() :]) != seal[1].decode():
        raise CorruptionError(f"{where}: the root index is damaged: it does not match the checksum in its first line")
    return _decode(text, where, _root)


def _root(value: dict[str, Any]) -> RootIndex:
    world, save_id = check_size(value["world_size"]), _check_save_id(value["save_id"])
    if not 1 <= world <= MAX_RANKS:
        raise FormatError(f"a world of {world} ranks, expected 1 to {MAX_RANKS}")
    if (prefix := value.get("prefix", "")) not in ("", prefix_of(save_id)):
        raise FormatError(f"prefix {shown(prefix)}, expected none or the first 16 digits of the save id and a hyphen")
    if unknown := value["components"].keys() - {*COMPONENTS}:
        raise FormatError(f"unknown component {shown(min(unknown))}")
    layouts = [_layout(item, world) for item in value["layouts"]]
    return RootIndex(
        save_id=save_id,
        world_size=world,
        components={name: _component(item, layouts, world) for name, item in value["components"].items()},
        documents={name: _file_info(name, *info) for name, info in value["documents"].items()},
        step=None if value["step"] is None else check_size(value["step"]),
        epoch=None if value["epoch"] is None else check_size(value["epoch"]),
        topology={check_text(k): check_size(v) for k, v in value["topology"].items()},
        software={check_text(k): check_text(v) for k, v in value["software"].items()},
        prefix=prefix,
    )


def _layout(item: dict[str, Any], world: int) -> tuple[Layout, Holders]:
    axes = tuple(Axis(*_row(axis, check_text, check_size, check_size)) for axis in item["axes"])
    cuts = tuple(DimShard(*_row(cut, check_size, check_size, check_size)) for cut in item["cuts"])
    holders = tuple((check_size(a), check_size(b)) for a, b in item["holders"])
    edges = [0, *(edge for pair in holders for edge in pair), world]
    if not holders or edges != sorted(edges) or any(a == b for a, b in holders):
        raise FormatError(f"holders {shown(holders)} in a world of {world}")
    return Layout(axes, cuts, tuple(map(check_size, item["order"])) if "order" in item else None), holders


def _component(item: dict[str, Any], layouts: list[tuple[Layout, Holders]], world: int) -> Component:
    specs, tensors = dict[str, TensorSpec](), dict[str, TensorSpec]()  # equal tensors share one spec, checked once
    for key, values in item["tensors"].items():
        text = repr(values)  # in which 1, 1.0 and true differ
        if text not in specs:
            dtype, size, number, *pinned = values
            shape, (layout, holders) = check_shape(size), layouts[check_size(number)]
            if pinned not in ([], [1]):
                raise FormatError(f"{shown(pinned)} after dtype, shape and layout, expected nothing or a 1")
            if any(cut.dim >= len(shape) for cut in layout.cuts):
                raise FormatError(f"a layout that cuts dim {max(c.dim for c in layout.cuts)} of shape {shape}")
            bytes_in(shape, check_dtype(dtype))
            specs[text] = TensorSpec(dtype, shape, layout, holders, bool(pinned))
        tensors[check_text(key)] = specs[text]
    aliases = {check_text(alias): check_text(target) for alias, target in item["aliases"].items()}
    for alias, target in aliases.items():
        if target not in tensors or alias in tensors:
            raise FormatError(f"alias {shown(alias)} of {shown(target)}, which is not a stored tensor of its own")
    indexes = {int(rank): _file_info(*info) for rank, info in item["indexes"].items()}
    if [*map(str, indexes)] != [*item["indexes"]] or any(not 0 <= rank < world for rank in indexes):
        raise FormatError(f"indexes of ranks {shown([*item['indexes']])} in a world of {world}")
    return Component(tensors, aliases, indexes)
