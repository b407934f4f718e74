"""Names, sizes and checksums of a checkpoint's files. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_shardckpt.format.value_checks import check_digest, check_file_name, check_save_id, check_size

_PART = re.compile(r"([0-9a-f]{16}-)?(model|optimizer|trainer|frozen)-(dist|meta-dist|state)\b[A-Za-z0-9._-]*")
_BY_RANK = re.compile(r"(?P<stem>.*)-dist-(?P<rank>\d{5,7})\.json")


@dataclass(frozen=True, slots=True)
class FileInfo:
    """Base name, size and xxh3-64 of a file; a shard file's checksum covers only its header.

    ``save_id`` names the earlier save that wrote a shard file; empty if the current save wrote it.
    """

    name: str
    nbytes: int
    checksum: str
    save_id: str = ""


def parse_file_info(name: Any, nbytes: Any, digest: Any) -> FileInfo:
    """Return the FileInfo of values from JSON. Raises FormatError if one is invalid."""
    return FileInfo(check_file_name(name), check_size(nbytes), check_digest(digest))


def parse_linked_file_info(name: Any, nbytes: Any, digest: Any, save_id: Any) -> FileInfo:
    """Return the FileInfo of an earlier save's shard file from JSON. Raises FormatError if a value is invalid."""
    return FileInfo(check_file_name(name), check_size(nbytes), check_digest(digest), check_save_id(save_id))


def shard_file_name(component: str, rank: int, number: int) -> str:
    """Return the name of a rank's shard file; numbers count from 1.

    >>> shard_file_name("model", 3, 1)
    'model-dist-00003-shard-00001.safetensors'
    """
    return f"{component}-dist-{rank:05d}-shard-{number:05d}.safetensors"


def rank_index_name(component: str, rank: int) -> str:
    """Return the name of a rank's index of a component."""
    return f"{component}-meta-dist-{rank:05d}.index.json"


def document_name(stem: str, rank: int) -> str:
    """Return the name of a rank's document.

    >>> document_name("trainer-state", 3)
    'trainer-state-dist-00003.json'
    """
    return f"{stem}-dist-{rank:05d}.json"


def is_part(name: str) -> bool:
    """Return True if this is the name of a rank index, a shard file or a document, in a directory or an object store.

    >>> is_part("0123456789abcdef-model-dist-00000-shard-00001.safetensors"), is_part("model.safetensors")
    (True, False)
    """
    return _PART.fullmatch(name) is not None


def documents_by_rank(documents: Mapping[str, FileInfo]) -> tuple[dict[str, FileInfo], dict[str, dict[int, FileInfo]]]:
    """Return the documents whose names have no rank, by name, and the others by stem and rank."""
    single, ranked = dict[str, FileInfo](), dict[str, dict[int, FileInfo]]()
    for name, info in documents.items():
        match = _BY_RANK.fullmatch(name)
        if match is not None and document_name(match["stem"], int(match["rank"])) == name:
            ranked.setdefault(match["stem"], {})[int(match["rank"])] = info
        else:
            single[name] = info
    return single, ranked
