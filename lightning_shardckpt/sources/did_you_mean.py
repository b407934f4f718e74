"""Describe what is at a path that is no checkpoint of ours, and guess which path was meant. For messages; no torch."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_shardckpt.errors import CheckpointNotFoundError
from lightning_shardckpt.format.file_names import is_part
from lightning_shardckpt.format.index import ROOT_NAME
from lightning_shardckpt.storage.other_programs import describe_other_program
from lightning_shardckpt.storage.protocol import Storage
from lightning_shardckpt.storage.router import backend_of, is_url
from lightning_shardckpt.transfer.reader import Checkpoint

_LOOKED_AT, _DEPTH, _SUGGESTED = 2000, 4, 3

READABLE = (ROOT_NAME, ".metadata")
"""Files that tell a directory that can be resumed from and consolidated: ours, and torch.distributed.checkpoint's."""


def open_checkpoint(
    path: str | os.PathLike[str],
    storage: Storage | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
    marks: tuple[str, ...] = (ROOT_NAME,),
) -> Checkpoint:
    """The checkpoint at ``path``, opened for reading.

    Args:
        path: of a directory, or a URL.
        storage: where it is; by default the storage of the path.
        storage_options: for URLs, where no storage is given.
        marks: files that tell a directory that the caller can read, to suggest one.

    Raises:
        CheckpointNotFoundError: saying what is there instead, and which path was probably meant.
    """
    path = os.fspath(path)
    if storage is not None:
        return Checkpoint(storage, path)
    try:
        return Checkpoint(backend_of(path, storage_options), path)
    except CheckpointNotFoundError as error:
        if is_url(path):
            raise
        raise CheckpointNotFoundError(explain(path, error, marks)) from None


def explain(path: str, error: CheckpointNotFoundError, marks: tuple[str, ...]) -> str:
    """Return the message of an error about a path of the file system, with what is there, and what may be meant."""
    said = describe(path) or str(error).partition("; did you mean")[0]
    return said + did_you_mean(path, marks)


def describe(path: str | os.PathLike[str]) -> str | None:
    """Return what a path holds that is no checkpoint of ours, as a sentence; None if it cannot be told."""
    path = Path(path)
    if not os.path.lexists(path):
        return f"no checkpoint at {str(path)!r}: there is nothing at this path"
    if path.is_file():
        return f"{str(path)!r} is a file{_kind_of_file(path)}; a sharded checkpoint is a directory"
    if is_unfinished(path):
        return f"{str(path)!r} is what an unfinished save left: it has no {ROOT_NAME}, so nothing of it can be trusted"
    if not path.is_dir() or (path / ROOT_NAME).exists():
        return None
    program = describe_other_program(os.listdir(path))
    return None if program is None else f"{str(path)!r} {program}"


def is_unfinished(path: str | os.PathLike[str]) -> bool:
    """Return whether a directory is what an unfinished save of ours left."""
    path = Path(path)
    if (path / ROOT_NAME).exists() or not path.is_dir():
        return False
    names = os.listdir(path)
    is_colossalais = any(name.startswith("pytorch_model-meta-dist-") for name in names)  # its shards have such names
    return path.name.startswith(".tmp-") or (not is_colossalais and any(map(is_part, names)))


def _kind_of_file(path: Path) -> str:
    if path.suffix == ".safetensors":
        return " of tensors"
    with path.open("rb") as file:
        start = file.read(4)
    return " that torch.load reads, not sharded" if start == b"PK\x03\x04" else ""


def did_you_mean(path: str | os.PathLike[str], marks: tuple[str, ...] = (ROOT_NAME,)) -> str:
    """A question that names checkpoints near ``path``, or nothing; ``marks`` are files that tell one."""
    path = Path.cwd() / path
    found = list(_above(path, marks)) or list(_below(path, marks)) or _beside(path, marks)
    if not found:
        return ""
    names = [repr(_shown(name)) for name in found[:_SUGGESTED]]
    return f"; did you mean {' or '.join(names)}?"


def _shown(path: Path) -> str:
    """Relative to where the user is, if it is below."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) and path != here else str(path)


def _is_one(path: Path, marks: tuple[str, ...]) -> bool:
    return any((path / mark).is_file() for mark in marks)


def _above(path: Path, marks: tuple[str, ...]) -> Iterator[Path]:
    if path.parent != path and _is_one(path.parent, marks):
        yield path.parent


def _below(path: Path, marks: tuple[str, ...]) -> Iterator[Path]:
    """Checkpoints under a directory, a few levels deep; bounded however large the tree is."""
    looked_at, level = 0, [path]
    for _ in range(_DEPTH):
        below: list[Path] = []
        for directory in level:
            for child in _directories(directory):
                looked_at += 1
                if looked_at > _LOOKED_AT:
                    return
                if _is_one(child, marks):
                    yield child
                else:
                    below.append(child)
        level = below


def _beside(path: Path, marks: tuple[str, ...]) -> list[Path]:
    """Siblings with a similar name."""
    siblings = {child.name: child for child in _directories(path.parent) if _is_one(child, marks)}
    return [siblings[name] for name in difflib.get_close_matches(path.name, siblings, n=_SUGGESTED, cutoff=0.6)]


def _directories(path: Path) -> list[Path]:
    try:
        with os.scandir(path) as entries:
            found = (e.path for e in entries if not e.name.startswith(".") and e.is_dir(follow_symlinks=False))
            return sorted(map(Path, found))
    except OSError:  # it does not exist, is a file, or may not be read
        return []
