"""Errors about paths without a checkpoint of this package: their content, and suggestions. No torch."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from lightning_shardckpt.errors import CheckpointNotFoundError
from lightning_shardckpt.format.index import ROOT_NAME, is_part
from lightning_shardckpt.storage.protocol import Storage
from lightning_shardckpt.storage.router import StorageRouter, file_path, is_url
from lightning_shardckpt.system.text import count_text
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
        return Checkpoint(storage or StorageRouter(storage_options=storage_options), path)
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


# ── other programs ────────────────────────────────────────────────────────────────────────────────────────────────────

_READ = "`trainer.fit(ckpt_path=…)`, `load` and `python -m lightning_shardckpt consolidate` read it"
_STEP = re.compile(r"step-\d+")
_WEIGHTS = re.compile(r".+\.safetensors|pytorch_model.*\.bin")

# (pattern of a name in the folder, description of the folder, remedy); the first match counts.
_PROGRAMS = (
    (r"meta\.pt", "a sharded checkpoint of Lightning's FSDPStrategy or ModelParallelStrategy", _READ),
    (r"\.metadata", "a checkpoint of torch.distributed.checkpoint", _READ),
    (
        r"(model\.safetensors|pytorch_model\.bin)(\.index(\..+)?\.json)?",
        "a Hugging Face model directory",
        "`ShardedStrategy(pretrained=…)` and `load` read it",
    ),
    (
        r"zero_to_fp32\.py|global_step\d+|(bf16_)?(zero_pp_rank_\d+_)?mp_rank_\d+_(model|optim)_states\.pt",
        "a checkpoint of DeepSpeed",
        "convert it with the script in it, `python zero_to_fp32.py . OUTPUT --safe_serialization`, and load OUTPUT",
    ),
    (
        r"latest_checkpointed_iteration\.txt|iter_\d{7}",
        "a checkpoint of Megatron-LM",
        "convert it to a Hugging Face model directory with Megatron's tools",
    ),
    (
        r"(pytorch_optim\.bin|optimizer\.safetensors)\.index(\..+)?\.json",
        "an optimizer of ColossalAI's Booster",
        "Booster's weights are read: load the model's directory, and begin with a new optimizer",
    ),
    (
        r"__\d+_\d+\.distcp",
        "an unfinished save of torch.distributed.checkpoint, which TorchTitan and others use: it has no .metadata",
        "load an earlier checkpoint",
    ),
)


def describe_other_program(names: Iterable[str]) -> str | None:
    """Return a predicate that describes a folder of another program and the remedy, or None if it is not recognized.

    Args:
        names: the names of the entries of the folder; files further below may be included, relative to it.

    >>> describe_other_program(["step-9", "step-10/.metadata"])
    'holds 2 folders of steps, as TorchTitan makes; give the path of one of them'
    >>> describe_other_program(["notes.txt"])
    """
    entries = sorted({name.partition("/")[0] for name in names if not is_part(name)})
    for pattern, description, remedy in _PROGRAMS:
        if any(re.fullmatch(pattern, name) for name in entries):
            return f"is {description}, not of lightning-shardckpt; {remedy}"
    if steps := list(filter(_STEP.fullmatch, entries)):
        return f"holds {count_text(len(steps), 'folder')} of steps, as TorchTitan makes; give the path of one of them"
    weights = list(filter(_WEIGHTS.fullmatch, entries))
    if len(weights) == 1:
        return f"holds {weights[0]!r}, but no checkpoint of lightning-shardckpt; give the path of that file"
    if weights:
        return (
            f"holds {len(weights)} files of weights, {weights[0]!r} …, without the index that says which tensor is in "
            "which; put it there (Hugging Face's is model.safetensors.index.json), or give the path of one file"
        )
    return None
