"""Errors about paths without a checkpoint of this package: their content, and suggestions. No torch."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from lightning_shardckpt.errors import CheckpointNotFoundError
from lightning_shardckpt.format.index import ROOT_NAME, is_part
from lightning_shardckpt.storage.other_programs import describe_other_program
from lightning_shardckpt.storage.protocol import Storage
from lightning_shardckpt.storage.router import backend_of, file_path, is_url
from lightning_shardckpt.transfer.reader import Checkpoint

_LOOKED_AT, _DEPTH, _SUGGESTED = 2000, 4, 3

READABLE = (ROOT_NAME, ".metadata")
"""Files that mark a readable checkpoint directory: this package's, and torch.distributed.checkpoint's."""


def open_checkpoint(
    path: str | os.PathLike[str], storage: Storage | None = None, *, storage_options: Mapping[str, Any] | None = None
) -> Checkpoint:
    """Open a checkpoint for reading.

    Args:
        path: of a directory, or a URL.
        storage: of the path; by default chosen by the path.
        storage_options: for URLs, without ``storage``.

    Raises:
        CheckpointNotFoundError: describing the content of the path, and suggesting others.
    """
    path = file_path(path)
    try:
        return Checkpoint(storage or backend_of(path, storage_options), path)
    except CheckpointNotFoundError as error:
        if is_url(path):
            raise
        message = describe_path(path) or str(error).partition("; did you mean")[0]
        raise CheckpointNotFoundError(message + did_you_mean(path)) from None


def describe_path(path: str | os.PathLike[str]) -> str | None:
    """Return a sentence about the content of a path without a checkpoint of this package; None if it is unknown."""
    path = Path(path)
    if not os.path.lexists(path):
        return f"no checkpoint at {str(path)!r}: there is nothing at this path"
    if path.is_file():
        with path.open("rb") as file:
            is_archive = file.read(4) == b"PK\x03\x04"
        kind = " of tensors" if path.suffix == ".safetensors" else ""
        kind = " that torch.load reads, not sharded" if is_archive else kind
        return f"{str(path)!r} is a file{kind}; a sharded checkpoint is a directory"
    if is_unfinished(path):
        return f"{str(path)!r} is the rest of an unfinished save: it has no {ROOT_NAME}, so it cannot be trusted"
    if not path.is_dir() or (path / ROOT_NAME).exists():
        return None
    program = describe_other_program(os.listdir(path))
    return None if program is None else f"{str(path)!r} {program}"


def is_unfinished(path: str | os.PathLike[str]) -> bool:
    """Return whether a directory is the rest of an unfinished save of this package."""
    path = Path(path)
    if (path / ROOT_NAME).exists() or not path.is_dir():
        return False
    return path.name.startswith(".tmp-") or any(map(is_part, os.listdir(path)))


def did_you_mean(path: str | os.PathLike[str]) -> str:
    """Return a question that names checkpoints around ``path``, if there are any: above, else below, else beside it."""
    here = Path.cwd()
    path = here / path
    above = [path.parent] if path.parent != path and _is_checkpoint(path.parent) else []
    suggestions = above or list(islice(_below(path), _SUGGESTED)) or _beside(path)
    names = [one.relative_to(here) if one.is_relative_to(here) and one != here else one for one in suggestions]
    return f"; did you mean {' or '.join(repr(str(name)) for name in names)}?" if names else ""


def _is_checkpoint(path: Path) -> bool:
    return any(os.path.isfile(path / mark) for mark in READABLE)  # False if it is in a directory that may not be read


def _below(path: Path) -> Iterator[Path]:
    """Yield checkpoints under a directory, a few levels deep; looks at a bounded number of directories."""
    for directory, folders, files in islice(os.walk(path), _LOOKED_AT):
        found, is_checkpoint = Path(directory), not set(READABLE).isdisjoint(files)
        if is_checkpoint and found != path:
            yield found
        is_deep = is_checkpoint or len(found.relative_to(path).parts) >= _DEPTH
        folders[:] = [] if is_deep else sorted(name for name in folders if not name.startswith("."))


def _beside(path: Path) -> list[Path]:
    """Return siblings with a similar name."""
    try:
        names = [name for name in sorted(os.listdir(path.parent)) if _is_checkpoint(path.parent / name)]
    except OSError:  # it does not exist, is a file, or may not be read
        return []
    return [path.parent / name for name in difflib.get_close_matches(path.name, names, n=_SUGGESTED, cutoff=0.6)]
