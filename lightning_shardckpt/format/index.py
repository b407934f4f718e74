"""The root index and the rank indexes as values.

The root index holds the dtype, global shape and layout of every tensor, no lists of boxes. The rank that wrote a box
follows by arithmetic (``plan.py``); the file and the offset of a box are in the index of that rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_shardckpt.format.box import Box, Shape
from lightning_shardckpt.format.file_names import FileInfo
from lightning_shardckpt.format.layout import Holders, Layout
from lightning_shardckpt.format.safetensors_header import HeaderTensor, to_header_type

ROOT_NAME = "checkpoint.index.json"
MAX_BLOCK_BYTES = 4 << 20  # a reader must hold a block in memory to verify its checksum


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
    """A written box: the file, the offset and the length of its bytes, and one checksum per ``block`` bytes."""

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

    ``documents`` are the JSON files with the state that is not tensors. ``mirror`` are files with a second copy of the
    model in Hugging Face's form; for files with tensors, the checksum covers only the header. ``prefix`` precedes the
    names of all other files in an object store.
    """

    save_id: str
    world_size: int
    components: dict[str, Component]
    documents: dict[str, FileInfo]
    step: int | None = None
    epoch: int | None = None
    topology: dict[str, int] = field(default_factory=dict)
    software: dict[str, str] = field(default_factory=dict)
    mirror: dict[str, FileInfo] = field(default_factory=dict)
    prefix: str = ""
