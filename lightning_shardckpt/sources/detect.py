"""Detection of checkpoint formats of other programs, by file names and first bytes. No torch.

The table has a row for each readable format; its reader is imported when a checkpoint is opened.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_shardckpt.errors import CheckpointNotFoundError, FormatError
from lightning_shardckpt.format.file_names import is_part
from lightning_shardckpt.format.index import ROOT_NAME
from lightning_shardckpt.sources.did_you_mean import READABLE, did_you_mean, is_unfinished
from lightning_shardckpt.sources.paths import find_dcp_directory, indexes, is_hub_directory, is_index, is_safetensors
from lightning_shardckpt.storage.other_programs import RANK_FILES, has_rank_files

if TYPE_CHECKING:
    from lightning_shardckpt.sources.source import Source


@dataclass(frozen=True, slots=True)
class Format:
    """A checkpoint format of other programs.

    Attributes:
        name: with an article.
        matches: returns whether a path has the format.
        open: opens a path; its second argument is ``weights_only`` of ``torch.load``.
    """

    name: str
    matches: Callable[[str], bool]
    open: Callable[[str, bool], Source]


def _is_dcp(path: str) -> bool:
    return find_dcp_directory(path) is not None


def _open_dcp(path: str, weights_only: bool) -> Source:
    from lightning_shardckpt.sources.dcp import open_dcp

    return open_dcp(path, weights_only)


def _open_hub_directory(path: str, weights_only: bool) -> Source:
    from lightning_shardckpt.sources.huggingface import open_directory

    return open_directory(path)


def _open_safetensors(path: str, weights_only: bool) -> Source:
    from lightning_shardckpt.sources.huggingface import open_file

    return open_file(path)


def _open_index(path: str, weights_only: bool) -> Source:
    from lightning_shardckpt.sources.huggingface import open_directory

    return open_directory(*os.path.split(os.path.abspath(path)))


def _is_other_file(path: str) -> bool:
    return os.path.isfile(path) and not is_safetensors(path) and not is_index(path)


def _open_other_file(path: str, weights_only: bool) -> Source:
    from lightning_shardckpt.sources.torch_save import TorchFileSource

    return TorchFileSource(path, weights_only)


_PARTS = (ROOT_NAME, ".metadata", "meta.pt")
FORMATS = (
    Format("a checkpoint of torch.distributed.checkpoint", _is_dcp, _open_dcp),
    Format("a Hugging Face directory", is_hub_directory, _open_hub_directory),
    Format("an index file", is_index, _open_index),
    Format("a file of safetensors", is_safetensors, _open_safetensors),
    Format("a file of torch.save", _is_other_file, _open_other_file),
)


def detect_format(path: str) -> Format | None:
    """Return the format of a checkpoint of another program; None for this package's own, and if none is readable.

    A checkpoint of this package may contain files for Hugging Face, too. The rest of an unfinished save has no format.

    Raises:
        CheckpointNotFoundError: for a single file of a sharded checkpoint, which is only a part.
        FormatError: naming the candidates, if several formats match.
    """
    name = os.path.basename(path)
    if (name in _PARTS or name.endswith(".distcp") or is_part(name)) and os.path.isfile(path):
        raise CheckpointNotFoundError(f"{path!r} is a part of a sharded checkpoint{did_you_mean(path, READABLE)}")
    if is_unfinished(path):
        return None
    matching = [known for known in FORMATS if known.matches(path)]
    ours = os.path.isfile(os.path.join(path, ROOT_NAME))
    if ours:
        matching = [known for known in matching if known.name != "a Hugging Face directory"]
    names = ["a checkpoint of lightning-shardckpt"] * ours + [known.name for known in matching]
    if matching and has_rank_files(path):
        names.append(RANK_FILES)
    if len(names) > 1:
        listed = " and ".join(names)
        remedy = "Move one elsewhere"
        remedy += ", or give the path of its index file" if indexes(path) else ""
        raise FormatError(f"{path!r} is {listed} at once, and which one is meant cannot be told. {remedy}.")
    return matching[0] if matching else None
