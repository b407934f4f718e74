"""A per-rank index as JSON: what is written, and how what others wrote is checked.

See FORMAT.md for the rules. Entries that are alike share their text, and are checked once.
"""

from __future__ import annotations

from typing import Any

from lightning_shardckpt.errors import FormatError
from lightning_shardckpt.format.box import Box, Shape
from lightning_shardckpt.format.checksum import BETWEEN, count_of
from lightning_shardckpt.format.file_names import file_info, linked_file_info
from lightning_shardckpt.format.index import MAX_BLOCK_BYTES, RankIndex, ShardEntry
from lightning_shardckpt.format.strict_json import FORMAT, check_json_size, compact, decode_index, parse_json, texts
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
    """The bytes of a per-rank index."""
    head: dict[str, Any] = {
        "format": FORMAT,
        "version": 3 if any(file.save_id for file in index.files.values()) else 1,
        "save_id": index.save_id,
        "component": index.component,
        "rank": index.rank,
        "files": {f.name: [f.nbytes, f.checksum] + [f.save_id] * bool(f.save_id) for f in index.files.values()},
    }
    kinds: dict[tuple[int, Shape, str, str], str] = {}  # many entries are alike
    metadata = []
    for name, entries in zip(texts(list(index.shards)), index.shards.values(), strict=True):
        first, *more = [_entry_to_json(entry, index.rank, kinds) for entry in entries]
        others = f',"more":[{",".join(f"{{{one}}}" for one in more)}]' if more else ""
        metadata.append(f"{name}:{{{first}{others}}}")
    text = f'{compact(head)[:-1]},"metadata":{{{",".join(metadata)}}}}}'.encode()
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
        kinds[kind] = compact(about)[1:-1]
    sums = f'"{entry.checksums}"' if entry.checksums else ""
    return f'{kinds[kind]},"begin":{entry.begin},"block":{entry.block},"checksums":[{sums}]'


def rank_index_from_json(text: bytes, where: str) -> RankIndex:
    """The index in these bytes.

    Raises:
        FormatError: naming ``where`` and what is wrong.
    """
    return decode_index(parse_json(text, where), where, _rank_index, _VERSIONS)


def _rank_index(value: dict[str, Any]) -> RankIndex:
    shards: dict[str, tuple[ShardEntry, ...]] = {}
    extents: dict[str, _Extent] = {}
    for key, first in value["metadata"].items():
        items = (first, *first["more"]) if "more" in first else (first,)
        shards[check_text(key)] = tuple([_entry(item, extents) for item in items])
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
    return RankIndex(save_id, check_text(value["component"]), rank, files, shards)


def _entry(item: dict[str, Any], extents: dict[str, _Extent]) -> ShardEntry:
    """``extents`` are those that were seen: many tensors are alike. Their repr tells 1 from 1.0 and true."""
    extent = [item[name] for name in _EXTENT]
    text = repr(extent)
    if text not in extents:
        extents[text] = _extent(*extent)
    box, shape, dtype, file, block, nbytes = extents[text]
    sums = BETWEEN.join(check_digests(item["checksums"]))
    if count_of(sums) != -(-nbytes // block):
        raise FormatError(f"{count_of(sums)} checksums of {block} bytes each for {nbytes} bytes")
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
