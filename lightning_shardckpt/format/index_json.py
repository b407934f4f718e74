"""The root index and the per-rank indexes as JSON: what is written, and how what others wrote is checked.

Whatever is wrong in a file becomes a FormatError that names the file; see FORMAT.md for the rules.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from lightning_shardckpt.errors import CorruptionError, FormatError
from lightning_shardckpt.format.box import Box, Shape
from lightning_shardckpt.format.checksum import BETWEEN, checksum, count_of
from lightning_shardckpt.format.file_names import (
    document_name,
    documents_by_rank,
    file_info,
    from_columns,
    linked_file_info,
    rank_index_name,
    to_columns,
)
from lightning_shardckpt.format.index import MAX_BLOCK_BYTES, Component, RankIndex, RootIndex, ShardEntry, TensorSpec
from lightning_shardckpt.format.index_scan import ScannedEntry, scan_rank_index
from lightning_shardckpt.format.layout import MAX_RANKS, Axis, DimShard, Holders, Layout
from lightning_shardckpt.format.strict_json import check_json_size, parse_json, texts
from lightning_shardckpt.format.value_checks import (
    DTYPE_BYTES,
    bytes_in,
    check_digest,
    check_digests,
    check_dtype,
    check_file_name,
    check_save_id,
    check_shape,
    check_size,
    check_text,
    check_texts,
    is_hex,
    shown,
)

FORMAT = "lightning-shardckpt"
VERSION = 3
"""The highest that is read. What has the same words in version 1 is written as that."""
_NEWEST_ROOT = 2  # version 3 is of rank indexes alone
MANY_RANKS = 256
"""Worlds of more have a root index of version 2, which does not repeat names that follow from the rank."""
COMPONENTS = ("model", "optimizer", "trainer")
_DIGITS = 16  # of a digest
_SEAL = re.compile(rb'\{"checksum":"([0-9a-f]{16})",\n')
_T = TypeVar("_T")


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def rank_index_to_json(index: RankIndex) -> bytes:
    """The bytes of a per-rank index."""
    head: dict[str, Any] = {
        "format": FORMAT,
        "version": 3 if any(file.save_id for file in index.files.values()) else 1,
        "save_id": index.save_id,
        "component": index.component,
        "rank": index.rank,
        "files": {f.name: [f.nbytes, f.checksum] + [f.save_id] * bool(f.save_id) for f in index.files.values()},
    }
    if index.crc64:
        head["crc64"] = index.crc64
    kinds: dict[tuple[int, Shape, str, str], str] = {}  # many entries are alike
    metadata = []
    for name, entries in zip(texts(list(index.shards)), index.shards.values(), strict=True):
        first, *more = [_entry_to_json(entry, index.rank, kinds) for entry in entries]
        behind = f',"more":[{",".join(f"{{{one}}}" for one in more)}]' if more else ""
        metadata.append(f"{name}:{{{first}{behind}}}")
    text = f'{_text(head)[:-1]},"metadata":{{{",".join(metadata)}}}}}'.encode()
    check_json_size(text, "an index")
    return text


def _entry_to_json(entry: ShardEntry, rank: int, kinds: dict[tuple[int, Shape, str, str], str]) -> str:
    kind = id(entry.box), entry.global_shape, entry.dtype, entry.file
    if kind not in kinds:
        about = {
            "offsets": entry.box.start,
            "lengths": entry.box.shape,
            "global_shape": entry.global_shape,
            "dtype": entry.dtype,
            "file": entry.file,
            "rank": rank,
        }
        kinds[kind] = _text(about)[1:-1]
    sums = f'"{entry.checksums}"' if entry.checksums else ""
    return f'{kinds[kind]},"begin":{entry.begin},"block":{entry.block},"checksums":[{sums}]'


def rank_index_from_json(text: bytes, where: str) -> RankIndex:
    """The index in these bytes.

    Raises:
        FormatError: naming ``where`` and what is wrong.
    """
    scanned = scan_rank_index(text, where)
    if scanned is None:
        return _decoded(parse_json(text, where), where, _rank_index)
    value, entries = scanned
    return _decoded(value, where, partial(_scanned_index, entries))


@dataclass(frozen=True, slots=True)
class TablesText:
    """The JSON of the tensors in a root index: the same for all saves of the same tensors."""

    layouts: str
    components: dict[str, str]
    """Of each component, all but its indexes."""


def tables_to_text(components: Mapping[str, Component]) -> TablesText:
    """The tensors and aliases of components, and the layouts that they have."""
    layouts: dict[tuple[Layout, Holders], int] = {}
    specs: dict[int, list[Any]] = {}  # tensors that are alike share their spec
    texts = {}
    for name, component in components.items():
        for spec in component.tensors.values():
            if id(spec) not in specs:
                number = layouts.setdefault((spec.layout, spec.holders), len(layouts))
                specs[id(spec)] = [spec.dtype, list(spec.shape), number] + ([1] if spec.pinned else [])
        tensors = {key: specs[id(spec)] for key, spec in component.tensors.items()}
        texts[name] = _text({"tensors": tensors, "aliases": component.aliases})
    return TablesText(_text([_layout_to_json(layout, holders) for layout, holders in layouts]), texts)


def root_to_json(root: RootIndex, tables: TablesText | None = None) -> bytes:
    """The bytes of the root index; its first line is the checksum of the rest.

    ``tables``: of its components, where that is known already.
    """
    tables = tables or tables_to_text(root.components)
    head: dict[str, Any] = {
        "format": FORMAT,
        "version": 2 if root.world_size > MANY_RANKS else 1,
        "save_id": root.save_id,
        "step": root.step,
        "epoch": root.epoch,
        "world_size": root.world_size,
        "topology": root.topology,
        "software": root.software,
    }
    if root.prefix:
        head["prefix"] = root.prefix
    components = []
    for name, component in root.components.items():
        indexes: dict[str, Any] = {str(r): [f.name, f.nbytes, f.checksum] for r, f in component.indexes.items()}
        if head["version"] == 2:
            indexes = to_columns(component.indexes)
        digest = "" if component.crc64 is None else f',"crc64":"{component.crc64}"'
        components.append(f'{_text(name)}:{tables.components[name][:-1]},"indexes":{_text(indexes)}{digest}}}')
    single, by_rank = (root.documents, {}) if head["version"] == 1 else documents_by_rank(root.documents)
    documents: dict[str, Any] = {f.name: [f.nbytes, f.checksum] for f in single.values()}
    if head["version"] == 2:
        head["documents_by_rank"] = {stem: to_columns(files) for stem, files in by_rank.items()}
    if root.mirror:
        head["mirror"] = {f.name: [f.nbytes, f.checksum] for f in root.mirror.values()}
    parts = [_text(head)[1:-1], f'"layouts":{tables.layouts}', f'"components":{{{",".join(components)}}}']
    body = f'{",".join(parts)},"documents":{_text(documents)}}}'.encode()
    check_json_size(body, "the root index")
    return f'{{"checksum":"{checksum(body)}",\n'.encode() + body


def root_from_json(text: bytes, where: str) -> RootIndex:
    """The root index in these bytes.

    Raises:
        CorruptionError: if the checksum on the first line is not that of the rest.
        FormatError: if it is no root index, or of a newer version.
    """
    seal = _SEAL.match(text)
    if seal is None:
        raise FormatError(f"{where}: not a root index: the first line holds no checksum")
    if checksum(text[seal.end() :]) != seal[1].decode():
        raise CorruptionError(
            f"{where}: the root index is damaged: its content does not match its checksum {seal[1].decode()}"
        )
    return _decoded(parse_json(text, where), where, _root, newest=_NEWEST_ROOT)


def _layout_to_json(layout: Layout, holders: Holders) -> dict[str, Any]:
    out: dict[str, Any] = {
        "axes": [[a.name, a.size, a.stride] for a in layout.axes],
        "cuts": [[c.axis, c.dim, c.blocks] for c in layout.cuts],
        "holders": [list(h) for h in holders],
    }
    return out if layout.order is None else {**out, "order": list(layout.order)}


def _decoded(value: Any, where: str, decode: Callable[[dict[str, Any]], _T], *, newest: int = VERSION) -> _T:
    """``decode`` applied to a JSON object of our format and version; whatever it trips over becomes a FormatError."""
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise FormatError(f"{where}: not an index of {FORMAT}")
    version = value.get("version")
    if type(version) is not int or not 1 <= version <= newest:
        raise FormatError(
            f"{where}: format version {shown(version)}, this package reads 1 to {newest}; use a newer "
            "lightning-shardckpt"
        )
    try:
        return decode(value)
    except FormatError as error:
        raise FormatError(f"{where}: {error}") from None
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        what = f"{type(error).__name__}: {str(error)[:200]}"
        raise FormatError(f"{where}: a part is missing or malformed: {what}") from None


def _rank_index(value: dict[str, Any]) -> RankIndex:
    shards: dict[str, tuple[ShardEntry, ...]] = {}
    extents: dict[str, _Extent] = {}
    for key, first in value["metadata"].items():
        items = (first, *first["more"]) if "more" in first else (first,)
        shards[check_text(key)] = tuple([_entry(item, extents) for item in items])
    return _with_shards(value, shards)


def _scanned_index(entries: list[ScannedEntry], value: dict[str, Any]) -> RankIndex:
    shards: dict[str, tuple[ShardEntry, ...]] = {}
    extents: dict[tuple[str, str], _Extent] = {}
    for key, about, begin, block_text, sums in entries:
        extent = extents.get((about, block_text))
        if extent is None:
            item = parse_json(f'{{{about},"block":{block_text}}}'.encode(), shown(key))
            extent = extents[about, block_text] = _extent(*map(item.__getitem__, _EXTENT))
        box, shape, dtype, file, block, nbytes = extent
        if count_of(sums) != -(-nbytes // block):
            raise _wrong_count(sums, block, nbytes)
        shards[key] = (ShardEntry(box, shape, dtype, file, begin, block, nbytes, sums),)
    return _with_shards(value, shards)


def _with_shards(value: dict[str, Any], shards: dict[str, tuple[ShardEntry, ...]]) -> RankIndex:
    described = linked_file_info if value["version"] == 3 else file_info
    files = {name: (described if len(info) > 2 else file_info)(name, *info) for name, info in value["files"].items()}
    sizes = {name: file.nbytes for name, file in files.items()}
    left = dict(sizes)
    for key, entries in shards.items():
        for entry in entries:
            file, nbytes = entry.file, entry.nbytes
            end, rest = entry.begin + nbytes, left[file] - nbytes
            if end > sizes[file]:
                raise FormatError(f"{shown(key)} ends at byte {end} of {file}, which has {sizes[file]}")
            if rest < 0:
                raise FormatError(f"{shown(key)} and the tensors before it share bytes of {file}")
            left[file] = rest
    rank, save_id = check_size(value["rank"]), check_save_id(value["save_id"])
    parts = _parts(value.get("crc64", ""), shards)
    return RankIndex(save_id, check_text(value["component"]), rank, files, shards, parts)


def _parts(text: Any, shards: dict[str, tuple[ShardEntry, ...]]) -> str:
    """Return the digits that there are for boxes, which are all or none."""
    count = sum(map(len, shards.values()))
    if not isinstance(text, str) or len(text) not in (0, _DIGITS * count):
        raise FormatError(f"crc64 has not {_DIGITS} digits for each of {count} boxes: {shown(text)}")
    if not is_hex(text):  # rare, and else as fast as there are many of them
        keys = (key for key, entries in shards.items() for _ in entries)
        for key, digits in zip(keys, re.findall(f"(?s).{{{_DIGITS}}}", text), strict=True):
            if not is_hex(digits):
                raise FormatError(f"crc64 has {shown(digits)} for {shown(key)}, and not lower-case hex digits")
    return text


def _wrong_count(sums: str, block: int, nbytes: int) -> FormatError:
    return FormatError(f"{count_of(sums)} checksums of {block} bytes each for {nbytes} bytes")


_Extent = tuple[Box, Shape, str, str, int, int]
_EXTENT = ("offsets", "lengths", "global_shape", "dtype", "file", "block")


def _entry(item: dict[str, Any], extents: dict[str, _Extent]) -> ShardEntry:
    """``extents`` are those that were seen: many tensors are alike. Their repr tells 1 from 1.0 and true."""
    extent = [item[name] for name in _EXTENT]
    text = repr(extent)
    if text not in extents:
        extents[text] = _extent(*extent)
    box, shape, dtype, file, block, nbytes = extents[text]
    sums = BETWEEN.join(check_digests(item["checksums"]))
    if count_of(sums) != -(-nbytes // block):
        raise _wrong_count(sums, block, nbytes)
    return ShardEntry(box, shape, dtype, file, check_size(item["begin"]), block, nbytes, sums)


def _extent(offsets: Any, lengths: Any, global_shape: Any, dtype: Any, file: Any, block: Any) -> _Extent:
    start, shape = check_shape(offsets), check_shape(global_shape)
    stop = tuple(a + n for a, n in zip(start, check_shape(lengths), strict=True))
    if any(b > n for b, n in zip(stop, shape, strict=True)):
        raise FormatError(f"box {start}..{stop} lies outside shape {shape}")
    bytes_in(shape, check_dtype(dtype))
    if not 1 <= check_size(block) <= MAX_BLOCK_BYTES:
        raise FormatError(f"checksums of {block} bytes each, from 1 to {MAX_BLOCK_BYTES} can be")
    box = Box(start, stop)
    return box, shape, dtype, check_file_name(file), block, box.numel * DTYPE_BYTES[dtype]


def _root(value: dict[str, Any]) -> RootIndex:
    world = check_size(value["world_size"])
    if not 1 <= world <= MAX_RANKS:
        raise FormatError(f"a world of {world} ranks; 1 to {MAX_RANKS} can be")
    layouts = [_layout(item, world) for item in value["layouts"]]
    components = {}
    for name, item in value["components"].items():
        if name not in COMPONENTS:
            raise FormatError(f"unknown component {shown(name)}")
        components[name] = _component(name, item, layouts, world, value["version"])
    documents = {name: file_info(name, n, c) for name, (n, c) in value["documents"].items()}
    for stem, columns in value["documents_by_rank"].items() if value["version"] == 2 else ():
        found = from_columns(columns, partial(document_name, stem), world)
        documents |= {info.name: info for info in found.values()}
    return RootIndex(
        save_id=check_save_id(value["save_id"]),
        world_size=world,
        components=components,
        documents=documents,
        step=None if value["step"] is None else check_size(value["step"]),
        epoch=None if value["epoch"] is None else check_size(value["epoch"]),
        topology={check_text(k): check_size(v) for k, v in value["topology"].items()},
        software={check_text(k): check_text(v) for k, v in value["software"].items()},
        mirror={name: file_info(name, n, c) for name, (n, c) in value.get("mirror", {}).items()},
        prefix=_prefix(value.get("prefix", ""), value["save_id"]),
    )


def _prefix(value: Any, save_id: str) -> str:
    if value not in ("", f"{save_id[:16]}-"):
        raise FormatError(f"prefix {shown(value)}; it is the first 16 digits of the save id and a hyphen, if anything")
    return str(value)


def _component(
    component: str, item: dict[str, Any], layouts: list[tuple[Layout, Holders]], world: int, version: int
) -> Component:
    specs: dict[str, TensorSpec] = {}  # one for all tensors that are alike: what was found of it once need not be again
    keys = check_texts(list(item["tensors"]))
    tensors = {key: _spec_once(spec, layouts, specs) for key, spec in zip(keys, item["tensors"].values(), strict=True)}
    aliases = {check_text(alias): check_text(of) for alias, of in item["aliases"].items()}
    for alias, of in aliases.items():
        if of not in tensors or alias in tensors:
            raise FormatError(f"alias {shown(alias)} of {shown(of)}, which is not a stored tensor of its own")
    digest = check_digest(item["crc64"]) if "crc64" in item else None
    if version == 2:
        columns = from_columns(item["indexes"], partial(rank_index_name, component), world)
        return Component(tensors, aliases, columns, digest)
    indexes = {}
    for rank, (name, nbytes, sums) in item["indexes"].items():
        number = int(rank)
        if str(number) != rank or not 0 <= number < world:
            raise FormatError(f"the index of rank {shown(rank)} in a world of {world}")
        indexes[number] = file_info(name, nbytes, sums)
    return Component(tensors, aliases, indexes, digest)


def _layout(item: dict[str, Any], world: int) -> tuple[Layout, Holders]:
    axes = tuple(Axis(check_text(name), check_size(size), check_size(stride)) for name, size, stride in item["axes"])
    cuts = tuple(DimShard(check_size(axis), check_size(dim), check_size(blocks)) for axis, dim, blocks in item["cuts"])
    holders = tuple((check_size(a), check_size(b)) for a, b in item["holders"])
    edges = [0, *(edge for pair in holders for edge in pair), world]
    if not holders or edges != sorted(edges) or any(a == b for a, b in holders):
        raise FormatError(f"holders {shown(holders)} in a world of {world}")
    order = tuple(check_size(r) for r in item["order"]) if "order" in item else None
    return Layout(axes, cuts, order), holders


def _spec_once(item: Any, layouts: list[tuple[Layout, Holders]], known: dict[str, TensorSpec]) -> TensorSpec:
    text = repr(item)  # tells 1 from 1.0 and true
    found = known.get(text)
    if found is None:
        found = known[text] = _spec(item, layouts)
    return found


def _spec(item: list[Any], layouts: list[tuple[Layout, Holders]]) -> TensorSpec:
    dtype, shape, (layout, holders) = check_dtype(item[0]), check_shape(item[1]), layouts[check_size(item[2])]
    if len(item) > 3 and item[3:] != [1]:
        raise FormatError(f"{shown(item[3:])} after dtype, shape and layout, where only a 1 can be")
    if any(cut.dim >= len(shape) for cut in layout.cuts):
        raise FormatError(f"a layout that cuts dim {max(c.dim for c in layout.cuts)} of shape {shape}")
    bytes_in(shape, dtype)
    return TensorSpec(dtype, shape, layout, holders, len(item) > 3)
