"""Names, sizes and checksums of a checkpoint's files, and how they are written down for many ranks. Pure.

In large worlds nearly all of the root index would be the names of files that every rank has one of. They follow from
the rank, so a list of sizes and checksums says as much: about half of the bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_shardckpt.format.layout import as_holders
from lightning_shardckpt.format.value_checks import (
    check_digest,
    check_digests,
    check_file_name,
    check_save_id,
    check_size,
    shown,
)

_BY_RANK = re.compile(r"(?P<stem>.*)-dist-(?P<rank>\d{5,7})\.json")


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A file by its base name, with its size and the xxh3-64 of its content (of its header, for a shard file).

    ``save_id`` is of the earlier save that wrote a shard file, if it was not the save that describes it.
    """

    name: str
    nbytes: int
    checksum: str
    save_id: str = ""


def file_info(name: Any, nbytes: Any, digest: Any) -> FileInfo:
    """A file as JSON had it. Raises FormatError."""
    return FileInfo(check_file_name(name), check_size(nbytes), check_digest(digest))


def linked_file_info(name: Any, nbytes: Any, digest: Any, save_id: Any) -> FileInfo:
    """A shard file of an earlier save as JSON had it. Raises FormatError."""
    return FileInfo(check_file_name(name), check_size(nbytes), check_digest(digest), check_save_id(save_id))


def shard_file_name(component: str, rank: int, number: int) -> str:
    """Return the name of a rank's shard file; numbers count from 1.

    >>> shard_file_name("model", 3, 1)
    'model-dist-00003-shard-00001.safetensors'
    """
    return f"{component}-dist-{rank:05d}-shard-{number:05d}.safetensors"


def rank_index_name(component: str, rank: int) -> str:
    """Return the name of the index that a rank writes for a component."""
    return f"{component}-meta-dist-{rank:05d}.index.json"


def document_name(stem: str, rank: int) -> str:
    """Return the name of a document that a rank writes.

    >>> document_name("trainer-state", 3)
    'trainer-state-dist-00003.json'
    """
    return f"{stem}-dist-{rank:05d}.json"


def documents_by_rank(documents: Mapping[str, FileInfo]) -> tuple[dict[str, FileInfo], dict[str, dict[int, FileInfo]]]:
    """The documents without a rank in their names, and by stem and rank those that have one."""
    single, ranked = dict[str, FileInfo](), dict[str, dict[int, FileInfo]]()
    for name, info in documents.items():
        match = _BY_RANK.fullmatch(name)
        if match is not None and document_name(match["stem"], int(match["rank"])) == name:
            ranked.setdefault(match["stem"], {})[int(match["rank"])] = info
        else:
            single[name] = info
    return single, ranked


def to_columns(files: Mapping[int, FileInfo]) -> dict[str, Any]:
    """Files of ranks, whose names follow from the rank, as JSON.

    >>> to_columns({0: FileInfo("a-0", 7, "00ff"), 1: FileInfo("a-1", 9, "11ff"), 5: FileInfo("a-5", 7, "22ff")})
    {'ranks': [[0, 2], [5, 6]], 'sizes': [7, 9, 7], 'checksums': '00ff11ff22ff'}
    """
    ranks = sorted(files)
    return {
        "ranks": [list(pair) for pair in as_holders(ranks)],
        "sizes": [files[rank].nbytes for rank in ranks],
        "checksums": "".join(files[rank].checksum for rank in ranks),
    }


def from_columns(value: Any, name_of: Callable[[int], str], world: int) -> dict[int, FileInfo]:
    """Return what ``to_columns`` was given. Raises ValueError for anything else."""
    edges = [check_size(edge) for pair in value["ranks"] for edge in (*pair,)]
    if edges != sorted(set(edges)) or len(edges) % 2 or (edges and edges[-1] > world):
        raise ValueError(f"ranks {shown(value['ranks'])} in a world of {world}")
    ranks = [rank for low, high in zip(edges[::2], edges[1::2], strict=True) for rank in range(low, high)]
    sizes, text = value["sizes"], value["checksums"]
    if not isinstance(text, str) or len(text) != 16 * len(ranks) or len(sizes) != len(ranks):
        raise ValueError(f"{len(sizes)} sizes and {len(text)} digits of checksums for {len(ranks)} ranks")
    digests = check_digests([text[at : at + 16] for at in range(0, len(text), 16)])
    for rank in ranks[-1:]:
        check_file_name(name_of(rank))  # no other name is longer, or has more than other digits
    return {
        rank: FileInfo(name_of(rank), check_size(nbytes), digest)
        for rank, nbytes, digest in zip(ranks, sizes, digests, strict=True)
    }
