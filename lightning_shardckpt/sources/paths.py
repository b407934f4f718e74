"""Find the files of a checkpoint of another format by name. No torch."""

from __future__ import annotations

import os
import re
import zipfile

from lightning_shardckpt.errors import FormatError
from lightning_shardckpt.state.documents import FROZEN

DCP_NAME = ".metadata"
MODEL_AND_OPTIMIZER = "model_and_optim"
"""Where OLMo-core keeps both, below the directory of a step."""


def dcp_place(path: str) -> str | None:
    """The directory that holds the ``.metadata``: ``path``, or OLMo-core's below it; None if there is none."""
    for directory in (path, os.path.join(path, MODEL_AND_OPTIMIZER)):
        if os.path.isfile(os.path.join(directory, DCP_NAME)):
            return directory
    return None


SAFE, BIN, INDEX = "model.safetensors", "pytorch_model.bin", ".index.json"
HUB_WEIGHTS = (SAFE, SAFE + INDEX, BIN, BIN + INDEX)
"""Names that make a directory one of Hugging Face's, the preferred ones first."""


_INDEX = re.compile(rf"({re.escape(SAFE)}|{re.escape(BIN)})\.index(\..+)?\.json")


def is_hub_directory(path: str) -> bool:
    """Return whether a path is a directory with Hugging Face's names of weights, or an index of a variant of them."""
    return any(os.path.lexists(os.path.join(path, name)) for name in HUB_WEIGHTS) or bool(indexes(path))


def indexes(path: str) -> list[str]:
    """Return a directory's index files by name, such as ``model.safetensors.index.json`` or ``….index.ema.json``."""
    try:
        return sorted(filter(_INDEX.fullmatch, os.listdir(path)))
    except OSError:  # no directory
        return []


def only_index(path: str) -> str:
    """The name of the index file in a directory.

    Raises:
        FormatError: naming them, if there are several.
    """
    found = indexes(path)
    if len(found) != 1:
        raise FormatError(f"{path!r} holds {' and '.join(found)}. Give the path of the file that is meant.")
    return found[0]


def is_index(path: str) -> bool:
    """Return whether a path is that of an index file."""
    return _INDEX.fullmatch(os.path.basename(path)) is not None and os.path.isfile(path)


def is_safetensors(path: str) -> bool:
    """Return whether a path is a file that begins as one of safetensors does."""
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        start = file.read(9)
    return path.endswith(".safetensors") or (start[8:] == b"{" and start[4:8] == bytes(4))


def leaves_out(path: str) -> bool:
    """Return whether a file of ``torch.save`` says that frozen parameters are not in it, as a consolidated one may."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            return any(FROZEN.encode() in archive.read(name) for name in names)
    except (OSError, zipfile.BadZipFile):
        return False
