"""A per-rank index as JSON: what is written, and how what others wrote is checked.

See FORMAT.md for the rules. Entries that are alike share their text, and what was found of it once.
"""

from __future__ import annotations

import re
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

from lightning_shardckpt.errors import FormatError
from lightning_shardckpt.format.box import Box, Shape
from lightning_shardckpt.format.checksum import BETWEEN, count_of
from lightning_shardckpt.format.file_names import file_info, linked_file_info
from lightning_shardckpt.format.index import MAX_BLOCK_BYTES, RankIndex, ShardEntry
from lightning_shardckpt.format.index_envelope import FORMAT, compact, decoded
from lightning_shardckpt.format.strict_json import check_json_size, parse_json, texts
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

# ── a fast scan of plain indexes ──────────────────────────────────────────────────────────────────────────────────────
# Scan a rank index that is spelled as this package spells it: several times as fast as parsing it as any JSON. Pure.
#
# Such an index is one text: a head, then an entry for each tensor, in all of which the same things stand in the same
# order without spaces. What is spelled otherwise, or has a tensor in several boxes, is not refused here, but left to
# the parser. So this only has to be right about what it accepts: that is JSON without duplicate keys, with the values
# that the parser would find.


_PITCH = 19  # from one checksum to the next: 16 letters, quotes and a comma
_NUMBER = r"0|[1-9][0-9]{0,17}"  # no longer one: it is less than 2^63
_VALUE = r'[^"{}]*+'  # nothing but numbers in brackets is valid JSON: whoever parses what entries have in common sees
_ENTRY = re.compile(
    r'"([^"\\\x00-\x1f]*+)":\{'
    rf'("offsets":{_VALUE}"lengths":{_VALUE}"global_shape":{_VALUE}'
    r'"dtype":"[A-Z0-9_]*+","file":"[A-Za-z0-9._-]*+","rank":[0-9]++),'
    rf'"begin":({_NUMBER}),"block":({_NUMBER}),"checksums":\[([0-9a-f",]*+)\]\}},'
)
_AROUND = len('"":{,"begin":,"block":,"checksums":[]},')  # of an entry, beside the groups
_METADATA = ',"metadata":{'
_END = "}}"


ScannedEntry: TypeAlias = tuple[str, str, int, str, str]
"""One box: the key of its tensor; JSON without braces, which many boxes have in common; begin; block; checksums."""


def scan_rank_index(text: bytes, where: str) -> tuple[dict[str, Any], list[ScannedEntry]] | None:
    """All but the metadata of a rank index, and its boxes in order; None if it is to be parsed.

    Raises:
        FormatError: if it is too large.
    """
    check_json_size(text, where)
    try:
        head, metadata, body = text.decode().partition(_METADATA)
        value = parse_json(f"{head}}}".encode(), where)
    except (UnicodeDecodeError, FormatError):
        return None
    if not metadata or not body.endswith(_END) or not isinstance(value, dict) or "metadata" in value:
        return None
    found = _ENTRY.findall(f"{body.removesuffix(_END)},")  # so that each entry ends with a comma
    matched = len("".join(chain.from_iterable(found))) + len(found) * _AROUND
    if matched != len(body) - len(_END) + 1 or len({key for key, *_ in found}) != len(found):
        return None
    entries = [(key, about, int(begin), block, _digests(sums)) for key, about, begin, block, sums in found]
    if any(sums is None for *_, sums in entries):
        return None
    return value, entries  # type: ignore[return-value]  # none of them is None


def _digests(text: str) -> str | None:
    """The checksums in a list of them, of which only the letters were looked at; None if it is no such list."""
    if len(text) == _PITCH - 1 and text[0] == text[-1] == '"' and text.count('"') == 2 and "," not in text:
        return text[1:-1]  # a shortcut: of small tensors, of which there are many
    if not text:
        return ""
    count = (len(text) + 1) // _PITCH
    quotes, commas = '"' * count, "," * (count - 1)
    is_list = (
        len(text) == count * _PITCH - 1
        and text[::_PITCH] == text[_PITCH - 2 :: _PITCH] == quotes
        and text[_PITCH - 1 :: _PITCH] == commas
        and text.count('"') == 2 * count
        and text.count(",") == count - 1
    )
    return text[1:-1] if is_list else None


_VERSIONS = (1, 2, 3)  # none was ever written as 2
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
    scanned = scan_rank_index(text, where)
    if scanned is None:
        return decoded(parse_json(text, where), where, _rank_index, _VERSIONS)
    value, entries = scanned
    return decoded(value, where, partial(_scanned_index, entries), _VERSIONS)


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
    return RankIndex(save_id, check_text(value["component"]), rank, files, shards)


def _wrong_count(sums: str, block: int, nbytes: int) -> FormatError:
    return FormatError(f"{count_of(sums)} checksums of {block} bytes each for {nbytes} bytes")


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
