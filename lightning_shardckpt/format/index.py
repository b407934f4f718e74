"""The root index and the per-rank indexes as values: what a checkpoint says of itself.

The root index holds layouts, not lists: of every tensor its dtype, global shape and layout. Which rank wrote which
box follows by arithmetic (``plan.py``); where in which file a box lies is in the index of the rank that wrote it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_shardckpt.format.box import Box, Shape
from lightning_shardckpt.format.file_names import FileInfo
from lightning_shardckpt.format.layout import Holders, Layout
from lightning_shardckpt.format.safetensors_header import HeaderTensor
from lightning_shardckpt.format.shard_header import stored_as

ROOT_NAME = "checkpoint.index.json"
MAX_BLOCK_BYTES = 4 << 20  # what a reader must be able to hold to verify a checksum


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor as all ranks know it. ``pinned``: the lowest holder of a shard writes it, since replicas may differ."""

    dtype: str
    shape: Shape
    layout: Layout
    holders: Holders
    pinned: bool = False


class ShardEntry(NamedTuple):
    """One written box: its ``nbytes`` bytes in a file, and a checksum of every ``block`` bytes of them, as one text."""

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
        """The header entry that the shard file must have for it."""
        return HeaderTensor(*stored_as(self.dtype, self.box.shape), self.begin, self.nbytes)


@dataclass(frozen=True, slots=True)
class RankIndex:
    """The index of what one rank wrote of one component."""

    save_id: str
    component: str
    rank: int
    files: dict[str, FileInfo]
    shards: dict[str, tuple[ShardEntry, ...]]


@dataclass(frozen=True, slots=True)
class Component:
    """The tensors of a part of the state, names that share a tensor, and the index of each rank that wrote some."""

    tensors: dict[str, TensorSpec]
    aliases: dict[str, str] = field(default_factory=dict)
    indexes: dict[int, FileInfo] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RootIndex:
    """The whole checkpoint. ``documents`` are JSON files with the state that is not tensors.

    ``mirror`` are files with the model a second time, as Hugging Face has it; of those with tensors, the checksum is
    that of the header. ``prefix`` is what stands before the names of all other files where they are stored.
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
