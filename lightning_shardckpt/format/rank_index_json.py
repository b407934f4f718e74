"""Rank indexes as JSON: encoding, decoding and validation. FORMAT.md has the rules.

Entries with equal fields share one text and are checked once.
"""

from __future__ import annotations

from typing import Any

from lightning_shardckpt.errors import FormatError
from lightning_shardckpt.format.box import Box, Shape
from lightning_shardckpt.format.checksum import SEPARATOR, count_checksums
from lightning_shardckpt.format.file_names import parse_file_info, parse_linked_file_info
from lightning_shardckpt.format.index import MAX_BLOCK_BYTES, RankIndex, ShardEntry
from lightning_shardckpt.format.strict_json import (
    FORMAT,
    check_json_size,
    compact,
    decode_index,
    parse_json,
    to_json_texts,
)
from lightning_shardckpt.format.value_checks import (
    DTYPE_BYTES,
    bytes_in,
    check_digests,
    check_dtype,
    check_file_name,
    check_save_id,
    check_shape,
    check_size,
    check_text,
    shown,
)

_VERSIONS = (1, 3)
_Extent = tuple[Box, Shape, str, str, int, int]
_EXTENT = ("offsets", "lengths", "global_shape", "dtype", "file", "block")


def rank_index_to_json(index: RankIndex) -> bytes:
    """Return the bytes of a rank index. Raises FormatError if it is too large for a reader."""
    head: dict[str, Any] = {
        "format": FORMAT,
        "version": 3 if any(file.save_id for file in index.files.values()) else 1,
        "save_id": index.save_id,
        "component": index.component,
        "rank": index.rank,
        "files": {f.name: [f.nbytes, f.checksum] + [f.save_id] * bool(f.save_id) for f in index.files.values()},
    }
    fields: dict[tuple[int, Shape, str, str], str] = {}  # shared by entries whose fields are equal
    metadata = []
    for name, entries in zip(to_json_texts(list(index.shards)), index.shards.values(), strict=True):
        first, *more = [_entry_to_json(entry, index.rank, fields) for entry in entries]
        others = f',"more":[{",".join(f"{{{one}}}" for one in more)}]' if more else ""
        metadata.append(f"{name}:{{{first}{others}}}")
    text = f'{compact(head)[:-1]},"metadata":{{{",".join(metadata)}}}}}'.encode()
    check_json_size(text, "an index")
    return text


def _entry_to_json(entry: ShardEntry, rank: int, fields: dict[tuple[int, Shape, str, str], str]) -> str:
    fields_key = id(entry.box), entry.global_shape, entry.dtype, entry.file
    if fields_key not in fields:
        values = {
            "offsets": entry.box.start,
            "lengths": entry.box.shape,
            "global_shape": entry.global_shape,
            "dtype": entry.dtype,
            "file": entry.file,
            "rank": rank,
        }
        fields[fields_key] = compact(values)[1:-1]
    sums = f'"{entry.checksums}"' if entry.checksums else ""
    return f'{fields[fields_key]},"begin":{entry.begin},"block":{entry.block},"checksums":[{sums}]'


def rank_index_from_json(text: bytes, where: str) -> RankIndex:
    """Return the index that these bytes encode.

    Raises:
        FormatError: naming ``where`` and the error.
    """
    return decode_index(parse_json(text, where), where, _rank_index, _VERSIONS)


def _rank_index(value: dict[str, Any]) -> RankIndex:
    shards: dict[str, tuple[ShardEntry, ...]] = {}
    extents: dict[str, _Extent] = {}
    for key, first in value["metadata"].items():
        items = (first, *first["more"]) if "more" in first else (first,)
        shards[check_text(key)] = tuple([_entry(item, extents) for item in items])
    described = parse_linked_file_info if value["version"] == 3 else parse_file_info
    files = {
        name: (described if len(info) > 2 else parse_file_info)(name, *info) for name, info in value["files"].items()
    }
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
    return RankIndex(save_id, check_text(value["component"]), rank, files, shards)


def _entry(item: dict[str, Any], extents: dict[str, _Extent]) -> ShardEntry:
    """Return an entry; ``extents`` caches checked values by their repr, in which 1, 1.0 and true differ."""
    values = [item[name] for name in _EXTENT]
    text = repr(values)
    if text not in extents:
        extents[text] = _extent(*values)
    box, shape, dtype, file, block, nbytes = extents[text]
    sums = SEPARATOR.join(check_digests(item["checksums"]))
    if count_checksums(sums) != -(-nbytes // block):
        raise FormatError(f"{count_checksums(sums)} checksums of {block} bytes each for {nbytes} bytes")
    return ShardEntry(box, shape, dtype, file, check_size(item["begin"]), block, nbytes, sums)


def _extent(offsets: Any, lengths: Any, global_shape: Any, dtype: Any, file: Any, block: Any) -> _Extent:
    start, shape = check_shape(offsets), check_shape(global_shape)
    stop = tuple(a + n for a, n in zip(start, check_shape(lengths), strict=True))
    if any(b > n for b, n in zip(stop, shape, strict=True)):
        raise FormatError(f"box {start}..{stop} lies outside shape {shape}")
    bytes_in(shape, check_dtype(dtype))
    if not 1 <= check_size(block) <= MAX_BLOCK_BYTES:
        raise FormatError(f"checksums of {block} bytes each, expected 1 to {MAX_BLOCK_BYTES}")
    box = Box(start, stop)
    return box, shape, dtype, check_file_name(file), block, box.numel * DTYPE_BYTES[dtype]
