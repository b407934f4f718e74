"""Open the source at a path, of any format, the same on all ranks; suggest other paths where there is none. No torch.

A format of another program is a module of this folder and a line in ``FORMATS``.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_shardckpt.errors import CheckpointNotFoundError, FormatError, MismatchError, ShardCkptError
from lightning_shardckpt.format.index import ROOT_NAME, is_part
from lightning_shardckpt.format.value_checks import check_file_name, checksum
from lightning_shardckpt.sources import hugging_face
from lightning_shardckpt.sources.source import MALFORMED, Source, sharded_source
from lightning_shardckpt.storage.protocol import Storage
from lightning_shardckpt.storage.router import StorageRouter, file_path, is_url
from lightning_shardckpt.system.host import TUNING
from lightning_shardckpt.transfer.reader import Checkpoint

if TYPE_CHECKING:
    from lightning_shardckpt.distributed.ranks import Ranks  # imports torch, which tools that move bytes don't need

# ── formats ───────────────────────────────────────────────────────────────────────────────────────────────────────────

DCP_NAME = ".metadata"
DEEPSPEED_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_MARKS = frozenset({ROOT_NAME, DCP_NAME})  # files that mark a checkpoint directory


def _find_dcp(path: str) -> str | None:
    directories = (path, os.path.join(path, "model_and_optim"))  # of OLMo-core
    return next((one for one in directories if os.path.isfile(os.path.join(one, DCP_NAME))), None)


def _find_deepspeed(path: str) -> str | None:
    with suppress(OSError, ValueError):  # the path may be of a directory that holds those of several steps
        path = os.path.join(path, check_file_name(Path(path, "latest").read_text("utf-8")[:4096].strip()))
    is_one = os.path.isdir(path) and any(map(DEEPSPEED_MODEL.fullmatch, os.listdir(path)))
    return path if is_one else None


FORMATS: list[tuple[str, str, Callable[[str], str | None]]] = [
    ("a checkpoint of torch.distributed.checkpoint", "dcp", _find_dcp),
    ("a checkpoint of DeepSpeed", "deepspeed", _find_deepspeed),
    ("a Hugging Face directory", "hugging_face", hugging_face.find),
    ("a file of torch.save", "torch_save", lambda p: p if os.path.isfile(p) and not hugging_face.find(p) else None),
]
"""Formats of other programs: the name for messages, the module of this folder whose ``open_path`` opens one (it may
import torch), and a function that finds its place at a path by names and first bytes."""


def _find_format(path: str) -> tuple[str, str, str] | None:
    """Return name, module and place of the format of another program at a path.

    None for this package's own, which may contain files of some others, and for the rest of an unfinished save.
    """
    name, ours = os.path.basename(path), os.path.isfile(os.path.join(path, ROOT_NAME))
    if (name in (*_MARKS, "meta.pt") or name.endswith(".distcp") or is_part(name)) and os.path.isfile(path):
        raise CheckpointNotFoundError(f"{path!r} is a part of a sharded checkpoint{did_you_mean(path)}")
    if os.path.isdir(path) and not ours and (name.startswith(".tmp-") or any(map(is_part, os.listdir(path)))):
        return None
    beside = ("hugging_face", "deepspeed") if ours else ()  # an export, or files that somebody put there
    others = ((name, module, find(path)) for name, module, find in FORMATS if module not in beside)
    matching = [(name, module, place) for name, module, place in others if place is not None]
    names = ["a checkpoint of lightning-shardckpt"] * ours + [name for name, _, _ in matching]
    if len(names) > 1:
        raise FormatError(f"{path!r} is {' and '.join(names)} at once, so the format is ambiguous. Move one elsewhere.")
    return matching[0] if matching else None


# ── open ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def open_on_ranks(
    path: str,
    *,
    ranks: Ranks,
    storage: Storage,
    verify: bool = True,
    weights_only: bool = True,
    report: Callable[[], Any] = lambda: None,
) -> Iterator[tuple[Source, list[Any]]]:
    """Open the source at ``path``, the same on all ranks.

    Collective: every rank of ``ranks`` must enter it. While ranks see different checkpoints, they look again, for as
    long as the storage may take to make a change visible to all.

    Args:
        path, storage, verify, weights_only: as in ``open_source``.
        ranks: the ranks that open it together.
        report: returns what the others must know of this rank, as JSON; called in the same exchange.

    Yields:
        The source, closed at the end, and the different reports, in the order of ranks.

    Raises:
        CheckpointNotFoundError: if there is no complete checkpoint.
        MismatchError: if the ranks see different checkpoints at the path.
    """
    sources, deadline = list[Source](), time.monotonic() + storage.visible_within_s

    def look() -> dict[str, Any]:
        opened.close()
        own_report = report()
        try:
            source, identity = open_source(path, storage, verify=verify, weights_only=weights_only)
        except CheckpointNotFoundError as error:
            return {"missing": str(error)}
        opened.callback(source.close)
        sources[:] = [source]
        return {"id": identity, "report": own_report}

    def compare(views: list[dict[str, Any]]) -> list[Any] | None:
        if "id" in views[0] and all(view.get("id") == views[0]["id"] for view in views):
            return [json.loads(text) for text in dict.fromkeys(json.dumps(view["report"]) for view in views)]
        if not any("id" in view for view in views):
            raise CheckpointNotFoundError(views[0]["missing"])
        if time.monotonic() < deadline:
            return None
        found = [view.get("id") or view["missing"] for view in views]
        raise MismatchError(
            f"the ranks see different checkpoints at {path!r}: {found}; the path must be on a file system that all "
            "ranks share"
        )

    with ExitStack() as opened:
        while (answer := ranks.step(f"opening checkpoint {path!r}", look, compare)) is None:
            time.sleep(TUNING.look_again_s)
        yield sources[0], answer


def open_source(
    path: str, storage: Storage, *, verify: bool = True, weights_only: bool = True, for_export: bool = False
) -> tuple[Source, str]:
    """Open the source at a path in this process alone; one of this package without importing torch.

    Args:
        path: of a checkpoint of this package or of another program, or a URL.
        storage: opens checkpoints of this package.
        verify: whether reads verify checksums, if the format has them.
        weights_only: for a file of ``torch.save``, as in ``torch.load``, and for pickled objects of a checkpoint.
        for_export: as in ``sharded_source``.

    Returns:
        The source, which the caller closes, and an identity that is equal if other ranks see the same checkpoint.

    Raises:
        ShardCkptError: if there is none, which suggests other paths, or it is damaged or not laid out as expected.
    """
    if (found := _find_format(path)) is None:
        checkpoint = open_checkpoint(path, storage)
        source = sharded_source(checkpoint, verify, weights_only=weights_only, for_export=for_export)
        return source, checkpoint.root.save_id
    name, module, place = found
    try:
        source = import_module(f"{__package__}.{module}").open_path(place, weights_only)
    except ShardCkptError as error:
        if path in str(error):
            raise
        raise type(error)(f"{path!r}: {error}") from error.__cause__
    except MALFORMED as error:
        raise FormatError(f"{path!r}: not laid out as {name} is: {repr(error)[:500]}") from error
    kinds = {n: {k: (one.spec.dtype, one.spec.shape) for k, one in of.items()} for n, of in source.table.items()}
    return source, f"{name}, {checksum(json.dumps(kinds, sort_keys=True).encode())}"


def open_checkpoint(
    path: str | os.PathLike[str], storage: Storage | None = None, *, storage_options: Mapping[str, Any] | None = None
) -> Checkpoint:
    """Open a checkpoint of this package for reading, by default in the storage that its path or URL names.

    Raises:
        CheckpointNotFoundError: if there is none; suggests other paths.
    """
    path = file_path(path)
    try:
        return Checkpoint(storage or StorageRouter(storage_options=storage_options), path)
    except CheckpointNotFoundError as error:
        raise CheckpointNotFoundError(f"{error}{'' if is_url(path) else did_you_mean(path)}") from None


_LOOKED_AT, _SUGGESTED = 2000, 3


def did_you_mean(path: str | os.PathLike[str]) -> str:
    """Return a question that names checkpoints around ``path``, if there are any: above, else below, else beside it."""
    here = Path.cwd()
    path = here / path
    found = [path.parent] if _is_checkpoint(path.parent) else []
    if not found:
        below = (Path(folder) for folder, _, files in islice(os.walk(path), _LOOKED_AT) if not _MARKS.isdisjoint(files))
        found = sorted(one for one in below if one != path and "/." not in f"/{one.relative_to(path)}")
    if not found:
        beside = {one.name: one for one in path.parent.glob("*") if _is_checkpoint(one)}
        found = [beside[name] for name in difflib.get_close_matches(path.name, sorted(beside))]
    names = [one.relative_to(here) if one.is_relative_to(here) and one != here else one for one in found]
    return f"; did you mean {' or '.join(repr(str(name)) for name in names[:_SUGGESTED])}?" if names else ""


def _is_checkpoint(path: Path) -> bool:
    return any(os.path.isfile(path / mark) for mark in _MARKS)  # False if it is in a directory that may not be read
