"""Columns of sizes and checksums, for files of which every rank has one. Pure.

In large worlds nearly all of the root index would be the names of such files. They follow from the rank, so columns of
sizes and checksums say as much. Packed as bytes in base64 (RFC 4648) a file takes about 15 characters, of which 11 are
its checksum; as numbers and hex digits, as version 2 has them, it takes 23.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from typing import Any

from lightning_shardckpt.errors import FormatError
from lightning_shardckpt.format.file_names import FileInfo
from lightning_shardckpt.format.layout import as_holders
from lightning_shardckpt.format.value_checks import check_digests, check_file_name, check_size, shown

_DIGEST_BYTES = 8
_MAX_SIZE_BYTES = 8


def to_packed_columns(files: Mapping[int, FileInfo]) -> dict[str, Any]:
    """Files of ranks, whose names follow from the rank, as JSON.

    >>> sums = "00" * 8, "ff" * 8
    >>> to_packed_columns({0: FileInfo("a-0", 7, sums[0]), 5: FileInfo("a-5", 258, sums[1])})
    {'ranks': [[0, 1], [5, 6]], 'sizes': 'AAcBAg==', 'checksums': 'AAAAAAAAAAD//////////w=='}
    """
    ranks = sorted(files)
    sizes = [files[rank].nbytes for rank in ranks]
    width = _bytes_of(max(sizes, default=0))
    return {
        "ranks": [list(pair) for pair in as_holders(ranks)],
        "sizes": b64encode(b"".join([nbytes.to_bytes(width, "big") for nbytes in sizes])).decode(),
        "checksums": b64encode(bytes.fromhex("".join([files[rank].checksum for rank in ranks]))).decode(),
    }


def from_packed_columns(value: Any, name_of: Callable[[int], str], world: int) -> dict[int, FileInfo]:
    """Return what ``to_packed_columns`` was given. Raises FormatError or ValueError for anything else.

    Nothing is decoded that is longer than what the ranks can have.
    """
    ranks = _ranks(value["ranks"], name_of, world)
    sums = _unpacked(value["checksums"], "checksums", len(ranks), _DIGEST_BYTES)
    if len(sums) != _DIGEST_BYTES * len(ranks):
        raise FormatError(f"checksums of {len(sums)} bytes for {len(ranks)} ranks, {_DIGEST_BYTES} for each can be")
    packed = _unpacked(value["sizes"], "sizes", len(ranks), _MAX_SIZE_BYTES)
    width = len(packed) // max(len(ranks), 1)
    sizes = [int.from_bytes(packed[width * i : width * i + width], "big") for i in range(len(ranks))]
    if len(packed) != width * len(ranks) or (ranks and width != _bytes_of(max(sizes))):
        raise FormatError(f"sizes of {len(packed)} bytes for {len(ranks)} ranks; each has as many as the largest takes")
    check_size(max(sizes, default=0))
    digits, step = sums.hex(), 2 * _DIGEST_BYTES
    return {
        rank: FileInfo(name_of(rank), nbytes, digits[step * i : step * i + step])
        for i, (rank, nbytes) in enumerate(zip(ranks, sizes, strict=True))
    }


def from_text_columns(value: Any, name_of: Callable[[int], str], world: int) -> dict[int, FileInfo]:
    """Return the files of columns as version 2 has them: sizes as numbers, checksums as hex digits in one text.

    Raises FormatError or ValueError for anything else.
    """
    ranks = _ranks(value["ranks"], name_of, world)
    sizes, text = value["sizes"], value["checksums"]
    if not isinstance(text, str) or len(text) != 16 * len(ranks) or len(sizes) != len(ranks):
        raise ValueError(f"{len(sizes)} sizes and {len(text)} digits of checksums for {len(ranks)} ranks")
    digests = check_digests([text[at : at + 16] for at in range(0, len(text), 16)])
    return {
        rank: FileInfo(name_of(rank), check_size(nbytes), digest)
        for rank, nbytes, digest in zip(ranks, sizes, digests, strict=True)
    }


def _ranks(pairs: Any, name_of: Callable[[int], str], world: int) -> list[int]:
    """The ranks in ascending ranges that don't touch."""
    edges = [check_size(edge) for pair in pairs for edge in (*pair,)]
    if edges != sorted(set(edges)) or len(edges) % 2 or (edges and edges[-1] > world):
        raise ValueError(f"ranks {shown(pairs)} in a world of {world}")
    ranks = [rank for low, high in zip(edges[::2], edges[1::2], strict=True) for rank in range(low, high)]
    for rank in ranks[-1:]:
        check_file_name(name_of(rank))  # no other name is longer, or has more than other digits
    return ranks


def _bytes_of(number: int) -> int:
    """The fewest bytes that a number takes; at least 1."""
    return max(-(-number.bit_length() // 8), 1)


def _unpacked(text: Any, what: str, count: int, most: int) -> bytes:
    """The bytes in base64, at most ``most`` for each of ``count`` ranks; of any other text than theirs, FormatError."""
    if not isinstance(text, str):
        raise FormatError(f"{what} {shown(text)}, and not text")
    if len(text) > -(-most * count // 3) * 4:
        raise FormatError(f"{what} of {len(text)} characters, more than {count} ranks can have")
    try:
        found = b64decode(text, validate=True)
    except ValueError:  # of binascii, or of a character that ASCII lacks
        found = b""
    if b64encode(found).decode() != text:  # it also accepts bits that no byte has
        raise FormatError(f"{what} {shown(text)} is not base64 as RFC 4648 writes it")
    return found
