"""File names of other programs' checkpoints, and detection of their formats by these and first bytes. No torch."""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from lightning_shardckpt.errors import CheckpointNotFoundError, FormatError
from lightning_shardckpt.format.index import ROOT_NAME, is_part
from lightning_shardckpt.format.value_checks import refuse_lfs_pointer
from lightning_shardckpt.sources.did_you_mean import did_you_mean, is_unfinished
from lightning_shardckpt.state.documents import FROZEN

if TYPE_CHECKING:
    from lightning_shardckpt.sources.source import Source  # imports torch

DCP_NAME = ".metadata"
MODEL_AND_OPTIMIZER = "model_and_optim"
"""OLMo-core's directory of both, below the directory of a step."""


def find_dcp_directory(path: str) -> str | None:
    """Return the directory with ``.metadata``: ``path``, or OLMo-core's below it; None if there is none."""
    for directory in (path, os.path.join(path, MODEL_AND_OPTIMIZER)):
        if os.path.isfile(os.path.join(directory, DCP_NAME)):
            return directory
    return None


SAFE, BIN, INDEX = "model.safetensors", "pytorch_model.bin", ".index.json"
HUB_WEIGHTS = (SAFE, SAFE + INDEX, BIN, BIN + INDEX)
"""Names of weights in a Hugging Face directory, the preferred first."""
ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
"""Names of the files of ``PeftModel.save_pretrained``, the preferred first."""


_INDEX = re.compile(rf"({re.escape(SAFE)}|{re.escape(BIN)})\.index(\..+)?\.json")
_SLICES = re.compile(r"shard-\d{5,}-model-\d{5,}-of-\d{5,}\.safetensors")  # HuggingFaceStorageWriter, save_distributed


def files_of_slices(path: str) -> list[str]:
    """Return the names of the files in which torch's HuggingFaceStorageWriter put the slices of each rank."""
    return sorted(filter(_SLICES.fullmatch, os.listdir(path))) if os.path.isdir(path) else []


def indexes(path: str) -> list[str]:
    """Return the names of index files in a directory, such as ``model.safetensors.index.ema.json``."""
    return sorted(filter(is_index_name, os.listdir(path))) if os.path.isdir(path) else []


def is_index_name(name: str) -> bool:
    """Return whether a file is an index by its name."""
    return _INDEX.fullmatch(name) is not None


def is_safetensors(path: str) -> bool:
    """Return whether a path is a safetensors file, by its name or its first bytes."""
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        start = file.read(9)
    return path.endswith(".safetensors") or (start[8:] == b"{" and start[4:8] == bytes(4))


def leaves_out_frozen(path: str) -> bool:
    """Return whether a file of ``torch.save`` records that it lacks frozen parameters, as a consolidated file may."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            return any(FROZEN.encode() in archive.read(name) for name in names)
    except (OSError, zipfile.BadZipFile):
        return False


# ── detection ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Format(NamedTuple):
    """A format of another program.

    Attributes:
        name: for messages.
        matches: returns whether a path has this format, by names and first bytes.
        module: the module of this folder whose ``open_path`` opens such a path; it may import torch.
    """

    name: str
    matches: Callable[[str], bool]
    module: str

    def open(self, path: str, weights_only: bool = True) -> Source:
        """Open a path of this format; ``weights_only`` is as in ``torch.load``."""
        source: Source = import_module(f"{__package__}.{self.module}").open_path(path, weights_only)
        return source


def _is_hugging_face(path: str) -> bool:
    if os.path.isfile(path):
        return is_index_name(os.path.basename(path)) or is_safetensors(path)
    has_weights = any(os.path.lexists(os.path.join(path, name)) for name in (*HUB_WEIGHTS, *ADAPTERS))
    return has_weights or bool(indexes(path)) or bool(files_of_slices(path))


FORMATS = [
    Format("a checkpoint of torch.distributed.checkpoint", lambda path: find_dcp_directory(path) is not None, "dcp"),
    Format("a Hugging Face directory", _is_hugging_face, "hugging_face"),
    Format("a file of torch.save", lambda path: os.path.isfile(path) and not _is_hugging_face(path), "torch_save"),
]
_PARTS = (ROOT_NAME, DCP_NAME, "meta.pt")


def detect_format(path: str) -> Format | None:
    """Return the format of a checkpoint of another program; None for this package's own, and if none is readable.

    A checkpoint of this package may contain files for Hugging Face, too. The rest of an unfinished save has no format.

    Raises:
        CheckpointNotFoundError: for a single file of a sharded checkpoint, which is only a part.
        FormatError: naming the candidates, if several formats match; if Git LFS did not fetch the file.
    """
    name = os.path.basename(path)
    if (name in _PARTS or name.endswith(".distcp") or is_part(name)) and os.path.isfile(path):
        raise CheckpointNotFoundError(f"{path!r} is a part of a sharded checkpoint{did_you_mean(path)}")
    if _SLICES.fullmatch(name) and os.path.isfile(path):
        raise CheckpointNotFoundError(f"{path!r} has one rank's slices of tensors: give the path of its directory")
    if is_unfinished(path):
        return None
    ours = os.path.isfile(os.path.join(path, ROOT_NAME))
    matching = [one for one in FORMATS if one.matches(path) and not (ours and one.module == "hugging_face")]
    names = ["a checkpoint of lightning-shardckpt"] * ours + [one.name for one in matching]
    if len(names) > 1:
        listed = " and ".join(names)
        remedy = "Move one elsewhere"
        remedy += ", or give the path of its index file" if indexes(path) else ""
        raise FormatError(f"{path!r} is {listed} at once, so the format is ambiguous. {remedy}.")
    if (directory := find_dcp_directory(path)) is not None:
        with open(os.path.join(directory, DCP_NAME), "rb") as file:
            refuse_lfs_pointer(file.read(64), f"{path!r}, file {DCP_NAME}")
    return matching[0] if matching else None
