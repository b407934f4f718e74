"""File names of other programs' checkpoints, and detection of their formats by these and first bytes. No torch."""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Callable

from lightning_shardckpt.errors import CheckpointNotFoundError, FormatError
from lightning_shardckpt.format.index import ROOT_NAME, is_part
from lightning_shardckpt.format.value_checks import refuse_lfs_pointer
from lightning_shardckpt.sources.did_you_mean import READABLE, did_you_mean, is_unfinished
from lightning_shardckpt.state.documents import FROZEN

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


def is_hub_directory(path: str) -> bool:
    """Return whether a directory has weights or an adapter under Hugging Face's names, an index of these, or slices."""
    has_weights = any(os.path.lexists(os.path.join(path, name)) for name in (*HUB_WEIGHTS, *ADAPTERS))
    return has_weights or bool(indexes(path)) or bool(files_of_slices(path))


def files_of_slices(path: str) -> list[str]:
    """Return the names of the files in which torch's HuggingFaceStorageWriter put the slices of each rank."""
    return _names(path, _SLICES)


def indexes(path: str) -> list[str]:
    """Return the names of index files in a directory, such as ``model.safetensors.index.json`` or ``….index.ema.json``.
    """
    return _names(path, _INDEX)


def _names(path: str, pattern: re.Pattern[str]) -> list[str]:
    try:
        return sorted(filter(pattern.fullmatch, os.listdir(path)))
    except OSError:  # not a directory
        return []


def only_index(path: str) -> str:
    """Return the name of the index file in a directory."""
    names = indexes(path)
    if len(names) != 1:
        raise FormatError(f"{path!r} holds {' and '.join(names)}. Give the path of one of these files.")
    return names[0]


def is_index(path: str) -> bool:
    """Return whether a path is an index file."""
    return _INDEX.fullmatch(os.path.basename(path)) is not None and os.path.isfile(path)


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


def _is_dcp(path: str) -> bool:
    return find_dcp_directory(path) is not None


def _is_other_file(path: str) -> bool:
    return os.path.isfile(path) and not is_safetensors(path) and not is_index(path)


_PARTS = (ROOT_NAME, ".metadata", "meta.pt")
DCP, HUB_DIRECTORY = "a checkpoint of torch.distributed.checkpoint", "a Hugging Face directory"
INDEX_FILE, SAFETENSORS, TORCH_FILE = "an index file", "a file of safetensors", "a file of torch.save"
MATCHES: dict[str, Callable[[str], bool]] = {
    DCP: _is_dcp,
    HUB_DIRECTORY: is_hub_directory,
    INDEX_FILE: is_index,
    SAFETENSORS: is_safetensors,
    TORCH_FILE: _is_other_file,
}
"""Whether a path has a format, by its name."""


def detect_format(path: str) -> str | None:
    """Return the format of a checkpoint of another program; None for this package's own, and if none is readable.

    A checkpoint of this package may contain files for Hugging Face, too. The rest of an unfinished save has no format.

    Raises:
        CheckpointNotFoundError: for a single file of a sharded checkpoint, which is only a part.
        FormatError: naming the candidates, if several formats match; if Git LFS did not fetch the file.
    """
    name = os.path.basename(path)
    if (name in _PARTS or name.endswith(".distcp") or is_part(name)) and os.path.isfile(path):
        raise CheckpointNotFoundError(f"{path!r} is a part of a sharded checkpoint{did_you_mean(path, READABLE)}")
    if _SLICES.fullmatch(name) and os.path.isfile(path):
        raise CheckpointNotFoundError(f"{path!r} has one rank's slices of tensors: give the path of its directory")
    if is_unfinished(path):
        return None
    ours = os.path.isfile(os.path.join(path, ROOT_NAME))
    matching = [name for name, matches in MATCHES.items() if matches(path) and not (ours and name == HUB_DIRECTORY)]
    names = ["a checkpoint of lightning-shardckpt"] * ours + matching
    if len(names) > 1:
        listed = " and ".join(names)
        remedy = "Move one elsewhere"
        remedy += ", or give the path of its index file" if indexes(path) else ""
        raise FormatError(f"{path!r} is {listed} at once, so the format is ambiguous. {remedy}.")
    if matching == [DCP] and (directory := find_dcp_directory(path)) is not None:
        with open(os.path.join(directory, DCP_NAME), "rb") as file:
            refuse_lfs_pointer(file.read(64), f"{path!r}, file {DCP_NAME}")
    return matching[0] if matching else None
