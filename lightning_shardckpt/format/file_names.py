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


def is_part(name: str) -> bool:
    """Return whether a name is of an index of a rank, a shard file or a document, in a directory or in a store.

    >>> is_part("0123456789abcdef-model-dist-00000-shard-00001.safetensors"), is_part("model.safetensors")
    (True, False)
    """
    return _PART.fullmatch(name) is not None


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
