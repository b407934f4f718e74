"""The root index and the rank indexes as values.

The root index holds the dtype, global shape and layout of every tensor, no lists of boxes. The rank that wrote a box
follows by arithmetic (``plan.py``); the file and the offset of a box are in the index of that rank.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lightning_shardckpt.format.box import Box, Shape
from lightning_shardckpt.format.layout import Holders, Layout
from lightning_shardckpt.format.safetensors_header import HeaderTensor, to_header_type
from lightning_shardckpt.format.value_checks import check_digest, check_file_name, check_size

ROOT_NAME = "checkpoint.index.json"
EXPORT_FOLDER = "huggingface"
"""A folder with an export of the model, which is no part of the checkpoint but goes with it."""
MAX_BLOCK_BYTES = 4 << 20  # a reader must hold a block in memory to verify its checksum


_PART = re.compile(r"([0-9a-f]{16}-)?(model|optimizer|trainer|frozen)-(dist|meta-dist|state)\b[A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class FileInfo:
    """Base name, size and xxh3-64 of a file; a shard file's checksum covers only its header."""

    name: str
    nbytes: int
    checksum: str


def parse_file_info(name: Any, nbytes: Any, digest: Any) -> FileInfo:
    """Return the FileInfo of values from JSON. Raises FormatError if one is invalid."""
    return FileInfo(check_file_name(name), check_size(nbytes), check_digest(digest))


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


HEAD_BYTES = 4096  # of a root index; its prefix is within them
_PREFIX = re.compile(rb'"prefix":"([0-9a-f]{16}-)"')
PREFIXED_NAME = re.compile(r"([0-9a-f]{16}-)[A-Za-z0-9_-][A-Za-z0-9._-]*")
_EXPORT_DOCUMENTS = ("huggingface.json", "peft.json")


def is_ours(name: str) -> bool:
    """Return True if a file or object of a checkpoint has a name that a save gives. Nothing else is deleted.

    >>> is_ours("0123456789abcdef-x.json"), is_ours("model-meta-dist-00000.index.json"), is_ours("trainer-state.json")
    (True, True, True)
    >>> is_ours("epoch=1.ckpt/model-dist-00000-shard-00001.safetensors"), is_ours("config.yaml")
    (False, False)
    >>> is_ours("huggingface/config.json")
    True
    """
    is_file = PREFIXED_NAME.fullmatch(name) is not None or is_part(name) or name in _EXPORT_DOCUMENTS
    return is_file or is_export(name)


def is_export(name: str) -> bool:
    """Return True if an object of a checkpoint is of its export, which must not outlive its root index."""
    return name.startswith(f"{EXPORT_FOLDER}/")


def read_prefix(root: bytes) -> str | None:
    """Return the prefix that a root index records, from its first bytes.

    >>> read_prefix(b'{"prefix":"5afe5afe5afe5afe-"}'), read_prefix(b"{}")
    ('5afe5afe5afe5afe-', None)
    """
    match = _PREFIX.search(root)
    return match[1].decode() if match else None


def prefix_of(save_id: str) -> str:
    """Return the prefix of the names of a save's files, which no other save uses.

    >>> prefix_of("5afe5afe5afe5afe" + "0" * 16)
    '5afe5afe5afe5afe-'
    """
    return save_id[:16] + "-"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Description of a tensor, the same on all ranks.

    If ``pinned``, the lowest holder of each shard writes it, since replicas may differ.
    """

    dtype: str
    shape: Shape
    layout: Layout
    holders: Holders
    pinned: bool = False


class ShardEntry(NamedTuple):
    """A written box: the file, the offset and the length of its bytes, and one checksum per ``block`` bytes.

    ``checksums`` are hex digits, 16 for each block.
    """

    box: Box
    global_shape: Shape
    dtype: str
    file: str
    begin: int
    block: int
    nbytes: int
    checksums: str

    @property
    def stored(self) -> HeaderTensor:
        """The entry that the header of the shard file must have for this box."""
        return HeaderTensor(*to_header_type(self.dtype, self.box.shape), self.begin, self.nbytes)


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


@dataclass(frozen=True, slots=True)
class RootIndex:
    """Description of a whole checkpoint.

    ``documents`` are the JSON files with the state that is not tensors. ``prefix`` precedes the names of all other
    files in an object store.
    """

    save_id: str
    world_size: int
    components: dict[str, Component]
    documents: dict[str, FileInfo]
    step: int | None = None
    epoch: int | None = None
    topology: dict[str, int] = field(default_factory=dict)
    software: dict[str, str] = field(default_factory=dict)
    prefix: str = ""
